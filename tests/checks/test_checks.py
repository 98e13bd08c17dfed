"""Each check: it holds for a clean model, names the layer of a planted fault, and says where it means nothing."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pytest_modelprobe import ModelProbe, UsageError, assert_no_dead_layers, checks
from pytest_modelprobe.checks import Check, Outcome, battery, rounding
from pytest_modelprobe.checks.check import StateCheck
from pytest_modelprobe.checks.positions import masked_out
from pytest_modelprobe.checks.session import PreparedModel
from pytest_modelprobe.models import CallTracer, ModuleCall

WIDTH, HEADS, WORDS, LENGTH, BATCH = 8, 2, 11, 6, 4
ALL: dict[str, Check] = {name: one for name in checks.__all__ if isinstance(one := getattr(checks, name), Check)}


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def masked(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if self.causal:
            n = scores.shape[-1]
            seen = torch.ones(n, n, dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~seen, float("-inf"))
        return scores if mask is None else scores.masked_fill(mask[:, None, None] == 0, float("-inf"))

    def softmax(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        return self.out((self.softmax(self.masked(scores, mask)) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.drop = Attention(causal), nn.Dropout(0.3)
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), mask)
        return x + self.drop(self.fc2(self.act(self.fc1(self.norm2(x)))))


class Net(nn.Module):
    """Three blocks between an embedding and a head: the fault goes to the middle one."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(causal) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.head(self.norm(x))


class Vision(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(4, 5),
        )  # fmt: skip


