"""The architecture of a Llama with 70 billion parameters, in a few seconds and without its 141 GB of weights.

The model is built on the meta device, where tensors have a shape but no contents. `modelprobe.architecture` runs one
forward on fake tensors.
"""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pytest_modelprobe import assert_called, assert_dtypes, assert_shapes

PARAMETERS = 70_553_706_496
LAYERS = 80


@pytest.fixture(scope="module")
def llama():
    """Llama 3 70B, made from the numbers in its config."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=LAYERS,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500_000.0,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


@pytest.fixture(scope="module")
def record(llama, modelprobe_factory):
    """The architecture in a forward of two texts of 4096 tokens."""
    return modelprobe_factory().architecture(llama, torch.empty(2, 4096, dtype=torch.int64), use_cache=False)


def test_it_has_70_billion_parameters(record):
    assert sum(math.prod(p.shape) for layer in record.layers.values() for p in layer.parameters) == PARAMETERS


def test_it_has_80_decoder_layers_each_called_once(record):
    decoder_layers = [layer for layer in record.layers.values() if layer.type_name == "LlamaDecoderLayer"]
    assert len(decoder_layers) == LAYERS
    assert_called(record, "model.layers.*", per_forward=1)
    print("", record.table("model.layers.0.**"), "", sep="\n")


def test_eight_heads_of_keys_and_values_serve_64_of_queries(record):
    assert_shapes(
        record,
        {
            "model.layers.*.self_attn.q_proj": "batch seq 8192",
            "model.layers.*.self_attn.k_proj": "batch seq 1024",
            "model.layers.*.self_attn.v_proj": "batch seq 1024",
            "model.layers.*.mlp.up_proj": "batch seq 28672",
            "model.layers.*": "batch seq 8192",
            "lm_head": "batch seq 128256",
        },
        dims={"batch": 2, "seq": 4096},
    )


def test_every_layer_gives_out_bfloat16(record):
    assert_dtypes(record, torch.bfloat16)
