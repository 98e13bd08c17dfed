"""Implementations of the attention of one model, which mean the same.

They are kept by hand, and some are rarely run by tests. A scale or a mask that is left out in one of them changes what
a model returns for its users alone.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelprobe.checks.agreement import Disagreement, Pairs, check_not_random, disagreements, violation_of
from pytest_modelprobe.checks.check import check
from pytest_modelprobe.checks.outcome import NotApplicableError, Violation, line_of
from pytest_modelprobe.checks.positions import MaskedOut, left_out
from pytest_modelprobe.checks.rounding import as_double, is_rounded
from pytest_modelprobe.checks.session import LayerTensor, PreparedModel, Trace
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import Layers
from pytest_modelprobe.record import ROOT
from pytest_modelprobe.text import listed

_IDS, _EMBEDS, _MASK = "input_ids", "inputs_embeds", "attention_mask"

_IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention")

_COMPILED = {"flex_attention"}

_PRECISE = 1e-4
"""Largest relative error in float64, as an eager softmax computes in float32."""

_FEWEST = 4
"""Positions from which on some of them are padded."""


@check
def attention_agrees(
    prepared: PreparedModel, *, implementations: Sequence[str] | None = None, tolerance: float | None = None
) -> Violation | str:
    """Check that the implementations of attention of a transformers model return the same: eager, sdpa, flex_attention.

    The model runs with each of them as it is given, and, if it takes an ``attention_mask`` of shape (batch, positions),
    with padding on the left and on the right too. What the first one returns is compared with what each other one does.

    With padding, only outputs at real positions are compared: what a query at a padded position sees may differ. What
    has no axis of positions, such as a pooled output or a loss, may be computed from these, and is not compared then.
    Attention weights are not compared, as fused implementations return none. A model in half precision is computed in
    float32, where a difference does not hide in rounding. A difference is looked at again in float64, which tells it
    from rounding. It is a hint if the output agrees all the same, as small random weights hide much. Which of the two
    is wrong is not known.

    Args:
        prepared: The model, or one with models of transformers inside, and its inputs.
        implementations: Names of implementations, two or more. By default they are ``eager``, ``sdpa`` and, except on
            the CPU, ``flex_attention``, as far as the model has them. On the CPU, ``flex_attention`` compiles for
            about a minute.
        tolerance: The largest relative change that passes. By default it follows from the dtype: 1e-4 in float32.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.attention_agrees.outcome(probe, nn.Linear(3, 2), probe.randn(4, 3)))
    attention_agrees is not applicable to Linear: it has no set_attn_implementation(), as models of transformers do
    """
    names = tuple(_IMPLEMENTATIONS if implementations is None else implementations)
    if len(set(names)) < 2:
        raise UsageError(f"implementations= are two or more; got {implementations!r}")
    prepared.reference(mode="eval")
    if not _switched(prepared.layers.modules[ROOT]):
        raise NotApplicableError("it has no set_attn_implementation(), as models of transformers do")
    cases = list(_cases(prepared))
    models: dict[str, nn.Module] = {}
    absent: list[str] = []
    for name in names:
        if implementations is None and name in _COMPILED and prepared.probe.device.type == "cpu":
            absent.append(f"{name} (it compiles, which takes long on the CPU: name it in implementations=)")
            continue
        try:
            models[name] = _with_implementation(prepared, name)
            _run(prepared, cases[0], models[name])
        except _AbsentError as reason:
            models.pop(name, None)
            absent.append(f"{name} ({reason})")
    if implementations is not None and absent:
        raise NotApplicableError(f"not all implementations run here: {listed(absent)}")
    if len(models) < 2:
        raise NotApplicableError(f"there are no two implementations: {listed(absent)}")
    return _same_attention(prepared, cases, models, absent, tolerance)


def _same_attention(
    prepared: PreparedModel,
    cases: Sequence[_Case],
    models: dict[str, nn.Module],
    absent: list[str],
    tolerance: float | None,
) -> Violation | str:
    """Return whether models, by their implementation, return the same in each case."""
    (first, reference), *others = models.items()
    equal = dict.fromkeys((name for name, _ in others), True)
    hint: Violation | None = None
    compared: list[str] = []
    for case in cases:
        traces: dict[str, Trace] = {}
        for name, model in models.items():
            try:
                traces[name] = _run(prepared, case, model)
            except _AbsentError as reason:
                absent.append(f"{name} {case.how} ({reason})")
        if first not in traces or len(traces) < 2:
            continue
        compared.append(case.how)
        one = traces[first]
        for name, model in others:
            if name not in traces:
                continue
            two = traces[name]
            equal[name] &= not _compared(one, two, case, 0.0)
            found = _compared(one, two, case, tolerance)
            if found:
                check_not_random(prepared)
                found = _beyond_rounding(prepared, case, (reference, model), found, tolerance)
            if not found:
                continue
            at = " at real positions" if case.excluded else ""
            violation = violation_of(
                found,
                f"differs between {first} and {name}: {{path}} {{changed}}{at}, {case.how}",
                f"Compare what the code of {first} and of {name} does with the scale, the mask, dropout and the "
                "heads of keys. Which of the two is wrong is not known.",
            )
            if _reaches_output(found):
                return violation
            hint = hint or dataclasses.replace(violation, line=f"{violation.line}; the output agrees", level="hint")
    if hint is not None:
        return hint
    text = f"{listed(list(models))} agree, {listed(compared)}"
    if same := [name for name, bits in equal.items() if bits]:
        text += f"; the same bits as {first}, so that the model may not look at the setting: {listed(same)}"
    return text + (f"; not run: {listed(absent)}" if absent else "")


# --- implementations --------------------------------------------------------------------------------------------------


class _AbsentError(Exception):
    """The model does not have the implementation, or it does not run here."""


def _switched(model: nn.Module) -> list[Any]:
    """Return the outermost modules whose implementation of attention can be set."""
    if callable(getattr(model, "set_attn_implementation", None)):
        return [model]
    return [found for child in model.children() for found in _switched(child)]


def _with_implementation(prepared: PreparedModel, name: str) -> nn.Module:
    """Return a copy of the model with an implementation of attention."""
    model = prepared.copied()  # with its configuration, where the setting is
    for module in _switched(Layers(model).modules[ROOT]):
        try:
            module.set_attn_implementation(name)
        except Exception as error:
            raise _AbsentError(line_of(error)) from error
        if getattr(module.config, "_attn_implementation", name) != name:
            raise _AbsentError(f"{type(module).__name__} does not let it be set")
    return model


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Case:
    """Inputs with which all implementations are run."""

    how: str
    kwargs: dict[str, Any]
    excluded: MaskedOut
    """Positions that are not compared."""
    shape: tuple[int, ...]
    """The numbers of rows and positions."""


def _cases(prepared: PreparedModel) -> Iterator[_Case]:
    """Yield the inputs as they are, and those with padding."""
    names = list(prepared.parameters)
    prepared.args, prepared.kwargs = _as_keywords(prepared, names)
    first = next((x for name, x in prepared.kwargs.items() if name in (_IDS, _EMBEDS) and isinstance(x, Tensor)), None)
    if first is None or first.dim() < 2:
        yield _Case("as given", dict(prepared.kwargs), MaskedOut(), ())
        return
    yield _Case("as given", dict(prepared.kwargs), _excluded(prepared.kwargs, first), first.shape[:2])
    for left in (True, False):
        padded = _padded(prepared, first, left=left)
        if padded is not None:
            yield padded


def _as_keywords(prepared: PreparedModel, names: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments as keywords, as far as the forward names them."""
    if prepared.args and (len(prepared.args) > len(names) or names[0] not in (_IDS, _EMBEDS)):
        return prepared.args, prepared.kwargs
    return (), {**dict(zip(names, prepared.args, strict=False)), **prepared.kwargs}


