"""What other kinds of test say of the same faults: detected, and for those that localize, the right layer named."""

from __future__ import annotations

import fnmatch
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from faults import Answer, Trial
from torch import Tensor

from pytest_modelprobe.record import Reading, Record, Statistics

try:
    from pytest_torch.divergence import localize_divergence
    from pytest_torch.golden import Golden
except ImportError:  # one more table column that says so
    Golden = localize_divergence = None


@dataclass(frozen=True)
class Run:
    """What a test without hooks has: the output, the loss and the weights' gradients."""

    output: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def run(trial: Trial) -> Run:
    """Run the model once."""
    trial.model.zero_grad(set_to_none=True)
    torch.manual_seed(trial.seed)
    output = trial.model(*trial.inputs)
    loss = trial.loss(output)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in trial.model.named_parameters() if p.grad is not None}
    return Run(output.detach(), loss.detach(), gradients)


# --- one number, or the output ------------------------------------------------------------------------------------


def loss_pinned(actual: Run, expected: Run) -> bool:
    """``assert loss == pytest.approx(..., rel=1e-4)``."""
    return not math.isclose(actual.loss, expected.loss, rel_tol=1e-4)


def output_golden(rtol: float, atol: float) -> Callable[[Run, Run], bool]:
    def differs(actual: Run, expected: Run) -> bool:
        same_shape = actual.output.shape == expected.output.shape
        return not (same_shape and torch.allclose(actual.output, expected.output, rtol=rtol, atol=atol))

    return differs


def stored(value: Callable[[Run], object]) -> Callable[[Run, Run], bool]:
    """The ``golden`` fixture of pytest-torch, at its own tolerance for float32."""

    def differs(actual: Run, expected: Run) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "golden.pt")
            Golden(path, update=True).check(value(expected))
            try:
                Golden(path, update=False).check(value(actual))
            except AssertionError:
                return True
            return False

    return differs


RIVALS: dict[str, Callable[[Run, Run], bool]] = {
    "loss to 1e-4": loss_pinned,
    # torchvision, test_models.py, test_classification_model: prec=0.1
    "output to 0.1 (torchvision)": output_golden(0.1, 0.1),
    "output to 1e-3": output_golden(1e-3, 1e-3),
    # timm, tests/test_models.py, test_model_inference
    "output to 1e-3/1e-4 (timm)": output_golden(1e-3, 1e-4),
}
if Golden is not None:
    RIVALS |= {
        "pytest-torch golden, output": stored(lambda run: run.output),
        "pytest-torch golden, output and gradients": stored(lambda run: {"output": run.output, **run.gradients}),
    }

# --- with the old model at hand -----------------------------------------------------------------------------------


def localized(actual: Trial, expected: Trial) -> str | None:
    """Return the layer that pytest-torch's ``localize_divergence`` names; None where it sees nothing.

    It runs the old model beside the new one. Where the error entered "between layers", it says so, and the place is
    the container of the first layer that diverges.
    """
    torch.manual_seed(0)
    report = localize_divergence(expected.model, actual.model, expected.inputs, inputs_b=actual.inputs)
    first = report.first
    if first is None:
        return None
    return (first.name.rpartition(".")[0] or "(root)") if first.inputs_diverged else first.name


def names(layer: str | None, answer: Answer) -> bool:
    """Whether a layer is one of those that name the fault."""
    return layer is not None and any(fnmatch.fnmatchcase(layer, cause.layer) for cause in answer.says)


# --- statistics without fingerprint -------------------------------------------------------------------------------


def moments_differ(actual: Record, expected: Record, tolerance: float = 1e-3) -> bool:
    """Whether mean, deviation or range of some value, gradient or weight moved, relative to its rms."""
    mine, theirs = readings(actual), readings(expected)
    return mine.keys() != theirs.keys() or any(apart(mine[key], theirs[key]) > tolerance for key in theirs)


def readings(record: Record) -> dict[str, Statistics]:
    found: dict[str, Reading | None] = {}
    for layer in record.layers.values():
        for call, value in layer.outputs:
            found[f"{layer.name} {call.index} {value.path}"] = value.forward
            found[f"{layer.name} {call.index} {value.path} gradient"] = value.backward
        for parameter in (*layer.parameters, *layer.buffers):
            found[f"{layer.name} {parameter.name}"] = parameter.reading
            found[f"{layer.name} {parameter.name} after"] = parameter.after
            found[f"{layer.name} {parameter.name} gradient"] = parameter.gradient
    return {key: r.statistics for key, r in found.items() if r is not None and r.statistics is not None}


def apart(actual: Statistics, expected: Statistics) -> float:
    """Return the largest change of a moment; what is zero in exact arithmetic is not asked."""
    if (actual.count, actual.nonfinite) != (expected.count, expected.nonfinite):
        return math.inf
    if actual.mean is None or not expected.rms or expected.rms < 1e-7:
        return 0.0
    pairs = [(getattr(actual, name), getattr(expected, name)) for name in ("mean", "std", "rms", "min", "max")]
    return max(abs(a - e) for a, e in pairs) / expected.rms
