"""Small rewrites of models of transformers, each with a switch for errors that ports have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, WORDS, LENGTH = 32, 4, 50, 16


class Attention(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (part.view(rows, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.error == "qkv order":
            q, v = v, q
        scale = 1.0 if self.error == "scale" else 1 / math.sqrt(WIDTH // HEADS)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.error != "mask", scale=scale)
        return self.proj(y.transpose(1, 2).reshape(rows, length, WIDTH))


class MLP(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, 4 * WIDTH, bias=error != "bias"), nn.Linear(4 * WIDTH, WIDTH)
        self.act = nn.GELU(approximate="none" if error == "gelu" else "tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.act(self.fc(x)))


class Block(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error
        eps = 1e-3 if error == "eps" else 1e-5
        self.n1, self.n2 = nn.LayerNorm(WIDTH, eps=eps), nn.LayerNorm(WIDTH)
        self.mix, self.mlp = Attention(error), MLP(error)

    def forward(self, x: Tensor) -> Tensor:
        if self.error == "post-norm":
            x = self.n1(x + self.mix(x))
            return self.n2(x + self.mlp(x))
        x = x + self.mix(self.n1(x))
        return x + self.mlp(self.n2(x))


class NanoGPT(nn.Module):
    """Like GPT-2, in the words of nanoGPT."""

    def __init__(self, error: str = "") -> None:
        super().__init__()
        self.error = error
        self.tok, self.pos = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(error) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if error != "untied":
            self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]) + (self.error == "position"))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt2() -> Any:
    import transformers

    size = {"n_embd": WIDTH, "n_head": HEADS, "n_layer": 2, "n_positions": LENGTH, "vocab_size": WORDS}
    return _drawn(lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**size)))


def _drawn(make: Callable[[], Any]) -> Any:
    """Return a model whose biases and norms are not 0 and 1 either."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


def nano_gpt(error: str = "") -> NanoGPT:
    """Return the port, with the weights of GPT-2."""
    source, model = gpt2(), NanoGPT(error).eval()
    with torch.no_grad():
        model.tok.weight.copy_(source.transformer.wte.weight)
        model.head.weight.copy_(source.lm_head.weight)
        model.pos.weight.copy_(source.transformer.wpe.weight)
        pairs = [(model.norm, source.transformer.ln_f)]
        for mine, theirs in zip(model.blocks, source.transformer.h, strict=True):
            pairs += [(mine.n1, theirs.ln_1), (mine.n2, theirs.ln_2), (mine.mix.qkv, theirs.attn.c_attn),
                      (mine.mix.proj, theirs.attn.c_proj), (mine.mlp.fc, theirs.mlp.c_fc),
                      (mine.mlp.out, theirs.mlp.c_proj)]  # fmt: skip
        for mine, theirs in pairs:
            mine.weight.copy_(theirs.weight.T if theirs.weight.ndim == 2 else theirs.weight)
            if mine.bias is not None:
                mine.bias.copy_(theirs.bias)
    return model


class LlamaAttention(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error
        self.qkv, self.o = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        size = WIDTH // HEADS
        q, k, v = (p.view(rows, length, -1, size).transpose(1, 2) for p in self.qkv(x).split([WIDTH, 16, 16], -1))
        q, k = self.rotated(q), self.rotated(k)
        if self.error == "kv heads":
            k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
        else:
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(rows, length, WIDTH))

    def rotated(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        angles = torch.arange(x.shape[2])[:, None] / 10_000 ** (torch.arange(0, size, 2) / size)
        cos, sin = angles.cos(), angles.sin()
        if self.error == "rope":
            a, b = x[..., ::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class GatedMLP(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error
        self.gate_up, self.down = nn.Linear(WIDTH, 128, bias=False), nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        if self.error == "gate order":
            gate, up = up, gate
        return self.down(F.silu(gate) * up)


class LlamaBlock(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        norm = nn.LayerNorm if error == "layer norm" else nn.RMSNorm
        eps = 1e-2 if error == "eps" else 1e-6
        self.n1, self.n2 = norm(WIDTH, eps=eps), nn.RMSNorm(WIDTH, eps=1e-6)
        self.mix, self.ff = LlamaAttention(error), GatedMLP(error)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.n1(x))
        return x + self.ff(self.n2(x))


class FusedLlama(nn.Module):
    """Like Llama, with the projections of attention and the gate fused."""

    def __init__(self, error: str = "") -> None:
        super().__init__()
        self.tok = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(LlamaBlock(error) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def llama() -> Any:
    import transformers

    size = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": HEADS,
            "num_key_value_heads": 2, "vocab_size": WORDS, "max_position_embeddings": 64}  # fmt: skip
    return _drawn(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**size)))


def fused_llama(error: str = "") -> FusedLlama:
    """Return the port, with the weights of Llama."""
    source, model = llama(), FusedLlama(error).eval()
    with torch.no_grad():
        model.tok.weight.copy_(source.model.embed_tokens.weight)
        model.head.weight.copy_(source.lm_head.weight)
        model.norm.weight.copy_(source.model.norm.weight)
        for mine, theirs in zip(model.blocks, source.model.layers, strict=True):
            mine.n1.weight.copy_(theirs.input_layernorm.weight)
            mine.n2.weight.copy_(theirs.post_attention_layernorm.weight)
            attention = theirs.self_attn
            parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
            mine.mix.qkv.weight.copy_(torch.cat(parts))
            mine.mix.o.weight.copy_(attention.o_proj.weight)
            mine.ff.gate_up.weight.copy_(torch.cat([theirs.mlp.gate_proj.weight, theirs.mlp.up_proj.weight]))
            mine.ff.down.weight.copy_(theirs.mlp.down_proj.weight)
    return model
