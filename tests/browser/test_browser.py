"""A report in Chromium: `check.mjs` opens it, uses it, and has axe-core look for faults of accessibility.

Skipped without Chromium, Node.js, and the packages of npm in the folder that MODELPROBE_NODE_MODULES names.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from pytest_modelprobe.record import LayerProfile
from pytest_modelprobe.report.html import render
from pytest_modelprobe.report.results import Base, StepResult, UnitCounts

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NODE = shutil.which("node")
PACKAGES = os.environ.get("MODELPROBE_NODE_MODULES")

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and NODE and PACKAGES), reason="needs Chromium, Node.js and MODELPROBE_NODE_MODULES"
)

HERE = Path(__file__).parent

BASE = Base(ref="main", commit="0" * 40, python=None, said="2 models", verdicts={"unchanged": 1, "changed": 1})

PROFILE = LayerProfile(type="Linear", wall_time=0.25, flops=1_000_000, activation_bytes=4096)

FAILURE = "\n".join(
    ["    a line of the test"] * 90 + ["E   head is dead " * 20, "E   layer     zeros" + "   more" * 30]
)


def test_a_report_works_in_a_browser(tmp_path: Path) -> None:
    made = runpy.run_path(str(HERE.parent / "report" / "html" / "test_page.py"))
    layer, run, checked, snapshot, cause = (made[k] for k in ("layer", "run", "checked", "snapshot", "cause"))
    layers = [layer("conv"), layer("block.fc", status=("own code",)), layer("block", leaf=False, parameters=0)]
    layers += [layer("head", status=("moved",), attention=(0.1, 0.95))]
    layers += [layer(name, status=(word,)) for name, word in other_statuses()]
    layers += [
        layer(
            f"encoder.layers.{i}.attention.self.output", units=UnitCounts(count=8, dead=0, saturated=1), profile=PROFILE
        )
        for i in range(99)
    ]
    broken = snapshot(cause("block.fc: own code changed"), text="block.fc\n\nIntended? pytest t.py --snapshot-update")
    taken = tuple(StepResult(step=n, update_ratios={"conv": 10.0**-n, "head": 0.01, "gone": 0.0}) for n in range(3))
    tests = [
        checked(
            "test_a",
            run(*layers, steps=taken, findings=("dead: fc",), hints=("the same",)),
            outcome="failed",
            message="AssertionError: head is dead",
            snapshots=(broken,),
            failure=FAILURE,
        ),
        checked("test_b"),
    ]
    tests += [checked(name, run(layer(name))) for name in made["HOSTILE"]]
    tests += [checked("test_c", run(layer("folded.fc")))]
    report = tmp_path / "report.html"
    report.write_text(render(made["results"](*tests, base=BASE)), "utf-8")
    pictures = Path(os.environ.get("MODELPROBE_PICTURES", tmp_path))
    command = [NODE, HERE / "check.mjs", CHROMIUM, PACKAGES, report, pictures]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def other_statuses() -> list[tuple[str, str]]:
    words = ["structure", "weights", "nonfinite", "dead", "saturated", "no gradient", "not called"]
    return [(f"other.{i}", word) for i, word in enumerate(words)]
