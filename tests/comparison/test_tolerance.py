"""How far two readings of one value are apart, and how far they may be."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_modelprobe import statistics
from pytest_modelprobe.comparison.tolerance import (
    CAME,
    GONE,
    NOISE_FACTOR,
    UNKNOWN,
    Direction,
    Precision,
    ValueChange,
    allows_more,
    change,
    epsilon,
    largest_gradient,
)
from pytest_modelprobe.record import Layer, Parameter, Reading, Record, Statistics


def reading(*numbers: float, noise: float | None = None, **counts: int) -> Reading:
    """Return the reading of at most 16 numbers: their own fingerprint, of which the norm is exact."""
    mean = sum(numbers) / len(numbers)
    moments = Statistics(
        count=len(numbers) + sum(counts.values()),
        mean=mean,
        deviations=sum((x - mean) ** 2 for x in numbers),
        zeros=numbers.count(0),
        min=min(numbers),
        max=max(numbers),
        **counts,
    )
    return Reading(statistics=moments, fingerprint=(*numbers, *[0.0] * (16 - len(numbers))), noise=noise)


def integers(digest: str, *numbers: float, count: int = 100, noise: float | None = None) -> Reading:
    prints = (*numbers, *[0.0] * (16 - len(numbers))) if numbers else None
    return Reading(statistics=Statistics(count=count), fingerprint=prints, digest=digest, noise=noise)


# --- how far ------------------------------------------------------------------------------------------------------


def test_a_change_is_relative_to_the_expected_norm() -> None:
    assert change(reading(3.0, 5.0), reading(3.0, 4.0)).change == pytest.approx(1 / 5)


def test_numbers_in_another_order_changed_though_their_moments_did_not() -> None:
    assert change(reading(4.0, 3.0), reading(3.0, 4.0)).differs


def test_something_where_nothing_was_is_an_infinite_change() -> None:
    assert change(reading(1.0), reading(0.0)).change == math.inf


def test_nothing_where_something_was_is_a_change_of_all() -> None:
    assert change(reading(0.0), reading(1.0)).change == 1.0


def test_nothing_where_nothing_was_did_not_change() -> None:
    assert change(reading(0.0, 0.0), reading(0.0, 0.0)).change == 0.0


@settings(deadline=None)
@given(st.floats(1e-4, 1e4), st.floats(-0.5, 0.5))
def test_a_scaled_tensor_changed_by_its_factor(size: float, by: float) -> None:
    old, new = reading(size, -2 * size, size), reading(*((1 + by) * x for x in (size, -2 * size, size)))
    assert change(new, old).change == pytest.approx(abs(by), rel=1e-6, abs=1e-9)


# --- not finite ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nan", "posinf", "neginf"])
def test_a_number_that_is_not_finite_any_more_is_an_infinite_change(kind: str) -> None:
    assert change(reading(1.0, 2.0, **{kind: 1}), reading(1.0, 2.0)).change == math.inf


def test_nan_equals_nan() -> None:
    assert not change(reading(1.0, nan=3), reading(1.0, nan=3)).differs


def test_nan_at_another_place_differs() -> None:
    old, new = (statistics_of(torch.tensor(x)) for x in ([math.nan, 1.0, 2.0], [1.0, math.nan, 2.0]))
    assert change(new, old).differs
    assert not change(old, old).differs


def statistics_of(tensor: torch.Tensor) -> Reading:
    return statistics.collect([statistics.reduce(tensor)])[0]


def test_no_tolerance_makes_nan_the_same_as_a_number() -> None:
    assert change(reading(1.0, nan=1), reading(1.0, 1.0), times=1e9).differs


# --- how far it may be --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("direction", "precision", "floor"),
    [
        ("forward", "measured", 2e-6),
        ("backward", "measured", 2e-6),
        ("state", "measured", 3e-6),
        ("forward", "unmeasured", 1e-4),
        ("backward", "unmeasured", 2e-2),
        ("state", "unmeasured", 3e-6),
    ],
)
def test_a_value_may_always_change_by_the_floor_of_its_direction(
    direction: Direction, precision: Precision, floor: float
) -> None:
    below, above = (
        change(reading(1.0 + x), reading(1.0), direction=direction, precision=precision)
        for x in (0.9 * floor, 1.1 * floor)
    )
    assert (below.differs, above.differs, above.limit) == (False, True, floor)


def test_a_value_of_the_same_machine_may_change_by_its_noise_alone() -> None:
    quiet, noisy = reading(1.0), reading(1.0, noise=1e-7)
    assert change(reading(1.0 + 1e-9), quiet, precision="exact").differs
    assert change(reading(1.0 + 1e-9), quiet, dtype="bfloat16", precision="exact").differs
    assert not change(reading(1.0 + 1e-7), noisy, precision="exact").differs
    assert change(reading(1.0 + 1e-6), noisy, precision="exact").differs


@pytest.mark.parametrize(("dtype", "limit"), [("float16", 9.8e-4 / 4), ("bfloat16", 7.8e-3 / 4), ("int8", 2e-6)])
def test_narrow_dtypes_have_higher_floors(dtype: str, limit: float) -> None:
    assert change(reading(1.0), reading(1.0), dtype=dtype, precision="measured").limit == limit


def test_a_value_may_change_by_a_multiple_of_its_noise() -> None:
    found = change(reading(1.0003), reading(1.0, noise=1e-4), precision="measured")
    assert (found.limit, found.noise, found.differs) == (2e-6 + NOISE_FACTOR * 1e-4, 1e-4, False)


@pytest.mark.parametrize(("direction", "most"), [("forward", 1e-2), ("backward", 2e-2), ("state", 1e-2)])
@pytest.mark.parametrize("noise", [0.9, 1e9, math.inf])
def test_noise_allows_a_hundredth_at_most_whatever_a_file_says(direction: Direction, most: float, noise: float) -> None:
    below, above = (
        change(reading(x), reading(1.0, noise=noise), direction=direction, precision="measured")
        for x in (1 + 0.9 * most, 1 + 1.1 * most)
    )
    assert (below.differs, above.differs, above.limit) == (False, True, most)


def test_where_numbers_are_rounded_coarsely_noise_allows_four_roundings() -> None:
    expected = reading(1.0, noise=0.9)
    assert change(reading(1.03), expected, precision="measured").differs
    assert not change(reading(1.03), expected, precision="measured", rounding=epsilon("bfloat16")).differs
    assert change(reading(1.04), expected, precision="measured", rounding=epsilon("bfloat16")).differs


@given(st.floats(0, 1e300), st.floats(1e-3, 1.0))
def test_no_noise_makes_a_number_the_same_as_nothing(noise: float, scale: float) -> None:
    assert change(reading(0.0), reading(1.0, noise=noise), scale=lambda: scale, precision="measured").differs


def test_what_is_zero_in_exact_arithmetic_may_be_all_noise() -> None:
    expected = reading(2e-5, noise=2.0)
    assert not change(reading(-1e-5), expected, scale=lambda: 1.0, precision="measured").differs
    assert change(reading(1e-4), expected, scale=lambda: 1.0, precision="measured").differs


def test_a_gradient_that_is_rounding_equals_other_rounding() -> None:
    expected = reading(1e-7, noise=1.4)
    found = change(reading(-3e-6), expected, direction="backward", scale=lambda: 1.0, precision="measured")
    assert (found.known, found.differs) == (True, False)


def test_a_gradient_of_size_where_there_was_rounding_differs() -> None:
    expected = reading(1e-7, noise=1.4)
    assert change(reading(0.1), expected, direction="backward", scale=lambda: 1.0, precision="measured").differs


def test_a_gradient_that_repeats_is_compared_however_small_it_is() -> None:
    expected = reading(1e-7, noise=1e-5)
    assert change(reading(1.1e-7), expected, direction="backward", scale=lambda: 1.0, precision="measured").differs


def test_where_no_gradient_repeats_all_are_rounding() -> None:
    expected = reading(1e-7, noise=1.4)
    assert not change(
        reading(-3e-6), expected, direction="backward", scale=lambda: math.inf, precision="measured"
    ).differs
    assert change(reading(1.0), expected, direction="backward", scale=lambda: math.inf, precision="measured").differs


def test_a_gradient_of_a_small_value_is_judged_by_what_scaling_the_value_does_to_the_loss() -> None:
    head = Parameter(name="weight", shape=(1,), dtype="float32", device="cpu", reading=reading(100.0))
    head = dataclasses.replace(head, gradient=reading(0.02, noise=1e-6))
    tiny = dataclasses.replace(head, reading=reading(0.005), gradient=reading(1e-3, noise=8.0))
    layers = {name: Layer(name=name, type="Linear", parameters=(p,)) for name, p in (("head", head), ("tiny", tiny))}
    largest = largest_gradient(Record(model="Net", layers=layers))
    small, large = (functools.partial(largest.beside, reading(of)) for of in (0.005, 100.0))
    rounding, other = reading(1e-3, noise=8.0), reading(-9e-4)
    assert not change(other, rounding, direction="backward", scale=small, precision="measured").differs
    assert change(other, rounding, direction="backward", scale=large, precision="measured").differs


def test_noise_that_is_not_a_number_allows_nothing() -> None:
    assert change(reading(1.0), reading(1.0, noise=math.nan), precision="measured").limit == 2e-6


def test_noise_adds_to_the_precision_of_the_fingerprints() -> None:
    assert change(reading(1.0), reading(1.0, noise=1e-6), precision="measured").limit == pytest.approx(6e-6)


def test_the_user_s_tolerance_multiplies_what_a_value_may_change() -> None:
    assert change(reading(1.0), reading(1.0, noise=1e-4), precision="measured", times=10).limit == pytest.approx(
        4.02e-3
    )


# --- zero in exact arithmetic -------------------------------------------------------------------------------------


def test_a_tiny_value_where_nothing_was_is_judged_against_the_scale() -> None:
    assert not change(reading(1e-12), reading(0.0), scale=lambda: 1.0, precision="measured").differs


def test_a_value_of_size_where_nothing_was_differs_whatever_the_scale() -> None:
    found = change(reading(1e-3), reading(0.0), scale=lambda: 1.0, precision="measured")
    assert (found.change, found.differs) == (pytest.approx(100.0), True)


def test_the_scale_is_not_asked_for_where_nothing_differs() -> None:
    def scale() -> float:
        raise AssertionError

    assert not change(reading(1.0), reading(1.0), scale=scale).differs


# --- integers -----------------------------------------------------------------------------------------------------


def test_the_change_of_integers_is_the_share_that_differs() -> None:
    assert change(integers("aa", 6.0), integers("bb", 2.0)).change == 4.0**2 / (2 * 100)


def test_at_least_one_integer_differs_where_the_digests_do() -> None:
    found = change(integers("aa", 1.0), integers("bb", 1.0))
    assert (found.change, found.differs) == (1 / 100, True)


def test_all_integers_differ_as_far_as_can_be_known_without_a_fingerprint() -> None:
    assert change(integers("aa"), integers("bb")).change == 1.0


def test_integers_may_not_change_at_all_where_they_do_not_by_themselves() -> None:
    assert change(integers("aa", 1.0), integers("bb", 1.0), times=1000).differs


def test_integers_that_tip_over_by_themselves_may_change_by_a_multiple_of_that() -> None:
    found = change(integers("aa", 1.0, count=1000), integers("bb", 1.0, count=1000, noise=0.001))
    assert (found.change, found.limit, found.differs) == (0.001, NOISE_FACTOR * 0.001, False)


def test_real_integers_differ_by_about_their_share() -> None:
    old = torch.arange(10_000)
    new = old.clone()
    new[:1000] += 1
    found = change(statistics_of(new), statistics_of(old))
    assert found.change == pytest.approx(0.1, rel=0.5)


# --- without numbers ----------------------------------------------------------------------------------------------


def test_without_numbers_nothing_can_be_told() -> None:
    found = change(Reading(reason="a meta tensor"), Reading(reason="a meta tensor"))
    assert (found, found.known, found.differs) == (UNKNOWN, False, False)


def test_of_weights_that_changed_after_the_forward_nothing_can_be_told() -> None:
    changed = Reading(reason="it changed after the forward")
    assert change(changed, reading(1.0), direction="state") == UNKNOWN
    assert change(changed, reading(1.0), direction="forward") == GONE


def test_of_numbers_the_noise_below_the_floor_is_no_more_noise_but_integers_have_no_floor() -> None:
    allows = functools.partial(allows_more, direction="forward", dtype="float32", precision="measured")
    assert not allows(reading(1.0, noise=1e-7), reading(1.0, noise=0.0))
    assert allows(integers("aa", noise=1e-7), integers("aa", noise=0.0))


def test_what_one_side_alone_has_differs() -> None:
    assert (change(reading(1.0), Reading()), change(Reading(), reading(1.0))) == (CAME, GONE)


@pytest.mark.parametrize("lacking", ["fingerprint", "digest"])
def test_what_says_the_most_of_a_value_is_not_left_out(lacking: str) -> None:
    whole = dataclasses.replace(reading(1.0), digest="aa")
    less = dataclasses.replace(whole, **{lacking: None})
    assert change(less, whole, times=100).differs
    assert change(whole, less, times=100).differs


def test_responses_without_moments_are_compared_by_their_fingerprints() -> None:
    old, new = (dataclasses.replace(reading(x), statistics=None) for x in (2.0, 2.5))
    assert change(new, old).change == 0.25


def moments(**fields: float) -> Reading:
    return Reading(statistics=Statistics(count=4, **{"mean": 1.0, **fields}))


@pytest.mark.parametrize(
    ("actual", "far"),
    [({}, 0.0), ({"mean": 1.5}, 0.5), ({"deviations": 1.0}, 0.5), ({"nan": 1}, math.inf), ({"mean": None}, math.inf)],
)
def test_without_fingerprints_moments_are_compared(actual: dict[str, float], far: float) -> None:
    assert change(moments(**actual), moments()).change == far


def test_moments_where_all_was_zero_are_an_infinite_change() -> None:
    assert change(moments(), moments(mean=0.0)).change == math.inf
    assert change(moments(mean=0.0), moments(mean=0.0)).change == 0.0


def test_moments_as_printed_in_a_file_are_the_same() -> None:
    assert not change(moments(mean=1.00001), moments(), precision="measured").differs


# --- in units of what is allowed ----------------------------------------------------------------------------------


def test_elements_that_are_all_equal_are_known_without_a_fingerprint_of_the_same_signs() -> None:
    zeros = Reading(statistics=Statistics(count=4, zeros=4, mean=0.0, min=0.0, max=0.0), fingerprint=(0.0,) * 16)
    assert change(zeros, zeros, same_signs=False).same


def test_units_are_multiples_of_the_limit() -> None:
    assert ValueChange(0.3, limit=0.1).units == pytest.approx(3)


def test_a_change_where_none_is_allowed_is_infinitely_many_units() -> None:
    assert ValueChange(0.3).units == math.inf


def test_of_readings_with_other_signs_all_but_fingerprints_is_compared() -> None:
    numbers = Statistics(count=4, mean=0.5, deviations=4.0, min=-1.0, max=1.5)
    one, other = (Reading(statistics=numbers, fingerprint=(x,) * 16) for x in (0.5, -0.25))
    assert change(other, one).differs
    assert change(other, one, same_signs=False) == UNKNOWN  # as of the same elements in another order
    moved = dataclasses.replace(other, statistics=dataclasses.replace(numbers, mean=0.75))
    assert change(moved, one, same_signs=False).change == pytest.approx(0.25 / math.sqrt(5 / 4))
    ids = Reading(statistics=Statistics(count=4, mean=1.5, deviations=5.0, min=0, max=3), digest="0a")
    drawn = dataclasses.replace(ids, digest="0b")
    assert change(drawn, ids).differs
    assert change(drawn, ids, same_signs=False) == UNKNOWN
    assert change(dataclasses.replace(ids, digest=None), ids, same_signs=False) == GONE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
def test_an_expanded_tensor_is_compared_with_one_that_is_not_by_all_but_its_fingerprint(dtype: torch.dtype) -> None:
    one, expanded = statistics.collect([statistics.reduce(torch.ones(4, 4, dtype=dtype))] * 2)
    expanded = dataclasses.replace(expanded, fingerprint=None, digest=None, reason="expanded to very many elements")
    assert change(expanded, one).same
    assert change(one, expanded).same
    (zeros,) = statistics.collect([statistics.reduce(torch.zeros(4, 4, dtype=dtype))])
    assert change(expanded, zeros).differs
    assert change(zeros, expanded).differs
