"""Einsum of two arrays in their dtype with an fp32 accumulator, in the forward and the backward pass."""

import functools
import string
from collections.abc import Callable

import jax
import jax.custom_batching
import jax.numpy as jnp
from jax.typing import DTypeLike

from stack_core.ops.dispatch.automatic_axes import with_automatic_axes
from stack_core.ops.dispatch.manual_axes import vary_alike
from stack_core.ops.dispatch.plain import is_plain

__all__ = ["accurate_dtype", "contract"]


def accurate_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Returns the dtype of statistics and accumulators: fp32, or fp64 for fp64 operands."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


def contract(subscripts: str, left: jax.Array, right: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Computes an einsum of two arrays of the same dtype, accumulates it in fp32 and casts it to `dtype`.

    JAX differentiates a product with an fp32 accumulator as a product of an fp32 cotangent and a narrow operand, which
    runs at fp32 speed or slower. Here the cotangent is rounded to the operands' dtype first. Operands of at least fp32,
    and all operands if `is_plain()`, use a plain einsum that supports forward mode.

    Args:
      subscripts: explicit einsum subscripts, each index in at least two of the three terms. Indices in all three terms
        come first, in the same order: with bf16 operands and an fp32 result, CPU backends do not run all other forms.
    """
    if jnp.finfo(left.dtype).bits >= 32:
        return jnp.einsum(subscripts, left, right).astype(dtype)
    if is_plain():
        wide = (x.astype(jnp.float32) for x in (left, right))
        return jnp.einsum(subscripts, *wide).astype(dtype)
    return _low_precision_einsum(subscripts, jnp.dtype(dtype), *vary_alike(left, right))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _low_precision_einsum(subscripts: str, dtype: jnp.dtype, left: jax.Array, right: jax.Array) -> jax.Array:
    return _accumulated(subscripts)(left, right).astype(dtype)


def _forward(
    subscripts: str, dtype: jnp.dtype, left: jax.Array, right: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _low_precision_einsum(subscripts, dtype, left, right), (left, right)


def _backward(
    subscripts: str, dtype: jnp.dtype, operands: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    left, right = operands
    left_axes, right_axes, result = _terms(subscripts)
    cotangent = cotangent.astype(left.dtype)
    of_left = functools.partial(_low_precision_einsum, f"{result},{right_axes}->{left_axes}", left.dtype)
    of_right = functools.partial(_low_precision_einsum, f"{left_axes},{result}->{right_axes}", right.dtype)
    # With Explicit mesh axes, the summed indices may be sharded; the results get the sharding of the operands.
    return (
        with_automatic_axes(of_left, cotangent, right, like=left),
        with_automatic_axes(of_right, left, cotangent, like=right),
    )


_low_precision_einsum.defvjp(_forward, _backward)


@functools.cache
def _accumulated(subscripts: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the fp32 product, with a vmap rule that keeps the indices of all three terms in front."""

    @jax.custom_batching.custom_vmap
    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, left, right, preferred_element_type=jnp.float32)

    @product.def_vmap
    def batched(axis_size: int, in_batched: list[bool], left: jax.Array, right: jax.Array) -> tuple[jax.Array, bool]:
        left_axes, right_axes, result = _terms(subscripts)
        new = next(letter for letter in string.ascii_lowercase if letter not in subscripts)
        if not in_batched[0]:
            # The mapped index must be in all three terms, so `left` gets copies along the new axis.
            left = jnp.broadcast_to(left, (axis_size, *left.shape))
        elif not in_batched[1]:  # the new axis joins the rows of `left`, after the indices of all terms
            lead = len(set(left_axes).intersection(right_axes, result))
            shared, rows, of_result = left_axes[:lead], left_axes[lead:], result[lead:]
            rowwise = _accumulated(f"{shared}{new}{rows},{right_axes}->{shared}{new}{of_result}")
            return jnp.moveaxis(rowwise(jnp.moveaxis(left, 0, lead), right), lead, 0), True
        new_right = new if in_batched[1] else ""
        return _accumulated(f"{new}{left_axes},{new_right}{right_axes}->{new}{result}")(left, right), True

    return product


def _terms(subscripts: str) -> tuple[str, str, str]:
    operands, result = subscripts.split("->")
    left, right = operands.split(",")
    return left, right, result
