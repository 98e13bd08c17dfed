"""Two models against each other: `assert_same_behavior`."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytest_modelprobe import (
    ModelProbe,
    Record,
    SelectionError,
    assert_same_behavior,
)

PROBE = ModelProbe()
X = PROBE.randn(4, 8)


class Reference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(x))


class Port(nn.Module):
    """The same with other names."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.ln(x))


def reference() -> Reference:
    return PROBE.build(Reference)


def port() -> Port:
    model = PROBE.build(Port)
    model.head.load_state_dict(reference().fc.state_dict())
    return model


def run(model: nn.Module, **options: Any) -> Record:
    return PROBE.run(model, X, **{"loss": "random", **options})


def failure_of(actual: Any, expected: Any, **options: Any) -> str:
    with pytest.raises(AssertionError) as failure:
        assert_same_behavior(actual, expected, **options)
    return str(failure.value)


def test_a_port_whose_layers_the_user_renames_does_the_same() -> None:
    assert_same_behavior(run(port()), run(reference()), rename={"ln": "norm", "head": "fc"}, structure=False)
    assert_same_behavior(run(port()), run(reference()), structure=False)  # pairs are found by names that are left


def test_a_port_with_another_epsilon_is_reported() -> None:
    model = port()
    model.ln.eps = 1e-2
    shown = failure_of(run(model), run(reference()), rename={"ln": "norm", "head": "fc"})
    assert shown.startswith("ln.eps 1e-05 → 0.01: its output changed by ")
    assert "(root): Reference → Port" in shown


def test_without_structure_it_is_the_layer_s_own_code_that_answers_otherwise() -> None:
    model = port()
    model.ln.eps = 1e-2
    shown = failure_of(run(model), run(reference()), rename={"ln": "norm", "head": "fc"}, structure=False)
    assert shown.startswith("ln: own code changed: by ")


def test_the_failure_ends_with_what_to_do() -> None:
    model = reference()
    model.norm.eps = 1e-2
    assert failure_of(run(model), run(reference())).splitlines()[-3:] == [
        "Look at the first cause; `keep=` with its layer in both runs gives the tensors to look at.",
        "",
        "Another implementation of the same? structure=False compares numbers alone, rename= maps names.",
    ]


def test_only_the_layers_asked_for_are_compared() -> None:
    model = reference()
    model.fc.weight.data.mul_(2)
    assert_same_behavior(run(model, loss=None), run(reference(), loss=None), layers="norm")
    assert failure_of(run(model, loss=None), run(reference(), loss=None), layers="fc").startswith("fc: weights changed")


def test_a_tolerance_allows_more() -> None:
    model = reference()
    model.fc.weight.data.mul_(1.0001)
    assert failure_of(run(model), run(reference()))
    assert_same_behavior(run(model), run(reference()), tolerance=1000)
    assert_same_behavior(run(model), run(reference()), tolerance={"**": 1000})


class Doubled(nn.Module):
    """Multiplies inside by a power of two, which the output is divided by."""

    def __init__(self, inside: float, outside: float) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 4, bias=False)
        self._factors = [inside, outside]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(x) * self._factors[0]) * self._factors[1]


@pytest.mark.parametrize(
    ("outside", "said"), [(0.5, "output unchanged"), (0.500005, r"output unchanged within 0\.0\d+ %")]
)
def test_code_that_makes_up_for_itself_is_not_called_structure(outside: float, said: str) -> None:
    old, new = (run(PROBE.build(lambda f=factors: Doubled(*f))) for factors in ((1.0, 1.0), (2.0, outside)))
    match = rf"^{said}; code differs in 1 place: \(root\): own code changed between norm and fc\n"
    with pytest.raises(AssertionError, match=match):
        assert_same_behavior(new, old, tolerance=10)


def test_records_that_came_from_nowhere_are_compared_by_fixed_tolerances() -> None:
    model = reference()
    model.norm.eps = 1e-2
    old, new = (dataclasses.replace(run(m)) for m in (reference(), model))
    assert_same_behavior(old, old)
    assert failure_of(new, old).startswith("norm.eps 1e-05 → 0.01")


def test_a_watch_is_compared_with_a_watch() -> None:
    with ModelProbe() as probe:
        old, new = reference(), reference()
        watches = [probe.watch(model) for model in (new, old)]
        new.norm.eps = 1e-2
        for model in (old, new):
            model(X)
        assert failure_of(*watches).startswith("norm.eps 1e-05 → 0.01")


@pytest.mark.parametrize("options", [{"layers": "nothing"}, {"rename": {"a": "b"}}, {"tolerance": {"nothing": 2}}])
def test_a_name_of_no_layer_is_an_error_at_the_line_of_the_call(options: dict[str, Any]) -> None:
    with pytest.raises(SelectionError) as error:
        assert_same_behavior(run(reference()), run(reference()), **options)
    assert {entry.path for entry in error.traceback.filter(error)} == {Path(__file__)}


# --- what an optimizer holds --------------------------------------------------------------------------------------


def first_step(*trained: str) -> Record:
    probe = ModelProbe()
    model = probe.build(Port)
    children = dict(model.named_children())
    optimizer = torch.optim.SGD((p for name in trained for p in children[name].parameters()), 0.1)
    watch = probe.watch(model)
    model(X).square().mean().backward()
    optimizer.step()
    return watch.first_step


