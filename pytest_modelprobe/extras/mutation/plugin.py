"""``--modelprobe-mutate``: its options, and the session that runs tests again.

It must change nothing that the run reports: not its results, and not the snapshots.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelprobe.plugin import SETTINGS

if TYPE_CHECKING:
    from pytest_modelprobe.snapshot.session import SnapshotSession


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("modelprobe")
    group.addoption(
        "--modelprobe-mutate",
        nargs="?",
        const=sys.maxsize,
        type=_mutants,
        metavar="N",
        help="after the tests, run them again with faults planted in their models, N faults or all, and report those "
        "that no test notices",
    )
    group.addoption(
        "--modelprobe-mutate-faults",
        metavar="NAMES",
        help="plant these faults alone: 'layers', 'training', or names with commas, as nan,lr_*",
    )
    group.addoption(
        "--modelprobe-mutate-min",
        type=float,
        metavar="PERCENT",
        help="fail if the tests notice fewer of the faults that --modelprobe-mutate plants",
    )
    group.addoption(
        "--modelprobe-mutate-time",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="plant no more faults after so many seconds (300); the next run goes on there",
    )


def _mutants(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        said = f"{text!r} is no number of faults; name tests before the option, or write --modelprobe-mutate=N"
        raise argparse.ArgumentTypeError(said) from None


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register what runs tests again with faults, or in a process of its own what plants them."""
    _check_options(config)
    option = config.option
    if option.modelprobe_mutate is None:
        return
    from pytest_modelprobe.exceptions import UsageError

    from .operators import selected
    from .session import WORKER, MutationSession, Worker

    if WORKER in config.stash:
        config.pluginmanager.register(Worker(*config.stash[WORKER], lambda: _unreported(config)), "modelprobe-mutation")
        return
    names = option.modelprobe_mutate_faults
    try:
        operators = None if names is None else selected(names)
    except UsageError as error:
        raise pytest.UsageError(f"--modelprobe-mutate-faults: {error}") from None

    def tell(what: str) -> None:
        shown: Callable[[str], None] | None = config.pluginmanager.getplugin("modelprobe-progress")
        if shown is not None:
            shown(what)

    config.pluginmanager.register(MutationSession(config, operators, tell), "modelprobe-mutation")


def _check_options(config: pytest.Config) -> None:
    """Raise `pytest.UsageError` for options that do not go with each other."""
    option = config.option
    if option.modelprobe_mutate is None:
        for name, given in (("min", option.modelprobe_mutate_min), ("faults", option.modelprobe_mutate_faults)):
            if given is not None:
                raise pytest.UsageError(
                    f"--modelprobe-mutate-{name} is about the faults that --modelprobe-mutate plants: add it"
                )
        return
    if getattr(option, "update_snapshots", False):
        raise pytest.UsageError("--modelprobe-mutate compares with snapshots: update them first, in another run")
    if getattr(option, "usepdb", False):
        raise pytest.UsageError("--modelprobe-mutate makes tests fail on purpose: leave out --pdb")


@contextlib.contextmanager
def _unreported(config: pytest.Config) -> Iterator[None]:
    """Run tests within the block without a trace in reports and snapshots."""
    from pytest_modelprobe.snapshot.extension import assertions_forgotten

    snapshots: SnapshotSession | Any = config.pluginmanager.getplugin("modelprobe-snapshots")
    settings, policy = config.stash[SETTINGS], snapshots.policy
    settings.unreported = True
    snapshots.policy = policy._replace(output=None, may_write=False)
    try:
        with assertions_forgotten(config):
            yield
    finally:
        settings.unreported, snapshots.policy = False, policy
