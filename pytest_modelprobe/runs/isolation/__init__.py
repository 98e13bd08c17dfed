"""Call each layer alone on synthetic tensors, so that its output depends only on its own forward code.

In a run of the whole model, a change shows in every layer behind it. So only the first change on a path can be found
there, and what lies below cannot be judged. A layer that is called alone answers for its own code, however many changed
at once.

The model runs once. Of each call, the structure and shapes of inputs and output and a coarse *recipe* of their numbers
are noted, but no tensor. Then each call is repeated by itself: with synthetic inputs and weights, while the calls that
it makes return synthetic outputs. The arguments that its code passes to those calls, and its output, are its *isolated
response*.

What a layer computes in half precision is computed in float32, on the same numbers in any dtype: see `runs.widening`.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn

from pytest_modelprobe.interrupts import interruptible
from pytest_modelprobe.models import Layers, preserved, run_eagerly, seeding, settings_preserved
from pytest_modelprobe.progress import progress
from pytest_modelprobe.record import ROUNDING_OF_RESPONSES, IsolatedResponse, Reading
from pytest_modelprobe.runs.noise import ROUNDING, is_bounded, known_changes, noise_of_product, relative_change

from .calls import CallObserver, IsolationOptions, Key, Part, Perturb, Repeat, Session, Within, in_float64, is_replaced
from .contexts import StateBefore, is_product, without_hooks
from .recipes import Draws, as_mask, fits, kind_of, synthetic
from .tracing import CannotTellError, TracedCall, Tracer, reason_of

__all__ = [
    "CallObserver", "CannotTellError", "IsolationOptions", "Key", "Perturb", "Repeat", "Within", "as_mask", "doubtful",
    "fits", "in_float64", "isolate", "isolate_repeatedly", "kind_of", "noisy", "reason_of", "synthetic",
    "with_known_noise",
]  # fmt: skip

_ALL_LAYERS = IsolationOptions()


def isolate(
    model: nn.Module,
    forward: Callable[[], object],
    options: IsolationOptions = _ALL_LAYERS,
    *,
    perturb: Perturb | None = None,
) -> dict[Key, IsolatedResponse]:
    """Return the response of each called layer to synthetic tensors. Of equal calls of a layer, only the first is made.

    It takes as long as a few forwards. The model and the random states are restored bit for bit. The caller restores
    what else ``forward`` changes.

    Args:
        model: The model, in the mode to compare.
        forward: Runs the model once.
        options: Which layers are called, and on what.
        perturb: Takes the numbers of a synthetic tensor, its name, and how many products with it are added up for an
            output. It may write to the numbers. It returns them perturbed, to measure the noise of a response. It is
            not applied to masks, integers and the like.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> responses = isolate(model, lambda: model(torch.ones(2, 4)))
    >>> sorted(responses)
    [('(root)', 0), ('0', 0), ('1', 0)]
    >>> [(handed.where, handed.passed) for handed in responses["(root)", 0].handed]
    [('0 input', 'input'), ('1 input', '0 output'), ('output', '1 output')]
    >>> nn.init.zeros_(model[0].weight).sum().item()
    0.0
    >>> isolate(
    ...     model,
    ...     lambda: model(torch.ones(2, 4)),
    ...     IsolationOptions(recipes={k: r.recipes for k, r in responses.items()}),
    ... ) == responses
    True
    """
    with preserved(model):
        (responses,) = isolate_repeatedly(model, forward, [(perturb, "all")], options)
    return responses


def isolate_repeatedly(
    model: nn.Module,
    forward: Callable[[], object],
    repeats: Sequence[Repeat],
    options: IsolationOptions = _ALL_LAYERS,
    each: Callable[[Sequence[Repeat]], Iterable[Repeat]] = iter,
    known: Mapping[Key, IsolatedResponse] = MappingProxyType({}),
) -> list[dict[Key, IsolatedResponse]]:
    """Return what `isolate` returns for each of some perturbations. The model runs once for all of them.

    Args:
        model: The model, in the mode to compare. The caller restores it.
        forward: Runs the model once.
        repeats: Perturbations, as in `isolate`, each with what is read of the responses: ``"outputs"`` leaves out the
            gradient, and ``"gradients"`` the readings of what is handed on. The rest is the same bit for bit.
        options: Which layers are called, and on what.
        each: Takes the repeats and yields them, to show progress.
        known: Unperturbed responses. A call that has one is left out of repeats that would tell nothing more of its
            noise.

    >>> model = nn.Linear(4, 4)
    >>> first, second = isolate_repeatedly(model, lambda: model(torch.ones(2, 4)), [(None, "all"), (None, "outputs")])
    >>> first == second == isolate(model, lambda: model(torch.ones(2, 4)))
    True
    """
    found = Layers(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(seeding.forked_rng())
        stack.enter_context(without_hooks(model.modules(), lambda hook: getattr(hook, "is_modelprobe", False)))
        stack.enter_context(run_eagerly(found))
        traced = stack.enter_context(Tracer(found, options.layers, options.only))
        before = StateBefore(model)
        with torch.set_grad_enabled(options.gradient), interruptible():
            forward()
        calls = [call for call in traced.finish() if call.alone]
        before.restore()
        # A single repeat is followed by no other, and the caller restores the model.
        own = itertools.chain.from_iterable(nn.Module.parameters(module) for module in {call.module for call in calls})
        replaced = filter(is_replaced, own)
        state = stack.enter_context(preserved(model, unwritten=replaced)) if len(repeats) > 1 else None
        stack.enter_context(warnings.catch_warnings(action="ignore"))  # which synthetic numbers cause
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(options.gradient))
        draws, shares = Draws(), True
        taken: list[dict[Key, IsolatedResponse]] = []
        for perturb, of in each(repeats):
            like = [one for (_, part), one in zip(repeats, taken, strict=False) if part == of]
            wanted = [call for call in calls if not _is_bounded((call.layer, call.index), known, like, of)]
            if not wanted:
                taken.append({})
                continue
            session = functools.partial(Session, found, traced, calls, options, before, perturb, of, draws)
            responses, written = _responses(session(shares), wanted)
            if written:  # layers that are alike saw it
                shares = False
                responses, _ = _responses(session(shares), wanted)
            taken.append(responses)
            if state is not None:
                state.restore()  # so that the next repeat does not find what these calls left behind
        return taken


def _responses(session: Session, wanted: Sequence[TracedCall]) -> tuple[dict[Key, IsolatedResponse], bool]:
    """Return the responses of some calls, and whether one of them wrote to weights that layers share."""
    found: dict[Key, IsolatedResponse] = {}
    with settings_preserved(), session, progress("isolated call", len(wanted)) as shown:
        for call in shown(wanted):
            with interruptible():
                found[call.layer, call.index] = session.response(call)
        return found, session.has_written()


def _is_bounded(
    key: Key, known: Mapping[Key, IsolatedResponse], repeats: Sequence[Mapping[Key, IsolatedResponse]], of: Part
) -> bool:
    """Whether repeats that read the same part of a response bound its noise."""
    again = [_readings(repeat[key]) for repeat in repeats if key in repeat]
    if key not in known or not repeats:
        return False
    for where, reading in _readings(known[key]).items():
        if reading is not None and bool(where) == (of == "outputs"):
            changes = known_changes(reading, (one.get(where) for one in again))
            if not is_bounded(changes or [0.0], digest=reading.digest):
                return False
    return True


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
    of an embedding and a container that compute nothing: they hand on what they get, or rows of a weight. The backward
    of any other layer may compute although its forward does not.
    """
    product = is_product(layer, layer.forward) and is_replaced(layer.weight)
    sizes = [h.reading.statistics.count for h in response.handed if h.reading and h.reading.statistics]
    noise: tuple[float, float] | None = None
    if product and type(layer) is not nn.Embedding:
        noise = noise_of_product(layer) if min(sizes, default=0) >= _FEW else None
    elif product or (not sizes and layer._modules):
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
    >>> def respond(perturb=None):
    ...     return isolate(model, lambda: model(torch.ones(2, 4)), perturb=perturb)
    >>> (response,) = noisy(respond(), [respond(lambda tensor, name, terms: tensor * 1.001)]).values()
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
