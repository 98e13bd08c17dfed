"""Whether a run that was stopped, saved and loaded goes on as one that was never stopped.

A checkpoint that lacks the moments of Adam, the step of the scheduler or a random state loads without an error, and the
loss looks much the same. Here a run is stopped and resumed, and compared bit for bit with one of the same seed that was
not: the state right after loading says what was lost, the records of the steps that follow say from where it matters.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pytest_modelprobe.checks.check import StateCheck, noted
from pytest_modelprobe.checks.outcome import Outcome
from pytest_modelprobe.comparison.text import percent
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import check_supported, seeding
from pytest_modelprobe.probe import ModelProbe
from pytest_modelprobe.record import ROOT, Plain, Reading, Record, Value, estimated_change, label_of, qualified
from pytest_modelprobe.runs import Watch
from pytest_modelprobe.text import Cell, count, failure, listed, number, printable, table

from .state import Kind, Leaves, TrainingState, Unequal, shown, unequal

Where = Literal["weights", "inputs", "calls", "output", "gradient", "hyperparameters", "update", "buffer", "end"]
"""What of a step differs, in the order in which a step does it; at the end, what the state holds."""

_CAUSES: Mapping[Where, tuple[Kind, ...]] = {
    "weights": ("weights", "tensor"),
    "inputs": ("random", "value", "tensor"),
    "calls": ("value", "random", "attribute"),
    "output": ("random", "buffer", "attribute", "value", "tensor"),
    "gradient": ("random", "state", "value", "tensor"),
    "hyperparameters": ("moments", "hyperparameters", "state", "value"),
    "update": ("moments", "hyperparameters", "state"),
    "buffer": ("buffer",),
    "end": ("weights", "buffer", "tensor"),
}
"""What differs first → which lost leaves may do that at once: one of these is named in the first line."""


@StateCheck
def resume(
    probe: ModelProbe,
    make: Callable[[], Any],
    train: Callable[[Any, int], object],
    save: Callable[[Any], Any],
    load: Callable[[Any, Any], Any],
    *,
    steps: int = 6,
    at: int = 3,
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
        save: Returns what is saved of a state, or the path where it is.
        load: Puts what was saved into a state that was just made: ``load(state, saved)``. It may return another state.
        steps: Steps of the whole run.
        at: Steps before it is stopped.

    Raises:
        AssertionError: The resumed run differs; the message names what was lost and the first step that differs.
        UsageError: Training does not repeat or took another number of steps, or the model is not known.

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
    >>> def save(state):
    ...     return {**{name: state[name].state_dict() for name in ("model", "optimizer")}, "step": state["step"]}
    >>> def load(state, saved):
    ...     state["model"].load_state_dict(saved["model"])
    ...     state["optimizer"].load_state_dict(saved["optimizer"])
    ...     state["step"] = saved["step"]
    >>> print(checks.resume(ModelProbe(), make, train, save, load))
    resume holds for Linear: 3 steps after step 3 of 6; looked at: model, optimizer, step and random states
    >>> def load_weights(state, saved):
    ...     state["model"].load_state_dict(saved["model"])
    ...     state["step"] = saved["step"]
    >>> print(checks.resume.outcome(ModelProbe(), make, train, save, load_weights).layer)
    weight
    """
    __tracebackhide__ = True
    functions = ("make", make, "make()"), ("train", train, "train(state, steps)"), ("save", save, "save(state)")
    for name, one, how in (*functions, ("load", load, "load(state, saved)")):
        if not callable(one) or isinstance(one, nn.Module):
            raise UsageError(f"{name} is a function, {how}; got {type(one).__name__}")
    if type(steps) is not int or type(at) is not int or not 1 <= at < steps:
        raise UsageError(f"at= is a step within the run, from 1 to steps - 1; got at={at!r}, steps={steps!r}")
    return _Runs(make, train, save, load, steps, at, seeding.derive(probe.seed, "resume")).outcome()


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
    save: Callable[[Any], Any]
    load: Callable[[Any, Any], Any]
    steps: int
    at: int
    seed: int

    def outcome(self) -> Outcome:
        """Run, interrupt, resume, and compare."""
        __tracebackhide__ = True
        state = self._made()
        name = type(state.model()).__name__
        whole = self._follow(state, self.steps, read_after=self.at)
        stopped = self._made()
        first = self._follow(stopped, self.at)
        if other := _first(first.steps, whole.steps):
            return self._not_repeatable(name, *other, self.at)
        stopped = TrainingState(stopped.whole)
        then = stopped.read()
        with noted("in save(state)", "resume"):
            file = io.BytesIO()
            torch.save(self.save(stopped.whole), file)
        resumed = self._made()
        with noted("in load(state, saved)", "resume"):
            saved = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
            returned = self.load(resumed.whole, saved)
        # load_state_dict returns the keys that were missing: that is no state.
        other_state = TrainingState(returned)
        resumed = other_state if other_state.models else TrainingState(resumed.whole)
        lost = unequal(then, resumed.read())
        second = self._follow(resumed, self.steps - self.at, read_after=0, after=" after load")
        if whole.begun is not None and second.begun is not None:  # what train itself puts back is there
            lost = {key: one for key, one in lost.items() if key in unequal(whole.begun, second.begun)}
        differing = _first(second.steps, whole.steps, self.at)
        end = [
            one
            for one in unequal(whole.end, second.end).values()
            if one.leaf.kind in _CAUSES["end"] and one.now is not None
        ]
        if differing is None and not end:
            return self._without_effect(name, resumed, [*lost.values()], list(dict.fromkeys(part for part, _ in then)))
        if other := _first(self._follow(self._made(), self.steps).steps, whole.steps):
            return self._not_repeatable(name, *other, self.steps)
        return _broken(name, resumed, [*lost.values()], differing, end)

    def _made(self) -> TrainingState:
        __tracebackhide__ = True
        seeding.seed_everything(self.seed)
        state = TrainingState(self.make())
        check_supported(state.model())
        return state

    def _follow(self, state: TrainingState, steps: int, *, read_after: int | None = None, after: str = "") -> _Followed:
        """Train a state while its model is watched."""
        __tracebackhide__ = True
        begun: list[Leaves] = []
        model = state.model()
        # One more than asked for: a train that takes more is to be seen.
        with Watch(model, steps=steps + 1, isolate=False, seed=self.seed) as watch:

            def read(module: nn.Module, args: object) -> None:
                if not begun and len(watch.steps) == read_after:
                    begun.append(TrainingState(state.whole).read())

            hook = nn.modules.module.register_module_forward_pre_hook(read)
            try:
                with noted(f"in train(state, {steps}){after}", "resume"):
                    self.train(state.whole, steps)
            finally:
                hook.remove()
            records = list(watch.steps)
        if len(records) != steps:
            taken = "more" if len(records) > steps else number(len(records))
            raise UsageError(
                f"train(state, {steps}){after} took {taken} steps of an optimizer of {type(model).__name__}: train "
                "goes on for as many steps as it is told, from wherever the state is, of an optimizer that holds the "
                "parameters"
            )
        return _Followed(records, begun[0] if begun else None, TrainingState(state.whole).read())

    def _not_repeatable(self, name: str, step: int, found: Sequence[_Difference], steps: int) -> Outcome:
        first = found[0]
        where = "make" if step == 0 and first.kind == "weights" else "train"
        text = failure(
            f"{where} is not repeatable: two runs of {count(steps, 'step')} with one seed differ at step {step}, at "
            f"the {first.what}",
            ("what", "changed by", "second run", "first run"),
            [one.row() for one in found],
            "Each run starts from the same random states: look for what the runs share, as a loader or a generator "
            "not of make, for the clock, and for operations that torch cannot repeat, which "
            "torch.use_deterministic_algorithms(True) names.",
        )
        return Outcome(check="resume", model=name, verdict="not applicable", text=text, layer=first.layer)

    def _without_effect(
        self, name: str, state: TrainingState, lost: Sequence[Unequal], looked_at: Sequence[str]
    ) -> Outcome:
        rest = count(self.steps - self.at, "step")
        if not lost:
            unread = f"; not looked at, as their state is not known: {listed(state.unread)}" if state.unread else ""
            text = f"{rest} after step {self.at} of {self.steps}; looked at: {listed(looked_at, 8)}{unread}"
            return Outcome(check="resume", model=name, verdict="holds", text=text)
        line = f"{_said(lost[0])}; {rest} after that are the same{_more(len(lost) - 1)}"
        advice = "It may matter later: give more steps=, or save it."
        text = failure(line, _AFTER_LOAD, map(_row, lost), advice)
        return Outcome(check="resume", model=name, verdict="hint", text=text, layer=ROOT)


