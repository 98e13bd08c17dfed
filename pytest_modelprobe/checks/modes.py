"""Training and evaluation mode: equal outputs without randomness, equal means with it.

Dropout and batch norms make the two modes differ on purpose. They are made to act alike, so that what still differs is
an error. Dropout that a layer has written itself is measured over many calls.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pytest_modelprobe.comparison.text import percent
from pytest_modelprobe.models import (
    CallTracer,
    Flat,
    ModuleCall,
    attributes,
    flatten,
    flatten_call,
    map_tensors,
    seeding,
)
from pytest_modelprobe.record import ROOT
from pytest_modelprobe.runs import Mode
from pytest_modelprobe.text import count, listed, number

from .machinery.agreement import changed, check_repeats
from .machinery.check import check
from .machinery.prepared import PreparedModel, copy_of, set_mode
from .machinery.rounding import as_double, limit, plain, relative_error
from .outcome import NotApplicableError, Violation

_ADVICE = (
    "Look at how its forward, train() or eval() depends on self.training: merged weights, a scale, a branch of one "
    "mode."
)


class _AsInEvaluation(TorchFunctionMode):
    """Calls the functions of torch that have a training mode, dropout and norms, in evaluation mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        switch = _SWITCHES.get(func)
        if switch is not None:
            args, kwargs = switch(args, kwargs)
        return func(*args, **kwargs)


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _setting(function: Callable[..., Any], **values: Any) -> Callable[[Any, Any], _Arguments]:
    """Return a function that sets arguments; those of norms only if there are running statistics."""
    names = list(inspect.signature(function).parameters)

    def switched(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        given = dict(zip(names, args, strict=False)) | kwargs
        if "running_mean" in names and given.get("running_mean") is None:
            return args, kwargs
        return (), given | values

    return switched


def _without_dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
    """Return the arguments of `scaled_dot_product_attention`, which has no signature, without its dropout."""
    return (*args[:4], *(0.0 for _ in args[4:5]), *args[5:]), kwargs | ({"dropout_p": 0.0} if len(args) < 5 else {})


_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "rrelu")

_SWITCHES: dict[Any, Callable[[Any, Any], _Arguments]] = {
    **{getattr(F, name): _setting(getattr(F, name), training=False) for name in _DROPOUTS},
    F.multi_head_attention_forward: _setting(F.multi_head_attention_forward, dropout_p=0.0),
    F.batch_norm: _setting(F.batch_norm, training=False),
    F.instance_norm: _setting(F.instance_norm, use_input_stats=False),
    F.scaled_dot_product_attention: _without_dropout,
}


_Key = tuple[str, int]
"""A layer, and the index of the call."""


@dataclass(slots=True, eq=False)
class _Run:
    """Inputs and outputs of each call of each layer, in the order in which they returned."""

    inputs: dict[_Key, Flat] = field(default_factory=dict)
    outputs: dict[_Key, Any] = field(default_factory=dict)
    excluded: set[str] = field(default_factory=set)
    """Layers whose own code drew random numbers or wrote into their parameters or buffers."""
    losses: dict[str, None] = field(default_factory=dict)
    """Outputs of one number that is 0 in the run that stands in: a loss that exists in training alone."""

    @property
    def calls(self) -> Counter[str]:
        """Number of calls of each layer."""
        return Counter(name for name, _ in self.outputs)


