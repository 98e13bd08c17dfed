"""A training judged by the invariants of a healthy one: `assert_invariants`.

Each step is compared with what was the same in all steps of the healthy run. A finding names the layer, the parameter
or the group, and the steps. What follows from another finding comes after it: a parameter that the optimizer does not
hold, and then that it is not updated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pytest_modelprobe.assertions.sources import ProbeLike, WatchLike, record_of, source_of
from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.record import Plain, Record, Training, applied, containers
from pytest_modelprobe.text import Cell, count, failed, number, printable

from . import invariants
from .invariants import Invariants

__tracebackhide__ = True  # a traceback ends at the line of the test

RANGE = 10.0
"""Factor by which an update ratio may leave the range of the healthy run."""

_ADVICE = {
    "loop": "Look at zero_grad(), train() and eval() in the loop; assert_training_loop says more.",
    "hyperparameter": "Look at the arguments of the optimizer and at the scheduler.",
    "role": "Look at which parameters the optimizer is created with, and at requires_grad.",
    "tie": "Tied parameters are one tensor: tie them again after a load, a copy or to().",
    "forwards": "Look at how often the loop calls the model, and in which mode.",
    "mode": "Look at train(), eval() and the loop's first lines.",
    "calls": "Look at the forward of the model that calls it.",
    "gradients on": "Look for no_grad() around the call.",
    "autocast": "Look for autocast(enabled=False), or a call outside of the autocast block.",
    "random": "Look at the rate of dropout and at its mode.",
    "inputs": "Look at what the loop takes from its data loader.",
    "buffer": "Look at the mode of the layer, at track_running_stats and at momentum.",
}
"""What to look at, by the relation that does not hold; in the order in which findings are told."""

_ORDER = [*_ADVICE, "dtype", "gradient", "update", "applied", "ratio"]
_OUTERMOST = ("mode", "calls", "gradients on", "autocast")
"""Relations of a layer that the layers inside it follow; of others a container follows."""


@dataclass(frozen=True, slots=True)
class _Broken:
    """A relation that does not hold in a step."""

    relation: str
    where: str
    """Name of the layer or parameter, or what else it is of."""
    now: str
    """What it does, as a predicate: ``gets no gradient``."""
    then: str
    """The same of the healthy run."""


class InvariantsFile(Protocol):
    """The interface of ``modelprobe_snapshot``."""

    def stored(
        self, kind: type[Invariants], learn: Callable[[], Invariants], fits: Callable[[Invariants], bool]
    ) -> Invariants:
        """Return those in the file of the test; an update writes what ``learn`` returns, if they do not fit."""


def assert_invariants(subject: ProbeLike | WatchLike | Sequence[Record], expected: Invariants | InvariantsFile) -> None:
    """Assert that a training does in each step what a healthy one did.

    A relation that is not in the invariants, as it varied in the healthy run, is not looked at. Hyperparameters that
    followed a schedule, or may do so, as the optimizer has an ``initial_lr``, are compared in steps with the same
    number. The update ratio may leave its range by a factor of 10; it may fall further in steps after those that the
    invariants were learned from.

    Args:
        subject: A watch with ``steps=``, a probe with one, or records of steps: ``watch.steps[2:]``. Of records alone
            it is not known whether the training loop has mistakes, such as a missing ``zero_grad``.
        expected: The `Watch.invariants` of a healthy run, or `Invariants.load` of a file. With ``modelprobe_snapshot``
            they are in a file of the test; ``pytest --snapshot-update`` writes what it learns from this run, if there
            is no file or the run differs.

    Raises:
        AssertionError: A step differs; it names the layer or parameter, and the steps.
        NothingObservedError: No step was taken, or the watch keeps none.
        UsageError: The subject or the invariants are something else.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> def train(seed, rate=0.1):
    ...     torch.manual_seed(seed)
    ...     model = nn.Linear(2, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), rate)
    ...     with ModelProbe().watch(model, steps=4) as watch:
    ...         for _ in range(4):
    ...             optimizer.zero_grad()
    ...             model(torch.randn(8, 2)).square().mean().backward()
    ...             optimizer.step()
    ...     return watch
    >>> healthy = train(seed=0).invariants
    >>> assert_invariants(train(seed=1), healthy)
    >>> assert_invariants(train(seed=1, rate=1.0), healthy)
    Traceback (most recent call last):
    AssertionError: group 0 (SGD) has lr 1 in all 4 steps; in the healthy run it has lr 0.1
    <BLANKLINE>
    where           now        healthy run   steps
    group 0 (SGD)   has lr 1   has lr 0.1    0 to 3
    <BLANKLINE>
    Look at the arguments of the optimizer and at the scheduler.
    <BLANKLINE>
    If the change is meant, learn the invariants again.
    """
    is_file = hasattr(type(expected), "stored")
    if not (is_file or isinstance(expected, Invariants)):
        raise UsageError(
            f"assert_invariants takes the invariants of a healthy run second; got {_a(expected)}: "
            "watch.invariants of it, Invariants.load(path) or modelprobe_snapshot"
        )
    steps, training = _steps_of(subject)
    facts = [invariants.facts_of(record) for record in steps]
    if not isinstance(expected, Invariants):
        expected = expected.stored(
            Invariants, lambda: invariants.learned(steps, training), lambda stored: not _broken(facts, training, stored)
        )
    found = _broken(facts, training, expected)
    if not found:
        return
    shown = sorted(_without_followers(found).items(), key=lambda item: (_ORDER.index(item[0].relation), item[1][:1]))
    first, times = shown[0]
    layer = steps[0].layers.get(first.where)
    rows: list[list[Cell]] = [[one.where, one.now, one.then, _numbers(at) or "-"] for one, at in shown]
    raise failed(
        f"{first.where if layer is None else layer.label} {first.now}{_when(times, len(facts))}; in the healthy run it "
        f"{first.then}",
        ["where", "now", "healthy run", "steps"],
        rows,
        _ADVICE.get(first.relation, ""),
        "If the change is meant, learn the invariants again.",
    )


def _broken(
    facts: Sequence[invariants.StepFacts], training: Training | None, expected: Invariants
) -> dict[_Broken, list[int]]:
    """Return what does not hold, each with the numbers of its steps; of the loop as a whole there are none."""
    found: dict[_Broken, list[int]] = {}
    if training is not None:
        found.update({broken: [] for broken in _of_loop(expected, training)})
    for place, one in enumerate(facts):
        for broken in _of_step(one, expected, facts[:place]):
            # Each step has a ratio of its own: that of the first is told.
            same = (old for old in found if broken.relation == old.relation == "ratio" and broken.where == old.where)
            found.setdefault(next(same, broken), []).append(one.number)
    found.update(_of_applied(facts, expected.applied))
    return found


def _steps_of(subject: ProbeLike | WatchLike | Sequence[Record]) -> tuple[Sequence[Record], Training | None]:
    training = None
    if isinstance(subject, Sequence):
        steps = subject
    else:
        source = source_of(subject)
        if isinstance(source, Record):
            raise UsageError(
                "assert_invariants takes a watch over steps, or their records; got one record: give [record]"
            )
        training = record_of(source).training
        steps = source.steps
    if not steps:
        raise NothingObservedError(
            "there is no step to judge: watch with steps= of 1 or more, and keep the watch open while an optimizer "
            "with a parameter of the model steps"
        )
    other = next((one for one in steps if not isinstance(one, Record)), None)
    if other is not None:
        raise UsageError(f"assert_invariants takes a watch or records of steps first; among them is {_a(other)}")
    return list(steps), training


# --- what does not hold -------------------------------------------------------------------------------------------


def _of_loop(expected: Invariants, training: Training) -> Iterator[_Broken]:
    said = {
        "stale": ("adds gradients to those of the step before", "resets them"),
        "mixed": ("uses gradients of another optimizer's loss", "does not"),
        "evaluating": ("takes steps with gradients of forwards in evaluation mode", "takes none"),
        "emptied": ("resets gradients between the backward and the step", "does not"),
        "idle": ("runs forwards without gradients in training mode", "runs none"),
    }
    for name in invariants.MISTAKES:
        times = getattr(training, name)
        if name in expected.never and times:
            what, then = said[name]
            now = f"{what}, {count(times, 'time')} of {training.steps:,}"
            yield _Broken("loop", "the training loop", now, then)


def _of_step(
    one: invariants.StepFacts, expected: Invariants, before: Sequence[invariants.StepFacts]
) -> Iterator[_Broken]:
    yield from _of_groups(one, expected)
    yield from _of_parameters(one, expected)
    yield from _of_forwards(one, expected)
    if before:
        yield from _of_neighbors(before[-1], one, expected)
        yield from _of_inputs(one, expected, before)
    if expected.passes not in (None, one.passes):
        now, then = (f"has {count(n or 0, 'backward pass')} in a step" for n in (one.passes, expected.passes))
        yield _Broken("forwards", "the training loop", now, then)


def _of_applied(facts: Sequence[invariants.StepFacts], expected: str | None) -> Iterator[tuple[_Broken, list[int]]]:
    """Yield in which steps the optimizer had other gradients than those that it had in the healthy run.

    Whether clipping does something depends on the norm: between that and nothing a step may change, and not all steps.
    """
    found: dict[str, list[int]] = {}
    for one in facts:
        if None not in (expected, one.applied) and one.applied != expected:
            found.setdefault(str(one.applied), []).append(one.number)
    for how, at in found.items():
        if {how, expected} != {applied.AS_THEY_ARRIVED, applied.SCALED} or len(at) == len(facts):
            now, then = (f"has gradients {_HOW.get(one, one)}" for one in (how, str(expected)))
            yield _Broken("applied", "the optimizer", now, then), at


_HOW = {applied.OTHERS: "other than those that arrived", applied.SCALED: "scaled, as by clipping"}


def _of_groups(one: invariants.StepFacts, expected: Invariants) -> Iterator[_Broken]:
    stepped = set()
    for group in one.groups:
        place = _number_of(group, expected)
        if place is None:
            continue
        stepped.add(place)
        healthy = expected.groups[place]
        where = _group_name(place, expected)
        if group.optimizer != healthy.optimizer:
            now, then = (f"is stepped by {name}" for name in (group.optimizer, healthy.optimizer))
            yield _Broken("hyperparameter", where, now, then)
        for name, value in _options_at(healthy, one.number, expected).items():
            if name in group.options and not _equal(group.options[name], value):
                now, then = (f"has {name} {_shown(v)}" for v in (group.options[name], value))
                yield _Broken("hyperparameter", where, now, then)
        if group.ratio is not None and healthy.update_ratio:
            low, high = healthy.update_ratio
            low = low / RANGE if one.number <= expected.last else 0.0
            if not low <= group.ratio <= high * RANGE:
                known = _range(*healthy.update_ratio)
                now = f"updates by {number(group.ratio)} of its norm, for a learning rate of 1"
                yield _Broken("ratio", where, now, f"updates by {known}")
    for place, healthy in enumerate(expected.groups):
        if healthy.every_step and place not in stepped:
            yield _Broken("role", _group_name(place, expected), "is not stepped", "is stepped in every step")


def _range(low: float, high: float) -> str:
    """Return ``0.1 to 0.3``, or one number.

    >>> _range(0.1, 0.3), _range(0.1, 0.1)
    ('0.1 to 0.3', '0.1')
    """
    return number(low) if number(low) == number(high) else f"{number(low)} to {number(high)}"


def _number_of(group: invariants.StepGroup, expected: Invariants) -> int | None:
    """Return the number in the healthy run of the group with most of these parameters."""
    known = (expected.parameters[name].group for name in sorted(group.members) if name in expected.parameters)
    votes = Counter(place for place in known if place is not None)
    return votes.most_common(1)[0][0] if votes else None


def _options_at(healthy: invariants.GroupInvariants, step: int, expected: Invariants) -> dict[str, Plain]:
    """Return the hyperparameters that a step with this number has to have."""
    scheduled = {name: values[str(step)] for name, values in healthy.schedules.items() if str(step) in values}
    # A scheduler may change, in later steps, what was constant in those that were seen.
    constant = step <= expected.last or "initial_lr" not in {*healthy.options, *healthy.schedules}
    return {**(healthy.options if constant else {}), **scheduled}


def _of_parameters(one: invariants.StepFacts, expected: Invariants) -> Iterator[_Broken]:
    numbers = [_number_of(group, expected) for group in one.groups]
    for name in one.parameters.keys() - expected.parameters.keys():
        yield _Broken("role", name, "is a parameter", "is none")
    for name, healthy in expected.parameters.items():
        own = one.parameters.get(name)
        if own is None:
            yield _Broken("role", name, "is no parameter that is recorded", "is one")
        else:
            yield from _of_parameter(name, own, healthy, numbers, expected)


def _of_parameter(
    name: str,
    own: invariants.ParameterInvariants,
    healthy: invariants.ParameterInvariants,
    numbers: Sequence[int | None],
    expected: Invariants,
) -> Iterator[_Broken]:
    if _differ(own.role, healthy.role):
        now, then = (_ROLES[str(role)] for role in (own.role, healthy.role))
        yield _Broken("role", name, now, then)
    group = None if own.group is None else numbers[own.group]
    if _differ(group, healthy.group):
        now, then = (f"is in {_group_name(n or 0, expected)}" for n in (group, healthy.group))
        yield _Broken("role", name, now, then)
    if own.tied_to != healthy.tied_to:
        now, then = (f"is tied to {tie}" if tie else "is a tensor of its own" for tie in (own.tied_to, healthy.tied_to))
        yield _Broken("tie", name, now, then)
    if _differ(own.gradient, healthy.gradient):
        now, then = (f"gets {'a' if there else 'no'} gradient" for there in (own.gradient, healthy.gradient))
        yield _Broken("gradient", name, now, then)
    if _differ(own.updated, healthy.updated):
        now, then = ("is updated" if done else "is not updated" for done in (own.updated, healthy.updated))
        yield _Broken("update", name, now, then)


_ROLES = {
    "optimized": "is held by an optimizer",
    "left out": "is left out of the optimizer",
    "frozen": "is frozen",
}


def _of_forwards(one: invariants.StepFacts, expected: Invariants) -> Iterator[_Broken]:
    known = {(forward.root, forward.training): forward for forward in expected.forwards}
    for kind, forward in one.forwards.items():
        if kind not in known:
            now = f"runs {count(forward.per_step or 0, 'forward')} in {_mode(forward.training)} in a step"
            yield _Broken("forwards", forward.root, now, "runs none")
    for kind, healthy in known.items():
        own = one.forwards.get(kind)
        if healthy.per_step is not None and (own is None or own.per_step != healthy.per_step):
            times = 0 if own is None else own.per_step or 0
            now, then = (
                f"runs {count(n, 'forward')} in {_mode(healthy.training)} in a step" for n in (times, healthy.per_step)
            )
            yield _Broken("forwards", healthy.root, now, then)
        if own is not None:
            yield from _of_layers(own, healthy)


def _of_layers(own: invariants.ForwardInvariants, healthy: invariants.ForwardInvariants) -> Iterator[_Broken]:
    for name in dict.fromkeys((*healthy.layers, *own.layers)):
        now, then = (forward.layers.get(name, invariants.CallInvariants(calls=0)) for forward in (own, healthy))
        said: list[tuple[str, object, object, Callable[[Any], str]]] = [
            ("calls", now.calls, then.calls, _calls),
            ("mode", now.training, then.training, lambda training: f"runs in {_mode(training)}"),
            (
                "gradients on",
                now.grad_enabled,
                then.grad_enabled,
                lambda on: f"runs with{'' if on else 'out'} gradients",
            ),
            ("autocast", now.autocast, then.autocast, _autocast),
            ("random", now.random, then.random, lambda draws: f"draws {'' if draws else 'no '}random numbers"),
            ("dtype", now.dtype, then.dtype, lambda dtype: f"returns {dtype}"),
        ]
        for relation, one, other, predicate in said:
            if _differ(one, other):
                yield _Broken(relation, name, predicate(one), predicate(other))


def _of_neighbors(before: invariants.StepFacts, one: invariants.StepFacts, expected: Invariants) -> Iterator[_Broken]:
    for name, changes in expected.buffers.items():
        changed = invariants.buffer_changed(before, one, name)
        if changed is not None and changed is not changes:
            now, then = ("changes" if does else "does not change" for does in (changed, changes))
            yield _Broken("buffer", name, now, then)
    same = [name for name, state in reversed(list(one.random.items())) if before.random.get(name) == state]
    first = next((name for name in same if not any(name in containers(other) for other in same)), None)
    if expected.new_random and first is not None:
        yield _Broken("random", first, "draws the random numbers of the step before", "draws others in each step")


def _of_inputs(
    one: invariants.StepFacts, expected: Invariants, before: Sequence[invariants.StepFacts]
) -> Iterator[_Broken]:
    # Later steps may be those of another epoch, with the same batches.
    compared = before if expected.inputs == "differ" and one.number <= expected.last else before[-1:]
    again = next((old for old in reversed(compared) if invariants.have_equal_inputs(old, one)), None)
    if expected.inputs is not None and again is not None:
        which = "the step before" if again is before[-1] else f"step {again.number}"
        yield _Broken("inputs", "the model", f"is given the inputs of {which}", "is given others in each step")


def _differ(now: object, then: object) -> bool:
    """Whether both are known, and differ."""
    return now is not None and then is not None and now != then


def _equal(a: Plain, b: Plain) -> bool:
    numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b)) if numbers else a == b  # type: ignore[operator,arg-type]


# --- in words -----------------------------------------------------------------------------------------------------


def _group_name(place: int, expected: Invariants) -> str:
    return f"group {place} ({expected.groups[place].optimizer})"


def _shown(value: Plain) -> str:
    return number(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def _mode(training: object) -> str:
    return f"{'training' if training else 'evaluation'} mode"


def _calls(calls: int) -> str:
    return f"is called {count(calls, 'time')} in a forward" if calls else "is not called"


def _autocast(dtype: str) -> str:
    return "runs without autocast" if dtype == "off" else f"runs under autocast to {dtype}"


def _a(value: object) -> str:
    name = printable(type(value).__name__)
    return f"{'an' if name[:1] in 'AEIOaeio' else 'a'} {name}"


def _when(steps: Sequence[int], of: int) -> str:
    if not steps:  # of the loop as a whole
        return ""
    if len(steps) == of > 1:
        return f" in all {of} steps"
    return f" in step{'s' if len(steps) > 1 else ''} {_numbers(steps)}"


def _numbers(steps: Sequence[int]) -> str:
    """Return ``2``, ``0 to 4``, or ``1, 3``.

    >>> _numbers([2]), _numbers([0, 1, 2]), _numbers([1, 3])
    ('2', '0 to 2', '1, 3')
    """
    if len(steps) > 1 and list(steps) == list(range(steps[0], steps[-1] + 1)):
        return f"{steps[0]} to {steps[-1]}"
    return ", ".join(map(str, steps))


def _without_followers(found: Mapping[_Broken, Sequence[int]]) -> dict[_Broken, Sequence[int]]:
    """Leave out layers in which the same differs only as it does in a layer around or inside them."""
    names: dict[tuple[str, str, str], set[str]] = {}
    for broken in found:
        names.setdefault((broken.relation, broken.now, broken.then), set()).add(broken.where)

    def follows(broken: _Broken) -> bool:
        alike = names[broken.relation, broken.now, broken.then]
        if broken.relation in _OUTERMOST:
            return not alike.isdisjoint(containers(broken.where))
        inside = broken.relation in ("random", "dtype")
        return inside and any(broken.where in containers(name) for name in alike)

    return {broken: steps for broken, steps in found.items() if not follows(broken)}
