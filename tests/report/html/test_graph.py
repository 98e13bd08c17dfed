"""The graph of layers: what is folded, what feeds what, what a large model looks like."""

from __future__ import annotations

import re
from typing import Any

from pytest_modelprobe.report.html.graph import MOST_NODES, graph


def layer(name: str, **changed: Any) -> dict[str, Any]:
    value = {"dtype": "float32", "shape": [2, 8]}
    return {"name": name, "type": "Linear", "calls": 1, "parameters": 8, "status": [],
            "inputs": [value], "outputs": [value], **changed}  # fmt: skip


def call(layer: str, *sources: int, after: int | None = None, number: int = 1, more: int = 0) -> dict[str, Any]:
    return {"layer": layer, "call": number, "more": more, "from": list(sources), "after": after}


def drawn(*layers: dict[str, Any], flow: list[dict[str, Any]] | None = None) -> str:
    """Return the graph. Without a flow each layer takes the output of the one before it."""
    chain = [call(one["name"], *([i - 1] if i else [])) for i, one in enumerate(layers)]
    return graph(list(layers), chain if flow is None else flow, lambda name: None)


def labels(svg: str) -> list[str]:
    return [re.sub("<[^>]+>", "", text) for text in re.findall(r"<text[^>]*>(.*?)</text>", svg)]


def blocks(n: int, **changed: Any) -> list[dict[str, Any]]:
    return [layer(f"h.{i}.{name}") for i in range(n) for name in ("fc", "act")]


def test_blocks_that_repeat_are_one_with_their_number() -> None:
    assert labels(drawn(*blocks(12))) == ["h.0 … 11 ×12", "fc Linear", "act Linear"]


def test_a_block_with_another_status_is_not_folded() -> None:
    layers = blocks(5)
    layers[4]["status"] = ["dead"]
    assert labels(drawn(*layers)) == ["h", "0 … 1 ×2", "fc Linear", "act Linear", "2", "fc Linear ×", "act Linear",
                                      "3 … 4 ×2", "fc Linear", "act Linear"]  # fmt: skip


def test_a_large_graph_with_a_cause_has_only_that_unfolded() -> None:
    layers = blocks(20)
    layers[4]["status"] = ["own code"]
    layers[6]["status"] = layers[7]["status"] = ["moved"]
    assert labels(drawn(*layers)) == ["h", "0 … 1 ×2 +2", "2", "fc Linear ●", "act Linear", "3 +2 ↓", "4 … 19 ×16 +2"]


def edges(svg: str) -> tuple[int, int]:
    """Return how many lines are solid, and how many dotted."""
    found = dict(re.findall(r'<path class="?(edge(?: likely)?)"? d="([^"]*)"', svg))
    return found.get("edge", "").count("M"), found.get("edge likely", "").count("M")


def test_a_recorded_source_is_a_solid_line_and_a_guess_is_dotted_and_says_so() -> None:
    flow = [call("q"), call("k"), call("norm", 0), call("out", after=2)]
    svg = drawn(layer("q"), layer("k"), layer("norm"), layer("out"), flow=flow)
    assert edges(svg) == (1, 2)  # the guess starts at k and norm, which no other layer takes
    assert "<title>a guess: code computed the input" in svg


def test_layers_that_take_one_tensor_of_which_the_source_is_not_known_have_the_same_guess() -> None:
    flow = [call("a"), call("b"), call("q", after=1), call("k", after=1), call("out", 2, 3)]
    assert edges(drawn(*map(layer, "abqk"), layer("out"), flow=flow)) == (2, 4)


def test_each_call_of_a_layer_is_a_node_between_what_it_takes_and_what_takes_it() -> None:
    flow = [call("a"), call("relu", 0), call("b", 1), call("relu", 2, number=2), call("out", 3)]
    svg = drawn(layer("a"), layer("relu", calls=2), layer("b"), layer("out"), flow=flow)
    assert labels(svg) == ["a Linear", "relu Linear", "b Linear", "relu (call 2) Linear", "out Linear"]
    assert edges(svg) == (4, 0)
    assert "<title>relu, call 2, Linear, 8 parameters, 2 calls</title>" in svg


def test_the_last_call_that_is_told_apart_stands_for_the_others() -> None:
    flow = [call("cell"), call("cell", 0, number=2, more=998), call("out", 1)]
    svg = drawn(layer("cell", calls=1000), layer("out"), flow=flow)
    assert labels(svg) == ["cell Linear", "cell (calls 2 to 1,000) Linear", "out Linear"]


def test_an_edge_over_a_level_goes_around_the_node_on_it() -> None:
    svg = drawn(layer("a"), layer("b"), layer("c"), flow=[call("a"), call("b", 0), call("c", 0, 1)])
    width = float(re.search(r"width=([\d.]+)", svg)[1])
    lane = [float(x) for x in re.findall(r"C[\d.]+ [\d.]+ ([\d.]+)", svg)]
    node = max(float(w) for w in re.findall(r"<rect width=([\d.]+)", svg))
    assert node + 10 < lane[0] < width


def test_a_thousand_layers_that_do_not_repeat_are_few_nodes() -> None:
    assert len(labels(drawn(*(layer(str(i), parameters=i) for i in range(1000))))) <= MOST_NODES


def test_of_many_layers_that_do_not_repeat_those_with_a_cause_and_their_neighbors_are_nodes() -> None:
    layers = [layer(f"net.{i}", parameters=i) for i in range(1000)]
    layers[500]["status"] = ["dead"]
    for moved in layers[501:]:
        moved["status"] = ["moved"]
    shown = labels(drawn(*layers))
    assert shown == ["net", "0 … 498 +499", "499 Linear", "500 Linear ×", "501 Linear ↓", "502 … 999 +498 ↓"]


def test_a_thousand_layers_with_a_cause_are_few_nodes() -> None:
    layers = [layer(str(i), parameters=i, status=["no gradient"]) for i in range(1000)]
    shown = labels(drawn(*layers))
    assert len(shown) <= MOST_NODES
    assert all("∅" in label for label in shown)


def test_a_deep_tree_is_no_error() -> None:
    assert labels(drawn(layer(".".join(map(str, range(3000))))))


def test_what_the_mouse_is_over_counts_one_hidden_layer_as_one() -> None:
    broken = [layer(f"net.{i}", status=["own code"]) for i in range(30)]
    titles = re.findall("<title>(.*?)</title>", drawn(layer("a"), *broken, layer("head.fc")))
    assert "head, 1 layer in it" in titles
