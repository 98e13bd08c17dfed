"""`Record.merge`: the records of several ranks, written by hand."""

from __future__ import annotations

import dataclasses

import pytest

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.extras.ranks.merging import NOT_REDUCED, OTHER_STEP
from pytest_modelprobe.record import (
    Call,
    Layer,
    OptimizerGroup,
    Parameter,
    Reading,
    Record,
    Statistics,
    Training,
    Units,
    Value,
)


def reading(*elements: float, **more: object) -> Reading:
    mean = sum(elements) / len(elements)
    deviations = sum((x - mean) ** 2 for x in elements)
    statistics = Statistics(count=len(elements), min=min(elements), max=max(elements), mean=mean, deviations=deviations)
    return Reading(statistics=statistics, **more)


def value(path: str, *elements: float, backward: Reading | None = None, **more: object) -> Value:
    layout = more.pop("layout", None)
    forward = reading(*elements, fingerprint=(1.0,) * 16, **more)
    of_output = {"dtype": "float32", "device": "cpu", "forward": forward, "backward": backward, "layout": layout}
    return Value(path=path, shape=(len(elements), 1), **of_output)


def record(inputs: tuple[float, ...], output: Value, weight: Parameter, *, step: int | None = 0) -> Record:
    call = Call(root="fc", root_training=True, index=0, started=0, inputs=(value("input", *inputs),), outputs=(output,))
    layer = Layer(name="fc", type="Linear", parameters=(weight,), calls=(call,))
    return Record(model="Net", layers={"fc": layer}, forwards=1, step=step)


def weight(read: Reading, applied: Reading | None = None, layout: str | None = None) -> Parameter:
    return Parameter(
        name="weight", shape=(4,), dtype="float32", device="cpu", reading=read, applied=applied, layout=layout
    )


def test_batches_are_put_together_and_gradients_are_those_of_the_mean_loss() -> None:
    same = weight(reading(1.0, 2.0), applied=reading(0.5, 0.5))
    one = record((1.0, 2.0), value("output", 1.0, 3.0, backward=reading(2.0, 4.0)), same)
    other = record((3.0, 4.0), value("output", 5.0, 7.0, backward=reading(6.0, 8.0)), same)
    layer = Record.merge([one, other])["fc"]
    out = layer.output
    assert (out.shape, out.layout, out.statistics.mean, out.statistics.count) == ((4, 1), "batch", 4.0, 4)
    assert (out.gradient.mean, out.gradient.min, out.gradient.max) == (2.5, 1.0, 4.0)
    assert out.forward.fingerprint == (2.0,) * 16
    assert layer.parameters[0].gradient == reading(0.5, 0.5)
    assert Record.merge([one, other], mean_loss=False)["fc"].output.gradient.mean == 5.0


def test_a_value_that_one_rank_could_not_read_is_not_known() -> None:
    same = weight(reading(1.0, 2.0), applied=reading(0.5, 0.5))
    one, other = (record((x, x), value("output", x, x), same) for x in (1.0, 2.0))
    call = other["fc"].calls[0]
    hidden = dataclasses.replace(call.outputs[0], forward=Reading(reason="it is on device meta"))
    fc = dataclasses.replace(other["fc"], calls=(dataclasses.replace(call, outputs=(hidden,)),))
    merged = Record.merge([one, dataclasses.replace(other, layers={"fc": fc})])
    assert merged["fc"].output.forward == Reading(reason="it is on device meta")


def test_the_gradients_of_a_stage_that_one_rank_has_are_those_of_its_batch() -> None:
    same = weight(reading(1.0, 2.0), applied=reading(0.5, 0.5))
    one = record((1.0, 2.0), value("output", 1.0, 3.0, backward=reading(2.0, 4.0)), same)
    stage = dataclasses.replace(one, layers={"head": dataclasses.replace(one["fc"], name="head")})
    merged = Record.merge([one, stage])
    assert [merged[name].output.gradient.mean for name in ("fc", "head")] == [3.0, 3.0]


