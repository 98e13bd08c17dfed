"""A commit as a folder of its own, a temporary git worktree.

The user's tree stays as it is: its files, its index and its stash are only read. Git notes a worktree
in ``.git/worktrees``, and that entry goes with it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from pytest_modelprobe.gate import GitError, Repository, run_git
from pytest_modelprobe.interrupts import finished

from .dependencies import is_elsewhere, is_installed, module_places
from .pairs import Written
from .side import SideError

_git = functools.partial(run_git, apart=True)


class Worktree:
    """A temporary worktree of a commit. It is removed at the end of the block, after Ctrl-C too.

    Args:
        repository: The repository.
        commit: The hash of the commit.
        root: Where it is made; by default in a temporary folder.

    Raises:
        GitError: Git cannot make it.
    """

    def __init__(self, repository: Repository, commit: str, root: Path | None = None) -> None:
        self._repository = repository
        self._commit = commit
        self._folder = tempfile.TemporaryDirectory(prefix="modelprobe-", ignore_cleanup_errors=True)
        self.root = root or Path(self._folder.name).resolve() / "tree"
        self._submodules: list[Worktree] = []

    def __enter__(self) -> Worktree:
        try:
            _git(self._repository.root, "worktree", "add", "--quiet", "--detach", str(self.root), self._commit)
            self._add_submodules(self._commit)
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
        self._remove_submodules()
        with contextlib.suppress(GitError):
            _git(self._repository.root, "worktree", "remove", "--force", "--force", str(self.root))
        self._folder.cleanup()

    def _add_submodules(self, commit: str) -> None:
        """Check out the submodules of a commit, which git leaves empty, from the clones in the working tree."""
        for name, there in self._repository.submodules(commit).items():
            if not (self._repository.root / name / ".git").exists():
                continue
            try:
                repository = Repository(self._repository.root / name)
                self._submodules.append(Worktree(repository, repository.commit(there), self.root / name).__enter__())
            except GitError as error:
                raise GitError(f"submodule {name}: {error}") from error

    def _remove_submodules(self) -> None:
        while self._submodules:
            self._submodules.pop().remove()

    def known(self) -> Iterator[Path]:
        """Yield the files of the working tree that git knows, also in the submodules that are checked out here."""
        yield from (self._repository.root / name for name in self._repository.working_files())
        for submodule in self._submodules:
            yield from submodule.known()

    def clean(self) -> None:
        """Put all files back as the commit has them."""
        _git(self.root, "reset", "--quiet", "--hard")
        _git(self.root, "clean", "-ffdxq")

    def take(self, files: Iterable[Path]) -> None:
        """Copy files of the working tree to where they are in this one."""
        for file in files:
            there = self.path(file)
            if there is not None and file.is_file():
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, there)

    def check_out(self, commit: str) -> None:
        """Replace all files by those of another commit."""
        self.clean()
        self._remove_submodules()
        _git(self.root, "checkout", "--quiet", "--detach", commit)
        self._add_submodules(commit)

    def check(self, records: Mapping[Any, Written]) -> None:
        """Refuse records of code that this tree has, but that was imported from elsewhere.

        Raises:
            SideError: There is such a record.
        """
        places = module_places(Repository(self.root).working_files())
        for module, file in dict.fromkeys(pair for one in records.values() for pair in one.sources.items()):
            if is_elsewhere(self.root, places, module, Path(file)):
                raise SideError(
                    f"nothing was compared: {module} was imported from {file}, and not from {self.root}, so both sides "
                    "are the same code. Install the package with pip install -e, or name its folder in pythonpath, in "
                    "the ini file of pytest. If that is so, look at conftest.py: something puts the other folder first"
                )

    def path(self, here: Path) -> Path | None:
        """Return where a path of the working tree is in this one, also if nothing is there. None if it is outside."""
        root = self._repository.root
        return self.root / here.relative_to(root) if here.is_relative_to(root) else None

    def folder(self, here: Path) -> Path:
        """Return the folder that a folder of the working tree is in this one; the root if there is none."""
        there = self.path(here)
        return there if there is not None and there.is_dir() else self.root


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
            if not is_installed(str(path)):  # an environment may be inside the repository
                yield path.resolve().relative_to(root)
