"""Mutate snapshots, show each and compare it with the original: no traceback, no other meaning that goes unseen.

    python benchmarks/fuzz                              # 50,000 mutations of seed 0
    python benchmarks/fuzz --count 2000 --seed 7
    python benchmarks/fuzz --only 1234                  # one of them, with what came of it

Each mutated snapshot is shown, every fifth in all formats, and compared with the original, as ``modelprobe show`` and
``modelprobe diff`` do it, within five seconds of work, a minute of waiting, and 2 GiB. It is to be refused in one line,
or to be a difference, or to mean what the original means: see `meaning` for what that is.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from meaning import Meaning, apart, meaning
from mutations import Bytes, mutated

from pytest_modelprobe import cli
from pytest_modelprobe.files import Texts, decode

cli._parser = functools.cache(cli._parser)  # to make it takes as long as all else
SECONDS, MEMORY = 5.0, 2 << 30
LONGEST = 1000  # signs of a refusal


class Trial(NamedTuple):
    """What came of a mutation."""

    number: int
    how: str
    verdict: str
    """``refused``, ``a difference``, ``the same``, or what is wrong."""
    detail: str = ""


GOOD = ("refused", "a difference", "the same")


class Slow(BaseException):
    """It takes too long."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Slow

    for what, number, seconds in (
        (signal.SIGPROF, signal.ITIMER_PROF, SECONDS),
        (signal.SIGALRM, signal.ITIMER_REAL, 60),
    ):
        signal.signal(what, stop)
        signal.setitimer(number, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def asked(*arguments: str) -> tuple[int, str, str]:
    """Return the exit code and the output of the command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(list(arguments))
    return code, out.getvalue(), err.getvalue()


def place(folder: Path, files: Bytes) -> Path:
    """Write the files of a snapshot into a folder, and return the name of both."""
    there = folder / "__modelprobe__" / "test_net"
    there.mkdir(parents=True, exist_ok=True)
    for ending, data in zip((".arch.json", ".probe.json"), files, strict=True):
        path = there / f"test_net{ending}"
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
    return there / "test_net"


class Originals:
    """Snapshots on disk, and what they mean."""

    def __init__(self, texts: dict[str, Texts], folder: Path) -> None:
        self.texts = texts
        # Most of what can be wrong is wrong in a short one too, which takes less time.
        self.weights = [1 / len("".join(filter(None, pair))) for pair in texts.values()]
        self.paths = {
            name: place(folder / str(i), tuple(one and one.encode() for one in pair))  # type: ignore[arg-type]
            for i, (name, pair) in enumerate(texts.items())
        }
        self.meanings = {name: meaning(decode(*pair, where=name).record) for name, pair in texts.items()}


def judged(files: Bytes, before: Meaning, path: Path, folder: Path, *, forms: bool = True) -> tuple[str, str]:
    """Return what comes of a mutated snapshot beside the original at a path."""
    mutant = place(folder, files)
    try:
        with limited():
            return _judged(mutant, before, path, ("markdown", "json") if forms else ())
    except Slow:
        return "too slow", ""
    except MemoryError:
        return "too much memory", ""
    except BaseException:  # noqa: BLE001 - whatever it is, it is what is looked for
        return "a traceback", traceback.format_exc(limit=-4)


def _judged(mutant: Path, before: Meaning, path: Path, forms: Sequence[str]) -> tuple[str, str]:
    code, out, err = asked("show", str(mutant))
    if code:
        line = err.strip()
        unfit = "\n" in line or not line.isprintable() or len(line) > LONGEST or not line.startswith("modelprobe: ")
        return ("a bad message" if unfit or out else "refused"), line[:2000]
    if not all(c.isprintable() or c == "\n" for c in out):
        return "shows what moves a cursor", ""
    for form in forms:
        if asked("show", str(mutant), "--format", form)[0]:
            return "formats disagree", form
    code, out, err = asked("diff", str(path), str(mutant))
    if code == 1:
        return "a difference", out
    if code:
        return "shown, and cannot be compared", err
    texts = [file.read_text("utf-8") if file.exists() else None for file in _files(mutant)]
    found = apart(meaning(decode(*texts, where="mutant").record), before)  # type: ignore[arg-type]
    return ("another meaning", "\n".join(found[:5])) if found else ("the same", "")


def _files(path: Path) -> list[Path]:
    return [path.with_name(path.name + ending) for ending in (".arch.json", ".probe.json")]


_ORIGINALS: Originals


def trial(task: tuple[int, int]) -> Trial:
    seed, number = task
    draw = random.Random(f"{seed} {number}")
    name = draw.choices(list(_ORIGINALS.texts), _ORIGINALS.weights)[0]
    how, files = mutated(_ORIGINALS.texts[name], draw)
    folder = Path(tempfile.gettempdir(), f"modelprobe-fuzz-{os.getpid()}")
    before, path = _ORIGINALS.meanings[name], _ORIGINALS.paths[name]
    verdict, detail = judged(files, before, path, folder, forms=number % 5 == 0)
    return Trial(number, f"{name}: {how}", verdict, detail)


def bounded() -> None:
    """Give this process no more memory than a snapshot may take."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def run(numbers: range, seed: int, jobs: int) -> Iterator[Trial]:
    tasks = ((seed, number) for number in numbers)
    if jobs == 1:
        yield from map(trial, tasks)
        return
    with multiprocessing.get_context("fork").Pool(jobs, bounded) as pool:
        yield from pool.imap_unordered(trial, tasks, chunksize=50)


def main() -> int:
    global _ORIGINALS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", type=int, help="the number of one mutation")
    options = parser.parse_args()
    from originals import originals

    start = time.monotonic()
    verdicts: Counter[str] = Counter()
    bad: list[Trial] = []
    with tempfile.TemporaryDirectory() as name:
        _ORIGINALS = Originals(originals(), Path(name))
        numbers = range(options.count) if options.only is None else range(options.only, options.only + 1)
        for found in run(numbers, options.seed, options.jobs if options.only is None else 1):
            verdicts[found.verdict] += 1
            if found.verdict not in GOOD or options.only is not None:
                bad.append(found)
                print(f"{found.number} {found.how}\n  {found.verdict}: {found.detail}", flush=True)
            if sum(verdicts.values()) % 5_000 == 0:
                print(
                    f"... {sum(verdicts.values()):,} in {time.monotonic() - start:.0f} s: {dict(verdicts)}", flush=True
                )
    for how, times in verdicts.most_common():
        print(f"{times:7,} {how}")
    print(f"{sum(verdicts.values()):,} mutations of seed {options.seed} in {time.monotonic() - start:.0f} s")
    return int(any(one.verdict not in GOOD for one in bad))


if __name__ == "__main__":
    sys.exit(main())
