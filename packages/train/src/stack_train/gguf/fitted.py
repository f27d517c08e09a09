"""Quantization to GGUF types by weighted least squares.

Each tile of a row has a scale, and in some types an offset:

    Q4_0, Q5_0   x = d q           tiles of 32, -8 <= q < 8 or -16 <= q < 16
    Q5_1         x = d q + m       tiles of 32, 0 <= q < 32
    Q4_K, Q5_K   x = d s q - d' m  tiles of 32 in blocks of 256, 0 <= s, m < 64 and 0 <= q < 16 or 32
    Q6_K         x = d s q         tiles of 16 in blocks of 256, -128 <= s < 128 and -32 <= q < 32

d, d' and the m of Q5_1 are float16 numbers; s and the m of K-quants are integers. A tile's scale and offset are those
of the least weighted squared error among candidates: each candidate rounds the entries by a different step, and least
squares then give the scale and offset for these codes. Importance h, the mean squared input of each column, gives an
entry x the weight

    Q4_0, Q5_0, Q5_1   h sqrt(mean of x^2 over the row + x^2)
    Q4_K, Q5_K         h sqrt(2 (mean of x^2 over the block) + x^2)
    Q6_K               h

Without importance, large entries weigh more.

Source: ggml (`make_qkx2_quants`, `make_qkx3_quants`, `make_qx_quants` and their callers in `ggml-quants.c`), Georgi
Gerganov and contributors, by Iwan Kawrakow. Departure: d and d' are the largest scale and minimum of a block divided by
63; with importance, ggml searches for better ones.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["FITTED", "K_QUANTS", "quantize"]

K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
FITTED = (*K_QUANTS, "Q4_0", "Q5_0", "Q5_1")

_BLOCK = 256
_TILE = 32
_SIGNED_TILE = 16
_LEAST_SHARE = np.float32(1e-6)
"""Least importance of a column, as a share of the mean."""
_CHUNK_ENTRIES = 2**18
"""Number of entries that are fitted together, which bounds the temporary arrays."""


def quantize(values: np.ndarray, kind: str, importance: np.ndarray | None = None) -> np.ndarray:
    """Quantizes the rows of matrices.

    Args:
      values: float32[..., rows, entries], where `entries` is a multiple of 256 for K-quants and of 32 for other types.
      kind: type of `FITTED`; only `K_QUANTS` are fitted without importance.
      importance: mean squared input of each column, float32[..., 1, entries].

    Returns:
      The blocks as bytes, uint8[..., rows, bytes of a row].
    """
    if importance is None:
        packed = _packed(values.reshape(-1, values.shape[-1]), kind, None)
    else:
        matrices = values.reshape(-1, *values.shape[-2:])
        columns = np.broadcast_to(importance, (*values.shape[:-2], 1, values.shape[-1])).reshape(len(matrices), -1)
        # An input that was always 0 in the data may be another number later.
        columns = np.maximum(columns, _LEAST_SHARE * columns.mean(-1, keepdims=True))
        columns = np.where(columns.any(-1, keepdims=True), columns, np.float32(1))
        packed = np.concatenate([_packed(each, kind, own) for each, own in zip(matrices, columns, strict=True)])
    return packed.reshape(*values.shape[:-1], -1)


def _packed(rows: np.ndarray, kind: str, importance: np.ndarray | None) -> np.ndarray:
    """Returns the blocks of rows[rows, entries] in order, uint8[blocks, bytes]."""
    size = _BLOCK if kind in K_QUANTS else _TILE
    blocks, chunk, per_row = rows.reshape(-1, size), _CHUNK_ENTRIES // size, rows.shape[1] // size
    squares = np.einsum("re,re->r", rows, rows) / rows.shape[1]
    packed = list[np.ndarray]()
    for start in range(0, len(blocks), chunk):
        own, weights = blocks[start : start + chunk], None
        if importance is not None:
            numbers = np.arange(start, start + len(own))
            columns = importance.reshape(per_row, size)[numbers % per_row]
            weights = _padded(_weights(own, columns, kind, squares[numbers // per_row]), chunk)
        packed.append(_PACK[kind](_padded(own, chunk), weights)[: len(own)])
    return np.concatenate(packed)


def _weights(blocks: np.ndarray, importance: np.ndarray, kind: str, row_squares: np.ndarray) -> np.ndarray:
    if kind == "Q6_K":
        return importance
    squares = 2 * np.mean(blocks**2, -1) if kind in K_QUANTS else row_squares
    return importance * np.sqrt(squares[:, None] + blocks**2)


def _padded(array: np.ndarray, count: int) -> np.ndarray:
    """Fills a chunk with zeros, so that all chunks use one compiled program."""
    return np.concatenate([array, np.zeros((count - len(array), *array.shape[1:]), array.dtype)])


def _pack_k_with_minima(blocks: np.ndarray, weights: np.ndarray | None, *, bits: int) -> np.ndarray:
    halves, scales, minima, codes = jax.device_get(_fit_k_with_minima(blocks, weights, levels=2**bits - 1))
    count = len(codes)
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


def _pack_q6_k(blocks: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    half, scales, codes = jax.device_get(_fit_q6_k(blocks, weights))
    count = len(codes)
    quarters = (codes + 32).astype(np.uint8).reshape(count, 2, 4, 32)
    low = (quarters[:, :, :2] & 15) | (quarters[:, :, 2:] & 15) << 4
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce((quarters >> 4) << shifts, axis=2)
    parts = [low.reshape(count, -1), high.reshape(count, -1), scales.view(np.uint8), half.view(np.uint8)]
    return np.concatenate(parts, axis=1)


def _pack_tiles(blocks: np.ndarray, weights: np.ndarray, *, bits: int, has_offset: bool = False) -> np.ndarray:
    """Packs Q4_0, Q5_0 and Q5_1: float16 numbers, the fifth bits of all entries, and nibbles of both halves."""
    halves, codes = jax.device_get(_fit_tiles(blocks, weights, bits=bits, has_offset=has_offset))
    low = (codes[:, :16] & 15) | (codes[:, 16:] & 15) << 4
    fifth = [np.packbits(codes >> 4, axis=1, bitorder="little")] if bits == 5 else []
    return np.concatenate([halves.view(np.uint8), *fifth, low], axis=1)


_PACK: dict[str, Callable[[np.ndarray, Any], np.ndarray]] = {
    "Q4_K": partial(_pack_k_with_minima, bits=4),
    "Q5_K": partial(_pack_k_with_minima, bits=5),
    "Q6_K": _pack_q6_k,
    "Q4_0": partial(_pack_tiles, bits=4),
    "Q5_0": partial(_pack_tiles, bits=5),
    "Q5_1": partial(_pack_tiles, bits=5, has_offset=True),
}


@partial(jax.jit, static_argnames="levels")
def _fit_k_with_minima(
    blocks: jax.Array, weights: jax.Array | None, *, levels: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the numbers d and d', float16[blocks, 2]; s and m, uint8[blocks, 8]; and q, uint8[blocks, 8, 32]."""
    tiles = blocks.reshape(len(blocks), -1, _TILE)
    scale, minimum = _with_minimum(tiles, _in_tiles(weights, tiles), levels)
    halves = (jnp.stack([scale.max(-1), minimum.max(-1)], -1) / 63).astype(jnp.float16)
    d, d_minimum = (halves[:, place, None].astype(jnp.float32) for place in (0, 1))
    s = jnp.clip(jnp.round(_quotient(scale, d)), 0, 63)
    m = jnp.clip(jnp.round(_quotient(minimum, d_minimum)), 0, 63)
    codes = jnp.round(_quotient(tiles + (d_minimum * m)[..., None], (d * s)[..., None]))
    return halves, s.astype(jnp.uint8), m.astype(jnp.uint8), jnp.clip(codes, 0, levels).astype(jnp.uint8)


