"""Inputs on which a model runs, found by trying: each failure tells what to try next.

The forwards run on fake tensors, which takes milliseconds. A failure has the layer that raised and what it was given,
what was made of each input, and the numbers in the message. Inputs that got further are changed first.
"""

from __future__ import annotations

import dataclasses
import heapq
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from pytest_modelprobe.checks import outcome
from pytest_modelprobe.runs import Given, Trial, Trials

from .inputs import Input
from .starts import BATCH, LENGTH, NO_TENSOR, Guess, demand, of_argument, of_layer, sizes_named, starts

_MOST_OPERATIONS = 6_000
"""Operations of all trials of a model, together a second or two. Time would depend on the machine."""

_MOST_TRIALS = 150

_MOST_UNDECIDED = 8
"""Guesses that fakes cannot judge and that are run on tensors."""

_FIRST = 4
"""Guesses that are likely enough to be tried without a reason from a failure."""

_LARGEST = 4096
"""Of a dimension, unless a first guess has a larger one, as a sound has."""

_MOST_ELEMENTS = 1_000_000_000
"""Elements of what all operations return, 4 GB: the batch is made smaller where there are more."""

_SIZES = (64, 224, 32, 128, 28, 256, 299, 96, 512)
"""Sizes that are tried where nothing else is known."""

Move = tuple[int, Guess]
"""The cost of a change, 1 for one that the failure asks for, and the changed inputs."""


