"""The pytest plugin: hooks and fixtures.

It is loaded in every run of pytest, also of projects without a model. So nothing here imports torch or numpy, or much
of this package, before a test needs it: imports stand inside the functions. A fixture is a short door to a class that
also works without pytest. What a test recorded is kept on its item until the report of its teardown, which xdist
carries to the controller; so it is reduced to builtin types.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelprobe import extension

from . import hookspecs
from .hookspecs import add_checks
from .settings import SETTINGS as SETTINGS
from .settings import (
    add_filter,
    add_options,
    as_list,
    compares_sides,
    resolve,
    settings_of,
)
from .settings import marker_arguments as marker_arguments
from .settings import marker_error as marker_error
from .terminal import (
    Annotations,
    ProgressLine,
    Terminal,
    named_records,
    shows_first_use,
    summaries,
)

if TYPE_CHECKING:
    from pytest_modelprobe.probe import ModelProbe
    from pytest_modelprobe.record import NamedRecord
    from pytest_modelprobe.snapshot.comparer import Comparer
    from pytest_modelprobe.snapshot.snapshot import ModelProbeSnapshot

_PROBE_FIXTURES = frozenset({"modelprobe", "modelprobe_factory", "modelprobe_device"})

_CHECKED = pytest.StashKey[list[tuple[str, int, str]]]()
_SUMMARIES = pytest.StashKey[list[dict[str, Any]]]()
_OBSERVED = pytest.StashKey[list["NamedRecord"]]()
_FIGURES = pytest.StashKey[list[dict[str, str]]]()
_FAILED = pytest.StashKey[bool]()
_SNAPSHOTS = pytest.StashKey[Any]()
COMPARER = pytest.StashKey[Any]()
"""The `Comparer` of a test that compares with snapshots, until the report of its teardown."""

# --- options ----------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options and their ini settings, and load the plugins that go with this one."""
    from pytest_modelprobe.snapshot import options

    group = parser.getgroup("modelprobe", "unit tests for PyTorch models")
    add_options(parser, group)
    options.add_options(parser, group)
    # syrupy is loaded also if PYTEST_DISABLE_PLUGIN_AUTOLOAD is set. Our own plugins do not stand in `pytest_plugins`,
    # because for each name there pytest reads the entry points of all distributions.
    pluginmanager.import_plugin("syrupy", consider_entry_points=True)
    for name in extension.plugins():
        pluginmanager.import_plugin(name)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the hooks for other plugins."""
    pluginmanager.add_hookspecs(hookspecs)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Read the environment before a conftest.py can change it."""
    from pytest_modelprobe.snapshot.options import read_environment

    read_environment(early_config)


_INDENT = 8
"""Characters that pytest writes before a line of a failure."""


def pytest_configure(config: pytest.Config) -> None:
    """Read the options and register the marker and the snapshots of the run."""
    config.addinivalue_line(
        "markers",
        "modelprobe(devices=..., seed=..., tolerance=..., compare=...): devices and seed of the probe, tolerance and "
        "parts of the snapshot, for one test, class or module",
    )
    config.stash[SETTINGS] = settings_of(config)
    add_filter(config)
    from pytest_modelprobe.snapshot.options import policy_of
    from pytest_modelprobe.snapshot.session import SnapshotSession

    snapshots = SnapshotSession(config, policy_of(config), lambda: resolve(config.stash[SETTINGS].devices[0])[0])
    config.stash[_SNAPSHOTS] = snapshots
    _register(config, snapshots, "modelprobe-snapshots")
    sides = None
    if compares_sides(config):
        from .revisions import Sides

        sides = Sides(config)
    base = None if sides is None else sides.results
    if config.stash[SETTINGS].reports:
        from .results import ResultsWriter

        _register(config, ResultsWriter(config, lambda: snapshots.unused, base), "modelprobe-results")
    if Annotations.is_wanted(config):
        _register(config, Annotations(lambda: snapshots.results, base), "modelprobe-annotations")
    if sides is not None:
        _register(config, sides, "modelprobe-base")
        for name, part in sides.plugins():
            _register(config, part, name)


