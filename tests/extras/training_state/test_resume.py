"""A resumed run equals the one that was not interrupted: what is lost is named, and from which step on it matters."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from pytest_modelprobe import HintWarning, ModelProbe, UsageError, checks

State = dict[str, Any]

IMAGES, LABELS = (torch.tensor(array) for array in load_digits(return_X_y=True))
DATA = TensorDataset(IMAGES[:256].float() / 16, LABELS[:256])


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.2)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc2(self.drop(torch.relu(self.norm(self.fc1(x)))))
        return logits


def make() -> State:
    """Return all that training goes on from: its data is in the order that a generator of its own says."""
    model = Digits()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "average": average,
        "loader": DataLoader(DATA, 32, shuffle=True, generator=torch.Generator().manual_seed(0)),
    }


def train(state: State, steps: int) -> None:
    state["model"].train()
    for _ in range(steps):
        x, y = next(iter(state["loader"]))
        state["optimizer"].zero_grad()
        nn.functional.cross_entropy(state["model"](x), y).backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["average"].update_parameters(state["model"])


def all_but(*left_out: str) -> dict[str, Callable[..., Any]]:
    """Return save= and load= of a checkpoint that lacks some parts."""

    def save(state: State) -> State:
        saved = {name: one.state_dict() for name, one in state.items() if hasattr(one, "state_dict")}
        saved["loader"] = state["loader"].generator.get_state()
        saved["random"] = torch.get_rng_state()
        return {name: one for name, one in saved.items() if name not in left_out}

    def load(state: State, saved: State) -> None:
        for name, one in saved.items():
            if name == "loader":
                state["loader"].generator.set_state(one)
            elif name == "random":
                torch.set_rng_state(one)
            else:
                state[name].load_state_dict(one)

    return {"save": save, "load": load}


def first_line(found: checks.Outcome) -> str:
    """Return the first line of a failure, with 9 for each number of percent."""
    assert found.verdict == "broken", str(found)
    return re.sub(r"by [\d.]+ %", "by 9 %", str(found).partition("\n")[0])


# --- everything saved -------------------------------------------------------------------------------------------------


def test_a_checkpoint_with_all_parts_goes_on_as_if_nothing_had_happened(modelprobe: ModelProbe) -> None:
    found = checks.resume(modelprobe, make, train, **all_but())
    assert str(found) == (
        "resume holds for Digits: 3 steps after step 3 of 6; looked at: model, optimizer, scheduler, average, loader "
        "and random states"
    )


# --- each part lost in turn -------------------------------------------------------------------------------------------


def constant(make: Callable[[], State]) -> Callable[[], State]:
    """Return the same state with a learning rate that stays."""

    def made() -> State:
        state = make()
        state["scheduler"] = torch.optim.lr_scheduler.StepLR(state["optimizer"], 100)
        return state

    return made


def test_lost_moments_of_adam_are_named(modelprobe: ModelProbe) -> None:
    found = checks.resume.outcome(modelprobe, constant(make), train, **all_but("optimizer"))
    assert first_line(found) == (
        "optimizer: exp_avg of fc1.weight is lost: it is missing after load; step 3 is the first that differs, at the "
        "update of fc1.weight; 17 more values differ after load"
    )
    assert found.layer == "fc1.weight"
    assert "optimizer: exp_avg_sq of norm.bias" in str(found)
    assert str(found).endswith("Save optimizer, and load it into what goes on.")


def test_the_whole_message(modelprobe: ModelProbe) -> None:
    with pytest.raises(AssertionError) as error:
        checks.resume(modelprobe, make, train, **all_but("scheduler"))
    lines = str(error.value).splitlines()
    assert lines[:9] == [
        (
            "scheduler: last_epoch is not restored: 0 after load, and 3 when saved; step 4 is the first that differs, "
            "at the lr of Adam; 2 more values differ after load"
        ),
        "",
        "after load               changed by   loaded   when saved",
        "scheduler: last_epoch             -        0            3",
        "scheduler: _step_count            -        1            4",
        "scheduler: _last_lr.0             -     0.01        0.001",
        "",
        lines[7],
        lines[8],
    ]
    assert lines[7].split() == ["step", "4", "changed", "by", "resumed", "uninterrupted"]
    assert lines[8].split() == ["lr", "of", "Adam", "-", "0.001", "0.0001"]
    assert lines[9].startswith("update of fc1.weight ")
    assert lines[-1] == "Save scheduler, and load it into what goes on."


@pytest.mark.parametrize(
    ("part", "said", "layer"),
    [
        (
            "model",
            (
                "model: fc1.weight is not restored: it is another after load, by 9 %; step 3 is the first that "
                "differs, at the value of fc1.weight; 8 more values differ after load"
            ),
            "fc1.weight",
        ),
        (
            "loader",
            (
                "loader: state of its generator is not restored: it is another after load; step 3 is the first that "
                "differs, at the input of (root)"
            ),
            "(root)",
        ),
        (
            "random",
            (
                "random states: generator of torch on the CPU is not restored: it is another after load; step 3 is the "
                "first that differs, at the output of drop"
            ),
            "drop",
        ),
        (
            "average",
            (
                "average: module.fc1.weight is not restored: it is another after load, by 9 %; the steps are the "
                "same, and at the end average: module.fc1.weight differs, by 9 %; 9 more values differ after load"
            ),
            "module.fc1.weight",
        ),
    ],
)
def test_what_a_checkpoint_lacks_is_named(modelprobe: ModelProbe, part: str, said: str, layer: str) -> None:
    found = checks.resume.outcome(modelprobe, make, train, **all_but(part))
    assert (first_line(found), found.layer) == (said, layer)


def of_model(model: nn.Module) -> State:
    return {"model": model.state_dict(), "random": torch.get_rng_state()}


def load_model(model: nn.Module, saved: State) -> None:
    model.load_state_dict(saved["model"])
    torch.set_rng_state(saved["random"])


def test_what_nothing_in_the_state_explains_is_not_blamed_on_it(modelprobe: ModelProbe) -> None:
    """The optimizer is made by train, and lost with it."""

    def train_with_a_new_optimizer(model: nn.Module, steps: int) -> None:
        train_plainly((model, torch.optim.Adam(model.parameters())), steps)

    found = checks.resume.outcome(modelprobe, Digits, train_with_a_new_optimizer, of_model, load_model)
    assert first_line(found) == (
        "fc1.weight differs, and nothing that was looked at and may cause it is lost; step 3 is the first that "
        "differs, at the update of fc1.weight"
    )
    assert str(found).endswith("as an iterator over the data, and at what the state does not hold.")


def test_what_train_loads_itself_is_not_lost(modelprobe: ModelProbe) -> None:
    """As transformers' Trainer and Lightning do: load says from where, and fit loads."""

    def train_from(state: State, steps: int) -> None:
        if "path" in state:
            parts["load"](state, state.pop("path"))
        train(state, steps)

    def load(state: State, saved: State) -> None:
        state["path"] = saved

    parts = all_but()
    assert checks.resume(modelprobe, make, train_from, save=parts["save"], load=load).verdict == "holds"


