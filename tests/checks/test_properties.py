"""What a check has to see, and what it must not take for a fault: one model for each claim."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pytest_modelprobe import ModelProbe, UsageError, checks


class Code(nn.Module):
    """Any code, as a layer; attributes by keyword."""

    def __init__(self, code: Any, **attributes: Any) -> None:
        super().__init__()
        self.code = code
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.code(self, *args, **kwargs)


# --- batch --------------------------------------------------------------------------------------------------------


class LastStep(nn.Module):
    """Classifies a sequence by its last step."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 8, batch_first=batch_first), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def test_a_recurrence_over_the_batch_is_named(probe: ModelProbe) -> None:
    found = checks.batch_independent.outcome(probe, LastStep(batch_first=False), probe.randn(4, 6, 3))
    assert found.layer == "lstm"
    assert str(found).startswith("lstm mixes the batch: the last row changed by ")


def test_a_sum_of_the_rows_so_far_is_named(probe: ModelProbe) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Code(lambda self, x: x.cumsum(0)))
    assert checks.batch_independent.outcome(probe, model, probe.randn(5, 3)).layer == "1"


class Graph(nn.Module):
    """Adds to each node those that point to it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        return nodes.index_add(0, edges[1], self.fc(nodes)[edges[0]])


def test_nodes_that_edges_point_to_are_no_batch(probe: ModelProbe) -> None:
    edges = torch.tensor([[0, 1, 2, 3, 1], [1, 0, 3, 2, 3]])
    found = checks.batch_independent.outcome(probe, Graph(), probe.randn(4, 3), edges)
    assert found.text.startswith("the inputs differ in size along axis 0: input[0] has 4 and input[1] has 2")


def test_items_of_a_list_that_are_the_rows_have_no_batch(probe: ModelProbe) -> None:
    items = [probe.randn(3, 8, 8), probe.randn(3, 8, 8, name="second")]
    model = Code(lambda self, images: [self.conv(image).amax((1, 2)) for image in images], conv=nn.Conv2d(3, 6, 3))
    found = checks.batch_independent.outcome(probe, model, items)
    assert found.text == "the inputs are lists with an item for each row, and have no axis of a batch"


@pytest.mark.parametrize("faulty", [False, True])
def test_a_layer_that_wires_the_first_graph_of_the_batch_alone_is_named(probe: ModelProbe, faulty: bool) -> None:
    def wired(self: Any, x: Tensor, edges: Tensor) -> Tensor:
        n = 1 if faulty else len(x)
        return self.fc(x + F.pad(edges[:n] @ x[:n], (0, 0, 0, 0, 0, len(x) - n)))

    layer = Code(wired, fc=nn.Linear(3, 3))
    model = Code(lambda self, x, edges: self.head(self.layer(x, edges)).mean(1), layer=layer, head=nn.Linear(3, 2))
    edges = (probe.randn(4, 6, 6, name="edges") > 0).float()
    found = checks.batch_independent.outcome(probe, model, probe.randn(4, 6, 3), edges)
    assert (found.verdict, found.layer) == (("broken", "layer") if faulty else ("holds", None))
    said = "layer depends on the place of a row in the batch: input of layer.fc changed by "
    assert found.text.startswith(said if faulty else "the first and the last of 4 rows, and all moved by one, in ")


@pytest.mark.parametrize("faulty", [False, True])
def test_a_row_behind_the_first_that_depends_on_the_batch_size_is_named(probe: ModelProbe, faulty: bool) -> None:
    def scaled(_: Any, x: Tensor) -> Tensor:
        return torch.cat([x[:1], x[1:] / (len(x) if faulty else 1)])

    model = nn.Sequential(nn.Linear(3, 3), Code(scaled))
    found = checks.any_batch_size.outcome(probe, model, probe.randn(4, 3))
    assert (found.verdict, found.layer) == (("broken", "1") if faulty else ("holds", None))
    said = "layer '1' (Code) depends on the batch size: the first 4 rows changed by "
    assert found.text.startswith(said) is faulty


def test_similarities_and_masks_move_with_their_rows(probe: ModelProbe) -> None:
    model = Code(lambda self, x, mask: (self.fc(x * mask[..., None]).sum(1) @ x.sum(1).T, x), fc=nn.Linear(3, 3))
    found = checks.batch_independent(probe, model, probe.randn(4, 6, 3), mask=probe.randn(4, 6, name="mask") > 0)
    assert ", and all moved by one, in " in found.text


@pytest.mark.parametrize("given", ["tensor", "list"])
def test_a_model_that_takes_rows_in_one_order_alone_is_not_judged_in_others(probe: ModelProbe, given: str) -> None:
    def forward(self: Any, x: Tensor, lengths: Any) -> Tensor:
        if isinstance(lengths, list):
            return torch.stack([row[:n].mean(0) for row, n in zip(self.fc(x), [*lengths, 5], strict=False)])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.lstm(packed)[1][0][-1]

    lengths = [6, 5, 4, 2]
    model = Code(forward, fc=nn.Linear(3, 3), lstm=nn.LSTM(3, 5, batch_first=True))
    x = probe.randn(4, 6, 3)
    found = checks.batch_independent.outcome(probe, model, x, lengths if given == "list" else torch.tensor(lengths))
    assert found.verdict != "broken"
    assert "moved by one" not in found.text


# --- training -----------------------------------------------------------------------------------------------------


def targets(probe: ModelProbe) -> Tensor:
    return probe.randn(3, 5, name="targets")


@pytest.mark.parametrize(
    "loss",
    [
        lambda o: F.cross_entropy(o, torch.tensor([0, 1, 2])),
        lambda o: (o - targets(ModelProbe())).square().mean(),
    ],
    ids=["raises", "is broadcast"],
)
def test_targets_of_the_loss_itself_go_with_no_part_of_the_batch(probe: ModelProbe, loss: Any) -> None:
    found = checks.gradient_accumulation.outcome(probe, nn.Linear(4, 5), probe.randn(3, 4), loss=loss)
    assert found.verdict == "not applicable"
    assert found.text.startswith("the loss does not accept a part of the batch: pass the targets as inputs")


def contrastive(o: Tensor) -> Tensor:
    return F.cross_entropy(o @ o.T, torch.arange(len(o), device=o.device))


def balanced(o: tuple[Tensor, Tensor]) -> Tensor:
    return o[0].square().mean() + o[1].mean(0).square().sum()


@pytest.mark.parametrize(
    ("code", "loss", "verdict"),
    [
        (lambda self, x: contrastive(self.fc(x)), lambda loss: loss, "hint"),
        (lambda self, x: (self.fc(x), self.gate(x)), balanced, "hint"),
        (lambda self, x: (self.fc(x), self.gate(x)), lambda o: o[0].square().mean() + o[1].square().sum(), "broken"),
        (lambda self, x: self.fc(x), lambda o: o.square().sum(), "broken"),
    ],
    ids=["contrastive", "balancing", "a sum in part", "a sum"],
)
def test_a_loss_that_compares_rows_is_a_hint(probe: ModelProbe, code: Any, loss: Any, verdict: str) -> None:
    model = Code(code, fc=nn.Linear(4, 5), gate=nn.Linear(4, 3))
    assert checks.gradient_accumulation.outcome(probe, model, probe.randn(3, 4), loss=loss).verdict == verdict


class Timesteps(nn.Module):
    """Sinusoids of a time, in float32 whatever the dtype of the model is, as diffusion models compute them."""

    def forward(self, time: Tensor) -> Tensor:
        angles = time.float()[:, None] * torch.arange(1, 3)
        return torch.cat([angles.sin(), angles.cos()], -1)


def denoiser(combine: Any) -> nn.Module:
    return Code(combine, timesteps=Timesteps(), time=nn.Linear(4, 4), stem=nn.Linear(4, 4), act=nn.Tanh())


@pytest.mark.parametrize(
    "combine",
    [
        lambda self, x, t: self.act(self.stem(x) + self.time(self.timesteps(t).to(x.dtype))),
        lambda self, x, t: self.act((self.stem(x).float() + self.timesteps(t)).to(x.dtype)),
        lambda self, x, t: self.act(self.stem(x).float()).to(x.dtype),
    ],
    ids=["cast before a layer", "cast after an addition", "a layer in float32"],
)
def test_what_is_computed_in_float32_and_cast_afterwards_is_meant(probe: ModelProbe, combine: Any) -> None:
    found = checks.dtype_parity(probe, denoiser(combine), probe.randn(3, 4), probe.randn(3, name="t"))
    assert found.verdict == "holds"


@pytest.mark.parametrize(
    ("combine", "layer"),
    [
        (lambda self, x, t: self.act(self.stem(x) + self.timesteps(t)), "timesteps"),
        (lambda self, x, t: self.stem(x) + self.time(self.timesteps(t)), "time"),
        (lambda self, x, t: self.act(self.stem(x) + self.time(self.timesteps(t).to(x.dtype))).float(), "(root)"),
    ],
    ids=["added", "given to a layer", "the output is cast"],
)
def test_float32_that_reaches_the_output_or_a_layer_is_named(probe: ModelProbe, combine: Any, layer: str) -> None:
    found = checks.dtype_parity.outcome(probe, denoiser(combine), probe.randn(3, 4), probe.randn(3, name="t"))
    assert found.layer == layer


def test_what_runs_in_a_narrower_dtype_alone_is_said_to(probe: ModelProbe) -> None:
    model = Code(lambda self, x: x + torch.full((), torch.finfo(x.dtype).min) * 0, fc=nn.Linear(3, 3))
    found = checks.dtype_parity.outcome(probe, model, probe.randn(3, 3))
    assert found.text.startswith("the model runs in bfloat16 and not in float64: (root) raised RuntimeError: value")


def test_targets_that_are_inputs_go_with_each_part_of_the_batch(probe: ModelProbe) -> None:
    model = Code(lambda self, x, y: F.mse_loss(self.fc(x), y), fc=nn.Linear(4, 5))
    found = checks.gradient_accumulation(probe, model, probe.randn(3, 4), targets(probe), loss=lambda loss: loss)
    assert found.verdict == "holds"


class WrongAlone(torch.autograd.Function):
    """Gives a batch of one row another gradient than a larger batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 if len(gradient) > 1 else 3)


