"""`modelprobe doctor`: its text, and that nothing that is missing or broken stops it."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_modelprobe import _torch, kernel
from pytest_modelprobe.cli import main
from pytest_modelprobe.extras.doctor import command as doctor

PACKAGE = Path(importlib.util.find_spec("pytest_modelprobe").origin).parent

INSTALLED = {
    "pytest-modelprobe": "1.2.0",
    "torch": "2.13.0+cpu",
    "numpy": "2.4.6",
    "pytest": "9.2.0",
    "syrupy": "7.0.2",
    "pytest-xdist": "3.8.0",
    "hypothesis": "6.170.15",
}
REQUIRED = ["numpy>=1.26", "pytest>=8.2", "syrupy<8,>=6", "torch>=2.6"]

TEXT = """\
versions
  pytest-modelprobe  1.2.0
  python             3.11.7 (CPython, virtual environment)
  os                 Linux-6.1-x86_64
  torch              2.13.0+cpu
  numpy              2.4.6
  pytest             9.2.0
  syrupy             7.0.2
  git                2.39.5

devices
  cpu     x86_64, 4 threads
  cuda    not available: this torch is built without CUDA
  mps     not available
  kernel  compiled (avx2)

pytest plugins
  hypothesis    6.170.15
  pytest-xdist  3.8.0

project
  pytest configuration  pytest.ini
  modelprobe_seed       3
  CI                    detected: CI and GITLAB_CI
  before an upgrade     pytest --modelprobe-base-python=PATH, the interpreter of another environment

switched off
  devices cuda and mps: not available here; tests that ask for them are skipped
  --snapshot-update of model snapshots: CI is set; --modelprobe-allow-update-in-ci permits it
"""

Doctor = Callable[[], dict[str, Any]]


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without CUDA and MPS, outside CI, on which the folder `tmp_path` is current."""

    def version(name: str) -> str:
        if name not in INSTALLED:
            raise doctor.metadata.PackageNotFoundError(name)
        return INSTALLED[name]

    for name in (*doctor._CI_VARIABLES, "CUDA_VISIBLE_DEVICES", "PYTEST_ADDOPTS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: REQUIRED)
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda **_: ["modelprobe"])
    monkeypatch.setattr(doctor.platform, "platform", lambda: "Linux-6.1-x86_64")
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.11.7")
    monkeypatch.setattr(doctor, "_git", lambda: "2.39.5")
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setattr(kernel, "description", lambda: "compiled (avx2)")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    doctor._torch_problem.cache_clear()
    yield
    doctor._torch_problem.cache_clear()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmodelprobe_seed = 3\naddopts = -q\n", "utf-8")
    return tmp_path


