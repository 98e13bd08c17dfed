"""`modelprobe_snapshot`: first run, update, failure, unused files."""

from __future__ import annotations

import importlib
import json
import os
import time
from pathlib import Path

import pytest

import pytest_modelprobe.probe
import pytest_modelprobe.report.results  # pytester forgets what its runs import
import pytest_modelprobe.snapshot.comparer
import pytest_modelprobe.snapshot.snapshot  # noqa: F401 - pytester forgets what its runs import
from pytest_modelprobe.record import Call, Layer, Reading, Record, Statistics, Value
from pytest_modelprobe.snapshot.naming import Module, Test, unused_files
from pytest_modelprobe.snapshot.preconditions import active_dropout, nonfinite

MODELS = """
import torch
from torch import nn

class TinyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16, eps=1e-5)
        self.drop = nn.Dropout(0.0)
        self.fc2 = nn.Linear(16, 2)

    def forward(self, x):
        return self.fc2(self.drop(torch.relu(self.norm(self.fc1(x)))))
"""

TEST = """
from models import TinyNet

def test_x(modelprobe, modelprobe_snapshot):
    model = modelprobe.build(TinyNet)
    assert modelprobe.run(model, modelprobe.randn(4, 8), loss="random") == modelprobe_snapshot
"""

# Records by hand, for what is not about models.
RECORDS = """
import pytest
from pytest_modelprobe.files import architecture_digest
from pytest_modelprobe.record import Call, Layer, Reading, Record, Statistics, Value

def record(eps=1e-5, mean=0.5, device="cpu", name="norm", **more):
    reading = Reading(statistics=Statistics(count=8, min=-1.0, max=2.0, mean=mean, deviations=8.0))
    output = Value(path="output", shape=(4, 2), dtype="float32", device=device, forward=reading)
    call = Call(root=name, root_training=False, index=0, started=0, finished=1, outputs=(output,), **more)
    norm = Layer(name=name, type="LayerNorm", attributes={"eps": eps}, calls=(call,))
    return Record(model="Net", layers={name: norm}, forwards=1, device=device)
"""

TWO = """
from records import *

def test_x(modelprobe_snapshot):
    assert record() == modelprobe_snapshot

def test_y(modelprobe_snapshot):
    assert record() == modelprobe_snapshot
"""


def one(body: str, arguments: str = "modelprobe_snapshot", before: str = "") -> str:
    """Return a module with one test."""
    lines = "\n    ".join(body.splitlines())
    return f"from records import *\n{before}\ndef test_x({arguments}):\n    {lines}\n"


SAME = one("assert record() == modelprobe_snapshot")
CHANGED = one("assert record(eps=1e-3) == modelprobe_snapshot")
FAILURE = "*AssertionError: output unchanged; structure differs in 1 place: norm.eps 1e-05 → 0.001"


class Project:
    """A project of a user's: a module of models, a module of tests, its snapshots."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.snapshots = pytester.path / "__modelprobe__"
        self.test = TEST
        self.written = 0
        self.models(MODELS)
        self.write("records", RECORDS)

    def write(self, name: str, text: str) -> None:
        path = self.pytester.path / f"{name}.py"
        path.write_text(text)
        self.written += 10  # Python takes two versions of one size for one if they are of the same second
        os.utime(path, (time.time() + self.written,) * 2)
        importlib.invalidate_caches()

    def models(self, text: str) -> None:
        self.write("models", text)

    def change(self, old: str, new: str) -> None:
        """Change something in the models."""
        assert old in MODELS
        self.models(MODELS.replace(old, new))

    def run(self, *args: str, test: str | None = None, name: str = "test_net") -> pytest.RunResult:
        if test is not None:
            self.test = test
        self.write(name, self.test)
        return self.pytester.runpytest_inprocess("-p", "pytest_modelprobe.plugin", "-p", "no:cacheprovider", *args)

    def update(self, *args: str, test: str | None = None, name: str = "test_net") -> pytest.RunResult:
        return self.run("--snapshot-update", *args, test=test, name=name)

    def names(self) -> list[str]:
        return sorted(path.relative_to(self.snapshots).as_posix() for path in self.snapshots.rglob("*.json"))

    def contents(self) -> dict[str, bytes]:
        return {name: (self.snapshots / name).read_bytes() for name in self.names()}


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a second less a run
    pytester.syspathinsert()
    return Project(pytester)


# --- the way of a snapshot ----------------------------------------------------------------------------------------


def test_the_first_run_shows_what_was_recorded_and_how_to_keep_it(project: Project) -> None:
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E       AssertionError: no snapshot yet for test_x: 5 layers recorded, nothing dead, all finite",
            "E       layer   type *output *mean *",
            "E       fc1     Linear *(4, 16)*",
            "E       Right? pytest test_net.py::test_x --snapshot-update, and commit what it writes.",
        ]
    )
    assert not project.snapshots.exists()


def test_an_update_creates_two_files_and_the_next_run_passes(project: Project) -> None:
    result = project.update()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["created __modelprobe__/test_net/test_x.arch.json: 5 layers"])
    result.stdout.fnmatch_lines(["1 snapshot generated."])
    assert project.names() == ["test_net/test_x.arch.json", "test_net/test_x.probe.json"]
    numbers = json.loads(project.contents()["test_net/test_x.probe.json"])
    assert numbers["noise"] == "measured"
    assert numbers["responses"]  # of each layer alone
    result = project.run()
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("=* modelprobe =*")
    result.stdout.fnmatch_lines(["1 snapshot passed."])


def test_an_identity_that_is_drawn_for_each_model_is_not_compared(project: Project) -> None:
    """As the attention of ESM2 and ProteinBertModel of fair-esm keeps one for its incremental state."""
    project.change("self.drop =", "self._incremental_state_id = str(__import__('uuid').uuid4()); self.drop =")
    project.update()
    project.run().stdout.fnmatch_lines(["1 snapshot passed."])


CHANGES = {
    "attribute": ("eps=1e-5", "eps=1e-3", "norm.eps 1e-05 → 0.001: its output changed by *; 1 cause*"),
    "computation": ("torch.relu(", "torch.tanh(", "(root): own code changed*"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_failure_names_the_cause(project: Project, kind: str) -> None:
    project.update()
    old, new, message = CHANGES[kind]
    reason = ' --modelprobe-reason="..."' if kind == "attribute" else ""  # as the gate will ask for
    project.change(old, new)
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            f"E       AssertionError: {message}",
            "E       cause *class *changed by *",
            f"E       Intended? pytest test_net.py::test_x --snapshot-update{reason}",
            "E       Since when? git bisect run pytest test_net.py::test_x",
            "E       To see its tensors: modelprobe.run(..., keep=*",
        ]
    )
    result.stdout.no_fnmatch_line("*snapshot/snapshot.py*")


def test_an_update_within_tolerance_writes_nothing(project: Project) -> None:
    project.update()
    before = project.contents()
    project.change("torch.relu(self.norm(self.fc1(x)))", "torch.relu(self.norm(self.fc1(x * 1.0000001)))")
    project.update().assert_outcomes(passed=1)
    assert project.contents() == before


def test_an_update_changes_the_lines_of_what_changed(project: Project) -> None:
    project.update()
    before = project.contents()["test_net/test_x.arch.json"].splitlines()
    project.change("eps=1e-5", "eps=1e-3")
    result = project.update()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "updated __modelprobe__/test_net/test_x.arch.json: norm.eps 1e-05 → 0.001: *",
            "  cause *class *",
        ]
    )
    after = project.contents()["test_net/test_x.arch.json"].splitlines()
    assert [line for line in after if line not in before] == [line for line in after if b"0.001" in line]
    project.run().assert_outcomes(passed=1)


def test_a_file_of_an_older_schema_fails_until_one_command_writes_it_anew(project: Project) -> None:
    project.update()
    now = project.contents()
    for path in project.snapshots.rglob("*.json"):
        path.write_text(path.read_text().replace('"modelprobe": 6', '"modelprobe": 5'))
    before = project.contents()
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E*Error: *test_x.arch.json is of schema 5, and this *reads 6: record it anew with `pytest --snapshot-up*"]
    )
    project.run("--snapshot-update-new-only").assert_outcomes(failed=1)
    assert project.contents() == before
    result = project.update()
    result.assert_outcomes(passed=1)
    assert project.contents() == now
    project.run().assert_outcomes(passed=1)


def test_an_update_of_new_snapshots_only_leaves_the_others(project: Project) -> None:
    project.update()
    before = project.contents()
    project.change("eps=1e-5", "eps=1e-3")
    more = TEST + TEST[TEST.index("def ") :].replace("test_x", "test_new")
    project.run("--snapshot-update-new-only", test=more).assert_outcomes(passed=1, failed=1)
    assert {name: text for name, text in project.contents().items() if "test_x" in name} == before
    assert "test_net/test_new.arch.json" in project.names()


def test_an_update_that_the_next_run_would_refuse_touches_no_file(project: Project) -> None:
    project.update(test=SAME)
    before = project.contents()
    project.write("records", RECORDS.replace("deviations=8.0)", "deviations=8.0), fingerprint=(float('nan'),) * 16"))
    result = project.update()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E*test_x.arch.json is not written, for the next run would refuse it: as it would be read again, norm *"]
    )
    assert project.contents() == before


# --- both sides, other types --------------------------------------------------------------------------------------


def test_a_record_may_stand_on_either_side_and_be_unequal(project: Project) -> None:
    project.update(test=SAME)
    body = "assert modelprobe_snapshot == record()\nassert not (record(eps=2.0) == modelprobe_snapshot(name='x'))"
    project.run(test=one(body)).assert_outcomes(passed=1)
    project.run(test=one("assert record(eps=2.0) != modelprobe_snapshot")).assert_outcomes(passed=1)


WRONG = {
    "3": "TypeError: modelprobe_snapshot compares records, and this is a int: write modelprobe.run(model, ...) == *",
    "modelprobe.watch(Linear(2, 2))": "TypeError: *this is a Watch: choose the forwards: watch.first == *",
    "modelprobe.watch(Linear(2, 2)).steps": "*UsageError: there is no step to compare: no optimizer with a parameter*",
}


def test_what_is_no_record_is_an_error_with_the_next_step(project: Project) -> None:
    before = f"from torch.nn import Linear\n@pytest.mark.parametrize('other', {[*WRONG]!r})"
    body = "assert eval(other) == modelprobe_snapshot"
    result = project.run(test=one(body, "other, modelprobe, modelprobe_snapshot", before))
    result.stdout.fnmatch_lines([f"E       {message}" for message in WRONG.values()])
    result.stdout.no_fnmatch_line("*snapshot/snapshot.py*")


def test_each_step_of_a_list_has_files_of_its_own(project: Project) -> None:
    body = """
