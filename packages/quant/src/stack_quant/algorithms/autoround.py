"""AutoRound: rounding offsets and ranges learned by descent on the sign of the gradient.

For y = x W and H = E[x x^T], each code is round(w / (r s) + v) with an offset |v| <= 1/2 and, for each tile, a ratio
1/2 <= r <= 3/2 of its scale s. Steps of decreasing size on the sign of the gradient minimize E|x (W - Q)|^2, where
rounding has the straight-through gradient. The result is the step with the smallest error.

Source: Cheng et al., Optimize Weight Rounding via Signed Gradient Descent, 2023 (arXiv:2309.05516). Departures:
1. It minimizes the error of each product instead of each block of layers, computed from H instead of samples.
2. Ranges start at the smallest squared error weighted by the diagonal of H, as in `gptq`, and may grow again.
3. A zero point has one ratio for both ends of its range, and stays the same integer.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stack_quant.algorithms import Algorithm, Weight
from stack_quant.calibrate import calibrate_weighted
from stack_quant.conversion import encode_with
from stack_quant.errors import QuantError
from stack_quant.qarray import QArray
from stack_quant.rounding import snap
from stack_quant.scales import Range, rescaled, scales
from stack_quant.spec import ArraySpec
from stack_quant.tiling import spread
from stack_quant.transform.layout import Layout

__all__ = ["AUTOROUND"]

_MOST_OFFSET, _RATIOS = 0.5, (0.5, 1.5)


def _quantize(weight: Weight, options: Mapping[str, int | float]) -> QArray:
    if not weight.spec.qtype.is_integer:
        raise QuantError(
            f"{weight.path}: autoround learns offsets of evenly spaced codes, which {weight.spec.qtype.name} does "
            "not have. Use gptq, or an integer type."
        )
    return _learned(weight.array, weight.moments, weight.spec, weight.layout, int(options["steps"]))


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _learned(array: jax.Array, moments: jax.Array, spec: ArraySpec, layout: Layout, steps: int) -> QArray:
    kind = spec.qtype
    options = {"unit_axes": spec.unit_axes(array.ndim), "double": spec.double_quantized}
    options["half_step"] = spec.range_ends == "half_step"
    values = array.astype(jnp.float32)
    importance = jnp.broadcast_to(jnp.diagonal(moments, axis1=1, axis2=2)[:, :, None], layout.matrices)
    span = calibrate_weighted(array, layout.restored(importance), spec)
    mapped = scales(span, kind, **options)
    zero = np.float32(0) if mapped.zero_point is None else spread(mapped.zero_point, array.shape).astype(jnp.float32)
    # Symmetric codes omit the least integer, as in `quantize_array`.
    smallest = -kind.largest if mapped.zero_point is None else kind.smallest

    def rounded(offset: jax.Array, ratio: jax.Array) -> jax.Array:
        """Returns the values of the codes, with the straight-through gradient within the range."""
        scale = spread(mapped.full * ratio, array.shape)
        codes = jnp.clip(values / scale + zero + offset, smallest, kind.largest)
        codes += lax.stop_gradient(snap(codes, kind, smallest=smallest) - codes)
        return (codes - zero) * scale

    def error_of(learned: tuple[jax.Array, jax.Array]) -> jax.Array:
        errors = layout.arranged(values - rounded(*learned))
        return jnp.sum(errors * (moments @ errors))

    def step(number: jax.Array, state: tuple[Any, Any, jax.Array]) -> tuple[Any, Any, jax.Array]:
        learned, best, least = state
        error, gradient = jax.value_and_grad(error_of)(learned)
        best = jax.tree.map(lambda new, old: jnp.where(error < least, new, old), learned, best)
        size = (1 - number.astype(jnp.float32) / steps) / steps
        offset, ratio = jax.tree.map(lambda at, slope: at - size * jnp.sign(slope), learned, gradient)
        learned = jnp.clip(offset, -_MOST_OFFSET, _MOST_OFFSET), jnp.clip(ratio, *_RATIOS)
        return learned, best, jnp.minimum(error, least)

    start = jnp.zeros_like(values), jnp.ones_like(mapped.full)
    learned, best, least = lax.fori_loop(0, steps, step, (start, start, jnp.float32(jnp.inf)))
    is_best = error_of(learned) < least
    offset, ratio = jax.tree.map(lambda new, old: jnp.where(is_best, new, old), learned, best)
    if mapped.zero_point is None:
        final = scales(Range(None, span.high * ratio), kind, **options)
    else:
        final = rescaled(mapped, ratio, unit_axes=spec.unit_axes(array.ndim), double=spec.double_quantized)
    return encode_with(rounded(offset, ratio), final, spec, array.dtype)


AUTOROUND = Algorithm("autoround", needs_stream=True, quantize=_quantize, options={"steps": 200})
