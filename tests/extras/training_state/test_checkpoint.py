"""Checkpoints that are loaded in part, each beside a healthy twin."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import HintWarning, ModelProbe, SelectionError, UsageError, checks

ONE = nn.Linear(2, 2)


class Net(nn.Module):
    """A tied head, a norm with running statistics and a count, a table of integers, a buffer in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("order", torch.arange(4))
        self.register_buffer("kept", torch.tensor([True, False]))
        self.register_buffer("angles", torch.linspace(0, 1, 4), persistent=False)


@pytest.fixture
def probe() -> ModelProbe:
    return ModelProbe()


@pytest.fixture
def saved() -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = Net()
    with torch.no_grad():
        for tensor in (*model.parameters(), model.norm.running_mean, model.norm.running_var):
            assert isinstance(tensor, Tensor)
            tensor.uniform_(0.5, 1)
    return dict(model.state_dict())


def without(saved: dict[str, Tensor], *names: str) -> Callable[[nn.Module], Any]:
    return lambda model: model.load_state_dict({k: v for k, v in saved.items() if k not in names}, strict=False)


# --- what is written, however that is done ----------------------------------------------------------------------------


def by_assigning(model: Any, saved: dict[str, Tensor]) -> None:
    model.load_state_dict(saved, assign=True)


def through_data(model: Any, saved: dict[str, Tensor]) -> None:
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensor.data.copy_(saved[name])


def by_replacing_data(model: Any, saved: dict[str, Tensor]) -> None:
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensor.data = saved[name].clone()


@torch.no_grad()
def in_place_by_rows(model: Any, saved: dict[str, Tensor]) -> None:
    for name, tensor in model.state_dict(keep_vars=True).items():
        for row, value in zip(tensor, saved[name], strict=True) if tensor.dim() else ():
            row.copy_(value)
        if not tensor.dim():
            tensor.copy_(saved[name])


@torch.no_grad()
def after_zeros(model: Any, saved: dict[str, Tensor]) -> None:
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensor.zero_()
        assert tensor.float().abs().sum() == 0
        tensor.logical_or_(saved[name]) if tensor.dtype == torch.bool else tensor.add_(saved[name])


def from_empty(model: Any, saved: dict[str, Tensor]) -> None:
    model.to_empty(device="cpu")
    model.load_state_dict(saved)
    model.angles.copy_(torch.linspace(0, 1, 4))


def in_half(model: Any, saved: dict[str, Tensor]) -> None:
    model.bfloat16().load_state_dict(saved)


WAYS = [by_assigning, through_data, by_replacing_data, in_place_by_rows, after_zeros, from_empty, in_half]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_way_to_write_counts(way: Any, probe: ModelProbe, saved: dict[str, Tensor]) -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    found = checks.wholly_loaded(probe, model, lambda model: way(model, saved))
    looked_at = 15 if way is by_assigning else 14  # it unties the head
    assert str(found) == f"wholly_loaded holds for Net: {looked_at} parameters and buffers; not persistent: angles"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_tie_counts_by_either_of_its_names(probe: ModelProbe, saved: dict[str, Tensor]) -> None:
    assert checks.wholly_loaded(probe, Net(), without(saved, "head.weight")).verdict == "holds"
    assert checks.wholly_loaded(probe, Net(), without(saved, "embed.weight")).verdict == "holds"
    found = checks.wholly_loaded.outcome(probe, Net(), without(saved, "embed.weight", "head.weight"))
    assert found.layer == "embed.weight"


# --- what is not ------------------------------------------------------------------------------------------------------


