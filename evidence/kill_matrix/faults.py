"""The faults: each plants one known bug in a fresh model and returns what a diagnosis has to say of it.

The answers were written from the planted code, before any diagnosis was seen.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from architectures import ARCHITECTURES, LENGTH, VOCABULARY, WIDTH, Attention, Inputs, Loss, next_token
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pytest_modelprobe import ModelProbe

ROOT = "(root)"


@dataclass(frozen=True)
class Cause:
    """What is to be named. Layer and what are globs."""

    kind: str
    layer: str
    what: str = "*"


@dataclass(frozen=True)
class Answer:
    """What is true of a planted fault."""

    says: tuple[Cause, ...]
    """Each of them names the fault; the first is the best."""
    also: tuple[Cause, ...] = ()
    """True as well, and no name for the fault by itself."""
    place: tuple[str, str] | None = None
    """Own code: the children before and after it, "" at the ends; None: in several places, or without children."""
    touches: tuple[str, ...] = ()
    """Layers that no other fault may touch at once, besides those said."""

    @property
    def layers(self) -> set[str]:
        """Every layer that is touched."""
        return {cause.layer for cause in self.says} | set(self.touches)


@dataclass
class Trial:
    """A model about to be run. A fault changes it in place."""

    name: str
    model: Any
    inputs: Inputs
    loss: Loss
    number: int = 1
    """Which block the fault goes to."""
    seed: int = 0

    @property
    def block(self) -> Any:
        """The block the fault goes to."""
        return self.model.blocks[self.number]

    def path(self, module: nn.Module) -> str:
        """Return the layer's name."""
        return next(name for name, other in self.model.named_modules() if other is module) or ROOT


Plant = Callable[[Trial], Answer]


@dataclass(frozen=True)
class Fault:
    """One operator."""

    row: str
    """Of the collection of real bugs; DC: from DeepCrime; "": neither."""
    title: str
    plant: Plant
    on: tuple[str, ...]
    train: bool
    sited: bool
    """Whether there is one in each block."""
    combines: bool
    """Whether it can be planted together with others."""

    @property
    def key(self) -> str:
        """What tables call it."""
        return self.title


FAULTS: list[Fault] = []
ATTENTION = ("GPT", "ViT", "Encoder", "MoE")
FEED_FORWARD = ("GPT", "ViT", "Encoder")
PRE_NORM = ("GPT", "ViT", "MoE")
ALL = tuple(ARCHITECTURES)


def fault(
    row: str, title: str, *on: str, train: bool = False, sited: bool = True, combines: bool = True
) -> Callable[[Plant], Plant]:
    """Register an operator."""

    def register(plant: Plant) -> Plant:
        FAULTS.append(Fault(row, title, plant, on, train, sited, combines))
        return plant

    return register


# --- answers ------------------------------------------------------------------------------------------------------


def override(module: Any, method: str, function: Callable[..., Any]) -> None:
    """Give one module other code, as an edit of its class would."""
    setattr(module, method, MethodType(function, module))


def own_code(trial: Trial, module: nn.Module, place: tuple[str, str] | None = None, **more: Any) -> Answer:
    return Answer((Cause("computation", trial.path(module)),), place=place, **more)


def gradient(trial: Trial, module: nn.Module, place: tuple[str, str] | None = None, **more: Any) -> Answer:
    return Answer((Cause("gradient", trial.path(module)),), place=place, **more)


def attribute(trial: Trial, module: nn.Module, name: str) -> Answer:
    return Answer((Cause("attribute", trial.path(module), name),))


def weights(trial: Trial, module: nn.Module, name: str = "weight") -> Answer:
    return Answer((Cause("weights", trial.path(module), name),))


def buffers(trial: Trial, module: nn.Module, name: str) -> Answer:
    return Answer((Cause("buffers", trial.path(module), name),))


def architecture(trial: Trial, module: nn.Module, what: str = "*", *also: Cause) -> Answer:
    """Return an answer for another structure; of the same layer, other classes are then true as well."""
    layer = trial.path(module)
    return Answer((Cause("architecture", layer, what),), also=(Cause("*", layer), *also))


def not_called(trial: Trial, module: nn.Module, caller: nn.Module, place: tuple[str, str]) -> Answer:
    """Return an answer for a layer that is left out: told of the layer, or of the code that called it."""
    layer, code = trial.path(module), trial.path(caller)
    return Answer(
        (Cause("architecture", layer), Cause("computation", code), Cause("architecture", code)),
        also=(Cause("architecture", f"{layer}.*"),),
        place=place,
        touches=tuple(f"{layer}.{name}" for name, _ in module.named_modules() if name),
    )


def set_attribute(trial: Trial, module: nn.Module, name: str, value: Any) -> Answer:
    assert getattr(module, name) != value
    setattr(module, name, value)
    return attribute(trial, module, name)


@torch.no_grad()
def set_weights(trial: Trial, module: Any, change: Callable[[Tensor], Any], name: str = "weight") -> Answer:
    parameter = getattr(module, name)
    before = parameter.clone()
    result = change(parameter)
    if isinstance(result, Tensor) and result is not parameter:
        parameter.copy_(result)
    assert not torch.equal(parameter, before)
    return weights(trial, module, name)


def projected(attn: Attention) -> str:
    """Return the last child before the split into heads."""
    return "qkv" if hasattr(attn, "qkv") else "v"


def turned(attn: Attention) -> str:
    """Return the last child before the scores."""
    return "rotary" if hasattr(attn, "rotary") else projected(attn)


def by_hand(attn: Attention) -> None:
    """Let fused attention be computed by hand: equal, and open to faults."""
    if "attend" in vars(type(attn)) and not hasattr(attn, "rotary"):
        override(attn, "attend", Attention.attend)


def attention(method: str, function: Callable[..., Any]) -> Plant:
    """Return an operator on a method of attention between the projections and ``out``."""

    def plant(trial: Trial) -> Answer:
        attn = trial.block.attn
        by_hand(attn)
        override(attn, method, function)
        before = projected(attn) if method in ("split", "project") else turned(attn)
        after = "rotary" if method in ("split", "project") and hasattr(attn, "rotary") else "out"
        return own_code(trial, attn, (before, after))

    return plant


