"""The architecture file: what is exact of a record, in lines that people review.

A layer is one line, and a tensor in it a short text. A reviewer reads these texts, so what is usual is left out. Names
of nearby layers are relative, as in Python's imports. Then lines of repeated blocks are equal, and if a parent is
renamed only the keys of the lines change. The order of calls follows from the order of lines, or stands in the header.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from pytest_modelprobe.record import (
    ROOT,
    Call,
    Dimension,
    ForwardKind,
    Layer,
    OptimizerGroup,
    Parameter,
    Plain,
    Record,
    Value,
    codec,
    containers,
    has_numbers,
)

SCHEMA = 6
"""The version of the format. No other is read."""

Order = tuple[tuple[int, ...], ...]
"""For each kind of forward the number of the line whose layer is called, and the negative number where a call ends."""


# --- tensors ------------------------------------------------------------------------------------------------------


class Usual(NamedTuple):
    """What the texts of one file leave out."""

    dtype: str
    requires_grad: bool
    """Whether floating values require gradients."""

    def fields(self, kind: str, dtype: str) -> dict[str, Any]:
        """Return the usual fields of a tensor that is a ``value``, a ``parameter`` or a ``buffer``."""
        if kind == "value":
            return {"requires_grad": self.requires_grad and is_floating(dtype), "overwritten": False}
        return {"requires_grad": kind == "parameter", "left_out": False, "persistent": None}


def is_floating(dtype: str) -> bool:
    """Whether values of a dtype have gradients."""
    return dtype.startswith(("float", "bfloat", "complex"))


_WORDS = {
    ("requires_grad", True): " requires grad",
    ("requires_grad", False): " no grad",
    ("overwritten", True): " overwritten",
    ("left_out", True): " not updated",
    ("persistent", False): " not persistent",
    ("persistent", True): " persistent",
}
_TENSOR = re.compile(r"\(([0-9., ]*)\)((?: \w+)*?)(?: (?:from|tied to) (.*))?", re.DOTALL)
_GROUP = re.compile(r" group ([0-9]{1,6})")


def tensor_text(tensor: Value | Parameter, kind: str, usual: Usual, layer: str) -> str:
    """Return the shape of a tensor of a layer, what is unusual about it, and what it is the same as.

    >>> value = Value(path="input", shape=(2, 16), dtype="int64", device="cpu", source="net.emb output")
    >>> tensor_text(value, "value", Usual("float32", True), "net.drop")
    '(2, 16) int64 from .emb'
    >>> weight = Parameter(name="weight", shape=(4,), dtype="float32", device="cpu", group=1)
    >>> tensor_text(weight, "parameter", Usual("float32", True), "fc")
    '(4) no grad group 1'
    """
    sizes = ", ".join(str(size) if isinstance(size, int) else f"{size[0]}..{size[1]}" for size in tensor.shape)
    text = f"({sizes})" + (f" {tensor.dtype}" if tensor.dtype != usual.dtype else "")
    for name, value in usual.fields(kind, tensor.dtype).items():
        found = getattr(tensor, name)
        text += _WORDS.get((name, found), "") if found != value else ""
    if isinstance(tensor, Value):
        return text if tensor.source is None else f"{text} from {relative(tensor.source, layer)}"
    text += "" if tensor.group is None else f" group {tensor.group}"
    return text if tensor.tied_to is None else f"{text} tied to {tensor.tied_to}"


def tensor_fields(text: str, kind: str, usual: Usual, layer: str) -> dict[str, Any]:
    """Return the fields of a tensor of a layer from its text.

    Raises:
        ValueError: The text describes no tensor.
    """
    fields, origin = _parsed(text, kind, usual)
    if kind == "value":
        return {**fields, "source": None if origin is None else absolute(origin, layer)}
    return {**fields, "tied_to": origin}


@lru_cache(maxsize=4096)
def _parsed(text: str, kind: str, usual: Usual) -> tuple[dict[str, Any], str | None]:
    """Return the fields that the text of a tensor names, and what follows ``from`` or ``tied to``."""
    found = _TENSOR.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} describes no tensor")
    sizes, words, origin = found.groups()
    given: dict[str, Any] = {}
    known = usual.fields(kind, "")
    for (name, value), word in _WORDS.items():
        if name in known and word in words:
            given[name], words = value, words.replace(word, "", 1)
    group = _GROUP.search(words) if kind != "value" else None
    if group is not None:
        given["group"], words = int(group[1]), words.replace(group[0], "", 1)
    dtype = words[1:] or usual.dtype
    shape = tuple(map(_size, sizes.split(", "))) if sizes else ()
    if " " in dtype or math.prod(size if isinstance(size, int) else size[1] for size in shape) >= 1 << 63:
        raise ValueError(f"{text!r} describes no tensor")
    return {"shape": shape, "dtype": dtype, "device": "cpu", **usual.fields(kind, dtype), **given}, origin


def _size(text: str) -> Dimension:
    low, between, high = text.partition("..")
    return (int(low), int(high)) if between else int(low)


# --- addresses ----------------------------------------------------------------------------------------------------

_OUTPUT = " output"


def relative(address: str, layer: str) -> str:
    """Return an address relative to ``layer``; the ending ``output`` is left out.

    >>> relative("h.0.ln_1 output", "h.0.attn"), relative("h.0.ln_1 output", "h.0.attn.c_attn")
    ('.ln_1', '..ln_1')
    >>> relative("(root) input", "emb"), relative("h.0 (call 2) output", "h.1")
    ('(root) input', '.0 (call 2) output')
    """
    short = address.removesuffix(_OUTPUT)
    if " " in short:
        short = address
    above = layer
    for dots in (".", "..", "..."):
        above, dot, _ = above.rpartition(".")
        if dot and short.startswith(f"{above}."):
            return dots + short[len(above) + 1 :]
    return short


def absolute(text: str, layer: str) -> str:
    """Return the address that `relative` shortened.

    >>> absolute("..ln_1", "h.0.attn.c_attn")
    'h.0.ln_1 output'
    """
    rest = text.lstrip(".")
    if rest != text:
        above = layer.split(".")[: -(len(text) - len(rest))]
        if not above:
            raise ValueError(f"{text!r} leads out of the model")
        rest = ".".join([*above, rest])
    return rest if " " in rest else rest + _OUTPUT


# --- the order of layers and calls --------------------------------------------------------------------------------


def kind_of(call: Call) -> ForwardKind:
    """Return which kind of forward a call belongs to."""
    return call.root, call.root_training


def in_file_order(record: Record) -> list[Layer]:
    """Return the layers in the order of their first calls, those without one last, their calls by kind and index."""

    def first_call(layer: Layer) -> tuple[bool, ForwardKind, int]:
        started = [(False, kind_of(call), call.started) for call in layer.calls if call.started >= 0]
        return min(started, default=(True, ("", False), 0))

    def number(call: Call) -> tuple[ForwardKind, int]:
        return kind_of(call), call.index

    layers = sorted(record.layers.values(), key=first_call)
    return [replace(layer, calls=tuple(sorted(layer.calls, key=number))) for layer in layers]


def parameter_order(record: Record, layers: Sequence[Layer]) -> tuple[int, ...] | None:
    """Return the layers with parameters in the order of the model, as their places among the lines with some.

    Returns None if the lines are in this order. The order counts: optimizers know parameters by their position.
    """
    places = {name: i for i, name in enumerate(layer.name for layer in layers if layer.parameters)}
    found = tuple(places[name] for name, layer in record.layers.items() if layer.parameters)
    return found if found != tuple(sorted(found)) else None


def in_model_order(layers: dict[str, Layer], order: Sequence[int]) -> dict[str, Layer]:
    """Return the layers with those that have parameters in the order of the model, as `parameter_order` tells it."""
    own = [name for name, layer in layers.items() if layer.parameters]
    if sorted(order) != [*range(len(own))]:
        raise ValueError(f"the order of parameters is no order of {len(own):,} layers")
    following = iter(order)
    names = [own[next(following)] if layer.parameters else name for name, layer in layers.items()]
    return {name: layers[name] for name in names}


def in_order(layers: Sequence[Layer]) -> Iterator[tuple[int, int, bool]]:
    """Yield starts and ends of calls in order: line, call, whether it is the end. Those without a place are last."""
    found = []
    for i, layer in enumerate(layers):
        for j, call in enumerate(layer.calls):
            for end, position in ((False, call.started), (True, call.finished)):
                place = (False, kind_of(call), position) if position >= 0 else (True, ("", False), 0)
                found.append((place, i, j, end))
    return ((i, j, end) for _, i, j, end in sorted(found))


def order_of(layers: Sequence[Layer]) -> Order:
    """Return the order of calls."""
    found: dict[ForwardKind, list[int]] = {kind_of(call): [] for layer in layers for call in layer.calls}
    for i, j, end in in_order(layers):
        call = layers[i].calls[j]
        if (call.finished if end else call.started) >= 0:
            found[kind_of(call)].append(-i - 1 if end else i + 1)
    return tuple(tuple(found[kind]) for kind in sorted(found))


def implied_order(layers: Sequence[Layer]) -> Order:
    """Return the order of calls if each layer is called once, inside its containers, in the order of lines."""
    kinds: dict[ForwardKind, tuple[list[int], list[int]]] = {}
    for line, layer in enumerate(layers, start=1):
        around = containers(layer.name)
        for kind in dict.fromkeys(map(kind_of, layer.calls)):
            order, running = kinds.setdefault(kind, ([], []))
            while running and layers[running[-1] - 1].name not in around:
                order.append(-running.pop())
            order.append(line)
            running.append(line)
    return tuple((*kinds[kind][0], *(-line for line in reversed(kinds[kind][1]))) for kind in sorted(kinds))


def placed(layers: Sequence[Layer], order: Order) -> list[Layer]:
    """Return the layers with the start and the end of each call: the calls of a layer start in turn.

    Raises:
        ValueError: The order does not fit the calls.
    """
    waiting: defaultdict[tuple[ForwardKind, int], list[int]] = defaultdict(list)
    for i, layer in enumerate(layers):
        for j, call in enumerate(layer.calls):
            waiting[kind_of(call), i].append(j)
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for kind, tokens in zip(sorted({kind for kind, _ in waiting}), order, strict=True):
        following = {i: iter(of_layer) for (of_kind, i), of_layer in waiting.items() if of_kind == kind}
        running: defaultdict[int, list[int]] = defaultdict(list)
        for position, token in enumerate(tokens):
            i = abs(token) - 1
            started = next(following.get(i, iter(())), None) if token > 0 else None
            if started is not None:
                running[i].append(started)
                found[i, started] = position, -1
            elif token < 0 and running[i]:
                j = running[i].pop()
                found[i, j] = found[i, j][0], position
            else:
                raise ValueError(f"the order speaks of a call of layer {i + 1} that is not there")

    def calls(i: int, layer: Layer) -> Iterator[Call]:
        for j, call in enumerate(layer.calls):
            started, finished = found.get((i, j), (-1, -1))
            yield replace(call, started=started, finished=finished)

    return [replace(layer, calls=tuple(calls(i, layer))) for i, layer in enumerate(layers)]


# --- the header ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What the file holds."""

    modelprobe: int
    model: str
    mode: str
    root: str = ROOT
    seed: int | None = None
    loss: str | None = None
    forwards: int = 0
    backwards: int = 0
    dtype: str = "float32"
    requires_grad: bool = False
    grad_enabled: bool = True
    autocast: str | None = None
    optimizers: tuple[OptimizerGroup, ...] = ()
    attributes: Mapping[str, Plain] = field(default_factory=dict)
    """Private attributes that most layers share: a framework may set them on each layer."""
    numbers: bool = True
    notes: tuple[str, ...] = ()
    """They are in the other file if there is one."""
    order: Order | None = None
    parameter_order: tuple[int, ...] | None = None
    reason: str | None = None
    supersedes: str | None = None
    layers: Mapping[str, Any]

    @property
    def usual(self) -> Usual:
        """What the texts of tensors leave out."""
        return Usual(self.dtype, self.requires_grad)

    @property
    def training(self) -> bool:
        """Whether most layers are in training mode."""
        return {"train": True, "eval": False}[self.mode]

    def usual_call(self, training: bool, following: Mapping[ForwardKind, int], kind: ForwardKind) -> dict[str, Any]:
        """Return the usual fields of a call of a layer in this mode."""
        return {
            "root": self.root,
            "root_training": self.training,
            "index": following.get(kind, 0),
            "forwards": self.forwards or 1,
            "training": training,
            "grad_enabled": self.grad_enabled,
            "autocast": self.autocast,
        }


