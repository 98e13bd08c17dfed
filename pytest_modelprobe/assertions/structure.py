"""Structure: shapes, dtypes, calls of layers, parameters, costs, and hooks that were left on a model.

A layer that is made and never called, or called once too often, changes no shape and raises no error. The default of
`assert_called` leaves out what many models have on purpose, such as a dropout that a fused attention does not call.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, TypeAlias

from pytest_modelprobe.exceptions import NothingObservedError, ShapeSpecError, UsageError
from pytest_modelprobe.record import (
    ROOT,
    Call,
    CallTree,
    Dimension,
    ForwardKind,
    Layer,
    Parameter,
    Profile,
    Record,
    Selector,
    Value,
    address,
    containers,
    label_of,
    nearest,
    parent,
    select,
    selected,
)
from pytest_modelprobe.text import Cell, collapsed, count, failed, failure, listed, out_of, pattern, printable
from pytest_modelprobe.text import shape as shape_text

from .sources import Subject, bounds, called, deviation, fail_or_hint, full_name, is_watch, record_of, source_of

# --- specifications of shapes -----------------------------------------------------------------------------------------

__tracebackhide__ = True  # a traceback ends at the line of the test

Size: TypeAlias = Dimension | tuple[Dimension, ...]
"""What a name stands for: one dimension. A ``*name`` stands for a tuple of dimensions."""

Spec: TypeAlias = str | Sequence[int | str | EllipsisType | None]
"""What `parse` accepts."""

Tokens: TypeAlias = tuple[int | str, ...]
"""A spec that `parse` has read, outermost dimension first. Sizes are of type ``int``, all other tokens are text."""

_DIMS = "dims="


class Bindings(dict[str, tuple[Size, str]]):
    """The names that are bound so far, each with its size and the address that bound it.

    Args:
        dims: Sizes that are fixed in advance. A ``"name"`` has an ``int`` or a range ``(low, high)``, a ``"*name"`` a
            tuple of these.
    """

    def __init__(self, dims: Mapping[str, Size] | None = None) -> None:
        super().__init__({name: (size, _DIMS) for name, size in (dims or {}).items()})

    def check_used(self, specs: Iterable[Tokens]) -> None:
        """Check that every name of ``dims=`` is in one of the specs. A misspelt name would fix nothing.

        >>> Bindings(dims={"bacth": 4}).check_used([parse("batch 16")])
        Traceback (most recent call last):
        pytest_modelprobe.exceptions.ShapeSpecError: dims= fixes 'bacth', which no spec uses; \
the names in use are: 'batch'.
        """
        used = list(dict.fromkeys(str(token) for tokens in specs for token in tokens if _is_name(token)))
        for name in self.keys() - set(used):
            names = ", ".join(map(repr, used)) or "none"
            raise ShapeSpecError(f"dims= fixes {name!r}, which no spec uses; the names in use are: {names}.")


def parse(spec: Spec) -> Tokens:
    """Return the tokens of a spec.

    >>> parse("  batch   16 "), parse((4, None, ..., "width"))
    (('batch', 16), (4, '_', '...', 'width'))
    >>> parse("batch, 16")
    Traceback (most recent call last):
    pytest_modelprobe.exceptions.ShapeSpecError: Shape spec 'batch, 16': token 1 of 2 is 'batch,'; \
