"""What the README and the documentation show is true: their code runs, and prints what stands beside it.

A block of a page is tested by its language, one after the other in one folder:

- ``python title="model.py"`` is written to that file; without a title it is a test, in ``test_model.py``, and passes,
  or fails after the comment ``<!-- fails -->``. The lines of a ``text`` block below are lines of what it prints.
- ``diff title="model.py"`` is applied to that file.
- ``console`` is run: the lines below a command are lines of what that prints.
- ``pycon`` is a doctest. ``sh``, ``yaml``, ``ini``, ``toml`` and ``json`` are shown only: they need another machine.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import doctest
import importlib.metadata
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise, zip_longest
from math import isclose
from pathlib import Path

import pytest
import torch

import pytest_modelprobe
from pytest_modelprobe import _torch, checks, cli, gate

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

FENCE = re.compile(
    r'(?:^<!-- (?P<how>\w+) -->\n)?^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
SHOWN_ONLY = {"sh", "yaml", "ini", "toml", "json", "text", "pycon"}


def readme() -> str:
    """Return the README: of the checkout, else as the installed package carries it."""
    checkout = ROOT / "README.md"
    if checkout.is_file():
        return checkout.read_text("utf-8")
    return str(importlib.metadata.metadata("pytest-modelprobe").get_payload())


PAGES = {"README.md": readme()} | {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(DOCS.rglob("*.md"))
}


@dataclasses.dataclass
class Block:
    how: str | None
    language: str
    title: str | None
    text: str
    shown: str = ""
    """The text block below it."""


def blocks(page: str) -> list[Block]:
    found = [Block(**match.groupdict()) for match in FENCE.finditer(page)]
    for block, below in pairwise(found):
        if below.language == "text":
            block.shown = below.text
    return found


RUN = {name: [block for block in blocks(text) if block.language not in SHOWN_ONLY] for name, text in PAGES.items()}


@pytest.mark.usefixtures("_plugin_alone", "_forked")
@pytest.mark.parametrize("name", [name for name, found in RUN.items() if found])
def test_the_code_of_a_page_does_what_it_says(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name in OF_DROPOUT and not draws_dropout_as_pinned():
        pytest.skip("this torch draws another dropout than the pinned one, so other numbers are printed")
    shell = Shell(pytester, monkeypatch)
    for block in RUN[name]:
        if block.language == "python" and block.title is None:
            pytester.makepyfile(test_model=block.text)
            output = shell.run("pytest -vv --modelprobe-verbose test_model.py", fails=block.how == "fails")
            assert_shown(block.shown, output)
        elif block.language == "python":
            ast.parse(block.text)
            (pytester.path / block.title).write_text(block.text, "utf-8")
        elif block.language == "diff":
            apply(block.text, pytester.path / block.title)
        else:
            assert block.language == "console", block
            for command, text in commands(block.text):
                assert_shown(text, shell.run(command, fails=None))


OF_DROPOUT = {"docs/how-to/checkpoints.md"}
"""Pages that show numbers which depend on what dropout draws."""


def draws_dropout_as_pinned() -> bool:
    """Whether dropout draws what it draws in the torch of ``constraints.txt``: in torch 2.6 it drew otherwise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return int(torch.nn.functional.dropout(torch.ones(32, 16), 0.1).count_nonzero()) == 463


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block with what stands below it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command.partition("  # ")[0], output


def apply(diff: str, path: Path) -> None:
    """Apply a diff without line numbers."""
    before, after = (
        "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in f" {sign}") for sign in "-+"
    )
    text = path.read_text("utf-8")
    assert text.count(before) == 1, before
    path.write_text(text.replace(before, after), "utf-8")


