"""Each layer called alone: its response is that of its own code, and of nothing else."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_modelprobe import ModelProbe
from pytest_modelprobe.comparison import compare
from pytest_modelprobe.models import preserved, seeding
from pytest_modelprobe.record import IsolatedResponse, NamesBefore, Reading, Record
from pytest_modelprobe.runs.isolation import (
    IsolationOptions,
    Key,
    calls,
    fits,
    kind_of,
    noisy,
    synthetic,
    traced,
    with_known_noise,
)
from pytest_modelprobe.runs.noise import ROUNDING, Perturbation, relative_change

Responses = dict[Key, IsolatedResponse]


def isolate(
    model: nn.Module, forward: Callable[[], object], options: IsolationOptions | None = None, *, perturb: Any = None
) -> Responses:
    with preserved(model), traced(model, forward, options or IsolationOptions()) as alone:
        return alone(perturb)


def respond(
    model: nn.Module,
    *args: Any,
    like: Responses | None = None,
    names: dict[str, str] | None = None,
    gradient: bool = True,
    **kwargs: Any,
) -> Responses:
    """Return the responses of all layers, to synthetic tensors made like those of other responses."""
    recipes = {key: response.recipes for key, response in (like or {}).items()}

    def forward() -> None:
        with seeding.seeded(0):
            model(*args, **kwargs)

    before = None if names is None else NamesBefore(layers=names)
    return isolate(model, forward, IsolationOptions(recipes=recipes, names=before, gradient=gradient))


def differs(a: Reading | None, b: Reading | None) -> bool:
    if a is None or b is None:
        return a is not b
    moved = relative_change(b, a)
    return moved is None or moved > 1e-5


def changed(actual: Responses, expected: Responses) -> set[str]:
    """Return the layers whose code answers otherwise; those not called alone count too."""
    layers = {layer for layer, _ in actual.keys() ^ expected.keys()}
    for key in actual.keys() & expected.keys():
        a, e = actual[key], expected[key]
        same = (
            a.reason is None is e.reason
            and dict(a.recipes) == dict(e.recipes)
            and [(h.where, h.passed) for h in a.handed] == [(h.where, h.passed) for h in e.handed]
            and not any(differs(x.reading, y.reading) for x, y in zip(a.handed, e.handed, strict=True))
            and not differs(a.gradient, e.gradient)
            and a.without_gradient == e.without_gradient
        )
        if not same:
            layers.add(key[0])
    return layers


# --- real models ------------------------------------------------------------------------------------------------------

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def ids(seed: int) -> torch.Tensor:
    return seeding.randint(3, 100, (2, 12), seed=seed, name="ids", device="cpu")


def image(seed: int) -> torch.Tensor:
    return seeding.randn((2, 3, 32, 32), seed=seed, name="image", device="cpu")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.cell = nn.LSTMCell(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.embedding(x))
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        assert state is not None
        return state[0]


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=100))


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    )


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")
    return transformers.ResNetModel(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Any]]]] = {
    "gpt2": (gpt2, lambda seed: {"input_ids": ids(seed), "use_cache": False}),
    "gpt2 with a cache": (gpt2, lambda seed: {"input_ids": ids(seed)}),
    "mixtral": (
        mixtral,
        lambda seed: {"input_ids": ids(seed), "attention_mask": torch.ones(2, 12, dtype=torch.long).tril(8)},
    ),
    "resnet": (resnet, lambda seed: {"pixel_values": image(seed)}),
    "lstm": (Recurrent, lambda seed: {"x": ids(seed)}),
}


def made(name: str, seed: int, *, training: bool = False) -> nn.Module:
    with seeding.seeded(seed):
        return MODELS[name][0]().train(training)


@pytest.mark.parametrize(
    ("name", "training"),
    [("gpt2", True), ("gpt2 with a cache", False), ("mixtral", False), ("resnet", True), ("lstm", True)],
)
def test_every_layer_of_a_real_model_answers_for_its_code_and_not_for_weights_and_inputs(
    name: str, training: bool
) -> None:
    expected = respond(made(name, 0, training=training), **MODELS[name][1](0))
    assert {key: r.reason for key, r in expected.items() if r.reason} == {}
    again = respond(made(name, 0, training=training), **MODELS[name][1](0))
    assert repr(again) == repr(expected)
    model = made(name, 1, training=training)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.1)
        for buffer in (b for n, b in model.named_buffers() if n.endswith(("running_mean", "running_var"))):
            buffer.mul_(3).add_(0.1)
    actual = respond(model, **MODELS[name][1](7), like=expected)
    assert changed(actual, expected) == set()


@pytest.mark.parametrize("name", ["gpt2 with a cache", "resnet", "lstm"])
def test_the_model_is_left_as_it_was_bit_for_bit(name: str) -> None:
    model = made(name, 0, training=True)
    model(**MODELS[name][1](0))

    def state() -> list[Any]:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        attributes = [{k: repr(v) for k, v in vars(m).items() if not isinstance(v, dict)} for m in model.modules()]
        hooks = [[len(d) for d in vars(m).values() if isinstance(d, dict)] for m in model.modules()]
        identities = [(n, id(t), t.data_ptr(), t.requires_grad, t.grad) for n, t in tensors]
        return [attributes, hooks, identities, [t.detach().numpy().tobytes() for _, t in tensors]]

    def random_states() -> str:
        return repr((torch.get_rng_state().sum(), random.getstate(), np.random.get_state()))  # noqa: NPY002

    before, numbers = state(), random_states()
    respond(model, **MODELS[name][1](0))
    assert state() == before
    assert random_states() == numbers


# --- one edit, one layer ----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Written out, so that every line of it can be changed."""

    def __init__(self, size: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.drop = nn.Dropout(0.1)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        mixed = self.drop(scores.softmax(-1)) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(size), Attention(size), nn.LayerNorm(size)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.Sequential(Block(), Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.embedding(x)) @ self.embedding.weight.mT


X = seeding.randint(0, 50, (2, 8), seed=0, name="x", device="cpu")


def edit(model: Net, layer: str, old: str, new: str) -> None:
    """Replace a piece of the source of one layer's ``forward``."""
    import inspect
    import textwrap

    module = model.get_submodule(layer)
    source = textwrap.dedent(inspect.getsource(type(module).forward))
    assert old in source
    names: dict[str, Any] = {"torch": torch, "math": math, "annotations": None}
    exec(compile("from __future__ import annotations\n" + source.replace(old, new), layer, "exec"), names)
    module.forward = MethodType(names["forward"], module)


@functools.cache
def net_responses(training: bool = False) -> Responses:
    with seeding.seeded(0):
        return respond(Net().train(training), X)


def edited(*edits: tuple[str, str, str]) -> set[str]:
    with seeding.seeded(1):
        model = Net().eval()
    for layer, old, new in edits:
        edit(model, layer, old, new)
    return changed(respond(model, X.flip(0), like=net_responses()), net_responses())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("math.sqrt(q.shape[-1])", "q.shape[-1]"),
        ("scores.softmax(-1)", "scores.softmax(-2).nan_to_num()"),
        ("-math.inf", "0.0"),
        ("mixed.transpose(1, 2).flatten(2)", "mixed.reshape(mixed.shape[0], mixed.shape[2], -1)"),
        ("(self.heads, -1)).transpose(1, 2)", "(-1, self.heads)).permute(0, 3, 1, 2)"),
        ("q, k, v = ", "k, q, v = "),
        (".triu(1)", ".triu(2)"),
    ],
    ids=["scale", "softmax dim", "mask dropped", "heads transposed", "heads interleaved", "q and k", "mask by one"],
)
def test_an_edit_shows_in_the_edited_layer_and_nowhere_else(old: str, new: str) -> None:
    assert edited(("blocks.1.attention", old, new)) == {"blocks.1.attention"}


