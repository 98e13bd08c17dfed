"""What the hooks see: values, gradients, calls, contexts, sources; each fact of torch that this rests on."""

import contextlib
import dataclasses
import json
import threading
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from pytest_modelprobe import assert_all_params_have_grad, assert_grad_flow, statistics
from pytest_modelprobe.assertions.findings import findings
from pytest_modelprobe.exceptions import ModelProbeError, NothingObservedError
from pytest_modelprobe.probe import Watch
from pytest_modelprobe.record import Record

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Call(nn.Module):
    """A module whose forward is the function given; the modules given are its children."""

    def __init__(self, function, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def identities(names):
    return {name: nn.Identity() for name in names}


def randn(*shape, grad=False):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator).requires_grad_(grad)


def linear(*size):
    module = nn.Linear(*size)
    for parameter in module.parameters():
        parameter.data = randn(*parameter.shape)
    return module


def mlp():
    return nn.Sequential(linear(4, 8), nn.ReLU(), linear(8, 2))


def value(record, layer, path="output", call=0):
    call = record.layers[layer].calls[call]
    return next(v for v in (*call.inputs, *call.outputs) if v.path == path)


def parameter(record, layer, name):
    return next(p for p in record.layers[layer].parameters if p.name == name)


def reads(reading, *tensors):
    """Whether a reading is of these tensors together."""
    if reading is None or reading.statistics is None:
        return False
    elements = torch.cat([t.detach().flatten().double() for t in tensors])
    numbers = reading.statistics
    return (
        reading.tensors == len(tensors)
        and numbers.count == elements.numel()
        and numbers.min == elements.min()
        and numbers.max == elements.max()
        and abs(numbers.mean - elements.mean()) < 1e-5
        and abs(numbers.std - elements.std(correction=0)) < 1e-5
    )


def agree(a, b):
    """Whether two readings are the same but for rounding."""
    numbers = ("count", "zeros", "min", "max", "mean", "std")
    pairs = [(getattr(a.statistics, name), getattr(b.statistics, name)) for name in numbers]
    return a.tensors == b.tensors and all(x == pytest.approx(y, rel=1e-5) for x, y in pairs)


def gradient_of(function, *tensors):
    """Gradients of the sum of what a function returns, computed without the probe."""
    return torch.autograd.grad(function().sum(), tensors)


# --- values ---------------------------------------------------------------------------------------------------------


def test_each_call_records_what_goes_in_and_what_comes_out():
    model, x = mlp(), randn(3, 4)
    with Watch(model) as watch:
        out = model(x)
    assert reads(value(watch.record, "0", "input").forward, x)
    assert reads(value(watch.record, "0").forward, model[0](x))
    assert reads(value(watch.record, "(root)").forward, out)


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda y: {"logits": y}, "output.logits"),
        (lambda y: {"a": {"b": [y]}}, "output.a.b[0]"),
        (lambda y: Result(y), "output.logits"),
        (lambda y: Pair(y.detach(), y), "output.right"),
        (lambda y: [y.detach(), (y,)], "output[1][0]"),
    ],
    ids=["dict", "nested", "dataclass", "namedtuple", "list"],
)
def test_a_structured_output_has_values_and_gradients(wrap, path):
    model = nn.Sequential(Call(lambda self, x: wrap(self.fc(x)), fc=linear(4, 2)))
    x = randn(3, 4)
    with Watch(model) as watch:
        output = model(x)
        find(output).pow(2).sum().backward()
    assert reads(value(watch.record, "0", path).forward, model[0].fc(x))
    assert reads(value(watch.record, "0", path).backward, 2 * model[0].fc(x))


def find(output):
    """The tensor with a gradient in a nested output."""
    if isinstance(output, torch.Tensor):
        return output if output.requires_grad else None
    parts = vars(output).values() if dataclasses.is_dataclass(output) else output
    parts = output.values() if isinstance(output, dict) else parts
    return next((found for part in parts if (found := find(part)) is not None), None)


def test_an_argument_that_cannot_be_opened_makes_the_inputs_unknown():
    model = Call(lambda self, x, thing: x)
    with Watch(model) as watch:
        model(randn(2), object())
    assert not watch.record.layers["(root)"].calls[0].inputs_known


def test_an_input_is_read_before_the_layer_overwrites_it():
    model = nn.Sequential(linear(4, 8), nn.ReLU(inplace=True))
    x = randn(3, 4)
    with Watch(model) as watch:
        model(x)
    assert reads(value(watch.record, "1", "input").forward, model[0](x))


def test_other_contents_at_the_same_place_are_read_again():
    def overwrite(self, x):
        y = self.a(x)
        y.mul_(2)
        return self.b(y)

    model = Call(overwrite, a=linear(4, 4), b=nn.Identity())
    x = randn(3, 4)
    with Watch(model) as watch, torch.no_grad():
        model(x)
    assert reads(value(watch.record, "a").forward, model.a(x))
    assert reads(value(watch.record, "b", "input").forward, 2 * model.a(x))


@pytest.mark.parametrize(
    ("again", "x"),
    [
        (lambda x: x.view(torch.int32), randn(3)),
        (lambda x: x.conj().imag, torch.tensor([1 + 2j, 3 + 5j])),
    ],
    ids=["another dtype", "a negative view"],
)
def test_the_same_bytes_seen_otherwise_are_read_again(again, x):
    model = Call(lambda self, x: self.b((self.a(x.imag if x.is_complex() else x), again(x))[1]), **identities("ab"))
    with Watch(model) as watch:
        model(x)
    assert reads(value(watch.record, "b").forward, again(x))


