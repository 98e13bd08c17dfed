"""Records: plain numbers, no tensors; their calls in order, and the selection of layers."""

from __future__ import annotations

from .call_tree import CallTree, ForwardKind, Place, Step, forward_of
from .calls import Attention, Call, Dimension, EmittedTensor, IsolatedResponse, Plain, Value, merge_dimensions
from .garbage import gc_paused
from .layer import Layer, Parameter
from .naming import NOT_DEFAULT, ROOT, address, label_of, qualified
from .record import Operation, Record, Rerun, Training, has_numbers, with_rerun
from .renames import declared, name_before, needed, numbers, renamed, rules
from .selection import Glob, Selector, nearest, select
from .tensor_statistics import (
    Reading,
    Statistics,
    Units,
    estimated_change,
    estimated_share,
    is_read,
    merge_moments,
)

__all__ = [
    "Attention",
    "Call",
    "CallTree",
    "Dimension",
    "ForwardKind",
    "Glob",
    "EmittedTensor",
    "Layer",
    "NOT_DEFAULT",
    "Operation",
    "Parameter",
    "Place",
    "Plain",
    "ROOT",
    "Reading",
    "Record",
    "Rerun",
    "IsolatedResponse",
    "Selector",
    "Statistics",
    "Step",
    "Training",
    "Units",
    "Value",
    "address",
    "declared",
    "estimated_change",
    "estimated_share",
    "forward_of",
    "gc_paused",
    "has_numbers",
    "is_read",
    "label_of",
    "merge_dimensions",
    "merge_moments",
    "name_before",
    "nearest",
    "needed",
    "numbers",
    "qualified",
    "renamed",
    "rules",
    "select",
    "with_rerun",
]
