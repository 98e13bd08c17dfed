"""A commit as a folder of its own, and from where Python imports in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pytest_modelprobe.gate import GitError, Repository
from pytest_modelprobe.record import Record
from pytest_modelprobe.revisions import SideError, Worktree, Written, import_roots


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    return repository(tmp_path / "here", **{"net.py": "old", "src/lib/__init__.py": "", ".gitignore": "*.log\n"})


def repository(root: Path, **files: str) -> Path:
    root.mkdir()
    git(root, "init", "-q")
    commit(root, **files)
    return root


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always"]
    return subprocess.run([*command, *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def commit(root: Path, **files: str) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "one")


def test_it_has_the_files_of_the_commit_and_leaves_nothing(here: Path, tmp_path: Path) -> None:
    (here / "net.py").write_text("new")
    with Worktree(Repository(here), "HEAD") as tree:
        assert (tree.root / "net.py").read_text() == "old"
        (tree.root / "untracked").write_text("a test wrote it")
    assert not list((tmp_path / "tmp").iterdir())
    assert not (here / ".git/worktrees").exists()
    assert (here / "net.py").read_text() == "new"


def test_one_that_cannot_be_made_leaves_nothing(here: Path, tmp_path: Path) -> None:
    with pytest.raises(GitError), Worktree(Repository(here), "0" * 40):
        pass
    assert not list((tmp_path / "tmp").iterdir())
    assert not (here / ".git/worktrees").exists()


def test_another_commit_replaces_all_files(here: Path) -> None:
    first = git(here, "rev-parse", "HEAD")
    commit(here, **{"net.py": "second", "more.py": ""})
    with Worktree(Repository(here), "HEAD") as tree:
        (tree.root / "net.py").write_text("a test wrote it")
        (tree.root / "a.log").write_text("ignored")
        repository(tree.root / "nested", a="")
        tree.check_out(first)
        assert sorted(path.name for path in tree.root.iterdir()) == [".git", ".gitignore", "net.py", "src"]
        assert (tree.root / "net.py").read_text() == "old"


@pytest.mark.parametrize(
    ("module", "file", "refused"),
    [
        ("net", "{tree}/net.py", False),
        ("net", "{here}/net.py", True),
        ("lib", "{here}/src/lib/__init__.py", True),
        ("torch.nn", "{here}/torch/nn.py", False),  # the commit has none
    ],
)
def test_code_of_the_commit_that_was_imported_from_elsewhere_is_refused(
    here: Path, module: str, file: str, refused: bool
) -> None:
    with Worktree(Repository(here), "HEAD") as tree:
        file = file.format(tree=tree.root, here=here)
        records: Any = {("t", "run 1"): Written("t", "run 1", Record(model="Net"), {module: file})}
        if not refused:
            tree.check(records)
            return
        with pytest.raises(SideError, match=f"{module} was imported from {file}, and not from {tree.root}"):
            tree.check(records)


def test_imports_are_in_the_order_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for name in ("src", "tools", "lib/pkg", "flat"):
        (there / name).mkdir(parents=True)
    (here / "tools").mkdir(parents=True)
    monkeypatch.chdir(here / "tools")
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", str(here / "only-here")])
    modules = {name: ModuleType(name) for name in ("pkg", "pkg.inner", "one", "__main__", "built_in")}
    for name, file in {
        "pkg": "lib/pkg/__init__.py",
        "pkg.inner": "lib/pkg/inner.py",
        "one": "flat/one.py",
        "__main__": "x.py",
    }.items():
        modules[name].__file__ = str(here / file)
    found = [path.relative_to(there).as_posix() for path in import_roots(here, there, modules)]
    assert found == ["tools", "lib", "flat", "src", "."]
