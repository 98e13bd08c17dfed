"""MMEngine, beside its hooks for checkpoints, logs, the sampler's seed and the moving average of weights."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("mmengine")

ROW = "MMEngine, `Runner`"
OPTIONS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulative_counts": 2},
    "clipping": {"clip_grad": {"max_norm": 1e-3}},
}


def collated(samples: Any) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}


@pytest.mark.filterwarnings("ignore")
def test_a_runner(case: str, forwards: int, network: Any, samples: Any, holds: Any, tmp_path: Any) -> None:
    from mmengine.evaluator import BaseMetric, Evaluator
    from mmengine.model import BaseModel
    from mmengine.optim import OptimWrapper
    from mmengine.runner import Runner, autocast

    class OptimWrapperInBF16(OptimWrapper):  # type: ignore[misc]
        """What `AmpOptimWrapper`, which is for accelerators alone, does in bfloat16."""

        @contextlib.contextmanager
        def optim_context(self, model: nn.Module) -> Iterator[None]:
            with super().optim_context(model), autocast(device_type="cpu", dtype=torch.bfloat16):
                yield

    class Model(BaseModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            if case == "compile":
                self.net.compile(backend="eager")

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
            optim_wrapper=(OptimWrapperInBF16 if case == "bf16" else OptimWrapper)(optimizer, **OPTIONS.get(case, {})),
            train_cfg={"by_epoch": False, "max_iters": 4, "val_interval": 2},
            custom_hooks=[{"type": "EMAHook"}],
            randomness={"seed": 1},
            log_level="ERROR",
            experiment_name=uuid.uuid4().hex,
            **(evaluation if case == "evaluation" else {}),
        ).train()

    # Each batch passes through the data preprocessor first, a forward of its own.
    holds(Model, fit, forwards=forwards, frozen="net.stem", evaluated=True)


@pytest.fixture
def runner(network: Any, samples: Any, tmp_path: Any) -> Any:
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Model(BaseModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.batches: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor, y: torch.Tensor, mode: str = "tensor") -> Any:
            self.batches.append(x.clone())
            return {"loss": nn.functional.cross_entropy(self.net(x), y)}

    def make(work: str = "work", **options: Any) -> Any:
        model = Model()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        data = {
            "dataset": samples, "batch_size": 8, "sampler": {"type": "DefaultSampler", "shuffle": True},
            "collate_fn": collated, "num_workers": 0,
        }  # fmt: skip
        return Runner(
            model=model, work_dir=str(tmp_path / work), train_dataloader=data, optim_wrapper={"optimizer": optimizer},
            train_cfg={"by_epoch": True, "max_epochs": 2}, randomness={"seed": 1}, log_level="ERROR",
            experiment_name=uuid.uuid4().hex, **options,
        )  # fmt: skip

    return make


@pytest.mark.filterwarnings("ignore")
def test_the_seed_of_the_sampler_makes_epochs_that_differ_and_repeat(runner: Any, modelprobe: Any) -> None:
    runs = [runner(), runner()]
    modelprobe.watch(runs[1].model)
    for one in runs:
        one.train()
    unwatched, watched = (one.model.batches for one in runs)
    assert all(torch.equal(a, b) for a, b in zip(unwatched, watched, strict=True))
    epochs = watched[: len(watched) // 2], watched[len(watched) // 2 :]
    assert not all(torch.equal(a, b) for a, b in zip(*epochs, strict=True))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_train_step_runs_eagerly_while_it_is_watched(runner: Any, modelprobe: Any) -> None:
    """The option of the `Runner` compiles the optimizer with the model: its rounding is that of eager steps then."""
    option, states = {"cfg": {"compile": {"backend": "eager"}}}, []
    for options, is_watched in (({}, False), (option, False), (option, True)):
        one = runner(**options)
        watch = modelprobe.watch(one.model, steps=2) if is_watched else None
        one.train()
        states.append(one.model.state_dict())
    assert watch is not None
    assert [(step.forwards, step.backwards) for step in watch.steps] == [(1, 1)] * 2
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[2][name]), name
        torch.testing.assert_close(tensor, states[1][name])
