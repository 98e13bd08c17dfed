"""Equal results when the model is compiled, and when it is exported.

What a compiler makes of a model in half precision rounds otherwise, so such a model is compared in float32.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelprobe._torch import COMPILED_CHILD
from pytest_modelprobe.checks.agreement import Disagreement, changed, check_not_random, violation_of
from pytest_modelprobe.checks.check import Property, check_native
from pytest_modelprobe.checks.outcome import NotApplicableError, Violation, line_of
from pytest_modelprobe.checks.parity import ELSEWHERE, other_gradients
from pytest_modelprobe.checks.rounding import is_rounded, limit, relative_error, same
from pytest_modelprobe.checks.session import LayerTensor, PreparedModel, Trace, copy_of, set_mode
from pytest_modelprobe.extension import explained
from pytest_modelprobe.models import CallTracer, Layers, ModuleCall, flatten, flatten_call, map_tensors
from pytest_modelprobe.record import ROOT
from pytest_modelprobe.text import count

from .graphs import compiling

_BACKEND = "Without it, the graph that it is given computes something else: look for another version of the backend."
_COMPILED = "Look for code that depends on whether it is compiled, and for writes to attributes, which a graph omits."


def _in_float32(compared: Property) -> Property:
    """Compare a model that rounds to half precision converted to float32."""

    @functools.wraps(compared)
    def found(prepared: PreparedModel, **options: Any) -> Violation | str:
        if prepared.is_rounded:
            # Its code may cast to half precision what meets the weights.
            with contextlib.suppress(NotApplicableError), prepared.converted() as wide:
                return compared(wide, **options)
        return compared(prepared, **options)

    return found


@check_native
@_in_float32
def compile_parity(
    prepared: PreparedModel, *, backend: str | Callable[..., Any] = "aot_eager", tolerance: float | None = None
) -> Violation | str:
    """Check that the compiled model returns the same, and the same gradients.

    Where an output differs, what the layers take and return is compiled too: the violation names the first layer that
    is another one there, or the model where none is. Of gradients it names the parameter.

    If an output differs, it also names the first operation that does, with its line: as the backend computes it, of the
    graph that it is given, or else of that graph, beside the model.

    Args:
        prepared: The model and its inputs.
        backend: Backend of `torch.compile`; ``"aot_eager"`` needs no compiler.
        tolerance: The largest relative change that passes, by default 1e-3. A model in half precision is compiled in
            float32.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.compile_parity(probe, nn.Linear(3, 2), probe.randn(4, 3)))
    compile_parity holds for Linear: 1 output, 2 parameters
    """

    def compiled(model: nn.Module) -> Any:
        torch.compiler.reset()  # else torch compiles the same code only some times
        return torch.compile(model, backend=backend)

    def told(model: nn.Module) -> Any:
        return prepared.run(model=compiled(model), traced=False).output

    def agree(x: Tensor, y: Tensor) -> bool:
        return relative_error(x, y) <= limit(x, tolerance)

    def explain() -> list[str]:
        graphs = _graphs(prepared)
        for graph, inputs in graphs:
            if said := explained("compiled graph", graph, inputs, compiled, agree):
                return [*said, _BACKEND]
        [(graph, inputs)] = graphs  # of several, what runs between them would read as missing
        return [*explained("graph", graph, inputs, _evaluated(prepared), *prepared.copied_inputs()), _COMPILED]

    one = prepared.reference(mode="eval", backward=True)
    with compiling():
        two = prepared.run(mode="eval", backward=True, model=compiled(prepared.copied()), traced=False)
        if two.error is not None:
            return not_compiled(two)
        two.gradients = {name.removeprefix(f"{COMPILED_CHILD}."): gradient for name, gradient in two.gradients.items()}
        found = _in_program(prepared, one, two, told, explain, "when compiled", tolerance)
    return found or f"{count(len(one.final), 'output')}, {count(len(one.gradients), 'parameter')}"


def _graphs(prepared: PreparedModel) -> list[tuple[torch.fx.GraphModule, tuple[Any, ...]]]:
    """Return the graphs that `torch.compile` makes of the model, each with what it takes."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            graphs.append((graph, map_tensors(lambda x: copy_of(x).requires_grad_(x.requires_grad), inputs)))
            return graph(*inputs)

        return run

    torch.compiler.reset()
    compiled: Any = torch.compile(prepared.copied(), backend=backend)
    prepared.run(mode="eval", backward=True, model=compiled, traced=False)
    return graphs


def not_compiled(trace: Trace) -> Violation:
    """Return the violation of a run that raised because it was compiled."""
    return Violation.at(
        ROOT,
        f"cannot be compiled: {trace.failure.removeprefix(f'{ROOT} raised ')}",
        advice="TORCH_LOGS=graph_breaks shows what cannot be traced; torch.compiler.disable excludes it.",
    )


