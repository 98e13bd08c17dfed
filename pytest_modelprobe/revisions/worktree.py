"""A commit as a folder of its own, a temporary git worktree, and `git bisect` in it.

The user's tree stays as it is: its files, its index and its stash are only read. Git notes a worktree
in ``.git/worktrees``, and that entry goes with it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from pytest_modelprobe.gate import GitError, Repository, run_git
from pytest_modelprobe.interrupts import finished

from .dependencies import is_elsewhere, is_installed, module_places
from .pairs import Pair, Written, judged, read_written
from .side import Job, Side, SideError

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

    def git(self, *arguments: str) -> str:
        """Run a command of git in the worktree, and return what it printed."""
        return os.fsdecode(_git(self.root, *arguments))

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


# --- `git bisect` in a worktree of its own, asked by records ----------------------------------------------------------

_FIRST_BAD = re.compile(r"^([0-9a-f]{40,64}) is the first (?:bad|new) commit", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisected:
    """The commit that was found."""

    commit: str
    pairs: Sequence[Pair]
    """What differs there from the good commit."""
    runs: int
    """How often the tests ran."""


def bisect(
    repository: Repository,
    good: str,
    bad: str,
    arguments: Sequence[str],
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> Bisected:
    """Return the first commit after ``good`` up to ``bad`` whose model differs from that of ``good``.

    Args:
        repository: The repository. Its working tree stays as it is.
        good: A commit whose model is right.
        bad: A later commit whose model differs.
        arguments: Tests, and options of pytest. Files of tests are those of the working tree, at each commit.
        tell: Is called with what is known of each commit, in words.

    Raises:
        GitError: ``good`` is no older commit from which ``bad`` comes.
        SideError: The tests record nothing at one of the two, or the two do not differ.
    """
    first, last = repository.commit(good), repository.commit(bad)
    if first == last:
        raise GitError(f"{good} and {bad} are the same commit: name an older one first")
    if repository.is_ancestor(last, first):
        raise GitError(f"{bad} comes before {good}: name the older commit first, as in {bad} {good}")
    if not repository.is_ancestor(first, last):
        cut = ", or fetch what is cut off here: git fetch --unshallow" if repository.shallow else ""
        raise GitError(
            f"{good} is no ancestor of {bad}: name a commit from which {bad} comes, such as a merge base{cut}"
        )
    with tempfile.TemporaryDirectory(prefix="modelprobe-bisect-") as folder, Worktree(repository, first) as tree:
        search = _Search(repository, tree, Path(folder), arguments)
        if not search.good:
            raise SideError(f"the tests record nothing at {good}: {search.why}")
        tell(f"run 1, good: {good}")
        commit, pairs = search.search(first, last, tell)
        if pairs is None:
            raise SideError(f"the tests record nothing at {bad}, and nothing changed before it: {search.why}")
        if not any(map(differs, pairs)):
            raise SideError(
                f"{bad} is as {good}, and so is each commit between them that was tried. If a change was taken back, "
                f"name a commit that had it in place of {bad}; if not, the tests do not reach it"
            )
        return Bisected(commit=commit, pairs=pairs, runs=search.runs)


def differs(pair: Pair) -> bool:
    """Whether a model differs from the good one, which repeats: one that does not any more is another one."""
    return not pair.diagnosis.same and pair.there.record.noise != "not repeatable"


class _Search:
    def __init__(self, repository: Repository, tree: Worktree, folder: Path, arguments: Sequence[str]) -> None:
        self._repository, self._tree, self._folder = repository, tree, folder
        self._given = arguments
        self._here = Path.cwd().resolve()
        self.why = ""
        """Why the last commit could not be compared."""
        self.runs = 0
        self._run("good", None)
        self.good = read_written(folder / "good")
        """The records of the good commit, with what a diagnosis needs."""

    def compared(self, commit: str) -> list[Pair] | None:
        """Return the pairs of a commit and the good one. None if the commit cannot be compared."""
        self._tree.check_out(commit)
        self._run("other", self._folder / "good")
        other = read_written(self._folder / "other")
        if not self.good.keys() <= other.keys():
            return None
        return [judged(other[key], one) for key, one in self.good.items()]

    def search(self, first: str, last: str, tell: Callable[[str], None]) -> tuple[str, list[Pair] | None]:
        """Let git choose the commits; return the one that it finds, and its pairs.

        The last commit is taken for a bad one. It is looked at if no other is.
        """
        git = self._tree.git
        found: dict[str, list[Pair] | None] = {}

        def verdict_on(commit: str) -> str:
            found[commit] = now = self.compared(commit)
            verdict = "skip" if now is None else "bad" if any(map(differs, now)) else "good"
            why = f" ({self.why})" if now is None else ""
            tell(f"run {self.runs}, {verdict}: {self._subject(commit)}{why}")
            return verdict

        self._tree.clean()
        said = git("bisect", "start", last, first)
        while (done := _FIRST_BAD.search(said)) is None:
            commit = git("rev-parse", "HEAD").strip()
            verdict = verdict_on(commit)
            self._tree.clean()
            try:
                said = git("bisect", verdict)
            except GitError:
                if verdict != "skip":
                    raise
                raise SideError(
                    "only commits that cannot be compared are left, and the first of a change is among them or right "
                    f"after them. The last that was tried is {self._subject(commit)}"
                ) from None
        if done[1] not in found:
            verdict_on(done[1])
        return done[1], found[done[1]]

    def _subject(self, commit: str) -> str:
        return self._tree.git("log", "-1", "--format=%h %s", commit).strip()

    def _run(self, name: str, like: Path | None) -> None:
        records = self._folder / name
        shutil.rmtree(records, ignore_errors=True)
        imports = import_roots(self._repository.root, self._tree.root)
        side = Side(sys.executable, self._tree.folder(self._here), imports, without=self._repository.root)
        given = [self._argument(argument) for argument in self._given]
        job = Job(
            files=[argument.partition("::")[0] if Path(argument).is_absolute() else argument for argument in given],
            tests=_tests(given),
            options={},
            records=str(records),
            evidence=True,
            observe=True,
            like=None if like is None else str(like),
        )
        ran = side.run([job], self._folder / "log")
        self.runs += 1
        told = [*ran.unread.values(), *ran.failed.values()]
        self.why = told[0] if told else "no test makes or calls a model of your own classes"
        self._tree.check(read_written(records))

    def _argument(self, argument: str) -> str:
        """Return an argument for the other tree. Files of tests are copied there."""
        file, colons, rest = argument.partition("::")
        here = (self._here / file).resolve()
        there = self._tree.path(here)
        if argument.startswith("-") or there is None or not here.exists():
            return argument
        self._tree.take([here])
        return f"{there}{colons}{rest}"


def _tests(arguments: Sequence[str]) -> list[str] | None:
    """Return the tests that are named; None if one of the names is a folder."""
    named = [argument for argument in arguments if Path(argument.partition("::")[0]).is_absolute()]
    return None if not named or any(Path(argument).is_dir() for argument in named) else named
