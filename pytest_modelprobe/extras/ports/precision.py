"""What lower precision costs, layer by layer: a quantized or bfloat16 version beside its reference.

The error of a layer within the run of a quantized model mixes what the layer does and what reaches it, and a small
error in one layer may cost more than a large one in another. So each layer of the model is also called on the inputs
that the layer has in the reference, and put into the reference alone.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.interrupts import interruptible
from pytest_modelprobe.interventions import CallHook, forward
from pytest_modelprobe.models import (
    Autocast,
    Layers,
    ModelState,
    autocast_states,
    derive,
    flatten,
    flatten_call,
    map_tensors,
    preserved,
    run_eagerly,
    seeded,
    seeding,
    settings_preserved,
)
from pytest_modelprobe.probe import ModelProbe
from pytest_modelprobe.progress import progress
from pytest_modelprobe.record import ROOT, Layer, Record, Selector, label_of, resolve_rename, select
from pytest_modelprobe.text import Cell, collapsed, count, listed, table

# --- values that are compared, and their error ------------------------------------------------------------------------

Outputs = dict[str, Tensor]
"""Floating-point tensors by path."""


@dataclass(frozen=True, slots=True)
class Error:
    """Sums over elements, from which the error of a value follows. Values add up."""

    signal: float = 0.0
    """Squares of what is expected."""
    noise: float = 0.0
    """Squares of the error."""
    power: float = 0.0
    """Squares of what is there."""
    product: float = 0.0
    """What is there times what is expected."""

    def __add__(self, other: Error) -> Error:
        return Error(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    @property
    def sqnr(self) -> float:
        """The signal-to-quantization-noise ratio in dB; minus infinity if the error is not finite.

        >>> Error(signal=100.0, noise=1.0).sqnr, Error(signal=100.0).sqnr
        (20.0, inf)
        """
        if not math.isfinite(self.noise):
            return -math.inf
        if not self.noise:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between what is there and what is expected, or `None` if one of the two is zero."""
        norms = math.sqrt(self.signal) * math.sqrt(self.power)
        return self.product / norms if norms and math.isfinite(norms) else None


def error_of(actual: Outputs, expected: Outputs, *, against: Outputs | None = None) -> Error:
    """Return the error of values; with ``against``, how far they are from these, relative to what is expected."""
    found = Error()
    for path, tensor in expected.items():
        a, e = _double(actual[path]), _double(tensor)
        b = e if against is None else _double(against[path])
        same = (a == b) | (a.isnan() & b.isnan())  # a mask has infinities, and their difference is NaN
        error = torch.where(same, 0.0, a - b)
        finite = e.isfinite()
        a, e = a[finite], e[finite]
        signal, noise, power = (float(x.square().sum()) for x in (e, error, a))
        found += Error(signal, noise, power, float((a * e).sum()))
    return found


