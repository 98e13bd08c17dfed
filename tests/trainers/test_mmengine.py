"""MMEngine, beside its hooks for checkpoints, logs, the sampler's seed and the moving average of weights."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("mmengine")

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulative_counts": 2},
    "clipping": {"clip_grad": {"max_norm": 1e-3}},
    "hooks": {},
    "evaluation": {},
}


def collated(samples: Any) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_a_runner(case: str, network: Any, samples: Any, holds: Any, tmp_path: Any) -> None:
    from mmengine.evaluator import BaseMetric, Evaluator
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Model(BaseModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor, y: torch.Tensor, mode: str = "tensor") -> Any:
            out = self.net(x)
            return {"loss": nn.functional.cross_entropy(out, y)} if mode == "loss" else list(out)

    class Metric(BaseMetric):  # type: ignore[misc]
        def process(self, data_batch: Any, data_samples: Any) -> None:
            self.results.append(1.0)

        def compute_metrics(self, results: Any) -> dict[str, float]:
            return {"count": sum(results)}

    def loader(sampler: str) -> dict[str, Any]:
        return {
            "dataset": samples, "batch_size": 8, "sampler": {"type": sampler}, "collate_fn": collated, "num_workers": 0
        }  # fmt: skip

    def fit(model: nn.Module) -> None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        evaluation = {"val_dataloader": loader("DefaultSampler"), "val_cfg": {}, "val_evaluator": Evaluator(Metric())}
        Runner(
            model=model,
            work_dir=str(tmp_path / uuid.uuid4().hex),
            train_dataloader=loader("InfiniteSampler"),
            optim_wrapper={"optimizer": optimizer, **CASES[case]},
            train_cfg={"by_epoch": False, "max_iters": 4, "val_interval": 2},
            custom_hooks=[{"type": "EMAHook"}] if case == "hooks" else [],
            randomness={"seed": 1},
            log_level="ERROR",
            experiment_name=uuid.uuid4().hex,
            **(evaluation if case == "evaluation" else {}),
        ).train()

    # Each batch passes through the data preprocessor first, a forward of its own.
    holds(Model, fit, forwards=2 if case == "accumulation" else 1, frozen="net.stem", evaluated=True)
