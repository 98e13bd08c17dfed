"""The table of bugs names what there is."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import pytest_modelprobe
from pytest_modelprobe import checks

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "explanation" / "what-it-does-not-see.md"


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


def test_the_documentation_has_the_counts(bugs: list[Any]) -> None:
    shown = [bug for bug in bugs if bug.by]
    alone = [bug for bug in shown if bug.where != "kill matrix"]
    counts = [len(bugs), len(alone), len(shown) - len(alone), len(bugs) - len(shown)]
    (sentence,) = re.findall(r"^Of \d+ kinds of bugs.*?\.$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert [int(count) for count in re.findall(r"\d+", sentence)] == counts
