"""A hundred odd models: watched they compute bit for bit what they compute unwatched, and no hook stays behind."""

from __future__ import annotations

import collections
import contextlib
import itertools
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
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
def lazy():
    return nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2)), x()


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


@odd
def weight_norm_by_hook():
    with warnings.catch_warnings(action="ignore"):
        return nn.Sequential(nn.utils.weight_norm(fc()), nn.ReLU()), x()


@odd
def views_of_one_parameter():
    def forward(self, a):
        first, second = self.weight.view(2, 4, 4)
        return a @ first @ second

    model = Call(forward)
    model.weight = nn.Parameter(torch.randn(32))
    return model, x()


# --- tensors ----------------------------------------------------------------------------------------------------------


@odd
def sparse_gradients():
    return nn.Sequential(nn.Embedding(9, 4, sparse=True), fc()), torch.tensor([[1, 2], [2, 8]])


@odd
def complex_numbers():
    return Call(lambda self, a: self.keep(torch.fft.fft(self.fc(a))).abs(), keep=nn.Identity(), fc=fc()), x()


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


# --- structure --------------------------------------------------------------------------------------------------------


@odd
def calls_itself():
    def forward(self, a, depth=3):
        return self(self.fc(a), depth - 1) if depth else a

    return Call(forward, fc=fc()), x()


@odd
def changes_its_children():
    def forward(self, a):
        self.fc, self.other = self.other, self.fc
        return self.fc(a)

    return Call(forward, fc=fc(), other=fc()), x()


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
def data_set_inside():
    def forward(self, a):
        self.fc.weight.data.mul_(0.9)
        return self.fc(a)

    return Call(forward, fc=fc()), x()


@odd
def inference_inside():
    def forward(self, a):
        with torch.inference_mode():
            b = self.fc(a)
        return self.fc(b.clone())

    return Call(forward, fc=fc()), x()


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
