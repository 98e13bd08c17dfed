"""The section on planted faults, as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_modelprobe.extras.mutation.results import (
    BaselineTest,
    Known,
    Mutant,
    Place,
    Results,
    Verdict,
    lines,
    planned,
)

FC, NORM = Place("m:Net", "fc", "Linear"), Place("m:Net", "0", "LayerNorm")
NOTICED, SURVIVED, WITHOUT = Verdict("noticed", "test_a.py::t"), Verdict("survived"), Verdict("no effect")
CRASHED, TIMED_OUT = Verdict("crashed", "test_a.py::t"), Verdict("timed out", "test_a.py::t")


def of_tests(**outcomes: str) -> list[BaselineTest]:
    places = {FC: {"nan", "zero"}, NORM: {"nan", "detach"}}
    return [BaselineTest(f"test_a.py::{name}", "test_a.py", outcome, 0.1, places) for name, outcome in outcomes.items()]


def results() -> Results:
    return Results(
        tests=[
            *of_tests(t="passed", u="passed", v="failed", w="xfailed"),
            BaselineTest("c.py::x", "c.py", "passed", 0),
        ],
        verdicts={
            Mutant("test_a.py", FC, "nan"): NOTICED,
            Mutant("test_a.py", FC, "zero"): SURVIVED,
            Mutant("test_b.py", FC, "zero"): NOTICED,
            Mutant("test_a.py", NORM, "nan"): SURVIVED,
            Mutant("test_a.py", NORM, "detach"): SURVIVED,
            Mutant("test_a.py", NORM, "zero"): WITHOUT,
            Mutant("test_a.py", FC, "detach"): CRASHED,
        },
        left_out={"test_a.py::y": "failed: AssertionError"},
        known=2,
        runs=1234,
        seconds=17.2,
        stopped="the run was interrupted",
        total=9,
    )


def test_the_whole_section() -> None:
    assert (
        "\n".join(lines(results(), 80))
        == """\
3 noticed of 5 tried; 2 not tried, in 17 s, with 1,234 runs of tests
--modelprobe-mutate-min=80 asks for 80 %

2 faults survived: the tests that run the layer passed
Net layer '0' (LayerNorm), 2 tests: detach, nan

What notices them
fault    survived   tried   noticed by
detach          1       2   assert_all_params_have_grad
nan             1       2   assert_finite

file        faults   noticed   score
test_a.py        5         2   40 %
test_b.py        1         1   100 %

1 fault crashed in test_a.py::t
not counted: 1 fault that changed nothing
tests left out: 1 failed without a fault, 1 expected to fail, 1 that run no model
left out: test_a.py::y, which when run again without a fault failed: AssertionError
2 results from an earlier run: --cache-clear forgets them
2 faults of 9 not tried: the run was interrupted; the next run goes on there"""
    )


def test_where_all_were_tried_the_share_is_said() -> None:
    assert next(iter(lines(many()))) == "0 % of the faults were noticed: 0 of 2, in 0 s, with 0 runs of tests"


def test_more_layers_than_fit_are_counted() -> None:
    assert "1 more layer: -v shows them" in list(lines(many(), most=1))
    assert "more layer" not in "\n".join(lines(many(), most=None))


def many() -> Results:
    verdicts = {Mutant("test_a.py", place, "nan"): SURVIVED for place in (FC, NORM)}
    return Results(tests=of_tests(t="passed"), verdicts=verdicts)


def test_without_a_model_that_is_all_that_is_said() -> None:
    nothing = Results(tests=[BaselineTest("c.py::x", "c.py", "passed", 0)])
    assert next(iter(lines(nothing))) == "no fault was tried that has an effect: no test runs a module of torch"


def test_the_first_mutants_are_the_same_whichever_tests_are_fast() -> None:
    slow, fast = of_tests(t="passed"), of_tests(t="passed")
    slow[0].seconds = 100.0
    assert {one.mutant for one in planned(slow, 2)} == {one.mutant for one in planned(fast, 2)}


def test_tests_that_did_not_pass_are_not_planned() -> None:
    (one, *_) = planned(of_tests(t="passed", u="failed", v="skipped"))
    assert one.tests == ("test_a.py::t",)


def test_what_one_run_writes_the_next_one_reads(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for key, verdict in {"a": NOTICED, "b": CRASHED}.items():
        Known(cache).add(key, verdict)
    assert Known(cache).read() == {"a": NOTICED, "b": CRASHED}


def test_a_run_that_was_killed_loses_the_verdict_that_it_was_writing_alone(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    Known(cache).add("a", NOTICED)
    with (tmp_path / "modelprobe-mutation" / "verdicts.jsonl").open("a") as file:
        file.write('\n["b", "noti')
    Known(cache).add("c", TIMED_OUT)
    assert Known(cache).read() == {"a": NOTICED, "c": TIMED_OUT}


class Cache:
    """Pytest's, as far as it is used."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mkdir(self, name: str) -> Path:
        (self.path / name).mkdir(exist_ok=True)
        return self.path / name


@pytest.mark.parametrize("noticed", [0, 3])
def test_the_score_is_the_share_of_faults_that_were_noticed(noticed: int) -> None:
    verdicts = [NOTICED, CRASHED, TIMED_OUT][:noticed] + [SURVIVED] * (4 - noticed)
    mutants = [Mutant("test_a.py", FC, operator) for operator in ("nan", "zero", "detach", "flip_sign")]
    assert Results(verdicts=dict(zip(mutants, verdicts, strict=True))).score == 25 * noticed


def test_without_a_cache_nothing_is_kept(tmp_path: Path) -> None:
    known = Known(None)
    known.add("a", NOTICED)
    assert known.read() == {}
    assert not known.is_kept
