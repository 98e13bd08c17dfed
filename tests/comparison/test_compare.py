"""Two records → what differs: each kind of difference, and nothing else."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.comparison.compare import compare
from pytest_modelprobe.comparison.tolerance import Comparison
from pytest_modelprobe.exceptions import NothingObservedError, SelectionError, UsageError
from pytest_modelprobe.files import decode_architecture, encode
from pytest_modelprobe.record import (
    Call,
    EmittedTensor,
    IsolatedResponse,
    Layer,
    Parameter,
    Reading,
    Record,
    Statistics,
    Value,
)


def reading(*numbers: float) -> Reading:
    """Return the reading of at most 16 numbers: their own fingerprint."""
    mean = sum(numbers) / len(numbers)
    deviations = sum((x - mean) ** 2 for x in numbers)
    moments = Statistics(count=len(numbers), mean=mean, deviations=deviations)
    return Reading(statistics=moments, fingerprint=(*numbers, *[0.0] * (16 - len(numbers))))


def value(path: str, *numbers: float, source: str | None = None) -> Value:
    return Value(
        path=path,
        shape=(len(numbers),),
        dtype="float32",
        device="cpu",
        source=source,
        forward=reading(*numbers),
        backward=reading(*numbers),
    )


def weight(name: str, *numbers: float, **other: Any) -> Parameter:
    fields = {"shape": (len(numbers),), "requires_grad": True, "gradient": reading(*numbers), **other}
    return Parameter(name=name, dtype="float32", device="cpu", reading=reading(*numbers), **fields)


X, Y, Z = (1.0, 2.0), (3.0, 4.0), (5.0, 6.0)

RESPONSE = IsolatedResponse(
    recipes={"input": "2 2^0", "weight": "2^0"},
    handed=(EmittedTensor(where="output", reading=Reading(fingerprint=(1.0, *[0.0] * 15))),),
    gradient=Reading(fingerprint=(1.0, *[0.0] * 15)),
)


def call(start: int, end: int, source: Value, target: Value, **other: Any) -> Call:
    fields = {"started": start, "finished": end, "inputs": (source,), "outputs": (target,), **other}
    return Call(root="(root)", root_training=False, index=0, **fields)


OLD = Record(
    model="Net",
    seed=0,
    loss="random",
    forwards=1,
    backwards=1,
    layers={
        layer.name: layer
        for layer in (
            Layer(name="(root)", type="net.Net", calls=(call(0, 5, value("input", *X), value("output", *Z)),)),
            Layer(
                name="norm",
                type="net.Norm",
                attributes={"eps": 1e-5, "momentum": None},
                parameters=(weight("weight", 1.0, 1.0),),
                buffers=(weight("mean", 1.0, 1.0, requires_grad=False, gradient=None),),
                calls=(call(1, 2, value("input", *X), value("output", *Y), arguments={"mode": "fast"}),),
            ),
            Layer(
                name="fc",
                type="net.Linear",
                parameters=(weight("weight", 2.0, 1.0),),
                calls=(call(3, 4, value("input", *Y, source="norm output"), value("output", *Z), response=RESPONSE),),
            ),
        )
    },
)


def changed(layer: str, **fields: Any) -> Record:
    """Return the record with a layer that has other fields."""
    return dataclasses.replace(OLD, layers={**OLD.layers, layer: dataclasses.replace(OLD[layer], **fields)})


def called(layer: str, **fields: Any) -> Record:
    """Return the record with a layer whose call has other fields."""
    return changed(layer, calls=(dataclasses.replace(OLD[layer].calls[0], **fields),))


def given(layer: str, **fields: Any) -> Record:
    """Return the record with a layer that gives out a value with other fields."""
    return called(layer, outputs=(dataclasses.replace(OLD[layer].output, **fields),))


def owning(layer: str, **fields: Any) -> Record:
    """Return the record with a layer whose parameter has other fields."""
    return changed(layer, parameters=(dataclasses.replace(OLD[layer].parameters[0], **fields),))


def told(comparison: Comparison) -> list[tuple[str, str, str]]:
    return [(d.layer, d.kind, d.what) for d in comparison.differences]


def without(layer: str) -> Record:
    return dataclasses.replace(OLD, layers={name: one for name, one in OLD.layers.items() if name != layer})


# --- the same -----------------------------------------------------------------------------------------------------


def test_a_record_is_the_same_as_itself() -> None:
    assert compare(OLD, OLD).same


def test_what_is_only_stored_is_not_compared() -> None:
    new = dataclasses.replace(OLD, versions={"torch": "3"}, notes=("odd",), device="cuda", noise="measured")
    assert compare(new, OLD).same


def test_a_class_that_moved_to_another_module_is_the_same() -> None:
    assert compare(changed("fc", type="other.place.Linear"), OLD).same


# --- each kind ----------------------------------------------------------------------------------------------------

ONE_EACH: dict[str, tuple[Record, tuple[str, str, str]]] = {
    "layer removed": (without("fc"), ("fc", "layer removed", "")),
    "type": (changed("fc", type="net.Conv"), ("fc", "type", "")),
    "attribute": (changed("norm", attributes={"eps": 1e-6, "momentum": None}), ("norm", "attribute", "eps")),
    "mode": (changed("norm", training=True), ("norm", "mode", "training")),
    "parameter added": (
        changed("fc", parameters=(*OLD["fc"].parameters, weight("bias", 1.0))),
        ("fc", "parameter added", "bias"),
    ),
    "parameter removed": (changed("fc", parameters=()), ("fc", "parameter removed", "weight")),
    "parameter shape": (owning("fc", shape=(2, 1)), ("fc", "parameter shape", "weight")),
    "parameter dtype": (owning("fc", dtype="float64"), ("fc", "parameter dtype", "weight")),
    "parameter trainable": (owning("fc", requires_grad=False), ("fc", "parameter trainable", "weight")),
    "parameter tied": (owning("fc", tied_to="norm.weight"), ("fc", "parameter tied", "weight")),
    "parameter gradient": (owning("fc", gradient=reading(9.0, 1.0)), ("fc", "parameter gradient", "weight")),
    "gradient presence of a parameter": (owning("fc", gradient=None), ("fc", "gradient presence", "weight")),
    "weights": (owning("fc", reading=reading(2.0, 1.1)), ("fc", "weights", "weight")),
    "buffer added": (changed("fc", buffers=OLD["norm"].buffers), ("fc", "buffer added", "mean")),
    "buffer removed": (changed("norm", buffers=()), ("norm", "buffer removed", "mean")),
    "buffer": (
        changed("norm", buffers=(weight("mean", 1.0, 1.1, requires_grad=False, gradient=None),)),
        ("norm", "buffer", "mean"),
    ),
    "state": (
        changed("norm", buffers=(dataclasses.replace(OLD["norm"].buffers[0], after=reading(2.0, 2.0)),)),
        ("norm", "state", "mean"),
    ),
    "calls": (changed("fc", calls=()), ("fc", "calls", "calls")),
    "argument": (called("norm", arguments={"mode": "slow"}), ("norm", "argument", "mode")),
    "argument that is new": (called("fc", arguments={"k": 1}), ("fc", "argument", "k")),
    "grad mode": (called("fc", grad_enabled=False), ("fc", "context", "grad_enabled")),
    "autocast": (called("fc", autocast="bfloat16"), ("fc", "context", "autocast")),
    "shape of a value": (given("norm", shape=(1, 2)), ("norm", "interface", "output")),
    "dtype of a value": (given("norm", dtype="float64"), ("norm", "interface", "output")),
    "number of values": (called("norm", outputs=()), ("norm", "path", "output")),
    "source": (
        called("fc", inputs=(value("input", *X, source="embed output"),)),
        ("fc", "source", "input"),
    ),
    "seed": (dataclasses.replace(OLD, seed=1), ("(root)", "seed", "seed")),
    "loss": (dataclasses.replace(OLD, loss="mse"), ("(root)", "loss", "loss")),
    "forwards": (dataclasses.replace(OLD, forwards=2), ("(root)", "forwards", "forwards")),
    "input": (called("norm", inputs=(dataclasses.replace(value("input", *X), forward=reading(9.0, 2.0)),)),
              ("norm", "input", "input")),
    "output": (given("norm", forward=reading(3.0, 4.5)), ("norm", "output", "output")),
    "gradient": (given("norm", backward=reading(3.0, 5.0)), ("norm", "gradient", "output")),
    "gradient presence": (given("norm", backward=None), ("norm", "gradient presence", "output")),
    "response": (
        called("fc", response=dataclasses.replace(RESPONSE, handed=(EmittedTensor(where="output", passed="input"),))),
        ("fc", "response", "output"),
    ),
    "response gradient": (
        called("fc", response=dataclasses.replace(RESPONSE, gradient=Reading(fingerprint=(2.0, *[0.0] * 15)))),
        ("fc", "response gradient", ""),
    ),
    "response without a gradient": (
        called("fc", response=dataclasses.replace(RESPONSE, without_gradient=("input",))),
        ("fc", "response gradient", "input"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_EACH)
def test_one_change_is_one_difference(name: str) -> None:
    new, expected = ONE_EACH[name]
    assert told(compare(new, OLD)) == [expected]


def test_a_renamed_layer_is_one_difference() -> None:
    layers = [*without("fc").layers.values(), dataclasses.replace(OLD["fc"], name="proj")]
    found = compare(dataclasses.replace(OLD, layers={layer.name: layer for layer in layers}), OLD)
    assert [(d.layer, d.kind, d.actual, d.expected) for d in found.differences] == [
        ("proj", "layer renamed", "proj", "fc")
    ]
    assert found.renamed == {"fc": "proj"}


def test_a_difference_has_both_values_the_actual_first() -> None:
    (found,) = compare(changed("norm", attributes={"eps": 1e-6, "momentum": None}), OLD).differences
    assert (found.actual, found.expected) == (1e-6, 1e-5)


def test_a_difference_of_numbers_has_the_noise_of_the_expected() -> None:
    noisy = given("norm", forward=dataclasses.replace(reading(*Y), noise=0.001))
    expected = dataclasses.replace(noisy, noise="measured")
    (found,) = compare(given("norm", forward=reading(3.0, 5.0)), expected).differences
    assert (found.noise, found.limit) == (0.001, 0.004 + 2e-6)


@pytest.mark.parametrize(("actual", "same"), [(True, False), (1, True), (1.0, True), ("1", False), (None, False)])
def test_attributes_are_the_same_only_if_they_are_numbers_or_their_types_are(actual: object, same: bool) -> None:
    old, new = (changed("fc", attributes={"n": n}) for n in (1, actual))
    assert compare(new, old).same is same


TINY = reading(1e-9, 1e-9)


def from_nothing(*inputs: Value) -> list[tuple[str, str, str]]:
    """Return the differences of a layer that gives out very little where it gave out nothing."""
    old, new = (
        called("norm", inputs=inputs, outputs=(dataclasses.replace(value("output", *Y), forward=forward),))
        for forward in (reading(0.0, 0.0), TINY)
    )
    return told(compare(new, old))


def test_what_is_next_to_nothing_beside_the_inputs_is_nothing() -> None:
    assert from_nothing(value("input", 1.0, 2.0)) == []
    assert from_nothing(value("input", 1e-9, 1e-9)) == [("norm", "output", "output")]


@pytest.mark.parametrize("least", [-3.4e38, -1e9, -65504.0])
def test_an_attention_mask_is_no_quantity_to_judge_against(least: float) -> None:
    mask = value("mask", 0.0, least)
    assert mask.statistics is not None
    numbers = dataclasses.replace(mask.statistics, min=least, max=0.0)
    mask = dataclasses.replace(mask, forward=dataclasses.replace(mask.forward, statistics=numbers))
    assert from_nothing(value("input", 1e-9, 1e-9), mask) == [("norm", "output", "output")]


def test_an_attribute_that_only_one_has_is_a_note() -> None:
    for actual, expected in ({"n": 1, "new": 3}, {"n": 1}), ({"n": 1}, {"n": 1, "old": 3}):
        found = compare(changed("fc", attributes=actual), changed("fc", attributes=expected))
        assert found.same
        ((layer, kind, what),) = [(d.layer, d.kind, d.what) for d in found.notes]
        assert (layer, kind) == ("fc", "attribute")
        assert what in ("new", "old")


LAYER_NORM = "torch.nn.modules.normalization.LayerNorm"


@pytest.mark.parametrize(
    ("written_by", "kind", "name", "fails"),
    [
        ("2.6.0", LAYER_NORM, "eps", True),
        (None, LAYER_NORM, "eps", True),
        ("2.5.0", LAYER_NORM, "eps", False),
        (None, "net.LayerNorm", "eps", False),
        ("2.6.0", LAYER_NORM, "set_by_a_user", False),
        ("2.6.0", LAYER_NORM, "_set_by_a_framework", False),
    ],
)
def test_an_attribute_of_torchs_own_that_the_file_lacks_differs(
    written_by: str | None, kind: str, name: str, fails: bool
) -> None:
    new = dataclasses.replace(
        changed("norm", type=kind, attributes={"n": 1, name: 0.5}), versions={"torch": "2.6.0", "numpy": "2"}
    )
    old = dataclasses.replace(
        changed("norm", type="LayerNorm", attributes={"n": 1}), versions={"torch": written_by} if written_by else {}
    )
    found = compare(new, old)
    expected = [("norm", "attribute", name, 0.5, "not in the file" if fails else None)]
    assert [(d.layer, d.kind, d.what, d.actual, d.expected) for d in (found.differences or found.notes)] == expected
    assert found.same == (not fails)


def test_a_shape_that_varied_is_written_as_a_range() -> None:
    (found,) = compare(given("norm", shape=((1, 4),)), given("norm", shape=(4,))).differences
    assert (found.actual, found.expected) == ("(1..4,) float32", "(4,) float32")


def test_numbers_of_parameters_of_other_shapes_are_not_compared() -> None:
    assert told(compare(owning("fc", shape=(3,), reading=reading(1.0, 2.0, 3.0)), OLD)) == [
        ("fc", "parameter shape", "weight")
    ]


def test_a_tied_parameter_that_changed_is_told_where_it_is_owned() -> None:
    old, new = (owning("fc", tied_to="norm.weight", reading=reading(x, x)) for x in (1.0, 2.0))
    assert compare(new, old).same


def test_a_frozen_parameter_has_no_gradient_to_miss() -> None:
    assert told(compare(owning("fc", requires_grad=False, gradient=None), OLD)) == [
        ("fc", "parameter trainable", "weight")
    ]


def test_the_gradient_of_a_value_that_was_overwritten_is_not_compared() -> None:
    assert compare(given("norm", backward=None, overwritten=True), OLD).same


# --- inputs -------------------------------------------------------------------------------------------------------


def test_an_input_that_is_a_recorded_output_is_told_once() -> None:
    new = given("norm", forward=reading(3.0, 5.0), backward=reading(3.0, 5.0))
    moved = dataclasses.replace(
        value("input", 3.0, 5.0, source="norm output"),
    )
    fc = dataclasses.replace(new["fc"], calls=(dataclasses.replace(new["fc"].calls[0], inputs=(moved,)),))
    found = compare(dataclasses.replace(new, layers={**new.layers, "fc": fc}), OLD)
    assert told(found) == [("norm", "output", "output"), ("norm", "gradient", "output")]


def test_a_value_handed_by_keyword_is_the_one_handed_by_position() -> None:
    assert compare(called("norm", inputs=(value("x", *X),)), OLD).same


def test_values_of_the_same_path_are_paired_before_those_in_order() -> None:
    old = called("norm", inputs=(value("input", *X), value("mask", *Y)))
    assert compare(called("norm", inputs=(value("mask", *Y), value("x", *X))), old).same


def test_inputs_of_another_shape_or_dtype_are_no_pair() -> None:
    positions = dataclasses.replace(value("positions", 0.0, 1.0), dtype="int64")
    old = called("norm", inputs=(value("input", *X), positions))
    new = called("norm", inputs=(value("input", *X), value("mask", 0.0, 1.0, 1.0)))
    assert [(d.kind, d.actual, d.expected) for d in compare(new, old).differences] == [
        ("input added", "(3,) float32", None),
        ("input removed", None, "(2,) int64"),
    ]


@pytest.mark.parametrize(("value", "same"), [(None, True), (False, True), (True, False), (0, False), (0.0, False)])
def test_an_argument_that_is_not_given_is_none_or_false(value: object, same: bool) -> None:
    given, not_given = called("norm", arguments={"causal": value}), called("norm", arguments={})
    assert compare(given, not_given).same is same
    assert compare(not_given, given).same is same


def test_two_values_that_changed_places_differ() -> None:
    old = called("norm", inputs=(value("input", *X), value("input[1]", *Y)))
    new = called("norm", inputs=(value("input", *Y), value("input[1]", *X)))
    assert {d.kind for d in compare(new, old).differences} == {"input", "gradient"}


def test_an_input_that_got_another_name_for_its_source_is_the_same() -> None:
    """A container's output may be that of its last child, or not any more."""
    block = Layer(name="block", type="net.Block", calls=(call(1, 3, value("input", *X), value("output", *Y)),))
    layers = {**OLD.layers, "block": block}
    old = dataclasses.replace(OLD, layers=layers)
    inner = called("fc", inputs=(value("input", *Y, source="block output"),))["fc"]
    new = dataclasses.replace(OLD, layers={**layers, "fc": inner})
    assert compare(new, old).same
    assert compare(old, new).same


