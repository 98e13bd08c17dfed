"""The table of attacks: its verdicts are those of the gate and of pytest."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_modelprobe.cli import main

HERE = Path(__file__).parent
TABLE = runpy.run_path(str(HERE / "attacks.py"))
ATTACKS = [attack for family in TABLE["FAMILIES"].values() for attack in family]
BY_PATH = "--import-mode=importlib"
"""For files of one name in many folders."""
HARMLESS = ("no change", "allowed: format", "allowed: calls")
ALONE = [attack for attack in ATTACKS if attack.alone]

Updated = Mapping[str, Mapping[str, str]]
RunPytest = Callable[..., pytest.RunResult]


def written(files: Mapping[str, str], folder: Path) -> Path:
    """Write files into a folder, which has no others."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, "utf-8", newline="")
    return folder


@pytest.fixture
def run_pytest(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> RunPytest:
    """Runs pytest in a folder, in this process, with what it needs of the installed plugins."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(folder: Path, *arguments: str) -> pytest.RunResult:
        monkeypatch.chdir(folder)
        plugins = ("-p", "syrupy", "-p", "pytest_modelprobe.plugin", "-p", "no:cacheprovider")
        return pytester.runpytest_inprocess(*plugins, *arguments)

    return run


_updated: dict[str, Mapping[str, str]] = {}


@pytest.fixture
def updated(run_pytest: RunPytest, tmp_path: Path) -> Updated:
    """The files of each model after an update of its snapshot, made once."""
    if not _updated:
        root = tmp_path / "updated"
        for model, edits in TABLE["MODELS"].items():
            text = TABLE["MODEL"]
            for before, after in edits:
                text = text.replace(before, after)
            written({TABLE["TEST"]: text}, root / model)
        assert run_pytest(root, BY_PATH, "--snapshot-update").ret == 0
        for model in TABLE["MODELS"]:
            files = [path for path in (root / model).rglob("*") if path.suffix in (".py", ".json")]
            _updated[model] = {path.relative_to(root / model).as_posix(): path.read_text("utf-8") for path in files}
    return _updated


def base_of(attack: Any, updated: Updated) -> dict[str, str]:
    """Return the files of the base."""
    files = TABLE["Files"](updated, attack.before)
    attack.base(files)
    return files


def files_of(attack: Any, updated: Updated) -> dict[str, str]:
    """Return the files of the pull request."""
    files = base_of(attack, updated)
    attack.edit(files)
    return files


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.what for attack in ATTACKS])
def test_the_command_says_what_the_table_says(
    attack: Any,
    updated: Updated,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [name for name in os.environ if name.startswith("GIT")]:
        monkeypatch.delenv(name)
    for name, value in {"GLOBAL": os.devnull, "SYSTEM": os.devnull}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        return subprocess.run(["git", *who, *arguments], capture_output=True, text=True, check=True).stdout.strip()

    def commit(files: Mapping[str, str]) -> None:
        for path in folder.iterdir():
            if path.is_dir() and path.name != ".git":
                shutil.rmtree(path)
        written({"docs/index.md": "", **files}, folder)
        git("add", "-A")
        git("commit", "-q", "--allow-empty", "-m", "a change")

    git("init", "-q", "-b", "main")
    commit(base_of(attack, updated))
    git("switch", "-q", "-c", "change")
    commit(files_of(attack, updated))
    attack.git(git)
    capsys.readouterr()
    code = main(["check", "--base", attack.against, "--format", "json"])
    out, err = capsys.readouterr()
    assert (said(code, out), "Traceback" in err) == (attack.check, False)


def said(code: int, out: str) -> str:
    """Return what the command makes of the worst that an attack does, and of which class it is."""
    if code == 2:
        return "error"
    changes = json.loads(out)["changes"]
    if not changes:
        return "no change"
    verdict, kind = (changes[0]["findings"][0][key] for key in ("verdict", "class"))
    assert (verdict == "denied") == (code == 1)
    return f"{verdict}: {kind}"


def test_pytest_says_what_the_table_says(
    updated: Updated, run_pytest: RunPytest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    attacks = {f"attack_{i}": attack for i, attack in enumerate(ATTACKS) if not attack.alone}
    for name, attack in attacks.items():
        written(files_of(attack, updated), tmp_path / "all" / name)
    run_pytest(tmp_path / "all", BY_PATH, "--modelprobe-json=results.json")
    results = json.loads((tmp_path / "all" / "results.json").read_text("utf-8"))
    outcomes = {test["file"].partition("/")[0]: test["outcome"] for test in results["tests"]}
    assert {attack.what: outcomes.get(name, "no tests") for name, attack in attacks.items()} == {
        attack.what: attack.pytest for attack in attacks.values()
    }


@pytest.mark.parametrize("attack", ALONE, ids=[attack.what for attack in ALONE])
def test_the_exit_status_of_pytest_is_what_the_table_says(
    attack: Any, updated: Updated, run_pytest: RunPytest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"CI": "true", **attack.environment}.items():
        monkeypatch.setenv(name, value)
    files = files_of(attack, updated)
    folder = written(files, tmp_path / "pull request")
    assert {0: "passed", 1: "failed", pytest.ExitCode.USAGE_ERROR: "failed"}[
        int(run_pytest(folder).ret)
    ] == attack.pytest
    assert {path: (folder / path).read_text("utf-8") for path in files} == files, "what was committed was changed"


def test_what_neither_shows_is_harmless() -> None:
    unseen = [one for one in ATTACKS if one.pytest == "passed" and one.check in HARMLESS]
    assert [attack.what for attack in unseen] == [attack.what for attack in ATTACKS if attack.harmless]