@check_native
@_in_float32
def export_parity(prepared: PreparedModel, *, tolerance: float | None = None) -> Violation | str:
    """Check that the model can be exported by `torch.export`, and that the program returns the same.

    Where it does not, what the layers take and return is exported too, and the violation names the first layer that is
    another one there, and the first operation of the program that is, with its line.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> print(checks.export_parity(probe, nn.Linear(3, 2), probe.randn(4, 3)))
    export_parity holds for Linear: 1 output
    """
    one = prepared.reference(mode="eval")
    try:
        program = _exported(prepared, _evaluated(prepared))
    except Exception as error:  # noqa: BLE001 - whatever export raises of a model
        return Violation.at(
            ROOT,
            f"cannot be exported: {line_of(error)}",
            advice="Look for control flow that depends on the contents of a tensor.",
        )
    two = prepared.run(model=program, traced=False)
    if two.error is not None:
        return Violation.at(
            ROOT,
            f"does not run as an exported program: {two.failure}",
            advice="Look for code that depends on a shape or a device: torch.export.export(...) shows the program.",
        )

    def told(model: nn.Module) -> Any:
        return prepared.run(model=_exported(prepared, model, strict=False), traced=False).output

    def explain() -> list[str]:
        given = prepared.copied_inputs()
        return [*explained("graph", program, given, _evaluated(prepared), *given), _COMPILED]

    found = _in_program(prepared, one, two, told, explain, "when exported", tolerance)
    return found or count(len(one.final), "output")


def _evaluated(prepared: PreparedModel) -> nn.Module:
    """Return a copy of the model in evaluation mode."""
    other = prepared.copied()
    set_mode(other, "eval")
    return other


def _exported(prepared: PreparedModel, model: nn.Module, **options: Any) -> nn.Module:
    args, kwargs = prepared.copied_inputs()
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        return torch.export.export(model, args, kwargs, **options).module()


def _in_program(
    prepared: PreparedModel,
    one: Trace,
    two: Trace,
    told_by: Callable[[nn.Module], Any],
    explain: Callable[[], list[str]],
    how: str,
    tolerance: float | None,
) -> Violation | None:
    """Return where a program differs: the first layer that takes or returns something else, or the model as a whole.

    Args:
        prepared: The model and its inputs.
        one: A run of the model.
        two: The run of the program.
        told_by: Makes a program of a model and returns its output.
        explain: Returns sentences on the operation that differs, and where to look.
        how: What was done with the model.
        tolerance: The largest relative change that passes.
    """
    far = {
        path: relative_error(x, two.final[path]) if path in two.final else math.inf
        for path, x in one.final.items()
        if x.is_floating_point()
    }
    path = next((path for path in far if not far[path] <= limit(one.final[path], tolerance, least=ELSEWHERE)), None)
    if path is None:
        found = other_gradients(one, two, tolerance, how, _COMPILED) if two.gradients else None
        if found is not None:
            check_not_random(prepared)
        return found
    check_not_random(prepared)
    told = _Told(prepared.copied())
    set_mode(told, "eval")
    places = told.places  # the attribute is put back after an export, by a copy
    inside: list[Disagreement] = []
    with contextlib.suppress(Exception):  # with so many outputs it may be no program
        there = dict(zip(places, told_by(told), strict=True))
        for x, place in zip(prepared.run(model=told).output, told.places, strict=True):
            known = place[-1] and any(same(x, one.layer_tensor.tensor) for one in inside)  # a layer before returned it
            by = relative_error(x, there[place]) if place in there and not known else 0.0
            if not by <= limit(x, tolerance, least=ELSEWHERE):
                layer, index, where, is_inside = place
                inside.append(Disagreement(LayerTensor(layer, index, where, x, is_inside), by))
    advice = _COMPILED
    with contextlib.suppress(Exception):  # what is cut off may not compile, and not every model runs in float64
        advice = " ".join(explain())
    if inside:
        return violation_of(inside, f"returns another {{path}} {how}: {{changed}}", advice)
    return Violation.at(ROOT, f"returns another {path} {how}: {changed(far[path])}", advice=advice)


class _Told(nn.Module):
    """Returns what the layers of a model take and return, in the order of computation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.places: list[tuple[str, int, str, bool]] = []
        """Layer, call and path of each tensor and whether a layer inside takes it, as in a `LayerTensor`."""

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Run the model."""
        self.places.clear()
        told: list[Tensor] = []

        def tell(call: ModuleCall, tensors: list[tuple[str, Tensor]], child: str = "") -> None:
            for path, x in tensors:
                if is_rounded(x):
                    self.places.append((call.layer, call.index, f"{path}{child}", bool(child)))
                    told.append(x.clone())

        def begin(call: ModuleCall, args: Any, kwargs: Any) -> None:
            if call.parent is not None:
                number = f" (call {call.index + 1})" if call.index else ""
                tell(call.parent, flatten_call(args, kwargs).tensors, f" of {call.layer}{number}")

        def end(call: ModuleCall, args: Any, output: Any) -> None:
            tell(call, flatten("output", output).tensors)

        with CallTracer(Layers(self.model).modules, ModuleCall, before=begin, after=end):
            self.model(*args, **kwargs)
        return told
