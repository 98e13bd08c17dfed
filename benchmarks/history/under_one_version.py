"""Runs under one version of a library: writes a snapshot of each model, or compares with those of another version.

    python under_one_version.py record DIR
    python under_one_version.py judge DIR RESULT.json

Both versions run with the weights that the first one drew and saved: ``from_pretrained`` of the second follows the
names that changed. What really changed is measured apart from the tool: outputs and gradients of the two versions are
compared as tensors.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from models import MODELS, Model
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, files
from pytest_modelprobe.comparison.compare import compare
from pytest_modelprobe.comparison.diagnosis import Cause, Diagnosis, diagnose
from pytest_modelprobe.gate.classes import class_of
from pytest_modelprobe.models.flatten import flatten
from pytest_modelprobe.record import Record
from pytest_modelprobe.report.comparison import cause_text, first_line


def truth(model: nn.Module, inputs: dict[str, Any]) -> dict[str, list[Tensor]]:
    """Return the floating outputs of an evaluation, and the norm of each gradient of a loss of all of them.

    The loss is a random projection: squares would be the same whatever a last norm gets. Which parameters are frozen
    does not count: what they compute is the same.
    """
    frozen = [p for p in model.parameters() if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_()
    model.zero_grad(set_to_none=True)
    outputs = [tensor for _, tensor in flatten("output", model(**inputs)).tensors if tensor.is_floating_point()]
    drawn = torch.Generator().manual_seed(0)
    torch.stack([(output * torch.randn(output.shape, generator=drawn)).mean() for output in outputs]).sum().backward()
    gradients = [torch.zeros(1) if p.grad is None else p.grad.detach().norm()[None] for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    for parameter in frozen:
        parameter.requires_grad_(False)
    return {"outputs": [output.detach() for output in outputs], "gradients": gradients}


def changed(now: dict[str, list[Tensor]], then: dict[str, list[Tensor]]) -> dict[str, float]:
    """Return how far outputs and gradients are apart, relative to their norm: 0 to inf."""
    found = {}
    for what in now:
        x, y = (torch.cat([t.double().flatten() for t in one[what]]) for one in (now, then))
        if what == "gradients":
            x, y = x.sort().values, y.sort().values  # parameters may come in another order
            if x.shape != y.shape:  # or several as one
                x, y = x.norm()[None], y.norm()[None]
        found[what] = ((x - y).norm() / y.norm()).item() if x.shape == y.shape else float("inf")
    return found


def recorded(probe: ModelProbe, model: nn.Module, one: Model) -> Record:
    return probe.run(model, kwargs=one.inputs(), loss="random")


def described(cause: Cause, diagnosis: Diagnosis) -> dict[str, Any]:
    # Another shape or dtype has no relative change.
    shown = {"layer": cause.layer, "said": cause_text(cause), "change": cause.change or cause.is_exact}
    return {"kind": cause.kind, "class": class_of(cause, diagnosis), **shown}


def record(folder: Path) -> None:
    for one in MODELS:
        try:
            with ModelProbe() as probe:
                one.build().save_pretrained(folder / one.name)
                model, _ = one.load(folder / one.name)  # so that both versions know the same path, and no more
                found = recorded(probe, model, one)
                found = found.rerun.measured(found.rerun.isolated(found))
                texts = files.encode(found)
                files.write(folder / f"{one.name}.arch.json", texts)
                torch.save(truth(model, one.inputs()), folder / f"{one.name}.pt")
                print(f"recorded {one.name}", flush=True)
        except Exception as error:  # noqa: BLE001 - a version that lacks a model is told and passed over
            print(f"cannot record {one.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)


def judge(folder: Path, result: Path) -> None:
    rows = []
    for one in MODELS:
        path = folder / f"{one.name}.arch.json"
        if not path.exists():
            continue
        try:
            with ModelProbe() as probe:
                model, loading = one.load(folder / one.name)
                before = torch.load(folder / f"{one.name}.pt")
                really = changed(truth(model, one.inputs()), before)
                expected, actual = files.read(path).record, recorded(probe, model, one)
                found = compare(actual, expected)
                if not found.same:
                    actual = actual.rerun.isolated(actual, like=found.expected, names=found.names_before)
                    found = compare(actual, expected)
                diagnosis = diagnose(found)
                row = {
                    "model": one.name,
                    "really": really,
                    "unmatched": sorted(loading["missing_keys"]),
                    "same": found.same,
                    "unchanged": diagnosis.unchanged,
                    "line": "" if found.same else first_line(diagnosis),
                    "causes": [described(cause, diagnosis) for cause in diagnosis.causes],
                    "possible": [described(cause, diagnosis) for cause in diagnosis.possible],
                    "moved": len(diagnosis.moved),
                }
        except Exception as error:  # noqa: BLE001 - the same
            row = {"model": one.name, "error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(row)[:400], flush=True)
        rows.append(row)
    result.write_text(json.dumps({"version": transformers.__version__, "rows": rows}, indent=1), "utf-8")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    command, *paths = sys.argv[1:]
    {"record": record, "judge": judge}[command](*map(Path, paths))
