"""Parameters: how many, where, tied to which, and what training does to them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.record import (
    Layer,
    Parameter,
    Reading,
    Record,
    Selector,
    address,
    estimated_change,
    label_of,
    nearest,
)
from pytest_modelprobe.report.comparison import percent
from pytest_modelprobe.report.text import Cell, count, failure, listed, number

from .activations import nonfinite_counts
from .sources import Subject, called, full_name, is_watch, not_ignored, record_of, selected, source_of

# --- static facts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Fact:
    name: str
    elements: int
    requires_grad: bool
    same: object
    """Equal for parameters that are one."""


def assert_param_count(
    subject: Subject | Any, expected: int | tuple[int, int], *, trainable: bool | None = None, layers: Selector = "**"
) -> None:
    """Assert how many elements the parameters have; tied ones count once.

    Args:
        subject: A probe with one run or watch, a watch, a record, or a module.
        expected: The number, or the least and the most.
        trainable: True counts those that require a gradient, False the others, None all.
        layers: Whose own parameters to count; of a module all are counted.

    Raises:
        AssertionError: There are more or fewer.
        UsageError: ``expected`` is no number and no range; ``layers`` is given with a module.

    >>> from torch import nn
    >>> assert_param_count(nn.Linear(3, 2), 8)
    """
    __tracebackhide__ = True
    low, high = expected if isinstance(expected, tuple) and len(expected) == 2 else (expected, expected)
    if type(low) is not int or type(high) is not int or low > high:
        raise UsageError(f"expected is a number of elements, or the least and the most of them; got {expected!r}")
    counted: dict[object, _Fact] = {}
    for fact in _facts(subject, layers):
        if trainable is None or fact.requires_grad == trainable:
            counted.setdefault(fact.same, fact)
    total = sum(fact.elements for fact in counted.values())
    if low <= total <= high:
        return
    kind = "" if trainable is None else "trainable " if trainable else "frozen "
    wanted = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    by_layer: dict[str, int] = {}
    for fact in counted.values():
        owner = fact.name.rpartition(".")[0] or "(root)"
        by_layer[owner] = by_layer.get(owner, 0) + fact.elements
    rows: list[list[Cell]] = [[name, n] for name, n in sorted(by_layer.items(), key=lambda item: -item[1])]
    more = total - (high if total > high else low)
    owner = "the model has" if layers == "**" else "the selected layers have"
    first = f"{owner} {total:,} {kind}parameters, not {wanted}: {abs(more):,} too {'many' if more > 0 else 'few'}"
    raise AssertionError(failure(first, ["layer", "parameters"], rows))


def assert_tied(subject: Subject | Any, *names: str) -> None:
    """Assert that parameters are one and the same.

    Args:
        subject: A probe with one run or watch, a watch, a record, or a module.
        *names: Full names of two or more parameters: ``"embed.weight", "head.weight"``.

    Raises:
        AssertionError: One of them is another parameter.
        UsageError: There is no such parameter, or fewer than two names.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> model[1].weight = model[0].weight
    >>> assert_tied(model, "0.weight", "1.weight")
    """
    __tracebackhide__ = True
    if len(set(names)) < max(2, len(names)):
        raise UsageError(f"assert_tied takes the names of two or more parameters, each once; got {listed(names)}")
    facts = {fact.name: fact for fact in _facts(subject, "**")}
    for name in names:
        if name not in facts:
            near = nearest(name, facts)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise UsageError(f"there is no parameter {name!r}{hint}")
    first, *others = names
    loose = [name for name in others if facts[name].same != facts[first].same]
    if loose:
        rows: list[list[Cell]] = [[name, facts[name].elements, "no" if name in loose else "yes"] for name in names]
        raise AssertionError(
            failure(
                f"{loose[0]} is not tied to {first}: they are two parameters",
                ["parameter", "elements", f"one with {first}"],
                rows,
                "A copy, a .to() of one alone or a load that replaces parameters loses a tie: tie them again after it.",
            )
        )


def assert_devices(subject: Subject, devices: str | Mapping[str, str], *, layers: Selector = "**") -> None:
    """Assert on which devices layers give out their tensors, and have their parameters.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        devices: One device (``"cuda"`` means any of them), or a dict of devices by a glob on layers.
        layers: Which layers to look at, where one device is given.

    Raises:
        AssertionError: A tensor is elsewhere.
        NothingObservedError: The layers were not called, or gave out no tensor.
        UsageError: ``layers`` is given besides a dict.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> assert_devices(ModelProbe().run(nn.Linear(2, 3), torch.ones(4, 2)), "cpu")
    """
    __tracebackhide__ = True
    record = record_of(subject)
    if isinstance(devices, Mapping) and layers != "**":
        raise UsageError("layers= goes with one device; a dict of devices names its layers itself")
    wanted = devices.items() if isinstance(devices, Mapping) else [(layers, devices)]
    rows: list[list[str]] = []
    looked_at = 0
    for selector, device in wanted:
        for layer in reversed(called(record, selector)):  # what a layer contains before the layer
            for where, actual in _places(layer):
                looked_at += 1
                if str(device) not in (actual, actual.partition(":")[0]) and (actual, str(device)) != ("cpu", "cpu:0"):
                    rows.append([where, layer.type_name, actual, str(device)])
    if not looked_at:
        raise NothingObservedError("the selected layers gave out no tensor: nothing was looked at")
    if rows:
        where, kind, actual, expected = rows[0]
        raise AssertionError(
            failure(
                f"{label_of(where, kind)} is on {actual}, not on {expected}; "
                f"{len(rows):,} of {count(looked_at, 'tensor')} looked at",
                ["tensor", "type", "actual", "expected"],
                rows,
                "Move the model with .to(), and make tensors in a forward with device=x.device.",
            )
        )


def _places(layer: Layer) -> Iterator[tuple[str, str]]:
    for parameter in (*layer.parameters, *layer.buffers):
        yield full_name(layer, parameter.name), parameter.device
    for call, value in layer.outputs:
        yield address(layer.name, call, value.path), value.device


def _facts(subject: Subject | Any, layers: Selector) -> Iterator[_Fact]:
    if hasattr(subject, "named_parameters"):
        if layers != "**":
            raise UsageError("layers= goes with a record; of a module all parameters are looked at")
        for name, p in subject.named_parameters(remove_duplicate=False):
            if type(p).__name__ == "UninitializedParameter":
                raise UsageError(f"{name} has no shape yet: run the model once, then count")
            yield _Fact(name, p.numel(), p.requires_grad, id(p))
        return
    source = source_of(subject)
    record = source if isinstance(source, Record) else source.record
    for layer in selected(record, layers):
        for own in layer.parameters:
            name = full_name(layer, own.name)
            yield _Fact(name, math.prod(own.shape), own.requires_grad, own.tied_to or name)


# --- what training does -------------------------------------------------------------------------------------------


_ROUNDING = 1e-5
"""Of another gradient of the layer: what is zero in exact arithmetic is not larger."""
_NO_USE = (
    "Its gradient is but rounding: a norm after it takes out what it adds. A bias there has no use: leave it out, of "
    "the model or here with ignore=."
)
_BEGAN = "assert_grad_finite says where that began."
_GAUGED = "The learning rate is too {0} for it, or its gradient is."


@dataclass(frozen=True, slots=True)
class _Moved:
    """A parameter or buffer before training and now."""

    name: str
    layer: Layer
    own: Parameter
    change: float | None
    """Relative to its norm before; inf from nothing; NaN: it changed, and by how much is not known; None: there are no
    numbers."""
    buffer: bool
    bad_before: bool
    """Whether it was not finite before training already."""


def assert_frozen(subject: Subject, *, layers: Selector = "**") -> None:
    """Assert that training leaves layers alone: their parameters, and buffers such as running statistics.

    It looks at what the optimizer did, not at ``requires_grad``: weight decay moves a parameter without a gradient, a
    BatchNorm in training mode its statistics without an optimizer.

    Args:
        subject: A watch, or a probe with one, over one or more steps of an optimizer.
        layers: Which layers are frozen.

    Raises:
        AssertionError: A parameter or buffer changed.
        NothingObservedError: The model was not called or has not changed at all, or the layers have no parameters.
        UsageError: The subject is a record, which is of one moment.

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
    __tracebackhide__ = True
    found = _moved(subject, layers)
    bad = [one for one in found if one.change]
    statistics = [layer for layer in {one.layer.name: one.layer for one in found}.values() if _gathers(layer)]
    if bad:
        first = bad[0]
        why = (
            "A BatchNorm in training mode gathers statistics whatever is frozen: put it in evaluation mode."
            if first.buffer
            else "It is in the optimizer: weight decay and momentum move parameters without a gradient too."
            if not first.own.requires_grad
            else "It requires a gradient: requires_grad_(False), and leave it out of the optimizer."
        )
        raise AssertionError(
            failure(
                f"{first.name} is not frozen: it changed{_by(first)}; "
                f"{len(bad):,} of {count(len(found), 'parameters and buffer')} looked at",
                ["parameter", "requires_grad", "changed by"],
                [[one.name, "buffer" if one.buffer else str(one.own.requires_grad), _size(one)] for one in bad],
                why,
            )
        )
    if statistics:
        layer = statistics[0]
        raise AssertionError(
            failure(
                f"{layer.label} is not frozen: it was called in training mode, and gathers running statistics",
                ["layer", "type"],
                [[one.name, one.type_name] for one in statistics],
                "Put it in evaluation mode: requires_grad_(False) does not.",
            )
        )


