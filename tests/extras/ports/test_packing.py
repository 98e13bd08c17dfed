"""Documents in one row that see each other or count positions on, each beside a healthy twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, UsageError, checks


class Attention(nn.Module):
    """One head over flattened documents, of which ``ends`` has the boundaries, as cu_seqlens."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        document = torch.bucketize(torch.arange(len(x)), ends[1:], right=True)
        same = document[:, None] == document
        q, k, v = self.qkv(x).chunk(3, -1)
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=same))
        return out


class Net(nn.Module):
    """Two layers over flattened documents. ``mask`` says which of them get the boundaries."""

    def __init__(self, mask: Sequence[bool] = (True, True), *, restart: bool = True) -> None:
        super().__init__()
        self.mask, self.restart = mask, restart
        self.embed = nn.Embedding(32, 8)
        self.positions = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Attention() for _ in mask)
        self.last = nn.LayerNorm(8)

    def forward(self, ids: Tensor, ends: Tensor) -> Tensor:
        positions = torch.arange(len(ids))
        if self.restart:
            positions = positions - ends[torch.bucketize(positions, ends[1:], right=True)]
        x = self.embed(ids) + self.positions(positions)
        for layer, mask in zip(self.layers, self.mask, strict=True):
            x = x + layer(x, ends if mask else torch.tensor([0, len(ids)]))
        out: Tensor = self.last(x)
        return out


def flat(documents: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat(list(documents)), torch.tensor([0, *(len(one) for one in documents)]).cumsum(0)


def in_a_row(documents: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(documents), 1)


@pytest.fixture
def probe() -> ModelProbe:
    return ModelProbe()


@pytest.fixture
def ids(probe: ModelProbe) -> Tensor:
    return probe.randint(0, 32, (12,))


def outcome(probe: ModelProbe, model: nn.Module, ids: Tensor, **options: Any) -> checks.Outcome:
    return checks.packed_documents.outcome(probe, model, ids, flat([ids])[1], pack=flat, axis=0, **options)


# --- documents that see each other ------------------------------------------------------------------------------------


def test_documents_that_know_their_ends_are_as_alone(probe: ModelProbe, ids: Tensor) -> None:
    found = outcome(probe, probe.build(Net), ids)
    assert str(found) == "packed_documents holds for Net: documents of 3, 5 and 4 positions as alone, in 10 layers"
    other = outcome(probe, probe.build(Net), ids, lengths=(1, 11))
    assert other.text == "documents of 1 and 11 positions as alone, in 10 layers"


def test_the_first_layer_that_sees_another_document_is_named(probe: ModelProbe, ids: Tensor) -> None:
    model = probe.build(lambda: Net((True, False)))
    with pytest.raises(AssertionError) as error:
        checks.packed_documents(probe, model, ids, flat([ids])[1], pack=flat, axis=0)
    first, table, advice = str(error.value).split("\n\n")
    assert first.startswith("layers.1 sees another document: document 2 of 3 changed by ")
    assert first.endswith(" % in input of layers.1.out when document 1 was replaced")
    assert [line.split("   ")[0].rstrip() for line in table.splitlines()] == [
        "tensor",
        "layers.1 input of layers.1.out",
        "layers.1.out output",
        "layers.1 output",
        "(root) input of last",
        "last output",
        "(root) output",
    ]
    assert all(line.endswith("2 and 3") for line in table.splitlines()[1:])
    assert advice.startswith(
        "Look at what tells the attention where a document ends: a block-diagonal mask, cu_seqlens"
    )


def test_a_recurrence_goes_on_in_the_next_document(probe: ModelProbe) -> None:
    x = probe.randn(1, 12, 4)
    found = checks.packed_documents.outcome(probe, nn.LSTM(4, 8, batch_first=True), x, pack=in_a_row)
    assert found.text.startswith("(root) sees another document: document 2 of 3 changed by")


# --- positions --------------------------------------------------------------------------------------------------------


def test_positions_that_go_on_are_named(probe: ModelProbe, ids: Tensor) -> None:
    found = outcome(probe, probe.build(lambda: Net(restart=False)), ids)
    assert found.layer == "positions"
    assert found.text.startswith(
        "positions differs between a document in a row and the document alone: document 2 of 3, at positions 3 to 7, "
        "changed by "
    )
    assert "No document changes with another one: look at the positions, which begin at 0" in found.text


# --- transformers -----------------------------------------------------------------------------------------------------


def tiny(probe: ModelProbe, name: str, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    options = {
        "Llama": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 1, "eos_token_id": 2},
    }
    config = getattr(transformers, f"{name}Config")(vocab_size=30, **options[name], **more)
    made = {"Llama": "LlamaForCausalLM", "GPT2": "GPT2LMHeadModel"}
    return probe.build(lambda: getattr(transformers, made[name])(config))


def masked(positions: Callable[[Sequence[Tensor]], Tensor]) -> Callable[[Sequence[Tensor]], dict[str, Any]]:
    """Pack with a block-diagonal causal mask, and with these positions."""

    def pack(documents: Sequence[Tensor]) -> dict[str, Any]:
        row = in_a_row(documents)
        of = torch.cat([torch.full((one.shape[1],), i) for i, one in enumerate(documents)])
        mask = (of[:, None] == of) & torch.ones(len(of), len(of), dtype=torch.bool).tril()
        return {"input_ids": row, "attention_mask": mask[None, None], "position_ids": positions(documents)[None]}

    return pack


def begun_anew(documents: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.arange(one.shape[1]) for one in documents])


