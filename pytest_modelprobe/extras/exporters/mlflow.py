"""Records in MLflow: metrics, and the whole record as an artifact.

Metrics show what changes over training; the artifact has the rest for the step that looks odd.
"""

from __future__ import annotations

import hashlib
import re
import time
from typing import TYPE_CHECKING

from pytest_modelprobe.record import ROOT, Record

from .export import scalars

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
