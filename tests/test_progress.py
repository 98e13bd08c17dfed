import contextlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pytest_modelprobe.plugin.terminal import ProgressLine
from pytest_modelprobe.progress import listening, progress


def test_nobody_is_told_of_work_outside_a_test() -> None:
    with progress("steps", 2) as each:
        assert list(each("ab")) == ["a", "b"]


def test_the_line_is_empty_after_an_error() -> None:
    told: list[str] = []
    with listening(told.append):
        try:
            with progress("check", 2), progress("step", 3) as each:
                for _ in each(range(3)):
                    raise ValueError
        except ValueError:
            pass
    assert told == ["check 0 of 2", "check 0 of 2, step 0 of 3", "check 0 of 2", ""]


def test_other_threads_tell_nothing() -> None:
    told: list[str] = []

    def work() -> None:
        with progress("steps", 1) as each:
            list(each("a"))

    with listening(told.append):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert told == []


def test_a_listener_within_another_has_the_work_to_itself() -> None:
    outer: list[str] = []
    inner: list[str] = []
    with listening(outer.append), progress("outer"), listening(inner.append), progress("inner"):
        pass
    assert (outer, inner) == (["outer", ""], ["inner", ""])


# --- the line in the terminal -----------------------------------------------------------------------------------------

TEST = """
    import contextlib, io
    from pytest_modelprobe.progress import progress

    def test_work():
        print("printed before")
        with contextlib.redirect_stdout(io.StringIO()) as redirected, progress("step", 3) as each:
            for _ in each(range(3)):
                print("x")
        print("printed after")
        assert redirected.getvalue() == "xxx".replace("x", "x\\n")
"""

# Some seconds pass between two questions for the time.
CLOCK = """
    import itertools, pytest

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(session):
        line = session.config.pluginmanager.getplugin("modelprobe-progress")
        if line:
            line.clock = itertools.count(0, {seconds}).__next__
"""


@pytest.fixture
def slow(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    pytester.makeconftest(CLOCK.format(seconds=20))
    pytester.makepyfile(TEST)
    return pytester


def test_without_a_terminal_there_is_a_line_every_thirty_seconds(slow: pytest.Pytester) -> None:
    result = slow.runpytest()
    result.assert_outcomes(passed=1)
    lines = [line for line in result.outlines if line.startswith("modelprobe: ")]
    assert lines == ["modelprobe: step 2 of 3, 40 s"]


@pytest.mark.parametrize("option", ["-q", "-s", "--capture=tee-sys"])
def test_nothing_is_written_between_what_tests_print(slow: pytest.Pytester, option: str) -> None:
    result = slow.runpytest(option)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*modelprobe: step*")


def test_a_worker_of_xdist_shows_nothing(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytestconfig.option, "capture", "fd")
    monkeypatch.setattr(pytestconfig.option, "verbose", 0)
    monkeypatch.delattr(pytestconfig, "workerinput", raising=False)
    assert ProgressLine.is_wanted(pytestconfig)
    monkeypatch.setattr(pytestconfig, "workerinput", {}, raising=False)
    assert not ProgressLine.is_wanted(pytestconfig)


@pytest.mark.parametrize("plugin", ["no:terminal", "no:capture"])
def test_tests_run_without_the_plugins_of_the_terminal(slow: pytest.Pytester, plugin: str) -> None:
    assert slow.runpytest("-p", plugin).ret == 0


def test_what_a_test_prints_is_captured_as_before(slow: pytest.Pytester) -> None:
    result = slow.runpytest("-rP")
    result.stdout.fnmatch_lines(["*Captured stdout call*", "printed before", "printed after"], consecutive=True)


def in_a_terminal(folder: Path, *arguments: str) -> str:
    """Return what pytest writes to a terminal."""
    pty = pytest.importorskip("pty")
    ours, terminal = pty.openpty()
    command = [sys.executable, "-m", "pytest", *arguments]
    process = subprocess.Popen(command, cwd=folder, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    written = b""
    with contextlib.suppress(OSError):  # the end, on Linux
        while more := os.read(ours, 4096):
            written += more
    process.wait()
    os.close(ours)
    return written.decode()


def test_in_a_terminal_the_line_is_rewritten_and_erased(slow: pytest.Pytester) -> None:
    slow.makeconftest(CLOCK.format(seconds=2))
    written = in_a_terminal(slow.path, "-p", "no:cacheprovider", "--color=no")
    before, *shown = re.split(r"\r(?=modelprobe: )", written)
    assert [text.partition(" s ")[0] for text in shown] == ["modelprobe: step 2 of 3, 4", "modelprobe: step 3 of 3, 6"]
    assert before.endswith("\n")
    assert re.search(r" s +\r\r {79}\r\.", shown[-1]), repr(shown[-1])
    assert "1 passed" in shown[-1]
