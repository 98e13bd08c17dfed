"""The pytest plugin: options, fixtures, seeding of tests, the section in the terminal.

Loaded in every run of pytest where the package is installed, so nothing here imports torch before a test needs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .probe import ModelProbe
    from .snapshot.snapshot import ModelProbeSnapshot

# Loaded with this plugin where pytest loads none by itself.
pytest_plugins = ("syrupy",)

_PROBE_FIXTURES = frozenset({"modelprobe", "modelprobe_factory", "modelprobe_device"})
_FIRST_USE = "modelprobe/first_use"  # key in pytest's cache


@dataclasses.dataclass
class Settings:
    """What the command line and the ini file ask for."""

    devices: list[str]
    devices_from: str | None
    """``command line``, ``ini`` or None: the default."""
    seed: int
    verbose: bool
    seeded_fixtures: set[Any] = dataclasses.field(default_factory=set)
    """Fixtures on which a test with a probe depends, as `fixtures_of` returns them."""
    shared_probes: list[ModelProbe] = dataclasses.field(default_factory=list)
    """Probes that outlive a test: what they newly saw is told with the test in which they saw it."""


SETTINGS = pytest.StashKey[Settings]()
_SAID = pytest.StashKey[list[dict[str, Any]]]()
_FAILED = pytest.StashKey[bool]()
_SNAPSHOTS = pytest.StashKey[Any]()
_COMPARER = pytest.StashKey[Any]()

# --- options ------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options and their ini twins."""
    group = parser.getgroup("modelprobe", "unit tests for PyTorch models")
    group.addoption(
        "--modelprobe-device",
        action="append",
        default=None,
        metavar="DEVICE",
        help="device of the probe: cpu, cuda, cuda:N, mps or auto; may be repeated: each test runs on each",
    )
    group.addoption("--modelprobe-seed", type=int, default=None, metavar="N", help="base of all random numbers (0)")
    group.addoption(
        "--modelprobe-verbose", action="store_true", default=None, help="show the layers that each test's probe saw"
    )
    from .snapshot.options import add_options

    add_options(parser, group)
    parser.addini("modelprobe_devices", "devices of the probe; those that are missing skip", type="args", default=[])
    parser.addini("modelprobe_seed", "base of all random numbers", default="0")
    parser.addini("modelprobe_verbose", "show the layers that each test's probe saw", type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    """Read the options; nothing is looked up on the machine before a test needs it."""
    config.addinivalue_line(
        "markers",
        "modelprobe(devices=..., seed=..., tolerance=..., compare=...): devices and seed of the probe, tolerance and "
        "parts of the snapshot, for one test, class or module",
    )
    asked = config.getoption("--modelprobe-device")
    devices = asked or config.getini("modelprobe_devices")
    for name in devices:
        if not _is_device(name):
            source = f"--modelprobe-device={name}" if asked else f"modelprobe_devices in the ini file has {name!r}"
            raise pytest.UsageError(f"{source}: {_NO_DEVICE}")
    verbose = config.getoption("--modelprobe-verbose")
    config.stash[SETTINGS] = Settings(
        devices=list(dict.fromkeys(devices)) or ["cpu"],
        devices_from="command line" if asked else "ini" if devices else None,
        seed=_seed(config),
        verbose=config.getini("modelprobe_verbose") if verbose is None else verbose,
    )
    if asked:
        config.stash[SETTINGS].devices = _available(asked)
    from .snapshot.options import policy_of
    from .snapshot.session import SnapshotSession

    snapshots = SnapshotSession(config, policy_of(config), lambda: _resolve(config.stash[SETTINGS].devices[0])[0])
    config.stash[_SNAPSHOTS] = snapshots
    config.pluginmanager.register(snapshots, "modelprobe-snapshots")


def _seed(config: pytest.Config) -> int:
    option = config.getoption("--modelprobe-seed")
    if option is not None:
        return int(option)
    text = config.getini("modelprobe_seed")
    try:
        return int(text)
    except ValueError:
        raise pytest.UsageError(f"modelprobe_seed is an integer; the ini file has {text!r}") from None


_NO_DEVICE = "not a device of the probe; give cpu, cuda, cuda:N, mps or auto"


def _is_device(name: str) -> bool:
    """Whether a name is that of a device, here or elsewhere; it is asked without torch."""
    return re.fullmatch(r"(cpu|cuda|mps)(:\d+)?|auto", name) is not None


def _available(names: Iterable[str]) -> list[str]:
    """Return the devices asked for by name, each once; one that is missing is a usage error."""
    found = []
    for name in names:
        device, problem = _resolve(name)
        if problem:
            raise pytest.UsageError(f"--modelprobe-device={name}: {problem}")
        found.append(device)
    return list(dict.fromkeys(found))


def _resolve(name: str) -> tuple[str, str | None]:
    """Return the device that a name stands for, and why it cannot be had, if so."""
    if name == "cpu":
        return name, None
    import torch

    if name == "auto":
        return ("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"), None
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            build = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
            return name, f"torch.cuda.is_available() is False: {build} (torch {torch.__version__})"
        if device.index is not None and device.index >= torch.cuda.device_count():
            return name, f"torch finds {torch.cuda.device_count()} CUDA device(s), numbered from 0"
    elif device.type == "mps" and not torch.backends.mps.is_available():
        return name, f"torch.backends.mps.is_available() is False (torch {torch.__version__})"
    return name, None


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say what was asked for; nothing where nothing was."""
    settings = config.stash[SETTINGS]
    said = []
    if settings.devices_from:
        said.append(f"device {', '.join(settings.devices)}")
    if settings.seed:
        said.append(f"seed {settings.seed}")
    return f"modelprobe: {'; '.join(said)}" if said else None


# --- devices ------------------------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests with a probe once for each of several devices, grouped by device."""
    if "modelprobe_device" not in metafunc.fixturenames:
        return
    devices = _devices_of(metafunc)
    if len(devices) > 1 or devices != metafunc.config.stash[SETTINGS].devices:
        ids = devices if len(devices) > 1 else [pytest.HIDDEN_PARAM] if hasattr(pytest, "HIDDEN_PARAM") else devices
        metafunc.parametrize("modelprobe_device", devices, ids=ids, indirect=True, scope="session")


def _devices_of(metafunc: pytest.Metafunc) -> list[str]:
    marked = _marked(metafunc.definition)
    if marked.get("devices") is None or _wrong_in(metafunc.definition):  # which the test says when it is set up
        return metafunc.config.stash[SETTINGS].devices
    return list(dict.fromkeys(_listed(marked["devices"])))


def _listed(devices: Any) -> Iterable[Any]:
    return devices if isinstance(devices, (list, tuple)) else [devices]


def _seed_of(item: pytest.Item) -> int:
    """Return the seed of a test: its marker's, else the session's."""
    return int(_marked(item).get("seed", item.config.stash[SETTINGS].seed))


# --- the marker ---------------------------------------------------------------------------------------------------


_MARKER_TAKES = ("devices", "seed", "tolerance", "compare")


def _marked(node: pytest.Item) -> dict[str, Any]:
    """Return what the marker nearest to a test says; nothing where it has none."""
    marker = node.get_closest_marker("modelprobe")
    return dict(marker.kwargs) if marker else {}


def _wrong_in(node: pytest.Item) -> tuple[str, str] | None:
    """Return which argument of a test's marker is wrong, and why; None where none is."""
    marker = node.get_closest_marker("modelprobe")
    if marker is None:
        return None
    if marker.args:
        return "", f"takes keywords only: {_taken()}"
    unknown = min(marker.kwargs.keys() - set(_MARKER_TAKES), default=None)
    if unknown is not None:
        import difflib

        near = difflib.get_close_matches(unknown, _MARKER_TAKES, n=1)
        meant = f"is {near[0]}= meant? " if near else ""
        return unknown, f"takes no {unknown}=: {meant}It takes {_taken()}"
    for name in _listed(marker.kwargs.get("devices") or []):
        if not isinstance(name, str) or not _is_device(name):
            return "devices", f"has {name!r} in devices=: {_NO_DEVICE}"
    seed = marker.kwargs.get("seed", 0)
    if not hasattr(seed, "__index__"):
        return "seed", f"takes an integer as seed=; got {seed!r}"
    return None


def _taken() -> str:
    return f"{', '.join(f'{name}=' for name in _MARKER_TAKES[:-1])} and {_MARKER_TAKES[-1]}="


def _place_of(item: pytest.Item, argument: str) -> str:
    """Return file and line of an argument of the marker nearest to a test, else of what the marker is on."""
    node, _ = next(item.iter_markers_with_node("modelprobe"))
    first = (node.reportinfo()[1] or 0) if hasattr(node, "reportinfo") and not isinstance(node, pytest.Module) else 0
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines = node.path.read_text("utf-8").splitlines()[first:]
        wanted = re.compile(rf"\b{re.escape(argument)}\s*=" if argument else r"\bmark\.modelprobe\b")
        first += next((i for i, line in enumerate(lines) if wanted.search(line)), 0)
    return f"{os.path.relpath(node.path)}:{first + 1}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a marker with a slip in it where it matters, at its test: all others run."""
    wrong = _wrong_in(item) if _has_probe(item) else None
    if wrong is not None:
        argument, why = wrong
        pytest.fail(f"{_place_of(item, argument)}: @pytest.mark.modelprobe {why}", pytrace=False)


# --- fixtures -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def modelprobe_device(request: pytest.FixtureRequest) -> Any:
    """The `torch.device` of the test; tests are grouped by it, so that a model is built once for each."""
    import torch

    settings = request.config.stash[SETTINGS]
    name, problem = _resolve(getattr(request, "param", None) or settings.devices[0])
    if problem:
        pytest.skip(f"device {name}: {problem}")
    return torch.device(name)


@pytest.fixture
def modelprobe(request: pytest.FixtureRequest, modelprobe_device: Any) -> Iterator[ModelProbe]:
    """A `ModelProbe` on the test's device: run or watch a model and assert on what was seen."""
    from .probe import ModelProbe

    settings = request.config.stash[SETTINGS]
    with ModelProbe(
        modelprobe_device, _seed_of(request.node), device_required=_required(settings, modelprobe_device)
    ) as probe:
        yield probe
        request.node.stash[_SAID] = _told(probe, request.config)


def _required(settings: Settings, device: Any) -> bool:
    """Whether a model elsewhere is a mistake: the device was asked for by name, and is not where models are made."""
    return settings.devices_from == "command line" and device.type != "cpu"


@pytest.fixture(scope="session")
def modelprobe_factory(request: pytest.FixtureRequest, modelprobe_device: Any) -> Iterator[Callable[[], ModelProbe]]:
    """Makes probes for fixtures of wider scope: run a model once, assert in many tests.

    They take the seed of the session: a marker belongs to one test, and these do not.
    """
    from .probe import ModelProbe

    settings = request.config.stash[SETTINGS]
    with contextlib.ExitStack() as probes:

        def make() -> ModelProbe:
            required = _required(settings, modelprobe_device)
            probe = probes.enter_context(ModelProbe(modelprobe_device, settings.seed, device_required=required))
            settings.shared_probes.append(probe)
            return probe

        yield make
    settings.shared_probes.clear()


@pytest.fixture
def modelprobe_snapshot(request: pytest.FixtureRequest) -> Iterator[ModelProbeSnapshot]:
    """What a record is compared with: ``assert modelprobe.run(model, x) == modelprobe_snapshot``."""
    __tracebackhide__ = True
    from .snapshot.arguments import Arguments
    from .snapshot.comparer import Comparer
    from .snapshot.snapshot import ModelProbeSnapshot

    comparer = Comparer(request, request.config.stash[_SNAPSHOTS])
    request.node.stash[_COMPARER] = comparer
    marked = _marked(request.node)
    snapshot = ModelProbeSnapshot(comparer, Arguments())
    yield snapshot(tolerance=marked.get("tolerance"), compare=marked.get("compare"))
    _fail_unasserted(request.node)  # what other fixtures compared after the test


# --- seeding ------------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Find the fixtures that a test with a probe depends on: they are seeded whichever test sets them up."""
    from ._pytest import fixtures_of

    seeded = config.stash[SETTINGS].seeded_fixtures
    for item in items:
        if _has_probe(item):
            seeded |= fixtures_of(item)


def _has_probe(item: pytest.Item) -> bool:
    return not _PROBE_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> Generator[None, Any, Any]:
    """Seed each fixture that a test with a probe depends on by its own name, under a fork."""
    settings = request.config.stash[SETTINGS]
    if settings.seeded_fixtures.isdisjoint((fixturedef, fixturedef.argname)):
        return (yield)
    from .models import derive, seeded

    with seeded(derive(settings.seed, f"fixture {fixturedef.argname}")):
        return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Seed the body of a test with a probe, innermost, and put the states back."""
    if not _has_probe(pyfuncitem):
        return (yield)
    from .models import seeded

    with seeded(_seed_of(pyfuncitem)):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test that passed though a comparison failed: without `assert` nobody heard of it."""
    __tracebackhide__ = True
    try:
        result = yield
    except BaseException:
        _unasserted(item)  # it failed, and says why
        raise
    _fail_unasserted(item)
    return result


def _fail_unasserted(item: pytest.Item) -> None:
    __tracebackhide__ = True
    text = _unasserted(item)
    if text is not None:
        pytest.fail(text, pytrace=False)


def _unasserted(item: pytest.Item) -> str | None:
    comparer = item.stash.get(_COMPARER, None)
    text: str | None = None if comparer is None else comparer.unasserted()
    return text


# --- what to say --------------------------------------------------------------------------------------------------


def _told(probe: ModelProbe, config: pytest.Config) -> list[dict[str, Any]]:
    """Return, in plain types, what each run and watch of a probe saw that was not told before."""
    from .assertions.findings import findings
    from .exceptions import ModelProbeError
    from .report.text import layer_table

    cache = getattr(config, "cache", None)
    table_wanted = config.stash[SETTINGS].verbose or (cache is not None and cache.get(_FIRST_USE, None) is None)
    said = []
    for name, source in probe.take_unreported():
        try:
            record = source if not hasattr(source, "record") else source.record
        except ModelProbeError as error:
            said.append({"name": name, "layers": 0, "calls": 0, "findings": [str(error)], "table": []})
            continue
        said.append(
            {
                "name": name,
                "layers": len(record.layers),
                "calls": sum(len(layer.calls) for layer in record.layers.values()),
                "forwards": record.forwards,
                "findings": findings(record),
                "table": layer_table(record) if table_wanted and record.forwards else [],
            }
        )
    return said


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Put what the probe saw on the report of the teardown: it reaches the controller of xdist by itself."""
    comparer = item.stash.get(_COMPARER, None)
    if comparer is not None:
        comparer.explain(call)
    report = yield
    if report.when == "call":
        item.stash[_FAILED] = report.failed
    elif report.when == "teardown":
        said = item.stash.get(_SAID, [])
        for probe in item.config.stash[SETTINGS].shared_probes:
            said += _told(probe, item.config)
        if item.stash.get(_FAILED, False):
            said = [{**one, "findings": []} for one in said]  # the failure has said it
        if said:
            report.modelprobe = said
        if comparer is not None:
            report.modelprobe_snapshots = comparer.results()
            del item.stash[_COMPARER]  # a test that is run again has another
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_assertrepr_compare(left: object, right: object) -> list[str] | None:
    """Explain a comparison with a snapshot where pytest wants to; `Comparer.explain` does so everywhere else."""
    room = sys.modules.get("pytest_modelprobe.snapshot.snapshot")
    if room is None:
        return None
    snapshot = next((side for side in (left, right) if isinstance(side, room.ModelProbeSnapshot)), None)
    text = snapshot.failure if snapshot is not None else None
    return text.splitlines() if text else None


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Collect reports where the terminal is: on the controller under xdist."""
    config = session.config
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Terminal(config), "modelprobe-terminal")


