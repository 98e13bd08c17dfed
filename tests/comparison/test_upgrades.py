"""What a snapshot says of an upgrade, in the small: changes that releases of public libraries made, and no others.

Each model is written as it was and as it is, with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, files
from pytest_modelprobe.comparison import Diagnosis, compare, diagnose
from pytest_modelprobe.comparison.text import cause_text, first_line
from pytest_modelprobe.record import Record

PROBE = ModelProbe()


def recorded(model: nn.Module, *inputs: Any, **run: Any) -> Record:
    return PROBE.run(model.eval(), *inputs, **{"loss": "random", **run})


def upgraded(old: nn.Module, new: nn.Module, *inputs: Tensor, keys: Mapping[str, str] | None = None) -> Diagnosis:
    """Return the diagnosis of a model that has the weights of another, under other keys: new → old."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in old.state_dict().values():
            if tensor.is_floating_point():
                tensor += 0.1 * torch.rand(tensor.shape, generator=draw)
    weights = old.state_dict()
    new.load_state_dict({key: weights[(keys or {}).get(key, key)] for key in new.state_dict()})
    record = recorded(old, *inputs)
    expected = files.decode(*files.encode(record.live_run.measured(record, record)), where="old").record
    actual = recorded(new, *inputs)
    found = compare(actual, expected)
    if not found.same:
        actual = actual.live_run.isolated(actual, like=found.expected, names=found.names_before)
        found = compare(actual, expected)
    return diagnose(found)


def made(kind: type[nn.Module], forward: Callable[..., Any], **attributes: Any) -> nn.Module:
    """Return a module of a class with another ``forward``, under the name of the class."""
    module = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


# --- a change of a call, and of the code that is called -----------------------------------------------------------


class Variance(nn.Module):
    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        size = int(index.max()) + 1
        mean, square = (torch.zeros(size, x.shape[1]).index_add(0, index, y) for y in (x, x * x))
        count = torch.zeros(size, 1).index_add(0, index, torch.ones(len(x), 1))
        return square / count - (mean / count) ** 2


class Deviation(nn.Module):
    def __init__(self, *, floor: float, keyword: bool) -> None:
        super().__init__()
        self.variance = Variance()
        self._written = [floor, keyword]

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        floor, keyword = self._written
        variance = self.variance(x, index=index) if keyword else self.variance(x, index)
        return (variance.relu() + floor).sqrt()


class Convolution(nn.Module):
    def __init__(self, *, floor: float = 1e-5, keyword: bool = False) -> None:
        super().__init__()
        self.aggregate, self.lin = Deviation(floor=floor, keyword=keyword), nn.Linear(4, 4)
        self._keyword = [keyword]

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return self.lin(self.aggregate(x, index=index) if self._keyword[0] else self.aggregate(x, index))


GRAPH = PROBE.randn(6, 4), torch.tensor([0, 0, 0, 1, 1, 2])


def test_another_floor_is_named_where_arguments_are_given_by_keyword_now() -> None:
    found = upgraded(Convolution(), Convolution(floor=1e-2, keyword=True), *GRAPH)
    assert first_line(found).startswith("aggregate: own code changed after variance: by ")
    assert [cause_text(cause) for cause in found.causes] == ["aggregate: own code changed after variance"]


def test_arguments_by_keyword_alone_fail_nothing() -> None:
    found = upgraded(Convolution(), Convolution(keyword=True), *GRAPH)
    assert found.same
    assert "aggregate: input[1] renamed to index" in map(cause_text, found.notes)
    assert first_line(found).startswith("same function; written otherwise in ")


class Norm(nn.Module):
    def forward(self, x: Tensor, batch: Tensor | None = None) -> Tensor:
        if batch is None:
            return x - x.mean(0)
        return x - torch.stack([x[batch == n].mean(0) for n in range(3)])[batch]


class Stacked(nn.Module):
    def __init__(self, *, gives_batch: bool) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), Norm()
        self._gives_batch = [gives_batch]

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        return self.norm(self.lin(x), batch) if self._gives_batch[0] else self.norm(self.lin(x))


