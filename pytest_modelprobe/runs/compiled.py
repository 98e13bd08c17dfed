"""`compiled=` of a watch: whether compiled code that holds the model runs eagerly, or stays compiled.

Hooks that are added to compiled code are ignored by default, so the code runs eagerly while it is watched. Code that
stays compiled runs no Python at a layer, so options that need Python there are refused.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch

from pytest_modelprobe.capture import Options
from pytest_modelprobe.exceptions import UsageError

Compiled = Literal["eager", "inside"]
"""What compiled code that holds a watched model does: it runs eagerly, or stays compiled, with hooks inside."""


def is_inside(compiled: Compiled, options: Options, *, stops: bool = False) -> bool:
    """Return whether hooks are traced into compiled code. Raises `UsageError` if another option forbids it.

    >>> is_inside("eager", Options(attention=True)), is_inside("inside", Options())
    (False, True)
    """
    if compiled not in ("eager", "inside"):
        raise UsageError(f"compiled is 'eager' or 'inside'; got {compiled!r}")
    if compiled == "eager":
        return False
    asked = {"keep": options.keeps, "functionals": options.functionals, "attention": options.attention}
    asked |= {"profile": options.profile, "histograms": options.histograms, "stop_on": stops}
    asked["positions"] = options.positions != "all"
    for option, is_asked in asked.items():
        if is_asked:
            raise UsageError(
                f'{option}= needs Python at each layer, and compiled="inside" runs none there: leave one of them out'
            )
    if not compiles_hooks():
        raise UsageError(
            f'torch {torch.__version__} compiles no hooks on tensors, as compiled="inside" needs: take a newer one'
        )
    return True


@functools.cache
def compiles_hooks() -> bool:
    """Return whether `torch.compile` traces a hook on a tensor into a graph. Torch 2.6 does not."""

    def hooked(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y.register_hook(lambda gradient: None)  # type: ignore[no-untyped-call, unused-ignore]
        return y

    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.compiler.set_stance("default"):
            torch.compile(hooked, backend="eager", fullgraph=True)(torch.ones(1, requires_grad=True))
    except Exception:  # noqa: BLE001 - the class of the compiler's error is private
        return False
    return True
