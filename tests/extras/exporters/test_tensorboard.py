"""Records are read back by TensorBoard itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.extras.exporters.export import exporter
from pytest_modelprobe.record import Record

pytest.importorskip("tensorboard")
event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def read_back(folder: Path) -> Any:
    events = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    return events


def exported(folder: Path, *records: Record) -> Any:
    with exporter("tensorboard", log_dir=folder) as out:
        for step, record in enumerate(records):
            out.write(record, step)
    return read_back(folder)


def test_scalars_of_a_training_are_those_of_the_records(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    records = []
    with ModelProbe() as probe, exporter("tensorboard", log_dir=tmp_path) as out:
        watch = probe.watch(model)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            records.append(watch.last)
            out.write(records[-1], step)
    scalars = read_back(tmp_path).Scalars("0/output_mean")
    assert [scalar.step for scalar in scalars] == [0, 1, 2]
    assert [scalar.value for scalar in scalars] == pytest.approx([r["0"].output.statistics.mean for r in records])
    gradients = read_back(tmp_path).Scalars("0/weight_gradient_rms")
    assert [scalar.value for scalar in gradients] == pytest.approx(
        [record["0"].parameters[0].gradient.statistics.rms for record in records]
    )


def test_a_figure_is_an_image_of_its_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    with ModelProbe() as probe, exporter("tensorboard", log_dir=tmp_path) as out:
        figure = probe.feature_maps(model, "0", torch.ones(1, 1, 8, 8))
        out.write_figure("maps <img>", figure, 2)
    (image,) = read_back(tmp_path).Images("maps <img>")
    width, height = figure.get_size_inches() * figure.dpi
    assert (image.step, image.width, image.height) == (2, int(width), int(height))


def test_histograms_have_all_counts_between_their_edges(tmp_path: Path) -> None:
    x = torch.tensor([-2.0, -1.5, -1.0, 0.0, 0.0, 1.0, 1.2, 3.0])
    record = ModelProbe().run(nn.Identity(), x, histograms=True)
    # -2 is in bin 2, -1.5 in 1, -1 in 0; 1 and 1.2 in 0, 3 in 3
    (found,) = exported(tmp_path, record).Histograms("(root)/output")
    value = found.histogram_value
    assert (value.min, value.max, value.num, value.sum) == (-2.0, 3.0, 8.0, pytest.approx(x.sum().item()))
    assert value.sum_squares == pytest.approx(x.square().sum().item())
    counted = {round(edge, 3): n for edge, n in zip(value.bucket_limit, value.bucket, strict=True) if n}
    assert counted == {-2.0: 1, -1.414: 1, -1.0: 1, 1.0: 2, 1.414: 2, 4.0: 1}
