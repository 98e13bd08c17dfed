"""Two pairs of a healthy model and a wrong one for each property: which checks and hints of `standard` notice the wrong
one, without a reference: `python evidence/blind/pairs.py`. Most pairs are those of the tests.

Run it with another version of this package on `PYTHONPATH` to see what that one notices.
"""

from __future__ import annotations

import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.checks import STANDARD

TESTS = Path(__file__).parents[2] / "tests" / "checks"
PROBE = ModelProbe()


def of(name: str) -> dict[str, Any]:
    return runpy.run_path(str(TESTS / f"test_{name}.py"))


class First(nn.Module):
    """Adds to each node of four graphs those that it is wired to; ``faulty``: of the first graph alone."""

    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.fc, self.head, self.faulty = nn.Linear(3, 3), nn.Linear(3, 2), faulty

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        n = 1 if self.faulty else len(x)
        return self.head(self.fc(x + F.pad(edges[:n] @ x[:n], (0, 0, 0, 0, 0, len(x) - n)))).mean(1)


class Later(nn.Module):
    """``faulty``: rows behind the first are divided by the number of rows."""

    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.fc, self.faulty = nn.Linear(3, 3), faulty

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return torch.cat([y[:1], y[1:] / (len(y) if self.faulty else 1)])


class Gated(nn.Module):
    """``faulty``: the gate is left out."""

    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.fc, self.gate, self.faulty = nn.Linear(6, 6), nn.Parameter(torch.zeros(1)), faulty

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(x) * (1 if self.faulty else self.gate)


class Averaging(nn.Module):
    """Keeps an average in training: beside what is checkpointed; ``faulty``: in it, so that it runs again."""

    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.fc, self.faulty = nn.Linear(4, 4), faulty
        self.register_buffer("average", torch.zeros(4))

    def inside(self, x: Tensor) -> Tensor:
        if self.faulty:
            self.keep(x)
        return self.fc(x).relu()

    def keep(self, x: Tensor) -> None:
        if self.training:
            self.average.lerp_(x.detach().mean(0), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.faulty:
            self.keep(x)
        return checkpoint(self.inside, x, use_reentrant=False) if self.training else self.inside(x)


class Counting(Averaging):
    """Counts its tokens in the same way."""

    def keep(self, x: Tensor) -> None:
        if self.training:
            self.average += len(x)


def pairs() -> Iterator[tuple[str, list[nn.Module], tuple[Any, ...], dict[str, Any]]]:
    """Yield a title, the healthy and the wrong model, and their inputs."""
    gradients, incremental, masked = of("gradients"), of("incremental"), of("masked_positions")
    graphs = (PROBE.randn(4, 6, 3), (PROBE.randn(4, 6, 6, name="edges") > 0).float())
    ids = PROBE.randint(1, incremental["WORDS"], (3, 10), name="ids")
    some = {"attention_mask": torch.ones_like(ids)}

    def both(make: Any) -> list[nn.Module]:
        return [PROBE.build(lambda faulty=faulty: make(faulty)) for faulty in (False, True)]

    yield "the first graph of a batch alone is wired", both(lambda faulty: First(faulty=faulty)), graphs, {}
    yield "later rows depend on the batch size", both(lambda faulty: Later(faulty=faulty)), (PROBE.randn(4, 3),), {}
    x = (PROBE.randn(20, 4),)
    for kind, what in ((Counting, "tokens are counted"), (Averaging, "an average is updated")):
        yield f"{what} again in the backward", both(lambda faulty, kind=kind: kind(faulty=faulty)), x, {}
    words = PROBE.randint(0, 40, (3, 12))
    given = (words, torch.ones(3, 12)), {"labels": words.flip(1)}
    for name in ("loss", "z_loss"):
        yield (
            f"the {name} counts what is masked",
            both(lambda faulty, name=name: masked["Tagger"](name if faulty else "")),
            *given,
        )
    for name, what in (("Sums", "a state keeps padding"), ("Masked", "a cache forgets the mask")):
        yield what, both(lambda faulty, name=name: incremental[name](faulty=faulty)), (ids,), some
    yield (
        "angles are detached",
        both(lambda faulty: gradients["Potential"](Tensor.detach if faulty else (lambda x: x))),
        (PROBE.randn(2, 4, 3),),
        {},
    )
    yield (
        "a backward forgets 1 % of a term",
        both(lambda faulty: gradients["between"](lambda x: gradients["Swish"].apply(x, 0.01 if faulty else 0.0))),
        (PROBE.randn(5, 6),),
        {},
    )
    yield (
        "a class token is never used",
        both(lambda faulty: gradients["Vision"](token_is_used=not faulty)),
        (PROBE.randn(2, 4, 16),),
        {},
    )
    yield "a gate is forgotten", both(lambda faulty: Gated(faulty=faulty)), (PROBE.randn(5, 6),), {}


def alarms(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
    """Return each standard check that is broken or a hint, and its first line. None of these classes can be pickled."""
    found = {}
    for name, check in STANDARD.items():
        if name == "copy_and_pickle":
            continue
        outcome = check.outcome(PROBE, model, *args, kwargs=kwargs)
        if outcome.verdict in ("broken", "hint"):
            found[name] = f"{outcome.verdict}: {outcome.text.partition(chr(10))[0]}"
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    for title, (healthy, wrong), args, kwargs in pairs():
        before, now = alarms(healthy, args, kwargs), alarms(wrong, args, kwargs)
        new = {name: said for name, said in now.items() if before.get(name) != said}
        told = "; ".join(f"`{name}`: {said}" for name, said in new.items()) or "not noticed"
        print(f"| {title} | {'; '.join(before.values()) or 'none'} | {told} |", flush=True)


main()
