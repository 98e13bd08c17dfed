"""Changes as GitHub Actions shows them: annotations and the summary of a step."""

from __future__ import annotations

from pathlib import Path

from pytest_modelprobe.files import encode
from pytest_modelprobe.gate.verdict import SnapshotVersion, Verdict, judge
from pytest_modelprobe.record import Layer, Record
from pytest_modelprobe.report import github

PATH = "tests/__modelprobe__/test_net/test_a.arch.json"


def net(act: str, model: str = "Net") -> Record:
    layers = [
        Layer(name="(root)", type=model, leaf=False),
        Layer(name="fc", type="Linear"),
        Layer(name="act", type=act),
    ]
    return Record(model=model, layers={layer.name: layer for layer in layers})


def snapshot(record: Record, path: str = PATH, **other: object) -> SnapshotVersion:
    text = encode(record).architecture
    return SnapshotVersion(path=path, record=record, architecture=text, content=text, read_text=lambda: text, **other)


def test_a_denied_change_is_an_error_at_the_line_of_its_layer() -> None:
    now = snapshot(net("GELU"))
    line = now.read_text().split("\n").index('"act": {"type": "GELU"}') + 1
    assert github.annotation_commands(judge({"a": snapshot(net("ReLU"))}, {"a": now})) == [
        f"::error file={PATH},line={line},title=Net%3A structure::structure: act: ReLU → GELU"
    ]


def test_a_declared_change_is_a_warning_with_its_reason() -> None:
    before = snapshot(net("ReLU"))
    now = snapshot(net("GELU"), reason="smoother", supersedes=(before.architecture,))
    (line,) = github.annotation_commands(judge({"a": before}, {"a": now}))
    assert line.startswith("::warning file=")
    assert line.endswith("%0Adeclared: smoother")


def test_what_is_deleted_stands_at_no_file() -> None:
    (line,) = github.annotation_commands(judge({"a": snapshot(net("ReLU"))}, {}))
    assert line.startswith("::error title=Net%3A removed::removed: the snapshot is deleted")


def many(n: int) -> Verdict:
    before, now = ({str(i): snapshot(net(act), f"{i:03}") for i in range(n)} for act in ("ReLU", "GELU"))
    return judge(before, now)


def test_of_more_than_nine_the_rest_is_counted() -> None:
    lines = github.annotation_commands(many(12))
    assert len(lines) == 10
    assert lines[-1] == "::error title=modelprobe::+3 more: see the summary of this job"


def test_a_layer_with_signs_of_json_in_its_name_has_its_line() -> None:
    name = 'größe"\\'
    text = encode(Record(model="Net", layers={n: Layer(name=n, type="A") for n in ("x", name)})).architecture
    assert github.line_number_of(text, name) == github.line_number_of(text, "x") + 1


def test_the_summary_is_added_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    path.write_text("before\n", "utf-8")
    github.write_summary(path, "### größer")
    assert path.read_text("utf-8") == "before\n### größer\n"
