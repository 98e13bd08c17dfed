"""``--modelprobe-save``: the call of the layer that made a comparison fail, as a file."""

from __future__ import annotations

import importlib.util
from collections.abc import Generator
from typing import Any

import pytest

from pytest_modelprobe.plugin import COMPARER, SETTINGS


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("modelprobe").addoption(
        "--modelprobe-save",
        metavar="DIR",
        help="for each comparison that fails, write the call of the layer that is the cause into this folder, for "
        "`modelprobe replay`",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse the option if the files cannot be written."""
    if config.option.modelprobe_save and importlib.util.find_spec("safetensors") is None:
        raise pytest.UsageError("--modelprobe-save writes files of safetensors: pip install safetensors")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Write a file for each comparison of a test that failed, and say where."""
    report = yield
    folder = item.config.option.modelprobe_save
    if folder and report.when == "call" and report.failed and not item.config.stash[SETTINGS].unreported:
        comparer, error = item.stash.get(COMPARER, None), call.excinfo and call.excinfo.value
        outcomes = () if comparer is None else comparer.outcomes
        found = [one.diagnosis for one in outcomes if not (one.passed or one.is_expected)]
        found.append(getattr(error, "diagnosis", None))
        if any(found):
            from pytest_modelprobe.text import printable

            from .saving import save

            for number, diagnosis in enumerate(filter(None, found), start=1):
                try:
                    line = save(diagnosis, folder, item, number)
                except Exception as error:  # noqa: BLE001 - the run must go on, whatever a disk or a model does
                    line = f"no call is saved: {type(error).__name__}: {error}"
                report.sections.append(("modelprobe", printable(line)))
    return report
