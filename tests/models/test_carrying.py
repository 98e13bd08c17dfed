"""Weights of one implementation in another, where layers have no partner."""

from __future__ import annotations

import torch
from torch import nn

from pytest_modelprobe.models import carry


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
