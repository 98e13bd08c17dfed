"""Snapshot files: a record and its two texts, there and back; on disk; damaged."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.comparison import tolerance as tolerances
from pytest_modelprobe.comparison.compare import compare
from pytest_modelprobe.exceptions import SnapshotError
from pytest_modelprobe.files import (
    StoredSnapshot,
    Texts,
    architecture_digest,
    decode,
    decode_architecture,
    encode,
    file_name,
    read,
    read_texts,
    rewritten,
    write,
)
from pytest_modelprobe.files.readings import packed, packed_reading, unpacked, unpacked_reading
from pytest_modelprobe.gate import text as changes
from pytest_modelprobe.gate import verdict as gate
from pytest_modelprobe.gate.verdict import run_differences
from pytest_modelprobe.record import (
    ROOT,
    Call,
    EmittedTensor,
    IsolatedResponse,
    Layer,
    Operation,
    Parameter,
    Reading,
    Record,
    Statistics,
    Units,
    Value,
)
from pytest_modelprobe.report import ci

# --- records ------------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """Calls one layer twice, and a child before the one that stands above it."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(4, 4)
        self.early = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.late(self.early(self.early(x)) + x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.norm(self.emb(ids)))
        return {"logits": logits, "best": logits.argmax(-1)}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.log = nn.Module()
        self.scale = math.inf

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).log() / 0.0


def ran(model: nn.Module, *args: torch.Tensor, loss: Any = "random", noise: bool = True) -> Record:
    """Return a record with all that a snapshot keeps."""
    with ModelProbe(device="cpu", seed=0) as probe:
        record = probe.run(model, *args, loss=loss)
        assert record.live_run is not None
        again = record.live_run
        record = again.measured(record, record) if noise else again.isolated(record)
    return dataclasses.replace(record)


def built(name: str) -> Record:
    torch.manual_seed(0)
    match name:
        case "cnn":
            model = nn.Sequential(
                nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 3)
            )
            nn.init.constant_(model[1].bias[:2].detach(), -9.0)
            return ran(model, torch.randn(2, 1, 8, 8))
        case "shared":
            return ran(Shared(), torch.randn(2, 4))
        case "tied":
            return ran(Tied(), torch.randint(10, (2, 3)), loss=lambda out: out["logits"].square().mean())
        case "broken":
            return ran(Broken(), torch.randn(2, 4), loss=None)
        case "structure":
            with ModelProbe(device="cpu", seed=0) as probe:
                return probe.architecture(Shared(), torch.randn(2, 4))
        case "watched":
            with ModelProbe(device="cpu", seed=0) as probe:
                model = Shared()
                watch = probe.watch(model)
                for n in (2, 3):
                    model(torch.randn(n, 4)).sum().backward()
                model.eval()
                with torch.no_grad():
                    model(torch.randn(2, 4))
                return watch.record
        case "gpt2":
            return gpt2(2)
    raise AssertionError(name)


def gpt2(blocks: int, *, noise: bool = True) -> Record:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=blocks,
        n_head=4,
        n_embd=64,
        vocab_size=128,
        n_positions=64,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,  # a cache that is given out is recorded with all its keys and values
    )
    with ModelProbe(device="cpu", seed=0) as probe:
        model = probe.build(lambda: transformers.GPT2LMHeadModel(config)).eval()
        return ran(model, probe.randint(0, 128, (2, 16)), noise=noise)


MODELS = ["cnn", "shared", "tied", "broken", "structure", "watched", "gpt2"]
_BUILT: dict[str, Record] = {}


@pytest.fixture(params=MODELS)
def record(request: pytest.FixtureRequest) -> Record:
    return model_record(request.param)


def model_record(name: str) -> Record:
    if name not in _BUILT:
        _BUILT[name] = built(name)
    return _BUILT[name]


def value(path: str, shape: tuple[int, ...] = (2, 4), **more: Any) -> Value:
    return Value(path=path, shape=shape, dtype="float32", device="cpu", **more)


def reading(mean: float = 0.5, *, count: int = 8, noise: float | None = 2e-7, **more: Any) -> Reading:
    numbers = Statistics(count=count, mean=mean, min=mean - 1, max=mean + 1, deviations=count * 0.25)
    fingerprint = tuple(max(1.0, abs(mean)) * math.sin(mean + k) for k in range(16))
    return Reading(statistics=numbers, fingerprint=fingerprint, noise=noise, **more)


def small() -> Record:
    """Return a record of two layers, written by hand: the second gets what the first gives out."""
    first = Layer(
        name="fc1",
        type="torch.nn.modules.linear.Linear",
        attributes={"in_features": 4, "out_features": 4},
        parameters=(
            Parameter(
                name="weight", shape=(4, 4), dtype="float32", device="cpu", requires_grad=True,
                reading=reading(0.1, count=16, noise=None), gradient=reading(0.2, count=16),
            ),
        ),
        calls=(
            Call(
                root=ROOT, root_training=False, index=0, started=1, finished=2,
                inputs=(value("input", tensor=0, forward=reading(0.3)),),
                outputs=(value("output", requires_grad=True, tensor=1, forward=reading(0.4), backward=reading(0.01)),),
            ),
        ),
    )  # fmt: skip
    second = Layer(
        name="act",
        type="torch.nn.modules.activation.ReLU",
        attributes={"inplace": False},
        calls=(
            Call(
                root=ROOT, root_training=False, index=0, started=3, finished=4,
                inputs=(dataclasses.replace(first.calls[0].outputs[0], path="input", source="fc1 output"),),
                outputs=(value("output", requires_grad=True, tensor=2, forward=reading(0.6), backward=reading(0.02)),),
            ),
        ),
    )  # fmt: skip
    root = Layer(
        name=ROOT,
        type="models.Net",
        leaf=False,
        calls=(
            Call(
                root=ROOT, root_training=False, index=0, started=0, finished=5,
                inputs=first.calls[0].inputs,
                outputs=second.calls[0].outputs,
            ),
        ),
    )  # fmt: skip
    return Record(
        model="Net", layers={ROOT: root, "fc1": first, "act": second}, forwards=1, backwards=1, seed=0, loss="random",
        noise="measured", versions={"torch": "2.13.0"},
    )  # fmt: skip


def edited(record: Record, layer: str, **fields: Any) -> Record:
    layers = {**record.layers, layer: dataclasses.replace(record.layers[layer], **fields)}
    return dataclasses.replace(record, layers=layers)


