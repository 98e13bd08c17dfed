"""The command `modelprobe`: shows snapshots, compares them, and checks that changes are declared.

A job that reviews changes has a checkout and nothing installed but this package. So the subcommands read files and ask
git, and need neither torch nor pytest; only extras run models.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from pytest_modelprobe import extension
from pytest_modelprobe.exceptions import ModelProbeError
from pytest_modelprobe.files import DIRECTORY
from pytest_modelprobe.gate import CLASSES, DEFAULTS, LEVELS, MEANING
from pytest_modelprobe.report import ci
from pytest_modelprobe.text import fitted, printable, width_of

from .commands import (
    DIFFERENT,
    ENDINGS,
    GIT_ATTRIBUTES,
    INCOMPLETE,
    SAME,
    run_check,
    run_declare,
    run_diff,
    run_init,
    run_report,
    run_show,
)

__all__ = ["DIFFERENT", "GIT_ATTRIBUTES", "INCOMPLETE", "SAME", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    tests: list[str] = []
    if given[:1] == ["bisect"] and "--" in given:
        given, tests = given[: given.index("--")], given[given.index("--") + 1 :]
    options = _parser().parse_args(given, argparse.Namespace(tests=tests))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names may hold what a console cannot show
            stream.reconfigure(errors="backslashreplace")
    try:
        with fitted(width_of(sys.stdout)):
            code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # as in `modelprobe show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INCOMPLETE
    except KeyboardInterrupt:
        print("modelprobe: interrupted", file=sys.stderr)
        return INCOMPLETE
    except (ModelProbeError, OSError) as error:
        said = printable(str(error))
        print(f"modelprobe: {said}", file=sys.stderr)
        if getattr(options, "format", "") == "github":
            print(ci.command("error", said, title="modelprobe could not complete"))
        return INCOMPLETE
    return code


class _Parser(argparse.ArgumentParser):
    """A parser whose errors have nothing in them that a terminal would obey."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="modelprobe",
        description="Show and compare snapshots of models, and gate changes of them.",
        epilog="Exit code: 0 success, 1 differences or denied changes, 2 could not complete.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    path = f"an .arch.json, a .probe.json, either without its ending, or a folder with {DIRECTORY} below it"
    snapshot = f"{path}, as it is or, as REF:PATH, as it was"

    show = commands.add_parser("show", help="print a snapshot as a table or a page")
    show.add_argument("snapshot", metavar="SNAPSHOT", help=snapshot)
    show.add_argument("--layers", action="append", metavar="GLOB", help="only these layers, such as 'blocks.*.attn'")
    _add_format(show, "text", "markdown", "json", "html")
    show.add_argument("--html", action="store_const", dest="format", const="html", help="as --format html: a page")
    show.add_argument("-o", dest="output", metavar="PATH", help="write the page into this file")
    show.set_defaults(run=run_show)

    diff = commands.add_parser("diff", help="print what changed between two snapshots, and why")
    diff.add_argument("paths", nargs="*", metavar="PATH", help=f"OLD and NEW: {snapshot}; with --base what to look at")
    _add_base(diff)
    _add_format(diff, "text", "markdown", "json", "github")
    diff.set_defaults(run=run_diff)

    check = commands.add_parser(
        "check",
        help="check that every change that needs a reason has one",
        description="Check that every change since REF that needs a reason has one.",
        epilog="Classes: " + "; ".join(f"{kind} ({DEFAULTS[kind]}): {MEANING[kind]}" for kind in CLASSES) + ".",
    )
    check.add_argument("paths", nargs="*", metavar="PATH", help=f"what to look at; all by default: {path}")
    _add_base(check)
    for level in LEVELS:
        _add_level(check, level, f"{level} changes of this class; may be repeated")
    _add_format(check, "text", "markdown", "json", "github")
    check.set_defaults(run=run_check)

    declare = commands.add_parser(
        "declare",
        help="write the reason of a change into its snapshots, after the fact",
        description="Write why snapshots changed or were deleted since REF into files for `check`; it runs no test.",
    )
    declare.add_argument("reason", metavar="WHY", help="the reason")
    declare.add_argument("paths", nargs="*", metavar="PATH", help=f"what it is for; all by default: {path}")
    declare.add_argument(
        "--base", metavar="REF", default="HEAD", help="compare with the merge base of HEAD and REF (default: HEAD)"
    )
    _add_level(declare, "deny", "changes of this class too, which `check` denies with the same option; may be repeated")
    declare.set_defaults(run=run_declare)

    report = commands.add_parser("report", help="write a file of results as a page or as Markdown")
    report.add_argument("results", metavar="RESULTS.json", help="what pytest --modelprobe-json=PATH wrote")
    report.add_argument("--format", choices=ENDINGS, default="html")
    report.add_argument("-o", "--output", metavar="PATH", help="where it is written (default: beside RESULTS.json)")
    report.set_defaults(run=run_report)

    init = commands.add_parser("init", help="add the attributes of snapshots to .gitattributes")
    init.set_defaults(run=run_init)

    for module in sorted(set(extension.modules("commands").values())):
        importlib.import_module(module).add_command(commands)
    return parser


def _add_format(parser: argparse.ArgumentParser, *formats: str) -> None:
    parser.add_argument("--format", choices=formats, default="text")


def _add_level(command: argparse.ArgumentParser, level: str, told: str) -> None:
    command.add_argument(f"--{level}", action="append", choices=CLASSES, default=[], metavar="CLASS", help=told)


def _add_base(parser: argparse.ArgumentParser) -> None:
    told = "compare with the merge base of HEAD and REF; in GitHub Actions it is read from the event"
    parser.add_argument("--base", metavar="REF", help=told)
