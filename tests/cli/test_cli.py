"""The command `modelprobe`, on scratch repositories with branches, merges and clones as they are in CI."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import shlex
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_modelprobe.cli import GIT_ATTRIBUTES, main
from pytest_modelprobe.files import StoredSnapshot, architecture_digest, decode, encode
from pytest_modelprobe.gate import snapshot_sources
from pytest_modelprobe.gate.verdict import superseded
from pytest_modelprobe.record import Call, Layer, Parameter, Reading, Record, Statistics, Value

PATH = "tests/__modelprobe__/test_net/test_a"

Git = Callable[..., str]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """Runs git in `tmp_path/here`, an empty repository on main, which is also the current folder."""
    for name in [name for name in os.environ if name.startswith("GIT")]:
        monkeypatch.delenv(name)
    who = {"GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@example.org"}
    who |= {"GIT_COMMITTER_NAME": "A", "GIT_COMMITTER_EMAIL": "a@example.org"}
    for name, to in {**who, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}.items():
        monkeypatch.setenv(name, to)
    monkeypatch.setenv("GIT_AUTHOR_DATE", "2026-01-31T12:00:00")

    def run(*arguments: str, at: str = "here") -> str:
        done = subprocess.run(["git", *arguments], cwd=tmp_path / at, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run("init", "-q", "-b", "main")
    return run


@pytest.fixture
def modelprobe(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command; returns its exit code, what it printed, and what it said of errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def net(width: int = 2, act: str = "ReLU", mean: float = 1.0) -> Record:
    weight = Parameter(name="weight", shape=(width, 4), dtype="float32", device="cpu", requires_grad=True)
    statistics = Statistics(count=8, min=mean - 1, max=mean + 1, mean=mean, deviations=8.0)
    reading = Reading(statistics=statistics, fingerprint=(mean, *[0.0] * 15))
    output = Value(path="output", shape=(2, 4), dtype="float32", device="cpu", tensor=0, forward=reading)
    call = Call(root="(root)", root_training=False, index=0, started=0, finished=1, outputs=(output,))
    layers = [
        Layer(name="(root)", type="Net", leaf=False, calls=(call,)),
        Layer(name="fc", type="torch.nn.modules.linear.Linear", parameters=(weight,)),
        Layer(name="act", type=f"torch.nn.modules.activation.{act}"),
    ]
    return Record(model="Net", layers={layer.name: layer for layer in layers}, forwards=1, seed=0)


def calling(path: str) -> Record:
    """Return a record of a model that gives its linear layer the input by that name."""
    found = net()
    (whole,) = found.layers["(root)"].calls
    call = dataclasses.replace(
        whole, started=1, finished=2, inputs=(dataclasses.replace(whole.outputs[0], path=path, tensor=1),)
    )
    whole = dataclasses.replace(whole, finished=3)
    layers = {"(root)": dataclasses.replace(found.layers["(root)"], calls=(whole,))}
    layers["fc"] = dataclasses.replace(found.layers["fc"], calls=(call,), parameters=())
    return dataclasses.replace(found, layers={**found.layers, **layers})


@pytest.fixture
def by_keyword(git: Git) -> None:
    """A branch on which the linear layer gets its input by keyword, and nothing else changed."""
    write(calling("input"))
    commit(git, "Record the net")
    git("switch", "-q", "-c", "branch")
    write(calling("x"))
    commit(git, "Give the input by keyword")


def write(record: Record, path: str = PATH, **declaration: str) -> str:
    """Write a snapshot as the fixture does; returns the digest of its architecture."""
    texts = encode(record, **declaration)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{path}.arch.json").write_text(texts.architecture, "utf-8", newline="")
    if texts.numbers is not None:
        Path(f"{path}.probe.json").write_text(texts.numbers, "utf-8", newline="")
    return architecture_digest(texts.architecture)


def commit(git: Git, message: str = "a change") -> str:
    git("add", "-A")
    git("commit", "-q", "--allow-empty", "-m", message)
    return git("rev-parse", "HEAD")


@pytest.fixture
def branch(git: Git) -> str:
    """A branch from main, which has one snapshot; gives the digest of its architecture."""
    digest = write(net())
    commit(git, "Record the net")
    git("switch", "-q", "-c", "branch")
    return digest


class HeldRecords:
    """How many records were read from files, and how many of them were in memory at once."""

    def __init__(self) -> None:
        self._records: list[weakref.ref[Record]] = []
        self.most = 0

    @property
    def read(self) -> int:
        return len(self._records)

    def decode(self, *texts: str | None, **where: str) -> StoredSnapshot:
        found = decode(*texts, **where)
        self._records.append(weakref.ref(found.record))
        self.most = max(self.most, sum(record() is not None for record in self._records))
        return found


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldRecords]:
    """Counts the records that are held, without the garbage collector."""
    records = HeldRecords()
    monkeypatch.setattr(snapshot_sources, "decode", records.decode)
    gc.disable()
    yield records
    gc.enable()


# --- check --------------------------------------------------------------------------------------------------------


def test_a_change_without_a_declaration_is_denied(branch: str, modelprobe: Run) -> None:
    write(net(3))
    code, out, _ = modelprobe("check", "--base", "main")
    assert code == 1
    assert out.startswith("Net: checkpoint change is not declared; 1 model changed, 0 unchanged\n")
    assert "1 key reshaped: old checkpoints will not load; +4 parameters (+50 %)" in out


def test_a_declared_change_passes(branch: str, modelprobe: Run) -> None:
    write(net(3), reason="wider", supersedes=branch)
    code, out, _ = modelprobe("check", "--base", "main")
    assert (code, out.splitlines()[-1]) == (0, "Declared for Net: wider")


def test_a_branch_of_several_updates_is_declared_by_its_last(git: Git, branch: str, modelprobe: Run) -> None:
    between = write(net(3), supersedes=superseded(None, branch, "between"))
    commit(git)
    write(net(5), reason="wider still", supersedes=superseded(branch, between, "now"))
    assert modelprobe("check", "--base", "main")[0] == 0


@pytest.fixture
def crosswise(git: Git, branch: str) -> None:
    """Two branches that were merged into each other, of which main has another snapshot by now."""
    commit(git, "Begin the branch")
    git("switch", "-q", "main")
    write(net(3))
    commit(git, "Widen the net")
    git("branch", "wide")
    git("merge", "-q", "--no-ff", "-m", "merge", "branch")
    git("switch", "-q", "branch")
    git("merge", "-q", "--no-ff", "-m", "merge", "wide")


@pytest.mark.usefixtures("crosswise")
def test_a_reviewed_snapshot_that_is_put_back_is_denied_whatever_the_merge_bases_have(
    git: Git, modelprobe: Run
) -> None:
    write(net())
    commit(git, "Narrow the net")
    code, out, err = modelprobe("check", "--base", "main")
    assert (code, out.splitlines()[0]) == (
        1, "Net: checkpoint change is not declared; 1 model changed, 0 unchanged",
    )  # fmt: skip
    assert err == (
        "modelprobe: main and HEAD have 2 merge bases, so main itself is compared with: "
        "merge it to leave out what changed there alone\n"
    )


def test_a_link_outside_of_a_sparse_checkout_is_refused(git: Git, branch: str, modelprobe: Run) -> None:
    Path(f"{PATH}.arch.json").unlink()
    Path(f"{PATH}.arch.json").symlink_to("/etc/passwd")
    commit(git)
    git("sparse-checkout", "set", "lib")
    assert modelprobe("check", "--base", "main")[0] == 2


def test_calls_that_are_written_otherwise_are_allowed_and_named(by_keyword: None, modelprobe: Run) -> None:
    code, out, _ = modelprobe("check", "--base", "main")
    assert (code, out.splitlines()[0]) == (0, "nothing to object: 1 model changed, 0 unchanged")
    assert out.endswith("fc: input renamed to x; every value is the same\n")


def test_to_deny_interface_is_to_deny_calls_unless_these_have_a_level(by_keyword: None, modelprobe: Run) -> None:
    denied, out, _ = modelprobe("check", "--base", "main", "--deny", "interface")
    assert (denied, out.splitlines()[0]) == (1, "Net: calls change is not declared; 1 model changed, 0 unchanged")
    assert modelprobe("check", "--base", "main", "--deny", "calls")[0] == 1
    assert modelprobe("check", "--base", "main", "--deny", "interface", "--warn", "calls")[0] == 0
    assert modelprobe("check", "--base", "main", "--warn", "interface")[0] == 0


def test_a_class_has_one_level(branch: str, modelprobe: Run) -> None:
    assert modelprobe("check", "--base", "main", "--deny", "new", "--warn", "new") == (
        2, "", "modelprobe: new is given two levels: choose one of deny, warn, allow\n",
    )  # fmt: skip


def test_a_deleted_snapshot_is_declared_by_a_file_in_its_place(git: Git, branch: str, modelprobe: Run) -> None:
    git("rm", "-q", "-r", "tests")
    code, out, _ = modelprobe("check", "--base", "main")
    assert code == 1
    base = git("rev-parse", "main").strip()[:12]
    assert out.splitlines()[-1] == f'  modelprobe declare "..." --base {base}'
    assert modelprobe("declare", "not used any more", "--base", base) == (0, f"declared in {PATH}.removed.json\n", "")
    for _ in ("in the working tree", "committed"):
        code, out, _ = modelprobe("check", "--base", "main")
        assert (code, out.splitlines()[-1]) == (0, "Declared for Net: not used any more")
        commit(git)


def test_the_reason_for_a_deletion_holds_once(git: Git, branch: str, modelprobe: Run) -> None:
    git("switch", "-q", "main")
    git("rm", "-q", "-r", "tests")
    modelprobe("declare", "not used any more")
    commit(git)
    write(net())
    commit(git, "Record it again")
    git("switch", "-q", "-c", "later")
    git("rm", "-q", f"{PATH}.arch.json", f"{PATH}.probe.json")
    assert modelprobe("check", "--base", "main")[0] == 1
    modelprobe("declare", "Not used, any more!")
    assert modelprobe("check", "--base", "main")[0] == 1
    modelprobe("declare", "replaced by another net")
    assert modelprobe("check", "--base", "main")[0] == 0


def test_a_deletion_on_one_device_is_declared_alone(git: Git, branch: str, modelprobe: Run) -> None:
    git("switch", "-q", "main")
    Path(f"{PATH}.cuda.probe.json").write_bytes(Path(f"{PATH}.probe.json").read_bytes())
    commit(git)
    git("switch", "-q", "-c", "later")
    git("rm", "-q", f"{PATH}.cuda.probe.json")
    assert modelprobe("check", "--base", "main")[0] == 1
    assert modelprobe("declare", "no GPU any more")[0] == 0
    assert modelprobe("check", "--base", "main")[0] == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"modelprobe": 6, "removed": {}}', "gives no reason"),
        ('{"modelprobe": 99, "removed": {}, "reason": "x"}', "is of schema 99, and this pytest-modelprobe reads 6"),
    ],
)
def test_a_reason_for_a_deletion_that_cannot_be_read_is_an_error(
    branch: str, modelprobe: Run, text: str, said: str
) -> None:
    Path(f"{PATH}.removed.json").write_text(text, "utf-8")
    code, _, err = modelprobe("check", "--base", "main")
    assert code == 2
    assert f"{PATH}.removed.json {said}" in err


def test_a_reason_for_a_deletion_is_not_written_through_a_link(
    git: Git, branch: str, modelprobe: Run, tmp_path: Path
) -> None:
    git("switch", "-q", "main")
    target = tmp_path / "outside"
    Path(f"{PATH}.removed.json").symlink_to(target)
    commit(git)
    git("switch", "-q", "-c", "later")
    git("rm", "-q", f"{PATH}.arch.json", f"{PATH}.probe.json")
    assert modelprobe("declare", "not used any more")[0] == 2
    assert not target.exists()


def test_a_reason_may_hold_what_is_no_text(git: Git, branch: str, modelprobe: Run) -> None:
    write(net(width=3))
    assert modelprobe("declare", "why \ud800", "--base", "main") == (0, f"declared in {PATH}.arch.json\n", "")
    code, out, err = modelprobe("check", "--base", "main", "--format", "github")
    assert (code, err) == (0, "")
    out.encode()


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are text there")
def test_a_path_may_hold_what_is_no_text(git: Git, branch: str, modelprobe: Run) -> None:
    path = f"{PATH}\udced\udca0\udc80"  # a surrogate as bytes
    write(net(), path)
    commit(git)
    write(net(width=3), path)
    assert modelprobe("check", "--base", "HEAD")[0] == 1
    assert modelprobe("declare", "wider") == (0, f"declared in {PATH}\\udced\\udca0\\udc80.arch.json\n", "")
    code, out, err = modelprobe("check", "--base", "HEAD", "--format", "json")
    assert (code, err) == (0, "")
    out.encode()


def test_only_what_is_asked_for_is_checked(branch: str, modelprobe: Run) -> None:
    write(net(), "other/__modelprobe__/test_other/test_b")
    write(net(3))
    code, out, _ = modelprobe("check", "other", "--base", "main")
    assert code == 0
    assert "1 model changed, 0 unchanged" in out


@pytest.mark.parametrize("path", [f"{PATH}.probe.json", "tests"])
def test_a_path_may_be_either_file_or_a_folder(branch: str, modelprobe: Run, path: str) -> None:
    write(net(3))
    assert modelprobe("check", path, "--base", "main")[0] == 1


def test_a_link_to_snapshots_that_came_or_leads_elsewhere_is_refused(git: Git, branch: str, modelprobe: Run) -> None:
    path = "other/__modelprobe__"
    link = Path(path)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(Path("tests/__modelprobe__").absolute())
    said = f"modelprobe: {path} is a symbolic link, behind which no change is seen: replace it by the files\n"
    assert modelprobe("check", "--base", "main") == (2, "", said)
    commit(git)
    assert modelprobe("check", "--base", "HEAD")[0] == 0
    link.unlink()
    link.symlink_to("elsewhere")
    assert modelprobe("check", "--base", "HEAD") == (2, "", said)


# --- the way out that a check prints ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--deny", "behavior")])
def test_the_command_that_a_denial_prints_declares_it(
    git: Git, branch: str, modelprobe: Run, options: tuple[str, ...]
) -> None:
    write(net(mean=3.0) if options else net(3))
    base = git("rev-parse", "--short=12", "main")
    code, out, _ = modelprobe("check", "--base", "main", *options)
    denied = "".join(f" {option}" for option in options)
    assert (code, out.splitlines()[-1]) == (1, f'  modelprobe declare "..." --base {base}{denied}')
    assert modelprobe(*shlex.split(out.splitlines()[-1].replace("...", "meant"))[1:]) == (
        0, f"declared in {PATH}.arch.json\n", "",
    )  # fmt: skip
    code, out, _ = modelprobe("check", "--base", "main", *options)
    assert (code, out.splitlines()[-1]) == (0, "Declared for Net: meant")


# --- check in GitHub Actions --------------------------------------------------------------------------------------


def in_actions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, event: object) -> None:
    path = tmp_path / "event.json"
    path.write_text(json.dumps(event), "utf-8")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_EVENT_NAME", name)
    monkeypatch.setenv("GITHUB_EVENT_PATH", str(path))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))


def steps_of(workflow: Path, job: str) -> list[str]:
    """Return the commands of one job of a workflow."""
    jobs = re.split(r"^  (?=[a-z-]+:$)", workflow.read_text("utf-8").partition("\njobs:\n")[2], flags=re.MULTILINE)
    (text,) = [text for text in jobs if text.startswith(f"{job}:")]
    return re.findall(r"^ +- run: (.*)$", text, re.MULTILINE)


ROOT = Path(__file__).parents[2]
WORKFLOWS = [
    (ROOT / "examples/github/modelprobe.yml", "changes-are-declared"),
    (ROOT / ".github/workflows/models.yml", "declared"),
]


@pytest.mark.parametrize(("workflow", "job"), WORKFLOWS, ids=["example", "ours"])
@pytest.mark.parametrize(("declared", "code"), [(True, 0), (False, 1)], ids=["declared", "not"])
def test_the_workflows_check_a_pull_request(
    git: Git, branch: str, modelprobe: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    workflow: Path, job: str, declared: bool, code: int,
) -> None:  # fmt: skip
    write(net(3), **({"reason": "wider", "supersedes": branch} if declared else {}))
    head = commit(git)
    git("switch", "-q", "--detach", "main")
    git("merge", "-q", "--no-ff", "-m", "merge", "branch")
    base = git("rev-parse", "main")
    in_actions(monkeypatch, tmp_path, "pull_request", {"pull_request": {"base": {"sha": base}, "head": {"sha": head}}})
    install, *steps = steps_of(workflow, job)
    assert install.startswith("pip install --no-deps ")
    codes = []
    for step in steps:
        command, *arguments = shlex.split(step)
        assert command == "modelprobe"
        codes.append(modelprobe(*arguments)[0])
    assert codes == [code]


@pytest.mark.parametrize("workflow", [workflow for workflow, _ in WORKFLOWS], ids=["example", "ours"])
def test_the_workflows_are_short_and_have_no_rights(workflow: Path) -> None:
    text = workflow.read_text("utf-8")
    jobs = re.split(r"^  (?=[a-z-]+:$)", text.partition("\njobs:\n")[2], flags=re.MULTILINE)[1:]
    assert all(len(job.rstrip().splitlines()) <= 25 for job in jobs)
    assert "permissions:\n  contents: read\n" in text
    assert "pull_request_target" not in text
    assert "secrets" not in text


def clone(git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """Clone the merge of a pull request as `actions/checkout` does, and go there."""
    head = git("rev-parse", "branch")
    base = git("rev-parse", "main")
    git("switch", "-q", "-c", "merge", "main")
    git("merge", "-q", "--no-ff", "-m", "merge", "branch")
    source = (tmp_path / "here").as_uri()
    git("clone", "-q", "--depth", str(depth), "--branch", "merge", source, str(tmp_path / "clone"))
    monkeypatch.chdir(tmp_path / "clone")
    in_actions(monkeypatch, tmp_path, "pull_request", {"pull_request": {"base": {"sha": base}, "head": {"sha": head}}})


def test_a_clone_of_depth_2_is_enough(
    git: Git, branch: str, modelprobe: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(net(3), reason="wider", supersedes=branch)
    commit(git)
    clone(git, tmp_path, monkeypatch, depth=2)
    assert modelprobe("check")[0] == 0


def test_a_clone_of_depth_1_cannot_be_checked(
    git: Git, branch: str, modelprobe: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(net(3))
    commit(git)
    clone(git, tmp_path, monkeypatch, depth=1)
    code, out, err = modelprobe("check", "--format", "github")
    said = "what the pull request is merged into is not in this clone: fetch-depth: 2 in the workflow's checkout"
    assert (code, err) == (2, f"modelprobe: {said}\n")
    assert out.startswith("::error title=modelprobe could not complete::what the pull request")


def test_outside_of_actions_the_base_has_to_be_named(branch: str, modelprobe: Run) -> None:
    assert modelprobe("check") == (2, "", "modelprobe: name what to compare with: --base origin/main\n")


def test_the_summary_of_the_step_is_written(
    branch: str, modelprobe: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(net(3))
    in_actions(monkeypatch, tmp_path, "push", {})
    code, out, _ = modelprobe("check", "--base", "main", "--format", "github")
    assert code == 1
    assert (tmp_path / "summary.md").read_text("utf-8").startswith("### modelprobe: Net: checkpoint change")
    assert out.startswith("::stop-commands::")
    assert out.splitlines()[-1].startswith(f"::error file={PATH}.arch.json,line=")


# --- diff ---------------------------------------------------------------------------------------------------------


def test_a_diff_names_the_cause(modelprobe: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(net(), "old/__modelprobe__/m/t")
    write(net(act="GELU"), "new/__modelprobe__/m/t")
    code, out, _ = modelprobe("diff", "old/__modelprobe__/m/t.arch.json", "new/__modelprobe__/m/t.probe.json")
    assert code == 1
    assert "same function; written otherwise in 1 place: act: ReLU → GELU" in out


def test_a_diff_has_the_calls_that_are_written_otherwise(by_keyword: None, modelprobe: Run) -> None:
    code, out, _ = modelprobe("diff", "--base", "main")
    assert code == 1
    assert (
        out
        == f"""\