def test_the_text(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("GITLAB_CI", "true")
    assert main(["doctor"]) == 0
    assert capsys.readouterr() == (TEXT, "")


def test_json_has_the_same_sections(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["versions", "devices", "pytest plugins", "project", "switched off"]
    assert found["versions"]["torch"] == "2.13.0+cpu"
    assert found["project"]["CI"] == "not detected"
    assert found["switched off"] == [
        "devices cuda and mps: not available here; tests that ask for them are skipped",
    ]


# --- torch ------------------------------------------------------------------------------------------------------------


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutTorch:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "torch":
                raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "meta_path", [WithoutTorch(), *sys.meta_path])
    found = doctor.report()
    unknown = "unknown without torch"
    assert found["devices"] == {"cpu": "x86_64", "cuda": unknown, "mps": unknown, "kernel": "compiled (avx2)"}
    assert found["switched off"] == ["running models: torch is not installed"]


def in_process_of_its_own(environment: dict[str, str], *path: Path) -> str:
    paths = os.pathsep.join(map(str, [*path, PACKAGE.parent]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest_modelprobe", "doctor"],
        env=os.environ | environment | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_torch_that_cannot_be_imported_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    fails = f"raise OSError('{tmp_path.as_posix()}/lib/libtorch.so: undefined symbol\\nand more')"
    (tmp_path / "torch" / "__init__.py").write_text(fails, "utf-8")
    elsewhere = tmp_path / "work"
    elsewhere.mkdir()
    os.chdir(elsewhere)
    out = in_process_of_its_own({"HOME": str(tmp_path), "USERPROFILE": str(tmp_path)}, tmp_path)
    problem = "torch cannot be imported: OSError: ~/lib/libtorch.so: undefined symbol"
    assert f"\nswitched off\n  running models: {problem}\n" in out
    assert str(tmp_path) not in out


def test_a_missing_private_name_of_torch_says_what_cannot_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = functools.partial(_torch._refuse, "torch._C._gone", "no gradient can be watched")
    monkeypatch.setattr(_torch, "graph_task", refusal)
    monkeypatch.setattr(_torch, "PATHS", [*_torch.PATHS, "torch._C._gone", "torch.Tensor._gone_too"])
    assert doctor.report()["switched off"][1:] == [
        "this torch has no torch._C._gone: no gradient can be watched",
        "this torch has no torch.Tensor._gone_too: another way is used where there is one",
    ]


def test_a_python_that_torch_cannot_compile_for_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_(**_: object) -> None:
        raise RuntimeError("torch.compile is not supported on Python 3.15+")

    monkeypatch.setattr(torch, "compile", compile_)
    assert doctor.report()["switched off"][-1] == (
        "checks.compile_parity: torch.compile does not work here: "
        "RuntimeError: torch.compile is not supported on Python 3.15+"
    )


# --- devices ----------------------------------------------------------------------------------------------------------


def test_devices_of_cuda_have_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA {'AB'[index]}")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    found = doctor.report()
    assert found["devices"]["cuda"] == "NVIDIA A, NVIDIA B (CUDA 12.8, cuDNN 91002)"
    assert found["switched off"] == ["devices mps: not available here; tests that ask for them are skipped"]


def test_a_warning_about_the_driver_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        warnings.warn("the driver is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert doctor.report()["devices"]["cuda"] == (
        "not available: torch finds no device; CUDA_VISIBLE_DEVICES is set; UserWarning: the driver is too old"
    )


def test_a_broken_driver_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def device_count() -> int:
        raise RuntimeError("CUDA driver initialization failed\nwith much more")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", device_count)
    assert doctor.report()["devices"]["cuda"] == "RuntimeError: CUDA driver initialization failed"


# --- the project ------------------------------------------------------------------------------------------------------


def test_settings_are_read_where_pytest_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmodelprobe_seed = 5", "utf-8")
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path / "tests")
    found = doctor.report()["project"]
    assert (found["pytest configuration"], found["modelprobe_seed"]) == ("pyproject.toml", "5")


def test_a_damaged_configuration_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[pytest", "utf-8")
    found = doctor.report()["project"]["pytest configuration"]
    assert found.startswith("UsageError: ./pyproject.toml: ")


# --- what is switched off ---------------------------------------------------------------------------------------------


def test_versions_that_are_not_supported_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INSTALLED, "pytest", "8.0.0")
    monkeypatch.delitem(INSTALLED, "numpy")
    assert doctor.report()["switched off"][:2] == [
        "numpy: not installed; pytest-modelprobe needs numpy>=1.26",
        "pytest 8.0.0: pytest-modelprobe needs pytest>=8.2",
    ]


def test_a_package_of_an_extra_is_named_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ['matplotlib>=3.8; extra == "plots"'])
    monkeypatch.delitem(INSTALLED, "matplotlib", raising=False)
    said = "matplotlib: not installed; pip install 'pytest-modelprobe[plots]' brings it"
    assert said in doctor.report()["switched off"]


def test_a_plugin_that_is_not_loaded_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:modelprobe\n", "utf-8")
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda **_: [])
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    assert doctor.report()["switched off"][:3] == [
        "the plugin: no entry point is installed; install pytest-modelprobe where pytest runs",
        "the plugin: PYTEST_DISABLE_PLUGIN_AUTOLOAD is set; -p pytest_modelprobe.plugin loads it",
        "the plugin: addopts has -p no:modelprobe",
    ]


def test_damaged_metadata_of_packages_stop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> Any:
        raise KeyError("Version")

    monkeypatch.setattr(doctor.metadata, "version", fails)
    monkeypatch.setattr(doctor.metadata, "entry_points", fails)
    found = doctor.report()
    assert found["versions"]["torch"] == "KeyError: 'Version'"
    assert "unknown: KeyError: 'Version'" in found["switched off"]


def test_without_git_the_gate_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    assert doctor.report()["switched off"][-1] == "modelprobe check, declare and REF:PATH: git is not on PATH"


def test_no_value_of_the_environment_and_no_path_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (*doctor._CI_VARIABLES, "CUDA_VISIBLE_DEVICES", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "TOKEN"):
        monkeypatch.setenv(name, "a-secret")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--token=a-secret -p no:modelprobe")
    monkeypatch.setattr(doctor, "_git", lambda: f"\x1b[31m{tmp_path}/bin/git {sys.prefix}/x {Path.home()}/y")
    main(["doctor"])
    out = capsys.readouterr().out
    assert "a-secret" not in out
    assert "./bin/git <environment>/x ~/y" in out
    assert not any(text in out for text in ("\x1b", str(tmp_path), sys.prefix, str(Path.home())))
