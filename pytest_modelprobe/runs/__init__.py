"""Runs: noise, origin of what is not finite, structure without computing, each module alone."""

from __future__ import annotations

from .isolation import Again, Forwards, Key, isolate, merged, noisy, recipes_of
from .loss import random_loss
from .origin import Source, SourceMode, find_gradient_origin, find_origin

__all__ = [
    "Again",
    "Forwards",
    "Key",
    "Source",
    "SourceMode",
    "find_gradient_origin",
    "find_origin",
    "isolate",
    "merged",
    "noisy",
    "random_loss",
    "recipes_of",
]
