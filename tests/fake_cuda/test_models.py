"""Whole models on the fake device: their records are those of the CPU, and the checks say the same of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from pytest_modelprobe import ModelProbe, Watch, assert_same_behavior, checks

pytestmark = pytest.mark.cuda
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2))


def cnn() -> nn.Module:
    head = nn.Sequential(nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(), nn.Linear(128, 5))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), head)


def lstm() -> nn.Module:
    return nn.LSTM(6, 8, 2, batch_first=True)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, enable_nested_tensor=False)


def bert() -> nn.Module:
    return BertModel(BertConfig(vocab_size=100, **SIZES))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(vocab_size=100, num_key_value_heads=2, **SIZES))


def ids(probe: ModelProbe) -> torch.Tensor:
    return probe.randint(0, 100, (2, 8))


MODELS: dict[Callable[[], nn.Module], Callable[[ModelProbe], torch.Tensor]] = {
    mlp: lambda probe: probe.randn(4, 6),
    cnn: lambda probe: probe.randn(4, 3, 8, 8),
    lstm: lambda probe: probe.randn(4, 5, 6),
    encoder: lambda probe: probe.randn(2, 5, 8),
    bert: ids,
    llama: ids,
}


@pytest.mark.parametrize("make", MODELS)
def test_a_run_records_what_it_does_on_the_cpu(make: Callable[[], nn.Module]) -> None:
    records = []
    for device in ("cuda:1", "cpu"):
        probe = ModelProbe(device=device, seed=0)
        records.append(probe.run(probe.build(make).eval(), MODELS[make](probe), loss="random"))
    assert_same_behavior(*records)


@pytest.mark.parametrize("make", MODELS)
def test_the_checks_say_of_a_model_what_they_say_on_the_cpu(make: Callable[[], nn.Module]) -> None:
    found = []
    for device in ("cuda", "cpu"):
        probe = ModelProbe(device=device, seed=0)
        outcomes = checks.standard(probe, probe.build(make), MODELS[make](probe))
        found.append({outcome.check: outcome.verdict for outcome in outcomes})
    assert found[0] == found[1]


def trained(device: str) -> Watch:
    """Return a watch of a training with accumulation, clipping, a scaler and a fused optimizer."""
    probe = ModelProbe(device=device, seed=0)
    model = probe.build(cnn).eval()  # dropout would draw other numbers
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-2, fused=True), torch.amp.GradScaler(device, 8.0)
    with probe.watch(model, steps=2) as watch:
        for _ in range(4):
            for _ in range(2):
                scaler.scale(model(probe.randn(4, 3, 8, 8)).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return watch


def test_training_is_watched_as_on_the_cpu() -> None:
    there, here = trained("cuda"), trained("cpu")
    assert (there.record.backwards, len(there.steps)) == (here.record.backwards, len(here.steps)) == (8, 2)
    assert_same_behavior(there, here)


class OnTwo(nn.Module):
    """One layer on each device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8).to("cuda:0"), nn.Linear(8, 2).to("cuda:1")
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.second(self.first(x).to("cuda:1")))


def test_a_model_on_two_devices_is_watched() -> None:
    model = OnTwo()
    with ModelProbe(device="cuda", seed=0).watch(model) as watch:
        model(torch.ones(4, 6, device="cuda:0")).sum().backward()
    calls = {name: layer.calls[0] for name, layer in watch.record.layers.items() if name}
    assert [calls[name].outputs[0].device for name in ("first", "second")] == ["cuda:0", "cuda:1"]


def test_draws_of_another_device_are_seen() -> None:
    model = OnTwo()
    with ModelProbe(device="cuda", seed=0).watch(model) as watch:
        model(torch.ones(4, 6, device="cuda:0"))
    assert watch.record.layers["dropout"].calls[0].random is not None


def test_the_snapshots_of_the_examples_are_those_of_the_cpu(pytester: pytest.Pytester) -> None:
    examples = Path(__file__).parents[2] / "examples"
    for path in (examples / "__modelprobe__" / "test_snapshots").iterdir():
        text = path.read_text("utf-8").replace('"device": "cpu"', '"device": "cuda"')
        name = path.name.replace(".probe.json", ".cuda.probe.json")
        there = pytester.path / "__modelprobe__" / "test_snapshots" / name
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_text(text, "utf-8")
    shutil.copy(examples / "test_snapshots.py", pytester.path)
    pytester.runpytest("--modelprobe-device=cuda").assert_outcomes(passed=9)
