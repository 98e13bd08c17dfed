"""The same two models compared through a snapshot, side by side and beside a commit: the same causes, and the right one
first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, files
from pytest_modelprobe.comparison import Diagnosis, compare, diagnose
from pytest_modelprobe.comparison.text import first_line
from pytest_modelprobe.record import Record
from pytest_modelprobe.revisions import Recorder, judged, read_written

Test = Callable[[ModelProbe], Record]


def through_a_snapshot(new: Test, old: Test) -> Diagnosis:
    with ModelProbe(seed=0) as probe:
        written, actual = old(probe), new(probe)
        live, now = written.live_run, actual.live_run
        assert live is not None
        assert now is not None
        expected = files.decode(*files.encode(live.measured(written, written)), where="old").record
        found = compare(actual, expected)
        return diagnose(compare(now.isolated(actual, like=found.expected, names=found.names_before), expected))


def side_by_side(new: Test, old: Test) -> Diagnosis:
    with ModelProbe(seed=0) as probe:
        written, actual = old(probe), new(probe)
        live, now = written.live_run, actual.live_run
        assert live is not None
        assert now is not None
        expected = live.measured(written, written)
        found = compare(actual, expected)
        return diagnose(compare(now.isolated(actual, like=found.expected, names=found.names_before), expected))


def beside_a_commit(new: Test, old: Test, folder: Path) -> Diagnosis:
    here, there, again = folder / "here", folder / "there", folder / "again"
    for test, part, more in ((new, here, {}), (old, there, {"beside": here}), (new, again, {"like": there})):
        recorder = Recorder(part, **more)
        next(recorder.pytest_runtest_protocol(cast(pytest.Item, SimpleNamespace(nodeid="test"))))
        with ModelProbe(seed=0, recorder=recorder) as probe:
            test(probe)
    mine, theirs = (read_written(part)["test", "run 1"] for part in (again, there))
    return judged(mine, theirs).diagnosis


def causes(found: Diagnosis) -> list[tuple[object, ...]]:
    """Return all but the sizes, which a file rounds."""
    told = [("cause", cause) for cause in found.causes] + [("possible", cause) for cause in found.possible]
    return [(how, c.kind, c.layer, c.what, c.evidence, c.is_measured, c.effect, c.hints) for how, c in told]


def run(factory: Callable[[], nn.Module], *shape: int, ids: bool = False) -> Test:
    """Return a test that runs a model whose weights are drawn in the order in which its layers are made."""

    def test(probe: ModelProbe) -> Record:
        model = factory().eval()
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                times = getattr(parameter, "times", 0.5)
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * times)
        return probe.run(model, probe.randint(0, 20, shape) if ids else probe.randn(*shape), loss="random")

    return test


class Regrouped(nn.Module):
    """Norm and head in one container, or not."""

    def __init__(self, eps: float, *, grouped: bool) -> None:
        super().__init__()
        self.norm, self.mid = nn.LayerNorm(8, eps=eps), nn.Linear(8, 8)
        if grouped:
            self.head: nn.Module = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 5))
        else:
            self.head_norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)
        self._grouped = [grouped]

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.norm(x)).mean(1)
        return cast(Tensor, self.head(x) if self._grouped[0] else self.head(self.head_norm(x)))


class Mixer(nn.Module):
    """Calls its convolution, or uses the weight of it."""

    def __init__(self, *, calls: bool) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 8)
        self._calls = [calls]

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        same = nn.functional.conv1d(x, self.conv.weight, self.conv.bias, padding=1)
        x = self.conv(x) if self._calls[0] else same
        return cast(Tensor, self.out(x.transpose(1, 2).relu()))


def with_weights(module: nn.Module, times: float, name: str) -> nn.Module:
    """Return a module of which one weight is another."""
    module.get_parameter(name).times = times  # type: ignore[attr-defined]
    return module


class Mixed(nn.Module):
    def __init__(self, *, calls: bool) -> None:
        super().__init__()
        self.emb, self.mixer = nn.Embedding(20, 8), Mixer(calls=calls)

    def forward(self, ids: Tensor) -> Tensor:
        return cast(Tensor, self.mixer(self.emb(ids)))


class Small(nn.Module):
    """A model of which each test changes one thing."""

    def __init__(self, act: nn.Module, how: Callable[[Any, Tensor], Tensor] = lambda self, x: x, **more: Any) -> None:
        super().__init__()
        self.norm, self.fc, self.act = nn.LayerNorm(8, eps=more.get("eps", 1e-5)), nn.Linear(8, 8), act
        self.register_buffer("scale", torch.tensor(more.get("scale", 1.5)))
        self._how = [how]

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self._how[0](self, self.act(self.fc(self.norm(x))) * self.scale))


def small(*of: Any, **more: Any) -> Test:
    return run(lambda: Small(*(of or (nn.ReLU(),)), **more), 2, 6, 8)


SMALL = small()
PAIRS: dict[str, tuple[Test, Test, str]] = {
    # A container that came apart has no size of its own: x-transformers and vit-pytorch write heads so.
    "a head that came apart": (
        run(lambda: Regrouped(1e-5, grouped=True), 2, 6, 8),
        run(lambda: Regrouped(0.3, grouped=False), 2, 6, 8),
        "norm.eps 1e-05 → 0.3: its output changed by ",
    ),
    # A child that is used only through its weight, as by the fused kernels of Mamba.
    "a child whose weight is used": (
        run(lambda: with_weights(Mixed(calls=True), 1.0, "emb.weight"), 2, 7, ids=True),
        run(lambda: with_weights(Mixed(calls=False), 3.0, "emb.weight"), 2, 7, ids=True),
        "emb: weights changed by ",
    ),
    "a call more": (SMALL, small(nn.ReLU(), lambda self, x: self.fc(x)), "(root): own code calls fc 2 times, not 1"),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_of_models_has_the_same_causes_however_it_is_compared(pair: str, tmp_path: Path) -> None:
    old, new, line = PAIRS[pair]
    found = through_a_snapshot(new, old)
    assert first_line(found).startswith(line)
    assert causes(side_by_side(new, old)) == causes(found)
    assert causes(beside_a_commit(new, old, tmp_path)) == causes(found)


@pytest.mark.parametrize("pair", ["a head that came apart", "a child whose weight is used"])
def test_what_the_model_s_output_changed_by_is_not_said_of_a_cause_without_a_size(pair: str) -> None:
    old, new, _ = PAIRS[pair]
    found = through_a_snapshot(new, old)
    sizes = [cause.is_measured for cause in found.causes]
    assert sizes == sorted(sizes, reverse=True)
    assert not all(sizes)
    assert "the model's output" not in first_line(found)
