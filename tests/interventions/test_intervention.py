"""`intervene`: what it changes, that a watch sees it, and that nothing of it stays."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_modelprobe import (
    UsageError,
    faults,
    intervene,
)
from pytest_modelprobe.comparison.compare import compare
from pytest_modelprobe.comparison.diagnosis import diagnose


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.fc1 = nn.Linear(8, 16)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


def net(modelprobe):
    return modelprobe.build(lambda: nn.Sequential(Block(), Block(), nn.Linear(8, 2)))


def hooks_of(model):
    return [hook for m in model.modules() for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]


def stored(record):
    """Return a record as a snapshot keeps it."""
    return record.live_run.measured(record, record)


def diagnosed(actual, expected):
    """Return the causes that a snapshot gives."""
    found = compare(actual, expected)
    actual = actual.live_run.isolated(actual, like=found.expected, names=found.names_before)
    return [(cause.kind, cause.layer) for cause in diagnose(compare(actual, expected)).causes]


# --- what it changes ----------------------------------------------------------------------------------------------


def test_an_output_is_what_the_function_returns():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with intervene(model, "0", output=lambda x: x + 1):
        assert model(torch.zeros(2)).tolist() == [1, 1]


def test_a_gradient_is_changed_where_it_arrives_at_the_output():
    x = torch.ones(3, requires_grad=True)
    with intervene(nn.Sequential(nn.ReLU()), "0", gradient=lambda g: g * 5) as intervention:
        intervention._root(x).sum().backward()
    assert x.grad.tolist() == [5, 5, 5]


def test_a_weight_is_changed_within_the_block_and_a_bias_is_not():
    model = nn.Linear(2, 1)
    nn.init.constant_(model.bias, 3.0)
    with intervene(model, "(root)", weight=faults.zero):
        assert model(torch.ones(1, 2)).item() == 3


def test_only_the_calls_asked_for_are_changed_in_each_forward():
    shared = nn.Identity()
    model = nn.Sequential(shared, nn.ReLU(), shared)
    with intervene(model, "0", output=lambda x: x * 10, calls=[1]) as intervention:
        assert [model(torch.ones(1)).item(), model(torch.ones(1)).item()] == [10, 10]
    assert intervention.fired == 2


def test_changes_of_one_layer_apply_in_the_order_in_which_their_blocks_began():
    model = nn.Sequential(nn.Identity())
    with intervene(model, "0", output=lambda x: x + 1), intervene(model, "0", output=lambda x: x * 10):
        assert model(torch.ones(1)).item() == 20


def test_integers_are_changed_where_there_is_nothing_else():
    model = nn.Sequential(nn.Embedding(4, 1))
    ids = torch.tensor([[0, 1], [2, 3]])
    plain = model(ids)
    with intervene(model, "0", input=faults.shuffle_batch):
        assert torch.equal(model(ids), plain.roll(1, 0))


class Cached(nn.Module):
    def forward(self, x, *, cache):
        cache.seen = x
        return x


class Cache:
    def __init__(self):
        self.seen = torch.zeros(2)


def test_an_object_among_the_inputs_stays_the_same():
    model, cache = Cached(), Cache()
    with intervene(model, "(root)", input=lambda x: x + 1):
        model(torch.ones(2), cache=cache)
    assert cache.seen.tolist() == [2, 2]


# --- a watch ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["watch", "intervention"])
def test_a_watch_sees_what_the_next_layer_sees(modelprobe, first):
    model = net(modelprobe)
    watch = modelprobe.watch(model) if first == "watch" else None
    with intervene(model, "1.fc1", output=lambda x: x * 0 + 100):
        watch = watch or modelprobe.watch(model)
        model(modelprobe.randn(4, 8))
    record = watch.record
    ((_, entered),) = record["1.act"].inputs
    assert record["1.fc1"].output.statistics.mean == entered.forward.statistics.mean == 100


def test_a_record_notes_the_intervention(modelprobe):
    model = net(modelprobe)
    with intervene(model, "*.fc1", output=faults.scale(2), weight=faults.zero):
        record = modelprobe.run(model, modelprobe.randn(4, 8))
    assert record.notes == ("intervention on 0.fc1 and 1 more: output=scale(2), weight=zero",)


# --- what names it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "kind"),
    [("input", "computation"), ("output", "computation"), ("gradient", "gradient"), ("weight", "weights")],
)
def test_a_snapshot_names_the_layer(modelprobe, what, kind):
    model = net(modelprobe)
    expected = stored(modelprobe.run(model, modelprobe.randn(4, 8), loss="random"))
    with intervene(model, "1.fc1", **{what: faults.scale(1.5)}):
        actual = modelprobe.run(model, modelprobe.randn(4, 8), loss="random")
        assert diagnosed(actual, expected) == [(kind, "1.fc1")]


def test_no_layer_is_called_alone_after_the_block(modelprobe):
    model = net(modelprobe)
    with intervene(model, "1.fc1", output=faults.scale(2)):
        record = modelprobe.run(model, modelprobe.randn(4, 8))
    assert record.live_run.isolated(record).notes[1] == (
        "no layer was called alone: the model or an input was changed after the run: compare the record before that"
    )


# --- nothing stays ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["input", "weight"])
def test_no_hook_and_no_changed_bit_stays_after_an_error(modelprobe, what):
    model = net(modelprobe)
    before, plain = copy.deepcopy(model.state_dict()), model(modelprobe.randn(4, 8))
    with pytest.raises(ZeroDivisionError), intervene(model, "**", **{what: faults.scale(2)}):
        model(modelprobe.randn(4, 8))
        raise ZeroDivisionError
    assert hooks_of(model) == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(modelprobe.randn(4, 8)), plain)


def test_weights_are_unchanged_where_the_function_fails_at_the_second_one():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match=r"^1\.weight became a tensor of another shape: \(2, 2\), not \(3, 2\)$"):
        intervene(model, ["0", "1"], weight=lambda w: w[:2] * 0).__enter__()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert hooks_of(model) == []


def test_weights_get_their_bits_back_after_a_step_of_an_optimizer():
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, float("nan"))
    before = model.weight.detach().numpy().tobytes()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with intervene(model, "(root)", weight=faults.zero):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert model.weight.detach().numpy().tobytes() == before


def test_a_block_within_itself_is_refused_and_no_hook_stays():
    model = nn.Sequential(nn.ReLU())
    block = intervene(model, "0", output=faults.zero)
    with pytest.raises(UsageError) as error, block, block:
        pass
    assert str(error.value) == (
        "layer '0' (ReLU): output=zero has begun and not ended: call intervene again for another block"
    )
    assert hooks_of(model) == []


def test_a_tied_weight_is_changed_once_and_restored():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    before = model[0].weight.detach().clone()
    with intervene(model, ["0", "1"], weight=faults.scale(3)):
        model(torch.ones(1, 2))
        assert torch.equal(model[1].weight, 3 * before)
    assert torch.equal(model[1].weight, before)


def test_inference_tensors_are_changed_and_restored():
    with torch.inference_mode():
        model = nn.Linear(2, 2)
        before = model.weight.clone()
    with intervene(model, "(root)", weight=faults.zero), torch.inference_mode():
        model(torch.ones(1, 2))
        assert not model.weight.any()
    assert torch.equal(model.weight, before)


def test_random_generators_stay_where_they_are():
    model, before = nn.Sequential(nn.Linear(2, 2)), torch.get_rng_state()
    with intervene(model, "0", output=faults.noise(1.0), weight=faults.noise(0.1)):
        model(torch.ones(1, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_copy_of_the_model_has_no_intervention():
    model = nn.Sequential(nn.Identity())
    with intervene(model, "0", output=faults.zero):
        model(torch.ones(1))
        other, file = copy.deepcopy(model), io.BytesIO()
        torch.save(model, file)
        assert other(torch.ones(1)).item() == 1
    assert other(torch.ones(1)).item() == 1


# --- one that never fires -----------------------------------------------------------------------------------------


class Idle(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize(
    ("given", "forwards", "message"),
    [
        (
            {"layers": "used", "output": faults.nan},
            0,
            "used: output=nan never fired: no forward ran in the block: call the model inside it",
        ),
        (
            {"layers": "idle", "output": faults.nan},
            2,
            "idle: output=nan never fired: not called in 2 forwards: record.table() has the layers that are",
        ),
        (
            {"layers": "used", "input": faults.zero, "calls": [1, 7]},
            1,
            "used: input=zero never fired: a forward calls it 1 time, from 0, and calls= is [1, 7]",
        ),
        (
            {"layers": "used", "gradient": faults.zero},
            1,
            "used: gradient=zero never fired: no backward reached its output: call loss.backward() inside the block",
        ),
        (
            {"layers": "used", "weight": faults.zero},
            0,
            "used: weight=zero never fired: no forward ran in the block: call the model inside it",
        ),
    ],
)
def test_one_that_never_fires_is_an_error(given, forwards, message):
    model = Idle()
    with pytest.raises(UsageError) as error, intervene(model, **given):
        for _ in range(forwards):
            model(torch.ones(1, 2))
    assert str(error.value) == message
    assert hooks_of(model) == []


def test_an_exception_in_the_block_is_not_replaced():
    with pytest.raises(ZeroDivisionError), intervene(Idle(), "used", output=faults.nan):
        raise ZeroDivisionError


# --- misuse -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "nothing to change: give input=, output=, gradient= or weight="),
        ({"weight": faults.zero, "calls": [0]}, "weight= changes weights for the whole block: leave out calls="),
    ],
)
def test_misuse_is_told_before_anything_runs(given, message):
    with pytest.raises(UsageError) as error:
        intervene(Idle(), "used", **given)
    assert str(error.value) == message


def test_a_layer_without_weights_is_told():
    with (
        pytest.raises(UsageError, match=r"^layer '1' \(ReLU\) has no weight of its own"),
        intervene(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "1", weight=faults.zero),
    ):
        pass


def test_a_function_that_returns_nothing_is_told():
    model = nn.Sequential(nn.Identity())
    with (
        pytest.raises(UsageError, match=r"^0: output= returned NoneType: return the tensor to use instead$"),
        intervene(model, "0", output=lambda x: None),
    ):
        model(torch.ones(1))


# --- checkpointing ------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, *, times):
        super().__init__()
        self.fc, self.times = nn.Linear(2, 2), times

    def forward(self, x):
        for _ in range(self.times):
            x = checkpoint(self.fc, x, use_reentrant=False)
        return x


def test_a_recomputed_call_is_changed_as_the_first_time():
    model = Checkpointed(times=1)
    with intervene(model, "fc", output=faults.scale(3), calls=[0]):
        model(torch.ones(1, 2)).sum().backward()
    assert model.fc.bias.grad.tolist() == [3, 3]


def test_recomputed_calls_that_cannot_be_told_apart_are_refused():
    model = Checkpointed(times=2)
    with (
        pytest.raises(UsageError, match="fc is called 2 times in a forward, and again in the backward"),
        intervene(model, "fc", output=faults.scale(3), calls=[0]),
    ):
        model(torch.ones(1, 2)).sum().backward()
