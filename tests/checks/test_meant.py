"""What the standard checks try of a model with attention: `causal`, `incremental` and masks, where they are meant."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, checks

WIDTH, HEADS, WORDS, LENGTH = 16, 2, 20, 12
TRIED = ("causal", "incremental", "padding_invariant", "inputs_used")


class Attention(nn.Module):
    """Attention with a cache, and a mask of padding; ``fault`` says what is wrong with it."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault, self.qkv, self.out = fault, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def split(self, x: Tensor) -> Tensor:
        if self.fault == "heads split by a view":
            return x.reshape(len(x), HEADS, -1, WIDTH // HEADS)
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def seen(self, queries: int, keys: int, mask: Tensor | None) -> Tensor:
        diagonal = {"mask off by one": 1, "mask off by two": 2, "diagonal masked": -1}.get(self.fault, 0)
        seen = torch.ones(keys, keys, dtype=torch.bool).tril(diagonal)[keys - queries :]
        if self.fault == "mask missing":
            seen = torch.ones_like(seen)
        elif self.fault == "mask inverted":
            seen = torch.ones(keys, keys, dtype=torch.bool).triu()[keys - queries :]
        elif self.fault == "mask of one query for all":
            seen = seen[-1:].expand_as(seen)
        elif self.fault == "mask that ignores the cache":
            seen = torch.ones_like(seen).tril()
        if mask is not None and self.fault != "padding ignored":
            seen = seen & (mask[:, None, None] == (0 if self.fault == "padding inverted" else 1))
        return seen

    def weights(self, scores: Tensor, seen: Tensor) -> Tensor:
        if self.fault == "mask after the softmax":
            return scores.softmax(-1) * seen
        if self.fault == "scores of 0 for masked keys":
            return scores.masked_fill(~seen, 0).softmax(-1)
        return scores.masked_fill(~seen, -1e9).softmax(-2 if self.fault == "softmax over queries" else -1)

    def forward(self, x: Tensor, mask: Tensor | None, past: Any) -> Any:
        q, k, v = (self.split(part) for part in self.qkv(x).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        scale = k.shape[2] if self.fault == "scaled by the number of keys" else q.shape[-1]
        seen = self.seen(q.shape[2], k.shape[2], mask)
        y = self.weights(q @ k.mT / math.sqrt(scale), seen) @ v
        merged = y.reshape(x.shape) if self.fault == "heads merged by a view" else y.transpose(1, 2).flatten(2)
        return self.out(merged), (k, v)


class Block(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.norm, self.attend, self.mlp = nn.LayerNorm(WIDTH), Attention(fault), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None, past: Any) -> Any:
        y, kept = self.attend(self.norm(x), mask, past)
        return x + y + self.mlp(x + y).relu(), kept


class Model(nn.Module):
    """Three blocks, of which some are at fault."""

    def __init__(self, *faults: str) -> None:
        super().__init__()
        self.fault = faults[0]
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks, self.head = nn.ModuleList(map(Block, faults)), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None, cache: Any = None) -> Any:
        start = 0 if cache is None or self.fault == "positions that ignore the cache" else cache[0][0].shape[2]
        x, kept = self.words(ids) + self.places(torch.arange(start, start + ids.shape[1])), []
        for block, past in zip(self.blocks, cache or [None] * 3, strict=True):
            x, new = block(x, attention_mask, past)
            kept.append(new)
        return self.head(x), kept


FAULTS = {
    "mask off by one": "causal",
    "mask missing": "causal",
    "mask of one query for all": "causal",
    "mask after the softmax": "causal",
    "heads split by a view": "causal",
    "heads merged by a view": "causal",
    "softmax over queries": "causal",
    "scaled by the number of keys": "incremental",
    "mask that ignores the cache": "incremental",
    "padding ignored": "padding_invariant",
}
LIKE_OTHERS = {
    "mask off by two": "causal",
    "diagonal masked": "causal",
    "mask inverted": "causal",
    "scores of 0 for masked keys": "causal",
    "padding inverted": "padding_invariant",
}
CASES = [*FAULTS.items(), *(pytest.param(*one, marks=pytest.mark.long) for one in LIKE_OTHERS.items())]


def words(rows: int = 3) -> Tensor:
    return ModelProbe().randint(0, WORDS, (rows, LENGTH))


ONES = torch.ones(3, LENGTH, dtype=torch.int64)


@pytest.mark.parametrize(("fault", "check"), CASES)
def test_a_fault_of_a_mask_or_of_a_reshape_is_named_by_a_standard_check(fault: str, check: str) -> None:
    for faults, layer in (((fault, fault, fault), "blocks.0.attend"), (("", fault, ""), "blocks.1.attend")):
        model = ModelProbe().build(lambda faults=faults: Model(*faults))
        found = checks.STANDARD[check].outcome(ModelProbe(), model, words(), attention_mask=ONES)
        assert (found.verdict, found.layer) == ("broken", layer)


def test_positions_that_ignore_the_cache_are_named() -> None:
    model = ModelProbe().build(lambda: Model("positions that ignore the cache", "", ""))
    assert checks.STANDARD["incremental"].outcome(ModelProbe(), model, words()).layer == "places"


def test_a_decoder_passes_and_is_given_a_mask() -> None:
    model = ModelProbe().build(lambda: Model("", "", ""))
    probe = ModelProbe()
    outcomes = checks.standard(probe, model, words(), only=TRIED)
    assert {outcome.verdict for outcome in outcomes} == {"holds"}
    assert "masked by 0 in attention_mask" in outcomes[2].text
    assert not checks.standard(probe, model, words(), attention_mask=ONES, only=TRIED).broken


# --- not meant to be causal ---------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Attends to all positions, or to neighbors."""

    def __init__(self, band: int | None = None) -> None:
        super().__init__()
        self.band, self.words, self.qkv = band, nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.words(ids)).chunk(3, -1)
        n = ids.shape[1]
        mask = None if self.band is None else torch.ones(n, n, dtype=torch.bool).tril(self.band).triu(-self.band)
        return F.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize("band", [None, 2])
