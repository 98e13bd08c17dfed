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
from pytest_modelprobe.report.results import (
    Base,
    CaseResult,
    Figure,
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


def run(*seen: Seen, **changed: Any) -> Run:
    costs = {one.layer.name: one.profile for one in seen if one.profile}
    of_record = {name: changed.pop(name) for name in ("model", "notes", "loss") if name in changed}
    record = Record(
        **{"model": "Net", **of_record}, layers={one.layer.name: one.layer for one in seen}, forwards=1, backwards=1,
        seed=0, profile=Profile(layers=costs) if costs else None,
    )  # fmt: skip
    return Run(
        **{"name": "Net", **changed}, record=record,
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


def test_what_was_compared_with_the_other_side_is_counted() -> None:
    base = Base(
        ref="main", commit="e4798012e1b5", python=None, versions={"torch": ("2.15", "2.6")}, verdicts={"changed": 3},
        said="8 models: 4 unchanged, 3 changed", only_here=("t.py::new",), failed={"t.py::broken": "no"},
    )  # fmt: skip
    said = Page(render(results(base=base))).text
    assert f"Beside main (e4798012e1) {base.said} torch: 2.15 here, 2.6 there" in said


def test_the_lines_of_a_failure_are_kept() -> None:
    page = render(results(checked("a", outcome="failed", failure="E  fc is dead\nE  <b>")))
    assert "<pre tabindex=0>E  fc is dead\nE  &lt;b&gt;</pre>" in page


def test_a_table_leaves_out_empty_columns() -> None:
    page = Page(render_run(run(layer("fc"))))
    assert "zeros" in page.texts
    assert "saturated" not in page.texts


def test_a_figure_is_embedded() -> None:
    figure = Figure(title="maps", media="image/png", data=base64.b64encode(b"x").decode())
    images = [attrs for tag, attrs in Page(render(results(checked("a", figures=(figure,))))).tags if tag == "img"]
    assert images == [{"src": "data:image/png;base64,eA==", "alt": "maps"}]


def test_a_figure_of_another_kind_is_not() -> None:
    figure = Figure(title="maps", media="text/html", data="eA==")
    page = render(results(checked("a", figures=(figure,))))
    assert "<img" not in page
    assert "An image that cannot be shown." in page


def steps(*ratios: dict[str, float]) -> tuple[StepResult, ...]:
    return tuple(StepResult(step=n, update_ratios=of) for n, of in enumerate(ratios))


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
