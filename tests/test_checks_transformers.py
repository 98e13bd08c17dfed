"""The standard battery on architectures of the world, tiny and with random weights: what is true of each is said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, checks

ROWS, LENGTH, VOCABULARY = 3, 10, 40

COMMON = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 24,
}
IMAGE = {key: value for key, value in COMMON.items() if key not in ("vocab_size", "max_position_embeddings")}
AUDIO = {
    **IMAGE,
    "vocab_size": VOCABULARY,
    "conv_dim": (8, 8),
    "conv_kernel": (4, 4),
    "conv_stride": (4, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
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


def made(kind: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def factory() -> nn.Module:
        model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**settings))
        return model

    return factory


def ids(probe: ModelProbe, name: str = "ids") -> Tensor:
    return probe.randint(3, VOCABULARY, (ROWS, LENGTH), name=name)


def text(probe: ModelProbe) -> dict[str, Tensor]:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long, device=probe.device)
    return {"input_ids": ids(probe), "attention_mask": mask}


def labelled(probe: ModelProbe) -> dict[str, Tensor]:
    return {**text(probe), "labels": ids(probe, "labels")}


def uncached(probe: ModelProbe) -> dict[str, Any]:
    """Without a cache of keys and values, which the second forward of a checkpoint would write to again."""
    return {**labelled(probe), "use_cache": False}


def one_label(probe: ModelProbe) -> dict[str, Tensor]:
    return {**text(probe), "labels": torch.arange(ROWS, device=probe.device) % 2}


def image(probe: ModelProbe) -> dict[str, Tensor]:
    return {"pixel_values": probe.randn(ROWS, 3, 32, 32), "labels": torch.arange(ROWS, device=probe.device) % 2}


def case(
    name: str,
    factory: Callable[[], nn.Module],
    inputs: Callable[[ModelProbe], Any],
    *,
    loss: Callable[[Any], Tensor] | None = lambda output: output.loss,
    xfail: Mapping[str, str] | None = None,
) -> checks.Case:
    return checks.Case(name=name, factory=factory, inputs=inputs, loss=loss, xfail=xfail or {})


def square(output: Any) -> Tensor:
    return output[0].pow(2).mean()  # type: ignore[no-any-return]


CASES = [
    case(
        "gpt2",
        made(
            "GPT2LMHeadModel",
            "GPT2Config",
            n_layer=1,
            n_embd=16,
            n_head=2,
            vocab_size=VOCABULARY,
            n_positions=24,
            bos_token_id=1,
            eos_token_id=2,
        ),
        uncached,
    ),
    case("llama", made("LlamaForCausalLM", "LlamaConfig", **COMMON, num_key_value_heads=1), uncached),
    case(
        "mistral",
        made("MistralForCausalLM", "MistralConfig", **COMMON, num_key_value_heads=1, sliding_window=4),
        uncached,
    ),
    case(
        "mixtral",
        made("MixtralForCausalLM", "MixtralConfig", **COMMON, num_key_value_heads=1, num_local_experts=4),
        uncached,
    ),
    case("gemma", made("GemmaForCausalLM", "GemmaConfig", **COMMON, num_key_value_heads=1, head_dim=8), uncached),
    case(
        "mamba",
        made(
            "MambaForCausalLM", "MambaConfig", hidden_size=16, num_hidden_layers=1, vocab_size=VOCABULARY, state_size=4
        ),
        labelled,
        xfail={"dtype_parity": "it casts its logits to float32 whatever its own dtype is"},
    ),
    case(
        "bloom",
        made("BloomForCausalLM", "BloomConfig", hidden_size=16, n_layer=1, n_head=2, vocab_size=VOCABULARY, **DECODER),
        uncached,
    ),
    case(
        "opt",
        made(
            "OPTForCausalLM",
            "OPTConfig",
            **{k: v for k, v in COMMON.items() if k != "intermediate_size"},
            ffn_dim=24,
            word_embed_proj_dim=16,
        ),
        labelled,
        xfail={
            "checkpoint_parity": "its layers write into a cache of keys and values, and do it again when recomputed"
        },
    ),
    case("bert", made("BertForMaskedLM", "BertConfig", **COMMON), labelled),
    case("roberta", made("RobertaForSequenceClassification", "RobertaConfig", **COMMON), one_label),
    case(
        "distilbert",
        made(
            "DistilBertForMaskedLM",
            "DistilBertConfig",
            dim=16,
            hidden_dim=24,
            n_layers=1,
            n_heads=2,
            vocab_size=VOCABULARY,
        ),
        labelled,
    ),
    case(
        "albert",
        made("AlbertForMaskedLM", "AlbertConfig", **{**COMMON, "num_hidden_layers": 2}, embedding_size=8),
        labelled,
    ),
    case(
        "t5",
        made(
            "T5ForConditionalGeneration",
            "T5Config",
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=1,
            num_heads=2,
            vocab_size=VOCABULARY,
            decoder_start_token_id=0,
        ),
        uncached,
    ),
    case(
        "switch",
        made(
            "SwitchTransformersForConditionalGeneration",
            "SwitchTransformersConfig",
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=1,
            num_sparse_encoder_layers=1,
            num_decoder_layers=1,
            num_sparse_decoder_layers=1,
            num_heads=2,
            num_experts=4,
            expert_capacity=4,
            vocab_size=VOCABULARY,
            decoder_start_token_id=0,
        ),
        uncached,
        xfail={
            "dtype_parity": "its router computes in float32, as its configuration says, whatever the model does",
        },
    ),
    case(
        "bart",
        made("BartForConditionalGeneration", "BartConfig", **BOTH, max_position_embeddings=24),
        labelled,
    ),
    case(
        "whisper",
        made(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **BOTH,
            num_mel_bins=8,
            max_source_positions=10,
            max_target_positions=24,
            decoder_start_token_id=1,
            **DECODER,
        ),
        lambda probe: {"input_features": probe.randn(ROWS, 8, 20), "labels": ids(probe), "use_cache": False},
    ),
    case(
        "wav2vec2",
        made("Wav2Vec2ForCTC", "Wav2Vec2Config", **AUDIO, pad_token_id=0),
        lambda probe: {
            "input_values": probe.randn(ROWS, 400),
            "attention_mask": torch.ones(ROWS, 400, dtype=torch.long),
            "labels": ids(probe)[:, :4],
        },
        xfail={
            "gradient_accumulation": "its CTC loss is a sum over the batch unless it is configured otherwise",
            "checkpoint_parity": "it writes in place into what a layer gave out, which a reentrant checkpoint forbids",
        },
    ),
    case("vit", made("ViTForImageClassification", "ViTConfig", **IMAGE, image_size=32, patch_size=8), image),
    case(
        "swin",
        made(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=32,
            patch_size=4,
            embed_dim=8,
            depths=[2, 1],
            num_heads=[1, 2],
            window_size=4,
        ),
        image,
    ),
    case(
        "convnext",
        made("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1]),
        image,
    ),
    case(
        "resnet",
        made(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 1],
            layer_type="basic",
        ),
        image,
    ),
    case(
        "segformer",
        made(
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            hidden_sizes=[8, 16],
            depths=[1, 1],
            num_encoder_blocks=2,
            sr_ratios=[2, 1],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=16,
            num_labels=3,
        ),
        lambda probe: {
            "pixel_values": probe.randn(ROWS, 3, 32, 32),
            "labels": torch.arange(ROWS)[:, None, None].expand(ROWS, 32, 32) % 2,
        },
    ),
    case(
        "clip",
        made(
            "CLIPModel",
            "CLIPConfig",
            text_config={**COMMON, **DECODER},
            vision_config={**IMAGE, "image_size": 32, "patch_size": 8},
            projection_dim=12,
        ),
        lambda probe: {**text(probe), "pixel_values": probe.randn(ROWS, 3, 32, 32), "return_loss": True},
        xfail={"gradient_accumulation": "its contrastive loss takes the other rows for negatives"},
    ),
    case(
        "detr",
        made(
            "DetrForObjectDetection",
            "DetrConfig",
            **{k: v for k, v in BOTH.items() if k != "vocab_size"},
            num_queries=5,
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=transformers.ResNetConfig(  # type: ignore[call-arg]
                embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
            ),
        ),
        lambda probe: {
            "pixel_values": probe.randn(ROWS, 3, 32, 32),
            "pixel_mask": torch.ones(ROWS, 32, 32, dtype=torch.long),
        },
        loss=square,
    ),
    case(
        "mae",
        made(
            "ViTMAEForPreTraining",
            "ViTMAEConfig",
            **IMAGE,
            image_size=32,
            patch_size=8,
            decoder_hidden_size=16,
            decoder_num_attention_heads=2,
            decoder_num_hidden_layers=1,
            decoder_intermediate_size=24,
        ),
        lambda probe: {"pixel_values": probe.randn(ROWS, 3, 32, 32)},
        xfail={
            "eval_stable": "it masks random patches, in evaluation mode too",
            "dtype_parity": "it makes its mask of patches in float32, whatever its own dtype is",
            "overfits_batch": "its targets are pixels of noise, and it sees other patches in each step",
        },
    ),
]


@checks.parametrize_with_checks(CASES)
def test_standard(modelprobe: ModelProbe, check: Callable[[ModelProbe], Any]) -> None:
    check(modelprobe)
