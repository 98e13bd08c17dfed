"""The methods of a probe that draw. The newest figures of a test are kept for its reports."""

from __future__ import annotations

import functools
from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_modelprobe.models import as_array, check_supported
from pytest_modelprobe.probe import Mode, ModelProbe, Watch, check_mode
from pytest_modelprobe.record import Record, Selector
from pytest_modelprobe.runs import Options, Run

from . import figures, maps
from .maps import Target

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def feature_maps(
    probe: ModelProbe,
    model: nn.Module,
    layer: str,
    x: torch.Tensor,
    path: str | PathLike[str] | None = None,
    *,
    mode: Mode | None = None,
    **kwargs: Any,
) -> Figure:
    """Return the output of a layer as a figure: a grid of the channels of the first image.

    Several outputs, such as the dict of a feature pyramid, have a row each: the mean magnitude of the channels, and
    those that vary most. The model is run and restored as by `run`.

    Args:
        model: The model.
        layer: Name of the layer.
        x: The images, (N, C, H, W).
        path: Where to write the figure too; the suffix says the format.
        mode: ``"train"`` or ``"eval"``. With `None` the model stays in its own mode.
        **kwargs: Keyword arguments for the model.

    Raises:
        UsageError: matplotlib is missing, no output has 4 dimensions, or ``mode`` is neither train nor eval.
        SelectionError: There is no such layer.
    """
    __tracebackhide__ = True
    label, found = maps.feature_maps(_unrecorded(probe, model, (x,), kwargs, mode, layer), layer)
    title = f"Feature maps of {label}, image 0 of {len(x)}"
    figure = figures.feature_maps(title, [(at, _image(tensor)) for at, tensor in found])
    return _drawn(probe, title, figure, path)


def grad_cam(
    probe: ModelProbe,
    model: nn.Module,
    layer: str,
    target: Target,
    x: torch.Tensor,
    path: str | PathLike[str] | None = None,
    *,
    mode: Mode | None = "eval",
    **kwargs: Any,
) -> torch.Tensor:
    """Return for each image the map of where a layer raises the score of a class: Grad-CAM, (N, H, W).

    ``ReLU(sum_k w_k A_k)`` with A_k the channels of the layer's output, and w_k the mean of the gradient of the
    score by A_k (Selvaraju et al. 2017), enlarged bilinearly to the size of the images. The model is restored as by
    `run`, gradients included.

    Args:
        model: The model.
        layer: Name of the layer, mostly the last convolution; its output has the shape (N, C, h, w).
        target: The class, or one for each image; or a function from the output to a scalar.
        x: The images, (N, C, H, W).
        path: Where to write the maps over the images; the suffix says the format.
        mode: ``"train"`` or ``"eval"``. With `None` the model stays in its own mode.
        **kwargs: Keyword arguments for the model.

    Raises:
        UsageError: The layer has no such output, the score does not depend on it, ``mode`` is neither train nor
            eval, or there is a path and no matplotlib.
        SelectionError: There is no such layer.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe
    >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 2))
    >>> ModelProbe().grad_cam(model, "0", 1, torch.ones(3, 1, 8, 8)).shape
    torch.Size([3, 8, 8])
    """
    __tracebackhide__ = True
    label, images, cam = maps.grad_cam(_unrecorded(probe, model, (x,), kwargs, mode, layer), layer, target)
    named = f", class {target}" if isinstance(target, int) else ""
    title = f"Grad-CAM of {label}{named}"
    draw = functools.partial(figures.overlay, title, _image(images), _image(cam))
    if path is not None:
        _drawn(probe, title, draw(), path)
    else:
        _keep(probe, title, draw)
    return cam


def plot_gradients(probe: ModelProbe, record: Record | Watch, path: str | PathLike[str] | None = None) -> Figure:
    """Return the gradients of layers' outputs by depth as a figure: boxes, or root mean squares without histograms.

    Args:
        record: A record with a backward, or a watch.
        path: Where to write the figure too.

    Raises:
        NothingObservedError: The record has no gradients.
        UsageError: matplotlib is missing.
    """
    __tracebackhide__ = True
    record = figures.record_of(record)
    return _drawn(probe, f"Gradients of {record.model}", figures.gradients(record), path)


def plot_distributions(
    probe: ModelProbe,
    a: Record | Watch,
    b: Record | Watch,
    path: str | PathLike[str] | None = None,
    *,
    layers: Selector = "**",
    labels: tuple[str, str] = ("a", "b"),
) -> Figure:
    """Return the outputs of each layer in two records side by side as a figure: two inputs, domains or models.

    Each layer has the distance of the two distributions, in standard deviations; without histograms that of normal
    distributions with the same means and standard deviations.

    Args:
        a: A record or a watch.
        b: Another with layers of the same names.
        path: Where to write the figure too.
        layers: Which layers to draw.
        labels: Names of the two records.

    Raises:
        NothingObservedError: No layer is in both.
        UsageError: matplotlib is missing.
    """
    __tracebackhide__ = True
    a, b = figures.record_of(a), figures.record_of(b)
    title = f"Outputs of {a.model}: {labels[0]} and {labels[1]}"
    return _drawn(probe, title, figures.distributions(a, b, layers, labels), path)


def _keep(probe: ModelProbe, title: str, draw: Callable[[], Figure]) -> None:
    probe.figures.append(functools.partial(figures.as_data, title, draw))


def _drawn(probe: ModelProbe, title: str, figure: Figure, path: str | PathLike[str] | None) -> Figure:
    figures.save(figure, path)
    _keep(probe, title, lambda: figure)
    return figure


def _unrecorded(
    probe: ModelProbe, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode | None, layer: str
) -> Run:
    check_supported(model)
    check_mode(mode)
    options = Options(layers=layer, keep=layer)
    return Run(model, args, kwargs, options, None, mode, device=probe.device, seed=probe.seed)


def _image(tensor: torch.Tensor) -> Any:
    """Return an array of its own, which `figures` may keep."""
    return as_array(tensor.detach().float().cpu()).copy()
