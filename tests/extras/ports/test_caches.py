"""An engine whose cache is a dict of tensors or a plain object, which it takes and returns, beside its trainer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_modelprobe import assert_same_behavior

WIDTH, LENGTH, MOST = 16, 7, 12


class Attention(nn.Module):
    scale = 1.0

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cache=None, at=0, start=0):
        q, k, v = self.qkv(x).chunk(3, -1)
        end = start + x.shape[-2]
        if cache is not None:
            held = (cache if isinstance(cache, dict) else vars(cache))[f"layer{at}"]
            held[:, start:end] = torch.stack([k, v])
            k, v = held[:, :end]
        seen = torch.ones(end, end, dtype=torch.bool).tril()[start:]
        scores = self.scale * q @ k.mT
        return self.out(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn, self.fc = nn.RMSNorm(WIDTH), Attention(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *cache):
        x = x + self.attn(self.norm(x), *cache)
        return x + self.fc(x).relu()


class Trainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Engine(Trainer):
    def forward(self, ids, cache, start=0):
        x = self.embed(ids)
        for at, block in enumerate(self.blocks):
            x = block(x, cache, at, start)
        return self.head(x), cache


def as_dict():
    return {f"layer{at}": torch.zeros(2, MOST, WIDTH) for at in range(3)}


class Cache:
    def __init__(self):
        vars(self).update(as_dict())


@torch.no_grad()
def records(modelprobe, make_cache, decodes, scale=1.0):
    trainer, engine, cache = modelprobe.build(Trainer), Engine(), make_cache()
    engine.load_state_dict(trainer.state_dict())
    engine.blocks[1].attn.scale = scale
    ids = modelprobe.randint(0, 50, (1, LENGTH))
    start = LENGTH - 1 if decodes else 0
    engine(ids[0, :start], cache)
    mask = (torch.arange(LENGTH) >= start).long()[None]
    served = modelprobe.run(engine, ids[0, start:], cache, start, tokens=[LENGTH - start])
    return served, modelprobe.run(trainer, ids, tokens=mask)


@pytest.mark.parametrize("make_cache", [as_dict, Cache])
@pytest.mark.parametrize("decodes", [False, True])
def test_a_cache_is_no_value_to_compare(modelprobe, make_cache, decodes):
    assert_same_behavior(*records(modelprobe, make_cache, decodes), pair="structure")
    with pytest.raises(AssertionError, match=r"^blocks\.1\.attn does not compute what blocks\.1\.attn does: ") as error:
        assert_same_behavior(*records(modelprobe, make_cache, decodes, scale=1.1), pair="structure")
    assert "Only the largest output of both is compared, not output[1]" in str(error.value)
