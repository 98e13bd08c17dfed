"""``--modelprobe-save`` and `modelprobe replay`: the call of a layer that differs, as a file."""

from __future__ import annotations

import enum
import functools
import importlib
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import pytest_modelprobe.snapshot.comparer
import pytest_modelprobe.snapshot.snapshot  # noqa: F401 - pytester forgets what its runs import
from pytest_modelprobe.cli import main
from pytest_modelprobe.extras.replay.encoding import Decoder, Encoder

ATTENTION = """
from torch import nn

class SelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm = nn.LayerNorm(width // heads)

    def forward(self, x, causal=False):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        return self.out((weights.softmax(-1) @ v).transpose(1, 2).flatten(2))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.norm = SelfAttention(16, 4), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(x + self.attn(x, causal=False))
"""

TEST = """
from models import Block

def test_block(modelprobe, modelprobe_snapshot):
    model = modelprobe.build(Block)
    assert modelprobe.run(model, modelprobe.randn(2, 5, 16)) == modelprobe_snapshot
"""

Replay = Callable[..., tuple[int, str, str]]


@pytest.fixture
def replay(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Replay:
    """Runs `modelprobe replay` as a new process would: with the code that is there now."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "path", [*sys.path])
        for name in [name for name in sys.modules if name in ("models", "test_it")]:
            del sys.modules[name]
        sys.dont_write_bytecode = True  # two versions of a file within one second have the same cache
        importlib.invalidate_caches()
        capsys.readouterr()
        code = main(["replay", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def changed(pytester: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    """Writes a snapshot of a test, changes a line of its model, and runs the test again."""

    def run(old: str, new: str, *options: str, code: str = ATTENTION, test: str = TEST) -> pytest.RunResult:
        pytester.makepyfile(models=code, test_it=test)
        pytester.runpytest("--snapshot-update").assert_outcomes(passed=1)
        assert code.count(old) == 1
        pytester.makepyfile(models=code.replace(old, new))
        return pytester.runpytest("--modelprobe-save=calls", *options)

    return run


def saved(pytester: pytest.Pytester) -> Path:
    (file,) = (pytester.path / "calls").iterdir()
    return file


def test_a_layer_that_differs_is_one_file_that_tells_when_the_code_is_right_again(
    changed: Callable[..., pytest.RunResult], replay: Replay, pytester: pytest.Pytester
) -> None:
    result = changed("** -0.5", "** -1")
    result.assert_outcomes(failed=1)
    file = saved(pytester)
    assert file.name == "test_it.py.test_block.attn.safetensors"
    result.stdout.fnmatch_lines([f"the call of attn alone is saved: modelprobe replay calls/{file.name}"])

    code, out, _ = replay(file)
    assert code == 1
    told = re.fullmatch(
        r"attn still differs from the other side: out input by (\d+ %)\n\n"
        r"value +from what was saved +from the other side\nout input +same +(\d+ %)\n\n"
        r"Saved by test_it.py::test_block, in mode train on cpu\n",
        out,
    )
    assert told
    assert told[1] == told[2]

    pytester.makepyfile(models=ATTENTION)
    code, out, _ = replay(file)
    first, *_, last = out.splitlines()
    assert (code, first) == (0, "attn no longer differs from the other side; 1 value looked at")
    assert last == (
        "The source of models.SelfAttention is another one than when this was saved; its attributes are as they were"
    )


def test_a_step_of_training_in_half_precision_with_dropout_is_replayed_exactly(
    changed: Callable[..., pytest.RunResult], replay: Replay, pytester: pytest.Pytester
) -> None:
    changed(
        "** -0.5",
        "** -1",
        code=ATTENTION.replace("(weights.softmax(-1) @ v)", "(nn.functional.dropout(weights.softmax(-1)) @ v)"),
        test="""
        import torch
        from models import Block

        def test_block(modelprobe, modelprobe_snapshot):
            model = modelprobe.build(Block).bfloat16().train()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with modelprobe.watch(model) as watch:
                model(modelprobe.randn(2, 5, 16).bfloat16()).sum().backward()
                optimizer.step()
            assert watch.first_step == modelprobe_snapshot(allow="dropout")
        """,
    ).assert_outcomes(failed=1)
    code, out, _ = replay(saved(pytester))
    assert code == 1
    assert re.search(r"^out input   same  +\d+ %$", out, re.MULTILINE)


def test_an_attribute_of_a_transformers_layer_is_told_also_where_two_models_are_compared(
    pytester: pytest.Pytester, replay: Replay
) -> None:
    pytester.makepyfile(
        test_it="""
        from transformers import BertConfig, BertModel
        from pytest_modelprobe import assert_same_behavior

        def test_bert(modelprobe):
            sizes = dict(hidden_size=16, num_attention_heads=2, num_hidden_layers=2, intermediate_size=8, vocab_size=32)
            port, reference = (modelprobe.build(lambda: BertModel(BertConfig(**sizes)).eval()) for _ in range(2))
            port.encoder.layer[1].attention.self.scaling = 0.3536
            ids = modelprobe.randint(0, 32, (2, 6))
            assert_same_behavior(modelprobe.run(port, ids), modelprobe.run(reference, ids))
        """
    )
    pytester.runpytest("--modelprobe-save=calls").assert_outcomes(failed=1)
    code, out, _ = replay(saved(pytester))
    assert code == 1
    layer = "encoder.layer.1.attention.self"
    first, *_, last = out.splitlines()
    assert first.startswith(f"{layer} still differs from the other side: output[0] by ")
    assert last == "With scaling = 0.3535533905932738, as on the other side, it no longer differs"
    code, out, _ = replay(saved(pytester), "--dtype", "float64")
    assert (code, out.splitlines()[0]) == (1, first)

    with safe_open(saved(pytester), "pt") as opened:
        text, tensors = opened.metadata()["modelprobe"], {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    save_file(tensors, "elsewhere", metadata={"modelprobe": text.replace('"device": "cpu"', '"device": "cuda:0"')})
    code, out, _ = replay("elsewhere")
    told = f"{layer} is the same as both sides: another device rounds too much to tell them apart"
    assert (code, out.splitlines()[0]) == (2, told)


def test_where_weights_are_the_cause_there_is_no_call_to_save(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it="""
        from torch import nn
        from pytest_modelprobe import assert_same_behavior

        def test_weights(modelprobe):
            model, x = modelprobe.build(lambda: nn.Sequential(nn.Linear(4, 4))), modelprobe.randn(2, 4)
            record = modelprobe.run(model, x)
            nn.init.ones_(model[0].weight)
            assert_same_behavior(modelprobe.run(model, x), record)
        """
    )
    result = pytester.runpytest("--modelprobe-save=calls")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["no call is saved: no layer that is a cause computes something else when*"])
    assert not (pytester.path / "calls").exists()


def test_what_cannot_be_replayed_is_said_in_a_sentence(
    changed: Callable[..., pytest.RunResult], replay: Replay, pytester: pytest.Pytester
) -> None:
    changed("** -0.5", "** -1")
    file = saved(pytester)

    def with_code(old: str, new: str) -> str:
        assert old in ATTENTION
        pytester.makepyfile(models=ATTENTION.replace(old, new))
        return said(file)

    def said(*arguments: object) -> str:
        code, out, err = replay(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        return err.removeprefix("modelprobe: ").removesuffix("\n")

    assert said(file, "--device", "nonsense").startswith("device 'nonsense' cannot be used here: ")
    assert with_code("SelfAttention", "Attention") == (
        "models:SelfAttention cannot be imported (module 'models' has no attribute 'SelfAttention'): run the command "
        "in the root of the project, with the packages of the test"
    )
    assert with_code("self.heads, -1", "self.width, -1") == (
        "attn cannot be called as it was saved: AttributeError: 'SelfAttention' object has no attribute 'width'"
    )
    assert "attn cannot be called as it was saved: RuntimeError: " in with_code("self.heads, -1", "5, -1")
    assert with_code("self.qkv(x)", "self.qkv(self.qkv(x)[..., :16])") == (
        "attn calls qkv more often than when it was saved"
    )
    assert with_code("q @ k", "self.q_norm(q) @ k") == "attn calls q_norm, and did not when it was saved"
    assert with_code("self.qkv(x)", "(x @ self.qkv.weight.T)") == "attn calls qkv less often than when it was saved"

    other = pytester.path / "other.safetensors"
    assert said(other) == f"{other} is no file"
    other.write_bytes(b"nothing")
    assert f"{other} is no file of safetensors: " in said(other)
    save_file({"weight": torch.ones(1)}, other)
    assert said(other) == f"{other} holds tensors, but no call of a layer, as pytest --modelprobe-save=DIR writes"

    with safe_open(file, "pt") as opened:
        text = opened.metadata()["modelprobe"]
    save_file({}, other, metadata={"modelprobe": text.replace("models:SelfAttention", "os:system")})
    assert said(other) == "the file names os:system, of Python's standard library, which no layer is made of"
    save_file({}, other, metadata={"modelprobe": text})
    assert said(other).startswith("the layer cannot be made of what the file holds: KeyError")


def test_a_missing_library_is_said_before_any_test_runs(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    result = pytester.runpytest("--modelprobe-save=calls")
    result.stderr.fnmatch_lines(["ERROR: --modelprobe-save writes files of safetensors: pip install safetensors"])


class Odd(nn.Module):
    """A layer whose attributes are of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3).T)
        self.register_buffer("table", torch.tensor([True, False]), persistent=False)
        self.none, self.sizes = None, (1, [2.5, math.inf], {"a": torch.float16})
        self.options = SimpleOptions()
        self.also, self.again = self.options, self.weight
        self.acts, self.color, self.half = (functional.relu, torch.tanh), Color.RED, functools.partial(torch.add, 0.5)


class Color(enum.Enum):
    RED = 1


class SimpleOptions:
    def __init__(self) -> None:
        self.key, self.eps = (lambda x: x), 1e-6


def test_a_layer_is_made_of_its_attributes_without_its_constructor() -> None:
    tensors: dict[str, torch.Tensor] = {}
    encode = Encoder(tensors, {})
    layer = Odd()
    data = json.loads(json.dumps(encode(layer, "Odd")))
    made = Decoder(tensors)(data)
    assert (made.none, made.sizes, made.acts) == (None, layer.sizes, (functional.relu, torch.tanh))
    assert made.again is made.weight
    assert made.also is made.options
    assert made.options.eps == 1e-6
    assert torch.equal(made.table, layer.table)
    assert torch.equal(made.weight, layer.weight)
    assert made.color is Color.RED
    lambda_, partial = encode.left_out
    assert re.fullmatch(r"Odd.options.key is of .*<lambda>, which cannot be imported by that name", lambda_)
    assert partial.startswith("Odd.half is of functools.partial, ")
