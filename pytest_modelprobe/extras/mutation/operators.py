"""The faults that are planted: each is one change of one layer while its model runs, or of a call of the training.

They are mistakes that people make: a residual left out, a norm over the wrong axis, an eps that is too large. Most
leave the shapes as they are, so that the tests have to notice the numbers. An operator has to say which calls it fits,
because a fault that changes nothing would count as one that no test notices. What it changes it puts back at the end of
a forward, so that a fault exists only while the model runs. Of a training no file is edited: the program makes its
calls as before, and torch's function does something else.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer

from pytest_modelprobe.exceptions import UsageError
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
    """Whether it changes something in a layer that was called like this."""
    output: Callable[[LayerCall], Any] | None = None
    """Takes a call and returns what the layer returns instead of its output, or is `None`."""
    plant: Callable[[nn.Module], AbstractContextManager[object]] | None = None
    """Returns a block until whose end the layer is changed, or is `None`."""
    of_gradient: bool = False
    """Whether the values of the forward are the same with it."""


# --- what a layer returns ---------------------------------------------------------------------------------------------


def _of_values(
    name: str,
    noticed_by: str,
    condition: Callable[[Tensor], bool],
    change: Callable[[Tensor], Tensor | None],
    *,
    of_gradient: bool = False,
) -> Operator:
    """Return an operator that changes each floating-point output if one of them meets a condition."""

    def fits(call: LayerCall) -> bool:
        tensors = flatten("output", call.output).tensors
        return any(condition(tensor) for _, tensor in tensors if tensor.is_floating_point())

    def output(call: LayerCall) -> Any:
        return map_tensors(lambda tensor: change(tensor) if tensor.is_floating_point() else tensor, call.output)

    return Operator(name=name, noticed_by=noticed_by, fits=fits, output=output, of_gradient=of_gradient)


def _has_elements(tensor: Tensor) -> bool:
    return tensor.numel() > 0


def _exploding(tensor: Tensor) -> Tensor:
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    tensor = tensor.clone()
    tensor.register_hook(lambda gradient: gradient * 1e8)
    return tensor


def _input_of(call: LayerCall) -> Tensor | None:
    """Return the input of a call if it has the shape and dtype of the output, so that the layer could be left out."""
    given, output = next(iter(call.args), None), call.output
    if not (isinstance(given, Tensor) and isinstance(output, Tensor) and given.is_floating_point()):
        return None
    return given if (given.shape, given.dtype) == (output.shape, output.dtype) else None


def _of_input(change: Callable[[LayerCall, Tensor], Tensor]) -> Callable[[LayerCall], Any]:
    """Return a function from a call to its new output. If the input has another form, the output stays as it is."""

    def output(call: LayerCall) -> Any:
        given = _input_of(call)
        return call.output if given is None else change(call, given)

    return output


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
"""Name of the class of an activation → a different activation that people confuse it with."""


def _is_norm_of_features(call: LayerCall) -> bool:
    return "Norm" in type(call.module).__name__ and "Batch" not in type(call.module).__name__ and _over_batch(call)


def _over_batch(call: LayerCall) -> bool:
    given = _input_of(call)
    return given is not None and given.dim() > 1 and given.shape[0] > 1


def _normalized_over_batch(call: LayerCall, given: Tensor) -> Tensor:
    module = call.module
    output: Tensor = (given - given.mean(0)) / (given.var(0, correction=0) + 1e-5).sqrt()
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


def _drops(call: LayerCall) -> bool:
    return "Dropout" in type(call.module).__name__ and call.module.training and 0 < getattr(call.module, "p", 0) < 1


def _other_rate(change: Callable[[float], float]) -> Callable[[nn.Module], AbstractContextManager[object]]:
    return lambda module: _with_attribute(module, "p", change(float(cast(Any, module.p))))


def _own(module: nn.Module, name: str) -> Tensor | None:
    return module._parameters.get(name)


def _has_matrix(call: LayerCall) -> bool:
    weight = _own(call.module, "weight")
    return weight is not None and weight.dim() > 1 and min(weight.shape[-2:]) > 1


class _ShiftsMask(ChangingHook):
    """Shifts a mask by one, so that each position attends to one more position, or to a different one."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shifted = {key: _shifted(value) if "mask" in key else value for key, value in kwargs.items()}
        return args, shifted


def _shifted(mask: Any) -> Any:
    return mask.roll(1, -1) if isinstance(mask, Tensor) and mask.dim() else mask


_SNAPSHOT = "modelprobe_snapshot"

OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        _of_values("nan", "assert_finite", _has_elements, faults.nan),
        _of_values("zero", "assert_no_dead_layers", _has_elements, faults.zero),
        _of_values("scale(1.1)", _SNAPSHOT, _has_elements, faults.scale(1.1)),
        _of_values("flip_sign", _SNAPSHOT, _has_elements, faults.flip_sign),
        _of_values(
            "round_to_bfloat16", _SNAPSHOT, lambda t: t.dtype != torch.bfloat16, lambda t: t.bfloat16().to(t.dtype)
        ),
        _of_values("to_float64", "assert_dtypes", lambda t: t.dtype != torch.float64, torch.Tensor.double),
        _of_values(
            "shuffle_batch", "checks.batch_independent", lambda t: t.dim() > 1 and len(t) > 1, faults.shuffle_batch,
        ),
        _of_values("shift_sequence", _SNAPSHOT, lambda t: t.dim() == 3 and t.shape[1] > 1, faults.shift_sequence),
        _of_values(
            "roll_features", _SNAPSHOT, lambda t: t.dim() > 1 and t.shape[-1] > 1,
            lambda t: t.roll(1, -1) if t.dim() > 1 else t,
        ),
        _of_values(
            "detach", "assert_all_params_have_grad", lambda t: t.requires_grad, faults.detach, of_gradient=True
        ),
        _of_values("explode_gradient", "assert_grad_flow", lambda t: t.requires_grad, _exploding, of_gradient=True),
        Operator(
            name="leave_out", noticed_by=_SNAPSHOT,
            fits=lambda call: _input_of(call) is not None and not isinstance(call.module, nn.Identity),
            output=_of_input(lambda call, given: given.clone()),
        ),
        Operator(
            name="drop_residual", noticed_by=_SNAPSHOT,
            fits=lambda call: _input_of(call) is not None and any(True for _ in call.module.children()),
            output=_of_input(lambda call, given: call.output - given),
        ),
        Operator(
            name="other_activation", noticed_by=_SNAPSHOT,
            fits=lambda call: type(call.module).__name__ in _OTHER and _input_of(call) is not None,
            output=_of_input(lambda call, given: _OTHER[type(call.module).__name__](given)),
        ),
        Operator(
            name="normalize_over_batch", noticed_by="checks.batch_independent", fits=_is_norm_of_features,
            output=_of_input(_normalized_over_batch),
        ),
        Operator(
            name="softmax_over_batch", noticed_by="checks.batch_independent",
            fits=lambda call: isinstance(call.module, nn.Softmax) and _over_batch(call),
            plant=lambda module: _with_attribute(module, "dim", 0),
        ),
        Operator(
            name="eps_times_1000", noticed_by=_SNAPSHOT, fits=lambda call: _eps_of(call.module) is not None,
            plant=_other_eps,
        ),
        Operator(
            name="other_mode", noticed_by="checks.eval_stable", fits=lambda call: _has_mode(call.module),
            plant=lambda module: _with_attribute(module, "training", not module.training),
        ),
        Operator(name="no_dropout", noticed_by=_SNAPSHOT, fits=_drops, plant=_other_rate(lambda p: 0.0)),
        Operator(
            name="double_dropout", noticed_by=_SNAPSHOT, fits=_drops, plant=_other_rate(lambda p: min(2 * p, 0.99))
        ),
        Operator(
            name="transpose_weight", noticed_by=_SNAPSHOT, fits=_has_matrix,
            plant=lambda module: _with_parameter(module, "weight", lambda w: w.transpose(-1, -2).reshape(w.shape)),
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
        Operator(
            name="shift_mask", noticed_by="checks.causal",
            fits=lambda call: any("mask" in key and isinstance(value, Tensor) for key, value in call.kwargs.items()),
            plant=lambda module: module.register_forward_pre_hook(_ShiftsMask(module), with_kwargs=True, prepend=True),
        ),
    )
}  # fmt: skip
"""All operators by name."""


# --- faults of a training program: each is one change of what a call of it does ---------------------------------------


@dataclass
class ProgramCall:
    """A call of a training program, which has not run yet."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)
    """What the fault keeps until its next call."""

    def run(self) -> Any:
        """Do what the program asks for."""
        return self.function(*self.args, **self.kwargs)

    def argument(self, name: str) -> Any:
        """Return an argument, or its default; `None` if there is none of this name."""
        bound = inspect.signature(self.function).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound.arguments.get(name)

    def run_with(self, name: str, value: Any) -> Any:
        """Run the call with another argument."""
        bound = inspect.signature(self.function).bind(*self.args, **self.kwargs)
        bound.arguments[name] = value
        return self.function(*bound.args, **bound.kwargs)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that is made, or takes a step."""
        made: Optimizer = self.args[0]
        return made


