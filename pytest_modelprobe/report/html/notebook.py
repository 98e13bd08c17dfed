"""The page of a record in a notebook."""

from __future__ import annotations

import html
import sys

from pytest_modelprobe.record import Record

_FRAME = (
    '<div><iframe sandbox="allow-scripts" style="width: 100%; height: 40rem; border: 0" srcdoc="{}"></iframe></div>'
)
"""A page in a frame: its style sheet and those of the notebook do not reach each other. The ``div`` is there because
IPython warns of a bare frame."""


def display(record: Record) -> None:
    """Display the page of a record in a notebook; elsewhere, print the record."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if ipython is not None and hasattr(shell, "kernel"):
        ipython.display.display(ipython.display.HTML(_FRAME.format(html.escape(record.to_html()))))
    else:
        print(record)