def test_parameters_are_read_each_time_as_their_version_does_not_tell_of_writes_through_data():
    def write(self, x):
        self.look(self.weight)
        self.weight.data.add_(1)
        self.look(self.weight)
        return x

    model = Call(write, look=nn.Identity())
    model.weight = nn.Parameter(torch.zeros(3))
    with Watch(model) as watch:
        model(randn(2))
    first, second = (call.inputs[0].forward.statistics.max for call in watch.record.layers["look"].calls)
    assert (first, second) == (0, 1)


def test_units_follow_the_channels_of_the_producer():
    model = nn.Sequential(nn.Conv2d(3, 5, 1), nn.ReLU(), nn.Sequential(nn.Dropout(0.0)))
    with Watch(model) as watch:
        model(randn(2, 3, 4, 4))
    for name in ("0", "1", "2.0", "2", "(root)"):
        units = value(watch.record, name).forward.units
        assert (units.axis, len(units)) == (-3, 5)


def test_units_of_a_container_are_those_of_what_was_made_inside():
    inner = Call(lambda self, x: torch.sigmoid(self.relu(self.fc(x))), fc=linear(4, 4), relu=nn.ReLU())
    model = nn.Sequential(nn.Conv2d(3, 4, 1), inner)
    with Watch(model) as watch:
        model(randn(2, 3, 4, 4))
    assert [value(watch.record, name).forward.units.axis for name in ("0", "1.fc", "1.relu", "1")] == [-3, -1, -1, -1]


# --- gradients ------------------------------------------------------------------------------------------------------


def test_gradients_around_an_in_place_relu_after_a_convolution_are_right():
    conv = nn.Conv2d(3, 4, 3)
    model, x = nn.Sequential(conv, nn.ReLU(inplace=True)), randn(2, 3, 6, 6)
    before = conv(x)
    after = before.relu()
    expected = gradient_of(lambda: after.pow(2), before, after)
    with Watch(model) as watch:
        model(x).pow(2).sum().backward()
    assert reads(value(watch.record, "0").backward, expected[0])
    assert reads(value(watch.record, "1").backward, expected[1])


def test_an_input_made_by_glue_between_layers_has_its_own_gradient():
    model = Call(lambda self, x: self.b(self.a(x) + x), a=linear(4, 4), b=linear(4, 2))
    with Watch(model) as watch:
        model(randn(3, 4)).sum().backward()
    expected = torch.ones(3, 2) @ model.b.weight
    assert reads(value(watch.record, "b", "input").backward, expected)


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


@pytest.mark.parametrize(("function", "factor"), [(_Reverse, -1), (_Return, 3)])
def test_a_function_that_returns_its_input_has_two_gradients(function, factor):
    model = nn.Sequential(linear(4, 4), Call(lambda self, x: function.apply(x)))
    with Watch(model) as watch:
        model(randn(3, 4)).sum().backward()
    assert reads(value(watch.record, "1").backward, torch.ones(3, 4))
    assert reads(value(watch.record, "0").backward, factor * torch.ones(3, 4))


def test_a_detached_output_has_no_gradient_though_its_storage_has():
    model = Call(lambda self, x: self.b((y := self.a(x)).detach()) + y, a=linear(4, 4), b=linear(4, 4))
    with Watch(model) as watch:
        model(randn(3, 4)).sum().backward()
    assert value(watch.record, "b", "input").backward is None
    assert reads(value(watch.record, "a").backward, torch.ones(3, 4))


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.ReLU(inplace=True)),
        Call(lambda self, x: self.a(x).add_(1), a=nn.Sequential(linear(6, 6), nn.Unflatten(1, (2, 3)))),
    ],
    ids=["Flatten, ReLU(inplace)", "Unflatten, +="],
)
def test_a_view_that_is_overwritten_in_place_has_an_unknown_gradient(model):
    x = randn(2, 3, 4, 4) if isinstance(model, nn.Sequential) else randn(2, 6)
    with Watch(model) as watch:
        model(x).sum().backward()
    view = value(watch.record, "1" if isinstance(model, nn.Sequential) else "a.1")
    assert (view.overwritten, view.backward) == (True, None)
    assert not value(watch.record, "0" if isinstance(model, nn.Sequential) else "a.0").overwritten


def test_a_backward_inside_a_forward_is_kept_apart():
    def forward(self, x):
        energy = self.fc(x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force

    model, x = Call(forward, fc=linear(4, 1)), randn(3, 4, grad=True)
    with Watch(model) as watch:
        model(x).pow(2).sum().backward()
    assert reads(value(watch.record, "fc").backward_inner, torch.ones(3, 1))
    assert watch.record.backwards == watch.first.backwards == 1


def test_parameters_that_are_unfrozen_replaced_or_made_while_they_are_watched_have_their_gradients():
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), linear(8, 2))
    model[2].requires_grad_(False)
    with Watch(model) as watch:
        model(randn(3, 4)).sum().backward()
        assert parameter(watch.record, "2", "bias").gradient is None
        assert reads(parameter(watch.record, "0", "weight").gradient, model[0].weight.grad)
        model[2].requires_grad_(True)
        model[0].weight = nn.Parameter(randn(8, 4))
        model(randn(3, 4)).sum().backward()
    assert parameter(watch.record, "2", "bias").gradient is not None
    assert reads(parameter(watch.last, "0", "weight").gradient, model[0].weight.grad)


def test_a_parameter_under_two_names_has_its_gradient_under_both():
    model = nn.Sequential(linear(4, 4), linear(4, 4))
    model[1].weight = model[0].weight
    with Watch(model) as watch:
        model(randn(3, 4)).sum().backward()
    assert reads(parameter(watch.record, "0", "weight").gradient, model[0].weight.grad)
    assert reads(parameter(watch.record, "1", "weight").gradient, model[0].weight.grad)
    assert parameter(watch.record, "1", "weight").tied_to == "0.weight"


