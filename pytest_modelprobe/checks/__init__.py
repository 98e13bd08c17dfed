"""Checks that run a model again, in variations, and name the first layer at which a property breaks."""

from typing import TYPE_CHECKING, Any

from pytest_modelprobe import extension

from .batch import any_batch_size, batch_independent
from .battery import STANDARD, Case, Outcomes, add_standard, parametrize_with_checks, standard
from .check import Check
from .gradients import gradcheck, gradients_agree
from .incremental import incremental
from .inputs import inputs_used, parameters_used
from .modes import deterministic, eval_stable, finite, modes_agree, seeded, train_eval_differ
from .outcome import NotApplicableError, Outcome
from .parity import device_parity, dtype_parity, layout_parity
from .recomputation import checkpoint_parity
from .registration import (
    copy_and_pickle,
    initialized,
    inputs_unchanged_by_forward,
    registered,
    state_dict_round_trip,
    state_unchanged_by_forward,
)
from .sequence import causal, padding_invariant, permutation_equivariant, permutation_invariant
from .training import ema_tracks, gradient_accumulation, optimizer_covers, overfits_batch

if TYPE_CHECKING:
    from pytest_modelprobe.extras.adapters.adapter import adapter as adapter
    from pytest_modelprobe.extras.adapters.change import same_function as same_function
    from pytest_modelprobe.extras.compilation.parity import compile_parity as compile_parity
    from pytest_modelprobe.extras.compilation.parity import export_parity as export_parity
    from pytest_modelprobe.extras.compilation.whole import compiles_whole as compiles_whole
    from pytest_modelprobe.extras.ports.packing import packed_documents as packed_documents
    from pytest_modelprobe.extras.training_state.checkpoint import wholly_loaded as wholly_loaded
    from pytest_modelprobe.extras.training_state.deferred import deferred_initialization as deferred_initialization
    from pytest_modelprobe.extras.training_state.initial import initial_loss as initial_loss
    from pytest_modelprobe.extras.training_state.training import resume as resume
    from pytest_modelprobe.extras.training_state.training import workers_differ as workers_differ

__all__ = [
    "Case",
    "Check",
    "NotApplicableError",
    "Outcome",
    "Outcomes",
    "STANDARD",
    "add_standard",
    "any_batch_size",
    "batch_independent",
    "causal",
    "checkpoint_parity",
    "copy_and_pickle",
    "deterministic",
    "device_parity",
    "dtype_parity",
    "ema_tracks",
    "eval_stable",
    "finite",
    "gradcheck",
    "gradient_accumulation",
    "gradients_agree",
    "incremental",
    "initialized",
    "inputs_unchanged_by_forward",
    "inputs_used",
    "layout_parity",
    "modes_agree",
    "optimizer_covers",
    "overfits_batch",
    "padding_invariant",
    "parameters_used",
    "parametrize_with_checks",
    "permutation_equivariant",
    "permutation_invariant",
    "registered",
    "seeded",
    "standard",
    "state_dict_round_trip",
    "state_unchanged_by_forward",
    "train_eval_differ",
    *extension.modules("checks"),
]


def __getattr__(name: str) -> Any:
    return extension.attribute("checks", name, __name__)
