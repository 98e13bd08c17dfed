"""Forty public models, small ones with random weights: each function makes one, and says nothing of its inputs."""

from __future__ import annotations

from torch import nn

PACKAGES = (
    "vit-pytorch", "x-transformers", "segmentation-models-pytorch", "monai", "efficientnet-pytorch",
    "pretrainedmodels", "torchvision", "timm", "transformers", "diffusers", "zuko", "conformer", "perceiver-pytorch",
    "linformer", "rtdl-revisiting-models", "denoising-diffusion-pytorch",
)  # fmt: skip

VIT = {"image_size": 64, "patch_size": 16, "num_classes": 10, "dim": 32, "heads": 2, "mlp_dim": 64}
HF = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
BLOCKS = {"block_out_channels": (32, 64), "norm_num_groups": 8, "layers_per_block": 1}


def vit_pytorch__vit() -> nn.Module:
    from vit_pytorch import ViT

    return ViT(**VIT, depth=2)


def vit_pytorch__simple_vit() -> nn.Module:
    from vit_pytorch import SimpleViT

    return SimpleViT(**VIT, depth=2)


def vit_pytorch__cait() -> nn.Module:
    from vit_pytorch.cait import CaiT

    return CaiT(**VIT, depth=2, cls_depth=1)


def vit_pytorch__t2t() -> nn.Module:
    from vit_pytorch.t2t import T2TViT

    return T2TViT(dim=32, image_size=64, depth=2, heads=2, mlp_dim=64, num_classes=10, t2t_layers=((7, 4), (3, 2)))


def vit_pytorch__cross_vit() -> nn.Module:
    from vit_pytorch.cross_vit import CrossViT

    return CrossViT(image_size=64, num_classes=10, depth=1, sm_patch_size=8, lg_patch_size=16, sm_dim=32, lg_dim=64)


def vit_pytorch__vit_1d() -> nn.Module:
    from vit_pytorch.vit_1d import ViT

    return ViT(seq_len=256, patch_size=16, num_classes=10, dim=32, depth=2, heads=2, mlp_dim=64)


def vit_pytorch__vit_3d() -> nn.Module:
    from vit_pytorch.vit_3d import ViT

    return ViT(image_size=64, frames=8, image_patch_size=16, frame_patch_size=2, num_classes=10, dim=32, depth=2,
               heads=2, mlp_dim=64)  # fmt: skip


def vit_pytorch__mobile_vit() -> nn.Module:
    from vit_pytorch.mobile_vit import MobileViT

    return MobileViT(image_size=(64, 64), dims=[32, 48, 64], channels=[16, 16, 24, 24, 32, 32, 48, 48, 64, 64, 80],
                     num_classes=10)  # fmt: skip


def x_transformers__decoder_of_tokens() -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    return TransformerWrapper(num_tokens=100, max_seq_len=64, attn_layers=Decoder(dim=32, depth=2, heads=2))


def x_transformers__encoder_of_numbers() -> nn.Module:
    from x_transformers import ContinuousTransformerWrapper, Encoder

    return ContinuousTransformerWrapper(dim_in=12, dim_out=5, max_seq_len=64,
                                        attn_layers=Encoder(dim=32, depth=2, heads=2))  # fmt: skip


def x_transformers__encoder_decoder() -> nn.Module:
    from x_transformers import XTransformer

    return XTransformer(dim=32, enc_num_tokens=80, enc_depth=1, enc_heads=2, enc_max_seq_len=64, dec_num_tokens=90,
                        dec_depth=1, dec_heads=2, dec_max_seq_len=64)  # fmt: skip


def x_transformers__image_encoder() -> nn.Module:
    from x_transformers import Encoder, ViTransformerWrapper

    return ViTransformerWrapper(image_size=64, patch_size=16, num_classes=10,
                                attn_layers=Encoder(dim=32, depth=2, heads=2))  # fmt: skip


def smp__unet() -> nn.Module:
    import segmentation_models_pytorch as smp

    return smp.Unet("resnet18", encoder_weights=None, in_channels=1, classes=2)


def smp__fpn() -> nn.Module:
    import segmentation_models_pytorch as smp

    return smp.FPN("resnet18", encoder_weights=None, in_channels=5)


def smp__deeplab() -> nn.Module:
    import segmentation_models_pytorch as smp

    return smp.DeepLabV3Plus("resnet18", encoder_weights=None)


