"""Pull requests that try to change a model unseen, and the verdicts on each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import get_args

from pytest_modelprobe.comparison import Parts
from pytest_modelprobe.files import architecture_digest
from pytest_modelprobe.files.texts import digest_of

Git = Callable[..., str]
"""Runs git; returns what it prints."""

TEST = "tests/test_net.py"
NET = "tests/__modelprobe__/test_net/test_a"
ARCH, PROBE = f"{NET}.arch.json", f"{NET}.probe.json"

MODEL = """\
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(self.act(self.fc(x)))


def test_a(modelprobe, modelprobe_snapshot):
    net = modelprobe.build(Net).eval()
    assert modelprobe.run(net, modelprobe.randn(4, 4)) == modelprobe_snapshot
"""

ALONE = {part: ("== modelprobe_snapshot", f'== modelprobe_snapshot(compare="{part}")') for part in get_args(Parts)}
"""What has a test compare a part alone."""
NOT_RUN = ("modelprobe.run(", "modelprobe.architecture(")

MASKED = [
    ("class Net", """class Masked(nn.Linear):
    def forward(self, x, mask=None):
        return super().forward(x if mask is None else x.masked_fill(mask, 0))


class Net"""),
    ("Linear(4, 2)", "Linear(4, 2); self.fc = Masked(4, 2)"),
    ("self.fc(x)", "self.fc(x, x > 1)"),
]  # fmt: skip
"""What gives the linear layer a mask."""
BY_KEYWORD = ("self.fc(x, x > 1)", "self.fc(x, mask=x > 1)")
GATED = ("self.fc = Masked(4, 2)", "self.fc = Masked(4, 2); nn.init.zeros_(self.fc.bias)")
"""What gives the layer a parameter of zeros, behind which its code may not show."""

MODELS: dict[str, list[tuple[str, str]]] = {
    "as it was": [],
    "wider": [("Linear(4, 2)", "Linear(4, 3)")],
    "of another class": [("Net", "Other")],
    "in another order": [("self.drop(self.act(self.fc(x)))", "self.act(self.fc(self.drop(x)))")],
    "with another rate": [("0.1", "0.5")],
    "frozen": [("Linear(4, 2)", "Linear(4, 2)\n        self.fc.bias.requires_grad_(False)")],
    "scaled": [("return ", "return 3 * ")],
    "trained": [("    assert", "    net.fc.weight.data *= 1.25\n    assert")],
    "structure alone": [ALONE["architecture"]],
    "masked": MASKED,
    "masked, by keyword": [*MASKED, BY_KEYWORD],
    "masked, by keyword, the mask dropped": [*MASKED, ("self.fc(x, x > 1)", "self.fc(x=x)")],
    "masked, by keyword, with another rate": [*MASKED, BY_KEYWORD, ("0.1", "0.5")],
    "masked, by keyword, scaled": [*MASKED, BY_KEYWORD, ("return super()", "return 3 * super()")],
    "gated": [*MASKED, GATED],
    "gated, by keyword": [*MASKED, GATED, BY_KEYWORD],
    "not run": [NOT_RUN],
    "not run, with another rate": [NOT_RUN, ("0.1", "0.5")],
}
"""What an author makes of the model, or of its test, before the snapshots are updated."""


class Files(dict[str, str]):
    """Path → text of a repository.

    Args:
        updated: Name in `MODELS` → the files after ``pytest --snapshot-update``.
        model: The model of which these files are.
    """

    def __init__(self, updated: Mapping[str, Mapping[str, str]], model: str = "as it was") -> None:
        super().__init__(updated[model])
        self.updated = updated

    def edit(self, path: str, *pairs: tuple[str, str]) -> None:
        """Replace text in a file."""
        for before, after in pairs:
            assert before in self[path], before
            self[path] = self[path].replace(before, after)


Edit = Callable[[Files], None]


def _nothing(_: object) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Attack:
    """What a pull request does."""

    what: str
    edit: Edit = _nothing
    """Makes the files of the pull request from those of the base."""
    check: str
    """What ``modelprobe check`` makes of the worst of it, and its class."""
    pytest: str
    """Whether the tests of the pull request pass, in CI."""
    why: str
    before: str = "as it was"
    """The model of the base."""
    base: Edit = _nothing
    """Changes files of the base."""
    git: Callable[[Git], None] = _nothing
    """Does something in git when the pull request, the branch ``change``, is committed."""
    against: str = "main"
    """What ``--base`` names."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in which its tests run."""
    alone: bool = False
    """Whether the exit status of a run of its own is asked for, and not the outcome of the test."""
    harmless: bool = False
    """Whether both may pass, as nothing of the model changes unseen."""


