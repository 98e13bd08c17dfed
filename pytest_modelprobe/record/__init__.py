"""Records: what was seen of a model, as plain numbers.

A record holds no tensor and no module, and nothing in this folder imports torch. So a record can be stored, sent to
another process, merged over ranks, and compared by a command that needs no torch. Everything above this folder that
judges a model reads records, and not the model.
"""

from __future__ import annotations

from .call_tree import CallScope as CallScope
from .call_tree import CallTree as CallTree
from .call_tree import ForwardKind as ForwardKind
from .call_tree import Step as Step
from .call_tree import forward_of as forward_of
from .layer import AS_THEY_ARRIVED as AS_THEY_ARRIVED
from .layer import NOT_DEFAULT as NOT_DEFAULT
from .layer import RESET as RESET
from .layer import ROOT as ROOT
from .layer import ROUNDING_OF_RESPONSES as ROUNDING_OF_RESPONSES
from .layer import Attention as Attention
from .layer import Call as Call
from .layer import Dimension as Dimension
from .layer import EmittedTensor as EmittedTensor
from .layer import IsolatedResponse as IsolatedResponse
from .layer import Layer as Layer
from .layer import LayerProfile as LayerProfile
from .layer import Parameter as Parameter
from .layer import Plain as Plain
from .layer import Profile as Profile
from .layer import Value as Value
from .layer import address as address
from .layer import batch_sizes as batch_sizes
from .layer import call_name as call_name
from .layer import containers as containers
from .layer import elements as elements
from .layer import label_of as label_of
from .layer import merge_dimensions as merge_dimensions
from .layer import parent as parent
from .layer import qualified as qualified
from .layer import relative_name as relative_name
from .layer import response_dtype as response_dtype
from .layer import what_was_applied as what_was_applied
from .ranks import process_group as process_group
from .ranks import this_rank as this_rank
from .ranks import writing_rank as writing_rank
from .record import GIVEN as GIVEN
from .record import LiveRun as LiveRun
from .record import NamedRecord as NamedRecord
from .record import NamesBefore as NamesBefore
from .record import Operation as Operation
from .record import OptimizerGroup as OptimizerGroup
from .record import Record as Record
from .record import Training as Training
from .record import has_numbers as has_numbers
from .record import is_narrow as is_narrow
from .record import with_applied_gradients as with_applied_gradients
from .record import with_live_run as with_live_run
from .renames import applicable_rename as applicable_rename
from .renames import infer_rename as infer_rename
from .renames import numbers_in as numbers_in
from .renames import old_name as old_name
from .renames import renamed as renamed
from .renames import resolve_rename as resolve_rename
from .renames import with_paths as with_paths
from .selection import Glob as Glob
from .selection import Selector as Selector
from .selection import nearest as nearest
from .selection import select as select
from .selection import selected as selected
from .tensor_statistics import Histogram as Histogram
from .tensor_statistics import Reading as Reading
from .tensor_statistics import Statistics as Statistics
from .tensor_statistics import Units as Units
from .tensor_statistics import estimated_change as estimated_change
from .tensor_statistics import estimated_share as estimated_share
from .tensor_statistics import gc_paused as gc_paused
from .tensor_statistics import has_nonfinite as has_nonfinite
from .tensor_statistics import is_read as is_read
from .tensor_statistics import merge_moments as merge_moments
from .tensor_statistics import proportion as proportion
from .text import layer_rows as layer_rows
from .text import layer_table as layer_table
from .text import record_text as record_text
