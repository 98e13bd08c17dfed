"""The classes of which each test makes modules."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Generator
from typing import Any

import pytest


class MadeModules:
    """A plugin that notes the classes of the modules that each test makes."""

    def __init__(self) -> None:
        self._shared: set[type] = set()
        """The classes of modules that are there before the tests, or are made by fixtures of wider scope."""
        self._of_tests: dict[str, set[type]] = {}
        self._now = self._shared
        self._in_tests: list[weakref.ref[Any]] = []
        """The modules that the test made. Those that outlive it may be used by others."""
        self._looks = False

    def of_test(self, test: str) -> set[type] | None:
        """Return the classes of modules that a test may use, after all tests; `None` if they are not known."""
        if not self._looks or test not in self._of_tests:
            return None
        return self._of_tests[test] | self._shared

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtestloop(self) -> Generator[None, Any, Any]:
        """Look on while the tests run."""
        if "torch" not in sys.modules:
            return (yield)
        from torch import nn

        self._shared |= {type(one) for one in gc.get_objects() if issubclass(type(one), nn.Module)}
        made = {name: getattr(nn.Module, name) for name in ("__init__", "__setstate__")}
        self._looks = True
        try:
            for name, function in made.items():
                setattr(nn.Module, name, self._noting(function))
            return (yield)
        finally:
            for name, function in made.items():
                setattr(nn.Module, name, function)

    def _noting(self, function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def noting(module: Any, /, *args: Any, **kwargs: Any) -> None:
            self._now.add(type(module))
            if self._now is not self._shared:
                self._in_tests.append(weakref.ref(module))
            function(module, *args, **kwargs)

        return noting

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note what a test makes."""
        self._now = self._of_tests.setdefault(item.nodeid, set())
        try:
            return (yield)
        finally:
            self._now = self._shared
            self._shared |= {type(one) for ref in self._in_tests if (one := ref()) is not None}
            self._in_tests.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        """Note what a fixture makes that other tests have too."""
        before = self._now
        self._now = before if fixturedef.scope == "function" else self._shared
        try:
            return (yield)
        finally:
            self._now = before
