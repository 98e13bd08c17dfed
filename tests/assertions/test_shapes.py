"""The language of shapes: what a spec means, what a name stands for, what a mismatch says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_modelprobe.assertions.shapes import Bindings, Bound, ShapeSpec, match, parse
from pytest_modelprobe.exceptions import ShapeSpecError
from pytest_modelprobe.text import shape as shape_text


def spec_error(spec: Any) -> str:
    with pytest.raises(ShapeSpecError) as caught:
        parse(spec)
    return str(caught.value)


def complaints(spec: Any, shape: Any, dims: Any = None) -> list[str]:
    return [str(problem) for problem in match(spec, shape, Bindings(dims), "fc1 output")]


# --- parsing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "tokens"),
    [
        ("batch 16", ("batch", 16)),
        ("  batch\t016 \n", ("batch", 16)),
        ("_ ... _private", ("_", "...", "_private")),
        ("*lead 0", ("*lead", 0)),
        ("in out", ("in", "out")),
        ("größe", ("größe",)),
        ("", ()),
        ((), ()),
        ((4, "batch", None, ..., "_", "16"), (4, "batch", "_", "...", "_", 16)),
        (["*lead", 2], ("*lead", 2)),
    ],
)
def test_a_spec_has_these_tokens(spec: Any, tokens: tuple[int | str, ...]) -> None:
    assert parse(spec) == ShapeSpec(tokens)


def test_an_integer_of_another_library_becomes_an_int() -> None:
    class Index:
        def __index__(self) -> int:
            return 7

    spec: Any = (Index(),)
    assert type(parse(spec).tokens[0]) is int


names = st.from_regex(r"[a-z_][a-z0-9_]{0,4}", fullmatch=True).filter(lambda name: name != "_")
single = st.integers(0, 1000) | names | st.just("_")
variadic = st.just("...") | names.map(lambda name: f"*{name}")


@st.composite
def token_tuples(draw: st.DrawFn) -> tuple[int | str, ...]:
    middle = draw(st.lists(variadic, max_size=1))
    return (*draw(st.lists(single, max_size=4)), *middle, *draw(st.lists(single, max_size=4)))


@given(tokens=token_tuples())
def test_the_text_of_a_spec_reads_back_as_the_spec(tokens: tuple[int | str, ...]) -> None:
    assert parse(str(ShapeSpec(tokens))) == parse(tokens) == ShapeSpec(tokens)


def test_a_spec_that_is_read_comes_back_as_it_is() -> None:
    spec = parse("batch 16")
    assert parse(spec) is spec


def test_the_names_of_a_spec_keep_their_star_and_stand_once() -> None:
    assert parse("n *lead 3 _ n").names == ("n", "*lead")


@pytest.mark.parametrize(
    ("spec", "place", "fix"),
    [
        ("batch, 16", "token 1 of 2 is 'batch,'", "write 'batch 16'"),
        ("batch,16", "token 1 of 1 is 'batch,16'", "write 'batch 16'"),
        ("(batch 16)", "token 1 of 2 is '(batch'", "write 'batch 16'"),
        ("batch 16)", "token 2 of 2 is '16)'", "write 'batch 16'"),
        ("[4]", "token 1 of 1 is '[4]'", "write '4'"),
        ("batch 1x6", "token 2 of 2 is '1x6'", "write 'batch 1 6'"),
        ("4×16×2", "token 1 of 1 is '4×16×2'", "write '4 16 2'"),
    ],
)
def test_punctuation_gets_the_spec_without_it(spec: str, place: str, fix: str) -> None:
    expected = f"Shape spec {spec!r}: {place}; {fix}, with spaces alone between tokens."
    assert spec_error(spec) == expected


@pytest.mark.parametrize("token", ["-1", "None", "?", "*"])
def test_a_foreign_any_size_gets_the_underscore(token: str) -> None:
    assert spec_error(f"{token} 16") == (f"Shape spec '{token} 16': token 1 of 2 is {token!r}; write `_` for any size.")


def test_minus_one_in_a_tuple_gets_the_underscore_too() -> None:
    expected = "Shape spec (4, -1): token 2 of 2 is -1; write `_` for any size."
    assert spec_error((4, -1)) == expected


@pytest.mark.parametrize("token", ["..", "…", "**", "*_"])
def test_a_foreign_ellipsis_gets_the_three_dots(token: str) -> None:
    assert spec_error(token).endswith("; write `...` for any number of dimensions.")


def test_a_size_given_in_the_spec_is_sent_to_dims() -> None:
    expected = "; write the name alone, and its size in dims=."
    assert spec_error("batch=4").endswith(expected)


@pytest.mark.parametrize("spec", ["2*n", "n+1", "4.0", "³", "٣", "*4", "...x", (4.0,), (True,), ((1,),)])
def test_any_other_token_gets_the_list_of_tokens(spec: Any) -> None:
    expected = "; a token is an integer, a name, `_`, `...` or `*name`."
    assert spec_error(spec).endswith(expected)


def test_a_line_of_tokens_inside_a_tuple_is_an_error() -> None:
    assert "token 1 of 1 is 'batch 16'; one token is one element" in spec_error(("batch 16",))


@pytest.mark.parametrize(("spec", "both"), [("... 3 ...", "'...' and '...'"), ("*a *b", "'*a' and '*b'")])
def test_two_tokens_of_any_length_are_an_error(spec: str, both: str) -> None:
    assert spec_error(spec) == (
        f"Shape spec {spec!r} has 2 tokens of any length, {both}; keep one, and write `_` for single dimensions."
    )


@pytest.mark.parametrize("spec", [None, 5, {"a": 1}, {4}, b"4"])
def test_any_other_value_is_no_spec(spec: Any) -> None:
    assert spec_error(spec) == (
        f"Shape spec {spec!r} is of type {type(spec).__name__}; write text such as 'batch 16', or a tuple."
    )


@given(spec=st.text("ab_*.,()-1x 4=", max_size=12))
def test_every_text_is_read_or_refused_with_a_sentence(spec: str) -> None:
    refusal = ""
    try:
        parse(spec)
    except ShapeSpecError as refused:
        refusal = str(refused)
    assert not refusal or (refusal.startswith(f"Shape spec {spec!r}") and refusal.endswith("."))


# --- matching -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("4 16", (4, 16)),
        ("0", (0,)),
        ("", ()),
        ("_ _", (3, 5)),
        ("_", ((1, 8),)),
        ("...", ()),
        ("... 16", (16,)),
        ("4 ... 16", (4, 1, 2, 3, 16)),
        ("*lead", ()),
        ("n n", (4, 4)),
        ("n n", ((1, 8), (1, 8))),
        ("*lead n", ((1, 8), 3)),
    ],
)
def test_a_shape_matches(spec: str, shape: Any) -> None:
    assert complaints(spec, shape) == []


def test_another_size_is_a_mismatch() -> None:
    assert complaints("4 16", (4, 2)) == ["fc1 output has shape (4, 2): dimension 1 is 2, expected 16"]


def test_all_that_differs_is_reported() -> None:
    assert len(complaints("1 2 n n", (4, 4, 5, 6))) == 3


def test_an_integer_never_equals_a_range() -> None:
    assert complaints("1", ((1, 8),)) == ["fc1 output has shape (1..8,): dimension 0 varies in 1..8, expected 1"]


@pytest.mark.parametrize(
    ("spec", "shape", "told"),
    [
        ("batch 16", (4,), '(4,): 1 dimension, but "batch 16" asks for 2'),
        ("batch", (4, 2), '(4, 2): 2 dimensions, but "batch" asks for 1'),
        ("", (4,), '(4,): 1 dimension, but "" asks for 0'),
        ("_ ... 16", (), '(): 0 dimensions, but "_ ... 16" asks for at least 2'),
    ],
)
def test_a_wrong_rank_is_the_only_mismatch(spec: str, shape: Any, told: str) -> None:
    assert complaints(spec, shape) == [f"fc1 output has shape {told}"]


def test_dimensions_behind_an_ellipsis_are_counted_from_the_front() -> None:
    [problem] = match("... 16", (1, 2, 3), Bindings(), "fc1 output")
    assert problem.dimension == 2


def test_a_name_is_the_same_everywhere() -> None:
    bindings = Bindings()
    match("batch 16", (8, 16), bindings, "fc1 output")
    [problem] = match("batch 2", (4, 2), bindings, "fc2 output")
    assert str(problem) == ("fc2 output has shape (4, 2): dimension 0 is 4, but batch is 8, bound by fc1 output")


def test_a_name_is_the_same_within_a_shape() -> None:
    assert complaints("n n", (4, 5)) == [
        "fc1 output has shape (4, 5): dimension 1 is 5, but n is 4, bound by its own dimension 0"
    ]


def test_a_name_that_dims_fixes_says_so() -> None:
    assert complaints("batch", (8,), {"batch": 4}) == [
        "fc1 output has shape (8,): dimension 0 is 8, but batch is 4, fixed by dims="
    ]


def test_a_range_equals_the_same_range_only() -> None:
    assert complaints("batch", ((1, 4),), {"batch": (1, 8)}) == [
        ("fc1 output has shape (1..4,): dimension 0 varies in 1..4, but batch is 1..8, fixed by dims=")
    ]


def test_a_range_read_from_json_is_a_range() -> None:
    shape: Any = [[1, 8], 16]
    assert complaints("batch 16", shape, {"batch": (1, 8)}) == []


def test_a_size_does_not_equal_a_range() -> None:
    assert complaints("batch", (4,), {"batch": (1, 8)}) == [
        "fc1 output has shape (4,): dimension 0 is 4, but batch is 1..8, fixed by dims="
    ]


def test_a_star_name_stands_for_all_its_dimensions() -> None:
    bindings = Bindings()
    match("*lead 16", (4, 7, 16), bindings, "fc1 output")
    [problem] = match("_ *lead", (1, 4, 8), bindings, "fc2 output")
    assert str(problem) == (
        "fc2 output has shape (1, 4, 8): *lead stands for (4, 8), but is (4, 7), bound by fc1 output"
    )


def test_a_name_with_a_star_is_another_name() -> None:
    bindings = Bindings()
    match("n *n", (1, 2, 3), bindings, "fc1 output")
    assert dict(bindings) == {"n": Bound(1, "fc1 output"), "*n": Bound((2, 3), "fc1 output")}


def test_a_shape_that_does_not_match_binds_nothing() -> None:
    bindings = Bindings()
    match("batch 16", (8, 2), bindings, "fc1 output")
    assert not bindings


def test_a_mismatch_has_its_facts() -> None:
    bindings = Bindings({"batch": 4})
    [problem] = match("_ batch", (1, (2, 8)), bindings, "fc1 output")
    facts = (problem.dimension, problem.actual, problem.expected, problem.token, problem.bound_by)
    assert facts == (1, "2..8", "4", "batch", "dims=")


def test_a_mismatch_with_an_integer_was_bound_by_nothing() -> None:
    [problem] = match("16", (2,), Bindings(), "fc1 output")
    assert problem.bound_by is None


sizes = st.integers(0, 3)
ranges = st.tuples(sizes, sizes).map(lambda ends: (ends[0], ends[0] + ends[1] + 1))


@given(tokens=token_tuples(), shape=st.lists(sizes | ranges, max_size=6).map(tuple))
def test_what_once_matched_matches_again(tokens: Any, shape: Any) -> None:
    bindings = Bindings()
    if not match(tokens, shape, bindings, "first"):
        assert set(bindings) == set(parse(tokens).names)
        assert match(tokens, shape, bindings, "second") == []


@given(tokens=token_tuples(), values=st.lists(sizes, min_size=6, max_size=6), data=st.data())
def test_a_shape_made_from_a_spec_matches_it(tokens: Any, values: Any, data: Any) -> None:
    shape: list[int] = []
    for token in tokens:
        if token == "..." or str(token).startswith("*"):
            shape += data.draw(st.lists(sizes, max_size=3))
        else:
            shape.append(token if isinstance(token, int) else values[len(str(token))])
    assert match(tokens, shape, Bindings(), "made") == []


# --- names fixed in advance ---------------------------------------------------------------------


def test_dims_fix_names() -> None:
    bindings = Bindings({"batch": 4, "seq": (1, 8), "*lead": (4, (1, 8))})
    assert {name: bound.value for name, bound in bindings.items()} == {
        "batch": 4,
        "seq": (1, 8),
        "*lead": (4, (1, 8)),
    }


def test_the_first_binding_stays() -> None:
    bindings = Bindings({"batch": 4})
    assert match("batch", (8,), bindings, "fc1 output")
    assert bindings["batch"] == Bound(4, "dims=")


def test_bindings_show_what_they_hold() -> None:
    assert repr(Bindings({"n": 1})) == "Bindings({'n': Bound(value=1, address='dims=')})"


@pytest.mark.parametrize("name", ["_", "...", "16", "a b", "", "None", 3, None])
def test_dims_take_names_only(name: Any) -> None:
    with pytest.raises(ShapeSpecError) as caught:
        Bindings({name: 4})
    assert str(caught.value) == f"dims= has the key {name!r}; write a name, 'batch' or '*batch'."


@pytest.mark.parametrize("value", [-1, 4.0, math.nan, "4", None, ..., True, (8, 1), (4, 4), (1,), (1, "x", 8)])
def test_dims_take_sizes_only(value: Any) -> None:
    with pytest.raises(ShapeSpecError) as caught:
        Bindings({"batch": value})
    assert str(caught.value) == (
        f"dims= gives batch the value {value!r}; write a size of 0 or more, (low, high) for a"
        " size that varies, or '*batch' for several dimensions."
    )


@pytest.mark.parametrize("value", [4, (4, -1), "44", None])
def test_dims_take_tuples_for_star_names(value: Any) -> None:
    with pytest.raises(ShapeSpecError) as caught:
        Bindings({"*lead": value})
    assert str(caught.value) == (f"dims= gives *lead the value {value!r}; write a tuple of sizes, such as (4, 16).")


def test_a_fixed_name_that_a_spec_uses_is_fine() -> None:
    Bindings({"batch": 4, "*lead": ()}).check_used([parse("batch 16"), parse("*lead")])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("bacth", "write 'batch'"),
        ("*batch", "write 'batch'"),
        ("z", "the names in use are: 'batch', '*lead'"),
    ],
)
def test_a_fixed_name_that_no_spec_uses_is_an_error(name: str, hint: str) -> None:
    dims: Any = {name: (1, 2)}
    with pytest.raises(ShapeSpecError) as caught:
        Bindings(dims).check_used([parse("batch 16"), parse("*lead batch")])
    assert str(caught.value) == f"dims= fixes {name!r}, which no spec uses; {hint}."


def test_a_name_that_a_layer_bound_need_not_be_used_again() -> None:
    bindings = Bindings()
    match("batch", (4,), bindings, "fc1 output")
    bindings.check_used([])


@pytest.mark.parametrize(
    ("shape", "text"),
    [((), "()"), ((4,), "(4,)"), ((4, 16), "(4, 16)"), (((1, 8), 2), "(1..8, 2)")],
)
def test_a_shape_is_written_as_a_tuple(shape: Any, text: str) -> None:
    assert shape_text(shape) == text
