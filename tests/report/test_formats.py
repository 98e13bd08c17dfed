import json
from dataclasses import replace
from typing import Any

import pytest

from pytest_modelprobe.record import Record
from pytest_modelprobe.report.formats import renderer
from pytest_modelprobe.report.issues import issues
from pytest_modelprobe.report.results import (
    Base,
    CaseResult,
    PairResult,
    Results,
    Run,
    ShownCause,
    SnapshotResult,
    Source,
)


def cause(layer: str = "fc", **given: Any) -> ShownCause:
    return ShownCause(**{"kind": "weights", "layer": layer, "said": f"{layer}: weights changed by 3 %", **given})


def snapshot(verdict: str = "changed", *causes: ShownCause) -> SnapshotResult:
    return SnapshotResult(snapshot="a.arch.json", verdict=verdict, first_line="test_a: it changed", causes=causes)


def case(**given: Any) -> Results:
    """Return the results of a run of one test."""
    test = {"id": "tests/test_net.py::test_a", "file": "tests/test_net.py", "line": 7, "outcome": "failed"}
    tests = (CaseResult(**{**test, "message": "it failed", **given}),)
    return Results(tests=tests, versions={"pytest-modelprobe": "1.0"})


def test_a_cause_is_at_the_class_of_its_layer_else_at_the_test() -> None:
    known = cause(source=Source(file="src/net.py", line=12))
    found = issues(case(snapshots=(snapshot("changed", known, cause("head")),)))
    assert [(i.file, i.line, i.message) for i in found] == [
        ("src/net.py", 12, "fc: weights changed by 3 %"),
        ("tests/test_net.py", 7, "head: weights changed by 3 %"),
    ]


def test_a_snapshot_without_causes_is_one_error() -> None:
    (found,) = issues(case(snapshots=(snapshot("new"),)))
    assert (found.rule, found.level, found.message) == ("snapshot", "error", "test_a: it changed")


def test_a_failed_assertion_is_an_error_at_its_test() -> None:
    (found,) = issues(case(message="relu is dead"))
    assert (found.rule, found.message, found.line) == ("test", "relu is dead", 7)


def test_findings_of_a_test_that_passed_are_warnings() -> None:
    run = Run(name="Net", record=Record(model="Net"), findings=("not finite: fc output, 3 NaN",))
    (found,) = issues(case(outcome="passed", runs=(run,)))
    assert (found.rule, found.level) == ("finding/not-finite", "warning")
    assert found.message == "Net: not finite: fc output, 3 NaN"


def test_equal_snapshots_and_skipped_tests_are_no_issues() -> None:
    assert issues(case(outcome="passed", snapshots=(snapshot("same"),))) == []
    assert issues(case(outcome="skipped")) == []


def test_an_issue_is_recognized_in_the_next_run_and_two_are_told_apart() -> None:
    def identities(by: str) -> list[str]:
        causes = [cause(said=f"fc: weights changed by {by}"), cause(), cause("head")]
        return [issue.identity for issue in issues(case(snapshots=(snapshot("changed", *causes),)))]

    assert identities("3 %") == identities("4 %")
    assert len(set(identities("3 %"))) == 3


def test_sarif_has_what_its_schema_requires() -> None:
    log = json.loads(renderer("sarif")(case(file="tests/test net.py")))
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    assert run["tool"]["driver"] == {"name": "pytest-modelprobe", "version": "1.0", "rules": [{"id": "test"}]}
    (result,) = run["results"]
    assert result["message"] == {"text": "tests/test_net.py::test_a: it failed"}
    assert result["level"] == "error"
    assert result["ruleIndex"] == 0
    assert result["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "tests/test%20net.py", "uriBaseId": "SRCROOT"},
        "region": {"startLine": 7},
    }


def test_gitlab_gets_path_line_and_fingerprint() -> None:
    (found,) = json.loads(renderer("gitlab")(case()))
    assert len(found.pop("fingerprint")) == 64
    assert found == {
        "description": "tests/test_net.py::test_a: it failed",
        "check_name": "modelprobe/test",
        "severity": "major",
        "location": {"path": "tests/test_net.py", "lines": {"begin": 7}},
    }


@pytest.mark.parametrize("name", ["gitlab", "sarif"])
def test_results_without_tests_make_an_empty_report(name: str) -> None:
    assert "test" not in json.dumps(json.loads(renderer(name)(Results(tests=())))).replace("pytest", "")


BASE = Base(
    ref="main", commit="0123456789abcdef", python=None, versions={"torch": ("2", "1")},
    said="3 models: 2 unchanged, 1 changed", verdicts={"unchanged": 2, "changed": 1},
    failed={"test_b.py": "no module a|b"},
)  # fmt: skip


def test_markdown_says_what_failed_and_folds_what_changed() -> None:
    pair = PairResult(record="run 1", verdict="changed", first_line="fc: `x`", text="fc: `x`\n\n``` <b>\n| a |")
    test = replace(case().tests[0], base=(pair, PairResult(record="run 2", verdict="unchanged")))
    said = renderer("markdown")(Results(tests=(test,), base=BASE, stopped="-x"))
    assert (
        said
        == """### modelprobe: 1 of 1 test failed, and 1 of 3 models changed beside main.

Not every test ran to its end: -x

| failed test | message |
|---|---|
| tests/test&#95;net.py::test&#95;a | it failed |

3 models: 2 unchanged, 1 changed

| package | here | there |
|---|---|---|
| torch | 2 | 1 |

| did not run there | why |
|---|---|
| test&#95;b.py | no module a&#124;b |

<details><summary>tests/test&#95;net.py::test&#95;a, run 1: fc: &#96;x&#96;</summary>

````
fc: `x`

``` <b>
| a |
````

</details>
"""
    )


def test_markdown_that_is_too_long_says_how_much_is_left_out() -> None:
    pair = PairResult(record="run 1", verdict="changed", first_line="fc", text="x\n" * 150_000)
    said = renderer("markdown")(Results(tests=(replace(case().tests[0], base=(pair,) * 5),), base=BASE))
    assert len(said) < 1_000_000
    assert said.endswith("</details>\n\n3 texts more do not fit here: run the same command locally.\n")
