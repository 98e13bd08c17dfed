"""Elements of HTML and SVG as text, and what the status of a layer looks like.

Names of layers and messages of tests are untrusted. So every string is escaped, unless it is `Markup`, which only the
functions here return.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pytest_modelprobe.record import Layer, Value
from pytest_modelprobe.report.results import Run
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


def number(value: float | None) -> str:
    """Return a number with three digits, a large integer with grouped digits, an empty text for none.

    >>> number(0.00123456), number(12544), number(None), number(float("nan"))
    ('0.00123', '12,544', '', 'nan')
    """
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def outputs_of(layer: Layer) -> Sequence[Value]:
    """Return the outputs of the first call."""
    return layer.calls[0].outputs if layer.calls else ()


def entropies(layer: Layer) -> Sequence[float | None]:
    """Return the entropy of each head in the first call."""
    found = (one.entropy for one in (layer.calls[0].attention if layer.calls else ()) if one.kind == "attention")
    return next(found, ())


# --- the status of a layer --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Status:
    """How a word of the results is shown."""

    word: str
    css: str
    sign: str
    meaning: str


STATUSES = {
    status.word: status
    for status in (
        Status("named", "named", "◎", "the failure of the test names it"),
        Status("own code", "own", "●", "the layer's own code computes something else"),
        Status("structure", "structure", "▲", "a type, a shape or an attribute changed"),
        Status("weights", "weights", "◆", "the weights changed"),
        Status("nonfinite", "nonfinite", "!", "NaN or infinite values"),
        Status("dead", "dead", "×", "all outputs are zero"),
        Status("saturated", "saturated", "■", "outputs are at their limits"),
        Status("no gradient", "nograd", "∅", "no gradient arrived at its parameters"),
        Status("moved", "moved", "↓", "other values, because of a layer before it"),
        Status("not called", "uncalled", "–", "the forward does not call it"),
    )
}
"""Word → how it is shown, in the order of the legend. All are of the results, but ``named``, which the page adds."""


def is_cause(word: str) -> bool:
    """Whether a word is a reason to look into the layer, and no consequence of another layer."""
    return word not in ("moved", "not called")


def badges(words: Iterable[str]) -> list[Markup]:
    """Return each word with its sign."""
    return [tag("b", f"{s.sign} {s.word}", class_=s.css) for s in map(STATUSES.__getitem__, words)]


def legend(words: Sequence[str]) -> Markup:
    """Return the list of the words that occur, and what they mean."""
    shown = [status for word, status in STATUSES.items() if word in words]
    return bullets(([badges([s.word]), f" {s.meaning}"] for s in shown), class_="legend") if shown else Markup()


def naming(run: Run, message: str) -> Run:
    """Return a run in which the layer that the message of a failed assertion begins with is marked as named.

    A message begins with the layer, its value or its parameter, or with one of its heads.
    """
    assertion = _ASSERTION.match(message)
    if not assertion:
        return run
    said = message[assertion.end() :]
    number, word = _NUMBER.match(said), said.partition(" ")[0].rstrip(":,;")
    names = [number[1]] if number else [word, word.rpartition(".")[0]]
    name = next((name for name in names if name in run.record.layers), None)
    return run if name is None else replace(run, status={**run.status, name: (*run.status.get(name, ()), "named")})


_ASSERTION = re.compile(r"AssertionError: (?:head \d+ of )?")

_NUMBER = re.compile(r"layer '(\d+)'")