Net ({PATH}.arch.json)
same function; written otherwise in 1 place: fc: input renamed to x

written otherwise        layers
fc: input renamed to x        1
"""
    )
    _, out, _ = modelprobe("diff", "--base", "main", "--format", "markdown")
    assert "fc: input renamed to x        1\n```\n" in out
    _, out, _ = modelprobe("diff", "--base", "main", "--format", "json")
    (change,) = json.loads(out)["changes"]
    assert [finding["class"] for finding in change["findings"]] == ["calls"]
    assert change["causes"] == []
    assert change["notes"] == [{"kind": "architecture", "layer": "fc", "said": "fc: input renamed to x"}]


def test_folders_are_compared_by_the_names_in_them(
    modelprobe: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, record in {"old": net(), "new": net(3)}.items():
        write(record, f"{folder}/__modelprobe__/m/t")
        write(net(), f"{folder}/__modelprobe__/m/same")
    code, out, _ = modelprobe("diff", "old", "new", "--format", "json")
    data = json.loads(out)
    assert (code, data["unchanged"], [c["snapshot"] for c in data["changes"]]) == (
        1, 1, ["new/__modelprobe__/m/t.arch.json"],
    )  # fmt: skip


def test_a_diff_may_be_of_two_revisions(git: Git, branch: str, modelprobe: Run) -> None:
    write(net(act="GELU"))
    commit(git)
    assert modelprobe("diff", f"main:{PATH}.arch.json", "branch:tests")[0] == 1
    assert modelprobe("diff", f"branch:{PATH}", PATH)[0] == 0


# --- show ---------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_shown_as_a_table(branch: str, modelprobe: Run) -> None:
    code, out, _ = modelprobe("show", PATH)
    assert code == 0
    assert out == (
        "Net: 3 layers, 8 parameters; 1 forward on cpu, no backward\n"
        "\n"
        "layer    type     parameters   calls   output   mean   std   min   max   zeros   dead units\n"
        "(root)   Net               -       1   (2, 4)      1     1     0     2      0%            -\n"
        "fc       Linear            8       0   -           -     -     -     -       -            -\n"
    )


def test_a_snapshot_is_shown_as_it_was(git: Git, branch: str, modelprobe: Run) -> None:
    write(net(3))
    assert "12 parameters" in modelprobe("show", PATH)[1]
    assert "8 parameters" in modelprobe("show", f"main:{PATH}.arch.json")[1]


def test_layers_are_chosen_by_globs(branch: str, modelprobe: Run) -> None:
    data = json.loads(modelprobe("show", PATH, "--layers", "f*", "--format", "json")[1])
    assert list(data["layers"]) == ["fc"]


def test_json_is_one_snapshot_or_a_list_of_several(
    modelprobe: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        write(net(i + 2), f"{PATH}{i}")
    shown = modelprobe("show", "tests", "--format", "json")[1]
    several = json.loads(shown)
    one = json.loads(modelprobe("show", f"{PATH}1", "--format", "json")[1])
    assert several[1] == one
    assert [data["snapshot"] for data in several] == [f"{PATH}{i}.arch.json" for i in range(3)]
    assert shown == f"{json.dumps(several, indent=1)}\n"


def test_a_snapshot_is_shown_as_a_page(branch: str, modelprobe: Run) -> None:
    assert modelprobe("show", PATH, "--html", "-o", "net.html") == (0, "", "")
    page = Path("net.html").read_text("utf-8")
    assert "<h1>Net</h1>" in page
    assert modelprobe("show", PATH, "--html")[1] == page


def test_a_file_is_named_for_a_page_alone(branch: str, modelprobe: Run) -> None:
    assert "-o is for the page of --html" in modelprobe("show", PATH, "-o", "net.txt")[2]


# --- declare ------------------------------------------------------------------------------------------------------


def test_a_reason_is_given_after_the_fact_for_the_whole_branch(git: Git, branch: str, modelprobe: Run) -> None:
    write(net(3))
    commit(git, "Widen the net")
    write(net(4))
    commit(git, "Widen it further")
    assert modelprobe("check", "--base", "main")[0] == 1
    assert modelprobe("declare", 'wider "é"', "--base", "main") == (0, f"declared in {PATH}.arch.json\n", "")
    code, out, _ = modelprobe("check", "--base", "main")
    assert code == 0
    assert 'Declared for Net: wider "é"' in out
    assert modelprobe("declare", "again", "--base", "main")[1].startswith("nothing to declare since main; ")


def test_a_reason_changes_nothing_else_of_the_file(branch: str, modelprobe: Run) -> None:
    write(net(3))
    before = Path(f"{PATH}.arch.json").read_text("utf-8")
    modelprobe("declare", "wider")
    after = Path(f"{PATH}.arch.json").read_text("utf-8")
    assert [line for line in after.split("\n") if not line.startswith(('"reason', '"supersedes'))] == before.split("\n")


def test_a_reason_without_a_word_is_refused(branch: str, modelprobe: Run) -> None:
    assert modelprobe("declare", "--", "\u200b") == (
        2,
        "",
        "modelprobe: the reason is empty: say why the snapshots changed\n",
    )


# --- init ---------------------------------------------------------------------------------------------------------


def test_init_tells_git_how_to_treat_snapshots(git: Git, modelprobe: Run) -> None:
    code, out, _ = modelprobe("init")
    assert code == 0
    assert Path(".gitattributes").read_text("utf-8").splitlines() == list(GIT_ATTRIBUTES)
    assert "CODEOWNERS" in out
    told = git("check-attr", "merge", "eol", "linguist-generated", "--", f"{PATH}.probe.json")
    assert re.findall(r": (\S+)$", told, re.MULTILINE) == ["unset", "lf", "set"]


def test_init_keeps_what_is_there_and_adds_it_once(git: Git, modelprobe: Run) -> None:
    Path(".gitattributes").write_bytes(b"*.bin binary\r\n*.txt text")
    modelprobe("init")
    first = Path(".gitattributes").read_bytes()
    assert first == b"*.bin binary\r\n*.txt text\r\n" + b"".join(f"{a}\r\n".encode() for a in GIT_ATTRIBUTES)
    assert "has all that git needs to know" in modelprobe("init")[1]
    assert Path(".gitattributes").read_bytes() == first


def test_numbers_of_two_branches_never_mix(git: Git, modelprobe: Run) -> None:
    modelprobe("init")
    write(net())
    commit(git)
    git("switch", "-q", "-c", "branch")
    write(net(mean=5.0))
    commit(git)
    git("switch", "-q", "main")
    write(net(mean=9.0))
    commit(git)
    with pytest.raises(subprocess.CalledProcessError):
        git("merge", "-q", "branch")
    assert "<<<<" not in Path(f"{PATH}.probe.json").read_text("utf-8")


# --- what cannot be completed -------------------------------------------------------------------------------------


def test_a_path_outside_is_refused(branch: str, modelprobe: Run, tmp_path: Path) -> None:
    code, _, err = modelprobe("check", "..", "--base", "main")
    assert (code, err) == (2, f"modelprobe: .. is outside the repository {(tmp_path / 'here').resolve()}\n")


def test_a_path_without_snapshots_names_the_nearest(branch: str, modelprobe: Run) -> None:
    code, _, err = modelprobe("check", "tests/__modelprobe__/test_net/test_b", "--base", "main")
    assert (code, err) == (
        2, f"modelprobe: there is no snapshot tests/__modelprobe__/test_net/test_b; nearest: {PATH}\n",
    )  # fmt: skip


def test_a_snapshot_that_cannot_be_read_is_named(branch: str, modelprobe: Run) -> None:
    Path(f"{PATH}.arch.json").write_text("{", "utf-8")
    code, _, err = modelprobe("check", "--base", "main")
    assert code == 2
    assert err.startswith(f"modelprobe: {PATH}.arch.json")
    assert "main" not in err


def test_one_that_cannot_be_read_in_the_base_is_as_new_so_that_it_can_be_repaired(
    git: Git, branch: str, modelprobe: Run
) -> None:
    git("switch", "-q", "main")
    Path(f"{PATH}.arch.json").write_text("{", "utf-8")
    commit(git)
    git("switch", "-q", "-c", "next")
    write(net(3))
    code, out, err = modelprobe("check", "--base", "main", "--format", "json")
    assert code == 0
    assert err.startswith(f"modelprobe: in main: {PATH}.arch.json")
    assert [[finding["class"] for finding in change["findings"]] for change in json.loads(out)["changes"]] == [["new"]]


def test_damaged_numbers_in_the_base_hide_no_change_of_the_structure(git: Git, branch: str, modelprobe: Run) -> None:
    git("switch", "-q", "main")
    Path(f"{PATH}.probe.json").write_text("{", "utf-8")
    commit(git)
    git("switch", "-q", "-c", "next")
    write(net(3))
    code, out, err = modelprobe("check", "--base", "main")
    assert code == 1
    assert out.startswith("Net: checkpoint change is not declared")
    assert err.endswith("; of it the structure alone is compared\n")
    write(net())
    assert modelprobe("check", "--base", "main")[0] == 0


def test_of_the_records_only_those_of_one_snapshot_are_held_at_once(
    git: Git, modelprobe: Run, held: HeldRecords
) -> None:
    for i in range(5):
        write(net(), f"{PATH}{i}")
    commit(git)
    for i in range(5):
        write(net(mean=3.0) if i else net(width=3), f"{PATH}{i}")
    write(net(act="GELU"), f"{PATH}_new")
    code, out, _ = modelprobe("check", "--base", "main")
    assert code == 1
    assert out.startswith("Net: checkpoint change is not declared; 6 models changed, 4 in behavior, 0 unchanged")
    assert (held.read, held.most) == (11, 2)


def test_numbers_without_an_architecture_are_said_to_be_that(branch: str, modelprobe: Run) -> None:
    Path(f"{PATH}.arch.json").unlink()
    code, _, err = modelprobe("show", PATH)
    assert (code, err) == (2, f"modelprobe: {PATH}.probe.json has no test_a.arch.json beside it\n")


# --- the process --------------------------------------------------------------------------------------------------


def test_the_command_imports_neither_torch_nor_numpy_nor_pytest(branch: str) -> None:
    write(net(act="GELU"))
    code = (
        "import sys; from pytest_modelprobe.cli import main; code = main(['diff', '--base', 'main']);"
        "print(code, sorted({'torch', 'numpy', 'pytest', 'syrupy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, encoding="utf-8")
    assert done.stdout.splitlines()[-1] == "1 []"
