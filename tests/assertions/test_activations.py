"""Dead layers, dead units, values that are not finite: found where they are, and nowhere else."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelprobe import (
    ModelProbe,
    NothingObservedError,
    Record,
    UsageError,
    Watch,
    assert_finite,
    assert_no_dead_layers,
)

X = torch.linspace(-1, 1, 24).reshape(4, 6)


def failure_of(assertion: Callable[..., None], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(AssertionError) as failure:
        assertion(*args, **kwargs)
    return str(failure.value)


def run(model: nn.Module, *args: torch.Tensor, **kwargs: Any) -> Record:
    return ModelProbe().run(model, *(args or (X,)), **kwargs)


def linear(inputs: int = 6, outputs: int = 6, *, bias: float | None = 0.0, weight: float | None = None) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=bias is not None)
    with torch.no_grad():
        if bias is not None:
            layer.bias.fill_(bias)
        if weight is not None:
            layer.weight.fill_(weight)
    return layer


class Net(nn.Module):
    """A model from layers by name and a forward as a function of it."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self._run = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, *args, **kwargs)


# --- dead layers --------------------------------------------------------------------------------------------------


def dead_relu() -> nn.Module:
    return Net(lambda m, x: m.fc2(m.relu(m.fc1(x))), fc1=linear(bias=-20.0), relu=nn.ReLU(), fc2=linear())


def test_a_dead_layer_is_named_with_what_feeds_it() -> None:
    record = run(dead_relu())
    entered = record.layers["relu"].calls[0].inputs[0].forward.statistics
    assert entered is not None
    assert failure_of(assert_no_dead_layers, record) == (
        "relu is dead: all 24 outputs are 0 in 1 forward; 1 of 4 layers looked at\n"
        "\n"
        "layer   type   outputs   dead units   input min   input max\n"
        f"relu    ReLU        24          6/6   {entered.min:9.4g}   {entered.max:9.4g}\n"
        "\n"
        "Every input of relu is negative: look at the bias or the scale of fc1, which feeds it."
    )


def test_a_functional_activation_is_seen_where_its_output_goes() -> None:
    model = Net(lambda m, x: m.fc2(F.relu(m.fc1(x))), fc1=linear(bias=-20.0), fc2=linear())
    assert failure_of(assert_no_dead_layers, run(model)) == (
        "fc2 input is dead: all 24 values it receives are 0 in 1 forward; 1 of 3 layers looked at\n"
        "\n"
        "layer       type     outputs   dead units   input min   input max\n"
        "fc2 input   Linear        24          6/6           -           -\n"
        "\n"
        "The zeros are produced between fc1 and fc2: look at the function called there. "
        'If this is intended: layers=["**", "!fc2"].'
    )


def test_what_only_passes_zeros_on_is_not_named() -> None:
    model = nn.Sequential(linear(bias=-20.0), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 6, bias=False), nn.Flatten())
    text = failure_of(assert_no_dead_layers, run(model, mode="train"))
    assert re.search(r"^1 +ReLU", text, re.MULTILINE)
    assert "1 of 6 layers looked at" in text


def test_a_container_is_not_named_for_what_is_dead_inside() -> None:
    block = Net(lambda m, x: m.act(m.fc(x)) * 2, fc=linear(bias=-20.0), act=nn.ReLU())
    text = failure_of(assert_no_dead_layers, run(nn.Sequential(block, linear())))
    assert text.startswith("0.act is dead: ")
    assert "1 of 5 layers looked at" in text


def test_a_call_is_dead_though_another_call_of_the_layer_is_alive() -> None:
    model = Net(lambda m, x: m.act(m.fc2(m.act(m.fc1(x)))), fc1=linear(), fc2=linear(bias=-20.0), act=nn.ReLU())
    text = failure_of(assert_no_dead_layers, run(model, loss="random"))
    assert text.startswith("act (call 2) is dead: all 24 outputs are 0 in 1 forward; 1 of 4 layers looked at\n")
    assert text.endswith(
        "Every input of act (call 2) is negative: look at the bias or the scale of fc2, which feeds it."
    )