# --- no effect --------------------------------------------------------------------------------------------------------


def test_what_is_lost_without_an_effect_is_a_hint(modelprobe: ModelProbe) -> None:
    with pytest.warns(HintWarning, match="^resume: scheduler: last_epoch is not restored: 0 after load, and 3 when"):
        found = checks.resume(modelprobe, constant(make), train, **all_but("scheduler"))
    assert found.verdict == "hint"
    assert str(found).splitlines()[0] == (
        "scheduler: last_epoch is not restored: 0 after load, and 3 when saved; 3 steps after that are the same; "
        "1 more value differs after load"
    )


# --- training that does not repeat ------------------------------------------------------------------------------------


def test_training_that_does_not_repeat_is_not_called_a_difference(modelprobe: ModelProbe) -> None:
    shared = torch.Generator().manual_seed(0)

    def train_on_shared(state: State, steps: int) -> None:
        for _ in range(steps):
            state["optimizer"].zero_grad()
            state["model"](torch.randn(8, 64, generator=shared)).square().mean().backward()
            state["optimizer"].step()

    found = checks.resume.outcome(modelprobe, make, train_on_shared, **all_but())
    assert found.verdict == "not applicable"
    assert str(found).splitlines()[0] == (
        "resume is not applicable to Digits: train is not repeatable: two runs of 3 steps with one seed differ at step "
        "0, at the input of (root)"
    )
    with pytest.raises(UsageError, match="train is not repeatable"):
        checks.resume(modelprobe, make, train_on_shared, **all_but())


def test_a_make_that_does_not_repeat_is_named(modelprobe: ModelProbe) -> None:
    shared = torch.Generator().manual_seed(0)

    def make_anew() -> State:
        state = make()
        nn.init.normal_(state["model"].fc1.weight, generator=shared)
        return state

    found = checks.resume.outcome(modelprobe, make_anew, train, **all_but())
    assert "make is not repeatable: two runs of 3 steps with one seed differ at step 0, at the value of" in str(found)


# --- kinds of states --------------------------------------------------------------------------------------------------


def train_plainly(state: Any, steps: int) -> None:
    model, optimizer = (state["model"], state["optimizer"]) if isinstance(state, dict) else state[:2]
    for _ in range(steps):
        optimizer.zero_grad()
        model(DATA.tensors[0][:16]).square().mean().backward()
        optimizer.step()


