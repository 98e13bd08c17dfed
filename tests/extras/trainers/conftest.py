"""What the tests of all trainers share: a model with a frozen layer, samples, and what has to hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pytest_modelprobe import (
    ModelProbe,
    assert_all_params_have_grad,
    assert_frozen,
    assert_grad_finite,
    assert_grad_flow,
    assert_params_updated,
    assert_update_ratio,
)

PAGE = Path(__file__).parents[3] / "evidence/TRAINERS.md"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the cases that the page of the trainers claims for the ``ROW`` of a module: forwards and backwards a step."""
    if {"case", "forwards"} <= set(metafunc.fixturenames):
        _, header, rows = re.split(r"^(\| trainer \| plain .*)$", PAGE.read_text("utf-8"), flags=re.MULTILINE)
        cases = _cells(header)[1:]
        (row,) = [cells for line in rows.splitlines() if line and (cells := _cells(line))[0] == metafunc.module.ROW]
        each = [(case, *map(int, re.findall(r"\d+", cell))) for case, cell in zip(cases, row[1:], strict=True)]
        assert all(forwards == backwards for _, forwards, backwards in each)
        metafunc.parametrize(("case", "forwards"), [some[:2] for some in each], ids=cases)

    if {"way", "forwards"} <= set(metafunc.fixturenames):
        rows = re.findall(r"^\| ([^|]+?) \| (\d+) / \2 \|$", PAGE.read_text("utf-8"), flags=re.MULTILINE)
        metafunc.parametrize(("way", "forwards"), [(way, int(n)) for way, n in rows], ids=[way for way, _ in rows])


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.fc, self.act, self.drop = nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.25)
        self.stem = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(self.drop(self.act(self.fc(x)))))


@pytest.fixture
def training_arguments(case: str) -> dict[str, Any]:
    """What a case asks of `transformers.TrainingArguments`, of which those of trl are a kind."""
    by_case: dict[str, dict[str, Any]] = {
        "accumulation": {"gradient_accumulation_steps": 2},
        "bf16": {"bf16": True},
        "clipping": {"max_grad_norm": 1e-3},
        "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
        "compile": {"torch_compile": True, "torch_compile_backend": "eager"},
    }
    return by_case.get(case, {})


@pytest.fixture
def network() -> type[Net]:
    return Net


@pytest.fixture
def make(case: str) -> Callable[[], nn.Module]:
    """Makes a network, which is compiled in that case of the table."""

    def made() -> nn.Module:
        model = Net()
        if case == "compile":
            model.compile(backend="eager")
        return model

    return made


@pytest.fixture
def samples() -> TensorDataset:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x[:, :3].argmax(1))


Fit = Callable[[nn.Module], object]


@pytest.fixture
def holds() -> Callable[..., None]:
    """Train watched and unwatched; assert that the weights are equal, and everything that a test may assert."""

    def check(
        make: Callable[[], nn.Module], fit: Fit, *, forwards: int = 1, frozen: str = "**.stem", evaluated: bool = False
    ) -> None:
        unwatched = make()
        fit(unwatched)
        model = make()
        with ModelProbe() as probe:
            watch = probe.watch(model, steps=2)
            fit(model)
            assert [(s.forwards, s.backwards) for s in watch.steps] == [(forwards, forwards)] * 2
            assert bool(watch.evaluations.forwards) == evaluated
            assert not any(layer.startswith("_") for layer in watch.record.layers)
            for subject in (watch, watch.first_step):
                assert_grad_finite(subject)
                assert_grad_flow(subject, max_ratio=1e4)
                assert_all_params_have_grad(subject)
            assert_params_updated(watch)
            assert_update_ratio(watch)
            assert_frozen(watch, layers=frozen)
            with pytest.raises(AssertionError, match="not frozen"):
                assert_frozen(watch, layers="**")
            trained = [p for layer in watch.first_step.layers.values() for p in layer.parameters if p.requires_grad]
            assert all(p.applied is not None for p in trained)
            steps = [[p for p in step.parameters if p.update is not None] for step in watch.steps]
            for before, after in zip(*steps, strict=True):
                readings = (before.reading, before.update, after.reading)
                was, added, now = (r.fingerprint for r in readings if r is not None and r.fingerprint is not None)
                scale = 1e-6 * max(1.0, *map(abs, now))
                assert [a + b for a, b in zip(was, added, strict=True)] == pytest.approx(now, abs=scale)
        for name, tensor in unwatched.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), name

    return check