def test_a_tensor_that_a_child_gets_no_longer_is_the_doing_of_who_gave_it() -> None:
    found = upgraded(Stacked(gives_batch=True), Stacked(gives_batch=False), *GRAPH)
    assert first_line(found).startswith("(root): own code no longer gives norm input[1]: output of norm changed by ")
    assert not found.possible


# --- rows without a number, and what was measured -----------------------------------------------------------------


class Patches(nn.Module):
    """Norms the patches in the shape of an image, or in one row."""

    def __init__(self, *, rows: bool, eps: float = 1e-5) -> None:
        super().__init__()
        self.proj, self.norm = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8, eps=eps)
        self._rows = [rows]

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x).permute(0, 2, 3, 1)
        return self.norm(x.flatten(1, 2)) if self._rows[0] else self.norm(x).flatten(1, 2)


IMAGE = PROBE.randn(2, 3, 16, 16)


def test_an_epsilon_is_named_before_the_shape_of_what_is_normed() -> None:
    found = upgraded(Patches(rows=True), Patches(rows=False, eps=1e-2), IMAGE)
    assert first_line(found).startswith("norm.eps 1e-05 → 0.01: its output changed by ")


def test_another_shape_of_the_same_elements_fails_nothing() -> None:
    assert upgraded(Patches(rows=True), Patches(rows=False), IMAGE).same


class Quantizing(nn.Module):
    def __init__(self, *, shared: bool, loss: bool) -> None:
        super().__init__()
        self.act = nn.SiLU()
        self.down, self.up = nn.Linear(4, 4), nn.Linear(4, 4)
        self.down_act = self.act if shared else nn.SiLU()
        self._loss = [loss]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.up(self.act(self.down_act(self.down(x))))
        return {"sample": out, "commit_loss": (out - x).square().mean()} if self._loss[0] else {"sample": out}


def test_a_new_output_is_named_before_an_activation_that_is_an_object_of_its_own() -> None:
    found = upgraded(Quantizing(shared=True, loss=False), Quantizing(shared=False, loss=True), GRAPH[0])
    assert first_line(found).startswith(("(root): output.commit_loss added", "output unchanged; structure differs"))
    assert cause_text(found.causes[0]) == "(root): output.commit_loss added"


def test_an_activation_that_is_an_object_of_its_own_fails_nothing() -> None:
    assert upgraded(Quantizing(shared=True, loss=False), Quantizing(shared=False, loss=False), GRAPH[0]).same


class Attention(nn.Module):
    def __init__(self, cap: float | None = None) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)
        self._cap = [cap]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.q(x) @ x.transpose(-1, -2)
        cap = self._cap[0]
        scores = scores if cap is None else cap * (scores / cap).tanh()
        allowed = mask if mask.dtype == torch.bool else mask == 0
        return scores.masked_fill(~allowed, -1e9).softmax(-1) @ x


class Block(nn.Module):
    """Scales embeddings itself or lets them scale; makes a mask of bools or of floats."""

    def __init__(self, embed: nn.Module, *, scaled: bool, floats: bool, hidden: bool = True, cap: Any = None) -> None:
        super().__init__()
        self.embed, self.attn, self.head = embed, Attention(cap), nn.Linear(8, 8)
        self._written = [scaled, floats, hidden]

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        scaled, floats, hidden = self._written
        x = self.embed(ids) if scaled else self.embed(ids) * 4.0
        mask = torch.ones(1, 6, 6, dtype=torch.bool).tril()
        mask = torch.zeros(1, 6, 6).masked_fill(~mask, torch.finfo().min) if floats else mask
        out = self.attn(x, mask)
        return {"logits": self.head(out), "hidden": out} if hidden else {"logits": self.head(out)}


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 4.0


IDS = PROBE.randint(0, 20, (2, 6))


def block(**written: Any) -> Block:
    return Block(nn.Embedding(20, 8), **{"scaled": False, "floats": False, **written})


