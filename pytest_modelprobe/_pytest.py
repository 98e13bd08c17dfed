"""Private names of pytest, each with a replacement for versions of pytest without it."""

from __future__ import annotations

from typing import Any

import pytest


def fixtures_of(item: pytest.Item) -> set[Any]:
    """Return the definitions of the fixtures that a test depends on; their names if definitions are not available."""
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", None)
    if definitions is None:
        return set(getattr(item, "fixturenames", ()))
    return {definition for found in definitions.values() for definition in found}
