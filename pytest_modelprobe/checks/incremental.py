"""Incremental evaluation with a cache or a hidden state gives the same output as one forward.

The sequence is given in chunks, each with the state that the chunk before returned. Each layer's tensors are put side
by side with those of one forward over the whole, along the axes that grow with the sequence.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelprobe.comparison.text import percent
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import flatten, map_tensors
from pytest_modelprobe.record import ROOT
from pytest_modelprobe.text import count, listed

from .agreement import changed, check_not_random
from .check import check
from .outcome import NotApplicableError, Violation
from .positions import (
    STATES,
    MaskedOut,
    attended,
    check_attended,
    is_cache,
    is_recurrent,
    mark_of,
    masked_out,
    masks_of,
    pad_id_of,
    positions_of,
    sequence_alone,
    state_of,
)
from .rounding import is_rounded, limit, plain, relative_error
from .sequence import OFFERED, later_unseen, sequence
from .session import LayerTensor, PreparedModel, Trace, Vary, copy_of, set_mode

# --- Pieces of a sequence that are computed apart: which part of a tensor of the whole belongs to which p ------------

Layout = list[tuple[int, int]]
"""Axes of positions, each with the number of rows that are flattened into the same axis before the positions.

0 stands for an axis that is as long as all positions so far, as in keys, values and attention weights.
"""


@dataclass(frozen=True, slots=True)
class Pieces:
    """A sequence that is cut into pieces of these lengths.

    >>> import torch
    >>> pieces, whole = Pieces((2, 3)), torch.arange(5)
    >>> layouts = pieces.layouts(whole, [whole[:2], whole[2:]])
    >>> layouts, pieces.cut(whole, layouts[0], 1)
    ([[(0, 1)]], tensor([2, 3, 4]))
    """

    sizes: Sequence[int]

    @property
    def length(self) -> int:
        """The length of the whole."""
        return sum(self.sizes)

    @property
    def starts(self) -> list[int]:
        """The first position of each piece."""
        return [0, *accumulate(self.sizes)][:-1]

    def layouts(self, whole: Tensor, parts: Sequence[Tensor]) -> list[Layout]:
        """Return which axes may be those of positions, given the same tensor of each piece; none if it is not known."""
        if any(part.dim() != whole.dim() for part in parts):
            return []
        options: list[list[tuple[int, int]]] = []
        for axis, n in enumerate(whole.shape):
            lengths = [part.shape[axis] for part in parts]
            if all(other == n for other in lengths):
                continue
            if all(other * self.length == n * size for other, size in zip(lengths, self.sizes, strict=True)):
                times = n // self.length
                options.append([(axis, outer) for outer in range(1, times + 1) if times % outer == 0])
            elif n == self.length and lengths == list(accumulate(self.sizes)):
                options.append([(axis, 0)])
            else:
                return []
        return [list(layout) for layout in product(*options)] if options else []

    def cut(self, whole: Tensor, layout: Layout, piece: int) -> Tensor:
        """Return the part of a tensor that belongs to a piece."""
        start, n = self.starts[piece], self.sizes[piece]
        for axis, outer in layout:
            if outer:
                split = whole.unflatten(axis, (outer, self.length, -1))
                whole = split.narrow(axis + 1, start, n).flatten(axis, axis + 2)
            else:
                whole = whole.narrow(axis, 0, start + n)
        return whole


_ADVICE = (
    "Look at how it uses the state: a causal mask as long as the chunk alone, positions or rotary angles that "
    "begin at 0 or after the first chunk, a cache that is overwritten and not extended, a hidden state that is dropped."
)


@dataclass(frozen=True, slots=True, eq=False)
class _Difference:
    """A tensor that differs between the forward at once and the forward in chunks."""

    layer_tensor: LayerTensor
    chunk: int
    change: float


@check
def incremental(
    prepared: PreparedModel,
    *,
    step: Callable[..., Any] | None = None,
    chunks: Sequence[int] | None = None,
    axis: int | None = None,
    tolerance: float | None = None,
) -> Violation | str:
    """Check that a model with a state returns the same chunk by chunk as in one forward.

    The state is a cache of keys and values, or a hidden state. A forward is known to take one that has an argument
    ``cache``, ``past_key_values`` or ``cache_params`` and an output of that name, as models of transformers have, or an
    argument such as ``hx``, ``state``, ``hidden`` or ``cache`` and returns a pair of its output and the state, as
    `nn.LSTM` does. The first half of the positions is given at once, then one, then the others in two chunks: offsets
    are often right in the second chunk alone. State space models of transformers, whose cache has no keys, take one
    position at a time after the first chunk. Layers are compared along the axis that grows with the sequence.

    Args:
        prepared: The model and its inputs. The first input, or ``decoder_input_ids``, is split into chunks, and so are
            other inputs of this length. Masks of this length are given up to the end of each chunk; to state space
            models of the chunk alone. The outcome says which. Positions that a mask leaves out are not compared.
        step: Takes the model, a chunk of the first input, and the state, at first None; returns the output and the
            state. By default the forward is called, as above.
        chunks: The lengths of the chunks; they add up to the sequence.
        axis: Axis of positions of the inputs. By default it is 1, and 0 for an `nn.RNN`, `nn.LSTM` or `nn.GRU` without
            ``batch_first``.
        tolerance: The largest relative change that passes. By default it follows from the dtype: 1e-4 in float32.

    Raises:
        UsageError: The chunks do not add up to the sequence, or ``step`` returns no pair.

    >>> from torch import nn
    >>> from pytest_modelprobe import ModelProbe, checks
    >>> probe, model = ModelProbe(), nn.LSTM(4, 8, batch_first=True)
    >>> print(checks.incremental(probe, model, probe.randn(2, 10, 4)))
    incremental holds for LSTM: 1 layer in chunks of 5, 1, 2 and 2 positions
    """
    root = prepared.layers.modules[ROOT]
    if axis is None:
        axis = 0 if isinstance(root, nn.RNNBase) and not root.batch_first else 1
    one = prepared.reference(mode="eval")
    name = _taking_a_state(prepared) if step is None else ""
    of_decoder = ("decoder_input_ids", "decoder_inputs_embeds")
    given = next(((path, x) for path, x in prepared.dense if path in of_decoder), None)
    if given is None and step is None and of_decoder[0] in prepared.parameters:
        raise NotApplicableError("only the decoder continues from a state: give decoder_input_ids=")
    path, tensor = given or sequence(prepared, axis)
    length = tensor.shape[axis]
    alone = False  # whether a position comes alone after the first chunk
    masked = step is None and any(_is_mask(prepared, where) and length in x.shape for where, x in prepared.dense)
    excluded = masked_out(prepared, path, axis)
    unseen = functools.partial(later_unseen, prepared, path, axis, tolerance)

    if step is None:
        call = _by_forward(prepared, name, _cut(prepared, path, length, axis, past=True))
        (one,), state = _chunk_by_chunk(prepared, call, (length,))
        if one.error is not None:
            raise NotApplicableError(f"it returns no {name} to continue from: {one.failure}")
        if state is None:
            raise NotApplicableError(f"it returns no {name} to continue from: for a state in another form, give step=")
        alone = name == "cache_params" or is_recurrent(state)
        if alone:  # padding is in no state of a recurrence
            call = _by_forward(prepared, name, _cut(prepared, path, length, axis, past=False))
    else:
        call = _by_step(prepared, step, tensor, axis)

    def attempt(sizes: Sequence[int]) -> _Attempt:
        return _Attempt(prepared, one, call, sizes, tolerance, excluded, unseen, _MASKS[not alone] * masked)

    sizes = _sizes(length, chunks, alone=alone)
    found = attempt(sizes)
    if not found.raised or chunks is not None or max(sizes[1:]) == 1:
        return found.verdict(name)
    single = attempt((sizes[0], *[1] * (length - sizes[0])))
    note = f"One position at a time it is right: if longer chunks are not supported, pass chunks=({sizes[0]}, 1, ...). "
    return found.verdict(name, note) if single.ok else single.verdict(name)


_MASKS = {True: ", with masks of all positions so far", False: ", with masks of the chunk alone"}
"""How masks were given: whether they include the past."""


def _incremental_where_meant(prepared: PreparedModel) -> Violation | str:
    """Check that a model with a state, of one sequence, returns the same chunk by chunk, also behind padding.

    Raises:
        NotApplicableError: There are several sequences, attention is over other positions, or there is padding.
    """
    _taking_a_state(prepared)
    path, tensor = sequence_alone(prepared)
    check_attended(attended(prepared), path, tensor)
    padding = pad_id_of(prepared)
    if padding is not None and not tensor.is_floating_point() and bool((tensor == padding).any()):
        raise NotApplicableError(f"{path} holds {padding}, the id of padding, which may not count as a position")
    found = incremental.function(prepared)
    if isinstance(found, Violation):
        return found
    try:
        behind = _behind_padding(prepared, path)
    except NotApplicableError as reason:
        return f"{found}; not behind padding, as {reason}"
    return behind if isinstance(behind, Violation) else f"{found}, also behind padding on the left"


def _behind_padding(prepared: PreparedModel, path: str) -> Violation | str:
    """Check `incremental` for a batch whose first row has padding on its left, which a mask leaves out.

    One forward has to give that row what it gives the row alone, without padding: this shows that the model takes such
    padding, and in which form. Where no mask is given, it also has to continue with one that masks nothing.

    Raises:
        NotApplicableError: It does not, or there is one row, or no argument for a mask.
    """
    shape = rows, length = positions_of(prepared, path, 1)
    of = "decoder_" if prepared.argument(path).startswith("decoder_") else ""
    given = masks_of(prepared, path, shape)
    offered = (f"{of}{name}" for name in OFFERED)
    name = next(iter(given), None) or next((name for name in offered if name in prepared.parameters), None)
    if name is None:
        raise NotApplicableError("its forward has no argument for a mask of padding")
    if rows < 2 or length < 4:
        raise NotApplicableError(f"there are {count(rows, 'row')} of {count(length, 'position')}")
    if masked_out(prepared, path, 1):
        raise NotApplicableError("the mask leaves out positions as it is given")
    if not given:
        prepared.kwargs[name] = torch.full(shape, "pad" not in name, dtype=torch.bool if "pad" in name else torch.int64)
    inputs, kept, marks = (prepared.args, prepared.kwargs), dict(prepared.dense)[name], mark_of(prepared, name)

    def give(marked: Tensor) -> None:
        mask = MaskedOut(marked).filled(kept, 1, marks)
        prepared.args, kwargs = map_tensors(lambda x: mask if x is kept else x, inputs)
        counted = {f"{of}position_ids": ((~marked).cumsum(1) - 1).clamp(min=0)}
        prepared.kwargs = {**kwargs, **(counted if counted.keys() <= prepared.parameters.keys() else {})}

    def alone(where: str, x: Tensor) -> Tensor:
        x = x[:1].clone() if x.shape[:1] == (rows,) else x
        return x[:, padding:].clone() if x.shape[1:2] == (length,) and prepared.argument(where).startswith(of) else x

    padding, nothing = length // 2 - 1, torch.zeros(shape, dtype=torch.bool)  # the first chunk holds one position more
    padded = nothing.clone()
    padded[0, :padding] = True
    give(padded)
    one, other = (prepared.variation(mode="eval", vary=vary).final for vary in (None, alone))
    both = [(x[:1, padding:], other[where]) for where, x in one.items() if x.shape[:2] == shape and where in other]
    agree = [relative_error(x, y) <= limit(x) for x, y in both if is_rounded(x) and x.shape == y.shape]
    if not agree or not all(agree):
        raise NotApplicableError("one forward does not give a row with padding on its left what it gives the row alone")
    found = incremental.function(prepared)
    if isinstance(found, str):
        return found
    give(nothing)
    if not given and isinstance(incremental.function(prepared), Violation):
        raise NotApplicableError(f"with a state it takes {name} in another form")
    said = f", with {count(padding, 'position')} of padding on the left of the first row, masked in {name}"
    return dataclasses.replace(found, line=found.line + said, advice=f"{_PADDED}{found.advice}")


_incremental_where_meant.__name__ = "incremental"
incremental_where_meant = check(_incremental_where_meant)
"""`incremental` among the standard checks."""

_PADDED = "Without padding it is right: look for what the state keeps of masked positions. "

_Call = Callable[[int, int, Any], tuple[Any, Any]]
"""Takes the start of a chunk, its length and the state; returns the output and the state."""


@dataclass(eq=False)
class _Attempt:
    """A run in chunks, compared with one forward."""

    prepared: PreparedModel
    one: Trace
    call: _Call
    sizes: Sequence[int]
    tolerance: float | None
    excluded: MaskedOut
    later_unseen: Callable[[], Violation | str]
    masks: str
    """How masks were given, if there are any."""

    def __post_init__(self) -> None:
        self._pieces = Pieces(self.sizes)
        self._parts, _ = _chunk_by_chunk(self.prepared, self.call, self.sizes)
        last = self._parts[-1]
        self.raised = last.failure if last.error is not None else ""
        self._raised_in = last.raised_in
        self._found: list[_Difference] = []
        self._looked_at: set[str] = set()
        self._ends = False
        if not self.raised:
            self._compare(self.tolerance)

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.raised and not self._found

    def verdict(self, name: str, note: str = "") -> Violation | str:
        """Return where the chunks differ from the whole, or a summary.

        Raises:
            NotApplicableError: The model does not seem to continue from a state.
        """
        told = f"chunks of {listed([str(n) for n in self.sizes], len(self.sizes))} positions{self.masks}"
        if self.raised:
            if name and not is_cache(self.one.output, name) and not note:
                raise NotApplicableError(f"it does not continue from what it returns for {name}: {self.raised}")
            return Violation.at(
                self._raised_in, f"cannot continue from its state, in {told}: {self.raised}", advice=f"{note}{_ADVICE}"
            )
        if not self._ends:
            raise NotApplicableError("its output for a chunk is not as long as the chunk")
        first = min(self._found, key=lambda one: one.chunk, default=None)
        if first is None:
            return f"{count(len(self._looked_at), 'layer')} in {told}"
        self._check_sense(first, name)
        where = self._positions(first.chunk)
        if name and not first.chunk:
            note = "Later positions do not change it, but their number does: look for a scale or a norm that uses it. "
        return Violation.at(
            first.layer_tensor.layer,
            f"differs when it is called chunk by chunk: {first.layer_tensor.path} "
            f"{changed(first.change)} at {where}, in {told}",
            columns=("tensor", "changed by", "first at"),
            rows=tuple(
                (one.layer_tensor.where, percent(one.change), self._positions(one.chunk)) for one in self._found
            ),
            advice=f"{note}{_ADVICE}",
        )

    def _check_sense(self, first: _Difference, name: str) -> None:
        """Check that the model is causal and not random, without which no state gives the same output.

        Raises:
            NotApplicableError: The model is not causal, or random.
        """
        check_not_random(self.prepared)
        if name and not first.chunk and isinstance(self.later_unseen(), Violation):
            raise NotApplicableError(
                f"its first positions depend on later ones, from {first.layer_tensor.where} on: it is not causal"
            )

    def _positions(self, chunk: int) -> str:
        start, n = self._pieces.starts[chunk], self.sizes[chunk]
        return f"position {start}" if n == 1 else f"positions {start} to {start + n - 1}"

    def _compare(self, tolerance: float | None) -> None:
        runs = (self.one, *self._parts)
        seen = [Counter((given.layer, given.inside) for given in run.tensors) for run in runs]
        calls = [Counter({given.layer: given.index + 1 for given in run.tensors}) for run in runs]
        parts = [self._by_address(part) for part in self._parts]
        for given in self.one.tensors:
            if not given.tensor.is_floating_point():
                continue
            least = limit(given.tensor, tolerance)
            if [n[given.layer] for n in calls] == [self._pieces.length, *self.sizes]:
                changes = self._by_call(given, parts)
            elif any(n[given.layer, given.inside] != seen[0][given.layer, given.inside] for n in seen):
                continue  # an expert, say, and what it is given
            else:
                theirs = [part.get((given.layer, given.index, given.path)) for part in parts]
                tensors = [one.tensor for one in theirs if one is not None]
                changes = self._by_axis(given.tensor, tensors, least) if len(tensors) == len(parts) else {}
            if changes:
                self._looked_at.add(given.layer)
                self._ends |= given.is_final
                far = [chunk for chunk, by in changes.items() if not by <= least]
                self._found += [_Difference(given, chunk, changes[chunk]) for chunk in far[:1]]

    def _by_address(self, part: Trace) -> dict[tuple[str, int, str], LayerTensor]:
        found = {(given.layer, given.index, given.path): given for given in part.tensors}
        ends = [given.path for given in self.one.tensors if given.is_final]
        theirs = [given for given in part.tensors if given.is_final]
        if theirs and not any(given.path in ends for given in theirs):  # a step that returns the first alone
            found |= {(ROOT, given.index, ends[0]): given for given in theirs[:1] if ends}
        return found

    def _by_call(self, given: LayerTensor, parts: list[dict[tuple[str, int, str], LayerTensor]]) -> dict[int, float]:
        """Return the error of a layer that is called once for each position, by chunk."""
        chunk = max(i for i, start in enumerate(self._pieces.starts) if start <= given.index)
        there = parts[chunk].get((given.layer, given.index - self._pieces.starts[chunk], given.path))
        return {} if there is None else {chunk: relative_error(given.tensor, there.tensor)}

    def _by_axis(self, whole: Tensor, parts: list[Tensor], least: float) -> dict[int, float]:
        """Return the error of each chunk along the axes that grow; empty if these are not known."""
        layouts = self._pieces.layouts(whole, parts)
        for layout in layouts:
            changes = {
                i: relative_error(
                    self._seen(self._pieces.cut(whole, layout, i), layout, i), self._seen(part, layout, i)
                )
                for i, part in enumerate(parts)
            }
            if changes[0] <= least or (len(layouts) == 1 and not any(outer > 1 for _, outer in layout)):
                return changes
        return {}

    def _seen(self, part: Tensor, layout: Layout, chunk: int) -> Tensor:
        """Return a part with zeros at positions that a mask leaves out."""
        for axis, outer in layout:
            if outer:
                split = part.unflatten(axis, (outer, self.sizes[chunk], -1))
                part = self.excluded.filled(split, axis + 1, start=self._pieces.starts[chunk]).flatten(axis, axis + 2)
            else:
                part = self.excluded.filled(part, axis)
        return part


def checked_sizes(option: str, given: Sequence[int], length: int) -> tuple[int, ...]:
    """Return the lengths of pieces that the user gave.

    Raises:
        UsageError: They do not add up to the whole, or there is one alone.
    """
    if not all(isinstance(n, int) and n > 0 for n in given) or sum(given) != length or len(given) < 2:
        raise UsageError(
            f"{option} are two or more lengths that add up to the {count(length, 'position')}; got {given!r}"
        )
    return tuple(given)


def _sizes(length: int, chunks: Sequence[int] | None, *, alone: bool) -> tuple[int, ...]:
    """Return the lengths of the chunks."""
    if chunks is not None:
        return checked_sizes("chunks=", chunks, length)
    if length < 3:
        raise NotApplicableError(f"there are {count(length, 'position')}: give it three or more")
    rest = length - length // 2 - 1
    if alone:
        return length // 2, *[1] * (length - length // 2)
    return tuple(n for n in (length // 2, 1, math.ceil(rest / 2), rest // 2) if n)


def _taking_a_state(prepared: PreparedModel) -> str:
    """Return the name of the argument for the state.

    Raises:
        NotApplicableError: There is none, or something else than None is given for it.
    """
    parameters = prepared.parameters
    name = next((n for n in STATES if n in parameters and parameters[n].default is not inspect.Parameter.empty), None)
    if name is None:
        raise NotApplicableError("its forward has no argument past_key_values, state, hx or the like: give step=")
    given = dict(zip(parameters, prepared.args, strict=False)) | prepared.kwargs
    if given.get(name) is not None:
        raise NotApplicableError(f"{name} is given: leave it out, so that it is None at first")
    return name


def _by_step(prepared: PreparedModel, step: Callable[..., Any], tensor: Tensor, axis: int) -> _Call:
    def call(start: int, n: int, state: Any) -> tuple[Any, Any]:
        found = step(prepared.model, tensor.to(prepared.probe.device).narrow(axis, start, n).clone(), state)
        if not isinstance(found, tuple) or len(found) != 2:
            raise UsageError(f"step= returns the output and the state, a pair; got {type(found).__name__}")
        return found

    return call


def _by_forward(prepared: PreparedModel, name: str, cut: Callable[[int, int], Vary]) -> _Call:
    cached = {"use_cache": True} if "use_cache" in prepared.parameters else {}

    def call(start: int, n: int, state: Any) -> tuple[Any, Any]:
        args, kwargs = prepared.copied_inputs(cut(start, n))
        kwargs.pop("labels", None)
        output = prepared.model(*args, **(kwargs | {name: state} | cached))
        return output, state_of(output, name)

    return call


def _cut(prepared: PreparedModel, path: str, length: int, axis: int, *, past: bool) -> Callable[[int, int], Vary]:
    """Return a function that cuts a chunk out of each input; out of masks with the positions before, if ``past``."""
    beside = path.startswith("decoder_")  # what goes to the encoder stays whole
    rows, _ = positions_of(prepared, path, axis)

    def cut(start: int, n: int) -> Vary:
        def vary(where: str, x: Tensor) -> Tensor:
            if beside and not where.startswith("decoder_"):
                return x
            masks = _is_mask(prepared, where)
            if masks and x.shape[-2:] == (length, length) and x.shape[:-1] != (rows,):  # of queries and keys
                return x.narrow(-2, start, n).narrow(-1, 0, start + n)
            if not -x.dim() <= axis < x.dim() or x.shape[axis] != length:
                return x
            return x.narrow(axis, 0, start + n) if masks and past else x.narrow(axis, start, n)

        return vary

    return cut


def _is_mask(prepared: PreparedModel, path: str) -> bool:
    return prepared.argument(path).endswith("mask")


def _chunk_by_chunk(prepared: PreparedModel, call: _Call, sizes: Sequence[int]) -> tuple[list[Trace], Any]:
    """Return a trace of each chunk, up to one that raises, and the state at the end."""
    traces: list[Trace] = []
    state = None
    with prepared.keep_changes():
        set_mode(prepared.model, "eval")
        for start, n in zip([0, *accumulate(sizes)], sizes, strict=False):
            trace = prepared.trace_call(functools.partial(call, start, n, state))
            traces.append(trace)
            if trace.error is not None:
                break
            trace.output, state = trace.output
            if not any(given.is_final for given in trace.tensors):  # a step that calls parts of the model
                tensors = flatten("output", trace.output).tensors
                trace.tensors += [LayerTensor(ROOT, 0, path, plain(copy_of(tensor))) for path, tensor in tensors]
    return traces, state
