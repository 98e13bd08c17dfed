"""Of which class a change is, what it does to checkpoints, and whether it was declared."""

from __future__ import annotations

import dataclasses

import pytest

from pytest_modelprobe.comparison.compare import compare
from pytest_modelprobe.comparison.text import cause_text
from pytest_modelprobe.gate.classes import DEFAULTS, Level, effect_on_checkpoints
from pytest_modelprobe.gate.text import diff_text, finding_text, verdict_line
from pytest_modelprobe.gate.verdict import SnapshotChange, SnapshotVersion, Verdict, judge
from pytest_modelprobe.record import (
    Call,
    EmittedTensor,
    IsolatedResponse,
    Layer,
    Parameter,
    Reading,
    Record,
    Statistics,
    Value,
)
from pytest_modelprobe.snapshot.comparer import structure_of


def weight(*shape: int, name: str = "weight", **other: object) -> Parameter:
    usual = {"dtype": "float32", "requires_grad": True}
    return Parameter(name=name, shape=shape, device="cpu", **{**usual, **other})


def linear(name: str, *shape: int, **other: object) -> Layer:
    return Layer(name=name, type="torch.nn.modules.linear.Linear", parameters=(weight(*shape),), **other)


def record(*layers: Layer, **other: object) -> Record:
    root = Layer(name="(root)", type="Net", leaf=False)
    return Record(model="Net", layers={layer.name: layer for layer in (root, *layers)}, **other)


def snapshot(
    record: Record, path: str = "t/__modelprobe__/test_net/test_a.arch.json", **other: object
) -> SnapshotVersion:
    text = repr(record)
    exact = repr([dataclasses.replace(layer, calls=()) for layer in record.layers.values()])
    return SnapshotVersion(
        path=path,
        record=record,
        architecture=exact,
        content=f"{record.noise} {record.layers}",
        read_text=lambda: text,
        **other,
    )


def change(before: Record, now: Record, **levels: str) -> SnapshotChange:
    verdict = judge({"a": snapshot(before)}, {"a": snapshot(now)}, levels={**DEFAULTS, **levels})
    assert len(verdict.changes) == 1
    return verdict.changes[0]


def classes(before: Record, now: Record) -> list[str]:
    return [finding.kind for finding in change(before, now).findings]


# --- classes ------------------------------------------------------------------------------------------------------


def test_a_layer_with_parameters_that_is_added_breaks_checkpoints_too() -> None:
    assert classes(record(), record(linear("fc", 2, 4))) == ["checkpoint", "structure"]


def test_another_output_shape_is_interface() -> None:
    before, now = (
        record(
            Layer(
                name="act",
                type="ReLU",
                calls=(Call(root="act", root_training=False, index=0, outputs=(value(width),)),),
            ),
            forwards=1,
        )
        for width in (4, 8)
    )
    assert classes(before, now) == ["interface"]


def value(width: int, **other: object) -> Value:
    return Value(path="output", shape=(2, width), dtype="float32", device="cpu", **other)


def numbers(mean: float, *, noise: float | None = None, how: str | None = None) -> Record:
    reading = Reading(
        noise=noise,
        statistics=Statistics(count=8, min=mean - 1, max=mean + 1, mean=mean, deviations=8.0),
        fingerprint=(mean, *[0.0] * 15),
    )
    call = Call(root="act", root_training=False, index=0, started=0, finished=1, outputs=(value(4, forward=reading),))
    return record(Layer(name="act", type="ReLU", calls=(call,)), forwards=1, noise=how)


def test_numbers_that_moved_for_another_attribute_are_behavior_and_structure() -> None:
    before, now = numbers(1.0), numbers(3.0)
    act = dataclasses.replace(now.layers["act"], attributes={"slope": 2})
    was = dataclasses.replace(before.layers["act"], attributes={"slope": 1})
    before, now = (dataclasses.replace(r, layers={**r.layers, "act": a}) for r, a in ((before, was), (now, act)))
    assert classes(before, now) == ["structure", "behavior"]


