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
ONE_EACH = (1, 1, 1, 1)
# Those that are made for images of one size. Each name goes with what makes the model small.
SIZED: dict[str, dict[str, Any]] = {
    "test_vit": {"depth": 1},
    "test_coatnet": {},
    "test_vit_relpos": {"depth": 1},
    "beit_base_patch16_224": {"depth": 1, "embed_dim": 48, "num_heads": 3},
    "cait_xxs24_224": {"depth": 1, "depth_token_only": 1},
    "coat_tiny": {"serial_depths": ONE_EACH, "parallel_depth": 1},
    "convit_tiny": {"depth": 2, "local_up_to_layer": 1},
    "deit_tiny_patch16_224": {"depth": 1},
    "efficientformerv2_s0": {"depths": ONE_EACH},
    "efficientvit_m0": {"depth": (1, 1, 1)},
    "eva02_tiny_patch14_224": {"depth": 1},
    "hiera_tiny_224": {"stages": ONE_EACH},
    "levit_128s": {"depth": (1, 1, 1)},
    "sequencer2d_s": {"layers": ONE_EACH},
    "swiftformer_xs": {"layers": ONE_EACH},
    "swin_tiny_patch4_window7_224": {"depths": ONE_EACH, "embed_dim": 24},
    "twins_svt_small": {"depths": ONE_EACH},
    "visformer_tiny": {"depth": (1, 1, 1)},
    "vit_tiny_patch16_dinov3_qkvb": {"depth": 1},
    "vit_tiny_r_s16_p8_224": {"depth": 1},
    "xcit_nano_12_p8_224": {"depth": 1},
}
FREE: dict[str, dict[str, Any]] = {
    "test_byobnet": {},
    "test_convnext": {},
    "test_efficientnet": {},
    "test_mambaout": {},
    "test_nfnet": {},
    "test_resnet": {},
    "cs3darknet_focus_s": {},
    "dla46x_c": {},
    "edgenext_xx_small": {"depths": (1, 1, 2, 2)},
    "efficientvit_b0": {"depths": ONE_EACH},
    "ese_vovnet19b_slim_dw": {},
    "fasternet_t0": {"depths": ONE_EACH},
    "fastvit_t8": {"layers": ONE_EACH},
    "hgnetv2_b0": {},
    "inception_next_atto": {"depths": ONE_EACH},
    "mobilenetv3_small_050": {},
    "pvt_v2_b0": {"depths": ONE_EACH},
    "starnet_s050": {"depths": ONE_EACH},
    "tiny_vit_5m_224": {"depths": ONE_EACH},
}
WRONG_IN_TORCH = (
    "of a batch of one whose channels come last in memory, as those of tokens, BatchNorm in evaluation mode gets a "
    "wrong gradient from torch 2.13 on CPU"
)
EXPLAINED: dict[str, dict[str, str]] = {
    "levit_128s": {"gradient_accumulation": WRONG_IN_TORCH},
    "xcit_nano_12_p8_224": {"gradient_accumulation": WRONG_IN_TORCH},
    "convit_tiny": {"state_unchanged_by_forward": "it makes its table of relative positions in the first forward"},
}
"""Name of a model → name of a check that breaks → why that is true of the model."""


def made(name: str) -> nn.Module:
    settings = {"img_size": SIZE, **SIZED[name]} if name in SIZED else FREE[name]
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **settings)
    return model


def image(probe: ModelProbe) -> torch.Tensor:
    return probe.randn(ROWS, 3, SIZE, SIZE)


def loss(output: torch.Tensor) -> torch.Tensor:
    """Every image is of one class: a target for each row would go with no part of the batch."""
    return nn.functional.cross_entropy(output, output.new_zeros(len(output), dtype=torch.long))


CASES = [
    checks.Case(
        name=name, factory=functools.partial(made, name), inputs=image, loss=loss, xfail=EXPLAINED.get(name, {})
    )
    for name in (*SIZED, *FREE)
]


@checks.parametrize_with_checks(CASES)
def test_standard(modelprobe: ModelProbe, check: Callable[[ModelProbe], Any]) -> None:
    check(modelprobe)
