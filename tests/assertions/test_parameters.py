"""Assertions on parameters: counts, ties, devices, and what training does to them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from pytest_modelprobe import (
    HintWarning,
    ModelProbe,
    NothingObservedError,
    Record,
    SelectionError,
    UsageError,
    Watch,
    assert_frozen,
    assert_param_count,
    assert_params_updated,
    assert_tied,
    assert_update_ratio,
)
from pytest_modelprobe.record import Layer, Parameter, Reading, Statistics

PROBE = ModelProbe()
X = PROBE.randn(16, 8)


def net() -> nn.Sequential:
    return PROBE.build(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))


def normless() -> nn.Sequential:
    return PROBE.build(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


# --- static facts -------------------------------------------------------------------------------------------------

SUBJECTS: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    "a module": lambda model, x: model,
    "a record": lambda model, x: PROBE.run(model, x),
    "a record of structure": lambda model, x: PROBE.architecture(model),
}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_tied_ones_count_once(subject: str) -> None:
    assert_param_count(SUBJECTS[subject](tied(), torch.ones(2, 4)), 2 * 16 + 3 * 4)


def test_another_number_is_reported_with_the_layers_that_have_most() -> None:
    assert_param_count(net(), (100, 110))
    line = r"^the model has 106 parameters, not 100: 6 too many\n\nlayer +parameters\n0 +72"
    with pytest.raises(AssertionError, match=line):
        assert_param_count(net(), 100)
    with pytest.raises(UsageError, match="a number of elements"):
        assert_param_count(net(), (3, 2))


def test_frozen_and_trainable_ones_are_distinguished() -> None:
    model = net()
    model[0].requires_grad_(False)
    assert_param_count(model, 34, trainable=True)
    assert_param_count(model, 72, trainable=False)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_lost_tie_names_the_parameter(subject: str) -> None:
    model = tied()
    assert_tied(SUBJECTS[subject](model, torch.ones(2, 4)), "0.weight", "2.weight")
    model[2].weight = nn.Parameter(model[0].weight.detach().clone())
    with pytest.raises(AssertionError, match=r"^2.weight is not tied to 0.weight: they are two parameters"):
        assert_tied(SUBJECTS[subject](model, torch.ones(2, 4)), "0.weight", "2.weight")


def test_a_parameter_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"there is no parameter '0.wieght'; nearest: 0.weight"):
        assert_tied(tied(), "0.wieght", "2.weight")
    with pytest.raises(UsageError, match="two or more"):
        assert_tied(tied(), "0.weight")


# --- training -----------------------------------------------------------------------------------------------------


def trained(
    model: nn.Module, optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None, steps: int = 2
) -> Watch:
    made = optimizer(model) if optimizer else torch.optim.SGD(model.parameters(), 0.1)
    with ModelProbe() as probe:
        watch = probe.watch(model)
        for _ in range(steps):
            made.zero_grad()
            model(X).square().mean().backward()
            made.step()
        assert watch.record.backwards == steps
        return watch


def test_weight_decay_moves_what_is_only_without_a_gradient() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)
    model[0].requires_grad_(False)
    for parameter in model[0].parameters():
        parameter.grad = torch.zeros_like(parameter)
    with ModelProbe() as probe:
        watch = probe.watch(model)
        model(X).square().mean().backward()
        optimizer.step()
    with pytest.raises(AssertionError, match=r"^0.weight is not frozen: it changed by 4.3 %") as error:
        assert_frozen(watch, layers="0")
    assert "weight decay" in str(error.value)


def test_a_parameter_that_learns_is_not_frozen() -> None:
    with pytest.raises(AssertionError, match=r"^0.weight is not frozen: it changed by"):
        assert_frozen(trained(net()), layers="0")


def all_but_the_norm(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], 0.1)


@pytest.mark.parametrize(
    ("steps", "line"), [(2, "1.running_mean is not frozen"), (1, r"layer '1' \(BatchNorm1d\) is not frozen")]
)
def test_running_statistics_are_to_be_frozen_too(steps: int, line: str) -> None:
    with pytest.raises(AssertionError, match=rf"(?s)^{line}.*all eval\(\) on "):
        assert_frozen(trained(net(), all_but_the_norm, steps=steps), layers="1")


def test_a_norm_in_evaluation_mode_is_frozen() -> None:
    model = net()
    model[1].requires_grad_(False).eval()
    assert_frozen(trained(model, all_but_the_norm), layers="1")


def test_a_write_through_data_is_seen_also_after_a_record_was_made() -> None:
    model = net().eval()
    with ModelProbe() as probe:
        watch = probe.watch(model)
        model(X)
        assert watch.record.forwards == 1
        for parameter in model.parameters():
            parameter.data.add_(1)
        assert_params_updated(watch)
        with pytest.raises(AssertionError, match=r"^0.weight is not frozen: it changed by [0-9.]+ %; 2 of 2"):
            assert_frozen(watch, layers="0")


def test_without_a_step_nothing_is_shown() -> None:
    model = net().eval()
    with ModelProbe() as probe:
        watch = probe.watch(model)
        model(X)
        with pytest.raises(NothingObservedError, match="nothing in the model has changed"):
            assert_frozen(watch, layers="0")


def test_a_record_is_of_one_moment() -> None:
    with pytest.raises(UsageError, match="give the watch that was open while the optimizer stepped"):
        assert_frozen(PROBE.run(net(), X))


def test_all_parameters_are_updated() -> None:
    assert_params_updated(trained(normless()))


def test_a_gradient_of_zeros_is_the_reason() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    nn.init.constant_(model[0].bias, -100.0)
    with pytest.raises(AssertionError, match=r"(?s)^0\.weight was not updated; .*\n\nIts gradient is all zero: its "):
        assert_params_updated(trained(model))


def test_a_bias_before_a_norm_has_no_effect() -> None:
    with pytest.warns(HintWarning, match=r"(?s)^0.bias was not updated; 1 of 6 .* is rounding error: a norm after it"):
        assert_params_updated(trained(net()))


def critic(*, discarded: bool) -> Watch:
    model = PROBE.build(lambda: nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    watch = ModelProbe().watch(model)
    for i in range(4):
        real, fake = PROBE.randn(8, 2, name=f"real{i}"), PROBE.randn(8, 2, name=f"fake{i}") + 1
        if discarded:  # the step of a generator
            model(fake).mean().backward()
        optimizer.zero_grad()
        (model(fake).mean() - model(real).mean()).backward()
        optimizer.step()
    return watch


@pytest.mark.parametrize("discarded", [False, True])
def test_a_bias_that_the_loss_of_a_critic_cancels_is_a_hint_whatever_passes_were_thrown_away(discarded: bool) -> None:
    with pytest.warns(HintWarning) as said:
        assert_params_updated(critic(discarded=discarded))
    (text,) = (str(one.message) for one in said)
    assert text.startswith("2.bias was not updated; 1 of 4 parameters looked at\n")
    assert text.endswith(
        "\n\nIts gradient is rounding error: a norm after it, the rest of the model, or the loss cancels it. A bias "
        "there has no effect: remove it from the model, or exclude it here with ignore=."
    )


class Schedule(nn.Module):
    """The learned noise schedule of denoising-diffusion-pytorch: a share of a difference, so that a bias cancels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Sigmoid(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zero, one = self.net(torch.zeros_like(x)), self.net(torch.ones_like(x))
        return (self.net(x) - zero) / (one - zero)


def test_a_bias_that_the_model_cancels_is_a_hint() -> None:
    model = PROBE.build(Schedule)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)  # so that the bias moves with no seed
    with ModelProbe() as probe:
        watch = probe.watch(model)
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.rand(4, 1)) - 0.5).square().mean().backward()
            optimizer.step()
    with pytest.warns(HintWarning, match="Its gradient is rounding error: "):
        assert_params_updated(watch, ignore=["net.0.*", "net.2.weight"])


