"""Writes the records of each test to files, from which the other side reads them.

A record of a run is written as soon as it is made, because what follows in the test may change the model. A watch is
written when the test has ended, before its fixtures are torn down. Evidence, which costs several runs of the model, is
made for those records alone of which a first comparison said that they differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from pytest_modelprobe.comparison import compare
from pytest_modelprobe.exceptions import ModelProbeError
from pytest_modelprobe.record import Record


@dataclass(frozen=True, slots=True)
class Written:
    """A record that a test made, as it was written."""

    test: str
    """The node id."""
    key: str
    """Which record of the test: ``run 1``, ``architecture 2``, ``watch 1``."""
    record: Record
    sources: Mapping[str, str] = field(default_factory=dict)
    """The modules of Python that the classes of the model are from → their files."""
    tensors: Path | None = None
    """The outputs of the layer that was kept, by call and path: a file of `torch.save`."""


class Recorder:
    """A plugin that writes what the probes of a run record.

    Args:
        folder: Where to write.
        evidence: Whether the records get isolated responses, and noise if there is nothing they are compared with.
        like: The folder with the evidence of the other side, with which these records are to be compared.
        keep: Test → key of a record → the layer whose outputs are kept.
    """

    def __init__(
        self,
        folder: Path,
        *,
        evidence: bool = False,
        like: Path | None = None,
        keep: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self._folder, self._evidence, self._like = folder, evidence, like
        self._keep = keep or {}
        self._test = ""
        self._made = 0
        self._watches: list[Any] = []

    # --- what the probe calls -----------------------------------------------------------------------------------------

    def kept_layer(self) -> str | None:
        """Return the layer whose outputs the next run keeps."""
        return self._keep.get(self._test, {}).get(f"run {self._made + 1}")

    def recorded(self, kind: str, record: Record, model: Any, kept: Mapping[str, Sequence[Any]] | None = None) -> None:
        """Write a record.

        Args:
            kind: ``run`` or ``architecture``.
            record: The record.
            model: The model.
            kept: The outputs of the layer of `kept_layer`.
        """
        self._made += 1
        self._write(f"{kind} {self._made}", record, model, kept)

    def watched(self, watch: Any) -> None:
        """Note a watch, whose record is written when the test ends."""
        self._watches.append(watch)

    # --- what pytest calls --------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note which test runs."""
        self._test = item.nodeid
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Forget what the test recorded, if it runs again."""
        shutil.rmtree(self._folder / _name(self._test), ignore_errors=True)
        self._made = 0
        self._watches.clear()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        """Write the watches of the test."""
        for number, watch in enumerate(self._watches, 1):
            with contextlib.suppress(ModelProbeError):  # nothing was observed
                record = watch.first_step if watch.counts.steps else watch.first
                self._write(f"watch {number}", record, watch.model)
        self._watches.clear()

    # --- files --------------------------------------------------------------------------------------------------------

    def _write(self, key: str, record: Record, model: Any, kept: Mapping[str, Sequence[Any]] | None = None) -> None:
        if not self._test:  # a probe that a plugin made
            return
        folder = self._folder / _name(self._test)
        folder.mkdir(parents=True, exist_ok=True)
        stem = key.replace(" ", "-")
        if self._evidence:
            record = self._with_evidence(key, record)
        data = {"test": self._test, "key": key, "record": record.to_dict(), "sources": dict(_sources(model))}
        tensors = _tensors(kept) if kept else {}
        if tensors:
            import torch

            torch.save(tensors, folder / f"{stem}.pt")
        (folder / f"{stem}.json").write_text(json.dumps(data, allow_nan=False), "ascii")

    def _with_evidence(self, key: str, record: Record) -> Record:
        """Return the record with what a diagnosis needs to tell a cause from what follows it."""
        live_run = record.live_run
        if live_run is None:
            return record
        if self._like is None:
            return live_run.measured(live_run.isolated(record, own_arguments=True))
        other = _read(self._like / _name(self._test) / f"{key.replace(' ', '-')}.json")
        if other is None:
            return live_run.isolated(record)
        found = compare(record, other.record)
        return live_run.isolated(record, like=found.expected, names=found.names_before)


def read_written(folder: Path) -> dict[tuple[str, str], Written]:
    """Return the records in a folder by test and key, in the order in which the tests made them."""
    found = (_read(path) for path in sorted(folder.glob("*/*.json"), key=lambda path: path.stat().st_mtime_ns))
    return {(one.test, one.key): one for one in found if one is not None}


def _read(path: Path) -> Written | None:
    if not path.is_file():
        return None
    data = json.loads(path.read_text("ascii"))
    tensors = path.with_suffix(".pt")
    record = Record.from_dict(data["record"])
    return Written(data["test"], data["key"], record, data["sources"], tensors if tensors.is_file() else None)


def _name(test: str) -> str:
    return hashlib.sha256(test.encode()).hexdigest()[:20]


def _sources(model: Any) -> Iterator[tuple[str, str]]:
    """Yield the modules of Python that the classes of a model are from, with their files."""
    classes: Collection[type] = {type(module) for module in model.modules()}
    for name in sorted({cls.__module__ for cls in classes}):
        file = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(file, str):
            yield name, str(Path(file).resolve())


def _tensors(kept: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the tensors of kept outputs by call and path, on the CPU."""
    from pytest_modelprobe.models import flatten

    return {
        f"{call} {path}": cast(Any, tensor).detach().cpu().clone()
        for outputs in kept.values()
        for call, output in enumerate(outputs)
        for path, tensor in flatten("output", output).tensors
    }
