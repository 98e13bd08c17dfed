"""`--modelprobe-base` in a repository whose tests know nothing of it: their models are compared, and they pass or fail
as they do by themselves.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
import torch

from pytest_modelprobe import extension
from pytest_modelprobe.plugin.revisions import NOTHING_COMPARED

from .test_base import Project, text_of

NET = """
    import torch
    from torch import nn


    class Attention(nn.Module):
        def __init__(self, dim, dim_head=8):
            super().__init__()
            self.dim, self.dim_head = dim, dim_head
            self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
            self.to_out = nn.Linear(dim, dim)
            self.dropout = nn.Dropout(0.1)

        def forward(self, x):
            \"\"\"Mix the positions of (batch, position, channel).\"\"\"
            b, n, d = x.shape
            q, k, v = self.to_qkv(x).view(b, n, 3, -1, self.dim_head).permute(2, 0, 3, 1, 4)
            scale = self.dim_head ** -0.5
            attn = self.dropout((q @ k.transpose(-2, -1) * scale).softmax(-1))
            return self.to_out((attn @ v).transpose(1, 2).reshape(b, n, d))


    class Encoder(nn.Module):
        def __init__(self, dim=16, depth=2):
            super().__init__()
            self.layers = nn.ModuleList(Attention(dim) for _ in range(depth))
            self.head = nn.Linear(dim, 4)

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return self.head(x.mean(1))
"""

TESTS = """
    import copy
    import pickle
    import unittest

    import pytest
    import torch
    from net import Attention, Encoder


    @pytest.fixture(scope="session")
    def shared():
        return Encoder()


    @pytest.fixture
    def x():
        return torch.randn(2, 5, 16)


    def test_shared(shared, x):
        assert shared(x).shape == (2, 4)


    def test_shared_again(shared, x):
        with torch.no_grad():
            assert shared.eval()(x).isfinite().all()


    @pytest.mark.parametrize("depth", [1, 3])
    def test_depth(depth, x):
        assert len(Encoder(depth=depth).layers) == depth
        Encoder(depth=depth)(x)


    def test_a_seed_that_is_set_twice_makes_the_same_model(x):
        nets = []
        for _ in range(2):
            torch.manual_seed(1)
            nets.append(Encoder().eval())
        assert torch.equal(nets[0](x), nets[1](x))
        assert not torch.equal(nets[0](x), Encoder().eval()(x))


    def test_a_state_that_is_put_back_gives_the_same_dropout(x):
        net, state = Encoder(), torch.get_rng_state()
        first = net(x)
        torch.set_rng_state(state)
        assert torch.equal(first, net(x))


    def test_training():
        net = Encoder()
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        x, y, losses = torch.randn(8, 4, 16), torch.arange(8) % 4, []
        for _ in range(20):
            losses.append(torch.nn.functional.cross_entropy(net(x), y))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        assert losses[-1] < losses[0]


    @pytest.mark.filterwarnings("ignore")
    def test_copies(x):
        net = Encoder().eval()
        before = net(x)
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.jit.trace(net, x)):
            assert torch.equal(before, other(x))


    def test_a_part_of_a_model(x):
        assert Encoder().layers[1](x).shape == x.shape


    def test_no_hook_is_on_the_model(x):
        net = Encoder()
        net(x)
        assert not any(module._forward_hooks for module in net.modules())


    def test_data_parallel(tmp_path, x):
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            net = torch.nn.parallel.DistributedDataParallel(Encoder())
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            net(x).square().mean().backward()
            optimizer.step()
        finally:
            torch.distributed.destroy_process_group()


    class TestAttention(unittest.TestCase):
        def test_shape(self):
            self.assertEqual(Attention(16)(torch.randn(1, 2, 16)).shape, (1, 2, 16))


    def test_that_fails(x):
        assert Encoder()(x).shape == (2, 5)


    def test_without_a_model():
        pass
