"""Quantization to GGUF's K-quants, which the `gguf` package only dequantizes.

A block has 256 entries in tiles of 32 (Q4_K, Q5_K) or 16 (Q6_K). The scales of its tiles, and the minima of Q4_K and
Q5_K, are integers that share a float16 number:

    Q4_K, Q5_K:  x = d s q - d' m    with 0 <= s, m < 64 and 0 <= q < 16 or 32
    Q6_K:        x = d s q           with -128 <= s < 128 and -32 <= q < 32

A tile's scale and minimum are those of the least weighted squared error among candidates: each candidate rounds the
entries by a different step, and least squares then give the scale and minimum for these codes. Large entries weigh
more.

Source: ggml (`quantize_row_q4_K_ref`, `make_qkx2_quants` and `make_qx_quants` in `ggml-quants.c`), Georgi Gerganov and
contributors, by Iwan Kawrakow.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["K_QUANTS", "quantize"]

K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")

_BLOCK = 256
_TILE = 32
_SIGNED_TILE = 16
_CHUNK = 1024
"""Number of blocks that are fitted together, which bounds the temporary arrays."""


def quantize(values: np.ndarray, kind: str) -> np.ndarray:
    """Quantizes rows of a multiple of 256 entries.

    Args:
      values: float32[..., entries].
      kind: type of `K_QUANTS`.

    Returns:
      The blocks as bytes, uint8[..., entries / 256 x bytes of a block].
    """
    blocks = values.reshape(-1, _BLOCK)
    packed = [_PACK[kind](blocks[start : start + _CHUNK]) for start in range(0, len(blocks), _CHUNK)]
    return np.concatenate(packed).reshape(*values.shape[:-1], -1)


def _padded(blocks: np.ndarray) -> np.ndarray:
    """Fills a chunk with zeros, so that all chunks use one compiled program."""
    return np.concatenate([blocks, np.zeros((_CHUNK - len(blocks), _BLOCK), np.float32)])


def _pack_with_minima(blocks: np.ndarray, *, bits: int) -> np.ndarray:
    count = len(blocks)
    fitted = jax.device_get(_fit_with_minima(_padded(blocks), levels=2**bits - 1))
    halves, scales, minima, codes = (array[:count] for array in fitted)
    first, last = codes.reshape(count, 4, 2, _TILE).swapaxes(0, 2).swapaxes(1, 2)  # tiles 0, 2, 4, 6 and 1, 3, 5, 7
    nibbles = (first & 15) | (last & 15) << 4
    parts = [halves.view(np.uint8), _six_bits(scales, minima), nibbles.reshape(count, -1)]
    if bits == 5:
        shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        fifth = (first >> 4) << shifts | (last >> 4) << (shifts + np.uint8(1))
        parts.insert(2, np.bitwise_or.reduce(fifth, axis=1))
    return np.concatenate(parts, axis=1)


def _six_bits(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Packs eight scales and eight minima of six bits, uint8[blocks, 8], into twelve bytes."""
    first, last = np.stack([scales, minima])[:, :, :4], np.stack([scales, minima])[:, :, 4:]
    low = first | (last >> 4) << 6
    return np.concatenate([*low, (last[0] & 15) | (last[1] & 15) << 4], axis=1)


def _pack_q6_k(blocks: np.ndarray) -> np.ndarray:
    count = len(blocks)
    half, scales, codes = (array[:count] for array in jax.device_get(_fit_signed(_padded(blocks))))
    quarters = (codes + 32).astype(np.uint8).reshape(count, 2, 4, 32)
    low = (quarters[:, :, :2] & 15) | (quarters[:, :, 2:] & 15) << 4
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce((quarters >> 4) << shifts, axis=2)
    parts = [low.reshape(count, -1), high.reshape(count, -1), scales.view(np.uint8), half.view(np.uint8)]
    return np.concatenate(parts, axis=1)


_PACK: Any = {
    "Q4_K": partial(_pack_with_minima, bits=4),
    "Q5_K": partial(_pack_with_minima, bits=5),
    "Q6_K": _pack_q6_k,
}


