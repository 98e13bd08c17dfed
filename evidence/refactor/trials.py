"""The trials: an edit, alone and with what else a commit brings; what the tool says of each, and what is true."""

from __future__ import annotations

import functools
import math
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bugs import BUGS
from models import MODELS
from refactorings import REFACTORINGS
from source import Edit, Tensors, applicable, patched
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, files
from pytest_modelprobe.comparison import Cause, Diagnosis, diagnose
from pytest_modelprobe.comparison.compare import compare
from pytest_modelprobe.comparison.text import cause_text, first_line, grouped
from pytest_modelprobe.record import Record
from pytest_modelprobe.text import pattern

Row = dict[str, Any]

CHANGED = 1e-6
"""Relative change of outputs or gradients above which the function is another: rounding stays below."""

# --- weights ------------------------------------------------------------------------------------------------------


def trained(weights: Tensors, seed: int) -> Tensors:
    """Return weights as of a model trained (again): each parameter moved by a tenth of what is usual for it."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=generator)
        usual = tensor.double().square().mean().sqrt().item() or 1.0
        found[name] = tensor + 0.1 * usual * noise if tensor.is_floating_point() else tensor
    return found


@functools.cache
def weights_of(model: str, seed: int) -> Tensors:
    return trained(dict(MODELS[model].build().named_parameters()), seed)


@torch.no_grad()
def load(model: nn.Module, weights: Tensors) -> None:
    """Give a model all of these weights."""
    own = dict(model.named_parameters())
    if own.keys() != weights.keys():
        raise ValueError(f"not the same weights: {sorted(own.keys() ^ weights.keys())}")
    for name, parameter in own.items():
        parameter.copy_(weights[name])


# --- the truth ----------------------------------------------------------------------------------------------------


def flat(value: Any) -> Iterator[Tensor]:
    """Yield the floating tensors in an output, in order."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict | tuple | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from flat(inner)


