"""Other revisions are read through git, in clones as they are in CI; what is missing names the fetch it needs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_modelprobe.gate.git import GitError, Repository, base_of_event, declared_change, run_git

Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """Runs git in `tmp_path/here`, an empty repository on main."""
    for name in [name for name in os.environ if name.startswith("GIT")]:
        monkeypatch.delenv(name)
    who = {"GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@example.org"}
    who |= {"GIT_COMMITTER_NAME": "A", "GIT_COMMITTER_EMAIL": "a@example.org"}
    for name, to in {**who, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}.items():
        monkeypatch.setenv(name, to)
    monkeypatch.setenv("GIT_AUTHOR_DATE", "2026-01-31T12:00:00")

    def run(*arguments: str, at: str = "here") -> str:
        done = subprocess.run(["git", *arguments], cwd=tmp_path / at, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    (tmp_path / "here").mkdir()
    run("init", "-q", "-b", "main")
    return run


def commit(git: Git, tmp_path: Path, message: str = "a change", **files: str) -> str:
    """Write files and commit them; returns the hash."""
    for name, text in files.items():
        (tmp_path / "here" / name).write_text(text, "utf-8")
    git("add", "-A")
    git("commit", "-q", "--allow-empty", "-m", message)
    return git("rev-parse", "HEAD")


def clone(git: Git, tmp_path: Path, depth: int, branch: str = "main") -> Repository:
    """Clone as `actions/checkout` does: one branch, and of its history only the end."""
    source = (tmp_path / "here").as_uri()
    git("clone", "-q", "--depth", str(depth), "--branch", branch, source, str(tmp_path / "clone"))
    return Repository(tmp_path / "clone")


# --- reading ------------------------------------------------------------------------------------------------------


def test_a_file_is_read_as_it_was(git: Git, tmp_path: Path) -> None:
    first = commit(git, tmp_path, a="old\n")
    commit(git, tmp_path, a="new\n")
    repository = Repository(tmp_path / "here")
    files = repository.files(first)
    assert repository.read(files.values()) == {files["a"]: b"old\n"}


def test_names_may_hold_anything(git: Git, tmp_path: Path) -> None:
    first = commit(git, tmp_path, **{'tab\there "größe"\n': "text"})
    assert list(Repository(tmp_path / "here").files(first)) == ['tab\there "größe"\n']


def test_the_working_tree_has_new_files_and_not_those_deleted_or_ignored(git: Git, tmp_path: Path) -> None:
    commit(git, tmp_path, gone="1", **{".gitignore": "ignored"})
    (tmp_path / "here" / "gone").unlink()
    for name in ("new", "ignored"):
        (tmp_path / "here" / name).write_text("")
    assert Repository(tmp_path / "here").working_files() == [".gitignore", "new"]


def test_links_are_no_files(git: Git, tmp_path: Path) -> None:
    (tmp_path / "here" / "link").symlink_to("/etc/passwd")
    first = commit(git, tmp_path, a="1")
    repository = Repository(tmp_path / "here")
    assert list(repository.files(first)) == repository.working_files() == ["a"]


# --- the base -----------------------------------------------------------------------------------------------------


def test_the_base_is_where_the_branch_began(git: Git, tmp_path: Path) -> None:
    first = commit(git, tmp_path, a="1")
    git("switch", "-q", "-c", "branch")
    commit(git, tmp_path, b="1")
    git("switch", "-q", "main")
    commit(git, tmp_path, a="2")
    git("switch", "-q", "branch")
    assert Repository(tmp_path / "here").merge_bases("main") == [first]


@pytest.mark.parametrize("ref", ["--output=x", "-x", "", "a\nb"])
def test_what_is_no_name_of_a_revision_never_reaches_git(git: Git, tmp_path: Path, ref: str) -> None:
    commit(git, tmp_path)
    with pytest.raises(GitError, match="is no name of a revision"):
        Repository(tmp_path / "here").commit(ref)


def test_a_name_of_two_commits_is_an_error_that_names_them(git: Git, tmp_path: Path) -> None:
    commit(git, tmp_path)
    git("tag", "same", "main")
    git("branch", "same")
    git("branch", "-m", "main", "origin/main")
    git("update-ref", "refs/remotes/origin/main", commit(git, tmp_path))
    commit(git, tmp_path)
    repository = Repository(tmp_path / "here")
    with pytest.raises(GitError) as error:
        repository.commit("origin/main~1")
    assert str(error.value) == (
        "'origin/main~1' is ambiguous, refs/heads/origin/main~1 and refs/remotes/origin/main~1 are different commits: "
        "name the one that is meant"
    )
    assert repository.commit("refs/remotes/origin/main") == git("rev-parse", "refs/remotes/origin/main")
    assert repository.commit("same") == git("rev-parse", "refs/heads/same")


def test_a_branch_named_like_the_hash_of_a_commit_is_ambiguous(git: Git, tmp_path: Path) -> None:
    first = commit(git, tmp_path)
    git("branch", first[:12], commit(git, tmp_path))
    with pytest.raises(GitError, match=f"refs/heads/{first[:12]} and {first} are different commits"):
        Repository(tmp_path / "here").commit(first[:12])


def test_a_folder_made_like_a_repository_runs_no_command(git: Git, tmp_path: Path) -> None:
    commit(git, tmp_path, a="1")
    inner = tmp_path / "here" / "inner"
    git("init", "-q", "--bare", str(inner))
    git("config", "core.bare", "false", at="here/inner")
    git("config", "core.worktree", "..", at="here/inner")
    git("config", "core.fsmonitor", f"touch {tmp_path / 'ran'}; false", at="here/inner")
    with pytest.raises(GitError):
        Repository(inner).working_files()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("ref", "step"),
    [
        ("origin/main", "git fetch origin main"),
        ("feature", "git fetch origin feature:feature, or name it origin/feature"),
        ("0" * 40, f"git fetch origin {'0' * 40}"),
        ("origin/main~1", "git fetch origin main"),
        ("HEAD^1", "HEAD is there, but it leads to no such commit"),
    ],
)
def test_of_a_revision_that_is_not_here_the_fetch_is_named(git: Git, tmp_path: Path, ref: str, step: str) -> None:
    commit(git, tmp_path)
    with pytest.raises(GitError) as error:
        Repository(tmp_path / "here").commit(ref)
    assert str(error.value) == f"there is no revision {ref!r} here: {step}"


def test_in_a_shallow_clone_its_depth_is_named(git: Git, tmp_path: Path) -> None:
    commit(git, tmp_path)
    commit(git, tmp_path)
    repository = clone(git, tmp_path, depth=1)
    assert repository.shallow
    with pytest.raises(GitError, match=r"git fetch origin dev \(this clone is shallow: .*fetch-depth: 0"):
        repository.commit("origin/dev")
    with pytest.raises(GitError, match="here: git fetch --deepen=1, or fetch-depth: 2"):
        repository.commit("HEAD~1")


def test_a_history_that_is_cut_off_has_no_base(git: Git, tmp_path: Path) -> None:
    commit(git, tmp_path, a="1")
    git("switch", "-q", "-c", "branch")
    commit(git, tmp_path, b="1")
    repository = clone(git, tmp_path, depth=1, branch="branch")
    git("fetch", "-q", "--depth=1", "origin", "main:refs/remotes/origin/main", at="clone")
    with pytest.raises(GitError) as error:
        repository.merge_bases("origin/main")
    assert str(error.value) == (
        "origin/main and HEAD: the history here is cut off before what they have in common: "
        "git fetch --unshallow, or fetch-depth: 0 in the workflow's checkout"
    )


def test_a_base_behind_a_cut_is_not_taken_for_the_newest_in_common(git: Git, tmp_path: Path) -> None:
    first = commit(git, tmp_path, a="old")
    commit(git, tmp_path, a="reviewed")
    git("switch", "-q", "-c", "branch", first)
    git("merge", "-q", "--no-ff", "-m", "merge", "main")
    commit(git, tmp_path, a="old")
    git("switch", "-q", "-c", "side", first)
    commit(git, tmp_path, side="1")
    git("switch", "-q", "main")
    for name in "bcd":
        commit(git, tmp_path, **{name: "1"})
    git("merge", "-q", "-m", "merge", "side")
    repository = clone(git, tmp_path, depth=3, branch="branch")
    git("fetch", "-q", "--depth=3", "origin", "main:refs/remotes/origin/main", at="clone")
    with pytest.raises(GitError, match="the history here is cut off before what they have in common"):
        repository.merge_bases("origin/main")


def test_in_a_tree_of_our_own_neither_a_hook_nor_the_index_of_the_user_counts(
    git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(git, tmp_path, a="1")
    here, tree = tmp_path / "here", tmp_path / "tree"
    hook = here / ".git/hooks/post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hooked\n")
    hook.chmod(0o755)
    run_git(here, "worktree", "add", "--detach", str(tree), apart=True)
    monkeypatch.setenv("GIT_DIR", str(here / ".git"))  # as in a hook
    monkeypatch.setenv("GIT_WORK_TREE", str(here))
    for file in (here / "a", tree / "a"):
        file.write_text("2")
    run_git(tree, "reset", "--hard", apart=True)
    assert [(folder / "a").read_text() for folder in (here, tree)] == ["2", "1"]
    assert not (tmp_path / "hooked").exists()
    with pytest.raises(GitError, match=r"^git worktree: (error|fatal): .*no-such"):
        run_git(here, "worktree", "add", str(tmp_path / "other"), "no-such", apart=True)


def test_unrelated_histories_have_no_base(git: Git, tmp_path: Path) -> None:
    commit(git, tmp_path)
    git("switch", "-q", "--orphan", "other")
    commit(git, tmp_path, "another beginning")
    with pytest.raises(GitError, match="main and HEAD have no commit in common"):
        Repository(tmp_path / "here").merge_bases("main")


def test_outside_of_git_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(GitError) as error:
        Repository(tmp_path)
    assert str(error.value) == f"{tmp_path.resolve()} is not in a git working tree"


def test_without_git_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GitError, match="git was not found"):
        Repository(tmp_path)


# --- events of GitHub Actions -------------------------------------------------------------------------------------


def environment(tmp_path: Path, name: str, event: object) -> dict[str, str]:
    path = tmp_path / "event.json"
    path.write_text(json.dumps(event), "utf-8")
    return {"GITHUB_EVENT_NAME": name, "GITHUB_EVENT_PATH": str(path)}


def pull_request(base: str, head: str) -> dict[str, object]:
    return {"pull_request": {"base": {"sha": base}, "head": {"sha": head}}}


@pytest.fixture
def merged(git: Git, tmp_path: Path) -> tuple[str, str]:
    """The base and the head of a pull request; what is checked out is their merge."""
    base = commit(git, tmp_path, a="1")
    git("switch", "-q", "-c", "branch")
    commit(git, tmp_path, b="1")
    head = commit(git, tmp_path, b="2")
    git("switch", "-q", "--detach", "main")
    git("merge", "-q", "--no-ff", "-m", "merge", "branch")
    git("branch", "merge")
    return base, head


def test_a_pull_request_starts_from_the_first_parent_of_its_merge(
    git: Git, tmp_path: Path, merged: tuple[str, str]
) -> None:
    base, head = merged
    told = environment(tmp_path, "pull_request", pull_request("0" * 40, head))
    assert base_of_event(Repository(tmp_path / "here"), told) == base


def test_a_pull_request_whose_head_is_checked_out_starts_from_the_event_s_base(
    git: Git, tmp_path: Path, merged: tuple[str, str]
) -> None:
    base, head = merged
    git("switch", "-q", "branch")
    told = environment(tmp_path, "pull_request", pull_request(base, head))
    assert base_of_event(Repository(tmp_path / "here"), told) == base


def test_a_pull_request_that_is_not_checked_out_cannot_be_checked(
    git: Git, tmp_path: Path, merged: tuple[str, str]
) -> None:
    git("switch", "-q", "main")
    told = environment(tmp_path, "pull_request_target", pull_request(*merged))
    with pytest.raises(GitError, match="neither the pull request's merge commit nor its head"):
        base_of_event(Repository(tmp_path / "here"), told)


def test_a_merge_queue_tells_what_it_builds_on(git: Git, tmp_path: Path) -> None:
    base = commit(git, tmp_path)
    told = environment(tmp_path, "merge_group", {"merge_group": {"base_sha": base, "head_sha": "1" * 40}})
    assert base_of_event(Repository(tmp_path / "here"), told) == base


def test_a_push_tells_what_was_before(git: Git, tmp_path: Path) -> None:
    base = commit(git, tmp_path)
    told = environment(tmp_path, "push", {"before": base})
    assert base_of_event(Repository(tmp_path / "here"), told) == base


def test_a_new_branch_is_compared_with_the_default_branch(git: Git, tmp_path: Path) -> None:
    told = environment(tmp_path, "push", {"before": "0" * 40, "repository": {"default_branch": "trunk"}})
    assert base_of_event(Repository(tmp_path / "here"), told) == "origin/trunk"


@pytest.mark.parametrize(
    ("name", "event", "said"),
    [
        ("workflow_dispatch", {}, "the event 'workflow_dispatch' does not say what changed"),
        ("push", {"before": 3}, "the event has no before"),
        ("merge_group", [], "the event has no merge_group.base_sha"),
        ("pull_request", {"pull_request": {"base": "x"}}, "the event has no pull_request.base.sha"),
    ],
)
def test_an_event_that_does_not_tell_asks_for_a_base(
    git: Git, tmp_path: Path, name: str, event: object, said: str
) -> None:
    with pytest.raises(GitError) as error:
        base_of_event(Repository(tmp_path / "here"), environment(tmp_path, name, event))
    assert str(error.value) == f"{said}: name what to compare with: --base origin/main"


@pytest.mark.parametrize(
    ("variables", "declared"),
    [
        ({"LABELS": "bug,model-change"}, "the label model-change"),
        (
            {"LABELS": "not-a-model-change", "DESCRIPTION": "Faster.\n\nModel change: the scale was wrong\n"},
            "Model change: the scale was wrong",
        ),
        ({"LABELS": "not-a-model-change", "DESCRIPTION": "No Model change: at all"}, None),
    ],
)
def test_gitlab_tells_in_variables_what_declares_a_change(variables: dict[str, str], declared: str | None) -> None:
    told = {f"CI_MERGE_REQUEST_{name}": text for name, text in variables.items()}
    assert declared_change(told) == declared
