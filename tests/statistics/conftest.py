"""Shared by the tests of statistics."""

from __future__ import annotations

import pytest

from pytest_modelprobe import kernel


@pytest.fixture(autouse=True, params=["torch", "compiled"])
def _computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with the compiled kernel, where there is one, and without."""
    if request.param == "torch":
        monkeypatch.setattr(kernel, "active", None)
    elif kernel.active is None:
        pytest.skip("the kernel is not compiled")
