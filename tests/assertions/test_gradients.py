"""Gradients that are not finite, missing, or fading: found where they begin, and nowhere else."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelprobe import (
    HintWarning,
    ModelProbe,
    NothingObservedError,
    Record,
    SelectionError,
    UsageError,
    Watch,
    assert_all_params_have_grad,
    assert_grad_finite,
    assert_grad_flow,
    assert_no_dead_layers,
    assert_params_updated,
    assert_update_ratio,
)
from pytest_modelprobe.models import seeded

X = torch.linspace(-1, 1, 24).reshape(4, 6)
ASSERTIONS = [assert_grad_finite, assert_all_params_have_grad, assert_grad_flow]


def failure_of(assertion: Callable[..., None], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(AssertionError) as failure:
        assertion(*args, **kwargs)
    return str(failure.value)


def run(model: nn.Module, *args: torch.Tensor, loss: Any = "random", **kwargs: Any) -> Record:
    return ModelProbe().run(model, *(args or (X,)), loss=loss, **kwargs)


def linear(inputs: int = 6, outputs: int = 6, *, weight: float | None = None) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs)
    if weight is not None:
        with torch.no_grad():
            layer.weight.fill_(weight)
            layer.bias.zero_()
    return layer


class Net(nn.Module):
    """A model from layers and parameters by name and a forward as a function of it."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, *args, **kwargs)


