"""A commit as a folder of its own: a temporary git worktree.

The user's tree stays as it is: its files, its index, its stash and its submodules are only read. Git notes a worktree
in ``.git/worktrees``, and that entry goes with it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from pytest_modelprobe.gate import GitError, Repository, run_git
from pytest_modelprobe.interrupts import finished

from .records import Written
from .side import SideError

_git = functools.partial(run_git, apart=True)


class Worktree:
    """A temporary worktree of a commit. It is removed at the end of the block, after Ctrl-C too.

    Args:
        repository: The repository.
        commit: The hash of the commit.

    Raises:
        GitError: Git cannot make it.
    """

    def __init__(self, repository: Repository, commit: str) -> None:
        self._repository = repository
        self._commit = commit
        self._folder = tempfile.TemporaryDirectory(prefix="modelprobe-", ignore_cleanup_errors=True)
        self.root = Path(self._folder.name).resolve() / "tree"

    def __enter__(self) -> Worktree:
        try:
            _git(self._repository.root, "worktree", "add", "--quiet", "--detach", str(self.root), self._commit)
            self._add_submodules()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    @finished
    def remove(self) -> None:
        """Remove the folder, and git's note of it."""
        with contextlib.suppress(GitError):
            _git(self._repository.root, "worktree", "remove", "--force", "--force", str(self.root))
        self._folder.cleanup()

    def clean(self) -> None:
        """Put all files back as the commit has them."""
        _git(self.root, "reset", "--quiet", "--hard")
        _git(self.root, "clean", "-ffdxq")

    def check_out(self, commit: str) -> None:
        """Replace all files by those of another commit."""
        self.clean()
        _git(self.root, "checkout", "--quiet", "--detach", commit)
        self._add_submodules()

    def git(self, *arguments: str) -> str:
        """Run a command of git in the worktree, and return what it printed."""
        return os.fsdecode(_git(self.root, *arguments))

    def check(self, records: Mapping[Any, Written]) -> None:
        """Refuse records of code that this tree has, but that was imported from elsewhere.

        Raises:
            SideError: There is such a record.
        """
        for module, file in dict.fromkeys(pair for one in records.values() for pair in one.sources.items()):
            place = module.replace(".", "/")
            own = [self.root / top / f"{place}{end}" for top in ("", "src") for end in (".py", "/__init__.py")]
            if not Path(file).is_relative_to(self.root) and any(path.is_file() for path in own):
                raise SideError(
                    f"nothing was compared: {module} was imported from {file}, and not from {self.root}, so both sides "
                    "are the same code. Something puts that folder before PYTHONPATH: look at conftest.py, and at how "
                    "the package is installed"
                )

    def path(self, here: Path) -> Path | None:
        """Return where a path of the working tree is in this one, also if nothing is there. None if it is outside."""
        root = self._repository.root
        return self.root / here.relative_to(root) if here.is_relative_to(root) else None

    def folder(self, here: Path) -> Path:
        """Return the folder that a folder of the working tree is in this one; the root if there is none."""
        there = self.path(here)
        return there if there is not None and there.is_dir() else self.root

    def _add_submodules(self) -> None:
        """Write the files of submodules, as far as their commits are here."""
        listing = _git(self.root, "ls-tree", "-r", "-z", "HEAD")
        for entry in listing.split(b"\0"):
            info, _, path = entry.partition(b"\t")
            if info.startswith(b"160000"):
                commit, name = info.split()[2].decode(), os.fsdecode(path)
                with contextlib.suppress(GitError):  # a submodule that nobody needs is not there
                    self._write(self._repository.root / name, commit, self.root / name)

    @staticmethod
    def _write(submodule: Path, commit: str, target: Path) -> None:
        with tempfile.TemporaryFile() as archive:
            archive.write(_git(submodule, "archive", "--format=tar", commit))
            archive.seek(0)
            with tarfile.open(fileobj=archive) as files:
                files.extractall(target, filter="data")


def import_roots(root: Path, tree: Path, modules: Mapping[str, ModuleType] | None = None) -> list[Path]:
    """Return the folders of another tree from which Python has to import first, in order.

    They stand where this process imports from: entries of `sys.path`, and the folders of packages that were found in
    another way, as those of an editable install.

    Args:
        root: The root of the working tree.
        tree: The root of the other tree.
        modules: The modules that were imported; by default `sys.modules`.
    """
    found = dict.fromkeys(_below(root, [Path(entry or os.curdir) for entry in sys.path]))
    found |= dict.fromkeys(_below(root, _roots_of_modules(sys.modules if modules is None else modules)))
    there = [tree / relative for relative in (*found, Path("src"), Path())]
    return [path for path in dict.fromkeys(there) if path.is_dir()]


def _roots_of_modules(modules: Mapping[str, ModuleType]) -> Iterator[Path]:
    for name, module in list(modules.items()):
        file = getattr(module, "__file__", None)
        if "." in name or not isinstance(file, str) or name == "__main__":
            continue
        path = Path(file)
        yield path.parent.parent if path.stem == "__init__" else path.parent


def _below(root: Path, paths: Iterator[Path] | list[Path]) -> Iterator[Path]:
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            yield path.resolve().relative_to(root)