def recurrent(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = F.relu(model.init(x))
    for _ in range(3):
        hidden = model.cell(hidden) + x
    return hidden


class ReZero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = linear(), nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.fc(x)


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "given zeros": lambda: Net(lambda m, x: m.b(m.a(0 * x) * x), a=nn.Identity(), b=linear(bias=None)),
    "a state that begins with zeros": lambda: Net(
        lambda m, x: m.step(torch.zeros_like(y := m.encode(x))) + y, encode=linear(), step=linear(bias=0.5)
    ),
    "behind a layer of zeros": lambda: Net(
        lambda m, x: m.b(m.zero(x) * m.a(x)), zero=linear(weight=0.0), a=linear(), b=linear(bias=0.5)
    ),
    "zeros that the layer around was given": lambda: Net(
        lambda m, x: m.block(x, torch.zeros_like(x)),
        block=Net(lambda m, x, gate: m.b(m.a(x) * gate), a=linear(), b=linear(bias=0.5)),
    ),
    "a recurrent state": lambda: Net(recurrent, init=linear(bias=-20.0), cell=linear()),
    "one living output": lambda: Net(lambda m, x: (m.fc(x) * 0, m.fc(x)), fc=linear()),
    "padding": lambda: Net(
        lambda m, x: m.embed(torch.tensor([[1, 2]])) + m.embed(torch.tensor([[0, 0]])),
        embed=nn.Embedding(4, 6, padding_idx=0),
    ),
    "a residual branch": lambda: Net(
        lambda m, x: m.head(x + m.branch(m.norm(x))),
        norm=nn.LayerNorm(6),
        branch=nn.Sequential(linear(), nn.Tanh(), linear(weight=0.0)),
        head=linear(),
    ),
    "ReZero": lambda: nn.Sequential(ReZero(), linear()),
}


@pytest.mark.parametrize("make", HEALTHY.values(), ids=HEALTHY)
def test_zeros_that_healthy_models_have_are_not_dead(make: Callable[[], nn.Module]) -> None:
    assert_no_dead_layers(run(make()))


def test_a_layer_that_learns_by_another_call_or_gets_no_gradient_at_all_has_no_zero_gradient() -> None:
    model = Net(lambda m, x: (m.a(x) * 0 + m.a(x), m.b(x)), a=linear(), b=linear())
    assert_no_dead_layers(run(model, loss=lambda out: out[0].sum()))


@pytest.mark.parametrize("name", ["a residual branch", "ReZero"])
def test_zero_gradients_before_what_is_zero_initialized_are_not_dead(name: str) -> None:
    assert_no_dead_layers(run(HEALTHY[name](), loss="random"))


