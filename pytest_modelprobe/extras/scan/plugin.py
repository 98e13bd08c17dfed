"""``--modelprobe-model``: the tests of a model that is named on the command line, without a file.

They are collected as others are, so every option of pytest works on them: selection, xdist, reports.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .inputs import Input
    from .target import Target


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("modelprobe")
    group.addoption(
        "--modelprobe-model",
        metavar="MODULE:NAME",
        help="test the model that a function or class makes: its layers, and the standard checks",
    )
    group.addoption(
        "--modelprobe-input",
        action="append",
        default=[],
        metavar="[NAME=]SHAPE[:BELOW]",
        help="an input of that model, such as 8x3x32x32, or ids=8x16:1000 for integers below 1000; may be repeated",
    )


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse a model that cannot be loaded. The controller of xdist does it too: nobody sees the error of a worker."""
    if session.config.option.modelprobe_model is not None:
        _named(session.config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the tests of the model."""
    name = config.option.modelprobe_model
    if name is None:
        return
    from . import model_tests

    module: model_tests.NamedModel = model_tests.NamedModel.from_parent(
        session, path=Path(model_tests.__file__), nodeid=name
    )
    module.target, module.inputs = _named(config)
    items += session.genitems(module)


def _named(config: pytest.Config) -> tuple[Target, list[Input]]:
    """Return what makes the model, and its inputs; raise `pytest.UsageError` if there is no such model."""
    from pytest_modelprobe.exceptions import UsageError

    from .inputs import parse_input
    from .target import load

    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as `python -m pytest` does
    option = "--modelprobe-input"
    try:
        inputs = [parse_input(text) for text in config.option.modelprobe_input]
        option = "--modelprobe-model"
        return load(config.option.modelprobe_model), inputs
    except UsageError as error:
        raise pytest.UsageError(f"{option}: {error}") from None
