"""A record as a report shows it: its layers in the order of execution, and what is wrong with each."""

from __future__ import annotations

import enum
import json
from typing import Any

import pytest
import torch
from torch import nn

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.comparison import compare, diagnose
from pytest_modelprobe.record import (
    Call,
    Layer,
    NamedRecord,
    Parameter,
    Reading,
    Record,
    Statistics,
    Units,
    Value,
)
from pytest_modelprobe.report.results import CaseResult, Results, Run, UnitCounts
from pytest_modelprobe.report.runs import Known, run_of, runs_of, update_ratio


def value(path: str, tensor: int, mean: float = 0.5, source: str | None = None, **more: Any) -> Value:
    statistics = Statistics(count=8, min=mean - 1, max=mean + 1, mean=mean, deviations=8.0)
    reading = Reading(statistics=statistics, fingerprint=(mean, *[0.0] * 15), **more)
    return Value(path=path, shape=(2, 4), dtype="float32", device="cpu", tensor=tensor, forward=reading, source=source)


def call(started: int, finished: int, entered: Value, left: Value, **more: Any) -> Call:
    return Call(
        root="(root)", root_training=False, index=0, started=started, finished=finished, inputs=(entered,),
        outputs=(left,), **more,
    )  # fmt: skip


def net(mean: float = 0.5, eps: float = 1e-5) -> Record:
    """A record of ``head(norm(x) + x)``, with a layer that is not called."""
    weight = Parameter(name="weight", shape=(4, 4), dtype="float32", device="cpu", requires_grad=True)
    layers = [
        Layer(name="(root)", type="models.Net", leaf=False, calls=(call(0, 5, value("input", 0), value("output", 3)),)),
        Layer(name="head", type="torch.nn.modules.linear.Linear", parameters=(weight,),
              calls=(call(3, 4, value("input", 2, 1.0), value("output", 3)),)),
        Layer(name="norm", type="torch.nn.modules.normalization.LayerNorm", attributes={"eps": eps},
              calls=(call(1, 2, value("input", 0), value("output", 1, mean)),)),
        Layer(name="spare", type="torch.nn.modules.linear.Linear", parameters=(weight,)),
    ]  # fmt: skip
    return Record(model="Net", layers={layer.name: layer for layer in layers}, forwards=1, versions={"torch": "2.13"})


def shown(record: Record) -> Run:
    return run_of(NamedRecord("Net", "run", record))


# --- what is wrong ----------------------------------------------------------------------------------------------------


def test_layers_stand_in_order_of_execution_and_those_not_called_last() -> None:
    assert list(shown(net()).record.layers) == ["norm", "head", "(root)", "spare"]


def test_a_changed_attribute_is_structure_and_what_follows_has_moved() -> None:
    expected, record = net(), net(mean=0.7, eps=1e-3)
    (run,) = runs_of([], [Known(record, diagnose(compare(record, expected)), expected)])
    assert (run.name, run.status["norm"], run.status["spare"]) == ("Net", ("structure",), ("not called",))
    assert (run.before["norm"].mean, run.before["norm"].std) == (0.5, 1.0)


def test_a_layer_has_its_dead_and_saturated_units() -> None:
    flat = value("output", 1, units=Units(axis=-1, low=(0.99, 0.0, 0.0), high=(1.0, 0.0, 0.5)))
    layer = Layer(name="act", type="Tanh", calls=(call(0, 1, value("input", 0), flat),))
    run = shown(Record(model="Net", layers={"act": layer}, forwards=1))
    assert run.units == {"act": UnitCounts(count=3, dead=1, saturated=1)}


class Mode(enum.IntEnum):
    SAME = 2


def test_whatever_is_in_a_record_can_be_written_and_read() -> None:
    name = "fc\ud800<b>\x1b[31m"
    attributes = {"mode": Mode.SAME, "limit": float("inf"), "text": name}
    run = shown(Record(model=name, layers={name: Layer(name=name, type="a.B", attributes=attributes)}))
    results = Results(tests=(CaseResult(id=name, outcome="passed", file=name, runs=(run,)),))
    text = results.to_json()
    assert text.isascii()
    read = Results.from_dict(json.loads(text, parse_constant=pytest.fail))
    assert read == results
    assert type(read.tests[0].runs[0].record[name].attributes["mode"]) is int


def test_a_record_has_what_is_shown_and_not_what_only_a_comparison_needs() -> None:
    record = ModelProbe().run(nn.Sequential(nn.Linear(4, 64), nn.Tanh()), torch.ones(2, 4), loss="random")
    layer = shown(record).record["0"]
    assert layer.output.forward.statistics == record["0"].output.forward.statistics
    assert (layer.output.forward.fingerprint, layer.output.forward.units) == (None, None)
    assert layer.parameters[0].gradient.statistics == record["0"].parameters[0].gradient.statistics


def test_a_comparison_is_of_the_run_whose_record_it_was_given() -> None:
    first, second, other = net(), net(0.6), net(0.7)
    observed = [NamedRecord("a", "run", first), NamedRecord("b", "watch", second)]
    runs = runs_of(observed, [Known(second, None, net()), Known(other)])
    assert [(run.name, run.kind, bool(run.before)) for run in runs] == [
        ("a", "run", False), ("b", "watch", True), ("Net", "run", False),
    ]  # fmt: skip


def test_a_record_that_cannot_be_shown_is_an_error_of_its_run_alone() -> None:
    broken = Record(model="Net", layers={"a": Layer(name="a", type="A", calls=(None,))})  # type: ignore[arg-type]
    runs = runs_of(
        [NamedRecord("a", "run", broken), NamedRecord("b", "run", net()), NamedRecord("c", "watch", None, "no")], []
    )
    assert [run.error is None for run in runs] == [False, True, False]
    assert runs[2].error == "no"


def test_a_parameter_that_is_not_finite_has_no_update_ratio() -> None:
    good, bad = (Reading(statistics=Statistics(count=2, nan=n, mean=1.0), fingerprint=(1.0,) * 16) for n in (0, 1))
    weight = Parameter(name="weight", shape=(2,), dtype="float32", device="cpu", reading=good, update=bad)
    assert update_ratio(Layer(name="fc", type="Linear", parameters=(weight,))) is None
