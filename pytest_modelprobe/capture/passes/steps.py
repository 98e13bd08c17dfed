"""The training loop: which gradients each step of an optimizer was taken with.

Torch calls a hook before and after each step and nothing when gradients are reset. Whether ``zero_grad`` was called is
therefore told by the gradients themselves. The counts say whether a loop resets, accumulates or mixes gradients.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from pytest_modelprobe._torch import accumulates
from pytest_modelprobe.record import Training
from pytest_modelprobe.statistics import ambient_modes_disabled, as_plain_tensor


@dataclass(slots=True, eq=False)
class _Passes:
    """Backward passes of which the gradients of some parameters consist: the first of them was the same."""

    count: int = 0
    held: int = 0
    """Parameters whose gradients are not reset."""
    used: bool = False
    """Whether a step was taken with the gradient of one of these parameters."""


@dataclass(slots=True, eq=False)
class GradientState:
    """What the ``.grad`` of one parameter consists of."""

    passes: int = 0
    """Backward passes added up since a reset or a step."""
    used: bool = False
    """Whether a step was taken with these gradients."""
    stale: bool = False
    """Whether a pass was added to gradients with which a step had been taken."""
    mixed: bool = False
    """Whether passes before and after a step of another optimizer were added up."""
    total: int = 0
    """Steps of all optimizers when the newest pass arrived."""
    began: _Passes | None = None
    """The passes since the newest reset, with those of other parameters that were reset then."""


@dataclass(slots=True, eq=False)
class _OptimizerSteps:
    """The steps of one optimizer with a forward before them."""

    taken: int = 0
    idle: int = 0
    """Steps before which a forward in training mode ran without gradients."""


class Steps:
    """Counts what optimizers do while a model is observed.

    >>> steps = Steps()
    >>> steps.training is None
    True
    """

    def __init__(self) -> None:
        self._steps = self._others = self._lookalikes = self._passes = 0
        self._stale = self._mixed = self._accumulated = self._evaluating = self._discarded = self._emptied = 0
        self._by_optimizer: WeakKeyDictionary[Optimizer, _OptimizerSteps] = WeakKeyDictionary()
        self._optimizer_steps: list[_OptimizerSteps] = []
        self._optimizers: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self._stepping = False
        self._lost = 0
        self._began = _Passes()  # those of gradients that begin in the newest pass
        self._task = self._discarded_in = -1
        self._adds = True  # whether the newest pass adds to ``.grad``
        self._kept: bool | None = None  # whether gradients of the last step were kept in the newest pass
        # Since the last step of an optimizer:
        self._forwards = 0
        self._idle = False
        self._in_evaluation = False

    @property
    def training(self) -> Training | None:
        """The counts; None where no optimizer stepped and no gradients were discarded."""
        if not (self._steps or self._others or self._discarded):
            return None
        irregular = sum(r.idle for r in self._optimizer_steps if r.idle < r.taken)
        if self._idle and not any(0 < r.idle == r.taken for r in self._optimizer_steps):
            irregular += 1
        return Training(
            steps=self._steps,
            others=self._others,
            lookalikes=self._lookalikes,
            optimizers=len(self._optimizer_steps),
            passes=self._passes,
            stale=self._stale,
            mixed=self._mixed,
            accumulated=self._accumulated,
            evaluating=self._evaluating,
            idle=irregular,
            emptied=self._emptied,
            discarded=self._discarded,
            lost=max(0, self._lost),
        )

    def forward_begins(self, module: nn.Module) -> None:
        """Count a forward of a module that begins."""
        if torch.is_grad_enabled():
            self._forwards += module.training
        elif module.training:
            self._idle |= not _computes_statistics(module)

    def reached_in_evaluation(self) -> None:
        """Note that a backward pass reached a forward in evaluation mode."""
        self._in_evaluation = True

    def arrives(self, parameter: nn.Parameter, held: GradientState, task: int) -> bool:
        """Count a gradient that is about to be added to ``.grad``, or to be the result of `torch.autograd.grad`.

        Return whether it is the first that shows that those of earlier passes were discarded.
        """
        discarded = False
        is_new = task != self._task
        if is_new:
            self._task, self._kept, self._began = task, None, _Passes()
            with ambient_modes_disabled():  # the node of a leaf is that of a view of it, and there is none in inference
                self._adds = accumulates(parameter)
            self._passes += self._adds
        if not self._adds:
            return False
        total = self._steps + self._others
        if parameter.grad is None or (held.used and not self._is_kept(parameter.grad)):
            # Discarded, unless another optimizer stepped between: then the loss was that of another model.
            if held.passes and not held.used and held.total == total and task != self._discarded_in:
                self._discarded += 1
                self._discarded_in = task
                discarded = True
            held.passes, held.used, held.stale, held.mixed = 0, False, False, False
            self._reset(held)
        elif held.used:
            held.stale = True
        elif held.passes and held.total != total:
            held.mixed = True
        held.passes += 1
        held.total = total
        if held.began is None:
            held.began = self._began
            held.began.held += 1
        held.began.count += is_new
        if self._stepping:  # in the closure of a step, which uses it
            held.used = held.began.used = True
        return discarded

    def skipped(self, passes: int) -> None:
        """Note that gradients of passes were not finite, and rightly thrown away."""
        self._lost -= passes

    def _reset(self, held: GradientState) -> None:
        """Note that a gradient was reset: if those of all others were, its passes are lost, unless a step used them."""
        if held.began is not None:
            held.began.held -= 1
            if not (held.began.held or held.began.used):
                self._lost += held.began.count
            held.began = None

    def step_begins(
        self,
        optimizer: Optimizer,
        held: Collection[GradientState],
        parameters: Collection[nn.Parameter],
        *,
        emptied: bool,
    ) -> None:
        """Count a step that an optimizer is about to take.

        Args:
            optimizer: The optimizer.
            held: The gradients of those of its parameters that are hooked.
            parameters: All hooked parameters of the model.
            emptied: Whether all gradients that had arrived are gone.
        """
        if not held:
            self._others += 1
            self._lookalikes += self._has_same_shapes(optimizer, parameters)
        else:
            self._steps += 1
            self._emptied += emptied
            self._stale += any(one.stale for one in held)
            self._mixed += any(one.mixed for one in held)
            self._accumulated += self._forwards > 1 and any(one.passes > 1 for one in held)
            self._evaluating += self._in_evaluation
            self._in_evaluation = False
            for one in held:
                one.used, one.stale, one.mixed, one.passes = True, False, False, 0
                if one.began is not None:
                    one.began.used = True
            counts = self._by_optimizer.get(optimizer)
            if counts is None:
                counts = self._by_optimizer[optimizer] = _OptimizerSteps()
                self._optimizer_steps.append(counts)
            counts.taken += bool(self._forwards or self._idle)
            counts.idle += self._idle
            self._stepping = True
        self._forwards, self._idle = 0, False

    def step_ends(self) -> None:
        """Note that an optimizer has stepped."""
        self._stepping = False

    def _is_kept(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient with which a step was taken was not reset to zero since.

        One gradient of each pass is read, as reading synchronizes on CUDA.
        """
        if self._kept is None:
            self._kept = is_zero(gradient) is False
        return self._kept

    def _has_same_shapes(self, optimizer: Optimizer, parameters: Collection[nn.Parameter]) -> bool:
        """Whether the parameters of an optimizer have the shapes of parameters of the model."""
        if optimizer not in self._optimizers:
            shapes = Counter(p.shape for group in optimizer.param_groups for p in group["params"])
            self._optimizers[optimizer] = shapes <= Counter(p.shape for p in parameters)
        return self._optimizers[optimizer]


def is_zero(gradient: torch.Tensor) -> bool | None:
    """Whether a gradient is zero everywhere, on this rank; None if that is not known. Reading synchronizes on CUDA."""
    with ambient_modes_disabled(), contextlib.suppress(RuntimeError, NotImplementedError):  # of a kind without `any`
        plain, reason = as_plain_tensor(gradient.coalesce().values() if gradient.is_sparse else gradient)
        if reason is None and not (plain.is_cuda and torch.cuda.is_current_stream_capturing()):
            return not plain.any()
    return None


def _computes_statistics(module: nn.Module) -> bool:
    """Whether the norms of a module average over all batches now, as `torch.optim.swa_utils.update_bn` has them do."""
    norms = (one for one in module.modules() if "running_mean" in one._buffers)
    return any(one.training and getattr(one, "momentum", 0.0) is None for one in norms)