model = modelprobe.build(lambda: torch.nn.Linear(2, 2))
watch = modelprobe.watch(model, steps=2)
optimizer = torch.optim.SGD(model.parameters(), RATE)
for part in range(6):
    model(modelprobe.randn(3, 2)).square().sum().backward()
    if part % 2:
        optimizer.step()
        optimizer.zero_grad()
assert watch.steps == modelprobe_snapshot
"""
    test = one(body.strip().replace("RATE", "0.1"), "modelprobe, modelprobe_snapshot", "import torch")
    project.update(test=test).assert_outcomes(passed=1)
    steps = [f"test_net/test_x.step{n}.{kind}.json" for n in (1, 2) for kind in ("arch", "probe")]
    assert project.names() == steps
    project.run().assert_outcomes(passed=1)
    result = project.run(test=test.replace("0.1", "0.2"))
    result.stdout.fnmatch_lines(["E*AssertionError: step 1 of 2: output unchanged; lr 0.1 → 0.2: updates x 2 *"])


def test_a_snapshot_of_a_step_knows_the_gradient_that_was_applied_and_what_the_optimizer_holds(
    project: Project,
) -> None:
    body = """
model = modelprobe.build(lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
watch = modelprobe.watch(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(modelprobe.randn(3, 2)).square().sum().backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
optimizer.step()
assert watch.first_step == modelprobe_snapshot
"""
    test = one(body.strip(), "modelprobe, modelprobe_snapshot", "import torch")
    project.update(test=test).assert_outcomes(passed=1)
    project.run().assert_outcomes(passed=1)
    said = "gradients scaled by * (clipped), not applied as they arrived; 1 cause, 2 layers after it moved"
    project.run(test=test.replace("1e9", "0.1")).stdout.fnmatch_lines([f"E*AssertionError: {said}"])
    said = "the optimizer no longer updates weight, bias"
    result = project.run(test=test.replace("SGD(model.", "SGD(model[0]."))
    result.stdout.fnmatch_lines([f"E*output unchanged; layer '1' (Linear): {said}; 1 cause"])


GATED = """
import torch
from torch import nn

class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.gate = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return x + self.gate * torch.relu(self.fc(x))

class TinyNet(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), Gated(), Gated())
"""


def test_what_changes_behind_a_gate_that_is_shut_is_named(project: Project) -> None:
    project.models(GATED)
    project.test = TEST.replace('"random"', "None")
    project.update().assert_outcomes(passed=1)
    before = project.contents()
    project.run().assert_outcomes(passed=1)
    project.models(GATED.replace("self.gate * torch.relu(", "self.gate * torch.sigmoid("))
    project.run().stdout.fnmatch_lines(["E*AssertionError: *layers '[*]': own code changed after fc x2*"])
    project.models(GATED)
    project.update().assert_outcomes(passed=1)
    assert project.contents() == before


def test_a_training_loop_cannot_be_compared(project: Project) -> None:
    before = "import torch"
    body = """
model = torch.nn.Linear(2, 2)
watch = modelprobe.watch(model)
for _ in range(2):
    model(modelprobe.randn(3, 2)).sum().backward()
assert watch.first == modelprobe_snapshot(compare="architecture")
assert watch.record == modelprobe_snapshot
"""
    result = project.update(test=one(body.strip(), "modelprobe, modelprobe_snapshot", before))
    result.stdout.fnmatch_lines(
        ["E       *UsageError: a record of 2 forwards and 2 backwards is not reproducible on other machines*"]
    )
    assert project.names() == ["test_net/test_x.arch.json"]


OPTIONS = {
    "name=''": "name= is a text of 1 to 60 characters; got ''",
    "name='cuda'": "name='cuda' is reserved for the file names of numbered or device snapshots: give another",
    "compare='shapes'": "compare= is 'all', 'architecture' or 'behavior'; got 'shapes'",
    "allow='nan'": "allow= takes 'dropout', 'nonfinite' and 'nondeterministic'; got 'nan'",
    "tolerance='x'": "a tolerance multiplies the measured noise and is a positive number; got 'x'",
    "tolerance={'nrm.*': 10}": "tolerance: 'nrm.?' matches none of 1 layer; nearest: 'norm'",
}


def test_an_option_that_is_none_is_an_error(project: Project) -> None:
    tests = (
        f"def test_{i}(modelprobe_snapshot):\n    assert record() == modelprobe_snapshot({call})\n"
        for i, call in enumerate(OPTIONS)
    )
    result = project.update(test="from records import *\n" + "\n".join(tests))
    result.stdout.fnmatch_lines(
        [f"E       pytest_modelprobe.exceptions.*Error: {message}" for message in OPTIONS.values()]
    )
    result.stdout.no_fnmatch_line("*pytest_modelprobe/*")


# --- a comparison without assert ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:assertion is always true:")
def test_a_comparison_that_fails_and_is_not_asserted_fails_the_test(project: Project) -> None:
    body = "assert (record(eps=1e-3) == modelprobe_snapshot, 'a tuple is true')"
    project.update(test=one("assert record() == modelprobe_snapshot\nassert record() == modelprobe_snapshot(name='b')"))
    result = project.run("-rf", test=one(body))
    result.assert_outcomes(failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "compared in line 4 but not asserted: write assert ... == modelprobe_snapshot",
            "output unchanged; structure differs in 1 place: norm.eps 1e-05 → 0.001",
            '*Intended? pytest test_net.py::test_x --snapshot-update --modelprobe-reason="..."',
            "FAILED test_net.py::test_x - Failed: compared in line 4 but not asserted*",
        ]
    )


CAUGHT = [
    "try:\n    assert record(eps=1e-3) == modelprobe_snapshot\nexcept AssertionError:\n    pass",
    "assert record(eps=1e-3) == modelprobe_snapshot or True",
]


@pytest.mark.parametrize("body", CAUGHT)
def test_a_failure_that_a_test_catches_fails_the_run(project: Project, body: str) -> None:
    project.update(test=SAME)
    result = project.run(test=one(body, before="import contextlib"))
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["*test_x.arch.json differs, and test_net.py::test_x did not fail, so the run does: *eps 1e-05 → 0.001. If *"]
    )


EXPECTED = [
    "record(eps=1e-3) == modelprobe_snapshot\nassert 'norm.eps' in modelprobe_snapshot.failure\npytest.xfail('known')",
    "with pytest.raises(AssertionError):\n    assert record(eps=1e-3) == modelprobe_snapshot",
    "with differing():\n    assert record(eps=1e-3) == modelprobe_snapshot",
    "assert record(eps=1e-3) != modelprobe_snapshot",
]
DIFFERING = """
import contextlib

@contextlib.contextmanager
def differing():
    with pytest.raises(AssertionError, match="norm.eps"):
        yield
"""


@pytest.mark.parametrize("body", EXPECTED)
def test_a_failure_that_a_test_expects_fails_nothing(project: Project, body: str) -> None:
    project.update(test=SAME)
    assert project.run(test=one(body, before=DIFFERING)).ret == pytest.ExitCode.OK


def test_a_test_that_fails_otherwise_says_that_alone(project: Project) -> None:
    project.update(test=SAME)
    body = "record(eps=1e-3) == modelprobe_snapshot\nassert 1 == 2"
    result = project.run(test=one(body))
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*not asserted*")


def test_what_another_fixture_compares_is_asserted_too(project: Project) -> None:
    late = "@pytest.fixture\ndef late(modelprobe_snapshot):\n    yield\n    record() == modelprobe_snapshot\n"
    project.run(test=one("pass", "late", before=late)).assert_outcomes(passed=1, errors=1)


# --- the text, whoever asserts ------------------------------------------------------------------------------------


def test_the_text_is_whole_whatever_becomes_of_assert(project: Project) -> None:
    project.update(test=SAME)
    result = project.run("--assert=plain", test=CHANGED)
    result.stdout.fnmatch_lines([FAILURE, "*cause*class*changed by*", "*Intended? pytest test_net.py::test_x *"])
    result.stdout.no_fnmatch_line("*Full diff*")
    result.stdout.no_fnmatch_line("*lines hidden*")


def test_below_a_first_line_that_pytest_truncates_is_the_table(project: Project) -> None:
    name = "norm_" * 200
    body = f"record(name={name!r}) == modelprobe_snapshot, 'as ever'"
    project.update(test=one(f"assert {body}"))
    result = project.run(test=one(f"assert {body.replace('record(', 'record(eps=1e-3, ')}"))
    said = f"output unchanged; structure differs in 1 place: {name}.eps 1e-05 → 0.001"
    result.stdout.fnmatch_lines(["E       AssertionError: as ever", f"E       {said}", "E       cause *"])
    result.stdout.no_fnmatch_line("*Full output truncated*")


# --- names --------------------------------------------------------------------------------------------------------


def test_several_comparisons_are_numbered_or_named(project: Project) -> None:
    lines = ["assert record() == modelprobe_snapshot"] * 2 + ["assert record() == modelprobe_snapshot(name='wide')"] * 2
    project.update(test=one("\n".join(lines))).assert_outcomes(passed=1)
    assert [name for name in project.names() if "arch" in name] == [
        "test_net/test_x.2.arch.json",
        "test_net/test_x.arch.json",
        "test_net/test_x.wide.arch.json",
    ]
    project.run().assert_outcomes(passed=1)


def test_the_users_ids_are_part_of_the_name_and_classes_too(project: Project) -> None:
    project.update(
        test="""
from records import *

class TestNet:
    @pytest.mark.parametrize("size", ["big", "a:b"])
    def test_x(self, size, modelprobe_snapshot):
        assert record() == modelprobe_snapshot
"""
    ).assert_outcomes(passed=2)
    assert [name for name in project.names() if "arch" in name] == [
        "test_net/TestNet.test_x[a%3Ab].arch.json",
        "test_net/TestNet.test_x[big].arch.json",
    ]


REPEAT = """
import pytest

@pytest.fixture
def __pytest_repeat_step_number(request):
    return request.param

@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    metafunc.fixturenames.append("__pytest_repeat_step_number")
    metafunc.parametrize("__pytest_repeat_step_number", range(2), indirect=True, ids=lambda i: f"{i + 1}-2")
"""  # as pytest-repeat does with --count 2


def test_repetitions_of_a_test_have_its_one_snapshot(project: Project) -> None:
    parametrize = "@pytest.mark.parametrize('size', ['3-2', 'big'])"
    parametrized = one("assert record() == modelprobe_snapshot", "size, modelprobe_snapshot", parametrize)
    project.update(test=parametrized)
    project.update(test=SAME, name="test_one")
    once = project.contents()
    project.write("repeat", REPEAT)
    for option in ((), ("--snapshot-update",)):
        result = project.run("-p", "repeat", *option, test=SAME, name="test_one")
        result.assert_outcomes(passed=6)
        result.stdout.no_fnmatch_line("*unused*")
        assert project.contents() == once
    for path in project.snapshots.rglob("*.json"):
        path.unlink()
    project.update("-p", "repeat", test=SAME, name="test_one").assert_outcomes(passed=6)
    assert project.contents() == once


def test_an_id_that_pytest_numbered_is_an_error(project: Project) -> None:
    parametrize = "@pytest.mark.parametrize('config', [object(), object()]{})"
    test = one("assert record() == modelprobe_snapshot", "config, modelprobe_snapshot", parametrize.format(""))
    result = project.update(test=test)
    result.stdout.fnmatch_lines(
        ["E *UsageError: config0 in test_x?config0? is an id that pytest numbered itself*ids=*"]
    )
    result.stdout.no_fnmatch_line("*pytest_modelprobe/*")
    assert not project.snapshots.exists()
    project.update(test=test.replace(parametrize.format(""), parametrize.format(", ids=['a', 'b']"))).assert_outcomes(
        passed=2
    )


def test_the_numbers_of_another_device_have_a_file_of_their_own(project: Project) -> None:
    project.update(test=SAME)
    before = project.contents()
    on_cuda = one("assert record(device='cuda:0', mean=0.6) == modelprobe_snapshot")
    project.run(test=on_cuda).stdout.fnmatch_lines(["*AssertionError: no snapshot yet for test_x on cuda: 1 layer *"])
    project.update(test=on_cuda).assert_outcomes(passed=1)
    assert project.contents().keys() - before.keys() == {"test_net/test_x.cuda.probe.json"}
    assert before.items() <= project.contents().items()
    project.run(test=on_cuda).assert_outcomes(passed=1)
    project.run(test=SAME).assert_outcomes(passed=1)


def test_ids_of_others_are_harmless(project: Project) -> None:
    ids = "@pytest.mark.parametrize('size', [0, 1, 2], ids=[chr(27) + '[31m', '../../x', 'x' * 300])"
    result = project.run(test=one("assert record() == modelprobe_snapshot", "size, modelprobe_snapshot", ids))
    result.assert_outcomes(failed=3)
    assert "\x1b[31m" not in result.stdout.str()
    project.update().assert_outcomes(passed=3)
    assert len(project.names()) == 6
    assert {Path(name).parent.as_posix() for name in project.names()} == {"test_net"}
    project.run().assert_outcomes(passed=3)


# --- an update that is not to be ----------------------------------------------------------------------------------


DRAWS = """
import numpy
import torch
from torch import nn

class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.noise = Noise()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.noise(self.fc(x)))

