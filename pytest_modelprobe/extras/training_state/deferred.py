"""Whether a model that is made on the meta device and initialized later equals one that is made directly.

Large models are made without memory, get it by ``to_empty``, and are initialized after that. What ``__init__`` computed
is lost on the way: tables of rotary positions, masks, constants, ties. Nothing raises, since new memory often holds
zeros. So that memory is filled here with numbers which are recognized, in two runs with different ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelprobe.checks.check import check_unmodified, noted
from pytest_modelprobe.checks.outcome import NotApplicableError, Violation, line_of
from pytest_modelprobe.checks.registration import copy_on_cpu, made_model, meant, new_memory, temporary_names
from pytest_modelprobe.checks.rounding import differing_bits, is_rounded, plain
from pytest_modelprobe.checks.session import PreparedModel, all_named
from pytest_modelprobe.models import has_dense_storage, seeding, unexpanded
from pytest_modelprobe.probe import ModelProbe
from pytest_modelprobe.record import ROOT, qualified
from pytest_modelprobe.text import count, listed, out_of

_FLOAT, _INTEGER = 0.8372, 83
"""What memory holds in the second run, where in the first it holds NaN or the largest integer."""

_BY_CHANCE = 0.05
"""The largest share of random elements that are the same by chance for another seed: narrow dtypes have few numbers."""

_UNREAD = "not looked at, as they cannot be compared"

_ATTRIBUTE = "not registered"
"""The kind of a tensor that is a plain attribute of a module."""


@check_unmodified
def deferred_initialization(
    prepared: PreparedModel,
    *,
    initialize: Callable[[Any], object] | None = None,
    factory: Callable[[], nn.Module] | None = None,
) -> Violation | str:
    """Check that a model which is made on the meta device and initialized later equals one that is made directly.

    The model is made under ``torch.device("meta")``, gets memory by ``to_empty``, and is initialized: by
    ``initialize``; else by its own ``init_weights()``; else by ``reset_parameters()`` of each module that has it, as
    FSDP does. This is what large models and sharded training do. Named is each parameter and buffer that

    - nobody initialized, or that was computed from memory which nobody initialized; ``to_empty`` also takes the values
      of buffers that are in no checkpoint, such as tables of rotary positions and masks;
    - is still on the meta device, as is a tensor that is not registered;
    - is no longer tied to another one;
    - has another value, if that is not random: it is compared bit for bit;
    - is random in one of the two and not in the other.

    Both are made with two seeds, which tells what is random; its distribution is not compared. An own
    ``init_weights()`` is also called for the model that is made directly, since it is meant to follow the constructor.
    If ``initialize`` is meant to have another result than the constructor, call it in the factory too.

    Not compared is what the constructor does not initialize either: see `initialized`. Other attributes than tensors
    are not looked at.

    Args:
        prepared: The model. It needs no inputs.
        initialize: Takes the model after ``to_empty`` and initializes it.
        factory: Makes such a model. By default it is the factory of `ModelProbe.build`, if that made the model. It is
            called four times, twice of these with the meta device.

    Raises:
        UsageError: The factory makes no model.

    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.deferred_initialization(probe, probe.build(lambda: nn.LayerNorm(8))))
    deferred_initialization holds for LayerNorm: 2 parameters and buffers after reset_parameters()
    >>> class Scaled(nn.Linear):
    ...     def __init__(self):
    ...         super().__init__(3, 2)
    ...         self.register_buffer("scale", torch.ones(2), persistent=False)
    >>> outcome = checks.deferred_initialization.outcome(probe, probe.build(Scaled))
    >>> print(outcome.text.splitlines()[0])
    scale is not initialized: all 2 elements are memory that nothing wrote to; 1 of 3 parameters and buffers looked at
    """
    __tracebackhide__ = True
    built = prepared.probe.built.get(prepared.model)
    make = built.factory if factory is None and built is not None else factory
    if make is None:
        raise NotApplicableError("what makes the model is not known: build it by modelprobe.build, or give factory=")
    return _found(_Making(prepared.probe, make, initialize))


# --- making -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """What a model holds."""

    model: str
    tensors: dict[str, Tensor]
    """Copies of parameters, buffers and tensors that are plain attributes, by all their names."""
    meta: set[str]
    """Names of those on the meta device."""
    kinds: dict[str, str]
    numel: dict[str, int]
    ties: dict[str, str]
    """Name → the first other name of the same parameter or buffer."""
    how: str


@dataclass(frozen=True, slots=True)
class _Making:
    probe: ModelProbe
    factory: Callable[[], nn.Module]
    given: Callable[[Any], object] | None

    def directly(self, seed: str, *, filled: bool) -> _Made:
        """Return what a model holds that is made directly."""
        __tracebackhide__ = True
        self._seed(seed)
        with torch.device(self.probe.device), new_memory(filled=filled):
            model = self._model()
            if self.given is None and _own(model) is not None:
                self._initialize(model)
        return _read(model, "")

    def later(self, seed: str, *, filled: bool) -> _Made:
        """Return what a model holds that is made on the meta device and initialized later."""
        __tracebackhide__ = True
        self._seed(seed)
        try:
            with torch.device("meta"):
                model = self._model()
        except (RuntimeError, NotImplementedError) as error:
            raise NotApplicableError(f"it cannot be made on the meta device: {line_of(error)}") from error
        if all_named(model) and not any(t.is_meta for _, t in all_named(model)):
            raise NotApplicableError(
                f"nothing of {type(model).__name__} is on the meta device: its factory has a device"
            )
        model.to_empty(device=self.probe.device)
        with new_memory(filled=filled):
            for _, t in all_named(model):
                if has_dense_storage(t):
                    unexpanded(t.detach()).fill_(_filling(t.dtype, marked=filled))
            how = self._initialize(model)
        return _read(model, how)

    def _seed(self, name: str) -> None:
        seeding.seed_everything(seeding.derive(self.probe.seed, f"deferred {name}"))

    def _model(self) -> nn.Module:
        __tracebackhide__ = True
        with noted("in the factory", "deferred_initialization"):
            model = self.factory()
        return made_model(model, "factory")

    def _initialize(self, model: nn.Module) -> str:
        """Initialize a model, and return by what."""
        __tracebackhide__ = True
        if self.given is not None:
            with noted("in initialize", "deferred_initialization"):
                self.given(model)
            return "initialize()"
        if (own := _own(model)) is not None:
            with noted("in init_weights", "deferred_initialization"):
                own()
            return "init_weights()"
        for module in model.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                with noted(f"in reset_parameters of {type(module).__name__}", "deferred_initialization"):
                    reset()
        return "reset_parameters()"


def _own(model: nn.Module) -> Callable[[], object] | None:
    own = getattr(model, "init_weights", None)
    return own if callable(own) else None


def _attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that are plain attributes of modules."""
    for layer, module in model.named_modules():
        for name, value in vars(module).items():
            # What is computed from a parameter, as by a weight norm, is computed again in the forward.
            if isinstance(value, Tensor) and value.grad_fn is None and not meant(module, name, value):
                yield qualified(layer or ROOT, name), value