def test_an_input_of_the_test_has_no_source_to_differ() -> None:
    assert compare(called("(root)", inputs=(value("input", *X, source="a output"),)), OLD).same


# --- forwards, backwards, modes -----------------------------------------------------------------------------------


def test_without_a_backward_of_one_that_alone_differs() -> None:
    new = given("norm", backward=None)
    assert told(compare(dataclasses.replace(new, backwards=0), OLD)) == [("(root)", "forwards", "backwards")]


def test_a_record_without_calls_is_not_one_with_calls() -> None:
    layers = {name: dataclasses.replace(layer, calls=()) for name, layer in OLD.layers.items()}
    record = Record(model="Net", layers=layers)
    calls = [(name, "calls", "calls") for name in OLD.layers]
    for actual, expected in ((record, OLD), (OLD, record)):
        assert told(compare(actual, expected)) == [("(root)", "forwards", "forwards"), *calls]
        assert told(compare(actual, expected, parts="architecture")) == calls


def structure(record: Record) -> Record:
    """Return a record as its architecture file alone has it."""
    return decode_architecture(encode(record).architecture, where="net.arch.json").record


def test_a_record_without_numbers_is_not_one_with_numbers() -> None:
    for actual, expected in ((structure(OLD), OLD), (OLD, structure(OLD))):
        (found,) = compare(actual, expected).differences
        assert (found.what, {found.actual, found.expected}) == ("record", {"numbers", "structure alone"})
        assert compare(actual, expected, parts="architecture").same


