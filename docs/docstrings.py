"""A Griffe extension: docstrings and signatures as the documentation shows them.

Examples become fenced blocks, which Markdown would take for quotations, and a check gets the arguments that it is
called with, which its decorator gives it.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*?(?=^\s*$|\Z)", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"\s*# doctest: .*$|^\.\.\.$\n?", re.MULTILINE)
CALLED_WITH = {"probe": "ModelProbe", "model": "nn.Module", "inputs": "Any"}


class Docstrings(griffe.Extension):
    """Rewrites what Griffe collected."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object, and the signature of a check."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)
        if isinstance(obj, griffe.Function) and any(_is_check(d.callable_path) for d in obj.decorators):
            _as_called(obj)


def _fenced(example: re.Match[str]) -> str:
    lines = FLAG.sub("", example[0].rstrip()).splitlines()
    return "\n".join(["```pycon", *lines, "```"]) + "\n"


def _is_check(path: str) -> bool:
    return path.rpartition(".")[2] == "check"


def _as_called(function: griffe.Function) -> None:
    """Replace the prepared model that a check works on by the probe, the model and its inputs."""
    kinds = griffe.ParameterKind
    positional, several = kinds.positional_only, kinds.var_positional
    given = [
        griffe.Parameter(name, annotation=kind, kind=several if name == "inputs" else positional)
        for name, kind in CALLED_WITH.items()
    ]
    function.parameters = griffe.Parameters(*given, *list(function.parameters)[1:])
    function.returns = "Outcome"
    if function.docstring is not None:
        function.docstring.value = function.docstring.value.replace("    prepared: ", "    *inputs: ")
