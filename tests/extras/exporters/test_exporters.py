import sys
from importlib.metadata import EntryPoint, EntryPoints
from types import SimpleNamespace

import pytest

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.extras.exporters import export as exporters
from pytest_modelprobe.extras.exporters.export import exporter, scalars
from pytest_modelprobe.record import Call, Layer, Parameter, Reading, Record, Statistics, Value


class Listed:
    """An exporter of another package."""

    def __init__(self, records: list[object]) -> None:
        self.records = records

    def write(self, record: Record, step: int | None = None) -> None:
        self.records.append((record.model, step))

    def write_figure(self, title: str, figure: object, step: int | None = None) -> None:
        self.records.append((title, step))

    def close(self) -> None:
        self.records.append("closed")


def registered(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    found = EntryPoints(EntryPoint(name, value, exporters.GROUP) for name, value in values.items())
    monkeypatch.setattr(exporters, "entry_points", lambda group: found.select(group=group))


def test_an_exporter_is_found_by_its_entry_point_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch, listed=f"{__name__}:Listed")
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(Listed=Listed))
    records: list[object] = []
    with pytest.raises(ZeroDivisionError), exporter("listed", records=records) as out:
        out.write(Record(model="Net"), 3)
        1 / 0  # noqa: B018
    assert records == [("Net", 3), "closed"]


def test_another_name_is_an_error_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch, tensorboard="a:b", mlflow="a:b")
    with pytest.raises(UsageError, match="no exporter has the name 'tensorbord': is 'tensorboard' meant"):
        exporter("tensorbord").__enter__()


def test_a_package_that_is_missing_is_an_error_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch, mlflow="not_installed_here:Exporter")
    with pytest.raises(UsageError, match=r"needs not_installed_here, .*: pip install 'pytest-modelprobe\[mlflow\]'"):
        exporter("mlflow").__enter__()


def reading(*numbers: float) -> Reading:
    mean = sum(numbers) / len(numbers)
    deviations = sum((x - mean) ** 2 for x in numbers)
    low, high = min(numbers), max(numbers)
    statistics = Statistics(count=len(numbers), min=low, max=high, mean=mean, deviations=deviations)
    return Reading(statistics=statistics)


def test_values_have_three_numbers_and_gradients_their_rms() -> None:
    kind = {"dtype": "float32", "device": "cpu"}
    output = Value(path="output", shape=(2,), forward=reading(1, 3), backward=reading(3, 4), **kind)
    call = Call(root="fc", root_training=False, index=0, outputs=(output,))
    bias = Parameter(name="bias", shape=(2,), reading=reading(0, 0), gradient=None, **kind)
    fc = Layer(name="fc", type="Linear", calls=(call,), parameters=(bias,))
    found = {name: value for layer, name, value in scalars(Record(model="Net", layers={"fc": fc}))}
    assert found == pytest.approx(
        {
            "output_mean": 2.0,
            "output_std": 1.0,
            "output_rms": 5**0.5,
            "output_gradient_rms": 12.5**0.5,
            "bias_mean": 0.0,
            "bias_std": 0.0,
            "bias_rms": 0.0,
        }
    )


def test_tensors_without_finite_numbers_have_none() -> None:
    nan = Reading(statistics=Statistics(count=1, nan=1))
    bias = Parameter(name="bias", shape=(1,), dtype="float32", device="cpu", reading=nan)
    fc = Layer(name="fc", type="Linear", parameters=(bias,))
    assert list(scalars(Record(model="Net", layers={"fc": fc}))) == []