def test_the_message_names_all_that_is_not_loaded(probe: ModelProbe, saved: dict[str, Tensor]) -> None:
    saved["blocks.2.weihgt"] = saved["blocks.2.weight"]
    load = without(saved, "blocks.2.weight", "norm.running_mean", "norm.num_batches_tracked", "order", "kept")
    with pytest.raises(AssertionError) as error:
        checks.wholly_loaded(probe, Net(), load)
    assert str(error.value) == (
        "blocks.2.weight is not loaded: all 16 elements stay as they were; 5 of 14 parameters and buffers looked at\n"
        "\n"
        "name                       not loaded   elements   they\n"
        "blocks.2.weight                    16         16   stay as they were\n"
        "order                               4          4   stay as they were\n"
        "kept                                2          2   stay as they were\n"
        "norm.running_mean                   4          4   stay as they were\n"
        "norm.num_batches_tracked            1          1   stay as they were\n"
        "\n"
        "Not used of the checkpoint: blocks.2.weihgt. Compare the name with the keys of the checkpoint, and look for "
        "strict=False and for a rename or a loop that leaves it out. If it is meant to be new, as a head before "
        "training is, name it in new=."
    )


def test_a_part_of_a_parameter_is_counted_by_elements(probe: ModelProbe) -> None:
    stacked = nn.Module()
    stacked.weight = nn.Parameter(torch.zeros(3, 4, 4))  # equal to what is loaded, which says nothing
    values = torch.zeros(3, 4, 4)

    def load(model: Any) -> None:
        with torch.no_grad():
            for i in range(2):
                model.weight[i] = values[i]

    with pytest.raises(
        AssertionError, match=r"^weight is not wholly loaded: 16 of 48 elements stay as they were; 1 of"
    ):
        checks.wholly_loaded(probe, stacked, load)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (nn.init.normal_, "are drawn at random"),
        (nn.init.ones_, "are set to a constant"),
        (lambda weight: weight.data.zero_(), "are set to a constant"),
    ],
)
def test_initializing_is_not_loading(write: Any, said: str, probe: ModelProbe, saved: dict[str, Tensor]) -> None:
    def load(model: Any) -> None:
        without(saved, "blocks.1.weight")(model)
        write(model.blocks[1].weight)
        assert all(tensor.isfinite().all() for tensor in model.parameters())

    with pytest.raises(AssertionError, match=f"blocks.1.weight is not loaded: all 16 elements {said}; 1 of 14"):
        checks.wholly_loaded(probe, Net(), load)


def test_a_buffer_in_no_checkpoint_may_not_lose_its_memory(probe: ModelProbe, saved: dict[str, Tensor]) -> None:
    def load(model: Any) -> None:
        model.to_empty(device="cpu")
        model.load_state_dict(saved)

    with pytest.raises(
        AssertionError, match=r"^angles lost its values: 4 of 4 elements are memory that nothing wrote"
    ) as error:
        checks.wholly_loaded(probe, Net(), load)
    assert "It is in no checkpoint: compute it again after to_empty()" in str(error.value)


def test_meta_tensors_that_nothing_replaced_are_named(probe: ModelProbe, saved: dict[str, Tensor]) -> None:
    def make() -> nn.Module:
        with torch.device("meta"):
            return Net()

    def load(model: Any) -> None:
        kept = {name: value for name, value in saved.items() if name != "blocks.0.bias"}
        model.load_state_dict(kept, assign=True, strict=False)

    with pytest.raises(AssertionError, match=r"^blocks.0.bias is still on the meta device; 2 of 16"):
        checks.wholly_loaded(probe, make, load)
    assert checks.wholly_loaded.outcome(probe, make(), load).layer == "blocks.0.bias"


def test_a_value_that_is_read_while_loading_is_a_hint(probe: ModelProbe, saved: dict[str, Tensor]) -> None:
    def load(model: Any) -> None:
        model.load_state_dict({**saved, "norm.weight": model.norm.weight * 0.9 + saved["norm.weight"] * 0.1})

    with pytest.warns(HintWarning, match="norm.weight may not be loaded: 4 of 4 elements depend on what they held bef"):
        found = checks.wholly_loaded(probe, Net(), load)
    assert (found.verdict, found.layer) == ("hint", "norm.weight")


def test_larger_embeddings_keep_their_new_rows(probe: ModelProbe) -> None:
    values = torch.rand(4, 3)

    def load(model: Any) -> None:
        model.weight.data[:4] = values

    with pytest.raises(AssertionError, match="weight is not wholly loaded: 6 of 18 elements stay as they were"):
        checks.wholly_loaded(probe, nn.Embedding(6, 3), load)


