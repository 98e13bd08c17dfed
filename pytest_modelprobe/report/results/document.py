"""The results of a whole run of pytest: the document around those of the tests, and its file."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_modelprobe.gate import GitError, Repository
from pytest_modelprobe.record.saving import write_atomically

from .values import text

SCHEMA = 3


def document(
    tests: Sequence[dict[str, Any]],
    unused: Mapping[str, Any],
    *,
    stopped: str | None,
    exit_status: int,
    root: Path,
    seed: int,
    devices: Sequence[str],
    base: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the results of a run of pytest as plain dicts, lists, numbers and strings that strict JSON can hold.

    Args:
        tests: What `observed_data` returned for each test with a probe or a snapshot, and the outcome of the test.
        unused: Files of snapshots that no test uses, and what became of them.
        stopped: Why not every selected test ran to its end, or `None` if each did.
        exit_status: The exit status of pytest.
        root: The root directory of the run.
        seed: The seed of the run.
        devices: The devices of the run.
        base: What was compared with another side, or `None` if nothing was to be.
    """
    torch = next((v for test in tests for run in test["runs"] if (v := run["versions"].get("torch"))), None)
    versions = {
        "pytest-modelprobe": importlib.metadata.version("pytest-modelprobe"),
        "python": platform.python_version(),
        "pytest": importlib.metadata.version("pytest"),
        **({"torch": torch} if torch else {}),
    }
    return {
        "schema": SCHEMA,
        "complete": stopped is None,
        "stopped": None if stopped is None else text(stopped),
        "exit_status": exit_status,
        "versions": versions,
        "commit": _commit(root),
        "root": text(root.name),
        "seed": seed,
        "devices": list(devices),
        "base": base,
        "tests": list(tests),
        **unused,
    }


def _commit(root: Path) -> str | None:
    """Return the hash of the commit that is checked out, or `None` if git knows none."""
    try:
        return Repository(root).commit("HEAD")
    except GitError:
        return None


def write_text(path: Path, content: str) -> None:
    """Write a file in one step; into a terminal or a pipe, such as /dev/stdout, as it is."""
    if path.exists() and not path.is_file():
        path.write_text(content, "utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content.encode())


def as_json(results: Mapping[str, Any]) -> str:
    """Return strict JSON, in ASCII."""
    return json.dumps(results, allow_nan=False, ensure_ascii=True, separators=(",", ":")) + "\n"
