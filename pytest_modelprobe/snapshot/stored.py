"""Read a snapshot from its files, and make the texts that an update writes.

The files on disk may lack numbers, or hold those of another device or of an older architecture. Then the structure
alone is compared, and an update writes the rest.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest

from pytest_modelprobe.comparison import Comparison, Parts
from pytest_modelprobe.exceptions import SnapshotError
from pytest_modelprobe.files import (
    Texts,
    architecture_digest,
    decode,
    decode_architecture,
    encode,
    is_older,
    parsed,
    read_texts,
    rewritten,
)
from pytest_modelprobe.gate import superseded
from pytest_modelprobe.record import CallTree, Record, has_numbers

from .extension import SnapshotFiles
from .options import shown_path
from .outcome import Outcome


class Stored(NamedTuple):
    """A snapshot as it is on disk."""

    texts: Texts | None
    """``None`` if there is no snapshot."""
    record: Record | None
    complete: bool
    """Whether the record has all that is to be compared. If not, it has the structure alone."""


def read_stored(place: SnapshotFiles, record: Record, parts: Parts, *, updating: bool, config: pytest.Config) -> Stored:
    """Return the snapshot that ``record`` is compared with.

    Its numbers may be missing, or belong to an older architecture after an update on another device.
    """
    texts = read_texts(*place)
    if texts is None or (updating and is_older(texts.architecture)):
        return Stored(None, None, complete=False)
    where = str(place.arch)
    stores_numbers = parsed(texts.architecture, where).get("numbers") is not False
    if parts != "architecture" and stores_numbers and not has_numbers(record):
        raise SnapshotError(
            f"{shown_path(place.arch, config)} has numbers, and the record is of the structure alone: compare it "
            'with modelprobe_snapshot(compare="architecture"), or run the model'
        )
    if parts == "architecture" or not has_numbers(record):
        return Stored(texts, decode_architecture(texts.architecture, where=where).record, complete=True)
    if not stores_numbers or texts.numbers is None or (updating and not _fits(texts, place)):
        alone = decode_architecture(texts.architecture, where=where).record
        return Stored(Texts(texts.architecture, None), alone, complete=False)
    decoded = decode(*texts, where=where, numbers_at=str(place.probe))
    return Stored(texts, decoded.record, complete=True)


def _fits(texts: Texts, place: SnapshotFiles) -> bool:
    """Whether the numbers were written with this architecture."""
    if texts.numbers is None or is_older(texts.numbers):
        return False
    old = parsed(texts.numbers, str(place.probe)).get("architecture")
    return bool(old == architecture_digest(texts.architecture))


def texts_to_write(outcome: Outcome, record: Record, old: Texts | None, reason: str | None) -> Texts:
    """Return the texts of a record. What did not change keeps its lines of the old texts."""
    new = encode(record, compared=outcome.compared)
    if old is None:
        return new
    if reason:
        chain = parsed(old.architecture, str(outcome.place.arch)).get("supersedes")
        before, now = architecture_digest(old.architecture), architecture_digest(new.architecture)
        chain = superseded(chain, before, now)
        new = encode(record, reason=reason, supersedes=chain, compared=outcome.compared)
    changed = set() if outcome.diagnosis is None else _changed_layers(outcome.diagnosis.comparison)
    return rewritten(new, old, changed)


def _changed_layers(found: Comparison) -> set[str]:
    """Return the layers whose lines are written anew.

    Layers that call one which has another name, or whose arguments have, are among them: their responses name these.
    """
    names = found.names_before
    renamed = {*names.paths, *names.layers}
    calling = (step.parent for step in CallTree(found.actual).started if step.layer.name in renamed)
    return {
        *(difference.layer for difference in (*found.differences, *found.notes)),
        *names.layers,
        *(step.layer.name for step in calling if step is not None),
    }


def structure_of(record: Record) -> Record:
    """Return a record without its numbers.

    >>> structure_of(Record(model="Net"))
    <Record of Net: 0 layers, 0 forwards, 0 backwards>
    """
    alone = decode_architecture(encode(record).architecture, where="the structure").record
    return dataclasses.replace(alone, notes=record.notes)