def test_loading_another_model_is_said(probe: ModelProbe, saved: dict[str, Tensor]) -> None:
    mine = Net()
    with pytest.raises(AssertionError, match="Nothing was loaded: load has to write into the model that it is given"):
        checks.wholly_loaded(probe, Net, lambda model: mine.load_state_dict(saved))
    found = checks.wholly_loaded(probe, Net, lambda model: mine.requires_grad_() if without(saved)(mine) else None)
    assert found.verdict == "holds"


# --- what is meant to be new ------------------------------------------------------------------------------------------


def test_what_is_said_to_be_new_is_not_missed(probe: ModelProbe, saved: dict[str, Tensor]) -> None:
    found = checks.wholly_loaded(probe, Net(), without(saved, "blocks.2.weight"), new="blocks.2.*")
    assert str(found) == (
        "wholly_loaded holds for Net: 12 parameters and buffers; said to be new: blocks.2.weight; loaded, though said "
        "to be new: blocks.2.bias; not persistent: angles"
    )
    with pytest.raises(SelectionError, match="matches none"):
        checks.wholly_loaded(probe, Net(), without(saved), new="classifier.**")


# --- models that are made and loaded by one function ------------------------------------------------------------------


def test_a_function_may_return_a_loaded_model(probe: ModelProbe, saved: dict[str, Tensor]) -> None:
    def make(*names: str) -> nn.Module:
        model = Net()
        without(saved, *names)(model)
        return model

    parts = ["norm.weight", "norm.running_var", "norm.num_batches_tracked"]
    assert checks.wholly_loaded(probe, make).verdict == "holds"
    found = checks.wholly_loaded.outcome(probe, lambda: make("blocks.1.bias", *parts))
    assert [line.split("  ")[0] for line in found.text.splitlines()[3:7]] == ["blocks.1.bias", *parts]
    assert "blocks.1.bias is not loaded: all 4 elements are drawn at random; 4 of 14" in found.text


def test_from_pretrained_names_the_new_head(probe: ModelProbe, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    classes = transformers.BertForSequenceClassification
    found = checks.wholly_loaded.outcome(probe, lambda: classes.from_pretrained(tmp_path))
    assert found.text.splitlines()[0] == (
        "classifier.weight is not loaded: all 16 elements are drawn at random; 2 of 25 parameters and buffers looked at"
    )
    assert "classifier.bias              2          2   are set to a constant" in found.text
    assert checks.wholly_loaded(probe, lambda: classes.from_pretrained(tmp_path), new="classifier.*").text.startswith(
        "23 parameters and buffers; said to be new: classifier.weight and classifier.bias"
    )
    whole = checks.wholly_loaded(probe, lambda: transformers.BertModel.from_pretrained(tmp_path))
    assert whole.verdict == "holds"


def test_what_from_pretrained_did_not_use_is_said(probe: ModelProbe, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=20, n_positions=8)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)

    def make() -> Any:
        return transformers.GPT2LMHeadModel.from_pretrained(tmp_path, n_layer=1, output_loading_info=True)

    found = checks.wholly_loaded(probe, make)
    assert found.text.startswith("16 parameters and buffers; not used of the checkpoint: transformer.h.1.attn.c_attn.")


# --- what cannot be checked -------------------------------------------------------------------------------------------


def test_a_model_without_parameters_is_not_applicable(probe: ModelProbe) -> None:
    assert str(checks.wholly_loaded.outcome(probe, lambda: nn.ReLU())) == (
        "wholly_loaded is not applicable to the model: ReLU has no parameters or buffers"
    )
    found = checks.wholly_loaded.outcome(probe, nn.ReLU(), lambda model: None)
    assert str(found) == "wholly_loaded is not applicable to ReLU: ReLU has no parameters or buffers"
    with pytest.raises(UsageError, match="not applicable"):
        checks.wholly_loaded(probe, nn.ReLU(), lambda model: None)


