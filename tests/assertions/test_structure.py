"""Shapes, dtypes, calls, hooks left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelprobe import (
    ModelProbe,
    ModelProbeError,
    NothingObservedError,
    Record,
    ShapeSpecError,
    UsageError,
    Watch,
    assert_called,
    assert_dtypes,
    assert_no_leftover_hooks,
    assert_shapes,
)

X = torch.linspace(-1, 1, 24).reshape(4, 6)


def failure_of(assertion: Callable[..., None], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(AssertionError) as failure:
        assertion(*args, **kwargs)
    return str(failure.value)


def run(model: nn.Module, *args: torch.Tensor, **kwargs: Any) -> Record:
    return ModelProbe().run(model, *(args or (X,)), **kwargs)


class Net(nn.Module):
    """A model from layers by name and a forward as a function of it."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self._run = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, *args, **kwargs)


def two_layers(**kwargs: Any) -> Record:
    return run(Net(lambda m, x: m.fc2(m.fc1(x)), fc1=nn.Linear(6, 16), fc2=nn.Linear(16, 2)), **kwargs)


# --- shapes -------------------------------------------------------------------------------------------------------


def test_shapes_that_match_pass() -> None:
    assert_shapes(two_layers(), {"fc1": "batch hidden", "fc2": ("batch", 2), "**": "batch _"}, dims={"batch": 4})


def test_a_shape_that_differs_is_told_with_the_layer_that_bound_the_dimension() -> None:
    assert failure_of(assert_shapes, two_layers(), {"fc1": "batch hidden", "fc2": "batch hidden"}) == (
        "fc2 output has shape (4, 2): dimension 1 is 2, but hidden is 16, bound by fc1 output; 1 of 2 shapes differs\n"
        "\n"
        "value        type     shape    specification   problem\n"
        "fc2 output   Linear   (4, 2)   batch hidden    dimension 1 is 2, but hidden is 16, bound by fc1 output\n"
        "\n"
        "Where a size is free, write _ for it; a name must mean the same size everywhere."
    )


def test_inputs_and_outputs_have_paths() -> None:
    record = run(Net(lambda m, x: m.lstm(x[None]), lstm=nn.LSTM(6, 3, batch_first=True)))
    assert_shapes(record, {"lstm": {"input": "1 4 6", "output[0]": "1 4 3", "output[1][0]": "1 1 3"}})
    text = failure_of(assert_shapes, record, {"lstm": {"output[1][1]": "1 1 4"}})
    assert text.startswith("lstm output[1][1] has shape (1, 1, 3): dimension 2 is 3, expected 4;")


def test_each_call_is_checked() -> None:
    model = Net(lambda m, x: m.fc(x)[:2] + m.fc(x[:2]), fc=nn.Linear(6, 6))
    text = failure_of(assert_shapes, run(model), {"fc": "4 6"})
    assert text.startswith("fc (call 2) output has shape (2, 6): dimension 0 is 2, expected 4; 1 of 2 shapes differs\n")


def test_a_size_that_varies_over_forwards_is_a_range() -> None:
    with Watch(nn.Linear(6, 2)) as watch:
        for n in (1, 3):
            watch.model(X[:n])
    assert_shapes(watch, {"(root)": "batch 2"})
    assert_shapes(watch, {"(root)": {"input": "batch _", "output": "batch 2"}})
    assert failure_of(assert_shapes, watch, {"(root)": "3 2"}).startswith(
        "(root) output has shape (1..3, 2): dimension 0 varies in 1..3, expected 3;"
    )


def test_a_name_is_bound_in_each_kind_of_forward() -> None:
    with Watch(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))) as watch:
        watch.model(X)
        watch.model.eval()(X[:3])
    assert_shapes(watch, {"0": "batch 4", "1": "batch 2"})
    text = failure_of(assert_shapes, watch, {"0": "batch width", "1": "batch width"}, dims={"width": 4})
    assert text.startswith(
        "layer '1' (Linear) output in train mode has shape (4, 2): dimension 1 is 2, but width is 4, "
    )
    assert "; 2 of 4 shapes differ\n" in text
    assert "\n1 output in eval mode " in text


def test_shapes_that_are_no_dict_or_none_are_an_error() -> None:
    for given in ("0", {}):
        with pytest.raises(UsageError, match=r"in a dict, assert_shapes\(record, \{'fc1': 'batch 16'\}\); got "):
            assert_shapes(two_layers(), given)  # type: ignore[arg-type]


