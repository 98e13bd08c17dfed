"""What one test does, as far as faults are judged by it, and the fault that is planted."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from .operators import Operator
from .plan import Place
from .training import TrainingFault


@dataclass
class Seen:
    """What one test, or one fixture of wider scope, did with models."""

    places: dict[Place, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Layers that were called, and the names of the operators that fit them."""
    of_training: dict[Place, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Calls that a training program makes, and the names of the faults that fit them."""
    calls: int = 0
    """How many times modules were called."""
    steps: int = 0
    """How many steps optimizers took."""
    makes_models: bool = False
    backward: set[str] = field(default_factory=set)
    """Models whose outputs a gradient reached."""
    outputs: Any = field(default_factory=hashlib.sha256)
    """A digest of all that models returned, of the gradients of that, and of gradients and parameters at each step of
    an optimizer, in order."""

    @property
    def has_models(self) -> bool:
        """Whether a model or an optimizer was made or called."""
        return self.makes_models or self.calls > 0

    def differs(self, other: Seen) -> bool:
        """Whether models returned something else, or were trained to something else."""
        return bool(self.outputs.digest() != other.outputs.digest())


@dataclass
class Planted:
    """A fault, and what became of it in a run."""

    place: Place
    operator: Operator | TrainingFault
    fired: bool = False
    """Whether the layer was called with it, or the training program made the call."""
    state: dict[str, Any] = field(default_factory=dict)
    """What a fault keeps from one call to the next."""
