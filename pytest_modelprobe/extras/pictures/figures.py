"""Pictures of feature maps, of where a model looks, of gradients and of distributions.

They are for what a table of numbers hides: one channel that is flat, a gradient that fades from layer to layer. They
need matplotlib, which is imported when a figure is drawn, because most runs draw none. Each function returns a
`matplotlib.figure.Figure` that pyplot does not know, so that no window opens and the backend of the test stays as it
is.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.record import Layer, Reading, Record, Selector, selected
from pytest_modelprobe.report.html.charts import QUARTILES, SMALLEST, quantiles
from pytest_modelprobe.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Array = numpy.ndarray[Any, numpy.dtype[Any]]

# With more of them, the parts of a figure are too small to be seen. So the first are drawn, and the rest is counted.
_MOST_CHANNELS = 64
_MOST_IMAGES = 8
_MOST_PANELS = 24
# More layers are drawn closer together, and not all are named. None is left out: those at the end are next to the loss.
_MOST_NAMES, _WIDEST = 60, 20.8
_BLUE, _ORANGE, _GRAY = "#3b6fb6", "#d9662c", "#6b7280"


def as_data(title: str, draw: Callable[[], Figure]) -> dict[str, str] | None:
    """Return a figure as an image; None without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return None
    written = io.BytesIO()
    draw().savefig(written, format="png")
    return {"title": title, "media": "image/png", "data": base64.b64encode(written.getvalue()).decode("ascii")}


def save(figure: Figure, path: str | PathLike[str] | None) -> None:
    """Write a figure to a file, if there is a path; its suffix says the format."""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("figures need matplotlib: pip install pytest-modelprobe[plots]") from error
    return Figure(figsize=(width, height), dpi=130, layout="constrained", facecolor="white")


# --- feature maps -----------------------------------------------------------------------------------------------------


def feature_maps(title: str, channels: Array) -> Figure:
    """Return the channels of an image."""
    shown = channels[:_MOST_CHANNELS]
    columns = min(len(shown), max(4, math.ceil(math.sqrt(len(shown) * 1.6))))
    rows = math.ceil(len(shown) / columns)
    height, width = channels.shape[1:]
    figure = _figure(1.05 * columns + 0.8, 1.05 * rows * min(2.0, max(0.4, height / width)) + 0.75)
    axes = figure.subplots(rows, columns, squeeze=False)
    for panel in axes.flat:
        panel.axis("off")
    colors = _colors(shown)
    for i, (panel, channel) in enumerate(zip(axes.flat, shown, strict=False)):
        image = panel.imshow(channel, interpolation="nearest", **colors)
        panel.set_title(f"{i}" + (" zero" if not channel.any() else ""), fontsize=7, color=_GRAY, pad=2)
    hidden = f", the first {len(shown)} of {len(channels)}" if len(channels) > len(shown) else ""
    _head(figure, title, f"{len(channels)} channels of {height} × {width}{hidden}")
    figure.colorbar(image, ax=axes, shrink=0.8, pad=0.01, aspect=30).ax.tick_params(labelsize=7)
    return figure


