"""Writes docs/explanation/bugs-and-what-shows-them.md from tests/checks/bugs.py.

Run it with ``python docs/make_bugs_table.py`` after a change there.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "explanation" / "bugs-and-what-shows-them.md"
TABLE = Path(__file__).parents[1] / "tests" / "checks" / "bugs.py"

HEAD = """\
# Bugs, and what shows them

Made by `docs/make_bugs_table.py` from `tests/checks/bugs.py`. Each row is a kind of bug that public models had. Most of
them break a property: a check or an assertion names them without a correct model to compare with. The others turn one
sound model into a different sound model: a snapshot shows those. The kill matrix (`evidence/kill_matrix`) plants them
under the title given here.
"""


def page(families: dict[str, list[Any]]) -> str:
    """Return the page."""
    bugs = [bug for family in families.values() for bug in family]
    shown = [bug for bug in bugs if bug.by]
    alone = [bug for bug in shown if bug.where != "kill matrix"]
    by_snapshot, missed = len(shown) - len(alone), len(bugs) - len(shown)
    counts = f"{len(alone)} are shown without another model, {by_snapshot} by a snapshot, and {missed} are not shown"
    parts = [HEAD, f"Of these {len(bugs)} bugs, {counts}.", ""]
    for family, rows in families.items():
        parts += [f"## {family}\n", "| | bug | shown by | test |", "|---|---|---|---|"]
        parts += [_row(bug) for bug in rows if bug.by]
        parts.append("")
    parts += ["## Not shown\n", "| | bug | why |", "|---|---|---|"]
    parts += [f"| {bug.row} | {bug.fault} | {bug.why} |" for bug in bugs if not bug.by]
    return "\n".join(parts) + "\n"


def _row(bug: Any) -> str:
    test = f"kill matrix: {bug.test}" if bug.where == "kill matrix" else f"`{bug.where}`: `{bug.test}`"
    return f"| {bug.row} | {bug.fault} | `{bug.by}` | {test} |"


if __name__ == "__main__":
    PAGE.write_text(page(runpy.run_path(str(TABLE))["FAMILIES"]), "utf-8")
