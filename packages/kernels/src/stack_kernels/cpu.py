"""Helpers shared by the CPU implementations of all ops."""

from typing import Any

import jax.numpy as jnp
from jax import lax

__all__ = ["as_bits", "from_bits"]


def as_bits(array: Any) -> Any:
    """Returns bf16 as uint16 for arrays that a loop carries, reads or stacks; other dtypes unchanged.

    XLA's CPU backend of jax 0.10 keeps such bf16 arrays in fp32 and rounds all of their elements again in every
    iteration.
    """
    return lax.bitcast_convert_type(array, jnp.uint16) if array.dtype == jnp.bfloat16 else array


def from_bits(array: Any, dtype: Any) -> Any:
    """Inverts `as_bits` for an array that had dtype `dtype`."""
    return lax.bitcast_convert_type(array, dtype) if array.dtype != dtype else array
