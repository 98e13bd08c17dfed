"""Noise: the change of each number of a run when it is repeated with ulp-perturbed parameters and inputs.

A fixed tolerance is too loose for one layer and too tight for the next, so it is measured. Other threads, instruction
sets and memory layouts change a result about as much as rounding each parameter and input does, which `perturbed`
imitates. Gradients need larger perturbations: if the input of a ReLU is zero up to rounding, or two candidates of a
max-pool are equal, one flip changes all gradients below by about 1 %. One ulp rarely causes such a flip. The units of
`BACKWARD_ULPS` do, and change smooth models in proportion only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy
import numpy.typing
import torch
from torch import Tensor, nn

from pytest_modelprobe._torch import DispatchMode, Operation, schema
from pytest_modelprobe.models import as_real, has_dense_storage, seeding, unexpanded
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
    gc_paused,
    qualified,
)

FORWARD_ULPS = 1
"""Perturbation of each element for the noise of the forward, in units in the last place.

Three repeats by it predict the effect of harmless changes to within a factor of 1.7 on every layer of a ResNet and of a
GPT-2.
"""

BACKWARD_ULPS = 84
"""Perturbation of each element for the noise of the backward, in units in the last place: 1e-5 in float32."""

SUM_ULPS = 1 / 64
"""Perturbation of a weight for the noise of the forward, in units in the last place and in square roots of the number
of products that are added up for an output.

Two orders of ``n`` additions differ by up to sqrt(n) / 4 epsilon. If ``n`` is 10,000 or more, that is more than
rounding all weights does. The tolerance is four times the noise and 2e-6.
"""

_PERIOD = 32_771
"""Number of signs of a tensor; then they repeat. It is a prime, so that no two rows have the same."""

ROUNDING = torch.finfo(torch.float32).eps
"""Noise of what is not computed from numbers that a repeat perturbs."""

_UNIT = 0.7355
"""Mean size of a unit in the last place of a number, in epsilon times the number, as the root of the mean square."""

_DTYPES = (torch.float32, torch.float64)
"""The dtypes that are perturbed. A unit of a narrower one is a change of its own: see `Widening`."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", Value, Parameter)

Key = tuple[Hashable, ...]
"""Address of a reading: layer, which call, path, direction; or layer, kind, parameter, and what of it."""

_OF_PARAMETER = 4
"""Length of an address of a parameter."""

Readings = Mapping[Key, Reading]
"""The computed readings of a record, in the order of computation."""


# --- perturbing numbers -------------------------------------------------------------------------------------------


def perturbed(tensor: torch.Tensor, name: str, units: int) -> torch.Tensor:
    """Return a copy of ``tensor``, each element increased or decreased by some units in the last place of its dtype.

    The signs are drawn from ``name``. Zeros, which are exact, and elements that are not finite stay unchanged.

    >>> x = perturbed(torch.tensor([1.0, 0.0, -torch.inf, torch.inf]), "x", 1)
    >>> x[1:].tolist() == [0.0, -torch.inf, torch.inf], abs(x[0] - 1).item() < 2e-7, x[0] != 1
    (True, True, tensor(True))
    """
    plain = as_real(tensor.detach())
    result = torch.empty_like(plain)
    _perturb(plain, name, units, result)
    return torch.view_as_complex(result) if tensor.is_complex() else result


