"""A mutated snapshot in a repository: what `check`, `log` and pytest make of it; and mutated results, for `report`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from mutations import Bytes, changed, mutated_bytes

from pytest_modelprobe.files import Texts, decode
from pytest_modelprobe.record import Record

Ask = Callable[..., tuple[int, str, str]]
"""Runs the command, and returns the exit code and both outputs."""
ENDINGS = (".arch.json", ".probe.json")
TEST = "def test_net(record, modelprobe_snapshot):\n    assert record == modelprobe_snapshot\n"
_OPTIONS = (
    "-q",
    "--import-mode=importlib",
    "-p",
    "pytest_modelprobe.plugin",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:faulthandler",
    "-c",
    os.devnull,
)


def place(folder: Path, files: Bytes) -> Path:
    """Write the files of a snapshot into a folder, and return the name of both."""
    there = folder / "__modelprobe__" / "test_net"
    there.mkdir(parents=True, exist_ok=True)
    for ending, data in zip(ENDINGS, files, strict=True):
        path = there / f"test_net{ending}"
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
    return there / "test_net"


def as_bytes(texts: Texts) -> Bytes:
    """Return the contents of both files."""
    return texts.architecture.encode(), texts.numbers and texts.numbers.encode()  # type: ignore[return-value]


class Project:
    """A repository with a test and a snapshot for each original, and the results of its tests."""

    def __init__(self, texts: dict[str, Texts], folder: Path) -> None:
        self.texts, self.folder = texts, folder
        # As that of a step: pytest compares no record of a whole loop.
        self.records = {n: dataclasses.replace(decode(*pair, where=n).record, step=0) for n, pair in texts.items()}
        for name, pair in texts.items():
            place(self.at(name), as_bytes(pair))
            (self.at(name) / "test_net.py").write_text(TEST)
        self._git("init", "-q")
        self._git("add", "-A")
        self._commit()
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        results = folder.parent / "results.json"
        for name in texts:
            code, said = self.tested(name, f"--modelprobe-json={results}")
            assert code == 0, said
        self.results = results.read_text("utf-8")

    def at(self, name: str) -> Path:
        """Return the folder of an original."""
        return self.folder / str(list(self.texts).index(name))

    def copied(self) -> Project:
        """Return a copy for this process alone."""
        mine = object.__new__(Project)
        mine.__dict__.update(self.__dict__)
        mine.folder = self.folder.with_name(f"repository-{os.getpid()}")
        shutil.copytree(self.folder, mine.folder)
        return mine

    def judged(self, name: str, files: Bytes, refused: bool, how: str, ask: Ask) -> tuple[str, str]:
        """Return what is wrong with the answer of a command, and the answer; nothing if nothing is."""
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            place(self.at(name), files)
            return getattr(self, f"_{how}")(name, files, refused, ask)
        finally:
            place(self.at(name), as_bytes(self.texts[name]))
            os.chdir(before)

    def _check(self, name: str, files: Bytes, refused: bool, ask: Ask) -> tuple[str, str]:
        code, out, err = ask("check", "--base", "HEAD", "--format", "json")
        if code == 2:
            return (wrong_refusal(err) if refused else "check refuses what is shown"), err
        if refused:
            return "check passes what is not shown", out
        same = files == as_bytes(self.texts[name])
        return ("" if same or json.loads(out)["changes"] else "check sees no change"), out[:2000]

    def _pytest(self, name: str, files: Bytes, refused: bool, ask: Ask) -> tuple[str, str]:
        code, said = self.tested(name)
        if code not in (0, 1) or "INTERNALERROR" in said:
            return f"pytest ends with {code}", said[-2000:]
        if code == 0 and refused:
            return "pytest passes what is not shown", said
        unexpected = code == 1 and "AssertionError" not in said
        return ("pytest raises another error" if unexpected else ""), said[-2000:]

    def tested(self, name: str, *options: str) -> tuple[int, str]:
        """Return the exit code and the output of pytest for the record of an original."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            path = str(self.at(name) / "test_net.py")
            code = pytest.main([*_OPTIONS, f"--rootdir={self.folder}", *options, path], [_Given(self.records[name])])
        return int(code), out.getvalue()

    def _git(self, *arguments: str) -> None:
        subprocess.run(("git", *arguments), cwd=self.folder, check=True, capture_output=True)

    def _commit(self) -> None:
        who = ("-c", "user.name=fuzz", "-c", "user.email=fuzz@example.org", "-c", "commit.gpgsign=false")
        self._git(*who, "commit", "-q", "--allow-empty", "-m", "a version")


class _Given:
    """A plugin that gives a test its record."""

    def __init__(self, record: Record) -> None:
        self._record = record

    @pytest.fixture
    def record(self) -> Record:
        return self._record


def wrong_refusal(said: str) -> str:
    """Return what is wrong with a refusal: it is one printable line, and not long."""
    line = said.strip()
    fits = "\n" not in line and line.isprintable() and len(line) <= 1000 and line.startswith("modelprobe: ")
    return "" if fits else "a bad message"


def reported(results: str, draw: random.Random, folder: Path, ask: Ask) -> tuple[str, str, str]:
    """Return how a file of results is mutated, what is wrong with the answer of `report`, and the answer."""
    path, form = folder / "results.json", draw.choice(["html", "markdown"])
    if draw.random() < 0.2:
        how, data = mutated_bytes(results.encode(), draw)
    else:
        content = json.loads(results)
        how = changed(content, draw)
        data = json.dumps(content).encode("utf-8", "surrogatepass")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    code, out, err = ask("report", str(path), "--format", form, "-o", str(folder / "report"))
    return f"report {form}: {how}", wrong_refusal(err) if code else "report writes to the terminal" if out else "", err
