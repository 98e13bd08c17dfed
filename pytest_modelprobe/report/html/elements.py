"""Elements of HTML and SVG as text.

Names of layers and messages of tests are untrusted. So every string is escaped, unless it is `Markup`, which only the
functions here return.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable

from pytest_modelprobe.text import html_escaped


class Markup(str):
    """Text that is HTML already: what `tag` returns, and the style sheet and script of the page."""

    __slots__ = ()


Child = str | int | None | Iterable["Child"]

Attribute = str | int | float | bool | None


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Return an element; text in it and in its attributes is escaped.

    An attribute that is None or False is left out. A trailing ``_`` of its name is dropped, another one is ``-``.

    >>> tag("td", "a < b", class_="n")
    '<td class=n>a &lt; b'
    >>> tag("p", ["x", tag("b", 1), None], hidden=True, aria_label='"x"')
    '<p hidden aria-label="&quot;x&quot;">x<b>1</b></p>'
    """
    start = "".join(_attribute(key, value) for key, value in attributes.items()) if attributes else ""
    if name in _EMPTY:
        # Without the space, the slash would be of an unquoted value.
        return Markup(f"<{name}{start}/>" if start[-1:] == '"' else f"<{name}{start} />")
    return Markup(f"<{name}{start}>{''.join(map(_text, children))}{'' if name in _NO_END else f'</{name}>'}")


_EMPTY = {"path", "rect"}
"""Elements of SVG without content here, which end themselves."""


_NO_END = {"input", "img", "meta", "td", "th", "tr", "wbr"}
"""Elements without content, and those of tables, whose end HTML lets a page leave out: a tenth of a large page."""


def bullets(items: Iterable[Child], **attributes: Attribute) -> Markup:
    """Return a list with a bullet for each item.

    >>> bullets(["a", "b"])
    '<ul><li>a</li><li>b</li></ul>'
    """
    return tag("ul", [tag("li", item) for item in items], **attributes)


def folded(summary: Child, *children: Child, **attributes: Attribute) -> Markup:
    """Return children of which a browser shows the summary alone until it is clicked."""
    return tag("details", tag("summary", summary), *children, **attributes)


def preformatted(text: str) -> Markup:
    r"""Return text as an element that keeps its lines, and that the keyboard can scroll.

    A long line is wrapped, so that none is cut; those of a table are not, as their columns would be torn.

    >>> preformatted("fc is dead\n\nlayer   zeros\nfc         100")
    '<pre tabindex=0>fc is dead\n\n<span>layer   zeros\nfc         100</span></pre>'
    """
    blocks = itertools.groupby(text.split("\n"), lambda line: bool(_COLUMNS.search(line)))
    parts = [(columns, Markup("\n".join(map(html_escaped, lines)))) for columns, lines in blocks]
    shown = [tag("span", lines) if columns else lines for columns, lines in parts]
    return tag("pre", Markup("\n".join(shown)), tabindex=0)


_COLUMNS = re.compile(r"(?<!^E)(?<!^>)(?<=\S) {3,}\S")
"""Three spaces between words, as between the columns of a table; pytest puts a sign before the lines of an error."""


def _text(child: Child) -> str:
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return html_escaped(child)
    if child is None:
        return ""
    return str(child) if isinstance(child, int) else "".join(map(_text, child))


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    text = coordinate(value) if isinstance(value, float) else html_escaped(str(value))
    return f" {name}={text}" if _UNQUOTED.fullmatch(text) else f' {name}="{text}"'


_UNQUOTED = re.compile(r"[\w#.-]+", re.ASCII)


def coordinate(value: float) -> str:
    """Return a coordinate in SVG, to a tenth of a pixel.

    >>> coordinate(12.0), coordinate(3.14159), coordinate(-0.01)
    ('12', '3.1', '0')
    """
    return f"{round(value, 1):g}" if round(value, 1) else "0"


def finite(value: object) -> float | None:
    """Return a finite number of a results file, or None: others are None or text there.

    >>> finite(2), finite("inf"), finite(None)
    (2.0, None, None)
    """
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def number(value: object) -> str:
    """Return a number with three digits, a large integer with grouped digits, an empty text for none.

    >>> number(0.00123456), number(12544), number(None), number("nan")
    ('0.00123', '12,544', '', 'nan')
    """
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3g}"
    return value if isinstance(value, str) else ""
