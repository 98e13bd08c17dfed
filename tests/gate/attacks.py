"""Pull requests that try to change a model unseen, and the verdict on each: behind ``docs/explanation/the-gate.md``."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from pytest_modelprobe.exceptions import ModelProbeError
from pytest_modelprobe.files import architecture_digest, encode
from pytest_modelprobe.files.layout import digest_of
from pytest_modelprobe.gate.snapshot_sources import SnapshotSource, _is_snapshot, _pairs
from pytest_modelprobe.gate.verdict import Verdict, judge
from pytest_modelprobe.record import (
    Call,
    EmittedTensor,
    IsolatedResponse,
    Layer,
    Parameter,
    Reading,
    Record,
    Statistics,
    Value,
)
from pytest_modelprobe.report.changes import status

Files = dict[str, str]
"""Path → text."""

NET = "tests/__modelprobe__/test_net/test_a"
ARCH, PROBE = f"{NET}.arch.json", f"{NET}.probe.json"


@dataclass(frozen=True)
class Attack:
    """What a pull request does to the snapshots of a model."""

    what: str
    edit: Callable[[Files], None]
    verdict: str
    """What the gate makes of the worst of it, and its class."""
    why: str
    before: Callable[[], Files] = lambda: files()


def reading(mean: float, noise: float | None = 1e-7) -> Reading:
    statistics = Statistics(count=8, min=mean - 1, max=mean + 1, mean=mean, deviations=8.0)
    return Reading(statistics=statistics, fingerprint=(mean, *[0.0] * 15), noise=noise)


def net(mean: float = 1.0, weight: float = 0.5, *, frozen: bool = False, width: int = 2) -> Record:
    """Return a record of a linear layer and two activations."""
    own = Parameter(
        name="weight",
        shape=(width, 4),
        dtype="float32",
        device="cpu",
        requires_grad=not frozen,
        reading=reading(weight),
    )

    def call(i: int, end: int, of: float) -> tuple[Call, ...]:
        value = Value(path="output", shape=(2, 4), dtype="float32", device="cpu", tensor=i, forward=reading(of))
        return (Call(root="(root)", root_training=False, index=0, started=i, finished=end, outputs=(value,)),)

    layers = [
        Layer(name="(root)", type="Net", leaf=False, calls=call(0, 7, mean)),
        Layer(name="fc", type="torch.nn.modules.linear.Linear", parameters=(own,), calls=call(1, 2, 2.0)),
        Layer(name="act", type="torch.nn.modules.activation.ReLU", attributes={"p": 1}, calls=call(3, 4, 3.0)),
        Layer(name="drop", type="torch.nn.modules.dropout.Dropout", attributes={"p": 0.1}, calls=call(5, 6, mean)),
    ]  # fmt: skip
    return Record(model="Net", layers={layer.name: layer for layer in layers}, forwards=1, seed=0, noise="measured")


def files(record: Record | None = None, path: str = NET, **declaration: str) -> Files:
    """Return the two files of a snapshot."""
    texts = encode(record or net(), **declaration)
    return {f"{path}.arch.json": texts.architecture, **({f"{path}.probe.json": texts.numbers} if texts.numbers else {})}


def check(before: Files, now: Files) -> Verdict:
    """Return what `modelprobe check` says of two versions of files."""
    was, there = source(before), source(now)
    changed = {*was.states, *there.states} - {
        name for name, state in was.states.items() if there.states.get(name) == state
    }
    return judge(was.read(changed & was.states.keys()), there.read(changed & there.states.keys()))


def source(files: Files) -> SnapshotSource:
    data = {path: text.encode() for path, text in files.items() if _is_snapshot(path)}
    return SnapshotSource(
        place="",
        pairs=_pairs(data),
        contents={path: hashlib.sha256(content).hexdigest() for path, content in data.items()},
        sizes=lambda paths: {path: len(data[path]) for path in paths},
        load=lambda paths: {path: data[path] for path in paths},
    )


def said(attack: Attack) -> str:
    """Return the verdict on the worst that an attack does, and of which class it is; or that it is no verdict."""
    before = attack.before()
    now = dict(before)
    attack.edit(now)
    try:
        verdict = check(before, now)
    except ModelProbeError:
        return "error"
    if not verdict.changes:
        return "unseen"
    change = verdict.changes[0]
    return f"{status(change.findings[0], change)}: {change.findings[0].kind}"


# --- what a pull request can do to files --------------------------------------------------------------------------


def put(record: Record, **declaration: str) -> Callable[[Files], None]:
    """Record another model."""
    return lambda now: now.update(files(record, **declaration))


def declared(reason: str, supersedes: str | None = None) -> Callable[[Files], None]:
    """Record a wider model with a reason, for what is in the base unless something else is said."""

    def edit(now: Files) -> None:
        old = json.loads(now[ARCH]).get("supersedes")
        chain = supersedes or " ".join(filter(None, [old, architecture_digest(now[ARCH])]))
        now.update(files(net(width=3), reason=reason, supersedes=chain))

    return edit


def in_architecture(*pairs: tuple[str, str]) -> Callable[[Files], None]:
    """Edit the structure by hand, and the digest of it that stands in the numbers."""

    def edit(now: Files) -> None:
        old = architecture_digest(now[ARCH])
        for before, after in pairs:
            assert before in now[ARCH], before
            now[ARCH] = now[ARCH].replace(before, after, 1)
        now[PROBE] = now[PROBE].replace(old, digest_of(json.loads(now[ARCH])))  # also of what cannot be read

    return edit


def in_numbers(before: str, after: str) -> Callable[[Files], None]:
    """Edit the numbers by hand."""

    def edit(now: Files) -> None:
        assert before in now[PROBE], before
        now[PROBE] = now[PROBE].replace(before, after)

    return edit


def moved(path: str, record: Record | None = None) -> Callable[[Files], None]:
    """Give a snapshot another name, and perhaps another model."""

    def edit(now: Files) -> None:
        for old in (ARCH, PROBE):
            now[old.replace(NET, path)] = now.pop(old)
        if record is not None:
            now.update(files(record, path))

    return edit


def hidden(now: Files) -> None:
    """Put the old architecture under the name of a device, beside another."""
    now[f"{NET}.cuda.arch.json"], now[f"{NET}.cuda.probe.json"] = now[ARCH], now[PROBE]
    now.update(files(net(width=3)))


def without_numbers(now: Files) -> None:
    """Keep the structure alone."""
    del now[PROBE]
    now[ARCH] = encode(dataclasses.replace(net(), layers={
        name: dataclasses.replace(layer, calls=(), parameters=tuple(
            dataclasses.replace(p, reading=Reading()) for p in layer.parameters))
        for name, layer in net().layers.items()
    }, noise=None, forwards=0)).architecture  # fmt: skip


def emptied(now: Files) -> None:
    """Leave the numbers of no layer."""
    header = json.loads(now[PROBE])
    now[PROBE] = json.dumps({**header, "layers": {}})


def unanswered(now: Files) -> None:
    """Leave nothing of what a layer does alone."""
    data = json.loads(now[PROBE])
    for line in data["layers"].values():
        line.pop("alone", None)
    now[PROBE] = json.dumps({**data, "responses": {}})


def answering() -> Files:
    """Return a base in which a layer was called alone."""
    layers = dict(net().layers)
    (call,) = layers["act"].calls
    response = IsolatedResponse(handed=(EmittedTensor(where="output", reading=reading(2.0)),))
    layers["act"] = dataclasses.replace(layers["act"], calls=(dataclasses.replace(call, response=response),))
    return files(dataclasses.replace(net(), layers=layers))


def swapped(now: Files) -> None:
    """Have two layers called the other way round."""
    lines = now[ARCH].split("\n")
    i, j = (next(n for n, line in enumerate(lines) if line.startswith(f'"{name}"')) for name in ("act", "fc"))
    lines[i], lines[j] = lines[j], lines[i]
    old = architecture_digest(now[ARCH])
    now[ARCH] = "\n".join(lines)
    now[PROBE] = now[PROBE].replace(old, architecture_digest(now[ARCH]))


def both(*edits: Callable[[Files], None]) -> Callable[[Files], None]:
    return lambda now: [edit(now) for edit in edits] and None


def with_reason() -> Files:
    """Return a base whose last change was declared."""
    return files(reason="wider", supersedes="0" * 24)


FAMILIES: dict[str, list[Attack]] = {
    "Names of files": [
        Attack("another model, and the old text under the name of a device beside it", hidden, "denied: checkpoint",
               "each file is compared with its own past, and with nothing twice"),
        Attack("a rename", moved("tests/__modelprobe__/test_net/test_b"), "warning: renamed",
               "it says what it said"),
        Attack("a rename by the case of a letter", moved("tests/__modelprobe__/test_net/Test_a"), "warning: renamed",
               "names are compared letter by letter, whatever a file system makes of them"),
        Attack("a rename that carries another model", moved("tests/__modelprobe__/test_net/test_b", net(width=3)),
               "denied: removed", "what says something else is no rename: one is gone, one is new"),
        Attack("both files deleted", lambda now: now.clear(), "denied: removed", "nothing watches the model any more"),
        Attack("both files moved to where no snapshot belongs", moved("tests/test_a"), "denied: removed",
               "files outside `__modelprobe__` are no snapshots"),
        Attack("a copy beside it", lambda now: now.update({k.replace("test_a", "test_b"): v for k, v in now.items()}),
               "warning: new", "it takes nothing away"),
    ],
    "Reasons": [
        Attack("another model without a reason", put(net(width=3)), "denied: checkpoint", "it needs one"),
        Attack("a reason of spaces", declared("  "), "denied: checkpoint", "a reason has a word"),
        Attack("a reason of letters without a look", declared("\u200b\u3164"), "denied: checkpoint",
               "a reason has a word that can be seen"),
        Attack("a digest without a reason", put(net(width=3), supersedes=architecture_digest(files()[ARCH])),
               "denied: checkpoint", "the digest is the tool's, the reason is the author's"),
        Attack("a reason for another architecture than that of the base", declared("wider", "0" * 24),
               "denied: checkpoint", "what it supersedes is not what is there"),
        Attack("the last reason again, its chain made longer", declared("wider"), "denied: checkpoint",
               "it was given for an earlier change", with_reason),
        Attack("the last reason again with other signs", declared("Wi\u200bder!"), "denied: checkpoint",
               "its words are the same", with_reason),
        Attack("a reason that means nothing", declared("asdf"), "declared: checkpoint",
               "whether it is a good one, who reviews it judges: it is shown to them"),
    ],
    "Structure": [
        Attack("two layers called the other way round", swapped, "denied: structure", "the order of calls is compared"),
        Attack("the class of the model", in_architecture(('"model": "Net"', '"model": "Other"')), "denied: structure",
               "it is compared"),
        Attack("a layer that is no leaf any more", in_architecture(('"Linear"', '"Linear", "leaf": false')),
               "denied: structure", "it is compared"),
        Attack("a functional call in the place of a layer", in_architecture(('"ReLU"', '"ReLU", "functional": true')),
               "denied: structure", "it is compared"),
        Attack("the class of the model, beside a frozen parameter",
               both(put(net(frozen=True)), in_architecture(('"model": "Net"', '"model": "Other"'))),
               "denied: structure", "a warning hides no denial"),
        Attack("another attribute", in_architecture(('"p": 0.1', '"p": 0.5')), "denied: structure", "it is compared"),
        Attack("a frozen parameter", put(net(frozen=True)), "warning: trainable", "checkpoints load as before"),
        Attack("an attribute that is not written any more", in_architecture((', "attributes": {"p": 0.1}', "")),
               "allowed: format", "attributes come and go with versions of libraries; it is named in the table"),
    ],
    "Numbers": [
        Attack("another output", put(net(mean=3.0)), "warning: behavior", "the test itself fails without it"),
        Attack("other weights", put(net(weight=0.7)), "warning: weights", "a model that was trained again"),
        Attack("noise of a billion", in_numbers(",1e-7]", ",1e9]"), "warning: behavior",
               "more than a hundredth is not repeatable, and excuses nothing"),
        Attack("noise that grew tenfold", in_numbers(",1e-7]", ",0.005]"), "warning: behavior",
               "it would pass what did not pass"),
        Attack("noise that was not measured", in_numbers('"noise": "measured",\n', ""), "warning: behavior",
               "what is not measured has the widest tolerance"),
        Attack("the numbers of no layer", emptied, "error", "a file with numbers has some"),
        Attack("the numbers deleted", lambda now: now.pop(PROBE) and None, "error",
               "the structure says that there are some"),
        Attack("the structure alone kept", without_numbers, "denied: removed", "its numbers are gone"),
        Attack("numbers that the test does not compare any more", put(net(), compared="architecture"),
               "denied: removed", "it stands beside the numbers, and a test that compares less fails until it does"),
        Attack("a structure that the test does not compare any more", put(net(), compared="behavior"),
               "denied: removed", "as above: a line in an ini file changes it for no snapshot unseen"),
        Attack("nothing of what a layer does alone", unanswered, "denied: removed",
               "a test does not compare what the file does not say", answering),
        Attack("the numbers of another structure", lambda now: now.update({ARCH: files(net(width=3))[ARCH]}), "error",
               "they name the structure that they belong to"),
    ],
    "Files that cannot be read": [
        Attack("a schema of the future", in_architecture(('"modelprobe": 2', '"modelprobe": 9')), "error",
               "a newer version wrote it"),
        Attack("a field that there is not", in_architecture(('"seed": 0', '"color": 0')), "error",
               "every field is known"),
        Attack("a million brackets", lambda now: now.update({ARCH: "[" * 1_000_000}), "error",
               "it is refused in one sentence"),
        Attack("65 MB", lambda now: now.update({ARCH: " " * (65 << 20)}), "error", "its size is asked for first"),
    ],
}  # fmt: skip
