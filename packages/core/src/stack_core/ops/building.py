"""What implementations of ops are built from, core's own references included."""

from stack_core.ops._contract import accurate_dtype, contract
from stack_core.ops._dispatch import supporting
from stack_core.ops._gated_linear_unit import ACTIVATIONS
from stack_core.ops._manual_axes import vary_alike
from stack_core.ops._quantized import QuantizedArray, dequantize, is_quantized, logical_array, take
from stack_core.ops._rope import rope_angles, rotated
from stack_core.ops._running_softmax import (
    RunningSoftmax,
    add_tile,
    by_group,
    empty_softmax,
    finish,
    masked_logits,
    with_sinks,
)

__all__ = [
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
]
