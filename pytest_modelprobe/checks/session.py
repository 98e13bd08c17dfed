"""Run a model several times in variations, and record what every layer returns.

A check compares tensors of one run with those of another, so a trace keeps copies of all that layers return, unlike a
record. The model is restored after each run; within the block of a prepared model it stays on the device of the probe.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from pytest_modelprobe._torch import converted, is_wrapped, without_dispatch_modes
from pytest_modelprobe.exceptions import ModelProbeError, UsageError
from pytest_modelprobe.models import (
    CallTracer,
    Layers,
    ModelState,
    ModuleCall,
    active_autocast,
    detached_copy,
    flatten,
    flatten_call,
    has_dense_storage,
    lacks_memory,
    map_tensors,
    raised_in_hook,
    run_eagerly,
    seeding,
    settings_preserved,
    unseen,
    version,
    wake_zeros,
)
from pytest_modelprobe.probe import ModelProbe
from pytest_modelprobe.record import ROOT, address, label_of
from pytest_modelprobe.runs import (
    NARROW,
    Loss,
    Mode,
    NoGradientError,
    check_loss,
    graph_nodes,
    in_float32,
    loss_of,
    widened,
)

from .outcome import NotApplicableError, line_of
from .rounding import limit, plain, relative_error

ROUNDED = 0.1
"""The largest relative error up to which half precision is taken for float32 that is rounded."""

Vary: TypeAlias = Callable[[str, Tensor], Tensor]
ReferenceCheck: TypeAlias = "Callable[[PreparedModel, Trace, Mapping[str, Any]], None]"


@dataclass(frozen=True, slots=True, eq=False)
class LayerTensor:
    """A tensor that a layer returned, or that its own code computed for a layer inside it."""

    layer: str
    index: int
    """Which of the layer's calls, from 0."""
    path: str
    tensor: Tensor
    """A copy, see `plain`: the layers after it may write into the original."""
    inside: bool = False
    """Whether it is an argument of a layer inside, computed by the own code of the layer."""

    @property
    def where(self) -> str:
        """Its address, as messages say it: ``fc1 (call 2) output``."""
        return address(self.layer, self, self.path)

    @property
    def is_final(self) -> bool:
        """Whether the model itself gave it out."""
        return self.layer == ROOT and not self.inside


@dataclass(slots=True, eq=False)
class Trace:
    """What was recorded of one run."""

    tensors: list[LayerTensor] = field(default_factory=list)
    """In the order of computation: outputs of a layer follow those of the layers inside it."""
    output: Any = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    """Gradients of the parameters that require one, by full name; None where none arrived. Empty without a backward."""
    input_gradients: dict[str, Tensor | None] = field(default_factory=dict)
    """Gradients of the floating inputs, by path."""
    largest_gradient: float = 0.0
    """The largest norm of a gradient that arrived at an operation, from the loss back."""
    loss: Tensor | None = None
    error: Exception | None = None
    raised_in: str = ""
    """The innermost layer that was running when the model raised."""
    in_backward: bool = False
    """Whether it was the backward that raised."""

    @property
    def outputs(self) -> list[LayerTensor]:
        """The outputs of layers, without arguments that own code computed."""
        return [given for given in self.tensors if not given.inside]

    @property
    def final(self) -> dict[str, Tensor]:
        """The output tensors of the model, by path."""
        return {path: plain(tensor.detach()) for path, tensor in flatten("output", self.output).tensors}

    @property
    def arrived(self) -> list[Tensor]:
        """The gradients of the parameters that got one."""
        return [gradient for gradient in self.gradients.values() if gradient is not None]

    @property
    def failure(self) -> str:
        """The exception of the model or its backward, in one line."""
        return f"{'its backward' if self.in_backward else label_of(self.raised_in)} raised {line_of(self.error)}"