class Zero(nn.Module):
    """Gives zero, whose square root has no derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0 * self.weight


class Sqrt(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(x) * 0


# --- finite -------------------------------------------------------------------------------------------------------


def test_a_layer_with_a_bad_derivative_is_named_by_its_input() -> None:
    line = inspect.getsourcelines(Sqrt.forward)[1] + 1
    model = Net(lambda m, x: m.tail(m.sqrt(m.zero(x))), zero=Zero(), sqrt=Sqrt(), tail=linear())
    assert failure_of(assert_grad_finite, run(model)) == (
        "gradient of sqrt input is not finite: 24 NaN of 24 elements, made in the backward of sqrt; "
        "2 of 4 layers looked at\n"
        "\n"
        "gradient of   type   min   max   not finite\n"
        "sqrt input    Sqrt     -     -   24 NaN of 24 elements\n"
        "zero output   Zero     -     -   24 NaN of 24 elements\n"
        "zero.weight   Zero     -     -   6 NaN of 6 elements\n"
        "\n"
        f"It began in SqrtBackward0 at test_gradients.py:{line}, which made NaN of a finite gradient.\n"
        "\n"
        "Look there for sqrt or norm at 0, log at 0, a division by 0, or torch.where around one of them."
    )


def test_glue_between_layers_is_named_by_its_neighbors() -> None:
    model = Net(lambda m, x: m.tail(torch.sqrt(m.zero(x)) * 0), zero=Zero(), tail=linear())
    assert failure_of(assert_grad_finite, run(model)).startswith(
        "gradient of zero output is not finite: 24 NaN of 24 elements, made between zero and tail; "
        "1 of 3 layers looked at\n"
    )


def test_the_loss_is_blamed_where_all_gradients_are_bad() -> None:
    record = run(nn.Sequential(linear(), linear()), loss=lambda out: (out * 0).sqrt().sum())
    text = failure_of(assert_grad_finite, record)
    assert text.startswith("gradient of (root) output is not finite: 24 NaN of 24 elements, made by the loss; 3 of 3")


def test_a_gradient_that_is_bad_in_a_parameter_alone_is_named() -> None:
    scaled = Net(lambda m, x: x + torch.sqrt(m.scale), scale=nn.Parameter(torch.zeros(())))
    model = Net(lambda m, x: m.scaled(m.fc(x)), fc=linear(), scaled=scaled)
    text = failure_of(assert_grad_finite, run(model))
    assert text.startswith("gradient of scaled.scale is not finite: 1 ")
    assert "inf of 1 element, those around it are finite; 1 of 3 layers looked at\n" in text


def test_of_several_forwards_the_first_bad_one_decides() -> None:
    model = Net(lambda m, x, s: m.tail(torch.sqrt(m.fc(x) * 0 + 1 - s)), fc=linear(), tail=linear())
    with Watch(model) as watch:
        for scale, last in ((0.0, 1.0), (1.0, 1.0), (0.0, math.nan)):
            (model(X, torch.tensor(scale)) * last).sum().backward()
    text = failure_of(assert_grad_finite, watch)
    assert text.startswith("gradient of fc output is not finite from forward 2 of 3 on: ")
    assert "made between fc and tail;" in text


def test_layers_that_no_gradient_reached_are_an_error() -> None:
    model = Net(lambda m, x: m.b(m.a(x).detach()), a=linear(), b=linear())
    with pytest.raises(NothingObservedError, match="no gradient reached a nor any other of the 1 layer looked at"):
        assert_grad_finite(run(model), layers="a")


def test_an_activation_that_is_not_finite_is_reported_first() -> None:
    text = failure_of(assert_grad_finite, run(Net(lambda m, x: m.o(m.a(x).log()), a=linear(), o=linear())))
    assert text.endswith(
        "\n\nActivations are already not finite, from o's input on: assert_finite names where that began."
    )


# --- presence -----------------------------------------------------------------------------------------------------


def test_a_zero_gradient_is_one() -> None:
    assert_all_params_have_grad(run(linear(), loss=lambda out: (out * 0).sum()))


def test_a_layer_that_is_never_called_is_named() -> None:
    text = failure_of(assert_all_params_have_grad, run(Net(lambda m, x: m.a(x), a=linear(), spare=linear(6, 3))))
    assert text == (
        "spare.weight has no gradient; 2 of 4 parameters looked at have none\n"
        "\n"
        "parameter      layer type   shape    layer called\n"
        "spare.weight   Linear       (3, 6)   never\n"
        "spare.bias     Linear       (3,)     never\n"
        "\n"
        "spare was never called in the forward: should it be used, or removed?"
    )


def test_frozen_parameters_need_none() -> None:
    model = Net(lambda m, x: m.b(m.a(x)), a=linear().requires_grad_(False), b=linear())
    assert_all_params_have_grad(run(model))


def token() -> nn.Module:
    """Return a layer with a parameter that its forward does not use."""
    return Net(lambda m, x: m.fc(x), mask_token=nn.Parameter(torch.zeros(6)), fc=linear())


def test_parameters_can_be_ignored() -> None:
    record = run(nn.Sequential(token()))
    assert_all_params_have_grad(record, ignore="*.mask_token")
    assert_all_params_have_grad(record, ignore=["**.mask_token"])
    text = failure_of(assert_all_params_have_grad, record)
    assert text.startswith("0.mask_token has no gradient; 1 of 3 parameters looked at have none\n")
    assert text.endswith(
        "The output of layer '0' (Net) has a gradient: does its forward use 0.mask_token, and not a detached copy?"
    )


def test_a_glob_of_one_segment_too_few_is_told_what_would_match() -> None:
    model = nn.Sequential(linear(), nn.Sequential(linear()))
    more = "ignore='**.bias' matches 1.0.bias: * is one segment of a name, ** any number of them."
    with pytest.raises(AssertionError, match=f"(?s)^1.0.bias changed by .*{re.escape(more)}$"):
        assert_update_ratio(steps(model, 1, rate=0.1), low=1e-9, high=1e-2, ignore=["**.weight", "*.bias"])
    with pytest.raises(SelectionError) as error:
        assert_update_ratio(steps(model[1:], 1), ignore="*.bias")
    assert str(error.value) == f"ignore='*.bias' matches none of 2 parameters; {more}"


def test_nothing_that_requires_a_gradient_is_an_error() -> None:
    model = Net(lambda m, x: m.b(m.a(x)), a=linear().requires_grad_(False), b=linear())
    with pytest.raises(NothingObservedError, match="no parameter of the selected layers requires a gradient"):
        assert_all_params_have_grad(run(model), layers="a")


def hint_of(model: nn.Module, **kwargs: Any) -> str:
    return failure_of(assert_all_params_have_grad, run(model, **kwargs)).rpartition("\n\n")[2]


CUT = "look for .detach(), .data, .item() or no_grad there."


def test_a_cut_in_the_graph_is_placed() -> None:
    model = Net(lambda m, x: m.b(torch.exp(m.a(x)).detach()), a=linear(), b=linear())
    assert hint_of(model) == f"The graph is cut between a and b: {CUT}"


def test_a_cut_at_the_end_of_a_container_is_placed_after_its_last_layer() -> None:
    block = Net(lambda m, x: m.a(x).detach() * 2, a=linear())
    assert hint_of(nn.Sequential(block, linear())) == (
        "The graph is cut after 0.a in layer '0' (Net)'s forward: look for .detach() or .data there."
    )


def test_no_grad_is_named_by_the_first_layer_that_ran_under_it() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model.a(x)
        with torch.no_grad():
            y = model.b(y)
        return model.c(y)

    assert hint_of(Net(forward, a=linear(), b=linear(), c=linear())) == "b ran under no_grad."


@pytest.mark.parametrize(
    ("forward", "unused"),
    [
        (lambda m, x, _: m.b(x) + m.a(x).detach(), "a"),
        (lambda m, x, mask: (m.a(x), m.b(mask))[1], "a"),
        (lambda m, x, _: (m.a(x), m.b(m.a(x).detach()).detach())[0], "b"),
    ],
    ids=["beside the path", "given to another layer", "its own input detached"],
)
def test_what_the_loss_does_not_depend_on_is_not_said_to_be_cut_off(forward: Callable[..., Any], unused: str) -> None:
    record = run(Net(forward, a=linear(), b=linear()), X, torch.ones(4, 6))
    assert failure_of(assert_all_params_have_grad, record).endswith(
        f"The loss does not depend on the output of {unused}: is its result used, and is it the right loss?"
    )


# --- flow ---------------------------------------------------------------------------------------------------------


def sigmoids(n: int) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(n) for layer in (linear(), nn.Sigmoid())), linear())


def test_a_gradient_that_fades_on_the_way_is_named_with_all_others() -> None:
    text = failure_of(assert_grad_flow, run(sigmoids(12)))
    first, table, hint = text.split("\n\n")
    assert first.startswith("layer '0' (Linear) gets a gradient ")
    assert " times smaller than layer '24' (Linear), 1e+06 is allowed; " in first
    assert first.endswith(" of 13 layers looked at")
    assert len(table.splitlines()) == 14
    assert hint.startswith("Vanishing or exploding gradients: look at activations")


def scaled(n: int, by: float) -> nn.Module:
    model = nn.Sequential(*(linear(weight=0.0) for _ in range(n)))
    for layer in model:
        nn.init.eye_(layer.weight)
        layer.weight.data.mul_(by)
    return model


def test_gradients_of_activations_that_explode_where_those_of_weights_are_alike_are_named() -> None:
    first, table, hint = failure_of(assert_grad_flow, run(scaled(8, 16.0))).split("\n\n")
    assert first == (
        "layer '0' (Linear) gets a gradient of its output 2.684e+08 times larger than (root), 1e+08 is allowed; "
        "1 of 9 layers looked at"
    )
    assert table.splitlines()[0].split() == ["layer", "type", "gradient", "norm", "times", "larger", "output", "rms"]
    assert hint.startswith("Exploding gradients: look at the initialization")


def test_growth_within_the_ratio_passes() -> None:
    assert_grad_flow(run(scaled(8, 4.0)))
    assert "larger than (root), 1000 is allowed" in failure_of(assert_grad_flow, run(scaled(8, 4.0)), max_ratio=10)


def branch(factor: float) -> nn.Module:
    return Net(lambda m, x: m.head(m.stem(x) + factor * m.branch(x)), stem=linear(), branch=linear(), head=linear())


def zeroed_stem() -> nn.Linear:
    stem = linear()
    nn.init.zeros_(stem.bias)
    return stem


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "a norm over a row of zeros": lambda: Net(
        lambda m, x: m.head(m.norm(m.stem(torch.cat([x, 0 * x[:1]])))),
        stem=zeroed_stem(),
        norm=nn.LayerNorm(6, eps=1e-12),
        head=linear(),
    ),
    "a loss given out": lambda: Net(lambda m, x: 1e-12 * m.b(m.a(x)).sum(), a=linear(), b=linear()),
    "a small gradient that others pass by": lambda: branch(1e-8),
    "an expert without tokens": lambda: Net(lambda m, x: m.a(x) + m.b(x[:0]).sum(), a=linear(), b=linear()),
    "a parameter that was not needed": lambda: nn.Sequential(token(), linear()),
}


@pytest.mark.parametrize("make", HEALTHY.values(), ids=HEALTHY)
def test_gradients_that_healthy_models_have_pass(make: Callable[[], nn.Module]) -> None:
    assert_grad_flow(run(make(), loss=lambda out: out.sum()))


def test_beyond_the_square_of_the_ratio_a_single_small_one_is_named() -> None:
    assert failure_of(assert_grad_flow, run(branch(1e-16))).startswith("branch gets a gradient ")


def test_no_gradient_comes_first_and_the_cut_is_placed() -> None:
    model = Net(lambda m, x: m.b(m.a(x).detach()), a=linear(), b=linear())
    text = failure_of(assert_grad_flow, run(model))
    assert text.startswith("a gets no gradient; 1 of 2 layers looked at\n\n")
    assert text.endswith(f"The graph is cut between a and b: {CUT}")


def test_a_zero_gradient_is_named_nearest_to_the_loss() -> None:
    model = Net(lambda m, x: m.c(x) + m.b(m.a(x)) * 0, a=linear(), b=linear(), c=linear())
    text = failure_of(assert_grad_flow, run(model))
    assert text.startswith("b gets a zero gradient; 2 of 3 layers looked at\n")
    assert text.endswith(
        "The layers after b do not depend on it, or have a zero derivative there: dead, saturated, zero-initialized, "
        "times zero."
    )


class Modulated(nn.Module):
    """A block whose scale and gate are computed of a condition by a projection that is zero at first: AdaLN-Zero."""

    def __init__(self, *, scale: float = 1.0) -> None:
        super().__init__()
        self.condition, self.fc, self.head = linear(), linear(), linear()
        self.modulation = linear(outputs=12, weight=0.0)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, gate = self.modulation(F.silu(self.condition(x) * self.scale)).chunk(2, -1)
        return self.head(x + gate * self.fc(x * (1 + scale)))


def test_zero_gradients_behind_zero_initialized_projections_are_a_hint() -> None:
    with ModelProbe() as probe:
        model = Modulated()
        record = probe.run(model, X, loss="random")
        for assertion in (assert_grad_flow, assert_no_dead_layers):
            with pytest.warns(HintWarning, match=r"because of what is zero-initialized: modulation\."):
                assertion(record)
        model = Modulated(scale=0.0)
        record = probe.run(model, X, loss="random")
        with pytest.raises(AssertionError, match=r"^condition gets a zero gradient; 1 of 4 layers"):
            assert_grad_flow(record)
        with pytest.raises(AssertionError, match=r"^modulation input is dead: "):
            assert_no_dead_layers(record)


def gains() -> nn.Module:
    """The gains of an embedding and the output are zero at first, as in KarrasUnet of denoising-diffusion-pytorch."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.body(x)
        return model.gain_out * model.out(x * (1 + model.gain_emb * model.emb(x)))

    zeros = {name: nn.Parameter(torch.zeros(())) for name in ("gain_emb", "gain_out")}
    return Net(forward, body=linear(), emb=linear(), out=linear(), **zeros)


