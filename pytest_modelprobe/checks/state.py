"""What a forward leaves behind: nothing in the model in evaluation mode, nothing in its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelprobe.layers import attributes
from pytest_modelprobe.record import Plain, qualified
from pytest_modelprobe.report.text import count

from .agreement import broken, disagreements
from .check import check
from .outcome import Break
from .trial import Trial, hooked, plain


@check
def state_unchanged_by_forward(trial: Trial) -> Break | str:
    """Check that a forward in evaluation mode changes no parameter and no buffer, and nothing that the next one sees.

    What a module keeps for itself besides, a cache of positions say, may change as long as the outputs do not.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe, model = ModelProbe(), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    >>> print(checks.state_unchanged_by_forward(probe, model, probe.randn(4, 3)))
    state_unchanged_by_forward holds for Sequential: 7 parameters and buffers, 3 forwards
    """
    rows_of = {path: x for path, x in trial.dense if x.dim() and x.shape[0] > 1}

    def rolled(path: str, x: Tensor) -> Tensor:
        return x.roll(1, 0) if path in rows_of else x

    fresh = trial.run(mode="eval", vary=rolled)
    with trial.lasting():
        before = {name: tensor.detach().clone() for name, tensor in _state(trial.model)}
        kept = _attributes(trial)
        one = trial.reference(mode="eval")
        changed = [name for name, tensor in _state(trial.model) if not _same(tensor, before.get(name))]
        if changed:
            first = changed[0]
            return Break(
                layer=first,
                line=f"{first} is changed by a forward in evaluation mode",
                columns=("changed",),
                rows=tuple((name,) for name in changed),
                advice="Look for running statistics that do not ask for self.training, and for writes into a buffer.",
            )
        two = trial.other(mode="eval")
        found = disagreements(one, two, tolerance=0.0, integers=True)
        if not found and fresh.error is None:  # what was kept of the first inputs may do for them alone
            found = disagreements(fresh, trial.run(mode="eval", vary=rolled), tolerance=0.0, integers=True)
        now = {name for name, value in _attributes(trial).items() if value != kept.get(name)}
    if found:
        what = f"; set meanwhile: {', '.join(sorted(now))}" if now else ""
        return broken(
            found,
            "gives out another {path} after a forward, by {by}",
            f"Look for what it keeps of its last forward: a cache, a counter, a hidden state{what}.",
        )
    return f"{count(len(before), 'parameters and buffer')}, 3 forwards"


@check
def inputs_unchanged_by_forward(trial: Trial) -> Break | str:
    """Check that the model writes into none of its inputs.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.inputs_unchanged_by_forward(probe, nn.ReLU(), probe.randn(4, 3)))
    inputs_unchanged_by_forward holds for ReLU: 1 input
    >>> print(checks.inputs_unchanged_by_forward.outcome(probe, nn.ReLU(inplace=True), probe.randn(4, 3)).layer)
    (root)
    """
    given: dict[str, Tensor] = {}
    versions: dict[str, int] = {}
    blamed: list[tuple[str, str]] = []

    def remember(path: str, x: Tensor) -> Tensor:
        given[path] = x
        versions[path] = x._version
        return x

    running: list[str] = []

    def look() -> None:
        for path, x in given.items():
            if x._version != versions[path]:
                versions[path] = x._version
                blamed.append((running[-1], path))

    def begin(name: str, *_: Any) -> None:
        look()  # the code of the layer around
        running.append(name)

    def end(*_: Any) -> None:
        look()
        running.pop()

    with hooked(trial.layers.modules, begin, end):
        trial.reference(mode="eval", vary=remember)
    if blamed:
        layer, path = blamed[0]
        return Break(
            layer=layer,
            line=f"{layer} writes into {path}, which the caller may use again",
            columns=("written by", "input"),
            rows=tuple(blamed),
            advice="Look for an operation in place (inplace=True, x += ..., x[...] = ...), and copy before it.",
        )
    return count(len(given), "input")


def _state(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _attributes(trial: Trial) -> dict[str, Plain]:
    return {
        qualified(name, key): value
        for name, module in trial.layers.modules.items()
        for key, value in attributes(module).items()
    }


def _same(now: Tensor, before: Tensor | None) -> bool:
    if before is None or now.shape != before.shape or now.dtype != before.dtype:
        return False
    now, before = plain(now), plain(before)
    return torch.equal(now, before) or torch.equal(torch.nan_to_num(now), torch.nan_to_num(before))
