"""Differences → causes: whose own code, which attribute, which weights."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from pytest_modelprobe import ModelProbe, assert_same_behavior
from pytest_modelprobe.comparison import Diagnosis, diagnose
from pytest_modelprobe.comparison.compare import compare
from pytest_modelprobe.comparison.diagnosis.causes import hints
from pytest_modelprobe.comparison.text import cause_text, first_line, text
from pytest_modelprobe.gate.classes import class_of
from pytest_modelprobe.record import (
    Call,
    EmittedTensor,
    IsolatedResponse,
    Layer,
    Parameter,
    Reading,
    Record,
    Statistics,
    Value,
)

# --- real models --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.act = nn.GELU()
        self.down = nn.Linear(16, 8)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Variant(nn.Module):
    """Has children, and does with them what a function says."""

    def __init__(self, forward: Callable[[Any, Any], Any], **children: nn.Module) -> None:
        super().__init__()
        self.how = [forward]  # a list is no attribute of a record
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x: torch.Tensor) -> Any:
        return self.how[0](self, x)


def two() -> nn.Module:
    """Return two branches, of which either may be taken."""
    layers = {name: nn.Linear(8, 8) for name in ("a", "b", "out")}
    return Variant(lambda s, x: (s.b(x), s.out(s.a(x)))[1], **layers)


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.times = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.fc(x)
        return x


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = (x[:, 0] > 0) == bool(i)
            if mine.any():
                out[mine] = expert(x[mine])
        return out


def routed() -> nn.Module:
    return Variant(lambda s, x: s.mixture(s.act(x)), act=nn.Softplus(), mixture=Experts())


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=3, n_head=2, use_cache=False, attn_pdrop=0, resid_pdrop=0,
        embd_pdrop=0, attn_implementation="eager",
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


class Quantizer(nn.Module):
    """Replaces vectors by the nearest of its own, which move to the mean of what they replace."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("vectors", torch.linspace(-2, 2, 16 * 12).view(12, 16).t().contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(x, self.vectors).argmin(-1)
        chosen = self.vectors[nearest]
        found = nn.functional.one_hot(nearest, len(self.vectors)).to(x.dtype)
        means = found.t() @ x.detach() / found.sum(0).clamp(min=1)[:, None]
        self.vectors.lerp_(means, 0.1)
        return x + (chosen - x).detach()


def quantized() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12), Quantizer(), nn.Linear(12, 4))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)
        self.head.weight = self.fc.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.fc(self.fc(x)))


Edit = Callable[[Any], object]
PROBE = ModelProbe()
IDS, IMAGES = PROBE.randint(0, 32, (2, 6)), PROBE.randn(4, 1, 8, 8)
INPUTS: dict[Callable[[], nn.Module], torch.Tensor] = {
    Net: IDS,
    two: PROBE.randn(2, 8),
    Looped: PROBE.randn(2, 8),
    quantized: PROBE.randn(32, 12),
    Shared: PROBE.randn(2, 8),
    routed: PROBE.randn(2, 8),
    convolutional: IMAGES,
    gpt2: IDS,
}


def cube(output: torch.Tensor) -> torch.Tensor:
    return output.pow(3).mean()


def recorded(model: nn.Module, x: Any, *, like: Record | None = None, alone: bool = True, **run: Any) -> Record:
    """Return the record of a run, with what each layer's own code answers."""
    record = PROBE.run(model, x, **{"loss": "random", **run})
    if alone:
        found = compare(record, record if like is None else like)
        record = record.live_run.isolated(record, like=found.expected, names=found.names_before)
    return record


@functools.cache
def unedited(factory: Callable[[], nn.Module], alone: bool) -> Record:
    """Return the record of a model as it is built, with its noise."""
    model = PROBE.build(factory)
    record = recorded(model, INPUTS[factory], alone=False)
    return record.live_run.measured(record, record if alone else None)


def diagnosed(
    edit: Edit = lambda _: None,
    factory: Callable[[], nn.Module] = Net,
    *,
    new: Callable[[], nn.Module] | None = None,
    x: Any = None,
    alone: bool = True,
    **run: Any,
) -> Diagnosis:
    """Return the diagnosis of a model that was edited, or made by another factory, or given another input."""
    expected = unedited(factory, alone)
    model = PROBE.build(new or factory)
    edit(model)
    actual = recorded(model, INPUTS[factory] if x is None else x, like=expected, alone=alone, **run)
    return diagnose(compare(actual, expected))


def causes(diagnosis: Diagnosis) -> list[tuple[str, str, str]]:
    return [(cause.kind, cause.layer, cause.what) for cause in diagnosis.causes]


def with_forward(layer: str, forward: Callable[..., Any]) -> Edit:
    def edit(model: nn.Module) -> None:
        module = model.get_submodule(layer)
        module.forward = types.MethodType(forward, module)

    return edit


isolated_and_not = pytest.mark.parametrize("alone", [True, False], ids=["isolated", "propagation"])


@isolated_and_not
def test_of_nothing_there_is_no_cause(alone: bool) -> None:
    diagnosis = diagnosed(alone=alone)
    assert (diagnosis.causes, diagnosis.possible, diagnosis.moved, diagnosis.unknown) == ((), (), (), None)


# --- 0: input and seed --------------------------------------------------------------------------------------------


@isolated_and_not
def test_another_input_accuses_nothing_else(alone: bool) -> None:
    diagnosis = diagnosed(x=PROBE.randint(0, 32, (2, 6), name="other"), alone=alone)
    assert causes(diagnosis) == [("input", "(root)", "input")]
    assert diagnosis.possible == ()


def test_another_loss_by_name_is_an_input() -> None:
    diagnosis = diagnosed(loss=cube)
    assert [(c.kind, c.what, c.actual, c.expected) for c in diagnosis.causes] == [("input", "loss", "cube", "random")]


