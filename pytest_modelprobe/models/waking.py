"""Small random numbers in the place of parameters that are all zero.

Heads and gates may be zero at first, on purpose. What such a weight scales is zero whatever the layers before it do,
and no gradient reaches these, so a check would hold without having seen anything.
"""

from __future__ import annotations

import torch

from pytest_modelprobe.record import qualified

from .layers import Layers
from .memory import unexpanded
from .seeding import randn

_STD = 0.02
"""The standard deviation, as in initializations of transformers."""


def wake_zeros(layers: Layers, seed: int) -> None:
    """Write small random numbers into weights that are all zero.

    >>> head = torch.nn.Linear(2, 1)
    >>> _ = torch.nn.init.zeros_(head.weight)
    >>> wake_zeros(Layers(head), seed=0)
    >>> bool(head.weight.any())
    True
    """
    for name, module in layers.modules.items():
        own = [(n, p) for n, p in module.named_parameters(recurse=False) if p.is_floating_point() and p.numel()]
        zero = [(n, p) for n, p in own if not p.any()]
        # A bias that is zero hides nothing, unless all parameters of the layer are zero.
        if len(zero) == len(own) or any(not n.endswith("bias") for n, _ in zero):
            for parameter_name, parameter in zero:
                written = unexpanded(parameter.detach())
                drawn = f"check {qualified(name, parameter_name)}"
                numbers = randn(written.shape, seed=seed, name=drawn, device=written.device, dtype=written.dtype)
                with torch.no_grad():
                    written.copy_(numbers * _STD)
