"""The first operation that differs, where a compiled or exported model computes something else."""

from __future__ import annotations

import operator
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pytest_modelprobe import checks

transformers = pytest.importorskip("transformers")
aten = torch.ops.aten
LONG = pytest.mark.long


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)
        self.up, self.down, self.act = nn.Linear(8, 16), nn.Linear(16, 8), nn.GELU()

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2)
        weights = F.softmax(scores / 8**0.5, dim=-1)
        x = x + self.out(weights @ v)
        return x + self.down(self.act(self.up(self.norm(x))))


def edited(graph, target, edit):
    """Edit the first node that calls an operation, if there is one."""
    for node in [node for node in graph.graph.nodes if node.target == target][:1]:
        edit(node)
    graph.recompile()
    return graph


def given(*args, **kwargs):
    """Call the operation with other arguments behind the first."""

    def edit(node):
        node.args, node.kwargs = (*node.args[:1], *args), {**node.kwargs, **kwargs}

    return edit


def replaced_by(target):
    def edit(node):
        node.target = target

    return edit


def dropped(node):
    node.replace_all_uses_with(node.args[0])
    node.graph.erase_node(node)


def without_bias(node):
    node.args = node.args[:2]


def another_eps(node):
    node.args = (*node.args[:4], 1e-2)


def found_in(outcome):
    """Return what is said of the first operation, with its line in the forward of the block."""
    found = re.search(r"First operation that differs: (.*?)\. [A-Z]", outcome.text)
    first = Block.forward.__code__.co_firstlineno
    return found and re.sub(r"test_operations\.py:(\d+)", lambda at: f"+{int(at[1]) - first}", found[1])


@pytest.mark.parametrize(
    ("target", "edit", "said"),
    [
        (F.softmax, given(dim=1), "torch.nn.functional.softmax(dim=-1) at +3"),
        (F.gelu, given(approximate="tanh"), "torch.nn.functional.gelu(approximate='none') at +5"),
        (operator.add, dropped, "torch.Tensor.add at +4"),
        pytest.param(operator.truediv, replaced_by(operator.mul), "torch.Tensor.div(2.82843) at +3", marks=LONG),
        pytest.param(F.layer_norm, another_eps, "torch.nn.functional.layer_norm(8) at +5", marks=LONG),
        pytest.param(F.linear, without_bias, "torch.nn.functional.linear at +1", marks=LONG),
    ],
)
def test_the_operation_that_a_backend_computes_otherwise_is_named(modelprobe, target, edit, said):
    def backend(graph, inputs):
        return edited(graph, target, edit)

    x = modelprobe.randn(4, 4, 8)
    found = checks.compile_parity.outcome(modelprobe, modelprobe.build(Block), x, backend=backend, tolerance=1e-5)
    assert found_in(found) == f"{said}, as the backend computes it"
    assert "look for another version of the backend" in found.text


@pytest.mark.parametrize(
    ("target", "edit", "said"),
    [
        (
            aten.softmax.int,
            given(1),
            "aten._softmax.default(1, False) at +3, not aten._softmax.default(-1, False) at +3",
        ),
        (aten.gelu.default, given(approximate="tanh"), "aten.gelu.default(approximate='tanh') at +5, not aten.gelu"),
        (aten.add.Tensor, dropped, "aten.add.Tensor at +4, which is missing"),
        (aten.add.Tensor, replaced_by(aten.sub.Tensor), "aten.sub.Tensor at +4, not aten.add.Tensor at +4"),
        (aten.layer_norm.default, another_eps, "aten.native_layer_norm.default(8, 0.01) at +5, not aten.native"),
        (aten.div.Tensor, replaced_by(aten.mul.Tensor), "aten.mul.Tensor(2.82843) at +3, not aten.div.Tensor(2.82843)"),
    ],
)
def test_the_operation_that_is_another_one_in_an_exported_program_is_named(modelprobe, monkeypatch, target, edit, said):
    def export(*args, **options):
        program = exported(*args, **options)
        edited(program.graph_module, target, edit)
        return program

    exported = torch.export.export
    monkeypatch.setattr(torch.export, "export", export)
    x = modelprobe.randn(4, 4, 8)
    found = checks.export_parity.outcome(modelprobe, modelprobe.build(Block), x, tolerance=1e-5)
    assert found_in(found).startswith(said)