@pytest.mark.parametrize(
    ("level", "declared", "said"),
    [
        ("warn", {}, "nothing is denied, but 1 behavior change has no reason: "),
        ("warn", {"reason": "another scale"}, "nothing to object: "),
        ("allow", {}, "nothing to object: "),
        ("deny", {}, "Net: behavior change is not declared; "),
    ],
)
def test_the_verdict_counts_the_changes_of_behavior_and_those_without_a_reason(
    level: Level, declared: dict[str, str], said: str
) -> None:
    now = {"a": snapshot(numbers(3.0), **declared), "b": snapshot(record(), "b")}
    verdict = judge({"a": snapshot(numbers(1.0))}, now, unchanged=3, levels={**DEFAULTS, "behavior": level})
    assert verdict_line(verdict) == f"{said}2 models changed, 1 in behavior, 3 unchanged"


@pytest.mark.parametrize(
    ("path", "said"),
    [("a.probe.json", "the same architecture, and numbers within tolerance"), (None, "the same architecture")],
)
def test_numbers_are_only_spoken_of_where_there_are_some(path: str | None, said: str) -> None:
    before = snapshot(numbers(1.0) if path else record(), numbers=path)
    found = judge({"a": before}, {"a": dataclasses.replace(before, read_text=lambda: "otherwise")}).changes[0]
    assert [finding_text(finding, found) for finding in found.findings] == [said]


def weighed(*values: float, names: tuple[str, ...] = ("a", "b", "c"), output: float = 1.0, **other: object) -> Record:
    """Return a record of layers whose weights have these means, and of their output."""
    layers = [
        Layer(
            name=name,
            type="Linear",
            parameters=(weight(2, 4, reading=reading(mean)),),
            calls=(Call(root="(root)", root_training=False, index=0, started=i * 2 + 1, finished=i * 2 + 2),),
        )
        for i, (name, mean) in enumerate(zip(names, values, strict=True))
    ]
    call = Call(
        root="(root)", root_training=False, index=0, started=0, finished=9, outputs=(value(4, forward=reading(output)),)
    )
    root = Layer(name="(root)", type="Net", leaf=False, calls=(call,))
    return Record(model="Net", layers={layer.name: layer for layer in (root, *layers)}, forwards=1, **other)


def reading(mean: float) -> Reading:
    return Reading(
        statistics=Statistics(count=8, min=mean - 1, max=mean + 1, mean=mean, deviations=8.0),
        fingerprint=(mean, *[0.0] * 15),
    )


def test_a_layer_with_another_name_alone_is_renamed_and_needs_a_mapping_of_keys() -> None:
    found = change(weighed(1.0, 1.0, 1.0), weighed(1.0, 1.0, 1.0, names=("a", "b", "head")))
    assert [finding.kind for finding in found.findings] == ["checkpoint", "renamed"]
    assert dict(found.effect.renamed) == {"c.weight": "head.weight"}
    assert found.diagnosis is not None
    assert found.diagnosis.unchanged


def test_numbers_that_moved_beside_a_name_with_the_same_weights_are_behavior() -> None:
    now = weighed(1.0, 1.0, 1.0, names=("a", "b", "head"), output=5.0)
    assert "behavior" in classes(weighed(1.0, 1.0, 1.0), now)


def answering(kind: str, answer: float) -> Record:
    """Return a record of a model of a class whose own code answers so when it is asked alone."""
    found = numbers(1.0)
    (call,) = found.layers["act"].calls
    response = IsolatedResponse(handed=(EmittedTensor(where="output", reading=reading(answer)),))
    act = dataclasses.replace(found.layers["act"], type=kind, calls=(dataclasses.replace(call, response=response),))
    return dataclasses.replace(found, layers={**found.layers, "act": act}, noise="measured")


def test_a_refactoring_with_the_same_numbers_is_structure() -> None:
    found = change(answering("Act", 1.0), answering("Activation", 1.0))
    assert [finding.kind for finding in found.findings] == ["structure"]
    assert finding_text(found.findings[0], found) == "act: Act → Activation; behavior unchanged"


def called(path: str, flag: bool | None = None, answer: float = 1.0) -> Record:
    """Return a record of a model that gives one input to a layer by that name, whose own code answers so alone."""
    given = value(4, forward=reading(1.0))
    response = IsolatedResponse(handed=(EmittedTensor(where="output", reading=reading(answer)),))
    whole = Call(root="(root)", root_training=False, index=0, started=0, finished=3, inputs=(given,), outputs=(given,))
    inner = dataclasses.replace(
        whole, started=1, finished=2, inputs=(dataclasses.replace(given, path=path),), arguments={"flag": flag},
        response=response,
    )  # fmt: skip
    layers = (Layer(name="(root)", type="Net", leaf=False, calls=(whole,)), Layer(name="act", type="A", calls=(inner,)))
    return Record(model="Net", layers={layer.name: layer for layer in layers}, forwards=1, noise="measured")


