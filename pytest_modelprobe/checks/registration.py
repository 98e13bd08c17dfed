"""Parts of a model: registered, initialized, and unchanged by state_dict, copy and pickle.

Optimizers, ``state_dict`` and ``to`` see only what a module has registered. The checks look for tensors that are kept
elsewhere, for memory that nothing wrote to, and for state that is lost when a model is saved and loaded.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import pickle
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import (
    CallTracer,
    ModuleCall,
    check_supported,
    detached_copy,
    flatten_call,
    has_dense_storage,
    is_persistent,
    seeding,
    unexpanded,
    version,
)
from pytest_modelprobe.record import ROOT, qualified
from pytest_modelprobe.runs import graph_nodes
from pytest_modelprobe.text import count, listed, pattern

from .agreement import check_repeats, disagreements, violation_of
from .check import check, check_unmodified
from .outcome import NotApplicableError, Violation, line_of
from .rounding import is_rounded, plain, same
from .session import PreparedModel, Trace, all_named, place, set_mode

# --- side effects of a forward ------------------------------------------------------------------------------------


@check
def state_unchanged_by_forward(prepared: PreparedModel) -> Violation | str:
    """Check that a forward in evaluation mode changes no parameter, no buffer and no output of the next forward.

    Other attributes of a module, such as a cache of positions, may change as long as the outputs do not.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe, model = ModelProbe(), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    >>> print(checks.state_unchanged_by_forward(probe, model, probe.randn(4, 3)))
    state_unchanged_by_forward holds for Sequential: 7 parameters and buffers, 3 forwards
    """
    rows_of = {path: x for path, x in prepared.dense if x.dim() and x.shape[0] > 1}

    def rolled(path: str, x: Tensor) -> Tensor:
        return x.roll(1, 0) if path in rows_of else x

    fresh = prepared.run(mode="eval", vary=rolled)
    with prepared.keep_changes():
        before = {name: tensor.detach().clone() for name, tensor in all_named(prepared.model)}
        one = prepared.reference(mode="eval")
        changed = [name for name, tensor in all_named(prepared.model) if not same(tensor, before.get(name))]
        if changed:
            return Violation.first_of(
                ((name,) for name in changed),
                "is changed by a forward in evaluation mode",
                columns=("changed",),
                advice="Look for running statistics that ignore self.training, and for writes to a buffer.",
            )
        two = prepared.variation(mode="eval")
        found = disagreements(one, two, tolerance=0.0, integers=True)
        if not found and fresh.error is None:  # state of the first inputs may fit these alone
            found = disagreements(fresh, prepared.run(mode="eval", vary=rolled), tolerance=0.0, integers=True)
    if found:
        check_repeats(prepared, "eval", tolerance=0.0)
        return violation_of(
            found,
            "returns another {path} after a forward: {changed}",
            "Look for state that it keeps of its last forward: a cache, a counter, a hidden state.",
        )
    return f"{count(len(before), 'parameters and buffer')}, 3 forwards"


@check
def inputs_unchanged_by_forward(prepared: PreparedModel) -> Violation | str:
    """Check that the model does not write to its inputs: neither to tensors nor to lists or dicts of them.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.inputs_unchanged_by_forward(probe, nn.ReLU(), probe.randn(4, 3)))
    inputs_unchanged_by_forward holds for ReLU: 1 input
    >>> print(checks.inputs_unchanged_by_forward.outcome(probe, nn.ReLU(inplace=True), probe.randn(4, 3)).layer)
    (root)
    """
    prepared.reference(mode="eval")
    given: list[Any] = []
    known: _Contents = {}
    blamed: list[tuple[str, str]] = []

    def look(call: ModuleCall) -> None:
        now = _contents(*given)
        both = sorted(now.keys() & known.keys())
        written = [path for path in both if not _same(now[path], known[path])]
        blamed.extend((call.layer, path) for path in (*written, *sorted(known.keys() ^ now.keys())))
        known.clear()
        known.update(now)

    def begin(call: ModuleCall, args: Any, kwargs: Any) -> None:
        if call.parent is not None:
            look(call.parent)
        else:
            given[:] = args, kwargs
            known.update(_contents(*given))

    def end(call: ModuleCall, args: Any, output: Any) -> None:
        look(call)

    with CallTracer(prepared.layers.modules, ModuleCall, before=begin, after=end):
        prepared.variation(mode="eval")
    if blamed:
        _, path = blamed[0]
        return Violation.first_of(
            blamed,
            f"writes into {path}, which the caller may use again",
            columns=("written by", "input"),
            advice="Look for an in-place operation (inplace=True, x += ..., x[...] = ...), and clone before it.",
        )
    return count(len(flatten_call(prepared.args, prepared.kwargs).tensors), "input")


_Contents = dict[str, object]
"""By path, version and copy of a tensor, or the text of another value: NaN is not equal to itself."""


def _contents(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Contents:
    flat = flatten_call(args, kwargs)
    copies = {path: (version(x), x.detach().clone() if has_dense_storage(x) else None) for path, x in flat.tensors}
    return {**copies, **{path: repr(value) for path, value in flat.plain.items()}}


def _same(now: object, before: object) -> bool:
    if not (isinstance(now, tuple) and isinstance(before, tuple)):
        return now == before
    (version_now, copy_now), (version_before, copy_before) = now, before
    return version_now == version_before and (copy_now is None or copy_before is None or same(copy_now, copy_before))


OF_ANY_MODULE = frozenset(vars(nn.Module()))
"""Attributes of every module: its parameters, buffers and hooks."""

_DEEPEST = 3
"""How many containers inside each other are searched for tensors."""

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@check_unmodified
def registered(prepared: PreparedModel) -> Violation | str:
    """Check that no module and no parameter is in a plain container, and that no tensor should be a buffer.

    Unregistered tensors are in no optimizer and no state_dict, and do not move with the model. With inputs, a forward
    shows which tensors the model computes again, such as stored attention weights: those need not be registered.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> print(checks.registered(ModelProbe(), model))
    registered holds for Sequential: 2 modules
    >>> model.extra = [nn.Linear(2, 2)]
    >>> print(checks.registered.outcome(ModelProbe(), model).layer)
    extra[0]
    """
    before = unregistered(prepared)
    with prepared.keep_changes():
        prepared.run()
        after = unregistered(prepared)
    found = [(where, _kind(value)) for where, value in before.items() if after.get(where) is value]
    if not found:
        return count(sum(1 for _ in prepared.model.modules()), "module")
    return Violation.first_of(
        found,
        f"is {found[0][1]} that the model has not registered",
        columns=("where", "what"),
        advice="Put modules in an nn.ModuleList or nn.ModuleDict, parameters in an nn.ParameterList; pass other "
        "tensors to self.register_buffer, with persistent=False if they are computed again.",
    )


def unregistered(prepared: PreparedModel) -> dict[str, Any]:
    """Return the modules, parameters and tensors that the model has not registered, by their paths."""
    tensors = [*nn.Module.parameters(prepared.model), *nn.Module.buffers(prepared.model)]
    known: set[Hashable] = {*map(id, [*prepared.model.modules(), *tensors]), *map(place, tensors)}
    return {
        where: value
        for name, module in prepared.layers.modules.items()
        for key, attribute in vars(module).items()
        if key not in OF_ANY_MODULE and not meant(module, key, attribute)
        for where, value in _unregistered(qualified(name, key), attribute, known, _DEEPEST)
    }


def meant(module: nn.Module, key: str, attribute: Any) -> bool:
    """Whether an attribute is not registered on purpose."""
    # A plain assignment would have registered it.
    hidden = key.startswith("_") and isinstance(attribute, (nn.Module, nn.Parameter))
    # Spectral norms, weight norms and pruning compute it from a parameter.
    return hidden or any(f"{key}_{suffix}" in module._parameters for suffix in ("orig", "g"))


def _unregistered(where: str, value: Any, known: set[Hashable], depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (nn.Module, Tensor)):
        if id(value) not in known and _is_state(value, known):
            yield where, value
    elif depth and isinstance(value, Mapping):
        for key, item in value.items():
            yield from _unregistered(f"{where}[{key!r}]", item, known, depth - 1)
    elif depth and isinstance(value, (list, tuple, deque, set, frozenset)):
        for i, item in enumerate(value):
            yield from _unregistered(f"{where}[{i}]", item, known, depth - 1)


def _is_state(value: nn.Module | Tensor, known: set[Hashable]) -> bool:
    if isinstance(value, nn.Module | nn.Parameter):
        return True
    if value.is_leaf:
        return value.numel() > 1 and place(value) not in known  # one number may be a constant
    # FSDP and weight norms compute tensors from parameters of the model; `nn.Parameter(x).to(dtype)` from its own.
    leaves = (getattr(node, "variable", None) for node in graph_nodes(value.grad_fn))
    return any(isinstance(leaf, nn.Parameter) and id(leaf) not in known for leaf in leaves)


def _kind(value: Any) -> str:
    if isinstance(value, nn.Module):
        return f"a module ({type(value).__name__})"
    if isinstance(value, nn.Parameter):
        return "a parameter"
    return "a tensor" if value.is_leaf else "a tensor computed from a parameter"


@check_unmodified
def initialized(prepared: PreparedModel, *, factory: Callable[[], nn.Module] | None = None) -> Violation | str:
    """Check that every parameter and buffer is initialized.

    The model is built again while new memory is filled with NaN, or with the largest integer; elements that keep this
    value were never written to. `ModelProbe.build` remembers the factory; tensors of such a model that were written to
    since, as by loading, are left out.

    Without a factory only values are looked at: NaN and infinity.

    Layers of one list with the same random weights are a hint: they are copies that were not initialized anew.

    Args:
        prepared: The model.
        factory: Builds such a model. By default it is the factory of `ModelProbe.build`, if that made the model.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> def broken():
    ...     model = nn.Linear(2, 2)
    ...     model.scale = nn.Parameter(torch.empty(2))
    ...     return model
    >>> print(checks.initialized.outcome(ModelProbe(), broken(), factory=broken).layer)
    scale
    """
    model = prepared.model
    numbers = _numbers(model)
    if not numbers:
        raise NotApplicableError("the model has no parameters or buffers of numbers")
    found: Violation | str = (
        f"{count(len(numbers), 'parameters and buffer')}, as far as values show; not looked at, whether each was "
        "written to: no factory="
    )
    if factory is not None:
        found = _never_written(model, factory)
    elif built := prepared.probe.built.get(model):
        with contextlib.suppress(Exception):  # it makes no model again
            found = _never_written(model, built.factory, built.versions)
    if isinstance(found, Violation):
        return found
    values = [(name, t, plain(t.detach())) for name, t in numbers if is_rounded(t)]
    bad = [
        (name, int((~x.isfinite()).sum()), t.numel())
        for name, t, x in values
        if (~x.isfinite() if isinstance(t, nn.Parameter) else x.isnan()).any()  # masks are made of -inf
    ]
    if bad:
        _, missing, numel = bad[0]
        return Violation.first_of(
            bad,
            f"is not finite: {missing:,} of {numel:,} elements are NaN or infinite",
            columns=("name", "not finite", "elements"),
            advice="Either they were never initialized (look for torch.empty without an nn.init after it), or training "
            "diverged: factory= tells which.",
        )
    return _copied(prepared) or found


_LOOKED_AT = 1024
"""How many elements of a parameter tell whether it was drawn at random, and by how many an equal one is found."""

_DIFFERENT = 0.99
"""The least share of different values in what was drawn at random: an identity, or a range in each row, has fewer."""


def _copied(prepared: PreparedModel) -> Violation | None:
    """Return a hint if layers of one list have the same random weights: one was initialized, and the others copied."""
    originals: dict[tuple[object, ...], tuple[str, Tensor]] = {}
    rows = []
    for name, parameter in prepared.model.named_parameters():
        if parameter.dim() > 1 and parameter.requires_grad and has_dense_storage(parameter):
            values = plain(parameter.detach())
            some = tuple(values.flatten()[:_LOOKED_AT].tolist())
            if len(some) > 1 and len(set(some)) >= _DIFFERENT * len(some):
                key = (pattern(name), values.shape, values.dtype, some)
                original, first = originals.setdefault(key, (name, values))
                if place(first) != place(values) and torch.equal(first, values):
                    rows.append((name, original, str(tuple(values.shape))))
    if not rows:
        return None
    return Violation.first_of(
        rows,
        f"has the same values as {rows[0][1]}, though they are two parameters",
        columns=("parameter", "same values as", "shape"),
        advice="copy.deepcopy copies weights too, as nn.TransformerEncoder does with its layer: initialize each copy "
        "anew. If they are meant to begin alike, it is well; if one is not trained, freeze it.",
        level="hint",
    )


def _never_written(
    model: nn.Module, factory: Callable[[], nn.Module], versions: Mapping[str, int | None] | None = None
) -> Violation | str:
    """Return the tensors that still hold NaN in a model that was built in memory filled with it.

    Args:
        model: The model.
        factory: Builds such a model.
        versions: Version of each tensor when the model was built; those with another one are left out.
    """
    here = dict(_numbers(model))
    with new_memory(filled=True):
        again = made_model(factory(), "factory=")
    if again is model:
        raise UsageError("factory= returns the model itself: it makes no other")
    made = _numbers(again)
    left: list[str] = []
    if versions is not None:
        left = [n for n, t in here.items() if version(t) != versions.get(n, -1)]
        made = [(n, t) for n, t in made if n in here and n not in left and here[n].shape == t.shape]
        if not made:
            raise UsageError("all parameters and buffers were written to since the model was built")
    found = []
    for name, t in made:
        if is_rounded(t):
            empty = t.isnan()
        else:  # the largest integer may be intended: the model itself has it then
            largest, known = torch.iinfo(t.dtype).max, here.get(name)
            meant = known is not None and known.shape == t.shape and bool((known == largest).any())
            empty = (t == largest) & (not meant)
        if missing := int(empty.sum()):
            found.append((name, missing, t.numel()))
    if not found:
        later = f"; not looked at, as written to since it was built: {listed(left)}" if left else ""
        return count(len(made), "parameters and buffer") + later
    _, missing, numel = found[0]
    return Violation.first_of(
        found,
        f"is not initialized: {missing:,} of {numel:,} elements were never written to",
        columns=("name", "never written to", "elements"),
        advice="Look for torch.empty without an nn.init after it, and for modules that the model's own init skips.",
    )


def _numbers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers that have memory; no bools, where any value is valid."""
    tensors = [(name, t) for name, t in (*model.named_parameters(), *model.named_buffers()) if has_dense_storage(t)]
    return [(name, t) for name, t in tensors if is_rounded(t) or t.dtype in _INTEGERS]