@check
def modes_agree(prepared: PreparedModel, *, tolerance: float | None = None) -> Violation | str:
    """Check that a forward in training mode returns the same as in evaluation mode, apart from randomness.

    Dropout of torch is off in both, and a BatchNorm uses its running statistics. The output of a layer that draws
    random numbers in other ways, or updates statistics of its own, is replaced by its output in evaluation mode;
    `dropout_scaled` checks the former. So is a single number that is 0 in evaluation mode, which is a loss of training.
    A layer is compared where its inputs are the same in both modes and its output has the same structure. A difference
    that the code around a layer compensates, as for a weight that is merged for evaluation, is only mentioned. Then
    eval() is called twice in a row, and eval() and train(): neither may change the output.

    Args:
        prepared: The model and its inputs.
        tolerance: The largest relative change that passes. By default it follows from the dtype: 1e-4 in float32.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe, model = ModelProbe(), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    >>> print(checks.modes_agree(probe, model, probe.randn(4, 3)))
    modes_agree holds for Sequential: 4 layers
    """
    evaluated = _run(prepared, "eval")
    train = _run(prepared, "train", stand_in=evaluated)
    found, looked_at, inside = _differences(evaluated, train, tolerance)
    if found:
        return _broken(prepared, found, "in training mode than in evaluation mode, without randomness")
    if not looked_at:
        raise NotApplicableError(
            f"{listed(sorted(train.excluded)) or 'each layer'} cannot be compared between the modes"
        )
    orders: list[tuple[list[Mode], _Run]] = [(["eval", "eval"], evaluated), (["train", "eval", "train"], train)]
    for modes, before in orders:
        with prepared.keep_changes():
            for mode in modes[:-1]:
                set_mode(prepared.model, mode)
            again = _run(prepared, modes[-1], stand_in=evaluated)
        found, _, _ = _differences(before, again, tolerance)
        if found:
            order = ", ".join(f"{mode}()" for mode in modes)
            return _broken(prepared, found, f"after {order} than after {modes[-1]}() alone")
    excluded = sorted(train.excluded & {name for name, _ in train.outputs})
    left = f"; left out: {listed(excluded)}, random or with statistics of their own" if excluded else ""
    called = dict.fromkeys(name for name, _ in train.outputs)
    others = [name for name in called if name not in looked_at and name not in excluded]
    left += f"; not compared: {listed(others)}, called otherwise or with other outputs" if others else ""
    left += f"; not compared: {listed(list(train.losses))}, 0 in evaluation mode" if train.losses else ""
    return f"{count(len(looked_at), 'layer')}{left}{_inside_note(inside)}"


def _inside_note(inside: list[_Difference]) -> str:
    """Return the end of a sentence about layers that agree while others inside them differ."""
    if not inside:
        return ""
    layer, path, far = inside[0]
    return f"; layers inside differ, but those around them agree: first {layer} {path}, {changed(far)}"


_Difference = tuple[str, str, float]
"""A layer, the path of an output, and its relative error."""


def _broken(prepared: PreparedModel, found: list[_Difference], when: str) -> Violation:
    for mode in ("eval", "train"):
        check_repeats(prepared, mode)
    layer, path, far = found[0]
    return Violation.at(
        layer,
        f"computes something else from the same inputs {when}: {path} {changed(far)}",
        columns=("tensor", "changed by"),
        rows=tuple((f"{name} {where}", percent(by)) for name, where, by in found),
        advice=_ADVICE,
    )


def _differences(
    one: _Run, other: _Run, tolerance: float | None
) -> tuple[list[_Difference], set[str], list[_Difference]]:
    """Return the differences for equal inputs, the layers compared, and differences that code around compensates."""
    found: list[_Difference] = []
    excluded = one.excluded | other.excluded
    calls, others_calls = one.calls, other.calls
    compared, alike = Counter[str](), Counter[str]()
    for key, output in other.outputs.items():
        layer = key[0]
        if layer in excluded or calls[layer] != others_calls[layer] or not _same(one.inputs[key], other.inputs[key]):
            continue
        before, now = (
            {path: plain(x) for path, x in flatten("output", given).tensors} for given in (one.outputs[key], output)
        )
        common = [path for path in before if path in now and now[path].is_floating_point()]
        if not common or any(before[path].shape != now[path].shape for path in common):
            continue
        changes = [(layer, path, relative_error(before[path], now[path])) for path in common]
        differ = [(layer, path, by) for layer, path, by in changes if not by <= limit(before[path], tolerance)]
        found += differ
        compared[layer] += 1
        alike[layer] += not differ and before.keys() == now.keys()
    # A layer with a replaced output inside it shows nothing about the others.
    sound = {layer for layer in alike if alike[layer] == calls[layer] and not any(_within(n, layer) for n in excluded)}
    inside = [one for one in found if any(_within(one[0], layer) for layer in sound)]
    return [one for one in found if one not in inside], set(compared), inside


