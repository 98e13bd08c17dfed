"""`watched`: a watch outside of tests, as a context manager and as a decorator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pytest_modelprobe import UsageError, Watch, watched


@watched
def evaluate(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the sum."""
    return model(x).sum()


def test_a_model_is_watched_within_the_block_alone() -> None:
    model = nn.Linear(2, 3)
    with watched(model) as watch:
        model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert isinstance(watch, Watch)
    assert watch.record.forwards == 1
    assert not model._forward_hooks


def test_a_decorated_function_keeps_the_watch_of_its_newest_call_and_all_else() -> None:
    models = [nn.Linear(2, 3), nn.Linear(2, 4)]
    assert [evaluate(model, x=torch.zeros(1, 2)).shape for model in models] == [(), ()]
    assert evaluate.watch.record.layers["(root)"].calls[0].outputs[0].shape == (1, 4)
    assert (evaluate.__name__, evaluate.__doc__) == ("evaluate", "Return the sum.")
    assert evaluate.watch.closed


def test_options_are_those_of_a_watch() -> None:
    @watched(steps=2)
    def train(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    model = nn.Linear(2, 1)
    train(torch.optim.SGD(model.parameters(), 0.1), model=model)
    assert len(train.watch.steps) == 2


def test_a_call_that_raises_is_recorded_and_leaves_no_hook() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(RuntimeError):
        evaluate(model, torch.ones(1, 5))
    assert evaluate.watch.closed
    assert not model._forward_hooks


def asynchronous() -> Any:
    async def train(model: nn.Module) -> None: ...

    return train


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: evaluate(None, None), "evaluate is called without a model: give it one as an argument"),
        (lambda: watched(3), "watched takes a model or a function that is called with one; got int"),
        (lambda: watched(nn.Linear), "watched takes a model or a function that is called with one; got Linear"),
        (
            lambda: watched(asynchronous()),
            "train returns before it runs: use `with watched(model) as watch` inside it",
        ),
    ],
)
def test_misuse_is_explained(call: Any, said: str) -> None:
    with pytest.raises(UsageError) as error:
        call()
    assert str(error.value) == said
