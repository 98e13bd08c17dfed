"""The page of bugs names tests and faults that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "evidence" / "KINDS_OF_BUGS.md").read_text("utf-8")
DOCUMENTATION = (ROOT / "docs" / "explanation" / "what-it-does-not-see.md").read_text("utf-8")


def test_each_bug_is_shown_by_what_there_is_or_said_not_to_be() -> None:
    rows = [line.strip("| ").split(" | ") for line in re.findall(r"^\| [BC]\d.*$", PAGE, re.MULTILINE)]
    tests = [where.strip("`").split("::") for *_, where in rows if "::" in where]
    assert [name for path, name in tests if f"def {name}(" not in (ROOT / path).read_text("utf-8")] == []
    faults = (ROOT / "evidence" / "kill_matrix" / "faults.py").read_text("utf-8")
    planted = [(row, where.removeprefix("kill matrix: ")) for row, _, _, where in rows if where.startswith("kill")]
    assert [row for row, title in planted if f'"{row}", "{title}"' not in faults] == []
    nothing = [row for row, _, by, _ in rows if by == "nothing"]
    (sentence,) = re.findall(r"^Of \d+ kinds of bugs.*?\.$", DOCUMENTATION, re.MULTILINE | re.DOTALL)
    assert [int(n) for n in re.findall(r"\d+", sentence)] == [len(rows), len(tests), len(planted), len(nothing)]
