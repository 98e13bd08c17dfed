"""The page as a string: what is in it, that names are text, that nothing is loaded, how large it is."""

from __future__ import annotations

import base64
import hashlib
import html
import html.parser
import re
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_modelprobe.record import (
    Attention,
    Call,
    Histogram,
    Layer,
    LayerProfile,
    Parameter,
    Profile,
    Reading,
    Record,
    Statistics,
    Value,
)
from pytest_modelprobe.report.html import render, render_run
from pytest_modelprobe.report.html.charts import activation_scale, gradient_flow
from pytest_modelprobe.report.html.graph import MOST_NODES, graph
from pytest_modelprobe.report.results import (
    Base,
    CaseResult,
    Figure,
    Flow,
    Results,
    Run,
    ShownCause,
    SnapshotResult,
    StepResult,
    UnitCounts,
)

# --- results written by hand ------------------------------------------------------------------------------------------

STATISTICS = Statistics(count=16, zeros=4, min=-1.5, max=2.0, mean=0.125, deviations=4.0)
HISTOGRAM = Histogram(
    first=-12, negative=(1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 4, 2, 1), zero=40,
    positive=(1, 2, 3, 5, 6, 8, 9, 12, 14, 13, 9, 5, 2, 1),
)  # fmt: skip


@dataclass
class Seen:
    """A layer, and what a run says of it."""

    layer: Layer
    status: tuple[str, ...] = ()
    units: UnitCounts | None = None
    before: Statistics | None = None
    profile: LayerProfile | None = None


def layer(
    name: str, *, kind: str = "Linear", statistics: Statistics | None = STATISTICS, gradient: Any = ...,
    histogram: Histogram | None = HISTOGRAM, calls: int = 1, parameters: int = 72, attention: Any = (),
    leaf: bool = True, outputs: bool = True, **said: Any,
) -> Seen:  # fmt: skip
    backward = Reading(statistics=statistics, histogram=histogram) if gradient is ... else gradient
    forward = Reading(statistics=statistics, histogram=histogram)
    value = Value(path="output", shape=(2, 8), dtype="float32", device="cpu", forward=forward, backward=backward)
    heads = (Attention(shape=(1, 1, 1), entropy=tuple(attention), most=()),) if attention else ()
    called = Call(root="", root_training=False, index=0, outputs=(value,) if outputs else (), attention=heads)
    trained = Reading(statistics=STATISTICS)
    weight = Parameter(name="w", shape=(parameters,), dtype="float32", device="cpu", requires_grad=True,
                       reading=trained, gradient=trained)  # fmt: skip
    made = Layer(name=name, type=kind, leaf=leaf, calls=(called,) * calls, parameters=(weight,) if parameters else ())
    return Seen(made, **said)


def run(*seen: Seen, flow: list[Flow] | None = None, **changed: Any) -> Run:
    """Return a run. Without a flow each layer takes the output of the one before it."""
    called = [one.layer.name for one in seen if one.layer.calls]
    chain = [Flow(layer=name, sources=(i - 1,) if i else ()) for i, name in enumerate(called)]
    costs = {one.layer.name: one.profile for one in seen if one.profile}
    of_record = {name: changed.pop(name) for name in ("model", "notes", "loss") if name in changed}
    record = Record(
        **{"model": "Net", **of_record}, layers={one.layer.name: one.layer for one in seen}, forwards=1, backwards=1,
        seed=0, profile=Profile(layers=costs) if costs else None,
    )  # fmt: skip
    return Run(
        **{"name": "Net", **changed}, record=record, flow=tuple(chain if flow is None else flow),
        status={one.layer.name: one.status for one in seen if one.status},
        units={one.layer.name: one.units for one in seen if one.units},
        before={one.layer.name: one.before for one in seen if one.before},
    )  # fmt: skip


def checked(name: str, *runs: Run, **changed: Any) -> CaseResult:
    return CaseResult(**{"id": name, "outcome": "passed", "file": "test_x.py", "runs": runs, **changed})