def test_a_value_that_one_of_two_records_lacks_differs() -> None:
    empty = given("norm", forward=Reading())
    assert told(compare(empty, OLD)) == [("norm", "output", "output")]
    assert told(compare(OLD, empty)) == [("norm", "output", "output")]


def test_a_value_that_both_lack_is_counted() -> None:
    empty = given("norm", forward=Reading(reason="a sparse tensor"))
    found = compare(empty, empty)
    assert (found.same, found.unknown) == (True, 1)


def test_a_record_without_its_root_calls_the_other_layers_as_often() -> None:
    part = dataclasses.replace(OLD, layers={"norm": OLD.layers["norm"]})
    assert {difference.kind for difference in compare(part, OLD).differences} == {"layer removed"}


def test_where_no_numbers_are_there_to_compare_that_is_an_error() -> None:
    wider = dataclasses.replace(structure(OLD), model="Wider")
    dropped = dataclasses.replace(OLD.layers["norm"], attributes={"eps": 1.0})
    changed = structure(dataclasses.replace(OLD, layers={**OLD.layers, "norm": dropped}))
    for actual in (structure(OLD), wider, changed):
        with pytest.raises(NothingObservedError, match="nothing was compared, for no value has numbers in both"):
            compare(actual, structure(OLD), parts="behavior")