class _Terminal:
    """The section in the terminal: written only where a probe was used and there is something to say."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._said: list[tuple[str, dict[str, Any]]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._said += [(report.nodeid, said) for said in getattr(report, "modelprobe", ())]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        verbose = self._config.stash[SETTINGS].verbose
        first = self._first_use()
        shown = self._said if verbose else [pair for pair in self._said if pair[1]["findings"]]
        if first is not None and not verbose:
            shown = [first, *(pair for pair in shown if pair is not first)]
        if self._config.getoption("verbose") < 0 and not verbose:
            shown = []
        of_snapshots = list(self._config.stash[_SNAPSHOTS].lines())
        if not shown and not of_snapshots:
            return
        terminalreporter.section("modelprobe")
        for nodeid, said in shown:
            with_table = verbose or (first is not None and said is first[1])
            for line in _lines(nodeid, said, with_table=with_table):
                terminalreporter.write_line(line)
        if first in shown and not verbose:
            terminalreporter.write_line("This table is shown once; --modelprobe-verbose shows it for every test.")
        for line in of_snapshots:
            terminalreporter.write_line(line)

    def _first_use(self) -> tuple[str, dict[str, Any]] | None:
        """Return what to show a person on the first use in a project: value before any assertion."""
        cache = getattr(self._config, "cache", None)
        if cache is None or os.environ.get("CI") or cache.get(_FIRST_USE, None) is not None:
            return None
        first = next((pair for pair in self._said if pair[1]["table"]), None)
        if first is not None:
            cache.set(_FIRST_USE, "seen")
        return first


def _lines(nodeid: str, said: dict[str, Any], *, with_table: bool) -> Iterator[str]:
    from .report.text import count, printable

    seen = f"{count(said['layers'], 'layer')}, {count(said['calls'], 'call')}"
    times = f" in {said['forwards']:,} forwards" if said.get("forwards", 1) > 1 else ""
    yield printable(f"{nodeid}: {said['name']}, {seen}{times}")
    yield from (f"  {printable(finding)}" for finding in said["findings"])
    if with_table:
        yield from (f"  {line}" for line in said["table"])
