"""The saved call of a layer, run again, and how what it computes differs from what was computed."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pytest_modelprobe import statistics
from pytest_modelprobe.comparison import tolerance
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.models import flatten, flatten_call, seeding
from pytest_modelprobe.record import ROUNDING_OF_RESPONSES, Reading, codec
from pytest_modelprobe.runs import Widening, as_mask

from .encoding import Decoder


class Row(NamedTuple):
    """A tensor that the layer computes, and how it changed."""

    where: str
    """Its destination, as in `EmittedTensor.where`."""
    saved: tolerance.ValueChange
    """From what this side computed when it was saved."""
    other: tolerance.ValueChange
    """From what the other side computed."""


class SavedCall:
    """The call that a file holds.

    Args:
        data: What the file says.
        tensors: Its tensors.
        device: Where to compute.
        dtype: The dtype of the floats, or `None` for their own.
    """

    def __init__(
        self, data: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype | None
    ) -> None:
        self._data, self._tensors, self._device, self._dtype = data, tensors, device, dtype
        self.kind: type = nn.Module
        """The class of the layer, once it was made."""

    def rows(self, attributes: Mapping[str, object] = {}) -> list[Row]:
        """Return what the layer computes, with some of its attributes set, beside both sides."""
        found = self._computed(attributes)
        rows = []
        for where, key in self._data["computed"].items():
            expected = self._data["expected"].get(where)
            other = Reading() if expected is None else codec.decode(Reading, expected)
            saved = dataclasses.replace(_reading(self._tensors[key]), noise=other.noise)
            rows.append(Row(where, *(self._change(found.get(where), one) for one in (saved, other))))
        return rows

    def _change(self, now: Tensor | None, then: Reading) -> tolerance.ValueChange:
        if now is None or then.statistics is None:
            return tolerance.UNKNOWN if then.statistics is None else tolerance.GONE
        here = self._device.type == self._data["device"].partition(":")[0]
        return tolerance.change(
            _reading(now),
            then,
            dtype=str(now.dtype).removeprefix("torch."),
            precision=self._data["precision"] if here else "unmeasured",
            rounding=ROUNDING_OF_RESPONSES,
        )

    def _computed(self, attributes: Mapping[str, object]) -> dict[str, Tensor]:
        """Return the tensors that the layer computes, by their destinations."""
        label = self._data["label"]
        try:
            module, args, kwargs = Decoder(self._tensors, self._device, self._dtype)(self._data["call"])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"the layer cannot be made of what the file holds: {error!r}") from error
        self.kind = type(module)
        vars(module).update(attributes)
        decode = functools.partial(Decoder, self._tensors, self._device, self._dtype)
        answers = {name: _Answers(label, name, saved, decode) for name, saved in self._data["children"].items()}
        for name, child in module.named_modules():
            if name in answers:
                vars(child)["forward"] = answers[name]
            elif name:
                child.register_forward_pre_hook(_refuse(f"{label} calls {name}, and did not when it was saved"))
        module.register_forward_pre_hook(lambda module, args: None)  # torch takes no fused path for it then
        try:
            with self._contexts():
                output = module(*args, **kwargs)
        except UsageError:
            raise
        except Exception as error:  # whatever its code raises
            left_out = "".join(f"; left out was: {one}" for one in self._data["left_out"][:3])
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}{left_out}"
            raise UsageError(f"{label} cannot be called as it was saved: {said}") from error
        found = dict(flatten("output", output, objects=False).tensors)
        written = dict((*module.named_buffers(), *flatten_call(args, kwargs).tensors))
        for name, answer in answers.items():
            if answer.calls < len(answer.answers):
                raise UsageError(f"{label} calls {name} less often than when it was saved")
            found |= answer.given
            written |= answer.returned
        return found | {f"{name} after": tensor for name, tensor in written.items()}

    def _contexts(self) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(seeding.forked_rng())
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings(action="ignore"))  # which synthetic numbers cause
        if self._dtype == torch.float64 or self._data["widened"]:
            stack.enter_context(Widening(self._dtype or torch.float32))
        seeding.seed_everything(0)
        return stack


class _Answers:
    """Replaces the ``forward`` of a child: it keeps what it is given, and returns what was returned."""

    def __init__(self, layer: str, name: str, answers: Sequence[Any], decoder: Callable[[], Decoder]) -> None:
        self._layer, self._name, self.answers, self._decoder = layer, name, answers, decoder
        self.calls = 0
        self.given: dict[str, Tensor] = {}
        self.returned: dict[str, Tensor] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        label = f"{self._name} (call {self.calls + 1}) " if self.calls else f"{self._name} "
        self.given |= {label + path: tensor.clone() for path, tensor in flatten_call(args, kwargs).tensors}
        if self.calls == len(self.answers):
            raise UsageError(f"{self._layer} calls {self._name} more often than when it was saved")
        answer = self._decoder()(self.answers[self.calls])
        self.returned |= {label + path: tensor for path, tensor in flatten("output", answer, objects=False).tensors}
        self.calls += 1
        return answer


def _reading(tensor: Tensor) -> Reading:
    (reading,) = statistics.collect([statistics.reduce(as_mask(tensor))])
    return reading


def _refuse(message: str) -> Any:
    def hook(module: nn.Module, args: object) -> None:
        raise UsageError(message)

    return hook
