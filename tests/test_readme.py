"""What the README shows is true: its tests pass or fail as it says, with the text that it prints."""

from __future__ import annotations

import doctest
import importlib.metadata
import re
from itertools import zip_longest
from math import isclose
from pathlib import Path

import pytest

import pytest_modelprobe


def readme() -> str:
    """Return the README: of the checkout, else as the installed package carries it."""
    checkout = Path(__file__).parent.parent / "README.md"
    if checkout.is_file():
        return checkout.read_text("utf-8")
    return str(importlib.metadata.metadata("pytest-modelprobe").get_payload())


BLOCKS = re.findall(r"```(\w+)[ ]?(\w*)\n(.*?)```", readme(), flags=re.DOTALL)
TESTS = [
    (how, code, BLOCKS[i + 1][2] if i + 1 < len(BLOCKS) and BLOCKS[i + 1][0] == "text" else "")
    for i, (language, how, code) in enumerate(BLOCKS)
    if language == "python"
]


def names(code: str) -> str:
    return re.findall(r"def (test_\w+)", code)[0]


@pytest.mark.usefixtures("_plugin_alone")
@pytest.mark.parametrize(("how", "code", "text"), TESTS, ids=[names(code) for _, code, _ in TESTS])
def test_a_block_does_what_it_says(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, how: str, code: str, text: str
) -> None:
    monkeypatch.delenv("CI", raising=False)  # where snapshots are not written
    pytester.makepyfile(test_model=code)
    if how == "creates":  # the snapshot; the text is what a change of one epsilon gives
        pytester.runpytest("-p", "no:randomly", "--snapshot-update").assert_outcomes(passed=1)
        line = "    assert modelprobe.run("
        pytester.makepyfile(test_model=code.replace(line, f"    model[2].norm1.eps = 1e-4\n{line}"))
    result = pytester.runpytest("-p", "no:randomly", "-p", "no:cacheprovider", "--modelprobe-verbose", "-vv")
    result.assert_outcomes(passed=how == "passes", failed=how != "passes")
    assert how in ("passes", "fails", "creates")
    shown = [line.removeprefix("E       ") for line in result.outlines]
    for line in filter(str.strip, text.splitlines()):
        assert any(same(line, other) for other in shown), line


def same(a: str, b: str) -> bool:
    """Whether two lines say the same; the last digits of numbers belong to the machine, and noise does altogether."""
    pairs = list(zip_longest(a.split(), b.split(), fillvalue=""))
    after = [*(y for _, y in pairs[1:]), ""]
    return all(
        x == y or (is_number(x) and is_number(y) and isclose(float(x), float(y), rel_tol=2 if then == "x" else 0.01))
        for (x, y), then in zip(pairs, after, strict=True)
    )


def is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d*\.?\d+(e-?\d+)?", text) is not None


def test_the_first_failure_shown_is_that_of_its_test() -> None:
    texts = [text for language, _, text in BLOCKS if language == "text"]
    assert texts[0] == next(text for _, code, text in TESTS if "conv2" in code)


def test_every_public_assertion_is_in_the_table() -> None:
    for name in pytest_modelprobe.__all__:
        if name.startswith("assert_"):
            assert f"| `{name}(" in readme()


@pytest.mark.parametrize("page", sorted((Path(__file__).parent.parent / "docs").glob("*.md")), ids=lambda p: p.name)
def test_examples_in_the_documentation_run(page: Path) -> None:
    assert doctest.testfile(str(page), module_relative=False).failed == 0
