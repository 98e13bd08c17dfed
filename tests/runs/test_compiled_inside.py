"""``watch(compiled="inside")``: what a compiled model computes, as it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import ModelProbe, UsageError, Watch, assert_finite, assert_frozen, assert_params_updated
from pytest_modelprobe.runs import compiles_hooks

pytestmark = pytest.mark.usefixtures("_traced_hooks")


@pytest.fixture(autouse=True)
def _compiles_anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def graph_breaks() -> Callable[[], int]:
    counters = torch._dynamo.utils.counters
    counters.clear()
    return lambda: sum(counters["graph_break"].values())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.act, self.head = nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.act(self.fc(x)))}


class Small(nn.Module):
    """Has one layer, as each takes half a second to compile with its hook."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.fc(x)}


def train(model: nn.Module, call: Callable[..., Any], steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        call(torch.randn(4, 8, generator=inputs))["logits"].square().mean().backward()
        optimizer.step()


@pytest.fixture(scope="module", params=["eager", "aot_eager"])
def trained(request: pytest.FixtureRequest) -> Iterator[tuple[str, Net, Watch]]:
    """Return the backend, a model that was trained with it, without a break of the graph, and what was seen of it."""
    model = Net()
    with ModelProbe() as probe:
        watch = probe.watch(model, steps=2, compiled="inside")
        train(model, torch.compile(model, backend=request.param, fullgraph=True))
        yield request.param, model, watch


def test_the_numbers_are_those_of_an_eager_watch(modelprobe, trained):
    _, _, watch = trained
    eager = Net()
    expected = modelprobe.watch(eager, steps=2)
    train(eager, eager)
    for one, other in ((expected.record, watch.record), *zip(expected.steps, watch.steps, strict=True)):
        assert (one.forwards, one.backwards) == (other.forwards, other.backwards)
        for (layer, call), (same, seen) in zip(one.calls, other.calls, strict=True):
            assert (layer.name, call.started, call.finished) == (same.name, seen.started, seen.finished)
            for value, found in zip(call.outputs, seen.outputs, strict=True):
                assert (value.path, value.shape, value.dtype) == (found.path, found.shape, found.dtype)
                for a, b in ((value.statistics, found.statistics), (value.gradient, found.gradient)):
                    assert (a.count, a.zeros) == (b.count, b.zeros)
                    assert (a.mean, a.std, a.min, a.max) == pytest.approx(
                        (b.mean, b.std, b.min, b.max), abs=1e-6 * a.rms
                    )


def test_a_watched_step_is_the_compiled_one_bit_for_bit(trained):
    backend, watched, _ = trained
    unwatched = Net()
    train(unwatched, torch.compile(unwatched, backend=backend))
    for name, tensor in unwatched.state_dict().items():
        assert torch.equal(tensor, watched.state_dict()[name]), name


def test_nonfinite_elements_are_counted_apart(modelprobe):
    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.log()

    model = nn.Sequential(Log())
    watch = modelprobe.watch(model, compiled="inside")
    torch.compile(model, backend="eager")(torch.tensor([[-1.0, 0.0, 1.0, torch.inf]]))
    numbers = watch.record["0"].output.statistics
    assert (numbers.nan, numbers.neginf, numbers.posinf, numbers.zeros, numbers.finite) == (1, 1, 1, 1, 1)
    assert (numbers.min, numbers.max, numbers.mean) == (0, 0, 0)
    with pytest.raises(AssertionError, match="layer '0' \\(Log\\)"):
        assert_finite(watch)


def test_a_model_that_was_compiled_before_is_compiled_again_and_once_more_after_the_watch(modelprobe):
    model = Small()
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(4, 8))
    with modelprobe.watch(model, compiled="inside") as watch:
        compiled(torch.ones(4, 8))
    compiled(torch.ones(4, 8))
    assert watch.record.forwards == 1
    assert watch.record["fc"].output.statistics.count == 12
    assert not any(module._forward_hooks for module in model.modules())


# What torch warns of where a graph begins with a tensor that another graph computed.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_graph_break_of_the_user_loses_nothing(modelprobe, graph_breaks):
    class Broken(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            x = self[0](x)
            torch._dynamo.graph_break()
            return self[1](x)

    model = Broken(nn.Linear(8, 16), nn.Linear(16, 3))
    watch = modelprobe.watch(model, compiled="inside")
    torch.compile(model, backend="eager")(torch.ones(4, 8)).sum().backward()
    assert graph_breaks() == 1
    gradients = {name: layer.output.gradient.count for name, layer in watch.record.layers.items()}
    assert gradients == {"(root)": 12, "0": 64, "1": 12}


def test_an_error_of_the_user_arrives_and_the_next_forward_is_recorded(modelprobe):
    class Fussy(Small):
        fails = True

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            out = super().forward(x)
            if self.fails:
                raise ValueError("three")
            return out

    model = Fussy()
    watch = modelprobe.watch(model, compiled="inside")
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match="three"):
        compiled(torch.ones(4, 8))
    model.fails = False
    compiled(torch.ones(4, 8))
    assert watch.record["fc"].output.shape == (4, 3)
    assert watch.record.forwards == 1