def _double(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.cpu().double()  # not every device has float64


def tensors_of(value: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of an output that are compared. Those in a cache are not."""
    return [
        (path, tensor)
        for path, tensor in flatten("output", value, objects=False).tensors
        if (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized)
        and tensor.layout == torch.strided
        and not tensor.is_nested
    ]


def outputs_of(value: Any, *, copied: bool = True) -> Outputs:
    """Return the tensors of an output that are compared, dequantized."""
    found = {path: tensor.dequantize() if tensor.is_quantized else tensor for path, tensor in tensors_of(value)}
    return {path: tensor.detach().clone() for path, tensor in found.items()} if copied else found


def unlike(actual: Outputs, expected: Outputs) -> str | None:
    """Return why outputs cannot be compared, or `None` if they can."""
    now, then = ({path: tuple(tensor.shape) for path, tensor in one.items()} for one in (actual, expected))
    if now == then:
        return None
    shown = (", ".join(f"{path} {shape}" for path, shape in one.items()) or "no tensors" for one in (now, then))
    return "its outputs are {}, those of the reference {}".format(*shown)


@dataclass(frozen=True, kw_only=True)
class LayerPrecision:
    """The errors of one layer. Each is the SQNR in dB; `None` if it could not be computed, and ``note`` says why.

    With x and y the input and the output of the layer in the reference, x' and y' those in the model, and g the layer
    of the model, the error of the run is the sum of the layer's own error and of the error that it inherits:
    ``y' - y = (g(x) - y) + (y' - g(x))``.
    """

    layer: str
    """Name in the model, or in the reference if the model has no such layer."""
    type: str
    """Name of its class."""
    output: float | None = None
    """Of the reference's output, with this layer taken from the model: what the layer costs."""
    own: float | None = None
    """Of ``g(x)``: the error that the layer adds."""
    own_cosine: float | None = None
    """Cosine of the angle between ``g(x)`` and ``y``."""
    run: float | None = None
    """Of ``y'``: the error in the run of the model."""
    run_cosine: float | None = None
    """Cosine of the angle between ``y'`` and ``y``."""
    inherited: float | None = None
    """Of ``y'`` against ``g(x)``, relative to ``y``: what is left without the layer's own error."""
    note: str = ""
    """Why numbers are missing."""

    @property
    def label(self) -> str:
        """The layer's name in a sentence."""
        return label_of(self.layer, self.type)


@dataclass(frozen=True, kw_only=True)
class PrecisionTable:
    """What `ModelProbe.precision` returns: the errors of each layer, the one that costs the output the most first."""

    model: str
    sqnr: float
    """SQNR of the model's output, in dB."""
    cosine: float | None
    """Cosine of the angle between the output of the model and that of the reference."""
    rows: tuple[LayerPrecision, ...] = field(repr=False)
    """The layers in which no other is called, worst first; those that could not be measured last."""
    containers: tuple[LayerPrecision, ...] = field(repr=False)
    """The layers in which others are called, whose errors are in theirs, worst first."""

    def __getitem__(self, layer: str) -> LayerPrecision:
        for row in (*self.rows, *self.containers):
            if row.layer == layer:
                return row
        raise UsageError(f"there is no layer {layer!r} in the table: {listed([row.layer for row in self.rows])} are")

    def __str__(self) -> str:
        lines = [f"{self.model}: SQNR of the output {_shown(self.sqnr)} dB, cosine {_cosine(self.cosine)}", ""]
        lines += table(["layer", *_COLUMNS], map(_cells, self.rows))
        if self.containers:
            lines += ["", *table(["layer with layers inside", *_COLUMNS], map(_cells, self.containers))]
        lines += ["", _LEGEND]
        missing = defaultdict[str, list[str]](list)
        for row in (*self.rows, *self.containers):
            if row.note:
                missing[row.note].append(row.layer)
        lines += [f"Not measured: {listed(collapsed(names), 5)}: {note}." for note, names in missing.items()]
        return "\n".join(lines)


_COLUMNS = ["type", "output dB", "own dB", "own cosine", "run dB", "inherited dB"]
_LEGEND = (
    "SQNR in dB. output: of the reference with this layer taken from the model; own: of the layer on the inputs "
    "of the reference;\nrun: in the run of the model; inherited: what is left in the run without the layer's own error."
)


def precision(
    model: nn.Module,
    reference: nn.Module,
    inputs: Any,
    *,
    layers: Selector = "**",
    rename: Mapping[str, str] | None = None,
    seed: int = 0,
) -> PrecisionTable:
    """Return the error of each layer of a quantized or lower-precision model against its reference.

    SQNR is the signal-to-quantization-noise ratio, ``20 log10(norm(y) / norm(y - y'))`` in dB, as in
    `torch.ao.ns.fx.utils.compute_sqnr`, over all floating-point outputs of a layer and all its calls: 20 dB is an error
    of a tenth, 40 dB of a hundredth, infinity none. An output that is not finite where that of the reference is has the
    SQNR minus infinity.

    Both models run in eval mode without gradients, and are restored afterwards, as by `ModelProbe.run`. There are three
    forwards, and one more for each layer with an error of its own; the outputs of all layers in one forward are in
    memory. A layer is called on the inputs of the reference in the dtype that they have in the run of the model and
    under the autocast there, so that rounding them is part of its own error. Floating-point inputs of the model are
    cast if all its parameters have one dtype and those of the reference another.

    Args:
        model: The model of lower precision, such as what `quantize_dynamic` returned, or a copy in bfloat16. Autocast
            belongs into its forward.
        reference: The model that it is compared with.
        inputs: Their input, a tuple of positional arguments, or a dict of keyword arguments.
        layers: Which layers to look at. The root and layers that are not called are left out.
        rename: Dict of glob of the model's names → glob of the reference's names, for layers with other names.
        seed: The seed of the random state.

    Raises:
        NothingObservedError: No layer of the two was called.
        SelectionError: ``layers`` or ``rename`` matches nothing.
        UsageError: The outputs of the two cannot be compared, the reference does not repeat its output, or one of the
            two is compiled.

    >>> net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> result = precision(copy.deepcopy(net).bfloat16(), net, torch.ones(1, 8))
    >>> len(result.rows), result["0"].own > 30, result["0"].inherited
    (3, True, inf)
    """
    pair = _Pair(model, reference, inputs, layers, rename, seed)
    # Both are preserved before the first one runs: they may have modules in common.
    with preserved(reference) as before, preserved(model) as also:
        return pair.measured([before, also])


def precision_of(
    probe: ModelProbe,
    model: nn.Module,
    reference: nn.Module,
    inputs: Any,
    *,
    layers: Selector = "**",
    rename: Mapping[str, str] | None = None,
) -> PrecisionTable:
    """Return the error of each layer of a quantized or lower-precision model; see `precision`.

    >>> from pytest_modelprobe import ModelProbe
    >>> probe = ModelProbe()
    >>> net, low = (probe.build(lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU())) for _ in range(2))
    >>> 30 < probe.precision(low.bfloat16(), net, torch.ones(4, 2))["0"].own < 70
    True
    """
    return precision(model, reference, inputs, layers=layers, rename=rename, seed=probe.seed)


class _Pair:
    """The two models, and what was seen of their layers. A layer has its name in the model."""

    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module,
        inputs: Any,
        layers: Selector,
        rename: Mapping[str, str] | None,
        seed: int,
    ) -> None:
        self._model, self._reference, self._seed = model, reference, seed
        self._found, self._theirs = Layers(model), Layers(reference)
        self._inputs = inputs
        new = resolve_rename(_names_of(self._found), _names_of(self._theirs), rename) if rename else {}
        self._mine = dict(self._found.modules)
        # A layer of the reference that the model does not have keeps its name.
        self._old = {new.get(name, name): module for name, module in self._theirs.modules.items()}
        self._names = [name for name in select(self._mine | self._old, layers) if name != ROOT]
        self._calls: dict[str, list[_Call]] = defaultdict(list)
        self._times: Counter[str] = Counter()
        """Calls of each layer in the reference."""
        self._errors: dict[str, _LayerErrors] = defaultdict(_LayerErrors)
        self._notes: dict[str, str] = {}
        self.alone = False
        """Whether a layer of the model is called alone. It may be one of the reference too, and has hooks then."""

    def measured(self, states: Sequence[ModelState]) -> PrecisionTable:
        """Run both, then the reference with each layer of the model in turn."""

        def run(found: Layers, model: nn.Module, inputs: Any, hooks: Iterable[_Hook]) -> Outputs:
            for one in (self._model, self._reference):
                one.eval()
            try:
                with (
                    _hooked(found, hooks),
                    seeded(derive(self._seed, "run")),
                    settings_preserved(),
                    torch.no_grad(),
                    interruptible(),
                ):
                    return outputs_of(forward(model, inputs))
            finally:
                for state in states:
                    state.restore()

        def of_reference(at_end: Callable[[str, _Given, Any], Any], names: Iterable[str]) -> Outputs:
            hooks = [_Hook(self, name, self._old[name], at_end, copies=True) for name in names if name in self._old]
            return run(self._theirs, self._reference, self._inputs, hooks)

        inputs = _in_dtype_of(self._model, self._reference, self._inputs)
        mine = [_Hook(self, n, self._mine[n], self._see, copies=False) for n in self._names if n in self._mine]
        now = run(self._found, self._model, inputs, mine)
        whole = of_reference(self._see, [])
        if not whole:
            raise UsageError("the output of the reference has no floating-point tensor: return the logits")
        if (why := unlike(now, whole)) is not None:
            raise UsageError(f"the outputs of the model and of the reference cannot be compared: {why}")
        again = of_reference(self._compare, self._names)
        if error_of(again, whole).sqnr != math.inf:
            raise UsageError("the reference does not repeat its output in eval mode: no error of the model can be told")
        measured = [name for name in self._names if self._is_measured(name)]
        costs = {name: math.inf for name in measured if self._errors[name].own.sqnr == math.inf}
        inexact = [name for name in measured if name not in costs]
        with progress("layer put into the reference", len(inexact)) as each:
            for name in each(inexact):
                self._times.clear()
                error = error_of(of_reference(self._replace, [name]), whole)
                if name not in self._notes:  # a layer that could not be called this time has changed nothing
                    costs[name] = error.sqnr
        rows = [self._row(name, costs.get(name)) for name in self._names if name in costs or name in self._notes]
        if not rows:
            raise NothingObservedError("no layer was compared: select layers that the forward calls")
        rows.sort(key=lambda row: math.inf if row.output is None else row.output)
        outer = {name for name in costs if any(other.startswith(f"{name}.") for other in costs)}
        error = error_of(now, whole)
        return PrecisionTable(
            model=type(self._found.modules[ROOT]).__name__,
            sqnr=error.sqnr,
            cosine=error.cosine,
            rows=tuple(row for row in rows if row.layer not in outer),
            containers=tuple(row for row in rows if row.layer in outer),
        )

    def _is_measured(self, name: str) -> bool:
        """Whether a layer has all its errors. If it was called and has not, there is a note that says why."""
        mine, theirs = len(self._calls[name]), self._times[name]
        if not mine and not theirs:
            return False
        if mine != theirs:
            of = {True: "model", False: "reference"}
            if name not in self._mine or name not in self._old:
                self._notes[name] = f"the {of[name not in self._mine]} has no such layer"
            elif not mine or not theirs:
                self._notes[name] = f"the {of[not mine]} does not call it"
            else:
                self._notes[name] = f"the model calls it {count(mine, 'time')}, the reference {theirs:,}"
            self._errors.pop(name, None)
        return name not in self._notes

    def _row(self, name: str, cost: float | None) -> LayerPrecision:
        module = self._mine[name] if name in self._mine else self._old[name]
        row = LayerPrecision(layer=name, type=type(module).__name__, output=cost, note=self._notes.get(name, ""))
        errors = self._errors.get(name)
        if errors is None or errors.run is None:
            return row
        run = dataclasses.replace(row, run=errors.run.sqnr, run_cosine=errors.run.cosine)
        if cost is None:
            return run
        own, inherited = errors.own, errors.inherited
        return dataclasses.replace(run, own=own.sqnr, own_cosine=own.cosine, inherited=inherited.sqnr)

    # --- what the hooks call ----------------------------------------------------------------------------------------

    def _see(self, name: str, given: _Given, output: Any) -> None:
        """Keep what is needed of a call in the run of the model."""
        dtypes = {path: tensor.dtype for path, tensor in flatten_call(given.args, given.kwargs).tensors}
        self._calls[name].append(_Call(dtypes, given.autocast, outputs_of(output)))

    def _compare(self, name: str, given: _Given, output: Any) -> None:
        """Add up the errors of a call in the run of the reference."""
        number = self._times[name]
        self._times[name] += 1
        if number >= len(self._calls[name]):
            return
        call, expected, errors = self._calls[name][number], outputs_of(output, copied=False), self._errors[name]
        why = unlike(call.outputs, expected) if expected else "it has no floating-point output"
        if why is not None or errors.run is None:
            self._notes.setdefault(name, why or "")
            errors.run = None
            return
        errors.run += error_of(call.outputs, expected)
        own = None if name in self._notes else self._of_model(name, number, given)
        if own is None:
            return
        if (why := unlike(own, expected)) is not None:
            self._notes[name] = why
            return
        errors.own += error_of(own, expected)
        errors.inherited += error_of(call.outputs, expected, against=own)

    def _replace(self, name: str, given: _Given, output: Any) -> Any:
        """Return what the layer of the model returns for the inputs of the reference, in place of the output."""
        number = self._times[name]
        self._times[name] += 1
        new = self._of_model(name, number, given) or {}
        by_id = {id(tensor): new[path].to(tensor.dtype) for path, tensor in tensors_of(output) if path in new}
        return map_tensors(lambda tensor: by_id.get(id(tensor), tensor), output)

    def _of_model(self, name: str, number: int, given: _Given) -> Outputs | None:
        """Return the output of the model's layer for inputs of the reference, or `None`, with a note that says why."""
        call = self._calls[name][number]
        if given.reason:
            self._notes[name] = f"its inputs cannot be copied ({given.reason})"
            return None
        self.alone = True
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(seeded(self._seed))
                before = seeding.generator_states(torch.device("cpu"))
                for device, dtype, enabled in set(call.autocast) - {*autocast_states()}:
                    stack.enter_context(torch.autocast(device, dtype, enabled))
                args, kwargs = _cast(given, call.dtypes)
                found = outputs_of(self._mine[name](*args, **kwargs))
                if seeding.generator_states(torch.device("cpu")) != before:
                    self._notes[name] = "it draws random numbers in eval mode"
                    return None
                return found
        except Exception as error:  # noqa: BLE001 - whatever a layer raises for inputs that are not its own
            self._notes[name] = f"it cannot take the inputs of the reference ({_reason(error)})"
            return None
        finally:
            self.alone = False


