"""The results of a run of pytest: what is written however the run ends, and the reports that are made of the file."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import pytest_modelprobe.plugin.results
import pytest_modelprobe.probe
import pytest_modelprobe.report.runs  # noqa: F401 - pytester forgets what its runs import
from pytest_modelprobe import cli
from pytest_modelprobe.report.results import Results, write_text

# --- a run of pytest --------------------------------------------------------------------------------------------------

TESTS = """
import pytest, torch
from torch import nn

@pytest.fixture
def broken(): raise RuntimeError("no data")

def test_passes(modelprobe, modelprobe_snapshot):
    model = modelprobe.build(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert modelprobe.run(model, modelprobe.randn(2, 4), loss="random", profile=True) == modelprobe_snapshot
    modelprobe.figures.append(lambda: {"title": "a figure", "media": "image/png", "data": "aGk="})

def test_fails(modelprobe):
    watch = modelprobe.watch(nn.Linear(2, 2), name="<b>")
    watch.model(torch.tensor([[1.0, float("inf")]]))
    raise AssertionError("first line" + chr(10) + "x " * 12_000)

def test_not_set_up(modelprobe, broken): pass

@pytest.mark.skip(reason="later")
def test_skipped(modelprobe): pass

@pytest.mark.xfail(reason="known")
def test_xfailed(modelprobe): assert 0

def test_without_a_probe(): pass
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, _plugin_alone: None) -> Any:
    """Run pytest with options, and return its results."""

    def run(text: str, *options: str, subprocess: bool = False) -> Results:
        pytester.makepyfile(text)
        method = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        more = {} if subprocess else {"no_reraise_ctrlc": True}
        method("-p", "no:cacheprovider", "--modelprobe-json=out/results.json", *options, **more)
        assert [path.name for path in (pytester.path / "out").iterdir()] == ["results.json"]
        written = (pytester.path / "out" / "results.json").read_text("ascii")
        data = json.loads(written, parse_constant=pytest.fail)
        assert data["schema"] == 5
        return Results.from_dict(data)

    return run


def outcomes(results: Results) -> dict[str, str]:
    return {test.id.partition("::")[2]: test.outcome for test in results.tests}


def test_every_test_with_a_probe_has_its_outcome_and_what_it_recorded(run: Any) -> None:
    results = run(TESTS, "--snapshot-update")
    assert (results.stopped, results.exit_status, results.seed) == (None, 1, 0)
    assert outcomes(results) == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_not_set_up": "error",
        "test_skipped": "skipped",
        "test_xfailed": "xfailed",
    }
    passed, failed, error, skipped, xfailed = results.tests
    assert [test.message for test in (failed, error, skipped, xfailed)] == [
        "AssertionError: first line", "RuntimeError: no data", "Skipped: later", "known",
    ]  # fmt: skip
    assert failed.failure.startswith("... ")
    assert 20_000 < len(failed.failure) < 20_100
    assert (passed.file, passed.line) == (passed.id.partition("::")[0], 7)
    assert (passed.snapshots[0].verdict, passed.snapshots[0].files) == ("created", ())
    record = passed.runs[0].record
    histogram = record["1"].output.forward.histogram
    assert histogram.zero + sum(histogram.positive) == 8
    assert record.profile.flops == record.profile.layers["0"].flops == 2 * 2 * 4 * 4
    assert [figure.media for figure in passed.figures] == ["image/png"]
    (watch,) = failed.runs
    assert (watch.name, watch.kind, watch.status) == ("<b>", "watch", {"(root)": ("nonfinite",)})


def test_a_watch_that_keeps_several_steps_has_the_update_ratio_of_each_layer(run: Any) -> None:
    results = run("""
        import torch
        from torch import nn

        def test_train(modelprobe):
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
            nn.init.zeros_(model[1].bias)
            kept, newest = modelprobe.watch(model, steps=3), modelprobe.watch(model)
            frozen = {"params": model[0].parameters(), "lr": 0.0}
            optimizer = torch.optim.SGD([frozen, {"params": model[1].parameters(), "lr": 0.25}])
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                with torch.no_grad():
                    model[1].weight.grad = model[1].weight.detach().clone()
                optimizer.step()
    """)
    [kept, newest] = results.tests[0].runs
    first, second = kept.steps
    assert (first.step, first.update_ratios) == (0, {"0": 0.0, "1": pytest.approx(0.25)})
    assert (second.step, list(second.update_ratios)) == (1, ["0", "1"])
    assert newest.steps == ()


TWO = """
import torch
from torch import nn

def test_a(modelprobe): modelprobe.run(nn.Linear(2, 2), torch.ones(1, 2))
def test_b(modelprobe): {}
"""


