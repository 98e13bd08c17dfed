"""Kill updates of snapshots with -9, at any moment, and see that every file is the old or the new one.

    python evidence/kills.py                 # 200 kills of pytest, 40 with two workers of xdist, 40 with two at once
    python evidence/kills.py 50 10 10

What ended before it was killed is not counted among them.

Each run is a fork of this process, which has torch imported already, and so is each of its workers: to import torch
takes longer than all that an update does. They die together. Old and new differ in structure and in numbers, so that
both files of each snapshot are rewritten, back and forth. Two at once, each with two workers, write the old and the new
into the same files.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import syrupy  # noqa: F401 - all once, for all forks
import torch  # noqa: F401
import xdist.plugin  # noqa: F401

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

PLUGINS = ("xdist", "syrupy", "pytest_modelprobe.plugin")
"""No others are loaded: that takes as long as the update itself."""

ARGUMENTS = ("-q", *(f"-p{name}" for name in PLUGINS), "-p", "no:cacheprovider", "--assert=plain", "--snapshot-update")


INTERPRETER = """#!{python} -IS
import json, os, socket
with socket.socket(socket.AF_UNIX) as there:
    there.connect({address!r})
    asked = os.getpgrp(), os.getcwd(), dict(os.environ)
    socket.send_fds(there, [json.dumps(asked).encode()], [0, 1])
    there.recv(1)  # it has ended
"""
"""What xdist starts as the interpreter of a worker: it hands on what it reads and writes, and waits."""


@contextlib.contextmanager
def forked_workers(folder: Path) -> Iterator[Path]:
    """Fork a worker of this process, which has torch, wherever xdist starts the interpreter that is yielded."""
    interpreter, address = folder / "interpreter", str(folder / "socket")
    interpreter.write_text(INTERPRETER.format(python=sys.executable, address=address), "utf-8")
    interpreter.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as asked:
        asked.bind(address)
        asked.listen(64)
        server = os.fork()
        if server == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            while True:
                connection = asked.accept()[0]
                if os.fork() == 0:
                    _work(connection)
                connection.close()
    try:
        yield interpreter
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def _work(connection: socket.socket) -> None:
    """Be the worker that is asked for, and die with those that asked for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        message, received, *_ = socket.recv_fds(connection, 1 << 20, 2)
        if not message:  # killed before it had asked
            return
        group, folder, environment = json.loads(message)
        os.setpgid(0, group)
        os.chdir(folder)
        os.environ.update(environment)
        for descriptor, place in zip(received, (0, 1), strict=True):
            os.dup2(descriptor, place)
            os.close(descriptor)
        exec(eval(sys.stdin.readline()), {"__name__": "__main__"})  # as xdist begins it
    except BrokenPipeError:  # who started it was killed
        pass
    except BaseException:  # noqa: BLE001 - no fork goes on as the server
        traceback.print_exc()
    finally:
        os._exit(0)


def update(folder: Path, side: str, *arguments: str) -> int:
    """Start an update in a process group of its own."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.chdir(folder)
        os.environ["SIDE"] = side
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        os._exit(int(pytest.main([*ARGUMENTS, *arguments])))
    with contextlib.suppress(OSError):  # here too: it may be killed before it gets there
        os.setpgid(child, child)
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


def kill_loop(folder: Path, times: int, at_once: int, *arguments: str) -> Counter[str]:
    """Kill updates, one or more at once, and count in what state they left the snapshots."""
    sides = {}
    for side in ("old", "new", "old", "new"):  # the first imports more than those after it
        start = time.monotonic()
        assert os.waitstatus_to_exitcode(os.waitpid(update(folder, side, *arguments), 0)[1]) == 0
        longest = time.monotonic() - start
        sides[side] = texts(folder)
    assert len(sides["old"]) == 2
    draw, left = random.Random(0), Counter[str]()
    for i in itertools.count():
        if left["killed"] >= times:
            break
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
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    gc.freeze()  # what is there already, no fork looks through
    for times, at_once, shared in ((plain, 1, False), (workers, 1, True), (pairs, 2, True)):
        if not times:
            continue
        with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as other:
            folder = Path(name)
            (folder / "test_net.py").write_text(TEST, "utf-8")
            subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
            with forked_workers(Path(other)) as interpreter:
                spread = ("-d", "--tx", f"2*popen//python={interpreter}") if shared else ()
                start = time.monotonic()
                found = kill_loop(folder, times, at_once, *spread)
            how = "with two workers" if shared else "in one process"
            how += ", two at once" * (at_once > 1)
            print(f"{times} kills of updates {how}: {dict(found)}; {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
