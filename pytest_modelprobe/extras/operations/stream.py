"""The operations of a layer's own code, in order, each with numbers of what it takes and of what it makes."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from pytest_modelprobe import statistics
from pytest_modelprobe._torch import DispatchMode
from pytest_modelprobe.models import as_real, flatten, flatten_call, has_dense_storage, version
from pytest_modelprobe.record import Operation, Reading
from pytest_modelprobe.runs import operation_of, widened

_OURS = f"{Path(__file__).parents[2]}{os.sep}"

_LONGEST = 80
"""Most characters of the arguments of an operation."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """A tensor in numbers."""

    shape: tuple[int, ...]
    given: bool
    """Whether it is a synthetic input or weight, or what a layer inside returns: no operation made it."""
    reading: Reading
    """Of the logarithms of floating elements, so that a mask of the least number hides no other element."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation."""

    function: str
    operation: Operation
    """What is called, with the arguments that are not tensors, and where."""
    takes: tuple[Numbers, ...]
    makes: tuple[Numbers, ...]
    """What it returns, and the arguments that it writes to."""


class _Notes:
    """The operations that a mode of torch notes while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.location: str | None = None
        """File and line of the operations to come, in place of the line that calls them."""
        self._noted: list[tuple[str, Operation, int, int]] = []
        self._known: list[tuple[tuple[int, ...], bool, int]] = []
        """Shape and `Numbers.given` of each tensor, and which reduction is of it."""
        self._reduced: list[statistics.Reduction] = []
        self._read = WeakIdKeyDictionary()
        """Tensor → its version, and which reduction is of it, because what one operation makes the next ones take."""

    def _called(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call an operation, note it if it makes a tensor, and return its output."""
        kwargs = kwargs or {}
        if sys._getframe(1).f_code.co_filename.startswith(_OURS):
            return func(*args, **kwargs)
        given = [tensor for _, tensor in flatten_call(args, kwargs).tensors]
        versions, start = [version(tensor) for tensor in given], len(self._known)
        self._note(given)
        try:
            output = func(*args, **kwargs)
        except BaseException:  # a model may catch it and go on
            del self._known[start:]
            raise
        made = [tensor for _, tensor in flatten("output", output, objects=False).tensors]
        written = [tensor for tensor, v in zip(given, versions, strict=True) if version(tensor) != v]
        made += [tensor for tensor in written if all(tensor is not one for one in made)]
        if made:
            operation = operation_of(func)
            name = f"{operation.name}{_arguments(func, args, kwargs)}"
            called = replace(operation, name=name, location=self.location or operation.location)
            self._noted.append((operation.name, called, len(given), len(made)))
            for tensor in (one for one in made if any(one is other for other in given)):
                self._read.pop(tensor, None)  # below dispatch its version is raised later
            self._note(made)
        else:
            del self._known[start:]
        return output

    def _note(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            now = version(tensor)
            then, place = self._read.get(tensor, (None, 0))
            if now is None or then != now:
                place = len(self._reduced)
                self._reduced.append(statistics.reduce(_logarithms(tensor)))
                self._read[tensor] = now, place
            self._known.append((tuple(tensor.shape), hasattr(tensor, "_modelprobe_kind"), place))

    def steps(self) -> tuple[Step, ...]:
        """Return what was noted."""
        readings = statistics.collect(self._reduced)
        numbers = (Numbers(shape, given, readings[place]) for shape, given, place in self._known)
        return tuple(
            Step(name, operation, *(tuple(next(numbers) for _ in range(size)) for size in sizes))
            for name, operation, *sizes in self._noted
        )


class Recorder(_Notes, TorchFunctionMode):
    """Notes the operations that Python code calls while it is active, without those inside them.

    >>> x = torch.ones(2, 3)
    >>> with Recorder() as recorder:
    ...     y = torch.softmax(x.t(), dim=-1)
    >>> [step.operation.name for step in recorder.steps()]
    ['torch.Tensor.t', 'torch.softmax(dim=-1)']
    """

    __torch_function__ = _Notes._called


class DispatchRecorder(_Notes, DispatchMode):
    """Notes the operations that reach a kernel, which are the same of a model and of what was exported of it."""

    __torch_dispatch__ = _Notes._called


def _logarithms(tensor: Tensor) -> Tensor:
    """Return a tensor of floats with the logarithm of one more than each magnitude, and its sign.

    >>> _logarithms(torch.tensor([0.0, -torch.inf]))
    tensor([   0.0000, -709.7827], dtype=torch.float64)
    """
    if not has_dense_storage(tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    with statistics.ambient_modes_disabled(), torch.no_grad():
        numbers = as_real(tensor.detach())
        x = numbers.to(widened(numbers.dtype, torch.float64)).nan_to_num(torch.nan)
        return x.abs().log1p().copysign(x)


# --- arguments --------------------------------------------------------------------------------------------------------


def _arguments(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the arguments that are no tensors as they are written in a call, without those that are the default.

    >>> _arguments(torch.nn.functional.gelu, (torch.ones(1),), {"approximate": "tanh"})
    "(approximate='tanh')"
    >>> _arguments(torch.Tensor.__getitem__, (torch.ones(1), (..., slice(None, 4))), {})
    '(..., :4)'
    """
    try:
        parameters = inspect.signature(func).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items()}
    except (TypeError, ValueError):
        defaults = {}
    shown = [_shown(value) for value in args]
    for name, value in kwargs.items():
        default = defaults.get(name)
        if not name.startswith("_") and value is not None and not (type(value) is type(default) and value == default):
            text = _shown(value)
            shown.append(text and f"{name}={text}")
    text = ", ".join(filter(None, shown))
    return f"({text[:_LONGEST]})" if text else ""


def _shown(value: object) -> str:
    """Return a value as it is written; empty if it is a tensor."""
    if isinstance(value, Tensor):
        return ""
    if isinstance(value, tuple | list):
        return ", ".join(filter(None, map(_shown, value)))
    if isinstance(value, slice):
        ends = ["" if one is None else str(one) for one in (value.start, value.stop, value.step)]
        return ":".join(ends if value.step is not None else ends[:2])
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is ... or isinstance(value, torch.dtype):
        return "..." if value is ... else str(value).removeprefix("torch.")
    return repr(value) if value is None or isinstance(value, bool | int | str) else type(value).__name__
