import json
import re
from html import unescape
from xml.etree import ElementTree

import pytest

DEAD = """
    from torch import nn

    def test_net(modelprobe, modelprobe_snapshot):
        model = modelprobe.build(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        nn.init.constant_(model[0].bias, -100.0)
        record = modelprobe.run(model, modelprobe.randn(2, 4))
        assert record == modelprobe_snapshot

    def test_another():
        pass
"""

MARKUP = """
    import torch
    from torch import nn

    def test_net(modelprobe):
        model = type("<img src=x onerror=alert(1)>", (nn.ReLU,), {})()
        modelprobe.run(model, -torch.ones(2))
"""


def properties_of(pytester: pytest.Pytester, test: str) -> dict[str, str]:
    """Return the properties of a test in the JUnit XML of a run."""
    tree = ElementTree.parse(pytester.path / "junit.xml")
    return {p.attrib["name"]: p.attrib["value"] for p in tree.iterfind(f".//testcase[@name='{test}']//property")}


def test_junit_xml_has_layers_dead_layers_the_worst_and_the_verdict(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(DEAD)
    pytester.runpytest("--junitxml=junit.xml")
    assert properties_of(pytester, "test_net") == {
        "modelprobe.layers": "3",
        "modelprobe.dead": "1",
        "modelprobe.worst_layer": "1",
        "modelprobe.snapshot": "new",
    }
    assert properties_of(pytester, "test_another") == {}


def test_properties_are_of_builtin_types_that_xdist_transfers(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(DEAD)
    pytester.makeconftest(
        """
        def pytest_runtest_logreport(report):
            if report.when == "teardown" and "test_net" in report.nodeid:
                assert [type(value) for _, value in report.user_properties] == [int, int, str, str]
        """
    )
    pytester.runpytest("--junitxml=junit.xml").assert_outcomes(passed=1, failed=1)


def test_nothing_is_computed_if_no_report_shows_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(DEAD)
    pytester.makeconftest(
        """
        def pytest_runtest_logreport(report):
            assert not report.user_properties
            assert not any("dead" in summary for summary in getattr(report, "modelprobe", []))
        """
    )
    pytester.runpytest().assert_outcomes(passed=1, failed=1)


def test_pytest_html_shows_a_table_with_names_as_text(pytester: pytest.Pytester) -> None:
    pytest.importorskip("pytest_html")
    pytester.makepyfile(MARKUP)
    pytester.runpytest("--html=report.html", "--self-contained-html").assert_outcomes(passed=1)
    page = (pytester.path / "report.html").read_text("utf-8")
    data = json.loads(unescape(re.search(r'data-jsonblob="([^"]*)"', page)[1]))
    ((test,),) = data["tests"].values()
    (extra,) = test["extras"]
    assert "<td>&lt;img src=x onerror=alert(1)&gt;</td><td>1 layer, 1 call</td><td>1 dead</td>" in extra["content"]
