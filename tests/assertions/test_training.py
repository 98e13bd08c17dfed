"""The training loop: each fault planted, beside a healthy loop that looks like it."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

from pytest_modelprobe import (
    HintWarning,
    ModelProbe,
    NothingObservedError,
    UsageError,
    Watch,
    assert_params_updated,
    assert_training_loop,
)
from pytest_modelprobe.assertions.findings import hints

PROBE = ModelProbe()
X = PROBE.randn(8, 6)
STEPS = 3


def net(*, norm: bool = False, dropout: float = 0.0) -> nn.Sequential:
    middle = nn.BatchNorm1d(6) if norm else nn.LayerNorm(6)
    return PROBE.build(lambda: nn.Sequential(nn.Linear(6, 6), middle, nn.Dropout(dropout), nn.Linear(6, 2)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01)


def loss(model: nn.Module, x: torch.Tensor = X) -> torch.Tensor:
    return model(x).square().mean()


@contextmanager
def watched(model: nn.Module) -> Iterator[Watch]:
    with ModelProbe() as probe:
        watch = probe.watch(model)
        yield watch
        assert_training_loop(watch)


def failure_of(loop: Callable[[nn.Module], None], model: nn.Module) -> str:
    with pytest.raises(AssertionError) as error, watched(model):
        loop(model)
    return str(error.value)


# --- gradients that are not reset ---------------------------------------------------------------------------------


def never_reset(model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(STEPS):
        loss(model).backward()
        optimizer.step()


def test_gradients_that_are_never_reset_are_said() -> None:
    assert failure_of(never_reset, net()) == (
        "gradients are never reset: 2 of 3 times, in the training of Sequential\n\n"
        "in the training loop        times   of\n"
        "gradients are never reset       2    3\n\n"
        "Call optimizer.zero_grad() after each step, or before the first backward of the next: also when gradients are "
        "accumulated over several passes."
    )


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_reset_before_the_step_are_said(to_none: bool) -> None:
    probe = ModelProbe()
    model = probe.build(lambda: nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    watch = probe.watch(model)
    for _ in range(3):
        model(probe.randn(4, 3)).mean().backward()
        optimizer.zero_grad(set_to_none=to_none)
        optimizer.step()
    with pytest.raises(AssertionError, match=r"^gradients were reset between the backward and the step: 3 of 3 times"):
        assert_training_loop(watch)


def test_a_reset_that_comes_every_other_step_is_too_seldom() -> None:
    def loop(model: nn.Module) -> None:
        optimizer = sgd(model)
        for step in range(6):
            if step % 2 == 0:
                optimizer.zero_grad(set_to_none=False)
            loss(model).backward()
            optimizer.step()

    assert failure_of(loop, net()).startswith("new gradients were added to those of the last step: 3 of 6 times")


@pytest.mark.parametrize(("passes", "at_the_end", "to_none"), [(1, True, True), (3, False, False)])
def test_gradients_may_be_accumulated_between_steps(passes: int, at_the_end: bool, to_none: bool) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    with watched(model) as watch:
        for _ in range(STEPS):
            if not at_the_end:
                optimizer.zero_grad(set_to_none=to_none)
            for _ in range(passes):
                loss(model).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if at_the_end:
                optimizer.zero_grad(set_to_none=to_none)
    training = watch.record.training
    assert (training.steps, training.passes, training.stale) == (STEPS, STEPS * passes, 0)
    assert training.accumulated == (STEPS if passes > 1 else 0)


def test_a_closure_without_a_reset_is_said() -> None:
    def loop(model: nn.Module) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def closure() -> torch.Tensor:
            value = loss(model)
            value.backward()
            return value

        for _ in range(STEPS):
            optimizer.step(closure)

    assert failure_of(loop, net()).startswith("gradients are never reset")


# --- two models ---------------------------------------------------------------------------------------------------


def adversaries(*, reset: str, detach: bool, watch: str, to_none: bool = True) -> Watch:
    """Train a generator and a discriminator; ``reset`` says whether each is reset before its own backward."""
    generator, discriminator = net(norm=True), PROBE.build(lambda: nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)))
    both = nn.ModuleList([generator, discriminator])
    of_generator, of_discriminator = sgd(generator), sgd(discriminator)
    with ModelProbe() as probe:
        seen = probe.watch({"generator": generator, "discriminator": discriminator, "both": both}[watch])
        for _ in range(STEPS):
            if reset == "first":
                of_generator.zero_grad(set_to_none=to_none)
                of_discriminator.zero_grad(set_to_none=to_none)
            made = generator(X)
            if reset == "own":
                of_discriminator.zero_grad(set_to_none=to_none)
            discriminator(X[:, :2]).mean().backward()
            discriminator(made.detach() if detach else made).mean().backward(retain_graph=not detach)
            of_discriminator.step()
            if reset == "own":
                of_generator.zero_grad(set_to_none=to_none)
            discriminator(generator(X)).mean().backward()
            of_generator.step()
        assert seen.record.training is not None
    return seen


@pytest.mark.parametrize("watch", ["generator", "both"])
def test_a_generator_trained_by_the_loss_of_the_discriminator_is_said(watch: str) -> None:
    with pytest.raises(AssertionError, match=r"^a step used gradients of another optimizer's loss: 3 of") as error:
        assert_training_loop(adversaries(reset="first", detach=False, watch=watch))
    assert "detach what the other loss should not train" in str(error.value)


@pytest.mark.parametrize(
    ("reset", "detach", "watch", "to_none"),
    [
        ("own", True, "generator", True),
        ("own", False, "discriminator", True),
        ("own", False, "both", False),
        ("first", True, "both", True),
    ],
)
def test_adversaries_that_are_reset_or_detached_are_sound(reset: str, detach: bool, watch: str, to_none: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_training_loop(adversaries(reset=reset, detach=detach, watch=watch, to_none=to_none))


def test_several_optimizers_that_share_a_backward_are_sound() -> None:
    model = net(norm=True)
    optimizers = [sgd(model[0]), torch.optim.Adam([*model[1].parameters(), *model[3].parameters()])]
    for part in (model, model[3]):
        with watched(part) as watch:
            for _ in range(STEPS):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss(model).backward()
                for optimizer in optimizers:
                    optimizer.step()
        assert watch.record.training.optimizers == (2 if part is model else 1)


# --- whose parameters ---------------------------------------------------------------------------------------------


def test_an_optimizer_made_for_a_copy_is_said() -> None:
    def loop(model: nn.Module) -> None:
        optimizer = sgd(copy.deepcopy(model))
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()

    text = failure_of(loop, net())
    assert text.startswith("the optimizer has the parameters of another copy of the model: 3 of 3 times")


def test_a_model_that_only_passes_gradients_on_is_not_blamed() -> None:
    model, image = net(), torch.nn.Parameter(X.clone())
    optimizer = torch.optim.LBFGS([image], max_iter=2)
    said = pytest.raises(NothingObservedError, match=r"no optimizer .* of Sequential stepped .* \(2 steps of others\)")
    with said, watched(model):
        for _ in range(2):
            optimizer.step(lambda: (loss(model, image).backward(), loss(model, image))[1])


def test_norms_of_a_frozen_backbone_may_stay_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    model[:2].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with ModelProbe() as probe:
        watch = probe.watch(model)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
        assert_training_loop(watch)


@pytest.mark.parametrize("which", ["model", "average"])
def test_weight_averaging_by_the_recipe_of_torch_is_sound(which: str) -> None:
    model = net(norm=True, dropout=0.1)
    averaged, optimizer = AveragedModel(model), sgd(model)
    with ModelProbe() as probe:
        watch = probe.watch(model if which == "model" else averaged)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
            averaged.update_parameters(model)
        update_bn([X], averaged)
        update_bn([X], model)
        if which == "model":
            assert_training_loop(watch)
            with pytest.warns(HintWarning, match=r"^0\.bias was not updated; 1 of 6 .*\n(.*\n)*.*is rounding error"):
                assert_params_updated(watch)
        else:
            for assertion in (assert_training_loop, assert_params_updated):
                with pytest.raises(NothingObservedError, match="AveragedModel"):
                    assertion(watch)


# --- modes --------------------------------------------------------------------------------------------------------


def epochs(model: nn.Module, *, back: bool = True, out: bool = True) -> None:
    optimizer = sgd(model)
    model.train()
    for _ in range(STEPS):
        for _ in range(2):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
        if out:
            model.eval()
        with torch.no_grad():
            model(X)
        if back:
            model.train()


def test_training_after_an_evaluation_without_train_is_said() -> None:
    text = failure_of(lambda model: epochs(model, back=False), net(norm=True))
    assert text.startswith("1 is trained in evaluation mode: 4 of 6 times")


def test_an_evaluation_without_eval_is_said() -> None:
    text = failure_of(lambda model: epochs(model, out=False), net(dropout=0.5))
    assert text.startswith("2 is evaluated in training mode: 3 of 7 times")


def test_evaluation_between_epochs_is_sound() -> None:
    model = net(norm=True, dropout=0.5)
    with watched(model):
        epochs(model)


def test_forwards_without_gradients_that_every_step_has_are_part_of_the_loop() -> None:
    model = net(norm=True)
    optimizer = sgd(model)
    with watched(model):
        for _ in range(STEPS):
            with torch.no_grad():
                guess = model(X)
            optimizer.zero_grad()
            (model(X) - guess + 1).square().mean().backward()
            optimizer.step()


# --- norms and scalers --------------------------------------------------------------------------------------------


def accumulating(model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in X.chunk(2):
            loss(model, part).backward()
        optimizer.step()


def test_a_norm_over_the_parts_of_an_accumulated_batch_is_said() -> None:
    with pytest.warns(HintWarning) as hints, watched(net(norm=True)) as watch:
        accumulating(watch.model)
    (text,) = (str(one.message) for one in hints)
    assert text.startswith("1 sees an accumulated batch in parts: 3 of 3 times")
    assert "BatchNorm1d computes mean and variance of each part separately" in text


def in_parts(*, each_part: Callable[[nn.Module, Any, int], None], each_step: bool = True) -> Watch:
    """Train in steps of two microbatches with a schedule; ``each_part`` runs after each backward."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=2 * STEPS + 1)
    with ModelProbe() as probe:
        watch = probe.watch(model.train())
        for _ in range(STEPS):
            for number, part in enumerate(X.chunk(2)):
                loss(model, part).backward()
                each_part(model, scheduler, number)
            optimizer.step()
            optimizer.zero_grad()
            if each_step:
                scheduler.step()
    return watch


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # as torch says if the first is too early
@pytest.mark.parametrize(
    ("each_part", "what", "times"),
    [  # what the optimizer had is known from its second step on
        (lambda model, scheduler, number: scheduler.step(), "hyperparameters", STEPS - 1),
        (lambda model, scheduler, number: model.train(bool(number)), "the mode of the model", STEPS),
    ],
)
def test_what_changes_between_the_backward_passes_of_a_step_is_a_hint(
    each_part: Callable[[nn.Module, Any, int], None], what: str, times: int
) -> None:
    watch = in_parts(each_part=each_part, each_step=False)
    text = f"{what} changed between the backward passes of a step: {times} of {STEPS} "
    assert hints(watch.record) == [f"{text}steps"]
    with pytest.warns(HintWarning, match=f"^{text}times") as said:
        assert_training_loop(watch)
    assert str(said[0].message).endswith(
        "call scheduler.step(), train() and eval() after optimizer.step(), not after each backward."
    )


