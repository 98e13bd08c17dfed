"""Checks that run a model again, in variations, and name the first layer at which a property breaks."""

from .batch import any_batch_size, batch_independent
from .battery import STANDARD, Case, Outcomes, add_standard, parametrize_with_checks, standard
from .check import Check
from .checkpoint import wholly_loaded
from .deferred import deferred_initialization
from .incremental import incremental
from .inputs import inputs_used
from .loading import workers_differ
from .modes import deterministic, eval_stable, finite, modes_agree, seeded, train_eval_differ
from .outcome import NotApplicableError, Outcome
from .packing import packed_documents
from .parity import compile_parity, device_parity, dtype_parity, export_parity, layout_parity
from .recomputation import checkpoint_parity
from .registration import (
    copy_and_pickle,
    initialized,
    inputs_unchanged_by_forward,
    registered,
    state_dict_round_trip,
    state_unchanged_by_forward,
)
from .resume import resume
from .sequence import causal, padding_invariant, permutation_equivariant, permutation_invariant
from .training import ema_tracks, gradcheck, gradient_accumulation, initial_loss, optimizer_covers, overfits_batch
from .ways import attention_agrees

__all__ = [
    "Case",
    "Check",
    "NotApplicableError",
    "Outcome",
    "Outcomes",
    "STANDARD",
    "add_standard",
    "any_batch_size",
    "attention_agrees",
    "batch_independent",
    "causal",
    "checkpoint_parity",
    "compile_parity",
    "copy_and_pickle",
    "deferred_initialization",
    "deterministic",
    "device_parity",
    "dtype_parity",
    "ema_tracks",
    "eval_stable",
    "export_parity",
    "finite",
    "gradcheck",
    "gradient_accumulation",
    "incremental",
    "initial_loss",
    "initialized",
    "inputs_unchanged_by_forward",
    "inputs_used",
    "layout_parity",
    "modes_agree",
    "optimizer_covers",
    "overfits_batch",
    "packed_documents",
    "padding_invariant",
    "parametrize_with_checks",
    "permutation_equivariant",
    "permutation_invariant",
    "registered",
    "resume",
    "seeded",
    "standard",
    "state_dict_round_trip",
    "state_unchanged_by_forward",
    "train_eval_differ",
    "wholly_loaded",
    "workers_differ",
]
