"""Which definitions of a repository a test reaches, of those that differ between two sides."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_modelprobe.extras.selection.definitions import Definitions, differing

FILES = {
    "pkg/__init__.py": """
        from .attention import Attention, scaled
        from .models import *
        from . import norms
        """,
    "pkg/attention.py": """
        import torch
        from .norms import RMSNorm as Norm

        SCALE = 0.5

        @torch.no_grad()
        def scaled(x): return x * SCALE

        def unused(x): return x

        class Attention(torch.nn.Module):
            def __init__(self): self.norm = Norm()
        """,
    "pkg/norms.py": """
        class RMSNorm: pass
        class LayerNorm: pass
        class GroupNorm: pass
        NAMED = {"group": GroupNorm}
        def chosen(name): return globals()[name]
        """,
    "pkg/models.py": """
        from pkg import norms
        from pkg.registry import registered

        class Model:
            def __init__(self): self.norm = norms.LayerNorm()

        class Other(Model): pass

        @registered
        class Listed: pass
        """,
    "pkg/registry.py": """
        ALL = {}
        def registered(cls): return ALL.setdefault(cls.__name__, cls)
        """,
    "tests/test_it.py": """
        import pytest
        import pkg
        from pkg import Attention, scaled

        @pytest.fixture
        def model(): return pkg.Model()

        @pytest.fixture(autouse=True)
        def seeded(): scaled(1)

        def test_attention(): Attention().eval()
        def test_model(model): model(1)
        def test_text(monkeypatch): monkeypatch.setattr("pkg.attention.unused", None)
        def test_by_name(): pkg.norms.chosen("LayerNorm")
        def test_table(): pkg.norms.NAMED["group"]
        def test_passed_on(): help(pkg)
        class TestOther:
            def test_it(self): pkg.Other()
        """,
}


def reached(folder: Path, test: str) -> set[str]:
    """Return the names that a test reaches, but for those that are reached by all."""
    files = []
    for name, text in FILES.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(line[8:] for line in text.splitlines()))
        module = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        package = module if name.endswith("__init__.py") else module.rpartition(".")[0]
        files.append((file, module, package))
    found = Definitions(files).reached(test, files[-1][0], [file for file, *_ in files], [])
    defined = {name for _, name in found if any(f" {name}" in text for text in FILES.values())}
    return defined & {"Attention", "unused", "RMSNorm", "LayerNorm", "GroupNorm", "Model", "Other", "Listed", "scaled"}


ALWAYS = {"scaled", "Listed"}
"""A fixture uses the one, and the import of the package registers the other."""


@pytest.mark.parametrize(
    ("test", "names"),
    [
        ("test_attention", {"Attention", "RMSNorm"}),  # under another name
        ("test_model[1]", {"Model", "LayerNorm"}),  # by a fixture, an import of all, and a module
        ("test_text", {"unused"}),  # in a text
        ("test_by_name", {"RMSNorm", "LayerNorm", "GroupNorm"}),  # by a name that is not known
        ("test_table", {"GroupNorm"}),
        ("test_passed_on", {"Attention", "unused", "RMSNorm", "LayerNorm", "GroupNorm", "Model", "Other"}),
        ("TestOther::test_it", {"Other", "Model", "LayerNorm"}),  # by its base class
    ],
)
def test_a_test_reaches_what_it_names(tmp_path: Path, test: str, names: set[str]) -> None:
    assert reached(tmp_path, test) == ALWAYS | names


BEFORE = b"""
import torch
from .norms import RMSNorm, LayerNorm

SCALE = 1

def scaled(x):
    return x * SCALE