def test_a_loss_of_the_same_name_that_computes_otherwise_is_seen_in_the_gradient_of_the_output() -> None:
    def loss_with(power: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda output: output.pow(power).mean()

    old, new = (PROBE.run(PROBE.build(Net), IDS, loss=loss_with(power)) for power in (2, 3))
    diagnosis = diagnose(compare(new, old))
    assert causes(diagnosis) == [("gradient", "(root)", "the loss")]
    assert cause_text(diagnosis.causes[0]) == "the loss changed: another gradient arrives at the output"


def leaky(state: Callable[[torch.Tensor], torch.Tensor], inner: Callable[[], nn.Module] = nn.Tanh) -> nn.Module:
    """Return a model that gives out its state beside its output."""

    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        voltage = self.inner(x) * 0.9
        return voltage, state(voltage)

    return Variant(forward, inner=inner())


def with_state(out: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return out[0].square().mean() + out[1].mean()


def without_state(out: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return out[0].square().mean()


@isolated_and_not
@pytest.mark.parametrize("loss", [with_state, without_state])
@pytest.mark.parametrize(
    "inner", [nn.Tanh, functools.partial(nn.Linear, 4, 4)], ids=["without_weights", "with_weights"]
)
def test_an_output_that_is_another_one_no_longer_and_hands_the_same_gradients_on_is_no_change(
    *, alone: bool, loss: Any, inner: Callable[[], nn.Module]
) -> None:
    # norse 56f3365: the state that a neuron returns is no longer the tensor of its output
    models = [PROBE.build(functools.partial(leaky, state, inner)) for state in (torch.clone, lambda voltage: voltage)]
    x = PROBE.randn(2, 4).requires_grad_()
    runs = [recorded(model, x, loss=loss, alone=alone) for model in models]
    assert {"gradient", "gradient presence"} & {found.kind for found in compare(*runs).differences}
    assert diagnose(compare(*runs)).same


def diagnosed_step(factory: Callable[[], nn.Module], *losses: Callable[[ModelProbe, Any], torch.Tensor]) -> Diagnosis:
    """Return the diagnosis of a step of training with one loss beside that with another."""
    with ModelProbe(seed=0) as probe:
        models = [probe.build(factory) for _ in losses]
        watches = [probe.watch(model) for model in models]
        for model, loss in zip(models, losses, strict=True):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            loss(probe, model).backward()
            optimizer.step()
        new, old = (watch.first_step for watch in watches)
        assert new.live_run is not None
        assert old.live_run is not None
        old = old.live_run.isolated(old)
        return diagnose(compare(new.live_run.isolated(new, like=old), old))


def test_a_gradient_penalty_without_a_graph_is_the_loss_and_not_the_last_layer() -> None:
    def critic() -> nn.Module:
        return nn.Sequential(OrderedDict(fc1=nn.Linear(4, 16), act=nn.Tanh(), fc2=nn.Linear(16, 1)))

    def loss(probe: ModelProbe, model: Any, *, graph: bool) -> torch.Tensor:
        real, fake = (probe.randn(6, 4, name=name) for name in ("real", "fake"))
        mixed = (0.3 * real + 0.7 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=graph)
        return model(fake).mean() - model(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

    found = diagnosed_step(critic, functools.partial(loss, graph=False), functools.partial(loss, graph=True))
    line = "the loss changed: act output gets 3 gradients, not 4; 1 cause, 3 layers after it moved"
    assert first_line(found) == line


def values() -> nn.Module:
    layers = {"fc1": nn.Linear(4, 8), "norm": nn.BatchNorm1d(8), "fc2": nn.Linear(8, 2)}
    return Variant(lambda s, x: s.fc2(s.norm(s.fc1(x)).relu()), **layers)


class Agent(nn.Module):
    """Learns from the values of a copy that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.target = values(), values()
        self.target.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            best = self.target(after).amax(1)
        return (self.own(x).amax(1) - 1 - 0.9 * best).square().mean()


def test_a_mode_is_named_before_the_buffers_that_it_moved_and_these_with_both_sizes() -> None:
    """A target network left in training mode: its running mean is no longer 0, of which there is no percentage."""

    def loss(probe: ModelProbe, agent: Any, *, training: bool) -> torch.Tensor:
        agent.target.train(training)
        return agent(probe.randn(8, 4), probe.randn(8, 4, name="after") + 3)

    found = diagnosed_step(Agent, functools.partial(loss, training=True), functools.partial(loss, training=False))
    assert first_line(found).startswith("target.training False → True; 2 causes, ")
    said = text(found)
    assert re.search(r"target\.norm: buffers changed, rms 0 → 0\.\d+ \(running_mean, ", said)
    assert "∞" not in said


def test_another_seed_is_the_first_cause() -> None:
    old = unedited(Net, alone=False)
    diagnosis = diagnose(compare(dataclasses.replace(old, seed=1), old))
    assert causes(diagnosis) == [("seed", "(root)", "seed")]


# --- 1: architecture and attributes -------------------------------------------------------------------------------


@isolated_and_not
@pytest.mark.parametrize(("blocks", "what"), [(4, "added"), (2, "removed")])
def test_a_block_more_or_less_accuses_neither_its_container_nor_what_comes_after(
    blocks: int, what: str, alone: bool
) -> None:
    diagnosis = diagnosed(new=lambda: Net(blocks), alone=alone)
    assert causes(diagnosis) == [("architecture", f"blocks.{max(blocks - 1, 2)}", what)]


def test_a_container_renamed_is_one_cause() -> None:
    old, new = (PROBE.architecture(nn.ModuleDict({name: nn.Sequential(nn.ReLU())})) for name in ("old", "new"))
    assert causes(diagnose(compare(new, old))) == [("architecture", "new", "renamed")]


def test_another_type_is_the_cause_of_its_own_answer() -> None:
    def edit(model: Any) -> None:
        model.blocks[1].act = nn.ReLU()

    diagnosis = diagnosed(edit)
    assert causes(diagnosis) == [("architecture", "blocks.1.act", "type")]
    assert diagnosis.causes[0].change > 1e-3


@isolated_and_not
def test_an_attribute_is_the_cause_of_its_own_answer(alone: bool) -> None:
    def edit(model: Any) -> None:
        model.blocks[1].norm.eps = 1e-2

    diagnosis = diagnosed(edit, alone=alone)
    (cause,) = diagnosis.causes
    assert (cause.layer, cause.what, cause.actual, cause.expected) == ("blocks.1.norm", "eps", 1e-2, 1e-5)
    assert cause.change > 1e-4


@isolated_and_not
def test_an_attribute_that_decides_how_often_a_child_is_called_is_the_one_cause(alone: bool) -> None:
    def edit(model: Any) -> None:
        model.times = 3

    assert causes(diagnosed(edit, Looped, alone=alone)) == [("attribute", "(root)", "times")]


def test_a_model_in_another_mode_is_one_cause() -> None:
    diagnosis = diagnosed(lambda model: model.eval())
    assert [(c.what, c.actual, c.expected) for c in diagnosis.causes] == [("training", False, True)]


def test_a_frozen_parameter_is_the_one_cause_of_its_missing_gradient() -> None:
    diagnosis = diagnosed(lambda model: model.blocks[1].up.weight.requires_grad_(False))
    assert causes(diagnosis) == [("architecture", "blocks.1.up", "weight requires_grad")]


@isolated_and_not
def test_an_expert_that_gets_no_token_any_more_accuses_no_code(alone: bool) -> None:
    def edit(model: nn.Module) -> None:
        model.act.forward = lambda x: -nn.functional.softplus(x)

    assert causes(diagnosed(edit, routed, alone=alone)) == [("computation", "act", "")]


# --- 2: weights and buffers ---------------------------------------------------------------------------------------


@isolated_and_not
def test_weights_that_changed_are_the_cause_of_what_follows(alone: bool) -> None:
    diagnosis = diagnosed(lambda model: model.blocks[1].up.weight.data.mul_(1.1), alone=alone)
    assert causes(diagnosis) == [("weights", "blocks.1.up", "weight")]
    assert diagnosis.moved[0] == "(root)"
    assert "blocks.0" not in diagnosis.moved
    assert not diagnosis.redrawn


@isolated_and_not
def test_all_weights_changed_accuses_no_code(alone: bool) -> None:
    def edit(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.mul_(1.1)

    assert {kind for kind, _, _ in causes(diagnosed(edit, alone=alone))} == {"weights"}


def as_if_drawn_anew(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.std() > 0:  # not the ones of a norm
            parameter.data.copy_(parameter.flip(0))


def test_a_model_drawn_anew_is_recognized_where_its_code_was_compared() -> None:
    assert diagnosed(as_if_drawn_anew).redrawn
    assert not diagnosed(as_if_drawn_anew, alone=False).redrawn


def test_a_layer_drawn_at_another_scale_is_named_among_weights_drawn_anew() -> None:
    def edit(model: Any) -> None:
        as_if_drawn_anew(model)
        model.embed.weight.data.mul_(1.5)

    found = diagnosed(edit)
    (weights,) = found.causes
    assert weights.is_retraining
    assert weights.hints[1:] == ("embed is drawn at another scale: rms 1.05 → 1.57",)
    assert not found.redrawn


def test_the_structure_of_a_layer_comes_before_the_weights_that_follow_from_it() -> None:
    old, new = (
        recorded(
            PROBE.build(lambda i=i: nn.Sequential(nn.Embedding(32, 8, padding_idx=i))), PROBE.randint(0, 32, (2, 6))
        )
        for i in (1, 0)
    )
    found = diagnose(compare(new, old))
    assert causes(found) == [("attribute", "0", "padding_idx"), ("weights", "0", "weight")]


def test_a_dropout_that_changed_comes_before_the_running_statistics_of_another_training() -> None:
    def factory() -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 8), nn.Linear(8, 8)
        ).eval()

    def trained(model: Any) -> Any:
        for i in (0, 3, 4):
            model[i].weight.data.mul_(1.1).add_(0.01)
        model[1].running_mean.add_(0.01)
        model[2].p = 0.5
        return model

    x = PROBE.randn(4, 8)
    old, new = recorded(factory(), x), recorded(trained(factory()), x)
    found = diagnose(compare(new, old))
    assert [(cause.kind, cause.layer) for cause in found.causes] == [
        ("attribute", "2"), ("buffers", "1"), ("weights", "(root)"),
    ]  # fmt: skip


def test_a_buffer_is_told_as_one() -> None:
    old, new = PROBE.build(convolutional).eval(), PROBE.build(convolutional).eval()
    new[1].running_mean.add_(1.0)
    expected = recorded(old, IMAGES)
    diagnosis = diagnose(compare(recorded(new, IMAGES, like=expected), expected))
    assert causes(diagnosis) == [("buffers", "1", "running_mean")]


def test_a_quantizer_is_named_for_its_own_code_alone() -> None:
    def edit(model: Any) -> None:
        model[2].forward = lambda x: Quantizer.forward(model[2], x.tanh())

    diagnosis = diagnosed(edit, quantized)
    assert [layer for _, layer, _ in causes(diagnosis)] == ["2"]
    assert diagnosis.possible == ()


def test_what_a_batch_norm_leaves_is_its_own_doing() -> None:
    def edit(model: Any) -> None:
        model[1].forward = lambda x: nn.functional.batch_norm(
            x, model[1].running_mean, model[1].running_var, model[1].weight, model[1].bias, True, 0.5
        )

    diagnosis = diagnosed(edit, convolutional, alone=False)
    assert causes(diagnosis) == [("computation", "1", "")]


# --- 3: whose own code --------------------------------------------------------------------------------------------


def without_residual(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down(self.act(self.up(self.norm(x))))


def doubled_between(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + self.down(self.act(2 * self.up(self.norm(x))))


def shifted_before(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + self.down(self.act(self.up(self.norm(x.roll(1, -1)))))


@isolated_and_not
@pytest.mark.parametrize(
    ("forward", "where"),
    [
        (without_residual, "after down"),
        (doubled_between, "between up and act"),
        (shifted_before, "before norm"),
    ],
)
def test_a_container_s_own_code_is_told_with_its_place(forward: Any, where: str, alone: bool) -> None:
    diagnosis = diagnosed(with_forward("blocks.1", forward), alone=alone)
    assert causes(diagnosis) == [("computation", "blocks.1", where)]
    assert diagnosis.causes[0].evidence == ("both" if alone else "propagation")


@isolated_and_not
def test_a_leaf_s_own_code_is_named(alone: bool) -> None:
    forward = with_forward("blocks.1.act", lambda self, x: 2 * nn.functional.gelu(x))
    diagnosis = diagnosed(forward, alone=alone)
    assert causes(diagnosis) == [("computation", "blocks.1.act", "")]
    assert diagnosis.causes[0].hints == ("scaled by 2",)


def test_several_changes_at_once_are_all_named() -> None:
    def edit(model: Any) -> None:
        with_forward("blocks.0", without_residual)(model)
        model.blocks[1].norm.eps = 1e-2
        model.blocks[1].act = nn.ReLU()
        with_forward("blocks.2", doubled_between)(model)
        model.head.weight.data.mul_(1.1)

    assert set(causes(diagnosed(edit))) == {
        ("computation", "blocks.0", "after down"),
        ("attribute", "blocks.1.norm", "eps"),
        ("architecture", "blocks.1.act", "type"),
        ("computation", "blocks.2", "between up and act"),
        ("weights", "head", "weight"),
    }


def test_by_propagation_only_the_first_of_several_is_named_and_the_rest_is_not_judged() -> None:
    def edit(model: Any) -> None:
        with_forward("blocks.0", without_residual)(model)
        with_forward("blocks.2", doubled_between)(model)

    diagnosis = diagnosed(edit, alone=False)
    assert causes(diagnosis) == [("computation", "blocks.0", "after down")]
    assert "blocks.2" in diagnosis.not_judged


@isolated_and_not
def test_a_layer_that_is_not_called_any_more_accuses_its_caller(alone: bool) -> None:
    forward = with_forward("blocks.1", lambda self, x: x + self.down(self.act(self.up(x))))
    diagnosis = diagnosed(forward, alone=alone)
    assert causes(diagnosis) == [("computation", "blocks.1", "before up")]


def test_an_input_from_another_layer_is_a_rewiring() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.a(x)
        return self.out(self.b(x))

    (cause,) = diagnosed(with_forward("", forward), two, alone=False).causes
    assert (cause.kind, cause.layer, cause.what) == ("computation", "(root)", "between b and out")
    assert cause.hints == ("out input a output → b output",)


def test_children_called_in_another_order_are_no_change_of_code() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        self.b(x)
        return self.out(a)

    assert diagnosed(with_forward("", forward), two).comparison.same


# --- 4: gradients -------------------------------------------------------------------------------------------------


def detached(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + self.down(self.act(self.up(self.norm(x)))).detach()


def test_a_branch_cut_off_is_named_with_what_gets_no_gradient() -> None:
    diagnosis = diagnosed(with_forward("blocks.1", detached))
    assert causes(diagnosis) == [("gradient", "blocks.1", "down output")]
    assert diagnosis.causes[0].evidence == "both"
    assert cause_text(diagnosis.causes[0]) == "blocks.1: no gradient any more for down output"


def test_a_branch_cut_off_is_seen_in_the_run_too() -> None:
    diagnosis = diagnosed(with_forward("blocks.1", detached), alone=False)
    assert causes(diagnosis) == [("gradient", "blocks.1", "after down")]
    assert cause_text(diagnosis.causes[0]) == "blocks.1: gradient cut after down"


def heads(cut: str = "") -> nn.Module:
    """Return a model of two outputs, one of which goes into the other."""
    head = Variant(lambda s, x: s.fc(x).detach() if cut == "head" else s.fc(x), fc=nn.Linear(8, 8))

    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.body(x)
        out = self.head(x)
        return x, out.detach() if cut == "root" else out

    return Variant(forward, body=nn.Linear(8, 8), head=head)


@pytest.mark.parametrize(
    ("new", "old", "expected"),
    [
        (heads("root"), heads(), "(root): no gradient any more for output[1]"),
        (heads("head"), heads(), "head: no gradient any more for output"),
        (heads(), heads("root"), "(root): gradient of output[1] changed"),
    ],
    ids=["detached", "detached inside", "not detached"],
)
def test_a_gradient_that_the_model_changes_is_not_blamed_on_a_random_loss(
    new: nn.Module, old: nn.Module, expected: str
) -> None:
    new.load_state_dict(old.state_dict())
    diagnosis = diagnose(compare(*(recorded(model, INPUTS[two], alone=False) for model in (new, old))))
    assert [cause_text(cause) for cause in diagnosis.causes] == [expected]


@isolated_and_not
def test_gradients_switched_off_are_told_as_that(alone: bool) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = self.norm(x)
        return x + self.down(self.act(self.up(hidden)))

    diagnosis = diagnosed(with_forward("blocks.1", forward), alone=alone)
    assert causes(diagnosis) == [("gradient", "blocks.1", "norm grad_enabled")]
    assert cause_text(diagnosis.causes[0]) == "blocks.1: own code calls norm with gradients off"


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


@isolated_and_not
def test_the_first_on_the_way_back_is_the_cause(alone: bool) -> None:
    def edit(model: Any) -> None:
        for layer in ("blocks.0.act", "blocks.2.act"):
            with_forward(layer, lambda self, x: Reversed.apply(nn.functional.gelu(x)))(model)

    diagnosis = diagnosed(edit, alone=alone)
    found = [layer for _, layer, _ in causes(diagnosis)]
    assert found == (["blocks.0.act", "blocks.2.act"] if alone else ["blocks.2"])
    assert {kind for kind, _, _ in causes(diagnosis)} == {"gradient"}


def test_a_gradient_reversed_between_two_layers_is_told_of_the_code_between_them() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(Reversed.apply(self.up(self.norm(x)))))

    (cause,) = diagnosed(with_forward("blocks.1", forward), alone=False).causes
    assert cause_text(cause) == "blocks.1: gradient changed between up and act"


# --- real architectures -------------------------------------------------------------------------------------------


def attribute(layer: str, name: str, value: object) -> Edit:
    return lambda model: setattr(model.get_submodule(layer), name, value)


@pytest.mark.parametrize(
    ("factory", "edit", "expected"),
    [
        (
            gpt2,
            with_forward("transformer.h.1.mlp", lambda self, x: self.c_proj(self.act(self.c_fc(x)) * 1.1)),
            [("computation", "transformer.h.1.mlp", "between act and c_proj")],
        ),
        (
            Shared,
            with_forward("", lambda self, x: self.head(self.fc(2 * self.fc(x)))),
            [("computation", "(root)", "between fc and fc (call 2)")],
        ),
        (
            Shared,
            lambda model: model.fc.weight.data.mul_(2),
            [("weights", "fc", "weight")],
        ),
    ],
    ids=["gpt2 glue", "shared glue", "tied weights"],
)
def test_one_change_in_a_real_model_is_the_one_cause(
    factory: Any, edit: Edit, expected: list[tuple[str, str, str]]
) -> None:
    diagnosis = diagnosed(edit, factory)
    assert causes(diagnosis) == expected
    assert diagnosis.possible == ()


# --- records written by hand --------------------------------------------------------------------------------------


def reading(*numbers: float, noise: float | None = None) -> Reading:
    """Return the reading of at most 16 numbers: their own fingerprint."""
    mean = sum(numbers) / len(numbers)
    deviations = sum((x - mean) ** 2 for x in numbers)
    moments = Statistics(
        count=len(numbers), mean=mean, deviations=deviations, min=min(numbers), max=max(numbers), zeros=numbers.count(0)
    )
    return Reading(statistics=moments, fingerprint=(*numbers, *[0.0] * (16 - len(numbers))), noise=noise)


def value(path: str, numbers: Reading, source: str | None = None) -> Value:
    return Value(path=path, shape=(2,), dtype="float32", device="cpu", source=source, forward=numbers)


def chain(*steps: tuple[Reading, Reading], **fields: Any) -> Record:
    """Return the record of layers a, b, c... that take in and give out these; ``fields`` are those of a's call."""
    calls = [(0, 2 * len(steps) + 1, steps[0][0], steps[-1][1])]
    calls += [(2 * i + 1, 2 * i + 2, *step) for i, step in enumerate(steps)]
    layers = {}
    for i, (start, end, x, y) in enumerate(calls):
        name = "(root)" if i == 0 else "abcdef"[i - 1]
        source = f"{'abcdef'[i - 2]} output" if i > 1 else None
        call = Call(
            root="(root)",
            root_training=False,
            index=0,
            started=start,
            finished=end,
            inputs=(value("input", x, source),),
            outputs=(value("output", y),),
        )
        if name == "a":
            call = dataclasses.replace(call, **fields)
        layers[name] = Layer(name=name, type=f"net.{name}", calls=(call,))
    return Record(model="Net", layers=layers, forwards=1)


X, Y, Z = reading(1.0, 2.0), reading(3.0, 4.0), reading(5.0, 6.0)
OTHER = reading(4.0, 3.0)


def found(actual: Record, expected: Record) -> Diagnosis:
    return diagnose(compare(actual, expected))


def test_the_first_layer_that_gives_out_something_else_is_the_cause() -> None:
    diagnosis = found(chain((X, OTHER), (OTHER, X)), chain((X, Y), (Y, Z)))
    assert causes(diagnosis) == [("computation", "a", "")]
    assert (diagnosis.moved, diagnosis.not_judged) == (("(root)", "b"), ("b",))


def test_code_of_a_layer_whose_inputs_are_not_known_is_only_possible() -> None:
    diagnosis = found(chain((X, OTHER), inputs_known=False), chain((X, Y), inputs_known=False))
    assert (diagnosis.causes, [c.layer for c in diagnosis.possible], diagnosis.unknown) == ((), ["a"], None)


def test_a_layer_that_drew_other_random_numbers_is_no_cause() -> None:
    assert found(chain((X, OTHER), random="1"), chain((X, Y), random="2")).causes == ()
    assert causes(found(chain((X, OTHER), random="1"), chain((X, Y), random="1"))) == [("computation", "a", "")]


def test_a_layer_given_another_argument_is_not_the_cause_but_its_caller_is() -> None:
    diagnosis = found(chain((X, OTHER), arguments={"k": 2}), chain((X, Y), arguments={"k": 1}))
    assert causes(diagnosis) == [("computation", "(root)", "a k")]


def test_a_small_change_made_a_little_larger_is_drift() -> None:
    near = reading(1.0, 2.0 + 1e-4)  # by 4e-5 of 1e-4 that are allowed
    diagnosis = found(chain((near, reading(3.0, 4.001))), chain((X, Y)))
    assert diagnosis.causes == ()
    assert diagnosis.possible[0].hints[0] == "drift first visible here"
    assert [layer for _, layer, _ in causes(found(chain((near, OTHER)), chain((X, Y))))] == ["a"]


ANSWER = IsolatedResponse(recipes={"input": "2 2^0"}, handed=(EmittedTensor(where="output", reading=X),))
OTHERWISE = dataclasses.replace(ANSWER, handed=(EmittedTensor(where="output", reading=reading(1.5, 2.5)),))


def test_an_answer_that_changed_is_a_cause_whatever_came_in() -> None:
    diagnosis = found(chain((OTHER, X), response=OTHERWISE), chain((X, Y), response=ANSWER))
    assert causes(diagnosis) == [("input", "(root)", "input"), ("computation", "a", "")]


def test_an_answer_to_other_synthetic_tensors_accuses_nobody() -> None:
    otherwise = dataclasses.replace(OTHERWISE, recipes={"input": "2 2^3"})
    assert found(chain((X, Y), response=otherwise), chain((X, Y), response=ANSWER)).comparison.same


def test_a_change_in_the_run_that_the_answer_does_not_confirm_is_only_possible() -> None:
    diagnosis = found(chain((X, OTHER), response=ANSWER), chain((X, Y), response=ANSWER))
    assert diagnosis.causes == ()
    assert diagnosis.possible[0].layer == "a"
    assert diagnosis.possible[0].hints[-1] == "its isolated response is unchanged"


def test_a_change_in_the_run_far_beyond_the_noise_is_certain_whatever_the_answer() -> None:
    quiet = reading(3.0, 4.0, noise=1e-7)
    (cause,) = found(chain((X, OTHER), response=ANSWER), chain((X, quiet), response=ANSWER)).causes
    assert (cause.layer, cause.evidence) == ("a", "propagation")


def test_both_kinds_of_evidence_are_one_cause() -> None:
    diagnosis = found(chain((X, OTHER), response=OTHERWISE), chain((X, Y), response=ANSWER))
    assert [(c.layer, c.evidence) for c in diagnosis.causes] == [("a", "both")]


def test_what_was_passed_on_and_is_computed_now_has_the_change_of_the_run() -> None:
    passed = dataclasses.replace(ANSWER, handed=(EmittedTensor(where="output", passed="input"),))
    (cause,) = found(chain((X, reading(3.0, 4.5)), response=ANSWER), chain((X, Y), response=passed)).causes
    assert (cause.evidence, cause.change) == ("both", pytest.approx(0.1))


def test_an_output_of_another_shape_is_the_layer_s_own_though_an_argument_is_named_output() -> None:
    given = (value("output", X),)
    longer = (dataclasses.replace(value("output", OTHER), shape=(3,)),)
    diagnosis = found(chain((X, Y), inputs=given, outputs=longer), chain((X, Y), inputs=given))
    assert causes(diagnosis) == [("computation", "a", "output")]


@pytest.mark.parametrize(
    ("noise", "why"),
    [
        (None, "no module's inputs match while its output differs, and the noise was not measured"),
        ("measured", "no module's inputs match while its output differs"),
        ("not repeatable", "the run was not repeatable when it was recorded"),
    ],
)
def test_why_the_cause_cannot_be_told_depends_on_how_the_expected_was_measured(noise: str | None, why: str) -> None:
    old, new = chain((X, Y), random="1"), chain((X, OTHER), random="2")
    assert found(new, dataclasses.replace(old, noise=noise)).unknown == why


def with_eps(record: Record, eps: float) -> Record:
    layer = dataclasses.replace(record["a"], attributes={"eps": eps})
    return dataclasses.replace(record, layers={**record.layers, "a": layer})


def test_an_effect_is_told_with_the_attribute_that_has_it() -> None:
    (cause,) = found(with_eps(chain((X, reading(3.0, 4.5))), 1e-3), with_eps(chain((X, Y)), 1e-5)).causes
    assert (cause.kind, cause.change) == ("attribute", pytest.approx(0.1))


def test_an_attribute_has_no_size_where_the_same_inputs_give_the_same_outputs() -> None:
    old, new = chain((X, Y), response=ANSWER), chain((X, Y), response=OTHERWISE)
    (cause,) = found(with_eps(new, 1e-3), with_eps(old, 1e-5)).causes
    assert (cause.kind, cause.change) == ("attribute", None)


@pytest.mark.parametrize(
    "new",
    [
        chain((OTHER, Y), response=OTHERWISE),
        chain((X, Z), response=OTHERWISE),
        chain((X, Y), response=OTHERWISE, inputs_known=False),
    ],
    ids=["other inputs", "other outputs", "inputs that are not known"],
)
def test_an_attribute_has_the_size_of_the_answer_where_the_run_does_not_show_that_it_has_no_effect(new: Record) -> None:
    old = chain((X, Y), response=ANSWER)
    cause = found(with_eps(new, 1e-3), with_eps(old, 1e-5)).causes[-1]
    assert (cause.kind, cause.change) == ("attribute", pytest.approx(0.1**0.5))


def test_what_is_inside_an_added_layer_is_told_with_it() -> None:
    names = ["block", "block.fc", "block.fc.core", "blocks"]
    new = Record(model="Net", layers={name: Layer(name=name, type="net.A") for name in names})
    assert [(c.layer, len(c.differences)) for c in found(new, Record(model="Net")).causes] == [
        ("block", 3),
        ("blocks", 1),
    ]


# --- what a change looks like -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actual", "expected", "looks_like"),
    [
        (reading(2.0, 1.0, -3.0), reading(1.0, 2.0, -3.0), "a permutation of its elements"),
        (reading(-1.0, -2.0), reading(1.0, 2.0), "its sign flipped"),
        (reading(2.0, 4.0), reading(1.0, 2.0), "scaled by 2"),
        (reading(1.5, 2.5), reading(1.0, 2.0), "shifted by 0.5"),
        (reading(0.0, 0.0), reading(1.0, 2.0), "all zero now"),
        (reading(1.0, 2.0), reading(0.0, 0.0), "all zero before"),
        (reading(0.0, 9.0, 0.0, 3.0), reading(1.0, 2.0, 7.0, 5.0), "zeros 0% → 50%"),
    ],
)
def test_a_change_has_a_look(actual: Reading, expected: Reading, looks_like: str) -> None:
    assert hints(actual, expected) == (looks_like,)


# --- any two records ----------------------------------------------------------------------------------------------

READINGS = st.sampled_from([
    X, Y, Z, OTHER, Reading(), reading(0.0, 0.0), reading(1.0, noise=math.inf),
    Reading(statistics=Statistics(count=2)), Reading(statistics=Statistics(count=2, nan=2), fingerprint=(1.0,) * 16),
    Reading(digest="0" * 16, fingerprint=(1.0,) * 16, statistics=Statistics(count=2)),
])  # fmt: skip
NAMES = ["a", "a.0", "a.1", "a.1.b", "b", "b.a", "0", "1", "2"]
TYPES = st.sampled_from(["net.A", "net.B", "net.C"])
ADDRESSES = st.none() | st.sampled_from([f"{name} output" for name in [*NAMES, "(root)", "a (call 2)"]])
VALUES = st.builds(
    Value,
    path=st.sampled_from(["input", "input[1]", "x", "output", ""]),
    shape=st.sampled_from([(2,), (), (3, (1, 2))]),
    dtype=st.sampled_from(["float32", "bfloat16", "int64"]),
    device=st.just("cpu"),
    forward=READINGS,
    backward=st.none() | READINGS,
    overwritten=st.booleans(),
    source=ADDRESSES,
)
HANDED = st.builds(
    EmittedTensor,
    where=st.sampled_from(["output", "0 input", "b input", "b (call 2) input"]),
    passed=st.none() | st.sampled_from(["input", "0 output", "=True"]),
    reading=st.none() | READINGS,
)
RESPONSES = st.builds(
    IsolatedResponse,
    recipes=st.dictionaries(st.sampled_from(["input", "weight"]), st.sampled_from(["2^0", "2^1"])),
    handed=st.lists(HANDED, max_size=3, unique_by=lambda handed: handed.where).map(tuple),
    gradient=st.none() | READINGS,
    without_gradient=st.lists(st.sampled_from(["input", "weight"]), max_size=2).map(tuple),
    reason=st.none() | st.just("it raised"),
)
CALLS = st.builds(
    Call,
    root=st.sampled_from(["(root)", "a", "gone"]),
    root_training=st.booleans(),
    index=st.integers(0, 2),
    started=st.integers(-1, 9),
    finished=st.integers(-1, 9),
    inputs=st.lists(VALUES, max_size=2).map(tuple),
    inputs_known=st.booleans(),
    outputs=st.lists(VALUES, max_size=2).map(tuple),
    arguments=st.dictionaries(st.just("k"), st.none() | st.integers(0, 1)),
    grad_enabled=st.booleans(),
    random=st.none() | st.sampled_from("12"),
    response=st.none() | RESPONSES,
)
PARAMETERS = st.builds(
    Parameter,
    name=st.sampled_from(["weight", "bias"]),
    shape=st.sampled_from([(2,), (3,)]),
    dtype=st.just("float32"),
    device=st.just("cpu"),
    requires_grad=st.booleans(),
    tied_to=st.none() | st.sampled_from(["a.weight", "scale"]),
    reading=READINGS,
    after=st.none() | READINGS,
    gradient=st.none() | READINGS,
)


@st.composite
def any_layer(draw: st.DrawFn, name: str) -> Layer:
    owned = st.lists(PARAMETERS, max_size=2, unique_by=lambda p: p.name).map(tuple)
    calls = st.lists(CALLS, max_size=2, unique_by=lambda call: (call.root, call.root_training, call.index)).map(tuple)
    return Layer(
        name=name,
        type=draw(TYPES),
        training=draw(st.booleans()),
        attributes=draw(st.dictionaries(st.just("eps"), st.sampled_from([1, 1.0, None, "x", math.nan]))),
        parameters=draw(owned),
        buffers=draw(owned),
        calls=draw(calls),
    )


@st.composite
def any_record(draw: st.DrawFn) -> Record:
    names = draw(st.lists(st.sampled_from(["(root)", *NAMES]), max_size=5, unique=True))
    return Record(
        model="Net",
        layers={name: draw(any_layer(name)) for name in names},
        forwards=draw(st.integers(0, 1)),
        backwards=draw(st.integers(0, 1)),
        seed=draw(st.none() | st.integers(0, 1)),
        noise=draw(st.sampled_from([None, "measured", "not repeatable"])),
    )


@st.composite
def two_records(draw: st.DrawFn) -> tuple[Record, Record]:
    """Return two records that have some layers in common."""
    old = draw(any_record())
    other = draw(any_record())
    kept = draw(st.sets(st.sampled_from(["(root)", *NAMES])))
    layers = {**other.layers, **{name: layer for name, layer in old.layers.items() if name in kept}}
    return dataclasses.replace(other, layers=layers), old


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(two_records())
def test_any_two_records_have_a_diagnosis_and_a_text(records: tuple[Record, Record]) -> None:
    comparison = compare(*records)
    diagnosis = diagnose(comparison)
    assert text(diagnosis)
    told = bool(diagnosis.causes or diagnosis.possible or diagnosis.unknown)
    assert not (comparison.same and told)
    assert comparison.same or told or (diagnosis.unchanged and diagnosis.notes)  # no difference is left untold


# --- containers that were rewritten -------------------------------------------------------------------------------


class Dictionary(nn.Module):
    """Gives out a dict; its subclasses the same, but for one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.a(x).relu()
        return self.given(self.b(hidden), hidden)

    def given(self, logits: torch.Tensor, hidden: torch.Tensor) -> Any:
        return {"logits": logits, "hidden": hidden}


def like(parent: type[nn.Module], **methods: Any) -> type[nn.Module]:
    """Return a class of the same name with other methods."""
    return type(parent.__name__, (parent,), {"__qualname__": parent.__qualname__, "__module__": __name__, **methods})


def rewritten(old: Callable[[], nn.Module], new: Callable[[], nn.Module], x: torch.Tensor, **run: Any) -> Diagnosis:
    expected = recorded(PROBE.build(old).eval(), x)
    expected = expected.live_run.measured(expected, expected)
    model = PROBE.build(new).eval()
    return diagnose(compare(recorded(model, x, like=expected, **run), expected))


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        (
            lambda self, logits, hidden: {"logits": logits, "features": hidden},
            ["(root): output.hidden renamed to output.features"],
        ),
        (
            lambda self, logits, hidden: {"logits": logits, "hidden": hidden, "third": hidden + 1},
            ["(root): output.third added"],
        ),
        (lambda self, logits, hidden: {"logits": logits}, ["(root): output.hidden removed"]),
    ],
    ids=["renamed", "added", "removed"],
)
def test_outputs_with_other_names_are_told_as_that(given: Any, lines: list[str]) -> None:
    found = rewritten(Dictionary, like(Dictionary, given=given), PROBE.randn(4, 8))
    assert [cause_text(cause) for cause in found.causes] == lines


def test_a_container_whose_children_are_called_one_by_one_fails_nothing() -> None:
    def one_by_one(self: Any, x: torch.Tensor) -> torch.Tensor:
        for child in self[0]:
            x = child(x)
        return x

    def nested() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))

    edit = like(nn.Sequential, forward=one_by_one, __module__=nn.Sequential.__module__)
    found = rewritten(nested, lambda: edit(*nested()), PROBE.randn(4, 8))
    assert found.same
    assert "(root): own code no longer calls 0" in map(cause_text, found.notes)


def test_another_mode_hides_no_change_of_code() -> None:
    def tanh(self: Any, x: torch.Tensor) -> Any:
        hidden = self.a(x).tanh()
        return self.given(self.b(hidden), hidden)

    found = rewritten(Dictionary, like(Dictionary, forward=tanh), PROBE.randn(4, 8), mode="train")
    assert [(c.what, c.change) for c in found.causes] == [("training", None)]
    assert [(c.layer, c.what) for c in found.possible] == [("(root)", "between a and b")]
    assert "its mode changed too" in found.possible[0].hints


def test_a_momentum_changes_the_statistics_and_no_output() -> None:
    def normed(momentum: float) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(8, momentum=momentum), nn.Linear(8, 2))

    expected = recorded(PROBE.build(lambda: normed(0.1)), PROBE.randn(4, 8))
    actual = recorded(PROBE.build(lambda: normed(0.2)), PROBE.randn(4, 8), like=expected)
    (cause,) = diagnose(compare(actual, expected)).causes
    assert (cause.what, cause.effect) == ("momentum", "running_var")  # which the large row moves most


def test_an_attribute_that_is_no_size_is_told_beside_another_shape() -> None:
    old, new = (PROBE.architecture(nn.Conv2d(4, 4, 3, groups=groups)) for groups in (1, 2))
    assert [cause.what for cause in diagnose(compare(new, old)).causes] == ["weight", "groups"]


def test_sizes_that_the_weight_tells_are_not_told_again() -> None:
    old, new = (PROBE.architecture(nn.Conv2d(2, 2, size)) for size in (3, 5))
    assert [cause.what for cause in diagnose(compare(new, old)).causes] == ["weight"]


def test_a_layer_with_another_name_has_other_weights_for_that() -> None:
    def named(name: str) -> nn.Module:
        return nn.Sequential(OrderedDict([("fc1", nn.Linear(8, 8)), (name, nn.Linear(8, 8))]))

    found = rewritten(lambda: named("fc2"), lambda: named("hidden"), PROBE.randn(4, 8))
    assert [cause_text(cause) for cause in found.causes] == ["fc2 renamed to hidden"]
    assert found.causes[0].hints == ("its weights are others: build draws them by name",)


def test_of_renamed_layers_one_with_other_weights_is_a_cause_of_its_own() -> None:
    def named(*names: str) -> nn.Module:
        return nn.Sequential(OrderedDict((name, nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))) for name in names))

    old, new = PROBE.build(lambda: named("a", "b")), named("first", "second")
    new.load_state_dict(dict(zip(new.state_dict(), old.state_dict().values(), strict=True)))
    with torch.no_grad():
        new.second[0].weight *= 1.01
        new.first[1].running_var.fill_(2.0)
    expected = recorded(old, PROBE.randn(4, 8))
    found = diagnose(compare(recorded(new, PROBE.randn(4, 8), like=expected), expected))
    weights = [c for c in causes(found) if c[0] in ("weights", "buffers")]
    assert sorted(weights) == [("buffers", "first.1", "running_var"), ("weights", "second.0", "weight")]


def test_of_the_layers_asked_for_only_the_causes_among_them_are_told() -> None:
    old, new = PROBE.build(Net), PROBE.build(Net)
    for block in new.blocks:
        block.norm.eps = 1e-2
    expected, actual = recorded(old, IDS), recorded(new, IDS)
    found = diagnose(compare(actual, expected, layers=["blocks.1", "blocks.1.norm"]))
    assert [cause.layer for cause in found.causes] == ["blocks.1.norm"]
    assert not found.possible
    assert set(found.moved) <= {"blocks.1"}


def test_where_attributes_are_not_compared_they_are_a_hint() -> None:
    old, new = PROBE.build(Net), PROBE.build(Net)
    new.blocks[1].norm.eps = 1e-2
    found = diagnose(compare(recorded(new, IDS), recorded(old, IDS), parts="behavior"))
    assert [(c.kind, c.layer, c.hints[-1]) for c in found.causes] == [
        ("computation", "blocks.1.norm", "eps 1e-05 → 0.01")
    ]


# --- a refactoring beside a change --------------------------------------------------------------------------------


class Scaling(nn.Module):
    """Calls two children, the second with ``scale`` times what the first one gives out, and maybe with a flag."""

    def __init__(self, scale: float = 1.0, *, flag: bool = False, swapped: bool = False, **attributes: object) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), Flagged(), nn.Linear(8, 8)
        self._scale, self._flag, self._swapped = [scale], [flag], [swapped]  # lists are no attributes of a record
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = {"positions": torch.arange(8)} if self._flag[0] else {}
        if self._swapped[0]:
            side = self.c(x)
            return self.b(self.a(x) * self._scale[0], **given) + side
        x, side = self.b(self.a(x) * self._scale[0], **given), self.c(x)
        return x + side


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        return self.fc(x)


def refactored(old: Callable[[], nn.Module], new: Callable[[], nn.Module]) -> Diagnosis:
    return rewritten(old, new, PROBE.randn(4, 8))


class Halving(nn.Module):
    def forward(self, x: torch.Tensor, whole: bool = True) -> torch.Tensor:
        return x if whole else x / 2


def halving_caller(**given: bool) -> nn.Module:
    return Variant(lambda s, x: s.b(s.a(x), **given), a=nn.Linear(8, 8), b=Halving())


@pytest.mark.parametrize(
    ("then", "now", "text"),
    [
        ({}, {"whole": False}, "(root): own code gives b whole False, not the default"),
        ({"whole": False}, {}, "(root): own code no longer gives b whole"),
    ],
)
def test_of_a_false_that_is_not_the_default_the_caller_alone_is_accused(
    then: dict[str, bool], now: dict[str, bool], text: str
) -> None:
    found = refactored(lambda: halving_caller(**then), lambda: halving_caller(**now))
    assert [cause_text(cause) for cause in found.causes] == [text]


def test_a_new_attribute_does_not_excuse_the_code_beside_it() -> None:
    found = refactored(Scaling, lambda: Scaling(1.5, in_chans=3))
    assert [cause_text(cause) for cause in found.causes] == ["(root): own code changed between a and b"]


class Buffered(Scaling):
    """Holds a table that it does not use."""

    def __init__(self, scale: float = 1.0, *, persistent: bool = False, trainable: bool = True) -> None:
        super().__init__(scale)
        self.gain = nn.Parameter(torch.ones(()), requires_grad=trainable)
        self.register_buffer("table", torch.arange(7), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * super().forward(x)


def test_a_table_that_went_does_not_excuse_the_code_beside_it() -> None:
    def bare() -> nn.Module:
        model = Buffered(1.5)
        del model.table
        return model

    found = refactored(lambda: Buffered(1.1), bare)
    assert cause_text(found.causes[0]) == "(root): own code changed between a and b"
    assert found.causes[0].change is not None
    assert [cause.change for cause in found.causes[1:]] == [None]


@pytest.mark.parametrize("option", [{"persistent": True}, {"trainable": False}])
def test_what_is_saved_or_trained_does_not_excuse_the_code_beside_it(option: Any) -> None:
    found = refactored(Buffered, lambda: Buffered(1.5, **option))
    assert cause_text(found.causes[0]) == "(root): own code changed between a and b"
    assert [cause.change for cause in found.causes[1:]] == [None]


class Spare(Scaling):
    """Holds a parameter that it multiplies by or does not use, or none."""

    def __init__(self, scale: float = 1.0, *, used: bool | None = None) -> None:
        super().__init__(scale)
        self._used = [used]
        if used is not None:
            self.spare = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out * self.spare if self._used[0] else out


def test_a_parameter_without_a_gradient_does_not_excuse_the_code_beside_it() -> None:
    found = refactored(Spare, lambda: Spare(1.5, used=False))
    assert cause_text(found.causes[0]) == "(root): own code changed between a and b"
    assert [(cause.what, cause.change) for cause in found.causes[1:]] == [("spare added", None)]


def test_a_parameter_with_a_gradient_is_the_cause_of_what_it_does() -> None:
    found = refactored(Spare, lambda: Spare(used=True))
    assert [(cause.kind, cause.what) for cause in found.causes] == [("architecture", "spare added")]


def test_an_argument_that_changes_nothing_is_told_beside_an_output_that_is_the_same() -> None:
    for old, new, told in (
        (lambda: Scaling(flag=True), Scaling, "(root): own code no longer gives b positions"),
        (Scaling, lambda: Scaling(flag=True), "(root): own code gives b positions"),
    ):
        found = refactored(old, new)
        assert found.unchanged
        assert found.same
        assert first_line(found) == f"same function; written otherwise in 1 place: {told}"
        assert found.moved == ()


def trained_again(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * PROBE.randn(*parameter.shape, name="step"))
    return model


def redrawn(model: nn.Module) -> nn.Module:
    """Draw all weights anew, so that norms are as fresh as they were."""
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(len(name)))
    return model


def test_norms_as_fresh_as_they_were_are_no_exception_among_weights_drawn_anew() -> None:
    ids = PROBE.randint(0, 32, (2, 6))
    old = recorded(PROBE.build(Net), ids)
    (weights,) = diagnose(compare(recorded(redrawn(PROBE.build(Net)), ids), old)).causes
    assert cause_text(weights).startswith("all weights changed by ")
    assert weights.what == "all 8 layers"

    changed = redrawn(PROBE.build(Net))
    nn.init.constant_(changed.blocks[2].norm.weight, 3.0)
    causes = diagnose(compare(recorded(changed, ids), old)).causes
    assert [(cause.kind, cause.layer) for cause in causes] == [("weights", "blocks.2.norm"), ("weights", "(root)")]


class Passed(Scaling):
    """Hands what the first child gives out to layers that pass it on."""

    def __init__(self, scale: float = 1.0, *, between: nn.Module | None = None) -> None:
        super().__init__(scale)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.b((x if self.between is None else self.between(x)) * self._scale[0])


def test_a_layer_that_passed_on_what_it_got_does_not_excuse_the_code_beside_it() -> None:
    found = refactored(lambda: Passed(between=nn.Identity()), lambda: Passed(1.5))
    assert [(cause.kind, cause.layer, cause.what) for cause in found.causes] == [
        ("computation", "(root)", "between a and b"),
        ("architecture", "between", "removed"),
    ]


def test_a_layer_that_did_something_is_told_by_itself() -> None:
    found = refactored(lambda: Passed(between=nn.Tanh()), Passed)
    assert [(cause.kind, cause.layer) for cause in found.causes] == [("architecture", "between")]


def dropping(*calls: str, passing: nn.Module | None = None, scale: float = 1.0) -> nn.Module:
    """Return a model that calls what may pass on its input between two others, once more after them, or not at all."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).tanh()
        x = self.b(x + self.drop(x) if "between" in calls else x + x)
        return scale * (self.drop(x) if "after" in calls else x)

    return Variant(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8), drop=passing or nn.Dropout(0.1))


@pytest.mark.parametrize(("then", "now"), [(("between", "after"), ("after",)), ((), ("between",))])
def test_a_layer_that_passed_on_its_input_and_is_called_less_or_more_is_no_other_code(
    then: tuple[str, ...], now: tuple[str, ...]
) -> None:
    found = refactored(
        lambda: in_a_row(lambda: dropping(*then)), lambda: trained_again(in_a_row(lambda: dropping(*now)))
    )
    assert [cause.kind for cause in found.causes] == ["weights"]
    assert not found.possible


def ordered(*order: str) -> nn.Module:
    layers = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "drop": nn.Dropout(0.1)}
    return Variant(lambda s, x: functools.reduce(lambda x, name: getattr(s, name)(x), order, x), **layers)


@pytest.mark.parametrize(
    ("now", "kinds"),
    [
        (("a", "drop", "b"), ["weights"]),
        (("b", "drop", "a"), ["computation", "weights"]),
    ],
)
def test_a_layer_that_passed_on_its_input_and_is_called_elsewhere_is_no_other_code(
    now: tuple[str, ...], kinds: list[str]
) -> None:
    found = refactored(
        lambda: in_a_row(lambda: ordered("drop", "a", "b")), lambda: trained_again(in_a_row(lambda: ordered(*now)))
    )
    assert [cause.kind for cause in found.causes] == kinds
    assert not found.possible


def test_code_after_a_layer_that_passed_on_its_input_is_named_where_the_run_shows_it() -> None:
    old, new = (functools.partial(dropping, *calls, scale=scale) for calls, scale in ((["between"], 1.0), ([], 2.0)))
    found = refactored(lambda: in_a_row(old), lambda: in_a_row(new))
    assert [cause_text(cause) for cause in found.causes] == ["1: own code changed after b"]


@pytest.mark.parametrize("passing", [nn.Tanh(), nn.LayerNorm(8)])
def test_a_layer_that_did_something_and_is_called_no_longer_is_another_code(passing: nn.Module) -> None:
    def make(*calls: str) -> nn.Module:
        return in_a_row(lambda: dropping(*calls, passing=copy.deepcopy(passing)))

    found = refactored(lambda: make("after"), lambda: trained_again(make()))
    assert (found.causes[0].kind, found.causes[0].layer) == ("computation", "1")


class InARow(nn.Module):
    """Calls three layers one by one, or as one."""

    def __init__(self, scale: float = 1.0, *, as_one: bool = False) -> None:
        super().__init__()
        self._scale = [scale]  # a list of a private name is no attribute of a record
        self.layers = (nn.Sequential if as_one else lambda *layers: nn.ModuleList(layers))(
            *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self._scale[0]
        if isinstance(self.layers, nn.Sequential):
            return self.layers(x)
        for layer in self.layers:
            x = layer(x)
        return x


def in_a_row(make: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), make())


def test_layers_called_as_one_are_no_other_code_in_a_model_that_was_trained_again() -> None:
    found = refactored(lambda: in_a_row(InARow), lambda: trained_again(in_a_row(lambda: InARow(as_one=True))))
    assert "computation" not in {cause.kind for cause in found.causes}
    assert not found.possible


def called(*, keyword: bool = False, mask: bool = False) -> nn.Module:
    """Return a model that calls a child with its input by position or by keyword, and maybe with a mask."""
    given = {"mask": torch.linspace(0, 1, 8)} if mask else {}
    return Variant(lambda s, x: s.masked(x=x, **given) if keyword else s.masked(x, **given), masked=MaskAdded())


class MaskAdded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        inner = self.fc(x)
        return inner.tanh() if mask is None else (inner * (mask + torch.arange(8))).tanh()


def test_an_argument_by_keyword_is_no_other_code_in_a_model_that_was_trained_again() -> None:
    found = refactored(lambda: in_a_row(called), lambda: trained_again(in_a_row(lambda: called(keyword=True))))
    assert {cause.kind for cause in found.causes} == {"weights"}
    assert not found.possible


def test_who_gets_no_mask_any_more_is_not_to_blame_for_its_gradient() -> None:
    found = refactored(lambda: in_a_row(lambda: called(mask=True)), lambda: in_a_row(called))
    assert [(cause.kind, cause.layer) for cause in found.causes] == [("computation", "1")]
    assert cause_text(found.causes[0]) == "1: own code no longer gives masked mask"


def regularized(*, dropout: bool, detach: bool) -> nn.Module:
    """Return two layers, of which the second may get its input detached, and perhaps a dropout that does nothing."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        x = self.two(x.detach() if detach else x)
        return self.drop(x) if dropout else x

    more = {"drop": nn.Dropout(0.0)} if dropout else {}
    return nn.Sequential(Variant(forward, one=nn.Linear(8, 8), two=nn.Linear(8, 8), **more))


def test_a_gradient_that_is_cut_is_told_beside_a_removed_layer_that_did_nothing() -> None:
    old = functools.partial(regularized, dropout=True, detach=False)
    cut = refactored(old, lambda: trained_again(regularized(dropout=False, detach=True)))
    kept = refactored(old, lambda: trained_again(regularized(dropout=False, detach=False)))
    assert cause_text(cut.causes[0]) == "0: gradient cut between one and two"
    assert not any(cause.kind == "gradient" for cause in kept.causes)


def activated(*, layer: bool, norm: bool) -> nn.Module:
    """Return a layer that is activated, by a function or by a layer, and perhaps normalized."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.one(x)) if layer else nn.functional.gelu(self.one(x))
        return self.norm(x) if norm else x

    more = {"act": nn.GELU()} if layer else {}
    return nn.Sequential(Variant(forward, one=nn.Linear(8, 8), norm=nn.LayerNorm(8), **more))


def test_a_layer_that_is_no_longer_called_is_told_beside_an_added_one() -> None:
    old = functools.partial(activated, layer=False, norm=True)
    missing = refactored(old, lambda: trained_again(activated(layer=True, norm=False)))
    kept = refactored(old, lambda: trained_again(activated(layer=True, norm=True)))
    assert "0: own code no longer calls norm" in map(cause_text, missing.causes)
    assert not any(cause.kind == "computation" for cause in kept.causes)


class Router(nn.Module):
    """Gives each sample to one of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best = self.router(x).argmax(-1)
        y = torch.zeros_like(x)
        for i in best.unique().tolist():
            mine = (best == i).nonzero()[:, 0]
            y = y.index_add(0, mine, self.experts[i](x[mine]))
        return y


def test_a_router_with_other_weights_may_choose_another_expert() -> None:
    def choosing(expert: int) -> nn.Module:
        model = Router()
        with torch.no_grad():
            model.router.bias.zero_()[expert] = 50.0
        return model

    found = refactored(lambda: choosing(0), lambda: choosing(1))
    assert [cause.layer for cause in found.causes] == ["router"]
    assert [cause_text(cause) for cause in found.possible] == ["(root): own code no longer calls experts.0"]
    assert found.possible[0].hints == ("which of these layers it calls may depend on numbers that changed",)


def test_a_gradient_that_is_cut_is_told_beside_a_class_of_another_name() -> None:
    class Cut(Flagged):
        def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
            return self.fc(x.detach())

    def other() -> nn.Module:
        model = Scaling()
        model.b = Cut()
        return model

    found = diagnose(
        compare(
            *(recorded(PROBE.build(make), PROBE.randn(4, 8), alone=False) for make in (other, Scaling)),
        )
    )
    assert {cause.kind for cause in found.causes} == {"architecture", "gradient"}


# --- a refactoring that leaves the function as it was ---------------------------------------------------------------


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 4.0


def embedded(*, inside: bool) -> nn.Module:
    """Return a model that multiplies what its embedding gives out, or has an embedding that does."""
    embed, scale = (ScaledEmbedding(32, 8), 1.0) if inside else (nn.Embedding(32, 8), 4.0)
    return Variant(lambda s, ids: s.head(s.embed(ids) * scale), embed=embed, head=nn.Linear(8, 4))


def test_a_factor_that_moved_into_a_layer_leaves_the_output_unchanged() -> None:
    found = rewritten(lambda: embedded(inside=False), lambda: embedded(inside=True), IDS)
    assert found.unchanged
    assert first_line(found).startswith("output unchanged; structure differs in ")
    assert [cause.change for cause in found.causes] == [None] * len(found.causes)
    assert "behavior" not in {class_of(cause, found) for cause in (*found.causes, *found.possible)}


def test_without_gradients_what_moved_inside_may_be_hidden_and_is_no_unchanged_function() -> None:
    old, new = (
        recorded(PROBE.build(functools.partial(embedded, inside=inside)), IDS, loss=None) for inside in (False, True)
    )
    assert not diagnose(compare(new, old)).unchanged


def last_token(*, by_first: bool, scale: float = 1.0, **attributes: object) -> nn.Module:
    """Read the last token before the padding: found by the first that is padding, or by the last that is none."""
    layers = {"embed": nn.Embedding(32, 8), "read": Read(by_first=by_first, **attributes), "head": nn.Linear(8, 4)}
    return Variant(lambda s, ids: s.head(s.read(ids, s.embed(ids))) * scale, **layers)


class Read(nn.Module):
    def __init__(self, *, by_first: bool, **attributes: object) -> None:
        super().__init__()
        self._by_first = [by_first]
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        padding = (ids == 0).int()
        where = padding.argmax(-1) - 1 if self._by_first[0] else (torch.arange(ids.shape[1]) * (1 - padding)).argmax(-1)
        return x[torch.arange(len(ids)), where]


PADDED = torch.tensor([[1, 3, 2, 2, 0, 0], [3, 1, 1, 2, 3, 2]])


def test_code_that_answers_otherwise_alone_fails_though_the_run_shows_nothing() -> None:
    found = rewritten(lambda: last_token(by_first=True), lambda: last_token(by_first=False), PADDED)
    (cause,) = found.causes
    assert (cause.layer, cause.hints[-1]) == ("read", "not with the inputs of the run")
    assert first_line(found) == "output unchanged; code differs in 1 place: read: own code changed"


def test_an_attribute_has_no_effect_on_a_layer_that_gives_out_what_it_gave() -> None:
    found = rewritten(
        lambda: last_token(by_first=True, source="a"), lambda: last_token(by_first=False, source="b", scale=2.0), PADDED
    )
    told = {cause.layer: cause.change for cause in found.causes}
    assert told["read"] is None
    assert first_line(found).startswith("(root): own code changed after head: by ")


def projections(scale: float, shared: bool) -> nn.Module:
    """Of queries and keys; what both are made of is computed once, or for each by itself."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        given = x + 1
        queries = self.queries(given)
        return self.out(queries * self.keys(given if shared else x + 1))

    return Variant(forward, queries=Projection(scale), keys=nn.Linear(8, 8), out=nn.Linear(8, 8))


class Projection(nn.Linear):
    def __init__(self, scale: float) -> None:
        super().__init__(8, 8)
        self._scale = {"of outputs": scale}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self._scale["of outputs"]


@pytest.mark.parametrize("shared", [True, False], ids=["the same input", "another input"])
def test_a_layer_beside_gets_the_same_and_makes_up_for_nothing(shared: bool) -> None:
    def model(scale: float) -> nn.Module:
        return nn.Sequential(projections(scale, shared), nn.Linear(8, 8))

    found = rewritten(lambda: model(1.0), lambda: model(2.0), INPUTS[two])
    assert [(cause.layer, cause.hints) for cause in found.causes] == [("0.queries", ("scaled by 2",))]


def test_a_layer_that_grows_is_not_said_to_change_by_a_share() -> None:
    old, new = (functools.partial(nn.Sequential, nn.Linear(8, width), nn.ReLU()) for width in (4, 6))
    assert first_line(refactored(old, new)).startswith("0.weight (4, 8) → (6, 8): its output has another shape; ")


# --- a change of behavior beside a refactoring ---------------------------------------------------------------------


def unpacking(scale: float = 1.0, *, bare: bool) -> nn.Module:
    """Return a model whose child gives out a tensor, or a tuple with the tensor in it."""
    inner = Variant(lambda s, x: s.fc(x) * scale if bare else (s.fc(x) * scale, None), fc=nn.Linear(8, 8))

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x) if bare else self.inner(x)[0])

    return Variant(forward, inner=inner, head=nn.Linear(8, 8))