def both_modes(record: Record) -> Record:
    """Return the record of a forward in training mode and one in evaluation mode."""
    layers = {
        name: dataclasses.replace(layer, calls=(*layer.calls, dataclasses.replace(layer.calls[0], root_training=True)))
        for name, layer in record.layers.items()
    }
    return dataclasses.replace(record, layers=layers)


def test_forwards_of_two_modes_are_compared_each_with_its_own() -> None:
    assert compare(both_modes(OLD), both_modes(OLD)).same


def test_calls_come_in_the_order_in_which_they_ran() -> None:
    assert [pair.layer for pair in compare(OLD, OLD).calls] == ["(root)", "norm", "fc"]


# --- responses ----------------------------------------------------------------------------------------------------


def response(**fields: Any) -> Record:
    return called("fc", response=dataclasses.replace(RESPONSE, **fields))


OTHER = (EmittedTensor(where="output", reading=Reading(fingerprint=(2.0, *[0.0] * 15))),)


def test_responses_to_other_tensors_are_not_compared() -> None:
    assert compare(response(recipes={"input": "2 2^3", "weight": "2^0"}, handed=OTHER), OLD).same


def test_responses_are_compared_if_the_tensors_that_both_have_are_the_same() -> None:
    assert not compare(response(recipes={"input": "2 2^0", "bias": "2^0"}, handed=OTHER), OLD).same


