"""What a user sees of a check before it is called; numbers that are not finite, and how a model is run."""

from __future__ import annotations

import copy
import inspect
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pytest_modelprobe import ModelProbe, checks
from pytest_modelprobe.checks import Check

ALL: dict[str, Check] = {name: one for name in checks.__all__ if isinstance(one := getattr(checks, name), Check)}


# --- what is shown of a check -------------------------------------------------------------------------------------


def test_the_signature_of_a_check_shows_what_a_user_passes() -> None:
    shown = str(inspect.signature(checks.causal))
    assert shown == "(probe, model, /, *inputs, axis=1, tolerance=None, loss=None, kwargs=None, **model_kwargs)"


# --- numbers that are not finite ----------------------------------------------------------------------------------


class Code(nn.Module):
    """Any code of its own between two linear layers."""

    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.code = nn.Linear(3, 3), nn.Linear(3, 3), code
        self.register_buffer("mask", torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1) > 0, -math.inf))

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.last(self.first(x)))


@pytest.fixture
def x(probe: ModelProbe) -> Tensor:
    return probe.randn(4, 3)


def poisoned(probe: ModelProbe) -> Code:
    model = probe.build(lambda: Code(torch.tanh))
    with torch.no_grad():
        model.last.weight[1, 2] = math.nan
    return model


def test_a_model_of_nan_fails_the_battery_on_finiteness(probe: ModelProbe, x: Tensor) -> None:
    with pytest.raises(AssertionError) as error:
        checks.standard(probe, poisoned(probe), x, loss=lambda y: y.square().mean(), skip=["initialized"])
    first, *_ = str(error.value).splitlines()
    said = "last is not finite in evaluation mode: the model returns NaN, from last.weight, which holds NaN"
    assert first == f"{said}; 1 check of 24 broken; 2 hold, 21 are not applicable"


def test_finiteness_is_the_first_of_the_standard_checks() -> None:
    assert next(iter(checks.STANDARD)) == "finite"


def test_the_message_of_a_violation_says_where_and_what(probe: ModelProbe) -> None:
    found = checks.finite.outcome(probe, Code(lambda y: (y - y).sqrt() / (y - y)), torch.ones(2, 3))
    first, _, *table = str(found).splitlines()
    assert first.startswith("(root) is not finite in evaluation mode: the model returns NaN, from torch.Tensor.div at ")
    assert first.endswith(", input[0] min 0, max 0; input[1] min 0, max 0")
    assert table[:2] == ["tensor          NaN   infinite   elements", "(root) output     6          0          6"]
    assert table[-1].startswith("Look for a division by 0, ")


SEES_VALUES = ["seeded", "padding_invariant"]


@pytest.mark.parametrize("name", SEES_VALUES)
def test_no_other_check_judges_what_is_not_finite(name: str, probe: ModelProbe) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.drop = poisoned(probe), nn.Dropout(0.5)

        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return self.drop(self.net(x))

    found = ALL[name].outcome(probe, Whole(), probe.randn(4, 6, 3), attention_mask=torch.ones(4, 6))
    assert str(found) == f"{name} is not applicable to Whole: not finite at net.last"


MEANT: dict[str, Callable[[Tensor], Tensor]] = {
    "a constant": lambda y: y.masked_fill(y > 0, -math.inf),
    "a constant written into a view": lambda y: [z := y.clone(), z[:, 0].fill_(-math.inf), z + 1][2],
    "the logarithm of a mask": lambda y: y + (torch.arange(3) > 0).float().log(),
    "what does not reach the end": lambda y: (
        (y.detach() / 0).nan_to_num() + y.masked_fill(y > 0, -math.inf).softmax(-1)
    ),
    "masked attention": lambda y: (y @ y.T).masked_fill(torch.ones(4, 4).triu(1) > 0, -math.inf).softmax(-1) @ y,
}


@pytest.mark.parametrize("name", MEANT)
def test_an_infinity_that_is_meant_is_no_break(name: str, probe: ModelProbe, x: Tensor) -> None:
    said = "1 output and 4 gradients in evaluation and training mode"
    assert checks.finite(probe, probe.build(lambda: Code(MEANT[name])), x).text == said


def test_an_infinite_input_that_is_added_is_no_break(probe: ModelProbe) -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + mask

    checks.finite(probe, Masked(3, 2), probe.randn(2, 3), torch.tensor([0.0, -math.inf]))


COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "a division": lambda y: y / 0,
    "a logarithm of what underflows": lambda y: (y * 1e4).softmax(-1).log(),
    "an overflow beside a mask": lambda y: ((y + 1) * 1e38 * 1e38).masked_fill(y > 0, -math.inf),
    "a mask through a layer": lambda y: nn.functional.linear(y.masked_fill(y > 0, -math.inf), -torch.ones(2, 3)),
    "a constant that is NaN": lambda y: y * math.nan,
}


