"""Documents that are packed into one row: each has the output that it has alone.

Training packs short documents into one row to waste no padding. It has to tell the model where they end, by a mask, by
``cu_seqlens``, or by positions that begin anew. If something on the way drops it, documents attend to each other, or
their positions are those of the row, and the loss looks much the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_modelprobe.checks.agreement import changed, check_not_random
from pytest_modelprobe.checks.check import arguments_of, check
from pytest_modelprobe.checks.incremental import Layout, Pieces, checked_sizes
from pytest_modelprobe.checks.outcome import NotApplicableError, Violation, line_of
from pytest_modelprobe.checks.positions import CACHES, KEYS_AND_VALUES
from pytest_modelprobe.checks.rounding import is_rounded, limit, relative_error
from pytest_modelprobe.checks.sequence import replacement, sequence
from pytest_modelprobe.checks.session import LayerTensor, PreparedModel, Trace, copy_of
from pytest_modelprobe.comparison.text import percent
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.text import count, listed

_FEWEST = 4
"""Positions from which on a row is cut into three documents, of which one has more than one position."""

_CACHED = tuple(f"output.{name}" for name in (*CACHES, *KEYS_AND_VALUES))
"""Beginnings of the paths of what a forward returns for the next one."""

_OF_MASKS = (
    "Look at what tells the attention where a document ends: a block-diagonal mask, cu_seqlens, or position_ids that "
    "begin anew. A cache, a mask of padding beside it or another implementation of attention may drop it. Convolutions "
    "and recurrences need it too."
)
_OF_ANYTHING = (
    "No document changes with another one: look at the positions, which begin at 0 in each document, and at what "
    "depends on the length of the row, as a scale or a norm."
)


@check
def packed_documents(
    prepared: PreparedModel,
    *,
    pack: Callable[[Sequence[Tensor]], Any] | None = None,
    lengths: Sequence[int] | None = None,
    axis: int = 1,
    tolerance: float | None = None,
) -> Violation | str:
    """Check that documents which are packed into one row have the output that each has alone.

    The first row of the first input is cut into documents. They are packed into one row, and each alone. If an output
    differs, each document is replaced by another: a document that changes with it sees it.

    Of each layer, what belongs to a document is found by the axes that are as long as the row, and shorter for a
    document alone. A loss over all documents is not compared. Rotary positions that do not begin anew change no output
    of a model that only uses distances.

    Args:
        prepared: The model and its inputs, of which the first with positions is cut.
        pack: Takes a list of documents, which are parts of the first input, and returns the inputs of the model: a
            tensor, a tuple of several or a mapping of keyword arguments. It is called with one document too. By
            default, for a model with an argument ``position_ids``: the documents in one row, with positions that begin
            anew, without masks and without a cache, as models of transformers take them.
        lengths: The lengths of the documents; they add up to the sequence. By default there are three.
        axis: Axis of positions of the first input; with 0 it has no axis of rows.
        tolerance: The largest relative change that passes. By default it follows from the dtype: 1e-4 in float32.

    Raises:
        UsageError: The lengths do not add up to the sequence, or ``pack`` raises.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe = ModelProbe()
    >>> def in_a_row(documents):
    ...     return torch.cat(documents, 1)
    >>> print(checks.packed_documents(probe, nn.Linear(4, 2), probe.randn(1, 12, 4), pack=in_a_row))
    packed_documents holds for Linear: documents of 3, 5 and 4 positions as alone, in 1 layer
    >>> lstm = nn.LSTM(4, 8, batch_first=True)
    >>> outcome = checks.packed_documents.outcome(probe, lstm, probe.randn(1, 12, 4), pack=in_a_row)
    >>> print(outcome.text.splitlines()[0])  # doctest: +ELLIPSIS
    (root) sees another document: document 2 of 3 changed by ... % in output[0] when document 1 was replaced
    """
    path, tensor = sequence(prepared, axis)
    axis = axis % tensor.dim()
    row = tensor.narrow(0, 0, 1) if axis else tensor
    sizes = _sizes(row.shape[axis], lengths)
    if pack is None:
        prepared.reference(mode="eval")
        pack = _by_positions(prepared, path, axis)
    documents = list(row.split(list(sizes), axis))
    alone = [_run(prepared, _inputs(pack, [one])) for one in documents]
    packed = _Packed(_run(prepared, _inputs(pack, documents)), alone, Pieces(sizes), tolerance)
    found = [packed.other_than(one, i) for i, one in enumerate(alone)]
    wrong = next((i for i, one in enumerate(found) if _reaches_output(one)), None)
    if wrong is None:
        inside = next((one[0].given.where for one in found if one), "")
        return packed.summary() + (f"; layers inside differ, but the output agrees: first {inside}" if inside else "")
    prepared.args, prepared.kwargs = _inputs(pack, documents)
    check_not_random(prepared)
    others = list(replacement(prepared, row).split(list(sizes), axis))
    for k, other in enumerate(others):
        again = _run(prepared, _inputs(pack, [*documents[:k], other, *documents[k + 1 :]]))
        seen = packed.changed_in(again, k)
        if _reaches_output(seen):
            first = seen[0]
            return _violation(
                seen,
                f"sees another document: document {first.document + 1} of {len(sizes)} {changed(first.far)} in "
                f"{first.given.path} when document {k + 1} was replaced",
                _OF_MASKS,
            )
    first = found[wrong][0]
    differs = f"document {wrong + 1} of {len(sizes)}, at {packed.positions(wrong)}, {changed(first.far)}"
    said = f"differs between a document in a row and the document alone: {differs} in {first.given.path}"
    return _violation(found[wrong], said, _OF_ANYTHING)


def _sizes(length: int, lengths: Sequence[int] | None) -> tuple[int, ...]:
    """Return the lengths of the documents."""
    if lengths is not None:
        return checked_sizes("lengths=", lengths, length)
    if length < _FEWEST:
        raise NotApplicableError(f"there are {count(length, 'position')}: give it {_FEWEST} or more")
    return length // 4, length - length // 4 - length // 3, length // 3


def _by_positions(prepared: PreparedModel, path: str, axis: int) -> Callable[[Sequence[Tensor]], Any]:
    """Return a function that packs documents with positions that begin anew."""
    parameters = prepared.parameters
    if "position_ids" not in parameters or axis != 1:
        raise NotApplicableError(
            "its forward has no argument position_ids: give pack=, a function that returns the inputs for documents"
        )
    others = {name: value for name, value in prepared.kwargs.items() if not isinstance(value, Tensor)}
    # With a cache, models of transformers do not look at the positions.
    alone = {"use_cache": False} if "use_cache" in parameters else {}
    name = prepared.argument(path)

    def pack(documents: Sequence[Tensor]) -> dict[str, Any]:
        positions = torch.cat([torch.arange(one.shape[1], device=one.device) for one in documents])
        return {**alone, **others, name: torch.cat(list(documents), 1), "position_ids": positions[None]}

    return pack


# --- runs -------------------------------------------------------------------------------------------------------------


_Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of the model."""


