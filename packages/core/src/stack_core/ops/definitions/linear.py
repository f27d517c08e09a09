"""Affine map of the last axis."""

import math
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from stack_core.abi.ops import OpCall
from stack_core.ops.definitions.low_rank import LowRankArray, is_low_rank, low_rank, low_rank_view
from stack_core.ops.dispatch.check import Axes, check_floating, check_same_dtype
from stack_core.ops.dispatch.contract import accurate_dtype, contract
from stack_core.ops.dispatch.dispatch import dispatch
from stack_core.ops.dispatch.op import Op, OpAxes
from stack_core.ops.dispatch.request import Implementation
from stack_core.ops.dispatch.splitting import LogicalNames
from stack_core.ops.references.quantized import (
    QuantizedArray,
    dequantize,
    has_product_of_codes,
    is_quantized,
    logical_array,
    product_of_codes,
)

__all__ = ["OP", "REFERENCE", "affine", "linear"]


def linear(
    x: Float[Array, "*batch d_in"] | QuantizedArray,
    weight: Float[Array, "d_in d_out"] | QuantizedArray | LowRankArray,
    *,
    bias: Float[Array, " d_out"] | None = None,
    preferred_dtype: DTypeLike | None = None,
    implementation: Implementation = None,
    axes: LogicalNames | None = None,
) -> Float[Array, "*batch d_out"]:
    """Computes the affine map y = x W + b.

    Args:
      x: [..., d_in], floating or quantized (any class with `__stack_qview__`). If quantized, gradients go to floating
        scales and zero points, not to the quantized values.
      weight: W, [d_in, d_out], of the dtype of `x`, or quantized likewise; either may be quantized without the other.
        With adapters (any class with `__stack_low_rank__`), the result is `linear` of the base weight, computed by
        `implementation`, plus `low_rank`.
      bias: b, [d_out], added to the accumulator in fp32.
      preferred_dtype: dtype of the result; by default the dtype of the unquantized operand, or float32 if both are
        quantized. Products are always accumulated in fp32, so float32 returns the unrounded accumulator.
      implementation: implementation name, or several in order of preference; None lets core choose.
      axes: logical axis names of the arrays, used to shard implementations that XLA cannot partition:
        {"x": ("batch", "seq", None), "weight": (None, "mlp")}.

    Returns:
      [..., d_out], of dtype `preferred_dtype`.

    Raises:
      ShapeError: d_in or d_out differ between the arguments.
      ArgumentError: `x` and `weight` are not floating, or of different dtypes.
      UnsupportedOp: no implementation supports the call, or no requested implementation does.
    """
    if is_low_rank(weight):
        view = low_rank_view(weight)
        # The base may be quantized, so the dtype must be determined before both products.
        dtype = _dtype(x, view.base) if preferred_dtype is None else preferred_dtype
        based = linear(x, view.base, bias=bias, preferred_dtype=dtype, implementation=implementation, axes=axes)
        of_rows = None if axes is None or "x" not in axes else {"x": axes["x"]}
        adapted = low_rank(dequantize(x, view.down.dtype), view.down, view.up, view.scale, view.rows, axes=of_rows)
        return based + adapted.astype(dtype)
    sizes = Axes("linear")
    sizes.match("x", logical_array(x), "... d_in")
    sizes.match("weight", logical_array(weight), "d_in d_out")
    sizes.match("bias", bias, "d_out")
    plain = {name: array for name, array in (("x", x), ("weight", weight)) if not is_quantized(array)}
    check_floating("linear", **plain, bias=bias)
    check_same_dtype("linear", **plain)
    arrays = {"x": x, "weight": weight, "bias": bias}
    options = {"preferred_dtype": jnp.dtype(_dtype(x, weight) if preferred_dtype is None else preferred_dtype)}
    return dispatch(OP, arrays, options, implementation, axes)


def _dtype(x: Any, weight: Any) -> Any:
    """Returns the dtype of the unquantized operand, to which the quantized operand is dequantized."""
    return next((array.dtype for array in (x, weight) if not is_quantized(array)), jnp.float32)


def _reference(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any, requested: Any) -> tuple[Any, dict[str, Any]]:
    if has_product_of_codes(x, weight):
        product = product_of_codes(x, weight)
        return (product if bias is None else product + bias.astype(product.dtype)).astype(preferred_dtype), {}
    x, weight = (dequantize(array, _dtype(x, weight)) for array in (x, weight))
    # Not -1, which is ambiguous for arrays without features.
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return affine(rows, weight, bias, preferred_dtype).reshape(*x.shape[:-1], weight.shape[-1]), {}


def affine(rows: Any, weight: Any, bias: Any, dtype: Any) -> Any:
    """Computes [n, d_in] @ [d_in, d_out] + [d_out] (or None) and rounds the result once."""
    if bias is None:
        return contract("ni,io->no", rows, weight, dtype)
    product = contract("ni,io->no", rows, weight, accurate_dtype(rows.dtype))
    return (product + bias.astype(product.dtype)).astype(dtype)


def _axes(call: OpCall) -> OpAxes:
    # If d_in were split, each device would add the bias to its partial sum.
    whole = frozenset() if call.arrays["bias"] is None else frozenset({"d_in"})
    operands = {"x": "... d_in", "weight": "d_in d_out", "bias": "d_out"}
    return OpAxes(operands, ("... d_out",), whole=whole)


OP = Op("linear", _reference, _axes, folds="...", linear_in=("x", "weight", "bias"))
REFERENCE = OP.implementation()
