"""Sees the calls of a training program, and plants a fault in one of them.

A program makes its optimizer, loops and calls torch: nobody hands these over. So torch's functions are exchanged for
ones that call them, wherever a module has a name for them, until the end of the block. A call is known by the function
that makes it and by what it calls, as a layer is by its model and its name.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional, init
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pytest_modelprobe._torch import without_dispatch_modes, without_torch_function
from pytest_modelprobe.models import as_array, has_dense_storage

from .operators import TRAINING, ProgramCall, TrainingFault
from .results import PROGRAM, Place, Planted, Seen

_INIT = (
    "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_",
    "orthogonal_", "sparse_",
)  # fmt: skip
_LOSSES = (
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div",
)  # fmt: skip

Wrapper = Callable[..., Any]


class Program:
    """Torch's functions for training while `installed`.

    Args:
        current: Returns what is written to, and the fault that is planted; `None` if nothing is observed now.
    """

    def __init__(self, current: Callable[[], tuple[Seen, Planted | None] | None]) -> None:
        self._current = current
        self._is_inside = False
        self._given: WeakKeyDictionary[Optimizer, list[Tensor]] = WeakKeyDictionary()
        """Optimizer → the parameters that it was given, also those that a fault leaves out."""

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """See the calls within the block."""
        with contextlib.ExitStack() as stack:
            for cls, name, at in (
                (Optimizer, "__init__", "optimizer"),
                (Optimizer, "zero_grad", "zero_grad"),
                (nn.Module, "zero_grad", "zero_grad"),
                (nn.Module, "train", "mode"),
            ):
                function = getattr(cls, name)
                stack.callback(setattr, cls, name, function)
                setattr(cls, name, self._wrapper(at, function))
            functions = {
                "init": [getattr(init, name) for name in _INIT],
                "loss": [getattr(functional, name) for name in _LOSSES],
            }
            wrappers = {
                id(function): (function, self._wrapper(at, function))
                for at, those in functions.items()
                for function in those
            }
            stack.enter_context(_exchanged_names(wrappers))
            before, after = (functools.partial(self._at_step, is_over) for is_over in (False, True))
            stack.callback(register_optimizer_step_pre_hook(before).remove)
            stack.callback(register_optimizer_step_post_hook(after).remove)
            yield

    # --- calls --------------------------------------------------------------------------------------------------------

    def _wrapper(self, at: str, function: Callable[..., Any]) -> Wrapper:
        faults = [fault for fault in TRAINING.values() if fault.at == at]

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            # torch.compile takes the first condition for a constant.
            if torch.compiler.is_compiling() or self._is_inside:
                return function(*args, **kwargs)
            current = self._current()
            if current is None or (place := self._place(at, function, args)) is None:
                return function(*args, **kwargs)
            seen, planted = current
            call = ProgramCall(function, args, kwargs)
            with self._inside():
                return self._called(call, at, faults, seen, planted, place)

        return wrapper

    def _called(
        self,
        call: ProgramCall,
        at: str,
        faults: Iterable[TrainingFault],
        seen: Seen,
        planted: Planted | None,
        place: Place,
    ) -> Any:
        """Do what a call asks for, or what the fault makes of it, and note which faults fit."""
        is_made = at == "optimizer"
        seen.makes_models |= is_made
        if planted is None and not is_made:
            _note(seen, place, faults, call)
        if planted is not None and planted.place == place and isinstance(planted.operator, TrainingFault):
            call.state, planted.fired = planted.state, True
            if not is_made:
                return planted.operator.run(call)
            self._make(call, planted.operator.run)
        elif is_made:
            self._make(call, ProgramCall.run)
            _note(seen, place, faults, call)
        else:
            return call.run()
        return None

    def _make(self, call: ProgramCall, run: Callable[[ProgramCall], Any]) -> None:
        function, optimizer = call.function, call.optimizer

        def and_kept(*args: Any, **kwargs: Any) -> None:
            function(*args, **kwargs)
            self._given[optimizer] = [p for group in optimizer.param_groups for p in group["params"]]

        call.function = functools.wraps(function)(and_kept)
        run(call)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Take what torch's functions call for no call of the program."""
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    # --- steps --------------------------------------------------------------------------------------------------------

    def _at_step(self, is_over: bool, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        current = None if torch.compiler.is_compiling() else self._current()
        if current is None:
            return
        seen, planted = current
        call = ProgramCall(type(optimizer).step, (optimizer,), {})
        place = self._place("step", call.function, call.args)
        with self._inside():
            if planted is None and place is not None and not is_over:
                _note(seen, place, (fault for fault in TRAINING.values() if fault.at == "step"), call)
            if planted is not None and planted.place == place and isinstance(planted.operator, TrainingFault):
                call.state = planted.state.setdefault(f"{id(optimizer)}", {})
                planted.fired = True
                change = planted.operator.after if is_over else planted.operator.run
                if change is not None:
                    change(call)
            if is_over:
                seen.steps += 1
            for tensor in self._given.get(optimizer, ()):
                # Before the step its gradients, and after it the parameters.
                digest(seen, tensor if is_over else tensor.grad)

    # --- places -------------------------------------------------------------------------------------------------------

    def _place(self, at: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Place | None:
        """Return the place of a call, or `None` if it is not one of a program."""
        of = args[0] if args else None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") == __name__:
            frame = frame.f_back
        if at == "zero_grad" and _is_of_torch(frame):  # which torch itself calls too
            return None
        while frame is not None and (_is_of_torch(frame) or (at == "optimizer" and _makes(frame, of))):
            frame = frame.f_back
        if frame is None or str(frame.f_globals.get("__name__")).partition(".")[0] == __package__.partition(".")[0]:
            return None
        owner = type(of).__name__
        called = {
            "optimizer": owner,
            "step": f"{owner}.step",
            "zero_grad": f"{owner}.zero_grad",
            "mode": f"{owner}.train",
            "init": f"init.{function.__name__}",
        }.get(at, function.__name__)
        where = frame.f_code.co_qualname.rpartition("<locals>.")[2]
        return Place(f"{frame.f_globals.get('__name__')}:{where}", called, PROGRAM)


def _is_of_torch(frame: FrameType | None) -> bool:
    name = "" if frame is None else str(frame.f_globals.get("__name__"))
    return name.partition(".")[0] in ("torch", "contextlib", "functools")


def _makes(frame: FrameType, made: object) -> bool:
    """Whether a frame is the constructor of a subclass, in the program itself or in a library of optimizers."""
    names = frame.f_code.co_varnames
    return frame.f_code.co_name == "__init__" and bool(names) and frame.f_locals.get(names[0]) is made


def _note(seen: Seen, place: Place, faults: Iterable[TrainingFault], call: ProgramCall) -> None:
    fitting = seen.of_training[place]
    for fault in faults:
        if fault.name not in fitting:
            with contextlib.suppress(Exception):  # torch refuses the call itself
                if fault.fits(call):
                    fitting.add(fault.name)


def digest(seen: Seen, tensor: Tensor | None) -> None:
    """Note the elements of a tensor, or that there is none. One that cannot be read is no error of the test."""
    if tensor is None:
        seen.outputs.update(b"none")
        return
    with contextlib.suppress(Exception), without_torch_function(), without_dispatch_modes():
        if has_dense_storage(tensor):
            plain = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
            seen.outputs.update(as_array(plain.contiguous().view(-1).view(torch.uint8).cpu()).tobytes())


# --- exchanging -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _exchanged_names(wrappers: Mapping[int, tuple[Callable[..., Any], Wrapper]]) -> Iterator[None]:
    """Exchange functions wherever a module has a name for one, as after ``from torch.nn.init import normal_``."""
    found: list[tuple[dict[str, Any], str, Callable[..., Any], Wrapper]] = []
    for module in list(sys.modules.values()):
        names: Any = getattr(module, "__dict__", None)
        for name, value in list(names.items()) if isinstance(names, dict) else ():
            if id(value) in wrappers:
                found.append((names, name, *wrappers[id(value)]))
    for names, name, _, wrapper in found:
        names[name] = wrapper
    try:
        yield
    finally:
        for names, name, function, wrapper in found:
            if names.get(name) is wrapper:
                names[name] = function
