"""What extras bring: the core finds them by one table and knows none of them.

`pytest_modelprobe.extras` may be missing, or any of its folders: then nothing of it is offered. The table has names and
paths of modules as text, so that asking costs no import of what nobody uses.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

_EXTRAS = f"{__package__}.extras"

_NOTHING: Mapping[str, str] = MappingProxyType({})


class Extra(NamedTuple):
    """What a folder of extras brings. Modules are named from the folder on."""

    needs: Sequence[str] = ()
    """The extras that it imports: it is missing where one of them is."""
    plugin: str | None = None
    """A module with hooks of pytest: options, fixtures, what is done in a run."""
    marker: Mapping[str, str] = _NOTHING
    """Argument of the marker → ``module:function`` that returns which argument is wrong, and why."""
    commands: Mapping[str, str] = _NOTHING
    """Subcommand of `modelprobe` → the module whose ``add_command`` adds it."""
    names: Mapping[str, str] = _NOTHING
    """Attribute of the package → its module."""
    checks: Mapping[str, str] = _NOTHING
    """Attribute of `checks` → its module."""
    apart: Mapping[str, str] = _NOTHING
    """Name of a check → why `checks.standard` leaves it to be called by itself."""
    trainers: Mapping[str, str] = _NOTHING
    """Attribute of `trainers` → its module."""
    exporters: Mapping[str, str] = _NOTHING
    """Attribute of `report.exporters` → its module."""
    explanations: Mapping[str, str] = _NOTHING
    """What is explained → ``module:function`` that returns sentences on it; see `explained`."""
    selection: str | None = None
    """A module with `differing_definitions` and `Use`, by which fewer tests run on two sides."""
    comparison: Mapping[str, str] = _NOTHING
    """Attribute of `comparison` → its module."""
    runs: Mapping[str, str] = _NOTHING
    """Attribute of `runs` → its module."""
    probe: Mapping[str, str] = _NOTHING
    """Method of `ModelProbe` → the function, as ``module:function`` if its name is another."""
    watch: Mapping[str, str] = _NOTHING
    """The same of `Watch`."""
    record: Mapping[str, str] = _NOTHING
    """The same of `Record`."""


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
    """Return name → module of what extras add to a door: ``commands``, ``names``, ``checks``, ``probe`` and others."""
    found = {name: getattr(extra, door) for name, extra in _extras().items()}
    return {name: f"{_EXTRAS}.{folder}.{module}" for folder, all_of in found.items() for name, module in all_of.items()}


def reasons() -> dict[str, str]:
    """Return name → why `checks.standard` leaves a check of an extra to be called by itself."""
    return {name: why for extra in _extras().values() for name, why in extra.apart.items()}


def imported(place: str, name: str) -> Any:
    """Return what ``module:attribute`` is, or the attribute of that name where a module alone is given."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute or name)


class _Member:
    """A function or property of a module that is imported when it is asked for, as an attribute of a class."""

    def __init__(self, place: str, name: str) -> None:
        self._place, self._name = place, name

    def __get__(self, instance: object, owner: type) -> Any:
        return imported(self._place, self._name).__get__(instance, owner)


def explained(what: str, *given: Any) -> list[str]:
    """Return what an extra says of something that it can explain, as texts; nothing without the extra.

    Args:
        what: ``diagnosis``, ``pair`` of calls, ``record``, ``pair of records``, ``run`` that does not repeat, two
            ``runs`` that differ, ``graph`` of a model, or ``compiled graph``.
        given: The arguments of the function of the extra.
    """
    place = modules("explanations").get(what)
    return [] if place is None else list(imported(place, what)(*given))


def selection() -> Any:
    """Return the module that says which definitions a test uses, or `None`."""
    found = [f"{_EXTRAS}.{name}.{extra.selection}" for name, extra in _extras().items() if extra.selection]
    return importlib.import_module(found[0]) if found else None


def attach(owner: type, door: str) -> None:
    """Give a class the methods and properties that extras add to it."""
    for name, place in modules(door).items():
        setattr(owner, name, _Member(place, name))


def attribute(door: str, name: str, owner: str) -> Any:
    """Return what an extra adds to a module; raise `AttributeError` if none adds that name."""
    place = modules(door).get(name)
    if place is None:
        raise AttributeError(f"module {owner!r} has no attribute {name!r}")
    return imported(place, name)
