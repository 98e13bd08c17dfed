"""Records of a watch: each layer called alone as in the forwards that it saw, and nothing else changes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from pytest_modelprobe import ModelProbe, Record, Watch, assert_same_behavior
from pytest_modelprobe.comparison.compare import compare
from pytest_modelprobe.comparison.diagnosis import diagnose
from pytest_modelprobe.comparison.text import text
from pytest_modelprobe.files import decode, encode


def stored(record: Record) -> Record:
    """Return what a snapshot of the record holds."""
    assert record.live_run is not None
    return decode(*encode(record.live_run.measured(record, record)), where="snapshot").record


def failure(actual: Record, expected: Record) -> str:
    """Return what a comparison with a snapshot says; empty: nothing differs."""
    found = compare(actual, expected)
    if found.same:
        return ""
    assert actual.live_run is not None
    return text(diagnose(compare(actual.live_run.isolated(actual, like=found.expected), expected)))


class Block(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.norm, self.fc, self._by = nn.BatchNorm1d(8), nn.Linear(8, 8), [by]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self._by[0] * self.fc(self.norm(x)).relu()


def net(*by: float) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), *map(Block, by), nn.Dropout(0.3), nn.Linear(8, 3))


def train(probe: ModelProbe, model: nn.Module, steps: int = 4) -> Watch:
    watch = probe.watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    x, y = probe.randn(16, 4), probe.randint(0, 3, (16,))
    torch.manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return watch


def test_the_first_step_of_a_training_names_the_layer_whose_code_changed() -> None:
    probe = ModelProbe()
    expected = stored(train(probe, probe.build(lambda: net(1, 1, 1))).first)
    again = train(probe, probe.build(lambda: net(1, 1, 1)))
    assert failure(again.first, expected) == ""
    changed = train(probe, probe.build(lambda: net(1, 1.5, 1)))
    assert failure(changed.first, expected).startswith("layer '2' (Block): own code changed ")


def test_two_changes_in_a_training_are_told_apart() -> None:
    probe = ModelProbe()
    expected = stored(train(probe, probe.build(lambda: net(1, 1, 1, 1))).first)
    said = failure(train(probe, probe.build(lambda: net(1, 1.5, 1, 2.5))).first, expected)
    assert said.startswith("layers '*': own code changed after fc x2: "), said
    assert "possibl" not in said.lower()


def test_each_call_answers_as_before_although_the_weights_are_others() -> None:
    probe = ModelProbe()
    models = [probe.build(lambda: net(1, 1)) for _ in range(2)]
    few, many = (train(probe, model, steps).first for model, steps in zip(models, (1, 6), strict=True))
    expected = few.live_run.isolated(few)
    actual = many.live_run.isolated(many, like=expected)
    responses = [[call.response for _, call in record.calls] for record in (actual, expected)]
    assert None not in responses[0]
    assert responses[0] == responses[1]


def gpt2(by: float = 1.0) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    if by != 1:
        mlp = model.transformer.h[1].mlp
        kind = type(mlp)

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            y = kind.forward(self, x)
            return y * by if x.shape[1] == 1 else y

        mlp.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return model


def decode_with_a_cache(probe: ModelProbe, model: nn.Module) -> Watch:
    watch = probe.watch(model.eval())
    ids, cache = probe.randint(0, 50, (2, 6)), transformers.DynamicCache()
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        for _ in range(4):
            logits = model(ids, **{name: cache}, use_cache=True).logits
            ids = logits[:, -1:].argmax(-1)
    return watch


def test_a_decoding_loop_names_the_layer_whose_code_changed() -> None:
    probe = ModelProbe()
    watch = decode_with_a_cache(probe, probe.build(gpt2))
    expected = stored(watch.record)
    assert failure(decode_with_a_cache(probe, probe.build(gpt2)).record, expected) == ""
    changed = decode_with_a_cache(probe, probe.build(lambda: gpt2(1.5)))
    assert failure(changed.record, expected).startswith(
        "possibly transformer.h.1.mlp: own code changed after dropout: "
    )
    assert failure(changed.first, stored(watch.first)) == ""


def test_asking_of_a_watch_disturbs_no_training() -> None:
    probe = ModelProbe()
    x, y = probe.randn(16, 4), probe.randint(0, 3, (16,))
    states = []
    for asked in (False, True):
        model = probe.build(lambda: net(1, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        watch = probe.watch(model) if asked else None
        torch.manual_seed(0)
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(x), y)
            if watch is not None:  # between forward and backward, and again before the step
                watch.first.live_run.isolated(watch.first)
            loss.backward()
            if watch is not None:
                seen = watch.record
                assert all(call.response for _, call in seen.live_run.isolated(seen).calls)
                assert (watch.record.forwards, watch.record.backwards) == (seen.forwards, seen.backwards)
            gradients = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        moments = [value for state in optimizer.state.values() for value in state.values()]
        states.append([*model.state_dict().values(), *gradients, *moments, torch.get_rng_state()])
    assert all(map(torch.equal, *states))


class Quantizer(nn.Module):
    """Learns its codes through ``.data``, from what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.codes.data.lerp_(x.detach().mean(0), 0.5)
        return x + self.codes


