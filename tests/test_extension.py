"""Extras are found by one table, and whatever of them is missing is not offered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pytest_modelprobe
from pytest_modelprobe import extension

PACKAGE = Path(pytest_modelprobe.__file__).parent
needs_extras = pytest.mark.skipif(not (PACKAGE / "extras").exists(), reason="the extras are deleted")


@needs_extras
def test_every_row_of_the_table_names_modules_that_exist() -> None:
    named = [*extension.plugins()]
    for door in (
        "commands",
        "marker",
        "names",
        "checks",
        "trainers",
        "exporters",
        "comparison",
        "runs",
        "probe",
        "watch",
        "record",
    ):
        named += [place.partition(":")[0] for place in extension.modules(door).values()]
    files = [PACKAGE.parent.joinpath(*name.split(".")) for name in named]
    assert named
    assert [file for file in files if not (file.with_suffix(".py").exists() or file.is_dir())] == []


def test_what_no_extra_brings_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'checks' has no attribute 'nothing'"):
        extension.attribute("checks", "nothing", "checks")


@pytest.mark.usefixtures("_forked")
def test_the_core_runs_tests_and_the_command_without_any_extra(tmp_path: Path) -> None:
    package = tmp_path / "site" / PACKAGE.name
    package.mkdir(parents=True)
    for path in PACKAGE.iterdir():
        if path.name not in ("extras", "__pycache__"):
            (package / path.name).symlink_to(path)
    (tmp_path / "test_it.py").write_text(
        "from torch import nn\n"
        "import pytest_modelprobe\n"
        "from pytest_modelprobe import *\n"
        "from pytest_modelprobe.checks import *\n"
        "from pytest_modelprobe import cli, extension\n"
        "def test_it(modelprobe, capsys):\n"
        "    assert extension.plugins() == [] and 'site' in pytest_modelprobe.__file__\n"
        "    assert modelprobe.run(nn.Linear(4, 2), modelprobe.randn(2, 4)).layers\n"
        "    assert finite(modelprobe, nn.Linear(4, 2), modelprobe.randn(2, 4)).verdict == 'holds'\n"
        "    assert cli.main(['show', '.']) == 2\n"
    )
    core = "import sys, pytest\n" + "for name in [n for n in sys.modules if n.startswith('pytest_modelprobe')]:\n"
    core += "    del sys.modules[name]\n"
    core += "raise SystemExit(pytest.main(['-q', '-p', 'pytest_modelprobe.plugin', '--modelprobe-verbose']))"
    ran = subprocess.run(
        [sys.executable, "-c", core],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(package.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