def _filling(dtype: torch.dtype, *, marked: bool) -> float:
    """Return what memory holds that nobody wrote to, in the first run if it is marked."""
    if dtype == torch.bool:
        return marked
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan if marked else _FLOAT
    return torch.iinfo(dtype).max if marked else _INTEGER


def _read(model: nn.Module, how: str) -> _Made:
    """Return copies of what a model holds."""
    made = _Made(type(model).__name__, {}, set(), {}, {}, {}, how)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    first: dict[int, str] = {}
    kept = []  # an id is that of one tensor as long as it lives
    for name, t in (*all_named(model), *_attributes(model)):
        original = first.setdefault(id(t), name)
        kept.append(t)
        if original != name:
            made.ties[name] = original
        if t.is_meta:
            made.meta.add(name)
        elif (copy := copy_on_cpu(t)) is not None:
            made.tensors[name] = plain(copy)
        made.kinds[name] = "parameter" if name in parameters else _ATTRIBUTE
        made.numel[name] = t.numel()
    temporary = temporary_names(model)
    for name, _ in model.named_buffers(remove_duplicate=False):
        made.kinds[name] = "buffer, not persistent" if name in temporary else "buffer"
    return made


# --- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    """How a parameter or buffer is not as in a model that is made directly."""

    name: str
    rank: int
    """The surest first; the key of `_ADVICE`."""
    said: str
    """What the first line says of it."""
    they: str
    """What the table says of its elements."""
    elements: int = 0
    """How many are so; 0 stands for all."""


