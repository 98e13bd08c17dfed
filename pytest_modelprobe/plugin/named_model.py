"""The tests of a model that is named on the command line, without a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .settings import Settings


def tests_of_named_model(session: pytest.Session, settings: Settings) -> Iterator[pytest.Item]:
    """Yield the tests of the model; `pytest.UsageError` if there is none of that name."""
    from pytest_modelprobe import scan
    from pytest_modelprobe.exceptions import UsageError
    from pytest_modelprobe.scan import model_tests

    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as `python -m pytest` does
    assert settings.model is not None
    try:
        target, inputs = scan.load(settings.model), [scan.parse_input(text) for text in settings.inputs]
    except UsageError as error:
        raise pytest.UsageError(f"--modelprobe-model: {error}") from None
    module: model_tests.NamedModel = model_tests.NamedModel.from_parent(
        session, path=Path(model_tests.__file__), nodeid=settings.model
    )
    module.target, module.inputs = target, inputs
    yield from session.genitems(module)
