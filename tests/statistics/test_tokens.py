"""What is read of values by tokens is the same in every layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_modelprobe import assert_finite
from pytest_modelprobe.exceptions import UsageError

PADDED = torch.arange(24.0).reshape(2, 4, 3)
MASK = torch.tensor([[True, True, False, False], [True, True, True, True]])


def reading(modelprobe, x, tokens):
    return modelprobe.run(nn.Tanh(), x, tokens=tokens)["(root)"].output.forward


@pytest.mark.parametrize(
    ("x", "tokens"),
    [
        (PADDED[MASK], [2, 4]),
        (PADDED[MASK][None], [2, 4]),
        (torch.cat([PADDED[1], PADDED[0, :2]]), {1: 4, 0: 2}),
        (PADDED.flip(1), MASK.flip(1).long()),
        (PADDED.reshape(8, 3), MASK),
    ],
    ids=["packed", "a batch of one", "another order of requests", "padding on the left", "flat"],
)
def test_a_layout_does_not_change_what_is_read(modelprobe, x, tokens):
    # Padding on the left reverses the places here, and so the tokens: it is compared with its own packed row.
    plain = PADDED.flip(1)[MASK.flip(1)] if tokens is not None and x.shape == PADDED.shape else PADDED[MASK]
    found, expected = reading(modelprobe, x, tokens), reading(modelprobe, plain, [2, 4])
    assert found.fingerprint == pytest.approx(expected.fingerprint)
    assert found.statistics == expected.statistics


def test_another_token_is_another_fingerprint(modelprobe):
    swapped = PADDED[MASK][[1, 0, 2, 3, 4, 5]]
    found, expected = (reading(modelprobe, x, [2, 4]) for x in (swapped, PADDED[MASK]))
    assert found.fingerprint != pytest.approx(expected.fingerprint)


def test_one_row_for_each_request_is_that_of_its_last_token(modelprobe):
    rows = torch.randn(2, 5)

    class Last(nn.Module):
        def forward(self, x, rows):
            return rows + 0 * x.sum()

    found, expected = (
        modelprobe.run(Last(), PADDED[MASK], x, tokens=tokens)["(root)"].output.forward
        for x, tokens in ((rows.flip(0), {1: 4, 0: 2}), (rows, [2, 4]))
    )
    assert found.fingerprint == pytest.approx(expected.fingerprint)


@pytest.mark.parametrize(
    "tokens",
    [
        torch.zeros(2, 4),
        (1 - MASK.float()) * -1e9,
        torch.tensor([2, 4]),
        MASK.numpy(),
        MASK.tolist(),
        [2.0, 4.0],
        [-2, 8],
        [],
        {"a": 2, 1: 4},
        6,
    ],
    ids=repr,
)
def test_what_is_neither_a_mask_nor_lengths_is_refused(modelprobe, tokens):
    with pytest.raises(
        UsageError, match="tokens= is a mask of 1 at tokens and 0 elsewhere, or the lengths of requests"
    ):
        modelprobe.run(nn.Tanh(), PADDED, tokens=tokens)


def test_the_batch_may_be_behind_the_positions(modelprobe):
    found, expected = (reading(modelprobe, x, MASK) for x in (PADDED.transpose(0, 1), PADDED))
    assert found.fingerprint == pytest.approx(expected.fingerprint)
    assert found.statistics == expected.statistics


@pytest.mark.parametrize("tokens", [[2, 3], [3, 4, 5], torch.ones(2, 5)], ids=repr)
def test_tokens_for_which_no_value_has_a_place_are_refused(modelprobe, tokens):
    said = r"tokens= says \d+ tokens, and no value of the model has a place for each: the first is of shape \(6, 3\); "
    with pytest.raises(UsageError, match=said):
        modelprobe.run(nn.Tanh(), PADDED[MASK], tokens=tokens)
    model = nn.Tanh()
    watch = modelprobe.watch(model, tokens=tokens)
    model(PADDED[MASK])
    with pytest.raises(UsageError, match=said):
        assert_finite(watch)


def test_one_token_may_be_of_any_shape(modelprobe):
    assert modelprobe.run(nn.Tanh(), PADDED[:1, :1], tokens=[1])
    assert modelprobe.run(nn.Tanh(), PADDED[0, 0], tokens=[1])