class Search:
    """The search for inputs of one model.

    >>> search = Search(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 20 * 20, 3)))
    >>> [str(one) for one in next(iter(search))]
    ['4x1x22x22']
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._first = starts(model)
        self._largest = max([_LARGEST, *(n for guess in self._first for one in guess for n in one.shape)])
        self._queue: list[tuple[int, int, int, Guess]] = []  # how far it got, moves that were needed, order
        self._order = itertools.count()
        self._tried: set[Guess] = set()
        self.best: Guess = self._first[0] if self._first else ()
        """The inputs that got furthest."""
        self.refusal: BaseException | None = None
        """What the model raised on them."""

    def __iter__(self) -> Iterator[Guess]:
        """Yield inputs on which the model runs or may run, as far as fake tensors can tell."""
        if not self._first or self._first == [()]:
            yield from self._first
            return
        trials, names = Trials(self._model), list(inspect.signature(self._model.forward).parameters)
        known, furthest, operations, undecided = sizes_named(self._model), -1, 0, 0
        self._add(1_000_000, 0, enumerate(self._first))
        failed = []
        while self._queue and operations < _MOST_OPERATIONS and len(self._tried) < _MOST_TRIALS:
            _, cost, _, guess = heapq.heappop(self._queue)
            if guess in self._tried:
                continue
            self._tried.add(guess)
            trial = trials.run(_tensors(guess))
            operations += trial.operations
            if trial.error is None and trial.elements > _MOST_ELEMENTS:
                halved = tuple(_shaped(one, one.shape[0] // 2, *one.shape[1:]) for one in guess)
                self._add(len(trial.calls), cost, [(1, halved)])
                continue
            if trial.error is None:
                yield _limited(guess, trial)
                continue
            if len(trial.calls) > furthest:
                furthest, self.best, self.refusal = len(trial.calls), guess, trial.error
            if trial.is_undecided and undecided < _MOST_UNDECIDED:
                undecided += 1
                yield _limited(guess, trial)
                if guess == self.best:  # tensors tell more than fakes
                    trial = Trial(trial.calls, error=self.refusal)
            else:
                failed.append(guess)
            self._add(len(trial.calls), cost, self._moves(guess, trial, names, known))
        # Fake tensors do not know every operation.
        yield from (guess for guess in failed if guess in self._first[:_FIRST])

    def _add(self, reached: int, cost: int, moves: Iterable[Move]) -> None:
        for rank, guess in moves:
            if guess not in self._tried and all(0 < n <= self._largest for one in guess for n in one.shape):
                heapq.heappush(self._queue, (-reached, cost + rank, next(self._order), guess))

    def _moves(self, guess: Guess, trial: Trial, names: list[str], known: list[int]) -> Iterator[Move]:
        """Yield what to try after a failure."""
        message = str(trial.error) or outcome.line_of(trial.error)
        for at, one in enumerate(guess):
            source = frozenset({key(one, at)})
            first = next((g for g in trial.calls if g.sources == source and demand(g.layer)), None)
            if first is not None:
                yield from ((1, _with(guess, {at: fitted})) for fitted in _fitted(one, first))
        for name in _missing(message, names, guess):
            more = of_argument(self._model, name)
            if more is not NO_TENSOR and all(other.name is not None for other in guess):
                yield 1, (*guess, dataclasses.replace(more or Input((BATCH, LENGTH, 8)), name=name))
        affected = [at for at, one in enumerate(guess) if key(one, at) in trial.sources] or list(range(len(guess)))
        at_layer = _mismatch(trial.running[-1]) if trial.running else None
        attributes = (getattr(self._model, word, None) for word in re.findall(r"[A-Za-z]\w+", message))
        named = list(dict.fromkeys(n for n in attributes if type(n) is int and n > 1))
        numbers = list(dict.fromkeys(int(n) for n in re.findall(r"(?<![\w.])\d{1,5}(?![\w.]*\w)", message)))[:8]
        for pair in [at_layer] if at_layer else _broadcast(message):
            yield from _changed(guess, affected, lambda one, pair=pair: _resized(one, *pair), 1)  # type: ignore[misc]
        ranks = _ranks(message)
        for rank in ranks:
            yield from _changed(guess, affected, lambda one, rank=rank: _of_rank(one, rank), 1)  # type: ignore[misc]
        if re.search(r"dtype|Long|Int\b|Float|scalar type|indices", message):
            yield from _changed(guess, affected, _of_other_kind, 1)
        if ranks and not any(len(guess[at].shape) in ranks for at in affected):
            return
        for n in (*named, *known, *numbers, *_SIZES):
            cost = 1 if n in named else 2
            yield from _changed(guess, affected, lambda one, n=n: _with_size(one, n), cost)  # type: ignore[misc]
        for a, b in itertools.pairwise(n for n in (*named, *numbers) if n > 1 and n != BATCH):
            for pair in ((a, b), (b, a)):
                yield from _changed(guess, affected, lambda one, pair=pair: _resized(one, *pair), 3)  # type: ignore[misc]
        for rank in (3, 4, 2, 5):
            yield from _changed(guess, affected, lambda one, rank=rank: _of_rank(one, rank), 4)  # type: ignore[misc]


def key(one: Input, at: int) -> str | int:
    """Return by what an input is known: its name, or its position."""
    return at if one.name is None else one.name


def may_run(model: nn.Module) -> bool:
    """Whether a model runs on one of the first guesses, or may run as far as fake tensors can tell.

    >>> may_run(nn.Linear(3, 2)), may_run(nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2)))
    (True, False)
    """
    trials = Trials(model)
    tried = (trials.run(_tensors(guess)) for guess in starts(model)[:_FIRST])
    return any(trial.error is None or trial.is_undecided for trial in tried)


def _tensors(guess: Guess) -> dict[str | int, Tensor]:
    return {key(one, at): _meta(one) for at, one in enumerate(guess)}


def _meta(one: Input) -> Tensor:
    return torch.empty(one.shape, dtype=torch.float32 if one.below is None else torch.int64, device="meta")


def _with(guess: Guess, changed: dict[int, Input]) -> Guess:
    return tuple(changed.get(at, one) for at, one in enumerate(guess))


def _limited(guess: Guess, trial: Trial) -> Guess:
    """Return integers below what the first embedding to which they lead has."""
    limits: dict[str | int, int] = {}
    for call in trial.calls:
        kind, _, n = demand(call.layer) or ("", 0, 0)
        if kind == "integers":
            for source in call.sources:
                limits[source] = min(n, limits.get(source, n))
    return tuple(
        one if one.below is None else dataclasses.replace(one, below=limits.get(key(one, at), one.below))
        for at, one in enumerate(guess)
    )


def _changed(
    guess: Guess, affected: list[int], change: Callable[[Input], Iterable[Input]], rank: int
) -> Iterator[Move]:
    """Yield the guess with one input changed, and before that with all that are alike changed alike."""
    for at in affected:
        alike = [other for other in affected if guess[other].shape == guess[at].shape]
        for one in change(guess[at]):
            same = {other: dataclasses.replace(one, name=guess[other].name) for other in alike}
            yield from ((rank, _with(guess, same)), (rank, _with(guess, {at: one})))


def _shaped(one: Input, *shape: int) -> Input:
    return dataclasses.replace(one, shape=shape)


def _fitted(one: Input, first: Given) -> Iterator[Input]:
    """Yield an input changed so that it fits the first layer to which it leads."""
    kind, sizes, n = demand(first.layer) or ("", 0, 0)
    shape, is_itself = one.shape, first.shape == one.shape
    if kind == "integers":
        if one.below is None or one.below > n:
            yield dataclasses.replace(one, below=n)
            yield dataclasses.replace(one, shape=(BATCH, LENGTH), below=n)
        return
    like = [dataclasses.replace(other, name=one.name) for other in of_layer(first.layer)]
    if kind == "channels":
        if len(shape) == sizes + 2 and len(first.shape) == len(shape) and first.shape[1] != n:
            scaled, left = divmod(shape[1] * n, first.shape[1])
            if not left:
                yield _shaped(one, shape[0], scaled, *shape[2:])
            yield _shaped(one, shape[0], n, *shape[2:])
            yield _shaped(one, shape[0], shape[1] + n - first.shape[1], *shape[2:])
        elif len(first.shape) != sizes + 2:
            yield from like
    elif first.shape and first.shape[-1] != n:
        if is_itself:
            yield _shaped(one, *shape[:-1], n)
            yield from like
        else:
            yield from _resized(one, first.shape[-1], n)


def _mismatch(given: Given) -> tuple[int, int] | None:
    """Return the features that a layer got, and those that it takes."""
    kind, _, n = demand(given.layer) or ("", 0, 0)
    return (given.shape[-1], n) if kind == "features" and given.shape and given.shape[-1] != n else None


def _resized(one: Input, actual: int, expected: int) -> Iterator[Input]:
    """Yield an input changed so that what has the length ``actual`` may get that which is expected."""
    shape, rank = one.shape, len(one.shape)
    if rank < 2:
        return
    tokens = [(expected - 1) / (actual - 1)] if min(actual, expected) > 1 else []  # one of them may be a class token
    for ratio in (expected / actual, *tokens):
        if rank > 3:
            for n in _near(shape[-1] * ratio ** (1 / (rank - 2))):
                yield _shaped(one, *shape[:2], *[n] * (rank - 2))
        for axis in range(1, rank) if rank < 4 else (1, *([2] if rank > 4 else [])):
            for n in _near(shape[axis] * ratio):
                yield _shaped(one, *shape[:axis], n, *shape[axis + 1 :])
    for axis in {1, rank - 1}:  # something was appended
        yield _shaped(one, *shape[:axis], shape[axis] + expected - actual, *shape[axis + 1 :])


def _near(x: float) -> list[int]:
    return sorted({int(x), int(x) + 1}, key=lambda n: abs(n - x)) if x != int(x) else [int(x)]


def _with_size(one: Input, n: int) -> Iterator[Input]:
    shape, rank = one.shape, len(one.shape)
    if rank == 2:
        yield _shaped(one, shape[0], n)
    elif rank == 3:
        yield from (_shaped(one, shape[0], n, shape[2]), _shaped(one, *shape[:2], n))
    elif rank > 3:
        if n >= _SMALLEST:
            yield _shaped(one, *shape[:2], *[n] * (rank - 2))
            if rank > 4:
                yield _shaped(one, *shape[:3], *[n] * (rank - 3))
        if rank > 4:
            yield _shaped(one, *shape[:2], n, *shape[3:])
        if n <= _MOST_CHANNELS:
            yield _shaped(one, shape[0], n, *shape[2:])


_SMALLEST, _MOST_CHANNELS = 8, 64
"""Sizes of images and numbers of channels that a number in a message may mean."""


def _of_rank(one: Input, rank: int) -> Iterator[Input]:
    if len(one.shape) == rank or len(one.shape) < 2:
        return
    if rank == 2:
        yield _shaped(one, one.shape[0], one.shape[-1])
    elif rank == 3:
        features = one.shape[-1] if len(one.shape) == 2 else 8
        yield from (_shaped(one, one.shape[0], LENGTH, features), _shaped(one, one.shape[0], 3, 1024))
    elif rank == 4:
        yield _shaped(one, one.shape[0], 3, 64, 64)
        yield _shaped(one, one.shape[0], 64, 64, 3)
    elif rank == 5:
        yield _shaped(one, one.shape[0], 3, 8, 64, 64)


def _of_other_kind(one: Input) -> Iterator[Input]:
    yield dataclasses.replace(one, below=10 if one.below is None else None)


def _ranks(message: str) -> list[int]:
    """Return the numbers of dimensions that a message asks for.

    >>> _ranks("not enough values to unpack (expected 3, got 2)"), _ranks("Expected 4D input, got 2D")
    ([3], [4])
    >>> _ranks('Error while processing pattern "b c (h p) (w q) -> b (h w) (p q c)"')
    [4]
    """
    told = r"(\d)D \(batched\)" if "(batched)" in message else r"unpack \(expected (\d)|(\d)-?D\b|(\d)-dim"
    found = [int("".join(match.groups(""))) for match in re.finditer(told, message)][:1]
    pattern = re.search(r"[\"'`]([^\"'`>]*?)->", message)
    if pattern and "..." not in pattern[1]:
        found.insert(0, len(re.findall(r"\([^)]*\)|\S+", pattern[1])))
    return [n for n in found if 2 <= n <= 5]


def _broadcast(message: str) -> list[tuple[int, int]]:
    """Return the two lengths of a dimension that do not fit each other, in both orders.

    >>> _broadcast("mat1 and mat2 shapes cannot be multiplied (4x8 and 12x16)")
    [(8, 12), (12, 8)]
    >>> _broadcast("The size of tensor a (65) must match the size of tensor b (37) at non-singleton dimension 1")
    [(65, 37), (37, 65)]
    """
    told = r"tensor a \((\d+)\) must match the size of tensor b \((\d+)\)|\(\d+x(\d+) and (\d+)x\d+\)"
    found = re.search(told, message)
    if found:
        a, b = (int(n) for n in found.groups() if n)
    else:  # as fake tensors say it
        found = re.search(r"of length (\d+) at (-\d+).* to \[([\d, ]+)\]", message)
        if not found:
            return []
        a, b = int(found[3].split(", ")[int(found[2])]), int(found[1])
    return [(a, b), (b, a)]


def _missing(message: str, names: list[str], guess: Guess) -> list[str]:
    """Return the arguments of which a message speaks and which are not given."""
    given = {one.name for one in guess}
    return [name for name in names if name not in given and len(name) > 2 and re.search(rf"\b{name}\b", message)]