def test_loading_that_needs_the_old_values_is_not_applicable(probe: ModelProbe) -> None:
    def load(model: Any) -> None:
        if model.weight[0, 0] != first:
            raise ValueError("not mine")

    model = nn.Linear(2, 2)
    first = model.weight[0, 0].item()
    found = checks.wholly_loaded.outcome(probe, model, load)
    assert found.text == "loading raises after the values of the model were changed: ValueError: not mine"


def test_constants_that_loading_reads_by_numpy_are_left_to_it(probe: ModelProbe, saved: dict[str, Tensor]) -> None:
    def load(model: Any) -> None:
        model.norm.weight.data.add_(1)  # what is half done is put back
        if torch.zeros(2).numpy().any():
            raise ValueError("no zeros")
        without(saved)(model)

    found = checks.wholly_loaded(probe, Net(), load)
    assert found.text == (
        "14 parameters and buffers; not looked at, as loading fails with others: constants; not persistent: angles"
    )


def test_an_error_of_loading_is_the_users_own(probe: ModelProbe) -> None:
    with pytest.raises(RuntimeError, match="Missing key") as error:
        checks.wholly_loaded(probe, nn.Linear(2, 2), lambda model: model.load_state_dict({}))
    assert error.value.__notes__ == ["raised in load, which checks.wholly_loaded called"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((nn.Linear(2, 2),), "load is missing"),
        ((3,), "model is a torch.nn.Module, or a function that makes one; got int"),
        ((lambda: ONE,), "the function returns the same model again"),
        ((lambda: 3,), "the function returns a torch.nn.Module; got int"),
        ((nn.Linear(2, 2), {}), r"load is a function, load\(model\); got dict"),
    ],
)
def test_what_is_given_is_checked(args: Any, said: str, probe: ModelProbe) -> None:
    with pytest.raises(UsageError, match=said):
        checks.wholly_loaded(probe, *args)


def test_the_probe_comes_first() -> None:
    with pytest.raises(
        UsageError, match=r"takes the probe first: wholly_loaded\(modelprobe, model, load\); got Linear$"
    ):
        checks.wholly_loaded(nn.Linear(2, 2), lambda model: None)  # type: ignore[arg-type]


def test_random_states_stay_as_they_were(probe: ModelProbe) -> None:
    model = nn.Linear(2, 2)
    state = torch.get_rng_state()
    checks.wholly_loaded.outcome(probe, model, lambda model: nn.init.normal_(model.weight))
    assert torch.equal(torch.get_rng_state(), state)


def test_odd_tensors_are_left_out_or_loaded(probe: ModelProbe) -> None:
    model = nn.Module()
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    model.register_buffer("complex", torch.ones(2, dtype=torch.complex64))
    model.register_buffer("small", torch.ones(2).to(torch.float8_e4m3fn))
    model.register_buffer("expanded", torch.ones(1).expand(3))
    model.register_buffer("empty", torch.ones(0, 2))
    model.register_buffer("nan", torch.tensor([torch.nan, torch.inf]))
    model.register_parameter("unused", None)

    def load(model: Any) -> None:
        model.complex = torch.full((2,), 2j)
        model.small = torch.tensor([3.0, 4.0]).to(torch.float8_e4m3fn)
        model.nan = torch.tensor([torch.nan, 3.0])

    found = checks.wholly_loaded.outcome(probe, model, load)
    assert "expanded is not loaded: all 3 elements stay as they were; 1 of 5" in found.text
    found = checks.wholly_loaded.outcome(probe, model, load, new="expanded")
    assert "4 parameters and buffers; said to be new: expanded; not looked at, as it cannot be compared: sparse" in str(
        found
    )


def test_what_cannot_be_changed_is_not_taken_for_loaded(probe: ModelProbe) -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    found = checks.wholly_loaded.outcome(probe, model, lambda model: None)
    assert found.verdict == "not applicable"
    assert found.text == (
        "no parameter or persistent buffer of Linear is left to look at: weight and bias cannot be compared"
    )


def test_what_is_new_cannot_be_all(probe: ModelProbe) -> None:
    with pytest.raises(UsageError, match="no parameter or persistent buffer of Linear is left to look at"):
        checks.wholly_loaded(probe, nn.Linear(2, 2), lambda model: None, new="**")
