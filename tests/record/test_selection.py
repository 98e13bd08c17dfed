"""``layers=``: which names a selector means, and what it says when it means none."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_modelprobe.exceptions import SelectionError
from pytest_modelprobe.record.selection import Glob, nearest, select


class Linear: ...


class ReLU: ...


class LeakyReLU(ReLU): ...


LAYERS: dict[str, object] = {
    "(root)": object(),
    "embed": Linear(),
    "blocks": object(),
    "blocks.0": object(),
    "blocks.0.attn": Linear(),
    "blocks.0.act": ReLU(),
    "blocks.1": object(),
    "blocks.1.attn": Linear(),
    "blocks.1.act": LeakyReLU(),
    "head": Linear(),
}


def error(selector: Any, layers: dict[str, object] = LAYERS) -> str:
    with pytest.raises(SelectionError) as caught:
        select(layers, selector)
    return str(caught.value)


# --- globs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("glob", "names"),
    [
        ("head", ["head"]),
        ("*", ["embed", "blocks", "head"]),
        ("**", list(LAYERS)),
        ("**.*", list(LAYERS)[1:]),
        ("(root)", ["(root)"]),
        ("blocks.*", ["blocks.0", "blocks.1"]),
        ("blocks.*.attn", ["blocks.0.attn", "blocks.1.attn"]),
        ("blocks.**", [name for name in LAYERS if name.startswith("blocks")]),
        ("**.attn", ["blocks.0.attn", "blocks.1.attn"]),
        ("**.blocks.**.**.act", ["blocks.0.act", "blocks.1.act"]),
        ("blocks.[1-9].a??", ["blocks.1.act"]),
        ("blocks.[!1].a*", ["blocks.0.attn", "blocks.0.act"]),
        ("*e*d", ["embed", "head"]),
    ],
)
def test_a_glob_means_these_layers(glob: str, names: list[str]) -> None:
    assert select(LAYERS, glob) == names


def test_many_double_stars_take_no_exponential_time() -> None:
    glob = Glob(".".join(["**", "*"] * 30 + ["end"]))
    assert not glob.matches(".".join(["x"] * 60))


def reference(pattern: list[str], path: list[str]) -> bool:
    """The definition of a glob, read aloud."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(reference(pattern[1:], path[used:]) for used in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and reference(pattern[1:], path[1:])


@given(
    pattern=st.lists(st.sampled_from(["**", "*", "a", "b", "a*", "?b", "[ab]"]), min_size=1),
    path=st.lists(st.sampled_from(["a", "b", "ab", "bb"]), min_size=1, max_size=6),
)
def test_globs_match_as_the_definition_says(pattern: list[str], path: list[str]) -> None:
    pattern = pattern[:6]
    assert Glob(".".join(pattern)).matches(".".join(path)) == reference(pattern, path)


@given(pattern=st.lists(st.sampled_from(["**", "*", "a", "?"]), min_size=1, max_size=6))
def test_the_root_is_the_empty_path(pattern: list[str]) -> None:
    assert Glob(".".join(pattern)).matches("(root)") == reference(pattern, [])


# --- other selectors ----------------------------------------------------------------------------


def test_a_pattern_matches_the_whole_name() -> None:
    assert select(LAYERS, re.compile(r"blocks\.\d")) == ["blocks.0", "blocks.1"]


def test_a_class_means_its_subclasses_too() -> None:
    assert select(LAYERS, ReLU) == ["blocks.0.act", "blocks.1.act"]


def test_a_callable_gets_the_name_and_the_layer() -> None:
    chosen = select(LAYERS, lambda name, layer: name != "head" and type(layer) is Linear)
    assert chosen == ["embed", "blocks.0.attn", "blocks.1.attn"]


def test_recorded_layers_say_themselves_of_which_type_they_are() -> None:
    recorded = {"fc": "Linear", "act": "ReLU"}
    assert select(recorded, ReLU, is_instance=lambda layer, kind: layer == kind.__name__) == ["act"]


@pytest.mark.parametrize("many", [list, frozenset])
def test_several_selectors_are_joined(many: Any) -> None:
    assert select(LAYERS, many(["head", ReLU])) == ["blocks.0.act", "blocks.1.act", "head"]


def test_a_list_in_a_list_is_taken_apart() -> None:
    assert select(LAYERS, [["head"], ("embed", ["!e*"])]) == ["head"]


@pytest.mark.parametrize("selector", [["blocks.*", "!*.0"], ["!*.0", "blocks.*"]])
def test_an_exclusion_applies_in_whichever_order(selector: list[str]) -> None:
    assert select(LAYERS, selector) == ["blocks.1"]


