"""What changes a run without changing the model: settings, layouts, roundings, and code written otherwise."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from architectures import GPT, Attention, Cell, Expert, Highway, Residual
from faults import ATTENTION, FEED_FORWARD, Trial, by_hand, override
from torch import Tensor, nn

from pytest_modelprobe import kernel

Change = Callable[[Trial], contextlib.AbstractContextManager[None]]

# --- settings -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Run with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def with_threads(number: int) -> Change:
    return lambda trial: threads(number)


@contextlib.contextmanager
def by_torch(trial: Trial) -> Iterator[None]:
    """Read the tensors by torch, where the snapshot was read by the compiled kernel."""
    compiled, kernel.active = kernel.active, None
    try:
        yield
    finally:
        kernel.active = compiled


def without_mkldnn(trial: Trial) -> contextlib.AbstractContextManager[None]:
    return torch.backends.mkldnn.flags(enabled=False)  # type: ignore[no-any-return]


def channels_last(trial: Trial) -> contextlib.AbstractContextManager[None]:
    trial.model.to(memory_format=torch.channels_last)
    trial.inputs = tuple(x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in trial.inputs)
    return contextlib.nullcontext()


def one_ulp(seed: int) -> Change:
    """Move each weight and floating input to a neighbor."""

    def change(trial: Trial) -> contextlib.AbstractContextManager[None]:
        generator = torch.Generator().manual_seed(seed)

        def moved(x: Tensor) -> Tensor:
            way = torch.rand(x.shape, generator=generator).sub(0.5).sign() * math.inf
            return torch.where(x == 0, x, x.nextafter(way))

        with torch.no_grad():
            for parameter in trial.model.parameters():
                parameter.copy_(moved(parameter))
        trial.inputs = tuple(moved(x) if x.is_floating_point() else x for x in trial.inputs)
        return contextlib.nullcontext()

    return change


SETTINGS: dict[str, Change] = {
    **({"read by the other path": by_torch} if kernel.active else {}),
    "1 thread": with_threads(1),
    "2 threads": with_threads(2),
    "4 threads": with_threads(4),
    "oneDNN off": without_mkldnn,
    "channels last": channels_last,
}
ROUNDINGS: dict[str, Change] = {f"one ulp, {seed}": one_ulp(seed) for seed in range(3)}

# --- code written otherwise ---------------------------------------------------------------------------------------


def everywhere(kind: type | str, method: str, function: Callable[..., Any]) -> Change:
    """Give all modules of a type (or with a method of that name) other code that computes the same."""

    def change(trial: Trial) -> contextlib.AbstractContextManager[None]:
        found = [m for m in trial.model.modules() if (hasattr(m, kind) if isinstance(kind, str) else type(m) is kind)]
        assert found
        for module in found:
            if method in ("scores", "softmax"):
                by_hand(module)
            override(module, method, function)
        return contextlib.nullcontext()

    return change


def rms_by_division(self: Any, x: Tensor) -> Tensor:
    return x / (x * x).mean(-1, keepdim=True).add(self.eps).sqrt() * self.weight


def layer_norm_by_hand(self: Any, x: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


def heads_by_bmm(self: Any, q: Tensor, k: Tensor) -> Tensor:
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) * self.scale
    return scores.unflatten(0, q.shape[:2])


def route_after_choice(self: Any, scores: Tensor) -> tuple[Tensor, Tensor]:
    chosen, which = scores.topk(self.chosen, dim=-1)
    return chosen.softmax(-1), which


def gates_by_split(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    i, f, g, o = x.split(x.shape[-1] // 4, dim=-1)
    return torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)


REFACTORS: list[tuple[str, tuple[str, ...], Change]] = [
    ("scores by einsum", ATTENTION, everywhere(
        "merge", "scores", lambda self, q, k: torch.einsum("bhqd,bhkd->bhqk", q, k) * self.scale)),
    ("scores by bmm", ATTENTION, everywhere("merge", "scores", heads_by_bmm)),
    ("queries scaled first", ATTENTION, everywhere("merge", "scores", lambda self, q, k: (q * self.scale) @ k.mT)),
    ("softmax by exp and logsumexp", ATTENTION, everywhere(
        "merge", "softmax", lambda self, s: (s - s.logsumexp(-1, keepdim=True)).exp())),
    ("softmax of float64", ATTENTION, everywhere("merge", "softmax", lambda self, s: s.double().softmax(-1).float())),
    ("heads merged by permute and reshape", ATTENTION, everywhere(
        "merge", "merge", lambda self, x: x.permute(0, 2, 1, 3).reshape(len(x), x.shape[2], -1))),
    ("heads split by unflatten", ATTENTION, everywhere(
        "merge", "split", lambda self, x: x.unflatten(-1, (self.heads, -1)).permute(0, 2, 1, 3))),
    ("attention by hand for fused", ("ViT",), everywhere("merge", "attend", Attention.attend)),
    ("GELU by erf", FEED_FORWARD, everywhere(
        nn.GELU, "forward", lambda self, x: 0.5 * x * (1 + torch.erf(x * 0.5**0.5)))),
    ("ReLU by clamp", ("MLP", "CNN"), everywhere(nn.ReLU, "forward", lambda self, x: x.clamp(min=0))),
    ("ReLU by where", ("MLP", "CNN"), everywhere(nn.ReLU, "forward", lambda self, x: torch.where(x > 0, x, 0))),
    ("layer norm by hand", ("LSTM", "GPT", "ViT", "Encoder"), everywhere(
        nn.LayerNorm, "forward", layer_norm_by_hand)),
    ("RMS norm by division", ("MoE",), everywhere("eps", "forward", rms_by_division)),
    ("sum in the other order", ("CNN", "GPT", "Encoder", "MoE"), everywhere(
        "add", "add", lambda self, x, y: torch.add(y, x))),
    ("layer scale by addcmul", ("ViT",), everywhere(
        "gamma", "add", lambda self, x, y: torch.addcmul(x, self.gamma, y))),
    ("qkv by unbind", ("GPT",), everywhere(
        "merge", "project", lambda self, x: self.qkv(x).unflatten(-1, (3, -1)).unbind(-2))),
    ("highway by lerp", ("MLP",), everywhere("mix", "mix", lambda self, share, new, old: torch.lerp(old, new, share))),
    ("mean by sum and division", ("CNN",), everywhere(
        "pool", "pool", lambda self, x: x.flatten(2).sum(-1) / x[0, 0].numel())),
    ("linear by matmul", ("MLP", "CNN", "LSTM", "GPT", "ViT", "Encoder", "MoE"), everywhere(
        nn.Linear, "forward", lambda self, x: x @ self.weight.T + (0 if self.bias is None else self.bias))),
    ("SiLU by sigmoid", ("MoE",), everywhere(nn.SiLU, "forward", lambda self, x: x * x.sigmoid())),
    ("shares by softmax of the chosen", ("MoE",), everywhere("route", "route", route_after_choice)),
    ("gates by split", ("LSTM",), everywhere("gates", "gates", gates_by_split)),
]  # fmt: skip

# --- layers renamed -----------------------------------------------------------------------------------------------

RENAMES: dict[str, dict[str, str]] = {
    "head renamed": {"classifier": "head"},
    "blocks renamed": {"layers": "blocks"},
}
"""Actual name → expected name, as `compare` takes them."""


def renamed(trial: Trial, names: dict[str, str]) -> bool:
    """Rename children of the model, each in its place; False where it has none of the name."""
    children = trial.model._modules
    new = {old: name for name, old in names.items() if old in children}
    for old in [*children]:
        child = children.pop(old)
        children[new.get(old, old)] = child
        if old in new:
            trial.model.__dict__[old] = child  # the code still says the old name
    return bool(new)


# --- what comes with a fault --------------------------------------------------------------------------------------


def inert_attributes(trial: Trial) -> None:
    """Give each module of the model's own classes an attribute that nothing reads."""
    for module in trial.model.modules():
        if not type(module).__module__.startswith("torch."):
            module.inert = 3


