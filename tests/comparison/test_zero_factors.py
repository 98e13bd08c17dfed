"""What is multiplied by zero: the run is equal, and the layers behind the zero are called alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from pytest_modelprobe import ModelProbe, assert_same_behavior
from pytest_modelprobe.comparison import changes_code, diagnose, layers_behind_zeros
from pytest_modelprobe.comparison.compare import compare
from pytest_modelprobe.files import decode, encode


class LoRA(nn.Module):
    """Its second factor starts at zero."""

    def __init__(self, change: Any = None) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.b.weight)
        self._scale = [change or 2.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self._scale[0] * self.b(self.a(x))


class ReZero(nn.Module):
    """Its gate starts at zero."""

    def __init__(self, change: Any = None) -> None:
        super().__init__()
        self.fc, self.gate = nn.Linear(8, 8), nn.Parameter(torch.zeros(1))
        self._act = [torch.tanh if change else torch.relu]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * self._act[0](self.fc(x))


class Modulated(nn.Module):
    """Shift, scale and gate come from a layer that starts at zero, as in a diffusion transformer."""

    def __init__(self, change: Any = None) -> None:
        super().__init__()
        self.norm, self.fc, self.modulation = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 24)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)
        self._one = [0.0 if change else 1.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = self.modulation(x).chunk(3, dim=-1)
        return x + gate * self.fc(self.norm(x) * (self._one[0] + scale) + shift)


class Biased(nn.Module):
    """A layer of one's own whose bias starts at zero, as in GPT-2."""

    def __init__(self, change: Any = None) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.zeros(8))
        self._forgets = [change]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + (0 if self._forgets[0] else self.bias)


def net(kind: Callable[..., nn.Module], change: Any = None) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), kind(), kind(change), nn.Linear(8, 3))


@pytest.mark.parametrize("kind", [LoRA, ReZero])
def test_what_a_zero_hides_is_named(kind: Callable[..., nn.Module]) -> None:
    probe = ModelProbe()
    old, same, new = (probe.build(lambda change=change: net(kind, change)) for change in (None, None, True))
    x = probe.randn(3, 4)
    assert_same_behavior(probe.run(same, x), probe.run(old, x))
    with pytest.raises(AssertionError) as raised:
        assert_same_behavior(probe.run(new, x), probe.run(old, x))
    said = str(raised.value)
    assert said.startswith(f"output unchanged; layer '2' ({kind.__name__}): own code changed after "), said
    assert "\nThe run does not show it: what that code computes is multiplied by zero, or not used.\n" in said


def test_a_bias_that_is_forgotten_is_named_although_it_is_zero() -> None:
    probe = ModelProbe()
    old, new = (probe.build(lambda change=change: nn.Sequential(nn.Linear(4, 8), Biased(change))) for change in (0, 1))
    x = probe.randn(3, 4)
    with pytest.raises(AssertionError, match=r"output unchanged; layer '1' \(Biased\): own code changed"):
        assert_same_behavior(probe.run(new, x), probe.run(old, x))


def test_a_bias_of_gpt2_that_is_forgotten_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = ModelProbe()
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = probe.build(lambda: transformers.GPT2LMHeadModel(config)).eval()
    ids = probe.randint(0, 50, (2, 6))
    record = probe.run(model, ids)
    expected = decode(*encode(record.live_run.measured(record, record)), where="snapshot").record
    assert_same_behavior(probe.run(model, ids), record)

    def forward(self: Conv1D, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight

    monkeypatch.setattr(Conv1D, "forward", forward)
    changed = probe.run(model, ids)
    assert compare(changed, expected).same
    assert len(layers_behind_zeros(changed)) == 4  # of each kind of Conv1D one, for two blocks
    alone = changed.live_run.isolated(changed, like=expected, only=layers_behind_zeros(changed))
    diagnosis = diagnose(compare(alone, expected))
    assert changes_code(diagnosis)
    assert {cause.layer for cause in diagnosis.causes} == set(layers_behind_zeros(changed))


def test_of_some_layers_the_responses_are_those_that_they_have_among_all() -> None:
    probe = ModelProbe()
    model, x = probe.build(lambda: net(Modulated)), probe.randn(3, 4)
    record = probe.run(model, x, loss="random")
    every, some = (record.live_run.isolated(record, only=only) for only in (None, ["2", "2.fc"]))
    for name, layer in some.layers.items():
        (call,), (other,) = layer.calls, every[name].calls
        assert call.response == (other.response if name in ("2", "2.fc") else None), name


def test_which_layers_a_zero_may_hide() -> None:
    probe = ModelProbe()
    x = probe.randn(3, 4)
    assert layers_behind_zeros(probe.run(net(LoRA), x)) == ["1", "2"]
    assert layers_behind_zeros(probe.run(net(ReZero), x)) == ["1", "2"]
    assert layers_behind_zeros(probe.run(net(Modulated), x)) == ["1", "2"]
    assert layers_behind_zeros(probe.run(net(Biased), x)) == ["1"]  # of one kind
    assert layers_behind_zeros(probe.run(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), x)) == []