def test_a_mask_in_another_form_fails_nothing() -> None:
    assert upgraded(block(), block(floats=True), IDS).same


def test_code_is_named_before_a_factor_that_moved_and_the_form_of_a_mask() -> None:
    scaling = Block(Scaled(20, 8), scaled=True, floats=True, cap=1.0)
    found = upgraded(block(), scaling, IDS)
    assert first_line(found).startswith("attn: own code changed after q: by ")


def test_an_output_that_was_removed_is_named_before_a_factor_that_moved() -> None:
    found = upgraded(block(), Block(Scaled(20, 8), scaled=True, floats=False, hidden=False), IDS)
    assert cause_text(found.causes[0]) == "(root): output.hidden removed"


def test_a_factor_that_moved_is_told_as_structure() -> None:
    found = upgraded(block(), Block(Scaled(20, 8), scaled=True, floats=False), IDS)
    assert first_line(found).startswith("output unchanged; ")


# --- layers -------------------------------------------------------------------------------------------------------


class Head(nn.Module):
    def __init__(self, act: nn.Module, **more: nn.Module) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), act
        for name, module in more.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
        return x


@pytest.mark.parametrize("more", [nn.Dropout(0.0), nn.ModuleList()], ids=["p=0", "empty"])
def test_a_layer_that_computes_nothing_fails_nothing(more: nn.Module) -> None:
    old, new = Head(nn.ReLU()), Head(nn.ReLU(), more=more)
    if isinstance(more, nn.ModuleList):
        new.forward = lambda x: new.act(new.fc(x))  # type: ignore[method-assign]
    assert upgraded(old, new, GRAPH[0]).same
    again = Head(nn.ReLU())
    assert upgraded(new, again, GRAPH[0]).same


def test_dropout_that_drops_is_an_added_layer_also_in_evaluation() -> None:
    found = upgraded(Head(nn.ReLU()), Head(nn.ReLU(), more=nn.Dropout(0.1)), GRAPH[0])
    assert first_line(found) == "output unchanged; structure differs in 1 place: more added: Dropout"


def test_a_layer_that_computes_nothing_and_holds_weights_is_told() -> None:
    more = nn.Identity()
    more.scale = nn.Parameter(torch.ones(4))
    found = upgraded(Head(nn.ReLU()), Head(nn.ReLU(), more=more), GRAPH[0], keys={"more.scale": "fc.bias"})
    assert first_line(found) == "output unchanged; structure differs in 1 place: more added: Identity"


