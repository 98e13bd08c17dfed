"""A trainer that pads requests beside an engine that packs them, with the weights of the trainer."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

from pytest_modelprobe import assert_same_behavior
from pytest_modelprobe.exceptions import NothingObservedError

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[3] / "evidence" / "ports"))
import engines

sys.path.pop(0)


def records(modelprobe, kind, fault="", *, decodes=False, dtype=torch.float32):
    """Return the records of an engine, to which requests came in another order, and of its trainer."""
    trainer = engines.trainer_of(kind, 0, dtype)
    engine = engines.engine_of(trainer, fault)
    lengths = {1: 8, 0: 5}
    ids = modelprobe.randint(1, engines.WORDS, (2, 8))
    mask = torch.tensor([[1] * 5 + [0] * 3, [1] * 8])
    past = [n - 1 if decodes else 0 for n in lengths.values()]
    if decodes:
        batch = engines.batch_of(past)
        engine(torch.cat([ids[row, : n - 1] for row, n in lengths.items()]), batch.positions, batch)
    batch = engines.batch_of([n - p for n, p in zip(lengths.values(), past, strict=True)], past=past)
    given = torch.cat([ids[row, p:n] for (row, n), p in zip(lengths.items(), past, strict=True)])
    tokens = dict(zip(lengths, batch.lengths, strict=True))
    last = mask * torch.tensor([[0] * 4 + [1] + [0] * 3, [0] * 7 + [1]])
    expected = modelprobe.run(trainer, ids, attention_mask=mask, use_cache=False, tokens=last if decodes else mask)
    return modelprobe.run(engine, given, batch.positions, batch, tokens=tokens), expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decodes", [False, True])
def test_packed_requests_are_compared_with_padded_ones(modelprobe, decodes, dtype):
    assert_same_behavior(*records(modelprobe, "qwen3", decodes=decodes, dtype=dtype), pair="structure")


@pytest.mark.parametrize(
    ("kind", "fault", "first"),
    [
        ("qwen3", "no qk norm", "model.layers.1.self_attn"),
        ("llama", "residual twice", "model.layers.1"),
        ("llama", "eps", "model.layers.1.input_layernorm"),
        ("mixtral", "not renormalized", "model.layers.1.mlp"),
        ("gpt2", "qkv by heads", "transformer.h.1.attn"),
    ],
)
def test_the_layer_at_fault_is_named(modelprobe, kind, fault, first):
    with pytest.raises(AssertionError, match=f"^{first} does not compute what {first} does: "):
        assert_same_behavior(*records(modelprobe, kind, fault), pair="structure")


@pytest.mark.parametrize("fault", ["position", "stale page"])
def test_a_fault_of_a_cache_is_named(modelprobe, fault):
    with pytest.raises(AssertionError, match=r"^model\.layers\.1\.self_attn does not compute what "):
        assert_same_behavior(*records(modelprobe, "llama", fault, decodes=True), pair="structure")


def test_a_mixture_in_half_precision_may_choose_other_experts(modelprobe):
    with pytest.raises(NothingObservedError, match=r"a router near a tie chooses other experts, .*compare in float32"):
        assert_same_behavior(*records(modelprobe, "mixtral", "gate and up", dtype=torch.bfloat16), pair="structure")


def test_one_rank_is_compared_with_the_whole(modelprobe, monkeypatch):
    """A rank has as many heads of the query as the trainer has of the key: these are no pair."""
    barrier, parts = threading.Barrier(2, timeout=60), {}

    def all_reduce(y):
        parts[threading.get_ident()] = y.clone()
        barrier.wait()
        total = sum(parts.values())
        barrier.wait()
        y.copy_(total)

    trainer, ids, batch = engines.trainer_of("qwen3", 0), modelprobe.randint(1, 60, (1, 8)), engines.batch_of([8])
    ranks = [engines.engine_of(trainer) for _ in range(2)]
    expected = modelprobe.run(trainer, ids, use_cache=False, tokens=[8])
    for rank, engine in enumerate(ranks):
        engines.shard(engine, rank, 2)
    monkeypatch.setattr(engines, "reduced", all_reduce)
    other = threading.Thread(target=torch.no_grad()(ranks[1]), args=(ids[0], batch.positions, batch))
    other.start()
    with torch.no_grad():
        actual = modelprobe.run(ranks[0], ids[0], batch.positions, batch, tokens=[8])
    other.join()
    assert_same_behavior(actual, expected, pair="structure")


def test_other_layouts_are_refused_until_tokens_are_named(modelprobe):
    trainer = engines.trainer_of("llama", 0)
    engine, ids, batch = engines.engine_of(trainer), modelprobe.randint(1, engines.WORDS, (1, 8)), engines.batch_of([8])
    expected = modelprobe.run(trainer, ids, use_cache=False)
    with pytest.raises(NothingObservedError, match="tokens= in both runs says which tokens there are"):
        assert_same_behavior(modelprobe.run(engine, ids[0], batch.positions, batch), expected, pair="structure")
    tokens = {"tokens": [8]}
    expected = modelprobe.run(trainer, ids, use_cache=False, **tokens)
    assert_same_behavior(modelprobe.run(engine, ids[0], batch.positions, batch, **tokens), expected, pair="structure")
