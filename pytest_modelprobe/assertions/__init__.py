"""Assertions on a probe, a watch or a record: each checks, and raises AssertionError with a message."""

from .activations import assert_finite, assert_no_dead_layers
from .attention import assert_attention_entropy, assert_attention_mask
from .behavior import assert_same_behavior
from .budgets import assert_activation_memory, assert_flops
from .distribution import assert_same_distribution
from .gradients import assert_all_params_have_grad, assert_grad_finite, assert_grad_flow
from .parameters import (
    assert_devices,
    assert_frozen,
    assert_param_count,
    assert_params_updated,
    assert_tied,
    assert_update_ratio,
)
from .ranges import assert_activation_range, assert_activation_scale, assert_fits_dtype, assert_not_saturated
from .sparsity import assert_sparsity
from .structure import assert_called, assert_dtypes, assert_no_leftover_hooks, assert_shapes
from .targets import assert_no_gradient
from .training import assert_training_loop

__all__ = [
    "assert_activation_memory",
    "assert_activation_range",
    "assert_activation_scale",
    "assert_all_params_have_grad",
    "assert_attention_entropy",
    "assert_attention_mask",
    "assert_called",
    "assert_devices",
    "assert_dtypes",
    "assert_finite",
    "assert_fits_dtype",
    "assert_flops",
    "assert_frozen",
    "assert_grad_finite",
    "assert_grad_flow",
    "assert_no_dead_layers",
    "assert_no_gradient",
    "assert_no_leftover_hooks",
    "assert_not_saturated",
    "assert_param_count",
    "assert_params_updated",
    "assert_same_behavior",
    "assert_same_distribution",
    "assert_shapes",
    "assert_sparsity",
    "assert_tied",
    "assert_training_loop",
    "assert_update_ratio",
]