@pytest.mark.parametrize("name", COMPUTED)
def test_an_infinity_that_is_computed_is_a_break(name: str, probe: ModelProbe, x: Tensor) -> None:
    assert checks.finite.outcome(probe, probe.build(lambda: Code(COMPUTED[name])), x).verdict == "broken"


def test_what_is_not_finite_in_training_alone_is_a_break(probe: ModelProbe) -> None:
    found = checks.finite.outcome(probe, nn.Sequential(nn.Linear(3, 3), Noisy()), probe.randn(4, 3))
    assert found.text.startswith(
        "layer '1' (Noisy) is not finite in training mode: the model returns NaN, from torch.Tensor.sqrt at"
    )


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + (x - 10).sqrt() if self.training else x


def test_a_gradient_that_is_not_finite_is_a_break(probe: ModelProbe, x: Tensor) -> None:
    model = probe.build(lambda: Code(lambda y: (y - y.detach()).sqrt()))
    found = checks.finite.outcome(probe, model, x)
    assert found.layer == "last.weight"
    assert found.text.startswith("last.weight gets a gradient that is not finite in evaluation mode: NaN, from ")
    assert checks.gradcheck.outcome(probe, model, x).text == "not finite at last.weight"
    assert checks.deterministic.outcome(probe, model, x).verdict == "holds"


def test_a_loss_that_is_not_finite_is_a_break(probe: ModelProbe, x: Tensor) -> None:
    found = checks.finite.outcome(probe, nn.Linear(3, 2), x, loss=lambda y: (y - y).mean().log())
    assert found.text.startswith("(root) computes a loss of -inf in evaluation mode from finite outputs\n")


def test_an_input_that_holds_nan_is_named(probe: ModelProbe, x: Tensor) -> None:
    assert checks.finite.outcome(probe, nn.Linear(3, 2), x.masked_fill(x > 1, math.nan)).layer == "input"


def test_a_mode_in_which_the_model_does_not_run_is_told(probe: ModelProbe) -> None:
    found = checks.finite(probe, nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), probe.randn(1, 3))
    assert found.text.startswith("1 output and 4 gradients in evaluation mode; the model does not run on these inputs")


def test_a_model_without_gradients_is_looked_at(probe: ModelProbe, x: Tensor) -> None:
    said = "1 output and 0 gradients in evaluation and training mode"
    assert checks.finite(probe, nn.Linear(3, 2).requires_grad_(False), x).text == said


def test_nan_of_a_complex_tensor_is_seen(probe: ModelProbe, x: Tensor) -> None:
    assert checks.finite.outcome(probe, Code(lambda y: torch.complex(y, y * math.nan)), x).verdict == "broken"


# --- what is checkpointed -----------------------------------------------------------------------------------------


def test_layers_beside_an_activation_in_place_are_checkpointed_as_one(probe: ModelProbe) -> None:
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Identity(), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.5)
    found = checks.checkpoint_parity(probe, nn.Sequential(*layers), probe.randn(2, 3, 8, 8))
    assert found.text == "4 parameters, 1 module checkpointed, reentrant and not"


# --- models that are random in evaluation, and recurrences --------------------------------------------------------


