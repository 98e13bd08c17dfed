"""The mutation session of a run.

It runs tests again, which must change nothing that the run reports: not its results, and not the snapshots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from .settings import SETTINGS

if TYPE_CHECKING:
    from pytest_modelprobe.mutation import MutationSession, Worker
    from pytest_modelprobe.snapshot.session import SnapshotSession


def mutation_session(config: pytest.Config, snapshots: SnapshotSession) -> MutationSession | Worker:
    """Return the plugin that runs tests again with faults, or in a process of its own the one that plants them."""
    from pytest_modelprobe.exceptions import UsageError
    from pytest_modelprobe.mutation import WORKER, MutationSession, Options, Worker, selected

    if WORKER in config.stash:
        return Worker(*config.stash[WORKER], lambda: _unreported(config, snapshots))
    given = config.option
    names = given.modelprobe_mutate_faults
    try:
        operators = None if names is None else selected(names)
    except UsageError as error:
        raise pytest.UsageError(f"--modelprobe-mutate-faults: {error}") from None
    options = Options(given.modelprobe_mutate, given.modelprobe_mutate_min, given.modelprobe_mutate_time, operators)

    def tell(what: str) -> None:
        shown: Callable[[str], None] | None = config.pluginmanager.getplugin("modelprobe-progress")
        if shown is not None:
            shown(what)

    return MutationSession(config, options, tell)


@contextlib.contextmanager
def _unreported(config: pytest.Config, snapshots: SnapshotSession) -> Iterator[None]:
    """Run tests within the block without a trace in reports and snapshots."""
    from pytest_modelprobe.snapshot.extension import assertions_forgotten

    settings, policy = config.stash[SETTINGS], snapshots.policy
    settings.unreported = True
    snapshots.policy = policy._replace(output=None, may_write=False)
    try:
        with assertions_forgotten(config):
            yield
    finally:
        settings.unreported, snapshots.policy = False, policy
