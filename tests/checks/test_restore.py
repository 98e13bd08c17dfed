"""Whatever a check does, afterwards all is as it was: the model bit for bit, its hooks, the random states."""

from __future__ import annotations

import random
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, checks
from pytest_modelprobe.checks import Check
from pytest_modelprobe.models.restoring import preserved

# Of the backward hook of the first layer, whose inputs have no gradient.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")

WIDTH, LENGTH, BATCH = 4, 5, 3
ALL = [one for name in checks.__all__ if isinstance(one := getattr(checks, name), Check)]
SOME = [checks.batch_independent, checks.checkpoint_parity]


def set_otherwise() -> None:
    """Change all settings of torch that a model may think it needs."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic = not torch.backends.cudnn.deterministic
    torch.set_default_dtype(torch.float64)


class Everything(nn.Module):
    """What a check may forget to put back."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.norm, self.drop = nn.BatchNorm1d(LENGTH), nn.Dropout(0.2)
        self.fc1, self.fc2, self.tied = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.tied.weight = self.fc1.weight
        self.fc2.weight.requires_grad_(False)
        nn.init.zeros_(self.tied.bias)
        self.gate = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("turn", torch.eye(WIDTH), persistent=False)
        self.register_buffer("seen", torch.zeros(1))
        self.plain = torch.ones(WIDTH)
        self.calls, self.history = 0, []

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        self.history.append(self.calls)
        self.cache = x.shape
        if self.fault == "raises" and self.calls > 1:
            raise RuntimeError("no")
        if self.fault == "writes":
            self.seen += 1
            self.extra = self.seen.clone()
            self.turn = self.turn + 1
        if self.fault == "input":
            x.add_(1)
        if self.fault == "seed":
            torch.manual_seed(0)
            np.random.seed(0)  # noqa: NPY002
            random.seed(0)
        if self.fault == "mode":
            self.drop.train()
            self.drop.p = 0.9
        if self.fault == "settings":
            set_otherwise()
        h = self.fc1(self.drop(self.norm(x))) @ self.turn
        return self.tied(h.relu()) + self.gate * self.fc2(h) * self.plain


class Sequence(nn.Sequential):
    """A recurrence, and heads that are tied."""

    def __init__(self, fault: str) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.fault = fault
        self[1].weight = self[3].weight

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if self.fault == "raises":
            return super().forward(x)[9:].view(7, 7)
        if self.fault == "mode":
            self.train(not self.training)
        return super().forward(x)


class Images(nn.Sequential):
    """Convolutions, dropout, and what a weight is computed of."""

    def __init__(self, fault: str) -> None:
        super().__init__(
            nn.Unflatten(1, (1, LENGTH)), nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(inplace=True),
            nn.Dropout2d(0.3), nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(2 * LENGTH * WIDTH, 3)),
        )  # fmt: skip
        self.fault = fault

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if self.fault == "raises" and not torch.is_grad_enabled():
            raise ValueError("not without gradients")
        return super().forward(x)


class Doubling:
    """A hook that its owner keeps."""

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return 2 * output


def bits(tensor: Tensor | None) -> Any:
    return None if tensor is None else (id(tensor), tensor.data_ptr(), tensor.dtype, tensor.detach().numpy().tobytes())


