"""Whether a port of a model of transformers is compared with it rightly: no alarm, or the pair with the error.

    python evidence/ports                  # all, and writes RESULTS.md beside this
    python evidence/ports --seeds 1        # with one drawing of the weights

Each port is a rewrite in other words with the weights of its reference (`models.py`), or timm's own model, which is
skipped where timm is not installed. An error is planted in the second of three blocks, or at the ends of the model.
`assert_same_behavior(..., pair="structure")` is asked, without a rename. *Right* means that the first line names the
layer of the port and its partner in the reference, or, of an error in the model's own code, the model and the first
layer that it passes something else to; *half*, that it names one of the two; *other*, that it names another pair;
*missed*, that there is no failure. Without a class token each sequence is one shorter, so that layers of the blocks
have no partner: the line names the model, and the table below it says which layers have none.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import models
import transformers
from torch import nn

from pytest_modelprobe import ModelProbe, assert_same_behavior

RESULTS = Path(__file__).with_name("RESULTS.md")
transformers.logging.set_verbosity_error()


class Port(NamedTuple):
    """A reference, its port, and the pair at which each error is."""

    reference: Callable[[], nn.Module]
    port: Callable[[Any, str], nn.Module]
    errors: dict[str, tuple[str, str]]
    needs: str = "transformers"
    """The library without which it is skipped."""

    @property
    def skipped(self) -> bool:
        return importlib.util.find_spec(self.needs) is None


def _of(mine: str, theirs: str, errors: str) -> dict[str, tuple[str, str]]:
    return {error.strip(): (mine, theirs) for error in errors.split(",")}


_GPT = {
    **_of("blocks.1.attn", "transformer.h.1.attn", "qkv order, scale, mask, heads"),
    **_of("blocks.1", "transformer.h.1", "post-norm, residual"),
    "eps": ("blocks.1.ln_1", "transformer.h.1.ln_1"),
    "gelu": ("blocks.1.mlp.gelu", "transformer.h.1.mlp.act"),
    "position": ("(root)", "pos"),
    "no last norm": ("(root)", "head"),
    "untied": ("head", "lm_head"),
}
_VIT = {
    **_of("blocks.1.attn", "vit.layers.1.attention", "qkv order, scale"),
    "post-norm": ("blocks.1", "vit.layers.1"),
    "eps": ("blocks.1.norm1", "vit.layers.1.layernorm_before"),
    "gelu": ("blocks.1.mlp.act", "vit.layers.1.mlp.activation_fn"),
    "position": ("(root)", "blocks.0.norm1"),
    "pooling": ("(root)", "head"),
}
_LLAMA = {
    **_of("layers.1.attention", "model.layers.1.self_attn", "rope, rope base, position, kv heads, scale, mask"),
    **_of("layers.1.feed_forward", "model.layers.1.mlp", "gate order, gelu"),
    "eps": ("layers.1.attention_norm", "model.layers.1.input_layernorm"),
}
_BERT = {
    **_of("blocks.1.attn", "encoder.layer.1.attention.self", "qkv order, scale"),
    "pre-norm": ("blocks.1", "encoder.layer.1"),
    "eps": ("blocks.1.norm1", "encoder.layer.1.attention.output.LayerNorm"),
    "gelu": ("blocks.1.mlp.act", "encoder.layer.1.intermediate.intermediate_act_fn"),
    "position": ("(root)", "places"),
    "kinds": ("(root)", "kinds"),
}
_TIMM = {
    **_of("blocks.1.attn", "vit.layers.1.attention", "q and k, qkv order, scale, bias"),
    "eps": _VIT["eps"],
    "gelu": _VIT["gelu"],
    "class token": ("(root)", "blocks.0.norm1"),
    "no class token": ("(root)", "blocks.0.norm1"),
    "position": ("(root)", "blocks.0.norm1"),
    "patch": ("patch_embed.proj", "vit.embeddings.patch_embeddings.projection"),
    "pooling": ("(root)", "head"),
}
PORTS = {
    "GPT-2, linear layers": Port(models.gpt2, models.nano_gpt, _GPT),
    "ViT, fused": Port(models.vit, models.fused_vit, _VIT),
    "Llama, fused": Port(models.llama, models.fused_llama, _LLAMA),
    "Llama, fused, pairs of neighbors rotated": Port(models.llama, models.llama_of_neighbors, _LLAMA),
    "BERT, fused": Port(models.bert, models.fused_bert, _BERT),
    "ViT of timm": Port(models.vit, models.timm_vit, _TIMM, needs="timm"),
}


class Trial(NamedTuple):
    """What was said of one port with one error."""

    port: str
    error: str
    seed: int
    verdict: str
    said: str


def trials(seeds: int) -> Iterator[Trial]:
    """Yield each port without an error and with each one."""
    for name, case in PORTS.items():
        if case.skipped:
            print(f"{name}: skipped, for {case.needs} is not installed")
            continue
        for seed in range(seeds):
            reference = models.drawn(case.reference, seed)
            probe = ModelProbe(seed=seed)
            inputs = probe.randn(2, 3, 16, 16) if "ViT" in name else probe.randint(0, models.WORDS, (2, 12))
            expected = probe.run(reference, inputs)
            for error in ["", *case.errors]:
                port = case.port(reference, error)
                said = ""
                try:
                    assert_same_behavior(probe.run(port, inputs), expected, pair="structure")
                except AssertionError as failure:
                    said = str(failure).partition("\n")[0]
                verdict = _verdict(said, case.errors[error]) if error else "alarm" if said else "no alarm"
                yield Trial(name, error, seed, verdict, said)


def _verdict(said: str, right: tuple[str, str]) -> str:
    if not said:
        return "missed"
    words = {word.strip(":;,") for word in said.replace("'", " ").split()}
    named = [any(word == name or word.endswith(f".{name}") for word in words) for name in right]
    return "right" if all(named) else "half" if any(named) else "other"


def report(found: list[Trial]) -> str:
    """Return the page."""
    told = collections.Counter(trial.verdict for trial in found)
    planted = sum(1 for trial in found if trial.error)
    told_of = (
        f"Of {told['alarm'] + told['no alarm']} right ports {told['alarm']} made an alarm. Of {planted} errors "
        f"{told['right']} are named rightly in the first line, {told['half']} by half, {told['other']} as another "
        f"pair, and {told['missed']} are missed."
    )
    used = dict.fromkeys(["torch", "transformers", *(case.needs for case in PORTS.values() if not case.skipped)])
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in used)
    lines = [
        "# Ports",
        "",
        f"Made by `python evidence/ports` ({versions}, CPU).",
        "",
        *__doc__.split("\n\n")[2].splitlines(),  # what the numbers mean
        "",
        told_of,
        "",
        "| port | error | seeds | verdict | first line, of the first seed |",
        "|---|---|---|---|---|",
    ]
    for name, case in PORTS.items():
        if case.skipped:
            lines.append(f"| {name} | all | 0 | skipped: {case.needs} is not installed | |")
            continue
        for error in ["", *case.errors]:
            own = [trial for trial in found if (trial.port, trial.error) == (name, error)]
            verdicts = collections.Counter(trial.verdict for trial in own)
            shown = ", ".join(f"{n} {verdict}" for verdict, n in verdicts.items())
            lines.append(f"| {name} | {error or '(none)'} | {len(own)} | {shown} | {own[0].said.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the trials, and write the page if all were run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many drawings of the weights (default: 3)")
    options = parser.parse_args()
    found = []
    for trial in trials(options.seeds):
        print(f"{trial.port:42}{trial.error:14}{trial.seed:3}  {trial.verdict:10}{trial.said}", flush=True)
        found.append(trial)
    if options.seeds == parser.get_default("seeds"):
        RESULTS.write_text(report(found), "utf-8")
    return int(any(trial.verdict in ("alarm", "missed") for trial in found))


if __name__ == "__main__":
    sys.exit(main())
