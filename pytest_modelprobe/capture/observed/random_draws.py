"""Whether a call draws random numbers: the states of torch's generators before and after it.

A call that draws gives other values with another seed, so a record has to say which calls do. The states are compared
as bytes, which takes longer than a small layer. Layers of torch that draw nothing are therefore not looked at.
"""

from __future__ import annotations

import torch
from torch import nn

from pytest_modelprobe._torch import function_modes, global_hooks
from pytest_modelprobe.models import as_array
from pytest_modelprobe.statistics import ambient_modes_disabled

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


def random_states() -> tuple[bytes, ...]:
    """Return the states of torch's generators."""
    with ambient_modes_disabled():
        states = as_array(torch.default_generator.get_state()).tobytes()
        if torch.cuda.is_initialized():  # asking for the state would initialize CUDA
            return states, as_array(torch.cuda.get_rng_state()).tobytes()  # torch keeps it on the CPU: nothing waits
        return (states,)
