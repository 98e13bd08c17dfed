"""An adapter has an effect, is trained alone, and computes the same when it is merged or loaded again.

The function that attaches the adapter says all that is needed: the model without it is the one that is given, and its
parameters are those that are new.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from pytest_modelprobe.checks.agreement import ROUNDING
from pytest_modelprobe.checks.check import check
from pytest_modelprobe.checks.outcome import NotApplicableError, Violation
from pytest_modelprobe.checks.registration import unregistered
from pytest_modelprobe.checks.rounding import relative_error, same
from pytest_modelprobe.checks.session import PreparedModel, Trace, all_named, place
from pytest_modelprobe.models import seeding
from pytest_modelprobe.record import ROOT, containers
from pytest_modelprobe.text import count, listed

from .change import Change, applied, function_kept

_TRAINED = 0.1
"""Standard deviation of what is added to the parameters of an adapter: as it is made, it may compute nothing."""


@check
def adapter(
    prepared: PreparedModel,
    attach: Callable[[Any], Any],
    *,
    merge: Callable[[Any], Any] | None = None,
    disable: Callable[[Any], Any] | None = None,
    reload: Callable[[Any, Any], Any] | None = None,
    tolerance: float | None = None,
) -> Violation | str:
    """Check an adapter, such as LoRA: it has an effect, is trained alone, and is the same when merged or loaded again.

    The model is the one without the adapter. Parameters that ``attach`` adds are those of the adapter; small random
    numbers are added to them, as training would, because an adapter that is new may compute nothing. Then

    - the output differs from that of the model alone;
    - a gradient reaches each parameter of the adapter that is not frozen, and none reaches the model: if all matrices
      of a layer with an adapter get one too, this layer is named; any other parameter of the model is a hint;
    - nothing that the adapter has is unregistered, and its part of the ``state_dict``, loaded into another model with a
      new adapter, computes the same;
    - so does the merged model, also after loading, and a disabled adapter has no effect.

    An adapter of a layer that these inputs do not reach is a hint, unless it is the only one.

    Args:
        prepared: The model without the adapter, and its inputs.
        attach: Takes a copy of the model and returns the model with the adapter, or None if it changes the copy:
            ``lambda model: get_peft_model(model, config)``.
        merge: Takes the model with the adapter and merges it, as ``change`` of `same_function`:
            ``lambda model: model.merge_and_unload()``.
        disable: Takes the model with the adapter and switches the adapter off. An adapter that rewrites the weights of
            the model, as PiSSA does, fails: switching it off does not bring these back.
        reload: Takes the model with the adapter and a copy of the model without it, saves the adapter of the first, and
            returns the second with the loaded adapter. By default the adapter is attached anew, and its part of the
            ``state_dict`` is loaded.
        tolerance: The largest relative change of an output that passes, see `same_function`.

    >>> from pytest_modelprobe import ModelProbe, checks
    >>> class LoRA(nn.Module):
    ...     def __init__(self, linear):
    ...         super().__init__()
    ...         self.linear, self.A, self.B = linear, nn.Linear(3, 1, bias=False), nn.Linear(1, 2, bias=False)
    ...
    ...     def forward(self, x):
    ...         return self.linear(x) + 0.5 * self.B(self.A(x))
    >>> def merge(model):
    ...     lora = model[0]
    ...     lora.linear.weight.data += lora.B.weight @ lora.A.weight  # without the factor
    ...     return nn.Sequential(lora.linear)
    >>> probe, model = ModelProbe(), nn.Sequential(nn.Linear(3, 2))
    >>> def attach(model):
    ...     return nn.Sequential(LoRA(model.requires_grad_(False)[0]))
    >>> x = probe.randn(4, 3)
    >>> print(checks.adapter(probe, model, attach, x))
    adapter holds for Sequential: 2 parameters in 1 layer, the same after reload; not given: merge and disable
    >>> print(checks.adapter.outcome(probe, model, attach, x, merge=merge).layer)
    0
    """
    made = _Adapter(prepared, attach)
    found = made.judged()
    if isinstance(found, Violation) and found.level == "broken":
        return found

    def again(model: nn.Module) -> nn.Module:
        base = prepared.copied()
        return made.loaded(base, model) if reload is None else applied(reload, "reload", "adapter", model, base)

    def merged(model: nn.Module) -> nn.Module:
        return applied(merge, "merge", "adapter", model)

    def disabled(base: nn.Module) -> nn.Module:
        return applied(disable, "disable", "adapter", made.attached(base))

    changes: dict[str, tuple[Change, Change]] = {"reload": (again, made.attached)}
    if merge is not None:
        changes["merge"] = (merged, made.attached)
        changes["reload and merge"] = (lambda model: merged(again(model)), made.attached)
    if disable is not None:
        changes["disable"] = (disabled, lambda base: base)
    for name, (change, before) in changes.items():
        other = function_kept(prepared, change, name, tolerance, made=before, whole=made.sites)
        if isinstance(other, Violation):
            return other
    if isinstance(found, Violation):
        return found
    after, left = ([n for n in ("reload", "merge", "disable") if (n in changes) == given] for given in (True, False))
    return f"{found}, the same after {listed(after)}" + (f"; not given: {listed(left)}" if left else "")


class _Adapter:
    """An adapter that is attached to copies of a model."""

    def __init__(self, prepared: PreparedModel, attach: Callable[[Any], Any]) -> None:
        self._prepared, self._attach = prepared, attach
        self._own: set[str] = set()
        base = prepared.copied()
        there = dict(all_named(base))
        known = {key for x in there.values() for key in (id(x), place(x))}
        added = [(n, x) for n, x in all_named(self.attached(base)) if not known & {id(x), place(x)}]
        self._own |= {name for name, x in added if not same(x, there.get(name))}  # nor a copy under its name
        self.model = self.attached(prepared.copied())
        others = [name for name, _ in all_named(self.model) if name not in self._own]
        self.sites: dict[str, list[str]] = {}
        """The layers that it is attached to, each with the names of the parameters that it adds there."""
        for name, _ in self.model.named_parameters():
            around = (c for c in reversed(containers(name)) if c == ROOT or any(o.startswith(f"{c}.") for o in others))
            if name in self._own:
                self.sites.setdefault(next(around), []).append(name)

    def attached(self, base: nn.Module, *, trained: bool = True) -> nn.Module:
        """Return a model with the adapter, as if it were trained, or as it is made with another seed."""
        with seeding.seeded(seeding.derive(self._prepared.probe.seed, f"check adapter {trained}")):
            model = applied(self._attach, "attach", "adapter", base).to(self._prepared.probe.device)
        for name, p in model.named_parameters() if trained else ():
            if name in self._own and p.requires_grad:
                p.data.add_(self._prepared.randn_like(p, f"adapter {name}"), alpha=_TRAINED)
        return model

    def loaded(self, base: nn.Module, model: nn.Module) -> nn.Module:
        """Return a base with the adapter of a model, as far as it is in the ``state_dict``."""
        other = self.attached(base, trained=False)
        other.load_state_dict({n: x for n, x in model.state_dict().items() if n in self._own}, strict=False)
        return other

    def judged(self) -> Violation | str:
        """Return what is wrong with the adapter as it is attached, the surest first, or a summary."""
        before = tuple(unregistered(self._prepared))
        for where, x in unregistered(PreparedModel(self._prepared.probe, self.model)).items():
            if not where.endswith(before) and (isinstance(x, nn.Module) or x.requires_grad):
                said = "is trained, but the model has not registered it: it is in no state_dict and no optimizer"
                return Violation.at(where, said, advice="Put it in an nn.Parameter, nn.ParameterDict or nn.ModuleDict.")
        if not self.sites:
            raise NotApplicableError("attach adds no parameter to the model")
        one = self._prepared.reference(mode="eval")
        try:
            two = self._prepared.reference(mode="eval", backward=True, model=self.model)
        except NotApplicableError:  # nothing in the output has a gradient
            two = self._prepared.reference(mode="eval", model=self.model)
            two.gradients = {name: None for name, p in self.model.named_parameters() if p.requires_grad}
        far = [relative_error(x, two.final[p]) if p in two.final else math.inf for p, x in one.final.items()]
        effect = any(not by <= ROUNDING for by in far)
        found = [self._without_gradient(two, effect=effect), self._trained_base(two)]
        if not effect:
            said = "has an adapter without an effect: the model computes the same without it"
            advice = "Look for a factor that is 0, and for an adapter that is new and frozen."
            found.insert(1, Violation.at(next(iter(self.sites)), said, advice=advice))
        surest = sorted(filter(None, found), key=lambda one: one.level)
        names = [name for names in self.sites.values() for name in names]
        idle = "" if two.gradients.keys() & {*names} else " that are all frozen"
        return next(iter(surest), f"{count(len(names), 'parameter')}{idle} in {count(len(self.sites), 'layer')}")

    def _without_gradient(self, trace: Trace, *, effect: bool) -> Violation | None:
        """Return which parameters get no gradient: it is a hint if their layer does not run with these inputs."""
        places = ((name, site) for site, names in self.sites.items() for name in names)
        rows = [place for place in places if trace.gradients.get(place[0], 0) is None]
        called = {given.layer for given in trace.tensors}
        rows.sort(key=lambda row: row[1] not in called)
        if not rows:
            return None
        is_called = rows[0][1] in called
        return Violation.first_of(
            rows,
            f"gets no gradient: {rows[0][1]} {'does not use it' if is_called else 'is not called'}",
            columns=("parameter", "layer"),
            advice="Look for a layer that is not used, a forward without the adapter, .detach() and torch.no_grad().",
            level="broken" if is_called or not effect else "hint",
        )

    def _trained_base(self, trace: Trace) -> Violation | None:
        """Return which parameters of the model are trained: a hint, unless all matrices of an adapted layer are."""
        trained = [name for name, x in trace.gradients.items() if x is not None and name not in self._own]
        matrices = [name for name, p in self.model.named_parameters() if p.dim() > 1 and name not in self._own]
        inside = [[name for name in matrices if site in containers(name)] for site in self.sites]
        sure = [name for names in inside if {*names} <= {*trained} for name in names]
        if not trained:
            return None
        return Violation.first_of(
            ((name,) for name in dict.fromkeys([*sure, *trained])),
            "gets a gradient, though it is of the model without the adapter",
            columns=("trained too",),
            advice="Freeze the model first: model.requires_grad_(False). A head or a norm may be meant to be trained.",
            level="broken" if sure else "hint",
        )
