"""Attention weights, where a forward computes them: by a softmax, fused, or in ``nn.MultiheadAttention``.

Fused attention shows no weights: they are computed again from queries and keys. Of the weights stays how evenly each
head spreads them, and the largest that any head gives, for each query and key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import statistics
from .functionals import ForwardMode

_MASKED = -5e3
"""Scores from here down are those of keys that a mask leaves out: it adds -1e4 or less, the least number, -infinity."""


class Attended(NamedTuple):
    """What is kept of the attention weights of one call; tensors on their device."""

    entropy: Tensor
    """Shape (heads,): sum over queries with two keys or more of the entropy, as a share of the greatest."""
    queries: Tensor
    """Shape (heads,): how many such queries there are."""
    most: Tensor
    """Shape (batch, queries, keys): the largest weight of any head."""

    def merge(self, other: Attended) -> Attended:
        """Return both together; where shapes differ, the newer, which is ``other``."""
        if self.most.shape != other.most.shape or self.entropy.shape != other.entropy.shape:
            return other
        return Attended(
            self.entropy + other.entropy, self.queries + other.queries, torch.maximum(self.most, other.most)
        )


class AttentionMode(ForwardMode):
    """Shows a capture the attention weights of one forward."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        read = _READERS.get(func)
        if read is not None:
            self._capture.note_attention(lambda: _read(read, args, kwargs))
        return output


def _read(read: Callable[..., Attended | None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attended | None:
    """Return what ``read`` makes of the arguments; None where a tensor among them cannot be looked into."""
    tensors = {id(x): statistics.opened(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
    if any(reason for _, reason in tensors.values()):
        return None

    def plain(x: Any) -> Any:
        return tensors[id(x)][0] if isinstance(x, Tensor) else x

    return read(*map(plain, args), **{name: plain(x) for name, x in kwargs.items()})


def returned(output: Tensor) -> Attended | None:
    """Return what is kept of a tensor that may be attention weights: 3 axes or more, rows of shares that sum to 1."""
    output, reason = statistics.opened(output)
    if reason is not None or not _may_be_weights(output) or output.shape[-1] < 2:
        return None
    weights = output.float()
    if not bool((weights >= 0).all()) or not bool(((weights.sum(-1) - 1).abs() < 1e-2).all()):
        return None
    return _attended(weights, weights > 0)


def _may_be_weights(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.ndim >= 3 and tensor.numel() > 0


# --- the three places where weights are computed ------------------------------------------------------------------


def _of_softmax(input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> Attended | None:  # noqa: A002 - torch's name
    if not _may_be_weights(input) or dim not in (-1, input.ndim - 1):
        return None
    return _of_scores(input.float())


def _of_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Attended:
    q, k = query.float(), key.float()
    if enable_gqa:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores + _added(attn_mask)
    return _of_scores(scores)


def _of_multihead(*args: Any, **kwargs: Any) -> Attended | None:
    given = dict(zip(_MULTIHEAD, args, strict=False)) | kwargs
    # Torch's own function, asked for the weights; without dropout it draws no random number.
    asked = {"need_weights": True, "average_attn_weights": False, "training": False}
    weights = F.multi_head_attention_forward(**{**given, **asked})[1]
    if weights is None:
        return None
    weights = weights.float()
    weights = weights if weights.ndim == 4 else weights[None]
    mask, padding = given.get("attn_mask"), given.get("key_padding_mask")
    left_out = torch.zeros(1, weights.shape[-1] if mask is None and padding is None else 1, device=weights.device)
    if mask is not None:  # here True leaves a key out
        mask = _added(~mask if mask.dtype == torch.bool else mask)
        left_out = left_out + (mask.reshape(*weights.shape[:2], *mask.shape[-2:]) if mask.ndim == 3 else mask)
    if padding is not None:
        left_out = left_out + _added(~padding if padding.dtype == torch.bool else padding).unsqueeze(-2).unsqueeze(-2)
    # Keys that the module itself adds at the end are never left out.
    left_out = F.pad(left_out.expand(*weights.shape[:3], -1), (0, weights.shape[-1] - left_out.shape[-1]))
    return _attended(weights, left_out > _MASKED)


_MULTIHEAD = F.multi_head_attention_forward.__code__.co_varnames[: F.multi_head_attention_forward.__code__.co_argcount]

_READERS: dict[Any, Callable[..., Attended | None]] = {
    F.softmax: _of_softmax,
    torch.softmax: _of_softmax,
    Tensor.softmax: _of_softmax,
    F.scaled_dot_product_attention: _of_fused,
    F.multi_head_attention_forward: _of_multihead,
}


def _added(mask: Tensor) -> Tensor:
    """Return a mask as what is added to the scores; True keeps a key."""
    if mask.dtype != torch.bool:
        return mask.float()
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -math.inf)


# --- what is kept of them -----------------------------------------------------------------------------------------


def _of_scores(scores: Tensor) -> Attended:
    return _attended(scores.softmax(-1), ~(scores <= _MASKED))


def _attended(weights: Tensor, allowed: Tensor) -> Attended:
    """Return what is kept of weights of shape (batch, heads, queries, keys), with other leading axes or fewer.

    The entropy of a query is ``-sum(w log w)``, at most the logarithm of the number of keys that it may attend to.
    """
    weights, allowed = (_with_four_axes(x) for x in (weights, allowed))
    keys = allowed.sum(-1)
    choice = keys > 1  # of one key, or of none, there is nothing to spread
    share = torch.special.entr(weights).sum(-1) / keys.clamp(min=2).log()
    share = torch.where(choice, share, 0.0)
    return Attended(
        share.sum((0, 2), dtype=torch.float64 if weights.device.type != "mps" else None),
        choice.sum((0, 2)),
        weights.amax(1),
    )


def _with_four_axes(x: Tensor) -> Tensor:
    if x.ndim < 4:
        return x.reshape(-1, 1, *x.shape[-2:])
    return x.reshape(x.shape[0], -1, *x.shape[-2:])
