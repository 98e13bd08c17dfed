"""Workers of a DataLoader that draw alike: each augments its samples with the same random numbers.

Torch gives each worker other seeds of Python, NumPy and torch. They are lost if `worker_init_fn` seeds with a constant,
and a generator that the dataset keeps is copied to each worker as it is.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from pytest_modelprobe.checks.outcome import Outcome
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import seeding
from pytest_modelprobe.text import count, failed, listed

_DRAWS = 16
"""How often each worker makes the sample: a flip at random is the same in two workers half of the time."""

_DEPTH = 3
"""Attributes of attributes of the dataset in which generators are looked for."""


def workers_differ(loader: DataLoader[Any], *, index: int = 0) -> Outcome:
    """Check that the workers of a loader draw other random numbers: each makes one sample, several times.

    The loader is not iterated: its workers are started once more, with its `worker_init_fn` and its generator. A
    failure names whose state is the same in several workers: Python's, NumPy's, torch's, or a generator of the dataset.

    Args:
        loader: The loader, with two or more workers, over a dataset with random augmentations.
        index: Which sample.

    Raises:
        AssertionError: Two workers draw alike.
        UsageError: The loader has fewer than two workers or an iterable dataset, or nothing about the sample is random.

    >>> import torch
    >>> from torch.utils.data import DataLoader, Dataset
    >>> from pytest_modelprobe import checks
    >>> class Noisy(Dataset):
    ...     def __len__(self):
    ...         return 8
    ...
    ...     def __getitem__(self, index):
    ...         return index + torch.rand(3)
    >>> loader = DataLoader(Noisy(), num_workers=2, multiprocessing_context="fork")
    >>> print(checks.workers_differ(loader))
    workers_differ holds for Noisy: 2 workers, 16 draws of sample 0 each
    """
    __tracebackhide__ = True
    if not isinstance(loader, DataLoader):
        raise UsageError(f"workers_differ takes a torch.utils.data.DataLoader; got {type(loader).__name__}")
    if loader.num_workers < 2:
        raise UsageError(f"the loader has {count(loader.num_workers, 'worker')}: two or more can draw alike")
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError("an iterable dataset has no sample that several workers could make: give one with an index")
    name = type(loader.dataset).__name__
    drawn, states = _drawn(loader, index)
    if all(len(set(one)) == 1 for one in drawn):
        raise UsageError(f"sample {index} of {name} is the same in {_DRAWS} draws: nothing about it is random")
    alike = [
        [place for place, other in enumerate(drawn) if other == one]
        for one in dict.fromkeys(drawn)
        if drawn.count(one) > 1 and len(set(one)) > 1
    ]
    if not alike:
        return Outcome(
            check="workers_differ",
            model=name,
            verdict="holds",
            text=f"{count(len(drawn), 'worker')}, {_DRAWS} draws of sample {index} each",
        )
    first = alike[0]
    shared = [
        source
        for source, (before, after) in states[first[0]].items()
        if before != after and all(states[worker].get(source, ("",))[0] == before for worker in first)
    ]
    raise failed(
        f"workers {listed([str(one) for one in first])} of the loader of {name} draw alike: {_DRAWS} draws of sample "
        f"{index} are the same; {len({one for group in alike for one in group})} of {count(len(drawn), 'worker')}",
        ["random numbers", "drawn from", "state at first"],
        [
            [source, "yes" if before != after else "no", "same" if _is_same(states, first, source) else "differs"]
            for source, (before, after) in states[first[0]].items()
        ],
        f"{listed(shared)} {'begins' if len(shared) == 1 else 'begin'} alike in each worker: " + _advice(shared)
        if shared
        else "No generator is known that begins alike: look for one that the dataset seeds itself.",
    )


def _advice(shared: Sequence[str]) -> str:
    if any(source.startswith("dataset") for source in shared):
        return "a generator that the dataset keeps is copied. Seed it in worker_init_fn= from torch.initial_seed()."
    return (
        "look for a constant seed in worker_init_fn= and in the dataset; torch.initial_seed() differs in each worker."
    )


def _is_same(states: Sequence[_States], workers: Sequence[int], source: str) -> bool:
    return len({states[worker].get(source, ("",))[0] for worker in workers}) == 1


_States = dict[str, tuple[str, str]]
"""By source of random numbers: hashes of its state before the first draw and after it."""


def _drawn(loader: DataLoader[Any], index: int) -> tuple[list[tuple[str, ...]], list[_States]]:
    """Return the hashes of the draws of each worker, and the states of its random numbers."""
    generator = None
    if loader.generator is not None:
        generator = torch.Generator(loader.generator.device)
        generator.set_state(loader.generator.get_state())
    look = _InWorker(loader.worker_init_fn)
    with seeding.forked_rng(), warnings.catch_warnings(action="ignore"):  # the loader itself gave these warnings
        again: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_size=None,
            sampler=[index] * (_DRAWS * loader.num_workers),
            num_workers=loader.num_workers,
            collate_fn=look,
            worker_init_fn=look.begin,
            multiprocessing_context=loader.multiprocessing_context,
            generator=generator,
        )
        drawn: dict[int, list[str]] = {}
        states: dict[int, _States] = {}
        for worker, draw, seen in again:
            drawn.setdefault(worker, []).append(draw)
            states.setdefault(worker, seen)
    return [tuple(drawn[worker]) for worker in sorted(drawn)], [states[worker] for worker in sorted(states)]


class _InWorker:
    """Looks at the random numbers of a worker: before its first sample, and when each sample is made.

    The dataset stays as it is, as the user's `worker_init_fn` may write to it.
    """

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._worker_init_fn = worker_init_fn
        self._before: dict[str, str] = {}

    def begin(self, worker: int) -> None:
        """Call the user's function, and look at the states that it leaves."""
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker)
        self._before = dict(_states(_own_worker().dataset))

    def __call__(self, sample: Any) -> tuple[int, str, _States]:
        """Return the worker, a hash of the sample, and the states before the first sample and now."""
        worker = _own_worker()
        now = dict(_states(worker.dataset))
        return worker.id, _hash(sample), {name: (state, now.get(name, "")) for name, state in self._before.items()}


def _own_worker() -> Any:
    return get_worker_info()


def _states(dataset: Dataset[Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and a hash of the state of each source of random numbers."""
    yield "Python's random", _hash(random.getstate())
    if numpy := sys.modules.get("numpy"):
        yield "NumPy's random", _hash(numpy.random.get_state())
    yield "torch's random", _hash(torch.get_rng_state())
    yield from _generators("dataset", dataset, _DEPTH)


def _generators(name: str, one: object, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(one, torch.Generator):
        yield name, _hash(one.get_state())
    elif isinstance(one, random.Random):
        yield name, _hash(one.getstate())
    elif type(one).__module__.startswith("numpy.random"):
        held: Any = one
        yield name, _hash(held.bit_generator.state if hasattr(held, "bit_generator") else held.get_state())
    elif depth and hasattr(one, "__dict__") and not isinstance(one, type):
        for key, value in vars(one).items():
            yield from _generators(f"{name}.{key}", value, depth - 1)


def _hash(value: Any) -> str:
    return hashlib.sha256(pickle.dumps(_plain(value))).hexdigest()


def _plain(value: Any) -> Any:
    """Return a value with the numbers of its tensors and arrays in their place: pickles of these may differ."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().cpu().reshape(-1).tolist()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value
