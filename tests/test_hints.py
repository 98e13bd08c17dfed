"""Hints: what a check says of a model that may be healthy. They are listed, and fail only where that is asked for."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from pytest_modelprobe import HintWarning, ModelProbe, checks
from pytest_modelprobe.checks.check import Check, check
from pytest_modelprobe.checks.outcome import Violation
from pytest_modelprobe.checks.session import PreparedModel

TEST = """
    import torch
    from torch import nn

    from pytest_modelprobe import checks
    from pytest_modelprobe.checks.check import check
    from pytest_modelprobe.checks.outcome import Violation

    @check
    def wide(prepared):
        return Violation(layer="(root)", line="(root) is wide", advice="Is it meant?", level="hint")

    def test_net(modelprobe):
        wide(modelprobe, nn.Linear(2, 3), torch.ones(1, 2))

    def test_other(modelprobe):
        modelprobe.run(nn.Linear(2, 3), torch.ones(1, 2))
"""


def wide(prepared: PreparedModel) -> Violation | str:
    return Violation(layer="(root)", line=f"{prepared.name} is wide", level="hint")


def test_a_hint_is_a_warning_and_its_outcome_is_returned() -> None:
    with pytest.warns(HintWarning, match=r"^wide: Linear is wide$"):
        outcome = check(wide)(ModelProbe(), nn.Linear(2, 3), torch.ones(1, 2))
    assert (outcome.verdict, outcome.layer, str(outcome)) == ("hint", "(root)", "Linear is wide")


def broken(prepared: PreparedModel) -> Violation | str:
    return Violation(layer="(root)", line=f"{prepared.name} is broken")


def test_standard_gives_hints_and_lists_them_after_what_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"wide": Check(wide), "finite": checks.finite, "broken": Check(broken)}
    monkeypatch.setattr(checks.battery, "STANDARD", found)
    given = (ModelProbe(), nn.Linear(2, 3), torch.ones(1, 2))
    with pytest.warns(HintWarning, match=r"^Linear is wide; 0 checks of 2 broken, 1 hint; 1 hold, 0 are not applic"):
        outcomes = checks.standard(*given, skip="broken")
    assert [hint.check for hint in outcomes.hints] == ["wide"]
    with pytest.raises(AssertionError) as caught:
        checks.standard(*given)
    first, *rest = str(caught.value).split("\n\n")
    assert first == "Linear is broken; 1 check of 3 broken, 1 hint; 1 hold, 0 are not applicable"
    assert rest == ["--- broken ---\nLinear is broken", "--- wide, a hint ---\nLinear is wide"]


@pytest.mark.usefixtures("_plugin_alone")
def test_a_hint_is_in_the_terminal_and_the_reports_and_fails_where_that_is_asked_for(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(TEST)
    pytester.makeini("[pytest]\nfilterwarnings =\n  error\n  ignore:Module already imported")
    quiet = ("-p", "no:cacheprovider")
    result = pytester.runpytest(*quiet, "--modelprobe-json=r.json", "--modelprobe-html=r.html")
    result.assert_outcomes(passed=2, warnings=1)
    result.stdout.fnmatch_lines(["*test_net", "*HintWarning: wide: (root) is wide"])
    tests = json.loads((pytester.path / "r.json").read_text("utf-8"))["tests"]
    assert [test.get("hints", []) for test in tests] == [["wide: (root) is wide\n\nIs it meant?"], []]
    assert "wide: (root) is wide" in (pytester.path / "r.html").read_text("utf-8")
    result = pytester.runpytest(*quiet, "--modelprobe-strict")
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["E *HintWarning: wide: (root) is wide"])
    pytester.makeini("[pytest]\nmodelprobe_strict = true")
    pytester.runpytest(*quiet).assert_outcomes(failed=1, passed=1)