def test_a_state_may_be_a_tuple(modelprobe: ModelProbe) -> None:
    def make_pair() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Digits()
        return model, torch.optim.Adam(model.parameters())

    found = checks.resume.outcome(
        modelprobe,
        make_pair,
        train_plainly,
        save=lambda pair: {"model": pair[0].state_dict(), "random": torch.get_rng_state()},
        load=lambda pair, saved: (pair[0].load_state_dict(saved["model"]), torch.set_rng_state(saved["random"])),
    )
    assert first_line(found).startswith("optimizer: exp_avg of fc1.weight is lost: ")


class Loop:
    """A state that is an object, with numbers, a tensor and a generator of its own."""

    def __init__(self) -> None:
        self.model = Digits()
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.step = 0
        self.mean = torch.zeros(64)
        self.order = np.random.default_rng(0)
        self.loss = nn.functional.cross_entropy

    def run(self, steps: int) -> None:
        for _ in range(steps):
            x, y = DATA[self.order.permutation(256)[:32]]
            self.mean += 0.1 * (x.mean(0) - self.mean)
            self.optimizer.zero_grad()
            (self.loss(self.model(x - self.mean), y) * 0.9**self.step).backward()
            self.optimizer.step()
            self.step += 1


@pytest.mark.parametrize(
    ("attribute", "said"),
    [
        (
            "step",
            "step: the value is not restored: 0 after load, and 3 when saved; step 3 is the first that differs, at",
        ),
        ("mean", "mean: the tensor is not restored: it is another after load, by 9 %"),
        (
            "order",
            "order: the state is not restored: it is another after load; step 3 is the first that differs, at the",
        ),
    ],
)
def test_numbers_tensors_and_generators_of_an_object_are_named(
    modelprobe: ModelProbe, attribute: str, said: str
) -> None:
    def save(loop: Loop) -> State:
        own = {
            "model": loop.model.state_dict(),
            "optimizer": loop.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        return {**own, "step": loop.step, "mean": loop.mean, "order": loop.order.bit_generator.state}

    def load(loop: Loop, saved: State) -> None:
        loop.model.load_state_dict(saved["model"])
        loop.optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
        if attribute != "step":
            loop.step = saved["step"]
        if attribute != "mean":
            loop.mean = saved["mean"]
        if attribute != "order":
            loop.order.bit_generator.state = saved["order"]

    assert first_line(checks.resume.outcome(modelprobe, Loop, Loop.run, save=save, load=load)).startswith(said)


def test_what_has_no_state_that_is_known_is_said(modelprobe: ModelProbe) -> None:
    found = checks.resume(modelprobe, lambda: {**make(), "rows": iter(DATA)}, train, **all_but("rows"))
    assert found.text.endswith("; not looked at, as their state is not known: rows (iterator)")


# --- wrong use --------------------------------------------------------------------------------------------------------


def two_models() -> State:
    first, second = Digits(), Digits()
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
    return {"generator": first, "critic": second, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"at": 0}, "at= is a step within the run, from 1 to steps - 1; got at=0, steps=6"),
        ({"at": 6}, "at= is a step within the run, from 1 to steps - 1; got at=6, steps=6"),
        ({"steps": 2.5}, "at= is a step within the run, from 1 to steps - 1; got at=3, steps=2.5"),
        ({"make": Digits()}, "make is a function, make(); got Digits"),
        ({"train": None}, "train is a function, train(state, steps); got NoneType"),
        ({"load": 3}, "load is a function, load(state, saved); got int"),
        (
            {"make": lambda: {"optimizer": 3}},
            (
                "make() returned no model: it returns a torch.nn.Module, or a dict, a tuple or an object that holds "
                "one; got dict"
            ),
        ),
        (
            {"make": two_models},
            (
                "make() returned 2 models that may be the one that is trained, generator (Digits) and critic (Digits): "
                'hold them in one torch.nn.ModuleDict, or name the one to watch "model"'
            ),
        ),
        (
            {"train": lambda state, steps: train(state, steps + 1)},
            "train(state, 6) took more steps of an optimizer of Digits: train goes on for as many steps as it is told",
        ),
        ({"train": lambda state, steps: None}, "train(state, 6) took 0 steps of an optimizer of Digits: train goes on"),
    ],
)
def test_wrong_use_is_one_clear_sentence(modelprobe: ModelProbe, options: State, said: str) -> None:
    functions = {"make": make, "train": train, **all_but(), **options}
    with pytest.raises(UsageError, match="^" + re.escape(said)) as error:
        checks.resume(modelprobe, functions.pop("make"), functions.pop("train"), **functions)
    assert "\n" not in str(error.value)


def test_an_error_of_the_user_says_where_it_was_raised(modelprobe: ModelProbe) -> None:
    def load(state: State, saved: State) -> None:
        raise KeyError("optimizer")

    with pytest.raises(KeyError) as error:
        checks.resume(modelprobe, make, train, save=all_but()["save"], load=load)
    assert error.value.__notes__ == ["raised in load(state, saved), which checks.resume called"]