class Noise(nn.Module):
    def forward(self, x):
        return x + torch.from_numpy(numpy.random.default_rng().normal(size=x.shape)).float()
"""


def test_what_is_allowed_not_to_repeat_is_not_compared_and_the_rest_is(project: Project) -> None:
    body = (
        "torch.manual_seed(0)\n"
        "model, x = Draws().eval(), modelprobe.randn(3, 4)\n"
        "assert modelprobe.run(model, x) == modelprobe_snapshot(allow='nondeterministic')"
    )
    test = one(body, "modelprobe, modelprobe_snapshot", DRAWS)
    project.update(test=test).assert_outcomes(passed=1)
    result = project.run(test=test)
    result.assert_outcomes(passed=1)
    counted = "* values could not be compared: no numbers of them repeat, or the inputs are others."
    result.stdout.fnmatch_lines([f"{counted} They are of 1 snapshot."])
    result = project.run(test=test.replace("modelprobe.randn", "2 * modelprobe.randn"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"E*{counted}"])
    project.run(test=test.replace("(allow='nondeterministic')", "")).assert_outcomes(failed=1)


REFUSED = {
    "nondeterministic": (
        "assert modelprobe.run(Draws(), modelprobe.randn(3, 4)) == modelprobe_snapshot",
        "because the run is not repeatable: noise output differs when it is run again",
        'Draw random numbers from the global generators *, or pass modelprobe_snapshot(allow="nondeterministic"), *',
    ),
    "nonfinite": (
        "assert modelprobe.run(ReLU(), modelprobe.randn(3, 2) * float('nan')) == modelprobe_snapshot",
        "because *NaN*: fix it, or pass *",
        'Fix it, or pass modelprobe_snapshot(allow="nonfinite"), and run the update again.',
    ),
    "dropout": (
        "assert modelprobe.run(Dropout(0.1), modelprobe.randn(3, 2)) == modelprobe_snapshot",
        "because dropout was active: (root) (Dropout, 0.1), whose *: run in eval",
        'Run in eval mode, set p to 0, or pass modelprobe_snapshot(allow="dropout"), and run the update again.',
    ),
    "name": (
        "for eps in (1, 2):\n    assert record(eps=eps) == modelprobe_snapshot(name='a')",
        "again, because the test compares two different records under one",
        "Give each record its own name=, and run the update again.",
    ),
    "ci": (
        "assert record() == modelprobe_snapshot",
        "because CI is set: *-update-in-ci on the command line",
        "Run the update on your machine and commit the files, or pass --modelprobe-allow-update-in-ci on the *",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_was_refused_gets_the_next_step_and_not_the_same_command(
    project: Project, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "ci":
        monkeypatch.setenv("CI", "true")
    body, first, next_step = REFUSED[why]
    before = f"{DRAWS}\nfrom torch.nn import Dropout, ReLU"
    result = project.update(test=one(body, "modelprobe, modelprobe_snapshot", before))
    result.stdout.fnmatch_lines([f"*AssertionError: not written*{first}*", f"E * {next_step}"])
    result.stdout.no_fnmatch_line("*pytest test_net.py::test_x --snapshot-update*")


CI_HIDDEN = {
    "a conftest": ("[pytest]\naddopts = --snapshot-update", "import os\nos.environ.pop('CI', None)"),
    "a conftest and workers": (
        "[pytest]\naddopts = --snapshot-update --modelprobe-allow-update-in-ci -n1 -p xdist",
        "import os\nos.environ.pop('CI', 0)",
    ),
}


@pytest.mark.usefixtures("_forked")
@pytest.mark.parametrize("how", CI_HIDDEN)
def test_no_file_of_the_repository_lets_an_update_write_in_ci(
    project: Project, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    project.update(test=SAME)
    before = project.contents()
    ini, conftest = CI_HIDDEN[how]
    project.pytester.makeini(ini)
    project.pytester.makeconftest(conftest)
    monkeypatch.setenv("CI", "true")
    result = project.run(test=CHANGED)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*AssertionError: not written, because CI is set: *"])
    assert project.contents() == before
    if how == "a conftest":
        project.update("--modelprobe-allow-update-in-ci").assert_outcomes(passed=1)


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2"}


def test_a_rank_that_only_the_environment_claims_is_not_believed(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.update(test=SAME)
    before = project.contents()
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    result = project.run("--modelprobe-output=now", test=CHANGED)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"E  {FAILURE}"])
    result = project.update(test=CHANGED)
    result.assert_outcomes(failed=1)
    why = "not written, because torchrun started 2 processes, and this one has no process group: "
    step = "et a fixture call torch.distributed.init_process_group(), and rank 0 writes; or run pytest without torchrun"
    result.stdout.fnmatch_lines([f"E*AssertionError: {why}l{step}", f"E*L{step}."])
    assert (project.contents(), (project.pytester.path / "now").exists()) == (before, False)


def test_what_was_written_or_left_out_is_counted_in_the_last_line(project: Project) -> None:
    assert project.update(test=TWO).outlines[-1].strip("= ").startswith("2 passed, 2 snapshots written in ")
    changed = project.update("--modelprobe-json=results.json", test=TWO.replace("record()", "record(eps=1.0)", 1))
    assert "2 passed, 1 snapshot written in " in changed.outlines[-1]
    results = json.loads((project.pytester.path / "results.json").read_text())
    assert [one["verdict"] for test in results["tests"] for one in test["snapshots"]] == ["updated", "same"]
    assert "2 passed, 2 snapshots not compared in " in project.run("--modelprobe-compare=behavior").outlines[-1]
    assert "2 passed in" in project.run().outlines[-1]


def test_a_reason_is_written_where_the_architecture_changed(project: Project) -> None:
    project.update(test=TWO)
    project.update("--modelprobe-reason=wider norm", test=TWO.replace("record()", "record(eps=1e-3)", 1))
    x, y = (json.loads(project.contents()[f"test_net/test_{name}.arch.json"]) for name in "xy")
    assert x["reason"] == "wider norm"
    assert len(x["supersedes"]) == 24
    assert "reason" not in y
    project.run().assert_outcomes(passed=2)


NOWHERE = (
    "no architecture changed in this run, so the reason was not written; to add a reason to a change that is "
    "already in the files, check out the files of the base first"
)


def test_a_reason_that_went_into_no_file_is_reported_as_unused(project: Project) -> None:
    project.update("--modelprobe-reason=as ever", test=SAME).stdout.fnmatch_lines([NOWHERE])
    before = project.contents()
    project.update("--modelprobe-reason=as ever").stdout.fnmatch_lines([NOWHERE])
    assert project.contents() == before
    project.update("--modelprobe-reason=as ever", "-k", "nothing").stdout.fnmatch_lines([NOWHERE])
    project.update("--modelprobe-reason=wider", test=CHANGED).stdout.no_fnmatch_line("no architecture changed*")


def test_an_update_accepts_only_what_changed_little_or_the_structure_alone(project: Project) -> None:
    project.update()
    before = project.contents()
    project.models(MODELS.replace("nn.Dropout(0.0)", "nn.Tanh()"))
    for limit in ("0", "1e-4"):
        result = project.update(f"--modelprobe-accept={limit}")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            [f"*AssertionError: not written: drop*, which --modelprobe-accept={float(limit):g} does not cover*"]
        )
    assert project.contents() == before
    project.update("--modelprobe-accept=9").assert_outcomes(passed=1)
    project.models(MODELS.replace("nn.Dropout(0.0)", "nn.Tanh(); self.norm.added = 3"))
    project.update("--modelprobe-accept=0").assert_outcomes(passed=1)
    assert b"added" in project.contents()["test_net/test_x.arch.json"]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--modelprobe-accept=-1", "it is a relative change, as 1e-4, or 0"),
        ("--modelprobe-reason= ", "is empty: say why"),
    ],
)
def test_a_wrong_value_of_an_update_is_a_usage_error(project: Project, option: str, said: str) -> None:
    result = project.update(option, test=SAME)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --modelprobe-*{said}*"])


INERT = MODELS.replace("self.drop =", "self.norm.added = 3; self.drop =")


def test_an_attribute_that_came_fails_nothing_and_an_update_writes_it(project: Project) -> None:
    project.update()
    before = project.contents()
    project.models(INERT)
    project.run().assert_outcomes(passed=1)
    result = project.update()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["updated *: nothing changed"])
    after = project.contents()
    assert {name for name in after if after[name] != before[name]} == set(after)
    assert b"added" in after["test_net/test_x.arch.json"]
    project.run().assert_outcomes(passed=1)
    assert project.update().ret == 0
    assert project.contents() == after


# --- other names --------------------------------------------------------------------------------------------------

RENAME = """
from models import TinyNet

