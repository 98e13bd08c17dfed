"""Pairs of small PyTorch models: some compute the same function and differ in rounding, some do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Make = Callable[[], nn.Module]


@dataclass(frozen=True)
class Pair:
    """Two implementations of one model, and whether they compute the same function."""

    name: str
    right: bool
    reference: Make
    changed: Make
    inputs: Callable[[], tuple[Tensor, ...]]
    layer: str = ""
    attribute: bool = False


def swap(build: Make, path: str, part: Make) -> Make:
    """The same model with the submodule at path built by part."""

    def make() -> nn.Module:
        model = build()
        model.set_submodule(path, part())
        return model

    return make


def tune(build: Make, path: str, **values: object) -> Make:
    """The same model with attributes of the submodule at path set to other values."""

    def make() -> nn.Module:
        model = build()
        for name, value in values.items():
            setattr(model.get_submodule(path), name, value)
        return model

    return make


def jitter(model: nn.Module) -> None:
    """Move gains and biases off their ones and zeros, as training does."""
    for value in model.parameters():
        if value.ndim == 1:
            value.data.add_(0.1 * torch.randn_like(value))


class RMSNorm(nn.Module):
    """Root mean square norm in the model's dtype."""

    def __init__(self, width: int = 64, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class RMSNormFloat(RMSNorm):
    """Right: statistics in float32."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class RMSNormFunctional(RMSNorm):
    """Right: the operator of torch."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class RMSNormEpsOutside(RMSNorm):
    """Wrong: eps added to the root, not inside of it."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class LayerNormMoments(nn.LayerNorm):
    """Right: the variance as E[x²] - E[x]²."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        var = x.square().mean(-1, keepdim=True) - mean.square()
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


class LayerNormUnbiased(nn.LayerNorm):
    """Wrong: the variance divides by n - 1."""

    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, -1, correction=1, keepdim=True)
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


class GroupNormWritten(nn.GroupNorm):
    """Right: group norm written out, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        g = x.float().unflatten(1, (self.num_groups, -1))
        g = g - g.mean((2, 3, 4), keepdim=True)
        g = g / (g.square().mean((2, 3, 4), keepdim=True) + self.eps).sqrt()
        y = g.flatten(1, 2).to(x.dtype)
        return y * self.weight[:, None, None] + self.bias[:, None, None]


class Rotary(nn.Module):
    """Rotary positions by halves; cos and sin in the dtype of the heads."""

    def __init__(self, dim: int = 16, base: float = 10000.0, start: int = 0) -> None:
        super().__init__()
        self.dim, self.base, self.start = dim, base, start

    def positions(self, length: int, late: int) -> Tensor:
        return torch.arange(self.start + late, self.start + late + length).float()

    def angles(self, length: int, late: int) -> Tensor:
        speed = self.base ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        return self.positions(length, late)[:, None] * speed

    def forward(self, x: Tensor, late: int = 0) -> Tensor:
        angle = self.angles(x.shape[-2], late)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class RotaryFloat(Rotary):
    """Right: rotated in float32, then cast."""

    def forward(self, x: Tensor, late: int = 0) -> Tensor:
        angle = self.angles(x.shape[-2], late)
        a, b = x.float().chunk(2, -1)
        y = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
        return y.to(x.dtype)


class RotaryComplex(Rotary):
    """Right: the two halves as one complex number."""

    def forward(self, x: Tensor, late: int = 0) -> Tensor:
        angle = self.angles(x.shape[-2], late)
        z = torch.complex(*x.float().chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), -1).to(x.dtype)


class RotaryInterleaved(Rotary):
    """Wrong: pairs of neighbours, not of halves."""

    def forward(self, x: Tensor, late: int = 0) -> Tensor:
        angle = self.angles(x.shape[-2], late)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


class RotaryRoundedPositions(Rotary):
    """Wrong: positions kept in bfloat16, which has no odd numbers beyond 256."""

    def positions(self, length: int, late: int) -> Tensor:
        return super().positions(length, late).bfloat16().float()


class GroupedAttention(nn.Module):
    """Causal attention with rotary positions; each key head serves several query heads."""

    def __init__(self, width: int = 64, heads: int = 4, groups: int = 2, rotary: Make = Rotary) -> None:
        super().__init__()
        self.heads, self.groups, self.dim = heads, groups, width // heads
        self.q = nn.Linear(width, heads * self.dim, bias=False)
        self.k = nn.Linear(width, groups * self.dim, bias=False)
        self.v = nn.Linear(width, groups * self.dim, bias=False)
        self.o = nn.Linear(heads * self.dim, width, bias=False)
        self.rotary = rotary()
        self.q.weight.data.mul_(2)
        self.k.weight.data.mul_(2)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.dim)).transpose(1, 2)

    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.heads // self.groups, 1)

    def hidden(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).triu(1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ self.repeat(k).transpose(-2, -1) * self.dim**-0.5
        return scores.masked_fill(self.hidden(q.shape[-2]), -math.inf).softmax(-1) @ self.repeat(v)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        y = self.attend(self.rotary(q), self.rotary(k), v)
        return self.o(y.transpose(1, 2).flatten(2))


class GroupedSdpa(GroupedAttention):
    """Right: torch's operator in the place of the written attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, self.repeat(k), self.repeat(v), is_causal=True)