@pytest.mark.parametrize(
    ("module", "inputs", "inner"),
    [
        (nn.MultiheadAttention(4, 2), 3 * (randn(3, 2, 4),), "out_proj.weight"),
        (nn.LSTM(4, 5), (randn(3, 2, 4),), "weight_hh_l0"),
        (nn.GRU(4, 5), (randn(3, 2, 4),), "weight_hh_l0"),
    ],
    ids=["MultiheadAttention", "LSTM", "GRU"],
)
def test_an_atomic_module_owns_the_parameters_of_its_children(module, inputs, inner):
    model = Call(lambda self, *args: self.inner(*args), inner=module)
    with Watch(model) as watch:
        model(*inputs)[0].pow(2).sum().backward()
    assert list(watch.record.layers) == ["(root)", "inner"]
    assert reads(parameter(watch.record, "inner", inner).gradient, module.get_parameter(inner).grad)
    assert value(watch.record, "inner", "output[0]").backward is not None


def test_a_leaf_used_in_several_forwards_has_in_each_its_own_gradient():
    model, x = nn.Sequential(linear(4, 2)), randn(3, 4, grad=True)
    with Watch(model) as watch:
        for factor in (1, 2, 3):
            (factor * model(x)).sum().backward()
    gradient = torch.ones(3, 2) @ model[0].weight
    assert reads(value(watch.first, "(root)", "input").backward, gradient)
    assert reads(value(watch.last, "(root)", "input").backward, 3 * gradient)
    assert reads(value(watch.record, "(root)", "input").backward, gradient, 2 * gradient, 3 * gradient)


def branches():
    """Two layers of one input, whose outputs are added: the sum hands both the same gradient, of 12,000 elements."""
    return Call(lambda self, x: self.a(x) + self.b(x), a=nn.Identity(), b=nn.Tanh())


def test_a_gradient_that_a_sum_hands_to_each_of_its_terms_is_reduced_once(monkeypatch):
    model, x, direction = branches(), randn(3, 4000, grad=True).cos(), randn(3, 4000).sin()
    with Watch(model) as watch:
        output = model(x)
        seen = []
        reduce = statistics.reduce
        monkeypatch.setattr(statistics, "reduce", lambda tensor, **options: seen.append(0) or reduce(tensor, **options))
        output.backward(direction)
    assert reads(value(watch.record, "b").backward, direction)
    assert reads(value(watch.record, "(root)").backward, direction)
    assert len(seen) == 2  # that of the sum and its terms, and that of the input


# --- calls, names and forwards --------------------------------------------------------------------------------------


def test_a_shared_module_called_twice_has_two_calls_each_with_its_gradient():
    shared = linear(4, 4)
    model, x = nn.Sequential(shared, nn.ReLU(), shared), randn(3, 4)
    hidden = shared(x)
    (expected,) = gradient_of(lambda: shared(hidden.relu()), hidden)
    with Watch(model) as watch:
        model(x).sum().backward()
    assert [call.index for call in watch.record.layers["0"].calls] == [0, 1]
    assert reads(value(watch.record, "0", call=0).backward, expected)
    assert reads(value(watch.record, "0", call=1).backward, torch.ones(3, 4))


def test_a_module_under_two_names_is_one_layer_with_an_alias():
    shared = linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    with Watch(model) as watch:
        model(randn(3, 4))
    assert list(watch.record.layers) == ["(root)", "0", "1"]
    assert watch.record.layers["0"].aliases == ("2",)


def test_a_forward_is_any_outermost_call():
    model = Call(None, encoder=linear(4, 4))
    model.encode = lambda x: model.encoder(x)
    with Watch(model) as watch:
        for _ in range(50):
            model.encode(randn(3, 4))
    (call,) = watch.record.layers["encoder"].calls
    assert (call.index, call.forwards, call.root) == (0, 50, "encoder")
    assert watch.record.forwards == 50


def test_train_and_eval_forwards_are_kept_apart():
    model = mlp()
    with Watch(model) as watch:
        model.train()(randn(3, 4))
        model.eval()(randn(5, 4))
    assert [(c.root_training, c.outputs[0].shape) for c in watch.record.layers["0"].calls] == [
        (True, (3, 8)),
        (False, (5, 8)),
    ]


def test_forwards_in_two_threads_at_once_are_an_error_of_the_record():
    inside, done = threading.Event(), threading.Event()

    def forward(self, x, wait):
        if wait:
            inside.set()
            done.wait(10)
        return self.fc(x)

    model = Call(forward, fc=linear(4, 2))
    with Watch(model) as watch:
        thread = threading.Thread(target=model, args=(randn(3, 4), True))
        thread.start()
        assert inside.wait(10)
        model(randn(5, 4), False)
        done.set()
        thread.join()
    with pytest.raises(ModelProbeError) as error:
        watch.record  # noqa: B018
    assert str(error.value) == (
        "a forward ran in one thread while another ran in a second, and only one of them was seen: let the threads "
        "call the model one after the other, under a lock, or watch a copy of the model in each"
    )


# --- calls that do not end as they should ---------------------------------------------------------------------------


class Attention(nn.Module):
    def forward(self, x):
        raise ValueError("no heads", 3)


def test_an_exception_names_the_innermost_layer_once():
    model = Call(lambda self, x: self.encoder(x), encoder=nn.Sequential(nn.Identity(), Attention()))
    with Watch(model), pytest.raises(ValueError, match="no heads") as caught:
        model(torch.zeros(2, 17, 64))
    assert caught.value.__notes__ == ["raised in encoder.1 (Attention), inputs (2, 17, 64) float32 cpu"]


def test_inputs_on_another_device_than_the_layer_are_pointed_out():
    model = nn.Sequential(nn.Linear(4, 2, device="meta"))
    with Watch(model), pytest.raises(RuntimeError) as caught:
        model(randn(3, 4))
    assert caught.value.__notes__[1] == "input is on cpu, 0 on meta: move one with .to('meta')"


