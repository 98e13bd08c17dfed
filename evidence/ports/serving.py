"""Whether an engine is compared rightly with the trainer whose weights it serves: no alarm, or the layer at fault.

    python evidence/ports/serving.py                # all, and writes SERVING.md beside this
    python evidence/ports/serving.py --kind llama   # one architecture

Trainers are models of transformers; engines are small rewrites in the manner of vLLM and SGLang (`engines.py`). A fault
is planted in the second of three blocks, or at the ends of the model. `assert_same_behavior(..., pair="structure")` is
asked with records of which `tokens=` says which tokens there are, without a rename. A right engine is also compared
with a record of the trainer without measured noise, as of another process. *Right* means that the first line begins
with the layer at fault, by its name; *other*, that it names another pair; *missed*, that there is no failure.
Engines and faults were written before the code that pairs layers was read. Three things came after: the ranks; larger
weights of query and key, for with nearly uniform attention faults of positions were below the rounding of bfloat16; and
that faults of experts count at the mixture, the innermost layer that both have. The tool was then mended on these
engines and on a second drawing of the weights, so this is no measure of engines that nobody saw. In mixtures in
bfloat16 a router near a tie chooses other experts, in right engines too: what differs there is *refused*, not judged.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from engines import AT, WORDS, batch_of, engine_of, shard, trainer_of

from pytest_modelprobe import ModelProbe, Record, assert_same_behavior
from pytest_modelprobe.exceptions import NothingObservedError

RESULTS = Path(__file__).with_name("SERVING.md")
LENGTHS = (5, 9, 7)
transformers.logging.set_verbosity_error()

_LAYER, _ATTENTION, _MLP = f"model.layers.{AT}", f"model.layers.{AT}.self_attn", f"model.layers.{AT}.mlp"
_GATED = {
    **dict.fromkeys(["rope pairs", "scale", "heads", "k and v", "position", "stale page", "mask"], _ATTENTION),
    **dict.fromkeys(["gate and up", "gelu"], _MLP),
    "eps": f"{_LAYER}.input_layernorm",
    **dict.fromkeys(["residual of the norm", "residual twice"], _LAYER),
}
_GPT = {
    **dict.fromkeys(["scale", "k and v", "qkv by heads", "stale page", "mask"], f"transformer.h.{AT}.attn"),
    "gelu": f"transformer.h.{AT}.mlp.act",
    "eps": f"transformer.h.{AT}.ln_1",
    **dict.fromkeys(["residual of the norm", "residual twice"], f"transformer.h.{AT}"),
    "position": "transformer",
    "no last norm": "transformer",
    "untied": "lm_head",
}
FAULTS: dict[str, Mapping[str, str]] = {
    "llama": _GATED | {"rope base": _ATTENTION},
    "qwen2": _GATED | {"no bias": _ATTENTION, "untied": "lm_head"},
    "qwen3": _GATED | {"no qk norm": _ATTENTION, "untied": "lm_head"},
    "mixtral": _GATED | dict.fromkeys(["not renormalized", "one expert"], _MLP),
    "gpt2": _GPT,
}


class Variant(NamedTuple):
    """What the engine is given."""

    name: str
    plain: bool = False
    """Whether it adds the residual at once and has a batch axis of 1."""
    decodes: bool = False
    """Whether the last token of each request alone is new, and the others are in the cache."""
    lengths: Sequence[int] = LENGTHS
    order: Sequence[int] = (0, 1, 2)
    dtype: torch.dtype = torch.float32
    is_last_only: bool = False
    """Whether both compute logits of the last token of each request alone; the trainer has padding on the left."""


VARIANTS = (
    Variant("packed requests, residual beside"),
    Variant("one request, batch axis of 1", plain=True, lengths=(9,), order=(0,)),
    Variant("decoding with a cache, residual beside", decodes=True),
    Variant("packed in another order, bfloat16, residual beside", order=(2, 0, 1), dtype=torch.bfloat16),
    Variant("packed, logits of last tokens alone, residual beside", order=(1, 0, 2), is_last_only=True),
    Variant("decoding with a cache, bfloat16", plain=True, decodes=True, dtype=torch.bfloat16),
)
RANKS = Variant("one of two ranks, residual beside")
"""Each rank has a part of the heads and of the inner size; its record is compared."""


class Trial(NamedTuple):
    """What was said of one engine with one fault."""

    kind: str
    variant: str
    fault: str
    verdict: str
    said: str


def of_trainer(probe: ModelProbe, trainer: Any, ids: torch.Tensor, mask: torch.Tensor, variant: Variant) -> Record:
    """Return the record of a forward of padded requests."""
    if variant.is_last_only:
        pads = [int(n) for n in (~mask).sum(1)]
        ids, mask = (torch.stack([row.roll(n) for row, n in zip(x, pads, strict=True)]) for x in (ids, mask))
        places = (mask.cumsum(1) - 1).clamp(0)
        more = {"logits_to_keep": 1, "position_ids": places}
        return probe.run(trainer, input_ids=ids, attention_mask=mask.long(), use_cache=False, tokens=mask, **more)
    last = mask & ~torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], 1)
    tokens = last if variant.decodes else mask
    return probe.run(trainer, input_ids=ids, attention_mask=mask.long(), use_cache=False, tokens=tokens)


def of_engine(probe: ModelProbe, engine: Any, ids: torch.Tensor, variant: Variant) -> Record:
    """Return the record of a step of packed requests."""
    requests = {row: ids[row, : variant.lengths[row]] for row in variant.order}
    past = [0] * len(requests)
    if variant.decodes:
        past = [len(x) - 1 for x in requests.values()]
        batch = batch_of(past)
        with torch.no_grad():
            engine(torch.cat([x[:-1] for x in requests.values()]), batch.positions, batch)
        requests = {row: x[-1:] for row, x in requests.items()}
    batch = batch_of([len(x) for x in requests.values()], past=past, is_last_only=variant.is_last_only)
    given = torch.cat([*requests.values()])
    tokens = {row: len(x) for row, x in requests.items()}
    return probe.run(engine, given[None] if variant.plain else given, batch.positions, batch, tokens=tokens)


def trials(kinds: Sequence[str]) -> Iterator[Trial]:
    """Yield each engine without a fault and with each one."""
    for kind in kinds:
        for variant in VARIANTS:
            yield from trials_of(kind, variant)
        if kind in ("llama", "qwen3"):
            with tempfile.TemporaryDirectory() as folder:
                torch.multiprocessing.spawn(run_rank, (kind, folder), nprocs=2)
                yield from (Trial(*row) for row in json.loads(Path(folder, "found").read_text("utf-8")))


def run_rank(rank: int, kind: str, folder: str) -> None:
    """Run the trials of one of two ranks; the first writes what it found."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with torch.no_grad():
        found = list(trials_of(kind, RANKS))
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found), "utf-8")
    torch.distributed.destroy_process_group()