def test_zero_initialized_norms_of_residual_blocks_are_not_dead() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.norm = linear(), linear(), nn.BatchNorm1d(6)
            nn.init.zeros_(self.norm.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(x + self.norm(self.fc2(F.relu(self.fc1(x)))))

    model = nn.Sequential(linear(), Block(), Block(), linear())
    assert_no_dead_layers(run(model, loss="random", mode="train", functionals=True))


def test_a_zero_initialized_layer_is_still_one_after_it_has_learned_in_the_only_forward() -> None:
    model = nn.Sequential(linear(), linear(weight=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model) as watch:
        (model(X) - 1).square().sum().backward()
        optimizer.step()
    assert_no_dead_layers(watch)


def test_zeros_of_a_function_at_the_end_of_a_container_are_made_in_its_code() -> None:
    text = failure_of(assert_no_dead_layers, run(Net(lambda m, x: F.relu(m.a(x)), a=linear(bias=-100.0))))
    assert text.startswith("(root) is dead: all 24 outputs are 0 in 1 forward;")
    assert "The zeros are produced in (root)'s own code, after a: look at that code." in text


def test_dead_in_the_newest_forward_is_enough() -> None:
    relu = nn.ReLU()
    with Watch(nn.Sequential(relu)) as watch:
        for x in (X, X, X - 10):
            watch.model(x)
    assert failure_of(assert_no_dead_layers, watch).startswith(
        "layer '0' (ReLU) is dead: all 24 outputs are 0 in the newest of 3 forwards; 1 of 2 layers looked at\n"
    )


def test_dead_in_an_older_forward_is_not() -> None:
    with Watch(nn.Sequential(nn.ReLU())) as watch:
        for x in (X - 10, X):
            watch.model(x)
    assert_no_dead_layers(watch)


# --- zero gradients -----------------------------------------------------------------------------------------------


def test_a_layer_whose_gradient_is_zero_throughout_is_named() -> None:
    model = Net(lambda m, x: m.b(m.a(x)) * 0 + x, a=linear(), b=linear())
    text = failure_of(assert_no_dead_layers, run(model, loss="random"))
    assert text.startswith(
        "b has a zero gradient: all 24 elements of its output's gradient are 0 in 1 backward; "
        "2 of 3 layers looked at\n\n"
        "layer   type     value    elements   range of values\n"
        "b       Linear   output         24   "
    )
    assert re.search(r"^a +Linear", text, re.MULTILINE)


def test_a_zero_gradient_before_a_layer_with_a_gradient_is_not_excused_by_what_comes_after_that() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        h = model.live(x + model.b(x) * 0)
        return h + model.zero(h)

    model = Net(forward, b=linear(), live=linear(), zero=linear(weight=0.0))
    with ModelProbe() as probe:
        record = probe.run(model, X, loss="random")
        assert failure_of(assert_no_dead_layers, record).startswith("b has a zero gradient: ")


# --- dead units ---------------------------------------------------------------------------------------------------


def half_dead() -> nn.Module:
    model = Net(lambda m, x: m.fc2(m.relu(m.fc1(x))), fc1=linear(), relu=nn.ReLU(), fc2=linear())
    with torch.no_grad():
        model.fc1.bias[:2] = -20
    return model


def test_dead_units_are_counted_over_the_batch() -> None:
    record = run(half_dead())
    assert_no_dead_layers(record, max_dead_units=2)
    assert failure_of(assert_no_dead_layers, record, max_dead_units=1) == (
        "relu has 2 dead units of 6, 1 allowed; 1 of 4 layers looked at\n"
        "\n"
        "layer   type   dead units   share\n"
        "relu    ReLU          2/6     33%\n"
        "\n"
        "A dead unit is zero for every input of the test: use more inputs, or look at the bias and the learning rate "
        "of what feeds relu."
    )


def test_a_share_of_units_is_a_float() -> None:
    record = run(half_dead())
    assert_no_dead_layers(record, max_dead_units=0.34)
    text = failure_of(assert_no_dead_layers, record, max_dead_units=0.125)
    assert text.startswith("relu has 2 dead units of 6, 12.5% allowed;")
    for allowed in (-1, 1.5, math.nan):
        with pytest.raises(UsageError, match="max_dead_units is a number of units"):
            assert_no_dead_layers(record, max_dead_units=allowed)


def test_a_unit_that_lives_in_one_forward_is_alive() -> None:
    relu = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU())
    with torch.no_grad():
        relu[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
    with Watch(relu) as watch:
        relu(torch.ones(3, 1))
        assert "1 dead unit of 2" in failure_of(assert_no_dead_layers, watch, max_dead_units=0)
        relu(-torch.ones(3, 1))
    assert_no_dead_layers(watch, max_dead_units=0)


def test_a_layer_is_not_charged_with_the_units_that_were_dead_before_it() -> None:
    model = half_dead()
    model.relu = nn.Sequential(nn.ReLU(), nn.Identity(), nn.Hardtanh(0, 1e6))
    text = failure_of(assert_no_dead_layers, run(model), max_dead_units=0)
    assert text.startswith("relu.0 has 2 dead units of 6")
    assert "1 of 7 layers looked at" in text


def test_units_that_dropout_zeroes_by_chance_are_not_counted() -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.9))
    assert_no_dead_layers(run(model, X[:1], mode="train"), max_dead_units=0)


def test_unknown_units_are_an_error_and_not_a_pass() -> None:
    model = Net(lambda m, x: x * 2)
    with pytest.raises(NothingObservedError, match="the units of none of the 1 layer looked at are known"):
        assert_no_dead_layers(run(model), max_dead_units=3)


# --- finite -------------------------------------------------------------------------------------------------------


class Log(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x)


def test_the_origin_is_named_with_the_operation_and_the_calls_before_it() -> None:
    line = inspect.getsourcelines(Log.forward)[1] + 1
    model = Net(
        lambda m, x: m.tail(m.log(m.c(m.b(m.a(x))))),
        a=nn.Identity(),
        b=nn.Tanh(),
        c=nn.Identity(),
        log=Log(),
        tail=linear(),
    )
    text = failure_of(assert_finite, run(model, torch.tensor([[-1.0, 0.5, 1.0, 2.0, 3.0, 4.0]])))
    assert text == (
        "log is not finite: its output has 1 NaN of 6 elements, its input is finite from -0.7616 to 0.9993; "
        "3 of 6 layers looked at\n"
        "\n"
        "layer   type       input min   input max   output min   output max   not finite\n"
        "a       Identity          -1           4           -1            4   -\n"
        "b       Tanh              -1           4      -0.7616       0.9993   -\n"
        "c       Identity     -0.7616      0.9993      -0.7616       0.9993   -\n"
        "log     Log          -0.7616      0.9993      -0.7719   -0.0006709   1 NaN of 6 elements\n"
        "\n"
        f"It began in torch.log at test_activations.py:{line}, input min -0.7616, max 0.9993."
    )


