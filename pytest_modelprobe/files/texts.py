"""The two texts of a snapshot: from a record, back to it, and from one version to the next.

Both are strict JSON with one entry of the header, or one layer, on each line: git compares and merges by lines, so a
change in one layer is a change of one line. The fields are those of the dataclasses, which `record.codec` walks, and a
field at its usual value is left out. A tensor is written where it is first seen; elsewhere stands the name of that
place. A text may come from anybody who opens a pull request. It is read strictly, by the types of the fields, and
whatever is wrong with it is one error with the way out.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, NoReturn, cast

from pytest_modelprobe.exceptions import SnapshotError
from pytest_modelprobe.record import (
    Call,
    EmittedTensor,
    ForwardKind,
    IsolatedResponse,
    Layer,
    Operation,
    Parameter,
    Reading,
    Record,
    Value,
    address,
    codec,
    gc_paused,
    has_numbers,
    qualified,
)
from pytest_modelprobe.text import printable

from .architecture import (
    OF_RECORD,
    SCHEMA,
    Architecture,
    absolute,
    architecture_of,
    in_file_order,
    in_model_order,
    in_order,
    kind_of,
    layers_of,
    relative,
)
from .readings import MOST_UNITS, packed_reading, unpacked_reading

MOST_BYTES = 64 << 20
"""The size of the largest file that is read. No snapshot is larger."""

ComparedParts = Literal["all", "architecture", "behavior"]
"""The part of a snapshot that its test compares."""

RESTORE = "restore it from version control, or delete it and record it anew with `pytest --snapshot-update`"


class Texts(NamedTuple):
    """The contents of the two files."""

    architecture: str
    numbers: str | None
    """``None`` if the record has the structure alone."""


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A record read from its files, with its declaration."""

    record: Record
    """The record. Its layers are in the order of the file, those with parameters in the order of the model."""
    architecture: str
    """The `architecture_digest` of the architecture file."""
    reason: str | None = None
    """The declared reason for the change of the architecture."""
    supersedes: str | None = None
    """The `architecture_digest` of each earlier version, separated by spaces."""
    compared: ComparedParts = "all"
    """The part that the test compares."""


# --- what the files hold ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbers:
    """The numbers file."""

    modelprobe: int
    architecture: str
    compared: str = "all"
    device: str
    applied: str | None = None
    noise: str | None = None
    notes: tuple[str, ...] = ()
    origin: Operation | None = None
    gradient_origin: Operation | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    samples: str
    responses: Mapping[str, Any] = field(default_factory=dict)
    layers: Mapping[str, Mapping[str, Any]]


_RESPONSE = ("recipes", "without_gradient", "reason", "mode_matters")
_OF_VALUE = {"forward": False, "backward": True, "backward_inner": True}
_OF_PARAMETER = {"reading": False, "gradient": True, "after": False, "update": True}
"""The readings of a tensor, and whether each is of a gradient."""
_ALONE, _RANDOM, _SAMPLES = "alone", "random", "samples"
_DECLARATION = ("reason", "supersedes")


def _laid_out(data: Mapping[str, Any]) -> str:
    """Return the text of a file: an entry of the header, a response or a layer on each line."""
    separators = (",", ":") if "architecture" in data else None

    def line(key: str, value: Any) -> str:
        return f"{json.dumps(key)}: {json.dumps(value, allow_nan=False, separators=separators)}"

    lines = []
    for key, value in data.items():
        if key in ("responses", "layers") and value:
            inner = ",\n".join(line(*item) for item in value.items())
            lines.append(f'"{key}": {{\n{inner}\n}}')
        else:
            lines.append(line(key, value))
    return "{\n" + ",\n".join(lines) + "\n}\n"