def test_of_gradients_that_do_not_add_up_the_one_next_to_the_loss_is_named(probe: ModelProbe) -> None:
    layer = Code(lambda self, x: WrongAlone.apply(x))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), layer, nn.Linear(4, 5))
    found = checks.gradient_accumulation.outcome(probe, model, probe.randn(3, 4), loss=lambda o: o.square().mean())
    assert (found.layer or "").startswith("1.")
    assert found.text.endswith("The other gradients agree, so a layer between those and these may be the cause too.")


@pytest.mark.parametrize(
    ("last", "loss"),
    [
        (nn.LayerNorm(5, elementwise_affine=False, eps=0.0), lambda o: o.square().mean()),
        (nn.Identity(), lambda o: F.normalize(o, dim=-1).square().mean()),  # what cancels does so within the loss
    ],
    ids=["squares of a norm", "squares of normalized rows"],
)
def test_gradients_that_cancel_everywhere_are_rounding_in_parts_too(
    probe: ModelProbe, last: nn.Module, loss: Any
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 5), last)
    assert checks.gradient_accumulation(probe, model, probe.randn(3, 4), loss=loss).verdict == "holds"


def test_a_loss_of_float32_is_too_coarse_for_finite_differences(probe: ModelProbe) -> None:
    class Narrow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.from_numpy(x.numpy().astype(np.float32))

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient.double()

    model = Code(lambda self, x: Narrow.apply(self.fc(x)), fc=nn.Linear(4, 5))
    found = checks.gradcheck.outcome(probe, model, probe.randn(3, 4), loss=lambda o: o.square().mean())
    assert found.text == "the loss is computed of float32, too coarse for small differences"


