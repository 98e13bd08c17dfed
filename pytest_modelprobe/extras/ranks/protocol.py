"""The protocol of a test that runs in ranks: the reports of all become one for each phase."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from pytest_modelprobe import child
from pytest_modelprobe._pytest import picklable, tear_down_before

from .processes import Assignment, Rank, Ranks

When = Literal["setup", "call", "teardown"]

_WHENS: tuple[When, ...] = ("setup", "call", "teardown")

_LOST = re.compile(r"Connection (closed|reset) by peer|Broken pipe")
"""What gloo raises in a rank where another is gone."""

_FOREIGN = re.compile(
    r'  File ".*/(_pytest|pluggy|multiprocessing|pytest_modelprobe/(extras/ranks|plugin))/'
    r'|  File "<string>"|Extension modules:'
)


def run_in_ranks(item: pytest.Item, nextitem: pytest.Item | None, *, world_size: int, timeout: float) -> None:
    """Run a test once in each of several processes, and report the outcome of all.

    Args:
        item: The test. Its fixtures are set up in the ranks alone.
        nextitem: The test that follows.
        world_size: How many ranks.
        timeout: Seconds until ranks that have not ended are taken to hang.
    """
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    outcome = _Outcome(item)
    with tempfile.TemporaryDirectory(prefix="modelprobe-ranks-", ignore_cleanup_errors=True) as folder:
        ranks = Ranks(_assignments(item, folder, world_size, timeout), outcome.receive)
        outcome.begin(ranks)
        ranks.run()
        reports = list(outcome.reports())
    for warning in dict.fromkeys(outcome.warnings):  # of several ranks, once
        item.ihook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": warnings.WarningMessage(*warning),
                "when": "runtest",
                "nodeid": item.nodeid,
                "location": None,
            }
        )
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    tear_down_before(item, nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _assignments(item: pytest.Item, folder: str, world_size: int, timeout: float) -> Iterator[Assignment]:
    options = child.options_of(item.config)
    for rank in range(world_size):
        yield Assignment(
            rank=rank,
            world_size=world_size,
            folder=folder,
            test="::".join([str(item.path), *item.nodeid.split("::")[1:]]),
            options=options,
            plugins=child.plugins_of(item.config),
            input=picklable(getattr(item.config, "workerinput", {})),
            environment=dict(os.environ),
            timeout=timeout,
        )


class _Outcome:
    """What the ranks sent, and what it comes to."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._ranks: Ranks
        self._begun = time.time()
        self._received: list[tuple[Rank, pytest.TestReport]] = []
        """In the order in which they came: the first that failed is the one to read."""
        self._broken_off: dict[int, str] = {}
        """Why ranks did not come to the test, or to its end, though they came to theirs."""
        self.warnings: list[tuple[str, type[Warning], str, int]] = []

    def begin(self, ranks: Ranks) -> None:
        """Take the ranks of which messages will come."""
        self._ranks = ranks

    def receive(self, rank: Rank, kind: str, data: Any) -> bool:
        """Take a message; return whether the verdict is known by it: the rank did not pass."""
        if kind == "warning":
            self.warnings.append(data)
            return False
        if kind == "began":
            return False
        if kind == "broken off":
            self._broken_off.setdefault(rank.number, data)
            return True
        if kind == "ended":
            if not self._came_to_the_end(rank):
                self._broken_off.setdefault(rank.number, f"pytest ended with exit code {data}")
            return rank.number in self._broken_off
        config = self._item.config
        report = config.hook.pytest_report_from_serializable(config=config, data=data)
        self._received.append((rank, report))
        if config.getoption("capture") == "no":
            sys.stdout.writelines(_shown(rank, report))
        return not report.passed

    def reports(self) -> Iterator[pytest.TestReport]:
        """Yield the report of each phase."""
        broken = self._broken()
        lost = {id(report) for _, report in self._received if report.failed and _LOST.search(report.longreprtext)}
        has_cause = broken is not None or any(r.failed and id(r) not in lost for _, r in self._received)
        passed = True
        for when in _WHENS:
            found = [(rank, report) for rank, report in self._received if report.when == when]
            if has_cause:  # the connections were lost for it
                found = [(rank, report) for rank, report in found if id(report) not in lost]
            if broken is not None and broken.when == when:
                yield broken
                passed = False
            elif found and (passed or when == "teardown"):
                found.sort(key=lambda pair: pair[1].passed and pair[0].number)  # rank 0 knows what was written
                rank, report = max(found, key=lambda pair: _weight(pair[1]))  # the first of the worst
                passed = report.passed
                yield self._named(rank, report, [other for _, other in found])

    def _broken(self) -> pytest.TestReport | None:
        """Return the report of a rank that sent none of its own: it hangs, died, or did not find the test."""
        for number, text in self._broken_off.items():
            began = any(sender.number == number for sender, _ in self._received)
            what = "broke the test off" if began else "did not come to the test"
            apart = "\n\n" if "\n" in text else " "
            return self._report(self._ranks.all[number], f"[rank {number}] {what}:{apart}{text}")
        failed = [report for _, report in self._received if report.failed]
        if failed and not _LOST.search(failed[0].longreprtext):
            return None
        dead = next((rank for rank in self._ranks.all if rank.exit_code is not None), None)
        if dead is not None:
            return self._report(dead, f"[rank {dead.number}] {_death(dead.exit_code or 0)}{self._came_to(dead)}")
        standing = next((rank for rank in self._ranks.all if rank.stack), None)
        if not self._ranks.is_late or standing is None:
            return None
        late = f"timed out after {self._ranks.limit:g} s{self._others()}"
        return self._report(standing, "\n".join([late, *self._hang()]))

    def _hang(self) -> Iterator[str]:
        for rank in self._ranks.all:
            yield f"[rank {rank.number}] {self._state(rank)}"
        yield ""
        if all(self._came_to_the_end(rank) for rank in self._ranks.all if rank.stack):
            yield "The test is over, and a process ends after its last thread: join the threads that the test starts."
            return
        yield (
            "A collective that not every rank calls waits for ever. If the ranks are only slow, give "
            "@pytest.mark.modelprobe(timeout=) more seconds."
        )

    def _came_to_the_end(self, rank: Rank) -> bool:
        """Whether a rank reported the last phase of the test."""
        return any(sender is rank and report.when == "teardown" for sender, report in self._received)

    def _others(self) -> str:
        ended = sum(rank.is_over for rank in self._ranks.all)
        return f": {ended} of {len(self._ranks.all)} ranks came to the end" if ended else ""

    def _report(self, rank: Rank, text: str) -> pytest.TestReport:
        item = self._item
        stack = [(f"[rank {rank.number}] stack", _own_frames(rank.stack)) for rank in self._ranks.all if rank.stack]
        log = [(f"[rank {rank.number}] stderr", _own_frames(rank.log))] if rank.log else []
        return pytest.TestReport(
            item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", text, self._phase(rank),
            sections=[*stack, *log], start=self._begun, stop=time.time(), duration=time.time() - self._begun,
        )  # fmt: skip

    def _phase(self, rank: Rank) -> When:
        """Return the phase in which a rank was when it ended."""
        reported = {report.when for sender, report in self._received if sender is rank}
        return next((when for when in _WHENS if when not in reported), "teardown")

    def _came_to(self, rank: Rank) -> str:
        return {"setup": " before the test began", "call": "", "teardown": " after the test"}[self._phase(rank)]

    def _named(self, rank: Rank, report: pytest.TestReport, found: list[pytest.TestReport]) -> pytest.TestReport:
        """Return the report with the rank in it, unless all ranks say the same."""
        prefix = f"[rank {rank.number}] "
        report.sections = [(prefix + name, text) for name, text in report.sections]
        if report.failed:
            path, line, domain = report.location
            report.location = path, line, f"{domain} [rank {rank.number}]"  # the headline of the failure
            crash = getattr(report.longrepr, "reprcrash", None)
            if crash is not None:
                crash.message = prefix + crash.message
            elif isinstance(report.longrepr, str):
                report.longrepr = prefix + report.longrepr
            report.sections.append(("ranks", "\n".join(self._states(rank))))
            if self._item.config.getoption("usepdb"):
                report.sections.append(("--pdb", "A debugger cannot stop in a rank: it has no terminal of its own."))
        elif isinstance(report.longrepr, tuple) and not (len(found) == len(self._ranks.all) and _agree(found)):
            path, line, reason = report.longrepr
            report.longrepr = path, line, reason.replace("Skipped: ", f"Skipped: {prefix}", 1)
        return report

    def _states(self, first: Rank) -> Iterator[str]:
        for rank in self._ranks.all:
            state = "failed first" if rank is first else self._state(rank)
            yield f"[rank {rank.number}] {state}"

    def _state(self, rank: Rank) -> str:
        worst = max((report for sender, report in self._received if sender is rank), key=_weight, default=None)
        if worst is not None and not worst.passed:
            if _LOST.search(worst.longreprtext):
                return "lost the connection to a rank that was gone"
            return "failed too" if worst.failed else str(worst.outcome)
        if rank.stack:
            return f"stands at {_place(rank.stack, self._item)}"
        return "passed" if rank.is_done else _death(rank.exit_code or 0)


