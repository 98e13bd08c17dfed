"""The page as a string: what is in it, that names are text, that nothing is loaded, how large it is."""

from __future__ import annotations

import base64
import copy
import hashlib
import html.parser
import re
import subprocess
import sys
from typing import Any

import pytest

from pytest_modelprobe.report.html import render, render_run

# --- results written by hand ------------------------------------------------------------------------------------------

STATISTICS = {"count": 16, "nan": 0, "posinf": 0, "neginf": 0, "zeros": 4, "min": -1.5, "max": 2.0, "mean": 0.125,
              "std": 0.5, "rms": 0.515}  # fmt: skip
HISTOGRAM = {"exponents": [-12, 1], "negative": [1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 4, 2, 1], "zero": 40,
             "positive": [1, 2, 3, 5, 6, 8, 9, 12, 14, 13, 9, 5, 2, 1], "per_octave": 2}  # fmt: skip


def layer(name: str, **changed: Any) -> dict[str, Any]:
    value = {
        "path": "output", "shape": [2, 8], "dtype": "float32", "statistics": STATISTICS, "reason": None,
        "histogram": HISTOGRAM, "gradient": STATISTICS, "gradient_histogram": HISTOGRAM,
    }  # fmt: skip
    return {
        "name": name, "type": "Linear", "module": "torch.nn.modules.linear", "leaf": True, "functional": False,
        "training": False, "calls": 1, "parameters": 72, "trainable": 72, "attributes": {}, "inputs": [value],
        "outputs": [value], "status": [], "weights": {"rms": 0.5, "gradient_rms": 0.01},
        "dead_units": [0, 8], "saturated_units": None, "attention": None, "profile": None,
        "before": None, **changed,
    }  # fmt: skip


def run(*layers: dict[str, Any], **changed: Any) -> dict[str, Any]:
    called = [one["name"] for one in layers if one["calls"]]
    flow = [{"layer": name, "call": 1, "more": 0, "from": [i - 1] if i else [], "after": None}
            for i, name in enumerate(called)]  # fmt: skip
    return {
        "name": "Net", "kind": "run", "model": "Net", "device": "cpu", "seed": 0, "loss": None, "forwards": 1,
        "backwards": 1, "parameters": 144, "trainable": 144, "notes": [], "findings": [], "error": None,
        "versions": {}, "profile": None, "layers": list(layers), "flow": flow, **changed,
    }  # fmt: skip