class Complex(nn.Module):
    """The power of a complex product."""

    def __init__(self, backward_sign: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2, dtype=torch.complex64))
        self.sign = backward_sign

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.weight.dtype) @ self.weight
        if y.requires_grad and self.sign != 1:
            y.register_hook(lambda gradient: self.sign * gradient)
        return (y * (0.3 + 0.7j)).real + y.abs().square()


def test_a_wrong_gradient_of_a_complex_parameter_is_named(probe: ModelProbe) -> None:
    assert checks.gradcheck.outcome(probe, Complex(-1), probe.randn(3, 4)).layer in ("weight", "input")


def test_another_dtype_means_nothing_for_complex_parameters(probe: ModelProbe) -> None:
    found = checks.dtype_parity.outcome(probe, Complex(), probe.randn(3, 4))
    assert found.text == "the model has complex parameters or buffers, which Module.to makes real"


def test_parameters_that_never_move_are_told_of_a_model_that_learns(probe: ModelProbe) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Code(lambda self, x: x.detach()), nn.Linear(4, 1))
    found = checks.overfits_batch(probe, model, probe.randn(3, 4), loss=lambda y: y.square().mean())
    assert found.text.endswith("; 2 parameters never moved: 0.weight and 0.bias")


def test_a_loss_that_is_nan_ends_the_steps(probe: ModelProbe) -> None:
    def root(parameters: Any) -> torch.optim.Optimizer:
        with torch.no_grad():
            model.bias.fill_(1.0)
        return torch.optim.SGD(parameters, 10.0)

    model = nn.Linear(4, 1)
    loss = lambda y: y.sqrt().mean()  # noqa: E731
    found = checks.overfits_batch.outcome(probe, model, torch.zeros(3, 4), loss=loss, optimizer=root)
    assert found.text.startswith("(root) has a loss of nan after 1 step\n")


