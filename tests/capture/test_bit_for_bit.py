"""A watched model computes bit for bit what it computes unwatched: outputs, gradients, buffers, random numbers.

So do models that are compiled, exported, nested, quantized and the like; and a run leaves them as they were.
"""

import contextlib
import itertools
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.models.flatten import flatten, map_tensors
from pytest_modelprobe.probe import Watch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit"),  # torch itself scripts functions for the forward mode
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*prototype.*:UserWarning"),
    # What dynamo asks of a tensor inside a model, watched or not.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

CASES = {}


def case(function):
    """Add a case: it returns a model and its argument."""
    CASES[function.__name__] = function
    return function


class Call(nn.Module):
    """A module whose forward is the function given; the modules given are its children."""

    def __init__(self, function, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x):
        return self.function(self, x)


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.norm(self.conv(x)) + x)


def randn(*shape):
    return torch.randn(*(shape or (3, 4))).requires_grad_()


def fc():
    return nn.Linear(4, 4)


def small():
    return nn.Sequential(fc(), nn.ReLU(), fc())


# --- usual models -----------------------------------------------------------------------------------------------------


@case
def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(16, 4)), randn(5, 8)


@case
def resnet():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), Block(6), nn.MaxPool2d(2), Block(6), nn.Flatten(), nn.Linear(54, 4))
    return model, randn(2, 3, 8, 8)


@case
def gpt2():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16, "use_cache": False}
    return transformers.GPT2Model(transformers.GPT2Config(**sizes)), torch.randint(0, 50, (2, 9))


@case
def lstm():
    return nn.Sequential(nn.LSTM(4, 5, num_layers=2, dropout=0.2)), randn(6, 2, 4)


@case
def attention():
    model = Call(lambda self, x: self.attention(x, x, x), attention=nn.MultiheadAttention(8, 2, dropout=0.1))
    return model, randn(5, 2, 8)


@case
def encoder_layer():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False), randn(5, 2, 8)


@case
def shared():
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh()), randn(3, 6)


def checkpointed(use_reentrant):
    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.block, self.head(x), use_reentrant=use_reentrant)
        return self.tail(x)

    block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.ReLU(inplace=True), nn.Linear(6, 6))
    return Call(forward, head=nn.Linear(6, 6), block=block, tail=nn.Linear(6, 2)), randn(3, 6)


@case
def checkpointed_reentrant():
    return checkpointed(use_reentrant=True)


@case
def checkpointed_non_reentrant():
    return checkpointed(use_reentrant=False)


@case
def passing():
    return nn.Sequential(nn.Identity(), nn.Dropout(0.0)), randn()


@case
def frozen_without_grad():
    def forward(self, x):
        with torch.no_grad():
            x = self.a(x)
        return self.b(x)

    return Call(forward, a=fc(), b=fc()), randn()


@case
def functional():
    def forward(self, x):
        x = F.dropout(F.relu(self.fc(x), inplace=True), 0.3, self.training)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)

    return Call(forward, fc=nn.Linear(8, 8)), randn(2, 5, 8)


# --- odd models -------------------------------------------------------------------------------------------------------


@case
def exported():
    return torch.export.export(small(), (torch.ones(3, 4),)).module(), randn()


@case
def compiled_child():
    return nn.Sequential(fc(), torch.compile(small(), backend="eager")), randn()


@case
def vmapped():
    return Call(lambda self, x: vmap(self.fc)(x), fc=fc()), randn()


@case
def functional_gradient():
    return Call(lambda self, x: grad(lambda v: self.fc(v).tanh().sum())(x), fc=fc()), randn()


@case
def called_functionally():
    return Call(lambda self, x: functional_call(self.fc, {"bias": self.other.bias}, (x,)), fc=fc(), other=fc()), randn()


@case
def gradient_in_the_forward():
    def forward(self, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.net(x).tanh().sum(), x, create_graph=True)[0]

    return Call(forward, net=small()), randn()


@case
def dynamically_quantized():
    with warnings.catch_warnings(action="ignore"):
        return torch.ao.quantization.quantize_dynamic(small().eval(), {nn.Linear}, dtype=torch.qint8), torch.randn(3, 4)


@case
def parametrized():
    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).T

    model = small()
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return model, randn()


@case
def complex_numbers():
    return Call(lambda self, x: self.keep(torch.fft.fft(self.fc(x))).abs(), keep=nn.Identity(), fc=fc()), randn()


@case
def nested():
    with warnings.catch_warnings(action="ignore"):
        rows = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    return Call(lambda self, x: torch.nested.to_padded_tensor(self.fc(x), 0.0), fc=fc()), rows


@dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    loss: torch.Tensor | None = None


@case
def dataclass_output():
    return Call(lambda self, x: Output(self.fc(x), [x, self.fc(x)]), fc=fc()), randn()


@case
def no_output():
    return Call(lambda self, x: (self.quiet(x), self.fc(x))[1], fc=fc(), quiet=Call(lambda self, x: None)), randn()


@case
def in_place_on_a_view():
    def forward(self, x):
        b = self.view(self.fc(x))
        b.mul_(2)
        return b[:, 0].add_(1), b

    return Call(forward, fc=fc(), view=nn.Unflatten(1, (2, 2))), randn()


