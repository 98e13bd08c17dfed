"""Models whose optimizer states or layers are spread over ranks: steps, layouts, and the merged record."""

from __future__ import annotations

import json
import multiprocessing.forkserver
import multiprocessing.popen_forkserver  # noqa: F401 - one fork server for all runs
import os
import textwrap

import pytest

# pytester forgets what its runs import.
import pytest_modelprobe.extras.ranks.protocol
import pytest_modelprobe.probe  # noqa: F401
from pytest_modelprobe.record import Reading, Record

QUIET = ("-p", "no:randomly", "-p", "no:cacheprovider")
pytestmark = pytest.mark.skipif("MODELPROBE_RANKS" not in os.environ, reason="starts many processes: tox -e ranks")

HEADER = """
import os
import pytest, torch, torch.distributed as dist
from torch import nn
from pytest_modelprobe import assert_frozen, assert_grad_finite, assert_params_updated, assert_update_ratio

two = pytest.mark.modelprobe(world_size=2, timeout=240)
"""


@pytest.fixture(autouse=True)
def project(monkeypatch: pytest.MonkeyPatch, _plugin_alone: None) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def run(pytester: pytest.Pytester, tests: str) -> pytest.RunResult:
    pytester.makepyfile(HEADER + textwrap.dedent(tests))
    return pytester.runpytest(*QUIET)


def test_the_steps_of_an_optimizer_whose_states_are_spread_over_ranks(pytester: pytest.Pytester) -> None:
    run(
        pytester,
        """
        from torch.distributed.optim import ZeroRedundancyOptimizer

        @two
        def test_zero(modelprobe):
            rank = dist.get_rank()
            layers = lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
            model = modelprobe.build(layers)
            model[2].requires_grad_(False)
            replicas = nn.parallel.DistributedDataParallel(model)
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = ZeroRedundancyOptimizer(trained, torch.optim.AdamW, lr=1e-3)
            watch = modelprobe.watch(model, steps=3)
            averaged = []
            for x in modelprobe.randn(3, 8, 4):
                replicas(x.chunk(2)[rank]).square().mean().backward()
                averaged.append(model[0].weight.grad.mean().item())
                optimizer.step()
                optimizer.zero_grad()
            assert [(step.forwards, step.backwards) for step in watch.steps] == [(1, 1)] * 3
            applied = [step["0"].parameters[0].applied.statistics.mean for step in watch.steps]
            assert applied == pytest.approx(averaged, rel=1e-5)
            for subject in (watch, watch.first_step):
                assert_grad_finite(subject)
            assert_params_updated(watch, layers=["0", "3"])
            assert_update_ratio(watch)
            assert_frozen(watch, layers="2")
            for layer in ("0", "3"):  # each rank steps with one of them, and is sent the other
                with pytest.raises(AssertionError, match="is not frozen"):
                    assert_frozen(watch, layers=layer)
            merged = modelprobe.merged(watch)
            assert merged["0"].calls[0].inputs[0].shape == (8, 4)
        """,
    ).assert_outcomes(passed=1)


def test_each_stage_of_a_pipeline_has_the_numbers_of_the_whole_model(pytester: pytest.Pytester) -> None:
    run(
        pytester,
        """
        from torch.distributed import pipelining

        def numbers(reading):
            return reading.statistics.count, reading.statistics.mean, reading.statistics.std

        @two
        def test_pipelines(modelprobe):
            for schedule in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B):
                check(modelprobe, schedule)

        def check(modelprobe, schedule):
            layers = lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
            whole, rank = modelprobe.build(layers), dist.get_rank()
            part = modelprobe.build(layers)[2 * rank : 2 * rank + 2]
            x, target = modelprobe.randn(8, 4), modelprobe.randn(8, 2)
            watch, alone = modelprobe.watch(part, steps=2), modelprobe.watch(whole, steps=2)
            stage = pipelining.PipelineStage(part, rank, 2, torch.device("cpu"))
            pipeline = schedule(stage, 4, loss_fn=nn.functional.mse_loss, scale_grads=False)
            optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in (part, whole)]
            for _ in range(2):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                pipeline.step(*[x][rank:], target=target if rank else None)
                for some, wanted in zip(x.chunk(4), target.chunk(4)):
                    nn.functional.mse_loss(whole(some), wanted).backward()
                for optimizer in optimizers:
                    optimizer.step()
            assert watch.evaluations.forwards == 0
            assert [(step.forwards, step.backwards) for step in watch.steps] == [(4, 4)] * 2
            for step, other in zip(watch.steps, alone.steps):
                for (layer, (_, value)) in ((l, v) for l in step.layers.values() if l.leaf for v in l.outputs):
                    ((_, twin),) = other[layer.name].outputs
                    assert numbers(value.forward) == pytest.approx(numbers(twin.forward), rel=1e-5, abs=1e-6)
                    assert numbers(value.backward) == pytest.approx(numbers(twin.backward), rel=1e-5, abs=1e-6)
            for subject in (watch, watch.first_step):
                assert_grad_finite(subject)
            assert_params_updated(watch)
            assert_update_ratio(watch)
        """,
    ).assert_outcomes(passed=1)