def assert_params_updated(subject: Subject, *, layers: Selector = "**", ignore: str | Iterable[str] = ()) -> None:
    """Assert that training changed every parameter that requires a gradient.

    Args:
        subject: A watch, or a probe with one, over one or more steps of an optimizer.
        layers: Which layers are trained.
        ignore: Globs on full names of parameters that need not change: a bias before a norm, say.

    Raises:
        AssertionError: A parameter is what it was before the first step, or is not finite.
        SelectionError: ``ignore`` matches no parameter.
        NothingObservedError: The model was not called, or the layers have no parameters that require a gradient.
        UsageError: The subject is a record, which is of one moment.

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
    __tracebackhide__ = True
    found = _finite(_trained(subject, layers, ignore))
    still = [one for one in found if one.change == 0]
    if still:
        first = still[0]
        gradient = first.own.gradient
        if gradient is None:
            why = "No gradient arrived: it is detached, unused, or watched too late."
        elif _is_bad(gradient):
            why = f"Its gradient is not finite, and such a step was not taken. {_BEGAN}"
        elif gradient.statistics is not None and gradient.statistics.all_zero:
            why = "Its gradient is zero throughout: the layers after it are dead or start from zero."
        elif _is_rounding(first):
            why = _NO_USE
        else:
            why = "It has a gradient: it is in no group of the optimizer, the step is too small, or was never taken."
        raise AssertionError(
            failure(
                f"{first.name} was not updated; {len(still):,} of {count(len(found), 'parameter')} looked at",
                ["parameter", "shape", "gradient rms"],
                [[one.name, str(one.own.shape), _rms(one.own.gradient)] for one in still],
                why,
            )
        )


def assert_update_ratio(
    subject: Subject,
    *,
    low: float = 1e-6,
    high: float = 1e-1,
    layers: Selector = "**",
    ignore: str | Iterable[str] = (),
) -> None:
    """Assert that steps are neither too small nor too large for the parameters: ‖w' − w‖ / ‖w‖.

    Over one step about 1e-3 is usual. The ratio is of all steps since the first forward: watch as many as are meant.

    Args:
        subject: A watch, or a probe with one, over one or more steps of an optimizer.
        low: The least allowed.
        high: The most allowed.
        layers: Which layers to look at. Parameters that were all zero before are left out.
        ignore: Globs on full names of parameters to leave out: a bias before a norm, say.

    Raises:
        AssertionError: A parameter's ratio is outside, or it is not finite.
        SelectionError: ``ignore`` matches no parameter.
        NothingObservedError: The model was not called, or the layers have no parameters that require a gradient.
        UsageError: The subject is a record; ``low`` is above ``high``.

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
    __tracebackhide__ = True
    if not 0 <= low <= high:
        raise UsageError(f"low and high are not negative, and low is not above high; got {low!r} and {high!r}")
    trained = _finite(_trained(subject, layers, ignore))
    found = [one for one in trained if one.change is not None and not math.isinf(one.change)]
    if not found:
        raise NothingObservedError("the selected layers have no parameters that require a gradient and were not zero")
    bad = [one for one in found if not low <= (one.change or 0.0) <= high]
    bad.sort(key=lambda one: -_times_outside(one.change or 0.0, low, high))
    if bad:
        first = bad[0]
        large = (first.change or 0.0) > high
        raise AssertionError(
            failure(
                f"{first.name} changed by {number(first.change)} of its norm, not {number(low)} to {number(high)}; "
                f"{len(bad):,} of {count(len(found), 'parameter')} looked at",
                ["parameter", "shape", "ratio", "gradient rms"],
                [[one.name, str(one.own.shape), one.change, _rms(one.own.gradient)] for one in bad],
                _why_outside(first, large=large),
            )
        )


