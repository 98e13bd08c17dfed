"""What each layer costs, with ``profile=True``."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from pytest_modelprobe import ModelProbe, Record
from pytest_modelprobe.files import encode

PROBE = ModelProbe()


def counted_by_torch(model: nn.Module, *inputs: torch.Tensor) -> int:
    # The fused attention of the CPU has no formula there; as matrix products it does the same.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(*inputs)
    return counter.get_total_flops()


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Linear(8, 3), (4, 8)),
        (nn.Conv2d(3, 6, 3, stride=2, padding=1), (2, 3, 9, 9)),
        (Attention(), (2, 4, 16, 8)),
        (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 5, 16)),
    ],
    ids=["linear", "conv", "attention", "encoder"],
)
@pytest.mark.parametrize("inference", [False, True])
def test_operations_are_those_that_torch_counts(model: nn.Module, shape: tuple[int, ...], inference: bool) -> None:
    x = torch.ones(shape)
    with torch.inference_mode(inference):
        assert PROBE.run(model, x, profile=True).profile.flops == counted_by_torch(model, x) > 0


def test_an_lstm_in_inference_mode_returns_what_it_returns_unwatched() -> None:
    model, x = nn.LSTM(8, 16, 2, dropout=0.2), torch.ones(7, 2, 8)
    with torch.inference_mode():
        torch.manual_seed(0)
        expected, _ = model(x)
        torch.manual_seed(0)
        with PROBE.watch(model, profile=True):
            output, _ = model(x)
    assert torch.equal(output, expected)


def test_what_is_recorded_besides_is_not_counted() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    plain = PROBE.run(model, x, profile=True).profile.flops
    assert PROBE.run(model, x, profile=True, attention=True, functionals=True, loss="random").profile.flops == plain


def test_the_forwards_of_a_watch_are_added_up() -> None:
    model = nn.Linear(2, 3)
    with ModelProbe().watch(model, profile=True) as watch:
        for rows in (4, 2):
            model(torch.ones(rows, 2)).sum().backward()
    assert (watch.record.profile.flops, watch.first.profile.flops, watch.last.profile.flops) == (72, 48, 24)
    assert watch.record.profile.forwards == watch.record.profile.layers["(root)"].calls == 2
    assert watch.record.profile.activation_bytes == 4 * 3 * 4


def test_memory_that_layers_share_counts_once() -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(3, 5))
    profile = PROBE.run(model, torch.ones(4, 2), profile=True).profile
    by_layer = {name: layer.activation_bytes for name, layer in profile.layers.items()}
    assert by_layer == {"(root)": 128, "0": 0, "1": 48, "2": 0, "3": 0, "4": 80}
    assert profile.activation_bytes == 128


def test_parameters_that_layers_share_count_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    profile = PROBE.run(model, torch.ones(4, 2), profile=True).profile
    assert (profile.parameters, profile.layers["1"].parameters) == (8, 6)


def test_functional_calls_have_a_profile_of_their_own() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(x) + 1

    profile = PROBE.run(Net(), torch.ones(4, 2), profile=True, functionals=True).profile
    assert {name: (layer.type, layer.activation_bytes) for name, layer in profile.layers.items()} == {
        "(root)": ("Net", 64),
        "relu": ("relu", 32),
    }


def test_the_time_of_a_layer_has_no_time_of_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes with each look at the clock: what the model does between two looks takes one."""
    seconds = itertools.count()
    monkeypatch.setattr("pytest_modelprobe.capture.profiler.perf_counter", lambda: float(next(seconds)))
    profile = PROBE.run(nn.Sequential(nn.Identity(), nn.Identity()), torch.ones(2), profile=True).profile
    assert {name: layer.wall_time for name, layer in profile.layers.items()} == {"(root)": 5.0, "0": 1.0, "1": 1.0}
    assert profile.wall_time == 5.0
    assert profile.probe_time > 5.0


class Apart(nn.Module):
    """Two layers on two devices."""

    def __init__(self, *devices: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4).to(device) for device in devices)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.device))
        return x


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("devices", [("cuda:1",), ("cuda:0", "cuda:1"), ("cuda:1", "cpu")], ids=",".join)
def test_times_are_events_on_the_device_of_the_tensors(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...]
) -> None:
    recorded = []

    class Recorded(torch.cuda.Event):
        def record(self, stream: torch.cuda.Stream | None = None) -> None:
            recorded.append(None if stream is None else str(stream.device))
            super().record(stream)

    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    profile = ModelProbe(device=devices[0]).run(Apart(*devices), torch.ones(2, 4), profile=True).profile
    assert {*recorded} == {devices[0]}
    assert all(profile.layers[f"layers.{i}"].wall_time > 0 for i in range(len(devices)))


class Mine(TorchDispatchMode):
    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_user_is_the_only_one_left_where_a_forward_was_interrupted() -> None:
    class Stops(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    watch = ModelProbe().watch(model := Stops(), profile=True)
    with pytest.raises(KeyboardInterrupt), Mine():
        model(torch.ones(2))
    watch.close()
    assert _get_current_dispatch_mode_stack() == []


def test_without_profile_no_operation_is_looked_at() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert _get_current_dispatch_mode_stack() == []
            return x

    PROBE.run(Net(), torch.ones(2))


def test_a_profile_changes_no_equality_and_is_kept_by_to_dict() -> None:
    model, x = nn.Linear(2, 3), torch.ones(4, 2)
    record = PROBE.run(model, x, profile=True)
    plain = PROBE.run(model, x)
    assert plain.profile is None
    assert record == plain
    assert encode(record) == encode(plain)
    assert Record.from_dict(record.to_dict()).profile == record.profile


def test_a_run_that_is_not_profiled_leaves_the_formulas_which_import_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.flop_counter", raising=False)
    ModelProbe().run(nn.Linear(2, 2), torch.ones(1, 2))
    assert "torch.utils.flop_counter" not in sys.modules
