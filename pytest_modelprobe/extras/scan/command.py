"""`modelprobe scan`: what a model does, and what is wrong with it, without a test.

It is the first look at a model that has no tests. It alone of the commands runs a model, so it imports torch, and only
when it is called.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_modelprobe.cli import DIFFERENT, SAME
from pytest_modelprobe.exceptions import ModelProbeError
from pytest_modelprobe.text import count, printable, wrapped

if TYPE_CHECKING:
    from pytest_modelprobe.checks import Outcome
    from pytest_modelprobe.gate import Repository

    from .scanning import ScannedModel


def add_command(commands: Any) -> None:
    """Add the command to the subparsers of `modelprobe`."""
    scan = commands.add_parser(
        "scan",
        help="run a model, and print its layers, what is wrong with them, and the standard checks",
        description="Make a model with random weights, run it, and check it. No file is needed.",
    )
    told = "a function or a class that makes the model; hf-tiny:CLASS, a small one of transformers; timm:NAME"
    scan.add_argument("model", metavar="MODULE:NAME", help=told)
    scan.add_argument(
        "--input", action="append", default=[], metavar="[NAME=]SHAPE[:BELOW]",
        help="a tensor that it takes, such as 8x3x32x32, or ids=8x16:1000 for integers below 1000; may be repeated; "
        "guessed by default",
    )  # fmt: skip
    scan.add_argument(
        "--layers", action="append", default=[], metavar="GLOB", help="only these layers in the table, '**' for all"
    )
    scan.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu, cuda, cuda:N or mps (default: cpu)")
    one_of = scan.add_mutually_exclusive_group()
    one_of.add_argument("--write", metavar="PATH", help="write a file of tests, to be edited")
    one_of.add_argument(
        "--base", metavar="REF",
        help="only say what is not as in the model of the same name at the merge base of HEAD and REF",
    )  # fmt: skip
    scan.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    """Make the model, run it, check it, print what was found, and write a file of tests if asked for."""
    path = Path(options.write) if options.write else None
    if path is not None and path.exists():
        raise ModelProbeError(f"{path} is there already: name another file")
    base = None if options.base is None else _base(options.base)
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as `python -m` does
    from pytest_modelprobe.probe import ModelProbe

    from .scanning import NO_GRADIENT, ScannedModel, as_test_file
    from .search import parse_input
    from .target import load

    inputs = [parse_input(text) for text in options.input]
    with ModelProbe(options.device) as probe:
        try:
            scanned = ScannedModel(load(options.model), probe, inputs)
            _show_inputs(scanned)
            if base is not None:
                return _run_beside(scanned, options.base, *base)
            findings = _show_record(scanned, options.layers)
            told = ["parameters_used"] if any(line.startswith(NO_GRADIENT) for line in findings) else []
            outcomes = list(_shown(scanned.outcomes(), told))
        except SystemExit as error:  # with code 0 it would read as a model that was scanned
            raise ModelProbeError(f"{options.model} ends the process: it calls sys.exit({error.code!r})") from error
        broken = [outcome for outcome in outcomes if outcome.verdict == "broken"]
        hints = [outcome for outcome in outcomes if outcome.verdict == "hint"]
        for outcome in (one for one in (*broken, *hints) if one.check not in told):
            print(f"\n--- {outcome.check} ---", *map(_line, str(outcome).split("\n")), sep="\n")
        also = f"; {count(len(hints), 'hint')}" if hints else ""
        print(f"\n{count(len(findings), 'finding')}, {count(len(broken), 'broken check')} of {len(outcomes)}{also}")
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(as_test_file(scanned, outcomes), "utf-8")
            print(f"Wrote {path}: run it with pytest --snapshot-update, and edit it.")
    return DIFFERENT if findings or broken else SAME


def _show_inputs(scanned: ScannedModel) -> None:
    given = " ".join(map(str, scanned.inputs))
    guessed = " (guessed; --input gives others)" if scanned.is_guessed and given else ""
    print(_line(f"Inputs: {given or 'none'}{guessed}") + "\n")


def _base(ref: str) -> tuple[Repository, str]:
    """Return the repository of the current folder, and the commit to compare with."""
    from pytest_modelprobe.gate import Repository

    repository = Repository(Path.cwd())
    return repository, repository.merge_base(ref)


def _run_beside(scanned: ScannedModel, ref: str, repository: Repository, commit: str) -> int:
    """Print what is not as at another commit."""
    from pytest_modelprobe.revisions import VERDICTS, pair_text

    from .beside import beside

    inputs = [*map(str, scanned.inputs)]
    pair = beside(repository, commit, scanned.target.name, inputs, device=str(scanned.probe.device))
    print(printable(f"Beside {ref} ({commit[:10]}): {VERDICTS[pair.verdict]}"))
    if pair.verdict != "changed":
        return SAME
    print(f"\n{pair_text(pair)}")
    return DIFFERENT


def _show_record(scanned: ScannedModel, layers: Sequence[str]) -> Sequence[str]:
    """Print the table of layers and the findings, and return these."""
    from pytest_modelprobe.record import record_text

    if layers:
        print(scanned.record.table(layers))
    else:
        print(record_text(scanned.record, more="--layers '**' shows them all"))
    found = scanned.findings()
    for heading, lines in (("Findings", found), ("Hints", scanned.hints())):
        if lines:
            print(f"\n{heading}:", *(_line(f"  {line}", 4) for line in lines), sep="\n")
        elif heading == "Findings":
            print("\nFindings: none")
    return found


def _line(text: str, indent: int = 0) -> str:
    return wrapped(printable(text), indent)


_SAID = 46
"""Where the text of an outcome begins."""


def _shown(outcomes: Iterable[Outcome], told: Collection[str]) -> Iterable[Outcome]:
    """Print each outcome as soon as it is known, as some checks take long. Of hints ``told`` the findings say more."""
    print("\nChecks:")
    for outcome in outcomes:
        is_told = outcome.verdict == "hint" and outcome.check in told
        said = "see the findings" if is_told else outcome.text.partition("\n")[0]
        print(_line(f"  {outcome.check:<28}{outcome.verdict:<16}{said}", _SAID), flush=True)
        yield outcome
