"""Noise: what harmless changes do to each number of a run, and what cannot be repeated at all."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetModel

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.comparison import compare
from pytest_modelprobe.record import Call, Layer, Reading, Record, Statistics, Value
from pytest_modelprobe.runs import run
from pytest_modelprobe.runs.isolation import TracedCalls
from pytest_modelprobe.runs.noise import (
    perturbed,
    readings,
    relative_change,
    with_noise,
)


@pytest.fixture
def probe() -> Iterator[ModelProbe]:
    with ModelProbe() as probe:
        yield probe


def measured(record: Record) -> Record:
    assert record.live_run is not None
    return record.live_run.measured(record, record)


def test_the_noise_of_equal_responses_is_measured_once(probe: ModelProbe, monkeypatch: pytest.MonkeyPatch) -> None:
    model = probe.build(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3))))
    record = probe.run(model, probe.randn(8, 4), loss="random")
    called: list[Any] = []
    original = TracedCalls.__call__

    def noted(self: TracedCalls, perturb: Any = None, of: Any = "all", only: Any = None) -> Any:
        if perturb is not None:
            called.append({layer for layer, _ in only})
        return original(self, perturb, of, only)

    monkeypatch.setattr(TracedCalls, "__call__", noted)
    found = measured(record)
    # The second norm gets smaller numbers than the first, and the third such as the second. The noise of linear layers
    # and of containers that compute nothing is known.
    assert set(map(frozenset, called)) <= {frozenset({"0.1", "1.1"}), frozenset()}
    assert called[0] == {"0.1", "1.1"}
    second, third = (found[name].calls[0].response for name in ("1.1", "2.1"))
    assert second == third
    assert second is not None
    assert [handed.reading.noise for handed in second.handed if handed.reading]


def test_responses_stay_if_their_noise_cannot_be_measured(probe: ModelProbe, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TracedCalls.__call__

    def failing(self: TracedCalls, perturb: Any = None, of: Any = "all", only: Any = None) -> Any:
        if perturb is not None:
            raise RuntimeError("no memory")
        return original(self, perturb, of, only)

    model = probe.build(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    monkeypatch.setattr(TracedCalls, "__call__", failing)
    record = measured(probe.run(model, probe.randn(8, 4), loss="random"))
    assert record.notes == ("no noise was measured: a repeat raised RuntimeError: no memory",)
    assert all(call.response is not None for _, call in record.calls)


def test_a_run_is_repeated_until_its_noise_is_bounded(probe: ModelProbe, monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[Any] = []
    original = run.Run._repeated

    def counted(self: Any, move: Any = None, **more: Any) -> Any:
        moves.append("again" if move is None else "far" if move.far else "near")
        return original(self, move, **more)

    monkeypatch.setattr(run.Run, "_repeated", counted)
    x = probe.randn(32, 64)
    model = probe.build(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU()))
    smooth = measured(probe.run(model, x, loss="random"))
    assert moves == ["again", "near", "far", "far"]
    with torch.no_grad():
        model[0].bias -= model[0](x)[0]  # gates of which a repeat opens half
    moves.clear()
    gated = measured(probe.run(model, x, loss="random"))
    assert moves == ["again", "near", "far", "far"]
    readings = [next(found["0"].outputs)[1].backward for found in (smooth, gated)]
    noise = [0.0 if reading is None else reading.noise or 0.0 for reading in readings]
    assert noise[0] < 1e-4 < noise[1]


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), scale))

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.scale


class WritesToChild(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scaled, self.norm = Scaled(scale), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> Any:
        self.scaled.get_buffer("scale").add_(1)
        return self.norm(self.scaled(x))


def test_what_a_layer_writes_to_a_buffer_inside_is_no_noise_of_the_layer_there(probe: ModelProbe) -> None:
    model = nn.Sequential(*(WritesToChild(i + 2.0) for i in range(4)))
    record = probe.run(model, probe.randn(2, 4))
    record = measured(record)
    for i in range(4):
        response = record[f"{i}.scaled"].calls[0].response
        assert response is not None
        (output,) = response.handed
        assert output.reading is not None
        assert output.reading.noise is not None
        assert output.reading.noise < 1e-6


# --- moving numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_each_element_moves_by_one_unit_in_the_last_place(dtype: torch.dtype) -> None:
    x = torch.linspace(-2, 2, 64).to(dtype)[:, None].expand(64, 2)[:63]
    change = (perturbed(x, "x", 1).to(torch.complex128) - x.to(torch.complex128)).abs()
    units = change / x.to(torch.complex128).abs() / torch.finfo(dtype).eps
    assert units.min() > 0.4
    assert units.max() <= 1.0


def test_no_element_is_moved_to_what_is_no_number() -> None:
    largest = torch.finfo(torch.float32).max
    for odd in ([torch.inf, -torch.inf, largest, -largest], [largest, -largest], [-largest], [torch.nan]):
        x = torch.tensor([*odd, 1.0]).repeat(20)
        for i in range(4):
            moved = perturbed(x, f"x {i}", 84)
            assert torch.equal(moved.isfinite(), x.isfinite())
            assert torch.equal(moved.isinf(), x.isinf())
            assert (moved[x == 1] != 1).all()


# --- what is measured ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    torch.backends.mkldnn.set_flags(False)
    yield
    torch.backends.mkldnn.set_flags(True)


@contextlib.contextmanager
def other_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("kind", "harmless"), [("gpt2", other_threads), ("resnet", without_onednn)])
def test_harmless_changes_stay_within_a_few_times_the_noise(
    probe: ModelProbe, kind: str, harmless: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    if kind == "gpt2":
        model = probe.build(lambda: GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64)))
        inputs = {"input_ids": probe.randint(0, 64, (2, 16)), "use_cache": False}
    else:
        config = ResNetConfig(depths=[1, 1], hidden_sizes=[16, 32], embedding_size=8)
        model, inputs = probe.build(lambda: ResNetModel(config)), {"pixel_values": probe.randn(2, 3, 32, 32)}
    record = measured(probe.run(model, loss="random", mode="train", kwargs=inputs))
    assert record.noise == "measured"
    with harmless():
        other = readings(probe.run(model, loss="random", mode="train", kwargs=inputs))
    for key, reading in readings(record).items():
        moved_by = relative_change(reading, other[key])
        assert moved_by is None or moved_by <= max(4 * (reading.noise or 0.0), 2e-6), key


class Gate(nn.Module):
    """One of its sixteen gates lies as near to the other side as rounding may bring it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 16)
        self.relu = nn.ReLU()
        nn.init.constant_(self.fc.weight, 1.0)
        nn.init.constant_(self.fc.bias, 1.0)
        with torch.no_grad():
            self.fc.bias[3] = -0.7 * (1 + 1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.fc(x))