class GroupedTiled(GroupedAttention):
    """Wrong: repeat in the place of repeat_interleave."""

    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.heads // self.groups, 1, 1)


class GroupedLateKeys(GroupedAttention):
    """Wrong: the keys' positions are one too late."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        y = self.attend(self.rotary(q), self.rotary(k, late=1), v)
        return self.o(y.transpose(1, 2).flatten(2))


class WindowAttention(GroupedAttention):
    """Each token sees the last `window` tokens; scores are capped softly."""

    def __init__(self, window: int = 8, cap: float = 50.0) -> None:
        super().__init__()
        self.window, self.cap = window, cap

    def hidden(self, length: int) -> Tensor:
        back = torch.arange(length)[:, None] - torch.arange(length)
        return (back < 0) | (back >= self.window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ self.repeat(k).transpose(-2, -1) * self.dim**-0.5
        scores = self.cap * torch.tanh(scores / self.cap)
        return scores.masked_fill(self.hidden(q.shape[-2]), -math.inf).softmax(-1) @ self.repeat(v)


class SwiGLU(nn.Module):
    """Gated perceptron; the gate is clamped from above."""

    def __init__(self, width: int = 64, inner: int = 128, limit: float = 7.0) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x).clamp(max=self.limit)) * self.up(x))


class SwiGLUSigmoid(SwiGLU):
    """Right: x * sigmoid(x) for silu."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).clamp(max=self.limit)
        return self.down(self.up(x) * gate * torch.sigmoid(gate))


