"""Seven small architectures in plain PyTorch, as a user writes them.

Each forward is cut into small methods (`split`, `scores`, `softmax`, `merge`), for a fault replaces one of them.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe

BATCH, LENGTH, VOCABULARY, WIDTH, HEADS = 6, 20, 50, 32, 4

# --- multilayer perceptron ----------------------------------------------------------------------------------------


class Dense(nn.Module):
    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.fc = nn.Linear(inputs, outputs)
        self.norm = nn.BatchNorm1d(outputs)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.act(self.norm(self.fc(x))))


class Highway(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.plain = nn.Linear(width, width)
        self.sigmoid = nn.Sigmoid()
        self.act = nn.Tanh()

    def mix(self, share: Tensor, new: Tensor, old: Tensor) -> Tensor:
        return share * new + (1 - share) * old

    def forward(self, x: Tensor) -> Tensor:
        share = self.sigmoid(self.gate(x))
        return self.mix(share, self.act(self.plain(x)), x)


class MLP(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem = Dense(64, 48, dropout)
        self.blocks = nn.ModuleList(Highway(48) for _ in range(3))
        self.neck = Dense(48, 32, dropout)
        self.head = nn.Linear(32, 10)

    def begin(self, images: Tensor) -> Tensor:
        return self.stem(images.flatten(1))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.neck(self.body(self.begin(images))))


# --- convolutional network ----------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.act1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)
        self.act2 = nn.ReLU()

    def add(self, x: Tensor, shortcut: Tensor) -> Tensor:
        return x + shortcut

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act1(self.norm1(self.conv1(x)))
        return self.act2(self.add(self.norm2(self.conv2(inner)), self.shortcut(x)))


class CNN(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 12, 3, padding=1)
        self.norm = nn.BatchNorm2d(12)
        self.act = nn.ReLU()
        self.blocks = nn.ModuleList([Residual(12, 12, 1), Residual(12, 16, 2), Residual(16, 16, 1)])
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(16, 10)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def pool(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        x = self.body(self.act(self.norm(self.stem(images))))
        return self.head(self.drop(self.pool(x)))


# --- recurrent network --------------------------------------------------------------------------------------------


class Cell(nn.Module):
    """One step of an LSTM, by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input = nn.Linear(width, 4 * width)
        self.hidden = nn.Linear(width, 4 * width, bias=False)

    def gates(self, x: Tensor) -> tuple[Tensor, ...]:
        i, f, g, o = x.chunk(4, dim=-1)
        return i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()

    def update(self, gates: tuple[Tensor, ...], memory: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = gates
        memory = f * memory + i * g
        return o * memory.tanh(), memory

    def forward(self, x: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return self.update(self.gates(self.input(x) + self.hidden(hidden)), memory)


class Unrolled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = Cell(width)

    def carry(self, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, memory

    def forward(self, x: Tensor) -> Tensor:
        hidden = memory = torch.zeros_like(x[:, 0])
        outputs = []
        for step in x.unbind(1):
            hidden, memory = self.carry(*self.cell(step, hidden, memory))
            outputs.append(hidden)
        return torch.stack(outputs, 1)


class LSTM(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.fused = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=dropout, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.unrolled = Unrolled(WIDTH)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def combine(self, fused: Tensor, embedded: Tensor) -> Tensor:
        return fused + embedded

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.tokens(ids)
        x = self.norm(self.combine(self.fused(embedded)[0], embedded))
        return self.head(self.drop(self.unrolled(x)))


# --- attention, for the four that follow --------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.scale = (width // heads) ** -0.5
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(x), self.k(x), self.v(x)

    def split(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return x.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) * self.scale

    def masked(self, scores: Tensor, padding: Tensor | None) -> Tensor:
        if padding is not None:
            scores = scores.masked_fill(~padding[:, None, None, :], -1e9)
        if self.causal:
            length = scores.shape[-1]
            future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        return scores

    def softmax(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def merge(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        return self.softmax(self.masked(self.scores(q, k), padding)) @ v

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(each) for each in self.project(x))
        return self.out(self.merge(self.attend(q, k, v, padding)))


class FeedForward(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.act(self.up(x))))


# --- GPT: fused qkv, mask in a buffer, tied head ------------------------------------------------------------------


class FusedAttention(Attention):
    mask: Tensor

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        del self.q, self.k, self.v
        self.qkv = nn.Linear(width, 3 * width)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return q, k, v

    def masked(self, scores: Tensor, padding: Tensor | None) -> Tensor:
        return scores.masked_fill(~self.mask, float("-inf"))


class PreNorm(nn.Module):
    def __init__(self, attn: nn.Module, mlp: nn.Module, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = norm(WIDTH), attn, norm(WIDTH), mlp

    def add(self, x: Tensor, update: Tensor) -> Tensor:
        return x + update

    def forward(self, x: Tensor) -> Tensor:
        x = self.add(x, self.attn(self.norm1(x)))
        return self.add(x, self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            PreNorm(FusedAttention(WIDTH, HEADS), FeedForward(WIDTH, dropout)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def finish(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def forward(self, ids: Tensor) -> Tensor:
        return self.finish(self.body(self.drop(self.embed(ids))))


# --- vision transformer: patches, class token, layer scale, fused attention ---------------------------------------


class VisionAttention(Attention):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__(width, heads)
        self.p = dropout

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0, scale=self.scale)


class ScaledBlock(PreNorm):
    def __init__(self, attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__(attn, mlp, lambda width: nn.LayerNorm(width, eps=1e-6))
        self.gamma = nn.Parameter(torch.full((WIDTH,), 0.5))

    def add(self, x: Tensor, update: Tensor) -> Tensor:
        return x + self.gamma * update


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, WIDTH, 2, 2)

    def tokens(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.tokens(self.conv(images))


class ViT(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.patches = Patches().requires_grad_(False)  # frozen at random, as MoCo v3 does
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 17, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(
            ScaledBlock(VisionAttention(WIDTH, HEADS, dropout), FeedForward(WIDTH, dropout)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, 10)

    def embed(self, patches: Tensor) -> Tensor:
        return torch.cat([self.cls.expand(len(patches), -1, -1), patches], 1) + self.positions

    def pool(self, x: Tensor) -> Tensor:
        return x[:, 0]

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def finish(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def forward(self, images: Tensor) -> Tensor:
        return self.finish(self.pool(self.body(self.embed(self.patches(images)))))


# --- encoder: post-norm, padding mask, positions that skip the padding --------------------------------------------


class PostNorm(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attn = Attention(WIDTH, HEADS)
        self.norm1 = nn.LayerNorm(WIDTH, eps=1e-12)
        self.mlp = FeedForward(WIDTH, dropout)
        self.norm2 = nn.LayerNorm(WIDTH, eps=1e-12)

    def add(self, x: Tensor, update: Tensor) -> Tensor:
        return x + update

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.norm1(self.add(x, self.attn(x, padding)))
        return self.norm2(self.add(x, self.mlp(x)))


class Embedding(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.drop = nn.Dropout(dropout)

    def numbers(self, padding: Tensor) -> Tensor:
        """Positions that count from the first real token, for padding stands on the left."""
        return (padding.long().cumsum(1) - 1).clamp(min=0)

    def scaled(self, tokens: Tensor) -> Tensor:
        return tokens * math.sqrt(WIDTH)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        return self.drop(self.norm(self.scaled(self.tokens(ids)) + self.positions(self.numbers(padding))))


class Encoder(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = Embedding(dropout)
        self.blocks = nn.ModuleList(PostNorm(dropout) for _ in range(3))
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.act = nn.Tanh()
        self.head = nn.Linear(WIDTH, 10)

    def pool(self, x: Tensor, padding: Tensor) -> Tensor:
        weights = padding.to(x.dtype).unsqueeze(-1)
        return (x * weights).sum(1) / weights.sum(1)

    def body(self, x: Tensor, padding: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, padding)
        return x

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        x = self.body(self.embed(ids, padding), padding)
        return self.head(self.act(self.pooler(self.pool(x, padding))))


# --- mixture of experts: rotary positions, sliding window, RMS norm, two of four experts a token ------------------


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Rotary(nn.Module):
    frequencies: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", 10_000.0 ** -(torch.arange(0, width, 2) / width), persistent=False)

    def angles(self, length: int) -> Tensor:
        return torch.arange(length, device=self.frequencies.device)[:, None] * self.frequencies

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.angles(q.shape[-2]).repeat(1, 2)
        return self.turned(q, angles), self.turned(k, angles)

    def turned(self, x: Tensor, angles: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat([-right, left], -1) * angles.sin()


class WindowAttention(Attention):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, causal=True)
        self.window = 8
        self.rotary = Rotary(width // heads)

    def masked(self, scores: Tensor, padding: Tensor | None) -> Tensor:
        length = scores.shape[-1]
        far = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril(-self.window)
        return super().masked(scores, padding).masked_fill(far, float("-inf"))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        return super().attend(*self.rotary(q, k), v, padding)


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.chosen = 2
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        shares, which = scores.softmax(-1).topk(self.chosen, dim=-1)
        return shares / shares.sum(-1, keepdim=True), which

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        shares, which = self.route(self.router(tokens))
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = (which == number).nonzero(as_tuple=True)
            if len(token):
                result.index_add_(0, token, expert(tokens[token]) * shares[token, place, None])
        return result.view_as(x)


class MoE(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            PreNorm(WindowAttention(WIDTH, HEADS), Mixture(WIDTH, 4), RMSNorm) for _ in range(3)
        )
        self.norm = RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def finish(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def forward(self, ids: Tensor) -> Tensor:
        return self.finish(self.body(self.drop(self.embed(ids))))


# --- how each is run ----------------------------------------------------------------------------------------------

Inputs = tuple[Tensor, ...]
Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Architecture:
    """A model with its inputs and its loss."""

    make: Callable[[float], nn.Module]
    inputs: Callable[[ModelProbe], Inputs]
    loss: Loss

    @functools.cache  # noqa: B019 - seven architectures
    def _built(self, dropout: float) -> nn.Module:
        return ModelProbe(seed=0).build(lambda: self.make(dropout))

    def build(self, dropout: float = 0.1, *, train: bool = False) -> nn.Module:
        """Return the model, its weights seeded by their names."""
        return copy.deepcopy(self._built(dropout)).train(train)


@functools.cache
def data() -> Any:
    return load_digits()  # which reads a text file each time


def digits(probe: ModelProbe) -> Inputs:
    return (torch.tensor(data().images[:BATCH], dtype=torch.float32).unsqueeze(1) / 16,)


def tokens(probe: ModelProbe) -> Inputs:
    return (probe.randint(0, VOCABULARY, (BATCH, LENGTH)),)


def padded_tokens(probe: ModelProbe) -> Inputs:
    lengths = torch.tensor([LENGTH, 15, 11, LENGTH, 7, 18])
    padding = torch.arange(LENGTH)[None, :] >= LENGTH - lengths[:, None]
    ids = probe.randint(1, VOCABULARY, (BATCH, LENGTH)) * padding
    return ids, padding


def classes(output: Tensor) -> Tensor:
    return F.cross_entropy(output, torch.tensor(data().target[:BATCH]))


def next_token(output: Tensor, ignored: int = 0) -> Tensor:
    targets = ModelProbe(seed=0).randint(0, VOCABULARY, (BATCH, LENGTH))
    return F.cross_entropy(output[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=ignored)


ARCHITECTURES: dict[str, Architecture] = {
    "MLP": Architecture(MLP, digits, classes),
    "CNN": Architecture(CNN, digits, classes),
    "LSTM": Architecture(LSTM, tokens, next_token),
    "GPT": Architecture(GPT, tokens, next_token),
    "ViT": Architecture(ViT, digits, classes),
    "Encoder": Architecture(Encoder, padded_tokens, classes),
    "MoE": Architecture(MoE, tokens, next_token),
}
