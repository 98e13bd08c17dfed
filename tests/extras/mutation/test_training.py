"""Each fault of a training program is planted in the call that it is for, and gone without a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional, init
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from pytest_modelprobe import ModelProbe, assert_params_updated, assert_training_loop
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.extras.mutation.operators import TRAINING, selected
from pytest_modelprobe.extras.mutation.planting import Observer
from pytest_modelprobe.extras.mutation.results import PROGRAM, Place, Planted, Seen


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 16)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 10)
        init.xavier_uniform_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.fc(x).relu()))


def train(model: Net, *, optimizer: Callable[..., Optimizer] = torch.optim.AdamW) -> Optimizer:
    """Train on 4 batches of 16 digits."""
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels[:64], dtype=torch.float32) / 16, torch.tensor(labels[:64]))
    made = optimizer(model.parameters(), lr=1e-2, weight_decay=0.1)
    model.train()
    for x, y in DataLoader(data, 16):
        made.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        made.step()
    return made


PLACES = {
    "optimizer": "AdamW",
    "step": "AdamW.step",
    "zero_grad": "AdamW.zero_grad",
    "loss": "cross_entropy",
    "mode": "Net.train",
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[Planted]:
    """Plant a fault in the call of `train` or of `Net` that it is for."""
    at = TRAINING[name].at
    place = Place(f"{__name__}:train", PLACES.get(at, ""), PROGRAM)
    if at == "init":
        place = Place(f"{__name__}:Net.__init__", "init.xavier_uniform_", PROGRAM)
    observer, fault = Observer(), Planted(place, TRAINING[name])
    with observer.installed(), observer.observing(Seen(), fault):
        yield fault
    assert fault.fired


def trained(name: str = "") -> tuple[Net, Any]:
    """Return a model that was trained, perhaps with a fault, and its watch."""
    with planted(name) if name else contextlib.nullcontext(), ModelProbe() as probe:
        model = probe.build(Net)
        watch = probe.watch(model, steps=4)
        torch.manual_seed(0)
        train(model)
    return model, watch


ASSERTIONS = {"assert_params_updated": assert_params_updated, "assert_training_loop": assert_training_loop}


@pytest.fixture(scope="module")
def clean() -> Any:
    """The watch of a training without a fault."""
    return trained()[1]


@pytest.mark.parametrize("name", sorted(TRAINING))
def test_what_a_fault_names_notices_it(name: str, clean: Any) -> None:
    _, watch = trained(name)
    by = TRAINING[name].noticed_by
    if by in ASSERTIONS:
        ASSERTIONS[by](clean)
        with pytest.raises(AssertionError):
            ASSERTIONS[by](watch)
    else:
        assert list(watch.steps) != list(clean.steps)


def functions() -> tuple[object, ...]:
    """Return what is exchanged while a program is seen, by the names that it has here and in torch."""
    return (
        Optimizer.__init__, Optimizer.zero_grad, nn.Module.zero_grad, nn.Module.train, init.uniform_,
        functional.cross_entropy,
    )  # fmt: skip


def test_faults_are_gone_after_the_block(clean: Any) -> None:
    before = functions()
    for name in TRAINING:
        with planted(name):
            assert not all(one is other for one, other in zip(before, functions(), strict=True))
            train(Net())
    assert all(one is other for one, other in zip(before, functions(), strict=True))
    assert list(trained()[1].steps) == list(clean.steps)


def test_each_fault_fits_the_call_that_it_is_for() -> None:
    seen, observer = Seen(), Observer()
    with observer.installed(), observer.observing(seen):
        train(Net())
    found = {(place.layer, fault) for place, faults in seen.of_training.items() for fault in faults}
    assert {name for _, name in found} == set(TRAINING)
    assert {(PLACES.get(fault.at, "init.xavier_uniform_"), name) for name, fault in TRAINING.items()} <= found
    assert seen.steps == 4


def test_observing_a_training_changes_no_bit() -> None:
    def outcome() -> list[Tensor]:
        torch.manual_seed(0)
        model = Net()
        train(model)
        return [*(parameter.detach().clone() for parameter in model.parameters()), torch.rand(2)]

    before, observer = outcome(), Observer()
    with observer.installed(), observer.observing(Seen()):
        during = outcome()
    assert all(map(torch.equal, before, during))


def test_a_call_of_the_package_is_none_of_the_program() -> None:
    seen, observer = Seen(), Observer()
    with observer.installed(), observer.observing(seen), ModelProbe() as probe:
        probe.run(nn.Linear(4, 2), probe.randn(2, 4), loss="random")
    assert not [place for place in seen.of_training if "pytest_modelprobe" in place.model]


def test_a_loss_compiles_as_before() -> None:
    observer, logits, labels = Observer(), torch.eye(3), torch.arange(3)
    with observer.installed(), observer.observing(Seen()):
        compiled = torch.compile(lambda: functional.cross_entropy(logits, labels), backend="eager", fullgraph=True)
        assert compiled().item() == functional.cross_entropy(logits, labels).item()


def test_faults_are_chosen_by_name_glob_or_group() -> None:
    assert selected("nan, lr_*") == {"nan", "lr_times_10", "lr_by_10", "lr_zero"}
    assert selected("training") == {*TRAINING, "no_dropout", "double_dropout"}
    with pytest.raises(UsageError, match=r"^no planted fault is named 'lr_tims_10'; did you mean lr_times_10\?$"):
        selected("lr_tims_10")


MODEL = """
import torch
from torch import nn
from torch.nn import functional