def test_a_parameter_that_the_optimizer_of_a_step_no_longer_holds_is_named() -> None:
    every = [name for name, _ in Port().named_children()]
    last = every[-1]
    for mine, theirs, said in (
        (every[:-1], every, "no longer updates weight, bias"),
        (every, every[:-1], "updates weight, bias now"),
    ):
        with pytest.raises(AssertionError) as error:
            assert_same_behavior(first_step(*mine), first_step(*theirs))
        assert str(error.value).startswith(f"output unchanged; {last}: the optimizer {said}; 1 cause\n")


class Two(nn.Module):
    """Each input has a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.head(self.a(x).relu() + self.b(y).relu())


def test_of_two_inputs_the_one_that_changed_is_named_alone() -> None:
    model, x, y = PROBE.build(Two).eval(), PROBE.randn(3, 4), PROBE.randn(3, 4, name="y")
    expected = PROBE.run(model, x, y, loss="random")
    with pytest.raises(AssertionError) as failure:
        assert_same_behavior(PROBE.run(model, x, y + 1.0, loss="random"), expected)
    first, *rest = str(failure.value).splitlines()
    assert re.fullmatch(r"input\[1\] changed by \d+ %; 1 cause, 2 layers after it moved", first)
    assert "Moved after that: b and head." in rest


class Rnn(nn.Module):
    def __init__(self, growth: float = 0.0) -> None:
        super().__init__()
        self.growth = growth
        self.emb, self.cell, self.out = nn.Embedding(9, 6), nn.GRUCell(6, 6), nn.Linear(6, 2)

    def forward(self, i: torch.Tensor, h: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.cell(self.emb(i), h)
        return self.out(h), h * (1 + self.growth)


def test_a_state_that_a_loop_feeds_back_is_not_named_before_the_code_that_made_it() -> None:
    records = []
    for growth in (0.0, 0.1):
        model = PROBE.build(Rnn).eval()
        model.growth = growth
        with PROBE.watch(model) as watch, torch.no_grad():
            h = None
            for t in range(4):
                _, h = model(PROBE.randint(0, 9, (3,), name=f"t{t}"), h)
        records.append(watch.record)
    assert [value.source for value in records[0]["(root)"].calls[0].inputs] == [None, "(root) output[1]"]
    with pytest.raises(AssertionError) as failure:
        assert_same_behavior(records[1], records[0])
    first, *rest = str(failure.value).splitlines()
    assert re.fullmatch(r"growth 0\.0 → 0\.1: the model's output changed by \d+ %; 1 cause, 2 layers .*", first)
    assert "input[1]" not in "".join(rest)


class Batched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.n, self.fc = nn.Embedding(50, 8), nn.LayerNorm(8), nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.fc(self.n(self.emb(ids)))


class Flat(Batched):
    """All tokens in one axis, as inference engines have them."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids.flatten())


def test_all_tokens_in_one_axis_are_the_same() -> None:
    ids = PROBE.randint(0, 50, (2, 6))
    one, two = PROBE.build(Batched), PROBE.build(Flat)
    assert_same_behavior(PROBE.run(two, ids), PROBE.run(one, ids), structure=False)
    two.n.eps = 1e-2
    with pytest.raises(AssertionError, match=r"^n: own code changed(?s:.*)eps 1e-05 → 0\.01"):
        assert_same_behavior(PROBE.run(two, ids), PROBE.run(one, ids), structure=False)


def pairs_of_layers() -> nn.Sequential:
    return nn.Sequential(*(nn.ReLU() if i == 2 else nn.Linear(8, 8, bias=False) for i in range(5)))


def with_pairs_merged(factor: float = 1.0) -> nn.Sequential:
    model = PROBE.build(pairs_of_layers)
    for i, times in ((0, 1.0), (3, factor)):
        model[i].weight.data = times * model[i + 1].weight.detach() @ model[i].weight.detach()
        model[i + 1] = nn.Identity()
    return model


def test_weights_and_layers_may_differ_if_the_model_returns_the_same() -> None:
    old = run(PROBE.build(pairs_of_layers))
    assert "weights changed" in failure_of(run(with_pairs_merged()), old, structure=False)
    assert_same_behavior(run(with_pairs_merged()), old, weights=False)


def test_the_first_layer_is_named_whose_difference_reaches_the_output_though_weights_may_differ() -> None:
    shown = failure_of(run(with_pairs_merged(0.5)), run(PROBE.build(pairs_of_layers)), weights=False)
    first = r"layer '3' \(Linear\) returns another output: changed by \d+ %; \(root\) by \d+ %\n"
    assert re.match(first, shown)
    assert [line.split("  ")[0] for line in shown.splitlines()[3:6]] == [
        "layer '3' (Linear)", "layer '4' (Identity)", "(root)"
    ]  # fmt: skip
    assert shown.endswith("look at what became of the weights of this layer.")


def test_other_inputs_are_no_difference_of_weights() -> None:
    model = reference()
    shown = failure_of(PROBE.run(model, X + 1), PROBE.run(model, X), weights=False)
    assert shown.startswith("(root) is given another input: changed by ")
    assert_same_behavior(PROBE.run(model, X), PROBE.run(model, X), weights=False)
