"""`intervene`: change the inputs, outputs, gradients or weights of layers within a block.

A test plants a fault to see that another test would notice it, or asks what a model does without a part. The code of
the model stays as it is. Hooks make the changes and are taken off at the end of the block, and weights get the bits
back that they had. An intervention that never took effect is an error, because its test would prove nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from pytest_modelprobe._torch import graph_task
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.interrupts import finished, held
from pytest_modelprobe.models import (
    ChangingHook,
    Layers,
    flatten,
    flatten_call,
    map_tensors,
    own_parameters,
    parts,
    run_eagerly,
)
from pytest_modelprobe.record import ROOT, Selector, label_of, select
from pytest_modelprobe.text import count

__tracebackhide__ = True  # of all functions here: an error is told at the line of the user's own code

Change: TypeAlias = Callable[[Tensor], Tensor | None]
"""A function from a tensor to the one that replaces it. For a gradient it may return `None`, which is no gradient."""

What = Literal["input", "output", "gradient", "weight"]


def intervene(
    model: nn.Module,
    layers: Selector,
    *,
    input: Change | None = None,  # noqa: A002 - torch's name for it
    output: Change | None = None,
    gradient: Change | None = None,
    weight: Change | None = None,
    calls: Collection[int] | None = None,
) -> Intervention:
    """Return a context within which layers of the model compute something else.

    Each function is given one tensor and returns the one that replaces it. It must not write to the given one. From an
    input or output, it is given each floating-point tensor, or each tensor if none is floating. A watch sees what the
    next layer sees, whichever of them began first. Several changes of a layer apply in the order in which their blocks
    began, and gradients pass them in the reverse order.

    An intervention that was never used is an error at the end of the block, unless an exception ends it.

    Args:
        model: The model.
        layers: Which of its layers, see the documentation of ``layers=``.
        input: Changes what the layer is called with, but not tensors inside objects such as a cache.
        output: Changes what the layer returns.
        gradient: Changes the gradient of the output, as it arrives from the layers after it.
        weight: Changes the parameters of the layer itself, except biases, at the beginning of the block. At the end
            they get the bits back that they had, even if an optimizer stepped meanwhile. A weight that is used in
            several places changes in all of them.
        calls: Which calls of the layer in a forward of the model to change, from 0. By default all are changed. A call
            outside of a forward of the model is call 0.

    Raises:
        SelectionError: ``layers`` matches nothing.
        UsageError: There is nothing to change, or nothing was changed by the end of the block.

    >>> from pytest_modelprobe import faults
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with intervene(model, "1", output=faults.stuck(7)) as intervention:
    ...     model(torch.ones(1, 2)).tolist()
    [[7.0, 7.0, 7.0]]
    >>> intervention.fired
    1
    """
    given: dict[What, Change | None] = {"input": input, "output": output, "gradient": gradient, "weight": weight}
    return Intervention(model, layers, {what: change for what, change in given.items() if change is not None}, calls)


class Intervention:
    """Changes of layers within a ``with`` block, made by `intervene`."""

    def __init__(
        self,
        model: nn.Module,
        layers: Selector,
        changes: Mapping[What, Change],
        calls: Collection[int] | None = None,
    ) -> None:
        if not changes:
            raise UsageError("nothing to change: give input=, output=, gradient= or weight=")
        if calls is not None and "weight" in changes:
            raise UsageError("weight= changes weights for the whole block: leave out calls=")
        self._changes = dict(changes)
        self._layers = Layers(model)
        self._root = next(iter(self._layers.modules.values()))
        self._names = select(self._layers.modules, layers)
        self._only = None if calls is None else frozenset(calls)
        self._exit = contextlib.ExitStack()
        self._active = False
        self._begin()

    def _begin(self) -> None:
        self._fired = 0
        self._forwards = 0
        self._inside = 0
        self._counts = Counter[str]()  # calls of each layer in this forward
        self._most = Counter[str]()  # the most calls of each layer in any forward
        self._running: dict[str, list[int]] = defaultdict(list)

    @property
    def fired(self) -> int:
        """How often something was changed: calls of layers, gradients that arrived, forwards with changed weights."""
        return self._fired

    def __enter__(self) -> Intervention:
        if self._active:
            raise UsageError(f"{self._described()} has begun and not ended: call intervene again for another block")
        self._begin()
        try:
            with held():
                self._put_on()
            return self
        except BaseException:
            self.close()
            raise

    def _put_on(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(run_eagerly(self._layers))
            if "weight" in self._changes:
                self._change_weights(stack)
            for name in self._names:
                module = self._layers.modules[name]
                begins_call = CallHook(module, functools.partial(self._begin_call, name))
                _add(stack, module.register_forward_pre_hook, begins_call, with_kwargs=True)
                _add(stack, module.register_forward_hook, CallHook(module, functools.partial(self._end_call, name)))
            # Prepended last, so that it runs first: if the root is changed too, its forward begins before its call.
            begins, ends = CallHook(self._root, self._begin_forward), CallHook(self._root, self._end_forward)
            stack.callback(self._root.register_forward_pre_hook(begins, prepend=True).remove)
            stack.callback(self._root.register_forward_hook(ends, prepend=True, always_call=True).remove)
            self._exit = stack.pop_all()
        self._active = True

    @finished
    def close(self) -> None:
        """Remove the hooks and restore the weights. Safe to repeat."""
        self._active = False
        self._exit.close()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        self.close()
        if value is None and not self._fired:
            raise UsageError(self._never())

    def __repr__(self) -> str:
        return f"<Intervention on {self._described()}: fired {count(self._fired, 'time')}>"

    def _change_weights(self, stack: contextlib.ExitStack) -> None:
        """Write into each weight, once where it is used in several places, and on exit the bits that it had before.

        They are written in place, because a parameter may be tied, or an optimizer may hold it.
        """
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for layer in self._names:
            prefix = "" if layer == ROOT else f"{layer}."
            for key, weight in own_parameters(self._layers.modules[layer], atomic=self._layers.is_leaf(layer)):
                if "bias" not in key.rpartition(".")[2]:
                    found.setdefault(id(weight), (prefix + key, weight))
        if not found:
            raise UsageError(
                f"{self._described().partition(':')[0]} has no weight of its own: select layers that have one"
            )
        for name, weight in found.values():
            with torch.no_grad():
                before = weight.detach().clone()
                after = self._tensor("weight", name, before.clone())
            if after.shape != before.shape:
                shapes = f"{tuple(after.shape)}, not {tuple(before.shape)}"
                raise UsageError(f"{name} became a tensor of another shape: {shapes}")
            stack.callback(_write, weight, before)
            _write(weight, after)

    # --- what the hooks call ----------------------------------------------------------------------------------------

    def _begin_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Count calls from 0 again if no forward is running. A recomputation in a backward pass is not a forward."""
        if graph_task() != -1:
            return
        if not self._inside:
            self._forwards += 1
            self._counts.clear()
            self._running.clear()
            self._use_weights()
        self._inside += 1

    def _end_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """End the innermost forward."""
        if graph_task() == -1:
            self._inside = max(0, self._inside - 1)  # a block that began inside a forward sees only its end

    def _begin_call(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with which to call the layer, or `None` if they stay as they are."""
        call = self._number(name)
        self._running[name].append(call)
        if not self._inside and graph_task() == -1:
            self._use_weights()
        if self._only is not None and call not in self._only:
            return None
        self._note(module)
        if "input" not in self._changes:
            return None
        # A cache must stay the same object, because the layer writes to it. So only tensors and containers are opened.
        opened = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) or parts(value) is not None]
        changed = self._values("input", name, opened, flatten_call((opened,), {}).tensors)
        new = {id(value): by for value, by in zip(opened, changed, strict=True)}
        return tuple(new.get(id(arg), arg) for arg in args), {key: new.get(id(arg), arg) for key, arg in kwargs.items()}

    def _end_call(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return what the layer returns instead of ``output``."""
        call = self._running[name].pop() if self._running[name] else 0
        if self._only is not None and call not in self._only:
            return output
        if "output" in self._changes:
            output = self._values("output", name, output, flatten("output", output).tensors)
        if "gradient" in self._changes:
            output = map_tensors(lambda tensor: self._with_gradient(name, tensor), output)
        return output

    def _note(self, module: nn.Module) -> None:
        """Add a note to the records of all watches on a layer and on the model, which now are of a changed model."""
        for one in (module, self._root):
            for hook in one._forward_pre_hooks.values():
                if getattr(hook, "is_modelprobe", False) and hasattr(hook, "note"):
                    hook.note(f"intervention on {self._described()}")

    # --- calls ------------------------------------------------------------------------------------------------------

    def _number(self, name: str) -> int:
        """Return the number of the call that begins, from 0."""
        call = self._counts[name]
        # In a backward pass, activation checkpointing calls layers again. Its order may be the reverse one.
        if graph_task() != -1:
            if call > 1 and self._only is not None:
                raise UsageError(
                    f"{name} is called {call} times in a forward, and again in the backward for activation "
                    "checkpointing, where its calls cannot be told apart: leave out calls=, or checkpointing"
                )
            return 0
        self._counts[name] += self._inside > 0
        self._most[name] = max(self._most[name], call + 1)
        return call

    def _use_weights(self) -> None:
        if "weight" in self._changes:
            self._fired += 1
            self._note(self._root)

    # --- changing ---------------------------------------------------------------------------------------------------

    def _values(self, what: What, name: str, value: Any, tensors: list[tuple[str, Tensor]]) -> Any:
        floating = {id(tensor) for _, tensor in tensors if tensor.is_floating_point() or tensor.is_complex()}
        given = floating or {id(tensor) for _, tensor in tensors}
        self._fired += bool(given)
        return map_tensors(lambda t: self._tensor(what, name, t) if id(t) in given else t, value)

    def _tensor(self, what: What, name: str, tensor: Tensor) -> Tensor:
        changed = self._changes[what](tensor)
        if not isinstance(changed, Tensor):
            raise UsageError(f"{name}: {what}= returned {type(changed).__name__}: return the tensor to use instead")
        return changed

    def _with_gradient(self, name: str, tensor: Tensor) -> Tensor:
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        through: Any = _Through.apply
        return cast(Tensor, through(tensor, lambda gradient: self._gradient(name, gradient)))

    def _gradient(self, name: str, gradient: Tensor) -> Tensor | None:
        self._fired += 1
        changed = self._changes["gradient"](gradient)
        if changed is not None and (not isinstance(changed, Tensor) or changed.shape != gradient.shape):
            got = f"shape {tuple(changed.shape)}" if isinstance(changed, Tensor) else type(changed).__name__
            raise UsageError(f"{name}: gradient= returned {got} for a gradient of shape {tuple(gradient.shape)}")
        return changed

    # --- messages ---------------------------------------------------------------------------------------------------

    def _described(self) -> str:
        name, *more = self._names
        where = label_of(name, type(self._layers.modules[name]).__name__) + (f" and {len(more):,} more" if more else "")
        changes = (f"{what}={getattr(change, '__name__', None) or change!r}" for what, change in self._changes.items())
        return f"{where}: {', '.join(changes)}"

    def _never(self) -> str:
        most = max(self._most.values(), default=0)
        if not self._forwards and not most:
            why = "no forward ran in the block: call the model inside it"
        elif not most:
            why = f"not called in {count(self._forwards, 'forward')}: record.table() has the layers that are"
        elif self._only is not None and not any(call < most for call in self._only):
            why = f"a forward calls it {count(most, 'time')}, from 0, and calls= is {sorted(self._only)}"
        elif list(self._changes) == ["gradient"]:
            why = "no backward reached its output: call loss.backward() inside the block"
        else:
            why = "there is no tensor in what was to be changed"
        return f"{self._described()} never fired: {why}"


def _write(weight: Tensor, values: Tensor) -> None:
    # In place, so that the version counter moves: autograd then refuses a backward through values that are gone.
    with torch.inference_mode(weight.is_inference()), torch.no_grad():
        weight.copy_(values)


# --- hooks --------------------------------------------------------------------------------------------------------


class CallHook(ChangingHook):
    """A hook on one module. On another module, where it gets if somebody copies a table of hooks, it does nothing."""

    __slots__ = ("_does",)

    def __init__(self, module: nn.Module, does: Callable[..., Any]) -> None:
        super().__init__(module)
        self._does = does

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        """Do what it does with what torch hands to a hook."""
        return self._does(module, *given) if self._module() is module else None


def _add(stack: contextlib.ExitStack, register: Callable[..., Any], hook: CallHook, **options: Any) -> None:
    """Put a hook before all others of its module, but behind those of interventions that began earlier.

    So a watch sees the changed values whether it began before or after, and several changes apply in order.
    """
    handle = register(hook, prepend=True, **options)
    stack.callback(handle.remove)
    hooks: OrderedDict[int, Any] = handle.hooks_dict_ref()
    earlier = [key for key, other in hooks.items() if key != handle.id and isinstance(other, CallHook)]
    for key in reversed(earlier):
        hooks.move_to_end(key, last=False)


class _Through(torch.autograd.Function):
    """A copy of a tensor whose gradient a function changes. It is no view, because the next layer may write to it."""

    @staticmethod
    def forward(tensor: Tensor, change: Callable[[Tensor], Tensor | None]) -> Tensor:
        return tensor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.change = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        return ctx.change(gradients[0]), None


def forward(model: nn.Module, inputs: Any) -> Any:
    """Return the output of the model for an input, a tuple of positional arguments, or a dict of keyword arguments."""
    inputs = map_tensors(lambda tensor: tensor.clone(), inputs)  # a model may write to its input
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)
