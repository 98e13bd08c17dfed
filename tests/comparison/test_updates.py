"""What an optimizer did in a step, compared: hyperparameters, gradients on their way to it, updates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_modelprobe import ModelProbe, Record, assert_same_behavior, files
from pytest_modelprobe.comparison import compare, diagnose
from pytest_modelprobe.comparison.text import first_line
from pytest_modelprobe.record import with_applied_gradients

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(**options: Any) -> Make:
    return lambda parameters: torch.optim.AdamW(parameters, **{"lr": 1e-3, **options})


def sgd(**options: Any) -> Make:
    return lambda parameters: torch.optim.SGD(parameters, **{"lr": 0.1, **options})


def step(make: Make, between: str = "", passes: int = 1) -> Record:
    """The record of one step; ``between`` is what happens between the backward and the step."""
    probe = ModelProbe()
    model = probe.build(lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)))
    optimizer = make(model.parameters())
    watch = probe.watch(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    for number in range(passes):
        loss = model(probe.randn(5, 6, name=f"batch {number}")).square().sum()
        (scaler.scale(loss) if between == "unscale" else loss).backward()
    if between == "unscale":
        scaler.unscale_(optimizer)
    elif between == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    elif between == "clip values":
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    elif between == "reset":
        optimizer.zero_grad()
    elif between == "zeros":
        optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    return watch.first_step


def first(actual: Record, expected: Record) -> str:
    return first_line(diagnose(compare(actual, expected)))


@pytest.mark.parametrize("passes", [3])
@pytest.mark.parametrize(
    ("between", "applied"),
    [
        ("", "as they arrived"),
        ("clip", r"scaled by \S+ \(clipped\)"),
        ("clip values", r"others by \d of 6 parameters"),
        ("reset", "reset"),
        ("unscale", r"scaled by 1/4096 \(unscaled\)"),
    ],
)
def test_what_became_of_gradients_is_known(between: str, applied: str, passes: int) -> None:
    found = step(adamw(), between, passes).applied
    assert found is not None
    assert re.fullmatch(applied, found)


@pytest.mark.parametrize(
    ("make", "between", "said"),
    [
        (adamw(lr=1.0), "", "lr 0.001 → 1.0: updates x 1,000 in 6 of 6 parameters; 1 cause"),
        (adamw(maximize=True), "", "maximize False → True: updates changed in"),
        (adamw(weight_decay=0.5), "", "weight_decay 0.01 → 0.5: updates changed in"),
        (lambda p: torch.optim.Adam(p, 1e-3, weight_decay=0.01), "", "optimizer AdamW → Adam"),
        (
            lambda p: torch.optim.AdamW([*p][:3], 1e-3),
            "",
            "layer '1' (LayerNorm): the optimizer no longer updates bias",
        ),
        (adamw(), "reset", "gradients reset before the step, not applied as they arrived: updates are 0 in 6"),
        (adamw(), "clip", "gradients scaled by "),
        (adamw(), "clip values", "gradients replaced for "),
    ],
)
def test_the_first_line_says_what_the_optimizer_did(make: Make, between: str, said: str) -> None:
    assert first(step(make, between), step(adamw())).removeprefix("output unchanged; ").startswith(said)


class Secretly(torch.optim.SGD):
    """Does something else than its hyperparameters say, while it steps."""

    def __init__(self, parameters: Iterable[nn.Parameter], **options: Any) -> None:
        self.now, self.frozen = options, options.pop("frozen", 0)
        super().__init__(parameters, lr=0.1, weight_decay=0.5)
        type(self).__name__ = "SGD"

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        said = {key: group[key] for key in self.now}
        held = [parameter.detach().clone() for parameter in group["params"][: self.frozen]]
        group.update(self.now)
        super().step(closure)
        group.update(said)
        with torch.no_grad():
            for parameter, copy in zip(group["params"], held, strict=False):
                parameter.copy_(copy)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": 1.0}, "updates of 6 of 6 parameters x 10"),
        ({"lr": -0.1}, "updates of 6 of 6 parameters with the other sign"),
        ({"weight_decay": 5.0}, "updates of 5 of 6 parameters changed by"),
        ({"frozen": 3}, "updates of 3 of 6 parameters are 0"),
        ({"frozen": 2}, "layer '0' (Linear): updates are 0 (weight, bias)"),
    ],
)
def test_updates_that_nothing_explains_are_told_by_arithmetic(options: dict[str, Any], said: str) -> None:
    found = first(step(lambda p: Secretly(p, **options)), step(sgd(weight_decay=0.5)))
    assert said in found


def test_a_step_that_calls_that_of_its_class_is_one_step() -> None:
    probe = ModelProbe()
    model = probe.build(lambda: nn.Linear(3, 2))
    watch = probe.watch(model)
    torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)  # whose class has the hooks of torch from here on
    optimizer = Secretly(model.parameters())
    model(probe.randn(4, 3)).sum().backward()
    optimizer.step()
    assert watch.record.training is not None
    assert (watch.record.training.steps, len(watch.first_step.optimizers)) == (1, 1)


def test_groups_are_compared_by_number() -> None:
    def grouped(split: int, **options: Any) -> Make:
        def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            own = [*parameters]
            return torch.optim.AdamW([{"params": own[:split]}, {"params": own[split:], **options}], 1e-3)

        return make

    expected = step(grouped(2))
    assert "lr of group 1 0.001 → 0.002" in first(step(grouped(2, lr=0.002)), expected)
    assert "layer '1' (LayerNorm): weight group of the optimizer 1 → 0" in first(step(grouped(3)), expected)
    assert "groups of parameters 2 → 1" in first(step(adamw()), expected)


def test_both_names_of_a_tied_weight_are_in_its_group() -> None:
    probe = ModelProbe()
    model = probe.build(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model[1].weight = model[0].weight
    watch = probe.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(probe.randn(3, 4)).sum().backward()
    optimizer.step()
    assert [own.group for own in watch.first_step.parameters] == [0, 0, 0, 0]


def test_a_snapshot_of_a_step_has_all_of_it() -> None:
    expected = with_applied_gradients(step(adamw()))
    read = files.decode(*files.encode(expected), where="step").record
    assert (read.optimizers, read.applied) == (expected.optimizers, "as they arrived")
    groups = [(own.name, own.group, own.update is not None) for own in read.parameters]
    assert groups == [(own.name, own.group, True) for own in expected.parameters]
    assert compare(expected, read).same
    changed = with_applied_gradients(step(adamw(lr=1.0)))
    assert "lr 0.001 → 1.0: updates x 1,000 in 6 of 6 parameters" in first(changed, read)


def test_an_update_of_a_gradient_that_is_rounding_is_not_compared() -> None:
    """The bias before a BatchNorm has none, and Adam makes as much of the rounding as of any other gradient."""
    records = []
    for nudge in (0.0, 1e-7):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        watch = ModelProbe().watch(model)
        x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0)) * (1 + nudge)
        model(x).square().sum().backward()
        optimizer.step()
        records.append(watch.first_step)
    assert_same_behavior(*records)