class Mixer(nn.Module):
    """As `dt_bias` of Zamba2 in transformers, a parameter has an effect that is small and exact."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.dt_bias = nn.Parameter(torch.eye(8)), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + 1e-7 * torch.nn.functional.softplus(self.dt_bias)


@pytest.mark.parametrize("assertion", [assert_params_updated, assert_update_ratio])
def test_a_small_gradient_that_is_exact_is_not_called_rounding(assertion: Callable[..., None]) -> None:
    watch = trained(Mixer(), lambda m: torch.optim.SGD(m.parameters(), 1e-2))
    with pytest.warns(HintWarning) as said:
        assertion(watch)
    (text,) = (str(one.message) for one in said)
    assert text.startswith("dt_bias ")
    why = r"\nIts gradient is [\d.e+]+ times smaller than the largest of its layer, too small for steps that suit it\.$"
    assert re.search(why, text)


def test_a_parameter_may_be_ignored() -> None:
    watch = trained(net())
    assert_params_updated(watch, ignore="0.bias")
    assert_update_ratio(watch, low=1e-8, high=10, ignore=["0.bias"])
    with pytest.raises(SelectionError, match=r"ignore='0\.bios' matches none of 6 parameters; nearest: 0\.bias"):
        assert_params_updated(watch, ignore="0.bios")


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda m: None, "in no group of the optimizer"),
        (lambda m: m[2].register_forward_hook(lambda *_: torch.zeros(16, 2, requires_grad=True)), "It has no gradient"),
    ],
    ids=["not in the optimizer", "no gradient"],
)
def test_one_that_is_not_updated_is_named_with_the_reason(edit: Callable[[nn.Module], object], why: str) -> None:
    model = normless()
    handle = edit(model)
    watch = trained(model, lambda m: torch.optim.SGD(m[0].parameters(), 0.1))
    with pytest.raises(AssertionError, match=r"was not updated; \d of 4 parameters looked at") as error:
        assert_params_updated(watch)
    assert why in str(error.value)
    assert handle is None or handle.remove() is None


@pytest.mark.parametrize(("rate", "said"), [(100.0, "large"), (1e-7, "small")])
def test_a_step_that_is_too_large_or_too_small_is_named(rate: float, said: str) -> None:
    model = normless()
    assert_update_ratio(trained(model, lambda m: torch.optim.SGD(m.parameters(), 0.01)))
    watch = trained(model, lambda m: torch.optim.SGD(m.parameters(), rate))
    with pytest.raises(AssertionError, match=rf"(?s)changed by .* of its norm in step \d, not .* too {said} for it"):
        assert_update_ratio(watch, low=1e-3)


def test_the_ratio_is_that_of_the_parameters() -> None:
    model = nn.Linear(8, 2, bias=False)
    before = model.weight.detach().clone()
    watch = trained(model, lambda m: torch.optim.SGD(m.parameters(), 0.01), steps=1)
    exact = ((model.weight.detach() - before).norm() / before.norm()).item()
    assert_update_ratio(watch, low=exact / 1.1, high=exact * 1.1)  # of 16 elements it is exact


class Trained:
    """What a watch shows of a layer with one parameter that learns, and of one that could not be read."""

    first_hook, closed, steps, last = None, False, (), None

    def __init__(self, before: float, after: float) -> None:
        self.first, self.record = self._at(before), self._at(after)

    def _at(self, mean: float) -> Record:
        known = Reading(statistics=Statistics(count=4, mean=mean, deviations=1.0), fingerprint=(mean,) * 16)
        layers = {
            name: Layer(
                name=name,
                type="torch.nn.Linear",
                parameters=(
                    Parameter(
                        name="weight", shape=(4,), dtype="float32", device="cpu", requires_grad=True, reading=read
                    ),
                ),
            )
            for name, read in {"read": known, "hidden": Reading(reason="it is on device meta")}.items()
        }
        return Record(model="Net", layers=layers, forwards=1, backwards=1)

    def reread(self) -> None:
        pass


@pytest.mark.parametrize("assertion", [assert_frozen, assert_params_updated, assert_update_ratio])
def test_a_parameter_that_could_not_be_read_does_not_pass(assertion: Callable[..., None]) -> None:
    layers = "hidden" if assertion is assert_frozen else "**"
    with pytest.raises(NothingObservedError) as error:
        assertion(Trained(1.0, 1.001), layers=layers)
    assert str(error.value) == (
        "it is not known whether hidden.weight changed: it is on device meta; leave the layer out with layers=, and "
        "look at the value in the test itself"
    )


# --- not finite ---------------------------------------------------------------------------------------------------


def spoilt(factor: float = float("nan"), *, steps: bool = True) -> Watch:
    model = normless()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ModelProbe() as probe:
        watch = probe.watch(model)
        (factor * model(X).mean()).backward()
        if steps:
            optimizer.step()
        assert watch.record.backwards == 1
        return watch


@pytest.mark.parametrize("assertion", [assert_params_updated, assert_update_ratio])
def test_parameters_that_a_gradient_made_nan_are_named_as_such(assertion: Callable[..., None]) -> None:
    with pytest.raises(AssertionError) as error:
        assertion(spoilt())
    assert str(error.value) == (
        "0.weight is not finite after training: 64 NaN of 64 elements; 4 of 4 parameters looked at\n\n"
        "parameter   shape    not finite              of its gradient\n"
        "0.weight    (8, 8)   64 NaN of 64 elements   64 NaN of 64 elements\n"
        "0.bias      (8,)     8 NaN of 8 elements     8 NaN of 8 elements\n"
        "2.weight    (2, 8)   16 NaN of 16 elements   16 NaN of 16 elements\n"
        "2.bias      (2,)     2 NaN of 2 elements     2 NaN of 2 elements\n\n"
        "Its gradient was not finite. assert_grad_finite names where that began."
    )


def test_one_that_the_step_alone_made_infinite_blames_the_step() -> None:
    watch = trained(normless(), lambda m: torch.optim.SGD(m.parameters(), float("inf")), steps=1)
    with pytest.raises(AssertionError, match=r"(?s)^0.weight is not finite after training.* the learning rate"):
        assert_params_updated(watch)


def test_a_step_skipped_for_its_gradients_blames_these() -> None:
    watch = spoilt(steps=False)
    with pytest.raises(AssertionError, match="Its gradient is not finite, and such steps are skipped"):
        assert_params_updated(watch)
    with pytest.raises(AssertionError, match=r"(?s)changed by 0 of its norm, .*\n\nassert_params_updated says why\.$"):
        assert_update_ratio(watch)


def test_a_frozen_parameter_that_became_nan_says_so() -> None:
    with pytest.raises(AssertionError, match=r"^0.weight is not frozen: it changed; 2 of 2"):
        assert_frozen(spoilt(), layers="0")


def step_of(rate: float, *, trained: int = 2, norm: bool = False) -> Record:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4) if norm else nn.Tanh(), nn.Linear(4, 1))
    model[1].eval()
    watch = ModelProbe().watch(model)
    model(torch.ones(5, 3)).sum().backward()
    torch.optim.SGD([p for layer in (model[2], model[0])[:trained] for p in layer.parameters()], rate).step()
    return watch.first_step


def test_the_record_of_a_step_says_what_it_updated_and_what_it_left_out() -> None:
    record = step_of(0.1)
    assert_params_updated(record)
    assert_update_ratio(record, high=10.0)
    with pytest.raises(AssertionError, match=r"^0\.weight is not frozen: it changed by .* 2 of 2 parameters"):
        assert_frozen(record, layers="0")
    record = step_of(0.1, trained=1)
    with pytest.raises(AssertionError, match=r"^0\.weight was not updated; 2 of 4 parameters looked at"):
        assert_params_updated(record)
    with pytest.raises(AssertionError, match=r"^0\.(weight|bias) changed by 0 of its norm, not"):
        assert_update_ratio(record, high=10.0)


def test_whether_a_step_changed_buffers_is_not_known() -> None:
    record = step_of(0.1, trained=1, norm=True)
    assert_frozen(record, layers="0")
    with pytest.raises(NothingObservedError, match=r"1\.running_mean changed: the record of a step has buffers as"):
        assert_frozen(record, layers="1")
