"""Functional calls as pseudo-layers: ``F.relu`` inside ``block`` is recorded as ``block.relu``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from .capture import Capture

_NAMES = (
    "batch_norm", "celu", "dropout", "dropout1d", "dropout2d", "dropout3d", "elu", "gelu", "glu", "group_norm",
    "hardsigmoid", "hardswish", "hardtanh", "layer_norm", "leaky_relu", "log_softmax", "logsigmoid", "mish",
    "normalize", "prelu", "relu", "relu6", "rms_norm", "scaled_dot_product_attention", "selu", "sigmoid", "silu",
    "softmax", "softmin", "softplus", "softsign", "tanh", "tanhshrink",
)  # fmt: skip


def _watched() -> Iterator[tuple[Callable[..., Any], str]]:
    for name in _NAMES:
        for home in (F, torch, torch.Tensor):
            for spelling in (name, f"{name}_"):
                function = getattr(home, spelling, None)
                if function is not None:
                    yield function, name


_FUNCTIONS = dict(_watched())


class ForwardMode(TorchFunctionMode):
    """A mode that a capture enters as a forward begins, and leaves as it ends."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture
        self._entered = False

    def enter(self) -> None:
        """Enter the mode, unless it is entered."""
        if not self._entered:
            self.__enter__()  # type: ignore[no-untyped-call]
            self._entered = True

    def leave(self) -> None:
        """Leave the mode, unless it is left."""
        if self._entered:
            self._entered = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class FunctionalMode(ForwardMode):
    """Shows a capture the functional calls of one forward."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = _FUNCTIONS.get(func)
        frame = None if name is None else self._capture.open_functional(name, args, kwargs)
        if frame is None:
            return func(*args, **kwargs)
        try:
            output = func(*args, **kwargs)
        except BaseException:
            self._capture.drop_functional(frame)
            raise
        self._capture.close_functional(frame, output)
        return output