"""

CHANGE = "scale = self.dim_head ** -0.5", "scale = self.dim ** -0.5"


@pytest.fixture
def plain(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, _forked: None) -> Project:
    """A repository with a model and tests that name no fixture of this package."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    project = Project(pytester)
    project.write("src/net.py", NET)
    project.write("tests/test_net.py", TESTS)
    project.commit("an encoder")
    return project


by_use = pytest.mark.skipif(extension.selection() is None, reason="needs the extra that says what a test uses")


def test_a_change_is_named_with_its_source_and_no_outcome_differs(plain: Project) -> None:
    plain.replace("src/net.py", *CHANGE)
    result = plain.run("--modelprobe-base=HEAD", "--modelprobe-base-all", "--modelprobe-json=results.json")
    result.assert_outcomes(passed=13, failed=1)
    said = text_of(result)
    # Three of the same seeds, and a model and two copies; not in the test that fails, nor in that of the hooks.
    assert "11 tests ran 15 models of 2 classes: 15 changed\n" in said
    assert "layers.*: own code changed between to_qkv and dropout x2: by" in said
    source = "  src/net.py:17 Attention.forward\n  - scale = self.dim_head ** -0.5\n  + scale = self.dim ** -0.5\n"
    assert source in said
    assert "1 test, as tests/test_net.py::test_no_hook_is_on_the_model: not compared: passes, but not while" in said
    assert "E       assert torch.Size([2, 4]) == (2, 5)" in said
    assert plain.worktrees() == 1
    tests = json.loads((plain.path / "results.json").read_text("utf-8"))["tests"]
    (pair,) = next(test["base"] for test in tests if test["id"].endswith("test_training"))
    assert (pair["record"], pair["model"], pair["verdict"]) == ("Encoder 1", "Encoder", "changed")
    assert source in pair["text"]
    assert pair["source"] == {"file": "src/net.py", "line": 17}  # of the annotation


def test_a_layer_that_is_added_changes_no_weight_of_the_others(plain: Project) -> None:
    plain.replace("src/net.py", "self.layers =", "self.extra = nn.Linear(3, 3)\n        self.layers =")
    said = text_of(plain.run("--modelprobe-base=HEAD", "-k", "test_shared_again"))
    assert "\noutput unchanged; structure differs in 1 place: extra added: Linear" in said


def test_the_same_code_computes_the_same(plain: Project) -> None:
    arguments = ["--modelprobe-base=HEAD", "--deselect", "tests/test_net.py::test_that_fails"]
    result = plain.run(*arguments, "--modelprobe-base-all")
    assert result.ret == 0
    assert "11 tests ran 15 models of 2 classes: 15 the same\n" in text_of(result)
    result = plain.run(*arguments)
    assert result.ret == 0
    assert "13 tests not run again, for nothing that they use differs" in result.outlines


@by_use
def test_a_test_that_uses_nothing_that_differs_does_not_run_there(plain: Project) -> None:
    plain.write(
        "src/other.py",
        "from torch import nn\n\nclass Other(nn.Linear):\n    pass\n\nclass Neighbor(nn.Linear):\n    pass\n",
    )
    plain.write(
        "tests/test_other.py",
        "import torch, other\n\ndef test_other():\n    other.Other(2, 2)(torch.ones(1, 2))\n\n"
        "def test_other_s_neighbor():\n    other.Neighbor(2, 2)(torch.ones(1, 2))\n",
    )
    plain.commit("another model")
    plain.replace(
        "src/other.py",
        "Other(nn.Linear):\n    pass",
        "Other(nn.Linear):\n    forward = lambda self, x: 2 * super(Other, self).forward(x)",
    )
    plain.replace("pyproject.toml", "[tool", '[project]\nname = "net"\nversion = "2"\n\n[tool')
    plain.write(".github/workflows/test.yml", "on: push\n")
    selected = ["--modelprobe-base=HEAD", "-k", "test_other or test_shared"]
    said = text_of(plain.run(*selected))
    assert "1 test ran 1 model of 1 class: 1 changed; 3 tests not run again, for nothing that they use differs" in said
    everything = "4 tests ran 4 models of 3 classes: 1 changed, 3 the same\n"
    assert everything in text_of(plain.run(*selected, "--modelprobe-base-all"))
    plain.replace("pyproject.toml", "addopts", 'markers = ["slow"]\naddopts')
    assert everything in text_of(plain.run(*selected))