def counted_on(documents: Sequence[Tensor]) -> Tensor:
    return torch.arange(in_a_row(documents).shape[1])


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_a_causal_model_takes_positions_that_begin_anew(name: str, probe: ModelProbe) -> None:
    found = checks.packed_documents(probe, tiny(probe, name), probe.randint(3, 30, (2, 12)))
    assert found.text.startswith("documents of 3, 5 and 4 positions as alone, in ")


def test_a_cache_makes_a_model_forget_them(probe: ModelProbe) -> None:
    ids = probe.randint(3, 30, (2, 12))
    found = checks.packed_documents.outcome(probe, tiny(probe, "GPT2"), ids, use_cache=True)
    assert (found.verdict, found.layer) == ("broken", "transformer.h.0.attn")


def test_rotary_positions_that_go_on_change_no_output(probe: ModelProbe) -> None:
    model, ids = tiny(probe, "Llama"), probe.randint(3, 30, (2, 12))
    found = checks.packed_documents(probe, model, ids, pack=masked(counted_on))
    assert found.text.endswith("; layers inside differ, but the output agrees: first model.rotary_emb output[0]")


def test_a_mask_that_is_added_as_numbers_is_named(probe: ModelProbe) -> None:
    def as_integers(documents: Sequence[Tensor]) -> dict[str, Any]:
        given = masked(begun_anew)(documents)
        return {**given, "attention_mask": given["attention_mask"].float()}

    found = checks.packed_documents.outcome(
        probe, tiny(probe, "GPT2", attn_implementation="eager"), probe.randint(3, 30, (2, 12)), pack=as_integers
    )
    assert (found.verdict, found.layer) == ("broken", "transformer.h.0.attn")


# --- what cannot be checked -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "shape", "pack", "said"),
    [
        (nn.Linear(4, 2), (1, 12, 4), None, "its forward has no argument position_ids: give pack=, a function that"),
        (nn.Linear(4, 2), (1, 3, 4), in_a_row, "there are 3 positions: give it 4 or more"),
        (
            nn.AdaptiveAvgPool2d((2, 4)),
            (1, 12, 4),
            in_a_row,
            "no output of the packed row has an axis of its",
        ),
    ],
)
def test_what_it_means_nothing_for(model: nn.Module, shape: Any, pack: Any, said: str, probe: ModelProbe) -> None:
    found = checks.packed_documents.outcome(probe, model, probe.randn(*shape), pack=pack)
    assert found.verdict == "not applicable"
    assert found.text.startswith(said)


def raising(documents: Sequence[Tensor]) -> Tensor:
    raise ValueError("too short")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lengths": (3, 4)}, r"lengths= are two or more lengths that add up to the 12 positions; got \(3, 4\)"),
        ({"pack": raising}, "pack= raised ValueError: too short, called with 1 document"),
    ],
)
def test_options_are_checked(options: Any, said: str, probe: ModelProbe) -> None:
    with pytest.raises(UsageError, match=said):
        checks.packed_documents(probe, nn.Linear(4, 2), probe.randn(1, 12, 4), **{"pack": in_a_row, **options})


def test_a_model_that_is_random_in_evaluation_is_not_applicable(probe: ModelProbe) -> None:
    class Random(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x)

    found = checks.packed_documents.outcome(probe, Random(), probe.randn(1, 12, 4), pack=in_a_row)
    assert found.text == "random in evaluation: another seed changes what (root) returns"
