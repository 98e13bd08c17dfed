"""Checks look at everything that a model returns, along the axes that are the batch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from pytest_modelprobe import ModelProbe, checks


class Model(nn.Module):
    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._forward = forward

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._forward(self, *inputs, **named)


# --- outputs that are no containers of tensors --------------------------------------------------------------------


def test_a_distribution_that_knows_of_later_positions_is_named(probe: ModelProbe) -> None:
    model = Model(lambda model, x: Categorical(logits=model.head(x).softmax(1)), head=nn.Linear(4, 4))
    assert checks.causal.outcome(probe, model, probe.randn(2, 6, 4)).layer == "(root)"


def test_a_distribution_that_mixes_the_batch_is_named(probe: ModelProbe) -> None:
    model = Model(lambda model, x: Categorical(logits=model.head(x).softmax(0)), head=nn.Linear(4, 4))
    assert checks.batch_independent.outcome(probe, model, probe.randn(3, 4)).layer == "(root)"


def test_an_output_that_cannot_be_looked_into_is_refused(probe: ModelProbe) -> None:
    model = Model(lambda model, x: (model.head(x), iter([model.head(x)])), head=nn.Linear(4, 4))
    assert checks.finite.outcome(probe, model, probe.randn(3, 4)).text == (
        "output[1] cannot be looked into (list_iterator): give out tensors, or wrap the model in a module that does"
    )


def test_inputs_inside_objects_are_copied_and_cut(probe: ModelProbe) -> None:
    class Batch:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    batch = Batch(probe.randn(4, 3))
    before = batch.x.clone()
    model = Model(lambda _, batch: batch.x.mul_(2).softmax(0))
    assert checks.batch_independent.outcome(probe, model, batch).layer == "(root)"
    assert torch.equal(batch.x, before)


# --- which axes are the batch's -----------------------------------------------------------------------------------


def test_an_axis_of_experts_as_long_as_the_batch_is_not_the_batch(probe: ModelProbe) -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights = model.gate(tokens).softmax(0)  # over the tokens of the batch, not the experts
        return sum(weights[:, i, None] * model.experts[i](tokens) for i in range(4)).view(*x.shape[:2], 5)

    model = Model(forward, gate=nn.Linear(3, 4), experts=nn.ModuleList([nn.Linear(3, 5) for _ in range(4)]))
    found = checks.batch_independent.outcome(probe, model, probe.randn(4, 6, 3))
    assert found.text.startswith("(root) mixes the batch: the first row changed by ")
    assert "gate" not in found.text


def test_a_mask_as_long_as_the_batch_is_left_as_it_is(probe: ModelProbe) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    model = Model(lambda model, x, mask: model.attention(x, x, x, attn_mask=mask)[0], attention=attention)
    inputs = probe.randn(4, 4, 8), torch.full((4, 4), -torch.inf).triu(1)
    assert checks.any_batch_size(probe, model, *inputs).text == "batches of 1, 4 and 5, in 3 values of 2 layers"
    assert checks.batch_independent.outcome(probe, model, *inputs).verdict == "holds"


def test_similarities_of_all_rows_with_all_are_not_mixed(probe: ModelProbe) -> None:
    model = Model(lambda model, x: model.fc(x) @ model.fc(x).T, fc=nn.Linear(3, 5))
    assert checks.batch_independent(probe, model, probe.randn(4, 3)).verdict == "holds"
    assert checks.any_batch_size(probe, model, probe.randn(4, 3)).verdict == "holds"
    model = Model(lambda model, x: (model.fc(x) @ model.fc(x).T).softmax(1), fc=nn.Linear(3, 5))
    assert checks.batch_independent.outcome(probe, model, probe.randn(4, 3)).layer == "(root)"


def test_a_model_of_one_batch_size_is_told(probe: ModelProbe) -> None:
    model = Model(lambda model, x: model.fc(x.view(4, 3)), fc=nn.Linear(3, 5))
    assert checks.batch_independent.outcome(probe, model, probe.randn(4, 3)).text == (
        "the model accepts no other batch size, which shows the axes of the batch"
    )


# --- what layers inside do ----------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Its bottleneck takes the mean of the batch away; what comes of it is small beside what goes past it."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.down, self.up, self.by = nn.Linear(6, 6), nn.Linear(6, 6), by
        self.bottleneck = Model(lambda _, h: h - h.mean(0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by * self.up(self.bottleneck(self.down(x)))


def test_a_bottleneck_that_mixes_the_batch_a_little_is_named(probe: ModelProbe) -> None:
    found = checks.batch_independent.outcome(probe, UNet(5e-5), probe.randn(4, 6))
    assert found.text.startswith("bottleneck mixes the batch: the first row changed by ")


def test_a_layer_that_depends_a_little_on_the_batch_size_is_named(probe: ModelProbe) -> None:
    found = checks.any_batch_size.outcome(probe, UNet(5e-5), probe.randn(4, 6))
    assert found.text.startswith("bottleneck depends on the batch size: the first row changed by ")


KEPT = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]])
MIXING: dict[str, tuple[Callable[..., Tensor], dict[str, Tensor]]] = {
    "mean over all tokens": (
        lambda model, x, mask: (model.fc(x) * mask[..., None]).sum(1) / mask.sum(),
        {"mask": KEPT},
    ),
    "any row that is masked": (
        lambda model, x, kept: (model.fc(x) * kept.all(0)[:, None]).sum(1),
        {"kept": KEPT.bool()},
    ),
    "greatest length": (lambda model, x, lengths: model.fc(x).sum(1) / lengths.max(), {"lengths": KEPT.sum(1)}),
}


@pytest.mark.parametrize("mixing", MIXING.values(), ids=MIXING)
def test_masks_and_lengths_that_mix_the_batch_are_named(
    probe: ModelProbe, mixing: tuple[Callable[..., Tensor], dict[str, Tensor]]
) -> None:
    code, named = mixing
    found = checks.batch_independent.outcome(probe, Model(code, fc=nn.Linear(4, 4)), probe.randn(4, 4, 4), **named)
    assert found.text.startswith("(root) mixes the batch: the ")


def test_rows_that_a_loss_compares_are_not_judged(probe: ModelProbe) -> None:
    model = Model(lambda model, x: model.norm(model.fc(x)).square().mean(),
                  fc=nn.Linear(3, 5), norm=Model(lambda _, h: h - h.mean(0)))  # fmt: skip
    found = checks.batch_independent.outcome(probe, model, probe.randn(4, 3))
    assert found.verdict == "not applicable"
    assert found.text.startswith("no output of the model is along the batch, and inside it norm output changed by ")


# --- a batch that is lost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [checks.batch_independent, checks.any_batch_size])
def test_a_batch_that_is_lost_is_not_judged(probe: ModelProbe, check: checks.Check) -> None:
    model = Model(lambda model, x: model.head(model.fc(x)[:1]), fc=nn.Linear(3, 5), head=nn.Linear(5, 2))
    found = check.outcome(probe, model, probe.randn(4, 3))
    assert found.text == "no output of the model has an axis of 4 rows: output (1, 2)"


def test_a_squeeze_that_takes_the_axis_of_one_row_is_named(probe: ModelProbe) -> None:
    model = Model(lambda model, x: model.head(x).squeeze(), head=nn.Linear(3, 2))
    found = checks.any_batch_size.outcome(probe, model, probe.randn(4, 3))
    assert found.layer == "(root)"
    assert "→ (2,)" in found.text


HEALTHY = {
    "loss": lambda model, x: model.fc(x).square().mean(),
    "loss and statistics": lambda model, x: (model.fc(x).square().mean(), model.fc(x).mean(0)),
    "rows and statistics": lambda model, x: (model.fc(x), model.fc(x).mean(0)),
    "rows and a constant": lambda model, x: (model.fc(x), model.fc.weight),
}


@pytest.mark.parametrize("forward", HEALTHY.values(), ids=HEALTHY)
def test_losses_statistics_and_constants_break_nothing(probe: ModelProbe, forward: Any) -> None:
    found = checks.any_batch_size.outcome(probe, Model(forward, fc=nn.Linear(3, 5)), probe.randn(4, 3))
    assert found.verdict != "broken"


def test_outputs_that_are_not_along_the_batch_are_told(probe: ModelProbe) -> None:
    model = Model(lambda model, x: (model.fc(x), model.fc.weight), fc=nn.Linear(3, 5))
    found = checks.any_batch_size(probe, model, probe.randn(4, 3))
    assert found.text == "batches of 1, 4 and 5, in 2 values of 2 layers; not along the batch: output[1] (5, 3)"


def test_a_model_of_one_output_a_row_in_a_list_is_not_judged(probe: ModelProbe) -> None:
    model = Model(lambda model, x: [{"box": row[:4], "score": row[4]} for row in model.fc(x)], fc=nn.Linear(3, 5))
    found = checks.batch_independent.outcome(probe, model, probe.randn(4, 3))
    shown = "output[0].box (4,), output[0].score (), output[1].box (4,) and 5 more"
    assert found.text == f"no output of the model has an axis of 4 rows: {shown}"


def test_integers_and_numbers_that_are_not_compared_are_told(probe: ModelProbe) -> None:
    x = probe.randn(4, 3)
    chosen = Model(lambda model, x: model.fc(x).argmax(-1), fc=nn.Linear(3, 5))
    assert checks.batch_independent(probe, chosen, x).text.endswith("; not compared, as integers: output")
    numbers = Model(lambda model, x: (model.fc(x), model.fc(x).softmax(0).tolist(), True), fc=nn.Linear(3, 5))
    said = "not looked at, as numbers of Python: output[1][0][0], output[1][0][1], output[1][0][2] and "
    assert said in checks.batch_independent(probe, numbers, x).text
    loss = Model(HEALTHY["loss"], fc=nn.Linear(3, 5))
    assert checks.batch_independent(probe, loss, x).text.endswith("; not along the batch: output ()")


# --- outputs along positions --------------------------------------------------------------------------------------

LEAKS: dict[str, Callable[[Tensor], Any]] = {
    "without the first": lambda o: o.softmax(1)[:, 1:],
    "a loss": lambda o: o.softmax(1).square().mean(),
}


@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS)
def test_a_model_of_which_no_output_is_along_the_positions_is_not_judged(
    probe: ModelProbe, leak: Callable[[Tensor], Any]
) -> None:
    found = checks.causal.outcome(
        probe, Model(lambda model, x: leak(model.fc(x)), fc=nn.Linear(4, 3)), probe.randn(2, 6, 4)
    )
    assert found.verdict == "not applicable"
    assert "no output of the model can be compared along an axis of 6 positions" in found.text
    assert found.text.endswith("what is inside agrees, in 1 layer")


def test_outputs_that_are_not_along_the_positions_are_told(probe: ModelProbe) -> None:
    model = Model(lambda model, x: (model.fc(x), model.fc(x).mean(1)), fc=nn.Linear(4, 3))
    found = checks.causal(probe, model, probe.randn(2, 6, 4))
    assert found.text == "2 layers at the first 3 and the first 2 of 6 positions; not looked at: output[1] (2, 3)"


def leaking(by: float) -> nn.Module:
    """Adds a little of what a layer takes over all positions."""

    def forward(model: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return model.fc(x) + by * model.norm(model.fc(x))

    return Model(forward, fc=nn.Linear(4, 4), norm=Model(lambda _, h: h - h.mean(1, keepdim=True)))


@pytest.mark.parametrize(
    ("check", "inputs", "said"),
    [
        (checks.causal, {}, "is not causal: the first 4 of 8 positions changed by "),
        (
            checks.padding_invariant,
            {"mask": torch.ones(3, 8)},
            "depends on masked positions: the first 6 of 8 positions ",
        ),
    ],
    ids=["causal", "padding_invariant"],
)
def test_a_little_of_other_positions_is_seen_in_double_precision(
    probe: ModelProbe, check: checks.Check, inputs: dict[str, Tensor], said: str
) -> None:
    x = probe.randn(3, 8, 4)
    found = check.outcome(probe, leaking(5e-5), x, **inputs)
    assert found.text.startswith(f"norm {said}")
    found = check.outcome(probe, leaking(1e-9), x, **inputs)
    assert found.verdict == "holds"
    assert "; layers inside differ, but the output agrees: first norm output, changed by " in found.text


def test_what_differs_inside_does_not_agree(probe: ModelProbe) -> None:
    norm = Model(lambda _, h: h - h.mean(1, keepdim=True))
    model = Model(lambda model, x, mask=None: model.norm(model.fc(x)).square().mean(), fc=nn.Linear(4, 4), norm=norm)
    found = checks.causal.outcome(probe, model, probe.randn(3, 8, 4))
    assert found.verdict == "not applicable"
    assert "single numbers alone; what is inside does not agree, first norm output, changed by " in found.text


# --- outputs of nothing -------------------------------------------------------------------------------------------


def test_where_nothing_is_given_out_nothing_holds(probe: ModelProbe) -> None:
    found = checks.deterministic.outcome(
        probe, Model(lambda model, x: model.fc(x)[:0], fc=nn.Linear(4, 3)), probe.randn(2, 6, 4)
    )
    assert found.verdict == "not applicable"
    assert found.text == "the model returns no tensor with elements: there is nothing to compare"
