"""Pairs of small models, right (rounding alone differs) and wrong (another function), for a tool that compares two."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 64
Make = Callable[..., nn.Module]
Build = Callable[[], nn.Module]
Inputs = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Pair:
    """Two models, what they are called with, and whether they compute the same function."""

    name: str
    right: bool
    reference: Build
    changed: Build
    inputs: Inputs
    layer: str = ""
    attribute: bool = False


# ---- the common parts -------------------------------------------------------------------------------------------


def causal(length: int, device: torch.device, diagonal: int = 1) -> Tensor:
    """Which keys (columns) a query (row) must not see."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(diagonal)


class Attention(nn.Module):
    """Causal attention; what pairs differ in is `attend`."""

    def __init__(self, width: int, heads: int = 4, gain: float = 1.0) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.qkv.weight.data *= gain

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, self.qkv(x).chunk(3, -1))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * self.scale
        return scores.masked_fill(causal(q.shape[2], q.device), -math.inf).softmax(-1) @ v


class Mlp(nn.Module):
    """Two linear layers with GELU between."""

    def __init__(self, width: int, approximate: str = "none") -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 2 * width), nn.GELU(approximate), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


def embedding(width: int) -> nn.Module:
    """Plain embedding."""
    return nn.Embedding(VOCAB, width)


class Block(nn.Module):
    """Pre-norm block."""

    def __init__(self, width: int, mixer: Make, norm: Make, mlp: Make, norm1: Make | None = None) -> None:
        super().__init__()
        self.norm1, self.mixer, self.norm2, self.mlp = (norm1 or norm)(width), mixer(width), norm(width), mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Text(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, embed: nn.Module, blocks: list[nn.Module], width: int) -> None:
        super().__init__()
        self.embed, self.blocks = embed, nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text(
    mixer: Make = Attention,
    norm: Make = nn.LayerNorm,
    mlp: Make = Mlp,
    *,
    block: Make = Block,
    embed: Make = embedding,
    model: Make = Text,
    width: int = 64,
    **there: Make,
) -> Build:
    """Three blocks of these parts; the middle one takes the parts in `there` (mixer_, norm1_, mlp_, block_)."""

    def build() -> nn.Module:
        blocks = []
        for index in range(3):
            own = {key.rstrip("_"): part for key, part in there.items()} if index == 1 else {}
            parts = (own.get("mixer", mixer), norm, own.get("mlp", mlp), own.get("norm1"))
            blocks.append(own.get("block", block)(width, *parts))
        return model(embed(width), blocks, width)

    return build


class ConvBlock(nn.Module):
    """Residual 3 × 3 convolution."""

    def __init__(self, width: int, **settings: object) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, **{"padding": 1, **settings})  # type: ignore[arg-type]
        self.norm, self.act = nn.GroupNorm(4, width), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.norm(self.conv(x)))


class Images(nn.Module):
    """Stem, blocks, mean over the image, head."""

    def __init__(self, blocks: list[nn.Module], width: int) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, width, 3, padding=1), nn.Sequential(*blocks)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def convnet(middle: Make = ConvBlock, width: int = 32) -> Build:
    """A ConvNet with this block in the middle."""
    return lambda: Images([ConvBlock(width), middle(width), ConvBlock(width)], width)


def ids(length: int = 24, batch: int = 2) -> Inputs:
    """Token ids."""
    return lambda: (torch.randint(0, VOCAB, (batch, length)),)


def images(size: int = 16, mean: float = 0.0) -> Inputs:
    """Small images around this brightness."""
    return lambda: (torch.randn(2, 3, size, size) + mean,)


# ---- norms -------------------------------------------------------------------------------------------------------


class Rms(nn.Module):
    """RMS norm in the model's dtype."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width) + 0.5), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


class RmsFloat(Rms):
    """RMS norm in float32, cast before the weight."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype)


class RmsOutside(Rms):
    """Epsilon added to the deviation."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class Centred(nn.Module):
    """Layer norm of x + mean, written out in float32."""

    def __init__(self, width: int, mean: float = 0.0) -> None:
        super().__init__()
        self.mean, self.weight, self.bias = mean, nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def variance(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)).square().mean(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() + self.mean
        scale = (self.variance(wide) + 1e-5).rsqrt()
        return ((wide - wide.mean(-1, keepdim=True)) * scale).to(x.dtype) * self.weight + self.bias


class CentredByMoments(Centred):
    """Variance as E[x²] - E[x]²."""

    def variance(self, x: Tensor) -> Tensor:
        return x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square()


class CentredUnbiased(Centred):
    """Variance over n - 1."""

    def variance(self, x: Tensor) -> Tensor:
        return x.var(-1, keepdim=True)


class GroupNormWritten(nn.GroupNorm):
    """Group norm written out."""

    def forward(self, x: Tensor) -> Tensor:
        groups = x.float().unflatten(1, (self.num_groups, -1))
        var, mean = torch.var_mean(groups, (2, 3, 4), correction=0, keepdim=True)
        wide = ((groups - mean) / (var + self.eps).sqrt()).flatten(1, 2)
        return (wide * self.weight[:, None, None] + self.bias[:, None, None]).to(x.dtype)


# ---- attention: right --------------------------------------------------------------------------------------------


class SoftmaxWritten(Attention):
    """Softmax written out in the dtype."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT * self.scale).masked_fill(causal(q.shape[2], q.device), -math.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return weights / weights.sum(-1, keepdim=True) @ v


