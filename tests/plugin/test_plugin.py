"""The plugin: options, fixtures, seeding, terminal output."""

from __future__ import annotations

import json

import pytest
import torch

import pytest_modelprobe.probe  # noqa: F401 - pytester forgets what its runs import
from pytest_modelprobe import extension, kernel
from pytest_modelprobe.plugin import settings as devices

MODELS = """
import torch
from torch import nn

class TinyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(16, 2)

    def forward(self, x):
        return self.fc2(self.relu(self.fc1(x)))
"""

PASSING = """
from models import TinyNet
from pytest_modelprobe import assert_grad_finite, assert_no_dead_layers, assert_shapes

def test_tiny_net(modelprobe):
    model = modelprobe.build(TinyNet)
    record = modelprobe.run(model, modelprobe.randn(4, 8), loss=lambda out: out.pow(2).mean())
    assert_no_dead_layers(record)
    assert_grad_finite(record)
    assert_shapes(record, {"fc1": "batch 16", "fc2": "batch 2"}, dims={"batch": 4})
"""

DEAD = """
import torch
from models import TinyNet
from pytest_modelprobe import assert_no_dead_layers

def test_dead(modelprobe):
    model = modelprobe.build(TinyNet)
    with torch.no_grad():
        model.fc1.bias.fill_(-100)
    modelprobe.run(model, modelprobe.randn(4, 8))
    assert_no_dead_layers(modelprobe)
"""

QUIET = ("-p", "no:randomly", "-p", "no:cacheprovider")
_NAMES = ["devices=", "seed=", "tolerance=", "compare=", *(f"{name}=" for name in extension.modules("marker"))]
KEYWORDS = f"{', '.join(_NAMES[:-1])} and {_NAMES[-1]}"
as_installed = pytest.mark.usefixtures("_installed_plugins")


@pytest.fixture(autouse=True)
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, _plugin_alone: None) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    pytester.syspathinsert()
    pytester.makepyfile(models=MODELS)


# --- the way to a failure -----------------------------------------------------------------------------------------


@as_installed
def test_a_users_first_test_passes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n" + PASSING.replace("def test", "@pytest.mark.modelprobe(seed=3)\ndef test"))
    pytester.runpytest(*QUIET, "--strict-markers", "-W", "error").assert_outcomes(passed=1)


def test_a_failure_names_the_layer_and_hides_our_frames(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(DEAD)
    result = pytester.runpytest(*QUIET)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E       AssertionError: relu is dead: all 64 outputs are 0 in 1 forward; 1 of 4 layers looked at",
            "E       layer   type   outputs   dead units   input min   input max",
            "E       relu    ReLU        64        16/16      *",
            "E       Every input of relu is negative: look at the bias or the scale of fc1, which feeds it.",
        ]
    )
    result.stdout.no_fnmatch_line("*assertions*.py*")


def test_the_models_own_exception_carries_a_note(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from models import TinyNet

        def test_wrong_input(modelprobe):
            modelprobe.run(modelprobe.build(TinyNet), modelprobe.randn(4, 9))
        """
    )
    pytester.runpytest(*QUIET).stdout.fnmatch_lines(
        [
            "E *RuntimeError: *",
            "*raised in fc1 (Linear), inputs (4, 9) float32 cpu*",
        ]
    )


# --- loading ------------------------------------------------------------------------------------------------------


@as_installed
def test_a_project_without_probe_does_not_import_torch(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import sys

        def pytest_unconfigure(config):
            modules = (
                "probe", "record", "files", "comparison", "snapshot.snapshot", "snapshot.comparer", "plugin.revisions",
                "plugin.results", "_pytest",
            )
            names = ("torch", "numpy", *(f"pytest_modelprobe.{module}" for module in modules))
            print("heavy:", [name for name in names if name in sys.modules])
        """
    )
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest_subprocess("-p", "no:randomly", "--collect-only", "-s")
    result.stdout.fnmatch_lines(["*1 test collected*", "heavy: []"])


@as_installed
def test_snapshots_load_without_autoload(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        """
        from models import TinyNet

        def test_it(modelprobe, modelprobe_snapshot):
            assert modelprobe.run(TinyNet(), modelprobe.randn(4, 8)) == modelprobe_snapshot
        """
    )
    options = ["-o", "required_plugins=syrupy", "--snapshot-update"]
    pytester.runpytest("-p", "pytest_modelprobe.plugin", *options).assert_outcomes(passed=1)