def test_fingerprints_of_gradients_are_those_of_the_mean_loss_and_digests_add_up() -> None:
    one = record((1.0,), value("output", 1.0, backward=reading(2.0, fingerprint=(6.0,) * 16)), weight(reading(1.0)))
    other = record((2.0,), value("output", 3.0, backward=reading(4.0, fingerprint=(2.0,) * 16)), weight(reading(1.0)))
    assert Record.merge([one, other])["fc"].output.backward.fingerprint == (4.0,) * 16
    ids = [
        record((x,), value("output", x, digest=digest), weight(reading(1.0)))
        for x, digest in ((1.0, "f" * 16), (2.0, "2"))
    ]
    assert Record.merge(ids)["fc"].output.forward.digest == "0000000000000001"


def test_what_is_no_batch_has_no_fingerprint() -> None:
    records = []
    for x in (1.0, 2.0):
        mask = dataclasses.replace(value("output", x, x, x), shape=(3, 1))
        records.append(record((x, x), mask, weight(reading(1.0))))
    assert Record.merge(records)["fc"].output.forward.fingerprint is None


@pytest.mark.parametrize(
    ("elements", "layout", "shape", "fingerprint"),
    [((1.0, 2.0), "batch", (6, 1), (2.0,) * 16), ((1.0, 1.0), "replicated", (3, 1), None)],
    ids=["all tokens in one axis", "a table that all share"],
)
def test_of_one_sample_in_each_rank_a_flattened_value_is_a_batch_and_a_table_is_not(
    elements: tuple[float, ...], layout: str, shape: tuple[int, ...], fingerprint: object
) -> None:
    records = []
    for x, element in zip((1.0, 2.0), elements, strict=True):
        one = record((x, x, 5.0), value("output", element, 3.0, 5.0), weight(reading(1.0)))
        call = one["fc"].calls[0]
        given = dataclasses.replace(call.inputs[0], shape=(1, 3))
        fc = dataclasses.replace(one["fc"], calls=(dataclasses.replace(call, inputs=(given,)),))
        records.append(dataclasses.replace(one, layers={"fc": fc}))
    merged = Record.merge(records)["fc"].output
    assert (merged.layout, merged.shape, merged.forward.fingerprint) == (layout, shape, fingerprint)


def test_the_digests_of_samples_add_up() -> None:
    def of_samples(x: float, samples: str | None) -> Record:
        one = record((x,), value("output", x), weight(reading(1.0)))
        fc = dataclasses.replace(one["fc"], calls=(dataclasses.replace(one["fc"].calls[0], samples=samples),))
        return dataclasses.replace(one, layers={"fc": fc})

    first, second = of_samples(1.0, "f" * 16), of_samples(2.0, "2")
    assert Record.merge([first, second])["fc"].calls[0].samples == "0000000000000001"
    assert Record.merge([first, first])["fc"].calls[0].samples == "f" * 16  # all ranks were given the same
    assert Record.merge([first, of_samples(2.0, None)])["fc"].calls[0].samples is None


def test_the_rank_whose_output_is_not_finite_is_named_at_the_first_layer() -> None:
    good, bad = (value("output", x) for x in (1.0, 2.0))
    broken = dataclasses.replace(bad.forward, statistics=Statistics(count=2, nan=1, min=2.0, max=2.0, mean=2.0))
    records = []
    for out in (good, dataclasses.replace(bad, forward=broken)):
        one = record((1.0,), out, weight(reading(1.0)))
        call = dataclasses.replace(one["fc"].calls[0], finished=3)
        root = Layer(name="(root)", type="Net", calls=(dataclasses.replace(call, finished=9),))
        fc = dataclasses.replace(one["fc"], calls=(call,))
        records.append(dataclasses.replace(one, layers={"(root)": root, "fc": fc}))
    assert Record.merge(records).notes[0] == "fc output is not finite in [rank 1], and is finite in [rank 0]"