_ADVICE = {
    0: "to_empty() takes all values, those of buffers too. Compute it again in the initialization as the constructor "
    "does: in reset_parameters() of the module that owns it, or in init_weights().",
    1: "A tensor that is not registered does not move with the model: pass it to self.register_buffer, with "
    "persistent=False if it is computed again.",
    2: "to_empty() makes a tensor for each name: tie them again after it, in the initialization.",
    3: "Let the constructor and the initialization compute it in the same function.",
    4: "Let the constructor and the initialization draw it in the same function. reset_parameters() of a layer knows "
    "nothing of what the constructor of the model does with it.",
}


def _found(making: _Making) -> Violation | str:
    """Make the model directly and later, each with two seeds, and say what differs."""
    __tracebackhide__ = True
    # What the constructor does not write to differs between the first two.
    direct = making.directly("one", filled=False), making.directly("two", filled=True)
    later = making.later("one", filled=True), making.later("two", filled=False)
    one, how = direct[0], later[0].how
    found: list[_Found] = []
    skipped: dict[str, list[str]] = {}
    looked_at = 0
    for name in one.kinds:
        if name in one.ties and later[0].ties.get(name) == one.ties[name]:
            continue
        compared = _compared(name, direct, later)
        if isinstance(compared, str):
            skipped.setdefault(compared, []).append(name)
            looked_at += compared != _UNREAD
            continue
        looked_at += one.kinds[name] != _ATTRIBUTE or compared is not None
        if compared is not None:
            found.append(compared)
    if found:
        return _broken(one, found, looked_at, how)
    if not looked_at:
        if not skipped:
            raise NotApplicableError(f"{one.model} has no parameters or buffers")
        raise NotApplicableError(f"nothing of {one.model} can be compared: {listed(skipped.get(_UNREAD, []))}")
    text = f"{count(looked_at, 'parameters and buffer')} after {how}"
    for why, names in skipped.items():
        text += f"; {why}: {listed(names)}"
    return text


def _compared(name: str, direct: tuple[_Made, _Made], later: tuple[_Made, _Made]) -> _Found | str | None:
    """Return how one tensor differs, or why it was not compared."""
    if name in later[0].meta:
        return _Found(name, 1, "is still on the meta device", "are still on the meta device")
    if name not in later[0].kinds:
        # Attributes may come and go, as caches do.
        return None if direct[0].kinds[name] == _ATTRIBUTE else _Found(name, 3, "is missing", "are missing")
    if name in direct[0].ties:
        tie = direct[0].ties[name]
        return _Found(name, 2, f"is no longer tied to {tie}", f"are no longer those of {tie}")
    x, y = (made.tensors.get(name) for made in direct)
    one, two = (made.tensors.get(name) for made in later)
    if x is None or y is None or one is None or two is None:
        return _UNREAD
    for other in (one, two, y):
        if (x.shape, x.dtype) != (other.shape, other.dtype):
            now, was = (f"{tuple(t.shape)} in {t.dtype}".replace("torch.", "") for t in (other, x))
            return _Found(name, 3, f"is {now}, made directly {was}", f"are {now}, made directly {was}")
    empty = _empty((x, y), (one, two))
    if bool(empty.any()):
        return _unwritten(name, empty, two)
    if bool((_is_nan(y) & ~_is_nan(x)).any()):
        return "values not compared, as the constructor does not initialize them either"
    return _differing(name, (x, y), (one, two))