def test_every_norm_with_another_eps_is_named() -> None:
    model = Net().eval()
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    for name in norms:
        model.get_submodule(name).eps = 1e-2
    assert changed(respond(model, X, like=net_responses()), net_responses()) == norms


@pytest.mark.parametrize(
    ("layer", "old", "new"),
    [
        ("blocks.1.attention", "mixed.transpose", "mixed.detach().transpose"),
        ("blocks.1", "x = x + self", "x = x.detach() + self"),
        ("blocks.1", "return x + self.mlp(self.norm2(x))", "return x + self.mlp(self.norm2(x.detach()))"),
    ],
    ids=["all", "residual", "passed on"],
)
def test_a_detached_branch_shows_though_no_number_of_the_forward_changes(layer: str, old: str, new: str) -> None:
    assert edited((layer, old, new)) == {layer}


def test_a_frozen_weight_gets_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].bias.requires_grad_(False)
    assert respond(model, torch.ones(2, 4))["0", 0].without_gradient == ("bias",)


def test_a_part_of_the_responses_is_that_of_all() -> None:
    model = transformers.GPT2Model(transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50)).eval()
    ids = torch.arange(6).unsqueeze(0)
    with traced(model, lambda: model(ids), IsolationOptions(gradient=True), repeats=True) as alone:
        whole, outputs, gradients = alone(), alone(of="outputs"), alone(of="gradients")
    assert all(response.handed == outputs[key].handed for key, response in whole.items())
    assert all(response.gradient == gradients[key].gradient for key, response in whole.items())
    assert all(response.gradient is None for response in outputs.values())
    assert all(handed.reading is None for response in gradients.values() for handed in response.handed)


def test_a_repeat_does_not_see_what_one_before_it_left_behind() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls

    model = Code(forward, calls=torch.zeros(()))
    with traced(model, lambda: model(torch.ones(2)), repeats=True) as alone:
        assert alone() == alone()


def test_without_a_loss_there_is_no_gradient() -> None:
    response = respond(nn.Linear(4, 4), torch.ones(2, 4), gradient=False)["(root)", 0]
    assert (response.gradient, response.without_gradient) == (None, ())


# --- what is upstream, below and beside does not count ----------------------------------------------------------------


def test_another_model_upstream_does_not_count() -> None:
    def model(first: nn.Module) -> nn.Module:
        return nn.Sequential(first, nn.Linear(4, 4), nn.GELU())

    expected = respond(model(nn.Linear(4, 4)), torch.ones(2, 4))
    actual = respond(model(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), torch.ones(2, 4), like=expected)
    assert changed(actual, expected) == {"0", "0.0", "0.1"}


