"""QEP: weights that make up for the errors of the quantized layers before them, before their codes are chosen.

For y = x W, let x be the inputs in the float model and z the inputs after quantized layers. The weight becomes

    W + alpha (H + damp m I)^-1 C W,  H = E[z z^T],  C = E[z (x - z)^T],  m = the mean of the diagonal of H

With alpha=1 and damp=0, this minimizes E|x W - z V|^2 over V; with alpha=0, it is W. A smaller alpha and a larger damp
fit the batches of the stream less.

Source: Arai and Ichikawa, Quantization Error Propagation, 2025 (arXiv:2504.09629). Departures:
1. Parameters with several uses, such as a tied embedding, are not corrected, because a correction fits one product.
   Neither are experts (`ragged_dot`), whose rows are other tokens in the float model if its routing differs.
2. Parameters without an algorithm, such as tables, and activations are rounded in both streams.
3. alpha is the same for all layers that a rule selects.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from stack_core.abi.errors import ArgumentError
from stack_quant.algorithms import Algorithm, Weight
from stack_quant.errors import QuantError

__all__ = ["QEP"]


def _correct(weight: Weight, options: Mapping[str, int | float]) -> jax.Array:
    if options["alpha"] > 1:
        raise ArgumentError(f"{weight.path}: qep,alpha={options['alpha']:g}; alpha is a number from 0 to 1.")
    layout = weight.layout
    change = _change(layout.arranged(weight.array), weight.moments, weight.cross_moments, jnp.float32(options["damp"]))
    if not jnp.isfinite(change).all():
        raise QuantError(
            f"{weight.path}: the second moments of the inputs have no inverse with damp={options['damp']:g}. Give a "
            "larger damp, or more batches as `stream`."
        )
    corrected = weight.array.astype(jnp.float32) + layout.restored(jnp.float32(options["alpha"]) * change)
    return corrected.astype(weight.array.dtype)


@jax.jit
def _change(matrices: jax.Array, moments: jax.Array, cross: jax.Array, damp: jax.Array) -> jax.Array:
    """Returns (H + damp m I)^-1 C W for each matrix W[d_in, d_out]."""
    mean = jnp.mean(jnp.diagonal(moments, axis1=1, axis2=2), axis=1)[:, None, None]
    # Inputs that are always zero have no effect, and 1e-30 keeps H invertible if all are zero.
    damped = moments + (damp * mean + jnp.float32(1e-30)) * jnp.eye(moments.shape[1], dtype=moments.dtype)
    product = jnp.einsum("bij,bjo->bio", cross, matrices.astype(jnp.float32), precision="highest")
    solve = lambda matrix, right: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(matrix), right)
    return jax.vmap(solve)(damped, product)


QEP = Algorithm("qep", needs_stream=True, correct=_correct, options={"alpha": 0.5, "damp": 0.1})
