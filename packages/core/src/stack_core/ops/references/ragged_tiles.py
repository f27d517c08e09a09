"""Reference implementation of `ragged_dot` in tiles of rows of the same group."""

import dataclasses
from collections.abc import Callable, Sequence
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

__all__ = ["cut_off", "fold_tiles", "map_tiles", "ragged_product", "tile_rows_of"]

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
    return tile_rows_of(rows, groups, _MOST_TILE_ROWS)


def tile_rows_of(rows: Size, groups: int, max_tile_rows: int) -> int:
    """Returns the rows of a tile, a power of two: padding adds at most a quarter to the work.

    For small groups it adds more, because products of fewer than 16 rows are slower than their FLOPs suggest.
    """
    if is_symbolic(rows):
        return _FEWEST_TILE_ROWS
    quarter = max(rows // (4 * groups), 1)
    return min(max(2 ** (quarter.bit_length() - 1), _FEWEST_TILE_ROWS), max_tile_rows)


def _multiply(subscripts: str, lhs: Any, rhs: Any, group_sizes: Any, bias: Any) -> Any:
    """Multiplies each row by the matrix (axes k, n) of its group and adds the group's bias."""

    def multiply_tile(blocks: Sequence[Any], group: Any) -> Any:
        matrix = _matrix(rhs, group, lhs.dtype)
        if bias is None:
            return contract(subscripts, blocks[0], matrix, lhs.dtype)
        product = contract(subscripts, blocks[0], matrix, accurate_dtype(lhs.dtype))
        return (product + bias[group].astype(product.dtype)).astype(lhs.dtype)

    shape = logical_array(rhs).shape
    width = shape[2] if subscripts.endswith("n") else shape[1]
    tile_rows = _tile_rows(lhs.shape[0], group_sizes.shape[0])
    return map_tiles(multiply_tile, [lhs], group_sizes, width=width, dtype=lhs.dtype, tile_rows=tile_rows)


def map_tiles(
    function: Callable[[Sequence[Any], Any], Any],
    operands: Sequence[Any],
    group_sizes: Any,
    *,
    width: Size,
    dtype: Any,
    tile_rows: int,
    skip_empty: bool = False,
) -> Any:
    """Computes an array [rows, width] tile by tile; rows after all groups are 0.

    Args:
      function: (blocks [tile_rows, ...] of the operands, group) -> [tile_rows, width]. Blocks end with rows of the next
        groups, whose results are overwritten.
      operands: arrays [rows, ...], sorted by group.
      skip_empty: calls the function for tiles with rows of their group only. In a `jax.vmap`, this is slower.
    """
    rows = operands[0].shape[0]
    padded = [_padded(x, tile_rows) for x in operands]

    def write_tile(output: Any, tile: _Tiles) -> Any:
        blocks = [lax.dynamic_slice_in_dim(x, tile.start, tile_rows) for x in padded]
        return lax.dynamic_update_slice_in_dim(output, function(blocks, tile.group), tile.start, axis=0)

    step = _step(write_tile, skip_empty)
    output = jnp.zeros_like(operands[0], shape=(rows + tile_rows, width), dtype=dtype)
    output, _ = lax.scan(step, output, _tiles(group_sizes, rows, tile_rows))
    return jnp.where(jnp.arange(rows)[:, None] < jnp.sum(group_sizes), output[:rows], 0)


def fold_tiles(
    function: Callable[[Any, Sequence[Any], Any], Any],
    totals: Any,
    operands: Sequence[Any],
    group_sizes: Any,
    *,
    tile_rows: int,
    skip_empty: bool = False,
) -> Any:
    """Folds `function(totals, blocks, group)` over all tiles and returns the last totals.

    Args:
      operands: arrays [rows, ...], sorted by group. Their blocks [tile_rows, ...] have zeros for rows of other groups.
      skip_empty: see `map_tiles`.
    """
    padded = [_padded(x, tile_rows) for x in operands]

    def add_tile(totals: Any, tile: _Tiles) -> Any:
        in_group = (tile.start + jnp.arange(tile_rows, dtype=jnp.int32) < tile.end)[:, None]
        # All are masked because rows outside all groups may contain any value, including inf.
        blocks = [
            jnp.where(in_group, lax.dynamic_slice_in_dim(x, tile.start, tile_rows), jnp.zeros((), x.dtype))
            for x in padded
        ]
        return function(totals, blocks, tile.group)

    tiles = _tiles(group_sizes, operands[0].shape[0], tile_rows)
    totals, _ = lax.scan(_step(add_tile, skip_empty), totals, tiles)
    return totals


def _step(update: Callable[[Any, _Tiles], Any], skip_empty: bool) -> Callable[[Any, _Tiles], tuple[Any, None]]:
    """Returns the body of a scan over tiles that updates its carry."""

    def step(carry: Any, tile: _Tiles) -> tuple[Any, None]:
        if skip_empty:
            has_rows = tile.start < tile.end
            return lax.cond(has_rows, lambda carry: update(carry, tile), lambda carry: carry, carry), None
        return update(carry, tile), None

    return step


def _padded(array: Any, tile_rows: int) -> Any:
    """Pads the rows so that a tile may start at any row, or after the last row."""
    return jnp.pad(array, ((0, tile_rows), (0, 0)))


def _sums_by_group(lhs: Any, cotangent: Any, group_sizes: Any, has_bias: bool) -> tuple[Any, Any]:
    """Computes the gradients of each group's matrix [groups, d_in, d_out] and bias [groups, d_out] (fp32), if any."""
    groups, accumulator = group_sizes.shape[0], accurate_dtype(lhs.dtype)

    def add_tile(totals: Any, blocks: Sequence[Any], group: Any) -> Any:
        of_matrices, of_bias = totals
        lhs_rows, gradient_rows = blocks
        added = of_matrices[group] + contract("rk,rn->kn", lhs_rows, gradient_rows, accumulator)
        if has_bias:
            of_bias = of_bias.at[group].add(jnp.sum(gradient_rows.astype(accumulator), axis=0))
        return lax.dynamic_update_index_in_dim(of_matrices, added, group, axis=0), of_bias

    d_out = cotangent.shape[1]
    of_matrices = jnp.zeros_like(lhs, shape=(groups, lhs.shape[1], d_out), dtype=accumulator)
    of_bias = jnp.zeros_like(lhs, shape=(groups, d_out), dtype=accumulator) if has_bias else None
    tile_rows = _tile_rows(lhs.shape[0], groups)
    totals = fold_tiles(add_tile, (of_matrices, of_bias), [lhs, cotangent], group_sizes, tile_rows=tile_rows)
    return totals[0].astype(lhs.dtype), totals[1]


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


def cut_off(group_sizes: Any, rows: Size) -> Any:
    """Clamps group sizes as int32, which bounds loops over the rows of a group and prevents overflow of their sums."""
    # The number of rows may exceed a small dtype.
    if group_sizes.dtype.itemsize < 4:
        group_sizes = group_sizes.astype(jnp.int32)
    sizes = jnp.clip(group_sizes, 0, rows)
    groups = group_sizes.shape[0]
    if is_symbolic(rows, groups) or rows * groups < 2**31:
        return sizes.astype(jnp.int32)
    # Saturating sum of sizes: each term is at most `rows`, so uint32 does not overflow below 2**31 rows.
    ends = lax.associative_scan(lambda one, other: jnp.minimum(one + other, rows), sizes.astype(jnp.uint32))
    return jnp.diff(ends, prepend=jnp.zeros(1, ends.dtype)).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class _OneGroup:
    view: QView

    def __stack_qview__(self) -> QView:
        return self.view
