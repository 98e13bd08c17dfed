"""Records are read back by MLflow itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.extras.exporters.export import MLflowExporter
from pytest_modelprobe.record import ROOT, Record

mlflow = pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy")
pytest.importorskip("alembic")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database, which takes some seconds to make."""
    folder = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    mlflow.MlflowClient(uri).create_experiment("modelprobe", artifact_location=folder.as_uri())
    return uri


def client(uri: str) -> Any:
    return mlflow.MlflowClient(uri)


def record_of(scale: float) -> Record:
    return ModelProbe().run(nn.Sequential(nn.Identity()), torch.tensor([scale, 3 * scale]))


def test_metrics_and_the_record_of_each_step_are_in_a_run_of_its_own(uri: str, tmp_path: Path) -> None:
    out = MLflowExporter(uri)
    for step in range(2):
        out.write(record_of(step + 1.0), step)
    out.close()
    history = client(uri).get_metric_history(out.run_id, "output_mean/0")
    assert [(metric.step, metric.value) for metric in history] == [(0, 2.0), (1, 4.0)]
    assert client(uri).get_run(out.run_id).info.status == "FINISHED"
    path = client(uri).download_artifacts(out.run_id, "modelprobe/Sequential.1.json", str(tmp_path))
    assert Record.from_dict(json.loads(Path(path).read_text())).model == "Sequential"


def test_a_figure_is_an_artifact_of_its_step(uri: str, tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    out = MLflowExporter(uri)
    out.write_figure("gradients", figure, 3)
    out.close()
    path = client(uri).download_artifacts(out.run_id, "modelprobe/gradients.3.png", str(tmp_path))
    assert Path(path).read_bytes().startswith(b"\x89PNG")


def test_a_run_that_is_given_stays_open(uri: str) -> None:
    experiment = client(uri).get_experiment_by_name("modelprobe").experiment_id
    run = client(uri).create_run(experiment)
    out = MLflowExporter(uri, run_id=run.info.run_id)
    out.write(record_of(1.0))
    out.close()
    assert client(uri).get_run(run.info.run_id).info.status == "RUNNING"
    assert client(uri).get_run(run.info.run_id).data.metrics["output_rms/root"] == pytest.approx(5**0.5)


def test_names_that_mlflow_refuses_are_replaced_and_stay_different(uri: str) -> None:
    names = ["..", "a/b", "a|b", "a_b", "root", "<img onerror=x>", "x" * 5000, "\ud800"]
    record = record_of(1.0)
    layers = dict.fromkeys(names, record.layers[ROOT])
    out = MLflowExporter(uri)
    out.write(Record(model="../up", layers={n: with_name(layer, n) for n, layer in layers.items()}))
    out.close()
    metrics = client(uri).get_run(out.run_id).data.metrics
    assert sum(key.startswith("output_mean/") for key in metrics) == len(names)
    assert "output_mean/a_b" in metrics


def with_name(layer: Any, name: str) -> Any:
    return dataclasses.replace(layer, name=name)
