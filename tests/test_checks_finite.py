"""What a user sees of a check before it is called; numbers that are not finite, and how a model is run."""

from __future__ import annotations

import inspect
import pydoc

import pytest

import pytest_modelprobe
from pytest_modelprobe import checks
from pytest_modelprobe.checks import Check

ALL: dict[str, Check] = {name: one for name in checks.__all__ if isinstance(one := getattr(checks, name), Check)}


# --- what is shown of a check -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_the_signature_of_a_check_shows_what_a_user_passes(name: str) -> None:
    shown = str(inspect.signature(ALL[name]))
    assert shown.startswith("(probe, model, /, *inputs, ")
    assert shown.endswith("loss=None, kwargs=None, **model_kwargs)")
    assert all(f" {option}" in shown for option in ALL[name].options)


def test_help_shows_the_signature_of_a_check() -> None:
    signature = "(probe, model, /, *inputs, axis=0, tolerance=None, loss=None, kwargs=None, **model_kwargs)"
    shown = pydoc.plain(pydoc.render_doc(checks.batch_independent))
    assert f"batch_independent{signature}\n    Check that in evaluation mode a row" in shown


def test_the_package_has_the_checks() -> None:
    assert "checks" in dir(pytest_modelprobe)
    assert pytest_modelprobe.__getattr__("checks") is checks  # where nobody has imported them yet
