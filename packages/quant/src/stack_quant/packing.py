"""Packing of codes of 3, 5, 6 and 7 bits. JAX itself packs codes of 2 and 4 bits.

An integer code is split into planes, from the highest bits to the lowest. The first plane is an int4 or int2 array of
the shape of the codes, which JAX stores packed. Later planes of 2 and 1 bits are bytes with the parts of 4 or 8 codes
along the last axis: JAX lacks a 1-bit dtype, and Orbax cannot save uint2 or uint4. Codes of uint4 and float4_e2m1fn are
stored as int4 with the same bits: XLA's CPU backend cannot compile some loops over float4_e2m1fn.

Measured on CPUs with jax 0.10.2, 0.11.2 and 0.12: an int4 array of n entries occupies n / 2 bytes and an int2 array
n / 4, although `nbytes` is n.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stack_quant.qtypes import QType

__all__ = ["pack", "stored_bytes", "unpack"]

_PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}  # bits of each plane, by the bits of a code
_KEPT_AS_INT4 = ("uint4", "float4_e2m1fn")
_BYTE = 8


def pack(codes: jax.Array, kind: QType) -> tuple[jax.Array, ...]:
    """Splits codes of dtype `kind.code_dtype` into planes; a single one if JAX has a dtype with this number of bits."""
    if kind.code_dtype in _KEPT_AS_INT4:
        return (lax.bitcast_convert_type(codes, jnp.int4),)
    if kind.bits not in _PLANES:
        return (codes,)
    below, rest = kind.bits, codes.astype(jnp.int8)
    planes: list[jax.Array] = []
    for place, bits in enumerate(_PLANES[kind.bits]):
        below -= bits
        part = rest >> np.int8(below)
        # The first plane keeps the sign through the arithmetic shift; later planes are unsigned.
        if place:
            part = part & np.int8(2**bits - 1)
        planes.append(_in_bytes(part, bits) if place else part.astype(f"int{bits}"))
    return tuple(planes)


def unpack(planes: tuple[jax.Array, ...], kind: QType) -> jax.Array:
    """Joins planes to codes: the inverse of `pack`."""
    if kind.code_dtype in _KEPT_AS_INT4:
        return lax.bitcast_convert_type(planes[0], kind.code_dtype)
    if kind.bits not in _PLANES:
        return planes[0]
    shape = planes[0].shape
    total = planes[0].astype(jnp.int8)
    for bits, plane in zip(_PLANES[kind.bits][1:], planes[1:], strict=True):
        total = (total << np.int8(bits)) | _from_bytes(plane, bits, shape[-1])
    return total.astype(kind.code_dtype)


def stored_bytes(array: Any) -> int:
    """Returns the memory of an array in bytes; `nbytes` would count one byte for each 2-bit or 4-bit entry."""
    bits = jnp.iinfo(array.dtype).bits if jnp.issubdtype(array.dtype, jnp.integer) else jnp.finfo(array.dtype).bits
    return -(-math.prod(array.shape) * bits // _BYTE)


def _in_bytes(parts: jax.Array, bits: int) -> jax.Array:
    """Packs int8[..., n] of `bits` bits each into uint8[..., ceil(n * bits / 8)], the first in the lowest bits."""
    count = _BYTE // bits
    # Along the last axis, so leading axes such as layers can still be sliced.
    padded = jnp.pad(parts.astype(jnp.uint8), [(0, 0)] * (parts.ndim - 1) + [(0, -parts.shape[-1] % count)])
    grouped = padded.reshape(*parts.shape[:-1], -1, count)
    return jnp.sum(grouped << np.arange(0, _BYTE, bits, dtype=np.uint8), axis=-1, dtype=jnp.uint8)


def _from_bytes(plane: jax.Array, bits: int, count: int) -> jax.Array:
    parts = (plane[..., None] >> np.arange(0, _BYTE, bits, dtype=np.uint8)) & np.uint8(2**bits - 1)
    return parts.reshape(*plane.shape[:-1], -1)[..., :count].astype(jnp.int8)
