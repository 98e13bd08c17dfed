"""Kill updates of snapshots with -9, at any moment, and see that every file is the old or the new one.

    python benchmarks/kills.py                 # 200 runs of pytest, 40 with two workers of xdist, 40 times two at once
    python benchmarks/kills.py 50 10 10

Each run is a fork of this process, which has torch imported already, and dies together with its workers. Old and new
differ in structure and in numbers, so that both files of each snapshot are rewritten, back and forth. Two at once, each
with two workers, write the old and the new into the same files.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import torch  # noqa: F401 - once, for all forks

import pytest_modelprobe.probe
import pytest_modelprobe.snapshot.comparer
import pytest_modelprobe.snapshot.snapshot  # noqa: F401
from pytest_modelprobe import files
from pytest_modelprobe.exceptions import SnapshotError

TEST = """
import os
import pytest
from torch import nn

@pytest.mark.parametrize("n", range(2), ids=["a", "b"])
def test_net(modelprobe, modelprobe_snapshot, n):
    width = 8 if os.environ["SIDE"] == "old" else 12
    model = modelprobe.build(lambda: nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))).eval()
    assert modelprobe.run(model, modelprobe.randn(3, 4), loss="random", isolate=False) == modelprobe_snapshot
"""

ARGUMENTS = ("-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--snapshot-update")


def update(folder: Path, side: str, *arguments: str) -> int:
    """Start an update in a process group of its own."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(folder)
        os.environ["SIDE"] = side
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        os._exit(int(pytest.main([*ARGUMENTS, *arguments])))
    return child


def texts(folder: Path) -> dict[Path, tuple[str, str | None]]:
    found = {}
    for path in sorted(folder.rglob("*.arch.json")):
        pair = files.read_texts(path)
        assert pair is not None
        found[path] = pair.architecture, pair.numbers
    return found


def state_of(path: Path) -> str:
    """Return whether the two files of a snapshot go together; that they do not is to be said by who reads them."""
    try:
        files.read(path)
    except SnapshotError as error:
        if "do not belong together" not in str(error):
            raise
        return "one file new, the other old, and said so"
    return "whole"


def wait_for_writing(folder: Path, child: int) -> None:
    """Wait until a file of a snapshot is written, or the update has ended."""

    def state() -> list[tuple[str, int]]:
        return [(entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(folder / "__modelprobe__" / "test_net")]

    before = state()
    while not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        try:
            if state() != before:
                return
        except FileNotFoundError:  # a file that was there a moment ago
            return
        time.sleep(0.0005)


def kill_loop(folder: Path, times: int, longest: float, at_once: int, *arguments: str) -> Counter[str]:
    """Kill updates, one or more at once, and count in what state they left the snapshots."""
    sides = {}
    for side in ("old", "new"):
        assert os.waitstatus_to_exitcode(os.waitpid(update(folder, side, *arguments), 0)[1]) == 0
        sides[side] = texts(folder)
    assert len(sides["old"]) == 2
    draw, left = random.Random(0), Counter[str]()
    for i in range(times):
        children = [update(folder, ("old", "new")[(i + k) % 2], *arguments) for k in range(at_once)]
        if i % 4:  # right when it writes, else at any moment
            wait_for_writing(folder, children[0])
            time.sleep(draw.uniform(0, 0.01))
        else:
            time.sleep(draw.uniform(0, longest))
        for child in children:
            ended = os.waitpid(child, os.WNOHANG)[0] == child
            if not ended:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
            left["ended by itself" if ended else "killed"] += 1
            time.sleep(draw.uniform(0, 0.01))
        for path, (architecture, numbers) in texts(folder).items():
            olds, news = sides["old"][path], sides["new"][path]
            assert architecture in (olds[0], news[0]), f"{path} is broken"
            assert numbers in (olds[1], news[1]), f"{path} is broken"
            left[state_of(path)] += 1
    assert os.waitstatus_to_exitcode(os.waitpid(update(folder, "old", *arguments), 0)[1]) == 0
    assert texts(folder) == sides["old"], "an update does not put right what a killed one left"
    left["files besides"] = sum(1 for path in folder.rglob(".modelprobe-*") if path.is_file())
    return left


def main(plain: int = 200, workers: int = 40, pairs: int = 40) -> None:
    os.environ.pop("CI", None)
    xdist = ("-n", "2")
    for times, at_once, arguments, longest in ((plain, 1, (), 6.0), (workers, 1, xdist, 20.0), (pairs, 2, xdist, 20.0)):
        if not times:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "test_net.py").write_text(TEST, "utf-8")
            subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
            start = time.monotonic()
            found = kill_loop(folder, times, longest, at_once, *arguments)
            how = " ".join(arguments) or "in one process"
            how += ", two at once" * (at_once > 1)
            print(f"{times} updates {how}: {dict(found)}; {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
