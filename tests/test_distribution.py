"""What is released: its files and version, installed and run; the changelog; what GitHub and pre-commit read."""

from __future__ import annotations

import datetime
import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pytest_modelprobe import cli
from pytest_modelprobe.cli.commands import run_check

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
NOT_IN_THE_SDIST = {".ci", ".git_archival.txt"}


def called(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command without the settings of this one's Python and pip; return what it printed."""
    unwanted = ("PYTHONPATH", "PIP_", "GIT_", "MODELPROBE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=kept | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def hatchling(*arguments: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    pytest.importorskip("hatchling")
    pytest.importorskip("hatch_vcs")
    return called(sys.executable, "-m", "hatchling", *arguments, cwd=cwd, **environment)


def git(*arguments: str, cwd: Path) -> str:
    # The checkout may belong to somebody else, as in a container.
    who = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "safe.directory=*")
    nothing = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    return called("git", *who, *arguments, cwd=cwd, **nothing)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variable for a compiler that does not optimize: that takes a tenth of the time."""
    command = os.environ.get("CC") or sysconfig.get_config_var("CC")
    if not command or os.name == "nt":
        return {}
    path = tmp_path_factory.mktemp("compiler") / "cc"
    path.write_text(f'#!/bin/sh\nexec {command} "$@" -O0\n')
    path.chmod(0o755)
    return {"CC": str(path)}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    hatchling("build", "-t", "sdist", "-d", out)
    return next(out.iterdir())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, compiler: dict[str, str]) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    hatchling("build", "-t", "wheel", "-d", out, **compiler)
    return next(out.iterdir())


def files_in(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


# --- sdist and wheel --------------------------------------------------------------------------------------------------


def test_the_sdist_has_what_its_tests_and_a_packager_need(sdist: Path) -> None:
    names = files_in(sdist)
    assert names >= {"LICENSE", "PKG-INFO", "README.md", "SECURITY.md", "CHANGELOG.md", "pyproject.toml", "tox.ini"}
    assert names >= {
        "dev",
        "constraints.txt",
        "pytest_modelprobe/py.typed",
        "tests/conftest.py",
        "docs/explanation/the-gate.md",
    }


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout")
def test_the_sdist_has_every_file_of_the_repository(sdist: Path) -> None:
    tracked = {path for path in git("ls-files", "-z", cwd=ROOT).split("\0") if path and (ROOT / path).exists()}
    assert {path.split("/")[0] for path in tracked - files_in(sdist)} <= NOT_IN_THE_SDIST


def test_the_wheel_has_the_package_and_its_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    parts = {".py", ".typed", ".css", ".js"}
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "pytest_modelprobe").rglob("*.*")}
    compiled = {name for name in names if name.startswith("pytest_modelprobe/_kernel.")}
    assert {name for name in names if ".dist-info/" not in name} - compiled == {
        name for name in package if Path(name).suffix in parts
    }
    assert len(compiled) == (not wheel.name.endswith("-py3-none-any.whl"))
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="there the compiler is no command")
def test_without_a_compiler_the_wheel_is_of_python_alone(tmp_path: Path) -> None:
    hatchling("build", "-t", "wheel", "-d", tmp_path, CC="/nowhere/cc")
    (wheel,) = tmp_path.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not any("_kernel." in name for name in archive.namelist())


TEST = """
from importlib import metadata
from pathlib import Path

import pytest_modelprobe
import torch
from pytest_modelprobe import kernel


def test_a_model(modelprobe):
    record = modelprobe.run(modelprobe.build(lambda: torch.nn.Linear(2, 3)), modelprobe.randn(4, 2))
    pytest_modelprobe.assert_shapes(record, {"(root)": "4 3"})
    assert Path(pytest_modelprobe.__file__).parent.parent == Path("installed").resolve()
    assert pytest_modelprobe.__version__ == Path("version").read_text("utf-8")
    assert (kernel.active is None) == Path("pure").exists()
"""


def install(built: Path, at: Path, **environment: str) -> None:
    """Install without the dependencies, which are those of this environment: nothing is downloaded."""
    pytest.importorskip("pip")
    offline = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    called(sys.executable, "-m", "pip", "install", *offline, "--target", at, built, cwd=at.parent, **environment)


def test_the_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    install(wheel, installed)
    (tmp_path / "test_it.py").write_text(TEST, "utf-8")
    (tmp_path / "version").write_text(wheel.name.split("-")[1], "utf-8")
    if wheel.name.endswith("-py3-none-any.whl"):
        (tmp_path / "pure").touch()
    without = ("-p", "no:xdist", "-p", "no:randomly", "-p", "no:cacheprovider")
    out = called(sys.executable, "-m", "pytest", "-q", *without, "test_it.py", cwd=tmp_path, PYTHONPATH=str(installed))
    assert "1 passed" in out
    script = next((installed / ("Scripts" if os.name == "nt" else "bin")).glob("modelprobe*"))
    assert "usage: modelprobe" in called(script, "--help", cwd=tmp_path, PYTHONPATH=str(installed))


# --- version ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    return tmp_path


def test_the_version_is_that_of_the_tag(scratch: Path) -> None:
    git("init", "-q", cwd=scratch)
    git("add", "-A", cwd=scratch)
    git("commit", "-qm", "one", cwd=scratch)
    git("tag", "v1.2.3", cwd=scratch)
    assert hatchling("version", cwd=scratch).strip() == "1.2.3"
    (scratch / "README.md").write_text("changed", "utf-8")
    assert re.fullmatch(r"1\.2\.4\.dev0\+\S+", hatchling("version", cwd=scratch).strip())


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    needed = [text for text in metadata.get_all("Requires-Dist") if "extra ==" not in text]
    assert {re.split(r"[<>=]", text)[0] for text in needed} == {"numpy", "pytest", "syrupy", "torch"}
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_command_has_two_names(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        commands = archive.read(name).decode().partition("[console_scripts]\n")[2].partition("\n\n")[0].split("\n")
    assert commands == [f"{name} = pytest_modelprobe.cli:main" for name in ("modelprobe", "pytest-modelprobe")]


# --- the changelog ----------------------------------------------------------------------------------------------------

CHANGELOG = """\
# Changelog

## [Unreleased]

### Added

- More.

## [1.1.0] - 2026-01-01

- Less.
"""


@functools.cache
def changelog() -> ModuleType:
    spec = importlib.util.spec_from_file_location("changelog", ROOT / ".github/changelog.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_unreleased_becomes_the_section_of_the_version() -> None:
    text = changelog().cut(CHANGELOG, "1.2.0", datetime.date(2026, 2, 3))
    assert text == CHANGELOG.replace("## [Unreleased]\n", "## [Unreleased]\n\n## [1.2.0] - 2026-02-03\n")
    assert changelog().notes(text, "1.2.0") == "### Added\n\n- More."
    assert changelog().notes(text, "1.1.0") == "- Less."


@pytest.mark.parametrize(
    ("version", "text", "message"),
    [
        ("1.1.0", CHANGELOG, "there is a section 1.1.0 already"),
        (
            "1.2.0",
            CHANGELOG.replace("### Added\n\n- More.\n", ""),
            "Unreleased is empty: there is nothing to release",
        ),
        ("1.2.0", "# Changelog\n", "there is no section Unreleased"),
    ],
    ids=["again", "empty", "none"],
)
def test_a_cut_that_makes_no_sense_is_refused(version: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{message}$"):
        changelog().cut(text, version, datetime.date(2026, 2, 3))


def test_a_tag_without_its_section_is_not_released(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "CHANGELOG.md"
    path.write_text(CHANGELOG, "utf-8")
    assert changelog().main(["notes", "v1.2.0", f"--file={path}"]) == 1
    assert capsys.readouterr().err == (
        "CHANGELOG.md: there are no notes for 1.2.0: run `python .github/changelog.py cut 1.2.0`\n"
    )
    assert changelog().main(["notes", "v1.1.0", f"--file={path}"]) == 1
    assert capsys.readouterr().err == "CHANGELOG.md: there are notes under Unreleased: cut them before the tag\n"
    assert changelog().main(["cut", "v1.2.0", f"--file={path}"]) == 0
    assert changelog().main(["notes", "v1.2.0", f"--file={path}"]) == 0
    assert capsys.readouterr().out == "### Added\n\n- More.\n"


# --- what GitHub and pre-commit read ----------------------------------------------------------------------------------


def read(path: str) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / path).read_text("utf-8"))


def test_only_the_job_that_publishes_has_an_identity() -> None:
    release = read(".github/workflows/release.yml")
    assert release["permissions"] == {"contents": "read"}
    asked = {name: job["permissions"] for name, job in release["jobs"].items() if "permissions" in job}
    assert asked == {"publish": {"id-token": "write"}, "announce": {"contents": "write"}}
    assert not any("checkout" in step.get("uses", "") for name in asked for step in release["jobs"][name]["steps"])
    assert set(release["jobs"]["publish"]["needs"]) == {"test-wheel", "test-sdist"}


def test_actions_are_pinned_by_hash_and_to_the_same_everywhere() -> None:
    paths = [ROOT / "action.yml", *(ROOT / ".github").rglob("*.yml"), *(ROOT / "examples").rglob("*.yml")]
    paths += (ROOT / "docs").rglob("*.md")
    found = [used for path in paths for used in re.findall(r"uses: ([^.\s].*)", path.read_text("utf-8"))]
    used = [one for one in found if "/pytest-modelprobe@" not in one]
    assert len(used) > 20
    pinned = {match[1]: match[0] for one in used if (match := re.fullmatch(r"(\S+)@[0-9a-f]{40} # v[\d.]+", one))}
    assert set(used) == {*pinned.values()}


def test_ruff_has_one_version() -> None:
    (rev,) = (one["rev"] for one in read(".pre-commit-config.yaml")["repos"] if "ruff" in one["repo"])
    assert f"ruff=={rev.removeprefix('v')}\n" in (ROOT / "constraints.txt").read_text("utf-8")


def test_the_hook_of_pre_commit_is_a_command_that_exists() -> None:
    (hook,) = read(".pre-commit-hooks.yaml")
    command, *arguments = [*shlex.split(hook["entry"]), *hook["args"]]
    assert command in PROJECT["project"]["scripts"]
    options = cli._parser().parse_args(arguments)
    assert (options.run, options.base, options.paths) == (run_check, "origin/main", [])
    assert (hook["pass_filenames"], hook["always_run"]) == (False, True)


@pytest.mark.parametrize(("form", "required"), [("bug", True), ("feature", False)])
def test_issue_forms_ask_for_the_doctor(form: str, required: bool) -> None:
    fields = {field["id"]: field for field in read(f".github/ISSUE_TEMPLATE/{form}.yml")["body"]}
    assert "`modelprobe doctor`" in fields["doctor"]["attributes"]["label"]
    assert fields["doctor"].get("validations", {}).get("required", False) == required
