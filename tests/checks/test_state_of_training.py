"""What a forward in training mode writes, and a state_dict has to hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from pytest_modelprobe import ModelProbe, checks


class ActNorm(nn.Module):
    """Initializes its scale and shift by the first batch."""

    def __init__(self, flag: bool | Tensor) -> None:
        super().__init__()
        if isinstance(flag, Tensor):
            self.register_buffer("initialized", flag)
        else:
            self.initialized = flag
        self.log_scale, self.shift = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.initialized:
            with torch.no_grad():
                self.log_scale.copy_(-x.std(0).log())
                self.shift.copy_(-(x * self.log_scale.exp()).mean(0))
            self.initialized = torch.tensor(True) if isinstance(self.initialized, Tensor) else True
        return x * self.log_scale.exp() + self.shift


class Momentum(nn.Module):
    """Norms by statistics of all batches so far, in attributes that a test chooses."""

    def __init__(self, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.use, self.kept, self.calls = use, torch.zeros(3), 0
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def statistics(self: Momentum, x: Tensor) -> Tensor:
    if self.training:
        self.kept = 0.9 * self.kept + 0.1 * x.detach().mean(0)
    return x - self.kept


def drawn(self: Momentum, x: Tensor) -> Tensor:
    return x + torch.randn(x.shape, generator=self.generator) if self.training else x


class Merged(nn.Linear):
    """Adds its update to the weight in evaluation mode, and subtracts it in training mode, as LoRA does."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.update, self.merged = nn.Parameter(torch.randn(3, 3)), False

    def train(self, mode: bool = True) -> Merged:
        if mode == self.merged:
            self.weight.data += -self.update.data if mode else self.update.data
            self.merged = not mode
        return super().train(mode)  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.merged else super().forward(x) + x @ self.update.T


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "a flag in a buffer": lambda: ActNorm(torch.tensor(False)),
    "running statistics": lambda: nn.BatchNorm1d(3),
    "a power iteration": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
    "numbers that nothing seeds": lambda: Momentum(drawn),
    "weights that are merged in evaluation": Merged,
    "weights that are merged already": lambda: Merged().eval(),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_model_whose_state_dict_is_all_that_training_writes_holds(probe: ModelProbe, name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), HEALTHY[name]())
    assert checks.state_dict_round_trip(probe, model, probe.randn(6, 3)).verdict == "holds"


def test_an_initialization_by_the_first_batch_that_a_loaded_model_does_again_is_a_hint(probe: ModelProbe) -> None:
    found = checks.state_dict_round_trip.outcome(
        probe, nn.Sequential(nn.Linear(3, 3), ActNorm(False)), probe.randn(6, 3)
    )
    assert (found.verdict, found.layer) == ("hint", "1")
    assert found.text.startswith("layer '1' (ActNorm) differs after a state_dict of a model that was trained: output ")


def test_a_hidden_state_of_sconv2dlstm_of_snntorch_that_begins_anew_is_a_hint(probe: ModelProbe) -> None:
    found = checks.state_dict_round_trip.outcome(probe, Momentum(statistics), probe.randn(6, 3))
    assert (found.verdict, found.layer) == ("hint", "(root)")


def test_a_model_that_cannot_train_on_these_inputs_is_checked_in_evaluation(probe: ModelProbe) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    assert checks.state_dict_round_trip(probe, model, probe.randn(1, 3)).verdict == "holds"
