"""A model whose `parameters` takes no arguments and returns what it trains, as the DPO of x-transformers does."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from pytest_modelprobe import ModelProbe, checks


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = nn.Linear(8, 2), nn.Linear(8, 2)

    def parameters(self) -> Iterator[nn.Parameter]:  # type: ignore[override]
        return self.policy.parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.policy(x) - self.reference(x)


def test_it_is_recorded_with_all_of_its_parameters(modelprobe: ModelProbe) -> None:
    record = modelprobe.run(Policy(), modelprobe.randn(4, 8), loss="random")
    names = "policy.weight", "policy.bias", "reference.weight", "reference.bias"
    assert [f"{layer.name}.{p.name}" for layer in record.layers.values() for p in layer.parameters] == [*names]


def test_a_parameter_that_it_leaves_out_makes_a_record_outdated_too(modelprobe: ModelProbe) -> None:
    model = Policy()
    watch = modelprobe.watch(model)
    model(modelprobe.randn(4, 8))
    before = watch.record
    with torch.no_grad():
        model.reference.weight.add_(1.0)
    assert watch.record["reference"].parameters != before["reference"].parameters


def test_the_checks_of_a_healthy_model_hold(modelprobe: ModelProbe) -> None:
    assert (
        checks.standard(modelprobe, Policy(), modelprobe.randn(4, 8), loss=lambda out: out.square().mean()).broken == ()
    )