def test_an_average_that_was_never_updated_copies_first(probe: ModelProbe) -> None:
    model = nn.Linear(2, 2)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    found = checks.ema_tracks.outcome(
        probe, model, average=ema, decay=0.9, updates=lambda: ema.update_parameters(model)
    )
    assert found.verdict == "not applicable"
    assert "its first update copies the model" in found.text


def test_a_parameter_that_is_not_in_the_average_is_told(probe: ModelProbe) -> None:
    model, average = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)

    def updates() -> None:
        with torch.no_grad():
            average.weight.lerp_(model.weight, 0.1)

    found = checks.ema_tracks.outcome(probe, model, average=average, decay=0.9, updates=updates)
    assert found.text.startswith("bias is not in the average\n")


# --- sequence -----------------------------------------------------------------------------------------------------


@pytest.fixture
def encoder(probe: ModelProbe) -> nn.Module:
    return probe.build(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))


class Blind(nn.Module):
    """Takes a mask, and a mean over all positions all the same."""

    def forward(self, x: Tensor, **masks: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class Masked(nn.Module):
    """Takes a mean over the positions that are kept."""

    def __init__(self, pad: bool = False) -> None:
        super().__init__()
        self.pad = pad

    def forward(self, x: Tensor, mask: Tensor | None = None, pad_mask: Tensor | None = None) -> Tensor:
        given = mask if pad_mask is None else pad_mask
        assert given is not None
        keep = (given.bool() ^ self.pad)[..., None].float()
        return x - (x * keep).sum(1, keepdim=True) / keep.sum(1, keepdim=True)


def test_a_mask_of_positions_by_positions_is_none_of_padding(probe: ModelProbe, encoder: nn.Module) -> None:
    mask = torch.zeros(8, 8, dtype=torch.bool)
    found = checks.padding_invariant.outcome(probe, encoder, probe.randn(2, 8, 8), src_mask=mask)
    assert found.text.startswith("no argument of shape (2, 8), the batch and axis 1 of input, is called a mask")


def test_a_square_mask_may_be_one_of_positions_by_positions(probe: ModelProbe, encoder: nn.Module) -> None:
    found = checks.padding_invariant.outcome(probe, encoder, probe.randn(8, 8, 8), src_mask=torch.zeros(8, 8))
    assert found.text.startswith("it is not known which mask is of (batch, positions), among src_mask")


def test_a_mask_of_floats_is_added(probe: ModelProbe, encoder: nn.Module) -> None:
    mask = torch.zeros(2, 8)
    found = checks.padding_invariant(probe, encoder, probe.randn(2, 8, 8), src_key_padding_mask=mask)
    assert found.text.endswith("positions without the others, masked by -inf in src_key_padding_mask")


def test_true_in_a_pad_mask_is_what_is_masked(probe: ModelProbe) -> None:
    mask = torch.zeros(2, 8, dtype=torch.bool)
    found = checks.padding_invariant(probe, Masked(pad=True), probe.randn(2, 8, 3), pad_mask=mask)
    assert found.text.endswith("masked by True in pad_mask")


def test_a_tensor_under_mask_hides_no_fault(probe: ModelProbe) -> None:
    found = checks.padding_invariant.outcome(probe, Blind(), probe.randn(2, 8, 3), mask=torch.ones(2, 8))
    assert found.layer == "(root)"


def test_a_mask_of_another_shape_is_none_of_padding(probe: ModelProbe) -> None:
    found = checks.padding_invariant.outcome(
        probe, Blind(), probe.randn(2, 8, 3), mask="weights", weights=torch.ones(2, 3)
    )
    assert found.text == "weights has the shape (2, 3), not (batch, positions), here (2, 8)"


def test_a_mask_that_is_not_there_is_refused(probe: ModelProbe) -> None:
    with pytest.raises(UsageError, match="mask= names an argument 'maks' that is not given: there are input, mask"):
        checks.padding_invariant(probe, Masked(), probe.randn(2, 8, 3), mask="maks", kwargs={"mask": torch.ones(2, 8)})


# --- repetition ---------------------------------------------------------------------------------------------------


def test_code_that_seeds_the_random_numbers_itself_is_named(probe: ModelProbe) -> None:
    def code(self: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return F.dropout(x, 0.5)

    model = nn.Sequential(nn.Linear(4, 4), Code(code), nn.Linear(4, 4))
    found = checks.seeded.outcome(probe, model, probe.randn(2, 4))
    assert found.layer == "1"
    assert found.text.startswith("layer '1' (Code) sets the random seed itself: ")


def test_what_leaks_within_a_chunk_knows_of_later_positions(probe: ModelProbe) -> None:
    def code(self: Any, x: Tensor) -> Tensor:
        parts = [part.mean(1, keepdim=True).expand_as(part) for part in x.split(3, 1)]
        return torch.cat(parts, 1)

    model = nn.Sequential(nn.Linear(4, 4), Code(code), nn.Linear(4, 4))
    assert checks.causal.outcome(probe, model, probe.randn(2, 8, 4)).layer == "1"


NEIGHBORS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "distances": ("permutation_invariant", lambda x: x.diff(dim=1).abs().mean(1)),
    "sums around a ring": ("permutation_equivariant", lambda x: x + x.roll(1, 1).tanh() + x.roll(-1, 1).tanh()),
}


@pytest.mark.parametrize("neighbors", NEIGHBORS.values(), ids=NEIGHBORS)
def test_what_a_reversal_a_turn_or_an_exchange_alone_leaves_is_no_set(
    probe: ModelProbe, neighbors: tuple[str, Callable[[Tensor], Tensor]]
) -> None:
    check, code = neighbors
    found = getattr(checks, check).outcome(probe, Code(lambda self, x: code(x)), probe.randn(2, 6, 4))
    assert found.text.startswith("(root) depends on the order of its elements: output changed by ")


class Drawing(nn.Module):
    """Draws from a generator that no seed and no copy resets."""

    generator = np.random.default_rng(0)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + torch.from_numpy(self.generator.standard_normal(x.shape)).to(x.dtype))


