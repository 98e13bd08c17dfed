"""The standard checks on many architectures of transformers, tiny and with random weights.

Those of ``tests/checks/test_transformers.py`` are among them. What is broken is listed with its reason, as a strict
xfail: a check that begins to hold, or to break, fails the run.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from pytest_modelprobe import ModelProbe, checks

COMMONS = runpy.run_path(str(Path(__file__).parents[2] / "tests" / "checks" / "test_transformers.py"))
COMMON, AUDIO, ROWS, VOCABULARY = (COMMONS[name] for name in ("COMMON", "AUDIO", "ROWS", "VOCABULARY"))
ids, labeled, made, own_loss, text = (COMMONS[name] for name in ("ids", "labeled", "made", "own_loss", "text"))
IMAGE = {key: value for key, value in COMMON.items() if key not in ("vocab_size", "max_position_embeddings")}
DECODER = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BOTH = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "vocab_size": VOCABULARY,
}
ONE_HEAD = {"num_key_value_heads": 1}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}


def case(name: str, factory: Callable[[], Any], inputs: Callable[[ModelProbe], Any], **options: Any) -> checks.Case:
    return checks.Case(name=name, factory=factory, inputs=inputs, **{"loss": own_loss, **options})


def image(probe: ModelProbe) -> dict[str, Tensor]:
    return {"pixel_values": probe.randn(ROWS, 3, 32, 32), "labels": torch.arange(ROWS, device=probe.device) % 2}


def one_label(probe: ModelProbe) -> dict[str, Any]:
    return {**text(probe), "labels": torch.arange(ROWS, device=probe.device) % 2}


def pixels(probe: ModelProbe) -> dict[str, Any]:
    return {"pixel_values": probe.randn(ROWS, 3, 32, 32)}


def masked_pixels(probe: ModelProbe) -> dict[str, Any]:
    return {**pixels(probe), "pixel_mask": torch.ones(ROWS, 32, 32, dtype=torch.long, device=probe.device)}


def segmented(probe: ModelProbe) -> dict[str, Any]:
    classes = torch.arange(ROWS, device=probe.device) % 2
    return {**pixels(probe), "labels": classes[:, None, None].expand(ROWS, 32, 32)}


def heard(probe: ModelProbe) -> dict[str, Any]:
    return {"input_features": probe.randn(ROWS, 8, 20), "labels": ids(probe)}


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
    return {**text(probe), **pixels(probe), "return_loss": True}


def square(output: Any) -> Tensor:
    return output[0].pow(2).mean()  # type: ignore[no-any-return]


DECODERS = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 24, **ENDS},
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**COMMON, **ONE_HEAD, "sliding_window": 4}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**COMMON, **ONE_HEAD, "head_dim": 8}),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY, **DECODER},
    ),
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 1,
            "num_sparse_encoder_layers": 1,
            "num_decoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_heads": 2,
            "num_experts": 4,
            "expert_capacity": 4,
            "vocab_size": VOCABULARY,
            "decoder_start_token_id": 0,
        },
    ),
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
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            **{key: value for key, value in COMMON.items() if key != "intermediate_size"},
            "ffn_dim": 24,
            "word_embed_proj_dim": 16,
        },
    ),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"dim": 16, "hidden_dim": 24, "n_layers": 1, "n_heads": 2, "vocab_size": VOCABULARY},
    ),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**COMMON, "num_hidden_layers": 2, "embedding_size": 8}),
    "bart": ("BartForConditionalGeneration", "BartConfig", {**BOTH, "max_position_embeddings": 24}),
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
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", {**COMMON}, one_label),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **BOTH,
            "num_mel_bins": 8,
            "max_source_positions": 10,
            "max_target_positions": 24,
            "decoder_start_token_id": 1,
            **DECODER,
        },
        heard,
    ),
    "swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 1], "num_heads": [1, 2], "window_size": 4},
        image,
    ),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1]},
        image,
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
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
            "num_labels": 3,
        },
        segmented,
    ),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**COMMON, **DECODER},
            "vision_config": {**IMAGE, "image_size": 32, "patch_size": 8},
            "projection_dim": 12,
        },
        captioned,
    ),
    "detr": (
        "DetrForObjectDetection",
        "DetrConfig",
        {
            **{key: value for key, value in BOTH.items() if key != "vocab_size"},
            "num_queries": 5,
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": transformers.ResNetConfig(  # type: ignore[call-arg]
                embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
            ),
        },
        masked_pixels,
    ),
    "mae": (
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        {
            **IMAGE,
            "image_size": 32,
            "patch_size": 8,
            "decoder_hidden_size": 16,
            "decoder_num_attention_heads": 2,
            "decoder_num_hidden_layers": 1,
            "decoder_intermediate_size": 24,
        },
        pixels,
    ),
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
LOSSES = {"detr": square}
"""Name of a model that computes no loss itself → one."""

EXPLAINED: dict[str, dict[str, str]] = {
    "clip": {"gradient_accumulation": "its contrastive loss takes the other rows for negatives"},
    "mae": {
        "eval_stable": "it masks random patches, in evaluation mode too",
        "dtype_parity": "it makes its mask of patches in float32, whatever its own dtype is",
        "overfits_batch": "its targets are pixels of noise, and it sees other patches in each step",
    },
    "fnet": {
        "padding_invariant": "its Fourier transform mixes all positions and takes no mask",
        "inputs_used": "it accepts a mask and does nothing with it",
    },
    "funnel": {"padding_invariant": "it pools neighboring positions, a masked one with one that is not"},
    "mamba2": {
        "dtype_parity": "it casts its logits to float32 whatever its own dtype is",
        "padding_invariant": "the state that it gives out goes on through padding behind the last word",
    },
    "hubert": {
        "gradient_accumulation": "its CTC loss is a sum over the batch unless it is configured otherwise",
    },
    "siglip": {
        "padding_invariant": "it pools a text by its last position, masked or not",
        "gradient_accumulation": "its contrastive loss takes the other rows for negatives",
    },
}
"""Name of a model → name of a check that breaks → why that is true of the model."""

MODELS = {
    **{name: (*model, labeled) for name, model in {**DECODERS, **ENCODERS}.items()},
    **OTHERS,
}
CASES = COMMONS["CASES"] + [
    case(
        name,
        made(kind, config, **settings),
        inputs,
        loss=LOSSES.get(name, COMMONS["own_loss"]),
        xfail=EXPLAINED.get(name, {}),
    )
    for name, (kind, config, settings, inputs) in MODELS.items()
]


@checks.parametrize_with_checks(CASES)
def test_standard(modelprobe: ModelProbe, check: Callable[[ModelProbe], Any]) -> None:
    check(modelprobe)
