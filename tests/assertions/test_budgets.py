"""Assertions on what a model costs."""

from __future__ import annotations

import pytest

from pytest_modelprobe import (
    NothingObservedError,
    Record,
    UsageError,
    assert_activation_memory,
    assert_flops,
)
from pytest_modelprobe.record import Call, Layer, LayerProfile, Profile


def layer(name: str, kind: str, *, leaf: bool = True) -> Layer:
    return Layer(name=name, type=kind, leaf=leaf, calls=(Call(root="(root)", root_training=False, index=0),))


LAYERS = [layer("(root)", "Net", leaf=False), layer("body", "Block", leaf=False), layer("body.a", "Linear"),
          layer("body.b", "Linear"), layer("head", "Linear")]  # fmt: skip
COSTS = {"(root)": (1000, 100, 70), "body": (600, 0, 40), "body.a": (500, 500, 30), "body.b": (100, 100, 10),
         "head": (300, 300, 30)}  # fmt: skip

RECORD = Record(
    model="Net",
    forwards=1,
    layers={one.name: one for one in LAYERS},
    profile=Profile(
        forwards=1,
        flops=1000,
        activation_bytes=70,
        layers={
            one.name: LayerProfile(
                type=one.type,
                calls=1,
                flops=COSTS[one.name][0],
                own_flops=COSTS[one.name][1],
                activation_bytes=COSTS[one.name][2],
            )
            for one in LAYERS
        },
    ),
)


def test_a_layer_inside_another_that_is_selected_counts_once() -> None:
    assert_flops(RECORD, 1000)
    assert_activation_memory(RECORD, (0, 70))
    assert_flops(RECORD, 900, layers=["body", "body.a", "head"])
    assert_activation_memory(RECORD, 70, layers=["body", "body.a", "head"])


def test_too_many_operations_are_reported_with_the_layers_that_take_most() -> None:
    with pytest.raises(AssertionError) as failed:
        assert_flops(RECORD, (0, 900))
    assert str(failed.value) == (
        "the model takes 1,000 FLOPs in 1 forward, not 0 to 900: 100 too many\n"
        "\n"
        "layer    type     calls   FLOPs\n"
        "body.a   Linear       1     500\n"
        "head     Linear       1     300\n"
        "(root)   Net          1     100\n"
        "body.b   Linear       1     100"
    )


def test_of_selected_layers_only_these_are_reported() -> None:
    with pytest.raises(AssertionError, match=r"^the selected layers take 600 FLOPs in 1 forward, not 5: 595") as failed:
        assert_flops(RECORD, 5, layers="body")
    assert "head" not in str(failed.value)


def test_too_much_memory_is_reported_with_the_layers_that_take_most() -> None:
    with pytest.raises(AssertionError) as failed:
        assert_activation_memory(RECORD, 64)
    assert str(failed.value) == (
        "the model's activations take 70 bytes, not 64: 6 too many\n"
        "\n"
        "layer    type     calls   bytes\n"
        "body.a   Linear       1      30\n"
        "head     Linear       1      30\n"
        "body.b   Linear       1      10\n"
        "\n"
        "They grow with the batch: give the assertion the batch that it is for."
    )


@pytest.mark.parametrize("assertion", [assert_flops, assert_activation_memory])
def test_what_was_not_profiled_and_what_is_no_number_is_refused(assertion: object) -> None:
    with pytest.raises(NothingObservedError, match="Net was never called"):
        assertion(Record(model="Net"), 1)
    with pytest.raises(NothingObservedError, match="Net was not profiled: pass profile=True"):
        assertion(Record(model="Net", forwards=1), 1)
    with pytest.raises(UsageError, match=r"a number of (bytes|operations), or a tuple"):
        assertion(RECORD, (2, 1))