class Layer(nn.Module):
    """Whatever a function does, as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def between(layer: nn.Module | Callable[[Tensor], Tensor]) -> nn.Sequential:
    """Return five layers, the given one is "2"."""
    middle = layer if isinstance(layer, nn.Module) else Layer(layer)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), middle, nn.Linear(6, 6), nn.Linear(6, 3))


def planted(module: nn.Module, **methods: Any) -> None:
    """Give one module other methods, as an edit of its class would."""
    module.__class__ = type(type(module).__name__, (type(module),), methods)


def named(outcome: Outcome) -> str | None:
    """Return the layer that is told of, first thing in the message."""
    assert outcome.verdict == "broken", outcome
    assert outcome.layer
    assert str(outcome).startswith((f"{outcome.layer} ", f"layer '{outcome.layer}' ("))
    return outcome.layer


@pytest.fixture
def ids(probe: ModelProbe) -> Tensor:
    return probe.randint(0, WORDS, (BATCH, LENGTH))


@pytest.fixture
def mask() -> Tensor:
    return torch.ones(BATCH, LENGTH, dtype=torch.long)


@pytest.fixture
def rows(probe: ModelProbe) -> Tensor:
    return probe.randn(5, 6)


@pytest.fixture
def images(probe: ModelProbe) -> Tensor:
    return probe.randn(3, 3, 9, 9)


@pytest.fixture
def net(probe: ModelProbe) -> Any:
    return probe.build(Net)


@pytest.fixture
def attn(net: Any) -> Attention:
    """The attention of the middle block."""
    return net.blocks[1].attn


# --- of every check -----------------------------------------------------------------------------------------------

OPTIONS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "optimizer_covers": lambda model: {"optimizer": torch.optim.SGD(model.parameters(), 0.1)},
    "ema_tracks": lambda model: {"average": model, "decay": 0.9, "updates": lambda: None},
    "gradient_accumulation": lambda model: {"loss": lambda y: y.mean()},
    "overfits_batch": lambda model: {"loss": lambda y: y.square().mean()},
    "padding_invariant": lambda model: {"attention_mask": torch.ones(BATCH, LENGTH)},
    "device_parity": lambda model: {"device": "cpu"},
}


def options_of(name: str, model: nn.Module) -> dict[str, Any]:
    return OPTIONS.get(name, lambda _: {})(model)


def test_no_check_means_anything_for_a_model_on_meta(probe: ModelProbe, ids: Tensor) -> None:
    with torch.device("meta"):
        model = Net()
    found = checks.causal.outcome(probe, model, ids)
    assert found.verdict == "not applicable"
    assert str(found) == "causal is not applicable to Net: the model is on the meta device and has no numbers"


@pytest.mark.parametrize("name", ["finite", "padding_invariant", "train_eval_differ", "incremental"])
def test_the_layer_that_raised_is_told(name: str, probe: ModelProbe, net: Any, ids: Tensor) -> None:
    planted(net.blocks[1].fc1, forward=lambda self, x: x.no_such_method())
    net.dropless = nn.BatchNorm1d(2)  # something for train_eval_differ to look for
    found = ALL[name].outcome(probe, net, ids, **options_of(name, net))
    assert found.verdict == "not applicable"
    assert "blocks.1.fc1 raised AttributeError" in found.text


def test_as_an_assertion_it_returns_or_raises_the_outcome_and_refuses_what_it_means_nothing_for(
    probe: ModelProbe, net: Any, attn: Attention, ids: Tensor
) -> None:
    assert checks.causal(probe, net, ids) == checks.causal.outcome(probe, net, ids)
    with pytest.raises(UsageError, match="causal is not applicable to Net: no input has more than one position"):
        checks.causal(probe, net, ids[:, :1])
    attn.causal = False
    with pytest.raises(AssertionError) as error:
        checks.causal(probe, net, ids)
    assert str(error.value) == str(checks.causal.outcome(probe, net, ids))


def test_a_message_lists_all_that_is_broken_the_first_one_first(
    probe: ModelProbe, net: Any, attn: Attention, ids: Tensor
) -> None:
    attn.causal = False
    first, empty, columns, *table = str(checks.causal.outcome(probe, net, ids)).splitlines()
    assert first.startswith("blocks.1.attn is not causal: the first 3 of 6 positions changed by ")
    assert not empty
    assert columns.split("  ")[0] == "tensor"
    assert [line.split("  ")[0] for line in table[:3]] == [
        "blocks.1.attn input of blocks.1.attn.out",
        "blocks.1.attn.out output",
        "blocks.1.attn output",
    ]


def test_keywords_of_the_model_that_a_check_uses_itself_are_given_apart(probe: ModelProbe, rows: Tensor) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, axis: int) -> Tensor:
            return x.flip(axis)

    assert checks.batch_independent(probe, Model(), rows, kwargs={"axis": 1}).verdict == "holds"


def test_a_compiled_model_is_told_under_its_own_names(probe: ModelProbe, rows: Tensor) -> None:
    model = torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Softmax(0), nn.Linear(6, 6)), backend="eager")
    assert named(checks.batch_independent.outcome(probe, model, rows)) == "1"


def refusing(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    raise NotImplementedError("this backend compiles nothing")


@pytest.mark.parametrize("name", ["copy_and_pickle", "checkpoint_parity"])
def test_a_copy_of_a_compiled_model_runs_eagerly_too(probe: ModelProbe, rows: Tensor, name: str) -> None:
    eager = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Dropout(0.3), nn.Linear(6, 2))
    model = torch.compile(eager, backend=refusing)
    assert ALL[name].outcome(probe, model, rows) == ALL[name](probe, eager, rows)


def test_each_check_is_in_the_battery_or_said_to_be_apart() -> None:
    of_a_state = {name for name in checks.__all__ if isinstance(getattr(checks, name), StateCheck)}
    assert {*checks.STANDARD, *battery.APART} == {*ALL, *of_a_state}


# --- clean models -------------------------------------------------------------------------------------------------

FOR_TEXT = [
    "registered", "initialized", "deterministic", "eval_stable", "seeded", "train_eval_differ", "batch_independent",
    "any_batch_size", "causal", "padding_invariant", "state_unchanged_by_forward", "inputs_unchanged_by_forward",
    "state_dict_round_trip", "copy_and_pickle", "dtype_parity", "layout_parity", "checkpoint_parity",
    "optimizer_covers",
]  # fmt: skip


@pytest.mark.parametrize("name", FOR_TEXT)
def test_a_clean_transformer_has_the_property(name: str, probe: ModelProbe, net: Any, ids: Tensor) -> None:
    assert ALL[name].outcome(probe, net, ids, **options_of(name, net)).verdict == "holds"


def test_a_clean_convolutional_net_has_the_standard_properties(probe: ModelProbe, images: Tensor) -> None:
    outcomes = checks.standard(probe, probe.build(Vision), images, loss=lambda y: y.square().mean())
    assert {outcome.verdict for outcome in outcomes} == {"holds", "not applicable"}


# --- where a check means nothing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "model", "shape", "why"),
    [
        ("train_eval_differ", nn.Linear(6, 2), (3, 6), "no Dropout with 0 < p < 1, and no BatchNorm"),
        ("batch_independent", nn.Linear(6, 2), (1, 6), "the batch has one row"),
        ("batch_independent", Layer(lambda x: x.sum()), (3, 6), "no layer returns a tensor with an axis of 3 rows"),
        ("causal", nn.Linear(6, 2), (3, 1, 6), "no input has more than one position"),
        (
            "padding_invariant",
            nn.Linear(6, 2),
            (3, 5, 6),
            "no argument of shape (3, 5), the batch and axis 1 of input, is called a mask",
        ),
        ("initialized", nn.ReLU(), (3, 6), "no parameters or buffers of numbers"),
        ("layout_parity", Layer(lambda x: x + 1), (), "no input has a layout"),
        ("checkpoint_parity", nn.Linear(6, 2), (3, 6), "no children"),
        ("gradient_accumulation", nn.Linear(6, 2), (3, 6), "without loss="),
        ("overfits_batch", nn.Linear(6, 2), (3, 6), "without loss="),
        ("gradcheck", Layer(lambda x: x.detach()), (3, 6), "no floating output requires a gradient"),
    ],
)
def test_it_says_why_a_check_means_nothing(
    name: str, model: nn.Module, shape: tuple[int, ...], why: str, probe: ModelProbe
) -> None:
    found = ALL[name].outcome(probe, model, probe.randn(*shape) if shape else torch.tensor(1.0))
    assert found.verdict == "not applicable"
    assert why in found.text


def test_several_masks_have_to_be_told_apart(probe: ModelProbe, rows: Tensor) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, mask: Tensor, other_mask: Tensor) -> Tensor:
            return x

    both = {"mask": torch.ones(5, 6), "other_mask": torch.ones(5, 6)}
    found = checks.padding_invariant.outcome(probe, Two(), rows, kwargs=both)
    assert found.text == (
        "it is not known which mask is of (batch, positions), among mask and other_mask: give mask= its name"
    )


def test_a_loss_below_zero_has_no_share_to_be_brought_down_to(probe: ModelProbe, rows: Tensor) -> None:
    found = checks.overfits_batch.outcome(probe, nn.Linear(6, 2), rows, loss=lambda y: -y.square().mean())
    assert found.verdict == "not applicable"


# --- repetition ---------------------------------------------------------------------------------------------------


class OwnNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=self.generator)


def test_a_generator_of_its_own_is_neither_deterministic_nor_goes_by_the_seed(probe: ModelProbe, rows: Tensor) -> None:
    for check in (checks.deterministic, checks.seeded):
        assert named(check.outcome(probe, between(OwnNoise()), rows)) == "2"


def test_attention_that_drops_out_in_evaluation_is_random(
    probe: ModelProbe, net: Any, attn: Attention, ids: Tensor
) -> None:
    planted(attn, softmax=lambda self, s: F.dropout(s.softmax(-1), 0.1))
    assert named(checks.eval_stable.outcome(probe, net.eval(), ids)) == "blocks.1.attn"


def test_dropout_that_is_always_on_is_random_in_evaluation(probe: ModelProbe, net: Any, ids: Tensor) -> None:
    planted(net.blocks[1].drop, forward=lambda self, x: F.dropout(x, self.p, True))
    assert named(checks.eval_stable.outcome(probe, net, ids)) == "blocks.1.drop"


def test_a_path_that_is_rarely_dropped_in_evaluation_is_random(probe: ModelProbe) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Layer(lambda x: x * (torch.rand(len(x), 1) > 0.05)))
    assert named(checks.eval_stable.outcome(probe, model, probe.randn(1, 4))) == "1"
    unused = nn.Sequential(nn.Linear(4, 4), Layer(lambda x: (torch.rand(1), x)[1]))
    assert checks.eval_stable(probe, unused, probe.randn(1, 4)).text.startswith("3 outputs in 53 runs")


def test_an_error_of_what_follows_the_layers_is_not_the_models(probe: ModelProbe, rows: Tensor) -> None:
    def before(call: ModuleCall, args: Any, kwargs: Any) -> None:
        raise NotImplementedError("no such operation")

    with PreparedModel(probe, nn.Linear(6, 2), (rows,)).ready() as prepared:
        tracer = CallTracer(prepared.layers.modules, ModuleCall, before=before)
        said = r"^the layers cannot be followed: NotImplementedError: no such operation$"
        with tracer, pytest.raises(checks.NotApplicableError, match=said):
            prepared.reference()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_an_encoder_that_nests_its_padded_rows_is_healthy(probe: ModelProbe) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3, batch_first=True), 2)
    padded = torch.tensor([[False, False, False], [False, False, True]])
    assert checks.seeded(probe, model, probe.randn(2, 3, WIDTH), src_key_padding_mask=padded).verdict == "holds"


def test_dropout_that_an_evaluation_switches_off_for_good_is_named(probe: ModelProbe, net: Any, ids: Tensor) -> None:
    def train(self: Any, mode: bool = True) -> Any:
        if not mode:
            self.drop.p = 0.0
        return Block.train(self, mode)

    planted(net.blocks[1], train=train)
    assert named(checks.train_eval_differ.outcome(probe, net, ids)) == "blocks.1.drop"


def test_a_norm_that_stays_in_training_mode_is_named(probe: ModelProbe, images: Tensor) -> None:
    model = Vision()
    planted(model[4], train=lambda self, mode=True: self)
    assert named(checks.train_eval_differ.outcome(probe, model, images)) == "4"


# --- batch --------------------------------------------------------------------------------------------------------


def test_a_softmax_over_the_batch_mixes_it(probe: ModelProbe, net: Any, attn: Attention, ids: Tensor) -> None:
    attn.causal = False
    planted(attn, softmax=lambda self, s: s.softmax(0))
    assert named(checks.batch_independent.outcome(probe, net, ids)) == "blocks.1.attn"


def test_a_norm_over_the_batch_mixes_it(probe: ModelProbe, net: Any, ids: Tensor) -> None:
    planted(net.blocks[1].norm2, forward=lambda self, x: (x - x.mean(0)) / x.std(0))
    assert named(checks.batch_independent.outcome(probe, net, ids)) == "blocks.1.norm2"


def test_a_batch_size_in_a_view_is_named(probe: ModelProbe, rows: Tensor) -> None:
    found = checks.any_batch_size.outcome(probe, between(lambda x: x.view(5, 6)), rows)
    assert named(found) == "2"
    assert found.text.startswith("layer '2' (Layer) takes no batch of 1, only of 5: layer '2' raised RuntimeError")


# --- sequence -----------------------------------------------------------------------------------------------------


def test_attention_transposed_knows_of_later_positions(
    probe: ModelProbe, net: Any, attn: Attention, ids: Tensor
) -> None:
    planted(attn, softmax=lambda self, s: s.softmax(-1).transpose(-2, -1))
    assert named(checks.causal.outcome(probe, net, ids)) == "blocks.1.attn"


def test_a_head_that_starts_from_zero_hides_no_fault(probe: ModelProbe, rows: Tensor) -> None:
    model = between(lambda x: x - x.mean(0))
    nn.init.zeros_(model[4].weight)
    found = checks.batch_independent.outcome(probe, model, rows)
    assert named(found) == "2"
    assert "(root) output" in found.text


def test_positions_in_the_middle_break_equivariance(probe: ModelProbe) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Layer(lambda x: x + torch.arange(6.0)[:, None]), nn.Linear(4, 4))
    assert named(checks.permutation_equivariant.outcome(probe, model, probe.randn(2, 6, 4))) == "1"


def test_an_order_that_comes_out_is_named(probe: ModelProbe) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Layer(lambda x: x[:, -1]))
    assert named(checks.permutation_invariant.outcome(probe, model, probe.randn(2, 6, 4))) == "(root)"


# --- what a forward leaves behind ---------------------------------------------------------------------------------


def test_a_counter_of_forwards_is_named(probe: ModelProbe, rows: Tensor) -> None:
    class Counter(nn.Module):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x * self.count

    found = checks.state_unchanged_by_forward.outcome(probe, between(Counter()), rows)
    assert named(found) == "2"


def test_running_statistics_that_run_on_in_evaluation_are_named(probe: ModelProbe, images: Tensor) -> None:
    model = Vision()
    planted(model[4], train=lambda self, mode=True: self)
    assert named(checks.state_unchanged_by_forward.outcome(probe, model, images)) == "4.running_mean"


def test_a_mask_kept_of_another_batch_is_named(
    probe: ModelProbe, attn: Attention, net: Any, ids: Tensor, mask: Tensor
) -> None:
    def masked(self: Any, s: Tensor, mask: Tensor) -> Tensor:
        if getattr(self, "cache", None) is None:
            self.cache = mask
        return Attention.masked(self, s, self.cache)

    mask[0, 3:] = 0
    planted(attn, masked=masked)
    found = checks.state_unchanged_by_forward.outcome(probe, net, ids, attention_mask=mask)
    assert named(found) == "blocks.1.attn"


def test_an_activation_that_writes_into_the_input_is_named(probe: ModelProbe, rows: Tensor) -> None:
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True), nn.Identity())
    assert named(checks.inputs_unchanged_by_forward.outcome(probe, model, rows)) == "1"


def test_code_between_two_layers_that_writes_into_the_input_is_named(probe: ModelProbe, rows: Tensor) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc1(x)
            x += 1
            return self.fc2(h)

    model = nn.Sequential(nn.Identity(), Inner(), nn.Identity())
    assert named(checks.inputs_unchanged_by_forward.outcome(probe, model, rows)) == "1"


# --- what a model is made of --------------------------------------------------------------------------------------


def test_a_block_in_a_plain_list_is_named(probe: ModelProbe, net: Any) -> None:
    net.blocks[1].extra = [nn.Linear(2, 2)]
    assert named(checks.registered.outcome(probe, net)) == "blocks.1.extra[0]"


def test_a_tensor_that_is_no_buffer_is_named(probe: ModelProbe, net: Any) -> None:
    net.blocks[1].attn.bias = torch.zeros(2, 2)
    assert named(checks.registered.outcome(probe, net)) == "blocks.1.attn.bias"


def test_a_weight_that_nothing_wrote_to_is_named(probe: ModelProbe) -> None:
    def factory() -> nn.Module:
        model = Net()
        model.blocks[1].fc1.weight = nn.Parameter(torch.empty(2 * WIDTH, WIDTH))
        return model

    assert named(checks.initialized.outcome(probe, factory(), factory=factory)) == "blocks.1.fc1.weight"


class Scaled(nn.Module):
    """A layer with a scale that may be uninitialized."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale


