"""The graph of layers: what is folded, what feeds what, what a large model looks like."""

from __future__ import annotations

import re
from typing import Any

from pytest_modelprobe.report.html.graph import MOST_NODES, graph


def layer(name: str, *sources: str, **changed: Any) -> dict[str, Any]:
    value = {"dtype": "float32", "shape": [2, 8]}
    return {"name": name, "type": "Linear", "calls": 1, "parameters": 8, "sources": list(sources), "status": [],
            "inputs": [value], "outputs": [value], **changed}  # fmt: skip


def drawn(*layers: dict[str, Any]) -> str:
    return graph(list(layers), lambda name: None)


def labels(svg: str) -> list[str]:
    return [re.sub("<[^>]+>", "", text) for text in re.findall(r"<text[^>]*>(.*?)</text>", svg)]


def blocks(n: int, **changed: Any) -> list[dict[str, Any]]:
    inner = [[layer(f"h.{i}.fc", f"h.{i - 1}.act" if i else ""), layer(f"h.{i}.act", f"h.{i}.fc")] for i in range(n)]
    return [x for block in inner for x in block]


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


def test_a_known_source_is_a_solid_line_and_an_unknown_one_dotted() -> None:
    svg = drawn(layer("q", ""), layer("k", ""), layer("norm", "q"), layer("out"))
    solid, dotted = re.findall(r'<path class="?(edge(?: likely)?)"? d="([^"]*)"', svg)
    assert (solid[0], solid[1].count("M")) == ("edge", 1)
    assert (dotted[0], dotted[1].count("M")) == ("edge likely", 2)  # from k and norm, which nothing else takes


def test_what_takes_the_input_of_the_model_has_no_line() -> None:
    assert "edge" not in drawn(layer("a", ""), layer("b", ""), layer("c", "", inputs=[{"dtype": "int64"}]))


def test_an_edge_over_a_level_goes_around_the_node_on_it() -> None:
    svg = drawn(layer("a", ""), layer("b", "a"), layer("c", "b", "a"))
    width = float(re.search(r"width=([\d.]+)", svg)[1])
    lane = [float(x) for x in re.findall(r"C[\d.]+ [\d.]+ ([\d.]+)", svg)]
    node = max(float(w) for w in re.findall(r"<rect width=([\d.]+)", svg))
    assert node + 10 < lane[0] < width


def test_a_thousand_layers_that_do_not_repeat_are_few_nodes() -> None:
    layers = [layer(str(i), *([str(i - 1)] if i else []), parameters=i) for i in range(1000)]
    layers[500]["status"] = ["dead"]
    shown = labels(drawn(*layers))
    assert len(shown) <= MOST_NODES
    assert "500 Linear ×" in shown


def test_a_deep_tree_is_no_error() -> None:
    assert labels(drawn(layer(".".join(map(str, range(3000))))))


def test_what_the_mouse_is_over_counts_one_parameter_as_one() -> None:
    (bias,) = re.findall("<title>(.*?)</title>", drawn(layer("bias", parameters=1)))
    assert bias == "bias, Linear, (2, 8), 1 parameter"


def test_what_the_mouse_is_over_counts_one_hidden_layer_as_one() -> None:
    broken = [layer(f"net.{i}", status=["own code"]) for i in range(30)]
    titles = re.findall("<title>(.*?)</title>", drawn(layer("a"), *broken, layer("head.fc")))
    assert "head, 1 layer in it" in titles
