"""The charts over depth: a layer whose value is zero has a place, and a layer with a cause is marked."""

from __future__ import annotations

import re
from typing import Any

from pytest_modelprobe.report.html.charts import activation_scale, gradient_flow


def layer(name: str, rms: float | None = 0.5, **changed: Any) -> dict[str, Any]:
    numbers = None if rms is None else {"rms": rms}
    output = {"statistics": numbers, "gradient": numbers, "gradient_histogram": None}
    return {"name": name, "leaf": True, "outputs": [output], "before": None, "status": [], **changed}


def scale(*layers: dict[str, Any]) -> str:
    return activation_scale(layers, lambda name: name) or ""


def points(chart: str, css: str) -> list[tuple[int, int]]:
    (path,) = re.findall(rf'class="?{css}"? d="([^"]*)"', chart)
    return [(int(x), int(y)) for x, y in re.findall(r"[ML](\d+) (\d+)", path)]


def test_the_line_goes_on_at_a_dead_layer_and_marks_it() -> None:
    chart = scale(layer("a"), layer("relu", 0.0), layer("b"), layer("c"))
    line = points(chart, "line")
    assert len(line) == 4
    assert line[1][1] == max(y for _, y in line)
    ((x, y),) = points(chart, "zero")
    assert (x + 3, y + 3) == line[1]
    assert "It is 0 (×) at relu of 4." in re.sub("<[^>]+>", "", chart)
    assert ">0</text>" in chart


def names(chart: str) -> dict[str, tuple[str, int]]:
    """Return what stands below the axis: whole name → what is shown, and where it begins."""
    found = re.findall(r"<text x=(\d+) y=171 class=below><title>(.*?)</title>(.*?)</text>", chart)
    return {whole: (shown, int(x)) for x, whole, shown in found}


def test_layers_are_named_below_the_axis_where_there_is_place() -> None:
    layers = [layer(f"encoder.layers.{i}.self_attention") for i in range(12)]
    charts = [scale(*layers), str(gradient_flow(layers, lambda name: name))]
    columns = [x for x, _ in points(charts[0], "line")]
    for chart in charts:
        assert names(chart) == {layers[i]["name"]: ("encoder.…attention", columns[i]) for i in (0, 5)}
        assert "in order of execution" in chart
    few = [layer("fc1"), layer("relu"), layer("fc2")]
    assert list(names(scale(*few))) == ["fc1", "relu", "fc2"]


def test_without_a_dead_layer_the_axis_has_no_zero() -> None:
    chart = scale(layer("a"), layer("b"))
    assert "zero" not in chart
    assert ">0</text>" not in chart


def test_a_gradient_of_zero_is_marked() -> None:
    chart = str(gradient_flow([layer("a", 0.0), layer("b"), layer("c", None)], lambda name: name))
    assert len(points(chart, "zero")) == 1
    said = re.sub("<[^>]+>", "", chart)
    assert "It is 0 (×) at a of 3. None arrived at 1 of 3." in said


def test_of_many_layers_those_without_a_box_have_a_dot() -> None:
    histogram = {"exponents": [0, 0], "negative": [1], "zero": 0, "positive": [1], "per_octave": 2}
    layers = [layer(str(i)) for i in range(100)]
    for one in layers[:60]:
        one["outputs"][0]["gradient_histogram"] = histogram
    assert len(points(str(gradient_flow(layers, lambda name: name)), "dots")) == 40


def test_a_layer_with_a_cause_is_marked_and_one_that_moved_is_not() -> None:
    chart = scale(layer("a"), layer("b", status=["dead"]), layer("c", status=["moved"]))
    ((css, title, path),) = re.findall(r'<g class="?(mark \w+)"?><title>([^<]*)</title><path d="([^"]*)"', chart)
    assert (css, title, path.count("M")) == ("mark dead", "dead: 1 layer", 1)
    assert path.startswith(f"M{points(chart, 'line')[1][0]} ")


def test_the_mark_of_a_module_stands_at_the_last_layer_in_it() -> None:
    chart = scale(layer("x"), layer("block.a"), layer("block", leaf=False, status=["named"]), layer("head"))
    (x,) = re.findall(r'class="mark named"><title>named: 1 layer</title><path d="M(\d+)', chart)
    assert int(x) == points(chart, "line")[1][0]


def test_of_a_layer_with_several_words_the_first_in_the_legend_is_the_mark() -> None:
    chart = scale(layer("a", status=["dead", "named"]), layer("b"))
    assert re.findall(r'class="mark (\w+)"', chart) == ["named"]


def test_a_thousand_marks_are_one_short_path() -> None:
    chart = scale(*(layer(str(i), status=["no gradient"]) for i in range(1000)))
    (path,) = re.findall(r'<g class="mark nograd"><title>[^<]*</title><path d="([^"]*)"', chart)
    assert path.count("v5") == 1000
    assert "∅" not in chart
