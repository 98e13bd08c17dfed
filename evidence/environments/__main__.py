"""Twelve models compared with their snapshots in other environments: each alarm is a false one.

    python evidence/environments                    # all, and writes RESULTS.md beside this: an hour on two cores
    python evidence/environments -k "gpt2 or rwkv"  # some models, arguments go to pytest; writes nothing

The snapshots are written in the default environment of this machine.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "again": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "AVX-512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "base instructions": {"ATEN_CPU_CAPABILITY": "default"},
    "SSE4 in all libraries": {
        "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
    "no oneDNN": {"ENVIRONMENT": "no oneDNN"},
    "1 threads": {"ENVIRONMENT": "1 threads"},
    "2 threads": {"ENVIRONMENT": "2 threads"},
    "3 threads": {"ENVIRONMENT": "3 threads"},
    "channels_last": {"ENVIRONMENT": "channels_last"},
    "read by torch": {"MODELPROBE_KERNEL": "torch"},
    "deterministic": {"ENVIRONMENT": "deterministic"},
}  # fmt: skip
HEAD = """\
# Models that did not change, in other environments

Command: `tox -e environments`. Machine: {machine}, torch {torch}, {threads} threads, {capability}.

Twelve models × float32, float64, bfloat16 × three losses, of which two are constant, so that their gradients are
rounding alone. The snapshots were written in the default environment. An alarm is a test that fails.

| environment | comparisons | alarms |
|---|---|---|
"""


def pytest_in(folder: Path, variables: dict[str, str], arguments: list[str]) -> str:
    """Run pytest in a process of its own, and return what it printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", *arguments]
    clean = {name: value for name, value in os.environ.items() if name not in ("CI", "ENVIRONMENT")}
    return subprocess.run(
        command, cwd=folder, env={**clean, **variables}, capture_output=True, text=True, check=False
    ).stdout


def alarms(folder: Path, name: str, arguments: list[str]) -> tuple[int, list[str]]:
    """Return the number of comparisons in an environment, and a line for each that failed."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    printed = pytest_in(folder, ENVIRONMENTS[name], [f"--modelprobe-json={result}", *arguments])
    if not result.exists():
        raise SystemExit(printed)
    tests = json.loads(result.read_text())["tests"]
    failed = [line for line in printed.splitlines() if line.startswith("FAILED ")]
    return len(tests), [line.removeprefix("FAILED test_models.py::") for line in failed]


def main() -> None:
    chosen = sys.argv[1:]
    table, listed = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shutil.copy(HERE / "test_models.py", folder)
        (folder / "pytest.ini").write_text("[pytest]\n")
        print(pytest_in(folder, {}, ["--snapshot-update", *chosen]).splitlines()[-1], flush=True)
        for name in ENVIRONMENTS:
            number, failed = alarms(folder, name, chosen)
            table.append(f"| {name} | {number} | {len(failed)} |")
            listed += [f"- {name}: {line}" for line in failed]
            print(table[-1], *listed[len(listed) - len(failed) :], sep="\n", flush=True)
    if not chosen:
        head = HEAD.format(
            machine=platform.machine(), torch=torch.__version__, threads=torch.get_num_threads(),
            capability=torch.backends.cpu.get_cpu_capability(),
        )  # fmt: skip
        (HERE / "RESULTS.md").write_text(head + "\n".join([*table, "", *(listed or ["No alarm."])]) + "\n")
    sys.exit(bool(listed))


if __name__ == "__main__":
    main()