def test_a_large_synthetic_tensor_has_no_two_equal_rows() -> None:
    x = synthetic("2^0", (2000, 768), "input", torch.float32)
    assert len(x.unique(dim=0)) == 2000
    assert abs(x.mean().item()) < 0.01
    assert abs(x.std().item() - 1) < 0.02


@pytest.mark.parametrize("gradient", [False, True])
def test_a_fused_layer_is_called_alone_as_it_ran_unfused(gradient: bool) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    handed = [h.where for h in respond(model, torch.ones(2, 3, 8), gradient=gradient)["(root)", 0].handed]
    assert "linear1 input" in handed
    assert "norm2 input" in handed


class Code(nn.Module):
    """Has children or buffers, and does with them what a function says."""

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self._function = [function]
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function[0](self, *args, **kwargs)


def two() -> Code:
    """Return a model of two children."""
    return Code(lambda s, x: s.a(x) + s.b(x.clone()), a=nn.Linear(4, 4), b=nn.Linear(4, 4))


def renamed_two() -> Code:
    """Return `two`, its children under other names and in another order."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        second = self.right(x.clone())
        return self.left(x) + second

    return Code(forward, left=nn.Linear(4, 4), right=nn.Linear(4, 4))


def test_a_child_gives_out_what_belongs_to_its_name_and_not_to_its_place_in_the_code() -> None:
    names = {"left": "a", "right": "b"}
    with seeding.seeded(0):
        model = two()
    with seeding.seeded(0):
        renamed = renamed_two()
    before = respond(model, torch.ones(2, 4))["(root)", 0]
    now = respond(renamed, torch.ones(2, 4), names=names)["(root)", 0]
    assert [h.where for h in before.handed] == ["a input", "b input", "output"]
    assert [h.where for h in now.handed] == ["right input", "left input", "output"]
    assert not differs(now.handed[-1].reading, before.handed[-1].reading)
    assert not differs(now.gradient, before.gradient)
    assert differs(respond(renamed, torch.ones(2, 4))["(root)", 0].handed[-1].reading, before.handed[-1].reading)


def test_plain_arguments_of_children_count() -> None:
    def outer(factor: float) -> nn.Module:
        return Code(lambda s, x: s.scaled(x, factor=factor), scaled=Code(lambda s, x, factor: factor * x))

    response = respond(outer(0.5), torch.ones(2))["(root)", 0]
    assert [(h.where, h.passed) for h in response.handed][:2] == [("scaled input", "input"), ("scaled factor", "=0.5")]
    assert changed({("(root)", 0): respond(outer(0.7), torch.ones(2))["(root)", 0]}, {("(root)", 0): response}) == {
        "(root)"
    }


# --- which calls ------------------------------------------------------------------------------------------------------


def test_a_layer_called_alike_a_hundred_times_is_called_once() -> None:
    responses = respond(made("lstm", 0), ids(0))
    assert [index for layer, index in responses if layer == "cell"] == [0, 1]  # without a state, and with one


def test_a_call_with_another_shape_is_looked_at_too() -> None:
    twice = Code(lambda s, x: s.act(s.act(x)[:1] + s.act(x[:1])), act=nn.ReLU())
    responses = respond(twice, torch.ones(2, 4))
    assert [(k, r.recipes["input"]) for k, r in responses.items() if k[0] == "act"] == [
        (("act", 0), "2x4 const 1"),
        (("act", 1), "1x4 const 1"),
    ]


def test_only_the_layers_asked_for_are_called() -> None:
    model = two()
    found = isolate(model, lambda: model(torch.ones(2, 4)), IsolationOptions(layers=["b"]))
    assert list(found) == [("b", 0)]


# --- what code may do -------------------------------------------------------------------------------------------------


def test_code_that_writes_into_its_input_is_judged_by_what_it_leaves() -> None:
    def into(by: float) -> nn.Module:
        def forward(self: Any, x: torch.Tensor) -> None:
            x.mul_(by)

        return Code(forward)

    expected = respond(into(2.0), torch.randn(4))
    assert [handed.where for handed in expected["(root)", 0].handed] == ["input after"]
    assert changed(respond(into(3.0), torch.randn(4), like=expected), expected) == {"(root)"}


def test_what_a_layer_writes_into_its_buffers_is_part_of_its_response() -> None:
    expected = respond(nn.BatchNorm1d(4), torch.randn(8, 4))
    where = [h.where for h in expected["(root)", 0].handed]
    assert where == ["running_mean after", "running_var after", "num_batches_tracked after", "output"]
    actual = respond(nn.BatchNorm1d(4, momentum=0.2), torch.randn(8, 4), like=expected)
    assert changed(actual, expected) == {"(root)"}


def test_what_cannot_be_copied_is_the_reason() -> None:
    response = respond(Code(lambda s, x, lines: x + next(lines)), torch.ones(2), (n for n in (1, 2)))["(root)", 0]
    assert response.reason == "takes an object that cannot be copied (TypeError: cannot pickle 'generator' object)"


def test_an_interrupt_goes_through_and_leaves_the_model_as_it_was() -> None:
    class Interrupted(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Interrupted.calls += 1
            if Interrupted.calls == 2:
                raise KeyboardInterrupt
            return x

    model = nn.Sequential(nn.Linear(2, 2), Interrupted())
    before = [(id(p), p.clone()) for p in model.parameters()]
    with pytest.raises(KeyboardInterrupt):
        respond(model, torch.ones(1, 2))
    assert all(id(p) == i and torch.equal(p, was) for p, (i, was) in zip(model.parameters(), before, strict=True))
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_hides_no_code(reentrant: bool) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: self.a(x).sin() * 2, x, use_reentrant=reentrant)

    response = respond(Code(forward, a=nn.Linear(4, 4)), torch.randn(3, 4, requires_grad=True))["(root)", 0]
    assert [h.where for h in response.handed] == ["a input", "output"]
    assert (response.reason or "backward: RuntimeError").startswith("backward: ")
    assert (response.gradient is None) == reentrant


def test_atomic_layers_have_all_their_weights_made_up() -> None:
    def model() -> nn.Module:
        return nn.MultiheadAttention(8, 2, batch_first=True)

    x = torch.randn(2, 5, 8)
    a = respond(model(), x, x, x)["(root)", 0]
    assert {"in_proj_weight", "out_proj.weight", "out_proj.bias"} <= a.recipes.keys()
    other = model()
    nn.init.normal_(other.out_proj.weight)
    assert changed(respond(other, x, x, x, like={("(root)", 0): a}), {("(root)", 0): a}) == set()


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_a_compiled_model_is_looked_through() -> None:
    model = two()
    compiled: Any = torch.compile(model)
    assert changed(respond(compiled, torch.ones(2, 4)), respond(model, torch.ones(2, 4))) == set()


def test_a_layer_under_autocast_is_called_in_float32() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.body(x)

    model, x = Code(forward, body=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), torch.randn(2, 4)
    responses, plain = respond(model, x), respond(model.body, x)
    assert {r.reason for r in responses.values()} == {None}
    assert responses["body.1", 0].recipes["input"].startswith("2x4 ")
    assert responses["body.1", 0].handed == plain["1", 0].handed


# --- recipes ----------------------------------------------------------------------------------------------------------


def test_a_recipe_is_coarse_and_fits_its_own_tensor() -> None:
    for tensor, kind in (
        (torch.tensor([3.0, -4.0, 4.0]), "2^2"),
        (torch.tensor([0.0, 4.0, 4.0]), "2^2+"),
        (torch.tensor([0.1, 0.4]), "2^-2+ to 1"),
        (torch.tensor([-0.1, -4.0]), "2^2-"),
        (torch.tensor([3e30, -3e30]), "2^101"),
        (torch.tensor([1.0, -math.nan, -1.0]), "2^0"),
        (torch.zeros(3), "2^0"),
        (torch.full((3,), 1.23456), "const 1.23"),
        (torch.tensor(7.0), "2^3+"),
        (torch.tensor([0.0, 1.0, 1.0]), "0 or 1"),
        (torch.tensor([0.0, -math.inf]), "mask -inf"),
        (torch.tensor([0.0, torch.finfo(torch.float32).min]), "mask -3.40282347e+38"),
        (torch.tensor([1.0, -1.0], dtype=torch.complex64), "const 1"),
        (torch.tensor([True, False]), "bool"),
        (torch.tensor([True, True]), "true"),
        (torch.tensor([5, 999, 3]), "0..511"),
        (torch.tensor([0, 1, 0]), "0..1"),
        (torch.tensor([900, 999, 950]), "900..999"),
        (torch.arange(10), "0..9 sorted"),
        (torch.tensor([-100, 5, 77, -100]), "-100 or 0..63"),
        (torch.tensor([-3, 5, -1]), "-3..5"),
        (torch.tensor([2, 2]), "const 2"),
        (torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]), "const 1 with 0 first"),
        (torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]), "const 1 with 0 last"),
        (torch.tensor([[False, False, False], [True, True, False]]), "false with true first"),
        (torch.tensor([[5, 9, 62, 3, 40], [7, 8, 63, 1, 1]]), "0..63 with 1 last"),
        (torch.tensor([[5, 9, -100, -100], [7, 8, 30, 63]]), "0..63 with -100 last"),
        (torch.tensor([[0, 1, 1], [0, 0, 1]]), "0..1 sorted"),
        (torch.linspace(-1, 1, 64).view(2, 32), "2^-1*"),
    ):
        assert kind_of(tensor) == kind
        assert fits(kind, tensor.dtype)
        made = synthetic(kind, tensor.shape, "input", tensor.dtype)
        assert (made.shape, made.dtype) == (tensor.shape, tensor.dtype)


def test_no_row_of_a_mask_is_empty() -> None:
    for kind, seen in (("mask -inf", 0.0), ("0 or 1", 1.0)):
        mask = synthetic(kind, (50, 4), "mask", torch.float32)
        assert bool((mask == seen).any(-1).all())
        assert mask.unique().numel() == 2


def test_recipes_of_other_responses_are_used_where_they_fit() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    recipes = {
        ("0", 0): {"input": "2 0..63", "weight": "2^3"},
        ("1", 0): {"input": "2x4 2^9", "weight": "nonsense", "bias": "0..3"},
    }
    found = isolate(model, lambda: model(torch.tensor([1, 8])), IsolationOptions(recipes=recipes))
    assert dict(found["0", 0].recipes) == {"weight": "2^3", "input": "2 0..7"}
    assert found["1", 0].recipes["input"] == "2x4 2^9"
    assert found["1", 0].recipes["weight"].startswith("2^-")


# --- noise ------------------------------------------------------------------------------------------------------------


def test_noise_is_what_a_response_moves_by_under_rounding() -> None:
    model = made("gpt2", 0)
    inputs = MODELS["gpt2"][1](0)
    repeats = [
        isolate(model, lambda: model(**inputs), perturb=Perturbation(f"repeat {i}", far=False).in_place)
        for i in range(2)
    ]
    measured = noisy(isolate(model, lambda: model(**inputs)), repeats)
    noise = [h.reading.noise for r in measured.values() for h in r.handed if h.reading is not None]
    assert all(n is not None and n < 1e-5 for n in noise)
    assert max(n for n in noise if n is not None) > 1e-9


def test_masks_and_integers_are_not_perturbed() -> None:
    moved: list[str] = []

    def perturb(tensor: torch.Tensor, name: str, terms: int) -> torch.Tensor:
        moved.append(name)
        return tensor

    model = Code(lambda s, x, mask, index: (x + mask)[index])
    isolate(model, lambda: model(torch.randn(2), torch.tensor([0.0, -math.inf]), torch.tensor([1])), perturb=perturb)
    assert moved == ["input[0]"]


class Growing(nn.Module):
    """Writes to its weight in each call, as some quantizers do."""

    def __init__(self, *, by_data: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.5))
        self.inside = nn.Identity()
        self.by_data = by_data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            (self.weight.data if self.by_data else self.weight).mul_(2)
        return self.inside(x) * self.weight


@pytest.mark.parametrize("by_data", [False, True])
def test_what_a_call_writes_to_its_weights_does_not_reach_a_layer_that_is_alike(by_data: bool) -> None:
    model = nn.Sequential(Growing(by_data=by_data), Growing(by_data=by_data))
    x = torch.ones(2, 4)
    both = respond(model, x)
    second = isolate(model, lambda: model(x), IsolationOptions(only={"1"}, gradient=True))
    assert not changed({("1", 0): both["1", 0]}, second)


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (nn.Linear(64, 32), torch.randn(8, 64)),
        (nn.Conv2d(16, 32, 3), torch.randn(2, 16, 8, 8)),
        (nn.Embedding(100, 32), torch.tensor([3, 99, 0, 41])),
        (nn.ReLU(), torch.randn(8, 64)),
        (nn.MaxPool2d(3, stride=2), torch.randn(2, 16, 8, 8)),
        (nn.Sequential(nn.Identity()), torch.randn(8, 64)),
    ],
    ids=["linear", "convolution", "embedding", "relu", "pool", "container"],
)
def test_the_noise_that_is_known_of_a_layer_is_the_measured_one(layer: nn.Module, inputs: torch.Tensor) -> None:
    moves = [Perturbation(f"repeat {i}", far=far).in_place for far in (False, True) for i in range(2)]
    with traced(layer, lambda: layer(inputs.clone()), IsolationOptions(gradient=True), repeats=True) as alone:
        taken = [alone(), *map(alone, moves)]
    key = ("(root)", 0)
    known = with_known_noise(taken[0][key], layer)
    assert known is not None
    near, far = noisy(taken[0], taken[1:3])[key], noisy(taken[0], taken[3:])[key]
    pairs = [(h.reading, m.reading) for h, m in zip(known.handed, near.handed, strict=True) if h.reading]
    for now, then in [*pairs, (known.gradient, far.gradient)]:
        assert now is not None
        assert then is not None
        assert now.noise is not None
        assert (then.noise or 0.0) <= 1.5 * now.noise
        assert now.noise <= (3 * (then.noise or 0.0) if isinstance(layer, nn.Linear | nn.Conv2d) else ROUNDING)


class Whitened(nn.Identity):
    """Changes nothing but gradients, by what it gets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Penalized.apply(x)  # type: ignore[no-untyped-call]
        return y