def _register(config: pytest.Config, part: object, name: str) -> None:
    if config.pluginmanager.register(part, name) is None:
        # The tests would go on without what fails a run: swallowed comparisons, unused files, models that changed.
        raise pytest.UsageError(f"-p no:{name} takes away a part of pytest-modelprobe; -p no:modelprobe is all of it")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return the device and the seed if they were given, and with ``-v`` which code computes the numbers of tensors."""
    settings = config.stash[SETTINGS]
    parts = []
    if settings.devices_from:
        parts.append(f"device {', '.join(settings.devices)}")
    if settings.seed:
        parts.append(f"seed {settings.seed}")
    if config.get_verbosity() > 0:
        from pytest_modelprobe.exceptions import ModelProbeError

        try:
            from pytest_modelprobe import kernel
        except ModelProbeError as error:  # MODELPROBE_KERNEL cannot be met
            raise pytest.UsageError(str(error)) from None
        parts.append(f"kernel {kernel.description()}")
    return f"modelprobe: {'; '.join(parts)}" if parts else None


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Register what writes to the terminal. Under xdist the controller alone writes."""
    config = session.config
    if not hasattr(config, "workerinput"):
        _register(config, Terminal(config, config.stash[_SNAPSHOTS].lines), "modelprobe-terminal")
    terminal: Any = config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None and terminal.isatty:
        from pytest_modelprobe.text import fitted

        stack = contextlib.ExitStack()
        stack.enter_context(fitted(config.get_terminal_writer().fullwidth - _INDENT))
        config.add_cleanup(stack.close)
    if ProgressLine.is_wanted(config):
        config.pluginmanager.register(ProgressLine(config), "modelprobe-progress")
    add_checks(config)


# --- collection -------------------------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests with a probe by device if there are several devices."""
    if "modelprobe_device" not in metafunc.fixturenames:
        return
    devices = _devices_of(metafunc)
    if len(devices) > 1 or devices != metafunc.config.stash[SETTINGS].devices:
        # One device from a marker is no part of the test's name, where pytest can hide an id: from version 8.4 on.
        ids = devices if len(devices) > 1 else [pytest.HIDDEN_PARAM] if hasattr(pytest, "HIDDEN_PARAM") else devices
        metafunc.parametrize("modelprobe_device", devices, ids=ids, indirect=True, scope="session")


