"""Hooks: what a model does while it runs, attached, observed and detached."""

from __future__ import annotations

from .assembly import Which, assemble
from .capture import Capture, run_eagerly
from .observation import identity
from .parameters import owned

__all__ = ["Capture", "Which", "assemble", "identity", "owned", "run_eagerly"]