class Penalized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] + ctx.saved_tensors[0]


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Linear(64, 1), 64),
        (Whitened(), 64),
        (nn.GELU(), 64),
        (nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), 64),
    ],
    ids=["one output", "gradients", "not linear", "parametrized"],
)
def test_the_noise_of_other_layers_is_measured(layer: nn.Module, size: int) -> None:
    responses = respond(layer, torch.randn(1, size))
    assert with_known_noise(responses["(root)", 0], layer) is None


def test_where_float32_is_rounded_the_noise_of_products_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    layer = nn.Linear(64, 64)
    response = respond(layer, torch.randn(8, 64))["(root)", 0]
    assert with_known_noise(response, layer) is not None
    for precision in (lambda: "medium", refused):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", precision)
        assert with_known_noise(response, layer) is None


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_own_code_runs_once_for_the_notes_and_once_alone_in_each_mode() -> None:
    calls: list[str] = []

    class Counted(nn.Module):
        def __init__(self, *children: nn.Module) -> None:
            super().__init__()
            self.inner = nn.ModuleList(children)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append("x" * len(self.inner))
            for child in self.inner:
                x = F.relu(child(x))
            return x

    respond(Counted(Counted(), Counted(Counted())), torch.ones(2))
    assert sorted(calls) == sorted(["xx", "", "x", ""] * 3)


