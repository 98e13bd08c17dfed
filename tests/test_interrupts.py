"""A signal at any line of the package: what is being put back is put back first, and no exception of it is lost."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pytest_modelprobe
from pytest_modelprobe import ModelProbe, Watch, checks, intervene
from pytest_modelprobe.exceptions import SnapshotError
from pytest_modelprobe.files import Texts, storage
from pytest_modelprobe.interrupts import finished, held, interruptible

OURS = str(Path(pytest_modelprobe.__file__).parent), contextlib.__file__
WHOLE = finished(lambda: None).__code__
TRY = WHOLE.co_firstlineno + 2
"""Where what undoes something begins: Python has no way to hold an interrupt there, nor before."""


ALARM = getattr(signal, "SIGALRM", signal.SIGTERM)  # Windows has no alarm


def ring(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


@pytest.fixture
def alarm() -> Iterator[int]:
    before = signal.signal(ALARM, ring)
    yield ALARM
    signal.signal(ALARM, before)


class Interrupt:
    """Sends a signal at a line of our files, counted from 1."""

    def __init__(self, at: int = 0, number: int = signal.SIGINT) -> None:
        self.at, self.number, self.lines = at, number, 0

    def __enter__(self) -> Interrupt:
        sys.settrace(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(OURS) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event != "line" or (frame.f_code is WHOLE and frame.f_lineno == TRY):
            return self._line
        self.lines += 1
        if self.lines == self.at:
            sys.settrace(None)
            frame.f_trace = None
            signal.raise_signal(self.number)
        return self._line


def lines_of(function: Callable[[], object]) -> int:
    for _ in range(2):  # what is done once only has been done
        with Interrupt() as counted:
            function()
    return counted.lines


def interrupted(function: Callable[[], object], at: int, number: int = signal.SIGINT) -> bool:
    """Whether what the handler of a signal raises at a line reaches the caller."""
    try:
        with Interrupt(at, number):
            function()
    except (KeyboardInterrupt, TimeoutError):
        return True
    finally:
        sys.settrace(None)
    return False


class Net(nn.Module):
    """Changes all that a model may change in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.fc.weight.grad = torch.ones(6, 4)
        self.seen: list[int] = []
        self.caches = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(self.seen))
        self.caches += 1
        return self.last(torch.relu(self.norm(self.fc(x))) + torch.rand(1))


def state_of(model: Net) -> Any:
    tensors = [(id(x), x.tolist(), x.requires_grad, str(x.grad)) for x in model.state_dict(keep_vars=True).values()]
    hooks = [
        (name, key, list(value) if "hook" in key else None)
        for name, module in model.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, dict) or key == "forward"
    ]
    modes = [module.training for module in model.modules()]
    return tensors, hooks, modes, list(model.seen), model.caches


