"""Weights of one implementation in another, where layers have no partner."""

from __future__ import annotations

import torch
from torch import nn

from pytest_modelprobe.extras.ports.weights import carry, recognized


class Token(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.randn(1, 1, 4)))


def test_a_parameter_that_is_in_another_layer_is_carried_if_no_other_has_its_shape() -> None:
    there, here = nn.Sequential(Token("cls_token")), Token("token")
    assert carry(there, here, {"(root)": "(root)"}) == ({"token": "0.cls_token"}, [])
    assert torch.equal(here.token, there[0].cls_token)


def test_parameters_that_may_be_either_are_left_as_they_are() -> None:
    there, here = nn.Sequential(Token("cls", "mask")), Token("first", "second")
    assert carry(there, here, {"(root)": "(root)"}) == ({}, ["first", "second"])


def test_zeros_are_not_told_apart() -> None:
    there, here = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8)) for _ in range(2))
    here.load_state_dict(there.state_dict())
    for model in (there, here):
        nn.init.zeros_(model[0].bias)
    assert recognized(here, there) == {"0.weight": "0.weight", "0.bias": "", "1.weight": "1.weight", "1.bias": "1.bias"}
    nn.init.ones_(here[0].bias)
    assert "0.bias" not in recognized(here, there)


def halves_of_neighbors(rows: torch.Tensor) -> torch.Tensor:
    """Reorder the rows of heads of 4, as a conversion of rotary positions does."""
    return rows.reshape(-1, 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def test_rows_in_another_order_are_recognized_alone_and_in_a_fused_matrix() -> None:
    there = nn.ModuleDict({name: nn.Linear(6, 8) for name in "qkv"})
    here, fused = nn.Linear(6, 8), nn.Linear(6, 24)
    with torch.no_grad():
        for kind in ("weight", "bias"):
            q, k, v = (getattr(there[name], kind) for name in "qkv")
            getattr(here, kind).copy_(halves_of_neighbors(k))
            getattr(fused, kind).copy_(torch.cat([halves_of_neighbors(q), halves_of_neighbors(k), v]))
    order = "rows in another order"
    assert recognized(here, there) == {"weight": f"k.weight, {order}", "bias": f"k.bias, {order}"}
    assert recognized(fused, there)["weight"] == f"rows of q.weight, k.weight, v.weight, {order}"
    assert recognized(there, fused)["k.weight"] == f"rows 8:16 of weight, {order}"
    assert recognized(there, fused)["v.weight"] == "rows 16:24 of weight"


def test_rows_of_which_one_differs_are_not_recognized() -> None:
    there, here = nn.Linear(40, 8, bias=False), nn.Linear(40, 8, bias=False)
    with torch.no_grad():
        here.weight.copy_(there.weight.flip(0))
        here.weight[3, 39] += 1
    assert recognized(here, there) == {}