@case
def own_generator():
    model = Call(lambda self, x: self.fc(x + torch.randn(x.shape, generator=self.generator)), fc=fc())
    model.generator = torch.Generator().manual_seed(3)
    return model, randn()


@case
def hook_that_changes_the_output():
    model = small()
    model[0].register_forward_hook(lambda m, args, out: out * 2)
    model[2].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    return model, randn()


@case
def registers_hooks_in_its_forward():
    def forward(self, x):
        handle = self.fc.register_forward_hook(lambda m, args, out: out + 1)
        try:
            return self.fc(x)
        finally:
            handle.remove()

    return Call(forward, fc=fc()), randn()


# --- the tests --------------------------------------------------------------------------------------------------------


def made(make):
    torch.manual_seed(0)
    return make()


def left(model, given, context=contextlib.nullcontext):
    """Everything that two steps leave behind: outputs, gradients, state, random numbers."""
    torch.manual_seed(1)
    found = []
    for _ in range(2):
        x = map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), given)
        with context():
            output = model(x)
        tensors = [t for _, t in flatten("output", output).tensors]
        loss = sum(t.abs().double().pow(2).sum() for t in tensors if t.requires_grad)
        if isinstance(loss, torch.Tensor) and context is not torch.inference_mode:
            loss.backward()
        found += [*tensors, x.grad, type(output)]
    return [*found, *(p.grad for p in model.parameters()), *state_of(model), torch.get_rng_state()]


def trace(make, *, watched, context=contextlib.nullcontext, train=None, **options):
    """What two steps of a model leave behind; the hooks on it are what they were."""
    with torch.random.fork_rng():
        model, given = made(make)
        if train is not None:
            model.train(train)
        hooked = hooks(model)
        with Watch(model, **options) if watched else contextlib.nullcontext() as watch:
            found = left(model, given, context)
        assert hooks(model) == hooked
        assert not watched or watch.record.forwards == 2
        return found


def state_of(model):
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def hooks(model):
    tables = [t for m in model.modules() for name, t in vars(m).items() if "hook" in name and isinstance(t, dict)]
    tables += [t for p in model.parameters() for t in (p._backward_hooks, p._post_accumulate_grad_hooks)]
    return [len(table or ()) for table in tables]


def same(a, b):
    if not isinstance(a, torch.Tensor):
        return type(a) is type(b) and a == b
    if any(getattr(a, what) != getattr(b, what) for what in ("__class__", "dtype", "layout", "requires_grad")):
        return False
    return all(itertools.starmap(torch.equal, zip(bytes_of(a), bytes_of(b), strict=True)))


def bytes_of(tensor):
    """The shape and the bits of a tensor, of each row of a nested one."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return [part for row in tensor.unbind() for part in bytes_of(row)]
    return [torch.tensor(tensor.shape), tensor.resolve_conj().contiguous().flatten().view(torch.uint8)]


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    assert [i for i, pair in enumerate(zip(actual, expected, strict=True)) if not same(*pair)] == []


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same(name):
    assert_same(trace(CASES[name], watched=True), trace(CASES[name], watched=False))


@pytest.mark.parametrize("name", CASES)
def test_a_run_leaves_it_as_it_was(name):
    with torch.random.fork_rng():
        model, given = made(CASES[name])
        before, hooked, state = dict(vars(model)), hooks(model), state_of(model)
        assert ModelProbe().run(model, given).forwards == 1
        assert hooks(model) == hooked
        assert vars(model).keys() == before.keys()
        assert all(vars(model)[key] is before[key] for key in before)
        assert_same(state_of(model), state)
        assert_same(left(model, given), left(*made(CASES[name])))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", ["gpt2", "functional", "checkpointed_reentrant"])
def test_evaluation_without_gradient_is_the_same(name):
    expected = trace(CASES[name], watched=False, context=torch.no_grad, train=False)
    assert_same(trace(CASES[name], watched=True, context=torch.no_grad, train=False), expected)


CONTEXTS = {
    "no_grad": torch.no_grad,
    "a default device": lambda: torch.device("cpu"),  # not set_default_device: torch 2.6 does not come back from it
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_a_context_of_the_user_changes_nothing(context):
    for make in (resnet, attention):
        assert_same(trace(make, watched=True, context=context), trace(make, watched=False, context=context))


@pytest.mark.parametrize("name", ["gpt2", "attention", "functional", "checkpointed_reentrant"])
def test_functional_calls_and_attention_change_nothing(name):
    expected = trace(CASES[name], watched=False)
    for options in ({"functionals": True}, {"attention": True}):
        assert_same(trace(CASES[name], watched=True, **options), expected)


def test_a_model_that_raises_leaves_the_same_behind():
    def run(watched):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(5, 2))
            x = randn()
            with Watch(model) if watched else contextlib.nullcontext(), pytest.raises(RuntimeError) as caught:
                model(x)
            return [*model.buffers(), x, torch.get_rng_state(), str(caught.value)]

    assert_same(run(True), run(False))


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
@pytest.mark.parametrize("make", [resnet, checkpointed_reentrant])
def test_a_mode_of_the_user_sees_the_same_operations(make, mode):
    def run(watched):
        model, given = made(make)
        with mode() as seen, Watch(model) if watched else contextlib.nullcontext():
            outputs = flatten("output", model(given)).tensors
            next(t for _, t in outputs if t.requires_grad).sum().backward()
        return seen.seen

    assert run(watched=True) == run(watched=False)
