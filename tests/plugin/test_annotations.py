import pytest

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x)
"""
TEST = """
from a_net import Net

def test_net(modelprobe, modelprobe_snapshot):
    model = modelprobe.build(Net)
    assert modelprobe.run(model, modelprobe.randn(2, 4)) == modelprobe_snapshot
"""


def test_a_change_is_annotated_at_the_class_of_the_module(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(pytester.path)
    pytester.makepyfile(a_net=NET, test_a=TEST)
    pytester.runpytest("--snapshot-update").assert_outcomes(passed=1)
    pytester.makepyfile(a_net=NET.replace("self.fc(x)", "self.fc(x).tanh()"))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    result = pytester.runpytest_inprocess()
    result.stdout.fnmatch_lines(
        ["::error file=a_net.py,line=4,title=modelprobe%3A Net changed::test_a.py::test_net: *(root)*"]
    )
    monkeypatch.delenv("GITHUB_ACTIONS")
    assert "::error" not in pytester.runpytest_inprocess().stdout.str()
