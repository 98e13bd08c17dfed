"""What a version of a model has of what decides whether a test of it may fail, in plain torch.

    python facts.py LIBRARY DIR FILE [I/N]      # run in each of the two environments, with the same DIR

A mode layer is a module that answers otherwise if its own ``training`` alone is set: each is called twice where the
model calls it first, as a copy, with the same inputs and seed, unless its source never reads the mode. Dropout that is
never called counts by its class.
"""

from __future__ import annotations

import copy
import inspect
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from eligible import Facts, same
from models import Inputs, models_of
from torch import Tensor, nn

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
PLAIN = (bool, int, float, str)
MOST_ITEMS = 16
"""Longer tuples are tables, not settings."""


def facts(model: nn.Module, inputs: Inputs) -> Facts:
    """Return what a version of a model has of what the rule names."""
    stored = {key: tensor for key, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    own = {name: tensor for name, tensor in named if name in stored}
    found: Facts = {
        "checkpoint": {key: f"{tuple(tensor.shape)} {tensor.dtype}" for key, tensor in stored.items()},
        "order": [name for name, _ in model.named_parameters()],
        "tied": {key: sorted(other for other in own if other != key and own[other] is own[key]) for key in own},
        "trainable": {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)},
        "inputs": described([*inputs.args, inputs.kwargs]),
    }
    before = _attributes(model)
    called, by_mode, output = watched(model, inputs)
    found["outputs"] = described(output)
    after = _attributes(model)
    found["attributes"] = {
        name: {key: value for key, value in own.items() if same(value, after[name].get(key))}
        for name, own in before.items()
    }
    modules = dict(model.named_modules())
    by_mode |= {name for name, module in modules.items() if name not in called and _drops(module)}
    found["mode layers"] = {
        name: [type(module).__name__, found["attributes"][name]] for name, module in modules.items() if name in by_mode
    }
    return found


def _drops(module: nn.Module) -> bool:
    rates = (getattr(module, name, None) for name in ("p", "drop_prob", "drop_rate"))
    return "drop" in type(module).__name__.lower() and any(isinstance(rate, float) and rate > 0 for rate in rates)


def _attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the plain attributes of each module, and its short public tuples of them."""
    return {
        name: {
            key: value if type(value) in PLAIN else repr(tuple(value))
            for key, value in vars(module).items()
            if key not in OF_EVERY_MODULE and (type(value) in PLAIN or (key[0] != "_" and _is_short(value)))
        }
        for name, module in model.named_modules()
    }


def _is_short(value: Any) -> bool:
    known = type(value) in (tuple, list, torch.Size) and len(value) <= MOST_ITEMS
    return known and all(type(one) in PLAIN for one in value)


def described(value: Any) -> dict[str, str]:
    """Return the path of each tensor in a nested value, with its shape and dtype."""
    return {path: f"{tuple(tensor.shape)} {tensor.dtype}" for path, tensor in tensors("", value)}


def tensors(path: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a nested value, also in the attributes of objects, each with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif depth > 6 or isinstance(value, (type, nn.Module)):
        return
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from tensors(f"{path}.{key}", one, depth + 1)
    elif isinstance(value, (list, tuple)):
        names: Iterable[Any] = getattr(value, "_fields", range(len(value)))
        for index, one in zip(names, value, strict=True):
            yield from tensors(f"{path}[{index}]", one, depth + 1)
    elif hasattr(value, "__dict__") and not callable(value):
        yield from tensors(path, vars(value), depth + 1)


@torch.no_grad()
def watched(model: nn.Module, inputs: Inputs) -> tuple[set[str], set[str], Any]:
    """Return which modules are called, which of them answer otherwise in training mode, and the output."""
    given: dict[str, Any] = {}
    hooks = []

    def look(name: str, args: Any, kwargs: Any) -> None:
        if name not in given:
            try:
                given[name] = copy.deepcopy((args, kwargs))
            except (RuntimeError, TypeError):  # what cannot be copied is given as it is
                given[name] = args, kwargs

    modules = dict(model.named_modules())
    for name, module in modules.items():
        hook = partial(lambda name, _, args, kwargs: look(name, args, kwargs), name)
        hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    torch.manual_seed(0)
    output = model(*inputs.args, **inputs.kwargs)
    for handle in hooks:
        handle.remove()
    reading = {kind for kind in {type(modules[name]) for name in given} if _reads_mode(kind)}
    by_mode = {
        name
        for name, own in given.items()
        if type(modules[name]) in reading and not _equal(*(_answer(modules[name], m, *own) for m in (False, True)))
    }
    return set(given), by_mode, output


def _reads_mode(kind: type[nn.Module]) -> bool:
    """Whether the source of a class may read the mode. Others need not be called twice."""
    own = [one for one in kind.__mro__ if one not in nn.Module.__mro__]
    try:
        return any("training" in inspect.getsource(one) for one in own)
    except (OSError, TypeError):  # a class without source
        return True


def _answer(module: nn.Module, mode: bool, args: Any, kwargs: Any) -> list[Tensor] | str:
    """Return what a copy of a module gives out with its own mode set, but not that of its children."""
    try:
        module, args, kwargs = copy.deepcopy((module, args, kwargs))
        module.training = mode
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return [tensor.clone() for _, tensor in tensors("", module(*args, **kwargs))]
    except Exception as error:  # noqa: BLE001 - a batch norm refuses one value in training mode
        return f"{type(error).__name__}: {error}"


def _equal(x: list[Tensor] | str, y: list[Tensor] | str) -> bool:
    if isinstance(x, str) or isinstance(y, str):
        return type(x) is type(y)
    return len(x) == len(y) and all(
        a.shape == b.shape and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
        if a.is_floating_point()
        else a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(x, y, strict=True)
    )


def main(library: str, folder: Path, path: Path, part: str = "1/1") -> None:
    models = models_of(library)
    first, step = map(int, part.split("/"))
    found: dict[str, Facts] = {}
    for name in [*models][first - 1 :: step]:
        try:
            if not [*folder.glob(f"{name}.weights*")]:
                models[name].save(folder)
            model, _ = models[name].load(folder)
            found[name] = facts(model, models[name].inputs())
        except Exception as error:  # noqa: BLE001 - a model that a version cannot run is told and passed over
            found[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(name, found[name].get("error", ""), flush=True)
        path.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    library, folder, file, *part = sys.argv[1:]
    main(library, Path(folder), Path(file), *part)
