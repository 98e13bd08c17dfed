"""What is asked of a capture: which layers are seen, and what is taken down of each.

A run, a watch and a capture share these options, so they hand on one value. Only what users call spells each option
out, because editors and the documentation show signatures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pytest_modelprobe.record import Selector

Positions = Literal["all", "last"]
"""Which positions of a sequence to record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options that a run, a watch and a capture share."""

    layers: Selector = "**"
    """Which layers to record. The root is hooked in any case, for it marks where a forward begins."""
    keep: Selector = ()
    """Which layers' output tensors of the newest forward to keep."""
    functionals: bool = False
    """Whether to record functional calls such as ``F.relu`` as pseudo-layers."""
    attention: bool = False
    """Whether to look at attention weights."""
    profile: bool = False
    """Whether to measure what each layer costs."""
    histograms: bool = False
    """Whether to count the elements of each tensor and gradient in bins."""
    positions: Positions = "all"
    """Whether to record all positions of a sequence, or the last one alone."""
    steps: int = 1
    """How many steps of training to keep, each apart."""

    @property
    def keeps(self) -> bool:
        """Whether outputs are kept. An empty list asks for none; `select` would refuse it."""
        return self.keep not in ((), [])
