"""Ports of models of transformers in other words: healthy ones are the same, and an error is named."""

from __future__ import annotations

import re
import runpy
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pytest_modelprobe import assert_same_behavior
from pytest_modelprobe.comparison import pair
from pytest_modelprobe.exceptions import NothingObservedError, SelectionError, UsageError

pytest.importorskip("transformers")
ported = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[3] / "evidence" / "ports" / "models.py")))
"""References and their ports, each with a switch for errors."""


def records(modelprobe, make, port, error=""):
    reference = ported.drawn(make, 0)
    ids = modelprobe.randint(0, ported.WORDS, (2, 12))
    return modelprobe.run(port(reference, error), ids), modelprobe.run(reference, ids)


@pytest.mark.parametrize(("reference", "port"), [(ported.gpt2, ported.nano_gpt), (ported.llama, ported.fused_llama)])
def test_a_healthy_port_is_the_same(modelprobe, reference, port):
    assert_same_behavior(*records(modelprobe, reference, port), pair="structure")


@pytest.mark.parametrize(
    ("error", "first"),
    [
        ("eps", "blocks.1.ln_1 does not compute what transformer.h.1.ln_1 does: "),
        ("gelu", "blocks.1.mlp.gelu does not compute what transformer.h.1.mlp.act does: "),
        ("qkv order", "blocks.1.attn does not compute what transformer.h.1.attn does: "),
        ("post-norm", "blocks.1 does not compute what transformer.h.1 does: "),
        ("position", "first in what it passes to pos; "),
        ("untied", "a weight of lm_head is tied to transformer.wte.weight, and that of head is not tied"),
        (
            "bias",
            "blocks.1.mlp.c_fc and transformer.h.1.mlp.c_fc: has weight, expected weight and bias, and the output ",
        ),
    ],
)
def test_an_error_of_a_port_of_gpt2_is_named(modelprobe, error, first):
    port, reference = records(modelprobe, ported.gpt2, ported.nano_gpt, error)
    with pytest.raises(AssertionError) as failure:
        assert_same_behavior(port, reference, pair="structure")
    assert first in str(failure.value).partition("\n")[0]


@pytest.mark.parametrize(
    ("error", "first"),
    [
        ("rope", "layers.1.attention does not compute what model.layers.1.self_attn does: "),
        ("kv heads", "layers.1.attention does not compute what model.layers.1.self_attn does: "),
        ("gate order", "layers.1.feed_forward does not compute what model.layers.1.mlp does: "),
        (
            "layer norm",
            "layers.1.attention_norm and model.layers.1.input_layernorm: has weight and bias, expected weight, and ",
        ),
    ],
)
def test_an_error_of_a_port_of_llama_is_named(modelprobe, error, first):
    port, reference = records(modelprobe, ported.llama, ported.fused_llama, error)
    with pytest.raises(AssertionError) as failure:
        assert_same_behavior(port, reference, pair="structure")
    assert str(failure.value).startswith(first)


def test_the_pairing_is_a_rename_to_paste_and_what_has_no_partner_is_counted(modelprobe):
    found = pair(*records(modelprobe, ported.llama, ported.fused_llama))
    assert found.rename["layers.*.attention"] == "model.layers.*.self_attn"
    assert "6 layers of FusedLlama without a partner: layers.0.attention.wqkv, " in str(found)


def chain(names: str) -> nn.Module:
    return nn.Sequential(OrderedDict((name, nn.Linear(8, 8)) for name in names))


def test_layers_that_fit_several_are_said_and_not_guessed(modelprobe):
    x = modelprobe.randn(2, 8)
    one, two = (modelprobe.run(modelprobe.build(lambda names=names: chain(names)), x) for names in ("xy", "pqr"))
    found = pair(one, two)
    assert found.names == {"p": "x", "(root)": "(root)"}
    assert "Ambiguous: y fits several layers equally well; say which with rename=" in str(found)
    assert pair(one, two, {"y": "r"}).names == {"p": "x", "r": "y", "(root)": "(root)"}


def test_bad_input_is_refused_in_one_sentence(modelprobe):
    x = modelprobe.randn(2, 8)
    record, other = modelprobe.run(nn.Linear(8, 8), x), modelprobe.run(nn.Sequential(nn.ReLU()), x)
    with pytest.raises(NothingObservedError, match="no layer of Linear could be paired with one of Sequential: say"):
        assert_same_behavior(record, other, pair="structure")
    with pytest.raises(UsageError, match='pair is "names" or "structure"; got \'values\''):
        assert_same_behavior(record, other, pair="values")
    with pytest.raises(UsageError, match="leave out layers="):
        assert_same_behavior(record, other, pair="structure", layers="0")
    with pytest.raises(SelectionError, match="rename: 'x' matches no layer"):
        assert_same_behavior(record, other, pair="structure", rename={"x": "0"})


def test_models_with_outputs_of_other_sizes_are_refused(modelprobe):
    x = modelprobe.randn(2, 8)
    one, two = (nn.Sequential(nn.Linear(8, 8), nn.Flatten(), nn.Linear(8, n)) for n in (3, 4))
    with pytest.raises(NothingObservedError, match="cannot be compared: wrap one model"):
        assert_same_behavior(modelprobe.run(one, x), modelprobe.run(two, x), pair="structure")


def test_models_that_were_given_other_tensors_are_not_compared(modelprobe):
    x, other = modelprobe.randn(2, 8), modelprobe.randn(2, 8, name="other")
    model = modelprobe.build(lambda: chain("xy"))
    with pytest.raises(NothingObservedError, match=r"was given input \(2, 8\) and .* which are not the same tensors"):
        assert_same_behavior(modelprobe.run(model, x), modelprobe.run(model, other), pair="structure")


class Placed(nn.Module):
    """Adds positions, which are its own parameter or that of a layer."""

    def __init__(self, own: bool, shift: int = 0) -> None:
        super().__init__()
        places = torch.arange(24.0).reshape(3, 8)
        self.shift, self.inside = shift, nn.Linear(8, 8)
        if own:
            self.places = nn.Parameter(places)
        else:
            self.table = nn.Embedding.from_pretrained(places, freeze=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.places if hasattr(self, "places") else self.table(torch.arange(3))
        return self.inside(x + places.roll(self.shift, 0))


def test_a_parameter_that_is_in_another_layer_is_not_what_differs(modelprobe):
    x = modelprobe.randn(2, 3, 8)
    one, two, wrong = (
        modelprobe.run(modelprobe.build(lambda options=options: Placed(*options)), x)
        for options in ((True,), (False,), (True, 1))
    )
    assert_same_behavior(one, two, pair="structure")
    with pytest.raises(AssertionError, match=r"^\(root\) does not compute .* first in what it passes to inside; "):
        assert_same_behavior(wrong, two, pair="structure")


def test_outputs_beside_the_largest_are_said_not_to_be_compared(modelprobe):
    found = pair(*records(modelprobe, ported.gpt2, ported.nano_gpt))
    assert re.search(r"Only the largest output of both is compared, not output\.(cache|past_key_values)\.", str(found))
