"""The callbacks in the trainers: records of every N-th step, TensorBoard beside them, and a run that fails."""

from __future__ import annotations

import pickle
import uuid
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")


def broken(record: Any) -> None:
    raise AssertionError(f"step {record.forwards}")


def lightning(folder: Any, model: nn.Module, samples: Any, options: dict[str, Any], accumulate: int) -> None:
    found = pytest.importorskip("lightning")
    from pytest_modelprobe.trainers import LightningProbe

    class Lit(found.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    found.Trainer(
        max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, accumulate_grad_batches=accumulate,
        callbacks=[LightningProbe(folder / "records", **options)],
    ).fit(Lit(), torch.utils.data.DataLoader(samples, 4))  # fmt: skip


def transformers(folder: Any, model: nn.Module, samples: Any, options: dict[str, Any], accumulate: int) -> None:
    pytest.importorskip("accelerate")
    found = pytest.importorskip("transformers")
    from pytest_modelprobe.trainers import TrainerProbe

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.net(x), labels)}

    arguments = found.TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=4, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, logging_strategy="no", gradient_accumulation_steps=accumulate,
    )  # fmt: skip
    data = [{"x": x, "labels": y} for x, y in samples]
    probe = TrainerProbe(folder / "records", **options)
    found.Trainer(model=WithLoss(), args=arguments, train_dataset=data, callbacks=[probe]).train()


def mmengine(folder: Any, model: nn.Module, samples: Any, options: dict[str, Any], accumulate: int) -> None:
    pytest.importorskip("mmengine")
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    from pytest_modelprobe.trainers import MMEngineProbe

    class Model(BaseModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: torch.Tensor, y: torch.Tensor, mode: str = "tensor") -> Any:
            return {"loss": nn.functional.cross_entropy(self.net(x), y)}

    def collated(some: Any) -> dict[str, torch.Tensor]:
        return {"x": torch.stack([x for x, _ in some]), "y": torch.stack([y for _, y in some])}

    whole = Model()
    Runner(
        model=whole,
        work_dir=str(folder / "work"),
        train_dataloader={
            "dataset": samples, "batch_size": 4, "sampler": {"type": "InfiniteSampler"}, "collate_fn": collated,
            "num_workers": 0,
        },
        optim_wrapper={
            "optimizer": torch.optim.SGD(whole.parameters(), lr=0.1), "accumulative_counts": accumulate
        },
        train_cfg={"by_epoch": False, "max_iters": 4 * accumulate},
        custom_hooks=[MMEngineProbe(folder / "records", **options)],
        log_level="ERROR",
        experiment_name=uuid.uuid4().hex,
    ).train()  # fmt: skip


TRAINERS = pytest.mark.parametrize("train", [lightning, transformers, mmengine], ids=lambda train: train.__name__)


@TRAINERS
def test_every_second_step_is_written(train: Any, network: Any, samples: Any, tmp_path: Any) -> None:
    import json

    from pytest_modelprobe import Record

    model = network()
    train(tmp_path, model, samples, {"every": 2}, 1)
    files = sorted((tmp_path / "records").iterdir())
    assert [path.name for path in files] == ["step-00000000.json", "step-00000002.json"]
    record = Record.from_dict(json.loads(files[1].read_text("utf-8")))
    assert (record.forwards, record.backwards) == (1, 1)
    assert record["net.head"].output.gradient.count == 4 * 3
    assert not any(module._forward_hooks for module in model.modules())


@TRAINERS
def test_scalars_for_tensorboard_are_written_beside_the_records(
    train: Any, network: Any, samples: Any, tmp_path: Any
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(tmp_path, network(), samples, {"every": 2, "tensorboard": True}, 1)
    events = accumulator.EventAccumulator(str(tmp_path / "records")).Reload()
    (tag,) = [tag for tag in events.Tags()["scalars"] if tag.endswith("net.head/output_rms")]
    assert [(event.step, event.value > 0) for event in events.Scalars(tag)] == [(0, True), (2, True)]
    assert len(list((tmp_path / "records").glob("step-*.json"))) == 2


def test_before_the_first_step_no_file_is_open_so_that_a_launcher_can_copy_the_callback(tmp_path: Any) -> None:
    from pytest_modelprobe.trainers import StepLog

    pickle.dumps(StepLog(tmp_path / "records", tensorboard=True))
    assert not list(tmp_path.iterdir())


@TRAINERS
def test_a_step_with_accumulation_has_all_its_forwards(train: Any, network: Any, samples: Any, tmp_path: Any) -> None:
    seen: list[Any] = []
    train(tmp_path, network(), samples, {"every": 4, "assertions": [seen.append]}, 2)
    assert [(record.forwards, record.backwards) for record in seen][:1] == [(2, 2)]


@TRAINERS
def test_a_broken_assertion_fails_the_run(train: Any, network: Any, samples: Any, tmp_path: Any) -> None:
    model = network()
    with pytest.raises(AssertionError, match="step 1"):
        train(tmp_path, model, samples, {"assertions": [broken]}, 1)
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["step-00000000.json"]
    assert not any(module._forward_hooks for module in model.modules())
