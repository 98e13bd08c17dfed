"""The weights of layers, changed in place for a while and restored bit for bit.

They are written in place, because a parameter may be tied, or an optimizer may hold it. Blocks may end in a different
order than the reverse of their beginning, so the bits of a weight are kept until the last block that changed it ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import Layers, own_parameters


def weights_of(layers: Layers, layer: str) -> dict[str, nn.Parameter]:
    """Return the parameters of a layer itself except biases, by name, and those of its children too if it is atomic.

    Parameters below ``parametrizations`` are left out: a weight is computed from them, and that weight is changed.
    """
    module = layers.modules[layer]
    return {
        name: parameter
        for name, parameter in own_parameters(module, atomic=layers.is_leaf(layer))
        if "bias" not in name.rpartition(".")[2] and not name.startswith("parametrizations.")
    }


def parametrized_weights_of(module: nn.Module) -> list[nn.Module]:
    """Return the modules that compute the parametrized weights of a module itself."""
    if not parametrize.is_parametrized(module):
        return []
    found = module.get_submodule("parametrizations").named_children()
    return [computes for name, computes in found if "bias" not in name]


class _Written:
    """A weight with changed values, and the values that it had before."""

    def __init__(self, weight: Tensor, before: Tensor) -> None:
        self.weight, self.before = weight, before


_written: list[_Written] = []
"""The weights that are changed now, of all blocks, in the order in which they were written."""


@contextlib.contextmanager
def changed(weights: Mapping[str, Tensor], change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Write ``change(name, weight)`` into each weight, and on exit the bits that it had before.

    A parameter that is used in several places is changed once. All changes are computed before one is written, so that
    an error leaves all weights as they are. If another block changed a weight meanwhile and has not ended, the bits
    come back when that block ends.
    """
    once: dict[int, tuple[str, Tensor]] = {}
    for name, weight in weights.items():
        once.setdefault(id(weight), (name, weight))
    planned = []
    for name, weight in once.values():
        if is_lazy(weight):
            raise UsageError(f"{name} has no shape before the first forward: run the model once before the block")
        with torch.no_grad():
            before = weight.detach().clone()
            after = change(name, before.clone())
            if after.shape != before.shape:
                shapes = f"{tuple(after.shape)}, not {tuple(before.shape)}"
                raise UsageError(f"{name} became a tensor of another shape: {shapes}")
            planned.append((weight, before, after))
    with contextlib.ExitStack() as stack:
        for weight, before, after in planned:
            stack.callback(_restore, one := _Written(weight, before))
            _written.append(one)
            _write(weight, after)
        yield


def _restore(one: _Written) -> None:
    at = next(i for i, other in enumerate(_written) if other is one)
    del _written[at]
    later = next((other for other in _written[at:] if other.weight is one.weight), None)
    if later is None:
        _write(one.weight, one.before)
    else:  # the block that wrote later now restores the bits from before both
        later.before = one.before


def _write(weight: Tensor, values: Tensor) -> None:
    # In place, so that the version counter moves: autograd then refuses a backward through values that are gone.
    with torch.inference_mode(weight.is_inference()), torch.no_grad():
        weight.copy_(values)