def test_a_slip_in_a_spec_is_an_error() -> None:
    with pytest.raises(ShapeSpecError, match=r"'batch,16'; a token is .*, with spaces alone between tokens"):
        assert_shapes(two_layers(), {"fc1": "batch,16"})


def test_a_slip_in_a_path_is_an_error() -> None:
    with pytest.raises(NothingObservedError, match=r"fc1 has no value output\[0\]: it has output and input"):
        assert_shapes(two_layers(), {"fc1": {"output[0]": "4 16"}})


# --- dtypes -------------------------------------------------------------------------------------------------------


def test_a_dtype_that_differs_is_reported_with_what_went_in() -> None:
    model = Net(lambda m, x: m.b(m.a(x)), a=nn.Identity(), b=Net(lambda m, x: x.double()))
    assert failure_of(assert_dtypes, run(model), torch.float32, layers=["a", "b"]) == (
        "b output is float64, not float32; 1 of 2 outputs differs\n"
        "\n"
        "value      type   actual    expected   inputs\n"
        "b output   Net    float64   float32    float32\n"
        "\n"
        "Its inputs are float32: look for a cast (.to, .float, autocast) in or before it."
    )


def test_dtypes_by_layer() -> None:
    model = Net(lambda m, x: m.b(m.a(x)), a=nn.Identity(), b=Net(lambda m, x: x.double()))
    assert_dtypes(run(model), {"a": torch.float32, "b": torch.float64})
    assert failure_of(assert_dtypes, run(model), {"*": torch.float64}).startswith("a output is float32, not float64;")


def test_autocast_is_seen() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        record = two_layers()
    assert_dtypes(record, torch.bfloat16)
    assert "not float32" in failure_of(assert_dtypes, record, torch.float32)


def test_indices_masks_and_complex_numbers_have_dtypes_of_their_own() -> None:
    model = Net(lambda m, x: (m.f(x), x > 0, x.argmax(-1), x), f=Net(lambda m, x: torch.fft.fft(x)))
    record = run(model)
    assert_dtypes(record, "float32")
    assert_dtypes(record, torch.complex64)
    assert failure_of(assert_dtypes, record, torch.int64).startswith("(root) output[1] is bool, not int64;")


def test_layers_beside_a_dict_are_refused() -> None:
    with pytest.raises(UsageError, match="a dict of dtypes names its layers itself"):
        assert_dtypes(two_layers(), {"fc1": torch.float32}, layers="fc1")


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(NothingObservedError, match="returned no tensor of that kind: nothing was compared"):
        assert_dtypes(two_layers(), torch.int64)


# --- calls --------------------------------------------------------------------------------------------------------


def test_called_layers_pass() -> None:
    assert_called(two_layers())
    assert_called(two_layers(), "fc*", per_forward=1)


