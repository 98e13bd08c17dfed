"""Two records: their differences, and the causes of these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_modelprobe import extension
from pytest_modelprobe.extension import explained as explained

from .compare import begins as begins
from .compare import compare as compare
from .compare import tolerance_factor as tolerance_factor
from .diagnosis import diagnose as diagnose
from .diagnosis.causes import NO_EFFECT as NO_EFFECT
from .diagnosis.causes import Cause as Cause
from .diagnosis.causes import CauseKind as CauseKind
from .diagnosis.causes import Diagnosis as Diagnosis
from .diagnosis.causes import changes_code as changes_code
from .diagnosis.effects import layers_behind_zeros as layers_behind_zeros
from .matching import is_drawn_otherwise as is_drawn_otherwise
from .tolerance import BEHAVIOR as BEHAVIOR
from .tolerance import LARGEST_TOLERANCE as LARGEST_TOLERANCE
from .tolerance import CallPair as CallPair
from .tolerance import Comparison as Comparison
from .tolerance import Difference as Difference
from .tolerance import DifferenceKind as DifferenceKind
from .tolerance import Parts as Parts
from .tolerance import Precision as Precision
from .tolerance import Tolerance as Tolerance
from .tolerance import is_rounding as is_rounding
from .tolerance import largest_gradient as largest_gradient

if TYPE_CHECKING:
    from pytest_modelprobe.extras.ports.pairing import Pairing as Pairing
    from pytest_modelprobe.extras.ports.pairing import pair as pair
    from pytest_modelprobe.extras.ports.pairing import port_failure as port_failure


def __getattr__(name: str) -> Any:
    return extension.attribute("comparison", name, __name__)
