"""What a change does to checkpoints that were saved before it.

A checkpoint is a state_dict, and torch loads it by its keys. So the parameters and persistent buffers of both records
are written as keys, and compared: which were added, removed, reshaped, cast, tied or renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from pytest_modelprobe.comparison import Comparison
from pytest_modelprobe.record import Layer, Parameter, Record, elements, qualified


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """How the keys of the state_dict changed, and how many parameters there are."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    """Keys with another dtype. A checkpoint loads, and its values are converted."""
    tied: tuple[str, ...] = ()
    """Keys that share their storage with different keys than before."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Old key → new key, for the keys of renamed layers."""
    parameters: int = 0
    """The number of elements of all parameters now. Shared ones are counted once."""
    parameters_before: int = 0

    @property
    def none(self) -> bool:
        """Whether old checkpoints load exactly as before."""
        return not (self.added or self.removed or self.reshaped or self.cast or self.tied or self.renamed)

    @property
    def loads(self) -> bool:
        """Whether an old checkpoint loads without an error, even if values are converted or tied differently."""
        return not (self.added or self.removed or self.reshaped or self.renamed)


def effect_on_checkpoints(comparison: Comparison) -> Effect:
    """Return how the keys of the state_dict changed."""
    now, before = _keys(comparison.actual, comparison.expected), _keys(comparison.expected, comparison.actual)
    original = {new: old for old, new in comparison.renamed.items()}
    both = [key for key in now if key in before]

    def as_it_was(key: str) -> str:
        layer, own = before[key]
        return qualified(original.get(layer, layer.removesuffix(" (removed)")), own.name)

    def other(aspect: Callable[[Parameter], object]) -> tuple[str, ...]:
        return tuple(key for key in both if aspect(now[key][1]) != aspect(before[key][1]))

    return Effect(
        added=tuple(key for key in now if key not in before),
        removed=tuple(as_it_was(key) for key in before if key not in now),
        reshaped=other(lambda own: own.shape),
        cast=other(lambda own: own.dtype),
        tied=other(lambda own: own.tied_to),
        renamed={as_it_was(key): key for key in both if as_it_was(key) != key},
        parameters=elements(comparison.actual.parameters),
        parameters_before=elements(comparison.expected.parameters),
    )


def _keys(record: Record, other: Record) -> dict[str, tuple[str, Parameter]]:
    """Return key → the name of the layer and the tensor.

    A file of the structure alone does not say which buffers are persistent. Then ``other``, the record that it is
    compared with, may say so.
    """
    persistent = {(layer.name, own.name): own.persistent for layer in other.layers.values() for own in layer.buffers}

    def stored(layer: Layer) -> Iterator[Parameter]:
        yield from layer.parameters
        for own in layer.buffers:
            if persistent.get((layer.name, own.name)) if own.persistent is None else own.persistent:
                yield own

    return {
        qualified(name, own.name): (name, own)
        for layer in record.layers.values()
        # A shared module is stored under each of its names.
        for name in (layer.name, *layer.aliases)
        for own in stored(layer)
    }
