"""What a change that makes the package smaller must not move: lines of code, public names, records of the examples.

``python tests/test_frozen.py`` writes the lines of code of `frozen.json` again. The public names in it are those
that were there once: what is added since is not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import runpy
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import pytest_modelprobe
from pytest_modelprobe import ModelProbe, ModelProbeSnapshot, Record, Watch, checks, files

ROOT = Path(__file__).parent.parent
FROZEN = Path(__file__).with_name("frozen.json")
DATA = {".c", ".css", ".h", ".html", ".js", ".json"}
"""Endings of files in which a line counts as one of code if it is not empty."""

HOUSE = runpy.run_path(str(ROOT / "docs" / "make_house_map.py"))
"""The script that draws the rooms, which counts their lines too."""


def lines_of(path: Path) -> int:
    """Return the lines of code of a file, without blank lines, comments and docstrings."""
    text = path.read_text("utf-8")
    if path.suffix in DATA:
        return sum(bool(line.strip()) for line in text.splitlines())
    return len(HOUSE["lines_of"](text, path.stem).code)


def lines_by_room() -> dict[str, int]:
    """Return the lines of code of each room: a module or a folder of the package."""
    package, counts = ROOT / "pytest_modelprobe", Counter[str]()
    for path in package.rglob("*"):
        if path.suffix in {".py", *DATA}:
            counts[path.relative_to(package).parts[0]] += lines_of(path)
    return dict(sorted(counts.items()))


def public_names() -> dict[str, list[str]]:
    """Return the names that a test may use."""
    classes = {kind.__name__: kind for kind in (ModelProbe, ModelProbeSnapshot, Record, Watch)}
    named = {name: [one for one in dir(kind) if not one.startswith("_")] for name, kind in classes.items()}
    return {"package": sorted(pytest_modelprobe.__all__), "checks": sorted(checks.__all__), **named}


def plain(value: Any) -> Any:
    """Return what differs from its default in a dataclass, by field, however it is stored."""
    if dataclasses.is_dataclass(value):
        found = {field.name: (field, getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {name: plain(one) for name, (field, one) in found.items() if not is_default(field, one)}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, (tuple, list)) else repr(value)


def is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return bool(value == field.default)


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(plain(value), sort_keys=True).encode()).hexdigest()[:12]


def stored_records() -> dict[str, dict[str, str]]:
    """Return the digest of each layer of the snapshots of the examples, and of the record without its layers."""
    found = {}
    folder = ROOT / "examples" / files.DIRECTORY
    for path in sorted(folder.rglob(f"*{files.ARCH}")):
        record = files.read(path).record
        layers = {name: digest(layer) for name, layer in record.layers.items()}
        found[path.relative_to(folder).as_posix()] = {
            **layers,
            "(record)": digest(dataclasses.replace(record, layers={})),
        }
    return found


@pytest.fixture(scope="module")
def frozen() -> dict[str, Any]:
    return dict(json.loads(FROZEN.read_text("utf-8")))


def test_no_room_has_more_lines_of_code(frozen: dict[str, Any]) -> None:
    counted = lines_by_room()
    assert counted
    grown = {room: lines for room, lines in counted.items() if lines > frozen["lines"].get(room, 0)}
    limits = {room: frozen["lines"].get(room, 0) for room in grown}
    assert grown == {}, f"the limits are {limits}: see CONTRIBUTING.md, How to add"


def test_public_names_are_the_same_but_for_those_that_are_listed(frozen: dict[str, Any]) -> None:
    pytest.importorskip("pytest_modelprobe.extras", reason="some of the names are theirs")
    gone = {f"{kind}.{name}" for kind, names in frozen["names"].items() for name in names}
    gone -= {f"{kind}.{name}" for kind, names in public_names().items() for name in names}
    assert gone <= set(frozen["leaves"])


def test_the_snapshots_of_the_examples_are_read_as_the_same_records(frozen: dict[str, Any]) -> None:
    assert stored_records() == frozen["records"]


if __name__ == "__main__":
    # Names and records stay those of the beginning.
    FROZEN.write_text(
        json.dumps({**json.loads(FROZEN.read_text("utf-8")), "lines": lines_by_room()}, indent=1) + "\n", "utf-8"
    )
