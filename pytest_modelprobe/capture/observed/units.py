"""The unit axis of an output: the axis of channels or features, along which a unit may be dead.

The module tells which axis that is, and the number of axes does not: images in NHWC, images in NCHW and heads of tokens
all have four. A wrong axis misses dead units or invents some. Axes are counted from the end, so that they are the same
with and without a batch.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_modelprobe.models import own_parameters

_LAST = -1
_SECOND = "axis 1 of the output"
_INHERITED = "that of the input"

_BY_RULE: dict[int | str, str] = {
    _LAST: "Linear Bilinear Embedding EmbeddingBag LayerNorm RMSNorm RNNBase RNNCellBase Conv1D Transformer "
    "TransformerEncoder TransformerDecoder TransformerEncoderLayer TransformerDecoderLayer",
    _SECOND: "BatchNorm1d SyncBatchNorm GroupNorm LocalResponseNorm CrossMapLRN2d Upsample ChannelShuffle "
    "FeatureAlphaDropout",
    -2: "Unfold",
    -3: "Fold PixelShuffle PixelUnshuffle",
}
_RULES = {name: rule for rule, names in _BY_RULE.items() for name in names.split()}
"""Rule by class name. A class of torch with a number of spatial axes in its name (Conv2d, MaxPool1d) needs none."""

_SPATIAL = re.compile(r"([123])d$")
_POINTWISE = ("torch.nn.modules.activation.", "torch.nn.modules.dropout.", "torch.nn.modules.linear.Identity")
_KNOWN = ("torch.nn.modules.", "torch.ao.nn.", "transformers.pytorch_utils.")  # the last has the `Conv1D` of GPT-2


def unit_axis(
    module: nn.Module, output: Tensor, inherited: Callable[[Tensor], int | None] = lambda _: None
) -> int | None:
    """Return the axis of an output along which its units lie, counted from the end, or `None` if it cannot be known.

    Args:
        module: The module that returned the output.
        output: One of its output tensors; only its shape is used.
        inherited: Returns the unit axis of a tensor of the same shape that was an input or was made inside, or `None`
            if there is none. It counts if the module does not tell.

    >>> import torch
    >>> unit_axis(nn.Conv2d(3, 8, 3), torch.empty(2, 8, 4, 4)), unit_axis(nn.Linear(3, 8), torch.empty(2, 4, 8))
    (-3, -1)
    >>> unit_axis(nn.ReLU(), torch.empty(2, 8, 4, 4), lambda _: -3), unit_axis(nn.ReLU(), torch.empty(2, 8))
    (-3, None)
    """
    cls: type = type(module)
    rule = _rule(cls)
    axis = rule if isinstance(rule, int) else _axis(module, rule, output.shape, inherited(output))
    return axis if axis is None or -axis <= output.dim() else None


def is_pointwise(module: nn.Module) -> bool:
    """Whether a module computes each element from that in the same place, as activations and dropout do.

    >>> is_pointwise(nn.GELU()), is_pointwise(nn.Linear(2, 2))
    (True, False)
    """
    cls: type = type(module)
    return _rule(cls) == _INHERITED


def stacked_axis(owner: nn.Module, parameter: Tensor) -> int | None:
    """Return the axis of a parameter along which weights of several modules, such as experts, are stacked.

    It is the first axis. Returns `None` if slices along it are no matrices, and for convolutions and bilinear layers,
    where a slice belongs to one unit, which may be dead.

    >>> import torch
    >>> stacked_axis(nn.Module(), nn.Parameter(torch.empty(8, 16, 4)))
    -3
    >>> stacked_axis(nn.Conv1d(16, 8, 4), nn.Parameter(torch.empty(8, 16, 4)))
    """
    # Most parameters end here. A DTensor has only a part of the slices.
    if parameter.ndim < 3 or type(parameter) is not nn.Parameter:
        return None
    first, *others = parameter.shape
    if first < 2 or sum(size > 1 for size in others) < 2:
        return None
    made_of_units = any(base.__module__ in _OF_UNITS for base in type(owner).__mro__)
    return None if made_of_units else -parameter.ndim


_OF_UNITS = ("torch.nn.modules.conv", "torch.nn.modules.linear", "torch.nn.utils.parametrize")
"""Modules of torch with classes whose weights may have a slice for each unit."""


def _axis(module: nn.Module, rule: str | None, shape: Sequence[int], inherited: int | None) -> int | None:
    if rule == _SECOND:
        return 1 - len(shape) if len(shape) > 1 else None
    if isinstance(module, nn.MultiheadAttention):
        return _LAST if shape and shape[-1] == module.embed_dim else None  # not of the attention weights
    if isinstance(module, nn.Flatten):
        return _LAST if module.start_dim in (0, 1) and module.end_dim in (-1, len(shape)) else inherited
    if rule == _INHERITED:
        return inherited
    own = [tuple(p.shape) for _, p in own_parameters(module, atomic=False) if not (is_lazy(p) or p.is_nested)]
    if all(math.prod(size) == 1 for size in own) or any(module.children()):
        return inherited
    # A norm of the model's own, like LlamaRMSNorm, has vectors of one size. Its axis is known if they fit only one.
    fitting = {axis for axis in (_LAST, 1 - len(shape)) if axis < 0 and set(own) == {(shape[axis],)}}
    return fitting.pop() if len(fitting) == 1 else inherited if inherited in fitting else None


@functools.cache
def _rule(cls: type) -> int | str | None:
    """Return the rule of the nearest base in torch, which a model's own subclass of a layer follows too."""
    for base in cls.__mro__:
        name = f"{base.__module__}.{base.__name__}"
        spatial = _SPATIAL.search(base.__name__)
        known = name.startswith(_KNOWN)
        if known and base.__name__ in _RULES:
            return _RULES[base.__name__]
        # A class of another library counts if it is a norm: a LayerNorm2d permutes, then normalizes the last axis.
        if spatial and (known or issubclass(cls, (nn.LayerNorm, nn.GroupNorm))):
            return -1 - int(spatial[1])
        if name.startswith(_POINTWISE):
            return _INHERITED
    return None
