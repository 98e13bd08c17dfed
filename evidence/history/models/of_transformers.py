"""Tiny models of transformers, as versions 4 and 5 can make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from . import Inputs, Model, drawn, perturb

ROWS, LENGTH, VOCABULARY = 2, 12, 50
PADS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
COMMON = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": VOCABULARY, "max_position_embeddings": 32, **PADS,
}  # fmt: skip
GROUPED = {**COMMON, "num_key_value_heads": 1}
IMAGE: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
BOTH = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": VOCABULARY,
    "max_position_embeddings": 32, "decoder_start_token_id": 1, **PADS,
}  # fmt: skip
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 32, **PADS}
T5 = {
    "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": VOCABULARY,
    "decoder_start_token_id": 0,
}  # fmt: skip
SPEECH = {
    **{key: value for key, value in COMMON.items() if key != "max_position_embeddings"},
    "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 3), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "apply_spec_augment": False,
}  # fmt: skip
TWO_TOWERS = {
    "text_config": {**COMMON, "projection_dim": 8},
    "vision_config": {**IMAGE, "projection_dim": 8},
    "projection_dim": 8,
}


def _ids() -> Tensor:
    """Ids whose first row is padded at the end."""
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    ids[0, -4:] = 0
    return ids


def text(**others: Any) -> Inputs:
    ids = _ids()
    return Inputs((), {"input_ids": ids, "attention_mask": (ids != 0).long(), **others})


def uncached() -> Inputs:
    return text(use_cache=False)


def both() -> Inputs:
    return text(decoder_input_ids=_ids()[:, :8], use_cache=False)


def image() -> Inputs:
    return Inputs((), {"pixel_values": drawn(ROWS, 3, 32, 32)})


def text_and_image() -> Inputs:
    return text(**image().kwargs)


def wave() -> Inputs:
    return Inputs((), {"input_values": drawn(ROWS, 320)})


def with_image_tokens() -> Inputs:
    """Ids of which sixteen stand for the patches of the image."""
    ids = torch.cat([torch.full((ROWS, 16), VOCABULARY - 1), _ids().clamp_max(VOCABULARY - 2)], dim=1)
    return Inputs((), {"input_ids": ids, "attention_mask": (ids != 0).long(), **image().kwargs, "use_cache": False})


@dataclass(frozen=True)
class Pretrained(Model):
    """A model that saves itself; the newer version loads it with its own mapping of names."""

    kind: str = ""

    def save(self, folder: Path) -> None:
        torch.manual_seed(0)
        model: Any = self.build()
        perturb(model)
        model.save_pretrained(folder / f"{self.name}.weights")

    def load(self, folder: Path) -> tuple[nn.Module, list[str]]:
        torch.manual_seed(0)
        kind = getattr(transformers, self.kind)
        model, loading = kind.from_pretrained(folder / f"{self.name}.weights", output_loading_info=True)
        lost = [f"{key} = None" for key in sorted(map(str, loading["missing_keys"]))]
        return model.eval(), lost + [f"None = {key}" for key in sorted(map(str, loading["unexpected_keys"]))]


def tiny(name: str, kind: str, config: str, inputs: Callable[[], Inputs], settings: dict[str, Any]) -> Model:
    """Return a model of a class with a configuration."""

    def build() -> nn.Module:
        model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**settings))
        return model

    return Pretrained(name, build, inputs, kind)


def decoder(name: str, family: str, inputs: Callable[[], Inputs] = uncached, **settings: Any) -> Model:
    """Return a causal language model with the names of settings that most have."""
    return tiny(name, f"{family}ForCausalLM", f"{family}Config", inputs, {**GROUPED, **settings})


def encoder(name: str, family: str, head: str = "ForMaskedLM", **settings: Any) -> Model:
    return tiny(name, f"{family}{head}", f"{family}Config", text, {**COMMON, **settings})


def vision(name: str, family: str, head: str = "ForImageClassification", **settings: Any) -> Model:
    return tiny(name, f"{family}{head}", f"{family}Config", image, settings)


# fmt: off
MODELS = [
    # Decoders.
    tiny("gpt2", "GPT2LMHeadModel", "GPT2Config", uncached, GPT),
    tiny("gpt2-classifier", "GPT2ForSequenceClassification", "GPT2Config", uncached, GPT),
    tiny("gptj", "GPTJForCausalLM", "GPTJConfig", uncached, {**GPT, "rotary_dim": 4}),
    tiny("codegen", "CodeGenForCausalLM", "CodeGenConfig", uncached, {**GPT, "n_head": 4, "rotary_dim": 4}),
    tiny("gpt_bigcode", "GPTBigCodeForCausalLM", "GPTBigCodeConfig", uncached, GPT),
    tiny("gpt_neo", "GPTNeoForCausalLM", "GPTNeoConfig", uncached, {
        "hidden_size": 16, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]],
        "window_size": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 32, **PADS,
    }),
    tiny("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", uncached, COMMON),
    decoder("llama", "Llama"),
    decoder("mistral", "Mistral", sliding_window=4),
    decoder("mixtral", "Mixtral", num_local_experts=4),
    decoder("gemma", "Gemma", head_dim=8),
    decoder("gemma2", "Gemma2", head_dim=8, sliding_window=4),
    tiny("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", uncached, {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    decoder("qwen2", "Qwen2"),
    decoder("qwen2_moe", "Qwen2Moe", num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=8),
    decoder("qwen3", "Qwen3", head_dim=8),
    decoder("phi", "Phi"),
    decoder("phi3", "Phi3"),
    decoder("stablelm", "StableLm"),
    decoder("starcoder2", "Starcoder2"),
    decoder("olmo", "Olmo"),
    decoder("olmo2", "Olmo2"),
    decoder("granite", "Granite"),
    decoder("cohere", "Cohere"),
    decoder("nemotron", "Nemotron"),
    decoder("glm", "Glm", head_dim=8),
    decoder("persimmon", "Persimmon"),
    decoder("smollm3", "SmolLM3"),
    tiny("opt", "OPTForCausalLM", "OPTConfig", uncached, {
        "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCABULARY,
        "max_position_embeddings": 32, "word_embed_proj_dim": 16,
    }),
    tiny("bloom", "BloomForCausalLM", "BloomConfig", uncached, {
        "hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY, **PADS,
    }),
    tiny("falcon", "FalconForCausalLM", "FalconConfig", uncached, {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCABULARY, **PADS,
    }),
    tiny("mpt", "MptForCausalLM", "MptConfig", uncached, {
        "d_model": 16, "n_heads": 2, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 32, "vocab_size": VOCABULARY,
    }),
    tiny("mamba", "MambaForCausalLM", "MambaConfig", lambda: Inputs((), {"input_ids": _ids(), "use_cache": False}), {
        "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "state_size": 4, **PADS,
    }),
    tiny("rwkv", "RwkvForCausalLM", "RwkvConfig", lambda: Inputs((), {"input_ids": _ids(), "use_cache": False}), {
        "hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2, "vocab_size": VOCABULARY, **PADS,
    }),
    # Encoders.
    encoder("bert", "Bert"),
    encoder("bert-qa", "Bert", "ForQuestionAnswering"),
    encoder("roberta", "Roberta", "ForSequenceClassification"),
    encoder("xlm_roberta", "XLMRoberta", "ForTokenClassification"),
    encoder("camembert", "Camembert"),
    tiny("distilbert", "DistilBertForMaskedLM", "DistilBertConfig", text, {
        "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "vocab_size": VOCABULARY,
    }),
    encoder("albert", "Albert", embedding_size=8),
    encoder("electra", "Electra", embedding_size=8),
    encoder("mobilebert", "MobileBert", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    encoder("mpnet", "MPNet"),
    encoder("deberta_v2", "DebertaV2"),
    encoder("deberta", "Deberta", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    encoder("roformer", "RoFormer"),
    encoder("convbert", "ConvBert", embedding_size=16, conv_kernel_size=3, head_ratio=2),
    encoder("modernbert", "ModernBert", "ForSequenceClassification", local_attention=4, cls_token_id=1,
            sep_token_id=2),
    encoder("layoutlm", "LayoutLM"),
    encoder("squeezebert", "SqueezeBert", embedding_size=16, q_groups=1, k_groups=1, v_groups=1,
            post_attention_groups=1, intermediate_groups=1, output_groups=1),
    tiny("xlnet", "XLNetForSequenceClassification", "XLNetConfig", lambda: text(use_mems=False), {
        "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "vocab_size": VOCABULARY,
    }),
    tiny("funnel", "FunnelForMaskedLM", "FunnelConfig", text, {
        "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24,
        "vocab_size": VOCABULARY,
    }),
    # Encoders with decoders.
    tiny("t5", "T5ForConditionalGeneration", "T5Config", both, T5),
    tiny("mt5", "MT5ForConditionalGeneration", "MT5Config", both, {**T5, "feed_forward_proj": "gated-gelu"}),
    tiny("bart", "BartForConditionalGeneration", "BartConfig", both, BOTH),
    tiny("mbart", "MBartForConditionalGeneration", "MBartConfig", both, BOTH),
    tiny("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", both, BOTH),
    tiny("marian", "MarianMTModel", "MarianConfig", both, BOTH),
    tiny("m2m_100", "M2M100ForConditionalGeneration", "M2M100Config", both, BOTH),
    tiny("blenderbot", "BlenderbotForConditionalGeneration", "BlenderbotConfig", both, BOTH),
    # Audio.
    tiny("whisper", "WhisperModel", "WhisperConfig", lambda: Inputs((), {
        "input_features": drawn(ROWS, 8, 20), "decoder_input_ids": _ids()[:, :8], "use_cache": False,
    }), {
        **{key: value for key, value in BOTH.items() if key != "max_position_embeddings"}, "num_mel_bins": 8,
        "max_source_positions": 10, "max_target_positions": 24,
    }),
    tiny("wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", wave, SPEECH),
    tiny("hubert", "HubertForSequenceClassification", "HubertConfig", wave, SPEECH),
    tiny("wavlm", "WavLMModel", "WavLMConfig", wave, SPEECH),
    tiny("audio_spectrogram", "ASTForAudioClassification", "ASTConfig", lambda: Inputs((), {
        "input_values": drawn(ROWS, 24, 16)
    }), {**IMAGE, "max_length": 24, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8}),
    # Vision.
    vision("vit", "ViT", **IMAGE),
    vision("deit", "DeiT", **IMAGE),
    vision("beit", "Beit", **IMAGE),
    vision("dinov2", "Dinov2", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8),
    vision("vit_mae", "ViTMAE", "Model", **IMAGE, mask_ratio=0.0),
    vision("yolos", "Yolos", "ForObjectDetection", **{**IMAGE, "image_size": [32, 32]}, num_detection_tokens=5),
    vision("swin", "Swin", image_size=32, patch_size=4, embed_dim=8, depths=[2, 1], num_heads=[1, 2], window_size=4),
    vision("swinv2", "Swinv2", image_size=32, patch_size=4, embed_dim=8, depths=[2, 1], num_heads=[1, 2],
           window_size=4),
    vision("convnext", "ConvNext", hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1]),
    vision("convnextv2", "ConvNextV2", hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1]),
    vision("resnet", "ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    vision("regnet", "RegNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4),
    vision("mobilenet_v2", "MobileNetV2", depth_multiplier=0.25, image_size=32),
    vision("levit", "Levit", image_size=32, hidden_sizes=[16, 32, 48], num_attention_heads=[2, 3, 4],
           depths=[1, 1, 1], key_dim=[8, 8, 8], attention_ratio=[2, 2, 2], mlp_ratio=[2, 2, 2]),
    vision("cvt", "Cvt", embed_dim=[8, 16, 24], num_heads=[1, 2, 3], depth=[1, 2, 3]),
    vision("pvt", "Pvt", image_size=32, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_encoder_blocks=4,
           num_attention_heads=[1, 1, 2, 2], sequence_reduction_ratios=[8, 4, 2, 1], mlp_ratios=[2, 2, 2, 2]),
    vision("poolformer", "PoolFormer", hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1]),
    vision("mobilevit", "MobileViT", image_size=32, hidden_sizes=[16, 20, 24], neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 24],
           num_attention_heads=2),
    vision("segformer", "Segformer", "ForSemanticSegmentation", hidden_sizes=[8, 16], depths=[1, 1],
           num_encoder_blocks=2, sr_ratios=[2, 1], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2],
           mlp_ratios=[2, 2], decoder_hidden_size=16),
    vision("dpt", "DPT", "ForDepthEstimation", **IMAGE, backbone_out_indices=[0, 1],
           neck_hidden_sizes=[4, 8], reassemble_factors=[2, 1], fusion_hidden_size=8, is_hybrid=False),
    # Text and images.
    tiny("clip", "CLIPModel", "CLIPConfig", text_and_image, TWO_TOWERS),
    tiny("siglip", "SiglipModel", "SiglipConfig", text_and_image, TWO_TOWERS),
    tiny("chinese_clip", "ChineseCLIPModel", "ChineseCLIPConfig", text_and_image, TWO_TOWERS),
    tiny("blip", "BlipForConditionalGeneration", "BlipConfig", text_and_image, {
        **TWO_TOWERS,
        "text_config": {**COMMON, "encoder_hidden_size": 16, "projection_dim": 8, "is_decoder": True},
    }),
    tiny("vilt", "ViltModel", "ViltConfig", text_and_image, {**COMMON, **IMAGE, "max_image_length": -1}),
    tiny("flava", "FlavaTextModel", "FlavaTextConfig", text, COMMON),
    tiny("git", "GitForCausalLM", "GitConfig", lambda: text(**image().kwargs, use_cache=False), {
        **COMMON, "vision_config": IMAGE,
    }),
    tiny("perceiver", "PerceiverForMaskedLM", "PerceiverConfig", lambda: Inputs((), {
        "inputs": _ids(), "attention_mask": (_ids() != 0).long(),
    }), {
        "num_latents": 6, "d_latents": 16, "d_model": 16, "num_blocks": 1, "num_self_attends_per_block": 2,
        "num_self_attention_heads": 2, "num_cross_attention_heads": 2, "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH, "qk_channels": 16, "v_channels": 16,
    }),
    tiny("llava", "LlavaForConditionalGeneration", "LlavaConfig", with_image_tokens, {
        "text_config": {**GROUPED, "model_type": "llama"},
        "vision_config": {**IMAGE, "model_type": "clip_vision_model"},
        "image_token_index": VOCABULARY - 1, "vision_feature_layer": -1,
    }),
]
# fmt: on
