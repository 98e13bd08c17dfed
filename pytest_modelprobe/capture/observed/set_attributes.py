"""Plain attributes that a forward sets on its modules: results of the run, not settings of the layer.

A record lists the settings of each layer. A counter or a flag that a forward writes would differ from run to run, so
such attributes are found and left out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from pytest_modelprobe.models import Layers, attributes
from pytest_modelprobe.record import ROOT, Plain


@dataclass(slots=True, eq=False)
class SetAttributes:
    """Compares the attributes of the selected layers before and after the first forward of each kind."""

    layers: Layers
    selected: Collection[str]
    found: dict[str, set[str]] = field(default_factory=dict)
    """Names of the attributes that a forward set, by layer."""
    _before: dict[str, tuple[type, dict[str, Plain]]] = field(default_factory=dict)

    def begin(self, root: str) -> None:
        """Read the attributes of a layer and all inside it."""
        self._before = {
            name: (type(module), attributes(module))
            for name, module in self.layers.modules.items()
            if name in self.selected and (root in (ROOT, name) or name.startswith(f"{root}."))
        }

    def update(self) -> None:
        """Add the attributes that were set since `begin`."""
        for name, (kind, before) in self._before.items():
            module = self.layers.modules[name]
            if type(module) is not kind:
                continue  # a lazy module became another class, and its attributes are settings
            for key, now in attributes(module).items():
                then = before.get(key)
                # Identity, as a forward may set what is equal by chance this time: a number that was computed again is
                # another object. Text is compared by value, because `attributes` makes it anew of a sequence.
                if now is not then and not (type(now) is str and now == then):
                    self.found.setdefault(name, set()).add(key)

    def clear(self) -> None:
        """Compare nothing until the next `begin`."""
        self._before = {}
