import importlib
import sys
from pathlib import Path

import pytest

from pytest_modelprobe.record import Layer, Record
from pytest_modelprobe.report.results import Source
from pytest_modelprobe.snapshot.outcome import source_of

NET = """

class Block:
    pass


class Net:
    pass
"""


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """A record of classes of a module in ``tmp_path``, and of torch."""
    (tmp_path / "net_of_a_test.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "net_of_a_test", raising=False)
    importlib.import_module("net_of_a_test")
    types = {
        "(root)": "net_of_a_test.Net",
        "block": "net_of_a_test.Block",
        "block.fc": "torch.nn.modules.linear.Linear",
        "other": "torch.nn.modules.linear.Linear",
        "gone": "net_of_a_test.Gone",
    }
    return Record(model="Net", layers={name: Layer(name=name, type=kind) for name, kind in types.items()})


@pytest.mark.parametrize(
    ("layer", "line"), [("(root)", 7), ("block", 3), ("block.fc", 3), ("other", 7), ("gone", 7), ("removed.fc", 7)]
)
def test_a_layer_is_in_its_class_or_that_of_a_container(record: Record, tmp_path: Path, layer: str, line: int) -> None:
    assert source_of(record, layer, tmp_path) == Source(file="net_of_a_test.py", line=line)


def test_classes_outside_the_project_have_no_line(record: Record, tmp_path: Path) -> None:
    assert source_of(record, "block.fc", tmp_path / "elsewhere") is None


def test_a_class_made_in_a_function_has_no_line(tmp_path: Path) -> None:
    layer = Layer(name="(root)", type="net_of_a_test.test_net.<locals>.Net")
    assert source_of(Record(model="Net", layers={"(root)": layer}), "(root)", tmp_path) is None