def mapped(part: Any, kind: Any, change: Callable[[Any], Any]) -> Any:
    """Return a record, or a part of one, in which each part of a kind is changed."""
    if isinstance(part, kind):
        return change(part)
    if isinstance(part, tuple):
        return tuple(mapped(one, kind, change) for one in part)
    if isinstance(part, Mapping):
        return {name: mapped(one, kind, change) for name, one in part.items()}
    if isinstance(part, Record | Layer | Call | Value | Parameter | IsolatedResponse | EmittedTensor):
        fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part) if field.init}
        return dataclasses.replace(part, **mapped(fields, kind, change))
    return part


def edited_call(record: Record, layer: str, **fields: Any) -> Record:
    first, *rest = record.layers[layer].calls
    return edited(record, layer, calls=(dataclasses.replace(first, **fields), *rest))


@functools.cache
def model_texts(name: str) -> Texts:
    return encode(model_record(name))


def decoded(texts: Texts) -> StoredSnapshot:
    return decode(*texts, where="tests/__modelprobe__/test_net/test_net.arch.json")


def there_and_back(record: Record) -> Record:
    return decoded(encode(record)).record


def line(text: str, layer: str) -> str:
    (found,) = (row for row in text.splitlines() if row.startswith(f"{json.dumps(layer)}: "))
    return found.removesuffix(",")


def differing(a: str, b: str) -> list[str]:
    """Return the lines of ``b`` that are not in ``a``, without the digest that binds the two files."""
    old = set(a.splitlines())
    return [row for row in b.splitlines() if row not in old and not row.startswith('"architecture"')]


# --- there and back: whole records --------------------------------------------------------------------------------


def test_a_record_that_is_read_is_written_as_it_was_and_compares_as_the_original_does(record: Record) -> None:
    texts = encode(record)
    back = decoded(texts).record
    assert encode(back) == texts
    for actual, expected in ((record, back), (back, record), (back, back)):
        assert compare(actual, expected).same
        assert not list(run_differences(compare(back, back)))


def exact(record: Record) -> dict[str, Any]:
    """Return what of a record has to come back exactly: everything but numbers, devices and modules of classes."""

    def text(v: Value) -> tuple[Any, ...]:
        return v.path, v.shape, v.dtype, v.requires_grad, v.overwritten, v.source, v.backward is None

    def own(p: Parameter) -> tuple[Any, ...]:
        return p.name, p.shape, p.dtype, p.requires_grad, p.tied_to, p.persistent, p.gradient is None, p.after is None

    def answer(r: IsolatedResponse | None) -> Any:
        return r and (dict(r.recipes), [(h.where, h.passed) for h in r.handed], r.without_gradient, r.reason)

    def call(c: Call) -> tuple[Any, ...]:
        return (
            c.root, c.root_training, c.index, c.forwards, c.training, [text(v) for v in c.inputs], c.inputs_known,
            [text(v) for v in c.outputs], dict(c.arguments), c.grad_enabled, c.autocast, c.random, c.recomputed,
            answer(c.response),
        )  # fmt: skip

    layers = {
        name: (
            la.type_name, la.leaf, la.functional, la.training, repr(dict(sorted(la.attributes.items()))), la.aliases,
            [own(p) for p in la.parameters], [own(p) for p in la.buffers],
            sorted(map(call, la.calls), key=lambda c: c[:3]),
        )
        for name, la in record.layers.items()
    }  # fmt: skip
    return {
        "layers": layers, "model": record.model, "seed": record.seed, "loss": record.loss, "notes": record.notes,
        "forwards": record.forwards, "backwards": record.backwards, "noise": record.noise,
        "versions": dict(record.versions) if numbered(record) else {},
    }  # fmt: skip


def numbered(record: Record) -> bool:
    return encode(record).numbers is not None


def test_what_is_no_number_comes_back_exactly(record: Record) -> None:
    assert exact(there_and_back(record)) == exact(record)


@pytest.mark.parametrize("name", ["cnn", "shared", "gpt2"])
def test_which_values_are_one_tensor_comes_back(name: str) -> None:
    def groups(record: Record) -> set[frozenset[tuple[str, int, str, int]]]:
        found: dict[int, set[tuple[str, int, str, int]]] = {}
        for la in record.layers.values():
            for c in la.calls:
                for side, values in (("in", c.inputs), ("out", c.outputs)):
                    for k, v in enumerate(values):
                        found.setdefault(v.tensor, set()).add((la.name, c.index, side, k))
        return {frozenset(group) for group in found.values()}

    record = model_record(name)
    back, original = groups(there_and_back(record)), groups(record)
    # A tensor that has other numbers in another place (a ReLU wrote into it) is taken for two.
    assert all(any(group <= other for other in original) for group in back)
    if name != "cnn":
        assert back == original


def readings_of(record: Record) -> dict[tuple[Any, ...], Reading]:
    found: dict[tuple[Any, ...], Reading] = {}
    for la in record.layers.values():
        for p in (*la.parameters, *la.buffers):
            found |= {(la.name, p.name, "value"): p.reading, (la.name, p.name, "grad"): p.gradient}  # type: ignore[dict-item]
        for c in la.calls:
            for side, values in (("in", c.inputs), ("out", c.outputs)):
                for v in values:
                    at = la.name, c.root_training, c.index, side, v.path
                    found |= {(*at, "value"): v.forward, (*at, "grad"): v.backward}  # type: ignore[dict-item]
    return {k: v for k, v in found.items() if v is not None}


def test_numbers_come_back_as_printed(record: Record) -> None:
    if not numbered(record):
        return
    originals, back = readings_of(record), readings_of(there_and_back(record))
    assert originals.keys() == back.keys()
    for at, original in originals.items():
        a, b = original.statistics, back[at].statistics
        assert (a is None) == (b is None)
        if a is None or b is None:
            continue
        assert (a.count, a.nan, a.posinf, a.neginf, a.zeros) == (b.count, b.nan, b.posinf, b.neginf, b.zeros), at
        assert b.norm == pytest.approx(a.norm, rel=1e-5)
        if at[-1] == "value":
            scale = 2e-6 * (a.rms or 0.0)
            for x, y in ((a.min, b.min), (a.max, b.max), (a.mean, b.mean), (a.std, b.std)):
                assert y == (None if x is None else pytest.approx(x, rel=1e-5, abs=scale))
        assert back[at].digest == original.digest
        assert back[at].tensors == original.tensors