def all_of(model: nn.Module) -> dict[str, Any]:
    """Return all that can be told apart afterwards."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            kept = list(value.items()) if isinstance(value, (dict, OrderedDict)) else value
            if isinstance(value, Tensor):
                found[f"{name}.{key}"] = bits(value)
            elif isinstance(value, (dict, OrderedDict)):
                found[f"{name}.{key}"] = [(k, id(v)) for k, v in kept]
            else:
                found[f"{name}.{key}"] = list(value) if isinstance(value, list) else value
    for name, p in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        found[f"{name} itself"] = bits(p), p.requires_grad, bits(p.grad), p._version if p.grad_fn else None
    return found


def around() -> dict[str, Any]:
    """Return the state of everything that is shared with others."""
    numbers = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (numbers[0], numbers[1].tobytes(), *numbers[2:]),
        "random": random.getstate(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "cudnn deterministic": torch.backends.cudnn.deterministic,
        "filled": torch.utils.deterministic.fill_uninitialized_memory,
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "warnings": list(warnings.filters),
    }


def build(kind: Callable[[str], nn.Module], fault: str, mode: str) -> nn.Module:
    torch.manual_seed(7)
    model = kind(fault)
    for i, p in enumerate(model.parameters()):
        if i % 2 and p.requires_grad:
            p.grad = torch.randn(p.shape)
    layers = list(model.modules())
    layers[1].register_forward_hook(Doubling())
    layers[-1].register_forward_pre_hook(lambda module, args: None)
    layers[1].register_full_backward_hook(lambda module, before, after: None)
    for i, module in enumerate(layers):
        module.training = {"train": True, "eval": False, "mixed": i % 2 == 0}[mode]
    return model


def options(check: Check, model: nn.Module, kind: Callable[[str], nn.Module]) -> dict[str, Any]:
    fast: dict[str, dict[str, Any]] = {
        "overfits_batch": {"loss": lambda y: y.square().mean(), "steps": 2},
        "gradient_accumulation": {"loss": lambda y: y.square().mean()},
        "optimizer_covers": {"optimizer": torch.optim.SGD(model.parameters(), 0.1)},
        "ema_tracks": {"average": model, "decay": 0.5, "updates": lambda: None},
        "initialized": {"factory": lambda: kind("")},
        "device_parity": {"device": "cpu"},
        "compile_parity": {"backend": "eager"},
    }
    return fast.get(check.__name__, {})


CHANGES: dict[str, Callable[[nn.Module], None]] = dict.fromkeys(("same_function", "adapter"), lambda model: None)
"""What goes before the inputs."""

STATES: list[tuple[Callable[[str], nn.Module], str, str]] = [
    (Everything, "writes", "mixed"),
    (Everything, "seed", "train"),
    (Sequence, "mode", "eval"),
    (Images, "raises", "train"),
]


@pytest.mark.parametrize("check", ALL, ids=lambda check: check.__name__)
def test_a_check_leaves_all_as_it_was(check: Check) -> None:
    for i, (kind, fault, mode) in enumerate(STATES):
        model = build(kind, fault, mode)
        x = torch.randn(BATCH, LENGTH, WIDTH)
        more = {"attention_mask": torch.ones(BATCH, LENGTH)} if i % 2 else {}
        more |= options(check, model, kind)
        given_in = x.clone()
        with torch.set_grad_enabled(i < 2):
            before, shared = all_of(model), around()
            changes = [CHANGES[check.__name__]] if check.__name__ in CHANGES else []
            check.outcome(ModelProbe(), model, *changes, x, **more)
            assert around() == shared
        assert all_of(model) == before
        assert torch.equal(x, given_in)
        assert not x.requires_grad


@pytest.mark.parametrize("check", SOME, ids=lambda check: check.__name__)
def test_settings_of_torch_that_a_forward_changes_are_put_back(check: Check) -> None:
    model, x = build(Everything, "settings", "train"), torch.randn(BATCH, LENGTH, WIDTH)
    shared = around()
    try:
        check.outcome(ModelProbe(), model, x, **options(check, model, Everything))
        assert around() == shared
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)


@pytest.mark.parametrize("check", SOME, ids=lambda check: check.__name__)
def test_under_autocast_the_model_computes_afterwards_with_its_own_weights(check: Check) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    nn.init.zeros_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check.outcome(ModelProbe(), model, x, **options(check, model, lambda _: nn.Linear(2, 2)))
        assert not model(x).any()


@pytest.mark.parametrize("check", SOME, ids=lambda check: check.__name__)
def test_an_interrupt_leaves_all_as_it_was(check: Check) -> None:
    class Stopped(Everything):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            super().forward(x)
            raise KeyboardInterrupt

    model = build(Stopped, "writes", "train")
    x = torch.randn(BATCH, LENGTH, WIDTH)
    before, shared = all_of(model), around()
    more = {**options(check, model, Stopped), "attention_mask": torch.ones(BATCH, LENGTH)}
    with suppress(KeyboardInterrupt):
        check.outcome(ModelProbe(), model, x, **more)
    assert around() == shared
    assert all_of(model) == before


def test_an_average_is_left_as_it_was() -> None:
    model, average = (build(Everything, "", "train") for _ in range(2))

    def updates() -> None:
        with torch.no_grad():
            for p, q in zip(average.parameters(), model.parameters(), strict=True):
                p.lerp_(q, 0.5)
            for b, c in zip(average.buffers(), model.buffers(), strict=True):
                b.copy_(c)

    before = all_of(average)
    checks.ema_tracks(ModelProbe(), model, average=average, decay=0.5, updates=updates)
    assert all_of(average) == before


def test_what_is_looked_at_here_sees_a_change() -> None:
    model = build(Everything, "writes", "train")
    before = all_of(model)
    model(torch.randn(BATCH, LENGTH, WIDTH))
    after = all_of(model)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert {".calls", ".history", ".extra", ".cache", "norm.running_mean itself", "seen itself"} <= changed
    with preserved(model):
        model(torch.randn(BATCH, LENGTH, WIDTH))
    assert all_of(model) == after
