"""A diagnosis in words."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from pytest_modelprobe.comparison import NO_EFFECT, Cause, Diagnosis, diagnose
from pytest_modelprobe.comparison.compare import compare
from pytest_modelprobe.comparison.text import cause_text, first_line, grouped, percent, text
from pytest_modelprobe.comparison.tolerance import Comparison, Difference
from pytest_modelprobe.record import Layer, Record

NET = Record(model="Net")


def of(*causes: Cause, **fields: Any) -> Diagnosis:
    return Diagnosis(comparison=Comparison(actual=NET, expected=NET), causes=causes, **fields)


def eps(layer: str, **fields: Any) -> Cause:
    return Cause(kind="attribute", layer=layer, what="eps", actual=1e-6, expected=1e-5, effect="output", **fields)


def code(layer: str, what: str = "", **fields: Any) -> Cause:
    return Cause(kind="computation", layer=layer, what=what, **{"evidence": "both", **fields})


# --- the first line -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("diagnosis", "line"),
    [
        (of(eps("norm")), "norm.eps 1e-05 → 1e-06; 1 cause"),
        (
            of(eps("norm", change=0.0013, noise=1e-6)),
            "norm.eps 1e-05 → 1e-06: its output changed by 0.13 %, 1,300 x its noise; 1 cause",
        ),
        (
            of(dataclasses.replace(eps("conv", change=math.inf), what="stride", actual=2, expected=1, effect="shape")),
            "conv.stride 1 → 2: its output has another shape; 1 cause",
        ),
        (of(eps("norm", change=math.inf)), "norm.eps 1e-05 → 1e-06: its output changed; 1 cause"),
        (
            of(code("block", change=math.inf, hints=("all zero before",))),
            "block: own code changed: all zero before; 1 cause",
        ),
        (of(eps("norm"), moved=("fc",)), "norm.eps 1e-05 → 1e-06; 1 cause, 1 layer after it moved"),
        (
            of(eps("norm"), code("fc"), moved=("a", "b")),
            "norm.eps 1e-05 → 1e-06; 2 causes, 2 layers after them moved",
        ),
        (of(*(eps(f"h.{i}.norm") for i in range(6))), "h.*.norm.eps 1e-05 → 1e-06 x6; 1 cause"),
        (
            of(code("block", "between norm and attn", change=0.25)),
            "block: own code changed between norm and attn: by 25 %; 1 cause",
        ),
        (of(possible=(code("block"),)), "possibly block: own code changed; 1 possible cause"),
        (of(), "nothing changed"),
    ],
)
def test_the_first_line_says_layer_cause_and_size(diagnosis: Diagnosis, line: str) -> None:
    assert first_line(diagnosis) == line


@pytest.mark.parametrize("what", ["path", "renamed", "training", "weight requires_grad"])
def test_the_change_of_the_output_is_that_of_the_cause_beside_which_no_other_can_move_it(what: str) -> None:
    other = Cause(kind="architecture", layer="fc", what=what)
    line = "norm.eps 1e-05 → 1e-06: the model's output changed by 10 %; 2 causes"
    assert first_line(of(eps("norm"), other, output=0.1)) == line


def test_the_change_of_the_output_is_not_that_of_one_cause_where_another_may_move_it() -> None:
    line = "norm.eps 1e-05 → 1e-06; the model's output changed by 10 %; 2 causes"
    assert first_line(of(eps("norm"), code("fc"), output=0.1)) == line


def test_a_cause_without_an_effect_takes_no_change_of_the_output() -> None:
    line = "norm.eps 1e-05 → 1e-06: the model's output changed by 10 %; 2 causes"
    assert first_line(of(eps("norm"), code("fc", hints=(NO_EFFECT,)), output=0.1)) == line


def test_where_no_cause_can_be_told_the_first_line_names_what_changed_most() -> None:
    comparison = Comparison(
        actual=NET,
        expected=NET,
        found=(
            Difference(layer="a", kind="output", what="output", change=0.1),
            Difference(layer="b", kind="output", what="output", change=0.2),
        ),
    )
    assert (
        first_line(Diagnosis(comparison=comparison, unknown="the noise was not measured"))
        == "b output changed by 20 %; cannot tell why: the noise was not measured"
    )


@pytest.mark.parametrize(
    ("cause", "line"),
    [
        (code("2"), "layer '2' (Block): own code changed; 1 cause"),
        (code("2.attn"), "2.attn: own code changed; 1 cause"),
        (eps("2"), "2.eps 1e-05 → 1e-06; 1 cause"),
        (
            Cause(kind="architecture", layer="2", what="renamed", expected="1"),
            "layer '1' renamed to layer '2' (Block); 1 cause",
        ),
    ],
)
def test_a_name_that_is_a_number_says_what_it_is(cause: Cause, line: str) -> None:
    net = Record(model="Net", layers={"2": Layer(name="2", type="net.Block")})
    comparison = Comparison(actual=net, expected=net, found=())
    assert first_line(Diagnosis(comparison=comparison, causes=(cause,))) == line


def test_layers_that_are_numbers_are_told_together() -> None:
    assert first_line(of(code("0"), code("1"))) == "layers '*': own code changed x2; 1 cause"


def test_a_model_that_was_drawn_anew_is_said_to_be_that() -> None:
    weights = Cause(kind="weights", layer="fc", what="weight", change=1.4)
    assert "built outside the seed" in text(of(weights, redrawn=True))
    assert "built outside the seed" not in text(of(weights))


# --- causes in words ----------------------------------------------------------------------------------------------


def recorded(difference: Any, what: str, **fields: Any) -> Cause:
    """Return a cause that one difference shows."""
    cause = {"kind": "computation", "layer": "block", "what": what, "evidence": "recorded", **fields}
    return Cause(**cause, differences=(Difference(layer="fc", kind=difference, what=what),))


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (Cause(kind="seed", layer="(root)", actual=1, expected=0), "seed 0 → 1"),
        (Cause(kind="input", layer="(root)", what="ids", change=0.5), "ids changed by 50 %"),
        (recorded("loss", "loss", kind="input", actual="mse", expected="random"), "loss random → mse"),
        (
            recorded("interface", "input", kind="input", actual="(2,) int64", expected="(3,) int64"),
            "input (3,) int64 → (2,) int64",
        ),
        (Cause(kind="architecture", layer="fc", what="added", actual="Linear"), "fc added: Linear"),
        (Cause(kind="architecture", layer="fc", what="removed", expected="Linear"), "fc removed: it was Linear"),
        (Cause(kind="architecture", layer="fc", what="renamed", expected="head"), "head renamed to fc"),
        (Cause(kind="architecture", layer="act", what="type", actual="GELU", expected="ReLU"), "act: ReLU → GELU"),
        (
            Cause(kind="architecture", layer="fc", what="weight", actual="(2, 3)", expected="(2, 4)"),
            "fc.weight (2, 4) → (2, 3)",
        ),
        (
            Cause(kind="architecture", layer="fc", what="weight requires_grad", actual=False, expected=True),
            "fc.weight requires_grad True → False",
        ),
        (
            Cause(kind="architecture", layer="fc", what="bias added", actual="(2,) float32"),
            "fc.bias added: (2,) float32",
        ),
        (
            Cause(kind="architecture", layer="fc", what="bias removed", expected="(2,) float32"),
            "fc.bias removed: (2,) float32",
        ),
        (
            Cause(kind="architecture", layer="fc", what="weight tied to", expected="embed.weight"),
            "fc.weight tied to embed.weight → none",
        ),
        (Cause(kind="attribute", layer="(root)", what="scale", actual=2, expected=1), "scale 1 → 2"),
        (Cause(kind="weights", layer="fc", what="weight", change=0.1), "fc: weights changed by 10 % (weight)"),
        (Cause(kind="buffers", layer="bn", what="mean", change=math.inf), "bn: buffers changed (mean)"),
        (code("fc"), "fc: own code changed"),
        (code("block", "after mlp"), "block: own code changed after mlp"),
        (
            recorded("calls", "calls of fc", actual=2, expected=1),
            "block: own code calls fc 2 times, not 1",
        ),
        (
            recorded("argument", "attn is_causal", actual=True, expected=False),
            "block: own code gives attn is_causal True, not False",
        ),
        (
            Cause(kind="gradient", layer="(root)", what="the loss", gradient="of loss"),
            "the loss changed: another gradient arrives at the output",
        ),
        (
            Cause(kind="gradient", layer="block", what="fc output", gradient="lost"),
            "block: no gradient any more for fc output",
        ),
        (
            Cause(kind="gradient", layer="block", what="norm grad_enabled", actual=False, gradient="switched"),
            "block: own code calls norm with gradients off",
        ),
        (Cause(kind="gradient", layer="fc"), "fc: gradient changed in its own code"),
        (Cause(kind="gradient", layer="fc", what="weight", gradient="of value"), "fc: gradient of weight changed"),
        (Cause(kind="gradient", layer="block", what="after fc"), "block: gradient changed after fc"),
        (Cause(kind="gradient", layer="block", what="after fc", gradient="cut"), "block: gradient cut after fc"),
    ],
)  # fmt: skip
def test_a_cause_in_words(cause: Cause, words: str) -> None:
    assert cause_text(cause) == words


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (0.0, "0 %"),
        (2.5e-9, "2.5e-07 %"),
        (0.0013, "0.13 %"),
        (0.5, "50 %"),
        (0.9949, "99 %"),
        (0.996, "100 %"),
        (12.0, "1,200 %"),
        (1e12, "1.0e+14 %"),
        (math.inf, "∞ %"),
        (math.nan, "not known"),
        (None, "-"),
    ],
)
def test_a_change_as_a_person_reads_it(change: float | None, words: str) -> None:
    assert percent(change) == words


@pytest.mark.parametrize(
    ("change", "noise", "words"),
    [
        (0.5, 1e-6, "500,000 x its noise"),
        (0.5, 0.4, "1.2 x its noise"),
        (0.1, 0.4, "0.25 x its noise"),
        (1.0, 1e-17, "1e+17 x its noise"),
    ],
)
def test_a_change_in_units_of_its_noise(change: float, noise: float, words: str) -> None:
    assert words in first_line(of(eps("norm", change=change, noise=noise)))


@pytest.mark.parametrize("noise", [None, 0.0])
def test_without_noise_nothing_is_said_of_it(noise: float | None) -> None:
    assert "noise" not in first_line(of(eps("norm", change=0.5, noise=noise)))


# --- the same in repeated layers ----------------------------------------------------------------------------------


def test_the_same_cause_in_repeated_layers_is_one_of_the_largest_change() -> None:
    ((cause, times),) = grouped([eps("h.0.norm", change=0.1), eps("h.1.norm", change=0.3)])
    assert (cause.layer, cause.change, times) == ("h.*.norm", 0.3, 2)


# --- the whole text -----------------------------------------------------------------------------------------------


def test_the_whole_text() -> None:
    diagnosis = of(
        *(eps(f"h.{i}.norm", change=0.02, noise=1e-6) for i in range(3)),
        code("head", "after fc", change=0.5, noise=1e-6, hints=("scaled by 2",)),
        possible=(code("odd", evidence="propagation"),),
        moved=("h.0", "h.1", "out"),
        not_judged=("out",),
    )
    assert (
        text(diagnosis, ["Look at it.", "Or do not."])
        == """\
