"""Outputs and gradients that are not finite, and the first layer where this begins.

No other check applies to such a model, because NaN agrees with NaN. Values inside that do not reach the output may be
infinite: masks of attention are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelprobe.models import CallTracer, Layers, ModuleCall, flatten, run_eagerly
from pytest_modelprobe.record import ROOT, parent
from pytest_modelprobe.runs import Source, SourceMode
from pytest_modelprobe.text import Cell, listed

from .agreement import in_backward_order
from .outcome import NotApplicableError, Violation
from .rounding import plain, same
from .session import PreparedModel, Trace

_MODES = {"eval": " in evaluation mode", "train": " in training mode", None: ""}

_KINDS = ("nan", "inf", "-inf")

_OUTPUT = (
    "Look for a division by 0, a logarithm or a root of what is not above 0, an exp that overflows, and a row of "
    "attention of which everything is masked. Write an intended infinity as a constant: masked_fill(mask, -inf)."
)
_GRADIENT = (
    "It begins between there and the loss. Look for a root, a norm or a logarithm at 0, a torch.where around one, and "
    "a division by what may be 0."
)


def check_finite(prepared: PreparedModel, trace: Trace, options: Mapping[str, Any]) -> None:
    """Check that the outputs, the loss and the gradients of a run are finite: NaN agrees with NaN.

    Raises:
        NotApplicableError: A run returned something that is not finite, or a gradient that is not.
    """
    found = not_finite(prepared, trace, options)
    if found is not None:
        raise NotApplicableError(f"not finite at {found.layer}")


def not_finite(prepared: PreparedModel, trace: Trace, options: Mapping[str, Any]) -> Violation | None:
    """Return where the outputs, the loss or the gradients of a run begin to be not finite.

    Values inside the model that do not reach the output, such as masks, may be infinite or NaN.

    Args:
        prepared: The model and its inputs.
        trace: The trace of the run.
        options: Options of the run, to repeat it.
    """
    when = _MODES[options.get("mode")]
    return _of_outputs(prepared, trace, options, when) or _of_loss(prepared, trace, when) or _of_gradients(trace, when)


def _of_outputs(prepared: PreparedModel, trace: Trace, options: Mapping[str, Any], when: str) -> Violation | None:
    where = {path: _infinite(tensor) for path, tensor in flatten("output", trace.output).tensors if _kinds(tensor)}
    meant = prepared.meant.get(options.get("mode"), {})
    if all(path in meant and same(x, meant[path]) for path, x in where.items()):
        return None  # the operations were followed before, which takes long
    sources = _sources(prepared, trace, options)
    bad = [kind for kind in _KINDS if kind in sources and not (sources[kind] or _UNKNOWN).given]
    if not bad:
        prepared.meant[options.get("mode")] = where
        return None
    source = sources[bad[0]]
    rows = [(given.where, *_counted(given.tensor)) for given in trace.tensors if {*_kinds(given.tensor)} & {*bad}]
    layer = source.layer if source else next((g.layer for g in trace.tensors if bad[0] in _kinds(g.tensor)), ROOT)
    return Violation.at(
        layer,
        f"is not finite{when}: the model returns {_kinds_text(bad)}" + (f", from {source.text}" if source else ""),
        columns=("tensor", "NaN", "infinite", "elements"),
        rows=tuple(rows),
        advice=_OUTPUT,
    )


_UNKNOWN = Source("", "")


def _sources(prepared: PreparedModel, trace: Trace, options: Mapping[str, Any]) -> dict[str, Source | None]:
    """Return which kinds are in the output, each with its source, by repeating the run."""
    model = options.get("model", prepared.model)
    layers = Layers(model)
    calls = CallTracer(layers.modules, ModuleCall)
    mode = SourceMode(_held(prepared, model), lambda: calls.innermost)
    with run_eagerly(layers), calls, mode:
        again = prepared.run(**{**options, "backward": False, "traced": False})
    found: dict[str, Source | None] = {}
    for tensor in _tensors(trace.output):
        found |= dict.fromkeys(_kinds(tensor))
    for tensor in _tensors(again.output):
        for kind, source in (mode.sources(tensor) if tensor.layout is torch.strided else {}).items():
            if found.get(kind) is None or not (source or _UNKNOWN).given:
                found[kind] = source
    return found


def _held(prepared: PreparedModel, model: nn.Module) -> dict[int, Source]:
    """Return the tensors that exist before the run, by address, each as a source."""
    held = {x: Source(path, path, given=True) for path, x in prepared.inputs}
    held |= {x: Source(parent(name), name, given=True) for name, x in model.named_buffers()}
    held |= {x: Source(parent(name), name) for name, x in model.named_parameters()}
    strided = {x: source for x, source in held.items() if x.layout is torch.strided and not x.is_nested}
    return {x.untyped_storage().data_ptr(): source for x, source in strided.items()}


def _of_loss(prepared: PreparedModel, trace: Trace, when: str) -> Violation | None:
    if not prepared.has_loss or trace.loss is None or trace.loss.isfinite():
        return None
    said = f"computes a loss of {trace.loss.item()}{when} from finite outputs"
    return Violation.at(ROOT, said, advice="Look for a division or a logarithm in the loss.")


def _of_gradients(trace: Trace, when: str) -> Violation | None:
    bad = [(name, g) for name, g in trace.gradients.items() if g is not None and _kinds(g)]
    if not bad:
        return None
    found = in_backward_order(bad, trace)
    return Violation.first_of(
        ((name, *_counted(gradient)) for name, gradient in found),
        f"gets a gradient that is not finite{when}: {_kinds_text(_kinds(found[0][1]))}",
        columns=("gradient of", "NaN", "infinite", "elements"),
        advice=_GRADIENT,
    )


def _tensors(output: Any) -> list[Tensor]:
    return [tensor for _, tensor in flatten("output", output).tensors]


def _kinds(tensor: Tensor) -> list[str]:
    """Return which of NaN, inf and -inf occur in a tensor.

    >>> _kinds(torch.tensor([0.0, math.inf, math.nan]))
    ['nan', 'inf']
    """
    x = _values(tensor)
    if x.isfinite().all():
        return []
    return [kind for kind, there in zip(_KINDS, (x.isnan(), x == math.inf, x == -math.inf), strict=True) if there.any()]


def _infinite(tensor: Tensor) -> Tensor:
    """Return a tensor with zeros in place of what is finite."""
    x = _values(tensor)
    return x.where(~x.isfinite(), torch.zeros_like(x))


def _counted(tensor: Tensor) -> tuple[Cell, ...]:
    x = _values(tensor)
    return int(x.isnan().sum()), int(x.isinf().sum()), tensor.numel()


def _values(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as real numbers."""
    tensor = tensor.detach()
    if tensor.is_nested:
        tensor = torch.nested.to_padded_tensor(tensor, 0.0 if tensor.is_floating_point() else 0)
    tensor = plain(tensor)
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _kinds_text(kinds: list[str]) -> str:
    return listed([kind.replace("nan", "NaN") for kind in kinds])