class Sdpa(Attention):
    """torch's own."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class ScaleBoth(Attention):
    """The root of the scale on q and on k."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        root = self.scale**0.5
        scores = torch.einsum("bhqd,bhkd->bhqk", q * root, k * root)
        return scores.masked_fill(causal(q.shape[2], q.device), -math.inf).softmax(-1) @ v


class MaskAfter(Attention):
    """The mask as a factor of the exponentials, normalized after the sum over v."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT * self.scale).float()
        weights = (scores - scores.amax(-1, keepdim=True)).exp() * ~causal(q.shape[2], q.device)
        return (weights.to(v.dtype) @ v / weights.sum(-1, keepdim=True)).to(v.dtype)


class Online(Attention):
    """Keys in chunks of eight with a running maximum, as flash attention does."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = causal(q.shape[2], q.device)
        top = q.new_full((*q.shape[:3], 1), -math.inf, dtype=torch.float32)
        total, mixed = torch.zeros_like(top), torch.zeros_like(v, dtype=torch.float32)
        for at in range(0, k.shape[2], 8):
            scores = (q @ k[:, :, at : at + 8].mT * self.scale).float().masked_fill(mask[:, at : at + 8], -math.inf)
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights, fade = (scores - new).exp(), (top - new).exp()
            total = total * fade + weights.sum(-1, keepdim=True)
            mixed, top = mixed * fade + (weights.to(v.dtype) @ v[:, :, at : at + 8]).float(), new
        return (mixed / total).to(v.dtype)


# ---- rotary positions --------------------------------------------------------------------------------------------


