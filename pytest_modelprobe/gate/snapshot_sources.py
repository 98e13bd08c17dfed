"""Snapshots on disk, in the working tree or in a revision: found by path, and read when they are asked for.

A repository may have more snapshots than fit into memory. So a source knows the paths and digests of all files, those
with equal digests are never read, and the contents of one snapshot are held at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pytest_modelprobe.exceptions import ModelProbeError, SnapshotError
from pytest_modelprobe.files import (
    ARCH,
    DIRECTORY,
    MOST_BYTES,
    PROBE,
    REMOVED,
    Removal,
    StoredSnapshot,
    decode,
    decode_architecture,
    removal_from,
    text_of,
    too_large,
)
from pytest_modelprobe.record import nearest

from .git import Repository
from .verdict import SnapshotVersion, words

ENDINGS = (ARCH, PROBE)


class SourceError(ModelProbeError, LookupError):
    """A snapshot is missing or cannot be read."""


Instead = Callable[[str, SourceError], SnapshotVersion]


class SnapshotPaths(NamedTuple):
    """The paths of the two files of a snapshot."""

    architecture: str
    numbers: str | None
    """`None` if the record has the structure alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSource:
    """The snapshots of one place, not yet read."""

    place: str
    """How messages name the place: ``in main``, for example. Empty on disk."""
    pairs: Mapping[str, SnapshotPaths]
    """Name → files. The name is the path of the numbers without its ending, so each device has one."""
    contents: Mapping[str, str]
    """Path → digest of the content."""
    sizes: Callable[[Sequence[str]], Mapping[str, int]]
    """Returns path → size in bytes. Paths that the place does not have are left out, also by `load`."""
    load: Callable[[Sequence[str]], Mapping[str, bytes]]
    """Returns path → content."""

    @property
    def states(self) -> dict[str, tuple[object, ...]]:
        """Name → its files and the digests of their contents."""
        return {name: (pair, *(path and self.contents.get(path) for path in pair)) for name, pair in self.pairs.items()}

    def within(self, scopes: Iterable[str]) -> SnapshotSource:
        """Return the snapshots in some folders, or with some names; an empty scope is everything."""
        chosen = {name: pair for name, pair in self.pairs.items() if any(_inside(name, pair, s) for s in scopes)}
        return dataclasses.replace(self, pairs=chosen)

    def only(self, scope: str) -> SnapshotSource:
        """Return the snapshots of one scope.

        Raises:
            SourceError: There are none.
        """
        chosen = self.within([scope])
        if not chosen.pairs:
            near = nearest(without_ending(scope), self.pairs)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise SourceError(f"there is no snapshot {scope or DIRECTORY}{self._at}{hint}")
        return chosen

    def read(
        self, names: Collection[str] | None = None, instead: Instead | None = None
    ) -> Mapping[str, SnapshotVersion]:
        """Return a mapping of name → snapshot, for all or some names, which reads a snapshot whenever it is asked for.

        If a snapshot cannot be read, asking for it raises `SourceError` with its path. With ``instead``, the mapping
        returns what this function makes of the name and the error; it raises `KeyError` if there is no replacement.
        """
        return _Snapshots(self, names, instead)

    def structure(self, name: str) -> SnapshotVersion | None:
        """Return a snapshot without its numbers, or `None` if its architecture cannot be read either."""
        path = self.pairs[name].architecture
        with contextlib.suppress(SnapshotError):
            if self.sizes([path]).get(path, MOST_BYTES) < MOST_BYTES:
                text = text_of(self.load([path])[path], path)
                return self._version(SnapshotPaths(path, None), None, decode_architecture(text, where=path))
        return None

    @property
    def _at(self) -> str:
        return f" {self.place}" if self.place else ""

    def _snapshot(self, pair: SnapshotPaths, contents: Mapping[str, bytes]) -> SnapshotVersion:
        architecture = contents.get(pair.architecture)
        if architecture is None:
            raise SourceError(f"{pair.numbers}{self._at} has no {PurePosixPath(pair.architecture).name} beside it")
        numbers = None if pair.numbers is None else text_of(contents[pair.numbers], pair.numbers)
        text = text_of(architecture, pair.architecture)
        found = decode(text, numbers, where=pair.architecture, numbers_at=pair.numbers)
        return self._version(pair, numbers, found)

    def _version(self, pair: SnapshotPaths, numbers: str | None, found: StoredSnapshot) -> SnapshotVersion:
        digest, path = found.architecture, pair.architecture
        return SnapshotVersion(
            path=path,
            numbers=pair.numbers,
            record=found.record,
            architecture=digest,
            content=hashlib.sha256(f"{digest}{numbers}".encode()).hexdigest(),
            reason=found.reason,
            supersedes=tuple((found.supersedes or "").split()),
            compared=found.compared,
            read_text=lambda: text_of(self.load([path])[path], path),
        )