class PreparedModel:
    """A session of a model and its inputs: it is made ready for a check, runs varied any number of times, is put back.

    Parameters, buffers, gradients, modes, attributes, random states and settings of the process are restored after each
    run and at the end of a block of `ready`. One session serves any number of checks, one after the other. What does
    not change between them is asked once: see `is_rounded`.

    An exception of the model or its backward is stored in the trace of the run. Any other obstacle raises
    `NotApplicableError`.

    A `runs.Run` records one run in numbers, in the contexts and with the weights of the user, and can be repeated
    later. This class keeps the tensors of many runs on changed inputs, copies and dtypes of a model that stays
    prepared. Both use `models.ModelState`, `models.map_tensors` and `runs.loss_of`.

    Args:
        probe: Gives the device and the seed.
        model: The model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        loss: A function of the output. By default, and as ``"random"``, it is a fixed random projection of all floating
            outputs.
    """

    def __init__(
        self,
        probe: ModelProbe,
        model: nn.Module,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        loss: Loss | None = None,
    ) -> None:
        self.layers = Layers(model)
        check_loss(loss)
        self.probe, self.model = probe, model
        self.args, self.kwargs = args, dict(kwargs or {})
        self.name = type(next(iter(self.layers.modules.values()))).__name__
        self.numbers: dict[str, None] = {}
        """Paths of outputs that are numbers of Python, which no check compares."""
        self.reached: set[str] = set()
        """Parameters that got a gradient in a run so far, in whichever check."""
        self._loss: Loss = "random" if loss is None else loss
        self._check_reference: ReferenceCheck | None = None
        self._wide = False
        self._state: ModelState | None = None
        self._keep_changes = False
        self._graph = False

    @property
    def inputs(self) -> list[tuple[str, Tensor]]:
        """The tensors among the arguments, with their paths."""
        return flatten_call(self.args, self.kwargs, objects=True).tensors

    @property
    def dense(self) -> list[tuple[str, Tensor]]:
        """The inputs whose axes can be sliced: neither sparse nor nested nor packed."""
        given = (*self.args, *self.kwargs.values())
        packed = {id(x) for value in given if isinstance(value, nn.utils.rnn.PackedSequence) for x in value}
        dense = [(path, x) for path, x in self.inputs if x.layout is torch.strided and not x.is_nested]
        return [(path, x) for path, x in dense if id(x) not in packed]

    def argument(self, path: str) -> str:
        """Return the parameter of the forward that takes the input at a path; the path itself if it is not known.

        >>> x, mask = torch.ones(2, 3), torch.zeros(2, 3)
        >>> prepared = PreparedModel(ModelProbe(), nn.MultiheadAttention(3, 1), (x, x, x, mask))
        >>> prepared.argument("input[3]"), prepared.argument("attn_mask")
        ('key_padding_mask', 'attn_mask')
        """
        paths = ["input"] if len(self.args) == 1 else [f"input[{i}]" for i in range(len(self.args))]
        return dict(zip(paths, self.parameters, strict=False)).get(path, path)

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the model's forward."""
        return inspect.signature(self.layers.modules[ROOT].forward).parameters

    @functools.cached_property
    def is_rounded(self) -> bool:
        """Whether the model, an input or autocast is in half precision, and float32 differs from that by rounding.

        A model may have code for half precision alone, and fail, or compute something else, in float32.
        """
        tensors = (*nn.Module.parameters(self.model), *nn.Module.buffers(self.model), *(x for _, x in self.inputs))
        dtypes = [*(tensor.dtype for tensor in tensors), *(dtype for _, dtype, _ in active_autocast())]
        if NARROW.isdisjoint(dtypes):
            return False
        try:
            native = self.run(mode="eval")
            with self._in_float32():
                wide = self.run(mode="eval")
        except NotApplicableError:
            return False
        alike = native.error is None and wide.error is None and native.final.keys() == wide.final.keys()
        return alike and all(relative_error(x, wide.final[path]) <= ROUNDED for path, x in native.final.items())

    @property
    def has_loss(self) -> bool:
        """Whether the user gave a loss function."""
        return callable(self._loss)

    @contextmanager
    def ready(
        self, check_reference: ReferenceCheck | None = None, *, unmodified: bool = False, native: bool = False
    ) -> Iterator[PreparedModel]:
        """Make the model ready for several runs on the device of the probe, and put everything back after the block.

        Within the block, compiled code runs eagerly. Weights that are all zero, as those of heads and gates may be at
        first, have small random values: zeros would hide an error in the layers before them. A model in half
        precision, also by autocast, is computed in float32, as rounding says nothing of what it computes, unless
        float32 differs from it by more: see `is_rounded`.

        Args:
            check_reference: Takes the prepared model, a trace and the options of its run; raises `NotApplicableError`
                if other runs cannot be compared with it.
            unmodified: Whether zeros stay zero.
            native: Whether half precision stays what it is, but within `in_float32`.
        """
        self._check_weights()
        given = self.args, self.kwargs
        self.kwargs, self.numbers, self._check_reference = dict(self.kwargs), {}, check_reference
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(ModelState(self.model))
            stack.enter_context(seeding.forked_rng())
            stack.enter_context(run_eagerly(self.layers))
            stack.enter_context(torch.enable_grad())
            for parameter in nn.Module.parameters(self.model):
                parameter.grad = None
            try:
                self.model.to(self.probe.device)
            except Exception as error:
                raise NotApplicableError(
                    f"the model cannot be moved to {self.probe.device}: {line_of(error)}"
                ) from error
            if not unmodified:
                wake_zeros(self.layers, self.probe.seed)
            self._state = ModelState(self.model, generators=False)  # else no run would show that they matter
            if not native:
                stack.enter_context(self.in_float32())
            try:
                yield self
            finally:
                self.args, self.kwargs = given
                self._state = None

    def _check_weights(self) -> None:
        tensors = (*nn.Module.parameters(self.model), *nn.Module.buffers(self.model))
        if any(t.is_meta for t in tensors):
            raise NotApplicableError("the model is on the meta device and has no numbers")
        if any(x.is_meta for _, x in self.inputs):
            raise NotApplicableError("an input is on the meta device and has no numbers")
        named = (*self.model.named_parameters(), *self.model.named_buffers(), *self.inputs)
        if lost := [name for name, tensor in named if lacks_memory(tensor)]:
            raise NotApplicableError(f"{lost[0]} has no memory that holds its elements")
        if any(is_lazy(t) for t in tensors):
            raise NotApplicableError("the model is lazy and has seen no input: call it once before, model(...)")
        if any(t.is_inference() for t in tensors):
            raise NotApplicableError(
                "the model was made under torch.inference_mode() and cannot change: make it outside"
            )

    # --- running --------------------------------------------------------------------------------------------------

    def run(
        self,
        *,
        vary: Vary | None = None,
        mode: Mode | None = None,
        seed: str = "run",
        backward: bool = False,
        input_gradients: bool = False,
        model: nn.Module | None = None,
        loss: Loss | None = None,
        traced: bool = True,
    ) -> Trace:
        """Run the model and return the trace; the model is restored afterwards.

        Args:
            vary: Takes the path of an input and a copy of it, returns the input to use.
            mode: ``"train"`` or ``"eval"``. By default the model stays in its own mode.
            seed: Name of the seed; runs with the same name draw the same random numbers.
            backward: Whether to run backward too.
            input_gradients: Whether floating inputs require a gradient too. Some models reject such inputs.
            model: The model to run instead, such as a copy.
            loss: The loss to use instead of that of the prepared model.
            traced: Whether to record each layer. A compiled model has none to record.
        """
        trace = Trace()
        assert self._state is not None, "a prepared model runs within ready()"
        seeds = seeding.seeded(seeding.derive(self.probe.seed, f"check {seed}"))
        try:
            layers = self.layers if model is None else Layers(model)
            eager = run_eagerly(layers) if traced else nullcontext()  # a copy has compiled code of its own
            with seeds, settings_preserved(), torch.set_grad_enabled(backward or self._graph), eager:
                args, kwargs = self.copied_inputs(vary, requires_grad=input_gradients)
                run = self.model if model is None else model
                if mode is not None:
                    set_mode(run, mode)
                torch.clear_autocast_cache()  # it holds copies, in another dtype, of weights as they were before
                with _traced(trace, layers.modules if traced else {}):
                    trace.output = run(*args, **kwargs)
                if trace.error is not None:
                    return trace
                self._check_output(trace)
                if backward:
                    inputs = flatten_call(args, kwargs, objects=True).tensors
                    self._run_backward(trace, run, dict(inputs), self.loss(trace.output, loss))
        finally:
            if not self._keep_changes:
                self._state.restore()
        return trace

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Compute in float32 within the block, if `is_rounded`."""
        with self._in_float32() if not self._wide and self.is_rounded else nullcontext():
            yield

    @contextmanager
    def converted(self) -> Iterator[PreparedModel]:
        """Prepare a copy of the model whose parameters, buffers and inputs are float32, without autocast."""

        def wide(tensor: Tensor) -> Tensor:
            return tensor.to(widened(tensor.dtype))

        model = self.copied()
        converted(model, wide)
        args, kwargs = map_tensors(wide, (self.args, self.kwargs))
        other = PreparedModel(self.probe, model, args, kwargs, loss=self._loss)
        with torch.autocast(self.probe.device.type, enabled=False), other.ready(self._check_reference, native=True):
            yield other

    @contextmanager
    def _in_float32(self) -> Iterator[None]:
        native = self._state
        with in_float32(self.model):
            self._wide, self._state = True, ModelState(self.model, generators=False)
            try:
                yield
            finally:
                self._wide, self._state = False, native

    @contextmanager
    def keep_changes(self) -> Iterator[None]:
        """Do not restore the model after each run, but at the end of the block."""
        assert self._state is not None
        self._keep_changes = True
        try:
            yield
        finally:
            self._keep_changes = False
            self._state.restore()

    def trace_call(self, call: Callable[[], Any]) -> Trace:
        """Return the trace of a function that calls the model or parts of it; within `keep_changes`."""
        trace = Trace()
        seeds = seeding.seeded(seeding.derive(self.probe.seed, "check run"))
        with seeds, settings_preserved(), torch.set_grad_enabled(self._graph), _traced(trace, self.layers.modules):
            trace.output = call()
        return trace

    def reference(self, **options: Any) -> Trace:
        """Return a run that has to succeed.

        Raises:
            NotApplicableError: The model or its backward raised, or its output is empty or not finite.
        """
        trace = self.run(**options)
        if trace.error is not None and not (self._graph or trace.in_backward):
            # Its forward may compute gradients itself, as of an energy.
            self._graph = True
            again = self.run(**options)
            self._graph = again.error is None
            trace = again if self._graph else trace
        if trace.error is not None:
            raise NotApplicableError(f"the model does not run on these inputs: {trace.failure}") from trace.error
        if trace.output is None:
            raise NotApplicableError("the model returns None: is a return missing at the end of its forward?")
        if not any(tensor.numel() for _, tensor in flatten("output", trace.output).tensors):
            raise NotApplicableError("the model returns no tensor with elements: there is nothing to compare")
        self.check_reference(trace, **options)
        return trace

    def check_reference(self, trace: Trace, **options: Any) -> None:
        """Check that other runs can be compared with this one.

        Raises:
            NotApplicableError: Something in it is not finite.
        """
        if self._check_reference is not None:
            self._check_reference(self, trace, options)

    def variation(self, **options: Any) -> Trace:
        """Return a run on other inputs, which the model may reject.

        Raises:
            NotApplicableError: The model or its backward raised.
        """
        trace = self.run(**options)
        if trace.error is not None:
            where = "in another run" if trace.in_backward else "the model does not run on other inputs:"
            raise NotApplicableError(f"{where} {trace.failure}") from trace.error
        return trace

    def loss(self, output: Any, loss: Loss | None = None) -> Tensor:
        """Return the loss of an output, which has a gradient: the given one, or that of the prepared model.

        Raises:
            NotApplicableError: Nothing in the output has a gradient.
            UsageError: The function raised, or did not return a scalar.
        """
        if self.has_loss and not flatten("output", output).tensors:
            raise NotApplicableError("the model returns no tensor to compute a loss of")
        try:
            return loss_of(output, self._loss if loss is None else loss, seed=self.probe.seed)
        except NoGradientError as error:
            raise NotApplicableError(str(error)) from error
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"loss= raised {line_of(error)}, called with the output of the model") from error

    def copied_inputs(
        self, vary: Vary | None = None, *, requires_grad: bool = False
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies of the arguments on the device, changed by ``vary``.

        Copies require a gradient as the originals do; all floating ones with ``requires_grad``; none under `no_grad`.

        Raises:
            NotApplicableError: One of them does not support the change.
        """
        paths = {id(tensor): path for path, tensor in reversed(self.inputs)}

        def copied(tensor: Tensor) -> Tensor:
            copy = copy_of(tensor).to(self.probe.device)
            copy = copy.to(widened(copy.dtype)) if self._wide else copy
            path = paths.get(id(tensor))
            if vary is not None and path is not None:
                try:
                    copy = vary(path, copy)
                except (NotApplicableError, UsageError):
                    raise
                except Exception as error:
                    what = f"{copy.dtype}, {copy.layout}".replace("torch.", "")
                    raise NotApplicableError(f"{path} cannot be varied ({what}): {line_of(error)}") from error
            wanted = tensor.requires_grad or (requires_grad and copy.is_floating_point())
            return copy.requires_grad_(wanted and torch.is_grad_enabled())

        args, kwargs = map_tensors(copied, (self.args, self.kwargs))
        return args, kwargs

    def copied(self, to: torch.dtype | torch.device | str | None = None) -> nn.Module:
        """Return a deep copy of the model, converted to a dtype or moved to a device.

        Raises:
            NotApplicableError: It cannot be copied or converted, or what is wrong is the copy itself.
        """
        if self._fault_of_copy:
            raise NotApplicableError(self._fault_of_copy)
        with without_dispatch_modes():  # torch makes the memory of a copy in the dtype that it asks for
            other = copy.deepcopy(self.model)
        if to is None:
            return other
        try:
            return other.to(to)
        except Exception as error:
            raise NotApplicableError(f"the model cannot be converted to {to}: {line_of(error)}") from error

    def run_other(self, other: nn.Module) -> tuple[Trace, list[str]]:
        """Return a run of another model in evaluation mode, and the tensors of this one that it computed with.

        These are parameters and buffers that the other one has not registered: it reaches them in another way.
        """
        with _Operands(self.model, other) as seen:
            return self.run(mode="eval", model=other), seen.names

    @functools.cached_property
    def _fault_of_copy(self) -> str:
        """What is wrong with a copy of the model: it computes otherwise, or with tensors of the model."""
        with self.in_float32():
            one = self.run(mode="eval")
            try:
                with without_dispatch_modes():
                    other = copy.deepcopy(self.model)
                two, shared = self.run_other(other)
            except Exception as error:  # whatever cannot be copied
                if type(error) is ModelProbeError:
                    raise  # it is of the version of torch, not of the model
                return f"the model cannot be copied: {line_of(error)}"
            if shared:
                return f"a copy of the model computes with {shared[0]} of the model itself: see copy_and_pickle"
            if _as_before(one, two) or not _as_before(one, self.run(mode="eval")):
                return ""  # of what does not repeat nothing is known
            return "a copy of the model computes something else: see copy_and_pickle"

    def randn_like(self, tensor: Tensor, name: str) -> Tensor:
        """Return normal numbers with the shape, dtype and device of a tensor, drawn from the seed and the name."""
        name = f"check {name}"
        return seeding.randn(tensor.shape, seed=self.probe.seed, name=name, device=tensor.device, dtype=tensor.dtype)

    def redrawn(self, tensor: Tensor, name: str) -> Tensor:
        """Return normal numbers of the same mean and scale as the elements of a tensor."""
        scale = tensor.std() if tensor.numel() > 1 else tensor.abs().sum()
        return self.randn_like(tensor, name) * (scale if scale > 0 else 1) + tensor.mean()

    def _check_output(self, trace: Trace) -> None:
        """Check that every tensor of an output can be read, and note its numbers of Python."""
        found = flatten("output", trace.output)
        if hidden := unseen(found):
            raise NotApplicableError(hidden)
        if lost := [path for path, tensor in found.tensors if lacks_memory(tensor)]:
            raise NotApplicableError(f"{lost[0]} has no memory that holds its elements")
        numbers = (path for path, x in found.plain.items() if isinstance(x, (int, float)) and not isinstance(x, bool))
        self.numbers.update(dict.fromkeys(numbers))

    def _run_backward(self, trace: Trace, model: nn.Module, inputs: dict[str, Tensor], loss: Tensor) -> None:
        trace.loss = loss
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for parameter in parameters.values():
            parameter.grad = None  # a step of training leaves it there

        def measure(_: object, arrived: tuple[Tensor | None, ...]) -> None:
            norms = [x.norm().item() for x in arrived if x is not None and not x.is_nested and not _is_unreadable(x)]
            trace.largest_gradient = max([trace.largest_gradient, *filter(math.isfinite, norms)])

        handles = [node.register_hook(measure) for node in graph_nodes(loss.grad_fn)]
        try:
            loss.backward()  # not autograd.grad, which reentrant checkpoints refuse
        except Exception as error:  # noqa: BLE001 - the trace reports it
            trace.error, trace.in_backward = _of_model(error), True
            return
        finally:
            for handle in handles:
                handle.remove()
        trace.gradients = {name: p.grad for name, p in parameters.items()}
        self.reached.update(name for name, gradient in trace.gradients.items() if gradient is not None)
        trace.input_gradients = {path: x.grad for path, x in inputs.items() if x.requires_grad and x.is_leaf}
        for parameter in parameters.values():
            parameter.grad = None


