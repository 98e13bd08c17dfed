"""Function modes that are active while a forward of a watched model runs.

Torch keeps modes on a stack, and a ``with`` block pops whatever is on top. Ours therefore go below those of the user,
and are taken out wherever they stand, also after a forward that was interrupted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.overrides import TorchFunctionMode

from pytest_modelprobe._torch import count_function_modes, default_device_mode, pop_function_mode, push_function_mode


class ForwardMode(TorchFunctionMode):
    """A mode that is on torch's stack of modes while a forward runs."""

    def end(self) -> None:
        """Forget what was kept of the forward that has ended."""


def enter(modes: Sequence[ForwardMode]) -> None:
    """Put the modes at the bottom of the stack, the last one topmost.

    A `with` block pops whatever is on top: where a forward was interrupted, that must not be one of these.
    """
    if modes:
        others = _pop_all_but(modes)
        # Torch requires the mode of `torch.set_default_device` to be the lowest.
        above = 1 if others and others[0] is default_device_mode() else 0
        _push((*others[:above], *modes, *others[above:]))


def leave(modes: Sequence[ForwardMode]) -> None:
    """Take the modes off the stack, wherever they are, and no other."""
    if modes:
        _push(_pop_all_but(modes))
        for mode in modes:
            mode.end()


def leave_after(module: nn.Module, modes: Sequence[ForwardMode]) -> None:
    """Take the modes off when the running call of a module ends.

    They cannot be taken off earlier if a handler of theirs raises, because torch then puts the mode back.
    """

    def after(*_: object) -> None:
        handle.remove()
        leave(modes)

    handle = module.register_forward_hook(after, always_call=True)


def _pop_all_but(modes: Sequence[ForwardMode]) -> list[TorchFunctionMode]:
    """Take everything off the stack, and return what is not among the modes, the bottom first."""
    stack = [pop_function_mode() for _ in range(count_function_modes())]
    return [mode for mode in reversed(stack) if not any(mode is one for one in modes)]


def _push(modes: Iterable[TorchFunctionMode]) -> None:
    for mode in modes:
        push_function_mode(mode)
