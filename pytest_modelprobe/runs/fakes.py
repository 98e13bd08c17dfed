"""A model on fake tensors, which have shapes and no contents: its own code runs, and nothing is computed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from pytest_modelprobe._torch import COMPILATION_LOGGERS, GROUPED_PRODUCT, DispatchMode, FakeTensorMode
from pytest_modelprobe.capture import Capture, Options, assemble
from pytest_modelprobe.models import Layers, check_not_lazy, map_tensors, preserved, seeding
from pytest_modelprobe.record import Record


class FakeModel:
    """A model with fakes in the place of its parameters and buffers.

    A call runs the code of the model, which may keep fakes on itself: call it where its attributes are restored.

    Args:
        model: The model, on any device, even the meta device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._mode = model, FakeTensorMode(allow_non_fake_inputs=True)
        self._like_tensors = _LikeTensors()

    @functools.cached_property
    def _state(self) -> Any:
        model = self._model
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        return self.fakes_of(dict(tensors))

    def fakes_of(self, values: Any) -> Any:
        """Return nested values with fakes in the place of tensors."""
        return map_tensors(self._fake, values)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], *inner: DispatchMode) -> None:
        """Run a forward on arguments that are fakes, within other modes; it raises what the model raises."""
        state = self._state
        with contextlib.ExitStack() as stack:
            # Not interruptible, because torch aborts if a mode raises inside some operations.
            for mode in (self._mode, self._like_tensors, *inner):
                stack.enter_context(mode)
            # The state has each tied tensor under all its names, so there is nothing left to tie.
            functional_call(self._model, state, args, kwargs, tie_weights=False)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:  # it becomes a fake on the CPU, where models create masks and positions
            with self._mode:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        else:
            made = self._mode.from_tensor(tensor.detach())
        return made.requires_grad_(tensor.requires_grad)


class _LikeTensors(DispatchMode):
    """Supports what torch supports of tensors, where fake tensors differ.

    Grouped matrix products, as of mixtures of experts, are supported on the CPU in every floating dtype, but on fake
    tensors in bfloat16 alone. The indices of an embedding are integers, which fake tensors do not ask for in torch
    2.11.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == GROUPED_PRODUCT:
            return _grouped_product(*args, **(kwargs or {}))
        if func.name() == "aten::embedding" and args[1].is_floating_point():
            raise RuntimeError(f"Expected indices to have one of the scalar types Long, Int; got {args[1].dtype}")
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
def quiet() -> Iterator[None]:
    """Silence torch's logs of operations that fail on fake tensors, and of compilations. What matters is told."""
    names = ("torch.fx.experimental.symbolic_shapes", FakeTensorMode.__module__, *COMPILATION_LOGGERS)
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# --- The structure of a model without computing: a forward on fake tensors, which have shapes but no cont ------------


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
    check_not_lazy(model)
    capture, fake, reason = Capture(layers, Options()), FakeModel(model), ""
    with preserved(model, values=False), seeding.forked_rng(), quiet(), capture:
        try:
            fake(*fake.fakes_of((args, kwargs)))
        except Exception as error:  # noqa: BLE001 - models may need the contents of tensors
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if not reason:
        return assemble(capture)
    record = assemble(Capture(layers, Options()))
    note = f"structure without shapes: the forward cannot run on fake tensors ({reason})"
    return dataclasses.replace(record, notes=(*record.notes, note))
