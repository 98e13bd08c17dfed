"""Unit tests for PyTorch models: see inside the model, record what it does, review the change."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import extension

if TYPE_CHECKING:
    from .assertions import (
        assert_activation_memory,
        assert_activation_range,
        assert_activation_scale,
        assert_all_params_have_grad,
        assert_attention_entropy,
        assert_attention_mask,
        assert_called,
        assert_dtypes,
        assert_finite,
        assert_fits_dtype,
        assert_flops,
        assert_frozen,
        assert_grad_finite,
        assert_grad_flow,
        assert_mode,
        assert_no_dead_layers,
        assert_no_gradient,
        assert_no_leftover_hooks,
        assert_not_saturated,
        assert_param_count,
        assert_params_updated,
        assert_same_behavior,
        assert_same_distribution,
        assert_shapes,
        assert_tied,
        assert_training_loop,
        assert_update_ratio,
    )
    from .exceptions import (
        HintWarning,
        ModelProbeError,
        NothingObservedError,
        SelectionError,
        ShapeSpecError,
        UnsupportedModelError,
        UsageError,
    )
    from .extras.ablation.ablations import ablation as ablation
    from .extras.ablation.ablations import assert_layer_matters as assert_layer_matters
    from .extras.pictures.drawing import assert_attends_to as assert_attends_to
    from .extras.ports.precision import precision as precision
    from .extras.training_state.invariants import Invariants as Invariants
    from .extras.training_state.invariants import assert_invariants as assert_invariants
    from .interventions import faults, intervene
    from .probe import ModelProbe, Watch
    from .record import Record
    from .snapshot.snapshot import ModelProbeSnapshot

__all__ = [
    "HintWarning",
    "ModelProbe",
    "ModelProbeError",
    "ModelProbeSnapshot",
    "NothingObservedError",
    "Record",
    "SelectionError",
    "ShapeSpecError",
    "UnsupportedModelError",
    "UsageError",
    "Watch",
    "assert_activation_memory",
    "assert_activation_range",
    "assert_activation_scale",
    "assert_all_params_have_grad",
    "assert_attention_entropy",
    "assert_attention_mask",
    "assert_called",
    "assert_dtypes",
    "assert_finite",
    "assert_fits_dtype",
    "assert_flops",
    "assert_frozen",
    "assert_grad_finite",
    "assert_grad_flow",
    "assert_mode",
    "assert_no_dead_layers",
    "assert_no_gradient",
    "assert_no_leftover_hooks",
    "assert_not_saturated",
    "assert_param_count",
    "assert_params_updated",
    "assert_same_behavior",
    "assert_same_distribution",
    "assert_shapes",
    "assert_tied",
    "assert_training_loop",
    "assert_update_ratio",
    "faults",
    "intervene",
    *(_OF_EXTRAS := extension.modules("names")),
]

_MODULES = {
    **dict.fromkeys(["ModelProbe", "Watch"], "probe"),
    "Record": "record",
    "ModelProbeSnapshot": "snapshot.snapshot",
    **{name: "assertions" for name in __all__ if name.startswith("assert_") and name not in _OF_EXTRAS},
    **dict.fromkeys(["faults", "intervene"], "interventions"),
    **{name: "exceptions" for name in __all__ if name.endswith(("Error", "Warning"))},
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is used: pytest imports the package in every run."""
    if name == "__version__":
        from importlib.metadata import version

        return version("pytest-modelprobe")
    if name == "checks":
        return importlib.import_module(f"{__name__}.checks")
    if name not in _MODULES:
        return extension.attribute("names", name, __name__)
    # Not cached: pytester drops submodules between runs but keeps this module, so there would be two `Record` classes.
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__", "checks"]