def test_an_output_with_another_name_does_not_excuse_the_code_that_makes_it() -> None:
    found = refactored(lambda: unpacking(bare=True), lambda: unpacking(2.0, bare=False))
    assert first_line(found).startswith("inner: own code changed after fc: by ")
    assert [cause_text(cause) for cause in found.causes] == ["inner: own code changed after fc"]
    assert [cause_text(note) for note in found.notes] == ["inner: output renamed to output[0]"]


class Attention(nn.Module):
    def __init__(self, *, bare: bool) -> None:
        super().__init__()
        self._bare = [bare]

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        out = (x @ x.T + mask).softmax(-1) @ x
        return out if self._bare[0] else (out, None)


class Masking(nn.Module):
    """Makes a causal mask, or one of a window besides; calls one child more or not."""

    def __init__(self, window: int, *, rotary: bool, bare: bool = True) -> None:
        super().__init__()
        if rotary:
            self.rotary = nn.Tanh()
        self.attn = Attention(bare=bare)
        self._window = [window]

    def forward(self, x: torch.Tensor, tidy: str | None = None) -> torch.Tensor:
        if hasattr(self, "rotary"):
            self.rotary(x)
        apart = torch.arange(len(x))[:, None] - torch.arange(len(x))
        mask = torch.zeros(len(x), len(x)).masked_fill((apart < 0) | (apart >= self._window[0]), -1e9)
        out = self.attn(x, mask)
        return out if isinstance(out, torch.Tensor) else out[0]


