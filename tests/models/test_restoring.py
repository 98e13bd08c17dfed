"""A model comes back from a `with preserved(model)` block as it went in."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pytest_modelprobe.models.restoring import preserved
from pytest_modelprobe.probe import Watch


def bits(tensor):
    """The bytes of a tensor's values, in logical order: NaN equals the same NaN."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).tolist()


def state(model):
    return {name: (id(t), t.dtype, t.stride(), bits(t)) for name, t in named_tensors(model)}


def named_tensors(model):
    return [*model.named_parameters(), *model.named_buffers()]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout()

    def forward(self, x):
        return self.drop(self.norm(self.linear(x)))


@pytest.mark.parametrize("swap", [False, True], ids=["data", "swap"])
def test_parameters_return_to_their_memory_after_a_conversion(swap):
    model = Net()
    before = state(model)
    memory = [t.data_ptr() for _, t in named_tensors(model)]
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        with preserved(model):
            model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert state(model) == before
    assert [t.data_ptr() for _, t in named_tensors(model)] == memory


def test_version_counters_do_not_move():
    model = Net()
    weight = model.linear.weight
    with torch.no_grad():
        weight.add_(1)
    version = weight._version
    with preserved(model):
        weight.data.mul_(2)
    assert weight._version == version


def test_a_buffer_that_joined_a_graph_leaves_it():
    model = nn.Linear(3, 3)
    model.register_buffer("ema", torch.zeros(3))
    with preserved(model):
        model.ema.add_(model.bias)
        assert model.ema.requires_grad
    assert not model.ema.requires_grad
    assert model.ema.is_leaf
    assert model.ema.tolist() == [0, 0, 0]


def test_shared_modules_and_tied_parameters_stay_shared():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model.append(model[0])
    model[1].weight = model[0].weight
    before = state(model)
    with preserved(model):
        model.double()
        model[0].weight.data.zero_()
    assert model[2] is model[0]
    assert model[1].weight is model[0].weight
    assert state(model) == before


def test_tensors_that_share_memory_share_it_afterwards():
    model = nn.Module()
    base = torch.arange(6.0)
    model.register_buffer("left", base[:4])
    model.register_buffer("right", base[2:])
    with preserved(model):
        model.left.zero_()
        model.double()
    assert model.right.tolist() == [2, 3, 4, 5]
    model.left[2] = 9
    assert model.right[0] == 9


def test_hooks_registered_meanwhile_go_and_hooks_removed_come_back_in_order():
    model = nn.Linear(3, 3)
    calls = []
    early = model.register_forward_hook(lambda *_, **__: calls.append("early"), with_kwargs=True)
    model.register_forward_hook(lambda *_: calls.append("later"))
    with preserved(model):
        early.remove()
        model.register_forward_hook(lambda *_, **__: calls.append("meanwhile"), with_kwargs=True)
        model.register_full_backward_hook(lambda *_: calls.append("backward"))
    model(torch.ones(1, 3).requires_grad_()).sum().backward()
    assert calls == ["early", "later"]


def test_the_hooks_of_a_watch_that_was_closed_meanwhile_stay_away():
    model = nn.Linear(3, 3)
    watch = Watch(model)
    with preserved(model):
        watch.close()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks_with_kwargs


ODD_TENSORS = {
    "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "expanded": torch.arange(8).expand(2, -1),
    "channels last": torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("tensor", ODD_TENSORS.values(), ids=ODD_TENSORS)
def test_any_buffer_comes_back_bit_for_bit(tensor):
    model = nn.Module()
    model.register_buffer("odd", tensor.clone(memory_format=torch.preserve_format))
    if tensor.stride() != model.odd.stride():
        model.odd = tensor
    before = state(model)
    with preserved(model):
        storage = model.odd.untyped_storage()
        for i in range(storage.nbytes()):
            storage[i] = 1
        model.odd = None
    assert state(model) == before


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_sequence_of_changes_is_undone(data):
    model = nn.Sequential(Net(), nn.Linear(3, 2))
    model(torch.ones(2, 3)).sum().backward()
    before, grads = state(model), [id(p.grad) for p in model.parameters()]
    changes = {
        "forward": lambda: model(torch.ones(2, 3, dtype=model[1].weight.dtype)),
        "backward": lambda: model(torch.ones(2, 3, dtype=model[1].weight.dtype)).sum().backward(),
        "double": model.double,
        "half": model.bfloat16,
        "eval": model.eval,
        "freeze": lambda: model[0].requires_grad_(False),
        "zero": lambda: [p.data.zero_() for p in model.parameters()],
        "zero_grad": model.zero_grad,
        "replace": lambda: setattr(model[1], "weight", nn.Parameter(torch.ones(2, 3))),
        "float": model.float,
    }
    with preserved(model):
        for name in data.draw(st.lists(st.sampled_from(sorted(changes)), max_size=6)):
            changes[name]()
            if name == "replace":
                model.float()
    assert state(model) == before
    assert [id(p.grad) for p in model.parameters()] == grads
    assert all(p.requires_grad for p in model.parameters())
    assert all(module.training for module in model.modules())


def test_memory_that_did_not_change_is_not_written(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(8)))
    model = nn.Module()
    mapped = np.memmap(path, mode="r")
    with warnings.catch_warnings(action="ignore"):  # "not writable": a write would end the process
        model.register_buffer("table", torch.from_numpy(mapped))
    with preserved(model):
        pass
    assert model.table.tolist() == list(range(8))


def test_a_state_within_another_has_memory_of_its_own():
    model = nn.Linear(3, 3)
    values = []
    for value in (1.0, 2.0, 3.0):  # the third takes the memory of one that ended
        with torch.no_grad():
            model.weight.fill_(value)
        with preserved(model), torch.no_grad():
            model.weight.fill_(value + 10)
            with preserved(model):
                model.weight.zero_()
            values.append(model.weight[0, 0].item())
        values.append(model.weight[0, 0].item())
    assert values == [11.0, 1.0, 12.0, 2.0, 13.0, 3.0]


def test_what_nothing_writes_to_is_not_copied():
    model = nn.Linear(3, 3)
    with preserved(model, unwritten=[model.bias]), torch.no_grad():
        model.weight.fill_(5)
        model.bias.fill_(5)
    assert not (model.weight == 5).any()
    assert (model.bias == 5).all()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_on_cuda_that_changed_is_put_back_and_no_other():
    model = nn.BatchNorm1d(3).cuda()
    before, version = state(model), model.weight._version
    with preserved(model):
        model(torch.randn(4, 3, device="cuda"))
    assert state(model) == before
    assert model.weight._version == version
