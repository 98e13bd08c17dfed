"""Which edits of a model fail a snapshot, which make its file stale, and of which class the gate says they are.

One model, one edit a row: the table of the page `evidence/SNAPSHOT_EDITS.md`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import pytest_modelprobe.snapshot.comparer
import pytest_modelprobe.snapshot.snapshot  # noqa: F401 - pytester forgets what its runs import
from pytest_modelprobe.cli import main

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return {"mixed": self.a(x) + self.b(x)}

class Masking(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
    def forward(self, x):
        return F.dropout(x * self.scale, 0.2, self.training)

class Attention(nn.Module):
    eager = False
    def forward(self, q, k, v):
        if self.eager:
            return torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v
        return F.scaled_dot_product_attention(q, k, v)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(8))
        self.mix, self.masking, self.attend, self.act = Mix(), Masking(), Attention(), nn.ReLU()
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(8, 2)
    def forward(self, x):
        h = self.act(self.mix(x * self.table)["mixed"])
        h = self.masking(h + self.attend(h, h, h))
        return {"logits": self.head(self.drop(h))}
"""

EDITS = {
    "dropout added": [("h))}", "self.more(h)))}"), ("self.drop, self", "self.more, self.drop, self"),
                      ("= nn.Dropout", "= nn.Dropout(0.1), nn.Dropout")],
    "dropout of another class": [("nn.Dropout(0.1)", "nn.AlphaDropout(0.1)")],
    "dropout no longer called": [("self.head(self.drop(h))", "self.head(h)")],
    "dropout of nothing added": [("h))}", "self.more(h)))}"), ("self.drop, self", "self.more, self.drop, self"),
                                 ("= nn.Dropout", "= nn.Dropout(0.0), nn.Dropout")],
    "a module becomes a function": [("self.act(", "F.relu("), (", self.act =", " ="), (", nn.ReLU()", "")],
    "a class renamed": [("class Mix", "class Mixer"), ("= Mix()", "= Mixer()")],
    "a class renamed that depends on the mode": [("class Masking", "class Noise"), ("Masking()", "Noise()")],
    "a module without parameters renamed": [("self.act", "self.activation")],
    "a module that is never called added": [("self.register", "self.spare = nn.ReLU(); self.register")],
    "attention by other operations": [("eager = False", "eager = True")],
    "a key of the model's output renamed": [('{"logits":', '{"scores":')],
    "a key of an inner output renamed": [('{"mixed":', '{"sum":'), ('["mixed"]', '["sum"]')],
    "a buffer made non-persistent": [('"table", torch.ones(8)', '"table", torch.ones(8), persistent=False')],
    "two parameters in another order": [("self.a, self.b =", "self.b, self.a =")],
}  # fmt: skip

PAGE = Path(__file__).parents[2] / "evidence" / "SNAPSHOT_EDITS.md"
SAID = {"fails": "failed", "passes, stale": "stale", "passes": "passed"}
ROWS = [line.strip("| ").split(" | ") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")][1:]
# Edit → whether the test passes by default, whether it does with compare="architecture", the class of the gate.
TABLE = {edit: (SAID[default], SAID[strict], of_gate) for edit, _, default, strict, of_gate in ROWS}


def source(edit: str) -> str:
    text = MODEL
    for old, new in EDITS.get(edit, []):
        assert old in text
        text = text.replace(old, new)
    return text


TEST = """
import pytest

EDITS = {edits!r}

@pytest.mark.parametrize("edit", EDITS)
def test_x(edit, modelprobe, modelprobe_snapshot):
    space = {{"__name__": "models"}}
    exec(EDITS[edit], space)
    model = modelprobe.build(space["Net"]).eval()
    assert modelprobe.run(model, modelprobe.randn(4, 5, 8), loss="random") == modelprobe_snapshot
"""


ONE_OF_EACH_KIND = [*{outcome: edit for edit, outcome in reversed(TABLE.items())}.values()]


def run(project: pytest.Pytester, *args: str) -> pytest.RunResult:
    plugins = ("-p", "pytest_modelprobe.plugin", "-p", "no:cacheprovider")
    return project.runpytest_inprocess(*plugins, "--modelprobe-json=results.json", *args)


def outcomes(project: pytest.Pytester) -> dict[str, str]:
    """Return edit → outcome of the run: a test that passes with a stale file is ``stale``."""
    data = json.loads((project.path / "results.json").read_text())
    found = {}
    for test in data["tests"]:
        (compared,) = test["snapshots"]
        outcome = {"same": "stale" if compared.get("notes") else "passed"}.get(compared["verdict"], "failed")
        found[compared["test"].partition("[")[2].removesuffix("]")] = outcome
    return found


@pytest.mark.parametrize("edits", [ONE_OF_EACH_KIND, pytest.param([*TABLE], marks=pytest.mark.long)])
@pytest.mark.usefixtures("_plugin_alone")
def test_a_refactoring_passes_and_its_file_is_stale(
    pytester: pytest.Pytester, tmp_path: Path, capsys: pytest.CaptureFixture[str], edits: list[str]
) -> None:
    pytester.makepyfile(test_net=TEST.format(edits=dict.fromkeys(edits, MODEL)))
    run(pytester, "--snapshot-update").assert_outcomes(passed=len(edits))
    pytester.makepyfile(test_net=TEST.format(edits={edit: source(edit) for edit in edits}))
    table = {edit: TABLE[edit] for edit in edits}
    stale = [default for default, *_ in table.values()].count("stale")
    by_default = run(pytester)
    assert outcomes(pytester) == {edit: default for edit, (default, *_) in table.items()}
    by_default.stdout.fnmatch_lines([
        f"{stale} snapshots stale: same function, written otherwise in * places; --snapshot-details lists them, *",
        f"=* {stale} snapshots stale *=",
    ])  # fmt: skip
    run(pytester, "--modelprobe-compare=architecture")
    assert outcomes(pytester) == {edit: strict for edit, (_, strict, _) in table.items()}
    run(pytester, "-o", "modelprobe_stale=fail")
    assert "stale" not in outcomes(pytester).values()
    old = tmp_path / "old"
    shutil.copytree(pytester.path / "__modelprobe__", old / "__modelprobe__")
    run(pytester, "--snapshot-update").assert_outcomes(passed=len(edits))
    capsys.readouterr()
    main(["diff", str(old), str(pytester.path), "--format=json"])
    changes = json.loads(capsys.readouterr().out)["changes"]
    found = {
        Path(change["snapshot"]).name.partition("[")[2].partition("]")[0]: change["findings"][0]["class"]
        for change in changes
    }
    by_gate = {edit: of_gate for edit, (_, _, of_gate) in table.items() if of_gate != "no change"}
    assert found == by_gate