# --- what a pull request can do to files --------------------------------------------------------------------------


def update(model: str) -> Edit:
    """Change the model, and update its snapshot."""
    return lambda now: now.update(now.updated[model])


def change(model: str) -> Edit:
    """Change the model alone."""
    return lambda now: now.update({TEST: now.updated[model][TEST]})


def given(text: str, **declaration: str | None) -> str:
    """Return an architecture with a declaration."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in declaration.items() if value]
    return text.replace('"model":', f'{"".join(lines)}"model":', 1)


def declared(reason: str | None, supersedes: str | None = None) -> Edit:
    """Record a wider model with a reason, for what is in the base unless something else is said."""

    def edit(now: Files) -> None:
        old = json.loads(now[ARCH]).get("supersedes")
        chain = supersedes or " ".join(filter(None, [old, architecture_digest(now[ARCH])]))
        update("wider")(now)
        now[ARCH] = given(now[ARCH], reason=reason, supersedes=chain)

    return edit


def reason_before(base: Files) -> None:
    """Give the base a last change that was declared."""
    base[ARCH] = given(base[ARCH], reason="wider", supersedes="0" * 24)


def in_architecture(*pairs: tuple[str, str]) -> Edit:
    """Edit the structure by hand, and the digest of it that stands in the numbers."""

    def edit(now: Files) -> None:
        old = architecture_digest(now[ARCH])
        now.edit(ARCH, *pairs)
        now[PROBE] = now[PROBE].replace(old, digest_of(json.loads(now[ARCH])))  # also of what cannot be read

    return edit


def in_numbers(*pairs: tuple[str, str]) -> Edit:
    """Edit the numbers by hand."""
    return lambda now: now.edit(PROBE, *pairs)


def of_another_torch(now: Files) -> None:
    """Have the numbers say that another version of torch made them."""
    written = json.loads(now[PROBE])["versions"]["torch"]
    now.edit(PROBE, (json.dumps(written), '"2.5.0"'))


def noise(of: str) -> Edit:
    """Give the output of the linear layer another noise."""

    def edit(now: Files) -> None:
        reading = json.loads(now[PROBE])["layers"]["fc"][">output"][0]
        now.edit(PROBE, (f"{json.dumps(reading[1])},{json.dumps(reading[2])}", f"{json.dumps(reading[1])},{of}"))

    return edit


def of_other_samples(now: Files) -> None:
    """Say that the fingerprints are of other samples: these are not compared."""
    now.edit(PROBE, (json.loads(now[PROBE])["samples"], "0" * 16))


def moved(path: str) -> Edit:
    """Give a snapshot another name."""

    def edit(now: Files) -> None:
        for old in (ARCH, PROBE):
            now[old.replace(NET, path)] = now.pop(old)

    return edit


def named(name: str) -> Edit:
    """Give the test another name, and its snapshot."""

    def edit(now: Files) -> None:
        moved(NET.replace("test_a", name))(now)
        now.edit(TEST, ("test_a", name))

    return edit


def hidden(now: Files) -> None:
    """Put the old files under the name of a device, beside those of another model."""
    now[f"{NET}.cuda.arch.json"], now[f"{NET}.cuda.probe.json"] = now[ARCH], now[PROBE]
    update("wider")(now)


def deleted(now: Files) -> None:
    """Delete the files of the snapshot."""
    del now[ARCH], now[PROBE]


def without_numbers(now: Files) -> None:
    """Keep the structure alone, and have the test compare it."""
    update("structure alone")(now)
    del now[PROBE]


def narrowed(part: str) -> Edit:
    """Have the test compare a part alone, as an update writes it into the numbers."""

    def edit(now: Files) -> None:
        now.edit(TEST, ALONE[part])
        now.edit(PROBE, ('"architecture":', f'"compared": "{part}",\n"architecture":'))

    return edit


def layers_emptied(now: Files) -> None:
    """Leave the numbers of no layer."""
    now[PROBE] = json.dumps({**json.loads(now[PROBE]), "layers": {}})


def responses_emptied(now: Files) -> None:
    """Leave nothing of what each module answers in isolation but what it was given."""
    data = json.loads(now[PROBE])
    emptied = {key: {"recipes": one["recipes"], "handed": []} for key, one in data["responses"].items()}
    now[PROBE] = json.dumps({**data, "responses": emptied})


def unanswered(now: Files) -> None:
    """Leave nothing of what a module does alone."""
    data = json.loads(now[PROBE])
    for line in data["layers"].values():
        line.pop("alone", None)
    now[PROBE] = json.dumps({**data, "responses": {}})


def in_file(path: str, text: str) -> Edit:
    """Write a file."""
    return lambda now: now.update({path: text})


def both(*edits: Edit) -> Edit:
    """Do several things."""
    return lambda now: [edit(now) for edit in edits] and None


def in_test(*pairs: tuple[str, str]) -> Edit:
    """Edit the test."""
    return lambda now: now.edit(TEST, *pairs)


def swallowed(now: Files) -> None:
    """Swallow the failure of the comparison."""
    now.edit(TEST, ("    assert", "    try:\n        assert"))
    now[TEST] += "    except AssertionError:\n        pass\n"


# --- what it can do in git ----------------------------------------------------------------------------------------


def run(*commands: str) -> Callable[[Git], None]:
    """Run commands of git."""
    return lambda git: [git(*command.split()) for command in commands] and None


def crosswise(git: Git) -> None:
    """Have the base and the pull request merged into each other, after a change that was reviewed in the base."""

    def commit(tree: str, *parents: str) -> str:
        return git("commit-tree", f"{tree}^{{tree}}", "-m", "a change", *(f"-p{parent}" for parent in parents))

    first = commit("change")
    reviewed, own = commit("main", first), commit("change", first)
    git("branch", "-f", "main", commit("main", reviewed, own))
    git("reset", "-q", "--soft", commit("change", own, reviewed))


ONLY_DOCS = "sparse-checkout set docs"
IN_CI = '"--snapshot-update --modelprobe-allow-update-in-ci"'
UPDATE_HERE = """\
import os