def test_a_layer_that_learned_other_buffers_is_not_blamed_for_them() -> None:
    probe = ModelProbe()
    models = (
        probe.build(lambda by=by: nn.Sequential(nn.Linear(4, 8), Block(by), Quantizer(), nn.Linear(8, 3)))
        for by in (1, 1.5)
    )
    expected, actual = (train(probe, model).first for model in models)
    said = failure(actual, stored(expected))
    assert said.startswith("layer '1' (Block): own code changed ")
    assert "2: own code" not in said


class Remembering(nn.Module):
    """Keeps what it saw last, in an attribute and an object."""

    def __init__(self) -> None:
        super().__init__()
        self._kept, self._shelf = torch.zeros(16, 8), Shelf()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, self._kept, self._shelf.tensor = self._kept, x.detach(), x.detach()
        return x + before


class Shelf:
    def __init__(self) -> None:
        self.tensor = torch.zeros(16, 8)


def test_a_layer_that_keeps_other_tensors_is_not_blamed_for_them_and_keeps_them() -> None:
    probe = ModelProbe()
    models = [
        probe.build(lambda by=by: nn.Sequential(nn.Linear(4, 8), Block(by), Remembering(), nn.Linear(8, 3)))
        for by in (1, 1.5)
    ]
    expected, actual = (train(probe, model).first for model in models)
    kept, on_shelf = models[1][2]._kept, models[1][2]._shelf.tensor
    said = failure(actual, stored(expected))
    assert said.startswith("layer '1' (Block): own code changed ")
    assert "2: own code" not in said
    assert models[1][2]._kept is kept
    assert models[1][2]._shelf.tensor is on_shelf


def test_inputs_that_are_overwritten_later_are_those_of_the_forward() -> None:
    probe = ModelProbe()
    model = nn.Embedding(4, 2)
    watch = probe.watch(model)
    ids = torch.tensor([0, 3])
    model(ids)
    ids.fill_(1_000_000)
    record = watch.record.live_run.isolated(watch.record)
    assert record["(root)"].calls[0].response.reason is None
    assert ids.tolist() == [1_000_000] * 2


@pytest.mark.parametrize("gone", [False, True])
def test_a_watch_that_cannot_be_asked_any_more_says_so_in_the_failure(gone: bool) -> None:
    x = torch.ones(2, 8)
    models = [nn.Sequential(Block(1.0), Block(1.0)).eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[1][0]._by = [2.0]
    records = []
    watches = [Watch(model, isolate=gone) for model in models]
    for watch, model in zip(watches, models, strict=True):
        model(x)
        records.append(watch.record)
    if gone:
        watches.clear()
        del watch
    with pytest.raises(AssertionError) as raised:
        assert_same_behavior(*records)
    note = "No layer was called alone: the watch is gone: keep it in a variable until the record is compared."
    assert (note in str(raised.value)) == gone


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_a_forward_runs_again_as_it_ran(mode: Any) -> None:
    probe = ModelProbe()
    model = probe.build(lambda: net(1, 1)).eval()
    with mode():
        x = torch.ones(3, 4) / 3
        watch = probe.watch(model)
        model(x)
    expected = stored(watch.record)
    assert {call.response.reason for _, call in expected.calls} == {None}
    model[2]._by[0] = 2.0
    watch = probe.watch(model)
    with mode():
        model(x)
    assert "2: own code changed after fc" in failure(watch.record, expected)


def test_inputs_that_cannot_be_copied_are_told() -> None:
    class Stubborn:
        def __deepcopy__(self, memo: object) -> Any:
            raise TypeError("not me")

    class Net(nn.Module):
        def forward(self, x: torch.Tensor, other: object) -> torch.Tensor:
            return x * 2

    model = Net()
    with Watch(model) as watch:
        model(torch.ones(2), Stubborn())
    record = watch.record.live_run.isolated(watch.record)
    assert record.notes == (
        "no layer was called alone in the forward of (root): an input cannot be copied: TypeError: not me",
    )
