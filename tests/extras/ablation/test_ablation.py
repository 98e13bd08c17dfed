"""`ablation`: the metric without each layer or head."""

import copy

import pytest
import torch
from torch import nn

from pytest_modelprobe import (
    NothingObservedError,
    SelectionError,
    UsageError,
    ablation,
    assert_layer_matters,
)
from pytest_modelprobe.extras.ablation.ablations import Ablated, Ablation


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle, self.never = nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, x):
        return self.used(x) + 0 * self.idle(x)


def total(output):
    return output.sum()


def test_the_metric_without_each_layer_is_in_the_table_the_largest_change_first():
    result = ablation(Net(), torch.ones(2, 3), total)
    assert str(result).splitlines() == [
        "Net: metric 6",
        "",
        "layer   type       metric without it   change",
        "used    Identity                   0       -6",
        "idle    Identity                   6        0",
    ]


def test_inputs_may_be_a_tuple_or_keywords():
    for inputs in ((torch.ones(2, 3),), {"x": torch.ones(2, 3)}):
        assert ablation(Net(), inputs, total, layers="used").rows[0].change == -6


def test_the_model_is_restored_and_has_no_hooks():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    state = copy.deepcopy(model.state_dict())
    ablation(model, torch.randn(4, 3), total)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_dropout_is_the_same_in_each_forward():
    model = nn.Sequential(nn.Dropout(), nn.Identity())
    result = ablation(model, torch.ones(4, 64), total, layers="1", by=lambda tensor: tensor)
    assert result.rows[0].change == 0


def test_a_metric_that_is_no_number_is_refused():
    with pytest.raises(UsageError, match=r"^the metric of the whole model is nan: no change of it can be told$"):
        ablation(Net(), torch.ones(2, 3), lambda output: float("nan"))


def test_a_selection_of_layers_that_are_not_called_is_an_error():
    with pytest.raises(NothingObservedError, match=r"^no layer was ablated: select layers that the forward calls$"):
        ablation(Net(), torch.ones(2, 3), total, layers="never")


# --- assert_layer_matters -----------------------------------------------------------------------------------------

RESULT = Ablation(
    model="Net",
    metric=0.5,
    rows=(
        Ablated(layer="blocks.0", type="Block", metric=2.5, change=2.0),
        Ablated(layer="blocks.1", type="Block", metric=0.51, change=0.01),
        Ablated(layer="head", type="Linear", metric=float("nan"), change=float("nan")),
    ),
)


def test_a_layer_without_a_change_is_named():
    with pytest.raises(AssertionError) as error:
        assert_layer_matters(RESULT, "blocks.*", min_change=0.1)
    assert str(error.value).splitlines() == [
        (
            "blocks.1 does not matter: without it the metric is 0.51, with it 0.5, a change of not more than 0.1; "
            "1 of 2 rows looked at"
        ),
        "",
        "layer      type    metric without it   change",
        "blocks.1   Block                0.51     0.01",
        "",
        "Look at whether its output is used, and whether a later layer makes it constant.",
    ]


def test_a_layer_that_was_not_ablated_is_an_error():
    with pytest.raises(SelectionError, match=r"nearest: 'blocks\.0'"):
        assert_layer_matters(RESULT, "blocks.7")