def temporary_names(model: nn.Module) -> set[str]:
    """Return the names of buffers that are in no checkpoint."""
    return {name for name, _ in model.named_buffers(remove_duplicate=False) if is_persistent(model, name) is False}


def copy_on_cpu(t: Tensor) -> Tensor | None:
    """Return a copy whose elements can be compared; None if there is none."""
    copied = detached_copy(t) if has_dense_storage(t) and not t.is_quantized else None
    return None if copied is None else copied.cpu().contiguous()


def made_model(made: object, by: str) -> nn.Module:
    """Return what a function of the user made.

    Raises:
        UsageError: It is no model, or one that is not supported.
    """
    __tracebackhide__ = True
    if not isinstance(made, nn.Module):
        raise UsageError(f"{by} returns a torch.nn.Module; got {type(made).__name__}")
    check_supported(made)
    return made


@contextlib.contextmanager
def new_memory(*, filled: bool) -> Iterator[None]:
    """Fill new memory with NaN, or with the largest integer, or leave it as it is; all else is the same either way."""
    was = torch.get_deterministic_debug_mode()
    memory: Any = torch.utils.deterministic
    filled_before = memory.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")  # torch.use_deterministic_algorithms would import the compiler
    memory.fill_uninitialized_memory = filled
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(was)
        memory.fill_uninitialized_memory = filled_before


