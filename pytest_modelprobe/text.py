"""Plain text: numbers, counts, lists, tables, the body of a failure, escaping. It knows no record.

Every message of the project is made of these functions, so that a number, a plural or a list reads the same
everywhere. Names of layers and tests come from the code under test: `printable` takes out of them what would move the
cursor of a terminal or give a command to GitHub Actions.
"""

from __future__ import annotations

import contextlib
import html
import itertools
import math
import operator
import os
import re
import shutil
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TextIO

MOST_ROWS = 20
"""Rows of a table that are shown. The others are counted."""

WIDEST = 100
"""Characters of a cell of several words. If it has more, its middle is left out."""

LONGEST = 4096
"""Characters of a word, more than names of layers and commands have. If it has more, its middle is left out."""

Cell = str | int | float | None

_width: ContextVar[int | None] = ContextVar("width", default=None)
"""Of the terminal that shows what is made now; None: it is whole, as for a file."""


def width_of(stream: TextIO) -> int | None:
    """Return the width of the terminal behind a stream, or None if there is none. ``COLUMNS`` goes before."""
    if os.environ.get("COLUMNS", "").isdecimal() or stream.isatty():
        return shutil.get_terminal_size().columns
    return None


@contextlib.contextmanager
def fitted(width: int | None) -> Iterator[None]:
    r"""Within this block `table` and `wrapped` return lines of at most so many characters.

    >>> with fitted(24):
    ...     print(*table(["layer", "zeros"], [["encoder.layers.0.attention", 3]]), sep="\n")
    layer              zeros
    encoder…ttention       3
    """
    token = _width.set(width)
    try:
        yield
    finally:
        _width.reset(token)


def wrapped(text: str, indent: int = 0) -> str:
    """Return a line on several lines if it is longer than the terminal is wide, all but the first indented."""
    width = _width.get()
    if width is None or len(text) <= width:
        return text
    indent = min(indent, width // 2)
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)


def number(value: float | None) -> str:
    """Return a number with four digits, an integer with grouped digits.

    >>> number(12544), number(0.00012345678), number(-3.5), number(None)
    ('12,544', '0.0001235', '-3.5', '-')
    """
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}"


def significant(value: float) -> str:
    """Return a number with three digits, large ones grouped.

    >>> significant(1000.2), significant(0.012345), significant(65536)
    ('1,000', '0.0123', '65,500')
    """
    return f"{float(f'{value:.3g}'):,.10g}"


def json_number(value: Any) -> Any:
    """Return a float that is not finite as text, since strict JSON has none, and any other value as it is."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def count(n: int, noun: str) -> str:
    """Return ``1 layer``, ``2 layers``, ``12,544 outputs``.

    >>> count(1, "layer"), count(1200, "layer")
    ('1 layer', '1,200 layers')
    """
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        plural = noun[:-1] + "ies"
    else:
        plural = noun + ("es" if noun.endswith(("s", "x", "ch")) else "s")
    return f"{n:,} {noun if n == 1 else plural}"


def out_of(n: int, total: int, noun: str) -> str:
    """Return how many of those that were looked at are meant.

    >>> out_of(1, 1200, "layer")
    '1 of 1,200 layers looked at'
    """
    return f"{n:,} of {count(total, noun)} looked at"


def shape(dimensions: Sequence[int | tuple[int, int]]) -> str:
    """Return ``(4, 2..8, 16)``: a dimension that varied is written as a range.

    >>> shape((4, (2, 8), 16)), shape((4,)), shape(())
    ('(4, 2..8, 16)', '(4,)', '()')
    """
    parts = [str(d) if isinstance(d, int) else f"{d[0]}..{d[1]}" for d in dimensions]
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return ``a, b and c``, or ``a, b, c and 4 more``.

    >>> listed(["a"]), listed(["a", "b", "c"]), listed(list("abcdefg"))
    ('a', 'a, b and c', 'a, b, c and 4 more')
    """
    shown = list(names[:most])
    if len(names) > most:
        return f"{', '.join(shown)} and {len(names) - most} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def pattern(name: str) -> str:
    """Return a layer's name with ``*`` for its numbers: repeated layers have the same pattern.

    >>> pattern("blocks.2.mlp.fc1"), pattern("fc1")
    ('blocks.*.mlp.fc1', 'fc1')
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def collapsed(names: Iterable[str]) -> list[str]:
    """Return names with those of repeated layers as one, in order of the first.

    >>> collapsed(["blocks.0.fc", "blocks.1.fc", "head", "blocks.2.fc"])
    ['blocks.*.fc x3', 'head']
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(pattern(name), []).append(name)
    return [same[0] if len(same) == 1 else f"{shown} x{len(same)}" for shown, same in groups.items()]


