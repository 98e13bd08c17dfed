"""Where something non-finite began: the operation and the line of the model's source."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from .flatten import Flat, flatten, flatten_call
from .record import Operation

_LIBRARIES = tuple(f"{Path(path).parent}{os.sep}" for path in (torch.__file__, __file__))
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep


def _is_model_code(path: str) -> bool:
    """Whether a source file is neither torch's, nor Python's, nor ours."""
    if path.startswith(_STDLIB) and "site-packages" not in path:
        return False
    return not path.startswith(_LIBRARIES)


class OriginMode(TorchFunctionMode):
    """Finds the first torch operation that gives a NaN, or an infinity of a new sign, which no input of it has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Operation | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        before = None if self.found else flatten_call(args, kwargs)
        had = _kinds(before) if before else frozenset()  # before the call: it may write in place
        ranges = _ranges(before) if before else ""
        output = func(*args, **kwargs)
        if before is not None and _kinds(flatten("", output)) - had:
            self.found = Operation(name=_name(func), location=_model_line(sys._getframe(1)), detail=ranges)
        return output


def find_origin(forward: Callable[[], Any]) -> Operation | None:
    """Run ``forward`` and return the operation in which the first non-finite value began, if a torch call shows it."""
    mode = OriginMode()
    with mode:
        forward()
    return mode.found


def find_gradient_origin(step: Callable[[], Any]) -> Operation | None:
    """Run forward and backward under anomaly detection; return the operation whose backward gave the first NaN."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly(check_nan=True):
                step()
        except RuntimeError as error:
            function = str(error).partition("'")[2].partition("'")[0]
            if not function.endswith("Backward0") and "returned nan" not in str(error):
                return None
            return Operation(name=function, location=_forward_line(caught), detail="its backward gave the first NaN")
    return None


def _forward_line(caught: list[warnings.WarningMessage]) -> str | None:
    """Return the model's line in the traceback of the forward call, which torch prints as a warning."""
    for warning in caught:
        for line in reversed(str(warning.message).splitlines()):
            line = line.strip()
            if line.startswith('File "'):
                path, _, rest = line.removeprefix('File "').partition('", line ')
                if _is_model_code(path):
                    return f"{Path(path).name}:{rest.partition(',')[0]}"
    return None


def _model_line(frame: FrameType | None) -> str | None:
    """Return file and line of the innermost frame that is neither torch's nor ours."""
    for caller, line in traceback.walk_stack(frame):
        path = caller.f_code.co_filename
        if _is_model_code(path):
            return f"{Path(path).name}:{line}"
    return None


def _name(function: Any) -> str:
    return str(resolve_name(function) or getattr(function, "__name__", function))


def _kinds(flat: Flat) -> frozenset[str]:
    """Return which non-finite kinds are among the tensors."""
    kinds = set()
    for _, tensor in flat.tensors:
        if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.is_meta:
            continue
        values = tensor.detach().float() if tensor.element_size() < 2 else tensor.detach()
        if bool(torch.isnan(values).any()):
            kinds.add("nan")
        if bool(torch.isposinf(values).any()):
            kinds.add("inf")
        if bool(torch.isneginf(values).any()):
            kinds.add("-inf")
    return frozenset(kinds)


def _ranges(flat: Flat) -> str:
    """Return the smallest and largest element of each floating input: ``input min -0.3, max 2``."""
    shown = []
    for path, tensor in flat.tensors:
        if tensor.is_floating_point() and tensor.numel() and not tensor.is_meta:
            low, high = tensor.detach().double().aminmax()
            shown.append(f"{path} min {low.item():.4g}, max {high.item():.4g}")
    return "; ".join(shown)
