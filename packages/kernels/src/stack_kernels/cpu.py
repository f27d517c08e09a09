"""What the CPU implementations of all ops share."""

from typing import Any

import jax.numpy as jnp
from jax import lax

__all__ = ["as_bits", "from_bits"]


def as_bits(array: Any) -> Any:
    """bf16 as integers, for what a loop hands on; other dtypes as they are.

    XLA's CPU backend of jax 0.10 keeps the bf16 that loops carry, read and stack in fp32, and rounds all of it again in
    every turn.
    """
    return lax.bitcast_convert_type(array, jnp.uint16) if array.dtype == jnp.bfloat16 else array


def from_bits(array: Any, dtype: Any) -> Any:
    """The inverse of `as_bits`, of an array that was of `dtype`."""
    return lax.bitcast_convert_type(array, dtype) if array.dtype != dtype else array
