"""A record as it is printed and as a notebook shows it; what is said of a layer that it lacks."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from pytest_modelprobe import ModelProbe, NothingObservedError, Record, SelectionError
from pytest_modelprobe.record import Layer, Parameter


def run(model: nn.Module, *inputs: torch.Tensor, **options: object) -> Record:
    return ModelProbe().run(model, *inputs, **options)


def deep(layers: int) -> Record:
    weight = Parameter(name="weight", shape=(2, 3), dtype="float32", device="cpu")
    names = [f"fc{i}" for i in range(layers)]
    return Record(model="Net", layers={n: Layer(name=n, type="nn.Linear", parameters=(weight,)) for n in names})


def test_a_record_is_printed_as_the_table_of_its_layers() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    nn.init.ones_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    assert str(run(model, torch.ones(4, 2))) == (
        "Sequential: 3 layers, 9 parameters; 1 forward on cpu, no backward\n"
        "\n"
        "layer   type     parameters   calls   output   mean   std   min   max   zeros   dead units\n"
        "0       Linear            9       1   (4, 3)      2     0     2     2      0%          0/3\n"
        "1       ReLU              -       1   (4, 3)      2     0     2     2      0%          0/3"
    )


def test_what_is_printed_is_capped_and_the_table_is_not() -> None:
    record = deep(100)
    assert str(record).splitlines()[-1] == "... 40 rows more: record.table() has them all"
    assert record.table().splitlines()[-1].startswith("fc99 ")


def test_a_table_of_chosen_layers_has_these_and_no_others() -> None:
    record = run(nn.Sequential(nn.Sequential(nn.Linear(2, 3)), nn.ReLU()), torch.ones(4, 2))
    assert [line.split()[0] for line in record.table(["0", nn.ReLU]).splitlines()[3:]] == ["0", "1"]
    with pytest.raises(SelectionError, match="nothing"):
        record.table("nothing")


# --- one layer, one number ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fc", "no layer 'fc' is among the 3 recorded of Net; nearest: 'fc0', 'fc1' and 'fc2'"),
        (
            "head",
            (
                "no layer 'head' is among the 3 recorded of Net; they are 'fc0', 'fc1' and 'fc2'; "
                "what layers= leaves out is not recorded"
            ),
        ),
        (0, "layers have strings as names: record['0'], not record[0]"),
    ],
)
def test_a_layer_that_is_not_there_is_an_error_that_names_the_nearest(name: str, said: str) -> None:
    with pytest.raises(KeyError) as caught:
        deep(3)[name]
    assert str(caught.value) == said
    assert isinstance(caught.value, SelectionError)


def test_a_layer_that_was_not_called_is_an_error_that_says_so() -> None:
    with pytest.raises(LookupError, match=r"^fc0 was never called$"):
        _ = deep(1)["fc0"].output


class Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, x[:0], x / 0


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (1, "output[1] of shape (0, 3) and dtype float32 has no elements"),
        (2, "output[2] of shape (2, 3) and dtype float32 has no finite element: 0 NaN, 6 inf and 0 -inf among 6"),
    ],
)
def test_a_value_without_numbers_says_why(index: int, said: str) -> None:
    values = run(Odd(), torch.ones(2, 3))["(root)"].calls[0].outputs
    assert values[0].statistics.rms == 1
    with pytest.raises(NothingObservedError, match=f"^{re.escape(said)}$"):
        _ = values[index].statistics


def test_a_value_without_a_gradient_says_so() -> None:
    record = run(nn.Linear(2, 2), torch.ones(3, 2))
    with pytest.raises(NothingObservedError, match=r"^no gradient arrived at output of shape \(3, 2\)$"):
        _ = record["(root)"].output.gradient
    record = run(nn.Linear(2, 2), torch.ones(3, 2), loss=lambda out: out.sum())
    assert record["(root)"].output.gradient.rms == 1
