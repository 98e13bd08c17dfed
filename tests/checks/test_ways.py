"""Implementations of attention that do not agree, and embeddings that are not taken as ids are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, UsageError, checks

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", SMALL),
    "GPT2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}),
    "Bert": ("BertModel", SMALL),
    "Gemma": ("GemmaForCausalLM", {**SMALL, "num_key_value_heads": 1, "head_dim": 8}),
    "Gemma3Text": ("Gemma3ForCausalLM", {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4}),
    "T5": ("T5ForConditionalGeneration", {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}),
    "Roberta": ("RobertaModel", {**SMALL, "max_position_embeddings": 20}),
}
TWO = ("eager", "sdpa")


def tiny(probe: ModelProbe, name: str, **options: Any) -> Any:
    made, own = MODELS[name]
    config = getattr(transformers, f"{name}Config")(vocab_size=30, **{**own, "pad_token_id": 0, **options})
    return probe.build(lambda: getattr(transformers, made)(config))


def inputs(probe: ModelProbe, name: str) -> dict[str, Tensor]:
    ids = probe.randint(3, 30, (3, 12))
    return {"input_ids": ids, "decoder_input_ids": probe.randint(3, 30, (3, 8))} if name == "T5" else {"input_ids": ids}


@pytest.fixture
def probe() -> ModelProbe:
    return ModelProbe()


@pytest.fixture
def unscaled() -> Iterator[str]:
    """Attention of one's own that leaves out the scale, by its name."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        options.pop("scaling", None)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, scaling=1.0, **options)

    ALL_ATTENTION_FUNCTIONS.register("unscaled", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("unscaled", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    yield "unscaled"
    for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        functions._global_mapping.pop("unscaled", None)


@pytest.fixture
def unmasked() -> Iterator[str]:
    """Attention of one's own that drops the mask of padding and stays causal, by its name."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, None, is_causal=True, **options)

    ALL_ATTENTION_FUNCTIONS.register("unmasked", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("unmasked", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    yield "unmasked"
    for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        functions._global_mapping.pop("unmasked", None)


# --- implementations of attention -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_eager_and_sdpa_agree(name: str, probe: ModelProbe) -> None:
    found = checks.attention_agrees(probe, tiny(probe, name), implementations=TWO, **inputs(probe, name))
    assert found.text == "eager and sdpa agree, as given, padded on the left and padded on the right"


def test_a_scale_that_is_left_out_is_named(unscaled: str, probe: ModelProbe) -> None:
    model, ids = tiny(probe, "Llama"), inputs(probe, "Llama")
    with pytest.raises(AssertionError) as error:
        checks.attention_agrees(probe, model, implementations=("eager", unscaled), **ids)
    first, table, advice = str(error.value).split("\n\n")
    assert first.startswith("model.layers.0.self_attn differs between eager and unscaled: input of model.layers.0.self")
    assert first.endswith(" %, as given")
    assert table.splitlines()[1].startswith("model.layers.0.self_attn input of model.layers.0.self_attn.o_proj")
    assert advice.startswith("Compare what the code of eager and of unscaled does with the scale")
    assert model.config._attn_implementation == "sdpa"


def test_a_mask_that_is_dropped_shows_with_padding(unmasked: str, probe: ModelProbe) -> None:
    found = checks.attention_agrees.outcome(
        probe, tiny(probe, "Llama"), implementations=("sdpa", unmasked), **inputs(probe, "Llama")
    )
    assert (found.verdict, found.layer) == ("broken", "model.layers.0.self_attn")
    assert found.text.splitlines()[0].endswith(" % at real positions, padded on the left")


def test_padding_that_is_given_is_not_compared(probe: ModelProbe) -> None:
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, :5] = 0
    found = checks.attention_agrees(
        probe, tiny(probe, "Llama"), implementations=TWO, attention_mask=mask, **inputs(probe, "Llama")
    )
    assert found.verdict == "holds"


@pytest.fixture
def nearly_scaled() -> Iterator[str]:
    """Attention of one's own with a scale that is 2 % too large, by its name."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q * 1.02, k, v, mask, **options)

    ALL_ATTENTION_FUNCTIONS.register("nearly_scaled", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("nearly_scaled", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    yield "nearly_scaled"
    for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        functions._global_mapping.pop("nearly_scaled", None)


def test_a_small_error_does_not_hide_in_the_rounding_of_half_precision(nearly_scaled: str, probe: ModelProbe) -> None:
    model, ids = tiny(probe, "Llama", initializer_range=0.3).bfloat16(), inputs(probe, "Llama")
    checks.attention_agrees(probe, model, **ids)
    with pytest.raises(AssertionError, match=r"^model\.layers\.0\.self_attn differs between eager and nearly"):
        checks.attention_agrees(probe, model, implementations=("eager", nearly_scaled), **ids)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_model_inside_another_is_found(unscaled: str, probe: ModelProbe) -> None:
    class Wrapped(nn.Module):
        def __init__(self, initial: float = 0.02) -> None:
            super().__init__()
            self.backbone = tiny(probe, "Bert", initializer_range=initial)
            self.head = nn.Linear(16, 2)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.head(self.backbone(ids).last_hidden_state[:, 0])
            return out

    ids = probe.randint(3, 30, (3, 12))
    for initial, verdict in ((0.5, "broken"), (0.02, "hint")):  # small weights hide in the output what differs inside
        found = checks.attention_agrees.outcome(probe, Wrapped(initial), ids, implementations=("eager", unscaled))
        assert (found.verdict, found.layer) == (verdict, "backbone.encoder.layer.0.attention.self")
    assert found.text.splitlines()[0].endswith("; the output agrees")
    assert checks.attention_agrees(probe, Wrapped(), ids, implementations=TWO).text == "eager and sdpa agree, as given"


def test_an_implementation_that_is_not_there_is_said(probe: ModelProbe) -> None:
    model, ids = tiny(probe, "GPT2"), inputs(probe, "GPT2")  # it has no flex_attention
    found = checks.attention_agrees.outcome(probe, model, implementations=("sdpa", "flex_attention"), **ids)
    assert found.text.startswith("not all implementations run here: flex_attention (ValueError: ")


def test_what_takes_long_is_left_out_unless_it_is_named(probe: ModelProbe) -> None:
    assert probe.device.type == "cpu"
    found = checks.attention_agrees(probe, tiny(probe, "Llama"), **inputs(probe, "Llama"))
    assert found.text == (
        "eager and sdpa agree, as given, padded on the left and padded on the right; not run: "
        "flex_attention (it compiles, which takes long on the CPU: name it in implementations=)"
    )


def test_flex_attention_agrees_where_it_is_not_compiled(probe: ModelProbe) -> None:
    model, ids = tiny(probe, "Llama", num_hidden_layers=1), inputs(probe, "Llama")
    with torch.compiler.set_stance("force_eager"):
        found = checks.attention_agrees(probe, model, implementations=("sdpa", "flex_attention"), **ids)
    assert found.text == "sdpa and flex_attention agree, as given, padded on the left and padded on the right"


def test_an_implementation_that_does_not_run_with_padding_is_said(unmasked: str, probe: ModelProbe) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    def mask(*args: Any, attention_mask: Tensor | None = None, **options: Any) -> Any:
        if attention_mask is not None and not attention_mask[:, 0].all():
            raise RuntimeError("no padding on the left")
        return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, attention_mask=attention_mask, **options)

    ALL_MASK_ATTENTION_FUNCTIONS.register(unmasked, mask)
    found = checks.attention_agrees(
        probe, tiny(probe, "Llama"), implementations=("sdpa", unmasked), **inputs(probe, "Llama")
    )
    assert found.text.startswith("sdpa and unmasked agree, as given and padded on the right; ")
    assert "not run: unmasked padded on the left (model raised RuntimeError: no padding on the left)" in found.text


def test_a_model_without_implementations_is_not_applicable(probe: ModelProbe) -> None:
    found = checks.attention_agrees.outcome(probe, nn.Linear(3, 2), probe.randn(4, 3))
    assert found.verdict == "not applicable"


@pytest.mark.parametrize("given", [("eager",), ("eager", "eager"), "eager"])
def test_two_implementations_are_named(given: Any, probe: ModelProbe) -> None:
    said = "a sequence of strings" if isinstance(given, str) else "two or more"
    with pytest.raises(UsageError, match=f"implementations= .*{said}"):
        checks.attention_agrees(probe, nn.Linear(3, 2), probe.randn(4, 3), implementations=given)


# --- embeddings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_are_taken_as_ids_are(name: str, probe: ModelProbe) -> None:
    found = checks.inputs_embeds_agree(probe, tiny(probe, name), **inputs(probe, name))
    assert found.text.endswith(" with either, as given and padded on the right")


class Small(nn.Module):
    """A model that takes ids or embeddings, with errors on the second way."""

    def __init__(self, *, skips_norm: bool = False, needs_ids: bool = False) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(30, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.skips_norm, self.needs_ids = skips_norm, needs_ids

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> Tensor:
        if self.needs_ids:
            assert input_ids is not None, "ids are needed"
        if inputs_embeds is None:
            x = self.norm(self.embed(input_ids))
        else:
            x = inputs_embeds if self.skips_norm else self.norm(inputs_embeds)
        out: Tensor = self.head(x)
        return out


def test_a_norm_that_embeddings_skip_is_named(probe: ModelProbe) -> None:
    ids = probe.randint(0, 30, (3, 12))
    assert checks.inputs_embeds_agree(probe, probe.build(Small), ids).text == "3 layers with either, as given"
    with pytest.raises(AssertionError) as error:
        checks.inputs_embeds_agree(probe, probe.build(lambda: Small(skips_norm=True)), ids)
    first, table, advice = str(error.value).split("\n\n")
    assert first.startswith("norm is called with input_ids and not with inputs_embeds: (root) output changed by ")
    assert [line.split("   ")[0] for line in table.splitlines()] == [
        "tensor",
        "norm output",
        "head output",
        "(root) output",
    ]
    assert advice.startswith("Look for what is done only where input_ids are given: a scale or norm of the embeddings")


def test_a_scale_that_embeddings_skip_is_named(probe: ModelProbe) -> None:
    class Scaled(Small):
        def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> Tensor:
            x = self.embed(input_ids) * 8**0.5 if inputs_embeds is None else inputs_embeds
            out: Tensor = self.head(x)
            return out

    found = checks.inputs_embeds_agree.outcome(probe, probe.build(Scaled), probe.randint(0, 30, (3, 12)))
    assert found.layer == "(root)"
    assert found.text.startswith(
        "(root) computes input of head with input_ids and not with inputs_embeds: (root) output changed by "
    )


def test_ids_without_a_default_are_none_beside_embeddings(probe: ModelProbe) -> None:
    class Required(Small):
        def forward(self, input_ids: Tensor | None, inputs_embeds: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return super().forward(input_ids, inputs_embeds)

    found = checks.inputs_embeds_agree(probe, probe.build(Required), probe.randint(0, 30, (3, 12)))
    assert found.text == "3 layers with either, as given"


def test_a_model_that_reads_ids_beside_embeddings_is_named(probe: ModelProbe) -> None:
    found = checks.inputs_embeds_agree.outcome(probe, Small(needs_ids=True), probe.randint(0, 30, (3, 12)))
    assert found.text.startswith(
        "(root) raised AssertionError: ids are needed, when it was given inputs_embeds instead of input_ids"
    )


def test_positions_made_from_padding_are_not_applicable(probe: ModelProbe) -> None:
    ids = probe.randint(3, 30, (3, 12))
    ids[1, :4] = 0
    found = checks.inputs_embeds_agree.outcome(probe, tiny(probe, "Roberta"), ids)
    assert found.text == ("the ids hold 0, that of padding, of which a model may make positions: give ids without it")


def test_embeddings_of_an_encoder_need_the_ids_of_the_decoder(probe: ModelProbe) -> None:
    found = checks.inputs_embeds_agree.outcome(probe, tiny(probe, "T5"), probe.randint(3, 30, (3, 12)))
    assert found.text == "its decoder may make its ids of those of the encoder: give decoder_input_ids="


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Linear(12, 2), "its forward has no argument input_ids"),
        (nn.Embedding(30, 2), "its forward has no argument input_ids"),
    ],
)
def test_a_model_that_takes_no_embeddings_is_not_applicable(model: nn.Module, said: str, probe: ModelProbe) -> None:
    ids = probe.randint(0, 30, (3, 12))
    found = checks.inputs_embeds_agree.outcome(probe, model, ids.float() if isinstance(model, nn.Linear) else ids)
    assert (found.verdict, found.text) == ("not applicable", said)


# --- models that do not run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [checks.attention_agrees, checks.inputs_embeds_agree], ids=lambda one: one.__name__)
def test_a_model_that_does_not_run_has_neither_property(check: checks.Check, probe: ModelProbe) -> None:
    found = check.outcome(probe, nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 2)), probe.randn(2, 3))
    assert found.verdict == "not applicable"
    assert found.text.startswith("the model does not run on these inputs: layer '1' raised RuntimeError: ")


@pytest.mark.parametrize("check", [checks.attention_agrees, checks.inputs_embeds_agree], ids=lambda one: one.__name__)
def test_what_is_not_finite_is_not_judged(check: checks.Check, probe: ModelProbe) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    nn.init.constant_(model[1].bias, float("nan"))  # type: ignore[arg-type]
    assert check.outcome(probe, model, probe.randn(2, 3)).text.startswith("not finite at 1")
