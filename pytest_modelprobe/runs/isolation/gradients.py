"""The gradients of an isolated call: its loss, and one reading for all gradients.

The gradients of one call add up to one reading, each with signs that its role chooses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_modelprobe.models import seeding
from pytest_modelprobe.record import Reading, Statistics


def projected(tensor: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of a tensor times weights, divided by the square root of its size."""
    project: Any = _Projection.apply
    return project(tensor, weights, 1 / math.sqrt(tensor.numel()))  # type: ignore[no-any-return]


class _Projection(torch.autograd.Function):
    """The function of `projected`. It saves no tensor, because activation checkpointing counts the saved ones."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weights: Tensor, scale: float) -> Tensor:
        ctx.weights, ctx.dtype, ctx.scale = weights, tensor.dtype, scale
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        return torch.dot(tensor.to(wide).reshape(-1), weights.to(wide).reshape(-1)) * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return (gradients[0] * ctx.scale * ctx.weights).to(ctx.dtype), None, None


def combined(gradients: Sequence[tuple[str, Reading]]) -> Reading:
    """Return one reading for all gradients. Each is scaled to the fourth root of its norm, so that small ones count."""
    fingerprint: list[float] | None = None
    deviations, count, nonfinite = 0.0, 0, 0
    for role, reading in gradients:
        numbers = reading.statistics
        if numbers is None or reading.fingerprint is None:
            continue
        norm = (numbers.rms or 0.0) * math.sqrt(numbers.finite)
        if math.isinf(norm):
            # The squares of its elements are too large for a float, so the fingerprint estimates the norm.
            norm = math.hypot(*reading.fingerprint)
        scale = norm**-0.75 if norm else 0.0
        signs = seeding.derive(0, f"gradient {role}")
        terms = [scale * x * (1 if signs >> k & 1 else -1) for k, x in enumerate(reading.fingerprint)]
        fingerprint = terms if fingerprint is None else [a + b for a, b in zip(fingerprint, terms, strict=True)]
        deviations += (scale * norm) ** 2
        count += numbers.count
        nonfinite += numbers.nonfinite
    return Reading(
        tensors=len(gradients),
        statistics=Statistics(
            count=count, nan=nonfinite, mean=0.0 if count > nonfinite else None, deviations=deviations
        ),
        fingerprint=None if fingerprint is None else tuple(fingerprint),
    )
