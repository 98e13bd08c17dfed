"""Runs of a model: watched, repeated, with noise, on fake tensors, and of each layer in isolation.

`capture` observes whatever a model does. Here it is decided what the model does: what it is called with, in which
state, how often, and what is restored afterwards. Outside a watch, a run leaves no trace on the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_modelprobe import extension
from pytest_modelprobe.capture import Options as Options
from pytest_modelprobe.statistics import Requests as Requests

from . import noise as noise
from .fakes import FakeModel as FakeModel
from .fakes import architecture as architecture
from .fakes import quiet as quiet
from .isolation import as_mask as as_mask
from .loss import Loss as Loss
from .loss import NoGradientError as NoGradientError
from .loss import check_loss as check_loss
from .loss import loss_of as loss_of
from .noise import NARROW as NARROW
from .noise import Widening as Widening
from .noise import in_float32 as in_float32
from .noise import widened as widened
from .origin import Source as Source
from .origin import SourceMode as SourceMode
from .origin import find_gradient_origin as find_gradient_origin
from .origin import graph_nodes as graph_nodes
from .origin import operation_of as operation_of
from .run import LiveRunOfRun as LiveRunOfRun
from .run import Mode as Mode
from .run import Run as Run
from .run import is_same_device as is_same_device
from .watch import Watch as Watch

if TYPE_CHECKING:
    from pytest_modelprobe.extras.compilation.graphs import with_graph_breaks as with_graph_breaks


def __getattr__(name: str) -> Any:
    return extension.attribute("runs", name, __name__)
