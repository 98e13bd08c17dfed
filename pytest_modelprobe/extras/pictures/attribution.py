"""Where in its input a model looks.

The test knows where the object is in an image, and asserts that the map of `ModelProbe.grad_cam` is there. The maps
are nested lists here, because nothing after the record imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pytest_modelprobe.exceptions import NothingObservedError, UsageError
from pytest_modelprobe.text import Cell, count, failed, out_of

__tracebackhide__ = True  # a traceback ends at the line of the test

Box = tuple[int, int, int, int]
Map = list[list[float]]


def assert_attends_to(cam: Any, box: Box | Sequence[Box], *, share: float = 0.5) -> None:
    """Assert that enough of a map's mass, as `ModelProbe.grad_cam` returns it, is inside a box.

    Args:
        cam: The map of one image (H, W), or of several (N, H, W): a tensor or an array, nowhere negative.
        box: ``(top, left, bottom, right)`` in pixels of the input, bottom and right exclusive, as in a slice; or one
            for each image.
        share: The minimum share of the mass inside, from 0 to 1.

    Raises:
        AssertionError: Less of a map is inside.
        NothingObservedError: A map is zero everywhere, or there is none.
        UsageError: The map or a box has another form.

    >>> import torch
    >>> cam = torch.zeros(8, 8)
    >>> cam[2:4, 2:4] = 1
    >>> assert_attends_to(cam, (1, 1, 5, 5), share=0.9)
    """
    if not 0 <= share <= 1:
        raise UsageError(f"share is a part of the mass, from 0 to 1; got {share!r}")
    maps = _maps(cam)
    boxes = _boxes(box, len(maps))
    rows: list[list[Cell]] = []
    worst: list[tuple[float, int]] = []
    for i, (one, where) in enumerate(zip(maps, boxes, strict=True)):
        inside, center, peak = _mass(one, where, i)
        if inside < share:
            worst.append((inside, i))
            rows.append([str(i), f"{inside:.1%}", str(tuple(where)), f"({center[0]:.1f}, {center[1]:.1f})", str(peak)])
    if not rows:
        return
    order = sorted(range(len(rows)), key=lambda k: worst[k])
    least, image = worst[order[0]]
    raise failed(
        f"image {image} has {least:.1%} of its map in the box {tuple(boxes[image])}, not {share:.1%} or more; "
        f"{out_of(len(rows), len(maps), 'image')}",
        ["image", "in the box", "box", "center of mass", "maximum"],
        [rows[k] for k in order],
        "Positions are (row, column) in pixels of the input. modelprobe.grad_cam(..., path) draws the map.",
    )


def _maps(cam: Any) -> list[Map]:
    dimensions = len(getattr(cam, "shape", ()))
    if dimensions not in (2, 3):
        raise UsageError(f"cam is a map (H, W) or maps (N, H, W), as grad_cam returns them; got {_form(cam)}")
    maps: list[Map] = cam.tolist() if dimensions == 3 else [cam.tolist()]
    if not maps:
        raise NothingObservedError("there is no map to look at: the batch is empty")
    return maps


def _form(cam: Any) -> str:
    return f"shape {tuple(cam.shape)}" if hasattr(cam, "shape") else type(cam).__name__


def _boxes(box: Any, images: int) -> list[Box]:
    boxes = [box] * images if box and not isinstance(box[0], Sequence) else list(box)
    if len(boxes) != images:
        raise UsageError(
            f"there are {count(len(boxes), 'box')} for {count(images, 'image')}: give one, or one for each"
        )
    for one in boxes:
        if len(one) != 4 or not (0 <= one[0] < one[2] and 0 <= one[1] < one[3]):
            raise UsageError(f"a box is (top, left, bottom, right), bottom and right exclusive; got {tuple(one)}")
    return boxes


def _mass(one: Map, box: Box, image: int) -> tuple[float, tuple[float, float], tuple[int, int]]:
    """Return the share of a map inside a box, the center of its mass, and the position of its maximum."""
    top, left, bottom, right = box
    if bottom > len(one) or right > len(one[0]):
        raise UsageError(f"the box {tuple(box)} leaves the map, which has {len(one)} rows and {len(one[0])} columns")
    by_row = [math.fsum(row) for row in one]
    total = math.fsum(by_row)
    if not math.isfinite(total) or any(value < 0 for row in one for value in row):
        raise UsageError(f"the map of image {image} is not finite, or negative somewhere")
    if total == 0:
        raise NothingObservedError(
            f"the map of image {image} is zero everywhere: no position of the layer raises the score of the target"
        )
    inside = math.fsum(value for row in one[top:bottom] for value in row[left:right])
    down = math.fsum(i * mass for i, mass in enumerate(by_row)) / total
    across = math.fsum(j * value for row in one for j, value in enumerate(row)) / total
    peak = max((value, -i, -j) for i, row in enumerate(one) for j, value in enumerate(row))
    return inside / total, (down, across), (-peak[1], -peak[2])
