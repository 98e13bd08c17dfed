import pytest
import torch
from torch import nn

from pytest_modelprobe.capture.tensors import unit_axis


class RootMeanSquareNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.ones(size))


class LayerNorm2d(nn.LayerNorm):
    """Permutes to channels last and back, as torchvision's does."""


class Scale(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))


class MyConv(nn.Conv2d):
    pass


def axis(module, *shape, inherited=None):
    return unit_axis(module, torch.empty(shape, device="meta"), lambda _: inherited)


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (nn.Conv1d(3, 8, 3), (2, 8, 5), -2),
        (nn.Conv2d(3, 8, 3), (2, 8, 5, 5), -3),
        (nn.Conv2d(3, 8, 3), (8, 5, 5), -3),
        (MyConv(3, 8, 3), (2, 8, 5, 5), -3),
        (nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3)), (2, 8, 5, 5), -3),
        (nn.BatchNorm1d(8), (2, 8), -1),
        (nn.BatchNorm1d(8), (2, 8, 5), -2),
        (nn.SyncBatchNorm(8), (2, 8, 5, 5), -3),
        (nn.GroupNorm(2, 8), (2, 8, 5, 5), -3),
        (LayerNorm2d(8), (2, 8, 5, 5), -3),
        (nn.LayerNorm(8), (2, 5, 8), -1),
        (nn.MaxPool1d(2), (2, 8, 5), -2),
        (nn.Upsample(scale_factor=2), (2, 8, 5), -2),
        (nn.PixelShuffle(2), (2, 8, 5, 5), -3),
        (nn.Unfold(2), (2, 8, 5), -2),
        (nn.Linear(3, 8), (2, 5, 5, 8), -1),
        (nn.Embedding(9, 8), (2, 5, 8), -1),
        (nn.LSTM(3, 8), (5, 2, 8), -1),
        (nn.Flatten(), (2, 8), -1),
        (nn.Flatten(2), (2, 8, 5), None),
        (nn.MultiheadAttention(8, 2), (5, 2, 8), -1),
        (nn.MultiheadAttention(8, 2), (2, 5, 5), None),
        (nn.Unflatten(1, (2, 4)), (2, 2, 4), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_modules_of_torch(module, shape, expected):
    assert axis(module, *shape) == expected


NORM = RootMeanSquareNorm(8)


@pytest.mark.parametrize(
    ("module", "shape", "inherited", "expected"),
    [
        *((module, (2, 8, 5, 5), -3, -3) for module in (nn.ReLU(), nn.PReLU(8), nn.Softmax(-1), nn.Dropout())),
        (nn.GELU(), (2, 8, 5, 5), None, None),
        (nn.ReLU(), (2,), -3, None),  # which the output does not have
        (nn.Sequential(nn.Linear(3, 8)), (2, 8), -1, -1),
        (nn.GroupNorm(2, 8), (8,), None, None),
        (nn.Linear(3, 8), (), None, None),
        # A norm of one's own is known by the size of its vectors, where these fit one axis alone.
        (NORM, (2, 5, 8), None, -1),
        (NORM, (2, 8, 5, 5), None, -3),
        (NORM, (8, 8), None, -1),
        (NORM, (2, 8, 8), None, None),
        (NORM, (2, 8, 8), -2, -2),
        (Scale(8, 8), (2, 8, 8), -1, None),
        (Scale(1), (2, 8, 5), -2, -2),  # a single number for a parameter changes no axis
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_modules_that_inherit_and_modules_of_ones_own(module, shape, inherited, expected):
    assert axis(module, *shape, inherited=inherited) == expected


def test_conv1d_of_gpt2_has_its_units_last():
    transformers = pytest.importorskip("transformers.pytorch_utils")
    assert axis(transformers.Conv1D(8, 3), 2, 5, 8) == -1