def test_a_forward_that_raises_is_recorded_as_far_as_it_went():
    model = nn.Sequential(linear(4, 4), Attention(), linear(4, 4))
    with Watch(model) as watch, pytest.raises(ValueError, match="no heads"):
        model(randn(3, 4))
    calls = {layer.name: [call.finished for call in layer.calls] for layer in watch.record.layers.values()}
    assert calls == {"(root)": [-1], "0": [2], "1": [-1], "2": []}


@pytest.mark.parametrize("stop", [KeyboardInterrupt, pytest.fail.Exception])
def test_a_forward_after_an_interrupted_one_is_recorded_rightly(stop):
    def forward(self, x, *, interrupt):
        y = self.a(x)
        if interrupt:
            raise stop("now")
        return self.b(y)

    model = nn.Sequential(Call(lambda self, x: self.inner(x, interrupt=self.interrupt), inner=None))
    model[0].inner = Call(forward, a=linear(4, 4), b=linear(4, 2))
    x = randn(3, 4)
    with Watch(model) as watch:
        model[0].interrupt = True
        with pytest.raises(stop):
            model(x)
        model[0].interrupt = False
        model(x).sum().backward()
    last = watch.last
    assert {name: len(layer.calls) for name, layer in last.layers.items()} == dict.fromkeys(last.layers, 1)
    assert last.layers["0.inner.b"].calls[0].root == "(root)"
    assert reads(value(last, "0.inner.a").backward, torch.ones(3, 2) @ model[0].inner.b.weight)
    assert watch.record.forwards == 2


def test_a_forward_inside_an_except_block_did_not_raise():
    model = mlp()
    with Watch(model) as watch:
        outer = ValueError("an outer error")
        try:
            raise outer
        except ValueError:
            model(randn(3, 4))
    assert not hasattr(outer, "__notes__")
    assert value(watch.record, "2").shape == (3, 2)


def test_a_pre_hook_of_the_user_that_raises_before_ours_leaves_the_stack_as_it_was():
    def forward(self, x):
        with contextlib.suppress(ValueError):
            self.a(x)
        return self.b(x)

    def refuse(module, args):
        raise ValueError

    model = Call(forward, a=linear(4, 4), b=linear(4, 2))
    model.a.register_forward_pre_hook(refuse)
    with Watch(model) as watch:
        model(randn(3, 4)).sum().backward()
    assert watch.record.layers["a"].calls == ()
    assert watch.record.layers["(root)"].calls[0].finished != -1
    assert value(watch.record, "b").backward is not None


# --- activation checkpointing ---------------------------------------------------------------------------------------


def checkpointed(use_reentrant, function=lambda self, x: self.b(torch.relu(self.a(x)))):
    def forward(self, x, on):
        x = self.head(x)
        for segment in self.segments:
            x = checkpoint(segment, x, use_reentrant=use_reentrant) if on else segment(x)
        return self.tail(x)

    shared = linear(4, 4)
    segments = nn.ModuleList([Call(function, a=shared, b=linear(4, 4)) for _ in range(2)])
    return Call(forward, head=linear(4, 4), segments=segments, tail=linear(4, 2))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: self.b(torch.relu(self.a(x))),
        lambda self, x: self.b(self.a(self.a(2 * x) + 1) + x),
    ],
    ids=["each once", "one twice"],
)
def test_gradients_in_checkpointed_segments_equal_those_without(use_reentrant, function):
    model = checkpointed(use_reentrant, function)
    records = []
    for on in (False, True):
        model.zero_grad()
        with Watch(model) as watch:
            model(randn(3, 4), on).pow(2).sum().backward()
        records.append(watch.record)
    plain, again = records
    for name, layer in plain.layers.items():
        for tensor, other in zip(layer.parameters, again.layers[name].parameters, strict=True):
            assert agree(other.gradient, tensor.gradient)  # accumulated in another order
        for call, other in zip(layer.calls, again.layers[name].calls, strict=True):
            assert [v.forward for v in other.outputs] == [v.forward for v in call.outputs]
            assert [v.backward for v in other.outputs] == [v.backward for v in call.outputs], name
            assert [v.backward for v in other.inputs] == [v.backward for v in call.inputs], name


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputation_is_no_call_of_its_own(use_reentrant):
    model = checkpointed(use_reentrant)
    with Watch(model) as watch:
        model(randn(3, 4), True).sum().backward()
    assert watch.record.backwards == 1
    assert watch.record.forwards == 1
    calls = {name: [call.recomputed for call in layer.calls] for name, layer in watch.record.layers.items()}
    assert calls["segments.0.a"] == [1, 1]
    assert calls["segments.0.b"] == calls["segments.1.b"] == [1]
    assert calls["head"] == calls["tail"] == calls["(root)"] == [0]


def test_two_forwards_before_one_backward_recompute_each_its_own():
    model = checkpointed(True)
    first, second = randn(3, 4), 2 * randn(3, 4)
    with Watch(model) as expected:
        model(first, False).sum().backward()
        model(second, False).sum().backward()
    with Watch(model) as watch:
        (model(first, True).sum() + model(second, True).sum()).backward()
    for name in ("segments.0.a", "segments.0.b", "segments.1.b"):
        assert watch.record.layers[name].calls[0].recomputed == 2
        assert value(watch.first, name).backward == value(expected.first, name).backward
        assert value(watch.last, name).backward.statistics == value(expected.last, name).backward.statistics


# --- tensors that cannot be read ------------------------------------------------------------------------------------


def test_meta_tensors_have_structure_and_the_reason():
    model = nn.Sequential(nn.Linear(4, 2, device="meta"), nn.ReLU(inplace=True))
    with Watch(model) as watch:
        model(torch.empty(3, 4, device="meta")).sum().backward()
    output = value(watch.record, "0")
    assert (output.shape, output.device, output.forward.reason) == ((3, 2), "meta", "meta tensor")
    assert output.backward.reason == "meta tensor"


