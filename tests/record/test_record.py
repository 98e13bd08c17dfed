"""Records: merging, profiles, and the way to plain dicts and back."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_modelprobe.record import (
    ROOT,
    Attention,
    Call,
    Layer,
    LayerProfile,
    Operation,
    Parameter,
    Profile,
    Reading,
    Record,
    Statistics,
    Units,
    Value,
)
from pytest_modelprobe.record.tensor_statistics import quickly_made


def statistics_of(values: list[float]) -> Statistics:
    finite = [v for v in values if math.isfinite(v)]
    mean = sum(finite) / len(finite) if finite else None
    return Statistics(
        count=len(values),
        nan=sum(math.isnan(v) for v in values),
        posinf=values.count(math.inf),
        neginf=values.count(-math.inf),
        zeros=values.count(0),
        min=min(finite, default=None),
        max=max(finite, default=None),
        mean=mean,
        deviations=sum((v - mean) ** 2 for v in finite) if mean is not None else 0.0,
    )


numbers = st.floats(-1e6, 1e6) | st.sampled_from([0.0, math.nan, math.inf, -math.inf])


@given(st.lists(numbers, max_size=30), st.lists(numbers, max_size=30))
def test_statistics_of_two_parts_merge_to_those_of_the_whole(a: list[float], b: list[float]) -> None:
    merged, whole = statistics_of(a).merge(statistics_of(b)), statistics_of(a + b)
    assert (merged.count, merged.nan, merged.posinf, merged.neginf, merged.zeros, merged.min, merged.max) == (
        whole.count, whole.nan, whole.posinf, whole.neginf, whole.zeros, whole.min, whole.max,
    )  # fmt: skip
    for actual, expected in ((merged.mean, whole.mean), (merged.std, whole.std), (merged.rms, whole.rms)):
        if expected is None:
            assert actual is None
        else:
            assert actual == pytest.approx(expected, rel=1e-9, abs=1e-9 * max(whole.rms or 0, 1e-3))


def test_the_first_forward_with_a_nan_survives_merging() -> None:
    early, late = Statistics(count=1, nan=1, first_nan=2), Statistics(count=1, nan=1, first_nan=7)
    assert late.merge(early).first_nan == 2
    assert Statistics(count=1).merge(late).first_nan == 7


def test_units_with_a_nan_are_not_dead() -> None:
    assert Units(axis=-1, low=(0.0, math.nan, 0.0), high=(0.0, math.nan, 1.0)).dead == 1


def example() -> Record:
    value = Value(
        path="output",
        shape=((2, 4), 3),
        dtype="float32",
        device="cpu",
        requires_grad=True,
        tensor=0,
        forward=Reading(
            tensors=2,
            statistics=Statistics(count=18, nan=1, mean=math.inf, min=-1.0, max=2.5, first_nan=0),
            units=Units(axis=-1, low=(0.0, math.nan), high=(math.inf, 1.5)),
        ),
        backward=Reading(reason="sparse tensor"),
        source="fc0 output",
    )
    call = Call(root="(root)", root_training=True, index=0, started=0, finished=1, outputs=(value,))
    call_with_arguments = Call(
        root="(root)", root_training=True, index=1, arguments={"causal": True, "scale": -math.inf, "n": None, "s": "x"}
    )
    layer = Layer(
        name="fc1",
        type="torch.nn.modules.linear.Linear",
        attributes={"in_features": 3, "eps": 1e-5, "bias": False, "mode": "same"},
        aliases=("head",),
        parameters=(Parameter(name="weight", shape=(3, 3), dtype="float32", device="cpu", tied_to="emb.weight"),),
        calls=(call, call_with_arguments),
    )
    return Record(
        model="Net",
        layers={"fc1": layer},
        forwards=2,
        notes=("a note",),
        origin=Operation(name="torch.log", location="model.py:42", detail="input min -0.3"),
        versions={"torch": "2.13.0"},
    )


def test_a_record_survives_strict_json() -> None:
    text = json.dumps(example().to_dict(), allow_nan=False)
    back = Record.from_dict(json.loads(text))
    assert repr(back.layers) == repr(example().layers)  # by repr: NaN is not equal to itself
    assert back.to_dict() == example().to_dict()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"schema": 3, "model": "Net"}, "not a record of schema 2: found 3"),
        ([], "not a record of schema 2: found 'list'"),
        ({"schema": 2}, "not a record"),
        ({"schema": 2, "model": "Net", "color": 1}, "no field 'color'"),
        ({"schema": 2, "model": "Net", "layers": {"fc": []}}, "stands where Layer is expected"),
        ({"schema": 2, "model": "Net", "layers": 3}, "3 stands where Mapping is expected"),
        ({"schema": 2, "model": 3}, "3 stands where str is expected"),
        ({"schema": 2, "model": "Net", "forwards": True}, "True stands where int is expected"),
    ],
)
def test_what_is_no_record_is_refused(data: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Record.from_dict(data)


def test_an_operation_reads_as_a_sentence_part() -> None:
    assert str(example().origin) == "torch.log at model.py:42, input min -0.3"
    assert str(Operation(name="torch.log")) == "torch.log"


def with_nan() -> Record:
    nan = float("nan")  # another object each time
    units = Units(axis=-1, low=(nan, 0.0), high=(nan, 1.0))
    reading = Reading(statistics=Statistics(count=4, nan=1, mean=0.5), units=units, fingerprint=(1.0, 2.0))
    output = Value(path="output", shape=(2, 2), dtype="float32", device="cpu", forward=reading)
    attention = Attention(shape=(1, 1, 2), entropy=(nan, None), most=(nan, nan))
    call = Call(
        root=ROOT, root_training=False, index=0, outputs=(output,), arguments={"fill": nan}, attention=(attention,)
    )
    return Record(model="Net", layers={ROOT: Layer(name=ROOT, type="Net", attributes={"fill": nan}, calls=(call,))})


def test_a_record_with_nan_equals_its_repeat() -> None:
    record = with_nan()
    assert record == with_nan()
    assert record == Record.from_dict(record.to_dict())
    assert record == pickle.loads(pickle.dumps(record))
    assert record != dataclasses.replace(record, layers={})


def test_equal_numbers_have_one_hash() -> None:
    one, two = (record[ROOT].output.forward for record in (with_nan(), with_nan()))
    assert len({one, two}) == 1
    assert len({one, dataclasses.replace(two, tensors=2)}) == 2


# --- profiles ---------------------------------------------------------------------------------------------------------


def test_a_profile_is_printed_as_a_table() -> None:
    root = LayerProfile(type="Net", calls=2, wall_time=0.004, flops=9000, activation_bytes=64, parameters=1234)
    fc = LayerProfile(type="Linear", calls=2, wall_time=0.001, flops=9000, activation_bytes=64, parameters=1234)
    profile = Profile(
        layers={"(root)": root, "fc": fc},
        forwards=2,
        wall_time=0.004,
        flops=9000,
        activation_bytes=64,
        parameters=1234,
        probe_time=0.25,
    )
    assert str(profile) == (
        "2 forwards: 9,000 FLOPs, 64 bytes of activations, 4.000 ms; the probe took 250.000 ms more\n"
        "\n"
        "layer    type     calls   parameters   activations   FLOPs      ms   time\n"
        "(root)   Net          2        1,234            64   9,000   4.000   100%\n"
        "fc       Linear       2        1,234            64   9,000   1.000    25%"
    )


def test_hostile_names_are_text() -> None:
    assert "\x1b" not in str(Profile(layers={"a\x1b[31m": LayerProfile(type="\x1b[31m")}))


# --- dataclasses that are made quickly --------------------------------------------------------------------------------


@quickly_made
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    width: int
    boards: tuple[str, ...] = ()
    labels: dict[str, str] = dataclasses.field(default_factory=dict)


def test_a_dataclass_that_is_made_quickly_is_made_as_any_other() -> None:
    first, second = Shelf(width=1), Shelf(width=2, boards=("oak",))
    assert (first.boards, second.boards, second.width) == ((), ("oak",), 2)
    assert first.labels == {}
    assert first.labels is not second.labels  # a container of its own
    assert list(inspect.signature(Shelf).parameters) == ["width", "boards", "labels"]
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'width'"):
        Shelf()
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.width = 2