@check_unmodified
def state_dict_round_trip(
    prepared: PreparedModel, *, factory: Callable[[], nn.Module] | None = None
) -> Violation | str:
    """Check that another model with the state_dict of this one returns the same, and that tied parameters stay tied.

    The state_dict is saved by `torch.save` and loaded, strictly, into a model whose parameters and persistent buffers
    were replaced by random numbers. If a forward in training mode writes what it lacks, such as a flag, the next one
    differs with a loaded model: that is a hint, as a hidden state may be meant to begin anew.

    Args:
        prepared: The model and its inputs.
        factory: Builds the model to load into. By default the state is loaded into a copy, which keeps what is not in
            the state_dict, such as a random buffer that is not persistent.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.state_dict_round_trip(probe, nn.Linear(3, 2), probe.randn(4, 3)))
    state_dict_round_trip holds for Linear: 2 keys, 1 output
    """
    one = prepared.reference(mode="eval")
    if factory is None:
        other = prepared.copied()
    else:
        with seeding.seeded(seeding.derive(prepared.probe.seed, "check another model")):
            other = factory().to(prepared.probe.device)
    stored = io.BytesIO()
    torch.save(prepared.model.state_dict(), stored)
    stored.seek(0)
    persistent = other.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in other.named_buffers() if name in persistent]
    with torch.no_grad():
        for name, tensor in (*other.named_parameters(), *buffers):
            if has_dense_storage(tensor):
                written = unexpanded(tensor)
                written.copy_(prepared.randn_like(written, name) if is_rounded(written) else written == 0)
    try:
        with warnings.catch_warnings(action="ignore"):  # of sparse tensors torch warns that they are validated
            state: Mapping[str, Any] = torch.load(stored, weights_only=True, map_location=prepared.probe.device)
        other.load_state_dict(state)
    except Exception as error:  # noqa: BLE001 - whatever a model's own hooks raise
        return Violation.at(ROOT, f"cannot load its own state_dict: {line_of(error)}")
    there = {name: p.data_ptr() for name, p in other.named_parameters(remove_duplicate=False)}
    first: dict[int, str] = {}
    names = [(name, id(p)) for name, p in prepared.model.named_parameters(remove_duplicate=False)]
    lost = [(name, tied) for name, p in names if there[name] != there[tied := first.setdefault(p, name)]]
    if lost:
        return Violation.first_of(
            lost,
            f"is not tied to {lost[0][1]} any more after load_state_dict",
            columns=("parameter", "was tied to"),
            advice="Tie the parameters again after loading, or keep one module for both.",
        )
    found = _of_copy(prepared, one, other, "a state_dict", f"{count(len(state), 'key')}, ")
    return found if isinstance(found, Violation) else _lost_of_training(prepared, other) or found


