"""`modelprobe.merged`, and snapshots of what several ranks do."""

from __future__ import annotations

import functools
import json
import math
import multiprocessing.forkserver
import multiprocessing.popen_forkserver  # noqa: F401 - one fork server for all runs
import os
import sys
from typing import Any

import pytest
import torch
from torch import nn

# pytester forgets what its runs import.
import pytest_modelprobe.extras.ranks.processes
import pytest_modelprobe.probe  # noqa: F401
from pytest_modelprobe import ModelProbe

QUIET = ("-p", "no:randomly", "-p", "no:cacheprovider")
slow = pytest.mark.skipif("MODELPROBE_RANKS" not in os.environ, reason="starts many processes: tox -e ranks")

STEP = """
import json, math, os, pathlib
import pytest, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

ranks = pytest.mark.modelprobe(world_size=int(os.environ["RANKS"]))


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


@pytest.fixture(autouse=True)
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, _plugin_alone: None) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("RANKS", "2")


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
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    pytester.makepyfile(
        STEP
        + f"""
@ranks
def test_step(modelprobe):
    merged = modelprobe.merged(step(modelprobe, {kind!r}))
    if not dist.get_rank():
        pathlib.Path(os.environ["RANKS"] + ".json").write_text(json.dumps(merged.to_dict()))
"""
    )
    records = []
    for ranks in ("1", "2", "4"):
        monkeypatch.setenv("RANKS", ranks)
        pytester.runpytest(*QUIET).assert_outcomes(passed=1)
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
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    pytester.makepyfile(
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
    result = pytester.runpytest(*QUIET, "--snapshot-update")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["created __modelprobe__/*.arch.json: *", "*1 passed, 1 snapshot written in *"])
    for world_size in ("1", "4"):
        monkeypatch.setenv("RANKS", world_size)
        pytester.runpytest(*QUIET).assert_outcomes(passed=1)


@slow
def test_a_snapshot_of_one_rank_alone_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        STEP
        + """
@ranks
def test_step(modelprobe, modelprobe_snapshot):
    assert step(modelprobe).record == modelprobe_snapshot
"""
    )
    result = pytester.runpytest(*QUIET, "--snapshot-update")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*test_step: a snapshot holds what all 2 ranks do, and the record is of rank ? alone",
            "*Compare one record of all, in every rank: assert modelprobe.merged(watch) == modelprobe_snapshot",
        ]
    )
    assert not list(pytester.path.rglob("*.arch*"))


@slow
def test_a_layer_that_one_rank_freezes_is_named_with_the_rank(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        STEP
        + """
@ranks
def test_step(modelprobe):
    model = modelprobe.build(net)
    model[2].weight.requires_grad = dist.get_rank() == 0
    modelprobe.merged(modelprobe.run(model, modelprobe.randint(0, 50, (4, 6))))
"""
    )
    result = pytester.runpytest(*QUIET)
    result.assert_outcomes(failed=1)
    disagree = "ranks disagree: 2.weight has another requires_grad in [[]rank 1] than in [[]rank 0]: False, not True."
    result.stdout.fnmatch_lines([f"E *AssertionError: {disagree}*"])


@slow
def test_a_nan_on_one_rank_is_named_with_the_layer_and_the_rank(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
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
    )
    pytester.runpytest(*QUIET).assert_outcomes(passed=1)


@slow
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
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    result = pytester.run(*torchrun, "-m", "pytest", *QUIET, "--snapshot-update")
    assert result.ret == 0
    assert str(result.stdout).count("created __modelprobe__") == 1
    assert str(result.stdout).count("1 passed, 1 snapshot not compared in ") == 1
    compared = pytester.run(*torchrun, "-m", "pytest", *QUIET)
    assert (compared.ret, str(compared.stdout).count("1 passed in ")) == (0, 2), "every rank compares"