@pytest.mark.parametrize("first", ["fake", "meta", "real"])
def test_forwards_on_fake_or_meta_tensors_leave_the_numbers_of_the_others(first):
    model, x = mlp(), randn(3, 4)
    meta = {name: p.to("meta") for name, p in model.named_parameters()}

    def fake():
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(x)

    calls = {
        "fake": fake,
        "meta": lambda: torch.func.functional_call(model, meta, x.to("meta")),
        "real": lambda: model(x),
    }
    with Watch(model) as watch:
        for name in sorted(calls, key=lambda name: name != first):
            calls[name]()
    (call,) = watch.record["2"].calls
    assert (call.forwards, call.outputs[0].forward.tensors, call.outputs[0].device) == (3, 1, "cpu")
    assert reads(call.outputs[0].forward, model(x))
    assert watch.record.notes == ("2 of 3 forwards ran on meta or fake tensors, which have no numbers",)


def test_a_model_under_vmap_has_structure_and_the_reason():
    model, x = mlp(), randn(5, 3, 4)
    expected = model(x)
    with Watch(model) as watch:
        assert torch.equal(torch.vmap(model, chunk_size=5)(x), expected)
    output = value(watch.record, "2")
    assert (output.shape, output.forward.reason) == ((3, 2), "tensor of a torch.func transform")


def plain_copies(loss, parameters):
    copies = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
    torch.autograd.grad(loss(copies), list(copies.values()))


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda loss, parameters: torch.func.grad(loss)(parameters),
        lambda loss, parameters: torch.func.vjp(loss, parameters)[1](torch.tensor(1.0)),
        plain_copies,
    ],
    ids=["grad", "vjp", "plain copies"],
)
def test_gradients_of_tensors_in_the_place_of_parameters_are_not_known(differentiate):
    model, x = mlp(), randn(3, 4)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    with Watch(model) as watch:
        differentiate(lambda p: torch.func.functional_call(model, p, x).pow(2).sum(), parameters)
    assert {p.gradient.reason for p in watch.record.parameters} == {
        "it was computed of another tensor in its place, as torch.func and offloading do"
    }
    with pytest.raises(NothingObservedError, match=r"no gradient of 0\.weight was seen: it was computed of another"):
        assert_all_params_have_grad(watch)
    with pytest.raises(NothingObservedError, match="with a gradient that can be read"):
        assert_grad_flow(watch, layers=["0", "2"])
    assert not any("gradient" in finding for finding in findings(watch.record))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_model_that_is_traced_is_not_recorded():
    model, x = mlp(), randn(3, 4)

    def operations():
        return [node.kind() for node in torch.jit.trace(model, x, check_trace=False).inlined_graph.nodes()]

    expected = operations()
    with Watch(model) as watch:
        assert operations() == expected
    assert watch.record.forwards == 0


def test_a_model_that_is_exported_is_not_recorded():
    model, x = mlp(), randn(3, 4)
    expected = str(torch.export.export(model, (x,), strict=False).graph)
    with Watch(model) as watch:
        assert str(torch.export.export(model, (x,), strict=False).graph) == expected
    assert watch.record.forwards == 0


def train(model, x, optimizer):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_what_runs_in_the_capture_of_a_cuda_graph_is_not_recorded(monkeypatch):
    model, x = mlp(), randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Watch(model, steps=3, attention=True, functionals=True, profile=True) as watch:
        train(model, x, optimizer)
        with monkeypatch.context() as captured:
            captured.setattr(torch.cuda, "is_initialized", lambda: True)
            captured.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            captured.setattr(statistics, "reduce", None)  # nothing may be read
            train(model, x, optimizer)
        train(model, x, optimizer)
    record = watch.record
    assert (record.forwards, len(watch.steps), record.training.steps) == (2, 2, 2)
    assert "what ran while a CUDA graph was captured is not recorded, and no replay of a graph is" in record.notes


def test_sparse_inputs_have_structure_and_the_reason():
    model = Call(lambda self, x: torch.sparse.mm(x, self.weight))
    model.weight = nn.Parameter(randn(4, 2))
    with Watch(model) as watch:
        model(torch.eye(4).to_sparse()).sum().backward()
    assert value(watch.record, "(root)", "input").forward.reason == "sparse tensor"
    assert reads(value(watch.record, "(root)").backward, torch.ones(4, 2))


def test_no_element_is_read_of_tensors_on_another_device(monkeypatch):
    def reduce(tensor, *, axis=None, index=0, **options):
        with statistics.ambient_modes_disabled():
            return statistics.operations.by_torch(tensor.detach(), axis, index, **options)

    monkeypatch.setattr(statistics, "reduce", reduce)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 2))
    model.to("meta")
    with Watch(model) as watch:
        for _ in range(2):
            model(torch.empty(2, 3, 4, 4, device="meta")).sum().backward()
        seen = watch._capture.observed
    assert seen.newest.calls["4", 0].outputs[0][1].backward.rows.is_meta


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("uses", [True, False], ids=["an optimizer", "no optimizer"])
@pytest.mark.parametrize("option", [None, "histograms", "profile", "functionals"])
def test_nothing_waits_for_a_cuda_device_until_the_record_is_made(nothing_waits, uses, option):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 2))
    model.to("cuda")
    x, optimizer = randn(2, 3, 4, 4).cuda(), torch.optim.SGD(model.parameters(), 0.1)

    def step():
        model.zero_grad()
        model(x).sum().backward()
        if uses:
            optimizer.step()

    step()  # cuDNN and cuBLAS set themselves up with waiting
    with Watch(model, **{option: True} if option else {}) as watch:
        step()  # what is kept of the first step is read
        with nothing_waits():
            for _ in range(3):
                step()
    assert value(watch.record, "4").backward.tensors == 4


