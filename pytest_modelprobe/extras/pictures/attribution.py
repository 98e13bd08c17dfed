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
    maps: list[Map] = cam.tolist() if len(cam.shape) == 3 else [cam.tolist()]
    if not maps:
        raise NothingObservedError("there is no map to look at: the batch is empty")
    boxes: Any = [box] * len(maps) if box and not isinstance(box[0], Sequence) else box
    if len(boxes) != len(maps):
        given = f"{count(len(boxes), 'box')} for {count(len(maps), 'image')}"
        raise UsageError(f"there are {given}: give one, or one for each")
    found: list[tuple[float, int, list[Cell]]] = []
    for image, (one, (top, left, bottom, right)) in enumerate(zip(maps, boxes, strict=True)):
        if not (0 <= top < bottom <= len(one) and 0 <= left < right <= len(one[0])):
            raise UsageError(
                "a box is (top, left, bottom, right) in the map, bottom and right exclusive; "
                f"got {tuple(boxes[image])} for a map of {len(one)} rows and {len(one[0])} columns"
            )
        by_row = [math.fsum(row) for row in one]
        total = math.fsum(by_row)
        if not math.isfinite(total) or any(value < 0 for row in one for value in row):
            raise UsageError(f"the map of image {image} is not finite, or negative somewhere")
        if total == 0:
            raise NothingObservedError(
                f"the map of image {image} is zero everywhere: no position of the layer raises the score of the target"
            )
        inside = math.fsum(value for row in one[top:bottom] for value in row[left:right]) / total
        down = math.fsum(i * mass for i, mass in enumerate(by_row)) / total
        across = math.fsum(j * value for row in one for j, value in enumerate(row)) / total
        _, i, j = max((value, -i, -j) for i, row in enumerate(one) for j, value in enumerate(row))
        places = [str(tuple(boxes[image])), f"({down:.1f}, {across:.1f})", str((-i, -j))]
        found.append((inside, image, [str(image), f"{inside:.1%}", *places]))
    less = sorted(one for one in found if one[0] < share)
    if less:
        least, image, _ = less[0]
        raise failed(
            f"image {image} has {least:.1%} of its map in the box {tuple(boxes[image])}, not {share:.1%} or more; "
            f"{out_of(len(less), len(maps), 'image')}",
            ["image", "in the box", "box", "center of mass", "maximum"],
            [row for _, _, row in less],
            "Positions are (row, column) in pixels of the input. modelprobe.grad_cam(..., path) draws the map.",
        )
