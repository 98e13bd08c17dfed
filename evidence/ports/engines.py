"""Trainers of transformers, and engines that serve their weights, each with a switch for faults that engines have.

The engines are small rewrites in the manner of vLLM and SGLang: tokens of all requests in one row, one matrix for
query, key and value and one for gate and up, a residual that is handed on beside the hidden state and added by the next
norm, keys and values in pages, rotary angles by position, weights loaded by a table of names. With ``plain=True`` the
residual is added where it arises, as in smaller ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

WIDTH, HEADS, GROUPS, SIZE, INNER, WORDS, LENGTH, BLOCKS, AT, PAGE = 32, 4, 2, 8, 48, 60, 32, 3, 1, 4
"""``AT`` is the block in which a fault is planted, ``PAGE`` the number of tokens on a page of a cache."""


@dataclass
class Batch:
    """Where the tokens of a step stand: vLLM's metadata of attention."""

    positions: Tensor
    """(tokens,): the place of each token in its request."""
    lengths: list[int]
    """How many tokens of each request are new."""
    tables: list[list[int]]
    """The pages of each request."""
    is_last_only: bool = False
    """Whether logits are computed of the last token of each request alone."""

    @property
    def slots(self) -> Tensor:
        """(tokens,): where keys and values of each token are kept."""
        owner = [row for row, n in enumerate(self.lengths) for _ in range(n)]
        pages = [self.tables[row][int(p) // PAGE] for row, p in zip(owner, self.positions, strict=True)]
        return torch.tensor(pages) * PAGE + self.positions % PAGE


def batch_of(lengths: Sequence[int], *, past: Sequence[int] = (), is_last_only: bool = False) -> Batch:
    """Return the batch of requests of which ``lengths`` tokens are new and ``past`` are in the cache."""
    past = past or [0] * len(lengths)
    positions = torch.cat([torch.arange(p, p + n) for p, n in zip(past, lengths, strict=True)])
    pages = LENGTH // PAGE
    tables = [[row + len(lengths) * page for page in range(pages)] for row in range(len(lengths))]  # interleaved
    return Batch(positions, list(lengths), tables, is_last_only)


class RMSNorm(nn.Module):
    """vLLM's: adds the residual first, and returns both."""

    def __init__(self, size: int, eps: float, error: str = "") -> None:
        super().__init__()
        self.weight, self.eps, self.error = nn.Parameter(torch.ones(size)), eps, error

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is not None:
            residual = x = x + residual
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        y = y.to(x.dtype) * self.weight
        return y if residual is None else (y, residual)


class QKVParallelLinear(nn.Linear):
    """One matrix for query, key and value."""


class MergedColumnParallelLinear(nn.Linear):
    """One matrix for gate and up."""


def reduced(y: Tensor) -> None:
    """Add up what the ranks have, in place."""
    if dist.is_initialized():
        dist.all_reduce(y)


class RowParallelLinear(nn.Linear):
    """The matrix after an activation or after attention. Each rank has the columns of its part of the input."""

    error = ""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        if self.error != "no reduction":
            reduced(y)
        return y if self.bias is None else y + self.bias


class RotaryEmbedding(nn.Module):
    def __init__(self, base: float, error: str) -> None:
        super().__init__()
        self.error = error
        if error == "rope base":
            base *= 10
        angles = torch.arange(2 * LENGTH)[:, None] / base ** (torch.arange(0, SIZE, 2) / SIZE)
        self.register_buffer("cos_sin_cache", torch.cat([angles.cos(), angles.sin()], -1), persistent=False)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos_sin_cache[positions].to(query.dtype).chunk(2, -1)
        return self.rotated(query, cos, sin), self.rotated(key, cos, sin)

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, SIZE))
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        if self.error == "rope pairs":
            a, b = heads[..., ::2], heads[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-3)
        a, b = heads.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


