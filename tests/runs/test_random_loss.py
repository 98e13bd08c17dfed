"""What `loss="random"` weighs: the floating outputs by their position, and no cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from pytest_modelprobe import ModelProbe, assert_same_behavior
from pytest_modelprobe.runs.loss import random_loss


class Net(nn.Module):
    def __init__(self, wrapped: Any = None) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.wrapped = wrapped

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrapped(self.fc(x)) if self.wrapped else self.fc(x)


def gradients(probe: ModelProbe, wrapped: Any = None) -> list[Any]:
    record = probe.run(probe.build(lambda: Net(wrapped)), probe.randn(2, 4), loss="random")
    return [parameter.gradient for parameter in record["fc"].parameters]


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda y: (y,),
        lambda y: {"logits": y},
        lambda y: {"indices": y.argmax(-1), "logits": y},
        lambda y: (y, None),
    ],
    ids=["tuple", "dict", "after integers", "before nothing"],
)
def test_an_output_weighs_the_same_wherever_it_stands(wrapped: Any) -> None:
    probe = ModelProbe()
    assert gradients(probe, wrapped) == gradients(probe)


def test_a_dict_instead_of_a_tensor_moves_no_gradient() -> None:
    probe = ModelProbe()
    nets = (
        probe.build(lambda wrapped=wrapped: nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)), Net(wrapped)))
        for wrapped in (lambda y: {"logits": y}, None)
    )
    x = probe.randn(2, 4)
    named, plain = (probe.run(net, x, loss="random") for net in nets)
    with pytest.raises(AssertionError) as raised:
        assert_same_behavior(named, plain)
    assert str(raised.value).startswith(
        "output unchanged; structure differs in 1 place: layer '5' (Net): output renamed to output.logits\n"
    )


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    past_key_values: Any = None
    hidden_states: Any = None


def test_a_double_output_is_weighed_in_double_precision() -> None:
    x = torch.full((2, 3), 1 / 3, dtype=torch.float64, requires_grad=True)
    loss = random_loss(x, seed=0)
    assert loss is not None
    assert loss.dtype is torch.float64