class CallsLayers(nn.Module):
    """Its code can do nothing but call layers. They say how it depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) + x)


class AsksMode(CallsLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * 2 if self.training else self.first(x)


class AsksTable(CallsLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * 2 if self.__dict__["training"] else self.first(x)


class AsksByProperty(CallsLayers):
    @property
    def factor(self) -> int:
        return 2 if self.training else 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.factor


def doubled(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if module.training else x


class AsksByFunction(CallsLayers):
    """The function has the name of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.doubled = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return doubled(self, x)


class AsksInCall(CallsLayers):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().__call__(x * 2 if self.training else x)  # type: ignore[no-any-return]


class AsksInIterator(nn.Sequential):
    def __iter__(self) -> Any:
        return iter([layer for layer in self._modules.values() if self.training])


@pytest.mark.parametrize("kind", [AsksMode, AsksTable, AsksByProperty, AsksByFunction, AsksInCall])
def test_a_block_that_depends_on_its_mode_is_called_in_both(kind: type[CallsLayers]) -> None:
    responses = respond(nn.Sequential(kind()), torch.ones(2, 4))
    assert [responses[name, 0].mode_matters for name in ("0", "(root)")] == [True, False]


def test_a_block_that_only_calls_layers_is_called_in_one_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    alone: list[bool] = []
    original = calls._IsolatedCall.run

    def counted(self: Any) -> IsolatedResponse:
        alone.append(self.call.module.training)
        return original(self)

    monkeypatch.setattr(calls._IsolatedCall, "run", counted)
    found = respond(nn.Sequential(CallsLayers(), AsksInIterator(nn.Tanh())), torch.ones(2, 4))
    # The root, the block, its two layers; the other container and its layer in both modes.
    assert alone == [True] * 4 + [True, False] * 2
    assert [found[name, 0].mode_matters for name in ("0", "1")] == [False, True]


