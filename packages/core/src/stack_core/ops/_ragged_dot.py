"""Product of rows with the matrix of the group that each belongs to, as in a mixture of experts."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from stack_core.abi import AUTODIFF, OpImplementation, QView
from stack_core.errors import ArgumentError, ShapeError
from stack_core.ops._check import Axes, check_floating, check_same_dtype
from stack_core.ops._contract import accurate_dtype, contract
from stack_core.ops._dispatch import Implementation, dispatch
from stack_core.ops._manual_axes import vary_alike
from stack_core.ops._quantized import QuantizedArray, dequantize, is_quantized, logical_array

__all__ = ["REFERENCE", "ragged_dot"]

_FEWEST_TILE_ROWS = 16
_MOST_TILE_ROWS = 128


def ragged_dot(
    lhs: Float[Array, "rows d_in"],
    rhs: Float[Array, "groups d_in d_out"] | QuantizedArray,
    group_sizes: Integer[Array, " groups"],
    *,
    implementation: Implementation = None,
) -> Float[Array, "rows d_out"]:
    """y_r = x_r W_g(r), where the first `group_sizes[0]` rows are of group 0, the next of group 1, and so on.

    x is `lhs`, W is `rhs`, y_r is 0 for the rows that come after all groups; they have no gradient. Products are
    accumulated in fp32.

    Args:
      lhs: [rows, d_in], sorted by group.
      rhs: [groups, d_in, d_out], at least one group, of the dtype of `lhs`; or quantized, any class with
        `__stack_qview__`; its scale then has a gradient, its integers have none.
      group_sizes: [groups], integers of at least 0. Their sum may be less than `rows`; what exceeds `rows` is cut off.
      implementation: a name, several in order of preference, or None to let core choose.

    Returns:
      [rows, d_out], of the dtype of `lhs`.

    Raises:
      ShapeError: d_in or groups differ between the arguments, or there is no group.
      ArgumentError: operands that are not floating or of different dtypes, or group sizes that are not integers.
      UnsupportedOp: no implementation, or not the one named, supports the call.

    Source: Gale et al., MegaBlocks: Efficient Sparse Training with Mixture-of-Experts, 2022 (arXiv:2211.15841).
    """
    axes = Axes("ragged_dot")
    axes.match("lhs", lhs, "rows d_in")
    axes.match("rhs", logical_array(rhs), "groups d_in d_out")
    axes.match("group_sizes", group_sizes, "groups")
    check_floating("ragged_dot", lhs=lhs)
    if not is_quantized(rhs):
        check_same_dtype("ragged_dot", lhs=lhs, rhs=rhs)
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ArgumentError(f"ragged_dot: group_sizes has dtype {group_sizes.dtype}; expected an integer dtype.")
    if axes["groups"] == 0:
        raise ShapeError("ragged_dot: axis 'groups' is 0 in rhs; expected at least one group, which may have no rows.")
    return dispatch("ragged_dot", {"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes}, {}, implementation)


def _reference(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
    return _ragged_dot(*vary_alike(lhs, rhs, group_sizes.astype(jnp.int32)))


@jax.custom_vjp
def _ragged_dot(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
    return _multiply("rk,kn->rn", lhs, rhs, group_sizes)


def _forward(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
    return _ragged_dot(lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _backward(operands: Any, cotangent: Any) -> Any:
    lhs, rhs, group_sizes = operands
    of_lhs = _multiply("rn,kn->rk", cotangent, rhs, group_sizes)
    of_matrices = _sum_of_outer_products(lhs, cotangent, group_sizes)
    _, dequantize_vjp = jax.vjp(lambda rhs: dequantize(rhs, lhs.dtype), rhs)
    return of_lhs, *dequantize_vjp(of_matrices), None


_ragged_dot.defvjp(_forward, _backward)


class _Tiles(NamedTuple):
    """Blocks of rows that together cover every group, each within one: int32[tiles] each, in the order of the rows.

    The rows of a tile are start, ..., start + tile_rows - 1; those from `end` on are not of its group.
    """

    group: Any
    start: Any
    end: Any


def _tiles(group_sizes: Any, rows: int, tile_rows: int) -> _Tiles:
    """As many tiles as any sizes of groups may need; those in excess are of the last group and have no rows in it."""
    groups = group_sizes.shape[0]
    begun = min(rows, groups)  # At most so many groups have rows, and each may leave one tile unfilled.
    tile = jnp.arange(begun + (rows - begun) // tile_rows, dtype=jnp.int32)
    tiles = -(-group_sizes // tile_rows)
    tile_ends, row_ends = (jnp.cumsum(x, dtype=jnp.int32) for x in (tiles, group_sizes))
    group = jnp.minimum(jnp.searchsorted(tile_ends, tile, side="right", method="compare_all"), groups - 1)
    of_group = tile - (tile_ends - tiles)[group]
    # Whatever starts beyond the rows is clamped to their padding when it is sliced.
    return _Tiles(group, (row_ends - group_sizes)[group] + of_group * tile_rows, row_ends[group])


def _tile_rows(rows: int, groups: int) -> int:
    """A power of two, small enough that what groups leave free in their tiles adds at most a quarter to the work.

    Groups of few rows are an exception, since products of fewer than 16 rows are slower than their FLOPs say.
    """
    quarter = max(rows // (4 * groups), 1)
    return min(max(2 ** (quarter.bit_length() - 1), _FEWEST_TILE_ROWS), _MOST_TILE_ROWS)


def _multiply(subscripts: str, lhs: Any, rhs: Any, group_sizes: Any) -> Any:
    """Each row, from r, times the matrix kn of its group."""
    rows, groups = lhs.shape[0], group_sizes.shape[0]
    tile_rows = _tile_rows(rows, groups)
    padded = _padded(lhs, tile_rows)

    def multiply_tile(output: Any, tile: _Tiles) -> Any:
        block = lax.dynamic_slice_in_dim(padded, tile.start, tile_rows)
        product = contract(subscripts, block, _matrix(rhs, tile.group, lhs.dtype), lhs.dtype)
        # What is not of this tile's group is overwritten by the tiles that follow.
        return lax.dynamic_update_slice_in_dim(output, product, tile.start, axis=0), None

    shape = logical_array(rhs).shape
    width = shape[2] if subscripts.endswith("n") else shape[1]
    output = jnp.zeros_like(lhs, shape=(rows + tile_rows, width))
    output, _ = lax.scan(multiply_tile, output, _tiles(group_sizes, rows, tile_rows))
    return jnp.where(jnp.arange(rows)[:, None] < jnp.sum(group_sizes), output[:rows], 0)


def _padded(array: Any, tile_rows: int) -> Any:
    """Lets a tile begin at any row, or after the last."""
    return jnp.pad(array, ((0, tile_rows), (0, 0)))


def _sum_of_outer_products(lhs: Any, cotangent: Any, group_sizes: Any) -> Any:
    """[groups, d_in, d_out]: the gradient of each group's matrix."""
    rows, groups = lhs.shape[0], group_sizes.shape[0]
    tile_rows = _tile_rows(rows, groups)
    accumulator = accurate_dtype(lhs.dtype)
    padded = [_padded(x, tile_rows) for x in (lhs, cotangent)]

    def add_tile(total: Any, tile: _Tiles) -> Any:
        in_group = (tile.start + jnp.arange(tile_rows, dtype=jnp.int32) < tile.end)[:, None]
        # Both are masked, since a row outside all groups may hold anything, infinities too.
        mine, theirs = (jnp.where(in_group, lax.dynamic_slice_in_dim(x, tile.start, tile_rows), 0) for x in padded)
        product = contract("rk,rn->kn", mine, theirs, accumulator)
        return lax.dynamic_update_index_in_dim(total, total[tile.group] + product, tile.group, axis=0), None

    total = jnp.zeros_like(lhs, shape=(groups, lhs.shape[1], cotangent.shape[1]), dtype=accumulator)
    total, _ = lax.scan(add_tile, total, _tiles(group_sizes, rows, tile_rows))
    return total.astype(lhs.dtype)


def _matrix(rhs: Any, group: Any, dtype: Any) -> Any:
    """[d_in, d_out]: the matrix of one group, dequantized."""
    if not is_quantized(rhs):
        return rhs[group]
    view = rhs.__stack_qview__()
    groups = view.qvalue.shape[0]

    def of_group(x: Any) -> Any:
        return None if x is None else x[group // (groups // x.shape[0])]

    parts = {name: of_group(getattr(view, name)) for name in ("qvalue", "scale", "zero_point")}
    return dequantize(_OneGroup(dataclasses.replace(view, **parts)), dtype)


@dataclasses.dataclass(frozen=True)
class _OneGroup:
    view: QView

    def __stack_qview__(self) -> QView:
        return self.view


REFERENCE = OpImplementation(op="ragged_dot", name="reference", function=_reference, vjp=AUTODIFF, priority=0)
"""Tile after tile of rows that share a group: its FLOPs are those of the rows and of less than a tile per group."""
