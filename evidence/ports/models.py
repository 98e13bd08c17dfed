"""References of transformers, and ports of them in other words, each with a switch for errors that ports have.

The ports are small rewrites in the manner of public implementations: GPT-2 with linear layers, a vision transformer
and Llama with fused projections, Llama with its rotary positions in neighboring pairs, BERT with one layer for three.
timm's vision transformer is its own code, where timm is installed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

WIDTH, HEADS, WORDS, LENGTH, BLOCKS, AT = 32, 4, 50, 16, 3, 1
"""``AT`` is the block in which an error is planted."""


def drawn(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return a model whose biases and norms are not 0 and 1 either."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


def set_from(layer: nn.Module, *sources: nn.Module, turned: bool = False) -> None:
    """Set the parameters of a layer from the rows of others, one after the other."""
    for name, parameter in layer.named_parameters(recurse=False):
        if not hasattr(sources[0], name):  # planted: the bias of another norm
            continue
        parts = [getattr(source, name).detach() for source in sources]
        values = torch.cat([part.T if turned and part.ndim == 2 else part for part in parts])
        parameter.data.copy_(values.reshape(parameter.shape))


# --- GPT-2 ------------------------------------------------------------------------------------------------------------


class CausalSelfAttention(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        if self.error == "qkv order":
            q, k, v = k, q, v
        q, k, v = (t.view(rows, length, HEADS, WIDTH // HEADS).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-2, -1)
        if self.error != "scale":
            scores = scores / math.sqrt(WIDTH // HEADS)
        if self.error != "mask":
            scores = scores.masked_fill(torch.ones(length, length).tril() == 0, float("-inf"))
        y = scores.softmax(-1) @ v
        if self.error == "heads":
            return self.c_proj(y.reshape(rows, length, WIDTH))
        return self.c_proj(y.transpose(1, 2).reshape(rows, length, WIDTH))


class Feedforward(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH, bias=error != "bias"), nn.Linear(4 * WIDTH, WIDTH)
        self.gelu = nn.GELU(approximate="none" if error == "gelu" else "tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, eps=1e-3 if error == "eps" else 1e-5), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = CausalSelfAttention(error), Feedforward(error)

    def forward(self, x: Tensor) -> Tensor:
        if self.error == "post-norm":
            x = self.ln_1(x + self.attn(x))
            return self.ln_2(x + self.mlp(x))
        if self.error == "residual":
            x = self.ln_1(x) + self.attn(self.ln_1(x))
        else:
            x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error
        self.tok, self.pos = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(error if i == AT else "") for i in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if error != "untied":
            self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]) + (self.error == "position"))
        for block in self.blocks:
            x = block(x)
        return self.head(x if self.error == "no last norm" else self.norm(x))


def gpt2() -> Any:
    size = {"n_embd": WIDTH, "n_head": HEADS, "n_layer": BLOCKS, "n_positions": LENGTH, "vocab_size": WORDS}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0))


def nano_gpt(source: Any, error: str) -> nn.Module:
    model, its = NanoGPT(error).eval(), source.transformer
    set_from(model.head, source.lm_head)
    for mine, theirs in ((model.tok, its.wte), (model.pos, its.wpe), (model.norm, its.ln_f)):
        set_from(mine, theirs)
    for a, e in zip(model.blocks, its.h, strict=True):
        set_from(a.ln_1, e.ln_1)
        set_from(a.ln_2, e.ln_2)
        for mine, theirs in ((a.attn, e.attn), (a.mlp, e.mlp)):
            for name in ("c_attn", "c_fc", "c_proj"):
                if hasattr(mine, name):
                    set_from(getattr(mine, name), getattr(theirs, name), turned=True)
    return model


# --- a vision transformer ---------------------------------------------------------------------------------------------


class FusedAttention(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        rows, length, _ = x.shape
        layout = (HEADS, 3) if self.error == "qkv order" else (3, HEADS)
        qkv = self.qkv(x).reshape(rows, length, *layout, WIDTH // HEADS)
        q, k, v = (qkv.transpose(2, 3) if self.error == "qkv order" else qkv).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, scale=1.0 if self.error == "scale" else None)
        return self.proj(y.transpose(1, 2).reshape(rows, length, WIDTH))


class PatchEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, WIDTH, 4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.act = nn.GELU(approximate="tanh" if error == "gelu" else "none")

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class VisionBlock(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6 if error == "eps" else 1e-2), nn.LayerNorm(WIDTH, 1e-2)
        self.attn, self.mlp = FusedAttention(error), MLP(error)

    def forward(self, x: Tensor) -> Tensor:
        if self.error == "post-norm":
            x = self.norm1(x + self.attn(x))
            return self.norm2(x + self.mlp(x))
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error
        self.patch_embed = PatchEmbed()
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.zeros(1, 17, WIDTH))
        self.blocks = nn.Sequential(*(VisionBlock(error if i == AT else "") for i in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH, eps=1e-2), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), self.patch_embed(x)], 1)
        x = x + (self.pos_embed.roll(1, 1) if self.error == "position" else self.pos_embed)
        x = self.norm(self.blocks(x))
        return self.head(x.mean(1) if self.error == "pooling" else x[:, 0])


def vit() -> Any:
    size = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": BLOCKS, "image_size": 16,
            "intermediate_size": 4 * WIDTH, "patch_size": 4, "layer_norm_eps": 1e-2, "num_labels": 10}  # fmt: skip
    return transformers.ViTForImageClassification(transformers.ViTConfig(**size))


def layers_of(model: Any, *kinds: str) -> list[nn.Module]:
    """Return the layers whose class has one of these names, in order."""
    return [module for module in model.modules() if type(module).__name__ in kinds]


def fused_vit(source: Any, error: str) -> nn.Module:
    model = VisionTransformer(error).eval()
    set_vit(model, source)
    return model


def set_vit(model: Any, source: Any) -> None:
    """Set a vision transformer in the words of timm from one of transformers."""
    its = source.vit
    set_from(model.patch_embed.proj, its.embeddings.patch_embeddings.projection)
    places = its.embeddings.position_embeddings
    if model.cls_token is None:
        places = places[:, 1:]
    else:
        model.cls_token.data.copy_(its.embeddings.cls_token)
    model.pos_embed.data.copy_(places)
    set_from(model.norm, its.layernorm)
    set_from(model.head, source.classifier)
    for a, e in zip(model.blocks, layers_of(its, "ViTLayer"), strict=True):
        norms, linear = layers_of(e, "LayerNorm"), dict(e.named_modules())
        set_from(a.norm1, norms[0])
        set_from(a.norm2, norms[1])
        named = {name.rpartition(".")[2] if "output" not in name else name: m for name, m in linear.items()}
        _set_encoder(a, named, [m for m in e.modules() if isinstance(m, nn.Linear)])


def _set_encoder(a: Any, named: Mapping[str, nn.Module], linear: Sequence[nn.Module]) -> None:
    def find(*names: str) -> nn.Module:
        return next(named[name] for name in names if name in named)

    query, key, value = find("query", "q_proj"), find("key", "k_proj"), find("value", "v_proj")
    out, up, down = (m for m in linear if m not in (query, key, value))
    set_from(a.attn.qkv, query, key, value)
    set_from(a.attn.proj, out)
    set_from(a.mlp.fc1, up)
    set_from(a.mlp.fc2, down)


def timm_vit(source: Any, error: str) -> nn.Module:
    """Return timm's own model with the weights of ViT."""
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(
        img_size=16, patch_size=4, num_classes=10, embed_dim=WIDTH, depth=BLOCKS, num_heads=HEADS, fc_norm=False,
        norm_layer=functools.partial(nn.LayerNorm, eps=1e-2), class_token=error != "no class token",
        global_pool="avg" if error in ("pooling", "no class token") else "token",
    ).eval()  # fmt: skip
    set_vit(model, source)
    block = model.blocks[AT]
    attention = block.attn
    if error == "eps":
        block.norm1.eps = 1e-6
    elif error == "gelu":
        block.mlp.act = nn.GELU(approximate="tanh")
    elif error == "scale":
        attention.fused_attn, attention.scale = False, 1.0
    elif error == "bias":
        attention.qkv.bias = None
    elif error in ("q and k", "qkv order"):
        rows = torch.arange(3 * WIDTH).view(3, HEADS, -1)
        rows = rows[[1, 0, 2]] if error == "q and k" else rows.transpose(0, 1)
        for parameter in attention.qkv.parameters():
            parameter.data = parameter.data[rows.flatten()]
    elif error == "class token":
        model.cls_token.data.zero_()
    elif error == "position":
        model.pos_embed.data = model.pos_embed.data.roll(1, 1)
    elif error == "patch":
        weight = model.patch_embed.proj.weight
        weight.data = weight.data.transpose(-1, -2).contiguous()
    return model


