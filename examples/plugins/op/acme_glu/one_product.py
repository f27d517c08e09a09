"""A gated linear unit that multiplies by both weights in one product; the reference computes two."""

import jax
import jax.numpy as jnp

from stack_core.abi.ops import OWN, OpImplementation
from stack_core.ops.building import differentiated, is_quantized


def _supports(call, chip, config):
    if any(call.arrays[bias] is not None for bias in ("bias_gate", "bias_up")):
        return "adds no bias"
    if call.options != {"activation": "silu", "limit": None, "up_offset": 0.0}:
        return f"computes silu(gate) * up, not {call.options}"
    return "takes plain weights, not quantized ones" if any(map(is_quantized, call.arrays.values())) else True


def _one_product(x, w_gate, w_up, *, requested, **others):
    weights = jnp.concatenate([w_gate, w_up], axis=-1)
    gate, up = jnp.split(jnp.matmul(x, weights, preferred_element_type=jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(x.dtype), {}


_forward, _backward = differentiated(_one_product)  # JAX derives the gradient
# The reference has priority 0, so this implementation runs only if it is named or was measured as fastest.
IMPLEMENTATION = OpImplementation(
    "gated_linear_unit", "one_product", _forward, _backward, supports=_supports, residuals=(OWN,), priority=-1
)
