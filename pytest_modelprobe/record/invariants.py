"""What is the same in every step of a training: `Invariants`, learned from the records of a healthy run.

They hold no number that depends on data, seed, batch size or ranks, so another run can be judged by them. A relation is
learned only if it held in each step. What varied, or is not known, is None or left out: it judges nothing.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.text import count

from .codec import decode, encode
from .layer import Call, Parameter, Plain, qualified
from .record import Record, Training
from .tensor_statistics import Reading, estimated_change

FEWEST = 3
"""Steps that invariants are learned from, at least: what holds in two may be chance."""

SMALL = 1e-5
"""Update relative to the norm of the parameter up to which it is not taken for one: it may be rounding."""

MISTAKES = ("stale", "mixed", "evaluating", "emptied", "idle")
"""Counts of `Training` that are zero in most loops. Skipped steps are not among them: they depend on the data."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterInvariants:
    """What a parameter is in every step."""

    gradient: bool | None = None
    """Whether a gradient arrives."""
    updated: bool | None = None
    """Whether its values change by more than rounding, in steps with a learning rate that is not zero."""
    role: str | None = None
    """``optimized``, ``left out`` of all optimizers, or ``frozen``: it requires no gradient."""
    group: int | None = None
    """The number of its group in `Invariants.groups`."""
    tied_to: str | None = None
    """As in `Parameter.tied_to`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInvariants:
    """What the calls of a layer are in every forward of a kind."""

    calls: int | None = None
    """How often it is called in a forward."""
    training: bool | None = None
    """Its mode."""
    grad_enabled: bool | None = None
    autocast: str | None = None
    """Dtype of autocast, or ``off``."""
    dtype: str | None = None
    """Of its outputs."""
    random: bool | None = None
    """Whether it, or a layer inside it, draws random numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInvariants:
    """The forwards of a kind in every step."""

    root: str
    """The layer whose outermost call is the forward."""
    training: bool
    """The mode of that layer."""
    per_step: int | None = None
    """How many there are in a step."""
    layers: Mapping[str, CallInvariants] = field(default_factory=dict)
    """By name, of the layers that were called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInvariants:
    """A group of parameters of an optimizer."""

    optimizer: str
    """Class name of the optimizer."""
    every_step: bool = True
    """Whether it was stepped in every step."""
    options: Mapping[str, Plain] = field(default_factory=dict)
    """Hyperparameters that were constant."""
    schedules: Mapping[str, Mapping[str, Plain]] = field(default_factory=dict)
    """Hyperparameters that varied: number of the step, as text → value."""
    update_ratio: tuple[float, ...] = ()
    """Smallest and largest norm of the update relative to that of the weights, for a learning rate of 1; parameters of
    two or more dimensions. Empty: not known, or the norm of the weights was not steady."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invariants:
    """What is the same in every step of a training. Made by `Watch.invariants`.

    >>> Invariants(model="Net", steps=3, last=2, passes=1).to_dict()
    {'model': 'Net', 'steps': 3, 'last': 2, 'passes': 1}
    """

    model: str
    """Class name of the model."""
    steps: int
    """Steps that they were learned from."""
    last: int
    """Number of the last of them, from 0."""
    passes: int | None = None
    """Backward passes in a step."""
    applied: str | None = None
    """What became of the gradients on their way to the optimizer: ``as they arrived``, ``scaled`` as by clipping,
    ``reset`` or ``others``. `None` if it was not the same in every step, as where only large gradients are clipped."""
    inputs: str | None = None
    """``differ``: no step had the inputs of an earlier one; ``differ from the step before``: at least not of that."""
    new_random: bool | None = None
    """Whether the random numbers that layers draw differ from those of the step before."""
    never: tuple[str, ...] = ()
    """Mistakes of a training loop that did not occur: names of counts of `Training`."""
    forwards: tuple[ForwardInvariants, ...] = ()
    """By root and mode, in order of their appearance."""
    groups: tuple[GroupInvariants, ...] = ()
    """The groups of all optimizers, in the order in which they stepped."""
    parameters: Mapping[str, ParameterInvariants] = field(default_factory=dict)
    """By full name."""
    buffers: Mapping[str, bool] = field(default_factory=dict)
    """Full name → whether it changes in every step (True) or in none (False)."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, numbers and strings that strict JSON can hold."""
        return cast(dict[str, Any], encode(self))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Invariants:
        """Return the invariants that `to_dict` described.

        Raises:
            ValueError: The data is of something else.

        >>> Invariants.from_dict({"model": "Net", "steps": 3, "last": 2}).steps
        3
        """
        try:
            found = cast(Invariants, decode(cls, data))
        except TypeError as error:  # a field without which there is no such thing is missing
            raise ValueError(f"no invariants: {error}") from error
        groups = {own.group for own in found.parameters.values()} - {None, *range(len(found.groups))}
        if groups or any(len(group.update_ratio) not in (0, 2) for group in found.groups):
            raise ValueError(f"there is no group {min(map(str, groups))}" if groups else "update_ratio has two numbers")
        return found

    def save(self, path: str | Path) -> None:
        """Write them to a file of text, with a line for each layer and parameter, so that a change can be reviewed."""
        Path(path).write_text(as_json(self), encoding="utf-8")

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


