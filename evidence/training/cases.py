"""Errors of training that raise nothing, each as a program with it and without it.

A case is a function of a run and of ``faulty``, on which one line depends. Identifiers are those of TrainCheck's list,
of TTrace's, or of the public issue.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from programs import (
    LENGTH,
    STEPS,
    WIDTH,
    WORDS,
    Attention,
    Decoder,
    Digits,
    Embedding,
    Routed,
    Run,
    average,
    by_document,
    evaluate,
    loss_of,
    sgd,
    step,
    train,
)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Adam
from torch.utils.checkpoint import checkpoint

import pytest_modelprobe as ours
from pytest_modelprobe import checks

By = Callable[[Run], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    id: str
    source: str
    kind: str
    what: str
    at: str
    """Expression for the layer or parameter at fault; or for what a message has to say, where it is none."""
    program: Callable[[Run, bool], None]
    by: By | None = None
    """The check or assertion made for it."""
    ranks: int = 1


CASES: list[Case] = []


def case(source: str, identifier: str, kind: str, what: str, at: str, by: By | None = None, ranks: int = 1) -> Any:
    def add(program: Callable[[Run, bool], None]) -> Callable[[Run, bool], None]:
        CASES.append(
            Case(source=source, id=identifier, kind=kind, what=what, at=at, by=by, ranks=ranks, program=program)
        )
        return program

    return add


def in_step(assertion: Callable[..., object], *args: Any, **options: Any) -> By:
    """Return the assertion on the first step."""
    return lambda run: assertion(run.watch.first_step, *args, **options)


def in_all(assertion: Callable[..., object], *args: Any, **options: Any) -> By:
    return lambda run: assertion(run.watch, *args, **options)


def checked(check: Any, **options: Any) -> By:
    return lambda run: check(run.probe, run.model, run.inputs, **options)


def merged(run: Run) -> None:
    for record in run.watch.steps:
        run.probe.merged(record)


# --- the loop and the optimizer -----------------------------------------------------------------------------------


@case(
    "TrainCheck",
    "stackoverflow-60335387",
    "loop",
    "`zero_grad` is missing",
    "gradients are never reset",
    in_all(ours.assert_training_loop),
)
def zero_grad_missing(run: Run, faulty: bool) -> None:
    model = run.watched(Digits, run.digits()[0][0])
    optimizer = sgd(model)
    for x, y in run.digits():
        if not faulty:
            optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


class Traced(SGD):
    """Steps as its first call did: compiled when some gradients were None."""

    __qualname__ = "SGD"
    traced: Any = None

    def step(self, closure: Any = None) -> None:
        with_gradient = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        self.traced = self.traced or with_gradient
        for p in set(with_gradient).difference(self.traced):
            p.grad = None
        super().step(closure)


@case(
    "TrainCheck",
    "pytorch-115607",
    "compiler",
    "a compiled step keeps to the parameters that had gradients at first",
    r"conv1|bn1|fc1|ln1",
    in_all(ours.assert_params_updated),
)
def traced_without_gradients(run: Run, faulty: bool) -> None:
    model = run.watched(Digits, run.digits()[0][0])
    optimizer = Traced(model.parameters(), 0.05) if faulty else sgd(model)
    for number, (x, y) in enumerate(run.digits()):
        model.requires_grad_(number > 0).head1.requires_grad_(True)
        step(model, optimizer, x, y)


class AdamInPlace(Adam):
    """In-place operations do nothing to what is not contiguous."""

    __qualname__ = "Adam"

    def step(self, closure: Any = None) -> None:
        kept = [(p, p.clone()) for p in self.param_groups[0]["params"] if not p.is_contiguous()]
        super().step(closure)
        for p, values in kept:
            p.data.copy_(values)


@case(
    "TrainCheck",
    "mps-addcmul",
    "optimizer",
    "in-place operations skip a weight that is not contiguous",
    r"fc1\.weight",
    in_all(ours.assert_params_updated),
)
def not_contiguous(run: Run, faulty: bool) -> None:
    def make() -> nn.Module:
        model = Digits()
        model.fc1.weight = nn.Parameter(model.fc1.weight.detach().t().contiguous().t())
        return model

    model = run.watched(make, run.digits()[0][0])
    train(run, model, (AdamInPlace if faulty else Adam)(model.parameters(), 1e-3))


@case(
    "TTrace",
    "ZeRO, untied",
    "optimizer",
    "the optimizer leaves out the head, taken for tied to the embedding",
    "head1",
    lambda run: checks.optimizer_covers(run.probe, run.model, optimizer=run.optimizer),
)
def head_taken_for_tied(run: Run, faulty: bool) -> None:
    model = run.watched(Decoder, run.texts()[0][0])
    run.optimizer = SGD([p for n, p in model.named_parameters() if not (faulty and "head1" in n)], 0.05)
    train(run, model, run.optimizer)


@case("issue", "accelerate-4283", "resume", "Adam's moments are lost at a resume", "moment|update|optimizer|Adam")
def moments_lost(run: Run, faulty: bool) -> None:
    model = run.watched(Digits, run.digits()[0][0])
    run.watch.close()
    first, second = Adam(model.parameters(), 1e-3), Adam(model.parameters(), 1e-3)
    train(run, model, first)
    if not faulty:
        second.load_state_dict(copy.deepcopy(first.state_dict()))
    run.watch = run.probe.watch(model, steps=STEPS)
    train(run, model, second)


@case(
    "issue",
    "transformers-34191",
    "loss",
    "accumulated: each microbatch's own mean, not that of all tokens",
    "loss|gradient",
    None,
)
def mean_of_means(run: Run, faulty: bool) -> None:
    model = run.watched(Decoder, run.texts()[0][0])
    optimizer = sgd(model)
    for x, y in run.texts():
        optimizer.zero_grad()
        parts = [(x[:8], y[:8]), (x[8:, :4], y[8:, :4])]
        total = sum(targets.numel() for _, targets in parts)
        for ids, targets in parts:
            (loss_of(model(ids), targets) * (0.5 if faulty else targets.numel() / total)).backward()
        optimizer.step()


# --- what is trained, and how it begins ---------------------------------------------------------------------------


@case(
    "TrainCheck",
    "pytorch-forum-84911",
    "fine-tuning",
    "all but the norms is frozen, the new head too",
    "head1",
    lambda run: ours.assert_param_count(run.model.head1, 330, trainable=True),
)
def head_frozen(run: Run, faulty: bool) -> None:
    def make() -> nn.Module:
        model = Digits().requires_grad_(False)
        for layer in (model.bn1, model.ln1) if faulty else (model.bn1, model.ln1, model.head1):
            layer.requires_grad_(True)
        return model

    model = run.watched(make, run.digits()[0][0])
    train(run, model, sgd(model))


class FreezesInTrain(Digits):
    def train(self, mode: bool = True) -> FreezesInTrain:
        self.conv1.requires_grad_(False)
        return super().train(mode)


@case(
    "TrainCheck",
    "mmpretrain-702",
    "set-up",
    "a stage is frozen in `train()`, which nobody calls",
    "conv1",
    in_all(ours.assert_frozen, layers="conv1"),
)
def never_frozen(run: Run, faulty: bool) -> None:
    model = run.watched(FreezesInTrain, run.digits()[0][0], wrap=None if faulty else lambda model: model.train())
    train(run, model, sgd(model))


@case(
    "TrainCheck", "pytorch-51800", "initialization", "`spectral_norm` is evaluated before it ever iterated", "fc1", None
)
def spectral_norm_too_early(run: Run, faulty: bool) -> None:
    def make() -> nn.Module:
        model = Digits()
        nn.utils.spectral_norm(model.fc1)
        with torch.no_grad():
            for _ in range(0 if faulty else 15):
                model.fc1(torch.ones(1, 288))
        return model

    model = run.watched(make, run.digits()[0][0])
    evaluate(model, run.inputs)
    train(run, model.train(), sgd(model))


@case(
    "TrainCheck",
    "transformers-17877",
    "initialization",
    "the residual projections are scaled once for each parent",
    r"blocks\.[\d*]\.attn\.out",
)
def scaled_twice(run: Run, faulty: bool) -> None:
    def make() -> nn.Module:
        model = Decoder()
        for block in [*model.blocks, *(model.blocks if faulty else ())]:
            block.attn.out.weight.data /= 6**0.5
        return model

    model = run.watched(make, run.texts()[0][0])
    train(run, model, sgd(model))


@case(
    "TrainCheck",
    "fla-739",
    "initialization",
    "an initialization skips a weight of another type of tensor",
    r"blocks\.1\.fc1",
)
def not_initialized(run: Run, faulty: bool) -> None:
    def make() -> nn.Module:
        model = Decoder()
        for name, parameter in model.named_parameters():
            drawn = 0.02 * torch.randn(parameter.shape)
            if parameter.dim() > 1 and not (faulty and name == "blocks.1.fc1.weight"):
                parameter.data.copy_(drawn)
        return model

    model = run.watched(make, run.texts()[0][0])
    train(run, model, sgd(model))


@case(
    "TrainCheck",
    "deepspeed-5489",
    "resume",
    "a checkpoint lacks what is frozen, and loading does not mind",
    "conv1",
)
def checkpoint_without_frozen(run: Run, faulty: bool) -> None:
    torch.manual_seed(100 + run.seed)
    trained, file = Digits(), io.BytesIO()
    trained.conv1.requires_grad_(False)
    frozen = {name for name, p in trained.named_parameters() if not p.requires_grad}
    torch.save({k: v for k, v in trained.state_dict().items() if not (faulty and k in frozen)}, file)

    def make() -> nn.Module:
        model = Digits()
        file.seek(0)
        model.load_state_dict(torch.load(file), strict=False)
        model.conv1.requires_grad_(False)
        return model

    model = run.watched(make, run.digits()[0][0])
    train(run, model, sgd(model))


# --- data and generation ------------------------------------------------------------------------------------------


@case("TrainCheck", "stackoverflow-67180955", "data", "two workers of a loader draw with one seed", "input|given|data")
def workers_of_one_seed(run: Run, faulty: bool) -> None:
    images = run.digits()[0][0]
    model = run.watched(Digits, images)
    optimizer = sgd(model)
    workers = [torch.Generator().manual_seed(run.seed + (0 if faulty else number)) for number in range(2)]
    for number in range(STEPS):  # batches come from the workers in turn
        rows = torch.randint(len(images), (16,), generator=workers[number % 2])
        step(model, optimizer, images[rows], run.digits()[0][1][rows])


@case(
    "TrainCheck",
    "transformers-34204",
    "data",
    "a list of images becomes a batch of one",
    "conv1|input|shape|batch",
    in_step(ours.assert_shapes, {"head1": "16 10"}),
)
def merged_images(run: Run, faulty: bool) -> None:
    model = run.watched(Digits, run.digits()[0][0])
    optimizer = sgd(model)
    for x, y in run.digits():
        rows = slice(1 if faulty else None)
        step(model, optimizer, x[rows], y[rows])


@case(
    "TrainCheck",
    "transformers-23723",
    "generation",
    "the length limit is computed before the prompt is trimmed",
    "forward|call",
)
def limit_before_trimming(run: Run, faulty: bool) -> None:
    prompt, longest = run.texts()[0][0], 10
    model = run.watched(Decoder, prompt).eval()
    ids = prompt[:, -4:]
    new = longest - (prompt if faulty else ids).shape[1]
    for _ in range(new):
        ids = torch.cat([ids, model(ids[:, -LENGTH:])[:, -1:].argmax(-1)], 1)


# --- code of layers -----------------------------------------------------------------------------------------------


def always_dropping(layer: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    with torch.no_grad():
        mode, layer.training = layer.training, True
    out = by_document(layer, q, k, v, documents)
    layer.training = mode
    return out


@case(
    "TrainCheck",
    "transformers-33844",
    "attention",
    "attention drops out in evaluation",
    r"blocks\.1\.attn",
    checked(checks.eval_stable),
)
def dropout_in_evaluation(run: Run, faulty: bool) -> None:
    model = run.watched(with_code("blocks.1.attn", "attend", always_dropping, faulty), run.texts()[0][0])
    train(run, model, sgd(model))
    evaluate(model, run.inputs)


def with_code(path: str, name: str, function: Callable[..., Tensor], faulty: bool) -> Callable[[], nn.Module]:
    """Return what makes a decoder, in which a layer has another function where the run is faulty."""

    def make() -> nn.Module:
        model = Decoder()
        if faulty:
            setattr(model.get_submodule(path), name, function)
        return model

    return make


def across_documents(layer: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    return by_document(layer, q, k, v, torch.zeros_like(documents))


def documents_apart(run: Run) -> None:
    documents = (run.texts()[0][0] == 0).cumsum(1)
    ours.assert_attention_mask(
        run.watch.first_step, documents[:, :, None] == documents[:, None], causal=True, layers="blocks.1.attn"
    )


@case("issue", "nanoVLM-201", "attention", "packed documents attend to each other", r"blocks\.1\.attn", documents_apart)
def packed_without_mask(run: Run, faulty: bool) -> None:
    make = with_code("blocks.1.attn", "attend", across_documents, faulty)
    model = run.watched(make, run.texts()[0][0], attention=True)
    train(run, model, sgd(model))


def without_autocast(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.linear(x.to(weight.dtype), weight, bias)


@case(
    "TrainCheck",
    "lightning-thunder-725",
    "compiler",
    "autocast does not reach one operation",
    r"blocks\.1\.fc1",
    in_all(ours.assert_dtypes, torch.bfloat16, layers="blocks.*.fc1"),
)
def autocast_not_applied(run: Run, faulty: bool) -> None:
    model = run.watched(with_code("blocks.1.fc1", "code", without_autocast, faulty), run.texts()[0][0])
    optimizer = sgd(model)
    for x, y in run.texts():
        with torch.autocast("cpu", torch.bfloat16):
            step(model, optimizer, x, y)


def fp8(x: Tensor, weight: Tensor, bias: Tensor, scaled: bool = True) -> Tensor:
    scale = 448 / weight.abs().max() if scaled else torch.tensor(1.0)
    cast = (weight * scale).to(torch.float8_e4m3fn).to(weight.dtype) / scale
    return F.linear(x, weight + (cast - weight).detach(), bias)


def fp8_without_scale(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return fp8(x, weight, bias, scaled=False)


@case("TTrace", "FP8 cast", "precision", "a weight is cast to FP8 without its scale", r"blocks\.1\.fc1")
def fp8_unscaled(run: Run, faulty: bool) -> None:
    def make() -> nn.Module:
        model = Decoder()
        for block in model.blocks:
            block.fc1.code = fp8
        if faulty:
            model.blocks[1].fc1.code = fp8_without_scale
        return model

    model = run.watched(make, run.texts()[0][0])
    train(run, model, sgd(model))


def twice_and_never(blocks: Any) -> list[nn.Module]:
    return [blocks[0], blocks[1], blocks[1]]


@case(
    "TTrace",
    "pipeline split",
    "pipeline",
    "a block is in two stages, and another in none",
    r"blocks\.[12]",
    in_step(ours.assert_called, "blocks.*", per_forward=1),
)
def wrong_split(run: Run, faulty: bool) -> None:
    model = run.watched(with_code("", "split", twice_and_never, faulty), run.texts()[0][0])
    optimizer = sgd(model)
    train(run, model, optimizer)


def recomputed(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=False)


def recomputed_otherwise(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)


@case(
    "TTrace",
    "recomputation",
    "recomputation",
    "a checkpointed part is computed again with another dropout mask",
    r"blocks\.1",
    checked(checks.checkpoint_parity),
)
def recomputed_with_others(run: Run, faulty: bool) -> None:
    def make() -> nn.Module:
        model = Decoder()
        model.blocks[1].call = recomputed_otherwise if faulty else recomputed
        return model

    model = run.watched(make, run.texts()[0][0])
    train(run, model, sgd(model))


# --- two ranks ----------------------------------------------------------------------------------------------------

UNREDUCED = "gradients? .*reduced|gradients? of|not .*reduced|disagree"


@case(
    "TrainCheck",
    "deepspeed-1801",
    "ranks",
    "one rank alone clips the gradients of replicated norms",
    "ln1",
    merged,
    ranks=2,
)
def clipped_on_one_rank(run: Run, faulty: bool) -> None:
    model = run.watched(Digits, run.digits()[0][0])

    def between() -> None:
        average(model)
        if not (faulty and run.rank):
            nn.utils.clip_grad_norm_(model.ln1.parameters(), 1e-3)

    train(run, model, sgd(model), between)


@case("TrainCheck", "x-jxmnop", "ranks", "the raw module is called in place of its wrapper", UNREDUCED, merged, ranks=2)
def wrapper_not_called(run: Run, faulty: bool) -> None:
    wrapped = run.watched(Digits, run.digits()[0][0], wrap=DDP)
    train(run, wrapped.module if faulty else wrapped, sgd(wrapped))


@case(
    "TrainCheck", "pytorch-104336", "ranks", "a wrapper that was moved reduces no gradients", UNREDUCED, merged, ranks=2
)
def wrapper_moved(run: Run, faulty: bool) -> None:
    wrapped = run.watched(Digits, run.digits()[0][0], wrap=DDP)
    wrapped.require_backward_grad_sync = not faulty
    train(run, wrapped, sgd(wrapped))


@case(
    "TrainCheck",
    "pytorch-84803, -96600, baichuan2-86",
    "hardware",
    "copies between devices lose 1 % of a gradient",
    r"fc1\.weight",
    merged,
    ranks=2,
)
def copies_that_lose(run: Run, faulty: bool) -> None:
    model = run.watched(Digits, run.digits()[0][0])

    def lose(gradient: Tensor, own: Tensor) -> None:
        if faulty and run.rank:
            gradient.flatten()[: gradient.numel() // 100] = 0

    train(run, model, sgd(model), lambda: average(model, "fc1.weight", lose))


@case(
    "TrainCheck",
    "accelerate-2665, -3256",
    "ranks",
    "the optimizer is made before FSDP2 wraps the model",
    "another copy|update",
    in_all(ours.assert_training_loop),
    ranks=2,
)
def optimizer_before_wrapping(run: Run, faulty: bool) -> None:
    early: list[Any] = []

    def wrap(model: Any) -> Any:
        early.append(sgd(model))
        return fully_shard(model)

    model = run.watched(Digits, run.digits()[0][0], wrap=wrap)
    train(run, model, early[0] if faulty else sgd(model))


@case(
    "TTrace",
    "loss scale under DP",
    "ranks",
    "the loss is divided by the number of ranks, and averaged besides",
    "loss|gradient",
    ranks=2,
)
def divided_twice(run: Run, faulty: bool) -> None:
    wrapped = run.watched(Digits, run.digits()[0][0], wrap=DDP)
    optimizer = sgd(wrapped)
    for x, y in run.digits():
        optimizer.zero_grad()
        (loss_of(wrapped(x), y) / (run.ranks if faulty else 1)).backward()
        optimizer.step()


def keep_own(gradient: Tensor, own: Tensor) -> None:
    gradient.copy_(own)


@case("TTrace", "router under SP", "ranks", "the gradients of a router are not reduced", "router1", merged, ranks=2)
def router_not_reduced(run: Run, faulty: bool) -> None:
    model = run.watched(Routed, run.digits()[0][0])
    train(run, model, sgd(model), lambda: average(model, "router1", keep_own if faulty else None))


@case(
    "TTrace",
    "LayerNorm under SP",
    "ranks",
    "the gradients of a norm are not reduced",
    r"blocks\.1\.norm1",
    merged,
    ranks=2,
)
def norm_not_reduced(run: Run, faulty: bool) -> None:
    model = run.watched(Decoder, run.texts()[0][0])
    train(run, model, sgd(model), lambda: average(model, "blocks.1.norm1", keep_own if faulty else None))


@case(
    "TTrace",
    "overlapped reduction",
    "ranks",
    "a gradient is reduced before the last microbatch is added",
    "fc1",
    merged,
    ranks=2,
)
def reduced_too_early(run: Run, faulty: bool) -> None:
    model = run.watched(Digits, run.digits()[0][0])
    optimizer = sgd(model)
    for x, y in run.digits():
        optimizer.zero_grad()
        for part in range(2):
            (loss_of(model(x[part::2]), y[part::2]) / 2).backward()
            if part == 0:
                early = model.fc1.weight.grad.clone()
        average(model)
        if faulty:
            dist.all_reduce(early)
            model.fc1.weight.grad = early / run.ranks
        optimizer.step()


def of_shard(ids: Tensor, weight: Tensor, masked: bool = True) -> Tensor:
    """Look up the ids of this rank's part of the vocabulary; the others are 0, and come from the other ranks."""
    half = (WORDS + 1) // 2
    mine = ids // half == dist.get_rank()
    found = F.embedding(ids.clamp_max(WORDS - 1) if not masked else ids, weight)
    found = found * mine[..., None] if masked else torch.where(mine[..., None], found, weight[:1])
    return AllReduce.apply(found)


