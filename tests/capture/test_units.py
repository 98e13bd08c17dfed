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


@pytest.mark.parametrize("module", [nn.ReLU(), nn.PReLU(8), nn.GELU(), nn.Softmax(-1), nn.Dropout(), nn.Identity()])
def test_pointwise_modules_inherit(module):
    assert axis(module, 2, 8, 5, 5, inherited=-3) == -3
    assert axis(module, 2, 8, 5, 5) is None


def test_a_container_inherits():
    assert axis(nn.Sequential(nn.Linear(3, 8)), 2, 8, inherited=-1) == -1


def test_an_inherited_axis_that_the_output_does_not_have_is_none():
    assert axis(nn.ReLU(), 2, inherited=-3) is None


def test_an_output_without_axes_has_no_units():
    assert axis(nn.GroupNorm(2, 8), 8) is None
    assert axis(nn.Linear(3, 8)) is None


def test_conv1d_of_gpt2_has_its_units_last():
    transformers = pytest.importorskip("transformers.pytorch_utils")
    assert axis(transformers.Conv1D(8, 3), 2, 5, 8) == -1


def test_a_norm_of_ones_own_is_known_by_the_size_of_its_vectors():
    assert axis(RootMeanSquareNorm(8), 2, 5, 8) == -1
    assert axis(RootMeanSquareNorm(8), 2, 8, 5, 5) == -3
    assert axis(RootMeanSquareNorm(8), 8, 8) == -1


def test_a_norm_that_fits_two_axes_is_known_only_by_what_went_in():
    assert axis(RootMeanSquareNorm(8), 2, 8, 8) is None
    assert axis(RootMeanSquareNorm(8), 2, 8, 8, inherited=-2) == -2


def test_an_unknown_leaf_with_other_parameters_has_no_known_axis():
    assert axis(Scale(8, 8), 2, 8, 8, inherited=-1) is None


def test_a_single_number_for_a_parameter_changes_no_axis():
    assert axis(Scale(1), 2, 8, 5, inherited=-2) == -2