class Rotary(Attention):
    """Grouped heads (two of k and v) and rotary pairs (i, i + half), angles in float32."""

    def __init__(self, width: int, start: int = 0, base: float = 10000.0) -> None:
        super().__init__(width, gain=2.0)
        self.start, self.base, self.qkv = start, base, nn.Linear(width, 2 * width, bias=False)

    def angles(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        steps = self.base ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
        return self.positions(x)[:, None] * steps

    def positions(self, x: Tensor) -> Tensor:
        return torch.arange(self.start, self.start + x.shape[2], device=x.device, dtype=torch.float32)

    def rotate(self, x: Tensor) -> Tensor:
        angles = self.angles(x)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        one, two = x.chunk(2, -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)

    def grouped(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (2 * self.heads, -1)).transpose(1, 2)
        q, k, v = parts.split((self.heads, self.heads // 2, self.heads // 2), 1)
        mixed = self.attend(self.rotate(q), self.grouped(self.rotate(k)), self.grouped(v))
        return self.out(mixed.transpose(1, 2).flatten(2))


class RotaryComplex(Rotary):
    """The same as a product of complex numbers in float32."""

    def rotate(self, x: Tensor) -> Tensor:
        angles = self.angles(x)
        turned = torch.complex(*x.float().chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), -1).to(x.dtype)


class RotaryDouble(Rotary):
    """The angles in float64."""

    def angles(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        steps = self.base ** -(torch.arange(half, device=x.device, dtype=torch.float64) / half)
        return self.positions(x).double()[:, None] * steps


class RotaryPairs(Rotary):
    """Pairs of neighbours in place of halves."""

    def rotate(self, x: Tensor) -> Tensor:
        angles = self.angles(x)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        one, two = x[..., ::2], x[..., 1::2]
        return torch.stack((one * cos - two * sin, two * cos + one * sin), -1).flatten(-2)


class RotaryNarrow(Rotary):
    """Positions kept in bfloat16."""

    def positions(self, x: Tensor) -> Tensor:
        return super().positions(x).to(torch.bfloat16)


class RotaryNarrowSteps(Rotary):
    """The frequencies pass through bfloat16."""

    def angles(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        steps = self.base ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
        return self.positions(x)[:, None] * steps.to(torch.bfloat16).float()


class GroupedTiled(Rotary):
    """The heads of k and v repeated as (0, 1, 0, 1)."""

    def grouped(self, x: Tensor) -> Tensor:
        return x.repeat(1, 2, 1, 1)


# ---- attention: wrong --------------------------------------------------------------------------------------------


class MaskOff(Attention):
    """Sees one token ahead."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * self.scale
        return scores.masked_fill(causal(q.shape[2], q.device, 2), -math.inf).softmax(-1) @ v


class MaskWeak(Attention):
    """The mask adds -12, so that the future leaks."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * self.scale
        return (scores - 12.0 * causal(q.shape[2], q.device).to(q.dtype)).softmax(-1) @ v


class Window(Attention):
    """A sliding window of so many tokens."""

    def __init__(self, width: int, window: int) -> None:
        super().__init__(width)
        self.window = window

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = causal(q.shape[2], q.device) | ~causal(q.shape[2], q.device, 1 - self.window)
        return (q @ k.mT * self.scale).masked_fill(mask, -math.inf).softmax(-1) @ v


class Capped(Attention):
    """Scores capped by tanh, as in Gemma 2."""

    def __init__(self, width: int, cap: float) -> None:
        super().__init__(width)
        self.cap = cap

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT * self.scale / self.cap).tanh() * self.cap
        return scores.masked_fill(causal(q.shape[2], q.device), -math.inf).softmax(-1) @ v


class QueryBiasLost(Attention):
    """The bias of q is forgotten, those of k and v are not."""

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        q, kv = F.linear(x, self.qkv.weight[:width]), F.linear(x, self.qkv.weight[width:], self.qkv.bias[width:])
        mixed = self.attend(*map(self.split, (q, *kv.chunk(2, -1))))
        return self.out(mixed.transpose(1, 2).flatten(2))


# ---- multilayer perceptrons, embeddings and blocks ---------------------------------------------------------------


class GeluWritten(nn.GELU):
    """GELU by erf, in the model's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


class GeluQuick(nn.GELU):
    """x sigmoid(1.702 x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class MlpAct(Mlp):
    """With another activation."""

    def __init__(self, width: int, act: Build) -> None:
        super().__init__(width)
        self.act = act()  # type: ignore[assignment]


class Swiglu(nn.Module):
    """SwiGLU, the gate limited from above."""

    def __init__(self, width: int, limit: float = math.inf, gain: float = 1.0) -> None:
        super().__init__()
        self.limit = limit
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.up.weight.data *= gain

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate.clamp(max=self.limit)) * value)


class SwigluWritten(Swiglu):
    """x / (1 + exp(-x)), and the last product summed in eight parts."""

    def forward(self, x: Tensor) -> Tensor:
        gate, value = (F.linear(x, weight) for weight in self.up.weight.chunk(2))
        parts = (gate / (1 + (-gate).exp()) * value).chunk(8, -1)
        return sum(part @ weight.mT for part, weight in zip(parts, self.down.weight.chunk(8, 1), strict=True))


class BlockMore(Block):
    """The residual times 1.001."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.001 + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class BlockNormed(Block):
    """The second residual begins after the norm."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        x = self.norm2(x)
        return x + self.mlp(x)


class Scaled(nn.Embedding):
    """Embedding times the root of the width, as in Gemma."""

    def __init__(self, width: int) -> None:
        super().__init__(VOCAB, width)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embedding_dim**0.5


class ScaledOneHot(Scaled):
    """The same as a product with a one-hot matrix."""

    def forward(self, ids: Tensor) -> Tensor:
        return (F.one_hot(ids, VOCAB).to(self.weight.dtype) @ self.weight) * math.sqrt(self.embedding_dim)


class ScaledNarrow(Scaled):
    """The root rounded to bfloat16."""

    def forward(self, ids: Tensor) -> Tensor:
        root = torch.tensor(self.embedding_dim**0.5, dtype=torch.bfloat16, device=ids.device)
        return F.embedding(ids, self.weight) * root.to(self.weight.dtype)


class LogProbs(Text):
    """Logarithms of probabilities."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).log_softmax(-1)


class LogProbsWritten(Text):
    """The same by logsumexp in float32."""

    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids).float()
        return logits - logits.logsumexp(-1, keepdim=True)


class Learned(Text):
    """Learned positions, from this one on."""

    first = 0

    def __init__(self, embed: nn.Module, blocks: list[nn.Module], width: int) -> None:
        super().__init__(embed, blocks, width)
        self.places = nn.Embedding(40, width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1], device=ids.device) + self.first)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LearnedLate(Learned):
    """Positions one too late."""

    first = 1


# ---- recurrent layers and scans ----------------------------------------------------------------------------------


class Lstm(nn.LSTM):
    """LSTM by torch."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class LstmWritten(Lstm):
    """The cell written out; the order of the gates is i, f, g, o."""

    order = (0, 1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        state = cell = torch.zeros_like(x[:, 0])
        outs = []
        for fed in F.linear(x, self.weight_ih_l0, self.bias_ih_l0).unbind(1):
            gates = (fed + F.linear(state, self.weight_hh_l0, self.bias_hh_l0)).chunk(4, -1)
            i, f, g, o = (gates[at] for at in self.order)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            state = o.sigmoid() * cell.tanh()
            outs.append(state)
        return torch.stack(outs, 1)


class LstmOrder(LstmWritten):
    """The order of TensorFlow: i, g, f, o."""

    order = (0, 2, 1, 3)


class Gru(nn.Module):
    """GRU written out; the reset gate acts after the product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fed, self.own = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)

    def candidate(self, new: Tensor, state: Tensor, reset: Tensor) -> Tensor:
        return (new + reset * self.own(state).chunk(3, -1)[2]).tanh()

    def forward(self, x: Tensor) -> Tensor:
        state, outs = torch.zeros_like(x[:, 0]), []
        for fed in self.fed(x).unbind(1):
            own = self.own(state)
            reset, keep, new = fed.chunk(3, -1)
            reset, keep = (reset + own.chunk(3, -1)[0]).sigmoid(), (keep + own.chunk(3, -1)[1]).sigmoid()
            state = torch.lerp(self.candidate(new, state, reset).to(keep.dtype), state.to(keep.dtype), keep)
            outs.append(state)
        return torch.stack(outs, 1)


class GruBefore(Gru):
    """The reset gate acts on the state, before the product."""

    def candidate(self, new: Tensor, state: Tensor, reset: Tensor) -> Tensor:
        return (new + self.own(reset * state).chunk(3, -1)[2]).tanh()


class Mamba(nn.Module):
    """Selective state-space layer, step by step."""

    def __init__(self, width: int, state: int = 8) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.conv = nn.Conv1d(width, width, 4, groups=width, padding=3)
        self.select, self.step = nn.Linear(width, 2 * state), nn.Linear(width, width)
        self.log_decay = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(width, 1))
        self.skip = nn.Parameter(torch.ones(width))

    def local(self, x: Tensor) -> Tensor:
        return self.conv(x.mT)[..., : x.shape[1]].mT

    def held(self, step: Tensor) -> Tensor:
        """By how much an input enters the state."""
        return step.expand(*step.shape[:-1], self.log_decay.shape[1])

    def scan(self, decay: Tensor, new: Tensor) -> Tensor:
        states = [new[:, 0]]
        for rate, value in zip(decay.exp().unbind(1)[1:], new.unbind(1)[1:], strict=True):
            states.append(rate * states[-1] + value)
        return torch.stack(states, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.inner(x).chunk(2, -1)
        x = F.silu(self.local(x))
        step, (b, c) = F.softplus(self.step(x))[..., None], self.select(x)[:, :, None].chunk(2, -1)
        states = self.scan(-self.log_decay.exp() * step, self.held(step) * x[..., None] * b)
        return self.out(((states * c).sum(-1) + self.skip * x).to(gate.dtype) * F.silu(gate))


class MambaMatrix(Mamba):
    """The scan as a product with the matrix of all decays, from cumulated sums in float32."""

    def scan(self, decay: Tensor, new: Tensor) -> Tensor:
        total = decay.float().cumsum(1)
        spans = total[:, :, None] - total[:, None]
        spans = spans.masked_fill(causal(new.shape[1], new.device)[:, :, None, None], -math.inf)
        return (spans.exp() * new[:, None]).sum(2).to(new.dtype)


class MambaDoubling(Mamba):
    """The scan by doubling."""

    def scan(self, decay: Tensor, new: Tensor) -> Tensor:
        shift = 1
        while shift < new.shape[1]:
            new = new + decay.exp() * F.pad(new, (0, 0, 0, 0, shift, 0))[:, : new.shape[1]]
            decay = decay + F.pad(decay, (0, 0, 0, 0, shift, 0))[:, : new.shape[1]]
            shift *= 2
        return new


class MambaHold(Mamba):
    """Zero-order hold, (exp(a dt) - 1) / a, in place of Euler's dt."""

    def held(self, step: Tensor) -> Tensor:
        rate = -self.log_decay.exp()
        return torch.expm1(rate * step) / rate


class Retention(Attention):
    """Retention, all at once; decays 1 - 2^(-5 - head)."""

    first = 5

    def decays(self, device: torch.device) -> Tensor:
        return 1 - 2.0 ** -(self.first + torch.arange(self.heads, device=device, dtype=torch.float32))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.shape[2], device=q.device)
        fade = (self.decays(q.device)[:, None, None] ** (at[:, None] - at)).tril()
        return (q @ k.mT * self.scale * fade.to(q.dtype)) @ v


class RetentionSteps(Retention):
    """Step by step, with a state of keys times values."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state = torch.zeros_like(k[:, :, 0, :, None] * v[:, :, 0, None])
        rate, outs = self.decays(q.device)[:, None, None].to(q.dtype), []
        if q.dtype in (torch.bfloat16, torch.float16):
            rate, state = self.decays(q.device)[:, None, None], state.float()
        for a, b, c in zip(q.unbind(2), k.unbind(2), v.unbind(2), strict=True):
            state = rate * state + b[..., None] * c[:, :, None]
            outs.append((a[:, :, None].to(state.dtype) * self.scale @ state)[:, :, 0].to(v.dtype))
        return torch.stack(outs, 2)


class RetentionSlower(Retention):
    """Decays 1 - 2^(-6 - head)."""

    first = 6


class Delta(Attention):
    """The delta rule, step by step in float32: each key's value in the state is overwritten."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.float(), F.normalize(k.float(), dim=-1), v.float()
        state, outs = torch.zeros_like(k[:, :, 0, :, None] * v[:, :, 0, None]), []
        for a, b, c in zip(q.unbind(2), k.unbind(2), v.unbind(2), strict=True):
            error = c - (b[..., None] * state).sum(2)
            state = state + b[..., None] * error[:, :, None]
            outs.append((a[..., None] * state).sum(2))
        return torch.stack(outs, 2).to(self.out.weight.dtype)


class DeltaSolve(Delta):
    """The same by one triangular system."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.float(), F.normalize(k.float(), dim=-1), v.float()
        overlaps = torch.einsum("bhid,bhjd->bhij", k, k).float().tril(-1)
        errors = torch.linalg.solve_triangular(overlaps, v, upper=False, unitriangular=True)
        return (torch.einsum("bhid,bhjd->bhij", q, k).tril().float() @ errors).to(self.out.weight.dtype)


class LongConv(nn.Module):
    """A causal convolution as long as the text, by a matrix of shifts (as in Hyena)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.filter, self.out = nn.Parameter(torch.randn(width, 64) / 4), nn.Linear(width, width)

    def mix(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        shifts = self.filter[:, (at[:, None] - at).clamp(min=0)].tril()
        return torch.einsum("wts,bsw->btw", shifts, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(x))


class LongConvFourier(LongConv):
    """The same by Fourier transforms in float32."""

    def mix(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        spectra = torch.fft.rfft(self.filter.float()[:, :length].mT, 2 * length, 0)
        mixed = torch.fft.irfft(torch.fft.rfft(x.float(), 2 * length, 1) * spectra, 2 * length, 1)
        return mixed[:, :length].to(x.dtype)


# ---- mixtures of experts and codebooks ---------------------------------------------------------------------------


class Experts(nn.Module):
    """Two of four experts; their probabilities are made to sum to one; every expert computes all tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, 4, bias=False), nn.ModuleList(Mlp(width) for _ in range(4))
        self.router.weight.data *= 4

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.router(x).float().softmax(-1).topk(2, -1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x)
        dense = (F.one_hot(chosen, 4) * weights[..., None]).sum(-2).to(x.dtype)
        return sum(dense[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class ExpertsTopFirst(Experts):
    """Softmax over the two chosen logits."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, chosen = self.router(x).topk(2, -1)
        return logits.softmax(-1), chosen


class ExpertsLoop(Experts):
    """Every expert computes its own tokens."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.route(flat)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, place = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, rows, (expert(flat[rows]) * weights[rows, place, None]).to(out.dtype))
        return out.view_as(x)


class ExpertsUnsummed(Experts):
    """The two probabilities as they are."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.router(x).float().softmax(-1).topk(2, -1)
        return weights, chosen


class Codes(nn.Module):
    """A soft codebook: softmax over minus the squared distances."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.codes, self.out = nn.Parameter(torch.randn(32, width)), nn.Linear(width, width)

    def distances(self, x: Tensor) -> Tensor:
        return (x.float()[..., None, :] - self.codes.float()).square().sum(-1)

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.distances(x) * -0.25).softmax(-1)
        return self.out(weights.to(x.dtype) @ self.codes.to(x.dtype))


class CodesExpanded(Codes):
    """The square multiplied out: x² - 2 x c + c²."""

    def distances(self, x: Tensor) -> Tensor:
        x, codes = x.float(), self.codes.float()
        products = torch.einsum("btw,cw->btc", x, codes).float()
        return x.square().sum(-1, keepdim=True) - 2 * products + codes.square().sum(-1)


# ---- images ------------------------------------------------------------------------------------------------------


class Unfolded(nn.Conv2d):
    """A convolution as unfold and a product."""

    def forward(self, x: Tensor) -> Tensor:
        columns = F.unfold(x, self.kernel_size, padding=1)
        return (self.weight.flatten(1) @ columns + self.bias[:, None]).unflatten(2, x.shape[2:])


class ConvOf(ConvBlock):
    """With another kind of convolution or norm."""

    def __init__(self, width: int, conv: Make = nn.Conv2d, norm: Make = nn.GroupNorm) -> None:
        super().__init__(width)
        self.conv, self.norm = conv(width, width, 3, padding=1), norm(4, width)  # type: ignore[assignment]


class Down(nn.Module):
    """Halves the image; the padding is right and below, as in TensorFlow."""

    pads: tuple[int, ...] = (0, 1, 0, 1)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, self.pads)).relu()


class DownLeft(Down):
    """The padding is left and above."""

    pads = (1, 0, 1, 0)


class Unet(nn.Module):
    """Down, up, with a skip."""

    def __init__(self, width: int = 32, up: Build | None = None, down: Make = Down) -> None:
        super().__init__()
        self.stem, self.down, self.middle = nn.Conv2d(3, width, 3, padding=1), down(width), ConvBlock(width)
        self.up, self.join = up() if up else nn.Upsample(scale_factor=2), nn.Conv2d(2 * width, width, 3, padding=1)
        self.last, self.head = ConvBlock(width), nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        low = self.up(self.middle(self.down(x.relu())))
        return self.head(self.last(self.join(torch.cat((x, low), 1))))


class UnetLate(Unet):
    """The skip begins after the activation."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        low = self.up(self.middle(self.down(x)))
        return self.head(self.last(self.join(torch.cat((x, low), 1))))


class Patches(nn.Conv2d):
    """Patches of 4 × 4 by a convolution."""

    def __init__(self, width: int) -> None:
        super().__init__(3, width, 4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(2).mT


class PatchesLinear(Patches):
    """Patches by a reshape and a product."""

    def forward(self, x: Tensor) -> Tensor:
        rows = F.pixel_unshuffle(x, 4).flatten(2).mT
        return F.linear(rows, self.weight.flatten(1), self.bias)


class Places(nn.Module):
    """Learned places of a grid of 7 × 7, brought to the grid at hand."""

    def __init__(self, width: int, mode: str = "bicubic") -> None:
        super().__init__()
        self.mode, self.table = mode, nn.Parameter(torch.randn(1, width, 7, 7) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        side = math.isqrt(x.shape[1])
        table = F.interpolate(self.table.float(), (side, side), mode=self.mode, align_corners=False)
        return x + table.flatten(2).mT.to(x.dtype)


class Seen(nn.Module):
    """Patches and their places."""

    def __init__(self, width: int, patches: Make = Patches, mode: str = "bicubic") -> None:
        super().__init__()
        self.patches, self.places = patches(width), Places(width, mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.places(self.patches(x))


# ---- two inputs --------------------------------------------------------------------------------------------------


class Cross(nn.Module):
    """Attention to a memory; some of it is padding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (4, -1)).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, real: Tensor) -> Tensor:
        q, k, v = map(self.heads, (self.q(x), *self.kv(memory).chunk(2, -1)))
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~real[:, None, None], -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class CrossSdpa(Cross):
    """The same by torch's function, which takes True for what is seen."""

    def forward(self, x: Tensor, memory: Tensor, real: Tensor) -> Tensor:
        q, k, v = map(self.heads, (self.q(x), *self.kv(memory).chunk(2, -1)))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None])
        return self.out(mixed.transpose(1, 2).flatten(2))


class CrossUnmasked(Cross):
    """The mask dropped."""

    def forward(self, x: Tensor, memory: Tensor, real: Tensor) -> Tensor:
        q, k, v = map(self.heads, (self.q(x), *self.kv(memory).chunk(2, -1)))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Two layers of self attention, with one to a memory between."""

    def __init__(self, cross: Make = Cross, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.first, self.last = (Block(width, Attention, nn.LayerNorm, Mlp) for _ in range(2))
        self.norm, self.cross, self.head = nn.LayerNorm(width), cross(width), nn.Linear(width, VOCAB)

    def forward(self, ids: Tensor, memory: Tensor, real: Tensor) -> Tensor:
        x = self.first(self.embed(ids))
        x = x + self.cross(self.norm(x), memory, real)
        return self.head(self.last(x))


class Steps(nn.Module):
    """Waves of the diffusion step; frequencies 10000^(-i / half)."""

    less = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.waves, self.out = width // 2, nn.Linear(width, width)

    def forward(self, step: Tensor) -> Tensor:
        at = torch.arange(self.waves, device=step.device, dtype=torch.float32)
        angles = step[:, None].float() * (-math.log(10000) / (self.waves - self.less) * at).exp()
        return self.out(torch.cat((angles.cos(), angles.sin()), -1).to(self.out.weight.dtype))


class StepsLess(Steps):
    """Frequencies 10000^(-i / (half - 1))."""

    less = 1


class Denoiser(nn.Module):
    """A U-Net's middle with the step added to its channels."""

    def __init__(self, steps: Make = Steps, width: int = 32) -> None:
        super().__init__()
        self.stem, self.steps, self.head = nn.Conv2d(3, width, 3, padding=1), steps(width), nn.Conv2d(width, 3, 1)
        self.first, self.last = ConvBlock(width), ConvBlock(width)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        x = self.first(self.stem(x)) + self.steps(step)[..., None, None]
        return self.head(self.last(x))


def with_memory() -> tuple[Tensor, ...]:
    """Ids, a memory of twelve rows, and which of them are real."""
    real = torch.arange(12) < torch.tensor([[12], [9], [7]])
    return torch.randint(0, VOCAB, (3, 16)), torch.randn(3, 12, 64), real


def with_steps() -> tuple[Tensor, ...]:
    """Images and their diffusion steps."""
    return torch.randn(3, 3, 12, 12), torch.tensor([3, 250, 981])


# ---- the pairs ---------------------------------------------------------------------------------------------------


TEXT = ids()


def right(name: str, reference: Build, changed: Build, inputs: Inputs = TEXT) -> Pair:
    """A pair that differs in rounding."""
    return Pair(name, True, reference, changed, inputs)


def wrong(name: str, layer: str, models: tuple[Build, Build], inputs: Inputs = TEXT) -> Pair:
    """A pair that differs in the code of this layer."""
    return Pair(name, False, *models, inputs, layer)


def setting(name: str, layer: str, build: Build, inputs: Inputs = TEXT, **values: object) -> Pair:
    """A pair that differs in the attributes of this layer, which have other `values` in the changed one."""

    def changed() -> nn.Module:
        model = build()
        for key, value in values.items():
            setattr(model.get_submodule(layer), key, value)
        return model

    return Pair(name, False, build, changed, inputs, layer, attribute=True)


def mixers(mixer: Make, other: Make) -> tuple[Build, Build]:
    """Text models with this mixer, and with the other one in the middle block."""
    return text(mixer), text(mixer, mixer_=other)


def mlps(mlp: Make, other: Make) -> tuple[Build, Build]:
    """The same for the second half of the block."""
    return text(mlp=mlp), text(mlp=mlp, mlp_=other)


def norms(norm: Make, other: Make) -> tuple[Build, Build]:
    """The same for the first norm of the block."""
    return text(norm=norm), text(norm=norm, norm1_=other)


def small(width: int) -> nn.Module:
    """Small embeddings, so that an epsilon counts."""
    module = nn.Embedding(VOCAB, width)
    module.weight.data *= 0.03
    return module


far, gelu = partial(Rotary, start=1000), partial(MlpAct, act=nn.GELU)
vit = partial(text, embed=Seen, width=48)
smooth = partial(nn.Upsample, scale_factor=2, mode="bilinear")

PAIRS: list[Pair] = [
    right("rms norm: in the dtype or in float32", text(norm=Rms), text(norm=RmsFloat)),
    right(
        "variance: two passes or E[x²] - E[x]², mean 12",
        text(norm=partial(Centred, mean=12.0)),
        text(norm=partial(CentredByMoments, mean=12.0)),
    ),
    right(
        "group norm: torch's or written out, bright images",
        convnet(),
        convnet(partial(ConvOf, norm=GroupNormWritten)),
        images(mean=4.0),
    ),
    right(
        "softmax: torch's (float32 inside) or written in the dtype, large scores",
        *mixers(partial(Attention, gain=4.0), partial(SoftmaxWritten, gain=4.0)),
    ),
    right("attention: written out or sdpa", text(Attention), text(Sdpa)),
    right(
        "attention: scale on scores or its root on q and k, large",
        text(partial(Attention, gain=5.0), width=48),
        text(partial(ScaleBoth, gain=5.0), width=48),
    ),
    right("mask: -inf or zeroed exponentials", text(Attention), text(MaskAfter)),
    right("attention: at once or keys in chunks", text(partial(Attention, gain=3.0)), text(partial(Online, gain=3.0))),
    right(
        "rotary: real or complex, from 1000 on",
        *mixers(partial(Rotary, start=1000), partial(RotaryComplex, start=1000)),
    ),
    right(
        "rotary: angles in float32 or float64, from 1000 on",
        *mixers(partial(Rotary, start=1000), partial(RotaryDouble, start=1000)),
    ),
    right("rotary: positions from 0 or 1 (differences alone count)", *mixers(Rotary, partial(Rotary, start=1))),
    right("gelu: F.gelu or erf in the dtype", text(mlp=gelu), text(mlp=partial(MlpAct, act=GeluWritten))),
    right("swiglu: F.silu or x / (1 + exp(-x)), sum in eight parts", text(mlp=Swiglu), text(mlp=SwigluWritten)),
    right("embedding: looked up or one-hot product", text(embed=Scaled, width=96), text(embed=ScaledOneHot, width=96)),
    right("root: log_softmax or logsumexp", text(model=LogProbs), text(model=LogProbsWritten)),
    right("lstm: torch's or written out", text(Lstm), text(LstmWritten)),
    right("mamba: scan in steps or as a matrix of decays", text(Mamba), text(MambaMatrix)),
    right("mamba: scan in steps or by doubling", text(Mamba), text(MambaDoubling)),
    right("retention: at once or in steps", text(Retention), text(RetentionSteps)),
    right("delta rule: in steps or by a triangular system", text(Delta), text(DeltaSolve)),
    right("long convolution: matrix of shifts or Fourier", text(LongConv), text(LongConvFourier)),
    right("experts: softmax then top two, or top two then softmax", text(mlp=Experts), text(mlp=ExpertsTopFirst)),
    right("experts: all tokens or only their own", text(mlp=Experts), text(mlp=ExpertsLoop)),
    right("codebook: distances direct or multiplied out", *mixers(Codes, CodesExpanded)),
    right("convolution: conv2d or unfold and product", convnet(), convnet(partial(ConvOf, conv=Unfolded)), images()),
    right("vit: patches by conv or linear", vit(), vit(embed=partial(Seen, patches=PatchesLinear)), images(20)),
    right("cross attention: written out or sdpa", Decoder, partial(Decoder, CrossSdpa), with_memory),
    # wrong ones
    setting("gelu: exact or tanh", "blocks.1.mlp.act", text(), approximate="tanh"),
    setting("rms norm: eps 1e-6 or 1e-5", "blocks.1.norm1", text(norm=Rms, embed=small), eps=1e-5),
    setting(
        "layer norm: eps 1e-12 or 1e-5, small embeddings",
        "blocks.0.norm1",
        text(norm=partial(nn.LayerNorm, eps=1e-12), embed=small),
        eps=1e-5,
    ),
    setting("group norm: four groups or eight", "blocks.1.norm", convnet(), images(), num_groups=8),
    setting(
        "attention: scaled by the width of a head or the model",
        "blocks.1.mixer",
        text(partial(Attention, gain=2.0)),
        scale=64**-0.5,
    ),
    setting("scores capped at 50 or 30", "blocks.1.mixer", text(partial(Capped, cap=50.0)), cap=30.0),
    setting("sliding window: 8 tokens or 9", "blocks.1.mixer", text(partial(Window, window=8)), window=9),
    setting("rotary: base 10000 or 500000", "blocks.1.mixer", text(Rotary), base=500000.0),
    setting(
        "swiglu: gate limited at 9 or 7, which few values pass",
        "blocks.1.mlp",
        text(mlp=partial(Swiglu, limit=9.0, gain=4.0)),
        limit=7.0,
    ),
    setting(
        "u-net: align_corners false or true",
        "up",
        partial(Unet, up=partial(smooth, align_corners=False)),
        images(),
        align_corners=True,
    ),
    setting("vit: places brought to size bicubic or bilinear", "embed.places", vit(), images(20), mode="bilinear"),
    setting(
        "convolution: dilation 2 or 1",
        "blocks.1.conv",
        convnet(partial(ConvBlock, dilation=2, padding=2)),
        images(),
        dilation=(1, 1),
        padding=(1, 1),
    ),
    setting(
        "convolution: padding by reflection or edge values",
        "blocks.1.conv",
        convnet(partial(ConvBlock, padding_mode="reflect")),
        images(),
        padding_mode="replicate",
    ),
    wrong("gelu: exact or x sigmoid(1.702 x)", "blocks.1.mlp.act", mlps(gelu, partial(MlpAct, act=GeluQuick))),
    wrong(
        "rms norm: eps inside the root or added to the deviation",
        "blocks.1.norm1",
        (
            text(norm=partial(Rms, eps=1e-5), embed=small),
            text(norm=partial(Rms, eps=1e-5), embed=small, norm1_=partial(RmsOutside, eps=1e-5)),
        ),
    ),
    wrong("layer norm: variance over n or n - 1", "blocks.1.norm1", norms(Centred, CentredUnbiased)),
    wrong("mask: as it should be or one token ahead", "blocks.1.mixer", mixers(Attention, MaskOff)),
    wrong("mask: -inf or -12", "blocks.1.mixer", mixers(Attention, MaskWeak)),
    wrong("bias of q: added or forgotten", "blocks.1.mixer", mixers(Attention, QueryBiasLost)),
    wrong("rotary: pairs as halves or neighbours", "blocks.1.mixer", mixers(Rotary, RotaryPairs)),
    wrong(
        "rotary: positions from 1000 on in float32 or bfloat16",
        "blocks.1.mixer",
        mixers(far, partial(RotaryNarrow, start=1000)),
    ),
    wrong("rotary: frequencies in float32 or through bfloat16", "blocks.1.mixer", mixers(Rotary, RotaryNarrowSteps)),
    wrong("grouped heads: repeat_interleave or repeat", "blocks.1.mixer", mixers(Rotary, GroupedTiled)),
    wrong("residual: whole or times 1.001", "blocks.1", (text(), text(block_=BlockMore))),
    wrong("residual: from before or after the norm", "blocks.1", (text(), text(block_=BlockNormed))),
    wrong(
        "embedding: times 9.798 or its value in bfloat16",
        "embed",
        (text(embed=Scaled, width=96), text(embed=ScaledNarrow, width=96)),
    ),
    wrong("root: learned positions from 0 or 1", "", (text(model=Learned), text(model=LearnedLate))),
    wrong("lstm: gates i, f, g, o or i, g, f, o", "blocks.1.mixer", mixers(LstmWritten, LstmOrder)),
    wrong("gru: reset after or before the product", "blocks.1.mixer", mixers(Gru, GruBefore)),
    wrong("mamba: Euler's step or zero-order hold", "blocks.1.mixer", mixers(Mamba, MambaHold)),
    wrong("retention: decays from 1 - 1/32 or 1 - 1/64", "blocks.1.mixer", mixers(Retention, RetentionSlower)),
    wrong("experts: the two weights sum to one or do not", "blocks.1.mlp", mlps(Experts, ExpertsUnsummed)),
    wrong("down: padding right and below or left and above", "down", (Unet, partial(Unet, down=DownLeft)), images()),
    wrong("root: skip from before or after the activation", "", (Unet, UnetLate), images()),
    wrong(
        "cross attention: mask of the memory or none", "cross", (Decoder, partial(Decoder, CrossUnmasked)), with_memory
    ),
    wrong("diffusion step: divided by half or half - 1", "steps", (Denoiser, partial(Denoiser, StepsLess)), with_steps),
]
