"""Changes as text and as Markdown: what a reviewer reads, and what names cannot do to it."""

from __future__ import annotations

import dataclasses

import pytest

from pytest_modelprobe.comparison import Cause
from pytest_modelprobe.gate import text as changes
from pytest_modelprobe.gate.classes import DEFAULTS
from pytest_modelprobe.gate.verdict import SnapshotVersion, Verdict, judge
from pytest_modelprobe.record import Layer, Parameter, Record
from pytest_modelprobe.report import markdown
from pytest_modelprobe.report.results import Base, CaseResult, PairResult, Results


def net(width: int, act: str = "ReLU", blocks: int = 2, model: str = "Net") -> Record:
    layers = [Layer(name="(root)", type=model, leaf=False)]
    for i in range(blocks):
        weight = Parameter(name="weight", shape=(width, 4), dtype="float32", device="cpu", requires_grad=True)
        layers += [
            Layer(name=f"blocks.{i}.fc", type="Linear", parameters=(weight,)),
            Layer(name=f"blocks.{i}.act", type=act),
        ]
    return Record(model=model, layers={layer.name: layer for layer in layers})


def snapshot(
    record: Record, path: str = "tests/__modelprobe__/test_net/test_a.arch.json", **other: object
) -> SnapshotVersion:
    text = repr(record.layers)
    return SnapshotVersion(path=path, record=record, architecture=text, content=text, **other)


def changed() -> Verdict:
    return judge({"a": snapshot(net(2))}, {"a": snapshot(net(3, "GELU"))}, unchanged=12)


# --- text ---------------------------------------------------------------------------------------------------------


def test_the_gate_says_what_is_denied_what_changed_and_what_to_do() -> None:
    verdict = changed()
    assert changes.verdict_text(verdict) == (
        "Net: checkpoint change is not declared; 1 model changed, 12 unchanged\n"
        "\n"
        f"model   class        verdict   snapshot{' ' * 41}what changed\n"
        "Net     checkpoint   denied    tests/__modelprobe__/test_net/test_a.arch.json   "
        "2 keys reshaped: old checkpoints will not load; +8 parameters (+50 %)\n"
        "Net     structure    denied    tests/__modelprobe__/test_net/test_a.arch.json   "
        "blocks.*.act: ReLU → GELU x2\n"
        "\n"
        "cause                                   class        changed by   models\n"
        "blocks.*.fc.weight (2, 4) → (3, 4) x2   checkpoint            -   Net\n"
        "blocks.*.act: ReLU → GELU x2            structure             -   Net\n"
        "\n"
        "If it is meant, this writes the reason into files, which are to be committed:\n"
        '  modelprobe declare "..."'
    )


@pytest.mark.parametrize(("kind", "what"), [("new", "new snapshot"), ("renamed", "renaming of its snapshot")])
def test_a_snapshot_that_is_new_or_renamed_is_said_to_be_that(kind: str, what: str) -> None:
    before = {} if kind == "new" else {"b": snapshot(net(2), "b.arch.json")}
    verdict = judge(before, {"a": snapshot(net(2))}, levels={**DEFAULTS, kind: "deny"})
    assert changes.verdict_line(verdict) == f"Net: {what} is not declared; 1 model changed, 0 unchanged"


def test_where_nothing_changed_that_is_one_line() -> None:
    assert changes.verdict_text(Verdict(unchanged=12)) == "no model changed; 12 unchanged"


def test_a_declared_change_is_told_with_its_reason_and_asks_for_nothing() -> None:
    before = snapshot(net(2))
    now = snapshot(net(3), reason="wider", supersedes=(before.architecture,))
    said = changes.verdict_text(judge({"a": before}, {"a": now}))
    assert said.startswith("nothing to object: 1 model changed, 0 unchanged\n")
    assert said.endswith("\n\nDeclared for Net: wider")


def test_a_reason_that_was_given_for_another_change_is_named() -> None:
    said = changes.verdict_text(
        judge({"a": snapshot(net(2))}, {"a": snapshot(net(3), reason="old", supersedes=("x",))})
    )
    assert "The reason in tests/__modelprobe__/test_net/test_a.arch.json was given for another change" in said


def test_a_deleted_snapshot_is_declared_by_the_command_alone() -> None:
    said = changes.verdict_text(judge({"a": snapshot(net(2))}, {}))
    assert "pytest" not in said.replace("pytest_", "")
    assert said.endswith(
        'If it is meant, this writes the reason into files, which are to be committed:\n  modelprobe declare "..."'
    )


# --- Markdown -----------------------------------------------------------------------------------------------------


