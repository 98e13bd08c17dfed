"""Modes: the assertion, and the hint on a frozen part in training mode with healthy models that look like it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from pytest_modelprobe import ModelProbe, NothingObservedError, Record, SelectionError, UsageError, assert_mode
from pytest_modelprobe.assertions.findings import hints

PROBE = ModelProbe()
X = PROBE.randn(8, 6)


def backbone() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.2))


class Tuned(nn.Module):
    """A backbone and a head that learns."""

    def __init__(self, frozen: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = frozen.requires_grad_(False), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


def trained(model: nn.Module, **inputs: Any) -> Record:
    return ModelProbe().run(model, *([] if inputs else [X]), kwargs=inputs, loss="random")


def train_with_evaluations(model: Tuned, *, epochs: int = 3, back_to_eval: bool) -> Any:
    optimizer = torch.optim.SGD(model.head.parameters(), 0.1)
    watch = ModelProbe().watch(model, steps=epochs)
    for _ in range(epochs):
        model.train()
        if back_to_eval:
            model.backbone.eval()
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model.eval()(X)
    watch.close()
    return watch


# --- the assertion ----------------------------------------------------------------------------------------------------


def test_layers_in_the_modes_that_are_asked_for_pass() -> None:
    model = Tuned(backbone())
    model.backbone.eval()
    assert_mode(trained(model), {"backbone.**": "eval", "head": "train"})


def test_a_backbone_in_training_mode_fails_with_its_layers() -> None:
    with pytest.raises(AssertionError) as error:
        assert_mode(trained(Tuned(backbone())), {"backbone.**": "eval", "head": "train"})
    assert str(error.value) == (
        "backbone is called in training mode, not in evaluation mode; 4 of 5 layers looked at\n\n"
        "layer        type          mode    expected\n"
        "backbone     Sequential    train   eval\n"
        "backbone.0   Linear        train   eval\n"
        "backbone.1   BatchNorm1d   train   eval\n"
        "backbone.2   Dropout       train   eval\n\n"
        "Call eval() on it after each train() of the model, which sets the mode of all layers."
    )


def test_evaluations_between_the_steps_of_a_watch_are_sound() -> None:
    assert_mode(train_with_evaluations(Tuned(backbone()), back_to_eval=True), {"backbone.**": "eval", "head": "train"})


def test_a_backbone_that_goes_back_to_training_mode_fails_in_a_watch() -> None:
    with pytest.raises(AssertionError, match=r"^backbone is called in training mode, .* 4 of 5"):
        watch = train_with_evaluations(Tuned(backbone()), back_to_eval=False)
        assert_mode(watch, {"backbone.**": "eval", "head": "train"})


def test_wrong_options_and_layers_without_a_call_are_refused() -> None:
    record = trained(Tuned(backbone()))
    for modes in ({}, "eval", {"backbone": "evaluation"}, {"backbone": False}):
        with pytest.raises(UsageError, match="modes is a dict such as"):
            assert_mode(record, modes)  # type: ignore[arg-type]
    with pytest.raises(SelectionError):
        assert_mode(record, {"trunk.**": "eval"})
    with pytest.raises(NothingObservedError, match="was never called"):
        assert_mode(Record(model="Net"), {"**": "eval"})


# --- the hint ---------------------------------------------------------------------------------------------------------


def test_a_frozen_backbone_in_training_mode_is_a_hint_and_one_in_evaluation_mode_is_none() -> None:
    model = Tuned(backbone())
    assert hints(trained(model)) == ["frozen, and called in training mode: backbone (BatchNorm1d and Dropout)"]
    model.backbone.eval()
    assert hints(trained(model)) == []


def test_a_frozen_encoder_of_transformers_is_named_by_its_outermost_layer() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).train()
    ids = torch.randint(3, 64, (2, 9))
    assert hints(trained(model, input_ids=ids)) == []
    model.bert.requires_grad_(False)
    assert hints(trained(model, input_ids=ids)) == ["frozen, and called in training mode: bert (Dropout)"]
    model.bert.eval()
    assert hints(trained(model, input_ids=ids)) == []


def test_a_frozen_norm_among_layers_that_learn_is_a_hint_and_one_in_evaluation_mode_is_none() -> None:
    model = nn.Sequential(nn.Conv1d(6, 12, 1), nn.BatchNorm1d(12), nn.ReLU(), nn.Conv1d(12, 12, 1), nn.BatchNorm1d(12))
    model[1].requires_grad_(False)
    said = hints(ModelProbe().run(model, PROBE.randn(8, 6, 4), loss="random"))
    assert said == ["frozen, and called in training mode: layer '1' (BatchNorm1d)"]
    model[1].eval()
    assert hints(ModelProbe().run(model, PROBE.randn(8, 6, 4), loss="random")) == []


class Adapted(nn.Linear):
    """A frozen layer with a low-rank adapter that learns."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.up(self.down(x))


def test_adapters_in_a_frozen_model_with_dropout_are_healthy() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config).requires_grad_(False).train()
    for layer in model.encoder.layer:
        layer.attention.self.query = Adapted(layer.attention.self.query)
    assert hints(trained(model, input_ids=torch.randint(3, 64, (2, 9)))) == []


class Contrast(nn.Module):
    """A query network that learns, and a key network that is its moving average, in training mode as MoCo has it."""

    def __init__(self) -> None:
        super().__init__()
        self.query = backbone()
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.query(x) * self.key(x)


class Judged(nn.Module):
    """A generator that learns from a discriminator that is frozen meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(6, 6)
        self.discriminator = backbone().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.discriminator(self.generator(x))


class FrozenBatchNorm1d(nn.Module):
    """As in torchvision, where it is of images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.running_mean


@pytest.mark.parametrize(
    "model",
    [
        backbone().requires_grad_(False),
        nn.Sequential(nn.BatchNorm1d(6, affine=False), nn.Linear(6, 3)),
        nn.Sequential(nn.Dropout(), nn.Linear(6, 3)),
        Contrast(),
        Judged(),
        Tuned(nn.Sequential(nn.Linear(6, 12), FrozenBatchNorm1d(12))),
        Tuned(nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.0))),
    ],
    ids=["frozen", "no affine", "dropout first", "target", "discriminator", "frozen norm", "no rate"],
)
def test_healthy_models_that_look_like_it_have_no_hint(model: nn.Module) -> None:
    record = ModelProbe().run(model, X, loss="random" if any(p.requires_grad for p in model.parameters()) else None)
    assert hints(record) == []
