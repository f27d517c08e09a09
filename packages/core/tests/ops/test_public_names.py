import inspect

from stack_core import ops
from stack_core.ops import building, units


def test_public_names() -> None:
    assert set(ops.__all__) == {
        "DynamicScaling",
        "ExplainedCall",
        "Explanation",
        "Head",
        "Implementation",
        "LinearScaling",
        "Llama3Scaling",
        "LogicalNames",
        "LongRopeScaling",
        "PackedSegments",
        "ProportionalScaling",
        "RopeScaling",
        "YarnScaling",
        "attention",
        "changed_choices",
        "choices",
        "collective_matmul",
        "dequantize",
        "exchange",
        "explain",
        "for_export",
        "gated_linear_unit",
        "linear",
        "linear_attention",
        "linear_cross_entropy",
        "low_rank",
        "norm",
        "page_layout",
        "paged_attention",
        "ragged_dot",
        "received_sizes",
        "ring_attention",
        "rope",
        "seen_into",
        "state_space",
        "use_tuned_table",
    }


def test_public_names_of_building() -> None:
    assert set(building.__all__) == {
        "ACTIVATIONS",
        "BackwardCall",
        "LowRankWeight",
        "QuantizedArray",
        "RowParts",
        "RunningSoftmax",
        "accurate_dtype",
        "add_tile",
        "answer",
        "as_backward",
        "as_int32",
        "bounded_places",
        "by_group",
        "check_parameters",
        "check_takes",
        "choose",
        "contract",
        "decays_between",
        "dequantize",
        "differentiated",
        "empty_softmax",
        "finish",
        "forward_only",
        "gate_product",
        "has_ragged_outer_product_of_codes",
        "has_ragged_product_of_codes",
        "holds_values",
        "implementations_of",
        "is_installed",
        "is_plain",
        "is_quantized",
        "joined_by_sinks",
        "logical_array",
        "masked_logits",
        "named_residuals",
        "padding_as_zero",
        "parameters_of",
        "picked",
        "preferred",
        "ragged_outer_product_of_codes",
        "ragged_product",
        "ragged_product_of_codes",
        "rope_angles",
        "rotated",
        "stack_key_value",
        "supporting",
        "take",
        "vary_alike",
        "varying",
        "with_automatic_axes",
        "with_sinks",
    }


def test_public_names_of_units() -> None:
    assert set(units.__all__) == {"OpUnit", "as_units", "unit_of"}


def test_signatures_are_those_of_abi_1() -> None:
    names = {op: " ".join(inspect.signature(getattr(ops, op)).parameters) for op in ops.__all__ if op.islower()}
    no_ops = {"changed_choices", "choices", "dequantize", "explain", "for_export", "page_layout", "received_sizes"}
    no_ops |= {"seen_into", "use_tuned_table"}
    names = {op: parameters for op, parameters in names.items() if op not in no_ops}
    assert names == {
        "attention": "query key value causal query_offset window bias mask segment_ids kv_lengths softcap sinks scale "
        "return_lse implementation axes",
        "collective_matmul": "x weight axis_name kind implementation axes",
        "exchange": "x group_sizes axis_name out_rows kind implementation axes",
        "gated_linear_unit": "x w_gate w_up bias_gate bias_up activation limit up_offset implementation axes",
        "linear": "x weight bias preferred_dtype implementation axes",
        "linear_attention": "query key value decay beta initial_state implementation axes",
        "linear_cross_entropy": "hidden weight labels bias softcap ignore_index z_loss label_smoothing "
        "reduction implementation axes",
        "low_rank": "x down up scale rows implementation axes",
        "norm": "x scale offset kind epsilon scale_offset residual axis implementation axes",
        "paged_attention": "query key_pages value_pages block_tables kv_lengths query_starts window softcap sinks "
        "ahead scale value_dim layout implementation axes",
        "ragged_dot": "lhs rhs group_sizes bias implementation axes",
        "ring_attention": "query key value axis_name order causal query_offset window segment_ids kv_lengths softcap "
        "sinks scale return_lse implementation axes",
        "rope": "x positions theta scaling interleaved rotary_dim implementation axes",
        "state_space": "query key value decay beta initial_state implementation axes",
    }