torch.manual_seed(0)
"""


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        (b"SCALE = 1", b"SCALE = 2", {"SCALE"}),
        (b"return x * SCALE", b"return  x * SCALE  # as it was", set()),
        (b"return x * SCALE", b"return x", {"scaled"}),
        (b".norms import RMSNorm, LayerNorm", b".norms import RMSNorm, LayerNorm, GroupNorm", {"GroupNorm"}),
        (b"RMSNorm, LayerNorm", b"LayerNorm as RMSNorm", {"RMSNorm", "LayerNorm"}),
        (b"manual_seed(0)", b"manual_seed(1)", {""}),  # what an import executes
        (b"import torch", b"import torch, patches", {"patches", "import patches", ""}),
        (b"import torch", b"import torch, pkg.blocks", {"pkg", "import pkg.blocks"}),
    ],
)
def test_names_that_two_versions_define_otherwise(old: bytes, new: bytes, names: set[str]) -> None:
    assert old in BEFORE
    assert differing(BEFORE.replace(old, new), BEFORE, ["pkg"]) == names


MADE = "def made(): return 1\n"
STAR = "from pkg.other import *\n"
USED = "from pkg import net\ndef test(): net.made()"
IMPORTED = "import pkg.net\ndef test(): 0"
RENAMED = "from pkg import net as F"


def users(folder: Path, net: str, old: str, new: str, test: str, other: str) -> list[str]:
    """Return which tests, of two, use what differs in a module of a package that has another one."""
    assert old in net
    texts = {"pkg.net": net.replace(old, new, 1), "pkg.other": other, "it": f"{test}\ndef test_other(): 0\n"}
    files = [(folder / f"{module}.py", module, module.rpartition(".")[0]) for module in texts]
    for file, module, _ in files:
        file.write_text(texts[module])
    changed, own = files[0][0], ["pkg", "net", "other", "patches", "a", "b"]
    names = differing(texts["pkg.net"].encode(), net.encode(), own)
    definitions, paths = Definitions(files, {changed: names}), [file for file, *_ in files]
    found = {test: definitions.reached(test, paths[2], paths, []) for test in ("test", "test_other")}
    return [test for test, reached in found.items() if any((changed, name) in reached for name in names)]


@pytest.mark.parametrize(
    ("net", "old", "new", "test", "other"),
    [
        (f"{MADE}made.scale = 1", "scale = 1", "scale = 2", USED, ""),
        ("from pkg.other import R\nR['k'] = lambda: 1", "1", "2", IMPORTED, "R = {}"),
        (f"{MADE}class A:\n    for k in 'ab': R[k] = made", "1", "2", IMPORTED, ""),
        (f"{MADE}class A:\n    R['k'] = made", "1", "2", IMPORTED, ""),
        (f"{MADE}class A(registered(made)): pass", "1", "2", IMPORTED, ""),
        (f"@register('compile')\n{MADE}", "1", "2", IMPORTED, ""),
        (f"@register\nclass TestNet: w = made()\n{MADE}", "1", "2", IMPORTED, ""),
        ("W = [1]\ndef made(): W[0] = 2", "2", "3", "from pkg.net import made\nmade()\ndef test(): 0", ""),
        ("from . import patches, a", "patches, a", "a", IMPORTED, ""),
        ("import pkg.a\nimport pkg.b", "import pkg.a\nimport pkg.b", "import pkg.b\nimport pkg.a", IMPORTED, ""),
        (
            f"import pkg.a\n{MADE}def f(): 0",
            f"import pkg.a\n{MADE}def f(): 0",
            f"{MADE}def f(): import pkg.a",
            USED,
            "",
        ),
        ("X = 1\nR.append(X)\nX = 2", "R.append(X)\nX = 2", "X = 2\nR.append(X)", USED, ""),
        (MADE, "1", "2", f"{STAR}def test(): 0", "from pkg.net import made\n@fixture(autouse=True)\ndef x(): made()"),
        ("def __getattr__(name): return 1", "1", "2", "from pkg.net import it\ndef test(): it()", ""),
        ("from pkg.other import A\nclass B(A): w = 1", "1", "2", IMPORTED, "class A(metaclass=Meta): pass"),
        (MADE, "1", "2", "import pytest\nm = pytest.importorskip('pkg.net')\ndef test(): m.made()", ""),
    ],
)
def test_a_change_of_what_an_import_does_reaches_all_tests(
    tmp_path: Path, net: str, old: str, new: str, test: str, other: str
) -> None:
    assert users(tmp_path, net, old, new, test, other) == ["test", "test_other"]


@pytest.mark.parametrize(
    ("net", "old", "new", "test", "other"),
    [
        # the order of what binds a name
        ("X = 1\nY = X\nX = 2\ndef made(): return Y", "Y = X\nX = 2", "X = 2\nY = X", USED, ""),
        (f"{STAR}{MADE}", f"{STAR}{MADE}", f"{MADE}{STAR}", USED, MADE),
        # names that are not here, or not there
        (f"{STAR}{MADE}", MADE, "", USED, MADE),
        ("def sum(x): return x\ndef made(): return sum([1])", "def sum(x): return x\n", "", USED, ""),
        (f"__all__ = ['f']\n{MADE}", "['f']", "['f', 'made']", "from pkg.net import *\ndef test(): made()", ""),
        # modules that are passed on, or have other names
        (MADE, "1", "2", "from pkg.other import F\ndef test(): getattr(F, f'ma{1}')()", RENAMED),
        (MADE, "1", "2", "import pkg.other as o\ndef test(): o.F.made()", RENAMED),
        (MADE, "1", "2", "import pkg.other as o\ndef test(): getattr(o.F, f'ma{1}')()", RENAMED),
        (MADE, "1", "2", "import inspect, pkg.net\ndef test(): inspect.getmembers(pkg.net)", ""),
        (MADE, "1", "2", "import pydoc\ndef test(): pydoc.locate('pkg.net.' + f'ma{1}')()", ""),
        (MADE, "1", "2", "from pkg.other import f\ndef test(): f(1)", "from pkg.net import *\ndef f(n): globals()[n]"),
        # what pytest finds
        (MADE, "1", "2", STAR, "from pkg.net import made\ndef test(): made()"),
        (MADE, "1", "2", "from pkg.net import made\n@fixture(name='x')\ndef y(): made()\ndef test(x): 0", ""),
        (MADE, "1", "2", "p = ['pkg.other']\ndef test(x): 0", "from pkg.net import made\n@fixture\ndef x(): made()"),
        (MADE, "1", "2", f"{STAR}def test(x): 0", "from pkg.net import made\n@fixture\ndef x(): made()"),
    ],
)
def test_a_change_reaches_the_test_that_sees_it(
    tmp_path: Path, net: str, old: str, new: str, test: str, other: str
) -> None:
    assert users(tmp_path, net, old, new, test, other) == ["test"]
