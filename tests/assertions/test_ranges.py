"""Assertions on how large activations are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelprobe import (
    ModelProbe,
    NothingObservedError,
    Record,
    UsageError,
    assert_activation_range,
    assert_activation_scale,
    assert_fits_dtype,
    assert_not_saturated,
)

PROBE = ModelProbe()
X = PROBE.randn(64, 16)


class Functional(nn.Module):
    """Calls a function, which only `functionals=True` records."""

    def __init__(self, function: object, scale: float) -> None:
        super().__init__()
        self.fc, self.function, self.scale = nn.Linear(16, 16), function, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.fc(x) * self.scale)


def net(activation: nn.Module, scale: float = 1.0) -> nn.Module:
    model = PROBE.build(lambda: nn.Sequential(nn.Linear(16, 32), activation, nn.Linear(32, 8)))
    with torch.no_grad():
        model[0].weight.mul_(scale)
    return model


def record(model: nn.Module, x: torch.Tensor = X, **run: object) -> Record:
    return PROBE.run(model, x, **run)


# --- saturated ----------------------------------------------------------------------------------------------------


def test_a_saturated_call_is_named_though_another_call_is_not() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.act = nn.Linear(16, 16), nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(1000 * self.fc(self.act(self.fc(x))))

    with pytest.raises(AssertionError, match=r"^act \(call 2\) is saturated: .*; 1 of 1 layer looked at\n"):
        assert_not_saturated(record(PROBE.build(Twice)))


ACTIVATIONS = {
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "softmax": nn.Softmax(dim=-1),
    "hardtanh": nn.Hardtanh(),
    "hardsigmoid": nn.Hardsigmoid(),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_that_works_is_not_saturated(name: str) -> None:
    assert_not_saturated(record(net(ACTIVATIONS[name])))


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "softmax"])
def test_one_that_is_fed_too_much_is_named(name: str) -> None:
    with pytest.raises(
        AssertionError, match=r"^layer '1' \(\w+\) is saturated: its slope is [0-4]\.\d\d% of the maximum; 1"
    ):
        assert_not_saturated(record(net(ACTIVATIONS[name], scale=1000.0)))


@pytest.mark.parametrize("activation", [nn.Hardtanh(-2.0, 0.5), nn.ReLU6(), nn.Hardsigmoid()])
def test_one_that_is_at_either_bound_is_named(activation: nn.Module) -> None:
    with pytest.raises(AssertionError, match=r"^layer '1' \(\w+\) is saturated"):
        assert_not_saturated(record(net(activation, scale=1e6)))


def test_a_function_is_seen_where_it_is_recorded() -> None:
    model = PROBE.build(lambda: Functional(lambda x: F.softmax(x, dim=-1), scale=1000.0))
    with pytest.raises(AssertionError, match="is saturated"):
        assert_not_saturated(record(model, functionals=True))


@pytest.mark.parametrize(("name", "slope"), [("sigmoid", lambda y: 4 * y * (1 - y)), ("tanh", lambda y: 1 - y * y)])
def test_the_slope_is_that_of_the_function(name: str, slope: object) -> None:
    model = net(ACTIVATIONS[name], scale=5.0)
    exact = slope(model[:2](X).double()).mean().item()
    assert_not_saturated(record(model), min_slope=exact * 0.999)
    with pytest.raises(AssertionError):
        assert_not_saturated(record(model), min_slope=exact * 1.001)


def test_without_such_a_function_there_is_nothing_to_look_at() -> None:
    with pytest.raises(NothingObservedError, match="none of the selected layers is a sigmoid, tanh or softmax"):
        assert_not_saturated(record(nn.Linear(16, 2)))
    with pytest.raises(UsageError, match="from 0 to 1"):
        assert_not_saturated(record(net(nn.Tanh())), min_slope=5)


# --- range and scale ----------------------------------------------------------------------------------------------


def test_the_first_output_that_leaves_it_is_named() -> None:
    with pytest.raises(
        AssertionError, match=r"^layer '2' \(Linear\) output is outside \[0, 1\]: it ranges from -.*; 1 of 1 layer"
    ):
        assert_activation_range(record(net(nn.Sigmoid())), 0, 1, layers="2")


def test_the_first_layer_that_is_too_large_is_named_with_the_one_before_it() -> None:
    with pytest.raises(
        AssertionError, match=r"^layer '1' \(Identity\) output is too large: .*; layer '0' \(Identity\) output had 5"
    ):
        assert_activation_scale(record(Scaled(), layers=["0", "1", "2"]), high=100)


class Scaled(nn.Sequential):
    """Grows tenfold, then a hundredfold."""

    def __init__(self) -> None:
        super().__init__(nn.Identity(), nn.Identity(), nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x / x.square().mean().sqrt()
        return self[2](self[1](self[0](x * 5) * 100) / 500)


def test_one_that_is_too_small_is_named() -> None:
    with pytest.raises(
        AssertionError, match=r"^layer '0' \(Identity\) output is too small: its rms is 1e-05, not from 0.001 to 1,?000"
    ):
        assert_activation_scale(record(nn.Sequential(nn.Identity()), torch.full((4, 4), 1e-5)), low=1e-3, layers="0")


def test_numbers_that_are_not_finite_have_no_scale() -> None:
    x = X.clone()
    x[3] = torch.inf
    with pytest.raises(
        AssertionError, match=r"^layer '0' \(Identity\) output has no scale: 16 elements of 1,024 not finite"
    ):
        assert_activation_scale(record(nn.Sequential(nn.Identity()), x), layers="0")


def test_scales_that_models_have_on_purpose_pass() -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.zero = nn.Parameter(torch.full((16,), 1e-6)), nn.Linear(16, 16)
            nn.init.zeros_(self.zero.weight)
            nn.init.zeros_(self.zero.bias)
            self.branch = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.branch(x * self.scale) + self.zero(x)

    assert_activation_scale(record(Scaling()))


def test_a_dead_layer_is_too_small() -> None:
    model = net(nn.ReLU())
    nn.init.constant_(model[0].bias, -100.0)
    with pytest.raises(
        AssertionError, match=r"^layer '1' \(ReLU\) output is too small: its rms is 0, not from 1e-12 to 1,?000"
    ):
        assert_activation_scale(record(model))


def test_nothing_but_zeros_has_no_scale() -> None:
    with pytest.raises(NothingObservedError, match=r"every output of the 2 layers looked at is zero, .root. among"):
        assert_activation_scale(record(nn.Sequential(nn.ReLU()), torch.zeros(2, 2)))


def test_nothing_finite_is_in_no_range() -> None:
    with pytest.raises(
        AssertionError, match=r"^layer '0' \(Identity\) output is outside \[0, 1\]: no element is finite"
    ):
        assert_activation_range(record(nn.Sequential(nn.Identity()), torch.full((2, 2), torch.nan)), 0, 1, layers="0")


# --- dtypes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "fits"), [("float16", False), ("bfloat16", True)])
def test_a_large_output_overflows_where_the_dtype_ends(dtype: str, fits: bool) -> None:
    found = record(nn.Sequential(nn.Identity()), torch.full((4, 4), 40_000.0))
    if fits:
        assert_fits_dtype(found, dtype)
    else:
        with pytest.raises(
            AssertionError, match=r"^layer '0' \(Identity\) output overflows in float16: its output is up to 4e\+04,"
        ):
            assert_fits_dtype(found, dtype)


def test_room_to_spare_is_asked_for() -> None:
    found = record(nn.Identity(), torch.full((4, 4), 40_000.0))
    assert_fits_dtype(found, "float16", headroom=1.5)
    with pytest.raises(AssertionError, match="overflows"):
        assert_fits_dtype(found, "float16", headroom=1.7)


def test_gradients_that_vanish_are_named_as_gradients() -> None:
    found = record(nn.Linear(16, 4), loss=lambda out: 1e-9 * out.mean())
    with pytest.raises(AssertionError, match=r"underflows in float16: its gradient is rms"):
        assert_fits_dtype(found, "float16")


def test_the_limits_are_those_of_torch() -> None:
    from pytest_modelprobe.assertions.ranges import _LIMITS

    for name, (most, least) in _LIMITS.items():
        info = torch.finfo(getattr(torch, name))
        assert most == pytest.approx(info.max, rel=1e-4), name
        assert least == pytest.approx(info.smallest_normal, rel=1e-4), name


def test_an_unknown_dtype_names_those_there_are() -> None:
    with pytest.raises(UsageError, match="give one of float32, float16"):
        assert_fits_dtype(record(nn.Identity()), torch.int8)
