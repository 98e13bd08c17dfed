"""A file of tests for a model that was scanned, to be edited."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pytest_modelprobe.checks import Outcome

from .inputs import Input
from .scanning import ScannedModel, applicable_assertions


def as_test_file(scanned: ScannedModel, outcomes: Sequence[Outcome]) -> str:
    """Return a file of tests: assertions, a snapshot, and the standard checks.

    What fails is expected to fail there, with what was said of it: the file passes, and lists what is left to do.
    """
    target, inputs = scanned.target, scanned.inputs
    loss = ', loss="random"' if scanned.record.backwards else ""
    assertions = applicable_assertions(scanned.record)
    failed = "; ".join(scanned.findings()) if scanned.failed_assertions() else ""
    expected = f"@pytest.mark.xfail(reason={_quoted(failed)}, strict=True)\n" if failed else ""
    names = ", ".join(sorted([*assertions, "checks"]))
    broken = {outcome.check: outcome.text.partition("\n")[0] for outcome in outcomes if outcome.verdict == "broken"}
    xfail = "".join(f"\n        {_quoted(check)}: {_quoted(line)}," for check, line in broken.items())
    given = "**inputs(modelprobe)" if _are_named(inputs) else "*inputs(modelprobe)"
    is_called_alone = target.expression == f"{target.attribute}()"
    factory = target.attribute if is_called_alone else "make_model"
    wrapper = "" if is_called_alone else f"def make_model():\n    return {target.expression}\n\n\n"
    return f'''"""Tests of {target.name}."""

{"import pytest" + chr(10) * 2 if failed else ""}from {target.module} import {target.attribute}
from pytest_modelprobe import {names}


{wrapper}def inputs(modelprobe):
{_returned(inputs)}


{expected}def test_layers(modelprobe):
    record = modelprobe.run(modelprobe.build({factory}), {given}{loss})
{"".join(f"    {assertion}(record)" + chr(10) for assertion in assertions)}

def test_snapshot(modelprobe, modelprobe_snapshot):
    model = modelprobe.build({factory}).eval()
    assert modelprobe.run(model, {given}{loss}) == modelprobe_snapshot


CASE = checks.Case(
    name={_quoted(target.attribute)},
    factory={factory},
    inputs=inputs,
    xfail={{{xfail}{chr(10) + "    " if xfail else ""}}},
)


@checks.parametrize_with_checks([CASE])
def test_standard(modelprobe, check):
    check(modelprobe)
'''


def _returned(inputs: Sequence[Input]) -> str:
    tensors = [(one.name, one.code(position)) for position, one in enumerate(inputs)]
    if not inputs:
        return "    return ()"
    opening, closing = ("{", "}") if _are_named(inputs) else ("(", ")")
    lines = "".join(f"        {f'{_quoted(name)}: ' if name else ''}{code},\n" for name, code in tensors)
    return f"    return {opening}\n{lines}    {closing}"


def _are_named(inputs: Sequence[Input]) -> bool:
    return bool(inputs) and inputs[0].name is not None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
