"""Tests with ``world_size=``: pytest starts a process for each rank, and reports them as one test."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import subprocess
import sys
import time
from typing import Any

import pytest

# Each starts processes, a second for two: all run in `tox -e ranks`, a few by default.
slow = pytest.mark.skipif("MODELPROBE_RANKS" not in os.environ, reason="starts many processes: tox -e ranks")

HEADER = """
import os, time, warnings
import pytest, torch, torch.distributed as dist
two = pytest.mark.modelprobe(world_size=2)
"""


def children() -> list[str]:
    """Return the commands of the processes that the fork server started and that run."""
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    found = subprocess.run(["ps", "--ppid", str(server), "-o", "args="], capture_output=True, text=True)
    return found.stdout.splitlines()


def test_each_rank_runs_the_test_with_its_fixtures_in_one_process_group(run: Any, pytester: pytest.Pytester) -> None:
    result = run(
        HEADER
        + """
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


def test_a_failure_is_that_of_the_first_rank_that_failed(run: Any) -> None:
    result = run(
        HEADER
        + """
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
def test_a_hang_names_the_line_at_which_each_rank_stands(run: Any) -> None:
    result = run(
        HEADER
        + """
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
            "A collective that not every rank calls waits for ever, and so does a thread that is not joined. If *",
            "*- [[]rank 0] stack -*",
            '  File "*distributed_c10d.py", line * in all_reduce',
            f"FAILED {name}::test_hang - timed out after 4 s",
        ]
    )
    result.stdout.no_fnmatch_line("*/pluggy/*")
    assert children() == []


@slow
def test_what_ends_a_rank_is_told(run: Any) -> None:
    result = run(
        HEADER
        + """
@pytest.fixture
def broken():
    if dist.get_rank() == 1:
        raise ValueError("not here")

@two
def test_fixture(broken):
    dist.barrier()

def segfault(): os.kill(os.getpid(), 11)

@two
@pytest.mark.parametrize("end", [lambda: os._exit(9), segfault, lambda: pytest.exit("no data")], ids=["a", "b", "c"])
def test_dies(end):
    if dist.get_rank() == 1:
        end()
    dist.barrier()
""",
    )
    result.assert_outcomes(failed=3, errors=1)
    result.stdout.fnmatch_lines(["*- [[]rank 1] stderr -*", "Fatal Python error: Segmentation fault"])
    result.stdout.fnmatch_lines(
        [
            "FAILED *::test_dies[[]a] - [[]rank 1] died with exit code 9",
            "FAILED *::test_dies[[]b] - [[]rank 1] was ended by SIGSEGV",
            "FAILED *::test_dies[[]c] - [[]rank 1] broke the test off: _pytest.outcomes.Exit: no*",
            "ERROR *::test_fixture - [[]rank 1] ValueError: not here",
        ]
    )


@slow
def test_skips_and_expected_failures_are_those_of_the_ranks(run: Any) -> None:
    result = run(
        HEADER
        + """
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
        ["SKIPPED*: [[]rank 0] nowhere", "SKIPPED*: [[]rank 1] not here", "FAILED * - [[]rank ?] [[]XPASS(strict)]*"]
    )


@slow
def test_what_earlier_tests_set_up_is_torn_down_before_the_next_module(run: Any, pytester: pytest.Pytester) -> None:
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
    pytester.makepyfile(test_other=module)
    run(module).assert_outcomes(passed=4)


@slow
@pytest.mark.usefixtures("_installed_plugins")
def test_xdist_and_warnings_as_errors_change_nothing(run: Any, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        HEADER + "\n@two\n@pytest.mark.parametrize('i', [1, 2])\ndef test_ok(modelprobe, i): dist.barrier()\n"
    )
    command = [sys.executable, "-W", "error", "-m", "pytest", "-n", "2", "-W", "error"]
    assert pytester.run(*command).ret == 0


@slow
def test_imports_do_not_count_as_time_of_the_test(run: Any) -> None:
    result = run(
        HEADER
        + """
if "RANK" in __import__("os").environ:
    time.sleep(5)
@pytest.mark.modelprobe(world_size=2, timeout=4)
def test_reduce(modelprobe): dist.all_reduce(torch.ones(1))
""",
    )
    result.assert_outcomes(passed=1)


@slow
def test_what_a_passing_test_started_is_ended_too(run: Any, pytester: pytest.Pytester) -> None:
    result = run(
        HEADER
        + """
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
def test_a_wrong_argument_is_an_error_of_the_test(run: Any, arguments: str, why: str) -> None:
    result = run(HEADER + f"\n@pytest.mark.modelprobe({arguments})\ndef test_it(modelprobe): pass\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"@pytest.mark.modelprobe {why}"])
