"""Which records get evidence on which side: two sides that are played in this process."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.comparison.text import text
from pytest_modelprobe.revisions import (
    Job,
    Ran,
    Recorder,
    Side,
    SideBySide,
    SideError,
    TestsOn,
    read_written,
    side_by_side,
)


class Played:
    """Stands for `TestsOn`: tests that are functions of a probe."""

    def __init__(self, **tests: Callable[[ModelProbe], object]) -> None:
        self._tests = tests
        self.ran: list[list[str]] = []

    seconds = 0.0

    def start(self, stack: Any, tests: Collection[str], records: Path, *, half: bool, **more: Any) -> Any:
        if more:  # the side that runs second: it runs the tests with records
            del more["after"]
            tests = [test for test, _ in read_written(Path(more["beside"]))]
        return SimpleNamespace(processes=[], folders=[], ran=self.run(tests, records, **more))

    def run(self, tests: Collection[str], records: Path, **more: Any) -> Ran:
        self.ran.append(sorted({*tests}))
        recorder = Recorder(records, **{name: Path(value) for name, value in more.items()})
        for test in sorted({*tests} & self._tests.keys()):
            protocol = recorder.pytest_runtest_protocol(cast(pytest.Item, SimpleNamespace(nodeid=test)))
            next(protocol)
            recorder.pytest_runtest_setup()
            with ModelProbe(recorder=recorder) as probe:
                self._tests[test](probe)
                recorder.pytest_runtest_teardown()
        return Ran(collected=self._tests)


class Net(nn.Module):
    """A network with a gate, and code of its own at the gate and after it."""

    def __init__(self, gate: float, at_gate: float = 1.0, after: float = 1.0, prefix: str = "") -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.add_module(f"{prefix}gate", Times(at_gate, gate))
        self.add_module(f"{prefix}after", Times(after, 1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fc, gate, after = self.children()
        return cast(torch.Tensor, after(fc(x) + gate(x)))


class Times(nn.Module):
    def __init__(self, factor: float, scale: float) -> None:
        super().__init__()
        self.code = lambda x: x * factor  # a plain number would be an attribute of the layer
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.code(x) * self.scale)


def run(*numbers: float, prefix: str = "") -> Callable[[ModelProbe], object]:
    def test(probe: ModelProbe) -> None:
        torch.manual_seed(0)
        probe.run(Net(*numbers, prefix=prefix), probe.randn(3, 4))  # a gradient would show what a zero hides

    return test


def beside(ours: Played, theirs: Played, folder: Path, check: Callable[[Any], None] = lambda _: None) -> SideBySide:
    on = cast(TestsOn, ours), cast(TestsOn, theirs)
    return side_by_side(ours._tests.keys(), *on, folder=folder, check=check)


def test_what_is_the_same_runs_once_on_each_side(tmp_path: Path) -> None:
    ours, theirs = (Played(a=run(1.0), b=run(0.0)) for _ in range(2))
    found = beside(ours, theirs, tmp_path)
    assert [pair.verdict for pair in found.pairs] == ["unchanged", "unchanged"]
    assert (ours.ran, theirs.ran) == ([["a", "b"]], [["a", "b"]])
    assert not any(one.evidence or one.record.noise for pair in found.pairs for one in (pair.here, pair.there))


def test_only_tests_that_differ_run_once_more_and_only_here(tmp_path: Path) -> None:
    ours, theirs = Played(a=run(1.0), b=run(1.0, 1.0, 2.0)), Played(a=run(1.0), b=run(1.0))
    found = beside(ours, theirs, tmp_path)
    assert {pair.here.test: pair.verdict for pair in found.pairs} == {"a": "unchanged", "b": "changed"}
    assert (ours.ran, theirs.ran) == ([["a", "b"], ["b"]], [["a", "b"]])
    (pair,) = (pair for pair in found.pairs if pair.verdict == "changed")
    assert [(cause.layer, cause.evidence) for cause in pair.diagnosis.causes] == [("after", "both")]
    assert (pair.here.evidence, pair.there.evidence, pair.there.record.noise) == (True, True, "measured")


def test_code_that_changed_behind_a_zero_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of two sides in one process the files are the same.
    monkeypatch.setattr("pytest_modelprobe.revisions.recorder.code_differs", lambda here, there: True)
    found = beside(Played(a=run(0.0, 3.0)), Played(a=run(0.0)), tmp_path)
    (pair,) = found.pairs
    assert pair.verdict == "changed"
    assert [cause.layer for cause in pair.diagnosis.causes] == ["gate"]
    assert pair.first is None  # every output is the same


def test_a_test_that_makes_no_record_when_it_runs_again_is_said(tmp_path: Path) -> None:
    times = itertools.chain([run(1.0, 1.0, 2.0)], itertools.repeat(lambda probe: None))
    (pair,) = beside(Played(a=lambda probe: next(times)(probe)), Played(a=run(1.0)), tmp_path).pairs
    assert (pair.here.evidence, pair.there.evidence) == (False, True)
    assert "No layer was called alone: the test did not run again as it had run (it made other records)." in text(
        pair.diagnosis
    )


def test_tests_and_records_of_one_side_are_counted(tmp_path: Path) -> None:
    def twice(probe: ModelProbe) -> None:
        run(1.0)(probe)
        run(1.0)(probe)

    found = beside(Played(a=twice, b=run(1.0), c=run(1.0)), Played(a=run(1.0), c=twice), tmp_path)
    assert (found.only_here, found.unpaired, len(found.pairs), found.tests) == (["b"], 2, 2, {"a", "b", "c"})


def test_records_of_other_code_than_their_own_stop_the_comparison(tmp_path: Path) -> None:
    def refuse(there: Any) -> None:
        assert set(there) == {("a", "run 1")}
        raise SideError("other code")

    ours = Played(a=run(1.0, 2.0))
    with pytest.raises(SideError, match="other code"):
        beside(ours, Played(a=run(1.0)), tmp_path, check=refuse)
    assert ours.ran == [["a"]]  # there was no second run


def test_a_watch_is_compared_too(tmp_path: Path) -> None:
    def watched(factor: float) -> Callable[[ModelProbe], None]:
        def test(probe: ModelProbe) -> None:
            torch.manual_seed(0)
            net = Net(0.0, 1.0, factor)
            probe.watch(net)
            net(probe.randn(3, 4)).square().mean().backward()

        return test

    (pair,) = beside(Played(a=watched(1.0)), Played(a=watched(1.0)), tmp_path / "same").pairs
    assert (pair.here.key, pair.verdict, pair.there.evidence) == ("watch 1", "unchanged", False)
    (pair,) = beside(Played(a=watched(2.0)), Played(a=watched(1.0)), tmp_path / "other").pairs
    assert (pair.verdict, pair.there.evidence) == ("changed", True)
    assert "after" in {cause.layer for cause in pair.diagnosis.causes}


def test_a_layer_that_has_another_name_there_is_paired(tmp_path: Path) -> None:
    (pair,) = beside(Played(a=run(1.0, 1.0, 2.0)), Played(a=run(1.0, prefix="old_")), tmp_path).pairs
    assert (pair.diagnosis.causes[0].layer, pair.diagnosis.causes[0].evidence) == ("after", "both")
    assert pair.first is not None
    assert pair.first.layer == "after"


def test_an_architecture_is_compared_without_numbers(tmp_path: Path) -> None:
    def shape(width: int) -> Callable[[ModelProbe], object]:
        return lambda probe: probe.architecture(nn.Sequential(nn.Linear(4, width), nn.ReLU()), torch.ones(2, 4))

    (pair,) = beside(Played(a=shape(3)), Played(a=shape(3)), tmp_path / "same").pairs
    assert (pair.here.key, pair.verdict) == ("architecture 1", "unchanged")
    (pair,) = beside(Played(a=shape(5)), Played(a=shape(3)), tmp_path / "other").pairs
    assert pair.verdict == "changed"
    assert pair.diagnosis.causes[0].layer == "0"


def test_each_process_gets_tests_of_its_own_that_are_there(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).touch()
    jobs: list[Job] = []
    side = cast(Side, SimpleNamespace(start=lambda stack, given, log: jobs.extend(given)))
    tests = ["b.py::test_1", "a.py::test_2", "a.py::test_1", "gone.py::test_1"]
    on = TestsOn(side=side, root=tmp_path, options={}, plugins=["p"], processes=4, logs=tmp_path)
    for half, told in (
        (True, [["a.py::test_1", "b.py::test_1"], ["a.py::test_2"]]),
        (False, [["a.py::test_1"], ["a.py::test_2"], ["b.py::test_1"]]),
    ):
        jobs.clear()
        on.start(contextlib.ExitStack(), tests, tmp_path / "there", half=half, like="x")
        assert [job.tests for job in jobs] == told
        assert [Path(file).name for file in jobs[0].files] == [*dict.fromkeys(test[:4] for test in told[0])]
        assert all((job.plugins, job.like) == (["p"], "x") for job in jobs)
        assert len({job.options["basetemp"] for job in jobs}) == len(told)


def test_a_test_that_runs_again_is_recorded_anew(tmp_path: Path) -> None:
    recorder, item = Recorder(tmp_path), cast(pytest.Item, SimpleNamespace(nodeid="a"))

    def turn(*models: nn.Module) -> None:  # as pytest-rerunfailures does, in one protocol
        recorder.pytest_runtest_setup()
        with ModelProbe(recorder=recorder) as probe:
            for model in models:
                probe.watch(model)
                probe.run(model, torch.ones(2, 4))
            recorder.pytest_runtest_teardown()

    next(recorder.pytest_runtest_protocol(item))
    turn(nn.Linear(4, 4), nn.Linear(4, 4))
    turn(nn.Linear(4, 3))
    found = read_written(tmp_path)
    assert [key for _, key in found] == ["run 1", "watch 1"]
    assert all(one.record.layers["(root)"].parameters[0].shape == (3, 4) for one in found.values())


def test_a_watch_of_a_training_is_its_first_step_or_forward(tmp_path: Path) -> None:
    def trained(probe: ModelProbe, **options: int) -> None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        probe.watch(model, **options)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    Played(a=trained, b=lambda probe: trained(probe, steps=0)).run(["a", "b"], tmp_path)
    step, forward = (one.record for one in read_written(tmp_path).values())
    assert (step.forwards, forward.forwards) == (1, 1)
    assert step.layers["(root)"].parameters[0].update is not None
    assert forward.layers["(root)"].parameters[0].update is None  # no step is kept
