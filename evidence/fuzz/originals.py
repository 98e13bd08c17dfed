"""The snapshots that are mutated: those of the examples, and some of small models that are odd in many ways."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import torch
from torch import nn

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.files import Texts, encode
from pytest_modelprobe.record import Record

EXAMPLES = Path(__file__).parents[2] / "examples" / "__modelprobe__"


class Shared(nn.Module):
    """Calls one layer twice, and a child before the one that stands above it."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(4, 4)
        self.early = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.late(self.early(self.early(x)) + x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.norm(self.emb(ids)))
        return {"logits": logits, "best": logits.argmax(-1)}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale = math.inf

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).log() / 0.0


def of_run(model: nn.Module, x: torch.Tensor, loss: object = "random") -> Record:
    """Return a record with all that a snapshot keeps."""
    with ModelProbe(device="cpu", seed=0) as probe:
        record = probe.run(model, x, loss=loss)  # type: ignore[arg-type]
        assert record.live_run is not None
        return dataclasses.replace(record.live_run.measured(record, record))


def of_watch() -> Record:
    """Return a record of forwards of several shapes and modes."""
    with ModelProbe(device="cpu", seed=0) as probe:
        model = Shared()
        watch = probe.watch(model)
        for n in (2, 3):
            model(torch.randn(n, 4)).sum().backward()
        model.eval()
        with torch.no_grad():
            model(torch.randn(2, 4))
        return watch.record


def originals() -> dict[str, Texts]:
    """Return the texts of each snapshot, the short ones several times."""
    torch.manual_seed(0)
    cnn = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    nn.init.constant_(cnn[1].bias[:2].detach(), -9.0)  # dead units
    narrow = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to(torch.bfloat16)
    records = {
        "shared": of_run(Shared(), torch.randn(2, 4)),
        "tied": of_run(Tied(), torch.randint(10, (2, 3)), lambda out: out["logits"].square().mean()),
        "broken": of_run(Broken(), torch.randn(2, 4), None),
        "cnn": of_run(cnn, torch.randn(2, 1, 8, 8)),
        "narrow": of_run(narrow, torch.randn(2, 4).bfloat16()),
        "watched": of_watch(),
    }
    found = {name: encode(record) for name, record in records.items()}
    for path in sorted(EXAMPLES.rglob("*.arch.json")):
        numbers = path.with_name(path.name.replace(".arch.", ".probe."))
        texts = Texts(path.read_text("utf-8"), numbers.read_text("utf-8") if numbers.exists() else None)
        found[path.name.removesuffix(".arch.json")] = texts
    return found
