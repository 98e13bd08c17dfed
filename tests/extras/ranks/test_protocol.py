"""Tests with ``world_size=``: pytest starts a process for each rank, and reports them as one test."""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.popen_forkserver  # one fork server for all runs
import os
import subprocess
import sys
import time

import pytest

QUIET = ("-p", "no:randomly", "-p", "no:cacheprovider")

# Each starts processes, a second for two: all run in `tox -e ranks`, a few by default.
slow = pytest.mark.skipif("MODELPROBE_RANKS" not in os.environ, reason="starts many processes: tox -e ranks")

SLOW = "If the ranks are only slow, give @pytest.mark.modelprobe(timeout=) more seconds."

HEADER = """
import os, time, warnings
import pytest, torch, torch.distributed as dist
two = pytest.mark.modelprobe(world_size=2)
"""


@pytest.fixture(autouse=True)
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, _plugin_alone: None, _forked: None) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def run(pytester: pytest.Pytester, tests: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(HEADER + tests)
    return pytester.runpytest(*QUIET, *options)


def children() -> list[str]:
    """Return the commands of the processes that the fork server started and that run."""
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    found = subprocess.run(["ps", "--ppid", str(server), "-o", "args="], capture_output=True, text=True)
    return found.stdout.splitlines()


def test_each_rank_runs_the_test_with_its_fixtures_in_one_process_group(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
        @pytest.fixture
        def mine(tmp_path):
            return torch.full((1,), float(dist.get_rank() + 1))

        @two
        def test_sum(modelprobe, mine, record_property):
            dist.all_reduce(mine)
            assert (mine.item(), dist.get_world_size()) == (3.0, int(os.environ["WORLD_SIZE"])) == (3.0, 2)
            record_property("sum", mine.item())

        def test_no_process_group_is_left_here():
            assert not dist.is_initialized()
        """.replace("\n        ", "\n"),
        "--junitxml=results.xml",
    )
    result.assert_outcomes(passed=2)
    assert (pytester.path / "results.xml").read_text().count('<property name="sum" value="3.0"') == 1


def test_a_failure_is_that_of_the_first_rank_that_failed(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@two
def test_one_rank(modelprobe):
    print("said by", dist.get_rank())
    warnings.warn("careful")
    if dist.get_rank() == 1:
        assert 1 + 1 == 3, "only here"
    dist.barrier()
""",
    )
    result.assert_outcomes(failed=1, warnings=1)  # the warning of two ranks counts once
    result.stdout.fnmatch_lines(
        [
            "*_ test_one_rank [[]rank 1] _*",
            '>           assert 1 + 1 == 3, "only here"',
            "E           AssertionError: only here",
            "*- [[]rank 1] Captured stdout call -*",
            "said by 1",
            "*- ranks -*",
            "[[]rank 0] lost the connection to a rank that was gone",
            "[[]rank 1] failed first",
            "FAILED *::test_one_rank - [[]rank 1] AssertionError: only here*",
        ]
    )
    result.stdout.no_fnmatch_line("*said by 0*")


@slow
def test_a_hang_names_the_line_at_which_each_rank_stands(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@pytest.mark.modelprobe(world_size=2, timeout=4)
def test_hang(modelprobe):
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(100)
""",
    )
    result.assert_outcomes(failed=1)
    name = "test_a_hang_names_the_line_at_which_each_rank_stands.py"
    result.stdout.fnmatch_lines(
        [
            "timed out after 4 s",
            f"[[]rank 0] stands at {name}:8 in test_hang: dist.all_reduce(torch.ones(1))",
            f"[[]rank 1] stands at {name}:10 in test_hang: time.sleep(100)",
            f"A collective that not every rank calls waits for ever. {SLOW}",
            "*- [[]rank 0] stack -*",
            '  File "*distributed_c10d.py", line * in all_reduce',
            f"FAILED {name}::test_hang - timed out after 4 s",
        ]
    )
    result.stdout.no_fnmatch_line("*/pluggy/*")
    assert children() == []


@slow
def test_a_rank_that_dies_is_told_by_its_exit_code_or_signal(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@two
@pytest.mark.parametrize("end", [lambda: os._exit(9), lambda: os.kill(os.getpid(), 11)], ids=["exit", "segfault"])
def test_dies(modelprobe, end):
    if dist.get_rank() == 1:
        end()
    dist.barrier()
""",
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "FAILED *::test_dies[[]exit] - [[]rank 1] died with exit code 9",
            "FAILED *::test_dies[[]segfault] - [[]rank 1] was ended by SIGSEGV",
        ]
    )
    result.stdout.fnmatch_lines(["*- [[]rank 1] stderr -*", "Fatal Python error: Segmentation fault"])


