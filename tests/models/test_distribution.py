"""Models under torch.distributed, in a process group of one rank: names, notes, and what is read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed, nn
from torch.distributed import fsdp, tensor
from torch.distributed.tensor import parallel

from pytest_modelprobe import (
    ModelProbe,
    NothingObservedError,
    assert_finite,
    assert_frozen,
    assert_params_updated,
)
from pytest_modelprobe.models.tensors import DDP, FSDP2
from pytest_modelprobe.record import Call, Record


@pytest.fixture
def mesh() -> Iterator[distributed.DeviceMesh]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def step(model: nn.Module) -> torch.Tensor:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    out = model(torch.randn(3, 4))
    out.square().mean().backward()
    optimizer.step()
    return out


def shard(model: nn.Sequential, mesh: distributed.DeviceMesh) -> None:
    fsdp.fully_shard(model[0], mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)


@pytest.mark.usefixtures("_fsdp2")
def test_fully_sharded_layers_have_the_names_of_their_own_classes(mesh: distributed.DeviceMesh) -> None:
    model = net()
    shard(model, mesh)
    with ModelProbe() as probe:
        watch = probe.watch(model)
        step(model)
    assert (watch.name, watch.record.model) == ("Sequential", "Sequential")
    names = ["Sequential", "Linear", "LayerNorm", "Linear"]
    assert [layer.type_name for layer in watch.record.layers.values()] == names
    (weight, _), local = watch.record["2"].parameters, model[2].weight.grad.to_local()
    assert (weight.shape, weight.gradient.statistics.max) == ((2, 8), local.max())
    assert watch.record.notes == (FSDP2,)


@pytest.mark.usefixtures("_fsdp2")
@pytest.mark.parametrize("first", ["watch", "shard"])
def test_parameters_of_the_root_are_read_as_shards_whatever_came_first(
    mesh: distributed.DeviceMesh, first: str
) -> None:
    model = net()
    model[1].requires_grad_(False)
    with ModelProbe() as probe:
        if first == "shard":
            shard(model, mesh)
        watch = probe.watch(model)
        if first == "watch":
            shard(model, mesh)
        step(model)
        step(model)
        assert FSDP2 in watch.record.notes
        assert_frozen(watch, layers="1")
        assert_params_updated(watch, layers=["0", "2"])
        gradient = watch.record["2"].parameters[0].gradient
        assert gradient is not None
        assert gradient.statistics is not None
        assert gradient.statistics.count == 2 * 16  # each step once


def test_ddp_around_a_watched_model_is_noted(mesh: distributed.DeviceMesh) -> None:
    model = net()
    with ModelProbe() as probe:
        watch = probe.watch(model)
        step(nn.parallel.DistributedDataParallel(model))
    assert watch.record.notes == (DDP,)


def test_dtensors_that_pass_tell_the_layouts_of_values(mesh: distributed.DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    parallel.parallelize_module(model, mesh, {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()})
    with ModelProbe() as probe:
        watch = probe.watch(model)
        step(model)
    found = {layer: [v.layout for v in (*c.inputs, *c.outputs)] for layer, c in named_calls(watch.record)}
    assert found == {
        "(root)": ["replicated", "replicated"],
        "0": ["replicated", "shard(1)"],
        "1": ["shard(1)", "shard(1)"],
        "2": ["shard(1)", "replicated"],
    }


def test_a_tensor_and_the_dtensor_made_of_it_are_one_with_one_gradient(mesh: distributed.DeviceMesh) -> None:
    model = net()
    parallel.parallelize_module(model, mesh, {"2": parallel.ColwiseParallel()})
    with ModelProbe() as probe:
        watch = probe.watch(model)
        step(model)
    (made,), (given,) = watch.record["1"].calls[0].outputs, watch.record["2"].calls[0].inputs
    assert (given.tensor, given.layout, given.backward) == (made.tensor, "replicated", made.backward)
    assert given.backward is not None
    assert given.backward.statistics is not None


def named_calls(record: Record) -> list[tuple[str, Call]]:
    return [(layer.name, call) for layer, call in record.calls]


class Partial(nn.Module):
    def __init__(self, mesh: distributed.DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tensor.DTensor.from_local(x, self.mesh, [tensor.Partial()])


def test_a_value_of_which_no_number_is_known_never_passes(mesh: distributed.DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Partial(mesh))
    with ModelProbe() as probe:
        watch = probe.watch(model)
        model(torch.randn(3, 4))
    assert_finite(watch, layers="0")
    with pytest.raises(NothingObservedError) as caught:
        assert_finite(watch)
    assert str(caught.value) == (
        "no number is known of (root) output: DTensor of which each rank has a term, not the sum; leave the layer out "
        "with layers=, and look at the value in the test itself"
    )
