"""The training loop, as the hooks see it: which gradients each step of an optimizer was taken with."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from pytest_modelprobe._torch import accumulates
from pytest_modelprobe.record import Training
from pytest_modelprobe.statistics import ambient_modes_disabled


class Accumulated:
    """What is known of what lies in a parameter's ``.grad``."""

    __slots__ = ("mixed", "passes", "stale", "total", "used")

    def __init__(self) -> None:
        self.passes = 0
        """Backward passes added up since a reset or a step."""
        self.used = False
        """Whether a step was taken with it."""
        self.stale = False
        """Whether a pass was added to gradients with which a step had been taken."""
        self.mixed = False
        """Whether passes before and after a step of another optimizer were added up."""
        self.total = 0
        """Steps of all optimizers when the newest pass arrived."""


class _Rounds:
    """The steps of one optimizer with a forward before them."""

    __slots__ = ("idle", "taken")

    def __init__(self) -> None:
        self.taken = 0
        self.idle = 0
        """Those before which a forward in training mode ran without gradients."""


class Steps:
    """Counts what optimizers do while a model is observed.

    >>> steps = Steps()
    >>> steps.training is None
    True
    """

    def __init__(self) -> None:
        self._steps = self._others = self._lookalikes = self._passes = 0
        self._stale = self._mixed = self._accumulated = self._evaluating = self._discarded = 0
        self._rounds: WeakKeyDictionary[Optimizer, _Rounds] = WeakKeyDictionary()
        self._all_rounds: list[_Rounds] = []
        self._optimizers: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self._stepping = False
        self._task = self._discarded_in = -1
        self._adds = True  # whether the newest pass adds to ``.grad``
        self._left: bool | None = None  # whether gradients of the last step are still there in the newest pass
        # Since the last step of an optimizer:
        self._forwards = 0
        self._idle = False
        self._in_evaluation = False

    @property
    def training(self) -> Training | None:
        """What was counted; None where no optimizer stepped and no gradients were thrown away."""
        if not (self._steps or self._others or self._discarded):
            return None
        irregular = sum(r.idle for r in self._all_rounds if r.idle < r.taken)
        if self._idle and not any(r.idle for r in self._all_rounds):
            irregular += 1
        return Training(
            steps=self._steps,
            others=self._others,
            lookalikes=self._lookalikes,
            optimizers=len(self._all_rounds),
            passes=self._passes,
            stale=self._stale,
            mixed=self._mixed,
            accumulated=self._accumulated,
            evaluating=self._evaluating,
            idle=irregular,
            discarded=self._discarded,
        )

    def forward_begins(self, *, training: bool) -> None:
        """Take in that a forward begins."""
        if torch.is_grad_enabled():
            self._forwards += training
        else:
            self._idle |= training

    def reached(self, *, training: bool) -> None:
        """Take in that a backward pass came to a forward of that mode."""
        self._in_evaluation |= not training

    def arrives(self, parameter: nn.Parameter, held: Accumulated, task: int) -> None:
        """Take in that a gradient is about to be added to ``.grad``, or to be the result of `torch.autograd.grad`."""
        if task != self._task:
            self._task, self._left = task, None
            with ambient_modes_disabled():  # the node of a leaf is that of a view of it, and there is none in inference
                self._adds = accumulates(parameter)
            self._passes += self._adds
        if not self._adds:
            return
        if parameter.grad is None or (held.used and not self._is_left(parameter.grad)):
            # Thrown away, unless another step came between: what reached this model by the way is nobody's loss.
            if held.passes and not held.used and held.total == self._total and task != self._discarded_in:
                self._discarded += 1
                self._discarded_in = task
            held.passes, held.used, held.stale, held.mixed = 0, False, False, False
        elif held.used:
            held.stale = True
        elif held.passes and held.total != self._total:
            held.mixed = True
        held.passes += 1
        held.total = self._total
        if self._stepping:  # in the closure of a step, which uses it
            held.used = True

    def step_begins(
        self, optimizer: Optimizer, held: Collection[Accumulated], parameters: Collection[nn.Parameter]
    ) -> None:
        """Take in that an optimizer is about to step.

        Args:
            optimizer: The optimizer.
            held: Of its parameters that are the model's.
            parameters: All of the model that are hooked.
        """
        if not held:
            self._others += 1
            self._lookalikes += self._is_alike(optimizer, parameters)
        else:
            self._steps += 1
            self._stale += any(one.stale for one in held)
            self._mixed += any(one.mixed for one in held)
            self._accumulated += self._forwards > 1 and any(one.passes > 1 for one in held)
            self._evaluating += self._in_evaluation
            self._in_evaluation = False
            for one in held:
                one.used, one.stale, one.mixed, one.passes = True, False, False, 0
            rounds = self._rounds.get(optimizer)
            if rounds is None:
                rounds = self._rounds[optimizer] = _Rounds()
                self._all_rounds.append(rounds)
            rounds.taken += bool(self._forwards or self._idle)
            rounds.idle += self._idle
            self._stepping = True
        self._forwards, self._idle = 0, False

    def step_ends(self) -> None:
        """Take in that an optimizer has stepped."""
        self._stepping = False

    @property
    def _total(self) -> int:
        return self._steps + self._others

    def _is_left(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient with which a step was taken is still there.

        One tells for all of a pass: on CUDA it has to be waited for.
        """
        if self._left is None:
            self._left = False
            with contextlib.suppress(RuntimeError, NotImplementedError):  # of a kind that cannot be looked at
                self._left = bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())
        return self._left

    def _is_alike(self, optimizer: Optimizer, parameters: Collection[nn.Parameter]) -> bool:
        """Whether an optimizer has parameters of the shapes of the model's."""
        if optimizer not in self._optimizers:
            shapes = Counter(p.shape for group in optimizer.param_groups for p in group["params"])
            self._optimizers[optimizer] = shapes <= Counter(p.shape for p in parameters)
        return self._optimizers[optimizer]
