"""The same two models compared through a snapshot, side by side and beside a commit: the same causes, and the right one
first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, files
from pytest_modelprobe.comparison import Diagnosis, compare, diagnose
from pytest_modelprobe.comparison.text import first_line
from pytest_modelprobe.record import Record
from pytest_modelprobe.revisions import Recorder, judged, read_written

Test = Callable[[ModelProbe], Record]


def through_a_snapshot(new: Test, old: Test) -> Diagnosis:
    with ModelProbe(seed=0) as probe:
        written, actual = old(probe), new(probe)
        live, now = written.live_run, actual.live_run
        assert live is not None
        assert now is not None
        expected = files.decode(*files.encode(live.measured(live.isolated(written))), where="old").record
        found = compare(actual, expected)
        return diagnose(compare(now.isolated(actual, like=found.expected, names=found.names_before), expected))


def side_by_side(new: Test, old: Test) -> Diagnosis:
    with ModelProbe(seed=0) as probe:
        written, actual = old(probe), new(probe)
        live, now = written.live_run, actual.live_run
        assert live is not None
        assert now is not None
        expected = live.measured(live.isolated(written))
        found = compare(actual, expected)
        return diagnose(compare(now.isolated(actual, like=found.expected, names=found.names_before), expected))


def beside_a_commit(new: Test, old: Test, folder: Path) -> Diagnosis:
    here, there, again = folder / "here", folder / "there", folder / "again"
    for test, part, more in ((new, here, {}), (old, there, {"beside": here}), (new, again, {"like": there})):
        recorder = Recorder(part, **more)
        next(recorder.pytest_runtest_protocol(cast(pytest.Item, SimpleNamespace(nodeid="test"))))
        with ModelProbe(seed=0, recorder=recorder) as probe:
            test(probe)
    mine, theirs = (read_written(part)["test", "run 1"] for part in (again, there))
    return judged(mine, theirs).diagnosis


def causes(found: Diagnosis) -> list[tuple[object, ...]]:
    """Return all but the sizes, which a file rounds."""
    told = [("cause", cause) for cause in found.causes] + [("possible", cause) for cause in found.possible]
    return [(how, c.kind, c.layer, c.what, c.evidence, c.is_measured, c.effect, c.hints) for how, c in told]


def run(factory: Callable[[], nn.Module], *shape: int, ids: bool = False) -> Test:
    """Return a test that runs a model whose weights are drawn in the order in which its layers are made."""

    def test(probe: ModelProbe) -> Record:
        model = factory().eval()
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                times = getattr(parameter, "times", 0.5)
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * times)
        return probe.run(model, probe.randint(0, 20, shape) if ids else probe.randn(*shape), loss="random")

    return test


class Regrouped(nn.Module):
    """Norm and head in one container, or not."""

    def __init__(self, eps: float, *, grouped: bool) -> None:
        super().__init__()
        self.norm, self.mid = nn.LayerNorm(8, eps=eps), nn.Linear(8, 8)
        if grouped:
            self.head: nn.Module = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 5))
        else:
            self.head_norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)
        self._grouped = [grouped]

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.norm(x)).mean(1)
        return cast(Tensor, self.head(x) if self._grouped[0] else self.head(self.head_norm(x)))


class Unfolded(nn.Module):
    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.pattern = pattern

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (2, 4)).transpose(-1, -2).flatten(-2) if self.pattern == "c p" else x


class Trunk(nn.Module):
    def __init__(self, norm: nn.Module | None) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), norm

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x).relu()
        return x if self.norm is None else cast(Tensor, self.norm(x))


class Pooled(nn.Module):
    """The last norm stands before the pooling, in the trunk, or after it, in the head."""

    def __init__(self, pattern: str, *, inside: bool) -> None:
        super().__init__()
        self.embed, self.trunk = Unfolded(pattern), Trunk(nn.LayerNorm(8) if inside else None)
        self.head = nn.Linear(8, 5) if inside else nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.trunk(self.embed(x)).mean(1)))


class Mixer(nn.Module):
    """Calls its convolution, or uses the weight of it."""

    def __init__(self, *, calls: bool) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 8)
        self._calls = [calls]

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        same = nn.functional.conv1d(x, self.conv.weight, self.conv.bias, padding=1)
        x = self.conv(x) if self._calls[0] else same
        return cast(Tensor, self.out(x.transpose(1, 2).relu()))


def with_weights(module: nn.Module, times: float, name: str) -> nn.Module:
    """Return a module of which one weight is another."""
    module.get_parameter(name).times = times  # type: ignore[attr-defined]
    return module


class Mixed(nn.Module):
    def __init__(self, *, calls: bool) -> None:
        super().__init__()
        self.emb, self.mixer = nn.Embedding(20, 8), Mixer(calls=calls)

    def forward(self, ids: Tensor) -> Tensor:
        return cast(Tensor, self.mixer(self.emb(ids)))


class Attention(nn.Module):
    """Takes whatever it is given, and uses the mask alone."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor, **unused: Any) -> Tensor:
        scores = (self.q(x) @ x.transpose(1, 2)).masked_fill(~mask, -1e9)
        return cast(Tensor, self.proj(scores.softmax(-1) @ x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(8), Attention()

    def forward(self, x: Tensor, *rest: Tensor, **given: Any) -> Tensor:
        return x + cast(Tensor, self.attn(self.norm(x), rest[-1], **given))


class Handing(nn.Module):
    """Hands positions to its block by position, or by a name that nobody knows."""

    def __init__(self, *, named: bool) -> None:
        super().__init__()
        self.emb, self.block, self.head = nn.Embedding(20, 8), Block(), nn.Linear(8, 5)
        self._named = [named]

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        x, mask = self.emb(ids), torch.ones(len(places), len(places), dtype=torch.bool).tril()
        x = self.block(x, mask, positions=places) if self._named[0] else self.block(x, places, mask)
        return cast(Tensor, self.head(x))


class Attend(nn.Module):
    def __init__(self, most: int | None) -> None:
        super().__init__()
        self.causal, self.drop = True, nn.Dropout(0.0)
        self._most = [most]

    def forward(self, x: Tensor, causal: bool | None = None) -> Tensor:
        scores, (most,) = x @ x.transpose(1, 2), self._most
        if self.causal if causal is None else causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -1e9)
        if most is not None:
            scores = scores.masked_fill(scores < scores.topk(most, -1).values[..., -1:], -1e9)
        return cast(Tensor, self.drop(scores.softmax(-1)) @ x)


class Rotary(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", 100.0 ** -(torch.arange(0, width, 2).float() / width))

    def forward(self, positions: Tensor) -> Tensor:
        return torch.outer(positions.float(), cast(Tensor, self.frequencies)).cos()


class Layers(nn.Module):
    """Gives its child the argument that the child would take by itself, or none."""

    def __init__(self, most: int | None, width: int, *, explicit: bool) -> None:
        super().__init__()
        self.fc, self.rotary, self.attend = nn.Linear(8, 8), Rotary(width), Attend(most)
        self._explicit = [explicit]

    def forward(self, x: Tensor, offset: int | None = None) -> Tensor:
        turned = self.rotary(torch.arange(x.shape[1]) + (offset or 0))
        x = self.fc(x)
        x = torch.cat((x[..., : turned.shape[-1]] * turned, x[..., turned.shape[-1] :]), -1)
        return cast(Tensor, self.attend(x, causal=True) if self._explicit[0] else self.attend(x))


class Explicit(nn.Module):
    def __init__(self, most: int | None = None, width: int = 8, *, explicit: bool) -> None:
        super().__init__()
        self.layers, self.head = Layers(most, width, explicit=explicit), nn.Linear(8, 5)
        self._explicit = [explicit]

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.layers(x, offset=0) if self._explicit[0] else self.layers(x)))


