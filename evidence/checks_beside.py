"""Which faults of models the checks find and name, beside the tests that pytest-torch has for the same properties.

    python evidence/checks_beside.py            # all, and writes CHECKS.md beside this
    python evidence/checks_beside.py softmax    # the faults whose title has the word, printed only

Each model comes with what its author claims of it: causal, deaf to padding, frozen in part. Each tool has one suite for
all models and tests every claim with it, of the healthy model and of each faulty one: no suite knows of a fault.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import functools
import io
import logging
import os
import platform
import re
import statistics
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest_torch as beside
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import pytest_modelprobe as ours
from pytest_modelprobe import ModelProbe, checks

PAGE = Path(__file__).with_name("CHECKS.md")
WIDTH, HEADS, WORDS, LENGTH, BATCH = 16, 2, 11, 6, 4

# --- healthy models. Names have a number or a dot: no message says them but of the layer --------------------------


class Attention(nn.Module):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def seen(self, scores: Tensor) -> Tensor:
        ones = torch.ones_like(scores, dtype=torch.bool)
        return ones.tril() if self.causal else ones

    def masked(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        seen = self.seen(scores) if mask is None else self.seen(scores) & (mask[:, None, None] == 1)
        return scores.masked_fill(~seen, float("-inf"))

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def merged(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(project(x)) for project in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        return self.out(self.merged(self.weights(self.masked(scores, mask)) @ v))


class Block(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(causal), nn.LayerNorm(WIDTH)
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), mask)
        return x + self.drop(self.fc2(self.act(self.fc1(self.norm2(x)))))


class Decoder(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.embed1, self.place1 = nn.Embedding(WORDS, WIDTH), nn.Embedding(5 * LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(causal) for _ in range(3))
        self.norm1, self.head1 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head1.weight = self.embed1.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed1(input_ids) + self.place1(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.head1(self.norm1(x))


class Pool(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class Encoder(Decoder):
    """A classifier of texts of different lengths."""

    def __init__(self) -> None:
        super().__init__(causal=False)
        self.pool1 = Pool()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.pool1(super().forward(input_ids, attention_mask), attention_mask)


class WithLoss(nn.Module):
    """A language model that gives out its loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Decoder()

    def mean(self, losses: Tensor, labels: Tensor) -> Tensor:
        return losses.mean()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(self.net(input_ids).transpose(1, 2), labels, ignore_index=-100, reduction="none")
        return self.mean(losses, labels)