def test_a_gate_near_zero_shows_in_the_noise_of_gradients_alone(probe: ModelProbe) -> None:
    record = measured(probe.run(Gate(), torch.tensor([[0.7]]), loss=lambda out: out.sum()))
    gradient = next(p.gradient for p in record["fc"].parameters if p.name == "bias")
    assert gradient is not None
    assert 0.1 < (gradient.noise or 0.0) < 1  # infinite, where the repeats have no gradient
    assert (record["relu"].output.forward.noise or 0.0) < 1e-5


def in_eight_lanes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """As plain code with vectors of 8 numbers adds up; one by one, the change is at the very limit."""
    lanes = torch.zeros(8, len(x), len(weight))
    for products in torch.mul(x.T[:, :, None], weight.T[:, None, :]).unflatten(0, (-1, 8)):
        lanes += products
    return lanes.sum(0) + bias


def in_half_precision(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.addmm(bias.half(), x.half(), weight.half().T).float()


def test_a_long_sum_may_be_added_up_in_another_order_and_not_with_fewer_digits(
    probe: ModelProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = probe.build(lambda: nn.Linear(200_000, 16)), probe.randn(4, 200_000)
    record = measured(probe.run(model, x))
    monkeypatch.setattr(nn.functional, "linear", in_eight_lanes)
    assert compare(probe.run(model, x), record).same
    monkeypatch.setattr(nn.functional, "linear", in_half_precision)
    assert not compare(probe.run(model, x), record).same


@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 48), (torch.float16, 1024)])
def test_the_gradient_of_a_bias_may_be_added_up_in_another_order_and_nothing_more(
    probe: ModelProbe, dtype: torch.dtype, rows: int
) -> None:
    model, x = nn.LayerNorm(64).to(dtype), probe.randn(rows, 64).to(dtype)
    record = measured(probe.run(model, x, loss="random"))
    with other_threads():
        assert compare(probe.run(model, x, loss="random"), record).same
    model.bias.register_hook(lambda gradient: gradient * 1.1)
    (difference,) = compare(probe.run(model, x, loss="random"), record).differences
    assert (difference.kind, difference.what) == ("parameter gradient", "bias")


