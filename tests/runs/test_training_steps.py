"""Steps of training: which forwards each consists of, and what the optimizer had and did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_modelprobe import (
    ModelProbe,
    NothingObservedError,
    Watch,
    assert_finite,
    assert_grad_finite,
    assert_same_behavior,
    assert_training_loop,
    assert_update_ratio,
)
from pytest_modelprobe.record import Parameter


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def x(seed: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))


def test_a_step_has_the_forwards_that_a_backward_reached_before_it() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = ModelProbe().watch(model, steps=2)
    with torch.no_grad():
        model.eval()(x(0))
    model.train()
    for step in range(3):
        for part in range(2):
            model(x(1 + 2 * step + part)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(x(9))
    assert [(r.step, r.forwards, r.backwards) for r in watch.steps] == [(0, 2, 2), (1, 2, 2)]
    assert (watch.evaluations.forwards, watch.evaluations.backwards) == (4, 0)
    assert (watch.record.forwards, watch.record.backwards) == (10, 6)


def test_a_step_equals_that_of_a_watch_that_saw_nothing_else() -> None:
    records = []
    for others in (0, 3):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        watch = ModelProbe().watch(model)
        model(x(1)).sum().backward()
        optimizer.step()
        for _ in range(others):
            optimizer.zero_grad()
            model(x(2)).sum().backward()
            optimizer.step()
        records.append(watch.first_step)
    assert records[0] == records[1]


class Positions(nn.Module):
    """Has a value without a batch, and infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.place = nn.Parameter(torch.randn(1, 5, 8))
        self.mask, self.fc = nn.Identity(), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        mask = self.mask(torch.full((5, 5), -torch.inf).triu(1))
        return self.fc(torch.softmax(mask, -1) @ torch.relu(self.embed(ids) + self.place))  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor], passes: int = 1) -> None:
    for number, batch in enumerate(batches):
        model(batch).square().mean().backward()
        if (number + 1) % passes == 0:
            optimizer.step()
            optimizer.zero_grad()


def added_up(parameter: Parameter) -> tuple[float, float]:
    """The mean before the step, and that with what the optimizer added."""
    assert parameter.update is not None
    mean, added = (r.statistics.mean for r in (parameter.reading, parameter.update) if r.statistics is not None)
    assert mean is not None
    assert added
    return mean, mean + added


