"""Names that whoever sends a change may choose: in no output are they anything but text.

Markdown is rendered by cmark-gfm, as GitHub does it, and then searched for what GitHub makes of rendered text. What is
printed is read as the runner of GitHub Actions reads the log of a job.
"""

from __future__ import annotations

import functools
import html.parser
import itertools
import json
import os
import re
import unicodedata
from collections.abc import Iterator

import pytest

from pytest_modelprobe.cli.commands import as_json
from pytest_modelprobe.files import encode
from pytest_modelprobe.gate import text as changes
from pytest_modelprobe.gate.verdict import SnapshotVersion, Verdict, judge
from pytest_modelprobe.record import Layer, Record
from pytest_modelprobe.report import ci, markdown
from pytest_modelprobe.report.results import (
    Base,
    CaseResult,
    PairResult,
    Results,
    SnapshotResult,
)
from pytest_modelprobe.text import LONGEST, printable

# --- the names ----------------------------------------------------------------------------------------------------

PAYLOADS = [
    "::error::x", "::set-output name=a::b", "::add-mask::e", "::stop-commands::t", "::group::", "##[error]x",
    "##[add-matcher]m.json", "##[group]a", "##[set-env name=PATH]/tmp", "::add-path::/tmp", "::debug::",
    "http://evil.example", "HTTP://evil.example", "Https://evil.example/a?b=c&d", "ftp://evil.example",
    "www.evil.example", "WWW.evil.example", "a@b.example", "a&#64;b.example", "mailto:a@b.example",
    "xmpp:a@b.example/c", "@someone", "@org/team", "#123", "owner/name#123", "GH-123", "gh-7", ":smile:", ":+1:",
    "$a$", "$$a$$", "$`a`$", "<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "<a href='//e'>x</a>",
    "</summary></details>", "<!-- ", "<![CDATA[", "&lt;b&gt;", "&amp;#64;", "a|b|c", "|", "\\|", "`code`", "```",
    "``` x", "~~~", "~~x~~", "*x*", "**x**", "_x_", "__x__", "[x](//e.example)", "![x](//e.example/i.png)",
    "[x]: //e.example", "[^1]", "- [x] done", "# x", "> x", "1. x", "---", "===", "\\", "\\\\", "a\\", "a\nb",
    "a\r::error::b", "a\r\n::error::b", "a\x0b##[error]b", "a\u2028::error::b", "a\x85::error::b", "\x1b[31m",
    "\x1b]8;;//e\x07x", "\x9b1A", "a\u202eb", "a\u2066b\u2069", "a\u200bb", "\ufeff", "a\x00b", "\ud800", "\udcff",
    "%0A::error::x", "%25", "a,file=b", "a:b,line=1", ";", "'\"", "$(id)", "`id`", "x" * 5000,
]  # fmt: skip
AROUND = ["{}", "fc {}", "{} fc", "fc{}", "{}fc", " {}", "({})", "a.{}.b", "{0} {0}"]
NAMES = [
    around.format(payload)
    for (i, payload), (j, around) in itertools.product(enumerate(PAYLOADS), enumerate(AROUND))
    # Each alone and in two others: all are in `tox -e long`.
    if j == 0 or j % 4 == i % 4 or "MODELPROBE_LONG" in os.environ
]


@functools.cache
def verdict_of(name: str) -> Verdict:
    """Return a verdict with a name wherever one can be: of a model, layer, attribute, path, and in a reason."""
    path = f"tests/__modelprobe__/{name}/{name}".replace("\ud800", "")  # which no path has
    before, now, gone = (_snapshot(name, path + end, act) for end, act in (("", "ReLU"), ("", name), ("c", "ReLU")))
    was = _snapshot(name, f"{path}b", "ReLU")
    declared = _snapshot(name, f"{path}b", "GELU", reason=f"Why {name}", supersedes=(was.architecture,))
    return judge({"a": before, "b": was, "c": gone}, {"a": now, "b": declared})


def _snapshot(name: str, path: str, act: str, **other: object) -> SnapshotVersion:
    layers = {
        "(root)": Layer(name="(root)", type="Net", leaf=False),
        name: Layer(name=name, type=act or "None", attributes={name: act, "p": name}),
    }
    text = encode(Record(model=name, layers=layers)).architecture
    record = Record(model=name, layers=layers, notes=(name,))
    return SnapshotVersion(path=f"{path}.arch.json", record=record, architecture=text, content=text, **other)


