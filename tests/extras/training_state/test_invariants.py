"""A healthy training taught, other healthy ones passed, and faults named by layer or parameter, and step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from pytest_modelprobe import Invariants, NothingObservedError, UsageError, Watch, assert_invariants

DIGITS = load_digits()


class Digits(nn.Module):
    """Digits, with a norm, dropout and a head that is called once."""

    def __init__(self, rate: float = 0.2) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(rate)
        self.fc2 = nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(F.relu(self.norm(self.fc1(x))))
        return self.head(F.relu(self.fc2(hidden)))


def batches(seed: int, size: int = 16) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    images, labels = torch.tensor(DIGITS.data / 16, dtype=torch.float32), torch.tensor(DIGITS.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    for chosen in order.split(size):
        yield images[chosen], labels[chosen]


def train(
    seed: int,
    *,
    model: nn.Module | None = None,
    steps: int = 5,
    size: int = 16,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda m: torch.optim.AdamW(m.parameters(), 1e-3),
    prepare: Callable[[nn.Module], Any] = lambda model: None,
    zero_grad: bool = True,
    before_step: Callable[[nn.Module], Any] = lambda model: None,
    same_batch: bool = False,
    autocast: bool = False,
) -> Watch:
    torch.manual_seed(seed)
    model = Digits() if model is None else model
    stepper = optimizer(model)
    prepare(model)
    data = batches(seed, size)
    with Watch(model, steps=steps) as watch:
        images, labels = next(data)
        for _ in range(steps):
            if zero_grad:
                stepper.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
            before_step(model)
            stepper.step()
            if not same_batch:
                images, labels = next(data)
    return watch


@pytest.fixture(scope="module")
def healthy() -> Invariants:
    return train(seed=0).invariants


def first_line(watch: Watch, expected: Invariants) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_invariants(watch, expected)
    return str(caught.value).partition("\n")[0]


def test_other_seeds_data_batch_sizes_and_numbers_of_steps_are_healthy(healthy: Invariants) -> None:
    assert_invariants(train(2, size=8, steps=12), healthy)


def test_a_frozen_parameter_is_named(healthy: Invariants) -> None:
    watch = train(1, prepare=lambda model: model.fc2.weight.requires_grad_(False))
    assert first_line(watch, healthy) == (
        "fc2.weight is frozen in all 5 steps; in the healthy run it is held by an optimizer"
    )


def left_out(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for name, p in model.named_parameters() if name != "fc2.bias"], 1e-3)


def with_rate(rate: float, decay: float = 0.01) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), rate, weight_decay=decay)


class HeadTwice(Digits):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.head(torch.zeros(len(x), 32))


class WithoutMiddle(Digits):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(F.relu(self.norm(self.fc1(x)))))


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (
            {"zero_grad": False},
            "the training loop adds gradients to those of the step before, 4 times of 5; resets them",
        ),
        ({"optimizer": with_rate(1.0)}, "group 0 (AdamW) has lr 1 in all 5 steps; has lr 0.001"),
        (
            {"optimizer": with_rate(1e-3, 0.1)},
            "group 0 (AdamW) has weight_decay 0.1 in all 5 steps; has weight_decay 0.01",
        ),
        ({"optimizer": left_out}, "fc2.bias is left out of the optimizer in all 5 steps; is held by an optimizer"),
        ({"model": Digits(rate=0.0)}, "drop draws no random numbers in all 5 steps; draws random numbers"),
        (
            {"prepare": lambda model: model.eval()},
            "the training loop takes steps with gradients of forwards in evaluation mode, 5 times of 5; takes none",
        ),
        (
            {"same_batch": True},
            "the model is given the inputs of the step before in steps 1 to 4; is given others in each step",
        ),
        ({"model": HeadTwice()}, "head is called 2 times in a forward in all 5 steps; is called 1 time in a forward"),
        ({"model": WithoutMiddle()}, "fc2 is not called in all 5 steps; is called 1 time in a forward"),
        (
            {"prepare": lambda model: model.norm.eval()},
            "norm runs in evaluation mode in all 5 steps; runs in training mode",
        ),
        (
            {"before_step": nn.Module.zero_grad},
            "the training loop resets gradients between the backward and the step, 5 times of 5; does not",
        ),
    ],
)
def test_a_fault_is_named(healthy: Invariants, fault: dict[str, Any], sentence: str) -> None:
    assert first_line(train(1, **fault), healthy) == sentence.replace("; ", "; in the healthy run it ")


def test_the_whole_message(healthy: Invariants) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_invariants(train(1, model=WithoutMiddle()), healthy)
    assert str(caught.value) == (
        "fc2 is not called in all 5 steps; in the healthy run it is called 1 time in a forward\n\n"
        "where        now                healthy run                     steps\n"
        "fc2          is not called      is called 1 time in a forward   0 to 4\n"
        "fc2.weight   gets no gradient   gets a gradient                 0 to 4\n"
        "fc2.bias     gets no gradient   gets a gradient                 0 to 4\n"
        "fc2.weight   is not updated     is updated                      0 to 4\n"
        "fc2.bias     is not updated     is updated                      0 to 4\n\n"
        "Look at the forward of the model that calls it.\n\n"
        "If the change is meant, learn the invariants again."
    )


def test_a_layer_that_loses_autocast_is_named() -> None:
    class Full(Digits):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.drop(F.relu(self.norm(self.fc1(x))))
            with torch.autocast("cpu", enabled=False):
                hidden = self.fc2(hidden.float())
            return self.head(F.relu(hidden))

    healthy = train(0, autocast=True).invariants
    assert_invariants(train(1, autocast=True, size=32), healthy)
    assert first_line(train(1, model=Full(), autocast=True), healthy) == (
        "fc2 returns float32 in all 5 steps; in the healthy run it returns bfloat16"
    )


class Tied(nn.Module):
    """A language model of one attention layer with its head tied to the embedding."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 20, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(tokens)))


