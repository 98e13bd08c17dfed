"""What the probes of a test found, as properties of the test in JUnit XML and the like, and as a table in pytest-html.

These are files that a team has already, so their readers see dead layers and changed snapshots without another report.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_modelprobe.record import Record

_ASKED_BY = ("xmlpath", "htmlpath", "report_log", "json_report")
"""Options of pytest, pytest-html, pytest-reportlog and pytest-json-report."""

_VERDICTS = ("unreadable", "changed", "new", "not compared", "updated", "created", "same")
"""Verdicts on snapshots, the worst first. The worst one in a test is its property."""


def is_asked(config: pytest.Config) -> bool:
    """Whether a report is written that shows properties of tests."""
    return any(config.getoption(option, None) for option in _ASKED_BY)


def of_record(record: Record) -> dict[str, Any]:
    """Return the number of dead layers, and the name of the worst layer, which is empty if no layer is bad."""
    from pytest_modelprobe.assertions.activations import find_dead, find_nonfinite
    from pytest_modelprobe.text import printable

    if not record.forwards:
        return {"dead": 0, "worst_layer": ""}
    dead, origin = find_dead(record, record.layers), find_nonfinite(record, record.layers)
    worst = [origin.step.name] if origin is not None else [one.step.name for one in dead]
    return {"dead": len({one.step.layer.name for one in dead}), "worst_layer": printable(worst[0]) if worst else ""}


class Properties:
    """A plugin that adds the properties to the reports of tests. It is registered only if they are asked for."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Add the properties, after the results were put on the report of the teardown."""
        report = yield
        runs = getattr(report, "modelprobe", [])
        snapshots = getattr(report, "modelprobe_snapshots", [])
        if runs or snapshots:
            report.user_properties += _properties(runs, snapshots)
            if item.config.pluginmanager.hasplugin("html"):
                extra = importlib.import_module("pytest_html.extras").html(_table(runs, snapshots))
                report.extras = [*getattr(report, "extras", []), extra]
        return report


def _properties(runs: list[dict[str, Any]], snapshots: list[dict[str, Any]]) -> Iterator[tuple[str, str | int]]:
    if runs:
        yield "modelprobe.layers", sum(run["layers"] for run in runs)
        yield "modelprobe.dead", sum(run.get("dead", 0) for run in runs)
    causes = [cause["layer"] for snapshot in snapshots for cause in snapshot["causes"]]
    worst = [*causes, *filter(None, (run.get("worst_layer") for run in runs))]
    if worst:
        from pytest_modelprobe.text import printable

        yield "modelprobe.worst_layer", printable(worst[0])
    if snapshots:
        yield "modelprobe.snapshot", min((snapshot["verdict"] for snapshot in snapshots), key=_VERDICTS.index)


def _table(runs: list[dict[str, Any]], snapshots: list[dict[str, Any]]) -> str:
    """Return a small table in HTML: a row for each run and each snapshot."""
    from pytest_modelprobe.text import count, html_escaped

    rows = []
    for run in runs:
        seen = f"{count(run['layers'], 'layer')}, {count(run['calls'], 'call')}"
        rows.append((run["name"], seen, f"{run['dead']:,} dead" if run["dead"] else ""))
    rows += [(snapshot["snapshot"], snapshot["verdict"], snapshot["first_line"]) for snapshot in snapshots]
    lines = ("".join(f"<td>{html_escaped(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table class="modelprobe"><caption>modelprobe</caption>{body}</table>'
