"""Where attention looks: how evenly each head spreads its weights, and what a mask must keep it from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.record import Attention, Call, Layer, Selector, address
from pytest_modelprobe.report.text import count, failure, number, printable

from .sources import Subject, called, record_of

__tracebackhide__ = True

_NOTHING = 1e-30
"""Weights up to here are none: a mask that adds -100 to the scores leaves 4e-44."""


def assert_attention_entropy(
    subject: Subject, *, low: float = 0.05, high: float = 1.0, layers: Selector = "**"
) -> None:
    """Assert that every head spreads its attention neither on one key alone nor, if asked, evenly over all.

    The entropy of a query's weights w is ``-sum(w log w)``, here as a share of the greatest there can be, the logarithm
    of the number of keys that the mask leaves it: 0 is one key, 1 is all alike. It is averaged over the queries of a
    head that have a choice of keys. Near 0 the softmax passes no gradient: scores are too large, as without the
    1/sqrt(d). Exactly 1 means that queries and keys say nothing.

    Weights are seen under ``run(..., attention=True)`` or ``watch(..., attention=True)``: those of a softmax over the
    last of three axes or more that is multiplied into values, of ``scaled_dot_product_attention`` and
    ``nn.MultiheadAttention``, where they are computed again without dropout, and those that a module gives out. Where
    weights are not seen to be multiplied (a loop, a product of one's own), they may as well be a router's or a
    vocabulary's: ``layers=`` that names the layers says that they are attention.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        low: The least share, from 0 to 1.
        high: The most; by default nothing is too even.
        layers: Which layers to look at.

    Raises:
        AssertionError: A head is below ``low`` or above ``high``, its weights are not numbers, or they are a softmax
            over another axis than that along which they are multiplied into values.
        NothingObservedError: No selected layer computed attention weights, or none has a choice of keys.
        UsageError: ``low`` and ``high`` are no shares, or ``low`` is above ``high``.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 5, 8)
    >>> assert_attention_entropy(ModelProbe().run(attention, x, x, x, attention=True))
    """
    if not 0 <= low <= high <= 1:
        raise UsageError(
            f"low and high are shares of the greatest entropy, 0 <= low <= high <= 1; got {low!r}, {high!r}"
        )
    heads = [
        (name, head, share)
        for name, attention in _attentions(subject, layers)
        for head, share in enumerate(attention.entropy)
        if share is not None
    ]
    if not heads:
        raise NothingObservedError("no query has a choice of keys: run the model on a longer sequence")
    bad = [x for x in heads if not low <= min(x[2], 1.0) <= high]
    if bad:
        name, head, share = bad[0]
        what, limit, advice = _uneven(share, low, high)
        raise AssertionError(
            failure(
                f"head {head} of {name} {what}: its entropy is {share:.2%} of the greatest, not {limit}; "
                f"{len(bad):,} of {count(len(heads), 'head')} looked at",
                ["layer", "head", "entropy"],
                [[name, head, f"{share:.2%}"] for name, head, share in bad],
                advice,
            )
        )


def _uneven(share: float, low: float, high: float) -> tuple[str, str, str]:
    """Return what is wrong with a head, what it should be, and where to look."""
    if share < low:
        advice = (
            "Look at the scores: a missing 1/sqrt(d), or queries and keys that are too large. If these are no "
            "attention but probabilities, leave the layer out with layers=."
        )
        return "attends to one key alone", f"{low:.2%} or more", advice
    if share > high:
        advice = "Look at queries and keys: are they zero, or their projections not trained?"
        return "attends to all keys alike", f"{high:.2%} or less", advice
    return "has weights that are not numbers", "a number", "assert_finite says where they began."


def assert_attention_mask(
    subject: Subject, mask: Any = None, *, causal: bool = False, exact: bool = False, layers: Selector = "**"
) -> None:
    """Assert that no weight goes to a key that the mask leaves out.

    Weights are seen as `assert_attention_entropy` says, and are looked at as the largest of all heads. A query that
    may attend to no key at all is left out.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        mask: What each query may attend to, True or 1: of shape (batch, keys), as an ``attention_mask`` has it;
            (queries, keys), unless there are as many queries as examples; (batch, queries, keys) or
            (batch, 1, queries, keys).
        causal: No query may attend to a later key. Where there are more keys than queries, the last query stands at the
            last key.
        exact: Every key that the mask leaves gets some weight, too: this finds a mask that leaves out too much.
        layers: Which layers to look at. Of an encoder-decoder, name those that the mask is for.

    Raises:
        AssertionError: A weight is not zero and should be; with ``exact``, is zero and should not be.
        NothingObservedError: No selected layer computed attention weights.
        UsageError: Neither ``mask`` nor ``causal`` is given, or the mask does not fit a layer.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 5, 8)
    >>> later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    >>> assert_attention_mask(ModelProbe().run(attention, x, x, x, attn_mask=later, attention=True), causal=True)
    """
    if mask is None and not causal:
        raise UsageError("give the mask that must hold, causal=True, or both")
    given = None if mask is None else _Mask(mask)
    looked_at = _attentions(subject, layers)
    bad: list[list[Any]] = []
    for name, attention in looked_at:
        worst = _worst(name, attention, given, causal=causal, exact=exact)
        if worst is not None:
            bad.append([name, *worst])
    if bad:
        name, batch, query, key, weight, _ = bad[0]
        what = f"gives weight {number(weight)} to key {key}, which the mask leaves out"
        if weight <= _NOTHING:
            what = f"gives no weight to key {key}, which the mask leaves"
        raise AssertionError(
            failure(
                f"{name} does not keep to the mask: query {query} of example {batch} {what}; "
                f"{len({row[0] for row in bad}):,} of {count(len({n for n, _ in looked_at}), 'layer')} looked at",
                ["layer", "example", "query", "key", "weight", "weights wrong"],
                bad,
                "Look at how the mask gets there: its polarity, its diagonal, the axes it is spread along, and whether "
                "it is added before the softmax.",
            )
        )


class _Mask:
    """A mask as plain nested lists, whatever it came as; tells whether a query may attend to a key."""

    def __init__(self, mask: Any) -> None:
        values = mask.tolist() if hasattr(mask, "tolist") else mask
        self.shape = tuple(mask.shape) if hasattr(mask, "shape") else _shape(values)
        if not _is_of(values, {0, 1}):
            raise UsageError(
                "a mask is of True and False, or 1 and 0, where True keeps a key: of one that is added to the scores, "
                "give mask == 0"
            )
        if len(self.shape) == 4 and self.shape[1] == 1:
            values, self.shape = [rows[0] for rows in values], (self.shape[0], *self.shape[2:])
        if len(self.shape) not in (2, 3):
            raise UsageError(
                "a mask is of shape (batch, keys), (queries, keys), (batch, queries, keys) or (batch, 1, queries, "
                f"keys); got {self.shape}"
            )
        self._values = values

    def rows(self, name: str, shape: tuple[int, ...]) -> Iterator[list[Any]]:
        """Yield the row of each query, one example after the other."""
        batch, queries, keys = shape
        if self.shape == (queries, keys) and queries != batch:
            yield from itertools.chain.from_iterable([self._values] * batch)
            return
        repeats = batch // self.shape[0] if self.shape[0] and batch % self.shape[0] == 0 else 0  # heads in the batch
        if not repeats or self.shape[-1] != keys or (len(self.shape) == 3 and self.shape[1] not in (1, queries)):
            raise UsageError(
                f"a mask of shape {self.shape} does not fit the attention of {name}, which has batch {batch}, "
                f"{queries} queries and {keys} keys: select with layers= those that it is for"
            )
        for example in self._values:
            rows = [example] if len(self.shape) == 2 else example
            yield from (rows * queries if len(rows) == 1 else rows) * repeats


def _is_of(values: Any, allowed: set[int]) -> bool:
    if isinstance(values, (list, tuple)):
        return all(_is_of(value, allowed) for value in values)
    return values in allowed


def _shape(values: Any) -> tuple[int, ...]:
    return (len(values), *_shape(values[0])) if isinstance(values, (list, tuple)) and values else ()


def _worst(
    name: str, attention: Attention, mask: _Mask | None, *, causal: bool, exact: bool
) -> tuple[int, int, int, float, int] | None:
    """Return example, query, key and weight where the mask is broken most, and how many weights break it."""
    batch, queries, keys = attention.shape
    rows: Iterator[list[Any]] = itertools.repeat([True] * keys) if mask is None else mask.rows(name, attention.shape)
    found: list[tuple[float, int, int, int]] = []
    for start, row in zip(range(0, batch * queries * keys, keys), rows, strict=mask is not None):
        example, query = divmod(start // keys, queries)
        last = query + keys - queries if causal else keys
        allowed = [bool(a) and key <= last for key, a in enumerate(row)]
        if not any(allowed):
            continue
        for key, weight in enumerate(attention.most[start : start + keys]):
            nothing = weight <= _NOTHING  # which NaN is not
            if exact and nothing if allowed[key] else not nothing:
                found.append((weight, example, query, key))
    if not found:
        return None
    weight, example, query, key = max(found, key=lambda x: (x[0] != x[0], x[0], -x[1], -x[2], -x[3]))
    return example, query, key, weight, len(found)


def _attentions(subject: Subject, layers: Selector) -> list[tuple[str, Attention]]:
    """Return the attention weights of the selected layers, each with what to call it, in order of execution."""
    __tracebackhide__ = True
    record = record_of(subject)
    calls = [(layer, call) for layer in called(record, layers) for call in layer.calls if call.attention]
    calls.sort(key=lambda x: x[1].finished)
    seen = [(_name(layer, call, i), a) for layer, call in calls for i, a in enumerate(call.attention)]
    turned = [name for name, attention in seen if attention.kind == "another axis"]
    if turned:
        raise AssertionError(
            failure(
                f"{turned[0]} takes its softmax over another axis than its weights are multiplied into values along; "
                f"{len(turned):,} of {count(len(seen), 'softmax')} looked at",
                ["layer"],
                [[name] for name in turned],
                "The weights of a query do not sum to 1: the softmax belongs over the keys, dim=-1 most often. If it "
                "is meant, as where slots compete for inputs, leave the layer out with layers=.",
            )
        )
    found = [(name, a) for name, a in seen if a.kind == "attention" or layers != "**"]
    if not found and seen:
        raise NothingObservedError(
            f"no softmax was multiplied into values in {printable(record.model)}, so that they may be a router's or a "
            f"vocabulary's, {printable(seen[0][0])} among them: name with layers= those that are attention"
        )
    if not found:
        raise NothingObservedError(
            f"no attention weights were seen in the selected layers of {printable(record.model)}: record with "
            "run(..., attention=True) or watch(..., attention=True), and select the modules that attend; other than by "
            "softmax, scaled_dot_product_attention or nn.MultiheadAttention, a module has to give its weights out"
        )
    return found


def _name(layer: Layer, call: Call, index: int) -> str:
    name = address(layer.label, call, "").strip()
    return name if len(call.attention) == 1 else f"{name} (attention {index + 1})"
