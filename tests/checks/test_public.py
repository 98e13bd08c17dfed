"""What checks say of classes of public packages: each test has the part of the class that was judged wrongly."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, checks

# --- checkpoints ------------------------------------------------------------------------------------------------------


class Positions(nn.Module):
    """Needs the shape of its input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.spatial = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.spatial(torch.ones(len(x), 8))
        return out


class Contextual(nn.Module):
    """Writes into what it gave to a child, after the call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Linear(8, 8), Positions()
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * 1
        positions = self.positions(x)
        x += positions
        out: Tensor = self.head(x)
        return out


def test_signal_jepa_contextual_of_braindecode_writes_into_what_a_part_took(probe: ModelProbe) -> None:
    found = checks.checkpoint_parity.outcome(probe, Contextual(), probe.randn(4, 8))
    assert found.layer == "positions"
    assert found.text.startswith(
        "positions cannot be checkpointed (not reentrant): RuntimeError: one of the variables needed"
    )


ORDERS = itertools.cycle([1, -1])


class Scaled(torch.autograd.Function):
    """Adds up the gradient of its scale in another order each time, as a kernel on several threads may."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, scale = ctx.saved_tensors
        terms = (gradient * x).flatten().unbind()
        return gradient * scale, functools.reduce(torch.add, terms[:: next(ORDERS)])


class Canceled(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.ones(())), norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(Scaled.apply(x, self.scale))  # type: ignore[no-untyped-call]
        return out


def test_a_scale_of_ctnet_of_braindecode_that_the_next_norm_cancels_is_rounded(probe: ModelProbe) -> None:
    model = nn.Sequential(nn.Linear(8, 64), Canceled(nn.LayerNorm(64, eps=3e-5)), nn.Linear(64, 2))
    assert checks.checkpoint_parity(probe, model, probe.randn(16, 8)).verdict == "holds"


class Streams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return image + self.image(image + text), text + self.text(image)


class TwoStreams(nn.Module):
    """Uses one of the two outputs of its last block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Streams(), Streams()]), nn.Linear(8, 2)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        for block in self.blocks:
            image, text = block(image, text)
        out: Tensor = self.head(image)
        return out


def test_zeros_for_none_in_qwen_image_control_net_model_of_diffusers_are_no_gradient(probe: ModelProbe) -> None:
    outcome = checks.checkpoint_parity(probe, TwoStreams(), probe.randn(4, 8), probe.randn(4, 8))
    assert outcome.text == "10 parameters, 2 modules checkpointed, reentrant and not"


# --- parts ------------------------------------------------------------------------------------------------------------


class MaskedLinear(nn.Linear):
    def __init__(self, mask: Tensor) -> None:
        super().__init__(*mask.shape[::-1])
        self.register_buffer("mask", mask.data)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.mask, self.bias)


class AutoRegressive(nn.Module):
    """Keeps the masks that its layers register, and one that nothing registers."""

    def __init__(self) -> None:
        super().__init__()
        self.masks, self.mask_skip = [torch.ones(8, 8).tril(), torch.ones(4, 8)], torch.ones(4, 8)
        self.layers = nn.Sequential(*map(MaskedLinear, self.masks))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x) + nn.functional.linear(x, self.mask_skip)
        return out


def test_masks_of_conditional_auto_regressive_nn_of_pyro_that_layers_register_are_registered(probe: ModelProbe) -> None:
    found = checks.registered.outcome(probe, AutoRegressive(), probe.randn(4, 8))
    assert found.text.startswith(
        "mask_skip is a tensor that the model has not registered\n\nwhere       what\nmask_skip   a tensor\n\n"
    )


class Attending(nn.Module):
    """Has an attention that torch computes in a fast path, which rounds otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


@pytest.mark.parametrize("name", ["copy_and_pickle", "state_dict_round_trip"])
def test_the_attention_of_signal_jepa_contextual_of_braindecode_is_copied(probe: ModelProbe, name: str) -> None:
    check: Any = getattr(checks, name)
    assert check(probe, Attending(), probe.randn(4, 4, 64)).verdict == "holds"


