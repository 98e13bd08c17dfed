"""Weights that accelerate keeps on the CPU or on disk, and puts on the model for the time of each call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from pytest_modelprobe import ModelProbe, NothingObservedError, assert_all_params_have_grad, assert_finite
from pytest_modelprobe.record import Reading, Record

accelerate = pytest.importorskip("accelerate")

PLACES = {"scale": "disk", "fc": "cpu", "norm": "disk", "out": "disk"}
CPU = torch.device("cpu")
WAYS: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "cpu_offload": lambda model, _: accelerate.cpu_offload(model, CPU),
    "disk_offload": lambda model, path: accelerate.disk_offload(model, path, CPU),
    "dispatch_model": lambda model, path: accelerate.dispatch_model(
        model,
        {"scale": "disk", "fc": "cpu", "norm": "disk", "out": "disk"},
        main_device="cpu",
        offload_dir=path,
        force_hooks=True,
    ),
}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(8))
        self.fc, self.norm, self.out = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.fc(x)) * self.scale)


def numbers(record: Record) -> tuple[str, dict[str, Reading], list[Reading]]:
    layers = record.layers.values()
    own = {f"{one.name}.{p.name}": p.reading for one in layers for p in (*one.parameters, *one.buffers)}
    return record.device, own, [value.forward for _, call in record.calls for value in (*call.inputs, *call.outputs)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_a_record_of_an_offloaded_model_is_that_of_the_model(way: str, tmp_path: Path) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    plain, model = Scaled().eval(), Scaled().eval()
    with ModelProbe() as probe:
        watch = probe.watch(model)
        model = WAYS[way](model, tmp_path)
        expected = probe.watch(plain)
        for _ in range(2):
            assert torch.equal(model(x), plain(x))
        for actual, wanted in ((watch.record, expected.record), (watch.first, expected.first)):
            assert numbers(actual) == numbers(wanted)
            assert actual.notes == ()
        assert_finite(watch)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_an_offloaded_model_is_run_and_left_as_it_was(way: str, tmp_path: Path) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    model = WAYS[way](Scaled().eval(), tmp_path)
    with ModelProbe() as probe:
        assert numbers(probe.run(model, x)) == numbers(probe.run(Scaled().eval(), x))
    assert torch.equal(model(x), Scaled().eval()(x))
    assert all(p.is_meta for p in model.out.parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_offloaded_weights_are_not_known_instead_of_missing(way: str, tmp_path: Path) -> None:
    record = ModelProbe().run(WAYS[way](Scaled().eval(), tmp_path), torch.randn(3, 4), loss="random")
    with pytest.raises(NothingObservedError, match="computed of another tensor in its place"):
        assert_all_params_have_grad(record)
