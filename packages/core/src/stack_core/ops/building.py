"""What implementations of ops are built from, core's own references included."""

from stack_core.ops._contract import accurate_dtype as accurate_dtype
from stack_core.ops._contract import contract as contract
from stack_core.ops._gated_linear_unit import ACTIVATIONS as ACTIVATIONS
from stack_core.ops._manual_axes import vary_alike as vary_alike
from stack_core.ops._quantized import QuantizedArray as QuantizedArray
from stack_core.ops._quantized import dequantize as dequantize
from stack_core.ops._quantized import is_quantized as is_quantized
from stack_core.ops._quantized import logical_array as logical_array
from stack_core.ops._quantized import take as take

__all__ = [
    "ACTIVATIONS",
    "QuantizedArray",
    "accurate_dtype",
    "contract",
    "dequantize",
    "is_quantized",
    "logical_array",
    "take",
    "vary_alike",
]
