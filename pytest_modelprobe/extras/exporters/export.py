"""Export records to tools that show numbers over time.

An exporter is found by its name in a group of entry points, so that other packages can add theirs, and none of the
tools is imported before it is asked for. All exporters write the same numbers under the same names, which `readings`
and `scalars` yield.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, cast

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.record import Reading, Record, nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["GROUP", "Exporter", "exporter", "readings", "scalars"]

GROUP = "pytest_modelprobe.exporters"
"""The group of entry points: name → function or class that takes the options and returns an `Exporter`."""


class Exporter(Protocol):
    """Writes records somewhere."""

    def write(self, record: Record, step: int | None = None) -> None:
        """Write the numbers of a record; ``step`` is its place in time."""

    def write_figure(self, title: str, figure: Figure, step: int | None = None) -> None:
        """Write a figure of matplotlib, such as those of `ModelProbe.feature_maps` and `plot_gradients`."""

    def close(self) -> None:
        """Write what is not written yet."""


@contextlib.contextmanager
def exporter(name: str, /, **options: Any) -> Iterator[Exporter]:
    """Return an exporter to use in a ``with`` statement, which closes it.

    Args:
        name: ``"tensorboard"``, ``"mlflow"``, or one that another package registered in `GROUP`.
        **options: Options of that exporter: ``log_dir=`` of TensorBoard.

    Raises:
        UsageError: There is no exporter of that name, or the package that it needs is not installed.
    """
    found = entry_points(group=GROUP)
    if name not in found.names:
        near = nearest(name, sorted(found.names), n=1)
        hint = f"is {near[0]!r} meant?" if near else f"there are {', '.join(sorted(found.names)) or 'none'}"
        raise UsageError(f"no exporter has the name {name!r}: {hint}")
    try:
        out = cast(Exporter, found[name].load()(**options))
    except ModuleNotFoundError as error:
        extra = f": pip install 'pytest-modelprobe[{name}]'" if name in ("tensorboard", "mlflow") else ""
        raise UsageError(f"the exporter {name!r} needs {error.name}, which is not installed{extra}") from error
    with contextlib.closing(out):
        yield out


def readings(record: Record) -> Iterator[tuple[str, str, Reading]]:
    """Yield layer, quantity and reading: first output of the first call and its gradient, parameters and theirs.

    >>> from pytest_modelprobe.record import Layer, Parameter
    >>> bias = Parameter(name="bias", shape=(2,), dtype="float32", device="cpu")
    >>> fc = Layer(name="fc", type="Linear", parameters=(bias,))
    >>> [names for *names, _ in readings(Record(model="Net", layers={"fc": fc}))]
    [['fc', 'bias']]
    """
    for layer in record.layers.values():
        for value in layer.calls[0].outputs[:1] if layer.calls else ():
            yield layer.name, "output", value.forward
            if value.backward is not None:
                yield layer.name, "output_gradient", value.backward
        for parameter in layer.parameters:
            if parameter.tied_to is None:
                yield layer.name, parameter.name, parameter.reading
                if parameter.gradient is not None:
                    yield layer.name, f"{parameter.name}_gradient", parameter.gradient


def scalars(record: Record) -> Iterator[tuple[str, str, float]]:
    """Yield layer, name and value: mean, std and rms of what `readings` yields, of gradients the rms alone.

    Tensors without finite elements have none.
    """
    for layer, quantity, reading in readings(record):
        for statistic in ("rms",) if quantity.endswith("_gradient") else ("mean", "std", "rms"):
            value = None if reading.statistics is None else getattr(reading.statistics, statistic)
            if value is not None:
                yield layer, f"{quantity}_{statistic}", float(value)
