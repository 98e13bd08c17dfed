"""Where something non-finite began: the operation and the line of the model's source."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode, resolve_name

from .flatten import Flat, flatten, flatten_call
from .record import Operation

_OURS = f"{Path(__file__).parent}{os.sep}"
_NO_MODELS = (f"{Path(torch.__file__).parent}{os.sep}", "<frozen ")
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep


def _is_model_code(path: str) -> bool:
    """Whether a source file is neither torch's, nor Python's, nor ours."""
    if path.startswith(_STDLIB) and "site-packages" not in path:
        return False
    return not path.startswith((_OURS, *_NO_MODELS))


class OriginMode(TorchFunctionMode):
    """Finds the first torch operation that gives a NaN, or an infinity of a new sign, which no input of it has.

    A constant is an input too: ``masked_fill(mask, -inf)`` begins nothing. Where an infinity comes first, the operation
    that makes a NaN is looked for besides.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Operation | None = None
        self._complete = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._complete:
            return func(*args, **kwargs)
        before = flatten_call(args, kwargs)
        had, ranges = _kinds(before), _ranges(before)  # before the call: it may write in place
        output = func(*args, **kwargs)
        new = _kinds(flatten("", output)) - had
        if new and (self.found is None or "nan" in new):
            self._add(Operation(name=_name(func), location=_model_line(sys._getframe(1)), detail=ranges))
            self._complete = "nan" in new
        return output

    def _add(self, operation: Operation) -> None:
        if self.found is None:
            self.found = operation
        else:
            where = dataclasses.replace(operation, detail="")
            self.found = dataclasses.replace(self.found, detail=f"{self.found.detail}; the first NaN in {where}")


def find_origin(forward: Callable[[], Any]) -> Operation | None:
    """Run ``forward`` and return the operation in which the first non-finite value began, if a torch call shows it."""
    mode = OriginMode()
    with mode:
        forward()
    return mode.found


def find_gradient_origin(make_loss: Callable[[], torch.Tensor]) -> Operation | None:
    """Run forward and backward; return the operation whose backward first made something that is not finite.

    Every node of the graph is looked at, for anomaly detection sees a NaN but not the infinity that became one. It is
    used for the lines of the forward alone, which it keeps with the nodes.
    """
    found: list[Operation] = []

    def looking(node: Node) -> Callable[..., None]:
        def look(given: tuple[torch.Tensor | None, ...], taken: tuple[torch.Tensor | None, ...]) -> None:
            made = frozenset() if found else _kinds(flatten("", given))
            if made:  # for the first time, so what it took was finite
                kinds = " and ".join(sorted(kind.replace("nan", "NaN") for kind in made))
                detail = f"which made {kinds} of a finite gradient"
                found.append(Operation(name=node.name(), location=_forward_line(node), detail=detail))

        return look

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
        with torch.autograd.detect_anomaly(check_nan=False):
            loss = make_loss()
    handles = [node.register_hook(looking(node)) for node in _nodes(loss.grad_fn)]
    try:
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _nodes(start: Node | None) -> Iterator[Node]:
    """Yield the nodes of a graph, each once."""
    waiting, seen = [start], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
            yield node


def _forward_line(node: Node) -> str | None:
    """Return the model's line that made a node: anomaly detection keeps the stack with it."""
    metadata = cast("dict[str, list[str]]", node.metadata)  # annotated as a method
    for entry in reversed(metadata.get("traceback_", [])):
        path, _, rest = entry.strip().removeprefix('File "').partition('", line ')
        if path.startswith(_OURS):
            return None
        if rest and _is_model_code(path):
            return f"{Path(path).name}:{rest.partition(',')[0]}"
    return None


def _model_line(frame: FrameType | None) -> str | None:
    """Return file and line of the innermost frame of the model: one that is neither torch's nor Python's."""
    for caller, line in traceback.walk_stack(frame):
        path = caller.f_code.co_filename
        if path.startswith(_OURS):
            return None  # all of it torch's own modules: what calls us is no part of the model
        if _is_model_code(path):
            return f"{Path(path).name}:{line}"
    return None


def _name(function: Any) -> str:
    return str(resolve_name(function) or getattr(function, "__name__", function))


def _kinds(flat: Flat) -> frozenset[str]:
    """Return which non-finite kinds are among the tensors and the plain numbers."""
    kinds = {_kind(value) for value in flat.plain.values() if isinstance(value, float)}
    for _, values in _floating(flat):
        if values.isfinite().all():
            continue
        kinds |= {kind for kind in ("nan", "inf", "-inf") if _has(values, kind)}
    return frozenset(filter(None, kinds))


def _kind(value: float) -> str | None:
    return None if math.isfinite(value) else str(value)


def _has(values: torch.Tensor, kind: str) -> bool:
    return bool((values.isnan() if kind == "nan" else values == float(kind)).any())


def _ranges(flat: Flat) -> str:
    """Return the smallest and largest element of each floating input: ``input min -0.3, max 2``."""
    shown = []
    for path, values in _floating(flat):
        low, high = values.double().aminmax()
        shown.append(f"{path} min {low.item():.4g}, max {high.item():.4g}")
    return "; ".join(shown)


def _floating(flat: Flat) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what has floating elements to look at: nothing sparse, quantised or without contents."""
    for path, tensor in flat.tensors:
        looked_into = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)
        if not looked_into or not tensor.numel():
            continue
        if tensor.is_complex():
            yield path, torch.view_as_real(tensor.detach().resolve_conj())
        elif tensor.is_floating_point():
            yield path, tensor.detach().float() if tensor.element_size() < 2 else tensor.detach()
