"""What the tests of ranks share: one fork server for all runs, and how a run of pytest is started."""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.popen_forkserver  # noqa: F401
import textwrap
from collections.abc import Callable

import pytest

# pytester forgets what its runs import.
import pytest_modelprobe.extras.ranks.processes
import pytest_modelprobe.probe  # noqa: F401


@pytest.fixture
def run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, _plugin_alone: None, _forked: None
) -> Callable[..., pytest.RunResult]:
    """Writes tests to a file and runs them."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("RANKS", "2")

    def run(tests: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(textwrap.dedent(tests))
        return pytester.runpytest("-p", "no:randomly", "-p", "no:cacheprovider", *options)

    return run