def test_the_factory_of_build_shows_what_nothing_wrote_to(probe: ModelProbe, rows: Tensor) -> None:
    model = probe.build(lambda: Scaled(torch.empty(WIDTH)))
    with pytest.raises(AssertionError, match=r"^scale is not initialized: 8 of 8 elements were never written to"):
        checks.standard(probe, model, probe.randn(3, WIDTH), only="initialized")


def test_what_is_loaded_after_build_was_written_to(probe: ModelProbe) -> None:
    model = probe.build(lambda: Scaled(torch.empty(WIDTH)))
    model.load_state_dict(Scaled(torch.ones(WIDTH)).state_dict())
    found = checks.initialized(probe, model)
    assert found.text == (
        "3 parameters and buffers, as far as values show; not looked at, whether each was written to: no factory="
    )
    nn.init.constant_(model.scale, float("nan"))
    assert checks.initialized.outcome(probe, model).layer == "scale"


def encoder(*, drawn: bool, frozen: bool = False) -> nn.Module:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16), 3, enable_nested_tensor=False)
    for layer in list(model.layers)[1:]:
        layer.requires_grad_(not frozen)
        for parameter in layer.parameters():
            if drawn and parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
    return model


def test_layers_that_are_copies_with_the_same_weights_are_a_hint(probe: ModelProbe) -> None:
    found = checks.initialized.outcome(probe, encoder(drawn=False))
    name = "layers.1.self_attn.in_proj_weight"
    assert (found.verdict, found.layer) == ("hint", name)
    first = f"{name} has the same values as {name.replace('1', '0')}, though they are two parameters"
    assert found.text.splitlines()[0] == first
    assert found.text.count(" layers.0.") == 8 + 1  # four weights of two copies, and the first line


