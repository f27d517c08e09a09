"""Packing of narrow dtypes into bytes: integers of 2 and 4 bits, floats of 4 and 8 bits.

Zarr cannot name some of these dtypes and spends a full byte per element on others. An array [..., n] of such elements
is therefore stored as

    uint8[..., ceil(n * bits / 8)]

Each byte holds `8 / bits` consecutive elements of the last axis, the first in the lowest bits.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["is_packed", "packed", "splits_bytes", "unpacked"]

_BYTE = 8


def is_packed(dtype: Any) -> bool:
    """Returns True if arrays of `dtype` are stored as packed bytes."""
    dtype = np.dtype(dtype)
    # ml_dtypes uses a byte for each element of 2 or 4 bits, and this size includes such dtypes.
    return dtype.itemsize == 1 and dtype not in (np.bool_, np.int8, np.uint8)


def splits_bytes(sharding: jax.sharding.Sharding, shape: tuple[int, ...], dtype: str) -> bool:
    """Returns True if a shard of `sharding` begins or ends inside a packed byte."""
    if not shape:
        return False
    entries = sharding.shard_shape(shape)[-1]
    return entries != shape[-1] and entries * _bits(dtype) % _BYTE != 0


@jax.jit
def packed(array: jax.Array) -> jax.Array:
    """Packs an array of a narrow dtype into bytes; a scalar becomes uint8[1]."""
    bits = _bits(array.dtype)
    array = jax.device_put(array, jax.memory.Space.Device)  # an offloaded optimizer's array is in the host's memory
    codes = lax.bitcast_convert_type(jnp.atleast_1d(array), f"uint{bits}").astype(jnp.uint8)
    count = _BYTE // bits
    total = -(-codes.shape[-1] // count)
    padded = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, total * count - codes.shape[-1])])
    grouped = padded.reshape(*codes.shape[:-1], total, count)
    # The shifted codes share no bits, so the sum equals a bitwise or.
    return jnp.sum(grouped << np.arange(0, _BYTE, bits, dtype=np.uint8), axis=-1, dtype=jnp.uint8)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def unpacked(content: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Restores the array of `shape` and `dtype` from the bytes of `packed`."""
    bits = _bits(dtype)
    content = jax.device_put(content, jax.memory.Space.Device)
    parts = (content[..., None] >> np.arange(0, _BYTE, bits, dtype=np.uint8)) & np.uint8(2**bits - 1)
    entries = shape[-1] if shape else 1
    codes = parts.reshape(*content.shape[:-1], content.shape[-1] * _BYTE // bits)[..., :entries].astype(f"uint{bits}")
    return lax.bitcast_convert_type(codes.reshape(shape), jnp.dtype(dtype))


def _bits(dtype: Any) -> int:
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).bits