def steps(model: nn.Module, number: int, parameters: Any = None, rate: float = 1e-4, **options: Any) -> Watch:
    watch = ModelProbe().watch(model, **options)
    optimizer = torch.optim.SGD(parameters or model.parameters(), rate)
    for _ in range(number):
        optimizer.zero_grad()
        (watch.model(X) - 0.5).square().mean().backward()
        optimizer.step()
    return watch


@pytest.mark.parametrize("assertion", [assert_grad_flow, assert_params_updated, assert_update_ratio])
@pytest.mark.parametrize("number", [1, 3])
def test_what_passes_through_gains_that_were_zero_at_first_is_a_hint(
    number: int, assertion: Callable[..., None]
) -> None:
    with pytest.warns(HintWarning) as said:
        assertion(steps(gains(), number))
    assert [str(one.message).rpartition("A hint, ")[2] for one in said] == [
        "because of what is zero-initialized: (root). Other layers get a gradient after its first step."
    ]


def test_a_gradient_that_vanishes_behind_what_was_zero_at_first_is_no_hint() -> None:
    def small(m: Net, x: torch.Tensor) -> torch.Tensor:
        return m.head(m.b(m.a(x) * 1e-12))

    with pytest.raises(
        AssertionError, match=r"^a gets a gradient .* times smaller than head, 1e\+06 is allowed; 1 of 3"
    ):
        assert_grad_flow(steps(Net(small, a=linear(), b=linear(), head=linear(weight=0.0)), 3, rate=0.1))


