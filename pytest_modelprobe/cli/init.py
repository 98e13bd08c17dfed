"""`modelprobe init`: the attributes of snapshots in git, and what else a repository needs."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_modelprobe.files import DIRECTORY
from pytest_modelprobe.gate import Repository

from .common import SAME

GIT_ATTRIBUTES = (
    f"**/{DIRECTORY}/**/*.arch.json text eol=lf",
    f"**/{DIRECTORY}/**/*.probe.json text eol=lf -merge linguist-generated",
)
"""What git has to know: two branches' numbers never mix into a model that nobody ran."""


def run_init(options: argparse.Namespace) -> int:
    """Add the attributes of snapshots to .gitattributes."""
    root = Repository(Path.cwd()).root
    path = root / ".gitattributes"
    there = path.read_bytes().decode("utf-8", "surrogateescape") if path.exists() else ""
    known = {" ".join(line.split()) for line in there.splitlines()}
    missing = [line for line in GIT_ATTRIBUTES if line not in known]
    if missing:
        end = "\r\n" if "\r\n" in there else "\n"
        gap = "" if not there or there.endswith("\n") else end
        added = there + gap + "".join(line + end for line in missing)
        path.write_bytes(added.encode("utf-8", "surrogateescape"))
        print(f"Added to {path}:", *(f"  {line}" for line in missing), sep="\n")
    else:
        print(f"{path} has all that git needs to know.")
    print(_AFTER_INIT)
    return SAME


_AFTER_INIT = f"""
Next, to have every change of an architecture reviewed, a line in .github/CODEOWNERS:
  **/{DIRECTORY}/**/*.arch.json @your-organization/model-owners
and in a workflow of pull requests, after a checkout with fetch-depth: 0:
  modelprobe check --format github --deny behavior"""
