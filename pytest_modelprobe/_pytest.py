"""The private names of pytest that are used here, with what does without them: a later pytest may not have them."""

from __future__ import annotations

from typing import Any

import pytest


def fixtures_of(item: pytest.Item) -> set[Any]:
    """Return the definitions of the fixtures that a test depends on; their names where pytest does not tell more."""
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", None)
    if definitions is None:
        return set(getattr(item, "fixturenames", ()))
    return {definition for found in definitions.values() for definition in found}