# --- attention and position ---------------------------------------------------------------------------------------

ATTENTION_FAULTS: list[tuple[str, str, tuple[str, ...], str, Callable[..., Any]]] = [
    ("B01", "softmax over the queries", ATTENTION, "softmax", lambda self, s: s.softmax(-2)),
    ("B02", "softmax over the batch", ("ViT", "Encoder"), "softmax", lambda self, s: s.softmax(0)),
    ("B03", "attention without scale", ATTENTION, "scores", lambda self, q, k: q @ k.transpose(-2, -1)),
    ("B05", "heads merged without transpose", ATTENTION, "merge", lambda self, x: x.reshape(len(x), x.shape[2], -1)),
    ("B06", "heads split by view", ATTENTION, "split", lambda self, x: x.reshape(len(x), self.heads, x.shape[1], -1)),
    ("B07", "attention transposed", ATTENTION, "softmax", lambda self, s: s.softmax(-1).transpose(-2, -1)),
    ("B09", "causal mask missing", ("GPT",), "masked", lambda self, s, p: s),
    ("B11", "window ignored", ("MoE",), "masked", Attention.masked),
    ("B12", "padding mask ignored", ("Encoder",), "masked", lambda self, s, p: s),
    ("B12", "padding mask inverted", ("Encoder",), "masked", lambda self, s, p: Attention.masked(self, s, ~p)),
    ("", "attention softmax in float16", ATTENTION, "softmax", lambda self, s: s.half().softmax(-1).float()),
    ("B64", "attention weights detached", ATTENTION, "softmax", lambda self, s: s.softmax(-1).detach()),
]  # fmt: skip

for row, title, on, method, function in ATTENTION_FAULTS:
    plant = attention(method, function)
    if row == "B64":

        def plant(trial: Trial, same: Plant = plant) -> Answer:
            computed = same(trial)
            return gradient(trial, trial.block.attn, computed.place)

    fault(row, title, *on)(plant)


@fault("B04", "scale of the model's width", *ATTENTION)
def wrong_scale(trial: Trial) -> Answer:
    return set_attribute(trial, trial.block.attn, "scale", WIDTH**-0.5)


