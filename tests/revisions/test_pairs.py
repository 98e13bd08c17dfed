"""Two records of one test."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.comparison import text as comparison_text
from pytest_modelprobe.record import Layer, Record
from pytest_modelprobe.revisions import (
    Pair,
    Written,
    changed_lines,
    first_difference,
    judged,
    summary,
)
from pytest_modelprobe.revisions.pairs import compare_records


def record_of(*, scale: float = 1.0) -> Record:
    probe = ModelProbe()
    model = probe.build(lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)))
    with torch.no_grad():
        model[3].bias.add_(1.0).mul_(scale)
    record = probe.run(model, probe.randn(4, 8))
    live = record.live_run
    assert live is not None
    return live.measured(record, record)


def written(record: Record) -> Written:
    return Written("test_x", "run 1", record)


def test_the_same_bits_are_unchanged() -> None:
    actual, expected = record_of(), record_of()
    assert compare_records(actual, expected).same
    assert judged(written(actual), written(expected)).verdict == "unchanged"


def test_a_change_below_the_rounding_of_what_a_file_can_hold_is_no_change_where_noise_is_unknown() -> None:
    actual, expected = (dataclasses.replace(record_of(scale=scale), noise=None) for scale in (1 + 2**-23, 1.0))
    assert not compare_records(actual, expected).same
    pair = judged(written(actual), written(expected))
    assert (pair.verdict, pair.first and pair.first.layer) == ("rounding", "3")
    assert summary([pair]) == "1 test ran 1 model of 1 class: 1 the same but for rounding"
    actual, expected = record_of(scale=1 + 2**-23), record_of()
    assert judged(written(actual), written(expected)).verdict == "changed"


def test_other_versions_round_otherwise() -> None:
    actual, expected = record_of(scale=1 + 1e-7), record_of()
    actual = dataclasses.replace(actual, versions={"torch": "0.0"})
    assert compare_records(actual, expected).same


def test_what_does_not_repeat_on_one_side_is_not_judged() -> None:
    actual, expected = record_of(scale=2.0), record_of()
    random = dataclasses.replace(expected, noise="not repeatable")
    assert judged(written(actual), written(random)).verdict == "not repeatable"
    assert judged(written(random), written(actual)).verdict == "not repeatable"


def test_a_watch_that_saw_no_forward_is_not_called_unchanged() -> None:
    probe = ModelProbe()
    small, large = (probe.watch(nn.Linear(4, width)).first for width in (2, 3))
    assert judged(written(small), written(small)).verdict == "not run"
    assert judged(written(large), written(small)).verdict == "changed"
    architecture = probe.architecture(nn.Linear(4, 2), torch.ones(1, 4))
    assert judged(written(architecture), written(architecture)).verdict == "unchanged"


def test_the_first_output_that_differs_is_that_of_the_innermost_layer() -> None:
    found = first_difference(compare_records(record_of(scale=1.5), record_of()))
    assert found is not None
    assert found.layer == "3"


# --- in words -----------------------------------------------------------------------------------------------------


def changed(test: str, layer: str, attribute: str = "eps", key: str = "run 1") -> Pair:
    """Return a pair of which an attribute of a layer changed."""
    now, then = (
        Record(model="Net", layers={layer: Layer(name=layer, type="LayerNorm", attributes={attribute: value})})
        for value in (1e-4, 1e-5)
    )
    pair = judged(Written(test, key, now), Written(test, key, then))
    assert pair.verdict == "changed"
    return pair


def test_models_that_changed_alike_are_told_once() -> None:
    pairs = [changed("test_other", "head"), *(changed(f"test_{n}", f"blocks.{n}.norm") for n in range(6))]
    said = "\n".join(changed_lines(pairs))
    assert said.startswith("\ntest_0, run 1:\nblocks.0.norm.eps 1e-05 → 0.0001; 1 cause\n")
    assert "\n5 other models changed alike: test_1, test_2, test_3 and 2 more.\n\ntest_other, run 1:\nhead.eps " in said
    assert said.endswith("\n\nThe text of each model is in the page of --modelprobe-html=PATH.")
    assert said.count("1 cause") == 2


def test_one_model_that_changed_has_its_text_alone() -> None:
    pair = changed("test_a", "fc")
    assert list(changed_lines([pair])) == ["", "test_a, run 1:", *comparison_text.text(pair.diagnosis).splitlines()]


def test_of_many_changes_the_text_is_bounded_and_the_rest_is_counted() -> None:
    pairs = [changed(f"test_{n}", f"layer{n}") for n in range(200)] + [changed("test_last", "layer7")]
    lines = list(changed_lines(pairs))
    assert len(lines) < 60
    assert lines[1] == "test_7, run 1:"  # two models
    assert "1 other model changed alike: test_last." in lines
    assert lines[-24:-2] == [
        "",
        *(f"test_{n}, run 1: layer{n}.eps 1e-05 → 0.0001; 1 cause" for n in (4, 5, 6, *range(8, 25))),
        "... 175 more models changed",
    ]
    assert lines[-2:] == ["", "The text of each model is in the page of --modelprobe-html=PATH."]