# --- writing ------------------------------------------------------------------------------------------------------


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
    "modelprobe": 6,
    "model": "Net",
    "mode": "eval",
    "numbers": false,
    "layers": {
    "fc1": {"type": "Linear"}
    }
    }
    """
    layers = in_file_order(record)
    header = architecture_of(record, layers, reason=reason, supersedes=supersedes)
    architecture = codec.encode(header)
    if not header.numbers:
        return Texts(_laid_out(architecture), None)
    samples = next((call.samples for layer in layers for call in layer.calls), None) or ""
    content = _Written(layers, samples)
    numbers = _Numbers(
        modelprobe=SCHEMA,
        architecture=digest_of(architecture),
        compared=compared,
        samples=samples,
        responses=content.responses,
        layers=content.lines,
        **{name: getattr(record, name) for name in _OF_RUN},
    )
    return Texts(_laid_out(architecture), _laid_out(codec.encode(numbers)))


_OF_RUN = ("device", "applied", "noise", "notes", "origin", "gradient_origin", "versions")


def _entry(tensor: Value | Parameter, names: Mapping[str, bool]) -> list[Any]:
    """Return the readings of a tensor, without those that are missing at the end."""
    readings = [
        packed_reading(getattr(tensor, name), tensor.shape, tensor.dtype, gradient=gradient)
        for name, gradient in names.items()
    ]
    while len(readings) > 1 and readings[-1] is None:
        readings.pop()
    return readings


_EMPTY: list[Any] = [[]]
"""The entry of a tensor without numbers."""


class _Written:
    """The lines of the numbers file, and the responses that they name."""

    def __init__(self, layers: Sequence[Layer], samples: str) -> None:
        self.responses: dict[str, Any] = {}
        lines: dict[str, dict[str, Any]] = {layer.name: {} for layer in layers}
        tensors = [(layer.name, own) for layer in layers for own in (*layer.parameters, *layer.buffers)]
        entries = {qualified(name, own.name): _entry(own, _OF_PARAMETER) for name, own in tensors}
        for name, own in tensors:
            entry = entries[qualified(name, own.name)]
            if entry != entries.get(own.tied_to or "", _EMPTY):
                lines[name][f".{own.name}"] = entry
        values = _value_entries(layers)
        for i, layer in enumerate(layers):
            for j, call in enumerate(layer.calls):
                given = (call.samples or "") if (call.samples or "") != samples else None
                told = {_RANDOM: call.random, _SAMPLES: given, _ALONE: self._response(call.response)}
                told = {**values[i, j, False], **values[i, j, True], **told}
                lines[layer.name] |= {_number(j) + key: part for key, part in told.items() if part is not None}
        self.lines = {name: line for name, line in lines.items() if line}

    def _response(self, response: IsolatedResponse | None) -> str | None:
        """Return the key of a response: the start of its hash, so that equal responses share one entry."""
        if response is None:
            return None
        data = codec.encode_fields(response, _RESPONSE)
        handed = ((one, packed_reading(one.reading, None, "float32")) for one in response.handed)
        data["handed"] = [[one.where, reading if one.passed is None else one.passed] for one, reading in handed]
        if response.gradient is not None:
            data["gradient"] = packed_reading(response.gradient, None, "float32", gradient=True)
        key = hashlib.sha256(json.dumps(data).encode()).hexdigest()[:12]
        self.responses[key] = data
        return key


def _number(call: int) -> str:
    """Return what the keys of a call begin with."""
    return str(call + 1) if call else ""


def _value_entries(layers: Sequence[Layer]) -> dict[tuple[int, int, bool], dict[str, Any]]:
    """Return what is written of the inputs, and of the outputs, of each call."""
    found: dict[tuple[int, int, bool], dict[str, Any]] = {}
    owners: defaultdict[tuple[ForwardKind, int], list[tuple[str, Any]]] = defaultdict(list)
    known: set[tuple[ForwardKind, str]] = set()
    for i, j, end in in_order(layers):
        name, call = layers[i].name, layers[i].calls[j]
        here = found[i, j, end] = {}
        for value in call.outputs if end else call.inputs:
            entry, where = _entry(value, _OF_VALUE), address(name, call, value.path)
            same = owners[kind_of(call), value.tensor] if value.tensor >= 0 else []
            owner = next((other for other, numbers in same if numbers == entry), None)
            if owner is not None or entry != _EMPTY:
                here["<>"[end] + value.path] = entry if owner is None else relative(owner, name)
            if owner is None and (kind_of(call), where) not in known:
                same.append((where, entry))
            known.add((kind_of(call), where))
    return found


# --- reading ------------------------------------------------------------------------------------------------------


def decode(architecture: str, numbers: str | None, *, where: str, numbers_at: str | None = None) -> StoredSnapshot:
    """Return the snapshot of these two texts.

    Args:
        architecture: The text of the architecture file.
        numbers: The text of the numbers file; ``None`` if there is no such file.
        where: Path of the architecture file, for messages.
        numbers_at: Path of the numbers file, for messages. By default it has the same name.

    Raises:
        SnapshotError: The texts are damaged, do not belong together or were written by another version.

    >>> record = Record(model="Net", layers={"fc1": Layer(name="fc1", type="Linear")})
    >>> snapshot = decode(*encode(record, reason="why not"), where="test_net.arch.json")
    >>> snapshot.record, snapshot.reason
    (<Record of Net: 1 layer, 0 forwards, 0 backwards>, 'why not')
    """
    there = numbers_at or where.removesuffix(".arch.json") + ".probe.json"
    with gc_paused():  # many small objects are made, and none of them is garbage
        snapshot = _structure(architecture, where)
        alone = snapshot.compared == "architecture"
        if numbers is None:
            if not alone:
                raise SnapshotError(
                    f"{there} is missing, the numbers that belong to {where}: add it to version control, or record "
                    "both anew with `pytest --snapshot-update`"
                )
            return snapshot
        if alone:
            raise SnapshotError(f"{there} has numbers, but {where} is of a structure without: delete {there}")
        found = parsed(numbers, there)
        if found.get("architecture") != snapshot.architecture:
            raise SnapshotError(
                f"{there} and {where} do not belong together, after a merge, an update that was cut short or an update "
                "on another device: run `pytest --snapshot-update` for this device"
            )
        with _reading(there):
            told: _Numbers = codec.decode(_Numbers, found)
            layers = _Read([*snapshot.record.layers.values()], told).layers()
            record = replace(snapshot.record, layers=layers, **{name: getattr(told, name) for name in _OF_RUN})
            if not has_numbers(record):
                raise ValueError("it has no numbers")
        return replace(snapshot, record=record, compared=cast(ComparedParts, told.compared))


def decode_architecture(architecture: str, *, where: str) -> StoredSnapshot:
    """Return the snapshot of an architecture file alone, without numbers.

    Args:
        architecture: The text of the architecture file.
        where: Its path, for messages.

    Raises:
        SnapshotError: The text is damaged or was written by another version.
    """
    with gc_paused():
        return _structure(architecture, where)


def _structure(text: str, where: str) -> StoredSnapshot:
    """Return what an architecture file holds."""
    data = parsed(text, where)
    with _reading(where):
        header: Architecture = codec.decode(Architecture, data)
        layers = {layer.name: layer for layer in layers_of(header)}
        if header.parameter_order is not None:
            layers = in_model_order(layers, header.parameter_order)
        told = {name: getattr(header, name) for name in (*OF_RECORD, "notes")}
        record = Record(layers=layers, **told)
        compared: ComparedParts = "all" if header.numbers else "architecture"
        return StoredSnapshot(record, digest_of(data), header.reason, header.supersedes, compared)


def architecture_digest(text: str) -> str:
    """Return the digest of an architecture file without its declaration, as in `StoredSnapshot.supersedes`.

    Raises:
        SnapshotError: The text is no architecture.

    >>> record = Record(model="Net")
    >>> architecture_digest(encode(record).architecture) == architecture_digest(encode(record, reason="x").architecture)
    True
    """
    return digest_of(parsed(text, "the architecture"))


def digest_of(data: Mapping[str, Any]) -> str:
    """Return the digest of a parsed architecture. It is independent of white space and of the order of attributes."""
    header = {k: v for k, v in data.items() if k not in (*_DECLARATION, "layers")}
    # The order of layers counts: it is that of the calls.
    text = json.dumps([header, list(data["layers"].items())], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def parsed(text: str, where: str, *, section: str = "layers") -> dict[str, Any]:
    """Return what a file of our schema holds.

    Args:
        text: The text of the file.
        where: Its path, for messages.
        section: The name of the object that every file of this kind has.

    Raises:
        SnapshotError: It is another file, damaged, or of another version.
    """
    if re.search(r"^(<<<<<<<|>>>>>>>)", text, re.MULTILINE):
        raise SnapshotError(
            f"{where} holds the conflict markers of a merge: check out one side "
            "(`git checkout --ours` or `--theirs`) of both its files and run `pytest --snapshot-update`"
        )
    with _reading(where):
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number, parse_int=_integer)
    schema = data.get("modelprobe") if type(data) is dict and type(data.get(section)) is dict else None
    if type(schema) is not int:
        raise _damaged(where, "it is no file of pytest-modelprobe")
    if schema != SCHEMA:
        way = "record it anew with `pytest --snapshot-update`" if schema < SCHEMA else "upgrade pytest-modelprobe"
        raise SnapshotError(f"{where} is of schema {schema}, and this pytest-modelprobe reads {SCHEMA}: {way}")
    return cast(dict[str, Any], data)


def is_older(text: str) -> bool:
    """Whether a file is of an older schema, which an update writes anew.

    >>> is_older('{"modelprobe": 5, "layers": {}}'), is_older("")
    (True, False)
    """
    found = re.match(r'\{\s*"modelprobe": ([1-9]),', text)
    return found is not None and int(found[1]) < SCHEMA


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):  # another reader could see something else in it
        twice = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
        raise ValueError(f"{twice!r} stands twice in one object")
    return found


def _integer(text: str) -> int:
    if len(text) > 300:  # a float holds every number of so many digits
        raise ValueError(f"a number of {len(text):,} digits stands in it")
    return int(text)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number there")


def too_large(where: str, size: int) -> NoReturn:
    """Raise the error of a file that is too large to read."""
    raise SnapshotError(
        f"{where} has {size >> 20:,} MB, more than a snapshot ever has ({MOST_BYTES >> 20} MB): {RESTORE}"
    )


def text_of(data: bytes, where: str) -> str:
    """Return the text of a file; raise `SnapshotError` if it is not UTF-8."""
    with _reading(where):
        return data.decode("utf-8").replace("\r\n", "\n")  # as a checkout on Windows may have it


def _damaged(where: str, why: str) -> SnapshotError:
    return SnapshotError(f"{where} cannot be read, {why}: {RESTORE}")


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """Make one error, with the path of the file, of all that may be wrong with it."""
    try:
        yield
    except RecursionError:
        raise _damaged(where, "it is nested too deeply to be a snapshot") from None
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        why = str(error) if isinstance(error, ValueError) else f"{error} ({type(error).__name__})"
        short = why if len(why) <= 160 else f"{why[:157]}..."
        raise _damaged(where, printable(short)) from None


_UNITS_OF_ALL = 16 * MOST_UNITS
"""Units of all readings together. Three numbers in a file stand for as many units in memory."""


class _Read:
    """The layers of a structure, to which numbers are added."""

    def __init__(self, layers: Sequence[Layer], numbers: _Numbers) -> None:
        self.structure, self.numbers = layers, numbers
        self.units = 0
        self.responses: dict[str, IsolatedResponse] = {}
        self.own: dict[str, dict[str, Any]] = {}
        for layer in layers:
            for own in (*layer.parameters, *layer.buffers):
                if (data := self._line(layer).get(f".{own.name}")) is not None:
                    self.own[qualified(layer.name, own.name)] = self._readings(data, own.shape, _OF_PARAMETER)

    def _line(self, layer: Layer) -> Mapping[str, Any]:
        return self.numbers.layers.get(layer.name, {})

    def layers(self) -> dict[str, Layer]:
        """Return the layers by name."""
        values = self._values()

        def parameter(layer: Layer, own: Parameter) -> Parameter:
            readings = self.own.get(qualified(layer.name, own.name)) or self.own.get(own.tied_to or "", {})
            return replace(own, device=self.numbers.device, **readings)

        def call(layer: Layer, i: int, j: int, call: Call) -> Call:
            said = (self._line(layer).get(_number(j) + key) for key in (_RANDOM, _SAMPLES, _ALONE))
            random, samples, alone = (codec.decode(str | None, one) for one in said)
            return replace(
                call,
                inputs=values[i, j, False],
                outputs=values[i, j, True],
                random=random,
                samples=(self.numbers.samples if samples is None else samples) or None,
                response=None if alone is None else self._response(alone),
            )

        return {
            layer.name: replace(
                layer,
                parameters=tuple(parameter(layer, own) for own in layer.parameters),
                buffers=tuple(parameter(layer, own) for own in layer.buffers),
                calls=tuple(call(layer, i, j, one) for j, one in enumerate(layer.calls)),
            )
            for i, layer in enumerate(self.structure)
        }

    def _values(self) -> dict[tuple[int, int, bool], tuple[Value, ...]]:
        """Return the inputs, and the outputs, of each call. Those that are one tensor have its number."""
        found: dict[tuple[int, int, bool], tuple[Value, ...]] = {}
        known: dict[tuple[ForwardKind, str], dict[str, Any]] = {}
        number = itertools.count()
        for i, j, end in in_order(self.structure):
            layer, values = self.structure[i], []
            call = layer.calls[j]
            for value in call.outputs if end else call.inputs:
                data = self._line(layer).get(f"{_number(j)}{'<>'[end]}{value.path}", _EMPTY)
                tensor = next(number)
                if type(data) is str:
                    readings = known[kind_of(call), absolute(data, layer.name)]
                else:
                    readings = {**self._readings(data, value.shape, _OF_VALUE), "tensor": tensor}
                known.setdefault((kind_of(call), address(layer.name, call, value.path)), readings)
                values.append(replace(value, device=self.numbers.device, **readings))
            found[i, j, end] = tuple(values)
        return found

    def _readings(self, data: Any, shape: Any, names: Mapping[str, bool]) -> dict[str, Any]:
        if type(data) is not list or len(data) > len(names):
            raise ValueError(f"{data!r} are no numbers of a tensor")
        pairs = zip(names, data, strict=False)
        return {name: self._reading(one, shape) for name, one in pairs if one is not None}

    def _reading(self, data: Any, shape: Any = None) -> Reading:
        reading = unpacked_reading(data, shape)
        if reading.units is not None:
            self.units += len(reading.units)
            if self.units > _UNITS_OF_ALL:
                raise ValueError("there are more units than a model has")
        return reading

    def _response(self, key: str) -> IsolatedResponse:
        if key not in self.responses:
            data = dict(self.numbers.responses[key])
            gradient, handed = data.pop("gradient", None), []
            for where, one in data.pop("handed"):
                passed = one if type(one) is str else None
                reading = None if one is None or passed is not None else self._reading(one)
                handed.append(EmittedTensor(where=codec.decode(str, where), passed=passed, reading=reading))
            self.responses[key] = IsolatedResponse(
                handed=tuple(handed),
                gradient=None if gradient is None else self._reading(gradient),
                **codec.decode_fields(IsolatedResponse, data, _RESPONSE),
            )
        return self.responses[key]


# --- updates ------------------------------------------------------------------------------------------------------


def rewritten(new: Texts, old: Texts, changed: Collection[str]) -> Texts:
    """Return the new texts with the lines of layers that did not change as the old ones have them.

    A new run rounds some numbers differently although nothing changed. So an update changes as few lines as possible.
    Lines of layers whose structure differs are taken from the new texts. So are all if the old texts cannot be used.

    Args:
        new: What `encode` returned for the record that is kept from now on.
        old: What the files hold.
        changed: Layers with values beyond their tolerance.
    """
    try:
        (a, b), (x, y) = (
            [None if text is None else parsed(text, "") for text in pair] for pair in zip(new, old, strict=True)
        )
    except SnapshotError:
        return new
    assert a is not None
    assert b is not None
    architecture = old.architecture
    if digest_of(a) != digest_of(b) or any(key in a for key in _DECLARATION):
        architecture = new.architecture
    fixed = {*a, *b} - {*_DECLARATION, "layers", "order", "parameter_order"}  # what each line may depend on
    if x is None or y is None or x.get("samples") != y.get("samples") or any(a.get(k) != b.get(k) for k in fixed):
        return Texts(architecture, new.numbers)
    kept = {
        name
        for name, line in x["layers"].items()
        if name not in changed
        and a["layers"].get(name) == b["layers"].get(name)
        and _form(line) == _form(y["layers"].get(name, {}))
    }
    header = x
    if kept == x["layers"].keys() == y["layers"].keys():  # the header of a run belongs to its numbers
        header = {**y, "architecture": x["architecture"], "compared": x.get("compared")}
    lines = {name: (y if name in kept else x)["layers"][name] for name in x["layers"]}
    responses = {
        key: (y if name in kept else x)["responses"][key]
        for name, line in lines.items()
        for key in (part for at, part in line.items() if at.lstrip("0123456789") == _ALONE)
    }
    told = {key: part for key, part in {**header, "responses": responses, "layers": lines}.items() if part is not None}
    return Texts(architecture, _laid_out(told))


def _form(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a line has besides numbers: which values it has, and which it refers to."""

    def form(key: str, part: Any) -> Any:
        if type(part) is list:
            return [one is None for one in part]
        return None if key.lstrip("0123456789") in (_ALONE, _RANDOM) else part

    return {key: form(key, part) for key, part in line.items()}