def test_layers_that_are_drawn_anew_frozen_or_tied_are_no_copies(probe: ModelProbe) -> None:
    tied = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
    tied[1].weight = nn.Parameter(tied[0].weight.data)
    teacher = nn.ModuleDict({"student": nn.Linear(WIDTH, WIDTH)})
    teacher["teacher"] = copy.deepcopy(teacher["student"])
    for model in (encoder(drawn=True), encoder(drawn=False, frozen=True), tied, teacher):
        assert checks.initialized.outcome(probe, model).verdict == "holds"


def test_a_renamed_key_that_leaves_random_weights_is_named(probe: ModelProbe, net: Any, ids: Tensor) -> None:
    def load_state_dict(self: Any, state: Any, strict: bool = True) -> Any:
        state["blocks.1.ff1.weight"] = state.pop("blocks.1.fc1.weight")
        return Net.load_state_dict(self, state, strict=False)

    planted(net, load_state_dict=load_state_dict)
    assert named(checks.state_dict_round_trip.outcome(probe, net, ids)) == "blocks.1.fc1"


def test_a_tie_lost_in_loading_is_named(probe: ModelProbe, net: Any, ids: Tensor) -> None:
    def load_state_dict(self: Any, state: Any, strict: bool = True) -> Any:
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())
        return Net.load_state_dict(self, state, strict)

    net.head.weight = net.embed.weight
    planted(net, load_state_dict=load_state_dict)
    assert named(checks.state_dict_round_trip.outcome(probe, net, ids)) == "head.weight"