@dataclass(frozen=True, kw_only=True)
class TrainingFault:
    """A kind of fault of a training program."""

    name: str
    noticed_by: str
    """The assertion or comparison that notices it in most programs."""
    at: str
    """The kind of call that it changes: ``optimizer``, ``step``, ``zero_grad``, ``init``, ``loss`` or ``mode``."""
    run: Callable[[ProgramCall], Any]
    """Takes the place of the call, and returns what it returns. Before a step of an optimizer, the step follows."""
    after: Callable[[ProgramCall], None] | None = None
    """Runs after a step of an optimizer."""
    fits: Callable[[ProgramCall], bool] = lambda call: True
    """Whether it changes a call. An optimizer that was made is asked after it was made."""
    of_gradient: bool = False


# --- the optimizer, when it is made -----------------------------------------------------------------------------------


def _option(name: str, change: Callable[[Any], Any]) -> Callable[[ProgramCall], None]:
    """Return what makes an optimizer with another hyperparameter in each of its groups."""

    def run(call: ProgramCall) -> None:
        call.run()
        for options in (call.optimizer.defaults, *call.optimizer.param_groups):
            if name in options:
                options[name] = change(options[name])

    return run


def _has(name: str) -> Callable[[ProgramCall], bool]:
    return lambda call: any(bool(group.get(name)) for group in call.optimizer.param_groups)


_EXCHANGED: dict[type[Optimizer], type[Optimizer]] = {Adam: SGD, AdamW: SGD, SGD: Adam}


def _exchange(call: ProgramCall) -> None:
    """Make SGD of Adam, or Adam of SGD, with the same groups, learning rates and weight decays."""
    call.run()
    made, other = call.optimizer, _EXCHANGED[type(call.optimizer)]
    taken = {"params", "lr", "weight_decay"}
    groups = [{name: group[name] for name in taken & group.keys()} for group in made.param_groups]
    # The program has bound the name of the class already, so the object itself becomes one of the other class.
    made.__class__ = other
    other.__init__(made, groups, lr=call.argument("defaults")["lr"])  # type: ignore[call-arg]


def _leave_out(call: ProgramCall) -> None:
    """Leave out the second half of the parameters of the last group."""
    call.run()
    parameters = call.optimizer.param_groups[-1]["params"]
    del parameters[(len(parameters) + 1) // 2 :]


# --- a step of an optimizer -------------------------------------------------------------------------------------------


def _parameters(call: ProgramCall) -> Iterator[Tensor]:
    for group in call.optimizer.param_groups:
        yield from group["params"]


def _with_earlier_gradients(call: ProgramCall) -> None:
    """Take the gradients of the step before, as a step that runs before the backward; the first step has none."""
    earlier = call.state.get("gradients", {})
    call.state["now"] = {id(parameter): parameter.grad for parameter in _parameters(call)}
    call.state["gradients"] = {key: None if grad is None else grad.clone() for key, grad in call.state["now"].items()}
    for parameter in _parameters(call):
        parameter.grad = earlier.get(id(parameter))


def _with_own_gradients(call: ProgramCall) -> None:
    for parameter in _parameters(call):
        parameter.grad = call.state["now"].get(id(parameter))


def _without_gradients(call: ProgramCall) -> None:
    # What follows the step finds no gradient either, as after `zero_grad` at this place.
    for parameter in _parameters(call):
        parameter.grad = None


# --- other calls ------------------------------------------------------------------------------------------------------


def _other_distribution(call: ProgramCall) -> Tensor:
    tensor: Tensor = call.argument("tensor")
    with torch.no_grad():
        is_normal = call.function.__name__ in ("normal_", "trunc_normal_")
        return tensor.uniform_(-1.0, 1.0) if is_normal else tensor.normal_(0.0, 1.0)


def _shuffled(call: ProgramCall) -> Any:
    target: Tensor = call.argument("target")
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(0))
    return call.run_with("target", target[order.to(target.device)])


def _has_labels(call: ProgramCall) -> bool:
    target = call.argument("target")
    return isinstance(target, Tensor) and target.dim() > 0 and len(target) > 1


_OTHER_REDUCTION = {"mean": "sum", "sum": "mean", "batchmean": "sum"}


def _has_mode(module: nn.Module) -> bool:
    return "Dropout" in type(module).__name__ or getattr(module, "running_mean", None) is not None


