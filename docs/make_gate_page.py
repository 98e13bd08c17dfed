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
asks only git. It says whether the files changed, which [class](../reference/command-line.md#classes) the change has,
and whether its author gave a reason.

## Who writes what

- **Whoever opens a pull request,** also from a fork, writes every file of the head: models, tests, snapshots, reasons,
  ini files, and all names. None of it is trusted. In every output a name is only text.
- **The author of a change** writes its reason, into the `.arch.json`, or into the `.removed.json` of a deleted
  snapshot. A reason is the author's own word, not a review.
- **A maintainer** writes the base, its workflow, branch protection and `CODEOWNERS`. The base was reviewed.
- **GitHub** writes the event and the merge commit.

## What it promises

- **To reviewers:** a change in the files is never reported as no change. Neither other changes nor a renamed file can
  hide an undeclared change. A reason is valid for one change from one base.
- **To maintainers:** whatever a file contains, reading it ends in a verdict, or in one sentence and exit code 2. The
  size of a file is checked before it is read. Links to snapshots are refused. No name becomes a command to the runner,
  a link, or a column of a table.
- **To authors:** the same files give the same verdict, on every machine and without a GPU. Some changes are not
  reported as changed behavior: a rename, a refactoring with the same numbers, calls that are written differently, and
  attributes that only one version of a library has.

## What it compares with

A reviewer asks what a merge would change in the base. If a file equals its version in the merge base, a merge keeps the
base's version. So `check` compares with the merge base, and does not report what changed only in the base.

Two branches that were merged into each other have several merge bases. Then a file may equal its version in one merge
base, and still undo a reviewed change that is in another: compared with the first, nothing differs. So `check` compares
with the base itself. A merge keeps what both sides have, so whatever a merge changes differs from the base. What
changed only in the base is reported too, until the base is merged into the branch. After that, the base is the only
merge base.

In a shallow clone the merge base may be missing, and git names an older commit instead. That is an error, unless the
base is an ancestor of what is checked out.

Files that a sparse checkout leaves out are read from the index. Objects that `git replace` replaced are read as they
were. A folder of the tree that looks like a repository is not used as one.

## What it cannot know

- **Whether the files are true.** The tests say that, so require both jobs. A test that was deleted, skipped or marked
  to fail leaves its snapshot as it is, and the gate reports nothing. pytest fails if no test uses a snapshot any more;
  `pytest --snapshot-update` deletes it, and that is `removed`. But it passes a test that is skipped before it compares,
  or marked to fail: neither says whether the model is the same, and both are ordinary. Review them.
- **How pytest is called.** What a test compares can be limited by `compare=`, by a marker, or by `modelprobe_compare`
  in an ini file. A limit has to be recorded beside the numbers: a test that compares less than the snapshot says fails.
  So does a test that compares nothing, such as the behavior of a structure without numbers. A test that catches the
  failure of a snapshot, or skips itself for it, fails the run. So does a comparison that nobody looks at, with `==` or
  with `!=`. What says that a process is a rank is believed of its process group alone, and each rank compares. No `-p`
  takes away a part of the plugin. In CI an update writes, and unused files are let be, only if the command line itself
  allows it; pytest's last line and the results count what was written or left out. But `--modelprobe-compare` and `-k`
  in a workflow are recorded in no file, so protect the workflow. A plugin or a `conftest.py` that replaces the fixture
  is not recorded either.
- **What a test expects.** `assert record != modelprobe_snapshot` and `pytest.raises` around a comparison say that the
  record is to differ, and then a difference is no failure. Tests of tests need that. It is in the test, so review it.
- **How wide a tolerance is.** `tolerance=` and `allow=` are in the test, not in the files.
- **The value of an attribute that is no longer written.** If only one side has an attribute, that is a note, because
  versions of libraries add and drop attributes. The verdict names it. A test fails if the file lacks what a class of
  torch's own is given, such as `eps`, and the same version of torch wrote the file, or none is recorded. Of another
  class, or another version, the numbers show it if it changes what the run computes: not the rate of a dropout in
  evaluation mode, for example.
- **What a layer does alone, if its arguments were renamed.** It is then called with different synthetic tensors, so its
  answers in the two files cannot be compared. The verdict counts these layers. Their code is judged by the values of
  the run; if zeros may hide it there, that is `behavior`. `--deny interface` denies `calls` too.
- **The defaults of arguments.** An argument that is newly given is `structure`, unless it is `None` or `False`.
- **Whether a reason is a good one.** A reason has to contain a word, and differ from the reason in the base. It may
  repeat an earlier reason, or that of another file.
- **What is in a submodule,** or is fetched by Git LFS.
- **What a damaged base contained.** If its numbers cannot be read, only the structure is compared. If that cannot be
  read either, the snapshot counts as new, because otherwise no change could repair it. In both cases a message says so.
- **Which levels apply.** `--deny` and `--allow` are in the workflow. By default a change of behavior is a warning that
  the verdict counts. The sample workflow denies it.

## Pull requests that were tried
"""

TAIL = """\
The column `check` has what `modelprobe check --base main` says about the worst change. `denied` and `error` fail the
job. An `error` is exit code 2, and a reason does not help. A `warning` is shown to reviewers. The column `pytest` says
whether the tests of the pull request pass with `CI` set. Both jobs are required, so it is enough if one of them fails.
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
