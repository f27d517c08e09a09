"""A gated linear unit that multiplies with both weights at once, where the reference forms two products."""

import jax
import jax.numpy as jnp

from stack_core.abi import AUTODIFF, OpImplementation


def _supports(call, chip):
    if call.options["activation"] != "silu":
        return f"computes silu, not {call.options['activation']}"
    quantized = [name for name, array in call.arrays.items() if hasattr(type(array), "__stack_qview__")]
    return f"takes plain weights, and {', '.join(quantized)} is quantized" if quantized else True


def _one_product(x, w_gate, w_up, *, activation):
    weights = jnp.concatenate([w_gate, w_up], axis=-1)
    gate, up = jnp.split(jnp.matmul(x, weights, preferred_element_type=jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(x.dtype)


IMPLEMENTATION = OpImplementation(
    op="gated_linear_unit",
    name="one_product",
    function=_one_product,
    supports=_supports,
    vjp=AUTODIFF,
    priority=-1,  # the reference has 0: this one runs where it is named
)