class _Snapshots(Mapping[str, SnapshotVersion]):
    """The snapshots of a source by name. It holds nothing of a snapshot in memory."""

    def __init__(self, source: SnapshotSource, names: Collection[str] | None, instead: Instead | None) -> None:
        self._source, self._instead = source, instead
        self._pairs = {name: pair for name, pair in source.pairs.items() if names is None or name in names}

    def __iter__(self) -> Iterator[str]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, name: str) -> SnapshotVersion:
        try:
            return self._read(name)
        except SourceError as error:
            if self._instead is None:
                raise
            return self._instead(name, error)

    def _read(self, name: str) -> SnapshotVersion:
        pair, place = self._pairs[name], self._source.place
        paths = [path for path in pair if path is not None]
        try:
            for path, size in self._source.sizes(paths).items():
                if size > MOST_BYTES:
                    too_large(path, size)
            return self._source._snapshot(pair, self._source.load(paths))
        except SnapshotError as error:
            raise SourceError(f"{place}: {error}" if place else str(error)) from error


def on_disk(argument: str) -> SnapshotSource:
    """Return the snapshots of a path: a file, a name without endings, or all below a folder.

    Raises:
        SourceError: There are none.
    """
    path = Path(argument)
    found = sorted(path.rglob("*.json") if path.is_dir() else path.parent.glob("*.json"))
    kept = (p for p in found if DIRECTORY in p.absolute().parts and p.name.endswith(ENDINGS) and p.is_file())
    files = {p.as_posix(): p for p in kept}
    return _of_files(files).only("" if path.is_dir() else path.as_posix())


def in_working_tree(repository: Repository) -> SnapshotSource:
    """Return the snapshots in the working tree of a repository; paths are relative to its root.

    Files that a sparse checkout left out are read from the index. Else they would be reported as deleted.
    """
    here = _of_files({path: repository.root / path for path in repository.working_files() if _is_snapshot(path)})
    left_out = _of_blobs("", repository, repository.files_left_out())
    contents = {**here.contents, **left_out.contents}
    return SnapshotSource(
        place="",
        pairs=_pairs(contents),
        contents=contents,
        sizes=lambda paths: {**here.sizes(paths), **left_out.sizes(paths)},
        load=lambda paths: {**here.load(paths), **left_out.load(paths)},
    )


def in_revision(repository: Repository, ref: str, commit: str | None = None) -> SnapshotSource:
    """Return the snapshots in a revision; paths are relative to the root of the repository.

    Args:
        repository: The repository.
        ref: The revision, as messages show it.
        commit: Its hash, if it is not that of ``ref``.
    """
    return _of_blobs(f"in {ref}", repository, repository.files(commit or repository.commit(ref)))