_LAYER = ("type", "functional", "leaf", "training", "aliases")
_CALL = ("root", "root_training", "index", "forwards", "training", "inputs_known", "arguments", "grad_enabled",
         "autocast", "recomputed")  # fmt: skip
_ARROW = " -> "
_DEEPEST = 256
"""Parts of a layer's name: Python's recursion limit allows no deeper calls."""
_ABSENT: dict[str, str] = {}
"""The value of an attribute that most layers have and this one does not."""


def architecture_of(record: Record, layers: Sequence[Layer], **declared: Any) -> Architecture:
    """Return what the file holds of a record. Its layers are those that `in_file_order` returns."""
    calls = [call for layer in layers for call in layer.calls]
    values = [value for call in calls for value in (*call.inputs, *call.outputs)]
    tensors: list[Parameter | Value] = [*(p for layer in layers for p in layer.parameters), *values]
    first = calls[0] if calls else None
    training = first.root_training if first else any(layer.training for layer in layers[:1])
    own = [layer.attributes for layer in layers if not layer.functional]
    private = Counter((k, type(v), v) for attributes in own for k, v in attributes.items() if k.startswith("_"))
    order, numbers = order_of(layers), has_numbers(record)
    header = Architecture(
        modelprobe=SCHEMA,
        mode="train" if training else "eval",
        dtype=next((tensor.dtype for tensor in tensors if is_floating(tensor.dtype)), "float32"),
        requires_grad=any(value.requires_grad for value in values),
        attributes={k: v for (k, _, v), n in private.items() if len(own) > 1 and 2 * n > len(own)},
        numbers=numbers,
        notes=() if numbers else record.notes,
        order=order if order != implied_order(layers) else None,
        parameter_order=parameter_order(record, layers),
        layers={},
        **declared,
        **{name: getattr(record, name) for name in OF_RECORD},
        **({name: getattr(first, name) for name in ("root", "grad_enabled", "autocast")} if first else {}),
    )
    parents = {name for layer in layers for name in containers(layer.name)}
    return replace(header, layers={one.name: _line(one, header, one.name not in parents) for one in layers})


