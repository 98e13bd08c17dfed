"""The training loop: gradients, modes and the optimizer of a model that is trained.

A loop with one of these mistakes runs, and often learns, only worse. A watch counts what happens between the steps of
all optimizers; the assertion reads these counts, and names the most likely mistake first. A target that is not detached
is trained toward the model that is compared with it, and the loss falls all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.record import (
    Layer,
    Reading,
    Record,
    Selector,
    Training,
    address,
    containers,
    has_nonfinite,
    label_of,
    parent,
    selected,
)
from pytest_modelprobe.text import Cell, count, failed, failure, out_of, printable

from .sources import (
    LEAVE_OUT,
    Subject,
    backward_of,
    called,
    fail_or_hint,
    full_name,
    record_of,
    reject_opaque,
    source_of,
)

__tracebackhide__ = True  # a traceback ends at the line of the test


@dataclass(frozen=True, slots=True)
class _Finding:
    what: str
    times: int
    of: int
    """The number of steps, or of other events, that were checked."""
    advice: str
    hint: bool = False
    """Whether a healthy loop may do it."""


def assert_training_loop(subject: Subject) -> None:
    """Assert that a training loop has none of the common mistakes with gradients, modes and optimizers.

    It finds:

    - gradients that are not reset after a step, or to which the loss of another optimizer was added (that of a GAN's
      generator to the discriminator's);
    - gradients that are reset between the backward and the step, so that at most weight decay is left;
    - an optimizer with the parameters of another copy of the model;
    - training in evaluation mode and evaluation in training mode, if a layer depends on the mode;
    - most steps skipped by a ``GradScaler`` because gradients are not finite;
    - BatchNorm with a batch that is accumulated in parts, hyperparameters or the mode of the model that change between
      the backward passes of a step: a `HintWarning`, as sound loops do it too.

    Forwards that compute the statistics of a BatchNorm again, as ``torch.optim.swa_utils.update_bn`` does, are no
    evaluation. Gradients may be accumulated on purpose if they are reset after the step. Forwards in training mode
    without gradients count as evaluation only if some steps have none.

    Args:
        subject: A watch, or a probe with one, over two or more steps of an optimizer. If several models are trained,
            it is enough to watch one: the steps of all optimizers are seen.

    Raises:
        AssertionError: The loop has one of these mistakes.
        NothingObservedError: The model was not called, or no optimizer with one of its parameters stepped.
        UsageError: The subject is the record of a run or of a single forward, without training.

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
    record = record_of(subject)
    training = record.training
    if training is None and isinstance(subject, Record) and subject.step is not None:
        raise UsageError(
            f"the record is of step {subject.step} alone, and the loop is judged by all of them: give the watch, or "
            "modelprobe.merged(watch.record) for what all ranks did"
        )
    if training is None and isinstance(subject, Record):
        raise UsageError("the record has no optimizer step: give the watch that was open while the optimizer stepped")
    found = [] if training is None else list(_findings(record, training))
    if found:
        first = found[0]
        rows: list[list[Cell]] = [[finding.what, finding.times, finding.of] for finding in found]
        text = failure(
            f"{first.what}: {first.times:,} of {count(first.of, 'time')}, in the training of {record.model}",
            ["in the training loop", "times", "of"],
            rows,
            first.advice,
        )
        fail_or_hint(text, hint=first.hint)
    if training is None or not training.steps:
        others = f" ({count(training.others, 'step')} of others)" if training is not None and training.others else ""
        raise NothingObservedError(
            f"no optimizer with a parameter of {printable(record.model)} stepped while it was watched{others}: "
            "keep the watch open while it is trained"
        )


def _findings(record: Record, training: Training) -> Iterator[_Finding]:
    steps = training.steps
    if training.stale:
        yield _Finding(
            "new gradients were added to those of the last step"
            if training.stale < steps - 1
            else "gradients are never reset",
            training.stale,
            steps,
            "Call optimizer.zero_grad() after each step, or before the first backward of the next: also when gradients "
            "are accumulated over several passes.",
        )
    if training.emptied:
        yield _Finding(
            "gradients were reset between the backward and the step",
            training.emptied,
            steps,
            "The optimizer had none of the gradients that arrived: call zero_grad() after step() or before backward().",
        )
    if training.mixed:
        yield _Finding(
            "a step used gradients of another optimizer's loss",
            training.mixed,
            steps,
            "Gradients of backward passes before and after a step of another optimizer were added: detach what the "
            "other loss should not train, or call zero_grad() before the backward of this model's own loss.",
        )
    if not steps and training.passes and training.lookalikes:
        yield _Finding(
            "the optimizer has the parameters of another copy of the model",
            training.lookalikes,
            training.others,
            "Its parameters have the shapes of the model's, but are different tensors: create the optimizer after the "
            "model is copied, loaded, wrapped or built again.",
        )
    kept = (layer for layer in _called(record, training=False) if _depends_on_mode(layer))
    # The norms of a frozen backbone stay in evaluation mode on purpose.
    trained = (one for one in kept if not one.parameters or any(p.requires_grad for p in one.parameters))
    in_eval = next(trained, None)
    if training.evaluating and in_eval is not None:
        yield _Finding(
            f"{in_eval.name} is trained in evaluation mode",
            training.evaluating,
            steps,
            "Call model.train() before each epoch: an evaluation leaves the model in evaluation mode.",
        )
    in_training = next((layer for layer in _called(record, training=True) if _depends_on_mode(layer)), None)
    if training.idle and in_training is not None:
        yield _Finding(
            f"{in_training.name} is evaluated in training mode",
            training.idle,
            steps + 1,
            "Forwards without gradients ran in training mode between some steps, or after the last: call model.eval() "
            "before evaluating.",
        )
    gradients = ((full_name(one, p.name), p.gradient) for one in record.layers.values() for p in one.parameters)
    nonfinite = next((name for name, gradient in gradients if has_nonfinite(gradient)), None)
    if nonfinite is not None and training.discarded > max(1, steps):
        yield _Finding(
            f"steps are skipped because the gradient of {nonfinite} is not finite",
            training.discarded,
            training.discarded + steps,
            "A GradScaler skips such a step and lowers its scale: look at its initial scale; assert_grad_finite names "
            "where NaN or inf began.",
        )
    norm = next((layer for layer in _called(record, training=True) if "BatchNorm" in layer.type_name), None)
    if training.accumulated and training.optimizers == 1 and not training.others and norm is not None:
        yield _Finding(
            f"{norm.name} sees an accumulated batch in parts",
            training.accumulated,
            steps,
            f"{norm.type_name} computes mean and variance of each part separately. If that is not meant, call eval() "
            "on it, or use a norm that does not depend on the batch.",
            hint=True,
        )
    for what, times in find_changes_in_steps(training).items():
        yield _Finding(
            what,
            times,
            steps,
            "The step is taken with the newest value, for gradients of all passes: call scheduler.step(), train() and "
            "eval() after optimizer.step(), not after each backward.",
            hint=True,
        )


def find_changes_in_steps(training: Training) -> dict[str, int]:
    """Return what changed between the backward passes of one step, each with the number of steps."""
    found = {
        "hyperparameters changed between the backward passes of a step": training.rescheduled,
        "the mode of the model changed between the backward passes of a step": training.switched,
    }
    return {what: times for what, times in found.items() if times}


def _called(record: Record, *, training: bool) -> Iterator[Layer]:
    """Yield the layers that were called in a mode in a forward of the same mode, in order of the record."""
    for layer in record.layers.values():
        if any(call.root_training is training and call.training is training for call in layer.calls):
            yield layer


def _depends_on_mode(layer: Layer) -> bool:
    """Whether a layer computes something else in training than in evaluation mode."""
    rates = ("p", "drop_prob") if "Drop" in layer.type_name else ("dropout",)
    values = (layer.attributes.get(name) for name in rates)
    normalizes = "BatchNorm" in layer.type_name and "Frozen" not in layer.type_name
    return normalizes or any(isinstance(rate, (int, float)) and rate > 0 for rate in values)


# --- modes ------------------------------------------------------------------------------------------------------------


def assert_mode(subject: Subject, modes: Mapping[str, Literal["train", "eval"]]) -> None:
    """Assert in which mode layers are called: a frozen part in evaluation mode, what learns in training mode.

    ``model.train()`` sets the mode of all layers, also of a part that was set to evaluation mode before. In training
    mode a BatchNorm uses and updates statistics of the batch, and dropout is random, whether or not their layers are
    frozen.

    Args:
        subject: A probe with one run or watch, a watch, or a record. Where forwards are merged, the newest of each kind
            counts. Of a watch, the steps that are kept are looked at too; for ``"train"`` these alone, so that an
            evaluation between them counts for nothing.
        modes: Glob of layers → ``"train"`` or ``"eval"``: ``"backbone.**"`` is the layer ``backbone`` with all that is
            inside it.

    Raises:
        AssertionError: A layer was called in the other mode.
        NothingObservedError: None of the layers was called.
        UsageError: ``modes`` is no dict of modes, or is empty.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    >>> _ = model[0].eval()
    >>> record = ModelProbe().run(model, torch.ones(4, 2))
    >>> assert_mode(record, {"0": "eval", "1": "train"})
    """
    if not isinstance(modes, Mapping) or not modes or any(mode not in _MODES for mode in modes.values()):
        raise UsageError(f"modes is a dict such as {{'backbone.**': 'eval', 'head': 'train'}}; got {modes!r}")
    source, whole = source_of(subject), record_of(subject)
    steps = [] if isinstance(source, Record) else [*source.steps]
    looked_at: set[str] = set()
    wrong: dict[str, list[Cell]] = {}
    for selector, mode in modes.items():
        records = steps if mode == "train" else [whole, *steps]
        for layer in called(whole, selector):
            looked_at.add(layer.name)
            calls = [call for record in records for call in record[layer.name].calls] or layer.calls
            if any(call.training is not (mode == "train") for call in calls):
                wrong[layer.label] = [layer.name, layer.type_name, "eval" if mode == "train" else "train", mode]
    if wrong:
        label, (_, _, actual, expected) = next(iter(wrong.items()))
        raise failed(
            f"{label} is called in {_MODES[str(actual)]} mode, not in {_MODES[str(expected)]} mode; "
            f"{out_of(len(wrong), len(looked_at), 'layer')}",
            ["layer", "type", "mode", "expected"],
            wrong.values(),
            f"Call {expected}() on it after each {actual}() of the model, which sets the mode of all layers.",
        )


_MODES = {"train": "training", "eval": "evaluation"}


def find_frozen_in_training(record: Record) -> dict[str, list[Layer]]:
    """Return the layers in training mode that depend on it and are in a frozen part, by the outermost such part.

    A part is frozen if it has weights and all its parameters are frozen, while others learn. Left out are

    - a part behind something that learns: a discriminator is frozen for the step of the generator. Not left out is a
      BatchNorm among layers that learn;
    - one with the shapes of parameters that learn: a target network, or the first of equal blocks;
    - one with embeddings alone, which are frozen beside adapters.
    """
    owned = [(layer, own) for layer in record.layers.values() for own in layer.parameters]
    learned = Counter(own.shape for _, own in owned if own.requires_grad and own.gradient is not None)
    learning = {name for layer, own in owned if own.requires_grad for name in _at_and_around(layer.name)}
    weights = (layer.name for layer, own in owned if len(own.shape) > 1 and "Embedding" not in layer.type_name)
    frozen = {name for layer in weights for name in _at_and_around(layer)} - learning
    found: dict[str, list[Layer]] = {}
    for layer in filter(_depends_on_mode, _called(record, training=True)) if learned else ():
        part = next((name for name in _at_and_around(layer.name) if name in frozen), None)
        if part is not None and not any(value.requires_grad for _, value in layer.outputs):
            inside = (own.shape for one, own in owned if part in _at_and_around(one.name))
            if part in found or not Counter(inside) <= learned:
                found.setdefault(part, []).append(layer)
        elif (
            "BatchNorm" in layer.type_name
            and layer.parameters
            and layer.name not in learning
            and parent(layer.name) in learning
        ):
            found[layer.name] = [layer]
    return found


def _at_and_around(name: str) -> list[str]:
    return [*containers(name), name]


# --- targets that are compared with -----------------------------------------------------------------------------------


def assert_no_gradient(subject: Subject, layers: Selector) -> None:
    """Assert that no gradient arrives at the outputs and parameters of layers: a teacher, a target, a stop-gradient.

    A gradient of zeros is one too, since the next batch may make it another. Gradients that a forward computes itself,
    as of an energy, do not count. Layers whose parameters are frozen may still get a gradient at their outputs.

    Args:
        subject: A probe with one run or watch, a watch, or a record. The model and its target may be two models: watch
            them as one, ``modelprobe.watch(nn.ModuleDict({"online": model, "target": target}))``. In a watch on the
            target alone, the step of an optimizer that holds none of its parameters stands for the backward pass.
        layers: Which layers: ``"teacher.**"`` is the layer ``teacher`` with all that is inside it.

    Raises:
        AssertionError: A gradient arrived.
        NothingObservedError: No backward was seen, no selected layer was called, or what one returned cannot be looked
            at.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> both = nn.ModuleDict({"student": nn.Linear(4, 3), "teacher": nn.Linear(4, 3)})
    >>> with ModelProbe() as probe:
    ...     watch = probe.watch(both)
    ...     x = probe.randn(5, 4)
    ...     target = both["teacher"](x).detach()
    ...     nn.functional.mse_loss(both["student"](x), target).backward()
    ...     assert_no_gradient(watch, "teacher.**")
    """
    record = record_of(subject)
    if record.training is None or not record.training.others:
        backward_of(subject)
    chosen = selected(record, layers)
    places: list[tuple[str, Layer, str, Reading | None, int]] = []
    for layer in chosen:
        outputs = ((address(layer.name, call, value.path), value, call) for call, value in layer.outputs)
        places += [(where, layer, "output", value.backward, call.finished) for where, value, call in outputs]
        places += [(full_name(layer, p.name), layer, "parameter", p.gradient, -1) for p in layer.parameters]
    found = [one for one in places if one[3] is not None and one[3].tensors]
    found.sort(key=lambda one: (one[2] == "parameter", -one[4]))
    if found:
        where, layer, kind, _, _ = found[0]
        label = label_of(where, layer.type_name)
        advice = f"The loss reaches {label}: detach it before it is compared with, or call {layer.label} under "
        advice += "torch.no_grad()."
        if kind == "parameter":
            tied = next((p.tied_to for p in layer.parameters if p.tied_to is not None), None)
            advice = "Its outputs get none, so other code uses its parameters"
            advice += (
                f": they are shared with {tied}; copy.deepcopy makes a copy." if tied else ": look for who shares it."
            )
        rows: list[list[Cell]] = []
        for name, one, what, reading, _ in found:
            statistics = None if reading is None else reading.statistics
            rows.append([name, one.type_name, what, None if statistics is None else statistics.norm])
        reached = out_of(len({one.name for _, one, *_ in found}), len(chosen), "layer")
        raise failed(
            f"{label} gets a gradient; {reached} in {count(record.backwards, 'backward')}",
            ["gradient of", "type", "kind", "norm"],
            rows,
            advice,
        )
    for layer in called(record, layers):
        reject_opaque(record, layer)
    for where, _, _, reading, _ in places:
        if reading is not None:
            why = printable(reading.reason or "it was not recorded")
            raise NothingObservedError(f"whether {where} gets a gradient is not known: {why}; {LEAVE_OUT}")
    for layer in chosen:
        for call, value in layer.outputs:
            if value.overwritten and value.requires_grad:
                where = address(layer.label, call, value.path)
                raise NothingObservedError(
                    f"whether {where} gets a gradient is not known: it is a view that was overwritten in place; "
                    f"{LEAVE_OUT}"
                )