class Handing(nn.Module):
    def __init__(self, *args: Any, tidy: bool, **kwargs: Any) -> None:
        super().__init__()
        self.body = Masking(*args, **kwargs)
        self.head = nn.Linear(8, 8)
        self._given = [{"tidy": "yes"} if tidy else {}]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.head(x), **self._given[0]))


def test_where_no_sure_cause_has_a_size_the_possible_one_is_in_the_first_line() -> None:
    found = refactored(
        lambda: Handing(9, rotary=False, tidy=True), lambda: Handing(2, rotary=True, tidy=False, bare=False)
    )
    assert cause_text(found.causes[0]) == "(root): own code no longer gives body tidy"
    assert first_line(found).startswith("possibly body: ")
    assert "it does not get tidy now" in found.possible[0].hints
    assert ", 2 others without a known effect" in first_line(found)


# --- what is told of weights and of blocks that are shared ----------------------------------------------------------


def stages(*, shared: bool) -> nn.Module:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    return Variant(lambda s, x: s.second(s.first(x).relu()), first=first, second=first if shared else second)


def test_a_block_that_is_shared_now_is_said_to_be_the_other_one_again() -> None:
    apart, shared = (functools.partial(stages, shared=shared) for shared in (False, True))
    assert "second removed: it is first again" in {cause_text(cause) for cause in refactored(apart, shared).causes}
    assert "second added: Linear, it was first again" in {
        cause_text(cause) for cause in refactored(shared, apart).causes
    }


