"""Whether a compiled or exported model computes the same, and which layer does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_modelprobe import checks

OLD = not hasattr(torch.compiler, "is_exporting")
"""Whether torch is 2.6."""


class Layer(nn.Module):
    """Whatever a function does, as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def between(function):
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Layer(function), nn.Linear(6, 6), nn.Linear(6, 3))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.act, self.head = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.act(self.fc(x)))


def without_relu(graph, inputs):
    for node in graph.graph.nodes:
        if node.target is nn.functional.relu:
            node.target, node.args, node.kwargs = torch.neg, node.args[:1], {}
    graph.recompile()
    return graph


@pytest.mark.skipif(OLD, reason="torch 2.6 makes no program of what layers return")
def test_the_first_layer_that_a_compiler_computes_otherwise_is_named(modelprobe):
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    assert checks.compile_parity(modelprobe, model, modelprobe.randn(5, 6)).text == "1 output, 4 parameters"
    found = checks.compile_parity.outcome(modelprobe, model, torch.ones(5, 6), backend=without_relu)
    assert found.text.startswith("""\
act returns another output when compiled: changed by 200 %

tensor          changed by
act output      200 %
head output     191 %
(root) output   191 %
""")


class Shared(Net):
    """Calls a layer twice, on what its own code computes."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout()

    def forward(self, x):
        x = self.drop(self.fc(x) + x)
        return self.head(self.act(self.drop(x * 2)))


@pytest.mark.skipif(OLD, reason="torch 2.6 makes no program of what layers return")
def test_what_a_layer_takes_in_two_calls_is_told_apart(modelprobe):
    model = modelprobe.build(Shared)
    found = checks.compile_parity.outcome(modelprobe, model, modelprobe.randn(5, 6), backend=without_relu)
    assert found.text.startswith("act returns another output when compiled: ")


def test_a_gradient_that_the_compiler_alone_cuts_off_is_named(modelprobe):
    model = between(lambda x: x.detach() if torch.compiler.is_compiling() else x)
    assert checks.compile_parity.outcome(modelprobe, model, modelprobe.randn(5, 6), backend="eager").layer == "0.weight"


def test_an_error_below_the_rounding_of_half_precision_is_named(modelprobe):
    model = between(lambda x: x * 1.003 if torch.compiler.is_compiling() else x).bfloat16()
    assert checks.compile_parity.outcome(modelprobe, model, modelprobe.randn(5, 6).bfloat16()).layer == "2"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


class Casting(nn.Module):
    """Casts what meets its weights, and holds a tensor that is not registered."""

    def __init__(self):
        super().__init__()
        self.fc, self.factor = nn.Linear(6, 6), torch.ones(6, dtype=torch.bfloat16)

    def forward(self, x):
        return self.fc(x.to(torch.bfloat16) * self.factor)


def test_a_model_that_is_made_for_half_precision_is_checked(modelprobe):
    model = nn.Sequential(Casting(), nn.ReLU()).bfloat16()
    assert checks.compile_parity(modelprobe, model, modelprobe.randn(5, 6).bfloat16())


def test_control_flow_on_contents_cannot_be_exported(modelprobe):
    model = between(lambda x: x if x.sum() > 0 else -x)
    found = checks.export_parity.outcome(modelprobe, model, modelprobe.randn(5, 6))
    assert found.text.startswith("(root) cannot be exported: ")


class Odd(nn.Module):
    """Computes something else when it is exported."""

    def forward(self, x):
        return x if torch.compiler.is_exporting() else x * 2


@pytest.mark.skipif(OLD, reason="torch 2.6 makes no program of what layers return")
def test_the_first_layer_that_an_export_computes_otherwise_is_named(modelprobe):
    model = nn.Sequential(nn.Linear(6, 6), Odd(), nn.ReLU(inplace=True), nn.Linear(6, 2))
    found = checks.export_parity.outcome(modelprobe, model, modelprobe.randn(4, 6))
    assert found.text.startswith("layer '1' (Odd) returns another output when exported: changed by ")


def test_a_model_that_is_another_one_or_none_when_exported_comes_with_a_next_step(modelprobe):
    model = between(lambda x: x * (1 + torch.compiler.is_compiling()))  # older versions of torch refuse to export it
    found = checks.export_parity.outcome(modelprobe, model, modelprobe.randn(2, 6))
    assert found.verdict == "broken"
    assert "Look for co" in found.text