def ids(count: int) -> list[Tensor]:
    return list(torch.randint(0, 7, (count, 4, 5), generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("passes", [1, 2])
def test_steps_are_equal_wherever_they_stand(passes: int) -> None:
    whole, resumed = Positions(), Positions()
    resumed.load_state_dict(whole.state_dict())
    optimizers = [torch.optim.Adam(model.parameters(), 0.01) for model in (whole, resumed)]
    probe, batches = ModelProbe(), ids(6)
    watch = probe.watch(whole, steps=6)
    train(whole, optimizers[0], batches, passes)
    train(resumed, optimizers[1], batches[:4], passes)
    later = probe.watch(resumed, steps=2)
    train(resumed, optimizers[1], batches[4:], passes)
    assert_same_behavior(later.steps[0], watch.steps[4 // passes])


@pytest.mark.parametrize("passes", [1, 2])
def test_all_forwards_are_the_same_whichever_steps_are_kept(passes: int) -> None:
    records = []
    for steps in (0, 1, 3):
        torch.manual_seed(0)
        model = Positions()
        watch = ModelProbe().watch(model, steps=steps)
        train(model, torch.optim.Adam(model.parameters(), 0.01), ids(6), passes)
        with torch.no_grad():
            model(ids(1)[0])
        records.append(watch.record)
    for record in records[1:]:
        for (_, value), (_, other) in zip(record["mask"].outputs, records[0]["mask"].outputs, strict=True):
            assert value.forward.fingerprint == pytest.approx(other.forward.fingerprint)
        assert_same_behavior(record, records[0])


def test_a_step_keeps_the_mode_that_the_model_was_trained_in() -> None:
    model = net()
    watch = ModelProbe().watch(model)
    model(x(1)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    trained = watch.first_step
    with torch.no_grad():
        model.eval()(x(2))
    assert watch.first_step == trained


def test_the_applied_gradient_is_accumulated_and_clipped() -> None:
    model = net()
    watch = ModelProbe().watch(model)
    for part in range(2):
        model(x(part)).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    held = model[3].weight.grad
    assert held is not None
    norm = held.norm().item()
    torch.optim.SGD(model.parameters(), 0.1).step()
    weight = watch.first_step["3"].parameters[0]
    assert weight.applied is not None
    assert weight.applied.statistics is not None
    assert weight.applied.statistics.norm == pytest.approx(norm)
    assert weight.gradient is not None
    assert weight.gradient.tensors == 2


def test_the_gradient_that_a_closure_computes_is_the_applied_one() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = ModelProbe().watch(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x(1)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert (watch.first_step.forwards, watch.first_step.backwards) == (1, 1)
    assert all(p.applied == p.gradient for p in watch.first_step["3"].parameters)


def test_each_step_with_a_closure_begins_where_the_one_before_ended() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
    watch = ModelProbe().watch(model, steps=3)
    for seed in range(3):

        def closure(seed: int = seed) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x(seed)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    means = [added_up(step["3"].parameters[0]) for step in watch.steps]
    assert [before for before, _ in means[1:]] == pytest.approx([after for _, after in means[:-1]], abs=1e-7)
    assert all(before != after for before, after in means)


def train_with_a_skipped_step(*, skipped: int, steps: int, fused: bool = False, to_none: bool = True) -> ModelProbe:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    probe = ModelProbe()
    probe.watch(model)
    for step in range(skipped + steps):
        optimizer.zero_grad(set_to_none=to_none)
        loss = model(x(step)).square().sum() * (float("inf") if step < skipped else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return probe


# Of a fused optimizer the step is called, and does nothing.
@pytest.mark.parametrize(("fused", "to_none"), [(True, True), (False, False)])
def test_a_step_that_a_scaler_skips_is_no_step_and_has_no_bad_gradients(fused: bool, to_none: bool) -> None:
    probe = train_with_a_skipped_step(skipped=1, steps=2, fused=fused, to_none=to_none)
    watch = probe.source
    assert watch.record.training.steps == 2
    assert_grad_finite(watch)
    assert_grad_finite(watch.first_step)
    assert watch.record.forwards == 3
    assert "gradients that were reset before a step are left out" in watch.record.notes


def test_no_parameter_is_read_in_steps_that_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from pytest_modelprobe.capture import training as training_steps

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = ModelProbe().watch(model, steps=1)
    model(x(0)).sum().backward()
    optimizer.step()
    model(x(1)).sum().backward()
    monkeypatch.setattr(training_steps.statistics, "reduce", None)
    monkeypatch.setattr(training_steps, "read_parameters", None)
    optimizer.step()
    assert len(watch.steps) == 1


def counted(watch: Watch) -> tuple[int, int, int, int]:
    """Return how many steps were taken, and how many forwards are in steps, in evaluations and in neither."""
    counts = watch.counts
    assert (watch.evaluations.forwards, watch.others.forwards) == (counts.evaluations, counts.others)
    assert counts.in_steps + counts.evaluations + counts.others == watch.record.forwards
    if len(watch.steps) == counts.steps:
        assert sum(step.forwards for step in watch.steps) == counts.in_steps
    return counts.steps, counts.in_steps, counts.evaluations, counts.others


@pytest.mark.parametrize(("steps", "to_none"), [(0, True), (9, False)])
def test_the_first_of_two_passes_of_sam_is_part_of_no_step(steps: int, to_none: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = ModelProbe().watch(model, steps=steps)
    for seed in range(3):
        model(x(seed)).square().mean().backward()
        with torch.no_grad():
            moves = [0.05 * p.grad for p in model.parameters() if p.grad is not None]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad(set_to_none=to_none)
        model(x(seed)).square().mean().backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    assert counted(watch) == (3, 3, 0, 3)
    assert watch.others.backwards == 3
    assert watch.record.notes == (
        "gradients that were reset before a step are left out",
        "3 forwards in 3 steps, 3 with gradients that no step used",
    )
    assert repr(watch) == "<Watch Sequential: 3 forwards in 3 steps, 3 with gradients that no step used, open>"


def gan() -> tuple[nn.Module, nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
    critic = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    return generator, critic, nn.ModuleList([generator, critic])


def test_a_pass_of_the_generator_is_part_of_no_step_of_the_critic() -> None:
    generator, critic, _ = gan()
    of_generator, of_critic = (torch.optim.SGD(m.parameters(), 0.1) for m in (generator, critic))
    watch = ModelProbe().watch(critic, steps=9)
    for seed in range(3):
        of_critic.zero_grad(set_to_none=False)
        critic(x(seed)).mean().backward()
        critic(generator(x(seed)).detach()).mean().backward()
        of_critic.step()
        of_generator.zero_grad(set_to_none=False)
        critic(generator(x(seed))).mean().backward()
        of_generator.step()
    assert counted(watch) == (3, 6, 0, 3)
    assert [(step.forwards, step.backwards) for step in watch.steps] == [(2, 2)] * 3
    assert watch.others.backwards == 3


def test_gradients_that_one_optimizer_reset_are_not_in_the_step_of_both() -> None:
    generator, critic, both = gan()
    of_generator, of_critic = (torch.optim.SGD(m.parameters(), 0.1) for m in (generator, critic))
    watch = ModelProbe().watch(both, steps=9)
    for seed in range(3):
        of_generator.zero_grad()
        critic(generator(x(seed))).mean().backward()
        of_critic.zero_grad()
        critic(x(seed)).mean().backward()
        of_generator.step()
        of_critic.step()
    assert counted(watch) == (3, 9, 0, 0)
    for step in watch.steps:
        for name in ("0.0", "1.0"):
            weight = step[name].parameters[0]
            assert weight.gradient.statistics.norm == pytest.approx(weight.applied.statistics.norm)
    assert_training_loop(watch)


def test_gradients_that_one_optimizer_accumulates_over_steps_of_another_are_sound() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 1), "b": nn.Linear(4, 1)})
    first, second = (torch.optim.SGD(model[name].parameters(), 0.1) for name in "ab")
    watch = ModelProbe().watch(model, steps=9)
    for seed in range(4):
        model["a"](x(seed)).sum().backward()
        model["b"](x(seed)).square().sum().backward()
        second.step()
        second.zero_grad(set_to_none=False)
        if seed % 2:
            first.step()
            first.zero_grad(set_to_none=False)
    assert [(step.forwards, step.backwards) for step in watch.steps] == [(2, 2)] * 4
    assert_training_loop(watch)


@pytest.mark.parametrize("reset", [True, False])
def test_a_step_by_hand_is_no_step_of_an_optimizer(reset: bool) -> None:
    model = net()
    watch = ModelProbe().watch(model)
    for seed in range(3):
        model(x(seed)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
                parameter.grad = None if reset else torch.zeros_like(parameter)
        with torch.no_grad():
            model.eval()(x(9))
        model.train()
    assert counted(watch) == (0, 0, 3, 3)
    assert watch.others.backwards == 3
    weight = watch.others["3"].parameters[0]
    assert weight.gradient is not None
    assert weight.gradient.tensors == 3
    with pytest.raises(
        NothingObservedError, match=r"It saw 3 forwards in evaluations, 3 with gradients that no step used"
    ):
        _ = watch.first_step


def test_forwards_of_steps_that_a_scaler_skips_are_part_of_no_step() -> None:
    watch = train_with_a_skipped_step(skipped=3, steps=0).source
    assert counted(watch) == (0, 0, 0, 3)
    assert watch.record.notes[-1] == "3 forwards with gradients that no step used"
    with pytest.raises(AssertionError, match=r"gradient of .* (is not finite|has inf)"):
        assert_grad_finite(watch.others)
    assert counted(train_with_a_skipped_step(skipped=2, steps=3).source) == (3, 3, 0, 2)


def test_an_averaged_model_is_only_evaluated() -> None:
    model = net()
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    probe = ModelProbe()
    trained, averaged = probe.watch(model, steps=2), probe.watch(average)
    for seed in range(3):
        optimizer.zero_grad()
        model(x(seed)).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
        with torch.no_grad():
            average(x(9))
    assert counted(trained) == (3, 3, 0, 0)
    assert counted(averaged) == (0, 0, 3, 0)
    with pytest.raises(NothingObservedError, match=r"keep the watch open while .* It saw 3 forwards in evaluations\."):
        _ = averaged.first_step


@pytest.mark.parametrize("kept", [0, 1])
def test_accumulation_and_evaluations_add_up_and_what_is_left_over_is_in_no_step(kept: int) -> None:
    model = net()
    watch = ModelProbe().watch(model, steps=kept)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for part in range(7):
        model(x(part)).square().mean().backward()
        if part % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(x(9))
    assert counted(watch) == (2, 6, 2, 1)
    assert watch.record.notes == ("6 forwards in 2 steps, 2 in evaluations, 1 with gradients that no step used",)
    if not kept:
        with pytest.raises(NothingObservedError, match="no step of Sequential is kept, of 2 that were taken"):
            _ = watch.first_step


def test_forwards_and_backwards_without_an_optimizer_need_no_note() -> None:
    model = net()
    watch = ModelProbe().watch(model)
    for seed in range(2):
        model(x(seed)).sum().backward()
    assert counted(watch) == (0, 0, 0, 2)
    assert watch.record.notes == ()
    with pytest.raises(NothingObservedError, match="no optimizer with a parameter of Sequential has stepped"):
        _ = watch.first_step
    torch.optim.SGD(model.parameters(), 0.1).step()  # it is known before the next forward
    assert len(watch.steps) == 1


def test_update_ratio_judges_each_step() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    watch = ModelProbe().watch(model, steps=3)
    for rate in (0.0, 1e-3, 1.0):
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(model.parameters(), rate).step()
    with pytest.raises(AssertionError) as failed:
        assert_update_ratio(watch)
    assert str(failed.value) == (
        "weight changed by 1.001 of its norm in step 2, not 1e-06 to 0.1; 1 of 1 parameter looked at in 2 steps\n\n"
        "parameter   shape    step   ratio   gradient rms\n"
        "weight      (1, 2)      2   1.001              1\n\n"
        "The learning rate is too large for it, or its gradient is."
    )


def test_update_ratio_names_what_is_in_no_optimizer() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    nn.init.ones_(model[0].weight)
    nn.init.ones_(model[1].weight)
    watch = ModelProbe().watch(model)
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model[0].parameters(), 1e-2).step()
    with pytest.raises(AssertionError) as failed:
        assert_update_ratio(watch)
    assert str(failed.value) == (
        "1.weight changed by 0 of its norm, not 1e-06 to 0.1; 1 of 2 parameters looked at in 1 step\n\n"
        "parameter   shape    step   ratio   gradient rms\n"
        "1.weight    (1, 2)      -       0              2\n\n"
        "assert_params_updated says why."
    )


def test_what_is_not_finite_in_a_step_has_no_number_among_other_forwards() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    watch = ModelProbe().watch(model, steps=2)
    for part in range(4):
        model(x(part) / (part != 3)).sum().backward()
        if part % 2:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(AssertionError, match=r"^model input is not finite: \(root\) input has"):
        assert_finite(watch.steps[1])
    with pytest.raises(AssertionError, match=r"^gradient of [^ ]+( output)? is not finite: "):
        assert_grad_finite(watch.steps[1])
    with pytest.raises(AssertionError, match=r"^model input is not finite from forward 4 of 4 on"):
        assert_finite(watch)


@pytest.mark.filterwarnings("ignore")  # torch's own, as it compiles
def test_a_compiled_step_of_an_optimizer_is_recorded_and_compiles_nothing_of_the_watch() -> None:
    graphs: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph.code)
        return graph

    def fit(probe: ModelProbe | None) -> Any:
        torch.compiler.reset()
        graphs.clear()
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        step = torch.compile(optimizer.step, backend=backend)
        watch = None if probe is None else probe.watch(model, steps=3)
        for seed in range(3):
            optimizer.zero_grad()
            model(x(seed)).square().mean().backward()
            step()
        return watch, model.state_dict()

    _, unwatched = fit(None)
    alone = list(graphs)
    with ModelProbe() as probe:
        watch, watched = fit(probe)
        assert graphs == alone
        assert [(step.forwards, step.backwards) for step in watch.steps] == [(1, 1)] * 3
        assert watch.record.training.steps == 3
    assert all(torch.equal(watched[name], tensor) for name, tensor in unwatched.items())


def test_a_step_of_a_pipeline_has_its_microbatches_and_no_forward_that_learns_shapes() -> None:
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with ModelProbe() as probe:
            watch = probe.watch(model, steps=3)
            stage = pipelining.PipelineStage(model, 0, 1, torch.device("cpu"))
            pipeline = pipelining.Schedule1F1B(stage, 3, loss_fn=nn.functional.mse_loss)
            for seed in range(2):
                optimizer.zero_grad()
                pipeline.step(x(seed), target=torch.zeros(6, 1))
                optimizer.step()
    finally:
        torch.distributed.destroy_process_group()
    assert [(step.forwards, step.backwards) for step in watch.steps] == [(3, 3)] * 2
    assert (watch.record.forwards, watch.record.backwards, watch.evaluations.forwards) == (6, 6, 0)
    assert watch.record.notes == (
        "a stage of a pipeline called the model once to learn shapes: that forward is left out",
    )
