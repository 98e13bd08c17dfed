"""Which revision a run of GitHub Actions compares with.

Actions says in a file what started the run: a pull request, a merge queue or a push. The base is read from this file
and from the merge commit that is checked out, so nothing is asked of the network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .git import GitError, Repository

_MOST_BYTES = 64 << 20
"""A larger file is not read. GitHub caps the payload of an event at 25 MB."""

_NAME_IT = "name what to compare with: --base origin/main"


def base(repository: Repository, environment: Mapping[str, str]) -> str:
    """Return the revision to compare with.

    For a pull request it is the first parent of the merge commit that Actions checks out. For a merge queue it is the
    base of the queue, and for a push the branch before the push.

    Raises:
        GitError: The event has no base, or belongs to a different commit than the one that is checked out.
    """
    name = environment.get("GITHUB_EVENT_NAME", "")
    event = _event(environment)
    if name in ("pull_request", "pull_request_target"):
        return _of_pull_request(
            repository, _at(event, "pull_request", "base", "sha"), _at(event, "pull_request", "head", "sha")
        )
    if name == "merge_group":
        return _at(event, "merge_group", "base_sha")
    if name == "push":
        before = _at(event, "before")
        # All digits are zero if the push made the branch: it was nothing before.
        return before if before.strip("0") else f"origin/{_at(event, 'repository', 'default_branch')}"
    raise GitError(f"the event {name or '(none)'!r} does not say what changed: {_NAME_IT}")


def _of_pull_request(repository: Repository, base: str, head: str) -> str:
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


def _event(environment: Mapping[str, str]) -> Any:
    path = Path(environment.get("GITHUB_EVENT_PATH", ""))
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:  # Reading a pipe would wait forever.
            raise ValueError
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise GitError(f"GITHUB_EVENT_PATH names no event that can be read: {_NAME_IT}") from error


def _at(event: Any, *keys: str) -> str:
    for key in keys:
        event = event.get(key) if isinstance(event, dict) else None
    if not isinstance(event, str) or not event:
        raise GitError(f"the event has no {'.'.join(keys)}: {_NAME_IT}")
    return event
