"""Runs under one version of a library: writes a snapshot of each model, or compares with those of another version.

    python under_one_version.py record DIR
    python under_one_version.py judge DIR RESULT.json

Both versions run with the weights that the first one drew: names that a library changed are followed as its own
``from_pretrained`` does where it can, and by shape and order else. What really changed is measured apart from the tool:
outputs and gradients of the two versions are compared as tensors.
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
from pytest_modelprobe.compare import compare
from pytest_modelprobe.diagnosis import diagnose
from pytest_modelprobe.flatten import flatten
from pytest_modelprobe.record import Record
from pytest_modelprobe.report.comparison import first_line, said


def truth(model: nn.Module, inputs: dict[str, Any]) -> dict[str, list[Tensor]]:
    """Return the floating outputs of an evaluation, and the norm of each gradient of a loss of all of them."""
    model.zero_grad(set_to_none=True)
    outputs = [tensor for _, tensor in flatten("output", model(**inputs)).tensors if tensor.is_floating_point()]
    torch.stack([output.square().mean() for output in outputs]).sum().backward()
    gradients = [torch.zeros(1) if p.grad is None else p.grad.detach().norm()[None] for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return {"outputs": [output.detach() for output in outputs], "gradients": gradients}


def changed(now: dict[str, list[Tensor]], then: dict[str, list[Tensor]]) -> dict[str, float]:
    """Return how far outputs and gradients are apart, relative to their norm: 0 to inf."""
    found = {}
    for what in now:
        x, y = (torch.cat([t.double().flatten() for t in one[what]]) for one in (now, then))
        if what == "gradients":
            x, y = x.sort().values, y.sort().values  # parameters may come in another order
        found[what] = ((x - y).norm() / y.norm()).item() if x.shape == y.shape else float("inf")
    return found


def load(model: nn.Module, weights: dict[str, Tensor]) -> list[str]:
    """Give a model the weights of another version, and return what has none."""
    missing, unexpected = model.load_state_dict(weights, strict=False)
    left = [weights[name] for name in unexpected]
    own = dict(model.state_dict())
    unmatched = []
    for name in missing:
        alike = next((i for i, tensor in enumerate(left) if tensor.shape == own[name].shape), None)
        if alike is None:
            unmatched.append(name)
        else:
            own[name].copy_(left.pop(alike))
    return unmatched


def recorded(probe: ModelProbe, model: nn.Module, one: Model) -> Record:
    return probe.run(model, kwargs=one.inputs(), loss="random")


def record(folder: Path) -> None:
    for one in MODELS:
        try:
            with ModelProbe() as probe:
                model = one.build().eval()
                found = recorded(probe, model, one)
                found = found.rerun.measured(found.rerun.isolated(found))
                texts = files.encode(found)
                files.write(folder / f"{one.name}.arch.json", texts)
                torch.save({"weights": model.state_dict(), **truth(model, one.inputs())}, folder / f"{one.name}.pt")
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
                model = one.build().eval()
                before = torch.load(folder / f"{one.name}.pt")
                unmatched = load(model, before["weights"])
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
                    "unmatched": unmatched,
                    "same": found.same,
                    "unchanged": diagnosis.unchanged,
                    "line": "" if found.same else first_line(diagnosis),
                    "causes": [(cause.kind, said(cause), cause.change) for cause in diagnosis.causes],
                    "possible": [said(cause) for cause in diagnosis.possible],
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
