"""Graph breaks as attributes of a recorded architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from pytest_modelprobe import ModelProbe, Record
from pytest_modelprobe.comparison import diagnose
from pytest_modelprobe.comparison.compare import compare
from pytest_modelprobe.comparison.text import first_line
from pytest_modelprobe.gate.classes import class_of

OLD = not hasattr(torch.compiler, "is_exporting")
"""Whether torch is 2.6."""

CONFIG = LlamaConfig(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=32, use_cache=False
)


def compiled_llama() -> Record:
    probe = ModelProbe()
    model = probe.build(lambda: LlamaForCausalLM(CONFIG))
    return probe.architecture(model, probe.randint(0, 32, (2, 7)), compiled=True)


def told(record: Record) -> dict[str, str]:
    """Return what is said of the layers that break the graph."""
    found = {name: str(layer.attributes.get("graph_breaks", "none")) for name, layer in record.layers.items()}
    return {name: text for name, text in found.items() if text != "none"}


@pytest.mark.skipif(OLD, reason="torch 2.6 breaks the graph of a model of transformers 5")
def test_a_graph_break_is_a_change_of_the_structure_of_the_first_layer_with_its_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = LlamaAttention.forward

    def printing(self: LlamaAttention, hidden_states: Tensor, **given: Any) -> Any:
        print("scale", hidden_states.std())
        return forward(self, hidden_states, **given)

    before = compiled_llama()
    assert not told(before)
    monkeypatch.setattr(LlamaAttention, "forward", printing)
    diagnosis = diagnose(compare(compiled_llama(), before))
    (cause,) = diagnosis.causes
    assert first_line(diagnosis).startswith(
        'model.layers.0.self_attn.graph_breaks none → printing: print("scale", hidd…'
    )
    assert class_of(cause, diagnosis) == "structure"


@pytest.mark.skipif(OLD, reason="torch 2.6 breaks the graph of a model of transformers 5")
def test_a_break_in_a_method_is_told_of_the_layer_that_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaAttention.forward

    def clipped(x: Tensor) -> Tensor:
        return x / 2 if x.abs().max().item() > 100 else x

    def clipping(self: LlamaAttention, hidden_states: Tensor, **given: Any) -> Any:
        return forward(self, clipped(hidden_states), **given)

    monkeypatch.setattr(LlamaAttention, "forward", clipping)
    ((layer, text),) = told(compiled_llama()).items()
    assert layer == "model.layers.0.self_attn"
    line, _, reason = text.rpartition(" else x: ")
    assert line == "clipped: return x / 2 if x.abs().max().item() > 100"
    assert "item" in reason


def test_a_compiled_forward_leaves_the_model_and_its_inputs_as_they_were() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.calls = nn.BatchNorm1d(3), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.norm(x.add_(1))

    model, x = Counting(), torch.zeros(4, 3)
    attributes = set(vars(model))
    assert ModelProbe().architecture(model, x, compiled=True).layers["(root)"].attributes["graph_breaks"] == "none"
    assert set(vars(model)) == attributes  # torch.compile adds one
    assert (model.calls, int(model.norm.num_batches_tracked), x.sum()) == (0, 0, 0)


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
            if x.sum() > 0:
                x = x * 2
        return x


def test_a_break_in_a_loop_is_told_though_torch_skips_the_loop() -> None:
    probe = ModelProbe()
    model, x = probe.build(Doubling), probe.randn(2, 3)
    ((layer, text),) = told(probe.architecture(model, x, compiled=True)).items()
    assert layer == "(root)"
    assert text.startswith("forward: if x.sum() > 0: ")


def test_a_number_read_from_a_tensor_breaks_the_graph_though_a_full_graph_may_have_it() -> None:
    class Scaling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

    (text,) = told(ModelProbe().architecture(Scaling(), torch.ones(2), compiled=True)).values()
    assert text.startswith("forward: return x * x.sum().item(): ")