def plain_first(self: Any, x: Tensor) -> Tensor:
    new = self.act(self.plain(x))
    return self.mix(self.sigmoid(self.gate(x)), new, x)


def shortcut_first(self: Any, x: Tensor) -> Tensor:
    shortcut = self.shortcut(x)
    return self.act2(self.add(self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x))))), shortcut))


def hidden_first(self: Any, x: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    before = self.hidden(hidden)
    return self.update(self.gates(self.input(x) + before), memory)


def values_first(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    v, k, q = self.v(x), self.k(x), self.q(x)
    return q, k, v


def positions_first(self: Any, ids: Tensor) -> Tensor:
    positions = self.positions(torch.arange(ids.shape[1], device=ids.device))
    return self.tokens(ids) + positions


def up_first(self: Any, x: Tensor) -> Tensor:
    up = self.up(x)
    return self.down(self.act(self.gate(x)) * up)


_REORDERED: list[tuple[type[nn.Module], str, Callable[..., Any]]] = [
    (Highway, "forward", plain_first),
    (Residual, "forward", shortcut_first),
    (Cell, "forward", hidden_first),
    (Attention, "project", values_first),
    (GPT, "embed", positions_first),
    (Expert, "forward", up_first),
]


def statements_reordered(trial: Trial) -> None:
    """Let each module of these classes call two of its children in the other order."""
    for kind, method, function in _REORDERED:
        for module in trial.model.modules():
            if isinstance(module, kind) and not hasattr(module, "qkv"):  # which has one child for all three
                override(module, method, function)
