"""The tests of a model that is named on the command line, without a file.

They are collected as others are, so every option of pytest works on them: selection, xdist, reports.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .settings import Settings

if TYPE_CHECKING:
    from pytest_modelprobe.cli.scanning import Input, Target


def load_named(settings: Settings) -> tuple[Target, list[Input]]:
    """Return what makes the model, and its inputs; raise `pytest.UsageError` if there is no such model."""
    from pytest_modelprobe.cli import scanning
    from pytest_modelprobe.exceptions import UsageError

    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as `python -m pytest` does
    assert settings.model is not None
    option = "--modelprobe-input"
    try:
        inputs = [scanning.parse_input(text) for text in settings.inputs]
        option = "--modelprobe-model"
        return scanning.load(settings.model), inputs
    except UsageError as error:
        raise pytest.UsageError(f"{option}: {error}") from None


def tests_of_named_model(session: pytest.Session, settings: Settings) -> Iterator[pytest.Item]:
    """Yield the tests of the model."""
    from pytest_modelprobe.cli.scanning import model_tests

    module: model_tests.NamedModel = model_tests.NamedModel.from_parent(
        session, path=Path(model_tests.__file__), nodeid=settings.model
    )
    module.target, module.inputs = load_named(settings)
    yield from session.genitems(module)
