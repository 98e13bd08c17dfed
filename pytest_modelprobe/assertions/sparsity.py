"""Pruned weights: how many elements are zero, and whether they stay so.

A step of an optimizer fills what was set to zero once, unless a mask is applied again. That shows only in the weights
as they are after the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.record import Layer, Reading, Record, Selector, selected
from pytest_modelprobe.text import failed, out_of, printable

from .sources import LEAVE_OUT, Subject, full_name, is_watch, source_of

__tracebackhide__ = True  # a traceback ends at the line of the test


def assert_sparsity(subject: Subject, least: float, *, layers: Selector = "**") -> None:
    """Assert that enough elements of each weight are zero, as after pruning; biases are left out.

    With a watch, the weights are read as they are now: after steps of an optimizer this holds only if the masks stay.
    A weight under ``torch.nn.utils.prune`` is read through its mask.

    Args:
        subject: A watch, a record, or a probe with one run or watch.
        least: The least share of zeros in each weight, from 0 to 1.
        layers: Layers whose own weights are looked at; name those that are pruned.

    Raises:
        AssertionError: A weight has fewer zeros.
        NothingObservedError: The layers have no weights with numbers.
        UsageError: ``least`` is not from 0 to 1.

    >>> import torch
    >>> from torch.nn.utils import prune
    >>> from pytest_modelprobe import ModelProbe
    >>> model = torch.nn.Linear(4, 2)
    >>> _ = prune.l1_unstructured(model, "weight", amount=0.5)
    >>> assert_sparsity(ModelProbe().run(model, torch.ones(1, 4)), 0.5)
    """
    if not 0 <= least <= 1:
        raise UsageError(f"least is a share of the elements, from 0 to 1; got {least!r}")
    source: Any = source_of(subject)
    if is_watch(source):
        source.reread()
    record: Record = source if isinstance(source, Record) else source.record
    found = [one for layer in selected(record, layers) for one in _weights(layer)]
    if not found:
        raise NothingObservedError("the selected layers have no weights with numbers: select layers that have")
    short = sorted(((zeros / n, name, zeros, n) for name, zeros, n in found if zeros / n < least))
    if not short:
        _reject_unread(record, layers)
        return
    share, name, _, _ = short[0]
    raise failed(
        f"{name} is {share:.1%} zeros, not {least:.1%} or more; {out_of(len(short), len(found), 'weight')}",
        ["weight", "zeros", "elements", "share"],
        [[name, zeros, n, f"{share:.1%}"] for share, name, zeros, n in short],
        "A step of an optimizer fills what was set to zero: multiply by the mask after each step, or use "
        "torch.nn.utils.prune, which does it in each forward.",
    )


def _weights(layer: Layer) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the number of zeros and the number of elements of each weight."""
    for name, reading in _readings(layer):
        statistics = reading.statistics
        if statistics is not None and statistics.count:
            yield name, statistics.zeros, statistics.count


def _readings(layer: Layer) -> Iterator[tuple[str, Reading]]:
    """Yield the full name of each weight, and what was read of it or of its mask."""
    masks = {buffer.name: buffer for buffer in layer.buffers}
    for parameter in layer.parameters:
        name = parameter.name.removesuffix("_orig")
        read = masks.get(f"{name}_mask", parameter) if name != parameter.name else parameter
        if "bias" not in name:
            yield full_name(layer, name), read.reading


def _reject_unread(record: Record, layers: Selector) -> None:
    for name, reading in (one for layer in selected(record, layers) for one in _readings(layer)):
        if reading.statistics is None and reading.reason:
            raise NothingObservedError(f"no number is known of {name}: {printable(reading.reason)}; {LEAVE_OUT}")
