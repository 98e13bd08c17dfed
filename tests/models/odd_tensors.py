"""Read tensors of odd kinds in every way, and say before each which: `test_memory.py` runs this in another process.

``python odd_tensors.py COUNT SEED`` hands random ones to each function that reads, copies, compares or restores.
"""

import os
import random
import sys
import threading
import warnings

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from pytest_modelprobe import kernel, statistics
from pytest_modelprobe.models import Layers, detached_copy, has_dense_storage, preserved
from pytest_modelprobe.runs.isolation.contexts import attributes_restored
from pytest_modelprobe.runs.loss import random_loss
from pytest_modelprobe.runs.noise import Perturbation
from pytest_modelprobe.runs.watch import KeptForwards

ODD = "bits8", "complex32", "float4_e2m1fn_x2", "float8_e4m3fn", "int4", "uint3", "uint16"
DTYPES = [getattr(torch, name) for name in ("float32", "float64", "float16", "bfloat16", "int64", "bool", "complex64")]


def say(line):
    os.write(1, f"{line}\n".encode())


class Plain(torch.Tensor):
    """A subclass that is a plain tensor."""


class Wrapper(torch.Tensor):
    """A subclass that has another tensor inside."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        found = func(*(x.inner if isinstance(x, Wrapper) else x for x in args), **(kwargs or {}))
        return Wrapper(found) if isinstance(found, torch.Tensor) else found


# --- odd tensors ------------------------------------------------------------------------------------------------------


def dense(draw):
    """Return a view of a base, of any strides that torch allows."""
    base = torch.ones(draw.choice([1, 8, 600, 5000]), dtype=draw.choice(DTYPES))
    view = base[draw.choice([0, 0, 1, 7, 1000]) :: draw.choice([1, 1, 2, 3])]
    if draw.random() < 0.5 and len(view) % 2 == 0:
        view = view.view(2, -1)
    return draw.choice([view, view.mT if view.dim() == 2 else view, view.expand(3, *view.shape)])


def freed(draw):
    tensor = dense(draw)
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk(draw):
    tensor = dense(draw)
    tensor.untyped_storage().resize_(draw.randrange(tensor.untyped_storage().nbytes() + 1))
    return tensor


def grown(draw):
    tensor = dense(draw)
    tensor.untyped_storage().resize_(2 * tensor.untyped_storage().nbytes())
    return tensor


def fake(draw):
    with FakeTensorMode():
        return torch.ones(draw.randrange(4))


def nested(draw):
    tensor = torch.nested.nested_tensor([torch.ones(draw.randrange(4), 2) for _ in range(2)])
    if draw.random() < 0.5:
        tensor.untyped_storage().resize_(draw.choice([0, 4]))
    return tensor


def by_channel(draw):
    dtype = draw.choice([torch.qint8, torch.quint4x2])
    return torch.quantize_per_channel(torch.ones(3, 4), torch.ones(3), torch.zeros(3), 0, dtype)


def sparse(draw):
    tensor = torch.eye(4)
    return draw.choice([tensor.to_sparse, tensor.to_sparse_csr, tensor.to_mkldnn])()


def of_odd_dtype(draw):
    dtype = draw.choice([getattr(torch, name) for name in ODD if hasattr(torch, name)])
    tensor = torch.zeros(8, dtype=torch.uint8).view(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    return torch.empty(draw.choice([0, 4]), dtype=dtype) if dtype.itemsize > 2 else tensor.view(dtype)


KINDS = {
    "dense": dense,
    "freed": freed,
    "shrunk": shrunk,
    "grown": grown,
    "expanded": lambda draw: torch.ones(1, dtype=draw.choice(DTYPES)).expand(2, 1 << 32),
    "zero": lambda draw: torch._efficientzerotensor(3, 4)[draw.choice([0, 3]) :],
    "functional": lambda draw: torch._to_functional_tensor(torch.ones(3)),
    "nested": nested,
    "jagged": lambda draw: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "meta": lambda draw: torch.ones(3, device="meta"),
    "fake": fake,
    "sparse": sparse,
    "quantized": lambda draw: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "by channel": by_channel,
    "odd dtype": of_odd_dtype,
    "conjugated": lambda draw: torch.ones(3, dtype=torch.complex64).conj(),
    "negated": lambda draw: torch.ones(3, dtype=torch.complex64).conj().imag,
    "subclass": lambda draw: draw.choice([dense, freed, shrunk])(draw).as_subclass(Plain),
    "wrapper": lambda draw: Wrapper(dense(draw)),
    "parameter": lambda draw: nn.Parameter(draw.choice([dense, freed, shrunk])(draw), requires_grad=False),
    "inference": lambda draw: torch.inference_mode()(draw.choice([dense, freed]))(draw),
}
"""Kind → a function of a random generator that returns a tensor of it."""


# --- all ways to read one ---------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """A layer that has an odd tensor in each place, and uses none."""

    def __init__(self, tensor):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("odd", tensor)
        self.attribute = [tensor]
        self.__dict__["own"] = tensor

    def forward(self, x, odd=None):
        return x * self.weight


def reduced(tensor):
    """Reduce as hooks do, by the kernel where it can. To go through all that is expanded would take minutes."""
    if tensor.numel() < 1 << 30:
        statistics.collect([statistics.reduce(tensor, axis=-1, histogram=True)])


def sampled(tensor):
    if tensor.numel() < 1 << 30:
        statistics.samples_of([tensor, torch.ones(3, 4)], statistics.SeenSamples())


def reduced_by_torch(tensor):
    active, kernel.active = kernel.active, None
    try:
        reduced(tensor)
    finally:
        kernel.active = active


def restored(tensor):
    holder = Holder(tensor)
    with preserved(holder):
        if has_dense_storage(tensor) and not (0 in tensor.stride() or tensor.is_inference() or tensor.is_quantized):
            tensor.zero_() if tensor.dtype in DTYPES else None


def isolated(tensor):
    with attributes_restored(Holder(tensor)):
        pass


def kept(tensor):
    holder = Holder(tensor)
    KeptForwards(Layers(holder)).begins(("(root)", True), (torch.ones(4), tensor), {})


WAYS = {
    "reduce": reduced,
    "reduce by torch": reduced_by_torch,
    "samples": sampled,
    "copy": detached_copy,
    "restore": restored,
    "isolate": isolated,
    "perturb": lambda tensor: Perturbation("x", far=False).input(tensor, "x"),
    "loss": lambda tensor: random_loss(tensor, seed=0),
    "keep forward": kept,
}


def read_random(count, seed):
    draw, kinds = random.Random(seed), {}
    for i in range(count):
        kind = draw.choice(list(KINDS))
        tensor = KINDS[kind](draw)
        kinds[kind] = kinds.get(kind, 0) + 1
        with another_thread(tensor) if kind == "dense" and i % 8 == 0 else torch.no_grad():
            for way, read in WAYS.items():
                say(f"{way} of a tensor that is {kind}")
                read(tensor)
    say(f"read {count} tensors: " + ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())))


class another_thread:
    """A context in which another thread writes to a tensor."""

    def __init__(self, tensor):
        self._tensor, self._over = tensor, threading.Event()
        self._thread = threading.Thread(target=self._write)

    def _write(self):
        while not self._over.wait(1e-5):
            self._tensor.untyped_storage().fill_(random.randrange(2))

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *error):
        self._over.set()
        self._thread.join()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    read_random(*map(int, sys.argv[1:]))