def train_text(seed: int, *, tied: bool = True, steps: int = 5, size: int = 4) -> Watch:
    """Two backward passes in a step, a warm-up from zero, clipping, and an evaluation."""
    torch.manual_seed(seed)
    model = Tied(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3) if step < 8 else 0.1)
    with Watch(model, steps=steps) as watch:
        for _ in range(steps):
            for _ in range(2):
                tokens = torch.randint(20, (size, 8))
                F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model.eval()(tokens)
    return watch


def test_a_schedule_and_clipping_and_accumulation_are_healthy() -> None:
    assert_invariants(train_text(1, size=9, steps=12), train_text(0).invariants)


def test_a_weight_that_is_no_more_tied_is_named() -> None:
    assert first_line(train_text(1, tied=False), train_text(0).invariants) == (
        "head.weight is a tensor of its own in all 5 steps; in the healthy run it is tied to embedding.weight"
    )


def test_a_batch_that_comes_back_in_another_epoch_is_healthy() -> None:
    def epochs(steps: int) -> Watch:
        torch.manual_seed(0)
        model, data = nn.Linear(4, 1), [torch.randn(8, 4) for _ in range(4)]
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with Watch(model, steps=steps) as watch:
            for step in range(steps):
                optimizer.zero_grad()
                model(data[step % 4]).square().mean().backward()
                optimizer.step()
        return watch

    healthy = epochs(4).invariants
    assert healthy.inputs == "differ"
    assert_invariants(epochs(9), healthy)
    assert epochs(9).invariants.inputs == "differ from the step before"


def test_a_bias_before_a_norm_is_known_by_no_update() -> None:
    healthy = train(0, optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.01)).invariants
    assert healthy.parameters["fc1.bias"] == {"tied_to": "", "role": "optimized", "gradient": True}


def test_a_file_has_a_line_for_each_layer_and_is_read_back(healthy: Invariants, tmp_path: Path) -> None:
    path = tmp_path / "healthy.json"
    healthy.save(path)
    assert Invariants.load(path) == healthy == Invariants.from_dict(json.loads(json.dumps(healthy.to_dict())))
    lines = path.read_text().splitlines()
    assert '    "fc2.bias": {"tied_to": "", "role": "optimized", "gradient": true, "updated": true},' in lines
    drop = '{"calls": 1, "training": true, "grad_enabled": true, "dtype": "float32", "random": true}'
    assert f'        "drop": {drop},' in lines


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"steps": 3}',
        '{"model": "Net", "steps": 3, "last": 2, "other": 1}',
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"other\.json has no invariants"):
        Invariants.load(path)


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^there is no file .*: watch\.invariants\.save\(path\) of a healthy run"):
        Invariants.load(tmp_path / "none.json")


def test_two_steps_are_too_few_to_learn_from() -> None:
    with pytest.raises(UsageError, match="learned from 3 steps of training or more, and there are 2: keep more with"):
        _ = train(0, steps=2).invariants


