"""The tests of the model that ``--modelprobe-model`` names. The plugin collects this file."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from pytest_modelprobe import assertions
from pytest_modelprobe.checks import STANDARD
from pytest_modelprobe.probe import ModelProbe
from pytest_modelprobe.record import Record

from .inputs import Input
from .scanning import ScannedModel, applicable_assertions
from .target import Target


class NamedModel(pytest.Module):
    """This file, as it is collected for a model."""

    target: Target
    inputs: list[Input]
    """Empty: they are guessed."""

    def istestfunction(self, obj: object, name: str) -> bool:
        """Whether it is a test of this file, whatever ``python_functions`` of the project says."""
        return name.startswith("test_")

    def istestclass(self, obj: object, name: str) -> bool:
        """No: this file has no classes of tests, whatever ``python_classes`` says."""
        return False

    @functools.cache  # noqa: B019 - it lives as long as the session
    def scanned(self, device: torch.device, seed: int) -> ScannedModel:
        """Return the model and its inputs, with one record for all tests."""
        command = "pytest --modelprobe-model={}", "--modelprobe-input="
        return ScannedModel(self.target, ModelProbe(device, seed), self.inputs, command=command)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each assertion and of each standard check."""
    for argument, names in (("assertion", applicable_assertions(Record(model="", backwards=1))), ("check", STANDARD)):
        if argument in metafunc.fixturenames:
            metafunc.parametrize(argument, list(names))


@pytest.fixture
def scanned(request: pytest.FixtureRequest, modelprobe: ModelProbe) -> ScannedModel:
    """The model on the device of the test."""
    module: Any = request.node.getparent(NamedModel)
    found: ScannedModel = module.scanned(modelprobe.device, modelprobe.seed)
    return found


def test_layers(scanned: ScannedModel, assertion: str) -> None:
    """Assert what any model is expected to pass."""
    __tracebackhide__ = True
    record = scanned.record
    if assertion not in applicable_assertions(record):
        pytest.skip("no output has a gradient")
    getattr(assertions, assertion)(record)


def test_standard(scanned: ScannedModel, modelprobe: ModelProbe, check: str) -> None:
    """Assert that a standard check holds."""
    __tracebackhide__ = True
    [outcome] = ScannedModel(scanned.target, modelprobe, scanned.inputs).outcomes([check])
    if outcome.verdict == "not applicable":
        pytest.skip(str(outcome))
    if outcome.verdict == "broken":
        raise AssertionError(str(outcome))
    outcome.warn(stacklevel=2)