# --- steps ------------------------------------------------------------------------------------------------------------


class _Difference(NamedTuple):
    """One value of a step that is another in the resumed run."""

    kind: Where
    layer: str
    """The layer or the parameter."""
    what: str
    now: Plain | Reading
    was: Plain | Reading

    def row(self) -> tuple[Cell, ...]:
        """The cells of `_OF_STEP`."""
        return self.what, _change(self.now, self.was), _cell(self.now), _cell(self.was)


def _first(now: Sequence[Record], was: Sequence[Record], since: int = 0) -> tuple[int, list[_Difference]] | None:
    """Return the number of the first step that differs, and what of it; ``now`` begins at the step ``since``."""
    order = list(_CAUSES)
    for step, (one, other) in enumerate(zip(now, was[since:], strict=False), since):
        if found := [each for each in _compared(one, other) if each.now != each.was]:
            return step, sorted(found, key=lambda each: order.index(each.kind))
    return None


def _compared(now: Record, was: Record) -> Iterator[_Difference]:
    """Yield what is compared of two records of one step."""
    for name, layer in was.layers.items():
        if (other := now.layers.get(name)) is None:
            yield _Difference("calls", name, f"layer {layer.label}", None, layer.type_name)
            continue
        own = {p.name: p for p in other.parameters}
        for p in layer.parameters:
            if (q := own.get(p.name)) is not None:
                full = qualified(name, p.name)
                yield _Difference("weights", full, f"value of {full}", q.reading, p.reading)
                yield _Difference(
                    "gradient", full, f"gradient of {full}", q.applied or q.gradient, p.applied or p.gradient
                )
                yield _Difference("update", full, f"update of {full}", q.update, p.update)
        own = {p.name: p for p in other.buffers}
        for p in layer.buffers:
            if p.name in own:
                full = qualified(name, p.name)
                yield _Difference("buffer", full, f"buffer {full}", own[p.name].reading, p.reading)
        yield _Difference("calls", name, f"calls of {layer.label}", len(other.calls), len(layer.calls))
    for group, (a, b) in enumerate(zip(now.optimizers, was.optimizers, strict=False)):
        for key in {**b.options, **a.options}:
            of = f" of group {group}" if len(was.optimizers) > 1 else ""
            what = f"{key}{of} of {b.optimizer}"
            yield _Difference("hyperparameters", ROOT, what, a.options.get(key), b.options.get(key))
    there = {(one.name, call.root, call.root_training, call.index): call for one, call in now.calls}
    for layer, call in sorted(was.calls, key=lambda pair: pair[1].finished):
        again = there.get((layer.name, call.root, call.root_training, call.index))
        if again is None:
            mode = "training" if call.root_training else "evaluation"
            yield _Difference("calls", layer.name, f"{layer.label}, called in {mode} mode", False, True)
            continue
        sides: list[tuple[Where, Sequence[Value], Sequence[Value]]] = [("output", again.outputs, call.outputs)]
        if layer.name == call.root:
            sides.append(("inputs", again.inputs, call.inputs))
        for kind, mine, theirs in sides:
            values = {value.path: value.forward for value in mine}
            for value in theirs:
                if value.path in values:
                    what = f"{value.path} of {layer.label}"
                    yield _Difference(kind, layer.name, what, values[value.path], value.forward)


