"""Compile the kernel into the wheel, or without a compiler leave it out: torch computes the same numbers.

It also makes the README for the page of a package index.

``python hatch_build.py`` compiles it into the checkout, for runs from there;
``tox -e kernel-sanitized`` compiles copies.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = Path("pytest_modelprobe")
SOURCE = PACKAGE / "statistics" / "kernel"
VARIABLE = "MODELPROBE_KERNEL"  # "torch": leave it out; "compiled": fail without a compiler
SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "thread": ("-fsanitize=thread",),
}


def compile_kernel(root: Path, folder: Path, *, sanitizer: str | None = None) -> Path:
    """Return the compiled module, in a folder."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise RuntimeError("it is of the stable ABI, which this Python, without a GIL, does not load")
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    arguments, link = ["-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-psabi"], []
    if sysconfig.get_platform().startswith("win"):
        arguments = ["/O2", "/fp:precise"]
    elif sanitizer is not None:
        link = list(SANITIZERS[sanitizer])
        arguments += ["-O1", "-g", "-fno-omit-frame-pointer", *link]
    extension = Extension(
        "_kernel",
        [str(SOURCE / "kernel.c")],
        depends=[str(SOURCE / name) for name in ("level.h", "passes.h")],
        py_limited_api=True,
        extra_compile_args=arguments,
        extra_link_args=link,
    )
    with tempfile.TemporaryDirectory() as scratch:
        command = build_ext(Distribution({"name": "kernel", "ext_modules": [extension]}))
        command.build_lib, command.build_temp, command.force = str(folder), scratch, True
        command.ensure_finalized()
        here = Path.cwd()
        os.chdir(root)
        try:
            command.run()
        finally:
            os.chdir(here)
        return Path(command.get_outputs()[0])


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # run as a script
    pass
else:

    class KernelHook(BuildHookInterface):  # type: ignore[type-arg]
        """Adds the compiled module to a wheel, whose tag then names the platform."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Compile."""
            asked = os.environ.get(VARIABLE)
            if self.target_name != "wheel" or asked == "torch" or sys.implementation.name != "cpython":
                return
            root = Path(self.root)
            self._folder = tempfile.TemporaryDirectory()
            into = root / PACKAGE if version == "editable" else Path(self._folder.name)
            try:
                built = compile_kernel(root, into)
            except BaseException as error:  # setuptools ends the process where it finds no compiler
                if asked == "compiled" or isinstance(error, KeyboardInterrupt):
                    raise
                self.app.display_warning(f"the kernel is left out, torch computes instead: {error}")
                return
            if version == "editable":
                return
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{platform}"
            build_data["force_include"][str(built)] = str(PACKAGE / built.name)

        def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
            """Remove what was compiled."""
            if hasattr(self, "_folder"):
                self._folder.cleanup()

    class ReadmeHook(MetadataHookInterface):
        """Makes the links of the README absolute: on the page of a package index, relative ones lead nowhere."""

        def update(self, metadata: dict[str, Any]) -> None:
            """Add the README, with links into the repository that ``project.urls`` names as ``Source``, if it does."""
            text = (Path(self.root) / "README.md").read_text("utf-8")
            source = metadata.get("urls", {}).get("Source")
            if source is not None:
                text = re.sub(r"\]\((?=[\w/-]+\.md\b)", f"]({source}/blob/HEAD/", text)
                text = re.sub(r"\]\((?=[\w/-]+\.png\b)", f"]({source}/raw/HEAD/", text)
            metadata["readme"] = {"content-type": "text/markdown", "text": text}


def main(arguments: list[str]) -> None:
    """Compile into the checkout, or with ``--sanitizer NAME FOLDER`` a copy of the package, checked as it runs."""
    here = Path(__file__).resolve().parent
    if not arguments:
        print(compile_kernel(here, here / PACKAGE))
        return
    option, name, folder = arguments
    if option != "--sanitizer" or name not in SANITIZERS:
        raise SystemExit(f"unknown: {option} {name}")
    leave_out = shutil.ignore_patterns("_kernel.*", "__pycache__")
    shutil.copytree(here / PACKAGE, Path(folder) / PACKAGE, ignore=leave_out, dirs_exist_ok=True)
    print(compile_kernel(here, Path(folder).absolute() / PACKAGE, sanitizer=name))


if __name__ == "__main__":
    main(sys.argv[1:])
