"""What a test uses of the definitions that differ, and which files that differ it therefore does not depend on."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from pytest_modelprobe.revisions import imported_files, package_of

from .definitions import IMPORT, METHODS, Definitions
from .definitions import differing_definitions as differing_definitions
from .making import MadeModules as MadeModules


class Use:
    """The definitions that differ of the files that are imported.

    Args:
        files: The files, with the names of their modules and packages.
        differing: The files that differ, with what `differing_definitions` yields.
    """

    def __init__(self, files: Collection[tuple[Path, str, str]], differing: Mapping[Path, Sequence[str]]) -> None:
        self._differing = differing
        self._definitions = Definitions(files, differing)
        self._modules = {file: name for file, name, _ in files}
        self._files = {name: file for file, name, _ in files}

    def of_test(
        self, test: str, file: Path, found: set[Path], whole: Collection[Path], made: Collection[type] | None
    ) -> tuple[list[tuple[Path, str]], set[Path]]:
        """Return what a test uses that differs, as files and names, and the files that differ in nothing that it uses.

        Args:
            test: The node id.
            file: The file of the test.
            found: The files that it depends on as a whole.
            whole: Those of them of which all is used.
            made: The classes of the modules that it makes, if they are known.
        """
        reached = self._definitions.reached(test.partition("::")[2], file, found, whole)
        differing = ((one, name) for one, name in reached if name in self._differing.get(one, ()))
        used = sorted(node for node in differing if made is None or self._matters(*node, made))
        needed = {one for one, _ in used} | self._importers(found, (file, *whole))
        return used, (found & self._differing.keys()) - needed

    def _matters(self, file: Path, name: str, made: Collection[type]) -> bool:
        """Whether what differs is more than methods of a class of modules of which a test makes none."""
        if f"{METHODS}{name}" not in self._differing[file] or "torch" not in sys.modules:
            return True
        if name in self._definitions.asked or self._definitions.puts_classes:
            return True
        cls = getattr(sys.modules.get(self._modules.get(file, "")), name, None)
        if not isinstance(cls, type) or not issubclass(cls, sys.modules["torch"].nn.Module):
            return True
        # By name and file, because a file may be imported under two names.
        bases = (base for one in made for base in one.__mro__ if base.__qualname__ == name)
        return any(self._files.get(base.__module__) == file for base in bases)

    def _importers(self, found: set[Path], of: Iterable[Path]) -> set[Path]:
        """Return the files whose new imports are why some files are imported that may do more than bind names."""
        before = set().union(*(imported_files(file, new=self._new) for file in of))
        return {one for one, _ in self._new} & found if any(map(self._definitions.acts, found - before)) else set()

    @functools.cached_property
    def _new(self) -> frozenset[tuple[Path, Path]]:
        """Each file with those that it imports on this side alone."""
        found = set()
        for file, names in self._differing.items():
            for name in (name.removeprefix(IMPORT) for name in names if name.startswith(IMPORT)):
                with contextlib.suppress(ImportError):
                    module = sys.modules.get(importlib.util.resolve_name(name, package_of(file)))
                    found.add((file, Path(getattr(module, "__file__", None) or "").resolve()))
        return frozenset(found)