# --- words ------------------------------------------------------------------------------------------------------------

_AFTER_LOAD = ("after load", "changed by", "loaded", "when saved")
_OF_STEP = ("changed by", "resumed", "uninterrupted")
_MOST_ROWS = 10
"""Rows of each of the two tables."""


def _broken(
    name: str,
    state: TrainingState,
    lost: list[Unequal],
    differing: tuple[int, list[_Difference]] | None,
    end: Sequence[Unequal],
) -> Outcome:
    """Return what is said of a resumed run that differs: in a step, or else at the end."""
    if differing is None:
        kind: Where = "end"
        layer, where = end[0].leaf.of or end[0].leaf.text, f"at the end {end[0].leaf.name} differs{_by(end[0])}"
        where, when, rows = f"the steps are the same, and {where}", "at the end", [_row(one) for one in end]
        ended = {one.leaf.name for one in end}
    else:
        step, found = differing
        kind, layer, ended = found[0].kind, found[0].layer, set()
        where = f"step {step} is the first that differs, at the {found[0].what}"
        when, rows = f"step {step}", [one.row() for one in found]
    # A leaf of a kind that may be the cause: that of the parameter if there is one.
    fits = [one for one in lost if one.leaf.kind in _CAUSES[kind] and (not ended or one.leaf.name in ended)]
    cause = min(fits, key=lambda one: one.leaf.of != layer or not layer, default=None)
    if cause is not None:
        line = f"{_said(cause)}; {where}{_more(len(lost) - 1)}"
        advice = f"Save {cause.leaf.part}, and load it into what goes on."
    else:
        line = f"{label_of(layer)} differs, and nothing that was looked at and may cause it is lost; {where}"
        line += _more(len(lost), "value")
        advice = "Look at what train begins anew, as an iterator over the data, and at what the state does not hold."
    lost.sort(key=lambda one: one is not cause)
    tables = [(_AFTER_LOAD, [_row(one) for one in lost])] if lost else []
    texts = ["\n".join(table(*one, most=_MOST_ROWS)) for one in [*tables, ((when, *_OF_STEP), rows)]]
    unread = [f"Not looked at, as their state is not known: {listed(state.unread)}."] if state.unread else []
    text = "\n\n".join([printable(line), *texts, printable(advice), *map(printable, unread)])
    return Outcome(check="resume", model=name, verdict="broken", text=text, layer=layer)