RENAME = {"head": "fc2"}

def test_x(modelprobe, modelprobe_snapshot):
    model = modelprobe.build(TinyNet, rename=RENAME)
    record = modelprobe.run(model, modelprobe.randn(4, 8), loss="random")
    assert record == modelprobe_snapshot(rename=RENAME)
"""


def test_a_layer_that_a_test_says_was_renamed_is_the_same_with_the_same_weights(project: Project) -> None:
    project.update()
    project.models(MODELS.replace("fc2", "head"))
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*AssertionError: fc2 renamed to head: the model's output changed by *",
            "*Only other names? modelprobe_snapshot(rename={'head': 'fc2'}), and modelprobe.build(..., rename=...)*",
        ]
    )
    project.run(test=RENAME).assert_outcomes(passed=1)
    result = project.update()
    result.stdout.fnmatch_lines(["*updated __modelprobe__/test_net/test_x.arch.json: fc2 is called head*"])
    assert b'"head":' in project.contents()["test_net/test_x.arch.json"]
    before = project.contents()
    project.update().assert_outcomes(passed=1)
    assert project.contents() == before


def test_a_rename_of_no_layer_is_an_error(project: Project) -> None:
    project.update()
    result = project.run(test=RENAME.replace('"head": "fc2"', '"heads": "fc9"'))
    result.stdout.fnmatch_lines(["*SelectionError: rename: 'heads' matches no layer of the actual TinyNet"])


# --- what is compared ---------------------------------------------------------------------------------------------


def test_tolerance_multiplies_what_may_change(project: Project) -> None:
    project.update(test=SAME)
    test = one("assert record(mean=0.501) == modelprobe_snapshot")
    project.run(test=test).assert_outcomes(failed=1)
    for tolerance in ("1e6", "{'norm': 1e6}"):
        project.run(test=test.replace("snapshot\n", f"snapshot(tolerance={tolerance})\n")).assert_outcomes(passed=1)
    marked = test.replace("def ", "@pytest.mark.modelprobe(tolerance=1e6)\ndef ")
    project.run(test=marked).assert_outcomes(passed=1)


def test_the_run_may_compare_a_part_and_says_so(project: Project) -> None:
    project.pytester.makeini("[pytest]\nmodelprobe_compare = architecture")
    project.update(test=SAME)
    moved = one("assert record(mean=9.0) == modelprobe_snapshot")
    result = project.run(test=moved)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["the behavior of 1 snapshot was not compared (*modelprobe*compare*architecture)"])
    project.run(test=CHANGED).assert_outcomes(failed=1)
    project.run("--modelprobe-compare=all", test=moved).assert_outcomes(failed=1)


def test_a_test_that_compares_less_than_its_snapshot_says_fails_until_that_is_written(project: Project) -> None:
    project.update(test=SAME)
    less = CHANGED.replace("modelprobe_snapshot\n", "modelprobe_snapshot(compare='behavior')\n")
    result = project.run(test=less)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E*test_x compares only the behavior, but its snapshot was written to compare all", "E*Intended? *update*"]
    )
    project.update().assert_outcomes(passed=1)
    assert b'"compared": "behavior"' in project.contents()["test_net/test_x.probe.json"]
    project.run().assert_outcomes(passed=1)
    project.update(test=SAME).assert_outcomes(passed=1)
    assert b'"compared"' not in project.contents()["test_net/test_x.probe.json"]


def test_what_nothing_is_compared_of_fails(project: Project) -> None:
    project.update(test=one("assert record() == modelprobe_snapshot(compare='behavior')"))
    project.pytester.makeini("[pytest]\nmodelprobe_compare = architecture")
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E*nothing is compared: the test compares only the behavior, and modelprobe_compare = architecture; *"]
    )


def test_a_test_may_compare_a_part_and_of_the_architecture_there_are_no_numbers(project: Project) -> None:
    project.update(test=one("assert record() == modelprobe_snapshot(compare='architecture')"))
    assert project.names() == ["test_net/test_x.arch.json"]
    project.run(test=one("assert record(mean=9.0) == modelprobe_snapshot(compare='architecture')")).assert_outcomes(
        passed=1
    )
    project.run(test=SAME).stdout.fnmatch_lines(["*AssertionError: no snapshot yet for test_x: 1 layer *"])
    marked = "@pytest.mark.modelprobe(compare='behavior')\ndef "
    project.update(test=SAME.replace("def ", marked))
    assert len(project.names()) == 2
    project.run(test=CHANGED.replace("def ", marked)).assert_outcomes(passed=1)
    result = project.run("--modelprobe-compare=architecture")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["the behavior of 1 snapshot was not compared*"])


# --- calls that are written otherwise -----------------------------------------------------------------------------

ATTENTIVE = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, mask=None, train=True, cache=None):
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        return self.drop(self.fc(x)) if train else self.fc(x)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()

    def forward(self, x, mask):
        return x + self.attn(x, mask)

class TinyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        mask = x > 0.5
        for block in self.blocks:
            x = block(x, mask)
        return x
"""
CALL = "self.attn(x, mask)"
BY_KEYWORD = ATTENTIVE.replace(CALL, "self.attn(x, mask=mask)")
IN_EVAL = """
import pytest
from models import TinyNet

def test_x(modelprobe, modelprobe_snapshot):
    model = modelprobe.build(TinyNet).eval()
    assert modelprobe.run(model, modelprobe.randn(4, 8)) == modelprobe_snapshot

def test_y(modelprobe, modelprobe_snapshot):
    model = modelprobe.build(TinyNet).eval()
    assert modelprobe.run(model, modelprobe.randn(2, 8)) == modelprobe_snapshot
"""
LISTED = [
    "  blocks.?.attn: input?0? renamed to input x2 in 2 models",
    "  blocks.?.attn: input?1? renamed to mask x2 in 2 models",
]


