"""Workers of a loader that draw alike, each beside a healthy twin."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pytest_modelprobe import UsageError, checks

TWO: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
"""Two workers as most versions of Python on Linux start them: where they are not forked, they import this file."""


class Augmented(Dataset[Any]):
    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return {"image": torch.full((3,), float(index)), "moved by": self.draw()}


class OwnGenerator(Augmented):
    def __init__(self) -> None:
        super().__init__(int)
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return index, self.rng.random()


def constant_seed(worker: int) -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - what is found
    torch.manual_seed(0)


def seeds_own_generator(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.rng = np.random.default_rng(torch.initial_seed())


DRAWS: dict[str, Callable[[], Any]] = {
    "Python's random": random.random,
    "NumPy's random": np.random.rand,
    "torch's random": lambda: torch.rand(2),
}


@pytest.mark.parametrize("source", DRAWS)
def test_a_constant_seed_of_each_worker_is_named(source: str) -> None:
    loader = DataLoader(Augmented(DRAWS[source]), **TWO, worker_init_fn=constant_seed)
    with pytest.raises(AssertionError) as error:
        checks.workers_differ(loader)
    assert str(error.value) == (
        "workers 0 and 1 of the loader of Augmented draw alike: 16 draws of sample 0 are the same; 2 of 2 workers\n\n"
        "Look for a constant seed in worker_init_fn= and in the dataset; torch.initial_seed() differs in each worker. "
        "A generator that the dataset keeps is copied to each: seed it in worker_init_fn= too."
    )


@pytest.mark.parametrize("source", DRAWS)
def test_workers_as_torch_seeds_them_differ(source: str) -> None:
    found = checks.workers_differ(DataLoader(Augmented(DRAWS[source]), **TWO))
    assert str(found) == "workers_differ holds for Augmented: 2 workers, 16 draws of sample 0 each"


def test_a_generator_that_the_dataset_keeps_is_named() -> None:
    with pytest.raises(AssertionError, match=r"^workers 0 and 1 of the loader of OwnGenerator draw alike"):
        checks.workers_differ(DataLoader(OwnGenerator(), **TWO))
    loader = DataLoader(OwnGenerator(), **TWO, worker_init_fn=seeds_own_generator)
    assert checks.workers_differ(loader).verdict == "holds"


def test_the_states_of_this_process_and_of_the_loader_stay() -> None:
    loader = DataLoader(Augmented(random.random), **TWO, generator=torch.Generator())
    before = torch.get_rng_state(), loader.generator.get_state(), random.getstate()
    checks.workers_differ(loader)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(loader.generator.get_state(), before[1])
    assert random.getstate() == before[2]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (DataLoader(Augmented(random.random)), "the loader has 0 workers: two or more can draw alike"),
        (DataLoader(Augmented(int), **TWO), "sample 0 of Augmented is the same in 16 draws"),
        (DataLoader(Stream(), **TWO), "an iterable dataset has no sample that several workers could make"),
        ([1, 2], r"workers_differ takes a torch.utils.data.DataLoader; got list"),
    ],
    ids=["no workers", "nothing random", "a stream", "no loader"],
)
def test_what_cannot_be_looked_at_is_refused(loader: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        checks.workers_differ(loader)