OF_RECORD = ("model", "seed", "loss", "forwards", "backwards", "optimizers")
"""The fields of the record that the header has as they are."""


def layers_of(architecture: Architecture) -> list[Layer]:
    """Return the layers of a file, their tensors still without numbers.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: The file is damaged.
    """
    if deep := [name for name in architecture.layers if name.count(".") >= _DEEPEST]:
        raise ValueError(f"{deep[0][:20]!r} has more than {_DEEPEST} parts")
    parents = {above for name in architecture.layers for above in containers(name)}
    layers = [_layer(name, line, architecture, name not in parents) for name, line in architecture.layers.items()]
    return placed(layers, implied_order(layers) if architecture.order is None else architecture.order)


# --- lines --------------------------------------------------------------------------------------------------------


def _line(layer: Layer, header: Architecture, leaf: bool) -> dict[str, Any]:
    line = codec.encode_fields(layer, _LAYER, {"leaf": leaf, "training": header.training})
    attributes = codec.encode(dict(layer.attributes))
    if not layer.functional:
        usual = codec.encode(header.attributes)
        attributes = {k: v for k, v in attributes.items() if k not in usual or repr(v) != repr(usual[k])}
        attributes |= {k: _ABSENT for k in usual if k not in layer.attributes}
    line |= {"type": layer.type_name, "attributes": attributes}
    for kind, own in (("parameter", layer.parameters), ("buffer", layer.buffers)):
        line[f"{kind}s"] = {p.name: tensor_text(p, kind, header.usual, layer.name) for p in own}
    line["calls"] = []
    following: dict[ForwardKind, int] = {}
    for call in layer.calls:
        said = codec.encode_fields(call, _CALL, header.usual_call(layer.training, following, kind_of(call)))
        following[kind_of(call)] = call.index + 1
        inputs, outputs = (
            {value.path: tensor_text(value, "value", header.usual, layer.name) for value in values}
            for values in (call.inputs, call.outputs)
        )
        parts = {"inputs": inputs, "arguments": said.pop("arguments", None), "outputs": outputs}
        said |= {name: part for name, part in parts.items() if part}
        short = said.keys() == {"inputs", "outputs"} and [*inputs, *outputs] == ["input", "output"]
        line["calls"].append(f"{inputs['input']}{_ARROW}{outputs['output']}" if short else said)
    return {name: part for name, part in line.items() if part not in ({}, [])}