def _within(name: str, layer: str) -> bool:
    """Whether a layer is another, or inside it."""
    return layer == ROOT or name == layer or name.startswith(f"{layer}.")


def _same(one: Flat, other: Flat) -> bool:
    """Whether two calls had equal arguments, up to rounding."""
    if one.plain != other.plain or [path for path, _ in one.tensors] != [path for path, _ in other.tensors]:
        return False
    pairs = [(x, y) for (_, x), (_, y) in zip(one.tensors, other.tensors, strict=True)]
    return all(relative_error(x, y) <= (limit(x) if x.is_floating_point() else 0.0) for x, y in pairs)


def _run(prepared: PreparedModel, mode: Mode, *, stand_in: _Run | None = None) -> _Run:
    """Return a run without dropout of torch and with the running statistics of norms.

    Args:
        prepared: The model and its inputs.
        mode: Mode of the model.
        stand_in: A run whose outputs replace those of layers that are random in another way.
    """
    run = _Run()
    watcher = _DrawDetector(prepared)

    def begin(call: _RandomCall, args: Any, kwargs: Any) -> None:
        given = flatten_call(args, kwargs)
        originals = [x for _, x in given.tensors]
        given.tensors = [(path, copy_of(x)) for path, x in given.tensors]
        call.arguments = originals, given
        watcher.drew(call.parent)

    def end(call: _RandomCall, args: Any, output: Any) -> Any:
        watcher.drew(call)
        name = call.layer
        originals, given = call.arguments
        key = name, run.calls[name]
        if call.drew or watcher.written(call.module):
            run.excluded.add(name)
        replaced = stand_in is not None and name in run.excluded and key in stand_in.outputs
        if stand_in is not None and replaced:
            output = stand_in.outputs[key]
            for x, (_, before) in zip(originals, given.tensors, strict=True):
                if not torch.equal(x, before):  # noise that is added in place
                    x.copy_(before)
        elif stand_in is not None and key in stand_in.outputs:
            before = dict(flatten("output", stand_in.outputs[key]).tensors)
            now = {path: x for path, x in flatten("output", output).tensors if path in before and x.numel() == 1}
            zeros = {
                id(x): before[path]
                for path, x in now.items()
                if before[path].numel() == 1 and x.any() and not before[path].any()
            }
            run.losses.update((f"{name} {path}", None) for path, x in now.items() if id(x) in zeros)
            output, replaced = map_tensors(lambda x: zeros.get(id(x), x), output), bool(zeros)
        run.inputs[key] = given
        run.outputs[key] = map_tensors(copy_of, output)
        return map_tensors(torch.clone, output) if replaced else None

    # Before all other hooks, of which some write into a weight, and after eval(), which may too.
    handle = prepared.layers.modules[ROOT].register_forward_pre_hook(
        lambda *_: watcher.note_versions(prepared.model), prepend=True
    )
    try:
        with CallTracer(prepared.layers.modules, _RandomCall, before=begin, after=end), _AsInEvaluation():
            prepared.reference(mode=mode)
    finally:
        handle.remove()
    return run


@dataclass(slots=True, eq=False)
class _RandomCall(ModuleCall):
    """A call, with whether it draws random numbers."""

    parent: _RandomCall | None
    arguments: Any = None
    drew: bool = False
    """Whether its own code drew random numbers."""
    inside: int = 0
    """Number of calls that began inside it so far."""