def printable(text: str) -> str:
    r"""Return text without control characters, commands to GitHub Actions and very long words.

    Control characters, and the start of a command in the log of a job, are written as escapes; the middle of a word
    longer than `LONGEST` is left out.

    >>> printable("fc" + chr(27) + "[31m")
    'fc\\x1b[31m'
    >>> printable("::error::fc"), printable("a ##[group]fc"), printable("test_fc.py::test_a")
    (':\\x3aerror::fc', 'a ##\\x5bgroup]fc', 'test_fc.py::test_a')
    """
    half, shown = LONGEST // 2, text
    if len(text) > LONGEST:
        shown = re.sub(rf"\S{{{LONGEST + 1},}}", lambda word: f"{word[0][: half - 1]}…{word[0][-half:]}", text)
    if not shown.isprintable():  # as most text is
        shown = "".join(_escape(c) if unicodedata.category(c) in _NOT_PRINTED else c for c in shown)
    return _COMMAND.sub(lambda start: start[0][:-1] + _escape(start[0][-1]), shown)


def html_escaped(text: str) -> str:
    r"""Return text for HTML: what `printable` returns, with ``&``, ``<``, ``>`` and quotes as references.

    >>> html_escaped("<b>" + chr(27))
    '&lt;b&gt;\\x1b'
    """
    # Most cells of a page are numbers and names in which nothing is to be escaped.
    return text if _PLAIN.fullmatch(text) else html.escape(printable(text))


_PLAIN = re.compile(r"[\w ,.()+-]{0,200}", re.ASCII)


def _escape(sign: str) -> str:
    return f"\\x{ord(sign):02x}" if sign.isascii() and sign.isprintable() else sign.encode("unicode_escape").decode()


_NOT_PRINTED = {"Cc", "Cf", "Cs", "Zl", "Zp"}

_COMMAND = re.compile(r"^\s*::|##\[")
"""What Actions looks for: the one at the start of a line, the other anywhere."""


def shortened(text: str, widest: int = WIDEST) -> str:
    """Return text of at most ``widest`` characters: lists of names are cut to three names, and then the middle goes.

    The first word, which is mostly a layer's name, is kept.

    >>> shortened("lstm: weights changed (weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0, weight_ih_l1)", 80)
    'lstm: weights changed (weight_ih_l0, weight_hh_l0, bias_ih_l0 and 2 more)'
    >>> shortened("norm.mode left to right and top to bottom → right to left and bottom to top", 60)
    'norm.mode left to right and top to bottom → rig…ottom to top'
    """
    if len(text) <= widest:
        return text
    text = _LIST.sub(lambda names: listed(names[0].split(", ")), text)
    first, _, rest = text.partition(" ")
    width_left = max(widest - len(first) - 1, widest // 2)
    if len(text) <= widest or len(rest) <= width_left:
        return text
    end = width_left // 4
    return f"{first} {rest[: width_left - end - 1]}…{rest[-end:]}"


# Possessive, so that a long word is matched in linear time.
_LIST = re.compile(r"(?<![\w.])[^\W\d][\w.]*+(?:, [^\W\d][\w.]*+){4,}")


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    most: int = MOST_ROWS,
    widest: int = WIDEST,
    spare: Sequence[str] = (),
) -> list[str]:
    r"""Return the lines of an aligned table, columns of numbers right-aligned; rows beyond ``most`` are counted.

    Where it is shown in a terminal, see `fitted`, columns are left out, the spare ones and then the last, until the
    first is whole or takes half of the width. Then the middle of long words is left out, as far as they still differ.
    A wider terminal never shows less of the first column.

    Args:
        columns: The headings.
        rows: The cells.
        most: The number of rows shown.
        widest: Characters of a cell of several words; a single word, such as a path, is shown whole, and so are cells
            that would be shown alike.
        spare: Headings of the columns that a narrow terminal leaves out first, in this order.

    >>> print(*table(["layer", "zeros"], [["fc1", 3], ["relu", 12544]]), sep="\n")
    layer    zeros
    fc1          3
    relu    12,544
    """
    rows = [list(row) for row in rows]
    whole = [[printable(cell) if isinstance(cell, str) else number(cell) for cell in row] for row in rows[:most]]
    fitting = [_fitting(column, widest) for column in zip(*whole, strict=True)]
    shown = [[column[cell] for column, cell in zip(fitting, row, strict=True)] for row in whole]
    right = [i > 0 and all(_NUMBER.fullmatch(row[i]) for row in shown) for i in range(len(columns))]
    width = _width.get()
    left_out: list[str] = []
    if width is not None:
        kept, shown = _narrowed(columns, shown, right, width, spare)
        left_out = [column for i, column in enumerate(columns) if i not in kept]
        columns, right = [columns[i] for i in kept], [right[i] for i in kept]
    widths = [max(map(len, column)) for column in zip(columns, *shown, strict=True)]
    lines = [_aligned(cells, widths, right) for cells in (columns, *shown)]
    if left_out:
        lines += wrapped(f"not shown: {', '.join(left_out)}; a wider terminal has them").split("\n")
    if len(rows) > most:
        lines.append(f"... {count(len(rows) - most, 'row')} more")
    return lines