@pytest.mark.parametrize("selector", ["!blocks.**", ["!blocks.**"]])
def test_exclusions_alone_start_from_every_layer(selector: Any) -> None:
    assert select(LAYERS, selector) == ["(root)", "embed", "head"]


# --- messages -----------------------------------------------------------------------------------


def is_big(name: str, layer: object) -> bool:
    return False


NO_SELECTOR = (
    " is no selector: write a glob such as 'blocks.*.attn' ('**' for all layers), a re.Pattern on str, a module type, "
    "a callable (name, layer) -> bool, or a list of these."
)
INSIDE = "matches none of 10 layers; it is found inside 'blocks.0.attn', but has to match the whole name."
NAMES = f"the names are {', '.join(map(repr, [*LAYERS][:8]))} and 2 more."
NO_SEGMENT = ": between two dots stands a name, in which * is any text, or ** alone."
EMPTY_GLOB = 'An empty glob matches no layer: write "**" for all of them.'
EMPTY_LIST = ' selects no layer: write "**" for all of them.'


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("haed", "'haed' matches none of 10 layers; nearest: 'head'."),
        ("blocks.attn", "'blocks.attn' matches none of 10 layers; 'blocks.*.attn' matches 2."),
        ("attn", "'attn' matches none of 10 layers; '**.attn' matches 2."),
        (["**", "!blocks.attn"], "'!blocks.attn' excludes none of 10 layers; '!blocks.*.attn' excludes 2."),
        ("!**", "'!**' leaves none of 10 layers included; exclude fewer, or include more."),
        (["head", "!h*"], "'!h*' leaves none of 1 layer included; exclude fewer, or include more."),
        (["head", "!h*", "!e*"], "'!h*', '!e*' leave none of 1 layer included; exclude fewer, or include more."),
        (int, "int is the type of none of 10 layers; the types are object (4), Linear (4), ReLU (1), LeakyReLU (1)."),
        (re.compile("attn"), f"The pattern 'attn' {INSIDE}"),
        (is_big, f"The callable is_big is true for none of 10 layers; {NAMES}"),
        ("", EMPTY_GLOB),
        ("!", EMPTY_GLOB),
        (["head", ""], EMPTY_GLOB),
        ([], f"[]{EMPTY_LIST}"),
        (["head", ()], f"(){EMPTY_LIST}"),
        ("blocks..attn", f"'blocks..attn' has the segment ''{NO_SEGMENT}"),
        ("head.", f"'head.' has the segment ''{NO_SEGMENT}"),
        ("blocks.**attn", f"'blocks.**attn' has the segment '**attn'{NO_SEGMENT}"),
        (None, f"None{NO_SELECTOR}"),
        (["head", 3], f"A value of type int{NO_SELECTOR}"),
        (re.compile(b"head"), f"A value of type Pattern{NO_SELECTOR}"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_selector_that_means_nothing_is_told_what_it_may_mean(selector: Any, message: str) -> None:
    assert error(selector) == message


def test_where_no_name_is_near_the_names_are_listed() -> None:
    layers = dict.fromkeys(f"l{number}" for number in range(12))
    assert error("zzz", layers) == (
        "'zzz' matches none of 12 layers; the names are 'l0', 'l1', 'l2', 'l3', 'l4', 'l5', 'l6', 'l7' and 4 more."
    )


def test_without_layers_nothing_can_be_selected() -> None:
    assert error("**", {}).startswith("'**' matches none of 0 layers")


class CallableModule:
    def __call__(self, x: object) -> object:
        return x

    def named_modules(self) -> list[object]:
        return []


def test_a_layer_itself_gets_its_name() -> None:
    module = CallableModule()
    expected = "The module fc itself is no selector: write its name, 'fc'."
    assert error(module, {"(root)": 0, "fc": module}) == expected


def test_a_module_from_elsewhere_is_never_called() -> None:
    assert error(CallableModule()).startswith("A value of type CallableModule is no selector: ")


@given(selector=st.lists(st.text("ab.*?[]!(root)", max_size=8), max_size=3) | st.text("ab.*?[]!", max_size=12))
def test_a_selector_selects_something_or_says_why_not_in_one_line(selector: Any) -> None:
    names, refusal = [], ""
    try:
        names = select(LAYERS, selector)
    except SelectionError as refused:
        refusal = str(refused)
    assert names == [name for name in LAYERS if name in names]
    assert bool(names) != bool(re.fullmatch(r".+\.", refusal))


# --- nearest ------------------------------------------------------------------------------------


def test_nearest_puts_the_nearest_first() -> None:
    assert nearest("layer12", ["layer1", "layer12x", "other"]) == ["layer12x", "layer1"]


def test_nearest_keeps_the_order_of_names_that_are_equally_near() -> None:
    assert nearest("fc9", ["fc2", "fc3", "fc1"]) == ["fc2", "fc3", "fc1"]