a token is an integer, a name, `_`, `...` or `*name`, with spaces alone between tokens.
    """
    elements: Any = spec.split() if isinstance(spec, str) else spec
    if not isinstance(elements, list | tuple):
        raise ShapeSpecError(
            f"Shape spec {spec!r} is of type {type(spec).__name__}; write text such as 'batch 16', or a tuple."
        )
    tokens: list[int | str] = []
    for place, element in enumerate(elements, start=1):
        token = _token(element)
        if token is None:
            raise ShapeSpecError(
                f"Shape spec {spec!r}: token {place} of {len(elements)} is {element!r}; a token is an integer, a name, "
                "`_`, `...` or `*name`, with spaces alone between tokens."
            )
        tokens.append(token)
    if sum(map(_is_variadic, tokens)) > 1:
        raise ShapeSpecError(
            f"Shape spec {spec!r} has several tokens of any length; keep one, and write `_` for single dimensions."
        )
    return tuple(tokens)


def match(tokens: Tokens, shape: Sequence[Dimension], bindings: Bindings, address: str) -> list[str]:
    """Compare an observed shape with a spec, and bind the free names of the spec if it matches.

    A shape that does not match binds nothing, so that one wrong layer causes no errors in others.

    Args:
        tokens: The spec, as `parse` returns it.
        shape: The observed sizes, outermost first.
        bindings: What the names stand for. New names are added only if the shape matches.
        address: Whose shape it is, for the messages: ``"fc1 output"``.

    Returns:
        All that is wrong, by dimension. If the rank is wrong, that is the only problem.

    >>> bindings = Bindings()
    >>> match(parse("*lead 16"), (4, 7, 16), bindings, "fc1 output")
    []
    >>> for problem in match(parse("*lead 2"), (28, 3), bindings, "fc2 output"):
    ...     print(problem)
    *lead stands for (28,), but is (4, 7), bound by fc1 output
    dimension 1 is 3, expected 2
    """
    observed = tuple(size if isinstance(size, int) else (size[0], size[1]) for size in shape)
    variadic = any(map(_is_variadic, tokens))
    fixed = len(tokens) - variadic
    if len(observed) < fixed or (len(observed) > fixed and not variadic):
        wanted = f"at least {fixed}" if variadic else str(fixed)
        return [f'{count(len(observed), "dimension")}, but "{" ".join(map(str, tokens))}" asks for {wanted}']
    problems: list[str] = []
    fresh: dict[str, tuple[Any, str]] = {}
    for dimension, token, size in _aligned(tokens, observed):
        if isinstance(token, int):
            known: tuple[Any, str] = token, ""
        elif _is_name(token):
            known = bindings.get(token) or fresh.setdefault(token, (size, f"its own dimension {dimension}"))
        else:
            continue
        expected, bound_by = known
        if size != expected:
            since = f"{'fixed' if bound_by == _DIMS else 'bound'} by {bound_by}"
            if str(token).startswith("*"):
                problems.append(f"{token} stands for {shape_text(size)}, but is {shape_text(expected)}, {since}")
                continue
            actual, wanted = (str(one) if isinstance(one, int) else f"{one[0]}..{one[1]}" for one in (size, expected))
            here = f"dimension {dimension} {'is' if isinstance(size, int) else 'varies in'} {actual}"
            problems.append(f"{here}, but {token} is {wanted}, {since}" if bound_by else f"{here}, expected {wanted}")
    if not problems:
        bindings.update({name: (size, address) for name, (size, _) in fresh.items()})
    return problems


def _aligned(tokens: Tokens, shape: tuple[Dimension, ...]) -> Iterator[tuple[int, int | str, Any]]:
    """Yield each token with the index of its first dimension and its size in ``shape``."""
    dimension = 0
    for token in tokens:
        if _is_variadic(token):
            end = dimension + len(shape) - len(tokens) + 1
            yield dimension, token, shape[dimension:end]
            dimension = end
        else:
            yield dimension, token, shape[dimension]
            dimension += 1


def _is_name(token: object) -> bool:
    return isinstance(token, str) and token not in ("_", "...")


def _is_variadic(token: object) -> bool:
    return isinstance(token, str) and (token == "..." or token.startswith("*"))


def _token(element: Any) -> int | str | None:
    """Return the token of a piece of text or of an element of a tuple, or `None` if it is not a token."""
    if element is None or element is ...:
        return "_" if element is None else "..."
    if isinstance(element, str):
        if element.isascii() and element.isdecimal():
            return int(element)
        name = element.removeprefix("*")
        # "None" stands for any size in other notations. The star of "*_" would bind a name that means "do not bind".
        known = element in ("_", "...") or (name.isidentifier() and name not in ("_", "None"))
        return element if known else None
    return element if type(element) is int and element >= 0 else None


# --- shapes -------------------------------------------------------------------------------------------------------


def assert_shapes(
    subject: Subject,
    specs: Mapping[str, Spec | Mapping[str, Spec]],
    *,
    dims: Mapping[str, Size] | None = None,
) -> None:
    """Assert the shapes of layers' outputs; a name stands for the same size in all layers of a forward.

    Sizes may differ between forwards in train and eval mode, and between forwards of different submodules.

    A specification is a string such as ``"batch seq 64"``, or a tuple: integers, names bound across all layers, ``_``
    for any size, ``...`` for any number of them, ``*name`` for any number bound as one. A dict gives specifications by
    path: ``{"output[0]": "batch 16", "input": "batch 8"}``; without a path it is for the first output.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        specs: Specifications by layer, or by a glob on layers.
        dims: Sizes of names that are known in advance.

    Raises:
        AssertionError: A shape differs; the message names the layer that bound the dimension.
        ShapeSpecError: A specification cannot be read, or a name in ``dims`` is used in none.
        SelectionError: A glob matches no layer.
        NothingObservedError: The layers were not called, or have no such value.
        UsageError: ``specs`` is no dict, or empty.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2))
    >>> record = ModelProbe().run(model, torch.ones(4, 8))
    >>> assert_shapes(record, {"0": "batch hidden", "1": "batch 2"}, dims={"batch": 4})
    """
    record = record_of(subject)
    if not isinstance(specs, Mapping) or not specs:
        raise UsageError(
            "shapes are given by layer in a dict, assert_shapes(record, {'fc1': 'batch 16'}); "
            f"got {printable(repr(specs))}"
        )
    wanted: list[tuple[str, str | None, Tokens]] = []
    for selector, given in specs.items():
        by_path = given.items() if isinstance(given, Mapping) else [(None, given)]
        wanted += [(selector, path, parse(spec)) for path, spec in by_path]
    Bindings(dims).check_used([spec for _, _, spec in wanted])
    bindings: dict[ForwardKind, Bindings] = {}
    modes = {call.root_training for layer in record.layers.values() for call in layer.calls}
    rows: list[list[Cell]] = []
    first = ""
    checked = 0
    for selector, path, tokens in wanted:
        for layer in called(record, selector):
            for call, value in _values(layer, path):
                checked += 1
                kind = bindings.setdefault((call.root, call.root_training), Bindings(dims))
                mode = f" in {'train' if call.root_training else 'eval'} mode" if len(modes) > 1 else ""
                told = address(layer.label, call, value.path) + mode
                for problem in match(tokens, value.shape, kind, told):
                    shape = shape_text(value.shape)
                    first = first or f"{told} has shape {shape}: {problem}"
                    where, spec = address(layer.name, call, value.path) + mode, " ".join(map(str, tokens))
                    rows.append([where, layer.type_name, shape, spec, problem])
    if rows:
        differing = len({row[0] for row in rows})
        raise failed(
            f"{first}; {differing:,} of {count(checked, 'shape')} {_differ(differing)}",
            ["value", "type", "shape", "specification", "problem"],
            rows,
            "Where a size is free, write _ for it; a name must mean the same size everywhere.",
        )


def _values(layer: Layer, path: str | None) -> Iterator[tuple[Call, Value]]:
    """Yield the value at ``path`` of each call; without a path, the first output."""
    for call in layer.calls:
        values = (*call.outputs, *call.inputs)
        chosen = call.outputs[:1] if path is None else [v for v in values if v.path == path]
        if not chosen:
            have = listed([v.path for v in values], most=6) or "no tensor"
            raise NothingObservedError(f"{layer.label} has no value {path or 'output'}: it has {have}")
        yield from ((call, value) for value in chosen)


def _differ(n: int) -> str:
    return "differs" if n == 1 else "differ"


# --- dtypes -------------------------------------------------------------------------------------------------------


def assert_dtypes(subject: Subject, dtypes: Any, *, layers: Selector = "**") -> None:
    """Assert the dtypes of layers' outputs.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        dtypes: One dtype (``torch.float32`` or ``"float32"``), or a dict of glob of layers → dtype. Only outputs of
            the same kind are checked: floating-point, complex, or integer and bool (indices and masks).
        layers: Which layers to look at, if one dtype is given.

    Raises:
        AssertionError: A dtype differs.
        NothingObservedError: The layers were not called, or have no output of that kind.
        UsageError: ``layers`` is given with a dict.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> record = ModelProbe().run(nn.Linear(2, 3), torch.ones(4, 2))
    >>> assert_dtypes(record, torch.float32)
    """
    record = record_of(subject)
    rows: list[list[Cell]] = []
    checked = 0
    if isinstance(dtypes, Mapping) and layers != "**":
        raise UsageError("layers= goes with one dtype; a dict of dtypes names its layers itself")
    for selector, dtype in dtypes.items() if isinstance(dtypes, Mapping) else [(layers, dtypes)]:
        expected = str(dtype).removeprefix("torch.")
        for layer in called(record, selector):
            for call, value in layer.outputs:
                if _dtype_kind(value.dtype) != _dtype_kind(expected):
                    continue
                checked += 1
                if value.dtype != expected:
                    entered = ", ".join(dict.fromkeys(v.dtype for v in call.inputs)) or "-"
                    where = address(layer.name, call, value.path)
                    rows.append([where, layer.type_name, value.dtype, expected, entered])
    if not checked:
        raise NothingObservedError("the selected layers returned no tensor of that kind: nothing was compared")
    if rows:
        first, kind, actual, wanted_dtype, took = rows[0]
        inputs = f"Its inputs are {took}" if took != "-" else "It has no tensor inputs"
        raise failed(
            f"{label_of(str(first), str(kind))} is {actual}, not {wanted_dtype}; "
            f"{len(rows):,} of {count(checked, 'output')} {_differ(len(rows))}",
            ["value", "type", "actual", "expected", "inputs"],
            rows,
            f"{inputs}: look for a cast (.to, .float, autocast) in or before it.",
        )


def _dtype_kind(name: str) -> str:
    return "float" if "float" in name else "complex" if "complex" in name else "integer"


# --- calls --------------------------------------------------------------------------------------------------------


def assert_called(subject: Subject, layers: Selector | None = None, *, per_forward: int | None = None) -> None:
    """Assert that layers are called in the forward.

    A container (`ModuleList`, or any module that is not called itself) counts as called if a layer inside it is.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        layers: Which layers. By default all, except uncalled layers that have no weights, or whose weights other code
            uses, unless the same layer of another block is called. A failure lists them too; ``"**"`` checks all.
        per_forward: The number of calls in each forward, counted in forwards of a root and mode that call the layer.
            By default one call in one forward is enough.

    Raises:
        AssertionError: A layer was not called, or a different number of times. It is a `HintWarning` if its weights
            are frozen, or if the code around it runs under ``no_grad``: no gradient tells whether that uses them.
        NothingObservedError: The model was never run.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> record = ModelProbe().run(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.ones(4, 2))
    >>> assert_called(record, "0", per_forward=1)
    """
    record = record_of(subject)
    names = [] if layers is not None or per_forward == 0 else _uncalled_harmless(record)
    looked_at = [layer for layer in selected(record, "**" if layers is None else layers) if layer.name not in names]
    forwards = forwards_of(call for layer in record.layers.values() for call in layer.calls)
    around = _around_called(record)
    rows: list[list[Cell]] = []
    for layer in looked_at:
        fewest, most = _times(layer, forwards)
        actual = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
        if not most and per_forward != 0 and (layer.name in around or _is_container(layer)):
            continue
        if per_forward is not None and (fewest, most) != (per_forward, per_forward):
            rows.append([layer.name, layer.type_name, actual, f"{per_forward:,}"])
        elif per_forward is None and not most:
            rows.append([layer.name, layer.type_name, actual, "1 or more"])
    if rows:
        unknown = [] if layers is not None else of_unknown_use(record)
        rows.sort(key=lambda row: row[0] in unknown)
        name, kind, actual, expected = map(str, rows[0])
        label = label_of(name, kind)
        first = f"{label} was called {actual} time{'' if actual == '1' else 's'} in a forward, not {expected}"
        hint = "Calling .forward() itself runs no hooks: call the module."
        if actual == "0":
            first = f"{label} was never called in {count(record.forwards, 'forward')}"
            if name in weights_in_use(record):
                hint = f"The parameters of {label} are used without calling it: directly, or tied to another layer's."
        order = dict.fromkeys(step.layer.name for step in CallTree(record).started if step.layer.leaf)
        text = failure(
            f"{first}; {out_of(len(rows), len(looked_at), 'layer')}",
            ["layer", "type", "calls", "expected"],
            rows,
            f"Called in this order: {listed(list(order), most=8) or 'none'}. {hint}",
            f"Also not called, without unused weights: {listed(collapsed(names))}." if names else "",
        )
        fail_or_hint(text, hint=name in unknown)


def _uncalled_harmless(record: Record) -> list[str]:
    """Return the names of the layers that were not called, but without weights that are unused because of it.

    Some blocks create a dropout that their fused attention never calls.
    """
    idle, in_use = uncalled(record), weights_in_use(record)
    called = {(pattern(layer.name), layer.type) for layer in record.layers.values() if layer.calls}
    unused = [layer.name for layer in idle if layer.parameters and layer.name not in in_use]
    lost = {*unused, *(around for name in unused for around in containers(name))}
    return [one.name for one in idle if one.name not in lost and (pattern(one.name), one.type) not in called]


def uncalled(record: Record) -> list[Layer]:
    """Return the layers that were not called and have no called layer inside them."""
    around = _around_called(record)
    idle = [layer for layer in record.layers.values() if not layer.calls and layer.name not in around]
    return [layer for layer in idle if not _is_container(layer)]


def weights_in_use(record: Record) -> set[str]:
    """Return the uncalled layers whose parameters are used: directly, or as tied parameters of a called layer."""

    def storage(layer: Layer, parameter: Parameter) -> str:
        return parameter.tied_to or full_name(layer, parameter.name)

    active = {storage(layer, p) for layer in record.layers.values() if layer.calls for p in layer.parameters}
    return {
        layer.name
        for layer in record.layers.values()
        if layer.parameters and not layer.calls
        if any(p.gradient for p in layer.parameters) or active.issuperset(storage(layer, p) for p in layer.parameters)
    }


def of_unknown_use(record: Record) -> list[str]:
    """Return the uncalled layers whose parameters may be used: no gradient could arrive at them if they were.

    They are frozen, or the code around them ran under ``no_grad``. Without a backward nothing is said to be unknown.
    """
    in_use = weights_in_use(record)
    idle = [layer for layer in uncalled(record) if layer.parameters and layer.name not in in_use]

    def may_get_gradient(layer: Layer) -> bool:
        around = [record.layers[name].calls for name in containers(layer.name) if name in record.layers]
        calls = next(filter(None, reversed(around)), ())
        return any(p.requires_grad for p in layer.parameters) and any(call.grad_enabled for call in calls)

    return [layer.name for layer in idle if record.backwards and not may_get_gradient(layer)]


def forwards_of(calls: Iterable[Call]) -> dict[ForwardKind, int]:
    """Return the number of forwards of each root and mode that made these calls: the maximum over them."""
    forwards: dict[ForwardKind, int] = {}
    for call in calls:
        kind = call.root, call.root_training
        forwards[kind] = max(forwards.get(kind, 0), call.forwards)
    return forwards


def _times(layer: Layer, forwards: Mapping[ForwardKind, int]) -> tuple[int, int]:
    """Return the minimum and maximum number of calls of a layer in a forward of a root and mode that call it."""
    fewest: dict[ForwardKind, int] = {}
    most: dict[ForwardKind, int] = {}
    for call in layer.calls:
        kind = call.root, call.root_training
        fewest[kind] = fewest.get(kind, 0) + (call.forwards == forwards[kind])
        most[kind] = most.get(kind, 0) + 1
    return min(fewest.values(), default=0), max(most.values(), default=0)


def _around_called(record: Record) -> set[str]:
    """Return the names of all layers with a called layer inside them."""
    return {around for layer in record.layers.values() if layer.calls for around in containers(layer.name)}


def _is_container(layer: Layer) -> bool:
    """Whether a layer is a container without forward, such as an empty ModuleList."""
    return layer.leaf and layer.type.startswith("torch.nn.modules.container.") and layer.type_name != "Sequential"


# --- hooks --------------------------------------------------------------------------------------------------------


def assert_no_leftover_hooks(subject: Any, *, layers: Selector = "**") -> None:
    """Assert that a model and its parameters have no hooks, except those of the probe.

    Args:
        subject: A module: all forward and backward hooks are reported. A watch, or a probe with one: only hooks that
            were registered after it began and not removed.
        layers: Which layers to look at. Exclude those that need their hooks: ``["**", "!spectral"]``.

    Raises:
        AssertionError: There is a hook.
        UsageError: The subject is a record, which has no model.

    >>> from torch import nn
    >>> assert_no_leftover_hooks(nn.Linear(2, 3))
    """
    from pytest_modelprobe._torch import hooks_on  # a module has hooks: torch is there

    since, model = 0, subject
    if not hasattr(subject, "named_modules"):
        source = source_of(subject)
        if not is_watch(source):
            raise UsageError("a record has no model to look for hooks on: give the model itself, or a watch")
        since, model = source.first_hook or 0, source.model
    modules = {name or ROOT: module for name, module in model.named_modules()}
    names = select(modules, layers)
    found = [
        (name, kind, f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', type(hook).__qualname__)}")
        for name in names
        for kind, key, hook in hooks_on(modules[name])
        if key >= since
        and not type(hook).__module__.startswith("pytest_modelprobe.")
        # What becomes of a hook of a watch in a pickle of the model, where it does nothing.
        and not isinstance(getattr(hook, "__self__", None), contextlib.nullcontext)
    ]
    if found:
        name, kind, what = found[0]
        label = label_of(name, type(modules[name]).__name__)
        raise failed(
            f"{label} has a {kind} left on it: {what}; {count(len(found), 'hook')} in all",
            ["layer", "kind", "hook"],
            found,
            "Keep the handle that register_... returns, and call its remove(), also after an error.",
        )


# --- parameters ---------------------------------------------------------------------------------------------------


def assert_param_count(
    subject: Subject | Any, expected: int | tuple[int, int], *, trainable: bool | None = None, layers: Selector = "**"
) -> None:
    """Assert the number of elements of the parameters; tied parameters count once.

    Args:
        subject: A probe with one run or watch, a watch, a record, or a module.
        expected: The number, or a tuple (minimum, maximum).
        trainable: With True, only parameters that require a gradient count; with False, only the others. By default
            all count.
        layers: Layers whose own parameters are counted; with a module, all are counted.

    Raises:
        AssertionError: The number differs.
        UsageError: ``expected`` is neither a number nor a range; ``layers`` is given with a module.

    >>> from torch import nn
    >>> assert_param_count(nn.Linear(3, 2), 8)
    """
    low, high = bounds(expected, "elements")
    counted: set[object] = set()
    by_layer: Counter[str] = Counter()
    for name, elements, requires_grad, same in _parameters(subject, layers):
        if same not in counted and trainable in (None, requires_grad):
            counted.add(same)
            by_layer[parent(name)] += elements
    total = by_layer.total()
    if not low <= total <= high:
        kind = "" if trainable is None else "trainable " if trainable else "frozen "
        owner = "the model has" if layers == "**" else "the selected layers have"
        first = f"{owner} {count(total, f'{kind}parameter')}, {deviation(total, low, high)}"
        raise failed(first, ["layer", "parameters"], by_layer.most_common())


def assert_tied(subject: Subject | Any, *names: str) -> None:
    """Assert that parameters are tied: the same `Parameter` under several names.

    Args:
        subject: A probe with one run or watch, a watch, a record, or a module.
        *names: Full names of two or more parameters: ``"embed.weight", "head.weight"``.

    Raises:
        AssertionError: One of them is a different parameter.
        UsageError: There is no such parameter, or fewer than two names.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> model[1].weight = model[0].weight
    >>> assert_tied(model, "0.weight", "1.weight")
    """
    if len(set(names)) < max(2, len(names)):
        raise UsageError(f"assert_tied takes the names of two or more parameters, each once; got {listed(names)}")
    known = {name: (elements, same) for name, elements, _, same in _parameters(subject, "**")}
    for name in names:
        if name not in known:
            near = nearest(name, known)
            raise UsageError(f"there is no parameter {name!r}{f'; nearest: {listed(near)}' if near else ''}")
    first = names[0]
    untied = [name for name in names if known[name][1] != known[first][1]]
    if untied:
        rows: list[list[Cell]] = [[name, known[name][0], "no" if name in untied else "yes"] for name in names]
        raise failed(
            f"{untied[0]} is not tied to {first}: they are two parameters",
            ["parameter", "elements", f"tied to {first}"],
            rows,
            "A copy, .to() on one of them, or a load that replaces parameters unties them: tie them again.",
        )


def _parameters(subject: Subject | Any, layers: Selector) -> Iterator[tuple[str, int, bool, object]]:
    """Yield name, elements and ``requires_grad`` of each parameter, and what is equal for tied ones."""
    if hasattr(subject, "named_parameters"):
        if layers != "**":
            raise UsageError("layers= goes with a record; of a module all parameters are looked at")
        for name, p in subject.named_parameters(remove_duplicate=False):
            yield name, p.numel(), p.requires_grad, id(p)
        return
    source = source_of(subject)
    record = source if isinstance(source, Record) else source.record
    for layer in selected(record, layers):
        for own in layer.parameters:
            name = full_name(layer, own.name)
            yield name, math.prod(own.shape), own.requires_grad, own.tied_to or name


# --- operations and memory --------------------------------------------------------------------------------------------


def assert_flops(subject: Subject, expected: int | tuple[int, int], *, layers: Selector = "**") -> None:
    """Assert the number of floating-point operations of the forwards, as `torch.utils.flop_counter` counts them.

    These are matrix products, convolutions and attention; a multiplication and an addition are two. A watch is
    counted over all of its forwards: ``watch.last`` is one.

    Args:
        subject: A probe with one run or watch, a watch, or a record, made with ``profile=True``.
        expected: The number, or a tuple (minimum, maximum).
        layers: Which layers to count, each with those inside it; all: the whole forward.

    Raises:
        AssertionError: The number differs.
        NothingObservedError: There is no profile, or the layers were not called.
        UsageError: ``expected`` is neither a number nor a range.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> assert_flops(ModelProbe().run(nn.Linear(2, 3), torch.ones(4, 2), profile=True), 2 * 4 * 2 * 3)
    """
    low, high = bounds(expected, "operations")
    _, profile, names = _profiled(subject, layers)
    total = profile.flops if layers == "**" else sum(profile.layers[name].flops for name in names)
    if not low <= total <= high:
        who = "the model takes" if layers == "**" else "the selected layers take"
        first = f"{who} {count(total, 'FLOP')} in {count(profile.forwards, 'forward')}, {deviation(total, low, high)}"
        rows = _rows(profile, names, {name: layer.own_flops for name, layer in profile.layers.items()})
        raise failed(first, ["layer", "type", "calls", "FLOPs"], rows)


def assert_activation_memory(subject: Subject, expected: int | tuple[int, int], *, layers: Selector = "**") -> None:
    """Assert the bytes of the outputs of leaves in one forward, memory that several share counted once.

    It is what a backward pass may keep. What a layer computes in between, and what functions return that are not
    recorded, is not in it. A watch has the most of any forward.

    Args:
        subject: A probe with one run or watch, a watch, or a record, made with ``profile=True``.
        expected: The number of bytes, or a tuple (minimum, maximum).
        layers: Which layers to count, each with those inside it.

    Raises:
        AssertionError: The number differs.
        NothingObservedError: There is no profile, or the layers were not called.
        UsageError: ``expected`` is neither a number nor a range.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True))
    >>> assert_activation_memory(ModelProbe().run(model, torch.ones(4, 2), profile=True), (0, 64))
    """
    low, high = bounds(expected, "bytes")
    record, profile, names = _profiled(subject, layers)
    whole = layers == "**"
    total = profile.activation_bytes if whole else sum(profile.layers[name].activation_bytes for name in names)
    if not low <= total <= high:
        whose = "the model's activations" if whole else "the activations of the selected layers"
        first = f"{whose} take {count(total, 'byte')}, {deviation(total, low, high)}"
        sizes = {name: layer.activation_bytes for name, layer in profile.layers.items() if record[name].leaf}
        hint = "They grow with the batch: give the assertion the batch that it is for."
        raise failed(first, ["layer", "type", "calls", "bytes"], _rows(profile, names, sizes), hint)


def _profiled(subject: Subject, layers: Selector) -> tuple[Record, Profile, list[str]]:
    """Return the record and its profile, and the names of the selected layers that are inside no other."""
    record = record_of(subject)
    if record.profile is None:
        raise NothingObservedError(
            f"{record.model} was not profiled: pass profile=True to modelprobe.run or modelprobe.watch"
        )
    names = {layer.name for layer in called(record, layers)}
    outermost = [name for name in record.layers if name in names and names.isdisjoint(containers(name))]
    return record, record.profile, outermost


def _rows(profile: Profile, names: Iterable[str], numbers: Mapping[str, int]) -> list[list[Cell]]:
    """Return the layers inside those named whose number is not 0, the largest first."""
    inside = set(names)
    found = [(name, n) for name, n in numbers.items() if n and not inside.isdisjoint((name, *containers(name)))]
    found.sort(key=lambda pair: -pair[1])
    return [[name, profile.layers[name].type, profile.layers[name].calls, n] for name, n in found]