class Spare(nn.Module):
    """Has a layer that it never calls."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.fc, self.spare = nn.Linear(4, 4), nn.Dropout(chance)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def test_an_attribute_of_a_layer_that_is_never_called_is_told() -> None:
    found = upgraded(Spare(0.1), Spare(0.2), GRAPH[0])
    assert first_line(found) == "output unchanged; structure differs in 1 place: spare.p 0.1 → 0.2"


class Forked(nn.Module):
    """Hands the same numbers to two layers, in one tensor or in two."""

    def __init__(self, *, clones: bool) -> None:
        super().__init__()
        self.fc, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))
        self._clones = [clones]

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        other = x.clone() if self._clones[0] else x
        return self.left(x) + self.right(other)


def test_another_tensor_of_the_same_numbers_fails_nothing() -> None:
    assert upgraded(Forked(clones=False), Forked(clones=True), GRAPH[0]).same


def test_a_buffer_in_no_checkpoint_fails_nothing_and_one_in_it_does() -> None:
    new = Head(nn.ReLU())
    new.register_buffer("table", torch.ones(3), persistent=False)
    assert upgraded(Head(nn.ReLU()), new, GRAPH[0]).same
    kept = Head(nn.ReLU())
    kept.register_buffer("table", torch.ones(3))
    old = Head(nn.ReLU())
    old.load_state_dict(old.state_dict())
    found = diagnose(compare(recorded(kept, GRAPH[0]), recorded(old, GRAPH[0])))
    assert "table added: (3,) float32" in map(cause_text, found.causes)


def test_a_buffer_in_the_checkpoint_fails_also_beside_one_that_is_in_none() -> None:
    old, new = Head(nn.ReLU()), Head(nn.ReLU())
    for head in (old, new):
        head.register_buffer("positions", torch.ones(3), persistent=False)
    new.load_state_dict(old.state_dict())
    new.register_buffer("table", torch.ones(3))
    found = diagnose(compare(recorded(new, GRAPH[0]), recorded(old, GRAPH[0])))
    assert [cause_text(cause) for cause in found.causes] == ["table added: (3,) float32"]


class Flat(nn.Module):
    """Two stages of an attention and a feed-forward layer, in one list or each in a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Named(8) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Named(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.m = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.m(x).tanh()


class Staged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            for layer in stage:
                x = x + layer(x).tanh()
        return x


def test_layers_in_other_containers_are_found_by_their_weights() -> None:
    keys = {
        f"stages.{i}.{j}.{name}": f"blocks.{2 * i + j}.m.{name}"
        for i in range(2)
        for j in range(2)
        for name in ("weight", "bias")
    }
    found = upgraded(Flat(), Staged(), PROBE.randn(2, 8), keys=keys)
    assert not [cause for cause in found.causes if cause.kind in ("weights", "computation") and cause.change]
    assert found.unchanged


class Row(nn.Module):
    def __init__(self, name: str, count: int) -> None:
        super().__init__()
        self.add_module(name, nn.Sequential(*(nn.Linear(8, 8) for _ in range(count))))

    def forward(self, x: Tensor) -> Tensor:
        (layers,) = self.children()
        for layer in layers:
            x = x + layer(x).tanh()
        return x


def test_layers_that_moved_by_one_are_found_by_their_weights() -> None:
    old, new = Row("blocks", 3), Row("stages", 4)
    with torch.no_grad():
        for i, layer in enumerate(old.blocks):
            new.stages[i + 1].load_state_dict(layer.state_dict())
    expected, x = recorded(old, PROBE.randn(2, 8)), PROBE.randn(2, 8)
    found = diagnose(compare(recorded(new, x), expected))
    assert not [cause for cause in found.causes if cause.kind == "weights"]
    assert "stages.0 added: Linear" in map(cause_text, found.causes)


# --- arguments ----------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        outputs: bool | None = None,
        dropout: bool = True,
        rate: float = 0.5,
    ) -> Any:
        x = x if mask is None else x * mask
        x = nn.functional.dropout(self.fc(x), rate, self.training and dropout)
        return (x, x) if outputs else x


class Giving(nn.Module):
    """Hands on what it is told to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.layer = Layer()
        self._given = [(args, kwargs)]

    def forward(self, x: Tensor) -> Tensor:
        args, kwargs = self._given[0]
        return self.layer(x, *args, **kwargs)


def test_none_that_is_false_now_fails_nothing() -> None:
    assert upgraded(Giving(None, None), Giving(None, False), GRAPH[0]).same


def test_a_mask_that_is_dropped_is_named() -> None:
    found = upgraded(Giving(torch.tensor([1.0, 1, 0, 1, 1, 0])[:, None]), Giving(), GRAPH[0])
    assert not found.same
    assert "(root): own code no longer gives layer input[1]" in first_line(found)


def test_a_mask_that_is_dropped_and_masked_nothing_is_a_note() -> None:
    found = upgraded(Giving(torch.ones(6, 1)), Giving(), GRAPH[0])
    assert found.same
    assert "(root): own code no longer gives layer input[1]" in map(cause_text, found.notes)


def test_a_flag_that_turns_off_dropout_is_named_also_in_evaluation() -> None:
    found = upgraded(Giving(dropout=True), Giving(dropout=False), GRAPH[0])
    assert not found.same
    assert "(root): own code gives layer dropout False, not True" in first_line(found)


def test_a_rate_of_dropout_that_is_not_the_default_is_named_also_in_evaluation() -> None:
    found = upgraded(Giving(rate=0.9), Giving(), GRAPH[0])
    assert not found.same
    assert "(root): own code no longer gives layer rate" in first_line(found)


def test_an_argument_that_has_its_default_fails_nothing() -> None:
    assert upgraded(Giving(dropout=True), Giving(), GRAPH[0]).same


class Weighing(nn.Module):
    """Gives out its weights too, which nobody uses; with or without their graph."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4)
        self._detached = [detached]

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        weights = (self.q(x) @ x.T).masked_fill(mask, -1e9).softmax(-1)
        return weights @ x, weights.detach() if self._detached[0] else weights