def of_shard_unmasked(ids: Tensor, weight: Tensor) -> Tensor:
    return of_shard(ids, weight, masked=False)


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@case(
    "TTrace",
    "embedding mask under TP",
    "ranks",
    "ids of another rank's part of the vocabulary are not masked",
    "embed1",
    ranks=2,
)
def embedding_not_masked(run: Run, faulty: bool) -> None:
    def make() -> nn.Module:
        model = Decoder()
        model.embed1.code = of_shard_unmasked if faulty else of_shard
        return model

    whole = Run(run.seed).texts()
    model = run.watched(make, whole[0][0], standard=False)
    optimizer = sgd(model)
    for x, y in whole:
        step(model, optimizer, x, y)


class Gather(torch.autograd.Function):
    """Put together the positions of all ranks; each has its part of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reduced: bool) -> Tensor:
        ctx.reduced, parts = reduced, [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        if ctx.reduced:
            dist.all_reduce(gradient)
        return gradient.chunk(2, 2)[dist.get_rank()], None


def in_context(layer: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, reduced: bool = True) -> Tensor:
    k, v = Gather.apply(k, reduced), Gather.apply(v, reduced)
    return F.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1) @ v


def in_context_unreduced(layer: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    return in_context(layer, q, k, v, documents, reduced=False)


class Context(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed1, self.attn1, self.head1 = Embedding(WORDS, WIDTH), Attention(), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head1(self.attn1(self.embed1(ids), ids))


@case(
    "TTrace",
    "attention under CP",
    "ranks",
    "the gradients of gathered keys and values are not added up",
    r"attn1",
    merged,
    ranks=2,
)
def context_gradient(run: Run, faulty: bool) -> None:
    def make() -> nn.Module:
        model = Context()
        model.attn1.attend = in_context_unreduced if faulty else in_context
        return model

    parts = [[part.chunk(2, 1)[run.rank] for part in batch] for batch in Run(run.seed).texts()]
    model = run.watched(make, parts[0][0], standard=False)
    optimizer = sgd(model)
    for x, y in parts:
        step(model, optimizer, x, y, lambda: average(model))
