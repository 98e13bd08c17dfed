"""Side effects of a forward: on the model in evaluation mode, and on its inputs.

A model that keeps something of its last forward returns other numbers when it is called again. Attributes may change as
long as no output does: the outcome names them.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeAlias

from torch import Tensor, nn

from pytest_modelprobe.models import CallTracer, ModuleCall, flatten, flatten_call, has_dense_storage, version
from pytest_modelprobe.record import qualified
from pytest_modelprobe.text import count, listed

from .agreement import check_repeats, disagreements, violation_of
from .check import check
from .outcome import Violation
from .rounding import same
from .session import PreparedModel, all_named


@check
def state_unchanged_by_forward(prepared: PreparedModel) -> Violation | str:
    """Check that a forward in evaluation mode changes no parameter, no buffer and no output of the next forward.

    Other attributes of a module, such as a cache of positions, may change as long as the outputs do not; the outcome
    names them. The contents of dicts, lists and objects among the attributes are compared too.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe, model = ModelProbe(), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    >>> print(checks.state_unchanged_by_forward(probe, model, probe.randn(4, 3)))
    state_unchanged_by_forward holds for Sequential: 7 parameters and buffers, 3 forwards
    """
    rows_of = {path: x for path, x in prepared.dense if x.dim() and x.shape[0] > 1}

    def rolled(path: str, x: Tensor) -> Tensor:
        return x.roll(1, 0) if path in rows_of else x

    fresh = prepared.run(mode="eval", vary=rolled)
    with prepared.keep_changes():
        before = {name: tensor.detach().clone() for name, tensor in all_named(prepared.model)}
        kept = attributes(prepared)
        one = prepared.reference(mode="eval")
        changed = [name for name, tensor in all_named(prepared.model) if not same(tensor, before.get(name))]
        if changed:
            return Violation.first_of(
                ((name,) for name in changed),
                "is changed by a forward in evaluation mode",
                columns=("changed",),
                advice="Look for running statistics that ignore self.training, and for writes to a buffer.",
            )
        two = prepared.variation(mode="eval")
        now = attributes(prepared)
        found = disagreements(one, two, tolerance=0.0, integers=True)
        if not found and fresh.error is None:  # state of the first inputs may fit these alone
            found = disagreements(fresh, prepared.run(mode="eval", vary=rolled), tolerance=0.0, integers=True)
    changed = changed_attributes(kept, now)
    if found:
        check_repeats(prepared, "eval", tolerance=0.0)
        what = f"; attributes that it set: {', '.join(changed)}" if changed else ""
        return violation_of(
            found,
            "returns another {path} after a forward: {changed}",
            f"Look for state that it keeps of its last forward: a cache, a counter, a hidden state{what}.",
        )
    without = f"; attributes that it set without a change of an output: {listed(changed)}" if changed else ""
    return f"{count(len(before), 'parameters and buffer')}, 3 forwards{without}"


@check
def inputs_unchanged_by_forward(prepared: PreparedModel) -> Violation | str:
    """Check that the model does not write to its inputs: neither to tensors nor to lists or dicts of them.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.inputs_unchanged_by_forward(probe, nn.ReLU(), probe.randn(4, 3)))
    inputs_unchanged_by_forward holds for ReLU: 1 input
    >>> print(checks.inputs_unchanged_by_forward.outcome(probe, nn.ReLU(inplace=True), probe.randn(4, 3)).layer)
    (root)
    """
    prepared.reference(mode="eval")
    given: list[Any] = []
    known: dict[str, _Contents] = {}
    blamed: list[tuple[str, str]] = []

    def look(call: ModuleCall) -> None:
        now = _contents(*given)
        written = [path for path in known.keys() & now.keys() if not now[path].same(known[path])]
        blamed.extend((call.layer, path) for path in sorted([*written, *(known.keys() ^ now.keys())]))
        known.clear()
        known.update(now)

    def begin(call: ModuleCall, args: Any, kwargs: Any) -> None:
        if call.parent is not None:
            look(call.parent)
        else:
            given[:] = args, kwargs
            known.update(_contents(*given))

    def end(call: ModuleCall, args: Any, output: Any) -> None:
        look(call)

    with CallTracer(prepared.layers.modules, ModuleCall, before=begin, after=end):
        prepared.variation(mode="eval")
    if blamed:
        _, path = blamed[0]
        return Violation.first_of(
            blamed,
            f"writes into {path}, which the caller may use again",
            columns=("written by", "input"),
            advice="Look for an in-place operation (inplace=True, x += ..., x[...] = ...), and clone before it.",
        )
    return count(len(flatten_call(prepared.args, prepared.kwargs).tensors), "input")


class _Contents:
    """A copy of an input at one moment."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._version = version(value) if isinstance(value, Tensor) else None
        self._copy = value.detach().clone() if has_dense_storage(value) else None

    def same(self, before: _Contents) -> bool:
        """Whether it is unchanged; tensors are compared bit for bit, as writes through .data count no version."""
        if not isinstance(self._value, Tensor):
            return repr(self._value) == repr(before._value)  # NaN is not equal to itself
        untouched = self._value is before._value and self._version == before._version
        return untouched and (self._copy is None or same(self._copy, before._copy))


def _contents(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, _Contents]:
    flat = flatten_call(args, kwargs)
    return {path: _Contents(value) for path, value in (*flat.tensors, *flat.plain.items())}


OF_ANY_MODULE = frozenset(vars(nn.Module()))
"""Attributes of every module: its parameters, buffers and hooks."""

Attributes: TypeAlias = dict[str, dict[str, Any]]
"""Name of an attribute of a module → path → tensor or plain value."""


def attributes(prepared: PreparedModel) -> Attributes:
    """Return copies of the attributes of all modules, without parameters and buffers."""
    found = {}
    for layer, module in prepared.layers.modules.items():
        for key in vars(module).keys() - OF_ANY_MODULE:
            name, value = qualified(layer, key), vars(module)[key]
            flat = flatten(name, list(value) if isinstance(value, (deque, set)) else value)
            tensors = {path: x.detach().clone() if has_dense_storage(x) else x for path, x in flat.tensors}
            found[name] = {**flat.plain, **tensors}
    return found


def changed_attributes(before: Attributes, now: Attributes) -> list[str]:
    """Return the names of the attributes that are not the same in both."""
    return [name for name in sorted(before | now) if not _alike(before.get(name), now.get(name))]


def _alike(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    if one is None or other is None or one.keys() != other.keys():
        return one is other
    pairs = [(value, other[path]) for path, value in one.items()]
    return all(
        same(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) and has_dense_storage(x) else repr(x) == repr(y)
        for x, y in pairs
    )