class Block(nn.Module):
    """Residual block with norms in front."""

    def __init__(self, mixer: Make = GroupedAttention, mlp: Make = SwiGLU, norm: Make = RMSNorm) -> None:
        super().__init__()
        self.norm1, self.mixer = norm(), mixer()
        self.norm2, self.mlp = norm(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class BlockFloat(Block):
    """Right: residuals added in float32, then cast."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.float() + self.mixer(self.norm1(x)).float()
        h = h + self.mlp(self.norm2(h.to(x.dtype))).float()
        return h.to(x.dtype)


class BlockGrown(Block):
    """Wrong: the residual grows by one thousandth."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return 1.001 * x + self.mlp(self.norm2(x))


class BlockAfterNorm(Block):
    """Wrong: the second residual is taken behind the norm."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm2(x + self.mixer(self.norm1(x)))
        return x + self.mlp(x)


class Decoder(nn.Module):
    """Language model: embedding, three blocks, norm, head."""

    def __init__(
        self, mixer: Make = GroupedAttention, mlp: Make = SwiGLU, norm: Make = RMSNorm, block: type[Block] = Block
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.embed.weight.data.mul_(0.1)
        self.blocks = nn.ModuleList(block(mixer, mlp, norm) for _ in range(3))
        self.norm = norm()
        self.head = nn.Linear(64, 100, bias=False)
        jitter(self)

    def start(self, ids: Tensor) -> Tensor:
        return self.embed(ids)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class DecoderOneHot(Decoder):
    """Right: the embedding as a product with one-hot rows."""

    def start(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, 100).to(self.embed.weight.dtype) @ self.embed.weight


class ScaledDecoder(Decoder):
    """The embedding is scaled by the root of the width."""

    def start(self, ids: Tensor) -> Tensor:
        return self.embed(ids) * 64**0.5


def tokens() -> tuple[Tensor, ...]:
    return (torch.randint(0, 100, (2, 24)),)


class Attention(nn.Module):
    """Attention with one projection for queries, keys and values."""

    def __init__(self, causal: bool = True, width: int = 64, heads: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.causal, self.heads, self.scale = causal, heads, (width // heads) ** -0.5
        self.qkv.weight.data.mul_(2)

    def hide(self, scores: Tensor) -> Tensor:
        if not self.causal:
            return scores
        return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return self.hide(q @ k.transpose(-2, -1) * self.scale).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj((self.weights(q, k) @ v).transpose(1, 2).flatten(2))


class AttentionScaledQueries(Attention):
    """Right: the scale on the queries."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return self.hide((q * self.scale) @ k.transpose(-2, -1)).softmax(-1)


class AttentionFloatSoftmax(Attention):
    """Right: softmax in float32, by logsumexp."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = self.hide((q @ k.transpose(-2, -1) * self.scale).float())
        return (scores - scores.logsumexp(-1, keepdim=True)).exp().to(q.dtype)


class AttentionFiniteMask(Attention):
    """Right: a very negative number in the place of -inf."""

    def hide(self, scores: Tensor) -> Tensor:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return torch.where(future, torch.finfo(scores.dtype).min, scores)


class AttentionOnline(Attention):
    """Right: keys in chunks of 8, with a running maximum and sum."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        top = torch.full_like(q[..., :1], -math.inf, dtype=torch.float32)
        total, out = torch.zeros_like(top), torch.zeros_like(q, dtype=torch.float32)
        for key, value in zip(k.split(8, -2), v.split(8, -2), strict=True):
            scores = (q @ key.transpose(-2, -1)).float() * self.scale
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            part, old = (scores - new).exp(), (top - new).exp()
            total = total * old + part.sum(-1, keepdim=True)
            out = out * old + (part.to(value.dtype) @ value).float()
            top = new
        return self.proj((out / total).to(q.dtype).transpose(1, 2).flatten(2))


class AttentionNextToken(Attention):
    """Wrong: the causal mask leaves the next token visible."""

    def hide(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(2), -math.inf)


class AttentionOtherAxis(Attention):
    """Wrong: softmax over the queries."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return self.hide(q @ k.transpose(-2, -1) * self.scale).softmax(-2)


class AttentionNoValueBias(Attention):
    """Wrong: the bias of the values is forgotten."""

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        bias = torch.cat((self.qkv.bias[: 2 * width], torch.zeros_like(self.qkv.bias[2 * width :])))
        qkv = F.linear(x, self.qkv.weight, bias)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj((self.weights(q, k) @ v).transpose(1, 2).flatten(2))


class AttentionMixedHeads(Attention):
    """Wrong: heads and their channels change places before the projection."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj((self.weights(q, k) @ v).permute(0, 2, 3, 1).flatten(2))


class GeluWritten(nn.GELU):
    """Right: by the error function."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


class MLP(nn.Module):
    """Perceptron with GELU."""

    def __init__(self, width: int = 64, inner: int = 128, act: Make = nn.GELU) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, inner), act(), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class GPT(nn.Module):
    """Language model with learned positions, giving log-probabilities."""

    def __init__(self, mixer: Make = Attention, mlp: Make = MLP, norm: type[nn.LayerNorm] = nn.LayerNorm) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(100, 64), nn.Embedding(64, 64)
        self.embed.weight.data.mul_(0.1)
        self.positions.weight.data.mul_(0.1)
        self.blocks = nn.ModuleList(Block(mixer, mlp, partial(norm, 64)) for _ in range(3))
        self.norm = norm(64)
        self.head = nn.Linear(64, 100)
        self.head.weight.data.mul_(4)
        jitter(self)

    def start(self, ids: Tensor) -> Tensor:
        return self.embed(ids) + self.positions(torch.arange(ids.shape[1]))

    def finish(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for block in self.blocks:
            x = block(x)
        return self.finish(self.head(self.norm(x)))


class GPTLogSumExp(GPT):
    """Right: log_softmax by logsumexp."""

    def finish(self, logits: Tensor) -> Tensor:
        return logits - logits.logsumexp(-1, keepdim=True)


class GPTLatePositions(GPT):
    """Wrong: positions are one too late."""

    def start(self, ids: Tensor) -> Tensor:
        return self.embed(ids) + self.positions(torch.arange(1, ids.shape[1] + 1))


class PatchUnfold(nn.Conv2d):
    """Right: patches by unfold, then one product."""

    def forward(self, x: Tensor) -> Tensor:
        columns = F.unfold(x, self.kernel_size, stride=self.stride)
        y = F.linear(columns.transpose(1, 2), self.weight.flatten(1), self.bias)
        return y.transpose(1, 2).unflatten(-1, (x.shape[-2] // self.stride[0], -1))


class ViT(nn.Module):
    """Vision transformer with a class token; pools over the patches."""

    def __init__(self, mixer: type[Attention] = Attention, patch: type[nn.Conv2d] = nn.Conv2d) -> None:
        super().__init__()
        self.patch = patch(3, 64, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 64))
        self.positions = nn.Parameter(0.1 * torch.randn(1, 37, 64))
        self.blocks = nn.ModuleList(Block(partial(mixer, False), MLP, partial(nn.LayerNorm, 64)) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 32)
        jitter(self)

    def pool(self, x: Tensor) -> Tensor:
        return x[:, 1:].mean(1)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.pool(self.norm(x)))


class ViTPoolAll(ViT):
    """Wrong: the class token is pooled too."""

    def pool(self, x: Tensor) -> Tensor:
        return x.mean(1)


class MixerBlock(nn.Module):
    """Perceptrons over tokens and over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.tokens = nn.LayerNorm(64, eps=1e-6), MLP(36, 64)
        self.norm2, self.channels = nn.LayerNorm(64, eps=1e-6), MLP(64, 128)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class MixerBlockEinsum(MixerBlock):
    """Right: the tokens' perceptron by einsum, without a transpose."""

    def forward(self, x: Tensor) -> Tensor:
        fc1, fc2 = self.tokens.fc1, self.tokens.fc2
        h = F.gelu(torch.einsum("btc,ht->bhc", self.norm1(x), fc1.weight) + fc1.bias[:, None])
        x = x + torch.einsum("bhc,th->btc", h, fc2.weight) + fc2.bias[:, None]
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """MLP-Mixer on patches."""

    def __init__(self, block: Make = MixerBlock) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 64, 4, 4)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 32)
        jitter(self)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def images() -> tuple[Tensor, ...]:
    return (torch.randn(2, 3, 24, 24),)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, norm, perceptron, scale per channel."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(0.5 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.fc2(self.act(self.fc1(h)))).permute(0, 3, 1, 2)


