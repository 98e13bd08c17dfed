"""What is asked of a device, and tensors that are moved between devices and kept on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_modelprobe.models import devices_of, kept_on_devices, sent, together, widest
from pytest_modelprobe.models import tensors as devices

CPU, META = torch.device("cpu"), torch.device("meta")


class Stream:
    """A stream that keeps the events for which it waited."""

    def __init__(self) -> None:
        self.waited: list[str] = []

    def record_event(self) -> str:
        return "made"

    def wait_event(self, event: str) -> None:
        self.waited.append(event)


@pytest.mark.parametrize(
    ("error", "found"),
    [(TypeError("MPS does not support float64"), torch.float32), (RuntimeError("fp64 is missing"), torch.float32)],
    ids=["cannot make one", "cannot compute"],
)
def test_a_device_is_asked_whether_it_has_float64(
    monkeypatch: pytest.MonkeyPatch, error: Exception, found: torch.dtype
) -> None:
    def ones(*_: Any, **__: Any) -> torch.Tensor:
        raise error

    monkeypatch.setattr(torch, "ones", ones)
    assert widest.__wrapped__(CPU) == found


def test_a_device_without_float64_is_sent_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "widest", lambda device: torch.float64 if device == CPU else torch.float32)
    assert sent(torch.ones(2, dtype=torch.float64), META).dtype == torch.float32
    assert sent(torch.ones(2, dtype=torch.float64), CPU).dtype == torch.float64


def test_two_tensors_meet_on_the_device_that_is_not_the_cpu() -> None:
    here, there = torch.ones(2), torch.ones(2, device="meta")
    for pair in ((here, there), (there, here), (there, there)):
        assert [tensor.device for tensor in together(*pair)] == [META, META]
    assert together(here, here) == (here, here)


def test_what_is_kept_on_a_device_is_made_once_and_waited_for_on_other_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    made, streams = [], [Stream(), Stream()]
    table = kept_on_devices(lambda end: made.append(end) or (torch.arange(end),))
    for stream in (0, 0, 1, 1, 0):
        monkeypatch.setattr(devices, "current_stream", lambda _, stream=stream: streams[stream])
        table(META, 3)
    assert made == [3]
    assert [stream.waited for stream in streams] == [[], ["made", "made"]]


def test_the_devices_of_a_model_are_those_of_parameters_buffers_and_inputs() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2, affine=False), torch.nn.Linear(2, 2, device="meta"))
    assert devices_of(model.modules(), [torch.ones(2)]) == ()  # meta tensors are nowhere


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_streams_and_numbers_of_a_cuda_device_are_known() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    assert widest(device) == torch.float64
    assert devices.current_stream(device) == torch.cuda.current_stream(device)
    assert [one.device for one in together(torch.ones(1), torch.ones(1, device=device))] == [device, device]
