"""Whether a checkpoint is wholly loaded: what of a model does not come from it, element by element.

``strict=False``, a rename that misses a key, or a loop that ends one layer early leave weights as they were made, and
the model runs all the same. Keys do not show it, because own code need not use them. So the model is loaded twice, and
all that loading does not decide differs between the two: what the model held before, random numbers, memory that
nothing wrote to, and constants. What differs afterwards does not come from the checkpoint.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_modelprobe._torch import DispatchMode, Operation, schema, storage_key
from pytest_modelprobe.checks.check import StateCheck, noted
from pytest_modelprobe.checks.outcome import NotApplicableError, Outcome, Violation, line_of, message_of
from pytest_modelprobe.checks.registration import copy_on_cpu, made_model, new_memory, temporary_names
from pytest_modelprobe.checks.rounding import as_double, differing_bits, is_rounded, plain
from pytest_modelprobe.checks.session import all_named
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import (
    ModelState,
    as_real,
    check_supported,
    has_dense_storage,
    seeding,
    unexpanded,
)
from pytest_modelprobe.probe import ModelProbe
from pytest_modelprobe.record import Selector, select
from pytest_modelprobe.text import count, listed, out_of

_CONSTANT = 0.8372
"""What constants become in the second run: a number that no code sets, valid as a probability and as a scale."""

_COUNT = 83
"""The same for single integers, as of batches."""

_COUNTED = (torch.int32, torch.int64)

_FILLS = {
    "zero_", "fill_", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like",
    "new_full",
}  # fmt: skip
"""Operations that fill a tensor with one number."""

_MOVES = {
    "_unsafe_view", "alias", "as_strided", "cat", "chunk", "clone", "contiguous", "copy_", "detach",
    "detach_", "empty_like", "expand", "lift_fresh", "narrow", "new_empty", "permute", "rand_like", "randn_like",
    "repeat", "reshape", "select", "set_", "slice", "split", "split_with_sizes", "squeeze", "stack", "t", "transpose",
    "unbind", "unflatten", "unsqueeze", "view",
}  # fmt: skip
"""Operations that move numbers, or ask for shapes alone."""

Cause = Literal["kept", "random", "constant", "memory", "meta", "read"]
"""Why a value does not come from the checkpoint, the surest first."""

_SAID: Mapping[Cause, str] = {
    "kept": "stay as they were",
    "random": "are drawn at random",
    "constant": "are set to a constant",
    "memory": "are memory that nothing wrote to",
    "meta": "are still on the meta device",
    "read": "depend on what they held before",
}
"""What the elements of a parameter or buffer do then."""


@StateCheck
def wholly_loaded(
    probe: ModelProbe,
    model: nn.Module | Callable[[], Any],
    load: Callable[[Any], Any] | None = None,
    *,
    new: Selector | None = None,
) -> Outcome:
    """Check that every parameter and persistent buffer of a model comes from the checkpoint, in each element.

    The model is loaded twice. The second time all that was in it is different, new memory is filled with NaN, random
    numbers have another seed, and operations that fill a floating tensor with one number (``zero_``, ``fill_``,
    ``zeros``, ``ones``, ``full``), as those of ``torch.nn.init`` do, or a count of batches, fill it with another one.
    Elements that differ afterwards do not come from the checkpoint. It does not matter how they are written: in place,
    through ``.data``, a view or a tie, or as another tensor (``assign=True``).

    If the value of an element depends on what it held before, as where an average is loaded into another, the outcome
    is a hint: nothing tells how much of it comes from the checkpoint.

    A buffer that is not persistent is in no checkpoint: it is neither missed nor counted. It breaks the check only if
    loading left it without memory of its own, as ``to_empty`` does.

    Not seen are constants that are made otherwise, such as sinusoidal positions or tables of integers; random numbers
    of a generator with a seed of its own; and what is no tensor, such as the extra state of a module. Whether the
    checkpoint holds the right values is not looked at either.

    Args:
        probe: Gives the seed.
        model: The model to load into, which is restored; or a function that makes one. Without ``load``, it returns a
            model that is loaded: ``lambda: AutoModel.from_pretrained(folder)``.
        load: Loads the checkpoint into the model: ``lambda model: model.load_state_dict(torch.load(path))``. If it
            returns a model, that one is looked at.
        new: Names or globs of parameters and buffers that are not meant to come from the checkpoint, such as
            ``"classifier.*"``.

    Raises:
        SelectionError: ``new`` matches no parameter or buffer.
        AssertionError: Something does not come from the checkpoint; the message names all of it.
        UsageError: No model is given or made, it has no parameters or buffers, or it cannot be loaded twice.

    >>> import torch
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> saved = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).state_dict()
    >>> model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    >>> print(checks.wholly_loaded(ModelProbe(), model, lambda model: model.load_state_dict(saved)))
    wholly_loaded holds for Sequential: 4 parameters and buffers
    >>> del saved["1.bias"]
    >>> def load(model):
    ...     model.load_state_dict(saved, strict=False)
    >>> print(checks.wholly_loaded.outcome(ModelProbe(), model, load).layer)
    1.bias
    """
    __tracebackhide__ = True
    _check(model, load)
    if isinstance(model, nn.Module):
        with ModelState(model) as state:
            return _Loading(probe, model, load, state).outcome(new)
    return _Loading(probe, model, load, None).outcome(new)


def _check(model: object, load: object) -> None:
    __tracebackhide__ = True
    if isinstance(model, nn.Module):
        check_supported(model)
        if load is None:
            raise UsageError(
                "load is missing: give a function that loads, wholly_loaded(modelprobe, model, load), or one that "
                "returns a loaded model, wholly_loaded(modelprobe, lambda: Net.from_pretrained(folder))"
            )
    elif not callable(model):
        raise UsageError(f"model is a torch.nn.Module, or a function that makes one; got {type(model).__name__}")
    if load is not None and (not callable(load) or isinstance(load, nn.Module)):
        raise UsageError(f"load is a function, load(model); got {type(load).__name__}")


# --- loading ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Loaded:
    """What was seen of a model that was loaded."""

    model: str
    before: dict[str, Tensor]
    """What its parameters and buffers held before, by all their names."""
    fixed: set[str]
    """Names of those that could not be changed before."""
    unused: list[str]
    """Keys of the checkpoint that loading says it did not use."""
    after: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, int] = field(default_factory=dict)
    """Names of parameters and buffers on the meta device, with their numbers of elements."""
    temporary: set[str] = field(default_factory=set)
    """Names of buffers that are in no checkpoint."""
    unread: list[str] = field(default_factory=list)
    """Names of parameters and buffers whose elements cannot be compared."""


@dataclass(slots=True, eq=False)
class _Loading:
    probe: ModelProbe
    given: nn.Module | Callable[[], Any]
    load: Callable[[Any], Any] | None
    state: ModelState | None
    made: list[weakref.ref[nn.Module]] = field(default_factory=list)
    """The models that the function made."""

    def outcome(self, new: Selector | None) -> Outcome:
        """Load twice, and say what differs."""
        __tracebackhide__ = True
        one = self.run()
        if not (one.after or one.meta or one.unread):
            raise NotApplicableError(f"{one.model} has no parameters or buffers")
        constants = ""
        try:
            two = self.run(other_values=True, other_seed=True, other_constants=True)
        except UsageError:
            raise
        except Exception:  # noqa: BLE001 - whatever loading raises that met another constant
            two = self.again(other_values=True, other_seed=True)
            constants = "; not looked at, as loading fails with others: constants"
        rows = _by_cause(one, two)
        if unclear := [name for name, causes in rows.items() if "read" in causes]:
            self.explain(one, rows, unclear)
        declared: list[str] = []
        if new is not None:
            declared = select(dict.fromkeys([*one.after, *one.meta, *one.unread]), new)
        found = {name: causes for name, causes in rows.items() if causes and name not in declared}
        if found:
            return _broken(one, found, declared)
        persistent = [name for name in one.after if name not in one.temporary and name not in declared]
        if not persistent:
            left = f": {listed(one.unread)} cannot be compared" if one.unread else ""
            raise NotApplicableError(f"no parameter or persistent buffer of {one.model} is left to look at{left}")
        text = count(len(persistent), "parameters and buffer") + constants
        loaded = [name for name in declared if name in one.after and not rows.get(name)]
        for what, names in (
            ("said to be new", [name for name in declared if name not in loaded]),
            ("loaded, though said to be new", loaded),
            ("not persistent", [name for name in one.after if name in one.temporary]),
            ("not looked at, as it cannot be compared", one.unread),
            ("not used of the checkpoint", one.unused),
        ):
            text += f"; {what}: {listed(names)}" if names else ""
        return Outcome(check="wholly_loaded", model=one.model, verdict="holds", text=text)

    def explain(self, one: _Loaded, rows: dict[str, dict[Cause, Tensor]], names: list[str]) -> None:
        """Tell apart, of elements that differ for an unknown reason, the random ones and those that read old values."""
        seeded, other = self.again(other_seed=True), self.again(other_values=True)
        for name in names:
            unknown = rows[name].pop("read")
            random = unknown & _differs(one.after[name], seeded.after.get(name))
            read = unknown & ~random & _differs(one.after[name], other.after.get(name))  # else a constant was added
            if random.any():
                rows[name]["random"] = random
            if read.any():
                rows[name]["read"] = read

    def again(self, **how: bool) -> _Loaded:
        """Load once more, though another run did it already.

        Raises:
            NotApplicableError: It raises with other values or another seed.
        """
        try:
            return self.run(**how)
        except (NotApplicableError, UsageError):
            raise
        except Exception as error:
            what = "after the values of the model were changed" if self.state or self.load else "a second time"
            raise NotApplicableError(f"loading raises {what}: {line_of(error)}") from error

    def run(self, *, other_values: bool = False, other_seed: bool = False, other_constants: bool = False) -> _Loaded:
        """Make a model, load it, and return what it holds."""
        __tracebackhide__ = True
        seeding.seed_everything(seeding.derive(self.probe.seed, f"load {'other' if other_seed else 'one'}"))
        try:
            # The other run has other values and other memory: what loading leaves as it is, is either.
            with new_memory(filled=other_values), _Constants() if other_constants else nullcontext():
                model, found = self._loaded(changed=other_values)
            found.temporary |= temporary_names(model)
            for name, t in (*model.named_parameters(), *model.named_buffers()):
                if t.is_meta:
                    found.meta[name] = t.numel()
                elif name not in found.fixed and (copy := copy_on_cpu(t)) is not None:
                    found.after[name] = copy
                else:
                    found.unread.append(name)
            return found
        finally:
            if self.state is not None:
                self.state.restore()

    def _loaded(self, *, changed: bool) -> tuple[nn.Module, _Loaded]:
        """Return a loaded model, and what is known of it before its numbers are read."""
        __tracebackhide__ = True
        model, info = (self.given, None) if isinstance(self.given, nn.Module) else self._made(self.given)
        before: dict[str, Tensor] = {}
        fixed: set[str] = set()
        if self.load is not None:
            before, fixed = _values(model, changed=changed)
            with noted("in load", "wholly_loaded"):
                returned = self.load(model)
            model = returned if isinstance(returned, nn.Module) else model
            info = info or returned
        keys = info.get("unexpected_keys") if isinstance(info, Mapping) else getattr(info, "unexpected_keys", None)
        unused = sorted(map(str, keys)) if isinstance(keys, list | tuple | set) else []
        return model, _Loaded(type(model).__name__, before, fixed, unused)

    def _made(self, make: Callable[[], Any]) -> tuple[nn.Module, Any]:
        __tracebackhide__ = True
        with noted("in the function that makes the model", "wholly_loaded"):
            made = make()
            made, info = made if isinstance(made, tuple) and len(made) == 2 else (made, None)  # with its loading info
            model = made_model(made, "the function")
        if any(model is other() for other in self.made):
            raise UsageError("the function returns the same model again: it has to make or load another one")
        self.made.append(weakref.ref(model))
        return model, info


def _values(model: nn.Module, *, changed: bool) -> tuple[dict[str, Tensor], set[str]]:
    """Return copies of all parameters and buffers by all their names, which are changed before if that is said.

    The names of those that cannot be changed come second: loading cannot be told from leaving them.
    """
    named, temporary = all_named(model), temporary_names(model)
    # Of all first: one may be a view of another.
    others = {id(t): _other_or_none(t) for name, t in named if name not in temporary}
    fixed = {name for name, t in named if id(t) in others and others[id(t)] is None and not (t.is_meta or is_lazy(t))}
    if changed:
        with torch.no_grad():
            for _, t in named:
                if (other := others.pop(id(t), None)) is not None:
                    unexpanded(t).copy_(other)
    return {name: copy for name, t in named if (copy := copy_on_cpu(t)) is not None}, fixed


def _other_or_none(t: Tensor) -> Tensor | None:
    """Return other values for a tensor; None if it cannot be written to."""
    if not has_dense_storage(t) or t.is_inference():
        return None
    try:
        with torch.no_grad():
            own = unexpanded(t.detach())
            other = _other(own)
            own.copy_(own.clone())
    except (RuntimeError, TypeError, NotImplementedError):  # quantized, a dtype of bits, memory that overlaps
        return None
    return other


def _other(x: Tensor) -> Tensor:
    """Return a value that differs from each element in any dtype, and has its sign: it may be a variance or an index.

    >>> _other(torch.tensor([0.0, 2.0, -3.0])), _other(torch.tensor([0, 5])), _other(torch.tensor([True]))
    (tensor([1., 5., 1.]), tensor([1, 4]), tensor([False]))
    """
    if x.dtype == torch.bool:
        return ~x
    if x.is_complex():
        return torch.complex(_other(x.real), _other(x.imag))
    if not x.is_floating_point():
        return x ^ 1
    wide = as_double(x)
    valid = (wide >= 0) & (wide < torch.finfo(x.dtype).max / 4)
    return torch.where(valid, 2 * wide + 1, 1.0).to(x)


class _Constants(DispatchMode):
    """Makes operations that fill a tensor with one number fill it with another one.

    What is computed from such a tensor, as where weights are added to zeros, or a scale is read, gets the right number:
    the other one is only seen where a constant itself becomes a parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        self._filled: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """By storage: tensors that are filled, which keeps their storage, and the right number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, Operation):  # one of a higher order
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in _FILLS:
            return self._fill(func(*args, **kwargs), in_place=name.endswith("_"))
        if name in _MOVES or not self._filled or (name == "_to_copy" and args[0].is_floating_point()):
            return func(*args, **kwargs)
        keys = {storage_key(leaf.untyped_storage()) for leaf in _leaves((args, kwargs)) if has_dense_storage(leaf)}
        read = [one for key in keys for one in self._filled.get(key, [])]
        filled = [(tensor, _is_constant(tensor)) for tensor, _ in read]
        for (tensor, where), (_, right) in zip(filled, read, strict=True):
            tensor.copy_(torch.where(where, right, tensor))
        out = func(*args, **kwargs)
        if schema(func).is_mutable:  # what it wrote to is no constant any more
            for key in keys:
                self._filled.pop(key, None)
        else:
            for tensor, where in filled:
                tensor.copy_(torch.where(where, torch.full_like(tensor, _other_constant(tensor)), tensor))
        return out

    def _fill(self, out: Any, *, in_place: bool) -> Any:
        if not has_dense_storage(out) or not out.numel():
            return out
        # Integers with an axis may be indices.
        if out.is_floating_point() or (in_place and out.dtype in _COUNTED and not out.dim()):
            right = out.detach().flatten()[0].clone()
            self._filled.setdefault(storage_key(out.untyped_storage()), []).append((out.detach(), right))
            out.fill_(_other_constant(out))
        return out


def _other_constant(x: Tensor) -> float:
    return _CONSTANT if x.is_floating_point() else _COUNT


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        yield value
        return
    for one in value:
        yield from _leaves(one)


# --- comparing --------------------------------------------------------------------------------------------------------


def _by_cause(one: _Loaded, two: _Loaded) -> dict[str, dict[Cause, Tensor]]:
    """Return where each parameter or buffer does not come from the checkpoint, by cause.

    What is not explained by the two runs alone is ``read``.
    """
    if (one.after.keys(), one.meta) != (two.after.keys(), two.meta):
        raise NotApplicableError("the model has other parameters or buffers when it is loaded again")
    rows: dict[str, dict[Cause, Tensor]] = {name: {"meta": torch.tensor(True)} for name in one.meta}
    for name, x in one.after.items():
        y = two.after[name]
        causes = _causes(x, y, one.before.get(name), two.before.get(name))
        rows[name] = causes if name not in one.temporary else {c: w for c, w in causes.items() if c == "memory"}
    return rows


def _causes(x: Tensor, y: Tensor, before_x: Tensor | None, before_y: Tensor | None) -> dict[Cause, Tensor]:
    """Return which elements differ between the two runs, by cause."""
    left = _differs(x, y)
    if not left.any():
        return {}
    causes: dict[Cause, Tensor] = {}
    tests: dict[Cause, Tensor] = {
        "kept": _is_kept(before_x, x) & _is_kept(before_y, y),
        "memory": _is_unwritten(y),
        "constant": _is_constant(y),
        "read": left,
    }
    for cause, where in tests.items():
        if (left & where).any():
            causes[cause], left = left & where, left & ~where
    return causes


def _differs(x: Tensor, y: Tensor | None) -> Tensor:
    """Return in which elements two tensors differ bit for bit."""
    if y is None or x.shape != y.shape or x.dtype != y.dtype:
        raise NotApplicableError("a parameter or buffer has another shape or dtype when it is loaded again")
    return differing_bits(x, y)


def _is_kept(before: Tensor | None, after: Tensor) -> Tensor:
    """Return which elements are those of before, in another dtype perhaps."""
    if before is None or before.shape != after.shape:
        return torch.zeros(after.shape, dtype=torch.bool)
    return ~_differs(before.to(after.dtype), after)


def _is_unwritten(x: Tensor) -> Tensor:
    """Return which elements are what `new_memory` fills memory with."""
    if is_rounded(x):
        return torch.isnan(as_real(plain(x))).flatten(x.dim()).all(-1) if x.is_complex() else torch.isnan(plain(x))
    return x == (1 if x.dtype == torch.bool else torch.iinfo(x.dtype).max)


def _is_constant(x: Tensor) -> Tensor:
    """Return which elements are what `_Constants` fills with."""
    if x.is_floating_point():
        return ~_differs(x, torch.full_like(x, _CONSTANT))
    return x == _COUNT if x.dtype in _COUNTED else torch.zeros(x.shape, dtype=torch.bool)


def _broken(one: _Loaded, found: Mapping[str, Mapping[Cause, Tensor]], declared: list[str]) -> Outcome:
    """Return the outcome with all that does not come from the checkpoint."""
    sure = [name for name, causes in found.items() if causes.keys() != {"read"}]
    counted: list[tuple[str, Cause, int, int]] = []
    for name in sure + [name for name in found if name not in sure]:
        numel = one.meta[name] if name in one.meta else one.after[name].numel()
        missing = {cause: numel if name in one.meta else int(where.sum()) for cause, where in found[name].items()}
        counted += [(name, cause, missing[cause], numel) for cause in get_args(Cause) if cause in missing]
    first, cause, n, numel = counted[0]
    how = f"{n:,} of {numel:,} elements {_SAID[cause]}"
    if cause == "meta":
        said = "is still on the meta device"
    elif first in one.temporary:
        said = f"lost its values: {how}"
    elif cause == "read":
        said = f"may not be loaded: {how}"
    elif n < numel:
        said = f"is not wholly loaded: {how}"
    else:
        said = f"is not loaded: all {numel:,} elements {_SAID[cause]}"
    looked_at = [name for name in (*one.after, *one.meta) if name in found or name not in {*one.temporary, *declared}]
    said += f"; {out_of(len(found), len(looked_at), 'parameters and buffer')}"
    violation = Violation.at(
        first,
        said,
        columns=("name", "not loaded", "elements", "they"),
        rows=[(name, f"{n:,}", f"{of:,}", _SAID[cause]) for name, cause, n, of in counted],
        advice=_advice(one, first, cause, nothing=len(found) == len(looked_at) and cause == "kept"),
        level="broken" if sure else "hint",
    )
    return Outcome(
        check="wholly_loaded", model=one.model, verdict=violation.level, text=message_of(violation), layer=first
    )


def _advice(one: _Loaded, first: str, cause: Cause, *, nothing: bool) -> str:
    if nothing:
        return "Nothing was loaded: load has to write into the model that it is given, or return the loaded one."
    if first in one.temporary:
        return (
            "It is in no checkpoint: compute it again after to_empty(), as the constructor does, or do not make the "
            "model on the meta device."
        )
    if cause == "read":
        return (
            "Loading computes it from the old value, as an average does: what comes from the checkpoint cannot be told "
            "apart. Copy the values of the checkpoint, or name what is meant to be so in new=."
        )
    unused = f"Not used of the checkpoint: {listed(one.unused)}. " if one.unused else ""
    return (
        f"{unused}Compare the name with the keys of the checkpoint, and look for strict=False and for a rename or a "
        "loop that leaves it out. If it is meant to be new, as a head before training is, name it in new=."
    )
