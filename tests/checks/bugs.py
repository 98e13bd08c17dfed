"""Bugs that models really had, and what shows each."""

from __future__ import annotations

from dataclasses import dataclass

CHECKS, FINITE, OUTPUTS = "checks/test_checks.py", "checks/test_finite.py", "checks/test_outputs.py"
INCREMENTAL, MODES = "checks/test_incremental.py", "checks/test_modes.py"
CHECKPOINT, PACKING = "extras/training_state/test_checkpoint.py", "extras/ports/test_packing.py"
BITWISE = "checks/test_bitwise.py"
ACTIVATIONS, GRADIENTS = "assertions/test_activations.py", "assertions/test_gradients.py"
STRUCTURE, PARAMETERS = "assertions/test_structure.py", "assertions/test_parameters.py"
RANGES, ATTENTION = "assertions/test_ranges.py", "assertions/test_attention.py"
TRAINING = "assertions/test_training.py"
MATRIX = "kill matrix"


@dataclass(frozen=True)
class Bug:
    """One kind of bug."""

    row: str
    """Its number in the collection."""
    fault: str
    by: str = ""
    """The check, the assertion or the snapshot that shows it; empty: nothing does."""
    where: str = ""
    """The file of the test, under ``tests/``, or the kill matrix."""
    test: str = ""
    """The name of the test; of the kill matrix, the title of the fault."""
    why: str = ""
    """Why nothing shows it."""


def snapshot(row: str, fault: str, title: str) -> Bug:
    """Return a bug that has no property of its own to break: a comparison with a record shows it."""
    return Bug(row, fault, "modelprobe_snapshot", MATRIX, title)


