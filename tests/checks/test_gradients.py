"""Gradients: they equal finite differences, and every parameter gets one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, checks


class Potential(nn.Module):
    """The energy of four atoms, of their distances and of the angles at the first one."""

    def __init__(self, angles_of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.angles_of = angles_of
        self.distances = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1))
        self.angles = nn.Sequential(nn.Linear(9, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, positions: Tensor) -> Tensor:
        arms = positions[:, 1:] - positions[:, :1]
        cosines = nn.functional.cosine_similarity(arms[:, :, None], arms[:, None], dim=-1).flatten(1)
        return self.distances(arms.norm(dim=-1)) + self.angles(self.angles_of(cosines))


def test_angles_that_are_detached_are_a_hint_at_the_input(probe: ModelProbe) -> None:
    positions = probe.randn(2, 4, 3)
    assert checks.gradients_agree(probe, Potential(lambda x: x), positions).verdict == "holds"
    found = checks.gradients_agree.outcome(probe, Potential(Tensor.detach), positions)
    assert found.verdict == "hint"
    assert found.text.startswith("input may have a wrong gradient: along one direction backward computes ")
    assert "straight-through estimators, vector quantization and targets" in found.text


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forgets: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.forgets = forgets
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradients[0] * (s + (1 - ctx.forgets) * x * s * (1 - s)), None


class Activated(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def between(function: Callable[[Tensor], Tensor]) -> nn.Sequential:
    """Return five layers, what computes the function is "2"."""
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Activated(function), nn.Linear(6, 6), nn.Linear(6, 3))


def test_a_wrong_backward_is_a_hint_at_the_parameter_before_it(probe: ModelProbe) -> None:
    x = probe.randn(5, 6)
    assert checks.gradients_agree(probe, between(lambda x: Swish.apply(x, 0.0)), x).text == (
        "9 gradients along one direction"
    )
    found = checks.gradients_agree.outcome(probe, between(lambda x: Swish.apply(x, 0.01)), x)
    assert (found.verdict, (found.layer or "").partition(".")[0]) == ("hint", "1")


class Narrow(torch.autograd.Function):
    """Rounds to float32 outside torch, and has the right gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy().astype("float32")).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def test_rounding_inside_is_no_wrong_gradient(probe: ModelProbe) -> None:
    model = between(lambda x: x + 1e-3 * Narrow.apply(x))
    assert checks.gradients_agree(probe, model, probe.randn(5, 6)).verdict == "holds"


def test_a_bias_that_is_zero_is_no_kink_where_the_inputs_are_zero(probe: ModelProbe) -> None:
    model = between(nn.functional.relu)
    for layer in (model[0], model[1]):
        nn.init.zeros_(layer.bias)
    assert checks.gradients_agree(probe, model, torch.zeros(5, 6)).verdict == "holds"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x - x).relu() + x,
        lambda x: (x * 0).abs() + x,
        lambda x: torch.stack([x, x]).amax(0),
        lambda x: x + x.round(),
        lambda x: x + nn.functional.one_hot(x.argmax(-1), x.shape[-1]),
        lambda x: nn.functional.dropout(x, 0.5, training=False),
        lambda x: x.topk(3).values.repeat(1, 2),
    ],
    ids=["relu at zero", "abs at zero", "equal values", "rounding", "argmax", "dropout off", "the largest"],
)
@pytest.mark.parametrize("x", [torch.zeros(5, 6), torch.ones(5, 6)], ids=["zeros", "ones"])
def test_what_has_kinks_and_jumps_is_no_wrong_gradient(
    probe: ModelProbe, function: Callable[[Tensor], Tensor], x: Tensor
) -> None:
    assert checks.gradients_agree.outcome(probe, between(function), x).verdict == "holds"


