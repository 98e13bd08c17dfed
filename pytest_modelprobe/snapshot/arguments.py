"""The arguments of ``modelprobe_snapshot(...)``, checked when they are given.

A wrong argument fails at the line that gives it, also where no snapshot exists yet to compare with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from pytest_modelprobe.comparison import Parts, Tolerance
from pytest_modelprobe.exceptions import SelectionError, UsageError
from pytest_modelprobe.record import Glob, Record, nearest
from pytest_modelprobe.text import count, listed

from .naming import DEVICES

Allowed = Literal["dropout", "nonfinite", "nondeterministic"]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What a test asks for when it compares with a snapshot."""

    name: str | None = None
    tolerance: Tolerance = None
    compare: Parts = "all"
    strict: bool = False
    """Whether the test gives ``compare="all"``. Then a refactoring fails it too."""
    allow: tuple[Allowed, ...] = ()
    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def replaced(self, **given: Any) -> Arguments:
        """Return these arguments, with those replaced that are given and are not ``None``.

        Raises:
            UsageError: An argument has a wrong type or value.
            SelectionError: A key of ``tolerance`` is not a glob.
        """
        __tracebackhide__ = True
        allow = given["allow"]
        given["allow"] = ((allow,) if isinstance(allow, str) else tuple(allow)) or None
        _check_name(given["name"])
        _check_choices(given["compare"], given["allow"] or ())
        _check_tolerance(given["tolerance"])
        _check_rename(given["rename"])
        given["strict"] = given["compare"] == "all" if given["compare"] else None
        return dataclasses.replace(self, **{key: value for key, value in given.items() if value is not None})

    def check_globs(self, record: Record) -> None:
        """Raise `SelectionError` if a glob of ``tolerance`` matches no layer, also if there is no snapshot yet."""
        __tracebackhide__ = True
        for glob in self.tolerance if isinstance(self.tolerance, Mapping) else ():
            if not any(map(Glob(glob).matches, record.layers)):
                near = nearest(glob, record.layers)
                hint = f"; nearest: {', '.join(map(repr, near))}" if near else ""
                raise SelectionError(f"tolerance: {glob!r} matches none of {count(len(record.layers), 'layer')}{hint}")


def _check_name(name: object) -> None:
    __tracebackhide__ = True
    if name is not None and (not isinstance(name, str) or not 0 < len(name) <= 60):
        raise UsageError(f"name= is a text of 1 to 60 characters; got {name!r}")
    if isinstance(name, str) and (name.isdigit() or name in ("cpu", *DEVICES)):
        raise UsageError(f"name={name!r} is reserved for the file names of numbered or device snapshots: give another")


def _check_choices(compare: object, allow: Iterable[object]) -> None:
    __tracebackhide__ = True
    if compare is not None and compare not in get_args(Parts):
        raise UsageError(f"compare= is 'all', 'architecture' or 'behavior'; got {compare!r}")
    unknown = [one for one in allow if one not in get_args(Allowed)]
    if unknown:
        raise UsageError(f"allow= takes {listed([repr(one) for one in get_args(Allowed)])}; got {unknown[0]!r}")


def _check_tolerance(tolerance: Any) -> None:
    __tracebackhide__ = True
    takes = "tolerance= is a positive number, or one for each glob of layers"
    of_globs = tolerance if isinstance(tolerance, Mapping) else {} if tolerance is None else {"**": tolerance}
    for glob, factor in of_globs.items():
        if type(factor) not in (int, float) or not 0 < factor < math.inf:
            raise UsageError(f"{takes}; got {factor!r}")
        if not isinstance(glob, str):
            raise UsageError(f"{takes}; got {glob!r} for a glob")
        Glob(glob)


def _check_rename(rename: Any) -> None:
    __tracebackhide__ = True
    texts = isinstance(rename, Mapping) and all(isinstance(t, str) for pair in rename.items() for t in pair)
    if rename is not None and not texts:
        raise UsageError(
            f"rename= is a dict of glob of the layers now → glob of their names in the snapshot; got {rename!r}"
        )