class Shell:
    """Runs the commands of a page in the folder of a test."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester = pytester
        for role in ("AUTHOR", "COMMITTER"):
            monkeypatch.setenv(f"GIT_{role}_NAME", "you")
            monkeypatch.setenv(f"GIT_{role}_EMAIL", "you@example.com")

    def run(self, command: str, *, fails: bool | None) -> list[str]:
        """Return the lines that a command prints, and assert whether it fails if that is known."""
        words = shlex.split(command)
        if words[0] == "pytest":
            arguments = [*words[1:], "-p", "no:randomly", "-p", "no:cacheprovider"]
            done = self.pytester.runpytest(*arguments)
            code, lines = int(done.ret), [line.removeprefix("E       ") for line in done.outlines]
        elif words[0] == "modelprobe":
            printed, here = io.StringIO(), str(self.pytester.path)
            files = {name: str(getattr(module, "__file__", "")) for name, module in sys.modules.items()}
            for name in (name for name, file in files.items() if file.startswith(here)):
                del sys.modules[name]  # a command is a process of its own, and reads what is in the files now
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                code = cli.main(words[1:])
            lines = printed.getvalue().splitlines()
        else:
            if words[0] == "python":
                words[0] = sys.executable
            one = subprocess.run(words, cwd=self.pytester.path, text=True, capture_output=True, check=False)
            code, lines = one.returncode, (one.stdout + one.stderr).splitlines()
        if fails is not None:
            assert code == fails, "\n".join(lines)
        return lines


def assert_shown(text: str, output: list[str]) -> None:
    for line in filter(str.strip, text.splitlines()):
        if line != "...":
            found = any(same(line, other, noise=" x noise " in text) for other in output)
            assert found, "\n".join([f"not printed: {line}", "", *output])


def same(a: str, b: str, *, noise: bool = False) -> bool:
    """Whether two lines say the same; the last digits of numbers belong to the machine, and noise does altogether.

    With ``noise`` the lines are of a table that has a column of it: there numbers without a percent sign may be any.
    """
    pairs = list(zip_longest(a.split(), b.split(), fillvalue=""))
    after = [*(y for _, y in pairs[1:]), ""]
    return all(
        x == y or close(x, y, rel_tol=2 if then == "x" or (noise and then != "%") else 0.01)
        for (x, y), then in zip(pairs, after, strict=True)
    )


def close(a: str, b: str, *, rel_tol: float) -> bool:
    numbers = [float(text.replace(",", "")) for text in (a, b) if NUMBER.fullmatch(text)]
    return len(numbers) == 2 and isclose(*numbers, rel_tol=rel_tol)


NUMBER = re.compile(r"-?[\d,]*\.?\d+(e-?\d+)?")


def test_failures_on_the_home_page_are_those_of_other_pages() -> None:
    (shown,) = (block["text"] for block in FENCE.finditer(PAGES["docs/index.md"]))
    others = "".join(text for page, text in PAGES.items() if page != "docs/index.md")
    assert [line for line in shown.splitlines() if f"AssertionError: {line}" not in others] == []


def test_examples_in_the_documentation_run() -> None:
    for name in (name for name, text in PAGES.items() if "```pycon" in text):
        assert doctest.testfile(str(ROOT / name), module_relative=False).failed == 0, name


# --- nothing is left out, and nothing is named that is not there ------------------------------------------------------


def test_every_public_assertion_is_in_the_table() -> None:
    page = PAGES["docs/reference/assertions.md"]
    for name in pytest_modelprobe.__all__:
        if name.startswith("assert_"):
            assert f"| `{name}(" in page
            assert f"::: pytest_modelprobe.{name}\n" in page


def test_the_number_of_assertions_is_right() -> None:
    assertions = [name for name in pytest_modelprobe.__all__ if name.startswith("assert_")]
    for page in (PAGES["README.md"], (ROOT / "CHANGELOG.md").read_text("utf-8")):
        assert re.findall(r"(\d+) assertions\b", page) == [str(len(assertions))]


def test_every_public_check_is_in_the_reference() -> None:
    page = PAGES["docs/reference/checks.md"]
    # finite and incremental are modules too: these are named in full.
    shown = re.findall(r"^::: pytest_modelprobe\.checks\.(?:\w+\.)?(\w+)$", page, flags=re.MULTILINE)
    assert sorted(shown) == sorted(checks.__all__)


def test_every_public_class_is_in_the_reference() -> None:
    pages = "".join(PAGES[f"docs/reference/{page}.md"] for page in ("probe", "interventions"))
    for name in pytest_modelprobe.__all__:
        if not name.startswith("assert_"):
            assert f"::: pytest_modelprobe.{name}\n" in pages


def options_of_pytest(config: pytest.Config) -> set[str]:
    group = config._parser.getgroup("modelprobe")
    ini = {name for name in config._parser._inidict if name.startswith("modelprobe_")}
    return ini | {option.names()[0] for option in group.options}


def test_every_option_of_pytest_is_in_the_reference(pytestconfig: pytest.Config) -> None:
    for name in options_of_pytest(pytestconfig):
        assert f"`{name}" in PAGES["docs/reference/options.md"]


def subcommands() -> dict[str, argparse.ArgumentParser]:
    actions = cli._parser()._actions
    return dict(next(action for action in actions if isinstance(action, argparse._SubParsersAction)).choices)


def test_every_option_of_the_command_is_in_the_reference() -> None:
    page = PAGES["docs/reference/command-line.md"]
    for name, parser in subcommands().items():
        _, _, section = page.partition(f"\n## `modelprobe {name}")
        section = section.partition("\n## ")[0]
        for option in (option for action in parser._actions for option in action.option_strings):
            assert option in ("-h", "--help") or f"`{option}" in section, f"{name} {option}"
        formats = [action.choices for action in parser._actions if action.choices and action.dest == "format"]
        row = "".join(line for line in section.splitlines() if line.startswith("| `--format`"))
        assert [*map(set, formats)] == [set(re.findall(r"`(\w+)`", row))] * bool(row), name


def test_every_class_of_change_is_in_the_tables() -> None:
    for name in ("docs/reference/command-line.md", "examples/github/README.md"):
        text = (ROOT / name).read_text("utf-8")
        rows = re.findall(r"^\| `(\w+)` \| (deny|warn|allow) \| (.+) \|$", text, re.MULTILINE)
        assert rows == [(kind, gate.DEFAULTS[kind], gate.MEANING[kind]) for kind in gate.CLASSES], name


def test_options_and_commands_that_a_page_names_exist(pytestconfig: pytest.Config) -> None:
    known = options_of_pytest(pytestconfig) | subcommands().keys()
    option = r"--modelprobe-[\w-]*\w|\bmodelprobe_(?:devices|seed|verbose|compare)\b"
    copied = [ROOT / "action.yml", *(ROOT / "examples").rglob("*.yml")]
    for name, page in {**PAGES, **{str(path): path.read_text("utf-8") for path in copied}}.items():
        named = {*re.findall(option, page), *re.findall(r"(?:\$ |`|run: |- |^)modelprobe (\w+)", page, re.MULTILINE)}
        assert named - known == set(), name


def test_the_page_of_private_names_has_each() -> None:
    page = (ROOT / "evidence" / "PRIVATE_NAMES.md").read_text("utf-8")
    assert sorted(re.findall(r"^\| `(torch\.[\w.]+)`", page, flags=re.MULTILINE)) == sorted({*_torch.PATHS})


def test_links_lead_somewhere() -> None:
    for name, page in PAGES.items():
        links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", FENCE.sub("", page))
        assert [link for link in links if "://" not in link and not ((ROOT / name).parent / link).exists()] == [], name


def test_the_workflow_that_is_shown_is_the_one_to_copy() -> None:
    workflow = (ROOT / "examples" / "github" / "modelprobe.yml").read_text("utf-8")
    shown = "".join(f"    {line}".rstrip() + "\n" for line in workflow.splitlines())
    assert f"    ```yaml\n{shown}    ```\n" in PAGES["docs/how-to/gate.md"]


def test_the_readme_is_short() -> None:
    assert len(readme().splitlines()) < 200
