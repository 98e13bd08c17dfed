"""Counts what the kernel reads twice in one watched step: tensors with the same elements as one that it read before.

    OMP_NUM_THREADS=1 python benchmarks/reads.py

Prints a row of Markdown for each model of `steps.py`: millions of elements that were read, and how many of them again.
"""

from __future__ import annotations

import ctypes
import math
import zlib
from typing import Any

import torch
from modes import step_of
from steps import CASES

from pytest_modelprobe import Watch, kernel

_SIZES = {0: 4, 1: 8, 2: 2, 3: 2}  # bytes of an element of each kind


class Counted:
    """Stands for the kernel, and notes what it reads."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.seen: set[tuple[int, int]] = set()
        self.read = self.again = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def reduce(self, address: int, kind: int, shape: tuple[int, ...], strides: tuple[int, ...], *rest: Any) -> Any:
        """Note a tensor by its elements, if they lie together."""
        count = math.prod(shape)
        self.read += count
        if count == 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True)):
            key = zlib.crc32((ctypes.c_char * (count * _SIZES[kind])).from_address(address)), count
            self.again += count if key in self.seen else 0
            self.seen.add(key)
        return self._kernel.reduce(address, kind, shape, strides, *rest)


def main() -> None:
    """Print the rows."""
    if kernel.active is None:
        raise SystemExit("the kernel is not compiled: python hatch_build.py")
    print("| model | read | again |\n|---|---|---|")
    compiled = kernel.active
    for name in ("bert", "llama", "convnext", "convolutions"):
        torch.manual_seed(0)
        model, inputs = CASES[name]()
        step = step_of(model, inputs)
        step()
        kernel.active = counted = Counted(compiled)
        try:
            with Watch(model):
                step()
        finally:
            kernel.active = compiled
        print(f"| {name} | {counted.read / 1e6:.1f} | {counted.again / 1e6:.2f} |")


if __name__ == "__main__":
    main()