@pytest.mark.parametrize("check", [checks.modes_agree, checks.batch_independent, checks.copy_and_pickle])
def test_what_does_not_repeat_is_a_fault_of_that_alone(probe: ModelProbe, check: checks.Check) -> None:
    found = check.outcome(probe, Drawing(), probe.randn(3, 6, 4))
    assert found.verdict == "not applicable"
    assert found.text in (
        "random in evaluation: another seed changes what (root) returns",
        "its runs do not repeat: with the same seed (root) returns something else",
    )


# --- elsewhere and otherwise --------------------------------------------------------------------------------------


class Cached(nn.Linear):
    """Multiplies all that it returned since a cache began."""

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        y = super().forward(x)
        if cache is not None:
            cache.append(y)
            y = torch.stack(cache).prod(0)
        return y


class Decoder(nn.Module):
    """Takes the default for its cache from a configuration, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.config = Cached(3, 3), SimpleNamespace(use_cache=True)

    def forward(self, x: Tensor, use_cache: bool | None = None) -> Any:
        return self.fc(x, [] if (self.config.use_cache if use_cache is None else use_cache) else None)


def test_a_cache_that_is_on_by_default_is_off_beside_a_checkpoint(probe: ModelProbe) -> None:
    model = Decoder()
    assert checks.checkpoint_parity(probe, model, probe.randn(2, 3)).text == (
        "2 parameters, 1 module checkpointed, reentrant and not; without a cache (config.use_cache)"
    )
    assert model.config.use_cache
    assert checks.checkpoint_parity.outcome(probe, model, probe.randn(2, 3), use_cache=True).verdict == "broken"


@pytest.mark.parametrize(
    ("name", "code", "advice"),
    [
        ("dtype_parity", lambda self, x: (1 + 1e-9 * self.fc(x)) - 1, "Look for what amplifies rounding"),
        ("dtype_parity", lambda self, x: self.fc(x) @ torch.eye(3), "Look for a hard-coded dtype, and for"),
        ("layout_parity", lambda self, x: x.as_strided((2, 3), (3, 1)), "Look for as_strided"),
    ],
)
def test_a_parity_that_is_broken_comes_with_a_next_step(probe: ModelProbe, name: str, code: Any, advice: str) -> None:
    found = getattr(checks, name).outcome(probe, Code(code, fc=nn.Linear(3, 3)), probe.randn(2, 3))
    assert found.verdict == "broken"
    assert found.text.rpartition("\n\n")[2].startswith(advice)


def test_an_output_that_is_missing_is_said_to_be(probe: ModelProbe) -> None:
    model = nn.Sequential(Code(lambda self, x: self.fc(x) if torch.rand(()) > 0.5 else x, fc=nn.Linear(3, 3)))
    texts = [checks.eval_stable.outcome(ModelProbe(seed=seed), model, probe.randn(2, 3)).text for seed in range(9)]
    assert any("0.fc is random in evaluation mode: output is not returned with another seed" in text for text in texts)
    assert not any("changed by not" in text for text in texts)


# --- what a model is made of --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        ("parts", OrderedDict(a=nn.Linear(2, 2)), "parts['a']"),
        ("parts", deque([torch.ones(3)]), "parts[0]"),
        ("_mean", torch.ones(3), "_mean"),
    ],
)
def test_what_no_container_of_torch_s_holds_is_named(probe: ModelProbe, key: str, value: Any, where: str) -> None:
    assert checks.registered.outcome(probe, Code(None, **{key: value})).layer == where


def test_a_map_that_a_forward_keeps_needs_no_registering(probe: ModelProbe) -> None:
    def code(self: Any, x: Tensor) -> Tensor:
        y = self.fc(x)
        self.last, self._maps = y.detach(), [y.detach()]
        return y

    model, x = nn.Sequential(Code(code, fc=nn.Linear(3, 3))), probe.randn(2, 3)
    model(x)
    assert checks.registered(probe, model, x).verdict == "holds"


def test_a_parameter_that_was_cast_after_it_was_made_is_named(probe: ModelProbe) -> None:
    model = nn.Sequential(Code(lambda self, x: x * self.scale, scale=nn.Parameter(torch.ones(3)).double()))
    outcome = checks.registered.outcome(probe, model, probe.randn(2, 3).double())
    assert outcome.text.startswith("0.scale is a tensor computed from a parameter that the model has not registered")


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm`:FutureWarning")
def test_weights_that_a_norm_computes_need_no_registering(probe: ModelProbe) -> None:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 3)))
    with torch.no_grad():
        model(torch.ones(2, 3))
    assert checks.registered(probe, model).verdict == "holds"


class Forgetful(nn.Module):
    """Loads all but one tensor."""

    def __init__(self, state: Tensor, name: str) -> None:
        super().__init__()
        if isinstance(state, nn.Parameter):
            self.state = state
        else:
            self.register_buffer("state", state)
        self.lost = name

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({key: x for key, x in state.items() if key != self.lost}, strict=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.state.real


@pytest.mark.parametrize(
    "state",
    [
        nn.Parameter(torch.tensor([1 + 2j, 3 - 1j, 2j])),
        torch.tensor([True, False, True]),
    ],
    ids=lambda state: str(state.dtype),
)
def test_what_is_not_loaded_is_seen_whatever_its_dtype(probe: ModelProbe, state: Tensor) -> None:
    x = probe.randn(2, 3)
    assert checks.state_dict_round_trip.outcome(probe, Forgetful(state, "state"), x).layer == "(root)"
    assert checks.state_dict_round_trip(probe, Forgetful(state, ""), x).verdict == "holds"


def test_what_cannot_be_copied_is_named(probe: ModelProbe) -> None:
    layer = nn.Linear(3, 3)
    layer.kept = layer.weight * 2  # type: ignore[assignment]
    found = checks.copy_and_pickle.outcome(probe, nn.Sequential(nn.Linear(3, 3), layer), probe.randn(2, 3))
    assert found.layer == "1"
    assert found.text.startswith("layer '1' (Linear) cannot be copied: RuntimeError: Only Tensors created explicitly")


def test_integers_that_nothing_wrote_to_are_named(probe: ModelProbe) -> None:
    def factory() -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("order", torch.empty(5, dtype=torch.long))
        return model

    model = factory()
    model.order.zero_()  # type: ignore[operator]
    found = checks.initialized.outcome(probe, model, factory=factory)
    assert found.text.startswith("order is not initialized: 5 of 5 elements were never written to\n")


def test_a_module_that_is_hidden_on_purpose_needs_no_registering(probe: ModelProbe) -> None:
    model = nn.Linear(2, 2)
    object.__setattr__(model, "_teacher", nn.Linear(2, 2))
    assert checks.registered(probe, model).verdict == "holds"


# --- what a forward leaves behind ---------------------------------------------------------------------------------


def by_numpy(self: nn.Module, x: Tensor) -> Tensor:
    x.detach().numpy()[:] = 0
    return x + 1


def test_writes_into_the_input_are_seen_past_autograd(probe: ModelProbe) -> None:
    model = nn.Sequential(nn.Identity(), Code(by_numpy), nn.Identity())
    found = checks.inputs_unchanged_by_forward.outcome(probe, model, probe.randn(2, 3))
    assert found.layer == "1"
    assert found.text.startswith("layer '1' (Code) writes into input, which the caller may use again\n")


def test_a_dict_that_is_written_to_is_an_input(probe: ModelProbe) -> None:
    model = Code(lambda self, given: self.fc(given.pop("x")), fc=nn.Linear(3, 3))
    found = checks.inputs_unchanged_by_forward.outcome(probe, model, {"x": probe.randn(2, 3)})
    assert found.layer == "(root)"
    assert found.text.startswith("(root) writes into input.x, ")


# --- padding that is pooled ---------------------------------------------------------------------------------------


class Pooled(nn.Module):
    """Takes the mean of a sequence, over what the mask keeps or over everything."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.embed, self.head, self.masked = nn.Linear(3, 8), nn.Linear(8, 2), masked

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        weights = attention_mask[..., None] if self.masked else torch.ones_like(attention_mask[..., None])
        return self.head((self.embed(x) * weights).sum(1) / weights.sum(1))