def test_a_scheduler_and_an_evaluation_after_each_step_are_sound() -> None:
    def evaluate(model: nn.Module, scheduler: Any, number: int) -> None:
        with torch.no_grad():
            model.eval()(X)
        model.train()

    watch = in_parts(each_part=evaluate)
    assert (watch.record.training.rescheduled, watch.record.training.switched) == (0, 0)
    assert hints(watch.record) == []


def test_an_attack_in_evaluation_mode_whose_gradients_are_reset_is_sound() -> None:
    model = net()
    optimizer = sgd(model)
    with ModelProbe() as probe:
        watch = probe.watch(model)
        for _ in range(STEPS):
            x = X.clone().requires_grad_()
            loss(model.eval(), x).backward()
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.zero_grad()
            loss(model.train(), x.detach() + x.grad.sign()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (watch.record.training.rescheduled, watch.record.training.switched) == (0, 0)


def test_a_scheduler_of_an_adversary_may_step_while_a_generator_accumulates() -> None:
    generator, discriminator = net(), PROBE.build(lambda: nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)))
    of_generator, of_discriminator = sgd(generator), sgd(discriminator)
    scheduler = torch.optim.lr_scheduler.StepLR(of_discriminator, 1)
    with ModelProbe() as probe:
        watch = probe.watch(nn.ModuleList([generator, discriminator]))
        for _ in range(STEPS):
            of_generator.zero_grad()
            for part in X.chunk(2):
                of_discriminator.zero_grad()
                discriminator(generator(part).detach()).mean().backward()
                of_discriminator.step()
                scheduler.step()
                discriminator(generator(part)).mean().backward()
            of_generator.step()
    assert watch.record.training.rescheduled == 0


