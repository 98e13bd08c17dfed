"""What is trained: small models, their data, and a run that is watched. A fault is in a function or in the loop.

Functions that a layer holds (`Attention.attend`, `Linear.code`) are no attributes that a record has. So the twins of a
fault in code have the same layers, types and attributes, as two versions of one program do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from pytest_modelprobe import ModelProbe, UsageError, checks

WIDTH, HEADS, WORDS, LENGTH, BATCH, STEPS = 16, 2, 11, 8, 16, 5


class Run:
    """One run of a program: the model, its inputs, and the watch on it."""

    def __init__(self, seed: int, rank: int = 0, ranks: int = 1, standard: bool = True) -> None:
        self.seed, self.rank, self.ranks, self.checked = seed, rank, ranks, standard
        self.probe = ModelProbe(seed=seed)
        self.model: Any = None
        self.watch: Any = None
        self.inputs: Any = None
        self.optimizer: Any = None
        self.standard: Exception | None = None

    def watched(
        self,
        make: Callable[[], nn.Module],
        inputs: Tensor,
        wrap: Callable[[Any], Any] | None = None,
        standard: bool = True,
        attention: bool = False,
    ) -> Any:
        """Return the model, built with the seed, wrapped, and watched. One that is built alike is checked before."""
        try:
            if not standard:
                raise UsageError("collectives in its forward: the standard checks were not run")
            torch.manual_seed(self.seed)
            if self.checked:
                checks.standard(ModelProbe(seed=self.seed), make(), inputs)
        except Exception as error:  # noqa: BLE001 - it is judged later
            self.standard = error
        torch.manual_seed(self.seed)
        self.model, self.inputs = make(), inputs
        wrapped = wrap(self.model) if wrap else self.model
        self.watch = self.probe.watch(wrapped, steps=STEPS, attention=attention)
        return wrapped

    def digits(self, steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
        """Return batches of images and their classes; each rank has its part of them."""
        images, classes = loaded()
        chosen = torch.randint(len(images), (steps, BATCH), generator=self.generator()).chunk(self.ranks, 1)
        return [(images[rows], classes[rows]) for rows in chosen[self.rank]]

    def texts(self, steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
        """Return batches of ids and the ids that follow; a 0 begins a new document."""
        start = torch.randint(WORDS, (steps, BATCH, 1), generator=self.generator())
        ids = (start + 3 * torch.arange(LENGTH + 1)) % WORDS
        return [(rows[:, :-1], rows[:, 1:]) for rows in ids.chunk(self.ranks, 1)[self.rank]]

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


@functools.cache
def loaded() -> tuple[Tensor, Tensor]:
    images, classes = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(classes)


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.GELU()
        self.fc1, self.ln1, self.act2 = nn.Linear(288, 32), nn.LayerNorm(32), nn.GELU()
        self.head1 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.bn1(self.conv1(x))).flatten(1)
        return self.head1(self.act2(self.ln1(self.fc1(x))))


class Routed(nn.Module):
    """Two experts, both of which answer, as a router weighs them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act1, self.router1 = nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 2)
        self.experts = nn.ModuleList(nn.Linear(32, 10) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.fc1(x.flatten(1)))
        weights = self.router1(x).softmax(-1)
        return sum(weights[:, [i]] * expert(x) for i, expert in enumerate(self.experts))


class Linear(nn.Linear):
    code = staticmethod(F.linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.code(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    code = staticmethod(F.embedding)

    def forward(self, ids: Tensor) -> Tensor:
        return self.code(ids, self.weight)


def by_document(layer: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """Attend to earlier positions of the same document."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    seen = (documents[:, None, :, None] == documents[:, None, None]) & torch.ones_like(scores).tril().bool()
    weights = F.softmax(scores.masked_fill(~seen, float("-inf")), -1)
    return F.dropout(weights, 0.1, layer.training) @ v


class Attention(nn.Module):
    attend = staticmethod(by_document)

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(self.attend(self, q, k, v, documents).transpose(1, 2).flatten(2))


def call(function: Callable[..., Tensor], *args: Any) -> Tensor:
    return function(*args)


class Block(nn.Module):
    call = staticmethod(call)

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.fc1, self.act1, self.fc2 = Linear(WIDTH, 2 * WIDTH), nn.GELU(), Linear(2 * WIDTH, WIDTH)
        self.drop1 = nn.Dropout(0.1)

    def mlp(self, x: Tensor) -> Tensor:
        return x + self.drop1(self.fc2(self.act1(self.fc1(self.norm2(x)))))

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        return self.call(self.mlp, x + self.attn(self.norm1(x), documents))


class Decoder(nn.Module):
    """A language model of packed documents."""

    split = staticmethod(list)
    """Which blocks are called, as stages of a pipeline would."""

    def __init__(self) -> None:
        super().__init__()
        self.embed1, self.place1 = Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm1, self.head1 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x, documents = self.embed1(ids) + self.place1(torch.arange(ids.shape[1])), (ids == 0).cumsum(1)
        for block in self.split(self.blocks):
            x = block(x, documents)
        return self.head1(self.norm1(x))


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), 0.05)


def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, between: Callable[[], object] = bool) -> None:
    """Take a step; ``between`` runs between the backward and the optimizer."""
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    between()
    optimizer.step()


def train(run: Run, model: nn.Module, optimizer: Optimizer, between: Callable[[], object] = bool) -> None:
    for x, y in run.texts() if run.inputs.dim() == 2 else run.digits():
        step(model, optimizer, x, y, between)


def evaluate(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model.eval()(x)


def average(model: nn.Module, lost: str = "", lose: Callable[[Tensor, Tensor], object] | None = None) -> None:
    """Average gradients over the ranks; ``lose`` is called with those of ``lost``, and with what this rank had."""
    for name, parameter in model.named_parameters():
        own = parameter.grad.clone()
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
        if lose is not None and name.startswith(lost):
            lose(parameter.grad, own)
