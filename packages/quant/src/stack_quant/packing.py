"""Codes of 3, 5, 6 and 7 bits in as many bits of memory; JAX itself stores codes of 2 and 4 bits so.

An integer code is cut into planes, the highest bits first. Planes of 4 and 2 bits are arrays of int4, uint4 or uint2,
which CPUs, GPUs and TPUs store in 4 and 2 bits. There is no dtype of 1 bit: eight codes along the last axis share a
byte of a plane of 1 bit. The first plane has the shape of the codes.

Measured on CPUs, jax 0.10.2, 0.11.2 and 0.12: an int4 array of n entries occupies n / 2 bytes, an int2 one n / 4,
although `nbytes` says n.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from stack_quant.qtypes import QType

__all__ = ["pack", "stored_bytes", "unpack"]

_PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
_BYTE = 8


def pack(codes: jax.Array, kind: QType) -> tuple[jax.Array, ...]:
    """The planes of codes of dtype `kind.code_dtype`: the codes themselves, where JAX has a dtype of so many bits."""
    if kind.bits not in _PLANES:
        return (codes,)
    below, rest = kind.bits, codes.astype(jnp.int8)
    planes: list[jax.Array] = []
    for place, bits in enumerate(_PLANES[kind.bits]):
        below -= bits
        part = rest >> np.int8(below)
        if place:
            part = part & np.int8(2**bits - 1)
        planes.append(_packed_bits(part) if bits == 1 else part.astype(f"{'u' * bool(place)}int{bits}"))
    return tuple(planes)


def unpack(planes: tuple[jax.Array, ...], kind: QType) -> jax.Array:
    """The inverse of `pack`."""
    if kind.bits not in _PLANES:
        return planes[0]
    shape = planes[0].shape
    total = planes[0].astype(jnp.int8)
    for bits, plane in zip(_PLANES[kind.bits][1:], planes[1:], strict=True):
        part = _unpacked_bits(plane, shape[-1]) if bits == 1 else plane.astype(jnp.int8)
        total = (total << np.int8(bits)) | part
    return total.astype(kind.code_dtype)


def stored_bytes(array: jax.Array) -> int:
    """What an array occupies; `nbytes` counts whole bytes for entries of 2 and of 4 bits."""
    bits = jnp.iinfo(array.dtype).bits if jnp.issubdtype(array.dtype, jnp.integer) else jnp.finfo(array.dtype).bits
    return -(-math.prod(array.shape) * bits // _BYTE)


def _packed_bits(bits: jax.Array) -> jax.Array:
    """uint8[..., ceil(n / 8)] from int8[..., n] of zeros and ones, the first in the lowest bit."""
    count = bits.shape[-1]
    padded = jnp.pad(bits.astype(jnp.uint8), [(0, 0)] * (bits.ndim - 1) + [(0, -count % _BYTE)])
    grouped = padded.reshape(*bits.shape[:-1], -1, _BYTE)
    return jnp.sum(grouped << np.arange(_BYTE, dtype=np.uint8), axis=-1, dtype=jnp.uint8)


def _unpacked_bits(plane: jax.Array, count: int) -> jax.Array:
    bits = (plane[..., None] >> np.arange(_BYTE, dtype=np.uint8)) & np.uint8(1)
    return bits.reshape(*plane.shape[:-1], -1)[..., :count].astype(jnp.int8)
