"""Attention weights that a forward computes: by a softmax, fused, or in ``nn.MultiheadAttention``.

Fused attention returns no weights, so they are computed again from queries and keys. That costs memory of queries times
keys, which is why ``attention=True`` has to ask for it. Each observation keeps the entropy of each head, and the
largest weight of any head for each query and key.

A softmax is attention where its result is multiplied into values; that of a router or over a vocabulary is not. So its
result is followed through masks, dropout and changes of layout to a matrix product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_modelprobe import statistics
from pytest_modelprobe.interrupts import is_interrupt
from pytest_modelprobe.models import widest

from .hooks import ForwardMode, HookGuard
from .observation import AttentionObservation, CallObservation, RunningCalls

_Reader = Callable[..., AttentionObservation | None]

_MASKED = -5e3
"""Scores of this or less belong to masked keys. Masks add -1e4, the smallest number of the dtype, or -infinity."""


class AttentionMode(ForwardMode):
    """Observes attention weights while a forward runs."""

    def __init__(self, guard: HookGuard, running: RunningCalls) -> None:
        super().__init__()
        self._guard = guard
        self._running = running
        self._followed: dict[int, _Followed] = {}

    def end(self) -> None:
        """Stop following tensors."""
        self._followed.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if func in _READERS or name in _PRODUCTS or self._followed:
            self._guard.observe(self._look_at, func, name, args, kwargs, output)
        return output

    def _look_at(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        with statistics.ambient_modes_disabled():
            if func in _READERS:
                self._begin(func, args, kwargs, output)
            elif name in _PRODUCTS:
                self._multiply(name, args)
            else:
                self._follow(func, args, kwargs, output)

    def _begin(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        running = self._running.innermost_here()
        call = None if running is None else running.observation
        if call is None:
            return
        weights = _Weights(call, _read_plain(_READERS[func], args, kwargs))
        if func in _SOFTMAXES and isinstance(output, Tensor) and _may_be_weights(output):
            dim = _axis(*args, **kwargs)
            if dim is not None:
                shape = [1] * output.ndim
                shape[dim] = output.shape[dim]
                positions = torch.arange(output.shape[dim], device="cpu").reshape(shape)  # there it can be read
                self._add(output, positions.expand(output.shape), weights)
        if weights.kept is not None:
            weights.keep()

    def _add(self, tensor: Tensor, positions: Tensor, weights: _Weights) -> None:
        self._followed[id(tensor)] = _Followed(ref(tensor), positions, weights)

    def _found(self, value: Any) -> _Followed | None:
        known = self._followed.get(id(value))
        return known if known is not None and known.tensor() is value else None

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Follow weights through a function that keeps the layout, or changes it in a known way."""
        first = next((known for arg in (*args, *kwargs.values()) if (known := self._found(arg)) is not None), None)
        if first is None:
            return
        if func in _LAYOUTS:
            try:
                move = Tensor.reshape if func in _RESHAPES else func
                moved = move(first.positions, *args[1:], **kwargs)
                pairs = zip(output, moved, strict=True) if isinstance(output, (tuple, list)) else [(output, moved)]
                for tensor, positions in pairs:
                    self._add(tensor, positions, first.weights)
            except Exception as error:
                if is_interrupt(error):
                    raise
                # else the new positions are unknown, and nothing is followed further
        elif isinstance(output, Tensor) and output.shape == first.positions.shape and output is not first.tensor():
            self._add(output, first.positions, first.weights)

    def _multiply(self, name: str, args: Any) -> None:
        """Note whether a product sums weights times values over the axis along which the weights sum to 1."""
        equation = args[0].replace(" ", "") if name == "einsum" and isinstance(args[0], str) else None
        listed = (arg if isinstance(arg, (tuple, list)) else [arg] for arg in args)
        operands = [x for xs in listed for x in xs if isinstance(x, Tensor)]
        if len(operands) != 2 or (name == "einsum" and equation is None):
            return
        axes = _summed(equation, operands)
        for weights, values, axis in zip(operands, reversed(operands), axes, strict=True):
            # Values belong to an example, so they have three axes. A table that all examples share has two.
            known = None if axis is None or values.ndim < 3 else self._found(weights)
            if known is not None and axis is not None:
                known.note_product(weights, axis)


