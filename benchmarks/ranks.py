"""What the ranks of one step read, and how long they merge, as the world size grows.

Each record is that of one rank of a model; ranks beyond the first have a copy. `python benchmarks/ranks.py`
"""

from __future__ import annotations

import json
import time
import zlib
from typing import Any

import torch
from torch import nn

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.extras.ranks.exchange import MOST_PARTS, merge_part, merged_of, split

WORLD_SIZES = (2, 8, 64, 1024)
BLOCKS = 29
FEW = 8


def main() -> None:
    blocks = [layer for _ in range(BLOCKS) for layer in (nn.Linear(32, 32), nn.GELU())]
    model = nn.Sequential(*blocks)
    with ModelProbe() as probe:
        watch = probe.watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(probe.randn(8, 32)).square().mean().backward()
        optimizer.step()
        record = watch.first_step
    size = len(packed(record.to_dict()))
    print(f"{len(record.layers)} layers; a record: {size / 1e3:.1f} kB sent\n")
    print("| ranks | layers of the rank that merges most | it reads | it takes | a rank that merges none takes |")
    print("|---|---|---|---|---|")
    for ranks in WORLD_SIZES:
        begun = time.process_time()
        parts = [packed(part) for part in split(record, min(ranks, MOST_PARTS))]
        split_in = time.process_time() - begun
        # What is merged does not grow with the number of ranks: a few stand for all.
        merged = [packed(merge_part([unpacked(part)] * min(ranks, FEW), mean_loss=True)) for part in parts]
        begun = time.process_time()
        merged_of([unpacked(part) for part in merged])
        read_in = split_in + time.process_time() - begun
        most = max(parts, key=len)
        begun = time.process_time()
        packed(merge_part([unpacked(most) for _ in range(ranks)], mean_loss=True))
        merged_in = read_in + time.process_time() - begun
        read = (len(most) * ranks + sum(map(len, merged))) / 1e6
        layers = len(unpacked(most)["places"])
        none = f"{read_in:.2f} s" if ranks > MOST_PARTS else "-"
        print(f"| {ranks:,} | {layers} | {read:.2f} MB | {merged_in:.2f} s | {none} |", flush=True)


def packed(data: dict[str, Any]) -> bytes:
    """Return plain data as ranks send it."""
    return zlib.compress(json.dumps(data).encode())


def unpacked(data: bytes) -> dict[str, Any]:
    """Return plain data that was sent."""
    found: dict[str, Any] = json.loads(zlib.decompress(data))
    return found


if __name__ == "__main__":
    main()
