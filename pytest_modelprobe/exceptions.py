"""The exceptions that pytest-modelprobe raises, and the warning. Each says in one sentence what to do instead."""

from __future__ import annotations


class ModelProbeError(Exception):
    """Base of all exceptions that pytest-modelprobe raises."""


class SelectionError(ModelProbeError, LookupError):
    """A ``layers=`` selector is malformed or matches no layer."""


class UnknownLayerError(SelectionError, KeyError):
    """A record has no layer of that name."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError quotes it


class ShapeSpecError(ModelProbeError, ValueError):
    """A shape specification cannot be read."""


class UnsupportedModelError(ModelProbeError, TypeError):
    """The object cannot be probed: it is no module, or its hooks do not fire or report wrong values."""


class NothingObservedError(ModelProbeError):
    """A record has no forward, no backward or no numbers where they are needed."""


class UsageError(ModelProbeError, ValueError):
    """Arguments contradict each other or the state of the probe."""


class HintWarning(UserWarning):
    """What a check or an assertion says of a model that may be healthy. `--modelprobe-strict` makes it an error."""


class SnapshotError(ModelProbeError, ValueError):
    """A snapshot cannot be read or written, or does not fit the record."""
