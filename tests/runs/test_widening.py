"""Half precision computed in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.runs.noise import in_float32

PROBE = ModelProbe()


class Casting(nn.Module):
    """Casts to half precision in every way that code does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("table", torch.linspace(-1, 1, 8))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.detach().mean(0))
        x = self.fc(x).half().to(torch.bfloat16) + torch.ones(8, dtype=torch.float16) / 3
        x = x.type_as(self.table) * self.table[None] @ torch.eye(8).to(torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.linear(x, self.fc.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_code_that_casts_is_computed_in_float32_and_the_model_is_put_back(dtype: torch.dtype) -> None:
    model, x = PROBE.build(Casting).to(dtype), PROBE.randn(4, 8).to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    with in_float32(model):
        out = model(x)
        out.square().mean().backward()
    assert out.dtype == torch.float32
    weight, bias, table = (t.detach().double() for t in (model.fc.weight, model.fc.bias, model.get_buffer("table")))
    exact = ((x.double() @ weight.T + bias + 1 / 3) * table) @ weight.T
    assert torch.linalg.vector_norm(out - exact) < 1e-6 * torch.linalg.vector_norm(exact)
    now = model.state_dict(keep_vars=True)
    assert all(now[name] is tensor and tensor.dtype == dtype for name, (tensor, _) in before.items())
    assert all(torch.equal(now[name], elements) for name, (_, elements) in before.items())
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in model.parameters())


LAYERS = [nn.LSTM(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)]


@pytest.mark.parametrize("layer", LAYERS, ids=["LSTM", "encoder"])
def test_kernels_that_take_several_weights_are_computed_in_float32(layer: nn.Module) -> None:
    layer, x = layer.eval().bfloat16(), PROBE.randn(3, 2, 8).bfloat16()
    with in_float32(layer):
        found = layer(x.float())  # torch compares the dtypes of inputs and weights before any operation
    expected = layer.float()(x.float())
    for now, then in zip(*((y if isinstance(y, Tensor) else y[0],) for y in (found, expected)), strict=True):
        assert torch.linalg.vector_norm(now - then) < 1e-6 * torch.linalg.vector_norm(then)
