"""What a diagnosis is made of: causes, each of one layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_modelprobe.comparison.compare import Comparison, Difference
from pytest_modelprobe.record import Plain

CauseKind = Literal["input", "seed", "architecture", "attribute", "weights", "buffers", "computation", "gradient"]
Witness = Literal["recorded", "isolated", "propagation", "both"]

How = Literal["counted", "estimated"]
"""How the share of entries that differ is known: from the numbers of each kind, or from the fingerprints."""

DRIFT = "drift first visible here"
"""The hint of a change that is hardly larger than what came in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A difference that nothing upstream explains."""

    kind: CauseKind
    layer: str
    what: str = ""
    """Attribute or parameter name; of a computation where in the code: ``between norm1 and attn``, or empty."""
    actual: Plain = None
    expected: Plain = None
    change: float | None = None
    """Relative change of what it changed first: the layer's output, the weight itself."""
    noise: float | None = None
    effect: str = ""
    """Of what is in the record: what it changed, ``output`` or a buffer."""
    witness: Witness = "recorded"
    gradient: Literal["of loss", "of value", "lost", "switched", "cut"] | None = None
    """Of a gradient: the loss is another, that of one value is, some values get none, a call has it switched on or off,
    the code lets none through any more; None: the code lets another one through."""
    built: How | None = None
    """Of code that makes another mask, or other positions or tokens, for a child: `what` names it, and `change` is the
    share of its entries that differ, found so."""
    hints: tuple[str, ...] = ()
    """What the change looks like: ``a permutation``, ``scaled by 2``, ``shifted``."""
    differences: tuple[Difference, ...] = ()

    @property
    def about_a_call(self) -> bool:
        """Whether all that a response shows is that the code calls a child with something else, or does not call it."""
        first = self.differences[0] if self.differences else None
        return first is not None and first.kind == "response" and self.change is None and self.what == first.what

    @property
    def whole(self) -> bool:
        """Whether it is that all weights are others."""
        return self.kind == "weights" and self.what.startswith("all ")

    @property
    def is_exact(self) -> bool:
        """Whether a container hands on something of another shape or dtype: of that there is no change to tell."""
        return self.kind == "computation" and self.witness == "recorded" and self._first_kind == "interface"

    @property
    def _first_kind(self) -> str | None:
        return self.differences[0].kind if self.differences else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All causes of the differences between two records, in the order of `most_telling_first`."""

    comparison: Comparison
    causes: tuple[Cause, ...] = ()
    possible: tuple[Cause, ...] = ()
    """Those of which not all inputs are known, or that one of two witnesses does not confirm."""
    unchanged: bool = False
    """Whether the run was compared, and no output, gradient or state of it differs."""
    output: float | None = None
    """The largest relative change among what the model gives out; None where none of it differs."""
    moved: tuple[str, ...] = ()
    """Layers whose values changed after a cause, in order of execution; their gradients if no value did."""
    not_judged: tuple[str, ...] = ()
    """Layers after a cause that could not be looked at alone."""
    redrawn: bool = False
    """Whether all random weights are other ones and nothing else is to blame: as of a model built outside the seed."""
    unknown: str | None = None
    """Why the cause cannot be told, where it cannot."""


def cause_of(kind: CauseKind, found: Sequence[Difference]) -> Cause:
    """Return the cause that differences show; the first one is told."""
    first = found[0]
    return Cause(
        kind=kind,
        layer=first.layer,
        what=first.what,
        actual=first.actual,
        expected=first.expected,
        change=first.change,
        noise=first.noise,
        differences=tuple(dict.fromkeys(found)),
    )


def worst_first(found: Sequence[Difference]) -> list[Difference]:
    """Return the differences with the largest change in front, for a cause to tell."""
    worst = max(found, key=lambda difference: difference.change or 0.0)
    return [worst, *(difference for difference in found if difference is not worst)]


_WEIGHT: Mapping[CauseKind, int] = {
    "seed": 0, "input": 1, "computation": 2, "attribute": 3, "architecture": 3, "gradient": 4, "buffers": 5,
    "weights": 6,
}  # fmt: skip


def most_telling_first(causes: Iterable[Cause]) -> list[Cause]:
    """Return causes with a measured effect before those without; code before structure before weights.

    What the test itself gives the model comes before all: the rest may follow from it.
    """

    def weight(cause: Cause) -> tuple[bool, int, int, bool]:
        silent = cause.change is None
        # What layers are called with, and how often, may change nothing; what a code computes otherwise does, as does
        # a gradient that does not arrive, or one that is taken now.
        own = cause.kind == "computation"
        told = own and (cause.is_exact or (cause.witness != "recorded" and not cause.about_a_call))
        told = told or cause.kind == "gradient" or cause.what.endswith(" requires_grad")
        given = cause.kind in ("input", "seed")
        # A model that was trained again explains all numbers, and so tells of nothing.
        rank = 0 if not silent or told or given else 1 if own else 3
        return not given, 2 if cause.whole else rank, _WEIGHT[cause.kind], silent

    return sorted(causes, key=weight)


def in_order(causes: Iterable[Cause], layers: Sequence[str]) -> list[Cause]:
    """Return the causes in the order of their layers, those of others last."""
    order = {name: i for i, name in enumerate(layers)}
    return sorted(causes, key=lambda cause: order.get(cause.layer, len(order)))