class Passing(nn.Module):
    """Hands a flag that nothing looks at to what is inside it."""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.fc, self.inside = nn.Linear(8, 8), nn.ModuleList(inside)
        self._given = [{}]

    def forward(self, x: torch.Tensor, flag: bool | None = None) -> torch.Tensor:
        for module in self.inside:
            x = module(x, **(self._given[0] or {"flag": flag}))
        return self.fc(x)


def test_an_argument_that_went_and_that_nobody_uses_is_noted_of_who_gave_it() -> None:
    def build(given: dict[str, bool]) -> nn.Module:
        model = Passing(Passing(Passing()))
        model._given = [given]
        return model

    found = refactored(lambda: build({"flag": True}), lambda: build({}))
    assert found.same
    assert "(root): own code no longer gives inside.0 flag" in map(cause_text, found.notes)


# --- what a container makes for its children ----------------------------------------------------------------------

TOKENS = PROBE.randint(3, 64, (2, 12))
LEFT_PADDED = torch.ones(2, 12, dtype=torch.long)
LEFT_PADDED[1, :4] = 0
MODELING = {
    transformers.LlamaForCausalLM: (transformers.models.llama.modeling_llama, "create_causal_mask"),
    transformers.MistralForCausalLM: (
        transformers.models.mistral.modeling_mistral,
        "create_sliding_window_causal_mask",
    ),
    transformers.BertModel: (transformers.models.bert.modeling_bert, "create_bidirectional_mask"),
}


