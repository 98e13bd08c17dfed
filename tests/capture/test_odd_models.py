"""A hundred odd models: watched they compute bit for bit what they compute unwatched, and no hook stays behind."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.models.flatten import flatten, map_tensors
from pytest_modelprobe.probe import Watch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit"),  # torch itself scripts functions for the forward mode
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*prototype.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*[Ss]parse.*:UserWarning"),
]

CASES: dict[str, Any] = {}


def odd(function):
    """Add a case: it returns a model and its arguments."""
    CASES[function.__name__.replace("_", " ").strip()] = function
    return function


class Call(nn.Module):
    """A module whose forward is the function given; the modules given are its children."""

    def __init__(self, function, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def fc(size=4, out=None):
    return nn.Linear(size, size if out is None else out)


def mlp():
    return nn.Sequential(fc(), nn.ReLU(), fc())


def x(*shape):
    return torch.randn(*(shape or (3, 4))).requires_grad_()


# --- what is compiled, traced, exported -------------------------------------------------------------------------------


@odd
def exported():
    return torch.export.export(mlp(), (torch.ones(3, 4),)).module(), x()


@odd
def compiled_child():
    return nn.Sequential(fc(), torch.compile(mlp(), backend="eager")), x()


# --- transforms -------------------------------------------------------------------------------------------------------


@odd
def vmapped():
    return Call(lambda self, a: vmap(self.fc)(a), fc=fc()), x()


@odd
def functional_gradient():
    return Call(lambda self, a: grad(lambda v: self.fc(v).tanh().sum())(a), fc=fc()), x()


@odd
def called_functionally():
    return Call(lambda self, a: functional_call(self.fc, {"bias": self.other.bias}, (a,)), fc=fc(), other=fc()), x()


@odd
def gradient_in_the_forward():
    def forward(self, a):
        a = a.detach().requires_grad_()
        return torch.autograd.grad(self.net(a).tanh().sum(), a, create_graph=True)[0]

    return Call(forward, net=mlp()), x()


# --- weights ----------------------------------------------------------------------------------------------------------


@odd
def dynamically_quantized():
    with warnings.catch_warnings(action="ignore"):
        return torch.ao.quantization.quantize_dynamic(mlp().eval(), {nn.Linear}, dtype=torch.qint8), torch.randn(3, 4)


@odd
def parametrized():
    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).T

    model = mlp()
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return model, x()


# --- tensors ----------------------------------------------------------------------------------------------------------


@odd
def complex_numbers():
    return Call(lambda self, a: self.keep(torch.fft.fft(self.fc(a))).abs(), keep=nn.Identity(), fc=fc()), x()


@odd
def nested():
    with warnings.catch_warnings(action="ignore"):
        rows = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    return Call(lambda self, a: torch.nested.to_padded_tensor(self.fc(a), 0.0), fc=fc()), rows


# --- structure --------------------------------------------------------------------------------------------------------


# --- inputs and outputs -----------------------------------------------------------------------------------------------


@dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    loss: torch.Tensor | None = None


@odd
def dataclass_output():
    return Call(lambda self, a: Output(self.fc(a), [a, self.fc(a)]), fc=fc()), x()


@odd
def no_output():
    return Call(lambda self, a: (self.quiet(a), self.fc(a))[1], fc=fc(), quiet=Call(lambda self, a: None)), x()


# --- in place, views, gradients ---------------------------------------------------------------------------------------


@odd
def in_place_on_a_view():
    def forward(self, a):
        b = self.view(self.fc(a))
        b.mul_(2)
        return b[:, 0].add_(1), b

    return Call(forward, fc=fc(), view=nn.Unflatten(1, (2, 2))), x()


@odd
def checkpointed_reentrant():
    return Call(lambda self, a: checkpoint(self.net, self.net(a), use_reentrant=True), net=mlp()), x()


# --- random numbers ---------------------------------------------------------------------------------------------------


@odd
def own_generator():
    model = Call(lambda self, a: self.fc(a + torch.randn(a.shape, generator=self.generator)), fc=fc())
    model.generator = torch.Generator().manual_seed(3)
    return model, x()


# --- hooks of the user, errors ----------------------------------------------------------------------------------------


@odd
def hook_that_changes_the_output():
    model = mlp()
    model[0].register_forward_hook(lambda m, args, out: out * 2)
    model[2].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    return model, x()


@odd
def registers_hooks_in_its_forward():
    def forward(self, a):
        handle = self.fc.register_forward_hook(lambda m, args, out: out + 1)
        try:
            return self.fc(a)
        finally:
            handle.remove()

    return Call(forward, fc=fc()), x()


# --- the tests --------------------------------------------------------------------------------------------------------


def made(case):
    torch.manual_seed(0)
    return case()


def left(model, given, context):
    """Everything that two steps leave behind: outputs, gradients, state, random numbers."""
    torch.manual_seed(1)
    found = []
    with context:
        for _ in range(2):
            (a,) = map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), (given,))
            output = model(a)
            tensors = [t for _, t in flatten("output", output).tensors]
            terms = [t.to_dense() if t.layout is not torch.strided else t for t in tensors if t.requires_grad]
            if terms:
                sum(t.abs().double().pow(2).sum() for t in terms).backward()
            found += [*tensors, a.grad, type(output)]
    found += [p.grad for p in model.parameters()] + list(model.buffers())
    return [*found, torch.get_rng_state()]


def same(a, b):
    if not isinstance(a, torch.Tensor):
        return type(a) is type(b) and a == b
    if any(
        getattr(a, what) != getattr(b, what) for what in ("__class__", "dtype", "layout", "requires_grad", "is_meta")
    ):
        return False
    return a.is_meta or all(itertools.starmap(torch.equal, zip(bytes_of(a), bytes_of(b), strict=True)))


def bytes_of(tensor):
    """The shape and the bits of a tensor, of whatever kind."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return [part for row in tensor.unbind() for part in bytes_of(row)]
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    tensor = tensor.as_subclass(torch.Tensor).resolve_conj().contiguous()
    return [torch.tensor(tensor.shape), tensor.flatten().view(torch.uint8)]


