"""Grouped products of 8-bit codes, whose sums are scaled afterwards."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from stack_core.abi.ops import QView
from stack_core.ops.dispatch.manual_axes import vary_alike
from stack_core.ops.references.quantized import MAX_TERMS, are_multipliable, is_fp8, repeated
from stack_core.ops.references.ragged_tiles import cut_off, fold_tiles, map_tiles, tile_rows_of

__all__ = [
    "has_ragged_outer_product_of_codes",
    "has_ragged_product_of_codes",
    "ragged_outer_product_of_codes",
    "ragged_product_of_codes",
]

_MAX_TILE_ROWS = 512
"""Larger than tiles of floats: each tile reads the matrix of its group, and 8 bits need more FLOPs per byte."""


def has_ragged_product_of_codes(lhs: Any, rhs: Any) -> bool:
    """Returns whether `ragged_product_of_codes` takes these rows [rows, d_in] and matrices [groups, d_in, d_out].

    Both are fp8, or both are signed integers of up to 8 bits. No scale varies along d_in.
    """
    if not are_multipliable(lhs, rhs, (1, 1)):
        return False
    codes = lhs.__stack_qview__().qvalue
    return is_fp8(codes.dtype) or codes.shape[1] <= MAX_TERMS


def ragged_product_of_codes(lhs: Any, rhs: Any, group_sizes: Any, dtype: DTypeLike) -> jax.Array:
    """Computes `ragged_dot` of codes q, p with scales a, b; g is the group of row r.

        y[r, n] = (sum_k q[r, k] p[g, k, n]) a[r] b[g, n]

    Sums of integers are exact in int32, sums of fp8 codes are fp32, and the result is rounded once. It has no
    gradients, for which quantized training has products of its own.

    Args:
      lhs: quantized [rows, d_in], sorted by group.
      rhs: quantized [groups, d_in, d_out].
      group_sizes: [groups], integers, as in `ragged_dot`.
      dtype: dtype of the result.
    """
    lhs, rhs, sizes = vary_alike(lhs, rhs, cut_off(group_sizes, lhs.__stack_qview__().qvalue.shape[0]))
    left, right = lhs.__stack_qview__(), rhs.__stack_qview__()
    rows, (groups, _, width) = left.qvalue.shape[0], right.qvalue.shape
    # GPUs multiply fp8 along the fastest axis of both operands. Transposed here, and not in each tile.
    matrices, columns = _factor(right).swapaxes(1, 2), _scales(right, (groups, 1, width))

    def multiply_tile(blocks: Sequence[Any], group: Any) -> Any:
        block, scales = blocks
        matrix, of_columns = (lax.dynamic_index_in_dim(x, group, keepdims=False) for x in (matrices, columns))
        return (_product(block, matrix, (1, 1)) * scales * of_columns).astype(dtype)

    # Buffers that devices exchange rows in are mostly empty.
    tiling: Any = {"tile_rows": tile_rows_of(rows, groups, _MAX_TILE_ROWS), "skip_empty": True}
    operands = [_factor(left), _scales(left, (rows, 1))]
    return map_tiles(multiply_tile, operands, sizes, width=width, dtype=dtype, **tiling)


def has_ragged_outer_product_of_codes(lhs: Any, rhs: Any) -> bool:
    """Returns whether `ragged_outer_product_of_codes` takes these operands, whose scales do not vary along rows."""
    return are_multipliable(lhs, rhs, (0, 0))


def ragged_outer_product_of_codes(lhs: Any, rhs: Any, group_sizes: Any, dtype: DTypeLike) -> jax.Array:
    """Computes the gradient of each group's matrix by codes q, p with scales a, b.

        w[g, k, n] = (sum over rows r of group g of q[r, k] p[r, n]) a[k] b[n]

    Sums over a tile of rows are as in `ragged_product_of_codes`, and sums over tiles are fp32.

    Args:
      lhs: quantized [rows, d_in], sorted by group.
      rhs: quantized [rows, d_out], in the same order.
      group_sizes: [groups], integers, as in `ragged_dot`.
      dtype: dtype of the result, [groups, d_in, d_out].
    """
    lhs, rhs, sizes = vary_alike(lhs, rhs, cut_off(group_sizes, lhs.__stack_qview__().qvalue.shape[0]))
    left, right = lhs.__stack_qview__(), rhs.__stack_qview__()
    (rows, d_in), d_out, groups = left.qvalue.shape, right.qvalue.shape[1], sizes.shape[0]

    def add_tile(totals: Any, blocks: Sequence[Any], group: Any) -> Any:
        left_rows, right_rows = blocks
        added = lax.dynamic_index_in_dim(totals, group, keepdims=False) + _product(left_rows, right_rows, (0, 0))
        return lax.dynamic_update_index_in_dim(totals, added, group, axis=0)

    zeros = jnp.zeros_like(left.qvalue, shape=(groups, d_in, d_out), dtype=jnp.float32)
    tiling: Any = {"tile_rows": tile_rows_of(rows, groups, _MAX_TILE_ROWS), "skip_empty": True}
    totals = fold_tiles(add_tile, zeros, [_factor(left), _factor(right)], sizes, **tiling)
    scales = _scales(left, (1, d_in)).reshape(1, d_in, 1) * _scales(right, (1, d_out)).reshape(1, 1, d_out)
    return (totals * scales).astype(dtype)


def _factor(view: QView) -> jax.Array:
    """Returns codes in a dtype that is multiplied as it is: fp8, or int8."""
    return view.qvalue if is_fp8(view.qvalue.dtype) else view.qvalue.astype(jnp.int8)


def _scales(view: QView, shape: tuple[int, ...]) -> jax.Array:
    return jnp.broadcast_to(repeated(view.scale, shape), shape)


def _product(left: jax.Array, right: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Multiplies codes and sums over one axis of each, exactly for integers; returns fp32."""
    dtype = jnp.float32 if is_fp8(left.dtype) else jnp.int32
    numbers = ((axes[:1], axes[1:]), ((), ()))
    return lax.dot_general(left, right, numbers, preferred_element_type=dtype).astype(jnp.float32)