def test_a_layer_that_a_zero_head_hides_in_the_first_step_alone_is_dead_after_it() -> None:
    model = Net(lambda m, x: m.head(m.b(m.a(x) * 0.0)), a=linear(), b=linear(), head=linear(weight=0.0))
    watch = steps(model, 3, rate=0.1)
    with pytest.raises(AssertionError, match=r"^a gets a zero gradient; 1 of 3 layers looked at"):
        assert_grad_flow(watch)
    with pytest.raises(
        AssertionError, match=r"(?s)^a.weight was not updated; 3 of 6 .*\n\nIts gradient is all zero: [^.]*.$"
    ):
        assert_params_updated(watch)


def test_one_parameter_without_a_gradient_in_a_layer_that_has_others_is_a_hint() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.r = nn.Parameter(torch.ones(2, 6)), nn.Parameter(torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.r.detach()) @ self.weight.T

    with pytest.warns(HintWarning) as said:
        assert_grad_flow(run(nn.Sequential(linear(), nn.Tanh(), Scaled())))
    assert [str(one.message).split("\n\n") for one in said] == [
        [
            "2.r has no gradient; 1 of 4 parameters looked at have none",
            "parameter   layer type   shape   layer called\n2.r         Scaled       (6,)    yes",
            "The output of layer '2' (Scaled) has a gradient: does its forward use 2.r, and not a detached copy?",
            "A hint, as other parameters of its layer have one: assert_all_params_have_grad fails here.",
        ]
    ]


