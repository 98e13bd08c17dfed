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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelprobe.checks import outcome
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import own_parameters
from pytest_modelprobe.probe import ModelProbe

from .trials import Given, Trial, Trials

# --- inputs -----------------------------------------------------------------------------------------------------------

_SPEC = re.compile(r"(?:(?P<name>[^\W\d]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<below>\d+))?")


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that a model takes: random numbers of a shape.

    >>> Input((4, 16), below=100, name="ids")
    Input(shape=(4, 16), below=100, name='ids')
    >>> str(Input((4, 16), below=100, name="ids")), str(Input((4, 3, 32, 32)))
    ('ids=4x16:100', '4x3x32x32')
    """

    shape: tuple[int, ...]
    below: int | None = None
    """Integers from 0 to ``below`` - 1; None: normally distributed numbers."""
    name: str | None = None
    """A keyword argument; None: a positional one."""

    def __str__(self) -> str:
        name, below = self.name and f"{self.name}=", self.below and f":{self.below}"
        return f"{name or ''}{'x'.join(map(str, self.shape))}{below or ''}"

    def tensor(self, probe: ModelProbe, position: int) -> Tensor:
        """Return the tensor, drawn from the seed of a probe.

        Raises:
            UsageError: There is no such tensor, as one that does not fit into memory.
        """
        name = self._drawn_as(position)
        try:
            if self.below is None:
                return probe.randn(*self.shape, **name)
            return probe.randint(0, self.below, self.shape, **name)
        except Exception as error:
            raise UsageError(f"no tensor of {self} can be made: {outcome.line_of(error)}") from error

    def code(self, position: int) -> str:
        """Return the call that draws the tensor, for a test.

        >>> Input((4, 16), below=100).code(0), Input((4, 3)).code(1)
        ('modelprobe.randint(0, 100, (4, 16))', 'modelprobe.randn(4, 3, name="input 1")')
        """
        name = "".join(f', name="{name}"' for name in self._drawn_as(position).values())
        if self.below is None:
            return f"modelprobe.randn({', '.join(map(str, self.shape))}{name})"
        return f"modelprobe.randint(0, {self.below}, {self.shape}{name})"

    def _drawn_as(self, position: int) -> dict[str, str]:
        """Return the name by which the numbers are drawn, if they need one: inputs of one shape are to differ."""
        if self.name is not None:
            return {"name": self.name}
        return {"name": f"input {position}"} if position else {}


def parse_input(text: str) -> Input:
    """Return the input of ``[NAME=]SHAPE[:BELOW]``.

    >>> parse_input("8x3x32x32"), parse_input("ids=8x16:1000")
    (Input(shape=(8, 3, 32, 32), below=None, name=None), Input(shape=(8, 16), below=1000, name='ids'))

    Raises:
        UsageError: It is none.
    """
    found = _SPEC.fullmatch(text)
    if found is None or found["below"] == "0":
        raise UsageError(
            f"{text!r} is no input: write a shape such as 8x3x32x32; 8x16:1000 for integers below 1000; ids=8x16:1000 "
            "for a keyword argument"
        )
    shape = tuple(map(int, found["shape"].split("x")))
    return Input(shape, int(found["below"]) if found["below"] else None, found["name"])


def arguments(inputs: Sequence[Input], probe: ModelProbe) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return positional and keyword arguments."""
    tensors = [(one.name, one.tensor(probe, position)) for position, one in enumerate(inputs)]
    return tuple(x for name, x in tensors if name is None), {name: x for name, x in tensors if name is not None}


