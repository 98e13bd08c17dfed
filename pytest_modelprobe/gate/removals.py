"""Reasons for deleted snapshots, each in a file where the snapshot was: ``test_a.removed.json``.

A deleted file has no place for a reason. The reason names the content that was deleted, so it cannot be used again when
a snapshot of the same name is deleted later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from pytest_modelprobe.exceptions import SnapshotError
from pytest_modelprobe.files import ARCH, DIRECTORY, MOST_BYTES, REMOVED, Removal, removal_from, text_of

from .declarations import words
from .git import Repository
from .snapshot_sources import SourceError


def removal_path(architecture: str) -> str:
    """Return the path of the file that declares the deletion of a snapshot.

    >>> removal_path("tests/__modelprobe__/test_net/test_a.arch.json")
    'tests/__modelprobe__/test_net/test_a.removed.json'
    """
    return architecture.removesuffix(ARCH) + REMOVED


def declared_removals(repository: Repository, commit: str) -> dict[tuple[str, str], str]:
    """Return (path of the architecture, digest of the content) → the reason why this snapshot was deleted.

    A reason that the file gave for the same content in ``commit`` was for an earlier deletion and does not count.

    Raises:
        SourceError: A file cannot be read.
    """
    before = _removals_in(repository, repository.files(commit))
    found = {}
    for path, removal in _removals_in_working_tree(repository).items():
        old = before.get(path)
        known = old.contents if old is not None and words(old.reason) == words(removal.reason) else frozenset()
        for content in removal.contents - known:
            found[path.removesuffix(REMOVED) + ARCH, content] = removal.reason
    return found


def _removals_in(repository: Repository, listing: Mapping[str, str]) -> dict[str, Removal]:
    """Return path → removal, for the blobs that can be read."""
    names = {path: listing[path] for path in _removal_paths(listing)}
    sizes = repository.sizes(names.values())
    names = {path: name for path, name in names.items() if sizes.get(name, 0) <= MOST_BYTES}
    contents = repository.read(names.values())
    found = {}
    for path, name in names.items():
        with contextlib.suppress(SourceError):  # A file that cannot be read declared nothing.
            found[path] = _removal(contents[name], path)
    return found


def _removals_in_working_tree(repository: Repository) -> dict[str, Removal]:
    found = _removals_in(repository, repository.files_left_out())
    for path in _removal_paths(repository.working_files()):
        file = repository.root / path
        if file.stat().st_size > MOST_BYTES:
            raise SourceError(f"{path} is too large for a declaration: remove it")
        found[path] = _removal(file.read_bytes(), path)
    return found


def _removal_paths(paths: Iterable[str]) -> list[str]:
    return [path for path in paths if path.endswith(REMOVED) and DIRECTORY in PurePosixPath(path).parts]


def _removal(data: bytes, path: str) -> Removal:
    try:
        return removal_from(text_of(data, path), path)
    except SnapshotError as error:
        raise SourceError(str(error)) from error