@partial(jax.jit, static_argnames="levels")
def _fit_with_minima(blocks: jax.Array, *, levels: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the numbers d and d', float16[blocks, 2]; s and m, uint8[blocks, 8]; and q, uint8[blocks, 8, 32]."""
    tiles = blocks.reshape(len(blocks), -1, _TILE)
    weights = jnp.sqrt(jnp.mean(tiles**2, -1, keepdims=True)) + abs(tiles)
    low = jnp.minimum(tiles.min(-1), 0)
    extent = tiles.max(-1) - low

    def fit(steps: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        codes = jnp.clip(jnp.round((tiles - low[..., None]) * _quotient(steps, extent)[..., None]), 0, levels)
        sums = [jnp.sum(weights * each, -1) for each in (1, codes, codes**2, tiles, codes * tiles)]
        of_ones, of_codes, of_squares, of_tiles, of_products = sums
        determinant = of_ones * of_squares - of_codes**2
        scale = _quotient(of_ones * of_products - of_codes * of_tiles, determinant)
        offset = _quotient(of_squares * of_tiles - of_codes * of_products, determinant)
        # Equal codes determine one of the two: the offset if all are 0.
        offset = jnp.where(of_squares == 0, _quotient(of_tiles, of_ones), offset)
        # The format subtracts minima and stores no sign.
        is_alone = (offset > 0) | (determinant <= 1e-6 * of_ones * of_squares)
        scale = jnp.where(is_alone, _quotient(of_products, of_squares), scale)
        minimum = -jnp.minimum(offset, 0)
        error = jnp.sum(weights * (scale[..., None] * codes - minimum[..., None] - tiles) ** 2, -1)
        return error, scale, minimum

    def better(place: jax.Array, best: Any) -> Any:
        found = fit(levels - 1 + 0.1 * place)
        return jax.tree.map(lambda new, old: jnp.where(found[0] < best[0], new, old), found, best)

    _, scale, minimum = jax.lax.fori_loop(0, 21, better, fit(jnp.float32(levels)))
    halves = (jnp.stack([scale.max(-1), minimum.max(-1)], -1) / 63).astype(jnp.float16)
    d, d_minimum = (halves[:, place, None].astype(jnp.float32) for place in (0, 1))
    s = jnp.clip(jnp.round(_quotient(scale, d)), 0, 63)
    m = jnp.clip(jnp.round(_quotient(minimum, d_minimum)), 0, 63)
    codes = jnp.round(_quotient(tiles + (d_minimum * m)[..., None], (d * s)[..., None]))
    return halves, s.astype(jnp.uint8), m.astype(jnp.uint8), jnp.clip(codes, 0, levels).astype(jnp.uint8)


@jax.jit
def _fit_signed(blocks: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the number d, float16[blocks, 1]; s, int8[blocks, 16]; and q, int8[blocks, 16, 16]."""
    tiles = blocks.reshape(len(blocks), -1, _SIGNED_TILE)
    weights = tiles**2
    largest = jnp.take_along_axis(tiles, abs(tiles).argmax(-1, keepdims=True), -1)[..., 0]

    def fit(steps: jax.Array) -> tuple[jax.Array, jax.Array]:
        codes = jnp.clip(jnp.round(tiles * _quotient(steps, largest)[..., None]), -32, 31)
        of_products, of_squares = (jnp.sum(weights * codes * each, -1) for each in (tiles, codes))
        # The error with the least-squares scale is a constant less this.
        return _quotient(of_products**2, of_squares), _quotient(of_products, of_squares)

    def better(place: jax.Array, best: Any) -> Any:
        found = fit(-32 + 0.1 * place)
        return jax.tree.map(lambda new, old: jnp.where(found[0] > best[0], new, old), found, best)

    _, scale = jax.lax.fori_loop(-9, 10, better, fit(jnp.float32(-32)))
    extreme = jnp.take_along_axis(scale, abs(scale).argmax(-1, keepdims=True), -1)
    half = (extreme / -128).astype(jnp.float16)
    d = half.astype(jnp.float32)
    s = jnp.clip(jnp.round(_quotient(scale, d)), -128, 127)
    codes = jnp.clip(jnp.round(_quotient(tiles, (d * s)[..., None])), -32, 31)
    return half, s.astype(jnp.int8), codes.astype(jnp.int8)


def _quotient(x: jax.Array, by: jax.Array) -> jax.Array:
    """x / by, and 0 where `by` is 0."""
    return jnp.where(by == 0, 0, x / jnp.where(by == 0, 1, by))
