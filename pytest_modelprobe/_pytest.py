"""Private names of pytest, each with a replacement for versions of pytest without it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import pytest


def fixtures_of(item: pytest.Item) -> set[Any]:
    """Return the definitions of the fixtures that a test depends on; their names if definitions are not available."""
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", None)
    if definitions is None:
        return set(getattr(item, "fixturenames", ()))
    return {definition for found in definitions.values() for definition in found}


def tear_down_before(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Tear down what earlier tests set up and the next one does not need, after a test that set nothing up here."""
    state = getattr(item.session, "_setupstate", None)
    if state is not None:
        state.teardown_exact(nextitem)


def picklable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options of a run that another process can be given: plugins put objects of their own there.

    >>> picklable({"verbose": 1, "reporter": lambda: None})
    {'verbose': 1}
    """
    return {name: value for name, value in values.items() if _is_picklable(value)}


def _is_picklable(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 - an object may raise whatever it likes
        return False
    return True
