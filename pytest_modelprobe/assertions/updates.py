"""What training does to parameters: whether they stay, change, and by how much.

It is judged by values, before and after, and not by ``requires_grad``: weight decay changes a parameter without a
gradient, and an optimizer may have been given another copy of the model. A change is estimated from fingerprints,
because a record has no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pytest_modelprobe.comparison import tolerance
from pytest_modelprobe.comparison.text import percent
from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.record import (
    Layer,
    Parameter,
    Reading,
    Record,
    Selector,
    estimated_change,
    has_nonfinite,
    selected,
)
from pytest_modelprobe.text import count, failed, failure, listed, number, out_of, printable

from .activations import nonfinite_counts
from .sources import (
    LEAVE_OUT,
    Subject,
    excuse_gradients,
    excuse_small_gradients,
    fail_or_hint,
    full_name,
    gradient_of,
    is_watch,
    not_ignored,
    record_of,
    source_of,
    wider_globs,
)

__tracebackhide__ = True  # a traceback ends at the line of the test


_NEGLIGIBLE = 1e-5
"""A gradient below this share of the largest of its layer may be too small for any step that suits the others."""

_ORIGIN = "assert_grad_finite names where that began."

_ALL_ZERO = (
    "Its gradient is all zero: its layer is given zeros, the layers after it are dead, zero-initialized or not used, "
    "or it cancels."
)


@dataclass(frozen=True, slots=True)
class _Change:
    """A parameter or buffer before training and now."""

    name: str
    layer: Layer
    own: Parameter
    change: float | None
    """The change relative to its norm before. It is inf if that norm was 0, NaN if the amount of the change is not
    known, and None if nothing could be read."""
    buffer: bool
    unknown: str | None = None
    """Why it is not known whether it changed."""


def assert_frozen(subject: Subject, *, layers: Selector = "**") -> None:
    """Assert that training does not change the parameters and buffers (running statistics) of layers.

    Values are compared, not ``requires_grad``: weight decay changes a parameter without a gradient, and BatchNorm in
    training mode changes its running statistics without an optimizer.

    Args:
        subject: A watch, or a probe with one, over one or more steps of an optimizer. Or the record of a step, as
            ``modelprobe.merged(watch)`` makes it of all ranks.
        layers: Which layers are frozen.

    Raises:
        AssertionError: A parameter or buffer changed.
        NothingObservedError: The model was not called, nothing in it changed, or the layers have no parameters.
        UsageError: The subject is a record, and not that of a step of training.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    >>> optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
    >>> with ModelProbe() as probe:
    ...     watch = probe.watch(model)
    ...     model(torch.ones(4, 2)).mean().backward()
    ...     optimizer.step()
    ...     assert_frozen(watch, layers="0")
    """
    found = _changes(subject, layers)
    bad = [one for one in found if one.change]
    if bad:
        first = bad[0]
        raise failed(
            f"{first.name} is not frozen: it changed{'' if math.isnan(first.change or 0) else f' by {_size(first)}'}; "
            + out_of(len(bad), len(found), "parameters and buffer"),
            ["parameter", "requires_grad", "changed by"],
            [[one.name, "buffer" if one.buffer else str(one.own.requires_grad), _size(one)] for one in bad],
            "Call requires_grad_(False) on it, leave it out of the optimizer (weight decay and momentum change what "
            "has no gradient), and call eval() on norms: in training mode they update their running statistics.",
        )
    statistics = [
        layer
        for layer in {one.layer.name: one.layer for one in found}.values()
        if any(buffer.name.startswith("running_") for buffer in layer.buffers)
        and any(call.training for call in layer.calls)
    ]
    if statistics:
        layer = statistics[0]
        raise failed(
            f"{layer.label} is not frozen: it was called in training mode, and updates running statistics",
            ["layer", "type"],
            [[one.name, one.type_name] for one in statistics],
            "Call eval() on it: requires_grad_(False) is not enough.",
        )
    _reject_unknown(found)


def assert_params_updated(subject: Subject, *, layers: Selector = "**", ignore: str | Iterable[str] = ()) -> None:
    """Assert that training changed every parameter that requires a gradient.

    Args:
        subject: A watch, or a probe with one, over one or more steps of an optimizer. Or the record of a step, as
            ``modelprobe.merged(watch)`` makes it of all ranks.
        layers: Which layers are trained.
        ignore: Globs of full names of parameters that need not change, such as a bias before a norm.

    Raises:
        AssertionError: A parameter is unchanged since the first forward, or is not finite. If it is unchanged because
            its gradient is only rounding, is 100,000 times smaller than the largest of its layer, is zero by chance in
            the only step, or comes through weights initialized to zero, that is a `HintWarning`.
        SelectionError: ``ignore`` matches no parameter.
        NothingObservedError: The model was not called, or the layers have no parameters that require a gradient.
        UsageError: The subject is a record, and not that of a step of training.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> with ModelProbe() as probe:
    ...     watch = probe.watch(model)
    ...     model(torch.ones(4, 2)).mean().backward()
    ...     optimizer.step()
    ...     assert_params_updated(watch)
    """
    found = _finite(_trained(subject, layers, ignore))
    unchanged = [one for one in found if one.change == 0 and 0 not in one.own.shape]
    if unchanged:
        why = {one.name: _why_unchanged(one, subject) for one in unchanged}
        unchanged.sort(key=lambda one: why[one.name][1])
        first = unchanged[0]
        reason, healthy = why[first.name]
        text = failure(
            f"{first.name} was not updated; {out_of(len(unchanged), len(found), 'parameter')}",
            ["parameter", "shape", "gradient rms"],
            [[one.name, str(one.own.shape), _rms(one.own.gradient)] for one in unchanged],
            reason,
            wider_globs(ignore, (one.name for one in unchanged)),
        )
        fail_or_hint(text, hint=healthy)
    _reject_unknown(found)


def _why_unchanged(one: _Change, subject: Subject) -> tuple[str, bool]:
    """Return why a parameter did not change, and whether a healthy model may look so."""
    gradient = one.own.gradient
    if gradient is None:
        return "It has no gradient: it is detached, unused, or the watch began too late.", False
    if has_nonfinite(gradient):
        return f"Its gradient is not finite, and such steps are skipped. {_ORIGIN}", False
    healthy = _why_small(one, subject)
    if healthy or (gradient.statistics is not None and gradient.statistics.all_zero):
        return healthy or _ALL_ZERO, bool(healthy)
    return (
        "It has a gradient: it is in no group of the optimizer, its learning rate is 0, zero_grad() came before "
        "step(), or the step is too small or was never taken."
    ), False


def _why_small(one: _Change, subject: Subject, low: float = 0.0) -> str:
    """Return why a parameter of a healthy model changes by less than a share; an empty text: no known reason.

    The steps that are kept tell it. In all passes together there are also those whose gradients were thrown away.
    """
    source = source_of(subject)
    seen = [
        (layer, own)
        for step in ([source] if isinstance(source, Record) else source.steps)
        for layer in step.layers.values()
        if layer.name == one.layer.name
        for own in layer.parameters
        if own.name == one.own.name and own.group is not None
    ] or [(one.layer, one.own)]
    if all(_cancels(layer, own) for layer, own in seen):
        return (
            "Its gradient is rounding error: a norm after it, the rest of the model, or the loss cancels it. A bias "
            "there has no effect: remove it from the model, or exclude it here with ignore=."
        )
    largest = [max(_rms(p.gradient) or 0.0 for p in layer.parameters) for layer, _ in seen]
    shares = [(_rms(own.gradient) or 0.0) / most if most else 0.0 for (_, own), most in zip(seen, largest, strict=True)]
    if all(0 < share < _NEGLIGIBLE for share in shares):
        times = number(1 / max(shares))
        return f"Its gradient is {times} times smaller than the largest of its layer, too small for steps that suit it."
    if not any(shares):
        explained = excuse_gradients(subject)
        if explained:
            return f"{_ALL_ZERO} {explained}"
    merged = record_of(subject)[one.layer.name].parameters
    if not any(_rms(own.gradient) for own in merged if own.name == one.own.name):
        return ""
    return excuse_small_gradients(subject, [seen[0][1]], one.change / low if one.change and low else math.inf)


def _cancels(layer: Layer, own: Parameter) -> bool:
    """Whether the gradient of a bias is zero but for rounding.

    It is the sum of the gradients of the layer's output over all but the units, and these are not as small as it is.
    """
    gradient, units = _rms(own.gradient), math.prod(own.shape)
    if own.name != "bias" or own.gradient is None or gradient is None or not units:
        return False
    terms = [gradient_of(value) for _, value in layer.outputs if value.backward is not None]
    known = [one for one in terms if one is not None and one.rms is not None and one.count % units == 0]
    n = sum(one.count for one in known) / units / own.gradient.tensors
    norm = sum(one.count * (one.rms or 0.0) for one in known) / units / own.gradient.tensors
    # The terms are rounded one by one, and their sums too; terms that do not cancel add up to the square root of n.
    rounding = max(tolerance.epsilon(dtype) for dtype in [own.dtype, *(value.dtype for _, value in layer.outputs)])
    return 0 < len(known) == len(terms) and gradient < norm * min(4 * rounding, 0.03 / math.sqrt(n))


def assert_update_ratio(
    subject: Subject,
    *,
    low: float = 1e-6,
    high: float = 1e-1,
    layers: Selector = "**",
    ignore: str | Iterable[str] = (),
) -> None:
    """Assert that the relative change of parameters, ‖w' − w‖ / ‖w‖, is neither too small nor too large.

    About 1e-3 is usual for one step. The change is that of each step that the watch keeps, ``watch(model, steps=3)``. A
    step in which nothing changes, as the first of a warmup may be, is left out. Where no other is kept, the change is
    that of all steps since the first forward.

    Args:
        subject: A watch, or a probe with one, over one or more steps of an optimizer. Or the record of a step, as
            ``modelprobe.merged(watch)`` makes it of all ranks.
        low: The minimum.
        high: The maximum.
        layers: Which layers to look at. Parameters that were all zero before training are left out.
        ignore: Globs of full names of parameters to exclude, such as a bias before a norm.

    Raises:
        AssertionError: The ratio of a parameter is out of range, or a parameter is not finite. A ratio that is too
            small for a reason that `assert_params_updated` takes for healthy is a `HintWarning`.
        SelectionError: ``ignore`` matches no parameter.
        NothingObservedError: The model was not called, or the layers have no parameters that require a gradient.
        UsageError: The subject is a record, and not that of a step of training.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> model = nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.ones_(model.weight)
    >>> optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    >>> with ModelProbe() as probe:
    ...     watch = probe.watch(model)
    ...     model(torch.ones(4, 2)).mean().backward()
    ...     optimizer.step()
    ...     assert_update_ratio(watch)
    """
    trained = _finite(_trained(subject, layers, ignore))
    found = _in_steps(subject, trained)
    if not found:
        _reject_unknown(trained)
        raise NothingObservedError("the selected layers have no parameters that require a gradient and were not zero")

    def times_outside(ratio: float) -> float:  # inf for a ratio of 0 and an unknown one
        return ratio / high if ratio > high > 0 else low / ratio if 0 < ratio <= high else math.inf

    bad = [(n, one) for n, one in found if not low <= (one.change or 0.0) <= high]
    bad.sort(key=lambda pair: -times_outside(pair[1].change or 0.0))
    below = (one for _, one in bad if (one.change or 0.0) < low and not has_nonfinite(one.own.gradient))
    healthy = {one.name: reason for one in below if (reason := _why_small(one, subject, low))}
    bad.sort(key=lambda pair: pair[1].name in healthy)
    if bad:
        step, first = bad[0]
        names = {one.name for _, one in bad}
        numbers = {n for n, _ in found if n is not None}
        why = "assert_params_updated says why."
        if first.change:
            size = "large" if first.change > high else "small"
            why = f"The learning rate is too {size} for it, or its gradient is."
        text = failure(
            f"{first.name} changed by {number(first.change)} of its norm{'' if step is None else f' in step {step}'}, "
            f"not {number(low)} to {number(high)}; "
            + out_of(len(names), len({one.name for _, one in found}), "parameter")
            + (f" in {count(len(numbers), 'step')}" if numbers else ""),
            ["parameter", "shape", "step", "ratio", "gradient rms"],
            [
                [one.name, str(one.own.shape), n, one.change, _rms(one.own.applied or one.own.gradient)]
                for n, one in bad
            ],
            healthy.get(first.name, why),
            wider_globs(ignore, names),
        )
        fail_or_hint(text, hint=first.name in healthy)
    _reject_unknown(trained)


def _trained(subject: Subject, layers: Selector, ignore: str | Iterable[str]) -> list[_Change]:
    """Return the parameters that require a gradient."""
    every = _changes(subject, layers, may_be_unchanged=True)
    found = [one for one in every if not one.buffer and one.own.requires_grad]
    if not found:
        raise NothingObservedError("the selected layers have no parameters that require a gradient")
    record = record_of(subject)
    if not (record.backwards or (record.training and record.training.steps) or any(one.change for one in found)):
        raise NothingObservedError(
            f"{printable(record.model)} was not trained while it was watched: no gradient reached it, no optimizer "
            "with one of its parameters stepped, and none changed; watch the model that is trained (of an average "
            "of its weights, checks.ema_tracks checks the update)"
        )
    left = not_ignored([one.name for one in found], ignore)
    return [one for one in found if one.name in left]


def _in_steps(subject: Subject, trained: list[_Change]) -> list[tuple[int | None, _Change]]:
    """Return the relative change of each parameter in each step that is kept, with the step's number.

    A parameter that no optimizer has ever updated counts once, without a step. If no step is kept, the changes are
    those of all steps together. Left out are parameters that were zero before training: they had no norm.
    """
    names = {one.name for one in trained}
    source = source_of(subject)
    steps: list[tuple[int | None, _Change]] = []
    for record in (source,) if isinstance(source, Record) else source.steps:
        of_step = [one for one in _of_step(record) if one.own.update is not None]
        if any(one.change for one in of_step):
            steps += ((record.step, one) for one in of_step if one.name in names)
    zero = {one.name for _, one in steps if one.change is not None and math.isinf(one.change)}
    found = [(n, one) for n, one in steps if one.name not in zero]
    if found:
        stepped = {one.name for _, one in steps}
        found += [(None, one) for one in trained if one.name not in stepped and one.change == 0]
    else:
        found = [(None, one) for one in trained]
    return [(n, one) for n, one in found if one.change is not None and not math.isinf(one.change)]


def _reject_unknown(found: Iterable[_Change]) -> None:
    """Raise NothingObservedError for a parameter or buffer that could not be read: whether it changed is not known."""
    for one in found:
        unknown = one.unknown or one.own.reading.reason
        if one.change is None and unknown is not None:
            raise NothingObservedError(f"it is not known whether {one.name} changed: {printable(unknown)}; {LEAVE_OUT}")


def _finite(found: list[_Change]) -> list[_Change]:
    """Return the parameters; AssertionError if one is not finite, as it has no norm."""
    # What a step added is looked at first: the record of a step has the values before it.
    now = [next(filter(has_nonfinite, (one.own.update, one.own.reading)), None) for one in found]
    bad = [(one, reading) for one, reading in zip(found, now, strict=True) if reading is not None]
    if bad:
        first, reading = bad[0]
        why = (
            "Its gradients were finite: look at its values before training, at the learning rate and at the optimizer."
        )
        raise failed(
            f"{first.name} is not finite after training: {_bad_counts(reading)}; "
            f"{out_of(len(bad), len(found), 'parameter')}",
            ["parameter", "shape", "not finite", "of its gradient"],
            [[one.name, str(one.own.shape), *map(_bad_counts, (reading, one.own.gradient))] for one, reading in bad],
            f"Its gradient was not finite. {_ORIGIN}" if has_nonfinite(first.own.gradient) else why,
        )
    return found


def _bad_counts(reading: Reading | None) -> str:
    statistics = None if reading is None else reading.statistics
    if statistics is None:
        return "-"
    return nonfinite_counts(statistics) if statistics.nonfinite else "none"


def _changes(subject: Subject, layers: Selector, *, may_be_unchanged: bool = False) -> list[_Change]:
    """Return the change of each parameter and buffer of the layers since before training.

    NothingObservedError if nothing in the model changed, unless ``may_be_unchanged``.
    """
    source = source_of(subject)
    if is_watch(source):
        source.reread()
        now = record_of(source)
        before = source.first
        found = [one for layer in now.layers.values() for one in _between(layer, before.layers.get(layer.name))]
    elif isinstance(source, Record) and any(own.update is not None for own in source.parameters):
        now, found = source, list(_of_step(source))
    else:
        raise UsageError(
            "the record has no step of training: give the watch that was open while the optimizer stepped, "
            "watch = modelprobe.watch(model), or the record of one of its steps"
        )
    names = {layer.name for layer in selected(now, layers)}
    if not may_be_unchanged and not any(one.change for one in found):
        raise NothingObservedError(
            "nothing in the model has changed since the first forward: keep the watch open while the optimizer steps"
        )
    wanted = [one for one in found if one.layer.name in names]
    if not wanted:
        labels = [now.layers[name].label for name in sorted(names)]
        raise NothingObservedError(
            f"{listed(labels)} {'has' if len(names) == 1 else 'have'} no parameters or buffers of "
            f'{"its" if len(names) == 1 else "their"} own: name the layers that own them, as "encoder.**"'
        )
    return wanted


def _between(now: Layer, before: Layer | None) -> Iterator[_Change]:
    was = {} if before is None else {own.name: own.reading for own in (*before.parameters, *before.buffers)}
    for own in (*now.parameters, *now.buffers):
        if own.name in was:
            change = _relative_change(own.reading, was[own.name])
            yield _Change(full_name(now, own.name), now, own, change, own in now.buffers)


def _of_step(record: Record) -> Iterator[_Change]:
    """Yield what a step of an optimizer did to each parameter. What no optimizer holds is as it was."""
    for layer in record.layers.values():
        for own in layer.parameters:
            change = 0.0 if own.update is None else _share_added(own.update, own.reading)
            unknown = None if own.update is None else own.update.reason
            yield _Change(full_name(layer, own.name), layer, own, change, False, unknown)
        for own in layer.buffers:
            unknown = "the record of a step has buffers as the step left them, and not before it; give the watch"
            yield _Change(full_name(layer, own.name), layer, own, None, True, unknown)


def _share_added(update: Reading, before: Reading) -> float | None:
    """Return the norm of an update relative to that of the values before."""
    if update.statistics is None or before.statistics is None:
        return None
    if update.statistics.nonfinite:
        return math.nan
    size = before.statistics.norm
    return update.statistics.norm / size if size else math.inf if update.statistics.norm else 0.0


def _relative_change(now: Reading, before: Reading) -> float | None:
    """Return the relative change between two readings; 0 only if all that was recorded is equal."""
    if now.digest is not None and before.digest is not None:
        return 0.0 if now.digest == before.digest else 1.0
    if before.reason is not None and now.reason is None:
        return math.nan  # unreadable before, readable now: it changed
    if now.fingerprint is None or before.fingerprint is None or before.statistics is None:
        return None
    if now.fingerprint == before.fingerprint and now.statistics == before.statistics:
        return 0.0
    if now.statistics is not None and now.statistics.nonfinite:
        return math.nan  # a fingerprint counts NaN and inf as finite numbers
    return estimated_change(now.fingerprint, before.fingerprint, before.statistics.norm)


def _size(one: _Change) -> str:
    return "not known" if one.change is not None and math.isnan(one.change) else percent(one.change)


def _rms(reading: Reading | None) -> float | None:
    return None if reading is None or reading.statistics is None else reading.statistics.rms
