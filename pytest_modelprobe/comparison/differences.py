"""The differences between two records, and how far every value is from the expected one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pytest_modelprobe.record import (
    Call,
    Plain,
    Record,
)

from .tolerance import UNKNOWN, ValueChange

DifferenceKind = Literal[
    "layer added", "layer removed", "layer renamed", "type", "attribute", "mode",
    "parameter added", "parameter removed", "parameter shape", "parameter dtype", "parameter trainable",
    "parameter tied", "buffer added", "buffer removed", "buffer shape", "buffer dtype", "buffer tied",
    "buffer persistent", "calls", "source", "interface", "path", "input added", "input removed", "argument", "context",
    "seed", "loss", "forwards", "input", "weights", "buffer", "output", "state", "response",
    "gradient", "gradient presence", "parameter gradient", "response gradient", "noise", "run",
]  # fmt: skip


BEHAVIOR: frozenset[DifferenceKind] = frozenset({
    "seed", "loss", "forwards", "input", "weights", "buffer", "output", "state", "response",
    "gradient", "gradient presence", "parameter gradient", "response gradient", "noise", "run",
})  # fmt: skip
"""The kinds that numbers show; the others are architecture."""


Parts = Literal["all", "architecture", "behavior"]


Tolerance = float | Mapping[str, float] | None


CallKey = tuple[str, bool | None, int]
"""Root, its mode where forwards of both modes were recorded, and the number of the call."""


ValueKey = tuple[str, CallKey | None, str, str]
"""Layer, call (None: of the layer itself), side, and path or name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is not as expected."""

    layer: str
    """By the actual's name; of a layer that is gone, by the expected's."""
    kind: DifferenceKind
    what: str = ""
    """Which attribute, parameter or value."""
    call: int = 0
    """Which call of the layer, from 0."""
    actual: Plain = None
    expected: Plain = None
    change: float | None = None
    """Change relative to the expected norm (integers: share of elements); inf where there was nothing."""
    noise: float | None = None
    """Measured noise of the expected; None: not measured."""
    limit: float | None = None
    """Change up to which the two count as the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPair:
    """One call in both records."""

    layer: str
    key: CallKey
    actual: Call
    expected: Call

    @property
    def outermost(self) -> bool:
        """Whether the call is a forward: what it takes in comes from the test."""
        return self.layer == self.actual.root and self.actual.index == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All differences between two records, and how far every value moved."""

    actual: Record
    expected: Record
    """With its layers under the actual's names."""
    found: tuple[Difference, ...] = ()
    """What differs, also in layers that were not asked for."""
    notes: tuple[Difference, ...] = ()
    """Attributes that only one of the two has: what they change, if anything, differs by itself."""
    looser: tuple[Difference, ...] = ()
    """Where the noise of the actual allows far more than that of the expected: it would pass what did not pass."""
    wanted: frozenset[str] | None = None
    """The layers that were asked for; None: all."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Layers that have another name now: expected → actual."""
    changes: Mapping[ValueKey, ValueChange] = field(default_factory=dict, repr=False)
    """How far each value is from what it was."""
    calls: tuple[CallPair, ...] = field(default=(), repr=False)
    """The calls that are in both, in order of execution of the actual."""

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What differs in the layers that were asked for."""
        if self.wanted is None:
            return self.found
        return tuple(difference for difference in self.found if difference.layer in self.wanted)

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def unknown(self) -> int:
        """Values of which neither record has numbers: they count as the same."""
        return sum(not change.known for change in self.changes.values())

    @property
    def names_before(self) -> dict[str, str]:
        """Layers that have another name now: actual → expected."""
        return {new: old for old, new in self.renamed.items()}

    def change(self, layer: str, key: CallKey | None, side: str, path: str) -> ValueChange:
        """Return how far a value moved; unknown where it was not compared."""
        return self.changes.get((layer, key, side, path), UNKNOWN)
