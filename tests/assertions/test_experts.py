"""Experts in one parameter: those that no token reaches are named, by their numbers."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from pytest_modelprobe import ModelProbe, Record, assert_grad_flow
from pytest_modelprobe.assertions.findings import findings, hints

EXPERTS, WIDTH = 4, 6
X = ModelProbe().randn(8, 32, WIDTH)


class Mixture(nn.Module):
    """Each token goes to the expert that the router prefers among the first ``reachable``."""

    def __init__(self, reachable: int = EXPERTS) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 8))
        self.down = nn.Parameter(torch.randn(EXPERTS, 8, WIDTH))
        self.reachable = reachable

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, chosen = self.router(x)[..., : self.reachable].softmax(-1).max(-1, keepdim=True)
        every = torch.einsum("...eh,ehd->...ed", torch.einsum("...d,edh->...eh", x, self.up).tanh(), self.down)
        return x + share * every.take_along_dim(chosen.unsqueeze(-1), -2).squeeze(-2)


def trained(model: nn.Module, x: torch.Tensor = X, steps: int = 3) -> Record:
    with ModelProbe() as probe:
        watch = probe.watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return watch.record


def mixture(reachable: int = EXPERTS) -> Mixture:
    return ModelProbe().build(lambda: Mixture(reachable))


def test_experts_without_a_gradient_in_any_step_are_named_by_their_numbers() -> None:
    record = trained(mixture(reachable=2))
    with pytest.raises(AssertionError) as error:
        assert_grad_flow(record)
    assert str(error.value) == (
        "up: experts 2 and 3 of 4 get no gradient, with 768 tokens in 3 backwards\n\n"
        "parameter   layer type   shape       no gradient\n"
        "up          Mixture      (4, 6, 8)           2/4\n"
        "down        Mixture      (4, 8, 6)           2/4\n\n"
        "Those slices along its first axis get nothing: look at the router, at which experts it may choose, and at "
        "what is added up."
    )
    assert findings(record) == [
        f"experts without a gradient: {name}: experts 2 and 3 of 4 get no gradient, with 768 tokens"
        for name in ("up", "down")
    ]


def test_experts_that_each_get_a_token_in_some_step_are_sound() -> None:
    record = trained(mixture())
    assert_grad_flow(record)
    assert (findings(record), hints(record)) == ([], [])


@pytest.mark.parametrize(("tokens", "steps"), [(4, 3), (256, 1)])
def test_a_single_step_or_too_few_tokens_for_every_expert_show_nothing(tokens: int, steps: int) -> None:
    record = trained(mixture(reachable=2), X.flatten(0, 1)[:tokens], steps)
    assert_grad_flow(record)
    assert bool(findings(record)) == (tokens == 256)


def test_dead_channels_of_a_convolution_are_no_experts() -> None:
    model = nn.Sequential(nn.Conv1d(WIDTH, 4, 3), nn.ReLU(), nn.Conv1d(4, 2, 3))
    with torch.no_grad():
        model[0].bias[1] = -100.0
    nn.utils.parametrizations.weight_norm(model[0])
    record = trained(model, X.transpose(1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_grad_flow(record)
    assert not any("expert" in line for line in (*findings(record), *hints(record)))


def test_a_table_of_segments_of_which_one_does_not_occur_holds_no_experts() -> None:
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(2, 3, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table[1].flatten()

    record = trained(ModelProbe().build(Segments))
    assert (findings(record), hints(record)) == ([], [])
