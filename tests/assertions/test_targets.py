"""A target that is compared with: it gets no gradient, and a healthy twin that is detached says nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pytest_modelprobe import (
    ModelProbe,
    NothingObservedError,
    Record,
    SelectionError,
    assert_no_gradient,
)
from pytest_modelprobe.record import Call, Layer, Parameter, Reading, Value

PROBE = ModelProbe()
X = PROBE.randn(8, 4)


class Distilled(nn.Module):
    """A student that learns what a teacher says."""

    def __init__(self, stop: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.student = nn.Linear(4, 3)
        self.teacher = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
        self.stop = stop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mse_loss(self.student(x), self.stop(self.teacher(x)))


def trained(model: nn.Module) -> Record:
    return ModelProbe().run(model, X, loss=lambda loss: loss)


def test_a_teacher_that_is_not_detached_fails_and_a_detached_one_passes():
    assert_no_gradient(trained(PROBE.build(lambda: Distilled(torch.Tensor.detach))), "teacher.**")
    record = trained(PROBE.build(lambda: Distilled(lambda target: target)))
    with pytest.raises(AssertionError) as error:
        assert_no_gradient(record, "teacher.**")
    first, table, advice = str(error.value).split("\n\n")
    assert first == "teacher output gets a gradient; 3 of 3 layers looked at in 1 backward"
    lines = table.splitlines()
    assert [line.rsplit(maxsplit=1)[0].rstrip() for line in lines] == [
        "gradient of        type         kind",
        "teacher output     Sequential   output",
        "teacher.1 output   Tanh         output",
        "teacher.0 output   Linear       output",
        "teacher.0.weight   Linear       parameter",
        "teacher.0.bias     Linear       parameter",
    ]
    assert advice == (
        "The loss reaches teacher output: detach it before it is compared with, or call teacher under torch.no_grad()."
    )


def test_a_frozen_teacher_gets_a_gradient_at_its_outputs_if_the_student_is_before_it():
    class Behind(Distilled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mse_loss(self.teacher(nn.functional.pad(self.student(x), (0, 1))), torch.zeros(8, 3))

    model = PROBE.build(lambda: Behind(nn.Identity()))
    model.teacher.requires_grad_(requires_grad=False)
    with pytest.raises(AssertionError, match="teacher output gets a gradient; 3 of 3 layers looked at"):
        assert_no_gradient(trained(model), "teacher.**")


def learn_value(online: nn.Module, target: nn.Module, *, detach: bool) -> None:
    """Take a step toward a reward plus the value of the next state, as Q-learning does."""
    optimizer = torch.optim.SGD(online.parameters(), 0.1)
    following = 1 + 0.9 * target(X.roll(1, 0))
    mse_loss(online(X), following.detach() if detach else following).backward()
    optimizer.step()


@pytest.mark.parametrize("detach", [True, False])
def test_a_target_network_is_watched_with_the_model(modelprobe, detach):
    online = modelprobe.build(lambda: nn.Linear(4, 1))
    watch = modelprobe.watch(nn.ModuleDict({"online": online, "target": copy.deepcopy(online)}))
    learn_value(watch.model["online"], watch.model["target"], detach=detach)
    if detach:
        assert_no_gradient(watch, "target")
    else:
        with pytest.raises(AssertionError, match="target output gets a gradient; 1 of 1 layer looked at in 1 backward"):
            assert_no_gradient(watch, "target")


@pytest.mark.parametrize("detach", [True, False])
def test_a_target_network_is_watched_alone(modelprobe, detach):
    online = modelprobe.build(lambda: nn.Linear(4, 1))
    watch = modelprobe.watch(copy.deepcopy(online))
    learn_value(online, watch.model, detach=detach)
    if detach:
        assert_no_gradient(watch, "**")
    else:
        with pytest.raises(AssertionError, match=r"\(root\) output gets a gradient"):
            assert_no_gradient(watch, "**")


def test_a_target_that_shares_its_weights_fails_with_their_other_name():
    class Shared(Distilled):
        def __init__(self) -> None:
            super().__init__(torch.Tensor.detach)
            self.teacher = nn.Sequential(nn.Linear(4, 3))
            self.teacher[0].weight = self.student.weight

    with pytest.raises(AssertionError) as error:
        assert_no_gradient(trained(PROBE.build(Shared)), "teacher.**")
    first, *_, advice = str(error.value).split("\n\n")
    assert first == "teacher.0.weight gets a gradient; 1 of 2 layers looked at in 1 backward"
    assert advice == (
        "Its outputs get none, so other code uses its parameters: they are shared with student.weight; copy.deepcopy "
        "makes a copy."
    )


def test_gradients_that_a_forward_computes_itself_do_not_count():
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x)[0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(4, 4), Force()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mse_loss(self.student(x), self.teacher(x))

    assert_no_gradient(trained(PROBE.build(Model)), "teacher.**")


def test_a_layer_that_was_never_called_was_not_seen():
    class Idle(Distilled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.student(x).sum()

    record = trained(Idle(nn.Identity()))
    with pytest.raises(NothingObservedError, match=r"teacher was never called"):
        assert_no_gradient(record, "teacher.**")
    with pytest.raises(SelectionError, match="techer"):
        assert_no_gradient(record, "techer")


def layer(value: Value, *parameters: Parameter) -> Record:
    call = Call(root="fc", root_training=True, index=0, outputs=(value,))
    fc = Layer(name="fc", type="Linear", calls=(call,), parameters=parameters)
    return Record(model="Net", layers={"fc": fc}, forwards=1, backwards=1)


def test_what_was_not_seen_is_an_error():
    unknown = Reading(tensors=0, reason="it was computed of another tensor in its place")
    weight = Parameter(name="weight", shape=(3, 4), dtype="float32", device="cpu", gradient=unknown)
    value = Value(path="output", shape=(8, 3), dtype="float32", device="cpu")
    with pytest.raises(NothingObservedError, match=r"whether fc\.weight gets a gradient is not known: it was computed"):
        assert_no_gradient(layer(value, weight), "fc")
    view = Value(path="output", shape=(8, 3), dtype="float32", device="cpu", requires_grad=True, overwritten=True)
    with pytest.raises(NothingObservedError, match="whether fc output gets a gradient is not known: it is a view"):
        assert_no_gradient(layer(view), "fc")