def test_tokens_and_their_mask_are_padded_alike() -> None:
    ids = torch.tensor([[5, 9, 62, 3], [1, 1, 7, 8]])
    tokens, mask = (synthetic(kind_of(x), (3, 12), "x", x.dtype) for x in (ids, (ids != 1).long()))
    assert torch.equal(tokens[:, :6] == 1, mask[:, :6] == 0)
    assert mask.sum(-1).tolist() == [12, 9, 6]


def padded(pad: int) -> nn.Module:
    """Return a model that finds its padding by the token, in a vocabulary where chance hardly ever meets it."""
    layers = {"embed": nn.Embedding(5000, 4), "attn": nn.Identity()}
    return Code(lambda s, ids: s.attn(s.embed(ids) * (ids != pad)[..., None]).sum(1), **layers)


def test_padding_that_is_not_found_shows_alone() -> None:
    ids = torch.randint(10, 5000, (2, 12), generator=torch.Generator().manual_seed(0))
    ids[1, :5] = 3
    assert changed(respond(padded(4), ids), respond(padded(3), ids)) == {"(root)"}


def test_a_cap_on_scores_shows_alone() -> None:
    def capped(cap: float | None) -> nn.Module:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            scores = self.q(x) @ self.k(x).transpose(-1, -2) / 4
            return (scores if cap is None else cap * torch.tanh(scores / cap)).softmax(-1)

        return Code(forward, q=nn.Linear(16, 16), k=nn.Linear(16, 16))

    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0)) / 8
    before = respond(capped(50.0), x)
    assert changed(respond(capped(None), x, like=before), before) == {"(root)"}