# --- the log of a job ---------------------------------------------------------------------------------------------

COMMANDS = {
    "internal-set-repo-path", "set-env", "set-output", "save-state", "add-path", "add-mask", "add-matcher",
    "remove-matcher", "debug", "warning", "error", "notice", "group", "endgroup", "echo", "stop-commands",
}  # fmt: skip


class Runner:
    """Finds commands in a log as the runner does: `ActionCommand.TryParseV2`, then `ActionCommand.TryParse`."""

    def __init__(self) -> None:
        self.stopped_by: str | None = None

    def commands(self, log: str) -> Iterator[tuple[str, dict[str, str], str]]:
        for line in re.split("\r\n|\n|\r", log):
            found = self._second(line) or self._first(line)
            if found is None:
                continue
            name, _, data = found
            if self.stopped_by is not None:
                self.stopped_by = None if name.lower() == self.stopped_by.lower() else self.stopped_by
            elif name.lower() == "stop-commands":
                self.stopped_by = data
            else:
                yield found

    def _known(self, name: str) -> bool:
        return name.lower() in COMMANDS or (self.stopped_by or "").lower() == name.lower() != ""

    def _second(self, line: str) -> tuple[str, dict[str, str], str] | None:
        line = line.lstrip()
        end = line.find("::", 2)
        if not line.startswith("::") or end < 0:
            return None
        name, _, given = line[2:end].partition(" ")
        properties = dict(pair.split("=", 1) for pair in given.strip().split(",") if "=" in pair)
        return (name, properties, line[end + 2 :]) if self._known(name) else None

    def _first(self, line: str) -> tuple[str, dict[str, str], str] | None:
        start = line.find("##[")
        end = line.find("]", start)
        if start < 0 or end < 0:
            return None
        name, _, given = line[start + 3 : end].partition(" ")
        properties = dict(pair.split("=", 1) for pair in given.strip().split(";") if "=" in pair)
        return (name, properties, line[end + 1 :]) if self._known(name) else None


def is_plain(text: str) -> bool:
    return not any(unicodedata.category(sign) in {"Cc", "Cf", "Cs", "Zl", "Zp"} for sign in text)


def unescaped(text: str) -> str:
    for sign, code in ((":", "%3A"), (",", "%2C"), ("\r", "%0D"), ("\n", "%0A"), ("%", "%25")):
        text = text.replace(code, sign)
    return text


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("::error file=a,line=3::b", [("error", {"file": "a", "line": "3"}, "b")]),
        ("   ::error::b", [("error", {}, "b")]),
        ("Cannot read ##[add-matcher]m.json", [("add-matcher", {}, "m.json")]),
        ("a ::error::b", []),
        ("::unknown::b", []),
        ("::stop-commands::t\n::error::a\n##[error]a\n::t::\n::error::b", [("error", {}, "b")]),
    ],
)
def test_the_runner_reads_commands(line: str, found: list[object]) -> None:
    assert list(Runner().commands(line)) == found


@pytest.mark.parametrize("form", ["text", "diff"])
def test_text_holds_no_command_and_no_control(form: str) -> None:
    for name in NAMES:
        verdict = verdict_of(name)
        said = changes.verdict_text(verdict) if form == "text" else changes.diff_text(verdict)
        assert list(Runner().commands(said)) == [], repr(name)
        assert all(map(is_plain, said.split("\n"))), repr(name)


def test_json_holds_no_command_and_says_the_name() -> None:
    for name in NAMES:
        said = as_json(ci.as_data(verdict_of(name)))
        assert list(Runner().commands(said)) == [], repr(name)
        assert said.isascii()
        assert json.loads(said)["changes"][0]["model"] == name


def test_annotations_are_the_only_commands() -> None:
    for name in NAMES:
        verdict = verdict_of(name)
        log = "\n".join([ci.without_commands(changes.verdict_text(verdict)), *ci.annotation_commands(verdict)])
        found = list(Runner().commands(log))
        assert [command for command, _, _ in found] == ["error", "error", "warning"], repr(name)
        for _, properties, message in found:
            assert properties.keys() <= {"file", "line", "title"}, repr(name)
            assert all(map(is_plain, (unescaped(value) for value in properties.values()))), repr(name)
            assert all(map(is_plain, unescaped(message).split("\n"))), repr(name)


