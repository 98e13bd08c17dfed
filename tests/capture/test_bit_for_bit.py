"""A watched model computes bit for bit what it computes unwatched: outputs, gradients, buffers, random numbers."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pytest_modelprobe.models.flatten import flatten, map_tensors
from pytest_modelprobe.probe import Watch


class Call(nn.Module):
    """A module whose forward is the function given; the modules given are its children."""

    def __init__(self, function, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.norm(self.conv(x)) + x)


def randn(*shape):
    return torch.randn(*shape).requires_grad_()


def mlp():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(16, 4))
    return model, (randn(5, 8),), {}


def resnet():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), Block(6), nn.MaxPool2d(2), Block(6), nn.Flatten(), nn.Linear(54, 4))
    return model, (randn(2, 3, 8, 8),), {}


def transformer(name, **config):
    transformers = pytest.importorskip("transformers")
    model_class, config_class = (
        getattr(transformers, f"{name}"),
        getattr(transformers, f"{name}Config".replace("Model", "")),
    )
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
    return model_class(config_class(**{**sizes, **config}))


def gpt2():
    model = transformer("GPT2Model", n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
    return model, (), {"input_ids": torch.randint(0, 50, (2, 9)), "use_cache": False}


def lstm():
    return nn.Sequential(nn.LSTM(4, 5, num_layers=2, dropout=0.2)), (randn(6, 2, 4),), {}


def attention():
    model = Call(lambda self, x: self.attention(x, x, x), attention=nn.MultiheadAttention(8, 2, dropout=0.1))
    return model, (randn(5, 2, 8),), {}


def encoder_layer():
    return (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False),
        (randn(5, 2, 8),),
        {},
    )


def shared():
    fc = nn.Linear(6, 6)
    return nn.Sequential(fc, nn.Tanh(), fc, nn.Tanh()), (randn(3, 6),), {}


def checkpointed(use_reentrant):
    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.block, self.head(x), use_reentrant=use_reentrant)
        return self.tail(x)

    block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.ReLU(inplace=True), nn.Linear(6, 6))
    return Call(forward, head=nn.Linear(6, 6), block=block, tail=nn.Linear(6, 2)), (randn(3, 6),), {}


def passing():
    return nn.Sequential(nn.Identity(), nn.Dropout(0.0)), (randn(3, 4),), {}


def frozen_without_grad():
    def forward(self, x):
        with torch.no_grad():
            x = self.a(x)
        return self.b(x)

    return Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 2)), (randn(3, 4),), {}


def functional():
    def forward(self, x):
        x = F.dropout(F.relu(self.fc(x), inplace=True), 0.3, self.training)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)

    return Call(forward, fc=nn.Linear(8, 8)), (randn(2, 5, 8),), {}


MODELS = {
    function.__name__: function
    for function in (
        mlp, resnet, gpt2, lstm, attention, encoder_layer, shared, passing, frozen_without_grad, functional,
    )
}  # fmt: skip
MODELS["reentrant checkpoint"] = lambda: checkpointed(True)
MODELS["non-reentrant checkpoint"] = lambda: checkpointed(False)

CONTEXTS = {
    "no_grad": torch.no_grad,
    "a default device": lambda: torch.device("cpu"),  # not set_default_device: torch 2.6 does not come back from it
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference_mode": torch.inference_mode,
}


def trace(case, *, watched, context=contextlib.nullcontext, train=True, steps=2, **options):
    """Everything that two steps of a model leave behind."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, args, kwargs = case()
        model = copy.deepcopy(model).train(train)
        watch = Watch(model, **options) if watched else contextlib.nullcontext()
        left = []
        with watch:
            for _ in range(steps):
                args, kwargs = map_tensors(fresh, args), map_tensors(fresh, kwargs)
                with context():
                    output = model(*args, **kwargs)
                outputs = [tensor for _, tensor in flatten("output", output).tensors]
                loss = sum(t.abs().float().pow(2).sum() for t in outputs if t.requires_grad)
                if isinstance(loss, torch.Tensor) and context is not torch.inference_mode:
                    loss.backward()
                inputs = [tensor for _, tensor in flatten("input", (args, kwargs)).tensors]
                left += [*outputs, *(tensor.grad for tensor in inputs)]
        left += [*(p.grad for p in model.parameters()), *model.parameters(), *model.buffers(), torch.get_rng_state()]
        if watched:
            assert watch.record.forwards == steps
        return left


def fresh(tensor):
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def same(a, b):
    if a is None or b is None:
        return a is b
    if a.is_sparse:
        a, b = a.coalesce().to_dense(), b.coalesce().to_dense()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.detach(), b.detach())


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    assert all(map(same, actual, expected))


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
def test_training_is_the_same(case):
    assert_same(trace(case, watched=True), trace(case, watched=False))


WITHOUT_GRADIENT = {name: MODELS[name] for name in ("gpt2", "functional", "reentrant checkpoint")}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("case", WITHOUT_GRADIENT.values(), ids=WITHOUT_GRADIENT)
def test_evaluation_without_gradient_is_the_same(case):
    expected = trace(case, watched=False, context=torch.no_grad, train=False)
    assert_same(trace(case, watched=True, context=torch.no_grad, train=False), expected)


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_a_context_of_the_user_changes_nothing(context):
    for case in (resnet, attention):
        assert_same(trace(case, watched=True, context=context), trace(case, watched=False, context=context))


@pytest.mark.parametrize("name", ["gpt2", "attention", "functional", "reentrant checkpoint"])
def test_functional_calls_and_attention_change_nothing(name):
    expected = trace(MODELS[name], watched=False)
    for options in ({"functionals": True}, {"attention": True}):
        assert_same(trace(MODELS[name], watched=True, **options), expected)


def test_a_model_that_raises_leaves_the_same_behind():
    def run(watched):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(5, 2))
            x = randn(3, 4)
            with Watch(model) if watched else contextlib.nullcontext(), pytest.raises(RuntimeError) as caught:
                model(x)
            return [*model.buffers(), x, torch.get_rng_state()], str(caught.value)

    (actual, message), (expected, same_message) = run(True), run(False)
    assert_same(actual, expected)
    assert message == same_message


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Functions, Operations])
@pytest.mark.parametrize("case", [resnet, lambda: checkpointed(True)])
def test_a_mode_of_the_user_sees_the_same_operations(case, mode):
    def run(watched):
        torch.manual_seed(0)
        model, args, kwargs = case()
        with mode() as seen, Watch(model) if watched else contextlib.nullcontext():
            outputs = flatten("output", model(*args, **kwargs)).tensors
            next(t for _, t in outputs if t.requires_grad).sum().backward()
        return seen.seen

    assert run(watched=True) == run(watched=False)