def refuse_links(repository: Repository, commit: str, scopes: Collection[str] = ("",)) -> None:
    """Raise if a symbolic link in place of snapshots is new or changed since a commit.

    Through a link a test may read a file outside the repository, which the gate does not see.

    Raises:
        SourceError: There is such a link.
    """
    before = repository.links(commit)
    for path, target in repository.working_links().items():
        inside = any(_inside(path, SnapshotPaths(path, None), scope) for scope in scopes)
        if DIRECTORY not in PurePosixPath(path).parts or not inside:
            continue
        if path not in before or repository.read([before[path]])[before[path]] != target:
            raise SourceError(f"{path} is a symbolic link, behind which no change is seen: replace it by the files")


def scope_in(repository: Repository, argument: str) -> str:
    """Return a path relative to the root of the repository. The root itself is an empty string.

    Raises:
        SourceError: It is outside.
    """
    path = Path(argument).resolve()
    if not path.is_relative_to(repository.root):
        raise SourceError(f"{argument} is outside the repository {repository.root}")
    relative = path.relative_to(repository.root).as_posix()
    return "" if relative == "." else relative


def _of_blobs(place: str, repository: Repository, listing: Mapping[str, str]) -> SnapshotSource:
    names = {path: name for path, name in listing.items() if _is_snapshot(path)}

    def load(paths: Sequence[str]) -> Mapping[str, bytes]:
        known = {path: names[path] for path in paths if path in names}
        contents = repository.read(known.values())
        return {path: contents[name] for path, name in known.items()}

    def sizes(paths: Sequence[str]) -> Mapping[str, int]:
        known = {path: names[path] for path in paths if path in names}
        found = repository.sizes(known.values())
        return {path: found[name] for path, name in known.items()}

    return SnapshotSource(place=place, pairs=_pairs(names), contents=names, sizes=sizes, load=load)


def _of_files(files: Mapping[str, Path]) -> SnapshotSource:
    # The digests are those of git, so that a file can be compared with a blob of the base without reading the blob.
    found = {name: _digest_and_size(name, path) for name, path in files.items()}
    return SnapshotSource(
        place="",
        pairs=_pairs(files),
        contents={name: digest for name, (digest, _) in found.items()},
        sizes=lambda paths: {path: found[path][1] for path in paths if path in found},
        load=lambda paths: {path: files[path].read_bytes() for path in paths if path in files},
    )


def _digest_and_size(name: str, path: Path) -> tuple[str, int]:
    """Return git's digest of a file, and its size in bytes."""
    try:
        size = path.stat().st_size
        digest = hashlib.sha1(b"blob %d\0" % size)
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
        return digest.hexdigest(), size
    except OSError as error:
        raise SourceError(f"{name} cannot be read ({error.strerror})") from error


def _pairs(paths: Collection[str]) -> dict[str, SnapshotPaths]:
    """Return name → files. The numbers of all devices share one architecture."""
    stems = {path.removesuffix(ARCH) for path in paths if path.endswith(ARCH)}
    found: dict[str, SnapshotPaths] = {}
    for path in paths:
        if path.endswith(PROBE):
            name = path.removesuffix(PROBE)
            stem, _, device = name.rpartition(".")
            own = name not in stems and device.isalpha() and stem in stems
            found[name] = SnapshotPaths((stem if own else name) + ARCH, path)
    alone = stems - {without_ending(pair.architecture) for pair in found.values()}
    return dict(sorted({**found, **{stem: SnapshotPaths(stem + ARCH, None) for stem in alone}}.items()))


def _is_snapshot(path: str) -> bool:
    return path.endswith(ENDINGS) and DIRECTORY in PurePosixPath(path).parts


def without_ending(path: str) -> str:
    """Return a path without the ending of either file of a snapshot."""
    return next((path.removesuffix(ending) for ending in ENDINGS if path.endswith(ending)), path)


def _inside(name: str, pair: SnapshotPaths, scope: str) -> bool:
    """Whether a scope is the folder, one of the files, or the name of a snapshot."""
    return (
        not scope or name.startswith(f"{scope}/") or without_ending(scope) in (name, without_ending(pair.architecture))
    )


# --- reasons for deleted snapshots, each in a file where the snapshot was ---------------------------------------------


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