@fault("", "half as many heads", *ATTENTION)
def heads(trial: Trial) -> Answer:
    attn = trial.block.attn
    if hasattr(attn, "rotary"):  # whose frequencies have the width of a head
        attn.rotary = type(attn.rotary)(WIDTH // 2).train(attn.training)
        answer = set_attribute(trial, attn, "heads", 2)
        rotary = trial.path(attn.rotary)
        return Answer(answer.says, also=(Cause("architecture", rotary),), touches=(rotary,))
    return set_attribute(trial, attn, "heads", 2)


@fault("B08", "mask lets the next token be seen", "GPT")
def off_by_one(trial: Trial) -> Answer:
    trial.block.attn.mask.copy_(torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(1))
    return buffers(trial, trial.block.attn, "mask")


@fault("B08", "mask in code lets the next token be seen", "MoE")
def off_by_one_in_code(trial: Trial) -> Answer:
    def masked(self: Any, scores: Tensor, padding: Tensor | None) -> Tensor:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(1).triu(1 - self.window)
        return scores.masked_fill(~seen, float("-inf"))

    return attention("masked", masked)(trial)


@fault("B09", "attention not causal", "MoE")
def not_causal(trial: Trial) -> Answer:
    return set_attribute(trial, trial.block.attn, "causal", False)


@fault("B11", "window one shorter", "MoE")
def window(trial: Trial) -> Answer:
    return set_attribute(trial, trial.block.attn, "window", 7)


@fault("B13", "positions ignore the padding", "Encoder", sited=False)
def positions_of_padding(trial: Trial) -> Answer:
    embed = trial.model.embed
    override(embed, "numbers", lambda self, padding: torch.arange(LENGTH).expand(padding.shape))
    return own_code(trial, embed, ("tokens", "positions"))


@fault("B15", "rotary angles in bfloat16", "MoE")
def rotary_in_bfloat16(trial: Trial) -> Answer:
    rotary = trial.block.attn.rotary
    override(
        rotary,
        "angles",
        lambda self, length: (torch.arange(length).bfloat16()[:, None] * self.frequencies.bfloat16()).float(),
    )
    return own_code(trial, rotary)


@fault("B15", "rotary frequencies stored in bfloat16", "MoE")
def frequencies_in_bfloat16(trial: Trial) -> Answer:
    rotary = trial.block.attn.rotary
    rotary.frequencies.copy_(rotary.frequencies.bfloat16())
    return buffers(trial, rotary, "frequencies")


@fault("B16", "rotary pairs neighbors", "MoE")
def rotary_pairs(trial: Trial) -> Answer:
    def turned(self: Any, x: Tensor, angles: Tensor) -> Tensor:
        angles = angles[:, : x.shape[-1] // 2].repeat_interleave(2, -1)
        other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return x * angles.cos() + other * angles.sin()

    override(trial.block.attn.rotary, "turned", turned)
    return own_code(trial, trial.block.attn.rotary)


@fault("", "rotary positions start at one", "MoE")
def rotary_shifted(trial: Trial) -> Answer:
    rotary = trial.block.attn.rotary
    override(rotary, "angles", lambda self, length: torch.arange(1, length + 1)[:, None] * self.frequencies)
    return own_code(trial, rotary)


@fault("", "rotary base 500,000", "MoE")
def rotary_base(trial: Trial) -> Answer:
    rotary = trial.block.attn.rotary
    rotary.frequencies.copy_(500_000.0 ** -(torch.arange(0, 8, 2) / 8))
    return buffers(trial, rotary, "frequencies")


def swapped(a: int, b: int) -> Plant:
    def plant(trial: Trial) -> Answer:
        original = type(trial.block.attn).project

        def project(self: Any, x: Tensor) -> tuple[Tensor, ...]:
            parts = list(original(self, x))
            parts[a], parts[b] = parts[b], parts[a]
            return tuple(parts)

        return attention("project", project)(trial)

    return plant


fault("B18", "queries and keys swapped", *ATTENTION)(swapped(0, 1))
fault("B18", "keys and values swapped", *ATTENTION)(swapped(1, 2))


@fault("B19", "attention drops out in eval", "ViT")
def dropout_in_eval(trial: Trial) -> Answer:
    attn = trial.block.attn
    override(
        attn,
        "attend",
        lambda self, q, k, v, padding: F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, scale=self.scale),
    )
    return own_code(trial, attn, ("v", "out"))


@fault("B20", "dropout off since an eval", "GPT", "ViT", "Encoder", "MLP", train=True)
def dropout_off(trial: Trial) -> Answer:
    drop = trial.model.neck.drop if trial.name == "MLP" else trial.block.mlp.drop
    return set_attribute(trial, drop, "p", 0.0)


@fault("B21", "dropout always on", "GPT", "ViT", "Encoder", "MLP", "LSTM", "CNN", "MoE")
def dropout_on(trial: Trial) -> Answer:
    at_block = trial.name in FEED_FORWARD
    drop = trial.model.neck.drop if trial.name == "MLP" else trial.block.mlp.drop if at_block else trial.model.drop
    override(drop, "forward", lambda self, x: F.dropout(x, self.p, True))
    return own_code(trial, drop)


@fault("B22", "a fully masked row", "Encoder")
def masked_row(trial: Trial) -> Answer:
    def masked(self: Any, scores: Tensor, padding: Tensor) -> Tensor:
        rows = padding[:, None, :, None] & padding[:, None, None, :]
        return scores.masked_fill(~rows, float("-inf"))

    return attention("masked", masked)(trial)


# --- blocks, norms, activations -----------------------------------------------------------------------------------


@fault("B23", "residual missing", "GPT", "ViT", "Encoder", "MoE", "CNN")
def no_residual(trial: Trial) -> Answer:
    if trial.name == "CNN":  # there the update comes first
        override(trial.block, "add", lambda self, x, shortcut: x)
        return own_code(trial, trial.block, ("shortcut", "act2"))
    override(trial.block, "add", lambda self, x, update: update)
    return own_code(trial, trial.block)


@fault("B23", "highway without carry", "MLP")
def no_carry(trial: Trial) -> Answer:
    override(trial.block, "mix", lambda self, share, new, old: share * new)
    return own_code(trial, trial.block, ("act", ""))


@fault("", "highway gate inverted", "MLP")
def gate_inverted(trial: Trial) -> Answer:
    override(trial.block, "mix", lambda self, share, new, old: (1 - share) * new + share * old)
    return own_code(trial, trial.block, ("act", ""))


@fault("B23", "residual past the recurrence missing", "LSTM", sited=False)
def no_residual_recurrence(trial: Trial) -> Answer:
    override(trial.model, "combine", lambda self, fused, embedded: fused)
    return own_code(trial, trial.model, ("fused", "norm"))


@fault("", "residual of 1.01", "GPT", "ViT", "Encoder", "MoE", "CNN")
def scaled_residual(trial: Trial) -> Answer:
    override(trial.block, "add", lambda self, x, update: 1.01 * x + update)
    return own_code(trial, trial.block, ("shortcut", "act2") if trial.name == "CNN" else None)


@fault("", "layer scale ignored", "ViT")
def no_layer_scale(trial: Trial) -> Answer:
    override(trial.block, "add", lambda self, x, update: x + update)
    return own_code(trial, trial.block, also=(Cause("gradient", trial.path(trial.block)),))


@fault("B29", "post-norm for pre-norm", *PRE_NORM)
def post_norm(trial: Trial) -> Answer:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.norm1(self.add(x, self.attn(x)))
        return self.norm2(self.add(x, self.mlp(x)))

    override(trial.block, "forward", forward)
    block = trial.path(trial.block)
    return own_code(trial, trial.block, also=(Cause("architecture", block), Cause("architecture", f"{block}.*")))


@fault("B30", "final norm missing", *PRE_NORM, sited=False)
def no_final_norm(trial: Trial) -> Answer:
    override(trial.model, "finish", lambda self, x: self.head(x))
    return not_called(trial, trial.model.norm, trial.model, ("blocks.2", "head"))


def a_norm(trial: Trial) -> Any:
    return {
        "MLP": lambda: trial.model.neck.norm,
        "CNN": lambda: trial.block.norm2,
        "LSTM": lambda: trial.model.norm,
    }.get(trial.name, lambda: trial.block.norm2)()


@fault("B31", "eps of 1e-3", *ALL)
def larger_eps(trial: Trial) -> Answer:
    return set_attribute(trial, a_norm(trial), "eps", 1e-3)


@fault("B31", "eps of a neighbor's convention", *ALL)
def other_eps(trial: Trial) -> Answer:
    norm = a_norm(trial)
    return set_attribute(trial, norm, "eps", 1e-6 if norm.eps == 1e-5 else 1e-5)


@fault("B32", "eps lost", *ALL)
def no_eps(trial: Trial) -> Answer:
    return set_attribute(trial, a_norm(trial), "eps", 0.0)


@fault("B33", "GELU by tanh, as its attribute", *FEED_FORWARD)
def gelu_attribute(trial: Trial) -> Answer:
    return set_attribute(trial, trial.block.mlp.act, "approximate", "tanh")


@fault("B33", "GELU by tanh, in code", *FEED_FORWARD)
def gelu_code(trial: Trial) -> Answer:
    override(trial.block.mlp.act, "forward", lambda self, x: F.gelu(x, approximate="tanh"))
    return own_code(trial, trial.block.mlp.act)


@fault("B33", "GELU by sigmoid", *FEED_FORWARD)
def quick_gelu(trial: Trial) -> Answer:
    override(trial.block.mlp.act, "forward", lambda self, x: x * (1.702 * x).sigmoid())
    return own_code(trial, trial.block.mlp.act)


@fault("B34", "RMS norm by 1 + weight", "MoE")
def one_plus(trial: Trial) -> Answer:
    override(
        trial.block.norm2,
        "forward",
        lambda self, x: (1 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)),
    )
    return own_code(trial, trial.block.norm2)