# --- Markdown -----------------------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """The elements of a page, its cells, and its texts as GitHub's filters get them: those between two tags."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self.inside: list[str] = []
        self.all = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {f"{tag} {key}" for key, _ in attrs}
        self.inside.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.all += data
        if {"td", "th"} & {*self.inside}:
            self.rows[-1][-1] += data
        if not {"pre", "code"} & {*self.inside}:
            self.texts.append(data)

    def handle_comment(self, data: str) -> None:
        self.elements.add("!--")

    def handle_decl(self, decl: str) -> None:
        self.elements.add("!")


def rendered(text: str) -> Page:
    """Return Markdown as cmark-gfm renders it, tags and all."""
    cmarkgfm = pytest.importorskip("cmarkgfm")
    options = cmarkgfm.cmark.Options.CMARK_OPT_UNSAFE
    return Page(cmarkgfm.github_flavored_markdown_to_html(text, options=options))


OURS = {
    "h3", "p", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "pre", "code", "ul", "li", "span",
}  # fmt: skip

MADE_OF_TEXT = re.compile(
    r"(?<!\w)@\w|(?<!\w)[\w./-]*#\d|(?<!\w)gh-\d|:[\w+-]+:|\$[^$]+\$|www\.\w|\w://|\w@\w+\.\w", re.IGNORECASE
)
"""People, issues, emoji, formulas, addresses: what GitHub makes of texts that are rendered."""


@pytest.mark.parametrize(
    ("text", "element"),
    [("HTTP://a.example", "a"), ("a&#64;b.example", "a"), ("www.a.example", "a"), ("<img onerror=x>", "img")],
)
def test_the_renderer_makes_elements_of_what_is_not_escaped(text: str, element: str) -> None:
    assert element in rendered(text).elements


@pytest.mark.parametrize("form", ["verdict", "diff"])
def test_markdown_shows_names_as_text_in_the_columns_of_tables(form: str) -> None:
    written = getattr(markdown, form)
    columns = [len(row) for row in rendered(written(verdict_of("fc"))).rows]
    for name in NAMES:
        page = rendered(written(verdict_of(name)))
        assert page.elements <= OURS, repr(name)
        assert page.attributes == set(), repr(name)
        assert [text for text in page.texts if MADE_OF_TEXT.search(text.replace("::", ""))] == [], repr(name)
        assert [len(row) for row in page.rows] == columns, repr(name)


def test_markdown_of_a_run_shows_names_as_text() -> None:
    for name in NAMES:
        pair = PairResult(record=name, verdict="changed", first_line=name, text=f"{name}\n{name}")
        snapshot = SnapshotResult(snapshot=name, verdict="changed", first_line=name, text=f"{name}\n{name}")
        test = CaseResult(id=name, file="a", outcome="failed", message=name, snapshots=(snapshot,), base=(pair,))
        base = Base(
            ref=name, commit=name, python=name, said=f"nothing: {name}", failed={name: name}, verdicts={"changed": 1},
            versions={name: (name, name)},
        )  # fmt: skip
        for text in (
            markdown.render(Results(tests=(test,), base=base)),
            markdown.beside(base, {name: [pair]}),
        ):
            page = rendered(text)
            assert list(Runner().commands(text)) == [], repr(name)
            assert page.elements <= OURS, repr(name)
            assert page.attributes == set(), repr(name)
            assert [text for text in page.texts if MADE_OF_TEXT.search(text.replace("::", ""))] == [], repr(name)
            assert [len(row) for row in page.rows] in ([3, 3, 2, 2], [2, 2, 3, 3, 2, 2]), repr(name)


def test_a_name_reads_in_markdown_as_in_a_terminal() -> None:
    names = [name for name in NAMES if len(name) < LONGEST]
    page = rendered("\n".join(markdown.table(["name"], [[f"a{name}b"] for name in names], most=len(names))))
    for name, row in zip(names, page.rows[1:], strict=True):
        assert " ".join(row[0].split()) == " ".join(printable(f"a{name}b").split()), repr(name)
