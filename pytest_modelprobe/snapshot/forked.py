"""What forked children of a test's process compared: they tell it in a file, for nothing else of theirs comes back."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any


class Children:
    """The comparisons that processes made which were forked from the one that this was made in.

    Nothing is on disk where there is no such process.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._path = Path(tempfile.gettempdir(), f"modelprobe-{self._process}-{secrets.token_hex(16)}")
        self._told: list[dict[str, Any]] = []

    def tell(self, result: dict[str, Any]) -> None:
        """Tell the process that this was made in of a comparison; in that process there is nobody to tell."""
        if os.getpid() == self._process:
            return
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, f"{json.dumps(result)}\n".encode())  # one write: children may be several
        finally:
            os.close(descriptor)

    @property
    def told(self) -> list[dict[str, Any]]:
        """What children told until now, in the process that this was made in."""
        if os.getpid() == self._process and self._path.exists():
            taken = self._path.with_suffix(".taken")  # what a child tells from now on goes into another file
            self._path.replace(taken)
            self._told += map(json.loads, taken.read_text("utf-8").splitlines())
            taken.unlink()
        return self._told
