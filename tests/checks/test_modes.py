"""Training and evaluation, inputs that reach nothing, rows for padding: what is healthy, what is told of a fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pytest_modelprobe import ModelProbe, checks
from pytest_modelprobe.checks import Outcome

ROWS, WIDTH, WORDS = 4, 8, 11


def named(outcome: Outcome) -> str | None:
    """Return the layer that is told of, first thing in the message."""
    assert outcome.verdict == "broken", outcome
    assert outcome.layer
    assert str(outcome).startswith((outcome.layer, f"layer '{outcome.layer}' ("))
    return outcome.layer


# --- modes_agree --------------------------------------------------------------------------------------------------


class LoRA(nn.Linear):
    """A linear layer with an addition of low rank, which is merged into the weight for evaluation."""

    def __init__(
        self, scale: float = 1.0, merged_with: float = 1.0, forgets: bool = False, again: bool = False
    ) -> None:
        super().__init__(WIDTH, WIDTH)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2))
        self.scale, self.merged_with, self.forgets, self.again = scale, merged_with, forgets, again
        self.merged = False

    def train(self, mode: bool = True) -> nn.Module:
        with torch.no_grad():
            if not mode and (self.again or not self.merged):
                self.weight += self.merged_with * self.b @ self.a
                self.merged = True
            elif mode and self.merged:
                self.weight -= (0 if self.forgets else self.merged_with) * self.b @ self.a
                self.merged = False
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.merged else y + self.scale * x @ self.a.T @ self.b.T


class DropPath(nn.Module):
    """Drops rows, as the one of timm does."""

    def __init__(self, p: float = 0.2, power: int = 1) -> None:
        super().__init__()
        self.p, self.power = p, power

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(1 - self.p)
        return x * kept / (1 - self.p) ** self.power


class Noise(nn.Module):
    """Gives out a share of its input, to which it adds noise in place, as routers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Noisy()

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x) * x


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x *= torch.empty_like(x).uniform_(0.9, 1.1)
        return x.sigmoid()


class Statistics(nn.Module):
    """A norm by hand that goes by the batch in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - (x.mean(0) if self.training else self.mean)


class Own(nn.Module):
    """Whatever a function of itself and its input does, around a linear layer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.linear(x))


def between(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), layer, nn.Linear(WIDTH, WIDTH))


@pytest.fixture
def rows(probe: ModelProbe) -> Tensor:
    return probe.randn(ROWS, WIDTH)


HEALTHY: dict[str, Any] = {
    "dropout": nn.Dropout,
    "dropout by a function": lambda: Own(lambda self, x: nn.functional.dropout(x, 0.3, self.training)),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "a norm by hand": Statistics,
    "drop path": DropPath,
    "noise in place": lambda: Noise(),
    "lora": LoRA,
    "checkpointed": lambda: Own(
        lambda self, x: checkpoint(torch.tanh, x, use_reentrant=False) if self.training else torch.tanh(x)
    ),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", HEALTHY)
def test_without_randomness_the_modes_of_a_healthy_model_agree(probe: ModelProbe, rows: Tensor, name: str) -> None:
    assert checks.modes_agree(probe, between(HEALTHY[name]()), rows).verdict == "holds"


def test_what_gives_out_something_else_in_training_is_said_not_to_be_compared(probe: ModelProbe, rows: Tensor) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Own(lambda self, x: {"y": 2 * x} if self.training else x))
    found = checks.modes_agree(probe, model, rows)
    assert found.text == "2 layers; not compared: 1 and (root), called otherwise or with other outputs"


def test_what_is_random_or_gathers_statistics_is_named(probe: ModelProbe, rows: Tensor) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), DropPath(), Statistics(), nn.Linear(WIDTH, WIDTH))
    assert checks.modes_agree(probe, model, rows).text == (
        "3 layers; left out: 1 and 2, random or with statistics of their own"
    )


def test_a_layer_that_takes_another_way_in_training_is_named(probe: ModelProbe, rows: Tensor) -> None:
    model = between(Own(lambda self, x: x.relu() if self.training else x))
    model[1] = nn.Dropout(0.5)
    found = checks.modes_agree.outcome(probe, model, rows)
    assert named(found) == "2"
    first = str(found).splitlines()[0]
    assert first.startswith(
        "layer '2' (Own) computes something else from the same inputs in training mode than in evaluation"
    )


class Adapter(nn.Module):
    """An addition of low rank to a layer, into whose weight it is merged for evaluation."""

    def __init__(self, merged_with: float = 1.0) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(6, 6), nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.merged, self.merged_with = False, merged_with

    def train(self, mode: bool = True) -> Adapter:
        super().train(mode)
        if mode == self.merged:
            with torch.no_grad():
                self.base.weight += (-1 if mode else 1) * self.merged_with * self.up.weight @ self.down.weight
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) if self.merged else self.base(x) + self.up(self.down(x))


def test_a_layer_whose_difference_the_code_around_it_takes_back_is_told(probe: ModelProbe, rows: Tensor) -> None:
    found = checks.modes_agree(probe, nn.Sequential(nn.Linear(8, 6), Adapter()), rows)
    assert "; layers inside differ, but those around them agree: first 1.base output, changed by " in found.text
    found = checks.modes_agree.outcome(probe, nn.Sequential(nn.Linear(8, 6), Adapter(merged_with=2.0)), rows)
    assert found.layer == "1.base"
    assert "(root) output" in found.text


