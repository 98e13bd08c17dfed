"""The hooks for other plugins, each implemented in a small plugin."""

from __future__ import annotations

import pytest

TEST = """
    import torch
    from torch import nn

    def test_net(modelprobe):
        modelprobe.run(nn.Linear(2, 3), torch.ones(1, 2))
        watch = modelprobe.watch(nn.Linear(2, 4), name="second")
        watch.model(watch.model(torch.ones(1, 2))[:, :2])

    def test_without_a_probe():
        pass
"""


@pytest.mark.usefixtures("_plugin_alone")
def test_a_plugin_gets_the_record_of_each_run_and_watch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TEST)
    pytester.makeconftest("""
        def pytest_modelprobe_record(record, item):
            print("got", item.name, record.model, record.forwards)
    """)
    result = pytester.runpytest("-p", "no:cacheprovider", "-s")
    result.stdout.fnmatch_lines(["*got test_net Linear 1", "got test_net Linear 2"])
    assert result.stdout.str().count("got") == 2


@pytest.mark.usefixtures("_plugin_alone")
def test_an_error_in_a_hook_is_an_error_of_the_test_and_its_fixtures_are_torn_down(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest, torch
        from torch import nn

        @pytest.fixture
        def resource():
            yield
            print("closed")

        def test_shared(modelprobe_factory, resource):
            modelprobe_factory().run(nn.Linear(2, 3), torch.ones(1, 2))

        def test_own(modelprobe, resource):
            modelprobe.run(nn.Linear(2, 3), torch.ones(1, 2))
    """)
    pytester.makeconftest("def pytest_modelprobe_record(record, item): raise KeyError(record.model)")
    result = pytester.runpytest("-p", "no:cacheprovider", "-s")
    result.assert_outcomes(passed=2, errors=2)
    assert result.stdout.str().count("closed") == 2
    assert result.stdout.str().count("E   KeyError: 'Linear'") == 2


CHECKS = """
    from pytest_modelprobe import assert_param_count, checks

    def small(probe, model, *inputs, **kwargs):
        "The model has few parameters."
        assert_param_count(model, (0, 20))
        return "few enough"

    def floating(probe, model, *inputs, **kwargs):
        if not any(x.is_floating_point() for x in inputs):
            raise checks.NotApplicableError("no floating input")
        raise AssertionError("fc has a floating input")

    def pytest_modelprobe_checks(config):
        return {"small": small, "floating": floating}
"""

CASES = """
    from torch import nn
    from pytest_modelprobe import checks

    CASE = checks.Case(name="net", factory=lambda: nn.Linear(2, 3), inputs=lambda probe: probe.randn(4, 2))
    WORDS = checks.Case(
        name="words", factory=lambda: nn.Embedding(9, 3), inputs=lambda probe: probe.randint(0, 9, (4, 2))
    )

    @checks.parametrize_with_checks([CASE, WORDS], only=["small", "floating"])
    def test_standard(modelprobe, check):
        check(modelprobe)
"""


@pytest.mark.usefixtures("_plugin_alone")
def test_checks_of_a_plugin_are_standard_checks_of_the_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(CASES)
    pytester.makeconftest(CHECKS)
    result = pytester.runpytest("-p", "no:cacheprovider", "-rfs")
    result.assert_outcomes(passed=1, failed=2, skipped=1)
    result.stdout.fnmatch_lines_random(
        [
            "SKIPPED * floating is not applicable to Embedding: no floating input",
            "E  * AssertionError: fc has a floating input",
            "E  * AssertionError: the model has 27 parameters, not 0 to 20: 7 too many",
        ]
    )


@pytest.mark.usefixtures("_plugin_alone")
def test_checks_of_a_plugin_end_with_the_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_empty="def test_empty(): pass")
    pytester.makeconftest(CHECKS)
    pytester.runpytest("-p", "no:cacheprovider").assert_outcomes(passed=1)
    from pytest_modelprobe.checks import STANDARD

    assert "small" not in STANDARD


@pytest.mark.usefixtures("_plugin_alone")
def test_a_run_inside_another_has_checks_of_its_own(pytester: pytest.Pytester) -> None:
    from pytest_modelprobe import checks

    remove = checks.add_standard({"small": print, "outer": print})
    pytester.makepyfile("""
        from pytest_modelprobe.checks import STANDARD
        def test_own(): assert len(STANDARD) == 27 and "outer" not in STANDARD
    """)
    pytester.makeconftest(CHECKS)
    pytester.runpytest("-p", "no:cacheprovider").assert_outcomes(passed=1)
    assert [*checks.STANDARD][-2:] == ["small", "outer"]
    remove()
    assert len(checks.STANDARD) == 25


@pytest.mark.usefixtures("_plugin_alone")
@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ('{"finite": print}', "there is a check 'finite' already: give yours another name"),
        ('{"causal": print}', "there is a check 'causal' already: give yours another name"),
        ('{"mine": 3}', "the check 'mine' is a function of probe, model and inputs; got int"),
        ("[print]", "checks are given by name, as a dict of functions; got list"),
    ],
)
def test_a_wrong_check_is_an_error_before_the_tests(pytester: pytest.Pytester, returned: str, said: str) -> None:
    pytester.makepyfile("def test_a(): pass")
    pytester.makeconftest(f"def pytest_modelprobe_checks(config): return {returned}")
    result = pytester.runpytest("-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*pytest_modelprobe_checks: {said}"])


@pytest.mark.usefixtures("_plugin_alone")
def test_without_checks_of_a_plugin_nothing_is_imported_for_them(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import sys
        def test_a(): assert not {"torch", "numpy", "pytest_modelprobe.checks"} & set(sys.modules)
    """)
    pytester.makeconftest("def pytest_modelprobe_record(record, item): pass")
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
