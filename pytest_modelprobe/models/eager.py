"""Compiled parts of a model run eagerly for a while, so that their hooks run."""

from __future__ import annotations

import contextlib
import sys

import torch

from .layers import Layers


def run_eagerly(layers: Layers) -> contextlib.AbstractContextManager[object]:
    """Return a context in which compiled parts of a model run eagerly; several may overlap in any order."""
    if layers.compiled or "torch._dynamo" in sys.modules:  # importing it takes seconds
        return _EagerStance()
    return contextlib.nullcontext()


class _EagerStance:
    _entered = 0
    _stance = contextlib.ExitStack()

    def __enter__(self) -> None:
        if not _EagerStance._entered:
            _EagerStance._stance.enter_context(torch.compiler.set_stance("force_eager"))
        _EagerStance._entered += 1

    def __exit__(self, *error: object) -> None:
        _EagerStance._entered -= 1
        if not _EagerStance._entered:
            _EagerStance._stance.close()