def test_records_of_steps_are_judged_too(healthy: Invariants) -> None:
    assert_invariants(train(1).steps[2:], healthy)
    with pytest.raises(AssertionError, match=r"group 0 \(AdamW\) has lr 1 in step 3;"):
        assert_invariants([train(1, optimizer=with_rate(1.0)).steps[3]], healthy)


def test_bad_input_is_refused(healthy: Invariants) -> None:
    watch = train(1, steps=3)
    with pytest.raises(UsageError, match="got one record: give \\[record\\]"):
        assert_invariants(watch.record, healthy)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is not of one step of training"):
        assert_invariants([watch.record], healthy)
    with pytest.raises(UsageError, match="takes the invariants of a healthy run second; got Watch"):
        assert_invariants(watch, watch)  # type: ignore[arg-type]
    with pytest.raises(NothingObservedError, match="there is no step to judge"):
        assert_invariants([], healthy)


def test_parameters_of_another_model_are_named(healthy: Invariants) -> None:
    class Wider(Digits):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    assert first_line(train(1, model=Wider()), healthy) == (
        "scale is held by an optimizer in all 5 steps; in the healthy run it is no parameter"
    )


def test_two_optimizers_that_step_in_turn_are_healthy() -> None:
    def in_turn(seed: int, rate: float = 0.1) -> Watch:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        optimizers = [torch.optim.SGD(layer.parameters(), lr) for layer, lr in zip(model, (0.1, rate), strict=True)]
        with Watch(model, steps=6) as watch:
            for step in range(6):
                model.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizers[step % 2].step()
        return watch

    healthy = in_turn(0).invariants
    assert [group.every_step for group in healthy.groups] == [False, False]
    assert_invariants(in_turn(1), healthy)
    assert first_line(in_turn(1, rate=1.0), healthy) == (
        "group 1 (SGD) has lr 1 in steps 1, 3, 5; in the healthy run it has lr 0.1"
    )


class Recognizer(nn.Module):
    """Frames of sound to letters, at half the rate."""

    def __init__(self) -> None:
        super().__init__()
        self.halve = nn.Conv1d(8, 16, 3, stride=2, padding=1)
        self.layer, self.head = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(F.relu(self.halve(x.mT)).mT)[0]).log_softmax(-1)


def train_sound(seed: int, *, halvings: int = 1, size: int = 4) -> Watch:
    torch.manual_seed(seed)
    model = Recognizer()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with Watch(model, steps=4) as watch:
        for _ in range(4):
            lengths = torch.randint(60, 81, (size,))
            targets = torch.randint(1, 6, (size, 3))
            optimizer.zero_grad()
            letters = model(torch.randn(size, 80, 8)).transpose(0, 1)
            used = lengths // 2**halvings
            F.ctc_loss(letters, targets, used, torch.full((size,), 3)).backward()
            optimizer.step()
    return watch


def test_lengths_that_are_halved_too_often_are_named_by_the_positions_without_a_gradient() -> None:
    healthy = train_sound(0).invariants
    assert healthy.forwards[0].layers["(root)"]["positions"] is True
    assert_invariants(train_sound(1, size=16), healthy)
    assert first_line(train_sound(1, halvings=3), healthy) == (
        "(root) gets no gradient at three quarters or more of its output positions in all 4 steps; in the healthy run "
        "it gets no gradient at a quarter or less of its output positions"
    )


def train_tags(seed: int, *, ignored: float, first_only: bool = False) -> Watch:
    """Train a tagger of tokens whose loss leaves out a share of the positions, or all but the first."""
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with Watch(model, steps=4) as watch:
        for _ in range(4):
            tokens = torch.randint(20, (4, 16))
            targets = tokens.masked_fill(torch.rand(tokens.shape) < ignored, -100)
            if first_only:
                targets[:, 1:] = -100
            optimizer.zero_grad()
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
    return watch


def test_a_loss_of_few_positions_is_healthy_where_the_healthy_run_has_it_too() -> None:
    masked = train_tags(0, ignored=0.9).invariants
    assert_invariants(train_tags(1, ignored=0.9), masked)
    assert first_line(train_tags(1, ignored=0.0), masked).startswith("(root) gets no gradient at a quarter or less")
    assert_invariants(
        train_tags(1, ignored=0.0, first_only=True), train_tags(0, ignored=0.0, first_only=True).invariants
    )


def test_a_share_of_positions_between_few_and_most_is_not_learned() -> None:
    padded = train_tags(0, ignored=0.4).invariants
    assert "positions" not in padded.forwards[0].layers["(root)"]
    assert_invariants(train_tags(1, ignored=0.95), padded)