os.environ.pop("CI")


def pytest_configure(config):
    config.option.update_snapshots = True
"""
MARK_ALL = """\
import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.modelprobe(compare="behavior"))
"""
MARKED = ("def test_a", '@__import__("pytest").mark.modelprobe(compare="behavior")\ndef test_a')


NOT_COMPARED = in_test((" == modelprobe_snapshot", ""))
SKIPPED = in_test(
    ("    assert ", "    same = "),
    ("== modelprobe_snapshot\n", '== modelprobe_snapshot\n    same or __import__("pytest").skip("flaky")\n'),
)
BARE = in_test(("    assert ", "    "), ("== modelprobe_snapshot", "!= modelprobe_snapshot"))


def ini(line: str) -> Edit:
    """Write an ini file."""
    return in_file("pyproject.toml", f"[tool.pytest.ini_options]\n{line}\n")


FAMILIES: dict[str, list[Attack]] = {
    "Names of files": [
        Attack(what="another model, and the old text under the name of a device beside it", edit=hidden,
               check="denied: checkpoint", pytest="passed",
               why="each file is compared with its own past, and with nothing twice"),
        Attack(what="a rename", edit=named("test_b"), check="warning: renamed", pytest="passed",
               why="its content is the same"),
        Attack(what="a rename by the case of a letter", edit=named("test_A"), check="warning: renamed",
               pytest="passed", why="names are compared letter by letter, whatever a file system makes of them"),
        Attack(what="a rename that carries another model", edit=both(update("wider"), named("test_b")),
               check="denied: removed", pytest="passed",
               why="with other content it is no rename: one is gone, one is new"),
        Attack(what="both files deleted", edit=deleted, check="denied: removed", pytest="failed",
               why="nothing watches the model any more"),
        Attack(what="both files deleted, and their test", edit=both(deleted, lambda now: now.pop(TEST) and None),
               check="denied: removed", pytest="no tests", why="nothing watches the model any more"),
        Attack(what="both files moved to where no snapshot belongs", edit=moved("tests/test_a"),
               check="denied: removed", pytest="failed", why="files outside `__modelprobe__` are no snapshots"),
        Attack(what="a copy beside it", check="warning: new", pytest="passed",
               edit=lambda now: now.update({k.replace("test_a", "test_b"): v for k, v in now.items() if k != TEST}),
               why="it takes nothing away"),
    ],
    "Reasons": [
        Attack(what="another model without a reason", edit=update("wider"), check="denied: checkpoint",
               pytest="passed", why="it needs one"),
        Attack(what="a reason of spaces", edit=declared("  "), check="denied: checkpoint", pytest="passed",
               why="a reason needs a word"),
        Attack(what="a reason of letters without a look", edit=declared("\u200b\u3164"), check="denied: checkpoint",
               pytest="passed", why="a reason needs a word that can be seen"),
        Attack(what="a digest without a reason", edit=declared(None), check="denied: checkpoint", pytest="passed",
               why="the digest is the tool's, the reason is the author's"),
        Attack(what="a reason for another architecture than that of the base", edit=declared("wider", "0" * 24),
               check="denied: checkpoint", pytest="passed",
               why="the base does not have the architecture that it supersedes"),
        Attack(what="the last reason again, its chain made longer", edit=declared("wider"), base=reason_before,
               check="denied: checkpoint", pytest="passed", why="it was given for an earlier change"),
        Attack(what="the last reason again with other signs", edit=declared("Wi\u200bder!"), base=reason_before,
               check="denied: checkpoint", pytest="passed", why="its words are the same"),
        Attack(what="a reason that means nothing", edit=declared("asdf"), check="declared: checkpoint",
               pytest="passed", why="reviewers judge whether it is a good one: it is shown to them"),
    ],
    "Structure": [
        Attack(what="two layers called the other way round", edit=update("in another order"),
               check="denied: structure", pytest="passed", why="the order of calls is compared"),
        Attack(what="the class of the model", edit=update("of another class"), check="denied: structure",
               pytest="passed", why="it is compared"),
        Attack(what="a layer that is no leaf any more", check="denied: structure", pytest="passed",
               edit=in_architecture(('"Linear"', '"Linear", "leaf": false')), why="it is compared"),
        Attack(what="a functional call in the place of a layer", check="denied: structure", pytest="passed",
               edit=in_architecture(('"ReLU"', '"ReLU", "functional": true')), why="it is compared"),
        Attack(what="the class of the model, beside a frozen parameter",
               edit=both(update("frozen"), in_architecture(('"model": "Net"', '"model": "Other"'))),
               check="denied: structure", pytest="passed", why="a warning hides no denial"),
        Attack(what="another attribute", edit=update("with another rate"), check="denied: structure",
               pytest="passed", why="it is compared"),
        Attack(what="a frozen parameter", edit=update("frozen"), check="warning: trainable", pytest="passed",
               why="checkpoints load as before"),
        Attack(what="an argument by keyword that was given by position", before="masked",
               edit=update("masked, by keyword"), check="allowed: calls", pytest="passed", harmless=True,
               why="every value is the same; it is named in the table"),
        Attack(what="the same, and the argument dropped", before="masked", check="denied: structure", pytest="passed",
               edit=update("masked, by keyword, the mask dropped"), why="what a layer is given is compared"),
        Attack(what="the same, and another attribute", before="masked", check="denied: structure", pytest="passed",
               edit=update("masked, by keyword, with another rate"), why="a note beside it hides no denial"),
        Attack(what="the same, and another output of the layer", before="masked", check="warning: behavior",
               edit=update("masked, by keyword, scaled"), pytest="passed", why="values are compared all the same"),
        Attack(what="the same, where a parameter of the layer is zero", before="gated", check="warning: behavior",
               edit=update("gated, by keyword"), pytest="passed",
               why="its code may not show, and what it does alone cannot be compared"),
        Attack(what="an attribute of a class of torch's that is not written any more, and another one in the model",
               edit=both(change("with another rate"), in_architecture(('"p": 0.1, ', ""))), check="allowed: format",
               pytest="failed", why="the same version of torch wrote the file, and its class has the attribute"),
        Attack(what="an attribute that is not written any more, and the file is said to be of another version of torch",
               edit=both(in_architecture(('"p": 0.1, ', "")), of_another_torch), check="allowed: format",
               pytest="passed", harmless=True,
               why="attributes come and go with versions of libraries; it is named in the table"),
    ],
    "Numbers": [
        Attack(what="another output", edit=update("scaled"), check="warning: behavior", pytest="passed",
               why="the test itself fails without it"),
        Attack(what="other weights", edit=update("trained"), check="warning: weights", pytest="passed",
               why="a model that was trained again"),
        Attack(what="noise of a billion", edit=noise("1e9"), check="warning: behavior", pytest="passed",
               why="more than a hundredth is not repeatable, and excuses nothing"),
        Attack(what="noise that grew tenfold", edit=noise("0.005"), check="warning: behavior", pytest="passed",
               why="changes that failed before would pass"),
        Attack(what="noise that was not measured", edit=in_numbers(('"noise": "measured",\n', "")),
               check="warning: behavior", pytest="passed", why="what is not measured has the widest tolerance"),
        Attack(what="other samples, of which its fingerprints are not", edit=of_other_samples,
               check="warning: behavior", pytest="failed", why="no input of the model says so, the rest is not known"),
        Attack(what="the numbers of no layer", edit=layers_emptied, check="error", pytest="failed",
               why="a file of numbers must have some"),
        Attack(what="the numbers deleted", edit=lambda now: now.pop(PROBE) and None, check="error", pytest="failed",
               why="the structure says that there are some"),
        Attack(what="the structure alone kept", edit=without_numbers, check="denied: removed", pytest="passed",
               why="its numbers are gone"),
        Attack(what="nothing of what its modules do alone", edit=unanswered, check="denied: removed", pytest="passed",
               why="a test does not compare what the file does not say"),
        Attack(what="what its modules were given alone, and nothing that they answered", edit=responses_emptied,
               check="denied: removed", pytest="passed", why="as above"),
        Attack(what="that dropout answers otherwise in training", edit=in_numbers((',"mode_matters":true', "")),
               check="warning: behavior", pytest="passed", why="a test asks it where a layer came, went or changed"),
        Attack(what="numbers that the test does not compare any more", edit=narrowed("architecture"),
               check="denied: removed", pytest="passed",
               why="that is recorded beside the numbers, and a test that compares less fails until it is"),
        Attack(what="a structure that the test does not compare any more", edit=narrowed("behavior"),
               check="denied: removed", pytest="passed",
               why="as above: a line in an ini file cannot change it unseen"),
        Attack(what="the numbers of another structure", check="error", pytest="failed",
               edit=lambda now: now.update({ARCH: now.updated["wider"][ARCH]}),
               why="they name the structure that they belong to"),
    ],
    "Files that cannot be read": [
        Attack(what="a schema of the future", edit=in_architecture(('"modelprobe": 6', '"modelprobe": 9')),
               check="error", pytest="failed", why="a newer version wrote it"),
        Attack(what="an older schema", edit=in_architecture(('"modelprobe": 6', '"modelprobe": 5')),
               check="error", pytest="failed", why="an older version wrote it, and an update writes it anew"),
        Attack(what="a field that there is not", edit=in_architecture(('"seed": 0', '"color": 0')), check="error",
               pytest="failed", why="a field that is not known is refused"),
        Attack(what="a million brackets", edit=in_file(ARCH, "[" * 1_000_000), check="error", pytest="failed",
               why="it is refused in one sentence"),
        Attack(what="65 MB", edit=lambda now: now.update({ARCH: " " * (65 << 20)}), check="error", pytest="failed",
               why="its size is checked first"),
    ],
    "Git": [
        Attack(what="another model, and a tag with the name of the base", edit=update("wider"), check="error",
               pytest="passed", git=run("tag main change"), why="a name of two commits is ambiguous"),
        Attack(what="another model, on a branch with the name of the remote base", edit=update("wider"),
               check="error", pytest="passed", against="origin/main",
               git=run("update-ref refs/remotes/origin/main main", "branch origin/main change"),
               why="a name of two commits is ambiguous"),
        Attack(what="another model, and an object that replaces the base", edit=update("wider"),
               check="denied: checkpoint", pytest="passed", git=run("replace main change"),
               why="objects are read as they are"),
        Attack(what="a reviewed change undone, after merges in both directions", before="wider",
               edit=update("as it was"), check="denied: checkpoint", pytest="passed", git=crosswise,
               why="with several merge bases the base itself is compared with"),
        Attack(what="nothing, after merges in both directions", check="no change", pytest="passed", git=crosswise,
               harmless=True, why="a merge keeps what both have"),
        Attack(what="another model, where a sparse checkout leaves it out", edit=update("wider"),
               check="denied: checkpoint", pytest="passed", git=run(ONLY_DOCS), why="it is read from the index"),
        Attack(what="nothing, where a sparse checkout leaves the snapshot out", check="no change", pytest="passed",
               git=run(ONLY_DOCS), harmless=True, why="it is read from the index, and is not deleted"),
    ],
    "How the tests are run": [
        Attack(what="another model, and its snapshot left as it is", edit=change("wider"), check="no change",
               pytest="failed", why="the test compares with the files; they did not change"),
        Attack(what="the same, with the failure swallowed in the test", edit=both(change("wider"), swallowed),
               check="no change", pytest="failed", alone=True,
               why="a comparison that failed fails the run, whatever the test does with it"),
        Attack(what="the same, and an ini file with `-p no:modelprobe-snapshots`", check="no change", pytest="failed",
               edit=both(change("wider"), swallowed, ini("addopts = '-p no:modelprobe-snapshots'")), alone=True,
               why="no part of the plugin can be taken away alone"),
        Attack(what="another model, and a test that skips itself because of it", edit=both(change("wider"), SKIPPED),
               check="no change", pytest="failed", alone=True, why="as above: the comparison failed"),
        Attack(what="another model, and a bare `record != modelprobe_snapshot`", edit=both(change("wider"), BARE),
               check="no change", pytest="failed", alone=True, why="nobody looks at what comes of it"),
        Attack(what="another model, and `addopts` that let unused files be, for a test that compares nothing",
               edit=both(change("wider"), NOT_COMPARED, ini("addopts = '--snapshot-warn-unused'")), alone=True,
               check="no change", pytest="failed", why="in CI the option counts on the command line alone"),
        Attack(what="another model, in a process that is said to be rank 1 of 2", edit=change("wider"),
               check="no change", pytest="failed", alone=True, why="a rank is believed of its process group alone",
               environment={"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2"}),
        *(
            Attack(what=f"another model, and {what}", edit=both(change("wider"), edit), check="no change",
                   pytest="failed", alone=True, why=why)
            for what, edit, why in [
                ("`addopts` that update snapshots in CI", ini(f"addopts = {IN_CI}"),
                 "the permission counts on the command line alone"),
                ("a `conftest.py` that updates, and takes CI away", in_file("conftest.py", UPDATE_HERE),
                 "what `CI` says is read before any `conftest.py`"),
            ]
        ),
        *(
            Attack(what=f"another rate, and {what} that compares the behavior of a structure without numbers",
                   before="not run", edit=both(change("not run, with another rate"), edit), environment=environment,
                   check="no change", pytest="failed", alone=True, why="a comparison of nothing fails")
            for what, edit, environment in [
                ("`addopts`", ini('addopts = "--modelprobe-compare=behavior"'), {}),
                ("`PYTEST_ADDOPTS`", _nothing, {"PYTEST_ADDOPTS": "--modelprobe-compare=behavior"}),
                ("an ini file", ini('modelprobe_compare = "behavior"'), {}),
                ("a `conftest.py`", in_file("conftest.py", MARK_ALL), {}),
                ("an argument", lambda now: now.edit(TEST, ALONE["behavior"]), {}),
                ("a marker", lambda now: now.edit(TEST, MARKED), {}),
            ]
        ),
    ],
}  # fmt: skip
"""The page of the gate: the pull requests that were tried."""
