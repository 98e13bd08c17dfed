"""Layers and their parameters.

A layer has the parameters and buffers that its module itself owns, not those of the layers inside it. Attributes of the
module that are plain numbers or text are recorded too, so that a changed ``eps`` or ``stride`` can be named as such.
"""

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
    """Full name of an earlier parameter of the model with which it shares its storage, or `None`."""
    persistent: bool | None = None
    """Whether the ``state_dict`` has the buffer. `None` if that is not known, as in files older than this field."""
    layout: str | None = field(default=None, compare=False)
    """Which part of it this rank has: ``shard(0)``, ``replicated``, ``partial``. `None` if the rank has all of it."""
    reading: Reading = field(default_factory=Reading)
    """The values. A `run` reads them before its forward. A watch reads them when the record is made; in the record of
    its first forward they are as that forward left them."""
    after: Reading | None = None
    """The values after a `run`, if it changed them, as it does the running statistics of a BatchNorm."""
    gradient: Reading | None = None
    """The gradient in each backward pass, before it is added to ``.grad``. `None` if none arrived."""
    applied: Reading | None = None
    """In the record of a step, the gradient as the optimizer had it: averaged over ranks, unscaled and clipped. `None`
    if it had none, or if it keeps its gradients elsewhere, as ZeRO does."""
    update: Reading | None = None
    """In the record of a step, what the optimizer added to the values; `reading` has the values before it. `None` if no
    optimizer that stepped holds the parameter."""
    group: int | None = None
    """In the record of a step, the number of its group in `Record.optimizers`."""
    left_out: bool = False
    """In the record of a step, whether it requires a gradient although no optimizer that stepped holds it."""


def elements(parameters: Iterable[Parameter]) -> int:
    """Return the number of elements. Tied parameters count once, where they come first."""
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
    of at most 16 of them is text: ``stride`` is ``"(1, 1)"``. Attributes that a forward sets are left out."""
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
        """The layer's name in a sentence, see `label_of`."""
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
