"""Mutate snapshots and results, and give them to every command and to pytest: no traceback, no silent pass.

    python evidence/fuzz                              # 50,000 mutations of seed 0
    python evidence/fuzz --count 2000 --seed 7
    python evidence/fuzz --only 1234                  # one of them, with what came of it

Each mutated snapshot is shown, every fifth in all formats, and compared with the original, as ``modelprobe show`` and
``modelprobe diff`` do it, within five seconds of work, a minute of waiting, and 2 GiB. It is to be refused in one line,
or to be a difference, or to mean what the original means: see `meaning` for what that is. Then it takes the place of
the original in a repository, where ``modelprobe check`` or pytest, in turn, is asked too: check and
pytest have to refuse what is refused. Or a file of results is mutated, for ``modelprobe report``.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from commands import Project, as_bytes, place, reported, wrong_refusal
from meaning import Meaning, apart, meaning
from mutations import Bytes, mutated

from pytest_modelprobe import cli
from pytest_modelprobe.files import Texts, decode

cli._parser = functools.cache(cli._parser)  # to make it takes as long as all else
SECONDS, MEMORY = 5.0, 2 << 30


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


class Originals:
    """Snapshots on disk, and what they mean."""

    def __init__(self, texts: dict[str, Texts], folder: Path) -> None:
        self.texts = texts
        # Most of what can be wrong is wrong in a short one too, which takes less time.
        self.weights = [1 / len("".join(filter(None, pair))) for pair in texts.values()]
        self.paths = {name: place(folder / str(i), as_bytes(pair)) for i, (name, pair) in enumerate(texts.items())}
        self.project = Project(texts, folder / "repository")
        self.meanings = {name: meaning(decode(*pair, where=name).record) for name, pair in texts.items()}


FORMS = ("markdown", "json")


def guarded(judge: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """Return what came of a mutation: within the limits, whatever is raised."""
    try:
        with limited():
            return judge()
    except Slow:
        return "too slow", ""
    except MemoryError:
        return "too much memory", ""
    except BaseException:  # noqa: BLE001 - whatever it is, it is what is looked for
        return "a traceback", traceback.format_exc(limit=-4)


def _judged(mutant: Path, before: Meaning, path: Path, forms: Sequence[str]) -> tuple[str, str]:
    code, out, err = asked("show", str(mutant))
    if code:
        return ("a bad message" if wrong_refusal(err) or out else "refused"), err[:2000]
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
    verdict, detail = guarded(lambda: _judged(place(folder, files), before, path, FORMS if number % 5 == 0 else ()))
    if verdict in GOOD:
        command = ("check", "pytest", "report")[number % 3]
        wrong, said = guarded(lambda: asked_beside(command, name, files, verdict == "refused", draw))
        if wrong:
            return Trial(number, f"{name}: {how}, {command}", wrong, said)
    return Trial(number, f"{name}: {how}", verdict, detail)


@functools.cache
def _project(process: int) -> Project:
    return _ORIGINALS.project.copied()


def asked_beside(command: str, name: str, files: Bytes, refused: bool, draw: random.Random) -> tuple[str, str]:
    """Return what is wrong with the answer of a command other than show and diff, and the answer."""
    project = _project(os.getpid())
    if command == "report":
        how, wrong, said = reported(project.results, draw, project.folder.with_name(f"{project.folder.name}-r"), asked)
        return wrong, f"{how}: {said}"
    return project.judged(name, files, refused, command, asked)


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
