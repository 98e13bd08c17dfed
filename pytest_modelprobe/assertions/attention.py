"""Where a model looks: the entropy of its attention, whether it follows a mask, and its map of an input.

A head that attends to one key alone, or to a key that is masked, computes plausible numbers, so that no other
assertion notices it. A record keeps the entropy of each head and the largest weight of each pair of query and key.
"""

from __future__ import annotations

import itertools
from typing import Any

from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.record import Attention, Selector, address
from pytest_modelprobe.text import failed, number, out_of, printable

from .sources import Subject, called, record_of

__tracebackhide__ = True  # a traceback ends at the line of the test

_NEGLIGIBLE = 1e-30
"""Weights up to here count as zero: a mask that adds -100 to the scores leaves 4e-44."""


def assert_attention_entropy(
    subject: Subject, *, low: float = 0.05, high: float = 1.0, layers: Selector = "**"
) -> None:
    """Assert that the entropy of the attention weights of every head is in a range.

    The entropy of a query's weights w is ``-sum(w log w)``, given as a share of its maximum, the logarithm of the
    number of keys that are not masked: 0 means all weight on one key, 1 equal weights. It is averaged over the queries
    of a head that have two keys or more. Near 0 the softmax passes no gradient: the scores are too large, as without
    1/sqrt(d). Exactly 1 means that the scores do not depend on queries and keys.

    Weights are recorded under ``run(..., attention=True)`` or ``watch(..., attention=True)``: those of a softmax over
    the last of three axes or more that is multiplied with values; those of ``scaled_dot_product_attention`` and
    ``nn.MultiheadAttention``, which are computed again without dropout; and those that a module returns. A softmax
    whose product with values is not seen (a loop, a custom product) may be a router or over a vocabulary: it is
    checked only if ``layers=`` selects layers.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        low: The minimum share, from 0 to 1.
        high: The maximum share; by default there is no maximum.
        layers: Which layers to look at.

    Raises:
        AssertionError: The entropy of a head is out of range, its weights are NaN, or the softmax is over another axis
            than that along which its weights are multiplied with values.
        NothingObservedError: No selected layer computed attention weights, or no query has two keys.
        UsageError: ``low`` or ``high`` is not from 0 to 1, or ``low`` is above ``high``.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 5, 8)
    >>> assert_attention_entropy(ModelProbe().run(attention, x, x, x, attention=True))
    """
    if not 0 <= low <= high <= 1:
        raise UsageError(
            f"low and high are shares of the maximum entropy, 0 <= low <= high <= 1; got {low!r}, {high!r}"
        )
    heads = [
        (name, head, share)
        for name, attention in _attentions(subject, layers)
        for head, share in enumerate(attention.entropy)
        if share is not None
    ]
    if not heads:
        raise NothingObservedError("no query has two keys: run the model on a longer sequence")
    bad = [x for x in heads if not low <= min(x[2], 1.0) <= high]
    if bad:
        name, head, share = bad[0]
        what, limit, advice = "has NaN weights", "a number", "assert_finite names where NaN began."
        if share < low:
            what, limit = "attends to one key alone", f"{low:.2%} or more"
            advice = (
                "Look at the scores: a missing 1/sqrt(d), or queries and keys that are too large. If these weights "
                "are not attention, exclude the layer with layers=."
            )
        elif share > high:
            what, limit = "attends to all keys equally", f"{high:.2%} or less"
            advice = "Look at queries and keys: are they zero, or their projections not trained?"
        raise failed(
            f"head {head} of {name} {what}: its entropy is {share:.2%} of the maximum, not {limit}; "
            f"{out_of(len(bad), len(heads), 'head')}",
            ["layer", "head", "entropy"],
            [[name, head, f"{share:.2%}"] for name, head, share in bad],
            advice,
        )


