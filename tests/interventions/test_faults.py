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


# --- activation patching ------------------------------------------------------------------------------------------


def test_the_output_of_another_run_replaces_that_of_this_one(modelprobe):
    model = modelprobe.build(lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)))
    other = torch.ones(3, 2)
    modelprobe.run(model, other, keep="1")
    with intervene(model, "1", output=faults.swap(modelprobe)):
        patched = model(torch.zeros(3, 2))
    assert torch.equal(patched, model(other))


def test_each_call_gets_the_output_of_the_same_call(modelprobe):
    shared = nn.Identity()
    model = nn.Sequential(shared, nn.ReLU(), shared)
    watch = modelprobe.watch(model, keep="0")
    model(torch.tensor([-1.0]))
    with intervene(model, "0", output=faults.swap(watch.kept), calls=[1]):
        assert model(torch.tensor([5.0])).item() == 0


def test_a_layer_that_works_in_place_does_not_write_to_the_outputs_of_the_other_run():
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    kept = {"0": [torch.tensor([-1.0])]}
    with intervene(model, "0", output=faults.swap(kept)):
        model(torch.tensor([5.0]))
    assert kept["0"][0].item() == -1


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({"other": [torch.ones(1)]}, "the other run kept no output of 0: name it in keep=; kept are 'other'"),
        ({"0": []}, "the other run kept 0 outputs of 0, and this is call 0"),
        ({"0": [torch.ones(2)]}, "0: the output of the other run has other shapes, {'output': (2,)}, not "),
    ],
)
def test_a_swap_that_does_not_fit_is_told(kept, message):
    model = nn.Sequential(nn.Identity())
    with pytest.raises(UsageError) as error, intervene(model, "0", output=faults.swap(kept)):
        model(torch.ones(1))
    assert str(error.value).startswith(message)


def test_a_swap_with_nothing_is_told():
    with pytest.raises(UsageError, match=r"^swap takes the tensors of another run, and none was kept: "):
        faults.swap({})


def test_a_mask_that_would_make_the_tensor_larger_is_refused():
    with pytest.raises(RuntimeError):
        faults.prune(torch.ones(5, 1, 1))(X)