def test_inputs_that_are_one_tensor_have_one_gradient(probe: ModelProbe) -> None:
    x, model = probe.randn(2, 3, 4), nn.MultiheadAttention(4, 2, batch_first=True)
    for check in (checks.gradients_agree, checks.gradcheck):
        assert check.outcome(probe, model, x, x, x).verdict == "holds"


def test_a_row_of_padding_has_no_gradient_on_purpose(probe: ModelProbe) -> None:
    model = nn.Sequential(nn.Embedding(9, 4, padding_idx=3), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight.normal_()
    for check in (checks.gradients_agree, checks.gradcheck):
        assert check.outcome(probe, model, torch.arange(8).view(2, 4)).verdict == "holds"


def test_what_computes_in_float32_alone_is_not_judged(probe: ModelProbe) -> None:
    found = checks.gradients_agree.outcome(
        probe, between(lambda x: torch.from_numpy(x.detach().numpy().astype("float32")).double() + x), probe.randn(5, 6)
    )
    assert found.text == "finite differences do not settle: the outputs have a kink or a jump there"


# --- parameters without a gradient ------------------------------------------------------------------------------------


class Vision(nn.Module):
    """Four patches of an image, and a token of the class."""

    def __init__(self, *, token_is_used: bool) -> None:
        super().__init__()
        self.patch, self.token = nn.Linear(16, 8), nn.Parameter(torch.zeros(1, 1, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head, self.token_is_used = nn.Linear(8, 3), token_is_used

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x)
        if self.token_is_used:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.head(self.encoder(x)[:, 0])


def test_a_class_token_that_is_never_used_is_a_hint(probe: ModelProbe) -> None:
    x = probe.randn(2, 4, 16)
    assert checks.parameters_used(probe, Vision(token_is_used=True), x).text == "17 parameters"
    found = checks.parameters_used.outcome(probe, Vision(token_is_used=False), x)
    assert (found.verdict, found.layer) == ("hint", "token")
    assert found.text.startswith("""\
token gets no gradient in either mode; 1 of 17 parameters looked at

parameter   shape       layer called
token       (1, 1, 8)   yes
""")
    with pytest.warns(UserWarning, match=r"token gets no gradient in either mode.*1 hint; "):
        assert checks.standard(probe, Vision(token_is_used=False), x).broken == ()


class Gated(nn.Module):
    """A block whose branch has a gate, which is zero at first."""

    def __init__(self, *, forgets: bool) -> None:
        super().__init__()
        self.fc, self.gate = nn.Linear(8, 8), nn.Parameter(torch.zeros(8))
        self.forgets = forgets

    def forward(self, x: Tensor) -> Tensor:
        branch = self.fc(x).tanh()
        return x + (branch if self.forgets else branch * self.gate)


def test_a_gate_that_is_zero_has_a_gradient_and_one_that_is_forgotten_has_none(probe: ModelProbe) -> None:
    def blocks(*, forgets: bool) -> nn.Module:
        return nn.Sequential(Gated(forgets=False), Gated(forgets=forgets))

    x = probe.randn(3, 8)
    assert checks.parameters_used(probe, blocks(forgets=False), x).text == "6 parameters"
    assert checks.parameters_used.outcome(probe, blocks(forgets=True), x).layer == "1.gate"


class OfOneMode(nn.Module):
    """Masks positions in training alone, and has a head that only labels call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.mask, self.other = nn.Linear(8, 8), nn.Parameter(torch.zeros(8)), nn.Linear(8, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        if self.training:
            x = torch.where(torch.arange(len(x))[:, None] % 2 == 0, self.mask, x)
        x = self.fc(x)
        return x if labels is None else self.other(x)


def test_a_parameter_of_training_is_used_and_a_head_that_was_not_called_is_told_so(probe: ModelProbe) -> None:
    found = checks.parameters_used.outcome(probe, OfOneMode(), probe.randn(3, 8))
    assert found.text.split("\n\n")[1].splitlines()[1:] == [
        "other.weight   (2, 8)   never",
        "other.bias     (2,)     never",
    ]
