"""Writes docs/the-gate.md from tests/gate/attacks.py.

Run it with ``python docs/make_gate_page.py`` after a change there.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "the-gate.md"
TABLE = Path(__file__).parents[1] / "tests" / "gate" / "attacks.py"

HEAD = """\
# What the gate promises

Made by `docs/make_gate_page.py` of `tests/gate/attacks.py`, whose verdicts a test compares with those of the gate.

`modelprobe check` reads the snapshot files of two revisions, and nothing else of them: it imports no code of the
repository, runs no model, and asks nobody but git. It tells whether what these files say changed, of which
class the change is, and whether its author gave a reason.

## Who writes what

- **A fork, or whoever opens a pull request,** writes every file of the head: models, tests, snapshots, reasons, ini
  files, and all names. Nothing of it is believed; a name is text in every output.
- **The author of a commit** writes its message, with the line `Modelprobe-Approve`. A reason is the author's own: a
  declaration, not a review.
- **A maintainer** writes the base, the workflow on it, branch protection and `CODEOWNERS`. What the base says is what
  was reviewed.
- **GitHub** writes the event and the merge commit.

## What it promises

- **To who reviews:** a change of what the files say does not pass as none. What is denied without a reason is denied
  whatever else changed, under whatever name the files stand, and a reason is for one change from one base.
- **To who maintains:** reading a file of any content ends: in a verdict or in one sentence, exit code 2. Files are
  asked for their size before they are read, links to snapshots are refused, no name is a command to the runner, a link
  or a column of a table.
- **To who sends a change:** the same files give the same verdict, on every machine and without a GPU; a rename, a
  refactoring with the same numbers and another version's attributes are not told as another behavior.

## What it cannot know

- **Whether the files are true.** That is what the tests are for: require both jobs. A test that was deleted, skipped
  or marked to fail leaves its snapshot as it is, and the gate has nothing to say; `pytest --snapshot-update` deletes
  what no test uses, and that is `removed`.
- **How pytest is called.** `modelprobe_compare` in an ini file, a marker or `compare=` in a test stand in the numbers,
  for a test that compares less than they say fails. `--modelprobe-compare` and `-k` in a workflow do not: protect the
  workflow. Nor does a plugin or a `conftest.py` that replaces the fixture.
- **How far a tolerance reaches.** `tolerance=` and `allow=` stand in the test, not in the files.
- **What an attribute was that is not written any more.** One that only one side has is a note, for versions of
  libraries add and drop them; what it changes shows in the numbers, but not in those of a run that does not use it.
- **Whether a reason is a good one.** It has a word, and is not that of the base. It may be one that was given earlier
  still, or for another file.
- **What lies in a submodule,** or is fetched by Git LFS.
- **What a damaged base said.** Where its numbers cannot be read, the structure alone is compared; where that cannot be
  read either, the snapshot is taken as new, for else none could be repaired. Both is printed.
- **Which levels hold.** `--allow` stands in the workflow.

## Pull requests that were tried
"""


def page(families: dict[str, list[Any]]) -> str:
    """Return the page."""
    parts = [HEAD]
    for family, attacks in families.items():
        parts += [f"### {family}\n", "| the pull request has | verdict | why |", "|---|---|---|"]
        parts += [f"| {attack.what} | {attack.verdict} | {attack.why} |" for attack in attacks]
        parts.append("")
    parts.append("An `error` is exit code 2: the job fails, and no reason helps.")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(runpy.run_path(str(TABLE))["FAMILIES"]), "utf-8")
