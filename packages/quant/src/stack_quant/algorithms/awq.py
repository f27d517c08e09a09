"""AWQ: inputs with large activations get a finer grid, by scales found for the least error of the outputs.

For y = x W and the mean size a_j of input j, row j of W is multiplied by s_j = a_j^alpha and the input is divided by
s_j. The exponent alpha in [0, 1) minimizes the error of the outputs, for H = E[x x^T] and the rounding error D of W:

    E|x D|^2 = tr(D^T H D),  D = W - diag(1 / s) Q(diag(s) W)

Source: Lin et al., AWQ, 2023 (arXiv:2306.00978). Departures:
1. a_j is the root mean square of the input instead of the mean magnitude, and errors come from H: the pass over the
   stream stores moments instead of inputs.
2. Each matrix has separate scales. They are applied to its inputs, where XLA fuses them with the operation that
   computes the inputs, instead of being folded into this operation.
3. Ranges are clipped for the least squared error weighted by the size of the inputs, once, after the search for alpha.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from stack_core import ops
from stack_quant.algorithms import Algorithm, Weight
from stack_quant.calibrate import calibrate_weighted
from stack_quant.conversion import quantize_array
from stack_quant.qarray import QArray
from stack_quant.spec import ArraySpec
from stack_quant.transform.layout import Layout

__all__ = ["AWQ"]


def _input_scale(weight: Weight, options: Mapping[str, int | float]) -> jax.Array:
    steps = max(int(options["steps"]), 1)
    sizes = jnp.sqrt(jnp.diagonal(weight.moments, axis1=1, axis2=2))
    # Inputs that are always zero count as an average input.
    sizes = jnp.where(sizes > 0, sizes, jnp.mean(sizes, axis=1, keepdims=True) + np.float32(1e-30))
    best, least = jnp.ones_like(sizes), jnp.full((len(sizes), 1), jnp.inf)
    for step in range(steps):
        scale = sizes ** np.float32(step / steps)
        # Only ratios matter; the middle of the range is 1.
        scale = scale / jnp.sqrt(jnp.max(scale, axis=1, keepdims=True) * jnp.min(scale, axis=1, keepdims=True))
        error = _error(weight.array, weight.moments, scale, weight.spec, weight.layout)[:, None]
        best, least = jnp.where(error < least, scale, best), jnp.minimum(error, least)
    return best


@functools.partial(jax.jit, static_argnames=("spec", "layout"))
def _error(array: jax.Array, moments: jax.Array, scale: jax.Array, spec: ArraySpec, layout: Layout) -> jax.Array:
    """Returns the squared error of the outputs of each matrix, for scales[batch, d_in] and rounding to the nearest."""
    rows = layout.restored(jnp.broadcast_to(scale[:, :, None], layout.matrices))
    values = ops.dequantize(quantize_array(array * rows, spec), jnp.float32) / rows
    difference = layout.arranged(array.astype(jnp.float32) - values)
    return jnp.einsum("bio,bij,bjo->b", difference, moments, difference)


def _quantize(weight: Weight, options: Mapping[str, int | float]) -> QArray:
    importance = jnp.diagonal(weight.moments, axis1=1, axis2=2)[:, :, None]
    importance = weight.layout.restored(jnp.broadcast_to(importance, weight.layout.matrices))
    span = calibrate_weighted(weight.array, importance, weight.spec)
    return quantize_array(weight.array, weight.spec, range=span, name=weight.path)


AWQ = Algorithm("awq", needs_stream=True, quantize=_quantize, input_scale=_input_scale, options={"steps": 20})
