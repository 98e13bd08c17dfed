"""Numbers, tables and names as text."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.record import layer_table
from pytest_modelprobe.text import (
    differing_part,
    failure,
    fitted,
    number,
    printable,
    table,
    wrapped,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (12544, "12,544"),
        (-3, "-3"),
        (0.0, "0"),
        (1e-12, "1e-12"),
        (123456.0, "1.235e+05"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (None, "-"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("blocks.0.attn", "blocks.0.attn"),
        ("größe", "größe"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("two\nlines\r\t", "two\\nlines\\r\\t"),
        ("\u202eright to left", "\\u202eright to left"),
        ("\u2028separator", "\\u2028separator"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("\ud800surrogate", "\\ud800surrogate"),
        ("\x9bcsi", "\\x9bcsi"),
    ],
)
def test_names_move_no_cursor(text: str, shown: str) -> None:
    assert printable(text) == shown
    printable(text).encode()


def test_of_a_long_word_the_ends_are_shown() -> None:
    shown = printable(f"layer {'a' * 5000}{'b' * 5000} is dead")
    assert shown == f"layer {'a' * 2047}…{'b' * 2048} is dead"


def test_a_failure_has_the_whole_name_of_the_layer_in_its_first_line_and_in_its_table() -> None:
    names = [f"{'encoder.' * 20}{block}.{'norm.' * 20}fc" for block in (1, 2)]
    text = failure(f"{names[0]} is dead", ["layer", "output"], [[name, f"output of {name} is zero"] for name in names])
    assert text.splitlines() == [
        f"{names[0]} is dead",
        "",
        f"layer{' ' * (len(names[0]) - 5)}   output",
        *(f"{name}   output of {name} is zero" for name in names),
    ]


def test_cells_that_would_read_alike_are_whole() -> None:
    cells = [f"norm.mode {'left ' * 20}{middle} {'right ' * 20}end" for middle in ("up", "down")]
    assert table(["cause"], [[cell] for cell in cells])[1:] == cells
    assert "…" in table(["cause"], [[cells[0]]])[1]


def test_numbers_stand_to_the_right_and_names_to_the_left() -> None:
    assert table(["layer", "zeros", "share", "what"], [["0", 3, "5%", "3 of 4"], ["10", 12544, "10%", "-"]]) == [
        "layer    zeros   share   what",
        "0            3      5%   3 of 4",
        "10      12,544     10%   -",
    ]


def test_rows_beyond_the_most_are_counted() -> None:
    assert table(["n"], [[str(i)] for i in range(5)], most=3) == ["n", "0", "1", "2", "... 2 rows more"]
    assert len(table(["n"], [[str(i)] for i in range(100)])) == 22


LSTM = [f"{kind}_l{i}" for i in range(4) for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]


def test_a_cell_shows_three_of_many_names() -> None:
    cell = f"lstm: weights changed by 0.08 % ({', '.join(LSTM)})"
    assert table(["cause", "class"], [[cell, "weights"]])[1] == (
        "lstm: weights changed by 0.08 % (weight_ih_l0, weight_hh_l0, bias_ih_l0 and 13 more)   weights"
    )


def test_a_cell_shows_both_ends_of_what_is_long() -> None:
    (line,) = table(["cause"], [[f"norm.mode {'left ' * 50}→ {'right ' * 50}end"]])[1:]
    assert len(line) == 100
    assert re.fullmatch(r"norm\.mode left left .*….* right end", line)


def test_a_long_name_in_a_cell_is_whole() -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.original_module.weight"
    assert table(["cell"], [[f"{name}: {'changed ' * 50}"]])[1].startswith(f"{name}: changed")
    assert table(["cell"], [[f"{name}.{name[:30]}"]])[1] == f"{name}.{name[:30]}"


def test_of_long_values_the_part_is_shown_in_which_they_differ() -> None:
    a, b = (f"{{{', '.join(f'{name!r}: {i}' for i, name in enumerate('abcdefghijkl'))}, 'last': {n}}}" for n in (1, 22))
    assert [differing_part(a, b), differing_part(b, a)] == ["…': 11, 'last': 1}", "…': 11, 'last': 22}"]
    assert differing_part(f"{a} of {b}", f"{b} of {b}") == "…': 11, 'last': 1} of {'a': 0, '…"
    assert differing_part("[1, 2]", a) == "[1, 2]"
    assert len(differing_part(a * 3, "none")) == 60


@given(a=st.text("ab", max_size=200), b=st.text("ab", max_size=200))
def test_long_values_that_differ_are_shown_differently(a: str, b: str) -> None:
    shown = differing_part(a, b), differing_part(b, a)
    assert (shown[0] == shown[1]) == (a == b)
    assert max(map(len, shown)) <= 60


def test_no_name_breaks_the_first_line() -> None:
    assert failure("a\nb is dead", ["layer"], [["a\nb"]], "See a\nb.") == (
        "a\\nb is dead\n\nlayer\na\\nb\n\nSee a\\nb."
    )


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
    return model


def test_the_table_of_layers_has_a_row_for_each_call_of_a_shared_module() -> None:
    act = nn.ReLU()
    model = nn.Sequential(nn.Linear(2, 2), act, nn.Linear(2, 2), act)
    lines = layer_table(ModelProbe().run(model, torch.ones(4, 2)))
    assert [line.split("  ")[0] for line in lines[1:]] == ["0", "1", "2", "1 (call 2)"]


def test_the_table_of_layers_has_one_row_for_a_cell_that_is_called_for_each_token() -> None:
    cell = nn.Linear(2, 2)
    lines = layer_table(ModelProbe().run(nn.Sequential(*[cell] * 9), torch.ones(4, 2)))
    assert [line.split()[:4] for line in lines[1:]] == [["0", "Linear", "6", "9"]]


def test_the_table_of_layers_tells_why_there_are_no_numbers() -> None:
    lines = layer_table(ModelProbe().architecture(net(), torch.ones(4, 2)))
    assert [re.split(" {2,}", line) for line in lines] == [
        ["layer", "type", "parameters", "calls", "output", "no numbers"],
        ["0", "Linear", "4", "1", "(4, 2)", "fake tensor"],
        ["1", "ReLU", "-", "1", "(4, 2)", "fake tensor"],
    ]


def test_the_table_of_layers_ends_with_those_that_have_parameters_and_were_not_called() -> None:
    model = nn.Sequential(net(), nn.Linear(2, 2), nn.ReLU())
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    lines = layer_table(ModelProbe().run(model, torch.ones(4, 2)))
    assert [line.split()[:4] for line in lines[1:]] == [
        ["0.0", "Linear", "4", "1"],
        ["0.1", "ReLU", "-", "1"],
        ["1", "Linear", "6", "0"],
    ]


def test_a_container_with_parameters_of_its_own_is_in_the_table_of_layers() -> None:
    model = net()
    model.scale = nn.Parameter(torch.ones(3))
    lines = layer_table(ModelProbe().run(model, torch.ones(4, 2)))
    assert lines[-1].split()[:4] == ["(root)", "Sequential", "3", "1"]


def test_parameters_that_are_tied_count_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    lines = layer_table(ModelProbe().run(model, torch.ones(4, 2)))
    assert [line.split()[2] for line in lines[1:]] == ["4", "tied"]


def test_where_no_layer_was_called_the_table_is_of_parameters() -> None:
    assert layer_table(ModelProbe().architecture(net())) == [
        "layer    type         parameters",
        "(root)   Sequential   -",
        "0        Linear       weight (2, 2)",
        "1        ReLU         -",
    ]


ROWS = [[f"encoder.layers.{i}.attention.self.query", "Linear", 1234 * i, 0.5, "0%"] for i in range(12)]
COLUMNS = ["layer", "type", "parameters", "gradient rms", "zeros"]


@pytest.mark.parametrize("width", [20, 60])
def test_a_table_fits_the_terminal(width: int) -> None:
    with fitted(width):
        lines = table(COLUMNS, ROWS)
    assert max(map(len, lines)) <= width


WORDS = st.lists(st.sampled_from(["encoder", "layers", "0", "1", "self_attn", "weights", "changed"]), min_size=1)
TEXTS = st.builds(str.join, st.sampled_from([".", " "]), WORDS)


@given(data=st.data())
def test_a_wider_terminal_never_shows_less_of_the_first_column(data: st.DataObject) -> None:
    columns = ["cause", *data.draw(st.lists(st.sampled_from(COLUMNS[1:]), unique=True))]
    row = st.tuples(TEXTS, *[TEXTS | st.integers(0, 10**9)] * (len(columns) - 1))
    rows = data.draw(st.lists(row, min_size=1, max_size=5))
    shown = [0] * len(rows)
    for width in range(data.draw(st.integers(8, 12)), 200, 5):
        with fitted(width):
            lines = table(columns, rows, spare=columns[2:3])
        assert max(map(len, lines[: len(rows) + 1])) <= width
        before, shown = shown, [len(re.split(" {3,}", line)[0]) for line in lines[1 : len(rows) + 1]]
        assert all(now >= then for now, then in zip(shown, before, strict=True)), lines


def test_columns_are_dropped_before_the_first_has_less_than_half_of_the_width() -> None:
    causes = [
        ["encoder.*.self_attn: own code changed between norm and attn", "computation", "5.1 %", "alone and in the run"],
        ["head.fc: weights changed by 0.08 % (weight, bias)", "weights", "0.08 %", "in the record"],
    ]
    with fitted(80):
        narrow = table(["cause", "class", "changed by", "seen"], causes)
    with fitted(96):
        wider = table(["cause", "class", "changed by", "seen"], causes)
    assert narrow == [
        "cause                                            class         changed by",
        "encoder.*.self_attn: o…d between norm and attn   computation   5.1 %",
        "head.fc: weights chang…y 0.08 % (weight, bias)   weights       0.08 %",
        "not shown: seen; a wider terminal has them",
    ]
    assert wider == [
        "cause                                            class         changed by   seen",
        "encoder.*.self_attn: o…d between norm and attn   computation   5.1 %        alone and in the run",
        "head.fc: weights chang…y 0.08 % (weight, bias)   weights       0.08 %       in the record",
    ]


def test_names_are_shortened_so_that_they_stay_different() -> None:
    with fitted(36):
        lines = table(COLUMNS[:2], [[f"encoder.layers.{i}.attention.query", "Linear"] for i in range(2)])
    assert lines == [
        "layer                         type",
        "encoder.layers.0…tion.query   Linear",
        "encoder.layers.1…tion.query   Linear",
    ]


def test_columns_that_do_not_fit_are_named() -> None:
    with fitted(50):
        lines = table(COLUMNS, ROWS, most=2)
    assert lines == [
        "layer                          type     parameters",
        "encoder.layers.0.…self.query   Linear            0",
        "encoder.layers.1.…self.query   Linear        1,234",
        "not shown: gradient rms, zeros; a wider terminal",
        "has them",
        "... 10 rows more",
    ]


def test_columns_to_spare_are_left_out_before_the_last() -> None:
    with fitted(80):
        lines = table(COLUMNS, ROWS, most=2, spare=["type", "parameters"])
    assert re.split(" {2,}", lines[0]) == ["layer", "parameters", "gradient rms", "zeros"]
    assert lines[3] == "not shown: type; a wider terminal has them"


def test_a_long_line_is_continued_below_its_text() -> None:
    with fitted(30):
        assert wrapped("  finite    holds   1 output and 6 gradients", 20).split("\n") == [
            "  finite    holds   1 output",
            "               and 6 gradients",
        ]
