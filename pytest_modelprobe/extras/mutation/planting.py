"""Sees which layers run in a test, digests what models return, and plants a fault.

Tests make their models themselves, so nobody hands them over. That is why the hooks are those of torch for all modules
at once. A fault that changes no bit of an output and stops no gradient has no effect, and is not held against a test.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all
from torch.utils.hooks import unserializable_hook

from pytest_modelprobe._torch import remove_global_hook, tracing_state, without_dispatch_modes, without_torch_function
from pytest_modelprobe.models import flatten, has_dense_storage
from pytest_modelprobe.record import ROOT

from .operators import OPERATORS, LayerCall, Operator
from .plan import Place
from .program import Program, bytes_of
from .seen import Planted, Seen

_MOST_CHILDREN = 4
"""How many children the name of one of torch's own containers lists."""


class Hangs(BaseException):
    """A test calls layers far more often than it does without the fault."""


class Observer:
    """Hooks on all modules while `installed`: they write to `seen`, and plant `planted`."""

    def __init__(self) -> None:
        self._seen: Seen | None = None
        self._planted: Planted | None = None
        self.most_calls: int | None = None
        self.hangs = False
        """Whether there were more calls than ``most_calls``."""
        self.sources: dict[str, set[str]] = defaultdict(set)
        """Name of each model → files of the classes of its modules, except those of torch."""
        self._roots: dict[int, tuple[ref[nn.Module], str]] = {}
        self._names: dict[int, tuple[ref[nn.Module], str, str]] = {}
        self._running: list[nn.Module] = []
        self._planting = contextlib.ExitStack()
        self._thread = threading.get_ident()
        self._program = Program(self._current)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """See all modules within the block."""
        with contextlib.ExitStack() as stack:
            for handle in (
                hooks_of_all.register_module_forward_pre_hook(self._before),
                hooks_of_all.register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
                hooks_of_all.register_module_parameter_registration_hook(self._registered),
            ):
                stack.callback(remove_global_hook, handle)
            stack.enter_context(self._program.installed())
            yield

    @property
    def is_observing(self) -> bool:
        """Whether somebody asks what is seen."""
        return self._seen is not None

    @contextlib.contextmanager
    def observing(self, seen: Seen, planted: Planted | None = None) -> Iterator[None]:
        """Write what is seen within the block to ``seen``, and plant a fault."""
        self._end_forward()
        self._planted, self.hangs = planted, False
        try:
            with self.writing_to(seen):
                yield
        finally:
            self._end_forward()
            self._planted = self.most_calls = None

    @contextlib.contextmanager
    def writing_to(self, seen: Seen) -> Iterator[None]:
        """Write what is seen within the block to ``seen``."""
        before, self._seen = self._seen, seen
        try:
            yield
        finally:
            self._seen = before

    def models(self, name: str | None) -> list[nn.Module]:
        """Return the models of a name, or all, that were called and are still there."""
        found = {key: (there(), of) for key, (there, of) in self._roots.items()}
        self._roots = {key: self._roots[key] for key, (model, _) in found.items() if model is not None}
        return [model for model, of in found.values() if model is not None and name in (None, of)]

    def _end_forward(self) -> None:
        """Forget a forward that an error ended."""
        self._planting.close()
        self._running.clear()

    # --- hooks --------------------------------------------------------------------------------------------------------

    def _is_off(self) -> bool:
        # torch.compile takes this condition for a constant, so it does not compile the rest into the graph.
        if torch.compiler.is_compiling():
            return True
        return self._seen is None or threading.get_ident() != self._thread or tracing_state() is not None

    def _current(self) -> tuple[Seen, Planted | None] | None:
        return None if self._seen is None or self._is_off() else (self._seen, self._planted)

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if not torch.compiler.is_compiling() and self._seen is not None:
            self._seen.makes_models = True

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._is_off():
            return
        assert self._seen is not None
        self._seen.calls += 1
        if self.most_calls is not None and self._seen.calls > self.most_calls:
            self.hangs = True
            raise Hangs(f"more than {self.most_calls:,} calls of layers")
        if not self._running:
            self._begin_forward(module)
        self._running.append(module)

    def _after(self, module: nn.Module, args: tuple[Any, ...], *given: Any) -> Any:
        kwargs, output = ({}, *given)[-2:]  # After an error, torch leaves the keyword arguments out.
        if self._is_off() or not any(module is other for other in self._running):
            return None
        call = LayerCall(module, args, kwargs, output)
        with without_torch_function():
            changed = self._changed(call)
            self._note(call)
            while self._running.pop() is not module:
                pass
            if not self._running:
                self._planting.close()
                with contextlib.suppress(Exception):  # An output that cannot be read is no error of the test.
                    self._digest(module, output if changed is None else changed)
        return changed

    # --- names --------------------------------------------------------------------------------------------------------

    def _begin_forward(self, root: nn.Module) -> None:
        self._planting.close()
        known = self._names.get(id(root))
        # A layer of a known model that is called by itself stays a layer of that model.
        if known is None or known[0]() is not root:
            model = _name_of_model(root)
            self._roots[id(root)] = ref(root), model
            for name, module in root.named_modules():
                self._names[id(module)] = ref(module), model, name or ROOT
                file = getattr(sys.modules.get(type(module).__module__), "__file__", None)
                if file and not type(module).__module__.startswith("torch."):
                    self.sources[model].add(file)
        planted = self._planted
        if planted is not None and isinstance(planted.operator, Operator) and planted.operator.plant is not None:
            for module in root.modules():
                if self._place(module) == planted.place:
                    with contextlib.suppress(Exception):  # A layer that cannot be changed so is left as it is.
                        self._planting.enter_context(planted.operator.plant(module))

    def _place(self, module: nn.Module) -> Place | None:
        known = self._names.get(id(module))
        if known is None or known[0]() is not module:  # The module was made during the forward.
            return None
        return Place(known[1], known[2], type(module).__name__)

    # --- what is noted ------------------------------------------------------------------------------------------------

    def _changed(self, call: LayerCall) -> Any:
        planted = self._planted
        if planted is None or not isinstance(planted.operator, Operator):
            return None
        if call.output is None or self._place(call.module) != planted.place:
            return None
        planted.fired = True
        if planted.operator.output is None:
            return None
        try:
            return planted.operator.output(call)
        except Exception:  # noqa: BLE001 - an error of the operator is not one that a test noticed
            return None

    def _note(self, call: LayerCall) -> None:
        place = self._place(call.module)
        if self._planted is not None or place is None or call.output is None:
            return
        assert self._seen is not None
        fitting = self._seen.places[place]
        for name, operator in OPERATORS.items():
            if name not in fitting:
                with contextlib.suppress(Exception):
                    if operator.fits(call):
                        fitting.add(name)

    def _digest(self, root: nn.Module, output: Any) -> None:
        seen = self._seen
        assert seen is not None
        place = self._place(root)
        for path, tensor in flatten("output", output).tensors:
            seen.outputs.update(f"{path} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}".encode())
            with contextlib.suppress(Exception), without_dispatch_modes():
                if has_dense_storage(tensor):
                    seen.outputs.update(bytes_of(tensor))
            if tensor.grad_fn is not None and place is not None:
                tensor.register_hook(unserializable_hook(functools.partial(_note_gradient, seen, place.model)))


def _note_gradient(seen: Seen, model: str, gradient: Tensor) -> None:
    # Another loss changes no output. Where no optimizer steps, it is seen here alone.
    seen.backward.add(model)
    with contextlib.suppress(Exception), without_torch_function(), without_dispatch_modes():
        if has_dense_storage(gradient):
            seen.outputs.update(bytes_of(gradient))


def without_warning_of_hooks() -> None:
    """Let a compiled model run without torch's warning that it does not see our hooks.

    No fault is planted inside such a model.
    """
    warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")


def _name_of_model(root: nn.Module) -> str:
    cls = type(root)
    if not cls.__module__.startswith("torch."):
        return f"{cls.__module__}:{cls.__qualname__}"
    # A container of torch, such as nn.Sequential, is what its children make of it: its class is no name of a model.
    children = [type(child).__name__ for child in root.children()]
    if not children:
        return f"torch:{cls.__qualname__}"
    more = [f"{len(children) - _MOST_CHILDREN} more"] if len(children) > _MOST_CHILDREN else []
    return f"torch:{cls.__qualname__}({', '.join(children[:_MOST_CHILDREN] + more)})"