def _layer(name: str, data: Any, header: Architecture, leaf: bool) -> Layer:
    line = dict(data)
    attributes, parameters, buffers = (line.pop(part, {}) for part in ("attributes", "parameters", "buffers"))
    calls = []
    fields: dict[str, Any] = {"leaf": leaf, "training": header.training}
    lines = line.pop("calls", ())
    fields |= codec.decode_fields(Layer, line, _LAYER)
    if not fields.get("functional"):
        usual = codec.encode(header.attributes)
        attributes = attributes | {k: v for k, v in usual.items() if k not in attributes}
    following: dict[ForwardKind, int] = {}
    for one in lines:
        if type(one) is str:
            source, _, made = one.rpartition(_ARROW)
            one = {"inputs": {"input": source}, "outputs": {"output": made}}
        said = dict(one)
        inputs, outputs = (
            tuple(
                Value(path=path, **tensor_fields(text, "value", header.usual, name))
                for path, text in said.pop(side, {}).items()
            )
            for side in ("inputs", "outputs")
        )
        if any(value.source is not None for value in outputs):
            raise ValueError("what a call gives out comes from nowhere else")
        given = codec.decode_fields(Call, said, _CALL)
        kind = given.get("root", header.root), given.get("root_training", header.training)
        usual = header.usual_call(fields["training"], following, kind)
        calls.append(Call(**{**usual, **given}, inputs=inputs, outputs=outputs))
        following[kind] = calls[-1].index + 1
    parameters, buffers = (
        tuple(Parameter(name=p, **tensor_fields(text, kind, header.usual, name)) for p, text in own.items())
        for kind, own in (("parameter", parameters), ("buffer", buffers))
    )
    return Layer(
        name=sys.intern(name),  # if many snapshots are read, the names of layers are what stays in memory
        **fields,
        attributes=codec.decode(Mapping[str, Plain], {k: v for k, v in attributes.items() if v != _ABSENT}),
        parameters=parameters,
        buffers=buffers,
        calls=tuple(calls),
    )