@by_use
def test_a_test_that_makes_no_module_of_the_class_that_differs_does_not_run_there(plain: Project) -> None:
    plain.write(
        "src/zoo.py",
        """
        import functools
        from torch import nn

        class Tanh(nn.Module):
            def forward(self, x):
                return x.tanh()

        class Block(nn.Module):
            def __init__(self, act):
                super().__init__()
                self.act = {"tanh": Tanh, "relu": nn.ReLU}[act]()
            def forward(self, x):
                return self.act(x)

        class Scale(nn.Module):
            def forward(self, x):
                return 2 * x

        class Borrowing(nn.Module):
            def forward(self, x):
                return Scale.forward(self, x)

        @functools.cache
        def kept():
            return Block("tanh")
        """,
    )
    plain.write(
        "tests/test_zoo.py",
        """
        import torch
        from zoo import Block, Borrowing, kept

        def test_borrowing():
            Borrowing()(torch.randn(4))

        def test_tanh():
            Block("tanh")(torch.randn(4))

        def test_relu():
            Block("relu")(torch.randn(4))

        def test_kept():
            assert kept() is kept()

        def test_kept_by_another_test():
            Block("relu")(kept().act.forward(torch.ones(4)))
        """,
    )
    plain.commit("blocks")
    plain.replace("src/zoo.py", "x.tanh()", "1.1 * x.tanh()")
    plain.replace("src/zoo.py", "return 2 * x", "return 3 * x")
    said = text_of(plain.run("--modelprobe-base=HEAD", "tests/test_zoo.py", "-k", "test_tanh or test_relu"))
    assert "1 test ran 1 model of 1 class: 1 changed; 1 test not run again, for nothing that they use differs" in said
    said = text_of(plain.run("--modelprobe-base=HEAD", "tests/test_zoo.py"))
    assert "4 tests ran 4 models of 2 classes: 3 changed, 1 the same\n" in said


@by_use
def test_what_changed_outside_of_the_model_is_shown(plain: Project) -> None:
    plain.write("src/data.py", "import torch\n\nSCALE = 1\n\ndef batch():\n    return SCALE * torch.ones(1, 5, 16)\n")
    plain.write(
        "tests/test_data.py",
        "from data import batch\nfrom net import Encoder\n\ndef test_batch():\n    Encoder()(batch())\n",
    )
    plain.commit("data")
    plain.replace("src/data.py", "SCALE = 1", "SCALE = 2")
    plain.replace("src/data.py", "ones(1", "ones(2")
    said = text_of(plain.run("--modelprobe-base=HEAD"))
    assert "input (1, 5, 16) float32 → (2, 5, 16) float32: " in said
    assert "  src/data.py:3 SCALE\n  - SCALE = 1\n  + SCALE = 2\n  src/data.py:6 batch\n" in said


def test_a_test_without_a_record_changes_a_shared_model_on_both_sides(plain: Project) -> None:
    plain.write(
        "tests/test_shared.py",
        """
        import pytest, torch
        from torch import nn

        class Net(nn.Linear):
            def __init__(self):
                super().__init__(2, 2)
                self.register_buffer("state", torch.zeros(2))

            def forward(self, x):
                return super().forward(x) + self.state

        @pytest.fixture(scope="module")
        def net():
            return Net()

        def test_that_writes(net):
            net.state += 1

        def test_that_runs(net):
            net(torch.ones(1, 2))
        """,
    )
    plain.commit("a model with a state")
    said = text_of(plain.run("--modelprobe-base=HEAD", "--modelprobe-base-all", "tests/test_shared.py"))
    assert "1 test ran 1 model of 1 class: 1 the same\n" in said


