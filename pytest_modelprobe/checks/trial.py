"""A model and its inputs, run again and again in variations; each run shows what every layer gave out."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_modelprobe._torch import is_wrapped
from pytest_modelprobe.capture import run_eagerly
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import (
    Call,
    CallTracer,
    Layers,
    ModelState,
    check_supported,
    flatten,
    flatten_call,
    map_tensors,
    seeding,
    settings_preserved,
    unseen,
)
from pytest_modelprobe.probe import ModelProbe
from pytest_modelprobe.record import ROOT, address, label_of, qualified
from pytest_modelprobe.runs import Loss, Mode, NoGradientError, check_loss, loss_of

from .outcome import NotApplicableError, line_of

Vary: TypeAlias = Callable[[str, Tensor], Tensor]
Judge: TypeAlias = "Callable[[Trial, Trace, Mapping[str, Any]], None]"

_WOKEN = 0.02
"""Standard deviation given to layers that start from zero: of the size that initializations of transformers have."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerTensor:
    """One tensor that a layer gave out, or that its own code made for a layer inside it."""

    layer: str
    index: int
    """Which of the layer's calls, from 0."""
    path: str
    tensor: Tensor
    """A copy, see `plain`: the layers after it may write into the original."""
    inside: bool = False
    """Whether the layer handed it to one inside it, and did not get it as it is from another."""

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
    """What one run showed."""

    given: list[LayerTensor] = field(default_factory=list)
    """In the order in which they were made: what a layer gives out comes after what the layers inside it give out."""
    output: Any = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    """Of each parameter that requires one, by its full name; None where none arrived. Empty without a backward."""
    input_gradients: dict[str, Tensor | None] = field(default_factory=dict)
    """Of each floating input, by its path."""
    quantized: bool = False
    """Whether some of what was given is quantized: it is dequantized in `given`."""
    loss: Tensor | None = None
    error: Exception | None = None
    raised_in: str = ""
    """The innermost layer that was running when the model raised."""
    in_backward: bool = False
    """Whether it was the backward that raised."""

    @property
    def outputs(self) -> list[LayerTensor]:
        """What was given out, without what own code made on the way."""
        return [given for given in self.given if not given.inside]

    @property
    def final(self) -> dict[str, Tensor]:
        """The tensors that the model itself gave out, each with its path."""
        return {path: plain(tensor.detach()) for path, tensor in flatten("output", self.output).tensors}

    @property
    def failure(self) -> str:
        """What the model or its backward raised, in one line."""
        return f"{'its backward' if self.in_backward else label_of(self.raised_in)} raised {line_of(self.error)}"


