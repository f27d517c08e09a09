"""SmoothQuant: moves the range of activations into the weights, one factor per input.

For y = x W, input j is divided by s_j and row j of W is multiplied by s_j:

    s_j = max|x_j|^alpha / max|w_j|^(1 - alpha)

Source: Xiao et al., SmoothQuant, 2022 (arXiv:2211.10438). Departures:
1. The division is not folded into the norm before the product but applied to its inputs, where XLA fuses it with the
   operation that computes them. Each matrix therefore has scales of its own, and any product can be smoothed.
2. Inputs that are always zero keep s = 1.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from stack_core.abi.errors import ArgumentError
from stack_quant.algorithms import Algorithm, Weight

__all__ = ["SMOOTHQUANT"]


def _input_scale(weight: Weight, options: Mapping[str, int | float]) -> jax.Array:
    alpha = options["alpha"]
    if alpha > 1:
        raise ArgumentError(f"{weight.path}: smoothquant,alpha={alpha:g}; alpha is a number from 0 to 1.")
    rows = jnp.max(jnp.abs(weight.layout.arranged(weight.array)), axis=2).astype(jnp.float32)
    usable = (weight.largest > 0) & (rows > 0)
    # Of values that are not used.
    inputs, rows = (jnp.where(usable, each, 1) for each in (weight.largest, rows))
    return jnp.where(usable, inputs**alpha / rows ** (1 - alpha), 1)


SMOOTHQUANT = Algorithm("smoothquant", needs_stream=True, input_scale=_input_scale, options={"alpha": 0.5})