# --- contexts -------------------------------------------------------------------------------------------------------


def test_the_contexts_and_the_mode_of_each_call_are_recorded():
    def forward(self, x):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            x = self.a(x)
        return self.b(x.float())

    model = Call(forward, a=linear(4, 4).eval(), b=linear(4, 2))
    with Watch(model) as watch:
        model(randn(3, 4))
    assert [call.autocast for _, call in watch.record.calls] == [None, "bfloat16", None]
    assert [call.training for _, call in watch.record.calls] == [True, False, True]
    assert [call.grad_enabled for _, call in watch.record.calls] == [True, False, True]


@pytest.mark.parametrize(
    "module",
    [nn.RReLU(), nn.FractionalMaxPool2d(2, output_size=2), nn.Dropout(0.5)],
    ids=lambda module: type(module).__name__,
)
def test_modules_of_torch_that_draw_random_numbers_are_known(module):
    with Watch(module) as watch:
        module(randn(2, 3, 4, 4))
    assert watch.record.layers["(root)"].calls[0].random is not None


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_draws_are_seen_on_all_devices_of_the_model():
    def forward(self, x):
        return self.drop(self.b(self.drop(self.a(x)).to("cuda:1")))

    model = Call(forward, a=linear(4, 4).to("cuda:0"), b=linear(4, 4).to("cuda:1"), drop=nn.Dropout(0.5))
    with Watch(model) as watch:
        model(randn(3, 4).to("cuda:0"))
    assert [call.random is not None for call in watch.record.layers["drop"].calls] == [True, True]
    assert watch.record.layers["b"].calls[0].random is None


def test_a_call_that_draws_random_numbers_has_the_hash_of_the_generator_at_its_start():
    model = nn.Sequential(linear(4, 4), nn.Dropout(0.5))
    records = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        with Watch(model) as watch:
            model(randn(3, 4))
        records.append([call.random for _, call in watch.record.calls])
    root, fc, dropout = records[0]
    assert fc is None
    assert root == dropout
    assert records[1] == records[0]
    assert records[2][2] not in (None, dropout)


# --- functional calls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.relu, "relu"),
        (lambda x: x.clone().relu_(), "relu"),
        (lambda x: F.softmax(x, -1), "softmax"),
        (lambda x: F.scaled_dot_product_attention(x, x, x), "scaled_dot_product_attention"),
    ],
)
def test_a_functional_call_is_a_layer_of_its_own(function, name):
    model = nn.Sequential()
    model.block = Call(lambda self, x: function(self.fc(x)), fc=linear(4, 4))
    x = randn(2, 3, 4)
    with Watch(model, functionals=True) as watch:
        model(x).pow(2).sum().backward()
    layer = watch.record.layers[f"block.{name}"]
    expected = function(model.block.fc(x))
    assert (layer.type, layer.functional, len(layer.calls)) == (name, True, 1)
    assert reads(layer.calls[0].outputs[0].forward, expected)
    assert reads(layer.calls[0].outputs[0].backward, 2 * expected)


def test_the_function_inside_a_module_of_torch_is_not_recorded_twice():
    model = nn.Sequential(nn.ReLU(), nn.Softmax(-1), nn.Dropout(0.1))
    with Watch(model, functionals=True) as watch:
        model(randn(3, 4))
    assert list(watch.record.layers) == ["(root)", "0", "1", "2"]


def test_a_functional_call_in_the_root_has_its_bare_name_and_one_like_a_child_has_its_own():
    model = Call(lambda self, x: self.relu(F.relu(x)).tanh(), relu=nn.ReLU())
    with Watch(model, functionals=True) as watch:
        model(randn(3))
    assert list(watch.record.layers) == ["(root)", "relu", "relu()", "tanh"]


def modes():
    return torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("stop", [None, ValueError, KeyboardInterrupt])
def test_the_function_mode_does_not_outlive_a_forward(stop):
    def forward(self, x):
        assert modes()
        if stop is not None:
            raise stop
        return F.relu(x)

    model = Call(forward)
    with Watch(model, functionals=True), contextlib.suppress(ValueError, KeyboardInterrupt):
        model(randn(3))
        assert not modes()
    assert not modes()


def test_closing_inside_a_forward_leaves_the_function_mode():
    model = Call(lambda self, x: (self.watch.close(), F.relu(x))[1])
    model.__dict__["watch"] = Watch(model, functionals=True)
    model(randn(3))
    assert not modes()


