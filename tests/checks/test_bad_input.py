"""The checks of the battery on models and inputs they cannot say much of: a reason, no traceback of their own."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, checks
from pytest_modelprobe.exceptions import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")


class Calling(nn.Module):
    """A linear layer with any code around it."""

    def __init__(self, code: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.code = code

    def forward(self, *args: Any) -> Any:
        return self.code(self.linear, *args)


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError("it holds a file that is open")


def four_rows_only(linear: nn.Module, x: Tensor) -> Any:
    if len(x) != 4:
        raise ValueError("four rows only")
    return linear(x)


def slope(linear: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(linear(x).tanh().sum(), x, create_graph=True)[0]


def quantized(linear: nn.Module, x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(linear(x).detach().float(), 0.1, 0, torch.qint8)


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:
        raise RuntimeError("no backward of it")


def overwritten(linear: nn.Module, x: Tensor) -> Tensor:
    h = linear(x).exp()
    y = h.square()
    h.add_(1)
    return y


X = torch.linspace(-1, 1, 12).reshape(4, 3)
PACKED = nn.utils.rnn.pack_padded_sequence(X.reshape(2, 2, 3), [2, 1], batch_first=True)

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "no parameters": (nn.ReLU, (X,)),
    "frozen": (lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).requires_grad_(False), (X,)),
    "integers out": (lambda: Calling(lambda linear, x: linear(x).argmax(-1)), (X,)),
    "nothing out": (lambda: Calling(lambda linear, x: None), (X,)),
    "a dict in and out": (lambda: Calling(lambda linear, given: {"y": linear(given["x"])}), ({"x": X},)),
    "a scalar in": (lambda: Calling(lambda linear, x: x * linear.weight), (torch.tensor(2.0),)),
    "bools in": (lambda: Calling(lambda linear, x: linear(x.to(linear.weight.dtype))), (X > 0,)),
    "sparse in": (lambda: Calling(lambda linear, x: torch.sparse.mm(x, linear.weight.T)), (X.to_sparse(),)),
    "packed in": (lambda: nn.LSTM(3, 2, batch_first=True), (PACKED,)),
    "no batch": (lambda: nn.Linear(3, 2), (X[0],)),
    "not to be copied": (lambda: nn.Sequential(Uncopied(3, 2)), (X,)),
    "raises": (lambda: Calling(lambda linear, x: linear(x[0, 0])), (X,)),
    "lazy": (lambda: nn.LazyLinear(2), (X,)),
    "meta": (lambda: nn.Linear(3, 2, device="meta"), (X,)),
    "takes a gradient itself": (lambda: Calling(slope), (X,)),
    "quantized out": (lambda: Calling(quantized), (X,)),
    "its backward raises": (lambda: Calling(lambda linear, x: NoBackward.apply(linear(x))), (X,)),
    "overwritten before the backward": (lambda: Calling(overwritten), (X,)),
    "an input on meta": (lambda: nn.Linear(3, 2), (X.to("meta"),)),
    "half": (lambda: nn.Linear(3, 2).bfloat16(), (X.bfloat16(),)),
}
UNPICKLED = {"copy_and_pickle"}  # the code is a lambda


@pytest.mark.parametrize("name", MODELS)
def test_no_check_raises_or_complains_of_a_model_that_it_means_nothing_for(modelprobe: ModelProbe, name: str) -> None:
    factory, args = MODELS[name]
    outcomes = [
        check.outcome(modelprobe, factory(), *args) for key, check in checks.STANDARD.items() if key not in UNPICKLED
    ]
    assert [str(outcome) for outcome in outcomes if outcome.verdict == "broken"] == []


@pytest.mark.parametrize(
    "name", ["frozen", "a dict in and out", "sparse in", "its backward raises", "takes a gradient itself"]
)
def test_no_check_raises_with_a_loss(modelprobe: ModelProbe, name: str) -> None:
    factory, args = MODELS[name]

    def loss(output: Any) -> Tensor:
        tensors = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]
        floats = [x.to_dense() for x in tensors if isinstance(x, Tensor) and x.is_floating_point()]
        return sum((x.pow(2).mean() for x in floats), torch.zeros(()))

    for check in (checks.checkpoint_parity, checks.gradient_accumulation, checks.overfits_batch, checks.gradcheck):
        assert check.outcome(modelprobe, factory(), *args, loss=loss).text


def test_a_model_for_one_number_of_rows_takes_no_other(modelprobe: ModelProbe) -> None:
    outcome = checks.any_batch_size.outcome(modelprobe, Calling(four_rows_only), X)
    assert outcome.text.startswith("(root) takes no batch of 1, only of 4: (root) raised ValueError: four rows only")


@pytest.mark.parametrize(
    ("loss", "said"),
    [(lambda y: y.nothing, "loss= raised AttributeError"), (lambda y: 1.0, "got float"), (lambda y: y, r"\(4, 2\)")],
)
def test_a_loss_that_is_none_is_refused(modelprobe: ModelProbe, loss: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        checks.overfits_batch.outcome(modelprobe, nn.Linear(3, 2), X, loss=loss)


def test_inputs_that_are_all_the_same_leave_the_others_to_be_replaced(modelprobe: ModelProbe) -> None:
    model = Calling(lambda linear, types, x: linear(x).softmax(0) + types[:, :2])
    types = torch.zeros(4, 3, dtype=torch.long)
    assert checks.batch_independent.outcome(modelprobe, model, types, X).verdict == "broken"


def test_inputs_of_a_kind_that_cannot_be_varied_are_told(modelprobe: ModelProbe) -> None:
    model = Calling(lambda linear, x: linear(x.float()))
    outcome = checks.batch_independent.outcome(modelprobe, model, X.to(torch.float8_e5m2))
    assert outcome.verdict == "not applicable"
    assert outcome.text.startswith("input cannot be varied (float8_e5m2, strided): ")


@pytest.mark.parametrize("name", ["its backward raises", "overwritten before the backward"])
def test_a_model_whose_backward_raises_cannot_be_trained(modelprobe: ModelProbe, name: str) -> None:
    outcome = checks.overfits_batch.outcome(modelprobe, MODELS[name][0](), X, loss=lambda y: y.square().mean())
    assert outcome.text.startswith("(root) cannot be trained: in step 1 its backward raised RuntimeError: ")


def test_a_model_made_in_inference_mode_cannot_change(modelprobe: ModelProbe) -> None:
    with torch.inference_mode():
        model = nn.Linear(3, 2)
    with pytest.raises(UsageError, match=r"made under torch.inference_mode\(\) and cannot change: make it outside"):
        checks.deterministic(modelprobe, model, X)


# --- arguments ----------------------------------------------------------------------------------------------------

SQUARE: dict[str, Any] = {"loss": lambda y: y.square().mean()}

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("causal", {"axis": -9}, "no input has more than one position along axis -9"),
    ("overfits_batch", {**SQUARE, "steps": 0}, "steps= is 1 or more; got 0"),
    ("initialized", {"factory": lambda: None}, "factory= returns a torch.nn.Module; got NoneType"),
]


@pytest.mark.parametrize(("name", "options", "said"), WRONG)
def test_an_argument_that_is_none_is_refused(
    modelprobe: ModelProbe, name: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        getattr(checks, name)(modelprobe, nn.Linear(3, 2), X, **options)


@pytest.mark.parametrize("name", ["causal", "causal.outcome", "standard"])
def test_the_probe_comes_first(modelprobe: ModelProbe, name: str) -> None:
    called: Any = operator.attrgetter(name)(checks)
    with pytest.raises(UsageError) as error:
        called(nn.Linear(3, 2), modelprobe, X)
    name = f"checks.{name.removesuffix('.outcome')}"
    order = f"takes the probe, then the model: {name}(modelprobe, model, *inputs); got Linear, ModelProbe, Tensor"
    assert str(error.value) == f"{name} {order}"


# --- the battery --------------------------------------------------------------------------------------------------


DOES_NOT_RUN: list[tuple[Callable[[], nn.Module], tuple[Any, ...], str]] = [
    (lambda: nn.Linear(4, 2), (X,), "the model does not run on these inputs: (root) raised RuntimeError: "),
    (lambda: nn.Linear(3, 2), (), "missing 1 required positional argument"),
    (lambda: nn.LazyLinear(2), (X,), "the model is lazy and has seen no input: call it once before, model(...)"),
    (lambda: nn.Linear(3, 2, device="meta"), (X,), "the model is on the meta device"),
    (lambda: Calling(lambda linear, x: None), (X,), "the model returns None: is a return missing at the end of its fo"),
    (
        lambda: Calling(lambda linear, x: linear(x).tolist()),
        (X,),
        "the model returns no tensor with elements: there is",
    ),
]


@pytest.mark.parametrize(("factory", "inputs", "said"), DOES_NOT_RUN)
def test_a_model_that_does_not_run_is_not_fit_for_the_battery(
    modelprobe: ModelProbe, factory: Callable[[], nn.Module], inputs: tuple[Any, ...], said: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        checks.standard(modelprobe, factory(), *inputs)


def test_a_model_without_a_training_mode_is_fit_for_the_battery(modelprobe: ModelProbe) -> None:
    class Evaluated(nn.Linear):
        def train(self, mode: bool = True) -> Self:
            assert not mode
            return super().train(mode)

    outcomes = checks.standard(modelprobe, Evaluated(3, 2), X, only=["modes_agree", "checkpoint_parity", "eval_stable"])
    assert {outcome.check: outcome.verdict for outcome in outcomes} == {
        "modes_agree": "not applicable",
        "checkpoint_parity": "not applicable",
        "eval_stable": "holds",
    }


def test_a_model_that_runs_in_training_alone_is_fit_for_the_battery(modelprobe: ModelProbe) -> None:
    class Trained(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert self.training
            return super().forward(x)

    assert checks.standard(modelprobe, Trained(3, 2), X, only="seeded")[0].verdict == "not applicable"


CHOICES: list[tuple[dict[str, Any], str]] = [
    ({"only": ["seeded"], "skip": ["seeded"]}, "skip= and only= leave no check to run: seeded is skipped"),
    (
        {"skip": "gradcheck"},
        "skip= names gradcheck, which is no part of the standard checks, as",
    ),
    ({"only": "sead"}, "only= names a check 'sead' that there is not: is seeded meant?"),
]


@pytest.mark.parametrize(("options", "said"), CHOICES)
def test_a_choice_of_checks_that_are_not_there_is_refused(
    modelprobe: ModelProbe, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        checks.standard(modelprobe, nn.Linear(3, 2), X, **options)
