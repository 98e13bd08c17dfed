"""A small CNN is trained once on scikit-learn's handwritten digits. Then each test makes one claim about it.

The trained model and the record of one run of it are fixtures of the whole module: the model runs once, and many
tests assert on the record. `modelprobe_factory` makes the probe for fixtures of a wider scope than one test.
"""

from typing import NamedTuple

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional

from pytest_modelprobe import (
    assert_all_params_have_grad,
    assert_called,
    assert_dtypes,
    assert_finite,
    assert_grad_finite,
    assert_grad_flow,
    assert_no_dead_layers,
    assert_shapes,
)


class DigitsNet(nn.Module):
    """Two convolutions and a linear classifier for images of 8x8 pixels."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.relu2 = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(0.25)
        self.classifier = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images):
        features = self.relu1(self.conv1(images))
        features = self.pool(self.relu2(self.conv2(features)))
        return self.classifier(self.dropout(features.flatten(1)))


class Digits(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor


@pytest.fixture(scope="module")
def digits():
    """Digits to train on, and held-out digits."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    parts = train_test_split(images, torch.tensor(labels), test_size=360, random_state=0, stratify=labels)
    train_images, test_images, train_labels, test_labels = parts
    return Digits(train_images, train_labels), Digits(test_images, test_labels)


@pytest.fixture(scope="module")
def probe(modelprobe_factory):
    return modelprobe_factory()


@pytest.fixture(scope="module")
def trained(probe, digits):
    """The model after six passes over the training digits."""
    model = probe.build(DigitsNet)
    images, labels = (tensor.to(probe.device) for tensor in digits[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(6):
        for batch in torch.randperm(len(images)).split(96):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def record(probe, trained, digits):
    """The record of one forward and backward on 128 of the held-out digits."""
    images, labels = digits[1].images[:128], digits[1].labels[:128].to(probe.device)
    return probe.run(trained, images, loss=lambda logits: functional.cross_entropy(logits, labels))


def test_it_reads_at_least_95_percent_of_digits_it_has_not_seen(probe, trained, digits):
    images, labels = (tensor.to(probe.device) for tensor in digits[1])
    with torch.no_grad():
        accuracy = (trained(images).argmax(dim=1) == labels).double().mean().item()
    assert accuracy >= 0.95


def test_a_new_model_reads_no_more_than_chance_gives(modelprobe, digits):
    model = modelprobe.build(DigitsNet).eval()
    images, labels = (tensor.to(modelprobe.device) for tensor in digits[1])
    with torch.no_grad():
        accuracy = (model(images).argmax(dim=1) == labels).double().mean().item()
    assert accuracy < 0.3


def test_no_layer_is_dead(record):
    assert_no_dead_layers(record)
    print("", record, "", sep="\n")


def test_at_most_a_quarter_of_the_units_of_a_layer_are_dead(record):
    assert_no_dead_layers(record, max_dead_units=0.25)


def test_activations_and_gradients_are_finite(record):
    assert_finite(record)
    assert_grad_finite(record)


def test_the_gradient_still_reaches_every_layer_after_training(record):
    assert_grad_flow(record, max_ratio=100)
    assert_all_params_have_grad(record)


def test_each_layer_is_used_once(record):
    assert_called(record, per_forward=1)


def test_shapes_share_the_batch_and_the_pool_halves_the_image(record):
    assert_shapes(
        record,
        {
            "conv1": "batch 16 height width",
            "conv2": "batch 32 height width",
            "pool": "batch 32 4 4",
            "classifier": "batch classes",
        },
        dims={"batch": 128, "height": 8, "width": 8, "classes": 10},
    )


def test_everything_is_float32(record):
    assert_dtypes(record, torch.float32)


def test_activations_keep_their_scale_from_layer_to_layer(record):
    for name in ("relu1", "relu2", "classifier"):
        statistics = record.layers[name].calls[0].outputs[0].forward.statistics
        assert 0.1 < statistics.rms < 20, name


def test_the_same_seed_gives_the_same_record(probe, trained, record, digits):
    images, labels = digits[1].images[:128], digits[1].labels[:128].to(probe.device)
    again = probe.run(trained, images, loss=lambda logits: functional.cross_entropy(logits, labels))
    assert again == record