def made(kind: Any, implementation: str = "eager") -> nn.Module:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = kind.config_class(
        **sizes, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32, sliding_window=4,
        use_cache=False, attn_implementation=implementation,
    )  # fmt: skip
    return PROBE.build(lambda: kind(config)).eval()


def without_padding(make: Any) -> Any:
    return lambda *args, **kwargs: make(*args, **{**kwargs, "attention_mask": None})


def another_window(make: Any) -> Any:
    def masked(**kwargs: Any) -> torch.Tensor:
        config = copy.copy(kwargs.pop("config"))
        config.sliding_window = 5
        return make(config=config, **kwargs)

    return masked


def diagnosed_mask(kind: Any, fault: Any, monkeypatch: Any, *, trained: bool = False, x: Any = None) -> Diagnosis:
    given = {"kwargs": {"attention_mask": LEFT_PADDED} if x is None else x}
    expected = recorded(made(kind), TOKENS, **given)
    module, maker = MODELING[kind]
    monkeypatch.setattr(module, maker, fault(getattr(module, maker)))
    model = made(kind)
    for parameter in model.parameters() if trained else ():
        parameter.data.copy_(parameter.flip(0) * 1.1 if parameter.std() > 0 else parameter + 0.1)
    return diagnose(compare(recorded(model, TOKENS, like=expected, **given), expected))


