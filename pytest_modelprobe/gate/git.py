"""Files in other revisions, read by the command git, and the revision that a run of GitHub Actions compares with.

A gate has to read the base of a change without touching the working tree, in which somebody may be at work. Settings of
the user or of the repository must not change what is read, so the command gets its own. Actions says in a file what
started the run: a pull request, a merge queue or a push. Nothing is asked of the network.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pytest_modelprobe.exceptions import ModelProbeError

_TIMEOUT = 60.0
"""Seconds for one git command, which may fetch objects of a partial clone."""

# A user's own settings must not change what is read here. A folder of the tree that looks like a bare repository could
# bring settings too, and settings can name commands to run. So git does not take it for a repository.
_SETTINGS = ["--no-pager", "-c", "core.quotePath=false", "-c", "log.showSignature=false", "-c", "color.ui=false"]
_SETTINGS += ["-c", "safe.bareRepository=explicit"]

_HOOKLESS = ["-c", f"core.hooksPath={os.devnull}", "-c", "advice.detachedHead=false", "-c", "submodule.recurse=false"]
"""A hook of the user is for a checkout of the user."""


_NO_GIT = "git was not found: install it"


class GitError(ModelProbeError):
    """Git has no such revision or object, or cannot be run."""


class Repository:
    """A git repository and its working tree.

    Paths are relative to the root of the working tree, with forward slashes.

    Args:
        where: A folder in the working tree.

    Raises:
        GitError: The folder is in no repository, or git cannot be run.
    """

    def __init__(self, where: Path) -> None:
        self.root = where
        try:
            self.root = Path(self._text("rev-parse", "--show-toplevel")).resolve()
        except GitError as error:
            # Git also refuses a tree that belongs to a different user. Its message says what to do.
            if str(error) == _NO_GIT:
                raise
            told = "" if "not a git repository" in str(error) else f" ({error})"
            raise GitError(f"{where.resolve()} is not in a git working tree{told}") from error

    @property
    def shallow(self) -> bool:
        """Whether the clone is shallow, as by `actions/checkout`."""
        return self._text("rev-parse", "--is-shallow-repository") == "true"

    def commit(self, ref: str) -> str:
        """Return the hash of the commit that a branch, a tag or an expression such as ``HEAD^1`` names.

        Raises:
            GitError: There is no such commit here, and the message names the fetch that brings it. Or the name has
                several meanings, of which git would silently take the tag.
        """
        if not ref or ref.startswith("-") or not ref.isprintable():
            raise GitError(f"{ref!r} is no name of a revision")
        name = re.split(r"[~^:]|@\{", ref, maxsplit=1)[0]
        expressions = (full + ref.removeprefix(name) for full in self._meanings(name) or [name])
        found = {expression: commit for expression in expressions if (commit := self._commit(expression))}
        if not found:
            raise GitError(f"there is no revision {ref!r} here: {self._fetch(ref)}")
        if len(set(found.values())) > 1:
            several = " and ".join(found)
            raise GitError(f"{ref!r} is ambiguous, {several} are different commits: name the one that is meant")
        return next(iter(found.values()))

    def _commit(self, expression: str) -> str | None:
        with contextlib.suppress(GitError):
            return self._text("rev-parse", "--verify", "--quiet", f"{expression}^{{commit}}")
        return None

    def _meanings(self, name: str) -> list[str]:
        """Return the full names of the branches, tags and commits that a name may stand for."""
        if re.fullmatch(r"refs/.*|(FETCH_|ORIG_|MERGE_)?HEAD|@|[0-9a-f]{40}|[0-9a-f]{64}|", name):
            return []
        full = [f"refs/{kind}{name}" for kind in ("heads/", "remotes/", "tags/", "")] + [f"refs/remotes/{name}/HEAD"]
        known = self._text("for-each-ref", "--format=%(refname)", *full).splitlines()
        names = [ref for ref in full if ref in known]
        if names and re.fullmatch(r"[0-9a-f]{7,}", name):  # as git abbreviates a hash
            names += self._text("rev-parse", f"--disambiguate={name}").split()
        return names

    def merge_bases(self, ref: str) -> list[str]:
        """Return the newest commits that ``ref`` and ``HEAD`` have in common; several if they were merged crosswise.

        Raises:
            GitError: There is no such revision here, the two have no commit in common, or the clone is too shallow to
                know.
        """
        tip, other = self.commit(ref), self.commit("HEAD")
        try:
            found = self._text("merge-base", "--all", tip, other).split()
        except GitError:
            found = []
        if tip not in found and self.shallow and self._cut_off_between(tip, other):
            what = "the history here is cut off before what they have in common"
            raise GitError(f"{ref} and HEAD: {what}: {_DEEPEN}")
        if not found:
            raise GitError(f"{ref} and HEAD have no commit in common")
        return found

    def merge_base(self, ref: str) -> str:
        """Return the newest commit that ``ref`` and ``HEAD`` have in common.

        Raises:
            GitError: As `merge_bases`, or there are several.
        """
        first, *others = self.merge_bases(ref)
        if others:
            raise GitError(
                f"HEAD and {ref} have {1 + len(others)} newest commits in common, as they were merged crosswise: name "
                f"one of them, such as {first[:10]}"
            )
        return first

    def _cut_off_between(self, tip: str, other: str) -> bool:
        """Return whether a commit that only one of the two has lacks its parents here.

        Behind them there may be newer commits that the two have in common.
        """
        ends = (self.root / self._text("rev-parse", "--git-path", "shallow")).read_text("ascii").split()
        return not set(ends).isdisjoint(self._text("rev-list", f"{tip}...{other}").split())

    def parents(self, commit: str) -> list[str]:
        """Return the hashes of the parents.

        The commit itself names them, so those that a shallow clone lacks are named too.
        """
        head = self._git("cat-file", "commit", commit).split(b"\n\n", 1)[0]
        return re.findall(r"^parent ([0-9a-f]+)$", head.decode("utf-8", "replace"), re.MULTILINE)

    def files(self, commit: str) -> dict[str, str]:
        """Return path → blob for all regular files of a commit."""
        return self._tree(commit, b"100")

    def links(self, commit: str) -> dict[str, str]:
        """Return path → blob for all symbolic links of a commit; the blob holds the target."""
        return self._tree(commit, b"120")

    def submodules(self, commit: str) -> dict[str, str]:
        """Return path → commit for all submodules of a commit."""
        return self._tree(commit, b"160000")

    def _tree(self, commit: str, mode: bytes) -> dict[str, str]:
        listing = self._git("ls-tree", "-r", "-z", commit)
        return _blobs(listing, mode)  # 100644 blob 257cc5642cb1a054f08cc83f2d943e56fd3ebe99

    def working_files(self) -> list[str]:
        """Return the paths of regular files in the working tree that are tracked or not ignored."""
        paths = [(path, self.root / path) for path in self._working_paths()]
        return [path for path, there in paths if there.is_file() and not there.is_symlink()]

    def last_commit_of(self, path: Path) -> str:
        """Return the newest commit that changed a file; empty if there is none, or git does not know it.

        It does not where the file has changes that are not committed, and at the commit where a clone was cut off.
        """
        if self._text("status", "--porcelain", "--", str(path)):
            return ""
        commit = self._text("log", "-1", "--format=%H", "--", str(path))
        return "" if self.shallow and commit in self._text("rev-list", "--max-parents=0", "HEAD").split() else commit

    def text_at(self, commit: str, path: Path) -> str | None:
        """Return a file as a commit has it, or `None` if it has no such file."""
        if not path.is_relative_to(self.root):
            return None
        with contextlib.suppress(GitError):
            name = f"{commit}:{path.relative_to(self.root).as_posix()}"
            return self._git("cat-file", "blob", name).decode("utf-8", "replace")
        return None

    def commits_since(self, commit: str, path: Path, first: int, last: int) -> list[str]:
        """Return the commits after another that changed lines of a file, newest first: hash, day, author, subject."""
        if self.text_at("HEAD", path) != path.read_text("utf-8", "replace"):
            return []  # its lines have other numbers there
        lines = f"-L{first},{last}:{path.relative_to(self.root).as_posix()}"
        return self._text("log", "-s", "--format=%h (%as, %an: %s)", lines, f"{commit}..HEAD").splitlines()

    def changed_files(self, commit: str) -> list[str]:
        """Return the paths of the files that differ between a commit and the working tree, untracked ones too."""
        listings = (
            self._git("diff", "--name-only", "--no-renames", "--ignore-submodules=untracked", "-z", commit, "--"),
            self._git("ls-files", "-z", "-o", "--exclude-standard"),
        )
        return sorted({os.fsdecode(path) for listing in listings for path in listing.split(b"\0") if path})

    def working_links(self) -> dict[str, bytes]:
        """Return path → target for all symbolic links that are tracked or not ignored."""
        paths = [(path, self.root / path) for path in self._working_paths()]
        return {path: os.fsencode(there.readlink()) for path, there in paths if there.is_symlink()}

    def files_left_out(self) -> dict[str, str]:
        """Return path → blob for all regular files of the index that a sparse checkout did not write."""
        listing = self._git("ls-files", "-z", "-s", "-t")
        found = _blobs(listing, b"S 100")  # S 100644 257cc5642cb1a054f08cc83f2d943e56fd3ebe99 0
        return {path: blob for path, blob in found.items() if not os.path.lexists(self.root / path)}

    def _working_paths(self) -> list[str]:
        listing = self._git("ls-files", "-z", "-co", "--exclude-standard")
        return sorted({os.fsdecode(path) for path in listing.split(b"\0") if path})

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Return blob → size in bytes. Objects that are no blobs, or are missing, are left out."""
        wanted = list(dict.fromkeys(names))
        lines = self._batch("--batch-check", wanted).decode().splitlines() if wanted else []
        found = (line.split(" ") for line in lines)  # name, kind, size; or: name, missing
        return {name: int(size) for name, kind, size in (parts for parts in found if len(parts) == 3) if kind == "blob"}

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return blob → content. One process of git reads them all."""
        wanted = list(dict.fromkeys(names))
        if not wanted:
            return {}
        answer = self._batch("--batch", wanted)
        contents: dict[str, bytes] = {}
        position = 0
        for name in wanted:
            end = answer.index(b"\n", position)
            found = answer[position:end].decode().split(" ")  # name, kind, size; or: name, missing
            if found[1] != "blob":
                raise GitError(f"{name} is not the content of a file: {' '.join(found[1:])}")
            start = end + 1
            position = start + int(found[2]) + 1
            contents[name] = answer[start : position - 1]
        return contents

    def _batch(self, how: str, names: Iterable[str]) -> bytes:
        return self._git("cat-file", how, stdin="".join(f"{name}\n" for name in names).encode())

    def _fetch(self, ref: str) -> str:
        """Return the command that fetches a missing revision, or why there is none."""
        name = re.split(r"[~^:]|@\{", ref, maxsplit=1)[0]
        if name == "HEAD" and self._commit(name) is None:
            return "nothing is committed yet"
        if name != ref and self._commit(name):
            if not self.shallow:
                return f"{name} is there, but it leads to no such commit"
            step = "git fetch --deepen=1, or fetch-depth: 2 in the workflow's checkout"
        elif (ref := name).startswith("origin/"):
            step = f"git fetch origin {ref.removeprefix('origin/')}"
        elif re.fullmatch(r"[0-9a-f]{40,64}", ref):
            step = f"git fetch origin {ref}"
        else:
            step = f"git fetch origin {ref}:{ref}, or name it origin/{ref}"
        return f"{step} (this clone is shallow: {_DEEPEN})" if self.shallow and "deepen" not in step else step

    def _text(self, *arguments: str) -> str:
        return os.fsdecode(self._git(*arguments)).strip()

    def _git(self, *arguments: str, stdin: bytes = b"") -> bytes:
        return run_git(self.root, *arguments, stdin=stdin)


def run_git(where: Path, *arguments: str, stdin: bytes = b"", apart: bool = False) -> bytes:
    """Run git in a folder, and return what it printed.

    Args:
        where: The folder.
        arguments: The command and its arguments.
        stdin: What it reads.
        apart: Whether the folder may be a tree of our own or another repository, and may be written. No hook of the
            user runs, and it may take any time.

    Raises:
        GitError: Git cannot be run, or it failed.
    """
    # There are no prompts, because nobody may be there, and no locks, because another process may be writing.
    # Objects are read as they are: a refs/replace that came with a fetch could show a different base.
    own = {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_REPLACE_OBJECTS": "1"}
    # In a hook, GIT_DIR and GIT_INDEX_FILE name the tree of the user, which would be written in place of ours.
    given = {name: value for name, value in os.environ.items() if not (apart and name.startswith("GIT_"))}
    try:
        done = subprocess.run(
            ["git", *_SETTINGS, *(_HOOKLESS if apart else ()), *arguments],
            cwd=where,
            input=stdin,
            capture_output=True,
            timeout=None if apart else _TIMEOUT,
            env=given | own,
            check=False,
        )
    except FileNotFoundError as error:
        raise GitError(_NO_GIT) from error
    except subprocess.TimeoutExpired as error:
        raise GitError(f"git {arguments[0]} took longer than {_TIMEOUT:.0f} s") from error
    if done.returncode:
        told = os.fsdecode(done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
        # Before an error there may be progress, as "Preparing worktree".
        said = next((line for line in told if line.startswith(("fatal:", "error:"))), told[0])
        raise GitError(f"git {arguments[0]}: {said}")
    return done.stdout


def _blobs(listing: bytes, start: bytes) -> dict[str, str]:
    """Return path → blob for the entries of a listing that begin with these bytes."""
    entries = (entry.split(b"\t", 1) for entry in listing.split(b"\0") if entry)
    return {os.fsdecode(path): info.split()[2].decode() for info, path in entries if info.startswith(start)}


_DEEPEN = "git fetch --unshallow, or fetch-depth: 0 in the workflow's checkout"


# --- which revision a run of GitHub Actions compares with -------------------------------------------------------------

_NAME_IT = "name what to compare with: --base origin/main"


def base_of_event(repository: Repository, environment: Mapping[str, str]) -> str:
    """Return the revision to compare with.

    For a pull request it is the first parent of the merge commit that Actions checks out. For a merge queue it is the
    base of the queue, and for a push the branch before the push.

    Raises:
        GitError: The event has no base, or belongs to a different commit than the one that is checked out.
    """
    name, event = environment.get("GITHUB_EVENT_NAME", ""), _event(environment)
    if name == "merge_group":
        return _at(event, "merge_group", "base_sha")
    if name == "push":
        before = _at(event, "before")
        # All digits are zero if the push made the branch: it was nothing before.
        return before if before.strip("0") else f"origin/{_at(event, 'repository', 'default_branch')}"
    if name not in ("pull_request", "pull_request_target"):
        raise GitError(f"the event {name or '(none)'!r} does not say what changed: {_NAME_IT}")
    base, head = (_at(event, "pull_request", side, "sha") for side in ("base", "head"))
    commit = repository.commit("HEAD")
    parents = repository.parents(commit)
    if len(parents) == 2 and parents[1] == head:
        # The event's base is older if the base branch moved on before Actions made the merge commit.
        try:
            return repository.commit(parents[0])
        except GitError as error:
            step = "fetch-depth: 2 in the workflow's checkout"
            raise GitError(f"what the pull request is merged into is not in this clone: {step}") from error
    if commit == head:
        return base
    # pull_request_target checks out the base. Compared with itself nothing would differ, and everything would pass.
    raise GitError(f"what is checked out is neither the pull request's merge commit nor its head: {_NAME_IT}")


def declared_change(environment: Mapping[str, str]) -> str | None:
    """Return what declares in the pull request of this run that models change, or `None`.

    It is the label ``model-change``, or a line of its text that begins with ``Model change:`` and says why.
    """
    labels, text = environment.get("CI_MERGE_REQUEST_LABELS", ""), environment.get("CI_MERGE_REQUEST_DESCRIPTION", "")
    names = [label.strip() for label in labels.split(",")]
    with contextlib.suppress(GitError):  # there is no event
        event = _event(environment)
        names += [_inside(label, "name") for label in _inside(event, "pull_request", "labels") or ()]
        text = f"{text}\n{_inside(event, 'pull_request', 'body') or ''}"
    if "model-change" in names:
        return "the label model-change"
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if re.match(r"model change:\s*\S", line, re.IGNORECASE)), None)


def _event(environment: Mapping[str, str]) -> Any:
    try:
        return json.loads(Path(environment.get("GITHUB_EVENT_PATH", "")).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise GitError(f"GITHUB_EVENT_PATH names no event that can be read: {_NAME_IT}") from error


def _at(event: Any, *keys: str) -> str:
    found = _inside(event, *keys)
    if not isinstance(found, str) or not found:
        raise GitError(f"the event has no {'.'.join(keys)}: {_NAME_IT}")
    return found


def _inside(event: Any, *keys: str) -> Any:
    for key in keys:
        event = event.get(key) if isinstance(event, dict) else None
    return event
