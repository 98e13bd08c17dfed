"""Hooks: what a model does while it runs, attached, observed and detached."""

from __future__ import annotations

from .assembly import Which, assemble
from .capture import Capture
from .options import Options
from .parameters import ParameterReading, read_parameters
from .stop import SeenValue
from .tensors import content_key

__all__ = ["Capture", "Options", "ParameterReading", "SeenValue", "Which", "assemble", "content_key", "read_parameters"]
