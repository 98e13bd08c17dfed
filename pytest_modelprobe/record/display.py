"""The one way from a record up to `report`, which makes pages of records.

`report` is imported when a page is asked for. Nothing else in this folder imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .record import Record


def page(record: Record) -> str:
    """See `Record.to_html`."""
    from pytest_modelprobe.report.html import render_run
    from pytest_modelprobe.report.results import run_data

    return render_run(run_data(record))


def show(record: Record) -> None:
    """See `Record.show`."""
    from pytest_modelprobe.report.html import display

    display(record)