_GAP = 3
_NARROWEST = 16
"""Characters that are left at least of a cell whose middle is left out."""


def _narrowed(
    columns: Sequence[str], rows: list[list[str]], right: Sequence[bool], width: int, spare: Sequence[str]
) -> tuple[list[int], list[list[str]]]:
    """Return the positions of the columns that fit into a width, and their cells, shortened for it."""
    whole = [[row[i] for row in rows] for i in range(len(columns))]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    least = list(widths)
    for i in (i for i in range(len(columns)) if not right[i]):
        lowest = min(max(len(columns[i]), _NARROWEST), widths[i])
        least[i] = max(map(len, (columns[i], *_shorter(whole[i], range(lowest, widths[i] + 1)))))
    kept = list(range(len(columns)))
    dropped = [columns.index(name) for name in spare if name in columns]
    dropped += [i for i in reversed(kept[1:]) if i not in dropped]
    others = sum(least[i] + _GAP for i in kept[1:])
    most = max(others, width - sum(widths[i] + _GAP for i in kept[1:]))
    for next_dropped in dropped:
        if width - others >= min(widths[0], max(others, least[0])):
            break
        kept.remove(next_dropped)
        most, others = others, others - least[next_dropped] - _GAP
    # What is to spare is for the others if the first one would have to give it back to the next column.
    first = min(widths[0], width - others, max(most, least[0]))
    left = width - first - others
    cells = [_shorter(whole[0], range(first, least[0] - 1, -1)) or [folded(cell, width) for cell in whole[0]]]
    for i in kept[1:]:
        wider = min(widths[i], least[i] + left)
        left -= wider - least[i]
        cells.append(_shorter(whole[i], range(wider, least[i] - 1, -1)))
    return kept, [list(row) for row in zip(*cells, strict=True)]


def _shorter(cells: Sequence[str], widths: Iterable[int]) -> list[str]:
    """Return the cells of a column, shortened to the first of the widths at which they differ as before."""
    for width in widths:
        for eighths in (4, 3, 5, 2, 6, 1):
            shown = [folded(cell, width, eighths) for cell in cells]
            if len(set(shown)) == len(set(cells)):
                return shown
    return []


def folded(text: str, widest: int, eighths: int = 4) -> str:
    """Return text of at most ``widest`` characters, without its middle; ``eighths`` of them are of its end.

    >>> folded("encoder.layers.0.attention.query", 20)
    'encoder.l…tion.query'
    """
    end = widest * eighths // 8
    return text if len(text) <= widest else f"{text[: widest - end - 1]}…{text[len(text) - end :]}"


def differing_part(text: str, other: str, widest: int = 60) -> str:
    """Return text of at most ``widest`` characters: of longer text the part in which it differs from another.

    >>> a, b = (f"({', '.join(f'layers.{i}.attention.query' for i in range(n))})" for n in (3, 4))
    >>> differing_part(a, b), differing_part(b, a)
    ('…attention.query)', '…attention.query, layers.3.attention.query)')
    """
    if len(text) <= widest:
        return text
    start = _alike(text, other)
    end = len(text) - _alike(text[start:][::-1], other[start:][::-1])
    before = text[:start] if start <= _AROUND else f"…{text[start - _AROUND : start]}"
    after = text[end:] if len(text) - end <= _AROUND else f"{text[end : end + _AROUND]}…"
    return f"{before}{folded(text[start:end], widest - len(before) - len(after))}{after}"


def _alike(a: str, b: str) -> int:
    """Return how many characters two texts begin with alike."""
    return sum(1 for _ in itertools.takewhile(bool, map(operator.eq, a, b)))


_AROUND = 15
"""Characters that are shown before and after the part in which two texts differ."""


def _fitting(column: Sequence[str], widest: int) -> dict[str, str]:
    """Return cell → shown text of a column. A cell is shortened unless another would be shown alike."""
    shown = {cell: shortened(cell, widest) for cell in column}
    times = Counter(shown.values())
    return {cell: short if times[short] == 1 else cell for cell, short in shown.items()}


_NUMBER = re.compile(r"[-+\d][-+.,/%e\d]*|nan|inf")


def _aligned(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True))
    return "   ".join(padded).rstrip()


def failure(
    first: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]], *next_steps: str, widest: int = WIDEST
) -> str:
    """Return the text of a failure: the first line, the table of findings, the next steps.

    >>> print(failure("fc1 is dead", ["layer"], [["fc1"]], "Look at its bias."))
    fc1 is dead
    <BLANKLINE>
    layer
    fc1
    <BLANKLINE>
    Look at its bias.
    """
    lines = table(columns, rows, widest=widest)
    parts = [printable(first), "\n".join(lines), *(printable(step) for step in next_steps if step)]
    return "\n\n".join(parts)


def failed(first: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]], *next_steps: str) -> AssertionError:
    """Return the error whose message is that of `failure`."""
    return AssertionError(failure(first, columns, rows, *next_steps))
