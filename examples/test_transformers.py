"""Models of `transformers` with random weights, made from a config: forward and backward on a real text and images.

Nothing is downloaded. The text is in this file, and its tokens are its bytes. The images are scikit-learn's digits.
"""

import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

from pytest_modelprobe import (
    assert_all_params_have_grad,
    assert_called,
    assert_dtypes,
    assert_finite,
    assert_grad_finite,
    assert_grad_flow,
    assert_no_dead_layers,
    assert_shapes,
)

TEXT = (
    "Call me Ishmael. Some years ago - never mind how long precisely - having little or no money in my purse, and "
    "nothing particular to interest me on shore, I thought I would sail about a little and see the watery part of "
    "the world. It is a way I have of driving off the spleen and regulating the circulation."
)

# --- GPT-2 --------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpt2(modelprobe):
    config = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=32, n_layer=3, n_head=4, bos_token_id=None, eos_token_id=None
    )
    return modelprobe.build(lambda: GPT2LMHeadModel(config)).eval()


@pytest.fixture
def tokens(modelprobe):
    """The first 256 bytes of the text, in four rows."""
    return torch.tensor(list(TEXT.encode())[:256], device=modelprobe.device).reshape(4, 64)


def test_gpt2_learns_from_text_with_every_parameter(modelprobe, gpt2, tokens):
    def next_token_loss(output):
        return functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    record = modelprobe.run(gpt2, tokens, loss=next_token_loss)
    assert_all_params_have_grad(record)
    assert_grad_flow(record, max_ratio=1000)
    assert_grad_finite(record)


def test_gpt2_keeps_the_width_of_its_residual_stream(modelprobe, gpt2, tokens):
    record = modelprobe.run(gpt2, tokens)
    assert_shapes(
        record,
        {
            "transformer.wte": "batch seq width",
            "transformer.h.*": "batch seq width",
            "transformer.h.*.attn": "batch seq width",
            "transformer.h.*.mlp.c_fc": "batch seq 128",
            "transformer.ln_f": "batch seq width",
            "lm_head": "batch seq vocabulary",
        },
        dims={"batch": 4, "seq": 64, "width": 32, "vocabulary": 256},
    )


def test_gpt2_runs_each_block_once_and_all_are_alive(modelprobe, gpt2, tokens):
    record = modelprobe.run(gpt2, tokens)
    assert_called(record, "transformer.h.*", per_forward=1)
    assert_no_dead_layers(record)


def test_gpt2_in_bfloat16_stays_in_bfloat16_and_finite(modelprobe, gpt2, tokens):
    record = modelprobe.run(gpt2.to(torch.bfloat16), tokens, loss="random")
    assert_dtypes(record, torch.bfloat16)
    assert_finite(record)
    assert_grad_finite(record)


# --- ResNet -------------------------------------------------------------------------------------------------------


@pytest.fixture
def resnet(modelprobe):
    config = ResNetConfig(
        num_channels=1, embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], layer_type="basic", num_labels=10
    )
    return modelprobe.build(lambda: ResNetForImageClassification(config))


@pytest.fixture
def images():
    """Sixteen digits, enlarged to 32x32 pixels."""
    digits = torch.tensor(load_digits().images[:16], dtype=torch.float32).unsqueeze(1) / 16
    return functional.interpolate(digits, size=(32, 32), mode="bilinear")


def test_resnet_passes_a_gradient_to_every_layer(modelprobe, resnet, images):
    record = modelprobe.run(resnet, images, loss="random", mode="train")
    assert_all_params_have_grad(record)
    assert_grad_finite(record)
    assert_grad_flow(record, max_ratio=1000)


def test_resnet_halves_the_image_as_it_doubles_the_channels(modelprobe, resnet, images):
    record = modelprobe.run(resnet, images)
    assert_shapes(
        record,
        {
            "resnet.embedder": "batch 8 8 8",
            "resnet.encoder.stages.0": "batch 16 8 8",
            "resnet.encoder.stages.1": "batch 32 4 4",
            "resnet.pooler": "batch 32 1 1",
            "classifier": "batch 10",
        },
        dims={"batch": 16},
    )


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_resnet_is_finite_and_alive_in_both_modes(modelprobe, resnet, images, mode):
    record = modelprobe.run(resnet, images, mode=mode)
    assert_finite(record)
    assert_no_dead_layers(record, max_dead_units=0.1)
