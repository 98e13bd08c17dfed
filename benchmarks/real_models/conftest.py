"""Gives timm the operators that torchvision's compiled part declares, which builds of torch for the CPU lack."""

from __future__ import annotations

import torch

OPERATORS = ("nms", "qnms")

_library = torch.library.Library("torchvision", "FRAGMENT")
for _name in OPERATORS:
    _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
