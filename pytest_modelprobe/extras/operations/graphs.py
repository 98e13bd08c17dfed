"""The first operation of a graph that differs: from the model, or as a backend of `torch.compile` computes it."""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node

from pytest_modelprobe._torch import Operation
from pytest_modelprobe.models import flatten, map_tensors
from pytest_modelprobe.runs import in_float32, widened

from .alignment import first_difference
from .stream import DispatchRecorder, Recorder, Step

_TORCH = str(Path(torch.__file__).parent)
_Recorder: TypeAlias = DispatchRecorder | Recorder
_FRAME = re.compile(r'File "(.+?)", line (\d+)')


def of_program(
    graph: GraphModule, inputs: Sequence[Any], model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a sentence with the first operation of a graph of a model that is another one in the model.

    Both run in float64, so that rounding is none.

    Args:
        graph: The graph, as `torch.compile` traces it or as an exported program has it.
        inputs: What the graph takes.
        model: The model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    is_exported = any(isinstance(node.target, Operation) for node in graph.graph.nodes)
    now, then = (DispatchRecorder() if is_exported else Recorder() for _ in range(2))
    steps = [
        _recorded(now, graph, functools.partial(_Located(graph, now).run, *inputs)),
        _recorded(then, model, functools.partial(model, *args, **kwargs)),
    ]
    if said := first_difference(*steps):
        yield f"First operation that differs: {said}."


def _recorded(recorder: _Recorder, module: nn.Module, run: functools.partial[Any]) -> tuple[Step, ...]:
    """Return the operations of a run in float64."""
    args, kwargs = map_tensors(lambda x: x.to(widened(x.dtype, torch.float64)), (run.args, run.keywords))
    with in_float32(module, torch.float64), torch.no_grad(), recorder:
        run.func(*args, **kwargs)
    return recorder.steps()


class _Located(Interpreter):
    """Runs a graph, and tells a recorder the line of the model that each node is of."""

    def __init__(self, graph: GraphModule, recorder: _Recorder) -> None:
        super().__init__(graph)
        self._recorder = recorder

    def run_node(self, n: Node) -> Any:
        """Run a node."""
        frames = [frame for frame in _FRAME.findall(n.stack_trace or "") if not frame[0].startswith(_TORCH)]
        self._recorder.location = f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else None
        return super().run_node(n)


# --- a graph as a backend computes it -----------------------------------------------------------------------------


def of_compiled(
    graph: GraphModule,
    inputs: Sequence[Any],
    compiled: Callable[[nn.Module], Callable[..., Any]],
    agree: Callable[[Tensor, Tensor], bool],
) -> Iterator[str]:
    """Yield a sentence with the first operation of a graph that differs as a backend computes it.

    The graph is cut behind one of its nodes, and compiled. If all that the nodes behind it take is the same, the first
    operation that differs is behind the cut, else before it.

    Args:
        graph: The graph.
        inputs: What it takes.
        compiled: Compiles a module.
        agree: Whether two tensors are the same but for rounding.
    """
    nodes = [*graph.graph.nodes][:-1]
    start = sum(node.op == "placeholder" for node in nodes) - 1

    def values(last: int, compiled: Callable[[nn.Module], Callable[..., Any]]) -> dict[str, Any]:
        cut, names = _cut(graph, nodes[last])
        return dict(zip(names, compiled(cut)(*map_tensors(torch.clone, inputs)), strict=True))

    def differs(now: dict[str, Any], then: dict[str, Any]) -> bool:
        there = dict(flatten("", then).tensors)
        return any(not agree(there[path], x) for path, x in flatten("", now).tensors)

    def is_other(last: int) -> bool:
        return differs(values(last, compiled), values(last, lambda cut: cut))

    if not is_other(len(nodes) - 1):
        return
    first = bisect_left(range(len(nodes)), True, lo=start, key=is_other)
    before, now, recorder = values(first - 1, compiled), values(first, compiled), Recorder()
    ran = _Located(graph, recorder)
    for node in nodes[: first + 1]:
        if node.op == "get_attr":
            ran.env[node] = ran.run_node(node)
        elif node.name in before:
            ran.env[node] = before[node.name]
    with recorder:
        after = {**before, nodes[first].name: ran.run_node(nodes[first])}
    if differs(now, after):  # else what differed before grew
        for step in recorder.steps()[:1]:
            yield f"First operation that differs: {step.operation}, as the backend computes it."


def _cut(graph: GraphModule, last: Node) -> tuple[GraphModule, list[str]]:
    """Return a graph up to a node, and the names of the nodes whose values it returns: those that other nodes take."""
    cut, made = Graph(), dict[Node, Node]()
    for node in graph.graph.nodes:
        made[node] = cut.node_copy(node, made.__getitem__)
        if node is last:
            break
    kept = [node for node in made if node is last or (node.op != "get_attr" and not made.keys() >= node.users.keys())]
    cut.output(tuple(made[node] for node in kept))
    return GraphModule(graph, cut), [node.name for node in kept]
