"""Where `torch.compile` breaks the graph of a model."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from traceback import FrameSummary
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from pytest_modelprobe._torch import compilation_notes
from pytest_modelprobe.models import Layers, map_tensors, preserved, seeding
from pytest_modelprobe.record import ROOT, Record
from pytest_modelprobe.runs import quiet

_TORCH = str(Path(torch.__file__).parent)
_RESUMED = re.compile(r"^torch_dynamo_resume_in_|_at_\d+$")
"""What torch adds to the name of a function that goes on behind a graph break."""


class GraphBreak(NamedTuple):
    """A place where a graph ends."""

    layer: str
    line: str
    """File and line, such as ``net.py:8``."""
    code: str
    """The function and the text of the line, such as ``forward: print(x)``."""
    reason: str


@contextlib.contextmanager
def compiling() -> Iterator[tuple[list[Any], dict[Any, list[str]]]]:
    """Let `torch.compile` compile within the block, and yield what torch keeps of it, see `compilation_notes`."""
    torch.compiler.reset()
    try:
        with quiet(), warnings.catch_warnings(action="ignore"), torch.compiler.set_stance("default"):
            yield compilation_notes()
    finally:
        torch.compiler.reset()


def graph_breaks(modules: Mapping[str, nn.Module], notes: Sequence[Any]) -> list[GraphBreak]:
    """Return each graph break once. Torch notes it again for each function that the code is inlined into.

    From Python 3.12 on, torch also breaks the graph before a comprehension of a function that calls what breaks it.
    """
    found: dict[str, GraphBreak] = {}
    callers = {(frame.filename, frame.name) for note in notes for frame in note.user_stack[:-1]}
    for note in notes:
        if note.reason == "comprehension_graph_break" and {(f.filename, f.name) for f in note.user_stack} & callers:
            continue
        line, frame = line_of(note.user_stack), _innermost(note.user_stack)
        code = "" if frame is None else f"{_RESUMED.sub('', frame.name)}: {(frame.line or '').rstrip(':')}"
        reason = str(note.reason).strip().partition("\n")[0]
        found.setdefault(line, GraphBreak(layer_of(modules, note.user_stack), line, code, reason))
    return [*found.values()]


def break_of(error: BaseException | None) -> list[Any]:
    """Return the note of the graph break that ``fullgraph=True`` raises. Torch notes none in a loop, which it skips."""
    stack = getattr(error, "real_stack", None)
    return [SimpleNamespace(reason=error, user_stack=stack)] if stack else []


def layer_of(modules: Mapping[str, nn.Module], frames: Sequence[FrameSummary]) -> str:
    """Return the first layer whose forward has the line of a frame, the innermost if several have."""
    forwards = _forwards(modules)
    for frame in reversed(frames):
        for code, name in forwards.items():
            if code.co_filename.endswith(frame.filename) and frame.lineno in {line for *_, line in code.co_lines()}:
                return name
    return ROOT


def line_of(frames: Sequence[FrameSummary]) -> str:
    """Return the file and the line of the innermost frame outside torch."""
    frame = _innermost(frames)
    return "" if frame is None else f"{Path(frame.filename).name}:{frame.lineno}"


def with_graph_breaks(record: Record, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record:
    """Return the record with the attribute ``graph_breaks`` of layers, from a compiled forward on copies of the inputs.

    Layers that share the code of their forward are compiled once. So the first of them has the attribute.
    """
    modules = Layers(model).modules
    called = {name: modules[name] for name, layer in record.layers.items() if layer.calls and name in modules}
    of_a_loop = list[Any]()
    with preserved(model), seeding.forked_rng(), compiling() as (notes, _):
        args, kwargs = map_tensors(torch.clone, (args, kwargs))

        def run(*, fullgraph: bool) -> None:
            torch.compile(model, backend=lambda graph, _: graph.forward, fullgraph=fullgraph)(*args, **kwargs)

        try:
            run(fullgraph=True)
        except Exception as error:  # noqa: BLE001 - what is no graph break is raised again
            of_a_loop = break_of(error)
        run(fullgraph=False)  # the full graph may have numbers read from tensors, which break the graph elsewhere
        found = graph_breaks(called or modules, [*notes, *of_a_loop])
    layers = dict(record.layers)
    for name in (ROOT, *_forwards(called or modules).values()):
        told = sorted(f"{one.code}: {one.reason}" for one in found if one.layer == name)
        attributes = {**layers[name].attributes, "graph_breaks": "; ".join(told) or "none"}
        layers[name] = dataclasses.replace(layers[name], attributes=attributes)
    return dataclasses.replace(record, layers=layers)


def _forwards(modules: Mapping[str, nn.Module]) -> dict[CodeType, str]:
    """Return the code of each forward with the first layer that has it."""
    found: dict[CodeType, str] = {}
    for name, module in modules.items():
        code = getattr(inspect.unwrap(module.forward), "__code__", None)
        if code is not None:
            found.setdefault(code, name)
    return found


def _innermost(frames: Sequence[FrameSummary]) -> FrameSummary | None:
    """Return the innermost frame outside torch."""
    own = [frame for frame in frames if not frame.filename.startswith(_TORCH)] or frames
    return own[-1] if own else None