@pytest.mark.parametrize("masked", [True, False])
def test_a_mean_over_the_padding_is_seen_in_what_is_pooled(probe: ModelProbe, masked: bool) -> None:
    x, mask = probe.randn(2, 8, 3), torch.ones(2, 8)
    found = checks.padding_invariant.outcome(probe, Pooled(masked), x, attention_mask=mask)
    assert (found.verdict, found.layer) == (("holds", None) if masked else ("broken", "(root)"))


# --- optimizers ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_is_twice_in_the_optimizer_is_named(probe: ModelProbe) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD([*model.parameters(), model[1].bias], 0.1)
    found = checks.optimizer_covers.outcome(probe, model, optimizer=optimizer)
    assert str(found).startswith("1.bias is in the optimizer 2 times")


# --- frozen on purpose --------------------------------------------------------------------------------------------


class Frozen(nn.BatchNorm1d):
    """Stays in evaluation mode whatever the model does."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(mode=False)


@pytest.mark.parametrize("trained", [False, True])
def test_a_norm_that_stays_in_evaluation_is_meant_so_if_it_is_frozen(probe: ModelProbe, trained: bool) -> None:
    norm = Frozen(3).requires_grad_(trained)
    norm.running_mean.fill_(1.0)
    model = nn.Sequential(nn.Linear(3, 3), norm, nn.BatchNorm1d(3))
    found = checks.train_eval_differ.outcome(probe, model, probe.randn(4, 3))
    assert (found.verdict, found.layer) == (("broken", "1") if trained else ("holds", None))


def test_a_dropout_that_is_never_called_is_said_to_be(probe: ModelProbe) -> None:
    model = Code(lambda self, x: x, drop=nn.Dropout(0.5))
    assert (
        checks.train_eval_differ.outcome(probe, model, probe.randn(2, 3)).text == "drop is never called, or with zeros"
    )


# --- dropout of one seed ------------------------------------------------------------------------------------------


class Seeded(nn.Dropout):
    """Drops the same under any seed, and leaves the generators as they were."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return super().forward(x)


@pytest.mark.parametrize(("dropout", "layer"), [(Seeded, "2"), (nn.Dropout, None)])
def test_dropout_of_one_seed_is_seen_behind_another(probe: ModelProbe, dropout: type, layer: str | None) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), dropout(0.3), nn.Linear(16, 2))
    assert checks.seeded.outcome(probe, model, probe.randn(8, 8)).layer == layer
