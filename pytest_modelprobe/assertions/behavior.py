"""Two records against each other: a port and its reference, a model before and after a refactoring."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from pytest_modelprobe.comparison import Comparison, Tolerance, changes_code, compare, diagnose, layers_behind_zeros
from pytest_modelprobe.record import Record, Selector
from pytest_modelprobe.report.comparison import text

from .sources import Subject, record_of, selected


def assert_same_behavior(
    actual: Subject,
    expected: Subject,
    *,
    rename: Mapping[str, str] | None = None,
    layers: Selector = "**",
    structure: bool = True,
    tolerance: Tolerance = None,
) -> None:
    """Assert that two models did the same, layer by layer; say which module's own code, attribute or weights differ.

    What a value may differ by is a small multiple of the expected one's noise, measured by running it again slightly
    perturbed, where the record is that of a `run` and its model still lives; else it is a fixed tolerance (1e-4 of the
    norm forward, 2e-2 backward).

    Args:
        actual: A record, watch or probe with one of either: the port.
        expected: The same of what it should be like: the reference.
        rename: Glob of the actual → glob of the expected, for layers with other names; what is inside them goes along.
            ``{"blocks.*": "transformer.h.*"}``
        layers: Which layers of the actual to compare.
        structure: Also compare types, attributes, shapes of parameters; False for another implementation.
        tolerance: Multiplies what a value may differ by: a number, or a number for each glob of layers.

    Raises:
        AssertionError: They differ.
        SelectionError: ``rename``, ``layers`` or ``tolerance`` names no layer.
        NothingObservedError: One of the two was never called.

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
    __tracebackhide__ = True
    mine, theirs = record_of(actual), record_of(expected)

    def compared(mine: Record, theirs: Record) -> Comparison:
        __tracebackhide__ = True
        return compare(
            mine,
            theirs,
            rename=rename,
            layers=[layer.name for layer in selected(mine, layers)],
            tolerance=tolerance,
            parts="all" if structure else "behavior",
        )

    # To measure the noise takes seven runs: not where all is equal even if there were none.
    again = theirs.rerun if theirs.noise is None else None
    if again is not None and not compared(mine, dataclasses.replace(theirs, noise="measured")).same:
        theirs = again.measured(theirs)
    found = compared(mine, theirs)
    now, then = mine.rerun, theirs.rerun
    if now is not None and then is not None:

        def alone(only: Collection[str] | None = None) -> Comparison:
            before = found.names_before
            reference = then.isolated(theirs, only=None if only is None else [before.get(n, n) for n in only])
            like = compared(mine, reference).expected
            return compared(now.isolated(mine, like=like, names=before, only=only), reference)

        behind_zeros = layers_behind_zeros(mine) if found.same else []
        if not found.same or (behind_zeros and changes_code(diagnose(alone(behind_zeros)))):
            found = alone()
    if not found.same:
        raise AssertionError(text(diagnose(found), _next_steps(structure=structure)))


def _next_steps(*, structure: bool) -> list[str]:
    steps = ["Look at the first cause; `keep=` with its layer in both runs gives the tensors to look at."]
    if structure:
        steps.append("Another implementation of the same? structure=False compares numbers alone, rename= maps names.")
    return steps
