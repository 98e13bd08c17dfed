import pytest
import torch

from pytest_modelprobe import statistics
from pytest_modelprobe.capture.observed.observation import TensorObservation


def seen(layout):
    tensor = torch.ones(2, 3)
    found = TensorObservation(tensor, (0, 0), statistics.reduce(tensor))
    found.layout = layout
    return found


def test_a_copy_of_an_observation_has_all_that_it_has():
    one = seen("shard(1)")
    copy = one.copy()
    assert {name: getattr(copy, name) for name in one.__slots__} == {name: getattr(one, name) for name in one.__slots__}


@pytest.mark.parametrize(("other", "layout"), [("shard(1)", "shard(1)"), ("replicated", None), (None, None)])
def test_observations_of_two_forwards_have_the_layout_that_both_have(other, layout):
    one = seen("shard(1)")
    one.merge_from(seen(other), statistics.merge)
    assert one.layout == layout
