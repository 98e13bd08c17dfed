"""Results of comparisons in forked child processes, sent to the process of the test through a temporary file.

A test may fork and compare in the child. An error that is raised there ends the child and nothing else, so the test
would pass.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any


class ForkedResults:
    """The comparisons in processes that were forked from the one in which this object was created.

    Without such a process there is no file.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._path = Path(tempfile.gettempdir(), f"modelprobe-{self._process}-{secrets.token_hex(16)}")
        self._received: list[dict[str, Any]] = []

    def send(self, result: dict[str, Any]) -> None:
        """Send a result to the parent process; do nothing in the parent itself."""
        if os.getpid() == self._process:
            return
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, f"{json.dumps(result)}\n".encode())  # one write: there may be several children
        finally:
            os.close(descriptor)

    @property
    def received(self) -> list[dict[str, Any]]:
        """The results that children have sent so far; empty in a child."""
        if os.getpid() == self._process and self._path.exists():
            taken = self._path.with_suffix(".taken")  # children that write from now on create a new file
            self._path.replace(taken)
            self._received += map(json.loads, taken.read_text("utf-8").splitlines())
            taken.unlink()
        return self._received