def test_an_encoder_is_not_meant_to_be_causal(band: int | None) -> None:
    found = checks.STANDARD["causal"].outcome(ModelProbe(), Encoder(band), words())
    assert found.text == (
        "nothing says that it is meant to be causal: no triangular mask was seen; if it is, call checks.causal"
    )


class Both(nn.Module):
    """Encodes a text, and decodes it again: only the decoder is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, WIDTH, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.decoder(x, self.encoder(x), tgt_mask=mask)  # type: ignore[no-any-return]


def test_an_encoder_beside_a_causal_decoder_is_said_to_be_there() -> None:
    found = checks.STANDARD["causal"].outcome(ModelProbe(), ModelProbe().build(Both), words())
    assert found.text == (
        "a part of it is causal, as a mask of its attention is triangular, but not encoder.self_attn and "
        "decoder.multihead_attn: call checks.causal if all of it is meant to be"
    )


def test_padding_alone_is_no_triangular_mask() -> None:
    layer = ModelProbe().build(lambda: nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True))
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    mask[:, 2:] = True
    x = ModelProbe().randn(2, LENGTH, WIDTH)
    found = checks.STANDARD["causal"].outcome(ModelProbe(), layer, x, src_key_padding_mask=mask)
    assert found.verdict == "not applicable"


def test_a_causal_mask_of_torch_is_seen() -> None:
    layer = ModelProbe().build(lambda: nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True))
    x, mask = ModelProbe().randn(2, LENGTH, WIDTH), nn.Transformer.generate_square_subsequent_mask(LENGTH)
    assert checks.STANDARD["causal"].outcome(ModelProbe(), layer, x, src_mask=mask).verdict == "holds"


@pytest.mark.parametrize(
    ("model", "x", "reason"),
    [
        (nn.Conv2d(3, 4, 3), (2, 3, 8, 8), "input is no sequence of ids or vectors"),
        (nn.LSTM(4, 4, batch_first=True), (2, 8, 4), "nothing says that it is meant to be causal: no attention "),
    ],
)
def test_what_is_not_tried_is_listed_with_the_reason(model: nn.Module, x: Any, reason: str) -> None:
    found = checks.STANDARD["causal"].outcome(ModelProbe(), model, ModelProbe().randn(*x))
    assert found.verdict == "not applicable"
    assert found.text.startswith(reason)


# --- what else says that a model is causal ------------------------------------------------------------------------


class TinyGPT(Encoder):
    """A decoder that has lost its mask."""


class Keeps(Encoder):
    """A decoder that keeps a mask and does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.ones(1, 1, 32, 32).tril())


@pytest.mark.parametrize(("kind", "reason"), [(TinyGPT, "it is called TinyGPT"), (Keeps, "bias is triangular")])
def test_a_mask_that_is_lost_is_noticed(kind: type[nn.Module], reason: str) -> None:
    found = checks.STANDARD["causal"].outcome(ModelProbe(), ModelProbe().build(kind), words())
    assert found.verdict == "broken"
    assert f"\n\nIt is taken for causal, as {reason}. Look at the causal mask" in found.text


def test_a_configuration_may_say_that_a_model_is_no_decoder() -> None:
    model = ModelProbe().build(TinyGPT)
    model.config = SimpleNamespace(is_decoder=False)
    assert checks.STANDARD["causal"].outcome(ModelProbe(), model, words()).verdict == "not applicable"


def test_ids_of_padding_are_masked_too() -> None:
    model, ids = ModelProbe().build(lambda: Model("", "", "")), words()
    model.config = SimpleNamespace(pad_token_id=0)
    ids[:, 2] = 0
    outcomes = {name: checks.STANDARD[name].outcome(ModelProbe(), model, ids) for name in ("causal", "incremental")}
    assert outcomes["causal"].text.endswith("of 12 positions without those that are masked")
    assert outcomes["incremental"].text == "input holds 0, the id of padding, which may not count as a position"


class Convolved(Encoder):
    """Adds to attention what a convolution makes of neighbors."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.words(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = None if attention_mask is None else attention_mask[:, None].bool()
        return F.scaled_dot_product_attention(q, k, v, mask) + self.near(x.mT).mT


def test_a_convolution_beside_attention_need_not_know_a_mask_that_nobody_gave() -> None:
    model = ModelProbe().build(Convolved)
    found = checks.padding_invariant.outcome(ModelProbe(), model, words())
    assert found.text == "near, a convolution, mixes neighbors; give attention_mask= if it is meant to know padding"
    assert checks.padding_invariant.outcome(ModelProbe(), model, words(), attention_mask=ONES).layer == "near"
