"""What the fake device does as a real one."""

from __future__ import annotations

import signal
import subprocess
import sys
import warnings

import fake_cuda
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.cuda


def test_the_cpu_cannot_read_the_memory_of_the_device() -> None:
    program = "import fake_cuda, torch, ctypes; print(ctypes.string_at(torch.ones(4, device='cuda').data_ptr(), 4))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGSEGV


def test_memory_that_nobody_wrote_is_nan() -> None:
    torch.ones(1000, device="cuda")  # leaves memory that is used again
    assert torch.empty(1000, device="cuda").isnan().all()


def test_a_copy_is_there_once_somebody_waits_for_its_stream() -> None:
    x = torch.ones(3, device="cuda:1")
    copy = x.to("cpu", non_blocking=True)
    with torch.cuda.device(1):
        event = torch.cuda.Event()
        event.record()
    torch.cuda.synchronize("cuda:0")
    torch.cuda.Stream("cuda:1").synchronize()
    assert copy.isnan().all()
    assert not event.query()
    event.synchronize()
    assert copy.tolist() == [1, 1, 1]


def test_a_stream_that_waits_for_another_has_its_copies() -> None:
    copy = torch.ones(3, device="cuda").to("cpu", non_blocking=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    stream.synchronize()
    assert copy.tolist() == [1, 1, 1]


def test_each_wait_is_counted_with_its_line() -> None:
    x = torch.ones(3).to("cuda", non_blocking=True)
    with fake_cuda.waits() as found:
        (x + x).sum().to("cpu", non_blocking=True)
        assert found == []
        x.sum().item()
        x.nonzero()
        x[x > 0]
        x.cpu()
        torch.ones(3).to("cuda")
        torch.cuda.synchronize()
    assert [wait.split(":")[0] for wait in found] == [
        "item",
        "nonzero",
        "index",
        "copy to the host",
        "copy to the device",
        "synchronize",
    ]
    assert all("test_fake.py" in wait for wait in found)


def test_the_mode_for_synchronizing_operations_raises() -> None:
    x = torch.ones(3, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says once that it does not see all
        torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            x.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.sum().item() == 3


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_tensors_of_two_devices_do_not_mix(other: str) -> None:
    with pytest.raises(RuntimeError, match=f"at least two devices, cuda:0 and {other}!"):
        torch.ones(3, device="cuda:0") + torch.ones(3, device=other)
    assert (torch.ones(3, device="cuda") + torch.ones(())).tolist() == [2, 2, 2]


def test_batch_norm_moves_its_statistics_as_on_the_cpu() -> None:
    x = torch.randn(8, 3, 4, 4)
    here, there = nn.BatchNorm2d(3), nn.BatchNorm2d(3).to("cuda")
    torch.testing.assert_close(there(x.to("cuda")).cpu(), here(x))
    torch.testing.assert_close(there.running_var.cpu(), here.running_var)
    assert there.num_batches_tracked.item() == 1


def test_a_recurrent_layer_computes_what_it_does_on_the_cpu() -> None:
    here, there, x = nn.LSTM(4, 6, 2), nn.LSTM(4, 6, 2).to("cuda"), torch.randn(5, 3, 4)
    there.load_state_dict(here.state_dict())
    for model, given in ((here, x), (there, x.to("cuda"))):
        model(given)[0].square().sum().backward()
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(b.grad.cpu(), a.grad)


def test_each_device_has_a_generator_whose_state_is_known_without_waiting() -> None:
    torch.manual_seed(3)
    before = torch.cuda.get_rng_state(0), torch.cuda.get_rng_state(1), torch.get_rng_state()
    with fake_cuda.waits() as found:
        torch.rand(3, device="cuda:1")
        after = torch.cuda.get_rng_state(0), torch.cuda.get_rng_state(1), torch.get_rng_state()
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, False, True]
    assert found == []


def test_a_device_has_no_memory_left_on_demand() -> None:
    with fake_cuda.out_of_memory(after=1):
        torch.ones(3, device="cuda")
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.ones(3, device="cuda")
    torch.ones(3, device="cuda")


def test_nothing_may_wait_while_a_graph_is_captured() -> None:
    x = torch.ones(3, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert torch.cuda.is_current_stream_capturing()
        with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
            x.sum().item()
    assert not torch.cuda.is_current_stream_capturing()


def test_a_checkpoint_comes_back_to_its_device(tmp_path) -> None:
    torch.save(torch.arange(3.0, device="cuda:1"), tmp_path / "x.pt")
    there = torch.load(tmp_path / "x.pt")
    assert (there.device, there.tolist()) == (torch.device("cuda:1"), [0, 1, 2])