def _trained(subject: Subject, layers: Selector, ignore: str | Iterable[str]) -> list[_Moved]:
    """Return the parameters that require a gradient."""
    found = [one for one in _moved(subject, layers, all_still=True) if not one.buffer and one.own.requires_grad]
    if not found:
        raise NothingObservedError("the selected layers have no parameters that require a gradient")
    left = not_ignored([one.name for one in found], ignore)
    return [one for one in found if one.name in left]


def _finite(found: list[_Moved]) -> list[_Moved]:
    """Return the parameters, all of which are finite; AssertionError where one is not.

    What is NaN has no norm, and was not trained.
    """
    __tracebackhide__ = True
    bad = [one for one in found if _is_bad(one.own.reading)]
    if bad:
        first = bad[0]
        why = (
            "It was not finite before the first step either: look at the initialization, or at what was loaded."
            if first.bad_before
            else f"Its gradient was not finite. {_BEGAN}"
            if _is_bad(first.own.gradient)
            else "Its gradients were finite: look at the learning rate and at what the optimizer divides by."
        )
        raise AssertionError(
            failure(
                f"{first.name} is not finite after training: {_bad_counts(first.own.reading)}; "
                f"{len(bad):,} of {count(len(found), 'parameter')} looked at",
                ["parameter", "shape", "not finite", "of its gradient"],
                [[one.name, str(one.own.shape), *map(_bad_counts, (one.own.reading, one.own.gradient))] for one in bad],
                why,
            )
        )
    return found


