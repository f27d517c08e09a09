"""Building blocks for implementations of ops, including core's own references."""

from stack_core.ops.definitions.gated_linear_unit import ACTIVATIONS, gate_product
from stack_core.ops.definitions.rope import rope_angles, rotated
from stack_core.ops.dispatch.automatic_axes import with_automatic_axes
from stack_core.ops.dispatch.backward_call import BackwardCall, as_backward
from stack_core.ops.dispatch.choosing import answer, choose, supporting
from stack_core.ops.dispatch.contract import accurate_dtype, contract
from stack_core.ops.dispatch.differentiated import differentiated, forward_only
from stack_core.ops.dispatch.implementations import implementations_of, is_installed, preferred
from stack_core.ops.dispatch.manual_axes import vary_alike, varying
from stack_core.ops.dispatch.picked import picked
from stack_core.ops.dispatch.plain import is_plain
from stack_core.ops.dispatch.remat import named_residuals
from stack_core.ops.dispatch.signature import check_parameters, check_takes, parameters_of
from stack_core.ops.references.decays import decays_between
from stack_core.ops.references.low_rank_weight import LowRankWeight
from stack_core.ops.references.paged_places import as_int32, bounded_places, padding_as_zero
from stack_core.ops.references.paged_pools import holds_values, stack_key_value
from stack_core.ops.references.quantized import QuantizedArray, dequantize, is_quantized, logical_array, take
from stack_core.ops.references.ragged_codes import (
    has_ragged_outer_product_of_codes,
    has_ragged_product_of_codes,
    ragged_outer_product_of_codes,
    ragged_product_of_codes,
)
from stack_core.ops.references.ragged_tiles import ragged_product
from stack_core.ops.references.row_parts import RowParts
from stack_core.ops.references.running_softmax import (
    RunningSoftmax,
    add_tile,
    by_group,
    empty_softmax,
    finish,
    joined_by_sinks,
    masked_logits,
    with_sinks,
)

__all__ = [
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
]
