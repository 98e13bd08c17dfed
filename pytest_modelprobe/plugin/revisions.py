"""`--modelprobe-base` and `--modelprobe-base-python`: tests run on another side too, and their models are compared.

The run itself is as it is without these options. After it, tests that passed run in processes of their own, on this
side and on the other, and their models are watched there. What can be wrong is found before the first test, if it can.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelprobe import extension

if TYPE_CHECKING:
    from pytest_modelprobe.gate import Repository
    from pytest_modelprobe.report.results import Base, PairResult, ShownCause
    from pytest_modelprobe.revisions import Pair, Side, SideBySide, TestsOn, Worktree

_FOLDER = "modelprobe_folder"
"""Tells a worker of xdist where to write."""

_ROOT = "modelprobe_repository"
"""Tells it the root of the repository."""

_DIFFERING = "modelprobe_differing"
"""Tells it which definitions differ."""

NOTHING_COMPARED = 16
"""The exit code of pytest where tests passed, and no model could be compared."""

_BUILT = (".so", ".pyd", ".dylib", ".dll")
"""Endings of compiled files."""

_BUILT_FROM = (".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hpp", ".pyx", ".pxd", ".rs")
"""Endings of the files that are compiled to them."""

_MOST = 5
"""Lines of a kind, but for models that changed."""


class Sides:
    """A plugin that runs the tests of this run on another side.

    Args:
        config: The configuration of the run.

    Raises:
        pytest.UsageError: There is no such side.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._known: set[str] = set()
        self._failed: set[str] = set()
        self._passed: set[str] = set()
        self._recorded: set[str] = set()
        self._found: SideBySide | None = None
        self._stopped: str | None = None
        """Why nothing was compared."""
        self._is_asked = False
        """Whether there has to be a comparison: tests ran to their end in this process."""
        self._took = 0.0
        """How many seconds the tests took here."""
        self._versions: dict[str, tuple[str, str]] = {}
        self._repository: Repository | None = None
        self._built = ""
        """What is not compared, for both sides use compiled files of this side."""
        self._left_out: set[str] = set()
        """Tests that do not run again, for they use nothing that differs."""
        worker = getattr(config, "workerinput", None)
        self._root = Path(worker[_ROOT]) if worker and worker[_ROOT] else None
        """The root of the repository, if the other side is a commit of it."""
        self._differing: dict[str, list[str]] = worker[_DIFFERING] if worker else {}
        """Files of Python on both sides → the names at their top that differ."""
        self._folder = Path(worker[_FOLDER] if worker else tempfile.mkdtemp(prefix="modelprobe-records-"))
        if worker is None:
            config.add_cleanup(lambda: shutil.rmtree(self._folder, ignore_errors=True))
            self._begin()

    def _begin(self) -> None:
        """Find the commit and the interpreter before the tests run."""
        from pytest_modelprobe.gate import GitError, Repository
        from pytest_modelprobe.revisions import Side, SideError

        option = self._config.option
        self._ref: str | None = option.modelprobe_base
        self._python = str(option.modelprobe_base_python or sys.executable)
        self._commit = ""
        try:
            if self._ref is not None:
                self._repository = Repository(self._config.rootpath)
                self._root = self._repository.root
                self._commit = self._repository.merge_base(self._ref)
                if (selection := extension.selection()) is not None:
                    self._differing = dict(selection.differing_definitions(self._repository, self._commit))
            if option.modelprobe_base_python is not None:
                if shutil.which(self._python) is None:
                    raise SideError(f"there is no interpreter {self._python}")
                there = Side(self._python, self._config.rootpath).versions()
                ours = Side(sys.executable, self._config.rootpath).versions()
                self._versions = {n: (ours[n], v) for n, v in there.items() if v != ours[n]}
        except (GitError, SideError) as error:
            name = "--modelprobe-base-python" if isinstance(error, SideError) else f"--modelprobe-base={self._ref}"
            raise pytest.UsageError(f"{name}: {error}") from None

    @property
    def name(self) -> str:
        """The other side in words."""
        parts = [] if self._ref is None else [f"{self._ref} ({self._commit[:10]})"]
        if self._config.option.modelprobe_base_python is not None:
            parts.append(self._python)
        return " under ".join(parts)

    def plugins(self) -> Iterator[tuple[str, object]]:
        """Yield what else looks on while the tests run, by name."""
        from pytest_modelprobe.revisions import TestFiles

        if self._root is not None:
            made = selection.MadeModules() if (selection := extension.selection()) else None
            yield "modelprobe-files", TestFiles(self._folder, self._root, self._differing, made)
            if made is not None:
                yield "modelprobe-made", made

    # --- this side ----------------------------------------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell the workers of xdist where to write."""
        node.workerinput[_FOLDER] = str(self._folder)
        node.workerinput[_ROOT] = str(self._root or "")
        node.workerinput[_DIFFERING] = self._differing

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        """Note tests that do not run here."""
        self._known |= {item.nodeid for item in items}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note tests that ran here, that failed, and that recorded something."""
        self._known.add(report.nodeid)
        if report.failed:
            self._failed.add(report.nodeid)
        if report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
            self._passed.add(report.nodeid)
        if getattr(report, "modelprobe", ()):
            self._recorded.add(report.nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, Any, Any]:
        """Run the tests on the other side, after those of this one."""
        started = time.monotonic()
        result = yield
        self._took = time.monotonic() - started
        option = self._config.option
        is_run = not any(getattr(option, name, False) for name in ("collectonly", "setuponly", "setupplan"))
        self._is_asked = is_run and not hasattr(self._config, "workerinput")
        if self._is_asked:
            self._compare()
        return result

    # --- the other side -----------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        from pytest_modelprobe.gate import GitError
        from pytest_modelprobe.progress import listening
        from pytest_modelprobe.revisions import SideError
        from pytest_modelprobe.text import count

        if not (tests := self._affected(self._passed | self._recorded)):
            if not self._left_out:
                self._stopped = "nothing was compared: no test passed"
            return
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"\nmodelprobe: {count(len(tests), 'test')} again, here and at {self.name} ...")
        try:
            with contextlib.ExitStack() as stack:
                if (line := self._config.pluginmanager.get_plugin("modelprobe-progress")) is not None:
                    stack.enter_context(listening(line))
                found = self._compared(stack, tests)
                pairs = [*map(self._with_source_outside, found.pairs)]
                self._found = dataclasses.replace(found, pairs=pairs)
        except (GitError, SideError) as error:
            self._stopped = f"nothing was compared: {str(error).removeprefix('nothing was compared: ')}"
        if self._found is not None and not self._found.tests and not self._found.here.unread:
            self._stopped = (
                "nothing was compared: no test that passed makes or calls a model of your own classes, nor records "
                "one through the fixture modelprobe"
            )

    def _affected(self, tests: set[str]) -> set[str]:
        """Return those of some tests that may depend on a file that differs."""
        from pytest_modelprobe.revisions import is_affected

        option = self._config.option
        if self._repository is None or option.modelprobe_base_python is not None or option.modelprobe_base_all:
            return tests
        changed = [name for name in self._repository.changed_files(self._commit) if self._differing.get(name) != []]
        self._left_out = {test for test in tests if not is_affected(self._folder, test, changed)}
        return tests - self._left_out

    def _with_source_outside(self, pair: Pair) -> Pair:
        """Return a pair with what else differs that the test uses, where no class of the model has another source."""
        from pytest_modelprobe.gate import changed_definitions
        from pytest_modelprobe.revisions import differing_of

        if self._repository is None or pair.verdict != "changed" or pair.source:
            return pair
        found = differing_of(self._folder, pair.here.test)
        return dataclasses.replace(pair, source=tuple(changed_definitions(found, self._text_before)))

    @functools.cache  # noqa: B019 - it lives as long as the run
    def _text_before(self, file: Path) -> str | None:
        assert self._repository is not None
        return self._repository.text_at(self._commit, file)

    def _compared(self, stack: contextlib.ExitStack, tests: set[str]) -> SideBySide:
        from pytest_modelprobe.revisions import Worktree, import_roots, side_by_side
        from pytest_modelprobe.text import listed

        root, started_in = self._config.rootpath.resolve(), self._config.invocation_params.dir.resolve()
        ours = self._tests_on(self._side(sys.executable, started_in, import_roots(root, root)), root)
        if self._repository is None:
            theirs = self._tests_on(self._side(self._python, started_in, import_roots(root, root)), root)
            return side_by_side(tests, ours, theirs, folder=self._folder, check=lambda *_: None)
        tree = stack.enter_context(Worktree(self._repository, self._commit))
        imports = import_roots(self._repository.root, tree.root)
        side = self._side(self._python, tree.folder(started_in), imports, without=self._repository.root)
        theirs = self._tests_on(side, tree.path(root) or tree.root)
        ignored = list(self._ignored(tests, tree))
        built = sorted(file.name for file in ignored if file.suffix in _BUILT)
        sources = [name for name in self._repository.changed_files(self._commit) if name.endswith(_BUILT_FROM)]
        if built and sources:
            self._built = (
                f"both sides use {listed(built)} as built here, so what differs in {listed(sources)} is not compared: "
                "take a snapshot with the other build"
            )
        tree.take([*ignored, *self._files_of(tests)])

        def own_tests() -> None:
            tree.clean()
            tree.take(ignored)

        return side_by_side(tests, ours, theirs, folder=self._folder, check=tree.check, own_tests=own_tests)

    def _side(self, python: str, directory: Path, imports: list[Path], **more: Any) -> Side:
        """Return a side whose processes share the cores with those of the other side."""
        from pytest_modelprobe.revisions import Side

        threads = max(1, (os.cpu_count() or 1) // max(2, self._processes))
        return Side(python, directory, imports, threads=threads, **more)

    @property
    def _processes(self) -> int:
        return int(getattr(self._config.option, "numprocesses", None) or 1)

    def _files_of(self, tests: set[str]) -> Iterator[Path]:
        """Yield the files that tests of this side need: both sides are asked the same.

        These are the files of the tests, each conftest.py above them, and all that git knows in a folder of tests.
        """
        assert self._repository is not None
        root = self._repository.root
        files = {(self._config.rootpath / test.partition("::")[0]).resolve() for test in tests}
        folders = {above for file in files for above in file.parents if above.is_relative_to(root)}
        yield from files
        yield from (folder / "conftest.py" for folder in folders)
        of_tests = [folder for folder in folders if folder.name in ("test", "tests", "testing")]
        for name in self._repository.working_files():
            if any((root / name).is_relative_to(folder) for folder in of_tests):
                yield root / name

    def _ignored(self, tests: set[str], tree: Worktree) -> Iterator[Path]:
        """Yield the files that tests use and git does not have: weights, and compiled extensions."""
        from pytest_modelprobe.revisions import files_of

        assert self._repository is not None
        files = {self._repository.root / name for test in tests for name in files_of(self._folder, test) or ()}
        yield from (file for file in files.difference(tree.known()) if ".git" not in file.parts)

    def _tests_on(self, side: Side, root: Path) -> TestsOn:
        from pytest_modelprobe import child
        from pytest_modelprobe.revisions import TestsOn, options_for

        # A file that was named is where it is on the other side; any other is found there as here.
        given = self._config.inipath if getattr(self._config.option, "inifilename", None) else None
        ini = None if given is None else str(root / os.path.relpath(given, self._config.rootpath))
        return TestsOn(
            side=side,
            root=root,
            options=options_for(self._config, rootdir=str(root), inifilename=ini),
            plugins=child.plugins_of(self._config),
            processes=self._processes,
            logs=self._folder / "logs",
            took=self._took,
        )

    # --- for reports --------------------------------------------------------------------------------------------------

    def results(self) -> tuple[Base | None, dict[str, list[PairResult]]]:
        """Return what was compared as a whole, and the pairs of each test. None if it did not come to that."""
        from pytest_modelprobe.report.results import Base

        if self._found is None and self._stopped is None and not self._left_out:
            return None, {}
        found = self._found
        whole = Base(
            ref=self._ref,
            commit=self._commit or None,
            python=self._config.option.modelprobe_base_python,
            said=self._said(),
            stopped=self._stopped,
            verdicts=Counter(pair.verdict for pair in self._pairs),
            unpaired=found.unpaired if found else 0,
            only_here=tuple(found.only_here) if found else (),
            only_there=tuple(self._only_there),
            failed={**found.ran.unread, **found.ran.failed} if found else {},
            versions=self._versions,
        )
        pairs: dict[str, list[PairResult]] = {}
        for pair in self._pairs:
            told = _pair_result(pair, self._config.rootpath)
            pairs.setdefault(pair.here.test, []).append(told)
        return whole, pairs

    # --- what is said -------------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run if that is asked for, or nothing could be compared."""
        if not self._is_asked or session.exitstatus != pytest.ExitCode.OK:
            return
        from pytest_modelprobe.gate import declared_change

        compared = [pair for pair in self._pairs if pair.verdict not in ("not repeatable", "not run")]
        fail_on = self._config.option.modelprobe_base_fail_on
        if not compared and (self._found is not None or self._stopped is not None):
            session.exitstatus = NOTHING_COMPARED
        elif any(pair.verdict == "changed" for pair in compared) and (
            fail_on == "changed" or (fail_on == "undeclared" and declared_change(os.environ) is None)
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write the section."""
        from pytest_modelprobe.text import printable

        if hasattr(self._config, "workerinput"):
            return
        changed = [pair.here.test for pair in self._pairs if pair.verdict == "changed"]
        if changed:
            # For pytest's last line, which else says that all passed. Other plugins read these as reports of tests.
            reports = [pytest.TestReport(test, (test, None, test), {}, "passed", None, "call") for test in changed]
            terminalreporter.stats["model changed" if len(changed) == 1 else "models changed"] = reports
        lines = list(self._lines())
        if lines:
            terminalreporter.section(f"modelprobe: beside {printable(self.name)}")
            for line in lines:
                terminalreporter.write_line(line)

    @property
    def _pairs(self) -> Sequence[Pair]:
        return () if self._found is None else self._found.pairs

    def _said(self) -> str:
        """Return how many models are as they were, or why nothing was compared."""
        from pytest_modelprobe.revisions import summary
        from pytest_modelprobe.text import count

        if self._stopped is not None:
            return self._stopped
        found, whole = self._found, []
        told = [(len(self._left_out), "test", "not run again, for nothing that they use differs")]
        if found is not None:
            whole = [summary(found.pairs) if found.pairs else "nothing was compared"]
            elsewhere = self._recorded - found.tests - found.here.failed.keys() - self._left_out
            told += [
                (len(found.only_here), "test", "only here"),
                (len(self._only_there), "test", "only there"),
                (found.unpaired, "record", "of one side alone"),
                (len(elsewhere), "test", "not compared, for it runs in several processes"),
            ]
        counts = (f"{count(n, noun)} {what}" for n, noun, what in told if n)
        return "; ".join(filter(None, [*whole, *counts, self._built]))

    def _lines(self) -> Iterator[str]:
        from pytest_modelprobe.revisions import changed_lines
        from pytest_modelprobe.text import printable

        if said := self._said():
            yield printable(said)
        if self._found is None:
            return
        here, ran = self._found.here, self._found.ran
        yield from _first(f"here {file}: {why}" for file, why in here.unread.items())
        yield from _first(self._unwatched())
        for name, (now, then) in self._versions.items():
            yield printable(f"{name}: {now} here, {then} there")
        failed = [
            *ran.unread.items(),
            *((test, why) for test, why in ran.failed.items() if test not in {*here.failed, *self._failed}),
        ]
        yield from _first(f"there {test}: {why}" for test, why in failed)
        yield from _first(
            f"{pair.here.test}, {pair.here.key}: not compared, for it is not repeatable "
            + pair.where_unrepeatable(self.name)
            for pair in self._pairs
            if pair.verdict == "not repeatable"
        )
        yield from changed_lines(self._pairs)

    def _unwatched(self) -> Iterator[str]:
        """Yield why models were not watched here, and of how many tests."""
        from pytest_modelprobe.revisions import read_reasons
        from pytest_modelprobe.text import count

        assert self._found is not None
        tests: dict[str, set[str]] = {}
        for test, why in read_reasons(self._folder / "here"):
            tests.setdefault(f"has a model that is not watched: {why}", set()).add(test)
        for test in self._passed & self._found.here.failed.keys():
            how, _, why = self._found.here.failed[test].partition(": ")
            told = why if how == "stopped" else f"passes, but not while its models are watched ({why})"
            tests.setdefault(f"not compared: {told}", set()).add(test)
        for what, those in sorted(tests.items()):
            yield f"{count(len(those), 'test')}, as {min(those)}: {what}"

    @property
    def _only_there(self) -> list[str]:
        """Tests with a probe that this side does not have. Where single tests were asked for, nobody knows."""
        if self._found is None or any("::" in argument for argument in self._config.args):
            return []
        return sorted(set(self._found.ran.with_probe) - self._known)


def _first(lines: Iterable[str]) -> Iterator[str]:
    from pytest_modelprobe.text import printable

    found = list(lines)
    yield from map(printable, found[:_MOST])
    if len(found) > _MOST:
        yield f"... {len(found) - _MOST} more"


def _pair_result(pair: Pair, root: Path) -> PairResult:
    """Return two records that were compared.

    Args:
        pair: The pair.
        root: The folder to which the files of classes are relative.
    """
    from pytest_modelprobe.report.results import PairResult, Source
    from pytest_modelprobe.revisions import pair_text
    from pytest_modelprobe.snapshot.outcome import shown_causes

    head, diagnosis, first = pair.here.head, pair.diagnosis, pair.first
    changed = pair.verdict == "changed"
    text = pair_text(pair) if changed else ""

    def shown(causes: Sequence[Any]) -> tuple[ShownCause, ...]:
        return shown_causes(causes, pair.here.record, root, pair.here.sources) if causes else ()

    return PairResult(
        record=pair.here.key,
        verdict=pair.verdict,
        device=head.device,
        model=head.model,
        layers=head.layers,
        first_line=text.partition("\n")[0],
        causes=shown(diagnosis.causes) if changed else (),
        possible=shown(diagnosis.possible) if changed else (),
        notes=shown(diagnosis.notes),
        moved=len(diagnosis.moved) if changed else 0,
        text=text,
        first=None if first is None else first.layer,
        source=next(
            (
                Source(file=hunk.file.relative_to(root).as_posix(), line=hunk.line)
                for hunk in pair.source
                if hunk.file.is_relative_to(root)
            ),
            None,
        ),
    )