class Small(nn.Module):
    """A model of which each test changes one thing."""

    def __init__(self, act: nn.Module, how: Callable[[Any, Tensor], Tensor] = lambda self, x: x, **more: Any) -> None:
        super().__init__()
        self.norm, self.fc, self.act = nn.LayerNorm(8, eps=more.get("eps", 1e-5)), nn.Linear(8, 8), act
        self.register_buffer("scale", torch.tensor(more.get("scale", 1.5)))
        self._how = [how]

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self._how[0](self, self.act(self.fc(self.norm(x))) * self.scale))


def small(*of: Any, **more: Any) -> Test:
    return run(lambda: Small(*(of or (nn.ReLU(),)), **more), 2, 6, 8)


SMALL = small()
PAIRS: dict[str, tuple[Test, Test, str]] = {
    # A container that came apart has no size of its own: x-transformers and vit-pytorch write heads so.
    "a head that came apart": (
        run(lambda: Regrouped(1e-5, grouped=True), 2, 6, 8),
        run(lambda: Regrouped(0.3, grouped=False), 2, 6, 8),
        "norm.eps 1e-05 → 0.3: its output changed by ",
    ),
    "a norm before the pooling": (
        run(lambda: Pooled("p c", inside=False), 2, 6, 8),
        run(lambda: Pooled("c p", inside=True), 2, 6, 8),
        "embed.pattern p c → c p: its output changed by ",
    ),
    # A child that is used only through its weight, as by the fused kernels of Mamba.
    "a child whose weight is used": (
        run(lambda: with_weights(Mixed(calls=True), 1.0, "emb.weight"), 2, 7, ids=True),
        run(lambda: with_weights(Mixed(calls=False), 3.0, "emb.weight"), 2, 7, ids=True),
        "emb: weights changed by ",
    ),
    # An argument that nobody uses, as transformers hands `position_ids` to the blocks of GPT-2.
    "an argument that nobody uses": (
        run(lambda: with_weights(Handing(named=False), 1.0, "block.attn.proj.weight"), 2, 7, ids=True),
        run(lambda: with_weights(Handing(named=True), 3.0, "block.attn.proj.weight"), 2, 7, ids=True),
        "block.attn.proj: weights changed by ",
    ),
    # An argument that is the child's default, as x-transformers gives `causal` and `seq_pos_offset`.
    "a default beside other code": (
        run(lambda: Explicit(2, explicit=False), 2, 7, 8),
        run(lambda: Explicit(explicit=True), 2, 7, 8),
        "layers.attend: own code changed before drop: by ",
    ),
    "a default beside another buffer": (
        run(lambda: Explicit(width=16, explicit=False), 2, 7, 8),
        run(lambda: Explicit(width=8, explicit=True), 2, 7, 8),
        "layers.rotary.frequencies (8,) → (4,): its output has another shape; ",
    ),
    "a call more": (SMALL, small(nn.ReLU(), lambda self, x: self.fc(x)), "(root): own code calls fc 2 times, not 1"),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_of_models_has_the_same_causes_however_it_is_compared(pair: str, tmp_path: Path) -> None:
    old, new, line = PAIRS[pair]
    found = through_a_snapshot(new, old)
    assert first_line(found).startswith(line)
    assert causes(side_by_side(new, old)) == causes(found)
    assert causes(beside_a_commit(new, old, tmp_path)) == causes(found)


@pytest.mark.parametrize(
    "pair", ["a head that came apart", "a norm before the pooling", "a child whose weight is used"]
)
def test_what_the_model_s_output_changed_by_is_not_said_of_a_cause_without_a_size(pair: str) -> None:
    old, new, _ = PAIRS[pair]
    found = through_a_snapshot(new, old)
    sizes = [cause.is_measured for cause in found.causes]
    assert sizes == sorted(sizes, reverse=True)
    assert not all(sizes)
    assert "the model's output" not in first_line(found)
