"""Coordinate descent on the codes of a weight, in turn with least squares for the scales of its tiles.

For y = x W, H = E[x x^T], the error D = W - Q and its gradient G = H D, the value of row i that is best for the other
rows is q_i + G_i / H_ii, which is rounded. A sweep visits all rows. Before it, scales are multiplied by 1 + u,

    A u = b,   b_t = <Q, H D>_t,   (A u)_t = <Q, H (u Q)>_t,   <.,.>_t summed over the entries of tile t,

which minimizes E|x D|^2 for the same codes, by conjugate gradients. Scales of few bits are rounded, so all new scales
are dropped unless they lower the error.

Source: Behdin et al., QuantEase, 2023 (arXiv:2309.01885), for the sweeps. Departure: scales are fitted, too.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stack_quant.algorithms import Weight
from stack_quant.qtypes import QType
from stack_quant.rounding import snap
from stack_quant.scales import Range, Scales, rescaled, scales
from stack_quant.tiling import Tiling, spread
from stack_quant.transform.layout import Layout

__all__ = ["descend", "nearest_value"]

_BLOCK_ROWS = 128
_STEPS = 12
_MOST_CHANGE = 0.5


def descend(
    weight: Weight, values: jax.Array, moments: jax.Array, mapped: Scales, sweeps: int
) -> tuple[jax.Array, Scales]:
    """Returns better values of codes, and their scales.

    Args:
      values: float32[batch, d_in, d_out], values of the codes by `mapped`.
      moments: float32[batch, d_in, d_in], H with a damped diagonal.
      mapped: scales of the tiles of the weight.
    """
    kind, layout = weight.spec.qtype, weight.layout
    matrices = layout.arranged(weight.array).astype(jnp.float32)
    least = _error(matrices, values, moments)
    for _ in range(sweeps):
        ratio = 1 + _scale_changes(matrices, values, moments, layout, mapped.full.shape)
        fitted = _fitted(mapped, ratio, weight)
        moved = values * _of_entries(fitted.full / mapped.full, layout)
        if _error(matrices, moved, moments) < least:
            values, mapped = moved, fitted
        scale = _of_entries(mapped.full, layout)
        zero = None if mapped.zero_point is None else _of_entries(mapped.zero_point, layout)
        values = _swept(values, matrices, scale, zero, moments, kind=kind)
        least = _error(matrices, values, moments)
    return values, mapped


def _fitted(mapped: Scales, ratio: jax.Array, weight: Weight) -> Scales:
    spec = weight.spec
    axes = spec.unit_axes(weight.array.ndim)
    if mapped.zero_point is not None:
        return rescaled(mapped, ratio, unit_axes=axes, double=spec.double_quantized)
    span = Range(None, mapped.full * ratio * np.float32(spec.qtype.largest))
    return scales(span, spec.qtype, unit_axes=axes, double=spec.double_quantized)


def _of_entries(of_tiles: jax.Array, layout: Layout) -> jax.Array:
    """Repeats numbers of tiles for each entry of the matrices."""
    return layout.arranged(jnp.broadcast_to(spread(of_tiles, layout.shape), layout.shape))


@jax.jit
def _error(matrices: jax.Array, values: jax.Array, moments: jax.Array) -> jax.Array:
    errors = matrices - values
    return jnp.sum(errors * (moments @ errors))


@functools.partial(jax.jit, static_argnames=("layout", "tiles"))
def _scale_changes(
    matrices: jax.Array, values: jax.Array, moments: jax.Array, layout: Layout, tiles: tuple[int, ...]
) -> jax.Array:
    """Returns u by conjugate gradients, preconditioned by the diagonal of H."""
    tiling = Tiling(layout.shape, tiles)

    def of_tiles(products: jax.Array) -> jax.Array:
        split = tiling.split(layout.restored(products))
        return tiling.join(jnp.sum(split, axis=tiling.within, keepdims=True))

    def changed(u: jax.Array) -> jax.Array:
        return of_tiles(values * (moments @ (_of_entries(u, layout) * values)))

    diagonal = of_tiles(jnp.square(values) * jnp.diagonal(moments, axis1=1, axis2=2)[:, :, None]) + np.float32(1e-30)

    def step(_: Any, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        u, rest, direction, size = state
        image = changed(direction)
        length = size / jnp.maximum(jnp.sum(direction * image), np.float32(1e-30))
        u, rest = u + length * direction, rest - length * image
        new = jnp.sum(rest * rest / diagonal)
        direction = rest / diagonal + new / jnp.maximum(size, np.float32(1e-30)) * direction
        return u, rest, direction, new

    rest = of_tiles(values * (moments @ (matrices - values)))
    start = (jnp.zeros_like(rest), rest, rest / diagonal, jnp.sum(rest * rest / diagonal))
    return jnp.clip(lax.fori_loop(0, _STEPS, step, start)[0], -_MOST_CHANGE, _MOST_CHANGE)


@functools.partial(jax.jit, static_argnames="kind")
def _swept(
    values: jax.Array,
    matrices: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    moments: jax.Array,
    *,
    kind: QType,
) -> jax.Array:
    """Visits all rows of each matrix, in blocks of rows."""

    def one(each: tuple[Any, ...]) -> jax.Array:
        values, matrix, scale, zero, moments = each
        return _sweep(values, matrix, scale, zero, moments, kind)

    return lax.map(one, (values, matrices, scale, zero, moments))


def _sweep(
    values: jax.Array, matrix: jax.Array, scale: jax.Array, zero: jax.Array | None, moments: jax.Array, kind: QType
) -> jax.Array:
    entries = matrix.shape[0]
    more = -entries % _BLOCK_ROWS
    gradient = jnp.pad(moments @ (matrix - values), ((0, more), (0, 0)))
    values, scale = jnp.pad(values, ((0, more), (0, 0))), jnp.pad(scale, ((0, more), (0, 0)), constant_values=1)
    zero = None if zero is None else jnp.pad(zero, ((0, more), (0, 0)))
    added = jnp.where(jnp.arange(entries + more) >= entries, np.float32(1), np.float32(0))
    moments = jnp.pad(moments, ((0, more), (0, more))) + jnp.diag(added)

    def block(number: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        values, gradient = state
        start = number * _BLOCK_ROWS
        before, slope, lines = (lax.dynamic_slice_in_dim(each, start, _BLOCK_ROWS) for each in (*state, moments))
        own = lax.dynamic_slice_in_dim(lines, start, _BLOCK_ROWS, axis=1)

        def step(place: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            part, slope = state
            target = part[place] + slope[place] / own[place, place]
            value = nearest_value(target, start + place, scale, zero, kind)
            return part.at[place].set(value), slope - own[place][:, None] * (value - part[place])

        part, _ = lax.fori_loop(0, _BLOCK_ROWS, step, (before, slope))
        return lax.dynamic_update_slice_in_dim(values, part, start, 0), gradient - lines.T @ (part - before)

    return lax.fori_loop(0, values.shape[0] // _BLOCK_ROWS, block, (values, gradient))[0][:entries]


def nearest_value(row: jax.Array, place: jax.Array, scale: jax.Array, zero: jax.Array | None, kind: QType) -> jax.Array:
    """Rounds row `place` of a matrix to the values of its codes, for scales and zero points of each entry."""
    if zero is None:
        # Symmetric codes omit the least integer, as in `quantize_array`.
        return snap(row / scale[place], kind, smallest=-kind.largest) * scale[place]
    offset = zero[place].astype(jnp.float32)
    return (snap(row / scale[place] + offset, kind) - offset) * scale[place]
