import inspect

from stack_core import ops
from stack_core.ops import building, units


def test_public_names() -> None:
    assert set(ops.__all__) == {
        "DynamicScaling",
        "ExplainedCall",
        "Explanation",
        "Implementation",
        "LinearScaling",
        "Llama3Scaling",
        "LongRopeScaling",
        "RopeScaling",
        "YarnScaling",
        "attention",
        "collective_matmul",
        "dequantize",
        "explain",
        "gated_linear_unit",
        "linear",
        "linear_attention",
        "linear_cross_entropy",
        "norm",
        "paged_attention",
        "ragged_dot",
        "rope",
        "use_tuned_table",
    }


def test_public_names_of_building() -> None:
    assert set(building.__all__) == {
        "ACTIVATIONS",
        "QuantizedArray",
        "RunningSoftmax",
        "accurate_dtype",
        "add_tile",
        "by_group",
        "contract",
        "dequantize",
        "empty_softmax",
        "finish",
        "is_quantized",
        "logical_array",
        "masked_logits",
        "rope_angles",
        "rotated",
        "supporting",
        "take",
        "vary_alike",
        "with_sinks",
    }


def test_public_names_of_units() -> None:
    assert set(units.__all__) == {"OpUnit", "as_units", "unit_of"}


def test_signatures_are_those_of_abi_1() -> None:
    names = {op: " ".join(inspect.signature(getattr(ops, op)).parameters) for op in ops.__all__ if op.islower()}
    del names["dequantize"], names["explain"], names["use_tuned_table"]
    assert names == {
        "attention": "query key value causal query_offset window bias mask segment_ids kv_lengths softcap sinks scale "
        "return_lse implementation",
        "collective_matmul": "x weight axis_name kind implementation",
        "gated_linear_unit": "x w_gate w_up activation implementation",
        "linear": "x weight bias preferred_dtype implementation",
        "linear_attention": "query key value decay beta initial_state implementation",
        "linear_cross_entropy": "hidden weight labels ignore_index z_loss label_smoothing reduction implementation",
        "norm": "x scale offset kind epsilon scale_offset residual axis implementation",
        "paged_attention": "query key_pages value_pages block_tables kv_lengths query_starts window softcap sinks "
        "scale layout implementation",
        "ragged_dot": "lhs rhs group_sizes implementation",
        "rope": "x positions theta scaling interleaved rotary_dim implementation",
    }
