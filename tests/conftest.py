"""Shared by all tests. The plugin's own tests run pytest within pytest."""

from __future__ import annotations

import pytest
import torch._dynamo  # noqa: F401 - pytester restores sys.modules, and torch cannot be imported twice

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def _not_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of pytest inside a test is one of its own, though the tests themselves may run under xdist."""
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)