def test_units_have_the_range_of_all_ranks() -> None:
    one = record(
        (1.0,), value("output", 1.0, units=Units(axis=-1, low=(0.0, 1.0), high=(0.0, 2.0))), weight(reading(1.0))
    )
    other = record(
        (2.0,), value("output", 5.0, units=Units(axis=-1, low=(0.0, -1.0), high=(3.0, 1.0))), weight(reading(1.0))
    )
    units = Record.merge([one, other])["fc"].output.forward.units
    assert units == Units(axis=-1, low=(0.0, -1.0), high=(3.0, 2.0))


def test_shards_are_put_together() -> None:
    records = [
        record((x,), value("output", x), weight(reading(x, x + 1), reading(x * 10), layout="shard(0)"))
        for x in (1.0, 3.0)
    ]
    own = Record.merge(records)["fc"].parameters[0]
    assert (own.reading.statistics, own.layout) == (reading(1.0, 2.0, 3.0, 4.0).statistics, None)
    assert own.gradient is not None
    assert own.gradient.statistics == reading(10.0, 30.0).statistics


def test_replicas_that_differ_name_the_parameter_and_the_rank() -> None:
    records = [record((x,), value("output", x), weight(reading(w))) for x, w in ((1.0, 0.5), (2.0, 0.5), (3.0, 0.25))]
    with pytest.raises(AssertionError) as caught:
        Record.merge(records)
    assert str(caught.value) == (
        "ranks disagree: fc.weight has another mean in [rank 2] than in [rank 0]: 0.25, not 0.5. All ranks should have "
        "the same: look at the seed, at the weights that each loads, and at what is frozen"
    )


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        (
            (1.0, 2.0),
            "the gradient of fc.weight has another mean in [rank 1] than in [rank 0]: 2, not 1. " + NOT_REDUCED,
        ),
        (
            (1.0, 1.0),
            "fc.weight has another mean in [rank 1] than in [rank 0]: 0.3, not 0.4. " + OTHER_STEP,
        ),
    ],
    ids=["not reduced", "another optimizer"],
)
def test_what_makes_replicas_differ_in_a_step_is_told(gradients: tuple[float, float], message: str) -> None:
    records = [
        record((x,), value("output", x), dataclasses.replace(weight(reading(0.5), reading(g)), after=reading(after)))
        for x, g, after in zip((1.0, 2.0), gradients, (0.4, 0.3), strict=True)
    ]
    with pytest.raises(AssertionError) as caught:
        Record.merge(records)
    assert str(caught.value) == f"ranks disagree: {message}"


def test_of_weights_that_differ_in_a_later_step_the_steps_before_are_told() -> None:
    records = [record((x,), value("output", x), weight(reading(x)), step=3) for x in (1.0, 2.0)]
    with pytest.raises(AssertionError, match="; in the steps before, at whether gradients are reduced over the ranks"):
        Record.merge(records)


def test_a_layer_of_another_class_is_named() -> None:
    one = record((1.0,), value("output", 1.0), weight(reading(1.0)))
    other = dataclasses.replace(one, layers={"fc": dataclasses.replace(one["fc"], type="Other")})
    with pytest.raises(AssertionError, match=r"ranks disagree: fc has another class in \[rank 1\]"):
        Record.merge([one, other])


def stepped(*groups: OptimizerGroup, layer: str = "fc", group: int | None = 0, **more: object) -> Record:
    own = dataclasses.replace(weight(reading(1.0)), group=group, update=reading(0.1))
    one = Layer(name=layer, type="Linear", parameters=(own,))
    return Record(model="Net", layers={layer: one}, forwards=1, step=0, optimizers=groups, **more)