def _inputs(pack: Callable[[Sequence[Tensor]], Any], documents: Sequence[Tensor]) -> _Inputs:
    __tracebackhide__ = True
    try:
        inputs = pack([copy_of(one) for one in documents])
    except Exception as error:
        raise UsageError(f"pack= raised {line_of(error)}, called with {count(len(documents), 'document')}") from error
    args, kwargs = arguments_of(inputs)
    return args, dict(kwargs)


def _run(prepared: PreparedModel, inputs: _Inputs) -> Trace:
    """Run the model on other inputs."""
    before = prepared.args, prepared.kwargs
    prepared.args, prepared.kwargs = inputs
    try:
        return prepared.reference(mode="eval")
    finally:
        prepared.args, prepared.kwargs = before


# --- comparison -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """A document whose part of a tensor of the packed row differs."""

    given: LayerTensor
    document: int
    far: float


class _Packed:
    """The tensors of a packed row, of which each document has a part."""

    def __init__(self, packed: Trace, alone: Sequence[Trace], pieces: Pieces, tolerance: float | None) -> None:
        self.pieces, self._tolerance = pieces, tolerance
        self._layouts: dict[str, Layout] = {}
        self._given: list[LayerTensor] = []
        parts = [_by_address(trace) for trace in alone]
        for given in packed.tensors:
            theirs = [part[given.where] for part in parts if given.where in part]
            if len(theirs) == len(parts) and is_rounded(given.tensor):
                layouts = pieces.layouts(given.tensor, theirs)
                if layouts:
                    # What is flattened how is seen in the first document, which most errors leave as it is.
                    self._layouts[given.where] = min(
                        layouts, key=lambda one: relative_error(theirs[0], pieces.cut(given.tensor, one, 0))
                    )
                    self._given.append(given)
        if not any(_is_output(given) for given in self._given):
            outputs = [f"{given.path} {tuple(given.tensor.shape)}" for given in packed.tensors if _is_output(given)]
            raise NotApplicableError(
                f"no output of the packed row has an axis of its {count(pieces.length, 'position')}: {listed(outputs)}"
            )

    def other_than(self, alone: Trace, document: int) -> list[_Found]:
        """Return where a document in the row differs from a run of it alone."""
        there = _by_address(alone)
        found = []
        for given in self._given:
            mine = self.pieces.cut(given.tensor, self._layouts[given.where], document)
            far = relative_error(there[given.where], mine) if given.where in there else math.inf
            if not far <= limit(mine, self._tolerance):
                found.append(_Found(given, document, far))
        return found

    def changed_in(self, other: Trace, replaced: int) -> list[_Found]:
        """Return where documents changed when another one was replaced in the row."""
        there = _by_address(other)
        found = []
        for given in self._given:
            whole, layout = there.get(given.where), self._layouts[given.where]
            if whole is None or whole.shape != given.tensor.shape:  # an expert of no token
                continue
            for document in range(len(self.pieces.sizes)):
                mine, theirs = (self.pieces.cut(x, layout, document) for x in (given.tensor, whole))
                far = 0.0 if document == replaced else relative_error(mine, theirs)
                if not far <= limit(mine, self._tolerance):
                    found.append(_Found(given, document, far))
        return found

    def positions(self, document: int) -> str:
        """Return where a document is in the row."""
        start, n = self.pieces.starts[document], self.pieces.sizes[document]
        return f"position {start}" if n == 1 else f"positions {start} to {start + n - 1}"

    def summary(self) -> str:
        """Return what was compared."""
        sizes = listed([str(n) for n in self.pieces.sizes], len(self.pieces.sizes))
        layers = len({given.layer for given in self._given})
        return f"documents of {sizes} positions as alone, in {count(layers, 'layer')}"


def _by_address(trace: Trace) -> dict[str, Tensor]:
    return {given.where: given.tensor for given in trace.tensors}


def _is_output(given: LayerTensor) -> bool:
    """Whether a tensor is an output; the keys of a cache have positions that only distances of them undo."""
    return given.is_final and not given.path.startswith(_CACHED)


def _reaches_output(found: Sequence[_Found]) -> bool:
    return any(_is_output(one.given) for one in found)


def _violation(found: Sequence[_Found], said: str, advice: str) -> Violation:
    documents: dict[str, list[_Found]] = {}
    for one in found:
        documents.setdefault(one.given.where, []).append(one)
    return Violation.at(
        found[0].given.layer,
        said,
        columns=("tensor", "changed by", "document"),
        rows=tuple(
            (where, percent(max(one.far for one in each)), listed([str(one.document + 1) for one in each]))
            for where, each in documents.items()
        ),
        advice=advice,
    )
