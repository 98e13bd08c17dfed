"""Positions that a mask leaves out: a model may compute anything there, and checks look at the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, checks


def decoder(probe: ModelProbe) -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=24, vocab_size=40,
        attn_implementation="eager",
    )  # fmt: skip
    return probe.build(lambda: transformers.LlamaForCausalLM(config))


def padded_left(probe: ModelProbe) -> dict[str, Tensor]:
    mask = torch.ones(3, 12, dtype=torch.long, device=probe.device)
    mask[0, :5] = mask[1, :2] = 0
    return {"input_ids": probe.randint(3, 40, (3, 12)), "attention_mask": mask}


@pytest.mark.parametrize("check", [checks.causal, checks.padding_invariant, checks.incremental], ids=str)
def test_what_a_decoder_computes_for_padding_on_the_left_does_not_matter(check: checks.Check) -> None:
    probe = ModelProbe()
    assert check(probe, decoder(probe), **padded_left(probe)).verdict == "holds"


class Leak(nn.Module):
    """A decoder whose output knows of later positions."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, **inputs: Tensor) -> Tensor:
        logits: Tensor = self.decoder(**inputs).logits
        return logits + logits.flip(1).cumsum(1).flip(1)


def test_later_positions_that_leak_are_seen_beside_padding_on_the_left() -> None:
    probe = ModelProbe()
    found = checks.causal.outcome(probe, Leak(decoder(probe)), **padded_left(probe))
    assert (found.verdict, found.layer) == ("broken", "(root)")


def test_the_later_half_is_that_of_the_positions_that_are_not_masked() -> None:
    probe, x = ModelProbe(), torch.ones(2, 9, dtype=torch.bool)
    x[:, 4:] = False  # padding on the right: what comes behind it is not replaced
    model = probe.build(lambda: Recurrent(bidirectional=True))
    assert checks.causal.outcome(probe, model, probe.randn(2, 9, 4), mask=x).verdict == "broken"
    model = probe.build(lambda: Recurrent(bidirectional=False))
    found = checks.causal(probe, model, probe.randn(2, 9, 4), mask=x)
    assert "at the first 2 and the first 1 of 9 positions without those that are masked" in found.text


class Recurrent(nn.Module):
    """Takes masks on the right."""

    def __init__(self, *, bidirectional: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True, bidirectional=bidirectional)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, mask.sum(1).cpu(), batch_first=True)
        output: Any = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])
        return output[0]  # type: ignore[no-any-return]


def test_a_mask_moves_with_the_elements_that_are_permuted() -> None:
    probe = ModelProbe()
    layer = probe.build(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[0, 4:] = True
    assert checks.permutation_equivariant(probe, layer, probe.randn(2, 6, 8), src_key_padding_mask=mask)


class Pool(nn.Module):
    """Adds up the positions that are kept."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x * mask[..., None]).sum(1)


def test_a_position_that_is_masked_in_each_row_need_not_be_used() -> None:
    mask = torch.ones(2, 6)
    mask[:, 5] = 0
    probe = ModelProbe()
    assert checks.inputs_used(probe, Pool(), probe.randn(2, 6, 8), mask=mask).verdict == "holds"
    x = probe.randn(2, 6, 8)
    found = checks.permutation_invariant(probe, Pool(), x, mask=mask)
    assert found.text == "1 output of 6 elements in 2 other orders"