class _DrawDetector:
    """Finds the running calls whose own code draws random numbers, by the states of the generators."""

    def __init__(self, prepared: PreparedModel) -> None:
        self._device = prepared.probe.device
        self._states = seeding.generator_states(self._device)
        self._versions: dict[int, int] = {}

    def note_versions(self, model: nn.Module) -> None:
        """Note the versions of the tensors of a model before its forward."""
        self._versions = {id(t): t._version for t in (*nn.Module.parameters(model), *nn.Module.buffers(model))}

    def written(self, module: nn.Module) -> bool:
        """Whether one of the module's own floating parameters and buffers was written to since."""
        own = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        return any(self._versions.get(id(t)) != t._version for t in own if t.is_floating_point())

    def drew(self, running: _RandomCall | None) -> bool:
        """Return whether the own code of the running call drew since the last question, and note it in the call."""
        before, self._states = self._states, seeding.generator_states(self._device)
        drew = running is not None and before != self._states
        if running is not None:
            running.drew |= drew
        return drew


# --- dropout ------------------------------------------------------------------------------------------------------

_DRAWS = 3000
"""Calls of a layer with dropout. One that keeps 95 % and scales by 1 / 0.95² is then detected with all but one seed in
10,000: 3,000 calls keep 8.8 standard errors more than 0.95² of them on average, and `_DOUBT` is at 6.1."""

_FEWER = 4
"""A layer that calls others takes longer and is called a fourth as often."""

_DOUBT = 1e-9
"""Probability of a false alarm for a layer with the right scale."""


@dataclass(frozen=True, slots=True)
class _Dropped:
    """Dropout of a layer, measured over many calls."""

    kept: float
    """Fraction of the calls in which an element was kept."""
    scale: float
    """Factor of the kept elements."""
    doubt: float
    """Upper bound of the probability of this fraction if the scale is right."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor in which what the own code of a layer drew is seen first."""

    layer: str
    inside: int
    """Number of calls that begin inside the layer before."""
    child: str | None
    """The layer inside that takes it, or `None` if the layer itself returns it."""
    path: str

    @property
    def values(self) -> str:
        """What is dropped, for a sentence."""
        return "its values" if self.child is None else f"the values that {self.child} takes"


@check
def dropout_scaled(prepared: PreparedModel) -> Violation | str:
    """Check that layers with dropout of their own scale the kept elements such that the mean stays.

    The mean in training is then the output in evaluation mode. Checked is what the own code of a layer, or of the model
    itself, returns or gives to a layer inside it after it drew random numbers. It runs on its input in the model 3,000
    times, 750 if it calls others, which are in evaluation mode. Each element has to be zero or one multiple of that in
    evaluation mode, with an input added or not. Layers of torch are not checked. What augments the data, before the
    first parameter, layers that draw in evaluation mode too, and those that use random numbers in another way are left
    out, and the outcome names them.

    The probability of a false alarm is at most one in a billion. A scale that is applied twice is detected if at most
    95 % are kept, or 80 % in a layer that calls others. A missing scale is always detected. A layer that calls others
    is left out if its first 20 runs drop nothing, whole rows, or a residual branch of the whole batch: a condition and
    a layer that are left out at random are not scaled on purpose.

    Args:
        prepared: The model and its inputs.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> class Drop(nn.Module):
    ...     def forward(self, x):
    ...         return x * (torch.rand(len(x), 1) > 0.3) if self.training else x
    >>> probe, model = ModelProbe(), nn.Sequential(nn.Linear(3, 3), Drop())
    >>> checks.dropout_scaled.outcome(probe, model, probe.randn(4, 3)).layer  # it is not divided by 0.7
    '1'
    """
    prepared.reference(mode="train")
    places = _drawing(prepared)
    looked_at, wrong = dict[str, None](), []
    known: dict[Any, _Dropped | None] = {}
    for place, given in places.items():
        if given is None:
            continue
        module = prepared.layers.modules[place.layer]
        alike = type(module), (repr(attributes(module)), place.path) if prepared.layers.is_leaf(place.layer) else place
        if alike not in known:
            known[alike] = _dropped(prepared, place, given)
        dropped = known[alike]
        if dropped is None:
            continue
        looked_at[place.layer] = None
        if dropped.doubt < _DOUBT:
            wrong.append((place, dropped))
    others = [name for name in dict.fromkeys(place.layer for place in places) if name not in looked_at]
    left = f"; left out: {listed(others)}" if others else ""
    if not looked_at:
        raise NotApplicableError(f"no layer has dropout of its own{left}")
    if not wrong:
        return f"{count(len(looked_at), 'layer')}{left}"
    place, first = wrong[0]
    return Violation.first_of(
        ((p.layer, percent(d.kept), d.scale, percent(d.kept * d.scale)) for p, d in wrong),
        f"keeps {percent(first.kept)} of {place.values} in training and multiplies them by {number(first.scale)}: the "
        f"mean is {percent(first.kept * first.scale)} of the mean in evaluation mode",
        columns=("layer", "keeps", "times", "mean"),
        advice="Elements that are kept with probability q have to be divided by q, once, in training.",
    )