class ConvNeXtBlockConvs(ConvNeXtBlock):
    """Right: the perceptron as 1x1 convolutions."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        h = self.act(F.conv2d(h, self.fc1.weight[:, :, None, None], self.fc1.bias))
        return x + self.scale[:, None, None] * F.conv2d(h, self.fc2.weight[:, :, None, None], self.fc2.bias)


class ConvNeXt(nn.Module):
    """Stem, three blocks, pool, head."""

    def __init__(self, block: Make = ConvNeXtBlock) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 2, 2)
        self.blocks = nn.Sequential(*(block() for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 20)
        jitter(self)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(image)).mean((2, 3))))


class ConvColumns(nn.Conv2d):
    """Right: the convolution as im2col and a product."""

    def forward(self, x: Tensor) -> Tensor:
        columns = F.unfold(x, 3, padding=1, stride=self.stride)
        rows = (x.shape[-2] - 1) // self.stride[0] + 1
        return (self.weight.flatten(1) @ columns).unflatten(-1, (rows, -1))


class Shortcut(nn.Module):
    """Every second pixel, then a 1x1 convolution."""

    def __init__(self, width: int = 32, out: int = 64) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x[..., ::2, ::2])


class ShortcutOffset(Shortcut):
    """Wrong: starts from the second pixel."""

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x[..., 1::2, 1::2])


class ResBlock(nn.Module):
    """Two convolutions with batch norm, shortcut."""

    def __init__(self, conv: type[nn.Conv2d], width: int, out: int) -> None:
        super().__init__()
        stride = 1 if width == out else 2
        self.conv1, self.norm1 = conv(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.norm2 = conv(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Identity() if width == out else Shortcut(width, out)
        self.act = nn.LeakyReLU(0.01)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        return self.act(h + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, three blocks, pool, head."""

    def __init__(self, conv: type[nn.Conv2d] = nn.Conv2d) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.Sequential(ResBlock(conv, 32, 32), ResBlock(conv, 32, 64), ResBlock(conv, 64, 64))
        self.head = nn.Linear(64, 20)
        jitter(self)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(image)).mean((2, 3)))


class NormedBlock(nn.Module):
    """Residual block with group norm."""

    def __init__(self, width: int, out: int, norm: type[nn.GroupNorm] = nn.GroupNorm) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm(8, width), nn.Conv2d(width, out, 3, padding=1)
        self.norm2, self.conv2 = norm(8, out), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UpMatrix(nn.Module):
    """Right: bilinear doubling as products with two interpolation matrices."""

    def matrix(self, size: int) -> Tensor:
        place = ((torch.arange(2 * size) + 0.5) / 2 - 0.5).clamp(0, size - 1)
        return (1 - (place[:, None] - torch.arange(size)).abs()).clamp(min=0)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self.matrix(x.shape[-2]).to(x.dtype), self.matrix(x.shape[-1]).to(x.dtype)
        return rows @ x @ columns.t()


