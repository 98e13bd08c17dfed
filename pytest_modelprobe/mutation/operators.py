"""The faults that are planted: each is one change of one layer while its model runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pytest_modelprobe.interventions import faults
from pytest_modelprobe.models import ChangingHook, flatten, map_tensors


class LayerCall(NamedTuple):
    """A call of a layer that has returned."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A kind of fault. It changes what a layer returns, or the layer while its model runs."""

    name: str
    noticed_by: str
    """The assertion, check or comparison that notices it in most layers."""
    fits: Callable[[LayerCall], bool]
    """Whether it makes another layer of one that was called so."""
    output: Callable[[LayerCall], Any] | None = None
    """Returns what the layer returns instead."""
    plant: Callable[[nn.Module], AbstractContextManager[object]] | None = None
    """Changes the layer until the end of the block."""
    of_gradient: bool = False
    """Whether the values of the forward are the same with it."""


# --- what a layer returns ---------------------------------------------------------------------------------------------


def _floating(call: LayerCall) -> list[Tensor]:
    return [tensor for _, tensor in flatten("output", call.output).tensors if tensor.is_floating_point()]


def _of_each(change: Callable[[Tensor], Tensor | None]) -> Callable[[LayerCall], Any]:
    def output(call: LayerCall) -> Any:
        return map_tensors(lambda tensor: change(tensor) if tensor.is_floating_point() else tensor, call.output)

    return output


def _any(condition: Callable[[Tensor], bool]) -> Callable[[LayerCall], bool]:
    return lambda call: any(map(condition, _floating(call)))


def _exploding(tensor: Tensor) -> Tensor:
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    tensor = tensor.clone()
    tensor.register_hook(lambda gradient: gradient * 1e8)
    return tensor


def _input_of(call: LayerCall) -> Tensor | None:
    """Return the input of a layer that could be left out: it has the shape and dtype of the output."""
    given, output = next(iter(call.args), None), call.output
    if not (isinstance(given, Tensor) and isinstance(output, Tensor) and given.is_floating_point()):
        return None
    return given if (given.shape, given.dtype) == (output.shape, output.dtype) else None


def _may_be_left_out(call: LayerCall) -> bool:
    return _input_of(call) is not None and not isinstance(call.module, nn.Identity)


def _left_out(call: LayerCall) -> Any:
    given = _input_of(call)
    return call.output if given is None else given.clone()


def _is_block(call: LayerCall) -> bool:
    return _input_of(call) is not None and any(True for _ in call.module.children())


def _without_residual(call: LayerCall) -> Any:
    given = _input_of(call)
    return call.output if given is None else call.output - given


_OTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "ReLU": functional.gelu,
    "GELU": lambda tensor: functional.gelu(tensor, approximate="tanh"),
    "NewGELUActivation": functional.gelu,
    "GELUActivation": lambda tensor: functional.gelu(tensor, approximate="tanh"),
    "SiLU": functional.gelu,
    "SiLUActivation": functional.gelu,
    "Tanh": functional.hardtanh,
    "Sigmoid": functional.hardsigmoid,
    "LeakyReLU": functional.relu,
    "ELU": functional.relu,
    "Mish": functional.silu,
    "Hardswish": functional.silu,
    "Softplus": functional.relu,
}
"""Name of the class of an activation → another one that is taken for it."""


def _other_activation(call: LayerCall) -> Any:
    given = _input_of(call)
    return call.output if given is None else _OTHER[type(call.module).__name__](given)


def _is_norm_of_features(call: LayerCall) -> bool:
    return "Norm" in type(call.module).__name__ and "Batch" not in type(call.module).__name__ and _over_batch(call)


def _over_batch(call: LayerCall) -> bool:
    given = _input_of(call)
    return given is not None and given.dim() > 1 and given.shape[0] > 1


def _normalized_over_batch(call: LayerCall) -> Any:
    given, module = _input_of(call), call.module
    if given is None:
        return call.output
    output = (given - given.mean(0)) / (given.var(0, correction=0) + 1e-5).sqrt()
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    output = output if weight is None or isinstance(module, nn.GroupNorm) else output * weight
    return output if bias is None or isinstance(module, nn.GroupNorm) else output + bias