def test_a_state_dict_that_is_not_taken_back_is_told(probe: ModelProbe, net: Any, ids: Tensor) -> None:
    planted(net, state_dict=lambda self, *args, **kwargs: {"more": torch.ones(1)})
    found = checks.state_dict_round_trip.outcome(probe, net, ids)
    assert found.layer == "(root)"
    assert str(found).startswith("(root) cannot load its own state_dict: RuntimeError")


def test_a_lambda_that_cannot_be_pickled_is_named(probe: ModelProbe, net: Any, ids: Tensor) -> None:
    net.blocks[1].act.function = lambda x: x
    assert named(checks.copy_and_pickle.outcome(probe, net, ids)) == "blocks.1.act"


class CopiedWithoutScale(nn.Module):
    scale = 1.0

    def __deepcopy__(self, memo: Any) -> Any:
        return type(self)()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_layer_that_is_another_after_a_copy_is_named(probe: ModelProbe, rows: Tensor) -> None:
    layer = CopiedWithoutScale()
    layer.scale = 2.0
    assert named(checks.copy_and_pickle.outcome(probe, between(layer), rows)) == "2"


def test_what_a_device_without_float64_holds_is_compared_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.dtype] = []
    cpu = Tensor.cpu
    monkeypatch.setattr(rounding, "widest", lambda device: torch.float32)
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: moved.append(tensor.dtype) or cpu(tensor))
    assert rounding.relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])) == 0.1
    assert rounding.relative_error(torch.tensor([3, 4]), torch.tensor([3, 9])) == 1.0
    assert rounding.as_double(torch.ones(1)).dtype == torch.float64
    assert moved == [torch.float32] * 2 + [torch.int64] * 2 + [torch.float32]