def handing(inner: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Return a model that calls a layer with these arguments besides its input."""
    return Code(lambda s, x: s.inner(x, *args, **kwargs), inner=inner)


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, twice: bool = False, noted: bool = False, **others: Any) -> torch.Tensor:
        if others:
            raise TypeError("others")
        return self.fc(x + x if twice else x)


def response_of_inner(model: nn.Module, like: Any = None, **options: bool) -> IsolatedResponse:
    with ModelProbe(device="cpu") as probe:
        record = probe.run(model, torch.ones(2, 4), loss="random")
        record = record.live_run.isolated(record, like=like, **options)
    response = record.layers["inner"].calls[0].response
    assert response is not None
    return response


def recorded_alone(model: nn.Module) -> Any:
    with ModelProbe(device="cpu") as probe:
        record = probe.run(model, torch.ones(2, 4), loss="random")
        return record.live_run.isolated(record)


@pytest.mark.parametrize(("argument", "matters"), [("twice", True), ("noted", False)])
def test_a_layer_answers_the_arguments_of_the_expected_call(argument: str, matters: bool) -> None:
    before = recorded_alone(handing(Taking(), **{argument: True}))
    response = response_of_inner(handing(Taking()), like=before)
    assert response == before.layers["inner"].calls[0].response
    assert response.arguments_matter is matters


def test_a_response_to_write_is_one_to_the_layer_s_own_arguments() -> None:
    before, model = recorded_alone(handing(Taking(), twice=True)), handing(Taking())
    with ModelProbe(device="cpu") as probe:
        record = probe.run(model, torch.ones(2, 4), loss="random")
        written, own = (record.live_run.measured(record, like)["inner"].calls[0].response for like in (before, record))
    assert written == own


def test_a_layer_that_raises_for_arguments_of_before_answers_its_own() -> None:
    before, model = recorded_alone(handing(Taking())), handing(Taking())
    call = before.layers["inner"].calls[0]
    object.__setattr__(call, "arguments", {"legacy": True})
    response = response_of_inner(model, like=before)
    assert (response.reason, response.arguments_matter) == (None, None)


# --- fewer samples ----------------------------------------------------------------------------------------------------

IMAGES = torch.linspace(-1, 1, 80 * 4 * 9 * 12).view(80, 4, 9, 12)


def size_of_input(responses: Responses) -> str:
    return responses["0", 0].recipes["input"].partition(" ")[0]


@pytest.mark.parametrize(
    ("layer", "x", "size"),
    [
        (nn.Conv2d(4, 8, 3), IMAGES, "2x4x9x12"),
        (nn.BatchNorm2d(4), IMAGES[..., :3, :2], "11x4x3x2"),
        (nn.BatchNorm2d(4), IMAGES[..., :1, :1], "64x4x1x1"),
        (nn.Linear(12, 8), IMAGES[:, 0], "6x9x12"),
        (nn.GELU(), IMAGES, "2x4x9x12"),
        (nn.LayerNorm(12), IMAGES, "80x4x9x12"),  # it may be over all samples
        (nn.Conv2d(80, 8, 3), IMAGES[:, 0], "80x9x12"),  # these are channels
        (nn.ReLU(), IMAGES[:, 0, 0], "80x12"),  # these may be something else
        (nn.ReLU(), IMAGES[:1].expand(80, 4, 9, 12), "80x4x9x12"),  # it is one sample already
    ],
)
def test_a_few_samples_are_enough_for_a_layer_of_torch(layer: nn.Module, x: torch.Tensor, size: str) -> None:
    assert size_of_input(respond(nn.Sequential(layer), x)) == size
    layer.register_forward_hook(plus_one)  # which may depend on how many they are
    assert size_of_input(respond(nn.Sequential(layer), x)) == "x".join(map(str, x.shape))


def test_there_are_as_many_samples_as_in_the_response_before() -> None:
    before = respond(nn.Sequential(nn.BatchNorm2d(4)), IMAGES[..., :3, :2])
    assert size_of_input(respond(nn.Sequential(nn.BatchNorm2d(4)), IMAGES[:12, ..., :3, :2], like=before)) == "11x4x3x2"
    assert size_of_input(respond(nn.Sequential(nn.BatchNorm2d(4)), IMAGES[:9, ..., :3, :2], like=before)) == "9x4x3x2"
    assert size_of_input(respond(nn.Sequential(nn.BatchNorm2d(4)), IMAGES, like=before)) == "2x4x9x12"
    assert size_of_input(respond(nn.Sequential(nn.Conv2d(4, 4, 1)), IMAGES[..., :3, :2], like=before)) == "11x4x3x2"


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (1, 0, 2, 3)])
def test_fewer_samples_have_the_layout_of_the_run(monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]) -> None:
    inputs = []
    conv2d = F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda x, *rest: inputs.append(x) or conv2d(x, *rest))  # type: ignore[func-returns-value]
    x = IMAGES.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])
    respond(nn.Sequential(nn.Conv2d(4, 8, 3)), x)
    ran, alone = inputs
    assert [len(ran), len(alone)] == [80, 2]
    assert sorted(range(4), key=ran.stride().__getitem__) == sorted(range(4), key=alone.stride().__getitem__)


@pytest.mark.parametrize("watched", [False, True], ids=["run", "watch"])
def test_code_that_replaced_a_layer_takes_as_many_samples_as_that(watched: bool) -> None:
    class Shifted(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x + torch.arange(12.0))

    def response(like: Record | None = None) -> tuple[Record, Any]:
        if watched:
            with probe.watch(model) as watch:
                model(IMAGES)
        record = watch.record if watched else probe.run(model, IMAGES)
        record = record.live_run.isolated(record, like=like)
        return record, record.layers["0"].calls[0].response

    model, probe = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()), ModelProbe()
    record, before = response()
    model[0].__class__ = Shifted
    _, after = response(record)
    assert before.recipes["input"].startswith("2x4x9x12 ")
    assert before.recipes == after.recipes
    assert before.handed != after.handed


# --- layers that compute the same -------------------------------------------------------------------------------------


class Counted(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        Counted.calls += 1
        return super().forward(x)


def test_of_layers_that_compute_the_same_one_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "calls", 0)
    model = nn.Sequential(Counted(8, 8), nn.LayerNorm(8), Counted(8, 8), nn.LayerNorm(8), Counted(8, 8))
    nn.init.constant_(model[4].weight, 9.0)  # not of the numbers that the others have
    responses = respond(model, torch.randn(4, 8))
    # In the run, and alone in each mode: the first without a mean of zero, the second, the third.
    assert Counted.calls == 3 + 2 * 3
    assert responses["1", 0] == responses["3", 0]


def test_responses_are_those_of_each_layer_called_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        block = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.LayerNorm(8)]
        return nn.Sequential(*(copy.deepcopy(layer) for _ in range(3) for layer in block))

    once = respond(model(), torch.ones(4, 8))
    monkeypatch.setattr("pytest_modelprobe.runs.isolation.calls.likeness", lambda *_: None)
    assert respond(model(), torch.ones(4, 8)) == once


class Shifted(nn.Module):
    shift = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self._buffers.get("scale", 2) + self.shift


def plus_one(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    return output + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "shift", 1),
        lambda layer: setattr(layer, "shift", torch.ones(8)),
        lambda layer: layer.register_buffer("scale", torch.full((8,), 3.0)),
        lambda layer: setattr(layer, "forward", lambda x: x * 3),
        lambda layer: setattr(layer, "forward", MethodType(lambda self, x: x * 3, layer)),
        lambda layer: layer.register_forward_hook(plus_one),
        lambda layer: setattr(layer, "__class__", type("Other", (Shifted,), {"shift": 1})),
    ],
    ids=["number", "tensor", "buffer", "function", "method", "hook", "class"],
)
def test_a_layer_that_computes_otherwise_has_a_response_of_its_own(change: Callable[[nn.Module], object]) -> None:
    model = nn.Sequential(Shifted(), nn.LayerNorm(8), Shifted(), nn.LayerNorm(8), Shifted())
    change(model[4])
    responses = respond(model, torch.randn(4, 8))
    first, second, third = (responses[name, 0] for name in ("0", "2", "4"))
    assert first.handed[0].reading == second.handed[0].reading
    assert second.handed[0].reading != third.handed[0].reading


def writing(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.child.table += 1
    return self.child(x)


def test_what_a_layer_writes_to_a_buffer_inside_is_part_of_its_response_alone() -> None:
    def alone(model: nn.Module, only: list[str] | None = None) -> Responses:
        return isolate(model, lambda: model(torch.linspace(0, 1, 16).view(2, 8)), IsolationOptions(only=only))

    model = Code(writing, child=Code(lambda s, x: x * s.table, table=torch.ones(8)))
    responses = alone(model)
    assert [h.where for h in responses["(root)", 0].handed] == ["child input", "child.table after", "output"]
    assert responses["child", 0] == alone(model, only=["child"])["child", 0]
    assert [h.passed for h in responses["child", 0].handed] == ["input"]  # the table is of ones, as before the run


class Averages(nn.Module):
    """Keeps averages of its inputs, as a vector quantizer does of the vectors that are nearest to each of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.zeros(8))
        self.register_buffer("replaced", torch.zeros(8))
        self.tensor, self.number = torch.zeros(8), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean(0)
        self.written.lerp_(mean, 0.1)
        self.replaced = self.replaced.lerp(mean, 0.1)
        self.tensor.lerp_(mean, 0.1)
        self.number += mean.sum().item()
        return x + self.written + self.replaced + self.tensor + self.number