@pytest.mark.parametrize(
    ("second", "options", "found", "stopped"),
    [
        ("raise KeyboardInterrupt", (), {"test_a": "passed"}, "the run was interrupted"),
        ("assert 0", ("-x",), {"test_a": "passed", "test_b": "failed"}, "stopping after 1 failures"),
    ],
    ids=["interrupted", "stopped"],
)
def test_a_run_that_is_cut_short_is_not_complete(
    run: Any, second: str, options: Any, found: dict[str, str], stopped: str
) -> None:
    results = run(TWO.format(second) + "def test_c(): pass\n", *options)
    assert (results.stopped, outcomes(results)) == (stopped, found)
    assert len(results.tests[0].runs) == 1


@pytest.mark.long
def test_the_results_of_a_worker_that_dies_are_there_but_not_complete(run: Any) -> None:
    results = run("import os\n" + TWO.format("os._exit(1)"), "-p", "xdist", "-n1", subprocess=True)
    assert outcomes(results) == {"test_a": "passed", "test_b": "failed"}
    assert results.stopped == "a worker of pytest-xdist died"
    assert [len(test.runs) for test in results.tests] == [1, 0]


@pytest.mark.usefixtures("_plugin_alone")
def test_without_the_option_nothing_is_computed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import torch
        from torch import nn
        def test_a(modelprobe, request):
            record = modelprobe.run(nn.Linear(2, 2), torch.ones(1, 2))
            assert record["(root)"].output.forward.histogram is None
            assert not request.config.pluginmanager.has_plugin("modelprobe-results")
    """)
    pytester.makeconftest("""
        def pytest_runtest_logreport(report):
            assert not hasattr(report, "modelprobe_results")
    """)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


@pytest.mark.usefixtures("_plugin_alone")
def test_without_a_report_nothing_of_reports_is_imported(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import torch
        from torch import nn
        def test_a(modelprobe): modelprobe.run(nn.Linear(2, 2), torch.ones(1, 2), loss="random")
    """)
    pytester.makeconftest("""
        import sys
        def pytest_unconfigure():
            of_reports = ("report.results", "report.html", "extras.exporters", "extras.pictures",
                          "plugin.results")
            print("imported:", [x for x in of_reports if f"pytest_modelprobe.{x}" in sys.modules])
            print("others:", [x for x in ("matplotlib", "tensorboard", "mlflow") if x in sys.modules])
    """)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["imported: []", "others: []"])


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_plugin_alone")
def test_a_directory_as_the_path_of_a_report_is_an_error_before_the_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_a(): pass")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--modelprobe-json=")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --modelprobe-json=: it is a directory; name a file"])


@pytest.mark.usefixtures("_plugin_alone")
def test_a_report_that_cannot_be_written_at_the_end_leaves_the_run_as_it_is(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pathlib
        def test_a(): pathlib.Path("r.json").mkdir()
    """)
    result = pytester.runpytest_inprocess(
        "-p", "no:cacheprovider", "--modelprobe-json=r.json", "--modelprobe-html=r.html"
    )
    assert result.ret == 0
    result.stdout.fnmatch_lines(["modelprobe: *r.json is not written: IsADirectoryError*"])
    assert (pytester.path / "r.html").read_text("utf-8").startswith("<!doctype html>")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "{}")
    assert os.read(reader, 9) == b"{}"
    os.close(reader)
    assert pipe.is_fifo()


def results_file(path: Path, **more: Any) -> None:
    path.write_text(json.dumps({**json.loads(Results(tests=()).to_json()), **more}))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("html", "results.html"),
        ("markdown", "results.md"),
    ],
)
def test_the_command_writes_beside_the_file_if_no_place_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str
) -> None:
    results_file(tmp_path / "results.json")
    assert cli.main(["report", str(tmp_path / "results.json"), "--format", kind]) == 0
    assert capsys.readouterr().out == f"Wrote {tmp_path / name}\n"
    assert (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("schema", "tests", "said"),
    [
        (3, [], "has schema 3, and this version reads 5: write it with pytest"),
        (5, [3], "is not what pytest --modelprobe-json=PATH writes: "),
        (5, None, "is not what pytest --modelprobe-json=PATH writes: "),
    ],
)
def test_the_command_refuses_what_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], schema: int, tests: Any, said: str
) -> None:
    results_file(tmp_path / "results.json", schema=schema, tests=tests)
    command = ["report", str(tmp_path / "results.json"), "-o", str(tmp_path / "report")]
    assert cli.main(command) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def test_the_command_refuses_json_that_is_too_deep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results.json").write_text("[" * 100_000)
    assert cli.main(["report", str(tmp_path / "results.json"), "-o", str(tmp_path / "report")]) == 2
    # Python says so from 3.14 on by the size of the stack, and before by the depth.
    said = capsys.readouterr().err
    assert re.search(r"results\.json is no JSON: (maximum recursion depth exceeded|Stack overflow)", said)