def test_hyperparameters_that_differ_are_named_with_the_rank() -> None:
    records = [stepped(OptimizerGroup(optimizer="SGD", options={"lr": lr, "momentum": 0})) for lr in (0.1, 0.1, 0.2)]
    with pytest.raises(AssertionError) as failed:
        Record.merge(records)
    assert str(failed.value) == (
        "ranks disagree: the optimizer of fc.weight has another lr in [rank 2] than in [rank 0]: 0.2, not 0.1. "
        "All ranks should train a parameter alike: look at what each gives to its optimizer, and at its scheduler"
    )


def test_groups_of_stages_are_put_side_by_side() -> None:
    fast, slow = (OptimizerGroup(optimizer="SGD", options={"lr": lr}) for lr in (0.1, 0.01))
    merged = Record.merge([stepped(fast), stepped(slow, layer="head"), stepped(fast, layer="tail")])
    assert merged.optimizers == (fast, slow)
    assert [parameter.group for parameter in merged.parameters] == [0, 1, 0]


def test_of_counts_of_training_the_largest_stands_and_a_note_names_the_ranks() -> None:
    records = [
        Record(model="Net", training=Training(steps=3, passes=3, stale=stale, optimizers=1)) for stale in (0, 2, 1)
    ]
    merged = Record.merge(records)
    assert merged.training == Training(steps=3, passes=3, stale=2, optimizers=1)
    assert merged.notes == ("ranks differ in what their training did: stale 2 in [rank 1], 0 in [rank 0]",)


def test_ranks_that_took_other_numbers_of_steps_disagree() -> None:
    records = [Record(model="Net", training=Training(steps=steps)) for steps in (3, 2)]
    with pytest.raises(AssertionError) as failed:
        Record.merge(records)
    assert str(failed.value) == (
        "ranks disagree: the training has another number of steps in [rank 1] than in [rank 0]: 2, not 3. "
        "All ranks take their steps together: look at how many batches each is given, and at what skips a step"
    )


def test_records_of_other_steps_are_not_merged() -> None:
    with pytest.raises(AssertionError, match=r"the record has another step in .rank 1. than in .rank 0.: 1, not 0"):
        Record.merge([Record(model="Net", step=0), Record(model="Net", step=1)])


def test_gradients_before_averaging_are_not_known_for_all_ranks() -> None:
    def local(x: float) -> Record:
        own = dataclasses.replace(weight(reading(1.0)), gradient=reading(x))
        return record((x,), value("output", x), own, step=None)

    gradient = Record.merge([local(1.0), local(2.0)])["fc"].parameters[0].gradient
    assert gradient == Reading(reason="each rank has its own, before averaging: merge the record of a step")


def test_equal_inputs_in_all_ranks_are_noted() -> None:
    records = [record((1.0, 2.0), value("output", 1.0, 3.0), weight(reading(1.0)))] * 2
    merged = Record.merge(records)
    assert merged.notes == ("all ranks were given the same inputs, and not each its part of a batch",)
    assert (merged["fc"].output.layout, merged["fc"].output.shape) == ("replicated", (2, 1))


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([], "there is no record to merge"),
        ([Record(model="Net", notes=("tensor parallel: ...",))], "not merged under tensor parallelism"),
        ([Record(model="Net", notes=("several kinds of parallelism: ...",))], "not merged under tensor parallelism"),
    ],
)
def test_what_cannot_be_merged_is_refused(records: list[Record], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Record.merge(records)


def test_a_stage_whose_optimizer_never_stepped_is_told() -> None:
    merged = Record.merge(
        [stepped(OptimizerGroup(optimizer="SGD")), dataclasses.replace(stepped(), layers={}, step=None)]
    )
    assert (merged.step, merged.notes) == (0, ("[rank 1] took no step: all its forwards are merged with step 0",))


def test_a_parameter_that_one_rank_gives_to_no_optimizer_is_named() -> None:
    sgd = OptimizerGroup(optimizer="SGD")
    with pytest.raises(AssertionError, match=r"fc\.weight has another optimizer in \[rank 1\].*: none, not SGD\. All"):
        Record.merge([stepped(sgd), stepped(group=None)])