def _excluded(kwargs: dict[str, Any], first: Tensor) -> MaskedOut:
    mask = kwargs.get(_MASK)
    if isinstance(mask, Tensor) and mask.shape == first.shape[:2]:
        return MaskedOut(left_out(_MASK, mask))
    return MaskedOut()


def _padded(prepared: PreparedModel, first: Tensor, *, left: bool) -> _Case | None:
    """Return the inputs with a mask that pads a quarter of the positions, in all rows but the first of several."""
    batch, length = first.shape[:2]
    given = prepared.kwargs.get(_MASK)
    if _MASK not in prepared.parameters or length < _FEWEST:
        return None
    if given is not None and not (isinstance(given, Tensor) and given.shape == (batch, length)):
        return None
    mask = torch.ones(batch, length, dtype=torch.long) if given is None else given.clone()
    n = length // 4
    mask[min(1, batch - 1) :, slice(0, n) if left else slice(length - n, None)] = 0
    how = f"padded on the {'left' if left else 'right'}"
    return _Case(how, {**prepared.kwargs, _MASK: mask}, MaskedOut(mask == 0), (batch, length))


# --- comparison -------------------------------------------------------------------------------------------------------


def _run(prepared: PreparedModel, case: _Case, model: nn.Module, *, wide: bool = False) -> Trace:
    """Run a model on the inputs of a case."""
    before, prepared.kwargs = prepared.kwargs, case.kwargs
    try:
        with warnings.catch_warnings(action="ignore"):
            trace = prepared.run(mode="eval", model=model, vary=(lambda _, x: as_double(x)) if wide else None)
    finally:
        prepared.kwargs = before
    if trace.error is not None:
        raise _AbsentError(trace.failure) from trace.error
    return trace


