"""What a check names: the layer that is wrong, for the reason that is right, and a copy of it only once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, assert_finite, checks

# --- copies -----------------------------------------------------------------------------------------------------------


class Closure(nn.Module):
    """Computes with its layer through a function that copies keep as it is, as the blocks of minGPT do."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = fc = nn.Linear(8, 8)
        self.f = lambda x: fc(x)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.f(x)
        return out


def test_a_copy_that_computes_with_the_original_is_not_the_fault_of_another_check(probe: ModelProbe) -> None:
    found = checks.dtype_parity.outcome(probe, nn.Sequential(Closure()), probe.randn(4, 8))
    assert found.text == "a copy of the model computes with 0.mlp.weight of the model itself: see copy_and_pickle"
    assert found.verdict == "not applicable"


def test_a_copy_that_computes_with_the_original_is_named(probe: ModelProbe) -> None:
    found = checks.copy_and_pickle.outcome(probe, probe.build(Closure), probe.randn(4, 8))
    assert found.text == (
        "mlp.weight is not copied: after copy.deepcopy the other model still computes with this one\n\n"
        "computed with\nmlp.weight\nmlp.bias\n\n"
        "Look for a function among the attributes of a module that holds a layer or a tensor, as a lambda does: it is "
        "not copied with them. A method uses what its own module has."
    )


def test_a_closure_over_a_weight_is_no_copy_though_the_numbers_agree(probe: ModelProbe) -> None:
    model = nn.Linear(8, 8)
    weight = model.weight
    model.forward = lambda x: x @ weight  # type: ignore[assignment, method-assign]
    found = checks.copy_and_pickle.outcome(probe, model, probe.randn(4, 8))
    assert found.layer == "weight"


class Drops(nn.Module):
    """Forgets a factor when it is copied."""

    factor = 1.0

    def __deepcopy__(self, memo: Any) -> Drops:
        return Drops()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_a_copy_that_computes_something_else_is_no_fault_of_the_dtype(probe: ModelProbe) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Drops())
    model[1].factor = 2.0  # type: ignore[assignment]
    found = checks.dtype_parity.outcome(probe, model, probe.randn(4, 8))
    assert found.text == "a copy of the model computes something else: see copy_and_pickle"
    assert checks.copy_and_pickle.outcome(probe, model, probe.randn(4, 8)).layer == "1"


def test_all_checks_that_are_broken_are_named_in_the_first_line(probe: ModelProbe) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(dim=0))
    model.extra = [nn.Linear(8, 8)]  # type: ignore[assignment]
    with pytest.raises(AssertionError) as error:
        checks.standard(probe, model, probe.randn(4, 8))
    assert str(error.value).partition("\n")[0] == (
        "extra[0] is a module (Linear) that the model has not registered; 3 checks of 25 broken: registered, "
        "batch_independent and any_batch_size; 15 hold, 7 are not applicable"
    )


def test_an_error_of_the_model_is_told_without_colors_and_with_what_follows(probe: ModelProbe) -> None:
    class Refuses(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise TypeError("\x1b[31mType-check error\x1b[0m in forward.\n\nParameter 'x' has 2 axes.\n")

    found = checks.deterministic.outcome(probe, Refuses(8, 8), probe.randn(4, 8))
    assert found.text == (
        "the model does not run on these inputs: (root) raised TypeError: Type-check error in forward. Parameter "
        "'x' has 2 axes."
    )


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Halves(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), head

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class Quantizer(nn.Module):
    """Moves its codes in each forward of training, as an average of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()
        self.register_buffer("codes", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.codes.copy_(0.5 * self.codes + x.detach().mean(0))
        out: Tensor = self.norm(x) * self.codes.clone()
        return out


def test_a_part_that_moves_its_buffer_is_named_of_a_checkpoint(probe: ModelProbe) -> None:
    found = checks.checkpoint_parity.outcome(probe, Halves(Quantizer()), probe.randn(4, 8))
    assert found.layer == "head"
    assert found.text.startswith(
        "head computes something else when a checkpoint runs it again: body.1.weight gets another gradient under "
        "checkpointing (not reentrant): "
    )


# --- modes ------------------------------------------------------------------------------------------------------------


class Router(nn.Module):
    """Returns what it computes and a loss, which is 0 in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes = self.project(x).tanh()
        return codes, codes.square().mean() if self.training else codes.new_zeros(())


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes, loss = self.router(x)
        return codes, loss


def test_a_loss_of_training_alone_is_no_other_mode(probe: ModelProbe) -> None:
    found = checks.modes_agree(probe, WithLoss(), probe.randn(4, 8))
    assert found.text == "3 layers"


# --- infinities -------------------------------------------------------------------------------------------------------


class MaskedLogits(nn.Linear):
    """Returns -inf on purpose, and others if its scale is too large."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x) * self.scale * self.scale
        return logits.masked_fill(torch.arange(self.out_features) > 1, -math.inf)


def test_an_infinity_that_is_meant_is_so_for_the_check_and_the_assertion(probe: ModelProbe) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), MaskedLogits(8, 4)), probe.randn(4, 8)
    assert checks.finite(probe, model, x).verdict == "holds"
    assert_finite(probe.run(model, x))
    model[1].scale = 1e30  # type: ignore[assignment]
    assert checks.finite.outcome(probe, model, x).verdict == "broken"
    with pytest.raises(AssertionError, match=r"layer '1' \(MaskedLogits\) is not finite"):
        assert_finite(probe.run(model, x))


# --- masks of chunks --------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention over its cache; ``rule`` says what its mask is of: the positions so far, a chunk, or pairs of them."""

    def __init__(self, rule: str) -> None:
        super().__init__()
        self.embed, self.qkv, self.out, self.rule = nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 9), rule

    def forward(self, ids: Tensor, mask: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        q, k, v = self.qkv(self.embed(ids)).chunk(3, -1)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        n, total = q.shape[1], k.shape[1]
        scores = (q @ k.mT).masked_fill(torch.ones(n, total).triu(total - n + 1) > 0, -math.inf)
        if self.rule == "so far":
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, -math.inf)
        if self.rule == "pairs":
            scores = scores + mask
        return self.out(scores.softmax(-1) @ v), (k, v)


def test_masks_of_all_positions_so_far_are_given(probe: ModelProbe) -> None:
    torch.manual_seed(0)
    found = checks.incremental(probe, Attention("so far"), probe.randint(0, 9, (2, 10)), torch.ones(2, 10))
    assert found.text == "4 layers in chunks of 5, 1, 2 and 2 positions, with masks of all positions so far"


def test_a_mask_of_queries_and_keys_is_cut_along_both(probe: ModelProbe) -> None:
    torch.manual_seed(0)
    model, ids = Attention("pairs"), probe.randint(0, 9, (2, 10))
    assert checks.incremental(probe, model, ids, probe.randn(10, 10)).verdict == "holds"