# --- declarations -------------------------------------------------------------------------------------------------


def with_reason(text: str, reason: str, supersedes: str | None) -> str:
    r"""Return the text of an architecture file with another declaration, and no other change.

    `modelprobe declare` writes a reason after the fact, without running the test.

    Args:
        text: The file, as `encode` wrote it.
        reason: Why the architecture changed.
        supersedes: The digests of earlier architectures, as `gate.superseded` returns them.

    >>> print(with_reason('{"modelprobe": 6, "reason": "old", "layers": {}}', "wider", "a b"), end="")
    {
    "modelprobe": 6,
    "reason": "wider",
    "supersedes": "a b",
    "layers": {}
    }
    """
    data = parsed(text, "the architecture")
    declaration = {"reason": reason, "supersedes": supersedes}
    header = {key: part for key, part in data.items() if key not in (*_DECLARATION, "layers")}
    return _laid_out({**header, **{k: v for k, v in declaration.items() if v}, "layers": data["layers"]})


class Removal(NamedTuple):
    """Why snapshots were deleted."""

    contents: frozenset[str]
    """Digests of what the snapshots held, one for each device."""
    reason: str


def removal_text(removal: Removal) -> str:
    r"""Return the text of a file that declares a deletion.

    >>> text = removal_text(Removal(frozenset({"a"}), "not used any more"))
    >>> text
    '{\n "modelprobe": 6,\n "reason": "not used any more",\n "removed": {\n  "a": true\n }\n}\n'
    >>> removal_from(text, "test_a.removed.json").reason
    'not used any more'
    """
    removed = dict.fromkeys(sorted(removal.contents), True)
    return json.dumps({"modelprobe": SCHEMA, "reason": removal.reason, "removed": removed}, indent=1) + "\n"


def removal_from(text: str, where: str) -> Removal:
    """Return what `removal_text` wrote. ``where`` is the path of the file, for messages.

    Raises:
        SnapshotError: The text is damaged or was written by another version.
    """
    data = parsed(text, where, section="removed")
    reason = data.get("reason")
    if type(reason) is not str:
        raise SnapshotError(f"{where} gives no reason: write it again with `modelprobe declare`")
    return Removal(frozenset(data["removed"]), reason)