def set_mode(model: nn.Module, mode: Mode) -> None:
    """Set the mode of a model.

    Raises:
        NotApplicableError: It does not let itself be set, as that of an exported program.
    """
    on = mode == "train"
    try:
        model.train(on)
    except Exception as error:
        raise NotApplicableError(f"the mode of the model cannot be set: train({on}) raised {line_of(error)}") from error


def all_named(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all parameters and buffers, by all their names."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def place(tensor: Tensor) -> Hashable:
    """Return what two tensors with the same elements in memory have in common, as ``x`` and ``x.data`` do."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) if has_dense_storage(tensor) else id(tensor)


def keep_input(_: str, x: Tensor) -> Tensor:
    """Return an input unchanged."""
    return x


def copy_of(tensor: Tensor) -> Tensor:
    """Return a detached copy of a tensor that a layer takes or gives out.

    Raises:
        NotApplicableError: Its memory is gone, or torch cannot copy it.
    """
    copy = detached_copy(tensor)
    if copy is None:
        raise NotApplicableError("a layer takes or gives out a tensor that cannot be copied: its memory may be gone")
    return copy


def _as_before(one: Trace, two: Trace) -> bool:
    """Whether two runs gave out the same up to rounding, or both raised."""
    now, before = two.final, one.final
    failed = one.error is not None, two.error is not None
    agree = (relative_error(x, before[path]) <= limit(x) for path, x in now.items() if path in before)
    return len({*failed}) == 1 and now.keys() == before.keys() and all(agree)


class _Operands(TorchFunctionMode):
    """Sees which parameters and buffers of a model torch computes with, those aside that another one has too."""

    def __init__(self, model: nn.Module, other: nn.Module) -> None:
        super().__init__()
        theirs = {_memory(tensor) for _, tensor in all_named(other)}
        self._own = {_memory(tensor): name for name, tensor in reversed(all_named(model))}
        self._own = {place: name for place, name in self._own.items() if place and place not in theirs}
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        for _, tensor in flatten_call(args, kwargs or {}).tensors if self._own else ():
            if name := self._own.pop(_memory(tensor), ""):
                self.names.append(name)
        return func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    """Return the address of the memory of a tensor; 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if has_dense_storage(tensor) else 0


def _is_unreadable(tensor: Tensor) -> bool:
    return is_wrapped(tensor) or lacks_memory(tensor)


def _of_model(error: Exception) -> Exception:
    """Return an exception that the model raised, for the trace.

    Raises:
        NotApplicableError: What follows the layers raised it.
        UsageError: It is one.
    """
    if isinstance(error, (NotApplicableError, UsageError)):
        raise error
    if raised_in_hook(error):
        raise NotApplicableError(f"the layers cannot be followed: {line_of(error)}") from error
    return error


@contextmanager
def _traced(trace: Trace, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Record what each layer returns, what the model raises, and in which layer."""
    known: dict[int, tuple[Tensor, int | None]] = {}  # by id, each with its version when it was last recorded

    def is_new(tensor: Tensor) -> bool:
        now, there = version(tensor), known.get(id(tensor))
        known[id(tensor)] = tensor, now
        return there is None or there[1] != now

    def begin(call: ModuleCall, args: Any, kwargs: Any) -> None:
        number = f" (call {call.index + 1})" if call.index else ""
        for path, tensor in flatten_call(args, kwargs).tensors:
            if not _is_unreadable(tensor) and is_new(tensor) and call.parent is not None:
                made, around = f"{path} of {call.layer}{number}", call.parent
                copy = plain(tensor.detach().clone())
                trace.tensors.append(LayerTensor(around.layer, around.index, made, copy, True))

    def end(call: ModuleCall, args: Any, output: Any) -> None:
        for path, tensor in flatten("output", output).tensors:
            if not _is_unreadable(tensor):
                is_new(tensor)
                trace.tensors.append(LayerTensor(call.layer, call.index, path, plain(tensor.detach().clone())))

    tracer = CallTracer(modules, ModuleCall, before=begin, after=end)
    try:
        with tracer:
            yield
    except Exception as error:  # noqa: BLE001 - the trace reports it
        trace.error = _of_model(error)
    finally:
        trace.raised_in = tracer.raised_in
