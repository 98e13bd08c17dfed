"""A model after a change: folded, quantized, taken out of a wrapper, each beside a faulty twin."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.fusion import fuse_conv_bn_eval
from transformers import BertConfig, BertModel

from pytest_modelprobe import ModelProbe, UsageError, checks


@pytest.fixture
def probe() -> ModelProbe:
    torch.manual_seed(0)  # of weights
    return ModelProbe()


def trained(model: nn.Module) -> nn.Module:
    """Give the norms statistics and factors as of training."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
                module.weight.uniform_(0.5, 2)
                module.bias.normal_()
    return model


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, eps=1e-3), nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, eps=1e-3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def folded(model: nn.Sequential, fault: Callable[[nn.BatchNorm2d], Any] = lambda norm: None) -> nn.Module:
    fault(model[4])
    for i in (0, 3):
        model[i], model[i + 1] = fuse_conv_bn_eval(model[i], model[i + 1]), nn.Identity()
    return model


def test_folded_norms_compute_the_same(probe: ModelProbe) -> None:
    model = trained(probe.build(convolutions))
    found = checks.same_function(probe, model, folded, probe.randn(2, 1, 8, 8))
    assert str(found).startswith("same_function holds for Sequential: 1 output after change in float64, changed by")
    assert isinstance(model[1], nn.BatchNorm2d)


def without_mean(norm: nn.BatchNorm2d) -> None:
    norm.running_mean.zero_()


def without_eps(norm: nn.BatchNorm2d) -> None:
    norm.eps = 0.0


@pytest.mark.parametrize("fault", [without_mean, without_eps])
def test_the_layer_is_named_whose_norm_is_folded_wrongly(
    probe: ModelProbe, fault: Callable[[nn.BatchNorm2d], Any]
) -> None:
    model = trained(probe.build(convolutions))
    found = checks.same_function.outcome(probe, model, lambda copy: folded(copy, fault), probe.randn(2, 1, 8, 8))
    assert found.layer == "3"  # the output of the first convolution differs too, as it should
    first = re.escape("layer '3' (Conv2d) returns another output after change: changed by ")
    assert re.match(rf"{first}[\d.,]+ %; \(root\) output by [\d.]+ %\n", found.text)


def normed() -> nn.Module:
    return nn.Sequential(*(parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(3)))


@pytest.mark.parametrize("leaves", [True, False])
def test_a_weight_norm_that_is_removed_leaves_its_weight(probe: ModelProbe, leaves: bool) -> None:
    model = probe.build(normed)
    with torch.no_grad():
        model[1].parametrizations.weight.original0.mul_(1.5)

    def remove(copy: Any) -> None:
        for i, layer in enumerate(copy):
            parametrize.remove_parametrizations(layer, "weight")
            if i == 1 and not leaves:
                layer.weight.data.div_(1.5)

    found = checks.same_function.outcome(probe, model, remove, probe.randn(4, 8))
    assert (found.verdict, found.layer) == (("holds", None) if leaves else ("broken", "1"))


@pytest.mark.parametrize(("levels", "layer"), [(127, None), (3, "pooler.dense")])
def test_quantized_weights_are_within_a_stated_error(probe: ModelProbe, levels: int, layer: str | None) -> None:
    config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=99)
    model = probe.build(lambda: BertModel(config))

    def quantize(copy: nn.Module) -> None:
        for module in copy.modules():
            if isinstance(module, nn.Linear):
                scale = module.weight.detach().abs().amax(1, keepdim=True) / levels
                module.weight.data = (module.weight / scale).round() * scale

    found = checks.same_function.outcome(probe, model, quantize, probe.randint(0, 99, (2, 6)), tolerance=0.02)
    assert found.layer == layer, found.text
    assert checks.same_function.outcome(probe, model, quantize, probe.randint(0, 99, (2, 6))).verdict == "broken"


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out


@pytest.mark.parametrize("out_of_it", [True, False])
def test_a_layer_is_named_though_the_model_is_wrapped(probe: ModelProbe, out_of_it: bool) -> None:
    inner = probe.build(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model = Wrapped(inner) if out_of_it else inner

    def change(copy: Any, factor: float = 1.0) -> Any:
        (copy.model if out_of_it else copy)[1].weight.data.mul_(factor)
        return copy.model if out_of_it else Wrapped(copy)

    x = probe.randn(3, 4)
    assert checks.same_function(probe, model, change, x)
    found = checks.same_function.outcome(probe, model, lambda copy: change(copy, 1.1), x)
    assert found.layer == ("model.1" if out_of_it else "1")


def test_what_the_model_alone_computes_is_named_by_the_root(probe: ModelProbe) -> None:
    class Doubled(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    found = checks.same_function.outcome(probe, nn.Sequential(nn.Linear(4, 4)), Doubled, probe.randn(3, 4))
    assert found.text.startswith("(root) returns another output after change: changed by 100 %")


def test_a_change_of_another_model_is_said_to_change_nothing(probe: ModelProbe) -> None:
    model = nn.Linear(4, 4)

    def change(copy: nn.Module) -> None:
        model.weight.data.mul_(2)

    found = checks.same_function(probe, model, change, probe.randn(3, 4))
    assert found.text.endswith("changed by at most 0 %; change changed no layer and no weight")


def test_what_is_no_change_is_refused(probe: ModelProbe) -> None:
    model, x = nn.Linear(4, 4), probe.randn(3, 4)
    with pytest.raises(UsageError, match="change is a function that takes a model; got Tensor"):
        checks.same_function(probe, model, x, x)
    with pytest.raises(UsageError, match=r"change returns a torch.nn.Module; got Parameter"):
        checks.same_function(probe, model, lambda copy: copy.weight, x)
