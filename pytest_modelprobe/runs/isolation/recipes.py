"""Recipes: coarse descriptions of the numbers of a tensor, and synthetic tensors generated from them.

Synthetic numbers must be of the kind that a layer was made for: a mask if it takes a mask, indices in the range of a
table. They must not be the real numbers, which depend on other layers. A recipe is coarse, so that similar tensors have
the same one. It stands in snapshot files, so that later versions of the model get the same numbers.

A recipe follows the shape and an unusual dtype (``2x16x64 2^-3``, ``4x8:float64 2^0+``):

=====================  ==============================================================================================
``2^-3``               normal numbers of that root mean square; ``2^-3+`` and ``2^-3-`` their magnitudes with that
                       sign, ``2^-3+ to 1`` none above 1; ``2^-3*`` has one row of root mean square 8 among them
``near 1``             parameters that are all equal: normal numbers about it
``const 1``            all elements equal
``mask -inf``          zeros and that number, for attention masks
``0 or 1``             floats that are a mask
``0..511``             integers, evenly; ``0..63 sorted`` in order; ``-100 or 0..511`` with a mark among them
``bool``, ``true``...  coins; all true; all false
``... with 0 last``    the same with a mark at the end of rows, as padding is; ``with 0 first`` at their beginning
=====================  ==============================================================================================
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_modelprobe import statistics
from pytest_modelprobe.models import has_dense_storage, seeding
from pytest_modelprobe.runs.noise import widened

_EXTREME = -1e4
"""Floats of this or less are taken for entries of masks."""

_FLOATS = re.compile(
    r"2\^(?P<exponent>-?\d{1,3})(?P<sign>[+*-]?)(?P<capped>(?<=\+) to 1)?"
    r"|(?P<how>near|const|mask) (?P<value>-?(?:inf|\d+(?:\.\d+)?(?:e[+-]\d+)?))"
    r"|(?P<either>0 or 1)"
)
_INTEGERS = re.compile(
    r"(?:(?P<mark>-\d{1,18}) or )?(?P<low>-?\d{1,18})\.\.(?P<high>-?\d{1,18})(?P<sorted> sorted)?"
    r"|const (?P<value>-?\d{1,18})"
)
_BOOLS = ("bool", "true", "false")
_PADDED = re.compile(r"(?P<rest>.+) with (?P<mark>-?\d{1,18}|true|false) (?P<end>first|last)")

_MOST_EXPONENT = 127
"""The largest exponent of float32, in which numbers are drawn."""
_LARGE = 3
"""Exponent of one large row of a synthetic tensor. Without it, a clamp in the code would change nothing."""


def kind_of(tensor: Tensor, *, weight: bool = False) -> str:
    """Return the recipe of a tensor. It is coarse, so that similar tensors have the same one.

    Args:
        tensor: Any tensor of floats, complex numbers, integers or bools.
        weight: Whether it is a parameter. Its synthetic elements have to differ from each other.

    >>> kind_of(torch.randn(100) / 9), kind_of(torch.rand(100)), kind_of(torch.arange(8)), kind_of(torch.ones(3))
    ('2^-3', '2^-1+ to 1', '0..7 sorted', 'const 1')
    >>> kind_of(torch.tensor([0, -torch.inf])), kind_of(torch.tensor([17, 900, 34]))
    ('mask -inf', '0..511')
    """
    with statistics.ambient_modes_disabled(), torch.no_grad():
        x = tensor.detach()
        if x.is_complex():
            x = x.abs()
        if x.dtype == torch.bool:
            return _kind_of_padded(x) or ("true" if x.all() else "bool" if x.any() else "false")
        if not x.is_floating_point():
            return _kind_of_padded(x) or _kind_of_integers(x.to(torch.int64)) if x.numel() else "0..0"
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        kind = _kind_of_floats(wide, torch.finfo(x.dtype).min / 2, weight) if x.numel() else "2^0"
        if kind == "0 or 1":
            return _kind_of_padded(x) or kind
        rows = x.dim() > 1 and x.numel() > x.shape[-1]
        plain = _FLOATS.fullmatch(kind) if rows and not weight else None
        small = plain is not None and plain["exponent"] and not plain["sign"] and int(plain["exponent"]) < _LARGE
        return f"{kind}*" if small else kind


def as_mask(tensor: Tensor) -> Tensor:
    """Return which entries an additive mask leaves, as bools, so that masks of any dtype and number are alike.

    Any other tensor is returned as it is.

    >>> as_mask(torch.tensor([0.0, -torch.inf])), as_mask(torch.tensor([0.5, -torch.inf]))
    (tensor([ True, False]), tensor([0.5000,   -inf]))
    """
    with statistics.ambient_modes_disabled(), torch.no_grad():
        x = tensor.detach()
        floating = has_dense_storage(x) and x.is_floating_point() and x.numel()
        if not floating or not x.amin() <= _EXTREME:
            return tensor
        left = x == 0
        return left if bool((left | (x <= _EXTREME)).all()) else tensor


def _kind_of_padded(x: Tensor) -> str | None:
    """Return the recipe of tokens or a mask with padding, or `None`. Rows begin or end with one repeated value then."""
    if x.dim() < 2 or x.shape[-1] < 3 or x.numel() != x.shape[0] * x.shape[-1]:
        return None
    rows = x.reshape(x.shape[0], -1).to(torch.int64)
    a_mask = bool(((rows == 0) | (rows == 1)).all())
    for end, ordered in (("last", rows.flip(-1)), ("first", rows)):
        # In a mask, a single position may be padding. Among tokens, the same one twice in a row is more than chance.
        at_end = ordered[:, 0] if a_mask else ordered[:, 0][ordered[:, 0] == ordered[:, 1]]
        for mark in at_end.unique().tolist()[:2]:
            marked = ordered == mark
            only_there = bool((marked.cumprod(-1) == marked).all()) and not bool(marked.all(-1).any())
            # If every row of a mask has both values, either of them may be the mark.
            if only_there and not (a_mask and bool(marked.any(-1).all())):
                rest = ordered[~marked]
                if x.dtype == torch.bool:
                    return f"{_BOOLS[1 + mark]} with {_BOOLS[2 - mark]} {end}"
                return f"{_kind_of_integers(rest).removesuffix(' sorted')} with {mark} {end}"
    return None


def _kind_of_floats(x: Tensor, least: float, weight: bool) -> str:
    low, high = (bound.item() for bound in x.aminmax())
    if not (low > _EXTREME and high < math.inf):  # with a NaN, both comparisons are false
        masked = x <= _EXTREME
        if masked.any() and not x[~masked].any():
            return f"mask {low:.9g}"
        x = x[x.isfinite() & (x > least)]
        if not x.numel():
            return "2^0"
        low, high = (bound.item() for bound in x.aminmax())
    scale = max(-low, high)
    if scale == 0:
        return "2^0"  # it is zero by initialization, as gates are at first
    if low == high and x.numel() > 1:
        return f"{'near' if weight else 'const'} {low:.3g}"
    if low == 0 and high == 1 and not weight and bool(((x == 0) | (x == 1)).all()):
        return "0 or 1"
    if not 1e-15 < scale < 1e15:
        x = x / scale  # squares would overflow
    else:
        scale = 1.0
    rms = torch.linalg.vector_norm(x).item() / math.sqrt(x.numel())
    exponent = min(max(round(math.log2(scale) + math.log2(rms)), -_MOST_EXPONENT), _MOST_EXPONENT)
    sign = ("+ to 1" if high <= 1 else "+") if low >= 0 else "-" if high <= 0 else ""
    return f"2^{exponent}{sign}"


def _kind_of_integers(x: Tensor) -> str:
    low, high = (int(bound) for bound in x.aminmax())
    if low == high:
        return f"const {low}"
    if x.dim() and x.shape[-1] > 2 and bool((x.diff(dim=-1) >= 0).all()):
        return f"{low}..{high} sorted"
    mark = ""
    if low < 0 <= high:
        negative = x[x < 0]
        if bool((negative == low).all()):
            mark, low = f"{low} or ", 0
    if 0 <= 2 * low <= high:
        low, high = 0, (1 << (high + 1).bit_length() - 1) - 1
    return f"{mark}{low}..{high}"


def fits(kind: str, dtype: torch.dtype, most: int | None = None) -> bool:
    """Whether a recipe, which may come from a file, is valid for a dtype.

    Args:
        kind: The recipe.
        dtype: Dtype of the tensor to generate.
        most: Upper bound of integers, exclusive.

    >>> (
    ...     fits("2^-3+", torch.float16),
    ...     fits("2^-3", torch.int64),
    ...     fits("0..9", torch.int64, 8),
    ...     fits("rm -rf", torch.bool),
    ... )
    (True, False, False, False)
    """
    padded = _PADDED.fullmatch(kind)
    if padded is not None:
        mark = padded["mark"]
        mark = mark if dtype == torch.bool or mark in _BOOLS else f"const {mark}"
        return not dtype.is_complex and all(fits(part, dtype, most) for part in (padded["rest"], mark))
    if dtype == torch.bool:
        return kind in _BOOLS
    if dtype.is_floating_point or dtype.is_complex:
        found = _FLOATS.fullmatch(kind)
        return found is not None and (found["exponent"] is None or abs(int(found["exponent"])) <= _MOST_EXPONENT)
    match = _INTEGERS.fullmatch(kind)
    if match is None:
        return False
    bounds = [int(match[name]) for name in ("mark", "low", "high", "value") if match[name] is not None]
    limits = torch.iinfo(dtype)
    in_order = match["low"] is None or int(match["low"]) <= int(match["high"])
    return in_order and all(limits.min <= n <= limits.max and (most is None or n < most) for n in bounds)


def synthetic(kind: str, shape: Sequence[int], name: str, dtype: torch.dtype, *, draws: Draws | None = None) -> Tensor:
    """Return the synthetic tensor of a recipe, on the CPU, in memory of its own. It depends only on the arguments.

    Args:
        kind: The recipe, for which `fits` is true.
        shape: Shape of the tensor.
        name: Its role in the call.
        dtype: Dtype of the tensor.
        draws: Source of normal numbers.

    >>> synthetic("const 3", (2,), "input", torch.float32)
    tensor([3., 3.])
    >>> synthetic("0..3 sorted", (4,), "input", torch.int64)
    tensor([0, 1, 2, 3])
    """
    draws = draws or Draws()
    padded = _PADDED.fullmatch(kind)
    if padded is not None:
        rest = synthetic(padded["rest"], shape, name, dtype, draws=draws)
        mark = padded["mark"] == "true" if padded["mark"] in _BOOLS else int(padded["mark"])
        return _padded(rest, mark, first=padded["end"] == "first")
    if dtype == torch.bool:
        return _coins(draws(shape, name)) if kind == "bool" else torch.full(tuple(shape), kind == "true")
    if dtype.is_complex:
        numbers = synthetic(kind, [*shape, 2], name, torch.float32, draws=draws)
        return torch.view_as_complex(numbers).to(dtype)
    if dtype.is_floating_point:
        return _floats(kind, shape, name, draws).to(dtype)
    return _integers(kind, shape, name, draws).to(dtype)


def _floats(kind: str, shape: Sequence[int], name: str, draws: Draws) -> Tensor:
    match = _FLOATS.fullmatch(kind)
    assert match is not None, kind
    if match["either"]:
        return _coins(draws(shape, name)).float()
    if match["exponent"]:
        numbers = draws(shape, name, int(match["exponent"]), match["sign"])
        if match["sign"] == "*" and numbers.dim() > 1 and numbers.numel():
            rows = numbers.view(-1, numbers.shape[-1])
            # Which row is large depends on the name, as two large rows may cancel.
            rows[seeding.derive(0, f"row {name}") % len(rows)] *= 2.0 ** (_LARGE - int(match["exponent"]))
        return numbers.clamp_(max=1) if match["capped"] else numbers
    value = float(match["value"])
    if match["how"] == "const":
        return torch.full(tuple(shape), value, dtype=torch.float64)
    if match["how"] == "near":
        return draws(shape, name).div_(8).add_(1).mul_(value)
    # In float64, because the least number of a dtype, rounded to the digits of a recipe, is beyond the dtype.
    return torch.where(_coins(draws(shape, name)), 0.0, torch.tensor(value, dtype=torch.float64))


def _integers(kind: str, shape: Sequence[int], name: str, draws: Draws) -> Tensor:
    match = _INTEGERS.fullmatch(kind)
    assert match is not None, kind
    if match["value"]:
        return torch.full(tuple(shape), int(match["value"]))
    low, high = int(match["low"]), int(match["high"])
    if match["sorted"] and len(shape):
        steps = torch.linspace(low, high, shape[-1], dtype=torch.float64).round().long()
        return steps.expand(tuple(shape)).contiguous()
    if (low, high) == (0, 1) and not match["mark"]:
        return _coins(draws(shape, name)).long()
    numbers = seeding.randint(low, high + 1, shape, seed=0, name=name, device="cpu")
    if match["mark"]:
        numbers[draws(shape, name) > 0.5] = int(match["mark"])
    return numbers


def _padded(tensor: Tensor, mark: bool | int, *, first: bool) -> Tensor:
    """Return the tensor with a mark at one end of its rows: on a quarter of the second, half of the third and so on.

    Tokens and their mask have as many rows of one length, and so are marked alike. The first of several rows has no
    mark.
    """
    if not tensor.dim() or tensor.shape[-1] < 2 or not tensor.numel():
        return tensor
    tensor = tensor.clone()
    rows = tensor.view(-1, tensor.shape[-1])
    length = tensor.shape[-1]
    for i, row in enumerate(rows if len(rows) == 1 else rows[1:]):
        count = max(1, length * (i % 3 + 1) // 4)
        row[slice(count) if first else slice(length - count, length)] = mark
    return tensor


def _coins(numbers: Tensor) -> Tensor:
    """Return random bools. The first in each row is true and the second false, so that no row of a mask is constant."""
    coins = numbers > 0
    if coins.dim():
        coins[..., :1] = True
        coins[..., 1:2] = False
    return coins


_PERIOD = 131_101  # at most so many numbers are drawn; it is a prime, so that rows do not repeat
_EXACT = 60  # powers of two up to this exponent change no digit of numbers that are drawn, or of these scaled


class Draws:
    """Normal numbers by shape and name, in new memory. What is drawn once is kept, up to `_PERIOD` numbers a name.

    >>> draws = Draws()
    >>> torch.equal(draws((2, 3), "input", 2, "+"), draws((2, 3), "input").abs() * 4)
    True
    """

    _MOST = 1 << 28  # bytes of numbers that are kept

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], Tensor] = {}
        self._bytes = 0

    def __call__(
        self, shape: Sequence[int], name: str, exponent: int = 0, sign: str = "", *, factor: float = 1.0
    ) -> Tensor:
        """Return the numbers of that shape and name times a power of two, and with a sign their magnitudes with it.

        After `_PERIOD` they repeat, each time slightly larger. All are multiplied by ``factor`` besides.
        """
        count = math.prod(shape)
        key = name, min(count, _PERIOD)
        if key not in self._kept:
            drawn = seeding.randn(key[1:], seed=0, name=name, device="cpu", dtype=torch.float32)
            if self._bytes + drawn.nbytes > self._MOST:
                self._kept.clear()
                self._bytes = 0
            self._bytes += drawn.nbytes
            self._kept[key] = drawn
        numbers = self._kept[key]
        early = exponent if abs(exponent) <= _EXACT else 0
        numbers = numbers * (2.0**early * factor)
        if sign in ("+", "-"):
            numbers = numbers.abs_() if sign == "+" else numbers.abs_().neg_()
        if count > _PERIOD:
            scales = 1 + torch.arange(-(-count // _PERIOD)) % 512 / 4096
            numbers = (scales[:, None] * numbers).view(-1)[:count]
        return (numbers if early == exponent else numbers.mul_(2.0**exponent)).view(tuple(shape))


def head_of(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Return the prefix of a recipe: the shape, and the dtype if it is unusual, as half precision is not."""
    dtype = widened(dtype)
    usual = dtype in (torch.float32, torch.int64, torch.bool)
    return ("x".join(map(str, shape)) or "scalar") + ("" if usual else f":{str(dtype).removeprefix('torch.')}")


def shape_of(head: str) -> tuple[int, ...]:
    """Return the shape in such a prefix.

    >>> shape_of("2x3:float64")
    (2, 3)
    """
    return tuple(int(size) for size in head.partition(":")[0].split("x") if size.isdecimal())