def _perturb(tensor: torch.Tensor, name: str, units: int, result: torch.Tensor) -> None:
    """Write a real tensor, perturbed, to ``result``, which may be the tensor itself."""
    count = tensor.numel()
    steps = _signs(name, min(count, _PERIOD)).to(tensor.device, tensor.dtype)
    steps = steps * (units * _UNIT * torch.finfo(tensor.dtype).eps)
    plain = count and tensor.is_cpu and tensor.is_contiguous() and result.is_contiguous()
    if not plain or not all(abs(float(bound)) < torch.finfo(tensor.dtype).max / 2 for bound in tensor.aminmax()):
        every = steps.repeat(-(-count // _PERIOD))[:count].view(tensor.shape)
        moved = torch.addcmul(tensor, tensor, every)
        result.copy_(moved.where(moved.isfinite(), tensor))  # to an infinity, the opposite one would be added
        return
    whole = count // _PERIOD * _PERIOD or count
    for numbers, to in zip(tensor.view(-1).split(whole), result.view(-1).split(whole), strict=True):
        width = min(len(numbers), _PERIOD)
        rows = numbers.view(-1, width)
        torch.addcmul(rows, rows, steps[:width], out=to.view(-1, width))


def _signs(name: str, count: int) -> torch.Tensor:
    """Return random signs: a part of a table, which begins at a random place."""
    table = _sign_table()
    first = seeding.derive(0, name) % (len(table) - _PERIOD)
    return torch.from_numpy(table[first : first + count])


@functools.cache
def _sign_table() -> numpy.typing.NDArray[numpy.float32]:
    drawn = numpy.random.default_rng(0).bytes(_PERIOD)
    return numpy.unpackbits(numpy.frombuffer(drawn, numpy.uint8)).astype(numpy.float32) * 2 - 1


@dataclass(frozen=True, slots=True)
class Perturbation:
    """One random perturbation of all numbers of a run.

    Args:
        name: Seed of the signs.
        far: Whether to perturb by `BACKWARD_ULPS` rather than `FORWARD_ULPS`.
    """

    name: str
    far: bool

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Perturb every floating parameter of ``model`` in place, except those without plain memory.

        The caller restores the model.
        """
        for path, parameter in model.named_parameters():
            plain = has_dense_storage(parameter) and 0 not in parameter.stride()
            if plain:
                owner = model.get_submodule(path.rpartition(".")[0])
                self.in_place(parameter.data, path, terms_of(owner, parameter))
        yield

    def input(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return an input perturbed. Masks, lengths, targets and one-hot codes stay unchanged.

        >>> mask = torch.tensor([0.5, torch.finfo(torch.float32).min])
        >>> Perturbation("repeat 1", far=False).input(mask, "mask") is mask
        True
        """
        if not is_quantity(tensor):
            return tensor
        moved = self(unexpanded(tensor), name)
        return moved if moved.shape == tensor.shape else moved.expand(tensor.shape)

    def gradients(self, outputs: Iterable[torch.Tensor]) -> None:
        """Perturb the gradient that arrives at each output by one unit, because the loss may round it differently.

        The gradient of the last bias is a sum of numbers that depend on no weight, so nothing else changes it. A scalar
        has no such sum.
        """
        for number, output in enumerate(outputs):
            if not output.is_leaf and output.numel() > 1:
                name = f"loss {number}"
                output.register_hook(functools.partial(Perturbation(self.name, far=False), name=name))

    def in_place(self, tensor: torch.Tensor, name: str, terms: int = 1) -> torch.Tensor:
        """Perturb a tensor of float32 or wider in place, and return it. Any other tensor is returned as it is.

        Args:
            tensor: The tensor.
            name: Seed of the signs, together with the name of the perturbation.
            terms: See `terms_of`.
        """
        numbers = as_real(tensor)
        if numbers.dtype in _DTYPES:
            _perturb(numbers, f"{self.name} {name}", self._units(terms), numbers)
        return tensor

    def __call__(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a perturbed copy of a tensor of float32 or wider. Any other tensor is returned as it is."""
        if as_real(tensor.detach()).dtype not in _DTYPES:
            return tensor
        return perturbed(tensor, f"{self.name} {name}", self._units())

    def _units(self, terms: int = 1) -> int:
        return BACKWARD_ULPS if self.far else max(FORWARD_ULPS, round(SUM_ULPS * math.sqrt(terms)))


def terms_of(owner: nn.Module, weight: torch.Tensor) -> int:
    """Return how many products are added up for an output, if the weight is a matrix or of a convolution. Else it is 1.

    >>> conv = nn.Conv2d(3, 8, 5)
    >>> terms_of(conv, conv.weight), terms_of(conv, conv.bias)
    (75, 1)
    """
    if weight.dim() == 2 or isinstance(owner, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return math.prod(weight.shape[1:])
    return 1


def noise_of_product(layer: nn.Module) -> tuple[float, float] | None:
    """Return the noise of the output, and of the gradients, of a layer that adds up products with a weight.

    It follows from the perturbation, and is not measured: numbers that change by some units in the last place, with
    random signs, change the sums of their products by up to as many epsilon, and those of outputs are rounded in
    another way. `None` stands for a device or a dtype that rounds in its own way.

    >>> noise_of_product(nn.Linear(4, 4))
    (2.384185791015625e-07, 1.0013580322265625e-05)
    """
    weight: Any = layer.weight
    dtype = widened(weight.dtype)
    if not weight.is_cpu or dtype not in _DTYPES or not _computes_float32():
        return None
    epsilon = torch.finfo(dtype).eps
    near, far = (Perturbation("", far)._units(terms_of(layer, weight)) for far in (False, True))
    return 2 * near * epsilon, far * epsilon


def _computes_float32() -> bool:
    """Whether products of float32 are computed as such, and not in TensorFloat-32 or bfloat16."""
    try:
        highest = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # torch has a newer way to set it, after which the older one may raise
        return False
    parts = (getattr(torch.backends.mkldnn, name, None) for name in ("matmul", "conv"))
    return highest and all(getattr(part, "fp32_precision", "none") in ("none", "ieee") for part in parts)


def is_quantity(tensor: torch.Tensor) -> bool:
    """Return whether an input has plain memory, and numbers that may be a little larger: no mask, length or code."""
    if not has_dense_storage(tensor):
        return False
    plain = as_real(unexpanded(tensor).detach())
    if plain.dtype not in _DTYPES:
        return False
    usual = plain.abs() < torch.finfo(plain.dtype).max / 2  # this is false for a NaN
    return bool(usual.all()) and not bool((plain == plain.round()).all())


# --- readings that differ -----------------------------------------------------------------------------------------


_COVERED = 5e-7
"""Noise that changes no verdict: a quarter of the least tolerance of a stored number, which is added to it."""

_WHOLE = 0.1
"""Noise from which on a number has no digit that repeats."""

_AGREE = 2.0
"""Two repeats agree if the tolerance by the larger change is no more than so many times that by the other."""


def is_bounded(changes: Sequence[float], *, digest: str | None = None) -> bool:
    """Whether further repeats would tell nothing: the changes in those before are small, or the two largest agree.

    Integers and bools, which have a digest, change in steps, and take two.

    >>> is_bounded([1e-7]), is_bounded([2e-5]), is_bounded([2e-5, 3e-5]), is_bounded([2e-5, 1e-3]), is_bounded([3, 90])
    (True, False, True, False, True)
    """
    *_, second, largest = (0.0, 0.0, *sorted(min(change, _WHOLE) for change in changes))
    return len(changes) > (digest is not None) and largest + _COVERED <= _AGREE * (second + _COVERED)


def is_noise_bounded(base: Mapping[K, Reading], repeats: Sequence[Mapping[K, Reading | None]]) -> bool:
    """Whether some repeats bound the noise of all readings."""
    if not (base and repeats):
        return not base
    known = ((reading, known_changes(reading, (one.get(key) for one in repeats))) for key, reading in base.items())
    return all(is_bounded(changes, digest=reading.digest) for reading, changes in known if changes)


def is_far(key: Key, reading: Reading) -> bool:
    """Whether the noise of a reading is that of repeats that are perturbed far."""
    return reading.digest is not None or key[-1] not in ("forward", "after")


def with_noise(base: Record, near: Sequence[Readings], far: Sequence[Readings], kind: str = "measured") -> Record:
    """Return ``base`` with the noise of each reading: its largest relative change in any repeat.

    It is infinite if a repeat has no such value, or one of another size. Readings without statistics have no noise.
    Parameters and buffers before the run have none either, as they are not computed.

    Args:
        base: The record.
        near: The readings of repeats perturbed by `FORWARD_ULPS`, for the noise of the forward.
        far: Those of repeats perturbed by `BACKWARD_ULPS`, for the noise of gradients, and of integers and bools, which
            change in steps.
        kind: The `Record.noise`. It is *not repeatable* if unperturbed repeats differ.
    """

    def measured(key: Key, reading: Reading) -> Reading:
        repeats = far if is_far(key, reading) else near
        known = known_changes(reading, (repeat.get(key) for repeat in repeats))
        # A reading that unperturbed repeats do not change may still round.
        is_known = bool(known) if kind == "measured" else any(known)
        return dataclasses.replace(reading, noise=max(known)) if is_known else reading

    return dataclasses.replace(_mapped(base, measured), noise=kind)


def known_changes(reading: Reading, repeats: Iterable[Reading | None]) -> list[float]:
    """Return the `relative_change` of a reading in each of some repeats, where it is known."""
    return [change for one in repeats if (change := relative_change(reading, one)) is not None]


def relative_change(reading: Reading, other: Reading | None) -> float | None:
    """Return the change of a reading relative to its norm. For integers it is the share of elements that differ."""
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


def first_difference(base: Readings, repeat: Readings) -> str | None:
    """Return the address of the first value, in the order of computation, that differs in a repeat, or `None`."""
    for key, reading in base.items():
        other = repeat.get(key)
        # They are compared as text, in which NaN equals NaN.
        if other is None or any(
            repr(getattr(reading, field)) != repr(getattr(other, field))
            for field in ("statistics", "fingerprint", "digest")
        ):
            return _address(key)
    return None


def _address(key: Key) -> str:
    layer, *call, name, what = key
    if len(key) == _OF_PARAMETER:
        where = qualified(str(layer), str(name))
    else:
        of: Any = dict(zip(("root", "root_training", "index"), call, strict=True))
        where = address(str(layer), Call(**of), str(name))
    return where if what in ("forward", "after") else f"gradient of {where}"


@gc_paused()
def readings(record: Record) -> Readings:
    """Return every computed reading of a record by its address, in the order of computation.

    These are the forwards, by start and end of calls, and then the gradients.
    """
    calls = [(layer.name, call) for layer in record.layers.values() for call in layer.calls]
    events = [(call.started, name, call, call.inputs) for name, call in calls]
    events += [(call.finished, name, call, call.outputs) for name, call in calls]
    events.sort(key=lambda event: event[0])
    values = [(_key(name, call, one), one) for _, name, call, some in events for one in some]
    found: dict[Key, Reading | None] = {(*key, "forward"): one.forward for key, one in values}
    for key, one in reversed(values):
        found |= {(*key, "backward"): one.backward, (*key, "backward_inner"): one.backward_inner}
    for layer in record.layers.values():
        for kind, owned in (("parameter", layer.parameters), ("buffer", layer.buffers)):
            for each in owned:
                place = layer.name, kind, each.name
                found |= {(*place, "gradient"): each.gradient, (*place, "after"): each.after}
    return {key: reading for key, reading in found.items() if reading is not None}


def _key(layer: str, call: Call, value: Value) -> Key:
    return layer, call.root, call.root_training, call.index, value.path


@gc_paused()
def _mapped(record: Record, function: Callable[[Key, Reading], Reading]) -> Record:
    """Return the record with ``function`` applied to every computed reading."""

    def mapped(one: V, address: Key, *names: str) -> V:
        had = {name: reading for name in names if (reading := getattr(one, name)) is not None}
        changed: dict[str, Any] = {name: function((*address, name), reading) for name, reading in had.items()}
        return dataclasses.replace(one, **changed)

    def value(layer: str, call: Call, one: Value) -> Value:
        return mapped(one, _key(layer, call, one), "forward", "backward", "backward_inner")

    def owned(layer: str, kind: str, some: Iterable[Parameter]) -> tuple[Parameter, ...]:
        return tuple(mapped(one, (layer, kind, one.name), "gradient", "after") for one in some)

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


# --- Half precision computed in float32, and float32 in float64: what code computes but for rounding -----------------

NARROW = frozenset({torch.bfloat16, torch.float16})
"""The dtypes that are computed in float32."""


def widened(dtype: torch.dtype, wide: torch.dtype = torch.float32) -> torch.dtype:
    """Return ``wide``, float32 or float64, for a narrower dtype, and any other as it is, also one of eight bits.

    >>> widened(torch.bfloat16), widened(torch.float32), widened(torch.complex64, torch.float64)
    (torch.float32, torch.float32, torch.complex128)
    """
    floating = (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1
    return torch.promote_types(dtype, wide) if floating else dtype


class Widening(DispatchMode):
    """Computes in float32, or in float64, what code computes in a narrower dtype, written out or by autocast.

    Casts to half precision are casts to float32, and tensors in half precision are converted when an operation reads
    them. Tensors that an operation writes to, and views, stay as they are. A leaf that requires a gradient has to have
    that dtype before.

    >>> with Widening():
    ...     (torch.ones(2, dtype=torch.bfloat16) / 3).half().dtype
    torch.float32
    """

    supports_higher_order_operators = True

    def __init__(self, wide: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._wide = wide

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, Operation):  # a higher order operator calls others
            return func(*args, **(kwargs or {}))
        read = _arguments(func)
        args = [self._widened(arg, is_read) for arg, is_read in zip(args, read.values(), strict=False)]
        kwargs = {name: self._widened(arg, read[name]) for name, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)

    def _widened(self, value: Any, is_read: bool) -> Any:
        if isinstance(value, torch.dtype):
            return widened(value, self._wide)
        if isinstance(value, Tensor):
            return value.to(widened(value.dtype, self._wide)) if is_read else value
        if isinstance(value, list | tuple):
            return type(value)(self._widened(one, is_read) for one in value)
        return value


@functools.cache
def _arguments(operation: Any) -> dict[str, bool]:
    """Return the arguments of an operation, each with whether it is read alone: not written to, nor viewed."""
    return {
        argument.name: not (operation.is_view or (argument.alias_info is not None and argument.alias_info.is_write))
        for argument in schema(operation).arguments
    }


@contextlib.contextmanager
def in_float32(model: nn.Module, wide: torch.dtype = torch.float32) -> Iterator[None]:
    """Compute a model in float32, or in float64, within the block.

    Its parameters and buffers are converted, and put back, parameters with their gradients.

    >>> layer = nn.Linear(2, 2).bfloat16()
    >>> with in_float32(layer):
    ...     layer(torch.ones(1, 2)).dtype, layer.weight.dtype
    (torch.float32, torch.float32)
    >>> layer.weight.dtype
    torch.bfloat16
    """
    held = (*nn.Module.parameters(model), *nn.Module.buffers(model))
    given = ((tensor, tensor.data, tensor.grad) for tensor in held if tensor.is_leaf)
    narrow = [(tensor, data, gradient) for tensor, data, gradient in given if widened(data.dtype, wide) != data.dtype]
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(widened(default, wide))
        for tensor, data, _ in narrow:
            tensor.grad = None
            tensor.data = data.to(widened(data.dtype, wide))
        with Widening(wide):
            yield
    finally:
        torch.set_default_dtype(default)
        for tensor, data, gradient in narrow:
            tensor.grad = None
            tensor.data = data
            tensor.grad = gradient


class InFloat32:
    """A repeat of a run in float32, on the same numbers. It takes the place of a `noise.Perturbation`."""

    far = True  # the gradients are wanted too

    def applied(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return `in_float32` of a model."""
        return in_float32(model)

    def input(self, tensor: Tensor, name: str) -> Tensor:
        """Return an input in float32."""
        return tensor.to(widened(tensor.dtype))

    def gradients(self, outputs: Iterable[Tensor]) -> None:
        """Leave the gradients as they are."""