def test_a_call_that_could_not_be_made_alone_is_not_compared() -> None:
    assert compare(called("fc", response=IsolatedResponse(reason="it raised")), OLD).same
    assert compare(called("fc", response=None), OLD).same


def test_the_gradient_of_an_answer_is_told_by_what_it_does_not_reach_where_that_changed() -> None:
    new = response(without_gradient=("input",), gradient=Reading(fingerprint=(2.0, *[0.0] * 15)))
    assert told(compare(new, OLD)) == [("fc", "response gradient", "input")]


def test_what_is_handed_on_to_another_child_is_told_with_where_it_went() -> None:
    new = response(handed=(EmittedTensor(where="a input", passed="input"), *RESPONSE.handed))
    (found,) = compare(new, OLD).differences
    assert (found.kind, found.what, found.actual, found.expected) == ("response", "a input", "input", None)


def test_what_was_passed_on_and_is_computed_now_is_told() -> None:
    passed = response(handed=(EmittedTensor(where="output", passed="input"),))
    (found,) = compare(OLD, passed).differences
    assert (found.actual, found.expected) == ("computed", "input")


# --- parts --------------------------------------------------------------------------------------------------------


def test_parts_tell_architecture_and_behavior_apart() -> None:
    new = dataclasses.replace(
        OLD,
        layers={**changed("norm", attributes={"eps": 1e-6}).layers, "fc": given("fc", forward=reading(5.0, 7.0))["fc"]},
    )
    assert {d.kind for d in compare(new, OLD, parts="architecture").differences} == {"attribute"}
    assert {d.kind for d in compare(new, OLD, parts="behavior").differences} == {"output"}
    assert {d.kind for d in compare(new, OLD).differences} == {"attribute", "output"}