def test_each_call_has_the_digest_of_its_samples() -> None:
    record = edited_call(edited_call(small(), "fc1", samples="0a"), "act", samples="0b")
    texts = encode(record)
    back = decode(*texts, where="x.arch.json").record
    assert [back[name].calls[0].samples for name in ("fc1", "act")] == ["0a", "0b"]
    assert json.loads(texts.numbers or "")["samples"] == next(call.samples or "" for _, call in record.calls)


@pytest.mark.parametrize("text", ["\ud800\n", "a -> b"])
def test_any_text_survives_wherever_a_model_may_put_it(text: str) -> None:
    record = small()
    record = edited(record, "act", attributes={text: text}, aliases=(text,), type=text)
    record = edited_call(record, "act", arguments={text: text}, random=text)
    inputs = (value(text, source="fc1 output"), value("x", source=f"{text} output"))
    record = edited_call(record, "act", inputs=inputs)
    record = edited(
        record,
        "fc1",
        parameters=(Parameter(name=text, shape=(1,), dtype="float32", device="cpu", tied_to=text),),
    )
    response = IsolatedResponse(
        recipes={text: text, "input": f"2x4 {text}"},
        handed=(EmittedTensor(where=text, passed=text), EmittedTensor(where=text)),
        without_gradient=(text,),
        reason=text,
    )
    record = edited_call(record, "fc1", response=response)
    layers = {f"{text}.{name}" if name != ROOT else name: layer for name, layer in record.layers.items()}
    layers = {name: dataclasses.replace(layer, name=name) for name, layer in layers.items()}
    record = dataclasses.replace(record, layers=layers, model=text, notes=(text,), loss=text)
    texts = encode(record, reason=text)
    assert "\n".join(texts).isascii()
    back = decoded(texts)
    assert back.reason == text
    expected = exact(record)
    expected["layers"][f"{text}.act"] = (text.rpartition(".")[2], *expected["layers"][f"{text}.act"][1:])
    assert exact(back.record) == expected


def test_what_layers_seldom_are_comes_back() -> None:
    record = small()
    record = edited(record, "act", functional=True, leaf=False, training=True, aliases=("a", "b"))
    call = dataclasses.replace(
        record["act"].calls[0], index=3, recomputed=2, autocast="bfloat16", inputs_known=False, finished=-1, outputs=()
    )
    record = edited(record, "act", calls=(call,))
    back = there_and_back(record)
    assert exact(back) == exact(record)
    assert back["act"].calls[0].finished == -1


def test_what_is_told_of_a_run_comes_back() -> None:
    record = dataclasses.replace(
        small(),
        notes=("unwrapped",),
        origin=Operation(name="torch.log", location="model.py:42", detail="input min -0.3"),
        gradient_origin=Operation(name="torch.sqrt"),
        device="mps",
    )
    back = there_and_back(record)
    assert (back.notes, back.origin, back.gradient_origin, back.device) == (
        record.notes, record.origin, record.gradient_origin, "mps",
    )  # fmt: skip


def test_a_tied_parameter_has_the_numbers_of_the_one_that_it_is() -> None:
    texts = encode(model_record("tied"))
    assert "head" not in json.loads(texts.numbers or "")["layers"] or ".weight" not in line(texts.numbers or "", "head")
    back = decoded(texts).record
    assert back["head"].parameters[0].reading == back["emb"].parameters[0].reading
    assert back["head"].parameters[0].reading.statistics is not None


def test_sizes_that_vary_come_back() -> None:
    varying = value("input", shape=((2, 4), 3), tensor=0, forward=reading(count=9, tensors=2))  # type: ignore[arg-type]
    record = edited_call(small(), "act", inputs=(varying,))
    assert "(2..4, 3)" in encode(record).architecture
    found = there_and_back(record)["act"].calls[0].inputs[0]
    assert (found.shape, found.statistics and found.statistics.count) == (((2, 4), 3), 9)


# --- what the files look like -------------------------------------------------------------------------------------


def test_the_architecture_file_reads_well() -> None:
    assert encode(small()).architecture == (
        "{\n"
        '"modelprobe": 6,\n'
        '"model": "Net",\n'
        '"mode": "eval",\n'
        '"seed": 0,\n'
        '"loss": "random",\n'
        '"forwards": 1,\n'
        '"backwards": 1,\n'
        '"requires_grad": true,\n'
        '"layers": {\n'
        '"(root)": {"type": "Net", "calls": ["(2, 4) no grad -> (2, 4)"]},\n'
        '"fc1": {"type": "Linear", "attributes": {"in_features": 4, "out_features": 4}, '
        '"parameters": {"weight": "(4, 4)"}, "calls": ["(2, 4) no grad -> (2, 4)"]},\n'
        '"act": {"type": "ReLU", "attributes": {"inplace": false}, "calls": ["(2, 4) from fc1 -> (2, 4)"]}\n'
        "}\n"
        "}\n"
    )


ANY_TEXT = type("AnyText", (), {"__eq__": lambda self, other: type(other) is str, "__hash__": None})()


def test_one_tensor_is_written_once() -> None:
    data = json.loads(encode(small()).numbers or "")["layers"]
    assert data["(root)"] == {"<input": data["(root)"]["<input"], ">output": "act"}
    assert data["fc1"]["<input"] == "(root) input"
    assert data["act"]["<input"] == "fc1"
    assert data["fc1"][">output"] == [[[0.4, 0.5, -0.6, 1.4], ANY_TEXT, 2e-07], [0.5001, ANY_TEXT, 2e-07]]


def test_the_order_is_written_only_where_lines_do_not_tell_it() -> None:
    assert '"order"' not in encode(model_record("gpt2")).architecture
    assert '"order": [[1, 2, -2, 2, -2, 3, -3, -1]]' in encode(model_record("shared")).architecture


def test_the_architecture_is_the_same_on_all_devices() -> None:
    record = small()
    other = mapped(record, Value | Parameter, lambda v: dataclasses.replace(v, device="cuda:0"))
    other = mapped(other, Call, lambda c: dataclasses.replace(c, random="ab"))
    other = dataclasses.replace(other, device="cuda:0", versions={"torch": "3"}, noise=None)
    texts = encode(other)
    assert texts.architecture == encode(record).architecture
    assert decoded(texts).record["fc1"].output.device == "cuda:0"


