"""The structure of a model without computing: a forward on fake tensors, which have shapes but no contents.

Fake tensors run the model's own code, so shapes and dataflow are those of a real forward, and a model of 70 billion
parameters is recorded in seconds. Code that looks at the contents of a tensor cannot run on them. Then the record has
the structure alone, and the reason. The model must not keep fake tensors, such as a table that it caches on itself, so
its attributes are restored.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from pytest_modelprobe.capture import Capture, Options, assemble
from pytest_modelprobe.models import Layers, preserved, seeding
from pytest_modelprobe.record import Record

from .fakes import FakeModel, quiet


def architecture(model: nn.Module, /, *args: Any, **kwargs: Any) -> Record:
    """Return the structure of ``model``, and with inputs also the shapes and dataflow of a forward.

    Args:
        model: The model, on any device, even the meta device.
        *args: Inputs for a forward. Their contents do not matter. Without inputs, the record has the structure alone.
        **kwargs: Keyword inputs.

    Raises:
        UnsupportedModelError: The model is no module, or one that cannot be probed.
    """
    layers = Layers(model)
    if not (args or kwargs):
        return assemble(Capture(layers, Options()))
    # Torch's cache of fakes fails on packed weights of quantized models, which it cannot compare. Without the cache a
    # forward is slow, so it comes second.
    for cached in (True, False):
        capture = Capture(layers, Options())
        with preserved(model, values=False), seeding.forked_rng(), quiet():
            reason = _run_on_fakes(capture, model, args, kwargs, cached)
        if reason is None:
            return assemble(capture)
    record = assemble(Capture(layers, Options()))
    note = f"structure without shapes: the forward cannot run on fake tensors ({reason})"
    return dataclasses.replace(record, notes=(*record.notes, note))


def _run_on_fakes(
    capture: Capture, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], cached: bool
) -> str | None:
    """Run one watched forward on fakes of the parameters and inputs. Return the reason if that is not possible."""
    fake = FakeModel(model, cached=cached)
    with capture:
        try:
            fake(*fake.fakes_of((args, kwargs)))
        except Exception as error:  # noqa: BLE001 - models may need the contents of tensors
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None