def function(model: nn.Module, name: str) -> tuple[list[Tensor], Tensors]:
    """Return outputs and gradients of a model."""
    torch.manual_seed(0)
    outputs = list(flat(model(**MODELS[name].inputs())))
    torch.stack([(out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() for out in outputs]).sum().backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return [out.detach() for out in outputs], gradients


@functools.cache
def function_of(name: str) -> tuple[list[Tensor], Tensors]:
    model = MODELS[name].build()
    load(model, weights_of(name, 1))
    return function(model, name)


def apart(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return ‖x - y‖ / ‖y‖, infinite where the shapes are others."""
    if [t.shape for t in actual] != [t.shape for t in expected]:
        return math.inf
    x, y = (torch.cat([t.double().flatten() for t in one]) for one in (actual, expected))
    return ((x - y).norm() / y.norm()).item()


def mapped(edits: Sequence[Edit], tensors: Tensors) -> Tensors:
    """Return what belongs to the parameters of the model as it was, by the names of the edited one."""
    return functools.reduce(lambda found, edit: edit.weights(found), edits, tensors)


class Effect(NamedTuple):
    """How far outputs and gradients are from what they were with the same weights."""

    outputs: float
    gradients: float

    @property
    def changed(self) -> bool:
        """Whether the function is another."""
        return not max(self) <= CHANGED


def effect(edits: Sequence[Edit], model: nn.Module, name: str) -> Effect:
    """Return what edits change, with the same weights."""
    outputs, gradients = function(model, name)
    outputs_before, before = function_of(name)
    expected = mapped(edits, before)
    return Effect(
        apart(outputs, outputs_before),
        apart([gradients[n] for n in sorted(expected)], [expected[n] for n in sorted(expected)]),
    )


# --- the tool -----------------------------------------------------------------------------------------------------


def recorded(probe: ModelProbe, model: nn.Module, name: str) -> Record:
    return probe.run(model, kwargs=MODELS[name].inputs(), loss="random")


@functools.cache
def snapshot(name: str) -> Record:
    """Return what a later test finds in the files."""
    model = MODELS[name].build()
    load(model, weights_of(name, 1))
    with ModelProbe() as probe, tempfile.TemporaryDirectory() as folder:
        found = recorded(probe, model, name)
        assert found.live_run is not None
        path = Path(folder, "model.arch.json")
        files.write(path, files.encode(found.live_run.measured(found, found)))
        return files.read(path).record


def judged(model: nn.Module, name: str) -> Diagnosis:
    """Return what a failing test says. Only where the run differs is each layer called alone."""
    expected = snapshot(name)
    with ModelProbe() as probe:
        actual = recorded(probe, model, name)
        found = compare(actual, expected)
        if not found.same:
            assert actual.live_run is not None
            actual = actual.live_run.isolated(actual, like=found.expected, names=found.names_before)
            found = compare(actual, expected)
        return diagnose(found)


def blames(cause: Cause) -> bool:
    """Whether a cause says that the model computes something else with the same weights."""
    silent = cause.change is None and (
        cause.kind != "computation" or cause.evidence == "recorded" or cause.is_call_change
    )
    return cause.kind not in ("weights", "buffers") and not silent


def classes(model: nn.Module) -> dict[str, str]:
    """Return the class of each layer."""
    return {name: type(module).__name__ for name, module in model.named_modules()}


@functools.cache
def classes_of(model: str) -> dict[str, str]:
    return classes(MODELS[model].build())


def places(edit: Edit, layers: dict[str, str]) -> set[str]:
    """Return the layers in which a bug is."""
    found = set()
    for place in edit.places:
        kind, _, child = place.partition(".")
        names = (name for name, other in layers.items() if other == kind)
        found |= {".".join(part for part in (name, child) if part) or "(root)" for name in names}
    return found


def verdict(bug: Edit, model: nn.Module, found: Diagnosis, effect: Effect) -> str:
    """Return where a bug is named: in the first line, in the table, among what is possible, or not at all."""
    there = places(bug, classes(model)) | places(bug, classes_of(bug.model))
    there |= {pattern(name) for name in there}
    shown = [cause for cause, _ in grouped(found.causes)]
    if found.unchanged and effect.outputs > CHANGED:
        return "missed"
    if shown and shown[0].layer in there and shown[0].kind != "weights":
        return "first line"
    if any(cause.layer in there and cause.kind != "weights" for cause in shown):
        return "table"
    if any(cause.layer in there for cause in found.possible):
        return "possible"
    return "missed"


# --- one edit -----------------------------------------------------------------------------------------------------


def trial(edits: Sequence[Edit], name: str, seed: int) -> Row:
    """Return what is true of edits made at once, and what the tool says; ``seed`` 1: with the same weights."""
    before = weights_of(name, 1), weights_of(name, seed)
    function_of(name), classes_of(name), snapshot(name)  # of the model as it was: not while it is edited
    with patched(MODELS[name].source, edits):
        model = MODELS[name].build()
        load(model, mapped(edits, before[0]))
        really = effect(edits, model, name)
        load(model, mapped(edits, before[1]))
        found = judged(model, name)
        bugs = [edit for edit in edits if edit in BUGS]
        blamed = bool(found.possible) or any(map(blames, found.causes))
        return {
            "model": name,
            "edits": [edit.title for edit in edits],
            "weights": "same" if seed == 1 else "other",
            "outputs": really.outputs,
            "gradients": really.gradients,
            "changed": really.changed,
            "same": found.comparison.same,
            "unchanged": found.unchanged,
            "line": "" if found.comparison.same else first_line(found),
            "causes": [cause_text(cause) for cause, _ in grouped(found.causes)],
            "possible": [cause_text(cause) for cause, _ in grouped(found.possible)],
            "alarm": blamed if seed != 1 else not (found.comparison.same or found.unchanged),
            "blamed": blamed,
            "verdict": verdict(bugs[0], model, found, really) if bugs else "",
        }  # fmt: skip


def beside(bug: Edit, number: int) -> Edit | None:
    """Return a refactoring that can be made at once with a bug: of the same class if there is one, each in turn."""
    source = MODELS[bug.model].source
    pool = [edit for edit in REFACTORINGS if edit.model == bug.model and applicable(source, [edit, bug])]
    near = [edit for edit in pool if edit.of == bug.of]
    some = near or pool
    return some[number % len(some)] if some else None


def of_model(name: str, part: int) -> dict[str, list[Row]]:
    """Return the rows of one model; of ``part`` edits, one is made."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mine = [edit for edit in REFACTORINGS if edit.model == name][::part]
    rows: dict[str, list[Row]] = {
        "refactoring": [trial([edit], name, 1) for edit in mine],
        "refactoring, other weights": [trial([edit], name, 2) for edit in mine],
        "bug": [], "bug, refactoring": [], "bug, other weights": [], "bug, refactoring, other weights": [],
    }  # fmt: skip
    for number, bug in enumerate([edit for edit in BUGS if edit.model == name][::part]):
        other = beside(bug, number)
        together = [edit for edit in (other, bug) if edit is not None]
        for title, edits in {"bug": [bug], "bug, refactoring": together}.items():
            if title == "bug" or other is not None:
                rows[title].append(trial(edits, name, 1))
                rows[f"{title}, other weights"].append(trial(edits, name, 2))
    return rows
