"""The language of shapes: what a spec means, what a name stands for, what a mismatch says."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_modelprobe.assertions.structure import Bindings, match, parse
from pytest_modelprobe.exceptions import ShapeSpecError


def complaints(spec: Any, shape: Any, dims: Any = None) -> list[str]:
    return match(parse(spec), shape, Bindings(dims), "fc1 output")


@pytest.mark.parametrize(
    ("spec", "tokens"),
    [
        ("  batch\t016 \n", ("batch", 16)),
        ("_ ... _private", ("_", "...", "_private")),
        ("", ()),
        ((4, "batch", None, ..., "_", "16"), (4, "batch", "_", "...", "_", 16)),
        (["*lead", 2], ("*lead", 2)),
    ],
)
def test_a_spec_has_these_tokens(spec: Any, tokens: tuple[int | str, ...]) -> None:
    assert parse(spec) == tokens


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ("batch, 16", "token 1 of 2 is 'batch,'"),
        ("batch 4.0", "token 2 of 2 is '4.0'"),
        ("*_", "token 1 of 1 is '*_'"),
        ("None", "token 1 of 1 is 'None'"),
        ((4, -1), "token 2 of 2 is -1"),
        ((True,), "token 1 of 1 is True"),
        (("batch 16",), "token 1 of 1 is 'batch 16'"),
    ],
)
def test_what_is_no_token_is_refused_with_its_place(spec: Any, place: str) -> None:
    with pytest.raises(ShapeSpecError) as caught:
        parse(spec)
    tokens = "a token is an integer, a name, `_`, `...` or `*name`, with spaces alone between tokens."
    assert str(caught.value) == f"Shape spec {spec!r}: {place}; {tokens}"


def test_two_tokens_of_any_length_are_an_error() -> None:
    with pytest.raises(ShapeSpecError) as caught:
        parse("... 3 *lead")
    expected = "has several tokens of any length; keep one, and write `_` for single dimensions."
    assert str(caught.value) == f"Shape spec '... 3 *lead' {expected}"


def test_any_other_value_is_no_spec() -> None:
    spec: Any = 5
    with pytest.raises(ShapeSpecError, match=r"Shape spec 5 is of type int; write text such as 'batch 16', or a tuple"):
        parse(spec)


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("4 16", (4, 16)),
        ("", ()),
        ("_ _", (3, (1, 8))),
        ("...", ()),
        ("4 ... 16", (4, 1, 2, 3, 16)),
        ("*lead", ()),
        ("n n", ((1, 8), (1, 8))),
        ("*lead n", ((1, 8), 3)),
    ],
)
def test_a_shape_matches(spec: str, shape: Any) -> None:
    assert complaints(spec, shape) == []


@pytest.mark.parametrize(
    ("spec", "shape", "dims", "told"),
    [
        ("4 16", (4, 2), None, "dimension 1 is 2, expected 16"),
        ("... 16", (1, 2, 3), None, "dimension 2 is 3, expected 16"),
        ("1", ((1, 8),), None, "dimension 0 varies in 1..8, expected 1"),
        ("batch 16", (4,), None, '1 dimension, but "batch 16" asks for 2'),
        ("_ ... 16", (), None, '0 dimensions, but "_ ... 16" asks for at least 2'),
        ("n n", (4, 5), None, "dimension 1 is 5, but n is 4, bound by its own dimension 0"),
        ("batch", ((1, 4),), {"batch": (1, 8)}, "dimension 0 varies in 1..4, but batch is 1..8, fixed by dims="),
    ],
)
def test_a_mismatch_is_told(spec: str, shape: Any, dims: Any, told: str) -> None:
    assert complaints(spec, shape, dims) == [told]


def test_all_that_differs_is_reported() -> None:
    assert len(complaints("1 2 n n", (4, 4, 5, 6))) == 3


def test_a_range_read_from_json_is_a_range() -> None:
    shape: Any = [[1, 8], 16]
    assert complaints("batch 16", shape, {"batch": (1, 8)}) == []


def test_a_name_is_the_same_everywhere() -> None:
    bindings = Bindings()
    assert match(parse("batch *lead"), (8, 4, 7), bindings, "fc1 output") == []
    assert match(parse("batch *lead"), (4, 4, 8), bindings, "fc2 output") == [
        "dimension 0 is 4, but batch is 8, bound by fc1 output",
        "*lead stands for (4, 8), but is (4, 7), bound by fc1 output",
    ]


def test_a_shape_that_does_not_match_binds_nothing() -> None:
    bindings = Bindings()
    match(parse("batch 16"), (8, 2), bindings, "fc1 output")
    assert not bindings


def test_a_name_with_a_star_is_another_name() -> None:
    bindings = Bindings()
    match(parse("n *n"), (1, 2, 3), bindings, "fc1 output")
    assert bindings == {"n": (1, "fc1 output"), "*n": ((2, 3), "fc1 output")}


def test_a_fixed_name_that_no_spec_uses_is_an_error() -> None:
    specs = [parse("batch 16"), parse("*lead batch")]
    Bindings({"batch": 4, "*lead": (4, (1, 8))}).check_used(specs)
    with pytest.raises(ShapeSpecError) as caught:
        Bindings({"bacth": (1, 2)}).check_used(specs)
    assert str(caught.value) == "dims= fixes 'bacth', which no spec uses; the names in use are: 'batch', '*lead'."