def chain(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = chain(conv=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(8), act=nn.ReLU())
        self.body = chain(conv=nn.Conv2d(8, 8, 3), norm=nn.BatchNorm2d(8), act=nn.ReLU(), pool=nn.AdaptiveAvgPool2d(2))
        self.tail = chain(flat=nn.Flatten(), drop=nn.Dropout(0.1), head=nn.Linear(32, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.body(self.stem(x)))


class Tuned(Vision):
    """A pretrained stem that stays as it is, with its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)

    def train(self, mode: bool = True) -> Tuned:
        super().train(mode)
        self.stem.eval()
        return self


class Norm(nn.Module):
    eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def of_points(pool: nn.Module) -> nn.Module:
    """A set goes in; an answer for each of its elements, or one for all of them."""
    lift, head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)
    return chain(norm1=Norm(), lift1=lift, act1=nn.GELU(), attn1=Attention(), pool1=pool, head1=head)


# --- what their authors say of them -------------------------------------------------------------------------------


def likelihood(output: Tensor) -> Tensor:
    return -output.log_softmax(-1)[..., 0].mean()


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), 0.1, momentum=0.9)


def step(loss: Tensor, optimizer: Optimizer, parts: int, last: bool, reset: bool = True) -> None:
    (loss / parts).backward()
    if last:
        optimizer.step()
    if last and reset:
        optimizer.zero_grad()


def follow(average: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for mine, its in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(its, 0.1)
        for mine, its in zip(average.buffers(), model.buffers(), strict=True):
            mine.copy_(its)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and what it is trained with; what is claimed of it, and which part is said to be frozen."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    claims: tuple[str, ...] = ()
    frozen: str = ""
    loss: Callable[[Tensor], Tensor] = likelihood
    optimizer: Callable[[nn.Module], Optimizer] = sgd
    step: Callable[[Tensor, Optimizer, int, bool], None] = step
    follow: Callable[[nn.Module, nn.Module], None] = follow
    load: Callable[[Any, Path], Any] = beside.load_training_state


def texts() -> dict[str, Tensor]:
    ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 7 % WORDS
    return {"input_ids": ids, "attention_mask": (torch.arange(LENGTH) < torch.tensor([[6], [5], [4], [6]])).long()}


def labeled() -> dict[str, Tensor]:
    ids, mask = texts().values()
    return {"input_ids": ids, "labels": ids.roll(-1, 1).masked_fill(mask == 0, -100)}


def points() -> dict[str, Tensor]:
    return {"input": torch.randn(BATCH, LENGTH, 8).index_fill(1, torch.tensor(0), 0)}  # one is the origin


def images() -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, 3, 9, 9)}


def trainable(model: nn.Module) -> Optimizer:
    return SGD([p for p in model.parameters() if p.requires_grad], 0.1)


SUBJECTS = {
    "decoder": Subject(make=Decoder, inputs=lambda: {"input_ids": texts()["input_ids"]}, claims=("causal", "added up")),
    "encoder": Subject(make=Encoder, inputs=texts, claims=("padded", "added up")),
    "with loss": Subject(make=WithLoss, inputs=labeled, claims=("added up",), loss=lambda loss: loss),
    "vision": Subject(make=Vision, inputs=images, claims=("deployed",)),
    "tuned": Subject(make=Tuned, inputs=images, frozen="stem", optimizer=trainable),
    "points": Subject(make=lambda: of_points(nn.Identity()), inputs=points, claims=("equivariant", "added up")),
    "set": Subject(make=lambda: of_points(Mean()), inputs=points, claims=("invariant", "added up")),
}

# --- faults -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    title: str
    subject: str
    where: str
    """Globs of the layers or parameters of which one is to be named; empty: no layer is at fault."""
    plant: Callable[[Subject], Subject]


def edited(edit: Callable[[Any], object]) -> Callable[[Subject], Subject]:
    """Return what edits each model that is made."""

    def plant(subject: Subject) -> Subject:
        def make() -> nn.Module:
            model = subject.make()
            edit(model)
            return model

        return replace(subject, make=make)

    return plant


def coded(path: str, attribute: Any = None, **methods: Any) -> Callable[[Subject], Subject]:
    """Return what gives a layer other methods, in a class of this module: it can be pickled as if it was written so."""

    def edit(model: nn.Module) -> None:
        layer = model.get_submodule(path)
        if attribute is not None:
            layer.own = copy.deepcopy(attribute)
        name = f"{type(layer).__name__}_{path.replace('.', '_')}"
        layer.__class__ = globals()[name] = type(name, (type(layer),), {**methods, "__module__": __name__})

    return edited(edit)


def around(**changes: Any) -> Callable[[Subject], Subject]:
    """Return what changes something else than the model."""
    return lambda subject: replace(subject, **changes)


def then(layer: type[nn.Module], after: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return the forward of a layer, with something done to what it gives out."""
    return lambda self, *args: after(layer.forward(self, *args))


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def call_listed(block: Any, args: Any, output: Tensor) -> Tensor:
    return output + block.extra[0](output)


def listed(model: Any) -> None:
    model.blocks[1].extra = [nn.Linear(WIDTH, WIDTH)]
    model.blocks[1].register_forward_hook(call_listed)


def turned(x: Tensor) -> Tensor:
    return x if x.mean() > 0 else -x


def dead(model: Any) -> None:
    model.blocks[1].act = nn.ReLU()
    nn.init.constant_(model.blocks[1].fc1.bias, -100.0)


def count(self: Any, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return F.gelu(x) * (1 + 0.1 * self.calls)


def keep(self: Any, scores: Tensor, mask: Tensor) -> Tensor:
    self.kept = mask if getattr(self, "kept", mask).shape != mask.shape else getattr(self, "kept", mask)
    return Attention.masked(self, scores, self.kept)


def off_for_good(self: Any, mode: bool = True) -> Any:
    self.p = self.p if mode else 0.0
    return nn.Dropout.train(self, mode)


def one_seed(self: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return F.dropout(x, self.p, self.training)


def untie(self: Any, state: Any, strict: bool = True, assign: bool = False) -> Any:
    self.head1.weight = nn.Parameter(self.head1.weight.detach().clone())
    return nn.Module.load_state_dict(self, state, strict, assign)


def too_early(model: Any) -> Optimizer:
    optimizer = sgd(model)
    model.blocks[1].fc1 = nn.Linear(WIDTH, 2 * WIDTH)
    return optimizer


def weights_only(setup: Any, path: Path) -> None:
    setup.model.load_state_dict(torch.load(path, weights_only=False)["model"])


BLOCK, ATTN, FC1 = "blocks.1", "blocks.1.attn", "blocks.1.fc1*"
DROP, NORM, ACT = f"{BLOCK}.drop", f"{BLOCK}.norm2", f"{BLOCK}.act"
FAULTS = [
    Fault("softmax over the queries", "decoder", ATTN, coded(ATTN, weights=lambda self, s: s.softmax(-2))),
    Fault("softmax over the batch", "encoder", ATTN, coded(ATTN, weights=lambda self, s: s.softmax(0))),
    Fault("causal mask off by one", "decoder", ATTN, coded(ATTN, seen=lambda self, s: torch.ones_like(s).tril(1) == 1)),
    Fault("causal mask missing", "decoder", ATTN, coded(ATTN, masked=lambda self, s, mask: s)),
    Fault("heads split by a view", "decoder", ATTN, coded(ATTN, split=lambda self, x: x.view(len(x), HEADS, -1, 8))),
    Fault("heads merged by a view", "decoder", ATTN, coded(ATTN, merged=lambda self, x: x.reshape(len(x), -1, WIDTH))),
    Fault("norm over all positions", "decoder", NORM,
          coded(NORM, forward=lambda self, x: F.layer_norm(x, x.shape[1:]) * self.weight + self.bias)),
    Fault("padding mask ignored", "encoder", ATTN, coded(ATTN, masked=lambda self, s, mask: s)),
    Fault("padding counted in the mean", "encoder", "pool1", coded("pool1", forward=lambda self, x, mask: x.mean(1))),
    Fault("positions added to a set", "points", "lift1",
          coded("lift1", forward=then(nn.Linear, lambda x: x + torch.arange(LENGTH)[:, None]))),
    Fault("last element for the mean", "set", "pool1", coded("pool1", forward=lambda self, x: x[:, -1])),
    Fault("attention drops out in evaluation", "decoder", ATTN,
          coded(ATTN, weights=lambda self, s: F.dropout(s.softmax(-1), 0.1))),
    Fault("dropout that ignores the mode", "decoder", DROP, coded(DROP, forward=lambda self, x: F.dropout(x, self.p))),
    Fault("dropout off for good after eval()", "decoder", DROP, coded(DROP, train=off_for_good)),
    Fault("dropout of one seed", "decoder", DROP, coded(DROP, forward=one_seed)),
    Fault("noise of its own generator", "points", "act1",
          coded("act1", torch.Generator(), forward=lambda self, x: x + torch.randn(x.shape, generator=self.own))),
    Fault("BatchNorm never in evaluation", "vision", "body.norm*",
          coded("body.norm", train=lambda self, mode=True: self)),
    Fault("norm over the batch", "encoder", NORM,
          coded(NORM, forward=then(nn.LayerNorm, lambda x: x - x.mean(0)))),
    Fault("counter of calls in the output", "decoder", f"{ACT} {ACT}.calls", coded(ACT, forward=count)),
    Fault("mask kept of the first batch", "encoder", f"{ATTN} {ATTN}.kept", coded(ATTN, masked=keep)),
    Fault("input added to in place", "points", "norm1", coded("norm1", forward=lambda self, x: x.add_(1))),
    Fault("input rectified in place", "vision", "stem.conv",
          coded("stem.conv", forward=lambda self, x: nn.Conv2d.forward(self, x.relu_()))),
    Fault("batch size in a reshape", "vision", "tail.flat",
          coded("tail.flat", forward=lambda self, x: x.reshape(BATCH, -1))),
    Fault("view of any input", "points", "norm1",
          coded("norm1", forward=lambda self, x: Norm.forward(self, x.view(-1, 8)).view(x.shape))),
    Fault("layer in a plain list", "decoder", f"{BLOCK}.extra*", edited(listed)),
    Fault("tensor that is no buffer", "points", "act1 act1.own",
          coded("act1", torch.linspace(1, 2, WIDTH), forward=lambda self, x: F.gelu(x * self.own))),
    Fault("weight never initialized", "decoder", FC1,
          edited(lambda m: setattr(m.blocks[1].fc1, "weight", nn.Parameter(torch.empty(2 * WIDTH, WIDTH))))),
    Fault("tie lost in loading", "decoder", "head1.weight", coded("", load_state_dict=untie)),
    Fault("attribute that is not pickled", "decoder", f"{ACT} {ACT}.own", coded(ACT, lambda x: x)),
    Fault("float32 written into the code", "points", "act1", coded("act1", forward=then(nn.GELU, Tensor.float))),
    Fault("branch detached", "decoder", f"{NORM}* {FC1} {BLOCK}.fc2*",
          coded(f"{BLOCK}.fc2", forward=lambda self, x: nn.Linear.forward(self, x.detach()))),
    Fault("units that are all dead", "decoder", f"{NORM}* {FC1} {ACT}", edited(dead)),
    Fault("layer frozen by mistake", "decoder", FC1, edited(lambda m: m.blocks[1].fc1.requires_grad_(False))),
    Fault("frozen layer that learns", "tuned", "stem.conv*", edited(lambda m: m.stem.requires_grad_(True))),
    Fault("frozen statistics that run on", "tuned", "stem.norm*", coded("", train=nn.Module.train)),
    Fault("wrong backward of a Function", "points", "act1",
          coded("act1", forward=lambda self, x: WrongBackward.apply(x))),
    Fault("NaN of an element that is zero", "points", "norm1", edited(lambda m: setattr(m.norm1, "eps", 0.0))),
    Fault("NaN in the gradient alone", "points", "act1",
          coded("act1", forward=lambda self, x: torch.where(x > 0, x.sqrt(), x))),
    Fault("control flow on contents", "vision", "tail.flat",
          coded("tail.flat", forward=then(nn.Flatten, turned))),
    Fault("other code when compiled", "vision", "tail.flat",
          coded("tail.flat", forward=then(nn.Flatten, lambda x: 2 * x if torch.compiler.is_compiling() else x))),
    Fault("other code without gradients", "decoder", ACT,
          coded(ACT, forward=then(nn.GELU, lambda x: x if torch.is_grad_enabled() else 2 * x))),
    Fault("BatchNorm where parts add up", "points", "act1*",
          edited(lambda m: setattr(m, "act1", nn.BatchNorm1d(LENGTH)))),
    Fault("mean over the tokens that count", "with loss", "",
          coded("", mean=lambda self, losses, labels: losses.sum() / (labels >= 0).sum())),
    Fault("loss summed over the batch", "points", "", around(loss=lambda y: len(y) * likelihood(y))),
    Fault("gradients never reset", "decoder", "", around(step=functools.partial(step, reset=False))),
    Fault("optimizer made too early", "decoder", FC1, around(optimizer=too_early)),
    Fault("optimizer of a copy", "decoder", "", around(optimizer=lambda m: sgd(copy.deepcopy(m)))),
    Fault("parameter twice in the optimizer", "decoder", "norm1.weight",
          around(optimizer=lambda m: SGD([*m.parameters(), m.norm1.weight], 0.1))),
    Fault("optimizer not restored", "decoder", "", around(load=weights_only)),
    Fault("average that leaves out the head", "points", "head1*", around(follow=lambda a, m: follow(a[:-1], m[:-1]))),
]  # fmt: skip

# --- the two suites -----------------------------------------------------------------------------------------------

Test = Callable[[nn.Module, dict[str, Tensor]], object]


def suite_of_ours(s: Subject) -> dict[str, Test]:
    """Return what `checks.standard` runs, one by one; the checks of what is claimed; assertions on a run."""

    def asked(check: checks.Check, **options: Any) -> Test:
        def test(model: nn.Module, inputs: dict[str, Tensor]) -> None:
            found = check.outcome(ModelProbe(), model, kwargs=inputs, **options)
            assert found.verdict != "broken", found.text

        return test

    def averaged(model: nn.Module, inputs: dict[str, Tensor]) -> None:
        mean = copy.deepcopy(model)
        checks.ema_tracks(ModelProbe(), model, average=mean, decay=0.9, updates=lambda: s.follow(mean, model))

    def recorded(assertion: Callable[..., object]) -> Test:
        return lambda model, inputs: assertion(ModelProbe().run(model, loss=s.loss, kwargs=inputs))

    def frozen(model: nn.Module, inputs: dict[str, Tensor]) -> None:
        optimizer = s.optimizer(model.train())
        with ModelProbe() as probe:
            watch = probe.watch(model)
            s.step(s.loss(model(**inputs)), optimizer, 1, True)
            ours.assert_frozen(watch, layers=f"{s.frozen}.**")

    claimed = {
        "causal": [checks.causal],
        "padded": [checks.padding_invariant],
        "equivariant": [checks.permutation_equivariant],
        "invariant": [checks.permutation_invariant],
        "deployed": [checks.compile_parity, checks.export_parity],
    }
    tests = {name: asked(check, loss=s.loss) for name, check in checks.STANDARD.items()}
    tests |= {check.__name__: asked(check) for claim in s.claims for check in claimed.get(claim, [])}
    tests |= {
        "initialized": asked(checks.initialized, factory=s.make),
        "gradcheck": asked(checks.gradcheck),
        "optimizer_covers": lambda m, _: checks.optimizer_covers(ModelProbe(), m, optimizer=s.optimizer(m)),
        "ema_tracks": averaged,
    }
    of_a_run = ours.assert_finite, ours.assert_grad_finite, ours.assert_all_params_have_grad, ours.assert_no_dead_layers
    tests |= {assertion.__name__: recorded(assertion) for assertion in of_a_run}
    return tests | ({"assert_frozen": frozen} if s.frozen else {})


def suite_of_pytest_torch(s: Subject) -> dict[str, Test]:
    """Return all of it that fits. Tolerances of bfloat16 and learning rates are such that healthy models pass."""

    def setup() -> Any:
        model = s.make()
        return beside.TrainingSetup(model, s.optimizer(model))

    def make_step(parts: int) -> Callable[..., Tensor]:
        def one(setup: Any, batch: dict[str, Tensor]) -> Tensor:
            loss = s.loss(setup.model(**batch))
            s.step(loss, setup.optimizer, parts, (setup.step_index + 1) % parts == 0)
            return loss.detach()

        return one

    def contract(m: nn.Module, x: dict[str, Tensor]) -> None:
        beside.check_inference_contract(m.eval(), x, dtypes=(torch.float64, torch.bfloat16), dtype_atol=0.1)

    def later(x: dict[str, Tensor]) -> dict[str, Tensor]:
        ids = x["input_ids"]
        return {"input_ids": torch.where(torch.arange(LENGTH) < 3, ids, (ids + 1) % WORDS)}

    def causal(m: nn.Module, x: dict[str, Tensor]) -> None:
        beside.assert_invariant(lambda **batch: m.eval()(**batch)[:, :3], x, later, name="later words")

    def inferred(name: str, **options: Any) -> Test:
        return lambda m, x: getattr(beside, name)(m.eval(), x, **options)

    def trained(name: str, **options: Any) -> Test:
        return lambda m, x: getattr(beside, name)(m, x, s.loss, **options)

    def positional(name: str) -> Test:
        return lambda m, x: getattr(beside, name)(m.eval(), tuple(x.values()))

    def covered(m: nn.Module, x: dict[str, Tensor]) -> None:
        beside.assert_optimizer_coverage(m, s.optimizer(m), allow_frozen=bool(s.frozen))

    def healthy(m: nn.Module, x: dict[str, Tensor]) -> None:
        beside.run_training(setup, x, make_step(1)).assert_healthy(min_relative_decrease=0.1)

    tests: dict[str, Test] = {
        "check_inference_contract": contract,
        "assert_deterministic": inferred("assert_deterministic"),
        "assert_layout_invariant": inferred("assert_layout_invariant"),
        "assert_autocast_parity": inferred("assert_autocast_parity", atol=0.1),
        "assert_checkpoint_roundtrip": lambda m, x: beside.assert_checkpoint_roundtrip(s.make, x, model=m),
        "assert_gradients_finite": trained("assert_gradients_finite"),
        "assert_all_params_receive_grad": trained("assert_all_params_receive_grad"),
        "assert_loss_decreases": trained("assert_loss_decreases", lr=1e-2),
        "assert_overfits_one_batch": trained("assert_overfits_one_batch"),
        "assert_optimizer_coverage": covered,
        "run_training": healthy,
        "assert_resume_equivalent": lambda m, x: beside.assert_resume_equivalent(setup, x, make_step(1), load=s.load),
    }
    if "causal" in s.claims:
        tests["assert_invariant"] = causal
    if "padded" in s.claims:
        tests["assert_padding_invariant"] = inferred("assert_padding_invariant")
        tests["assert_mask_invariant"] = inferred("assert_mask_invariant", vocab_size=WORDS)
    for claim in {"equivariant", "invariant"} & {*s.claims}:
        tests[f"assert_permutation_{claim}"] = inferred(f"assert_permutation_{claim}")
        tests["assert_gradcheck"] = positional("assert_gradcheck")
    if "deployed" in s.claims:
        tests["assert_torchscript_parity"] = positional("assert_torchscript_parity")
        tests["assert_compile_parity"] = inferred("assert_compile_parity", backend="eager")
        for name in ("assert_export_parity", "assert_no_graph_breaks", "assert_no_recompiles"):
            tests[name] = inferred(name)
    if "added up" in s.claims:
        tests["assert_accumulation_equivalent"] = lambda m, x: beside.assert_accumulation_equivalent(
            setup, x, make_step
        )
    if s.frozen:
        tests["assert_frozen"] = trained("assert_frozen", params=f"{s.frozen}.*")
    return tests


SUITES = {"ours": suite_of_ours, "pytest-torch": suite_of_pytest_torch}

# --- running, and the page ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What one suite said of one model."""

    fault: Fault
    messages: dict[str, str]
    """Of each test that failed."""
    seconds: float
    known: set[str]
    """Names of layers, parameters and buffers."""

    def at_fault(self, word: str) -> bool:
        return any(fnmatch.fnmatchcase(word, glob) for glob in self.fault.where.split())

    def naming(self, test: str) -> str:
        """Return how a message names what is at fault: before other names, by a line of code, after others, or not."""
        words = (word.rstrip(".") for word in re.findall(r"[\w.\[\]]+", self.messages[test]))
        told = [self.at_fault(word) for word in words if word in self.known or self.at_fault(word)]
        if told[:1] == [True]:
            return "first"
        return "line" if f'{Path(__file__).name}", line' in self.messages[test] else "listed" if any(told) else "no"

    @property
    def best(self) -> tuple[str, str]:
        """Return how well the test that tells most names what is at fault, and which it is."""
        found = [(self.naming(test), test) for test in self.messages]
        return min(found, key=lambda one: ("first", "line", "listed", "no").index(one[0]), default=("no", ""))

    @property
    def cells(self) -> list[str]:
        seconds = f"{self.seconds:.1f}"
        if not self.messages:
            return ["**no**", "", "", seconds]
        named, test = self.best
        parts = re.findall(r"\[FAIL\] (\w+)", self.messages[test])
        by = f"`{test}`" + (f" ({', '.join(parts)})" if parts else "")
        more = f" and {len(self.messages) - 1} more" if len(self.messages) > 1 else ""
        return ["yes", named if self.fault.where else "–", by + more, seconds]


def result(fault: Fault, tool: str, alarms: Collection[str] = ()) -> Result:
    """Run one suite on one model; a test that fails of the healthy model too tells nothing."""
    subject = fault.plant(SUBJECTS[fault.subject])
    messages, began = {}, time.process_time()
    for name, test in SUITES[tool](subject).items():
        torch.manual_seed(0)
        model, inputs = subject.make(), subject.inputs()
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # torch.export prints the graph that it could not make
                test(model, inputs)
        except Exception as error:  # noqa: BLE001 - a test fails, however
            if name not in alarms:
                messages[name] = f"{type(error).__name__}: {error}"
    seconds = time.process_time() - began
    names = [*dict(model.named_modules()), *dict(model.named_parameters()), *dict(model.named_buffers())]
    return Result(fault, messages, seconds, {name for name in names if re.search(r"[.\d]", name)})


def table(*rows: Iterable[object]) -> list[str]:
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return [lines[0], "|" + "---|" * (lines[0].count(" | ") + 1), *lines[1:]]


def totals(found: list[Result], healthy: list[Result]) -> list[str]:
    named = [one.best[0] for one in found if one.fault.where]
    return [
        f"{sum(bool(one.messages) for one in found)} of {len(found)}",
        f"{named.count('first') + named.count('line')} of {len(named)}",
        f"{named.count('listed')} of {len(named)}",
        f"{sum(bool(one.messages) for one in healthy)} of {len(healthy)}",
        f"{statistics.median(one.seconds for one in found):.1f}",
    ]


def page(faulty: dict[str, list[Result]], healthy: dict[str, list[Result]]) -> str:
    """Return the document, of the results of each tool."""
    mine, theirs = faulty.values()
    titles = ["detected", "named first", "named after others", "healthy models with an alarm", "median seconds a model"]
    columns = [totals(faulty[tool], healthy[tool]) for tool in SUITES]
    pairs = [(bool(a.messages), bool(b.messages)) for a, b in zip(mine, theirs, strict=True)]
    asserted = sum(bool(one.messages) and all(name.startswith("assert_") for name in one.messages) for one in mine)
    alarms = [
        f"- {tool}, {one.fault.subject}: `{test}`: {message.partition(chr(10))[0]}"
        for tool, results in healthy.items()
        for one in results
        for test, message in one.messages.items()
    ]
    versions = ", ".join(f"{name} {version(name)}" for name in ("pytest-modelprobe", "pytest-torch", "torch"))
    machine = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    lines = [
        "# The checks beside the tests of pytest-torch",
        "",
        f"Command: `tox -e checks-beside`. {versions}. Machine: {machine}, no GPU used.",
        "",
        *table(["faults", *SUITES], *zip(titles, *columns, strict=True)),
        "",
        f"Both detect {pairs.count((True, True))}, ours alone {pairs.count((True, False))}, pytest-torch alone",
        f"{pairs.count((False, True))}, neither {pairs.count((False, False))}. Of those that ours detects, {asserted}",
        "show in an assertion on a run alone (`assert_...`), and in no check.",
        "",
        "*Named*: what is at fault, as a word of its own, is the *first* name of a layer or parameter in a message, or",
        "*listed* after others; that its *line* of code is told counts as much as the first name. *By*: the test that",
        (
            "tells most. *Seconds*: of one processor, for the whole suite. "
            "A fault of a loss or a training loop has no layer."
        ),
        "What `torch.empty` holds is chance: of a weight never initialized pytest-torch may see more or less.",
        "",
        *table(
            [
                "fault",
                "model",
                "at",
                *(f"{tool}: {what}" for tool in SUITES for what in ("detected", "named", "by", "seconds")),
            ],
            *(
                [a.fault.title, a.fault.subject, f"`{a.fault.where}`" if a.fault.where else "–", *a.cells, *b.cells]
                for a, b in zip(mine, theirs, strict=True)
            ),
        ),
        "",
        "## Alarms of healthy models",
        "",
        *(alarms or ["None."]),
        "",
    ]
    return "\n".join(lines)


def main(words: list[str]) -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    nothing = {name: Fault("nothing", name, "", lambda subject: subject) for name in SUBJECTS}
    healthy = {tool: [result(fault, tool) for fault in nothing.values()] for tool in SUITES}
    alarms = {(tool, one.fault.subject): one.messages for tool in SUITES for one in healthy[tool]}
    faulty: dict[str, list[Result]] = {tool: [] for tool in SUITES}
    for fault in FAULTS:
        if not words or any(word in fault.title for word in words):
            for tool in SUITES:
                faulty[tool].append(result(fault, tool, alarms[tool, fault.subject]))
            print(fault.title, file=sys.stderr, flush=True)
    text = page(faulty, healthy)
    print(text)
    if not words:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
