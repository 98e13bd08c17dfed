"""The error tree: every error of our own says in one sentence what to do instead."""

from __future__ import annotations


class ModelProbeError(Exception):
    """Base of every error that pytest-modelprobe itself raises."""


class SelectionError(ModelProbeError, LookupError):
    """A ``layers=`` selector is malformed or matches no layer."""


class UnknownLayerError(SelectionError, KeyError):
    """A record has no layer of that name."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError quotes it


class ShapeSpecError(ModelProbeError, ValueError):
    """A shape specification cannot be read."""


class UnsupportedModelError(ModelProbeError, TypeError):
    """The object given cannot be probed: no module, or a kind whose hooks lie or never fire."""


class NothingObservedError(ModelProbeError):
    """A record lacks what was asked of it: no forward, no backward, no numbers."""


class UsageError(ModelProbeError, ValueError):
    """A call that contradicts itself or the state of the probe."""


class SnapshotError(ModelProbeError, ValueError):
    """A snapshot cannot be read, written or taken for what was recorded."""