class Masking(nn.Module):
    """Hands on a mask of one row, or the same for each query."""

    def __init__(self, *, expanded: bool, detached: bool = False) -> None:
        super().__init__()
        self.attn = Weighing(detached=detached)
        self._expanded = [expanded]

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(len(x))[None] > 3
        return self.attn(x, mask.expand(len(x), len(x)) if self._expanded[0] else mask)[0]


def test_a_mask_that_is_expanded_earlier_fails_nothing() -> None:
    assert upgraded(Masking(expanded=False), Masking(expanded=True), GRAPH[0]).same


def test_an_output_inside_without_its_graph_fails_nothing_where_all_gradients_are_the_same() -> None:
    found = upgraded(Masking(expanded=False), Masking(expanded=False, detached=True), GRAPH[0])
    assert found.same
    assert [cause_text(note) for note in found.notes] == ["attn: no gradient any more for output[1]"]


# --- the same function, in two more forms of transformers 5 ---------------------------------------------------------


class LearnedPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 4))

    def forward(self, like: Tensor) -> Tensor:
        return self.weight[: like.shape[1]]


class Embedded(nn.Module):
    """Bart's encoder takes ids, and embeds them with what the model has."""

    def __init__(self, *, own: bool = False, positions_of_ids: bool = True) -> None:
        super().__init__()
        self.shared, self.positions = nn.Embedding(6, 4), LearnedPositions()
        self.embed = nn.Embedding(6, 4) if own else self.shared
        self.embed.weight = self.shared.weight
        self.positions_of_ids = [[positions_of_ids]]  # not recorded as an attribute

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        positions: Tensor = self.positions(ids if self.positions_of_ids[0][0] else x[..., -1])
        return x + positions


TOKENS = torch.tensor([[0, 1, 2], [3, 4, 5]])


def test_a_layer_that_was_another_one_again_and_has_its_weight_is_the_same() -> None:
    found = upgraded(Embedded(), Embedded(own=True), TOKENS)
    assert found.same
    assert upgraded(Embedded(own=True), Embedded(), TOKENS).same
    apart = Embedded(own=True)
    apart.embed.weight = nn.Parameter(torch.ones(6, 4))
    assert not upgraded(Embedded(), apart, TOKENS).same  # a checkpoint has one weight for both


def test_an_input_of_which_a_layer_uses_the_shape_alone_may_be_another() -> None:
    assert upgraded(Embedded(), Embedded(positions_of_ids=False), TOKENS).same


def test_dropout_of_nothing_in_place_of_an_identity_fails_nothing() -> None:
    def ending(last: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), last)

    assert upgraded(ending(nn.Identity()), ending(nn.Dropout(0.0)), torch.ones(2, 4)).same
    assert not upgraded(ending(nn.Identity()), ending(nn.Dropout(0.1)), torch.ones(2, 4)).same


def test_an_identity_that_is_called_in_another_place_fails_nothing() -> None:
    class Block(nn.Module):
        def __init__(self, *, late: bool = False) -> None:
            super().__init__()
            self.fc, self.attn, self.last, self.late = nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 2), [[late]]

        def forward(self, x: Tensor) -> Any:
            h = self.fc(x)
            return self.last(self.attn(h.relu()) if self.late[0][0] else self.attn(h).relu())

    found = upgraded(Block(), Block(late=True), torch.linspace(-1, 1, 8).reshape(2, 4))
    assert found.same
    assert found.notes