# --- the layer while its model runs -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _with_attribute(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextlib.contextmanager
def _with_parameter(module: nn.Module, name: str, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    # As `torch.func.functional_call`: gradients still reach the parameter, which is not written to.
    before: Any = module._parameters[name]
    changed: Any = change(before)
    module._parameters[name] = changed
    try:
        yield
    finally:
        if module._parameters.get(name) is changed:
            module._parameters[name] = before


_EPS = ("eps", "variance_epsilon", "layer_norm_eps")


def _eps_of(module: nn.Module) -> str | None:
    if "Norm" not in type(module).__name__:
        return None
    return next((name for name in _EPS if isinstance(getattr(module, name, None), float)), None)


def _other_eps(module: nn.Module) -> AbstractContextManager[object]:
    name = _eps_of(module)
    return contextlib.nullcontext() if name is None else _with_attribute(module, name, getattr(module, name) * 1000)


def _has_modes(call: LayerCall) -> bool:
    return "Dropout" in type(call.module).__name__ or getattr(call.module, "running_mean", None) is not None


def _own(module: nn.Module, name: str) -> Tensor | None:
    return module._parameters.get(name)


def _has_matrix(call: LayerCall) -> bool:
    weight = _own(call.module, "weight")
    return weight is not None and weight.dim() > 1 and min(weight.shape[-2:]) > 1


def _transposed(weight: Tensor) -> Tensor:
    return weight.transpose(-1, -2).reshape(weight.shape)


class _ShiftsMask(ChangingHook):
    """Lets each position attend to one more, or one other."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shifted = {key: _shifted(value) if "mask" in key else value for key, value in kwargs.items()}
        return args, shifted


def _shifted(mask: Any) -> Any:
    return mask.roll(1, -1) if isinstance(mask, Tensor) and mask.dim() else mask


def _has_mask(call: LayerCall) -> bool:
    return any("mask" in key and isinstance(value, Tensor) for key, value in call.kwargs.items())


@contextlib.contextmanager
def _with_mask_shifted(module: nn.Module) -> Iterator[None]:
    hook = module.register_forward_pre_hook(_ShiftsMask(module), with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def _with_stale_buffers(module: nn.Module) -> Iterator[None]:
    # It updates copies: writing its buffers back would move the versions that autograd saved.
    before = dict(module._buffers)
    module._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in before.items()})
    try:
        yield
    finally:
        module._buffers.update(before)


def _softmax_dim(module: nn.Module) -> AbstractContextManager[object]:
    return _with_attribute(module, "dim", 0)


_SNAPSHOT = "modelprobe_snapshot"

OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        Operator(
            name="nan", noticed_by="assert_finite", fits=_any(lambda t: t.numel() > 0),
            output=_of_each(faults.nan),
        ),
        Operator(
            name="zero", noticed_by="assert_no_dead_layers", fits=_any(lambda t: t.numel() > 0),
            output=_of_each(faults.zero),
        ),
        Operator(
            name="scale(1.1)", noticed_by=_SNAPSHOT, fits=_any(lambda t: t.numel() > 0),
            output=_of_each(faults.scale(1.1)),
        ),
        Operator(
            name="flip_sign", noticed_by=_SNAPSHOT, fits=_any(lambda t: t.numel() > 0),
            output=_of_each(faults.flip_sign),
        ),
        Operator(
            name="round_to_bfloat16", noticed_by=_SNAPSHOT, fits=_any(lambda t: t.dtype != torch.bfloat16),
            output=_of_each(lambda tensor: tensor.to(torch.bfloat16).to(tensor.dtype)),
        ),
        Operator(
            name="to_float64", noticed_by="assert_dtypes", fits=_any(lambda t: t.dtype != torch.float64),
            output=_of_each(torch.Tensor.double),
        ),
        Operator(
            name="shuffle_batch", noticed_by="checks.batch_independent",
            fits=_any(lambda t: t.dim() > 1 and len(t) > 1), output=_of_each(faults.shuffle_batch),
        ),
        Operator(
            name="shift_sequence", noticed_by=_SNAPSHOT, fits=_any(lambda t: t.dim() == 3 and t.shape[1] > 1),
            output=_of_each(faults.shift_sequence),
        ),
        Operator(
            name="roll_features", noticed_by=_SNAPSHOT, fits=_any(lambda t: t.dim() > 1 and t.shape[-1] > 1),
            output=_of_each(lambda tensor: tensor.roll(1, -1) if tensor.dim() > 1 else tensor),
        ),
        Operator(
            name="detach", noticed_by="assert_all_params_have_grad", fits=_any(lambda t: t.requires_grad),
            output=_of_each(faults.detach), of_gradient=True,
        ),
        Operator(
            name="explode_gradient", noticed_by="assert_grad_flow", fits=_any(lambda t: t.requires_grad),
            output=_of_each(_exploding), of_gradient=True,
        ),
        Operator(name="leave_out", noticed_by=_SNAPSHOT, fits=_may_be_left_out, output=_left_out),
        Operator(name="drop_residual", noticed_by=_SNAPSHOT, fits=_is_block, output=_without_residual),
        Operator(
            name="other_activation", noticed_by=_SNAPSHOT,
            fits=lambda call: type(call.module).__name__ in _OTHER and _input_of(call) is not None,
            output=_other_activation,
        ),
        Operator(
            name="normalize_over_batch", noticed_by="checks.batch_independent", fits=_is_norm_of_features,
            output=_normalized_over_batch,
        ),
        Operator(
            name="softmax_over_batch", noticed_by="checks.batch_independent",
            fits=lambda call: isinstance(call.module, nn.Softmax) and _over_batch(call), plant=_softmax_dim,
        ),
        Operator(
            name="eps_times_1000", noticed_by=_SNAPSHOT, fits=lambda call: _eps_of(call.module) is not None,
            plant=_other_eps,
        ),
        Operator(
            name="other_mode", noticed_by="checks.eval_stable", fits=_has_modes,
            plant=lambda module: _with_attribute(module, "training", not module.training),
        ),
        Operator(
            name="stale_buffers", noticed_by=_SNAPSHOT,
            fits=lambda call: call.module.training and any(True for _ in call.module.named_buffers(recurse=False)),
            plant=_with_stale_buffers,
        ),
        Operator(
            name="transpose_weight", noticed_by=_SNAPSHOT, fits=_has_matrix,
            plant=lambda module: _with_parameter(module, "weight", _transposed),
        ),
        Operator(
            name="drop_bias", noticed_by=_SNAPSHOT, fits=lambda call: _own(call.module, "bias") is not None,
            plant=lambda module: _with_parameter(module, "bias", lambda bias: bias * 0),
        ),
        Operator(
            name="freeze_weight", noticed_by="assert_all_params_have_grad",
            fits=lambda call: getattr(_own(call.module, "weight"), "requires_grad", False), of_gradient=True,
            plant=lambda module: _with_parameter(module, "weight", torch.Tensor.detach),
        ),
        Operator(name="shift_mask", noticed_by="checks.causal", fits=_has_mask, plant=_with_mask_shifted),
    )
}  # fmt: skip
"""All operators by name."""
