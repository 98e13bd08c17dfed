"""`compiled=` of a watch."""

from __future__ import annotations

from typing import Literal

import torch

from pytest_modelprobe.exceptions import UsageError

Compiled = Literal["eager", "inside"]
"""What compiled code that holds a watched model does: it runs eagerly, or stays compiled, with hooks inside."""


def is_inside(compiled: Compiled, **asked: bool) -> bool:
    """Return whether hooks are traced into compiled code; UsageError where another option was asked for with it.

    >>> is_inside("eager", attention=True), is_inside("inside", attention=False)
    (False, True)
    """
    if compiled not in ("eager", "inside"):
        raise UsageError(f"compiled is 'eager' or 'inside'; got {compiled!r}")
    if compiled == "eager":
        return False
    if torch.__version__.startswith("2.6."):
        raise UsageError('torch 2.6 compiles no hooks on tensors, as compiled="inside" needs: take a newer one')
    for option in asked:
        if asked[option]:
            raise UsageError(
                f'{option}= needs Python at each layer, and compiled="inside" runs none there: leave one of them out'
            )
    return True
