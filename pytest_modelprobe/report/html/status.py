"""What the status of a layer looks like: a class of the style sheet, a sign, a sentence.

Each status has a sign of its own beside its color, because not every reader can tell the colors apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .elements import Markup, bullets, tag


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


def status_of(word: str) -> Status:
    """Return how a word is shown, also one that a newer version wrote."""
    return STATUSES.get(word, Status(word, "other", "?", ""))


def is_cause(word: str) -> bool:
    """Whether a word is a reason to look into the layer, and no consequence of another layer."""
    return word not in ("moved", "not called")


def badges(words: Iterable[str]) -> list[Markup]:
    """Return each word with its sign."""
    return [tag("b", f"{s.sign} {s.word}", class_=s.css) for s in map(status_of, words)]


def legend(words: Sequence[str]) -> Markup:
    """Return the list of the words that occur, and what they mean."""
    shown = sorted({status_of(word) for word in words}, key=lambda s: [*STATUSES, s.word].index(s.word))
    return bullets(([badges([s.word]), f" {s.meaning}"] for s in shown), class_="legend") if shown else Markup()


def naming(layers: Sequence[dict[str, Any]], message: str) -> list[dict[str, Any]]:
    """Return layers, the one that the message of a failed assertion begins with marked as named.

    A message begins with the layer, its value or its parameter, or with one of its heads.
    """
    names = {layer["name"] for layer in layers}
    name = next((name for name in _beginnings(message) if name in names), None)
    if name is None:
        return list(layers)
    return [{**x, "status": [*x["status"], "named"]} if x["name"] == name else x for x in layers]


def _beginnings(message: str) -> Iterator[str]:
    assertion = _ASSERTION.match(message)
    if assertion:
        said = message[assertion.end() :]
        number = _NUMBER.match(said)
        word = said.partition(" ")[0].rstrip(":,;")
        yield from [number[1]] if number else [word, word.rpartition(".")[0]]


_ASSERTION = re.compile(r"(?:AssertionError|pytest_modelprobe\.exceptions\.StoppedError): (?:head \d+ of )?")

_NUMBER = re.compile(r"layer '(\d+)'")
