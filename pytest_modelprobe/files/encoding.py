"""From a record to the texts of its two files.

What follows from the rest is left out: defaults, the order of calls if the lines tell it, the numbers of a tensor that
was seen before. This keeps the files short and the lines of repeated blocks equal. The digest of the architecture is
written into the numbers, so that two files of different versions are never read as one snapshot.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from pytest_modelprobe.record import (
    ROOT,
    Call,
    EmittedTensor,
    ForwardKind,
    IsolatedResponse,
    Layer,
    Operation,
    OptimizerGroup,
    Parameter,
    Plain,
    Record,
    Value,
    address,
    has_numbers,
    qualified,
    response_dtype,
)

from . import layout
from .layout import ComparedParts, Texts, digest_of, laid_out, usual_call, usual_layer
from .order import (
    all_events,
    containers,
    events,
    forward_kind_of,
    forward_order,
    implied_timelines,
    parameter_order,
    timelines,
)
from .readings import reading_text
from .recipe_text import Outline, Recipes
from .specs import DTYPE, Defaults, floating, keys, parameter_text, relative, value_text

_JSON = json.JSONEncoder(allow_nan=False).encode
_COMPACT = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode

LayerCalls = tuple[str, Layer, list[Call]]
"""A layer's name, the layer, and its calls in the order of the file."""


def encode(
    record: Record, *, reason: str | None = None, supersedes: str | None = None, compared: ComparedParts = "all"
) -> Texts:
    """Return the texts of the two files that hold a record.

    Args:
        record: The record of a run or of `architecture`. Ranges of units, devices of single values and modules of
            classes are left out; numbers are rounded, see `readings`.
        reason: The declared reason for the change of the architecture.
        supersedes: The `architecture_digest` of each earlier version, separated by spaces.
        compared: The part that the test compares. It is written with the numbers if it is not all.

    >>> texts = encode(Record(model="Net", layers={"fc1": Layer(name="fc1", type="torch.nn.Linear")}))
    >>> print(texts.architecture, end="")
    {
    "modelprobe": 5,
    "model": "Net",
    "mode": "eval",
    "numbers": false,
    "layers": {
    "fc1": {"type": "Linear"}
    }
    }
    """
    lines = forward_order(record)
    numbers = has_numbers(record)
    header, defaults = _header(record, lines, numbers)
    header |= _given({"reason": reason, "supersedes": supersedes})
    structure = _Structure(lines, header, defaults)
    layers = {name: structure.layer(name, layer, calls) for name, layer, calls in lines}
    architecture = laid_out(header, ((name, _JSON(layer)) for name, layer in layers.items()))
    if not numbers:
        return Texts(architecture, None)
    samples = next((call.samples for _, _, calls in lines for call in calls), None)
    top = _numbers_header(record, digest_of({**header, "layers": layers}), samples, compared)
    content = _Numbers(lines, defaults, top[layout.SAMPLES])
    rows = list(content.lines())
    return Texts(architecture, laid_out(top, rows, content.responses.items()))


def _header(record: Record, lines: Sequence[LayerCalls], numbers: bool) -> tuple[dict[str, Any], Defaults]:
    calls = [calls for _, _, calls in lines]
    first = next((call for of_layer in calls for call in of_layer), None)
    training = first.root_training if first else any(layer.training for _, layer, _ in lines[:1])
    dtype = next(_dtypes(lines), DTYPE)
    requires_grad = any(v.requires_grad for _, _, cs in lines for c in cs for v in (*c.inputs, *c.outputs))
    order = timelines(calls)
    header: dict[str, Any] = {
        "modelprobe": layout.SCHEMA,
        "model": record.model,
        "root": first.root if first and first.root != ROOT else None,
        "mode": "train" if training else "eval",
        "seed": record.seed,
        "loss": record.loss,
        "forwards": record.forwards or None,
        "backwards": record.backwards or None,
        "dtype": dtype if dtype != DTYPE else None,
        "requires_grad": requires_grad or None,
        "optimizers": [_group(group) for group in record.optimizers] or None,
        "grad_enabled": False if first and not first.grad_enabled else None,
        "autocast": first.autocast if first else None,
        "attributes": _everywhere(lines) or None,
        "numbers": None if numbers else False,
        "notes": None if numbers else record.notes or None,
        "order": order if order != implied_timelines([name for name, _, _ in lines], calls) else None,
        "parameter order": parameter_order(record, lines),
    }
    return _given(header), Defaults(dtype, requires_grad)