def test_code_that_a_zero_hides_is_compared_where_its_file_differs(plain: Project) -> None:
    plain.replace("src/net.py", "x = x + layer(x)", "x = x + self.gate * layer(x)")
    plain.replace("src/net.py", "self.head =", "self.gate = nn.Parameter(torch.zeros(()))\n        self.head =")
    plain.commit("a gate that is zero at first")
    arguments = ["--modelprobe-base=HEAD", "-k", "test_shared", "--modelprobe-base-all"]
    assert "2 tests ran 2 models of 1 class: 2 the same\n" in text_of(plain.run(*arguments))
    plain.replace("src/net.py", "x = x + self.gate * layer(x)", "x = (x + self.gate * layer(x))  # gated")
    assert "2 tests ran 2 models of 1 class: 2 the same\n" in text_of(plain.run(*arguments))
    plain.replace("src/net.py", "self.gate * layer(x)", "3 * self.gate * layer(x)")
    said = text_of(plain.run(*arguments))
    assert "2 tests ran 2 models of 1 class: 2 changed\n" in said
    assert "output unchanged; (root): own code changed between layers.0 and layers.1" in said


def test_another_model_of_the_class_that_is_called_first_is_no_change(plain: Project) -> None:
    forward = "    def forward(self, x):\n        for"
    plain.replace("src/net.py", forward, f"    def warm(self, x):\n        pass\n\n{forward}")
    plain.commit("nothing")
    plain.replace("src/net.py", "        pass\n", "        Encoder(depth=1).eval()(x)\n")
    plain.replace("tests/test_net.py", "with torch.no_grad():", "shared.warm(x)\n    with torch.no_grad():")
    said = text_of(plain.run("--modelprobe-base=HEAD", "-k", "test_shared_again"))
    assert "1 test ran 1 model of 1 class: 1 the same; 1 record of one side alone" in said


def test_a_new_argument_leaves_the_other_side_its_own_tests(plain: Project) -> None:
    plain.replace("src/net.py", *CHANGE)
    plain.replace("src/net.py", "def __init__(self, dim=16, depth=2)", "def __init__(self, dim=16, depth=2, heads=2)")
    plain.replace("tests/test_net.py", "assert shared(x).shape", "Encoder(heads=3)\n    assert shared(x).shape")
    said = text_of(plain.run("--modelprobe-base=HEAD", "-k", "test_shared"))
    assert "2 tests ran 2 models of 1 class: 2 changed\n" in said


def test_a_test_that_does_not_pass_while_it_is_watched_passes_and_is_not_compared(plain: Project) -> None:
    plain.write(
        "tests/test_golden.py",
        """
        import functools
        import sys

        import pytest, torch
        from net import Encoder

        @functools.cache
        def cached():
            torch.manual_seed(0)
            return Encoder()

        def test_weights_are_drawn_by_the_generator():
            torch.manual_seed(0)
            first = torch.nn.Linear(16, 48, bias=False).weight
            assert torch.equal(cached().layers[0].to_qkv.weight, first)

        class Base(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = Encoder()
                self.caller = sys._getframe(1).f_code.co_name

        def test_skipped_unless_the_constructor_is_called_by_it():
            if Base().caller != "test_skipped_unless_the_constructor_is_called_by_it":
                pytest.skip("called otherwise")

        def test_that_leaves_its_working_directory(tmp_path, monkeypatch):
            monkeypatch.chdir(tmp_path)
            tmp_path.rmdir()
            cached()(torch.ones(1, 2, 16))
            open(__file__).close()

        def test_random_numbers_go_on():
            cached()
            assert torch.initial_seed() == 0
        """,
    )
    plain.commit("golden numbers")
    plain.replace("src/net.py", *CHANGE)
    result = plain.run("--modelprobe-base=HEAD", "tests/test_golden.py")
    result.assert_outcomes(passed=4)
    said = text_of(result)
    for test, why in (
        ("weights_are_drawn_by_the_generator", "assert False"),
        ("skipped_unless_the_constructor_is_called_by_it", "Skipped: called otherwise"),
    ):
        assert f"{test}: not compared: passes, but not while its models are watched ({why}" in said
    assert "1 test ran 1 model of 1 class: 1 changed\n" in said


