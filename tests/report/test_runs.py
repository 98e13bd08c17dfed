"""A record as a report shows it: what is wrong with each layer, and which call feeds which."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.comparison import compare, diagnose
from pytest_modelprobe.record import (
    Call,
    Layer,
    Parameter,
    Reading,
    Record,
    Statistics,
    Units,
    Value,
)
from pytest_modelprobe.report.results import CaseResult, Flow, Results, Run, UnitCounts
from pytest_modelprobe.report.runs import MOST_CALLS, Known, Observed, run_of, runs_of, update_ratio


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
    return run_of(Observed("Net", "run", record))


# --- what is wrong ----------------------------------------------------------------------------------------------------


def test_layers_stand_in_order_of_execution_and_those_not_called_last() -> None:
    assert list(shown(net()).record.layers) == ["norm", "head", "(root)", "spare"]


def test_an_input_that_code_made_is_said_to_come_after_the_call_before() -> None:
    assert shown(net()).flow == (Flow(layer="norm"), Flow(layer="head", after=0), Flow(layer="(root)"))


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
    observed = [Observed("a", "run", first), Observed("b", "watch", second)]
    runs = runs_of(observed, [Known(second, None, net()), Known(other)])
    assert [(run.name, run.kind, bool(run.before)) for run in runs] == [
        ("a", "run", False), ("b", "watch", True), ("Net", "run", False),
    ]  # fmt: skip


def test_a_record_that_cannot_be_shown_is_an_error_of_its_run_alone() -> None:
    broken = Record(model="Net", layers={"a": Layer(name="a", type="A", calls=(None,))})  # type: ignore[arg-type]
    runs = runs_of([Observed("a", "run", broken), Observed("b", "run", net()), Observed("c", "watch", None, "no")], [])
    assert [run.error is None for run in runs] == [False, True, False]
    assert runs[2].error == "no"


def test_a_parameter_that_is_not_finite_has_no_update_ratio() -> None:
    good, bad = (Reading(statistics=Statistics(count=2, nan=n, mean=1.0), fingerprint=(1.0,) * 16) for n in (0, 1))
    weight = Parameter(name="weight", shape=(2,), dtype="float32", device="cpu", reading=good, update=bad)
    assert update_ratio(Layer(name="fc", type="Linear", parameters=(weight,))) is None


# --- which call feeds which -------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers by name, and the forward that a test writes."""

    def __init__(self, forward: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._forward(self, *inputs)


def fc() -> nn.Module:
    return nn.Linear(8, 8)


def flow(model: nn.Module, *inputs: Tensor) -> list[str]:
    """Return the calls, each with the calls that feed it, or after which code made its input."""
    calls = run_of(Observed("Net", "run", ModelProbe().run(model, *(inputs or (torch.randn(4, 8),))))).flow

    def name(call: Flow) -> str:
        more = f" and {call.more} more" if call.more else ""
        return f"{call.layer}#{call.call}{more}" if call.call > 1 else call.layer

    lines = []
    for call in calls:
        known = [name(calls[i]) for i in call.sources]
        guess = [] if call.after is None else [f"after {name(calls[call.after])}"]
        lines.append(f"{name(call)}: {', '.join(known + guess)}".rstrip(": "))
    return lines


def attention(net: Net, x: Tensor) -> Tensor:
    return torch.softmax(net.q(x) @ net.k(x).mT, -1) @ net.v(x)


def test_layers_that_take_the_input_of_their_module_come_after_none() -> None:
    inner = Net(attention, q=fc(), k=fc(), v=fc())
    model = Net(lambda net, x: net.out(net.inner(net.stem(x) * 2)), stem=fc(), inner=inner, out=fc())
    expected = ["stem", "inner.q", "inner.k", "inner.v", "inner: after stem", "out: inner", "(root)"]
    assert flow(model) == expected


def test_layers_that_take_one_tensor_that_code_made_come_after_the_same_call() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return attention(net, net.stem(x) * 2)

    model = Net(forward, stem=fc(), q=fc(), k=fc(), v=fc())
    assert flow(model) == ["stem", "q: after stem", "k: after stem", "v: after stem", "(root)"]


def test_the_input_of_a_module_in_another_shape_is_its_input() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.a(x.reshape(-1, 8)) + net.b(x.transpose(0, 1).reshape(-1, 8))

    assert flow(Net(forward, a=fc(), b=fc()), torch.randn(2, 3, 8)) == ["a", "b", "(root)"]


def test_a_parameter_comes_after_no_layer() -> None:
    model = Net(lambda net, x: net.a(x) + net.b(net.learned), a=fc(), b=fc())
    model.learned = nn.Parameter(torch.randn(4, 8))
    assert flow(model) == ["a", "b", "(root)"]


def test_what_needs_no_gradient_comes_after_no_layer_whose_output_does() -> None:
    def forward(net: Net, x: Tensor, time: Tensor) -> Tensor:
        h = net.stem(x)
        return h + net.of_time(torch.outer(time, torch.linspace(0, 1, 8)).sin())

    model, inputs = Net(forward, stem=fc(), of_time=fc()), (torch.randn(4, 8), torch.arange(1, 5))
    assert flow(model, *inputs) == ["stem", "of_time", "(root)"]
    model.stem.requires_grad_(False)
    assert flow(model, *inputs) == ["stem", "of_time: after stem", "(root)"]


def test_each_call_of_a_shared_layer_has_its_own_sources() -> None:
    model = Net(lambda net, x: net.out(net.relu(net.b(net.relu(net.a(x))))), a=fc(), relu=nn.ReLU(), b=fc(), out=fc())
    assert flow(model) == ["a", "relu: a", "b: relu", "relu#2: b", "out: relu#2", "(root)"]


def test_of_a_module_that_is_called_again_the_inner_calls_are_told_once() -> None:
    block = nn.Sequential(fc(), nn.Tanh())
    model = Net(lambda net, x: net.head(net.block(net.block(x))), block=block, head=fc())
    expected = ["block.0", "block.1: block.0", "block", "block#2: block", "head: block#2", "(root)"]
    assert flow(model) == expected


def test_the_last_call_that_is_told_apart_stands_for_those_after_it() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        for _ in range(20):
            x = net.cell(x)
        return net.out(x)

    lines = flow(Net(forward, cell=fc(), out=fc()))
    last = f"cell#{MOST_CALLS} and {20 - MOST_CALLS} more"
    assert len(lines) == MOST_CALLS + 2
    assert lines[-3:] == [f"{last}: cell#{MOST_CALLS - 1}", f"out: {last}", "(root)"]


def test_what_a_layer_inside_a_module_takes_from_elsewhere_feeds_the_module() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = fc()

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.kept) + x

    def forward(net: Net, x: Tensor) -> Tensor:
        net.inner.kept = net.stem(x)
        return net.inner(x)

    assert flow(Net(forward, stem=fc(), inner=Inner())) == ["stem", "inner.fc", "inner: stem", "(root)"]


def test_query_key_and_value_of_bert_are_no_chain() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    lines = flow(transformers.BertModel(config).eval(), torch.randint(16, (2, 4)))
    within = [line.removeprefix("encoder.layer.0.") for line in lines if ".attention." in line]
    assert within == [
        "attention.self.query", "attention.self.key", "attention.self.value", "attention.self",
        "attention.output.dense",
        "attention.output.dropout: encoder.layer.0.attention.output.dense",
        "attention.output.LayerNorm: after encoder.layer.0.attention.output.dropout",
        "attention.output: encoder.layer.0.attention.self",
    ]  # fmt: skip
