"""`assert_same_distribution`, on records written by hand."""

import dataclasses

import pytest

from pytest_modelprobe import NothingObservedError, Record, assert_same_distribution
from pytest_modelprobe.record import Call, Layer, Reading, Statistics, Value


def value(mean, std, path="output", count=100):
    statistics = Statistics(count=count, mean=mean, deviations=count * std**2)
    reading = Reading(statistics=statistics)
    return Value(path=path, shape=(count,), dtype="float32", device="cpu", forward=reading)


def record(inputs=(0, 1), fc=(0, 1), act=(0.5, 0.5)):
    def call(started, finished, output, entered=()):
        return Call(
            root="(root)",
            root_training=False,
            index=0,
            started=started,
            finished=finished,
            inputs=entered,
            outputs=(output,),
        )

    layers = {
        "(root)": Layer(name="(root)", type="Net", calls=(call(0, 5, value(*act), (value(*inputs, "input"),)),)),
        "fc": Layer(name="fc", type="torch.nn.Linear", calls=(call(1, 2, value(*fc)),)),
        "act": Layer(name="act", type="torch.nn.ReLU", calls=(call(3, 4, value(*act)),)),
    }
    return Record(model="Net", layers=layers, forwards=1)


def with_fc(reading):
    whole = record()
    call = whole["fc"].calls[0]
    outputs = (dataclasses.replace(call.outputs[0], forward=reading),)
    fc = dataclasses.replace(whole["fc"], calls=(dataclasses.replace(call, outputs=outputs),))
    return dataclasses.replace(whole, layers={**whole.layers, "fc": fc})


def test_a_value_that_could_not_be_read_does_not_pass():
    with pytest.raises(NothingObservedError) as error:
        assert_same_distribution(record(), with_fc(Reading(reason="it is on device meta")))
    assert str(error.value) == (
        "no number is known of fc output: it is on device meta; leave the layer out with layers=, and look at the "
        "value in the test itself"
    )


def test_nan_in_one_record_alone_is_another_distribution():
    for spoilt in (Statistics(count=100, nan=50, mean=0.0, deviations=50.0), Statistics(count=2, nan=2)):
        with pytest.raises(AssertionError, match=r"^fc is the first .* by inf standard deviations"):
            assert_same_distribution(record(), with_fc(Reading(statistics=spoilt)))


def test_the_first_layer_with_another_distribution_is_named():
    with pytest.raises(AssertionError) as error:
        assert_same_distribution(record(), record(fc=(0.6, 1.2), act=(2.0, 0.5)))
    assert str(error.value).splitlines() == [
        (
            "fc is the first with another distribution: its output moved by 0.573 standard deviations, more than 0.25; "
            "3 of 4 values looked at moved"
        ),
        "",
        "value    type     shift   mean of a   mean of b   std of a   std of b",
        "fc       Linear   0.573           0         0.6          1        1.2",
        "act      ReLU         3         0.5           2        0.5        0.5",
        "(root)   Net          3         0.5           2        0.5        0.5",
        "",
        (
            "What came before is within the limits; the input of the model moved by 0: look at what fc does with it. "
            "modelprobe.plot_distributions(a, b) draws both."
        ),
    ]


def test_data_that_differ_are_told_first():
    with pytest.raises(
        AssertionError, match=r"^the input of the model is the first with another distribution"
    ) as error:
        assert_same_distribution(record(), record(inputs=(3, 1), fc=(3, 1)))
    assert str(error.value).endswith("compare how they are read, normalized and augmented.")


def test_a_limit_may_be_wider_and_layers_may_be_left_out():
    assert_same_distribution(record(), record(fc=(0.6, 1.2)), max_shift=0.6)
    assert_same_distribution(record(), record(fc=(0.6, 1.2)), layers="act")


def test_records_without_a_layer_in_common_are_refused():
    other = Record(model="Other", layers={"x": record().layers["fc"]}, forwards=1)
    with pytest.raises(NothingObservedError, match=r"^Net and Other have no layer of the same name"):
        assert_same_distribution(record(), other)
