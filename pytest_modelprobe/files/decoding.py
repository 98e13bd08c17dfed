"""From the texts of the two files to the record in them, with its declaration.

This module puts the steps together: `parsing`, `architecture_file`, `numbers_file`. It decides whether two files belong
together, and it adds the path of the file to what those steps raise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pytest_modelprobe.exceptions import SnapshotError
from pytest_modelprobe.record import Record, gc_paused, has_numbers

from .architecture_file import Structure
from .layout import ComparedParts, digest_of
from .numbers_file import RecordBuilder, check_numbers, operation_from
from .order import in_model_order
from .parsing import RESTORE, parsed, string_dict, string_tuple
from .specs import FormatError


@dataclasses.dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A record read from its files, with its declaration."""

    record: Record
    """The record. Its layers are in the order of the file, those with parameters in the order of the model."""
    architecture: str
    """The `architecture_digest` of the architecture file."""
    reason: str | None = None
    """The declared reason for the change of the architecture."""
    supersedes: str | None = None
    """The `architecture_digest` of each earlier version, separated by spaces."""
    compared: ComparedParts = "all"
    """The part that the test compares."""


def decode(
    architecture: str | dict[str, Any], numbers: str | None, *, where: str, numbers_at: str | None = None
) -> StoredSnapshot:
    """Return the snapshot of these two texts.

    Args:
        architecture: The text of the architecture file, or what `parsed` returned for it.
        numbers: The text of the numbers file; ``None`` if there is no such file.
        where: Path of the architecture file, for messages.
        numbers_at: Path of the numbers file, for messages. By default it has the same name.

    Raises:
        SnapshotError: The texts are damaged, do not belong together or were written by a newer version.

    >>> from pytest_modelprobe.files import encode
    >>> from pytest_modelprobe.record import Layer
    >>> record = Record(model="Net", layers={"fc1": Layer(name="fc1", type="Linear")})
    >>> snapshot = decode(*encode(record, reason="why not"), where="test_net.arch.json")
    >>> snapshot.record, snapshot.reason
    (<Record of Net: 1 layer, 0 forwards, 0 backwards>, 'why not')
    """
    there = numbers_at or where.removesuffix(".arch.json") + ".probe.json"
    with gc_paused():  # many small objects are made, and none of them is garbage
        data = parsed(architecture, where) if isinstance(architecture, str) else architecture
        with _named(where):
            structure = Structure(data)
            if numbers is None and not structure.has_numbers:
                return _snapshot(structure, {})
        if numbers is None:
            raise SnapshotError(
                f"{there} is missing, the numbers that belong to {where}: add it to version control, or record "
                "both anew with `pytest --snapshot-update`"
            )
        found = parsed(numbers, there)
        if not structure.has_numbers:
            raise SnapshotError(f"{there} has numbers, but {where} is of a structure without: delete {there}")
        if found.get("architecture") != structure.digest:
            raise SnapshotError(
                f"{there} and {where} do not belong together, after a merge, an update that was cut short or an update "
                "on another device: run `pytest --snapshot-update` for this device"
            )
        with _named(there):
            check_numbers(found)
            snapshot = _snapshot(structure, found)
            if not has_numbers(snapshot.record):
                raise FormatError("it has no numbers")
            return snapshot


def decode_architecture(architecture: str | dict[str, Any], *, where: str) -> StoredSnapshot:
    """Return the snapshot of an architecture file alone, without numbers.

    Args:
        architecture: The text of the architecture file, or what `parsed` returned for it.
        where: Its path, for messages.

    Raises:
        SnapshotError: The text is damaged or was written by a newer version.
    """
    with gc_paused():
        data = parsed(architecture, where) if isinstance(architecture, str) else architecture
        with _named(where):
            return _snapshot(Structure(data), {})


def architecture_digest(text: str) -> str:
    """Return the digest of an architecture file without its declaration, as in `StoredSnapshot.supersedes`.

    Raises:
        SnapshotError: The text is no architecture.

    >>> from pytest_modelprobe.files import encode
    >>> record = Record(model="Net")
    >>> architecture_digest(encode(record).architecture) == architecture_digest(encode(record, reason="x").architecture)
    True
    """
    return digest_of(parsed(text, "the architecture"))


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Add the path of the file to a `FormatError`, and to one of Python's recursion limit."""
    try:
        yield
    except FormatError as error:
        raise SnapshotError(f"{where} cannot be read, {error}: {RESTORE}") from None
    except RecursionError:
        raise SnapshotError(f"{where} is nested too deeply to be a snapshot: {RESTORE}") from None


def _snapshot(structure: Structure, numbers: Mapping[str, Any]) -> StoredSnapshot:
    """Return the record and its declaration. ``numbers`` is empty if the structure alone is wanted."""
    data = structure.data
    fill = RecordBuilder(structure, numbers)
    layers = {line.name: fill.layer(i, line) for i, line in enumerate(structure.lines)}
    record = Record(
        model=data["model"],
        layers=in_model_order(layers, data["parameter order"]) if "parameter order" in data else layers,
        in_model_order=structure.is_of_this_schema,
        forwards=data.get("forwards", 0),
        backwards=data.get("backwards", 0),
        device=fill.device,
        seed=data.get("seed"),
        loss=data.get("loss"),
        notes=string_tuple(data.get("notes", numbers.get("notes", [])), "notes"),
        origin=operation_from(numbers.get("origin")),
        gradient_origin=operation_from(numbers.get("gradient_origin")),
        optimizers=structure.optimizers,
        applied=numbers.get("applied"),
        noise=numbers.get("noise"),
        versions=string_dict(numbers.get("versions", {}), "versions"),
    )
    alone: ComparedParts = "all" if structure.has_numbers else "architecture"
    return StoredSnapshot(
        record, structure.digest, data.get("reason"), data.get("supersedes"), numbers.get("compared", alone)
    )
