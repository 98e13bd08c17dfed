"""How far the merged record of a step is from that of one process: ranks under DDP and FSDP2, and microbatches.

`python evidence/rank_agreement.py`; the table is in RANK_AGREEMENT.md. The processes are on the CPU, with gloo.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from pytest_modelprobe import ModelProbe

RANKS_AND_PARTS = ((1, 1), (2, 1), (4, 1), (1, 4), (2, 2), (4, 4))


def build() -> nn.Sequential:
    """Return a small transformer with the weights of a seed."""
    torch.manual_seed(0)
    attention = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(50, 16), attention, nn.LayerNorm(16), nn.Linear(16, 50))


def step(rank: int, ranks: int, kind: str, parts: int, folder: str) -> None:
    """Take one step in one rank, and write the merged record."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    probe, model = ModelProbe(), build()
    ids = probe.randint(0, 50, (16, 6)).chunk(ranks)[rank]
    if kind == "FSDP2":
        fully_shard(model[1])
        wrapped: nn.Module = fully_shard(model)
    else:
        wrapped = nn.parallel.DistributedDataParallel(model)
    watch = probe.watch(wrapped)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for part in ids.chunk(parts):
        (nn.functional.cross_entropy(wrapped(part).flatten(0, 1), part.flatten()) / parts).backward()
    optimizer.step()
    merged = probe.merged(watch)
    if not rank:
        Path(folder, "record.json").write_text(json.dumps(merged.to_dict()))
    dist.barrier()
    dist.destroy_process_group()


def numbers(part: Any, where: str = "") -> dict[str, tuple[float, float]]:
    """Return the numbers of a record by path, each with the rms of its tensor, or the norm of its fingerprint."""
    found: dict[str, tuple[float, float]] = {}
    for key, inner in part.items() if isinstance(part, dict) else enumerate(part):
        path = f"{where}.{key}"
        if key == "statistics":
            rms = math.hypot(math.sqrt(inner.get("deviations", 0.0) / inner["count"]), inner["mean"]) or 1.0
            found |= {f"{path}.{name}": (inner[name], rms) for name in ("mean", "min", "max")}
        elif key == "fingerprint":
            found |= {f"{path}.{k}": (x, math.hypot(*inner) or 1.0) for k, x in enumerate(inner)}
        elif isinstance(inner, (dict, list)):
            found |= numbers(inner, path)
    return found


def main() -> None:
    """Print the table."""
    one: dict[str, tuple[float, float]] = {}
    print("| | ranks | microbatches of each | statistics | fingerprints |\n|---|---|---|---|---|")
    for kind in ("DDP", "FSDP2"):
        for ranks, parts in RANKS_AND_PARTS:
            with tempfile.TemporaryDirectory() as folder:
                torch.multiprocessing.spawn(step, (ranks, kind, parts, folder), nprocs=ranks)
                found = numbers(json.loads(Path(folder, "record.json").read_text()))
            one = one or found
            worst = {"statistics": 0.0, "fingerprint": 0.0}
            for path in one.keys() & found.keys():  # of shards of parameters there are no fingerprints
                x, scale = one[path]
                what = "fingerprint" if "fingerprint" in path else "statistics"
                worst[what] = max(worst[what], abs(found[path][0] - x) / scale)
            print(
                f"| {kind} | {ranks} | {parts} | {worst['statistics']:.1e} | {worst['fingerprint']:.1e} |", flush=True
            )


if __name__ == "__main__":
    main()
