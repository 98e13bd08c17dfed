"""Functional calls as pseudo-layers: ``F.relu`` inside ``block`` is recorded as ``block.relu``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from pytest_modelprobe._torch import count_function_modes, default_device_mode, pop_function_mode, push_function_mode

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
    """A mode that is on the stack while a forward of a capture runs."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    def end(self) -> None:
        """Forget what was kept of the forward, which is over."""


def enter(modes: Sequence[ForwardMode]) -> None:
    """Put the modes at the bottom of the stack, the last one topmost.

    A `with` block pops whatever is on top: where a forward was interrupted, that must not be one of these.
    """
    if modes:
        others = _taken_off(modes)
        above = 1 if others and others[0] is default_device_mode() else 0  # torch wants it at the bottom
        _put_on((*others[:above], *modes, *others[above:]))


def leave(modes: Sequence[ForwardMode]) -> None:
    """Take the modes off the stack, wherever they are, and no other."""
    if modes:
        _put_on(_taken_off(modes))
        for mode in modes:
            mode.end()


def _taken_off(modes: Sequence[ForwardMode]) -> list[TorchFunctionMode]:
    """Take everything off the stack; return what is not among the modes, the bottom first."""
    stack = [pop_function_mode() for _ in range(count_function_modes())]
    return [mode for mode in reversed(stack) if not any(mode is one for one in modes)]


def _put_on(modes: Iterable[TorchFunctionMode]) -> None:
    for mode in modes:
        push_function_mode(mode)


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
