"""What is known of mutants from earlier runs: verdicts in a file of pytest's cache.

To try a mutant takes as long as its tests. So a verdict is kept, under a digest of all that decides on it: if none of
that changed, the mutant is not tried again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from .plan import BaselineTest, Planned, Verdict

_PACKAGE = Path(__file__).parents[1]
_MOST = 20_000
"""How many verdicts are kept, the newest."""


class Known:
    """Verdicts of this run and of earlier ones. Each is written as soon as it is known, because the run may be killed.

    Args:
        cache: Pytest's cache, or `None` if nothing is read or written.
    """

    def __init__(self, cache: Any) -> None:
        self._path: Path | None = None
        with contextlib.suppress(OSError):  # The folder cannot be written to.
            self._path = None if cache is None else cache.mkdir("modelprobe-mutation") / "verdicts.jsonl"

    @property
    def is_kept(self) -> bool:
        """Whether the next run finds what this one knows."""
        return self._path is not None

    def read(self) -> dict[str, Verdict]:
        """Return key → verdict, and keep only the newest in the file."""
        lines = self._path.read_text("utf-8").splitlines() if self._path and self._path.exists() else []
        found: dict[str, Verdict] = {}
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):  # A run that was killed wrote a part of a line.
                key, *verdict = json.loads(line)
                found[key] = Verdict(*verdict)
        if self._path and len(lines) > 4 * _MOST:
            found = dict(list(found.items())[-_MOST:])
            part = self._path.with_suffix(".part")
            part.write_text("".join(_line(key, verdict) for key, verdict in found.items()), "utf-8")
            part.replace(self._path)
        return found

    def add(self, key: str, verdict: Verdict) -> None:
        """Write a verdict."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(key, verdict))


def _line(key: str, verdict: Verdict) -> str:
    # The line begins with its break, because what stands before it may be a part of a line.
    return f"\n{json.dumps([key, *verdict])}"


class Keys:
    """Digests of what decides on a mutant.

    That is the fault, the names of the tests, their files, each conftest.py above them, their snapshots, the files of
    the classes of all modules of the model, this package and torch, and the modules of the project that were imported,
    except for files of other tests that nobody imports.

    Args:
        tests: The tests by node id.
        modules: The files of the project that were imported.
    """

    def __init__(self, tests: Mapping[str, BaselineTest], modules: Iterable[str]) -> None:
        self._tests, self._digest = tests, functools.cache(_digest)
        package = [str(file) for file in sorted(_PACKAGE.rglob("*.py"))]
        of_tests = {test.path for test in tests.values()}
        shared = hashlib.sha256(f"{sys.version}|{torch.__version__}".encode())
        for file in (*package, *_helpers(sorted(modules), of_tests)):
            shared.update(self._digest(file))
        self._shared = shared.digest()

    def of(self, one: Planned) -> str:
        """Return the digest of a mutant."""
        digest = hashlib.sha256(self._shared)
        digest.update(one.mutant.key.encode(errors="surrogatepass"))
        for name in sorted(one.tests):
            digest.update(f"|{name}".encode(errors="surrogatepass"))
            for file in _files_of(self._tests[name]):
                digest.update(self._digest(str(file)))
        return digest.hexdigest()[:32]


def _helpers(modules: list[str], of_tests: set[str]) -> list[str]:
    """Return modules without the files of tests, except those whose name stands in another module."""
    words = {module: set(re.findall(rb"\w+", _content(module))) for module in modules if module.endswith(".py")}
    named = Counter(word for found in words.values() for word in found)
    return [m for m in modules if m not in of_tests or named[name := Path(m).stem.encode()] > (name in words[m])]


def _files_of(test: BaselineTest) -> list[Path]:
    path = Path(test.path)
    beside = [path.parent / name / path.stem for name in ("__modelprobe__", "__snapshots__")]
    snapshots = [file for folder in beside for file in sorted(folder.rglob("*"))]
    return [path, *(folder / "conftest.py" for folder in path.parents), *map(Path, test.sources), *snapshots]


def _content(file: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(file).read_bytes()
    return b""


def _digest(file: str) -> bytes:
    return hashlib.sha256(_content(file)).digest()


def modules_of(root: Path) -> list[str]:
    """Return the files below a folder that were imported, without those of installed packages."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    paths = [Path(file) for file in files if isinstance(file, str)]
    return sorted(str(path) for path in paths if path.is_relative_to(root) and "site-packages" not in path.parts)