@dataclass(slots=True, eq=False)
class _Weights:
    """Attention weights, or a tensor that may be."""

    call: CallObservation
    """The call that computed them."""
    kept: AttentionObservation | None
    """Their observation. `None` if the softmax is not over the last axis, until a product shows that it is wrong."""
    index: int | None = None
    """Where the call keeps the observation. `None` if it does not."""

    def keep(self) -> None:
        """Let the call have the observation."""
        assert self.kept is not None
        if self.index is None:
            self.index = len(self.call.attention)
            self.call.attention.append(self.kept)
        else:
            self.call.attention[self.index] = self.kept


class _Followed(NamedTuple):
    """Weights, or a tensor made of them by masks, dropout or a change of layout."""

    tensor: ReferenceType[Tensor]
    positions: Tensor
    """Position of each element on the axis of the softmax, in the shape of the tensor."""
    weights: _Weights

    def note_product(self, weights: Tensor, summed: int) -> None:
        """Note that a product sums over an axis of the weights, counted from the end."""
        axis = _varying(self.positions)
        right = axis == summed or weights.shape[summed] == 1
        own = self.weights
        if right and own.kept is not None:
            queries = {-1: -2, -2: -1}.get(summed)
            # If a product has one query where there were more, each query has values of its own.
            if queries is None or weights.shape[queries] > 1 or own.kept.most.shape[-2] == 1:
                own.kept = own.kept._replace(kind="attention")
        elif not right and axis is not None:
            nothing = torch.zeros(0, device=weights.device)
            own.kept = AttentionObservation(nothing, nothing, nothing.reshape(0, 0, 0), "another axis")
        if own.kept is not None:
            own.keep()


def _varying(positions: Tensor) -> int | None:
    """Return the axis, counted from the end, along which positions differ, or `None` if there is none."""
    for axis in range(-1, -positions.ndim - 1, -1):
        if positions.shape[axis] > 1 and positions.numel():
            line = positions.movedim(axis, -1).reshape(-1, positions.shape[axis])[0]
            if bool(line[0] != line[-1]):
                return axis
    return None


def _summed(equation: str | None, operands: list[Tensor]) -> list[int | None]:
    """Return for each of two operands the axis, counted from the end, over which their product sums.

    It is `None` if the operand cannot be weights, since each query has values of its own, or if there is no such axis.
    """
    if equation is None:
        left = -1 if operands[0].ndim > 1 else None
        return [left, -2 if operands[1].ndim > 1 else None]
    given, _, result = equation.partition("->")
    terms = given.split(",")
    found: list[int | None] = []
    for own, other in zip(terms, reversed(terms), strict=True):
        common = [letter for letter in own if letter.isalpha() and letter in other and letter not in result]
        queries = [letter for letter in own if letter.isalpha() and letter not in other and letter in result]
        found.append(own.index(common[0]) - len(own) if len(common) == 1 and queries and result else None)
    return found