@fault("B34", "norm rounded to bfloat16 before its weight", "MoE", "GPT", "ViT", "Encoder")
def cast_before_weight(trial: Trial) -> Answer:
    if trial.name == "MoE":

        def forward(self: Any, x: Tensor) -> Tensor:
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)).bfloat16().float()
    else:

        def forward(self: Any, x: Tensor) -> Tensor:
            return F.layer_norm(x, x.shape[-1:], eps=self.eps).bfloat16().float() * self.weight + self.bias

    override(trial.block.norm2, "forward", forward)
    return own_code(trial, trial.block.norm2)


@fault("", "norm without its mean", "GPT", "ViT", "Encoder")
def no_mean(trial: Trial) -> Answer:
    override(
        trial.block.norm2, "forward", lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight, self.eps) + self.bias
    )
    return own_code(trial, trial.block.norm2)


@fault("B41", "norm over the batch", "GPT", "ViT", "Encoder", "LSTM")
def norm_over_batch(trial: Trial) -> Answer:
    norm = a_norm(trial)

    def forward(self: Any, x: Tensor) -> Tensor:
        x = x.transpose(0, -1)
        return F.layer_norm(x, x.shape[-1:], eps=self.eps).transpose(0, -1) * self.weight + self.bias

    override(norm, "forward", forward)
    return own_code(trial, norm)


def an_activation(trial: Trial) -> tuple[Any, str]:
    if trial.name in ("MLP", "CNN"):
        return trial.block, "act" if trial.name == "MLP" else "act1"
    if trial.name == "MoE":
        return trial.block.mlp.experts[0], "act"
    return trial.block.mlp, "act"


def activation(new: Callable[[], nn.Module]) -> Plant:
    def plant(trial: Trial) -> Answer:
        parent, name = an_activation(trial)
        setattr(parent, name, new().train(parent.training))
        return architecture(trial, getattr(parent, name))

    return plant


ACTIVATED = ("MLP", "CNN", "GPT", "ViT", "Encoder", "MoE")
fault("B36", "activation replaced by nothing", *ACTIVATED)(activation(nn.Identity))
fault("B36", "activation replaced by ELU", *ACTIVATED)(activation(nn.ELU))


@fault("B36", "activation forgotten", *FEED_FORWARD, combines=False)
def activation_forgotten(trial: Trial) -> Answer:
    mlp = trial.block.mlp
    override(mlp, "forward", lambda self, x: self.drop(self.down(self.up(x))))
    return not_called(trial, mlp.act, mlp, ("up", "down"))


@fault("B36", "one activation too many", *FEED_FORWARD)
def activation_added(trial: Trial) -> Answer:
    mlp = trial.block.mlp
    override(mlp, "forward", lambda self, x: self.drop(F.relu(self.down(self.act(self.up(x))))))
    return own_code(trial, mlp, ("down", "drop"))


@fault("B36", "gate of the expert without activation", "MoE", combines=False)
def gate_without_activation(trial: Trial) -> Answer:
    expert = trial.block.mlp.experts[0]
    override(expert, "forward", lambda self, x: self.down(self.gate(x) * self.up(x)))
    return not_called(trial, expert.act, expert, ("up", "down"))


def a_linear(trial: Trial) -> Any:
    return {
        "MLP": lambda: trial.block.plain,
        "CNN": lambda: trial.block.conv2,
        "LSTM": lambda: trial.model.unrolled.cell.input,
        "MoE": lambda: trial.block.attn.out,
    }.get(trial.name, lambda: trial.block.mlp.down)()


@fault("B37", "bias removed", "MLP", "LSTM", "GPT", "ViT", "Encoder", "MoE")
def no_bias(trial: Trial) -> Answer:
    a_linear(trial).bias = None
    return architecture(trial, a_linear(trial), "*bias*")


@fault("B37", "bias added before a norm", "CNN")
def bias_added(trial: Trial) -> Answer:
    trial.block.conv2.bias = nn.Parameter(torch.full((trial.block.conv2.out_channels,), 0.05))
    return architecture(trial, trial.block.conv2, "*bias*")


@fault("B37", "bias added to the head", "GPT", "MoE", sited=False)
def head_bias(trial: Trial) -> Answer:
    trial.model.head.bias = nn.Parameter(torch.full((VOCABULARY,), 0.05))
    return architecture(trial, trial.model.head, "*bias*")


@fault("B38", "dropout of 0.5", "MLP", "CNN", "LSTM", "GPT", "MoE", train=True, sited=False)
def dropout_rate(trial: Trial) -> Answer:
    return set_attribute(trial, trial.model.neck.drop if trial.name == "MLP" else trial.model.drop, "p", 0.5)


@fault("B38", "dropout changed, run in eval", "GPT", "ViT", sited=False)
def dropout_rate_in_eval(trial: Trial) -> Answer:
    return set_attribute(trial, trial.block.mlp.drop, "p", 0.5)


@fault("B39", "convolution dilated", "CNN")
def dilated(trial: Trial) -> Answer:
    conv = trial.block.conv2
    conv.dilation = conv.padding = (2, 2)
    path = trial.path(conv)
    return Answer((Cause("attribute", path), Cause("computation", path), Cause("architecture", path)))


@fault("B39", "stride 2 in the stem", "CNN", sited=False, combines=False)
def stride(trial: Trial) -> Answer:
    trial.model.stem.stride = (2, 2)
    return Answer((Cause("attribute", "stem"), Cause("computation", "stem"), Cause("architecture", "stem")))


@fault("B39", "padding in a circle", "CNN", sited=False)
def padding_mode(trial: Trial) -> Answer:
    return set_attribute(trial, trial.model.stem, "padding_mode", "circular")


@fault("B39", "kernel of 5", "CNN", sited=False)
def kernel(trial: Trial) -> Answer:
    trial.model.stem = nn.Conv2d(1, 12, 5, padding=2).train(trial.model.training)
    return architecture(trial, trial.model.stem)


@fault("B39", "pooled by maximum", "CNN", sited=False)
def pooled_by_maximum(trial: Trial) -> Answer:
    override(trial.model, "pool", lambda self, x: x.amax(dim=(2, 3)))
    return own_code(trial, trial.model, ("blocks.2", "drop"))


