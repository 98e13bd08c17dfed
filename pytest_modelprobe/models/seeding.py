"""Seeds by name: reproducible inputs, and random states saved and restored.

A seed made of a name depends on nothing that was drawn before, so an input that is added to a test leaves the others as
they are. Numbers are drawn on the CPU, with the same bits on every machine and for every device: they stand in
snapshots that are compared elsewhere.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from pytest_modelprobe._torch import seed_cuda, without_torch_function

from .restoring import GENERATORS
from .tensors import generator_state

_BLOCK = 16
"""How many uniform numbers torch turns into as many normal ones at once: 8 cosines, then 8 sines."""

_AT_ONCE = 1 << 15
"""How many numbers are computed at once, so that they stay in the cache. It is a multiple of `_BLOCK`."""


def derive(seed: int, name: str) -> int:
    """Return the 63-bit seed that belongs to `name` under `seed`. It is the same on every machine.

    >>> derive(0, "x")
    7919274910726248567
    """
    text = f"{seed}:{name}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


@contextmanager
def forked_rng() -> Iterator[None]:
    """Restore the global random states on exit, bit for bit, also after an exception.

    These are the states of torch on the CPU, on every CUDA and XPU device and on MPS, numpy's global state and that of
    `random`. CUDA is never initialized for it. If CUDA was not initialized before, it will start from the seed that
    torch had on entry.

    >>> with forked_rng():
    ...     inside = torch.rand(())
    >>> bool(torch.rand(()) == inside)
    True
    """
    before = [(one, one.get()) for one in GENERATORS]
    try:
        yield
    finally:
        for one, was in before:
            one.set(was)


def seed_everything(seed: int) -> None:
    """Seed torch (all devices, CUDA lazily), numpy's global state and `random`."""
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6, where there is none
        accelerator = None
    if accelerator is not None and accelerator.type != "cuda":
        torch.manual_seed(seed)
    else:  # `torch.manual_seed` formats the stack for each kind of device, also for those that this build does not have
        torch.default_generator.manual_seed(seed)
        if torch.backends.cuda.is_built():
            seed_cuda(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 -- the state that users draw from
    random.seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block with all random states seeded by `seed`, and restore the states afterwards.

    >>> with seeded(3):
    ...     a = torch.rand(2)
    >>> with seeded(3):
    ...     b = torch.rand(2)
    >>> torch.equal(a, b)
    True
    """
    with forked_rng():
        seed_everything(seed)
        yield


def generator_states(device: torch.device) -> tuple[bytes, ...]:
    """Return the states of the global generators that code on a device may draw from, each as bytes.

    >>> before = generator_states(torch.device("cpu"))
    >>> with forked_rng():
    ...     _ = torch.rand(2)
    ...     [now == then for now, then in zip(generator_states(torch.device("cpu")), before, strict=True)]
    [False, True, True]
    """
    states = map(generator_state, dict.fromkeys((torch.device("cpu"), device)))
    return *states, pickle.dumps(np.random.get_state()), pickle.dumps(random.getstate())  # noqa: NPY002


def randn(
    shape: Sequence[int],
    *,
    seed: int,
    name: str,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return standard normal numbers that depend on `seed`, `name` and `shape` alone.

    Args:
        shape: The shape of the tensor.
        seed: The base seed.
        name: The name of the input. Inputs with different names have different numbers.
        device: Where the tensor goes. It is drawn on the CPU, so every device gets the same numbers.
        dtype: By default torch's default dtype. Numbers are drawn in float32 and then cast, so all dtypes agree.

    >>> x = randn((2, 3), seed=0, name="x", device="cpu")
    >>> torch.equal(x.double(), randn((2, 3), seed=0, name="x", device="cpu", dtype=torch.float64))
    True
    """
    dtype = dtype or torch.get_default_dtype()
    drawn_in = torch.complex64 if dtype.is_complex else torch.float32
    with without_torch_function():  # no mode of the caller's may move or change the draw
        generator = _generator(seed, name)
        drawn = fill_normal(torch.empty(tuple(shape), dtype=drawn_in, device="cpu"), generator)
        return drawn.to(device=device, dtype=dtype)


def fill_normal(tensor: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Fill a tensor on the CPU with the standard normal numbers that torch draws, with the same bits on every machine.

    torch computes float32 numbers by vector instructions, whose last bits differ between machines. Here the same
    uniform numbers, which are exact, become normal ones in float64 and are rounded once.

    >>> torch.allclose(fill_normal(torch.empty(40), torch.Generator()), torch.randn(40, generator=torch.Generator()))
    True
    """
    if tensor.is_complex():
        fill_normal(torch.view_as_real(tensor), generator).mul_(math.sqrt(0.5))
        return tensor
    # Only the float32 numbers of a contiguous tensor, a block of them or more, are computed by vector instructions.
    if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.numel() < _BLOCK:
        return tensor.normal_(generator=generator)
    flat = tensor.detach().view(-1).uniform_(generator=generator)
    for part in flat[: len(flat) // _BLOCK * _BLOCK].split(_AT_ONCE):
        part.copy_(_normal(part))
    if len(flat) % _BLOCK:  # as torch does: the last block is drawn anew, over numbers that are there already
        flat[-_BLOCK:] = _normal(flat.new_empty(_BLOCK).uniform_(generator=generator))
    return tensor


def _normal(uniform: torch.Tensor) -> torch.Tensor:
    """Return as many normal numbers, by the Box-Muller transform, in the order in which torch has them."""
    first, second = uniform.double().view(-1, 2, _BLOCK // 2).unbind(1)
    radius, angle = (1 - first).log_().mul_(-2).sqrt_(), second * (2 * math.pi)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), 1).view(-1)


def randint(
    low: int,
    high: int,
    shape: Sequence[int],
    *,
    seed: int,
    name: str,
    device: torch.device | str,
) -> torch.Tensor:
    """Return int64 numbers in `[low, high)` that depend on the arguments alone, as `randn` does.

    >>> ids = randint(0, 10, (2, 4), seed=0, name="ids", device="cpu")
    >>> ids.shape, ids.dtype
    (torch.Size([2, 4]), torch.int64)
    """
    with without_torch_function():
        generator = _generator(seed, name)
        drawn = torch.randint(low, high, tuple(shape), generator=generator, dtype=torch.int64, device="cpu")
        return drawn.to(device)


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(derive(seed, name))
