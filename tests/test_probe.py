"""`ModelProbe` and `Watch`: running, watching, what they refuse, and that a run leaves no trace."""

from __future__ import annotations

import copy
import gc
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetModel,
)

from pytest_modelprobe import (
    ModelProbe,
    NothingObservedError,
    SelectionError,
    UnsupportedModelError,
    UsageError,
    assert_finite,
    assert_grad_flow,
)
from pytest_modelprobe.capture import capture
from pytest_modelprobe.record import IsolatedResponse, LiveRun, Reading, Record
from pytest_modelprobe.runs.fakes import architecture
from pytest_modelprobe.statistics import collect, reduce


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.drop(F.relu(self.norm(self.conv(x)))).mean((2, 3)))


@pytest.fixture
def probe() -> ModelProbe:
    return ModelProbe()


@pytest.fixture
def net(probe: ModelProbe) -> Net:
    return probe.build(Net)


def output_mean(record: Record, layer: str = "(root)") -> float | None:
    statistics = record.layers[layer].calls[0].outputs[0].forward.statistics
    return statistics.mean if statistics else None


def everything(model: nn.Module) -> dict[str, Any]:
    """Return all that a run might have changed, comparable."""
    tensors = {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    return {
        "tensors": {n: t.numpy().tobytes() for n, t in tensors.items()},
        "identities": [id(t) for t in (*model.parameters(), *model.buffers())],
        "gradients": [None if p.grad is None else (id(p.grad), p.grad.numpy().tobytes()) for p in model.parameters()],
        "training": [m.training for m in model.modules()],
        "plain": [{k: v for k, v in vars(m).items() if isinstance(v, int)} for m in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "random": torch.get_rng_state().numpy().tobytes(),
    }


# --- run ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "eval", None])
@pytest.mark.parametrize("loss", [None, "random", lambda out: out.sum()], ids=["no loss", "random", "sum"])
def test_a_run_leaves_no_trace(probe: ModelProbe, net: Net, mode: Any, loss: Any) -> None:
    net(probe.randn(2, 1, 8, 8)).sum().backward()  # gradients that are there before
    before = everything(net)
    probe.run(net, probe.randn(2, 1, 8, 8), loss=loss, mode=mode)
    assert everything(net) == before


def test_a_run_that_raises_leaves_no_trace(probe: ModelProbe, net: Net) -> None:
    before = everything(net)
    with pytest.raises(RuntimeError, match="expected input"):
        probe.run(net, probe.randn(2, 3, 8, 8), mode="train")
    assert everything(net) == before


def test_a_run_does_not_change_its_inputs(probe: ModelProbe) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    probe.run(nn.Sequential(nn.ReLU(inplace=True)), torch.full((2,), -1.0))
    y = torch.full((2,), -1.0)
    probe.run(nn.ReLU(inplace=True), y)
    assert y.tolist() == [-1.0, -1.0]
    probe.run(nn.Linear(3, 1), x, loss="random")
    assert x.grad is None


def test_two_runs_give_the_same_record_in_train_mode_too(probe: ModelProbe, net: Net) -> None:
    first = probe.run(net, probe.randn(4, 1, 8, 8), loss="random", mode="train")
    torch.rand(7)
    second = probe.run(net, probe.randn(4, 1, 8, 8), loss="random", mode="train")
    assert first == second
    assert first.layers["drop"].calls[0].random is not None


def test_a_run_starts_without_gradients(probe: ModelProbe) -> None:
    model = nn.Linear(2, 1)
    model.weight.grad = torch.full_like(model.weight, 100.0)
    seen = []

    def loss(output: torch.Tensor) -> torch.Tensor:
        seen.append(model.weight.grad)
        return output.sum()

    probe.run(model, torch.ones(1, 2), loss=loss)
    assert seen == [None]
    assert model.weight.grad.tolist() == [[100.0, 100.0]]


def test_keywords_reach_the_model_also_those_that_run_takes(probe: ModelProbe) -> None:
    class Keywords(nn.Module):
        def forward(self, *, x: torch.Tensor, mode: str, loss: float = 0.0) -> torch.Tensor:
            return x + loss if mode == "add" else x

    record = probe.run(Keywords(), x=torch.ones(2), kwargs={"mode": "add", "loss": 2.0})
    assert output_mean(record) == 3.0
    assert record.layers["(root)"].calls[0].arguments == {"mode": "add", "loss": 2.0}


def test_a_loss_works_under_no_grad(probe: ModelProbe) -> None:
    with torch.no_grad():
        assert probe.run(nn.Linear(3, 1), torch.ones(2, 3), loss="random").backwards == 1


def test_every_floating_output_has_a_part_in_the_random_loss(probe: ModelProbe) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"a": self.a(x), "b": [self.b(x), torch.arange(3)]}

    record = probe.run(Two(), torch.ones(1, 2), loss="random")
    assert all(p.gradient for layer in record.layers.values() for p in layer.parameters)


def test_keep_holds_the_tensors_of_the_newest_run(probe: ModelProbe) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    probe.run(model, torch.ones(4, 2), keep="1")
    (kept,) = probe.kept["1"]
    assert torch.equal(kept, model(torch.ones(4, 2)))
    assert not kept.requires_grad
    probe.run(model, torch.ones(4, 2))
    assert probe.kept == {}


# --- watch --------------------------------------------------------------------------------------------------------


def test_a_watch_changes_nothing_and_sees_everything(probe: ModelProbe) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    twin = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    twin.load_state_dict(model.state_dict())
    watch = probe.watch(model)
    for m in (model, twin):
        optimizer = torch.optim.Adam(m.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            m(torch.full((3, 2), float(step))).pow(2).mean().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert (watch.record.forwards, watch.record.backwards) == (5, 5)
    statistics = watch.record.layers["(root)"].calls[0].inputs[0].forward.statistics
    assert statistics is not None
    assert (statistics.count, statistics.min, statistics.max, statistics.mean) == (30, 0.0, 4.0, 2.0)


# --- the record of the only run or watch --------------------------------------------------------------------------


def test_the_record_is_that_of_the_only_run(probe: ModelProbe) -> None:
    record = probe.run(nn.Linear(2, 2), torch.ones(1, 2))
    assert probe.record is record


def test_without_a_run_the_record_is_an_explained_error(probe: ModelProbe) -> None:
    with pytest.raises(NothingObservedError, match=r"nothing was observed: call modelprobe\.run\(model, \.\.\.\), or"):
        _ = probe.record


def test_with_two_watches_the_record_is_an_explained_error(probe: ModelProbe) -> None:
    probe.watch(nn.Linear(2, 2), name="a")
    probe.watch(nn.Linear(2, 2), name="b")
    with pytest.raises(UsageError, match=r"2 runs and watches were made \(a, b\): say which, by asserting on"):
        _ = probe.record


# --- architecture -------------------------------------------------------------------------------------------------


def test_the_architecture_of_a_model_on_meta_has_shapes() -> None:
    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=1024, intermediate_size=2048, num_attention_heads=8, vocab_size=32000
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    record = ModelProbe().architecture(model, input_ids=torch.zeros(2, 16, dtype=torch.int64), use_cache=False)
    assert record.notes == ()
    assert record.layers["lm_head"].calls[0].outputs[0].shape == (2, 16, 32000)
    mlp = record.layers["model.layers.1.mlp"].calls[0]
    assert mlp.inputs[0].source == "model.layers.1.post_attention_layernorm output"
    assert all(p.is_meta for p in model.parameters())
    assert not any("Fake" in type(v).__name__ for m in model.modules() for v in vars(m).values())


def test_the_architecture_agrees_with_a_run(probe: ModelProbe) -> None:
    model = probe.build(lambda: ResNetModel(ResNetConfig(depths=[1, 1], hidden_sizes=[8, 16], embedding_size=8)))
    x = probe.randn(2, 3, 32, 32)
    real, fake = probe.run(model, x), probe.architecture(model, x)

    def shapes(record: Record) -> dict[str, list[Any]]:
        return {n: [v.shape for c in layer.calls for v in c.outputs] for n, layer in record.layers.items()}

    assert shapes(real) == shapes(fake)
    assert fake.layers["(root)"].calls[0].outputs[0].forward.reason == "fake tensor"


def test_a_forward_that_needs_contents_gives_structure_and_the_reason(probe: ModelProbe) -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) if x.sum().item() > 0 else x

    record = probe.architecture(Branch(), torch.ones(1, 2))
    assert list(record.layers) == ["(root)", "fc"]
    assert record.forwards == 0
    assert record.notes[0].startswith("structure without shapes: the forward cannot run on fake tensors (DataDependent")


def test_without_inputs_the_architecture_is_the_structure(probe: ModelProbe) -> None:
    record = probe.architecture(nn.Linear(2, 3))
    assert [p.shape for p in record.layers["(root)"].parameters] == [(3, 2), (3,)]


# --- what is refused ----------------------------------------------------------------------------------------------

BAD_MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "function": (lambda: lambda x: x, "a model is a torch.nn.Module; got function: wrap the function in a module"),
    "number": (lambda: 3, "a model is a torch.nn.Module; got int"),
    "class": (lambda: Net, r"Net is the class, not a model: give an instance, Net\(\.\.\.\)"),
    "parallel": (lambda: nn.DataParallel(nn.Linear(1, 1)), "DataParallel runs copies .* give model.module"),
}


