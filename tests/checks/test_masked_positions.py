"""Positions that a mask leaves out: a model may compute anything there, and checks look at the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.mixtral import modeling_mixtral

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


def test_a_mask_of_the_decoder_is_none_of_the_encoder() -> None:
    probe = ModelProbe()
    config = transformers.BartConfig(
        encoder_layers=1, decoder_layers=1, d_model=16, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, vocab_size=40,
    )  # fmt: skip
    model = probe.build(lambda: transformers.BartModel(config))
    inputs = {name: probe.randint(3, 40, (3, 12), name=name) for name in ("input_ids", "decoder_input_ids")}
    inputs["decoder_attention_mask"] = torch.ones(3, 12, dtype=torch.long)
    found = checks.padding_invariant.outcome(probe, model, **inputs)
    assert found.text.startswith("no argument of shape (3, 12), the batch and axis 1 of input_ids, is called a mask of")
    found = checks.padding_invariant(probe, model, **inputs, attention_mask=torch.ones(3, 12, dtype=torch.long))
    assert "masked by 0 in attention_mask" in found.text


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


# --- losses of what is not masked ---------------------------------------------------------------------------------


class Tagger(nn.Module):
    """Predicts a label of each position; ``faulty`` is what averages over all positions."""

    def __init__(self, faulty: str) -> None:
        super().__init__()
        self.faulty, self.words, self.head = faulty, nn.Embedding(40, 8), nn.Linear(8, 40)

    def mean(self, name: str, x: Tensor, kept: Tensor) -> Tensor:
        return x.mean() if name == self.faulty else (x * kept).sum() / kept.sum()

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.words(ids))
        smooth = self.mean("loss", -logits.log_softmax(-1).mean(-1), labels != -100)
        squares = self.mean("z_loss", logits.logsumexp(-1).square(), mask)
        return {"logits": logits, "loss": F.cross_entropy(logits.mT, labels) + smooth, "z_loss": squares}


@pytest.mark.parametrize("faulty", ["", "loss", "z_loss"])
def test_a_loss_of_masked_positions_is_named(faulty: str) -> None:
    probe = ModelProbe()
    ids, mask = probe.randint(0, 40, (3, 12)), torch.ones(3, 12)
    found = checks.padding_invariant.outcome(probe, probe.build(lambda: Tagger(faulty)), ids, mask, labels=ids.flip(1))
    assert found.verdict == ("broken" if faulty else "holds")
    said = f"(root) depends on masked positions: output.{faulty} changed by "
    assert found.text.startswith(said) is bool(faulty)


class Autoencoder(nn.Module):
    """Returns its loss alone, of what is masked too if it is ``faulty``."""

    def __init__(self, faulty: bool) -> None:
        super().__init__()
        self.faulty, self.fc = faulty, nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        kept = torch.ones_like(mask) if self.faulty else mask
        return ((self.fc(x) - x).square().mean(-1) * kept).sum() / kept.sum()


@pytest.mark.parametrize("faulty", [False, True])
def test_a_loss_alone_that_moves_is_a_hint_as_the_mask_may_say_what_to_predict(faulty: bool) -> None:
    probe = ModelProbe()
    model = probe.build(lambda: Autoencoder(faulty))
    found = checks.padding_invariant.outcome(probe, model, probe.randn(3, 12, 4), torch.ones(3, 12))
    assert (found.verdict, found.layer) == (("hint", "(root)") if faulty else ("holds", None))


def test_a_loss_that_moves_is_a_hint_if_a_convolution_mixes_neighbors() -> None:
    class Blurred(Autoencoder):
        def forward(self, x: Tensor, mask: Tensor) -> Any:
            return x, super().forward(self.conv(x.mT).mT, mask)

    probe = ModelProbe()
    model = probe.build(lambda: Blurred(faulty=False))
    model.conv = nn.Conv1d(4, 4, 3, padding=1)
    found = checks.padding_invariant.outcome(probe, model, probe.randn(3, 12, 4), torch.ones(3, 12))
    assert found.verdict == "hint"


def test_a_loss_of_targets_that_cannot_be_ignored_is_not_judged() -> None:
    class Counted(Autoencoder):
        def forward(self, x: Tensor, mask: Tensor, targets: Tensor | None = None) -> Any:  # type: ignore[override]
            y = self.fc(x)
            return y, F.cross_entropy(y.mT, targets, ignore_index=0)

    probe = ModelProbe()
    targets = probe.randint(0, 4, (3, 12), name="targets")
    model = probe.build(lambda: Counted(faulty=False))
    found = checks.padding_invariant(probe, model, probe.randn(3, 12, 4), torch.ones(3, 12), targets=targets)
    assert found.verdict == "holds"


LABELED: dict[str, Any] = {
    "bert": (transformers.BertForMaskedLM, transformers.BertConfig, {}),
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, {"bos_token_id": 1, "eos_token_id": 2}),
    "mixtral": (
        transformers.MixtralForCausalLM,
        transformers.MixtralConfig,
        {"output_router_logits": True, "num_local_experts": 4, "num_key_value_heads": 1, "router_aux_loss_coef": 0.1},
    ),
}


def labeled(probe: ModelProbe, name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    kind, config, more = LABELED[name]
    common = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 40}
    own = {} if name == "gpt2" else {"intermediate_size": 24}
    model = probe.build(lambda: kind(config(**common, **own, **more)))
    ids = probe.randint(3, 40, (3, 12))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


@pytest.mark.parametrize("name", LABELED)
def test_the_losses_of_models_of_transformers_hold(name: str) -> None:
    probe = ModelProbe()
    model, inputs = labeled(probe, name)
    assert checks.padding_invariant(probe, model, **inputs).verdict == "holds"


def test_a_loss_of_the_balance_of_experts_that_counts_padding_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    balance = modeling_mixtral.load_balancing_loss_func
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", lambda *args: balance(*args[:3]))
    probe = ModelProbe()
    model, inputs = labeled(probe, "mixtral")
    found = checks.padding_invariant.outcome(probe, model, **inputs)
    assert found.text.startswith("(root) depends on masked positions: output.aux_loss changed by ")