def test_a_call_that_is_written_otherwise_fails_nothing_until_an_update_writes_it(project: Project) -> None:
    project.models(ATTENTIVE)
    project.update(test=IN_EVAL)
    before = project.contents()
    project.models(BY_KEYWORD)
    passed = project.run()
    passed.assert_outcomes(passed=2)
    seen = "2 snapshots stale: same function, written otherwise in 8 places"
    passed.stdout.fnmatch_lines([f"{seen}; --snapshot-details lists them, --snapshot-update writes them"])
    passed.stdout.fnmatch_lines(["=* 2 passed, 2 snapshots stale in *"])
    assert project.contents() == before
    listed = project.run("--snapshot-details", "--modelprobe-json=results.json")
    listed.stdout.fnmatch_lines([f"{seen}:", *LISTED], consecutive=True)
    data = json.loads((project.pytester.path / "results.json").read_text())
    (snapshot,) = data["tests"][0]["snapshots"]
    assert (snapshot["verdict"], snapshot.get("causes")) == ("same", None)
    assert [(note["said"], note["layers"]) for note in snapshot["notes"]] == [
        ("blocks.*.attn: input[0] renamed to input", 2), ("blocks.*.attn: input[1] renamed to mask", 2),
    ]  # fmt: skip
    result = project.run("--modelprobe-compare=all")  # who asks for all is told of it as of a change
    first = "output unchanged; structure differs in 4 places: blocks.*.attn: input[[]0] renamed to input x2"
    result.stdout.fnmatch_lines([f"*AssertionError: {first}; blocks.*.attn: input[[]1] renamed to mask x2"])
    updated = project.update()
    updated.assert_outcomes(passed=2)
    said = "same function; written otherwise in 4 places"
    updated.stdout.fnmatch_lines([f"updated *x.arch.json: {said}: blocks.*.attn: input[[]0] renamed to input x2; *"])
    written = project.contents()
    assert all(written[name] != before[name] for name in before)
    assert b'"mask' in written["test_net/test_x.arch.json"]
    quiet = project.run()
    quiet.assert_outcomes(passed=2)
    quiet.stdout.no_fnmatch_line("*stale*")