def checked(name: str, *runs: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {
        "id": name, "outcome": "passed", "duration": 0.1, "file": "test_x.py", "line": 1, "message": "", "failure": "",
        "runs": list(runs), "snapshots": [], "figures": [], **changed,
    }  # fmt: skip


def results(*tests: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {
        "schema": 3, "complete": True, "exit_status": 0, "versions": {"torch": "2.13.0"}, "commit": None,
        "root": "project", "seed": 0, "devices": ["cpu"], "tests": list(tests), "unused": [], "deleted": [],
        "kept": {}, **changed,
    }  # fmt: skip


def cause(said: str, **changed: Any) -> dict[str, Any]:
    return {"kind": "computation", "layer": "fc", "layers": 1, "what": "", "actual": None, "expected": None,
            "change": 0.43, "noise": None, "evidence": "isolated", "hints": [], "said": said, "key": said,
            **changed}  # fmt: skip


def snapshot(*causes: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {"test": "t", "snapshot": "__modelprobe__/x.arch.json", "device": "cpu", "verdict": "changed",
            "not_compared": None, "values_not_compared": 0, "declared": False, "model": "Net", "layers": 2,
            "findings": [], "first_line": "", "causes": list(causes), "possible": [], "moved": 3, "text": "",
            "run": 0, **changed}  # fmt: skip


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
    failed = checked("test_a", run(layer("fc")), outcome="failed", snapshots=[snapshot(cause("fc: own code changed"))])
    assert "1 of 2 tests failed, for 1 cause." in Page(render(results(failed, checked("test_b")))).text


def test_a_run_that_stopped_early_says_why() -> None:
    text = Page(render(results(complete=False, stopped="stopping after 2 failures"))).text
    assert "Not every test ran to its end: stopping after 2 failures." in text


def test_calls_that_are_written_otherwise_are_shown_once_and_in_their_tests() -> None:
    note = cause("*.attn: input[1] renamed to mask", layers=6)
    same = snapshot(verdict="same", notes=[note])
    page = Page(render(results(*(checked(f"test_{i}", snapshots=[same]) for i in "ab"))))
    assert "2 models written otherwise, which alone fails no test" in page.text
    assert page.text.count("*.attn: input[1] renamed to mask x6, in 2 models") == 1
    assert page.text.count("*.attn: input[1] renamed to mask x6") == 3


def test_a_cause_of_several_tests_is_shown_once() -> None:
    tests = [checked(f"test_{i}", outcome="failed", snapshots=[snapshot(cause("fc: own code changed"))]) for i in "ab"]
    text = Page(render(results(*tests))).text
    assert "2 of 2 tests failed, for 1 cause." in text
    assert "changed by 43 %" in text
    assert "What follows: 2 tests, up to 3 layers moved" in text


def test_a_failure_without_a_cause_is_shown_by_its_first_line() -> None:
    text = Page(render(results(checked("test_a", outcome="failed", message="relu is dead")))).text
    assert text.index("relu is dead") < text.index("What follows: 1 test") < text.index("Tests")


def test_how_a_cause_was_found_is_said_in_plain_words() -> None:
    causes = [cause("fc changed"), cause("head changed", evidence="recorded")]
    text = Page(render(results(checked("test_a", outcome="failed", snapshots=[snapshot(*causes)])))).text
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
        ("pytest_modelprobe.exceptions.StoppedError: fc: NaN", "fc"),
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
    page = Page(render(results(checked("a", outcome="failed", snapshots=[snapshot(text=text)]))))
    assert (
        "If it is intended Intended? pytest t.py --snapshot-update Since when? git bisect run pytest t.py" in page.text
    )


def test_what_was_compared_with_the_other_side_is_counted_and_what_was_not_is_listed() -> None:
    base = {
        "ref": "main", "commit": "e4798012e1b5", "python": None, "stopped": None,
        "versions": {"torch": ["2.15", "2.6"]}, "unchanged": 4, "rounding": 0, "changed": 3, "not_repeatable": 1,
        "said": "8 models: 4 unchanged, 3 changed, 1 not repeatable; 1 record of one side alone", "unpaired": 1,
        "not_run": 0, "only_here": ["t.py::new"], "only_there": [], "failed": {"t.py::broken": "failed: ImportError"},
    }  # fmt: skip
    said = Page(render(results(base=base))).text
    assert f"Beside main (e4798012e1) {base['said']} torch: 2.15 here, 2.6 there" in said
    assert "1 test only here t.py::new 1 did not pass there t.py::broken : failed: ImportError" in said


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
    figure = {"title": "maps", "media": "image/png", "data": base64.b64encode(b"x").decode()}
    images = [attrs for tag, attrs in Page(render(results(checked("a", figures=[figure])))).tags if tag == "img"]
    assert images == [{"src": "data:image/png;base64,eA==", "alt": "maps"}]


@pytest.mark.parametrize("change", [{"media": "text/html"}, {"data": '"><script>'}])
def test_a_figure_of_another_kind_is_not(change: dict[str, str]) -> None:
    figure = {"title": "maps", "media": "image/png", "data": "eA==", **change}
    page = render(results(checked("a", figures=[figure])))
    assert "<img" not in page
    assert "An image that cannot be shown." in page


def steps(*ratios: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"step": n, "update_ratios": of} for n, of in enumerate(ratios)]


def test_update_ratios_are_a_line_for_each_layer_over_the_steps() -> None:
    taken = steps({"a": 0.1, "b": 0.01}, {"a": 0.1, "b": 0.001}, {"a": 0.0, "b": 1e-3, "gone": "nan"})
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


@pytest.mark.parametrize("taken", [[], steps({"a": 0.1}), steps({"a": 0.0}, {"a": 0.0}), steps({}, {})])
def test_without_two_steps_that_change_something_there_is_no_chart_of_steps(taken: list[dict[str, Any]]) -> None:
    assert "Update ratio" not in render_run(run(layer("a"), steps=taken))


def test_links_lead_to_rows_that_exist() -> None:
    layers = [layer("conv"), layer("block.fc", status=["dead"]), layer("block", leaf=False, parameters=0)]
    layers += [layer("head", attention=[0.5, None])]
    page = Page(render(results(checked("a", run(*layers), outcome="failed", message="dead"))))
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    links = [str(attrs["href"]) for tag, attrs in page.tags if tag == "a"]
    assert len(set(ids)) == len(ids)
    assert {link.removeprefix("#") for link in links} <= set(ids)
    assert len(links) > 5


def test_numbers_that_are_not_finite_are_shown_as_what_they_are() -> None:
    broken = layer("fc", status=["nonfinite"], attention=[None])
    none = dict.fromkeys(("min", "max", "mean", "std", "rms"))
    broken["outputs"] = [{**broken["outputs"][0], "statistics": {**STATISTICS, "nan": 16, **none}, "histogram": None}]
    assert "16" in Page(render_run(run(broken))).texts


@pytest.mark.parametrize(
    "layers", [[], [layer("fc", outputs=[], calls=0)], [layer("fc", dead_units=None, weights=None)]]
)
def test_a_record_may_lack_anything(layers: list[dict[str, Any]]) -> None:
    assert "Net" in Page(render_run(run(*layers))).text


# --- names are text ---------------------------------------------------------------------------------------------------

HOSTILE = ["<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", "\x1b[31m", "a|b", "::error::x",
           "a\u202eb", "\"' onload=x", "</style>", "<!--", "&amp;", "a\nb", "\ud800", "x" * 9000,
           ".".join("a" * 3000)]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_name_is_text_wherever_it_stands(name: str) -> None:
    def page(name: str) -> Page:
        bad = layer(name, status=["own code"], attention=[0.5], type=name)
        seen = run(layer("fc"), bad, name=name, model=name, notes=[name], findings=[name], error=name, loss=name)
        shown = snapshot(
            cause(name, hints=[name], layer=name), text=f"{name}\n\n{name}", possible=[cause(name)], notes=[cause(name)]
        )
        figure = {"title": name, "media": name, "data": name}
        test = checked(name, seen, outcome="failed", message=name, failure=name, snapshots=[shown], figures=[figure])
        text = render(results(test, root=name, versions={name: name}, commit=name, unused=[name], kept={name: [name]}))
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
    layers = [
        layer(
            f"backbone.stage{i // 25}.block{i}.conv.{i}",
            status=["moved"],
            before={"mean": 0.1, "std": 0.25, "min": -1.0, "max": 1.0},
        )
        for i in range(100)
    ]
    one = len(render(results(checked("test_models.py::test_name", run(*layers)))))
    two = len(render(results(*[checked("test_models.py::test_name", copy.deepcopy(run(*layers)))] * 2)))
    assert one + 49 * (two - one) < 2_000_000
