"""The standard checks on many architectures of transformers, tiny and with random weights.

``tests/test_checks_transformers.py`` has the others: run both. What is broken is listed with its reason, as a strict
xfail: a check that begins to hold, or to break, fails the run.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pytest_modelprobe import ModelProbe, checks

COMMONS = runpy.run_path(str(Path(__file__).parents[2] / "tests" / "test_checks_transformers.py"))
COMMON, IMAGE, AUDIO, BOTH, DECODER = (COMMONS[name] for name in ("COMMON", "IMAGE", "AUDIO", "BOTH", "DECODER"))
ROWS, VOCABULARY = COMMONS["ROWS"], COMMONS["VOCABULARY"]
case, ids, image, labelled, made, uncached = (
    COMMONS[name] for name in ("case", "ids", "image", "labelled", "made", "uncached")
)
ONE_HEAD = {"num_key_value_heads": 1}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}


def large_image(probe: ModelProbe) -> dict[str, Any]:
    return {"pixel_values": probe.randn(ROWS, 3, 64, 64), "labels": torch.arange(ROWS, device=probe.device) % 2}


def spectrogram(probe: ModelProbe) -> dict[str, Any]:
    return {"input_values": probe.randn(ROWS, 16, 8), "labels": torch.arange(ROWS, device=probe.device) % 2}


def sound(probe: ModelProbe) -> dict[str, Any]:
    mask = torch.ones(ROWS, 400, dtype=torch.long, device=probe.device)
    return {"input_values": probe.randn(ROWS, 400), "attention_mask": mask, "labels": ids(probe)[:, :4]}


def series(probe: ModelProbe) -> dict[str, Any]:
    return {
        "past_values": probe.randn(ROWS, 16, 2, name="past"),
        "future_values": probe.randn(ROWS, 4, 2, name="future"),
    }


def captioned(probe: ModelProbe) -> dict[str, Any]:
    return {
        **COMMONS["text"](probe),
        "pixel_values": probe.randn(ROWS, 3, 32, 32),
        "return_loss": True,
    }


DECODERS = {
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**COMMON}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 24,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            **ENDS,
        },
    ),
    "gptj": (
        "GPTJForCausalLM",
        "GPTJConfig",
        {"n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4, "vocab_size": VOCABULARY, "n_positions": 24, **ENDS},
    ),
    "codegen": (
        "CodeGenForCausalLM",
        "CodeGenConfig",
        {
            "n_embd": 16,
            "n_layer": 1,
            "n_head": 4,
            "rotary_dim": 4,
            "vocab_size": VOCABULARY,
            "n_positions": 24,
            "n_ctx": 24,
            **ENDS,
        },
    ),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": VOCABULARY, **DECODER},
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", {**COMMON, **DECODER}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**COMMON, **DECODER, **ONE_HEAD}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**COMMON, **ONE_HEAD}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **COMMON,
            **ONE_HEAD,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**COMMON, **ONE_HEAD, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**COMMON, **ONE_HEAD, "head_dim": 8}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**COMMON, **ONE_HEAD, "head_dim": 8}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {**COMMON, **DECODER}),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", {**COMMON, **ONE_HEAD, **DECODER}),
    "cohere": ("CohereForCausalLM", "CohereConfig", {**COMMON, **DECODER}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {**COMMON, **DECODER}),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        {"d_model": 16, "n_heads": 2, "n_layers": 1, "vocab_size": VOCABULARY, "max_seq_len": 24},
    ),
    "biogpt": ("BioGptForCausalLM", "BioGptConfig", {**COMMON, **DECODER}),
    "xglm": (
        "XGLMForCausalLM",
        "XGLMConfig",
        {
            "d_model": 16,
            "ffn_dim": 24,
            "num_layers": 1,
            "attention_heads": 2,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 24,
            **DECODER,
        },
    ),
}
ENCODERS = {
    "electra": ("ElectraForMaskedLM", "ElectraConfig", {**COMMON, "embedding_size": 8}),
    "deberta_v2": ("DebertaV2ForMaskedLM", "DebertaV2Config", {**COMMON}),
    "mpnet": ("MPNetForMaskedLM", "MPNetConfig", {**COMMON}),
    "fnet": (
        "FNetForMaskedLM",
        "FNetConfig",
        {key: value for key, value in COMMON.items() if key != "num_attention_heads"},
    ),
    "funnel": (
        "FunnelForMaskedLM",
        "FunnelConfig",
        {
            "vocab_size": VOCABULARY,
            "block_sizes": [1, 1],
            "d_model": 16,
            "n_head": 2,
            "d_head": 8,
            "d_inner": 24,
            "num_decoder_layers": 1,
        },
    ),
    "longformer": (
        "LongformerForMaskedLM",
        "LongformerConfig",
        {**COMMON, "max_position_embeddings": 40, "attention_window": 4},
    ),
    "roformer": ("RoFormerForMaskedLM", "RoFormerConfig", {**COMMON, "embedding_size": 16}),
    "xlnet": (
        "XLNetLMHeadModel",
        "XLNetConfig",
        {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 24},
    ),
    "esm": ("EsmForMaskedLM", "EsmConfig", {**COMMON, "pad_token_id": 0, "mask_token_id": 3}),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "vocab_size": VOCABULARY,
            "state_size": 4,
            "num_heads": 4,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 4,
            **DECODER,
        },
    ),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", {**BOTH, "max_position_embeddings": 24, **DECODER}),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", {**BOTH, "max_position_embeddings": 24, **DECODER}),
}
OTHERS: dict[str, tuple[str, str, dict[str, Any], Callable[[ModelProbe], Any]]] = {
    "deit": ("DeiTForImageClassification", "DeiTConfig", {**IMAGE, "image_size": 32, "patch_size": 8}, image),
    "beit": ("BeitForImageClassification", "BeitConfig", {**IMAGE, "image_size": 32, "patch_size": 8}, image),
    "poolformer": (
        "PoolFormerForImageClassification",
        "PoolFormerConfig",
        {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
        image,
    ),
    "levit": (
        "LevitForImageClassification",
        "LevitConfig",
        {
            "image_size": 64,
            "hidden_sizes": [16, 24, 32],
            "num_attention_heads": [1, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
        large_image,
    ),
    "focalnet": (
        "FocalNetForImageClassification",
        "FocalNetConfig",
        {
            "image_size": 32,
            "embed_dim": 8,
            "depths": [1, 1],
            "hidden_sizes": [8, 16],
            "focal_levels": [1, 1],
            "focal_windows": [3, 3],
        },
        image,
    ),
    "hubert": ("HubertForCTC", "HubertConfig", {**AUDIO, "pad_token_id": 0}, sound),
    "ast": (
        "ASTForAudioClassification",
        "ASTConfig",
        {**IMAGE, "patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 16, "num_mel_bins": 8},
        spectrogram,
    ),
    "patchtst": (
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "prediction_length": 4,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "ffn_dim": 24,
        },
        series,
    ),
    "siglip": (
        "SiglipModel",
        "SiglipConfig",
        {"text_config": {**COMMON, **DECODER}, "vision_config": {**IMAGE, "image_size": 32, "patch_size": 8}},
        captioned,
    ),
}
EXPLAINED: dict[str, dict[str, str]] = {
    "olmo2": {"dtype_parity": "its rotary embedding stays in float32 on purpose"},
    "fnet": {"padding_invariant": "its Fourier transform mixes all positions and takes no mask"},
    "funnel": {"padding_invariant": "it pools neighboring positions, a masked one with one that is not"},
    "xlnet": {"dtype_parity": "its relative positions are made in float32"},
    "mamba2": {"dtype_parity": "it casts its logits to float32 whatever its own dtype is"},
    "hubert": {
        "gradient_accumulation": "its CTC loss is a sum over the batch unless it is configured otherwise",
        "checkpoint_parity": "it writes in place into what a layer gave out, which a reentrant checkpoint forbids",
    },
    "siglip": {
        "batch_independent": "it compares each text of the batch with each image",
        "any_batch_size": "it gives out as many similarities for each row as there are rows",
        "padding_invariant": "it pools a text by its last position, masked or not",
        "gradient_accumulation": "its contrastive loss takes the other rows for negatives",
    },
}
"""Name of a model → name of a check that breaks → why that is true of the model."""

CASES = [
    case(name, made(kind, config, **settings), inputs, xfail=EXPLAINED.get(name))
    for group, inputs in ((DECODERS, uncached), (ENCODERS, labelled))
    for name, (kind, config, settings) in group.items()
] + [
    case(name, made(kind, config, **settings), inputs, xfail=EXPLAINED.get(name))
    for name, (kind, config, settings, inputs) in OTHERS.items()
]


@checks.parametrize_with_checks(CASES)
def test_standard(modelprobe: ModelProbe, check: Callable[[ModelProbe], Any]) -> None:
    check(modelprobe)