def test_averages_of_what_comes_from_upstream_do_not_count() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), Averages()), torch.randn(4, 8)
    expected = respond(model, x)
    nn.init.normal_(model[0].weight)
    actual = respond(model, x, like=expected)
    assert actual == expected
    assert [h.where for h in actual["1", 0].handed] == ["written after", "replaced after", "output"]


# --- the tensors of the expected call -----------------------------------------------------------------------------


class Biased(nn.Module):
    def __init__(self, *, used: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self._used = [used]

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        x = x if bias is None or not self._used[0] else x + bias
        return self.fc(x * scale)


BIAS = torch.arange(8.0).view(2, 4)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (((), {}), ((BIAS,), {})),
        (((), {"bias": BIAS}), ((), {})),
        (((None, 2.0), {}), ((None, 3.0), {})),
    ],
    ids=["came by position", "went by keyword", "a number"],
)
@pytest.mark.parametrize("used", [True, False], ids=["used", "not used"])
def test_a_layer_answers_the_tensors_of_the_expected_call(then: Any, now: Any, used: bool) -> None:
    before = recorded_alone(handing(Biased(used=used), *then[0], **then[1]))
    with ModelProbe(device="cpu") as probe:
        model = handing(Biased(used=used), *now[0], **now[1])
        record = probe.run(model, torch.ones(2, 4), loss="random")
        found = compare(record, before)
        record = record.live_run.isolated(record, like=found.expected, names=found.names_before)
    response = record.layers["inner"].calls[0].response
    expected = found.expected.layers["inner"].calls[0].response
    assert [h.reading for h in response.handed] == [h.reading for h in expected.handed]
    assert response.arguments_matter is (used or len(now[0]) == 2)


def test_a_layer_that_needs_a_tensor_answers_its_own() -> None:
    before = recorded_alone(handing(nn.Linear(4, 4)))
    response = response_of_inner(handing(Code(lambda s, x, bias: x + bias), nn.Parameter(BIAS)), like=before)
    assert (response.reason, response.arguments_matter) == (None, None)