def _read_plain(
    read: Callable[..., AttentionObservation | None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AttentionObservation | None:
    """Call ``read`` with plain tensors. Returns `None` if a tensor cannot be read."""
    tensors = {id(x): statistics.as_plain_tensor(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
    if any(reason for _, reason in tensors.values()):
        return None

    def plain(x: Any) -> Any:
        return tensors[id(x)][0] if isinstance(x, Tensor) else x

    return read(*map(plain, args), **{name: plain(x) for name, x in kwargs.items()})


def _may_be_weights(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.ndim >= 3 and tensor.numel() > 0


# --- the three places where weights are computed ------------------------------------------------------------------


def _axis(input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> int | None:  # noqa: A002 - torch's name
    """Return the axis of a softmax, counted from the end."""
    return None if dim is None else dim if dim < 0 else dim - input.ndim


def _of_softmax(input: Tensor, *args: Any, **kwargs: Any) -> AttentionObservation | None:  # noqa: A002 - torch's name
    if not _may_be_weights(input) or _axis(input, *args, **kwargs) != -1:
        return None
    return _of_scores(input.float())._replace(kind="probabilities")


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
) -> AttentionObservation:
    q, k = query.float(), key.float()
    if enable_gqa:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
    scores = _products(q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores + _added(attn_mask)
    return _of_scores(scores)


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Return the product of each query and each key."""
    if q.is_cpu:
        return q @ k.mT
    # A matrix product may be computed in TF32, and it raises where the user wants algorithms to be deterministic.
    return functools.reduce(
        torch.add, (a.unsqueeze(-1) * b.unsqueeze(-2) for a, b in zip(q.unbind(-1), k.unbind(-1), strict=True))
    )


def _of_multihead(*args: Any, **kwargs: Any) -> AttentionObservation | None:
    given = dict(zip(_MULTIHEAD, args, strict=False)) | kwargs
    # Torch's own function is called again, and asked for the weights. Without dropout it draws no random number, which
    # the model would miss.
    asked = {"need_weights": True, "average_attn_weights": False, "training": False}
    weights = F.multi_head_attention_forward(**{**given, **asked})[1]
    if weights is None:
        return None
    weights = weights.float()
    weights = weights if weights.ndim == 4 else weights[None]
    mask, padding = given.get("attn_mask"), given.get("key_padding_mask")
    bias = torch.zeros(1, weights.shape[-1] if mask is None and padding is None else 1, device=weights.device)
    if mask is not None:  # True masks a key here, and keeps one in scaled_dot_product_attention
        mask = _added(~mask if mask.dtype == torch.bool else mask)
        bias = bias + (mask.reshape(*weights.shape[:2], *mask.shape[-2:]) if mask.ndim == 3 else mask)
    if padding is not None:
        bias = bias + _added(~padding if padding.dtype == torch.bool else padding).unsqueeze(-2).unsqueeze(-2)
    # The module itself may add keys at the end (add_bias_kv, add_zero_attn), which are never masked.
    bias = F.pad(bias.expand(*weights.shape[:3], -1), (0, weights.shape[-1] - bias.shape[-1]))
    return _observed(weights, bias > _MASKED)


_MULTIHEAD = F.multi_head_attention_forward.__code__.co_varnames[: F.multi_head_attention_forward.__code__.co_argcount]

_SOFTMAXES = {F.softmax, torch.softmax, Tensor.softmax}
_PRODUCTS = {"matmul", "__matmul__", "bmm", "einsum"}


_RESHAPES = (torch.reshape, Tensor.reshape, Tensor.view)  # positions are expanded, and `view` would refuse them
_LAYOUTS = {
    getattr(home, name)
    for home in (torch, Tensor)
    for name in (
        "transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "unsqueeze", "squeeze", "flatten",
        "unflatten", "expand", "chunk", "split", "unbind", "narrow", "select", "__getitem__",
    )
    if hasattr(home, name)
}  # fmt: skip
_LAYOUTS |= {*_RESHAPES, *(getattr(Tensor, name).__get__ for name in ("mT", "T", "mH", "H"))}

_READERS: dict[Any, _Reader] = {
    F.softmax: _of_softmax,
    torch.softmax: _of_softmax,
    Tensor.softmax: _of_softmax,
    F.scaled_dot_product_attention: _of_fused,
    F.multi_head_attention_forward: _of_multihead,
}


def _added(mask: Tensor) -> Tensor:
    """Return a mask as a term to add to the scores. In a mask of booleans, True keeps a key."""
    if mask.dtype != torch.bool:
        return mask.float()
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -math.inf)


# --- their observation --------------------------------------------------------------------------------------------


def _of_scores(scores: Tensor) -> AttentionObservation:
    return _observed(scores.softmax(-1), ~(scores <= _MASKED))


def _observed(weights: Tensor, allowed: Tensor) -> AttentionObservation:
    """Return the observation of weights of shape (batch, heads, queries, keys), with other leading axes or fewer.

    The entropy of a query is ``-sum(w log w)``, at most the logarithm of the number of keys that it may attend to.
    """
    weights, allowed = (
        x.reshape(*((-1, 1) if x.ndim < 4 else (x.shape[0], -1)), *x.shape[-2:]) for x in (weights, allowed)
    )
    keys = allowed.sum(-1)
    choice = keys > 1  # with fewer than two keys the entropy is 0
    share = torch.special.entr(weights).sum(-1) / keys.clamp(min=2).log()
    share = torch.where(choice, share, 0.0)
    return AttentionObservation(
        share.sum((0, 2), dtype=widest(weights.device)),
        choice.sum((0, 2)),
        weights.amax(1),
    )
