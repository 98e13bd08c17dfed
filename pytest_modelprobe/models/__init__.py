"""What can be asked of a live model, and done with it, without recording anything.

Its layers by name, the tensors in nested values, the memory of tensors, initialization and seeds by name, saving and
restoring its state. Capture, checks, interventions and mutation all use these, so that each is done in one way only.
"""

from __future__ import annotations

from .calls import CallTracer as CallTracer
from .calls import ModuleCall as ModuleCall
from .calls import raised_in_hook as raised_in_hook
from .calls import run_eagerly as run_eagerly
from .flatten import Flat as Flat
from .flatten import flatten as flatten
from .flatten import flatten_call as flatten_call
from .flatten import map_tensors as map_tensors
from .flatten import parts as parts
from .flatten import unseen as unseen
from .layers import RUN_EAGERLY as RUN_EAGERLY
from .layers import ChangingHook as ChangingHook
from .layers import Layers as Layers
from .layers import ModuleHook as ModuleHook
from .layers import Offloaded as Offloaded
from .layers import attributes as attributes
from .layers import changing_hooks as changing_hooks
from .layers import check_supported as check_supported
from .layers import is_persistent as is_persistent
from .layers import own_buffers as own_buffers
from .layers import own_parameters as own_parameters
from .layers import type_name as type_name
from .layers import wake_zeros as wake_zeros
from .restoring import GENERATORS as GENERATORS
from .restoring import Autocast as Autocast
from .restoring import ModelState as ModelState
from .restoring import active_autocast as active_autocast
from .restoring import autocast_states as autocast_states
from .restoring import check_not_lazy as check_not_lazy
from .restoring import preserved as preserved
from .restoring import settings_preserved as settings_preserved
from .seeding import derive as derive
from .seeding import seeded as seeded
from .tensors import TENSOR_PARALLEL as TENSOR_PARALLEL
from .tensors import as_array as as_array
from .tensors import as_bits as as_bits
from .tensors import as_real as as_real
from .tensors import current_stream as current_stream
from .tensors import detached_copy as detached_copy
from .tensors import devices_of as devices_of
from .tensors import generator_state as generator_state
from .tensors import has_dense_storage as has_dense_storage
from .tensors import holds_elements as holds_elements
from .tensors import is_captured as is_captured
from .tensors import is_distributed as is_distributed
from .tensors import kept_on_devices as kept_on_devices
from .tensors import lacks_memory as lacks_memory
from .tensors import layout as layout
from .tensors import local_tensor as local_tensor
from .tensors import notes_on as notes_on
from .tensors import original_class as original_class
from .tensors import read_flags as read_flags
from .tensors import sent as sent
from .tensors import sharded_parameters as sharded_parameters
from .tensors import together as together
from .tensors import unexpanded as unexpanded
from .tensors import value_layout as value_layout
from .tensors import version as version
from .tensors import wait_for as wait_for
from .tensors import widest as widest
