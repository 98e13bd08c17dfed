"""The process of the other side: how it is started, what it is told, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from pytest_modelprobe.revisions import Job, Side, SideError, options_for

Python = Callable[[str], Side]


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """Makes a side whose interpreter is a shell script: ``python -m pytest_modelprobe.revisions JOB ANSWER``."""

    if sys.platform == "win32":
        pytest.skip("the interpreter is played by a script of sh")

    def make(script: str) -> Side:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return Side(str(path), tmp_path, [tmp_path / "a", tmp_path / "b"])

    return make


def has_ended(pid: int) -> bool:
    """Whether a process that is not of this one ends; a signal takes a moment."""
    for _ in range(200):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text("ascii").rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


# --- versions ---------------------------------------------------------------------------------------------------------


def test_it_imports_from_its_own_folders_first(python: Python, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    monkeypatch.setenv("PYTHONHOME", "that of another interpreter")
    told = '{"side": true, "pytest-modelprobe": "1", "path": "%s", "in": "%s", "home": "%s"}'
    found = python(f"""printf '{told}' "$PYTHONPATH" "$PWD" "$PYTHONHOME\"""").versions()
    assert found == {
        "pytest-modelprobe": "1",
        "path": os.pathsep.join([str(tmp_path / "a"), str(tmp_path / "b"), "mine"]),
        "in": str(tmp_path),
        "home": "",
    }


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 0", "is no Python that runs: it said nothing"),
        ("echo no such option >&2; exit 2", "is no Python that runs: no such option"),
        ("""echo '{"side": false, "pytest-modelprobe": null}'""", "has no pytest-modelprobe: install "),
        ("""echo '{"side": false, "pytest-modelprobe": "0.1"}'""", "the pytest-modelprobe 0.1 of .* cannot answer"),
    ],
)
def test_an_interpreter_that_cannot_answer_is_refused(python: Python, script: str, said: str) -> None:
    with pytest.raises(SideError, match=said):
        python(script).versions()


def test_versions_are_those_of_the_interpreter() -> None:
    found = Side(sys.executable, Path.cwd()).versions()
    assert found == {
        "python": sys.version.split()[0],
        **{name: metadata.version(name) for name in ("pytest-modelprobe", "torch", "pytest")},
    }


def test_the_other_side_writes_nothing_and_runs_what_this_one_ran(pytester: pytest.Pytester) -> None:
    written = ["--modelprobe-json=r.json", "--modelprobe-html=r.html", "--junitxml=r.xml", "--cache-clear"]
    config = pytester.parseconfig(*written, "--modelprobe-base=HEAD", "--maxfail=1", "-k", "a or b", "-m", "not slow")
    found = options_for(config, rootdir="there")
    json.dumps(found)
    silent = ["modelprobe_json", "modelprobe_html", "xmlpath", "modelprobe_base"]
    assert {name: found[name] for name in silent} == dict.fromkeys(silent)
    assert (found["cacheclear"], found["maxfail"]) == (False, 0)
    assert (found["keyword"], found["markexpr"], found["rootdir"]) == ("a or b", "not slow", "there")
    assert "file_or_dir" not in found


# --- processes --------------------------------------------------------------------------------------------------------


def test_a_process_without_an_answer_ends_all_and_what_they_started(python: Python, tmp_path: Path) -> None:
    side = python(f"""
case $3 in
*/0/job.json)
    sleep 600 & echo $! > {tmp_path}/one; until test -s {tmp_path}/two; do :; done
    echo Fatal Python error: no luck; echo more; exit 7;;
*) echo $$ > {tmp_path}/two; exec sleep 600;;
esac""")
    why = "ended without an answer, with exit code 7: Fatal Python error: no luck"
    with pytest.raises(SideError, match=f"in {tmp_path} {why}"):
        side.run([Job(files=[], options={})] * 2, tmp_path / "log")
    assert all(has_ended(int((tmp_path / name).read_text())) for name in ("one", "two"))


def test_it_ends_when_the_process_that_started_it_is_gone(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    (tmp_path / "test_slow.py").write_text(
        "import pathlib, time\n\ndef test_slow():\n    pathlib.Path('started').touch()\n    time.sleep(600)\n"
    )
    job = {
        "files": ["test_slow.py"],
        "options": options_for(pytestconfig, rootdir=str(tmp_path), inifilename=None, keyword="", markexpr=""),
    }
    (tmp_path / "job.json").write_text(json.dumps({**job, "tests": None, "records": str(tmp_path / "records")}))
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest_modelprobe.revisions", "job.json", "ran.json"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while not (tmp_path / "started").exists():
            assert process.poll() is None
            time.sleep(0.05)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) != 0
    finally:
        process.kill()
        process.wait()
    assert not (tmp_path / "ran.json").exists()


# --- what became of the tests -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_forked")
def test_what_became_of_each_test_is_answered(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    (tmp_path / "test_some.py").write_text("""
import os, pytest

def test_good(): assert os.read(0, 1) == b""
def test_probe(modelprobe): pass
def test_factory(modelprobe_factory): pass
def test_bad(): assert 1 == 2, "not\\nso"
def test_skipped(): pytest.skip("no time")
def test_not_asked(): assert False
@pytest.fixture
def broken():
    yield
    raise ValueError("teardown")
def test_broken(broken): raise ValueError("call")
@pytest.mark.parametrize("n", [1, 2])
class TestMany:
    def test_one(self, n): assert n == 1
""")
    (tmp_path / "test_unread.py").write_text("import no_such_module\n")
    names = ["good", "bad", "skipped", "broken"]
    tests = [*(f"test_some.py::test_{name}" for name in names), f"{tmp_path}/test_some.py::TestMany"]
    job = Job(
        files=[str(tmp_path / "test_unread.py"), str(tmp_path / "test_some.py")],
        tests=tests,
        options=options_for(pytestconfig, rootdir=str(tmp_path), inifilename=None, keyword="", markexpr=""),
        records=str(tmp_path / "records"),
    )
    ran = Side(sys.executable, tmp_path).run([job], tmp_path / "log")
    assert len(ran.collected) == 9
    assert sorted(ran.with_probe) == ["test_some.py::test_factory", "test_some.py::test_probe"]
    assert {name.partition("::")[2]: why for name, why in ran.failed.items()} == {
        "test_bad": "failed: AssertionError: not",
        "test_skipped": "skipped: Skipped: no time",
        "test_broken": "failed: ValueError: call",
        "TestMany::test_one[2]": "failed: assert 2 == 1",
    }
    assert ran.unread == {"test_unread.py": "ModuleNotFoundError: No module named 'no_such_module'"}


def test_a_test_that_hangs_is_named_and_ended(python: Python, tmp_path: Path) -> None:
    tests = [f"t.py::test_{name}" for name in "abc"]
    side = python(f"""
folder="${{4%ran.json}}"; echo $$ > {tmp_path}/pid
echo {tests[0]} | tee "${{folder}}begun" > "${{folder}}ended"; echo {tests[1]} >> "${{folder}}begun"; exec sleep 60""")
    ran = side.run([Job(files=["t.py"], tests=tests, options={})], tmp_path / "log", seconds=1)
    assert {*ran.collected} == {*tests}
    why = "stopped: t.py::test_b did not end within 1 s, 10 times what all tests took"
    assert ran.failed == dict.fromkeys(tests[1:], why)
    assert not ran.fails(tests[1])  # it would hang once more with the tests of that side
    assert has_ended(int((tmp_path / "pid").read_text("ascii")))