class Scaling(Attending):
    """Loses in a copy what is no parameter and no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(())

    def __deepcopy__(self, memo: dict[int, Any]) -> Scaling:
        other = Scaling()
        other.load_state_dict(self.state_dict())
        return other

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def test_a_copy_that_loses_one_bit_beside_such_an_attention_is_found(probe: ModelProbe) -> None:
    model = Scaling()
    model.scale += torch.finfo(torch.float32).eps
    found = checks.copy_and_pickle.outcome(probe, model.eval(), probe.randn(4, 4, 64))
    assert found.text.startswith("(root) differs after copy.deepcopy: output changed by ")


# --- dtypes -----------------------------------------------------------------------------------------------------------


ONE = math.log(math.exp(1 - 1e-3) - 1)


class Flow(nn.Module):
    """Returns a log determinant that is zero but for rounding."""

    def __init__(self, lost: float = 0.0) -> None:
        super().__init__()
        self.diagonal, self.linear, self.lost = nn.Parameter(torch.full((6,), ONE)), nn.Linear(6, 6), lost

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        diagonal = nn.functional.softplus(self.diagonal) + 1e-3
        return self.linear(x) * diagonal, diagonal.log().sum() * torch.ones(len(x)).to(x) + self.lost * self.error(x)

    def error(self, x: Tensor) -> Tensor:
        return (1 + 1e-9 * x[:, 0]) - 1 - 1e-9 * x[:, 0]


def test_a_log_determinant_of_lu_linear_permute_of_normflows_is_zero_but_for_rounding(probe: ModelProbe) -> None:
    assert checks.dtype_parity(probe, Flow(), probe.randn(8, 6)).verdict == "holds"
    assert checks.dtype_parity.outcome(probe, Flow(), probe.randn(8, 6), tolerance=1e-3).verdict == "broken"


def test_a_log_determinant_that_loses_all_digits_on_its_way_is_named(probe: ModelProbe) -> None:
    found = checks.dtype_parity.outcome(probe, Flow(lost=1e4), probe.randn(8, 6))
    assert found.text.startswith("(root) returns another output[1] in float64: changed by ")


class Standardized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True))


def test_what_amplifies_the_rounding_of_its_inputs_is_named(probe: ModelProbe) -> None:
    found = checks.dtype_parity.outcome(probe, Standardized(6, 2), 1 + 1e-6 * probe.randn(8, 6))
    assert found.text.startswith("(root) returns another output in float64: changed by ")


# --- inputs -----------------------------------------------------------------------------------------------------------


class Channels(nn.Module):
    """Has ReLUs that are dead for two of its four channels, unless these are several times larger; may refuse those."""

    def __init__(self, most: float = float("inf")) -> None:
        super().__init__()
        self.most = most
        self.convs, self.head = nn.Sequential(nn.Conv1d(4, 8, 5, groups=2), nn.ReLU()), nn.Linear(8, 2)
        with torch.no_grad():
            assert self.convs[0].bias is not None
            self.convs[0].bias[:4] = -4.0

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > self.most:
            raise ValueError("out of range")
        out: Tensor = self.head(self.convs(x).mean(-1))
        return out


def test_channels_of_sleep_stager_blanco_2020_of_braindecode_before_dead_relus_are_used(probe: ModelProbe) -> None:
    torch.manual_seed(0)
    outcome = checks.inputs_used(probe, Channels(), probe.randn(4, 4, 50))
    assert outcome.text == "1 input; positions 0 to 1 of 4 along axis 1 of input by larger values alone"


def test_that_larger_values_are_refused_does_not_say_that_these_are_used(probe: ModelProbe) -> None:
    torch.manual_seed(0)
    found = checks.inputs_used.outcome(probe, Channels(most=6.0), probe.randn(4, 4, 50))
    assert found.text.startswith("input is not used at positions 0 to 1 of 4 along axis 1: no gradient arrives there, ")
