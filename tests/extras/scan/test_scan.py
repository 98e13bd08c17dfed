"""A model that is named on the command line: the command, the tests of it, and the file that is written."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import pytest

from pytest_modelprobe import ModelProbe, cli
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.extras.scan import command
from pytest_modelprobe.extras.scan.scanning import ScannedModel
from pytest_modelprobe.extras.scan.search import Input
from pytest_modelprobe.extras.scan.target import load

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.unused, self.head = nn.Linear(8, 6), nn.Linear(3, 3), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(torch.relu(self.fc(x))).softmax(0)

def make_model():
    return Net()

def needs_width(width):
    return Net()

def number():
    return 3

def needs_a_file():
    raise OSError("no weights here")

def ends():
    raise SystemExit(0)

def interrupted():
    raise KeyboardInterrupt

class Ends(Net):
    def forward(self, x):
        if not self.training:
            raise SystemExit(0)
        return super().forward(x)

class Refuses(Net):
    def forward(self, x):
        raise ValueError("no")

class Idle(Net):
    def forward(self, x):
        return super().forward(x) + 0 * self.unused(x[:, :3]).sum()

class Many(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(8, 8) for _ in range(64)))

class Detached(Net):
    def forward(self, x):
        return super().forward(x).detach()

class Chosen(Net):
    def forward(self, x):
        return super().forward(x).argmax(-1)

class Forgetful(Net):
    def forward(self, x):
        super().forward(x)

class OfOneMode(Net):
    def train(self):
        return super().train()

class Prototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self):
        return self.weight.tanh()

made = Net()
"""


@pytest.fixture(autouse=True)
def _module(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(small_net=MODEL)
    monkeypatch.syspath_prepend(pytester.path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("small_net", "'small_net' names no model: write package.module:make_model"),
        ("small_nets:make_model", "there is no module 'small_nets': is it installed, or below the current folder?"),
        ("./small_net.py:Net", "there is no module './small_net.py': is it installed, or below the current folder?"),
        ("small_net:make_mode", "small_net has no make_mode: is make_model meant?"),
        (
            "small_net:needs_width",
            "small_net:needs_width needs arguments (width): name a function without, which calls it",
        ),
        ("small_net:number", "small_net:number returned int, not a torch.nn.Module"),
        ("small_net:torch", "small_net:torch is module, not a function or a class that makes a model"),
        (
            "small_net:made",
            "small_net:made is a model already: name a function that makes it, with weights by the seed",
        ),
    ],
)
def test_what_makes_no_model_is_refused_in_one_sentence(name: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        load(name).make()
    assert str(error.value) == message


def test_an_error_in_the_module_itself_is_not_hidden(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(broken_net="import no_such_dependency")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        load("broken_net:make")


def test_a_class_of_transformers_is_made_of_its_default_configuration() -> None:
    pytest.importorskip("transformers")
    target = load("transformers:MobileNetV1Model")
    assert target.expression == "MobileNetV1Model(MobileNetV1Model.config_class())"
    assert target.make().config.num_channels == 3


def test_scan_prints_what_is_wrong_with_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scan", "small_net:make_model"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("Inputs: 4x8 (guessed; --input gives others)\n\nNet: 4 layers, 94 parameters;")
    assert "\nFindings:\n  never called: unused\n" in out
    assert "\n  finite                      holds           1 output and " in out
    assert "\n  batch_independent           broken          (root) mixes the batch: the first row changed by" in out
    assert "\n--- batch_independent ---\n(root) mixes the batch: the first row changed by" in out
    assert "\n  parameters_used             hint            see the findings\n" in out
    assert out.count("unused") == 2  # in the table of layers and in the findings
    assert out.endswith("1 finding, 2 broken checks of 25; 1 hint\n")


def test_scan_of_a_model_without_fault_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scan", "torch.nn:Flatten", "--input", "3x2x4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Inputs: 3x2x4\n\nFlatten: 1 layer, 0 parameters; 1 forward on cpu, no backward\n")
    assert out.endswith("0 findings, 0 broken checks of 25\n")


def test_scan_says_in_one_sentence_what_is_wrong_with_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scan", "small_net:Refuses"]) == 2
    assert capsys.readouterr().err == (
        "modelprobe: the inputs of Refuses cannot be guessed, start from: modelprobe scan small_net:Refuses "
        "--input 4x8. It got furthest on these: ValueError: no\n"
    )


@pytest.mark.parametrize("arguments", [["scan", "small_net:Net"], ["compare", "small_net:Net", "small_net:Net"]])
def test_an_input_that_cannot_be_made_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*arguments, "--input", "99999999999x99999999999"]) == 2
    said = "modelprobe: no tensor of 99999999999x99999999999 can be made: RuntimeError: Storage size calculation overfl"
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("needs_a_file", "small_net:needs_a_file makes no model: OSError: no weights here (*small_net.py:22)"),
        ("ends", "small_net:ends ends the process: it calls sys.exit(0)"),
        ("interrupted", "interrupted"),
        ("Ends", "small_net:Ends ends the process: it calls sys.exit(0)"),
    ],
)
def test_what_ends_a_scan_is_no_success(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scan", f"small_net:{name}"]) == 2
    assert fnmatch.fnmatchcase(capsys.readouterr().err, f"modelprobe: {message}\n")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Forgetful", "the model returns None: is a return missing at the end of its forward?"),
        ("OfOneMode", "the mode of the model cannot be set: train(False) raised TypeError: OfOneMode.train() takes *"),
    ],
)
def test_a_scan_that_can_compare_nothing_is_no_success(
    name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["scan", f"small_net:{name}", "--input", "4x8"]) == 2
    assert fnmatch.fnmatchcase(capsys.readouterr().err, f"modelprobe: {message}\n")