def test_batches_of_several_sizes_add_up(modelprobe):
    model = Small()
    watch = modelprobe.watch(model, compiled="inside")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for size in (4, 6, 9):
        compiled(torch.ones(size, 8))
    assert watch.record["fc"].output.statistics.count == (4 + 6 + 9) * 3
    assert watch.record.forwards == 3


def test_calls_of_a_layer_in_one_forward_are_one(modelprobe):
    class Twice(Small):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.fc(x) + self.fc(2 * x)}

    model = Twice()
    watch = modelprobe.watch(model, compiled="inside")
    torch.compile(model, backend="eager", fullgraph=True)(torch.ones(4, 8))["logits"].sum().backward()
    (call,) = watch.record["fc"].calls
    assert (call.outputs[0].forward.tensors, call.outputs[0].backward.tensors) == (2, 2)
    assert (call.outputs[0].statistics.count, call.outputs[0].gradient.count) == (24, 24)


def test_steps_and_evaluations_are_apart(modelprobe):
    model = Small()
    watch = modelprobe.watch(model, steps=2, compiled="inside")
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        model.train()
        train(model, compiled, steps=1)
        model.eval()
        with torch.no_grad():
            compiled(torch.ones(4, 8))
    assert [(step.forwards, step.backwards) for step in watch.steps] == [(1, 1), (1, 1)]
    assert (watch.evaluations.forwards, watch.record.forwards, watch.record.backwards) == (3, 6, 3)
    assert_params_updated(watch)
    with pytest.raises(AssertionError, match="is not frozen"):
        assert_frozen(watch, layers="fc")


def test_forwards_of_accumulated_gradients_are_one_step(modelprobe):
    model = Small()
    watch = modelprobe.watch(model, compiled="inside")
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        compiled(torch.ones(4, 8))["logits"].sum().backward()
    optimizer.step()
    assert (watch.first_step.forwards, watch.first_step.backwards) == (2, 2)


def test_a_layer_that_is_not_compiled_is_recorded_too(modelprobe):
    model = Small()
    watch = modelprobe.watch(model, compiled="inside")
    model(torch.ones(4, 8))["logits"].sum().backward()
    assert watch.record["fc"].output.gradient.count == 12


def test_a_single_forward_is_refused(modelprobe):
    model = Small()
    watch = modelprobe.watch(model, compiled="inside")
    model(torch.ones(4, 8))
    with pytest.raises(UsageError) as error:
        _ = watch.first
    assert str(error.value) == (
        'Small has no first forward alone: inside compiled code (compiled="inside") forwards are added up. Take '
        "watch.record, watch.first_step or watch.steps"
    )


def test_what_needs_python_at_each_layer_is_refused(modelprobe):
    with pytest.raises(UsageError) as error:
        modelprobe.watch(Small(), compiled="inside", attention=True)
    assert str(error.value) == (
        'attention= needs Python at each layer, and compiled="inside" runs none there: leave one of them out'
    )
    with pytest.raises(UsageError, match="compiled is 'eager' or 'inside'; got 'yes'"):
        modelprobe.watch(Small(), compiled="yes")


def test_a_snapshot_of_it_is_refused(modelprobe, modelprobe_snapshot):
    model = Small()
    watch = modelprobe.watch(model, compiled="inside")
    model(torch.ones(4, 8))
    with pytest.raises(UsageError, match=r'the record of Small is of compiled code \(compiled="inside"\)'):
        assert watch.record == modelprobe_snapshot


def test_the_note_says_what_is_not_recorded():
    model = Small()
    with ModelProbe() as probe:
        watch = probe.watch(model, compiled="inside")
        torch.compile(model, backend="eager")(torch.ones(4, 8))
        (note,) = watch.record.notes
        assert note == (
            "compiled code ran as it is: outputs and their gradients have moments, ranges, zeros and non-finite "
            "values, all calls of a layer together; there are no inputs, no fingerprints and no ranges of units, and "
            "parameters have gradients in the steps that are kept"
        )


def test_a_model_on_several_devices_is_refused(modelprobe):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(UsageError) as error:
        modelprobe.watch(model, compiled="inside")
    assert str(error.value) == (
        'the model is on cpu and meta, and compiled="inside" adds up on one device: leave this option out, and the '
        "model runs eagerly while it is watched"
    )


def test_a_torch_that_compiles_no_hooks_on_tensors_is_named(modelprobe, monkeypatch):
    def refused(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Compilation of intermediate hooks requires compiled autograd")

    compiles_hooks.cache_clear()
    monkeypatch.setattr(torch, "compile", refused)
    try:
        with pytest.raises(UsageError) as error:
            modelprobe.watch(Small(), compiled="inside")
    finally:
        compiles_hooks.cache_clear()
    assert str(error.value) == (
        f'torch {torch.__version__} compiles no hooks on tensors, as compiled="inside" needs: take a newer one'
    )