def results(*tests: CaseResult, **changed: Any) -> Results:
    return Results(**{"tests": tests, "versions": {"torch": "2.13.0"}, "root": "project", "seed": 0, **changed})


def cause(said: str, **changed: Any) -> ShownCause:
    given = {"kind": "computation", "layer": "fc", "change": 0.43, "evidence": "isolated", "said": said, **changed}
    return ShownCause(**given)


def snapshot(*causes: ShownCause, **changed: Any) -> SnapshotResult:
    given = {"snapshot": "__modelprobe__/x.arch.json", "device": "cpu", "verdict": "changed", "causes": causes}
    return SnapshotResult(**{**given, "moved": 3, **changed})


class Page(html.parser.HTMLParser):
    """Reads a page, and fails where an element is not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len({name for name, _ in attrs}) == len(attrs)
        if tag not in ("meta", "input", "img", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while self.open[-1] in ("td", "th", "tr") and self.open[-1] != tag:  # whose ends may be left out
            self.open.pop()
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


# --- what is in it ----------------------------------------------------------------------------------------------------


def test_the_verdict_says_how_many_tests_failed_and_for_how_many_causes() -> None:
    failed = checked("test_a", run(layer("fc")), outcome="failed", snapshots=(snapshot(cause("fc: own code changed")),))
    assert "1 of 2 tests failed, for 1 cause." in Page(render(results(failed, checked("test_b")))).text


def test_a_run_that_stopped_early_says_why() -> None:
    text = Page(render(results(stopped="stopping after 2 failures"))).text
    assert "Not every test ran to its end: stopping after 2 failures." in text


def test_calls_that_are_written_otherwise_are_shown_once_and_in_their_tests() -> None:
    note = cause("*.attn: input[1] renamed to mask", layers=6)
    same = snapshot(verdict="same", notes=(note,))
    page = Page(render(results(*(checked(f"test_{i}", snapshots=(same,)) for i in "ab"))))
    assert "2 models written otherwise, which alone fails no test" in page.text
    assert page.text.count("*.attn: input[1] renamed to mask x6, in 2 models") == 1
    assert page.text.count("*.attn: input[1] renamed to mask x6") == 3


def test_a_cause_of_several_tests_is_shown_once() -> None:
    tests = [checked(f"test_{i}", outcome="failed", snapshots=(snapshot(cause("fc: own code changed")),)) for i in "ab"]
    text = Page(render(results(*tests))).text
    assert "2 of 2 tests failed, for 1 cause." in text
    assert "changed by 43 %" in text
    assert "What follows: 2 tests, up to 3 layers moved" in text


def test_a_failure_without_a_cause_is_shown_by_its_first_line() -> None:
    text = Page(render(results(checked("test_a", outcome="failed", message="relu is dead")))).text
    assert text.index("relu is dead") < text.index("What follows: 1 test") < text.index("Tests")


def test_how_a_cause_was_found_is_said_in_plain_words() -> None:
    causes = [cause("fc changed"), cause("head changed", evidence="recorded")]
    text = Page(render(results(checked("test_a", outcome="failed", snapshots=(snapshot(*causes),))))).text
    assert "fc changed computation · changed by 43 % · found by calling it alone, on synthetic inputs" in text
    assert "head changed computation · changed by 43 % · found by comparing what was recorded then and now" in text


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("AssertionError: fc output is outside [0, 1]", "fc"),
        ("AssertionError: fc.weight is not frozen", "fc"),
        ("AssertionError: fc (call 2) output is outside [0, 1]", "fc"),
        ("AssertionError: layer '1' (Linear) is saturated", "1"),
        ("AssertionError: head 2 of fc.attn looks at one key: its entropy is 0 %", "fc.attn"),
        ("AssertionError: assert 0.1 < 0", None),
        ("TypeError: fc is no layer", None),
    ],
)
def test_the_layer_that_a_failure_names_is_marked_in_graph_charts_and_table(message: str, named: str | None) -> None:
    layers = [layer("fc"), layer("1"), layer("fc.attn"), layer("head")]
    page = render(results(checked("a", run(*layers), outcome="failed", message=message, failure="-")))
    rows = {
        row.partition("<td>")[0].rpartition(">")[2]: row
        for row in re.findall("<tr id=[^>]*>(.*)", page.replace("<tr", "\n<tr"))
    }
    assert [name for name, row in rows.items() if "◎ named" in row] == ([named] if named else [])
    titles = re.findall(r"<title>([^<]*)</title>", page[page.index("class=graph") :])
    assert [title for title in titles if title.endswith("named")] == (
        [f"{named}, Linear, (2, 8), 72 parameters: named"] if named else []
    )
    assert titles.count("named: 1 layer") == (2 if named else 0)  # gradients, and activations


def test_failed_tests_come_first_and_are_open() -> None:
    tests = [
        tag for tag in Page(render(results(checked("a"), checked("b", outcome="failed")))).tags if "test" in str(tag)
    ]
    found = [(attrs["id"], "open" in attrs) for tag, attrs in tests if tag == "details"]
    assert found == [("t1", True), ("t0", False)]


def test_the_models_of_folded_tests_are_left_to_the_script() -> None:
    page = render(results(checked("a", run(layer("fc"))), checked("b", run(layer("fc")), outcome="failed")))
    kept = re.findall(r"<noscript>(.*?)</noscript>", page)
    assert ["id=l1.0" in page, *("id=l0.0" in part for part in kept)] == [True, True]
    assert "id=l1.0" not in kept[0]


def test_the_next_steps_of_a_snapshot_stand_apart() -> None:
    text = "fc changed\n\nlayer\nfc\n\nIntended? pytest t.py --snapshot-update\nSince when? git bisect run pytest t.py"
    page = Page(render(results(checked("a", outcome="failed", snapshots=(snapshot(text=text),)))))
    assert (
        "If it is intended Intended? pytest t.py --snapshot-update Since when? git bisect run pytest t.py" in page.text
    )


def test_what_was_compared_with_the_other_side_is_counted_and_what_was_not_is_listed() -> None:
    base = Base(
        ref="main", commit="e4798012e1b5", python=None, versions={"torch": ("2.15", "2.6")}, verdicts={"changed": 3},
        said="8 models: 4 unchanged, 3 changed", only_here=("t.py::new",), failed={"t.py::broken": "no"},
    )  # fmt: skip
    said = Page(render(results(base=base))).text
    assert f"Beside main (e4798012e1) {base.said} torch: 2.15 here, 2.6 there" in said
    assert "1 test only here t.py::new 1 did not pass there t.py::broken : no" in said


def test_lines_of_a_failure_are_kept_and_those_of_a_table_are_not_wrapped() -> None:
    text = "E       one\nE       layer   zeros\nE       fc         100\nE       two"
    page = render(results(checked("a", outcome="failed", failure=text)))
    table = "<span>E       layer   zeros\nE       fc         100</span>"
    assert f"<pre tabindex=0>E       one\n{table}\nE       two</pre>" in page


def test_a_table_leaves_out_empty_columns() -> None:
    page = Page(render_run(run(layer("fc"))))
    assert "zeros" in page.texts
    assert "saturated" not in page.texts


def test_a_figure_is_embedded() -> None:
    figure = Figure(title="maps", media="image/png", data=base64.b64encode(b"x").decode())
    images = [attrs for tag, attrs in Page(render(results(checked("a", figures=(figure,))))).tags if tag == "img"]
    assert images == [{"src": "data:image/png;base64,eA==", "alt": "maps"}]


@pytest.mark.parametrize("change", [{"media": "text/html"}, {"data": '"><script>'}])
def test_a_figure_of_another_kind_is_not(change: dict[str, str]) -> None:
    figure = Figure(**{"title": "maps", "media": "image/png", "data": "eA==", **change})
    page = render(results(checked("a", figures=(figure,))))
    assert "<img" not in page
    assert "An image that cannot be shown." in page


def steps(*ratios: dict[str, float]) -> tuple[StepResult, ...]:
    return tuple(StepResult(step=n, update_ratios=of) for n, of in enumerate(ratios))


def test_update_ratios_are_a_line_for_each_layer_over_the_steps() -> None:
    taken = steps({"a": 0.1, "b": 0.01}, {"a": 0.1, "b": 0.001}, {"a": 0.0, "b": 1e-3, "gone": float("nan")})
    page = render_run(run(layer("a"), layer("b"), steps=taken))
    [drawn] = re.findall(r'class=line d="([^"]*)"', page[page.index("Update ratio") :])
    assert [line.count("L") for line in drawn.split("M")[1:]] == [1, 2]
    said = "of each layer; about 0.001 is usual. In the last step smallest b 0.001, largest b 0.001."
    assert said in Page(page).text


def test_of_many_update_ratios_the_range_and_the_median_are_drawn() -> None:
    layers = [layer(str(i)) for i in range(40)]
    taken = steps(*({str(i): 10.0 ** -(i % 4) for i in range(40)} for _ in range(50)))
    page = render_run(run(*layers, steps=taken))
    charts = page[page.index("Update ratio") :]
    assert re.findall(r'class=line d="([^"]*)"', charts)[0].count("M") == 2
    assert "of the layers with the smallest and the largest; bold: the median; about 0.001 is usual." in Page(page).text


@pytest.mark.parametrize("taken", [(), steps({"a": 0.1}), steps({"a": 0.0}, {"a": 0.0}), steps({}, {})])
def test_without_two_steps_that_change_something_there_is_no_chart_of_steps(taken: Any) -> None:
    assert "Update ratio" not in render_run(run(layer("a"), steps=taken))


def test_links_lead_to_rows_that_exist() -> None:
    layers = [layer("conv"), layer("block.fc", status=("dead",)), layer("block", leaf=False, parameters=0)]
    layers += [layer("head", attention=(0.5, None))]
    page = Page(render(results(checked("a", run(*layers), outcome="failed", message="dead"))))
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    links = [str(attrs["href"]) for tag, attrs in page.tags if tag == "a"]
    assert len(set(ids)) == len(ids)
    assert {link.removeprefix("#") for link in links} <= set(ids)
    assert len(links) > 5


def test_numbers_that_are_not_finite_are_shown_as_what_they_are() -> None:
    broken = layer("fc", status=("nonfinite",), attention=(None,), statistics=Statistics(count=16, nan=16))
    assert "16" in Page(render_run(run(broken))).texts


@pytest.mark.parametrize(
    "seen", [[], [layer("fc", calls=0)], [layer("fc", outputs=False)], [layer("fc", statistics=None, gradient=None)]]
)
def test_a_record_may_lack_anything(seen: list[Seen]) -> None:
    assert "Net" in Page(render_run(run(*seen))).text


# --- names are text ---------------------------------------------------------------------------------------------------

HOSTILE = ["<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", "\x1b[31m", "a|b", "::error::x",
           "a\u202eb", "\"' onload=x", "</style>", "<!--", "&amp;", "a\nb", "\ud800", "x" * 9000,
           ".".join("a" * 3000)]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_name_is_text_wherever_it_stands(name: str) -> None:
    def page(name: str) -> Page:
        bad = layer(name, status=("own code",), attention=(0.5,), kind=name)
        seen = run(layer("fc"), bad, name=name, model=name, notes=(name,), findings=(name,), error=name, loss=name)
        told = cause(name, hints=(name,), layer=name)
        shown = snapshot(told, text=f"{name}\n\n{name}", possible=(cause(name),), notes=(cause(name),))
        figure, more = Figure(title=name, media=name, data=name), {"snapshots": (shown,)}
        test = checked(name, seen, outcome="failed", message=name, failure=name, figures=(figure,), **more)
        unused = {"unused": (name,), "kept": {name: (name,)}}
        text = render(results(test, root=name, versions={name: name}, commit=name, **unused))
        text.encode()
        assert not set(text) & {"\x1b", "\u202e", "\r"}
        return Page(text)

    def elements(page: Page) -> set[tuple[str, ...]]:
        return {(tag, *sorted(attrs)) for tag, attrs in page.tags}

    assert elements(page(name)) <= elements(page("name")) | {("th", "class"), ("wbr",)}  # of a long name


# --- nothing is loaded ------------------------------------------------------------------------------------------------


def test_the_policy_allows_the_style_and_the_script_of_the_page_alone() -> None:
    page = render(results(checked("a", run(layer("fc")))))
    policy = re.search(r'http-equiv=Content-Security-Policy content="([^"]+)"', page)[1].replace("&#x27;", "'")
    for element in ("style", "script"):
        (content,) = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_nothing_in_the_page_has_an_address_elsewhere() -> None:
    page = Page(render(results(checked("a", run(layer("fc"), layer("b"))))))
    addresses = [attrs[key] for _, attrs in page.tags for key in ("src", "href", "action", "srcset") if key in attrs]
    assert all(str(address).startswith(("#", "data:image/")) for address in addresses)
    assert not any(name.startswith("on") or name == "style" for _, attrs in page.tags for name in attrs)
    assert "url(" not in render(results())


def test_rendering_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from pytest_modelprobe.report.html import render; "
        "assert not {'torch', 'numpy', 'pytest'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- size -------------------------------------------------------------------------------------------------------------


def test_fifty_tests_of_a_hundred_layers_are_less_than_two_megabytes() -> None:
    layers = [layer(f"backbone.stage{i // 25}.block{i}.conv.{i}", status=("moved",), before=STATISTICS)
              for i in range(100)]  # fmt: skip
    test = checked("test_models.py::test_name", run(*layers))
    one, two = (len(render(results(*[test] * n))) for n in (1, 2))
    assert one + 49 * (two - one) < 2_000_000


# --- charts -----------------------------------------------------------------------------------------------------------


def plain(name: str, rms: float | None = 0.5, **changed: Any) -> Seen:
    statistics = None if rms is None else Statistics(count=1, mean=rms)
    return layer(name, **{"statistics": statistics, "histogram": None, **changed})


def chart_of(draw: Any, *seen: Seen) -> str:
    return draw(run(*seen), [one.layer for one in seen], lambda name: name) or ""


def scale(*seen: Seen) -> str:
    return chart_of(activation_scale, *seen)


def points(chart: str, css: str) -> list[tuple[int, int]]:
    (path,) = re.findall(rf'class="?{css}"? d="([^"]*)"', chart)
    return [(int(x), int(y)) for x, y in re.findall(r"[ML](\d+) (\d+)", path)]


def test_the_line_goes_on_at_a_dead_layer_and_marks_it() -> None:
    chart = scale(plain("a"), plain("relu", 0.0), plain("b"), plain("c"))
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
    layers = [plain(f"encoder.layers.{i}.self_attention") for i in range(12)]
    charts = [scale(*layers), chart_of(gradient_flow, *layers)]
    columns = [x for x, _ in points(charts[0], "line")]
    for chart in charts:
        assert names(chart) == {layers[i].layer.name: ("encoder.…attention", columns[i]) for i in (0, 5)}
        assert "in order of execution" in chart
    few = [plain("fc1"), plain("relu"), plain("fc2")]
    assert list(names(scale(*few))) == ["fc1", "relu", "fc2"]


def test_without_a_dead_layer_the_axis_has_no_zero() -> None:
    chart = scale(plain("a"), plain("b"))
    assert "zero" not in chart
    assert ">0</text>" not in chart


def test_a_gradient_of_zero_is_marked() -> None:
    chart = chart_of(gradient_flow, plain("a", 0.0), plain("b"), plain("c", None, gradient=None))
    assert len(points(chart, "zero")) == 1
    said = re.sub("<[^>]+>", "", chart)
    assert "It is 0 (×) at a of 3. None arrived at 1 of 3." in said


def test_of_many_layers_those_without_a_box_have_a_dot() -> None:
    layers = [plain(str(i), histogram=Histogram(negative=(1,), positive=(1,)) if i < 60 else None) for i in range(100)]
    assert len(points(chart_of(gradient_flow, *layers), "dots")) == 40


def test_a_layer_with_a_cause_is_marked_and_one_that_moved_is_not() -> None:
    chart = scale(plain("a"), plain("b", status=("dead",)), plain("c", status=("moved",)))
    ((css, title, path),) = re.findall(r'<g class="?(mark \w+)"?><title>([^<]*)</title><path d="([^"]*)"', chart)
    assert (css, title, path.count("M")) == ("mark dead", "dead: 1 layer", 1)
    assert path.startswith(f"M{points(chart, 'line')[1][0]} ")


def test_the_mark_of_a_module_stands_at_the_last_layer_in_it() -> None:
    chart = scale(plain("x"), plain("block.a"), plain("block", leaf=False, status=("named",)), plain("head"))
    (x,) = re.findall(r'class="mark named"><title>named: 1 layer</title><path d="M(\d+)', chart)
    assert int(x) == points(chart, "line")[1][0]


def test_of_a_layer_with_several_words_the_first_in_the_legend_is_the_mark() -> None:
    chart = scale(plain("a", status=("dead", "named")), plain("b"))
    assert re.findall(r'class="mark (\w+)"', chart) == ["named"]


def test_a_thousand_marks_are_one_short_path() -> None:
    chart = scale(*(plain(str(i), status=("no gradient",)) for i in range(1000)))
    (path,) = re.findall(r'<g class="mark nograd"><title>[^<]*</title><path d="([^"]*)"', chart)
    assert path.count("v5") == 1000
    assert "∅" not in chart


# --- the graph --------------------------------------------------------------------------------------------------------


def call(layer: str, *sources: int, after: int | None = None, number: int = 1, more: int = 0) -> Flow:
    return Flow(layer=layer, call=number, more=more, sources=sources, after=after)


def drawn(*seen: Seen, flow: list[Flow] | None = None) -> str:
    return graph(run(*seen, flow=flow), lambda name: None)


def labels(svg: str) -> list[str]:
    return [re.sub("<[^>]+>", "", text) for text in re.findall(r"<text[^>]*>(.*?)</text>", svg)]


def blocks(n: int) -> list[Seen]:
    return [layer(f"h.{i}.{name}") for i in range(n) for name in ("fc", "act")]


def test_blocks_that_repeat_are_one_with_their_number() -> None:
    assert labels(drawn(*blocks(12))) == ["h.0 … 11 ×12", "fc Linear", "act Linear"]


def test_a_block_with_another_status_is_not_folded() -> None:
    layers = blocks(5)
    layers[4].status = ("dead",)
    assert labels(drawn(*layers)) == ["h", "0 … 1 ×2", "fc Linear", "act Linear", "2", "fc Linear ×", "act Linear",
                                      "3 … 4 ×2", "fc Linear", "act Linear"]  # fmt: skip


def edges(svg: str) -> tuple[int, int]:
    """Return how many lines are solid, and how many dotted."""
    found = dict(re.findall(r'<path class="?(edge(?: likely)?)"? d="([^"]*)"', svg))
    return found.get("edge", "").count("M"), found.get("edge likely", "").count("M")


def test_a_recorded_source_is_a_solid_line_and_a_guess_is_dotted_and_says_so() -> None:
    flow = [call("q"), call("k"), call("norm", 0), call("out", after=2)]
    svg = drawn(layer("q"), layer("k"), layer("norm"), layer("out"), flow=flow)
    assert edges(svg) == (1, 2)  # the guess starts at k and norm, which no other layer takes
    assert "<title>a guess: code computed the input" in svg


def test_layers_that_take_one_tensor_of_which_the_source_is_not_known_have_the_same_guess() -> None:
    flow = [call("a"), call("b"), call("q", after=1), call("k", after=1), call("out", 2, 3)]
    assert edges(drawn(*map(layer, "abqk"), layer("out"), flow=flow)) == (2, 4)


def test_each_call_of_a_layer_is_a_node_between_what_it_takes_and_what_takes_it() -> None:
    flow = [call("a"), call("relu", 0), call("b", 1), call("relu", 2, number=2), call("out", 3)]
    svg = drawn(layer("a"), layer("relu", calls=2), layer("b"), layer("out"), flow=flow)
    assert labels(svg) == ["a Linear", "relu Linear", "b Linear", "relu (call 2) Linear", "out Linear"]
    assert edges(svg) == (4, 0)
    assert "<title>relu, call 2, Linear, 72 parameters, 2 calls</title>" in svg


def test_the_last_call_that_is_told_apart_stands_for_the_others() -> None:
    flow = [call("cell"), call("cell", 0, number=2, more=998), call("out", 1)]
    svg = drawn(layer("cell", calls=1000), layer("out"), flow=flow)
    assert labels(svg) == ["cell Linear", "cell (calls 2 to 1,000) Linear", "out Linear"]


def test_an_edge_over_a_level_goes_around_the_node_on_it() -> None:
    svg = drawn(layer("a"), layer("b"), layer("c"), flow=[call("a"), call("b", 0), call("c", 0, 1)])
    width = float(re.search(r"width=([\d.]+)", svg)[1])
    lane = [float(x) for x in re.findall(r"C[\d.]+ [\d.]+ ([\d.]+)", svg)]
    node = max(float(w) for w in re.findall(r"<rect width=([\d.]+)", svg))
    assert node + 10 < lane[0] < width


def test_of_a_large_model_the_deepest_boxes_without_a_status_are_one_node_each() -> None:
    layers = [layer(f"net.{i}.{j}", parameters=100 * i + j + 1) for i in range(100) for j in range(3)]
    layers[31].status = ("dead",)
    svg = drawn(*layers)
    shown = labels(svg)
    assert shown[:2] == ["net", "0 +3"]
    assert shown[10:16] == ["9 +3", "10", "0 Linear", "1 Linear ×", "2 Linear", "11 +3"]
    assert len(shown) <= MOST_NODES
    assert "net.9, 3 layers in it" in re.findall("<title>(.*?)</title>", svg)


def test_layers_side_by_side_that_are_too_many_are_not_drawn() -> None:
    assert "2,000 layers side by side are too many" in drawn(*(layer(str(i), parameters=i) for i in range(2000)))


def test_a_deep_tree_is_no_error() -> None:
    assert labels(drawn(layer(".".join(map(str, range(3000))))))


# --- a record ---------------------------------------------------------------------------------------------------------

RECORD = Record(model="Net", layers={"<b>": Layer(name="<b>", type="torch.nn.Linear")}, forwards=1)


def test_without_a_notebook_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    RECORD.show()
    assert capsys.readouterr().out == f"{RECORD}\n"


def test_a_shell_in_a_terminal_is_no_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace()))
    RECORD.show()
    assert capsys.readouterr().out.startswith("Net: ")


def test_in_a_notebook_the_page_is_in_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    display = SimpleNamespace(display=shown.append, HTML=str)
    notebook = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1), display=display)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    RECORD.show()
    (frame,) = shown
    assert html.unescape(frame.partition('srcdoc="')[2].partition('"')[0]) == RECORD.to_html()


def test_a_record_is_a_page_of_its_own() -> None:
    page = RECORD.to_html()
    assert page.startswith("<!doctype html>")
    assert "<h1>Net</h1>" in page
    assert "<b>\n" not in page
