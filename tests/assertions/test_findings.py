"""Findings of a record without an assertion; no findings and no failures on healthy models."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelprobe import (
    HintWarning,
    ModelProbe,
    Record,
    assert_all_params_have_grad,
    assert_called,
    assert_dtypes,
    assert_finite,
    assert_grad_finite,
    assert_grad_flow,
    assert_no_dead_layers,
    assert_shapes,
)
from pytest_modelprobe.assertions.findings import findings, hints
from pytest_modelprobe.record import layer_table

X = torch.linspace(-1, 1, 24).reshape(4, 6)


class Shared(nn.Module):
    """One layer that is called, one that is tied to it, one whose weight is used, and one for nothing."""

    def __init__(self, *, spare: bool = False) -> None:
        super().__init__()
        self.a, self.tied, self.used = (nn.Linear(6, 6, bias=False) for _ in range(3))
        self.tied.weight = self.a.weight
        self.dropout = nn.Dropout()
        if spare:
            self.spare, self.token = nn.Linear(6, 6), nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.a(x), self.used.weight)


def said(model: nn.Module, x: torch.Tensor = X, **kwargs: Any) -> list[str]:
    return findings(ModelProbe().run(model, x, **kwargs))


def test_nothing_is_reported_of_a_record_without_forwards() -> None:
    assert findings(Record(model="Net")) == []


def test_weights_that_are_tied_or_used_by_themselves_are_not_called_unused() -> None:
    assert said(Shared(), loss="random") == []


def test_layers_and_parameters_without_use_are_counted_once_each() -> None:
    assert said(Shared(spare=True), loss="random") == ["never called: spare", "no gradient: 1 parameter, token"]


class Holding(nn.Module):
    """A module that holds a weight and is never called, as those of tensorly-torch in UQNO of neuraloperator."""

    def __init__(self) -> None:
        super().__init__()
        self.holder = nn.Module()
        self.holder.tensor = nn.Parameter(torch.ones(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ cast(torch.Tensor, self.holder.tensor)


class Corrected(nn.Module):
    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.base, self.residual = Holding().requires_grad_(not frozen), Holding()
        self.frozen = frozen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.frozen):
            base = self.base(x)
        return base + self.residual(x)


@pytest.mark.parametrize("frozen", [True, False])
def test_weights_that_no_gradient_could_show_to_be_used_are_a_hint(frozen: bool) -> None:
    record = ModelProbe().run(Corrected(frozen=frozen), X, loss="random")
    assert findings(record) == []
    assert hints(record) == ["never called, and no gradient can tell whether its weights are used: base.holder"]
    with pytest.warns(HintWarning, match=r"^base.holder was never called in 1 forward; 1 of 4 layers looked at"):
        assert_called(record)
    with pytest.raises(AssertionError, match=r"^base.holder was never called in 1 forward; 2 of 5 layers looked at"):
        assert_called(record, "**")


def test_without_a_backward_a_layer_that_is_never_called_stays_a_finding() -> None:
    assert said(Corrected()) == ["never called: base.holder and residual.holder"]


def test_what_is_dead_is_named() -> None:
    assert said(nn.Sequential(nn.Identity(), nn.ReLU()), X - 10) == ["dead: layer '1' (ReLU)"]


def test_what_is_not_finite_is_named_where_it_began() -> None:
    assert said(nn.Sequential(nn.Identity(), nn.ReLU()), X * math.nan) == [
        "not finite: (root) input, 24 NaN of 24 elements"
    ]


def test_a_mask_of_infinities_is_not_worth_a_line() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.softmax = nn.Softmax(dim=-1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.softmax(x.masked_fill(x < 0, -math.inf)[2:])

    assert said(Masked()) == []


# --- models as they are: no false alarm ---------------------------------------------------------------------------

TEXT = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IDS, SOUND = (2, 9), (2, 400)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
        {"input_ids": IDS},
    ),
    "MixtralForCausalLM": ("MixtralConfig", TEXT | {"num_key_value_heads": 2}, {"input_ids": IDS}),
    "Wav2Vec2ForCTC": (
        "Wav2Vec2Config",
        {
            "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 48, "conv_dim": (16, 16), "conv_stride": (4, 2), "conv_kernel": (8, 3),
            "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
        },
        {"input_values": SOUND},
    ),
}  # fmt: skip
UNUSED = {"Wav2Vec2ForCTC": "wav2vec2.masked_spec_embed"}  # in eval mode nothing is masked


@pytest.mark.filterwarnings("ignore::pytest_modelprobe.HintWarning")  # an expert gets none of few tokens
@pytest.mark.parametrize("name", MODELS)
def test_no_assertion_fails_on_an_untrained_model_that_is_sound(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config, settings, shapes = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**settings))
    inputs = {k: torch.randint(3, 64, size) if "ids" in k else torch.randn(size) for k, size in shapes.items()}
    record = ModelProbe().run(model, kwargs=inputs, loss="random", mode="eval")
    assert_no_dead_layers(record, max_dead_units=0.5)
    assert_finite(record)
    assert_grad_finite(record)
    assert_grad_flow(record)
    assert_all_params_have_grad(record, ignore=UNUSED.get(name, ()))
    assert_dtypes(record, torch.float32)
    unused = [f"no gradient: 1 parameter, {UNUSED[name]}"] if name in UNUSED else []
    assert findings(record) == unused


# --- cost ---------------------------------------------------------------------------------------------------------


def python_calls(function: Callable[[Record], object], record: Record) -> int:
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function(record)
    except AssertionError:
        pass
    finally:
        sys.setprofile(before)
    return calls


def record_of(n: int, scale: float) -> Record:
    """Return the record of a model of `n` pairs of layers, with a loss that is scaled."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(n)))
    return ModelProbe().run(model, torch.ones(1, 2), loss=lambda out: out.sum() * scale)


FUNCTIONS: dict[str, Callable[[Record], object]] = {
    "dead layers": assert_no_dead_layers,
    "finite": assert_finite,
    "finite gradients": assert_grad_finite,
    "flow": assert_grad_flow,
    "gradients": assert_all_params_have_grad,
    "calls": assert_called,
    "dtypes": lambda record: assert_dtypes(record, "float32"),
    "shapes": lambda record: assert_shapes(record, {"**": "batch 2"}),
    "findings": findings,
    "table": layer_table,
}


@pytest.mark.parametrize("scale", [1.0, math.nan])
def test_the_cost_grows_no_faster_than_the_number_of_layers(scale: float) -> None:
    small, large = record_of(20, scale), record_of(80, scale)
    for name, function in FUNCTIONS.items():
        assert python_calls(function, large) < 5 * python_calls(function, small), name


def test_gradients_that_cancel_are_said_to_be_rounding_where_their_noise_is_known() -> None:
    def loss(out: torch.Tensor) -> torch.Tensor:
        return out.softmax(-1).mean()

    probe = ModelProbe()
    model = probe.build(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    record = probe.run(model, probe.randn(4, 8), loss=loss)
    assert record.live_run is not None
    (found,) = findings(record.live_run.measured(record))
    assert found.startswith("rounding: gradients cancel from (root) back, and are not compared there: use ")


def test_many_dead_units_are_a_hint() -> None:
    probe = ModelProbe()
    for bias, found in ((-100.0, ["dead units: layer '1' (ReLU) 3 of 8"]), (0.0, [])):
        model = probe.build(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))
        with torch.no_grad():
            model[0].bias[:3] = bias
        record = probe.run(model, probe.randn(64, 8))
        assert (hints(record), findings(record)) == (found, [])
        assert hints(probe.run(model, probe.randn(4, 8))) == []  # too few rows