FAMILIES: dict[str, list[Bug]] = {
    "Attention and positions": [
        Bug("B01", "softmax taken over the queries", "checks.causal", CHECKS,
            "test_a_softmax_over_the_queries_knows_of_later_ones"),
        Bug("B02", "softmax taken over the batch", "checks.batch_independent", CHECKS,
            "test_a_softmax_over_the_batch_mixes_it"),
        Bug("B03", "scores not divided by the root of the head's width", "assert_attention_entropy", ATTENTION,
            "test_a_missing_scale_is_named"),
        snapshot("B04", "scores divided by the width of the model, not of a head", "scale of the model's width"),
        Bug("B05", "heads put together without turning the axes back", "checks.causal", CHECKS,
            "test_heads_merged_without_a_transpose_know_of_later_positions"),
        Bug("B06", "heads taken apart by a view alone", "checks.causal", CHECKS,
            "test_heads_split_by_view_know_of_later_positions"),
        Bug("B07", "attention weights the wrong way round", "checks.causal", CHECKS,
            "test_attention_transposed_knows_of_later_positions"),
        Bug("B08", "causal mask one diagonal too wide", "checks.causal", CHECKS,
            "test_a_mask_that_shows_the_next_token_is_named"),
        Bug("B09", "causal mask left out", "checks.causal", CHECKS, "test_a_causal_mask_left_out_is_named"),
        snapshot("B11", "sliding window set but not applied", "window ignored"),
        Bug("B12", "padding mask taken and not used", "checks.padding_invariant", CHECKS,
            "test_a_padding_mask_that_is_ignored_is_named"),
        snapshot("B13", "positions counted from the padding on the left", "positions ignore the padding"),
        snapshot("B15", "rotary angles computed in half precision", "rotary angles in bfloat16"),
        snapshot("B16", "rotary embedding pairs other elements than the weights expect", "rotary pairs neighbors"),
        snapshot("B18", "queries, keys or values swapped", "queries and keys swapped"),
        Bug("B19", "dropout inside attention goes on in evaluation", "checks.eval_stable", CHECKS,
            "test_attention_that_drops_out_in_evaluation_is_random"),
        Bug("B20", "an evaluation switches dropout off, and no training switches it on again",
            "checks.train_eval_differ", CHECKS,
            "test_dropout_that_an_evaluation_switches_off_for_good_is_named"),
        Bug("B21", "dropout of one's own that does not know the mode", "checks.eval_stable", CHECKS,
            "test_dropout_that_is_always_on_is_random_in_evaluation"),
        Bug("B22", "a row of scores with everything masked", "assert_finite", ACTIVATIONS,
            "test_a_row_masked_throughout_is_blamed_on_the_softmax"),
    ],
    "Blocks, norms and activations": [
        snapshot("B23", "the residual is not added", "residual missing"),
        Bug("B28", "a write in place into what the backward needs",
            why="torch raises an error of its own, which names the operation"),
        snapshot("B29", "the norm after the branch and not before it", "post-norm for pre-norm"),
        snapshot("B30", "no norm before the head", "final norm missing"),
        snapshot("B31", "the epsilon of another framework", "eps of a neighbor's convention"),
        snapshot("B32", "no epsilon at all", "eps lost"),
        snapshot("B33", "the other formula of GELU", "GELU by tanh, in code"),
        snapshot("B34", "a norm that rounds before it multiplies by its weight",
                 "norm rounded to bfloat16 before its weight"),
        snapshot("B36", "an activation forgotten, replaced or doubled", "activation forgotten"),
        snapshot("B37", "one bias too many or too few", "bias removed"),
        snapshot("B38", "a different dropout rate", "dropout of 0.5"),
        Bug("B39", "kernel, stride or dilation of another size", "assert_shapes", STRUCTURE,
            "test_a_shape_that_differs_is_told_with_the_layer_that_bound_the_dimension"),
        Bug("B41", "statistics of a norm taken over the batch", "checks.batch_independent", CHECKS,
            "test_a_norm_over_the_batch_mixes_it"),
        Bug("B43", "units that no input can switch on", "assert_no_dead_layers", ACTIVATIONS,
            "test_a_dead_layer_is_named_with_what_feeds_it"),
        Bug("B44", "a sigmoid or tanh fed far beyond its slope", "assert_not_saturated", RANGES,
            "test_one_that_is_fed_too_much_is_named"),
        Bug("B46", "a layer that is built and not called", "assert_called", STRUCTURE,
            "test_a_layer_that_is_never_called_is_named"),
    ],
    "Registration, ties, initialization and loading": [
        Bug("B48", "layers kept in a plain list", "checks.registered", CHECKS,
            "test_a_block_in_a_plain_list_is_named"),
        Bug("B49", "a tensor that is a mere attribute", "checks.registered", CHECKS,
            "test_a_tensor_that_is_no_buffer_is_named"),
        Bug("B50", "loading leaves two tensors where one was shared", "checks.state_dict_round_trip", CHECKS,
            "test_a_tie_lost_in_loading_is_named"),
        snapshot("B51", "two weights shared that should not be", "tie forced"),
        Bug("B52", "a weight that no initialization reaches", "checks.initialized", CHECKS,
            "test_a_weight_that_nothing_wrote_to_is_named"),
        snapshot("B53", "weights drawn from another distribution", "uniform for normal, same deviation"),
        snapshot("B55", "weights drawn a second time over the first", "initialized twice"),
        Bug("B57", "a key renamed, and loading that does not mind", "checks.state_dict_round_trip", CHECKS,
            "test_a_renamed_key_that_leaves_random_weights_is_named"),
        snapshot("B59", "a head that starts out far too sure", "over-confident head"),
    ],
    "Gradients, optimizers and the step": [
        Bug("B60", "gradients of the last step added to those of this one", "assert_training_loop", TRAINING,
            "test_a_reset_that_comes_every_other_step_is_too_seldom"),
        snapshot("B61", "everything frozen but a few layers", "all frozen but the head"),
        Bug("B62", "a layer that was to be frozen learns", "assert_frozen", PARAMETERS,
            "test_a_parameter_that_learns_is_not_frozen"),
        Bug("B64", "the graph cut off by .detach() or .data", "checks.gradcheck", CHECKS,
            "test_a_detach_in_the_middle_is_a_wrong_gradient_of_what_is_before_it"),
        Bug("B65", "a part that runs under no_grad", "assert_all_params_have_grad", GRADIENTS,
            "test_no_grad_is_named_by_the_first_layer_that_ran_under_it"),
        Bug("B67", "an optimizer's step that changes nothing", "checks.overfits_batch", CHECKS,
            "test_a_step_that_does_nothing_does_not_learn"),
        Bug("B68", "backward, step and zero_grad in another order",
            why="the order belongs to the training loop; its effect, parameters that do not move, is shown by "
            "assert_params_updated"),
        snapshot("B69", "finite values with a gradient of NaN", "gradient of NaN through where"),
        Bug("B70", "activation checkpointing computes something else", "checks.checkpoint_parity", CHECKS,
            "test_a_path_that_is_taken_without_gradients_alone_is_named"),
        Bug("B71", "each accumulated part divided by its own number of tokens", "checks.gradient_accumulation", CHECKS,
            "test_a_mean_over_tokens_is_no_mean_over_rows"),
        Bug("B73", "hooks of data parallelism lost in a move", why="it takes several processes"),
        Bug("B74", "an operation that autocast does not reach", "assert_dtypes", STRUCTURE, "test_autocast_is_seen"),
        Bug("B75", "weight decay on biases and norms", why="which parameters decay is a choice and not a property"),
    ],
    "Loss, numbers and data": [
        Bug("B77", "probabilities given to a loss that wants logits", "checks.overfits_batch", CHECKS,
            "test_a_softmax_before_a_cross_entropy_does_not_learn"),
        Bug("B78", "a sum over the batch for a mean", "checks.gradient_accumulation", CHECKS,
            "test_a_loss_that_is_a_sum_grows_with_the_batch"),
        Bug("B79", "a column broadcast against a row in the loss",
            why="torch warns of it; with warnings as errors the test fails at that line"),
        snapshot("B80", "labels not shifted, or shifted twice", "labels shifted twice"),
        snapshot("B81", "padding that counts in the loss", "padding counted in the loss"),
        Bug("B82", "numbers beyond the range of half precision", "checks.dtype_parity", CHECKS,
            "test_an_overflow_of_half_precision_is_named"),
        Bug("B83", "a kernel that loses digits", why="it is no change of the model; device_parity bounds it"),
        snapshot("B85", "workers that draw the same numbers, so that rows repeat", "duplicate rows in the batch"),
        Bug("B86", "a BatchNorm that stays in training mode", "checks.train_eval_differ", CHECKS,
            "test_a_norm_that_stays_in_training_mode_is_named"),
        Bug("B87", "a mask or a counter kept from the last call", "checks.state_unchanged_by_forward", CHECKS,
            "test_a_mask_kept_of_another_batch_is_named"),
    ],
    "Outputs and batches": [
        Bug("C01", "softmax over time, given out inside a distribution", "checks.causal", OUTPUTS,
            "test_a_distribution_that_knows_of_later_positions_is_named"),
        Bug("C02", "softmax over the batch, given out inside a distribution", "checks.batch_independent", OUTPUTS,
            "test_a_distribution_that_mixes_the_batch_is_named"),
        Bug("C03", "a bottleneck that mixes the batch, small beside its residual", "checks.batch_independent",
            OUTPUTS, "test_a_bottleneck_that_mixes_the_batch_a_little_is_named"),
        Bug("C04", "a bottleneck that depends on the size of the batch", "checks.any_batch_size", OUTPUTS,
            "test_a_layer_that_depends_a_little_on_the_batch_size_is_named"),
        Bug("C05", "experts chosen by a softmax over the tokens of the batch", "checks.batch_independent", OUTPUTS,
            "test_an_axis_of_experts_as_long_as_the_batch_is_not_the_batch"),
        Bug("C06", "the first row for the whole batch, or a mean over it", "checks.any_batch_size", OUTPUTS,
            "test_a_batch_that_is_lost_is_named"),
        Bug("C07", "a squeeze that takes the axis of a batch of one", "checks.any_batch_size", OUTPUTS,
            "test_a_squeeze_that_takes_the_axis_of_one_row_is_named"),
    ],
    "Numbers and modes of checks": [
        Bug("C10", "numbers that are not finite, only in training mode", "checks.finite", FINITE,
            "test_what_is_not_finite_in_training_alone_is_a_break"),
        Bug("C11", "an infinity in the output that a mask did not make", "checks.finite", FINITE,
            "test_an_infinity_that_is_computed_is_a_break"),
        Bug("C12", "padding that a model finds by its id, and pools all the same", "checks.padding_invariant", FINITE,
            "test_a_model_that_does_not_find_its_padding_is_named"),
        Bug("C13", "an averaged model whose running statistics stay", "checks.ema_tracks", FINITE,
            "test_an_average_whose_running_statistics_stay_is_told"),
    ],
    "Caches and modes": [
        Bug("C20", "a causal mask that ignores the cache", "checks.incremental", INCREMENTAL,
            "test_a_mask_that_ignores_the_cache_is_named"),
        Bug("C21", "a causal mask as long as the chunk, which does not fit the scores", "checks.incremental",
            INCREMENTAL, "test_a_mask_that_does_not_fit_is_told_with_what_goes"),
        Bug("C22", "positions that ignore the cache", "checks.incremental", INCREMENTAL,
            "test_positions_that_ignore_the_cache_are_named_in_gpt2"),
        Bug("C23", "a start position that is wrong only for later chunks", "checks.incremental", INCREMENTAL,
            "test_a_start_that_is_wrong_for_later_chunks_alone_is_named"),
        Bug("C24", "rotary angles that begin at 0 in each chunk", "checks.incremental", INCREMENTAL,
            "test_rotary_angles_that_ignore_the_cache_are_named_in_llama"),
        Bug("C25", "rotary angles one position too far after the first chunk", "checks.incremental", INCREMENTAL,
            "test_rotary_angles_one_too_far_are_named"),
        Bug("C26", "a cache that is overwritten and not extended", "checks.incremental", INCREMENTAL,
            "test_a_cache_that_is_overwritten_is_named"),
        Bug("C27", "a cache that keeps only the newest keys and values", "checks.incremental", INCREMENTAL,
            "test_a_cache_that_is_overwritten_is_named_in_llama"),
        Bug("C28", "a hidden state that is dropped between chunks", "checks.incremental", INCREMENTAL,
            "test_a_state_that_is_dropped_is_named_by_the_cell_that_got_it"),
        Bug("C29", "a step that computes a different recurrence than the forward", "checks.incremental", INCREMENTAL,
            "test_a_step_that_drops_the_state_is_named"),
        Bug("C30", "LoRA merged for evaluation with another scale", "checks.modes_agree", MODES,
            "test_lora_merged_with_another_scale_is_named"),
        Bug("C31", "LoRA merged once more by a second eval()", "checks.modes_agree", MODES,
            "test_lora_that_is_merged_twice_is_named"),
        Bug("C32", "LoRA that stays merged when training goes on", "checks.modes_agree", MODES,
            "test_lora_that_stays_merged_is_named"),
        Bug("C33", "a layer that computes something else in training", "checks.modes_agree", MODES,
            "test_a_layer_that_takes_another_way_in_training_is_named"),
        Bug("C34", "a dropped path that is not scaled",
            why="what a layer draws is not measured; a snapshot of training shows a scale that changes"),
        Bug("C35", "dropout by hand, not scaled or scaled twice",
            why="what a layer draws is not measured; a snapshot of training shows a scale that changes"),
        Bug("C36", "dropout of torch, scaled once more by hand", "checks.modes_agree", MODES,
            "test_dropout_that_is_scaled_twice_by_hand_is_named"),
        Bug("C37", "a row for padding that is not zero", "checks.initialized", MODES,
            "test_a_row_for_padding_that_an_initialization_wrote_over_is_named"),
        Bug("C38", "features of an input that a slice leaves out", "checks.inputs_used", MODES,
            "test_features_that_reach_nothing_are_named"),
        Bug("C39", "an input that is taken and not used", "checks.inputs_used", MODES,
            "test_an_input_that_reaches_nothing_is_named"),
    ],
    "The training loop": [
        Bug("C40", "gradients never reset, and not accumulated on purpose", "assert_training_loop", TRAINING,
            "test_gradients_that_are_never_reset_are_said"),
        Bug("C41", "a closure of LBFGS that does not reset them", "assert_training_loop", TRAINING,
            "test_a_closure_without_a_reset_is_said"),
        Bug("C42", "training that goes on in evaluation mode after an evaluation", "assert_training_loop", TRAINING,
            "test_training_after_an_evaluation_without_train_is_said"),
        Bug("C43", "evaluation between epochs in training mode", "assert_training_loop", TRAINING,
            "test_an_evaluation_without_eval_is_said"),
        Bug("C44", "a generator that the discriminator's loss trains too", "assert_training_loop", TRAINING,
            "test_a_generator_trained_by_the_loss_of_the_discriminator_is_said"),
        Bug("C45", "an optimizer made for another copy of the model", "assert_training_loop", TRAINING,
            "test_an_optimizer_made_for_a_copy_is_said"),
        Bug("C46", "a BatchNorm that sees an accumulated batch in parts", "assert_training_loop", TRAINING,
            "test_a_norm_over_the_parts_of_an_accumulated_batch_is_said"),
        Bug("C47", "a GradScaler that skips its steps", "assert_training_loop", TRAINING,
            "test_a_scaler_that_skips_its_steps_is_said"),
        Bug("C48", "a step with gradients of NaN, taken for an update", "assert_params_updated", PARAMETERS,
            "test_parameters_that_a_gradient_made_nan_are_named_as_such"),
    ],
    "Checkpoints, packed documents and bits": [
        Bug("C50", "a loader that goes through the keys of the file: what it lacks stays random",
            "checks.wholly_loaded", CHECKPOINT, "test_the_message_names_all_that_is_not_loaded"),
        Bug("C51", "a loop that fills only a part of a stacked weight", "checks.wholly_loaded", CHECKPOINT,
            "test_a_part_of_a_parameter_is_counted_by_elements"),
        Bug("C52", "weights that are initialized again after they were loaded", "checks.wholly_loaded", CHECKPOINT,
            "test_initializing_is_not_loading"),
        Bug("C53", "a buffer in no checkpoint that to_empty() left without values", "checks.wholly_loaded", CHECKPOINT,
            "test_a_buffer_in_no_checkpoint_may_not_lose_its_memory"),
        Bug("C54", "a head that the checkpoint of the base model lacks", "checks.wholly_loaded", CHECKPOINT,
            "test_from_pretrained_names_the_new_head"),
        Bug("C55", "packed documents that attend to each other in one layer", "checks.packed_documents", PACKING,
            "test_the_first_layer_that_sees_another_document_is_named"),
        Bug("C56", "packed documents that a cache makes the model forget", "checks.packed_documents", PACKING,
            "test_a_cache_makes_a_model_forget_them"),
        Bug("C57", "a block-diagonal mask of ones, added to the scores as it is", "checks.packed_documents", PACKING,
            "test_a_mask_that_is_added_as_numbers_is_named"),
        Bug("C58", "learned positions that go on in the next packed document", "checks.packed_documents", PACKING,
            "test_learned_positions_that_go_on_are_told_from_a_leak"),
        Bug("C59", "a sum whose order depends on the size of the batch", "checks.any_batch_size", BITWISE,
            "test_a_sum_in_another_order_is_named_with_its_ulps"),
    ],
}  # fmt: skip

BUGS = [bug for bugs in FAMILIES.values() for bug in bugs]
