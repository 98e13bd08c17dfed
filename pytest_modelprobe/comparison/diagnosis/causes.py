"""What a diagnosis is made of: causes, each of one layer, and their order.

A cause is data. How it is put into words is a matter of the report, and whether it fails a test is one of the gate;
both ask the properties here, so that a cause means the same to all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pytest_modelprobe.comparison.tolerance import Comparison, Difference, ValueChange
from pytest_modelprobe.record import Plain, Reading, Statistics, containers, label_of
from pytest_modelprobe.text import listed

CauseKind = Literal[
    "input", "seed", "architecture", "attribute", "weights", "buffers", "computation", "gradient", "optimizer",
    "update",
]  # fmt: skip
Evidence = Literal["recorded", "isolated", "propagation", "both"]

GRADIENTS = "gradients"
"""What names the cause that gradients came to the optimizer otherwise than they arrived."""

DRIFT = "drift first visible here"
"""The hint of an output change hardly larger than the changes of the inputs."""

ABSORBED = "what follows it gets the same"
"""The hint of a changed output that another change makes up for, as where a factor moved."""

SAME_ELEMENTS = "the same elements in another form"
"""The hint of a value of another shape, or of a mask of another dtype."""

NO_EFFECT = "the child answers the same, alone"
"""The hint of arguments to a child that have no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A difference that no upstream difference explains."""

    kind: CauseKind
    layer: str
    what: str = ""
    """Attribute or parameter name; of a computation where in the code: ``between norm1 and attn``, or empty."""
    actual: Plain = None
    expected: Plain = None
    change: float | None = None
    """Relative change of the layer's output, or of the weight itself."""
    noise: float | None = None
    sizes: str = ""
    """Both values if the change is infinite; see `ValueChange.sizes`."""
    effect: str = ""
    """What a cause that the records show has changed: the ``output``, its ``shape``, or a buffer."""
    evidence: Evidence = "recorded"
    gradient: Literal["of loss", "of value", "lost", "switched", "cut", "updated", "not updated"] | None = None
    """What is the matter with a gradient.

    In the order of the names: the loss changed; the gradient of one value changed; some values get none; the grad mode
    changed; the code blocks it now; an optimizer holds the parameters only now, or no longer. `None` if the code's own
    backward changed, and for causes that are no gradient.
    """
    is_generated: bool = False
    """Whether the code generates another mask, other positions or other tokens for a child. `what` names the value."""
    is_consequence: bool = False
    """Whether a possible cause is explained by a tensor that the layer is no longer given, or only now."""
    hints: tuple[str, ...] = ()
    """What the change looks like: ``a permutation``, ``scaled by 2``, ``shifted``."""
    differences: tuple[Difference, ...] = ()

    @property
    def is_measured(self) -> bool:
        """Whether it is known how much the cause changed, and nothing makes up for it."""
        return self.change is not None and ABSORBED not in self.hints

    @property
    def is_call_change(self) -> bool:
        """Whether the response shows only that a child is called with other plain arguments, or not called."""
        first = self.differences[0] if self.differences else None
        return first is not None and first.kind == "response" and first.change is None and self.what == first.what

    @property
    def is_call_count(self) -> bool:
        """Whether a child is called more or less often."""
        return self._first_kind == "calls"

    @property
    def changes_code(self) -> bool:
        """Whether the own code of the layer computes something else, not only calls a child with other arguments."""
        return self.kind in ("computation", "gradient") and not self.is_call_change

    @property
    def is_retraining(self) -> bool:
        """Whether the weights of all layers changed, as after another training."""
        return self.kind == "weights" and self.what.startswith("all ")

    @property
    def is_exact(self) -> bool:
        """Whether a container passes on another shape or dtype, which has no relative change."""
        return self.kind == "computation" and self.evidence == "recorded" and self._first_kind == "interface"

    @property
    def _first_kind(self) -> str | None:
        return self.differences[0].kind if self.differences else None

    def with_hints(self, *hints: str) -> Cause:
        """Return the cause with more hints."""
        return dataclasses.replace(self, hints=(*self.hints, *hints))

    def with_size(self, found: Difference | ValueChange | None, **fields: Any) -> Cause:
        """Return the cause with another change and its noise, and with other fields if given."""
        change, noise, sizes = (None, None, "") if found is None else (found.change, found.noise, found.sizes)
        return dataclasses.replace(self, change=change, noise=noise, sizes=sizes, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All causes of the differences between two records, in the order of `by_importance`."""

    comparison: Comparison
    causes: tuple[Cause, ...] = ()
    possible: tuple[Cause, ...] = ()
    """Causes of which not all inputs are known, or that only one of two kinds of evidence shows."""
    notes: tuple[Cause, ...] = ()
    """What is written otherwise, where every value is the same."""
    unchanged: bool = False
    """Whether the outputs of the model were compared and none differs."""
    within: float = 0.0
    """The largest tolerance of an unchanged output that moved within it, or 0 if none moved measurably."""
    output: float | None = None
    """The largest relative change among the model's outputs, or `None` if none differs."""
    moved: tuple[str, ...] = ()
    """Layers whose values changed after a cause, in order of execution; their gradients if no value did."""
    not_judged: tuple[str, ...] = ()
    """Downstream layers of which neither kind of evidence is available."""
    redrawn: bool = False
    """Whether all random weights changed and nothing else did: as of a model built outside the seed."""
    unknown: str | None = None
    """Why no cause was found, where none was."""

    @property
    def same(self) -> bool:
        """Whether nothing differs but how calls are written."""
        return self.comparison.same or not (self.causes or self.possible or self.unknown)


def changes_code(diagnosis: Diagnosis) -> bool:
    """Whether the own code of a layer computes something else, not only calls a child with other arguments."""
    return any(cause.changes_code for cause in diagnosis.causes)


def cause_of(kind: CauseKind, found: Sequence[Difference], **fields: Any) -> Cause:
    """Return the cause of some differences, with the values of the first where no others are given."""
    first = found[0]
    cause = Cause(
        kind=kind,
        layer=first.layer,
        what=first.what,
        actual=first.actual,
        expected=first.expected,
        change=first.change,
        noise=first.noise,
        sizes=first.sizes,
        differences=tuple(dict.fromkeys(found)),
    )
    return dataclasses.replace(cause, **fields)


def cause_of_all(kind: CauseKind, found: Sequence[Difference], **fields: Any) -> Cause:
    """Return one cause for some differences, with the largest change and the names of all."""
    return cause_of(kind, worst_first(found), what=names_of(found), **fields)


def names_of(found: Iterable[Difference]) -> str:
    """Return the names of what differs: ``a, b, c and 4 more`` where there are many, for a line holds no more.

    >>> names_of(Difference(layer="fc", kind="weights", what=name) for name in "abcde")
    'a, b, c and 2 more'
    """
    names = list(dict.fromkeys(d.what for d in found))
    return listed(names) if len(names) > 3 else ", ".join(names)


def worst_first(found: Sequence[Difference]) -> list[Difference]:
    """Return the differences, the one with the largest change first."""
    worst = max(found, key=lambda difference: difference.change or 0.0)
    return [worst, *(difference for difference in found if difference is not worst)]


_WEIGHT: Mapping[CauseKind, int] = {
    "seed": 0, "input": 1, "computation": 2, "attribute": 3, "architecture": 3, "gradient": 4, "optimizer": 5,
    "update": 6, "buffers": 7, "weights": 8,
}  # fmt: skip


def by_importance(causes: Iterable[Cause], roots: Collection[str]) -> list[Cause]:
    """Return causes with a measured effect, then those that always have one, then the others.

    Among equals, code comes before structure before weights. Changes of the test's own inputs come first: the rest may
    follow from them. So may new weights of a layer from its structure, as those of an embedding with another
    ``padding_idx``, and other buffers from a mode: what they may follow from comes right before them.

    Args:
        causes: The causes.
        roots: The layers that the test calls.
    """
    causes = list(causes)
    trained = any(cause.is_retraining for cause in causes)
    moved = {cause.layer for cause in causes if cause.kind in ("weights", "buffers")}
    around = moved | {container for name in moved for container in containers(name)}

    def may_move(cause: Cause) -> bool:
        """Whether weights or buffers of the layer may be others because of what it is made of, or of its mode."""
        return cause.kind in ("attribute", "architecture") and (
            cause.layer in (around if cause.what == "training" else moved)
        )

    def always_has_effect(cause: Cause) -> bool:
        if cause.kind in ("gradient", "optimizer", "update") or cause.what.endswith(" requires_grad"):
            return True
        if cause.is_exact:
            return SAME_ELEMENTS not in cause.hints
        # Other arguments or numbers of calls may have no effect; other computations have one.
        return cause.kind == "computation" and cause.evidence != "recorded" and not cause.is_call_change

    def group(cause: Cause) -> int:
        at_root = bool(cause.differences) and cause.differences[0].layer in roots
        if cause.is_measured or (at_root and cause.is_exact):
            return 0
        if ABSORBED not in cause.hints and always_has_effect(cause):
            return 1
        if at_root and cause.kind == "architecture" and cause.what == "path":
            return 2
        return 3 if cause.kind == "computation" and NO_EFFECT not in cause.hints else 4

    def place(cause: Cause) -> tuple[bool, bool, int, int]:
        given = cause.kind in ("input", "seed")
        # A model that was trained again explains every number, so that comes last, with its running statistics.
        last = trained and cause.kind in ("weights", "buffers")
        if may_move(cause) and not cause.is_measured:
            return True, last, 0, _WEIGHT["update"]
        return not given, last, 0 if given else group(cause), _WEIGHT[cause.kind]

    return sorted(causes, key=place)


def in_layer_order(causes: Iterable[Cause], layers: Sequence[str]) -> list[Cause]:
    """Return the causes in the order of their layers, those of others last."""
    order = {name: i for i, name in enumerate(layers)}
    return sorted(causes, key=lambda cause: order.get(cause.layer, len(order)))


def between(before: str | None, after: str | None) -> str:
    """Return where in the code of a container something is, by the calls before and after it.

    >>> between("norm1", "attn"), between(None, "norm1"), between("mlp", None), between(None, None)
    ('between norm1 and attn', 'before norm1', 'after mlp', '')
    >>> between("0", "2")
    "between layer '0' and layer '2'"
    """
    before, after = before and label_of(before), after and label_of(after)
    if before is None:
        return "" if after is None else f"before {after}"
    return f"after {before}" if after is None else f"between {before} and {after}"


# --- relations between a tensor and the expected one: scaled, shifted, a permutation ----------------------------------

_EXACT = 1e-3
"""Two numbers count as equal up to this relative difference, which is the rounding of float16."""

_AS_PRINTED = 1e-4
"""Statistics of permuted elements count as equal up to this relative difference.

Permuted elements are added in a different order, and files have six digits of the result.
"""

_CLEAR = 1e-2
"""A change above this share of the size is no rounding."""

_MANY_ZEROS = 0.2
"""A different activation or dropout changes the share of zeros by more than this. Different numbers hardly do."""


def hints(actual: Reading, expected: Reading) -> tuple[str, ...]:
    """Return what a change from one reading to another looks like.

    >>> from pytest_modelprobe.record import Statistics
    >>> numbers = Statistics(count=4, mean=0.0, deviations=4.0, min=-1.0, max=1.0)
    >>> old = Reading(statistics=numbers, fingerprint=(1.0, -1.0, 1.0, 1.0))
    >>> hints(Reading(statistics=numbers, fingerprint=(-1.0, 1.0, 1.0, -1.0)), old)
    ('a permutation of its elements',)
    """
    a, e = actual.statistics, expected.statistics
    if a is None or e is None:
        return ()
    if a.nonfinite > e.nonfinite:
        return (f"{a.nonfinite:,} elements are not finite any more",)
    if a.mean is None or e.mean is None:
        return ()
    if a.all_zero or e.all_zero:
        return ("all zero now",) if a.all_zero else ("all zero before",)
    return _of_fingerprints(actual, expected) or _of_moments(a, e, a.mean - e.mean)


def _of_fingerprints(actual: Reading, expected: Reading) -> tuple[str, ...]:
    """Return what fingerprints tell: the sums of a scaled tensor are scaled, those of permuted elements are others."""
    a, e, x, y = actual.statistics, expected.statistics, actual.fingerprint, expected.fingerprint
    size = 0.0 if y is None else math.hypot(*y)
    if a is None or e is None or x is None or y is None or not size:  # elements may cancel in all of its sums
        return ()
    scale = sum(p / size * (q / size) for p, q in zip(x, y, strict=True))  # squares of small numbers are 0
    rest = math.hypot(*(p - scale * q for p, q in zip(x, y, strict=True)))
    if rest < _EXACT * math.hypot(*x) and abs(scale - 1) > _EXACT:
        return ("its sign flipped",) if math.isclose(scale, -1, rel_tol=_EXACT) else (f"scaled by {scale:.4g}",)
    pairs = ((a.min, e.min), (a.max, e.max), (a.std, e.std))
    same = all(p is not None and q is not None and math.isclose(p, q, rel_tol=_AS_PRINTED) for p, q in pairs)
    same_mean = math.isclose(a.mean or 0.0, e.mean or 0.0, rel_tol=_AS_PRINTED, abs_tol=_AS_PRINTED * (e.rms or 1.0))
    moved = math.dist(x, y) > _CLEAR * size
    return ("a permutation of its elements",) if moved and same and same_mean else ()


def _of_moments(a: Statistics, e: Statistics, shift: float) -> tuple[str, ...]:
    if math.isclose(a.std or 0.0, e.std or 0.0, rel_tol=_EXACT) and abs(shift) > _CLEAR * (e.rms or 1.0):
        return (f"shifted by {shift:.4g}",)
    if a.count and abs(a.zeros / a.count - e.zeros / max(e.count, 1)) > _MANY_ZEROS:
        return (f"zeros {e.zeros / max(e.count, 1):.0%} → {a.zeros / a.count:.0%}",)
    return ()
