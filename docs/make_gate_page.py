"""Writes docs/explanation/the-gate.md from tests/gate/attacks.py.

Run it with ``python docs/make_gate_page.py`` after a change there.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "explanation" / "the-gate.md"
TABLE = Path(__file__).parents[1] / "tests" / "gate" / "attacks.py"

HEAD = """\
# What the gate promises

Made by `docs/make_gate_page.py` from `tests/gate/attacks.py`. A test compares the verdicts with those of the gate.

`modelprobe check` reads the snapshot files of two revisions. It imports no code of the repository, runs no model, and
asks only git. It says whether the files changed, of which [class](../reference/command-line.md#classes) the change is,
and whether its author gave a reason.

## Who writes what

- **Whoever opens a pull request,** a fork too, writes every file of the head: models, tests, snapshots, reasons, ini
  files, and all names. None of it is trusted; a name is text in every output.
- **The author of a change** writes its reason, into the `.arch.json` or the `.removed.json` of a deleted snapshot. A
  reason is the author's own word, not a review.
- **A maintainer** writes the base, its workflow, branch protection and `CODEOWNERS`. The base was reviewed.
- **GitHub** writes the event and the merge commit.

## What it promises

- **To reviewers:** a change in the files is never reported as no change. What is denied without a reason is denied
  whatever else changed, and under whatever name the files stand. A reason is for one change from one base.
- **To maintainers:** reading a file of any content ends in a verdict, or in one sentence and exit code 2. The size of a
  file is asked for before it is read. Links to snapshots are refused. No name is a command to the runner, a link or a
  column of a table.
- **To authors:** the same files give the same verdict, on every machine and without a GPU. A rename, a refactoring with
  the same numbers, calls that are written otherwise and the attributes of another version are not reported as changed
  behavior.

## What it compares with

A reviewer asks what a merge would change in the base. A file that equals that of the merge base is left by a merge as
the base has it, so `check` compares with the merge base, and does not report what changed in the base alone.

Two branches that were merged into each other have several merge bases. A file may equal that of one and be put back to
it: the merge of the others' reviewed change is undone, and nothing differs from the one. `check` then compares with the
base itself. A merge leaves what both sides have, so whatever it changes differs there. What changed in the base alone
is reported too, until it is merged into the branch; then the base is the one merge base.

In a shallow clone the merge base may be behind the cut, and an older commit stands in its place: that is an error,
unless the base is an ancestor of what is checked out.

What a sparse checkout leaves out is read from the index. Replaced objects are read as they were, and a folder of the
tree that is made like a repository is not taken for one.

## What it cannot know

- **Whether the files are true.** The tests say that: require both jobs. A test that was deleted, skipped or marked to
  fail leaves its snapshot as it is, and the gate reports nothing. `pytest --snapshot-update` deletes snapshots that no
  test uses; that is `removed`.
- **How pytest is called.** `modelprobe_compare` in an ini file, a marker or `compare=` in a test stand beside the
  numbers: a test that compares less than they say fails, and so does one that compares nothing, such as the behavior of
  a structure without numbers. A test that catches the failure of a snapshot fails the run. In CI an update writes only
  if the command line itself allows it; the last line of pytest and the results count what was written or left out.
  `--modelprobe-compare` and `-k` in a workflow stand in no file: protect the workflow. Nor does a plugin or a
  `conftest.py` that replaces the fixture.
- **How wide a tolerance is.** `tolerance=` and `allow=` stand in the test, not in the files.
- **The value of an attribute that is no longer written.** If only one side has an attribute, that is a note, because
  versions of libraries add and drop them. What it changes shows in the numbers of a run that uses it.
- **What a layer does alone, if its arguments have other names now.** It is then given other tensors, alone, so its
  answers in the two files cannot be compared: the verdict counts these layers. Their code is judged by the values of
  the run; where these may hide it, behind zeros, that is `behavior`. `--deny interface` denies `calls` too.
- **The defaults of arguments.** An argument that is given now is `structure`, unless it is `None` or `False`.
- **Whether a reason is a good one.** It has a word, and differs from that of the base. It may repeat an earlier one, or
  that of another file.
- **What is in a submodule,** or is fetched by Git LFS.
- **What a damaged base contained.** If its numbers cannot be read, the structure alone is compared. If that cannot be
  read either, the snapshot counts as new, because otherwise no change could repair it. Both are printed.
- **Which levels apply.** `--allow` stands in the workflow.

## Pull requests that were tried
"""

TAIL = """\
`check` is what `modelprobe check --base main` says of the worst change: `denied` and `error` fail the job. An `error`
is exit code 2, and no reason helps. `pytest` is whether the tests of the pull request pass with `CI` set. A job of each
is required, so one that fails is enough; a `warning` is shown to reviewers.
"""


def page(families: dict[str, list[Any]]) -> str:
    """Return the page."""
    parts = [HEAD]
    for family, attacks in families.items():
        parts += [f"### {family}\n", "| the pull request has | `check` | pytest | why |", "|---|---|---|---|"]
        parts += [f"| {attack.what} | {attack.check} | {attack.pytest} | {attack.why} |" for attack in attacks]
        parts.append("")
    parts.append(TAIL)
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(runpy.run_path(str(TABLE))["FAMILIES"]), "utf-8")