@jax.jit
def _fit_q6_k(blocks: jax.Array, weights: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the number d, float16[blocks, 1]; s, int8[blocks, 16]; and q, int8[blocks, 16, 16]."""
    tiles = blocks.reshape(len(blocks), -1, _SIGNED_TILE)
    scale = _symmetric(tiles, _in_tiles(weights, tiles), levels=32)
    extreme = jnp.take_along_axis(scale, abs(scale).argmax(-1, keepdims=True), -1)
    half = (extreme / -128).astype(jnp.float16)
    d = half.astype(jnp.float32)
    s = jnp.clip(jnp.round(_quotient(scale, d)), -128, 127)
    codes = jnp.clip(jnp.round(_quotient(tiles, (d * s)[..., None])), -32, 31)
    return half, s.astype(jnp.int8), codes.astype(jnp.int8)


@partial(jax.jit, static_argnames=("bits", "has_offset"))
def _fit_tiles(tiles: jax.Array, weights: jax.Array, *, bits: int, has_offset: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers d, or d and m, float16[tiles, 1 or 2], and the codes, uint8[tiles, 32]."""
    half_range = 2 ** (bits - 1)
    if has_offset:
        scale, minimum = _with_minimum(tiles, weights, 2**bits - 1)
        halves = jnp.stack([scale, -minimum], -1).astype(jnp.float16)
        start = halves[:, 1:].astype(jnp.float32)
    else:
        halves = _symmetric(tiles, weights, levels=half_range)[:, None].astype(jnp.float16)
        start = -half_range * halves.astype(jnp.float32)
    codes = jnp.round(_quotient(tiles - start, halves[:, :1].astype(jnp.float32)))
    return halves, jnp.clip(codes, 0, 2**bits - 1).astype(jnp.uint8)


def _in_tiles(weights: jax.Array | None, tiles: jax.Array) -> jax.Array | None:
    return None if weights is None else weights.reshape(tiles.shape)


def _with_minimum(tiles: jax.Array, weights: jax.Array | None, levels: int) -> tuple[jax.Array, jax.Array]:
    """Fits tiles[..., 32] by scale q - minimum with codes q up to `levels`, and returns both numbers of each tile."""
    if weights is None:
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
    return scale, minimum


def _symmetric(tiles: jax.Array, weights: jax.Array | None, *, levels: int) -> jax.Array:
    """Fits tiles[..., entries] by scale q with codes -levels <= q < levels, and returns the scale of each tile."""
    if weights is None:
        weights = tiles**2
    largest = jnp.take_along_axis(tiles, abs(tiles).argmax(-1, keepdims=True), -1)[..., 0]

    def fit(steps: jax.Array) -> tuple[jax.Array, jax.Array]:
        codes = jnp.clip(jnp.round(tiles * _quotient(steps, largest)[..., None]), -levels, levels - 1)
        of_products, of_squares = (jnp.sum(weights * codes * each, -1) for each in (tiles, codes))
        # The error with the least-squares scale is a constant less this.
        return _quotient(of_products**2, of_squares), _quotient(of_products, of_squares)

    def better(place: jax.Array, best: Any) -> Any:
        found = fit(-levels + 0.1 * place)
        return jax.tree.map(lambda new, old: jnp.where(found[0] > best[0], new, old), found, best)

    return jax.lax.fori_loop(-9, 10, better, fit(jnp.float32(-levels)))[1]


def _quotient(x: jax.Array, by: jax.Array) -> jax.Array:
    """x / by, and 0 where `by` is 0."""
    return jnp.where(by == 0, 0, x / jnp.where(by == 0, 1, by))
