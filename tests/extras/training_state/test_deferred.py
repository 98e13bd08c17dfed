"""Models that are made on the meta device and initialized later, beside models that are made directly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, UsageError, checks


class Rotary(nn.Module):
    """Frequencies that are computed in the constructor, and in ``reset_parameters`` if ``reset``."""

    inv_freq: Tensor

    def __init__(self, *, reset: bool = True) -> None:
        super().__init__()
        self.register_buffer("inv_freq", self.frequencies(), persistent=False)
        if reset:
            self.reset_parameters = lambda: self.inv_freq.copy_(self.frequencies())

    def frequencies(self) -> Tensor:
        return 1.0 / 10_000 ** (torch.arange(0, 8, 2).float() / 8)


class Net(nn.Module):
    """A small model with a padding row, a norm with statistics, and frequencies."""

    def __init__(self, *, reset: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8, padding_idx=0)
        self.rotary = Rotary(reset=reset)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)


class Own(Net):
    """Draws its weights in ``init_weights``."""

    def init_weights(self) -> None:
        for module in self.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.trunc_normal_(layer.weight, std=0.05)


@pytest.fixture
def probe() -> ModelProbe:
    return ModelProbe()


def outcome_of(probe: ModelProbe, make: Any, **options: Any) -> checks.Outcome:
    return checks.deferred_initialization.outcome(probe, probe.build(make), **options)


def asserted(probe: ModelProbe, make: Any, **options: Any) -> checks.Outcome:
    return checks.deferred_initialization(probe, probe.build(make), **options)


def with_buffer(value: Tensor, reset: Any = None, name: str = "kept") -> Any:
    """Return what makes a model with a buffer, which ``reset`` writes to."""

    class Buffered(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer(name, value.clone() if not torch.empty(0).is_meta else value.to("meta"))

        def reset_parameters(self) -> None:
            super().reset_parameters()
            if reset is not None and hasattr(self, name):
                reset(getattr(self, name))

    return Buffered


# --- what holds -------------------------------------------------------------------------------------------------------


def test_layers_that_reset_themselves_pass(probe: ModelProbe) -> None:
    found = asserted(probe, Net)
    assert str(found) == (
        "deferred_initialization holds for Net: 11 parameters and buffers after reset_parameters(); only seen to be "
        "random: embed.weight, layers.0.weight, layers.0.bias and 2 more"
    )


def test_an_own_function_may_draw_otherwise_than_the_constructor(probe: ModelProbe) -> None:
    found = asserted(probe, Own)
    assert found.text.startswith("11 parameters and buffers after init_weights()")


@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_models_of_transformers_pass(name: str, probe: ModelProbe) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    classes: dict[str, tuple[str, dict[str, int]]] = {
        "Llama": ("LlamaForCausalLM", small),
        "T5": ("T5ForConditionalGeneration", {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}),
    }
    model, options = classes[name]
    config = getattr(transformers, f"{name}Config")(vocab_size=30, **options)
    found = asserted(probe, lambda: getattr(transformers, model)(config))
    assert " after init_weights()" in found.text


# --- what is not initialized ------------------------------------------------------------------------------------------


def test_a_buffer_that_only_the_constructor_computes_is_named(probe: ModelProbe) -> None:
    with pytest.raises(AssertionError) as error:
        asserted(probe, lambda: Net(reset=False))
    assert str(error.value) == (
        "rotary.inv_freq is not initialized: all 4 elements are memory that nothing wrote to; 1 of 11 parameters and "
        "buffers looked at\n"
        "\n"
        "name              kind                     elements   after reset_parameters() they\n"
        "rotary.inv_freq   buffer, not persistent          4   are memory that nothing wrote to\n"
        "\n"
        "to_empty() takes all values, those of buffers too. Compute it again in the initialization as the constructor "
        "does: in reset_parameters() of the module that owns it, or in init_weights()."
    )


@pytest.mark.parametrize(
    "value", [torch.ones(3).long(), torch.ones(3, 3).tril().bool(), torch.ones(2) * 1j, torch.tensor(2)]
)
def test_memory_is_recognized_in_any_dtype(value: Tensor, probe: ModelProbe) -> None:
    found = outcome_of(probe, with_buffer(value))
    assert found.text.startswith("kept is not initialized: ")
    assert asserted(probe, with_buffer(value, lambda t: t.copy_(value))).verdict == "holds"


def test_what_is_computed_from_empty_memory_is_named(probe: ModelProbe) -> None:
    found = outcome_of(probe, with_buffer(torch.ones(4), lambda t: t.mul_(0.5)))
    assert found.text.startswith("kept is not initialized: all 4 elements are computed from memory that nothing wrote")


def test_a_part_is_counted(probe: ModelProbe) -> None:
    found = outcome_of(probe, with_buffer(torch.ones(4), lambda t: t[:3].fill_(1)))
    assert found.text.startswith("kept is not initialized: 1 of 4 elements is memory that nothing wrote to; 1 of 3")


# --- what is initialized otherwise ------------------------------------------------------------------------------------


def test_another_value_is_named(probe: ModelProbe) -> None:
    found = outcome_of(probe, with_buffer(torch.arange(4.0), lambda t: t.fill_(1)))
    assert found.text.splitlines()[0] == (
        "kept has other values: 3 of 4 elements differ, the first at [0] is 1, made directly 0; 1 of 3 parameters and "
        "buffers looked at"
    )


def test_zeros_that_are_drawn_are_named(probe: ModelProbe) -> None:
    class Zeroed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            nn.init.zeros_(self.fc.weight)

    found = outcome_of(probe, Zeroed)
    assert found.text.startswith("fc.weight is random, made directly constant; 1 of 2")


def test_a_tie_that_is_lost_is_named(probe: ModelProbe) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 8)
            self.head = nn.Linear(8, 8, bias=False)
            self.head.weight = self.embed.weight

    def tied_again(model: Any) -> None:
        model.embed.reset_parameters()
        model.head.weight = model.embed.weight

    found = outcome_of(probe, Tied)
    assert found.text.startswith("head.weight is no longer tied to embed.weight; 1 of 2 parameters and buffers")
    assert asserted(probe, Tied, initialize=tied_again).verdict == "holds"


def test_a_tensor_that_is_not_registered_is_a_hint(probe: ModelProbe) -> None:
    class Cached(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.angles = torch.arange(8)

    found = outcome_of(probe, Cached)
    assert (found.verdict, found.layer) == ("hint", "angles")
    assert found.text.startswith("angles is still on the meta device; 1 of 3")


# --- healthy models that look odd -------------------------------------------------------------------------------------


def test_any_dtype_is_read(probe: ModelProbe) -> None:
    assert asserted(probe, lambda: Net().to(torch.bfloat16)).verdict == "holds"


def test_what_the_constructor_leaves_empty_is_said(probe: ModelProbe) -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.scale = nn.Parameter(torch.empty(8))

    def initialize(model: Any) -> None:
        model.fc.reset_parameters()
        nn.init.ones_(model.scale)

    found = asserted(probe, Empty, initialize=initialize)
    assert "; values not compared, as the constructor does not initialize them either: scale;" in found.text


def test_attention_of_torch_has_no_reset_that_others_call(probe: ModelProbe) -> None:
    found = outcome_of(probe, lambda: nn.MultiheadAttention(16, 2))
    assert found.layer == "in_proj_weight"
    assert "out_proj.bias    parameter         16   are random, made directly constant" in found.text


# --- what cannot be checked -------------------------------------------------------------------------------------------


def test_a_constructor_that_reads_values_is_not_applicable(probe: ModelProbe) -> None:
    class Depth(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.rate = torch.linspace(0, 1, 4)[1].item()

    found = outcome_of(probe, Depth)
    assert found.verdict == "not applicable"
    assert found.text.startswith("it cannot be made on the meta device: RuntimeError: ")


def test_models_without_parameters_or_with_a_device_are_not_applicable(probe: ModelProbe) -> None:
    found = outcome_of(probe, nn.ReLU)
    assert str(found) == "deferred_initialization is not applicable to ReLU: ReLU has no parameters or buffers"
    found = outcome_of(probe, lambda: nn.Linear(2, 2, device="cpu"))
    assert found.text == "nothing of Linear is on the meta device: its factory has a device"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {},
            "not applicable to Net: what makes the model is not known: build it by",
        ),
        ({"factory": lambda: 3}, "factory returns a torch.nn.Module; got int"),
    ],
)
def test_what_is_given_is_checked(options: Any, said: str, probe: ModelProbe) -> None:
    with pytest.raises(UsageError, match=said):
        checks.deferred_initialization(probe, Net(), **options)


def test_an_error_of_the_initialization_is_the_users_own(probe: ModelProbe) -> None:
    def initialize(model: Any) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as error:
        asserted(probe, Net, initialize=initialize)
    assert error.value.__notes__ == ["raised in initialize, which checks.deferred_initialization called"]
