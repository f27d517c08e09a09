"""Tiling of `linear_cross_entropy`, chunks of rows by tiles of the vocabulary, and the sums of a tile."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from stack_core.ops.building import accurate_dtype, picked
from stack_kernels.cpu import as_bits, from_bits
from stack_kernels.linear.product import Products

__all__ = [
    "Chunks",
    "Joined",
    "Loss",
    "Rows",
    "columns_of",
    "divide",
    "in_chunks",
    "join",
    "logits_of",
    "product_dtype",
    "read_tile",
    "read_tiles",
    "slopes_of",
    "tiles",
]

_SMALL_BYTES = 32 * 2**20
_MAX_BYTES, _MIN_ROWS = 128 * 2**20, 64


@dataclass(frozen=True)
class Chunks:
    """Sizes of chunks and tiles, and the kind of gradient.

    Attributes:
      chunk_rows: maximum number of rows per chunk. If exponentials are saved, chunks have more rows while these are
        small, and fewer rows if these would exceed 128 MiB.
      tile_bytes: approximate size of a chunk's logits in one tile.
      keeps_exponentials: True to compute the logits once in a gradient (`kept_exponentials`), False to compute them
        twice (`logits_again`); a single tile always computes them once.
    """

    chunk_rows: int = 512
    tile_bytes: int = 4 * 2**20
    keeps_exponentials: bool = True


@dataclass(frozen=True)
class Loss:
    """Static properties of a call.

    Attributes:
      products: functions that compute the products.
      vocab: size of the vocabulary.
      chunks: number of equal chunks of rows.
      width: columns per tile; the last tile overlaps the previous one if this does not divide the vocabulary.
      dtype: dtype of the weight, which the loops read through `as_bits`.
      keeps_exponentials: see `Chunks`.
      z_loss: weight of the squared log-partition.
      label_smoothing: share of the target spread evenly over the vocabulary.
    """

    products: Products
    vocab: int
    chunks: int
    width: int
    dtype: Any
    keeps_exponentials: bool
    z_loss: float
    label_smoothing: float


class Rows(NamedTuple):
    """Rows: h [rows, embed], labels y int[rows], and the weight of each loss in the total, fp32[rows]."""

    hidden: Any
    labels: Any
    shares: Any


class Seen(NamedTuple):
    """Per row, the results of one tile: m, the sum of e, the label's z if in the tile, and the sum of z if needed.

    Fp32[rows].
    """

    largest: Any
    total: Any
    label_logit: Any
    logit_total: Any


def read_tile(loss: Loss, rows: Rows, bits: Any, tile: Any) -> tuple[Seen, Any]:
    """Returns the per-row results of a tile's logits, and e [rows, columns] as bits."""
    begin, block, columns = columns_of(loss, bits, tile)
    logits = logits_of(loss, rows, block, columns)
    logit_total = jnp.sum(jnp.where(columns < 0, 0, logits), axis=-1) if loss.label_smoothing else None
    # Finite, because -inf - -inf would be NaN if all logits of a row are -inf.
    largest = jnp.maximum(jnp.max(logits, axis=-1), jnp.finfo(logits.dtype).min)
    exponentials = jnp.exp(logits - largest[:, None])
    place = jnp.clip(rows.labels - begin, 0, loss.width - 1)
    # Not from `begin`: the first columns of a last tile that overlaps belong to the previous tile.
    is_here = (rows.labels >= tile * loss.width) & (rows.labels < begin + loss.width)
    label_logit = jnp.where(is_here, picked(logits, place), 0)
    kept = as_bits(exponentials.astype(block.dtype))
    return Seen(largest, jnp.sum(exponentials, axis=-1), label_logit, logit_total), kept


def logits_of(loss: Loss, rows: Rows, block: Any, columns: Any) -> Any:
    """Computes z [rows, columns] in fp32; -inf in columns that belong to the previous tile."""
    logits = loss.products.times(rows.hidden.astype(block.dtype), block, accurate_dtype(block.dtype))
    return jnp.where(columns < 0, -jnp.inf, logits) if loss.vocab % loss.width else logits


class Joined(NamedTuple):
    """Per row, the results of all tiles: the loss l, the log-partition L and the label's z; fp32[rows]."""

    losses: Any
    log_partition: Any
    label_logit: Any