def test_a_change_of_structure_in_one_layer_is_one_line() -> None:
    record = model_record("gpt2")
    name = "transformer.h.0.mlp.act"
    old, new = encode(record).architecture, encode(edited(record, name, type="GELU")).architecture
    assert [row.partition(":")[0] for row in differing(old, new)] == [f'"{name}"']


def test_a_private_attribute_of_nearly_all_layers_stands_in_the_header() -> None:
    record = model_record("gpt2")
    odd = edited(record, "lm_head", attributes={"in_features": 64})
    data = json.loads(encode(odd).architecture)
    assert data["attributes"] == {"_is_hf_initialized": True}
    assert "_is_hf_initialized" not in data["layers"]["transformer"]["attributes"]
    assert data["layers"]["lm_head"]["attributes"] == {"in_features": 64, "_is_hf_initialized": {}}
    assert there_and_back(odd)["lm_head"].attributes == {"in_features": 64}


def test_a_record_of_structure_alone_has_no_numbers_file() -> None:
    texts = encode(model_record("structure"))
    assert texts.numbers is None
    assert '"numbers": false' in texts.architecture


def test_what_was_declared_comes_back() -> None:
    old = encode(small()).architecture
    texts = encode(small(), reason="wider", supersedes=architecture_digest(old))
    assert decoded(texts) == StoredSnapshot(
        decoded(texts).record, architecture_digest(texts.architecture), "wider", architecture_digest(old)
    )


def test_an_architecture_alone_tells_its_structure() -> None:
    texts = encode(model_record("gpt2"))
    record = decode_architecture(texts.architecture, where="x").record
    assert compare(record, model_record("gpt2"), parts="architecture").same
    assert record["lm_head"].output.forward.statistics is None


# --- single readings ----------------------------------------------------------------------------------------------


def back(given: Reading, *, gradient: bool = False) -> Reading:
    data = packed_reading(given, (2, 4), "float32", gradient=gradient)
    return unpacked_reading(json.loads(json.dumps(data, allow_nan=False)), (2, 4))


def test_non_finite_elements_are_counted() -> None:
    numbers = Statistics(count=8, nan=1, posinf=2, neginf=1, mean=0.5, min=0.0, max=1.0, zeros=1, first_nan=0)
    assert back(Reading(statistics=numbers)).statistics == numbers


@pytest.mark.parametrize("big", [-math.inf, math.nan])
def test_numbers_that_are_not_finite_come_back(big: float) -> None:
    numbers = Statistics(count=8, mean=0.5, min=0.5, max=big)
    assert repr(back(Reading(statistics=numbers, noise=abs(big)))) == repr(Reading(statistics=numbers, noise=abs(big)))
    found = back(Reading(fingerprint=(big, *[0.5] * 15))).fingerprint
    assert repr(found) == repr((big, *[0.5] * 15))


def test_integers_are_exact() -> None:
    numbers = Statistics(count=8, mean=1e9, min=-(2**62), max=123456789012345)
    found = back(Reading(statistics=numbers, digest="0123456789abcdef"))
    assert (found.statistics.min, found.statistics.max) == (numbers.min, numbers.max)  # type: ignore[union-attr]
    assert found.digest == "0123456789abcdef"


def test_dead_units_are_counted_and_their_ranges_left_out() -> None:
    units = Units(axis=-3, low=(0.0, -1.0, 0.0), high=(0.0, 2.0, 0.0))
    numbers = Statistics(count=8, mean=0.1, min=-1.0, max=2.0, zeros=4)
    found = back(Reading(statistics=numbers, units=units)).units
    assert found is not None
    assert (found.dead, len(found), found.axis) == (2, 3, -3)
    alive = Units(axis=-2, low=(-1.0,), high=(1.0,))
    assert back(Reading(statistics=numbers, units=alive)).units is None


@pytest.mark.parametrize(
    "given",
    [
        Reading(),
        Reading(reason="sparse tensor"),
        Reading(fingerprint=(0.0,) * 16),
        Reading(noise=0.5, digest="ab", fingerprint=(0.5, 0.25) * 8),
        Reading(tensors=3, statistics=Statistics(count=24, zeros=24, mean=0.0, min=0.0, max=0.0)),
        Reading(tensors=2, statistics=Statistics(count=7, mean=1.0, min=1.0, max=1.0)),
        Reading(statistics=Statistics(count=8, nan=8)),
    ],
    ids=str,
)
def test_what_a_reading_lacks_it_lacks_afterwards(given: Reading) -> None:
    assert back(given) == given


@given(st.lists(st.floats(-1e300, 1e300), min_size=16, max_size=16), st.integers(14, 32))
@example([5e-324] * 16, 14)
@example([-1 + 2**-40] * 16, 14)
@settings(deadline=None)
def test_a_fingerprint_of_any_size_is_kept_to_its_bits(numbers: list[float], bits: int) -> None:
    text = packed(tuple(numbers), bits)
    top = max(map(abs, numbers))
    step = max(top * 2.0 ** (2 - bits), 5e-324)
    assert all(abs(a - b) <= step for a, b in zip(unpacked(text), numbers, strict=True))
    assert packed(unpacked(text), bits) == text


@pytest.mark.parametrize(("at", "damage"), [(0, "wA"), (20, "{")], ids=["exponent", "sign"])
def test_a_damaged_fingerprint_is_refused(at: int, damage: str) -> None:
    text = packed((0.5, -1.25) * 8, 16)
    with pytest.raises(ValueError, match=r"fingerprint|base64|padding|ASCII"):
        unpacked(text[:at] + damage + text[at + len(damage) :])


@pytest.mark.parametrize(
    ("direction", "dtype", "noise"),
    [("forward", "float32", None), ("backward", "float32", 2.5e-5), ("state", "bfloat16", None)],
)
def test_what_rounding_moves_a_fingerprint_is_a_third_of_what_passes(
    direction: Any, dtype: str, noise: float | None
) -> None:
    draw = random.Random(0)
    shares = []
    for _ in range(100):
        numbers = tuple(draw.gauss(0, 1) for _ in range(16))
        norm = math.hypot(*numbers)
        moments = Statistics(count=16, mean=0.0, min=-norm, max=norm, deviations=norm**2)
        given_reading = Reading(statistics=moments, fingerprint=numbers, noise=noise)
        kept = unpacked_reading(packed_reading(given_reading, (16,), dtype, gradient=direction == "backward"), (16,))
        found = tolerances.change(given_reading, kept, direction=direction, dtype=dtype, precision="measured")
        assert found.change is not None
        shares.append(found.change / found.limit)
    assert sorted(shares)[90] < 1 / 3


