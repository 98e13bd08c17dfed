"""Structure: shapes, dtypes, which layers are called, hooks left behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.record import Call, Layer, Record, Value, address
from pytest_modelprobe.report.text import Cell, count, failure, listed
from pytest_modelprobe.selection import Selector, select
from pytest_modelprobe.shapes import Bindings, Mismatch, ShapeSpec, Spec, format_shape, match, parse

from .evidence import Subject, WatchLike, called, is_floating, record_of, returned, selected

# --- shapes -------------------------------------------------------------------------------------------------------


def assert_shapes(
    subject: Subject,
    specs: Mapping[str, Spec | Mapping[str, Spec]],
    *,
    dims: Mapping[str, int] | None = None,
) -> None:
    """Assert the shapes of layers' outputs; a name stands for the same size wherever it occurs.

    A specification is a string such as ``"batch seq 64"``, or a tuple: integers, names bound across all layers, ``_``
    for any size, ``...`` for any number of them, ``*name`` for any number bound as one. A dict gives one for each value
    by its path: ``{"output[0]": "batch 16", "input": "batch 8"}``; alone it is for the first output.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        specs: Specifications by layer, or by a glob on layers.
        dims: Sizes of names that are known beforehand.

    Raises:
        AssertionError: A shape differs; the text names the layer that bound the dimension.
        ShapeSpecError: A specification cannot be read, or a name in ``dims`` is used in none.
        SelectionError: A glob matches no layer.
        NothingObservedError: The layers were not called, or have no such value.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2))
    >>> record = ModelProbe().run(model, torch.ones(4, 8))
    >>> assert_shapes(record, {"0": "batch hidden", "1": "batch 2"}, dims={"batch": 4})
    """
    __tracebackhide__ = True
    record = record_of(subject)
    if not specs:
        raise UsageError("no shapes were given: assert_shapes(record, {'fc1': 'batch 16'})")
    wanted = [(selector, path, parse(spec)) for selector, path, spec in _specs(specs)]
    bindings = Bindings(dims)
    bindings.check_used([spec for _, _, spec in wanted])
    mismatches: list[tuple[Layer, Mismatch, ShapeSpec]] = []
    checked = 0
    for selector, path, spec in wanted:
        for layer in called(record, selector):
            for call, value in _values(layer, path):
                checked += 1
                found = match(spec, value.shape, bindings, address(layer.name, call, value.path))
                mismatches += [(layer, m, spec) for m in found]
    if mismatches:
        raise AssertionError(_shapes_text(mismatches, checked))


def _specs(specs: Mapping[str, Spec | Mapping[str, Spec]]) -> Iterator[tuple[str, str | None, Spec]]:
    for selector, spec in specs.items():
        if isinstance(spec, Mapping):
            yield from ((selector, path, s) for path, s in spec.items())
        else:
            yield selector, None, spec


def _values(layer: Layer, path: str | None) -> Iterator[tuple[Call, Value]]:
    """Yield the value at ``path`` of each call; the first output where there is none given."""
    for call in layer.calls:
        values = (*call.outputs, *call.inputs)
        chosen = call.outputs[:1] if path is None else [v for v in values if v.path == path]
        if not chosen:
            have = listed([v.path for v in values], most=6) or "no tensor"
            raise NothingObservedError(f"{layer.name} has no value {path or 'output'}: it has {have}")
        yield from ((call, value) for value in chosen)


def _shapes_text(mismatches: list[tuple[Layer, Mismatch, ShapeSpec]], checked: int) -> str:
    first = mismatches[0][1]
    rows: list[list[Cell]] = [
        [m.address, layer.type_name, format_shape(m.shape), str(spec), m.actual, m.expected, m.bound_by or "-"]
        for layer, m, spec in mismatches
    ]
    differing = len({m.address for _, m, _ in mismatches})
    return failure(
        f"{first}; {differing} of {count(checked, 'shape')} differ",
        ["value", "type", "shape", "specification", "actual", "expected", "bound by"],
        rows,
        "Where a size is free, write _ for it; a name must mean the same size everywhere.",
    )


# --- dtypes -------------------------------------------------------------------------------------------------------


def assert_dtypes(subject: Subject, dtypes: Any, *, layers: Selector = "**") -> None:
    """Assert the dtypes of layers' outputs.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        dtypes: One dtype (``torch.float32`` or ``"float32"``), or a dict of dtypes by a glob on layers. Where a
            floating dtype is asked for, only floating outputs are looked at: indices and masks have their own.
        layers: Which layers to look at, where one dtype is given.

    Raises:
        AssertionError: A dtype differs.
        NothingObservedError: The layers were not called, or have no output to look at.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> record = ModelProbe().run(nn.Linear(2, 3), torch.ones(4, 2))
    >>> assert_dtypes(record, torch.float32)
    """
    __tracebackhide__ = True
    record = record_of(subject)
    wanted: Iterable[tuple[Selector, Any]] = dtypes.items() if isinstance(dtypes, Mapping) else [(layers, dtypes)]
    rows: list[list[Cell]] = []
    checked = 0
    for selector, dtype in wanted:
        expected = _dtype_name(dtype)
        for layer in called(record, selector):
            for call, value in layer.outputs:
                if _is_floating_name(expected) and not is_floating(value):
                    continue
                checked += 1
                if value.dtype != expected:
                    entered = ", ".join(dict.fromkeys(v.dtype for v in call.inputs)) or "-"
                    where = address(layer.name, call, value.path)
                    rows.append([where, layer.type_name, value.dtype, expected, entered])
    if not checked:
        raise NothingObservedError("the selected layers gave out no tensor of that kind: nothing was compared")
    if rows:
        first, _, actual, wanted_dtype, took = rows[0]
        raise AssertionError(
            failure(
                f"{first} is {actual}, not {wanted_dtype}; {len(rows)} of {count(checked, 'output')} differ",
                ["value", "type", "actual", "expected", "inputs"],
                rows,
                f"The first one took in {took}: look for a cast (.to, .float, autocast) in or before it.",
            )
        )


def _dtype_name(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if type(dtype).__name__ != "dtype" and not isinstance(dtype, str):
        raise UsageError(f"a dtype is torch.float32 or 'float32'; got {dtype!r}")
    return name


def _is_floating_name(name: str) -> bool:
    return name.startswith(("float", "bfloat", "complex"))


# --- calls --------------------------------------------------------------------------------------------------------


def assert_called(subject: Subject, layers: Selector = "**", *, times: int | None = None) -> None:
    """Assert that layers are called in the forward.

    Containers that only hold others (`ModuleList`, or any module whose children are called but which is not) count as
    called when a layer inside them is.

    Args:
        subject: A probe with one run or watch, a watch, or a record.
        layers: Which layers; all by default.
        times: How often in each forward; None: at least once in one of them.

    Raises:
        AssertionError: A layer was not called, or another number of times.
        NothingObservedError: The model was never run.

    >>> import torch
    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> record = ModelProbe().run(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.ones(4, 2))
    >>> assert_called(record, "0", times=1)
    """
    __tracebackhide__ = True
    record = record_of(subject)
    looked_at = selected(record, layers)
    rows: list[list[Cell]] = []
    for layer in looked_at:
        fewest, most = _times(record, layer)
        if times is not None and (fewest, most) != (times, times):
            rows.append([layer.name, layer.type_name, str(fewest) if fewest == most else f"{fewest} to {most}", times])
        elif times is None and not layer.calls and not _inside_called(record, layer):
            rows.append([layer.name, layer.type_name, 0, "1 or more"])
    if rows:
        raise AssertionError(_called_text(record, rows, looked_at))


def uncalled(record: Record) -> list[Layer]:
    """Return the layers that were not called, nor any inside them."""
    return [layer for layer in record.layers.values() if not layer.calls and not _inside_called(record, layer)]


def _times(record: Record, layer: Layer) -> tuple[int, int]:
    """Return the fewest and the most calls of a layer in one forward."""
    if not layer.calls:
        return 0, 0
    forwards: dict[tuple[str, bool], int] = {}
    for _, call in record.calls:
        kind = call.root, call.root_training
        forwards[kind] = max(forwards.get(kind, 0), call.forwards)
    fewest, most = [], []
    for kind, total in forwards.items():
        calls = [call for call in layer.calls if (call.root, call.root_training) == kind]
        if calls:
            fewest.append(sum(call.forwards == total for call in calls))
            most.append(len(calls))
    return min(fewest), max(most)


def _inside_called(record: Record, layer: Layer) -> bool:
    prefix = "" if layer.name == "(root)" else f"{layer.name}."
    return any(other.calls and name.startswith(prefix) and name != layer.name for name, other in record.layers.items())


def _called_text(record: Record, rows: list[list[Cell]], looked_at: list[Layer]) -> str:
    name, _, actual, expected = rows[0]
    if actual in (0, "0"):
        first = f"{name} was never called in {count(record.forwards, 'forward')}"
    else:
        first = f"{name} was called {actual} times in a forward, not {expected}"
    order = [layer.name for layer, _ in returned(record) if layer.leaf]
    return failure(
        f"{first}; {len(rows)} of {count(len(looked_at), 'layer')} looked at",
        ["layer", "type", "actual", "expected"],
        rows,
        f"Called in this order: {listed(list(dict.fromkeys(order)), most=8)}. Calling .forward() itself runs no hooks: "
        "call the module.",
    )


# --- hooks --------------------------------------------------------------------------------------------------------

_HOOK_DICTS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}


def assert_no_leftover_hooks(subject: Any, *, layers: Selector = "**") -> None:
    """Assert that no hooks are left on a model: those of the probe itself do not count.

    Args:
        subject: A module: it may have no forward or backward hook at all. A watch: only hooks that came since it began
            and are still there count.
        layers: Which layers to look at. Leave out those whose hooks belong to them: ``["**", "!spectral"]``.

    Raises:
        AssertionError: A hook is there.
        UsageError: A record, which has no model any more.

    >>> from torch import nn
    >>> assert_no_leftover_hooks(nn.Linear(2, 3))
    """
    __tracebackhide__ = True
    source = getattr(subject, "source", subject)
    since, model = 0, source
    if isinstance(source, WatchLike) and not isinstance(source, Record):
        since, model = source.first_hook, source.model
    if not hasattr(model, "named_modules"):
        raise UsageError(
            f"hooks are looked for on a module or a watch; got {type(source).__name__}: give the model itself"
        )
    modules = {name or "(root)": module for name, module in model.named_modules()}
    names = set(select(modules, layers))
    found = [(name, kind, hook) for name, kind, key, hook in find_hooks(model) if name in names and key >= since]
    if found:
        name, kind, hook = found[0]
        raise AssertionError(
            failure(
                f"{name} has a {kind} left on it: {_hook_name(hook)}; {count(len(found), 'hook')} in all",
                ["layer", "kind", "hook"],
                [[n, k, _hook_name(h)] for n, k, h in found],
                "Keep the handle that register_... returned and call its remove(), also after an error.",
            )
        )


def find_hooks(model: Any) -> Iterator[tuple[str, str, int, Any]]:
    """Yield (layer, kind, key, hook) for each hook on the model's modules that is not the probe's."""
    for name, module in model.named_modules():
        for attribute, kind in _HOOK_DICTS.items():
            for key, hook in getattr(module, attribute).items():
                if not getattr(hook, "is_modelprobe", False):
                    yield name or "(root)", kind, key, hook


def _hook_name(hook: Any) -> str:
    name = getattr(hook, "__qualname__", None) or type(hook).__qualname__
    return f"{getattr(hook, '__module__', '?')}.{name}"
