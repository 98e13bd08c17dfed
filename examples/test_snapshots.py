"""Snapshots: what each layer of these models computes is kept beside this file and reviewed with each change.

Try it: change ``layer_norm_epsilon`` below, run this file, and read which layers the failure names.
"""

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from pytest_modelprobe import assert_same_behavior

GPT2 = GPT2Config(
    n_layer=4, n_embd=64, n_head=4, vocab_size=200, bos_token_id=0, eos_token_id=0, layer_norm_epsilon=1e-5
)
MIXTRAL = MixtralConfig(
    num_hidden_layers=2,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    vocab_size=200,
)
MAMBA = MambaConfig(num_hidden_layers=2, hidden_size=64, state_size=8, vocab_size=200)


class Digits(nn.Module):
    """A small convolutional network with BatchNorm and a residual."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv, self.norm2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 10)

    def forward(self, x):
        x = torch.relu(self.norm1(self.stem(x)))
        x = torch.relu(x + self.norm2(self.conv(x)))
        return self.head(self.pool(x).flatten(1))


def test_gpt2(modelprobe, modelprobe_snapshot):
    model = modelprobe.build(lambda: GPT2LMHeadModel(GPT2)).eval()
    ids = modelprobe.randint(0, 200, (2, 16))
    assert modelprobe.run(model, ids, loss="random", use_cache=False) == modelprobe_snapshot


def test_mixture_of_experts(modelprobe, modelprobe_snapshot):
    model = modelprobe.build(lambda: MixtralForCausalLM(MIXTRAL)).eval()
    ids = modelprobe.randint(0, 200, (2, 16))
    assert modelprobe.run(model, ids, loss="random", use_cache=False) == modelprobe_snapshot


def test_mamba(modelprobe, modelprobe_snapshot):
    model = modelprobe.build(lambda: MambaForCausalLM(MAMBA)).eval()
    ids = modelprobe.randint(0, 200, (2, 16))
    assert modelprobe.run(model, ids, loss="random", use_cache=False) == modelprobe_snapshot


def test_digits_in_training(modelprobe, modelprobe_snapshot):
    model = modelprobe.build(Digits).train()
    assert modelprobe.run(model, modelprobe.randn(8, 1, 8, 8), loss="random") == modelprobe_snapshot


@pytest.mark.parametrize(
    ("factory", "config"),
    [(GPT2LMHeadModel, GPT2), (MixtralForCausalLM, MIXTRAL), (MambaForCausalLM, MAMBA)],
    ids=["gpt2", "mixtral", "mamba"],
)
def test_architecture(modelprobe, modelprobe_snapshot, factory, config):
    """Only the structure, on the meta device: no weights are made."""
    with torch.device("meta"):
        model = factory(config)
    ids = torch.empty(2, 16, dtype=torch.int64)
    assert modelprobe.architecture(model, ids, use_cache=False) == modelprobe_snapshot


def test_a_changed_epsilon_is_named(modelprobe):
    model, changed = modelprobe.build(Digits).eval(), modelprobe.build(Digits).eval()
    changed.norm2.eps = 1e-3
    x = modelprobe.randn(8, 1, 8, 8)
    with pytest.raises(AssertionError) as failure:
        assert_same_behavior(modelprobe.run(changed, x), modelprobe.run(model, x))
    print("", failure.value, "", sep="\n")
    assert str(failure.value).startswith("norm2.eps 1e-05 → 0.001: its output changed by 0.03")


def test_a_port_does_what_its_reference_does(modelprobe):
    """The same layers with different names, called by different code."""
    reference = modelprobe.build(Digits).eval()
    port = nn.ModuleDict(dict(reference.named_children()))
    x = modelprobe.randn(8, 1, 8, 8)

    class Port(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = port

        def forward(self, x):
            x = self.net["norm1"](self.net["stem"](x)).relu()
            x = (self.net["norm2"](self.net["conv"](x)) + x).relu()
            return self.net["head"](self.net["pool"](x).flatten(1))

    assert_same_behavior(
        modelprobe.run(Port(), x), modelprobe.run(reference, x), rename={"net.*": "*"}, structure=False
    )
