"""The snapshots of a whole run of pytest: comparisons, unused files, the summary.

Whether a file is unused is known only at the end of the run, and only if every test that could use it was collected and
passed. So this plugin collects what ran. Results come with the reports of the tests, in builtin types, because under
xdist the tests run in other processes; the workers send what they collected when they end, and only the controller
deletes, prints and writes. Every run of pytest loads this module, so modules that import `files` are imported inside
functions, where snapshots exist.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelprobe.exceptions import UsageError

from .options import DIRECTORY, Policy, keeps_unused, shown_path

if TYPE_CHECKING:
    from pytest_modelprobe.report.results import SnapshotResult

    from .naming import Module, Test


# --- the lines on snapshots in the terminal summary -------------------------------------------------------------------

_MOST = 10  # lines of a kind; --snapshot-details shows the rest of the unused files

Results = Sequence["SnapshotResult"]


@dataclasses.dataclass
class UnusedFiles:
    """Files that no test uses. Paths are relative to the directory where pytest was started."""

    unused: list[str] = dataclasses.field(default_factory=list)
    deleted: list[str] = dataclasses.field(default_factory=list)
    kept: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """Why they were kept → paths."""

    def add(self, path: str, why_kept: str | None, *, delete: bool) -> None:
        """Add a file: kept if there is a reason, else deleted or reported."""
        (self.kept.setdefault(why_kept, []) if why_kept else self.deleted if delete else self.unused).append(path)


def snapshot_results(report: pytest.TestReport) -> list[SnapshotResult]:
    """Return the comparisons of a test. On its report they are plain data, for xdist."""
    data = getattr(report, "modelprobe_snapshots", ())
    if not data:
        return []
    from pytest_modelprobe.record import codec
    from pytest_modelprobe.report.results import SnapshotResult

    return [codec.decode(SnapshotResult, one) for one in data]


def lines(
    results: Results, unused: UnusedFiles, policy: Policy, caught: Results = (), *, details: bool
) -> Iterator[str]:
    """Yield the lines, printable; no line if there is nothing to report."""
    if not results and unused == UnusedFiles() and not policy.reason:
        return
    from pytest_modelprobe.text import printable

    for part in (
        _caught(caught),
        _written(results),
        _stale(results, details=details),
        _not_compared(results, policy),
        _unused_lines(unused, len(unused.unused) if details else _MOST),
        _unused_reason(results, policy),
    ):
        yield from map(printable, part)


def _caught(results: Results) -> Iterator[str]:
    """Yield each failure that a test has caught or skipped."""
    for result in results:
        yield (
            f"{result.snapshot} differs, and {result.test} did not fail, so the run does: {result.first_line}"
            ". If it is to differ, write pytest.raises around the assertion, or assert ... != modelprobe_snapshot"
        )


def _written(results: Results) -> Iterator[str]:
    """Yield each snapshot that was written, and its findings."""
    from pytest_modelprobe.text import count

    created = [result for result in results if result.verdict == "created"]
    shown = created[:_MOST] + [result for result in created[_MOST:] if result.findings]
    for result in shown:
        seen = f": {'; '.join(result.findings)}" if result.findings else ""
        yield f"created {result.snapshot}: {count(result.layers, 'layer')}{seen}"
    if len(created) > len(shown):
        yield f"created {len(created) - len(shown)} more: nothing dead, all finite"
    for result in results:
        if result.verdict == "updated":
            yield f"updated {result.snapshot}: {result.first_line}"
            yield from (f"  {line}".rstrip() for line in result.text.splitlines()[1:])


def _unused_reason(results: Results, policy: Policy) -> Iterator[str]:
    """Yield what to do if a reason was given and no architecture changed.

    The message of a refused update says it itself, so nothing is said beside one.
    """
    if policy.reason and not any(result.declared or result.verdict == "changed" for result in results):
        yield (
            "no architecture changed in this run, so the reason was not written; to add a reason to a change that is "
            "already in the files, check out the files of the base first"
        )


def stale_of(results: Results) -> Results:
    """Return the comparisons that passed with a stale file: one of the same function, written otherwise."""
    return [result for result in results if result.verdict == "same" and result.notes]


def _stale(results: Results, *, details: bool) -> Iterator[str]:
    """Yield how many files are stale, and in how many places their models are written otherwise; as details, each."""
    from pytest_modelprobe.text import count

    stale = stale_of(results)
    if not stale:
        return
    places = sum(note.layers for result in stale for note in result.notes)
    seen = f"{count(len(stale), 'snapshot')} stale: same function, written otherwise in {count(places, 'place')}"
    yield f"{seen}:" if details else f"{seen}; --snapshot-details lists them, --snapshot-update writes them"
    if details:
        said = Counter((note.said, note.layers) for result in stale for note in result.notes)
        for (text, layers), models in said.items():
            yield f"  {text}{f' x{layers}' if layers > 1 else ''}{f' in {models} models' if models > 1 else ''}"


def _not_compared(results: Results, policy: Policy) -> Iterator[str]:
    from pytest_modelprobe.comparison import text as comparison_text
    from pytest_modelprobe.text import count

    for part, n in Counter(r.not_compared for r in results if r.not_compared).items():
        yield f"the {part} of {count(n, 'snapshot')} was not compared ({policy.compare_from})"
    unknown = [n for result in results if (n := result.values_not_compared)]
    if unknown:
        yield f"{comparison_text.not_compared_sentence(sum(unknown))[0]} They are of {count(len(unknown), 'snapshot')}."


def _unused_lines(unused: UnusedFiles, most: int) -> Iterator[str]:
    from pytest_modelprobe.text import count

    sentences = [
        ("deleted {} that no test uses", unused.deleted),
        ("{} unused, --snapshot-update deletes them", unused.unused),
        *((f"{{}} unused, and kept: {why}", paths) for why, paths in unused.kept.items()),
    ]
    for sentence, paths in sentences:
        if paths:
            yield sentence.format(count(len(paths), "snapshot file")) + ":"
            yield from (f"  {path}" for path in paths[:most])
            if len(paths) > most:
                yield f"  ... {len(paths) - most} more, with --snapshot-details"


@dataclasses.dataclass
class _Collected:
    """The modules and tests that one process collected in directories with snapshots."""

    modules: dict[str, bool] = dataclasses.field(default_factory=dict)
    """Path of each module → whether all of its tests were collected and selected."""
    tests: dict[str, tuple[str, str, str | None]] = dataclasses.field(default_factory=dict)
    """Node id → module, common part of the names of the test's files, device."""