def _compared(one: Trace, two: Trace, case: _Case, tolerance: float | None) -> list[Disagreement]:
    """Return where two runs differ, of what both of them computed."""
    there = {given.where: given.tensor for given in two.tensors}

    def is_common(given: LayerTensor) -> bool:
        other = there.get(given.where)
        if other is None or not is_rounded(other):
            return False
        return given.is_final or other.shape == given.tensor.shape

    common = Trace(tensors=[given for given in one.tensors if is_common(given)])
    if not any(given.is_final for given in common.tensors):
        raise NotApplicableError("the two ways return nothing that can be compared")
    return disagreements(common, two, pairs=_at_real_positions(case), tolerance=tolerance)


def _at_real_positions(case: _Case) -> Pairs:
    """Return what makes pairs of the parts of tensors at positions that no mask leaves out."""

    def pairs(given: LayerTensor, two: Tensor, /) -> list[tuple[Tensor, Tensor]]:
        one = given.tensor
        if not case.excluded or one.shape != two.shape:
            return [(one, two)]
        batch, length = case.shape
        if one.dim() == 2 and one.shape[0] == batch * length:  # a router or an expert flattens both
            one, two = (x.unflatten(0, (batch, length)) for x in (one, two))
        axes = [axis for axis in range(1, one.dim()) if one.shape[axis] == length]
        if one.shape[0] != batch or not axes:
            return []  # what is pooled may be taken from padding
        return [(case.excluded.filled(one, axes[0]), case.excluded.filled(two, axes[0]))]

    return pairs


def _beyond_rounding(
    prepared: PreparedModel,
    case: _Case,
    models: tuple[nn.Module, nn.Module],
    found: list[Disagreement],
    tolerance: float | None,
) -> list[Disagreement]:
    """Return the differences that are there in float64 too; those that were found, if the models do not run in it."""
    try:
        one, two = (_run(prepared, case, copy.deepcopy(model).double(), wide=True) for model in models)
        return _compared(one, two, case, _PRECISE if tolerance is None else tolerance)
    except (_AbsentError, NotApplicableError):
        return found


def _reaches_output(found: Sequence[Disagreement]) -> bool:
    return any(one.layer_tensor.is_final for one in found)