# --- size and speed -----------------------------------------------------------------------------------------------


def gpt2_record() -> Record:
    if "gpt2 12" not in _BUILT:
        _BUILT["gpt2 12"] = gpt2(12, noise=False)  # it takes long; without it fingerprints are longer still
    return _BUILT["gpt2 12"]


def test_twelve_blocks_of_a_transformer_are_about_100_kilobytes() -> None:
    texts = encode(gpt2_record())
    assert all(c.response for la in gpt2_record().layers.values() for c in la.calls)
    assert gpt2_record().backwards == 1
    assert len(texts.architecture) + len(texts.numbers or "") < 110_000
    first, second = (line(texts.architecture, f"transformer.h.{i}.mlp.c_fc").partition(": ")[2] for i in (2, 3))
    assert first == second
    data = json.loads(texts.numbers or "")  # layers that respond alike share their response
    assert len({data["layers"][f"transformer.h.{i}.mlp.act"]["alone"] for i in range(12)}) == 1


def test_the_work_for_a_file_grows_with_its_layers_only() -> None:
    def layers(n: int) -> Record:
        one = small()["fc1"]
        return dataclasses.replace(
            small(), layers={f"b.{i}.fc": dataclasses.replace(one, name=f"b.{i}.fc") for i in range(n)}
        )

    def calls(n: int) -> int:
        count = 0

        def profile(*_: object) -> None:
            nonlocal count
            count += 1

        record = layers(n)
        sys.setprofile(profile)
        try:
            there_and_back(record)
        finally:
            sys.setprofile(None)
        return count

    assert calls(200) < 2.5 * calls(100)


# --- updates ------------------------------------------------------------------------------------------------------


def drifted(record: Record, factor: float = 1 + 1e-7) -> Record:
    """Return the record of another run of the same model: all numbers a little different."""

    def moved(r: Reading) -> Reading:
        if r.statistics is None or r.statistics.mean is None:
            return r
        s, more = r.statistics, 1 + 1e-4
        ends = {end: v if type(v := getattr(s, end)) is not float else v * more for end in ("min", "max")}
        numbers = dataclasses.replace(s, mean=s.mean * more, deviations=s.deviations * more**2, **ends)  # type: ignore[operator]
        return dataclasses.replace(
            r, statistics=numbers, fingerprint=r.fingerprint and tuple(x * factor * (1 + 1e-6) for x in r.fingerprint)
        )

    return dataclasses.replace(mapped(record, Reading, moved), versions={"torch": "9"})


def test_an_update_without_a_change_leaves_every_byte() -> None:
    old = encode(model_record("gpt2"))
    new = encode(drifted(model_record("gpt2")))
    assert new != old
    assert rewritten(new, old, set()) == old


def test_an_update_takes_only_the_lines_of_layers_that_changed() -> None:
    old, new = (encode(r) for r in (model_record("gpt2"), drifted(model_record("gpt2"))))
    name = "transformer.h.1.attn.c_attn"
    mixed = rewritten(new, old, {name})
    assert mixed.architecture == old.architecture
    assert line(mixed.numbers or "", name) == line(new.numbers or "", name)
    rows = [row for row in differing(old.numbers or "", mixed.numbers or "") if '"recipes"' not in row]
    assert [row.partition(":")[0] for row in rows] == ['"versions"', f'"{name}"']
    decoded(mixed)


def test_an_update_that_adds_a_layer_leaves_the_others() -> None:
    record = small()
    added = dataclasses.replace(
        drifted(record), layers={**drifted(record).layers, "new": Layer(name="new", type="Linear")}
    )
    old, new = encode(record), encode(added)
    mixed = rewritten(new, old, set())
    assert [row.partition(":")[0] for row in differing(old.architecture, mixed.architecture)] == ['"act"', '"new"']
    assert line(mixed.numbers or "", "fc1") == line(old.numbers or "", "fc1")
    assert list(decoded(mixed).record.layers) == [ROOT, "fc1", "act", "new"]


def test_an_update_keeps_what_was_declared_as_long_as_the_architecture_is_the_same() -> None:
    old = encode(small(), reason="wider")
    assert decoded(rewritten(encode(drifted(small())), old, {"fc1"})).reason == "wider"
    other = encode(edited(small(), "act", attributes={"inplace": True}), reason="faster")
    assert decoded(rewritten(other, old, set())).reason == "faster"
    undeclared = encode(edited(small(), "act", attributes={"inplace": True}))
    assert decoded(rewritten(undeclared, old, set())).reason is None


@pytest.mark.parametrize("spoiled", ["", "{}", "[1]", "<<<<<<< HEAD\n", "{\n\n}\n"])
def test_an_update_replaces_what_cannot_be_read(spoiled: str) -> None:
    new = encode(small())
    assert rewritten(new, Texts(spoiled, new.numbers), set()) == new
    assert rewritten(new, Texts(new.architecture, spoiled), set()) == new


@given(
    st.sets(st.sampled_from([ROOT, "early", "late", "unused"])), st.sets(st.sampled_from(["early", "late", "unused"]))
)
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_mixture_of_lines_can_be_read(changed: set[str], edited_layers: set[str]) -> None:
    record = model_record("shared")
    other = drifted(record)
    for name in edited_layers:
        other = edited(other, name, attributes={"new": 1})
    mixed = rewritten(encode(other), encode(record), changed)
    assert exact(decoded(mixed).record)["layers"] == exact(other)["layers"]


# --- damage -------------------------------------------------------------------------------------------------------


def changed(texts: Texts, which: int, old: str, new: str) -> Texts:
    text = texts[which] or ""
    assert old in text
    return Texts(*(text.replace(old, new, 1) if i == which else t for i, t in enumerate(texts)))  # type: ignore[arg-type]


ARCH, PROBE = 0, 1