class Breaking(Block):
    def forward(self, x):
        y = super().forward(x)
        torch._dynamo.graph_break()
        return super().forward(y.relu_()) * (1.01 if torch.compiler.is_compiling() else 1)


@pytest.mark.parametrize(
    ("target", "operation"), [("relu_", r"torch\.Tensor\.relu_ at test_operations\.py:\d+, as"), ("none", None)]
)
def test_of_several_graphs_the_one_that_differs_is_looked_at(modelprobe, target, operation):
    def backend(graph, inputs):
        return edited(graph, target, replaced_by("sigmoid_"))

    x = modelprobe.randn(4, 4, 8)
    found = checks.compile_parity.outcome(modelprobe, modelprobe.build(Breaking), x, backend=backend)
    assert found.verdict == "broken"
    said = re.search("First operation that differs: (.*)", found.text)
    assert said is None if operation is None else re.match(operation, said[1])


class Branch(Block):
    def forward(self, x):
        y = super().forward(x)
        return y * 1.01 if torch.compiler.is_compiling() else y


def test_code_that_depends_on_the_compiler_is_named(modelprobe):
    model, x = modelprobe.build(Branch), modelprobe.randn(4, 4, 8)
    line = Branch.forward.__code__.co_firstlineno + 2 - Block.forward.__code__.co_firstlineno
    compiled = checks.compile_parity.outcome(modelprobe, model, x)
    assert found_in(compiled) == f"torch.Tensor.mul(1.01) at +{line}, which is new"
    assert compiled.text.endswith("which a graph omits.")
    exported = checks.export_parity.outcome(modelprobe, model, x)
    assert found_in(exported) == f"aten.mul.Tensor(1.01) at +{line}, which is new"


def fused(graph, inputs):
    """Compute what the graph does by other operations: a division is a product."""
    for node in graph.graph.nodes:
        if node.target is operator.truediv:
            node.target, node.args = operator.mul, (node.args[0], 1 / node.args[1])
    graph.recompile()
    return graph


@pytest.mark.parametrize("backend", ["aot_eager", "eager", fused])
def test_of_a_model_that_computes_the_same_nothing_is_said(modelprobe, backend):
    x = modelprobe.randn(4, 4, 8)
    assert checks.compile_parity(modelprobe, modelprobe.build(Block), x, backend=backend, tolerance=1e-5)


class Cancelling(nn.Module):
    """Returns a rounding error alone."""

    def forward(self, x):
        return x / 3 * 3 - x


def test_rounding_that_grows_is_no_operation_that_differs(modelprobe):
    model = nn.Sequential(nn.Linear(8, 8), Cancelling())
    found = checks.compile_parity.outcome(modelprobe, model, modelprobe.randn(4, 8), backend=fused)
    assert found.verdict == "broken"
    assert "First operation" not in found.text


def test_an_operation_of_a_transformer_is_named(modelprobe):
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.BertConfig(**size, initializer_range=0.5, attn_implementation="eager")
    model = modelprobe.build(lambda: transformers.BertModel(config))

    def backend(graph, inputs):
        return edited(graph, F.softmax, given(dim=-2))

    ids = modelprobe.randint(0, 100, (2, 7))
    found = checks.compile_parity.outcome(modelprobe, model, ids, backend=backend)
    operation = r"torch\.nn\.functional\.softmax\(dim=-1\) at modeling_bert\.py:\d+, as the backend computes it"
    assert re.search(f"First operation that differs: {operation}", found.text)
