"""The trials: one fault, several at once, and none, each judged by the tool and by the others."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import random
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import rivals
import tool
import torch
import truth
from architectures import ARCHITECTURES
from faults import FAULTS, Answer, Cause, Fault, Trial, start
from harmless import REFACTORS, RENAMES, ROUNDINGS, SETTINGS, inert_attributes, renamed, statements_reordered

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.comparison import Diagnosis
from pytest_modelprobe.record import Record

Row = dict[str, Any]
LOSSES = {"loss": "own", "no loss": None}
MODES = {"eval": False, "train": True}

# --- clean models, each looked at once a process ------------------------------------------------------------------


@functools.cache
def snapshot(name: str, train: bool, loss: str = "loss") -> Record:
    return tool.snapshot(tool.record(start(name, train=train), LOSSES[loss]))


@functools.cache
def clean(name: str, train: bool) -> truth.Clean:
    return truth.clean(name, train=train)


@functools.cache
def clean_run(name: str, train: bool) -> rivals.Run:
    return rivals.run(start(name, train=train))


@functools.cache
def clean_record(name: str, train: bool) -> Record:
    return tool.record(start(name, train=train))


@functools.cache
def trained(name: str) -> dict[str, torch.Tensor]:
    """Return the weights after twenty steps."""
    trial = start(name, train=True)
    optimizer = torch.optim.Adam([p for p in trial.model.parameters() if p.requires_grad], lr=1e-3)
    torch.manual_seed(0)
    for _ in range(20):
        optimizer.zero_grad()
        trial.loss(trial.model(*trial.inputs)).backward()
        optimizer.step()
    return trial.model.state_dict()


# --- one fault ----------------------------------------------------------------------------------------------------


def single(fault: Fault, name: str) -> Row:
    def planted() -> tuple[Trial, Answer]:
        trial = start(name, train=fault.train)
        return trial, fault.plant(trial)

    trial, answer = planted()
    effect = truth.effect(planted()[0], clean(name, fault.train))
    actual = tool.record(trial)
    verdict = tool.verdict(tool.judge(actual, snapshot(name, fault.train)), [answer])
    run = rivals.run(planted()[0])
    others: Row = {title: differs(run, clean_run(name, fault.train)) for title, differs in rivals.RIVALS.items()}
    if rivals.localize_divergence is not None:
        layer = rivals.localized(planted()[0], start(name, train=fault.train))
        others["localize_divergence"] = layer is not None
        others["localize_divergence names it"] = rivals.names(layer, answer)
    others["moments to 1e-3"] = rivals.moments_differ(actual, clean_record(name, fault.train))
    return {
        "row": fault.row,
        "fault": fault.title,
        "architecture": name,
        "train": fault.train,
        **{f"effect_{key}": value for key, value in dataclasses.asdict(effect).items()},
        "visible": effect.visible,
        **dataclasses.asdict(verdict),
        "truth": tool.told(answer.says[0]),
        "rivals": others,
        "beside": {title: beside(fault, name, title) for title in BESIDE},
    }


# --- one fault, and what else a commit brings ---------------------------------------------------------------------

BESIDE = ("inert attribute", "renamed children", "statements reordered", "other weights")
NAMES = {new: old for names in RENAMES.values() for new, old in names.items()}


def beside(fault: Fault, name: str, title: str) -> Row | None:
    """Return what is said of a fault that comes with something else; None where that would hide it."""
    trial = start(name, train=fault.train)
    if title == "statements reordered":
        statements_reordered(trial)
    if title == "other weights":
        trial.model.load_state_dict(trained(name))
    answer = fault.plant(trial)
    if title == "other weights" and any(cause.kind in ("weights", "buffers") for cause in answer.says):
        return None  # they are others anyway
    background: tuple[Cause, ...] = BACKGROUNDS["all weights changed"] if title == "other weights" else ()
    if title == "inert attribute":
        inert_attributes(trial)
    if title == "renamed children":
        renamed(trial, NAMES)
        answer = under_other_names(answer)
        background = tuple(Cause("architecture", new, "renamed") for new in NAMES)
    diagnosis = tool.judge(tool.record(trial), snapshot(name, fault.train))
    verdict = tool.verdict(diagnosis, [answer], background)
    first = diagnosis.causes[:1]
    return {
        "detected": verdict.detected,
        "named": verdict.named[0],
        "exact": verdict.exact,
        "first": any(tool.means(cause, true) for cause in first for true in (*answer.says, *answer.also)),
        "said": verdict.said or tuple(f"possible: {said}" for said in verdict.possible),
    }


def under_other_names(answer: Answer) -> Answer:
    """Return the answer with the layers as they are called once the children are renamed."""

    def other(layer: str) -> str:
        head, dot, rest = layer.partition(".")
        return {old: new for new, old in NAMES.items()}.get(head, head) + dot + rest

    def causes(some: Sequence[Cause]) -> tuple[Cause, ...]:
        return tuple(dataclasses.replace(cause, layer=other(cause.layer)) for cause in some)

    return dataclasses.replace(answer, says=causes(answer.says), also=causes(answer.also), place=None)


# --- several at once ----------------------------------------------------------------------------------------------

Sited = tuple[Fault, int]


def chosen(name: str, seed: str, exclude: set[str], kinds: set[str]) -> list[Sited]:
    """Draw two to five faults that do not touch the same layer."""
    draw = random.Random(seed)
    pool = [f for f in FAULTS if name in f.on and f.combines and not f.train]
    wanted, taken, found = draw.randint(2, 5), set(exclude), []
    for fault in draw.sample(pool, len(pool)):
        number = draw.randrange(3) if fault.sited else 1
        answer = fault.plant(start(name, number=number))
        if not (answer.layers & taken or {c.kind for c in answer.says} & kinds):
            found.append((fault, number))
            taken |= answer.layers
        if len(found) == wanted:
            break
    return found


def planted(name: str, faults: Sequence[Sited], background: str) -> tuple[Trial, list[Answer]]:
    trial = start(name)
    if background == "all weights changed":
        trial.model.load_state_dict(trained(name))
    elif background == "input changed":
        trial.inputs = (trial.inputs[0].roll(1, -1).flip(0), *trial.inputs[1:])
    elif background == "layer added":
        extra = next(f for f in FAULTS if f.title == "an extra layer")
        extra.plant(trial)
    answers = []
    for fault, trial.number in faults:
        answers.append(fault.plant(trial))
    return trial, answers


BACKGROUNDS: dict[str, tuple[Cause, ...]] = {
    "": (),
    "all weights changed": (Cause("weights", "*"), Cause("buffers", "*")),
    "input changed": (Cause("input", "*"),),
    "layer added": (Cause("architecture", "extra"), Cause("*", "(root)")),
}


def several(name: str, background: str, count: int) -> Iterator[Row]:
    exclude = {"(root)", "extra"} if background == "layer added" else set()
    kinds = {"weights", "buffers"} if background == "all weights changed" else set()
    done = 0
    for seed in itertools.count():
        if done == count:
            return
        faults = chosen(name, f"{name} {background} {seed}", exclude, kinds)
        try:
            trial, answers = planted(name, faults, background)
            actual = tool.record(trial)
        except RuntimeError:  # two faults that cannot be run together
            continue
        done += 1
        verdict = tool.verdict(tool.judge(actual, snapshot(name, False)), answers, BACKGROUNDS[background])
        yield {
            "architecture": name,
            "background": background,
            "seed": seed,
            "faults": [
                f"{fault.title} at {answer.says[0].layer}" for (fault, _), answer in zip(faults, answers, strict=True)
            ],
            "visible": [without(name, faults, i, background) for i in range(len(faults))],
            **dataclasses.asdict(verdict),
        }


def without(name: str, faults: Sequence[Sited], index: int, background: str) -> bool:
    """Whether one of several faults shows: the model with all of them, against the one without it."""
    others = [*faults[:index], *faults[index + 1 :]]
    rest, _ = planted(name, others, background)
    try:
        base = dataclasses.replace(clean(name, False), structure=truth.structure(rest.model), run=truth.seen(rest))
    except RuntimeError:
        return True
    return truth.effect(planted(name, faults, background)[0], base).visible


# --- nothing planted ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Setting:
    """A clean model run in one way."""

    name: str
    mode: str
    loss: str

    @property
    def train(self) -> bool:
        return MODES[self.mode]

    @property
    def trial(self) -> Trial:
        return start(self.name, train=self.train)

    def row(self, variant: str, trial: Trial, rename: dict[str, str] | None = None) -> Row:
        """Return what is said of a trial that should be as before."""
        actual = tool.record(trial, LOSSES[self.loss])
        found = tool.judge(actual, snapshot(self.name, self.train, self.loss), rename)
        others = {}
        if self.loss == "loss" and rename is None:
            run, clean = rivals.run(trial), clean_run(self.name, self.train)
            others = {title: differs(run, clean) for title, differs in rivals.RIVALS.items()}
            others["moments to 1e-3"] = rivals.moments_differ(actual, clean_record(self.name, self.train))
        said = {"variant": variant, "architecture": self.name, "mode": self.mode, "loss": self.loss}
        return {**said, **alarm(found, renamed=rename is not None), "rivals": others}


def harmless(name: str, part: int) -> Iterator[Row]:
    """Yield a row a trial; of ``part`` trials, one is made."""
    for mode, loss in itertools.product(MODES, LOSSES):
        setting = Setting(name, mode, loss)
        snapshot(name, setting.train, loss)  # it is kept: made now, before a setting changes
        for title, change in list((SETTINGS | ROUNDINGS).items())[::part]:
            if title != "channels last" or name in ("CNN", "ViT"):
                trial = setting.trial
                with change(trial):
                    yield setting.row(title, trial)
        for seed in range(3)[::part]:
            trial = setting.trial
            trial.model = fresh(name, seed).train(setting.train)
            yield setting.row(f"order of building {seed}", trial)
        if loss == "loss":
            for title, on, change in REFACTORS[:: min(part, 3)]:
                if name in on:
                    trial = setting.trial
                    with change(trial):
                        if not drops_nothing(trial):
                            yield setting.row(title, trial)
            for title, names in RENAMES.items():
                trial = setting.trial
                if renamed(trial, names):
                    yield setting.row(title, trial, names)


def drops_nothing(trial: Trial) -> bool:
    """Whether fused attention, which drops out in training, was written by hand without."""
    return trial.model.training and any(getattr(m, "p", 0) and "attend" in vars(m) for m in trial.model.modules())


def fresh(name: str, seed: int) -> Any:
    """Build the model after others, in some order, from some random state."""
    torch.manual_seed(seed)
    order = random.Random(seed).sample(list(ARCHITECTURES), 2)
    for other in (*order, name):
        torch.rand(seed + 1)
        chosen = ARCHITECTURES[other]
        model = ModelProbe(seed=0).build(lambda chosen=chosen: chosen.make(0.1))
    return model


def alarm(found: Diagnosis, *, renamed: bool = False) -> Row:
    """Return whether a harmless change is reported, and how near the nearest value came to it."""
    differences = [d for d in found.comparison.differences if not (renamed and d.kind == "layer renamed")]
    units = [(change.units, place) for place, change in found.comparison.changes.items()]
    nearest, place = max(units, default=(0.0, ""), key=lambda pair: pair[0])
    return {
        "alarm": bool(differences),
        "said": [tool.told(cause) for cause in found.causes],
        "differences": [f"{d.kind} {d.layer} {d.what} {d.change} > {d.limit}" for d in differences[:5]],
        "nearest": nearest,
        "nearest_at": " ".join(str(part) for part in place if part and not isinstance(part, tuple)),
    }


# --- other machines: another instruction set, another torch -------------------------------------------------------


def without_dropout(name: str, mode: str) -> Trial:
    """Return a trial that can be compared elsewhere: a snapshot refuses active dropout."""
    return start(name, train=MODES[mode], dropout=0.0 if MODES[mode] else 0.1)


def record_all(folder: Path, only: str | None) -> None:
    """Write a snapshot of each clean model: what this Python and this machine record."""
    for name, mode, loss in itertools.product(ARCHITECTURES, MODES, LOSSES):
        if only in (None, name):
            trial = without_dropout(name, mode)
            tool.write(folder / f"{name} {mode} {loss}.arch.json", tool.record(trial, LOSSES[loss]))


def elsewhere(variant: str, python: str, environment: dict[str, str], only: str | None) -> list[Row]:
    """Compare models here with snapshots made elsewhere."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        command = [python, str(Path(__file__).parent), "--record", folder, *(["--only", only] if only else [])]
        subprocess.run(command, check=True, env=os.environ | environment)
        for name, mode, loss in itertools.product(ARCHITECTURES, MODES, LOSSES):
            if only in (None, name):
                actual = tool.record(without_dropout(name, mode), LOSSES[loss])
                found = tool.judge(actual, tool.read(Path(folder, f"{name} {mode} {loss}.arch.json")))
                row = {"variant": variant, "architecture": name, "mode": mode, "loss": loss}
                rows.append({**row, **alarm(found), "rivals": {}})
    return rows


# --- one architecture -----------------------------------------------------------------------------------------


def of_architecture(name: str, part: int) -> dict[str, list[Row]]:
    """Return the rows of one architecture; of ``part`` faults, one is planted."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mine = [fault for fault in FAULTS if name in fault.on][::part]
    counts = {"": 18, "all weights changed": 6, "input changed": 6, "layer added": 0 if name == "LSTM" else 6}
    return {
        "single": [single(fault, name) for fault in mine],
        "several": [row for what, n in counts.items() for row in several(name, what, -(-n // part))],
        "harmless": list(harmless(name, part)),
    }
