"""Each layer called alone, on synthetic tensors: what its own code does, whatever the layers around it do.

The model runs once, and of each call is noted what went in and out: structure, shapes and a coarse *recipe* of the
numbers, no tensor. Then each call runs again by itself. Its inputs and its weights are synthetic; the calls that it
makes are answered by synthetic outputs. What its code hands to those calls, and what it returns, is its response.

A synthetic tensor depends on its recipe, its shape and its place in the call: ``input``, the output of the second call
of the child ``attn``, the parameter's own name. It depends neither on the name of the layer itself, nor on the order of
its calls, nor on real numbers. So two models respond alike where their code is alike, whatever their weights are.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from pytest_modelprobe.capture import run_eagerly
from pytest_modelprobe.models import Layers, preserved, seeding
from pytest_modelprobe.record import IsolatedResponse, Reading
from pytest_modelprobe.runs.noise import change

from .alone import Key, Perturb, Session
from .contexts import is_ours, quietly, without_hooks
from .forwards import Again, Forwards, merged, recipes_of
from .recipes import fits, kind_of, synthetic
from .tracing import Tracer

__all__ = [
    "Again", "Forwards", "Key", "Perturb", "fits", "isolate", "kind_of", "merged", "noisy", "recipes_of", "synthetic",
]  # fmt: skip


def isolate(
    model: nn.Module,
    forward: Callable[[], object],
    *,
    layers: Collection[str] | None = None,
    only: Collection[str] | None = None,
    recipes: Mapping[Key, Mapping[str, str]] | None = None,
    names: Mapping[str, str] | None = None,
    gradient: bool = False,
    perturb: Perturb | None = None,
) -> dict[Key, IsolatedResponse]:
    """Return how each called layer responds to synthetic tensors; of a layer called again alike, the first call only.

    It costs a few forwards. The model is left as it was, bit for bit, and so are the random states; whoever calls puts
    back what ``forward`` does elsewhere.

    Args:
        model: The model, in the mode in which it is to be judged.
        forward: Runs it once.
        layers: Names of those to call; None: all.
        only: Names of some of these, to leave the others out; their responses are the same as with the others.
        recipes: How synthetic tensors were made for other responses, `IsolatedResponse.recipes`: they are made alike
            where shape and dtype allow it.
        names: Names of layers → those that they had when these recipes were made, where they are others.
        gradient: Whether to run backward through each call too.
        perturb: Takes a synthetic tensor and its name, returns it a little moved; to see how much of a response is
            rounding. Masks, integers and the like are left alone.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> responses = isolate(model, lambda: model(torch.ones(2, 4)))
    >>> sorted(responses)
    [('(root)', 0), ('0', 0), ('1', 0)]
    >>> [(handed.where, handed.passed) for handed in responses["(root)", 0].handed]
    [('0 input', 'input'), ('1 input', '0 output'), ('output', '1 output')]
    >>> nn.init.zeros_(model[0].weight).sum().item()
    0.0
    >>> isolate(
    ...     model, lambda: model(torch.ones(2, 4)), recipes={k: r.recipes for k, r in responses.items()}
    ... ) == responses
    True
    """
    found = Layers(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserved(model))
        stack.enter_context(seeding.forked_rng())
        stack.enter_context(without_hooks(model.modules(), is_ours))
        stack.enter_context(run_eagerly(found))
        notes = stack.enter_context(Tracer(found, layers, only))
        with torch.set_grad_enabled(gradient):
            forward()
        calls = [call for call in notes.finish() if call.alone]
        stack.enter_context(quietly(gradient))
        session = stack.enter_context(
            Session(found, notes, recipes or {}, calls, names=names or {}, gradient=gradient, perturb=perturb)
        )
        return {(call.layer, call.index): session.response(call) for call in calls}


def noisy(
    responses: Mapping[Key, IsolatedResponse], repeats: Sequence[Mapping[Key, IsolatedResponse]]
) -> dict[Key, IsolatedResponse]:
    """Return the responses with the noise of each reading: the most that it moved in any of the repeats.

    >>> model = nn.Linear(4, 4)
    >>> def respond(perturb=None):
    ...     return isolate(model, lambda: model(torch.ones(2, 4)), perturb=perturb)
    >>> (response,) = noisy(respond(), [respond(lambda tensor, name: tensor * 1.001)]).values()
    >>> 0.001 < response.handed[0].reading.noise < 0.01
    True
    """
    return {key: _with_noise(response, [repeat.get(key) for repeat in repeats]) for key, response in responses.items()}


_OF_A_UNIT = 1 / 32
"""What a response in half precision moves by on its own, of what it does where each input moves by a unit: what it is
given is the same to the last bit, and kernels sum in float32 and round once, which hardly ever falls otherwise."""


def _is_narrow(recipe: str) -> bool:
    return recipe.partition(" ")[0].endswith(("float16", "float8"))


def _with_noise(response: IsolatedResponse, repeats: Sequence[IsolatedResponse | None]) -> IsolatedResponse:
    others = [{} if r is None else {h.where: h.reading for h in r.handed} for r in repeats]
    share = _OF_A_UNIT if any(map(_is_narrow, response.recipes.values())) else 1.0

    def measured(reading: Reading | None, again: Iterable[Reading | None], share: float = 1.0) -> Reading | None:
        known = [c for c in (change(reading, other) for other in again) if c is not None] if reading else []
        return dataclasses.replace(reading, noise=share * max(known)) if reading and known else reading

    handed = (
        dataclasses.replace(h, reading=measured(h.reading, [o.get(h.where) for o in others], share))
        for h in response.handed
    )
    gradient = measured(response.gradient, [None if r is None else r.gradient for r in repeats])
    return dataclasses.replace(response, handed=tuple(handed), gradient=gradient)