@pytest.mark.parametrize(
    ("which", "old", "new", "message"),
    [
        (ARCH, '"modelprobe": 6', '"modelprobe": 7', r"is of schema 7, and this .* reads 6: upgrade pytest-modelprobe"),
        (PROBE, '"modelprobe": 6', '"modelprobe": 5', r"schema 5, .* reads 6: record it anew with `pytest"),
        (ARCH, '"modelprobe": 6', '"else": 1', "is no file of pytest-modelprobe"),
        (ARCH, '"seed": 0', '"seed": "x"', r"'x' stands where int"),
        (ARCH, '"seed": 0', '"seed": 0, "seed": 1', "'seed' stands twice"),
        (ARCH, '"seed": 0', f'"seed": {"9" * 4000}', "a number of 4,000 digits stands in it"),
        (ARCH, '"type": "ReLU"', '"type": "ReLU", "x": 1', "Layer has no field 'x'"),
        (ARCH, '"(2, 4) from fc1 -> (2, 4)"', '"(2, y) -> (2, 4)"', r"'\(2, y\)' describes no tensor"),
        (ARCH, '"(4, 4)"', f'"(4, {"9" * 39})"', "describes no tensor"),
        (ARCH, '"layers": {', '"order": [[1, 2, 2]],\n"layers": {', "speaks of a call of layer 2 that is not there"),
        (ARCH, '"act": {', f'"a{".a" * 100_000}": {{', "'a.a.a.a.a.a.a.a.a.a.' has more than 256 parts"),
        (PROBE, '">output":"act"', '">output":"fc3"', "fc3 output"),
        (PROBE, '">output":"act"', '">output":[[null,"zz"]]', "'zz' is no fingerprint"),
        (PROBE, '">output":"act"', '">output":[[[1,1,1,1],null,0,8,{"dead":[1,99999999999,0]}]]', "are no dead units"),
        (PROBE, '">output":"act"', '">output":[[[1,1,1,1],null,0,0,{"count":-8}]]', "counts nothing"),
        (PROBE, '"architecture": "', '"architecture": "x', "do not belong together"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence_with_the_file(which: int, old: str, new: str, message: str) -> None:
    with pytest.raises(SnapshotError, match=message) as caught:
        decoded(changed(encode(small()), which, old, new))
    text = str(caught.value)
    assert "\n" not in text
    assert text.isprintable()
    assert "tests/__modelprobe__/test_net/test_net." + ("arch.json" if which == ARCH else "probe.json") in text
    assert len(text) < 500


def test_a_conflict_names_the_way_out() -> None:
    texts = encode(small())
    ours = line(texts.architecture, "act")
    conflict = f"<<<<<<< HEAD\n{ours}\n=======\n{ours}\n>>>>>>> feature/x\n"
    with pytest.raises(SnapshotError) as caught:
        decoded(changed(texts, ARCH, f"{ours}\n", conflict))
    assert str(caught.value) == (
        "tests/__modelprobe__/test_net/test_net.arch.json holds the conflict markers of a merge: check out one side "
        "(`git checkout --ours` or `--theirs`) of both its files and run `pytest --snapshot-update`"
    )


@pytest.mark.parametrize("which", [ARCH, PROBE])
def test_any_truncation_is_told(which: int) -> None:
    texts = encode(small())
    text = texts[which] or ""
    for end in range(0, len(text) - 2, 29):
        cut = Texts(*(text[:end] if i == which else t for i, t in enumerate(texts)))  # type: ignore[arg-type]
        with pytest.raises(SnapshotError, match=r"cannot be read, .*: restore it from version control, or delete it"):
            decoded(cut)


def test_a_small_file_does_not_take_all_memory() -> None:
    dead = ",".join(f'"{n}>output":[[[0,0,0,0],null,null,8,{{"dead":[{n},1000000,0]}}]]' for n in range(2, 60))
    call = '"(2, 4) -> (2, 4)"'
    texts = changed(
        encode(small()), ARCH, '"calls": ["(2, 4) from fc1', f'"calls": [{f"{call}, " * 58}"(2, 4) from fc1'
    )
    data = json.loads(texts.numbers or "")
    data["layers"]["act"] = json.loads(f"{{{dead}}}")
    data["architecture"] = architecture_digest(texts.architecture)
    with pytest.raises(SnapshotError, match="more units than a model has"):
        decoded(Texts(texts.architecture, json.dumps(data)))


def test_numbers_that_are_missing_are_told() -> None:
    texts = encode(small())
    with pytest.raises(SnapshotError, match=r"test_net.probe.json is missing, the numbers that belong to .*: add it"):
        decoded(Texts(texts.architecture, None))


def test_numbers_that_were_emptied_are_told() -> None:
    texts = encode(small())
    numbers = {**json.loads(texts.numbers or ""), "layers": {}, "responses": {}}
    with pytest.raises(SnapshotError, match=r"probe.json cannot be read, it has no numbers: restore it"):
        decoded(Texts(texts.architecture, json.dumps(numbers)))


def test_a_message_is_safe_for_a_terminal() -> None:
    texts = changed(encode(small()), ARCH, '"seed": 0', '"\\u001b[31m\\u202e": 0')
    with pytest.raises(SnapshotError) as caught:
        decoded(texts)
    assert str(caught.value).isprintable()
    assert "\\x1b[31m\\u202e" in str(caught.value)


EXAMPLES = int(os.environ.get("MODELPROBE_EXAMPLES", "60"))
"""Of damaged files."""


def parts_of(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at]
    if isinstance(data, dict):
        found += [p for k, v in data.items() for p in parts_of(v, (*at, k))]
    elif isinstance(data, list):
        found += [p for i, v in enumerate(data) for p in parts_of(v, (*at, i))]
    return found


@functools.cache
def any_part(name: str, which: int) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.sampled_from(parts_of(json.loads(model_texts(name)[which] or ""))[1:])


OF_ANY_TYPE = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=5),
    lambda s: st.lists(s, max_size=3) | st.dictionaries(st.text(max_size=3), s),
)


@given(st.data())
@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
def test_a_part_of_any_other_type_gives_a_snapshot_or_a_sentence(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["shared", "tied", "broken", "watched"]))
    texts = [text and json.loads(text) for text in model_texts(name)]
    which = data.draw(st.sampled_from([i for i, text in enumerate(texts) if text is not None]))
    at = data.draw(any_part(name, which))
    replacement = data.draw(OF_ANY_TYPE)
    holder = texts[which]
    for key in at[:-1]:
        holder = holder[key]
    holder[at[-1]] = replacement
    if which == ARCH and texts[PROBE] is not None:  # as if it belonged together
        try:
            texts[PROBE]["architecture"] = architecture_digest(json.dumps(texts[ARCH]))
        except SnapshotError:
            return
    with contextlib.suppress(SnapshotError):
        decode(*(text and json.dumps(text) for text in texts), where="x.arch.json")  # type: ignore[arg-type]


# --- what a file may not hide -------------------------------------------------------------------------------------
# Found by `tox -e fuzz`: each was shown, and counted as the same text in another form.