@fault("", "pooled over all tokens", "ViT", "Encoder", sited=False)
def pooled_over_all(trial: Trial) -> Answer:
    override(trial.model, "pool", lambda self, x, padding=None: x.mean(1))
    return own_code(trial, trial.model, ("blocks.2", "norm" if trial.name == "ViT" else "pooler"))


@fault("", "pooled from the wrong token", "ViT", "Encoder", sited=False)
def wrong_token(trial: Trial) -> Answer:
    place = -1 if trial.name == "ViT" else 0
    override(trial.model, "pool", lambda self, x, padding=None: x[:, place])
    return own_code(trial, trial.model, ("blocks.2", "norm" if trial.name == "ViT" else "pooler"))


@fault("B43", "units killed by a bias of -20", "MLP", "GPT", "ViT", "Encoder")
def dead(trial: Trial) -> Answer:
    layer = trial.model.stem.fc if trial.name == "MLP" else trial.block.mlp.up
    if trial.name == "MLP":  # its norm would take the bias back
        layer = trial.model.stem.norm
    return set_weights(trial, layer, lambda bias: bias.fill_(-20), "bias")


@fault("B44", "saturated by 50 times the weight", "MLP", "Encoder", "LSTM")
def saturated(trial: Trial) -> Answer:
    layer = trial.model.pooler if trial.name == "Encoder" else a_linear(trial)
    return set_weights(trial, layer, lambda weight: weight.mul_(50))


def run_blocks(order: Callable[[list[Any], int], list[Any]]) -> Callable[[Trial], None]:
    def plant(trial: Trial) -> None:
        number = trial.number

        def body(self: Any, x: Tensor, *more: Tensor) -> Tensor:
            for block in order(list(self.blocks), number):
                x = block(x, *more)
            return x

        override(trial.model, "body", body)

    return plant


BLOCKS = ("MLP", "GPT", "ViT", "Encoder", "MoE")


@fault("B46", "block never called", *BLOCKS, combines=False)
def block_skipped(trial: Trial) -> Answer:
    run_blocks(lambda blocks, number: blocks[:number] + blocks[number + 1 :])(trial)
    return not_called(trial, trial.block, trial.model, (f"blocks.{trial.number - 1}", f"blocks.{trial.number + 1}"))


@fault("", "block called twice", *BLOCKS, combines=False)
def block_twice(trial: Trial) -> Answer:
    run_blocks(lambda blocks, number: [*blocks[: number + 1], *blocks[number:]])(trial)
    name = f"blocks.{trial.number}"
    says = Cause("architecture", name), Cause("computation", ROOT), Cause("architecture", ROOT)
    return Answer(says, also=(Cause("architecture", f"{name}.*"),))


@fault("", "blocks in reverse", *BLOCKS, sited=False, combines=False)
def blocks_reversed(trial: Trial) -> Answer:
    run_blocks(lambda blocks, number: blocks[::-1])(trial)
    return Answer((Cause("computation", ROOT), Cause("architecture", ROOT)), also=(Cause("architecture", "blocks.?"),))


# --- recurrence ---------------------------------------------------------------------------------------------------