def _drawing(prepared: PreparedModel) -> dict[_Place, _Arguments | None]:
    """Return where what layers drew in training is seen, each with the arguments of the layer.

    The arguments are `None` if the tensor there requires no gradient: what augments the data is no dropout.
    """
    places: dict[_Place, _Arguments | None] = {}
    watcher = _DrawDetector(prepared)

    def note(call: _RandomCall | None, child: str | None, tensors: list[tuple[str, Tensor]]) -> None:
        if call is not None and not type(call.module).__module__.startswith("torch.nn."):
            for path, x in tensors:
                place = _Place(call.layer, call.inside, child, path)
                places.setdefault(place, call.arguments if x.requires_grad else None)

    def begin(call: _RandomCall, args: Any, kwargs: Any) -> None:
        call.arguments = tuple(map_tensors(copy_of, [args, kwargs]))
        if watcher.drew(call.parent):
            note(call.parent, call.layer, flatten_call(args, kwargs).tensors)
        around = call.parent
        while around is not None:
            around.inside += 1
            around = around.parent

    def end(call: _RandomCall, args: Any, output: Any) -> None:
        if watcher.drew(call):
            note(call, None, flatten("output", output).tensors)

    def run() -> None:
        tracer = CallTracer(prepared.layers.modules, _RandomCall, before=begin, after=end)
        with torch.enable_grad(), tracer, _AsInEvaluation():
            args, kwargs = prepared.copied_inputs()
            prepared.model(*args, **kwargs)

    with prepared.keep_changes():
        set_mode(prepared.model, "train")
        prepared.trace_call(run)
    return places


def _dropped(prepared: PreparedModel, place: _Place, given: _Arguments) -> _Dropped | None:
    """Return the dropout of a layer over many calls in training, or `None` if its randomness is no dropout."""
    module, leaf = prepared.layers.modules[place.layer], prepared.layers.is_leaf(place.layer)
    seeds = seeding.seeded(seeding.derive(prepared.probe.seed, f"check draws of {place.layer}"))
    others = nullcontext() if leaf else _AsInEvaluation()
    with prepared.keep_changes(), seeds, torch.no_grad(), others, _Replay(prepared, place, given) as replay:
        try:
            taken: list[Tensor] = []
            module.eval()
            steady = [replay(taken), *(replay() for _ in range(_LOOKED_AT - 1))]
            evaluated = steady[0]
            if module.training or any(not torch.equal(one, evaluated) for one in steady):
                return None  # what it draws in evaluation too is a part of what it computes
            module.train()
            for child in module.children():
                child.eval()
            first = torch.stack([replay() for _ in range(_LOOKED_AT)])
            if first.shape[1:] != evaluated.shape:
                return None
            for base in (torch.zeros_like(evaluated), *(x for x in taken if x.shape == evaluated.shape)):
                scale = _scale(first, evaluated, base)
                if scale is not None and (leaf or _drops_parts(first, evaluated, base)):
                    at = int((evaluated - base).abs().argmax())
                    draws = _DRAWS if leaf else _DRAWS // _FEWER
                    rest = [replay().flatten()[at] for _ in range(draws - _LOOKED_AT)]
                    values = torch.cat([first.flatten(1)[:, at], torch.stack(rest)]) - base.flatten()[at]
                    return _measured(values != 0, scale)
        except Exception:  # noqa: BLE001 - called alone it may lack state that its model sets
            return None
    return None