@pytest.mark.parametrize("call", ["run", "watch", "architecture"])
@pytest.mark.parametrize("kind", BAD_MODELS)
def test_what_cannot_be_probed_is_refused_with_a_sentence(probe: ModelProbe, kind: str, call: str) -> None:
    make, message = BAD_MODELS[kind]
    with pytest.raises(UnsupportedModelError, match=message):
        getattr(probe, call)(make())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out: out, r"loss\(output\) returned a tensor of shape \(3, 2\): reduce it to a scalar"),
        (lambda out: out.sum().item(), r"loss\(output\) returns a scalar tensor; got float"),
        (
            lambda out: out.sum().detach(),
            r"loss\(output\) has no gradient: it was detached, computed under no_grad, or of a part",
        ),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused(probe: ModelProbe, loss: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        probe.run(nn.Linear(2, 2), torch.ones(3, 2), loss=loss)


def test_another_word_for_loss_or_mode_is_refused(probe: ModelProbe) -> None:
    with pytest.raises(UsageError, match="mode is 'train', 'eval' or None for the model's own; got 'test'"):
        probe.run(nn.Linear(2, 2), torch.ones(3, 2), mode="test")
    with pytest.raises(UsageError, match="loss is a function of the output, 'random' or None; got 'sum'"):
        probe.run(nn.Linear(2, 2), torch.ones(3, 2), loss="sum")


def test_a_selector_that_matches_nothing_is_refused(probe: ModelProbe) -> None:
    for call in (probe.watch, lambda m, **k: probe.run(m, torch.ones(1, 1, 8, 8), **k)):
        with pytest.raises(SelectionError, match=r"'covn' .*conv"):
            call(Net(), layers="covn")


def test_a_model_without_numbers_cannot_run(probe: ModelProbe) -> None:
    with pytest.raises(UnsupportedModelError, match=r"the model is on the meta device .* modelprobe\.architecture"):
        probe.run(nn.Linear(2, 2, device="meta"), torch.ones(1, 2))


def test_inputs_on_another_device_are_named(probe: ModelProbe) -> None:
    model = nn.Linear(2, 2)
    probe.watch(model)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 2, device="meta"))
    assert caught.value.__notes__ == [
        "raised in (root) (Linear), inputs (1, 2) float32 meta",
        "input is on meta, (root) on cpu: move one with .to('cpu')",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_missing_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="device 'cuda:9' cannot be used here: "):
        ModelProbe("cuda:9")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda probe: ModelProbe(seed="x"), "a seed is an integer; got 'x'"),
        (lambda probe: probe.run(nn.LazyLinear(2), torch.ones(1, 2)), "the model is lazy and has seen no input: call"),
        (lambda probe: probe.randn("3"), r"a shape is integers, randn\(2, 3\) or randn\(\(2, 3\)\); got \('3',\)"),
        (lambda probe: probe.run(nn.Linear(2, 2), torch.ones(1, 2, device="meta")), "an input is on the meta device"),
        (
            lambda probe: probe.run(nn.Linear(2, 2), torch.ones(1, 2), loss=lambda out: out.sum().to(torch.complex64)),
            "loss.output. is complex",
        ),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(probe: ModelProbe, call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(probe)


@pytest.mark.parametrize("loss", [None, "random", lambda out: sum(out[1]).sum()], ids=["none", "random", "function"])
def test_an_output_that_cannot_be_looked_into_is_an_error(probe: ModelProbe, loss: Any) -> None:
    class Opaque(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return y, (row for row in y)

    with pytest.raises(UsageError) as error:
        probe.run(Opaque(2, 2), torch.ones(1, 2), loss=loss)
    assert str(error.value) == (
        "output[1] cannot be looked into (generator): give out tensors, or wrap the model in a module that does"
    )


def test_an_output_that_cannot_be_looked_into_is_noted_by_a_watch(probe: ModelProbe) -> None:
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return iter(self.fc(x))

    model = Opaque()
    watch = probe.watch(model)
    sum(model(torch.ones(1, 2))).sum().backward()
    assert watch.record.notes[0].startswith("(root): output cannot be looked into (tuple_iterator): give out tensors,")
    with pytest.raises(NothingObservedError, match=r"tuple_iterator.*, or leave \(root\) out of layers=$"):
        assert_finite(watch)
    assert_finite(watch, layers="fc")
    assert_grad_flow(watch)


def test_a_record_is_made_anew_after_an_optimizers_step(probe: ModelProbe) -> None:
    model = nn.Linear(2, 2)
    watch = probe.watch(model)
    model(torch.ones(1, 2)).sum().backward()
    before = watch.record
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert watch.record["(root)"].parameters[0].reading != before["(root)"].parameters[0].reading


# --- parameters before, buffers after -----------------------------------------------------------------------------


def test_buffers_are_recorded_as_they_were_before_the_run_and_after(probe: ModelProbe) -> None:
    record = probe.run(nn.BatchNorm1d(3), torch.full((4, 3), 2.0), mode="train")
    mean, var, count = record["(root)"].buffers
    assert (mean.reading, mean.after) == (reading_of(torch.zeros(3)), reading_of(torch.full((3,), 0.2)))
    assert (var.reading, var.after) == (reading_of(torch.ones(3)), reading_of(torch.full((3,), 0.9)))
    assert count.after == reading_of(torch.tensor(1))


def test_parameters_that_the_forward_writes_to_are_recorded_before_and_after(probe: ModelProbe) -> None:
    class Clamp(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(max=0.0)
            return super().forward(x)

    model = Clamp(2, 2)
    nn.init.ones_(model.weight)
    weight, bias = probe.run(model, torch.ones(1, 2))["(root)"].parameters
    assert (weight.reading, weight.after) == (reading_of(torch.ones(2, 2)), reading_of(torch.zeros(2, 2)))
    assert bias.after is None


class Noting(nn.Module):
    """Keeps results in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls, self.losses = 2.0, 0, [0.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        self.calls += 1
        self.last = float(y.sum())
        self.losses.append(self.last)
        return y


def test_what_a_forward_sets_is_no_attribute(probe: ModelProbe) -> None:
    model = nn.Sequential(Noting())
    assert probe.run(model, torch.ones(3))["0"].attributes == {"scale": 2.0}
    model(torch.ones(3))  # so that a run finds what it sets
    assert probe.run(model, torch.ones(3))["0"].attributes == {"scale": 2.0}


def test_a_watch_tells_of_attributes_that_the_test_sets_and_not_of_those_that_a_forward_sets(probe: ModelProbe) -> None:
    model = nn.Sequential(Noting())
    watch = probe.watch(model)
    model(torch.ones(3))
    model[0].scale = 3.0
    model(torch.ones(3))
    assert watch.record["0"].attributes == {"scale": 3.0}


def owned_by(record: Record) -> list[Reading]:
    return [p.reading for layer in record.layers.values() for p in (*layer.parameters, *layer.buffers)]


def descend(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(12.0).reshape(4, 3)).pow(2).sum().backward()
        optimizer.step()


def test_a_record_tells_of_a_parameter_that_took_the_place_of_another(probe: ModelProbe) -> None:
    model = nn.Linear(3, 2)
    watch = probe.watch(model)
    model(torch.ones(4, 3))
    assert watch.record.forwards == 1
    with torch.no_grad():
        model.weight += 1
    model.bias = nn.Parameter(torch.ones(2))
    assert owned_by(watch.record) == [reading_of(p) for p in model.parameters()]


def test_the_first_forward_of_a_watch_has_the_weights_from_before_the_training(probe: ModelProbe) -> None:
    model = nn.Linear(3, 2)
    before = [reading_of(p.detach().clone()) for p in model.parameters()]
    watch = probe.watch(model)
    descend(model)
    assert owned_by(watch.first) == before
    now = [reading_of(p) for p in model.parameters()]
    assert now != before
    assert owned_by(watch.record) == owned_by(watch.last) == now


def test_the_first_forward_of_a_watch_has_the_buffers_that_it_left(probe: ModelProbe) -> None:
    model = nn.BatchNorm1d(3)
    once = copy.deepcopy(model)
    descend(once, steps=1)
    watch = probe.watch(model)
    descend(model)
    assert [b.reading for b in watch.first["(root)"].buffers] == [reading_of(b) for b in once.buffers()]


def test_weights_are_read_before_a_step_that_calls_the_model_itself(probe: ModelProbe) -> None:
    model = nn.Linear(3, 2)
    before = [reading_of(p.detach().clone()) for p in model.parameters()]
    optimizer = torch.optim.LBFGS(model.parameters())
    watch = probe.watch(model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert watch.first.forwards == 1
    assert owned_by(watch.first) == before


def test_weights_are_read_once_however_long_the_training(probe: ModelProbe, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 2)
    read: list[object] = []
    monkeypatch.setattr(capture, "read_parameters", lambda *_: read.append(_) or {})
    watch = probe.watch(model)
    descend(model, steps=3)
    assert (watch._capture.observed.count, len(read)) == (3, 1)


def reading_of(tensor: torch.Tensor) -> Reading:
    (reading,) = collect([reduce(tensor)])
    return reading


# --- more asked of a record ---------------------------------------------------------------------------------------


def live_run(record: Record) -> LiveRun:
    assert record.live_run is not None
    return record.live_run


def responses(record: Record) -> list[IsolatedResponse | None]:
    return [call.response for _, call in record.calls]


def test_a_record_can_be_asked_for_the_responses_of_single_layers(probe: ModelProbe, net: Net) -> None:
    record = probe.run(net, probe.randn(2, 1, 8, 8), loss="random")
    assert responses(record) == [None] * len(record.calls)
    isolated = live_run(record).isolated(record)
    assert all(isolated.layers[name].calls[0].response for name in ("(root)", "conv", "norm", "drop", "head"))
    assert live_run(record).isolated(record) == isolated


def test_synthetic_tensors_are_made_as_in_the_responses_of_another_record(probe: ModelProbe) -> None:
    model = probe.build(lambda: nn.Linear(4, 2))
    small, large = (probe.run(model, probe.randn(8, 4) * scale) for scale in (1, 100))
    like = live_run(small).isolated(small)
    assert responses(live_run(large).isolated(large)) != responses(like)
    assert responses(live_run(large).isolated(large, like)) == responses(like)


def test_without_isolation_no_layer_is_called_alone(probe: ModelProbe, net: Net) -> None:
    record = probe.run(net, probe.randn(2, 1, 8, 8), isolate=False)
    assert live_run(record).isolated(record) is record
    assert live_run(record).measured(record).noise == "measured"


def test_asking_more_leaves_no_trace(probe: ModelProbe, net: Net) -> None:
    net(probe.randn(2, 1, 8, 8)).sum().backward()
    before = everything(net)
    record = probe.run(net, probe.randn(2, 1, 8, 8), loss="random", mode="eval")
    live_run(record).measured(record, record)
    assert everything(net) == before


def test_a_record_that_is_stored_or_copied_can_ask_for_no_more(probe: ModelProbe) -> None:
    record = probe.run(nn.Linear(2, 2), torch.ones(1, 2))
    for copied in (pickle.loads(pickle.dumps(record)), copy.deepcopy(record), Record.from_dict(record.to_dict())):
        assert copied.live_run is None
        assert copied == record


def test_models_of_earlier_runs_are_not_kept(probe: ModelProbe) -> None:
    records = [probe.run(nn.Linear(2, 2), torch.ones(1, 2)) for _ in range(4)]
    gc.collect()
    because = "the model is gone: keep it in a variable until the record is compared"
    assert live_run(records[0]).isolated(records[0]).notes == (f"no layer was called alone: {because}",)
    assert live_run(records[0]).measured(records[0]).notes == (f"no noise was measured: {because}",)
    assert live_run(records[-1]).measured(records[-1]).noise == "measured"


def test_a_closed_probe_keeps_neither_models_nor_inputs() -> None:
    def run() -> tuple[Record, list[weakref.ref[Any]]]:
        with ModelProbe() as probe:
            model, x = nn.Linear(2, 2), torch.ones(1, 2)
            record = probe.run(model, x, loss=lambda out: model.weight.sum() + out.sum())
        return record, [weakref.ref(model), weakref.ref(x)]

    record, gone = run()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    forgotten = "the probe of the record is closed or gone, or made 8 runs since: compare the record before that"
    assert live_run(record).measured(record).notes == (f"no noise was measured: {forgotten}",)
    assert live_run(record).isolated(record).notes == (f"no layer was called alone: {forgotten}",)


def tensors_of(record: Record) -> list[torch.Tensor]:
    """Every tensor that can be reached from a record."""
    found: dict[int, Any] = {}
    todo: list[Any] = [record]
    while todo:
        one = todo.pop()
        if id(one) not in found and not isinstance(one, (type, types.ModuleType)):
            found[id(one)] = one
            todo += gc.get_referents(one)
    return [one for one in found.values() if isinstance(one, torch.Tensor)]


def test_no_tensor_can_be_reached_from_a_record(probe: ModelProbe, net: Net) -> None:
    record = probe.run(net, probe.randn(2, 1, 8, 8), loss="random")
    assert tensors_of(record) == []
    assert tensors_of(live_run(record).measured(record, record)) == []


def write_silently(net: Net, x: torch.Tensor) -> None:
    net.conv.weight.data.add_(1e-3)


def write_to_an_input(net: Net, x: torch.Tensor) -> None:
    x.add_(1.0)


def train(net: Net, x: torch.Tensor) -> None:
    net.train(not net.training)


def set_an_attribute(net: Net, x: torch.Tensor) -> None:
    net.norm.eps = 1e-3


@pytest.mark.parametrize(
    "change",
    [write_silently, write_to_an_input, train, set_an_attribute],
    ids=lambda change: change.__name__,
)
def test_of_a_model_that_was_changed_nothing_is_measured(
    probe: ModelProbe, net: Net, change: Callable[[Net, torch.Tensor], None]
) -> None:
    x = probe.randn(2, 1, 8, 8)
    record = probe.run(net, x, loss="random")
    change(net, x)
    measured = live_run(record).measured(record, record)
    because = "the model or an input was changed after the run: compare the record before that"
    assert measured.notes == (f"no layer was called alone: {because}", f"no noise was measured: {because}")
    assert responses(measured) == [None] * len(measured.calls)
    assert measured.noise is None


# Before torch 2.11, transformers asks for the address of a weight, which a fake has not.
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_the_architecture_of_a_mixture_of_experts_has_shapes() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MixtralConfig(vocab_size=50, num_hidden_layers=1, num_local_experts=4, **sizes)
    model = MixtralForCausalLM(config)
    record = architecture(model, torch.zeros(2, 6, dtype=torch.long))
    assert not record.notes
    assert record["model.layers.0.mlp.experts"].output.shape == (12, 8)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="torch has no grouped products")
@pytest.mark.parametrize(
    ("a", "b", "groups"), [((6, 16), (3, 16, 8), 3), ((3, 6, 16), (3, 16, 8), 0), ((8, 16), (16, 8), 2)]
)
def test_a_grouped_product_on_fakes_is_of_the_shape_of_a_real_one(
    a: tuple[int, ...], b: tuple[int, ...], groups: int
) -> None:
    class Grouped(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
            return torch._grouped_mm(x, y, offs=ends)

    ends = torch.tensor([(i + 1) * 2 for i in range(groups)], dtype=torch.int32) if groups else None
    x, y = torch.ones(a), torch.ones(b)
    real = Grouped()(x, y, ends)
    output = architecture(Grouped(), x, y, ends)["(root)"].output
    assert (output.shape, output.dtype) == (tuple(real.shape), "float32")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_the_architecture_is_without_shapes_where_an_input_has_no_fake(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout)
    (note,) = architecture(nn.Linear(4, 3), nested).notes
    assert note.startswith("structure without shapes: the forward cannot run on fake tensors (")
