"""`assert_sparsity`: pruned weights, and that they stay so."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from pytest_modelprobe import NothingObservedError, Record, UsageError, assert_sparsity
from pytest_modelprobe.record import Layer, Parameter, Reading, Statistics


def weight(zeros, name="weight"):
    return Parameter(
        name=name,
        shape=(2, 4),
        dtype="float32",
        device="cpu",
        reading=Reading(statistics=Statistics(count=8, zeros=zeros, mean=0.0)),
    )


def record(fc1, fc2):
    layers = {
        name: Layer(name=name, type="torch.nn.Linear", parameters=(weight(zeros), weight(0, "bias")))
        for name, zeros in {"fc1": fc1, "fc2": fc2}.items()
    }
    return Record(model="Net", layers=layers)


def test_too_few_zeros_are_named_and_biases_do_not_count():
    assert_sparsity(record(4, 6), 0.5)
    with pytest.raises(AssertionError) as error:
        assert_sparsity(record(6, 1), 0.5)
    assert str(error.value).splitlines() == [
        "fc2.weight is 12.5% zeros, not 50.0% or more; 1 of 2 weights looked at",
        "",
        "weight       zeros   elements   share",
        "fc2.weight       1          8   12.5%",
        "",
        (
            "A step of an optimizer fills what was set to zero: multiply by the mask after each step, or use "
            "torch.nn.utils.prune, which does it in each forward."
        ),
    ]


@pytest.mark.parametrize("masked", [False, True])
def test_zeros_without_a_mask_do_not_outlive_a_step(modelprobe, masked):
    model = modelprobe.build(lambda: nn.Linear(8, 8))
    prune.l1_unstructured(model, "weight", amount=0.5)
    if not masked:
        prune.remove(model, "weight")
    watch = modelprobe.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(modelprobe.randn(4, 8)).square().sum().backward()
    assert_sparsity(watch, 0.5)
    optimizer.step()
    if masked:
        assert_sparsity(watch, 0.5)
    else:
        with pytest.raises(AssertionError, match=r"^weight is 0\.0% zeros"):
            assert_sparsity(watch, 0.5)


def test_a_weight_that_could_not_be_read_does_not_pass():
    hidden = dataclasses.replace(weight(0), reading=Reading(reason="it is on device meta"))
    layer = Layer(name="fc2", type="torch.nn.Linear", parameters=(hidden,))
    whole = record(4, 4)
    with pytest.raises(NothingObservedError) as error:
        assert_sparsity(dataclasses.replace(whole, layers={**whole.layers, "fc2": layer}), 0.5)
    assert str(error.value) == (
        "no number is known of fc2.weight: it is on device meta; leave the layer out with layers=, and look at the "
        "value in the test itself"
    )


def test_a_share_above_one_and_a_record_without_weights_are_refused():
    with pytest.raises(NothingObservedError):
        assert_sparsity(Record(model="Net", layers={"act": Layer(name="act", type="torch.nn.ReLU")}), 0.5)
    with pytest.raises(UsageError, match=r"^least is a share of the elements, from 0 to 1; got 50$"):
        assert_sparsity(record(4, 4), 50)
