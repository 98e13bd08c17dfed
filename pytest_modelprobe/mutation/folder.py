"""The folder of a run, into which each process writes what it finds: a worker may die, and Ctrl-C may end the run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from .plan import BaselineTest, Mutant, Place, Results, Verdict


class Folder:
    """What the processes of a run found.

    Args:
        path: Of the folder.
        process: Name of this process: of a worker of xdist, or ``main``.
    """

    def __init__(self, path: Path, process: str) -> None:
        self.path, self._process = path, process

    def write_tests(self, tests: Collection[BaselineTest], process: str = "") -> None:
        """Write the tests that a process ran, as a whole or not at all."""
        path = self._tests(process or self._process)
        part = path.with_suffix(".part")
        part.write_text(json.dumps([test.to_json() for test in tests]), "utf-8")
        part.replace(path)

    def has_tests(self, process: str) -> bool:
        """Whether a process has run its tests."""
        return self._tests(process).exists()

    def read_tests(self) -> list[BaselineTest]:
        """Return the tests of all processes."""
        read = [json.loads(file.read_text("utf-8")) for file in sorted(self.path.glob("tests-*.json"))]
        tests = [BaselineTest.from_json(test) for tests in read for test in tests]
        return list({test.id: test for test in tests}.values())

    def append(self, **data: Any) -> None:
        """Add to what was found about mutants."""
        with (self.path / f"mutants-{self._process}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(data) + "\n")

    def tried(self) -> tuple[int, int]:
        """Return how many mutants all processes have tried, and how many there are."""
        lines = list(self._lines())
        return sum("mutant" in line for line in lines), max((line.get("total", 0) for line in lines), default=0)

    def results(self) -> tuple[Results, dict[str, list[str]]]:
        """Return what all processes found, and the verdicts by their keys."""
        results, keys = Results(tests=self.read_tests()), {}
        for line in self._lines():
            if "mutant" in line:
                file, place, operator = line["mutant"]
                results.verdicts[Mutant(file, Place(*place), operator)] = Verdict(*line["verdict"])
                results.known += line["known"]
                keys[line["key"]] = line["verdict"]
            results.left_out |= line.get("left_out", {})
            results.stopped = results.stopped or line.get("stopped", "")
            results.total = max(results.total, line.get("total", 0))
            results.runs += line.get("runs", 0)
            results.seconds = max(results.seconds, line.get("seconds", 0.0))
        return results, keys

    def _tests(self, process: str) -> Path:
        return self.path / f"tests-{process}.json"

    def _lines(self) -> Iterator[dict[str, Any]]:
        for file in sorted(self.path.glob("mutants-*.jsonl")):
            for line in file.read_text("utf-8").splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # a worker that was killed wrote half a line
                    yield json.loads(line)
