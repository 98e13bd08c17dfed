"""The page of bugs: it names what there is, and is up to date."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest

import pytest_modelprobe
from pytest_modelprobe import checks

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MADE = ROOT / "docs" / "make_bugs_table.py"


@pytest.fixture(scope="module")
def families() -> Any:
    return runpy.run_path(str(HERE / "bugs.py"))["FAMILIES"]


@pytest.fixture(scope="module")
def bugs(families: Any) -> list[Any]:
    return [bug for family in families.values() for bug in family]


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)}


def test_each_bug_is_shown_by_a_test_that_exists(bugs: list[Any]) -> None:
    tests = [bug for bug in bugs if bug.by and bug.where != "kill matrix"]
    assert [bug for bug in tests if bug.test not in functions(ROOT / "tests" / bug.where)] == []


def test_each_bug_of_a_snapshot_is_planted_in_the_kill_matrix(bugs: list[Any]) -> None:
    planted = (ROOT / "evidence" / "kill_matrix" / "faults.py").read_text("utf-8")
    assert [bug for bug in bugs if bug.where == "kill matrix" and f'"{bug.row}", "{bug.test}"' not in planted] == []


def test_what_shows_a_bug_is_public(bugs: list[Any]) -> None:
    public = {*pytest_modelprobe.__all__, *(f"checks.{name}" for name in checks.__all__), "modelprobe_snapshot"}
    assert [bug.by for bug in bugs if bug.by and bug.by not in public] == []


def test_a_bug_that_nothing_shows_has_a_reason(bugs: list[Any]) -> None:
    assert all(bool(bug.by) != bool(bug.why) for bug in bugs)


def test_each_bug_is_listed_once(bugs: list[Any]) -> None:
    rows = [bug.row for bug in bugs]
    assert rows == sorted(set(rows))


def test_the_page_is_up_to_date(families: Any) -> None:
    make = runpy.run_path(str(MADE))
    assert make["PAGE"].read_text("utf-8") == make["page"](families)
