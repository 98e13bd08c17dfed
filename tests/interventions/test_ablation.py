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
    faults,
)
from pytest_modelprobe.interventions import Ablated, Ablation


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


def test_a_head_is_a_part_of_the_input_of_the_output_projection():
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 1, bias=False))
    nn.init.constant_(model[1].weight, 1.0)
    result = ablation(model, torch.tensor([[1.0, 2.0, 3.0, 4.0]]), total, heads={"1": 2})
    assert [(row.label, row.metric) for row in result.rows] == [
        ("layer '1' (Linear) head 1", 3),
        ("layer '1' (Linear) head 0", 7),
    ]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def test_heads_of_fused_attention_are_ablated_too():
    model, x = Attention(), torch.randn(1, 3, 4)
    weight = model.attention.out_proj.weight.detach().clone()
    result = ablation(model, x, total, heads={"attention": 2})
    changes = sum(row.change for row in result.rows)
    without_bias = result.metric - 3 * model.attention.out_proj.bias.sum().item()
    assert changes == pytest.approx(-without_bias, abs=1e-5)
    assert torch.equal(model.attention.out_proj.weight, weight)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metric": lambda output: float("nan")}, "the metric of the whole model is nan: no change of it can be told"),
        (
            {"heads": {"used": 0}},
            "heads= is the number of heads, 1 or more, by glob of layers; got 0 for 'used'",
        ),
        (
            {"heads": {"used": 3}, "by": faults.drop_gradient},
            "used: by= returned NoneType: return the tensor to use instead",
        ),
        ({"heads": {"used": 2}}, "used: 3 is not a multiple of 2 heads"),
    ],
)
def test_misuse_is_told(given, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        ablation(Net(), torch.ones(2, 3), **{"metric": total, **given})


def test_a_selection_of_layers_that_are_not_called_is_an_error():
    with pytest.raises(NothingObservedError, match=r"^no layer was ablated: select layers that the forward calls$"):
        ablation(Net(), torch.ones(2, 3), total, layers="never")


# --- assert_layer_matters -----------------------------------------------------------------------------------------

RESULT = Ablation(
    model="Net",
    metric=0.5,
    rows=(
        Ablated(layer="blocks.0", type="Block", head=None, metric=2.5, change=2.0),
        Ablated(layer="blocks.1", type="Block", head=None, metric=0.51, change=0.01),
        Ablated(layer="head", type="Linear", head=None, metric=float("nan"), change=float("nan")),
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


def test_a_negative_limit_is_refused():
    with pytest.raises(UsageError, match=r"^min_change is a number, 0 or more; got -1$"):
        assert_layer_matters(RESULT, min_change=-1)
