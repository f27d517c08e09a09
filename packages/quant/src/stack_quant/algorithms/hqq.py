"""HQQ: scales by half-quadratic optimization of a robust error, without data.

The error |.|_p with p < 1 tolerates outliers. HQQ alternates between the sparse error e and the scale s of each tile:

    q = round(w / s),  e = shrink(w - s q),  s = <w - e, q> / <q, q>
    shrink(r) = sign(r) max(0, |r| - |r|^(p - 1) / beta),  beta growing by 1% at each step

Source: Badri and Shaji, Half-Quadratic Quantization, 2023 (mobiusml.github.io/hqq_blog). Departures:
1. The scale is optimized instead of the zero point, because most types have no zero point.
2. Each tile takes the step with the smallest |w - s q|_p.

On 16,384 tokens of text, the loss of SmolLM2-135M-Instruct in int4 with tiles of 128 rises by 27%, with rounding to the
nearest by 17%.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stack_quant.algorithms import Algorithm, Weight
from stack_quant.calibrate import calibrate
from stack_quant.conversion import encode_with
from stack_quant.qarray import QArray
from stack_quant.rounding import snap
from stack_quant.scales import Range, rescaled, scales
from stack_quant.spec import ArraySpec
from stack_quant.tiling import Tiling

__all__ = ["HQQ"]


def _quantize(weight: Weight, options: Mapping[str, int | float]) -> QArray:
    array, spec = weight.array, weight.spec
    return _optimized(array, spec, options["steps"], options["p"], options["beta"])


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _optimized(array: jax.Array, spec: ArraySpec, steps: int, p: float, beta: float) -> QArray:
    kind, axes = spec.qtype, spec.unit_axes(array.ndim)
    span = calibrate(array, spec)
    mapped = scales(span, kind, unit_axes=axes, double=spec.double_quantized)
    tiles = Tiling(array.shape, mapped.full.shape)
    values = tiles.split(array).astype(jnp.float32)
    # Errors are multiples of the initial scale, because `beta` is a pure number.
    unit = tiles.split(mapped.full)
    zero = np.float32(0) if mapped.zero_point is None else tiles.split(mapped.zero_point).astype(jnp.float32)
    smallest = -kind.largest if mapped.zero_point is None else None

    def total(part: jax.Array) -> jax.Array:
        return jnp.sum(part, axis=tiles.within, keepdims=True)

    def step(number: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        ratio, best, least = state
        scale = unit * ratio
        codes = snap(values / scale + zero, kind, smallest=smallest) - zero
        error = (values - codes * scale) / unit
        size = jnp.abs(error)
        cost = total(size ** np.float32(p))
        best, least = jnp.where(cost < least, ratio, best), jnp.minimum(cost, least)
        growing = np.float32(beta) * np.float32(1.01) ** number.astype(jnp.float32)
        sparse = jnp.sign(error) * jnp.maximum(0, size - jnp.maximum(size, 1e-8) ** np.float32(p - 1) / growing)
        squares = total(jnp.square(codes))
        fitted = total((values / unit - sparse) * codes) / jnp.where(squares > 0, squares, 1)
        return jnp.where((squares > 0) & (fitted > 0), fitted, ratio), best, least

    ones = jnp.ones_like(unit)
    _, best, _ = lax.fori_loop(0, steps, step, (ones, ones, jnp.full_like(ones, jnp.inf)))
    factor = tiles.join(best)
    if mapped.zero_point is None:
        mapped = scales(Range(None, span.high * factor), kind, unit_axes=axes, double=spec.double_quantized)
    else:
        mapped = rescaled(mapped, factor, unit_axes=axes, double=spec.double_quantized)
    return encode_with(array, mapped, spec, array.dtype)


HQQ = Algorithm("hqq", needs_stream=False, quantize=_quantize, options={"steps": 20, "p": 0.7, "beta": 10.0})
