"""Other values for inputs that have no gradient: identifiers, masks, labels.

Whether such an input is used shows only if another value changes an output. The other values must be valid: they stay
in the range of the given ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .sequence import replacement
from .session import PreparedModel

_DRAWS = ("one", "two")


@dataclass(frozen=True, slots=True, eq=False)
class OtherValues:
    """Other values for an input, within its range."""

    path: str
    values: Tensor
    said: str
    """How they were made, in words."""

    def vary(self, path: str, x: Tensor) -> Tensor:
        """Return the other values for the input, and any other input unchanged."""
        return self.values.to(x.device) if path == self.path else x


def other_values(prepared: PreparedModel, path: str, x: Tensor) -> list[OtherValues]:
    """Return other values for an input, the likeliest to have an effect first; empty if none are known to be valid.

    Args:
        prepared: The model and its inputs.
        path: Name of the input.
        x: A mask, whose elements are flipped; integers, in whose range others are taken; or floats.
    """
    if prepared.argument(path).endswith("mask") or x.dtype == torch.bool:
        made = _flipped(prepared, path, x)
    elif x.is_floating_point():
        made = ((prepared.redrawn(x, f"{path} {draw}"), "replaced by random numbers") for draw in _DRAWS)
    else:
        made = _integers(prepared, path, x)
    return [OtherValues(path, values, said) for values, said in made if not torch.equal(values, x)]


def _flipped(prepared: PreparedModel, path: str, mask: Tensor) -> Iterator[tuple[Tensor, str]]:
    """Yield a mask with elements flipped: to mask everything alone may be without effect, or an error."""
    opposite = (mask == 0).to(mask.dtype)
    positions = mask.shape[-1] if mask.dim() else 1
    if positions > 1:
        middle = torch.arange(positions, device=mask.device) == positions // 2
        yield torch.where(middle, opposite, mask), "flipped at its middle position"
        for draw in _DRAWS:
            half = prepared.randn_like(mask.to(torch.float32), f"{path} {draw}") > 0
            yield torch.where(half, opposite, mask), "flipped at random"
    # A softmax over one position is 1 whatever is masked; a mask that leaves out whole rows is of another kind.
    if positions > 1 or not bool((mask == mask.flatten()[0]).all()) or not prepared.argument(path).endswith("mask"):
        yield opposite, "flipped"


def _integers(prepared: PreparedModel, path: str, x: Tensor) -> Iterator[tuple[Tensor, str]]:
    """Yield other integers. Negative ones stay: they mark what is ignored."""
    wide, stays = x.to(torch.int64), x < 0
    if bool(stays.all()):
        return
    known, most = wide[~stays].unique(), int(wide.max())
    if len(known) > 1:
        others = replacement(prepared, torch.where(stays, known[0], wide))
        yield torch.where(stays, x, others.to(x.dtype)), "replaced by others that occur in it"
    for draw in _DRAWS if most else ():
        drawn = prepared.probe.randint(0, most + 1, x.shape, name=f"check {path} {draw}").to(x.device, x.dtype)
        yield torch.where(stays, x, drawn), f"replaced by integers from 0 to {most:,}"
    if not most and prepared.probe.device.type == "cpu":  # an index that is out of range raises there, and only there
        yield torch.where(stays, x, x + 1), "replaced by 1"