class DropPath(nn.Module):
    """Leaves a branch out for some samples of a batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.bernoulli(torch.full((len(x), 1), 0.9)) if self.training else x


def dropping(factor: float = 1.0) -> Net:
    return Net(lambda m, x: m.head(x + m.drop(m.branch(x)) * factor), branch=linear(), drop=DropPath(), head=linear())


def seed_that_drops() -> int:
    runs = ((seed, ModelProbe(seed=seed).run(dropping(), X[:1])) for seed in range(200))
    return next(seed for seed, record in runs if record["drop"].output.statistics.all_zero)


@pytest.mark.parametrize("assertion", [assert_grad_flow, assert_no_dead_layers])
def test_a_branch_that_a_run_drops_by_chance_is_looked_at_again(assertion: Callable[..., None]) -> None:
    with ModelProbe(seed=seed_that_drops()) as probe, warnings.catch_warnings():
        warnings.simplefilter("error")
        model = dropping()
        assertion(probe.run(model, X[:1], loss="random"))
        model = dropping(factor=0.0)
        record = probe.run(model, X[:1], loss="random")
        with pytest.raises(AssertionError, match=r"^(branch gets|drop has|branch has) a zero gradient"):
            assertion(record)


@pytest.mark.parametrize("assertion", [assert_grad_flow, assert_no_dead_layers, assert_params_updated])
def test_a_branch_that_is_dropped_in_the_only_step_of_a_watch_is_a_hint_and_in_one_of_several_nothing(
    assertion: Callable[..., None],
) -> None:
    for dropped in ([True], [True, False], [False, True]):
        with ModelProbe() as probe, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            watch = probe.watch(dropping())
            optimizer = torch.optim.SGD(watch.model.parameters(), 0.1)
            for drop in dropped:
                torch.manual_seed(seed_of_draw(drop=drop))
                optimizer.zero_grad()
                watch.model(X[:1]).square().mean().backward()
                optimizer.step()
            assertion(watch)
        assert [one.category for one in said] == ([HintWarning] if dropped == [True] else [])


def seed_of_draw(*, drop: bool) -> int:
    """Return a seed with which `DropPath` drops the only sample, or does not."""
    for seed in range(200):
        with seeded(seed):
            if bool(DropPath()(torch.ones(1, 1))) != drop:
                return seed
    raise AssertionError


def test_without_parameters_outputs_are_looked_at() -> None:
    model = Net(lambda m, x: m.b(m.a(x)).detach() + m.c(x), a=nn.Tanh(), b=nn.Tanh(), c=linear())
    record = run(model, X.clone().requires_grad_())
    assert failure_of(assert_grad_flow, record, layers=nn.Tanh).startswith(
        "b gets no gradient; 2 of 2 layers looked at"
    )
    assert_grad_flow(run(nn.Sequential(linear(), nn.Tanh())), layers=nn.Tanh)


def test_a_view_that_was_overwritten_is_not_judged() -> None:
    record = run(nn.Sequential(linear(), nn.Tanh()))
    tanh = record.layers["1"]
    value = dataclasses.replace(tanh.calls[0].outputs[0], backward=None, overwritten=True)
    call = dataclasses.replace(tanh.calls[0], outputs=(value,))
    layers = {"1": dataclasses.replace(tanh, calls=(call,)), "2": dataclasses.replace(tanh, name="2")}
    assert_grad_flow(dataclasses.replace(record, layers=layers))


def test_nothing_that_takes_part_is_an_error() -> None:
    model = Net(lambda m, x: m.b(m.a(x)), a=linear().requires_grad_(False), b=linear())
    with pytest.raises(NothingObservedError, match="none of the selected layers takes part in the backward"):
        assert_grad_flow(run(model), layers="a")


def test_a_ratio_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="max_ratio is how many times smaller"):
        assert_grad_flow(run(linear()), max_ratio=1)


def test_a_layer_with_one_gradient_that_is_not_finite_fails() -> None:
    def spoilt(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[:1] = math.nan
        return gradient

    model = Net(lambda m, x: m.o(m.a(x)), a=linear(), o=linear())
    model.o.weight.register_hook(spoilt)
    assert failure_of(assert_grad_flow, run(model)).startswith("o gets a gradient that is not finite; 1 of 2 layers")


def test_a_gradient_without_numbers_is_unknown_and_not_none() -> None:
    model = Net(lambda m, x: m.o(m.e(x)), e=nn.Embedding(10, 4, sparse=True), o=linear(4, 2))
    record = run(model, torch.arange(5))
    assert_grad_flow(record)
    with pytest.raises(NothingObservedError, match="with a gradient that can be read"):
        assert_grad_flow(record, layers="e")


# --- in common ----------------------------------------------------------------------------------------------------


def test_no_backward_is_an_error_that_says_so() -> None:
    for assertion in ASSERTIONS:
        with pytest.raises(NothingObservedError) as error:
            assertion(run(linear(), loss=None))
        assert str(error.value) == (
            "Linear saw 1 forward but no backward: pass run(..., loss=...), or call loss.backward() while the watch is "
            "open; if it was, the graph is cut before it, or the newest forward is an evaluation: watch.steps has "
            "those of training"
        )


def test_training_steps_pass() -> None:
    model = nn.Sequential(linear(), nn.ReLU(), nn.BatchNorm1d(6), linear())
    optimizer = torch.optim.Adam(model.parameters())
    with Watch(model) as watch:
        for step in range(4):
            optimizer.zero_grad()
            model.train()(X + step).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                model.eval()(X)
    for assertion in ASSERTIONS:
        assertion(watch)


def test_a_leaf_that_detaches_its_output_is_named(modelprobe: ModelProbe) -> None:
    model = nn.Sequential(nn.Linear(4, 8), Net(lambda m, x: x.detach()), nn.Linear(8, 1))
    record = modelprobe.run(model, torch.ones(2, 4), loss=torch.sum)
    with pytest.raises(AssertionError, match=r"The graph is cut in layer '1' \(Net\): look for"):
        assert_all_params_have_grad(record)


# --- classes of public packages ---------------------------------------------------------------------------------------


class EntropyBottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.quantiles = nn.Parameter(torch.zeros(8))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(z).sigmoid()
        return out


class OfMatrices(EntropyBottleneck):
    """Has its weights in a list, which is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([torch.eye(8)])
        del self.net

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return (z @ self.matrices[0]).sigmoid()