def _empty(direct: tuple[Tensor, Tensor], later: tuple[Tensor, Tensor]) -> Tensor:
    """Return which elements nobody wrote to after ``to_empty``, or were computed from such."""
    one, two = later
    if is_rounded(one):
        return _is_nan(one) & ~_is_nan(two)
    empty = _is_marked(one, marked=True) & _is_marked(two, marked=False)
    if one.dtype == torch.bool and not (bool(empty.all()) and torch.equal(*direct)):  # by chance, if it is random
        return torch.zeros_like(empty)
    return empty


def _unwritten(name: str, empty: Tensor, two: Tensor) -> _Found:
    n = int(empty.sum())
    raw = bool(_is_marked(two, marked=False)[empty].all())
    what = "memory that nothing wrote to" if raw else "computed from memory that nothing wrote to"
    said = f"is not initialized: {_of(n, empty.numel())} {'is' if n == 1 else 'are'} {what}"
    return _Found(name, 0, said, f"are {what}", n)


def _differing(name: str, direct: tuple[Tensor, Tensor], later: tuple[Tensor, Tensor]) -> _Found | str | None:
    """Return how the values differ of a tensor that is initialized both times."""
    random, drawn = differing_bits(*direct), differing_bits(*later)
    x, one = direct[0], later[0]
    wrong = differing_bits(x, one) & ~random & ~drawn & ~(_is_nan(x) & _is_nan(one)) & ((x != one) | _is_nan(x))
    n = int(wrong.sum())
    # Random elements may be the same by chance for both seeds.
    if n > _BY_CHANCE * x.numel() * bool(random.any() and drawn.any()):
        where = tuple(wrong.nonzero()[0].tolist())
        values = f"{_value(one[where])}, made directly {_value(x[where])}"
        place = f"the first at {list(where)} " if where else ""
        said = f"has other values: {_of(n, x.numel())} {'differs' if n == 1 else 'differ'}, {place}is {values}"
        return _Found(name, 3, said, f"differ: {place}is {values}", n)
    if bool(random.any()) != bool(drawn.any()):
        now, was = ("random" if mask.any() else "constant" for mask in (drawn, random))
        return _Found(name, 4, f"is {now}, made directly {was}", f"are {now}, made directly {was}")
    return "only seen to be random" if random.any() else None


def _is_nan(x: Tensor) -> Tensor:
    return x.isnan() if is_rounded(x) else torch.zeros(x.shape, dtype=torch.bool)


def _is_marked(x: Tensor, *, marked: bool) -> Tensor:
    """Return which elements are what is in memory that nobody wrote to."""
    return x == torch.tensor(_filling(x.dtype, marked=marked), dtype=x.dtype)


def _of(n: int, numel: int) -> str:
    if n == numel:
        return f"all {n:,} elements" if n > 1 else "its element"
    return f"{n:,} of {numel:,} elements"


def _value(x: Tensor) -> str:
    value = x.item()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _broken(one: _Made, found: list[_Found], looked_at: int, how: str) -> Violation:
    """Return all that is not as in a model that is made directly."""
    found = sorted(found, key=lambda each: each.rank)
    first = found[0]
    return Violation.at(
        first.name,
        f"{first.said}; {out_of(len(found), looked_at, 'parameters and buffer')}",
        columns=("name", "kind", "elements", f"after {how} they"),
        rows=[
            (each.name, one.kinds[each.name], f"{each.elements or one.numel[each.name]:,}", each.they) for each in found
        ],
        advice=_ADVICE[first.rank],
        # It may be computed again when it is used on another device.
        level="hint" if all(one.kinds[each.name] == _ATTRIBUTE for each in found) else "broken",
    )