def test_accumulation_with_other_norms_or_a_frozen_one_is_sound() -> None:
    frozen = net(norm=True)
    frozen[1].eval()
    for model in (net(), frozen):
        with watched(model):
            accumulating(model)


def test_two_losses_of_one_forward_accumulate_no_batch() -> None:
    model = net(norm=True)
    optimizer = sgd(model)
    with watched(model):
        for _ in range(STEPS):
            optimizer.zero_grad()
            out = model(X)
            out.mean().backward(retain_graph=True)
            out.square().mean().backward()
            optimizer.step()


def scaled(model: nn.Module, *, spoil: Callable[[int], bool]) -> None:
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(loss(model) * (math.inf if spoil(step) else 1)).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("spoil", [lambda step: True, lambda step: step < 5], ids=["all", "all but one"])
def test_a_scaler_that_skips_its_steps_is_said(spoil: Callable[[int], bool]) -> None:
    text = failure_of(lambda model: scaled(model, spoil=spoil), net())
    assert text.startswith("steps are skipped because the gradient of 0.weight is not finite: 5 of ")
    assert "look at its initial scale" in text


def test_a_scaler_that_finds_its_scale_is_sound() -> None:
    model = net()
    with watched(model):
        scaled(model, spoil=lambda step: step < 2)


# --- in common ----------------------------------------------------------------------------------------------------


def test_without_a_step_nothing_is_shown() -> None:
    model = net()
    with pytest.raises(NothingObservedError, match="keep the watch open while it is trained"), watched(model):
        loss(model).backward()


def test_a_record_of_one_forward_has_no_steps() -> None:
    with pytest.raises(UsageError, match="the record has no optimizer step"):
        assert_training_loop(PROBE.run(net(), X, loss="random"))
    model = net()
    with watched(model) as watch:
        for _ in range(2):
            optimizer = sgd(model)
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
    with pytest.raises(UsageError, match="the record has no optimizer step"):
        assert_training_loop(watch.last)
