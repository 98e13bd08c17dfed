"""A hundred odd models: watched they compute bit for bit what they compute unwatched, and no hook stays behind."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import warnings
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

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


def shifted(a: torch.Tensor) -> torch.Tensor:
    return a.relu() + 1


@odd
def function_that_is_scripted_in_the_forward():
    return Call(lambda self, a: self.fc(torch.jit.script(shifted)(self.fc(a))), fc=fc()), x()


@odd
def graph_module():
    return torch.fx.symbolic_trace(mlp()), x()


@odd
def exported():
    return torch.export.export(mlp(), (torch.ones(3, 4),)).module(), x()


@odd
def compiled_whole():
    return torch.compile(mlp(), backend="eager"), x()


@odd
def compiled_child():
    return nn.Sequential(fc(), torch.compile(mlp(), backend="eager")), x()


@odd
def compiled_in_place():
    model = mlp()
    model.compile(backend="eager")
    return model, x()


@odd
def not_to_be_compiled():
    return Call(torch.compiler.disable(lambda self, a: self.fc(a)), fc=fc()), x()


# --- transforms -------------------------------------------------------------------------------------------------------


@odd
def vmapped():
    return Call(lambda self, a: vmap(self.fc)(a), fc=fc()), x()


@odd
def vmapped_with_random_numbers():
    return Call(lambda self, a: vmap(self.net, randomness="different")(a), net=nn.Sequential(fc(), nn.Dropout())), x()


@odd
def ensemble_by_functional_call():
    def forward(self, a):
        state = {name: torch.stack([p, 2 * p]) for name, p in self.fc.named_parameters()}
        return vmap(lambda s, v: functional_call(self.fc, s, (v,)), in_dims=(0, None))(state, a)

    return Call(forward, fc=fc()), x()


@odd
def functional_gradient():
    return Call(lambda self, a: grad(lambda v: self.fc(v).tanh().sum())(a), fc=fc()), x()


@odd
def forward_mode():
    return Call(lambda self, a: jvp(self.net, (a,), (torch.ones_like(a),)), net=nn.Sequential(fc(), nn.Tanh())), x()


@odd
def called_functionally():
    return Call(lambda self, a: functional_call(self.fc, {"bias": self.other.bias}, (a,)), fc=fc(), other=fc()), x()


@odd
def gradient_in_the_forward():
    def forward(self, a):
        a = a.detach().requires_grad_()
        return torch.autograd.grad(self.net(a).tanh().sum(), a, create_graph=True)[0]

    return Call(forward, net=mlp()), x()


@odd
def backward_in_the_forward():
    def forward(self, a):
        b = a.detach().requires_grad_()
        (self.fc(b) ** 2).sum().backward()
        return self.fc(a - 0.1 * b.grad)

    return Call(forward, fc=fc()), x()


@odd
def jacobian():
    return Call(lambda self, a: torch.autograd.functional.jacobian(self.fc, a, create_graph=True), fc=fc()), x(4)


# --- weights ----------------------------------------------------------------------------------------------------------


@odd
def lazy():
    return nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2)), x()


@odd
def lazy_norm():
    return nn.Sequential(nn.LazyConv1d(2, 1), nn.LazyBatchNorm1d()), x(3, 4, 5)


@odd
def dynamically_quantized():
    with warnings.catch_warnings(action="ignore"):
        return torch.ao.quantization.quantize_dynamic(mlp().eval(), {nn.Linear}, dtype=torch.qint8), torch.randn(3, 4)


@odd
def statically_quantized():
    quantization = torch.ao.quantization
    with warnings.catch_warnings(action="ignore"):
        model = quantization.QuantWrapper(mlp()).eval()
        model.qconfig = quantization.default_qconfig
        quantization.prepare(model, inplace=True)(torch.randn(8, 4))
        return quantization.convert(model), torch.randn(3, 4)


@odd
def quantized_tensors():
    def forward(self, a):
        q = torch.quantize_per_tensor(a.detach(), 0.1, 0, torch.qint8)
        return self.fc(self.keep(q).dequantize())

    return Call(forward, keep=nn.Identity(), fc=fc()), x()


@odd
def parametrized():
    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).T

    model = mlp()
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return model, x()


@odd
def parametrized_and_cached():
    model = nn.Sequential(parametrizations.orthogonal(fc()), parametrizations.orthogonal(fc()))

    def forward(self, a):
        with parametrize.cached():
            return self.net(self.net(a))

    return Call(forward, net=model), x()


@odd
def weight_norm():
    return nn.Sequential(parametrizations.weight_norm(fc()), nn.ReLU()), x()


@odd
def weight_norm_by_hook():
    with warnings.catch_warnings(action="ignore"):
        return nn.Sequential(nn.utils.weight_norm(fc()), nn.ReLU()), x()


@odd
def spectral_norm():
    return nn.Sequential(parametrizations.spectral_norm(fc()), nn.ReLU()), x()


@odd
def spectral_norm_by_hook():
    with warnings.catch_warnings(action="ignore"):
        return nn.Sequential(nn.utils.spectral_norm(fc()), nn.ReLU()), x()


@odd
def pruned():
    model = mlp()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    return model, x()


@odd
def tied():
    model = mlp()
    model[2].weight = model[0].weight
    return model, x()


@odd
def expanded_parameter():
    model = fc()
    model.bias = nn.Parameter(torch.zeros(1).expand(4))
    return model, x()


@odd
def views_of_one_parameter():
    def forward(self, a):
        first, second = self.weight.view(2, 4, 4)
        return a @ first @ second

    model = Call(forward)
    model.weight = nn.Parameter(torch.randn(32))
    return model, x()


@odd
def no_parameters():
    return nn.Sequential(nn.ReLU(), nn.Softmax(-1)), x()


@odd
def frozen():
    return nn.Sequential(fc().requires_grad_(False), fc()), x()


@odd
def double_precision():
    return mlp().double(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)


@odd
def bfloat16():
    return mlp().bfloat16(), torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)


@odd
def parameter_lists():
    def forward(self, a):
        return sum(p * a for p in self.several) + self.named["one"]

    several = nn.ParameterList([torch.randn(4) for _ in range(3)])
    return Call(forward, several=several, named=nn.ParameterDict({"one": torch.randn(4)})), x()


@odd
def parameter_made_in_the_forward():
    def forward(self, a):
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.ones(4))
        return self.fc(a) * self.late

    return Call(forward, fc=fc()), x()


# --- tensors ----------------------------------------------------------------------------------------------------------


@odd
def sparse_input():
    return Call(lambda self, a: self.fc(torch.sparse.mm(a, self.table.weight)), fc=fc(), table=nn.Embedding(3, 4)), (
        torch.eye(3).to_sparse()
    )


@odd
def sparse_output():
    return Call(lambda self, a: (self.keep(a.to_sparse()).to_dense(), a), keep=nn.Identity()), x()


@odd
def sparse_rows():
    return Call(
        lambda self, a: self.keep(a.detach().to_sparse_csr()) @ self.fc.weight, keep=nn.Identity(), fc=fc()
    ), x()


@odd
def sparse_gradients():
    return nn.Sequential(nn.Embedding(9, 4, sparse=True), fc()), torch.tensor([[1, 2], [2, 8]])


@odd
def complex_numbers():
    return Call(lambda self, a: self.keep(torch.fft.fft(self.fc(a))).abs(), keep=nn.Identity(), fc=fc()), x()


@odd
def complex_weights():
    return nn.Linear(4, 2, dtype=torch.complex64), torch.randn(3, 4, dtype=torch.complex64, requires_grad=True)


@odd
def conjugated():
    return Call(lambda self, a: self.keep(self.fc(a).conj()).imag, keep=nn.Identity(), fc=complex_weights()[0]), (
        torch.randn(3, 4, dtype=torch.complex64)
    )


@odd
def empty_model():
    return nn.Sequential(), x()


@odd
def zero_size():
    return mlp(), x(0, 4)


@odd
def zero_wide():
    with warnings.catch_warnings(action="ignore"):
        return nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 2)), x()


@odd
def scalars():
    return Call(lambda self, a: self.keep(a.sum()) * self.fc(a), keep=nn.Identity(), fc=fc()), x()


@odd
def jagged():
    rows = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)
    return Call(lambda self, a: self.fc(self.fc(a)).values(), fc=fc()), rows


@odd
def nested():
    with warnings.catch_warnings(action="ignore"):
        rows = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    return Call(lambda self, a: torch.nested.to_padded_tensor(self.fc(a), 0.0), fc=fc()), rows


@odd
def packed_sequence():
    def forward(self, a):
        packed = pack_padded_sequence(a, torch.tensor([3, 1]), batch_first=True)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True)

    return Call(forward, rnn=nn.GRU(4, 5, batch_first=True)), x(2, 3, 4)


class Plain(torch.Tensor):
    """A subclass that adds nothing."""


@odd
def tensor_subclass():
    return mlp(), torch.randn(3, 4).as_subclass(Plain)


class Counting(torch.Tensor):
    """A subclass that counts what is done with it."""

    counts: ClassVar[collections.Counter] = collections.Counter()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.counts[getattr(func, "__name__", "")] += 1
        return super().__torch_function__(func, types, args, kwargs)


@odd
def subclass_with_torch_function():
    return mlp(), torch.randn(3, 4).as_subclass(Counting)


@odd
def wrapper_subclass():
    return nn.Sequential(nn.ReLU(), nn.Tanh()), TwoTensor(torch.randn(3, 4), torch.randn(3, 4))


@odd
def expanded_input():
    return mlp(), torch.randn(1, 4).expand(3, 4)


@odd
def transposed_input():
    return mlp(), torch.randn(4, 3).t().requires_grad_()


@odd
def overlapping_input():
    return mlp(), torch.randn(9).as_strided((3, 4), (1, 1))


@odd
def channels_last():
    return nn.Conv2d(2, 3, 1).to(memory_format=torch.channels_last), x(1, 2, 4, 4)


@odd
def integers_and_bools():
    return Call(
        lambda self, a: (self.keep(a.argmax(-1)), self.keep(a > 0), self.fc(a)), keep=nn.Identity(), fc=fc()
    ), x()


@odd
def not_a_number():
    return mlp(), torch.tensor([[float("nan"), 1.0, float("inf"), -0.0]])


@odd
def meta_tensors_inside():
    return Call(lambda self, a: self.fc(a)[: self.keep(a.to("meta")).shape[0]], keep=nn.Identity(), fc=fc()), x()


# --- structure --------------------------------------------------------------------------------------------------------


@odd
def recursive():
    class Tree(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.fc = fc()
            self.inner = Tree(depth - 1) if depth else None

        def forward(self, a):
            return self.fc(a if self.inner is None else self.inner(a) + a)

    return Tree(5), x()


@odd
def calls_itself():
    def forward(self, a, depth=3):
        return self(self.fc(a), depth - 1) if depth else a

    return Call(forward, fc=fc()), x()


@odd
def shared():
    inner = fc()
    return nn.Sequential(inner, nn.Tanh(), inner, nn.Sequential(inner)), x()


@odd
def called_many_times():
    def forward(self, a):
        for _ in range(50):
            a = self.fc(a).tanh()
        return a

    return Call(forward, fc=fc()), x()


@odd
def never_called():
    return Call(lambda self, a: self.fc(a), fc=fc(), unused=mlp()), x()


@odd
def child_of_its_child():
    model = Call(lambda self, a: self.fc(a), fc=fc())
    model.fc.parent = weakref.ref(model)
    return model, x()


@odd
def module_in_a_list():
    model = Call(lambda self, a: self.hidden[0](self.fc(a)), fc=fc())
    model.hidden = [fc().requires_grad_(False)]
    return model, x()


@odd
def children_in_containers():
    def forward(self, a):
        for layer in self.several:
            a = layer(a)
        return self.named["one"](a)

    return Call(forward, several=nn.ModuleList([fc(), nn.ReLU()]), named=nn.ModuleDict({"one": fc()})), x()


@odd
def names_with_spaces():
    return nn.Sequential(collections.OrderedDict((name, fc()) for name in ("läyer", "two words", "0"))), x()


@odd
def changes_its_children():
    def forward(self, a):
        self.fc, self.other = self.other, self.fc
        return self.fc(a)

    return Call(forward, fc=fc(), other=fc()), x()


@odd
def deep_nesting():
    model = fc()
    for _ in range(40):
        model = nn.Sequential(model)
    return model, x()


@odd
def forward_set_on_the_instance():
    model = mlp()
    model[0].forward = functools.partial(lambda m, a: F.linear(a, m.weight) * 2, model[0])
    return model, x()


@odd
def call_overridden():
    class Doubling(nn.Linear):
        def __call__(self, a):
            return 2 * super().__call__(a)

    return nn.Sequential(Doubling(4, 4), Doubling(4, 4)), x()


@odd
def call_overridden_without_hooks():
    class Direct(nn.Linear):
        def __call__(self, a):
            return self.forward(a)

    return nn.Sequential(Direct(4, 4), fc()), x()


@odd
def forward_called_directly():
    return Call(lambda self, a: self.net.forward(a), net=mlp()), x()


@odd
def getattr_that_hands_on():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

        def forward(self, a):
            return self.inner(a) * self.out_features

    return Wrapper(fc()), x()


@odd
def equality_that_compares():
    class Equal(nn.Linear):
        def __eq__(self, other):
            return isinstance(other, Equal)

        def __hash__(self):
            return 1

    return nn.Sequential(Equal(4, 4), Equal(4, 4)), x()


@odd
def length_of_zero():
    class Empty(nn.Linear):
        def __len__(self):
            return 0

    return nn.Sequential(Empty(4, 4)), x()


# --- inputs and outputs -----------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    mean: torch.Tensor
    scale: torch.Tensor


@dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    loss: torch.Tensor | None = None


@odd
def dict_output():
    return Call(lambda self, a: {"a": self.fc(a), "b": {"c": [a, None, 3]}}, fc=fc()), x()


@odd
def dataclass_output():
    return Call(lambda self, a: Output(self.fc(a), [a, self.fc(a)]), fc=fc()), x()


@odd
def named_tuple_output():
    return Call(lambda self, a: Pair(*self.fc(a).chunk(2, -1)), fc=fc()), x()


@odd
def same_tensor_twice():
    def forward(self, a):
        b = self.fc(a)
        return b, b, b[0]

    return Call(forward, fc=fc()), x()


@odd
def input_returned():
    return Call(lambda self, a: (a, self.fc(a)), fc=fc()), x()


@odd
def no_output():
    return Call(lambda self, a: (self.quiet(a), self.fc(a))[1], fc=fc(), quiet=Call(lambda self, a: None)), x()


@odd
def lazy_output():
    return Call(lambda self, a: list(self.several(a)), several=Call(lambda self, a: (a * i for i in range(3)))), x()


@odd
def modules_that_yield():
    def forward(self, a):
        yield self.fc(a)
        yield self.fc(a) * 2

    return Call(lambda self, a: sum(self.inner(a)), inner=Call(forward, fc=fc())), x()


@odd
def keywords_only():
    return Call(lambda self, a, *, scale=2.0: self.inner(a=a, scale=scale), inner=Call(
        lambda self, *, a, scale: self.fc(input=a) * scale, fc=fc())), x()  # fmt: skip


@odd
def functions_as_arguments():
    return Call(lambda self, a: self.inner(a, torch.tanh, lambda v: v + 1), inner=Call(
        lambda self, a, first, then: then(first(self.fc(a))), fc=fc())), x()  # fmt: skip


@odd
def numpy_inside():
    return Call(lambda self, a: self.fc(a) * torch.from_numpy(self.keep(a.detach().numpy())), keep=nn.Identity(),
                fc=fc()), x()  # fmt: skip


# --- in place, views, gradients ---------------------------------------------------------------------------------------


@odd
def in_place():
    return nn.Sequential(fc(), nn.ReLU(inplace=True), fc(), nn.Hardtanh(inplace=True)), x()


@odd
def in_place_on_a_view():
    def forward(self, a):
        b = self.view(self.fc(a))
        b.mul_(2)
        return b[:, 0].add_(1), b

    return Call(forward, fc=fc(), view=nn.Unflatten(1, (2, 2))), x()


@odd
def in_place_on_a_buffer():
    def forward(self, a):
        self.fc.seen.add_(a.detach().mean())
        return self.fc(a) * self.fc.seen

    model = Call(forward, fc=fc())
    model.fc.register_buffer("seen", torch.zeros(1))
    return model, x()


@odd
def resized_inside():
    def forward(self, a):
        scratch = self.keep(torch.zeros(2))
        scratch.resize_(3).fill_(1)
        return self.fc(a) * scratch.sum()

    return Call(forward, fc=fc(), keep=nn.Identity()), x()


@odd
def data_set_inside():
    def forward(self, a):
        self.fc.weight.data.mul_(0.9)
        return self.fc(a)

    return Call(forward, fc=fc()), x()


@odd
def no_grad_inside():
    def forward(self, a):
        with torch.no_grad():
            b = self.fc(a)
        return self.fc(b)

    return Call(forward, fc=fc()), x()


@odd
def inference_inside():
    def forward(self, a):
        with torch.inference_mode():
            b = self.fc(a)
        return self.fc(b.clone())

    return Call(forward, fc=fc()), x()


@odd
def autocast_inside():
    def forward(self, a):
        with torch.autocast("cpu", torch.bfloat16):
            return self.net(a)

    return Call(forward, net=mlp()), x()


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a.view_as(a)

    @staticmethod
    def backward(ctx, g):
        return -g


@odd
def own_function():
    return Call(lambda self, a: self.fc(Reversal.apply(self.fc(a))), fc=fc()), x()


@odd
def checkpointed():
    return Call(lambda self, a: checkpoint(self.net, self.net(a), use_reentrant=False), net=mlp()), x()


@odd
def checkpointed_reentrant():
    return Call(lambda self, a: checkpoint(self.net, self.net(a), use_reentrant=True), net=mlp()), x()


@odd
def checkpointed_in_segments():
    net = nn.Sequential(*(fc() for _ in range(4)))
    return Call(lambda self, a: checkpoint_sequential(self.net, 2, a, use_reentrant=False), net=net), x()


@odd
def saved_tensors_hooks():
    def forward(self, a):
        with torch.autograd.graph.save_on_cpu():
            return self.net(a)

    return Call(forward, net=mlp()), x()


@odd
def detached_output():
    return Call(lambda self, a: (self.fc(a).detach(), self.fc(a)), fc=fc()), x()


@odd
def straight_through():
    def forward(self, a):
        b = self.fc(a)
        return b + (b.round() - b).detach()

    return Call(forward, fc=fc()), x()


# --- random numbers ---------------------------------------------------------------------------------------------------


@odd
def dropout():
    return nn.Sequential(fc(), nn.Dropout(), nn.RReLU(), fc()), x()


@odd
def own_generator():
    model = Call(lambda self, a: self.fc(a + torch.randn(a.shape, generator=self.generator)), fc=fc())
    model.generator = torch.Generator().manual_seed(3)
    return model, x()


@odd
def own_numpy_generator():
    model = Call(lambda self, a: self.fc(a) * float(self.generator.normal()), fc=fc())
    model.generator = np.random.default_rng(3)
    return model, x()


@odd
def sampling():
    def forward(self, a):
        return torch.distributions.Normal(self.fc(a), 1.0).rsample() + F.gumbel_softmax(a)

    return Call(forward, fc=fc()), x()


# --- hooks of the user, errors ----------------------------------------------------------------------------------------


@odd
def hook_that_changes_the_output():
    model = mlp()
    model[0].register_forward_hook(lambda m, args, out: out * 2)
    model[2].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    return model, x()


@odd
def hook_that_is_always_called():
    model = mlp()
    model[0].register_forward_hook(lambda m, args, out: out + 1, always_call=True)
    return model, x()


@odd
def backward_hooks():
    model = mlp()
    model[0].register_full_backward_hook(lambda m, gi, go: tuple(None if g is None else g * 2 for g in gi))
    model[2].register_full_backward_pre_hook(lambda m, go: tuple(g * 3 for g in go))
    return model, x()


@odd
def hook_on_a_parameter():
    model = mlp()
    model[0].weight.register_hook(lambda g: g * 2)
    return model, x()


@odd
def hook_that_removes_itself():
    model = mlp()
    handle = model[0].register_forward_hook(lambda m, args, out: handle.remove())
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


@odd
def child_that_raises():
    def forward(self, a):
        with contextlib.suppress(RuntimeError):
            self.wrong(a)
        return self.fc(a)

    return Call(forward, fc=fc(), wrong=nn.Linear(5, 5)), x()


@odd
def child_that_exhausts_the_stack():
    def forward(self, a):
        with contextlib.suppress(RecursionError):
            self.endless(a)
        return self.fc(a)

    return Call(forward, fc=fc(), endless=Call(lambda self, a: self(a))), x()


# --- torch's own ------------------------------------------------------------------------------------------------------


@odd
def attention():
    return Call(lambda self, a: self.mha(a, a, a, need_weights=True), mha=nn.MultiheadAttention(4, 2)), x()


@odd
def lstm():
    return nn.LSTM(4, 5, num_layers=2, bidirectional=True), x(3, 2, 4)


@odd
def cells():
    def forward(self, a):
        h = None
        for row in a:
            h = self.cell(row[None], h)
        return h

    return Call(forward, cell=nn.LSTMCell(4, 4)), x()


def padding_mask(rows, size, padded):
    return torch.arange(size).expand(rows, size) >= size - padded


@odd
def encoder_with_padding():
    def forward(self, a):
        return self.inner(a, src_key_padding_mask=padding_mask(2, 5, 2))  # a nested tensor inside, where not trained

    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    inner = nn.TransformerEncoder(layer, 2).eval().requires_grad_(requires_grad=False)
    return Call(forward, inner=inner), torch.randn(2, 5, 4)


@odd
def encoder_with_padding_without_gradients():
    @torch.no_grad()
    def forward(self, a):
        return self.inner(a, src_key_padding_mask=padding_mask(2, 5, 2))

    inner = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2).eval()
    return Call(forward, inner=inner), torch.randn(2, 5, 4)


@odd
def transformer():
    return Call(lambda self, a: self.inner(a, a), inner=nn.Transformer(4, 2, 1, 1, 8, batch_first=True)), x(2, 3, 4)


@odd
def bag():
    return nn.EmbeddingBag(9, 4), torch.tensor([[1, 2], [3, 4]])


@odd
def adaptive_softmax():
    return Call(
        lambda self, a: self.head(a, torch.tensor([0, 5, 9])), head=nn.AdaptiveLogSoftmaxWithLoss(4, 10, [3])
    ), x()


@odd
def averaged():
    return torch.optim.swa_utils.AveragedModel(mlp()), x()


# --- the tests --------------------------------------------------------------------------------------------------------


def made(case):
    torch.manual_seed(0)
    return case()


def left(model, given, context):
    """Everything that two steps leave behind: outputs, gradients, state, random numbers."""
    torch.manual_seed(1)
    Counting.counts.clear()
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
    return [*found, torch.get_rng_state(), dict(Counting.counts)]


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
    if isinstance(tensor, TwoTensor):
        return [*bytes_of(tensor.a), *bytes_of(tensor.b)]
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


def test_a_distributed_tensor_on_one_rank_is_the_same():
    """The model is sharded over one rank."""
    dist = pytest.importorskip("torch.distributed")
    if dist.is_initialized():
        pytest.skip("there is a process group already")

    def case():
        mesh = dist.init_device_mesh("cpu", (1,))
        model = mlp()
        for layer in (model[0], model[2]):
            for name, parameter in list(layer.named_parameters()):
                shard = dist.tensor.distribute_tensor(parameter.detach(), mesh, [dist.tensor.Shard(0)])
                setattr(layer, name, nn.Parameter(shard))
        return model, dist.tensor.distribute_tensor(torch.randn(3, 4), mesh, [dist.tensor.Replicate()])

    def outcome(watched):
        model, given = made(case)
        with Watch(model) if watched else contextlib.nullcontext():
            output = model(given)
            output.to_local().sum().backward()
        assert not any(hooks(model))
        return [output.to_local(), *(p.grad.to_local() for p in model.parameters())]

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torch.random.fork_rng():
            assert all(map(same, outcome(True), outcome(False)))
    finally:
        dist.destroy_process_group()
