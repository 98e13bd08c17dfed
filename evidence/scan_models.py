"""What `modelprobe scan` says of models of transformers and timm, each named on the command line, without a file.

    python evidence/scan_models.py                         # all; writes SCAN.md and SCAN.json beside this file
    python evidence/scan_models.py timm.models:resnet10t   # some; keeps what was known of the others

Each model is made of its default configuration with random weights. The inputs are guessed. A
finding or a broken check is true if `TRUE` says why; one without a reason is untrue until somebody looked at it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import platform
import re
import signal
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

from pytest_modelprobe import cli
from pytest_modelprobe.checks import STANDARD
from pytest_modelprobe.extras.scan.scanning import ScannedModel
from pytest_modelprobe.text import count

RESULTS = Path(__file__).with_name("SCAN.md")

TRANSFORMERS = [
    "ResNetModel", "MobileNetV1Model", "MobileNetV2Model", "MobileViTModel", "SegformerModel", "PvtModel", "CvtModel",
    "LevitModel", "PoolFormerModel", "ConvNextModel", "SwinModel", "ViTModel", "ElectraModel", "DistilBertModel",
    "BertModel", "GPT2Model", "T5Model", "WhisperModel", "Wav2Vec2Model", "CLIPModel",
]  # fmt: skip
TIMM = [
    "lcnet_035", "tinynet_e", "mobilenetv3_small_050", "ghostnet_050", "resnet10t", "efficientvit_m0", "mnasnet_small",
    "mobilevitv2_050", "edgenext_xx_small", "convnext_atto", "starnet_s050", "levit_128s", "xcit_nano_12_p16_224",
    "vit_tiny_patch16_224", "regnetx_002", "repghostnet_050", "test_nfnet", "test_mambaout", "test_byobnet",
    "pvt_v2_b0",
]  # fmt: skip
NAMES = [*(f"transformers:{name}" for name in TRANSFORMERS), *(f"timm.models:{name}" for name in TIMM)]

TRUE: dict[tuple[str, str], str] = {
    (
        "Wav2Vec2",
        "never called",
    ): "it is made in training mode, where its LayerDrop leaves out layers",
}
"""Model and check, or a part of a finding → why it is true."""


class OutOfTimeError(BaseException):
    """A scan took longer than it may."""


def scanned(name: str, seconds: int) -> dict[str, Any]:
    """Return what the command printed of a model, taken apart."""
    out, err = io.StringIO(), io.StringIO()
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        with contextlib.ExitStack() as stack:
            if not seconds:
                stack.enter_context(mock.patch.object(ScannedModel, "outcomes", return_value=()))
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            code = cli.main(["scan", name])
    except OutOfTimeError:
        return {**_parts(out.getvalue()), "error": f"ended after {seconds} s of the processor"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {**_parts(out.getvalue()), "error": "" if code < 2 else err.getvalue().strip().splitlines()[-1]}


def _stop(number: int, frame: object) -> None:
    raise OutOfTimeError


def _parts(text: str) -> dict[str, Any]:
    inputs = re.search(r"^Inputs: (.*?)(?: \(guessed.*)?$", text, re.MULTILINE)
    model = re.search(r"^(\S+: .*layers?, .*)$", text, re.MULTILINE)
    findings = text.partition("\nFindings:\n")[2].partition("\n\n")[0]
    table = text.partition("\nChecks:")[2]
    checks = re.findall(r"^  (\w+) +(holds|hint|broken|not applicable) +(.*)$", table, re.MULTILINE)
    return {
        "model": model[1] if model else "",
        "inputs": inputs[1] if inputs else "",
        "findings": [line.strip() for line in findings.splitlines() if line.strip()],
        "checks": {check: [verdict, said] for check, verdict, said in checks},
    }


def report(known: dict[str, dict[str, Any]]) -> str:
    """Return the page."""
    found = {name: known[name] for name in NAMES if name in known}
    broken = [(name, check, said) for name, one in found.items() for check, (v, said) in one["checks"].items()
              if v == "broken"]  # fmt: skip
    broken += [(name, "finding", line) for name, one in found.items() for line in one["findings"]]
    guessed, findings = sum(bool(one["inputs"]) for one in found.values()), sum(c == "finding" for _, c, _ in broken)
    whole = sum(len(one["checks"]) == len(STANDARD) for one in found.values())
    ended = sum(one["error"].startswith("ended") for one in found.values())
    explained = sum(bool(_why(*one)) for one in broken)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "timm"))
    lines = [
        "# Scans of models by name",
        "",
        "Command: `python evidence/scan_models.py` runs `modelprobe scan NAME` on each model, without a file:",
        f"default configuration, random weights, inputs guessed. {versions}, {platform.machine()}.",
        "",
        f"{len(found)} models; {guessed} run on the inputs that were guessed, with {count(findings, 'finding')}.",
        f"{whole} scans ran all {len(STANDARD)} checks, {ended} were ended by a limit of this benchmark (`--seconds`),",
        "and of the others only the table and the findings were asked for (`--seconds 0`). Findings and broken checks:",
        f"{len(broken)}, of which {explained} explained below as true.",
        "",
        "| model | inputs | layers | findings | checks | hold | not applicable | hints | broken |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        verdicts = [verdict for verdict, _ in one["checks"].values()]
        counts = [verdicts.count(verdict) for verdict in ("holds", "not applicable", "hint", "broken")]
        layers = (re.search(r"([\d,]+) layers?", one["model"]) or ["", ""])[1]
        ran = [len(verdicts), *counts] if verdicts or one["error"] else ["-"] * 5
        numbers = " | ".join(map(str, [len(one["findings"]), *ran]))
        lines.append(f"| `{name}` | {one['inputs'] or one['error']} | {layers} | {numbers} |")
    if broken:
        lines += ["", "| model | check | what it says | why that is true |", "|---|---|---|---|"]
    lines += [f"| `{n}` | `{c}` | {s.replace('|', chr(92) + '|')} | {_why(n, c, s)} |" for n, c, s in broken]
    return "\n".join(lines) + "\n"


def _why(name: str, check: str, said: str) -> str:
    return next((why for (model, what), why in TRUE.items() if model in name and (what == check or what in said)), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MODULE:NAME", help="all by default")
    parser.add_argument("--seconds", type=int, default=600, help="of the processor; 0: no checks")
    parser.add_argument("--page", action="store_true", help="only write the page again")
    options = parser.parse_args()
    path = RESULTS.with_suffix(".json")
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, _stop)
    for name in [] if options.page else options.names or NAMES:
        one = scanned(name, options.seconds)
        known = json.loads(path.read_text("utf-8")) if path.exists() else {}
        known[name] = one
        path.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
        RESULTS.write_text(report(known), "utf-8")
        print(name, one["inputs"], one["error"], flush=True)
    RESULTS.write_text(report(json.loads(path.read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main()
