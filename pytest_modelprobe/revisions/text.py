"""Two sides in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from pytest_modelprobe.comparison import text as comparison_text
from pytest_modelprobe.text import count, listed, pattern, printable, table

from .pairs import Pair, Verdict

_MOST_TEXTS = 5
"""How many changes are told in full."""

_MOST_LINES = 20
"""How many more have a line."""

_WORDS: dict[Verdict, str] = {
    "unchanged": "unchanged",
    "rounding": "the same but for rounding",
    "changed": "changed",
    "not repeatable": "not repeatable",
    "not run": "never ran",
}


def summary(pairs: Sequence[Pair]) -> str:
    """Return how many models are as they were.

    >>> summary([])
    '0 models'
    """
    counts = Counter(pair.verdict for pair in pairs)
    told = [f"{counts[verdict]} {words}" for verdict, words in _WORDS.items() if counts[verdict]]
    return count(len(pairs), "model") + (f": {', '.join(told)}" if told else "")


def changed_lines(pairs: Sequence[Pair], side: str) -> Iterator[str]:
    """Yield the models that changed. Those with the same causes are told once, most models first.

    Args:
        pairs: The pairs.
        side: The other side in one word, such as ``main``.
    """
    alike: dict[Hashable, list[Pair]] = {}
    for pair in pairs:
        if pair.verdict == "changed":
            alike.setdefault(_causes(pair), []).append(pair)
    groups = sorted(alike.values(), key=len, reverse=True)
    for first, *others in groups[:_MOST_TEXTS]:
        yield from ("", f"{_where(first)}:", *pair_text(first, side).splitlines())
        if others:
            models = Counter(pair.here.test for pair in (first, *others))
            names = [p.here.test if models[p.here.test] == 1 else f"{p.here.test} ({p.here.key})" for p in others]
            yield from ("", printable(f"{count(len(others), 'other model')} changed alike: {listed(names)}."))
    rest = groups[_MOST_TEXTS:]
    if rest:
        yield ""
    for first, *others in rest[:_MOST_LINES]:
        more = f", and {count(len(others), 'other model')} alike" if others else ""
        yield f"{_where(first)}{more}: {comparison_text.text(first.diagnosis).partition(chr(10))[0]}"
    if len(rest) > _MOST_LINES:
        yield f"... {count(sum(map(len, rest[_MOST_LINES:])), 'more model')} changed"
    if len(groups) < sum(map(len, groups)) or rest:
        yield from ("", "The text of each model is in the page of --modelprobe-html=PATH.")


def _causes(pair: Pair) -> Hashable:
    """Return what the causes of models that changed alike have in common; repeated layers count as one."""
    causes = (*pair.diagnosis.causes, *pair.diagnosis.possible)
    found = {(one.kind, pattern(one.layer), one.what, str(one.actual), str(one.expected)) for one in causes}
    return frozenset(found) or (pair.here.test, pair.here.key)


def _where(pair: Pair) -> str:
    return printable(f"{pair.here.test}, {pair.here.key}")


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