_STEP = "modelprobe_snapshot of a step"

TRAINING: dict[str, TrainingFault] = {
    fault.name: fault
    for fault in (
        TrainingFault(
            name="lr_times_10", noticed_by=_STEP, at="optimizer", fits=_has("lr"), run=_option("lr", lambda lr: lr * 10)
        ),
        TrainingFault(
            name="lr_by_10", noticed_by=_STEP, at="optimizer", fits=_has("lr"), run=_option("lr", lambda lr: lr / 10)
        ),
        TrainingFault(
            name="lr_zero", noticed_by="assert_params_updated", at="optimizer", fits=_has("lr"),
            run=_option("lr", lambda lr: lr * 0),
        ),
        TrainingFault(
            name="other_optimizer", noticed_by=_STEP, at="optimizer",
            fits=lambda call: type(call.optimizer) in _EXCHANGED, run=_exchange,
        ),
        TrainingFault(
            name="no_weight_decay", noticed_by=_STEP, at="optimizer", fits=_has("weight_decay"),
            run=_option("weight_decay", lambda decay: decay * 0),
        ),
        TrainingFault(
            name="weight_decay_times_10", noticed_by=_STEP, at="optimizer", fits=_has("weight_decay"),
            run=_option("weight_decay", lambda decay: decay * 10),
        ),
        TrainingFault(
            name="leave_out_parameters", noticed_by="assert_params_updated", at="optimizer", run=_leave_out,
            fits=lambda call: len(call.optimizer.param_groups[-1]["params"]) > 1,
        ),
        TrainingFault(
            name="step_before_backward", noticed_by=_STEP, at="step", run=_with_earlier_gradients,
            after=_with_own_gradients,
        ),
        TrainingFault(
            name="zero_grad_before_step", noticed_by="assert_params_updated", at="step", run=_without_gradients
        ),
        TrainingFault(name="drop_zero_grad", noticed_by="assert_training_loop", at="zero_grad", run=lambda call: None),
        TrainingFault(
            name="other_initialization", noticed_by="modelprobe_snapshot", at="init",
            fits=lambda call: call.argument("tensor").numel() > 0, run=_other_distribution,
        ),
        TrainingFault(name="shuffle_labels", noticed_by=_STEP, at="loss", fits=_has_labels, run=_shuffled),
        TrainingFault(
            name="other_reduction", noticed_by=_STEP, at="loss",
            fits=lambda call: call.argument("reduction") in _OTHER_REDUCTION,
            run=lambda call: call.run_with("reduction", _OTHER_REDUCTION[call.argument("reduction")]),
        ),
        TrainingFault(
            name="swap_mode", noticed_by="assert_training_loop", at="mode",
            fits=lambda call: any(map(_has_mode, call.args[0].modules())),
            run=lambda call: call.run_with("mode", not call.argument("mode")),
        ),
    )
}  # fmt: skip
"""All faults of training programs by name, except those of `Dropout`, which are changes of a layer."""


# --- all faults by name -----------------------------------------------------------------------------------------------

FAULTS: dict[str, Operator | TrainingFault] = {**OPERATORS, **TRAINING}
"""All faults by name: those of layers, then those of training programs."""

_DROPOUT = ("no_dropout", "double_dropout")
"""Faults of training that are changes of a layer."""

GROUPS: dict[str, tuple[str, ...]] = {
    "layers": tuple(name for name in OPERATORS if name not in _DROPOUT),
    "training": (*TRAINING, *_DROPOUT),
}
"""Name of a group → the names of its faults."""


def selected(text: str) -> frozenset[str]:
    """Return the names of the faults that a text chooses: names, globs and groups, with commas between them.

    Args:
        text: ``"training"``, ``"layers"``, ``"nan,lr_*"``.

    Raises:
        UsageError: No fault has such a name.

    >>> sorted(selected("nan,lr_*"))
    ['lr_by_10', 'lr_times_10', 'lr_zero', 'nan']
    """
    found: set[str] = set()
    for part in filter(None, map(str.strip, text.split(","))):
        names = GROUPS.get(part) or [name for name in FAULTS if fnmatchcase(name, part)]
        if not names:
            near = difflib.get_close_matches(part, [*GROUPS, *FAULTS], 1)
            said = f"; did you mean {near[0]}?" if near else ": 'layers', 'training', or names of faults, with commas"
            raise UsageError(f"no planted fault is named {part!r}{said}")
        found.update(names)
    if not found:
        raise UsageError("no planted fault is named: 'layers', 'training', or names of faults, with commas")
    return frozenset(found)