def test_indices_that_tip_over_have_the_share_that_does_as_noise(probe: ModelProbe) -> None:
    class Route(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.argmax(-1)

    close, clear = torch.tensor([[0.3, 0.7, 0.7 * (1 + 1e-7)]]), torch.tensor([[0.3, 0.9, 0.5]])
    x = torch.cat([close.expand(50, 3), clear.expand(50, 3)])
    noise = measured(probe.run(Route(), x))["(root)"].output.forward.noise
    assert noise is not None
    assert 0.02 < noise < 0.5


def test_parameters_have_no_noise_but_their_gradients_and_what_a_run_leaves(probe: ModelProbe) -> None:
    model = probe.build(lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
    record = measured(probe.run(model, probe.randn(16, 8), loss="random", mode="train"))
    assert all(p.reading.noise is None for p in (*record["1"].parameters, *record["1"].buffers))
    assert all(p.gradient and p.gradient.noise for p in record["0"].parameters)
    mean, _, count = (buffer.after for buffer in record["1"].buffers)
    assert mean is not None
    assert mean.noise is not None
    assert mean.noise < 1e-5
    assert count is not None
    assert count.noise == 0.0


def test_measuring_leaves_no_trace(probe: ModelProbe) -> None:
    model = probe.build(lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))).eval()
    x = probe.randn(16, 8)
    model(x).sum().backward()

    def everything() -> list[bytes]:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        tensors = [*model.parameters(), *model.buffers(), *gradients, x, torch.get_rng_state()]
        return [t.detach().numpy().tobytes() for t in tensors]

    before = everything()
    record = probe.run(model, x, loss="random", mode="train")
    record = measured(record)
    assert record.noise == "measured"
    assert everything() == before
    assert not any(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


# --- what cannot be repeated --------------------------------------------------------------------------------------


class Unseeded(nn.Module):
    generator = np.random.default_rng()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(self.generator.random())


class Counted(nn.Module):
    count = itertools.count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + next(self.count)


@pytest.mark.parametrize("culprit", [Unseeded, Counted])
def test_a_layer_that_cannot_be_repeated_is_named(probe: ModelProbe, culprit: type[nn.Module]) -> None:
    model = probe.build(lambda: nn.Sequential(nn.Linear(4, 4), culprit(), nn.Linear(4, 4)))
    record = measured(probe.run(model, probe.randn(2, 4), loss="random"))
    assert record.noise == "not repeatable"
    assert record.notes == ("not repeatable: 1 output differs when the run is repeated with the same seed",)
    assert record["0"].output.forward.noise is None
    assert (record["1"].output.forward.noise or 0.0) > 1e-3


def test_a_gradient_that_cannot_be_repeated_is_named(probe: ModelProbe) -> None:
    count = itertools.count(1)
    model = probe.build(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    record = measured(probe.run(model, probe.randn(2, 4), loss=lambda out: out.sum() * next(count)))
    assert record.noise == "not repeatable"
    (note,) = record.notes
    assert note.startswith("not repeatable: gradient of (root) output differs")


def test_a_repeat_that_raises_is_told(probe: ModelProbe) -> None:
    class Strict(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.equal(x, torch.full_like(x, 0.1)):
                raise ValueError("only tenths")
            return x

    record = measured(probe.run(Strict(), torch.full((3,), 0.1)))
    assert record.noise is None
    assert record.notes == ("no noise was measured: a repeat raised ValueError: only tenths",)


# --- records written by hand --------------------------------------------------------------------------------------


def reading(*fingerprint: float, count: int = 4, digest: str | None = None) -> Reading:
    return Reading(statistics=Statistics(count=count, mean=0.5), fingerprint=fingerprint, digest=digest)


def record(forward: Reading, backward: Reading | None = None, outputs: int = 1) -> Record:
    values = [
        Value(path="output", shape=(4,), dtype="float32", device="cpu", forward=forward, backward=backward)
    ] * outputs
    call = Call(root="a", root_training=False, index=0, started=0, finished=1, outputs=tuple(values))
    return Record(model="Net", layers={"a": Layer(name="a", type="Linear", calls=(call,))}, forwards=1)


def test_noise_is_the_most_that_any_repeat_moved() -> None:
    repeats = [readings(record(reading(number))) for number in (1.0, 1.5, 0.75)]
    assert with_noise(record(reading(1.0)), repeats, [])["a"].output.forward.noise == 0.5


def test_gradients_go_by_the_far_repeats_and_values_by_the_near_ones() -> None:
    near, far = (readings(record(*map(reading, numbers))) for numbers in ((1.1, 9.0), (9.0, 1.25)))
    value = with_noise(record(reading(1.0), reading(1.0)), [near], [far])["a"].output
    assert value.forward.noise == pytest.approx(0.1)
    assert value.backward is not None
    assert value.backward.noise == 0.25


def test_a_value_that_is_missing_or_of_another_size_in_a_repeat_has_infinite_noise() -> None:
    base = record(reading(1.0), reading(1.0))
    value = with_noise(base, [readings(record(reading(1.0, count=5)))], [readings(record(reading(1.0)))])["a"].output
    assert value.forward.noise == math.inf
    assert value.backward is not None
    assert value.backward.noise == math.inf
