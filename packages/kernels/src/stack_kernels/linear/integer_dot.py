"""Products of two quantized operands through int8 x int8 -> int32."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stack_core.abi.ops import QView
from stack_core.ops.building import QuantizedArray
from stack_kernels.linear.codes import columns, interleaved

__all__ = ["by_row", "has_integer_dot", "integer_dot", "rows_of"]

_MIN_TILE_ROWS = 64
"""With fewer entries of d_in per scale, rescaling the sums of each tile costs more than fp32 products."""

_MAX_TILE_ROWS = 2**15
"""The sum of this many products of 8-bit integers, each minus its zero point, is always below 2^31."""


class _Part(NamedTuple):
    """Integers of one operand, with the scale and zero point of each tile along d_in, per row or column or shared."""

    codes: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None


def has_integer_dot(x: QView, weight: QView) -> bool:
    """Checks that both operands hold integers of up to 8 bits, in scale tiles that are long enough along d_in."""
    narrow = all(
        view.codebook is None
        and jnp.issubdtype(view.qvalue.dtype, jnp.integer)
        and jnp.iinfo(view.qvalue.dtype).bits <= 8
        for view in (x, weight)
    )
    tiles = _tiles(x, weight)
    tile_rows = weight.qvalue.shape[0] // max(tiles, 1)
    return narrow and tile_rows <= _MAX_TILE_ROWS and (tiles == 1 or tile_rows >= _MIN_TILE_ROWS)


def integer_dot(x: QView, weight: QuantizedArray) -> jax.Array:
    """Computes x W in float32[rows, d_out].

    Within a tile along d_in, for operands a(q - p) and b(r - s) with scales a, b and zero points p, s,

        y = a b (sum q r - p sum r - s sum q + d p s).

    The sums of r come from the same product, through a row of ones appended to q.
    """
    tiles = _tiles(x, weight.__stack_qview__())
    left = rows_of(x)
    products = []
    for part in columns(weight):
        right = _as_int8(_Part(part.decode(part.stored), part.scale, part.zero_point))
        products.append(_sum_over_tiles(left, right, tiles))
    return interleaved(products)


def _tiles(x: QView, weight: QView) -> int:
    return math.lcm(x.scale.shape[-1], weight.scale.shape[0])


def rows_of(x: QView) -> _Part:
    """Returns integers [rows, d_in] with scales and zero points [rows, tiles]."""
    *batch, d_in = x.qvalue.shape
    zero_point = None if x.zero_point is None else by_row(x.zero_point, batch)
    codes = x.qvalue if jnp.iinfo(x.qvalue.dtype).bits == 8 else x.qvalue.astype(jnp.int8)
    return _as_int8(_Part(codes.reshape(-1, d_in), by_row(x.scale, batch).astype(jnp.float32), zero_point))


def by_row(part: jax.Array, batch: Sequence[int]) -> jax.Array:
    """Repeats scales or zero points of an array[*batch, d_in] over the rows that they cover: [rows, tiles]."""
    for axis, size in enumerate(batch):
        if part.shape[axis] != size:
            part = jnp.repeat(part, size // part.shape[axis], axis=axis)
    return part.reshape(-1, part.shape[-1])


def _as_int8(part: _Part) -> _Part:
    """Converts unsigned bytes to signed ones and shifts their zero points; zero points become int32 or fp32."""
    zero_point = part.zero_point
    if zero_point is not None:
        is_integer = jnp.issubdtype(zero_point.dtype, jnp.integer)
        zero_point = zero_point.astype(jnp.int32 if is_integer else jnp.float32)
    if part.codes.dtype != jnp.uint8:
        return part._replace(zero_point=zero_point)
    # Flipping the highest bit of c gives the int8 c - 128, so the zero point moves by 128 too.
    codes = lax.bitcast_convert_type(part.codes ^ np.uint8(128), jnp.int8)
    if zero_point is None:
        zero_point = jnp.zeros_like(part.scale, dtype=jnp.int32)
    return _Part(codes, part.scale, zero_point - zero_point.dtype.type(128))


def _sum_over_tiles(left: _Part, right: _Part, tiles: int) -> jax.Array:
    if tiles == 1:
        return _of_one_tile(left, right)
    rows, width = left.codes.shape[0], right.codes.shape[1]
    of_left = jax.tree.map(lambda part: _repeated(part, tiles, 1).T[:, :, None], (left.scale, left.zero_point))
    of_right = jax.tree.map(lambda part: _repeated(part, tiles, 0)[:, None, :], (right.scale, right.zero_point))
    lefts = _Part(left.codes.reshape(rows, tiles, -1).swapaxes(0, 1), *of_left)
    rights = _Part(right.codes.reshape(tiles, -1, width), *of_right)

    def add_tile(total: jax.Array, tile: tuple[_Part, _Part]) -> tuple[jax.Array, None]:
        return total + _of_one_tile(*tile), None

    total = jnp.zeros_like(left.scale, shape=(rows, width))
    return lax.scan(add_tile, total, (lefts, rights))[0]


def _repeated(part: jax.Array, tiles: int, axis: int) -> jax.Array:
    return jnp.repeat(part, tiles // part.shape[axis], axis=axis) if part.shape[axis] != tiles else part


def _of_one_tile(left: _Part, right: _Part) -> jax.Array:
    rows, d_in = left.codes.shape
    codes = left.codes
    if rows == 1 or left.zero_point is not None:
        # A product of a single row takes the backend's generic loop, which is many times slower.
        codes = jnp.concatenate([codes, jnp.ones_like(codes, shape=(1, d_in))])
    sums = lax.dot_general(codes, right.codes, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
    product = sums[:rows]
    zeros = [part.zero_point for part in (left, right) if part.zero_point is not None]
    # Sums stay exact in int32, as `_MAX_TILE_ROWS` guarantees, unless a zero point is a float.
    exact = jnp.int32 if all(zero.dtype == jnp.int32 for zero in zeros) else jnp.float32
    product = product.astype(exact)
    if left.zero_point is not None:
        product = product - left.zero_point.astype(exact) * sums[rows:].astype(exact)
    if right.zero_point is not None:
        total = jnp.sum(left.codes, axis=1, keepdims=True, dtype=jnp.int32).astype(exact)
        if left.zero_point is not None:
            total = total - left.zero_point.astype(exact) * exact(d_in)
        product = product - total * right.zero_point.astype(exact)
    return product.astype(jnp.float32) * (left.scale * right.scale)