def test_of_a_structure_without_numbers_calls_are_compared(project: Project) -> None:
    project.models(ATTENTIVE)
    project.update(test=IN_EVAL.replace("modelprobe.run(", "modelprobe.architecture("))
    project.models(BY_KEYWORD)
    result = project.run()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines([
        "*AssertionError: blocks.*.attn: input[[]0] renamed to input x2; 2 causes",
        "*blocks.*.attn: input[[]1] renamed to mask x2 *",
    ])  # fmt: skip


def test_an_argument_that_matters_fails_by_its_name_however_the_call_is_written(project: Project) -> None:
    project.models(ATTENTIVE)
    project.update(test=IN_EVAL)
    project.models(ATTENTIVE.replace(CALL, "self.attn(x, mask=mask, train=False)"))
    result = project.run()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*AssertionError: *blocks.*: own code gives attn train False, not the default x2"])


# --- damaged files ------------------------------------------------------------------------------------------------


def test_numbers_of_an_older_architecture_are_recorded_anew(project: Project) -> None:
    changed = TEST.replace("modelprobe.build(TinyNet)", "modelprobe.build(TinyNet); model.norm.eps = 1e-3")
    project.update()
    probe = project.snapshots / "test_net" / "test_x.probe.json"
    old = probe.read_bytes()
    project.update(test=changed)
    probe.write_bytes(old)
    project.run().stdout.fnmatch_lines(["*AssertionError: *do not belong together*--snapshot-update*"])
    project.update().assert_outcomes(passed=1)
    project.run().assert_outcomes(passed=1)


