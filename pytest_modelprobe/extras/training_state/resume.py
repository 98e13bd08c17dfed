"""Whether a run that was stopped, saved and loaded goes on as one that was never stopped.

A checkpoint that lacks the moments of Adam, the step of the scheduler or a random state loads without an error, and the
loss looks much the same. Here a run is stopped and resumed, and compared bit for bit with one of the same seed that was
not: the state right after loading says what was lost, the records of the steps that follow say from where it matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import nn

from pytest_modelprobe.checks.check import StateCheck, noted
from pytest_modelprobe.checks.outcome import Outcome
from pytest_modelprobe.comparison.text import percent
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import GENERATORS, check_supported, seeding
from pytest_modelprobe.probe import ModelProbe
from pytest_modelprobe.record import ROOT, Plain, Reading, Record, estimated_change, label_of, qualified
from pytest_modelprobe.runs import Watch
from pytest_modelprobe.text import Cell, count, failure, listed, number, printable, table

from .state import Kind, Leaves, TrainingState, Unequal, shown, through_file, unequal

Where = Literal[
    "attribute", "weights", "inputs", "calls", "output", "gradient", "applied", "hyperparameters", "update", "buffer"
]
"""What of a step differs, in the order in which a step does it."""

_CAUSES: Mapping[Where | Literal["end"], tuple[Kind, ...]] = {
    "attribute": ("attribute",),
    "weights": ("weights", "tensor"),
    "inputs": ("random", "value", "tensor"),
    "calls": ("value", "random", "attribute"),
    "output": ("random", "buffer", "attribute", "value", "tensor"),
    "gradient": ("random", "state", "value", "tensor"),
    "applied": ("state", "value", "tensor"),
    "hyperparameters": ("moments", "hyperparameters", "state", "value"),
    "update": ("moments", "hyperparameters", "state"),
    "buffer": ("buffer",),
    "end": ("weights", "buffer", "tensor"),
}
"""What differs first → which lost leaves may do that at once: one of these is named in the first line."""

_ADVICE: Mapping[Where | Literal["end"], str] = {
    "attribute": "Put the attribute into the model's state_dict: as a buffer, or by get_extra_state.",
    "weights": "Look at what load does with the weights, and at the keys that it leaves out.",
    "inputs": "Save what says which batch comes next: the place within the epoch, and the state of the loader's "
    "generator, which also seeds its workers.",
    "calls": "Look at what the loop does at a certain step or epoch, and at the counter that says so.",
    "output": "Save the random states of torch, numpy, Python and CUDA, and load them last, right before training goes "
    "on: a new iterator of a DataLoader draws a number too.",
    "gradient": "Look at the scale of the loss, at its weights, and at random numbers drawn outside the model.",
    "applied": "Save the state of the GradScaler, and whatever else changes gradients before the optimizer steps.",
    "hyperparameters": "Save the state_dict of the scheduler beside that of the optimizer.",
    "update": "Save the state_dict of the optimizer, and load it into the optimizer that goes on.",
    "buffer": "Register the buffer as persistent, and look at the keys that load leaves out.",
    "end": "Save the average too, and load it into the model that goes on averaging.",
}


@StateCheck
def resume(
    probe: ModelProbe,
    make: Callable[[], Any],
    train: Callable[[Any, int], object],
    *,
    steps: int = 6,
    at: int = 3,
    save: Callable[[Any], Any] | None = None,
    load: Callable[[Any, Any], Any] | None = None,
) -> Outcome:
    """Check that a run that is saved, loaded and continued equals one that was not interrupted, bit for bit.

    One run makes a state and trains it for ``steps`` steps. Another is stopped after ``at`` steps and saved; a state
    that is made anew loads what was saved and is trained for the rest. What was saved goes through a file in memory.
    Each run starts from the same random states, and so does the one that loads, as a script does that sets its seed.

    A difference in a step, or at the end in the weights and buffers of any model of the state, such as an average,
    breaks the check. What load did not bring back, but has no such effect, is a hint. If training does not repeat, the
    check is not applicable: two runs up to ``at`` say so.

    Args:
        probe: Gives the seed.
        make: Returns a state of training: a model, or a dict, a tuple or an object that holds the model, its optimizer,
            scheduler, scaler, loader, average or counters.
        train: Goes on with a state for a number of steps of the optimizer: ``train(state, 3)``.
        steps: Steps of the whole run.
        at: Steps before it is stopped.
        save: Returns what is saved of a state, or the path where it is. By default it is the ``state_dict`` of all in
            the state that have one, its tensors, numbers and generators, and the random states of torch, numpy, Python
            and CUDA.
        load: Puts what was saved into a state that was just made: ``load(state, saved)``. It may return another state.

    Raises:
        AssertionError: The resumed run differs; the message names what was lost and the first step that differs.
        UsageError: Training does not repeat or took another number of steps, the model is not known, or what was saved
            cannot be written to a file.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> def make():
    ...     model = nn.Linear(3, 1)
    ...     return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "step": 0}
    >>> def train(state, steps):
    ...     for _ in range(steps):
    ...         x = torch.randn(8, 3, generator=torch.Generator().manual_seed(state["step"]))
    ...         state["optimizer"].zero_grad()
    ...         state["model"](x).square().mean().backward()
    ...         state["optimizer"].step()
    ...         state["step"] += 1
    >>> print(checks.resume(ModelProbe(), make, train))
    resume holds for Linear: 3 steps after step 3 of 6; looked at: model, optimizer, step and random states
    >>> def weights_alone(state):
    ...     return {"model": state["model"].state_dict(), "step": state["step"]}
    >>> def load_weights(state, saved):
    ...     state["model"].load_state_dict(saved["model"])
    ...     state["step"] = saved["step"]
    >>> print(checks.resume.outcome(ModelProbe(), make, train, save=weights_alone, load=load_weights).layer)
    weight
    """
    __tracebackhide__ = True
    _check(make, train, steps, at, save, load)
    return _Runs(make, train, steps, at, save, load, seeding.derive(probe.seed, "resume")).outcome()


def _check(make: object, train: object, steps: object, at: object, save: object, load: object) -> None:
    __tracebackhide__ = True
    for name, one, how in (("make", make, "make()"), ("train", train, "train(state, steps)")):
        if not callable(one) or isinstance(one, nn.Module):
            raise UsageError(f"{name} is a function, {how}; got {type(one).__name__}")
    for name, one, how in (("save", save, "save(state)"), ("load", load, "load(state, saved)")):
        if one is not None and not callable(one):
            raise UsageError(f"{name}= is a function, {how}; got {type(one).__name__}")
    if (save is None) != (load is None):
        given, missing = ("save", "load") if load is None else ("load", "save")
        raise UsageError(f"{given}= is given without {missing}=: what one writes the other has to read")
    if type(steps) is not int or type(at) is not int or not 1 <= at < steps:
        raise UsageError(f"at= is a step within the run, from 1 to steps - 1; got at={at!r}, steps={steps!r}")


# --- the runs ---------------------------------------------------------------------------------------------------------


class _Followed(NamedTuple):
    """What was seen of a run, or of a part of one."""

    steps: list[Record]
    begun: Leaves | None
    """The state when the first module is called after some step; None if none was."""
    end: Leaves


@dataclass(frozen=True, slots=True)
class _Runs:
    make: Callable[[], Any]
    train: Callable[[Any, int], object]
    steps: int
    at: int
    save: Callable[[Any], Any] | None
    load: Callable[[Any, Any], Any] | None
    seed: int

    @property
    def rest(self) -> int:
        return self.steps - self.at

    def outcome(self) -> Outcome:
        """Run, interrupt, resume, and compare."""
        __tracebackhide__ = True
        state, model = self._made()
        name = type(model).__name__
        whole = self._follow(state, model, self.steps, read_after=self.at)
        stopped, stopped_model = self._made()
        first = self._follow(stopped, stopped_model, self.at)
        if other := _first(first.steps, whole.steps):
            return self._not_repeatable(name, *other, self.at)
        saved, then, states = self._saved(stopped)
        resumed, resumed_model = self._made()
        resumed, resumed_model = self._loaded(resumed, resumed_model, saved)
        lost = unequal(then, resumed.read())
        second = self._follow(resumed, resumed_model, self.rest, read_after=0, resumed=True)
        drifted: Mapping[Any, Unequal] = {}
        if whole.begun is not None and second.begun is not None:
            at_begin = unequal(whole.begun, second.begun)
            lost = {key: one for key, one in lost.items() if key in at_begin}  # what train itself puts back is there
            drifted = {key: one for key, one in at_begin.items() if key not in lost}
        differing = _first(second.steps, whole.steps, self.at)
        end = {
            key: one
            for key, one in unequal(whole.end, second.end).items()
            if one.leaf.kind in _CAUSES["end"] and not one.lost
        }
        if differing is None and not end:
            return self._without_effect(name, resumed, lost, list(dict.fromkeys(part for part, _ in then)))
        verdict = _Verdict(self.at, list(lost.values()), list(drifted.values()), differing, list(end.values()))
        alone = self._trained_twice(stopped, stopped_model, states, whole)
        if other := _first(self._follow(*self._made(), self.steps).steps, whole.steps):
            return self._not_repeatable(name, *other, self.steps)
        return verdict.outcome(name, resumed, alone)

    def _made(self) -> tuple[TrainingState, nn.Module]:
        __tracebackhide__ = True
        seeding.seed_everything(self.seed)
        state = TrainingState(self.make())
        model = state.model()
        check_supported(model)
        return state, model

    def _follow(
        self,
        state: TrainingState,
        model: nn.Module,
        steps: int,
        *,
        read_after: int | None = None,
        resumed: bool = False,
    ) -> _Followed:
        """Train a state while its model is watched."""
        __tracebackhide__ = True
        begun: list[Leaves] = []
        # One more than asked for: a train that takes more is to be seen.
        with Watch(model, steps=steps + 1, isolate=False, seed=self.seed) as watch:

            def read(module: nn.Module, args: object) -> None:
                if not begun and len(watch.steps) == read_after:
                    begun.append(TrainingState(state.whole).read())

            hook = nn.modules.module.register_module_forward_pre_hook(read)
            try:
                with noted(f"in train(state, {steps})" + " of the state that was loaded" * resumed, "resume"):
                    self.train(state.whole, steps)
            finally:
                hook.remove()
            records = list(watch.steps)
        if len(records) != steps:
            taken = "more" if len(records) > steps else number(len(records))
            after = " after load" if resumed else ""
            why = (
                "train it through an optimizer that holds its parameters"
                if not records
                else "train goes on for as many steps of the optimizer as it is told, from wherever the state is"
            )
            raise UsageError(
                f"train(state, {steps}){after} took {taken} steps of an optimizer of {type(model).__name__}: {why}"
            )
        return _Followed(records, begun[0] if begun else None, TrainingState(state.whole).read())

    def _saved(self, state: TrainingState) -> tuple[Any, Leaves, list[Any]]:
        """Return what is saved, the state as it was then, and the random states."""
        __tracebackhide__ = True
        state = TrainingState(state.whole)
        then = state.read()
        states = [one.get() for one in GENERATORS]
        with noted("in save(state)" if self.save else "in the default of save=", "resume"):
            saved = state.saved() if self.save is None else self.save(state.whole)
        return through_file(saved), then, states

    def _loaded(self, state: TrainingState, model: nn.Module, saved: Any) -> tuple[TrainingState, nn.Module]:
        __tracebackhide__ = True
        with noted("in load(state, saved)" if self.load else "in the default of load=", "resume"):
            if self.load is None:
                state.load(saved)
                return TrainingState(state.whole), model
            returned = self.load(state.whole, saved)
        # load_state_dict returns the keys that were missing: that is no state.
        found = TrainingState(state.whole if returned is None else returned)
        if not found.models:
            found = TrainingState(state.whole)
        return found, found.model()

    def _trained_twice(self, state: TrainingState, model: nn.Module, states: list[Any], whole: _Followed) -> str:
        """Return a sentence if training in two calls differs also where nothing is saved and loaded between them."""
        for one, was in zip(GENERATORS, states, strict=True):
            one.set(was)
        try:
            again = self._follow(state, model, self.rest)
        except Exception:  # noqa: BLE001 - a trainer may only go on from a checkpoint
            return ""
        if other := _first(again.steps, whole.steps, self.at):
            return (
                f"Step {other[0]} also differs if train is called twice and nothing is saved and loaded between: train "
                "begins something anew, such as an iterator over the data."
            )
        return ""

    def _not_repeatable(self, name: str, step: int, found: Sequence[_Difference], steps: int) -> Outcome:
        first = found[0]
        made = step == 0 and first.kind in ("weights", "attribute")
        where = "make is not repeatable" if made else "train is not repeatable"
        text = failure(
            f"{where}: two runs of {count(steps, 'step')} with one seed differ at step {step}, {first.at}",
            ("what", "changed by", "second run", "first run"),
            [one.row() for one in found],
            "Each run starts from the same random states: look for what the runs share, as a loader or a generator "
            "not of make, for the clock, and for operations that torch cannot repeat, which "
            "torch.use_deterministic_algorithms(True) names.",
        )
        return Outcome(check="resume", model=name, verdict="not applicable", text=text, layer=first.layer)

    def _without_effect(
        self, name: str, state: TrainingState, lost: Mapping[Any, Unequal], looked_at: Sequence[str]
    ) -> Outcome:
        after = f"{count(self.rest, 'step')} after step {self.at} of {self.steps}"
        if not lost:
            unread = f"; not looked at, as their state is not known: {listed(state.unread)}" if state.unread else ""
            text = f"{after}; looked at: {listed(looked_at, 8)}{unread}"
            return Outcome(check="resume", model=name, verdict="holds", text=text)
        first = next(iter(lost.values()))
        line = f"{_said(first)}; {count(self.rest, 'step')} after that are the same{_more(len(lost) - 1)}"
        advice = "It may matter later: give more steps=, or save it."
        return Outcome(
            check="resume", model=name, verdict="hint", text=_text(line, _after_load(lost.values()), advice), layer=ROOT
        )


# --- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Difference:
    """One value of a step that is another in the resumed run."""

    kind: Where
    layer: str
    """The layer or the parameter."""
    what: str
    now: Plain | Reading
    was: Plain | Reading

    @property
    def at(self) -> str:
        """``at the update of fc1.weight``."""
        return f"at the {self.what}"

    def row(self) -> tuple[Cell, ...]:
        """The cells of `_OF_STEP`."""
        return self.what, _change(self.now, self.was), _cell(self.now), _cell(self.was)


def _first(now: Sequence[Record], was: Sequence[Record], since: int = 0) -> tuple[int, list[_Difference]] | None:
    """Return the number of the first step that differs, and what of it; ``now`` begins at the step ``since``."""
    pairs = enumerate(zip(now, was[since:], strict=False), since)
    return next(((step, found) for step, pair in pairs if (found := _differences(*pair))), None)


def _differences(now: Record, was: Record) -> list[_Difference]:
    """Return what differs between two records of one step, in the order in which the step does it."""
    found: dict[Where, list[_Difference]] = {where: [] for where in _CAUSES if where != "end"}

    def compare(kind: Where, layer: str, what: str, a: Plain | Reading, b: Plain | Reading) -> None:
        if a != b:
            found[kind].append(_Difference(kind, layer, what, a, b))

    for name, layer in was.layers.items():
        if (other := now.layers.get(name)) is None:
            compare("calls", name, f"layer {layer.label}", None, layer.type_name)
            continue
        for key in {**layer.attributes, **other.attributes}:
            pair = other.attributes.get(key), layer.attributes.get(key)
            compare("attribute", name, f"{qualified(name, key)}", *pair)
        own = {p.name: p for p in other.parameters}
        for p in layer.parameters:
            if (q := own.get(p.name)) is None:
                continue
            full = qualified(name, p.name)
            compare("weights", full, f"value of {full}", q.reading, p.reading)
            compare("gradient", full, f"gradient of {full}", q.gradient, p.gradient)
            if q.gradient == p.gradient:
                compare("applied", full, f"gradient of {full} as applied", q.applied, p.applied)
            compare("update", full, f"update of {full}", q.update, p.update)
        own = {p.name: p for p in other.buffers}
        for p in layer.buffers:
            full = qualified(name, p.name)
            if p.name in own:
                compare("buffer", full, f"buffer {full}", own[p.name].reading, p.reading)
        compare("calls", name, f"calls of {layer.label}", len(other.calls), len(layer.calls))
    for group, (a, b) in enumerate(zip(now.optimizers, was.optimizers, strict=False)):
        for key in {**b.options, **a.options}:
            of = f" of group {group}" if len(was.optimizers) > 1 else ""
            compare("hyperparameters", ROOT, f"{key}{of} of {b.optimizer}", a.options.get(key), b.options.get(key))
    there = {(one.name, call.root, call.root_training, call.index): call for one, call in now.calls}
    for layer, call in sorted(was.calls, key=lambda pair: pair[1].finished):
        again = there.get((layer.name, call.root, call.root_training, call.index))
        if again is None:
            mode = "training" if call.root_training else "evaluation"
            compare("calls", layer.name, f"{layer.label}, called in {mode} mode", False, True)
            continue
        if layer.name == call.root:
            values = {value.path: value for value in again.inputs}
            for value in call.inputs:
                if value.path in values:
                    what = f"{value.path} of {layer.label}"
                    compare("inputs", layer.name, what, values[value.path].forward, value.forward)
        values = {value.path: value for value in again.outputs}
        for value in call.outputs:
            if value.path in values:
                what = f"{value.path} of {layer.label}"
                compare("output", layer.name, what, values[value.path].forward, value.forward)
    return [one for kind in found.values() for one in kind]


# --- words ------------------------------------------------------------------------------------------------------------

_AFTER_LOAD = ("after load", "changed by", "loaded", "when saved")
_OF_STEP = ("changed by", "resumed", "uninterrupted")
_MOST_ROWS = 10
"""Rows of each of the two tables."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """A resumed run that differs."""

    at: int
    lost: list[Unequal]
    drifted: list[Unequal]
    """What load brought back, and is another when the next step begins."""
    differing: tuple[int, list[_Difference]] | None
    """The first step that differs, and what of it."""
    end: list[Unequal]

    def outcome(self, name: str, state: TrainingState, alone: str) -> Outcome:
        kind: Where | Literal["end"] = "end" if self.differing is None else self.differing[1][0].kind
        if self.differing is None:
            one = self.end[0]
            layer, where = one.leaf.of or one.leaf.text, "the steps are the same"
            where += f", and at the end {one.leaf.name} differs{_by(one)}"
            when, rows = "at the end", [_row(one) for one in self.end]
        else:
            step, found = self.differing
            layer, where = found[0].layer, f"step {step} is the first that differs, {found[0].at}"
            when, rows = f"step {step}", [one.row() for one in found]
        lost, drifted = (self._named(kind, layer, among) for among in (self.lost, self.drifted))
        if lost is not None:
            line = f"{_said(lost)}; {where}{_more(len(self.lost) - 1)}"
        elif drifted is not None:
            line = f"{drifted.leaf.name} is another when step {self.at} begins, though load brought it back; {where}"
        elif kind == "inputs":
            line = f"{label_of(layer)} gets other inputs while all weights are the same: the order of data; {where}"
            line += _more(len(self.lost), "value")
        else:
            line = f"{label_of(layer)} differs, and nothing that was looked at and may cause it is lost; {where}"
            line += _more(len(self.lost), "value")
        shown_first = sorted(self.lost, key=lambda one: one is not lost)
        tables = [_after_load(shown_first)] if self.lost else []
        if lost is None and drifted is not None:
            tables.append(((f"step {self.at} begins", *_OF_STEP), [_row(drifted)]))
        tables.append(((when, *_OF_STEP), rows))
        unread = f"Not looked at, as their state is not known: {listed(state.unread)}." if state.unread else ""
        text = _text(line, *tables, _advice(kind, lost), alone, unread)
        return Outcome(check="resume", model=name, verdict="broken", text=text, layer=layer)

    def _named(self, kind: Where | Literal["end"], layer: str, among: Sequence[Unequal]) -> Unequal | None:
        """Return the leaf of a kind that may be the cause: that of the parameter if there is one."""
        fits = [one for one in among if one.leaf.kind in _CAUSES[kind]]
        if self.differing is None:
            ended = {one.leaf.name for one in self.end}
            fits = [one for one in fits if one.leaf.name in ended]
        return min(fits, key=lambda one: one.leaf.of != layer or not layer, default=None)


def _said(one: Unequal) -> str:
    """Return what was lost as the beginning of a sentence."""
    if one.missing_then:
        return f"{one.leaf.name} was not there when the state was saved"
    if one.now is None:
        return f"{one.leaf.name} is lost: it is missing after load"
    if one.leaf.kind == "random":
        return f"{one.leaf.name} is not restored: it is another after load"
    if one.change is not None and one.leaf.value.numel() > 1:
        return f"{one.leaf.name} is not restored: it is another after load{_by(one)}"
    return f"{one.leaf.name} is not restored: {shown(one.now.value)} after load, and {shown(one.leaf.value)} when saved"


def _by(one: Unequal) -> str:
    return "" if one.change is None else f", by {percent(one.change)}"


def _more(n: int, noun: str = "more value") -> str:
    return f"; {count(n, noun)} {'differs' if n == 1 else 'differ'} after load" if n > 0 else ""


_Table = tuple[Sequence[str], Sequence[tuple[Cell, ...]]]


def _text(line: str, *parts: _Table | str) -> str:
    """Return a message: the first line, tables and sentences."""
    texts = [
        printable(one) if isinstance(one, str) else "\n".join(table(*one, most=_MOST_ROWS)) for one in parts if one
    ]
    return "\n\n".join([printable(line), *texts])


def _after_load(lost: Iterable[Unequal]) -> _Table:
    return _AFTER_LOAD, [_row(one) for one in lost]


def _advice(kind: Where | Literal["end"], lost: Unequal | None) -> str:
    if lost is not None and lost.leaf.kind in ("moments", "hyperparameters"):
        return _ADVICE["update"]
    if lost is not None and lost.leaf.kind in ("state", "value", "tensor"):
        return f"Save {lost.leaf.part}, and load it into what goes on."
    return _ADVICE[kind]


def _row(one: Unequal) -> tuple[Cell, ...]:
    now = "missing" if one.now is None else shown(one.now.value)
    then = "missing" if one.missing_then else shown(one.leaf.value)
    return one.leaf.name, "-" if one.change is None else percent(one.change), now, then


def _change(now: Plain | Reading, was: Plain | Reading) -> str:
    if not (isinstance(now, Reading) and isinstance(was, Reading) and now.fingerprint and was.fingerprint):
        return "-"
    return percent(estimated_change(now.fingerprint, was.fingerprint))


def _cell(value: Plain | Reading) -> str:
    if not isinstance(value, Reading):
        return "none" if value is None else shown(value)
    if value.statistics is None:
        return value.reason or "not read"
    rms = value.statistics.rms
    return "not finite" if rms is None else f"rms {rms:.6g}"
