"""Models whose optimizer states or layers are spread over ranks: steps, and the merged record."""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.popen_forkserver  # noqa: F401 - one fork server for all runs
import os
import textwrap

import pytest

# pytester forgets what its runs import.
import pytest_modelprobe.extras.ranks.processes
import pytest_modelprobe.probe  # noqa: F401

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
