"""Runs of a model: watched, repeated, with noise, on fake tensors, and of each layer in isolation.

`capture` observes whatever a model does. Here it is decided what the model does: what it is called with, in which
state, how often, and what is restored afterwards. Outside a watch, a run leaves no trace on the model.
"""

from __future__ import annotations

from pytest_modelprobe.capture import Options, Positions

from .live import WeakLiveRun
from .loss import Loss, NoGradientError, check_loss, loss_of
from .origin import Source, SourceMode, find_gradient_origin, graph_nodes
from .run import Mode, Run, is_same_device
from .stop import StopOn
from .trial import Given, Trial, Trials
from .watch import Watch
from .watched import watched
from .widening import NARROW, Widening, in_float32, widened

__all__ = [
    "Given",
    "Loss",
    "Mode",
    "NARROW",
    "Widening",
    "NoGradientError",
    "Options",
    "Positions",
    "Run",
    "StopOn",
    "Source",
    "SourceMode",
    "Trial",
    "Trials",
    "Watch",
    "watched",
    "WeakLiveRun",
    "check_loss",
    "find_gradient_origin",
    "graph_nodes",
    "in_float32",
    "is_same_device",
    "loss_of",
    "widened",
]