def _colors(values: Array) -> dict[str, Any]:
    """Return a scale for all channels, with zero in the middle where values have both signs."""
    finite = values[numpy.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    if low < 0 < high:
        most = max(-low, high)
        return {"cmap": "RdBu_r", "vmin": -most, "vmax": most}
    return {"cmap": "viridis", "vmin": low, "vmax": high if high > low else low + 1}


# --- where a model looks ----------------------------------------------------------------------------------------------


def overlay(title: str, images: Array, cam: Array) -> Figure:
    """Return each image, and below it the same with its map; the maximum of each map has the same color."""
    shown = min(len(images), _MOST_IMAGES)
    ratio = images.shape[2] / images.shape[3]
    figure = _figure(max(1.7 * shown + 0.3, 4.2), 2 * 1.7 * ratio + 0.9)
    axes = figure.subplots(2, shown, squeeze=False)
    for i in range(shown):
        picture = _picture(images[i])
        gray = picture.mean(axis=-1) if picture.ndim == 3 else picture
        most = float(cam[i].max())
        relative = cam[i] / most if most > 0 else numpy.zeros_like(cam[i])
        axes[0, i].imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes[1, i].imshow(gray, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes[1, i].imshow(relative, cmap="inferno", vmin=0, vmax=1, alpha=0.25 + 0.55 * relative)
        axes[0, i].set_title(f"image {i}", fontsize=8, color=_GRAY, pad=3)
        if most <= 0:
            axes[1, i].set_xlabel("zero everywhere", fontsize=8, color=_ORANGE)
    for panel in axes.flat:
        panel.set(xticks=[], yticks=[])
    hidden = f", the first {shown} of {len(images)}" if len(images) > shown else ""
    _head(figure, title, f"bright: where the layer raises the score{hidden}")
    return figure


def _picture(image: Array) -> Array:
    """Return an image from 0 to 1: three channels are red, green and blue, others their mean."""
    low, high = float(image.min()), float(image.max())
    scaled = (image - low) / (high - low) if high > low else numpy.zeros_like(image)
    return numpy.moveaxis(scaled, 0, -1) if len(image) == 3 else scaled.mean(axis=0)


# --- gradients and distributions --------------------------------------------------------------------------------------


def record_of(subject: Any) -> Record:
    """Return a record, or that of a watch or probe."""
    from pytest_modelprobe.assertions import sources

    return sources.record_of(subject)


def gradients(record: Record) -> Figure:
    """Return the magnitudes of the gradients of layers' outputs by depth: boxes, or root mean squares."""
    found = [(layer, reading) for layer in _by_depth(record) if (reading := _gradient(layer)) is not None]
    if not found:
        raise NothingObservedError(f"{record.model} has no gradients to draw: pass run(..., loss=...)")
    figure = _figure(min(max(5.0, 0.32 * len(found) + 1.6), _WIDEST), 4.2)
    axes = figure.subplots()
    boxes = {place: numbers for place, (_, reading) in enumerate(found) if (numbers := _quartiles(reading))}
    if boxes:
        thick = 10.0 * min(1.0, _WIDEST / (0.32 * len(found) + 1.6))
        low, lower, middle, upper, high = zip(*boxes.values(), strict=True)
        axes.vlines(list(boxes), low, high, color=_BLUE, linewidth=min(1.0, thick))
        axes.vlines(list(boxes), lower, upper, color="#9db8de", linewidth=thick)
        axes.scatter(list(boxes), middle, marker="_", s=thick**2, color=_BLUE, zorder=3)
    rms = [reading.statistics.rms if reading.statistics else None for _, reading in found]
    positive = [(place, value) for place, value in enumerate(rms) if value]
    axes.plot(*zip(*positive, strict=True) if positive else ([], []), color=_ORANGE, marker="o", markersize=3,
              linewidth=1, label="root mean square")  # fmt: skip
    zero = [place for place, value in enumerate(rms) if not value]
    if zero:
        axes.plot(zero, [0.02] * len(zero), "x", color="#b00020", transform=axes.get_xaxis_transform(), label="zero")
    axes.set_yscale("log")
    every = math.ceil(len(found) / _MOST_NAMES)
    names = [_text(f"{layer.name} {layer.type_name}") for layer, _ in found]
    axes.set_xticks(range(0, len(found), every), names[::every], rotation=90, fontsize=7)
    axes.set_xlim(-0.7, len(found) - 0.3)
    axes.set_ylabel("gradient of the output, magnitude", fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)
    hidden = f"; {len(found)} layers, one of {every} is named" if every > 1 else ""
    what = "boxes: quartiles, whiskers: 5 % to 95 %" if boxes else "run with histograms=True to see boxes"
    _head(figure, f"Gradients of {record.model}", f"in order of execution; {what}{hidden}")
    return figure


def distributions(a: Record, b: Record, layers: Selector = "**", labels: tuple[str, str] = ("a", "b")) -> Figure:
    """Return the outputs of each layer in two records side by side, with their distance."""
    names = {layer.name for layer in selected(a, layers)}
    pairs = [
        (layer.name, mine, theirs, distance(mine, theirs))
        for layer in _by_depth(a)
        if layer.name in names and layer.name in b.layers
        if (mine := _output(layer)) is not None and (theirs := _output(b.layers[layer.name])) is not None
    ]
    if not pairs:
        raise NothingObservedError("the two records have no layer in common with floating-point outputs")
    most = sorted((pair[3] for pair in pairs), reverse=True)[:_MOST_PANELS][-1]
    shown = [pair for pair in pairs if pair[3] >= most][:_MOST_PANELS]
    columns = min(4, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = _figure(2.3 * columns + 0.4, 1.55 * rows + 1.0)
    axes = figure.subplots(rows, columns, squeeze=False)
    worst = max(pair[3] for pair in pairs)
    for panel, pair in itertools.zip_longest(axes.flat, shown):
        if pair is None:
            panel.axis("off")
            continue
        name, *readings, far = pair
        edges = _range(readings)
        for reading, color, label in zip(readings, (_BLUE, _ORANGE), labels, strict=True):
            heights = _density(reading, edges)
            panel.stairs(heights, edges, fill=True, alpha=0.28, color=color)
            panel.stairs(heights, edges, color=color, linewidth=1, label=_text(label))
        bold = "bold" if far == worst and worst > 0 else "normal"
        panel.set_title(f"{_text(a[name].label)}\ndistance {far:.3g}", fontsize=8, fontweight=bold)
        panel.set_yticks([])
        panel.tick_params(axis="x", labelsize=7)
        panel.locator_params(axis="x", nbins=4)
        panel.spines[["top", "right", "left"]].set_visible(False)
    axes.flat[0].legend(fontsize=7, frameon=False)
    hidden = f"; the {len(shown)} most distant of {len(pairs)} layers" if len(pairs) > len(shown) else ""
    exact = all(_bins(reading) is not None for pair in shown for reading in pair[1:3])
    how = "" if exact else "; normal curves where there is no histogram"
    title = f"Outputs of {a.model}: {labels[0]} and {labels[1]}"
    _head(figure, title, f"distances in standard deviations{how}{hidden}")
    return figure


def distance(a: Reading, b: Reading) -> float:
    """Return how far two distributions are apart, in standard deviations of both together.

    With histograms it is the 1-Wasserstein distance, of values that are uniform within each bin; else the
    2-Wasserstein distance of normal distributions with the same means and standard deviations.

    >>> from pytest_modelprobe.record import Statistics
    >>> a = Reading(statistics=Statistics(count=2, min=-1.0, max=1.0, mean=0.0, deviations=2.0))
    >>> b = Reading(statistics=Statistics(count=2, min=2.0, max=4.0, mean=3.0, deviations=2.0))
    >>> distance(a, b)
    3.0
    """
    from pytest_modelprobe.assertions.behavior import in_pooled_deviations

    assert a.statistics is not None
    assert b.statistics is not None
    mean, std, other_mean, other_std = (x or 0.0 for s in (a.statistics, b.statistics) for x in (s.mean, s.std))
    mine, theirs = _bins(a), _bins(b)
    if mine is None or theirs is None:
        far = math.hypot(mean - other_mean, std - other_std)
    else:
        edges = numpy.union1d(mine[0], theirs[0])
        gap = numpy.abs(numpy.interp(edges, *mine) - numpy.interp(edges, *theirs))
        far = float(((gap[1:] + gap[:-1]) / 2 * numpy.diff(edges)).sum())
    return in_pooled_deviations(far, std, other_std)


def _bins(reading: Reading) -> tuple[Array, Array] | None:
    """Return the edges of a histogram and the share of the elements below each; None where there is no histogram."""
    histogram = reading.histogram
    if histogram is None:
        return None
    edges, counts = histogram.bins()
    if not any(counts):
        return None
    return numpy.array(edges), numpy.concatenate([[0.0], numpy.cumsum(counts)]) / sum(counts)


def _quartiles(reading: Reading) -> list[float]:
    """Return the numbers of a box, as the page has them; empty without a histogram, or if it cannot tell them."""
    found = quantiles(reading.histogram, QUARTILES) if reading.histogram else []
    return found if found and found[0] > SMALLEST else []


def _density(reading: Reading, edges: Array) -> Array:
    """Return the share of the elements between edges, by their width."""
    found = _bins(reading)
    if found is not None:
        below = numpy.interp(edges, *found)
    else:
        s = reading.statistics
        assert s is not None
        scale = (s.std or 0.0) * math.sqrt(2) or float(edges[1] - edges[0])
        low, high = (0.0 if s.min is None else s.min), (0.0 if s.max is None else s.max)
        within = numpy.concatenate([[low, high], numpy.clip(edges, low, high)])
        normal = numpy.array([math.erf((x - (s.mean or 0.0)) / scale) for x in within])
        below = (normal[2:] - normal[0]) / ((normal[1] - normal[0]) or 1.0)
    shares: Array = numpy.diff(below) / numpy.diff(edges)
    return shares


def _range(readings: Sequence[Reading]) -> Array:
    """Return 48 bins that hold both distributions up to four standard deviations."""
    lows, highs = [], []
    for s in (reading.statistics for reading in readings):
        if s is not None and s.mean is not None and s.min is not None and s.max is not None:
            lows.append(max(s.min, s.mean - 4 * (s.std or 0)))
            highs.append(min(s.max, s.mean + 4 * (s.std or 0)))
    low, high = min(lows, default=0.0), max(highs, default=0.0)
    margin = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
    return numpy.linspace(low - margin, high + margin, 49)


# --- of a record ------------------------------------------------------------------------------------------------------


def _by_depth(record: Record) -> list[Layer]:
    """Return the leaves that were called, in order of execution."""
    return list({layer.name: layer for layer, _ in record.calls if layer.leaf}.values())


def _output(layer: Layer) -> Reading | None:
    readings = (value.forward for _, value in layer.outputs if value.dtype.startswith(("float", "bfloat")))
    return next((r for r in readings if r.statistics is not None and r.statistics.mean is not None), None)


def _gradient(layer: Layer) -> Reading | None:
    readings = (value.backward for _, value in layer.outputs)
    return next((r for r in readings if r is not None and r.statistics is not None), None)


def _head(figure: Figure, title: str, below: str) -> None:
    figure.suptitle(f"{_text(title)}\n", fontsize=10, fontweight="bold", x=0.01, ha="left")
    figure.text(0.01, 1 - 0.3 / figure.get_figheight(), _text(below), fontsize=8, color=_GRAY, va="top")


def _text(text: str) -> str:
    """Return untrusted text without control characters and without mathtext."""
    return printable(text).replace("$", r"\$")
