"""Rows that have the same bits alone and in any batch, and rows that differ by rounding."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, checks


class Layer(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class RowByRow(nn.Linear):
    """A linear layer that adds in one order, whatever the number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.mv(self.weight, row) + self.bias for row in x])


def summed(x: Tensor) -> Tensor:
    """Add three columns in an order that depends on the number of rows, as split sums do."""
    a, b, c = x.T
    return ((a + b) + c if len(x) > 2 else a + (b + c)).unsqueeze(1)


def placed(x: Tensor) -> Tensor:
    """Add the last row in another order, as a kernel does with the rest behind the last whole tile."""
    a, b, c = x.T
    return torch.cat([((a + b) + c)[:-1], (a + (b + c))[-1:]]).unsqueeze(1)


@pytest.fixture
def probe() -> ModelProbe:
    return ModelProbe()


@pytest.fixture
def rows() -> Tensor:
    return torch.tensor([[1, 2**-24, 2**-24], [0.5, 0.7, 0.1], [0.9, 0.3, 0.2], [0.4, 0.1, 0.6]])


def test_a_sum_in_another_order_is_named_with_its_ulps(probe: ModelProbe, rows: Tensor) -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity(), Layer(summed), nn.Identity())
    assert checks.any_batch_size(probe, model, rows).verdict == "holds"
    with pytest.raises(AssertionError) as error:
        checks.any_batch_size(probe, model, rows, bitwise=True)
    assert str(error.value) == (
        "layer '2' (Layer) returns other bits for the same row in a batch of 1 instead of 4: output differs by up to "
        "1 ulp; so does the output, in 3 of 24 batches\n"
        "\n"
        "tensor          differs by up to   in batches of\n"
        "2 output        1 ulp              1 and 2\n"
        "3 output        1 ulp              1 and 2\n"
        "(root) output   1 ulp              1 and 2\n"
        "\n"
        "A matrix product, a convolution or a reduction adds in another order for another number of rows. Fix the "
        "order: compute row by row or in tiles of one size, or use batch-invariant kernels."
    )


def test_a_row_at_another_place_is_compared(probe: ModelProbe, rows: Tensor) -> None:
    found = checks.any_batch_size.outcome(probe, Layer(placed), rows, bitwise=True)
    assert (found.verdict, found.layer) == ("broken", "(root)")
    assert "1, 2, 3, 4, 5, 8, 16, 32 and 64" in found.text


def test_rows_that_are_computed_one_by_one_have_the_same_bits(probe: ModelProbe, rows: Tensor) -> None:
    model = nn.Sequential(RowByRow(3, 5), nn.Tanh(), nn.LayerNorm(5), RowByRow(5, 2))
    found = checks.any_batch_size(probe, model, rows, bitwise=True)
    assert found.text == (
        "the same bits in batches of 1, 2, 3, 4, 5, 8, 16, 32 and 64 at up to 3 places, in 5 values of 5 layers"
    )


def test_what_differs_inside_alone_is_said(probe: ModelProbe, rows: Tensor) -> None:
    found = checks.any_batch_size(probe, nn.Sequential(Layer(summed), Layer(torch.round)), rows, bitwise=True)
    assert found.text.endswith("; layers inside differ, but the output agrees: first 0 output")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_one_more_in_the_last_place_is_seen_in_each_dtype(dtype: torch.dtype, probe: ModelProbe) -> None:
    def moved(x: Tensor) -> Tensor:
        return x if len(x) > 1 else x * (1 + torch.finfo(x.dtype).eps)

    x = torch.tensor([[1.0, 1.0], [1.0, 1.5]]).to(dtype)
    found = checks.any_batch_size.outcome(probe, Layer(moved), x, bitwise=True)
    assert "in a batch of 1 instead of 2: output differs by up to 1 ulp;" in found.text


def test_a_model_that_does_not_repeat_is_not_applicable(probe: ModelProbe, rows: Tensor) -> None:
    calls = itertools.count()
    found = checks.any_batch_size.outcome(probe, Layer(lambda x: x + 1e-6 * next(calls)), rows, bitwise=True)
    assert found.text == "the same batch does not repeat bit for bit: (root) output differs"


def test_a_model_without_a_batch_is_not_applicable(probe: ModelProbe) -> None:
    assert (
        checks.any_batch_size.outcome(probe, nn.Linear(3, 2), torch.ones(3), bitwise=True).verdict == "not applicable"
    )