def test_a_layer_that_is_never_called_is_named() -> None:
    model = Net(lambda m, x: m.a(x), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    assert failure_of(assert_called, run(model)) == (
        "b was never called in 1 forward; 1 of 3 layers looked at\n"
        "\n"
        "layer   type     calls   expected\n"
        "b       Linear       0   1 or more\n"
        "\n"
        "Called in this order: a. Calling .forward() itself runs no hooks: call the module."
    )


def test_another_number_of_calls_is_reported() -> None:
    record = run(Net(lambda m, x: m.b(m.a(m.a(x))), a=nn.Linear(6, 6), b=nn.Linear(6, 6)))
    assert_called(record, "a", per_forward=2)
    assert failure_of(assert_called, record, "b", per_forward=2).startswith(
        "b was called 1 time in a forward, not 2; 1 of 1"
    )
    assert failure_of(assert_called, record, "a", per_forward=1).startswith(
        "a was called 2 times in a forward, not 1; 1 of "
    )


def test_never_can_be_asserted() -> None:
    record = run(Net(lambda m, x: m.a(x), a=nn.Linear(6, 6), b=nn.Linear(6, 6)))
    assert_called(record, "b", per_forward=0)
    assert failure_of(assert_called, record, "a", per_forward=0).startswith("a was called 1 time in a forward, not 0;")


def test_calls_are_counted_in_each_forward() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for _ in range(len(x)):
            x = model.a(x)
        return x

    with Watch(Net(forward, a=nn.Linear(6, 6))) as watch:
        watch.model(X)
        watch.model(X[:2])
    assert failure_of(assert_called, watch, "a", per_forward=4).startswith(
        "a was called 2 to 4 times in a forward, not 4;"
    )


def test_what_only_holds_layers_counts_as_called_with_them() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(6, 6)})])
            self.empty, self.parameters_ = nn.ModuleList(), nn.ParameterList([torch.ones(1)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[0]["a"](x)

    record = run(Holder())
    assert_called(record)
    assert_called(record, per_forward=1)


def test_weights_that_are_used_without_a_call_or_tied_are_spoken_of() -> None:
    said = "The parameters of a are used without calling it: directly, or tied to another layer's."
    a, b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
    model = Net(lambda m, x: F.linear(x, m.a.weight), a=a)
    assert failure_of(assert_called, run(model, loss="random"), "a").endswith(said)
    a.weight = b.weight
    assert failure_of(assert_called, run(Net(lambda m, x: m.b(x), a=a, b=b)), "a").endswith(said)


class Attending(nn.Module):
    """As a library has it: a dropout that fused attention does without, and a projection used by its weight."""

    def __init__(self, *, calls: bool = False) -> None:
        super().__init__()
        self.dropout, self.used, self.calls = nn.Dropout(), nn.Linear(6, 6, bias=False), calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.used.weight)
        return self.dropout(x) if self.calls else x


def test_layers_that_lose_nothing_by_it_need_not_be_called() -> None:
    record = run(nn.Sequential(Attending(), Attending()), loss="random")
    assert_called(record)
    assert_called(record, per_forward=1)
    assert failure_of(assert_called, record, "**").startswith("0.dropout was never called in 1 forward; 4 of 7 layers")


def test_one_that_another_block_calls_has_to_be() -> None:
    record = run(nn.Sequential(Attending(calls=True), Attending()), loss="random")
    assert failure_of(assert_called, record).startswith("1.dropout was never called in 1 forward; 1 of 5 layers")


def test_a_failure_names_those_that_lose_nothing_too() -> None:
    model = nn.Sequential(Attending(), Net(lambda m, x: x, spare=nn.Sequential(nn.Linear(6, 6))))
    text = failure_of(assert_called, run(model, loss="random"))
    assert text.startswith("1.spare was never called in 1 forward; 2 of 5 layers looked at")
    assert text.endswith("\n\nAlso not called, without unused weights: 0.dropout and 0.used.")


# --- hooks --------------------------------------------------------------------------------------------------------


def leave(*_: Any) -> None:
    """Left behind."""


def test_a_hook_is_named_with_its_layer() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(leave)
    assert failure_of(assert_no_leftover_hooks, model) == (
        f"layer '0' (Linear) has a forward hook left on it: {__name__}.leave; 1 hook in all\n"
        "\n"
        "layer   kind           hook\n"
        f"0       forward hook   {__name__}.leave\n"
        "\n"
        "Keep the handle that register_... returns, and call its remove(), also after an error."
    )


def test_a_hook_of_the_backward_is_found() -> None:
    model = nn.Linear(2, 2)
    model.register_full_backward_hook(leave)
    assert failure_of(assert_no_leftover_hooks, model).startswith("(root) has a backward hook left on it: ")


def test_hooks_on_parameters_are_found() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight.register_hook(leave)
    assert failure_of(assert_no_leftover_hooks, model).startswith("layer '0' (Linear) has a hook on weight left on it")


def test_of_a_watch_only_hooks_that_came_since_count() -> None:
    model = nn.Sequential(nn.Linear(6, 2), nn.ReLU())
    model[0].register_forward_hook(leave)
    probe = ModelProbe()
    with probe.watch(model) as watch:
        assert_no_leftover_hooks(watch)
        assert_no_leftover_hooks(probe)
        model[1].register_forward_hook(leave)
        assert failure_of(assert_no_leftover_hooks, probe).startswith(
            "layer '1' (ReLU) has a forward hook left on it: "
        )


def test_hooks_that_a_torch_keeps_elsewhere_are_not_taken_for_none() -> None:
    model = nn.Sequential(nn.Linear(6, 2))
    del model[0]._forward_hooks
    with pytest.raises(
        ModelProbeError,
        match=r"^torch \S+ has no Linear\._forward_hooks, without which it is not known whether a forward hook",
    ):
        assert_no_leftover_hooks(model)


def test_a_record_has_no_model() -> None:
    with pytest.raises(UsageError, match="a record has no model to look for hooks on: give the model itself"):
        assert_no_leftover_hooks(two_layers())
