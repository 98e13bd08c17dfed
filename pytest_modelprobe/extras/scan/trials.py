"""A forward on fake tensors that may fail: how far it got, and which layers were given what was made of which input."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelprobe._torch import DispatchMode, FakeTensorMode
from pytest_modelprobe.models import own_parameters, preserved, seeding
from pytest_modelprobe.runs import FakeModel, quiet

Sources = frozenset[str | int]
"""Inputs of a model: names of keyword arguments, positions of others."""


@dataclass(frozen=True, slots=True)
class Given:
    """A call of a layer: what it was given."""

    layer: nn.Module
    shape: tuple[int, ...]
    """Of its first tensor."""
    sources: Sources
    """The inputs of the model of which the tensor is made."""


@dataclass(slots=True)
class Trial:
    """What a forward on fakes reached."""

    calls: list[Given] = dataclasses.field(default_factory=list)
    """The calls of layers with parameters, in order."""
    running: list[Given] = dataclasses.field(default_factory=list)
    """Those that had not returned when the error was raised, the innermost last."""
    operations: int = 0
    elements: int = 0
    """Of the results of all operations, which is about what a forward keeps for the backward."""
    sources: Sources = frozenset()
    """The inputs of the model that the operation used which raised the error; empty if other code did."""
    error: BaseException | None = None
    """None: the model runs."""

    @property
    def is_undecided(self) -> bool:
        """Whether it failed because fakes have no contents or the model moves its parameters: it may run on tensors."""
        modules = FakeTensorMode.__module__, "torch.fx.experimental.symbolic_shapes"
        return type(self.error).__module__ in modules or "Couldn't swap" in str(self.error)


class Trials:
    """Forwards of one model on fakes. Each leaves the model as it was.

    >>> trials = Trials(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)))
    >>> trials.run({0: torch.empty(4, 3, 4, device="meta")}).error is None
    True
    >>> trial = trials.run({0: torch.empty(4, 3, 5, device="meta")})
    >>> trial.running[-1].layer, trial.running[-1].shape, sorted(trial.sources)
    (Linear(in_features=12, out_features=2, bias=True), (4, 15), [0])
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._fake = FakeModel(model)
        self._layers = [m for m in model.modules() if any(own_parameters(m, atomic=False))]

    def run(self, inputs: Mapping[str | int, Tensor]) -> Trial:
        """Run a forward on fakes of the inputs, which may be on the meta device."""
        trial = Trial()
        fakes: dict[str | int, Any] = self._fake.fakes_of(dict(inputs))
        for key, fake in fakes.items():
            fake.made_of = frozenset({key})
        args = tuple(fakes[key] for key in sorted(key for key in fakes if isinstance(key, int)))
        kwargs = {key: fake for key, fake in fakes.items() if isinstance(key, str)}
        with preserved(self._model, values=False), seeding.forked_rng(), quiet(), torch.no_grad(), self._seen(trial):
            try:
                self._fake(args, kwargs, _Sources(trial))
            except Exception as error:  # noqa: BLE001 - whatever a model raises on inputs that do not fit
                trial.error = error
        return trial

    @contextlib.contextmanager
    def _seen(self, trial: Trial) -> Iterator[None]:
        def before(layer: nn.Module, args: Any, kwargs: Any) -> None:
            tensor = next(iter(_tensors((args, kwargs))), None)
            shape = () if tensor is None else tuple(tensor.shape)
            given = Given(layer, shape, frozenset() if tensor is None else _made_of([tensor]))
            trial.calls.append(given)
            trial.running.append(given)

        def after(layer: nn.Module, args: Any, output: Any) -> None:
            trial.running.pop()

        with contextlib.ExitStack() as stack:
            for layer in self._layers:
                stack.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(layer.register_forward_hook(after).remove)
            yield


class _Sources(DispatchMode):
    """Tells each result of an operation of which inputs of the model it is made."""

    supports_higher_order_operators = True

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self._trial = trial

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._trial.operations += 1
        self._trial.sources = sources = _made_of(_tensors((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        self._trial.sources = frozenset()
        for tensor in _tensors(result):
            self._trial.elements += 0 if func.is_view else tensor.numel()
            tensor.made_of = sources | _made_of([tensor])  # type: ignore[attr-defined]
        return result


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _tensors(value)


def _made_of(tensors: Iterable[Tensor]) -> Sources:
    return frozenset().union(*(getattr(tensor, "made_of", frozenset()) for tensor in tensors))
