"""Elements of a weight that a clamp keeps from learning, and healthy weights many elements of which get no gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.utils import prune

from pytest_modelprobe import ModelProbe, Record, Watch
from pytest_modelprobe.assertions.findings import hints

DIGITS = load_digits()
PROBE = ModelProbe()
SAID = "clamped, largest or smallest elements without a gradient in any pass after the first: "


def quantized(weight: Tensor, most: Tensor, *, ends: bool) -> Tensor:
    """Return a weight of 3 bits. Its gradient passes straight through; with ``ends`` only up to the clamp."""
    clamped = torch.minimum(torch.maximum(weight, -most), most)
    learns = clamped if ends else weight
    return learns + ((clamped / most * 3).round() / 3 * most - learns).detach()


class QuantizedLinear(nn.Linear):
    ends = True

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, quantized(self.weight, torch.tensor(0.015), ends=self.ends), self.bias)


class QuantizedConv(nn.Conv2d):
    """Each channel has a clamp of its own."""

    ends = True

    def forward(self, x: Tensor) -> Tensor:
        most = self.weight.detach().abs().mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, quantized(self.weight, most, ends=self.ends), self.bias, padding=1)


def digits_model(conv: type[nn.Conv2d] = nn.Conv2d, linear: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    return PROBE.build(
        lambda: nn.Sequential(
            conv(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), linear(1024, 32), nn.ReLU(), nn.Linear(32, 10)
        )
    )


def trained(model: nn.Module, *, steps: int = 4, batch: int = 32) -> Record:
    images, labels = torch.tensor(DIGITS.images / 16, dtype=torch.float32)[:, None], torch.tensor(DIGITS.target)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Watch(model) as watch:
        for step in range(steps):
            some = slice(step * batch, (step + 1) * batch)
            optimizer.zero_grad()
            F.cross_entropy(model(images[some]), labels[some]).backward()
            optimizer.step()
    return watch.record


@pytest.mark.parametrize(
    ("layer", "kinds"), [("0", {"conv": QuantizedConv}), ("3", {"linear": QuantizedLinear})], ids=["conv", "linear"]
)
def test_elements_beyond_a_clamp_are_a_hint_and_the_twin_whose_gradient_passes_it_has_none(
    layer: str, kinds: dict[str, type[nn.Module]]
) -> None:
    model = digits_model(**kinds)  # type: ignore[arg-type]
    (said,) = hints(trained(model))
    assert said.startswith(f"{SAID}{layer}.weight ")
    model = digits_model(**kinds)  # type: ignore[arg-type]
    model.get_submodule(layer).ends = False  # type: ignore[assignment]
    assert [one for one in hints(trained(model)) if one.startswith(SAID)] == []


def test_a_weight_that_is_moved_or_freed_after_the_training_is_not_looked_at() -> None:
    model = digits_model(linear=QuantizedLinear)
    with Watch(model) as watch:
        for _ in range(2):
            model(torch.ones(2, 1, 8, 8)).square().mean().backward()
    model[3].weight.untyped_storage().resize_(0)
    assert watch.record["3"].parameters[0].clamped == 0
    model[3] = model[3].to("meta")
    assert watch.record["3"].parameters[0].clamped == 0


def pruned() -> nn.Module:
    model = digits_model()
    for layer in (model[3], model[5]):
        prune.random_unstructured(layer, "weight", 0.6)
    return model


def pruned_by_size() -> nn.Module:
    model = digits_model()
    for layer in (model[3], model[5]):
        prune.l1_unstructured(layer, "weight", 0.6)
    return model


class Masked(nn.Linear):
    """As in MADE: an output depends on the inputs before it."""

    def forward(self, x: Tensor) -> Tensor:
        last = (torch.arange(self.out_features) + 1) * self.in_features // self.out_features
        return F.linear(x, self.weight * (torch.arange(self.in_features) < last[:, None]), self.bias)


def masked() -> nn.Module:
    return digits_model(linear=Masked)


class Bag(nn.Module):
    """An embedding of pixels, few of which occur, and a last layer that sees few of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(500, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.embedding((x * 16).long().flatten(1)).mean(1)))


class Tap(nn.Sequential):
    """A convolution with padding on a map of one pixel: only the middle of its kernel is used."""

    def __init__(self) -> None:
        super().__init__(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 10)
        )


@pytest.mark.parametrize("batch", [1, 2, 32])
@pytest.mark.parametrize("make", [digits_model, pruned, pruned_by_size, masked, Bag, Tap])
def test_other_zeros_are_healthy(make: type[nn.Module], batch: int) -> None:
    assert [one for one in hints(trained(make(), batch=batch)) if one.startswith(SAID)] == []


def test_experts_that_few_tokens_reach_are_healthy() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    record = PROBE.run(transformers.MixtralForCausalLM(config), torch.randint(3, 64, (1, 3)), loss="random")
    assert [one for one in hints(record) if one.startswith(SAID)] == []
