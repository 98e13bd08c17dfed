"""Two records of one test, and how the tensors of a layer differ."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import nn

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.record import Record
from pytest_modelprobe.revisions import Written, exact_difference, first_difference, judged
from pytest_modelprobe.revisions.pairs import compare_records


def record_of(*, scale: float = 1.0) -> Record:
    probe = ModelProbe()
    model = probe.build(lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)))
    with torch.no_grad():
        model[3].bias.add_(1.0).mul_(scale)
    record = probe.run(model, probe.randn(4, 8))
    live = record.live_run
    assert live is not None
    return live.measured(live.isolated(record))


def written(record: Record, tensors: Path | None = None) -> Written:
    return Written("test_x", "run 1", record, {}, tensors)


def test_the_same_bits_are_unchanged() -> None:
    actual, expected = record_of(), record_of()
    assert compare_records(actual, expected).same
    assert judged(written(actual), written(expected), (actual, expected)).verdict == "unchanged"


def test_a_last_bit_is_rounding_and_its_layer_is_known() -> None:
    actual, expected = record_of(scale=1 + 2**-23), record_of()
    assert not compare_records(actual, expected).same
    pair = judged(written(actual), written(expected), (actual, expected))
    assert pair.verdict in ("rounding", "changed")  # by how a processor rounds
    assert pair.first is not None
    assert pair.first.layer == "3"


def test_a_change_below_a_snapshot_s_tolerance_is_a_change() -> None:
    actual, expected = record_of(scale=1 + 2e-6), record_of()
    pair = judged(written(actual), written(expected), (actual, expected))
    assert pair.verdict == "changed"
    assert [cause.layer for cause in pair.diagnosis.causes] == ["3"]


def test_other_versions_round_otherwise() -> None:
    actual, expected = record_of(scale=1 + 1e-7), record_of()
    actual = dataclasses.replace(actual, versions={"torch": "0.0"})
    assert compare_records(actual, expected).same


def test_what_does_not_repeat_is_not_judged() -> None:
    actual, expected = record_of(scale=2.0), dataclasses.replace(record_of(), noise="not repeatable")
    assert judged(written(actual), written(expected), (actual, expected)).verdict == "not repeatable"


def test_the_first_output_that_differs_is_that_of_the_innermost_layer() -> None:
    found = first_difference(compare_records(record_of(scale=1.5), record_of()))
    assert found is not None
    assert (found.layer, found.name_there, found.call, found.path) == ("3", "3", 0, "output")


def test_tensors_are_compared_element_by_element(tmp_path: Path) -> None:
    here, there = tmp_path / "here.pt", tmp_path / "there.pt"
    x = torch.tensor([[1.0, 2.0, float("nan")], [0.0, float("inf"), 3.0]])
    y = x.clone()
    torch.save({"0 output": y, "1 output": x}, there)
    torch.save({"0 output": x, "1 output": x}, here)
    assert exact_difference(here, there) is None
    y[0, 1], y[1, 0] = 1.5, 0.25
    torch.save({"0 output": y, "1 output": x}, there)
    found = exact_difference(here, there)
    assert found is not None
    assert (found["value"], found["call"], found["different"], found["elements"]) == ("output", 0, 2, 6)
    assert found["largest"]["difference"] == (0.5, [0, 1], 2.0, 1.5)
    assert found["largest"]["relative"] == (1.0, [1, 0], 0.0, 0.25)


def test_integers_and_a_nan_on_one_side_differ_too(tmp_path: Path) -> None:
    here, there = tmp_path / "here.pt", tmp_path / "there.pt"
    torch.save({"0 output": torch.tensor([1, 2])}, here)
    torch.save({"0 output": torch.tensor([1, 5])}, there)
    found = exact_difference(here, there)
    assert found is not None
    assert found["largest"]["difference"] == (3.0, [1], 2, 5)
    torch.save({"0 output": torch.tensor([1.0, float("nan")])}, here)
    torch.save({"0 output": torch.tensor([1.0, 1.0])}, there)
    found = exact_difference(here, there)
    assert found is not None
    assert found["largest"]["difference"][:2] == (float("inf"), [1])
