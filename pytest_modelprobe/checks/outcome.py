"""The outcome of a check: whether a property holds, and the first layer at which it breaks.

A check returns a `Violation`, or text on what it looked at. `Outcome` is what the caller of a check gets. A property
that means nothing for a model raises `NotApplicableError`: that is neither a pass nor a failure.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pytest_modelprobe.exceptions import HintWarning, UsageError
from pytest_modelprobe.record import label_of
from pytest_modelprobe.text import Cell, failure

CheckVerdict = Literal["holds", "hint", "broken", "not applicable"]


class NotApplicableError(Exception):
    """The property is not defined for this model or these inputs; the text is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Where a property breaks first."""

    layer: str
    """The layer, or the parameter, that breaks it."""
    line: str
    """The first line of the message; it begins with the layer."""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    """All places where it is broken, in the order of computation."""
    advice: str = ""
    """Where to look."""
    level: Literal["broken", "hint"] = "broken"
    """``hint``: a healthy model may look so too."""

    @classmethod
    def at(
        cls,
        layer: str,
        said: str,
        *,
        columns: tuple[str, ...] = (),
        rows: Iterable[tuple[Cell, ...]] = (),
        advice: str = "",
        level: Literal["broken", "hint"] = "broken",
    ) -> Violation:
        """Return the violation at a layer or a parameter; ``said`` is the sentence after its name."""
        return cls(layer=layer, line=f"{layer} {said}", columns=columns, rows=tuple(rows), advice=advice, level=level)

    @classmethod
    def first_of(cls, rows: Iterable[tuple[Cell, ...]], said: str, **more: Any) -> Violation:
        """Return the violation at the first of some rows, each of which begins with the name of a layer or a parameter.

        There has to be a row. The other arguments are those of `at`.
        """
        all_rows = tuple(rows)
        return cls.at(str(all_rows[0][0]), said, rows=all_rows, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a check.

    >>> print(Outcome(check="causal", model="Net", verdict="not applicable", text="no axis of positions"))
    causal is not applicable to Net: no axis of positions
    """

    check: str
    model: str
    """Name of the model's class."""
    verdict: CheckVerdict
    """``hint``: the property does not hold, but a healthy model may look so: it is said, and fails nothing."""
    text: str = ""
    """The whole message; of a property that holds, a summary."""
    layer: str | None = None
    """The first layer, or the parameter, at which the property breaks."""

    def __str__(self) -> str:
        if self.verdict in ("broken", "hint"):
            return self.text
        verb = "holds for" if self.verdict == "holds" else "is not applicable to"
        return f"{self.check} {verb} {self.model}" + (f": {self.text}" if self.text else "")

    def asserted(self, *, stacklevel: int) -> Outcome:
        """Return the outcome if the property holds; a hint is a `HintWarning`.

        Raises:
            AssertionError: The property is broken.
            UsageError: The check is not applicable.
        """
        __tracebackhide__ = True
        if self.verdict == "broken":
            raise AssertionError(str(self))
        if self.verdict == "not applicable":
            raise UsageError(str(self))
        self.warn(stacklevel=stacklevel)
        return self

    def warn(self, stacklevel: int) -> None:
        """Give the warning of a hint."""
        if self.verdict == "hint":
            warnings.warn(HintWarning(f"{self.check}: {self.text}"), stacklevel=stacklevel)


_COLORS = re.compile(r"\x1b\[[0-9;]*m")

_LONG = 300
"""Characters of an exception from which on no further line of it is told."""


def line_of(error: BaseException | None) -> str:
    r"""Return the type and the text of an exception in one line, without the colors of a terminal.

    Of a long text it is the first lines: einops and jaxtyping say what was called, and then what is wrong with it. Of
    an exception without a text it is the line of code that raised it: ``assert x.shape[1] == self.length``.

    >>> line_of(ValueError("two things:\n  \x1b[31mthis one\x1b[0m\n  and that"))
    'ValueError: two things: this one and that'
    """
    text, *lines = [line for line in map(str.strip, _COLORS.sub("", str(error)).splitlines()) if line] or [""]
    for line in lines:  # with `assert` begins what pytest adds to the text of an assertion
        if line.startswith("assert ") or (len(text) + len(line) >= _LONG and not text.endswith(":")):
            break
        text += f" {line}"
    if not text and error is not None and error.__traceback__ is not None:
        text = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return f"{type(error).__name__}{f': {text}' if text else ''}"


def message_of(found: Violation, type_name: str = "") -> str:
    """Return the message of a property that is broken.

    Args:
        found: Where.
        type_name: The type of the layer, for a name that is a number.
    """
    line, label = found.line, label_of(found.layer, type_name)
    for named in (found.layer, label_of(found.layer)):
        if line.startswith(f"{named} ") and not line.startswith(label):  # an assertion names the type itself
            line = label + line.removeprefix(named)
    if not found.rows:
        return "\n\n".join(filter(None, [line, found.advice]))
    return failure(line, found.columns, found.rows, found.advice)
