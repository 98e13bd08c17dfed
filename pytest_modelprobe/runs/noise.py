"""Noise: how far harmless changes move each number of a run, measured by running it again a little beside itself.

What other threads, instruction sets and memory layouts do to a result is of the size of a rounding in each parameter
and input: `moved` makes one. Gradients need more. Where a ReLU gate or the choice of a max-pool lies within rounding
of the other side, one flip moves every gradient below by a hundredth, and a move by one unit mostly misses it; a move
by `BACKWARD_ULPS` units finds it, and moves smooth models by no more than it says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import nn

from pytest_modelprobe.models import as_real, has_bytes, seeding
from pytest_modelprobe.record import (
    Call,
    Layer,
    Parameter,
    Reading,
    Record,
    Value,
    address,
    estimated_change,
    estimated_share,
    qualified,
)

FORWARD_ULPS = 1
"""Units in the last place by which repeats of the forward move each element."""

BACKWARD_ULPS = {torch.float32: 84, torch.float64: 84}
"""Units in the last place by which repeats of the backward move each element, 1e-5 in float32.

Other dtypes: `FORWARD_ULPS`.
"""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Key = tuple[Hashable, ...]
"""Address of a reading: layer, which call, path, direction."""


# --- moving numbers -----------------------------------------------------------------------------------------------


def moved(tensor: torch.Tensor, name: str, units: int) -> torch.Tensor:
    """Return a copy of ``tensor``, each element moved up or down by so many units in the last place of its dtype.

    A coin that belongs to ``name`` says which way. Zeros stay, for they are exact; so does what is not finite or too
    large to be a quantity.

    >>> x = moved(torch.tensor([1.0, 0.0, -torch.inf, 3.0e38]), "x", 1)
    >>> x[1:].tolist() == [0.0, -torch.inf, torch.tensor(3.0e38).item()], abs(x[0] - 1).item() < 2e-7, x[0] != 1
    (True, True, tensor(True))
    """
    plain = as_real(tensor.detach())
    bits = plain.view(_BITS[plain.element_size()])  # of one sign, numbers lie in the order of their bits
    magnitude = bits & torch.iinfo(bits.dtype).max
    most = int(torch.tensor(torch.finfo(plain.dtype).max / 2, dtype=plain.dtype).view(bits.dtype))
    way = _coins(plain.numel(), name).to(plain.device, bits.dtype).view(plain.shape) * 2 - 1
    result = torch.where((magnitude > units) & (magnitude < most), bits + way * units, bits).view(plain.dtype)
    return torch.view_as_complex(result) if tensor.is_complex() else result


def _coins(count: int, name: str) -> torch.Tensor:
    drawn = numpy.random.default_rng(seeding.derive(0, name)).bytes(-(-count // 8))
    return torch.from_numpy(numpy.unpackbits(numpy.frombuffer(drawn, numpy.uint8), count=count).view(numpy.int8))


@dataclass(frozen=True, slots=True)
class Perturbation:
    """One way to move all numbers of a run.

    Args:
        name: Tells repeats apart.
        far: Whether by `BACKWARD_ULPS` units in the last place; else by `FORWARD_ULPS`.
    """

    name: str
    far: bool

    def parameters(self, model: nn.Module) -> None:
        """Move every floating parameter of ``model`` in place; what is no plain memory stays as it is."""
        for path, parameter in model.named_parameters():
            if has_bytes(parameter) and 0 not in parameter.stride():
                parameter.data.copy_(self(parameter, path))

    def input(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return an input moved, if it is a quantity: masks, lengths, targets and one-hot codes stay as they are.

        >>> mask = torch.tensor([0.5, torch.finfo(torch.float32).min])
        >>> Perturbation("repeat 1", far=False).input(mask, "mask") is mask
        True
        """
        return self(tensor, name) if has_bytes(tensor) and _is_quantity(tensor) else tensor

    def __call__(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a copy of ``tensor`` moved; the same tensor if it is not of floats."""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        return moved(
            tensor, f"{self.name} {name}", BACKWARD_ULPS.get(tensor.dtype, FORWARD_ULPS) if self.far else FORWARD_ULPS
        )


def _is_quantity(tensor: torch.Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    plain = as_real(tensor.detach())
    plain = plain if plain.element_size() > 1 else plain.float()  # which has no arithmetic of its own
    usual = plain.abs() < torch.finfo(plain.dtype).max / 2  # False of NaN
    return bool(usual.all()) and not bool((plain == plain.round()).all())


# --- readings that differ -----------------------------------------------------------------------------------------


def with_noise(base: Record, near: Sequence[Record], far: Sequence[Record] = ()) -> Record:
    """Return ``base`` with the noise of each reading: the most that it moved in any repeat.

    Infinite where a repeat has no such value, or one of another size. What was never read has no noise, nor have
    parameters and buffers as they were before: nothing computed them.

    Args:
        base: The record.
        near: Repeats with all numbers moved by `FORWARD_ULPS`: the noise of the forward.
        far: Repeats with all numbers moved by `BACKWARD_ULPS`: that of gradients, and of integers and bools, which stay
            the same until something tips over.
    """
    near_readings, far_readings = [readings(repeat) for repeat in near], [readings(repeat) for repeat in far]

    def measured(key: Key, reading: Reading) -> Reading:
        tips = reading.digest is not None or key[-1] not in ("forward", "after")
        changes = [change(reading, repeat.get(key)) for repeat in (far_readings if tips else near_readings)]
        known = [c for c in changes if c is not None]
        return dataclasses.replace(reading, noise=max(known)) if known else reading

    return dataclasses.replace(_mapped(base, measured), noise="measured")


def with_nondeterminism(base: Record, repeats: Sequence[Record]) -> Record:
    """Return ``base`` with the noise that plain repeats show, where they differ; it is *not repeatable*."""
    again = [readings(repeat) for repeat in repeats]

    def measured(key: Key, reading: Reading) -> Reading:
        noise = max((change(reading, repeat.get(key)) or 0.0 for repeat in again), default=0.0)
        return dataclasses.replace(reading, noise=noise) if noise else reading

    return dataclasses.replace(_mapped(base, measured), noise="not repeatable")


def change(reading: Reading, other: Reading | None) -> float | None:
    """Return by how much another reading of the same value differs, relative to its norm; integers: what share does."""
    numbers = reading.statistics
    if numbers is None or reading.fingerprint is None:
        return None
    if other is None or other.statistics is None or other.fingerprint is None:
        return math.inf
    if other.statistics.count != numbers.count or other.statistics.nonfinite != numbers.nonfinite:
        return math.inf
    if reading.digest is None:
        return estimated_change(
            other.fingerprint, reading.fingerprint, (numbers.rms or 0.0) * math.sqrt(numbers.finite)
        )
    if reading.digest == other.digest:
        return 0.0
    return max(estimated_share(other.fingerprint, reading.fingerprint, numbers.count), 1 / numbers.count)


def first_difference(base: Record, repeat: Record) -> str | None:
    """Return the address of the first value, in the order of computation, that a repeat has otherwise; None: none."""
    again = readings(repeat)
    for where, key, reading in _in_order(base):
        other = again.get(key)
        if other is None or not _same(reading, other):
            return where
    return None


def _same(a: Reading, b: Reading) -> bool:
    # by their text, in which NaN is like NaN
    return repr((a.statistics, a.fingerprint, a.digest)) == repr((b.statistics, b.fingerprint, b.digest))


def _in_order(record: Record) -> Iterator[tuple[str, Key, Reading]]:
    """Yield every computed reading as it came about: forwards by start and end of calls, gradients backwards."""
    events: list[tuple[int, str, Layer, Call, Value]] = []
    for layer in record.layers.values():
        for call in layer.calls:
            events += [(call.started, layer.name, layer, call, value) for value in call.inputs]
            events += [(call.finished, layer.name, layer, call, value) for value in call.outputs]
    events.sort(key=lambda event: event[0])
    for _, name, _, call, value in events:
        yield address(name, call, value.path), _key(name, call, value, "forward"), value.forward
    for _, name, _, call, value in reversed(events):
        for direction, reading in (("backward", value.backward), ("backward_inner", value.backward_inner)):
            if reading is not None:
                yield f"gradient of {address(name, call, value.path)}", _key(name, call, value, direction), reading
    for layer in record.layers.values():
        for kind, owned in (("parameter", layer.parameters), ("buffer", layer.buffers)):
            for one in owned:
                full = qualified(layer.name, one.name)
                if one.gradient is not None:
                    yield f"gradient of {full}", (layer.name, kind, one.name, "gradient"), one.gradient
                if one.after is not None:
                    yield full, (layer.name, kind, one.name, "after"), one.after


def _key(layer: str, call: Call, value: Value, direction: str) -> Key:
    return layer, call.root, call.root_training, call.index, value.path, direction


def readings(record: Record) -> dict[Key, Reading]:
    """Return every computed reading of a record by its address."""
    return {key: reading for _, key, reading in _in_order(record)}


def _mapped(record: Record, function: Callable[[Key, Reading], Reading]) -> Record:
    """Return the record with ``function`` applied to every computed reading."""

    def value(layer: str, call: Call, one: Value) -> Value:
        def mapped(direction: str, reading: Reading | None) -> Reading | None:
            return None if reading is None else function(_key(layer, call, one, direction), reading)

        return dataclasses.replace(
            one,
            forward=function(_key(layer, call, one, "forward"), one.forward),
            backward=mapped("backward", one.backward),
            backward_inner=mapped("backward_inner", one.backward_inner),
        )

    def owned(layer: str, kind: str, some: Iterable[Parameter]) -> tuple[Parameter, ...]:
        return tuple(
            dataclasses.replace(
                one,
                gradient=one.gradient and function((layer, kind, one.name, "gradient"), one.gradient),
                after=one.after and function((layer, kind, one.name, "after"), one.after),
            )
            for one in some
        )

    layers: Mapping[str, Layer] = {
        name: dataclasses.replace(
            layer,
            parameters=owned(name, "parameter", layer.parameters),
            buffers=owned(name, "buffer", layer.buffers),
            calls=tuple(
                dataclasses.replace(
                    call,
                    inputs=tuple(value(name, call, one) for one in call.inputs),
                    outputs=tuple(value(name, call, one) for one in call.outputs),
                )
                for call in layer.calls
            ),
        )
        for name, layer in record.layers.items()
    }
    return dataclasses.replace(record, layers=layers)