@slow
def test_a_fixture_that_fails_in_one_rank_is_an_error(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@pytest.fixture
def broken():
    if dist.get_rank() == 1:
        raise ValueError("not here")

@two
def test_fixture(broken):
    dist.barrier()
""",
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["ERROR *::test_fixture - [[]rank 1] ValueError: not here"])


@slow
def test_skips_and_expected_failures_are_those_of_the_ranks(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@two
def test_skipped_in_all(): pytest.skip("nowhere")
@two
def test_skipped_in_one():
    if dist.get_rank() == 1: pytest.skip("not here")
@two
@pytest.mark.xfail(strict=True)
def test_fails_in_one_as_expected():
    assert dist.get_rank() == 0
@two
@pytest.mark.xfail(strict=True)
def test_passes_unexpectedly(): pass
""",
        "-rsf",
    )
    result.assert_outcomes(skipped=2, xfailed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["SKIPPED*: nowhere", "SKIPPED*: [[]rank 1] not here", "FAILED * - [[]rank ?] [[]XPASS(strict)]*"]
    )


@slow
def test_exitfirst_stops_and_output_is_shown_with_the_rank(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@two
def test_fails():
    print("before")
    assert dist.get_rank() == 0
def test_does_not_run(): pass
""",
        "-x",
        "-s",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines_random(["*[[]rank 0] before", "*[[]rank 1] before"])


@slow
def test_pdb_says_that_a_debugger_cannot_stop_in_a_rank(pytester: pytest.Pytester) -> None:
    result = run(pytester, "\n@two\ndef test_fails(): assert dist.get_rank() == 0\n", "--pdb")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*- --pdb -*", "A debugger cannot stop in a rank: it has no terminal of its own."])


@slow
def test_what_earlier_tests_set_up_is_torn_down_before_the_next_module(pytester: pytest.Pytester) -> None:
    module = """
import pytest
@pytest.fixture(scope="module")
def shared():
    yield
    print("torn down")
def test_first(shared): pass
@pytest.mark.modelprobe(world_size=1)
def test_in_a_rank(): pass
"""
    pytester.makepyfile(test_a=module, test_b=module)
    pytester.runpytest(*QUIET).assert_outcomes(passed=4)


@slow
@pytest.mark.usefixtures("_installed_plugins")
def test_xdist_and_warnings_as_errors_change_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        HEADER + "\n@two\n@pytest.mark.parametrize('i', [1, 2])\ndef test_ok(modelprobe, i): dist.barrier()\n"
    )
    command = [sys.executable, "-W", "error", "-m", "pytest", "-n", "2", "-W", "error"]
    assert pytester.run(*command).ret == 0


@slow
def test_a_rank_that_breaks_the_test_off_fails_it(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@two
def test_stops():
    if dist.get_rank() == 1:
        pytest.exit("no data here")
@two
def test_after(): pass
""",
    )
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["FAILED *::test_stops - [[]rank 1] broke the test off: _pytest.outcomes.Exit: no*"])


@slow
def test_the_tests_of_a_named_model_do_not_run_in_the_ranks_of_another_test(pytester: pytest.Pytester) -> None:
    tests = "\n@pytest.mark.modelprobe(world_size=1)\ndef test_mine(): pass\n"
    result = run(pytester, tests, "--modelprobe-model=torch.nn:Flatten", "--modelprobe-input=2x3", "-k", "mine")
    result.assert_outcomes(passed=1, deselected=26)


@slow
def test_imports_do_not_count_as_time_of_the_test(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
if "RANK" in __import__("os").environ:
    time.sleep(5)
@pytest.mark.modelprobe(world_size=2, timeout=4)
def test_reduce(modelprobe): dist.all_reduce(torch.ones(1))
""",
    )
    result.assert_outcomes(passed=1)


@slow
def test_a_thread_that_is_left_is_told_from_a_hang(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
import threading
@pytest.mark.modelprobe(world_size=1, timeout=8)
def test_thread(): threading.Thread(target=time.sleep, args=(60,)).start()
""",
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        ["The test is over, and a process ends after its last thread: join the threads that the test starts."]
    )


@slow
def test_what_a_passing_test_started_is_ended_too(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
import subprocess
@pytest.mark.modelprobe(world_size=1)
def test_starts():
    with open("pid", "w") as file: file.write(str(subprocess.Popen(["sleep", "61"]).pid))
""",
    )
    result.assert_outcomes(passed=1)
    pid = (pytester.path / "pid").read_text()
    for _ in range(100):
        states = subprocess.run(["ps", "-p", pid, "-o", "stat="], capture_output=True, text=True).stdout
        if not states.strip() or states.startswith("Z"):
            return
        time.sleep(0.05)
    pytest.fail(f"sleep still runs: {states}")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("world_size=0", "takes the number of ranks, from 1, as world_size=; got 0"),
        ("world_size=2, timeout=0", "takes seconds, more than 0, as timeout=; got 0"),
        ("timeout=3", "takes timeout= with world_size= only: it is the time that the ranks have"),
    ],
)
def test_a_wrong_argument_is_an_error_of_the_test(pytester: pytest.Pytester, arguments: str, why: str) -> None:
    result = run(pytester, f"\n@pytest.mark.modelprobe({arguments})\ndef test_it(modelprobe): pass\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"@pytest.mark.modelprobe {why}"])