def _is_bad(reading: Reading | None) -> bool:
    """Whether an element is not finite."""
    return reading is not None and reading.statistics is not None and reading.statistics.nonfinite > 0


def _bad_counts(reading: Reading | None) -> str:
    statistics = None if reading is None else reading.statistics
    if statistics is None:
        return "-"
    return nonfinite_counts(statistics) if statistics.nonfinite else "none"


def _why_outside(one: _Moved, *, large: bool) -> str:
    if not large and _is_bad(one.own.gradient):
        return f"Its gradient is not finite, and such a step was not taken. {_BEGAN}"
    return _NO_USE if not large and _is_rounding(one) else _GAUGED.format("large" if large else "small")


def _times_outside(ratio: float, low: float, high: float) -> float:
    """Return how many times too large or too small a ratio is; infinite for none, and for one that is not known."""
    return ratio / high if ratio > high > 0 else low / ratio if 0 < ratio <= high else math.inf


def _is_rounding(one: _Moved) -> bool:
    """Whether a gradient is nothing beside another of the layer."""
    rms = _rms(one.own.gradient)
    return rms is not None and rms < _ROUNDING * max(_rms(p.gradient) or 0.0 for p in one.layer.parameters)


def _moved(subject: Subject, layers: Selector, *, all_still: bool = False) -> list[_Moved]:
    """Return the parameters and buffers of the layers, and how far they are from what they were before training.

    Args:
        subject: What the user gave.
        layers: Which layers.
        all_still: Whether it may be that nothing in the model changed.
    """
    source = source_of(subject)
    if not is_watch(source):
        raise UsageError(
            "a record is of one moment: give the watch that was open while the optimizer stepped, "
            "watch = modelprobe.watch(model)"
        )
    now, before = record_of(source), source.first
    names = {layer.name for layer in selected(now, layers)}
    found = [one for layer in now.layers.values() for one in _of_layer(layer, before.layers.get(layer.name))]
    if not all_still and not any(one.change for one in found):
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


def _of_layer(now: Layer, before: Layer | None) -> Iterator[_Moved]:
    if before is None:
        return
    for kind, mine, theirs in (
        ("parameter", now.parameters, before.parameters), ("buffer", now.buffers, before.buffers)
    ):  # fmt: skip
        was = {own.name: own for own in theirs}
        for own in mine:
            if own.name in was:
                change = _change(own.reading, was[own.name].reading)
                bad_before = _is_bad(was[own.name].reading)
                yield _Moved(full_name(now, own.name), now, own, change, kind == "buffer", bad_before)


def _change(now: Reading, before: Reading) -> float | None:
    """Return how far a reading is from another; 0 only where all that is known of them is equal."""
    if now.digest is not None and before.digest is not None:
        return 0.0 if now.digest == before.digest else 1.0
    if before.reason is not None and now.reason is None:
        return math.nan  # there were numbers, and they are not those of before any more
    if now.fingerprint is None or before.fingerprint is None or before.statistics is None:
        return None
    if now.fingerprint == before.fingerprint and now.statistics == before.statistics:
        return 0.0
    if now.statistics is not None and now.statistics.nonfinite:
        return math.nan  # in a fingerprint NaN and inf stand as numbers
    return estimated_change(now.fingerprint, before.fingerprint, before.statistics.norm)


def _by(one: _Moved) -> str:
    if _is_bad(one.own.reading):
        return f" to {_bad_counts(one.own.reading)}"
    return "" if one.change is None or math.isnan(one.change) else f" by {percent(one.change)}"


def _size(one: _Moved) -> str:
    if _is_bad(one.own.reading):
        return _bad_counts(one.own.reading)
    return "not known" if one.change is not None and math.isnan(one.change) else percent(one.change)


def _gathers(layer: Layer) -> bool:
    """Whether a layer was called in training mode with running statistics to keep."""
    keeps = any(buffer.name.startswith("running_") for buffer in layer.buffers)
    return keeps and any(call.training for call in layer.calls)


def _rms(reading: Reading | None) -> float | None:
    return None if reading is None or reading.statistics is None else reading.statistics.rms
