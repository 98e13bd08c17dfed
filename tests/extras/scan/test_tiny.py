"""Models that need no file: classes of transformers with shrunk configurations, and models of timm."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from torch import nn

from pytest_modelprobe import ModelProbe, cli
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.extras.scan.scanning import ScannedModel
from pytest_modelprobe.extras.scan.target import load
from pytest_modelprobe.extras.scan.trials import Trials


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LlamaForCausalLM", "input_ids=4x16:128"),
        ("ViTForImageClassification", "pixel_values=2x3x64x64"),
        ("T5Model", "input_ids=4x16:128 decoder_input_ids=4x16:128"),
        pytest.param("DeepseekV3ForCausalLM", "input_ids=4x16:128", marks=pytest.mark.long),
    ],
)
def test_a_class_of_transformers_is_made_small_and_runs(name: str, expected: str) -> None:
    pytest.importorskip("transformers")
    scanned = ScannedModel(load(f"hf-tiny:{name}"), ModelProbe())
    assert " ".join(map(str, scanned.inputs)) == expected
    assert scanned.record.forwards == 1
    assert sum(p.numel() for p in scanned.model.parameters()) < 1_000_000


@pytest.mark.long
def test_a_class_that_does_not_run_is_tried_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transformers = pytest.importorskip("transformers")
    trials = []
    run = Trials.run
    monkeypatch.setattr(Trials, "run", lambda self, inputs: trials.append(inputs) or run(self, inputs))
    model = load("hf-tiny:RagModel").make()
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert 0 < len(trials) <= 24
    made = len(trials)
    load("hf-tiny:RagModel").make()  # what was found is kept
    assert len(trials) == made
    assert isinstance(model, transformers.RagModel)


def test_what_has_to_divide_what_still_does() -> None:
    transformers = pytest.importorskip("transformers")
    from pytest_modelprobe.extras.scan.target import shrunk

    config = shrunk(
        transformers.LlamaConfig(
            hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, eos_token_id=[9, 900]
        ),
        frozenset(["depth", "words", "widths"]),
    )
    found = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    assert found == (64, 4, 1, 16)
    assert (config.num_hidden_layers, config.vocab_size, config.eos_token_id) == (2, 128, [9, 127])


def test_a_nested_configuration_is_shrunk_too() -> None:
    transformers = pytest.importorskip("transformers")
    from pytest_modelprobe.extras.scan.target import shrunk

    config = shrunk(transformers.CLIPConfig(), frozenset(["depth", "words", "widths", "pixels"]))
    assert (config.text_config.num_hidden_layers, config.vision_config.num_hidden_layers) == (2, 2)
    assert (config.text_config.vocab_size, config.vision_config.image_size) == (128, 64)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "LlamaForCasualLM",
            r"^transformers has no model LlamaForCasualLM: is LlamaForCausalLM or \w+ or \w+ meant\?$",
        ),
        ("logging", r"^transformers has no model logging$"),
    ],
)
def test_a_class_that_transformers_does_not_have_is_refused_with_the_nearest(name: str, message: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match=message):
        load(f"hf-tiny:{name}")


@pytest.fixture
def _timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with the three functions of timm that are called."""
    timm = ModuleType("timm")
    timm.is_model = lambda name: name == "resnet18"  # type: ignore[attr-defined]
    timm.list_models = lambda: ["resnet18", "vit_tiny_patch16_224"]  # type: ignore[attr-defined]

    def create_model(name: str, *, pretrained: bool) -> nn.Module:
        assert not pretrained
        return nn.Conv2d(3, 2, 3)

    timm.create_model = create_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", timm)


@pytest.mark.usefixtures("_timm")
def test_a_model_of_timm_is_made_by_its_name() -> None:
    target = load("timm:resnet18")
    assert isinstance(target.make(), nn.Conv2d)
    assert target.expression == 'load("timm:resnet18").make()'


@pytest.mark.usefixtures("_timm")
def test_a_model_that_timm_does_not_have_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"^timm has no model resnet81: is resnet18 meant\?$"):
        load("timm:resnet81")


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match=r"^timm:resnet18 needs timm: pip install timm$"):
        load("timm:resnet18")


@pytest.mark.usefixtures("_plugin_alone")
def test_the_file_of_tests_of_a_small_model_makes_it_by_its_name(pytester: pytest.Pytester) -> None:
    pytest.importorskip("transformers")
    assert cli.main(["scan", "hf-tiny:BertModel", "--write", "test_bert.py"]) in (0, 1)
    written = (pytester.path / "test_bert.py").read_text("utf-8")
    assert "from pytest_modelprobe.extras.scan.target import load\n" in written
    assert 'def make_model():\n    return load("hf-tiny:BertModel").make()\n' in written
    result = pytester.runpytest("--snapshot-update", "-k", "layers", "test_bert.py")
    assert result.ret == 0