def _devices_of(metafunc: pytest.Metafunc) -> list[str]:
    devices = marker_arguments(metafunc.definition).get("devices")
    if devices is None or marker_error(metafunc.definition):  # the error is raised when the test is set up
        return metafunc.config.stash[SETTINGS].devices
    return list(dict.fromkeys(as_list(devices)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Find the fixtures to seed: those that tests with a probe depend on."""
    probed = [item for item in items if _has_probe(item)]
    if probed:
        from pytest_modelprobe._pytest import fixtures_of

        config.stash[SETTINGS].seeded_fixtures.update(*map(fixtures_of, probed))


def _has_probe(item: pytest.Item) -> bool:
    return not _PROBE_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


# --- fixtures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def modelprobe_device(request: pytest.FixtureRequest) -> Any:
    """The `torch.device` of the test. Tests are grouped by it, so a session fixture is set up once for each device."""
    import torch

    settings = request.config.stash[SETTINGS]
    name, problem = resolve(getattr(request, "param", None) or settings.devices[0])
    if problem:
        pytest.skip(f"device {name}: {problem}")
    return torch.device(name)


@pytest.fixture
def modelprobe(request: pytest.FixtureRequest, modelprobe_device: Any) -> Iterator[ModelProbe]:
    """A `ModelProbe` on the test's device: run or watch a model and assert on the record."""
    from pytest_modelprobe.probe import ModelProbe

    settings = request.config.stash[SETTINGS]
    options = settings.options_of_probe(modelprobe_device)
    recorder = request.config.pluginmanager.get_plugin("modelprobe-recorder")
    with ModelProbe(modelprobe_device, _seed_of(request.node), recorder=recorder, **options) as probe:
        probe.shows_layers = not settings.has_records and shows_first_use(request.config)
        yield probe
        _keep_observed(request.node, probe)


@pytest.fixture(scope="session")
def modelprobe_factory(request: pytest.FixtureRequest, modelprobe_device: Any) -> Iterator[Callable[[], ModelProbe]]:
    """Returns new probes, for fixtures of wider scope: run a model once, assert in several tests.

    The probes have the seed of the session: a marker applies to one test only.
    """
    from pytest_modelprobe.probe import ModelProbe

    settings = request.config.stash[SETTINGS]
    with contextlib.ExitStack() as probes:

        def make() -> ModelProbe:
            options = settings.options_of_probe(modelprobe_device)
            recorder = request.config.pluginmanager.get_plugin("modelprobe-recorder")
            probe = probes.enter_context(ModelProbe(modelprobe_device, settings.seed, recorder=recorder, **options))
            settings.shared_probes.append(probe)
            return probe

        yield make
    settings.shared_probes.clear()


@pytest.fixture
def modelprobe_snapshot(request: pytest.FixtureRequest) -> Iterator[ModelProbeSnapshot]:
    """A `ModelProbeSnapshot` to compare a record with: ``assert modelprobe.run(model, x) == modelprobe_snapshot``."""
    __tracebackhide__ = True
    from pytest_modelprobe.snapshot.comparer import Comparer
    from pytest_modelprobe.snapshot.snapshot import Arguments, ModelProbeSnapshot

    comparer = Comparer(request, request.config.stash[_SNAPSHOTS])
    request.node.stash[COMPARER] = comparer
    marked = marker_arguments(request.node)
    snapshot = ModelProbeSnapshot(comparer, Arguments())
    yield snapshot(tolerance=marked.get("tolerance"), compare=marked.get("compare"))
    _fail_unasserted(request.node)  # comparisons in the teardown of other fixtures


# --- seeding ----------------------------------------------------------------------------------------------------------


def _seed_of(item: pytest.Item) -> int:
    """Return the seed of a test: its marker's, else the session's."""
    return int(marker_arguments(item).get("seed", item.config.stash[SETTINGS].seed))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> Generator[None, Any, Any]:
    """Seed each fixture that a test with a probe depends on.

    Its seed is derived from its name, so its numbers are the same in whatever order fixtures are set up.
    """
    settings = request.config.stash[SETTINGS]
    if settings.seeded_fixtures.isdisjoint((fixturedef, fixturedef.argname)):
        return (yield)
    from pytest_modelprobe.models import derive, seeded

    with seeded(derive(settings.seed, f"fixture {fixturedef.argname}")):
        return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Seed the function of a test with a probe, and restore the generators after it.

    This is the innermost wrapper: random numbers that other plugins draw around the test change nothing in it.
    """
    if not _has_probe(pyfuncitem):
        return (yield)
    from pytest_modelprobe.models import seeded

    with seeded(_seed_of(pyfuncitem)):
        return (yield)


# --- running a test ---------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test with a probe, or one of an extra, if its marker is wrong. Other tests run."""
    is_extra = not extension.modules("marker").keys().isdisjoint(marker_arguments(item))
    wrong = marker_error(item) if is_extra or _has_probe(item) else None
    if wrong is not None:
        pytest.fail(f"@pytest.mark.modelprobe {wrong}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test that passed although a comparison without `assert` was not equal."""
    __tracebackhide__ = True
    try:
        result = yield
    except BaseException:
        _unasserted(item)  # the test failed already, for another reason
        raise
    _fail_unasserted(item)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Keep what shared probes recorded in the test. It is done first, because the last test closes these probes."""
    failure = None
    try:
        for probe in item.config.stash[SETTINGS].shared_probes:
            _keep_observed(item, probe)
    except Exception as error:  # noqa: BLE001 - a hook of another plugin raised it: fixtures are torn down nevertheless
        failure = error
    result = yield
    if failure is not None:
        raise failure
    return result


def _fail_unasserted(item: pytest.Item) -> None:
    __tracebackhide__ = True
    text = _unasserted(item)
    if text is not None:
        pytest.fail(text, pytrace=False)


def _unasserted(item: pytest.Item) -> str | None:
    comparer = item.stash.get(COMPARER, None)
    text: str | None = None if comparer is None else comparer.unasserted()
    return text


# --- reporting --------------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Put its message on a failed comparison, and what the test recorded on the report of its teardown."""
    if item.config.stash[SETTINGS].unreported:
        return (yield)
    comparer = item.stash.get(COMPARER, None)
    if comparer is not None:
        comparer.explain(call)
    report = yield
    if report.when == "call":
        item.stash[_FAILED] = report.failed
        notes = getattr(getattr(item, "funcargs", {}).get("modelprobe"), "notes", ()) if report.failed else ()
        if notes:  # on what the probe recorded: they may explain the failure
            from pytest_modelprobe.text import printable

            report.sections.append(("modelprobe", "\n".join(f"note: {printable(note)}" for note in notes)))
    elif report.when == "teardown":
        found = _summaries_of(item)
        if found:
            report.modelprobe = found
        if checked := item.stash.get(_CHECKED, []):
            report.modelprobe_checked = checked
            del item.stash[_CHECKED]  # a test that is run again has others
        if item.config.stash[SETTINGS].reports and (_has_probe(item) or comparer is not None):
            report.modelprobe_results = _results_of(item, comparer)
        if comparer is not None:
            from pytest_modelprobe.record import codec

            report.modelprobe_snapshots = codec.encode(tuple(comparer.results()))
            del item.stash[COMPARER]  # a test that is run again has another
    return report


def _keep_observed(item: pytest.Item, probe: ModelProbe) -> None:
    """Keep what the reports of a test need of the runs, watches and figures of a probe."""
    if item.config.stash[SETTINGS].unreported:
        return
    observed = named_records(probe)
    for one in observed:
        if one.record is not None:
            item.ihook.pytest_modelprobe_record(record=one.record, item=item)
    item.stash.setdefault(_CHECKED, []).extend(probe.take_checked())
    if observed:
        item.config.stash[SETTINGS].has_records = True
        item.stash.setdefault(_SUMMARIES, []).extend(summaries(observed, item.config))
    if item.config.stash[SETTINGS].reports:
        # The steps are made now, because fixtures that are torn down later may still change the model.
        kept = [one._replace(steps=one.steps[:] if len(one.steps) > 1 else ()) for one in observed]
        item.stash.setdefault(_OBSERVED, []).extend(kept)
        item.stash.setdefault(_FIGURES, []).extend(probe.take_figures())


def _summaries_of(item: pytest.Item) -> list[dict[str, Any]]:
    """Return what the probes recorded in a test. If it failed, findings are left out: they may be what it tests."""
    found = item.stash.get(_SUMMARIES, [])
    item.stash[_SUMMARIES] = []  # a test that is run again has others
    return [{**summary, "findings": []} for summary in found] if item.stash.get(_FAILED, False) else found


def _results_of(item: pytest.Item, comparer: Comparer | None) -> str:
    """Return what a test recorded and compared as JSON, which crosses processes whatever is in it."""
    from dataclasses import replace

    from pytest_modelprobe.record import codec
    from pytest_modelprobe.report.runs import Known, runs_of

    observed, figures = item.stash.get(_OBSERVED, []), item.stash.get(_FIGURES, [])
    item.stash[_OBSERVED], item.stash[_FIGURES] = [], []  # records are large
    known = [Known(one.given, one.diagnosis, one.expected) for one in (comparer.outcomes if comparer else ())]
    runs = runs_of(observed, known)
    # In a report, the paths of files are relative.
    snapshots = tuple(replace(one, key="", files=()) for one in (comparer.results() if comparer else ()))
    return json.dumps({"runs": codec.encode(runs), "snapshots": codec.encode(snapshots), "figures": figures})


@pytest.hookimpl(tryfirst=True)
def pytest_assertrepr_compare(left: object, right: object) -> list[str] | None:
    """Return the message of a comparison with a snapshot. Where pytest does not ask, `Comparer.explain` adds it."""
    module = sys.modules.get("pytest_modelprobe.snapshot.snapshot")
    if module is None:
        return None
    snapshot = next((side for side in (left, right) if isinstance(side, module.ModelProbeSnapshot)), None)
    text = snapshot.failure if snapshot is not None else None
    return text.splitlines() if text else None
