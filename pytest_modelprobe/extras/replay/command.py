"""`modelprobe replay`: the saved call of a layer with the code that is here, beside both sides of the comparison."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_modelprobe.cli import DIFFERENT, INCOMPLETE, SAME
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.text import count, listed, printable, table

if TYPE_CHECKING:
    from torch import Tensor

    from .calling import Row


def add_command(commands: Any) -> None:
    """Add the command to the subparsers of `modelprobe`."""
    replay = commands.add_parser(
        "replay",
        help="run the call of a layer that pytest --modelprobe-save wrote, and say whether it still differs",
        description="Run the saved call of a layer with the code that is here. It imports and runs the classes that "
        "the file names: replay only files that you trust.",
    )
    replay.add_argument("file", metavar="FILE", help="what pytest --modelprobe-save=DIR wrote")
    replay.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu, cuda, cuda:N or mps (default: cpu)")
    replay.add_argument("--dtype", choices=("float32", "float64"), help="compute in this dtype (default: as saved)")
    replay.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    """Run the call, and print what is computed beside what was."""
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as `python -m` does
    data, tensors = _read(options.file)
    sys.path.insert(0, str(Path(data["path"]).absolute()))
    import torch

    from .calling import SavedCall
    from .saving import source_digest, versions

    try:
        device = torch.device(options.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {options.device!r} cannot be used here: {str(error).partition(chr(10))[0]}") from None
    saved = SavedCall(data, tensors, device, getattr(torch, options.dtype) if options.dtype else None)
    found = saved.rows()
    print(*map(printable, _text(found, data, source_digest(saved.kind), versions(saved.kind))), sep="\n")
    differs, moved = (any(getattr(row, side).differs for row in found) for side in ("other", "saved"))
    if differs and data["attributes"]:
        again = any(row.other.differs for row in saved.rows(data["attributes"]))
        said = listed([f"{name} = {then!r}" for name, then in data["attributes"].items()])
        print(printable(f"With {said}, as on the other side, it {'still' if again else 'no longer'} differs"))
    return DIFFERENT if differs else SAME if moved else INCOMPLETE


def _read(file: str) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise UsageError("replay reads files of safetensors: pip install safetensors") from error
    if not Path(file).is_file():
        raise UsageError(f"{file} is no file")
    from .saving import KEY, SCHEMA

    try:
        with safe_open(file, "pt") as opened:
            text = (opened.metadata() or {}).get(KEY)
            data = None if text is None else json.loads(text)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
    except (SafetensorError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} is no file of safetensors: {error}") from error
    if data is None:
        raise UsageError(f"{file} holds tensors, but no call of a layer, as pytest --modelprobe-save=DIR writes")
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise UsageError(f"{file} was written by another version: run the test again with --modelprobe-save")
    return data, tensors


def _text(found: Sequence[Row], data: Mapping[str, Any], source: str, versions: Mapping[str, str]) -> list[str]:
    from pytest_modelprobe.comparison.text import percent

    def worst(side: str) -> str:
        where, change = max(((row.where, getattr(row, side)) for row in found), key=lambda one: one[1].change or 0.0)
        return f"{where} by {percent(change.change)}"

    label = data["label"]
    differs, moved = (any(getattr(row, side).differs for row in found) for side in ("other", "saved"))
    if not (differs or moved):
        first = f"{label} is the same as both sides: another device rounds too much to tell them apart"
    elif not differs:
        looked_at = count(sum(row.other.known for row in found), "value")
        first = f"{label} no longer differs from the other side; {looked_at} looked at"
    elif moved:
        first = f"{label} differs from both: {worst('other')} from the other side, {worst('saved')} from what was saved"
    else:
        first = f"{label} still differs from the other side: {worst('other')}"
    rows = [[row.where, *("same" if one.same else percent(one.change) for one in row[1:])] for row in found]
    then = data["versions"]
    others = [f"{name} {then[name]} → {now}" for name, now in versions.items() if now != then.get(name, now)]
    lines = [first, "", *table(["value", "from what was saved", "from the other side"], rows, most=len(rows)), ""]
    lines.append(f"Saved by {data['test']}, in mode {data['mode']} on {data['device']}")
    if others:
        lines.append(f"Other versions: {', '.join(others)}")
    if source != data["source"]:
        lines.append(
            f"The source of {data['type']} is another one than when this was saved; its attributes are as they were"
        )
    return lines
