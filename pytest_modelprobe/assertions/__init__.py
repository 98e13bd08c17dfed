"""What a test asserts of a model: one room a family, each function checks and then raises."""

from .activations import assert_finite, assert_no_dead_layers
from .behaviour import assert_same_behaviour
from .gradients import assert_all_params_have_grad, assert_grad_finite, assert_grad_flow
from .structure import assert_called, assert_dtypes, assert_no_leftover_hooks, assert_shapes

__all__ = [
    "assert_all_params_have_grad",
    "assert_called",
    "assert_dtypes",
    "assert_finite",
    "assert_grad_finite",
    "assert_grad_flow",
    "assert_no_dead_layers",
    "assert_no_leftover_hooks",
    "assert_same_behaviour",
    "assert_shapes",
]
