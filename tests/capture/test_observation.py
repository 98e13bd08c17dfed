import pytest
import torch

from pytest_modelprobe import statistics
from pytest_modelprobe.capture.forwards import ObservedStep
from pytest_modelprobe.capture.observation import DoneForward, Forward, TensorObservation


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


def forward_of(index, *, tensors):
    """Return a forward of one layer that was given these tensors, as one that is over."""
    forward = Forward(index, ("(root)", True), statistics.WHOLE)
    call = forward.begin_call("(root)")
    call.inputs = [(path, TensorObservation(x, (index, 0), statistics.reduce(x))) for path, x in tensors.items()]
    forward.end_call(call)
    return forward, DoneForward(forward)


def kept(step):
    """Return what a step keeps of each input: the numbers of the value and of its gradient."""
    (totals,) = step.parts.values()
    return {
        path: statistics.collect([seen.forward, *([seen.backward] if seen.backward else [])])
        for path, seen in totals.calls["(root)", 0].inputs
    }


def test_a_discarded_step_of_one_forward_merges_as_one_that_was_merged_before():
    torch.manual_seed(0)
    values = [torch.randn(3, 4) for _ in range(4)]
    merged = {}
    for way in ("at once", "merged before"):
        total = ObservedStep()
        last = None
        for number in (0, 1, 5):
            step = ObservedStep(number)
            forward, done = forward_of(number, tensors={"input": values[number % 4]})
            step.add(done)
            if way == "merged before":
                step.merge()
            total.merge_from(step)
            last = forward  # a gradient that arrives when the step is merged already is added too
        ((_, seen),) = last.calls["(root)", 0].inputs
        seen.receive(statistics.reduce(values[3]), inner=False)
        merged[way] = kept(total)
        assert [totals.forwards for totals in total.parts.values()] == [3]
    assert merged["at once"] == merged["merged before"]
    signs = [reading.fingerprint for reading in merged["at once"]["input"]]
    assert signs[0] != signs[1]


def test_values_that_come_in_another_order_are_merged_by_their_names():
    small, large = torch.ones(2), torch.full((2,), 8.0)
    total = ObservedStep()
    for number, tensors in enumerate(({"a": small, "b": large}, {"b": large, "a": small}, {"b": large})):
        step = ObservedStep(number)
        step.add(forward_of(number, tensors=tensors)[1])
        total.merge_from(step)
    found = kept(total)
    assert {path: (readings[0].tensors, readings[0].statistics.mean) for path, readings in found.items()} == {
        "a": (2, 1.0),
        "b": (3, 8.0),
    }
