"""Which call feeds which, of real models: what is recorded, and where no guess may start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.report.results import run_data
from pytest_modelprobe.report.results.dataflow import MOST_CALLS


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
    calls = run_data(ModelProbe().run(model, *(inputs or (torch.randn(4, 8),))))["flow"]

    def name(call: dict[str, Any]) -> str:
        more = f" and {call['more']} more" if call["more"] else ""
        return f"{call['layer']}#{call['call']}{more}" if call["call"] > 1 else call["layer"]

    lines = []
    for call in calls:
        known = [name(calls[i]) for i in call["from"]]
        guess = [] if call["after"] is None else [f"after {name(calls[call['after']])}"]
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
