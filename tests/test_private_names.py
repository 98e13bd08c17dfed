"""Whatever private name a torch to come has not: the package works, or says in one sentence what it cannot do."""

from __future__ import annotations

import contextlib
import gc
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pytest_modelprobe import _torch

PACKAGE = "pytest_modelprobe"


class Net(nn.Module):
    """Has what the private names are for: batch norm, views, checkpointing, truncated weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(6, 2)
        nn.init.trunc_normal_(self.last.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.fc(x))
        hidden[0].mul_(2)
        return checkpoint(self.last, self.drop(F.relu(hidden)), use_reentrant=False)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Nothing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


# --- what a user does -------------------------------------------------------------------------------------------------


def built(package: Any) -> Any:
    model = package.ModelProbe().build(Net)
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def ran(package: Any) -> Any:
    probe = package.ModelProbe()
    return probe.run(model(), probe.randn(3, 4), loss="random", mode="train").to_dict()


def ran_with_functionals(package: Any) -> Any:
    """A mode of the user stays, also where the stack of modes cannot be changed."""
    probe = package.ModelProbe()
    with Nothing() as mode:
        try:
            return probe.run(model(), probe.randn(3, 4), functionals=True, keep="fc").to_dict()
        finally:
            assert torch.overrides._get_current_function_mode_stack() == [mode]


def profiled(package: Any) -> Any:
    probe = package.ModelProbe()
    return probe.run(model(), probe.randn(3, 4), profile=True).profile.flops


def isolated(package: Any) -> Any:
    isolation, net, x = importlib.import_module(f"{PACKAGE}.runs.isolation"), model(), torch.ones(3, 4)
    with isolation.traced(net, lambda: net(x), isolation.IsolationOptions(gradient=True)) as alone:
        return {str(key): str(response) for key, response in alone().items()}


def watched(package: Any) -> Any:
    probe, net = package.ModelProbe(), model()
    watch = probe.watch(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(probe.randn(3, 4)).sum().backward()
        optimizer.step()
    package.assert_no_leftover_hooks(watch)
    return watch.record.to_dict()


def under(context: Callable[[], Any]) -> Callable[[Any], Any]:
    def watched_inside(package: Any) -> Any:
        probe, net = package.ModelProbe(), model().eval()
        watch = probe.watch(net)
        with context():
            net(torch.ones(3, 4))
        return watch.record.to_dict()

    return watched_inside


def in_transform(package: Any) -> Any:
    probe, net = package.ModelProbe(), nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    nn.init.constant_(net[0].weight, 0.5)
    nn.init.zeros_(net[0].bias)
    watch = probe.watch(net)
    torch.func.vmap(net)(torch.ones(3, 4))
    return watch.record.to_dict()


def drawn(package: Any) -> Any:
    return package.ModelProbe().architecture(model(), torch.ones(3, 4)).to_dict()


def checked(package: Any) -> Any:
    probe, net = package.ModelProbe(), nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5), nn.BatchNorm1d(2))
    checks = importlib.import_module(f"{PACKAGE}.checks")
    return [str(check(probe, net, probe.randn(3, 4))) for check in (checks.gradcheck, checks.eval_stable)]


DOES = {
    "build": built,
    "run": ran,
    "functionals": ran_with_functionals,
    "profile": profiled,
    "isolate": isolated,
    "watch": watched,
    "autocast": under(lambda: torch.autocast("cpu", torch.bfloat16)),
    "device": under(lambda: torch.device("cpu")),
    "dispatch": under(Passing),
    "transform": in_transform,
    "architecture": drawn,
    "checks": checked,
}


def model() -> Net:
    torch.manual_seed(0)
    return Net()


def outcomes(package: Any) -> dict[str, Any]:
    """Return what comes of everything that a user does: a result, or the sentence that says why not."""
    found: dict[str, Any] = {}
    for name, do in DOES.items():
        try:
            found[name] = do(package)
        except package.exceptions.ModelProbeError as error:
            found[name] = str(error)
    gc.collect()  # closes what is still watched: another copy of the package counts its own watches alone
    return found


# --- with every name, and without each --------------------------------------------------------------------------------


def fresh(monkeypatch: pytest.MonkeyPatch, *without: str) -> Any:
    """Return the package imported anew, in a torch that lacks some names."""
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        monkeypatch.delitem(sys.modules, name)
    resolve = pkgutil.resolve_name

    def find(path: str) -> Any:
        if path in without:
            raise AttributeError(path)
        return resolve(path)

    monkeypatch.setattr(pkgutil, "resolve_name", find)
    return importlib.import_module(PACKAGE)


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect() -> None:
    """Exempt what other tests left: `outcomes` collects garbage for each name."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def complete() -> Iterator[dict[str, Any]]:
    """What comes of everything in this torch."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield outcomes(fresh(monkeypatch))


# What cannot be done without a name; all else comes out as it does with it.
WATCHED = {"run", "functionals", "profile", "watch", "autocast", "device", "dispatch", "transform", "architecture"}
CANNOT = {
    "torch._C._current_graph_task_id": {*WATCHED, "isolate"},
    "torch.Tensor._backward_hooks": WATCHED,
    "torch._C.DisableTorchFunction": {*WATCHED, "build", "isolate", "checks"},
    "torch._C._is_any_autocast_enabled": {*WATCHED, "isolate", "checks"},
    "torch._C._DisableAutocast": {"autocast"},
    "torch._C._functorch.is_functorch_wrapped_tensor": {*WATCHED, "isolate", "checks"},
    "torch.utils._python_dispatch._disable_current_modes": {
        "run",
        "functionals",
        "isolate",
        "dispatch",
        "architecture",
        "profile",
        "checks",
    },
    "torch._C._DisableFuncTorch": {"transform"},
    "torch._C._len_torch_function_stack": {*WATCHED, "isolate"},
    "torch.overrides._pop_mode": {"functionals"},
    "torch.overrides._push_mode": {"functionals"},
    "torch.utils._python_dispatch.TorchDispatchMode": {"build", "architecture", "profile", "checks"},
    "torch.utils._python_dispatch._pop_mode": {"profile"},
    "torch.utils._python_dispatch._push_mode": {"profile"},
    "torch._C._len_torch_dispatch_stack": {*WATCHED, "isolate"},
    "torch._C.DispatchKey.CompositeImplicitAutograd": {"profile"},
    "torch._C._dispatch_has_kernel_for_dispatch_key": {"profile"},
    "torch.ops.aten.add.Tensor._op_dk": {"profile"},
    "torch.ops.aten.add.Tensor._schema": {"build", "checks"},
    "torch._subclasses.fake_tensor.FakeTensorMode": {"architecture"},
}


def test_everything_can_be_done_in_this_torch(complete: dict[str, Any]) -> None:
    assert [name for name, outcome in complete.items() if isinstance(outcome, str)] == []


REPLACED = sorted({*_torch.PATHS} - CANNOT.keys())


def test_without_all_private_names_that_have_a_replacement_all_comes_out_alike(
    complete: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert outcomes(fresh(monkeypatch, *REPLACED)) == complete


# One for watching, for functions and for operations that torch computes, for transforms, and for fakes.
TELLING = [
    "torch._C._current_graph_task_id",
    "torch._C.DisableTorchFunction",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch._C._DisableFuncTorch",
    "torch._subclasses.fake_tensor.FakeTensorMode",
]
REST = [pytest.param(path, marks=pytest.mark.long) for path in sorted({*_torch.PATHS} - {*TELLING})]


@pytest.mark.parametrize("path", [*TELLING, *REST])
def test_without_a_private_name_the_package_works_or_says_what_it_cannot_do(
    path: str, complete: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = outcomes(fresh(monkeypatch, path))
    changed = {name: outcome for name, outcome in found.items() if outcome != complete[name]}
    assert changed.keys() == CANNOT.get(path, set())
    for outcome in changed.values():
        assert f"torch {torch.__version__} has no {path}, without which " in str(outcome)
    assert torch._C._len_torch_function_stack() == 0
    if path in CANNOT:
        assert_a_watch_that_is_refused_leaves_no_hook()


def assert_a_watch_that_is_refused_leaves_no_hook() -> None:
    package, net = importlib.import_module(PACKAGE), model()
    with contextlib.suppress(package.exceptions.ModelProbeError):
        watch = package.ModelProbe().watch(net, functionals=True, attention=True, profile=True)
        net(torch.ones(3, 4)).sum().backward()
        watch.close()
    tables = [table for module in net.modules() for key, table in vars(module).items() if key.endswith("_hooks")]
    assert all(isinstance(table, dict) for table in tables)
    assert not any(tables)
    assert torch._C._len_torch_dispatch_stack() == 0


# --- of pytest --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_plugin_alone")
def test_fixtures_are_known_by_name_where_pytest_does_not_tell_more(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import pytest

        @pytest.hookimpl(tryfirst=True, wrapper=True)
        def pytest_collection_modifyitems(items):
            kept = [(item, vars(item).pop("_fixtureinfo")) for item in items]
            yield
            for item, info in kept:
                item._fixtureinfo = info
        """
    )
    pytester.makepyfile(
        """
        import pytest
        import torch

        drawn = []

        @pytest.fixture
        def weight():
            return torch.rand(1).item()

        @pytest.mark.parametrize("i", range(2))
        def test_alike(weight, modelprobe, i):
            drawn.append(weight)
            assert drawn == [weight] * len(drawn)
        """
    )
    pytester.runpytest_inprocess("-p", "no:randomly").assert_outcomes(passed=2)
