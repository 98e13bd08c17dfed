"""The origin of values that are not finite: the operation and the line of the model's source.

Hooks see only what layers return. To find the operation, the model runs once more, under a function mode that looks at
each call of torch. That is slow, so it is done only if a value was not finite.

An infinity may be meant, as the ``-inf`` of an attention mask is. So only a kind of value (NaN, infinity of one sign)
that no input of an operation has counts as made by it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode, resolve_name

from pytest_modelprobe.models import Flat, flatten, flatten_call, lacks_memory, version
from pytest_modelprobe.record import Operation

_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_NO_MODELS = (f"{Path(torch.__file__).parent}{os.sep}", "<frozen ")
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep


def _is_model_code(path: str) -> bool:
    """Whether a source file is neither torch's, nor Python's, nor ours."""
    if path.startswith(_STDLIB) and "site-packages" not in path:
        return False
    return not path.startswith((_OURS, *_NO_MODELS))


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """The source of a NaN or an infinity in the output of a model."""

    layer: str
    """The innermost layer that was running, or the owner of the tensor."""
    text: str
    """The operation, or ``fc1.weight, which holds NaN``."""
    given: bool = False
    """Whether it is an infinity that the model did not compute."""


class SourceMode(TorchFunctionMode):
    """Follows values that are not finite through all operations, from the operation or tensor that they come from.

    An infinity counts as given if it is a constant, as in ``masked_fill(mask, -inf)``, if a tensor held it before the
    run, or if it is negative and computed from zeros and ones alone, as in ``mask.log()``.

    Args:
        held: Sources of the values that tensors held before the run, by address in memory.
        running: Returns the innermost layer that is running.
    """

    def __init__(self, held: Mapping[int, Source], running: Callable[[], str]) -> None:
        super().__init__()
        self._held, self._running = held, running
        self.made: dict[str, Operation] = {}
        """The first operation that made each kind of value, in order; none of what is given."""
        # By address, which views share. Each is kept with a tensor, so that the address is not used again.
        self._known: dict[int, tuple[torch.Tensor, dict[str, Source | None]]] = {}

    def sources(self, tensor: torch.Tensor) -> dict[str, Source | None]:
        """Return which kinds are in a tensor, each with its source, or `None` if the source is not known."""
        kinds = _kinds(flatten("", tensor))
        if not kinds:
            return {}
        address = tensor.untyped_storage().data_ptr()
        _, known = self._known.get(address, (tensor, {}))
        held = self._held.get(address)
        if held is not None:
            texts = {kind: f"{held.text}, which holds {kind.replace('nan', 'NaN')}" for kind in kinds}
            of_held = {kind: Source(held.layer, texts[kind], held.given and kind != "nan") for kind in kinds}
            known = {**of_held, **known}
        return {kind: known.get(kind) for kind in kinds}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        before = flatten_call(args, kwargs)
        constants = {_kind(value) for value in before.plain.values() if isinstance(value, float)}
        coming: dict[str, Source | None] = {
            kind: Source(self._running(), str(operation_of(func)), kind != "nan") for kind in constants if kind
        }
        for _, tensor in before.tensors:
            for kind, source in self.sources(tensor).items():
                # What the model computed comes first, then what is not known, then what it was given.
                coming[kind] = min(
                    source, coming.get(kind, source), key=lambda one: 1 if one is None else 2 * one.given
                )
        versions = [version(tensor) for _, tensor in before.tensors]
        # Most operations make nothing of the kind, and what they were given can be looked at later, unless they write
        # in place.
        facts = _facts(before) if _name(func).endswith("_") or kwargs.get("inplace") else None
        output = func(*args, **kwargs)
        written = [x for x, v in zip(before.tensors, versions, strict=True) if version(x[1]) != v]
        for _, tensor in (*flatten("", output).tensors, *written):
            kinds = _kinds(flatten("", tensor))
            if kinds - coming.keys():
                ranges, of_mask = facts or _facts(before)
                operation = operation_of(func, ranges)
                for kind in kinds - coming.keys():
                    given = of_mask and kind == "-inf"
                    coming[kind] = Source(self._running(), str(operation), given)
                    if not given:
                        self.made.setdefault(kind, operation)
            if kinds:
                self._known[tensor.untyped_storage().data_ptr()] = tensor, {kind: coming[kind] for kind in kinds}
        return output


def operation_of(func: Any, detail: str = "") -> Operation:
    """Return the operation that a function mode is called for, with the line of the model that calls it.

    It is called in `__torch_function__`.
    """
    location = None
    for caller, line in traceback.walk_stack(sys._getframe(2)):
        path = caller.f_code.co_filename
        if path.startswith(_OURS):
            break  # the model is made of torch's own modules, and what called us is no part of it
        if _is_model_code(path):
            location = f"{Path(path).name}:{line}"
            break
    return Operation(name=_name(func), location=location, detail=detail)


def _facts(flat: Flat) -> tuple[str, bool]:
    """Return the ranges of the tensors, and whether they hold zeros and ones, and nothing else."""
    shown, bounds, whole = [], set(), True
    for path, values in _floating(flat):
        low, high = values.double().aminmax()
        shown.append(f"{path} min {low.item():.4g}, max {high.item():.4g}")
        bounds |= {low.item(), high.item()}
        whole = whole and bool(((values == 0) | (values == 1)).all())
    return "; ".join(shown), whole and bounds == {0.0, 1.0}


def find_origin(forward: Callable[[], Any]) -> Operation | None:
    """Run ``forward`` and return the first operation that made a value not finite, or `None` if no torch call did.

    If that was an infinity, its details name the first that made a NaN too.
    """
    mode = SourceMode({}, str)
    with mode:
        forward()
    first, nan = next(iter(mode.made.values()), None), mode.made.get("nan")
    if first is None or nan is None or nan is first:
        return first
    return dataclasses.replace(first, detail=f"{first.detail}; the first NaN in {dataclasses.replace(nan, detail='')}")


def find_gradient_origin(make_loss: Callable[[], torch.Tensor]) -> Operation | None:
    """Run forward and backward, and return the operation whose backward first made a gradient not finite.

    All nodes of the graph are hooked, because torch's anomaly detection reports a NaN but not the infinity before it.
    Anomaly detection is used only to keep the lines of the forward with the nodes.
    """
    found: list[Operation] = []

    def hook_of(node: Node) -> Callable[..., None]:
        def hook(given: tuple[torch.Tensor | None, ...], taken: tuple[torch.Tensor | None, ...]) -> None:
            made = frozenset() if found else _kinds(flatten("", given))
            if made:  # it is the first node with one, so the gradient that it was given is finite
                kinds = " and ".join(sorted(kind.replace("nan", "NaN") for kind in made))
                detail = f"which made {kinds} of a finite gradient"
                found.append(Operation(name=node.name(), location=_forward_line(node), detail=detail))

        return hook

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
        with torch.autograd.detect_anomaly(check_nan=False):
            loss = make_loss()
    handles = [node.register_hook(hook_of(node)) for node in graph_nodes(loss.grad_fn)]
    try:
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def graph_nodes(start: Node | None) -> Iterator[Node]:
    """Yield the nodes of a graph, each once."""
    waiting, seen = [start], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
            yield node


def _forward_line(node: Node) -> str | None:
    """Return the model's line that made a node. Anomaly detection keeps the stack with the node."""
    metadata = cast("dict[str, list[str]]", node.metadata)  # torch annotates it as a method
    for entry in reversed(metadata.get("traceback_", [])):
        path, _, rest = entry.strip().removeprefix('File "').partition('", line ')
        if path.startswith(_OURS):
            return None
        if rest and _is_model_code(path):
            return f"{Path(path).name}:{rest.partition(',')[0]}"
    return None


def _name(function: Any) -> str:
    return str(resolve_name(function) or getattr(function, "__name__", function))


def _kinds(flat: Flat) -> frozenset[str]:
    """Return which of NaN, inf and -inf occur in the tensors and the plain numbers."""
    kinds = {_kind(value) for value in flat.plain.values() if isinstance(value, float)}
    for _, values in _floating(flat):
        if values.isfinite().all():
            continue
        has = {"nan": values.isnan(), "inf": values == math.inf, "-inf": values == -math.inf}
        kinds |= {kind for kind, where in has.items() if where.any()}
    return frozenset(filter(None, kinds))


def _kind(value: float) -> str | None:
    return None if math.isfinite(value) else str(value)


def _floating(flat: Flat) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the floating tensors as real ones, except sparse, quantized, nested, meta and empty ones."""
    for path, tensor in flat.tensors:
        looked_into = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)
        if not looked_into or not tensor.numel() or lacks_memory(tensor):
            continue
        if tensor.is_complex():
            yield path, torch.view_as_real(tensor.detach().resolve_conj())
        elif tensor.is_floating_point():
            yield path, tensor.detach().float() if tensor.element_size() < 2 else tensor.detach()