def state_of_process() -> Any:
    return (
        torch.get_rng_state().tolist(),
        repr(np.random.get_state()),  # noqa: NPY002
        random.getstate(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        list(warnings.filters),
        list(sys.meta_path),
        gc.isenabled(),
        (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        [signal.getsignal(number) for number in (signal.SIGINT, ALARM)],
        nn.init.trunc_normal_.__globals__["_no_grad_trunc_normal_"],
    )


def run(probe: ModelProbe, model: Net) -> None:
    probe.run(model, torch.ones(3, 4), loss="random", mode="train")


def run_with_functionals(probe: ModelProbe, model: Net) -> None:
    probe.run(model, torch.ones(3, 4), loss="random", functionals=True, attention=True)


def update(probe: ModelProbe, model: Net) -> None:
    record = probe.run(model, torch.ones(3, 4), loss="random")
    assert record.live_run is not None
    record.live_run.measured(record, record)


def check(probe: ModelProbe, model: Net) -> None:
    checks.batch_independent(probe, model, torch.ones(3, 4))


def build(probe: ModelProbe, model: Net) -> None:
    probe.build(Net)


def architecture(probe: ModelProbe, model: Net) -> None:
    probe.architecture(model, torch.ones(3, 4))


ACTIONS = [run, run_with_functionals, update, check, build, architecture]


@pytest.mark.parametrize(("action", "number"), [*((action, signal.SIGINT) for action in ACTIONS), (run, ALARM)])
@pytest.mark.parametrize("times", [4, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.usefixtures("alarm")
def test_a_signal_at_any_moment_is_raised_when_model_and_process_are_as_before(
    action: Callable[[ModelProbe, Net], None], number: int, times: int
) -> None:
    probe, model = ModelProbe(), Net()
    lines = lines_of(lambda: action(probe, model))
    before = state_of(model), state_of_process()
    for at in random.Random(times).sample(range(1, lines), times):
        assert interrupted(lambda: action(probe, model), at, number), at
        assert (state_of(model), state_of_process()) == before, at


@pytest.mark.parametrize("handler", [ring, functools.partial(lambda by, *given: ring(*given), "me")])
def test_what_the_handler_of_a_signal_raises_in_a_hook_of_a_watch_ends_the_forward(
    alarm: int, handler: Callable[..., None]
) -> None:
    signal.signal(alarm, handler)
    model = Net()
    with Watch(model) as watch:
        lines = lines_of(lambda: model(torch.ones(3, 4)))
        for at in range(1, lines // 2, 53):
            assert interrupted(lambda: model(torch.ones(3, 4)), at, alarm), at
        before = watch.record.forwards
        model(torch.ones(3, 4))
        assert watch.record.forwards == before + 1


def test_a_watch_that_is_interrupted_while_it_begins_leaves_no_hook() -> None:
    model = Net()
    before = state_of(model)
    for at in range(1, lines_of(lambda: Watch(model).close()) // 2, 7):
        interrupted(lambda: Watch(model).close(), at)
        assert state_of(model) == before, at


def test_an_intervention_that_is_interrupted_while_it_begins_leaves_no_trace() -> None:
    model = Net()

    def begin() -> None:
        intervene(model, "fc", weight=torch.zeros_like, output=torch.zeros_like).__enter__().close()

    before = state_of(model)
    for at in range(1, lines_of(begin), 3):
        interrupted(begin, at)
        assert state_of(model) == before, at


def test_of_two_files_an_interrupt_leaves_both_as_they_were_or_both_new(tmp_path: Path) -> None:
    path = tmp_path / "a.arch.json"

    def write(text: str) -> None:
        storage.write(path, Texts(text, text))

    lines = lines_of(lambda: (write("old"), write("new")))
    found = set()
    for at in range(1, lines, 5):
        with contextlib.suppress(SnapshotError):
            interrupted(lambda: (write("old"), write("new")), at)
        found.add(storage.read_texts(path))
    assert found == {Texts("old", "old"), Texts("new", "new")}


def test_no_destructor_in_python_runs_in_which_an_interrupt_would_be_lost() -> None:
    destructors = []

    def called(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_name == "__del__":
            destructors.append(frame.f_code.co_qualname)

    probe, model = ModelProbe(), Net()
    sys.setprofile(called)
    try:
        build(probe, model)
        update(probe, model)
        gc.collect()
    finally:
        sys.setprofile(None)
    assert destructors == []


# --- holding ----------------------------------------------------------------------------------------------------------


def test_an_interrupt_waits_for_the_end_or_for_code_of_the_user() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), held():
        try:
            with held():
                signal.raise_signal(signal.SIGINT)
                steps.append("held")
            with interruptible():
                steps.append("not reached")
        finally:
            steps.append("put back")
    assert steps == ["held", "put back"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_that_waited_are_all_handled_though_one_raises(alarm: int) -> None:
    seen: list[int] = []
    signal.signal(alarm, lambda number, frame: seen.append(number))
    with pytest.raises(KeyboardInterrupt), held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(alarm)
    assert seen == [alarm]


def test_code_of_the_user_that_catches_an_interrupt_gets_the_next_one_too() -> None:
    caught = []
    with pytest.raises(KeyboardInterrupt), held(), interruptible():
        for _ in range(2):
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                caught.append(True)
        signal.raise_signal(signal.SIGINT)
    assert caught == [True, True]


def test_the_handler_of_the_user_gets_the_interrupt_that_waited() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with held():
            signal.raise_signal(signal.SIGINT)
            assert not seen
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
