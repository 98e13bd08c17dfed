"""`checks.inputs_used` of inputs that have no gradient: identifiers, masks, labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, checks


class Words(nn.Module):
    """Embeds words, and does with the other inputs what ``code`` says."""

    def __init__(self, code: Any) -> None:
        super().__init__()
        self.code, self.words, self.kinds, self.head = code, nn.Embedding(10, 4), nn.Embedding(2, 4), nn.Linear(4, 10)

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
        kind: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Any:
        return self.code(self, self.words(ids), mask=mask, labels=labels, kind=kind, types=token_type_ids)


def pooled(model: Words, x: Tensor, *, mask: Tensor, **_: Any) -> Tensor:
    attention: Tensor = F.scaled_dot_product_attention(x, x, x, None if mask.all() else mask[:, None].bool())
    return model.head(attention)  # type: ignore[no-any-return]


def with_loss(model: Words, x: Tensor, *, labels: Tensor, **_: Any) -> dict[str, Tensor]:
    logits = model.head(x)
    return {"logits": logits, "loss": F.cross_entropy(logits.mT, labels)}


def conditioned(model: Words, x: Tensor, *, kind: Tensor, **_: Any) -> Tensor:
    return model.head(x + model.kinds(kind)[:, None])  # type: ignore[no-any-return]


def alone(model: Words, x: Tensor, **_: Any) -> Tensor:
    return model.head(x)  # type: ignore[no-any-return]


def outcome(code: Any, *args: Tensor, **inputs: Tensor) -> checks.Outcome:
    probe = ModelProbe()
    given = args or (probe.randint(0, 10, (3, 6)),)
    return checks.inputs_used.outcome(probe, probe.build(lambda: Words(code)), *given, **inputs)


ONES, ZEROS = torch.ones(3, 6, dtype=torch.long), torch.zeros(3, 6, dtype=torch.long)


@pytest.mark.parametrize(
    ("code", "inputs", "said"),
    [
        (alone, {}, "1 input; input replaced by others that occur in it"),
        (pooled, {"mask": ONES}, "; mask flipped at its middle position"),
        (with_loss, {"labels": ONES}, "; labels replaced by integers from 0 to 1"),
        (with_loss, {"labels": ZEROS}, "; labels replaced by 1"),
        (conditioned, {"kind": torch.zeros(3, dtype=torch.long)}, "; kind replaced by 1"),
        (alone, {"labels": ZEROS - 100}, "; labels not looked at, as no other valid values are known"),
    ],
)
def test_an_input_without_gradient_is_replaced_as_a_whole(code: Any, inputs: Any, said: str) -> None:
    found = outcome(code, **inputs)
    assert found.verdict == "holds", found
    assert found.text.endswith(said)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (
            {"mask": ONES},
            "mask is not used: flipped at its middle position, flipped at random and flipped, it changes no output",
        ),
        ({"labels": ZEROS}, "labels is not used: replaced by 1, it changes no output"),
        ({"kind": torch.tensor([0, 1, 0])}, "kind is not used: replaced by others that occur in it and replaced by "),
    ],
)
def test_an_input_whose_replacement_changes_nothing_is_named(inputs: Any, said: str) -> None:
    found = outcome(alone, **inputs)
    assert (found.verdict, found.layer) == ("broken", next(iter(inputs)))
    assert found.text.startswith(said)


def test_types_of_tokens_and_positions_that_are_not_used_are_a_hint() -> None:
    found = outcome(alone, token_type_ids=ZEROS)
    assert (found.verdict, found.layer) == ("hint", "token_type_ids")
    assert outcome(alone, token_type_ids=ZEROS, labels=ZEROS.clone()).layer == "labels"


def test_identifiers_that_are_not_used_are_named_with_the_layer_that_sees_them_last() -> None:
    found = outcome(lambda model, x, **_: model.head(torch.zeros_like(x)))
    assert found.text.startswith("input is not used: replaced by others that occur in it and replaced by integers ")
    assert found.text.endswith("The values reach words output and no further.")


def test_a_mask_may_be_given_by_its_position() -> None:
    ids = ModelProbe().randint(0, 10, (3, 6))
    assert outcome(pooled, ids, ONES).text == (
        "2 inputs; input[0] replaced by others that occur in it; input[1] flipped at its middle position"
    )
