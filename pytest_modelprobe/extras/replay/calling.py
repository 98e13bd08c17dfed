"""The saved call of a layer, run again, and how what it computes differs from what was computed."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
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
            now, saved = found.get(where), self._reading(self._tensors[key])
            expected = self._data["expected"].get(where)
            other = None if expected is None else codec.decode(Reading, expected)
            if now is None:
                rows.append(Row(where, tolerance.CAME, tolerance.CAME if other else tolerance.UNKNOWN))
            else:
                saved = dataclasses.replace(saved, noise=None if other is None else other.noise)
                rows.append(Row(where, *(self._change(now, one) for one in (saved, other))))
        return rows

    def _change(self, now: Tensor, then: Reading | None) -> tolerance.ValueChange:
        if then is None:
            return tolerance.UNKNOWN
        here = self._device.type == self._data["device"].partition(":")[0]
        return tolerance.change(
            self._reading(now),
            then,
            dtype=str(now.dtype).removeprefix("torch."),
            precision=self._data["precision"] if here else "unmeasured",
            rounding=ROUNDING_OF_RESPONSES,
        )

    @staticmethod
    def _reading(tensor: Tensor) -> Reading:
        (reading,) = statistics.collect([statistics.reduce(as_mask(tensor))])
        return reading

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
        answers = {name: _Answers(self, name) for name in self._data["children"]}
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
            if answer.calls < len(self._data["children"][name]):
                raise UsageError(f"{label} calls {name} less often than when it was saved")
            found |= answer.given
            written |= answer.returned
        return found | {f"{name} after": tensor for name, tensor in written.items()}

    def answer(self, name: str, number: int) -> Any:
        """Return what a call of a child returned."""
        answers = self._data["children"][name]
        if number >= len(answers):
            raise UsageError(f"{self._data['label']} calls {name} more often than when it was saved")
        return Decoder(self._tensors, self._device, self._dtype)(answers[number])

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

    def __init__(self, saved: SavedCall, name: str) -> None:
        self._saved, self._name = saved, name
        self.calls = 0
        self.given: dict[str, Tensor] = {}
        self.returned: dict[str, Tensor] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        label = f"{self._name} (call {self.calls + 1}) " if self.calls else f"{self._name} "
        self.given |= {label + path: tensor.clone() for path, tensor in flatten_call(args, kwargs).tensors}
        answer = self._saved.answer(self._name, self.calls)
        self.returned |= {label + path: tensor for path, tensor in flatten("output", answer, objects=False).tensors}
        self.calls += 1
        return answer


def _refuse(message: str) -> Any:
    def hook(module: nn.Module, args: object) -> None:
        raise UsageError(message)

    return hook
