"""Adapters of a small BERT, right ones and each with one fault."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from pytest_modelprobe import ModelProbe, checks
from pytest_modelprobe.exceptions import HintWarning

CONFIG = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=99)
FIRST = "encoder.layer.0.attention.self.query"


class LoRA(nn.Module):
    """A linear layer with an adapter that is zero at first."""

    def __init__(self, linear: nn.Linear, scaling: float = 2.0) -> None:
        super().__init__()
        self.linear, self.scaling = linear, scaling
        self.A = nn.Parameter(torch.randn(4, linear.in_features) / 4)
        self.B = nn.Parameter(torch.zeros(linear.out_features, 4))
        self.on = True

    @property
    def weight(self) -> Tensor:
        return self.linear.weight + self.scaling * self.B @ self.A if self.on else self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out + self.scaling * F.linear(F.linear(x, self.A), self.B) if self.on else out


class DoRA(LoRA):
    """Scales each row of the weight to a norm of its own."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.magnitude = nn.Parameter(linear.weight.detach().norm(dim=1, keepdim=True))

    @property
    def weight(self) -> Tensor:
        weight = super().weight
        return self.magnitude * weight / weight.detach().norm(dim=1, keepdim=True) if self.on else weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.linear.bias)


class Bottleneck(nn.Module):
    """Follows a layer and adds to what it returns."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Linear(16, 2), nn.Linear(2, 16)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        out: Tensor = y + self.up(F.gelu(self.down(y)))
        return out


class Unregistered(LoRA):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        del self.B
        self.B = torch.zeros(linear.out_features, 4, requires_grad=True)


def attach(model: Any, kind: Callable[[Any], nn.Module] = LoRA, *, frozen: bool = True) -> None:
    model.requires_grad_(not frozen)
    for layer in model.encoder.layer:
        attention = layer.attention.self
        attention.query, attention.value = kind(attention.query), kind(attention.value)


def adapters(model: nn.Module) -> Iterator[LoRA]:
    return (module for module in model.modules() if isinstance(module, LoRA))


def merge(model: nn.Module) -> None:
    for adapter in adapters(model):
        adapter.linear.weight.data = adapter.weight.detach()
        adapter.on = False


def merge_without_scaling(model: nn.Module) -> None:
    for adapter in adapters(model):
        adapter.scaling = 1.0
    merge(model)


def merge_twice(model: nn.Module) -> None:
    for adapter in adapters(model):
        adapter.linear.weight.data += adapter.scaling * adapter.B @ adapter.A  # and it still adds it in its forward


def disable(model: nn.Module) -> None:
    for adapter in adapters(model):
        adapter.on = False


def reload(model: nn.Module, base: nn.Module, *, scaling: float = 2.0) -> None:
    attach(base, functools.partial(LoRA, scaling=scaling))
    base.load_state_dict(
        {name: p for name, p in model.state_dict().items() if name.endswith((".A", ".B"))}, strict=False
    )


@pytest.fixture
def outcome(modelprobe: ModelProbe) -> Callable[..., checks.Outcome]:
    model = modelprobe.build(lambda: BertModel(CONFIG))
    return functools.partial(_outcome, modelprobe, model)


def _outcome(probe: ModelProbe, model: nn.Module, attach: Any = attach, **options: Any) -> checks.Outcome:
    return checks.adapter.outcome(probe, model, attach, probe.randint(0, 99, (2, 6)), **options)


@pytest.mark.parametrize("kind", [LoRA, DoRA])
def test_a_right_adapter_holds(outcome: Callable[..., checks.Outcome], kind: type[LoRA]) -> None:
    found = outcome(lambda model: attach(model, kind), merge=merge, disable=disable)
    parameters = 8 if kind is LoRA else 12
    assert found.text == f"{parameters} parameters in 4 layers, the same after reload, merge and disable"


def test_what_is_not_given_is_said(outcome: Callable[..., checks.Outcome]) -> None:
    found = outcome(lambda model: attach(model, lambda linear: Bottleneck(linear)))
    assert found.text == "16 parameters in 4 layers, the same after reload; not given: merge and disable"


@pytest.mark.parametrize("wrong", [merge_without_scaling, merge_twice])
def test_a_wrong_merge_is_named(outcome: Callable[..., checks.Outcome], wrong: Callable[[nn.Module], None]) -> None:
    found = outcome(merge=wrong)
    assert (found.verdict, found.layer) == ("broken", FIRST)
    assert found.text.startswith(f"{FIRST} returns another output after merge: changed by ")


def test_a_matrix_that_is_not_registered_is_named(outcome: Callable[..., checks.Outcome]) -> None:
    found = outcome(lambda model: attach(model, Unregistered))
    assert found.text.startswith(f"{FIRST}.B is trained, but the model has not registered it: ")


def test_a_model_that_is_not_frozen_is_named(outcome: Callable[..., checks.Outcome]) -> None:
    found = outcome(lambda model: attach(model, frozen=False))
    assert (found.verdict, found.layer) == ("broken", f"{FIRST}.linear.weight")
    assert " gets a gradient, though it is of the model without the adapter\n" in found.text


def test_a_norm_that_is_trained_too_is_a_hint(outcome: Callable[..., checks.Outcome]) -> None:
    def with_norms(model: Any) -> None:
        attach(model)
        model.embeddings.LayerNorm.requires_grad_()

    found = outcome(with_norms, merge=merge)
    assert (found.verdict, found.layer) == ("hint", "embeddings.LayerNorm.weight")


def test_an_adapter_that_no_code_calls_is_named(outcome: Callable[..., checks.Outcome]) -> None:
    def beside(model: Any) -> None:
        attach(model)
        dense = model.encoder.layer[1].output.dense
        dense.lora = nn.Linear(32, 16)

    found = outcome(beside)
    assert found.verdict == "broken"
    assert found.text.startswith(
        "encoder.layer.1.output.dense.lora.weight gets no gradient: encoder.layer.1.output.dense does not use it\n"
    )


def test_an_adapter_of_a_layer_that_is_not_called_is_a_hint_beside_others(modelprobe: ModelProbe) -> None:
    model = modelprobe.build(lambda: BertModel(CONFIG))
    model.head = nn.Linear(16, 2)

    def of_head(copy: Any, *, alone: bool = False) -> None:
        copy.requires_grad_(False) if alone else attach(copy)
        copy.head = LoRA(copy.head)

    found = _outcome(modelprobe, model, of_head)
    assert (found.verdict, found.layer) == ("hint", "head.A")
    assert found.text.startswith("head.A gets no gradient: head is not called\n")
    assert _outcome(modelprobe, model, functools.partial(of_head, alone=True)).verdict == "broken"


def test_an_adapter_with_a_factor_of_zero_has_no_effect(outcome: Callable[..., checks.Outcome]) -> None:
    found = outcome(lambda model: attach(model, functools.partial(LoRA, scaling=0.0)))
    assert found.text.startswith(
        f"{FIRST} has an adapter without an effect: the model computes the same without it\n\n"
    )


def test_a_scaling_that_is_lost_after_loading_is_named(outcome: Callable[..., checks.Outcome]) -> None:
    assert outcome(reload=reload, merge=merge).verdict == "holds"
    found = outcome(reload=functools.partial(reload, scaling=1.0), merge=merge)
    assert found.text.startswith(f"{FIRST} returns another output after reload: changed by ")


def test_a_frozen_adapter_is_looked_at_as_it_is(outcome: Callable[..., checks.Outcome]) -> None:
    def frozen(model: Any, std: float = 1.0) -> None:
        attach(model)
        for adapter in adapters(model):
            nn.init.normal_(adapter.B, std=std)
        model.requires_grad_(False)

    found = outcome(frozen, merge=merge, disable=disable)
    assert found.text == "8 parameters that are all frozen in 4 layers, the same after reload, merge and disable"
    assert outcome(functools.partial(frozen, std=0.0)).text.startswith(f"{FIRST} has an adapter without an effect: ")


def test_a_hint_is_a_warning(modelprobe: ModelProbe) -> None:
    model = modelprobe.build(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))

    def with_head(copy: Any) -> Any:
        copy[0].requires_grad_(False)
        copy[0] = LoRA(copy[0])

    with pytest.warns(HintWarning, match=r"^adapter: 1.weight gets a gradient, though"):
        checks.adapter(modelprobe, model, with_head, modelprobe.randn(3, 4))