def assert_attention_mask(
    subject: Subject, mask: Any = None, *, causal: bool = False, exact: bool = False, layers: Selector = "**"
) -> None:
    """Assert that attention weights of masked keys are zero.

    Weights are recorded as described at `assert_attention_entropy`; the largest of all heads is checked. A query whose
    keys are all masked is left out.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        mask: A tensor with the keys that each query may attend to, True or 1: of shape (batch, keys), like an
            ``attention_mask``; (queries, keys), unless there are as many queries as examples; (batch, queries, keys) or
            (batch, 1, queries, keys).
        causal: No query may attend to a later key. If there are more keys than queries, the last query is at the
            position of the last key.
        exact: Keys that are not masked must have weights above zero: this finds a mask that excludes too much.
        layers: Which layers to look at. In an encoder-decoder, select those that the mask belongs to.

    Raises:
        AssertionError: A masked key has a weight above zero; with ``exact``, also if a key that is not masked has none.
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
        raise UsageError("give mask=, causal=True, or both")
    if mask is not None and not ((mask == 0) | (mask == 1)).all():
        raise UsageError(
            "a mask has True and False, or 1 and 0, where True keeps a key: for one that is added to the scores, "
            "give mask == 0"
        )
    looked_at = _attentions(subject, layers)
    bad: list[list[Any]] = []
    for name, attention in looked_at:
        worst = _worst(name, attention, mask, causal=causal, exact=exact)
        if worst is not None:
            bad.append([name, *worst])
    if bad:
        name, batch, query, key, weight, _ = bad[0]
        what = f"gives weight {number(weight)} to key {key}, which is masked"
        if weight <= _NEGLIGIBLE:
            what = f"gives zero weight to key {key}, which is not masked"
        raise failed(
            f"{name} does not follow the mask: query {query} of example {batch} {what}; "
            f"{out_of(len({row[0] for row in bad}), len({n for n, _ in looked_at}), 'layer')}",
            ["layer", "example", "query", "key", "weight", "weights wrong"],
            bad,
            "Look at how the mask is applied: its polarity, its diagonal, the axes it is broadcast along, and "
            "whether it is added before the softmax.",
        )


def _kept(name: str, mask: Any, shape: tuple[int, ...]) -> list[list[list[bool]]]:
    """Return which keys each query of each example may attend to."""
    batch, queries, keys = shape
    if mask is None:
        return [[[True] * keys] * queries] * batch
    kept = mask[:, 0] if mask.dim() == 4 and mask.shape[1] == 1 else mask
    if kept.dim() == 2:
        kept = kept[None] if kept.shape == (queries, keys) and queries != batch else kept[:, None]
    try:
        # Heads may be in the batch.
        rows: list[list[list[bool]]] = kept.repeat_interleave(batch // len(kept), 0).expand(shape).tolist()
    except RuntimeError as error:
        raise UsageError(
            f"a mask of shape {tuple(mask.shape)} does not fit the attention of {name}, which has batch {batch}, "
            f"{queries} queries and {keys} keys: select the layers it belongs to with layers="
        ) from error
    return rows


def _worst(
    name: str, attention: Attention, mask: Any, *, causal: bool, exact: bool
) -> tuple[int, int, int, float, int] | None:
    """Return example, query, key and weight of the worst violation, and the number of violations."""
    batch, queries, keys = attention.shape
    rows = itertools.chain.from_iterable(_kept(name, mask, attention.shape))
    found: list[tuple[float, int, int, int]] = []
    for start, row in zip(range(0, batch * queries * keys, keys), rows, strict=True):
        example, query = divmod(start // keys, queries)
        last = query + keys - queries if causal else keys
        allowed = [bool(a) and key <= last for key, a in enumerate(row)]
        if not any(allowed):
            continue
        for key, weight in enumerate(attention.most[start : start + keys]):
            nothing = weight <= _NEGLIGIBLE  # False for NaN
            if exact and nothing if allowed[key] else not nothing:
                found.append((weight, example, query, key))
    if not found:
        return None
    weight, example, query, key = max(found, key=lambda x: (x[0] != x[0], x[0], -x[1], -x[2], -x[3]))
    return example, query, key, weight, len(found)


def _attentions(subject: Subject, layers: Selector) -> list[tuple[str, Attention]]:
    """Return (name, attention weights) of the selected layers, in order of execution."""
    record = record_of(subject)
    calls = [(layer, call) for layer in called(record, layers) for call in layer.calls if call.attention]
    calls.sort(key=lambda x: x[1].finished)
    seen: list[tuple[str, Attention]] = []
    for layer, call in calls:
        name = address(layer.label, call, "").strip()
        many = len(call.attention) > 1
        seen += [(f"{name} (attention {i})" if many else name, a) for i, a in enumerate(call.attention, start=1)]
    wrong_axis = [name for name, attention in seen if attention.kind == "another axis"]
    if wrong_axis:
        raise failed(
            f"{wrong_axis[0]} takes its softmax over another axis than that along which it multiplies values; "
            f"{out_of(len(wrong_axis), len(seen), 'softmax')}",
            ["layer"],
            [[name] for name in wrong_axis],
            "The weights of a query do not sum to 1: take the softmax over the keys, usually dim=-1. If this is "
            "intended, as in slot attention, exclude the layer with layers=.",
        )
    found = [(name, a) for name, a in seen if a.kind == "attention" or layers != "**"]
    if not found and seen:
        raise NothingObservedError(
            f"no softmax was multiplied with values in {printable(record.model)}: {printable(seen[0][0])} may be the "
            "weights of a router or a distribution over a vocabulary; select the attention layers with layers="
        )
    if not found:
        raise NothingObservedError(
            f"no attention weights were seen in the selected layers of {printable(record.model)}: record with "
            "run(..., attention=True) or watch(..., attention=True), and select the attention modules; a module that "
            "uses no softmax, scaled_dot_product_attention or nn.MultiheadAttention has to return its weights"
        )
    return found