def test_an_argument_that_says_nothing_is_too() -> None:
    assert classes(called("input"), called("input", flag=False)) == ["calls"]


def test_beside_it_own_code_that_answers_otherwise_is_no_such_call() -> None:
    assert "calls" not in classes(called("input"), called("input", flag=False, answer=3.0))


def test_beside_a_change_what_is_renamed_is_shown_and_allowed() -> None:
    now = called("mask")
    wider = dataclasses.replace(now.layers["act"], attributes={"eps": 2})
    before = called("input")
    was = dataclasses.replace(before.layers["act"], attributes={"eps": 1})
    found = change(
        dataclasses.replace(before, layers={**before.layers, "act": was}),
        dataclasses.replace(now, layers={**now.layers, "act": wider}),
    )
    assert [(finding.kind, finding.level) for finding in found.findings] == [("structure", "deny"), ("calls", "allow")]
    assert finding_text(found.findings[1], found) == "act: input renamed to mask"
    assert "act: input renamed to mask" in diff_text(Verdict(changes=(found,)))


def test_without_numbers_another_name_is_interface() -> None:
    assert classes(*(structure_of(called(path)) for path in ("input", "mask"))) == ["interface"]


def test_own_code_that_answers_otherwise_is_behavior_although_the_output_is_the_same() -> None:
    assert classes(answering("Act", 1.0), answering("Act", 3.0)) == ["behavior"]


def test_an_attribute_that_came_is_format() -> None:
    before, now = (record(Layer(name="norm", type="Norm", attributes=own)) for own in ({}, {"eps": 1}))
    assert classes(before, now) == ["format"]


@pytest.mark.parametrize(("before", "now"), [("behavior", "all"), ("architecture", "all"), ("behavior", "behavior")])
def test_what_is_compared_as_before_or_with_more_is_not(before: str, now: str) -> None:
    files = [snapshot(numbers(1.0), numbers="t.probe.json", compared=part) for part in (before, now)]
    assert judge({"a": files[0]}, {"a": dataclasses.replace(files[1], content="other")}).denied == ()


def test_what_came_and_what_went_have_classes_of_their_own() -> None:
    a, b = record(Layer(name="a", type="A")), record(Layer(name="b", type="B"))
    verdict = judge({"a": snapshot(a)}, {"b": snapshot(b)})
    assert [finding.kind for c in verdict.changes for finding in c.findings] == ["removed", "new"]


def test_what_changed_of_the_architecture_is_said_of_the_first_device() -> None:
    before, now = record(linear("fc", 2, 4)), record(linear("fc", 3, 4))
    verdict = judge({"a": snapshot(before), "a.cuda": snapshot(before)}, {"a": snapshot(now), "a.cuda": snapshot(now)})
    assert [[f.kind for f in c.findings] for c in verdict.changes] == [["checkpoint"], ["format"]]


def of_device(record: Record, device: str, file: str = "t.arch.json") -> SnapshotVersion:
    numbers = f"t.{device}.probe.json"
    return dataclasses.replace(snapshot(dataclasses.replace(record, device=device), file), numbers=numbers)


def kinds(before: dict[str, SnapshotVersion], now: dict[str, SnapshotVersion]) -> dict[str, list[str]]:
    return {c.path: [finding.kind for finding in c.findings] for c in judge(before, now).changes}


def test_a_file_is_compared_with_its_own_past_whatever_device_its_numbers_are_of() -> None:
    old, new = record(linear("fc", 2, 4)), record(linear("fc", 3, 4))
    before = {"t.cuda": of_device(old, "cuda")}
    now = {"t": snapshot(new, "t.arch.json"), "t.cuda": of_device(old, "cuda", "t.cuda.arch.json")}
    assert kinds(before, now) == {"t.arch.json": ["checkpoint", "removed"], "t.cuda.arch.json": ["new"]}


def test_an_architecture_of_another_name_is_not_the_past_of_a_device() -> None:
    old, new = record(linear("fc", 2, 4)), record(linear("fc", 3, 4))
    before = {"t": of_device(old, "cpu"), "t.cuda": of_device(old, "cuda")}
    now = {"t": of_device(new, "cpu"), "t.cuda": of_device(old, "cuda", "t.cuda.arch.json")}
    assert kinds(before, now) == {"t.arch.json": ["checkpoint"], "t.cuda.arch.json": ["renamed"]}


