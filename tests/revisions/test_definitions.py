"""Which definitions of a repository a test reaches, of those that differ between two sides."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_modelprobe.revisions.definitions import Definitions, differing

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
        (b"import torch", b"import torch, patches", {"patches", ""}),
        (b"import torch", b"import torch, pkg.blocks", {"pkg"}),
    ],
)
def test_names_that_two_versions_define_otherwise(old: bytes, new: bytes, names: set[str]) -> None:
    assert old in BEFORE
    assert differing(BEFORE.replace(old, new), BEFORE, ["pkg"]) == names
