"""What optimizers did in a step: their hyperparameters, what they had of the gradients, what they added.

An update follows from the gradient, the values and the optimizer. It is a cause where the gradient and the values are
the same. Then its size is arithmetic: fingerprints are sums, so that they tell a multiple, and what is a multiple of
the values themselves, as weight decay adds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from pytest_modelprobe.comparison.differences import Difference
from pytest_modelprobe.record import ROOT, OptimizerGroup, Parameter, Reading, Record, proportion
from pytest_modelprobe.text import count, significant

from .causes import Cause, cause_of, cause_of_all, worst_first
from .index import ComparisonIndex

_EXACT = 2e-3
"""What is left, relative to the norm, of an update that is a multiple: rounding, and the precision of a fingerprint."""

_ZERO = "are 0"

Fingerprint = tuple[float, ...]


def optimizer_causes(index: ComparisonIndex) -> list[Cause]:
    """Return what differs in how optimizers took the step, and then updates that nothing else explains."""
    found = list(index.differences("optimizer"))
    updates = _own_updates(index)
    if not found:
        return list(_update_causes(index, updates))
    moved = [difference for difference in found if difference.what.endswith(" group")]
    of_run = [difference for difference in found if difference not in moved]
    said = _summary(index, updates)
    hints = (said,) if said else ()
    causes = [cause_of("optimizer", [difference], hints=hints) for difference in of_run]
    for layer in dict.fromkeys(difference.layer for difference in moved):
        here = [difference for difference in moved if difference.layer == layer]
        causes.append(cause_of("optimizer", here, hints=hints))
    return causes


def _own_updates(index: ComparisonIndex) -> list[Difference]:
    """Return the updates that differ though gradient and values are the same, as far as they are known."""
    changes = index.comparison.changes

    def has_same_reasons(d: Difference) -> bool:
        sides = ("parameter", "parameter gradient")
        return not any(change.differs for side in sides if (change := changes.get((d.layer, None, side, d.what))))

    return [difference for difference in index.differences("update") if has_same_reasons(difference)]


def _update_causes(index: ComparisonIndex, updates: Sequence[Difference]) -> Iterator[Cause]:
    """Yield a cause for each group and each manner in which its updates differ; of one layer, that layer is named."""
    kinds: dict[tuple[int | None, str], list[Difference]] = {}
    for difference in updates:
        now = _parameter(index.comparison.actual, difference)
        kinds.setdefault((now.group, _manner(index, difference)), []).append(difference)
    for (group, manner), found in kinds.items():
        layers = dict.fromkeys(difference.layer for difference in found)
        hints = (manner,) if manner else ()
        if len(layers) == 1:
            yield cause_of_all("update", found, hints=hints)
        else:
            held = sum(own.group == group for own in index.comparison.actual.parameters)
            what = f"{len(found)} of {count(held, 'parameter')}"
            yield cause_of("update", worst_first(found), layer=ROOT, what=what, hints=hints)


def _summary(index: ComparisonIndex, updates: Sequence[Difference]) -> str:
    """Return what became of the updates, for the cause that explains them."""
    manners: dict[str, int] = {}
    for difference in updates:
        manner = _manner(index, difference) or "changed"
        manners[manner] = manners.get(manner, 0) + 1
    total = sum(own.update is not None for own in index.comparison.actual.parameters)
    parts = [f"{manner} in {n} of {count(total, 'parameter')}" for manner, n in _most(manners)]
    return f"updates {', '.join(parts)}" if parts else ""


def _most(manners: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(manners.items(), key=lambda pair: -pair[1])[:2]


def _manner(index: ComparisonIndex, difference: Difference) -> str:
    """Return what an update is of the expected one, if that is a matter of arithmetic."""
    now, then = (_parameter(r, difference) for r in (index.comparison.actual, index.comparison.expected))
    actual, expected = _fingerprint(now.update), _fingerprint(then.update)
    if actual is None or expected is None:
        return ""
    if not any(actual):
        return _ZERO
    values = _fingerprint(then.reading) or (0.0,) * len(actual)
    factor, share, left = _fitted(actual, expected, values)
    if left > _EXACT * math.hypot(*actual):
        return ""
    parts = []
    if abs(factor - 1) > _EXACT:
        parts.append("with the other sign" if abs(factor + 1) <= _EXACT else f"x {significant(factor)}")
    if abs(share) * math.hypot(*values) > _EXACT * math.hypot(*actual):
        parts.append(_decay_text(share, index.comparison.expected.optimizers[then.group or 0]))
    return " and ".join(parts)


def _fitted(actual: Fingerprint, expected: Fingerprint, values: Fingerprint) -> tuple[float, float, float]:
    """Return how often the expected update and the values are in the actual one, and the norm of what is left."""
    share, _ = proportion(values, expected)
    apart = tuple(value - share * update for value, update in zip(values, expected, strict=True))
    of_values, _ = proportion(actual, apart)
    without = tuple(update - of_values * value for update, value in zip(actual, values, strict=True))
    factor, left = proportion(without, expected)
    return factor, of_values, left


def _decay_text(share: float, group: OptimizerGroup) -> str:
    """Return in words that an update has a share of the values more than expected: decay takes away from them."""
    rate, decay = (group.options.get(name) for name in ("lr", "weight_decay"))
    if isinstance(rate, float) and isinstance(decay, float) and decay and abs(share - rate * decay) < 0.05 * share:
        return "as without weight decay"
    return f"with {'less' if share > 0 else 'more'} weight decay"


def _parameter(record: Record, difference: Difference) -> Parameter:
    layer = record.layers[difference.layer]
    return next(own for own in layer.parameters if own.name == difference.what)


def _fingerprint(reading: Reading | None) -> Fingerprint | None:
    return None if reading is None else reading.fingerprint
