"""The same function after a change: an adapter is merged, a norm is folded, weights are quantized or converted.

Weights and layers may differ afterwards, and so may what layers inside return, as long as another one makes up for it.
What the model returns may not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from pytest_modelprobe.checks.agreement import ROUNDING, Disagreement
from pytest_modelprobe.checks.check import check, noted
from pytest_modelprobe.checks.outcome import NotApplicableError, Violation
from pytest_modelprobe.checks.parity import agreeing
from pytest_modelprobe.checks.registration import made_model
from pytest_modelprobe.checks.rounding import as_double, is_rounded, relative_error, same
from pytest_modelprobe.checks.session import PreparedModel, all_named, set_mode
from pytest_modelprobe.comparison import begins
from pytest_modelprobe.comparison.text import percent
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import CallTracer, Layers, ModuleCall, flatten, flatten_call, type_name
from pytest_modelprobe.record import ROOT, containers, qualified, relative_name
from pytest_modelprobe.text import count

Change = Callable[[nn.Module], nn.Module]
"""Takes a model, which it may change, and returns the changed one."""

_ADVICE = (
    "Look at what becomes of its weights: a factor that is left out or applied twice, an order of axes, an eps, and "
    "code that still adds what is merged."
)


@check
def same_function(
    prepared: PreparedModel, change: Callable[[Any], Any], *, tolerance: float | None = None
) -> Violation | str:
    """Check that the model returns the same after a change: merged, folded, quantized, converted.

    Weights and layers may differ, and a layer may return something else if another one makes up for it, as a folded
    norm does. If the output differs, the first layer of both is named from which the difference reaches it. Layers are
    compared by their names and the shapes of what they return, also if the change wraps the model or takes it out of
    a wrapper. Weights that are all zero have small random values, so that an adapter has an effect.

    Both models run in evaluation mode, in float64 if the model and the change can.

    Args:
        prepared: The model and its inputs.
        change: Takes a copy of the model, in evaluation mode, and returns the changed model, or None if it changes the
            copy: ``lambda model: model.merge_and_unload()``.
        tolerance: The largest relative change of an output that passes, as for quantized weights. By default it is 1e-6
            in float64, and else follows from the dtype: 1e-4 in float32.

    Raises:
        UsageError: ``change`` is no function, or returns something else than a model.

    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> model = probe.build(lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False)))
    >>> x = probe.randn(4, 3)
    >>> def into_one(model):
    ...     one, two = model
    ...     one.bias.data = two.weight @ one.bias
    ...     one.weight.data = two.weight @ one.weight
    ...     return nn.Sequential(one, nn.Identity())
    >>> checks.same_function(probe, model, into_one, x).verdict
    'holds'
    >>> print(checks.same_function.outcome(probe, model, lambda model: model.half().float(), x).layer)
    0
    """
    changed = functools.partial(applied, change, "change", "same_function")
    return function_kept(prepared, changed, "change", tolerance)


def applied(function: Any, name: str, by: str, *given: nn.Module) -> nn.Module:
    """Return the model that a function of the user returns, or the last one that it is given if it returns None."""
    __tracebackhide__ = True
    if not callable(function) or isinstance(function, nn.Module):
        raise UsageError(f"{name} is a function that takes a model; got {type(function).__name__}")
    with noted(f"in {name}", by):
        returned = function(*given)
    return given[-1] if returned is None else made_model(returned, name)


def function_kept(
    prepared: PreparedModel,
    change: Change,
    name: str,
    tolerance: float | None,
    *,
    made: Change = lambda model: model,
    whole: Collection[str] = (),
) -> Violation | str:
    """Return where a model returns something else after a change, or a summary.

    Args:
        prepared: The model and its inputs.
        change: The change.
        name: What messages call it.
        tolerance: The largest relative change that passes.
        made: Makes the model that is changed of a copy of the prepared one.
        whole: Names of layers that are named themselves, instead of layers inside them.
    """
    __tracebackhide__ = True
    runs, rounding = None, tolerance
    with contextlib.suppress(Exception):  # it may run in its own dtype alone
        wide = _Runs(prepared, change, made, whole, torch.float64) if tolerance is None else None
        if wide is not None and wide.two.error is None and not wide.is_narrow:
            runs, rounding = wide, ROUNDING
    runs = runs or _Runs(prepared, change, made, whole)
    final = {path: x for path, x in runs.one.final.items() if is_rounded(x)}
    if not final:
        raise NotApplicableError("the model returns no floating-point numbers")
    only, how = runs.that_reach_the_output, f"after {name}"
    found = agreeing(runs.one, runs.two, how, rounding, _ADVICE, only=only, unless_random=prepared)
    if isinstance(found, Violation):
        where, by = found.rows[-1] if found.rows and found.layer != ROOT else ("", "")
        return dataclasses.replace(found, line=f"{found.line}; {where} by {by}") if where else found
    far = percent(max(relative_error(x, runs.two.final[path]) for path, x in final.items()))
    idle = f"; {name} changed no layer and no weight" if runs.is_idle else ""
    return f"{count(len(final), 'output')} {how}{' in float64' if runs.dtype else ''}, changed by at most {far}{idle}"


class _Runs:
    """Runs of a model and of a changed copy, in evaluation mode and in a dtype if one is given."""

    def __init__(
        self, prepared: PreparedModel, change: Change, made: Change, whole: Collection[str], dtype: Any = None
    ) -> None:
        __tracebackhide__ = True
        self.dtype = dtype
        vary = None if dtype is None else lambda _, x: as_double(x)
        before, copy = (made(prepared.copied()).to(dtype=dtype) for _ in range(2))
        set_mode(copy, "eval")
        for module in filter(is_parametrized, copy.modules()):
            kind = type(module)  # copies share it, and removing a parametrization changes it
            module.__class__ = type(kind.__name__, kind.__bases__, dict(vars(kind)))
        then, now = Layers(copy).modules, Layers(after := change(copy)).modules
        self._takers: dict[str, set[str]] = defaultdict(set)
        with _taken(before, self._takers):
            self.one = prepared.reference(mode="eval", model=before, vary=vary)
        self.two = prepared.run(mode="eval", model=after, vary=vary)
        wrapper = next((name for name, module in now.items() if module is then[ROOT]), ROOT)
        wrapped = next((name for name, module in then.items() if module is now[ROOT]), ROOT)

        def renamed(layer: str) -> str:
            return layer if layer == ROOT else qualified(wrapped, relative_name(layer, wrapper))

        self.two.tensors = [dataclasses.replace(given, layer=renamed(given.layer)) for given in self.two.tensors]
        there = {given.where: given.tensor.shape for given in self.two.tensors}
        inside = (g for g in self.one.tensors if not g.is_final and there.get(g.where) == g.tensor.shape)
        compared = [given for given in inside if not {*containers(given.layer)} & {*whole}]
        self.one.tensors = [*compared, *(given for given in self.one.tensors if given.is_final)]
        was, after_all = dict(all_named(before)), all_named(after)
        kinds = [[(name, type_name(module)) for name, module in m.named_modules()] for m in (before, after)]
        self.is_idle = kinds[0] == kinds[1] and all(same(x, was.get(name)) for name, x in after_all)
        # A change that computes in float32 all the same leaves weights that float32 can hold.
        self.is_narrow = all(same(x, x.float().double()) for _, x in after_all if x.dtype == torch.float64)

    def that_reach_the_output(self, found: list[Disagreement]) -> list[Disagreement]:
        """Return the differences that nothing makes up for; none if the output is the same."""
        layers = [one.layer_tensor for one in found]
        differ = dict.fromkeys(given.layer for given in layers if not given.inside)
        agree = {given.layer for given in self.one.outputs} - {given.layer for given in layers}
        kept = begins(differ, agree, self._takers) if any(given.is_final for given in layers) else []
        return [one for one in found if one.layer_tensor.layer in kept]


def _taken(model: nn.Module, takers: dict[str, set[str]]) -> CallTracer[ModuleCall]:
    """Return a tracer that notes which layers take what a layer returned, as it is."""
    made: dict[int, tuple[str, Tensor]] = {}

    def begin(call: ModuleCall, args: Any, kwargs: Any) -> None:
        for _, x in flatten_call(args, kwargs).tensors:
            if id(x) in made:
                takers[made[id(x)][0]].add(call.layer)

    def end(call: ModuleCall, args: Any, output: Any) -> None:
        made.update((id(x), (call.layer, x)) for _, x in flatten("output", output).tensors)

    return CallTracer(Layers(model).modules, ModuleCall, before=begin, after=end)
