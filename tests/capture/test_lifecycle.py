"""The hooks come and go: nothing of ours stays behind, whatever happens, and nothing of ours follows a copy."""

import contextlib
import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from pytest_modelprobe import statistics
from pytest_modelprobe.exceptions import ModelProbeError
from pytest_modelprobe.probe import Watch


class Net(nn.Module):
    """Calls what a test puts into ``inside`` in the middle of its forward."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.view = nn.Unflatten(1, (2, 2))
        self.b = nn.Linear(2, 2)

    def forward(self, x):
        x = self.relu(self.a(x))
        for step in INSIDE:
            step()
        return self.b(self.view(x))


INSIDE = []


@pytest.fixture(autouse=True)
def nothing_inside():
    yield
    INSIDE.clear()


def hooks(model):
    """Every hook that is on a model's modules and parameters."""
    found = []
    for module in model.modules():
        for name, value in vars(module).items():
            if "hook" in name and isinstance(value, dict):
                found += [(name, key) for key in value]
    for parameter in model.parameters():
        found += [("accumulate", key) for key in parameter._post_accumulate_grad_hooks or ()]
        found += [("tensor", key) for key in parameter._backward_hooks or ()]
    return found


def interrupt():
    raise KeyboardInterrupt


def refuse():
    raise ValueError("no")


# --- detach ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [None, refuse, interrupt, pytest.fail], ids=["pass", "error", "interrupt", "fail"])
def test_no_hook_stays_on_modules_and_parameters(end):
    model = Net()
    INSIDE.extend([end] if end else [])
    with contextlib.suppress(ValueError, KeyboardInterrupt, pytest.fail.Exception), Watch(model):
        assert hooks(model)
        model(torch.randn(3, 4)).sum().backward()
    assert hooks(model) == []


def test_no_hook_stays_on_tensors_that_are_still_alive():
    model, x = Net(), torch.randn(3, 4, requires_grad=True)
    alive = [x]
    model.a.register_forward_hook(lambda module, args, output: alive.append(output))
    model.view.register_forward_hook(lambda module, args, output: alive.append(output))
    with Watch(model):
        out = model(x)
        alive.append(out)
        assert all(tensor._backward_hooks for tensor in alive)
    assert not any(tensor._backward_hooks for tensor in alive)
    out.sum().backward()


def test_hooks_in_a_graph_that_outlives_the_watch_let_go_of_it():
    model = Net()
    watch = Watch(model)
    out = model(torch.randn(3, 4))
    capture = weakref.ref(watch._capture)
    watch.close()
    del watch
    gc.collect()
    assert capture() is None
    out.sum().backward()


def test_closing_in_the_middle_of_a_forward_leaves_nothing():
    model = Net()
    watch = Watch(model)
    INSIDE.append(watch.close)
    model(torch.randn(3, 4)).sum().backward()
    assert hooks(model) == []
    assert watch.record.layers["b"].calls == ()


def test_a_backward_after_closing_is_not_recorded():
    model = Net()
    with Watch(model) as watch:
        out = model(torch.randn(3, 4))
    out.sum().backward()
    assert watch.record.backwards == 0


def test_dropping_the_last_reference_to_a_watch_takes_its_hooks_off():
    model = Net()
    watch = Watch(model)
    model(torch.randn(3, 4))
    del watch
    assert hooks(model) == []


