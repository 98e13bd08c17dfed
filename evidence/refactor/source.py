"""A class with another piece of source: the way a commit changes a model."""

from __future__ import annotations

import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Weights = Callable[[Tensors], Tensors]


def kept(weights: Tensors) -> Tensors:
    return weights


def renamed(old: str, new: str) -> Weights:
    """Return what turns the weights of a model into those of one with another name for its layers."""

    def part(name: str) -> str:
        return f".{name}.".replace(f".{old}.", f".{new}.").strip(".")

    return lambda weights: {part(name): tensor for name, tensor in weights.items()}


def fused(whole: str, *parts: str) -> Weights:
    """Return what puts the weights of several layers into one."""

    def fuse(weights: Tensors) -> Tensors:
        found: Tensors = {}
        for name, tensor in weights.items():
            container, _, rest = name.rpartition(".")[0].rpartition(".")
            own = name.rpartition(".")[2]
            if rest == parts[0]:
                all_parts = [weights[f"{container}.{part}.{own}".strip(".")] for part in parts]
                found[f"{container}.{whole}.{own}".strip(".")] = torch.cat(all_parts)
            elif rest not in parts:
                found[name] = tensor
        return found

    return fuse


def without(*ends: str) -> Weights:
    """Return what drops the weights whose names end so."""
    return lambda weights: {name: tensor for name, tensor in weights.items() if not name.endswith(ends)}


@dataclass(frozen=True)
class Edit:
    """Another piece of text in the source of a class or a function."""

    title: str
    model: str
    of: str
    """The class or function."""
    pieces: Sequence[tuple[str, str]]
    """Old and new text. The old one occurs exactly once."""
    at: tuple[str, ...] = ()
    """Of a bug: where it is, as `Class` or `Class.child`; the edited class, if nothing is said."""
    row: str = ""
    """Of a bug: its row in the collection of real ones, if it is there."""
    weights: Weights = kept
    """From the weights of the model as it was to those of the edited one."""

    @property
    def places(self) -> tuple[str, ...]:
        return self.at or (self.of,)


def edited(source: str, edit: Edit) -> str:
    """Return the source with other pieces of text.

    Raises:
        ValueError: A piece does not occur exactly once.
    """
    for old, new in edit.pieces:
        if source.count(old) != 1:
            raise ValueError(f"{edit.title}: {old!r} occurs {source.count(old)} times in {edit.of}")
        source = source.replace(old, new)
    return source


def applicable(module: ModuleType, edits: Sequence[Edit]) -> bool:
    """Whether all edits can be made at once: none takes away the text of another."""
    try:
        sources(module, edits)
    except ValueError:
        return False
    return True


def sources(module: ModuleType, edits: Sequence[Edit]) -> dict[str, str]:
    """Return the edited source of each class and function."""
    found: dict[str, str] = {}
    for edit in edits:
        source = found.get(edit.of) or textwrap.dedent(inspect.getsource(getattr(module, edit.of)))
        found[edit.of] = edited(source, edit)
    return found


@contextlib.contextmanager
def patched(module: ModuleType, edits: Sequence[Edit]) -> Iterator[None]:
    """Let a module have the edited classes and functions, for as long as a model of them is used."""
    texts = sources(module, edits)
    before = {name: getattr(module, name) for name in texts}
    try:
        for text in texts.values():
            exec(compile(text, str(module.__file__), "exec"), vars(module))
        yield
    finally:
        vars(module).update(before)