def trials_of(kind: str, variant: Variant) -> Iterator[Trial]:
    """Yield an engine without a fault and with each one."""
    trainers, engines = ModelProbe(seed=0), ModelProbe(seed=0)
    trainer = trainer_of(kind, 0, variant.dtype)
    ids = trainers.randint(1, WORDS, (len(variant.lengths), max(variant.lengths)))
    mask = torch.arange(ids.shape[1]) < torch.tensor(variant.lengths)[:, None]
    stored = of_trainer(trainers, trainer, ids, mask, variant)
    expected = stored.live_run.measured(stored) if stored.live_run else stored  # once, as the assertion would each time
    stored = dataclasses.replace(stored)  # as of another process
    faults = dict(FAULTS[kind])
    if variant.decodes:
        faults.pop("mask")  # the last token sees all others in any case
    if variant.is_last_only:
        faults["last position"] = "(root)"
    if variant is RANKS:
        faults = {"no reduction": _ATTENTION, **faults}
        faults.pop("heads")  # a rank has one group of heads
    for fault, place in {"": "", **faults}.items():
        engine, said = engine_of(trainer, fault, plain=variant.plain), ""
        if variant is RANKS:
            shard(engine, torch.distributed.get_rank(), 2)
        actual = of_engine(engines, engine, ids, variant)
        try:
            assert_same_behavior(actual, expected, pair="structure")
            if not fault:
                assert_same_behavior(actual, stored, pair="structure")
        except AssertionError as failure:
            said = str(failure).partition("\n")[0]
        except NothingObservedError as refusal:
            yield Trial(kind, variant.name, fault, "refused", str(refusal))
            continue
        named = said.removeprefix("a weight of ").partition(" ")[0].rstrip(":")
        right = "right" if named == place else "other" if said else "missed"
        yield Trial(kind, variant.name, fault, right if fault else "alarm" if said else "no alarm", said)


def report(found: list[Trial]) -> str:
    """Return the page."""
    told = collections.Counter(trial.verdict for trial in found)
    planted = sum(1 for trial in found if trial.fault)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    told_of = (
        f"Of {len(found) - planted} right engines {told['alarm']} made an alarm. Of {planted} faults "
        f"{told['right']} are named at their layer ({told['right'] / max(planted, 1):.1%}), {told['other']} at another "
        f"one, {told['missed']} are missed, and {told['refused']} engines of mixtures in bfloat16 are refused."
    )
    lines = [
        "# Trainers and engines",
        "",
        f"Made by `python evidence/ports/serving.py` ({versions}, CPU).",
        "",
        *(__doc__ or "").split("\n\n")[2].splitlines(),
        "",
        told_of,
        "",
        "| architecture | engine | right engine | faults named at their layer | not |",
        "|---|---|---|---|---|",
    ]
    for kind, variant in dict.fromkeys((trial.kind, trial.variant) for trial in found):
        own = [trial for trial in found if (trial.kind, trial.variant) == (kind, variant)]
        faults = [trial for trial in own if trial.fault]
        right = sum(trial.verdict == "right" for trial in faults)
        rest = "; ".join(f"{t.fault}: {t.verdict}, {t.said.partition(';')[0]}" for t in faults if t.verdict != "right")
        lines.append(f"| {kind} | {variant} | {own[0].verdict} | {right} of {len(faults)} | {rest} |")
    lines += ["", "What is said of each fault, of the first engine of each architecture:", ""]
    lines += ["| architecture | fault | first line |", "|---|---|---|"]
    first = VARIANTS[0].name
    lines += [f"| {t.kind} | {t.fault} | {t.said} |" for t in found if t.variant == first and t.fault]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the trials, and write the page if all were run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=FAULTS, help="one architecture (default: all)")
    options = parser.parse_args()
    found = []
    for trial in trials([options.kind] if options.kind else list(FAULTS)):
        print(f"{trial.kind:8}{trial.variant[:34]:36}{trial.fault:22}{trial.verdict:10}{trial.said}", flush=True)
        found.append(trial)
    if options.kind is None:
        RESULTS.write_text(report(found), "utf-8")
    return int(any(trial.verdict in ("alarm", "missed") for trial in found))


if __name__ == "__main__":
    sys.exit(main())