class UNet(nn.Module):
    """One way down, one way up, one skip connection."""

    def __init__(self, norm: type[nn.GroupNorm] = nn.GroupNorm) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.down1 = NormedBlock(32, 32, norm)
        self.pool = nn.AvgPool2d(3, 2, padding=1, count_include_pad=False)
        self.down2 = NormedBlock(32, 64, norm)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.up1 = NormedBlock(96, 32, norm)
        self.out = nn.Conv2d(32, 3, 3, padding=1)
        jitter(self)

    def forward(self, image: Tensor) -> Tensor:
        skip = self.down1(self.stem(image))
        x = self.down2(self.pool(skip))
        return self.out(self.up1(torch.cat((self.up(x), skip), 1)))


class LSTMCell(nn.Module):
    """Gates in the order of torch: input, forget, cell, output."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.x2h, self.h2h = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = (self.x2h(x) + self.h2h(h)).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class LSTMCellJoined(LSTMCell):
    """Right: one product of the joined input and state; sigmoid by tanh."""

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        weight = torch.cat((self.x2h.weight, self.h2h.weight), 1)
        gates = F.linear(torch.cat((x, h), -1), weight, self.x2h.bias + self.h2h.bias)
        i, f, g, o = gates.chunk(4, -1)
        i, f, o = (0.5 + 0.5 * torch.tanh(0.5 * gate) for gate in (i, f, o))
        c = f * c + i * torch.tanh(g)
        return o * torch.tanh(c), c


class LSTMCellOrder(LSTMCell):
    """Wrong: input, forget, output, cell."""

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, o, g = (self.x2h(x) + self.h2h(h)).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class LSTMLayer(nn.Module):
    """A cell over time."""

    def __init__(self, cell: Make = LSTMCell) -> None:
        super().__init__()
        self.cell = cell()

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros_like(x[:, 0])
        states = []
        for step in x.unbind(1):
            h, c = self.cell(step, h, c)
            states.append(h)
        return torch.stack(states, 1)


class GRULayer(nn.Module):
    """A gated recurrent unit over time."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.x2h, self.h2h = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)

    def new(self, x: Tensor, h: Tensor, reset: Tensor) -> Tensor:
        return torch.tanh(x + reset * h)

    def forward(self, x: Tensor) -> Tensor:
        h, states = torch.zeros_like(x[:, 0]), []
        for step in x.unbind(1):
            (a, b, c), (d, e, f) = self.x2h(step).chunk(3, -1), self.h2h(h).chunk(3, -1)
            reset, update = torch.sigmoid(a + d), torch.sigmoid(b + e)
            h = (1 - update) * self.new(c, f, reset) + update * h
            states.append(h)
        return torch.stack(states, 1)


class GRULayerBias(GRULayer):
    """Wrong: the bias of the new state is added behind the reset gate."""

    def new(self, x: Tensor, h: Tensor, reset: Tensor) -> Tensor:
        bias = self.h2h.bias.chunk(3)[2]
        return torch.tanh(x + reset * (h - bias) + bias)


class Recurrent(nn.Module):
    """Embedding, three recurrent layers, head."""

    def __init__(self, layer: Make = LSTMLayer) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.layers = nn.Sequential(*(layer() for _ in range(3)))
        self.head = nn.Linear(64, 100)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(ids)))