def required(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a function cannot do without.

    >>> required(lambda x, *more, scale=1: x)
    ['x']
    """
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


# --- the first guesses ------------------------------------------------------------------------------------------------

BATCH, LENGTH = 4, 16
SPATIAL = {1: (64, 1024), 2: (32, 64, 224, 28), 3: (16, 32)}
"""Number of spatial dimensions → the sizes that are tried first."""

Guess = tuple[Input, ...]


def starts(model: nn.Module) -> list[Guess]:
    """Return inputs that the model may take, the likeliest first; empty if it takes what is no tensor.

    They are guessed from the configuration of a model of transformers, the ``pretrained_cfg`` of a model of timm, the
    first layer with parameters, and the names, types and documented shapes of the arguments of ``forward``.

    >>> [str(one) for [one] in starts(nn.Sequential(nn.Flatten(), nn.Linear(8, 2)))][:2]
    ['4x8', '4x16x8']
    """
    parameters = inspect.signature(model.forward).parameters
    if not parameters:
        return [()]
    if any(map(nn.parameter.is_lazy, nn.Module.parameters(model))):
        return []
    names = required(model.forward)
    by_main = hasattr(model, "config") and hasattr(model, "main_input_name")
    found = [tuple(_of_one_batch(inputs)) for inputs in _by_main_input(model)] if by_main else []
    shipped = getattr(model, "pretrained_cfg", None)
    size = shipped.get("input_size") if isinstance(shipped, dict) else None
    if size:
        found.append((Input((BATCH, *size)),))
    first = next((m for m in model.modules() if any(own_parameters(m, atomic=False))), None)
    if first is not None and len(names) < 2:
        found += [(one,) for one in of_layer(first)]
    main: Any = getattr(model, "main_input_name", None)
    names = names or [main if main in parameters else next(iter(parameters))]
    known = [_of_argument(model, parameters[name]) for name in names if name in parameters]
    if any(one is NO_TENSOR for one in known):
        return found
    is_named = main is not None or len(names) > 1
    # A sequence without a batch would be taken for a batch.
    is_sequential = any(isinstance(module, nn.RNNBase | nn.MultiheadAttention) for module in model.modules())
    for shape, below in sorted(_SEEDS, key=lambda seed: is_sequential and seed[0] == _SEEDS[0][0]):
        inputs = [one or Input(shape, below) for one in known]
        if is_named and all(parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY for name in names):
            inputs = [dataclasses.replace(one, name=name) for one, name in zip(inputs, names, strict=False)]
        found.append(tuple(inputs))
    return list(dict.fromkeys(filter(None, found)))


_SEEDS: tuple[tuple[tuple[int, ...], int | None], ...] = (
    ((BATCH, 8), None),
    ((BATCH, LENGTH, 8), None),
    ((BATCH, 3, 64, 64), None),
    ((BATCH, LENGTH), 10),
    ((BATCH, 1, 1024), None),
    ((BATCH, 3, 8, 64, 64), None),
)  # fmt: skip
"""What is tried for arguments of which nothing is known: shapes, and limits of integers."""

NO_TENSOR = Input(())
"""Stands for an argument that takes something else."""

_TIMES = re.compile(r"t|times?|time_?steps?|sigmas?|noise_levels?|diffusion_steps?")
_IDS = re.compile(r"(?:.*_)?(?:ids|tokens|idx|indices|index)(?:_.*)?")
_EDGES = re.compile(r"edge_?ind(?:ex|ices)(?:_.*)?")  # from and to which node of a graph
_IMAGES = re.compile(r"(?:.*_)?(?:ima?ge?s?|pictures?|pixels?|frames?)\d*(?:_.*)?")
_OTHER_TYPES = re.compile(
    r"^(?:int|float|bool|str|(?:typing\.)?(?:list|dict|sequence|iterable|tuple)\b.*)$", re.IGNORECASE
)


def of_argument(model: nn.Module, name: str) -> Input | None:
    """Return what an argument of ``forward`` takes according to its name, its type and its documentation."""
    return _of_argument(model, inspect.signature(model.forward).parameters[name])


def _of_argument(model: nn.Module, parameter: inspect.Parameter) -> Input | None:
    kind = parameter.annotation
    written = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    if parameter.annotation is not parameter.empty and _OTHER_TYPES.fullmatch(written):
        return NO_TENSOR
    if _TIMES.fullmatch(parameter.name):
        return Input((BATCH,), below=1000)
    if _EDGES.fullmatch(parameter.name):
        return Input((2, 2 * LENGTH), below=BATCH)
    documented = _documented(model, parameter.name)
    if "Long" in written or _IDS.fullmatch(parameter.name):
        return Input(documented or (BATCH, LENGTH), below=10)
    if documented:
        return Input(documented)
    return Input((BATCH, 3, 64, 64)) if _IMAGES.fullmatch(parameter.name) else None


def _documented(model: nn.Module, name: str) -> tuple[int, ...] | None:
    """Return the shape of an argument that the docstring tells, as ``(batch, channels, height, width)``."""
    told = rf"\b{name}\b[^\n]*?(?:\n[^\n]*?)?\bshape:?\s*[`*]*[(\[]([^)\]\n]*)[)\]]"
    found = re.search(told, f"{model.forward.__doc__ or ''}\n{model.__doc__ or ''}")
    axes = [axis.strip(" `*") for axis in found[1].split(",") if axis.strip()] if found else []
    if len(axes) < 2:
        return None
    return (BATCH, *(_size(model, axis.lower(), rank=len(axes)) for axis in axes[1:]))


def _size(model: nn.Module, axis: str, rank: int) -> int:
    configured = _first(getattr(model, "config", None), axis)
    if isinstance(configured, int):
        return configured
    if "channel" in axis or axis in ("c", "d", "dim", "features", "hidden_size") or "feature" in axis:
        return 3 if rank > 3 else 8
    return 64 if rank > 3 else LENGTH


def sizes_named(model: nn.Module) -> list[int]:
    """Return the sizes and lengths that the model and its configuration have as attributes, as ``image_size``."""
    holders: list[Any] = [model, *model.children()]
    holders += [config for config in (getattr(one, "config", None) for one in holders) if config is not None]
    found: dict[int, None] = {}
    for holder in holders:
        for name, value in (holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})).items():
            if _SIZE.search(name):
                sizes = value if isinstance(value, tuple | list) else [value]
                found |= dict.fromkeys(n for n in sizes if type(n) is int and 2 <= n <= 4096)
    return list(found)


_SIZE = re.compile(r"image|img|sample_size|input_(?:size|shape|resolution)|seq|context|block_size|n_ctx|length|_len\b")


def demand(layer: nn.Module) -> tuple[str, int, int] | None:
    """Return what a layer takes: a kind, the number of spatial dimensions, and how many channels, features or integers.

    >>> demand(nn.Conv2d(3, 8, 1)), demand(nn.Linear(5, 2)), demand(nn.Embedding(9, 2)), demand(nn.ReLU())
    (('channels', 2, 3), ('features', 0, 5), ('integers', 0, 9), None)
    """
    n = getattr(layer, "num_embeddings", None)
    if isinstance(n, int):
        return "integers", 0, n
    channels, kernel = getattr(layer, "in_channels", None), getattr(layer, "kernel_size", None)
    if isinstance(channels, int) and isinstance(kernel, tuple):
        return "channels", len(kernel), channels
    for kind, sizes in ((nn.BatchNorm2d, 2), (nn.BatchNorm3d, 3)):
        if isinstance(layer, kind):
            return "channels", sizes, layer.num_features
    shape = getattr(layer, "normalized_shape", None)
    if isinstance(shape, tuple) and len(shape) == 1:
        return "features", 0, shape[0]
    features = (getattr(layer, name, None) for name in ("in_features", "input_size", "embed_dim", "num_features"))
    n = next((n for n in features if isinstance(n, int)), None)
    return None if n is None else ("features", 0, n)


def of_layer(layer: nn.Module) -> Iterator[Input]:
    """Yield inputs that a layer takes."""
    if isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) > 1:
        yield Input((BATCH, *layer.normalized_shape))
        yield Input((BATCH, LENGTH, *layer.normalized_shape))
    found = demand(layer)
    if found is None:
        return
    kind, sizes, n = found
    if kind == "integers":
        yield Input((BATCH, LENGTH), below=n)
    elif kind == "channels":
        yield from (Input((BATCH, n, *[size] * sizes)) for size in SPATIAL[sizes])
    else:
        flat, sequence = Input((BATCH, n)), Input((BATCH, LENGTH, n))
        is_sequential = isinstance(layer, nn.RNNBase | nn.MultiheadAttention)
        yield from (sequence, flat) if is_sequential else (flat, sequence)


def _of_one_batch(inputs: list[Input]) -> list[Input]:
    """Return inputs with as many rows in each: a model may reshape what does not fit, and compute nonsense.

    >>> _of_one_batch([Input((4, 16), below=9), Input((2, 3, 8, 8))])[0].shape
    (2, 16)
    """
    rows = min((one.shape[0] for one in inputs), default=BATCH)
    return [dataclasses.replace(one, shape=(rows, *one.shape[1:])) for one in inputs]


def _by_main_input(model: Any) -> list[list[Input]]:
    config, main = model.config, model.main_input_name
    taken = inspect.signature(model.forward).parameters
    vision = _first(config, "vision_config", "backbone_config") or config
    text = _first(config, "text_config", "encoder", "text_encoder") or config
    vocabulary, longest = _first(text, "vocab_size"), _first(text, "max_position_embeddings", "n_positions")
    length = min(LENGTH, longest // 2) if longest else LENGTH
    words = [Input((BATCH, length), below=vocabulary, name="input_ids")] if vocabulary else []
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in taken and vocabulary:
        words += [Input((BATCH, length), below=vocabulary, name="decoder_input_ids")]
    pictures = _pictures(vision)
    if main == "input_ids":
        # A model of texts and images takes both.
        return [found for found in ([*words, *pictures] if vision is not config else words, words) if found]
    if main == "pixel_values":
        return [pictures, [*words[:1], *pictures]] if words else [pictures]
    if main == "input_features":
        bins = _first(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim")
        frames = 2 * (_first(config, "max_source_positions") or 50)
        layouts = [(bins, frames), (frames, bins)] if bins else []
        return [[Input((2, *layout), name=main), *words[1:]] for layout in layouts]
    if main == "input_values":
        bins, frames = _first(config, "num_mel_bins"), _first(config, "max_length")
        spectrogram = [[Input((2, frames, bins), name=main)]] if bins and frames else []
        return [*spectrogram, [Input((2, 16_000), name=main)], [Input((2, 1, 16_000), name=main)]]
    return []


def _pictures(config: Any) -> list[Input]:
    channels = _first(config, "num_channels", "in_channels") or 3
    size = _first(config, "image_size") or 224
    if isinstance(size, dict):
        size = [size["height"], size["width"]]
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    return [Input((2, channels, height, width), name="pixel_values")]


def _first(config: Any, *names: str) -> Any:
    """Return the first of the attributes that is there and not None."""
    return next((value for value in (getattr(config, name, None) for name in names) if value is not None), None)


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
        given = {one.name for one in guess}
        for name in names:  # of which the message speaks
            if name in given or len(name) <= 2 or not re.search(rf"\b{name}\b", message):
                continue
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
            yield from _changed(
                guess, affected, lambda one: [dataclasses.replace(one, below=10 if one.below is None else None)], 1
            )
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
    return {
        key(one, at): torch.empty(one.shape, dtype=torch.float32 if one.below is None else torch.int64, device="meta")
        for at, one in enumerate(guess)
    }


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
