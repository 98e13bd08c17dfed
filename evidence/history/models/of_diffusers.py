"""Tiny models of diffusers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from diffusers import models as parts
from torch import Tensor, nn

from . import Inputs, Model, drawn

STEP = torch.tensor([3, 7])
BLOCKS = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
CONDITIONED = {
    **BLOCKS, "sample_size": 16, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 12,
    "attention_head_dim": 4, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip
VIDEO = {
    **BLOCKS, "sample_size": 16, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 12,
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"), "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
}  # fmt: skip
VAE = {
    **BLOCKS, "in_channels": 3, "out_channels": 3, "latent_channels": 4,
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
}  # fmt: skip
TRANSFORMER = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "norm_num_groups": 4}


def text(seed: int = 1) -> Tensor:
    """Return what a text encoder gives."""
    return drawn(2, 5, 12, seed=seed)


def noisy(channels: int = 4, **others: Any) -> Callable[[], Inputs]:
    return lambda: Inputs((drawn(2, channels, 16, 16), STEP), others)


def conditioned(**others: Any) -> Callable[[], Inputs]:
    return lambda: Inputs((drawn(2, 4, 16, 16), STEP, text()), others)


def pictures(channels: int = 3, size: int = 16, **others: Any) -> Callable[[], Inputs]:
    return lambda: Inputs((drawn(2, channels, size, size),), others)


def tiny(name: str, kind: str, inputs: Callable[[], Inputs], **settings: Any) -> Model:
    """Return a model of a class."""

    def build() -> nn.Module:
        model: nn.Module = (getattr(diffusers, kind, None) or getattr(parts, kind))(**settings)
        return model

    return Model(name, build, inputs)


# fmt: off
MODELS = [
    tiny("unet-1d", "UNet1DModel", lambda: Inputs((drawn(2, 14, 16), STEP)), in_channels=14, out_channels=14,
         time_embedding_type="positional", down_block_types=("DownResnetBlock1D", "DownResnetBlock1D"),
         up_block_types=("UpResnetBlock1D",), mid_block_type="MidResTemporalBlock1D", out_block_type="OutConv1DBlock",
         block_out_channels=(8, 16), use_timestep_embedding=True, act_fn="mish", downsample_each_block=False,
         norm_num_groups=4, layers_per_block=1, flip_sin_to_cos=False, freq_shift=1.0),
    tiny("unet-2d", "UNet2DModel", noisy(3), **BLOCKS, sample_size=16, attention_head_dim=4,
         down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")),
    tiny("unet-2d-scale-shift", "UNet2DModel", noisy(3), **BLOCKS, sample_size=16, attention_head_dim=4,
         resnet_time_scale_shift="scale_shift", down_block_types=("ResnetDownsampleBlock2D", "AttnDownBlock2D"),
         up_block_types=("AttnUpBlock2D", "ResnetUpsampleBlock2D")),
    tiny("unet-2d-classes", "UNet2DModel", noisy(3, class_labels=torch.tensor([1, 4])), **BLOCKS, sample_size=16,
         attention_head_dim=4, num_class_embeds=5, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
         up_block_types=("AttnUpBlock2D", "UpBlock2D")),
    tiny("unet-2d-skip", "UNet2DModel", noisy(3), block_out_channels=(32, 32), layers_per_block=1, sample_size=16,
         attention_head_dim=8, norm_num_groups=None, time_embedding_type="fourier", mid_block_scale_factor=1.41,
         down_block_types=("SkipDownBlock2D", "AttnSkipDownBlock2D"),
         up_block_types=("AttnSkipUpBlock2D", "SkipUpBlock2D")),
    tiny("unet-condition", "UNet2DConditionModel", conditioned(), **CONDITIONED),
    tiny("unet-condition-masked", "UNet2DConditionModel", conditioned(
        encoder_attention_mask=torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    ), **CONDITIONED, use_linear_projection=True),
    tiny("unet-condition-classes", "UNet2DConditionModel", conditioned(class_labels=torch.tensor([1, 4])),
         **CONDITIONED, class_embed_type="timestep", resnet_time_scale_shift="scale_shift"),
    tiny("unet-condition-xl", "UNet2DConditionModel", lambda: Inputs((drawn(2, 4, 16, 16), STEP, text()), {
        "added_cond_kwargs": {"text_embeds": drawn(2, 16, seed=2), "time_ids": torch.arange(12.0).reshape(2, 6)},
    }), **CONDITIONED, addition_embed_type="text_time", addition_time_embed_dim=8,
         projection_class_embeddings_input_dim=64, transformer_layers_per_block=2, use_linear_projection=True),
    tiny("unet-condition-if", "UNet2DConditionModel", conditioned(), **{
        **CONDITIONED, "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"), "cross_attention_dim": 32,
    }, mid_block_type="UNetMidBlock2DSimpleCrossAttn", addition_embed_type="text", addition_embed_type_num_heads=2,
         encoder_hid_dim=12, time_embedding_act_fn="gelu", cross_attention_norm="group_norm"),
    tiny("unet-3d", "UNet3DConditionModel", lambda: Inputs((drawn(2, 4, 3, 16, 16), STEP, text())), **VIDEO,
         attention_head_dim=4),
    tiny("unet-spatio-temporal", "UNetSpatioTemporalConditionModel", lambda: Inputs(
        (drawn(2, 2, 4, 16, 16), STEP, drawn(2, 1, 12, seed=1)), {"added_time_ids": torch.arange(6.0).reshape(2, 3)}
    ), block_out_channels=(32, 64), layers_per_block=1, in_channels=4, out_channels=4, cross_attention_dim=12,
         num_attention_heads=2, addition_time_embed_dim=8, projection_class_embeddings_input_dim=24, sample_size=16,
         down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
         up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal")),
    tiny("unet-i2vgen", "I2VGenXLUNet", lambda: Inputs((drawn(2, 4, 3, 16, 16), STEP, torch.tensor([8, 8])), {
        "image_latents": drawn(2, 4, 3, 16, 16, seed=2), "image_embeddings": drawn(2, 12, seed=3),
        "encoder_hidden_states": text(),
    }), **VIDEO, attention_head_dim=4, num_attention_heads=4),
    tiny("unet-kandinsky3", "Kandinsky3UNet", lambda: Inputs((drawn(2, 4, 32, 32), STEP), {
        "encoder_hidden_states": text(), "encoder_attention_mask": torch.ones(2, 5),
    }), in_channels=4, time_embedding_dim=16, groups=4, attention_head_dim=4, layers_per_block=3,
         block_out_channels=(16, 16, 16, 16), cross_attention_dim=16, encoder_hid_dim=12),
    tiny("unet-cascade", "StableCascadeUNet", lambda: Inputs((drawn(2, 4, 16, 16), torch.tensor([0.3, 0.7])), {
        "clip_text_pooled": drawn(2, 1, 8, seed=1),
    }), in_channels=4, out_channels=4, timestep_ratio_embedding_dim=8, conditioning_dim=16, block_out_channels=(16, 16),
         num_attention_heads=(2, 2), down_num_layers_per_block=(1, 1), up_num_layers_per_block=(1, 1),
         down_blocks_repeat_mappers=(1, 1), up_blocks_repeat_mappers=(1, 1), clip_text_pooled_in_channels=8,
         clip_seq=2, dropout=(0.0, 0.0), block_types_per_layer=[
             ["SDCascadeResBlock", "SDCascadeTimestepBlock"],
             ["SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"],
         ], self_attn=True, timestep_conditioning_type=("sca",)),
    tiny("uvit", "UVit2DModel", lambda: Inputs((torch.arange(32).reshape(2, 4, 4) % 20,), {
        "encoder_hidden_states": text(), "pooled_text_emb": drawn(2, 10, seed=2),
        "micro_conds": torch.arange(10.0).reshape(2, 5),
    }), hidden_size=16, cond_embed_dim=10, micro_cond_encode_dim=4, micro_cond_embed_dim=20, encoder_hidden_size=12,
         vocab_size=24, codebook_size=20, in_channels=16, block_out_channels=16, num_res_blocks=1, num_hidden_layers=1,
         num_attention_heads=2, block_num_heads=2, intermediate_size=24, sample_size=4),
    tiny("controlnet", "ControlNetModel", conditioned(controlnet_cond=drawn(2, 3, 32, 32, seed=2)), in_channels=4,
         **BLOCKS, cross_attention_dim=12, attention_head_dim=4, conditioning_embedding_out_channels=(8, 16),
         down_block_types=("DownBlock2D", "CrossAttnDownBlock2D")),
    tiny("t2i-adapter", "T2IAdapter", pictures(size=64), channels=[8, 16], num_res_blocks=1, downscale_factor=8,
         adapter_type="full_adapter"),
    tiny("t2i-adapter-light", "T2IAdapter", pictures(size=64), channels=[8, 16], num_res_blocks=1, downscale_factor=8,
         adapter_type="light_adapter"),
    tiny("autoencoder-kl", "AutoencoderKL", pictures(), **VAE),
    tiny("autoencoder-asymmetric", "AsymmetricAutoencoderKL", pictures(), **{
        key: value for key, value in VAE.items() if key not in ("block_out_channels", "layers_per_block")
    }, down_block_out_channels=(8, 16), layers_per_down_block=1, up_block_out_channels=(8, 16), layers_per_up_block=1),
    tiny("autoencoder-tiny", "AutoencoderTiny", pictures(), encoder_block_out_channels=(8, 8),
         decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 2), num_decoder_blocks=(2, 1)),
    tiny("autoencoder-temporal", "AutoencoderKLTemporalDecoder", pictures(num_frames=2),
         **{key: value for key, value in VAE.items() if key not in ("norm_num_groups", "up_block_types")} |
         {"block_out_channels": (32, 32)}),
    tiny("autoencoder-consistency", "ConsistencyDecoderVAE", pictures(), encoder_block_out_channels=(8, 16),
         encoder_in_channels=3, encoder_out_channels=4, encoder_layers_per_block=1, encoder_norm_num_groups=4,
         latent_channels=4,
         encoder_down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
         decoder_block_out_channels=(8, 16), decoder_in_channels=7, decoder_out_channels=6, decoder_layers_per_block=1,
         decoder_norm_num_groups=4, decoder_num_train_timesteps=1024,
         decoder_down_block_types=("ResnetDownsampleBlock2D", "ResnetDownsampleBlock2D"),
         decoder_up_block_types=("ResnetUpsampleBlock2D", "ResnetUpsampleBlock2D")),
    tiny("vq", "VQModel", pictures(), **VAE, num_vq_embeddings=16),
    tiny("transformer-2d", "Transformer2DModel", lambda: Inputs((drawn(2, 8, 8, 8), text())), **TRANSFORMER,
         in_channels=8, cross_attention_dim=12, activation_fn="geglu", attention_bias=True),
    tiny("transformer-2d-vq", "Transformer2DModel", lambda: Inputs(
        (torch.arange(32).reshape(2, 16) % 20, text(), torch.tensor(3))
    ), **TRANSFORMER, num_vector_embeds=20, sample_size=4, cross_attention_dim=12, norm_type="ada_norm",
         num_embeds_ada_norm=10),
    tiny("transformer-dit", "Transformer2DModel", lambda: Inputs((drawn(2, 4, 8, 8),), {
        "timestep": STEP, "class_labels": torch.tensor([1, 4]),
    }), **TRANSFORMER, sample_size=8, patch_size=2, in_channels=4, out_channels=8, norm_type="ada_norm_zero",
         num_embeds_ada_norm=10, activation_fn="gelu-approximate", attention_bias=True, norm_elementwise_affine=False),
    tiny("transformer-pixart", "Transformer2DModel", lambda: Inputs((drawn(2, 4, 8, 8), text()), {
        "timestep": STEP, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }), **TRANSFORMER, sample_size=8, patch_size=2, in_channels=4, out_channels=8, norm_type="ada_norm_single",
         cross_attention_dim=16, caption_channels=12, activation_fn="gelu-approximate", attention_bias=True,
         norm_elementwise_affine=False, norm_eps=1e-6),
    tiny("transformer-dual", "DualTransformer2DModel", lambda: Inputs((drawn(2, 8, 8, 8), drawn(2, 334, 12, seed=1))),
         **TRANSFORMER, in_channels=8, cross_attention_dim=12),
    tiny("transformer-temporal", "TransformerTemporalModel", lambda: Inputs((drawn(4, 8, 8, 8),), {"num_frames": 2}),
         **TRANSFORMER, in_channels=8),
    tiny("prior", "PriorTransformer", lambda: Inputs((drawn(2, 12), STEP), {
        "proj_embedding": drawn(2, 12, seed=2), "encoder_hidden_states": text(),
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool(),
    }), num_attention_heads=2, attention_head_dim=8, num_layers=2, embedding_dim=12, num_embeddings=5,
         additional_embeddings=4),
    tiny("t5-film", "T5FilmDecoder", lambda: Inputs((), {
        "encodings_and_masks": [(drawn(2, 5, 16, seed=1), torch.ones(2, 5))], "decoder_input_tokens": drawn(2, 8, 6),
        "decoder_noise_time": torch.tensor([0.3, 0.7]),
    }), input_dims=6, targets_length=8, d_model=16, num_layers=2, num_heads=2, d_kv=8, d_ff=24),
]
# fmt: on
