"""The faults of a training program: each is one change of what a call of it does.

They are mistakes that people make in the loop, and not in the model: a learning rate that is ten times too large, a
gradient that is never set to zero, labels that do not belong to their inputs. No file is edited. The program makes its
calls as before, and torch's function does something else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer


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
    """The kind of call that it changes: ``optimizer``, ``step``, ``zero_grad``, ``clip``, ``scheduler``, ``init``,
    ``loss``, ``loader``, ``mode`` or ``detach``."""
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
    """Leave the parameters of the last group out, or the second half of those of the only one."""
    call.run()
    groups = call.optimizer.param_groups
    parameters = groups[-1]["params"]
    del parameters[0 if len(groups) > 1 else (len(parameters) + 1) // 2 :]


def _has_more(call: ProgramCall) -> bool:
    groups = call.optimizer.param_groups
    return len(groups) > 1 or len(groups[0]["params"]) > 1


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


def _nothing(call: ProgramCall) -> None:
    return None


def _unclipped(call: ProgramCall) -> Any:
    """Return the norm of the gradients, as `clip_grad_norm_` does, and leave them as they are."""
    if "max_norm" not in inspect.signature(call.function).parameters:
        return None
    return call.run_with("max_norm", float("inf"))


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


def _other_reduction(call: ProgramCall) -> Any:
    return call.run_with("reduction", _OTHER_REDUCTION[call.argument("reduction")])


_OTHER_REDUCTION = {"mean": "sum", "sum": "mean", "batchmean": "sum"}


def _repeated(call: ProgramCall) -> Iterator[Any]:
    """Yield the first batch of a loader again and again, as often as there are batches."""
    first: list[Any] = []
    for batch in call.run():
        first = first or [batch]
        yield first[0]


def _has_batches(call: ProgramCall) -> bool:
    try:
        return len(call.args[0]) > 1
    except TypeError:  # Nobody knows how many batches there will be.
        return True


def _other_mode(call: ProgramCall) -> Any:
    return call.run_with("mode", not call.argument("mode"))


def _has_modes(call: ProgramCall) -> bool:
    model: nn.Module = call.args[0]
    return any("Dropout" in type(m).__name__ or getattr(m, "running_mean", None) is not None for m in model.modules())


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
            name="leave_out_parameters", noticed_by="assert_params_updated", at="optimizer", fits=_has_more,
            run=_leave_out,
        ),
        TrainingFault(
            name="step_before_backward", noticed_by=_STEP, at="step", run=_with_earlier_gradients,
            after=_with_own_gradients,
        ),
        TrainingFault(
            name="zero_grad_before_step", noticed_by="assert_params_updated", at="step", run=_without_gradients
        ),
        TrainingFault(name="drop_zero_grad", noticed_by="assert_training_loop", at="zero_grad", run=_nothing),
        TrainingFault(name="drop_clipping", noticed_by=_STEP, at="clip", run=_unclipped),
        TrainingFault(name="drop_scheduler_step", noticed_by=_STEP, at="scheduler", run=_nothing),
        TrainingFault(
            name="other_initialization", noticed_by="modelprobe_snapshot", at="init",
            fits=lambda call: call.argument("tensor").numel() > 0, run=_other_distribution,
        ),
        TrainingFault(name="shuffle_labels", noticed_by=_STEP, at="loss", fits=_has_labels, run=_shuffled),
        TrainingFault(
            name="other_reduction", noticed_by=_STEP, at="loss",
            fits=lambda call: call.argument("reduction") in _OTHER_REDUCTION, run=_other_reduction,
        ),
        TrainingFault(name="repeat_batch", noticed_by=_STEP, at="loader", fits=_has_batches, run=_repeated),
        TrainingFault(
            name="swap_mode", noticed_by="assert_training_loop", at="mode", fits=_has_modes, run=_other_mode
        ),
        TrainingFault(
            name="no_detach", noticed_by=_STEP, at="detach", fits=lambda call: call.args[0].requires_grad,
            run=lambda call: call.args[0],
        ),
    )
}  # fmt: skip
"""All faults of training programs by name, except those of `Dropout`, which are changes of a layer."""
