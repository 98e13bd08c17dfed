"""Call each layer alone on synthetic tensors, so that its output depends only on its own forward code.

In a run of the whole model, a change shows in every layer behind it. So only the first change on a path can be found
there, and what lies below cannot be judged. A layer that is called alone answers for its own code, however many changed
at once.

The model runs once. Of each call, the structure and shapes of inputs and output and a coarse *recipe* of their numbers
are noted, but no tensor. Then each call is repeated by itself: with synthetic inputs and weights, while the calls that
it makes return synthetic outputs. The arguments that its code passes to those calls, and its output, are its *isolated
response*.

What a layer computes in half precision is computed in float32, on the same numbers in any dtype: see `runs.noise`.
Simple layers of torch take fewer samples than in the run: see `isolation.samples`.

A synthetic tensor depends on its recipe, its shape and its role in the call: ``input``, the output of the second call
of the child ``attn``, the name of the parameter. It depends neither on the name of the layer, nor on the order of its
calls, nor on real numbers. So the responses of two models are equal where their code is, whatever their weights are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn

from pytest_modelprobe.interrupts import interruptible
from pytest_modelprobe.models import Layers, ModelState, preserved, run_eagerly, seeding, settings_preserved
from pytest_modelprobe.progress import progress
from pytest_modelprobe.record import ROUNDING_OF_RESPONSES, IsolatedResponse, Reading
from pytest_modelprobe.runs.noise import ROUNDING, is_noise_bounded, known_changes, noise_of_product, relative_change

from .calls import CallObserver, IsolationOptions, Key, Part, Perturb, Session, Within, in_float64, is_replaced
from .contexts import PRODUCTS, StateBefore, is_known, without_hooks
from .recipes import Draws, as_mask, fits, kind_of, synthetic
from .samples import take_fewer_samples
from .tracing import CannotTellError, TracedCall, Tracer, reason_of

__all__ = [
    "CallObserver", "CannotTellError", "IsolationOptions", "Key", "Perturb", "TracedCalls", "Within", "as_mask",
    "doubtful", "fits", "in_float64", "kind_of", "noisy", "reason_of", "synthetic", "traced", "with_known_noise",
]  # fmt: skip

_ALL_LAYERS = IsolationOptions()


@contextlib.contextmanager
def traced(
    model: nn.Module, forward: Callable[[], object], options: IsolationOptions = _ALL_LAYERS, *, repeats: bool = False
) -> Iterator[TracedCalls]:
    """Run a model once, and yield the calls of its layers, to be made alone within the block.

    Of equal calls of a layer, only the first is there. All of them take as long as a few forwards. The random states
    are restored. The caller restores the model, and what else ``forward`` changes.

    Args:
        model: The model, in the mode to compare.
        forward: Runs the model once.
        options: Which layers are called, and on what.
        repeats: Whether all are made more than once.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> with traced(model, lambda: model(torch.ones(2, 4)), repeats=True) as alone:
    ...     responses = alone()
    ...     responses == alone()
    True
    >>> sorted(responses)
    [('(root)', 0), ('0', 0), ('1', 0)]
    >>> [(handed.where, handed.passed) for handed in responses["(root)", 0].handed]
    [('0 input', 'input'), ('1 input', '0 output'), ('output', '1 output')]
    >>> nn.init.zeros_(model[0].weight).sum().item()
    0.0
    >>> like = IsolationOptions(recipes={key: response.recipes for key, response in responses.items()})
    >>> with traced(model, lambda: model(torch.ones(2, 4)), like) as alone:
    ...     alone() == responses
    True
    """
    found = Layers(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(seeding.forked_rng())
        stack.enter_context(without_hooks(model.modules(), lambda hook: getattr(hook, "is_modelprobe", False)))
        stack.enter_context(run_eagerly(found))
        tracer = stack.enter_context(Tracer(found, options.layers, options.only))
        before = StateBefore(model)
        with torch.set_grad_enabled(options.gradient), interruptible():
            forward()
        calls = [call for call in tracer.finish() if call.alone]
        before.restore()
        for call in calls:
            key = call.layer, call.index
            take_fewer_samples(call, options.recipes.get(key, {}), options.shapes.get(key, {}))
        own = itertools.chain.from_iterable(nn.Module.parameters(module) for module in {call.module for call in calls})
        replaced = filter(is_replaced, own)
        state = stack.enter_context(preserved(model, unwritten=replaced)) if repeats else None
        stack.enter_context(warnings.catch_warnings(action="ignore"))  # which synthetic numbers cause
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(options.gradient))
        yield TracedCalls(calls, functools.partial(Session, found, tracer, options, before, Draws(), {}), state)


@dataclasses.dataclass(eq=False)
class TracedCalls:
    """The calls of a model, each of which can be repeated alone; see `traced`."""

    _calls: Sequence[TracedCall]
    _session: Callable[[Sequence[TracedCall], Perturb | None, Part, bool], Session]
    _state: ModelState | None
    _shares: bool = True

    def __call__(
        self, perturb: Perturb | None = None, of: Part = "all", only: Container[Key] | None = None
    ) -> dict[Key, IsolatedResponse]:
        """Return the response of each call to synthetic tensors.

        Args:
            perturb: Takes the numbers of a synthetic tensor, its name, and how many products with it are added up for
                an output. It may write to the numbers. It returns them perturbed, to measure the noise of a response.
                It is not applied to masks, integers and the like.
            of: What is read of the responses: ``"outputs"`` leaves out the gradient, and ``"gradients"`` the readings
                of what is handed on. The rest is the same bit for bit.
            only: The calls. By default all are made.
        """
        wanted = [call for call in self._calls if only is None or (call.layer, call.index) in only]
        if not wanted:
            return {}
        responses, written = _responses(self._session(wanted, perturb, of, self._shares))
        if written:  # layers that are alike saw it
            self._shares = False
            responses, _ = _responses(self._session(wanted, perturb, of, False))
        if self._state is not None:
            self._state.restore()  # so that the next repeat does not find what these calls left behind
        return responses

    def repeated(
        self, known: Mapping[Key, IsolatedResponse], moves: Iterable[Perturb], of: Part
    ) -> list[dict[Key, IsolatedResponse]]:
        """Return some responses with as many of some perturbations as it takes to bound the noise of each."""
        taken: list[dict[Key, IsolatedResponse]] = []

        def is_bounded(key: Key, response: IsolatedResponse) -> bool:
            parts = {k: one for k, one in _readings(response).items() if one and bool(k) == (of == "outputs")}
            return is_noise_bounded(parts, [_readings(repeat[key]) for repeat in taken if key in repeat])

        for perturb in moves:
            only = {key for key, one in known.items() if not is_bounded(key, one)}
            taken.append(self(perturb, of, only))
        return taken


def _responses(session: Session) -> tuple[dict[Key, IsolatedResponse], bool]:
    """Return the responses of the calls of a session, and whether one wrote to weights that layers share."""
    found: dict[Key, IsolatedResponse] = {}
    with settings_preserved(), session, progress("isolated call", len(session.calls)) as shown:
        for call in shown(session.calls):
            with interruptible():
                found[call.layer, call.index] = session.response(call)
        return found, session.has_written()


_DOUBTFUL = 1e-4
"""The change of a response from which on it is no rounding of float32."""


def doubtful(responses: Mapping[Key, IsolatedResponse], expected: Mapping[Key, IsolatedResponse]) -> set[str]:
    """Return the layers whose response differs by as little as the rounding of float32 may."""

    def differs(key: Key, response: IsolatedResponse) -> bool:
        then = _readings(expected[key]) if key in expected else {}
        changes = [relative_change(x, then.get(where)) for where, x in _readings(response).items() if x is not None]
        return 0 < max(filter(None, changes), default=0.0) < _DOUBTFUL

    return {key[0] for key, response in responses.items() if differs(key, response)}


_FEW = 32
"""Outputs of which the norm may be close to zero by chance."""


def with_known_noise(response: IsolatedResponse, layer: nn.Module) -> IsolatedResponse | None:
    """Return the response of a layer with its noise, or `None` if that has to be measured.

    It is known of a layer that adds up products with its weight, unless it has so few outputs that they may cancel, and
    of one that chooses among numbers, and of a container that computes nothing: they hand on what they get, or numbers
    of a weight. The backward of any other layer may compute although its forward does not.
    """
    known = is_known(layer, layer.forward) and all(map(is_replaced, layer.parameters()))
    sizes = [h.reading.statistics.count for h in response.handed if h.reading and h.reading.statistics]
    noise: tuple[float, float] | None = None
    if known and type(layer) in PRODUCTS:
        noise = noise_of_product(layer) if min(sizes, default=0) >= _FEW else None
    elif known or (not sizes and layer._modules):
        noise = ROUNDING, ROUNDING
    if noise is None:
        return None
    readings = _readings(response).items()
    return _with_readings(
        response, {where: one and dataclasses.replace(one, noise=noise[where == ""]) for where, one in readings}
    )


def noisy(
    responses: Mapping[Key, IsolatedResponse],
    repeats: Sequence[Mapping[Key, IsolatedResponse]],
    exact: Mapping[Key, IsolatedResponse] = MappingProxyType({}),
) -> dict[Key, IsolatedResponse]:
    """Return the responses with the noise of each reading: its largest relative change in any of the repeats.

    What ``exact`` has in float64 counts up to `ROUNDING_OF_RESPONSES`.

    >>> model = nn.Linear(4, 4)
    >>> with traced(model, lambda: model(torch.ones(2, 4)), repeats=True) as alone:
    ...     (response,) = noisy(alone(), [alone(lambda tensor, name, terms: tensor * 1.001)]).values()
    >>> 0.001 < response.handed[0].reading.noise < 0.01
    True
    """
    found = {}
    for key, response in responses.items():
        now, precise = (_readings(one) if one else {} for one in (response, exact.get(key)))
        others = [_readings(repeat[key]) for repeat in repeats if key in repeat]
        measured = dict(now)
        for where, reading in now.items():
            changes = known_changes(reading, (other.get(where) for other in others)) if reading else []
            if reading and (other := precise.get(where)):
                changes.append(min(relative_change(reading, other) or 0.0, ROUNDING_OF_RESPONSES))
            if reading and changes:
                measured[where] = dataclasses.replace(reading, noise=max(changes))
        found[key] = _with_readings(response, measured)
    return found


def _readings(response: IsolatedResponse) -> dict[str, Reading | None]:
    """Return what a response emits, by place, and its gradient, by an empty name."""
    return {**{handed.where: handed.reading for handed in response.handed}, "": response.gradient}


def _with_readings(response: IsolatedResponse, readings: Mapping[str, Reading | None]) -> IsolatedResponse:
    """Return a response with other `_readings`."""
    handed = tuple(dataclasses.replace(h, reading=readings[h.where]) for h in response.handed)
    return dataclasses.replace(response, handed=handed, gradient=readings[""])