def as_json(invariants: Invariants) -> str:
    """Return text in JSON, with a line for each layer, parameter, group and buffer.

    >>> print(as_json(Invariants(model="Net", steps=3, last=2, buffers={"norm.running_mean": True})), end="")
    {
      "model": "Net",
      "steps": 3,
      "last": 2,
      "buffers": {
        "norm.running_mean": true
      }
    }
    """
    return "\n".join(_lines(invariants.to_dict(), "")) + "\n"


def _lines(value: Any, indent: str) -> list[str]:
    """Return the lines of a dict or list, the first without its indentation."""
    nested = any(isinstance(one, (dict, list)) for one in (value.values() if isinstance(value, dict) else value))
    if not nested and (isinstance(value, list) or len(indent) > 2):  # buffers have a line each
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


# --- the facts of one step ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroup:
    """A group of parameters of an optimizer in one step."""

    optimizer: str
    options: Mapping[str, Plain]
    members: frozenset[str]
    """Full names of its parameters."""
    ratio: float | None
    """As in `GroupInvariants.update_ratio`; None: not known."""
    norm: float
    """Of the weights that the ratio is of."""

    @property
    def is_idle(self) -> bool:
        """Whether its learning rate is zero, as in the first step of a warm-up."""
        return self.options.get("lr") == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What one step was, in the words of `Invariants`. None: not known."""

    number: int
    passes: int
    applied: str | None
    forwards: Mapping[tuple[str, bool], ForwardInvariants]
    groups: tuple[StepGroup, ...]
    parameters: Mapping[str, ParameterInvariants]
    """The number of the group is that of ``groups``."""
    buffers: Mapping[str, Reading]
    inputs: tuple[tuple[str, Reading], ...]
    """What the model was given."""
    random: Mapping[str, str]
    """State of the random generator at the start of the first call of each layer that drew random numbers, those that
    began last first."""


def facts_of(record: Record) -> StepFacts:
    """Return what one step was.

    Raises:
        UsageError: The record is not of a step.
    """
    if record.step is None:
        raise UsageError(
            f"the record of {record.model} is not of one step of training: take watch.steps of a watch with steps="
        )
    groups = _groups(record)
    idle = {i for i, group in enumerate(groups) if group.is_idle}
    return StepFacts(
        number=record.step,
        passes=record.backwards,
        applied=None if record.applied is None else record.applied.partition(" by ")[0],
        forwards=_forwards(record),
        groups=groups,
        parameters={
            qualified(layer.name, own.name): _parameter(own, idle=own.group in idle)
            for layer in record.layers.values()
            for own in layer.parameters
        },
        buffers={
            qualified(layer.name, own.name): own.reading for layer in record.layers.values() for own in layer.buffers
        },
        inputs=tuple(
            (f"{call.root} {call.root_training} {call.index} {value.path}", value.forward)
            for layer, call in record.calls
            if call.root == layer.name
            for value in call.inputs
        ),
        random={layer.name: call.random for layer, call in reversed(record.calls) if call.random is not None},
    )


def _parameter(own: Parameter, *, idle: bool) -> ParameterInvariants:
    unseen = own.gradient is not None and not own.gradient.tensors
    changed = None
    if own.update is not None and own.update.statistics is not None and not idle:
        added, norm = own.update.statistics.norm, 0.0 if own.reading.statistics is None else own.reading.statistics.norm
        # Of a bias before a norm the gradient is rounding, and may be zero in another run.
        changed = True if added > SMALL * norm else False if not added else None
    elif own.update is None and (own.left_out or not own.requires_grad):
        changed = False
    known = own.group is not None or own.update is not None
    role = "optimized" if known else "left out" if own.left_out else None if own.requires_grad else "frozen"
    return ParameterInvariants(
        gradient=None if unseen else own.gradient is not None,
        updated=changed,
        role=role,
        group=own.group,
        tied_to=own.tied_to,
    )


def _groups(record: Record) -> tuple[StepGroup, ...]:
    named = [(qualified(layer.name, own.name), own) for layer in record.layers.values() for own in layer.parameters]
    return tuple(
        _group(group.optimizer, group.options, {name: own for name, own in named if own.group == number})
        for number, group in enumerate(record.optimizers)
    )


def _group(optimizer: str, options: Mapping[str, Plain], members: Mapping[str, Parameter]) -> StepGroup:
    before, added = [], []
    for own in members.values():
        if len(own.shape) > 1 and own.update is not None and own.update.statistics is not None:
            added.append(own.update.statistics.norm)
            before.append(0.0 if own.reading.statistics is None else own.reading.statistics.norm)
    rate = options.get("lr", 1.0)
    norm, update = math.hypot(*before), math.hypot(*added)
    known = norm > 0 and isinstance(rate, (int, float)) and rate > 0 and math.isfinite(update)
    ratio = update / norm / float(cast(float, rate)) if known else None
    return StepGroup(optimizer=optimizer, options=options, members=frozenset(members), ratio=ratio, norm=norm)


def _forwards(record: Record) -> dict[tuple[str, bool], ForwardInvariants]:
    kinds: dict[tuple[str, bool], dict[str, list[Call]]] = {}
    for layer, call in record.calls:
        kinds.setdefault((call.root, call.root_training), {}).setdefault(layer.name, []).append(call)
    found = {}
    for (root, training), layers in kinds.items():
        forwards = max(call.forwards for calls in layers.values() for call in calls)
        ordered = {name: layers[name] for name in record.layers if name in layers}
        found[root, training] = ForwardInvariants(
            root=root,
            training=training,
            per_step=forwards,
            layers={name: _calls(calls, forwards) for name, calls in ordered.items()},
        )
    return found


def _calls(calls: Sequence[Call], forwards: int) -> CallInvariants:
    dtypes = [tuple(value.dtype for value in call.outputs) for call in calls if call.outputs]
    same = same_of(dtypes)
    return CallInvariants(
        calls=len(calls) if all(call.forwards == forwards for call in calls) else None,
        training=same_of(call.training for call in calls),
        grad_enabled=same_of(call.grad_enabled for call in calls),
        autocast=same_of(call.autocast or "off" for call in calls),
        dtype=None if same is None else ", ".join(dict.fromkeys(same)),
        random=same_of(call.random is not None for call in calls),
    )


def same_of(values: Iterable[T | None]) -> T | None:
    """Return the value that all known values are, or None if there is none or they differ.

    >>> same_of([1, None, 1]), same_of([1, 2]), same_of([])
    (1, None, None)
    """
    known = [value for value in values if value is not None]
    return known[0] if known and all(value == known[0] for value in known) else None


def are_equal(a: Reading, b: Reading) -> bool | None:
    """Whether two readings are of equal elements; None if they do not tell."""
    if a.digest is not None and b.digest is not None:
        return a.digest == b.digest
    one, other = a.statistics, b.statistics
    if one is None or other is None:
        return None
    if (one.count, one.min, one.max, one.zeros, one.nonfinite) != (
        other.count,
        other.min,
        other.max,
        other.zeros,
        other.nonfinite,
    ):
        return False
    if a.fingerprint is None or b.fingerprint is None:
        return None
    return estimated_change(a.fingerprint, b.fingerprint) < 1e-9


def have_equal_inputs(a: StepFacts, b: StepFacts) -> bool | None:
    """Whether two steps were given the same tensors; None if that is not known."""
    one, other = dict(a.inputs), dict(b.inputs)
    if one.keys() != other.keys():
        return False
    found = [are_equal(one[key], other[key]) for key in one]
    return False if False in found else None if None in found or not found else True


# --- learning -----------------------------------------------------------------------------------------------------


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
    facts = [facts_of(record) for record in steps]
    groups, numbers = _learned_groups(facts)
    return Invariants(
        model=steps[0].model,
        steps=len(facts),
        last=max(one.number for one in facts),
        passes=same_of(one.passes for one in facts),
        applied=same_of(one.applied for one in facts),
        inputs=_learned_inputs(facts),
        new_random=_learned_random(facts),
        never=() if training is None else tuple(name for name in MISTAKES if not getattr(training, name)),
        forwards=_learned_forwards(facts),
        groups=groups,
        parameters=_learned_parameters(facts, numbers),
        buffers=_learned_buffers(facts),
    )


def _learned_inputs(facts: Sequence[StepFacts]) -> str | None:
    if any(have_equal_inputs(a, b) is not False for a, b in itertools.pairwise(facts)):
        return None
    pairs = ((a, b) for i, a in enumerate(facts) for b in facts[i + 2 :])
    return "differ" if all(have_equal_inputs(a, b) is False for a, b in pairs) else "differ from the step before"


def _learned_random(facts: Sequence[StepFacts]) -> bool | None:
    found = [
        b.random[name] != state
        for a, b in itertools.pairwise(facts)
        for name, state in a.random.items()
        if name in b.random
    ]
    return True if found and all(found) else None


def _learned_forwards(facts: Sequence[StepFacts]) -> tuple[ForwardInvariants, ...]:
    found = []
    for root, training in dict.fromkeys(kind for one in facts for kind in one.forwards):
        seen = [one.forwards.get((root, training)) for one in facts]
        there = [one for one in seen if one is not None]
        names = dict.fromkeys(name for one in there for name in one.layers)
        found.append(
            ForwardInvariants(
                root=root,
                training=training,
                per_step=same_of(one.per_step for one in there) if len(there) == len(seen) else None,
                layers={name: _learned_calls([one.layers.get(name) for one in there]) for name in names},
            )
        )
    return tuple(found)


def _learned_calls(seen: Sequence[CallInvariants | None]) -> CallInvariants:
    there = [one for one in seen if one is not None]
    each = len(there) == len(seen)

    def same(values: Sequence[T | None]) -> T | None:
        return None if None in values else same_of(values)

    return CallInvariants(
        calls=same([one.calls for one in there]) if each else None,
        training=same([one.training for one in there]),
        grad_enabled=same([one.grad_enabled for one in there]),
        autocast=same([one.autocast for one in there]),
        dtype=same([one.dtype for one in there]),
        random=same([one.random for one in there]),
    )


def _learned_groups(facts: Sequence[StepFacts]) -> tuple[tuple[GroupInvariants, ...], dict[frozenset[str], int]]:
    """Return the groups, and their numbers by their parameters: in some steps there may be others, or none."""
    seen: dict[frozenset[str], list[tuple[int, StepGroup]]] = {}
    for one in facts:
        for group in one.groups:
            if group.members:
                seen.setdefault(group.members, []).append((one.number, group))
    found = tuple(_learned_group(steps, every_step=len(steps) == len(facts)) for steps in seen.values())
    return found, {members: number for number, members in enumerate(seen)}


def _learned_group(steps: Sequence[tuple[int, StepGroup]], *, every_step: bool) -> GroupInvariants:
    first = steps[0][1]
    names = [name for name in first.options if all(name in group.options for _, group in steps)]
    constant = {
        name: first.options[name] for name in names if all(g.options[name] == first.options[name] for _, g in steps)
    }
    varied = {name: {str(step): group.options[name] for step, group in steps} for name in names if name not in constant}
    ratios, norms = [group.ratio for _, group in steps if group.ratio], [group.norm for _, group in steps]
    steady = len(ratios) > 1 and min(norms) > 0 and max(norms) < 2 * min(norms)
    return GroupInvariants(
        optimizer=first.optimizer,
        every_step=every_step,
        options=constant,
        schedules=varied,
        update_ratio=(_three_digits(min(ratios)), _three_digits(max(ratios))) if steady else (),
    )


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")


def _learned_parameters(
    facts: Sequence[StepFacts], numbers: Mapping[frozenset[str], int]
) -> dict[str, ParameterInvariants]:
    found = {}
    for name in facts[0].parameters:
        seen = [(one, one.parameters[name]) for one in facts if name in one.parameters]
        own = [parameter for _, parameter in seen]
        groups = [None if p.group is None else numbers[one.groups[p.group].members] for one, p in seen]
        found[name] = ParameterInvariants(
            gradient=same_of(p.gradient for p in own),
            updated=_learned_update(seen),
            role=same_of(p.role for p in own),
            group=None if None in groups else same_of(groups),
            tied_to=own[0].tied_to,
        )
    return found


def _learned_update(seen: Sequence[tuple[StepFacts, ParameterInvariants]]) -> bool | None:
    """Return whether a parameter is updated. One whose gradient only leads to no update is not known for it."""
    own = [p for one, p in seen if p.group is None or not one.groups[p.group].is_idle]
    if not own or any(p.updated is None or (not p.updated and p.gradient and p.role == "optimized") for p in own):
        return None
    return same_of(p.updated for p in own)


def _learned_buffers(facts: Sequence[StepFacts]) -> dict[str, bool]:
    found = {}
    for name in facts[0].buffers:
        changed = [buffer_changed(a, b, name) for a, b in itertools.pairwise(facts)]
        same = None if None in changed else same_of(changed)
        if same is not None:
            found[name] = same
    return found


def buffer_changed(before: StepFacts, after: StepFacts, name: str) -> bool | None:
    """Whether a buffer was another at the end of a step than at the end of the step before; None if not known."""
    a, b = before.buffers.get(name), after.buffers.get(name)
    if a is None or b is None or (a.statistics is None and a.digest is None):
        return None
    return a != b
