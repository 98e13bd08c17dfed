"""All faults by name, and which of them a text chooses."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase

from pytest_modelprobe.exceptions import UsageError

from .operators import OPERATORS, Operator
from .training import TRAINING, TrainingFault

FAULTS: dict[str, Operator | TrainingFault] = {**OPERATORS, **TRAINING}
"""All faults by name: those of layers, then those of training programs."""

_DROPOUT = ("no_dropout", "double_dropout")
"""Faults of training that are changes of a layer."""

GROUPS: dict[str, tuple[str, ...]] = {
    "layers": tuple(name for name in OPERATORS if name not in _DROPOUT),
    "training": (*TRAINING, *_DROPOUT),
}
"""Name of a group → the names of its faults."""


def selected(text: str) -> frozenset[str]:
    """Return the names of the faults that a text chooses: names, globs and groups, with commas between them.

    Args:
        text: ``"training"``, ``"layers"``, ``"nan,lr_*"``.

    Raises:
        UsageError: No fault has such a name.

    >>> sorted(selected("nan,lr_*"))
    ['lr_by_10', 'lr_times_10', 'lr_zero', 'nan']
    """
    found: set[str] = set()
    for part in filter(None, map(str.strip, text.split(","))):
        names = GROUPS.get(part) or [name for name in FAULTS if fnmatchcase(name, part)]
        if not names:
            near = difflib.get_close_matches(part, [*GROUPS, *FAULTS], 1)
            said = f"; did you mean {near[0]}?" if near else ": 'layers', 'training', or names of faults, with commas"
            raise UsageError(f"no planted fault is named {part!r}{said}")
        found.update(names)
    if not found:
        raise UsageError("no planted fault is named: 'layers', 'training', or names of faults, with commas")
    return frozenset(found)