def test_glue_between_layers_is_named_by_its_neighbors() -> None:
    model = Net(lambda m, x: m.b(torch.log(m.a(x))), a=nn.Identity(), b=linear())
    text = failure_of(assert_finite, run(model))
    assert text.startswith(
        "b input is not finite: 12 NaN of 24 elements, made between a and b; 2 of 3 layers looked at\n"
    )
    assert text.endswith("\n\nLook at the code between a and b.")


def test_glue_after_the_last_layer_is_placed_after_it() -> None:
    model = Net(lambda m, x: torch.log(m.a(x)), a=nn.Identity())
    text = failure_of(assert_finite, run(model))
    assert text.startswith(
        "(root) is not finite: its output has 12 NaN of 24 elements, its input is finite from -1 to 1, the output of a "
        "is finite; 1 of 2 layers looked at\n"
    )
    assert text.endswith("\n\nLook at the code after a in the forward.")


def test_bad_data_is_blamed_on_the_data() -> None:
    x = X.clone()
    x[0, :2] = math.nan
    text = failure_of(assert_finite, run(nn.Sequential(linear()), x))
    assert text.startswith(
        "model input is not finite: (root) input has 2 NaN of 24 elements; 2 of 2 layers looked at\n"
    )
    assert text.endswith("\n\nLook at the data that the model is called with.")


def test_a_bad_parameter_is_named() -> None:
    model = nn.Sequential(linear(), linear())
    with torch.no_grad():
        model[1].weight[0, 0] = math.inf
    text = failure_of(assert_finite, run(model))
    assert text.startswith("1.weight is not finite: the output of layer '1' (Linear) has ")
    assert "assert_grad_finite" in text


def masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return scores + mask


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.softmax, self.tail = linear(6, 4), nn.Softmax(dim=-1), linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.tail(self.softmax(masked(self.fc(x), mask)))


def test_a_mask_of_infinities_is_an_input_like_others() -> None:
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, -math.inf)
    assert_finite(run(Attention(), X, mask))


def test_a_row_masked_throughout_is_blamed_on_the_softmax() -> None:
    mask = torch.zeros(4, 4)
    mask[2] = -math.inf
    text = failure_of(assert_finite, run(Attention(), X, mask))
    assert text.startswith(
        "softmax is not finite: its output has 4 NaN of 16 elements, its input has 4 -inf of 16 elements;"
    )
    assert "Softmax over a row of -inf" in text


def test_the_first_layer_is_named_though_a_later_one_alone_is_looked_at() -> None:
    model = Net(lambda m, x: m.b(m.a(x)), a=Log(), b=nn.Identity())
    text = failure_of(assert_finite, run(model), layers="b")
    assert text.startswith("a is not finite: ")
    assert "1 of 1 layer looked at" in text


def test_of_several_forwards_the_first_bad_one_is_named() -> None:
    model = Net(lambda m, x: m.fc(m.log(x)), log=Log(), fc=linear())
    with Watch(model) as watch:
        for x in (X + 2, X + 2, X, X * math.nan):
            model(x)
    assert failure_of(assert_finite, watch).startswith("log is not finite from forward 3 of 4 on: its output has ")


# --- nothing to look at -------------------------------------------------------------------------------------------


def test_a_watch_that_saw_nothing() -> None:
    watch = Watch(linear())
    with pytest.raises(
        NothingObservedError, match=r"^Linear was never called while it was watched: call it \(a compiled function"
    ):
        assert_finite(watch)
    watch.close()
    with pytest.raises(NothingObservedError, match=r"^the watch on Linear was closed before the model was called"):
        assert_finite(watch)


def test_no_selected_layer_was_called() -> None:
    record = run(Net(lambda m, x: m.a(x), a=linear(), b=linear(), c=linear()))
    with pytest.raises(
        NothingObservedError,
        match=r"^b was never called, nor any of 1 other selected, in 1 forward of Net: select layers",
    ):
        assert_finite(record, layers=["b", "c"])


def test_a_record_without_numbers() -> None:
    record = ModelProbe().architecture(nn.Sequential(linear()), X)
    with pytest.raises(NothingObservedError, match="none of the 2 layers looked at returned floating-point values"):
        assert_finite(record)


def test_a_model_in_place_of_a_record() -> None:
    with pytest.raises(UsageError, match=r"got Linear: record = modelprobe.run"):
        assert_finite(linear())


def test_a_record_of_the_structure_alone_says_why() -> None:
    class Item(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.sum().item().as_integer_ratio()[0]

    with pytest.raises(NothingObservedError, match=r"Item was never called \(structure without shapes: .*: run it on"):
        assert_finite(ModelProbe().architecture(Item(), X))
    with pytest.raises(NothingObservedError, match=r"^Linear was never called: run it on inputs, modelprobe.run"):
        assert_finite(ModelProbe().architecture(linear()))