def _said(one: Unequal) -> str:
    """Return what was lost as the beginning of a sentence."""
    if one.now is None:
        return f"{one.leaf.name} is lost: it is missing after load"
    if one.leaf.kind == "random" or (one.change is not None and one.leaf.value.numel() > 1):
        return f"{one.leaf.name} is not restored: it is another after load{_by(one)}"
    return f"{one.leaf.name} is not restored: {shown(one.now.value)} after load, and {shown(one.leaf.value)} when saved"


def _by(one: Unequal) -> str:
    return "" if one.change is None else f", by {percent(one.change)}"


def _more(n: int, noun: str = "more value") -> str:
    return f"; {count(n, noun)} {'differs' if n == 1 else 'differ'} after load" if n > 0 else ""


def _row(one: Unequal) -> tuple[Cell, ...]:
    now = "missing" if one.now is None else shown(one.now.value)
    return one.leaf.name, "-" if one.change is None else percent(one.change), now, shown(one.leaf.value)


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


# --- workers of a DataLoader that draw alike: each augments its samples with the same random numbers ------------------

_DRAWS = 16
"""How often each worker makes the sample: a flip at random is the same in two workers half of the time."""


def workers_differ(loader: DataLoader[Any], *, index: int = 0) -> Outcome:
    """Check that the workers of a loader draw other random numbers: each makes one sample, several times.

    The loader is not iterated: its workers are started once more, with its `worker_init_fn` and its generator.

    Args:
        loader: The loader, with two or more workers, over a dataset with random augmentations.
        index: Which sample.

    Raises:
        AssertionError: Two workers draw alike.
        UsageError: The loader has fewer than two workers or an iterable dataset, or nothing about the sample is random.

    >>> import torch
    >>> from torch.utils.data import DataLoader, Dataset
    >>> from pytest_modelprobe import checks
    >>> class Noisy(Dataset):
    ...     def __len__(self):
    ...         return 8
    ...
    ...     def __getitem__(self, index):
    ...         return index + torch.rand(3)
    >>> loader = DataLoader(Noisy(), num_workers=2, multiprocessing_context="fork")
    >>> print(checks.workers_differ(loader))
    workers_differ holds for Noisy: 2 workers, 16 draws of sample 0 each
    """
    __tracebackhide__ = True
    if not isinstance(loader, DataLoader):
        raise UsageError(f"workers_differ takes a torch.utils.data.DataLoader; got {type(loader).__name__}")
    if loader.num_workers < 2:
        raise UsageError(f"the loader has {count(loader.num_workers, 'worker')}: two or more can draw alike")
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError("an iterable dataset has no sample that several workers could make: give one with an index")
    name = type(loader.dataset).__name__
    drawn = _drawn(loader, index)
    if all(len(set(one)) == 1 for one in drawn):
        raise UsageError(f"sample {index} of {name} is the same in {_DRAWS} draws: nothing about it is random")
    alike = [
        [place for place, other in enumerate(drawn) if other == one]
        for one in dict.fromkeys(drawn)
        if drawn.count(one) > 1 and len(set(one)) > 1
    ]
    if not alike:
        return Outcome(
            check="workers_differ",
            model=name,
            verdict="holds",
            text=f"{count(len(drawn), 'worker')}, {_DRAWS} draws of sample {index} each",
        )
    first = listed([str(one) for one in alike[0]])
    raise AssertionError(
        f"workers {first} of the loader of {name} draw alike: {_DRAWS} draws of sample {index} are the same; "
        f"{sum(map(len, alike))} of {count(len(drawn), 'worker')}\n\n"
        "Look for a constant seed in worker_init_fn= and in the dataset; torch.initial_seed() differs in each worker. "
        "A generator that the dataset keeps is copied to each: seed it in worker_init_fn= too."
    )


def _drawn(loader: DataLoader[Any], index: int) -> list[tuple[str, ...]]:
    """Return the hashes of the draws of each worker."""
    generator = None
    if loader.generator is not None:
        generator = torch.Generator(loader.generator.device)
        generator.set_state(loader.generator.get_state())
    with seeding.forked_rng(), warnings.catch_warnings(action="ignore"):  # the loader itself gave these warnings
        again: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_size=None,
            sampler=[index] * (_DRAWS * loader.num_workers),
            num_workers=loader.num_workers,
            collate_fn=_in_worker,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=generator,
        )
        drawn: dict[int, list[str]] = {}
        for worker, draw in again:
            drawn.setdefault(worker, []).append(draw)
    return [tuple(drawn[worker]) for worker in sorted(drawn)]


def _in_worker(sample: Any) -> tuple[int, str]:
    worker: Any = get_worker_info()
    return worker.id, hashlib.sha256(pickle.dumps(_plain(sample))).hexdigest()


def _plain(value: Any) -> Any:
    """Return a value with the numbers of its tensors and arrays in their place: pickles of these may differ."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().cpu().reshape(-1).tolist()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value