def test_no_past_is_compared_with_twice() -> None:
    net = record(linear("fc", 2, 4))
    before = {name: of_device(net, device) for name, device in {"t": "cpu", "t.cuda": "cuda"}.items()}
    now = {name: of_device(net, device) for name, device in {"t": "cpu", "t.xpu": "xpu"}.items()}
    verdict = judge(before, now)
    assert [(c.before is None, c.now is None) for c in verdict.changes] == [(False, True), (True, False)]


def test_a_device_that_is_added_is_new() -> None:
    net = record(linear("fc", 2, 4))
    before, now = {"t": of_device(net, "cpu")}, {"t": of_device(net, "cpu"), "t.cuda": of_device(net, "cuda")}
    assert [[f.kind for f in c.findings] for c in judge(before, now).changes] == [["new"]]


def test_numbers_that_are_gone_are_removed() -> None:
    before = dataclasses.replace(snapshot(numbers(1.0)), numbers="t.probe.json")
    (found,) = judge({"a": before}, {"a": snapshot(record(Layer(name="act", type="ReLU")))}).changes
    assert "removed" in [finding.kind for finding in found.denied]
    removed = next(finding for finding in found.findings if finding.kind == "removed")
    assert finding_text(removed, found) == "its numbers are gone: there is the structure alone"


def test_the_gravest_change_comes_first() -> None:
    small, grave = record(Layer(name="act", type="ReLU")), record(linear("fc", 2, 4))
    before = {"a": snapshot(small, "a"), "b": snapshot(grave, "b")}
    now = {"a": snapshot(record(Layer(name="act", type="GELU")), "a"), "b": snapshot(record(linear("fc", 3, 4)), "b")}
    assert [c.path for c in judge(before, now).changes] == ["b", "a"]


# --- checkpoints --------------------------------------------------------------------------------------------------


def effect(before: Record, now: Record):
    return effect_on_checkpoints(compare(now, before))


def test_keys_are_named_by_what_became_of_them() -> None:
    found = effect(
        record(linear("fc", 2, 4), linear("old", 2, 2)),
        record(linear("fc", 3, 4), linear("new", 5, 5), linear("x", 1, 9)),
    )
    assert (found.reshaped, found.removed, found.added) == (
        ("fc.weight",), ("old.weight",), ("new.weight", "x.weight"),
    )  # fmt: skip


def table(*, persistent: bool | None, length: int = 4) -> Record:
    buffer = weight(length, name="table", requires_grad=False, persistent=persistent)
    return record(Layer(name="rotary", type="Rotary", buffers=(buffer,)))


NO_TABLE = record(Layer(name="rotary", type="Rotary"))


@pytest.mark.parametrize("persistent", [False, None])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_buffer_that_is_not_known_to_be_persistent_breaks_no_checkpoint(
    persistent: bool | None, swapped: bool
) -> None:
    before, now = (NO_TABLE, table(persistent=persistent))[:: -1 if swapped else 1]
    assert effect(before, now).none
    assert classes(before, now) == ["structure"]


def test_a_buffer_that_is_not_persistent_any_more_is_a_key_less() -> None:
    before, now = table(persistent=True), table(persistent=False)
    assert (effect(before, now).removed, effect(now, before).added) == (("rotary.table",), ("rotary.table",))
    found = change(before, now).findings[0]
    assert found.kind == "checkpoint"
    assert [cause_text(cause) for cause in found.causes] == ["rotary.table persistent True → False"]


@pytest.mark.parametrize(("now", "reshaped"), [(True, ("rotary.table",)), (False, ()), (None, ())])
def test_a_file_that_does_not_say_what_is_persistent_is_read_with_the_other(
    now: bool | None, reshaped: tuple[str, ...]
) -> None:
    assert effect(table(persistent=None), table(persistent=now, length=8)).reshaped == reshaped
    assert effect(table(persistent=None), table(persistent=now)).none
    assert compare(table(persistent=now), table(persistent=None)).same


def test_a_renamed_layer_gives_a_mapping_of_keys() -> None:
    found = effect(record(linear("fc", 2, 4)), record(linear("head", 2, 4)))
    assert (dict(found.renamed), found.added, found.removed) == ({"fc.weight": "head.weight"}, (), ())
    assert not found.loads


