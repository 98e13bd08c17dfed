"""What a type checker says of a user's test; checked by mypy, never run."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import torch
from torch import nn

from pytest_modelprobe import (
    Invariants,
    ModelProbe,
    ModelProbeSnapshot,
    Record,
    Watch,
    assert_activation_memory,
    assert_all_params_have_grad,
    assert_attends_to,
    assert_called,
    assert_dtypes,
    assert_finite,
    assert_flops,
    assert_grad_finite,
    assert_grad_flow,
    assert_invariants,
    assert_layer_matters,
    assert_mode,
    assert_no_dead_layers,
    assert_no_gradient,
    assert_no_leftover_hooks,
    assert_same_distribution,
    assert_shapes,
    assert_training_loop,
    checks,
    faults,
)


class Net(nn.Module):
    """A model of the user's."""


def test_run(modelprobe: ModelProbe) -> None:
    model = modelprobe.build(Net)
    assert_type(modelprobe.build(Net, rename={"layers": "encoder.layer"}), Net)
    assert_type(model, Net)
    record = modelprobe.run(model, modelprobe.randn(4, 8), loss=lambda out: out.pow(2).mean(), mode="eval")
    assert_type(record, Record)
    modelprobe.run(model, modelprobe.randint(0, 10, (2, 3)), loss="random", layers=["**", "!head", nn.ReLU], mask=None)
    assert_no_dead_layers(record, layers="blocks.*", max_dead_units=0.5)
    assert_finite(record)
    assert_grad_finite(record)
    assert_grad_flow(modelprobe, max_ratio=1e4)
    assert_all_params_have_grad(record, ignore="*.mask_token")
    assert_shapes(record, {"fc1": "batch 16", "fc2": ("batch", 2), "head": {"output.logits": "batch 10"}})
    assert_dtypes(record, {"**": torch.float32})
    assert_called(record, "fc1", per_forward=1)
    assert_mode(record, {"fc1.**": "eval", "fc2": "train"})
    assert_no_gradient(record, "fc1.**")
    assert_no_leftover_hooks(model)


def test_one_number(modelprobe: ModelProbe) -> None:
    record = modelprobe.run(Net(), modelprobe.randn(4, 8), loss="random")
    value = record["encoder.0"].output
    assert value.statistics.rms < 2 * value.statistics.std
    assert value.statistics.min <= value.statistics.mean <= value.statistics.max
    assert_type(value.statistics.nan, int)
    assert_type(value.gradient.rms, float)
    profiled = modelprobe.run(Net(), modelprobe.randn(4, 8), profile=True)
    assert_flops(profiled, (0, 1_000))
    assert_activation_memory(profiled, 128, layers=nn.Linear)
    cam = modelprobe.grad_cam(Net(), "conv", 1, modelprobe.randn(2, 3, 8, 8), "cam.png")
    assert_attends_to(cam, [(0, 0, 4, 4), (2, 2, 8, 8)], share=0.8)
    assert_type(record.table(layers=["encoder.**", nn.ReLU]), str)


def test_watch(modelprobe: ModelProbe) -> None:
    model = Net().to(modelprobe.device)
    with modelprobe.watch(model, keep="fc1", functionals=True, isolate=False) as watch:
        model(modelprobe.randn(2, 3))
    assert_type(watch, Watch)
    assert_type(watch.first, Record)
    assert_type(watch.others, Record)
    assert_type(watch.counts.in_steps + watch.counts.evaluations + watch.counts.others, int)
    assert_grad_flow(watch)
    assert_training_loop(watch)
    assert_type(watch.invariants, Invariants)
    assert_invariants(watch, watch.invariants)
    assert_invariants(watch.steps, Invariants.load("healthy.json"))
    assert_type(modelprobe.architecture(model, torch.empty(2, 3)), Record)
    assert_type(Record.from_dict(watch.record.to_dict()), Record)


def test_snapshot(modelprobe: ModelProbe, modelprobe_snapshot: ModelProbeSnapshot) -> None:
    record = modelprobe.run(Net(), modelprobe.randn(4, 8), loss="random")
    assert_type(record == modelprobe_snapshot, bool)
    assert_type(modelprobe_snapshot == record, bool)
    named = modelprobe_snapshot(name="wide", tolerance={"blocks.*.attn": 10}, compare="architecture", allow=["dropout"])
    assert_type(named, ModelProbeSnapshot)
    assert record == modelprobe_snapshot(tolerance=3, allow="nonfinite", rename={"layers": "encoder.layer"})


def test_checks(modelprobe: ModelProbe) -> None:
    model, ids = Net(), modelprobe.randint(0, 10, (2, 6))
    assert_type(checks.causal(modelprobe, model, ids, axis=1, attention_mask=torch.ones(2, 6)), checks.Outcome)
    assert_type(checks.causal.outcome(modelprobe, model, ids, kwargs={"axis": 1}), checks.Outcome)
    outcomes = checks.standard(modelprobe, model, ids, loss=lambda out: out.mean(), skip=["seeded"], lengths=ids)
    assert_type(outcomes, checks.Outcomes)
    outcome = checks.incremental(modelprobe, Net(), ids, step=lambda model, chunk, state: (model(chunk), state))
    assert_type(outcome, checks.Outcome)
    assert_type(checks.incremental.outcome(modelprobe, Net(), ids, chunks=[3, 1, 2]), checks.Outcome)
    assert_type(checks.modes_agree(modelprobe, Net(), ids), checks.Outcome)
    assert_type(
        checks.resume(modelprobe, Net, lambda model, steps: None, Net.state_dict, Net.load_state_dict, at=2),
        checks.Outcome,
    )
    assert_type(checks.packed_documents(modelprobe, Net(), ids, pack=lambda documents: documents[0]), checks.Outcome)
    assert_type(checks.deferred_initialization(modelprobe, Net(), factory=Net), checks.Outcome)
    assert_type(checks.wholly_loaded(modelprobe, Net, lambda model: None, new="head.*"), checks.Outcome)
    assert_type(checks.inputs_used(modelprobe, Net(), modelprobe.randn(4, 8)), checks.Outcome)


def test_interventions(modelprobe: ModelProbe) -> None:
    model, x = Net(), modelprobe.randn(4, 8)
    with modelprobe.intervene(model, "blocks.*", output=faults.scale(2), calls=[0]) as intervention:
        record = modelprobe.run(model, x)
    assert_type(intervention.fired, int)
    assert_same_distribution(record, modelprobe.run(model, x), max_shift=0.1)
    result = modelprobe.ablation(model, x, lambda output: output.square().mean())
    assert_type(result.rows[0].change, float)
    assert_layer_matters(result, "blocks.*", min_change=0.1)
    with modelprobe.watch(model) as watch:
        model(x)
    watch.last.save(Path("record.json"))
    assert_type(Record.load("record.json"), Record)
    table = modelprobe.precision(model.bfloat16(), model, x, layers="blocks.*", rename={"fc": "fc"})
    assert_type(table.sqnr, float)
    assert_type(table["fc"].own, float | None)