def test_a_record_without_numbers_does_not_pass_for_one_with_numbers(project: Project) -> None:
    project.update(test=SAME)
    before = project.contents()
    bare = one("assert modelprobe.architecture(Linear(2, 2)) == modelprobe_snapshot", "modelprobe, modelprobe_snapshot")
    for run in (project.run, project.update):
        result = run(test=f"from torch.nn import Linear\n{bare}")
        result.stdout.fnmatch_lines(
            ["*AssertionError: *test_x.arch.json has numbers, and the record is of the structure*"]
        )
    assert project.contents() == before


def test_a_record_of_structure_alone_has_one_file(project: Project) -> None:
    body = "assert modelprobe.architecture(Linear(2, 2)) == modelprobe_snapshot"
    project.update(test=one(body, "modelprobe, modelprobe_snapshot", "from torch.nn import Linear"))
    assert project.names() == ["test_net/test_x.arch.json"]
    project.run().assert_outcomes(passed=1)
    result = project.run(test=project.test.replace("Linear(2, 2)", "Linear(2, 3)"))
    result.assert_outcomes(failed=1)


# --- what no test uses --------------------------------------------------------------------------------------------

FEWER = TWO[: TWO.index("def test_y")]


def test_what_no_test_uses_fails_the_run_and_an_update_deletes_it(project: Project) -> None:
    project.update(test=TWO)
    result = project.run(test=FEWER)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "2 snapshot files unused, --snapshot-update deletes them:",
            "  __modelprobe__/test_net/test_y.probe.json",
            "  __modelprobe__/test_net/test_y.arch.json",
        ]
    )
    assert project.run("--snapshot-warn-unused").ret == 0
    result = project.update()
    assert result.ret == 0
    result.stdout.fnmatch_lines(["deleted 2 snapshot files that no test uses:"])
    assert project.names() == ["test_net/test_x.arch.json", "test_net/test_x.probe.json"]


def test_a_module_that_is_gone_leaves_its_snapshots_unused(project: Project) -> None:
    project.update(test=TWO)
    project.update(test=SAME, name="test_other")
    (project.pytester.path / "test_net.py").unlink()
    project.update(name="test_other")
    assert {Path(name).parent.name for name in project.names()} == {"test_other"}


# How tests may be left out → the module of tests, and arguments.
IN_USE = {
    "-k": (TWO, ["-k", "test_x"]),
    "skip inside": (TWO.replace("    assert record() == m", "    pytest.skip('x')\n    assert record() == m"), []),
    "collect only": (FEWER, ["--collect-only"]),
}


@pytest.mark.parametrize("how", IN_USE)
def test_what_a_test_left_out_uses_stays_unmentioned(project: Project, how: str) -> None:
    project.update(test=TWO)
    project.write("test_other", "def test_other(): pass")
    before = project.contents()
    test, args = IN_USE[how]
    for run in (project.run, project.update):
        result = run(*args, test=test)
        assert result.ret == 0
        result.stdout.no_fnmatch_line("*unused*")
        assert project.contents() == before


def test_what_passed_the_last_time_is_in_use(project: Project) -> None:
    project.update(test=TWO)
    before = project.contents()
    project.run("-p", "cacheprovider", test=TWO.replace("record()", "record(eps=2.0)", 1))
    result = project.update("-p", "cacheprovider", "--lf", test=TWO)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*unused*")
    assert project.contents() == before