def _group(group: OptimizerGroup) -> list[Any]:
    return [group.optimizer, {key: _json_value(value) for key, value in group.options.items()}]


def _everywhere(lines: Sequence[LayerCalls]) -> dict[str, Any]:
    """Return private attributes that most layers share: a framework may set them on each layer."""
    own = [layer.attributes for _, layer, _ in lines if not layer.functional]
    counts = Counter((k, type(v), v) for attributes in own for k, v in attributes.items() if k.startswith("_"))
    return {k: _json_value(v) for (k, _, v), n in counts.items() if len(own) > 1 and 2 * n > len(own)}


def _dtypes(lines: Sequence[LayerCalls]) -> Iterator[str]:
    """Yield the dtypes of floating parameters and then of floating values. The first one is the default of the file."""
    yield from (p.dtype for _, layer, _ in lines for p in layer.parameters if floating(p.dtype))
    yield from (v.dtype for _, _, cs in lines for c in cs for v in (*c.inputs, *c.outputs) if floating(v.dtype))


def _numbers_header(record: Record, digest: str, samples: str | None, compared: ComparedParts) -> dict[str, Any]:
    header: dict[str, Any] = {
        "modelprobe": layout.SCHEMA,
        "architecture": digest,
        "compared": None if compared == "all" else compared,
        "device": record.device,
        "applied": record.applied,
        "noise": record.noise,
        "notes": record.notes or None,
        "origin": _operation(record.origin),
        "gradient_origin": _operation(record.gradient_origin),
        "versions": dict(record.versions) or None,
        layout.SAMPLES: samples or "",
        "columns": layout.COLUMNS,
        "gradient columns": layout.GRADIENT_COLUMNS,
        "keys": layout.KEYS,
    }
    return _given(header)


def _given(header: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in header.items() if value is not None}


def _operation(operation: Operation | None) -> list[str | None] | None:
    return None if operation is None else [operation.name, operation.location, operation.detail]


# --- the exact part -----------------------------------------------------------------------------------------------


class _Structure:
    """The lines of the architecture file."""

    def __init__(self, lines: Sequence[LayerCalls], header: Mapping[str, Any], defaults: Defaults) -> None:
        self.defaults = defaults
        self.header = header
        self.parents = containers([name for name, _, _ in lines])

    def layer(self, name: str, layer: Layer, calls: Sequence[Call]) -> dict[str, Any]:
        line: dict[str, Any] = {
            "type": layer.type_name,
            "functional": layer.functional,
            "leaf": layer.leaf,
            "training": layer.training,
            "aliases": list(layer.aliases),
            "attributes": self._attributes(layer),
            "parameters": self._own(layer.parameters, trainable=True),
            "buffers": self._own(layer.buffers, trainable=False),
            "calls": self._calls(name, layer, calls),
        }
        return _unusual(line, usual_layer(self.header, has_children=name in self.parents))

    def _attributes(self, layer: Layer) -> dict[str, Any]:
        found = {k: _json_value(v) for k, v in layer.attributes.items()}
        if layer.functional:
            return found
        defaults: Mapping[str, Any] = self.header.get("attributes", {})
        own = {k: v for k, v in found.items() if k not in defaults or not _same_attribute(defaults[k], v)}
        return own | {k: layout.ABSENT for k in defaults if k not in found}

    def _own(self, own: Sequence[Parameter], *, trainable: bool) -> dict[str, str]:
        texts = (parameter_text(p, self.defaults, trainable=trainable) for p in own)
        return dict(zip(keys(p.name for p in own), texts, strict=True))

    def _calls(self, name: str, layer: Layer, calls: Sequence[Call]) -> list[dict[str, Any] | str]:
        found: list[dict[str, Any] | str] = []
        usual = usual_call(self.header, training=layer.training)
        following: dict[ForwardKind, int] = {}
        for call in calls:
            kind = forward_kind_of(call)
            fields: dict[str, Any] = {
                "root": call.root,
                "mode": "train" if call.root_training else "eval",
                "index": call.index,
                "forwards": call.forwards,
                "training": call.training,
                "grad_enabled": call.grad_enabled,
                "autocast": call.autocast,
                "recomputed": call.recomputed,
                "inputs": self._values(call.inputs, name),
                "inputs_known": call.inputs_known,
                "arguments": {k: _json_value(v) for k, v in call.arguments.items()},
                "outputs": self._values(call.outputs, name),
            }
            line = _unusual(fields, {**usual, "index": following.get(kind, 0)})
            following[kind] = call.index + 1
            found.append(_signature(line) or line)
        return found

    def _values(self, values: Sequence[Value], layer: str) -> dict[str, str]:
        texts = (value_text(v, layer, self.defaults) for v in values)
        return dict(zip(keys(v.path for v in values), texts, strict=True))


