"""Writes docs/explanation/a-snapshot-from-first-to-merge.md by running every command of it in a scratch repository.

Run it with ``python docs/make_transcript.py`` after a change to what the snapshots say.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

PAGE = Path(__file__).parent / "explanation" / "a-snapshot-from-first-to-merge.md"

MODEL = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 4, batch_first=True)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(4))
        self.head = nn.Linear(32, 100)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""

TEST = """\
from model import Net


def test_net(modelprobe, modelprobe_snapshot):
    model = modelprobe.build(Net).eval()
    ids = modelprobe.randint(0, 100, (2, 12))
    assert modelprobe.run(model, ids, loss="random") == modelprobe_snapshot
"""

UPDATE = "pytest test_net.py --snapshot-update"
CHANGES = [
    (
        "An attribute",
        "Somebody copies a default from another framework.",
        "self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)",
        "self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-4), nn.LayerNorm(width)",
    ),
    (
        "A module's own code",
        "The residual is taken from the wrong place: after the norm, not before it.",
        "x = x + self.attn",
        "x = h + self.attn",
    ),
    (
        "The architecture",
        "The blocks become wider inside.",
        "nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)",
        "nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width)",
    ),
    (
        "The gradient alone",
        "A branch is cut from the graph. The forward is the same to the last bit.",
        "return x + self.fc2(self.act(self.fc1(self.norm2(x))))",
        "return x + self.fc2(self.act(self.fc1(self.norm2(x).detach())))",
    ),
    (
        "The input",
        "The test draws different tokens.",
        "(2, 12))",
        "(2, 12), name=\"tokens\")",
    ),
    (
        "The weights",
        "An initialization is added to the constructor.",
        "self.head = nn.Linear(32, 100)",
        "self.head = nn.Linear(32, 100)\n        nn.init.normal_(self.head.weight, std=0.02)",
    ),
]  # fmt: skip


class Scratch:
    """A repository to try things in, and the page that tells of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.page: list[str] = []
        scripts = Path(sys.executable).parent
        self.environment = {
            **{k: v for k, v in os.environ.items() if k not in ("CI", "GITHUB_ACTIONS", "PYTEST_ADDOPTS")},
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "120",
            "PYTEST_ADDOPTS": "--no-header -p no:randomly -p no:cacheprovider",
            **{f"GIT_{who}_DATE": "2026-01-31T12:00:00" for who in ("AUTHOR", "COMMITTER")},
            **{f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in _PERSON.items()},
        }

    def say(self, text: str) -> None:
        """Write a paragraph."""
        self.page += [textwrap.dedent(text).strip(), ""]

    def run(self, command: str, *, show: bool = True, most: int = 60) -> str:
        """Run a command and show what it prints."""
        done = subprocess.run(
            command, shell=True, cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        lines = [line.rstrip() for line in _tidy(done.stdout)]
        if show:
            cut = [f"... {len(lines) - most} more lines"] if len(lines) > most else []
            self.page += ["```console", f"$ {command}", *lines[:most], *cut, "```", ""]
        return "\n".join(lines)

    def write(self, name: str, text: str) -> None:
        """Write a file."""
        (self.folder / name).write_text(text, "utf-8")


_PERSON = {"NAME": "you", "EMAIL": "you@example.com"}


def _tidy(output: str) -> list[str]:
    """Return what a reader needs of pytest's output: the failure, the section of the probe, the closing line."""
    lines = [re.sub(r" in \d+\.\d+s", "", line) for line in output.splitlines()]
    lines = [line.removeprefix("E       ").removeprefix("E   ") for line in lines]
    boring = ("====", "----", "____", "modelprobe =", "modelprobe_snapshot =", ">   ")
    boring += ("    def ", "        model", "        ids")
    return [line for line in lines if not line.startswith(boring) or "modelprobe ===" in line]


def main() -> None:
    """Make the page."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Scratch(Path(name))
        _tell(scratch)
        page = "\n".join(scratch.page).replace(name, "/project")
    PAGE.write_text(page.rstrip() + "\n", "utf-8")


def _tell(s: Scratch) -> None:
    s.say("""
        # A snapshot, from the first run to a merge

        Made by `docs/make_transcript.py`, which runs every command shown here. The model has four blocks of attention
        and MLP; the test is three lines.
    """)
    s.write("model.py", MODEL)
    s.write("test_net.py", TEST)
    s.page += ["```python", *TEST.rstrip().splitlines(), "```", ""]
    s.run("git init -q -b main && git add . && git commit -qm 'A model and its test'", show=False)
    s.say("## The first run\n\nThere is nothing to compare with yet. The failure shows what would be recorded:")
    s.run("pytest -q test_net.py", most=24)
    s.say("It looks right, so it is recorded and committed. `init` tells git how to treat the files.")
    s.run(UPDATE)
    s.run("modelprobe init")
    s.run("git add -A && git commit -qm 'Record the model' && git ls-files")
    s.say("One of the two files is for people, with one line for each layer:")
    s.run("grep -n norm1 __modelprobe__/test_net/test_net.arch.json", most=4)
    for title, why, old, new in CHANGES:
        s.say(f"## {title}\n\n{why}")
        for file, text in (("model.py", MODEL), ("test_net.py", TEST)):
            if old in text:
                s.write(file, text.replace(old, new))
        s.run("git diff -U0 --no-color -- '*.py' | grep '^[-+] '")
        s.run("pytest -q test_net.py", most=40)
        s.write("model.py", MODEL)
        s.write("test_net.py", TEST)
    _accept(s)
    _merge(s)


def _accept(s: Scratch) -> None:
    s.say("""
        ## Accepting a change

        The wider blocks are wanted. The reason is written into the file, where the reviewer reads it and the gate looks
        for it:
    """)
    _, _, old, new = CHANGES[2]
    s.run("git switch -qc wider", show=False)
    s.write("model.py", MODEL.replace(old, new))
    s.run(f"{UPDATE} --modelprobe-reason='wider MLP for the capacity study'")
    s.run("git diff --stat --no-color")
    s.run("git commit -qam 'Widen the blocks' && modelprobe diff --base main", most=40)
    s.run("modelprobe check --base main")
    s.say("Without a reason the gate denies the change, and says what to do:")
    s.run("git switch -qc undeclared main", show=False)
    s.write("model.py", MODEL.replace(old, new))
    s.run(UPDATE, show=False)
    s.run("git commit -qam 'Widen the blocks, say nothing'", show=False)
    s.run("modelprobe check --base main; echo exit $?", most=30)


def _merge(s: Scratch) -> None:
    s.say("""
        ## Two branches that both changed the model

        One branch widened the blocks, the other changed an epsilon. Each recorded its own change, and neither recorded
        both together. Git is told not to merge the numbers:
    """)
    _, _, old, new = CHANGES[0]
    s.run("git switch -qc epsilon main", show=False)
    s.write("model.py", MODEL.replace(old, new))
    s.run(f"{UPDATE} --modelprobe-reason='epsilon of the reference'", show=False)
    s.run("git commit -qam 'The epsilon of the reference'", show=False)
    s.run("git merge wider")
    s.run("git status --short")
    s.say("The code merges, the snapshot does not. A test that reads the half-merged file says so, and what to do:")
    s.run("pytest -q test_net.py", most=16)
    s.run("git checkout -q --ours -- __modelprobe__ && git status --short")
    merged = MODEL
    for _, _, was, now in (CHANGES[0], CHANGES[2]):
        merged = merged.replace(was, now)
    s.write("model.py", merged)
    s.run(f"{UPDATE} --modelprobe-reason='epsilon of the reference, wider MLP'", most=30)
    s.run("git add -A && git commit -qm 'Merge wider' && pytest -q test_net.py")


if __name__ == "__main__":
    main()
