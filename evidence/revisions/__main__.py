"""Public models over releases, compared by `--modelprobe-base` and searched by `modelprobe bisect`.

The files of five models of vit-pytorch are taken from three releases, and become the history of a small repository: one
commit for each file that a release changed. The tests of each release run beside the release before. Prints a page of
Markdown. It downloads the releases, and einops, which they import.

    python evidence/revisions > evidence/revisions/RESULTS.md
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

RELEASES = ("0.40.2", "1.2.2", "1.6.0")
SIZE = "image_size=32, patch_size=8, num_classes=10, dim=64, heads=4, mlp_dim=128"
MODELS = {
    "vit": f"ViT({SIZE}, depth=4)",
    "simple_vit": f"SimpleViT({SIZE}, depth=4)",
    "deepvit": f"DeepViT({SIZE}, depth=4)",
    "cait": f"CaiT({SIZE}, depth=3, cls_depth=2)",
    "vit_for_small_dataset": f"ViT({SIZE}, depth=4)",
}
TESTS = """import pytest
from models import {names}

@pytest.mark.parametrize("make", [{makes}], ids={ids})
def test_model(modelprobe, make):
    modelprobe.run(modelprobe.build(make).eval(), modelprobe.randn(4, 3, 32, 32), loss="random")
"""


def run(*command: str, cwd: Path, path: Path | None = None) -> str:
    """Return what a command printed."""
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), *filter(None, [environment.get("PYTHONPATH")])])
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def git(repository: Path, *arguments: str) -> str:
    """Run a command of git."""
    return run("git", "-c", "user.name=history", "-c", "user.email=history@example.com", *arguments, cwd=repository)


def download(folder: Path) -> dict[str, dict[str, str]]:
    """Return the files of the models by release, and install einops into the folder."""
    pip = (sys.executable, "-m", "pip")
    run(*pip, "install", "-q", "--no-deps", "--target", str(folder / "einops"), "einops", cwd=folder)
    found = {}
    for release in RELEASES:
        options = ("download", "-q", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", str(folder))
        said = run(*pip, *options, f"vit-pytorch=={release}", cwd=folder)
        archive = next(folder.glob(f"vit*pytorch-{release}.tar.gz"), None)
        if archive is None:
            raise SystemExit(f"vit-pytorch {release} could not be downloaded: {said}")
        with tarfile.open(archive) as files:
            members = {Path(one.name).stem: one for one in files if Path(one.name).parent.name == "vit_pytorch"}
            found[release] = {name: files.extractfile(members[name]).read().decode() for name in MODELS}  # type: ignore[union-attr]
    return found


def make_history(repository: Path, releases: dict[str, dict[str, str]]) -> None:
    """Commit each file that a release changed, and tag the releases."""
    repository.mkdir()
    git(repository, "init", "-q", "-b", "main")
    (repository / "models").mkdir()
    ids = list(MODELS)
    makes = ", ".join(f"lambda: {name}.{made}" for name, made in MODELS.items())
    (repository / "models" / "__init__.py").touch()
    (repository / "test_models.py").write_text(TESTS.format(names=", ".join(ids), makes=makes, ids=ids))
    for release, files in releases.items():
        for name, text in files.items():
            (repository / "models" / f"{name}.py").write_text(text)
            git(repository, "add", "-A")
            git(repository, "commit", "-q", "-m", f"{name} of {release}")
        git(repository, "tag", release)


def first_line(said: str, name: str) -> str:
    """Return the first line on a model, or of the model with which it changed alike."""
    newest = "unchanged"
    for line, after in itertools.pairwise(said.splitlines()):
        if line.endswith(", run 1:"):
            newest = after
            if f"test_model[{name}]" in line:
                return newest
        elif "changed alike: " in line and f"test_model[{name}]" in line:
            return f"alike: {newest}"
    return "unchanged"


def main() -> None:
    """Print the page."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        releases = download(folder)
        repository, einops = folder / "history", folder / "einops"
        make_history(repository, releases)
        pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider")
        print("# Releases of vit-pytorch beside each other\n\nCommand: `python evidence/revisions`.\n")
        print("| release | model | file | said |\n|---|---|---|---|")
        times = []
        for old, new in itertools.pairwise(RELEASES):
            git(repository, "checkout", "-q", new)
            started = time.perf_counter()
            run(*pytest, cwd=repository, path=einops)
            plain = time.perf_counter() - started
            said = run(*pytest, f"--modelprobe-base={old}", cwd=repository, path=einops)
            times.append((plain, time.perf_counter() - started - plain))
            for name in MODELS:
                changed = "the same" if releases[old][name] == releases[new][name] else "changed"
                print(f"| {old} → {new} | {name} | {changed} | {first_line(said, name)} |")
            counts = re.search(r"^\d+ models?: .*$", said, re.MULTILINE)
            print(f"| {old} → {new} | all | | {counts[0] if counts else said[-300:]} |")
        print("\nBisected over the whole history:\n\n| model | found | runs | first line |\n|---|---|---|---|")
        git(repository, "checkout", "-q", "main")
        for name in MODELS:
            test = f"test_models.py::test_model[{name}]"
            command = (sys.executable, "-m", "pytest_modelprobe", "bisect", RELEASES[0], "--", test)
            said = run(*command, cwd=repository, path=einops)
            subject = re.search(r"history: (.*)\) is the first commit with a change; (\d+) runs", said)
            line = said.partition(", run 1, beside")[2].splitlines()[1:2]
            found = (subject[1], subject[2]) if subject else (said.strip().splitlines()[-1], "")
            print(f"| {name} | {found[0]} | {found[1]} | {''.join(line)} |")
        print("\nSeconds of the tests alone, and with the release before: ", end="")
        print(", ".join(f"{plain:.1f} and {both:.1f} ({both / plain:.1f} x)" for plain, both in times) + ".")


if __name__ == "__main__":
    main()
