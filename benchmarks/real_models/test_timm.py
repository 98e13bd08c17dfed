"""The standard checks on many architectures of timm, each the smallest of its family, with random weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import nn

from pytest_modelprobe import ModelProbe, checks

ROWS, SIZE, CLASSES = 3, 64, 5
# Those that are made for images of one size.
SIZED = (
    "test_vit", "test_coatnet", "test_vit_relpos", "efficientvit_m0", "swiftformer_xs", "efficientformerv2_s0",
    "pit_ti_224", "vit_tiny_patch16_dinov3_qkvb", "coat_tiny", "convit_tiny", "gmlp_ti16_224",
    "vit_tiny_r_s16_p8_224", "xcit_nano_12_p8_224", "levit_128s",
)  # fmt: skip
FREE = (
    "test_convnext", "test_efficientnet", "test_nfnet", "test_mambaout", "test_byobnet", "test_resnet", "starnet_s050",
    "dla46x_c", "mobilevit_xxs", "edgenext_xx_small", "mobilenetv3_small_050", "ese_vovnet19b_slim_dw",
    "repghostnet_050", "ghostnet_050", "regnetx_002", "cspnext_tiny", "iformer_t", "cs3darknet_focus_s",
    "efficientvit_b0", "pvt_v2_b0", "fasternet_t0", "fastvit_t8", "lcnetv2_small", "inception_next_atto", "rexnet_100",
    "hgnetv2_b0",
)  # fmt: skip
EXPLAINED: dict[str, dict[str, str]] = {}
"""Name of a model → name of a check that breaks → why that is true of the model."""


def made(name: str) -> nn.Module:
    size = {"img_size": SIZE} if name in SIZED else {}
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **size)
    return model


def image(probe: ModelProbe) -> torch.Tensor:
    return probe.randn(ROWS, 3, SIZE, SIZE)


def loss(output: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, torch.arange(len(output), device=output.device) % CLASSES)


CASES = [
    checks.Case(
        name=name, factory=functools.partial(made, name), inputs=image, loss=loss, xfail=EXPLAINED.get(name, {})
    )
    for name in (*SIZED, *FREE)
]


@checks.parametrize_with_checks(CASES)
def test_standard(modelprobe: ModelProbe, check: Callable[[ModelProbe], Any]) -> None:
    check(modelprobe)
