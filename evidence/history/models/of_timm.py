"""Small models of timm: one or a few of each family, and images as small as they take."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import Inputs, Model, adopt, drawn

for operator in ("nms", "qnms"):
    # timm imports torchvision, whose operators are compiled for one build of torch alone. Where they are declared, it
    # can be imported beside any other. No model here calls them.
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import timm  # noqa: E402 - after what it needs

CONVOLUTIONAL = """
    resnet10t resnet18 resnet26d seresnet18 skresnet18 ecaresnet26t resnest14d resnext26ts gcresnext26ts nf_resnet26
    nf_regnet_b0 lambda_resnet26t res2net50_26w_4s resnetv2_50 convnext_atto convnext_nano_ols convnextv2_atto
    edgenext_xx_small poolformer_s12 convmixer_768_32 inception_next_tiny efficientnet_b0 efficientnetv2_rw_t
    tf_efficientnet_lite0 mobilenetv2_050 mobilenetv3_small_050 mnasnet_small ghostnet_100 repghostnet_050 lcnet_035
    tinynet_e fbnetc_100 mixnet_s rexnet_100 hardcorenas_a regnetx_002 regnety_002 regnetz_b16 gernet_s repvgg_a2
    selecsls42 dla46x_c dpn68 densenet121 ese_vovnet19b_slim_dw hrnet_w18_small cspresnet50 xception41 hgnetv2_b0
    repvit_m1 fastvit_t8 efficientvit_b0 focalnet_tiny_srf davit_tiny caformer_s18
    crossvit_tiny_240 xcit_nano_12_p16_224_dist twins_pcpvt_small twins_svt_small mobilevit_xxs mobilevitv2_050
    pvt_v2_b0 mvitv2_tiny sequencer2d_s
"""
"""They take images of any size."""
SIZED = """
    botnet26t_256 vit_tiny_patch16_224 vit_small_patch32_224 vit_relpos_small_patch16_224
    vit_srelpos_small_patch16_224 deit_tiny_patch16_224 deit_tiny_distilled_patch16_224 deit3_small_patch16_224
    flexivit_small eva02_tiny_patch14_224 cait_xxs24_224 convit_tiny coat_lite_tiny coat_tiny pit_ti_224
    tnt_s_patch16_224 volo_d1_224 visformer_tiny levit_128s mixer_s32_224 gmlp_ti16_224 resmlp_12_224 gmixer_24_224
    swinv2_cr_tiny_ns_224 swinv2_tiny_window8_256 gcvit_xxtiny maxvit_rmlp_pico_rw_256 coatnet_nano_rw_224
    jx_nest_tiny
"""
"""They take images of a size that is given when they are made."""
LARGE = {
    "inception_v3": 128, "swin_tiny_patch4_window7_224": 224, "efficientformer_l1": 224, "halonet26t": 256,
    "bat_resnext26ts": 256, "efficientvit_m0": 224, "efficientformerv2_s0": 224,
    "tiny_vit_5m_224": 224,
}  # fmt: skip
"""They take images of one size."""
LATER = {"tnt_s_patch16_224": "tnt_s_legacy_patch16_224"}
"""Names of later versions, in which the old name is another architecture."""


@dataclass(frozen=True)
class Created(Model):
    """A model of which timm knows the names that its weights had."""

    def load(self, folder: Path) -> tuple[nn.Module, list[str]]:
        model, saved = self.build().eval(), torch.load(folder / f"{self.name}.weights.pt")
        mapped = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
        if mapped and saved.keys() != model.state_dict().keys():
            saved = mapped(saved, model)
        return model, adopt(model, saved)


def created(name: str, size: int, **options: Any) -> Model:
    def build() -> nn.Module:
        later = LATER.get(name, name)
        model: nn.Module = timm.create_model(later if timm.is_model(later) else name, num_classes=10, **options)
        return model

    return Created(name, build, lambda: Inputs((drawn(2, 3, size, size),)))


def tiny(place: str, **settings: Any) -> Model:
    """Return a model of a class, given with its module."""
    module, _, kind = place.partition(".")
    size = settings.get("img_size", 64)

    def build() -> nn.Module:
        model: nn.Module = getattr(importlib.import_module(f"timm.models.{module}"), kind)(num_classes=10, **settings)
        return model

    return Created(kind, build, lambda: Inputs((drawn(2, 3, size, size),)))


TINY = [
    tiny("beit.Beit", img_size=64, embed_dim=64, depth=2, num_heads=2, init_values=0.1, use_rel_pos_bias=True),
    tiny("cait.Cait", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2),
    tiny("convnext.ConvNeXt", depths=(1, 1, 1, 1), dims=(8, 12, 16, 20)),
    tiny("densenet.DenseNet", growth_rate=4, block_config=(2, 2)),
    tiny("edgenext.EdgeNeXt", dims=(8, 16, 24, 32), depths=(1, 1, 2, 1), heads=(2, 2, 2, 2)),
    tiny("mlp_mixer.MlpMixer", img_size=32, patch_size=8, num_blocks=2, embed_dim=16),
    tiny("nest.Nest", img_size=64, patch_size=4, num_levels=2, embed_dims=(8, 16), num_heads=(1, 2), depths=(1, 1)),
    tiny("pvt_v2.PyramidVisionTransformerV2", depths=(1, 1, 1, 1), embed_dims=(8, 16, 16, 32), num_heads=(1, 2, 2, 4)),
    tiny(
        "swin_transformer.SwinTransformer",
        img_size=32,
        patch_size=4,
        embed_dim=8,
        depths=(1, 1),
        num_heads=(1, 2),
        window_size=4,
    ),
    tiny(
        "swin_transformer_v2.SwinTransformerV2",
        img_size=32,
        patch_size=4,
        embed_dim=8,
        depths=(1, 1),
        num_heads=(1, 2),
        window_size=4,
    ),
    tiny(
        "twins.Twins",
        img_size=64,
        embed_dims=(8, 16, 16, 32),
        num_heads=(1, 2, 2, 4),
        depths=(1, 1, 1, 1),
        mlp_ratios=(2, 2, 2, 2),
    ),
    tiny("visformer.Visformer", img_size=64, init_channels=8, embed_dim=32, depth=(1, 1, 1), num_heads=2),
    tiny("vision_transformer.VisionTransformer", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2),
    tiny(
        "volo.VOLO",
        img_size=64,
        layers=(1, 1, 1, 1),
        embed_dims=(16, 32, 32, 32),
        num_heads=(2, 4, 4, 4),
        stem_hidden_dim=8,
    ),
]
"""Classes with the defaults of the class, which are not always those of the models that have names."""


def _known() -> Iterator[Model]:
    yield from TINY
    yield created("vgg11_bn", 64, mlp_ratio=0.01)
    sizes = {**dict.fromkeys(CONVOLUTIONAL.split(), 64), **LARGE}
    yield from (created(name, size) for name, size in sizes.items() if timm.is_model(name))
    # A patch of 14 pixels does not divide 64.
    at = {name: 56 if "patch14" in name else 64 for name in SIZED.split()}
    yield from (created(name, size, img_size=size) for name, size in at.items() if timm.is_model(name))


MODELS = list(_known())