# --- Llama ------------------------------------------------------------------------------------------------------------


class LlamaAttention(nn.Module):
    def __init__(self, error: str, neighbors: bool) -> None:
        super().__init__()
        self.error, self.neighbors = error, neighbors != (error == "rope")
        self.wqkv, self.wo = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        size = WIDTH // HEADS
        q, k, v = (p.view(rows, length, -1, size).transpose(1, 2) for p in self.wqkv(x).split([32, 16, 16], -1))
        q, k = self.rotated(q), self.rotated(k)
        if self.error == "kv heads":
            k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
        else:
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scale = 1.0 if self.error == "scale" else None
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.error != "mask", scale=scale)
        return self.wo(y.transpose(1, 2).reshape(rows, length, WIDTH))

    def rotated(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        base = 1_000 if self.error == "rope base" else 10_000
        angles = torch.arange(x.shape[2])[:, None] / base ** (torch.arange(0, size, 2) / size)
        angles = angles + (self.error == "position") * torch.ones(1, size // 2) * torch.arange(x.shape[2])[:, None]
        cos, sin = angles.cos(), angles.sin()
        if self.neighbors:
            a, b = x[..., ::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Gated(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error
        self.w13, self.w2 = nn.Linear(WIDTH, 128, bias=False), nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, -1)
        if self.error == "gate order":
            gate, up = up, gate
        return self.w2((F.gelu(gate) if self.error == "gelu" else F.silu(gate)) * up)


class LlamaBlock(nn.Module):
    def __init__(self, error: str, neighbors: bool) -> None:
        super().__init__()
        norm = nn.LayerNorm if error == "layer norm" else nn.RMSNorm
        self.attention_norm, self.ffn_norm = norm(WIDTH, 1e-2 if error == "eps" else 1e-6), nn.RMSNorm(WIDTH, 1e-6)
        self.attention, self.feed_forward = LlamaAttention(error, neighbors), Gated(error)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class FusedLlama(nn.Module):
    def __init__(self, error: str, *, neighbors: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(LlamaBlock(error if i == AT else "", neighbors) for i in range(BLOCKS))
        self.norm, self.output = nn.RMSNorm(WIDTH, 1e-6), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def llama() -> Any:
    size = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": BLOCKS, "num_attention_heads": HEADS,
            "num_key_value_heads": 2, "vocab_size": WORDS, "max_position_embeddings": 64}  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size))


def fused_llama(source: Any, error: str, *, neighbors: bool = False) -> nn.Module:
    model, its = FusedLlama(error, neighbors=neighbors).eval(), source.model
    set_from(model.tok_embeddings, its.embed_tokens)
    set_from(model.norm, its.norm)
    set_from(model.output, source.lm_head)
    for a, e in zip(model.layers, its.layers, strict=True):
        set_from(a.attention_norm, e.input_layernorm)
        set_from(a.ffn_norm, e.post_attention_layernorm)
        set_from(a.attention.wqkv, e.self_attn.q_proj, e.self_attn.k_proj, e.self_attn.v_proj)
        if neighbors:  # the halves of each head, one element of each in turn
            rows = a.attention.wqkv.weight.data
            rows[:48] = rows[:48].view(6, 2, 4, WIDTH).transpose(1, 2).reshape(48, WIDTH)
        set_from(a.attention.wo, e.self_attn.o_proj)
        set_from(a.feed_forward.w13, e.mlp.gate_proj, e.mlp.up_proj)
        set_from(a.feed_forward.w2, e.mlp.down_proj)
    return model


def llama_of_neighbors(source: Any, error: str) -> nn.Module:
    return fused_llama(source, error, neighbors=True)


# --- BERT -------------------------------------------------------------------------------------------------------------


class PostNormBlock(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error
        self.attn, self.mlp = FusedAttention(error), MLP(error)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-5 if error == "eps" else 1e-2), nn.LayerNorm(WIDTH, 1e-2)

    def forward(self, x: Tensor) -> Tensor:
        if self.error == "pre-norm":
            x = x + self.attn(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


class Encoder(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error
        self.words, self.places, self.kinds = (nn.Embedding(n, WIDTH) for n in (WORDS, LENGTH, 2))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-2)
        self.blocks = nn.ModuleList(PostNormBlock(error if i == AT else "") for i in range(BLOCKS))

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]) + (self.error == "position")
        x = self.words(ids) + self.kinds(torch.full_like(ids, int(self.error == "kinds"))) + self.places(places)
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return x


def bert() -> Any:
    size = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": BLOCKS, "vocab_size": WORDS,
            "intermediate_size": 4 * WIDTH, "max_position_embeddings": LENGTH, "layer_norm_eps": 1e-2}  # fmt: skip
    return transformers.BertModel(transformers.BertConfig(**size), add_pooling_layer=False)


def fused_bert(source: Any, error: str) -> nn.Module:
    model, its = Encoder(error).eval(), source.embeddings
    set_from(model.words, its.word_embeddings)
    set_from(model.places, its.position_embeddings)
    set_from(model.kinds, its.token_type_embeddings)
    set_from(model.norm, its.LayerNorm)
    for a, e in zip(model.blocks, source.encoder.layer, strict=True):
        linear = dict(e.named_modules())
        _set_encoder(a, {name.rpartition(".")[2]: m for name, m in linear.items()},
                     [m for m in e.modules() if isinstance(m, nn.Linear)])  # fmt: skip
        set_from(a.norm1, e.attention.output.LayerNorm)
        set_from(a.norm2, e.output.LayerNorm)
    return model
