"""Calls of layers that compute the same on synthetic tensors, so that one of them is enough.

Blocks repeat: most of their layers have equal code, attributes, synthetic weights and inputs, and so equal responses.
If anything about a layer is not known to be plain, the layer is called itself.
"""

from __future__ import annotations

import types
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .tracing import TracedCall

_MODULE = frozenset(vars(nn.Module()))
"""Attributes of every module."""

_TABLES = frozenset({"_parameters", "_buffers", "forward"})
"""Attributes of every module that are compared in their own way."""

_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


class _UnknownError(Exception):
    """There is a value, and it is not known what code does with it."""


def likeness(call: TracedCall, forward: Any, weights: Mapping[int, Hashable], expected: object) -> Hashable | None:
    """Return what determines the response of a call. It is equal for calls that compute the same.

    Returns `None` if that is not known. It is not known of layers with children, hooks, ``__slots__``, a ``forward`` of
    their own, objects that are not plain among their attributes and arguments, or tensors that are not synthetic.

    Args:
        call: The call.
        forward: The ``forward`` of its layer.
        weights: What each synthetic weight was made from, by id of the weight.
        expected: The arguments that it gets in place of its own.
    """
    module, attributes = call.module, vars(call.module)
    if call.calls or call.inputs is None or not call.inputs.known:
        return None
    if getattr(forward, "__func__", None) is not type(module).forward:
        return None
    if any(value for key, value in attributes.items() if key in _MODULE and key not in _TABLES and key != "training"):
        return None  # it has children or hooks
    if any(vars(kind).get("__slots__") for kind in type(module).__mro__):
        return None  # it has attributes that `vars` does not show
    own = {key: v for key, v in attributes.items() if key not in _TABLES and (key not in _MODULE or key == "training")}
    tensors = [(name, x) for name, x in (*module._parameters.items(), *module._buffers.items()) if x is not None]
    if any(id(tensor) not in weights for _, tensor in tensors):
        return None
    made = tuple((name, weights[id(tensor)], tensor._version) for name, tensor in tensors)
    try:
        return id(type(module)), made, call.autocast, *map(plain, (own, call.inputs.value, expected))
    except _UnknownError:
        return None


def is_plain(value: object) -> bool:
    """Whether a value is a number, a text or the like."""
    return type(value) in _PLAIN


def plain(value: Any) -> Hashable:
    """Return what is equal for values that are alike to code: plain ones, containers of these, and placeholders."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, repr(value)  # as text, in which -0.0 differs from 0.0
    if kind in (tuple, list, torch.Size):
        return kind, tuple(map(plain, value))
    if kind is dict:
        return kind, tuple((plain(key), plain(v)) for key, v in value.items())
    if isinstance(value, _FUNCTIONS):
        return kind, id(value)
    spec = getattr(value, "_modelprobe_spec", None) if isinstance(value, Tensor) else None
    if spec is None or spec.value is not None:
        raise _UnknownError
    return spec.name, spec.shape, spec.stride, spec.dtype, spec.device, spec.kind