h.*.norm.eps 1e-05 → 1e-06 x3: its output changed by 2 %, 20,000 x its noise; 2 causes, 3 layers after them moved

cause                             class         changed by   x noise   seen                   looks like
h.*.norm.eps 1e-05 → 1e-06 x3     attribute     2 %           20,000   in the record          -
head: own code changed after fc   computation   50 %         500,000   alone and in the run   scaled by 2

Possible (an input is unknown, or only one of two kinds of evidence shows it):
cause                   class         changed by   x noise   seen         looks like
odd: own code changed   computation            -         -   in the run            -

Moved after that: h.* x2 and out.
Not judged, as what came in had changed: out.

Look at it.

Or do not."""
    )


def renamed(layer: str, now: str = "mask") -> Cause:
    return Cause(kind="architecture", layer=layer, what="path", actual=now, expected="input[1]")


def beside(*notes: Cause) -> Diagnosis:
    """Return a diagnosis with one cause and some notes."""
    found = (Difference(layer="norm", kind="attribute", what="eps", actual=1e-6, expected=1e-5),)
    return dataclasses.replace(
        of(eps("norm"), notes=notes), comparison=Comparison(actual=NET, expected=NET, found=found)
    )


def test_beside_causes_calls_that_are_written_otherwise_are_one_sentence() -> None:
    notes = [renamed(f"h.{i}.attn") for i in range(12)] + [renamed("head"), renamed("head", "scale")]
    lines = text(beside(*notes)).splitlines()
    assert lines[-1] == (
        "Written otherwise: input[1] renamed to mask in h.*.attn x12 and head and input[1] renamed to scale in head."
    )
    many = text(beside(*(renamed("head", f"a{i}") for i in range(60)))).splitlines()
    assert many[-1].endswith("input[1] renamed to a7 in head and 52 more.")
    assert len(many) == len(lines)


def test_calls_that_are_written_otherwise_alone_are_the_first_line() -> None:
    assert text(of(notes=(renamed("h.0.attn"), renamed("h.1.attn"), renamed("head")))) == (
        "same function; written otherwise in 3 places: h.*.attn: input[1] renamed to mask x2; "
        "head: input[1] renamed to mask"
    )


def test_more_causes_than_anyone_reads_are_counted() -> None:
    lines = text(of(*(eps(f"norm_{i}a") for i in range(30)))).splitlines()
    assert lines[0].endswith("; 30 causes")
    assert lines[-1] == "... 10 rows more"


# --- names that are not to be trusted -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fc\x1b[31m", "fc\nFAILED", "fc\r", "fc\u202e", "fc\u2028x"])
def test_no_name_of_a_layer_moves_the_cursor_or_breaks_a_line(name: str) -> None:
    old, new = (
        Record(model="Net", layers={name: Layer(name=name, type="net.A", attributes={"eps": e})}) for e in (1, 2)
    )
    shown = text(diagnose(compare(new, old)))
    assert name not in shown
    assert shown.splitlines()[0].endswith("eps 1 → 2; 1 cause")
