"""Export records to tools that show numbers over time: `exporter`, `Exporter` and the numbers of `readings`."""

from __future__ import annotations

from typing import Any

from pytest_modelprobe import extension


def __getattr__(name: str) -> Any:
    return extension.attribute("exporters", name, __name__)