def test_watches_that_end_inside_a_step_of_another_optimizer_let_it_go_on():
    model, watches = Net(), [Watch(Net()) for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls = (lambda *_: watches.clear(), lambda *_: gc.collect() and None)
    between = [register_optimizer_step_pre_hook(call) for call in calls]
    optimizer.step()
    for handle in between:
        handle.remove()
    with Watch(model) as watch:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert len(watch.steps) == 1
    assert not _global_optimizer_pre_hooks


def test_hooks_of_the_user_stay_and_keep_their_order():
    model, order = Net(), []
    model.a.register_forward_hook(lambda *_: order.append("before"))
    model.a.weight.register_hook(lambda gradient: order.append("gradient"))
    before = hooks(model)
    watch = Watch(model)
    model.a.register_forward_hook(lambda *_: order.append("after"))
    model.a.register_forward_pre_hook(lambda *_: order.append("pre"))
    during = hooks(model)
    watch.close()
    assert [hook for hook in hooks(model) if hook in before] == before
    assert len(hooks(model)) == len(before) + 2
    assert set(hooks(model)) < set(during)
    model(torch.randn(3, 4)).sum().backward()
    assert order == ["pre", "before", "after", "gradient"]


@pytest.mark.parametrize("failing", ["register_forward_hook", "register_forward_pre_hook"])
def test_an_attachment_that_fails_halfway_leaves_nothing(monkeypatch, failing):
    model = Net()
    monkeypatch.setattr(model.b, failing, None)
    with pytest.raises(TypeError):
        Watch(model)
    assert hooks(model) == []


# --- memory ---------------------------------------------------------------------------------------------------------


def objects_after(times, step):
    """How many objects there are more after so many steps than after a few."""
    for _ in range(3):
        step()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(times):
        step()
    gc.collect()
    return len(gc.get_objects()) - before


def test_hundreds_of_watches_leave_nothing_in_memory():
    model = Net()
    x = torch.randn(3, 4)

    def step():
        with Watch(model):
            pass

    def run():
        with Watch(model) as watch:
            model(x).sum().backward()
        assert watch.record.backwards == 1

    assert objects_after(300, step) < 50
    assert objects_after(20, run) < 50


@pytest.mark.parametrize("backward", [True, False])
def test_memory_is_flat_over_forwards(backward):
    model = Net()
    x = torch.randn(3, 4, requires_grad=True)

    def step():
        out = model(x)
        if backward:
            out.sum().backward()

    with Watch(model):
        assert objects_after(200, step) < 50


# --- a hook of ours that fails --------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_failing_hook_never_reaches_the_model(monkeypatch, direction):
    model, x = Net(), torch.randn(3, 4)
    expected = model(x)
    expected.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    def broken(*args, **kwargs):
        raise ArithmeticError("broken")

    watch = Watch(model)
    if direction == "forward":
        monkeypatch.setattr(statistics, "reduce", broken)
    out = model(x)
    monkeypatch.setattr(statistics, "reduce", broken)
    out.sum().backward()
    watch.close()
    monkeypatch.undo()
    assert torch.equal(out, expected)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    with pytest.raises(ModelProbeError, match=r"hook of the probe failed.*broken") as caught:
        watch.record  # noqa: B018
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert hooks(model) == []


# --- a call that was interrupted ------------------------------------------------------------------------------------


def test_a_forward_runs_on_while_another_thread_runs_a_backward():
    model = Net()
    with Watch(model) as watch:
        earlier = model(torch.randn(3, 4)).sum()
        thread = threading.Thread(target=earlier.backward)
        INSIDE.extend([thread.start, thread.join])
        model(torch.randn(3, 4))
    assert watch.last.layers["b"].calls[0].outputs
    assert watch.last.layers["(root)"].calls[0].outputs


# --- hooks that somebody took off -------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("kind", ["_forward_hooks", "_forward_pre_hooks"])
def test_hooks_that_somebody_took_off_are_missed(kind, closed):
    model, x = Net(), torch.randn(3, 4)
    watch = Watch(model)
    model(x)
    assert watch.record.forwards == 1
    getattr(model, kind).clear()
    setattr(model.b, kind, OrderedDict())
    model(x)
    if closed:
        watch.close()
    with pytest.raises(ModelProbeError) as caught:
        watch.record  # noqa: B018
    watch.close()
    assert str(caught.value) == (
        "the hooks of the probe were taken off (root) and 1 more, and what ran since was not seen: clear no dict of "
        "hooks while a model is watched, but call remove() of the handle that came with each hook"
    )


class Growing(nn.Module):
    def forward(self, x):
        if not hasattr(self, "head"):
            self.head = nn.Linear(4, 2)
        return self.head(x)


def other_head(model):
    model[2] = nn.Linear(4, 3)


def no_activation(model):
    del model[1]


CHANGES = {
    "replaced": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), other_head, "2"),
    "removed": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), no_activation, "1 and 2"),
    "added": (lambda: nn.Sequential(nn.Linear(4, 4)), lambda model: model.append(nn.ReLU()), "1"),
    "made in the first forward": (Growing, lambda model: None, "head"),
}


@pytest.mark.parametrize(("make", "change", "names"), CHANGES.values(), ids=CHANGES)
def test_layers_that_are_replaced_added_or_removed_are_noted(make, change, names):
    model, x = make(), torch.randn(3, 4)
    with Watch(model) as watch:
        if not isinstance(model, Growing):
            model(x)
            assert watch.record.notes == ()
        change(model)
        model(x)
    (note,) = watch.record.notes
    assert note == (
        f"{names}: replaced, added or removed while the model was watched; the record has the modules from before, so "
        "watch the model again after such a change"
    )


# --- copies ---------------------------------------------------------------------------------------------------------


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
    "AveragedModel": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_the_forwards_of_a_copy_are_not_recorded(make):
    model, x = Net(), torch.randn(3, 4)
    with Watch(model) as watch:
        other = make(model)
        assert torch.equal(other(x), model(x))
        other(x).sum().backward()
    assert watch.record.forwards == 1
    assert watch.record.backwards == 0


def test_a_model_saved_while_it_is_watched_loads_where_this_package_is_not_installed(tmp_path, monkeypatch):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    nn.init.ones_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    paths = [tmp_path / "itself", tmp_path / "copy", tmp_path / "deepcopy"]
    with Watch(model):
        for path, saved in zip(paths, (model, copy.copy(model), copy.deepcopy(model)), strict=True):
            torch.save(saved, path)
    assert not any(b"modelprobe" in path.read_bytes() for path in paths)
    for name in [name for name in sys.modules if name.startswith("pytest_modelprobe")]:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    loaded = [torch.load(path, weights_only=False) for path in paths]
    assert [one(torch.ones(1, 2)).tolist() for one in loaded] == [[[2.0, 2.0]]] * 3


def test_a_copy_can_be_watched_itself():
    model = Net()
    with Watch(model), Watch(copy.deepcopy(model)) as watch:
        watch.model(torch.randn(3, 4)).sum().backward()
    assert (watch.record.forwards, watch.record.backwards) == (1, 1)


def test_the_forward_of_a_shallow_copy_is_no_forward_of_the_model():
    model = nn.Linear(4, 2)
    with Watch(model) as watch:
        other = copy.copy(model)
        other(torch.randn(3, 4))
        assert watch.record.forwards == 0
        model(torch.randn(3, 4))
    assert watch.record.forwards == 1
    assert hooks(model) == hooks(other) == []


# --- deep graphs ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_forked")
def test_a_chain_of_60_000_hooked_tensors_is_freed_without_using_up_the_stack() -> None:
    # Of which torch 2.13 and newer free each on the stack of the next, once Python has seen its `grad_fn`.
    code = """
import torch
from pytest_modelprobe._torch import free_graphs, hook_tensor

def chain():
    x = torch.ones(1, requires_grad=True)
    hooks = []
    for number in range(60_000):
        x = x * 1
        hooks.append(hook_tensor(x, print, number))
    return x, hooks

x, hooks = chain()
free_graphs()
del x
free_graphs()
assert not any(hook() for hook in hooks)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
