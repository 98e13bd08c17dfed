"""`--modelprobe-mutate`: faults are planted, tests run again, and the faults that no test notices are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.modules import module as hooks_of_all

import pytest_modelprobe.extras.mutation.session
import pytest_modelprobe.probe  # noqa: F401

MODEL = """
import pytest
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)
        with torch.no_grad():
            self.fc.weight.copy_(torch.arange(8.0).reshape(2, 4))
            self.fc.bias.fill_(1)

    def forward(self, x):
        return self.fc(x)
"""
CHECKS_ALL = """
def test_value():
    assert Net()(torch.ones(1, 4)).tolist() == [[7.0, 23.0]]
"""
CHECKS_SHAPE = """
def test_shape():
    assert Net()(torch.ones(1, 4)).shape == (1, 2)
"""


@pytest.fixture(autouse=True)
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, _plugin_alone: None, _forked: None) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def mutate(pytester: pytest.Pytester, tests: str, *options: str, **run: object) -> pytest.RunResult:
    pytester.makepyfile(test_it=MODEL + tests)
    return pytester.runpytest_inprocess("--modelprobe-mutate", *options, **run)


def verdicts(result: pytest.RunResult) -> str:
    """Return the line of the score without what it took."""
    lines = [line for line in result.outlines if "of the faults were noticed" in line or "no fault was tried" in line]
    return lines[0].partition(", in ")[0]


def test_a_test_that_only_looks_at_the_shape_notices_no_change_of_values(pytester: pytest.Pytester) -> None:
    before = torch.get_rng_state()
    result = mutate(pytester, CHECKS_SHAPE)
    assert verdicts(result) == "0 % of the faults were noticed: 0 of 14"
    result.assert_outcomes(passed=1)
    assert result.ret == 0
    torch.set_rng_state(before)
    assert not hooks_of_all._global_forward_hooks
    assert not hooks_of_all._global_forward_pre_hooks


def test_a_fault_in_a_model_that_a_fixture_of_a_module_runs_is_noticed_by_a_test_that_uses_it(
    pytester: pytest.Pytester,
) -> None:
    tests = """
@pytest.fixture(scope="module")
def output():
    return Net()(torch.ones(1, 4))

def test_positive(output):
    assert output.min() > 0

def test_shape(output):
    assert output.shape == (1, 2)
"""
    result = mutate(pytester, tests)
    result.stdout.fnmatch_lines(["Net fc, 2 tests: *", "Net (root), 2 tests: *"])
    assert "flip_sign" not in result.stdout.str()


@pytest.mark.long
def test_a_fixture_of_a_module_without_a_model_is_set_up_once_more_at_most(pytester: pytest.Pytester) -> None:
    tests = """
@pytest.fixture(scope="module")
def data():
    with open("set-ups", "a") as file:
        file.write("x")
    return torch.ones(1, 4)

def test_value(data):
    assert Net()(data).tolist() == [[7.0, 23.0]]
"""
    mutate(pytester, tests)
    assert (
        len(Path("set-ups").read_text()) <= 4
    )  # the tests, once without a fault, and once more to see that it repeats


def test_a_fault_that_changes_nothing_is_not_counted(pytester: pytest.Pytester) -> None:
    tests = """
class Unused(Net):
    def forward(self, x):
        self.fc(x)
        return x

def test_unused():
    Unused()(torch.ones(1, 4))
"""
    result = mutate(pytester, tests, "-k", "unused")
    assert "Unused fc" not in result.stdout.str()
    result.stdout.fnmatch_lines(["not counted: * faults that changed nothing"])


def test_tests_that_do_not_pass_are_left_out_and_said(pytester: pytest.Pytester) -> None:
    tests = """
def test_fails():
    assert Net()(torch.ones(1, 4)) is None

@pytest.mark.skip
def test_skipped():
    pass

@pytest.mark.xfail
def test_expected():
    assert Net()(torch.ones(1, 4)) is None

def test_idle():
    pass

runs = []

def test_once():
    runs.append(Net()(torch.ones(1, 4)))
    assert len(runs) == 1
"""
    result = mutate(pytester, tests, "-p", "no:cacheprovider")
    assert verdicts(result) == "no fault was tried that has an effect"
    result.stdout.fnmatch_lines(
        [
            "tests left out: 1 failed without a fault, 1 skipped, 1 expected to fail, 1 that run no model",
            "left out: test_it.py::test_once, which when run again without a fault failed: *",
        ]
    )
    result.assert_outcomes(passed=2, failed=1, skipped=1, xfailed=1)


def test_a_score_below_the_minimum_fails_the_run(pytester: pytest.Pytester) -> None:
    assert mutate(pytester, CHECKS_SHAPE, "--modelprobe-mutate-min=50").ret == 1


def test_the_next_run_takes_over_what_is_known(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_other=MODEL + CHECKS_SHAPE)
    first = mutate(pytester, CHECKS_ALL)
    first.stdout.fnmatch_lines(["Net (root), 1 test: to_float64"])
    first.stdout.re_match_lines([r"test_it\.py +\d+ +\d+ +\d+ %", r"test_other\.py +\d+ +0 +0 %"])
    again = mutate(pytester, CHECKS_ALL)
    assert verdicts(again) == verdicts(first)
    again.stdout.fnmatch_lines(["* results from an earlier run: --cache-clear forgets them"])
    assert ", with 0 runs of tests" in again.stdout.str()
    assert "earlier run" not in mutate(pytester, CHECKS_ALL + "# changed").stdout.str()


def test_when_the_time_is_over_the_rest_is_counted(pytester: pytest.Pytester) -> None:
    result = mutate(pytester, CHECKS_SHAPE, "--modelprobe-mutate-time=1e-9")
    result.stdout.fnmatch_lines(
        ["* faults of * not tried: the 1e-09 s of --modelprobe-mutate-time were over; the next run goes on there"]
    )


def test_an_interrupted_run_reports_what_was_done(pytester: pytest.Pytester) -> None:
    tests = """
