"""Inputs of a model, as the command line gives them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pytest_modelprobe.checks import outcome
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.probe import ModelProbe

_SPEC = re.compile(r"(?:(?P<name>[^\W\d]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<below>\d+))?")


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that a model takes: random numbers of a shape.

    >>> Input((4, 16), below=100, name="ids")
    Input(shape=(4, 16), below=100, name='ids')
    >>> str(Input((4, 16), below=100, name="ids")), str(Input((4, 3, 32, 32)))
    ('ids=4x16:100', '4x3x32x32')
    """

    shape: tuple[int, ...]
    below: int | None = None
    """Integers from 0 to ``below`` - 1; None: normally distributed numbers."""
    name: str | None = None
    """A keyword argument; None: a positional one."""

    def __str__(self) -> str:
        name, below = self.name and f"{self.name}=", self.below and f":{self.below}"
        return f"{name or ''}{'x'.join(map(str, self.shape))}{below or ''}"

    def tensor(self, probe: ModelProbe, position: int) -> Tensor:
        """Return the tensor, drawn from the seed of a probe.

        Raises:
            UsageError: There is no such tensor, as one that does not fit into memory.
        """
        name = self._drawn_as(position)
        try:
            if self.below is None:
                return probe.randn(*self.shape, **name)
            return probe.randint(0, self.below, self.shape, **name)
        except Exception as error:
            raise UsageError(f"no tensor of {self} can be made: {outcome.line_of(error)}") from error

    def code(self, position: int) -> str:
        """Return the call that draws the tensor, for a test.

        >>> Input((4, 16), below=100).code(0), Input((4, 3)).code(1)
        ('modelprobe.randint(0, 100, (4, 16))', 'modelprobe.randn(4, 3, name="input 1")')
        """
        name = "".join(f', name="{name}"' for name in self._drawn_as(position).values())
        if self.below is None:
            return f"modelprobe.randn({', '.join(map(str, self.shape))}{name})"
        return f"modelprobe.randint(0, {self.below}, {self.shape}{name})"

    def _drawn_as(self, position: int) -> dict[str, str]:
        """Return the name by which the numbers are drawn, if they need one: inputs of one shape are to differ."""
        if self.name is not None:
            return {"name": self.name}
        return {"name": f"input {position}"} if position else {}


def parse_input(text: str) -> Input:
    """Return the input of ``[NAME=]SHAPE[:BELOW]``.

    >>> parse_input("8x3x32x32"), parse_input("ids=8x16:1000")
    (Input(shape=(8, 3, 32, 32), below=None, name=None), Input(shape=(8, 16), below=1000, name='ids'))

    Raises:
        UsageError: It is none.
    """
    found = _SPEC.fullmatch(text)
    if found is None or found["below"] == "0":
        raise UsageError(
            f"{text!r} is no input: write a shape such as 8x3x32x32; 8x16:1000 for integers below 1000; ids=8x16:1000 "
            "for a keyword argument"
        )
    shape = tuple(map(int, found["shape"].split("x")))
    return Input(shape, int(found["below"]) if found["below"] else None, found["name"])


def arguments(inputs: Sequence[Input], probe: ModelProbe) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return positional and keyword arguments."""
    tensors = [(one.name, one.tensor(probe, position)) for position, one in enumerate(inputs)]
    return tuple(x for name, x in tensors if name is None), {name: x for name, x in tensors if name is not None}


def required(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a function cannot do without.

    >>> required(lambda x, *more, scale=1: x)
    ['x']
    """
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
