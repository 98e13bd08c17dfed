"""Hooks: what a model does while it runs, attached, observed and detached.

`Capture` in `capture.py` makes all parts and receives what the hooks tell; `assembly.py` makes a record of it. `hooks`,
`gradients` and `calls` are what torch calls, `observation` and `tensors` what is kept of a call, `forwards` and
`training` how forwards, backward passes and steps belong together. `attention` and `profiler` are what only some
captures look at.
"""

from __future__ import annotations

from .assembly import Which as Which
from .assembly import assemble as assemble
from .capture import Capture as Capture
from .capture import Options as Options
from .forwards import ForwardCounts as ForwardCounts
from .tensors import ParameterReading as ParameterReading
from .tensors import content_key as content_key
from .tensors import read_parameters as read_parameters
