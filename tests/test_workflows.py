"""The action of this repository and the workflows to copy do what they say, in a local repository.

Their commands run as the runner of the forge runs them. What needs a forge or the network is recorded: ``pip``, ``gh``
and ``curl`` are commands of a test, which answer what it says.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_modelprobe.report.results import Results

ROOT = Path(__file__).parent.parent
RECORDER = """\
#!{python}
import json, os, pathlib, subprocess, sys

name, arguments = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps([name, *arguments]) + "\\n")
for wanted, answer in json.loads(os.environ["ANSWERS"]):
    if wanted in arguments:
        if "--jq" in arguments:
            query = ["jq", "-r", arguments[arguments.index("--jq") + 1]]
            sys.exit(subprocess.run(query, input=answer, text=True).returncode)
        print(answer)
sys.exit(int(os.environ["CODE"]) if name == "pytest" else 0)
"""
SHELLS = {
    None: ["bash", "-e"],
    "bash": ["bash", "--noprofile", "--norc", "-eo", "pipefail"],
    "python": [sys.executable],
}
"""How GitHub's runner starts each shell."""

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Calls = Callable[[], list[list[str]]]

pytestmark = pytest.mark.skipif(shutil.which("bash") is None or os.name == "nt", reason="needs bash")


def read(path: str) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / path).read_text("utf-8"))