def test_texts_with_the_path_of_a_side_do_not_differ(plain: Project) -> None:
    plain.replace("src/net.py", "self.head =", "self.file, self.to = __file__, str(to)\n        self.head =")
    plain.replace("src/net.py", "depth=2):", "depth=2, to=None):")
    plain.write(
        "tests/test_path.py",
        "import net, torch\n\ndef test_path(tmp_path):\n    net.Encoder(to=tmp_path / 'x')(torch.ones(1, 2, 16))\n",
    )
    plain.commit("paths")
    result = plain.run("--modelprobe-base=HEAD", "--modelprobe-base-all", "tests/test_path.py")
    assert "1 test ran 1 model of 1 class: 1 the same" in result.outlines


def test_files_that_git_does_not_have_are_there_too(plain: Project) -> None:
    other = plain.path / "other"
    plain.write("other/weights.txt", "3\n")
    plain.write(".gitignore", ".pytest_cache\n__pycache__\nweights.pt\nsrc/built.py\n")
    plain.write("src/built.py", "scale = 2\n")
    plain.write(
        "tests/test_files.py",
        """
        import built, pathlib, torch
        from net import Encoder

        def test_weights():
            root = pathlib.Path(__file__).parents[1]
            x = torch.load(root / "weights.pt") * built.scale
            Encoder()(x * int((root / "part" / "weights.txt").read_text()))
        """,
    )
    torch.save(torch.ones(1, 2, 16), plain.path / "weights.pt")
    for command in ("init -q", "add .", "commit -q -m one"):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *command.split()], cwd=other, check=True)
    plain.git("-c", "protocol.file.allow=always", "submodule", "add", "-q", str(other), "part")
    shutil.rmtree(other)
    plain.commit("with files")
    plain.replace("src/net.py", *CHANGE)
    said = text_of(plain.run("--modelprobe-base=HEAD", "tests/test_files.py"))
    assert "1 test ran 1 model of 1 class: 1 changed\n" in said