@pytest.mark.usefixtures("_plugin_alone")
def test_a_model_without_inputs_is_scanned(pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scan", "small_net:Prototypes", "--write", "test_prototypes.py"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Inputs: none\n\nPrototypes: 1 layer, 12 parameters; 1 forward on cpu, loss random\n")
    assert "    return ()\n" in Path("test_prototypes.py").read_text("utf-8")
    result = pytester.runpytest("--snapshot-update", "test_prototypes.py")
    assert result.ret == 0


@pytest.mark.usefixtures("_plugin_alone")
def test_the_file_of_tests_that_scan_writes_passes(pytester: pytest.Pytester) -> None:
    assert cli.main(["scan", "small_net:make_model", "--write", "tests/test_net.py"]) == 1
    written = Path("tests/test_net.py").read_text("utf-8")
    assert "from small_net import make_model" in written
    assert '@pytest.mark.xfail(reason="never called: unused", strict=True)' in written
    assert '        "batch_independent": "(root) mixes the batch: ' in written
    result = pytester.runpytest("--snapshot-update", "tests/test_net.py")
    result.assert_outcomes(passed=17, skipped=7, xfailed=3)


@pytest.mark.usefixtures("_plugin_alone")
def test_what_scan_prints_is_what_its_file_expects(
    pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["scan", "small_net:Idle", "--write", "test_idle.py"]) == 1
    out = capsys.readouterr().out
    said = (
        "unused has a zero gradient: all 12 elements of its output's gradient are 0 in 1 backward; "
        "1 of 4 layers looked at"
    )
    assert f"\nFindings:\n  {said}\n\n" in out
    assert "\n1 finding, " in out
    assert f'reason="{said}", strict=True)' in Path("test_idle.py").read_text("utf-8")
    pytester.runpytest("--snapshot-update", "-k", "layers", "test_idle.py").assert_outcomes(xfailed=1)


def test_the_layers_that_scan_shows_are_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    scanned = ScannedModel(load("small_net:Many"), ModelProbe(), [Input((4, 8))])
    command._show_record(scanned, [])
    assert "\n... 4 rows more: --layers '**' shows them all\n" in capsys.readouterr().out
    command._show_record(scanned, ["63"])
    assert "\n63 " in (chosen := capsys.readouterr().out)
    assert "\n62 " not in chosen


def test_what_scan_prints_in_a_terminal_fits_its_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    cli.main(["scan", "small_net:make_model"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 60
    assert "\n  batch_independent           broken          (root) " in out


def test_scan_overwrites_no_file(pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]) -> None:
    pytester.makepyfile(test_mine="def test(): pass")
    assert cli.main(["scan", "small_net:make_model", "--write", "test_mine.py"]) == 2
    assert capsys.readouterr().err == "modelprobe: test_mine.py is there already: name another file\n"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Detached", ["never called: unused", "no gradient: "]), ("Chosen", ["never called: unused"])],
)
def test_a_trainable_model_whose_output_has_no_gradient_is_a_finding(name: str, expected: list[str]) -> None:
    found = ScannedModel(load(f"small_net:{name}"), ModelProbe(), [Input((4, 8))]).findings()
    assert len(found) == len(expected)
    assert all(map(str.startswith, found, expected))


def test_a_default_configuration_of_billions_of_parameters_is_refused() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match=r"^LlamaModel has [\d,]{13} parameters by its default configuration: name a"):
        load("transformers:LlamaModel").make()


def test_compare_tells_the_command_to_start_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "small_net:Refuses", "small_net:Net"]) == 2
    assert "start from: modelprobe compare small_net:Refuses small_net:Net --input 4x8." in capsys.readouterr().err
