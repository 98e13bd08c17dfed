"""What `torch.compile` makes of a model: how many graphs, and when it makes others.

Nothing is compiled to machine code. The graphs run as they are, and each that is made is counted.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from traceback import FrameSummary
from typing import Any

import torch
from torch import Tensor

from pytest_modelprobe.checks.batch import larger_batches
from pytest_modelprobe.checks.check import check_native
from pytest_modelprobe.checks.outcome import NotApplicableError, Violation
from pytest_modelprobe.checks.session import PreparedModel, Vary, keep_input
from pytest_modelprobe.record import ROOT
from pytest_modelprobe.runs import Mode
from pytest_modelprobe.text import count, listed

from .graphs import break_of, compiling, graph_breaks, layer_of, line_of
from .parity import not_compiled

_Row = tuple[str, str, str, str]
"""The layer, the line, the run and the reason of a graph that should not be."""


@check_native
def compiles_whole(prepared: PreparedModel, *, axis: int = 0) -> Violation | str:
    """Check that `torch.compile` makes one graph of a model, and others only where it has to.

    A forward in evaluation mode has to be one graph, and the same forward again no other. A batch of one row more may
    be another, since torch takes a size for a constant until it changes; a batch of two rows more may not. A forward
    in training mode, before its backward, may be another once.

    Each run is done before without the compiler, so that what the model keeps of its first forward is there. The
    violation names the layer, the line and the reason of the first graph break or graph too many, with a table of all.
    A break may hide a later one in a loop of the layer around it.

    Args:
        prepared: The model and its inputs.
        axis: Batch axis of the inputs.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.compiles_whole(probe, nn.Linear(3, 2), probe.randn(4, 3)))
    ... # doctest: +ELLIPSIS
    compiles_whole holds for Linear: 1 graph of a forward, the same forward, a batch of 5, a batch of 6, ...
    """
    prepared.reference(mode="eval")
    runs: list[tuple[str, Mode, Vary, bool]] = [
        ("a forward", "eval", keep_input, True),
        ("the same forward", "eval", keep_input, False),
        *((f"a batch of {n}", "eval", vary, i == 0) for i, (n, vary) in enumerate(larger_batches(prepared, axis))),
        ("a training step", "train", keep_input, True),
        ("the same step", "train", keep_input, False),
    ]
    model, made, found = prepared.copied(), dict[str, int](), dict[str, tuple[str, _Row]]()

    def backend(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Any:
        made[[*made][-1]] += 1
        return graph.forward

    compiled: Any = torch.compile(model, backend=backend)
    with compiling() as (breaks, failures):
        for when, mode, vary, may in runs:
            run = functools.partial(prepared.run, mode=mode, vary=vary, backward=mode == "train", loss=_leaf)
            if run(model=model, traced=False).error is not None:
                continue
            made[when] = 0
            seen, failed = len(breaks), {code: len(reasons) for code, reasons in failures.items()}
            trace = run(model=compiled, traced=False)
            if trace.error is not None:
                return not_compiled(trace)
            noted = breaks[seen:]
            if len(made) == 1 and made[when] != 1 and not noted:  # torch skips a loop that breaks, and notes nothing
                torch.compiler.reset()
                one_graph: Any = torch.compile(prepared.copied(), backend="eager", fullgraph=True)
                noted = break_of(run(model=one_graph, traced=False).error)
            for one in graph_breaks(prepared.layers.modules, noted):
                row = one.layer, one.line, when, one.reason
                found.setdefault(one.line, (f"breaks the graph of {when}", row))
            if made[when] > (max(1, made["a forward"]) if may else 0):
                first = (reasons[failed.get(code, 0) :][:1] for code, reasons in failures.items())
                again = [_guard(prepared, reason, when) for reasons in first for reason in reasons]
                for row in again or [(ROOT, "", when, count(made[when], "graph"))]:
                    found.setdefault(row[-1], (f"is compiled again for {when}", row))
    if found:
        (said, (layer, line, _, reason)), *_ = found.values()
        return Violation.at(
            layer,
            f"{said}{f' at {line}' if line else ''}: {reason}",
            columns=("layer", "line", "run", "reason"),
            rows=(row for _, row in found.values()),
            advice="TORCH_LOGS=graph_breaks,recompiles says more of each.",
        )
    if not made["a forward"]:
        raise NotApplicableError("torch.compile makes no graph of it, as it computes nothing")
    return f"1 graph of {listed([*made], len(made))}"


def _leaf(_: Any) -> Tensor:
    """Return a loss that needs no backward: none is compiled."""
    return torch.zeros((), requires_grad=True)


def _guard(prepared: PreparedModel, reason: str, when: str) -> _Row:
    """Return the row of a guard that failed: ``0/0: fn._modules['1'].n == 0  # self.n += 1  # net.py:8 in forward``."""
    text = re.sub(r"^\d+/\d+: ", "", reason.partition("\n")[0])
    at = re.search(r"# ([^\s#]+):(\d+) in ", text)  # of a long path it is the end
    frames = [FrameSummary(at[1], int(at[2]), "", lookup_line=False)] if at else []
    path = ".".join(re.findall(r"_modules\['([^']+)'\]", text))
    layer = path if path in prepared.layers.modules else layer_of(prepared.layers.modules, frames)
    return layer, line_of(frames), when, text.partition("  #")[0].strip()