def join(loss: Loss, rows: Rows, seen: Seen) -> Joined:
    """Combines the per-row results of all tiles."""
    log_partition = jax.nn.logsumexp(seen.largest + jnp.log(seen.total), axis=0)
    label_logit = jnp.sum(seen.label_logit, axis=0)
    losses = log_partition - (1 - loss.label_smoothing) * label_logit
    if loss.label_smoothing:
        losses = losses - loss.label_smoothing / loss.vocab * jnp.sum(seen.logit_total, axis=0)
    losses = losses + loss.z_loss * jnp.square(log_partition)
    # NaN shows a label outside the vocabulary, as in the reference.
    losses = jnp.where((rows.labels >= 0) & (rows.labels < loss.vocab), losses, jnp.nan)
    return Joined(losses, log_partition, label_logit)


def read_tiles(loss: Loss, rows: Rows, bits: Any) -> Joined:
    """Computes the per-row results over all tiles."""
    return join(loss, rows, lax.map(lambda tile: read_tile(loss, rows, bits, tile)[0], tiles(loss)))


def slopes_of(loss: Loss, rows: Rows, joined: Joined, exponentials: Any, columns: Any, share: Any) -> Any:
    """Computes dl_r / dz_rv / a_r [rows, columns] in the dtype of the products.

    A_r is the share of e_rv in the partition.
    """
    slopes = exponentials.astype(share.dtype)
    of_partition = 1 + 2 * loss.z_loss * joined.log_partition
    evenly = loss.label_smoothing / loss.vocab
    if loss.z_loss:
        slopes = slopes * of_partition[:, None]
    if loss.label_smoothing:
        # Divided by the share, because the caller multiplies all slopes of the row by the share.
        slopes = jnp.where(columns < 0, 0, slopes - (evenly / share)[:, None])
    # Not computed from e: if the label is nearly certain, only the rounding error of e would remain.
    at_label = of_partition * jnp.exp(joined.label_logit - joined.log_partition) - (1 - loss.label_smoothing) - evenly
    slopes = jnp.where(columns == rows.labels[:, None], (at_label / share)[:, None], slopes)
    return slopes.astype(product_dtype(loss.dtype))


def in_chunks(loss: Loss, rows: Rows) -> Rows:
    """Splits rows to [chunks, rows, ...]. Padding rows have share 0.

    A chunk has at least two rows, since one is slow in bf16.
    """
    count = rows.labels.size
    size = max(-(-count // loss.chunks), 2)

    def split(array: Any) -> Any:
        padding = [(0, loss.chunks * size - count)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding).reshape(loss.chunks, size, *array.shape[1:])

    return jax.tree.map(split, rows)


def divide(rows: int, vocab: int, dtype: Any, config: Chunks) -> tuple[int, int]:
    """Returns the number of chunks and the width of tiles, balanced and in multiples of 32 columns."""
    chunk_rows = config.chunk_rows
    if config.keeps_exponentials:
        row_bytes = vocab * jnp.dtype(product_dtype(dtype)).itemsize
        chunk_rows = min(max(chunk_rows, _SMALL_BYTES // row_bytes), max(_MAX_BYTES // row_bytes, _MIN_ROWS))
    chunks = max(-(-rows // chunk_rows), 1)
    tiles = -(-rows * vocab * 4 // (chunks * config.tile_bytes))
    # Products in AMX tiles take multiples of 32 columns.
    return chunks, min(-(-vocab // (32 * max(tiles, 1))) * 32, vocab)


def tiles(loss: Loss) -> Any:
    """Returns the tile indices."""
    return jnp.arange(-(-loss.vocab // loss.width), dtype=jnp.int32)


def columns_of(loss: Loss, bits: Any, tile: Any) -> tuple[Any, Any, Any]:
    """Returns a tile's first column, its weight columns, and their indices, -1 for columns of the previous tile."""
    begin = jnp.minimum(tile * loss.width, loss.vocab - loss.width)
    numbers = begin + jnp.arange(loss.width, dtype=jnp.int32)
    block = from_bits(lax.dynamic_slice_in_dim(bits, begin, loss.width, axis=1), loss.dtype)
    return begin, block.astype(product_dtype(loss.dtype)), jnp.where(numbers < tile * loss.width, -1, numbers)


def product_dtype(dtype: Any) -> Any:
    """Returns bf16 unchanged, else the accurate dtype: XLA widens fp16 on CPUs, so rounding to it gains nothing."""
    return dtype if dtype == jnp.bfloat16 else accurate_dtype(dtype)
