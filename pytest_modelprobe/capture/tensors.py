"""Facts about a tensor as records write them, and the key of its contents.

The key tells without reading a tensor whether it has the same elements as one that was seen before.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_modelprobe import statistics
from pytest_modelprobe._torch import function_modes, global_hooks, storage_key, without_torch_function
from pytest_modelprobe.models import Layers, Offloaded, generator_state, own_buffers, own_parameters, sharded_parameters
from pytest_modelprobe.record import Dimension, merge_dimensions, qualified
from pytest_modelprobe.statistics import Reduction, ambient_modes_disabled

# --- Facts about a tensor as records write them, and the key of its contents. ----------------------------------------

ContentKey = tuple[Any, ...]
"""Storage, version and layout of a tensor. Two tensors with one key have the same elements while the storage lives."""


def content_key(tensor: torch.Tensor, *, inference: bool = False) -> ContentKey | None:
    """Return the key of a tensor's contents, which is valid while its storage lives, or `None` if there is none.

    Inference tensors have no version: with ``inference``, their key does not tell that they were written to. Sparse
    tensors and those of `torch.func` transforms have no storage.
    """
    try:
        return (
            storage_key(tensor.untyped_storage()),
            -1 if inference and tensor.is_inference() else tensor._version,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.is_neg(),
        )
    except (RuntimeError, NotImplementedError):
        return None


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an `nn.Parameter`."""
    return type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter)  # the second alone costs a microsecond


def shape_of(tensor: torch.Tensor) -> tuple[Dimension, ...]:
    """Return the sizes of a tensor. Those of a nested tensor are of its parts, as a range where they differ.

    >>> shape_of(torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(5, 3)], layout=torch.jagged))
    (2, (2, 5), 3)
    """
    if not tensor.is_nested:
        return tuple(tensor.shape)
    try:
        with ambient_modes_disabled():
            parts = [part.shape for part in tensor.detach().unbind()]
    except RuntimeError:  # its memory was freed, so only the number of parts is known
        return (tensor.size(0),)
    return len(parts), *(functools.reduce(merge_dimensions, sizes) for sizes in zip(*parts, strict=True))


@functools.cache
def plain_name(value: torch.dtype | torch.device) -> str:
    """Return a dtype or device as records write it: ``float32``, ``cuda:0``."""
    return str(value).removeprefix("torch.")


def describe(tensor: torch.Tensor) -> str:
    """Return shape, dtype and device: ``(2, 17, 64) float32 cpu``."""
    return f"{shape_of(tensor)} {plain_name(tensor.dtype)} {plain_name(tensor.device)}"


# --- Parameters and buffers of layers: reductions of their elements, and whether they have changed since. ------------


@dataclass(frozen=True, slots=True, eq=False)
class ParameterReading:
    """A parameter or buffer as it was when it was read."""

    tensor: torch.Tensor
    content_key: ContentKey | None
    reduced: Reduction

    def is_unchanged(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is the one that was read, with the same elements.

        This is false for every buffer. Buffers are written to through ``.data``, which does not change the version.
        """
        same = self.tensor is tensor and isinstance(tensor, nn.Parameter)
        return same and self.content_key == parameter_content_key(tensor)


def read_parameters(layers: Layers, selected: Collection[str]) -> dict[str, ParameterReading]:
    """Return readings of the parameters and buffers of the selected layers by full name. Each tensor is read once.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> read = read_parameters(Layers(model), ["(root)"])
    >>> read["weight"].is_unchanged(model.weight)
    True
    """
    reduced = reducer(layers)
    with without_torch_function():
        return {
            name: ParameterReading(tensor, parameter_content_key(tensor), reduced(tensor))
            for name, tensor in named_tensors(layers, selected)
        }


def reducer(layers: Layers) -> Callable[[torch.Tensor], Reduction]:
    """Return a function that reduces the parameters and buffers of layers, each once."""
    known: dict[int, Reduction] = {}
    offloaded = Offloaded(layers.modules.values())

    def reduced(tensor: torch.Tensor) -> Reduction:
        if id(tensor) not in known:
            known[id(tensor)] = statistics.reduce(offloaded.load(tensor))
        return known[id(tensor)]

    return reduced


def named_tensors(layers: Layers, selected: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of the selected layers with their full names."""
    # FSDP2 puts the whole parameter in the place of this rank's shard for a time. The shard is what is recorded.
    shards = sharded_parameters(layers.modules.values())
    for name, module in layers.modules.items():
        if name in selected:
            atomic = layers.is_leaf(name)
            for own, tensor in (*own_parameters(module, atomic=atomic), *own_buffers(module, atomic=atomic)):
                yield qualified(name, own), shards.get((module, own), tensor) if shards else tensor


def parameter_content_key(tensor: torch.Tensor) -> ContentKey | None:
    """Return the content key of a parameter or buffer, or `None` if it has none or is uninitialized."""
    return None if is_lazy(tensor) else content_key(tensor)


def storage_keys(layers: Layers) -> Iterator[int]:
    """Yield the keys of the storages of all parameters and buffers."""
    for name, layer in layers.modules.items():
        for module in layer.modules() if layer._modules and layers.is_leaf(name) else (layer,):
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    # A sparse tensor has no storage, nor has one of a `torch.func` transform.
                    with contextlib.suppress(RuntimeError, NotImplementedError):
                        yield storage_key(tensor.untyped_storage())


# --- The unit axis of an output: the axis of channels or features, along which a unit may be dead. -------------------

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


# --- Whether a call draws random numbers: the states of torch's generators before and after it. ----------------------

_CPU = torch.device("cpu")
_WITHOUT_DRAWS = {
    # All layers in these files of torch draw nothing, except the four that are left out.
    module
    for module in vars(nn).values()
    if isinstance(module, type)
    and issubclass(module, nn.Module)
    and module.__module__.removeprefix("torch.nn.modules.")
    in {
        "activation", "batchnorm", "conv", "flatten", "fold", "instancenorm", "linear", "normalization", "padding",
        "pixelshuffle", "pooling", "sparse", "upsampling",
    }
    and module not in {nn.MultiheadAttention, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d}
}  # fmt: skip


def may_draw(module: nn.Module) -> bool:
    """Whether a call of a module may draw random numbers.

    It cannot if only code of torch runs that draws none. A ``forward`` set on the module, a hook or a function mode may
    run other code in it, which may draw.
    """
    return (
        type(module) not in _WITHOUT_DRAWS
        or "forward" in module.__dict__
        or not len(module._forward_pre_hooks) == len(module._forward_hooks) == 1  # only our own
        or any(global_hooks)
        or bool(function_modes())
    )


def random_states(devices: Iterable[torch.device]) -> tuple[bytes, ...]:
    """Return the states of torch's generators on the CPU and on other devices."""
    with ambient_modes_disabled():
        return tuple(map(generator_state, (_CPU, *devices)))
