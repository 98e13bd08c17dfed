"""Assertions on where attention looks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from pytest_modelprobe import (
    ModelProbe,
    NothingObservedError,
    Record,
    UsageError,
    assert_attention_entropy,
    assert_attention_mask,
)
from pytest_modelprobe.capture import attention

PROBE = ModelProbe()
X = PROBE.randn(2, 6, 16)
CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril()
PADDING = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


class Attention(nn.Module):
    """Self-attention with two heads, whose core is given."""

    def __init__(self, core: object) -> None:
        super().__init__()
        self.qkv, self.core = nn.Linear(16, 48), core

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.core(q, k, v).transpose(1, 2).flatten(2)


def scores(q, k):
    return q @ k.mT / math.sqrt(8)


def by_softmax(q, k, v):
    return F.softmax(scores(q, k).masked_fill(~CAUSAL, -math.inf), dim=-1) @ v


def by_method(q, k, v):
    return (scores(q, k) + torch.zeros(6, 6).masked_fill(~CAUSAL, -1e4)).softmax(-1) @ v


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def fused_with_added_mask(q, k, v):
    added = torch.zeros(6, 6).masked_fill(~CAUSAL, torch.finfo(torch.float32).min)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=added, dropout_p=0.5)


CORES = [by_softmax, by_method, fused, fused_with_added_mask]


def build(core: object) -> nn.Module:
    return PROBE.build(lambda: nn.Sequential(nn.LayerNorm(16), Attention(core)))


def record(core: object, x: torch.Tensor = X) -> Record:
    return PROBE.run(build(core), x, attention=True)


def multihead(**kwargs: object) -> Record:
    attention = PROBE.build(lambda: nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True))
    return PROBE.run(attention, X, X, X, kwargs=kwargs, attention=True)


def expected_entropy(core_scores: torch.Tensor) -> list[float]:
    weights = core_scores.double().masked_fill(~CAUSAL, -math.inf).softmax(-1)
    shares = torch.special.entr(weights).sum(-1)[..., 1:] / torch.arange(2, 7).double().log()
    return shares.mean((0, 2)).tolist()


# --- what is read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("core", CORES)
def test_entropy_and_largest_weights_are_those_of_the_formula(core) -> None:
    model = build(core)
    q, k, _ = model[1].qkv(model[0](X)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    (attention,) = PROBE.run(model, X, attention=True)["1"].calls[0].attention
    weights = scores(q, k).masked_fill(~CAUSAL, -math.inf).softmax(-1).amax(1)
    assert attention.shape == (2, 6, 6)
    assert attention.entropy == pytest.approx(expected_entropy(scores(q, k)), rel=1e-5)
    assert attention.most == pytest.approx(weights.flatten().tolist(), abs=1e-6)


def test_keys_shared_by_heads_are_repeated() -> None:
    class Grouped(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)

    q, k = PROBE.randn(2, 4, 6, 8, name="q"), PROBE.randn(2, 2, 6, 8, name="k")
    (attention,) = PROBE.run(Grouped(), q, k, attention=True)["(root)"].calls[0].attention
    assert attention.entropy == pytest.approx(expected_entropy(scores(q, k[:, [0, 0, 1, 1]])), rel=1e-5)


def test_on_a_device_queries_and_keys_are_multiplied_without_a_matrix_product() -> None:
    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert "mm" not in func.overloadpacket.__name__
            return func(*args, **kwargs or {})

    q, k = torch.empty(2, 4, 6, 8, device="meta"), torch.empty(2, 2, 6, 8, device="meta")
    with Operations():
        found = attention._of_fused(q, k, k, is_causal=True, enable_gqa=True)
    assert found.most.shape == (2, 6, 6)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_attention_on_cuda_is_that_of_the_cpu() -> None:
    def found(device: str) -> list[object]:
        probe = ModelProbe(device=device, seed=0)
        model = probe.build(lambda: nn.Sequential(Attention(fused), nn.MultiheadAttention(16, 2), nn.Identity()))
        model.forward = lambda x: model[2](model[1](*[model[0](x)] * 3, need_weights=False)[0])
        record = probe.run(model, probe.randn(2, 6, 16), attention=True)
        return [one for _, call in record.calls for one in call.attention]

    here, there = found("cpu"), found("cuda")
    assert [(one.shape, one.kind) for one in here] == [(one.shape, one.kind) for one in there]
    for mine, theirs in zip(here, there, strict=True):
        assert mine.entropy == pytest.approx(theirs.entropy, rel=1e-4)
        assert mine.most == pytest.approx(theirs.most, abs=1e-5)


def test_a_layer_that_is_asked_keeps_its_own_answer_and_its_random_numbers() -> None:
    attention = PROBE.build(lambda: nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True))
    plain, looked_at = (PROBE.run(attention, X, X, X, attention=a) for a in (False, True))
    assert plain["(root)"].output.forward == looked_at["(root)"].output.forward


def test_forwards_merge() -> None:
    model = build(fused)
    with PROBE.watch(model, attention=True) as watch:
        model(X)
        model(2 * X.flip(0))
    first, both = watch.first["1"].calls[0].attention[0], watch.record["1"].calls[0].attention[0]
    last = watch.last["1"].calls[0].attention[0]
    assert both.entropy == pytest.approx([(a + b) / 2 for a, b in zip(first.entropy, last.entropy, strict=True)])
    assert both.most == tuple(map(max, first.most, last.most))
    with PROBE.watch(model, attention=True) as watch:  # of another length, the newest stays
        model(X)
        model(X[:, :4])
    assert watch.record["1"].calls[0].attention[0].shape == (2, 4, 4)


# --- what makes it attention --------------------------------------------------------------------------------------


def turned(q, k, v):
    return F.softmax(scores(q, k), dim=-2) @ v


def by_einsum(q, k, v):
    return torch.einsum("bhqk,bhkd->bhqd", F.softmax(scores(q, k), dim=-1), v)


def keys_first(q, k, v):
    return (k @ q.mT / math.sqrt(8)).softmax(dim=-2).transpose(-2, -1) @ v


def dropped_and_folded(q, k, v):
    weights = F.dropout(F.softmax(scores(q, k), dim=-1, dtype=torch.float64).float(), 0.1).view(4, 6, 6)
    return torch.bmm(weights, v.reshape(4, 6, 8)).view(2, 2, 6, 8)


@pytest.mark.parametrize("core", [by_einsum, dropped_and_folded])
def test_weights_are_followed_to_where_they_are_multiplied(core) -> None:
    found = record(core)
    assert [a.kind for a in found["1"].calls[0].attention] == ["attention"]
    assert_attention_entropy(found)
    assert not record(keys_first)["1"].calls[0].attention


class Router(nn.Module):
    """Mixes experts, each token its own, and gives out probabilities of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts, self.head = nn.Linear(16, 4), nn.Linear(16, 64), nn.Linear(16, 6)
        self.table = nn.Embedding(6, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates, experts = F.softmax(self.gate(x), dim=-1), self.experts(x).unflatten(-1, (4, 16))
        mixed = (gates.unsqueeze(-2) @ experts).squeeze(-2) + (gates.unsqueeze(-1) * experts).sum(-2)
        mixed = mixed + torch.einsum("bse,bsed->bsd", gates, experts)
        return F.softmax(self.head(mixed), dim=-1) @ self.table.weight


def test_a_router_and_a_vocabulary_are_no_attention() -> None:
    found = PROBE.run(Router(), X, attention=True)
    assert [a.kind for a in found["(root)"].calls[0].attention] == ["probabilities"] * 2
    with pytest.raises(
        NothingObservedError, match=r"no softmax was multiplied with values .*select the attention layers with layers="
    ):
        assert_attention_entropy(found)
    assert_attention_entropy(found, layers="(root)")


def test_probabilities_given_out_are_no_attention_unless_named() -> None:
    found = PROBE.run(nn.Sequential(nn.Linear(16, 5), nn.Softmax(dim=-1)), 100 * X, attention=True)
    with pytest.raises(NothingObservedError, match=r"layer '1' \(Softmax\) may be the weights of a router"):
        assert_attention_entropy(found)
    with pytest.raises(AssertionError, match=r"head 0 of layer '1' \(Softmax\) attends to one key alone"):
        assert_attention_entropy(found, layers="1", low=0.9)


def test_a_softmax_over_the_wrong_axis_is_reported() -> None:
    for dim in (0, 1):  # the batch, the heads
        found = record(lambda q, k, v, dim=dim: F.softmax(scores(q, k), dim=dim) @ v)
        with pytest.raises(AssertionError, match="takes its softmax over another axis"):
            assert_attention_entropy(found)
    with pytest.raises(AssertionError) as caught:
        assert_attention_entropy(record(turned))
    assert str(caught.value) == (
        "layer '1' (Attention) takes its softmax over another axis than that along which it multiplies values; "
        "1 of 1 softmax looked at\n\nlayer\nlayer '1' (Attention)\n\nThe weights of a query do not sum to 1: "
        "take the softmax over the keys, usually dim=-1. If this is intended, as in slot attention, exclude the layer "
        "with layers=."
    )


# --- entropy ------------------------------------------------------------------------------------------------------


def test_a_missing_scale_is_named() -> None:
    def unscaled(q, k, v):
        return F.scaled_dot_product_attention(40 * q, 40 * k, v, scale=1.0)

    with pytest.raises(AssertionError) as caught:
        assert_attention_entropy(record(unscaled), low=0.2)
    assert str(caught.value).startswith("head 0 of layer '1' (Attention) attends to one key alone: its entropy is ")
    assert "1/sqrt(d)" in str(caught.value)


def test_heads_that_learnt_nothing_are_named() -> None:
    model = build(fused)
    with torch.no_grad():
        model[1].qkv.weight[:8] = 0
        model[1].qkv.bias[:8] = 0
    with pytest.raises(
        AssertionError, match=r"head 0 of layer '1' \(Attention\) attends to all keys equally: its entropy is 100\.00%"
    ):
        assert_attention_entropy(PROBE.run(model, X, attention=True), high=0.999)


def plain(q, k, v):
    return F.softmax(scores(q, k), -1) @ v


def test_what_has_no_entropy_is_no_pass() -> None:
    with pytest.raises(AssertionError, match=r"head 0 of layer '1' \(Attention\) has NaN weights"):
        assert_attention_entropy(record(lambda q, k, v: plain(q * math.nan, k, v)))
    with pytest.raises(NothingObservedError, match="no query has two keys"):
        assert_attention_entropy(record(plain, X[:, :1]))
    with pytest.raises(UsageError, match="shares of the maximum entropy"):
        assert_attention_entropy(record(fused), low=0.5, high=0.4)
    with pytest.raises(NothingObservedError, match=r"record with run\(\.\.\., attention=True\)"):
        assert_attention_mask(PROBE.run(build(fused), X), causal=True)


# --- mask ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("core", [by_method, fused])
def test_causal_attention_keeps_to_it(core) -> None:
    assert_attention_mask(record(core), causal=True, exact=True)


def test_a_mask_one_diagonal_too_wide_is_named() -> None:
    def too_wide(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(6, 6, dtype=torch.bool).tril(1))

    with pytest.raises(AssertionError) as caught:
        assert_attention_mask(record(too_wide), causal=True)
    assert str(caught.value).startswith("layer '1' (Attention) does not follow the mask: query ")
    assert "which is masked; 1 of 1 layer looked at" in str(caught.value)
    assert str(caught.value).splitlines()[3].endswith(" 10")  # weights wrong: five rows of two examples


def test_a_mask_one_diagonal_too_narrow_is_seen_if_exact() -> None:
    def too_narrow(q, k, v):
        return F.softmax(scores(q, k).masked_fill(~CAUSAL.roll(1, 0), -1e9), dim=-1) @ v

    def narrower(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=CAUSAL & ~torch.eye(6, dtype=torch.bool).roll(1, 0))

    assert_attention_mask(record(narrower), causal=True)
    with pytest.raises(AssertionError, match="gives zero weight to key"):
        assert_attention_mask(record(narrower), causal=True, exact=True)
    for core in (too_narrow, lambda q, k, v: F.softmax(scores(q, k), dim=-1) * CAUSAL @ v):  # or after the softmax
        with pytest.raises(AssertionError, match="gives weight"):
            assert_attention_mask(record(core), causal=True)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_gpt2_keeps_to_padding_and_order(implementation) -> None:
    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0,
        attn_implementation=implementation,
    )  # fmt: skip
    ids = PROBE.randint(0, 50, (2, 6))
    found = PROBE.run(GPT2LMHeadModel(config).eval(), ids, attention_mask=PADDING, attention=True)
    assert_attention_mask(found, PADDING, causal=True, exact=True)
    assert_attention_mask(found, (PADDING[:, None, None, :] * CAUSAL).bool())