# --- elsewhere and otherwise --------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_clean_model_is_the_same_on_cuda(probe: ModelProbe, net: Any, ids: Tensor) -> None:
    assert checks.device_parity(probe, net, ids).verdict == "holds"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_code_for_one_device_is_named(probe: ModelProbe, rows: Tensor) -> None:
    model = between(lambda x: x * 2 if x.is_cuda else x)
    assert named(checks.device_parity.outcome(probe, model, rows)) == "2"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_tensor_that_stays_behind_on_the_cpu_is_named(probe: ModelProbe, rows: Tensor) -> None:
    turn = torch.eye(6)
    assert named(checks.device_parity.outcome(probe, between(lambda x: x @ turn), rows)) == "2"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_average_that_is_kept_on_the_cpu_follows_a_model_on_cuda() -> None:
    probe, model = ModelProbe(device="cuda", seed=0), between(nn.BatchNorm1d(6))
    ema = AveragedModel(model, device="cpu", multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    ema.update_parameters(model)

    def outcome(decay: float) -> Outcome:
        return checks.ema_tracks.outcome(
            probe, model, average=ema, decay=decay, updates=lambda: ema.update_parameters(model)
        )

    assert outcome(0.9).text == "8 parameters, 2 buffers"
    assert named(outcome(0.5)) == "0.weight"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_masks_on_the_cpu_and_ids_of_padding_on_cuda_say_together_what_is_left_out() -> None:
    class Masked(nn.Module):
        config = types.SimpleNamespace(pad_token_id=0)

        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
            return F.one_hot(ids, 9) * attention_mask[..., None]

    probe = ModelProbe(device="cuda", seed=0)
    ids, mask = torch.tensor([[3, 4, 0, 5], [1, 2, 6, 8]], device="cuda"), torch.ones(2, 4)
    mask[1, 3] = 0
    with PreparedModel(probe, Masked(), (ids, mask)).ready() as prepared:
        left_out = masked_out(prepared, "input[0]", 1).positions
    assert left_out.tolist() == [[False, False, True, False], [False, False, False, True]]


def test_an_overflow_of_half_precision_is_named(probe: ModelProbe, rows: Tensor) -> None:
    model = between(lambda x: x * 1e6)
    assert named(checks.dtype_parity.outcome(probe, model, rows, dtype=torch.float16)) == "2"


def test_a_view_that_wants_contiguous_rows_is_named(probe: ModelProbe, images: Tensor) -> None:
    model = nn.Sequential(nn.Identity(), Layer(lambda x: x.view(len(x), -1)), nn.Linear(243, 2))
    found = checks.layout_parity.outcome(probe, model, images)
    assert named(found) == "1"
    assert found.text.startswith("layer '1' (Layer) raised RuntimeError: view size is not compatible")


def test_a_path_that_is_taken_without_gradients_alone_is_named(probe: ModelProbe, rows: Tensor) -> None:
    model = between(lambda x: x if torch.is_grad_enabled() else 2 * x)
    found = checks.checkpoint_parity.outcome(probe, model, rows)
    assert named(found) == "2"
    assert found.text.startswith(
        "layer '2' (Layer) returns another output under checkpointing (reentrant): changed by 100 %"
    )


class Stepwise(nn.Module):
    """A decoder that calls its cell for each position, with the state of the position before."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = (x.new_zeros(len(x), 8),) * 2
        outputs = []
        for one in x.unbind(1):
            state = self.cell(one, state)
            outputs.append(self.out(state[0]))
        return torch.stack(outputs, 1)


def test_what_takes_its_state_in_a_tuple_is_not_checkpointed_reentrant(probe: ModelProbe) -> None:
    found = checks.checkpoint_parity(probe, Stepwise(), probe.randn(3, 5, 4))
    assert found.text == "6 parameters, 2 modules checkpointed, not reentrant"


@pytest.mark.parametrize(
    ("name", "how", "forward"),
    [
        ("dtype_parity", "bfloat16", lambda x: x * 1.003 if x.dtype == torch.float64 else x),
        ("dtype_parity", "autocast", lambda x: x * 1.003 if x.dtype == torch.float64 else x),
    ],
)
def test_an_error_below_the_rounding_of_half_precision_is_named(
    name: str, forward: Any, how: str, probe: ModelProbe, rows: Tensor
) -> None:
    dtype = torch.float32 if how == "autocast" else torch.bfloat16
    model = between(forward).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        found = ALL[name].outcome(probe, model, rows.to(dtype), **options_of(name, model))
    assert named(found) == "2"
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_code_for_half_precision_alone_is_judged_as_it_is(probe: ModelProbe, rows: Tensor) -> None:
    model = between(lambda x: x - x.mean(0) if x.dtype == torch.bfloat16 else x).bfloat16()
    assert named(checks.batch_independent.outcome(probe, model, rows.bfloat16())) == "2"


class HalfAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if self.fc.weight.dtype != torch.bfloat16:
            raise TypeError("only bfloat16")
        return self.fc(x)


def test_a_model_that_is_made_for_half_precision_is_checked(probe: ModelProbe, rows: Tensor) -> None:
    model = nn.Sequential(HalfAlone(), nn.ReLU()).bfloat16()
    assert checks.checkpoint_parity(probe, model, rows.bfloat16())


# --- training -----------------------------------------------------------------------------------------------------


class TokenLoss(nn.Module):
    """The loss within the model, as transformers have it: a mean over the tokens that count."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(ids).flatten(0, 1), labels.flatten())


def test_a_mean_over_tokens_is_no_mean_over_rows(probe: ModelProbe, ids: Tensor) -> None:
    labels = ids.clone()
    labels[0, 1:] = -100
    found = checks.gradient_accumulation.outcome(probe, probe.build(TokenLoss), ids, labels, loss=lambda loss: loss)
    assert (found.layer or "").startswith("net.")
    assert named(found)


def test_a_loss_that_is_a_sum_grows_with_the_batch(probe: ModelProbe, net: Any, ids: Tensor) -> None:
    assert named(checks.gradient_accumulation.outcome(probe, net, ids, loss=lambda y: y.square().sum()))


def test_a_detach_in_the_middle_is_a_wrong_gradient_of_what_is_before_it(probe: ModelProbe, rows: Tensor) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Layer(lambda x: x.detach()), nn.Linear(6, 3))
    found = checks.gradcheck.outcome(probe, model, rows)
    assert named(found) == "1.weight"
    assert found.text.startswith("1.weight has a wrong gradient: backward computes none, finite differences ")


