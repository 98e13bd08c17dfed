"""What is worth saying of a record that nobody asserted on: one line a finding."""

from __future__ import annotations

from .assertions.activations import find_dead, find_origin, nonfinite_counts
from .assertions.structure import uncalled
from .record import Record
from .report.text import count, listed


def findings(record: Record) -> list[str]:
    """Return what a reader should know of a record, a line each; none where all is well.

    >>> findings(Record(model="Net"))
    []
    """
    if not record.forwards:
        return []
    found = []
    dead = find_dead(record, record.layers)
    if dead:
        found.append(f"dead: {listed([d.where for d in dead])}")
    origin = find_origin(record)
    if origin is not None and origin.value.forward.statistics is not None:
        found.append(f"not finite: {nonfinite_counts(origin.value.forward.statistics)} in {origin.layer.name}")
    unused = [layer.name for layer in uncalled(record) if layer.parameters]
    if unused:
        found.append(f"never called: {listed(unused)}")
    without = [
        f"{layer.name}.{p.name}" if layer.name != "(root)" else p.name
        for layer in record.layers.values()
        for p in layer.parameters
        if record.backwards and p.requires_grad and p.gradient is None and layer.name not in unused
    ]
    if without:
        found.append(f"no gradient: {count(len(without), 'parameter')}, {listed(without)}")
    return found
