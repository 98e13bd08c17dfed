"""Models that go on from a state: chunk by chunk the same as at once, and the layer that a planted fault is in."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, UsageError, checks
from pytest_modelprobe.checks import Outcome

WORDS, WIDTH, HEADS, LENGTH = 40, 16, 2, 10
COMMON = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "vocab_size": WORDS,
    "max_position_embeddings": 24,
}

CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaModel.forward).parameters else "past_key_values"
"""The argument of models of transformers: ``cache`` since 5.24."""


def named(outcome: Outcome) -> str | None:
    """Return the layer that is told of, first thing in the message."""
    assert outcome.verdict == "broken", outcome
    assert outcome.layer
    assert str(outcome).startswith(f"{outcome.layer} differs when it is called chunk by chunk: ")
    return outcome.layer


def planted(module: nn.Module, **methods: Any) -> None:
    """Give one module other methods, as an edit of its class would."""
    module.__class__ = type(type(module).__name__, (type(module),), methods)


@pytest.fixture
def ids(probe: ModelProbe) -> Tensor:
    return probe.randint(3, WORDS, (3, LENGTH))


# --- a decoder by hand --------------------------------------------------------------------------------------------


def rotated(x: Tensor, start: int) -> Tensor:
    """Return queries or keys, (batch, heads, positions, width), turned by the angles of their positions."""
    half = x.shape[-1] // 2
    angles = torch.arange(start, start + x.shape[2])[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def start(self, past: Any, x: Tensor) -> int:
        return past[0].shape[2] if past else 0

    def seen(self, n: int, start: int) -> Tensor:
        return torch.ones(n, start + n, dtype=torch.bool).tril(start)

    def kept(self, past: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return (torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)) if past else (k, v)

    def forward(self, x: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        start = self.start(past, x)
        q, k = rotated(q, start), rotated(k, start)
        k, v = past = self.kept(past, k, v)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~self.seen(x.shape[1], k.shape[2] - x.shape[1]), float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), past


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Attention() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        x, kept = self.embed(ids), []
        for i, block in enumerate(self.blocks):
            y, state = block(x, cache[i] if cache else None)
            x = x + y
            kept.append(state)
        return self.head(self.norm(x)), kept


@pytest.fixture
def decoder(probe: ModelProbe) -> Any:
    return probe.build(Decoder)


def test_a_decoder_by_hand_goes_on(probe: ModelProbe, decoder: Any, ids: Tensor) -> None:
    found = checks.incremental(probe, decoder, ids)
    assert found.text == "13 layers in chunks of 5, 1, 2 and 2 positions"


def test_a_mask_that_ignores_the_cache_is_named(probe: ModelProbe, decoder: Any, ids: Tensor) -> None:
    planted(decoder.blocks[1], seen=lambda self, n, start: torch.ones(n, start + n, dtype=torch.bool).tril())
    found = checks.incremental.outcome(probe, decoder, ids)
    assert named(found) == "blocks.1"
    first, _, columns, row, *_ = str(found).splitlines()
    assert first.startswith("blocks.1 differs when it is called chunk by chunk: input of blocks.1.out changed by ")
    assert first.endswith(" at position 5, in chunks of 5, 1, 2 and 2 positions")
    assert columns.split("  ")[0] == "tensor"
    assert row.startswith("blocks.1 input of blocks.1.out ")
    assert row.endswith("position 5")


def test_rotary_angles_one_too_far_are_named(probe: ModelProbe, decoder: Any, ids: Tensor) -> None:
    planted(decoder.blocks[1], start=lambda self, past, x: past[0].shape[2] + 1 if past else 0)
    assert named(checks.incremental.outcome(probe, decoder, ids)) == "blocks.1"


def test_a_start_that_is_wrong_for_later_chunks_alone_is_named(probe: ModelProbe, decoder: Any, ids: Tensor) -> None:
    def start(self: Any, past: Any, x: Tensor) -> int:
        self.at = getattr(self, "at", 0) + 1 if past else x.shape[1] - 1  # the next one, however many came
        return self.at if past else 0

    planted(decoder.blocks[1], start=start)
    found = checks.incremental.outcome(probe, decoder, ids)
    assert named(found) == "blocks.1"
    assert " at positions 8 to 9, in chunks of 5, 1, 2 and 2 positions" in str(found).splitlines()[0]
    assert checks.incremental(probe, decoder, ids, chunks=[5, 1, 1, 1, 1, 1]).verdict == "holds"


def test_a_cache_that_is_overwritten_is_named(probe: ModelProbe, decoder: Any, ids: Tensor) -> None:
    def kept(self: Any, past: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        n = k.shape[2]
        return (torch.cat([past[0][:, :, :-n], k], 2), torch.cat([past[1][:, :, :-n], v], 2)) if past else (k, v)

    planted(decoder.blocks[1], kept=kept, seen=lambda self, n, start: torch.ones(n, start + n).bool().tril(start))
    assert named(checks.incremental.outcome(probe, decoder, ids)) == "blocks.1"


def test_a_mask_that_does_not_fit_is_told_with_what_goes(probe: ModelProbe, decoder: Any, ids: Tensor) -> None:
    planted(decoder.blocks[1], seen=lambda self, n, start: torch.ones(n, n, dtype=torch.bool).tril())
    found = checks.incremental.outcome(probe, decoder, ids)
    assert (found.verdict, found.layer) == ("broken", "blocks.1")
    assert found.text.startswith(
        "blocks.1 cannot continue from its state, in chunks of 5, 1, 2 and 2 positions: blocks.1 raised RuntimeError: "
    )
    assert "One position at a time it is right" in found.text
    assert checks.incremental(probe, decoder, ids, chunks=(5, 1, 1, 1, 1, 1)).verdict == "holds"


@pytest.mark.parametrize(("returned", "verdict"), [("cache", "broken"), ("other", "not applicable")])
def test_a_state_that_is_returned_by_name_has_to_be_taken(
    probe: ModelProbe, decoder: Any, ids: Tensor, returned: str, verdict: str
) -> None:
    class WithoutPast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = decoder

        def forward(self, ids: Tensor, cache: Any = None) -> Any:
            if cache is not None:
                raise ValueError("no past is supported")
            output = self.decoder(ids)
            return output if returned == "other" else {"logits": output[0], "cache": output[1]}

    assert checks.incremental.outcome(probe, WithoutPast(), ids).verdict == verdict


# --- models of transformers ---------------------------------------------------------------------------------------


def gpt2() -> Any:
    settings: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=WIDTH, n_layer=2, n_head=HEADS, vocab_size=WORDS, n_positions=24, **settings)  # type: ignore[call-arg]
    )


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON))  # type: ignore[arg-type]


HEALTHY: dict[str, Any] = {
    "gpt2": gpt2,
    "llama": llama,
    "mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(hidden_size=WIDTH, num_hidden_layers=2, vocab_size=WORDS, state_size=4)
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_models_of_transformers_go_on(probe: ModelProbe, name: str, ids: Tensor) -> None:
    found = checks.incremental(probe, probe.build(HEALTHY[name]), ids)
    assert found.verdict == "holds"
    assert int(found.text.split()[0]) > 15


def test_a_mask_and_labels_are_cut_as_the_ids_are(probe: ModelProbe, ids: Tensor) -> None:
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    assert checks.incremental(probe, probe.build(llama), **inputs).verdict == "holds"


def test_of_an_encoder_and_a_decoder_the_decoder_goes_on(probe: ModelProbe, ids: Tensor) -> None:
    settings = {"d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": HEADS, "vocab_size": WORDS}
    config = transformers.T5Config(**settings, decoder_start_token_id=0)
    model = probe.build(lambda: transformers.T5ForConditionalGeneration(config))
    found = checks.STANDARD["incremental"](probe, model, input_ids=ids, decoder_input_ids=ids.flip(1))
    assert found.text.endswith(", also behind padding on the left")
    found = checks.incremental.outcome(probe, model, input_ids=ids, labels=ids)
    assert found.text == "only the decoder continues from a state: give decoder_input_ids="


def test_positions_that_ignore_the_cache_are_named_in_gpt2(probe: ModelProbe, ids: Tensor) -> None:
    model = probe.build(gpt2)
    forward = type(model.transformer).forward

    def from_zero(self: Any, input_ids: Tensor, **more: Any) -> Any:
        more["position_ids"] = torch.arange(input_ids.shape[1])[None]
        return forward(self, input_ids, **more)

    planted(model.transformer, forward=from_zero)
    assert named(checks.incremental.outcome(probe, model, ids)) == "transformer.wpe"


def test_rotary_angles_that_ignore_the_cache_are_named_in_llama(probe: ModelProbe, ids: Tensor) -> None:
    model = probe.build(llama)
    forward = type(model.model.rotary_emb).forward
    planted(
        model.model.rotary_emb,
        forward=lambda self, x, position_ids: forward(self, x, position_ids * 0 + torch.arange(position_ids.shape[1])),
    )
    assert named(checks.incremental.outcome(probe, model, ids)) == "model.rotary_emb"


def test_a_cache_that_is_overwritten_is_named_in_llama(probe: ModelProbe, ids: Tensor) -> None:
    model = probe.build(llama)
    attn = model.model.layers[1].self_attn
    forward = type(attn).forward

    class Forgetful:
        """A cache that gives back what it just got."""

        def update(self, k: Tensor, v: Tensor, *_: Any, **_options: Any) -> tuple[Tensor, Tensor]:
            return k, v

    def newest_alone(self: Any, *args: Any, **more: Any) -> Any:
        return forward(self, *args, **more | {CACHE: Forgetful(), "attention_mask": None})

    planted(attn, forward=newest_alone)
    assert named(checks.incremental.outcome(probe, model, ids)) == "model.layers.1.self_attn"


# --- padding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("given", [False, True])
def test_models_of_transformers_go_on_behind_padding(probe: ModelProbe, name: str, given: bool, ids: Tensor) -> None:
    mask = {"attention_mask": torch.ones_like(ids)} if given else {}
    found = checks.STANDARD["incremental"](probe, probe.build(HEALTHY[name]), ids, **mask)
    assert found.text.endswith(", also behind padding on the left")


class Sums(nn.Module):
    """A sum of all that is not masked; a ``faulty`` state keeps what is masked."""

    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.faulty, self.embed, self.head = faulty, nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None, state: Any = None) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        kept = x if attention_mask is None else x * attention_mask[:, -ids.shape[1] :, None]
        state = x.new_zeros(len(x), WIDTH) if state is None else state
        return self.head(state[:, None] + kept.cumsum(1)), state + (x if self.faulty else kept).sum(1)


class Masked(nn.Module):
    """Attention without positions; a ``faulty`` one takes the mask of the chunk alone."""

    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.faulty, self.embed, self.qkv = faulty, nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None, cache: Any = None) -> tuple[Tensor, Any]:
        q, k, v = self.qkv(self.embed(ids)).chunk(3, -1)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        n, keys = q.shape[1], k.shape[1]
        seen = torch.ones(n, keys, dtype=torch.bool).tril(keys - n)
        if attention_mask is not None:
            mask = attention_mask.bool()
            if self.faulty:
                mask = nn.functional.pad(mask[:, -n:], (keys - n, 0), value=True)
            seen = seen & mask[:, None]
        return (q @ k.mT).masked_fill(~seen, -1e9).softmax(-1) @ v, (k, v)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", [Sums, Masked])
@pytest.mark.parametrize("faulty", [False, True])
def test_a_state_that_keeps_padding_is_named(
    probe: ModelProbe, kind: Any, faulty: bool, given: bool, ids: Tensor
) -> None:
    mask = {"attention_mask": torch.ones_like(ids)} if given else {}
    found = checks.STANDARD["incremental"].outcome(probe, probe.build(lambda: kind(faulty=faulty)), ids, **mask)
    assert found.verdict == ("broken" if faulty else "holds")
    if faulty:
        first = found.text.splitlines()[0]
        assert first.endswith(", with 4 positions of padding on the left of the first row, masked in attention_mask")
        assert " at position 5, " in first
    else:
        assert found.text.endswith(", also behind padding on the left")


def test_a_model_that_takes_no_padding_on_the_left_is_not_judged_behind_it(probe: ModelProbe, ids: Tensor) -> None:
    class Counting(Masked):
        """Adds what a table has for the number of a position, whatever is masked."""

        def forward(self, ids: Tensor, attention_mask: Tensor | None = None, cache: Any = None) -> tuple[Tensor, Any]:
            places = torch.arange(ids.shape[1]) + (0 if cache is None else cache[0].shape[1])
            return super().forward((ids + places) % WORDS, attention_mask, cache)

    found = checks.STANDARD["incremental"](probe, probe.build(lambda: Counting(faulty=False)), ids)
    said = "one forward does not give a row with padding on its left what it gives the row alone"
    assert found.text.endswith(f"; not behind padding, as {said}")
    found = checks.STANDARD["incremental"](probe, probe.build(Cells), ids)
    assert found.text.endswith("; not behind padding, as its forward has no argument for a mask of padding")


# --- recurrence ---------------------------------------------------------------------------------------------------


class Cells(nn.Module):
    """Cells that are called for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(WORDS, 8), nn.LSTMCell(8, 8), nn.LSTMCell(8, 8)
        self.head = nn.Linear(8, WORDS)

    def begin(self, state: Any) -> Any:
        return state or (None, None)

    def forward(self, ids: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        one, two = self.begin(state)
        outputs = []
        for x in self.embed(ids).unbind(1):
            one = self.first(x, one)
            two = self.second(one[0], two)
            outputs.append(two[0])
        return self.head(torch.stack(outputs, 1)), (one, two)


def test_recurrent_layers_of_torch_go_on(probe: ModelProbe) -> None:
    assert checks.incremental(probe, nn.RNN(4, 8, num_layers=2), probe.randn(LENGTH, 3, 4)).verdict == "holds"
    assert checks.incremental(probe, nn.LSTM(4, 8, batch_first=True), probe.randn(3, LENGTH, 4)).verdict == "holds"


def test_cells_go_on(probe: ModelProbe, ids: Tensor) -> None:
    assert checks.incremental(probe, probe.build(Cells), ids).text == "5 layers in chunks of 5, 1, 2 and 2 positions"


def test_a_state_that_is_dropped_is_named_by_the_cell_that_got_it(probe: ModelProbe, ids: Tensor) -> None:
    model = probe.build(Cells)
    planted(model, begin=lambda self, state: (state[0], None) if state else (None, None))
    assert named(checks.incremental.outcome(probe, model, ids)) == "second"


class StateSpace(nn.Module):
    """A recurrence that is a convolution at once, and a step for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 8), nn.Linear(8, 4)
        self.decay = nn.Parameter(torch.linspace(0.1, 0.9, 8))

    def forward(self, x: Tensor) -> Tensor:
        n = torch.arange(x.shape[1])
        kernel = (self.decay ** (n[:, None] - n).clamp(min=0)[..., None]) * (n[:, None] >= n)[..., None]
        return self.out(torch.einsum("tsd,bsd->btd", kernel, self.inner(x)))

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Tensor]:
        outputs = []
        for x_t in x.unbind(1):
            state = self.inner(x_t) + (0 if state is None else self.decay * state)
            outputs.append(self.out(state))
        return torch.stack(outputs, 1), state


def test_a_step_of_the_user_s_goes_on(probe: ModelProbe) -> None:
    model, x = probe.build(StateSpace), probe.randn(3, LENGTH, 4)
    found = checks.incremental(probe, model, x, step=lambda model, chunk, state: model.step(chunk, state))
    assert found.text == "1 layer in chunks of 5, 1, 2 and 2 positions"


def test_a_step_that_drops_the_state_is_named(probe: ModelProbe) -> None:
    model, x = probe.build(StateSpace), probe.randn(3, LENGTH, 4)
    found = checks.incremental.outcome(probe, model, x, step=lambda model, chunk, state: model.step(chunk, None))
    assert named(found) == "(root)"
    assert " at position 5, in chunks of 5, 1, 2 and 2 positions" in str(found).splitlines()[0]


# --- where it means nothing ---------------------------------------------------------------------------------------


def test_a_model_that_takes_no_state_has_no_such_property(probe: ModelProbe) -> None:
    found = checks.incremental.outcome(probe, nn.Linear(4, 4), probe.randn(3, LENGTH, 4))
    assert found.text == "its forward has no argument past_key_values, state, hx or the like: give step="


def test_an_encoder_that_gives_out_no_cache_has_no_such_property(probe: ModelProbe, ids: Tensor) -> None:
    model = probe.build(lambda: transformers.BertModel(transformers.BertConfig(**COMMON)))  # type: ignore[arg-type]
    said = f"it returns no {CACHE} to continue from: for a state in another form, give step="
    assert checks.incremental.outcome(probe, model, ids).text == said


def test_a_model_that_is_not_causal_has_no_such_property(probe: ModelProbe) -> None:
    model = nn.LSTM(4, 8, batch_first=True, bidirectional=True)
    found = checks.incremental.outcome(probe, model, probe.randn(3, LENGTH, 4))
    assert found.verdict == "not applicable"
    assert found.text == "its first positions depend on later ones, from (root) output[0] on: it is not causal"


def test_a_model_that_is_random_has_no_such_property(probe: ModelProbe, decoder: Any, ids: Tensor) -> None:
    planted(decoder.norm, forward=lambda self, x: x + torch.randn_like(x))
    found = checks.incremental.outcome(probe, decoder, ids)
    assert found.text == "random in evaluation: another seed changes what norm returns"


def test_a_state_that_is_given_is_refused(probe: ModelProbe) -> None:
    found = checks.incremental.outcome(probe, nn.GRU(4, 8), probe.randn(LENGTH, 3, 4), torch.zeros(1, 3, 8))
    assert found.text == "hx is given: leave it out, so that it is None at first"


def test_two_positions_are_too_few(probe: ModelProbe, decoder: Any, ids: Tensor) -> None:
    assert checks.incremental.outcome(probe, decoder, ids[:, :2]).text == (
        "there are 2 positions: give it three or more"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"chunks": [5, 4]}, "chunks= are two or more lengths that add up to the 10 positions; got [5, 4]"),
        ({"chunks": [10]}, "chunks= are two or more lengths that add up to the 10 positions; got [10]"),
        ({"step": lambda *_: 1}, "step= returns the output and the state, a pair; got int"),
    ],
)
def test_options_that_are_none_are_refused(
    probe: ModelProbe, decoder: Any, ids: Tensor, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError) as error:
        checks.incremental(probe, decoder, ids, **options)
    assert said in str(error.value)