@fault("", "gates in another order", "LSTM", sited=False)
def gate_order(trial: Trial) -> Answer:
    def gates(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        i, f, o, g = x.chunk(4, dim=-1)
        return i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()

    override(trial.model.unrolled.cell, "gates", gates)
    return own_code(trial, trial.model.unrolled.cell, ("hidden", ""))


@fault("", "memory without tanh", "LSTM", sited=False)
def memory_without_tanh(trial: Trial) -> Answer:
    def update(self: Any, gates: tuple[Tensor, ...], memory: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = gates
        memory = f * memory + i * g
        return o * memory, memory

    override(trial.model.unrolled.cell, "update", update)
    return own_code(trial, trial.model.unrolled.cell, ("hidden", ""))


@fault("", "memory not carried", "LSTM", sited=False)
def memory_lost(trial: Trial) -> Answer:
    override(trial.model.unrolled, "carry", lambda self, hidden, memory: (hidden, torch.zeros_like(memory)))
    return own_code(trial, trial.model.unrolled)


@fault("", "hidden and memory swapped", "LSTM", sited=False)
def state_swapped(trial: Trial) -> Answer:
    override(trial.model.unrolled, "carry", lambda self, hidden, memory: (memory, hidden))
    return own_code(trial, trial.model.unrolled)


@fault("B64", "state detached at each step", "LSTM", sited=False)
def state_detached(trial: Trial) -> Answer:
    override(trial.model.unrolled, "carry", lambda self, hidden, memory: (hidden.detach(), memory.detach()))
    return Answer((Cause("gradient", "unrolled"),))


@fault("", "batch and time confused", "LSTM", sited=False)
def time_first(trial: Trial) -> Answer:
    return set_attribute(trial, trial.model.fused, "batch_first", False)


@fault("B53", "forget bias of one", "LSTM", sited=False)
def forget_bias(trial: Trial) -> Answer:
    return set_weights(
        trial, trial.model.unrolled.cell.input, lambda b: b + torch.eye(4)[1].repeat_interleave(WIDTH), "bias"
    )


@fault("B53", "orthogonal recurrence", "LSTM", sited=False)
def orthogonal(trial: Trial) -> Answer:
    torch.manual_seed(0)
    return set_weights(trial, trial.model.fused, nn.init.orthogonal_, "weight_hh_l1")


@fault("B38", "dropout between recurrent layers", "LSTM", train=True, sited=False)
def recurrent_dropout(trial: Trial) -> Answer:
    return set_attribute(trial, trial.model.fused, "dropout", 0.5)


# --- mixture of experts -------------------------------------------------------------------------------------------


@fault("", "one expert a token", "MoE")
def top_one(trial: Trial) -> Answer:
    return set_attribute(trial, trial.block.mlp, "chosen", 1)


def routed(function: Callable[[Any, Tensor], tuple[Tensor, Tensor]], answer: Callable[..., Answer]) -> Plant:
    def plant(trial: Trial) -> Answer:
        override(trial.block.mlp, "route", function)
        return answer(trial, trial.block.mlp)

    return plant


fault("", "shares not normalized", "MoE")(
    routed(lambda self, scores: tuple(scores.softmax(-1).topk(self.chosen, dim=-1)), own_code)
)
fault("", "shares given to the other expert", "MoE")(
    routed(lambda self, scores: ((r := type(self).route(self, scores))[0].flip(-1), r[1]), own_code)
)
fault("", "the worst experts chosen", "MoE")(
    routed(lambda self, scores: ((r := type(self).route(self, -scores))[0], r[1]), own_code)
)
fault("", "router in bfloat16", "MoE")(
    routed(lambda self, scores: type(self).route(self, scores.bfloat16().float()), own_code)
)
fault("B64", "router detached", "MoE")(routed(lambda self, scores: type(self).route(self, scores.detach()), gradient))


@fault("", "expert gate and value swapped", "MoE")
def expert_swapped(trial: Trial) -> Answer:
    expert = trial.block.mlp.experts[0]
    override(expert, "forward", lambda self, x: self.down(self.gate(x) * self.act(self.up(x))))
    return own_code(trial, expert)


@fault("B51", "two experts are one", "MoE", combines=False)
def shared_expert(trial: Trial) -> Answer:
    experts = trial.block.mlp.experts
    name = trial.path(experts)
    experts[1] = experts[0]
    return Answer(
        (Cause("architecture", f"{name}.1"), Cause("architecture", f"{name}.0"), Cause("architecture", f"{name}.1.*")),
        also=(Cause("architecture", f"{name}.[01]*"), Cause("*", trial.path(trial.block.mlp))),
    )


# --- embedding ----------------------------------------------------------------------------------------------------


@fault("", "positions one too late", "GPT", sited=False)
def positions_late(trial: Trial) -> Answer:
    override(
        trial.model,
        "embed",
        lambda self, ids: self.tokens(ids) + self.positions(torch.arange(1, LENGTH + 1).clamp(max=LENGTH - 1)),
    )
    return own_code(trial, trial.model, ("tokens", "positions"))


@fault("", "positions missing", "GPT", sited=False, combines=False)
def no_positions(trial: Trial) -> Answer:
    override(trial.model, "embed", lambda self, ids: self.tokens(ids))
    return not_called(trial, trial.model.positions, trial.model, ("tokens", "drop"))


@fault("", "positions missing", "ViT", sited=False)
def no_learned_positions(trial: Trial) -> Answer:
    override(trial.model, "embed", lambda self, patches: torch.cat([self.cls.expand(len(patches), -1, -1), patches], 1))
    return own_code(trial, trial.model, ("patches", "blocks.0"), also=(Cause("gradient", ROOT),))


@fault("", "class token last", "ViT", sited=False)
def class_token_last(trial: Trial) -> Answer:
    override(
        trial.model,
        "embed",
        lambda self, patches: torch.cat([patches, self.cls.expand(len(patches), -1, -1)], 1) + self.positions,
    )
    return own_code(trial, trial.model, ("patches", "blocks.0"))


@fault("", "patches read by columns", "ViT", sited=False)
def patches_by_columns(trial: Trial) -> Answer:
    override(trial.model.patches, "tokens", lambda self, x: x.transpose(2, 3).flatten(2).transpose(1, 2))
    return own_code(trial, trial.model.patches, ("conv", ""))


@fault("", "embedding without scale", "Encoder", sited=False)
def embedding_without_scale(trial: Trial) -> Answer:
    override(trial.model.embed, "scaled", lambda self, x: x)
    return own_code(trial, trial.model.embed, ("positions", "norm"))


# --- registration, tying, initialization, loading -----------------------------------------------------------------


@fault("B48", "blocks in a python list", *BLOCKS, "CNN", sited=False, combines=False)
def python_list(trial: Trial) -> Answer:
    blocks = list(trial.model.blocks)
    del trial.model.blocks
    trial.model.__dict__["blocks"] = blocks
    removed = (Cause("architecture", "blocks"), Cause("architecture", "blocks.*"))
    return Answer(removed, also=(Cause("computation", ROOT), Cause("architecture", ROOT)))


@fault("B49", "mask no longer a buffer", "GPT")
def no_buffer(trial: Trial) -> Answer:
    mask = trial.block.attn.mask
    del trial.block.attn.mask
    trial.block.attn.mask = mask
    return Answer((Cause("architecture", trial.path(trial.block.attn), "*mask*"),))


@fault("B50", "tie lost", "GPT", sited=False)
def tie_lost(trial: Trial) -> Answer:
    trial.model.head.weight = nn.Parameter(trial.model.tokens.weight.detach().clone())
    ends = ("head", "tokens")
    return Answer(
        (Cause("architecture", "head", "*weight*"),),
        also=tuple(Cause(kind, layer) for layer in ends for kind in ("architecture", "gradient")),
        touches=ends,
    )


@fault("B51", "tie forced", "MoE", sited=False)
def tie_forced(trial: Trial) -> Answer:
    trial.model.head.weight = trial.model.tokens.weight
    return Answer(
        (Cause("architecture", "head", "*weight*"),),
        also=(Cause("*", "head"), Cause("gradient", "tokens"), Cause("architecture", "tokens")),
        touches=("tokens",),
    )


@fault("B52", "weight never initialized", *ALL)
def zeros(trial: Trial) -> Answer:
    return set_weights(trial, a_linear(trial), lambda weight: weight.zero_())


@fault("B53", "uniform for normal, same deviation", "GPT", "MoE", sited=False)
def uniform(trial: Trial) -> Answer:
    embedding = trial.model.positions if trial.name == "GPT" else trial.model.tokens
    torch.manual_seed(0)
    limit = 3**0.5 * embedding.weight.std().item()
    return set_weights(trial, embedding, lambda weight: weight.uniform_(-limit, limit))


@fault("B55", "initialized twice", *ALL)
def initialized_twice(trial: Trial) -> Answer:
    torch.manual_seed(0)
    return set_weights(trial, a_linear(trial), lambda weight: nn.init.kaiming_uniform_(weight, a=5**0.5))


@fault("B57", "renamed key leaves a random weight", "GPT", "ViT", "Encoder", "MoE")
def renamed_key(trial: Trial) -> Answer:
    torch.manual_seed(1)
    return set_weights(trial, trial.block.attn.out, lambda weight: weight.normal_(std=weight.std().item()))


@fault("", "weight loaded transposed", "GPT", "ViT", "Encoder", "MoE", "MLP")
def transposed(trial: Trial) -> Answer:
    layer = trial.block.plain if trial.name == "MLP" else trial.block.attn.out
    return set_weights(trial, layer, lambda weight: weight.T.clone())


@fault("", "one weight changed by 1 %", *ALL)
def one_weight(trial: Trial) -> Answer:
    return set_weights(
        trial, a_linear(trial), lambda weight: weight * (1 + 0.01 * (torch.arange(weight.numel()) == 7).view_as(weight))
    )


@fault("B59", "over-confident head", "MLP", "CNN", "LSTM", "ViT", "Encoder", "MoE", sited=False)
def over_confident(trial: Trial) -> Answer:
    torch.manual_seed(0)
    return set_weights(trial, trial.model.head, lambda weight: weight.normal_())


@fault("B86", "running statistics lost", "CNN", "MLP")
def statistics_lost(trial: Trial) -> Answer:
    norm = a_norm(trial)
    norm.running_var.fill_(2.0)
    return buffers(trial, norm, "running_var")


# --- gradients ----------------------------------------------------------------------------------------------------


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 0.5 * gradient


def on_the_way(function: Callable[[Tensor], Tensor]) -> Plant:
    """Return an operator that passes what a block adds through a function that forward is nothing."""

    def plant(trial: Trial) -> Answer:
        block = trial.block
        if trial.name == "MLP":
            mix = type(block).mix
            override(block, "mix", lambda self, share, new, old: mix(self, share, function(new), old))
            return gradient(trial, block, ("act", ""))
        add = type(block).add
        override(block, "add", lambda self, x, update: add(self, x, function(update)))
        return gradient(trial, block, ("shortcut", "act2") if trial.name == "CNN" else None)

    return plant


ADDING = ("MLP", "CNN", "GPT", "ViT", "Encoder", "MoE")
fault("B64", "update detached", *ADDING)(on_the_way(lambda x: x.detach()))
fault("B64", "update through .data", "GPT")(on_the_way(lambda x: x.data))
fault("", "gradient reversed", *ADDING)(on_the_way(Reversed.apply))
fault("", "gradient halved", *ADDING)(on_the_way(Scaled.apply))


@fault("B64", "residual detached", "GPT", "ViT", "Encoder", "MoE")
def residual_detached(trial: Trial) -> Answer:
    add = type(trial.block).add
    override(trial.block, "add", lambda self, x, update: add(self, x.detach(), update))
    return gradient(trial, trial.block)


@fault("B65", "stray no_grad", "MLP", "CNN", "LSTM", "GPT", "ViT", "Encoder", "MoE", combines=False)
def stray_no_grad(trial: Trial) -> Answer:
    module = trial.model.unrolled if trial.name == "LSTM" else trial.block
    original = type(module).forward
    override(module, "forward", lambda self, *inputs: torch.no_grad()(original)(self, *inputs))
    path = trial.path(module)
    context = (Cause("architecture", path), Cause("architecture", f"{path}.*"))  # its children ran without gradient
    return Answer((Cause("gradient", path), *context))


@fault("B61", "all frozen but the head", *ALL, sited=False, combines=False)
def frozen(trial: Trial) -> Answer:
    trial.model.requires_grad_(False)
    trial.model.head.requires_grad_(True)
    # One cause a layer. A gradient that no longer arrives has no other reason.
    return Answer((Cause("architecture", "*"),), also=(Cause("gradient", "*"),))


@fault("B62", "one parameter frozen", *ALL)
def one_frozen(trial: Trial) -> Answer:
    layer = a_linear(trial)
    layer.weight.requires_grad_(False)
    path = trial.path(layer)
    return Answer((Cause("architecture", path, "*weight*"),), also=(Cause("gradient", path),))


@fault("B62", "freezing not honored", "ViT", sited=False)
def not_frozen(trial: Trial) -> Answer:
    trial.model.patches.conv.weight.requires_grad_(True)
    says = Cause("architecture", "patches.conv", "*weight*")
    # Gradients now arrive at what the frozen layer gives out, and at the code around it.
    return Answer((says,), also=(Cause("gradient", "patches.conv"), Cause("gradient", "patches")))


@fault("B69", "gradient of NaN through where", "MLP")
def nan_gradient(trial: Trial) -> Answer:
    mix = type(trial.block).mix

    def positive(x: Tensor) -> Tensor:
        """ReLU that is one, forward."""
        return torch.where(x > 0, x + 0 * x.sqrt(), x)

    override(trial.block, "mix", lambda self, share, new, old: mix(self, share, positive(new), old))
    return gradient(trial, trial.block, ("act", ""))


@fault("B70", "checkpoint loses the gradient", "MLP", sited=False, combines=False)
def reentrant_checkpoint(trial: Trial) -> Answer:
    def begin(self: Any, images: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return checkpoint(self.stem, images.flatten(1), use_reentrant=True)

    override(trial.model, "begin", begin)
    context = (Cause("architecture", "stem"), Cause("architecture", "stem.*"))
    return Answer((Cause("gradient", ROOT), Cause("gradient", "stem"), *context), place=("", "stem"))


@fault("B74", "block under autocast", "MLP", "GPT", "ViT", "Encoder", combines=False)
def under_autocast(trial: Trial) -> Answer:
    block = trial.block
    original = type(block).forward

    def forward(self: Any, *inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return original(self, *inputs).float()

    override(block, "forward", forward)
    path = trial.path(block)
    says = Cause("architecture", path), Cause("architecture", f"{path}.*"), Cause("computation", path)
    return Answer(says)


@fault("B82", "feed-forward overflows in float16", *FEED_FORWARD)
def overflow(trial: Trial) -> Answer:
    mlp = trial.block.mlp
    override(mlp, "forward", lambda self, x: self.drop(self.down((self.act(self.up(x)) * 1e6).half().float() / 1e6)))
    return own_code(trial, mlp, ("act", "down"))


# --- modes, state, hooks ------------------------------------------------------------------------------------------


@fault("B86", "norm left in training mode", "CNN", "MLP")
def left_in_training(trial: Trial) -> Answer:
    norm = a_norm(trial)
    norm.train()
    path = trial.path(norm)
    return Answer((Cause("attribute", path), Cause("architecture", path)))


@fault("B86", "norm left in eval mode", "CNN", "MLP", train=True)
def left_in_eval(trial: Trial) -> Answer:
    norm = a_norm(trial)
    norm.eval()
    path = trial.path(norm)
    return Answer((Cause("attribute", path), Cause("architecture", path)))


@fault("", "momentum of 0.01", "CNN", "MLP", train=True)
def momentum(trial: Trial) -> Answer:
    return set_attribute(trial, a_norm(trial), "momentum", 0.01)


@fault("B87", "mask cached from an earlier batch", "Encoder")
def stale_mask(trial: Trial) -> Answer:
    attn = trial.block.attn

    def masked(self: Any, scores: Tensor, padding: Tensor) -> Tensor:
        if getattr(self, "cache", None) is None or self.cache.shape != padding.shape:
            self.cache = padding
        return Attention.masked(self, scores, self.cache)

    override(attn, "masked", masked)
    ids, padding = trial.inputs
    with torch.no_grad():
        trial.model(ids, padding.roll(1, 0))
    return own_code(trial, attn, ("v", "out"))


class Louder:
    """A forward hook that somebody left behind."""

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return 1.01 * output


@fault("", "a hook left behind", "MLP", "CNN", "GPT", "ViT", "Encoder", "MoE")
def leftover_hook(trial: Trial) -> Answer:
    a_linear(trial).register_forward_hook(Louder())
    return own_code(trial, a_linear(trial))


# --- loss, inputs, seed -------------------------------------------------------------------------------------------

VISION = ("MLP", "CNN", "ViT")
TEXT = ("LSTM", "GPT", "MoE")


def loss(change: Callable[[Loss, Tensor], Tensor]) -> Plant:
    def plant(trial: Trial) -> Answer:
        original = trial.loss
        trial.loss = functools.wraps(original)(lambda output: change(original, output))
        return Answer((Cause("gradient", ROOT),))

    return plant


LOSS = {"sited": False, "combines": False}
fault("B77", "softmax before cross entropy", *VISION, *TEXT, "Encoder", **LOSS)(
    loss(lambda original, output: original(output.softmax(-1)))
)
fault("B78", "loss summed", "MLP", "GPT", **LOSS)(loss(lambda original, output: original(output) * len(output)))
fault("B80", "labels shifted twice", *TEXT, **LOSS)(loss(lambda original, output: original(output.roll(1, 1))))
fault("B81", "padding counted in the loss", *TEXT, **LOSS)(
    loss(lambda original, output: next_token(output, ignored=-100))
)
fault("DC", "loss clipped", "MLP", **LOSS)(loss(lambda original, output: original(output.clamp(-0.1, 0.1))))


def inputs(change: Callable[[Tensor], Tensor]) -> Plant:
    def plant(trial: Trial) -> Answer:
        trial.inputs = (change(trial.inputs[0]), *trial.inputs[1:])
        return Answer((Cause("input", "*"),))

    return plant


fault("DC", "images divided by 255", *VISION, **LOSS)(inputs(lambda images: images * 16 / 255))
fault("DC", "images upside down", *VISION, **LOSS)(inputs(lambda images: images.flip(-2)))
fault("DC", "tokens one off", *TEXT, "Encoder", **LOSS)(inputs(lambda ids: (ids + 1) % VOCABULARY))
fault("DC", "one token changed", *TEXT, "Encoder", **LOSS)(
    inputs(lambda ids: ids.index_put((torch.tensor(2), torch.tensor(19)), (ids[2, 19] + 1) % VOCABULARY))
)
fault("B85", "duplicate rows in the batch", *ALL, **LOSS)(inputs(lambda x: torch.cat([x[:1], x[:-1]])))


@fault("", "another seed", "MLP", "GPT", train=True, **LOSS)
def another_seed(trial: Trial) -> Answer:
    trial.seed = 1
    return Answer((Cause("seed", "*"),), also=(Cause("input", "*"),))


@fault("", "an extra layer", *BLOCKS, "CNN", sited=False)
def extra_layer(trial: Trial) -> Answer:
    width = {"CNN": 16, "MLP": 48}.get(trial.name, WIDTH)
    extra = nn.BatchNorm2d(width) if trial.name == "CNN" else nn.LayerNorm(width)
    trial.model.extra = extra.train(trial.model.training)
    body = type(trial.model).body
    override(trial.model, "body", lambda self, *x: self.extra(body(self, *x)))
    says = Cause("architecture", "extra")
    return Answer((says,), also=(Cause("architecture", ROOT), Cause("computation", ROOT)), touches=(ROOT,))


NOT_SHOWN = {
    "B28": "an in-place change of a tensor that autograd needs is an error of torch's own, loud enough",
    "B60": "zero_grad missing shows in the second step; a record is of one",
    "B67": "a step that does nothing shows in the weights after it; a record is of one forward and backward",
    "B68": "the order of backward, step and zero_grad is the training loop's",
    "B71": "accumulation is the training loop's",
    "B73": "needs several processes",
    "B75": "weight decay is the optimizer's",
    "B79": "a broadcast in the loss is a warning of torch's own; what is left is a wrong loss, see B77 to B81",
    "B83": "a kernel's accuracy is no change of the model",
}
"""Rows of the collection that one forward and backward of one model cannot show."""


def start(name: str, *, train: bool = False, dropout: float = 0.1, number: int = 1) -> Trial:
    """Return a clean model, ready to be run."""
    chosen = ARCHITECTURES[name]
    model = chosen.build(dropout, train=train)
    return Trial(name, model, copy.deepcopy(chosen.inputs(ModelProbe(seed=0))), chosen.loss, number)
