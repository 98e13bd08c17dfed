"""Workers of a DataLoader that draw alike: each augments its samples with the same random numbers.

Torch gives each worker other seeds of Python, NumPy and torch. They are lost if `worker_init_fn` seeds with a constant,
and a generator that the dataset keeps is copied to each worker as it is.
"""

from __future__ import annotations

import hashlib
import pickle
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pytest_modelprobe.checks.outcome import Outcome
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import seeding
from pytest_modelprobe.text import count, listed

_DRAWS = 16
"""How often each worker makes the sample: a flip at random is the same in two workers half of the time."""


def workers_differ(loader: DataLoader[Any], *, index: int = 0) -> Outcome:
    """Check that the workers of a loader draw other random numbers: each makes one sample, several times.

    The loader is not iterated: its workers are started once more, with its `worker_init_fn` and its generator.

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
    drawn = _drawn(loader, index)
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
    first = listed([str(one) for one in alike[0]])
    raise AssertionError(
        f"workers {first} of the loader of {name} draw alike: {_DRAWS} draws of sample {index} are the same; "
        f"{sum(map(len, alike))} of {count(len(drawn), 'worker')}\n\n"
        "Look for a constant seed in worker_init_fn= and in the dataset; torch.initial_seed() differs in each worker. "
        "A generator that the dataset keeps is copied to each: seed it in worker_init_fn= too."
    )


def _drawn(loader: DataLoader[Any], index: int) -> list[tuple[str, ...]]:
    """Return the hashes of the draws of each worker."""
    generator = None
    if loader.generator is not None:
        generator = torch.Generator(loader.generator.device)
        generator.set_state(loader.generator.get_state())
    with seeding.forked_rng(), warnings.catch_warnings(action="ignore"):  # the loader itself gave these warnings
        again: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_size=None,
            sampler=[index] * (_DRAWS * loader.num_workers),
            num_workers=loader.num_workers,
            collate_fn=_in_worker,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=generator,
        )
        drawn: dict[int, list[str]] = {}
        for worker, draw in again:
            drawn.setdefault(worker, []).append(draw)
    return [tuple(drawn[worker]) for worker in sorted(drawn)]


def _in_worker(sample: Any) -> tuple[int, str]:
    worker: Any = get_worker_info()
    return worker.id, hashlib.sha256(pickle.dumps(_plain(sample))).hexdigest()


def _plain(value: Any) -> Any:
    """Return a value with the numbers of its tensors and arrays in their place: pickles of these may differ."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().cpu().reshape(-1).tolist()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value