def test_an_output_that_is_replaced_takes_no_difference_back(probe: ModelProbe, rows: Tensor) -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x) * self.training

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (1 + self.training)

    found = checks.modes_agree.outcome(probe, nn.Sequential(nn.Linear(8, 6), Scaled(), Noise()), rows)
    assert found.layer == "1"


def test_lora_merged_with_another_scale_is_named(probe: ModelProbe, rows: Tensor) -> None:
    assert named(checks.modes_agree.outcome(probe, between(LoRA(scale=2.0)), rows)) == "2"


def test_lora_that_is_merged_twice_is_named(probe: ModelProbe, rows: Tensor) -> None:
    found = checks.modes_agree.outcome(probe, between(LoRA(again=True)), rows)
    assert named(found) == "2"
    assert " from the same inputs after eval(), eval() than after eval() alone: " in str(found)


def test_lora_that_stays_merged_is_named(probe: ModelProbe, rows: Tensor) -> None:
    found = checks.modes_agree.outcome(probe, between(LoRA(forgets=True)), rows)
    assert named(found) == "2"
    assert " from the same inputs after train(), eval(), train() than after train() alone: " in str(found)


# --- inputs_used --------------------------------------------------------------------------------------------------


class Towers(nn.Module):
    """Two inputs, of which one may lose something on its way."""

    def __init__(self, take: Any = lambda x: x, width: int = WIDTH) -> None:
        super().__init__()
        self.take, self.first, self.second = take, nn.Linear(width, 6), nn.Linear(WIDTH, 6)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.first(self.take(user)).relu() * self.second(item)).sum(-1)


def test_all_features_of_all_inputs_are_used(probe: ModelProbe, rows: Tensor) -> None:
    assert checks.inputs_used(probe, Towers(), user=rows, item=rows + 1).text == "2 inputs"


def test_features_that_reach_nothing_are_named(probe: ModelProbe, rows: Tensor) -> None:
    found = checks.inputs_used.outcome(probe, Towers(lambda x: x[:, :3], 3), user=rows, item=rows + 1)
    assert named(found) == "user"
    assert str(found) == (
        "user is not used at features 3 to 7 of 8: no gradient arrives there, and other values change no output\n\n"
        "No layer uses them: look for a slice or an index, a weight that is zero, and an argument "
        "that is taken and not used."
    )


def test_an_input_that_reaches_nothing_is_named(probe: ModelProbe, rows: Tensor) -> None:
    found = checks.inputs_used.outcome(probe, Towers(torch.zeros_like), user=rows, item=rows + 1)
    assert str(found).startswith("user is not used: no gradient arrives there, ")


def test_a_channel_that_reaches_nothing_is_named(probe: ModelProbe) -> None:
    class Grey(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, :2])

    model = Grey(nn.Conv2d(2, 4, 3, stride=2), nn.Flatten(), nn.Linear(4 * 9, 2))
    found = checks.inputs_used.outcome(probe, model, probe.randn(2, 3, 8, 8))
    assert str(found).startswith("input is not used at channel 2 of 3: ")


def test_what_strides_leave_over_is_not_lost(probe: ModelProbe) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 2))
    assert checks.inputs_used(probe, model, probe.randn(2, 3, 8, 8)).text == "1 input"


def test_what_counts_by_its_values_alone_is_said(probe: ModelProbe, rows: Tensor) -> None:
    model = Towers(lambda x: torch.cat([x[:, :6], x[:, 6:].round()], 1))
    assert checks.inputs_used(probe, model, user=rows * 3, item=rows + 1).text == (
        "2 inputs; features 6 to 7 of 8 of user by values alone, without a gradient"
    )


class Merged(nn.Module):
    """Adds the product of an adapter to the weight in evaluation mode, and takes it out again in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter, self.base, self.merged = nn.Linear(3, 3, bias=False), nn.Linear(3, 3), False

    def train(self, mode: bool = True) -> Merged:
        super().train(mode)
        if mode == self.merged:
            self.base.weight.data += (-1 if mode else 1) * self.adapter.weight.data
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) if self.merged else self.base(x) + self.adapter(x)
        return out


def test_weights_that_are_merged_in_evaluation_mode_agree_beside_a_dropout(probe: ModelProbe) -> None:
    found = checks.modes_agree(probe, nn.Sequential(Merged(), nn.Dropout(0.1)), probe.randn(4, 3))
    assert "layers inside differ, but those around them agree: first 0.base output" in found.text


def test_a_dropout_of_everything_draws_nothing_and_is_seeded(probe: ModelProbe) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(1.0), nn.Linear(8, 8), nn.Dropout(0.5))
    assert checks.seeded(probe, model, probe.randn(4, 3)).verdict == "holds"


def test_a_write_that_changes_no_number_of_these_inputs_is_a_write(probe: ModelProbe) -> None:
    found = checks.inputs_unchanged_by_forward.outcome(probe, nn.ReLU(inplace=True), probe.randn(4, 3).abs())
    assert "writes into input" in str(found)
