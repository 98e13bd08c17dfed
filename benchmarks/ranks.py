"""Size of the records of the ranks of one step, and the time to merge them, as the world size grows.

Each record is that of one rank of a small model; ranks beyond the first have a copy. `python benchmarks/ranks.py`
"""

from __future__ import annotations

import json
import time
import zlib

import torch
from torch import nn

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.record import Record

WORLD_SIZES = (1, 2, 8, 64, 1024)


def main() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))
    with ModelProbe() as probe:
        watch = probe.watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(probe.randn(8, 32)).square().mean().backward()
        optimizer.step()
        data = watch.first_step.to_dict()
    plain = json.dumps(data).encode()
    packed = zlib.compress(plain)
    print(
        f"{len(data['layers'])} layers; a record: {len(plain) / 1e3:.0f} kB of JSON, {len(packed) / 1e3:.1f} kB sent\n"
    )
    print("| ranks | read by each rank | read and merge | merged record |")
    print("|---|---|---|---|")
    for ranks in WORLD_SIZES:
        begun = time.process_time()
        records = [Record.from_dict(json.loads(zlib.decompress(packed))) for _ in range(ranks)]
        merged = Record.merge(records)
        taken = time.process_time() - begun
        size = len(json.dumps(merged.to_dict())) / 1e3
        print(f"| {ranks:,} | {ranks * len(packed) / 1e6:.2f} MB | {taken:.2f} s | {size:.0f} kB |", flush=True)


if __name__ == "__main__":
    main()