def _lost_of_training(prepared: PreparedModel, other: nn.Module) -> Violation | None:
    """Return a hint if a forward in training mode writes what the state_dict lacks: the next one differs without it."""
    with contextlib.suppress(NotApplicableError):
        check_repeats(prepared, "train", tolerance=0.0)
        with prepared.keep_changes():
            prepared.variation(mode="train")
            set_mode(other, "train")
            other.load_state_dict(prepared.model.state_dict())
            one, two = (prepared.run(mode="train", vary=_moved, model=model) for model in (prepared.copied(), other))
        if found := disagreements(one, two, tolerance=0.0):
            said = "differs after a state_dict of a model that was trained: {path} {changed}"
            advice = "Look for what a forward in training mode sets, such as self.initialized = True: make it a buffer."
            return dataclasses.replace(violation_of(found, said, advice), level="hint")
    return None


def _moved(_: str, x: Tensor) -> Tensor:
    return 2 * x + 1 if x.is_floating_point() else x


@check_unmodified
def copy_and_pickle(prepared: PreparedModel) -> Violation | str:
    """Check that a deep copy and a pickled copy return the same.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.copy_and_pickle(probe, nn.Linear(3, 2), probe.randn(4, 3)))
    copy_and_pickle holds for Linear: 1 output
    """
    one = prepared.reference(mode="eval")
    found: Violation | str = ""
    for by, done, copied, advice in (
        (
            "copy.deepcopy",
            "copied",
            copy.deepcopy,
            "a tensor with a graph among its attributes, an open file, a lock, a __deepcopy__",
        ),
        ("pickle", "pickled", _pickled, "a lambda, a local class or an open file among its attributes"),
    ):
        try:
            other = copied(prepared.model)
        except Exception as error:  # noqa: BLE001 - whatever cannot be copied
            where = _first_not(prepared, copied)
            return Violation.at(where, f"cannot be {done}: {line_of(error)}", advice=f"Look for {advice}.")
        found = _of_copy(prepared, one, other, by)
        if isinstance(found, str) and any(hasattr(module, "parametrizations") for module in prepared.model.modules()):
            return f"{found}, by copy.deepcopy alone: torch pickles no parametrized modules"
        if isinstance(found, Violation):
            return found
    return found


