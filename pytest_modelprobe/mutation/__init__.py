"""Mutation testing: run the tests again with faults planted in the models, and tell which of them no test notices."""

from __future__ import annotations

from .operators import OPERATORS, LayerCall, Operator
from .plan import BaselineTest, Mutant, Place, Planned, Results, Verdict, planned
from .planting import Observer, Planted, Seen
from .report import lines
from .session import MutationSession, Options
from .worker import WORKER, Worker

__all__ = [
    "OPERATORS",
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
    "Verdict",
    "Worker",
    "lines",
    "planned",
]
