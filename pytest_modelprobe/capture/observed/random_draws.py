"""Whether a call draws random numbers: the states of torch's generators before and after it.

A call that draws gives other values with another seed, so a record has to say which calls do. The states are compared
as bytes, which takes longer than a small layer. Layers of torch that draw nothing are therefore not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from pytest_modelprobe._torch import function_modes, global_hooks
from pytest_modelprobe.models import generator_state
from pytest_modelprobe.statistics import ambient_modes_disabled

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
