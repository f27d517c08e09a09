"""Reference implementation of `ragged_dot` in tiles of rows of the same group."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from stack_core.abi.ops import QView
from stack_core.ops.dispatch.contract import accurate_dtype, contract
from stack_core.ops.dispatch.manual_axes import vary_alike
from stack_core.ops.dispatch.plain import is_plain
from stack_core.ops.dispatch.symbolic import Size, is_symbolic
from stack_core.ops.references.quantized import dequantize, is_quantized, logical_array

__all__ = ["ragged_product"]

_FEWEST_TILE_ROWS = 16
_MOST_TILE_ROWS = 128


def ragged_product(lhs: Any, rhs: Any, group_sizes: Any, *, bias: Any = None) -> Any:
    """Computes `ragged_dot`; the FLOPs are for all rows plus less than one tile per group."""
    # Forward mode cannot pass through a `custom_vjp`.
    product = _plain_product if is_plain() else _product
    return product(*vary_alike(lhs, rhs, group_sizes.astype(jnp.int32), bias))


def _plain_product(lhs: Any, rhs: Any, group_sizes: Any, bias: Any) -> Any:
    return _multiply("rk,kn->rn", lhs, rhs, group_sizes, bias)


@jax.custom_vjp
def _product(lhs: Any, rhs: Any, group_sizes: Any, bias: Any) -> Any:
    return _plain_product(lhs, rhs, group_sizes, bias)


def _forward(lhs: Any, rhs: Any, group_sizes: Any, bias: Any) -> Any:
    return _product(lhs, rhs, group_sizes, bias), (lhs, rhs, group_sizes, bias)


def _backward(operands: Any, cotangent: Any) -> Any:
    lhs, rhs, group_sizes, bias = operands
    of_lhs = _multiply("rn,kn->rk", cotangent, rhs, group_sizes, None)
    of_matrices, of_bias = _sums_by_group(lhs, cotangent, group_sizes, bias is not None)
    _, dequantize_vjp = jax.vjp(lambda rhs: dequantize(rhs, lhs.dtype), rhs)
    return of_lhs, *dequantize_vjp(of_matrices), None, None if bias is None else of_bias.astype(bias.dtype)


_product.defvjp(_forward, _backward)


class _Tiles(NamedTuple):
    """Tiles of rows that cover all groups, each starting in one group: int32[tiles] arrays in row order.

    A tile has the rows start, ..., start + tile_rows - 1; rows from `end` on do not belong to its group.
    """

    group: Any
    start: Any
    end: Any


def _tiles(group_sizes: Any, rows: Size, tile_rows: int) -> _Tiles:
    """Returns enough tiles for any group sizes; excess tiles belong to the last group but contain none of its rows."""
    groups = group_sizes.shape[0]
    tile = jnp.arange(_max_tiles(rows, groups, tile_rows), dtype=jnp.int32)
    tiles = -(-group_sizes // tile_rows)
    tile_ends, row_ends = (jnp.cumsum(x, dtype=jnp.int32) for x in (tiles, group_sizes))
    # By comparison: other methods search in a loop before JAX 0.12.
    group = jnp.minimum(jnp.searchsorted(tile_ends, tile, side="right", method="compare_all"), groups - 1)
    of_group = tile - (tile_ends - tiles)[group]
    # Tiles that start beyond the rows are clamped into the padding by dynamic_slice.
    return _Tiles(group, (row_ends - group_sizes)[group] + of_group * tile_rows, row_ends[group])


def _max_tiles(rows: Size, groups: int, tile_rows: int) -> Size:
    if is_symbolic(rows):
        return groups + rows // tile_rows
    begun = min(rows, groups)  # Maximum number of non-empty groups; each may leave one tile partly filled.
    return begun + (rows - begun) // tile_rows


def _tile_rows(rows: Size, groups: int) -> int:
    """Returns the rows of a tile, a power of two: padding adds at most a quarter to the work.

    For small groups it adds more, because products of fewer than 16 rows are slower than their FLOPs suggest.
    """
    if is_symbolic(rows):
        return _FEWEST_TILE_ROWS
    quarter = max(rows // (4 * groups), 1)
    return min(max(2 ** (quarter.bit_length() - 1), _FEWEST_TILE_ROWS), _MOST_TILE_ROWS)


def _multiply(subscripts: str, lhs: Any, rhs: Any, group_sizes: Any, bias: Any) -> Any:
    """Multiplies each row by the matrix (axes k, n) of its group and adds the group's bias."""
    rows, groups = lhs.shape[0], group_sizes.shape[0]
    tile_rows = _tile_rows(rows, groups)
    padded = _padded(lhs, tile_rows)

    def multiply_tile(output: Any, tile: _Tiles) -> Any:
        block = lax.dynamic_slice_in_dim(padded, tile.start, tile_rows)
        matrix = _matrix(rhs, tile.group, lhs.dtype)
        if bias is None:
            product = contract(subscripts, block, matrix, lhs.dtype)
        else:
            product = contract(subscripts, block, matrix, accurate_dtype(lhs.dtype))
            product = (product + bias[tile.group].astype(product.dtype)).astype(lhs.dtype)
        # Rows of the next groups are overwritten by the following tiles.
        return lax.dynamic_update_slice_in_dim(output, product, tile.start, axis=0), None

    shape = logical_array(rhs).shape
    width = shape[2] if subscripts.endswith("n") else shape[1]
    output = jnp.zeros_like(lhs, shape=(rows + tile_rows, width))
    output, _ = lax.scan(multiply_tile, output, _tiles(group_sizes, rows, tile_rows))
    return jnp.where(jnp.arange(rows)[:, None] < jnp.sum(group_sizes), output[:rows], 0)


