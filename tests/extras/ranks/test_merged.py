"""`modelprobe.merged`, and snapshots of what several ranks do."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from typing import Any

import pytest
import torch
from torch import nn

from pytest_modelprobe import ModelProbe

slow = pytest.mark.skipif("MODELPROBE_RANKS" not in os.environ, reason="starts many processes: tox -e ranks")

STEP = """
import json, math, os, pathlib
import pytest, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

ranks = pytest.mark.modelprobe(world_size=int(os.environ.get("RANKS", "2")))


def net():
    attention = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(50, 16), attention, nn.LayerNorm(16), nn.Linear(16, 50))


def step(modelprobe, kind="ddp"):
    model = modelprobe.build(net)
    ids = modelprobe.randint(0, 50, (8, 6)).chunk(dist.get_world_size())[dist.get_rank()]
    if kind == "fsdp":
        fully_shard(model[1])
        wrapped = fully_shard(model)
    else:
        wrapped = nn.parallel.DistributedDataParallel(model)
    watch = modelprobe.watch(wrapped)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    nn.functional.cross_entropy(wrapped(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    return watch
"""


def numbers(record: dict[str, Any] | list[Any], where: str = "") -> dict[str, tuple[float, float]]:
    """Return each number of a record by its path, with the rms of its tensor; shapes and types are in the path."""
    found = {}
    for key, part in record.items() if isinstance(record, dict) else enumerate(record):
        path = f"{where}.{key}"
        if key in ("shape", "type"):
            found[f"{path} {part}"] = (0.0, 1.0)
        elif key == "statistics":
            square = part["deviations"] / part["count"] if "deviations" in part else 0.0
            rms = (square + part["mean"] ** 2) ** 0.5
            found |= {f"{path}.{name}": (part[name], rms or 1.0) for name in ("count", "mean", "min", "max")}
            found[f"{path}.rms"] = (rms, rms or 1.0)
        elif key == "fingerprint":
            found |= {f"{path}.{k}": (x, math.hypot(*part) or 1.0) for k, x in enumerate(part)}
        elif isinstance(part, (dict, list)):
            found |= numbers(part, path)
    return found


@slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_record_of_several_ranks_is_that_of_one(
    run: Any, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    records = []
    for ranks in ("1", "2", "4"):
        monkeypatch.setenv("RANKS", ranks)
        run(
            STEP
            + f"""
@ranks
def test_step(modelprobe):
    merged = modelprobe.merged(step(modelprobe, {kind!r}))
    if not dist.get_rank():
        pathlib.Path(os.environ["RANKS"] + ".json").write_text(json.dumps(merged.to_dict()))
"""
        ).assert_outcomes(passed=1)
        records.append(numbers(json.loads((pytester.path / f"{ranks}.json").read_text())))
    one = records[0]
    assert len(one) > 300
    for several in records[1:]:
        assert_same(several, one)


def assert_same(several: dict[str, tuple[float, float]], one: dict[str, tuple[float, float]]) -> None:
    assert several.keys() == one.keys()

    def scale(path: str) -> float:
        """An update is a difference of values, so it is as exact as these are."""
        return max(one[path][1], one.get(path.replace(".update.", ".reading."), one[path])[1])

    worst = max((abs(several[path][0] - x) / scale(path), path) for path, (x, _) in one.items())
    assert worst[0] < 2e-6, worst


def test_the_record_of_microbatches_is_that_of_the_batch(modelprobe: ModelProbe) -> None:
    ids, found = modelprobe.randint(0, 50, (8, 6)), []
    for parts in (1, 2, 4):
        attention = functools.partial(nn.TransformerEncoderLayer, 16, 2, 32, dropout=0.0, batch_first=True)
        model = modelprobe.build(lambda: nn.Sequential(nn.Embedding(50, 16), attention(), nn.Linear(16, 50)))  # noqa: B023
        watch = modelprobe.watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for part in ids.chunk(parts):
            loss = nn.functional.cross_entropy(model(part).flatten(0, 1), part.flatten())
            (loss / parts).backward()
        optimizer.step()
        found.append(numbers(modelprobe.merged(watch).to_dict()))
    assert sum("fingerprint" in path for path in found[0]) > 200
    for several in found[1:]:
        assert_same(several, found[0])


@slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_snapshot_of_two_ranks_is_that_of_one_and_of_four(
    run: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    tests = (
        STEP
        + f"""
@ranks
def test_step(modelprobe, modelprobe_snapshot):
    merged = modelprobe.merged(step(modelprobe, {kind!r}))
    assert merged["3"].output.forward.fingerprint
    assert merged["3"].output.backward.fingerprint
    assert merged == modelprobe_snapshot
"""
    )
    result = run(tests, "--snapshot-update")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["created __modelprobe__/*.arch.json: *", "*1 passed, 1 snapshot written in *"])
    for world_size in ("1", "4"):
        monkeypatch.setenv("RANKS", world_size)
        run(tests).assert_outcomes(passed=1)


@slow
def test_a_snapshot_of_one_rank_alone_is_refused(run: Any, pytester: pytest.Pytester) -> None:
    result = run(
        STEP
        + """
@ranks
def test_step(modelprobe, modelprobe_snapshot):
    assert step(modelprobe).record == modelprobe_snapshot
""",
        "--snapshot-update",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*test_step: a snapshot holds what all 2 ranks do, and the record is of rank ? alone",
            "*Compare one record of all, in every rank: assert modelprobe.merged(watch) == modelprobe_snapshot",
        ]
    )
    assert not list(pytester.path.rglob("*.arch*"))


@slow
def test_a_layer_that_one_rank_freezes_is_named_with_the_rank(run: Any) -> None:
    result = run(
        STEP
        + """
@ranks
def test_step(modelprobe):
    model = modelprobe.build(net)
    model[2].weight.requires_grad = dist.get_rank() == 0
    modelprobe.merged(modelprobe.run(model, modelprobe.randint(0, 50, (4, 6))))
"""
    )
    result.assert_outcomes(failed=1)
    disagree = "ranks disagree: 2.weight has another requires_grad in [[]rank 1] than in [[]rank 0]: False, not True."
    result.stdout.fnmatch_lines([f"E *AssertionError: {disagree}*"])


@slow
def test_a_nan_on_one_rank_is_named_with_the_layer_and_the_rank(run: Any) -> None:
    run(
        STEP
        + """
@ranks
def test_step(modelprobe):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    watch = modelprobe.watch(nn.parallel.DistributedDataParallel(model))
    with torch.no_grad():
        watch.model(torch.full((3, 4), [1.0, math.nan][dist.get_rank()]))
    note = "0 output is not finite in [rank 1], and is finite in [rank 0]"
    assert note in modelprobe.merged(watch).notes
"""
    ).assert_outcomes(passed=1)


@slow
@pytest.mark.usefixtures("_plugin_alone")
def test_under_torchrun_rank_0_alone_writes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        STEP
        + """
@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


def test_step(modelprobe, modelprobe_snapshot):
    assert modelprobe.merged(step(modelprobe)) == modelprobe_snapshot
"""
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "pytest"]
    torchrun += ["-p", "no:randomly", "-p", "no:cacheprovider"]
    result = pytester.run(*torchrun, "--snapshot-update")
    assert result.ret == 0
    assert str(result.stdout).count("created __modelprobe__") == 1
    assert str(result.stdout).count("1 passed, 1 snapshot not compared in ") == 1
    compared = pytester.run(*torchrun)
    assert (compared.ret, str(compared.stdout).count("1 passed in ")) == (0, 2), "every rank compares"


# --- what optimizers did: updates, hyperparameters and the counts of the loop -----------------------------------------

TRAINING = """
import pytest, torch, torch.distributed as dist
from torch import nn
from pytest_modelprobe import assert_params_updated, assert_training_loop, assert_update_ratio


@pytest.mark.modelprobe(world_size=2)
def test_training(modelprobe):
    rank = dist.get_rank()
    model = modelprobe.build(lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2)))
    wrapped = nn.parallel.DistributedDataParallel(model)
    watch = modelprobe.watch(wrapped, steps=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1 if rank == 0 else {rate})
    for step in range(3):
        optimizer.zero_grad()
        wrapped(modelprobe.randn(8, 4, name=f"x{{step}}").chunk(2)[rank]).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model.eval()(modelprobe.randn(4, 4, name="v"))
            model.train()
    {then}
