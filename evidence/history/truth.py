"""What really changed, measured apart from the tool, in float64.

    python truth.py save LIBRARY DIR [I/N]
    python truth.py compare LIBRARY DIR

``save`` also makes the weights with which both versions run; I/N is a slice of the models. Outputs are compared as they
are; gradients of each floating output by the norm and a projection of every parameter's gradient.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
from models import Inputs, models_of
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Found = dict[str, Any]


class InFloat64(TorchFunctionMode):
    """Where code asks for float32 it gets float64: else its roundings would be a change."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        kwargs = {key: _widened(value) for key, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **kwargs)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _double(value: Any) -> Any:
    """Return inputs with every floating tensor in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _double(one) for key, one in value.items()}
    return type(value)(map(_double, value)) if isinstance(value, (list, tuple)) else value


def measured(model: nn.Module, inputs: Inputs) -> Found:
    """Return the floating outputs of a model by their paths, and of each the gradients of a random projection.

    The loss is random: squares would be the same whatever a last norm gets. Which parameters are frozen does not
    count: what they compute is the same.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(0)
    outputs = {
        path: tensor
        for path, tensor in tensors("output", model(*inputs.args, **inputs.kwargs))
        if tensor.is_floating_point()
    }
    gradients = {}
    for path, output in outputs.items():
        if output.grad_fn is None:
            continue
        loss = (output * _projection(output)).mean()
        found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
        gradients[path] = {
            name: [0.0, 0.0] if one is None else [one.norm().item(), (one * _projection(one)).sum().item()]
            for name, one in zip(parameters, found, strict=True)
        }
    return {"outputs": {path: output.detach().clone() for path, output in outputs.items()}, "gradients": gradients}


def tensors(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a nested value, each with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from tensors(f"{path}.{key}", one)
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            yield from tensors(f"{path}[{index}]", one)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors(path, vars(value))


def _projection(tensor: Tensor) -> Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def in_float64(model: nn.Module, inputs: Inputs) -> tuple[Found, str]:
    """Return what `measured` returns in float64; in float32, and why, if the model cannot run in float64."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with InFloat64():
            return measured(model.double(), Inputs(_double(inputs.args), _double(inputs.kwargs))), ""
    except (RuntimeError, TypeError, ValueError) as error:
        torch.set_default_dtype(before)
        return measured(model.float(), inputs), f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        torch.set_default_dtype(before)


def changes(now: Found, then: Found) -> dict[str, float]:
    """Return how far the outputs that both versions have are apart, and their gradients: 0 to inf, relative."""
    pairs = paired(now["outputs"], then["outputs"])
    outputs = [_distance(now["outputs"][a], then["outputs"][b]) for a, b in pairs]
    both = [(now["gradients"].get(a), then["gradients"].get(b)) for a, b in pairs]
    gradients = [_gradient_distance(a, b) for a, b in both if a is not None and b is not None]
    return {"outputs": max(outputs, default=float("inf")), "gradients": max(gradients, default=0.0)}


def paired(now: dict[str, Tensor], then: dict[str, Tensor]) -> list[tuple[str, str]]:
    """Return the paths of the same outputs: by name, else by order and shape."""
    pairs = [(path, path) for path in now if path in then]
    left = [path for path in then if path not in now]
    for path in now:
        found = next((other for other in left if then[other].shape == now[path].shape), None)
        if path not in then and found is not None:
            left.remove(found)
            pairs.append((path, found))
    return pairs


def only_one(now: Found, then: Found) -> list[str]:
    """Return the paths of outputs that one version alone has."""
    pairs = paired(now["outputs"], then["outputs"])
    sides = ((now, {a for a, _ in pairs}), (then, {b for _, b in pairs}))
    return [path for found, known in sides for path in found["outputs"] if path not in known]


def _distance(x: Tensor, y: Tensor) -> float:
    """Return how far two tensors are apart, relative to the norm of the second; inf and NaN are equal to themselves."""
    if x.shape != y.shape or not torch.equal(x.isfinite(), y.isfinite()):
        return float("inf")
    x, y = x[x.isfinite()].double(), y[y.isfinite()].double()
    return float((x - y).norm() / y.norm().clamp_min(1e-300))


def _gradient_distance(now: dict[str, list[float]], then: dict[str, list[float]]) -> float:
    """Return how far gradients are apart, relative to the norm of all.

    Where names differ, one may stand for another parameter now: then all are paired by their size.
    """
    x, y = ([one[name] for name in then] if now.keys() == then.keys() else sorted(one.values()) for one in (now, then))
    if len(x) != len(y):  # several parameters are one
        x, y = ([[torch.tensor([norm for norm, _ in one], dtype=torch.float64).norm().item()]] for one in (x, y))
    return _distance(*(torch.tensor(one, dtype=torch.float64) for one in (x, y)))


def main(command: str, library: str, folder: Path, part: str = "1/1") -> None:
    models = models_of(library)
    first, step = map(int, part.split("/"))
    for name in [*models][first - 1 :: step]:
        path = folder / f"{name}.truth.pt"
        if command == "compare" and not path.exists():
            continue
        row: dict[str, Any] = {"model": name}
        try:
            if command == "save":
                models[name].save(folder)
            model, row["unmatched"] = models[name].load(folder)
            found, row["not in float64"] = in_float64(model, models[name].inputs())
            if command == "save":
                torch.save(found, path)
            else:
                then = torch.load(path)
                row["really"], row["outputs of one"] = changes(found, then), only_one(found, then)
        except Exception as error:  # noqa: BLE001 - a model that a version cannot run is told and passed over
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        print(json.dumps(row)[:300], flush=True)
        path.with_suffix(".json").write_text(json.dumps(row), "utf-8")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    command, library, folder, *part = sys.argv[1:]
    main(command, library, Path(folder), *part)