def _unusual(fields: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in usual or value != usual[name]}


def _signature(line: Mapping[str, Any]) -> str | None:
    """Return the short text of a call with one input and one output, as most have; ``None`` if it has other fields."""
    if line.keys() == {"inputs", "outputs"} and [*line["inputs"], *line["outputs"]] == ["input", "output"]:
        source, made = line["inputs"]["input"], line["outputs"]["output"]
        return f"{source}{layout.ARROW}{made}" if " from " not in made else None
    return None


def _same_attribute(a: Any, b: Any) -> bool:
    """Whether two attributes are the same. True is not 1 here, as it is in Python."""
    return type(a) is type(b) and bool(a == b)


def _json_value(value: Plain) -> Any:
    if isinstance(value, float) and not math.isfinite(value):  # strict JSON has no NaN and no infinity
        return {"float": str(value)}
    return value


# --- the numbers --------------------------------------------------------------------------------------------------


class _Numbers:
    """The lines of the numbers file. A tensor is written where it is first seen."""

    def __init__(self, lines: Sequence[LayerCalls], defaults: Defaults, samples: str) -> None:
        self.defaults = defaults
        self.lines_of = lines
        self.samples = samples
        self.known: dict[tuple[Any, ...], str] = {}
        self.entries = dict(self._values())
        self.own = {
            qualified(name, p.name): self._own_entry(p)
            for name, layer, _ in lines
            for p in (*layer.parameters, *layer.buffers)
        }
        self.responses: dict[str, str] = {}
        self.recipes = Recipes([_outline(name, layer, calls) for name, layer, calls in lines])

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield name and text of each nonempty line."""
        for i, (name, layer, calls) in enumerate(self.lines_of):
            found = self._own(name, layer)
            for j, call in enumerate(calls):
                number = str(j + 1) if j else ""
                found += [(number + key, text) for key, text in self._call(i, j, call)]
            if found:
                yield name, _object(found)

    # --- parameters and buffers

    def _own(self, layer_name: str, layer: Layer) -> list[tuple[str, str]]:
        own = (*layer.parameters, *layer.buffers)
        found = []
        for key, parameter in zip(keys(p.name for p in own), own, strict=True):
            entry = self.own[qualified(layer_name, parameter.name)]
            if entry != self.own.get(parameter.tied_to or "", layout.EMPTY):
                found.append((layout.OWN + key, entry))
        return found

    def _own_entry(self, parameter: Parameter) -> str:
        shape, dtype = parameter.shape, parameter.dtype
        return _list(
            reading_text(parameter.reading, shape, dtype, "own"),
            reading_text(parameter.gradient, shape, dtype, "own gradient"),
            reading_text(parameter.after, shape, dtype, "own"),
            reading_text(parameter.update, shape, dtype, "own gradient"),
        )

    # --- values

    def _values(self) -> Iterator[tuple[tuple[int, int, bool, int], str]]:
        """Yield the entries of all values in the order of execution. An entry that is not needed is an empty text."""
        calls = [calls for _, _, calls in self.lines_of]
        owners: dict[tuple[ForwardKind, int], tuple[str, str]] = {}
        written: dict[tuple[ForwardKind, str], tuple[int, str]] = {}
        known: set[tuple[ForwardKind, str]] = set()
        for i, j, end in all_events(events(timelines(calls), calls), calls):
            name, call = self.lines_of[i][0], calls[i][j]
            kind = forward_kind_of(call)
            for k, value in enumerate(call.outputs if end else call.inputs):
                entry = self._entry(value)
                here = address(name, call, value.path)
                owner = owners.get((kind, value.tensor))
                if value.source is not None and written.get((kind, value.source)) == (value.tensor, entry):
                    text = ""
                elif owner is not None and owner[1] == entry:
                    text = quoted(relative(owner[0], name))
                else:
                    text = "" if entry == layout.EMPTY and value.source is None else entry
                if value.tensor >= 0 and (kind, here) not in known:
                    owners.setdefault((kind, value.tensor), (here, entry))
                known.add((kind, here))
                if end:
                    written[kind, here] = value.tensor, entry
                yield (i, j, end, k), text

    def _entry(self, value: Value) -> str:
        shape, dtype = value.shape, value.dtype
        key = id(value.forward), id(value.backward), id(value.backward_inner), shape, dtype
        if key not in self.known:  # most inputs share their readings with the output that they are
            self.known[key] = _list(
                reading_text(value.forward, shape, dtype, "value"),
                reading_text(value.backward, shape, dtype, "gradient"),
                reading_text(value.backward_inner, shape, dtype, "gradient"),
            )
        return self.known[key]

    def _call(self, i: int, j: int, call: Call) -> Iterator[tuple[str, str]]:
        for sign, end, values in ((layout.INPUT, False, call.inputs), (layout.OUTPUT, True, call.outputs)):
            for k, key in enumerate(keys(v.path for v in values)):
                if text := self.entries[i, j, end, k]:
                    yield sign + key, text
        if call.random is not None:
            yield layout.RANDOM, quoted(call.random)
        if (samples := call.samples or "") != self.samples:
            yield layout.SAMPLES, quoted(samples)
        if call.response is not None:
            yield layout.ALONE, quoted(self._response(i, j, call.response))

    # --- responses

    def _response(self, i: int, j: int, response: IsolatedResponse) -> str:
        """Return the key of a response: the start of its hash, so that equal responses share one entry."""
        dtype = response_dtype(self.lines_of[i][2][j])  # as it is compared
        parts = [(layout.RECIPES, _COMPACT(self.recipes.text(i, j, response.recipes)))]
        for key, handed in zip(keys(h.where for h in response.handed), response.handed, strict=True):
            parts.append((layout.HANDED + key, self._handed(handed, dtype)))
        if response.gradient is not None:
            parts.append((layout.GRADIENT, reading_text(response.gradient, None, dtype, "response gradient")))
        if response.without_gradient:
            parts.append((layout.UNREACHED, _COMPACT(response.without_gradient)))
        if response.reason is not None:
            parts.append((layout.REASON, quoted(response.reason)))
        if response.mode_matters:
            parts.append((layout.BY_MODE, "true"))
        text = _object(parts)
        digest = hashlib.sha256(text.encode()).hexdigest()
        length = next(n for n in range(8, len(digest)) if self.responses.get(digest[:n], text) == text)
        self.responses[digest[:length]] = text
        return digest[:length]

    @staticmethod
    def _handed(handed: EmittedTensor, dtype: str) -> str:
        if handed.passed is not None:
            return quoted(handed.passed)
        return reading_text(handed.reading, None, dtype, "response")


def _outline(name: str, layer: Layer, calls: Sequence[Call]) -> Outline:
    pairs = [([(v.path, v) for v in call.inputs], [(v.path, v) for v in call.outputs]) for call in calls]
    return Outline(name, [(p.name, p) for p in (*layer.parameters, *layer.buffers)], pairs)


def _object(pairs: Iterable[tuple[str, str]]) -> str:
    return f"{{{','.join([f'{quoted(key)}:{text}' for key, text in pairs])}}}"


def _list(*texts: str) -> str:
    given = [*texts]
    while given[-1] == "null":
        given.pop()
    return f"[{','.join(given)}]"
