"""What extras bring: the core finds them by one table and knows none of them.

`pytest_modelprobe.extras` may be missing, or any of its folders: then nothing of it is offered. The table has names and
paths of modules as text, so that asking costs no import of what nobody uses.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_EXTRAS = f"{__package__}.extras"


@dataclass(frozen=True, kw_only=True)
class Extra:
    """What a folder of extras brings. Modules are named from the folder on."""

    needs: Sequence[str] = ()
    """The extras that it imports: it is missing where one of them is."""
    plugin: str | None = None
    """A module with hooks of pytest: options, fixtures, what is done in a run."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """Subcommand of `modelprobe` → the module whose ``add_command`` adds it."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Attribute of the package → its module."""
    checks: Mapping[str, str] = field(default_factory=dict)
    """Attribute of `checks` → its module."""
    probe: Mapping[str, str] = field(default_factory=dict)
    """Method of `ModelProbe` → the module of the function."""
    record: Mapping[str, str] = field(default_factory=dict)
    """Method of `Record` → the module of the function."""


@functools.cache
def _extras() -> Mapping[str, Extra]:
    if importlib.util.find_spec(_EXTRAS) is None:
        return {}
    extras = importlib.import_module(_EXTRAS)
    here = Path(str(extras.__file__)).parent
    table: Mapping[str, Extra] = extras.EXTRAS
    return {name: row for name, row in table.items() if all((here / one).is_dir() for one in (name, *row.needs))}


def plugins() -> list[str]:
    """Return the modules with hooks of pytest."""
    return [f"{_EXTRAS}.{name}.{extra.plugin}" for name, extra in _extras().items() if extra.plugin]


def modules(door: str) -> dict[str, str]:
    """Return name → module of what extras add to a door: ``commands``, ``names``, ``checks``, ``probe``, ``record``."""
    found = {name: getattr(extra, door) for name, extra in _extras().items()}
    return {name: f"{_EXTRAS}.{folder}.{module}" for folder, all_of in found.items() for name, module in all_of.items()}


def attribute(door: str, name: str, owner: str) -> Any:
    """Return what an extra adds to a module; raise `AttributeError` if none adds that name."""
    module = modules(door).get(name)
    if module is None:
        raise AttributeError(f"module {owner!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
