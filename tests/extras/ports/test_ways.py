"""Implementations of attention that do not agree."""

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
    said = "Sequence" if isinstance(given, str) else "two or more"
    with pytest.raises(UsageError, match=f"implementations= .*{said}"):
        checks.attention_agrees(probe, nn.Linear(3, 2), probe.randn(4, 3), implementations=given)


# --- models that do not run -------------------------------------------------------------------------------------------


def test_a_model_that_does_not_run_is_not_applicable(probe: ModelProbe) -> None:
    found = checks.attention_agrees.outcome(probe, nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 2)), probe.randn(2, 3))
    assert found.verdict == "not applicable"
    assert found.text.startswith("the model does not run on these inputs: layer '1' raised RuntimeError: ")


def test_what_is_not_finite_is_not_judged(probe: ModelProbe) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    nn.init.constant_(model[1].bias, float("nan"))  # type: ignore[arg-type]
    assert checks.attention_agrees.outcome(probe, model, probe.randn(2, 3)).text.startswith("not finite at 1")
