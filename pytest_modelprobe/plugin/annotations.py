"""Annotations of GitHub Actions for models that differ, at the class of the layer with the first cause.

A reviewer sees the change beside the line that made it, and not only in the log of the job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
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
        """Print an annotation for each model that differs, if the class of a cause is known."""
        _, pairs = ({}, {}) if self._base is None else self._base()
        beside = [{**pair, "test": test} for test, found in pairs.items() for pair in found]
        unequal = [result for result in (*self._results(), *beside) if result["verdict"] == "changed"]
        located = [(result, source) for result in unequal if (source := _source(result)) is not None]
        if not located:
            return
        from pytest_modelprobe.report.github import MOST_ANNOTATIONS, command

        for result, source in located[:MOST_ANNOTATIONS]:
            title = f"modelprobe: {result['model']} changed"
            said = f"{result['test']}: {result['first_line']}"
            terminalreporter.write_line(command("error", said, file=source["file"], line=source["line"], title=title))


def _source(result: dict[str, Any]) -> dict[str, Any] | None:
    """Return file and line of the first cause that has them."""
    return next((cause["source"] for cause in result["causes"] if cause["source"] is not None), None)