Edit = Any  # a new value, or a function of the old one
GONE = object()


def edited_file(texts: Texts, which: int, at: tuple[Any, ...], new: Edit) -> Texts:
    """Return the texts with one place changed, digest included."""
    data = [json.loads(text or "null") for text in texts]
    holder = data[which]
    for step in at[:-1]:
        holder = holder[step]
    if new is GONE:
        del holder[at[-1]]
    else:
        holder[at[-1]] = new(holder[at[-1]]) if callable(new) else new
    architecture = json.dumps(data[0])
    if data[1] is None:
        return Texts(architecture, None)
    data[1]["architecture"] = architecture_digest(architecture)
    return Texts(architecture, json.dumps(data[1]))


def classes(old: Texts, new: Texts) -> dict[str, Any]:
    """Return what the gate makes of a change: class → finding."""
    before, now = (
        gate.SnapshotVersion(
            path="net.arch.json",
            numbers="net.probe.json",
            record=decoded(texts).record,
            architecture=architecture_digest(texts.architecture),
            content=str(hash(texts)),
            read_text=lambda text=texts.architecture: text,
        )
        for texts in (old, new)
    )
    verdict = gate.judge({"net": before}, {"net": now})
    return {finding.kind: finding for change in verdict.changes for finding in change.findings}


def first_response(texts: Texts) -> str:
    return next(iter(json.loads(texts.numbers or "")["responses"]))


SWAPPED = {  # what was `format` → where, and what of it
    "the mean of an output": ("tied", PROBE, ("layers", "emb", ">output", 0, 0, 0), lambda x: -x),
    "that a weight has numbers": ("shared", PROBE, ("layers", "late", ".weight"), GONE),
    "the size of a gradient": ("shared", PROBE, ("layers", "late", ".bias", 1, 0), lambda x: 1.5 * x),
    "whether gradients are wanted": ("broken", ARCH, ("requires_grad",), lambda x: not x),
    "notes": ("shared", PROBE, ("notes",), ["nothing to see"]),
    "that units are dead": ("cnn", PROBE, ("layers", "2", ">output", 0, -1), GONE),
    "where an output is from": ("shared", ARCH, ("layers", "early", "calls", 1), lambda x: f"{x} from early"),
}


@pytest.mark.parametrize("what", SWAPPED)
def test_what_is_edited_in_a_file_is_refused_or_a_difference(what: str) -> None:
    name, which, at, new = SWAPPED[what]
    try:
        found = classes(model_texts(name), edited_file(model_texts(name), which, at, new))
    except SnapshotError:
        return
    assert found
    assert "format" not in found


@pytest.mark.parametrize("how", ["all", "gradient", "question"])
def test_evidence_that_is_gone_from_a_file_is_said(how: str) -> None:
    texts = model_texts("cnn")
    key = first_response(texts)
    if how == "all":
        data = json.loads(texts.numbers or "")
        del data["responses"]
        data["layers"] = {
            name: {k: v for k, v in line.items() if k.lstrip("0123456789") != "alone"}
            for name, line in data["layers"].items()
        }
        fewer = Texts(texts.architecture, json.dumps(data))
    else:
        fewer = edited_file(texts, PROBE, ("responses", key, "gradient" if how == "gradient" else "recipes"), GONE)
    found = classes(texts, fewer)
    (kind,) = found
    assert kind == ("behavior" if how == "question" else "removed")
    what = "gradient of the layer alone" if how == "gradient" else "of the layer alone"
    assert {(d.kind, d.what) for d in found[kind].differences} == {("response", what)}


def test_what_could_not_be_compared_is_counted_in_a_diff_and_in_the_verdict() -> None:
    unread = dataclasses.replace(value("output"), forward=Reading(reason="meta tensor"))
    before = edited_call(small(), "act", outputs=(unread,))
    now = edited(before, "fc1", attributes={"in_features": 5})
    snapshots = [
        gate.SnapshotVersion(path="net", record=one, architecture=str(i), content=str(i))
        for i, one in enumerate((before, now))
    ]
    verdict = gate.judge({"net": snapshots[0]}, {"net": snapshots[1]})
    assert changes.verdict_line(verdict).endswith("; 1 model changed, 0 unchanged, 1 value could not be compared")
    assert ci.as_data(verdict)["changes"][0]["not_compared"] == 1
    assert "1 value could not be compared: no numbers of it repeat, or" in changes.diff_text(verdict)


# --- on disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "tests" / "__modelprobe__" / "test_net" / "test_net.arch.json"


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_is_written_is_read(place: Path) -> None:
    texts = encode(small())
    write(place, texts)
    assert read_texts(place) == texts
    assert read(place) == decoded(texts)
    assert names_in(place.parent) == ["test_net.arch.json", "test_net.probe.json"]


def test_numbers_of_another_device_lie_beside(place: Path) -> None:
    probe = place.with_name("test_net.cuda.probe.json")
    write(place, encode(small()), probe)
    assert read(place, probe).record["fc1"].calls
    with pytest.raises(SnapshotError, match=r"test_net.probe.json is missing"):
        read(place)


def test_a_snapshot_that_is_not_there_is_told(place: Path) -> None:
    assert read_texts(place) is None
    with pytest.raises(SnapshotError, match=r"there is no snapshot .*: record it"):
        read(place)


def test_a_snapshot_that_becomes_structure_alone_loses_its_numbers(place: Path) -> None:
    write(place, encode(small()))
    write(place, encode(model_record("structure")))
    assert names_in(place.parent) == ["test_net.arch.json"]
    assert read(place).record.model == "Shared"


def test_line_ends_of_windows_do_no_harm(place: Path) -> None:
    texts = encode(small())
    write(place, texts)
    for path in place.parent.iterdir():
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_texts(place) == texts


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b'{"a": "\xff"}', "can't decode byte 0xff in position 7"),
        (b"null", "is no file of pytest-modelprobe"),
    ],
)
def test_a_file_that_is_no_snapshot_is_told(place: Path, content: bytes, message: str) -> None:
    write(place, encode(small()))
    place.write_bytes(content)
    with pytest.raises(SnapshotError, match=message) as caught:
        read(place)
    assert str(place) in str(caught.value)
    assert place.read_bytes() == content


