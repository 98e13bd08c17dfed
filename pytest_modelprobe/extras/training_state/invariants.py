"""What is the same in every step of a training: `Invariants`, learned from a healthy run, and another judged by them.

They hold no number that depends on data, seed, batch size or ranks. A relation is learned only if it held in each step.
What varied, or is not known, is None or left out: it judges nothing. A finding names the layer, the parameter or the
group, and the steps. What follows from another finding comes after it: a parameter that the optimizer does not hold,
and then that it is not updated.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pytest_modelprobe.assertions.sources import ProbeLike, WatchLike, record_of, source_of
from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.record import (
    Call,
    Parameter,
    Plain,
    Reading,
    Record,
    Training,
    codec,
    containers,
    estimated_change,
    qualified,
)
from pytest_modelprobe.runs import Watch
from pytest_modelprobe.text import Cell, count, failed, number

__tracebackhide__ = True  # a traceback ends at the line of the test

FEWEST = 3
"""Steps that invariants are learned from, at least: what holds in two may be chance."""

SMALL = 1e-5
"""Update relative to the norm of the parameter up to which it is not taken for one: it may be rounding."""

FEW = 0.25
"""Share of positions up to which they are few, and from 1 less this on most. What is between varies with the data."""

MISTAKES = {
    "stale": ("adds gradients to those of the step before", "resets them"),
    "mixed": ("uses gradients of another optimizer's loss", "does not"),
    "evaluating": ("takes steps with gradients of forwards in evaluation mode", "takes none"),
    "emptied": ("resets gradients between the backward and the step", "does not"),
    "idle": ("runs forwards without gradients in training mode", "runs none"),
}
"""Counts of `Training` that are zero in most loops, in words. Skipped steps are not among them: they depend on the
data."""

Relations = Mapping[str, Plain]
"""Relation → its value in a step, of a layer or a parameter. None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInvariants:
    """The forwards of a kind in every step."""

    root: str
    """The layer whose outermost call is the forward."""
    training: bool
    """The mode of that layer."""
    per_step: int | None = None
    """How many there are in a step."""
    layers: Mapping[str, Relations] = field(default_factory=dict)
    """Of the layers that were called, by name: ``calls`` in a forward, ``training``, ``grad_enabled``, ``dtype`` of the
    outputs, and ``random``, whether it or a layer inside it draws random numbers. Of the root also ``positions``,
    whether a gradient arrives at three quarters or more of the positions of its output, or at a quarter or less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInvariants:
    """A group of parameters of an optimizer."""

    optimizer: str
    """Class name of the optimizer."""
    every_step: bool = True
    """Whether it was stepped in every step."""
    options: Relations = field(default_factory=dict)
    """Hyperparameters that were constant."""
    members: tuple[str, ...] = ()
    """Full names of its parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invariants:
    """What is the same in every step of a training. Made by `Watch.invariants`.

    >>> Invariants(model="Net", steps=3, last=2).to_dict()
    {'model': 'Net', 'steps': 3, 'last': 2}
    """

    model: str
    """Class name of the model."""
    steps: int
    """Steps that they were learned from."""
    last: int
    """Number of the last of them, from 0."""
    inputs: str | None = None
    """``differ``: no step had the inputs of an earlier one; ``differ from the step before``: at least not of that."""
    never: tuple[str, ...] = ()
    """Mistakes of a training loop that did not occur: names of counts of `Training`."""
    forwards: tuple[ForwardInvariants, ...] = ()
    """By root and mode, in order of their appearance."""
    groups: tuple[GroupInvariants, ...] = ()
    """The groups of all optimizers, in the order in which they stepped."""
    parameters: Mapping[str, Relations] = field(default_factory=dict)
    """By full name: ``role``, which is ``optimized``, ``left out`` of all optimizers or ``frozen``; ``tied_to``;
    ``gradient``, whether one arrives; and ``updated``, whether the values change by more than rounding in steps with a
    learning rate that is not zero."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, numbers and strings that strict JSON can hold."""
        return cast(dict[str, Any], codec.encode(self))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Invariants:
        """Return the invariants that `to_dict` described.

        Raises:
            ValueError: The data is of something else.

        >>> Invariants.from_dict({"model": "Net", "steps": 3, "last": 2}).steps
        3
        """
        try:
            return cast(Invariants, codec.decode(cls, data))
        except TypeError as error:  # a field without which there is no such thing is missing
            raise ValueError(f"no invariants: {error}") from error

    def as_json(self) -> str:
        """Return text in JSON, with a line for each layer, parameter and group.

        >>> print(Invariants(model="Net", steps=3, last=2, parameters={"bias": {"gradient": True}}).as_json(), end="")
        {
          "model": "Net",
          "steps": 3,
          "last": 2,
          "parameters": {
            "bias": {"gradient": true}
          }
        }
        """
        return "\n".join(_lines(self.to_dict(), "")) + "\n"

    def save(self, path: str | Path) -> None:
        """Write them to a file of text, with a line for each layer and parameter, so that a change can be reviewed."""
        Path(path).write_text(self.as_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Invariants:
        """Return the invariants that `save` wrote.

        Raises:
            UsageError: The file does not exist, or has something else.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise UsageError(
                f"there is no file {path}: watch.invariants.save(path) of a healthy run writes it"
            ) from None
        except (ValueError, UnicodeDecodeError) as error:
            raise UsageError(
                f"{path} has no invariants ({error}): write it again with watch.invariants.save(path)"
            ) from None

    def __repr__(self) -> str:
        seen = count(len(self.parameters), "parameter"), count(self.steps, "step")
        return f"<Invariants of {self.model}: {seen[0]}, learned from {seen[1]}>"


def _lines(value: Any, indent: str) -> list[str]:
    """Return the lines of a dict or list, the first without its indentation."""
    nested = any(isinstance(one, (dict, list)) for one in (value.values() if isinstance(value, dict) else value))
    if not nested:
        return [json.dumps(value)]
    items = value.items() if isinstance(value, dict) else ((None, one) for one in value)
    lines: list[str] = []
    for key, one in items:
        first, *rest = _lines(one, f"{indent}  ") if isinstance(one, (dict, list)) else [json.dumps(one)]
        if lines:
            lines[-1] += ","
        lines += [f"{indent}  {'' if key is None else json.dumps(key) + ': '}{first}", *rest]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return [opening, *lines, f"{indent}{closing}"]


# --- the facts of one step --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What one step was, in the words of `Invariants`."""

    number: int
    forwards: Mapping[tuple[str, bool], ForwardInvariants]
    groups: tuple[GroupInvariants, ...]
    parameters: Mapping[str, Relations]
    inputs: Mapping[str, Reading]
    """What the model was given."""


def _step(record: Record) -> _Step:
    if record.step is None:
        raise UsageError(
            f"the record of {record.model} is not of one step of training: take watch.steps of a watch with steps="
        )
    named = [(qualified(layer.name, own.name), own) for layer in record.layers.values() for own in layer.parameters]
    idle = {i for i, group in enumerate(record.optimizers) if group.options.get("lr") == 0}  # as before a warm-up
    return _Step(
        number=record.step,
        forwards=_forwards(record),
        groups=tuple(
            GroupInvariants(
                optimizer=group.optimizer,
                options=group.options,
                members=tuple(name for name, own in named if own.group == i),
            )
            for i, group in enumerate(record.optimizers)
        ),
        parameters={name: _parameter(own, idle=own.group in idle) for name, own in named},
        inputs={
            f"{call.root} {call.root_training} {call.index} {value.path}": value.forward
            for layer, call in record.calls
            if call.root == layer.name
            for value in call.inputs
        },
    )


def _parameter(own: Parameter, *, idle: bool) -> Relations:
    found: dict[str, Plain] = {"tied_to": own.tied_to or ""}
    if own.group is not None or own.update is not None:
        found["role"] = "optimized"
    elif own.left_out or not own.requires_grad:
        found["role"] = "left out" if own.left_out else "frozen"
        found["updated"] = False
    if own.gradient is None or own.gradient.tensors:
        found["gradient"] = own.gradient is not None
    if own.update is not None and own.update.statistics is not None and not idle:
        added, norm = own.update.statistics.norm, 0.0 if own.reading.statistics is None else own.reading.statistics.norm
        # Of a bias before a norm the gradient is rounding, and may be zero in another run.
        found["updated"] = True if added > SMALL * norm else False if not added else None
    return found


def _forwards(record: Record) -> dict[tuple[str, bool], ForwardInvariants]:
    kinds: dict[tuple[str, bool], dict[str, list[Call]]] = {}
    for layer, call in record.calls:
        kinds.setdefault((call.root, call.root_training), {}).setdefault(layer.name, []).append(call)
    found = {}
    for (root, training), layers in kinds.items():
        forwards = max(call.forwards for calls in layers.values() for call in calls)
        found[root, training] = ForwardInvariants(
            root=root,
            training=training,
            per_step=forwards,
            layers={
                name: _calls(layers[name], forwards) | ({"positions": _positions(layers[name])} if name == root else {})
                for name in record.layers
                if name in layers
            },
        )
    return found


def _calls(calls: Sequence[Call], forwards: int) -> dict[str, Plain]:
    dtypes = (", ".join(dict.fromkeys(value.dtype for value in call.outputs)) for call in calls if call.outputs)
    return {
        "calls": len(calls) if all(call.forwards == forwards for call in calls) else None,
        "training": _same(call.training for call in calls),
        "grad_enabled": _same(call.grad_enabled for call in calls),
        "dtype": _same(dtypes),
        "random": _same(call.random is not None for call in calls),
    }


def _positions(calls: Iterable[Call]) -> bool | None:
    """Whether a gradient arrives at most positions of the first output that has positions; None if it is not known.

    A batch of one sample is never padded, and tells nothing of others.
    """
    values = (value for call in calls for value in call.outputs if value.shape[:1] != (1,))
    share = next((share for value in values if (share := value.without_gradient) is not None), 0.5)
    return True if share <= FEW else False if share >= 1 - FEW else None


def _same(values: Iterable[Plain]) -> Any:
    """Return the value that all are, or None if there is none or they differ.

    >>> _same([1, 1]), _same([1, None, 1]), _same([])
    (1, None, None)
    """
    found = list(values)
    return found[0] if found and all(value == found[0] for value in found) else None


def _have_equal_inputs(a: _Step, b: _Step) -> bool | None:
    """Whether two steps were given the same tensors; None if that is not known."""
    if a.inputs.keys() != b.inputs.keys():
        return False
    found = [_are_equal(a.inputs[key], b.inputs[key]) for key in a.inputs]
    return False if False in found else None if None in found or not found else True


def _are_equal(a: Reading, b: Reading) -> bool | None:
    if a.digest is not None and b.digest is not None:
        return a.digest == b.digest
    one, other = a.statistics, b.statistics
    if one is None or other is None:
        return None
    if (one.count, one.min, one.max, one.zeros) != (other.count, other.min, other.max, other.zeros):
        return False
    if a.fingerprint is None or b.fingerprint is None:
        return None
    return estimated_change(a.fingerprint, b.fingerprint) < 1e-9


# --- learning ---------------------------------------------------------------------------------------------------------


def learned(steps: Sequence[Record], training: Training | None = None) -> Invariants:
    """Return what was the same in every step.

    Args:
        steps: Records of steps of one training, in order.
        training: What optimizers did in it, of the record of all forwards; None: not known.

    Raises:
        UsageError: There are fewer than three steps, or a record is not of a step.
    """
    if len(steps) < FEWEST:
        raise UsageError(
            f"invariants are learned from {FEWEST} steps of training or more, and there "
            f"{'is' if len(steps) == 1 else 'are'} {len(steps)}: keep more with watch(model, steps={FEWEST + 2}), and "
            "train while the watch is open"
        )
    facts = [_step(record) for record in steps]
    return Invariants(
        model=steps[0].model,
        steps=len(facts),
        last=max(one.number for one in facts),
        inputs=_learned_inputs(facts),
        never=() if training is None else tuple(name for name in MISTAKES if not getattr(training, name)),
        forwards=tuple(_learned_forwards(facts)),
        groups=tuple(_learned_groups(facts)),
        parameters={
            name: _learned_parameter([one.parameters.get(name, {}) for one in facts]) for name in facts[0].parameters
        },
    )


def _learned_inputs(facts: Sequence[_Step]) -> str | None:
    if any(_have_equal_inputs(a, b) is not False for a, b in itertools.pairwise(facts)):
        return None
    pairs = itertools.combinations(facts, 2)
    return "differ" if all(_have_equal_inputs(a, b) is False for a, b in pairs) else "differ from the step before"


def _learned_forwards(facts: Sequence[_Step]) -> Iterator[ForwardInvariants]:
    for root, training in dict.fromkeys(kind for one in facts for kind in one.forwards):
        seen = [one.forwards.get((root, training)) for one in facts]
        there = [one for one in seen if one is not None]
        yield ForwardInvariants(
            root=root,
            training=training,
            per_step=_same(None if one is None else one.per_step for one in seen),
            layers={
                name: _in_all([one.layers.get(name, {"calls": 0}) for one in there])
                for name in dict.fromkeys(name for one in there for name in one.layers)
            },
        )


def _in_all(seen: Sequence[Relations]) -> dict[str, Plain]:
    """Return the relations that have the same value wherever they are told."""
    keys = dict.fromkeys(key for one in seen for key in one)
    values: dict[str, Plain] = {key: _same([one[key] for one in seen if key in one]) for key in keys}
    return {key: value for key, value in values.items() if value is not None}


def _learned_parameter(seen: Sequence[Relations]) -> dict[str, Plain]:
    found = _in_all(seen)
    # One whose gradient only leads to no update is not known for it.
    if found.get("updated") is False and found.get("role") == "optimized" and any(one.get("gradient") for one in seen):
        del found["updated"]
    return found


def _learned_groups(facts: Sequence[_Step]) -> Iterator[GroupInvariants]:
    """Yield the groups by their parameters: in some steps there may be others, or none."""
    seen: dict[tuple[str, ...], list[GroupInvariants]] = {}
    for group in itertools.chain.from_iterable(one.groups for one in facts):
        if group.members:
            seen.setdefault(group.members, []).append(group)
    for members, groups in seen.items():
        yield GroupInvariants(
            optimizer=groups[0].optimizer,
            every_step=len(groups) == len(facts),
            options=_in_all([group.options for group in groups]),
            members=members,
        )


def _of_watch(watch: Watch) -> Invariants:
    """What was the same in every step that is kept; `assert_invariants` judges another training by it.

    Raises:
        UsageError: Fewer than three steps were kept.
    """
    return learned(list(watch.steps), watch.record.training)


of_watch = property(_of_watch)


# --- judging ----------------------------------------------------------------------------------------------------------

_ADVICE = {
    "loop": "Look at zero_grad(), train() and eval() in the loop; assert_training_loop says more.",
    "hyperparameter": "Look at the arguments of the optimizer and at the scheduler.",
    "role": "Look at which parameters the optimizer is created with, and at requires_grad.",
    "tied_to": "Tied parameters are one tensor: tie them again after a load, a copy or to().",
    "forwards": "Look at how often the loop calls the model, and in which mode.",
    "training": "Look at train(), eval() and the loop's first lines.",
    "calls": "Look at the forward of the model that calls it.",
    "grad_enabled": "Look for no_grad() around the call.",
    "random": "Look at the rate of dropout and at its mode.",
    "inputs": "Look at what the loop takes from its data loader.",
    "dtype": "Look for autocast(enabled=False), or a call outside of the autocast block.",
    "positions": "Look at lengths and masks, and at what the loss ignores.",
    "gradient": "",
    "updated": "",
}
"""What to look at, by the relation that does not hold; in the order in which findings are told."""

_SAID: Mapping[str, Callable[[Any], str]] = {
    "role": {
        "optimized": "is held by an optimizer",
        "left out": "is left out of the optimizer",
        "frozen": "is frozen",
        "none": "is no parameter",
    }.__getitem__,
    "tied_to": lambda tie: f"is tied to {tie}" if tie else "is a tensor of its own",
    "training": lambda training: f"runs in {_mode(training)}",
    "calls": lambda calls: f"is called {count(calls, 'time')} in a forward" if calls else "is not called",
    "grad_enabled": lambda on: f"runs with{'' if on else 'out'} gradients",
    "random": lambda draws: f"draws {'' if draws else 'no '}random numbers",
    "dtype": lambda dtype: f"returns {dtype}",
    "positions": lambda most: (
        f"gets no gradient at {'a quarter or less' if most else 'three quarters or more'} of its output positions"
    ),
    "gradient": lambda there: f"gets {'a' if there else 'no'} gradient",
    "updated": lambda done: f"is {'' if done else 'not '}updated",
}
"""Relation of a layer or parameter → what it does, as a predicate."""

_OUTERMOST = ("training", "calls", "grad_enabled")
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


def assert_invariants(subject: ProbeLike | WatchLike | Sequence[Record], expected: Invariants) -> None:
    """Assert that a training does in each step what a healthy one did.

    A relation that is not in the invariants, as it varied in the healthy run, is not looked at. Where the optimizer has
    an ``initial_lr``, so that a scheduler may change hyperparameters, they are compared in the steps that the
    invariants were learned from.

    Args:
        subject: A watch with ``steps=``, a probe with one, or records of steps: ``watch.steps[2:]``. Of records alone
            it is not known whether the training loop has mistakes, such as a missing ``zero_grad``.
        expected: The `Watch.invariants` of a healthy run, or `Invariants.load` of a file.

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
    if not isinstance(expected, Invariants):
        raise UsageError(
            f"assert_invariants takes the invariants of a healthy run second; got {type(expected).__name__}: "
            "watch.invariants of it, or Invariants.load(path)"
        )
    steps, training = _steps_of(subject)
    facts = [_step(record) for record in steps]
    found = _broken(facts, training, expected)
    if not found:
        return
    order = list(_ADVICE)
    shown = sorted(_without_followers(found).items(), key=lambda item: (order.index(item[0].relation), item[1][:1]))
    first, times = shown[0]
    layer = steps[0].layers.get(first.where)
    rows: list[list[Cell]] = [[one.where, one.now, one.then, _numbers(at) or "-"] for one, at in shown]
    raise failed(
        f"{first.where if layer is None else layer.label} {first.now}{_when(times, len(facts))}; in the healthy run it "
        f"{first.then}",
        ["where", "now", "healthy run", "steps"],
        rows,
        _ADVICE[first.relation],
        "If the change is meant, learn the invariants again.",
    )


def _broken(facts: Sequence[_Step], training: Training | None, expected: Invariants) -> dict[_Broken, list[int]]:
    """Return what does not hold, each with the numbers of its steps; of the loop as a whole there are none."""
    found: dict[_Broken, list[int]] = {}
    for name, (what, then) in MISTAKES.items():
        if training is not None and name in expected.never and (times := getattr(training, name)):
            now = f"{what}, {count(times, 'time')} of {training.steps:,}"
            found[_Broken("loop", "the training loop", now, then)] = []
    for place, one in enumerate(facts):
        for broken in itertools.chain(
            _of_groups(one, expected),
            _of_relations(one.parameters, expected.parameters, {"role": "none"}),
            _of_forwards(one, expected),
            _of_inputs(one, expected, facts[:place]),
        ):
            found.setdefault(broken, []).append(one.number)
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
        raise UsageError(
            f"assert_invariants takes a watch or records of steps first; among them is {type(other).__name__}"
        )
    return list(steps), training


def _of_groups(one: _Step, expected: Invariants) -> Iterator[_Broken]:
    for place, healthy in enumerate(expected.groups):
        where = f"group {place} ({healthy.optimizer})"
        # The group with most of its parameters, of which some may have another role.
        common = {i: len({*group.members} & {*healthy.members}) for i, group in enumerate(one.groups)}
        group = one.groups[max(common, key=lambda i: common[i])] if any(common.values()) else None
        if group is None:
            if healthy.every_step:
                yield _Broken("role", where, "is not stepped", "is stepped in every step")
            continue
        if group.optimizer != healthy.optimizer:
            now, then = (f"is stepped by {name}" for name in (group.optimizer, healthy.optimizer))
            yield _Broken("hyperparameter", where, now, then)
        # A scheduler may change, in later steps, what was constant in those that were seen.
        if one.number <= expected.last or "initial_lr" not in group.options:
            for name, value in healthy.options.items():
                if name in group.options and not _equal(group.options[name], value):
                    now, then = (
                        f"has {name} {number(v) if isinstance(v, float) else v}" for v in (group.options[name], value)
                    )
                    yield _Broken("hyperparameter", where, now, then)


def _of_relations(
    own: Mapping[str, Relations], healthy: Mapping[str, Relations], absent: Relations
) -> Iterator[_Broken]:
    for name in dict.fromkeys((*healthy, *own)):
        one, other = (there.get(name, absent) for there in (own, healthy))
        for relation, said in _SAID.items():
            now, then = one.get(relation), other.get(relation)
            if now is not None and then is not None and now != then:
                yield _Broken(relation, name, said(now), said(then))


def _of_forwards(one: _Step, expected: Invariants) -> Iterator[_Broken]:
    known = {(forward.root, forward.training): forward for forward in expected.forwards}
    for kind in dict.fromkeys((*known, *one.forwards)):
        absent = ForwardInvariants(root=kind[0], training=kind[1], per_step=0)
        own, healthy = one.forwards.get(kind, absent), known.get(kind, absent)
        if healthy.per_step not in (None, own.per_step):
            now, then = (
                f"runs {count(forward.per_step or 0, 'forward')} in {_mode(kind[1])} in a step"
                for forward in (own, healthy)
            )
            yield _Broken("forwards", kind[0], now, then)
        if own.per_step and kind in known:
            yield from _of_relations(own.layers, healthy.layers, {"calls": 0})


def _of_inputs(one: _Step, expected: Invariants, before: Sequence[_Step]) -> Iterator[_Broken]:
    # Later steps may be those of another epoch, with the same batches.
    compared = before if expected.inputs == "differ" and one.number <= expected.last else before[-1:]
    again = next((old for old in reversed(compared) if _have_equal_inputs(old, one)), None)
    if expected.inputs is not None and again is not None:
        which = "the step before" if again is before[-1] else f"step {again.number}"
        yield _Broken("inputs", "the model", f"is given the inputs of {which}", "is given others in each step")


def _equal(a: Plain, b: Plain) -> bool:
    numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b)) if numbers else a == b  # type: ignore[operator,arg-type]


def _mode(training: object) -> str:
    return f"{'training' if training else 'evaluation'} mode"


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
