"""What implementations of ops are built from, core's own references included."""

from stack_core.ops._contract import accurate_dtype, contract
from stack_core.ops._dispatch import supporting
from stack_core.ops._gated_linear_unit import ACTIVATIONS
from stack_core.ops._manual_axes import vary_alike
from stack_core.ops._quantized import QuantizedArray, dequantize, is_quantized, logical_array, take

__all__ = [
    "ACTIVATIONS",
    "QuantizedArray",
    "accurate_dtype",
    "contract",
    "dequantize",
    "is_quantized",
    "logical_array",
    "supporting",
    "take",
    "vary_alike",
]
