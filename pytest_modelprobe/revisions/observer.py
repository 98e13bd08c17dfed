"""Watches every model that a test makes or calls, with nothing written for it.

Two doors of `torch.nn.Module` are watched, both outermost only: construction and call. Within each, random numbers are
drawn from a seed of its own, and the random states are put back afterwards. So what a test draws depends on nothing
that a model draws, and the weights of a layer depend on its name: a layer that is added changes no other number.

Hooks of torch for all modules would not do: a watch that begins in one misses the call that it is in. Mutation needs
these, for what it plants has to reach the hooks of a module.

The seed of a door is made of the newest seed that the test has set, the class of the model, and how many of that class
there were since. Code that sets a seed twice to get the same model twice still gets it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
import types
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from pytest_modelprobe._torch import compiled, tracing_state
from pytest_modelprobe.exceptions import UnsupportedModelError
from pytest_modelprobe.models import as_array, derive, initialization, seeded
from pytest_modelprobe.runs import Watch

from .recorder import Recorder, is_probed

_MOST_MODELS = 24
"""Models of a test that are watched."""

_MOST_FORWARDS = 3
"""Forwards of a model that are watched."""

_SEEDS = (torch, "manual_seed"), (torch.random, "manual_seed"), (torch, "get_rng_state"), (torch, "set_rng_state")

_COMPILERS = (torch.jit, "script"), (torch.jit, "trace"), (torch, "compile"), (torch.export, "export")
"""What compiles a model sees no hooks of Python, or refuses them."""


class ModelObserver:
    """A plugin that watches the models of the tests that have no probe.

    Args:
        recorder: Is told of each watch, and why a model has none.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._is_on = self._is_inside = self._may_watch = False
        self._thread = threading.get_ident()
        self._seed = ""
        """The newest seed that the test has set, or the fixture that is set up."""
        self._drawn: Counter[tuple[str, str]] = Counter()
        self._made: dict[int, tuple[ref[nn.Module], ref[nn.Module]]] = {}
        """Id of a module → the module, and the outermost one that was made with it inside."""
        self._watches: dict[int, Watch] = {}
        """Id of each module of a watched model → the watch, which keeps the module."""
        self._calls: Counter[Watch] = Counter()
        self._numbers: Counter[str] = Counter()
        self._inits: dict[int, tuple[type[nn.Module], Any, Any]] = {}
        """Id of a class → the class, its own ``__init__`` and what is in its place; `None` if it has none."""
        self._doors = contextlib.ExitStack()
        """Puts everything back."""

    # --- doors --------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Open the doors. They stay open for tests with a probe too, which may share fixtures."""
        call = nn.Module.__call__

        @functools.wraps(call)
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # torch.compile takes the first condition for a constant.
            if torch.compiler.is_compiling() or not self._sees():
                return call(module, *args, **kwargs)
            with self._door("call", module):
                self._look_at(module)
                return call(module, *args, **kwargs)

        def init_subclass(cls: type[nn.Module], /, **kwargs: Any) -> None:
            super(nn.Module, cls).__init_subclass__(**kwargs)
            self._replace_init(cls)

        def replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
            self._doors.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, function)

        replace(nn.Module, "__call__", called)
        for owner, name in _SEEDS:
            replace(owner, name, self._setting_seed(getattr(owner, name)))
        for owner, name in _COMPILERS:
            replace(owner, name, self._closing(getattr(owner, name)))
        self._doors.callback(self._put_inits_back)
        # Not `__new__`: in CPython a class from which it was deleted takes no arguments any more.
        self._doors.callback(delattr, nn.Module, "__init_subclass__")
        nn.Module.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]
        self._replace_inits()

    def _replace_inits(self) -> None:
        """Replace the ``__init__`` of all classes that are new."""
        waiting: list[type[nn.Module]] = nn.Module.__subclasses__()
        found = {id(cls): cls for cls in waiting}
        while waiting:
            new = {id(cls): cls for cls in waiting.pop().__subclasses__() if id(cls) not in found}
            found |= new
            waiting += new.values()
        for key in found.keys() - self._inits.keys():
            self._replace_init(found[key])

    def _replace_init(self, cls: type[nn.Module]) -> None:
        own = vars(cls).get("__init__")
        self._inits[id(cls)] = cls, own, None
        if not isinstance(own, types.FunctionType) or issubclass(cls, torch.jit.ScriptModule):
            return

        @functools.wraps(own)
        def made(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if torch.compiler.is_compiling() or not self._sees():
                own(module, *args, **kwargs)
                return
            with self._door("make", module) as seed:
                initialization.initialize(module, functools.partial(own, module, *args, **kwargs), seed=seed)
            there = ref(module)
            self._made.update((id(one), (ref(one), there)) for one in module.modules())

        with contextlib.suppress(Exception):  # a metaclass may refuse it
            cls.__init__ = made  # type: ignore[assignment,method-assign]
            self._inits[id(cls)] = cls, own, made

    def _put_inits_back(self) -> None:
        for cls, own, made in self._inits.values():
            if made is not None and vars(cls).get("__init__") is made:  # somebody may have replaced it since
                cls.__init__ = own  # type: ignore[method-assign]
        self._inits.clear()

    def _sees(self) -> bool:
        is_here = threading.get_ident() == self._thread and tracing_state() is None
        return self._is_on and not self._is_inside and is_here

    @contextlib.contextmanager
    def _door(self, kind: str, module: nn.Module) -> Iterator[int]:
        """Let random numbers be drawn from a seed of their own within the block."""
        key = self._seed, f"{kind} {type(module).__qualname__}"
        self._drawn[key] += 1
        seed = derive(0, f"{key[0]} {key[1]} {self._drawn[key]}")
        self._is_inside = True
        try:
            with seeded(seed):
                yield seed
        finally:
            self._is_inside = False

    def _setting_seed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Count anew after a seed was set. A state that is taken may be set later, so it begins a count too."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            if not torch.compiler.is_compiling() and self._sees():
                (given,) = (*args, *kwargs.values()) or (found,)
                state = as_array(given.cpu()).tobytes() if isinstance(given, torch.Tensor) else str(given).encode()
                self._seed = hashlib.sha256(state).hexdigest()
                self._drawn.clear()
            return found

        return wrapper

    def _closing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for watch in {*self._watches.values()}:
                watch.close()
            return function(*args, **kwargs)

        return wrapper

    # --- watches ------------------------------------------------------------------------------------------------------

    def _look_at(self, module: nn.Module) -> None:
        """Watch the model that a module is part of, if it is new. Else close its watch after three calls."""
        watch = self._watches.get(id(module))
        if watch is not None:
            self._calls[watch] += 1
            if self._calls[watch] > _MOST_FORWARDS:
                watch.close()
            return
        one, around = self._made.get(id(module), (lambda: None, lambda: None))
        root = around() if one() is module else None
        root = module if root is None or all(module is not inside for inside in root.modules()) else root
        modules = list(root.modules())
        is_new = self._may_watch and not any(id(one) in self._watches for one in modules)
        if not is_new or all(type(one).__module__.partition(".")[0] == "torch" for one in modules):
            return
        try:
            if any(compiled(one) is not None for one in modules):
                raise UnsupportedModelError("it is compiled")
            if len({*self._watches.values()}) == _MOST_MODELS:
                raise UnsupportedModelError(f"its test has more than {_MOST_MODELS} models")
            watch = Watch(root)
        except Exception as error:  # noqa: BLE001 - what cannot be watched is counted, and fails no test
            self._recorder.unwatched(str(error).partition("\n")[0])
            return
        self._watches.update(dict.fromkeys(map(id, modules), watch))
        self._calls[watch] = 1
        name = type(root).__qualname__.rpartition("<locals>.")[2]
        self._numbers[name] += 1
        self._recorder.watched(watch, f"{name} {self._numbers[name]}")

    def _end(self) -> None:
        for watch in {*self._watches.values()}:
            watch.close()
        for kept in (self._watches, self._calls, self._numbers, self._drawn):
            kept.clear()
        self._made = {key: found for key, found in self._made.items() if found[0]() is not None}

    # --- what pytest calls --------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, Any, Any]:
        """Open the doors while tests run."""
        with self._doors:
            self._open()
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Watch a test."""
        self._replace_inits()
        self._is_on = isinstance(item, pytest.Function) and not is_probed(item)
        self._may_watch, self._seed = False, ""
        try:
            return (yield)
        finally:
            self._is_on = False
            self._end()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        """Seed a fixture by its name. What one of wider scope calls belongs to no test."""
        if not self._is_on:
            return (yield)
        before = self._seed, self._may_watch
        self._seed, self._may_watch = f"fixture {fixturedef.argname}", fixturedef.scope == "function"
        try:
            with seeded(derive(0, self._seed)):
                return (yield)
        finally:
            self._seed, self._may_watch = before

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        """Seed a test."""
        if not self._is_on:
            return (yield)
        self._may_watch = True
        with seeded(0):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, Any, Any]:
        """Watch nothing more: the recorder calls the models again."""
        self._is_on = False
        return (yield)
