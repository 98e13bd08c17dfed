"""Mutation testing: run the tests again with faults planted in the models, and tell which of them no test notices."""

from __future__ import annotations

from .operators import OPERATORS, LayerCall, Operator
from .plan import BaselineTest, Mutant, Place, Planned, Results, Verdict, planned
from .planting import Observer
from .report import lines
from .seen import Planted, Seen
from .selection import FAULTS, selected
from .session import MutationSession, Options
from .training import TRAINING, TrainingFault
from .worker import WORKER, Worker

__all__ = [
    "FAULTS",
    "OPERATORS",
    "TRAINING",
    "WORKER",
    "BaselineTest",
    "LayerCall",
    "Mutant",
    "MutationSession",
    "Observer",
    "Operator",
    "Options",
    "Place",
    "Planned",
    "Planted",
    "Results",
    "Seen",
    "TrainingFault",
    "Verdict",
    "Worker",
    "lines",
    "planned",
    "selected",
]
