"""`git bisect` in a worktree of its own, asked by records."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_modelprobe.gate import GitError, Repository, run_git
from pytest_modelprobe.revisions import Job, Pair, Side, SideError, Worktree, import_roots, judged, read_written

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
    if _is_ancestor(repository, last, first):
        raise GitError(f"{bad} comes before {good}: name the older commit first, as in {bad} {good}")
    if not _is_ancestor(repository, first, last):
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


def git_in(folder: Path, *arguments: str) -> str:
    """Run a command of git in a folder, and return what it printed."""
    return os.fsdecode(run_git(folder, *arguments, apart=True))


def _is_ancestor(repository: Repository, commit: str, of: str) -> bool:
    """Return whether a commit is in the history of another one."""
    with contextlib.suppress(GitError):
        git_in(repository.root, "merge-base", "--is-ancestor", commit, of)
        return True
    return False


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
        git = functools.partial(git_in, self._tree.root)
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
        return git_in(self._tree.root, "log", "-1", "--format=%h %s", commit).strip()

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
