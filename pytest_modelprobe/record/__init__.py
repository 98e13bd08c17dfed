"""Records: what was seen of a model, as plain numbers.

A record holds no tensor and no module, and nothing in this folder imports torch. So a record can be stored, sent to
another process, merged over ranks, and compared by a command that needs no torch. Everything above this folder that
judges a model reads records, and not the model.
"""

from __future__ import annotations

from .applied import AS_THEY_ARRIVED, RESET, what_was_applied
from .call_tree import CallScope, CallTree, Connection, ForwardKind, Step, connections, forward_of
from .calls import (
    ROUNDING_OF_RESPONSES,
    Attention,
    Call,
    Dimension,
    EmittedTensor,
    IsolatedResponse,
    Plain,
    Value,
    batch_sizes,
    merge_dimensions,
    response_dtype,
)
from .construction import gc_paused
from .layer import Layer, Parameter, elements
from .naming import NOT_DEFAULT, ROOT, address, call_name, containers, label_of, parent, qualified, relative_name
from .profile import LayerProfile, Profile
from .ranks import process_group, this_rank, writing_rank
from .record import (
    GIVEN,
    LAST_POSITION,
    LiveRun,
    NamesBefore,
    Operation,
    OptimizerGroup,
    Record,
    Training,
    has_numbers,
    is_narrow,
    with_applied_gradients,
    with_live_run,
)
from .renames import applicable_rename, infer_rename, numbers_in, old_name, renamed, resolve_rename, with_paths
from .selection import Glob, Selector, nearest, select, selected
from .table import layer_rows, layer_table
from .tensor_statistics import (
    Histogram,
    Reading,
    Statistics,
    Units,
    estimated_change,
    estimated_share,
    has_nonfinite,
    is_read,
    merge_moments,
    proportion,
)
from .text import as_text as record_text

__all__ = [
    "AS_THEY_ARRIVED",
    "GIVEN",
    "LAST_POSITION",
    "RESET",
    "Attention",
    "Call",
    "CallTree",
    "Connection",
    "Dimension",
    "ForwardKind",
    "Glob",
    "Histogram",
    "EmittedTensor",
    "Layer",
    "LayerProfile",
    "NOT_DEFAULT",
    "NamesBefore",
    "Operation",
    "OptimizerGroup",
    "Parameter",
    "CallScope",
    "Plain",
    "Profile",
    "ROOT",
    "Reading",
    "Record",
    "record_text",
    "LiveRun",
    "IsolatedResponse",
    "is_narrow",
    "response_dtype",
    "Selector",
    "Statistics",
    "Step",
    "Training",
    "Units",
    "Value",
    "address",
    "call_name",
    "applicable_rename",
    "connections",
    "containers",
    "elements",
    "batch_sizes",
    "estimated_change",
    "estimated_share",
    "forward_of",
    "gc_paused",
    "has_numbers",
    "infer_rename",
    "has_nonfinite",
    "is_read",
    "label_of",
    "layer_rows",
    "layer_table",
    "merge_dimensions",
    "merge_moments",
    "proportion",
    "nearest",
    "parent",
    "numbers_in",
    "old_name",
    "process_group",
    "qualified",
    "relative_name",
    "renamed",
    "resolve_rename",
    "select",
    "selected",
    "this_rank",
    "what_was_applied",
    "with_applied_gradients",
    "with_paths",
    "with_live_run",
    "writing_rank",
    "ROUNDING_OF_RESPONSES",
]
