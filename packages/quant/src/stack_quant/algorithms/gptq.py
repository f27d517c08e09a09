"""GPTQ: row-by-row rounding of a weight, where later rows compensate the errors of earlier rows.

For y = x W and H = E[x x^T], the rounding minimizes E|x (W - Q)|^2 greedily. With H^-1 = R^T R, R upper triangular, and
the error e_i = (w_i - q_i) / R_ii of row i, all later rows become w_j - R_ij e_i.

Source: Frantar et al., GPTQ, 2023 (arXiv:2210.17323). Departures:
1. The scales of all tiles are computed first, with the smallest squared error weighted by the diagonal of H.
   This allows any order of rows, any tiles and types, and shared units of scales.
2. Rows are taken in decreasing order of H_ii, unless `act_order=0`.
3. R is the inverse of the reversed Cholesky factor of H, which needs one factorization instead of two.
4. Inputs that are always zero are rounded to the nearest, not set to zero.
5. `sweeps=n` then improves codes and scales by n sweeps of coordinate descent; see `stack_quant.algorithms.descent`.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stack_quant.algorithms import Algorithm, Weight
from stack_quant.algorithms.descent import descend, nearest_value
from stack_quant.calibrate import calibrate_weighted
from stack_quant.conversion import encode_with
from stack_quant.errors import QuantError
from stack_quant.qarray import QArray
from stack_quant.qtypes import QType
from stack_quant.scales import scales
from stack_quant.tiling import spread

__all__ = ["GPTQ"]

_BLOCK_ROWS = 128
_MOST_DAMP = 10.0


def _quantize(weight: Weight, options: Mapping[str, int | float]) -> QArray:
    array, spec, layout = weight.array, weight.spec, weight.layout
    importance = jnp.diagonal(weight.moments, axis1=1, axis2=2)[:, :, None]
    span = calibrate_weighted(array, layout.restored(jnp.broadcast_to(importance, layout.matrices)), spec)
    mapped = scales(
        span,
        spec.qtype,
        unit_axes=spec.unit_axes(array.ndim),
        double=spec.double_quantized,
        half_step=spec.range_ends == "half_step",
    )
    scale, zero = (
        None if each is None else layout.arranged(jnp.broadcast_to(spread(each, array.shape), array.shape))
        for each in (mapped.full, mapped.zero_point)
    )
    matrices = layout.arranged(array).astype(jnp.float32)
    rounded = []
    for place in range(layout.matrices[0]):
        moments = weight.moments[place]
        order = jnp.argsort(-jnp.diagonal(moments)) if options["act_order"] else jnp.arange(moments.shape[0])
        factor = _factor(moments[order][:, order], options["damp"], weight.path)
        rows = [None if each is None else each[place][order] for each in (matrices, scale, zero)]
        rounded.append(_rounded(*rows, factor, kind=spec.qtype)[jnp.argsort(order)])
    values, sweeps = jnp.stack(rounded), int(options["sweeps"])
    if sweeps:
        damped = jnp.stack([_damped(each, options["damp"]) for each in weight.moments])
        values, mapped = descend(weight, values, damped, mapped, sweeps)
    return encode_with(layout.restored(values), mapped, spec, array.dtype)


def _factor(moments: jax.Array, damp: float, path: str) -> jax.Array:
    """Returns the upper triangular R with H^-1 = R^T R, for H with `damp` times its mean added to the diagonal."""
    while damp <= _MOST_DAMP:
        factor = _damped_factor(moments, jnp.float32(damp))
        if jnp.isfinite(factor).all():
            return factor
        damp = max(10 * damp, 1e-4)  # of float32 moments that are singular with less
    raise QuantError(
        f"{path}: the second moments of the inputs have no Cholesky factor. Give more or other batches as `stream`, or "
        "use another algorithm."
    )


@jax.jit
def _damped(moments: jax.Array, damp: jax.Array) -> jax.Array:
    diagonal = jnp.diagonal(moments)
    mean = jnp.mean(diagonal)
    diagonal = jnp.where(diagonal > 0, diagonal, mean) + damp * mean + np.float32(1e-30)
    return jnp.where(jnp.eye(moments.shape[0], dtype=bool), jnp.diag(diagonal), moments)


@jax.jit
def _damped_factor(moments: jax.Array, damp: jax.Array) -> jax.Array:
    damped = _damped(moments, damp)
    lower = jnp.linalg.cholesky(damped[::-1, ::-1])
    inverse = jax.scipy.linalg.solve_triangular(lower, jnp.eye(lower.shape[0], dtype=lower.dtype), lower=True)
    return inverse[::-1, ::-1]


@functools.partial(jax.jit, static_argnames="kind")
def _rounded(
    matrix: jax.Array, scale: jax.Array, zero: jax.Array | None, factor: jax.Array, *, kind: QType
) -> jax.Array:
    """Returns the values of the codes of a matrix [d_in, d_out], rows in order, in blocks of rows."""
    entries = matrix.shape[0]
    more = -entries % _BLOCK_ROWS
    matrix, scale = jnp.pad(matrix, ((0, more), (0, 0))), jnp.pad(scale, ((0, more), (0, 0)), constant_values=1)
    zero = None if zero is None else jnp.pad(zero, ((0, more), (0, 0)))
    added = jnp.where(jnp.arange(entries + more) >= entries, np.float32(1), np.float32(0))
    factor = jnp.pad(factor, ((0, more), (0, more))) + jnp.diag(added)

    def block(number: jax.Array, rows: jax.Array) -> jax.Array:
        start = number * _BLOCK_ROWS
        part = lax.dynamic_slice_in_dim(rows, start, _BLOCK_ROWS)
        lines = lax.dynamic_slice_in_dim(factor, start, _BLOCK_ROWS)
        own = lax.dynamic_slice_in_dim(lines, start, _BLOCK_ROWS, axis=1)

        def step(place: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            part, errors = state
            value = nearest_value(part[place], start + place, scale, zero, kind)
            error = (part[place] - value) / own[place, place]
            later = jnp.where(jnp.arange(_BLOCK_ROWS) > place, own[place], 0)
            return (part - later[:, None] * error).at[place].set(value), errors.at[place].set(error)

        part, errors = lax.fori_loop(0, _BLOCK_ROWS, step, (part, jnp.zeros_like(part)))
        later = jnp.where(jnp.arange(rows.shape[0]) >= start + _BLOCK_ROWS, lines, 0)
        return lax.dynamic_update_slice_in_dim(rows - later.T @ errors, part, start, 0)

    return lax.fori_loop(0, matrix.shape[0] // _BLOCK_ROWS, block, matrix)[:entries]


GPTQ = Algorithm("gptq", needs_stream=True, quantize=_quantize, options={"damp": 0.01, "act_order": 1, "sweeps": 0})