def test_another_dtype_loads() -> None:
    half = Layer(name="fc", type="Linear", parameters=(weight(2, 4, dtype="float16"),))
    found = effect(record(linear("fc", 2, 4)), record(half))
    assert (found.cast, found.loads) == (("fc.weight",), True)


def test_parameters_that_are_shared_are_counted_once() -> None:
    tied = Layer(name="head", type="Linear", parameters=(weight(2, 4, tied_to="emb.weight"),))
    found = effect(record(linear("emb", 2, 4), linear("head", 2, 4)), record(linear("emb", 2, 4), tied))
    assert (found.tied, found.parameters_before, found.parameters) == (("head.weight",), 16, 8)


def test_a_module_at_two_places_has_two_keys() -> None:
    found = effect(record(), record(linear("a", 2, 4, aliases=("b",))))
    assert found.added == ("a.weight", "b.weight")


# --- levels and declarations --------------------------------------------------------------------------------------


BEFORE, NOW, LATER = (record(linear("fc", width, 4)) for width in (2, 3, 5))


def denied(before: SnapshotVersion, now: SnapshotVersion, **levels: str) -> bool:
    return bool(judge({"a": before}, {"a": now}, levels={**DEFAULTS, **levels}).denied)


def test_a_level_can_be_lowered() -> None:
    assert not denied(snapshot(BEFORE), snapshot(NOW), checkpoint="warn")


def test_a_level_can_be_raised() -> None:
    assert denied(snapshot(numbers(1.0)), snapshot(numbers(3.0)), behavior="deny")


def test_a_reason_given_for_the_change_declares_it() -> None:
    before = snapshot(BEFORE)
    now = snapshot(NOW, reason="wider", supersedes=(before.architecture,))
    assert not denied(before, now)
    assert judge({"a": before}, {"a": now}).changes[0].reason == "wider"


def test_a_reason_follows_several_updates_of_one_branch() -> None:
    before, between = snapshot(BEFORE), snapshot(NOW)
    now = snapshot(LATER, reason="wider still", supersedes=(before.architecture, between.architecture))
    assert not denied(before, now)


def test_the_reason_of_an_earlier_change_does_not_declare_other_numbers() -> None:
    before, now = (snapshot(numbers(mean), reason="wider", supersedes=("x",)) for mean in (1.0, 3.0))
    assert denied(before, dataclasses.replace(now, architecture=before.architecture), behavior="deny")


def removed(reason: str, path: str | None = None, content: str | None = None) -> Verdict:
    """Return the verdict on a deleted snapshot, of which the reason is for this path and content."""
    before = snapshot(BEFORE)
    return judge({"a": before}, {}, removals={(path or before.path, content or before.content): reason})


def test_the_reason_for_a_deletion_declares_it() -> None:
    verdict = removed("not used any more")
    assert (verdict.denied, verdict.changes[0].reason) == ((), "not used any more")


@pytest.mark.parametrize("reason", ["", " ", "\u200b", "..."])
def test_the_reason_for_a_deletion_has_a_word_in_it(reason: str) -> None:
    assert removed(reason).denied


def test_the_reason_for_a_deletion_does_not_hold_for_another_snapshot() -> None:
    assert removed("not used any more", path="t/__modelprobe__/test_net/test_b.arch.json").denied


def test_the_reason_for_a_deletion_does_not_hold_for_another_content() -> None:
    assert removed("not used any more", content="another").denied


def test_the_reason_for_a_deletion_holds_where_other_models_changed_too() -> None:
    before, other = snapshot(BEFORE), record(Layer(name="act", type="ReLU"))
    removals = {(before.path, before.content): "not used any more"}
    assert not judge({"a": before}, {"b": snapshot(other, "b")}, removals=removals).denied


def test_a_diff_tells_what_changed_alike_in_many_snapshots_once() -> None:
    def all_of(eps: float) -> dict[str, SnapshotVersion]:
        layers = ([Layer(name="norm", type="Norm", attributes={"eps": eps}), linear("fc", i, 4)] for i in range(1, 7))
        return {f"{i}": snapshot(record(*own), f"t/test_{i}.arch.json") for i, own in enumerate(layers)}

    said = diff_text(judge(all_of(1e-5), all_of(1e-6)))
    head, first, *_ = said.split("\n")
    assert head == "Net (t/test_0.arch.json, t/test_1.arch.json and 4 more)"
    assert first == "norm.eps 1e-05 → 1e-06; 1 cause"
    assert said.count("norm.eps") == 2  # and once in the table of causes