def test_a_huge_file_is_not_read(place: Path) -> None:
    write(place, encode(small()))
    with place.open("r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(SnapshotError, match="has 1,024 MB, more than a snapshot ever has"):
        read(place)


def test_a_directory_in_the_place_of_a_file_is_told(place: Path) -> None:
    place.mkdir(parents=True)
    with pytest.raises(SnapshotError, match="is a directory: move it out of the way"):
        read(place)
    with pytest.raises(SnapshotError, match="cannot be written"):
        write(place, encode(small()))
    assert place.is_dir()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_a_pipe_in_the_place_of_a_file_does_not_hang(place: Path) -> None:
    place.parent.mkdir(parents=True)
    os.mkfifo(place)
    with pytest.raises(SnapshotError, match="no regular file"):
        read(place)


def test_a_link_out_of_the_tests_is_refused(place: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    write(outside / "test_net.arch.json", encode(small()))
    before = (outside / "test_net.arch.json").read_bytes()
    place.parent.mkdir(parents=True)
    place.symlink_to(outside / "test_net.arch.json")
    with pytest.raises(SnapshotError, match=r"leads out of .*tests by a symbolic link"):
        read(place)
    with pytest.raises(SnapshotError, match=r"leads out of .*tests by a symbolic link"):
        write(place, encode(model_record("structure")))
    assert (outside / "test_net.arch.json").read_bytes() == before


def test_a_link_within_the_tests_is_followed(place: Path) -> None:
    real = place.parent.parent / "real" / "test_net.arch.json"
    write(real, encode(small()))
    place.parent.symlink_to(real.parent)
    write(place, encode(edited(small(), "act", attributes={"inplace": True})))
    assert read(real).record["act"].attributes == {"inplace": True}
    assert place.parent.is_symlink()


def refusing(monkeypatch: pytest.MonkeyPatch, module: str, name: str, error: OSError) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise error

    monkeypatch.setattr(f"{module}.{name}", refuse)


def test_a_directory_that_is_read_only_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(place, encode(small()))
    refusing(monkeypatch, "pathlib.Path", "replace", PermissionError(13, "Permission denied"))
    with pytest.raises(SnapshotError) as caught:
        write(place, encode(drifted(small())))
    probe = place.with_name("test_net.probe.json")
    assert str(caught.value) == (
        f"{probe} cannot be written (Permission denied): make {probe} writable, or leave out `--snapshot-update`"
    )
    assert names_in(place.parent) == ["test_net.arch.json", "test_net.probe.json"]
    assert read(place) == decoded(encode(small()))


def test_a_full_disk_is_told_and_nothing_lost(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = errno.ENOSPC
    write(place, encode(small()))
    with monkeypatch.context() as patch:
        refusing(patch, "os", "fsync", OSError(number, os.strerror(number)))
        with pytest.raises(SnapshotError) as caught:
            write(place, encode(edited(small(), "act", attributes={"inplace": True})))
    probe = place.with_name("test_net.probe.json")
    assert str(caught.value) == (
        f"{probe} cannot be written ({os.strerror(number)}): free space for {place.parent}, and run the update again"
    )
    assert names_in(place.parent) == ["test_net.arch.json", "test_net.probe.json"]
    assert read(place) == decoded(encode(small()))


def test_a_very_old_temporary_file_is_removed_whoever_wrote_it(place: Path) -> None:
    place.parent.mkdir(parents=True)
    old, new = (place.with_name(f".modelprobe-{os.getppid()}-0123abc{i}.tmp") for i in range(2))
    for path in (old, new):
        path.write_text("")
    os.utime(old, (time.time() - 7200,) * 2)
    write(place, encode(small()))
    assert (old.exists(), new.exists()) == (False, True)


WRITER = """
import sys
from pathlib import Path
from pytest_modelprobe.files import Texts, write
place, texts = Path(sys.argv[1]), [Texts(*Path(p).read_text().split("\\f")) for p in sys.argv[2:]]
print("ready", flush=True)
while True:
    for pair in texts:
        write(place, pair)
"""


def test_a_process_that_is_killed_leaves_the_old_or_the_new(place: Path, tmp_path: Path) -> None:
    kills = 200 if "MODELPROBE_LONG" in os.environ else 4
    records = [small(), edited(drifted(small()), "act", attributes={"inplace": True})]
    pairs = [encode(record) for record in records]
    for i, pair in enumerate(pairs):
        (tmp_path / str(i)).write_text("\f".join(pair))  # type: ignore[arg-type]
    draw = random.Random(0)
    for _ in range(kills):
        command = [sys.executable, "-c", WRITER, str(place), *(str(tmp_path / str(i)) for i in range(2))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(draw.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        texts = read_texts(place)
        if texts is None:
            continue
        assert texts.architecture in {pair.architecture for pair in pairs}
        assert texts.numbers in {pair.numbers for pair in pairs}
        if texts not in pairs:
            with pytest.raises(SnapshotError, match="do not belong together"):
                read(place)
    write(place, pairs[0])
    assert read(place) == decoded(pairs[0])


def test_reading_needs_neither_torch_nor_numpy_nor_pytest(place: Path) -> None:
    write(place, encode(small()))
    code = (
        "import sys; from pathlib import Path; from pytest_modelprobe.files import read; "
        f"read(Path({str(place)!r})); "
        "assert not {'torch', 'numpy', 'pytest', '_pytest'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- names of files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("test_net", "test_net"),
        ("test_net[a:b]", "test_net[a%3Ab]"),
        ("..", "%2E%2E"),
        ("a\x00\x1b\n", "a%00%1B%0A"),
        ("nul", "%6Eul"),
        ("\ud800", "%ED%A0%80"),
        ("", "%"),
    ],
)
def test_a_file_name_is_safe_and_says_what_it_is_of(name: str, expected: str) -> None:
    assert file_name(name) == expected


@given(
    st.lists(
        st.text(st.sampled_from("aA.%:/\\ [é\u0301") | st.characters(), max_size=160),
        min_size=2,
        max_size=8,
        unique=True,
    )
)
@settings(deadline=None)
def test_two_names_never_share_a_file(names: list[str]) -> None:
    assert len({file_name(name) for name in names}) == len(names)


@given(st.text(max_size=300))
@example("é" * 100)
@settings(deadline=None)
def test_any_name_gives_a_file_in_the_directory(name: str) -> None:
    safe = file_name(name)
    assert len(safe.encode()) <= 120
    assert re.search(r'[/\\:*?"<>|\x00-\x1f]', safe) is None
    assert not safe.startswith(".")
    assert ".." not in safe
    assert Path(safe).name == safe