class Trial:
    """A model and its inputs, on the device of the probe, for the time of a check.

    As a context it leaves no trace: parameters, buffers, gradients, modes, attributes, random states and the settings
    of torch are put back after each run and at the end. Weights that are all zero, as those of heads and gates may be
    at the start, are small random ones meanwhile: they would hide whatever is wrong before them. Whatever is compiled
    runs eagerly.

    What the model raises, in its forward or its backward, is in the trace of a run; what else cannot be done with it
    is a `NotApplicableError`.

    Args:
        probe: Gives the device and the seed.
        model: The model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        loss: Of the output; None or ``"random"``: a fixed random projection of all floating outputs, which no softmax
            makes constant.
        wake: Whether to give layers that start from zero random parameters.
        judge: Takes this, a trace and the options of its run; refuses what other runs are not to be judged by.
    """

    def __init__(
        self,
        probe: ModelProbe,
        model: nn.Module,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        loss: Loss | None = None,
        wake: bool = True,
        judge: Judge | None = None,
    ) -> None:
        check_supported(model)
        check_loss(loss)
        self.probe, self.model = probe, model
        self.args, self.kwargs = args, dict(kwargs or {})
        self.layers = Layers(model)
        self.name = type(next(iter(self.layers.modules.values()))).__name__
        self._loss: Loss = "random" if loss is None else loss
        self._wake = wake
        self._judge = judge
        self._exit = ExitStack()
        self._state: ModelState | None = None
        self._lasting = False
        self._graph = False

    @property
    def inputs(self) -> list[tuple[str, Tensor]]:
        """The tensors among the arguments, each with its path, as messages say it."""
        return flatten_call(self.args, self.kwargs, objects=True).tensors

    @property
    def dense(self) -> list[tuple[str, Tensor]]:
        """Those of them whose axes can be cut: not the sparse, nested and packed ones."""
        given = (*self.args, *self.kwargs.values())
        packed = {id(x) for value in given if isinstance(value, nn.utils.rnn.PackedSequence) for x in value}
        dense = [(path, x) for path, x in self.inputs if x.layout is torch.strided and not x.is_nested]
        return [(path, x) for path, x in dense if id(x) not in packed]

    @property
    def has_loss(self) -> bool:
        """Whether a loss of its own was given."""
        return callable(self._loss)

    def __enter__(self) -> Trial:
        tensors = (*self.model.parameters(), *self.model.buffers())
        if any(t.is_meta for t in tensors):
            raise NotApplicableError("the model is on the meta device and has no numbers")
        if any(x.is_meta for _, x in self.inputs):
            raise NotApplicableError("an input is on the meta device and has no numbers")
        if any(is_lazy(t) for t in tensors):
            raise NotApplicableError("the model is lazy and has seen no input: call it once before, model(...)")
        if any(t.is_inference() for t in tensors):
            raise NotApplicableError(
                "the model was made under torch.inference_mode() and cannot change: make it outside"
            )
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(ModelState(self.model))
            stack.enter_context(seeding.forked_rng())
            stack.enter_context(run_eagerly(self.layers))
            stack.enter_context(torch.enable_grad())
            for parameter in self.model.parameters():
                parameter.grad = None
            try:
                self.model.to(self.probe.device)
            except Exception as error:
                raise NotApplicableError(
                    f"the model cannot be moved to {self.probe.device}: {line_of(error)}"
                ) from error
            if self._wake:
                self._randomize_zero_layers()
            self._state = ModelState(self.model, generators=False)  # else no run would show that they matter
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

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
        traced: bool = True,
    ) -> Trace:
        """Return what a run shows; afterwards the model is as it was before.

        Args:
            vary: Takes the path of an input and a copy of it, returns what to give in its place.
            mode: ``"train"`` or ``"eval"``; None: as the model is.
            seed: Runs of one seed draw the same random numbers.
            backward: Whether to run backward too.
            input_gradients: Whether floating inputs require a gradient too. Some models want their inputs without.
            model: Runs in the place of the model: a copy of it, say.
            traced: Whether to look at each layer; a compiled model has none.
        """
        trace = Trace()
        assert self._state is not None, "a trial is a context: with Trial(...) as trial"
        seeds = seeding.seeded(seeding.derive(self.probe.seed, f"check {seed}"))
        try:
            with seeds, settings_preserved(), torch.set_grad_enabled(backward or self._graph):
                inputs = self.copied_inputs(vary, requires_grad=input_gradients)
                self._run(trace, self.model if model is None else model, inputs, mode, backward=backward, traced=traced)
        finally:
            if not self._lasting:
                self._state.restore()
        return trace

    @contextmanager
    def lasting(self) -> Iterator[None]:
        """Let runs leave behind what they do to the model, until the end of the block."""
        assert self._state is not None
        self._lasting = True
        try:
            yield
        finally:
            self._lasting = False
            self._state.restore()

    def follow(self, call: Callable[[], Any]) -> Trace:
        """Return what the layers show while a function calls the model, or parts of it; within `lasting`."""
        trace = Trace()
        seeds = seeding.seeded(seeding.derive(self.probe.seed, "check run"))
        with seeds, settings_preserved(), torch.set_grad_enabled(self._graph), _traced(trace, self.layers.modules):
            try:
                trace.output = call()
            except (NotApplicableError, UsageError):
                raise
            except Exception as error:  # noqa: BLE001 - whatever a model raises is told, not passed on
                trace.error = error
        return trace

    def reference(self, **options: Any) -> Trace:
        """Return a run on the inputs as they are given, which has to succeed.

        Raises:
            NotApplicableError: The model or its backward raised, or gave out nothing, or what is not finite.
        """
        trace = self.run(**options)
        if trace.error is not None and not (self._graph or trace.in_backward):
            # Its forward may take gradients itself, as of an energy.
            self._graph = True
            again = self.run(**options)
            self._graph = again.error is None
            trace = again if self._graph else trace
        if trace.error is not None:
            raise NotApplicableError(f"the model does not run on these inputs: {trace.failure}") from trace.error
        if not any(tensor.numel() for _, tensor in flatten("output", trace.output).tensors):
            raise NotApplicableError(
                "the model gives out no tensor, or none with elements: there is nothing to look at"
            )
        self.judge(trace, **options)
        return trace

    def judge(self, trace: Trace, **options: Any) -> None:
        """Refuse a run that others are not to be judged by.

        Raises:
            NotApplicableError: It gave out what is not finite.
        """
        if self._judge is not None:
            self._judge(self, trace, options)

    def other(self, **options: Any) -> Trace:
        """Return a run on other inputs than those given, which the model may refuse.

        Raises:
            NotApplicableError: The model or its backward raised.
        """
        trace = self.run(**options)
        if trace.error is not None:
            where = "in another run" if trace.in_backward else "the model does not run on other inputs:"
            raise NotApplicableError(f"{where} {trace.failure}") from trace.error
        return trace

    def loss(self, output: Any) -> Tensor:
        """Return the loss of an output, which has a gradient.

        Raises:
            NotApplicableError: Nothing in the output has a gradient.
            UsageError: The loss that was given raised, or returned something else than a number.
        """
        if self.has_loss and not flatten("output", output).tensors:
            raise NotApplicableError("the model returns no tensor to compute a loss of")
        try:
            return loss_of(output, self._loss, seed=self.probe.seed)
        except NoGradientError as error:
            raise NotApplicableError(str(error)) from error
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"loss= raised {line_of(error)}, called with the output of the model") from error

    def copied_inputs(
        self, vary: Vary | None = None, *, requires_grad: bool = False
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies of the arguments on the device, varied.

        Those that require a gradient do so again, all floating ones if that is wanted, and none under `no_grad`.

        Raises:
            NotApplicableError: One of them is of a kind that cannot be varied so.
        """
        paths = {id(tensor): path for path, tensor in reversed(self.inputs)}

        def varied(path: str, tensor: Tensor, vary: Vary) -> Tensor:
            try:
                return vary(path, tensor)
            except (NotApplicableError, UsageError):
                raise
            except Exception as error:
                what = f"{tensor.dtype}, {tensor.layout}".replace("torch.", "")
                raise NotApplicableError(f"{path} cannot be varied ({what}): {line_of(error)}") from error

        def copied(tensor: Tensor) -> Tensor:
            copy = tensor.detach().clone().to(self.probe.device)
            if vary is not None and id(tensor) in paths:
                copy = varied(paths[id(tensor)], copy, vary)
            wanted = tensor.requires_grad or (requires_grad and copy.is_floating_point())
            return copy.requires_grad_(wanted and torch.is_grad_enabled())

        args, kwargs = map_tensors(copied, (self.args, self.kwargs))
        return args, kwargs

    def copied(self, to: torch.dtype | torch.device | str | None = None) -> nn.Module:
        """Return a deep copy of the model, its floating tensors of another dtype, or all of them on another device.

        Raises:
            NotApplicableError: It cannot be copied, or not be converted.
        """
        try:
            other = copy.deepcopy(self.model)
        except Exception as error:
            raise NotApplicableError(f"the model cannot be copied: {line_of(error)}") from error
        if to is None:
            return other
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # .to() looks at the gradients of what a copied ScriptModule has
                return other.to(to)
        except Exception as error:
            raise NotApplicableError(f"the model cannot be converted to {to}: {line_of(error)}") from error

    def randn_like(self, tensor: Tensor, name: str) -> Tensor:
        """Return normal numbers of a tensor's shape, dtype and device that depend on the seed and the name alone."""
        name = f"check {name}"
        return seeding.randn(tensor.shape, seed=self.probe.seed, name=name, device=tensor.device, dtype=tensor.dtype)

    def _run(
        self,
        trace: Trace,
        model: nn.Module,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        mode: Mode | None,
        *,
        backward: bool,
        traced: bool,
    ) -> None:
        args, kwargs = inputs
        if mode is not None:
            model.train(mode == "train")
        torch.clear_autocast_cache()  # of copies, in another dtype, of what the weights were
        with _traced(trace, (self.layers if model is self.model else Layers(model)).modules if traced else {}):
            try:
                trace.output = model(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - whatever a model raises is told, not passed on
                trace.error = error
                return
        if hidden := unseen(flatten("output", trace.output)):
            raise NotApplicableError(hidden)
        if backward:
            trace.loss = self.loss(trace.output)
            parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
            floating = {
                path: x for path, x in flatten_call(args, kwargs, objects=True).tensors if x.requires_grad and x.is_leaf
            }
            for parameter in parameters.values():
                parameter.grad = None  # a step of training leaves it there
            try:
                trace.loss.backward()  # not autograd.grad, which reentrant checkpoints refuse
            except Exception as error:  # noqa: BLE001 - the same
                trace.error, trace.in_backward = error, True
                return
            trace.gradients = {name: _taken(p) for name, p in parameters.items()}
            trace.input_gradients = {path: _taken(x) for path, x in floating.items()}

    def _randomize_zero_layers(self) -> None:
        for name, module in self.layers.modules.items():
            own = [(n, p) for n, p in module.named_parameters(recurse=False) if p.is_floating_point() and p.numel()]
            zero = [(n, p) for n, p in own if not p.any()]
            # A bias hides nothing, unless there is nothing but zeros.
            if len(zero) == len(own) or any(not n.endswith("bias") for n, _ in zero):
                for parameter_name, parameter in zero:
                    full = qualified(name, parameter_name)
                    with torch.no_grad():
                        written = distinct(parameter)
                        written.copy_(self.randn_like(written, full) * _WOKEN)


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor as one that any operation takes: dense, rows of one length, not quantized, of two bytes or more.

    >>> plain(torch.eye(2).to_sparse())
    tensor([[1., 0.],
            [0., 1.]])
    """
    if tensor.is_nested:
        tensor = torch.nested.to_padded_tensor(tensor, math.nan if tensor.is_floating_point() else 0)
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def widened(tensor: Tensor) -> Tensor:
    """Return a floating or complex tensor in double precision; any other as it is.

    >>> widened(torch.ones(1)).dtype, widened(torch.ones(1, dtype=torch.int32)).dtype
    (torch.float64, torch.int32)
    """
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def unchanged(_: str, x: Tensor) -> Tensor:
    """Return an input as it is given."""
    return x


def distinct(tensor: Tensor) -> Tensor:
    """Return what can be written into of a tensor: of an expanded one its first elements, which are the others too.

    >>> distinct(torch.ones(2, 1).expand(2, 3)).shape
    torch.Size([2, 1])
    """
    return tensor[tuple(slice(None, None if stride else 1) for stride in tensor.stride())]


def _taken(leaf: Tensor) -> Tensor | None:
    gradient, leaf.grad = leaf.grad, None
    return gradient


@contextmanager
def _traced(trace: Trace, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Record what each layer returns, and in which layer the model raises."""
    known: dict[int, tuple[Tensor, int]] = {}  # by id, each with its version when it was last recorded

    def is_new(tensor: Tensor) -> bool:
        trace.quantized |= tensor.is_quantized
        version = 0 if tensor.is_inference() else tensor._version
        there = known.get(id(tensor))
        known[id(tensor)] = tensor, version
        return there is None or there[1] != version

    def begin(call: Call, args: Any, kwargs: Any) -> None:
        number = f" (call {call.index + 1})" if call.index else ""
        for path, tensor in flatten_call(args, kwargs).tensors:
            if not is_wrapped(tensor) and is_new(tensor) and call.parent is not None:
                made, around = f"{path} of {call.layer}{number}", call.parent
                copy = plain(tensor.detach().clone())
                trace.given.append(LayerTensor(around.layer, around.index, made, copy, True))

    def end(call: Call, args: Any, output: Any) -> None:
        for path, tensor in flatten("output", output).tensors:
            if not is_wrapped(tensor):
                is_new(tensor)
                trace.given.append(LayerTensor(call.layer, call.index, path, plain(tensor.detach().clone())))

    tracer = CallTracer(modules, Call, before=begin, after=end)
    try:
        with tracer:
            yield
    finally:
        trace.raised_in = tracer.raised_in
