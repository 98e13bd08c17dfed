"""The page: first what is wrong and why, then each test and what was seen of its models.

A reader comes with a failed run, so causes stand above tests, and each cause names the tests that follow from it.
Only the first failed tests are unfolded: a large run has a million elements, which a browser would be slow to draw.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_modelprobe.record import Layer, NamedRecord, Record, Value, elements
from pytest_modelprobe.report.results import (
    Base,
    CaseResult,
    Figure,
    PairResult,
    Results,
    Run,
    ShownCause,
    SnapshotResult,
    verdict,
)
from pytest_modelprobe.report.runs import merged, run_of
from pytest_modelprobe.text import count, html_escaped, shape

from .charts import Axis, activation_scale, attention_entropy, gradient_flow, sparkline, update_ratios
from .elements import (
    Child,
    Markup,
    badges,
    bullets,
    entropies,
    folded,
    is_cause,
    legend,
    number,
    outputs_of,
    tag,
)

# --- the table of layers ----------------------------------------------------------------------------------------------


def _cells(run: Run, layer: Layer) -> list[tuple[str, str | None, Child]]:
    """Return each cell of a layer with the heading of its column, and what the heading means."""
    output, units = _output(layer), run.units.get(layer.name)
    s = None if output is None else output.forward.statistics
    backward = None if output is None or output.backward is None else output.backward.statistics
    profile = None if run.record.profile is None else run.record.profile.layers.get(layer.name)
    weights = merged(parameter.gradient for parameter in layer.parameters)
    dead, saturated = (
        "" if units is None or found is None else f"{found:,}/{units.count:,}" if found else "0"
        for found in ((units.dead, units.saturated) if units else (None, None))
    )
    ends = f"{number(s.min)} … {number(s.max)}" if s and s.min is not None else ""
    zeros = "" if not s or not s.count else f"{s.zeros / s.count:.0%}" if s.zeros else "0"
    calls, own = len(layer.calls), elements(layer.parameters)
    return [
        ("status", None, badges(run.status.get(layer.name, ()))),
        ("type", "Class of the module", layer.type_name),
        ("output", "Shape of the first output", shape(output.shape) if output else ""),
        ("dead", "Units that are always zero, of all", dead),
        ("gradient", "Root mean square of the gradient of the output", number(backward.rms if backward else None)),
        ("mean", "Mean of the output's finite elements", number(s.mean if s else None)),
        ("± std", "Standard deviation of the output", number(s.std if s else None)),
        ("range", "Smallest and largest finite element of the output", ends),
        ("zeros", "Share of the output's elements that are zero", zeros),
        ("not finite", "Elements of the output that are NaN or infinite", number(s.nonfinite or None if s else None)),
        ("saturated", "Units that are always at a limit, of all", saturated),
        ("calls", "Calls, where it is not one", number(calls if calls != 1 else None)),
        ("parameters", "Elements of the layer's own parameters", number(own or None)),
        ("of weights", "Root mean square of the gradient of the parameters", number(weights.rms if weights else None)),
        ("time ms", "Wall time, with the layers in it", number(profile.wall_time * 1000 if profile else None)),
        ("FLOPs", "Floating-point operations, with the layers in it", number(profile.flops if profile else None)),
        ("bytes", "Bytes of activations", number(profile.activation_bytes if profile else None)),
    ]


_TEXTS = 3
"""So many columns are text; the others are numbers, which are aligned right."""


def _output(layer: Layer) -> Value | None:
    return next(iter(outputs_of(layer)), None)


def layer_table(run: Run, layers: Sequence[Layer], anchor: Callable[[str], str | None]) -> Markup:
    """Return the table, without the columns that are empty."""
    filled: list[tuple[str, str | None, str | None, Sequence[Child]]] = [
        (column[0][0], column[0][1], "n" if i >= _TEXTS else None, [cell for *_, cell in column])
        for i, column in enumerate(zip(*(_cells(run, layer) for layer in layers), strict=True))
        if any(cell for *_, cell in column)
    ]
    histograms = [output.forward.histogram if (output := _output(layer)) else None for layer in layers]
    axis = Axis.of(filter(None, histograms))
    if axis is not None:
        limits = axis.limits()
        told = f"Elements of the output by magnitude, {limits}: negative, zero, positive; each scaled to its peak"
        pictures = [sparkline(axis, histogram) if histogram else None for histogram in histograms]
        filled.insert(sum(css is None for _, _, css, _ in filled), ("distribution", told, "plain", pictures))
    head = [tag("th", "layer", scope="col", title="Name in the model")]
    head += [tag("th", heading, scope="col", title=title, class_=css) for heading, title, css, _ in filled]
    rows = [
        tag("tr", tag("th", layer.name), [tag("td", cells[i]) for *_, cells in filled], id=anchor(layer.name))
        for i, layer in enumerate(layers)
    ]
    first_of_numbers = 2 + sum(css != "n" for _, _, css, _ in filled)
    # The alignment of columns is a rule of the style sheet: a class of each cell would be a fifth of the page.
    table = tag("table", tag("thead", tag("tr", head)), tag("tbody", rows), class_=f"layers from{first_of_numbers}")
    return tag("div", table, class_="scroll", tabindex="0", role="group", aria_label=f"Layers of {run.name}")


def shown(run: Run) -> list[Layer]:
    """Return the layers of the table: those that say something that the row before does not.

    Left out are modules that return what the last layer in them returned, and layers without calls and parameters.
    """
    found: list[Layer] = []
    for layer in run.record.layers.values():
        own = layer.leaf or layer.parameters or entropies(layer)
        news = (layer.calls or layer.parameters) and (own or not found or not _same_output(layer, found[-1]))
        if news or any(map(is_cause, run.status.get(layer.name, ()))):
            found.append(layer)
    return found


def _same_output(layer: Layer, other: Layer) -> bool:
    a, b = _output(layer), _output(other)
    return a is not None and b is not None and (a.shape, a.forward.statistics) == (b.shape, b.forward.statistics)


_OUTCOMES = {
    "failed": ("✗", "failed"),
    "error": ("✗", "error"),
    "xpassed": ("!", "passed, expected to fail"),
    "passed": ("✓", "passed"),
    "xfailed": ("✓", "failed as expected"),
    "skipped": ("–", "skipped"),
}
"""Outcome → sign and words, worst first."""

_MOST_CAUSES = 20
"""How many causes are shown; the rest is folded, because a reader starts with the first."""

_OPEN, _OPEN_LAYERS = 3, 500
"""How many failed tests are unfolded. After one with which so many layers are shown, no other is."""


def render(results: Results) -> str:
    """Return the results of a run of pytest as one page, which needs nothing else."""
    tests = sorted(enumerate(results.tests), key=lambda pair: _rank(pair[1]))
    causes = _causes(results.tests)
    unfolded, layers = set(), 0
    for i, test in [(i, test) for i, test in tests if test.failed][:_OPEN]:
        if layers < _OPEN_LAYERS:
            unfolded.add(i)
            layers += sum(len(run.record.layers) for run in test.runs)
    main = [
        _verdict(results, causes),
        _base_section(results.base),
        _causes_section(causes, results.tests),
        _toolbar(results.tests),
        tag("section", tag("h2", "Tests"), [_test(i, test, i in unfolded) for i, test in tests], id="tests"),
    ]
    facts = [f"commit {results.commit[:12]}" if results.commit else ""]
    facts += [f"{name} {version}" for name, version in results.versions.items()]
    facts += [", ".join(results.devices), f"seed {results.seed}" if results.seed is not None else ""]
    header = _head(results.root, bullets(filter(None, facts), class_="facts"))
    return _page(f"modelprobe: {results.root}", header, main)


def render_run(run: Run) -> str:
    """Return one run of a model as a page of its own."""
    return _page(f"modelprobe: {run.name}", _head(run.name), [tag("section", _run("r", run), class_="test")])


def _page(title: str, header: Child, main: Child) -> str:
    style, script = _resource("style.css"), _resource("script.js")
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    )
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        tag("style", style),
    ]
    skip = tag("a", "Skip to the results", href="#main", class_="skip")
    body = [skip, header, tag("main", main, id="main"), tag("script", script)]
    return f"<!doctype html>\n{tag('html', tag('head', head), tag('body', body), lang='en')}\n"


def _resource(name: str) -> Markup:
    text = Path(__file__).with_name(name).read_text("utf-8")
    return Markup(re.sub(r"\n\s*", "\n", text))


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


# --- verdict and causes -------------------------------------------------------------------------------------------


def _rank(test: CaseResult) -> tuple[int, bool]:
    return list(_OUTCOMES).index(test.outcome), not (test.runs or test.snapshots)


def _head(title: str, facts: Child = None) -> Markup:
    return tag("header", tag("p", "modelprobe", class_="brand"), tag("h1", title), facts)


def _verdict(results: Results, causes: Sequence[_Cause]) -> Markup:
    tests = results.tests
    failed = sum(test.failed for test in tests)
    models = sum(len(test.runs) for test in tests)
    changed = sum(len(test.changed) for test in tests)
    tiles = [
        (count(len(tests), "test"), False),
        (f"{failed:,} failed", failed),
        (count(len(causes), "cause"), causes),
        (count(models, "model"), False),
        *([(f"{changed:,} changed", changed)] if results.base else []),
    ]
    parts = ((*said.split(" "), "bad" if bad else None) for said, bad in tiles)
    items = [tag("li", tag("b", n), f" {what}", class_=css) for n, what, css in parts]
    warning = None
    if results.stopped is not None:
        warning = tag("p", f"Not every test ran to its end: {results.stopped}.", class_="warning")
    head = tag("p", verdict(results, len(causes)), class_="verdict")
    return tag("section", head, warning, tag("ul", items, class_="tiles"), aria_label="Verdict")


@dataclass
class _Cause:
    """A cause of snapshots or of the other side, or the message of a failure."""

    said: str
    cause: ShownCause | None = None
    tests: dict[int, None] = field(default_factory=dict)
    moved: int = 0


def _causes(tests: Sequence[CaseResult]) -> list[_Cause]:
    """Return each cause once: those that snapshots and the other side name, else the first line of the failure."""
    found: dict[str, _Cause] = {}
    for i, test in enumerate(tests):
        # A test passes on both sides although its model changed.
        named = [*(test.snapshots if test.failed else ()), *test.changed]
        for compared in named:
            for cause in compared.causes:
                entry = found.setdefault(cause.said, _Cause(cause.said))
                entry.cause, entry.moved = cause, max(entry.moved, compared.moved)
                entry.tests[i] = None
        if test.failed and not any(compared.causes for compared in named):
            message = _said(test) or test.outcome
            found.setdefault(f"message|{message}", _Cause(message)).tests[i] = None
    return sorted(found.values(), key=lambda cause: -len(cause.tests))


def _said(test: CaseResult) -> str:
    """Return the message of a test; that it is of an assertion is not worth a word."""
    return test.message.removeprefix("AssertionError: ")


_EVIDENCE = {
    "isolated": "found by calling it alone, on synthetic inputs",
    "recorded": "found by comparing what was recorded then and now",
    "propagation": "found in the run, where a change first shows",
    "both": "found in the run, and by calling it alone",
}


def _causes_section(causes: Sequence[_Cause], tests: Sequence[CaseResult]) -> Markup | None:
    if not causes:
        return None
    items = [_cause_item(cause, tests) for cause in causes]
    more = items[_MOST_CAUSES:]
    rest = folded(f"{len(more)} more", tag("ol", more, class_="causes", start=_MOST_CAUSES + 1)) if more else None
    return tag("section", tag("h2", "Causes"), tag("ol", items[:_MOST_CAUSES], class_="causes"), rest, id="causes")


def _base_section(base: Base | None) -> Markup | None:
    """Return what was compared with the other side as a whole."""
    if not base:
        return None
    versions = [f"{package}: {now} here, {then} there" for package, (now, then) in base.versions.items()]
    facts = bullets(versions, class_="facts") if versions else None
    warned = "warning" if base.stopped else None
    return tag(
        "section",
        tag("h2", f"Beside {base.name}"),
        tag("p", base.said, class_=warned),
        facts,
        id="base",
    )


def _cause_item(found: _Cause, tests: Sequence[CaseResult]) -> Markup:
    facts: list[Child] = []
    cause = found.cause
    if cause is not None:
        facts.append(tag("span", cause.kind, class_="kind"))
        facts += [f" · {count(cause.layers, 'layer')}"] if cause.layers > 1 else []
        if cause.change is not None and math.isfinite(cause.change):
            size = f"{cause.change * 100:.2g} %" if cause.change < 10 else f"a factor of {cause.change:.3g}"
            facts.append(f" · changed by {size}")
        facts += [f" · {_EVIDENCE[cause.evidence]}"] if cause.evidence else []
    hints = [tag("p", f"It looks like: {hint}", class_="hint") for hint in (cause.hints if cause else ())]
    follows = f"What follows: {count(len(found.tests), 'test')}"
    follows += f", up to {count(found.moved, 'layer')} moved" if found.moved else ""
    links = bullets(tag("a", tests[i].id, href=f"#t{i}") for i in found.tests)
    said = tag("p", found.said, class_="said")
    return tag("li", said, tag("p", facts) if facts else None, hints, folded(follows, links))


def _toolbar(tests: Sequence[CaseResult]) -> Markup:
    """Return the controls, which the script shows."""
    shows = {"all": f"All {len(tests)}", "failed": "Failed", "found": "With findings"}
    buttons = [
        tag("button", said, type="button", data_show=which, aria_pressed="true" if which == "all" else "false")
        for which, said in shows.items()
    ]
    box = tag("input", type="search", id="search", autocomplete="off", spellcheck="false")
    search = tag("label", "Search ", box)
    group = tag("div", buttons, role="group", aria_label="Which tests", class_="buttons")
    return tag("form", search, group, tag("output", id="count"), class_="toolbar", role="search", hidden=True)


# --- tests --------------------------------------------------------------------------------------------------------


def _test(i: int, test: CaseResult, unfolded: bool) -> Markup:
    sign, words = _OUTCOMES[test.outcome]
    parts = ((test.runs, "model"), (test.snapshots, "snapshot"), (test.figures, "figure"))
    contents = [count(len(part), noun) for part, noun in parts if part]
    head = [
        tag("span", f"{sign} {words}", class_="outcome"),
        tag("span", test.id, class_="id"),
        tag("span", " · ".join([*contents, f"{test.duration:.2f} s"]), class_="contents"),
        tag("span", _said(test), class_="message") if test.message else None,
    ]
    seen: list[Child] = [[_run(f"{i}.{n}" if n else f"{i}", run) for n, run in enumerate(test.runs)]]
    seen += [tag("div", map(_figure, test.figures), class_="figures")] if test.figures else []
    body = [
        [_snapshot(snapshot) for snapshot in test.snapshots],
        [_pair(pair) for pair in test.base if pair.verdict != "unchanged"],
        _failure(test),
        [tag("section", tag("p", tag("b", "Hint")), _lines(said)) for said in test.hints],
        # A browser with scripts does not build these elements, a million in a large report, before the script asks.
        seen if unfolded or not any(seen) else tag("noscript", seen),
    ]
    found = any(run.status or run.findings or run.error for run in test.runs)
    css = "test bad" if test.failed or test.changed else "test"
    return folded(head, body, id=f"t{i}", class_=css, open=unfolded, data_found=found)


def _failure(test: CaseResult) -> Markup | None:
    text = test.failure
    if not text or any(text.strip() == snapshot.text.strip() for snapshot in test.snapshots):
        return None
    inside = any(snapshot.text and snapshot.verdict not in _FINE for snapshot in test.snapshots)
    # The part that matters stands above it already.
    return folded("Failure, as pytest prints it", _lines(text), open=not inside, class_="part")


_FINE = ("same", "not compared")
"""Verdicts on a snapshot that need nothing to be done."""


def _snapshot(snapshot: SnapshotResult) -> Markup:
    verdict = snapshot.verdict
    where = tag("p", tag("b", f"Snapshot {verdict}"), " ", tag("code", snapshot.snapshot), f" on {snapshot.device}")
    parts = [where, _lines(snapshot.text) if snapshot.text else None]
    possible = [cause.said for cause in snapshot.possible]
    if possible:
        parts.append(folded(count(len(possible), "possible cause"), bullets(possible)))
    if snapshot.notes:
        notes = (f"{note.said} x{note.layers}" if note.layers > 1 else note.said for note in snapshot.notes)
        parts.append(folded("Written otherwise", bullets(notes)))
    return tag("section", parts, class_="snapshot")


def _pair(pair: PairResult) -> Markup:
    where = tag("p", tag("b", f"Beside the other side: {pair.verdict}"), f", {pair.record} on {pair.device}")
    said = pair.text or (f"The first output that differs is that of {pair.first}." if pair.first else "")
    return tag("section", where, _lines(said) if said else None, class_="snapshot")


def _lines(text: str) -> Markup:
    """Return text as an element that keeps its lines, and that the keyboard can scroll."""
    return tag("pre", Markup("\n".join(map(html_escaped, text.split("\n")))), tabindex=0)


def _figure(figure: Figure) -> Markup:
    if figure.media in ("image/png", "image/svg+xml"):
        image = tag("img", src=f"data:{figure.media};base64,{figure.data}", alt=figure.title)
    else:
        image = tag("p", "An image that cannot be shown.")
    return tag("figure", tag("figcaption", tag("b", figure.title)), image)


# --- runs ---------------------------------------------------------------------------------------------------------


def _run(prefix: str, run: Run) -> Markup:
    layers, record = shown(run), run.record
    anchors = {layer.name: f"l{prefix}.{n}" for n, layer in enumerate(layers)}
    words = list(dict.fromkeys(word for name in record.layers for word in run.status.get(name, ())))
    title = [run.name, tag("small", f" {record.model}") if record.model != run.name else None]
    parts: list[Child] = [
        tag("h3", title),
        bullets(_run_facts(record), class_="facts"),
        tag("p", f"No record: {run.error}", class_="warning") if run.error else None,
        [tag("p", tag("b", "Findings")), bullets(run.findings, class_="findings")] if run.findings else None,
        [tag("p", tag("b", "Hints"), _HINTS), bullets(run.hints, class_="findings")] if run.hints else None,
        [tag("p", f"Note: {note}", class_="note") for note in record.notes],
    ]
    if layers:

        def link(name: str) -> Child:
            return tag("a", name, href=f"#{anchors[name]}") if name in anchors else name

        by_depth = [make(run, layers, link) for make in (gradient_flow, activation_scale, attention_entropy)]
        charts = [chart for chart in (*by_depth, update_ratios(run.steps, link)) if chart]
        parts += [_offenders(run, layers, link), tag("div", charts, class_="charts") if charts else None]
        parts += [legend(words), layer_table(run, layers, anchors.get)]
    caused = any(is_cause(word) for word in words)
    return tag("section", parts, class_="run caused" if caused else "run")


_HINTS = ": a healthy model may have these too"

_MOST_OFFENDERS = 12


def _offenders(run: Run, layers: Sequence[Layer], link: Callable[[str], Child]) -> Markup | None:
    """Return links to the layers to look at, so that no one has to look for them in a long table."""
    found = [(layer.name, words) for layer in layers if (words := [*filter(is_cause, run.status.get(layer.name, ()))])]
    items: list[Child] = [[badges(words), " ", link(name)] for name, words in found[:_MOST_OFFENDERS]]
    items += [f"and {len(found) - len(items)} more"] if len(found) > len(items) else []
    return bullets(items, class_="offenders") if items else None


def _run_facts(record: Record) -> Iterator[str]:
    yield count(len(record.layers), "layer")
    own = list(record.parameters)
    frozen = elements(own) - elements(parameter for parameter in own if parameter.requires_grad)
    yield count(elements(own), "parameter") + (f", {frozen:,} frozen" if frozen else "")
    backwards = count(record.backwards, "backward") if record.backwards else "no backward"
    yield f"{count(record.forwards, 'forward')}, {backwards}"
    if record.loss:
        yield f"loss {record.loss}"
    yield f"{record.device}" + (f", seed {record.seed}" if record.seed is not None else "")
    profile = record.profile
    if profile:
        yield f"{number(profile.wall_time)} s"
        yield f"{number(profile.flops)} FLOPs"
        yield f"{number(profile.activation_bytes)} bytes of activations"
        yield f"{number(profile.probe_time)} s of the probe itself"


# --- a record ---------------------------------------------------------------------------------------------------------

_FRAME = (
    '<div><iframe sandbox="allow-scripts" style="width: 100%; height: 40rem; border: 0" srcdoc="{}"></iframe></div>'
)
"""A page in a frame: its style sheet and those of the notebook do not reach each other. The ``div`` is there because
IPython warns of a bare frame."""


def record_page(record: Record) -> str:
    """Return the page of a record."""
    return render_run(run_of(NamedRecord(record.model, "run", record)))


def display(record: Record) -> None:
    """Display the page of a record in a notebook; elsewhere, print the record."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if ipython is not None and hasattr(shell, "kernel"):
        ipython.display.display(ipython.display.HTML(_FRAME.format(html.escape(record_page(record)))))
    else:
        print(record)
