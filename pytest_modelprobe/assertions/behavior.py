"""Compare two records: a port and its reference, a model before and after a refactoring.

Numbers alone say that something differs, not what. So where both models are still alive, each layer is called alone on
equal inputs, and the failure names the code or the weights instead of every layer behind them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Literal

from pytest_modelprobe import comparison
from pytest_modelprobe.comparison import (
    Comparison,
    Tolerance,
    changes_code,
    compare,
    diagnose,
    layers_behind_zeros,
)
from pytest_modelprobe.comparison.text import text
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.record import LAST_POSITION, Record, Selector, is_narrow, selected

from .sources import Subject, record_of

__tracebackhide__ = True  # a traceback ends at the line of the test


def assert_same_behavior(
    actual: Subject,
    expected: Subject,
    *,
    rename: Mapping[str, str] | None = None,
    layers: Selector = "**",
    structure: bool = True,
    pair: Literal["names", "structure"] = "names",
    tolerance: Tolerance = None,
) -> None:
    """Assert that two models compute the same, layer by layer; the failure names the code or weights that differ.

    The tolerance of a value is a small multiple of the expected value's noise, which is measured by running the model
    again with 1-ulp perturbations, if the record is that of a `run` and its model still exists. Otherwise the
    tolerance is fixed: 1e-4 of the norm forward, 2e-2 backward.

    Args:
        actual: A record, a watch, or a probe with one run or watch: the port.
        expected: The same for the reference.
        rename: Dict of glob of the actual names → glob of the expected names, for layers with other names; layers
            inside them are included. ``{"blocks.*": "transformer.h.*"}``
        layers: Which layers of ``actual`` to compare.
        structure: Whether to compare types, attributes and shapes of parameters too; False for another implementation.
        pair: ``"structure"`` pairs the layers of another implementation by the values that flow through them where no
            names agree, and compares the outputs of the pairs; the failure has the pairing as a ``rename``.
        tolerance: Factor by which every tolerance is multiplied: a number, or a dict of glob of layers → number.

    Raises:
        AssertionError: They differ.
        SelectionError: ``rename``, ``layers`` or ``tolerance`` matches no layer.
        NothingObservedError: One of the two was never called, or no layer could be paired.
        UsageError: One of the two alone was watched with ``positions="last"``, or ``pair`` is neither of the two, or is
            with an option that it does not take.

    >>> import torch
    >>> from pytest_modelprobe import ModelProbe
    >>> probe = ModelProbe()
    >>> x = probe.randn(4, 8)
    >>> old, new = (probe.build(lambda: torch.nn.Sequential(torch.nn.LayerNorm(8))) for _ in range(2))
    >>> assert_same_behavior(probe.run(new, x), probe.run(old, x))
    >>> new[0].eps = 1e-3
    >>> assert_same_behavior(probe.run(new, x), probe.run(old, x))
    Traceback (most recent call last):
    AssertionError: 0.eps 1e-05 → 0.001: ...
    """
    mine, theirs = record_of(actual), record_of(expected)
    last = [any(note.startswith(LAST_POSITION) for note in record.notes) for record in (mine, theirs)]
    if last[0] != last[1]:
        raise UsageError(
            f"only the {'actual' if last[0] else 'expected'} record is of the last position alone: "
            'watch both with positions="last"'
        )
    if pair not in ("names", "structure"):
        raise UsageError(f'pair is "names" or "structure"; got {pair!r}')
    if pair == "structure":
        if layers != "**" or isinstance(tolerance, Mapping):
            raise UsageError(
                'pair="structure" compares all pairs: leave out layers=, and give one number as tolerance='
            )
        if type(tolerance) not in (int, float, type(None)) or (tolerance is not None and not 0 < tolerance < math.inf):
            raise UsageError(f"a tolerance multiplies the measured noise and is a positive number; got {tolerance!r}")
        _assert_same_port(mine, theirs, rename, 1.0 if tolerance is None else tolerance)
        return

    def compared(mine: Record, theirs: Record) -> Comparison:
        return compare(
            mine,
            theirs,
            rename=rename,
            layers=[layer.name for layer in selected(mine, layers)],
            tolerance=tolerance,
            parts="all" if structure else "behavior",
        )

    # Measuring the noise takes seven runs: skipped if the records are equal without it.
    again = theirs.live_run if theirs.noise is None else None
    if again is not None and not compared(mine, dataclasses.replace(theirs, noise="measured")).same:
        theirs = again.measured(theirs)
    found = compared(mine, theirs)
    now, then = mine.live_run, theirs.live_run
    if now is not None and (then is not None or any(call.response is not None for _, call in theirs.calls)):

        def alone(only: Collection[str] | None = None) -> Comparison:
            before = found.names_before
            reference = theirs
            if then is not None:
                those = None if only is None else [before.layers.get(name, name) for name in only]
                reference = then.isolated(theirs, only=those)
            like = compared(mine, reference).expected
            return compared(now.isolated(mine, like=like, names=before, only=only), reference)

        told = found.same and not is_narrow(theirs)  # half precision rounds away what code alone shows
        behind_zeros = layers_behind_zeros(mine) if told else []
        if not told or (behind_zeros and changes_code(diagnose(alone(behind_zeros)))):
            found = alone()
            if not found.same and then is not None and is_narrow(theirs):  # float32 rounds too, which is measured now
                theirs, then = then.measured(then.isolated(theirs)), None
                found = alone()
    diagnosis = diagnose(found)
    if not diagnosis.same:
        raise AssertionError(text(diagnosis, _next_steps(structure=structure)))


def _assert_same_port(mine: Record, theirs: Record, rename: Mapping[str, str] | None, tolerance: float) -> None:
    if theirs.noise is None and theirs.live_run is not None:
        theirs = theirs.live_run.measured(theirs)
    message = comparison.port_failure(comparison.pair(mine, theirs, rename), tolerance)
    if message:
        raise AssertionError(message)


def _next_steps(*, structure: bool) -> list[str]:
    steps = ["Look at the first cause; `keep=` with its layer in both runs gives the tensors to look at."]
    if structure:
        steps.append("Another implementation of the same? structure=False compares numbers alone, rename= maps names.")
    return steps