def monai__unet() -> nn.Module:
    from monai.networks.nets import UNet

    return UNet(3, in_channels=2, out_channels=2, channels=(8, 16, 32), strides=(2, 2))


def monai__swin_unetr() -> nn.Module:
    from monai.networks.nets import SwinUNETR

    return SwinUNETR(in_channels=1, out_channels=2, feature_size=12)


def monai__vit() -> nn.Module:
    from monai.networks.nets import ViT

    return ViT(in_channels=1, img_size=(32, 32, 32), patch_size=(16, 16, 16), hidden_size=48, mlp_dim=96, num_layers=2,
               num_heads=4)  # fmt: skip


def monai__fully_connected() -> nn.Module:
    from monai.networks.nets import FullyConnectedNet

    return FullyConnectedNet(in_channels=10, out_channels=2, hidden_channels=[16, 8])


def efficientnet_pytorch__b0() -> nn.Module:
    from efficientnet_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-b0")


def pretrainedmodels__xception() -> nn.Module:
    from pretrainedmodels.models import xception

    return xception(num_classes=10, pretrained=None)


def torchvision__vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(image_size=96, patch_size=16, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64)


def torchvision__inception() -> nn.Module:
    from torchvision.models import inception_v3

    return inception_v3(init_weights=False)


def torchvision__video() -> nn.Module:
    from torchvision.models.video import r3d_18

    return r3d_18()


def torchvision__raft() -> nn.Module:
    from torchvision.models.optical_flow import raft_small

    return raft_small()


def timm__vit() -> nn.Module:
    import timm

    return timm.create_model("test_vit")


def timm__resnet() -> nn.Module:
    import timm

    return timm.create_model("resnet10t")


def transformers__llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**HF, vocab_size=100, num_key_value_heads=1))


def transformers__clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    return CLIPModel(CLIPConfig(text_config={**HF, "vocab_size": 100, "eos_token_id": 2},
                                vision_config={**HF, "image_size": 32, "patch_size": 8}))  # fmt: skip


def transformers__patchtst() -> nn.Module:
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    return PatchTSTForPrediction(PatchTSTConfig(num_input_channels=3, context_length=64, patch_length=8,
                                                patch_stride=8, d_model=32, num_hidden_layers=2))  # fmt: skip


def transformers__whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperModel

    return WhisperModel(WhisperConfig(vocab_size=100, num_mel_bins=16, d_model=32, encoder_layers=1, decoder_layers=1,
                                      encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64,
                                      decoder_ffn_dim=64, max_source_positions=50, pad_token_id=0, bos_token_id=1,
                                      eos_token_id=2, decoder_start_token_id=1))  # fmt: skip


def diffusers__unet() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(sample_size=32, in_channels=3, out_channels=3, **BLOCKS,
                       down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                       up_block_types=("AttnUpBlock2D", "UpBlock2D"))  # fmt: skip


def diffusers__conditional_unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(sample_size=32, cross_attention_dim=48, attention_head_dim=8, **BLOCKS,
                                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                                up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"))  # fmt: skip


def diffusers__autoencoder() -> nn.Module:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(32, 64),
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )


def zuko__flow() -> nn.Module:
    import zuko

    return zuko.flows.NSF(features=3, context=5)


def conformer__conformer() -> nn.Module:
    from conformer import Conformer

    return Conformer(dim=32, depth=2, dim_head=16, heads=2)


def perceiver__perceiver() -> nn.Module:
    from perceiver_pytorch import Perceiver

    return Perceiver(input_channels=3, input_axis=2, num_freq_bands=6, max_freq=10.0, depth=2, num_latents=16,
                     latent_dim=32)  # fmt: skip


def linformer__language_model() -> nn.Module:
    from linformer import LinformerLM

    return LinformerLM(num_tokens=100, dim=32, seq_len=64, depth=2, heads=2, k=16)


def rtdl__ft_transformer() -> nn.Module:
    from rtdl_revisiting_models import FTTransformer

    return FTTransformer(n_cont_features=6, cat_cardinalities=[4, 5], d_out=2, **FTTransformer.get_default_kwargs(1))


def denoising_diffusion__unet() -> nn.Module:
    from denoising_diffusion_pytorch import Unet

    return Unet(dim=16, dim_mults=(1, 2))
