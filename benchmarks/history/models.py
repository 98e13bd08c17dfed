"""Tiny models of transformers, as any version of the last years can make them, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

ROWS, LENGTH, VOCABULARY = 2, 12, 50
COMMON = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}
PADS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {"num_key_value_heads": 1}
IMAGE = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
BOTH = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}  # fmt: skip
GPT = {
    "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 32, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip

Inputs = Callable[[], dict[str, Any]]


def text() -> dict[str, Any]:
    """Ids whose first row is padded at the end, and the mask that says so."""
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    ids[0, -4:], mask[0, -4:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def uncached() -> dict[str, Any]:
    return {**text(), "use_cache": False}


def both() -> dict[str, Any]:
    return {**text(), "decoder_input_ids": text()["input_ids"][:, :8], "use_cache": False}


def image() -> dict[str, Any]:
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32, generator=torch.Generator().manual_seed(0))}


@dataclass(frozen=True)
class Model:
    """A class of a model, how it is configured, and what it is given."""

    name: str
    kind: str
    config: str
    inputs: Inputs
    settings: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.settings)
        model: nn.Module = getattr(transformers, self.kind)(config)
        return model

    def load(self, folder: Path) -> tuple[nn.Module, dict[str, Any]]:
        """Return the model with the weights and the configuration that another version saved, and what it lacked."""
        kind = getattr(transformers, self.kind)
        model, loading = kind.from_pretrained(folder, output_loading_info=True)
        return model.eval(), loading


MODELS = [
    Model("gpt2", "GPT2LMHeadModel", "GPT2Config", uncached, GPT),
    Model("gpt2-classifier", "GPT2ForSequenceClassification", "GPT2Config", uncached, {**GPT, "pad_token_id": 0}),
    Model("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", uncached, COMMON),
    Model("gptj", "GPTJForCausalLM", "GPTJConfig", uncached, {**GPT, "rotary_dim": 4}),
    Model("llama", "LlamaForCausalLM", "LlamaConfig", uncached, {**COMMON, **GROUPED}),
    Model("mistral", "MistralForCausalLM", "MistralConfig", uncached, {**COMMON, **GROUPED, "sliding_window": 4}),
    Model("mixtral", "MixtralForCausalLM", "MixtralConfig", uncached, {**COMMON, **GROUPED, "num_local_experts": 4}),
    Model("gemma", "GemmaForCausalLM", "GemmaConfig", uncached, {**COMMON, **GROUPED, "head_dim": 8}),
    Model("qwen2", "Qwen2ForCausalLM", "Qwen2Config", uncached, {**COMMON, **GROUPED}),
    Model("phi", "PhiForCausalLM", "PhiConfig", uncached, {**COMMON, **PADS}),
    Model(
        "opt",
        "OPTForCausalLM",
        "OPTConfig",
        uncached,
        {
            "hidden_size": 16,
            "ffn_dim": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 16,
        },
    ),
    Model(
        "falcon",
        "FalconForCausalLM",
        "FalconConfig",
        uncached,
        {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": VOCABULARY,
            **PADS,
        },
    ),
    Model(
        "mamba",
        "MambaForCausalLM",
        "MambaConfig",
        lambda: {"input_ids": text()["input_ids"], "use_cache": False},
        {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "vocab_size": VOCABULARY,
            "state_size": 4,
        },
    ),
    Model("bert", "BertForMaskedLM", "BertConfig", text, COMMON),
    Model("roberta", "RobertaForSequenceClassification", "RobertaConfig", text, {**COMMON, "pad_token_id": 0}),
    Model(
        "distilbert",
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        text,
        {
            "dim": 16,
            "hidden_dim": 24,
            "n_layers": 2,
            "n_heads": 2,
            "vocab_size": VOCABULARY,
        },
    ),
    Model("albert", "AlbertForMaskedLM", "AlbertConfig", text, {**COMMON, "embedding_size": 8}),
    Model("electra", "ElectraForMaskedLM", "ElectraConfig", text, {**COMMON, "embedding_size": 8}),
    Model("deberta_v2", "DebertaV2ForMaskedLM", "DebertaV2Config", text, COMMON),
    Model(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        both,
        {
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 1,
            "num_heads": 2,
            "vocab_size": VOCABULARY,
        },
    ),
    Model("bart", "BartForConditionalGeneration", "BartConfig", both, BOTH),
    Model(
        "whisper",
        "WhisperModel",
        "WhisperConfig",
        lambda: {
            "input_features": torch.randn(ROWS, 8, 20, generator=torch.Generator().manual_seed(0)),
            "decoder_input_ids": text()["input_ids"][:, :8],
            "use_cache": False,
        },
        {
            **{k: v for k, v in BOTH.items() if k != "max_position_embeddings"},
            "num_mel_bins": 8,
            "max_source_positions": 10,
            "max_target_positions": 24,
            "decoder_start_token_id": 1,
            **PADS,
        },
    ),
    Model("vit", "ViTForImageClassification", "ViTConfig", image, IMAGE),
    Model("deit", "DeiTForImageClassification", "DeiTConfig", image, IMAGE),
    Model("beit", "BeitForImageClassification", "BeitConfig", image, IMAGE),
    Model(
        "swin",
        "SwinForImageClassification",
        "SwinConfig",
        image,
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [2, 1],
            "num_heads": [1, 2],
            "window_size": 4,
        },
    ),
    Model(
        "convnext",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        image,
        {
            "hidden_sizes": [8, 12, 16, 20],
            "depths": [1, 1, 1, 1],
        },
    ),
    Model(
        "resnet",
        "ResNetForImageClassification",
        "ResNetConfig",
        image,
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "layer_type": "basic",
        },
    ),
    Model(
        "segformer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        image,
        {
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_encoder_blocks": 2,
            "sr_ratios": [2, 1],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
        },
    ),
]