def _pickled(model: nn.Module) -> nn.Module:
    again: nn.Module = pickle.loads(pickle.dumps(model))
    return again


def _of_copy(prepared: PreparedModel, one: Trace, other: nn.Module, by: str, said: str = "") -> Violation | str:
    """Return where a copy differs from the model, or a summary."""
    two, shared = prepared.run_other(other)
    if shared:
        return Violation.first_of(
            ((name,) for name in shared),
            f"is not copied: after {by} the other model still computes with this one",
            columns=("computed with",),
            advice="Look for a function among the attributes of a module that holds a layer or a tensor, as a lambda "
            "does: it is not copied with them. A method uses what its own module has.",
        )
    found = _compared(one, two, by, said)
    if isinstance(found, Violation) and two.error is None:
        check_repeats(prepared, "eval", tolerance=0.0)
        # Where operands are looked at, torch has no fast path for attention, which rounds otherwise.
        found = _compared(prepared.run_other(prepared.model)[0], two, by, said)
    return found


def _compared(one: Trace, two: Trace, by: str, said: str) -> Violation | str:
    if two.error is not None:
        return Violation.at(two.raised_in, f"does not run after {by}: {two.failure}")
    found = disagreements(one, two, tolerance=0.0, integers=True)
    if not found:
        return f"{said}{count(len(one.outputs), 'output')}"
    return violation_of(
        found,
        f"differs after {by}: {{path}} {{changed}}",
        "Look for state that is neither a parameter nor a persistent buffer.",
    )


def _first_not(prepared: PreparedModel, copied: Callable[[nn.Module], object]) -> str:
    """Return the first innermost layer for which the function raises."""
    bad = []
    for name, module in prepared.layers.modules.items():
        try:
            copied(module)
        except Exception:  # noqa: BLE001 - whatever cannot be copied
            bad.append(name)
    return next((name for name in bad if name != ROOT and not any(n.startswith(f"{name}.") for n in bad)), ROOT)
