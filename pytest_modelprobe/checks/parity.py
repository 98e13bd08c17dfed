"""Equal results on another device, in another dtype or layout.

Each check runs a copy of the model in the other way and compares it with a reference run. Kernels may sum in another
order, so the tolerance is wider than between two runs of the same kind.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from pytest_modelprobe.comparison.text import percent
from pytest_modelprobe.extension import explained
from pytest_modelprobe.models import (
    flatten,
    has_dense_storage,
    unexpanded,
)
from pytest_modelprobe.record import ROOT
from pytest_modelprobe.runs import noise
from pytest_modelprobe.text import count

from .agreement import (
    Disagreement,
    check_not_random,
    disagreements,
    gradient_error,
    in_backward_order,
    negligible,
    violation_of,
)
from .check import check, check_native
from .outcome import NotApplicableError, Violation
from .rounding import is_rounded, limit, rms
from .session import LayerTensor, PreparedModel, Trace, Vary

_Only: TypeAlias = Callable[[list[Disagreement]], list[Disagreement]]
"""Leaves out some of what differs."""

ELSEWHERE = 1e-3
"""Relative error between kernels that sum in another order; TensorFloat-32 rounds to 1e-3."""

_DEVICE = "Look for code that depends on the device, and for tensors that are created without device=."
_DTYPE = "Look for what amplifies rounding: a difference of large numbers, a division by a small one, an exp."
_HARD_CODED = "Look for a hard-coded dtype, and for tensors that are created without dtype=."
_LAYOUT = "Look for as_strided, .storage() and other code that depends on strides; call .contiguous() before it."
_VIEW = "Look for a view that should be a reshape, and for code that depends on strides."


@check
def device_parity(
    prepared: PreparedModel, *, device: str | torch.device = "cuda", tolerance: float | None = None
) -> Violation | str:
    """Check that the model returns the same on another device.

    If it does not, also in float64, the first operation that differs there is named, with its line.

    Args:
        prepared: The model and its inputs.
        device: The other device.
        tolerance: The largest relative change that passes, by default 1e-3. A model in half precision is computed in
            float32 on both.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.device_parity.outcome(probe, nn.Linear(3, 2), probe.randn(4, 3), device="nowhere"))
    device_parity is not applicable to Linear: there is no device nowhere
    """
    try:
        torch.empty(1, device=device)
    except Exception as error:
        raise NotApplicableError(f"there is no device {device}") from error
    one = prepared.reference(mode="eval")
    two = prepared.run(mode="eval", model=prepared.copied(device), vary=lambda _, x: x.to(device))
    found = agreeing(one, two, f"on {device}", tolerance, _DEVICE, least=ELSEWHERE, unless_random=prepared)
    if not isinstance(found, Violation):
        return found

    def run(on: str | torch.device | None = None) -> None:
        trace = _in_dtype(prepared, torch.float64, device=on)
        if trace.error is not None:
            raise trace.error

    steps = explained("runs", functools.partial(run, device), run)
    return dataclasses.replace(found, advice=" ".join([*steps, _DEVICE]))


@check_native
def dtype_parity(
    prepared: PreparedModel, *, dtype: torch.dtype = torch.float64, tolerance: float | None = None
) -> Violation | str:
    """Check that the model returns the same in another floating dtype, and returns it in that dtype.

    In float64, the default, a difference beyond rounding in float32 is amplified by the model. What is zero but for
    rounding, as a log determinant may be, passes if one unit in the last place of inputs and parameters changes it as
    much. A layer that still returns float32 has a hard-coded dtype, unless the code around it casts what it returns, as
    that of a sinusoidal embedding may. A run in bfloat16 shows whether it does: else that run returns float32, or
    raises.

    Args:
        prepared: The model and its inputs.
        dtype: The other dtype: float64, float32, float16 or bfloat16.
        tolerance: The largest relative change that passes. By default it is 1e-3, and more if ``dtype`` is narrow. A
            model in half precision is compared as it is in float32.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.dtype_parity(probe, nn.Linear(3, 2), probe.randn(4, 3)))
    dtype_parity holds for Linear: 1 output in float64
    """
    if any(x.is_complex() for x in (*nn.Module.parameters(prepared.model), *nn.Module.buffers(prepared.model))):
        raise NotApplicableError("the model has complex parameters or buffers, which Module.to makes real")
    one = prepared.reference(mode="eval")
    quantized = ("quantized" in type(module).__module__ for module in prepared.layers.modules.values())
    if any(quantized) or any(x.is_quantized for _, x in flatten("output", one.output).tensors):
        raise NotApplicableError("the model is quantized and computes in no other dtype")
    with prepared.in_float32():
        precise = prepared.reference(mode="eval") if prepared.is_rounded else one
    two = _in_dtype(prepared, dtype)
    name = _name(dtype)
    if two.error is not None:  # a hard-coded dtype fails in every other one; a kernel may be missing in one
        another = torch.float64 if dtype == torch.bfloat16 else torch.bfloat16
        if _in_dtype(prepared, another).error is None:
            raise NotApplicableError(f"the model runs in {_name(another)} and not in {name}: {two.failure}")
    elif first := _leading_out(prepared, one, two, dtype):
        return Violation.at(
            first.layer,
            f"returns {_name(first.tensor.dtype)} in a model of {name}",
            columns=("tensor", "dtype"),
            rows=tuple((given.where, _name(given.tensor.dtype)) for given in _kept(one, two, dtype)),
            advice=_HARD_CODED,
        )
    floating = [given.tensor for given in (*precise.tensors, *two.tensors) if given.tensor.is_floating_point()]
    widest = max((limit(x, tolerance, least=ELSEWHERE) for x in floating), default=ELSEWHERE)
    advice = _DTYPE if two.error is None else _HARD_CODED
    only = functools.partial(_beyond_rounding, prepared, two) if (dtype, tolerance) == (torch.float64, None) else list
    return agreeing(precise, two, f"in {name}", widest, advice, only=only, unless_random=prepared)


_REPEATS = 3
"""How often inputs and parameters are rounded at random: the effects on one output may cancel."""

_UNITS = 10
"""How many times what one unit in the last place of all numbers does the rounding of several operations may do."""


def _beyond_rounding(prepared: PreparedModel, two: Trace, found: list[Disagreement]) -> list[Disagreement]:
    """Return the differences that are large beside the parameters, or beside what rounding all that is given does."""
    moves = [noise.Perturbation(f"rounded {i}", far=False) for i in range(_REPEATS)]
    traces = [_in_dtype(prepared, torch.float64, by) for by in moves]
    there, *moved = ({given.where: given.tensor for given in trace.tensors} for trace in (two, *traces))
    usual = max(map(rms, nn.Module.parameters(prepared.model)), default=0.0)

    def is_rounding(one: Disagreement) -> bool:
        where, x = one.layer_tensor.where, one.layer_tensor.tensor
        if one.note or not all(where in run for run in moved):
            return False
        far = rms(there[where] - x)
        return far <= limit(x) * usual and far <= _UNITS * max(rms(run[where] - there[where]) for run in moved)

    return [one for one in found if not is_rounding(one)]


def _kept(one: Trace, two: Trace, dtype: torch.dtype) -> list[LayerTensor]:
    """Return the outputs of layers that stay in a dtype of their own in a model of ``dtype``."""
    own = {given.where: given.tensor.dtype for given in one.tensors}
    return [
        given
        for given in two.outputs
        if given.tensor.is_floating_point()
        and given.tensor.dtype != dtype
        and own.get(given.where) != dtype
        # A loss is often summed in float32 on purpose.
        and not (given.layer == ROOT and not given.tensor.dim())
    ]


def _leading_out(prepared: PreparedModel, one: Trace, two: Trace, dtype: torch.dtype) -> LayerTensor | None:
    """Return the first output in another dtype from which an output of the model is made without a cast.

    What a layer computes in float32, and the code around it casts, is meant to be precise. So the result is `None` if
    every such output is cast.
    """
    kept = _kept(one, two, dtype)
    if any(given.is_final for given in kept):
        inside = [given for given in two.outputs if given.tensor.is_floating_point() and not given.is_final]
        after = max((i for i, given in enumerate(inside) if given not in kept), default=-1)
        return next(given for given in kept if given in inside[after + 1 :] or given.is_final)
    if kept and dtype.itemsize > 2:  # a wide dtype takes in what is added to it; of a narrow one float32 remains
        narrow = _in_dtype(prepared, torch.bfloat16)
        if narrow.error is not None or any(given.is_final for given in _kept(one, narrow, torch.bfloat16)):
            return kept[0]
    return None


def _in_dtype(
    prepared: PreparedModel,
    dtype: torch.dtype,
    by: noise.Perturbation | None = None,
    device: str | torch.device | None = None,
) -> Trace:
    """Return a run in a dtype, with inputs and parameters that are perturbed before they are converted and moved."""

    def cast(path: str, x: Tensor) -> Tensor:
        x = (by.input(x, path) if by else x).to(device=device)
        return x.to(dtype) if x.is_floating_point() else x.to(dtype.to_complex()) if x.is_complex() else x

    model, own = prepared.copied(dtype), dict(prepared.model.named_parameters())
    for name, p in model.named_parameters() if by else ():
        if by and has_dense_storage(p):
            unexpanded(p.data).copy_(unexpanded(by.input(own[name].data, name)))
    return prepared.run(mode="eval", model=model.to(device=device), vary=cast)


@check
def layout_parity(prepared: PreparedModel, *, tolerance: float | None = None) -> Violation | str:
    """Check that the outputs do not depend on the strides of the inputs: channels last, and not contiguous.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.layout_parity(probe, nn.Conv2d(3, 4, 3), probe.randn(2, 3, 8, 8)))
    layout_parity holds for Conv2d: 1 output with inputs channels last, and not contiguous
    """
    layouts = {"not contiguous": _strided}
    if any(x.dim() in (4, 5) for _, x in prepared.dense):
        layouts = {"channels last": _channels_last, **layouts}
    if not any(x.dim() for _, x in prepared.dense):
        raise NotApplicableError("no input has a layout")
    one = prepared.reference(mode="eval")
    dense = {path for path, _ in prepared.dense}
    for name, layout in layouts.items():

        def vary(path: str, x: Tensor, layout: Vary = layout) -> Tensor:
            return layout(path, x) if path in dense else x

        two = prepared.run(mode="eval", vary=vary)
        advice = _LAYOUT if two.error is None else _VIEW
        found = agreeing(one, two, f"with inputs {name}", tolerance, advice, unless_random=prepared)
        if isinstance(found, Violation):
            return found
    return f"{count(len(one.outputs), 'output')} with inputs {', and '.join(layouts)}"


# --- comparing ----------------------------------------------------------------------------------------------------


def agreeing(
    one: Trace,
    two: Trace,
    how: str,
    tolerance: float | None,
    advice: str,
    *,
    least: float = 0.0,
    only: _Only = list,
    unless_random: PreparedModel | None = None,
) -> Violation | str:
    """Return where the layers return something else in another run, or a summary.

    Raises:
        NotApplicableError: They do, and the model that is given is random in evaluation mode.
    """
    if two.error is not None:
        return Violation(layer=two.raised_in, line=f"{two.failure}, {how}", advice=advice)
    found = disagreements(one, two, tolerance=tolerance, least=least)
    if not found or not (found := only(found)):
        return f"{count(len(one.outputs), 'output')} {how}"
    if unless_random is not None:
        check_not_random(unless_random)
    return violation_of(found, f"returns another {{path}} {how}: {{changed}}", advice)


def other_gradients(one: Trace, two: Trace, tolerance: float | None, how: str, advice: str) -> Violation | None:
    """Return the parameters that get another gradient in another run."""
    found = []
    zero = negligible(one)
    for name, gradient in one.gradients.items():
        other = two.gradients.get(name)
        far = gradient_error(gradient, other, zero)
        if not far <= (ELSEWHERE if gradient is None else limit(gradient, tolerance, least=ELSEWHERE)):
            what = "none arrives" if other is None else "one arrives" if gradient is None else percent(far)
            found.append((name, what))
    if not found:
        return None
    if any(what != "none arrives" for _, what in found):  # a wrong one begins at the loss, a lost one at the input
        found = in_backward_order(found, one)
    return Violation.first_of(
        found,
        f"gets another gradient {how}: {found[0][1]}",
        columns=("parameter", "gradient changed by"),
        advice=advice,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _strided(_: str, x: Tensor) -> Tensor:
    """Return a tensor with a gap behind each element in memory, and its axes in reverse order in memory.

    The axes of integers keep their order: labels that a loss flattens by a view come row by row from every loader.
    """
    if not x.dim():
        return x
    back = tuple(range(x.dim()))[:: -1 if is_rounded(x) else 1]
    return torch.stack([x.permute(back)] * 2, -1)[..., 0].permute(back)


def _channels_last(_: str, x: Tensor) -> Tensor:
    if x.dim() not in (4, 5):
        return x
    return x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