def _padded(array: Any, tile_rows: int) -> Any:
    """Pads the rows so that a tile may start at any row, or after the last row."""
    return jnp.pad(array, ((0, tile_rows), (0, 0)))


def _sums_by_group(lhs: Any, cotangent: Any, group_sizes: Any, has_bias: bool) -> tuple[Any, Any]:
    """Computes the gradients of each group's matrix [groups, d_in, d_out] and bias [groups, d_out] (fp32), if any."""
    rows, groups = lhs.shape[0], group_sizes.shape[0]
    tile_rows = _tile_rows(rows, groups)
    accumulator = accurate_dtype(lhs.dtype)
    padded = [_padded(x, tile_rows) for x in (lhs, cotangent)]

    def add_tile(totals: Any, tile: _Tiles) -> Any:
        of_matrices, of_bias = totals
        in_group = (tile.start + jnp.arange(tile_rows, dtype=jnp.int32) < tile.end)[:, None]
        # Both are masked because rows outside all groups may contain any value, including inf.
        lhs_rows, gradient_rows = (
            jnp.where(in_group, lax.dynamic_slice_in_dim(x, tile.start, tile_rows), 0) for x in padded
        )
        product = contract("rk,rn->kn", lhs_rows, gradient_rows, accumulator)
        if has_bias:
            of_bias = of_bias.at[tile.group].add(jnp.sum(gradient_rows.astype(accumulator), axis=0))
        added = of_matrices[tile.group] + product
        return (lax.dynamic_update_index_in_dim(of_matrices, added, tile.group, axis=0), of_bias), None

    d_out = cotangent.shape[1]
    of_matrices = jnp.zeros_like(lhs, shape=(groups, lhs.shape[1], d_out), dtype=accumulator)
    of_bias = jnp.zeros_like(lhs, shape=(groups, d_out), dtype=accumulator) if has_bias else None
    (of_matrices, of_bias), _ = lax.scan(add_tile, (of_matrices, of_bias), _tiles(group_sizes, rows, tile_rows))
    return of_matrices.astype(lhs.dtype), of_bias


def _matrix(rhs: Any, group: Any, dtype: Any) -> Any:
    """Returns the dequantized matrix of one group, [d_in, d_out]."""
    if not is_quantized(rhs):
        return rhs[group]
    view = rhs.__stack_qview__()
    groups = view.qvalue.shape[0]

    def of_group(x: Any) -> Any:
        # Several groups may share a scale.
        return None if x is None else x[group // (groups // x.shape[0])]

    parts = {name: of_group(getattr(view, name)) for name in ("qvalue", "scale", "zero_point")}
    return dequantize(_OneGroup(dataclasses.replace(view, **parts)), dtype)


@dataclasses.dataclass(frozen=True)
class _OneGroup:
    view: QView

    def __stack_qview__(self) -> QView:
        return self.view
