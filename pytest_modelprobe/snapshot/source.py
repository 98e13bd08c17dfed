"""Where the class of a layer is written, as far as this process knows it."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

from pytest_modelprobe.record import ROOT, Record, parent


def source_of(record: Record, layer: str, root: Path) -> dict[str, Any] | None:
    """Return file and line of the class of a layer, or of the nearest container whose file is in ``root``.

    The file is relative to ``root``. It is ``None`` for classes of installed packages, and for classes that no module
    holds, such as one that a function made.

    >>> source_of(Record(model="Net"), "fc", Path()) is None
    True
    """
    name = layer
    while True:
        found = record.layers.get(name)
        where = None if found is None or found.functional else _class_source(found.type, root)
        if where is not None or name == ROOT:
            return where
        name = parent(name)


def _class_source(type_name: str, root: Path) -> dict[str, Any] | None:
    module, _, name = type_name.rpartition(".")
    kind = getattr(sys.modules.get(module), name, None)
    if not isinstance(kind, type):
        return None
    try:
        file = Path(inspect.getsourcefile(kind) or "").resolve()
        if not file.is_relative_to(root.resolve()) or "site-packages" in file.parts:
            return None
        return {"file": file.relative_to(root.resolve()).as_posix(), "line": inspect.getsourcelines(kind)[1]}
    except (OSError, TypeError):  # there is no file
        return None