class VAE(nn.Module):
    """It samples in evaluation too, as it is meant to."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 8), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp())


@pytest.mark.parametrize("name", ["any_batch_size", "gradient_accumulation"])
def test_what_is_random_in_evaluation_is_not_blamed_on_something_else(name: str, probe: ModelProbe) -> None:
    found = ALL[name].outcome(probe, probe.build(VAE), probe.randn(4, 6, 4), loss=lambda y: y.square().mean())
    assert str(found) == (
        f"{name} is not applicable to VAE: random in evaluation: another seed changes what (root) returns"
    )


# --- averages -----------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.fc(x))


def test_an_average_with_its_buffers_tracks(probe: ModelProbe) -> None:
    model = probe.build(Normed)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    ema.update_parameters(model)
    options: dict[str, Any] = {"average": ema, "decay": 0.9, "updates": lambda: ema.update_parameters(model)}
    assert checks.ema_tracks(probe, model, **options).text == "4 parameters, 2 buffers"


def test_an_average_whose_running_statistics_stay_is_told(probe: ModelProbe) -> None:
    model = probe.build(Normed)
    average = copy.deepcopy(model)

    def updates() -> None:
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.1)

    found = checks.ema_tracks.outcome(probe, model, average=average, decay=0.9, updates=updates)
    first, _, columns, *rows, _, advice = found.text.splitlines()
    assert first == "bn.running_mean is updated in the average with an error of 100 %"
    assert columns == "parameter         what"
    assert [row.split()[0] for row in rows] == ["bn.running_mean", "bn.running_var"]
    assert "update_bn" in advice


# --- padding that is found by its id ------------------------------------------------------------------------------

PAD = 0


class Pooled(nn.Module):
    """It finds padding by its id: its attention sees none, and its mean leaves it out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attn, self.head = (
            nn.Embedding(9, 8),
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, 2),
        )

    def unseen(self, ids: Tensor) -> Tensor:
        return ids == PAD

    def pooled(self, x: Tensor, ids: Tensor) -> Tensor:
        seen = (ids != PAD)[..., None]
        return (x * seen).sum(1) / seen.sum(1).clamp(min=1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.attn(x, x, x, key_padding_mask=self.unseen(ids))[0]
        return self.head(self.pooled(x, ids))


class PooledOverAll(Pooled):
    def pooled(self, x: Tensor, ids: Tensor) -> Tensor:
        return x.mean(1)


class Seeing(Pooled):
    def unseen(self, ids: Tensor) -> Tensor:
        return ids < PAD


@pytest.fixture
def words(probe: ModelProbe) -> Tensor:
    return probe.randint(1, 9, (3, 8), name="words")


def test_padding_that_is_found_by_its_id_is_made(probe: ModelProbe, words: Tensor) -> None:
    found = checks.padding_invariant(probe, probe.build(Pooled), words, pad_id=PAD)
    assert found.text == "4 layers at the first 6 of 8 positions without the others, padded by 0"


def test_the_config_may_name_the_id_of_padding(probe: ModelProbe, words: Tensor) -> None:
    model = probe.build(Pooled)
    model.config = types.SimpleNamespace(pad_token_id=PAD)
    assert checks.padding_invariant(probe, model, words).text.endswith("padded by 0")


@pytest.mark.parametrize(
    ("kind", "layer"),
    [(PooledOverAll, "head"), (Seeing, "attn")],
)
def test_a_model_that_does_not_find_its_padding_is_named(
    kind: type[nn.Module], layer: str, probe: ModelProbe, words: Tensor
) -> None:
    found = checks.padding_invariant.outcome(probe, probe.build(kind), words, pad_id=PAD)
    assert found.verdict == "broken"
    assert found.layer in (layer, "(root)")
    said = found.text.partition("\n")[0]
    assert "depends on masked positions: the first 6 of 8 positions changed by" in said
    assert said.endswith("when the others, padded by 0, were removed")


class OfOneLength(Pooled):
    """It takes eight positions, and a mask that it may ignore."""

    def __init__(self, ignored: bool) -> None:
        super().__init__()
        self.ignored, self.positions = ignored, nn.Parameter(torch.randn(8, 8))
        self.config = types.SimpleNamespace(pad_token_id=PAD)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embed(ids) + self.positions
        return self.head(self.attn(x, x, x, key_padding_mask=None if self.ignored else mask == 0)[0])


@pytest.mark.parametrize(("ignored", "verdict"), [(False, "holds"), (True, "broken")])
def test_a_model_of_one_length_is_judged_by_its_mask(
    ignored: bool, verdict: str, probe: ModelProbe, words: Tensor
) -> None:
    model = probe.build(lambda: OfOneLength(ignored))
    found = checks.padding_invariant.outcome(probe, model, words, kwargs={"mask": torch.ones_like(words)})
    assert found.verdict == verdict
    assert "padded by" not in found.text


class Translating(Pooled):
    """Its labels are another sequence, whose last id it begins with."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        begun = self.embed(labels.roll(1, dims=1))
        x = self.embed(ids)
        return self.head(self.attn(begun, x, x, key_padding_mask=self.unseen(ids))[0])


def test_a_sequence_that_is_not_padded_keeps_its_length(probe: ModelProbe, words: Tensor) -> None:
    labels = probe.randint(1, 9, (3, 6), name="labels")
    found = checks.padding_invariant.outcome(probe, probe.build(Translating), words, pad_id=PAD, labels=labels)
    assert found.verdict == "holds", found.text


def test_an_id_of_padding_wants_ids(probe: ModelProbe) -> None:
    found = checks.padding_invariant.outcome(probe, nn.Linear(3, 2), probe.randn(2, 8, 3), pad_id=PAD)
    assert found.text == "pad_id= needs an input of ids, and the first input is not of integers"


TINY = {
    "vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 40,
}  # fmt: skip


def bert() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.BertModel(transformers.BertConfig(**TINY))


@pytest.mark.parametrize("given", [True, False])
def test_a_model_of_transformers_finds_its_padding_with_a_mask_or_is_given_one(probe: ModelProbe, given: bool) -> None:
    ids = probe.randint(3, 30, (3, 8))
    mask = {"attention_mask": torch.ones_like(ids)} if given else {}
    found = checks.padding_invariant(probe, probe.build(bert), input_ids=ids, **mask)
    assert "masked by 0 in attention_mask, padded by 0" in found.text


def test_a_mask_that_a_model_of_transformers_ignores_is_named(
    probe: ModelProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = probe.build(bert), probe.randint(3, 30, (3, 8))
    attention = model.encoder.layer[1].attention.self
    forward = attention.forward
    monkeypatch.setattr(attention, "forward", lambda x, *args, **kwargs: forward(x))
    found = checks.padding_invariant.outcome(probe, model, input_ids=ids, attention_mask=torch.ones_like(ids))
    assert found.layer == "encoder.layer.1.attention.self"
