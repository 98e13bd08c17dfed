"""What optimizers did in several ranks, merged: updates, hyperparameters and the counts of the loop."""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.popen_forkserver  # noqa: F401 - one fork server for all runs

import pytest

# pytester forgets what its runs import.
import pytest_modelprobe.extras.ranks.processes
import pytest_modelprobe.probe  # noqa: F401

QUIET = ("-p", "no:randomly", "-p", "no:cacheprovider")

TEST = """
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


@pytest.fixture(autouse=True)
def project(monkeypatch: pytest.MonkeyPatch, _plugin_alone: None) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_updates_and_counts_of_all_ranks_are_those_of_one_process(pytester: pytest.Pytester) -> None:
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
    pytester.makepyfile(TEST.format(rate=0.1, then=then))
    pytester.runpytest(*QUIET).assert_outcomes(passed=1)


@pytest.mark.usefixtures("_forked")
def test_a_hyperparameter_that_differs_is_named_with_the_rank(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TEST.format(rate=0.2, then="modelprobe.merged(watch)"))
    result = pytester.runpytest(*QUIET)
    result.assert_outcomes(failed=1)
    disagree = (
        "ranks disagree: the optimizer of 0.weight has another lr in [[]rank 1] than in [[]rank 0]: 0.2, not 0.1."
    )
    result.stdout.fnmatch_lines([f"E *AssertionError: {disagree}*"])