class PagedAttention(nn.Module):
    """Attention of the tokens of several requests, with keys and values in pages."""

    def __init__(self, heads: int, groups: int, error: str) -> None:
        super().__init__()
        self.heads, self.groups, self.error = heads, groups, error
        self.scale = 1 / SIZE if error == "scale" else SIZE**-0.5
        self.kv_cache = torch.zeros(2, 3 * LENGTH, groups, SIZE)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: Batch) -> Tensor:
        shape = query.shape
        query, key, value = (x.reshape(-1, x.shape[-1] // SIZE, SIZE) for x in (query, key, value))
        self.kv_cache = self.kv_cache.to(key.dtype)
        slots = batch.slots
        if self.error == "stale page":
            slots = slots.roll(1)
        self.kv_cache[0, slots], self.kv_cache[1, slots] = key, value
        outputs, start = [], 0
        for row, n in enumerate(batch.lengths):
            places = batch.positions[start : start + n]
            seen = torch.arange(int(places[-1]) + 1)
            kept = torch.tensor(batch.tables[row])[seen // PAGE] * PAGE + seen % PAGE
            mask = seen[None] <= places[:, None]
            if self.error == "mask":
                mask = torch.ones_like(mask)
            outputs.append(self.attend(query[start : start + n], *self.kv_cache[:, kept], mask))
            start += n
        return torch.cat(outputs).reshape(shape)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        owners = torch.arange(self.heads) // (self.heads // self.groups)
        if self.error == "heads":
            owners = torch.arange(self.heads) % self.groups
        scores = torch.einsum("qhd,khd->hqk", query, key[:, owners]).float() * self.scale
        scores = scores.masked_fill(~mask, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1).to(value.dtype), value[:, owners])


class Attention(nn.Module):
    def __init__(self, config: Any, error: str) -> None:
        super().__init__()
        self.error = error
        bias = config.model_type == "qwen2"
        self.qkv_proj = QKVParallelLinear(WIDTH, (HEADS + 2 * GROUPS) * SIZE, bias=bias and error != "no bias")
        self.o_proj = RowParallelLinear(HEADS * SIZE, WIDTH, bias=False)
        self.o_proj.error = error
        self.rotary_emb = RotaryEmbedding(config.rope_parameters["rope_theta"], error)
        self.attn = PagedAttention(HEADS, GROUPS, error)
        if config.model_type == "qwen3":
            self.q_norm, self.k_norm = (RMSNorm(SIZE, config.rms_norm_eps) for _ in range(2))

    def forward(self, positions: Tensor, hidden_states: Tensor, batch: Batch) -> Tensor:
        heads, groups = self.attn.heads, self.attn.groups
        q, k, v = self.qkv_proj(hidden_states).split([heads * SIZE, groups * SIZE, groups * SIZE], -1)
        if self.error == "k and v":
            k, v = v, k
        if hasattr(self, "q_norm") and self.error != "no qk norm":
            q = self.q_norm(q.unflatten(-1, (-1, SIZE))).flatten(-2)
            k = self.k_norm(k.unflatten(-1, (-1, SIZE))).flatten(-2)
        q, k = self.rotary_emb(positions + (self.error == "position" and positions > 0), q, k)
        return self.o_proj(self.attn(q, k, v, batch))


class SiluAndMul(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        if self.error == "gate and up":
            gate, up = up, gate
        return (F.gelu(gate) if self.error == "gelu" else F.silu(gate)) * up


class MLP(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(WIDTH, 2 * INNER, bias=False)
        self.down_proj = RowParallelLinear(INNER, WIDTH, bias=False)
        self.act_fn = SiluAndMul(error)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class FusedMoE(nn.Module):
    def __init__(self, experts: int, top: int, error: str) -> None:
        super().__init__()
        self.top, self.error = top, error
        self.w13_weight = nn.Parameter(torch.empty(experts, 2 * INNER, WIDTH))
        self.w2_weight = nn.Parameter(torch.empty(experts, WIDTH, INNER))

    def forward(self, x: Tensor, router_logits: Tensor) -> Tensor:
        shape = x.shape
        x, router_logits = x.flatten(0, -2), router_logits.flatten(0, -2)
        weights, chosen = router_logits.float().softmax(-1).topk(self.top, -1)
        if self.error != "not renormalized":
            weights = weights / weights.sum(-1, keepdim=True)
        if self.error == "one expert":
            weights[:, 1:] = 0
        gate, up = torch.einsum("th,tkih->tki", x, self.w13_weight[chosen]).chunk(2, -1)
        if self.error == "gate and up":
            gate, up = up, gate
        inner = (F.gelu(gate) if self.error == "gelu" else F.silu(gate)) * up
        y = torch.einsum("tki,tkhi->tkh", inner, self.w2_weight[chosen])
        return (y * weights[..., None].to(y.dtype)).sum(1).reshape(shape)


class SparseMoE(nn.Module):
    def __init__(self, config: Any, error: str) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, config.num_local_experts, bias=False)
        self.experts = FusedMoE(config.num_local_experts, config.num_experts_per_tok, error)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.gate(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: Any, error: str, plain: bool) -> None:
        super().__init__()
        self.plain, self.error = plain, error
        self.self_attn = Attention(config, error)
        self.mlp = SparseMoE(config, error) if config.model_type == "mixtral" else MLP(error)
        self.input_layernorm = RMSNorm(WIDTH, 1e-2 if error == "eps" else config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(WIDTH, config.rms_norm_eps)

    def forward(self, positions: Tensor, x: Tensor, residual: Tensor | None, batch: Batch) -> Any:
        if self.plain:
            y = self.input_layernorm(x)
            x = (y if self.error == "residual of the norm" else x) + self.self_attn(positions, y, batch)
            x = x + self.mlp(self.post_attention_layernorm(x))
            return x + x if self.error == "residual twice" else x
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        if self.error == "residual of the norm":
            residual = x
        x = self.self_attn(positions, x, batch)
        x, residual = self.post_attention_layernorm(x, residual)
        x = self.mlp(x)
        return (x + residual if self.error == "residual twice" else x), residual


class DecoderModel(nn.Module):
    def __init__(self, config: Any, error: str, plain: bool) -> None:
        super().__init__()
        self.plain, self.error = plain, error
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer(config, error if i == AT else "", plain) for i in range(BLOCKS))
        self.norm = RMSNorm(WIDTH, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        x, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            if self.plain:
                x = layer(positions, x, None, batch)
            else:
                x, residual = layer(positions, x, residual, batch)
        if self.plain:
            return self.norm(x)
        if self.error == "last residual":
            return self.norm(x)
        return self.norm(x, residual)[0]


class Engine(nn.Module):
    """Llama, Qwen and Mixtral as vLLM has them."""

    renames = (
        (".q_proj", ".qkv_proj"), (".k_proj", ".qkv_proj"), (".v_proj", ".qkv_proj"),
        (".gate_proj", ".gate_up_proj"), (".up_proj", ".gate_up_proj"),
        ("experts.gate_up_proj", "experts.w13_weight"), ("experts.down_proj", "experts.w2_weight"),
    )  # fmt: skip

    def __init__(self, config: Any, error: str = "", *, plain: bool = False) -> None:
        super().__init__()
        self.error = error
        self.model = DecoderModel(config, error, plain)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        if config.tie_word_embeddings and error != "untied":
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        return self.lm_head(chosen(self.model(input_ids, positions, batch), batch, self.error))

    def load_weights(self, source: nn.Module) -> None:
        own, parts = self.state_dict(), {}
        for name, tensor in source.state_dict().items():
            if name == "lm_head.weight" and name in own and self.error == "untied":
                continue
            for old, new in self.renames:
                if old in name and new not in name:
                    name = name.replace(old, new)
                    break
            parts.setdefault(name, []).append(tensor)
        for name, found in parts.items():
            if name in own:
                own[name].copy_(torch.cat(found))


def chosen(x: Tensor, batch: Batch, error: str) -> Tensor:
    """Return the hidden states of which logits are computed."""
    if not batch.is_last_only:
        return x
    ends = torch.tensor(batch.lengths).cumsum(0) - 1
    return x[..., ends - int(error == "last position"), :]


class GPT2Attention(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error
        self.c_attn, self.c_proj = QKVParallelLinear(WIDTH, 3 * WIDTH), RowParallelLinear(WIDTH, WIDTH)
        self.attn = PagedAttention(HEADS, HEADS, error)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.c_attn(x).chunk(3, -1)
        if self.error == "k and v":
            k, v = v, k
        if self.error == "qkv by heads":
            q, k, v = self.c_attn(x).unflatten(-1, (HEADS, 3, SIZE)).transpose(-2, -3).flatten(-2).unbind(-2)
        return self.c_proj(self.attn(q, k, v, batch))


class GPT2MLP(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), RowParallelLinear(4 * WIDTH, WIDTH)
        self.act = nn.GELU(approximate="none" if error == "gelu" else "tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x)))


class GPT2Block(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, eps=1e-2 if error == "eps" else 1e-5), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = GPT2Attention(error), GPT2MLP(error)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = self.ln_1(x)
        x = (y if self.error == "residual of the norm" else x) + self.attn(y, batch)
        x = x + self.mlp(self.ln_2(x))
        return x + x if self.error == "residual twice" else x


class GPT2Model(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(GPT2Block(error if i == AT else "") for i in range(BLOCKS))
        self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        x = self.wte(input_ids) + self.wpe(positions + (self.error == "position"))
        for block in self.h:
            x = block(x, batch)
        return x if self.error == "no last norm" else self.ln_f(x)


class GPT2Engine(nn.Module):
    def __init__(self, config: Any, error: str = "", *, plain: bool = False) -> None:
        super().__init__()
        self.error = error
        self.transformer = GPT2Model(error)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        if error != "untied":
            self.lm_head.weight = self.transformer.wte.weight

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        return self.lm_head(chosen(self.transformer(input_ids, positions, batch), batch, self.error))

    def load_weights(self, source: nn.Module) -> None:
        own = self.state_dict()
        for name, tensor in source.state_dict().items():
            if name == "lm_head.weight" and self.error == "untied":
                continue
            turned = ".c_" in name and name.endswith("weight")  # Conv1D
            own[name].copy_(tensor.T if turned else tensor)


def config_of(kind: str) -> Any:
    """Return a small configuration of transformers."""
    if kind == "gpt2":
        return transformers.GPT2Config(
            n_embd=WIDTH, n_head=HEADS, n_layer=BLOCKS, n_positions=LENGTH, vocab_size=WORDS, bos_token_id=0,
            eos_token_id=0)  # fmt: skip
    size = {
        "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": BLOCKS, "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS, "head_dim": SIZE, "vocab_size": WORDS, "max_position_embeddings": 2 * LENGTH,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": kind in ("qwen2", "qwen3"), "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    kinds = {
        "llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config,
        "mixtral": transformers.MixtralConfig,
    }  # fmt: skip
    if kind == "mixtral":
        size |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    return kinds[kind](**size)


def trainer_of(kind: str, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """Return the model of transformers whose weights an engine serves."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config_of(kind)).eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
        for name, parameter in model.named_parameters():  # else attention is nearly uniform, whatever its positions
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.data *= 3
    return model.to(dtype)


def engine_of(trainer: Any, error: str = "", *, plain: bool = False) -> Any:
    """Return an engine with the weights of a trainer."""
    config = trainer.config
    make = GPT2Engine if config.model_type == "gpt2" else Engine
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(100)
        engine = make(config, error, plain=plain).eval().to(trainer.dtype)
    with torch.no_grad():
        engine.load_weights(trainer)
    return engine


def shard(engine: Any, rank: int, size: int) -> None:
    """Leave to an engine what its rank has under tensor parallelism: some heads, and a part of what is inside a MLP."""

    def part(x: Tensor, parts: Sequence[int], axis: int = 0) -> nn.Parameter:
        return nn.Parameter(torch.cat([one.chunk(size, axis)[rank] for one in x.detach().split(parts, axis)], axis))

    for module in engine.modules():
        if isinstance(module, Attention):
            rows = [HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE]
            for name, parameter in list(module.qkv_proj.named_parameters()):
                setattr(module.qkv_proj, name, part(parameter, rows))
            module.attn.heads, module.attn.groups = HEADS // size, GROUPS // size
            module.attn.kv_cache = module.attn.kv_cache.chunk(size, 2)[rank].clone()
            module.o_proj.weight = part(module.o_proj.weight, [HEADS * SIZE], 1)
        elif isinstance(module, MLP):
            module.gate_up_proj.weight = part(module.gate_up_proj.weight, [INNER, INNER])
            module.down_proj.weight = part(module.down_proj.weight, [INNER], 1)
