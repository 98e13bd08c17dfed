"""`modelprobe report`: the results of a run of pytest, written by ``--modelprobe-json``, in another format."""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.report import html, markdown
from pytest_modelprobe.report.results import SCHEMA, Results, write_text
from pytest_modelprobe.text import printable

from .common import SAME

ENDINGS = {"html": ".html", "markdown": ".md"}
"""Each format, and how the name of its file ends where none is given."""


def run_report(options: argparse.Namespace) -> int:
    """Write the report, beside the results if no other place is named."""
    path = Path(options.results)
    output = Path(options.output) if options.output else path.with_name(path.stem + ENDINGS[options.format])
    try:
        results = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}") from error
    found = results.get("schema") if isinstance(results, dict) else None
    if found != SCHEMA:
        raise UsageError(
            f"{path} has schema {found!r}, and this version reads {SCHEMA}: write it with pytest "
            "--modelprobe-json=PATH of the same version"
        )
    try:
        render = html.render if options.format == "html" else markdown.render
        text = render(Results.from_dict(results))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        why = textwrap.shorten(repr(error), 300)
        raise UsageError(f"{path} is not what pytest --modelprobe-json=PATH writes: {why}") from error
    write_text(output, text)
    if not options.output:
        print(printable(f"Wrote {output}"))
    return SAME
