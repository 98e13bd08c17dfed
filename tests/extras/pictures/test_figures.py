"""Pictures, and the maps that they show."""

from __future__ import annotations

import base64
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_modelprobe import ModelProbe, NothingObservedError, Record, UsageError
from pytest_modelprobe.extras.pictures import figures as drawing
from pytest_modelprobe.record import Call, Layer, Reading, Statistics, Value
from pytest_modelprobe.statistics import collect, reduce

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib, the extra plots"
)
PNG = b"\x89PNG\r\n"


@pytest.fixture
def probe() -> Iterator[ModelProbe]:
    with ModelProbe() as probe:
        yield probe


class Net(nn.Module):
    """A small CNN with what hooks get wrong: batch norm, and a function that changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.norm(self.conv(x)), inplace=True).mean((2, 3)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


X = torch.randn(2, 1, 8, 6, generator=torch.Generator().manual_seed(0))


# --- Grad-CAM ---------------------------------------------------------------------------------------------------------


def by_autograd(model: Net, classes: list[int]) -> torch.Tensor:
    """Return the map of ``norm`` as in the paper, in plain autograd."""
    model.eval()
    features = model.norm(model.conv(X)).detach().requires_grad_()
    scores = model.head(features.relu().mean((2, 3)))
    gradient = torch.autograd.grad(sum(scores[i, c] for i, c in enumerate(classes)), features)[0]
    return torch.einsum("nkhw,nk->nhw", features.detach(), gradient.mean((2, 3))).relu()


@pytest.mark.parametrize("target", [1, torch.tensor([2, 0])], ids=["one", "each"])
def test_the_map_is_that_of_plain_autograd(probe: ModelProbe, target: int | torch.Tensor) -> None:
    classes = [target, target] if isinstance(target, int) else target.tolist()
    torch.testing.assert_close(probe.grad_cam(net(), "norm", target, X), by_autograd(net(), classes))


def test_the_model_is_as_before(probe: ModelProbe) -> None:
    model = net().train()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    probe.grad_cam(model, "norm", 0, X)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {"head.weight"}
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))


@pytest.mark.parametrize(
    ("layer", "target", "message"),
    [
        ("head", 0, r"needs outputs \(N, C, H, W\); head returned \(2, 3\)"),
        ("*", 0, "selects 3 layers, among them conv and norm: choose one"),
        ("norm", lambda scores: scores, "target returns a scalar"),
        ("norm", lambda scores: scores.detach().sum(), "the score has no gradient"),
    ],
)
def test_what_has_no_map_is_refused(probe: ModelProbe, layer: str, target: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        probe.grad_cam(net(), layer, target, X)


@pytest.mark.parametrize("target", ["cat", 1.5, [0, 1, 2]])
def test_a_target_that_is_no_class_is_refused(probe: ModelProbe, target: object) -> None:
    with pytest.raises(UsageError, match="target is one class, or one for each image, as integers; got "):
        probe.grad_cam(net(), "norm", target, X)


def test_a_map_is_no_run_of_the_probe_and_needs_no_matplotlib(probe: ModelProbe) -> None:
    model = net()
    with pytest.raises(UsageError, match=r"target is a class from 0 to 2; got 3"):
        probe.grad_cam(model, "norm", 3, X)
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(NothingObservedError):
        _ = probe.record


# --- without matplotlib -----------------------------------------------------------------------------------------------


@pytest.fixture
def _no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.mark.usefixtures("_no_matplotlib")
def test_without_matplotlib_a_figure_says_what_to_install(probe: ModelProbe, tmp_path: Path) -> None:
    record = probe.run(net(), X, loss="random")
    for draw in (
        lambda: probe.feature_maps(net(), "conv", X),
        lambda: probe.grad_cam(net(), "conv", 0, X, tmp_path / "cam.png"),
        lambda: probe.plot_gradients(record),
        lambda: probe.plot_distributions(record, record),
    ):
        with pytest.raises(UsageError, match=r"pip install pytest-modelprobe\[plots\]"):
            draw()


# --- pictures ---------------------------------------------------------------------------------------------------------


@needs_matplotlib
def test_figures_are_taken_once_as_images(probe: ModelProbe, tmp_path: Path) -> None:
    probe.feature_maps(net(), "conv", X)
    probe.grad_cam(net(), "conv", 1, X, tmp_path / "made" / "cam.png")
    taken = probe.take_figures()
    assert [(figure["title"], figure["media"]) for figure in taken] == [
        ("Feature maps of conv, image 0 of 2", "image/png"),
        ("Grad-CAM of conv, class 1", "image/png"),
    ]
    assert all(base64.b64decode(figure["data"]).startswith(PNG) for figure in taken)
    assert (tmp_path / "made" / "cam.png").read_bytes().startswith(PNG)
    assert probe.take_figures() == []


@needs_matplotlib
def test_pyplot_knows_nothing_of_a_figure(probe: ModelProbe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    probe.feature_maps(net(), "conv", X)
    probe.take_figures()
    assert "matplotlib.pyplot" not in sys.modules


@needs_matplotlib
def test_a_grid_has_a_panel_for_each_channel(probe: ModelProbe) -> None:
    figure = probe.feature_maps(net(), "conv", X)
    assert [axes.get_title() for axes in figure.axes if axes.images] == ["0", "1", "2", "3"]


@needs_matplotlib
def test_an_output_that_is_no_map_is_refused(probe: ModelProbe) -> None:
    with pytest.raises(UsageError, match=r"feature maps have 4 dimensions .*; head returned \(2, 3\)"):
        probe.feature_maps(net(), "head", X)
    with pytest.raises(UsageError, match=r"none of them 0; conv returned \(0, 4, 8, 6\)"):
        probe.feature_maps(net().eval(), "conv", X[:0])


@needs_matplotlib
def test_the_gradients_of_all_layers_are_drawn_also_of_those_next_to_the_loss(probe: ModelProbe) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(150)))
    figure = probe.plot_gradients(probe.run(model, torch.ones(2, 4), loss="random", histograms=True))
    (axes,) = figure.axes
    names = [tick.get_text() for tick in axes.get_xticklabels()]
    assert (names[0], names[-1], len(names)) == ("0 Linear", "147 Linear", 50)
    (rms, *_) = axes.lines
    assert rms.get_xdata()[-1] == 149
    assert axes.get_xlim()[1] > 149
    assert "150 layers, one of 3 is named" in figure.texts[-1].get_text()


def test_gradients_of_a_run_without_a_backward_are_refused(probe: ModelProbe) -> None:
    with pytest.raises(NothingObservedError, match=r"Net has no gradients to draw: pass run\(..., loss=...\)"):
        probe.plot_gradients(probe.run(net(), X))


def test_grad_cam_says_where_gradients_are_switched_off() -> None:
    with torch.inference_mode(), pytest.raises(UsageError) as error:
        ModelProbe().grad_cam(net(), "norm", 0, X)
    said = "grad_cam needs gradients, which torch.inference_mode() does not record: call it outside"
    assert str(error.value) == said
    model = nn.Sequential(nn.Conv2d(X.shape[1], 2, 3), Checkpointed(nn.Conv2d(2, 2, 3)), nn.AdaptiveAvgPool2d(1))
    model.append(nn.Flatten())
    said = r"1\.inner runs without gradients, which grad_cam needs: in torch\.no_grad\(\), or in a checkpoint with"
    with pytest.raises(UsageError, match=said):
        ModelProbe().grad_cam(model, "1.inner", 0, X)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)


def reading(mean: float, std: float) -> Reading:
    return Reading(statistics=Statistics(count=2, min=mean - std, max=mean + std, mean=mean, deviations=2 * std**2))


def record(name: str, mean: float) -> Record:
    value = Value(path="output", shape=(2,), dtype="float32", device="cpu", forward=reading(mean, 1.0))
    call = Call(root="(root)", root_training=False, index=0, outputs=(value,))
    return Record(model="Net", forwards=1, layers={name: Layer(name=name, type="Linear", calls=(call,))})


@needs_matplotlib
def test_distributions_have_their_distance_in_standard_deviations(probe: ModelProbe) -> None:
    figure = probe.plot_distributions(record("fc", 0.0), record("fc", 3.0), labels=("day", "night"))
    assert figure.axes[0].get_title() == "fc\ndistance 3"
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["day", "night"]


def test_records_without_a_layer_in_common_are_refused(probe: ModelProbe) -> None:
    with pytest.raises(NothingObservedError, match="no layer in common"):
        probe.plot_distributions(record("a", 0.0), record("b", 0.0))


# --- histograms -------------------------------------------------------------------------------------------------------


def binned(values: np.ndarray) -> Reading:
    (reading,) = collect([reduce(torch.from_numpy(values), histogram=True)])
    return reading


def test_the_distance_of_histograms_is_that_of_wasserstein() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.normal(0, 1, 20_000), generator.exponential(1, 20_000) + 0.5
    exact = np.abs(np.sort(a) - np.sort(b)).mean() / np.sqrt((a.var() + b.var()) / 2)
    assert drawing.distance(binned(a), binned(b)) == pytest.approx(exact, rel=0.03)
    assert drawing.distance(binned(a), binned(a)) == 0


def test_the_quartiles_of_a_histogram_are_those_of_the_magnitudes() -> None:
    values = np.random.default_rng(0).normal(0, 1e-3, 20_000)
    exact = np.quantile(np.abs(values), [0.05, 0.25, 0.5, 0.75, 0.95])
    assert drawing._quartiles(binned(values)) == pytest.approx(exact, rel=0.1)


def test_another_word_for_mode_is_refused(probe: ModelProbe) -> None:
    images = torch.ones(1, 1, 4, 4)
    with pytest.raises(UsageError, match="mode is 'train', 'eval' or None for the model's own; got 'test'"):
        probe.feature_maps(nn.Conv2d(1, 1, 1), "(root)", images, mode="test")
    with pytest.raises(UsageError, match="mode is 'train', 'eval' or None for the model's own; got 'test'"):
        probe.grad_cam(nn.Conv2d(1, 1, 1), "(root)", 0, images, mode="test")


def test_a_function_of_the_output_is_a_target(probe: ModelProbe) -> None:
    cam = probe.grad_cam(net(), "norm", lambda scores: scores[:, 1].sum(), X)
    torch.testing.assert_close(cam, by_autograd(net(), [1, 1]))


def test_a_small_map_has_the_size_of_the_images(probe: ModelProbe) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.Flatten(), nn.LazyLinear(3))
    model(X)
    assert probe.grad_cam(model, "0", 0, X).shape == (2, 8, 6)


@needs_matplotlib
def test_names_are_text_and_no_formula(probe: ModelProbe) -> None:
    figure = probe.plot_distributions(record("$\\frac{a$", 0.0), record("$\\frac{a$", 1.0))
    probe.take_figures()  # a formula that is none would raise here
    assert "\\$" in figure.axes[0].get_title()


@needs_matplotlib
def test_a_gradient_below_what_a_histogram_tells_apart_has_no_box(probe: ModelProbe) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.constant_(model[1].weight, 1e-20)
    figure = probe.plot_gradients(probe.run(model, torch.ones(2, 4), loss="random", histograms=True))
    (whiskers, _, _) = figure.axes[0].collections
    assert len(whiskers.get_segments()) == 1
