"""The first operation that differs, where the own code of a layer is a cause and both models are there."""

from __future__ import annotations

import re
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pytest_modelprobe import assert_same_behavior, checks
from pytest_modelprobe.comparison import compare

transformers = pytest.importorskip("transformers")

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def of_columns(module, query, key, value, mask, scaling, **kwargs):
    weights = torch.softmax(query @ key.transpose(2, 3) * scaling, dim=2)
    return (weights @ value).transpose(1, 2), weights


def fused(module, query, key, value, mask, scaling, **kwargs):
    return F.scaled_dot_product_attention(query, key, value, scale=2 * scaling).transpose(1, 2), None


def fused_and_scaled(module, query, key, value, mask, scaling, **kwargs):
    return F.scaled_dot_product_attention(2 * query, key, value).transpose(1, 2), None


def message(modelprobe, actual, expected, *given):
    with pytest.raises(AssertionError) as error:
        assert_same_behavior(modelprobe.run(actual, *given), modelprobe.run(expected, *given), structure=False)
    return str(error.value)


def line(function, number):
    return f"{function.__code__.co_filename.rpartition('/')[2]}:{function.__code__.co_firstlineno + number}"


@pytest.mark.parametrize(
    ("attention", "said"),
    [
        (of_columns, f"torch.softmax(dim=2) at {line(of_columns, 1)}, not torch.nn.functional.softmax(dim=-1"),
        (fused, f"(scale=0.707107) at {line(fused, 1)}, in place of 5 operations from torch.Tensor.transpose(2, 3) at"),
        (fused_and_scaled, None),  # two operations in place of five
    ],
)
def test_attention_of_a_vision_transformer(modelprobe, attention, said):
    def make(how):
        config = transformers.ViTConfig(**TINY, image_size=32, patch_size=8, attn_implementation=how)
        return modelprobe.build(lambda: transformers.ViTModel(config)).eval()

    transformers.AttentionInterface.register("of the test", attention)
    text = message(modelprobe, make("of the test"), make("eager"), modelprobe.randn(2, 3, 32, 32))
    assert text.startswith("layers.*.attention: own code changed")
    found = re.search(r"^First operation that differs: (.*)\.$", text, re.MULTILINE)
    assert (found is None) if said is None else said in found[1]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        up = self.up(x)
        return x + up * self.gate(x)


class Scaled(Block):
    def forward(self, x):
        up = self.up(x) / 2
        return x + up * self.gate(x)


class NoResidual(Block):
    def forward(self, x):
        return self.up(x) * self.gate(x)


class Nested(Block):
    def forward(self, x):
        up = self.up(x)
        return x + up * self.gate(up)


class Squared(Block):
    def forward(self, x):
        up = self.up(x)
        return x + up * up


class Masked(Block):
    def forward(self, x):
        least = torch.finfo(x.dtype).min
        return super().forward(x).masked_fill(torch.ones(8, 8, dtype=torch.bool).tril(), least).softmax(-1)


class MaskedAndScaled(Masked):
    def forward(self, x):
        least = torch.finfo(x.dtype).min
        return (1.01 * Block.forward(self, x)).masked_fill(torch.ones(8, 8, dtype=torch.bool).tril(), least).softmax(-1)


@pytest.mark.parametrize(
    ("actual", "expected", "said"),
    [
        (Scaled, Block, f"torch.Tensor.div(2) at {line(Scaled.forward, 1)}, which is new"),
        (NoResidual, Block, f"torch.Tensor.add at {line(Block.forward, 2)}, which is missing"),
        (
            Squared,
            Block,
            f"torch.Tensor.mul at {line(Squared.forward, 2)}, which takes another tensor than ",
        ),
        (MaskedAndScaled, Masked, f"torch.Tensor.mul(1.01) at {line(MaskedAndScaled.forward, 2)}, which is new"),
    ],
)
def test_one_operation_came_or_went(modelprobe, actual, expected, said):
    models = (modelprobe.build(kind) for kind in (actual, expected))
    assert f"First operation that differs: {said}" in message(modelprobe, *models, modelprobe.randn(8, 8))


class Rotated(Block):
    def forward(self, x):
        return self.rotated(self.up(x)) * self.rotated(self.gate(x))

    def rotated(self, x):
        return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


class RotatedByHalves(Rotated):
    def rotated(self, x):
        return torch.cat([-x[..., 1::2], x[..., ::2]], dim=-1)


def test_operations_in_place_of_others_all_over(modelprobe):
    text = message(modelprobe, *map(modelprobe.build, (RotatedByHalves, Rotated)), modelprobe.randn(8, 8))
    now, then = (line(kind.rotated, 1) for kind in (RotatedByHalves, Rotated))
    first = f"torch.cat(dim=-1) at {now}, in place of 2 operations from torch.stack(dim=-1) at {then} on."
    assert f"First operation that differs: {first}" in text


