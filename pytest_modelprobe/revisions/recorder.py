"""Writes the records of each test to files, from which the other side reads them.

A record of a run is written as soon as it is made, because what follows in the test may change the model. A watch is
written when the test has ended, before its fixtures are torn down.

Evidence costs several runs of the model, so a record gets it only if it differs from that of the other side. The side
that runs second sees this while its model is there. The side that ran first runs once more with the tests that differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import operator
import shutil
import sys
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_modelprobe.comparison import explained, layers_behind_zeros
from pytest_modelprobe.exceptions import ModelProbeError
from pytest_modelprobe.record import Record, is_narrow

from .dependencies import code_differs
from .pairs import Written, compare_records, folder_of, read_one, read_written

_REASONS = "reasons"
"""The folder, in a folder of records, of the reasons why models are not watched."""


def read_reasons(folder: Path) -> list[tuple[str, str]]:
    """Return each test with a model that was not watched, and why."""
    found = [file.read_text("utf-8", "surrogateescape") for file in sorted((folder / _REASONS).glob("*.txt"))]
    return [(test, why) for test, _, why in (text.partition("\n") for text in found)]


def is_probed(item: pytest.Item) -> bool:
    """Whether a test has a probe, so that it says itself what is recorded."""
    return not {"modelprobe", "modelprobe_factory"}.isdisjoint(getattr(item, "fixturenames", ()))


class Recorder:
    """A plugin that writes what the probes of a run record.

    Args:
        folder: Where to write.
        evidence: Whether all records get evidence.
        beside: The folder of the records that the other side made first. Those that differ from these get evidence.
        like: The folder of the records of the other side. Those that have evidence there get it here, made to what it
            was made to there.
        own_paths: Folders that this side alone has. Texts in records that begin with one of them are no difference.
    """

    def __init__(
        self,
        folder: Path,
        *,
        evidence: bool = False,
        beside: Path | None = None,
        like: Path | None = None,
        own_paths: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._evidence, self._beside, self._like = evidence, beside, like
        self._own_paths = own_paths
        self._test = ""
        self._is_probed = self._fails = False
        self._made = 0
        self._watches: list[tuple[Any, str | None]] = []

    # --- what the probe calls -----------------------------------------------------------------------------------------

    def recorded(self, kind: str, record: Record, model: Any) -> None:
        """Write a record.

        Args:
            kind: ``run`` or ``architecture``.
            record: The record.
            model: The model.
        """
        self._made += 1
        self._write(self._plain(f"{kind} {self._made}", record, model))

    def watched(self, watch: Any, key: str | None = None) -> None:
        """Note a watch, whose record is written when the test ends.

        Args:
            watch: The watch.
            key: The key of the record, of a model that the test did not ask to be watched.
        """
        self._watches.append((watch, key))

    def unwatched(self, reason: str) -> None:
        """Note why a model of the test is not watched, once."""
        folder = self._folder / _REASONS
        folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(f"{self._test}\n{reason}".encode(errors="surrogatepass")).hexdigest()
        (folder / f"{name}.txt").write_text(f"{self._test}\n{reason}", "utf-8", "surrogateescape")

    # --- what pytest calls --------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note which test runs."""
        self._test, self._is_probed = item.nodeid, is_probed(item)
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Forget what the test recorded, if it runs again."""
        shutil.rmtree(folder_of(self._folder, self._test), ignore_errors=True)
        self._made, self._fails = 0, False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take back what a test recorded that did not pass. A test with a probe says itself what is recorded."""
        if not self._is_probed and (not report.passed or hasattr(report, "wasxfail")):
            self._fails = True
            shutil.rmtree(folder_of(self._folder, self._test), ignore_errors=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        """Write the watches of the test."""
        watches, self._watches = self._watches, []
        asked = [watch for watch, key in watches if key is None]
        for number, watch in enumerate(asked, 1):
            with contextlib.suppress(ModelProbeError):
                record = watch.first_step if watch.steps else watch.first
                self._write(self._plain(f"watch {number}", record, watch.model))
        found: list[Written] = []
        for watch, key in watches:
            if key is not None and not self._fails:
                with self._told():
                    record = watch.first_step if watch.steps else watch.record
                    found.append(self._plain(key, record, watch.model))
        if self._beside is not None:
            _take_keys(found, read_written(self._beside, self._test).values())
        for plain in found:
            with self._told():
                self._write(plain)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Note why a model cannot be recorded: nobody asked for it, so it fails no test."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever a model raises
            self.unwatched(f"{type(error).__name__}: {error}".partition("\n")[0])

    # --- files --------------------------------------------------------------------------------------------------------

    def _plain(self, key: str, record: Record, model: Any) -> Written:
        return Written(self._test, key, record, dict(_sources(model)), own_paths=self._own_paths)

    def _write(self, plain: Written) -> None:
        if not self._test:  # a probe that a plugin made
            return
        written, equal = plain, None
        if self._like is not None and (like := read_one(self._like, plain.test, plain.key)) is not None:
            written = _with_evidence_like(plain, like)
        elif self._beside is not None and (beside := read_one(self._beside, plain.test, plain.key)) is not None:
            written = _with_evidence_if_differing(plain, beside)
            equal = self._beside if written is plain and plain.head.digest == beside.head.digest else None
        elif self._evidence:
            written = _with_evidence(plain)
        written.write(self._folder, equal=equal)


def _take_keys(here: Sequence[Written], there: Iterable[Written]) -> None:
    """Give records the keys by which the other side knows the models, which nobody asked to be watched.

    A side may make or call other models of a class first. So models are paired by class and names of layers, and what
    is left by class: one of the same key, or else the first.
    """
    unpaired, left = list(here), {one.key: one for one in there}
    for fields in (("head.model", "head.names"), ("head.model",)):
        like = operator.attrgetter(*fields)
        for one in unpaired[:]:
            candidates = filter(None, (left.get(one.key), *left.values()))
            partner = next((other for other in candidates if like(other) == like(one)), None)
            if partner is not None:
                one.key = left.pop(partner.key).key
                unpaired.remove(one)
    for one in unpaired:
        one.key += ", of this side alone"


def _with_evidence(plain: Written, only: Sequence[str] = (), differing: Sequence[str] = ()) -> Written:
    """Return a record with what a diagnosis needs to tell a cause from what follows it.

    Args:
        plain: The record.
        only: The layers that are called alone, of a record that is equal to that of the other side; empty: all.
        differing: The layers whose code differs.
    """
    live_run, record = plain.record.live_run, plain.record
    if live_run is not None:
        record = live_run.isolated(record, only=only) if only else live_run.measured(record, record)
    return plain.replaced(record, evidence=True, only=only, explained=explained("record", record, only or differing))


def _with_evidence_if_differing(there: Written, here: Written) -> Written:
    """Return a record of the side that runs second."""
    differs = there.head.digest != here.head.digest and (
        is_narrow(there.record) or not compare_records(here.record, there.record).same
    )
    if differs:
        layers = [*there.record.layers]
        return _with_evidence(there, differing=_differing(there, here, layers) or layers)
    # A zero may hide what a layer computes otherwise.
    hidden = [] if there.record.live_run is None else layers_behind_zeros(there.record)
    layers = _differing(there, here, hidden)
    return _with_evidence(there, layers) if layers else there


def _differing(there: Written, here: Written, layers: Iterable[str]) -> list[str]:
    """Return those of some layers of the other side whose code may differ."""

    def differs(layer: str) -> bool:
        module = there.record.layers[layer].type.rpartition(".")[0]
        ours, theirs = here.sources.get(module), there.sources.get(module)
        return ours is None or theirs is None or code_differs(ours, theirs)

    return [layer for layer in layers if differs(layer)]


def _with_evidence_like(here: Written, there: Written) -> Written:
    """Return a record with the evidence that that of the other side has."""
    if not there.evidence:
        return here
    found = compare_records(here.record, there.record)
    live_run, record = here.record.live_run, here.record
    if live_run is not None:
        record = live_run.isolated(record, like=found.expected, names=found.names_before, only=there.only or None)
        if not live_run.repeats(here.record):
            record = dataclasses.replace(record, noise="not repeatable")
    differing = there.only or _differing(here, there, record.layers) or [*record.layers]
    return here.replaced(record, evidence=True, explained=explained("record", record, differing, found))


def _sources(model: Any) -> Iterator[tuple[str, str]]:
    """Yield the modules of Python that the classes of a model are from, with their files."""
    classes: Collection[type] = {type(module) for module in model.modules()}
    for name in sorted({cls.__module__ for cls in classes}):
        file = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(file, str):
            yield name, str(Path(file).resolve())
