"""The processes in which faults are planted: what becomes of one that ends, hangs or cannot start."""

from __future__ import annotations

from pathlib import Path

import pytest

import pytest_modelprobe.extras.mutation.session
import pytest_modelprobe.probe  # noqa: F401

LAYER = """
import multiprocessing
import os
import signal
from pathlib import Path

import torch
from torch import nn

def output():
    layer = nn.Linear(4, 2)
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.bias.fill_(1)
    return layer(torch.ones(1, 4))
"""
CRASHES = """
def test_value():
    value = output()
    if value.eq(0).all():
        os.abort()
    assert value.tolist() == [[5.0, 5.0]]
"""


@pytest.fixture(autouse=True)
def _alone(pytester: pytest.Pytester, _plugin_alone: None, _forked: None) -> None: ...


def test_a_fault_that_ends_the_process_or_never_ends_is_noticed_and_all_others_are_tried(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_modelprobe.extras.mutation.session._MORE_SECONDS", 3.0)
    pytester.makepyfile(
        test_it=LAYER + CRASHES.replace("    assert", "    while value.isnan().any(): pass\n    assert")
    )
    result = pytester.runpytest_inprocess("--modelprobe-mutate")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["83 % of the faults were noticed: 5 of 6, *"])
    result.stdout.fnmatch_lines(["1 fault crashed in test_it.py::test_value"])
    result.stdout.fnmatch_lines(["1 fault timed out in test_it.py::test_value"])


def test_workers_of_xdist_give_their_tests_and_no_fault_ends_one(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=LAYER + CRASHES, test_other=LAYER + "def test_shape(): assert output().dim() == 2")
    result = pytester.runpytest_inprocess("--modelprobe-mutate", "-p", "xdist.plugin", "-n2")
    result.assert_outcomes(passed=2)
    result.stdout.re_match_lines([r"test_it\.py +6 +5 +83 %", r"test_other\.py +6 +0 +0 %"])
    result.stdout.fnmatch_lines(["1 fault crashed in test_it.py::test_value"])


def test_a_test_that_ends_the_process_without_a_fault_is_left_out(pytester: pytest.Pytester) -> None:
    ends = """
def test_shape():
    output()
    if multiprocessing.parent_process():
        os._exit(0)
"""
    pytester.makepyfile(test_it=LAYER + CRASHES + ends)
    result = pytester.runpytest_inprocess("--modelprobe-mutate")
    result.stdout.fnmatch_lines(["83 % of the faults were noticed: 5 of 6, *"])
    result.stdout.fnmatch_lines(["left out: *::test_shape, which when run again without a fault ended its process"])


def test_a_process_that_cannot_start_says_why(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=LAYER + CRASHES)
    pytester.makeconftest("import multiprocessing\nif multiprocessing.parent_process(): raise OSError('no port')")
    result = pytester.runpytest_inprocess("--modelprobe-mutate")
    result.stdout.fnmatch_lines(["*not tried: a process that plants faults ended: exit code 1, *OSError: no port*"])


def test_a_fixture_of_the_session_is_torn_down(pytester: pytest.Pytester) -> None:
    tests = """
import pytest

@pytest.fixture(scope="session", autouse=True)
def server():
    Path(str(os.getpid())).touch()
    yield
    Path(str(os.getpid())).unlink()

def test_shape():
    assert output().dim() == 2
"""
    pytester.makepyfile(test_it=LAYER + tests)
    pytester.runpytest_inprocess("--modelprobe-mutate=2")
    assert not [path for path in Path().iterdir() if path.name.isdigit()]


# --- what is tried again ----------------------------------------------------------------------------------------------


def results_of_earlier_run(pytester: pytest.Pytester) -> bool:
    return "from an earlier run" in pytester.runpytest_inprocess("--modelprobe-mutate").stdout.str()


def test_faults_are_tried_again_if_a_module_that_a_test_imports_has_changed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=LAYER + "from values import DIM\ndef test_shape(): assert output().dim() == DIM")
    pytester.makepyfile(values="DIM = 2")
    results_of_earlier_run(pytester)
    assert results_of_earlier_run(pytester)
    pytester.makepyfile(values="DIM = 1 + 1")
    assert not results_of_earlier_run(pytester)


def test_faults_are_tried_again_if_this_package_has_changed(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytester.makepyfile(test_it=LAYER + CRASHES)
    results_of_earlier_run(pytester)
    (tmp_path / "faults.py").write_text("# another one")
    monkeypatch.setattr("pytest_modelprobe.extras.mutation.results._PACKAGE", tmp_path)
    assert not results_of_earlier_run(pytester)