def test_a_layer_made_after_the_optimizer_is_named(probe: ModelProbe, net: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net.blocks[1].fc1.bias = nn.Parameter(torch.zeros(2 * WIDTH))
    assert named(checks.optimizer_covers.outcome(probe, net, optimizer=optimizer)) == "blocks.1.fc1.bias"


def test_parameters_of_another_model_in_the_optimizer_are_told(probe: ModelProbe, net: Any) -> None:
    optimizer = torch.optim.SGD([*net.parameters(), nn.Parameter(torch.ones(1))], 0.1)
    assert named(checks.optimizer_covers.outcome(probe, net, optimizer=optimizer)) == "(optimizer)"


def test_a_softmax_before_a_cross_entropy_does_not_learn(probe: ModelProbe, rows: Tensor) -> None:
    model, labels = probe.build(lambda: nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 10))), torch.arange(5)
    assert checks.overfits_batch(probe, model, rows, loss=lambda y: F.cross_entropy(y, labels)).verdict == "holds"
    twice = checks.overfits_batch.outcome(probe, model, rows, loss=lambda y: F.cross_entropy(y.softmax(-1), labels))
    assert named(twice) == "(root)"


def test_a_part_that_never_moves_is_named(probe: ModelProbe, rows: Tensor) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Layer(lambda x: x.detach()), nn.Linear(6, 1), nn.Sigmoid())
    found = checks.overfits_batch.outcome(probe, model, rows, loss=lambda y: (y + 1).mean(), steps=3)
    assert named(found) == "0.weight"
    assert "4 parameters never moved" in found.text
    assert " in 3 steps; " in found.text