def test_a_wrong_value_in_the_ini_file_is_a_usage_error(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmodelprobe_devices = cpu gpu")
    said = "modelprobe_devices in the ini file has 'gpu': not a device of the probe; give cpu, *"
    result = pytester.runpytest(*QUIET)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {said}"])


# --- devices ------------------------------------------------------------------------------------------------------


def test_one_device_adds_no_id(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(PASSING)
    result = pytester.runpytest(*QUIET, "-v", "--modelprobe-device=cpu", "--modelprobe-device=cpu")
    result.stdout.fnmatch_lines(["modelprobe: device cpu; kernel *", "*::test_tiny_net PASSED*"])


def test_the_header_says_which_code_computes_the_numbers(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    monkeypatch.setattr(kernel, "active", None)
    monkeypatch.setenv("MODELPROBE_KERNEL", "torch")
    result = pytester.runpytest("-p", "no:randomly", "-v")
    result.stdout.fnmatch_lines(["modelprobe: kernel torch (MODELPROBE_KERNEL=torch)"])
    pytester.runpytest("-p", "no:randomly").stdout.no_fnmatch_line("*kernel*")


@pytest.mark.long
def test_another_value_of_the_kernel_is_an_error_of_usage(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    monkeypatch.setenv("MODELPROBE_KERNEL", "c")
    result = pytester.runpytest_subprocess("-p", "no:randomly", "-v")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: MODELPROBE_KERNEL=c: it is 'torch' or 'compiled', or not set"])


def test_several_devices_parametrize_and_group(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch

        @pytest.fixture(scope="session")
        def built(modelprobe_device):
            return [modelprobe_device]

        def test_a(modelprobe, built): assert modelprobe.device in built
        def test_b(modelprobe, built): assert modelprobe.device in built
        """
    )
    result = pytester.runpytest(*QUIET, "-v", "--modelprobe-device=cpu", "--modelprobe-device=cpu:0")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*::test_a?cpu?*", "*::test_b?cpu?*", "*::test_a?cpu:0?*", "*::test_b?cpu:0?*"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_device_on_the_command_line_is_a_usage_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(PASSING)
    result = pytester.runpytest(*QUIET, "--modelprobe-device=cuda")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --modelprobe-device=cuda: torch finds no cuda device (torch *)"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_device_in_the_ini_file_is_a_reported_skip(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmodelprobe_devices = cpu cuda")
    pytester.makepyfile(PASSING)
    result = pytester.runpytest(*QUIET, "-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*device cuda: torch finds no cuda device (torch *"])


def test_any_accelerator_that_torch_names_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    found = type("Accelerator", (), {"type": "npu"})
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "device", lambda name: type("Device", (), {"type": name[:3], "index": int(name[4:])}))
    assert [devices.is_device(name) for name in ("npu", "npu:1", "hpu", "auto:1")] == [True, True, False, False]
    assert devices.resolve("auto") == ("npu", None)
    assert devices.resolve("npu:1") == ("npu:1", None)
    assert devices.resolve("npu:2") == ("npu:2", "torch finds 2 npu device(s), numbered from 0")
    assert devices.resolve("xpu:0") == ("xpu:0", f"torch finds no xpu device (torch {torch.__version__})")


def test_the_marker_sets_the_devices_of_a_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.modelprobe(devices=["cpu", "cuda:99"])
        def test_it(modelprobe): pass
        """
    )
    result = pytester.runpytest(*QUIET, "-rs")
    result.assert_outcomes(passed=1, skipped=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "toleranse=2",
            f"takes no toleranse=: is tolerance= meant? It takes {KEYWORDS}",
        ),
        ("3", f"takes keywords only: {KEYWORDS}"),
        (
            "devices=['cpu', 3]",
            "has 3 in devices=: not a device of the probe; give cpu, cuda, cuda:N, mps, xpu or auto",
        ),
    ],
)
def test_a_slip_in_a_marker_fails_its_test_alone(pytester: pytest.Pytester, arguments: str, said: str) -> None:
    pytester.makepyfile(test_other=PASSING)
    pytester.makepyfile(
        test_it=f"""
        import pytest

        def test_before(modelprobe): pass

        @pytest.mark.parametrize("x", [1])
        @pytest.mark.modelprobe({arguments})
        def test_it(modelprobe, x): pass
        """
    )
    result = pytester.runpytest(*QUIET)
    result.assert_outcomes(passed=2, errors=1)
    assert f"@pytest.mark.modelprobe {said}" in result.outlines


# --- seeding ------------------------------------------------------------------------------------------------------

SEEDED = """
import random, numpy, pytest, torch
from models import TinyNet

@pytest.fixture(scope="session")
def session_model():
    return TinyNet()

@pytest.fixture(scope="module")
def module_model(modelprobe_factory):
    return modelprobe_factory().build(TinyNet)

@pytest.fixture
def noise():
    return torch.rand(1).item(), numpy.random.rand(), random.random()

def numbers(modelprobe, *models):
    for model in models:
        record = modelprobe.run(model, modelprobe.randn(4, 8), loss="random")
        print("SEEN", float(record.layers["fc2"].calls[0].outputs[0].forward.statistics.mean))

def test_without_probe(session_model):
    torch.rand(3)

def test_a(modelprobe, session_model, noise):
    print("SEEN", noise, torch.rand(1).item(), numpy.random.rand(), random.random())
    numbers(modelprobe, session_model, TinyNet())

def test_b(modelprobe, session_model, module_model):
    print("SEEN", torch.rand(1).item())
    numbers(modelprobe, session_model, module_model)
"""


def seen(pytester: pytest.Pytester, *args: str) -> list[str]:
    result = pytester.runpytest("-p", "no:cacheprovider", "-rP", *args)
    assert result.ret == 0
    return sorted({line for line in result.outlines if line.startswith("SEEN")})


@as_installed
@pytest.mark.usefixtures("_forked")
def test_numbers_depend_neither_on_order_nor_on_workers_nor_on_randomly(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SEEDED)
    expected = seen(pytester, "-p", "no:randomly")
    assert len(expected) == 5  # the session's model prints the same line in both tests
    module = "test_numbers_depend_neither_on_order_nor_on_workers_nor_on_randomly.py"
    assert seen(pytester, "-p", "no:randomly", f"{module}::test_b", f"{module}::test_a") == expected
    assert seen(pytester, "-p", "randomly") == expected
    assert seen(pytester, "-n", "2") == expected
    alone = seen(pytester, "-p", "no:randomly", f"{module}::test_b")
    assert set(alone) < set(expected)


def test_random_states_are_put_back(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import random, numpy, pytest, torch

        states = []

        def state():
            return torch.rand(1).item(), float(numpy.random.rand()), random.random()

        def seed():
            torch.manual_seed(7), numpy.random.seed(7), random.seed(7)

        def test_before():
            seed()
            states.append(state())
            seed()

        @pytest.fixture
        def drawing():
            return state()

        def test_probe(modelprobe, drawing):
            state()

        def test_after():
            assert state() == states[0]
        """
    )
    pytester.runpytest(*QUIET).assert_outcomes(passed=3)


# --- hooks --------------------------------------------------------------------------------------------------------


def test_no_hook_stays_behind_where_a_forward_was_interrupted(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from models import TinyNet
        from torch import ones

        KEPT = []

        def interrupt(*args):
            raise KeyboardInterrupt

        @pytest.fixture
        def model():
            model = TinyNet()
            handle = model.relu.register_forward_hook(lambda *args: None)
            yield model
            for module in model.modules():
                hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
                assert not any(getattr(hook, "is_modelprobe", False) for hook in hooks)
            assert handle.id in model.relu._forward_hooks
            assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
            assert not any(t._backward_hooks for t in KEPT)
            print("CLEAN")

        def test_it(model, modelprobe):
            x = ones(4, 8, requires_grad=True)
            modelprobe.watch(model)
            KEPT.extend([x, model(x)])
            model.fc1.register_forward_pre_hook(interrupt)
            model(x)
        """
    )
    result = pytester.runpytest_inprocess(*QUIET, "-s", "-x", no_reraise_ctrlc=True)
    result.stdout.fnmatch_lines(["*CLEAN*"])
    assert result.ret == pytest.ExitCode.INTERRUPTED


# --- what it says -------------------------------------------------------------------------------------------------


def test_it_is_silent_where_there_is_nothing_to_report(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(PASSING)
    result = pytester.runpytest(*QUIET)
    result.stdout.no_fnmatch_line("*modelprobe:*")
    result.stdout.no_fnmatch_line("=* modelprobe =*")


def test_the_first_use_shows_the_layers_once(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(PASSING)
    result = pytester.runpytest("-p", "no:randomly")
    result.stdout.fnmatch_lines(
        [
            "=* modelprobe =*",
            "*::test_tiny_net: TinyNet, 4 layers, 4 calls",
            "  layer *type *calls *output *mean *",
            "  fc1 * Linear * 1 * (4, 16) *",
            "This table is shown once; --modelprobe-verbose shows it for every test.",
        ]
    )
    pytester.runpytest("-p", "no:randomly").stdout.no_fnmatch_line("=* modelprobe =*")


CHECKED = """
    import torch
    from torch import nn
    from pytest_modelprobe import checks

    def test_relu(modelprobe):
        checks.standard(modelprobe, nn.Sequential(nn.Linear(4, 8), nn.ReLU()), modelprobe.randn(5, 4))

    def test_finite(modelprobe):
        checks.finite(modelprobe, nn.Linear(4, 4), modelprobe.randn(5, 4))
"""


def test_what_the_checks_looked_at_is_said_in_one_line(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(CHECKED)
    result = pytester.runpytest("-p", "no:randomly")
    result.stdout.fnmatch_lines(
        [
            "=* modelprobe =*",
            "*::test_relu: Sequential, 3 layers, 3 calls",
            "  0 * Linear * 1 * (5, 8) *",
            "This table is shown once; --modelprobe-verbose shows it for every test.",
            "2 models, 4 layers, 26 checks: * hold, * not applicable",
        ]
    )
    result.stdout.no_fnmatch_line("*::test_finite: *")
    again = pytester.runpytest("-p", "no:randomly", "-k", "finite")
    again.stdout.fnmatch_lines(["=* modelprobe =*", "1 model, 1 layer, 1 check: 1 hold"])
    again.stdout.no_fnmatch_line("*This table*")
    pytester.runpytest("-p", "no:randomly", "-q").stdout.no_fnmatch_line("*check*")


def test_verbose_shows_the_layers_of_every_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(PASSING + PASSING[PASSING.index("def ") :].replace("test_tiny_net", "test_other"))
    result = pytester.runpytest(*QUIET, "--modelprobe-verbose")
    result.stdout.fnmatch_lines(["*::test_tiny_net: TinyNet*", "  fc1 *", "*::test_other: TinyNet*", "  fc1 *"])


def test_verbose_says_what_the_forwards_of_a_watch_are_part_of(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import torch
        from models import TinyNet

        def test_training(modelprobe):
            model = modelprobe.build(TinyNet)
            watch = modelprobe.watch(model)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for step in range(3):
                model(modelprobe.randn(4, 8)).square().mean().backward()
                if step < 2:
                    optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                model(modelprobe.randn(4, 8))
        """
    )
    result = pytester.runpytest(*QUIET, "--modelprobe-verbose", "--modelprobe-json=results.json")
    counts = "2 forwards in 2 steps, 1 in evaluations, 1 with gradients that no step used"
    result.stdout.fnmatch_lines([f"*::test_training: TinyNet, 4 layers, 4 calls, {counts}"])
    assert json.loads((pytester.path / "results.json").read_text())["tests"][0]["runs"][0]["record"]["forwards"] == 4


def test_a_finding_nobody_asserted_on_is_reported(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(DEAD.replace("    assert_no_dead_layers(modelprobe)", ""))
    result = pytester.runpytest(*QUIET)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*::test_dead: TinyNet, 4 layers, 4 calls", "  dead: relu"])


@pytest.mark.usefixtures("_forked")
def test_xdist_brings_the_findings_to_the_controller(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(DEAD.replace("    assert_no_dead_layers(modelprobe)", ""))
    result = pytester.runpytest_inprocess(*QUIET, "-p", "xdist.plugin", "-n", "1")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*::test_dead: TinyNet, 4 layers, 4 calls", "  dead: relu"])


def test_a_failure_is_not_reported_again(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(DEAD)
    result = pytester.runpytest(*QUIET)
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*dead: relu*")


def test_what_a_shared_probe_saw_is_reported_once(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from models import TinyNet

        @pytest.fixture(scope="session")
        def record(modelprobe_factory):
            probe = modelprobe_factory()
            return probe.run(probe.build(TinyNet), probe.randn(4, 8))

        def test_a(record): pass
        def test_b(record): pass
        """
    )
    result = pytester.runpytest(*QUIET, "--modelprobe-verbose")
    result.stdout.fnmatch_lines(["*::test_a: TinyNet, 4 layers, 4 calls", "  fc1 *"])
    result.stdout.no_fnmatch_line("*::test_b: TinyNet*")


# --- fixtures -----------------------------------------------------------------------------------------------------


def test_the_command_line_device_refuses_a_model_elsewhere(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch
        from models import TinyNet
        from pytest_modelprobe import ModelProbe, UsageError

        def test_it():
            probe = ModelProbe("meta", device_required=True)
            with pytest.raises(UsageError, match="meta was asked for, but the model is on cpu, and a watch does not"):
                probe.watch(TinyNet())
        """
    )
    pytester.runpytest(*QUIET).assert_outcomes(passed=1)


@as_installed
def test_the_class_works_inside_hypothesis(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from hypothesis import given, settings, strategies as st
        from models import TinyNet
        from pytest_modelprobe import ModelProbe, assert_finite, assert_shapes

        @settings(max_examples=5, deadline=None)
        @given(st.integers(1, 8))
        def test_any_batch(batch):
            with ModelProbe(device="cpu", seed=0) as probe:
                record = probe.run(probe.build(TinyNet), probe.randn(batch, 8))
            assert_finite(record)
            assert_shapes(record, {"fc2": "batch 2"}, dims={"batch": batch})
        """
    )
    pytester.runpytest(*QUIET).assert_outcomes(passed=1)


@as_installed
def test_reruns_start_from_the_same_numbers(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import torch
        SEEN = []

        def test_it(modelprobe):
            SEEN.append(torch.rand(1).item())
            assert len(SEEN) == 2 and SEEN[0] == SEEN[1]
        """
    )
    pytester.runpytest(*QUIET, "--reruns", "1").stdout.fnmatch_lines(["*1 passed, 1 rerun*"])


def test_an_error_of_use_shows_the_users_line_alone(pytester: pytest.Pytester) -> None:
    line = "assert_finite(modelprobe.watch(TinyNet()))"
    pytester.makepyfile(
        f"""
        from models import TinyNet
        from pytest_modelprobe import assert_finite

        def test_it(modelprobe):
            {line}
        """
    )
    result = pytester.runpytest(*QUIET)
    result.stdout.fnmatch_lines([f">       {line}", "E       *NothingObservedError: *"])
    result.stdout.no_fnmatch_line("*pytest_modelprobe/*.py:*")


def test_the_table_of_a_failure_fits_the_terminal(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    pytester.makeconftest("""
        class Yes(int):
            def __call__(self):
                return True

        def pytest_sessionstart(session):
            session.config.pluginmanager.getplugin("terminalreporter").isatty = Yes(1)
    """)
    pytester.makepyfile("""
        from collections import OrderedDict

        from torch import nn

        from pytest_modelprobe import assert_no_dead_layers

        def test_model(modelprobe):
            named = [(f"a_layer_with_a_rather_long_name_{i}", nn.Linear(4, 4)) for i in range(2)]
            model = nn.Sequential(OrderedDict([*named, ("an_activation_with_a_rather_long_name", nn.ReLU())]))
            nn.init.constant_(model[1].bias, -100.0)
            assert_no_dead_layers(modelprobe.run(model, modelprobe.randn(2, 4)))
    """)
    result = pytester.runpytest()
    told = [line for line in result.outlines if line.startswith("E ") and "AssertionError" not in line]
    table = told[: [line.strip() for line in told].index("E", 1)]
    assert len(table) > 2
    assert max(map(len, table)) <= 80
    result.stdout.fnmatch_lines(["E *AssertionError: an_activation_with_a_rather_long_name is dead*"])
