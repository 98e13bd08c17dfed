"""`modelprobe doctor`: its text, and that nothing that is missing or broken stops it."""

from __future__ import annotations

import functools
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_modelprobe import _torch, kernel
from pytest_modelprobe.cli import main
from pytest_modelprobe.extras.doctor import command as doctor

INSTALLED = {
    "pytest-modelprobe": "1.2.0",
    "torch": "2.13.0+cpu",
    "numpy": "2.4.6",
    "pytest": "9.2.0",
    "syrupy": "7.0.2",
}

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
  pytest11  pytest-modelprobe 1.2.0, pytest-xdist 3.8.0

project
  pytest configuration  pytest.ini
  modelprobe_seed       3
  addopts               -q

switched off
  --snapshot-update of model snapshots  CI is set; --modelprobe-allow-update-in-ci permits it
"""


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without CUDA and MPS, outside CI, on which the folder `tmp_path` is current."""

    def version(name: str) -> str:
        if name not in INSTALLED:
            raise doctor.metadata.PackageNotFoundError(name)
        return INSTALLED[name]

    plugins = [
        SimpleNamespace(dist=SimpleNamespace(name=name, version=of))
        for name, of in (("pytest-xdist", "3.8.0"), ("pytest-modelprobe", "1.2.0"))
    ]
    for name in ("CI", "CUDA_VISIBLE_DEVICES", "PYTEST_ADDOPTS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda **_: plugins)
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


def test_the_text_and_json_of_the_same_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmodelprobe_seed = 3\naddopts = -q\n", "utf-8")
    monkeypatch.setenv("CI", "true")
    assert main(["doctor"]) == 0
    assert capsys.readouterr() == (TEXT, "")
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["versions", "devices", "pytest plugins", "project", "switched off"]
    assert found["versions"]["torch"] == "2.13.0+cpu"


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'torch'", name="torch"), OSError("libtorch.so: undefined symbol\n2")]
)
def test_a_torch_that_cannot_be_imported_is_a_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    class WithoutTorch:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "torch":
                raise error

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "meta_path", [WithoutTorch(), *sys.meta_path])
    found = doctor.report()
    assert found["devices"] == {"kernel": "compiled (avx2)"}
    said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    assert found["switched off"] == {"running models": f"torch cannot be imported: {said}"}


def test_a_missing_private_name_of_torch_says_what_cannot_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = functools.partial(_torch._refuse, "torch._C._gone", "no gradient can be watched")
    monkeypatch.setattr(_torch, "graph_task", refusal)
    monkeypatch.setattr(_torch, "PATHS", [*_torch.PATHS, "torch._C._gone", "torch.Tensor._gone_too"])
    assert doctor.report()["switched off"]["private names of torch"] == (
        "no torch._C._gone: no gradient can be watched; "
        "no torch.Tensor._gone_too: another way is used where there is one"
    )


def test_devices_of_cuda_have_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA {'AB'[index]}")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert doctor.report()["devices"]["cuda"] == "NVIDIA A, NVIDIA B (CUDA 12.8, cuDNN 91002)"


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


def test_a_damaged_configuration_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[pytest", "utf-8")
    found = doctor.report()["project"]["pytest configuration"]
    assert found.startswith("UsageError: ./pyproject.toml: ")


def test_a_plugin_that_is_not_loaded_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:modelprobe\n", "utf-8")
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda **_: [])
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    assert doctor.report()["switched off"] == {
        "the plugin": (
            "no entry point is installed; install pytest-modelprobe where pytest runs; PYTEST_DISABLE_PLUGIN_AUTOLOAD "
            "is set; -p pytest_modelprobe.plugin loads it; addopts has -p no:modelprobe"
        ),
        "modelprobe check, declare and REF:PATH": "git is not on PATH",
    }


def test_damaged_metadata_of_packages_stop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> Any:
        raise KeyError("Version")

    monkeypatch.setattr(doctor.metadata, "version", fails)
    monkeypatch.setattr(doctor.metadata, "entry_points", fails)
    found = doctor.report()
    assert found["versions"]["torch"] == "KeyError: 'Version'"
    assert found["switched off"] == {"the plugin": "KeyError: 'Version'"}


def test_no_value_of_the_environment_and_no_path_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("CI", "CUDA_VISIBLE_DEVICES", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "TOKEN"):
        monkeypatch.setenv(name, "a-secret")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--token=a-secret -p no:modelprobe")
    monkeypatch.setattr(doctor, "_git", lambda: f"\x1b[31m{tmp_path}/bin/git {sys.prefix}/x {Path.home()}/y")
    main(["doctor"])
    out = capsys.readouterr().out
    assert "a-secret" not in out
    assert "./bin/git <environment>/x ~/y" in out
    assert not any(text in out for text in ("\x1b", str(tmp_path), sys.prefix, str(Path.home())))