# --- layers ---------------------------------------------------------------------------------------------------------


def _names_of(found: Layers) -> Record:
    layers = {name: Layer(name=name, type=type(module).__name__) for name, module in found.modules.items()}
    return Record(model=type(found.modules[ROOT]).__name__, layers=layers)


def _in_dtype_of(model: nn.Module, reference: nn.Module, inputs: Any) -> Any:
    """Return the inputs for a model whose parameters have one dtype, if those of the reference have another."""
    mine, theirs = ({p.dtype for p in nn.Module.parameters(one) if p.is_floating_point()} for one in (model, reference))
    if len(mine) != 1 or len(theirs) != 1:
        return inputs
    (new,), (old,) = mine, theirs
    return map_tensors(lambda tensor: tensor.to(new) if tensor.dtype == old else tensor, inputs)


class _Given(NamedTuple):
    """The arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: tuple[Autocast, ...]
    reason: str = ""
    """Why they could not be copied."""


class _Hook:
    """Hands the arguments and the output of each call of a layer to a function, which may return another output."""

    def __init__(
        self,
        pair: _Pair,
        name: str,
        module: nn.Module,
        at_end: Callable[[str, _Given, Any], Any],
        *,
        copies: bool,
    ) -> None:
        self._pair, self._name, self._module, self._at_end, self._copies = pair, name, module, at_end, copies
        self._running: list[_Given] = []

    def add_to(self, stack: contextlib.ExitStack) -> None:
        """Put the hook on its module until the stack ends."""
        module, before, after = self._module, CallHook(self._module, self._begins), CallHook(self._module, self._ends)
        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)

    def _begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._pair.alone:
            return
        reason = ""
        if self._copies:
            # Now, for the layer may write to its inputs; all of them, for it may write to a cache.
            try:
                args, kwargs = copy.deepcopy((args, kwargs))
            except Exception as error:  # noqa: BLE001 - whatever an object raises that cannot be copied
                reason = _reason(error)
        self._running.append(_Given(args, kwargs, autocast_states(), reason))

    def _ends(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self._pair.alone:
            return None
        return self._at_end(self._name, self._running.pop(), output)


@contextlib.contextmanager
def _hooked(found: Layers, hooks: Iterable[_Hook]) -> Iterator[None]:
    """Put hooks on a model.

    Raises:
        UsageError: Compiled code ran, which would run eagerly with hooks: the numbers would be those of other code.
    """
    compiled: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(run_eagerly(found, on_call=compiled.append))
        for hook in hooks:
            hook.add_to(stack)
        yield
    if compiled:
        raise UsageError(
            f"{compiled[0]} is compiled, and layers in compiled code cannot be called alone: "
            "give the model before it is compiled; checks.compile_parity compares it with the compiled one"
        )


# --- values ---------------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """What is kept of a call of a layer of the model."""

    dtypes: dict[str, torch.dtype]
    """Of its inputs, by path."""
    autocast: tuple[Autocast, ...]
    outputs: Outputs


def _cast(given: _Given, dtypes: Mapping[str, torch.dtype]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with floating-point tensors in the dtype that they have in the run of the model."""
    tensors = flatten_call(given.args, given.kwargs).tensors
    new = {id(t): t.to(dtypes[path]) for path, t in tensors if path in dtypes and t.is_floating_point()}
    changed: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(
        lambda tensor: new.get(id(tensor), tensor), (given.args, given.kwargs)
    )
    return changed


def _reason(error: Exception) -> str:
    what = str(error).partition("\n")[0].rstrip(".:")
    return f"{type(error).__name__}: {what}"


# --- errors ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _LayerErrors:
    """The errors of a layer, over all its calls."""

    own: Error = field(default_factory=Error)
    run: Error | None = field(default_factory=Error)
    """None if the outputs of a call cannot be compared."""
    inherited: Error = field(default_factory=Error)


# --- telling --------------------------------------------------------------------------------------------------------


def _shown(sqnr: float | None) -> str:
    return "-" if sqnr is None else f"{sqnr:.1f}"


def _cosine(cosine: float | None) -> str:
    return "-" if cosine is None else f"{cosine:.4f}"


def _cells(row: LayerPrecision) -> list[Cell]:
    numbers = _shown(row.output), _shown(row.own), _cosine(row.own_cosine), _shown(row.run), _shown(row.inherited)
    return [row.label, row.type, *numbers]
