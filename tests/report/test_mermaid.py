import re
from collections.abc import Sequence

from pytest_modelprobe.gate.verdict import SnapshotChange, SnapshotVersion, judge
from pytest_modelprobe.record import Call, Layer, Record, Value
from pytest_modelprobe.report import markdown
from pytest_modelprobe.report.markdown import graph


def chain(names: Sequence[str], changed: str = "", kind: str = "Linear") -> Record:
    """Return a record of layers, each of which takes the output of the one before it; one is of another type."""
    layers = {}
    for i, name in enumerate(names):
        given = {"shape": (1,), "dtype": "float32", "device": "cpu"}
        source = f"{names[i - 1]} output" if i else None
        call = Call(
            root=names[0],
            root_training=False,
            index=0,
            started=2 * i + 1,
            finished=2 * i + 2,
            inputs=(Value(path="input", source=source, tensor=i, **given),),
            outputs=(Value(path="output", tensor=i + 1, **given),),
        )
        layers[name] = Layer(name=name, type=kind if name == changed else "Identity", calls=(call,))
    return Record(model="Net", layers=layers, forwards=1)


def change(before: Record, now: Record) -> SnapshotChange:
    versions = [
        SnapshotVersion(path="a.arch.json", record=record, architecture=digest, content=digest)
        for record, digest in ((before, "a"), (now, "b"))
    ]
    return judge({"a": versions[0]}, {"a": versions[1]}).changes[0]


def nodes(lines: list[str]) -> dict[str, str]:
    """Return label → class of the nodes of a graph."""
    found = (re.fullmatch(r'  n\d+\["(.*)"\](?::::(\w+))?', line) for line in lines)
    return {match[1]: match[2] or "" for match in found if match}


def test_the_changed_layer_is_drawn_between_its_neighbors() -> None:
    names = ["a", "b", "c", "d", "e"]
    lines = graph(change(chain(names), chain(names, "c")))
    assert nodes(lines) == {"c: Linear": "cause", "b: Identity": "", "d: Identity": ""}
    assert [line.strip() for line in lines if "-->" in line] == ["n1 --> n0", "n0 --> n2"]
    assert (lines[0], lines[-2]) == ("```mermaid", "```")


def test_added_and_removed_layers_are_told_apart() -> None:
    lines = graph(change(chain(["a", "b", "c"]), chain(["a", "new", "c"], "new")))
    found = nodes(lines)
    assert found["new: Linear"] == "added"
    assert found["b: Identity"] == "removed"


def test_a_large_change_is_cut_and_the_rest_is_counted() -> None:
    names = [f"l{i}" for i in range(100)]
    lines = graph(change(chain(names[:1]), chain(names)), most=10)
    assert len(nodes(lines)) == 10
    assert '  rest["90 layers more"]' in lines


def test_names_are_text_in_labels() -> None:
    names = ["a", '"]; click n0 "javascript:alert(1)"', "`x`", "c\n```\n<img src=x onerror=alert(1)>", "::error::x"]
    lines = graph(change(chain(names[:1]), chain(names)))
    assert len(nodes(lines)) == len(names)
    assert not re.search(r"[<>`]|click n0 \"", "".join(lines[1:-2]).replace("-->", ""))
    assert not any(line.lstrip().startswith("::") for line in lines)


def test_the_summary_of_a_job_has_the_graph() -> None:
    names = ["a", "b", "c"]
    versions = [
        SnapshotVersion(path="a.arch.json", record=record, architecture=digest, content=digest)
        for record, digest in ((chain(names), "a"), (chain(names, "b"), "b"))
    ]
    verdict = judge({"a": versions[0]}, {"a": versions[1]})
    assert '\n```mermaid\nflowchart TD\n  n0["b: Linear"]:::cause\n' in markdown.verdict(verdict)
    assert '\n```mermaid\nflowchart TD\n  n0["b: Linear"]:::cause\n' in markdown.diff(verdict)
