"""The training loop: with which gradients, in which mode and by which optimizer a model is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.record import Layer, Record, Training
from pytest_modelprobe.report.text import Cell, count, failure, printable

from .sources import Subject, full_name, record_of


@dataclass(frozen=True, slots=True)
class _Finding:
    what: str
    times: int
    of: int
    """Steps, or whatever it could have been."""
    advice: str


def assert_training_loop(subject: Subject) -> None:
    """Assert that each step of the optimizer is taken with the gradients, and in the mode, that it should be.

    It finds gradients that are not reset after a step, or to which another optimizer's part of the loop added (the
    generator's in the discriminator's); an optimizer made for another copy of the model; training in evaluation mode
    and evaluation in training mode, where a layer tells the modes apart; a BatchNorm that sees the parts of an
    accumulated batch one by one; and steps that are skipped, most of them, for gradients that are not finite, as a
    ``GradScaler`` does.

    Gradients may be accumulated on purpose: what counts is that they are reset after the step. Forwards in training
    mode without gradients may be part of the loop: they are taken for an evaluation where only some steps have them.

    Args:
        subject: A watch, or a probe with one, over two or more steps of an optimizer. It is enough to watch one of
            several models: steps of the others' optimizers are seen too.

    Raises:
        AssertionError: The loop does one of these.
        NothingObservedError: The model was not called, or no optimizer stepped that has a parameter of it.
        UsageError: The subject is the record of a run or of a single forward, in which nothing is trained.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> with ModelProbe() as probe:
    ...     watch = probe.watch(model)
    ...     for _ in range(2):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(4, 2)).mean().backward()
    ...         optimizer.step()
    ...     assert_training_loop(watch)
    """
    __tracebackhide__ = True
    record = record_of(subject)
    training = record.training
    if training is None and isinstance(subject, Record):
        raise UsageError("no step is in this record: give the watch that was open while the optimizer stepped")
    found = [] if training is None else list(_findings(record, training))
    if found:
        first = found[0]
        rows: list[list[Cell]] = [[finding.what, finding.times, finding.of] for finding in found]
        raise AssertionError(
            failure(
                f"{first.what}: {first.times:,} of {count(first.of, 'time')}, in the training of {record.model}",
                ["in the training loop", "times", "of"],
                rows,
                first.advice,
            )
        )
    if training is None or not training.steps:
        others = f" ({count(training.others, 'step')} of others)" if training is not None and training.others else ""
        raise NothingObservedError(
            f"no optimizer that has a parameter of {printable(record.model)} stepped while it was watched{others}: "
            "keep the watch open while it is trained"
        )


def _findings(record: Record, training: Training) -> Iterator[_Finding]:
    steps = training.steps
    if training.stale:
        yield _Finding(
            "gradients of the last step were added to" if training.stale < steps - 1 else "gradients are never reset",
            training.stale,
            steps,
            "Call optimizer.zero_grad() after each step, or before the first backward of the next: also when gradients "
            "are accumulated over several passes.",
        )
    if training.mixed:
        yield _Finding(
            "a step took gradients from another's part of the loop",
            training.mixed,
            steps,
            "Backward passes before and after a step of another optimizer were added up: detach what the other model's "
            "loss should not train, or call zero_grad() before the backward of this one's own.",
        )
    if not steps and training.passes and training.lookalikes:
        yield _Finding(
            "the optimizer has the parameters of another copy of the model",
            training.lookalikes,
            training.others,
            "Its parameters have the shapes of the model's, and are not the model's: make the optimizer after the "
            "model is copied, loaded, wrapped or built again.",
        )
    yield from _modes(record, training)
    norm = next((layer for layer in _called(record, training=True) if _gathers(layer)), None)
    if training.accumulated and training.optimizers == 1 and not training.others and norm is not None:
        yield _Finding(
            f"{norm.name} sees an accumulated batch in parts",
            training.accumulated,
            steps,
            f"{norm.type_name} takes mean and variance of each part alone: freeze it in evaluation mode, or take a "
            "norm that does not look at the batch.",
        )
    spoilt = next(_not_finite(record), None)
    if spoilt is not None and training.discarded > max(1, steps):
        yield _Finding(
            f"steps are skipped, for the gradient of {spoilt} is not finite",
            training.discarded,
            training.discarded + steps,
            "A GradScaler skips such a step and lowers its scale: look at its first scale, and with "
            "assert_grad_finite at where NaN or infinity begins.",
        )


def _modes(record: Record, training: Training) -> Iterator[_Finding]:
    kept = (layer for layer in _called(record, training=False) if _tells_modes_apart(layer))
    still = next((layer for layer in kept if not _is_frozen(layer)), None)
    if training.evaluating and still is not None:
        yield _Finding(
            f"{still.name} is trained in evaluation mode",
            training.evaluating,
            training.steps,
            "Call model.train() before each epoch: an evaluation leaves the model in evaluation mode.",
        )
    moving = next((layer for layer in _called(record, training=True) if _tells_modes_apart(layer)), None)
    if training.idle and moving is not None:
        yield _Finding(
            f"{moving.name} is evaluated in training mode",
            training.idle,
            training.steps + 1,
            "Forwards without gradients ran in training mode between some steps, or after the last: call model.eval() "
            "before an evaluation.",
        )


def _called(record: Record, *, training: bool) -> Iterator[Layer]:
    """Yield the layers that were called in that mode in a forward of that mode, innermost first."""
    for layer in record.layers.values():
        if any(call.root_training is training and call.training is training for call in layer.calls):
            yield layer


def _tells_modes_apart(layer: Layer) -> bool:
    """Whether a layer does something else in training than in evaluation."""
    rates = ("p", "drop_prob") if "Drop" in layer.type_name else ("dropout",)
    values = (layer.attributes.get(name) for name in rates)
    return "BatchNorm" in layer.type_name or any(isinstance(rate, (int, float)) and rate > 0 for rate in values)


def _is_frozen(layer: Layer) -> bool:
    """Whether nothing of a layer is trained: a norm of a frozen backbone is meant to stay in evaluation mode."""
    return bool(layer.parameters) and not any(parameter.requires_grad for parameter in layer.parameters)


def _gathers(layer: Layer) -> bool:
    return "BatchNorm" in layer.type_name


def _not_finite(record: Record) -> Iterator[str]:
    for layer in record.layers.values():
        for parameter in layer.parameters:
            gradient = parameter.gradient
            if gradient is not None and gradient.statistics is not None and gradient.statistics.nonfinite:
                yield full_name(layer, parameter.name)
