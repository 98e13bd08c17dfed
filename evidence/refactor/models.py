"""The models whose source is edited: ten of transformers, as small as they come, and those written beside this."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import transformers
import written
from torch import Tensor, nn

ROWS, LENGTH, VOCABULARY = 2, 12, 50


@dataclass(frozen=True)
class Model:
    """A class of a model, the module with its source, and what it is given."""

    source: ModuleType
    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().eval()


def ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


def padded() -> dict[str, Tensor]:
    """Ids whose first row is padded at the end, and the mask that says so."""
    tokens, mask = ids(), torch.ones(ROWS, LENGTH, dtype=torch.long)
    tokens[0, -4:], mask[0, -4:] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def image() -> dict[str, Tensor]:
    return {"pixel_values": floats(ROWS, 3, 32, 32)}


SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": VOCABULARY, "max_position_embeddings": 32,
}  # fmt: skip
IMAGES = {**SIZES, "image_size": 32, "patch_size": 8}
MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def of_library(family: str, kind: str, inputs: Callable[[], dict[str, Any]], **settings: Any) -> Model:
    source = importlib.import_module(f"transformers.models.{family}.modeling_{family}")

    def make() -> nn.Module:
        config = transformers.AutoConfig.for_model(family, attn_implementation="eager", **settings)
        model: nn.Module = getattr(source, kind)(config)  # the class of now: it may be an edited one
        return model

    return Model(source, make, inputs)


def by_hand(kind: str, inputs: Callable[[], dict[str, Any]]) -> Model:
    return Model(written, lambda: getattr(written, kind)(), inputs)


def uncached() -> dict[str, Any]:
    return {**padded(), "use_cache": False}


MODELS = {
    "gpt2": of_library(
        "gpt2", "GPT2LMHeadModel", uncached, n_embd=16, n_layer=2, n_head=2, n_positions=32, vocab_size=VOCABULARY,
        **MARKS,
    ),
    "llama": of_library("llama", "LlamaForCausalLM", uncached, num_key_value_heads=2, **SIZES),
    "bert": of_library("bert", "BertForMaskedLM", padded, **SIZES),
    "vit": of_library("vit", "ViTForImageClassification", image, **IMAGES),
    "t5": of_library(
        "t5", "T5ForConditionalGeneration", lambda: {**uncached(), "decoder_input_ids": ids()[:, :8]}, d_model=16,
        d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=VOCABULARY, **MARKS,
    ),
    "mixtral": of_library(
        "mixtral", "MixtralForCausalLM", uncached, num_key_value_heads=2, num_local_experts=4, **SIZES,
    ),
    "resnet": of_library(
        "resnet", "ResNetForImageClassification", image, embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2],
        layer_type="basic",
    ),
    "convnext": of_library(
        "convnext", "ConvNextForImageClassification", image, hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 2, 1],
    ),
    "wav2vec2": of_library(
        "wav2vec2", "Wav2Vec2Model", lambda: {"input_values": floats(ROWS, 400)}, conv_dim=(8, 8), conv_kernel=(10, 3),
        conv_stride=(5, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
        **{**SIZES, "vocab_size": 32},
    ),
    "whisper": of_library(
        "whisper", "WhisperModel",
        lambda: {"input_features": floats(ROWS, 8, 20), "decoder_input_ids": ids()[:, :8], "use_cache": False},
        d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, vocab_size=VOCABULARY, num_mel_bins=8, max_source_positions=10,
        max_target_positions=24, decoder_start_token_id=1, **MARKS,
    ),
    "unet": by_hand("UNet", lambda: {"images": floats(ROWS, 3, 16, 16)}),
    "vae": by_hand("VAE", lambda: {"x": floats(6, 24)}),
    "tagger": by_hand("Tagger", lambda: dict(zip(("ids", "mask"), padded().values(), strict=True))),
    "lora": by_hand("Adapted", lambda: {"ids": ids()}),
}  # fmt: skip