class Codec(nn.Module):
    """Rounds by a straight-through estimator: the gradient of the quantiles is -1 + 1."""

    def __init__(self, bottleneck: type[EntropyBottleneck]) -> None:
        super().__init__()
        self.encode, self.bottleneck, self.decode = nn.Linear(8, 8), bottleneck(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.encode(x)
        off = z - self.bottleneck.quantiles
        return self.decode(off + (off.round() - off).detach() + self.bottleneck.quantiles), self.bottleneck(z)


@pytest.mark.parametrize(("bottleneck", "layers"), [(EntropyBottleneck, 5), (OfMatrices, 3)])
def test_the_quantiles_of_elic2022_chandelier_of_compressai_are_named_and_not_their_layer(
    modelprobe: ModelProbe, bottleneck: type[EntropyBottleneck], layers: int
) -> None:
    model = modelprobe.build(lambda: Codec(bottleneck))
    record = modelprobe.run(model, modelprobe.randn(4, 8), loss=lambda out: out[0].square().mean() + out[1].mean())
    with pytest.raises(AssertionError) as error:
        assert_grad_flow(record)
    lines = str(error.value).splitlines()
    assert lines[0] == f"bottleneck.quantiles gets a zero gradient; 1 of {layers} layers looked at"
    assert lines[-1] == (
        "The layers after bottleneck.quantiles do not depend on it, or have a zero derivative there: dead, saturated, "
        "zero-initialized, times zero."
    )
