"""What GitHub Actions shows of models that differ, so that a reviewer need not read the log of the job.

Annotations stand at the class of the layer with the first cause, beside the line that made the change. The summary of
the job says what was compared with another side.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

Results = Sequence[dict[str, Any]]
Base = Callable[[], tuple[dict[str, Any] | None, dict[str, list[dict[str, Any]]]]]


class Annotations:
    """A plugin that prints the annotations when all tests have run. Workers of xdist print none.

    Args:
        results: Returns the comparisons of all tests.
        base: Returns what was compared with another side, as `Sides.results`. None if there is no other side.
    """

    def __init__(self, results: Callable[[], Results], base: Base | None = None) -> None:
        self._results = results
        self._base = base

    @staticmethod
    def is_wanted(config: pytest.Config) -> bool:
        """Whether this is a job of GitHub Actions."""
        return os.environ.get("GITHUB_ACTIONS") == "true" and not hasattr(config, "workerinput")

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print an annotation for each model that differs, if the class of a cause is known, and write the summary."""
        whole, pairs = (None, {}) if self._base is None else self._base()
        found = [{**pair, "test": test} for test, of_test in pairs.items() for pair in of_test]
        unequal = [result for result in (*self._results(), *found) if result["verdict"] == "changed"]
        located = [(result, source) for result in unequal if (source := _source(result)) is not None]
        if located:
            from pytest_modelprobe.report.github import MOST_ANNOTATIONS, command

            for result, source in located[:MOST_ANNOTATIONS]:
                title = f"modelprobe: {result['model']} changed"
                said = f"{result['test']}: {result['first_line']}"
                text = command("error", said, file=source["file"], line=source["line"], title=title)
                terminalreporter.write_line(text)
        path = os.environ.get("GITHUB_STEP_SUMMARY")
        if whole is not None and path:
            from pytest_modelprobe.report.github import write_summary
            from pytest_modelprobe.report.markdown import beside

            write_summary(Path(path), beside(whole, pairs))


def _source(result: dict[str, Any]) -> dict[str, Any] | None:
    """Return file and line of the first cause that has them."""
    return next((cause["source"] for cause in result["causes"] if cause["source"] is not None), None)