"""


def test_updates_and_counts_of_all_ranks_are_those_of_one_process(run: Any) -> None:
    then = """
    merged = modelprobe.merged(watch)
    assert_params_updated(merged)
    assert_update_ratio(merged, high=1.0, ignore="**.bias")
    assert merged.optimizers == watch.first_step.optimizers
    assert [p.group for p in merged.parameters] == [0] * 4
    assert all(p.update.statistics for p in merged.parameters)
    assert modelprobe.merged(watch.steps[1]).step == 1
    assert modelprobe.merged(watch.evaluations).forwards == 3
    whole = modelprobe.merged(watch.record)
    assert (whole.training.steps, whole.training.passes, whole.forwards) == (3, 3, 6)
    assert_training_loop(whole)
    with pytest.raises(Exception, match=r"of step 0 alone.*modelprobe.merged\\(watch.record\\)"):
        assert_training_loop(merged)
"""
    run(TRAINING.format(rate=0.1, then=then)).assert_outcomes(passed=1)


def test_a_hyperparameter_that_differs_is_named_with_the_rank(run: Any) -> None:
    result = run(TRAINING.format(rate=0.2, then="modelprobe.merged(watch)"))
    result.assert_outcomes(failed=1)
    disagree = (
        "ranks disagree: the optimizer of 0.weight has another lr in [[]rank 1] than in [[]rank 0]: 0.2, not 0.1."
    )
    result.stdout.fnmatch_lines([f"E *AssertionError: {disagree}*"])


# --- optimizer states or layers that are spread over ranks ------------------------------------------------------------

PARALLEL = """
import os
import pytest, torch, torch.distributed as dist
from torch import nn
from pytest_modelprobe import assert_frozen, assert_grad_finite, assert_params_updated, assert_update_ratio

