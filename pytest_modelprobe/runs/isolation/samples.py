"""Fewer samples: a few of them are enough to tell what a layer of torch computes that does the same to each.

Other layers take as many as in the run, because their code may depend on the number. But code that replaced such a
layer takes as many as that did, so that both answer to the same tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .contexts import is_leaf_of_its_class
from .recipes import shape_of
from .tracing import TracedCall

_AXES: Mapping[type, Sequence[int]] = {
    **dict.fromkeys([nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d, nn.AvgPool1d], (3,)),
    **dict.fromkeys([nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.AvgPool2d], (4,)),
    **dict.fromkeys([nn.Conv3d, nn.BatchNorm3d, nn.MaxPool3d, nn.AvgPool3d], (5,)),
    **dict.fromkeys([nn.Linear, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU], (3, 4, 5)),
}
"""The layers, each with how many axes an input has of which the first is that of samples."""

_SAMPLES, _PLACES = 2, 64
"""How many samples are enough, and how many places in all of them: a batch norm computes statistics over these."""


def take_fewer_samples(call: TracedCall, recipes: Mapping[str, str], shapes: Mapping[str, Sequence[Any]]) -> None:
    """Let a layer take as many samples as are enough.

    Args:
        call: The call of the layer.
        recipes: The recipes of a response before. An input has as many samples as it had there, if it can.
        shapes: The shapes of its inputs in the run before.
    """
    if call.inputs is None or not call.inputs.known:
        return
    args, kwargs = call.inputs.value
    for placeholder in (*args, *kwargs.values()):
        spec = getattr(placeholder, "_modelprobe_spec", None)
        if spec is None or not spec.shape or 0 in spec.stride:
            continue
        count = _enough(call.module, spec.shape)
        before = shape_of(recipes.get(spec.name, "").partition(" ")[0])
        fits = len(before) > 0 and before[1:] == spec.shape[1:]
        if fits and (count is not None or spec.shape == shapes.get(spec.name)):
            count = before[0]
        if count is not None and count < spec.shape[0]:
            samples, outer = spec.shape[0], spec.stride[0]
            spec.shape = count, *spec.shape[1:]
            spec.stride = tuple(step * count // samples if step > outer else step for step in spec.stride)


def _enough(module: nn.Module, shape: tuple[int, ...]) -> int | None:
    """Return how many samples of an input are enough, or `None` if that is not known."""
    if len(shape) not in _AXES.get(type(module), ()) or not is_leaf_of_its_class(module, module.forward):
        return None
    return min(shape[0], max(_SAMPLES, math.ceil(_PLACES / max(1, math.prod(shape[2:])))))