TENSOR_PARALLEL = """
from pathlib import Path
import json
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(4), nn.GELU()
        self.gate, self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(self.act(self.up(y) * self.gate(y)))


def split(modelprobe):
    model = modelprobe.build(lambda: nn.Sequential(nn.Embedding(50, 4), Block(), nn.Dropout(0.5), nn.Linear(4, 50)))
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"1.gate": ColwiseParallel(), "1.up": ColwiseParallel(), "1.down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan) if dist.get_world_size() > 1 else model


def step(modelprobe, model):
    watch = modelprobe.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids = modelprobe.randint(0, 50, (8, 6))
    nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    return watch
"""


def test_the_merged_record_of_tensor_parallel_ranks_is_that_of_one_process(pytester: pytest.Pytester) -> None:
    run(
        pytester,
        TENSOR_PARALLEL
        + """
@pytest.mark.modelprobe(world_size=1, timeout=240)
def test_one(modelprobe):
    write(modelprobe, "one")

@two
def test_two(modelprobe):
    write(modelprobe, "two")

def write(modelprobe, name):
    model = split(modelprobe)
    model[2].p = 0.0
    watch = step(modelprobe, model)
    assert_grad_finite(watch)
    merged = modelprobe.merged(watch)
    if not dist.get_rank():
        Path(name).write_text(json.dumps(merged.to_dict()))
""",
    ).assert_outcomes(passed=2)
    one, two = (Record.from_dict(json.loads((pytester.path / name).read_text())) for name in ("one", "two"))
    layouts = {"1.up input": "replicated", "1.up output": "shard(2)", "1.act input": "shard(2)"}
    layouts |= {"1.act output": "shard(2)", "1.down input": "shard(2)", "1.down output": "replicated"}
    found = {}
    for (layer, call), (_, other) in zip(one.calls, two.calls, strict=True):
        for a, b in zip((*call.inputs, *call.outputs), (*other.inputs, *other.outputs), strict=True):
            found[f"{layer.name} {a.path}"] = b.layout
            assert (a.shape, a.tensor) == (b.shape, b.tensor), (layer.name, a.path)
            assert_close(a.forward, b.forward)
            assert_close(a.backward, b.backward)
    assert {where: found[where] for where in layouts} == layouts
    for own, other in zip(one.parameters, two.parameters, strict=True):
        assert_close(own.reading, other.reading)
        assert_close(own.gradient, other.gradient)
    assert (two.ranks, two.notes) == (2, ())


def assert_close(a: Reading | None, b: Reading | None) -> None:
    if a is None or b is None:
        assert a is b
        return
    one, two = a.statistics, b.statistics
    assert one is not None
    assert two is not None
    assert one.count == two.count
    for name in ("mean", "min", "max", "rms"):
        assert getattr(one, name) == pytest.approx(getattr(two, name), abs=2e-6 * (one.rms or 1.0)), name


def test_replicas_that_differ_name_the_first_layer_and_the_rank(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        TENSOR_PARALLEL
        + """
class Other(nn.Module):
    def forward(self, x):
        return x * (1 + dist.get_rank())

@two
def test_a_layer_that_is_another_in_one_rank(modelprobe):
    model = split(modelprobe)
    model[1].norm = nn.Sequential(nn.LayerNorm(4), Other())
    modelprobe.merged(step(modelprobe, model))
""",
    )
    result.assert_outcomes(failed=1)
    disagree = "ranks disagree: 1.norm.1 output has another rms in [[]rank 1] than in [[]rank 0]: "
    result.stdout.fnmatch_lines([f"E *AssertionError: {disagree}*"])
