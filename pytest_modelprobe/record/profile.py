"""What each layer costs: time, operations, memory of activations.

Numbers of operations and bytes are the same in each run on one device, so a test can hold them to a budget. Times are
not, so a profile is never compared and never stored in a snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_modelprobe.text import Cell, count, table


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """What the calls of one layer cost, including the layers inside it."""

    type: str
    """Name of the class without its module, or of the function."""
    calls: int = 0
    wall_time: float = 0.0
    """Seconds between the start and the end of the calls, without what the probe itself took."""
    flops: int = 0
    """Floating-point operations of matrix products, convolutions and attention."""
    own_flops: int = 0
    """The operations that belong to no layer inside it."""
    activation_bytes: int = 0
    """Memory of the outputs of leaves in the forward with the most. A storage counts once."""
    parameters: int = 0
    """Elements of the parameters. Tied ones count once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What the forwards of a model cost, and each layer in them.

    Times, calls and operations are sums over the forwards of the record, without backward passes. Numbers of operations
    and bytes are the same in each run on one device, but times are not. ``print`` shows a table.

    >>> print(Profile(forwards=1, flops=96, layers={"fc": LayerProfile(type="Linear", calls=1, flops=96)}))
    1 forward: 96 FLOPs, 0 bytes of activations, 0.000 ms; the probe took 0.000 ms more
    <BLANKLINE>
    layer   type     calls   parameters   activations   FLOPs      ms   time
    fc      Linear       1            0             0      96   0.000      -
    """

    layers: Mapping[str, LayerProfile] = field(default_factory=dict)
    """The layers that were called, by name, in the order of the record."""
    forwards: int = 0
    wall_time: float = 0.0
    """Seconds in the outermost call, without what the probe itself took."""
    flops: int = 0
    """Floating-point operations, as `torch.utils.flop_counter` counts them."""
    activation_bytes: int = 0
    """Memory of the outputs of the recorded leaves in the forward with the most."""
    parameters: int = 0
    """Elements of the parameters of the model. Tied ones count once."""
    probe_time: float = 0.0
    """Seconds in the hooks of the probe, including those in backward passes."""

    def __str__(self) -> str:
        return as_text(self)


def as_text(profile: Profile) -> str:
    """Return a profile as a table of the layers that were called, each with what is inside it."""
    first = (
        f"{count(profile.forwards, 'forward')}: {count(profile.flops, 'FLOP')}, "
        f"{count(profile.activation_bytes, 'byte')} of activations, {_milliseconds(profile.wall_time)} ms; "
        f"the probe took {_milliseconds(profile.probe_time)} ms more"
    )
    columns = ["layer", "type", "calls", "parameters", "activations", "FLOPs", "ms", "time"]
    rows = [_row(name, layer, profile) for name, layer in profile.layers.items()]
    return "\n".join([first, *["", *table(columns, rows, most=len(rows))] * bool(rows)])


def _row(name: str, layer: LayerProfile, profile: Profile) -> list[Cell]:
    share = f"{layer.wall_time / profile.wall_time:.0%}" if profile.wall_time else "-"
    numbers = [layer.calls, layer.parameters, layer.activation_bytes, layer.flops]
    return [name, layer.type, *numbers, _milliseconds(layer.wall_time), share]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.3f}"
