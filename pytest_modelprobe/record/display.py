"""The one way from a record up to `report`, which makes pages of records.

A record has methods that show it as a page, and pages are made by `report`, which stands on a higher floor. It is
imported when a page is asked for, and nothing else in this folder imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .record import Record


def page(record: Record) -> str:
    """Return the page of a record, see `Record.to_html`."""
    from pytest_modelprobe.report.html import render_run
    from pytest_modelprobe.report.results import run_data

    return render_run(run_data(record))


def show(record: Record) -> None:
    """Display a record, see `Record.show`."""
    from pytest_modelprobe.report.html import display

    display(record)