def _agree(reports: list[pytest.TestReport]) -> bool:
    return all(report.longrepr == reports[0].longrepr for report in reports)


def _weight(report: pytest.TestReport) -> int:
    """Return how bad an outcome is: the worst of all ranks is that of the test."""
    if hasattr(report, "wasxfail") and report.skipped:
        return 3  # a test that is expected to fail fails where any rank does
    if report.failed:
        return 2 if str(report.longrepr).startswith("[XPASS(strict)]") else 4
    return int(report.skipped)


def _death(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"died with exit code {code}"


def _shown(rank: Rank, report: pytest.TestReport) -> Iterator[str]:
    """Yield what a rank printed in a phase, each line with its number."""
    for name, text in report.sections:
        if name.startswith("Captured std") and name.endswith(str(report.when)):
            yield from (f"[rank {rank.number}] {line}\n" for line in text.splitlines())


def _own_frames(stack: str) -> str:
    """Return a text without the frames of pytest and multiprocessing, which are the same in every test."""
    return "".join(line for line in stack.splitlines(keepends=True) if not _FOREIGN.match(line))


def _place(stack: str, item: pytest.Item) -> str:
    """Return the innermost line of a stack that is the project's own, else the innermost."""
    frames = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', stack, re.MULTILINE)
    if not frames:
        return "a place that it could not tell"
    root = item.config.rootpath
    own = (f for f in frames if Path(f[0]).is_relative_to(root) and "site-packages" not in f[0])
    path, line, function = next(own, frames[0])
    shown = os.path.relpath(path, item.config.invocation_params.dir) if Path(path).is_relative_to(root) else path
    return f"{shown}:{line} in {function}: {_source(Path(path), int(line))}"


def _source(path: Path, line: int) -> str:
    try:
        return path.read_text("utf-8").splitlines()[line - 1].strip()
    except (OSError, IndexError, UnicodeDecodeError):
        return "(no source)"
