"""What the reports of a run say of the other side: `--modelprobe-base` with `--modelprobe-json` and the rest."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from pytest_modelprobe.report import html, markdown
from pytest_modelprobe.report.results import Results, Source

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(8, eps=1e-5), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.norm(x))
"""
TESTS = """
import torch
from a_net import Net

def test_net(modelprobe):
    modelprobe.run(modelprobe.build(Net).eval(), modelprobe.randn(4, 8), loss="random")

def test_linear(modelprobe):
    modelprobe.run(modelprobe.build(lambda: torch.nn.Linear(8, 2)), modelprobe.randn(4, 8))
"""


def git(*arguments: str) -> None:
    user = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *user, *arguments], check=True, capture_output=True)


@pytest.fixture
def beside(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, _forked: None) -> Any:
    """Commit the network, change it, and return what runs the tests beside the commit."""
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=os.pathsep)
    pytester.makepyfile(a_net=NET, test_a=TESTS)
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one")

    def beside(net: str, *options: str) -> tuple[pytest.RunResult, Results]:
        pytester.makepyfile(a_net=net)
        result = pytester.runpytest_inprocess(
            "--modelprobe-base=main", "--modelprobe-base-all", "--modelprobe-json=r.json", *options
        )
        results = json.loads((pytester.path / "r.json").read_text())
        return result, Results.from_dict(results)

    return beside


def test_a_changed_model_is_in_every_report_although_its_test_passed(
    beside: Any, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    result, results = beside(NET.replace("1e-5", "1e-4"))
    base = results.base
    assert base is not None
    assert (base.ref, base.python, base.stopped, len(base.commit or "")) == ("main", None, None, 40)
    assert (base.verdicts, base.only_here, base.only_there) == ({"changed": 1, "unchanged": 1}, (), ())
    tests = {test.id: test for test in results.tests}
    assert {test.outcome for test in tests.values()} == {"passed"}
    (pair,) = tests["test_a.py::test_net"].base
    assert (pair.record, pair.verdict, pair.first) == ("run 1", "changed", "norm")
    assert pair.first_line.startswith("norm.eps 1e-05 → 0.0001")
    assert [cause.layer for cause in pair.causes] == ["norm"]
    assert "torch.load" not in pair.text
    assert [pair.verdict for pair in tests["test_a.py::test_linear"].base] == ["unchanged"]
    page = html.render(results)
    assert page.count("norm.eps 1e-05 → 0.0001") > 1
    assert "Beside main (" in page
    verdict = "1 of 2 models changed beside main, for 1 cause. No test failed: 2 tests."
    assert verdict in page
    assert base.said == "2 tests ran 2 models of 2 classes: 1 changed, 1 the same"
    result.stdout.fnmatch_lines(
        [
            "2 tests ran 2 models of 2 classes: 1 changed, 1 the same",
            "::warning file=a_net.py,line=7,title=modelprobe%3A Net changed::test_a.py::test_net: *",
            "*2 passed, 1 model changed in *",
        ]
    )
    summary = (pytester.path / "summary.md").read_text("utf-8")
    head, said, block = summary.split("\n\n", 2)
    assert head == f"### modelprobe: beside main ({(base.commit or '')[:10]})"
    assert said == base.said
    first, text = pair.first_line, pair.text
    name = "test&#95;a.py::test&#95;net, run 1"
    assert block.strip() == f"<details><summary>{name}: {first}</summary>\n\n```\n{text}\n```\n\n</details>"
    report = markdown.render(results)
    assert report.startswith(f"### modelprobe: {verdict.replace(', for 1 cause', '')}\n\n{said}\n\n<details>")
    assert report.rstrip().endswith(block.strip())


def test_under_xdist_the_controller_writes_the_same(beside: Any) -> None:
    pytest.importorskip("xdist")
    _, results = beside(NET.replace("1e-5", "1e-4"), "-n", "1")
    assert results.base is not None
    assert results.base.verdicts == {"changed": 1, "unchanged": 1}
    pairs = [pair for test in results.tests for pair in test.base]
    assert len(pairs) == 2
    # The process that writes imported no model.
    assert [cause.source for pair in pairs for cause in pair.causes] == [Source(file="a_net.py", line=4)]


def test_without_a_base_the_results_say_so(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import torch\ndef test_a(modelprobe): modelprobe.run(torch.nn.Linear(2, 2), torch.ones(1, 2))")
    pytester.runpytest("--modelprobe-json=r.json").assert_outcomes(passed=1)
    results = json.loads((pytester.path / "r.json").read_text())
    assert "base" not in results
    assert "base" not in results["tests"][0]


def test_nothing_that_was_compared_has_its_reason(beside: Any) -> None:
    result, results = beside(NET, "-k", "nothing")
    assert result.ret != 0
    assert results.base is not None
    assert results.base.stopped == "nothing was compared: no test passed"
    page = html.render(results)
    assert "nothing was compared: no test passed" in page
    assert "No model was compared with main. No test used a probe." in page
    assert markdown.render(results).startswith("### modelprobe: No model was compared with main. No test")