def commands(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [step for step in steps if "run" in step]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of git with nothing in it, where the commands run."""
    for name in [name for name in os.environ if name.startswith(("GIT_", "PYTEST_"))]:
        monkeypatch.delenv(name)
    where = tmp_path / "here"
    subprocess.run(["git", "init", "-q", where], check=True)
    return where


@pytest.fixture
def calls(tmp_path: Path) -> Calls:
    """Returns what the recorded commands were called with."""
    return lambda: [json.loads(line) for line in (tmp_path / "calls").read_text("utf-8").splitlines()]


@pytest.fixture
def run(tmp_path: Path, repository: Path) -> Run:
    """Runs a script as the runner does."""
    recorders = tmp_path / "recorders"
    recorders.mkdir()
    for name in ("pip", "gh", "curl"):
        (recorders / name).write_text(RECORDER.format(python=sys.executable), "utf-8")
        (recorders / name).chmod(0o755)
    (tmp_path / "calls").touch()
    path = os.pathsep.join([str(recorders), sysconfig.get_path("scripts"), os.environ["PATH"]])
    always = {"PATH": path, "CALLS": str(tmp_path / "calls"), "COLUMNS": "120"}

    def run(
        script: str,
        shell: str | None = "bash",
        answers: Mapping[str, object] | None = None,
        code: int = 0,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "script").write_text(script, "utf-8")
        told = [(wanted, one if isinstance(one, str) else json.dumps(one)) for wanted, one in (answers or {}).items()]
        given = {**os.environ, **always, "ANSWERS": json.dumps(told), "CODE": str(code), **environment}
        command = [*SHELLS[shell], str(tmp_path / "script")]
        return subprocess.run(command, cwd=repository, env=given, capture_output=True, text=True, check=False)

    return run


@pytest.fixture
def played(run: Run, repository: Path) -> None:
    """A run of pytest that is recorded too, and leaves results."""
    shutil.copy(repository.parent / "recorders" / "pip", repository.parent / "recorders" / "pytest")
    (repository / "modelprobe.json").write_text(Results(tests=()).to_json(), "utf-8")


# --- GitHub -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["action.yml", *(f"examples/github/{name}.yml" for name in ("compare", "comment", "modelprobe"))]
)
def test_no_script_has_an_expression_in_it(path: str) -> None:
    found = read(path)
    steps = [step for job in found.get("jobs", {"": found.get("runs")}).values() for step in job["steps"]]
    assert commands(steps)
    assert [step["run"] for step in commands(steps) if "${{" in step["run"]] == []


def act(run: Run, code: int = 0, **inputs: str) -> tuple[list[int], str]:
    """Run the commands of the action; return their exit codes, and what the last one said."""
    action = read("action.yml")
    given = {name: one["default"] for name, one in action["inputs"].items()}
    given |= {name.replace("_", "-"): text for name, text in inputs.items()}
    runner = {"GITHUB_ACTION_PATH": "/the action", "GITHUB_BASE_REF": "main"}
    codes = []
    for step in commands(action["runs"]["steps"]):
        variables = {
            name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: given[found[1]], text)
            for name, text in step.get("env", {}).items()
        }
        done = run(step["run"], step["shell"], code=code, **runner, **variables)
        codes.append(done.returncode)
    return codes, done.stdout + done.stderr


def test_the_action_reports_and_returns_the_code_of_pytest(
    run: Run, calls: Calls, repository: Path, played: None
) -> None:
    codes, said = act(run, code=16, arguments="-k 'a or b' \"$(touch made)\" `touch made`; touch made")
    assert codes == [0, 16], said
    options = ["--modelprobe-base=origin/main", "--modelprobe-json=modelprobe.json", "--modelprobe-base-fail-on=never"]
    arguments = ["-k", "a or b", "$(touch made)", "`touch", "made`;", "touch", "made"]
    assert calls() == [["pip", "install", "/the action"], ["pytest", *options, *arguments]]
    assert not (repository / "made").exists()
    upload = read("action.yml")["runs"]["steps"][-1]
    assert upload["if"] == "always()"
    assert (repository / upload["with"]["path"]).read_text("utf-8").startswith("### modelprobe: ")


def test_the_action_gives_its_inputs_to_pytest(run: Run, repository: Path) -> None:
    codes, said = act(run, base="nowhere", fail_on="undeclared")
    assert (codes, "there is no revision 'nowhere' here" in said) == ([0, 4], True), said
    codes, said = act(run, fail_on="sometimes")
    assert (codes, "invalid choice: 'sometimes'" in said) == ([0, 4], True), said
    assert not (repository / "modelprobe.md").exists()


def test_the_workflow_gives_the_action_inputs_that_it_has() -> None:
    (job,) = read("examples/github/compare.yml")["jobs"].values()
    (step,) = [step for step in job["steps"] if "pytest-modelprobe@" in step.get("uses", "")]
    assert step["with"].keys() <= read("action.yml")["inputs"].keys()


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq, which gh has in itself")
@pytest.mark.parametrize("written", [True, False], ids=["again", "first"])
def test_the_second_workflow_writes_one_comment(run: Run, calls: Calls, repository: Path, written: bool) -> None:
    name = read("examples/github/compare.yml")["name"]
    comment = read("examples/github/comment.yml")
    assert comment[True]["workflow_run"]["workflows"] == [name]  # YAML 1.1 reads `on` as a truth value
    (repository / "modelprobe.md").write_text("What changed")
    comments = [{"id": 6, "body": "Thanks"}, {"id": 7, "body": "<!-- modelprobe -->\nbefore"}][: 1 + written]
    answers = {"list": [{"number": 3}], "--paginate": comments}
    environment = {"GH_REPO": "a/b", "RUN": "5", "COMMIT": "abc"}
    for step in commands(comment["jobs"]["comment"]["steps"]):
        done = run(step["run"], step.get("shell"), answers, **environment)
        assert done.returncode == 0, done.stderr
    download, _, _, write = calls()
    uploaded = read("action.yml")["runs"]["steps"][-1]["with"]["name"]
    assert download == ["gh", "run", "download", "5", "--name", uploaded]
    to = ["-X", "PATCH", "repos/a/b/issues/comments/7"] if written else ["repos/a/b/issues/3/comments"]
    assert write == ["gh", "api", *to, "-F", "body=@comment.md"]
    assert (repository / "comment.md").read_text("utf-8") == "<!-- modelprobe -->\nWhat changed"


# --- GitLab -----------------------------------------------------------------------------------------------------------

IN_A_MERGE_REQUEST = {
    "CI_API_V4_URL": "https://gitlab/api/v4",
    "CI_MERGE_REQUEST_PROJECT_ID": "8",
    "CI_MERGE_REQUEST_IID": "3",
    "CI_MERGE_REQUEST_DIFF_BASE_SHA": "abc",
}
NOTES = "https://gitlab/api/v4/projects/8/merge_requests/3/notes"


@pytest.mark.parametrize(("merged", "base"), [("", "abc"), ("def", "def")], ids=["request", "its merge"])
def test_the_job_of_gitlab_reports_and_returns_the_code_of_pytest(
    run: Run, calls: Calls, repository: Path, played: None, merged: str, base: str
) -> None:
    job = read("examples/gitlab/compare.yml")["compare-models"]
    of_merge = {"CI_MERGE_REQUEST_TARGET_BRANCH_SHA": merged}
    done = run("\n".join(job["script"]), code=16, **IN_A_MERGE_REQUEST, **of_merge)
    assert done.returncode == 16, done.stdout + done.stderr
    junit = job["artifacts"]["reports"]["junit"]
    assert calls() == [
        ["pip", "install", "-e", ".", "pytest-modelprobe"],
        ["pytest", f"--modelprobe-base={base}", "--modelprobe-json=modelprobe.json", f"--junitxml={junit}"],
    ]
    (report,) = job["artifacts"]["paths"]
    assert (repository / report).read_text("utf-8").startswith("### modelprobe: ")


@pytest.mark.parametrize(
    ("ours", "to"), [(105, ["--request", "PUT", f"{NOTES}/105"]), (None, [NOTES])], ids=["again", "first"]
)
def test_the_job_of_gitlab_writes_one_note(
    run: Run, calls: Calls, repository: Path, ours: int | None, to: list[str]
) -> None:
    job = read("examples/gitlab/compare.yml")["compare-models"]
    (repository / "modelprobe.md").write_text("What changed")
    notes = [{"id": n, "body": "<!-- modelprobe -->" if n == ours else "Thanks"} for n in range(110)]
    pages = {f"{NOTES}?per_page=100&page={n + 1}": notes[100 * n : 100 * n + 100] for n in range(3)}
    done = run("\n".join(job["after_script"]), answers=pages, **IN_A_MERGE_REQUEST, MODELPROBE_TOKEN="secret")
    assert done.returncode == 0, done.stderr
    curl = ["curl", "--silent", "--show-error", "--fail", "--header", "PRIVATE-TOKEN: secret"]
    read_1, read_2, *rest, written = calls()
    assert [read_1, read_2] == [[*curl, page] for page in list(pages)[:2]]
    assert rest == ([] if ours else [[*curl, list(pages)[2]]])
    assert written == [*curl, "--output", "/dev/null", *to[:-1], "--data-urlencode", "body@note.md", to[-1]]
    assert (repository / "note.md").read_text("utf-8") == "<!-- modelprobe -->\nWhat changed"


def test_the_job_of_gitlab_writes_no_note_without_a_token(run: Run, calls: Calls, repository: Path) -> None:
    job = read("examples/gitlab/compare.yml")["compare-models"]
    (repository / "modelprobe.md").write_text("What changed")
    assert run("\n".join(job["after_script"]), **IN_A_MERGE_REQUEST).returncode == 0
    assert calls() == []