# --- layers -------------------------------------------------------------------------------------------------------


def test_only_the_layers_asked_for_are_told() -> None:
    new = changed("norm", attributes={"eps": 1e-6})
    assert compare(new, OLD, layers=["fc"]).same
    assert not compare(new, OLD, layers=["norm"]).same


def test_a_removed_layer_is_told_if_all_are_asked_for() -> None:
    assert told(compare(without("fc"), OLD, layers=["(root)", "norm"])) == [("fc", "layer removed", "")]
    assert compare(without("fc"), OLD, layers=["norm"]).same


# --- tolerance ----------------------------------------------------------------------------------------------------

MOVED = given("norm", forward=reading(3.0, 4.001))  # by 2e-4, where 1e-4 is allowed


def test_a_tolerance_multiplies_what_every_layer_may_change() -> None:
    assert not compare(MOVED, OLD).same
    assert compare(MOVED, OLD, tolerance=3).same


@pytest.mark.parametrize(("glob", "same"), [("norm", True), ("n*", True), ("fc", False), ("**", True)])
def test_a_tolerance_counts_for_the_layers_of_its_glob(glob: str, same: bool) -> None:
    assert compare(MOVED, OLD, tolerance={glob: 3}).same is same


@pytest.mark.parametrize("bad", [0, -1, math.inf, math.nan, True, "3", None])
def test_a_tolerance_is_a_positive_number(bad: Any) -> None:
    with pytest.raises(UsageError) as error:
        compare(MOVED, OLD, tolerance={"norm": bad})
    assert str(error.value) == f"a tolerance multiplies the measured noise and is a positive number; got {bad!r}"


