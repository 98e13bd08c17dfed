"""The options of snapshots on the command line and in the ini file.

Every run of pytest loads this module. So it imports neither `files` nor `comparison`, and repeats two names of theirs.
An option on the command line is for that run; what stands in the ini file or in ``addopts`` stays, and has to be in the
snapshots too, where a reviewer sees it.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import pytest

DIRECTORY = "__modelprobe__"
"""The directory of the snapshots, beside the tests: `files.DIRECTORY`."""

Parts = Literal["all", "architecture", "behavior"]
"""What is compared: `comparison.Parts`."""


class Policy(NamedTuple):
    """The options of a run."""

    compare: Parts = "all"
    strict: bool = False
    """Whether an option asks for all. Then a refactoring fails tests too."""
    stale_fails: bool = False
    """Whether a test fails whose file is stale: the model computes the same, and is written otherwise."""
    compare_from: str = ""
    """The option or ini line from which ``compare`` is, as it was written."""
    for_this_run: bool = False
    """Whether ``compare`` was given on the command line, not in the ini file or ``addopts``."""
    reason: str | None = None
    accept: float = math.inf
    """The relative change of an output below which an update writes; 0: only where no number changed."""
    output: Path | None = None
    may_write: bool = True
    """Whether an update may write. While ``CI`` is set it may only if the command line allows it."""


def add_options(parser: pytest.Parser, group: pytest.OptionGroup) -> None:
    """Add the options and ini settings."""
    group.addoption(
        "--modelprobe-compare",
        choices=get_args(Parts),
        help="what snapshots compare: the architecture or the behavior alone, or all, which a refactoring fails too",
    )
    group.addoption("--modelprobe-reason", metavar="TEXT", help="written beside each architecture that is updated")
    group.addoption(
        "--modelprobe-accept",
        type=float,
        metavar="LIMIT",
        help="update only snapshots each cause in which changed less than LIMIT, as 1e-4; 0: only the structure",
    )
    group.addoption(
        "--modelprobe-output",
        metavar="DIR",
        help="write the snapshots that failed or are new there as they would be now: cp -r DIR/. . takes them over",
    )
    group.addoption(
        "--modelprobe-allow-update-in-ci",
        action="store_true",
        help="let --snapshot-update write model snapshots although CI is set; on the command line only",
    )
    parser.addini("modelprobe_compare", "what snapshots compare: all, architecture or behavior", default="")
    parser.addini(
        "modelprobe_stale", "whether tests pass or fail where a model is only written otherwise", default="pass"
    )


_IN_CI = pytest.StashKey[bool]()


def read_environment(config: pytest.Config) -> None:
    """Read ``CI`` before a conftest.py can change it: a test run must not permit itself to write snapshots."""
    config.stash[_IN_CI] = bool(os.environ.get("CI"))


def policy_of(config: pytest.Config) -> Policy:
    """Return the options of the command line and the ini file."""
    option, ini = config.getoption("--modelprobe-compare"), config.getini("modelprobe_compare")
    if ini not in ("", *get_args(Parts)):
        raise pytest.UsageError(f"modelprobe_compare is all, architecture or behavior; the ini file has {ini!r}")
    stale = config.getini("modelprobe_stale")
    if stale not in ("pass", "fail"):
        raise pytest.UsageError(f"modelprobe_stale is pass or fail; the ini file has {stale!r}")
    reason, output = config.getoption("--modelprobe-reason"), config.getoption("--modelprobe-output")
    if reason is not None and not reason.strip():
        raise pytest.UsageError("--modelprobe-reason is empty: say why the architecture changes, or leave it out")
    accept = config.getoption("--modelprobe-accept")
    if accept is not None and not accept >= 0:
        raise pytest.UsageError(f"--modelprobe-accept={accept:g}: it is a relative change, as 1e-4, or 0")
    for name, given in {"reason": reason, "accept": accept}.items():
        if given is not None and not getattr(config.option, "update_snapshots", False):
            raise pytest.UsageError(f"--modelprobe-{name} is about what an update writes: add --snapshot-update")
    return Policy(
        compare=option or ini or "all",
        strict=(option or ini) == "all",
        stale_fails=stale == "fail",
        for_this_run=_of_command_line(config, "--modelprobe-compare"),
        compare_from=f"--modelprobe-compare={option}" if option else f"modelprobe_compare = {ini}",
        reason=reason,
        accept=math.inf if accept is None else accept,
        output=Path(config.invocation_params.dir, output) if output else None,
        may_write=_may_write(config),
    )


def _may_write(config: pytest.Config) -> bool:
    if _IN_CI not in config.stash:  # a conftest.py loaded the plugin
        read_environment(config)
    # The environment of workers of pytest-xdist and of ranks is what a conftest.py left of it.
    told = getattr(config, "workerinput", {}).get("modelprobe_in_ci", config.stash[_IN_CI])
    config.option.modelprobe_in_ci = getattr(config.option, "modelprobe_in_ci", told)
    return not config.option.modelprobe_in_ci or _of_command_line(config, "--modelprobe-allow-update-in-ci")


def keeps_unused(config: pytest.Config, option: str) -> bool:
    """Whether an option of syrupy lets unused files be. In CI it has to stand on the command line."""
    given = bool(config.getoption(option, False))
    return given and (not config.option.modelprobe_in_ci or _of_command_line(config, option))


def _of_command_line(config: pytest.Config, option: str) -> bool:
    """Whether an option was given where pytest was called, and not in ``addopts`` or ``PYTEST_ADDOPTS``."""
    known: dict[str, bool] = config.option.__dict__.setdefault("modelprobe_of_command_line", {})
    # Ranks get a copy of the options, and have other arguments.
    return known.setdefault(option, any(text.startswith(option) for text in config.invocation_params.args))


def shown_path(path: Path, config: pytest.Config) -> str:
    """Return a path relative to the directory where pytest was started, else to the root directory."""
    for base in (config.invocation_params.dir, config.rootpath):
        if path.is_relative_to(base):
            return path.relative_to(base).as_posix()
    return str(path)