def test_the_summary_is_a_table_with_the_details_folded_away() -> None:
    verdict = changed()
    path = "tests/&#95;&#95;modelprobe&#95;&#95;/test&#95;net/test&#95;a.arch.json"
    assert markdown.verdict(verdict) == (
        "### modelprobe: Net: checkpoint change is not declared; 1 model changed, 12 unchanged\n"
        "\n"
        "| model | class | verdict | snapshot | what changed |\n"
        "|---|---|---|---|---|\n"
        f"| Net | checkpoint | denied | {path}"
        " | 2 keys reshaped: old checkpoints will not load; +8 parameters (+50 %) |\n"
        f"| Net | structure | denied | {path} | blocks.&#42;.act: ReLU → GELU x2 |\n"
        "\n"
        "<details><summary>2 causes</summary>\n"
        "\n"
        "| cause | class | changed by | models |\n"
        "|---|---|---|---|\n"
        "| blocks.&#42;.fc.weight (2, 4) → (3, 4) x2 | checkpoint | - | Net |\n"
        "| blocks.&#42;.act: ReLU → GELU x2 | structure | - | Net |\n"
        "\n"
        "</details>\n"
        "\n"
        "If it is meant, this writes the reason into files, which are to be committed:\n"
        "\n"
        "```\n"
        'modelprobe declare "..."\n'
        "```\n"
    )


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a|b", "a&#124;b"),
        ("`code`", "&#96;code&#96;"),
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("two\nlines", "two&#92;nlines"),
        ("[x](https://example.org)", "&#91;x&#93;(https<span>:</span>//example.org)"),
        ("HTTP://a.example", "HTTP<span>:</span>//a.example"),
        ("www.a.example", "www<span>.</span>a.example"),
        ("@someone", "<span>@</span>someone"),
        (":smile:", "<span>:</span>smile:"),
        ("__init__", "&#95;&#95;init&#95;&#95;"),
        ("$x$ ~y~ *z*", "<span>$</span>x<span>$</span> &#126;y&#126; &#42;z&#42;"),
        ("#12", "<span>#</span>12"),
        ("\x1b[31m", "&#92;x1b&#91;31m"),
    ],
)
def test_no_name_is_anything_but_text(name: str, shown: str) -> None:
    assert markdown.escaped(name) == shown


def test_what_changed_alike_in_several_snapshots_is_said_once() -> None:
    before, now = ({str(i): snapshot(net(width), f"{i:03}") for i in range(5)} for width in (2, 3))
    text = markdown.verdict(judge(before, now))
    assert text.count("| blocks.&#42;.fc.weight (2, 4) → (3, 4) x2 | checkpoint | - | Net |") == 1
    assert text.count("| Net | checkpoint | denied | 000, 001 and 3 more | 2 keys reshaped") == 1


def test_rows_beyond_the_most_are_folded_away() -> None:
    lines = markdown.table(["n"], [[str(i)] for i in range(5)], most=3)
    assert lines[4:] == [
        "| 2 |", "", "<details><summary>2 rows more</summary>", "",
        "| n |", "|---|", "| 3 |", "| 4 |", "", "</details>",
    ]  # fmt: skip


def test_a_summary_keeps_below_the_limit_of_github() -> None:
    before = {str(i): snapshot(net(2, blocks=1, model=f"Net{i}" * 20), f"{i:03}") for i in range(40)}
    now = {str(i): snapshot(net(3 + i, blocks=1, model=f"Net{i}" * 20), f"{i:03}") for i in range(40)}
    text = markdown.verdict(judge(before, now), most_bytes=14_000)
    assert len(text.encode()) <= 14_000
    assert text.count("<details>") == text.count("</details>")
    assert "table more do not fit here" in text
    assert 'modelprobe declare "..."' in text


def test_a_summary_that_cannot_be_short_says_so_and_no_more() -> None:
    before, now = (
        {str(i): snapshot(net(2 + wider * i, model=f"Net{i} " * 100), f"{i:03}") for i in range(1, 40)}
        for wider in (0, 1)
    )
    text = markdown.verdict(judge(before, now), most_bytes=5_000)
    assert len(text.encode()) <= 5_000
    assert text.endswith("\nThis is too long to be shown here: run the same command locally.\n")


def with_doubts() -> Verdict:
    """Return a verdict on two models: the cause is only possible in the first."""
    before, now = ({name: snapshot(net(width, model=name), name) for name in "AB"} for width in (2, 3))
    verdict = judge(before, now)
    first, second = verdict.changes
    assert first.diagnosis is not None
    doubtful = dataclasses.replace(
        first.diagnosis, causes=(), possible=(Cause(kind="computation", layer="act", change=0.5),)
    )
    return dataclasses.replace(verdict, changes=(dataclasses.replace(first, diagnosis=doubtful), second))


def test_causes_of_any_model_come_before_possible_ones() -> None:
    causes = changes.shared_cause_rows(with_doubts())
    assert [row[0] for row in causes] == [
        "blocks.*.fc.weight (2, 4) → (3, 4) x2",
        "possibly act: own code changed",
    ]


def test_a_diff_says_which_causes_are_only_possible() -> None:
    said = markdown.diff(with_doubts())
    assert "Possible (an input is unknown" in said
    assert "act: own code changed   computation" in said


# --- the results of a run ---------------------------------------------------------------------------------------------

FAILED = CaseResult(
    id="tests/test_net.py::test_a", file="tests/test_net.py", line=7, outcome="failed", message="it failed"
)
BASE = Base(
    ref="main", commit="0123456789abcdef", python=None, versions={"torch": ("2", "1")},
    said="3 models: 2 unchanged, 1 changed", verdicts={"unchanged": 2, "changed": 1},
    failed={"test_b.py": "no module a|b"},
)  # fmt: skip


def test_markdown_says_what_failed_and_folds_what_changed() -> None:
    pair = PairResult(record="run 1", verdict="changed", first_line="fc: `x`", text="fc: `x`\n\n``` <b>\n| a |")
    test = dataclasses.replace(FAILED, base=(pair, PairResult(record="run 2", verdict="unchanged")))
    said = markdown.render(Results(tests=(test,), base=BASE, stopped="-x"))
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
    said = markdown.render(Results(tests=(dataclasses.replace(FAILED, base=(pair,) * 5),), base=BASE))
    assert len(said) < 1_000_000
    assert said.endswith("</details>\n\n3 texts more do not fit here: run the same command locally.\n")