class Twice(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.step = step()

    def forward(self, x):
        return self.step(self.step(x), last=True)


class Step(nn.Module):
    def forward(self, x, last=False):
        return x.tanh() if last else x.sin()


class OtherStep(nn.Module):
    def forward(self, x, last=False):
        return x.sigmoid() if last else x.sin()


def test_a_later_call_of_a_layer(modelprobe):
    text = message(modelprobe, Twice(OtherStep), Twice(Step), modelprobe.randn(8, 8))
    now, then = (
        f"torch.Tensor.{name} at {line(kind.forward, 1)}" for name, kind in (("sigmoid", OtherStep), ("tanh", Step))
    )
    assert f"First operation that differs: {now}, not {then}." in text


def test_arguments_to_a_child_are_no_operation(modelprobe):
    text = message(modelprobe, modelprobe.build(Nested), modelprobe.build(Block), modelprobe.randn(8, 8))
    assert "own code" in text
    assert "First operation" not in text


def test_several_layers_are_named_apart(modelprobe):
    new, old = (
        nn.Sequential(modelprobe.build(a), modelprobe.build(b)) for a, b in ((Scaled, NoResidual), (Block, Block))
    )
    text = message(modelprobe, new, old, modelprobe.randn(8, 8))
    assert "First operation that differs in layer '0' (Scaled): torch.Tensor.div(2)" in text
    assert "First operation that differs in layer '1' (NoResidual): torch.Tensor.add" in text


class Guarded(Block):
    def forward(self, x):
        try:
            torch.linalg.cholesky(-torch.eye(8, dtype=x.dtype))
        except RuntimeError:
            x = x.sin()
        return super().forward(x) + 1


class GuardedMore(Guarded):
    def forward(self, x):
        return super().forward(x) * 2


def test_an_operation_that_raises_is_none(modelprobe):
    text = message(modelprobe, modelprobe.build(GuardedMore), modelprobe.build(Guarded), modelprobe.randn(8, 8))
    assert f"First operation that differs: torch.Tensor.mul(2) at {line(GuardedMore.forward, 1)}, which is new" in text


class OnlyInFloat32(Block):
    def forward(self, x):
        if x.dtype != torch.float32:
            raise ValueError("no kernel")
        return super().forward(x) * 2


def test_a_call_that_raises_in_float64_tells_nothing(modelprobe):
    models = (modelprobe.build(kind) for kind in (OnlyInFloat32, Scaled))
    text = message(modelprobe, *models, modelprobe.randn(8, 8))
    assert "own code" in text
    assert "First operation" not in text


class Limited(nn.Module):
    def forward(self, x, most=100):
        return x.clamp(-most, most).sin()


class LimitedMore(Limited):
    def forward(self, x):
        return super().forward(x, 0.5)


def test_an_operation_that_changed_nothing_before_is_not_new(modelprobe):
    text = message(modelprobe, LimitedMore(), Limited(), modelprobe.randn(8, 8))
    at = line(Limited.forward, 1)
    assert f"differs: torch.Tensor.clamp(-0.5, 0.5) at {at}, not torch.Tensor.clamp(-100, 100) at {at}." in text


def test_a_record_without_its_model_says_nothing(modelprobe):
    x = modelprobe.randn(8, 8)
    new, old = modelprobe.run(modelprobe.build(Scaled), x), modelprobe.run(modelprobe.build(Block), x)
    assert compare(new, old).same is False
    stored = type(old).from_dict(old.to_dict())
    with pytest.raises(AssertionError) as error:
        assert_same_behavior(new, stored, structure=False)
    assert "First operation" not in str(error.value)


def test_a_watch_is_looked_at_too(modelprobe):
    x, records = modelprobe.randn(8, 8), []
    for kind in (Scaled, Block):
        model = modelprobe.build(kind)
        watch = modelprobe.watch(model)
        model(x)
        records.append(watch)
    with pytest.raises(AssertionError, match=r"First operation that differs: torch\.Tensor\.div\(2\)"):
        assert_same_behavior(*records, structure=False)


class Written(nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8)), eps

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


def test_a_pair_of_two_implementations(modelprobe):
    port = nn.Sequential(nn.Linear(8, 8), Written(eps=1e-2), nn.ReLU())
    reference = nn.Sequential(OrderedDict(fc=nn.Linear(8, 8), norm=nn.LayerNorm(8), act=nn.ReLU()))
    reference.fc.load_state_dict(port[0].state_dict())
    x = modelprobe.randn(4, 8)
    with pytest.raises(AssertionError) as error:
        assert_same_behavior(modelprobe.run(port, x), modelprobe.run(reference, x), pair="structure")
    text = str(error.value)
    assert text.startswith("layer '1' (Written) does not compute what norm does: ")
    first = f"torch.Tensor.mean(-1, keepdim=True) at {line(Written.forward, 1)}"
    in_place = "the first of 7 operations in place of torch.nn.functional.layer_norm(8)"
    assert f"First operation that differs: {first}, {in_place}" in text


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        memory = torch.empty(x.shape)  # what it holds at first differs too, and has no effect
        return memory.copy_(x) + torch.rand(x.shape, generator=self.generator)


def test_a_run_that_does_not_repeat(modelprobe):
    with pytest.raises(AssertionError) as error:
        checks.deterministic(modelprobe, nn.Sequential(nn.Linear(8, 8), Noise()), modelprobe.randn(4, 8))
    operation = f"torch.rand(4, 8, generator=Generator) at {line(Noise.forward, 2)}"
    assert f"The first operation whose result differs: {operation}. Look for a random generator" in str(error.value)
