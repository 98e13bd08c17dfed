"""Export records to tools that show numbers over time.

An exporter is found by its name in a group of entry points, so that other packages can add theirs, and none of the
tools is imported before it is asked for. All exporters write the same numbers under the same names, which `readings`
and `scalars` yield.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.record import ROOT, Reading, Record, nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


# --- TensorBoard ------------------------------------------------------------------------------------------------------


class TensorBoardExporter:
    """Writes ``layer/output_mean`` and the like as scalars, and histograms of records with ``histograms=True``.

    Args:
        log_dir: The folder that TensorBoard is given.
    """

    def __init__(self, log_dir: str | Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(log_dir))

    def write(self, record: Record, step: int | None = None) -> None:
        """Write the numbers of a record."""
        for layer, name, value in scalars(record):
            self._writer.add_scalar(f"{layer}/{name}", value, step)
        for layer, quantity, reading in readings(record):
            self._write_histogram(f"{layer}/{quantity}", reading, step)

    def _write_histogram(self, tag: str, reading: Reading, step: int | None) -> None:
        numbers, histogram = reading.statistics, reading.histogram
        if numbers is None or numbers.mean is None or numbers.rms is None or histogram is None:
            return
        edges, counts = histogram.bins()
        self._writer.add_histogram_raw(
            tag,
            min=numbers.min,
            max=numbers.max,
            num=numbers.finite,
            sum=numbers.mean * numbers.finite,
            sum_squares=numbers.rms**2 * numbers.finite,
            bucket_limits=edges[1:],
            bucket_counts=counts,
            global_step=step,
        )

    def write_figure(self, title: str, figure: Figure, step: int | None = None) -> None:
        """Write a figure of matplotlib as an image."""
        import numpy
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        # `SummaryWriter.add_figure` does this through pyplot, which sets a backend.
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        self._writer.add_image(title, numpy.array(canvas.buffer_rgba())[..., :3], step, dataformats="HWC")

    def close(self) -> None:
        """Write what is not written yet."""
        self._writer.close()


# --- MLflow -----------------------------------------------------------------------------------------------------------

_MOST = 1000
"""How many metrics go into one request. MLflow accepts no more."""


class MLflowExporter:
    """Writes ``output_mean/layer`` and the like as metrics, and the record as ``modelprobe/Net.json``.

    It writes into the run that is active, else into one of its own.

    Args:
        tracking_uri: Where MLflow keeps its data, or `None` for the place that MLflow is set up for.
        experiment: Name of the experiment of a run of its own; it is made if there is none.
        run_id: The run to write into instead.
    """

    def __init__(
        self, tracking_uri: str | None = None, *, experiment: str = "modelprobe", run_id: str | None = None
    ) -> None:
        import mlflow

        self._client = mlflow.MlflowClient(tracking_uri)
        active = mlflow.active_run() if tracking_uri is None else None
        self._ends = run_id is None and active is None
        self.run_id: str = run_id or (active.info.run_id if active else self._new_run(experiment))
        """The run that is written into."""

    def _new_run(self, experiment: str) -> str:
        known = self._client.get_experiment_by_name(experiment)
        found = known.experiment_id if known else self._client.create_experiment(experiment)
        return str(self._client.create_run(found).info.run_id)

    def write(self, record: Record, step: int | None = None) -> None:
        """Write the numbers of a record."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        found = [Metric(f"{name}/{_key(layer)}", value, now, step or 0) for layer, name, value in scalars(record)]
        for start in range(0, len(found), _MOST):
            self._client.log_batch(self.run_id, metrics=found[start : start + _MOST])
        self._client.log_dict(self.run_id, record.to_dict(), f"{_artifact(record.model, step)}.json")

    def write_figure(self, title: str, figure: Figure, step: int | None = None) -> None:
        """Write a figure of matplotlib as the artifact ``modelprobe/title.png``."""
        self._client.log_figure(self.run_id, figure, f"{_artifact(title, step)}.png")

    def close(self) -> None:
        """End the run, if the exporter began it."""
        if self._ends:
            self._client.set_terminated(self.run_id)


def _artifact(name: str, step: int | None) -> str:
    return f"modelprobe/{_key(name)}" + ("" if step is None else f".{step}")


def _key(name: str) -> str:
    """Return a name in characters that MLflow accepts; names that it changes end in a digest, so that they differ."""
    if name == ROOT:
        return "root"
    cleaned = re.sub(r"[^A-Za-z0-9_.\- ]", "_", name)[:100]
    if cleaned == name and name.strip(". ") and name != "root":
        return name
    return f"{cleaned}_{hashlib.sha256(name.encode('utf-8', 'replace')).hexdigest()[:8]}"