def test_a_tolerance_for_no_layer_is_an_error() -> None:
    with pytest.raises(SelectionError) as error:
        compare(MOVED, OLD, tolerance={"norms": 3})
    assert str(error.value) == "tolerance: 'norms' matches none of 3 layers; nearest: 'norm'"


# --- names --------------------------------------------------------------------------------------------------------


def test_layers_that_the_user_renamed_are_no_difference() -> None:
    layers = [*without("fc").layers.values(), dataclasses.replace(OLD["fc"], name="proj")]
    new = dataclasses.replace(OLD, layers={layer.name: layer for layer in layers})
    found = compare(new, OLD, rename={"proj": "fc"})
    assert (found.same, found.renamed) == (True, {"fc": "proj"})


def test_sources_are_compared_under_the_actual_s_names() -> None:
    fc = called("fc", inputs=(value("input", *Y, source="ln output"),))["fc"]
    layers = [OLD["(root)"], dataclasses.replace(OLD["norm"], name="ln"), fc]
    new = dataclasses.replace(OLD, layers={layer.name: layer for layer in layers})
    assert compare(new, OLD, rename={"ln": "norm"}).same


# --- real models --------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.fc.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.fc(self.fc(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "shared": (Shared, (2, 4)),
    "recurrent": (Recurrent, (2, 5, 4)),
    "convolutional": (convolutional, (2, 1, 8, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_run_twice_is_the_same(name: str) -> None:
    factory, shape = MODELS[name]
    probe = ModelProbe()
    old, new = (probe.run(probe.build(factory), probe.randn(*shape), loss="random", mode="train") for _ in range(2))
    assert compare(new, old).same


def test_the_state_that_a_batch_norm_leaves_is_compared() -> None:
    probe, x = ModelProbe(), ModelProbe().randn(2, 1, 8, 8)
    old, new = (probe.build(convolutional) for _ in range(2))
    new[1].momentum = 0.5
    found = compare(probe.run(new, x, mode="train"), probe.run(old, x, mode="train"))
    assert told(found) == [
        ("1", "attribute", "momentum"),
        ("1", "state", "running_mean"),
        ("1", "state", "running_var"),
    ]


def test_each_call_of_a_shared_layer_is_compared_with_its_own() -> None:
    probe, x = ModelProbe(), ModelProbe().randn(2, 4)
    old, new = probe.build(Shared), probe.build(Shared)
    new.forward = lambda x: new.head(new.fc(2 * new.fc(x)))
    found = compare(probe.run(new, x), probe.run(old, x))
    assert [(d.layer, d.kind, d.call) for d in found.differences if d.layer == "fc"] == [
        ("fc", "source", 1),
        ("fc", "input", 1),
        ("fc", "output", 1),
    ]