def hooks(model):
    tables = [t for m in model.modules() for name, t in vars(m).items() if "hook" in name and isinstance(t, dict)]
    tables += [t for p in model.parameters() for t in (p._backward_hooks, p._post_accumulate_grad_hooks)]
    return [len(table or ()) for table in tables]


# What dynamo asks of a tensor inside a model, watched or not.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_watched_it_computes_what_it_computes_unwatched(case):
    with torch.random.fork_rng():
        model, given = made(case)
        expected, hooked = left(model, given, contextlib.nullcontext()), hooks(model)
        model, given = made(case)
        watch = Watch(model)
        actual = left(model, given, watch)
    assert len(actual) == len(expected)
    assert [i for i, pair in enumerate(zip(actual, expected, strict=True)) if not same(*pair)] == []
    assert hooks(model) == hooked
    assert watch.record.layers


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_run_leaves_it_as_it_was(case):
    with torch.random.fork_rng():
        model, given = made(case)
        before, hooked, state = dict(vars(model)), hooks(model), state_of(model)
        assert ModelProbe().run(model, given).forwards == 1
        assert hooks(model) == hooked
        assert vars(model).keys() == before.keys()
        assert all(vars(model)[key] is before[key] for key in before)
        assert all(map(same, state_of(model), state))
        actual = left(model, given, contextlib.nullcontext())
        expected = left(*made(case), contextlib.nullcontext())
    assert all(map(same, actual, expected))


def state_of(model):
    tensors = (*model.parameters(), *model.buffers())
    return [t.detach().clone() for t in tensors if not nn.parameter.is_lazy(t)]
