"""Twelve small models × three dtypes × three losses, each compared with its snapshot."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import transformers as t
from torch import nn

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS = {**SMALL, "vocab_size": 200}
EXPERTS = {**WORDS, "num_key_value_heads": 2, "num_local_experts": 4, "experts_implementation": "eager"}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 200}
GPT2 |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


class Normed(nn.Module):
    """Whatever a model returns, normalized: a sum of squares of that is constant."""

    def __init__(self, body: nn.Module, features: int) -> None:
        super().__init__()
        self.body, self.norm = body, nn.LayerNorm(features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.body(x)
        for name in ("logits", "last_hidden_state"):
            out = getattr(out, name, out)
        return self.norm(out[0] if isinstance(out, tuple) else out)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))


def conv() -> nn.Module:
    layers: list[nn.Module] = []
    for i, o in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 16))


def resnet() -> nn.Module:
    config = t.ResNetConfig(depths=[1, 1, 1, 1], hidden_sizes=[32, 32, 64, 64], embedding_size=16, num_labels=16)
    return t.ResNetForImageClassification(config)


def convnext() -> nn.Module:
    config = t.ConvNextConfig(depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 32, 64], num_labels=16)
    return t.ConvNextForImageClassification(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "mlp": (mlp, 16, "vectors"),
    "conv": (conv, 16, "pixels"),
    "resnet": (resnet, 16, "pixels"),
    "convnext": (convnext, 16, "pixels"),
    "lstm": (lambda: nn.LSTM(32, 48, num_layers=2, batch_first=True), 48, "sequences"),
    "encoder": (lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 32, "sequences"),
    "vit": (lambda: t.ViTModel(t.ViTConfig(**SMALL, **NO_DROPOUT, image_size=32, patch_size=8)), 64, "pixels"),
    "bert": (lambda: t.BertModel(t.BertConfig(**WORDS, **NO_DROPOUT), add_pooling_layer=False), 64, "words"),
    "gpt2": (lambda: t.GPT2LMHeadModel(t.GPT2Config(**GPT2)), 200, "words"),
    "llama": (lambda: t.LlamaForCausalLM(t.LlamaConfig(**WORDS)), 200, "words"),
    "mixtral": (lambda: t.MixtralForCausalLM(t.MixtralConfig(**EXPERTS)), 200, "words"),
    "rwkv": (lambda: t.RwkvForCausalLM(t.RwkvConfig(**WORDS, attention_hidden_size=64)), 200, "words"),
}
"""Name → the model, its features, what it is given."""

LOSSES = {
    "random": "random",
    "square": lambda out: out.pow(2).mean(),
    "softmax": lambda out: out.softmax(-1).mean(),
}
"""The last two are constant: behind a LayerNorm, and whatever the numbers are. Their gradients are rounding."""

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@pytest.fixture(autouse=True)
def environment():
    """Compute as the variable of the environment says."""
    setting = os.environ.get("ENVIRONMENT", "")
    if setting == "no oneDNN":
        torch.backends.mkldnn.enabled = False
    if setting.endswith(" threads"):
        torch.set_num_threads(int(setting.split()[0]))
    torch.use_deterministic_algorithms(setting == "deterministic")


def given(probe, kind: str):
    if kind == "words":
        return probe.randint(0, 200, (2, 24))
    return probe.randn(*{"vectors": (8, 32), "pixels": (4, 3, 32, 32), "sequences": (4, 12, 32)}[kind])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_model(modelprobe, modelprobe_snapshot, name, dtype, loss):
    factory, features, kind = MODELS[name]
    model = modelprobe.build(lambda: Normed(factory(), features)).to(DTYPES[dtype])
    x = given(modelprobe, kind)
    x = x if kind == "words" else x.to(DTYPES[dtype])
    if os.environ.get("ENVIRONMENT") == "channels_last" and kind == "pixels":
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    assert modelprobe.run(model, x, loss=LOSSES[loss]) == modelprobe_snapshot
