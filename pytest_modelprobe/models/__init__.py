"""What can be asked of a live model, and done with it, without recording anything.

Its layers by name, the tensors in nested values, the memory of tensors, initialization and seeds by name, saving and
restoring its state. Capture, checks, interventions and mutation all use these, so that each is done in one way only.
"""

from __future__ import annotations

from .calls import CallTracer, ModuleCall, raised_in_hook, run_eagerly
from .carrying import carry, recognized
from .devices import (
    current_stream,
    devices_of,
    generator_state,
    is_captured,
    kept_on_devices,
    read_flags,
    sent,
    together,
    wait_for,
    widest,
)
from .distribution import (
    TENSOR_PARALLEL,
    is_distributed,
    layout,
    local_tensor,
    notes_on,
    original_class,
    sharded_parameters,
    value_layout,
)
from .flatten import Flat, flatten, flatten_call, map_tensors, parts, unseen
from .layers import (
    RUN_EAGERLY,
    ChangingHook,
    Layers,
    ModuleHook,
    Offloaded,
    attributes,
    changing_hooks,
    check_supported,
    is_persistent,
    own_buffers,
    own_parameters,
    type_name,
    wake_zeros,
)
from .memory import (
    as_array,
    as_bits,
    as_real,
    detached_copy,
    has_dense_storage,
    holds_elements,
    lacks_memory,
    unexpanded,
    version,
)
from .process import GENERATORS, Autocast, active_autocast, autocast_states, settings_preserved
from .restoring import ModelState, has_lazy, preserved
from .seeding import derive, seeded

__all__ = [
    "GENERATORS",
    "RUN_EAGERLY",
    "TENSOR_PARALLEL",
    "Autocast",
    "ChangingHook",
    "ModuleCall",
    "CallTracer",
    "Flat",
    "Layers",
    "ModelState",
    "ModuleHook",
    "Offloaded",
    "active_autocast",
    "as_array",
    "as_bits",
    "as_real",
    "attributes",
    "autocast_states",
    "changing_hooks",
    "check_supported",
    "current_stream",
    "derive",
    "detached_copy",
    "devices_of",
    "flatten",
    "flatten_call",
    "generator_state",
    "carry",
    "recognized",
    "has_dense_storage",
    "has_lazy",
    "holds_elements",
    "is_captured",
    "is_distributed",
    "is_persistent",
    "kept_on_devices",
    "lacks_memory",
    "layout",
    "local_tensor",
    "map_tensors",
    "notes_on",
    "original_class",
    "own_buffers",
    "own_parameters",
    "parts",
    "preserved",
    "raised_in_hook",
    "read_flags",
    "run_eagerly",
    "seeded",
    "sent",
    "settings_preserved",
    "sharded_parameters",
    "together",
    "type_name",
    "unexpanded",
    "unseen",
    "value_layout",
    "version",
    "wait_for",
    "wake_zeros",
    "widest",
]