class Scan(nn.Module):
    """Selective state-space layer."""

    def __init__(self, width: int = 64, state: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)
        self.step, self.softplus = nn.Linear(width, width), nn.Softplus()
        self.bc = nn.Linear(width, 2 * state)
        self.log_a = nn.Parameter(torch.arange(1, state + 1).float().log().repeat(width, 1))
        self.d = nn.Parameter(torch.ones(width))
        self.out = nn.Linear(width, width)

    def decay(self, dt: Tensor) -> Tensor:
        return torch.exp(-dt[..., None] * self.log_a.exp())

    def scan(self, u: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        decay, add = self.decay(dt), (dt * u)[..., None] * b[:, :, None]
        h, states = torch.zeros_like(add[:, 0]), []
        for t in range(u.shape[1]):
            h = decay[:, t] * h + add[:, t]
            states.append((h * c[:, t, None]).sum(-1))
        return torch.stack(states, 1)

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.inner(x).chunk(2, -1)
        u = F.silu(u)
        b, c = self.bc(u).chunk(2, -1)
        y = self.scan(u, self.softplus(self.step(u)), b, c)
        return self.out((y + self.d * u) * F.silu(z))


class ScanCumulated(Scan):
    """Right: all pairs of steps at once, by cumulated logarithms of the decay in float32."""

    def scan(self, u: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        log = (-dt.float()[..., None] * self.log_a.float().exp()).cumsum(1)
        future = torch.ones(u.shape[1], u.shape[1], dtype=torch.bool).triu(1)[:, :, None, None]
        decay = (log[:, :, None] - log[:, None]).masked_fill(future, -math.inf).exp()
        y = torch.einsum("btsin,bsi,bsn,btn->bti", decay, (dt * u).float(), b.float(), c.float())
        return y.to(u.dtype)


class ScanEuler(Scan):
    """Wrong: the decay by Euler's backward step, not by the exponential."""

    def decay(self, dt: Tensor) -> Tensor:
        return 1 / (1 + dt[..., None] * self.log_a.exp())


class Experts(nn.Module):
    """The two best of four experts, one expert after another."""

    def __init__(self, width: int = 64, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(SwiGLU(width, 64) for _ in range(count))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, index = self.router(x).float().softmax(-1).topk(2)
        return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), index

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, index = self.route(flat)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            y = expert(flat[token]) * weights[token, slot, None]
            out = out.index_add(0, token, y.to(out.dtype))
        return out.view_as(x)


class ExpertsDense(Experts):
    """Right: all experts on all tokens, most with weight zero."""

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.route(x)
        dense = torch.zeros_like(x[..., : len(self.experts)]).scatter(-1, index, weights)
        return torch.einsum("bte,btce->btc", dense, torch.stack([expert(x) for expert in self.experts], -1))


class ExpertsBestFirst(Experts):
    """Right: the best logits first, then their softmax."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, index = self.router(x).float().topk(2)
        return logits.softmax(-1).to(x.dtype), index


class ExpertsNotNormalized(Experts):
    """Wrong: the weights of the chosen two do not add up to one."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, index = self.router(x).float().softmax(-1).topk(2)
        return weights.to(x.dtype), index


class CrossAttention(nn.Module):
    """Attends to a memory, without its padding."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.q, self.kv, self.proj = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.heads = heads

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def hide(self, scores: Tensor, padding: Tensor) -> Tensor:
        return scores.masked_fill(padding[:, None, None], -math.inf)

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        key, value = self.kv(memory).chunk(2, -1)
        q, k, v = self.split(self.q(x)), self.split(key), self.split(value)
        scores = self.hide(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, padding)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class CrossAttentionSum(CrossAttention):
    """Right: exponentials masked by zero; divided by their sum behind the values; all by einsum."""

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        key, value = self.kv(memory).unflatten(-1, (2, self.heads, -1)).unbind(2)
        q = self.q(x).unflatten(-1, (self.heads, -1)) / math.sqrt(key.shape[-1])
        scores = torch.einsum("bthd,bshd->bhts", q, key).float()
        mass = (scores - scores.amax(-1, keepdim=True).detach()).exp() * ~padding[:, None, None]
        y = torch.einsum("bhts,bshd->bthd", mass, value.float()) / mass.sum(-1).transpose(1, 2)[..., None]
        return self.proj(y.flatten(2).to(q.dtype))


class CrossAttentionPadding(CrossAttention):
    """Wrong: the padding is attended to as well."""

    def hide(self, scores: Tensor, padding: Tensor) -> Tensor:
        return scores


class CrossBlock(nn.Module):
    """Self attention, cross attention, perceptron."""

    def __init__(self, cross: Make) -> None:
        super().__init__()
        self.norm1, self.mixer = nn.LayerNorm(64), Attention()
        self.norm2, self.cross = nn.LayerNorm(64), cross()
        self.norm3, self.mlp = nn.LayerNorm(64), MLP()

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        x = x + self.cross(self.norm2(x), memory, padding)
        return x + self.mlp(self.norm3(x))


class Translator(nn.Module):
    """Encoder and decoder; source token 0 is padding."""

    def __init__(self, cross: Make = CrossAttention) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(100, 64), nn.Embedding(64, 64)
        self.encoder = Block(partial(Attention, False), MLP, partial(nn.LayerNorm, 64))
        self.norm = nn.LayerNorm(64)
        self.blocks = nn.ModuleList(CrossBlock(cross) for _ in range(3))
        self.head = nn.Linear(64, 100)
        jitter(self)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.norm(self.encoder(self.embed(source) + self.positions(torch.arange(source.shape[1]))))
        x = self.embed(target) + self.positions(torch.arange(target.shape[1]))
        for block in self.blocks:
            x = block(x, memory, source == 0)
        return self.head(x)


def sentences() -> tuple[Tensor, ...]:
    source = torch.randint(1, 100, (2, 20))
    source[1, 17:] = 0
    return source, torch.randint(1, 100, (2, 12))


gpt_after_norm = partial(BlockAfterNorm, Attention, MLP, partial(nn.LayerNorm, 64))
late_llama = partial(Decoder, partial(GroupedAttention, rotary=partial(Rotary, start=300)))
late_rotary = partial(RotaryRoundedPositions, start=300)
window_llama = partial(Decoder, WindowAttention)
moe = swap(Decoder, "blocks.1.mlp", Experts)
gru = partial(Recurrent, GRULayer)
ssm = partial(Decoder, Scan)


def rotated(rotary: Make) -> Make:
    """A Llama whose attentions all hold this rotary module."""
    return partial(Decoder, partial(GroupedAttention, rotary=rotary))


RIGHT = [
    Pair("rms norm: in the dtype or in float32", True, Decoder, partial(Decoder, norm=RMSNormFloat), tokens),
    Pair("rms norm: written out or F.rms_norm", True, Decoder, partial(Decoder, norm=RMSNormFunctional), tokens),
    Pair("grouped attention: written out or sdpa", True, Decoder, partial(Decoder, GroupedSdpa), tokens),
    Pair("rotary: in the dtype or in float32", True, Decoder, rotated(RotaryFloat), tokens),
    Pair("rotary: real halves or complex numbers", True, Decoder, rotated(RotaryComplex), tokens),
    Pair("rotary: positions from 0 or from 1", True, Decoder, rotated(partial(Rotary, start=1)), tokens),
    Pair("residual: in the dtype or in float32", True, Decoder, partial(Decoder, block=BlockFloat), tokens),
    Pair("swiglu: silu or x * sigmoid(x)", True, Decoder, partial(Decoder, mlp=SwiGLUSigmoid), tokens),
    Pair("embedding: lookup or one-hot product", True, Decoder, DecoderOneHot, tokens),
    Pair("attention: scale on scores or on queries", True, GPT, partial(GPT, AttentionScaledQueries), tokens),
    Pair("attention: softmax in the dtype or in float32", True, GPT, partial(GPT, AttentionFloatSoftmax), tokens),
    Pair("attention: mask of -inf or of a finite number", True, GPT, partial(GPT, AttentionFiniteMask), tokens),
    Pair("layer norm: two passes or E[x²] - E[x]²", True, GPT, partial(GPT, norm=LayerNormMoments), tokens),
    Pair("gelu: F.gelu or erf", True, GPT, partial(GPT, mlp=partial(MLP, act=GeluWritten)), tokens),
    Pair("log_softmax: by torch or by logsumexp", True, GPT, GPTLogSumExp, tokens),
    Pair("vit: patches by convolution or unfold", True, ViT, partial(ViT, patch=PatchUnfold), images),
    Pair("vit: softmax at once or in chunks of keys", True, ViT, partial(ViT, AttentionOnline), images),
    Pair("mixer: transpose or einsum", True, Mixer, partial(Mixer, MixerBlockEinsum), images),
    Pair("convnext: linear or 1x1 convolution", True, ConvNeXt, partial(ConvNeXt, ConvNeXtBlockConvs), images),
    Pair("resnet: convolution or im2col", True, ResNet, partial(ResNet, ConvColumns), images),
    Pair("unet: group norm by torch or written out", True, UNet, partial(UNet, GroupNormWritten), images),
    Pair("unet: bilinear by torch or by matrices", True, UNet, swap(UNet, "up", UpMatrix), images),
    Pair("lstm: two products or one", True, Recurrent, partial(Recurrent, partial(LSTMLayer, LSTMCellJoined)), tokens),
    Pair("ssm: sequential or cumulated scan", True, ssm, partial(Decoder, ScanCumulated), tokens),
    Pair("moe: loop over experts or dense", True, moe, swap(Decoder, "blocks.1.mlp", ExpertsDense), tokens),
    Pair("moe: softmax or best two first", True, moe, swap(Decoder, "blocks.1.mlp", ExpertsBestFirst), tokens),
    Pair("cross attention: softmax or sums", True, Translator, partial(Translator, CrossAttentionSum), sentences),
]


def code(name: str, reference: Make, layer: str, part: Make, inputs: Callable[[], tuple[Tensor, ...]]) -> Pair:
    """A wrong pair: the module at layer has other code."""
    return Pair(name, False, reference, swap(reference, layer, part), inputs, layer)


def setting(name: str, reference: Make, layer: str, inputs: Callable[[], tuple[Tensor, ...]], **to: object) -> Pair:
    """A wrong pair: the module at layer has other attributes."""
    return Pair(name, False, reference, tune(reference, layer, **to), inputs, layer, True)


WRONG = [
    setting("rms norm: eps 1e-5 or 1e-6", Decoder, "blocks.1.norm1", tokens, eps=1e-6),
    code("rms norm: eps inside the root or added to it", Decoder, "blocks.1.norm2", RMSNormEpsOutside, tokens),
    code("grouped attention: repeat_interleave or repeat", Decoder, "blocks.1.mixer", GroupedTiled, tokens),
    code("rotary: keys one position too late", Decoder, "blocks.1.mixer", GroupedLateKeys, tokens),
    setting("rotary: base 10000 or 500000", Decoder, "blocks.1.mixer.rotary", tokens, base=500000.0),
    code("rotary: halves or neighbours", Decoder, "blocks.1.mixer.rotary", RotaryInterleaved, tokens),
    code("rotary: positions in bfloat16", late_llama, "blocks.1.mixer.rotary", late_rotary, tokens),
    setting("window attention: window of 8 or 9", window_llama, "blocks.1.mixer", tokens, window=9),
    setting("window attention: scores capped at 50 or 30", window_llama, "blocks.1.mixer", tokens, cap=30.0),
    code("residual: times 1.001", Decoder, "blocks.1", BlockGrown, tokens),
    setting("swiglu: gate clamped at 7 or 1", Decoder, "blocks.1.mlp", tokens, limit=1.0),
    Pair("embedding: scale dropped", False, ScaledDecoder, Decoder, tokens),
    setting("layer norm: eps 1e-5 or 1e-12", GPT, "blocks.1.norm1", tokens, eps=1e-12),
    code("layer norm: unbiased variance", GPT, "blocks.1.norm1", partial(LayerNormUnbiased, 64), tokens),
    setting("attention: scale of the width", GPT, "blocks.1.mixer", tokens, scale=64**-0.5),
    setting("attention: no scale", GPT, "blocks.1.mixer", tokens, scale=1.0),
    code("attention: next token visible", GPT, "blocks.1.mixer", AttentionNextToken, tokens),
    setting("attention: mask dropped", GPT, "blocks.1.mixer", tokens, causal=False),
    code("attention: softmax over queries", GPT, "blocks.1.mixer", AttentionOtherAxis, tokens),
    code("attention: bias of the values forgotten", GPT, "blocks.1.mixer", AttentionNoValueBias, tokens),
    code("attention: heads mixed before the projection", GPT, "blocks.1.mixer", AttentionMixedHeads, tokens),
    setting("gelu: exact or tanh", GPT, "blocks.1.mlp.act", tokens, approximate="tanh"),
    code("residual: before or behind the norm", GPT, "blocks.1", gpt_after_norm, tokens),
    Pair("positions: one too late", False, GPT, GPTLatePositions, tokens),
    Pair("vit: class token pooled too", False, ViT, ViTPoolAll, images),
    setting("mixer: eps 1e-6 or 1e-5", Mixer, "blocks.1.norm1", images, eps=1e-5),
    setting("convnext: padding replicated", ConvNeXt, "blocks.1.depthwise", images, padding_mode="replicate"),
    setting("resnet: batch norm's eps 1e-5 or 1e-3", ResNet, "blocks.1.norm1", images, eps=1e-3),
    setting("resnet: leaky slope 0.01 or 0.02", ResNet, "blocks.1.act", images, negative_slope=0.02),
    code("resnet: shortcut from the second pixel", ResNet, "blocks.1.shortcut", ShortcutOffset, images),
    setting("unet: align_corners", UNet, "up", images, align_corners=True),
    setting("unet: padding counted in the pool", UNet, "pool", images, count_include_pad=True),
    setting("unet: 8 or 4 groups", UNet, "down2.norm2", images, num_groups=4),
    code("lstm: order of the gates", Recurrent, "layers.1.cell", LSTMCellOrder, tokens),
    code("gru: bias inside or behind the reset gate", gru, "layers.1", GRULayerBias, tokens),
    code("ssm: decay by exponential or Euler", ssm, "blocks.1.mixer", ScanEuler, tokens),
    setting("ssm: softplus linear above 20 or 0.1", ssm, "blocks.1.mixer.softplus", tokens, threshold=0.1),
    code("moe: weights not normalized", moe, "blocks.1.mlp", ExpertsNotNormalized, tokens),
    code("cross attention: padding visible", Translator, "blocks.1.cross", CrossAttentionPadding, sentences),
]

PAIRS: list[Pair] = RIGHT + WRONG