def test_what_hangs_on_the_other_side_leaves_the_rest_compared(plain: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_modelprobe.revisions.TestsOn.seconds", 15)
    plain.replace("src/net.py", *CHANGE)
    plain.replace("src/net.py", "self.head =", "while depth == 3: pass\n        self.head =")
    plain.commit("hangs")
    plain.replace("src/net.py", "while depth == 3: pass", "pass")
    said = text_of(plain.run("--modelprobe-base=HEAD", "-k", "test_depth or test_shared_again"))
    assert (
        "there tests/test_net.py::test_depth[3]: stopped: tests/test_net.py::test_depth[3] did not end within" in said
    )
    assert "2 tests ran 2 models of 1 class" in said


def test_what_is_imported_by_name_is_a_dependency(plain: Project) -> None:
    call = "(torch.ones(1, 2, 16))"
    plain.write("src/registry.py", "import importlib\n\nmake = lambda name: importlib.import_module(name).Encoder()\n")
    plain.write("src/named.py", "import pkgutil\n\nmake = lambda: pkgutil.resolve_name('net.Encoder')()\n")
    plain.write("tests/net.yaml", "net.Encoder\n")
    tests = {
        "registry": f"import registry, torch\n\ndef test_registry():\n    registry.make('n' + 'et'){call}\n",
        "named": f"import named, torch\n\ndef test_named():\n    named.make(){call}\n",
        "yaml": "import pathlib, pydoc, torch\n\ndef test_yaml():\n"
        f"    pydoc.locate((pathlib.Path(__file__).parent / 'net.yaml').read_text().strip())(){call}\n",
        "plain": "def test_plain():\n    pass\n",
    }
    for name, text in tests.items():
        plain.write(f"tests/test_{name}.py", text)
    plain.commit("made elsewhere")
    plain.replace("src/net.py", *CHANGE)
    said = text_of(plain.run("--modelprobe-base=HEAD", "-k", " or ".join(tests)))
    assert (
        "3 tests ran 3 models of 1 class: 3 changed; 1 test not run again, for nothing that they use differs\n" in said
    )


@by_use
def test_what_an_import_does_or_finds_is_a_dependency(plain: Project) -> None:
    call = "net.Encoder()(scale * torch.ones(1, 2, 16))"
    plain.write("src/scales.py", "FACTOR = 2\n")
    plain.write("src/patches.py", "import scales\n\nscales.FACTOR = 3\n")
    plain.write("src/patched.py", "import scales\n\ndef scale():\n    return scales.FACTOR\n")
    plain.write("src/fast.py", "SCALE = 2\n")
    plain.write("src/optional.py", "try:\n    from fast import SCALE\nexcept ImportError:\n    SCALE = 1\n")
    meta = "class Meta(type):\n    def __init__(cls, name, *_):\n        CLASSES[name.lower()] = cls\n"
    plain.write("src/meta.py", f"CLASSES = {{}}\n\n{meta}\nclass Base(metaclass=Meta):\n    pass\n")
    plain.write("src/listed.py", "import meta\n\nclass Listed(meta.Base):\n    SCALE = 2\n")
    plain.write("scripts/train.py", "SCALE = 2\n")
    script = "import pathlib, scales\nfile = pathlib.Path(__file__.replace('tests/test_script', 'scripts/train'))"
    for name, imports, scale in (
        ("new", "import patched", "patched.scale()"),
        ("missing", "import optional", "optional.SCALE"),
        ("meta", "import listed, meta", "meta.CLASSES['listed'].SCALE"),
        ("plain", "import scales", "2"),
        ("script", f"{script}\nexec(file.read_text())", "SCALE"),
    ):
        text = f"import net, torch\n{imports}\n\ndef test_{name}():\n    scale = {scale}\n    {call}\n"
        plain.write(f"tests/test_{name}.py", text)
    plain.commit("scales")
    (plain.path / "src/fast.py").unlink()
    plain.replace("src/patched.py", "import scales", "import patches\nimport scales")
    plain.replace("src/listed.py", "2", "3")
    plain.replace("scripts/train.py", "2", "3")
    tests = [f"tests/test_{name}.py" for name in ("new", "missing", "meta", "plain")]
    assert (
        "3 tests ran 3 models of 1 class: 3 changed; 1 test not run again, for nothing that they use differs\n"
    ) in text_of(plain.run("--modelprobe-base=HEAD", *tests))
    said = text_of(plain.run("--modelprobe-base=HEAD", "tests/test_script.py"))
    assert "1 test ran 1 model of 1 class: 1 changed\n" in said


def test_tests_that_run_no_model_of_their_own_compare_nothing(plain: Project) -> None:
    plain.write(
        "tests/test_net.py", "import torch\n\ndef test_linear():\n    torch.nn.Linear(2, 2)(torch.ones(1, 2))\n"
    )
    result = plain.run("--modelprobe-base=HEAD")
    assert result.ret == NOTHING_COMPARED
    assert "nothing was compared: no test that passed makes or calls a model of your own classes" in text_of(result)


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-n2"], "11 tests ran 15 models of 2 classes: 15 changed\n"),
        # The order of tests of a shared model decides in which mode it is.
        (
            ["-p", "randomly", "-p", "xdist", "-n2", "-k", "not shared"],
            "9 tests ran 13 models of 2 classes: 13 changed\n",
        ),
    ],
    ids=["workers", "another order"],
)
def test_workers_and_another_order_change_nothing(plain: Project, arguments: list[str], said: str) -> None:
    pytest.importorskip("xdist")
    plain.replace("src/net.py", *CHANGE)
    assert said in text_of(plain.run("--modelprobe-base=HEAD", "--modelprobe-base-all", *arguments))