two = pytest.mark.modelprobe(world_size=2, timeout=240)
"""


@slow
def test_the_steps_of_an_optimizer_whose_states_are_spread_over_ranks(run: Any) -> None:
    run(
        PARALLEL
        + """
from torch.distributed.optim import ZeroRedundancyOptimizer

@two
def test_zero(modelprobe):
    rank = dist.get_rank()
    layers = lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    model = modelprobe.build(layers)
    model[2].requires_grad_(False)
    replicas = nn.parallel.DistributedDataParallel(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = ZeroRedundancyOptimizer(trained, torch.optim.AdamW, lr=1e-3)
    watch = modelprobe.watch(model, steps=3)
    averaged = []
    for x in modelprobe.randn(3, 8, 4):
        replicas(x.chunk(2)[rank]).square().mean().backward()
        averaged.append(model[0].weight.grad.mean().item())
        optimizer.step()
        optimizer.zero_grad()
    assert [(step.forwards, step.backwards) for step in watch.steps] == [(1, 1)] * 3
    applied = [step["0"].parameters[0].applied.statistics.mean for step in watch.steps]
    assert applied == pytest.approx(averaged, rel=1e-5)
    for subject in (watch, watch.first_step):
        assert_grad_finite(subject)
    assert_params_updated(watch, layers=["0", "3"])
    assert_update_ratio(watch)
    assert_frozen(watch, layers="2")
    for layer in ("0", "3"):  # each rank steps with one of them, and is sent the other
        with pytest.raises(AssertionError, match="is not frozen"):
            assert_frozen(watch, layers=layer)
    merged = modelprobe.merged(watch)
    assert merged["0"].calls[0].inputs[0].shape == (8, 4)
""",
    ).assert_outcomes(passed=1)


@slow
def test_each_stage_of_a_pipeline_has_the_numbers_of_the_whole_model(run: Any) -> None:
    run(
        PARALLEL
        + """
from torch.distributed import pipelining

def numbers(reading):
    return reading.statistics.count, reading.statistics.mean, reading.statistics.std

@two
def test_pipelines(modelprobe):
    for schedule in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B):
        check(modelprobe, schedule)

def check(modelprobe, schedule):
    layers = lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    whole, rank = modelprobe.build(layers), dist.get_rank()
    part = modelprobe.build(layers)[2 * rank : 2 * rank + 2]
    x, target = modelprobe.randn(8, 4), modelprobe.randn(8, 2)
    watch, alone = modelprobe.watch(part, steps=2), modelprobe.watch(whole, steps=2)
    stage = pipelining.PipelineStage(part, rank, 2, torch.device("cpu"))
    pipeline = schedule(stage, 4, loss_fn=nn.functional.mse_loss, scale_grads=False)
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in (part, whole)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        pipeline.step(*[x][rank:], target=target if rank else None)
        for some, wanted in zip(x.chunk(4), target.chunk(4)):
            nn.functional.mse_loss(whole(some), wanted).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert watch.evaluations.forwards == 0
    assert [(step.forwards, step.backwards) for step in watch.steps] == [(4, 4)] * 2
    for step, other in zip(watch.steps, alone.steps):
        for (layer, (_, value)) in ((l, v) for l in step.layers.values() if l.leaf for v in l.outputs):
            ((_, twin),) = other[layer.name].outputs
            assert numbers(value.forward) == pytest.approx(numbers(twin.forward), rel=1e-5, abs=1e-6)
            assert numbers(value.backward) == pytest.approx(numbers(twin.backward), rel=1e-5, abs=1e-6)
    for subject in (watch, watch.first_step):
        assert_grad_finite(subject)
    assert_params_updated(watch)
    assert_update_ratio(watch)
""",
    ).assert_outcomes(passed=1)
