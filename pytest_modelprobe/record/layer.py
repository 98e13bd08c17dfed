"""Layers and their parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from .calls import Call, Plain, Value
from .construction import NanEqual, quickly_made
from .naming import label_of
from .tensor_statistics import Reading


@quickly_made
@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter or buffer that a layer itself owns."""

    name: str
    """Name within the layer."""
    shape: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool = False
    tied_to: str | None = None
    """Full name of the parameter, earlier in the model, with which it shares its storage."""
    persistent: bool | None = None
    """Of a buffer: whether the ``state_dict`` has it; None: not known, as in files of before this was recorded."""
    layout: str | None = field(default=None, compare=False)
    """Which part of the parameter this rank has: ``shard(0)``, ``replicated``, ``partial``. None: all of it."""
    reading: Reading = field(default_factory=Reading)
    """Of the values: of a `run` as they were before, of a watch as they are when the record is made, or, in that of its
    first forward, as that one left them."""
    after: Reading | None = None
    """Of the values that a `run` left, where it changed them: the running statistics of a BatchNorm."""
    gradient: Reading | None = None
    """Of the gradient in each backward pass, before it is added to ``.grad``; None where none arrived."""
    applied: Reading | None = None
    """In the record of a step: of the gradient as the optimizer had it, averaged over ranks, unscaled and clipped. None
    where it had none, or where it keeps its gradients elsewhere, as ZeRO does."""
    update: Reading | None = None
    """In the record of a step: of what the optimizer added to the values, which are in `reading` as it found them. None
    where no optimizer that stepped holds it."""
    group: int | None = None
    """In the record of a step: the number of its group in `Record.optimizers`."""
    left_out: bool = False
    """In the record of a step: whether it requires a gradient, and no optimizer that stepped holds it."""


def elements(parameters: Iterable[Parameter]) -> int:
    """Return the number of elements; tied parameters count where they are first."""
    return sum(math.prod(parameter.shape) for parameter in parameters if parameter.tied_to is None)


@quickly_made
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer(NanEqual):
    """One module, or one functional call watched under ``functionals=True``."""

    name: str
    type: str
    """Qualified name of the class, or the name of the function."""
    leaf: bool = True
    """Whether it has no child whose calls are recorded."""
    functional: bool = False
    training: bool = False
    attributes: Mapping[str, Plain] = field(default_factory=dict)
    """Every int, float, bool and str set on the module, such as ``eps``, ``p`` or ``num_heads``. A public tuple or list
    of at most 16 of them is text: ``stride`` is ``"(1, 1)"``. Attributes that a forward set are left out."""
    aliases: tuple[str, ...] = ()
    """Other names of the same module."""
    parameters: tuple[Parameter, ...] = ()
    buffers: tuple[Parameter, ...] = ()
    calls: tuple[Call, ...] = ()

    @property
    def type_name(self) -> str:
        """The class's name without its module."""
        return self.type.rpartition(".")[2]

    @property
    def label(self) -> str:
        """Name of the layer in a sentence, see `label_of`."""
        return label_of(self.name, self.type_name)

    @property
    def output(self) -> Value:
        """The first output of the first call.

        Raises:
            LookupError: The layer was not called, or returned no tensor.
        """
        for _, value in self.outputs:
            return value
        raise LookupError(f"{self.label} was {'called without a tensor as output' if self.calls else 'never called'}")

    @property
    def outputs(self) -> Iterator[tuple[Call, Value]]:
        """Every output value with its call."""
        return ((call, value) for call in self.calls for value in call.outputs)

    @property
    def inputs(self) -> Iterator[tuple[Call, Value]]:
        """Every input value with its call."""
        return ((call, value) for call in self.calls for value in call.inputs)
