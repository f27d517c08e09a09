"""The product of two arrays in their own dtype with an fp32 accumulator, forward and backward."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

__all__ = ["accurate_dtype", "contract"]


def accurate_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype of statistics and accumulators: fp32, or fp64 for fp64 operands."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


def contract(subscripts: str, left: jax.Array, right: jax.Array, dtype: DTypeLike) -> jax.Array:
    """An einsum of two arrays of one dtype, accumulated in fp32 and returned as `dtype`.

    JAX differentiates a product that accumulates in fp32 by multiplying an fp32 cotangent with a narrow operand, which
    runs at fp32 speed or slower. Here the cotangent is rounded to the operands' dtype first. Operands of fp32 or wider
    take the plain einsum, which forward-mode differentiation needs.

    Args:
      subscripts: explicit einsum subscripts, each index in at least two of the three terms.
    """
    if jnp.finfo(left.dtype).bits >= 32:
        return jnp.einsum(subscripts, left, right).astype(dtype)
    return _narrow(subscripts, jnp.dtype(dtype), left, right)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _narrow(subscripts: str, dtype: jnp.dtype, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, left, right, preferred_element_type=jnp.float32).astype(dtype)


def _forward(subscripts: str, dtype: jnp.dtype, left: jax.Array, right: jax.Array):
    return _narrow(subscripts, dtype, left, right), (left, right)


def _backward(subscripts: str, dtype: jnp.dtype, operands: tuple[jax.Array, jax.Array], cotangent: jax.Array):
    left, right = operands
    inputs, result = subscripts.split("->")
    left_axes, right_axes = inputs.split(",")
    cotangent = cotangent.astype(left.dtype)
    return (
        _narrow(f"{result},{right_axes}->{left_axes}", left.dtype, cotangent, right),
        _narrow(f"{left_axes},{result}->{right_axes}", right.dtype, left, cotangent),
    )


_narrow.defvjp(_forward, _backward)
