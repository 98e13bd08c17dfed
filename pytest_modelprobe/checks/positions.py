"""What a model shows of positions: which masks leave out, over which it attends, and which state it takes.

Libraries disagree on what a mask marks: 0 is left out in an ``attention_mask``, True in a ``key_padding_mask``. A check
among the standard ones must not fail a model that was never meant to be causal, so `causal_input` asks first what the
model shows: triangular masks, attention over positions, the names of classes, arguments and outputs.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pytest_modelprobe._torch import is_wrapped
from pytest_modelprobe.exceptions import ModelProbeError
from pytest_modelprobe.probe import ModelProbe
from pytest_modelprobe.record import ROOT, qualified
from pytest_modelprobe.text import listed, pattern

from .outcome import NotApplicableError
from .session import PreparedModel

# --- masks: which positions they leave out. A model may compute anything there ------------------------------------

_MASKED = -1e3
"""A float up to here masks the score that it is added to: a softmax over it gives 0."""


class MaskedOut:
    """Positions of an input that a mask leaves out, as those of padding: a model may compute anything there.

    Args:
        positions: True where a position is left out, of shape (batch, positions). With `None` nothing is left out.
    """

    def __init__(self, positions: Tensor | None = None) -> None:
        self.positions = positions if positions is not None and bool(positions.any()) else None

    def __bool__(self) -> bool:
        return self.positions is not None

    def filled(self, tensor: Tensor, axis: int, value: Tensor | float = 0.0, *, start: int = 0) -> Tensor:
        """Return a tensor with a value at the positions that are left out.

        Args:
            tensor: A tensor with an axis of rows, the first unless that is ``axis``: the batch, or several rows for
                each of it. A tensor without one is returned as it is.
            axis: Its axis of positions.
            value: A number, or a tensor of the same shape.
            start: The position at which the tensor begins.

        >>> MaskedOut(torch.tensor([[True, False], [False, False]])).filled(torch.ones(2, 2), 1)
        tensor([[0., 1.],
                [1., 1.]])
        """
        if self.positions is None or tensor.dim() < 2:
            return tensor
        axis, rows = axis % tensor.dim(), 0 if axis % tensor.dim() else 1
        each, rest = divmod(tensor.shape[rows], len(self.positions))
        if rest:
            return tensor
        where = self.positions.narrow(1, start, tensor.shape[axis]).repeat_interleave(each, 0).to(tensor.device)
        shape = [n if i in (rows, axis) else 1 for i, n in enumerate(tensor.shape)]
        where = (where.T if axis < rows else where).reshape(shape)
        return torch.where(where, torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device), tensor)


def masked_out(prepared: PreparedModel, path: str, axis: int) -> MaskedOut:
    """Return the positions of an input that its masks leave out, or that have the id of padding."""
    shape = positions_of(prepared, path, axis)
    names = masks_of(prepared, path, shape)
    if shape[0] == shape[1]:  # any other may be of (positions, positions)
        names = [name for name in names if prepared.argument(name).endswith("attention_mask")]
    found = [left_out(prepared.argument(name), dict(prepared.dense)[name]) for name in names]
    tensor, padding = dict(prepared.dense)[path], pad_id_of(prepared)
    if padding is not None and not tensor.is_floating_point() and tensor.shape == shape:
        found.append(tensor == padding)
    return MaskedOut(torch.stack([positions.cpu() for positions in found]).any(0) if found else None)


def positions_of(prepared: PreparedModel, path: str, axis: int) -> tuple[int, int]:
    """Return the numbers of rows and of positions of an input, the shape of its masks."""
    tensor = dict(prepared.dense)[path]
    return tensor.shape[0 if axis % tensor.dim() else 1 % tensor.dim()], tensor.shape[axis]


def pad_id_of(prepared: PreparedModel) -> int | None:
    """Return the id by which a model of transformers detects padding."""
    found = getattr(getattr(prepared.layers.modules[ROOT], "config", None), "pad_token_id", None)
    return found if isinstance(found, int) and found >= 0 else None


def masks_of(prepared: PreparedModel, path: str, shape: tuple[int, int]) -> list[str]:
    """Return the arguments that are masks of an input, by their names: of shape (batch, positions)."""
    of_decoder = prepared.argument(path).startswith("decoder_")
    named = [(name, prepared.argument(name)) for name, x in prepared.dense if x.shape == shape]
    return [path for path, name in named if name.endswith("mask") and name.startswith("decoder_") == of_decoder]


def left_out(name: str, mask: Tensor) -> Tensor:
    """Return where a mask leaves out what it belongs to.

    >>> left_out("attention_mask", torch.tensor([0, 1])), left_out("pad_mask", torch.tensor([False, True]))
    (tensor([ True, False]), tensor([False,  True]))
    """
    marks = mark(name, mask)
    return mask <= _MASKED if marks == -math.inf else mask == marks


def mark(name: str, mask: Tensor) -> bool | int | float:
    """Return the value that marks what is left out, such that the given mask does not leave out everything."""
    if mask.is_floating_point() and not bool((mask > 0).any()):
        return -math.inf
    marks = mask.dtype == torch.bool and "pad" in name
    if bool((mask.bool() == marks).all()):
        marks = not marks
    return marks if mask.dtype == torch.bool else int(marks)


def mark_of(prepared: PreparedModel, path: str) -> bool | int | float:
    """Return the value that marks what is left out in the mask at a path."""
    return mark(prepared.argument(path), dict(prepared.inputs)[path])


# --- what shows that a model is meant to be causal ----------------------------------------------------------------

_FEWEST = 5
"""Positions from which on a mask is told from a band of neighbors, or from padding."""

_MOST = 512
"""Rows and columns of a mask that are looked at."""

_NAMED = re.compile(r"(?<!non)(?<!non_)causal(lm|\w*att)|autoregressive|gpt", re.IGNORECASE)

_FUSED: dict[Any, int] = {F.scaled_dot_product_attention: -2, F.multi_head_attention_forward: 0}
"""Functions of queries and keys, with their axis of positions."""

_SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax)


CACHES = ("past_key_values", "cache_params")
"""Names of caches in transformers up to 5.23, as an argument and in the output. Since 5.24 both are ``cache``."""

KEYS_AND_VALUES = ("past_key_values", "kv_cache", "cache", "past")
"""Names of arguments for keys and values of earlier positions."""

STATES = (*CACHES, *KEYS_AND_VALUES[1:], "hx", "hidden", "hidden_state", "state")
"""Names of arguments for a state, None at first."""


def state_of(output: Any, name: str) -> Any:
    """Return the state in the output of a forward; None if there is none.

    >>> state_of({"logits": 1, "past_key_values": 2}, "past_key_values"), state_of((1, 2), "hx")
    (2, 2)
    """
    if isinstance(output, Mapping):
        return output.get(name)
    if hasattr(output, name):
        return getattr(output, name)
    return output[1] if isinstance(output, tuple) and len(output) == 2 and name not in CACHES else None


def is_cache(output: Any, name: str) -> bool:
    """Whether a forward returned its state by name, as models of transformers return their cache."""
    return name in CACHES or (name == "cache" and isinstance(output, Mapping) and name in output)


def is_recurrent(state: Any) -> bool:
    """Whether a cache of transformers keeps the state of a recurrence in each layer, and no keys and values."""
    layers = getattr(state, "layers", None) or ()
    return bool(layers) and all(hasattr(one, "conv_states") and not hasattr(one, "keys") for one in layers)


@dataclass(frozen=True, slots=True)
class CausalInput:
    """An input that is a sequence, with the reason why its later positions are not meant to be seen."""

    path: str
    axis: int
    reason: str
    attends: bool
    """Whether attention over its positions was seen."""


def attended(prepared: PreparedModel) -> set[int]:
    """Return the numbers of positions over which the model computes attention."""
    with (seen := _Attention()):
        prepared.reference(mode="eval")
    return seen.sizes


def disagreeing_attention(prepared: PreparedModel, length: int) -> list[str]:
    """Return the layers whose attention sees later positions, while that of other kinds of layers does not.

    These may be an encoder and a decoder of the same sequence. Layers of one kind have names that differ in numbers.
    """
    args, kwargs = prepared.copied_inputs()
    probe = ModelProbe(prepared.probe.device, prepared.probe.seed)  # the other one has the records of the user
    try:
        record = probe.run(prepared.model, *args, kwargs=kwargs, mode="eval", attention=True, isolate=False)
    except ModelProbeError:  # it cannot be recorded
        return []
    sees: dict[str, bool] = {}
    for name, layer in record.layers.items():
        for attention in itertools.chain.from_iterable(call.attention for call in layer.calls):
            if attention.kind == "attention" and attention.shape[1:] == (length, length):
                # The key after the query counts as not later: the mask may be off by one.
                later = (w > 0 and i % length > i // length % length + 1 for i, w in enumerate(attention.most))
                sees[name] = sees.get(name, False) or any(later)
    blind = {pattern(name) for name, later in sees.items() if not later}
    return [name for name, later in sees.items() if later and blind and pattern(name) not in blind]


def causal_input(prepared: PreparedModel) -> CausalInput:
    """Return the input whose later positions the model is meant not to see.

    Raises:
        NotApplicableError: Nothing says so, or it is not clear of which input.
    """
    path, tensor = sequence_alone(prepared)
    seen = _Attention({n for n in tensor.shape[:2] if n >= _FEWEST})
    with seen:
        output = prepared.reference(mode="eval").output
    check_attended(seen.sizes, path, tensor)
    axis = 0 if tensor.shape[1] not in seen.sizes and tensor.shape[0] in seen.sizes else 1
    attends = tensor.shape[axis] in seen.sizes
    if tensor.shape[axis] in seen.triangular:
        return CausalInput(path, axis, "a mask of its attention is triangular", attends)
    reason = _said(prepared)
    cache = next((name for name in KEYS_AND_VALUES if name in prepared.parameters), None)
    if reason is None and attends and cache and state_of(output, cache) is not None:
        reason = f"it goes on from its {cache}"
    if reason is None and attends:
        kept = (
            (qualified(layer, name), value)
            for layer, module in prepared.layers.modules.items()
            for name, value in (*module.named_buffers(recurse=False), *vars(module).items())
        )
        masks = (name for name, x in kept if isinstance(x, Tensor) and _size(x) >= _FEWEST and _is_triangular(x))
        reason = next((f"{name} is triangular" for name in masks), None)
    if reason is None:
        what = "no triangular mask was seen" if attends else "no attention over positions was seen"
        raise NotApplicableError(f"nothing says that it is meant to be causal: {what}; if it is, call checks.causal")
    return CausalInput(path, axis, reason, attends)


def check_attended(sizes: set[int], path: str, tensor: Tensor) -> None:
    """Check that attention, if there is any, is over the positions of an input.

    Raises:
        NotApplicableError: It is over others alone, as where a prompt or an image comes before them.
    """
    if sizes and not sizes & set(tensor.shape[:2]):
        raise NotApplicableError(f"its attention is over other positions than those of {path}")


def sequence_alone(prepared: PreparedModel) -> tuple[str, Tensor]:
    """Return the one input of ids or vectors with positions; that of the decoder, if there are two.

    Raises:
        NotApplicableError: There is none, or there are several.
    """
    beside = ("mask", "labels", "targets", "target", "label")
    given = [(path, x) for path, x in prepared.dense if not prepared.argument(path).endswith(beside)]
    given = [(path, x) for path, x in given if x.dim() > 1 and x.dtype != torch.bool]
    of_decoder = [(path, x) for path, x in given if prepared.argument(path).startswith("decoder_")]
    if not of_decoder and "decoder_input_ids" in prepared.parameters:
        raise NotApplicableError("only the decoder may be causal: give decoder_input_ids=")
    found = of_decoder or given
    if not found:
        raise NotApplicableError("no input is a sequence of ids or vectors")
    path, first = found[0]
    others = [where for where, x in found[1:] if x.is_floating_point() or x.shape != first.shape]
    if others:
        raise NotApplicableError(
            f"there are several sequences, {listed([path, *others])}: call checks.causal of the first"
        )
    if first.dim() != (3 if first.is_floating_point() else 2):
        raise NotApplicableError(f"{path} is no sequence of ids or vectors")
    return path, first


def _said(prepared: PreparedModel) -> str | None:
    """Return by which name a model is causal."""
    root = prepared.layers.modules[ROOT]
    if getattr(getattr(root, "config", None), "is_decoder", None) is False:
        return None
    for module in prepared.layers.modules.values():
        switch = getattr(module, "is_causal", getattr(module, "causal", None))
        if _NAMED.search(type(module).__name__) and switch is not False:
            return f"it is called {type(module).__name__}" if module is root else f"it has a {type(module).__name__}"
    return None


class _Attention(TorchFunctionMode):
    """Sees over how many positions there is attention, and for which of these a mask is triangular.

    Args:
        looked_at: Numbers of positions; masks of these are looked at.
    """

    def __init__(self, looked_at: Collection[int] = ()) -> None:
        super().__init__()
        self._looked_at = set(looked_at)
        self.sizes: set[int] = set()
        self.triangular: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if any(x.is_nested for x in given):
            return output
        if func in _FUSED:
            lengths = {x.shape[_FUSED[func]] for x in given[:2]}
            self.sizes |= lengths
            self.triangular |= lengths if kwargs.get("is_causal") else set()
            self._look_at(given)
        elif func in _SOFTMAXES:
            # With three axes it may be one of words, or of the experts of a router.
            self.sizes |= set(output.shape[-2:]) if _size(output) or output.dim() > 3 else set()
            self._look_at([output])
        elif func is Tensor.__setitem__ or _may_be_scores(output):
            self._look_at(given)
        return output

    def _look_at(self, tensors: list[Tensor]) -> None:
        for x in tensors:
            n = _size(x)
            if n in self._looked_at - self.triangular and not is_wrapped(x) and _is_triangular(x):
                self.triangular.add(n)


def _may_be_scores(output: Any) -> bool:
    """Whether it may be scores or weights of attention, to which a mask was applied."""
    return isinstance(output, Tensor) and output.is_floating_point() and output.dim() > 2 and _size(output) > 0


def _size(x: Tensor) -> int:
    """Return the number of rows of a tensor of square matrices; 0 for any other."""
    return x.shape[-1] if x.dim() > 1 and x.shape[-1] == x.shape[-2] and x.numel() else 0


def _is_triangular(x: Tensor) -> bool:
    """Whether all that is above the diagonal, or all below it, is one value, which is not so on the other side.

    The diagonal and what is next to it are left out: the mask may be off by one.

    >>> ones = torch.ones(6, 6)
    >>> [_is_triangular(mask) for mask in (ones.tril(), ones.tril(1), ones.triu(1), ones, ones.tril(1).triu(-1))]
    [True, True, True, False, False]
    """
    one = x.detach()[(0,) * (x.dim() - 2)][:_MOST, :_MOST]
    # What is alike for all queries, or for all keys, masks padding.
    alike = bool((one == one[:1]).all()) or bool((one == one[:, :1]).all())
    return not alike and (_masks_above(one) or _masks_above(one.mT))


def _masks_above(one: Tensor) -> bool:
    n = len(one)
    above = torch.ones(n, n, dtype=torch.bool, device=one.device).triu(2)
    value = one[0, -1]
    # The last row sees keys in the middle: it does not in a band of neighbors.
    return bool((one[above] == value).all()) and bool((one[-1, 2 : n - 2] != value).any())