class SnapshotSession:
    """A plugin that collects the results of the tests and finds unused files at the end of the run.

    Args:
        config: The configuration of the run.
        policy: The options of the run.
        device: Returns the device of tests that are not parametrized with one; it may import torch.
    """

    def __init__(self, config: pytest.Config, policy: Policy, device: Callable[[], str]) -> None:
        self.policy = policy
        self._device = device
        self._config = config
        self._collected = _Collected()
        self._paths: dict[str, str] = {}
        self._has_snapshots: dict[Path, bool] = {}
        self._workers_started = self._workers_finished = 0
        self._phases: dict[str, dict[str, str]] = {}
        self._expected_to_fail: set[str] = set()
        self._results: dict[tuple[str, str], SnapshotResult] = {}
        self.unused = UnusedFiles()
        """Known when the run has ended."""

    # --- what was collected ---------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        """Collect each module, and whether all of its tests are known: a module that skips itself hides them."""
        report = yield
        if isinstance(collector, pytest.Module) and self._is_with_snapshots(collector.path):
            self._collected.modules[str(collector.path)] = report.passed
        return report

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Collect each test, also those that are deselected later."""
        if self._is_with_snapshots(item.path):
            self._paths[item.nodeid] = str(item.path)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Find the modules of which only some tests run: files of their other tests are not unused."""
        if not self._paths and not self._collected.modules:
            return
        from .naming import device_of

        tests = self._collected.tests
        for item in session.items:
            if item.nodeid in self._paths:
                tests[item.nodeid] = str(item.path), self.stem_of(item), device_of(item)
        partly = {path for nodeid, path in self._paths.items() if nodeid not in tests}
        asked = [arg.partition("::")[0] for arg in self._config.args if "::" in arg.partition("[")[0]]
        partly |= {str(Path(self._config.invocation_params.dir, path).resolve()) for path in asked}
        option = self._config.option
        if getattr(option, "lf", False) or (asked and option.pyargs):
            partly |= self._collected.modules.keys()
        for path, known in self._collected.modules.items():
            self._collected.modules[path] = known and partly.isdisjoint({path, str(Path(path).resolve())})

    def _is_with_snapshots(self, module: Path) -> bool:
        folder = module.parent
        if folder not in self._has_snapshots:
            self._has_snapshots[folder] = (folder / DIRECTORY).is_dir()
        return self._has_snapshots[folder]

    @staticmethod
    def stem_of(item: pytest.Item) -> str:
        """Return the common part of the names of a test's files.

        It is without parameters if pytest numbered their ids: such a test has no snapshot of its own.
        """
        from .naming import function_of, stem_of

        try:
            return stem_of(item)
        except UsageError:
            return function_of(item)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Count the workers of xdist that started, and tell them whether this is CI."""
        self._workers_started += 1
        node.workerinput["modelprobe_in_ci"] = self._config.option.modelprobe_in_ci

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Receive what a worker of xdist collected. Each worker collects all tests, so the last one tells all."""
        collected = getattr(node, "workeroutput", {}).get("modelprobe")
        if collected is not None:
            self._workers_finished += 1
            self._collected = _Collected(collected["modules"], {k: tuple(v) for k, v in collected["tests"].items()})

    # --- what ran -------------------------------------------------------------------------------------------------

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the outcome and the comparisons of each test; those of its last run if it runs again."""
        self._phases.setdefault(report.nodeid, {})[str(report.when)] = report.outcome
        if hasattr(report, "wasxfail"):
            self._expected_to_fail.add(report.nodeid)
        for result in snapshot_results(report):
            self._results[report.nodeid, result.key] = result

    @property
    def results(self) -> list[SnapshotResult]:
        """All comparisons, in order."""
        return list(self._results.values())

    @property
    def _caught(self) -> list[SnapshotResult]:
        """Comparisons that were not equal although their tests did not fail, without `pytest.raises` or ``!=``.

        A test that catches the `AssertionError`, or skips itself for it, would hide a change of its model.
        """
        if not self._results:
            return []
        from .outcome import UNEQUAL

        unequal = [one for one in self.results if one.verdict in UNEQUAL and not one.expected]
        return [
            one
            for one in unequal
            if "failed" not in self._phases[one.test].values() and one.test not in self._expected_to_fail
        ]

    def _tests_of(self, module: Path) -> list[Test]:
        from .naming import Test

        passed = dict.fromkeys(("setup", "call", "teardown"), "passed")
        return [
            Test(stem, device or self._device(), passed=self._phases.get(nodeid) == passed)
            for nodeid, (path, stem, device) in self._collected.tests.items()
            if path == str(module)
        ]

    # --- the end --------------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None, Any, Any]:
        """Find unused files before the terminal summary lists them, and fail the run if there are any."""
        config = self._config
        if hasattr(config, "workerinput"):
            config.workeroutput["modelprobe"] = dataclasses.asdict(self._collected)  # type: ignore[attr-defined]
            return (yield)
        if not self._runs_no_test and not keeps_unused(config, "--snapshot-disable-unused"):
            self._handle_unused(self._reason_to_keep(session, exitstatus))
        unused_fails = self.unused.unused and not keeps_unused(config, "--snapshot-warn-unused")
        if (unused_fails or self._caught) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self._count_in_last_line(config.pluginmanager.get_plugin("terminalreporter"))
        return (yield)

    def _count_in_last_line(self, reporter: Any) -> None:
        """Add the snapshots that were written or not compared to the counts in the last line of the terminal."""
        if reporter is None:  # as with -p no:terminal
            return
        written = [one for one in self.results if one.verdict in ("created", "updated")]
        left_out = [one for one in self.results if one.not_compared or one.verdict == "not compared"]
        for done, found in (("written", written), ("not compared", left_out), ("stale", stale_of(self.results))):
            if found:
                # Other plugins read the attributes of what they find there, which are reports.
                reporter.stats[f"snapshot{'s' * (len(found) > 1)} {done}"] = [SimpleNamespace() for _ in found]

    @property
    def _runs_no_test(self) -> bool:
        """Whether tests are only collected or set up."""
        return any(getattr(self._config.option, name, False) for name in ("collectonly", "setuponly", "setupplan"))

    def _reason_to_keep(self, session: pytest.Session, exitstatus: int) -> str | None:
        """Return why no unused file may be deleted in this run; ``None`` if they may be."""
        if session.testsfailed:
            return "tests failed"
        ended = all("teardown" in self._phases.get(nodeid, ()) for nodeid in self._collected.tests)
        if not ended or session.shouldstop or exitstatus not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            return "the run was stopped"
        if self._workers_started != self._workers_finished:
            return "a worker of xdist did not report"
        return None

    def _handle_unused(self, why: str | None) -> None:
        """Report, delete or keep each file that no test uses."""
        if not self._collected.modules:
            return
        from .naming import unused_files

        updating = getattr(self._config.option, "update_snapshots", False)
        if updating and getattr(self._config.option, "no_cleanup", False):
            why = why or "--snapshot-no-cleanup was given"
        if updating and not self.policy.may_write:
            why = why or "CI is set"
        used = {Path(file) for result in self.results for file in result.files}
        ran = {result.device for result in self.results} or {self._device()}
        for module in self._modules():
            for path, reason in unused_files(module, used, ran):
                self.unused.add(shown_path(path, self._config), reason or why, delete=updating)
                if updating and not (reason or why):
                    path.unlink(missing_ok=True)
            for folder in (module.folder, module.folder.parent) if updating and not why else ():
                with contextlib.suppress(OSError):  # it is not empty
                    folder.rmdir()

    def _modules(self) -> Iterator[Module]:
        """Yield the modules with snapshots that were collected completely, and those that do not exist any more."""
        from .naming import Module, folder_of

        for folder in sorted({Path(path).parent for path in self._collected.modules}):
            there = {folder_of(path): path for path in folder.glob("*.py")}
            there |= {folder_of(Path(path)): Path(path) for path in self._collected.modules}
            for snapshots in sorted(path for path in (folder / DIRECTORY).iterdir() if path.is_dir()):
                module = there.get(snapshots)
                if module is None:
                    yield Module(snapshots, gone=True)
                elif self._collected.modules.get(str(module)):
                    yield Module(snapshots, gone=False, tests=self._tests_of(module))

    def lines(self) -> Iterator[str]:
        """Yield the lines of the terminal summary; none if every snapshot was equal."""
        if self._runs_no_test:
            return
        option = self._config.option
        details = getattr(option, "include_snapshot_details", False) or option.modelprobe_verbose
        yield from lines(self.results, self.unused, self.policy, self._caught, details=details)