def test_a_model_of_a_narrow_dtype_is_trained(probe: ModelProbe, rows: Tensor) -> None:
    model = probe.build(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).half())
    assert checks.overfits_batch(probe, model, rows.half(), loss=lambda y: y.float().square().mean())


def test_a_step_that_does_nothing_does_not_learn(probe: ModelProbe, rows: Tensor) -> None:
    class Idle(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return None

    model = between(nn.Tanh())
    found = checks.overfits_batch.outcome(
        probe, model, rows, loss=lambda y: y.square().mean(), steps=3, optimizer=lambda p: Idle(p, 0.1)
    )
    assert named(found) == "0.weight"
    assert "6 parameters never moved" in found.text


def test_an_average_that_leaves_out_a_part_is_named(probe: ModelProbe) -> None:
    model = between(nn.Linear(6, 6))
    average = copy.deepcopy(model)

    def updates() -> None:
        with torch.no_grad():
            for name, p in model.named_parameters():
                if not name.startswith("2."):
                    average.get_parameter(name).lerp_(p, 0.1)

    assert named(checks.ema_tracks.outcome(probe, model, average=average, decay=0.9, updates=updates)) == "2.weight"


def test_the_message_of_an_assertion_in_a_check_of_ones_own_names_the_type_of_a_layer_once(probe: ModelProbe) -> None:
    def alive(probe: ModelProbe, model: nn.Module, *inputs: Tensor) -> None:
        assert_no_dead_layers(probe.run(model, *inputs))

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    nn.init.constant_(model[0].bias, -100.0)
    remove = checks.add_standard({"alive": alive})
    try:
        with pytest.raises(AssertionError, match=r"^layer '1' \(ReLU\) is dead: all 16 outputs are 0"):
            checks.standard(probe, model, torch.ones(2, 4), only="alive")
    finally:
        remove()
