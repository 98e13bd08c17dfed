"""Assertions on a probe, a watch or a record: each checks, and raises AssertionError with a message."""

from .activations import assert_finite as assert_finite
from .activations import assert_no_dead_layers as assert_no_dead_layers
from .attention import assert_attention_entropy as assert_attention_entropy
from .attention import assert_attention_mask as assert_attention_mask
from .behavior import assert_same_behavior as assert_same_behavior
from .behavior import assert_same_distribution as assert_same_distribution
from .gradients import assert_all_params_have_grad as assert_all_params_have_grad
from .gradients import assert_grad_finite as assert_grad_finite
from .gradients import assert_grad_flow as assert_grad_flow
from .ranges import assert_activation_range as assert_activation_range
from .ranges import assert_activation_scale as assert_activation_scale
from .ranges import assert_fits_dtype as assert_fits_dtype
from .ranges import assert_not_saturated as assert_not_saturated
from .structure import assert_activation_memory as assert_activation_memory
from .structure import assert_called as assert_called
from .structure import assert_dtypes as assert_dtypes
from .structure import assert_flops as assert_flops
from .structure import assert_no_leftover_hooks as assert_no_leftover_hooks
from .structure import assert_param_count as assert_param_count
from .structure import assert_shapes as assert_shapes
from .structure import assert_tied as assert_tied
from .training import assert_no_gradient as assert_no_gradient
from .training import assert_training_loop as assert_training_loop
from .updates import assert_frozen as assert_frozen
from .updates import assert_params_updated as assert_params_updated
from .updates import assert_update_ratio as assert_update_ratio
