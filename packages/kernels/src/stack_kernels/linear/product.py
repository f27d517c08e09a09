"""The product of rows with a weight, and its gradients, in forms that XLA's CPU backend has fast kernels for."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from stack_core.ops.building import contract, vary_alike

__all__ = ["product", "row_gradient", "times", "transposed", "weight_gradient"]

_BLOCK = 32


def product(rows: jax.Array, weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    """rows[n, d_in] @ weight[d_in, d_out], accumulated in fp32 and returned as `dtype`."""
    return _product(jnp.dtype(dtype), *vary_alike(rows, weight))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(dtype: jnp.dtype, rows: jax.Array, weight: jax.Array) -> jax.Array:
    return times(rows, weight, dtype)


def _forward(dtype: jnp.dtype, rows: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return times(rows, weight, dtype), (rows, weight)


def _backward(
    dtype: jnp.dtype, operands: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    rows, weight = operands
    cotangent = cotangent.astype(rows.dtype)
    return row_gradient(cotangent, weight, rows.dtype), weight_gradient(transposed(rows), cotangent)


_product.defvjp(_forward, _backward)


def times(rows: jax.Array, weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`product`, for what has gradients of its own: `jax.checkpoint` sees into it and may save it."""
    return _contract_rows("ni,io->no", rows, weight, dtype)


def row_gradient(cotangent: jax.Array, weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    """cotangent[n, d_out] @ weight[d_in, d_out]^T, accumulated in fp32 and returned as `dtype`."""
    return _contract_rows("no,io->ni", cotangent, weight, dtype)


def weight_gradient(columns: jax.Array, cotangent: jax.Array) -> jax.Array:
    """columns[d_in, n] @ cotangent[n, d_out], in their dtype; `columns` are the rows, `transposed`."""
    return contract("in,no->io", columns, cotangent, columns.dtype)


def transposed(array: jax.Array) -> jax.Array:
    """array[n, d] -> [d, n], in blocks of columns.

    XLA folds a plain transpose into the product that follows. That product contracts the leading axes of both operands,
    and the CPU backend has no narrow kernel for it: bf16 operands are widened, at 0.4 to 0.5 of the speed; in fp32 it
    runs at 0.8 to 0.95. It does not see through a transpose in blocks.
    """
    rows, columns = array.shape
    block = math.gcd(columns, _BLOCK)
    return array.reshape(rows, columns // block, block).transpose(1, 2, 0).reshape(columns, rows)


def _contract_rows(subscripts: str, rows: jax.Array, weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    """A contraction of rows with a weight.

    A bf16 product of a single row takes the backend's generic loop, 20 to 28 ms at 512 x 32000 where two rows take 2:
    it gets a second row, of zeros.
    """
    count = rows.shape[0]
    if count == 1 and rows.dtype == jnp.bfloat16:
        rows = jnp.pad(rows, ((0, 1), (0, 0)))
    return contract(subscripts, rows, weight, dtype)[:count]