def test_an_ignored_padding_mask_is_named() -> None:
    config = BertConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)
    found = PROBE.run(BertModel(config).eval(), PROBE.randint(0, 50, (2, 6)), attention=True)
    with pytest.raises(AssertionError, match=r"^encoder\.layer\.0\.attention\.self does not follow .* of example 1"):
        assert_attention_mask(found, PADDING)


def test_multihead_attention_keeps_to_its_masks() -> None:
    found = multihead(attn_mask=~CAUSAL, key_padding_mask=PADDING == 0)
    assert_attention_mask(found, PADDING, causal=True, exact=True)
    with pytest.raises(AssertionError, match="gives weight"):
        assert_attention_mask(multihead(), causal=True)


def test_multihead_attention_may_add_keys_of_its_own() -> None:
    attention = nn.MultiheadAttention(16, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True)
    found = PROBE.run(attention, X, X, X, attn_mask=~CAUSAL, attention=True)
    assert found["(root)"].calls[0].attention[0].shape == (2, 6, 8)
    assert_attention_entropy(found)


def test_heads_folded_into_the_batch_share_the_mask_of_their_example() -> None:
    def folded(q, k, v):
        weights = F.softmax(scores(q, k).flatten(0, 1).masked_fill(mask, -math.inf), dim=-1)
        return weights.unflatten(0, (2, 2)) @ v

    mask = (PADDING == 0).repeat_interleave(2, 0)[:, None, :]
    assert_attention_mask(record(folded), PADDING, exact=True)


def test_later_queries_alone_stand_at_the_last_keys() -> None:
    def cached(q, k, v):
        return F.scaled_dot_product_attention(q[:, :, 4:], k, v, attn_mask=CAUSAL[4:])

    assert_attention_mask(record(cached), causal=True, exact=True)


def test_a_query_with_no_key_left_is_left_out() -> None:
    left_padded = torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)

    def padded(q, k, v):
        return F.softmax(scores(q, k).masked_fill(~(CAUSAL & left_padded[0].bool()), -1e9), dim=-1) @ v

    assert_attention_mask(record(padded), left_padded, causal=True, exact=True)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (None, "give mask=, causal=True, or both"),
        (PADDING[:, :5], r"\(2, 5\) does not fit the attention of layer '1' \(Attention\), which has"),
        (torch.zeros(6, 6).masked_fill(~CAUSAL, -math.inf), "give mask == 0"),
        (torch.ones(2, 2, 6, 6), r"\(2, 2, 6, 6\) does not fit the attention of layer '1'"),
    ],
    ids=["none", "of another size", "added", "axes"],
)
def test_a_mask_must_be_one_that_fits(mask, said) -> None:
    with pytest.raises(UsageError, match=said):
        assert_attention_mask(record(fused), mask)
