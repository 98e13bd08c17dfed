"""Gradients beside finite differences, which need no backward.

Both are computed in float64: in float32 a difference of close numbers has few digits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from pytest_modelprobe._torch import converted
from pytest_modelprobe.comparison.text import percent
from pytest_modelprobe.models import flatten
from pytest_modelprobe.runs import Loss, Widening, noise
from pytest_modelprobe.text import count, number

from .agreement import check_not_random, in_backward_order
from .check import check
from .outcome import NotApplicableError, Violation
from .rounding import as_double, rms
from .session import PreparedModel, Trace


@check
def gradcheck(prepared: PreparedModel, *, tolerance: float = 1e-3, step: float = 1e-6) -> Violation | str:
    """Check the gradient of each parameter and each floating input against finite differences of the loss, in float64.

    ``(loss(x + step d) - loss(x - step d)) / 2 step`` has to equal the gradient times d, for one direction d each. Half
    of d is the direction of the gradient, which shows a wrong norm, and half is random.

    The model is in evaluation mode.

    Args:
        prepared: The model and its inputs.
        tolerance: Largest difference, relative to the gradient's norm.
        step: Distance for the finite differences.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.gradcheck(probe, nn.Linear(3, 2), probe.randn(4, 3)))
    gradcheck holds for Linear: 3 gradients
    """
    doubled = _Doubled(prepared)
    one = doubled.reference({})
    found: list[tuple[str, str, str]] = []
    looked_at = 0
    at = one.loss.item() if one.loss is not None else 0.0
    for name, known, gradient in doubled.gradients(one):
        looked_at += 1
        direction = doubled.direction(name, known)
        direction = direction / direction.norm()
        if gradient is not None and gradient.norm() > 0:
            against = _along(gradient, direction) < 0  # of a scalar the two would cancel
            direction = (-direction if against else direction) + gradient / gradient.norm()  # which may be sparse
            direction = direction / direction.norm()
        near = (doubled.loss({known: step * direction}) - doubled.loss({known: -step * direction})) / (2 * step)
        exact = _along(gradient, direction)
        scale = max(0.0 if gradient is None else gradient.norm().item(), 1e-6 * max(1.0, abs(at)))
        if not abs(near - exact) <= tolerance * scale:
            found.append((name, "none" if gradient is None else number(exact), number(near)))
    if not looked_at:
        raise NotApplicableError("nothing has a gradient")
    if not found:
        return count(looked_at, "gradient")
    check_not_random(prepared)
    found = in_backward_order(found, one)
    _, exact_said, near_said = found[0]
    return Violation.first_of(
        found,
        f"has a wrong gradient: backward computes {exact_said}, finite differences {near_said}",
        columns=("tensor", "gradient", "finite differences"),
        advice="The error is between there and the loss. Look for an autograd.Function with a wrong backward, for "
        ".detach(), .data and no_grad; and for a kink at this point, as of a ReLU at 0.",
    )


class _Doubled:
    """A copy of a model in float64 and in evaluation mode, of which parameters and inputs can be moved.

    Args:
        prepared: The model and its inputs.
        loss: The loss to use instead of that of the prepared model.

    Raises:
        NotApplicableError: The model cannot be copied.
    """

    def __init__(self, prepared: PreparedModel, loss: Loss | None = None) -> None:
        self._prepared, self._loss, self._model = prepared, loss, prepared.copied()
        converted(self._model, as_double)  # .double() leaves complex ones in single precision
        self.parameters: dict[str, Tensor] = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        once = {id(x): (path, x) for path, x in reversed(prepared.inputs)}
        self.inputs = {path: as_double(x.detach().to(prepared.probe.device)) for path, x in once.values()}

    def reference(self, moves: Mapping[Tensor, Tensor]) -> Trace:
        """Return a run with a backward; ``moves`` is what is added to parameters and inputs.

        Raises:
            NotApplicableError: The model does not run so, its loss is of float32, or something is not finite.
        """
        trace = self._run(moves, self._loss)
        # Made by numpy, say. What has no gradient, such as zeros beside the loss, does not matter.
        if any(x.dtype == torch.float32 and x.requires_grad for _, x in flatten("output", trace.output).tensors):
            raise NotApplicableError("the loss is computed of float32, too coarse for small differences")
        if trace.error is not None:
            raise NotApplicableError(f"the model does not run in float64: {trace.failure}")
        self._prepared.check_reference(trace, mode="eval", model=self._model, vary=lambda _, x: as_double(x))
        return trace

    def loss(self, moves: Mapping[Tensor, Tensor]) -> float:
        """Return the loss of a run without a backward.

        Raises:
            NotApplicableError: The model does not run so.
        """
        trace = self._run(moves, lambda output: self._prepared.loss(output, self._loss).detach().requires_grad_())
        if trace.error is not None or trace.loss is None:
            raise NotApplicableError(f"the model does not run at a small distance: {trace.failure}")
        return trace.loss.item()

    def direction(self, name: str, known: Tensor) -> Tensor:
        """Return a random direction of a parameter or an input, without the rows of padding, which get no gradient."""
        direction = self._prepared.randn_like(known, f"direction {name}")
        embeddings = (one for one in self._model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag))
        for one in embeddings:
            if one.weight is known and one.padding_idx is not None:
                direction[one.padding_idx] = 0
        return direction

    def gradients(self, trace: Trace) -> list[tuple[str, Tensor, Tensor | None]]:
        """Return each parameter and floating input that has elements: its name, it itself and its gradient."""
        found = [(name, self.parameters[name], gradient) for name, gradient in trace.gradients.items()]
        given = trace.input_gradients.items()
        found += [(path, self.inputs[path], gradient) for path, gradient in given if path in self.inputs]
        return [one for one in found if one[1].numel()]

    def _run(self, moves: Mapping[Tensor, Tensor], loss: Loss | None) -> Trace:
        def moved(path: str, x: Tensor) -> Tensor:
            by = moves.get(self.inputs[path])
            return as_double(x) if by is None else as_double(x) + by

        before = {p: p.detach().clone() for p in self.parameters.values() if p in moves}
        with torch.no_grad():
            for p in before:
                p.add_(moves[p])
        with Widening(torch.float64):
            trace = self._prepared.run(
                mode="eval", model=self._model, vary=moved, backward=True, input_gradients=True, loss=loss
            )
        with torch.no_grad():
            for p, values in before.items():
                p.copy_(values)
        return trace


def _along(gradient: Tensor | None, direction: Tensor) -> float:
    """Return the derivative in a direction."""
    return 0.0 if gradient is None else float((gradient.conj() * direction).sum().real.item())


_BESIDE = 1e-3
"""Share of its size by which everything is moved first: zeros, and equal values, are where functions have kinks."""

_STEP = 1e-7
"""Share of its size by which everything is moved for a slope."""

_SETTLED = 1e-2
"""Up to so much slopes may differ from step to step, beside the sum of the parts of the slope."""

_EXACT = 1e-6
"""The largest error of a slope beside that sum. That of a smooth function is below 1e-7."""

_STEPS = 10
"""How many times the difference from step to step the error may be."""


@check
def gradients_agree(prepared: PreparedModel) -> Violation | str:
    """Check the gradients of all parameters and inputs at once against finite differences; an error is a hint.

    In float64 and in evaluation mode, all of them are moved along one random direction. The slope of a random
    projection of the outputs has to equal the gradients times the direction. One backward and three forwards show that,
    a small distance beside what was given. Masks and whole numbers stay. Nothing is said where the slope differs from
    step to step, as at a kink or a jump.

    The hint names the tensor nearest to the outputs whose gradient is wrong. `gradcheck` looks at each of them.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.gradients_agree(probe, nn.Linear(3, 2), probe.randn(4, 3)))
    gradients_agree holds for Linear: 3 gradients along one direction
    """
    doubled = _Doubled(prepared, "random")
    known = {name: p for name, p in doubled.parameters.items() if p.numel()}
    inputs = {path: x for path, x in doubled.inputs.items() if x.is_floating_point() and noise.is_quantity(x)}
    direction = {x: doubled.direction(name, x) * (rms(x) or 1.0) for name, x in (*known.items(), *inputs.items())}
    there = {x: _BESIDE * along for x, along in direction.items()}
    one = doubled.reference(there)
    at = one.loss.item() if one.loss is not None else 0.0
    gradients = [of for of in doubled.gradients(one) if of[1] in direction]
    if not gradients:
        raise NotApplicableError("nothing has a gradient")

    scale = abs(at) + sum(abs(_along(gradient, direction[x])) for _, x, gradient in gradients)

    def compared(some: Sequence[tuple[str, Tensor, Tensor | None]]) -> tuple[float, float, float]:
        """Return the slope by the backward and by differences, and how far the latter differ from step to step."""

        def loss_at(by: float) -> float:
            return doubled.loss(there | {x: (_BESIDE + by) * direction[x] for _, x, _ in some})

        values = (loss_at(-_STEP), at, loss_at(_STEP), loss_at(2 * _STEP))
        slopes = [(after - before) / _STEP for before, after in pairwise(values)]
        exact = sum(_along(gradient, direction[x]) for _, x, gradient in some)
        return exact, (slopes[0] + slopes[1]) / 2, max(slopes) - min(slopes)

    def differ(exact: float, near: float, spread: float) -> bool:
        return abs(near - exact) > _EXACT * scale + _STEPS * spread

    found = compared(gradients)
    if not found[-1] <= _SETTLED * scale:
        raise NotApplicableError("finite differences do not settle: the outputs have a kink or a jump there")
    if not differ(*found):
        return f"{count(len(gradients), 'gradient')} along one direction"
    check_not_random(prepared)
    gradients = in_backward_order(gradients, one)
    first = bisect_left(range(len(gradients) - 1), True, key=lambda i: differ(*compared(gradients[: i + 1])))
    exact, near, _ = compared(gradients[first : first + 1])
    said = "none" if gradients[first][2] is None else number(exact)
    return Violation.at(
        gradients[first][0],
        f"may have a wrong gradient: along one direction backward computes {said}, finite differences {number(near)}, "
        f"{percent(abs(exact - near) / max(abs(exact), abs(near)))} apart",
        advice="It may be meant: straight-through estimators, vector quantization and targets that are detached have "
        "another gradient on purpose. Else the error is between there and the outputs: look for an autograd.Function "
        "with a wrong backward, for .detach(), .data and no_grad. checks.gradcheck looks at each tensor.",
        level="hint",
    )