# How a run may end early → what to put into a module from which test_y is gone, and why its snapshot is kept.
BROKEN = {
    "failed": ("\ndef test_z(): assert False", [], "tests failed"),
    "exit": ("\ndef test_z(): pytest.exit('x', returncode=0)", [], "the run was stopped"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_nothing_is_deleted_after_a_run_that_did_not_end_well(project: Project, how: str) -> None:
    project.update(test=TWO)
    before = project.contents()
    more, args, why = BROKEN[how]
    result = project.update(*args, test=FEWER + more)
    assert project.contents() == before
    result.stdout.fnmatch_lines([f"2 snapshot files unused, and kept: {why}:", "  *test_y.probe.json"])


def test_an_interrupted_run_deletes_nothing(project: Project) -> None:
    project.update(test=TWO)
    before = project.contents()
    project.write("test_net", FEWER + "\ndef test_z(): raise KeyboardInterrupt")
    options = ("-p", "pytest_modelprobe.plugin", "--snapshot-update")
    result = project.pytester.runpytest_inprocess(*options, no_reraise_ctrlc=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert project.contents() == before


def test_a_comparison_that_a_test_no_longer_makes_is_unused(project: Project) -> None:
    project.update(test=one("\n".join(["assert record() == modelprobe_snapshot"] * 2)))
    project.run(test=SAME).stdout.fnmatch_lines(["2 snapshot files unused*", "  *test_x.2.probe.json"])


def test_ci_deletes_nothing(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.update(test=TWO)
    monkeypatch.setenv("CI", "1")
    result = project.update(test=FEWER)
    result.stdout.fnmatch_lines(["2 snapshot files unused, and kept: CI is set:"])
    assert len(project.names()) == 4


def test_an_option_of_syrupys_about_unused_snapshots_holds(project: Project) -> None:
    project.update(test=TWO)
    project.update("--snapshot-no-cleanup", test=FEWER).assert_outcomes(passed=1)
    assert len(project.names()) == 4


def test_snapshots_of_syrupys_own_are_its_business(project: Project) -> None:
    test = TWO + "\ndef test_amber(snapshot):\n    assert 1 == snapshot\n"
    project.update(test=test).assert_outcomes(passed=3)
    result = project.run(test=TWO)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*1 snapshot unused.*"])
    assert len(project.names()) == 4


# --- which files are left over, by hand ---------------------------------------------------------------------------


def left(folder: Path, *tests: Test, gone: bool = False, used: str = "", ran: str = "cpu") -> dict[str, str | None]:
    module = Module(folder, gone=gone, tests=tests)
    found = unused_files(module, {folder / name for name in used.split()}, ran.split())
    return {path.name: why for path, why in found}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.arch.json", "a.probe.json", "a.cuda.probe.json"):
        (tmp_path / name).touch()
    return tmp_path


ALL = {"a.probe.json": None, "a.cuda.probe.json": None, "a.arch.json": None}


def test_numbers_of_a_device_that_did_not_run_are_kept(folder: Path) -> None:
    kept = "cuda did not run"
    assert left(folder) == {"a.probe.json": None, "a.cuda.probe.json": kept, "a.arch.json": kept}
    assert left(folder, ran="cpu cuda") == ALL
    assert left(folder, gone=True) == ALL


def test_numbers_of_a_device_that_did_not_run_are_not_mentioned_where_the_test_is_there(folder: Path) -> None:
    assert left(folder, Test("a", "cpu", passed=True), used="a.arch.json a.probe.json") == {}


def test_the_architecture_stays_with_numbers_that_stay(folder: Path) -> None:
    assert left(folder, Test("a", "cpu", passed=True)) == {"a.probe.json": None}


def test_numbers_of_a_device_that_the_test_left_are_unused(folder: Path) -> None:
    used = "a.arch.json a.probe.json"
    tests = Test("a", "cpu", passed=True), Test("b", "cuda", passed=True)
    assert left(folder, *tests, used=used, ran="cpu cuda") == {"a.cuda.probe.json": None}


def test_a_skip_on_one_device_says_nothing_of_another(folder: Path) -> None:
    tests = Test("a", "cpu", passed=True), Test("a", "cuda", passed=False)
    assert left(folder, *tests, used="a.arch.json a.probe.json", ran="cpu cuda") == {}
    assert left(folder, *tests, ran="cpu cuda") == {"a.probe.json": None}


# --- results ------------------------------------------------------------------------------------------------------


def test_the_actual_files_can_be_copied_over(project: Project) -> None:
    project.update(test=TWO)
    actual = project.pytester.path / "actual"
    project.run(f"--modelprobe-output={actual}", test=TWO.replace("record()", "record(eps=1e-3)", 1))
    found = sorted(path.relative_to(actual).as_posix() for path in actual.rglob("*.json"))
    assert found == [f"__modelprobe__/test_net/test_x.{kind}.json" for kind in ("arch", "probe")]
    for name in found:
        (project.pytester.path / name).write_bytes((actual / name).read_bytes())
    project.run().assert_outcomes(passed=2)


def test_results_are_written_as_json(project: Project) -> None:
    project.update(test=TWO)
    project.run("--modelprobe-json=out/results.json", test=TWO.replace("record()", "record(eps=float('inf'))", 1))
    data = json.loads((project.pytester.path / "out" / "results.json").read_text())
    (changed,), (same,) = (test["snapshots"] for test in data["tests"])
    assert (changed["test"], changed["verdict"]) == ("test_net.py::test_x", "changed")
    assert (same["test"], same["verdict"]) == ("test_net.py::test_y", "same")
    (cause,) = changed["causes"]
    expected = {"kind": "attribute", "layer": "norm", "what": "eps", "actual": {"float": "inf"}, "expected": 1e-05}
    assert expected.items() <= cause.items()
    assert changed["snapshot"] == "__modelprobe__/test_net/test_x.arch.json"
    assert changed.keys().isdisjoint({"key", "files"})


# --- with others --------------------------------------------------------------------------------------------------


def test_without_syrupy_it_says_so(project: Project) -> None:
    result = project.run("-p", "no:syrupy", test=SAME)
    result.stdout.fnmatch_lines(
        ["E *UsageError: modelprobe_snapshot needs the plugin syrupy: run without -p no:syrupy"]
    )


def test_another_snapshot_fixture_is_named(project: Project) -> None:
    before = "import collections\n@pytest.fixture\ndef snapshot(): return collections.Counter()"
    result = project.run(test=one("pass", before=before))
    result.stdout.fnmatch_lines(
        ["E *UsageError: modelprobe_snapshot needs syrupy's fixture snapshot, but * is one of collections*"]
    )


@pytest.mark.parametrize("dist", ["load", pytest.param("loadscope", marks=pytest.mark.long)])
@pytest.mark.usefixtures("_forked")
def test_workers_of_xdist_share_the_work_and_the_controller_reports(project: Project, dist: str) -> None:
    project.update(test=TWO)
    test = FEWER + "\ndef test_z(modelprobe_snapshot):\n    assert record() == modelprobe_snapshot\n"
    xdist = ("-p", "xdist", "-n2", f"--dist={dist}")
    project.write("test_net", test)
    base = ("-p", "pytest_modelprobe.plugin", "-p", "no:cacheprovider")
    result = project.pytester.runpytest_subprocess(*base, *xdist, "--snapshot-update", "--modelprobe-json=out.json")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["created *test_z.arch.json: 1 layer", "deleted 2 snapshot files that no test uses:"])
    assert [name for name in project.names() if "arch" in name] == [
        "test_net/test_x.arch.json",
        "test_net/test_z.arch.json",
    ]
    written = json.loads((project.pytester.path / "out.json").read_text())
    assert written["complete"]
    assert [len(test["snapshots"]) for test in written["tests"]] == [1, 1]


def test_tests_run_again_are_counted_once(project: Project) -> None:
    test = one("TRIES.append(1)\nassert record() == modelprobe_snapshot\nassert len(TRIES) == 2", before="TRIES = []")
    project.write("test_net", test)
    args = ("-p", "pytest_modelprobe.plugin", "-p", "pytest_rerunfailures", "--reruns=1", "--snapshot-update")
    result = project.pytester.runpytest(*args, "--modelprobe-json=out.json")
    result.stdout.fnmatch_lines(["*1 passed, 1 rerun*"])
    assert len(project.names()) == 2
    (test,) = json.loads((project.pytester.path / "out.json").read_text())["tests"]
    assert (test["outcome"], len(test["snapshots"])) == ("passed", 1)


# --- what lasts ---------------------------------------------------------------------------------------------------


def layer(kind: str, *, training: bool = True, **more: object) -> Record:
    call = Call(root="a", root_training=training, index=0, training=training)
    attributes = {key: value for key, value in more.items() if isinstance(value, (int, float))}
    return Record(model="Net", layers={"a": Layer(name="a", type=kind, attributes=attributes, calls=(call,))})


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (layer("torch.nn.Dropout", p=0.1), "a (Dropout, 0.1)"),
        (layer("torch.nn.MultiheadAttention", dropout=0.2), "a (MultiheadAttention, 0.2)"),
        (layer("torch.nn.Dropout", p=0.1, training=False), None),
        (layer("models.Block", dropout=0.2), None),
    ],
)
def test_dropout_is_active_where_it_drops(record: Record, said: str | None) -> None:
    assert active_dropout(record) == said


def test_a_mask_of_minus_infinity_is_finite_enough() -> None:
    mask = Value(
        path="input",
        shape=(2,),
        dtype="float32",
        device="cpu",
        forward=Reading(statistics=Statistics(count=2, neginf=1, min=0.0, max=0.0, mean=0.0)),
    )
    call = Call(root="a", root_training=False, index=0, started=0, finished=1, inputs=(mask,))
    assert nonfinite(Record(model="Net", layers={"a": Layer(name="a", type="A", calls=(call,))}, forwards=1)) is None
