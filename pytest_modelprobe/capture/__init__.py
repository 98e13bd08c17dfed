"""Hooks: what a model does while it runs, attached, observed and detached.

`Capture` in `capture.py` makes all parts and receives what the hooks tell; `assembly.py` makes a record of it. Of the
rooms, `hooks` is what torch calls, `observed` what is kept of a call, `passes` how forwards, backward passes and steps
belong together, and `special` what only some captures look at.
"""

from __future__ import annotations

from .assembly import Which, assemble
from .capture import Capture, Options, Positions
from .forwards import ForwardCounts
from .observation import SeenValue
from .tensors import ParameterReading, content_key, read_parameters

__all__ = [
    "Capture",
    "ForwardCounts",
    "Options",
    "ParameterReading",
    "Positions",
    "SeenValue",
    "Which",
    "assemble",
    "content_key",
    "read_parameters",
]
