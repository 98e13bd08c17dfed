"""Charts of a model over depth and over steps of training, drawn as SVG.

They answer where a gradient fades, where activations grow, and which layers learn. They are drawn without a library,
because the page has to work without a network. Coordinates are integers, because a chart of a large model is long.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytest_modelprobe.record import Histogram, Layer, Statistics
from pytest_modelprobe.report.results import Run, StepResult
from pytest_modelprobe.text import count, folded

from .elements import Child, Markup, entropies, number, outputs_of, tag

# --- histograms -------------------------------------------------------------------------------------------------------

QUARTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""What the five lines of a box show: the ends of its whiskers, its edges, and the median."""

SMALLEST = 2.0**-39
"""The smallest magnitude that a record tells apart. A quantile below it is not known."""

_SIDE = 9
"""Columns on either side of zero."""

_LEVELS = 9
"""Levels of a picture. The style sheet scales it, so that coordinates have one digit."""


def quantiles(histogram: Histogram, shares: Sequence[float]) -> list[float]:
    """Return quantiles of the magnitudes that are not zero, interpolated within a bin; empty if there are none.

    >>> quantiles(Histogram(first=0, negative=(0, 0), zero=5, positive=(2, 2)), [0.5, 1])
    [1.4142135623730951, 2.0]
    """
    counts = [a + b for a, b in zip(histogram.negative, histogram.positive, strict=True)]
    total = sum(counts)
    found: list[float] = []
    below, bin_ = 0, 0
    for wanted in (share * total for share in shares):
        while bin_ < len(counts) - 1 and below + counts[bin_] < wanted:
            below += counts[bin_]
            bin_ += 1
        if total:
            within = min(1.0, (wanted - below) / counts[bin_]) if counts[bin_] else 0.0
            found.append(2.0 ** ((histogram.first + bin_ + within) / 2))
    return found


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis for all histograms of a table: negative magnitudes, zero, positive magnitudes, by powers of two."""

    low: float
    """Power of two at which the columns next to zero begin; smaller magnitudes are in them too."""
    octaves: float
    """Width of a column."""

    @classmethod
    def of(cls, histograms: Iterable[Histogram]) -> Axis | None:
        """Return the axis that covers the upper half of each histogram and as much below it as there is room for."""
        middles, tops = [], []
        for histogram in histograms:
            if found := quantiles(histogram, [0.05, 1.0]):
                middles.append(math.log2(found[0]))
                tops.append(math.log2(found[1]))
        if not tops:
            return None
        top = math.ceil(max(tops))
        octaves = max(1.0, (top - min(middles)) / _SIDE)
        return cls(top - _SIDE * octaves, octaves)

    def limits(self) -> str:
        """Return the magnitudes that the axis covers, for the heading."""
        return f"{2**self.low:.1g} to {2 ** (self.low + _SIDE * self.octaves):.3g}"

    def columns(self, histogram: Histogram) -> list[int]:
        """Return the counts of the columns, from the most negative to the most positive."""
        sides = []
        for counts in (histogram.negative, histogram.positive):
            side = [0] * _SIDE
            for bin_, elements in enumerate(counts):
                exponent = (histogram.first + bin_) / 2
                side[min(_SIDE - 1, max(0, int((exponent - self.low) // self.octaves)))] += elements
            sides.append(side)
        return [*reversed(sides[0]), histogram.zero, *sides[1]]


def sparkline(axis: Axis, histogram: Histogram) -> Markup:
    """Return the picture of a histogram: a bar for each column, so that one element among millions is seen too."""
    columns = axis.columns(histogram)
    bars = (f"M{i} {_LEVELS}v-{max(1, round(_LEVELS * n / max(columns)))}" for i, n in enumerate(columns) if n)
    return tag("svg", tag("path", d="".join(bars)))


_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 560, 176, 46, 14, 22

_MANY = 60
"""With more columns lines have no dots, and the dots of gradients are smaller."""

_LONGEST, _SIGN = 18, 10.2
"""Characters of a name below the axis, and the width of one in a narrow window, where they are larger."""


Link = Callable[[str], Child]
"""Name of a layer → the name as a link to its row."""


@dataclass(frozen=True, slots=True)
class _Plot:
    """A plot whose vertical axis is logarithmic."""

    columns: int
    low: int
    high: int
    """The powers of ten at the ends of the vertical axis."""
    zero: bool = False
    """Whether the lower end stands for zero."""

    @classmethod
    def of(cls, columns: int, values: Iterable[float]) -> _Plot:
        values = list(values)
        exponents = [math.log10(value) for value in values if value]
        low, high = math.floor(min(exponents)), math.ceil(max(exponents))
        zero = 0.0 in values
        return cls(columns, low - zero, max(high, low + 1), zero)

    @property
    def step(self) -> float:
        return (_WIDTH - _LEFT - 6) / max(self.columns, 1)

    def x(self, column: int) -> int:
        return round(_LEFT + (column + 0.5) * self.step)

    def y(self, value: float) -> int:
        share = (math.log10(value) - self.low) / (self.high - self.low) if value else 0.0
        return round(_HEIGHT - _BOTTOM - min(1.0, max(0.0, share)) * (_HEIGHT - _TOP - _BOTTOM))

    def dots(self, points: Sequence[tuple[int, float]]) -> str:
        """Return a path that a round line cap makes dots."""
        return "".join(f"M{self.x(i)} {self.y(value)}h0" for i, value in points)

    def line(self, points: Sequence[tuple[int, float]]) -> str:
        pairs = (f"{self.x(i)} {self.y(value)}" for i, value in points)
        return "M" + "L".join(pairs)

    def below(self, text: str, x: int = _LEFT, title: str | None = None) -> Markup:
        return tag("text", tag("title", title) if title else None, text, x=x, y=_HEIGHT - 5, class_="below")

    def names(self, layers: Sequence[Layer]) -> list[Markup]:
        """Return the names of layers below the axis, each from where its column is, as many as have place."""
        drawn, free, ticks = [], 0.0, ""
        for i, layer in enumerate(layers):
            x, name = self.x(i), folded(layer.name, _LONGEST)
            end = x + _SIGN * len(name)
            if free <= x and end <= _WIDTH:
                drawn.append(self.below(name, x, layer.name))
                ticks += f"M{x} {_HEIGHT - _BOTTOM}v4"
                free = end + _SIGN
        return [tag("path", class_="tick", d=ticks), *drawn]

    def drawn(self, parts: Child, label: str, below: Child) -> Markup:
        every = max(1, math.ceil((self.high - self.low) / 5))
        ticks = range(self.low, self.high + 1, every)
        grid = "".join(f"M{_LEFT} {self.y(10.0**tick)}H{_WIDTH}" for tick in ticks)
        said = {tick: f"1e{tick}" if abs(tick) > 2 else f"{10.0**tick:g}" for tick in ticks}
        if self.zero:
            said[self.low] = "0"
        labels = [tag("text", said[tick], x=_LEFT - 6, y=self.y(10.0**tick) + 4) for tick in ticks]
        content = [tag("path", class_="grid", d=grid), labels, below, parts]
        css = "chart" if self.columns < _MANY else "chart many"
        return tag("svg", content, class_=css, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=label)

    def crosses(self, columns: Iterable[int]) -> list[Markup]:
        """Return a cross on the axis for each column whose value is zero, which no dot of a logarithmic axis shows."""
        y = self.y(0.0) - 3
        d = "".join(f"M{self.x(i) - 3} {y}l6 6m0-6l-6 6" for i in columns)
        return [tag("path", class_="zero", d=d)] if d else []


def _figure(title: str, svg: Child, *said: Child) -> Markup:
    return tag("figure", tag("figcaption", tag("b", title), *said), svg)


def _has_column(layer: Layer) -> bool:
    """Whether a layer is looked at by depth: it has no others in it, and returned a tensor."""
    return layer.leaf and bool(outputs_of(layer))


def gradient_flow(run: Run, layers: Sequence[Layer], link: Link) -> Markup | None:
    """Return the gradients of the outputs by depth: boxes where there are histograms, else root mean squares."""
    leaves = list(filter(_has_column, layers))
    gradients = [outputs_of(layer)[0].backward for layer in leaves]
    scales = _scales(None if one is None else one.statistics for one in gradients)
    if len(scales) < 2 or not any(scales.values()):
        return None
    boxes = []
    for i, gradient in enumerate(gradients):
        histogram = None if gradient is None else gradient.histogram
        if histogram and (found := quantiles(histogram, QUARTILES)) and found[0] > SMALLEST:
            boxes.append((i, found))
    plot = _Plot.of(len(leaves), [*scales.values(), *(q for _, qs in boxes for q in (qs[0], qs[-1]))])
    boxed = {i for i, _ in boxes} if len(leaves) >= _MANY else set()
    dots = [(i, scale) for i, scale in scales.items() if scale and i not in boxed]
    how = f" root mean square of the gradient of each layer's output, {_DEPTH}."
    if boxes:
        how = f" magnitudes of the gradient of each output, {_DEPTH}: median, quartiles, 5 % and 95 %"
        how += "; dots: root mean square." if dots else "."
    half = min(6, max(1, round(plot.step * 0.35)))
    whiskers = quarters = medians = ""
    for i, (least, low, middle, high, most) in boxes:
        x, top, bottom = plot.x(i), plot.y(high), plot.y(low)
        whiskers += f"M{x} {plot.y(most)}V{plot.y(least)}"
        quarters += f"M{x} {top}V{max(bottom, top + 1)}"
        medians += f"M{x - half} {plot.y(middle)}h{2 * half}"
    parts = [
        tag("path", class_="whisker", d=whiskers),
        tag("g", tag("path", class_="quarter", d=quarters), stroke_width=2 * half),
        tag("path", class_="median", d=medians),
    ]
    parts += [tag("path", class_="dots", d=plot.dots(dots))] if dots else []
    parts += plot.crosses(i for i, scale in scales.items() if not scale)
    said: list[Child] = [how, *_extremes(leaves, scales, link)]
    said += [f" None arrived at {len(leaves) - len(scales)} of {len(leaves)}."] if len(scales) < len(leaves) else []
    return _figure("Gradient flow:", plot.drawn(parts, "Gradient by depth", plot.names(leaves)), *said)


def _scales(statistics: Iterable[Statistics | None]) -> dict[int, float]:
    """Return the root mean squares that are known, by column."""
    return {i: rms for i, one in enumerate(statistics) if one and (rms := one.rms) is not None and math.isfinite(rms)}


_DEPTH = "in order of execution"


def _extremes(layers: Sequence[Layer], scales: Mapping[int, float], link: Link) -> list[Child]:
    ordered = sorted((scale, i) for i, scale in scales.items() if scale)
    (low, least), (high, most) = ordered[0], ordered[-1]
    said = [" Smallest ", link(layers[least].name), f" {number(low)}"]
    said += [", largest ", link(layers[most].name), f" {number(high)}."]
    zero = [i for i, scale in scales.items() if not scale]
    if zero:
        more = f" and {count(len(zero) - 1, 'other layer')}" if len(zero) > 1 else ""
        said += [" It is 0 (×) at ", link(layers[zero[0]].name), f"{more} of {len(layers)}."]
    return said


def activation_scale(run: Run, layers: Sequence[Layer], link: Link) -> Markup | None:
    """Return the root mean square of the outputs by depth, now and before."""
    leaves = list(filter(_has_column, layers))
    now = _scales(outputs_of(layer)[0].forward.statistics for layer in leaves)
    before = _scales(run.before.get(layer.name) for layer in leaves)
    if len(now) < 2 or not any(now.values()):
        return None
    plot = _Plot.of(len(leaves), [*now.values(), *before.values()])
    parts: list[Markup] = []
    for css, scales in (("was ", before), ("", now)):
        points = list(scales.items())
        if len(points) > 1:
            parts += [tag("path", class_=f"{css}line", d=plot.line(points))]
            dots = [point for point in points if point[1]]
            parts += [tag("path", class_=f"{css}dots", d=plot.dots(dots))] if len(leaves) < _MANY else []
    parts += plot.crosses(i for i, scale in now.items() if not scale)
    said: list[Child] = [f" root mean square of each layer's output, {_DEPTH}"]
    said += ["; in another color, dashed: in the snapshot"] if len(before) > 1 else []
    said += [".", *_extremes(leaves, now, link)]
    svg = plot.drawn(parts, "Scale of activations by depth", plot.names(leaves))
    return _figure("Scale of activations:", svg, *said)


def update_ratios(steps: Sequence[StepResult], link: Link) -> Markup | None:
    """Return the relative change of each layer's parameters over the steps of training."""
    by_step: dict[int, list[tuple[float, str]]] = {}
    for i, step in enumerate(steps):
        for name, value in step.update_ratios.items():
            if value and math.isfinite(value):  # It is 0 in the first step of a warmup, and where nothing is trained.
                by_step.setdefault(i, []).append((value, name))
    if len(by_step) < 2:
        return None
    ranges = {i: sorted(found) for i, found in by_step.items()}
    drawn = [[(i, found[end][0]) for i, found in ranges.items()] for end in (0, -1)]
    middle = [(i, statistics.median(ratio for ratio, _ in found)) for i, found in ranges.items()]
    plot = _Plot.of(len(steps), [value for line in drawn for _, value in line])
    parts = [tag("path", class_="line", d="".join(map(plot.line, drawn)))]
    parts.append(tag("path", class_="median", d=plot.line(middle)))
    if len(steps) < _MANY:
        parts.append(tag("path", class_="dots", d="".join(map(plot.dots, drawn))))
    (low, least), (high, most) = ranges[max(ranges)][0], ranges[max(ranges)][-1]
    extremes: list[Child] = [" smallest ", link(least), f" {number(low)}, largest ", link(most), f" {number(high)}."]
    svg = plot.drawn(parts, "Update ratio by step", plot.below("steps of training →"))
    how = " relative change of the parameters in a step, of the layers with the smallest and the largest; bold: the "
    how += "median; about 0.001 is usual. In the last step"
    return _figure("Update ratio:", svg, how, *extremes)


def attention_entropy(run: Run, layers: Sequence[Layer], link: Link) -> Markup | None:
    """Return the entropy of the attention by layer and head: a table whose cells are shaded."""
    rows = [(layer, found) for layer in layers if (found := entropies(layer))]
    if not rows:
        return None
    heads = max(len(found) for _, found in rows)
    body = []
    for layer, found in rows:
        cells = [
            tag("td", "–")
            if one is None or math.isnan(one)
            else tag("td", f"{one:.2f}", class_=f"e{min(9, max(0, int(one * 10)))}")
            for one in found
        ]
        body.append(tag("tr", tag("th", link(layer.name), scope="row"), cells))
    head = tag("tr", tag("th", "layer", scope="col"), [tag("th", i, scope="col") for i in range(heads)])
    table = tag("table", tag("thead", head), tag("tbody", body), class_="heat")
    said = " by layer and head: 0 looks at one key, 1 at all of them alike."
    box = tag("div", table, class_="scroll", tabindex="0", role="group", aria_label="Entropy of attention")
    return _figure("Entropy of attention", box, said)
