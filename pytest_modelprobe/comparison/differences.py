"""The differences between two records, and the change of every value.

They are plain data: one address, one kind, both sides. What a difference means, whether it is a cause, a consequence or
a matter of writing, is decided later, in `diagnosis`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pytest_modelprobe.record import Call, NamesBefore, Plain, Record

from .tolerance import UNKNOWN, ValueChange

DifferenceKind = Literal[
    "layer added", "layer removed", "layer renamed", "type", "attribute", "mode", "name",
    "parameter added", "parameter removed", "parameter shape", "parameter dtype", "parameter trainable",
    "parameter tied", "parameter order", "buffer added", "buffer removed", "buffer shape", "buffer dtype",
    "buffer tied", "buffer persistent", "calls", "source", "interface", "path", "input added", "input removed",
    "argument", "context", "seed", "loss", "forwards", "input", "weights", "buffer", "output", "state", "response",
    "gradient", "gradient presence", "parameter gradient", "response gradient", "update presence",
    "optimizer", "update", "noise", "run",
]  # fmt: skip


BEHAVIOR: frozenset[DifferenceKind] = frozenset({
    "seed", "loss", "forwards", "input", "weights", "buffer", "output", "state", "response",
    "gradient", "gradient presence", "parameter gradient", "response gradient", "update presence",
    "optimizer", "update", "noise", "run",
})  # fmt: skip
"""Kinds of differences of values; the others are of the architecture."""


Parts = Literal["all", "architecture", "behavior"]


Tolerance = float | Mapping[str, float] | None


CallKey = tuple[str, bool | None, int]
"""Root, its mode where forwards of both modes were recorded, and the index of the call."""


ValueKey = tuple[str, CallKey | None, str, str]
"""Layer, call, side, and path or name. The call is `None` for a value of the layer itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One difference between two records."""

    layer: str
    """Name in the actual record; of a removed layer, in the expected one."""
    kind: DifferenceKind
    what: str = ""
    """Which attribute, parameter or value."""
    call: int = 0
    """Which call of the layer, from 0."""
    actual: Plain = None
    expected: Plain = None
    change: float | None = None
    """Change relative to the expected norm, or the share of elements for integers; infinite if there was nothing."""
    noise: float | None = None
    """Measured noise of the expected value, or `None` if it was not measured."""
    limit: float | None = None
    """Tolerance of the change."""
    sizes: str = ""
    """Both values of an infinite change; see `ValueChange.sizes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPair:
    """One call that is in both records."""

    layer: str
    key: CallKey
    actual: Call
    expected: Call

    @property
    def outermost(self) -> bool:
        """Whether the call is a forward, whose inputs come from the test."""
        return self.layer == self.actual.root and self.actual.index == 0

    @property
    def same_signs(self) -> bool:
        """Whether fingerprints of its values have the same signs in both records: they are those of the samples."""
        return self.actual.samples == self.expected.samples

    @property
    def has_signs_of_inputs(self) -> bool:
        """Whether its inputs have signs of their own in both records: it is a forward, and not of an older file."""
        return self.outermost and None not in (self.actual.samples, self.expected.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All differences between two records, and the change of every value."""

    actual: Record
    expected: Record
    """With the layers under their names in the actual record."""
    found: tuple[Difference, ...] = ()
    """All differences, also of layers that were not selected."""
    notes: tuple[Difference, ...] = ()
    """Attributes that only one record has, and values of other names: an effect of theirs is a difference itself."""
    strict: bool = False
    """Whether a refactoring differs, where every value is the same; else it is noted."""
    looser: tuple[Difference, ...] = ()
    """Values whose noise grew tenfold: an update would tolerate larger changes."""
    wanted: frozenset[str] | None = None
    """The selected layers, or `None` if all are."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Renamed layers: expected → actual name."""
    names_before: NamesBefore = field(default_factory=NamesBefore)
    """What had another name in the expected record."""
    changes: Mapping[ValueKey, ValueChange] = field(default_factory=dict, repr=False)
    """The change of each value."""
    calls: tuple[CallPair, ...] = field(default=(), repr=False)
    """The calls in both records, in order of execution of the actual one."""

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The differences of the selected layers."""
        if self.wanted is None:
            return self.found
        return tuple(difference for difference in self.found if difference.layer in self.wanted)

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def unknown(self) -> int:
        """The number of values without numbers in both records; they count as equal."""
        return sum(not change.known for change in self.changes.values())

    @property
    def has_same_gradients(self) -> bool:
        """Whether gradients were compared, and those of the parameters and of the model's inputs are the same."""
        roots = {(pair.layer, pair.key) for pair in self.calls if pair.outermost}
        compared = [
            (side, change)
            for (layer, key, side, _), change in self.changes.items()
            if side == "parameter gradient" or (side == "input gradient" and (layer, key) in roots)
        ]
        known = any(side == "parameter gradient" and change.known for side, change in compared)
        return known and not any(change.differs for _, change in compared)

    def change(self, layer: str, key: CallKey | None, side: str, path: str) -> ValueChange:
        """Return the change of a value; `UNKNOWN` if it was not compared."""
        return self.changes.get((layer, key, side, path), UNKNOWN)
