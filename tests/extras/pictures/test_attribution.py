"""Where a model looks."""

from __future__ import annotations

import pytest
import torch

from pytest_modelprobe import NothingObservedError, UsageError, assert_attends_to


def square(top: int, left: int, size: int = 2) -> torch.Tensor:
    cam = torch.zeros(8, 8)
    cam[top : top + size, left : left + size] = 1
    return cam


def test_a_map_inside_its_box_passes() -> None:
    assert_attends_to(square(2, 2).numpy(), (2, 2, 4, 4), share=1.0)
    assert_attends_to(torch.stack([square(0, 0), square(6, 6)]), [(0, 0, 2, 2), (6, 6, 8, 8)], share=1.0)


def test_a_failure_says_the_share_and_where_the_mass_is() -> None:
    cams = torch.stack([square(0, 0), square(3, 4), square(5, 5)])
    with pytest.raises(AssertionError) as failed:
        assert_attends_to(cams, (0, 0, 4, 5), share=0.5)
    assert str(failed.value) == (
        "image 2 has 0.0% of its map in the box (0, 0, 4, 5), not 50.0% or more; 2 of 3 images looked at\n"
        "\n"
        "image   in the box   box            center of mass   maximum\n"
        "2             0.0%   (0, 0, 4, 5)   (5.5, 5.5)       (5, 5)\n"
        "1            25.0%   (0, 0, 4, 5)   (3.5, 4.5)       (3, 4)\n"
        "\n"
        "Positions are (row, column) in pixels of the input. modelprobe.grad_cam(..., path) draws the map."
    )


@pytest.mark.parametrize(
    ("cam", "box", "message"),
    [
        (torch.ones(8, 8), (2, 0, 2, 2), r"a box is \(top, left, bottom, right\)"),
        (torch.ones(8, 8), (0, 0, 9, 2), "for a map of 8 rows and 8 columns"),
        (torch.ones(3, 8, 8), [(0, 0, 2, 2)], "1 box for 3 images"),
        (-torch.ones(8, 8), (0, 0, 2, 2), "not finite, or negative somewhere"),
    ],
)
def test_misuse_is_said(cam: torch.Tensor, box: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        assert_attends_to(cam, box)


def test_a_map_of_zeros_is_an_error() -> None:
    with pytest.raises(NothingObservedError, match="the map of image 0 is zero everywhere"):
        assert_attends_to(torch.zeros(8, 8), (0, 0, 2, 2))
    with pytest.raises(NothingObservedError, match="there is no map to look at"):
        assert_attends_to(torch.zeros(0, 8, 8), (0, 0, 2, 2))
