"""The structure of a model without computing: a forward on fake tensors, which have shapes but no contents.

Fake tensors run the model's own code, so shapes and dataflow are those of a real forward, and a model of 70 billion
parameters is recorded in seconds. Code that looks at the contents of a tensor cannot run on them. Then the record has
the structure alone, and the reason. The model must not keep fake tensors, such as a table that it caches on itself, so
its attributes are restored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from pytest_modelprobe._torch import GROUPED_PRODUCT, FakeTensorMode, TorchDispatchMode
from pytest_modelprobe.capture import Capture, Options, assemble
from pytest_modelprobe.models import Layers, map_tensors, preserved, seeding
from pytest_modelprobe.record import Record


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
        return assemble(Capture(layers, Options()).observations())
    # Torch's cache of fakes fails on packed weights of quantized models, which it cannot compare. Without the cache a
    # forward is slow, so it comes second.
    for cached in (True, False):
        capture = Capture(layers, Options())
        with preserved(model, values=False), seeding.forked_rng(), _quiet():
            reason = _run_on_fakes(capture, model, args, kwargs, cached)
        if reason is None:
            return assemble(capture.observations())
    record = assemble(Capture(layers, Options()).observations())
    note = f"structure without shapes: the forward cannot run on fake tensors ({reason})"
    return dataclasses.replace(record, notes=(*record.notes, note))


def _run_on_fakes(
    capture: Capture, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], cached: bool
) -> str | None:
    """Run one watched forward on fakes of the parameters and inputs. Return the reason if that is not possible."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = mode.cache_enabled and cached
    products = _GroupedProducts()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:  # it becomes a fake on the CPU, where models create masks and positions
            with mode:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        else:
            made = mode.from_tensor(tensor.detach())
        return made.requires_grad_(tensor.requires_grad)

    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    with capture:
        try:
            state, args, kwargs = map_tensors(fake, (dict(tensors), args, kwargs))
            with mode, products:  # not interruptible, because torch aborts if a mode raises inside some operations
                # The state has each tied tensor under all its names, so there is nothing left to tie.
                functional_call(model, state, args, kwargs, tie_weights=False)
        except Exception as error:  # noqa: BLE001 - models may need the contents of tensors
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


class _GroupedProducts(TorchDispatchMode):  # type: ignore[misc]
    """Supports grouped matrix products, as of mixtures of experts, in every dtype.

    Torch supports them on the CPU in every floating dtype, but on fake tensors in bfloat16 alone.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == GROUPED_PRODUCT:
            return _grouped_product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _grouped_product(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return an empty product, which has an axis of groups if both or neither of the inputs have one."""
    shape: tuple[int, ...] = (a.shape[-2], b.shape[-1])
    if a.dim() == b.dim():
        shape = (len(a) if offs is None else len(offs), *shape)
    return a.new_empty(shape, dtype=out_dtype)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's log of operations that fake tensors do not support. The record has a note of it."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