def test_interrupts():
    if Net()(torch.ones(1, 4)).isnan().any():
        import multiprocessing, os, signal, time
        os.kill(multiprocessing.parent_process().pid, signal.SIGINT)
        time.sleep(60)
"""
    result = mutate(pytester, tests, no_reraise_ctrlc=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*not tried: the run was interrupted; the next run goes on there"])
    result = mutate(pytester, tests, no_reraise_ctrlc=True)
    result.stdout.fnmatch_lines(["* from an earlier run: --cache-clear forgets them"])


SUBTESTS_OF_UNITTEST = """
import unittest

class Tests(unittest.TestCase):
    def test_value(self):
        with self.subTest():
            self.assertEqual(Net()(torch.ones(1, 4)).tolist(), [[7.0, 23.0]])
"""


@pytest.mark.skipif(not hasattr(pytest, "Subtests"), reason="this pytest has no subtests")
def test_a_subtest_that_fails_notices_the_fault_and_is_not_reported(pytester: pytest.Pytester) -> None:
    result = mutate(pytester, SUBTESTS_OF_UNITTEST)
    assert verdicts(result) == "86 % of the faults were noticed: 12 of 14"
    assert result.ret == 0
    result.assert_outcomes(passed=1)
    assert not list(Path(".pytest_cache").rglob("lastfailed"))


def test_a_model_that_tests_share_is_restored(pytester: pytest.Pytester) -> None:
    tests = """
shared = Net()
before = shared.fc.weight.detach().clone()

def test_trains():
    if shared(torch.ones(1, 4)).isnan().any():
        with torch.no_grad():
            shared.fc.weight.fill_(7)
    assert shared.fc.weight.equal(before) or shared.fc.weight.eq(7).all()

def test_last():
    assert shared(torch.ones(1, 4)).tolist() == [[7.0, 23.0]]
"""
    result = mutate(pytester, tests)
    assert "left out" not in result.stdout.str()


@pytest.mark.long
def test_a_compiled_model_runs_as_it_does_without_mutants(pytester: pytest.Pytester) -> None:
    tests = """
def test_compiled():
    net = torch.compile(Net(), backend="eager", fullgraph=True)
    assert net(torch.ones(1, 4)).tolist() == [[7.0, 23.0]]
"""
    # What torch.compile says in Python 3.13.0.
    result = mutate(pytester, tests, "-W", "error", "-W", "ignore:Guards may run slower:RuntimeWarning")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["OptimizedModule(Net) (root), 1 test: to_float64"])


def test_reports_the_cache_and_snapshots_are_those_of_the_run_without_faults(pytester: pytest.Pytester) -> None:
    test = """
def test_snapshot(modelprobe, modelprobe_snapshot):
    assert modelprobe.run(modelprobe.build(Net), modelprobe.randn(2, 4), loss="random") == modelprobe_snapshot
"""
    pytester.makepyfile(test_it=MODEL + test)
    pytester.runpytest_inprocess("--snapshot-update", "-p", "no:cacheprovider")
    files = {path: path.read_bytes() for path in Path("__modelprobe__").rglob("*.json")}
    result = pytester.runpytest_inprocess("--modelprobe-mutate=10", "--junitxml=j.xml", "--modelprobe-output=new")
    assert verdicts(result) == "100 % of the faults were noticed: 10 of 10"
    result.stdout.fnmatch_lines(["1 snapshot passed."])
    assert 'failures="0" skipped="0" tests="1"' in Path("j.xml").read_text()
    assert not list(Path(".pytest_cache").rglob("lastfailed"))
    assert not Path("new").exists()
    assert files == {path: path.read_bytes() for path in Path("__modelprobe__").rglob("*.json")}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--modelprobe-mutate", "tests"], "'tests' is no number of faults; name tests before the option*"),
        (
            ["--modelprobe-mutate", "--snapshot-update"],
            "--modelprobe-mutate compares with snapshots: update them first*",
        ),
        (["--modelprobe-mutate", "--pdb"], "--modelprobe-mutate makes tests fail on purpose: leave out --pdb"),
        (
            ["--modelprobe-mutate-min=80"],
            "--modelprobe-mutate-min is about the faults that --modelprobe-mutate plants*",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(pytester: pytest.Pytester, options: list[str], said: str) -> None:
    result = pytester.runpytest_inprocess(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{said}"])