def train(steps=2):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(torch.eye(4)), torch.tensor([0, 1, 2, 0])).backward()
        optimizer.step()
    return model
"""


@pytest.mark.usefixtures("_plugin_alone", "_forked")
def test_what_survives_is_named_by_the_call_and_the_function_that_makes_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=MODEL + "def test_shape():\n    assert train().weight.shape == (3, 4)\n")
    result = pytester.runpytest_inprocess("--modelprobe-mutate", "--modelprobe-mutate-faults=training")
    result.stdout.fnmatch_lines(
        [
            "12 faults survived: the tests that run the layer or train passed",
            "SGD in train, 1 test: leave_out_parameters, lr_by_10, lr_times_10, lr_zero, other_optimizer",
            "SGD.step in train, 1 test: step_before_backward, zero_grad_before_step",
            "cross_entropy in train, 1 test: other_reduction, shuffle_labels",
            "drop_zero_grad * 1 * 1   assert_training_loop",
        ]
    )


@pytest.mark.usefixtures("_plugin_alone", "_forked")
def test_what_changes_no_parameter_gradient_or_output_is_no_effect(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=MODEL + "def test_shape():\n    assert train(1).weight.shape == (3, 4)\n")
    result = pytester.runpytest_inprocess("--modelprobe-mutate", "--modelprobe-mutate-faults=drop_zero_grad")
    result.stdout.fnmatch_lines(["no fault was tried that has an effect", "not counted: 1 fault that changed nothing"])


@pytest.mark.usefixtures("_plugin_alone", "_forked")
def test_a_loss_that_no_step_follows_changes_the_gradient(pytester: pytest.Pytester) -> None:
    tests = """
def test_gradient():
    model = train()
    loss = functional.cross_entropy(model(torch.eye(4)), torch.tensor([0, 1, 2, 0]))
    loss.backward()
"""
    pytester.makepyfile(test_it=MODEL + tests)
    result = pytester.runpytest_inprocess("--modelprobe-mutate", "--modelprobe-mutate-faults=shuffle_labels")
    result.stdout.fnmatch_lines(["cross_entropy in test_gradient, 1 test: shuffle_labels"])


@pytest.mark.usefixtures("_plugin_alone", "_forked")
def test_a_test_without_a_step_of_an_optimizer_has_no_training(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=MODEL + "def test_shape():\n    assert train(0).weight.shape == (3, 4)\n")
    result = pytester.runpytest_inprocess("--modelprobe-mutate", "--modelprobe-mutate-faults=training")
    result.stdout.fnmatch_lines(["no fault was tried that has an effect*"])
