"""A digest of an array's bits that does not depend on how the array lies over devices.

    key_i  = i * GOLDEN + OFFSET                          (mod 2^32)
    h_i    = mix(word_i XOR key_i)                        a bijection of 32-bit words
    digest = (sum_i h_i, sum_i h_i * (key_i OR 1))        (each mod 2^32)

| symbol | meaning |
|---|---|
| i | position of a word in the array's row-major order, over the whole array and not over a device's part |
| word_i | the element's bits; a 64-bit element makes two words, a complex one its real and its imaginary words |
| mix | the finalizer `lowbias32` of Wellons, "Prospecting for hash functions" (2018) |

Sums commute, so each device sums its own part where it lies and nothing but the two sums travels. Changing one word
changes its h_i, as mix is a bijection, and with it the first sum: found with certainty. A change of several words, or
of their order, stays unnoticed with a probability of about 2^-64. It guards against accidents, not against forgery.

Departure from multilinear hashing (Lemire and Kaser, 2014), sum_i key_i * word_i: modulo a power of two that misses
any even number of flipped sign bits, since odd * 2^31 * 2 = 0; hence mix.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["array_digests", "tree_digest"]

_GOLDEN = 0x9E3779B9
_OFFSET = 0x7F4A7C15
_MAX_HOST_SIZE = 1 << 20


def array_digests(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Returns the digest of each array as 16 hexadecimal digits.

    Args:
      arrays: JAX arrays (of any sharding, without typed keys), NumPy arrays or scalars, by name.
    """
    # One program at a time: with several in flight, the devices of a CPU backend may start them in different orders
    # and deadlock in their collectives (observed with jax 0.10.2).
    sums = {name: _sums(array if isinstance(array, jax.Array) else np.asarray(array)) for name, array in arrays.items()}
    return {name: f"{int(first):08x}{int(second):08x}" for name, (first, second) in sums.items()}


@jax.jit
def tree_digest(tree: Any) -> jax.Array:
    """Computes one digest of all arrays of a pytree, uint32[2], in one program.

    It identifies weights, as `array_digests` identifies arrays, without blocking on them. Arrays of 8-bit or narrower
    numbers are hashed by value instead of by bits.
    """
    sums = [jnp.stack(_digest_sums(_plain(leaf))) for leaf in jax.tree.leaves(tree)]
    first, second = _digest_sums(jnp.stack(sums)) if sums else (jnp.uint32(0), jnp.uint32(0))
    return jnp.stack([first, second])


def _plain(leaf: jax.Array) -> jax.Array:
    """Converts PRNG keys to their key data and 8-bit or narrower numbers to 32 bits; returns other arrays unchanged."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if leaf.dtype.itemsize > 1 or leaf.dtype == jnp.bool_:
        return leaf
    return leaf.astype(jnp.float32 if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.int32)


def _sums(array: Any) -> tuple[Any, Any]:
    # NumPy adds up a small array in milliseconds; compiling a program for its shape takes a tenth of a second.
    if array.size <= _MAX_HOST_SIZE and jax.dtypes.itemsize_bits(array.dtype) >= 8 and _is_on_host(array):
        return _host_sums(np.asarray(array))
    return jax.device_get(_digest_sums(_host_words(array)))


def _is_on_host(array: Any) -> bool:
    if not isinstance(array, jax.Array):
        return True
    device, *others = array.sharding.device_set
    return not others and device.platform == "cpu"


def _host_words(array: Any) -> Any:
    """Splits a 64-bit NumPy array into 32-bit words, which JAX would truncate where 64-bit types are off."""
    if isinstance(array, jax.Array) or array.dtype.itemsize < 8:
        return array
    count = array.dtype.itemsize // 4
    return np.ascontiguousarray(array).view(np.uint32).reshape(*array.shape, count)


def _host_sums(array: np.ndarray) -> tuple[Any, Any]:
    """Computes the sums of `_digest_sums` by NumPy."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype != np.bool_:
        flat = flat.view({1: np.uint8, 2: np.uint16}.get(flat.dtype.itemsize, np.uint32))
    words = flat.astype(np.uint32)
    key = np.arange(words.size, dtype=np.uint32) * np.uint32(_GOLDEN) + np.uint32(_OFFSET)
    mixed = _mix(words ^ key)
    return mixed.sum(dtype=np.uint32), (mixed * (key | np.uint32(1))).sum(dtype=np.uint32)


@jax.jit
def _digest_sums(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    words = _words(jax.device_put(array, jax.memory.Space.Device))  # the array may be in the host's memory
    index = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        index = index * jnp.uint32(size % 2**32) + lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    key = index * jnp.uint32(_GOLDEN) + jnp.uint32(_OFFSET)
    mixed = _mix(words ^ key)
    # Both sums in one reduction: XLA's CPU backend runs it at the memory's speed, and two of them 20 times slower.
    zeros = (jnp.uint32(0), jnp.uint32(0))
    first, second = lax.reduce((mixed, mixed * (key | jnp.uint32(1))), zeros, _add_pairs, tuple(range(words.ndim)))
    return first, second


def _add_pairs(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return left[0] + right[0], left[1] + right[1]


def _words(array: jax.Array) -> jax.Array:
    """Returns an array's bits as uint32, an element to a word and 64-bit elements to two."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    word_type = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(array, word_type).astype(jnp.uint32)


def _mix(word: Any) -> Any:
    word = (word ^ (word >> 16)) * np.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * np.uint32(0x846CA68B)
    return word ^ (word >> 16)