@pytest.mark.parametrize(
    ("kind", "fault", "trained"),
    [
        (transformers.LlamaForCausalLM, without_padding, False),
        (transformers.MistralForCausalLM, another_window, True),
    ],
    ids=["padding ignored", "window off by one"],
)
def test_a_mask_that_is_made_otherwise_is_named(
    kind: Any, fault: Any, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    diagnosis = diagnosed_mask(kind, fault, monkeypatch, trained=trained)
    line = first_line(diagnosis)
    assert line.startswith("model: builds another attention_mask (for layers.0); ")
    assert ("; the model's output changed by " in line) == (not trained)
    assert {cause.kind for cause in diagnosis.causes} == ({"computation", "weights"} if trained else {"computation"})


def test_a_mask_that_is_not_made_any_more_accuses_none_of_those_who_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosis = diagnosed_mask(transformers.BertModel, without_padding, monkeypatch)
    line = first_line(diagnosis)
    assert line.startswith("(root): own code no longer gives encoder attention_mask: the model's output changed by ")
    assert len(diagnosis.causes) == 1


class Biased(nn.Module):
    """Adds a bias to its scores if it is given one, and maybe does not look at it."""

    def __init__(self, *, used: bool = True, scale: float = 1.0) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self._used, self._scale = [used], [scale]

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        scores = x @ x.T * self._scale[0]
        scores = scores if bias is None or not self._used[0] else scores + bias
        return self.fc(scores.softmax(-1) @ x)


class Biasing(nn.Module):
    """Gives a child a bias by position, by keyword, None for it, or no second argument."""

    def __init__(self, given: str = "position", **options: Any) -> None:
        super().__init__()
        self.head, self.attn = nn.Linear(8, 8), Biased(**options)
        self._given = [given]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, bias = self.head(x), -9.0 * torch.ones(len(x), len(x)).triu(1)
        match self._given[0]:
            case "position":
                return self.attn(x, bias)
            case "keyword":
                return self.attn(x, bias=bias)
            case "none":
                return self.attn(x, None)
        return self.attn(x)


@pytest.mark.parametrize(
    ("then", "now", "told", "run"),
    [
        ("position", "none", "no longer gives attn input[1]", {}),
        ("keyword", "nothing", "no longer gives attn bias", {"loss": None}),
        ("nothing", "position", "gives attn input[1]", {"loss": None}),
    ],
)
def test_what_a_child_does_without_a_tensor_is_the_consequence_of_who_gave_it(
    then: str, now: str, told: str, run: Any
) -> None:
    old = recorded(PROBE.build(lambda: Biasing(then)), PROBE.randn(4, 8), **run)
    found = diagnose(compare(recorded(PROBE.build(lambda: Biasing(now)), PROBE.randn(4, 8), like=old, **run), old))
    assert first_line(found).startswith(f"(root): own code {told}: output of attn changed by ")
    assert [cause_text(cause) for cause in found.causes] == [f"(root): own code {told}"]


def test_a_tensor_that_was_not_used_does_not_excuse_the_code_that_got_it() -> None:
    found = refactored(lambda: Biasing(used=False), lambda: Biasing("none", used=False, scale=2.0))
    assert first_line(found).startswith("attn: own code changed before fc: ")


def windowed(mask: Callable[[torch.Tensor], torch.Tensor], attn: nn.Module | None = None) -> nn.Module:
    return Variant(lambda s, x: s.attn(x, mask=mask(x)), attn=attn or Masked())


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = x @ x.transpose(-1, -2)
        hidden = ~mask if mask.dtype == torch.bool else mask < 0
        return scores.masked_fill(hidden, -1e9).softmax(-1) @ self.v(x)


def seen(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


def diagnosed_pair(old: nn.Module, new: nn.Module, x: Any = None, **run: Any) -> Diagnosis:
    x = PROBE.randn(2, 6, 8) if x is None else x
    new.load_state_dict(old.state_dict())
    expected = recorded(old, x, **run)
    return diagnose(compare(recorded(new, x, like=expected, **run), expected))


def test_a_mask_in_another_dtype_is_not_said_to_be_another() -> None:
    def floats(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(6, 6).masked_fill(~seen(x), float("-inf"))

    assert diagnosed_pair(windowed(seen), windowed(floats)).same


def test_a_mask_in_another_dtype_that_masks_others_is_named() -> None:
    def others(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(6, 6).masked_fill(~seen(x).triu(-1), float("-inf"))

    line = first_line(diagnosed_pair(windowed(seen), windowed(others)))
    assert line.startswith(
        "(root): own code gives attn mask (6, 6) float32, not (6, 6) bool: the model's output changed by "
    )


def test_a_dtype_that_decides_what_a_mask_of_everything_does_is_the_cause() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            scores = self.q(x) @ x.transpose(-1, -2)
            weights = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
            return weights.softmax(-1).nan_to_num() @ x

    def floats(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(6, 6).masked_fill(~none_of_the_last(x), -1e9)

    def none_of_the_last(x: torch.Tensor) -> torch.Tensor:
        return seen(x) & (torch.arange(6) < 5)[:, None]

    line = first_line(diagnosed_pair(windowed(floats, Summed()), windowed(none_of_the_last, Summed())))
    assert line.startswith(
        "(root): own code gives attn mask (6, 6) bool, not (6, 6) float32: the model's output changed by "
    )


def test_positions_that_are_counted_otherwise_are_named() -> None:
    def counted(first: int) -> nn.Module:
        return Variant(lambda s, x: x + s.embed(torch.arange(x.shape[1]) + first), embed=nn.Embedding(8, 8))

    line = first_line(diagnosed_pair(counted(0), counted(1)))
    assert line.startswith("(root): builds another input (for embed); the model's output changed by ")


def two_layers(forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> Variant:
    return Variant(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("forward", "line", "trained"),
    [
        (
            lambda s, x: s.b(torch.cat([s.a(x), torch.ones(2, 1, 8)], 1)),
            "(root): own code gives b input (2, 7, 8) float32, not (2, 6, 8) float32",
            False,
        ),
        (
            lambda s, x: s.b(s.a(x)).double(),
            "(root): own code gives out (2, 6, 8) float64, not (2, 6, 8) float32",
            True,
        ),
        (lambda s, x: s.b(s.b(s.a(x))), "(root): own code calls b 2 times, not 1", True),
    ],
    ids=["a token more", "another dtype", "another call"],
)
def test_what_a_container_hands_on_in_another_shape_is_its_own_code(
    forward: Callable[[Any, torch.Tensor], torch.Tensor], line: str, trained: bool
) -> None:
    torch.manual_seed(0)
    old, new = two_layers(lambda s, x: s.b(s.a(x))), two_layers(forward)
    x = PROBE.randn(2, 6, 8)
    expected = recorded(old, x)
    new.load_state_dict({k: v.flip(0) * 1.1 if trained else v for k, v in old.state_dict().items()})
    diagnosis = diagnose(compare(recorded(new, x, like=expected), expected))
    if trained and "gives out" not in line:  # the size of weights is known, and that of another call is not
        assert first_line(diagnosis).startswith("a: weights changed by 144 % (weight, bias); ")
        assert line in text(diagnosis)
    else:
        assert line in first_line(diagnosis)
    assert not diagnosis.redrawn
    assert "built outside the seed" not in text(diagnosis)
    assert "∞" not in first_line(diagnosis)


def test_how_many_rows_are_chosen_may_be_a_matter_of_numbers() -> None:
    def chosen(s: Any, x: torch.Tensor) -> torch.Tensor:
        y = s.a(x)
        return s.b(y[y[..., 0] > 0.3]).sum(0)

    torch.manual_seed(0)
    old, new = two_layers(chosen), two_layers(chosen)
    new.load_state_dict({k: -v for k, v in old.state_dict().items()})
    x = PROBE.randn(2, 6, 8)
    expected = recorded(old, x)
    diagnosis = diagnose(compare(recorded(new, x, like=expected), expected))
    assert {kind for kind, _, _ in causes(diagnosis)} == {"weights"}
    assert not diagnosis.redrawn


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, is_causal: bool = True, output_attentions: bool = False) -> torch.Tensor:
        scores = x @ x.transpose(-1, -2)
        return (scores.tril() if is_causal else scores) @ self.v(x)


def test_false_for_what_is_true_by_default_is_the_caller_s_doing() -> None:
    diagnosis = diagnosed_pair(
        *(
            Variant(forward, attn=Causal())
            for forward in (lambda s, x: s.attn(x), lambda s, x: s.attn(x, is_causal=False))
        )
    )
    line = first_line(diagnosis)
    assert line.startswith("(root): own code gives attn is_causal False, not the default: output of attn changed by ")
    assert len(diagnosis.causes) == 1


def requesting(*, scale: float = 1.0, **arguments: Any) -> nn.Module:
    """Return a model that asks its child for what it may give out besides; the child's code follows."""
    return Variant(lambda s, x: s.inner(x, **arguments)[0], inner=Answering(scale))


class Answering(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self._scale = [scale]
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, with_weights: bool | None = None, twice: bool = False) -> Any:
        y = self.a(x) * self._scale[0]
        out = self.b(y + y if twice else y)
        return (out, y) if with_weights else (out,)


@pytest.mark.parametrize("then", [False, True])
def test_an_argument_that_requests_an_output_does_not_excuse_the_code_that_got_it(then: bool) -> None:
    diagnosis = diagnosed_pair(requesting(with_weights=then), requesting(scale=1.5))
    assert first_line(diagnosis).startswith("inner: own code changed between a and b: by ")
    asked = [cause for cause in diagnosis.causes if cause.layer == "(root)"]
    assert [(cause.change, cause.hints) for cause in asked] == [(None, ("the child answers the same, alone",))]
    assert not diagnosis.possible


def test_a_norm_computed_in_half_precision_is_rounding_and_another_epsilon_is_not() -> None:
    class Norm(nn.Module):
        def __init__(self, wide: bool, eps: float = 1e-6) -> None:
            super().__init__()
            self.how = types.SimpleNamespace(wide=wide, eps=eps)
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.float() if self.how.wide else x
            return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.how.eps)).to(x.dtype)

    x = PROBE.randn(2, 16, 64).bfloat16()
    norms = Norm(True), Norm(False), Norm(True, eps=1e-3)
    old, narrow, other = (nn.Sequential(norm, nn.Linear(64, 64)).bfloat16() for norm in norms)
    expected = recorded(old, x)
    expected = expected.live_run.measured(expected, expected)
    for model in (narrow, other):
        model.load_state_dict(old.state_dict())
    assert diagnose(compare(recorded(narrow, x, like=expected), expected)).comparison.same
    found = diagnose(compare(recorded(other, x, like=expected), expected))
    assert first_line(found).startswith("output unchanged within ")
    assert "; layer '0' (Norm): own code changed: by 0.0" in first_line(found)
    for model in (narrow, other):
        model.load_state_dict({k: v * 1.1 for k, v in old.state_dict().items()})
    named = [(c.layer, c.kind) for c in diagnose(compare(recorded(narrow, x, like=expected), expected)).causes]
    assert named == [("0", "weights"), ("1", "weights")]
    named = [(c.layer, c.kind) for c in diagnose(compare(recorded(other, x, like=expected), expected)).causes]
    assert ("0", "computation") in named


def by_moments(x: torch.Tensor) -> torch.Tensor:
    x = x + 12
    variance = x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square()
    return (x - x.mean(-1, keepdim=True)) / variance.sqrt()


def in_two_passes(x: torch.Tensor, eps: float = 0.0) -> torch.Tensor:
    x = x + 12 - (x + 12).mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def test_what_float32_rounds_is_no_cause_and_what_it_does_not_is_one() -> None:
    def written(code: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
        return Variant(lambda s, x: s.fc(code(x.float()).to(x.dtype)), fc=nn.Linear(64, 64))

    def model(code: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
        return PROBE.build(lambda: nn.Sequential(written(code), nn.Linear(64, 64))).bfloat16()

    x = PROBE.randn(2, 16, 64).bfloat16()
    for old, new in ((by_moments, in_two_passes), (in_two_passes, by_moments)):
        before, after = model(old), model(new)
        expected = recorded(before, x, loss=None)
        expected = expected.live_run.measured(expected, expected)
        diagnosis = diagnose(compare(recorded(after, x, like=expected, loss=None), expected))
        assert not [cause for cause in diagnosis.causes if cause.kind == "computation"], first_line(diagnosis)
    other = model(lambda x: in_two_passes(x, eps=1e-4))
    diagnosis = diagnose(compare(recorded(other, x, like=expected, loss=None), expected))
    assert "layer '0' (Variant): own code changed" in first_line(diagnosis)


def test_what_half_precision_rounds_away_to_the_last_bit_is_named() -> None:
    def residual(scale: float) -> nn.Module:
        return Variant(lambda s, x: x + scale * s.fc(x), fc=nn.Linear(64, 64))

    old, new = (
        PROBE.build(lambda scale=scale: nn.Sequential(residual(1.0), residual(scale))).bfloat16()
        for scale in (1.0, 1.001)
    )
    x = PROBE.randn(4, 64).bfloat16()
    expected, actual = PROBE.run(old, x), PROBE.run(new, x)
    assert_same_behavior(expected, PROBE.run(old, x))
    with pytest.raises(
        AssertionError, match=r"^output unchanged.*; layer '1' .*: own code changed after fc: by 0\.0"
    ) as e:
        assert_same_behavior(actual, expected)
    assert "The run does not show it: it is less than half precision can show, or not used." in str(e.value)


def work(run: Callable[[], object]) -> int:
    """Return how many functions are called."""
    times = 0

    def seen(frame: object, event: str, argument: object) -> None:
        nonlocal times
        times += event == "call"

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(before)
    return times


def row(layers: int, seed: int, width: int = 2) -> Record:
    """Return a record of many layers that one container calls."""
    torch.manual_seed(seed)
    sizes = [2, *[width] * (layers - 1), 2]
    model = nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(sizes)))
    with ModelProbe(device="cpu") as probe:
        return probe.run(model, torch.ones(2, 2), loss="random")


def test_twice_as_many_layers_take_no_more_than_twice_the_work() -> None:
    diagnose(compare(row(40, 1, 3), row(40, 0)))  # what is made once is made by now
    few, many = (compare(row(layers, 1, 3), row(layers, 0)) for layers in (40, 80))
    assert work(lambda: diagnose(many)) < 2.3 * work(lambda: diagnose(few))


@pytest.mark.parametrize("projections", [(0.0, 0.0), (3e-170, -4e-170)], ids=["sums cancel", "squares are 0"])
def test_the_same_tensor_has_no_hint_and_its_negative_is_flipped_however_small_its_projections(projections) -> None:
    numbers = Statistics(count=2, mean=1.0, min=1.0, max=1.0)
    same = Reading(statistics=numbers, fingerprint=projections)
    assert hints(same, same) == ()
    other = Reading(statistics=numbers, fingerprint=tuple(-p for p in projections))
    assert hints(other, same) == (("its sign flipped",) if any(projections) else ())
