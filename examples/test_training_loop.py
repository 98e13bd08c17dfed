"""A hand-written training loop is watched from outside: the loop does not change.

The record of `watch` covers all forwards, merged. `watch.first` and `watch.last` are the first and the newest forward
alone, each with its gradients.
"""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from pytest_modelprobe import (
    assert_all_params_have_grad,
    assert_called,
    assert_finite,
    assert_grad_finite,
    assert_grad_flow,
    assert_no_dead_layers,
    assert_no_leftover_hooks,
)

STEPS = 20


class Perceptron(nn.Module):
    """Two hidden layers between 64 pixels and 10 digits."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 48)
        self.norm = nn.LayerNorm(48)
        self.fc2 = nn.Linear(48, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, pixels):
        hidden = functional.gelu(self.norm(self.fc1(pixels)))
        return self.head(functional.gelu(self.fc2(hidden)))


def train(model, batches, accumulate=1):
    """Train on the batches, with one optimizer step for every ``accumulate`` batches, and return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number, (pixels, labels) in enumerate(batches, start=1):
        loss = functional.cross_entropy(model(pixels), labels)
        (loss / accumulate).backward()
        losses.append(loss.item())
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.fixture
def model(modelprobe):
    return modelprobe.build(Perceptron)


@pytest.fixture
def batches(modelprobe):
    """As many batches of 32 digits as there are steps."""
    pixels, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(pixels, dtype=torch.float32, device=modelprobe.device) / 16
    labels = torch.tensor(labels, device=modelprobe.device)
    return list(zip(pixels.split(32), labels.split(32), strict=True))[:STEPS]


def test_the_loss_falls_by_half(modelprobe, model, batches):
    losses = train(model, batches)
    assert losses[-1] < losses[0] / 2


def test_each_layer_is_called_once_in_each_step(modelprobe, model, batches):
    watch = modelprobe.watch(model)
    train(model, batches)
    assert_called(watch, per_forward=1)
    assert (watch.record.forwards, watch.record.backwards) == (STEPS, STEPS)


def test_nothing_overflows_or_dies_in_any_step(modelprobe, model, batches):
    watch = modelprobe.watch(model)
    train(model, batches)
    assert_finite(watch)
    assert_grad_finite(watch)
    assert_no_dead_layers(watch)
    print("", watch.record, "", sep="\n")


def test_the_gradient_flows_from_the_first_step_to_the_last(modelprobe, model, batches):
    watch = modelprobe.watch(model)
    train(model, batches)
    assert_grad_flow(watch.first, max_ratio=100)
    assert_grad_flow(watch.last, max_ratio=100)
    assert_all_params_have_grad(watch)


def test_the_gradient_of_the_head_shrinks_as_the_model_learns(modelprobe, model, batches):
    watch = modelprobe.watch(model)
    train(model, batches)
    first, last = (
        record.layers["head"].calls[0].outputs[0].backward.statistics for record in (watch.first, watch.last)
    )
    assert last.rms < first.rms


def test_accumulating_gradients_runs_a_backward_for_each_batch(modelprobe, model, batches):
    watch = modelprobe.watch(model)
    train(model, batches, accumulate=4)
    assert (watch.record.forwards, watch.record.backwards) == (STEPS, STEPS)
    assert_all_params_have_grad(watch)


def test_two_halves_take_two_passes_each_with_its_own_gradient(modelprobe, model, batches):
    pixels, labels = batches[0]
    with modelprobe.watch(model) as watch:
        for half in (slice(0, 16), slice(16, 32)):
            (functional.cross_entropy(model(pixels[half]), labels[half]) / 2).backward()
    assert_grad_flow(watch)
    assert watch.record.backwards == 2
    for parameter in watch.record["fc1"].parameters:
        assert parameter.gradient.tensors == 2  # one for each pass, not what has accumulated in .grad


def test_a_closed_watch_keeps_its_record_and_leaves_no_hook(modelprobe, model, batches):
    with modelprobe.watch(model) as watch:
        train(model, batches[:1])
    train(model, batches[1:])
    assert watch.record.forwards == 1
    assert_no_leftover_hooks(model)
