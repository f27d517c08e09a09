"""Cases of ops' contracts whose options and sizes other cases have too, most of them combined.

The default sessions leave them out, also for implementations of other packages; `nox -s slow` runs them.
"""

__all__ = ["SIMILAR"]

_NAMES = {
    "attention": "causal window_and_more_keys left_window bias mask_per_head segments scale narrow_values",
    "gated_linear_unit": "one_quantized one_bias limit up_offset",
    "linear": "quantized_by_tensor quantized_by_row_tile quantized_by_d_in quantized_uint8 quantized_fp8 w8a8_batch",
    "linear_attention": "one_token wide_values without_decay without_beta",
    "linear_cross_entropy": "sum all_ignored_none other_ignore_index whole_tiles z_loss label_smoothing bias softcap",
    "low_rank": "first_of_several row_of_each_sequence more_adapters_than_rows",
    "paged_attention": "mixed slot_major_decode keys_beside_values_decode keys_beside_values_options head_a_key_head "
    "one_slot softcap ahead values_in_keys values_that_are_keys_of_no_queries pages_that_are_not_there "
    "lengths_beyond_the_table negative_lengths starts_beyond_the_tokens starts_that_do_not_ascend infinity",
    "ragged_dot": "one_group empty_groups only_rows_of_no_group one_row_a_group one_large_group bias "
    "quantized_by_channel",
    "state_space": "one_token",
}

SIMILAR = {op: frozenset(names.split()) for op, names in _NAMES.items()}
