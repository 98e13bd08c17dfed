"""Spectral norms that are evaluated before their vectors are those of the weight, beside healthy twins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from pytest_modelprobe import ModelProbe, checks
from pytest_modelprobe.checks import Outcome

MAKERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(16, 16), (4, 16)),
    "convolution": (lambda: nn.Conv2d(3, 8, 3), (2, 3, 8, 8)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(3, 8, 3), (2, 3, 8, 8)),
}


def settled(model: nn.Module, *shape: int) -> Outcome:
    probe = ModelProbe()
    return checks.spectral_norms_settled.outcome(probe, model, probe.randn(*shape))


@pytest.mark.parametrize("name", MAKERS)
def test_an_older_norm_that_is_evaluated_before_training_is_named(name: str) -> None:
    torch.manual_seed(0)
    make, shape = MAKERS[name]
    model = nn.Sequential(nn.Identity(), spectral_norm(make()))
    found = settled(model, *shape)
    assert (found.verdict, found.layer) == ("broken", "1.weight")
    first, table, advice = found.text.split("\n\n")
    assert first.startswith("1.weight has a largest singular value of ")
    assert first.endswith(" in evaluation mode, where spectral_norm is to make it 1")
    assert table.splitlines()[0] == "weight     largest singular value"
    assert advice.startswith("Its vectors are not those of the weight: call the model in training mode before")


@pytest.mark.parametrize("name", MAKERS)
def test_an_older_norm_after_training_is_settled(name: str) -> None:
    torch.manual_seed(0)
    make, shape = MAKERS[name]
    model = spectral_norm(make())
    for _ in range(5):
        model.train()(torch.randn(shape))
    assert settled(model, *shape).text == "1 weight"


@pytest.mark.parametrize("name", MAKERS)
def test_the_parametrization_is_settled_at_once(name: str) -> None:
    torch.manual_seed(0)
    make, shape = MAKERS[name]
    assert settled(parametrizations.spectral_norm(make()), *shape).text == "1 weight"


def test_a_weight_that_is_initialized_after_its_norm_was_added_is_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(16, 16)))
    nn.init.normal_(model[0].parametrizations.weight.original)
    found = settled(model, 4, 16)
    assert (found.verdict, found.layer) == ("broken", "0.weight")


def test_a_model_without_spectral_norms_has_no_such_property() -> None:
    found = settled(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 4, 4)
    assert (found.verdict, found.text) == ("not applicable", "no weight that it uses has a spectral norm")


def test_a_norm_that_is_not_called_is_not_judged() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].spare = spectral_norm(nn.Linear(4, 4))
    assert settled(model, 4, 4).verdict == "not applicable"


def test_the_vectors_stay_as_they_were() -> None:
    model = spectral_norm(nn.Linear(16, 16))
    before = model.weight_u.clone(), model.weight_v.clone(), model.training
    settled(model, 4, 16)
    assert torch.equal(model.weight_u, before[0])
    assert torch.equal(model.weight_v, before[1])
    assert model.training is before[2]
