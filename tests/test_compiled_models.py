"""What pytest prints of compiled models."""

from __future__ import annotations

import pytest

COMPILED = """
    import torch
    from torch import nn

    def test_compiled(modelprobe):
        model = torch.compile(modelprobe.build(lambda: nn.Linear(2, 2)), backend="eager")
        modelprobe.watch(model)
        model(modelprobe.randn(1, 2))
        assert {passes}
    """


@pytest.mark.usefixtures("_plugin_alone")
def test_the_section_counts_the_tests_whose_compiled_models_ran_eagerly(pytester: pytest.Pytester):
    pytester.makepyfile(COMPILED.format(passes=True))
    result = pytester.runpytest_inprocess()
    result.stdout.fnmatch_lines(["compiled models ran eagerly while they were watched, in 1 test"])


@pytest.mark.usefixtures("_plugin_alone")
def test_a_failure_has_the_notes(pytester: pytest.Pytester):
    pytester.makepyfile(COMPILED.format(passes=False))
    result = pytester.runpytest_inprocess()
    result.stdout.fnmatch_lines(["*- modelprobe -*", "note: (root) is compiled; it is run eagerly while it is watched"])
