"""The invariants of a training in a file beside the snapshots: written by an update, and judged by afterwards."""

from __future__ import annotations

import json

import pytest

TEST = """
import torch
from torch import nn
from pytest_modelprobe import assert_invariants

def test_training(modelprobe, modelprobe_snapshot):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    watch = modelprobe.watch(model, steps=4)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    assert_invariants(watch, modelprobe_snapshot)
"""


@pytest.fixture
def written(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv("CI", raising=False)
    pytester.makepyfile(test_it=TEST.replace("RATE", "0.1"))
    pytester.runpytest_inprocess("--snapshot-update").assert_outcomes(passed=1)
    return pytester


def test_an_update_writes_the_file_and_the_next_run_is_judged_by_it(written: pytest.Pytester) -> None:
    path = written.path / "__modelprobe__" / "test_it" / "test_training.training.json"
    before = path.read_text()
    assert json.loads(before)["groups"][0]["options"]["lr"] == 0.1
    written.runpytest_inprocess("--snapshot-update", "--modelprobe-seed=7").assert_outcomes(passed=1)
    assert path.read_text() == before
    written.makepyfile(test_it=TEST.replace("RATE", "0.2"))
    result = written.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E*AssertionError: group 0 (SGD) has lr 0.2 in all 4 steps; in the healthy run it has lr 0.1"]
    )
    assert path.read_text() == before
    written.runpytest_inprocess("--snapshot-update").assert_outcomes(passed=1)
    assert json.loads(path.read_text())["groups"][0]["options"]["lr"] == 0.2


def test_without_a_file_the_test_fails_with_the_way_out(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=TEST.replace("RATE", "0.1"))
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*has no invariants of a healthy training yet: `pytest --snapshot-update` learns them*"]
    )


def test_in_ci_no_file_is_written(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    pytester.makepyfile(test_it=TEST.replace("RATE", "0.1"))
    result = pytester.runpytest_inprocess("--snapshot-update")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*test_training.training.json is not written, because CI is set*"])
    assert not list(pytester.path.rglob("*.training.json"))


def test_processes_of_torchrun_without_a_group_write_no_file(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    pytester.makepyfile(test_it=TEST.replace("RATE", "0.1"))
    result = pytester.runpytest_inprocess("--snapshot-update")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*test_training.training.json is not written, because torchrun started 2 processes, and this one has no *"]
    )
    assert not list(pytester.path.rglob("*.training.json"))


def test_a_file_of_something_else_is_refused(written: pytest.Pytester) -> None:
    path = written.path / "__modelprobe__" / "test_it" / "test_training.training.json"
    path.write_text('{"model": 3}')
    result = written.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*test_training.training.json has no invariants (*): restore it, or remove it and run*"]
    )


def test_invariants_are_not_compared_with_equals(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it=TEST.replace("RATE", "0.1").replace(
            "assert_invariants(watch, modelprobe_snapshot)", "assert watch.invariants == modelprobe_snapshot"
        )
    )
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*this is a Invariants: write assert_invariants(watch, modelprobe_snapshot)*"])
