"""Mutations of the two texts of a snapshot: of what they say, and of their bytes."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from pytest_modelprobe.files import Texts
from pytest_modelprobe.files.readings import bits_for, packed, unpacked
from pytest_modelprobe.files.texts import digest_of

Step = str | int
Bytes = tuple[bytes, bytes | None]

TEXTS = [
    "", "x", "f", "(root)", "..a", ".", "\\", "alone", "input", "output", "=x", "\ud800", "\u202e", "\x00", "\x1b[2J",
    "inf", "-inf", "nan", "NaN", "(2, 4)", "(" + "9" * 39 + ")", "(2, 4) from fc1", "(2..9, 4)", "#2", "float",
    "a" * 10_000, ".".join("a" * 900), "cuda", "cpu", "measured", "not repeatable", "train", "eval",
    "float16", "int64", "frozen",
]  # fmt: skip
NUMBERS: list[Any] = [
    0, 1, -1, 2, 3, 64, 0.0, 0.5, -0.5, 1e-320, 1e-30, 1e-9, 1e9, 1e30, 1e300, 1e308, 2**31, 2**63 - 1, 2**63, 2**64,
    10**38, 10**299, 10**300, 10**4000,
]  # fmt: skip
FACTORS = [1 + 1e-9, 1 + 1e-6, 1 + 1e-4, 1.01, 1.5, 2.0, 10.0, 1e3, 0.999, 0.5, 0.1, 1e-3, 0.0, -1.0]
DEEP = 100_000
_DEEPLY = "\0deep"


def mutated(texts: Texts, draw: random.Random) -> tuple[str, Bytes]:
    """Return the name of a mutation, and the two files after it."""
    if draw.random() < 0.15:
        return _raw(texts, draw)
    data = [None if text is None else json.loads(text) for text in texts]
    before = digest_of(data[0])
    names = []
    for _ in range(draw.choice((1, 1, 1, 1, 2, 3))):
        which = draw.choice([i for i, one in enumerate(data) if one is not None])
        names.append(f"{('arch', 'probe')[which]} {changed(data[which], draw)}")
    if data[1] is not None and draw.random() < 0.95:  # so that the mutation is looked at
        try:
            after = digest_of(data[0])
        except (TypeError, ValueError, RecursionError, AttributeError, LookupError):
            after = before
        if data[1].get("architecture") == before:
            data[1]["architecture"] = after
    return "; ".join(names), tuple(None if one is None else _written(one) for one in data)  # type: ignore[return-value]


def _written(data: Any) -> bytes:
    text = json.dumps(data, indent=0)
    for opening, closing in (("[", "]"), ('{"a": ', "}")) if json.dumps(_DEEPLY)[:-1] in text else ():
        text = text.replace(json.dumps(_DEEPLY + opening[0]), opening * DEEP + "1" + closing * DEEP)
    return text.encode("utf-8", "surrogatepass")


# --- of what they say ---------------------------------------------------------------------------------------------


def _places(data: Any, at: tuple[Step, ...] = ()) -> Iterator[tuple[Step, ...]]:
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for step, value in pairs:
        yield (*at, step)
        yield from _places(value, (*at, step))


def _get(data: Any, at: tuple[Step, ...]) -> Any:
    for step in at:
        data = data[step]
    return data


def changed(data: Any, draw: random.Random) -> str:
    """Change one place, and say how and where."""
    places = list(_places(data))
    if not places:
        return "nothing left"
    at = draw.choice(places)
    holder, step, value = _get(data, at[:-1]), at[-1], _get(data, at)
    kinds: list[Callable[..., Any]] = [_remove, _swap, _copy, _other, _add, _reorder, _key]
    if isinstance(value, bool):
        kinds += [_flip] * 6
    elif isinstance(value, (int, float)):
        kinds += [_number] * 12
    elif isinstance(value, str):
        kinds += [_text] * 6 + [_fingerprint] * 8 * (len(value) >= 38)
    how = draw.choice(kinds)
    how(data, holder, step, value, draw)
    return f"{how.__name__.strip('_')} {'/'.join(map(str, at))[:200]}"


def _remove(data: Any, holder: Any, step: Any, value: Any, draw: random.Random) -> None:
    del holder[step]


def _swap(data: Any, holder: Any, step: Any, value: Any, draw: random.Random) -> None:
    other = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    holder[step], holder[other] = holder[other], value


def _copy(data: Any, holder: Any, step: Any, value: Any, draw: random.Random) -> None:
    """Put a part of elsewhere here."""
    holder[step] = copy.deepcopy(_get(data, draw.choice(list(_places(data)))))


def _other(data: Any, holder: Any, step: Any, value: Any, draw: random.Random) -> None:
    """Put something of another type here."""
    anything = [None, True, False, [], {}, [[]], [value], {"a": value}, [[1, 2]], _DEEPLY + "[", _DEEPLY + "{"]
    holder[step] = draw.choice([*anything, draw.choice(TEXTS), draw.choice(NUMBERS)])


def _add(data: Any, holder: Any, step: Any, value: Any, draw: random.Random) -> None:
    if isinstance(holder, list):
        holder.insert(step, copy.deepcopy(value))
    else:
        keys = sorted({key for at in _places(data) for key in at if isinstance(key, str)})
        holder[draw.choice([*keys, *TEXTS])] = copy.deepcopy(value)


def _reorder(data: Any, holder: Any, step: Any, value: Any, draw: random.Random) -> None:
    """Let two entries trade places, keys included."""
    if isinstance(holder, dict):
        items = list(holder.items())
        i, j = draw.randrange(len(items)), draw.randrange(len(items))
        items[i], items[j] = items[j], items[i]
        holder.clear()
        holder.update(items)
    else:
        draw.shuffle(holder)


def _key(data: Any, holder: Any, step: Any, value: Any, draw: random.Random) -> None:
    """Let two keys trade their values, or one get another name."""
    if isinstance(holder, dict):
        name = draw.choice([*holder, *TEXTS, f"{step}x"])
        holder[step], holder[name] = holder.get(name, value), value
        if draw.random() < 0.5 and name != step:
            del holder[step]


def _flip(data: Any, holder: Any, step: Any, value: Any, draw: random.Random) -> None:
    holder[step] = not value


def _number(data: Any, holder: Any, step: Any, value: Any, draw: random.Random) -> None:
    if draw.random() < 0.3:
        holder[step] = draw.choice(NUMBERS)
    elif isinstance(value, int) and draw.random() < 0.6:
        holder[step] = value + draw.choice((-2, -1, 1, 2, 100))
    else:
        product = value * draw.choice(FACTORS)
        holder[step] = int(product) if isinstance(value, int) and draw.random() < 0.5 else product


def _text(data: Any, holder: Any, step: Any, value: Any, draw: random.Random) -> None:
    texts = [found for at in _places(data) if isinstance(found := _get(data, at), str)]
    cut = draw.randrange(len(value) + 1)
    parts = [value[:cut], value[cut:], value + value[cut:], value.replace("0", "1", 1), value.replace("4", "5", 1)]
    holder[step] = draw.choice([draw.choice(texts), draw.choice(TEXTS), *parts])


def _fingerprint(data: Any, holder: Any, step: Any, value: Any, draw: random.Random) -> None:
    """Write other numbers as a fingerprint is written."""
    try:
        numbers = unpacked(value)
    except ValueError:
        return
    how = draw.choice(("scale", "one", "zeros", "bits"))
    if how == "one":
        k = draw.randrange(len(numbers))
        numbers = tuple(x * draw.choice(FACTORS) if i == k else x for i, x in enumerate(numbers))
    elif how == "scale":
        factor = draw.choice(FACTORS)
        numbers = tuple(x * factor for x in numbers)
    if how == "zeros":
        holder[step] = draw.choice(("", [0.0] * len(numbers)))
    else:
        holder[step] = packed(numbers, draw.choice((14, 20, 23, 32)) if how == "bits" else bits_for(2.5e-7))


# --- of their bytes -----------------------------------------------------------------------------------------------


def _raw(texts: Texts, draw: random.Random) -> tuple[str, Bytes]:
    files = [None if text is None else text.encode() for text in texts]
    which = draw.choice([i for i, one in enumerate(files) if one is not None])
    how, files[which] = mutated_bytes(files[which] or b"", draw)
    return f"{('arch', 'probe')[which]} {how}", (files[0] or b"", files[1])


def mutated_bytes(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Return the name of a mutation of the bytes of a file, and the bytes after it."""
    how = draw.choice(("cut", "flip", "insert", "delete", "repeat", "splice", "line"))
    at, end = sorted((draw.randrange(len(data) + 1), draw.randrange(len(data) + 1)))
    if how == "cut":
        data = data[:at]
    elif how == "flip":
        data = data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    elif how == "insert":
        data = data[:at] + draw.choice((b"{", b"[", b'"', b"\xff", b"\x00", b"9" * 5000, b"1", b"-", b"e9")) + data[at:]
    elif how == "delete":
        data = data[:at] + data[at + draw.randrange(1, 20) :]
    elif how == "repeat":
        data = data[:at] + data[at:end] + data[at:]
    elif how == "splice":
        data = data[:at] + data[end:]
    else:
        lines = data.split(b"\n")
        i, j = draw.randrange(len(lines)), draw.randrange(len(lines))
        lines[i], lines[j] = lines[j], lines[i]
        data = b"\n".join(lines)
    return f"{how} at byte {at}", data


def name_of(files: Bytes) -> str:
    """Return a short name that stands for two files."""
    return hashlib.sha256(b"\0".join(one or b"" for one in files)).hexdigest()[:12]