def _drops_parts(outputs: Tensor, evaluated: Tensor, base: Tensor) -> bool:
    """Whether parts of a row are dropped, or of a batch where something is added to a base.

    A layer that is left out for the whole batch, or a condition for a whole row, is not scaled on purpose.
    """
    known = evaluated != base
    shape = len(outputs), 1 if base.any() else len(evaluated), -1
    dropped, kept = ((known & (outputs == base)).reshape(shape), (known & (outputs != base)).reshape(shape))
    return bool((dropped.any(-1) & kept.any(-1)).any())


class _ReachedError(Exception):
    """The place is reached: what the layer computes after it is of no interest."""


class _Replay:
    """Calls a layer alone with the same arguments again and again, and returns the tensor at a place.

    Args:
        prepared: The model.
        place: The layer and the tensor.
        given: Arguments of the layer.
    """

    def __init__(self, prepared: PreparedModel, place: _Place, given: _Arguments) -> None:
        self._modules, self._place, self._given = prepared.layers.modules, place, given
        self._inside, self._found = 0, torch.empty(0)
        self._taken: list[Tensor] | None = None
        self._exit = ExitStack()

    def __enter__(self) -> _Replay:
        for name, module in self._modules.items():
            if name != self._place.layer and _within(name, self._place.layer):
                hook = functools.partial(self._begin, name)
                self._exit.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    def __call__(self, taken: list[Tensor] | None = None) -> Tensor:
        """Return the tensor, and add to ``taken`` what the layer took, and gave to others before."""
        self._inside, self._taken = 0, taken
        args, kwargs = map_tensors(copy_of, list(self._given))
        self._take(flatten_call(args, kwargs).tensors)
        try:
            output = self._modules[self._place.layer](*args, **kwargs)
        except _ReachedError:
            return self._found
        if (self._inside, None) != (self._place.inside, self._place.child):
            raise LookupError("it leaves out layers at random")
        return self._at_place(flatten("output", output).tensors)

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = flatten_call(args, kwargs).tensors
        if (self._inside, name) == (self._place.inside, self._place.child):
            self._found = self._at_place(tensors)
            raise _ReachedError
        self._inside += 1
        self._take(tensors)

    def _take(self, tensors: list[tuple[str, Tensor]]) -> None:
        if self._taken is not None:
            self._taken += [as_double(plain(copy_of(x))) for _, x in tensors if x.is_floating_point()]

    def _at_place(self, tensors: list[tuple[str, Tensor]]) -> Tensor:
        return as_double(plain(copy_of(dict(tensors)[self._place.path])))


_LOOKED_AT = 20
"""Calls of which all elements are compared."""

_ROUNDING = 1e-4
"""Ratios that differ by less count as equal, and a smaller ratio counts as zero."""


def _scale(outputs: Tensor, evaluated: Tensor, base: Tensor) -> float | None:
    """Return the factor between what training and evaluation add to a base; None if it is not constant."""
    added = (evaluated - base).abs()
    large = added > 1e-3 * added.max()
    if not large.any():
        return None
    ratios = ((outputs - base) / (evaluated - base))[:, large]
    kept = ratios[ratios.abs() > _ROUNDING]
    if not len(kept) or not kept.isfinite().all():
        return None
    scale = kept.median().item()
    return scale if bool(((kept - scale).abs() < _ROUNDING * abs(scale)).all()) else None


def _measured(kept: Tensor, scale: float) -> _Dropped:
    """Return the probability that the kept fraction is right for a scale.

    It is Chernoff's bound: of n draws that each keep with probability q, the kept fraction is s or further from q with
    a probability of at most exp(-n KL(s, q)) on each side.
    """
    share = kept.float().mean().item()
    right = 1 / scale if scale else math.inf
    if right > 1 + _ROUNDING:
        return _Dropped(share, scale, 0.0)
    right = min(right, 1.0)
    terms = [(share, right), (1 - share, 1 - right)]
    distance = sum(s * math.log(s / q) if q else math.inf for s, q in terms if s)
    return _Dropped(share, scale, min(1.0, 2 * math.exp(-len(kept) * distance)))