class Mode(torch.overrides.TorchFunctionMode):
    """A mode of the user's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def interrupted(attention=False):
    """A watch of a model whose forward is interrupted, and the forward."""

    def forward(self, x):
        raise KeyboardInterrupt

    def run():
        with pytest.raises(KeyboardInterrupt):
            model(randn(3))

    model = Call(forward)
    return Watch(model, functionals=True, attention=attention), run


CONTEXTS = {"torch.device": lambda: torch.device("meta"), "a mode": Mode}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_a_context_of_the_user_ends_where_it_ends_though_a_forward_was_interrupted_in_it(context):
    watch, run = interrupted(attention=True)
    with context() as mode:
        run()
    assert mode not in modes()
    assert torch.ones(1).device.type == "cpu"
    watch.close()
    assert not modes()


# --- dataflow -------------------------------------------------------------------------------------------------------


def test_a_source_names_the_innermost_producer():
    model = nn.Sequential(nn.Sequential(nn.Sequential(linear(4, 8))), linear(8, 2))
    with Watch(model) as watch:
        model(randn(3, 4))
    assert value(watch.record, "1", "input").source == "0.0.0 output"
    assert value(watch.record, "(root)", "input").source is None
    spans = {layer.name: (call.started, call.finished) for layer, call in watch.record.calls}
    assert spans == {"(root)": (0, 9), "0": (1, 6), "0.0": (2, 5), "0.0.0": (3, 4), "1": (7, 8)}


@pytest.mark.parametrize(
    "copy",
    [lambda y: y.clone(), lambda y: y.reshape(-1, 5), lambda y: y.transpose(1, 2).contiguous().transpose(1, 2)],
    ids=["copy", "reshape", "layout"],
)
def test_a_source_is_found_through_copies_of_the_layout(copy):
    model = Call(lambda self, x: self.b(copy(self.a(x))), a=linear(4, 5), b=nn.Identity())
    with Watch(model) as watch:
        model(randn(2, 3, 4))
    assert value(watch.record, "b", "input").source == "a output"


@pytest.mark.parametrize(
    "permuted",
    [lambda y: y.transpose(1, 2), lambda y: y.flip(0), lambda y: y.roll(1, -1)],
    ids=["transpose", "flip", "roll"],
)
def test_elements_in_another_order_are_another_value(permuted):
    model = Call(lambda self, x: self.b(permuted(self.a(x))), a=linear(4, 5), b=nn.Identity())
    with Watch(model) as watch:
        model(randn(2, 3, 4))
    assert value(watch.record, "b", "input").source is None


def test_an_input_does_not_come_from_what_was_made_later():
    model = Call(lambda self, x: self.a(x) + self.same(x), a=linear(4, 4), same=nn.Identity())
    with Watch(model) as watch:
        model(randn(3, 4))
    assert value(watch.record, "(root)", "input").source is None
    assert value(watch.record, "a", "input").source is None


def test_one_tensor_in_several_places_has_one_number():
    model = nn.Sequential(linear(4, 8), nn.Dropout(0.5).eval(), linear(8, 2))
    with Watch(model) as watch:
        model(randn(3, 4))
        model(randn(3, 4))
    record = watch.record
    numbers = [value(record, *place).tensor for place in (("0",), ("1", "input"), ("1",), ("2", "input"))]
    assert len(set(numbers)) == 1
    assert value(record, "(root)").tensor == value(record, "2").tensor != numbers[0]


def test_numbers_of_tensors_do_not_clash_between_forwards():
    def forward(self, x, *, twice):
        x = self.a(x)
        return self.b(self.a(x)) if twice else self.b(x)

    model = Call(forward, a=linear(4, 4), b=linear(4, 2))
    with Watch(model) as watch:
        model(randn(3, 4), twice=True)
        model(randn(3, 4), twice=False)
    second_call = value(watch.record, "a", call=1).tensor
    others = {v.tensor for name in ("(root)", "b") for _, v in watch.record.layers[name].outputs}
    assert second_call not in others


# --- merging --------------------------------------------------------------------------------------------------------


def test_the_record_of_three_forwards_is_that_of_three_single_ones_merged():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    inputs = [factor * randn(2, 3, 5, 5) for factor in (1, -2, 3)]
    singles = []
    for x in inputs:
        model.zero_grad()
        with Watch(model) as watch:
            model(x).pow(2).sum().backward()
        singles.append(watch.record)
    with Watch(model) as watch:
        for x in inputs:
            model.zero_grad()
            model(x).pow(2).sum().backward()
    record = watch.record
    assert (record.forwards, record.backwards) == (3, 3)
    for name in ("(root)", "0", "1"):
        together = value(record, name)
        for direction in ("forward", "backward"):
            parts = [getattr(value(single, name), direction) for single in singles]
            merged = parts[0].statistics.merge(parts[1].statistics).merge(parts[2].statistics)
            actual = getattr(together, direction)
            assert actual.tensors == 3
            assert (actual.statistics.count, actual.statistics.zeros) == (merged.count, merged.zeros)
            assert (actual.statistics.min, actual.statistics.max) == (merged.min, merged.max)
            assert actual.statistics.mean == pytest.approx(merged.mean)
            assert actual.statistics.std == pytest.approx(merged.std)
        lows = zip(*(value(single, name).forward.units.low for single in singles), strict=True)
        assert together.forward.units.low == tuple(map(min, lows))
        assert record.layers[name].calls[0].forwards == 3
    gradient = parameter(record, "0", "weight").gradient
    assert gradient.tensors == 3
    assert gradient.statistics.max == max(parameter(s, "0", "weight").gradient.statistics.max for s in singles)


def test_asking_for_the_record_on_the_way_changes_nothing():
    model, x = mlp(), randn(3, 4)
    records = []
    for ask in (False, True):
        with Watch(model) as watch:
            for _ in range(3):
                model.zero_grad()
                out = model(x)
                if ask:
                    assert watch.record.forwards
                out.sum().backward()
                if ask:
                    assert watch.last.backwards == 1
        records.append(watch.record)
    assert records[0] == records[1]


def test_sizes_that_vary_are_ranges_and_numbers_of_calls_are_counted():
    model = Call(lambda self, x: [self.a(x) for _ in range(len(x))], a=linear(4, 8))
    with Watch(model) as watch:
        for batch in (4, 2, 7):
            model(randn(batch, 4))
    assert value(watch.record, "a").shape == ((2, 7), 8)
    assert value(watch.first, "a").shape == (4, 8)
    assert value(watch.last, "a").shape == (7, 8)
    assert [call.forwards for call in watch.record.layers["a"].calls] == [3, 3, 2, 2, 1, 1, 1]


def test_a_late_gradient_reaches_a_forward_that_has_merged():
    model = nn.Sequential(linear(4, 2), nn.Identity())
    with Watch(model) as watch:
        first, second = model(randn(3, 4)), model(randn(5, 4))
        (first.sum() + 2 * second.sum()).backward()
    ones, twos = torch.ones(3, 2), 2 * torch.ones(5, 2)
    for name in ("0", "1", "(root)"):
        assert reads(value(watch.first, name).backward, ones)
        assert reads(value(watch.last, name).backward, twos)
        assert value(watch.record, name).backward.tensors == 2
        assert value(watch.record, name).backward.statistics.count == 16
    assert (watch.record.backwards, watch.first.backwards, watch.last.backwards) == (1, 1, 1)


def test_passes_are_counted_for_the_forward_they_reach():
    model = mlp()
    with Watch(model) as watch:
        model(randn(3, 4))
        for _ in range(2):
            model(randn(3, 4)).sum().backward()
    assert (watch.record.backwards, watch.first.backwards, watch.last.backwards) == (2, 0, 1)


def test_tensors_of_the_newest_forward_are_kept_detached():
    model, x = mlp(), randn(3, 4)
    with Watch(model, layers="0", keep="1") as watch:
        model(2 * x)
        out = model(x)
    (kept,) = watch.kept["1"]
    assert torch.equal(kept, torch.relu(model[0](x)))
    assert not kept.requires_grad
    assert out.requires_grad
    assert list(watch.record.layers) == ["0"]


def test_a_watch_inside_another_sees_its_part():
    model = mlp()
    with Watch(model) as outer:
        model(randn(3, 4)).sum().backward()
        with Watch(model) as inner:
            model(randn(5, 4)).sum().backward()
        model(randn(7, 4)).sum().backward()
    assert value(outer.record, "0").shape == ((3, 7), 8)
    assert value(inner.record, "0").shape == (5, 8)
    assert inner.record.backwards == 1
    assert value(outer.record, "0").backward.tensors == 3


# --- scaled gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("fused", [True, False])  # a fused step takes the factor out itself
def test_gradients_seen_under_a_grad_scaler_are_marked(scaled, fused):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    with Watch(model) as watch:
        scaler.scale(model(randn(3, 4)).sum()).backward()
        scaler.step(optimizer)
    assert ("gradients are those of the loss as a GradScaler scaled it" in watch.record.notes) is scaled


# --- gradients of parameters ------------------------------------------------------------------------------------------


def mean_gradient(record):
    return record.layers["(root)"].parameters[0].gradient.statistics.mean


def test_a_parameters_gradient_is_that_of_the_pass_and_not_what_has_accumulated():
    model = nn.Linear(4, 2)
    with Watch(model) as watch:
        for _ in range(4):
            model(torch.ones(3, 4)).sum().backward()
    assert float(model.weight.grad.mean()) == 12.0
    assert [mean_gradient(r) for r in (watch.record, watch.first, watch.last)] == [3.0, 3.0, 3.0]


# --- hooks of the user that come after ours -------------------------------------------------------------------------


def halves(module, args, output):
    return output / 2


def test_what_a_hook_registered_later_makes_of_an_output_is_what_is_seen():
    model = nn.Sequential(linear(4, 3), nn.Identity())
    with Watch(model, keep="0") as watch:
        model[0].register_forward_hook(halves)
        model[0].register_forward_pre_hook(lambda module, args: (args[0] * 0 + 7,))
        out = model(randn(2, 4))
        out.sum().backward()
    assert torch.equal(watch.kept["0"][0], out)
    seen = value(watch.record, "0")
    assert seen.statistics.max == out.max().item()
    assert seen.gradient.max == 1
    assert value(watch.record, "0", "input").statistics.min == 7
    assert value(watch.record, "1", "input").source is not None
    assert watch.record.notes == ()


def test_hooks_of_the_user_keep_their_order_and_their_results():
    def run(watched):
        order = []
        model = nn.Sequential(linear(4, 3))
        model[0].register_forward_hook(lambda *_: order.append("first"))
        with Watch(model) if watched else contextlib.nullcontext():
            model[0].register_forward_hook(lambda m, a, output: order.append("second") or output + 1)
            model[0].register_forward_hook(lambda m, a, output: order.append("third") or output * 2)
            model[0].register_forward_hook(lambda *_: order.append("before all"), prepend=True)
            model[0].register_forward_hook(lambda *_: order.append("always"), always_call=True)
            return [*order, *model(randn(2, 4)).flatten().tolist(), *order]

    assert run(watched=True) == run(watched=False)


def test_the_error_of_a_forward_passes_where_a_hook_was_registered_as_it_began():
    def register(module, _):
        module.register_forward_hook(lambda *_: None)

    def fail(self, x):
        raise ValueError("its own")

    model = Call(fail)
    with Watch(model):
        model.register_forward_pre_hook(register)
        with pytest.raises(ValueError, match="its own"):
            model(torch.ones(2))


NESTED = {"jagged": torch.jagged, "strided": torch.strided}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", NESTED.values(), ids=NESTED)
def test_a_nested_tensor_has_the_lengths_of_its_parts_for_shape(modelprobe, layout):
    def forward(self, *parts):
        return self.act(self.fc(torch.nested.as_nested_tensor(list(parts), layout=layout)))

    model = Call(forward, fc=nn.Linear(4, 3), act=nn.ReLU())
    parts = randn(2, 4), randn(5, 4)
    record = modelprobe.run(model, *parts, loss=lambda out: torch.nested.to_padded_tensor(out, 0.0).sum())
    assert [record[layer].output.shape for layer in ("fc", "act", "(root)")] == [(2, (2, 5), 3)] * 3
    assert record["fc"].output.forward.reason == "nested tensor"
    assert record["act"].calls[0].inputs[0].source == "fc output"
    assert Record.from_dict(json.loads(json.dumps(record.to_dict()))) == record


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_inside_torchs_own_encoder_are_seen(modelprobe):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    padding = torch.tensor([[False, False, False, False], [False, False, True, True]])
    with torch.no_grad():
        record = modelprobe.run(model, randn(2, 4, 8), src_key_padding_mask=padding)
    assert record["layers.1"].output.shape == (2, (2, 4), 8)
