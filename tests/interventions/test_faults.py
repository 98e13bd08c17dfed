"""Each ready-made fault, on tensors small enough to read."""

import math

import pytest
import torch
from torch import nn

from pytest_modelprobe import UsageError, faults, intervene

X = torch.tensor([[1.0, -2.0], [3.0, 4.0]])


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (faults.zero, [[0, 0], [0, 0]]),
        (faults.inf, [[math.inf, -2], [3, 4]]),
        (faults.flip_sign, [[-1, 2], [-3, -4]]),
        (faults.scale(3), [[3, -6], [9, 12]]),
        (faults.clamp(-1, 3), [[1, -1], [3, 3]]),
        (faults.stuck(5), [[5, 5], [5, 5]]),
        (faults.shuffle_batch, [[3, 4], [1, -2]]),
        (faults.detach, [[1, -2], [3, 4]]),
        (faults.normalize_input(1, 2), [[0, -1.5], [1, 1.5]]),
        (faults.normalize_input([1, 2], [1, 2]), [[0, -2], [2, 1]]),
        (faults.prune(torch.tensor([True, False])), [[1, 0], [3, 0]]),
        (faults.clip_gradient(1), (X / 30**0.5).tolist()),
        (faults.clip_gradient(100), X.tolist()),
    ],
    ids=repr,
)
def test_a_fault_returns_another_tensor_and_leaves_the_given_one(fault, expected):
    before = X.clone()
    torch.testing.assert_close(fault(X), torch.tensor(expected, dtype=torch.float32))
    assert torch.equal(X, before)


def test_a_sequence_is_shifted_by_one_position():
    x = torch.arange(6.0).reshape(1, 3, 2)
    assert faults.shift_sequence(x).tolist() == [[[0, 0], [0, 1], [2, 3]]]


def test_noise_is_the_same_for_the_same_shape_and_another_for_another_seed():
    assert torch.equal(faults.noise(1)(X), faults.noise(1)(X))
    assert not torch.equal(faults.noise(1)(X), faults.noise(1, seed=1)(X))


@pytest.mark.parametrize("fault", [faults.zero, faults.stuck(1)], ids=repr)
def test_a_constant_output_has_a_gradient_of_zero_and_not_none(fault):
    x = torch.full((2,), math.nan, requires_grad=True)
    fault(x).sum().backward()
    assert x.grad.tolist() == [0, 0]


def test_a_dropped_gradient_reaches_no_parameter_before_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with intervene(model, "0", gradient=faults.drop_gradient):
        model(X).sum().backward()
    assert model[0].weight.grad is None
    assert model[1].weight.grad is not None


def misuse_of(make, tensor):
    with pytest.raises(UsageError) as error:
        make()(tensor)
    return str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: faults.scale("2"), "faults.scale takes a number, k, and returns the fault; got str"),
        (lambda: faults.noise, "faults.noise takes a number, std, and returns the fault; got Tensor"),
    ],
)
def test_a_wrong_argument_of_a_fault_is_told(make, message):
    assert misuse_of(make, X) == message


@pytest.mark.parametrize("fault", [faults.nan, faults.scale(0.5), faults.stuck(2.5), faults.noise(1)], ids=repr)
def test_a_fault_that_makes_fractions_is_refused_for_integers(fault):
    expected = f"{fault} makes torch.float32 of torch.int64: it is for floating-point tensors"
    assert misuse_of(lambda: fault, torch.tensor([1, 2])) == expected


@pytest.mark.parametrize(
    "fault", [faults.nan, faults.stuck(2.5), faults.noise(1), faults.normalize_input(0, 2)], ids=repr
)
def test_a_fault_keeps_the_dtype(fault):
    assert fault(X.half()).dtype == torch.float16


def test_an_output_of_another_run_may_replace_that_of_this_one(modelprobe):
    model = modelprobe.build(lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)))
    other = torch.ones(3, 2)
    modelprobe.run(model, other, keep="1")
    with intervene(model, "1", output=lambda _: modelprobe.kept["1"][0]):
        patched = model(torch.zeros(3, 2))
    assert torch.equal(patched, model(other))
