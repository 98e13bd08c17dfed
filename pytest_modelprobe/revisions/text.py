"""Two sides in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_modelprobe.comparison import text as comparison_text
from pytest_modelprobe.text import count, printable, table

from .pairs import Pair, Verdict

_WORDS: dict[Verdict, str] = {
    "unchanged": "unchanged",
    "rounding": "the same but for rounding",
    "changed": "changed",
    "not repeatable": "not repeatable",
}


def summary(pairs: Sequence[Pair]) -> str:
    """Return how many models are as they were.

    >>> summary([])
    '0 models'
    """
    counts = Counter(pair.verdict for pair in pairs)
    told = [f"{counts[verdict]} {words}" for verdict, words in _WORDS.items() if counts[verdict]]
    return count(len(pairs), "model") + (f": {', '.join(told)}" if told else "")


def pair_text(pair: Pair, side: str) -> str:
    """Return the failure of a pair: the causes as for a snapshot, and how the first tensors that differ differ.

    Args:
        pair: The pair.
        side: The other side in one word, such as ``main``.
    """
    parts = [comparison_text.text(pair.diagnosis)]
    if pair.tensors is not None and pair.first is not None:
        parts.append("\n".join(tensors_lines(pair.tensors, pair.first.layer, side)))
    return "\n\n".join(parts)


def tensors_lines(found: Mapping[str, Any], layer: str, side: str) -> list[str]:
    r"""Return how the outputs of a layer differ, exactly.

    >>> found = {"value": "output", "call": 0, "elements": 8, "different": 2, "files": ["a.pt", "b.pt"]}
    >>> found["largest"] = {"difference": (0.5, [1, 3], 2.5, 2.0), "relative": (0.25, [1, 3], 2.5, 2.0)}
    >>> print(*tensors_lines(found, "fc", "main"), sep="\n")
    The output of fc differs first: 2 of 8 elements.
    largest      size   at       here   main
    difference    0.5   [1, 3]    2.5      2
    relative     0.25   [1, 3]    2.5      2
    Read it with torch.load: a.pt here, b.pt at main.
    """
    call = f" in call {found['call'] + 1}" if found["call"] else ""
    what = "The output" if found["value"] == "output" else f"{found['value']}"
    here, there = found["files"]
    rows = [
        [name, f"{size:.4g}", str(at), _element(now), _element(then)]
        for name, (size, at, now, then) in found["largest"].items()
    ]
    return [
        printable(f"{what} of {layer} differs first{call}: {found['different']:,} of {found['elements']:,} elements."),
        *table(["largest", "size", "at", "here", side], rows),
        printable(f"Read it with torch.load: {here} here, {there} at {side}."),
    ]


def _element(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)
