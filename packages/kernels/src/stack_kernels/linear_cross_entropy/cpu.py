"""`linear_cross_entropy` on CPUs: chunks of rows against tiles of the vocabulary, in products that have fast kernels.

A gradient goes twice over the tiles. The first time it forms a tile's logits z and keeps of them, beside a few numbers
a row,

    e_rv = exp(z_rv - m_r)          m_r = max_v z_rv, v within the tile

Then the log-partition L_r is known, and with the tile's share of it, a_r = exp(m_r - L_r), the second time gives

    dl_r / dz_rv = a_r (e_rv - [v = y_r] / a_r)             here without z-loss and label smoothing

where a_r scales the rows of the products' small operands, so that e is read once. The logits are formed once; what is
kept of them are the exponentials of one chunk of rows, in the dtype of the products.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from stack_core.abi import AUTODIFF, OpImplementation
from stack_core.mesh import constrain, parts_of
from stack_core.ops.building import accurate_dtype, dequantize, vary_alike
from stack_kernels.cpu import as_bits, from_bits, on_cpu
from stack_kernels.linear.product import XLA, Products, transposed

__all__ = ["CONFIGS", "CPU", "Chunks", "linear_cross_entropy"]

_SMALL_BYTES = 32 * 2**20
_MOST_BYTES, _LEAST_ROWS = 128 * 2**20, 64
_LEAST_SHARE = 1e-20  # A tile with less of the partition has no weight in any sum, and 1 / a stays finite.


@dataclass(frozen=True)
class Chunks:
    """How much is looked at together.

    Attributes:
      chunk_rows: at most so many rows make a chunk, or more where its exponentials are small, and fewer where they
        would be more than 128 MiB. Each chunk reads and writes the whole gradient of the weight, in fp32 unless it is
        the only one.
      tile_bytes: about so large are the logits of a chunk in a tile.
    """

    chunk_rows: int = 512
    tile_bytes: int = 4 * 2**20


@dataclass(frozen=True)
class _Loss:
    """What is fixed of a call.

    Attributes:
      products: how they are formed.
      chunks: of rows, each of as many.
      width: the columns of every tile; the last overlaps the one before if it does not divide the vocabulary.
      dtype: of the weight, whose `as_bits` the loops read.
    """

    products: Products
    vocab: int
    chunks: int
    width: int
    dtype: Any
    z_loss: float
    label_smoothing: float


class _Rows(NamedTuple):
    """Rows: h [rows, embed], y int[rows], and what each loss counts in the total, fp32[rows]."""

    hidden: Any
    labels: Any
    shares: Any


def linear_cross_entropy(
    products: Products,
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    ignore_index: int,
    reduction: str,
    config: Chunks,
    **regularization: float,
) -> Any:
    """The op, by those products; `regularization` are `z_loss` and `label_smoothing`."""
    weight = dequantize(weight, hidden.dtype)
    embed, vocab = weight.shape
    parts = parts_of("batch") if labels.size % parts_of("batch") == 0 else 1
    divided = _divided(labels.size // parts, vocab, hidden.dtype, config)
    loss = _Loss(products, vocab, *divided, weight.dtype, **regularization)
    counted = labels != ignore_index
    shares = counted.astype(accurate_dtype(hidden.dtype))
    if reduction == "mean":
        shares = shares / jnp.maximum(jnp.sum(shares), 1)
    rows = _Rows(hidden.reshape(-1, embed), labels.reshape(-1), shares.reshape(-1))
    of_part = functools.partial(_losses if reduction == "none" else _total, loss)
    result = _over_parts(of_part, parts, *vary_alike(rows, weight))
    return jnp.where(counted, result.reshape(labels.shape), 0) if reduction == "none" else jnp.sum(result)


def _over_parts(function: Any, parts: int, rows: _Rows, weight: Any) -> Any:
    """Each part of the rows that a mesh splits off by itself: no loop then goes from device to device."""
    if parts == 1:
        return function(rows, weight)

    def split(array: Any) -> Any:
        array = array.reshape(parts, -1, *array.shape[1:])
        return constrain(array, "batch", *[None] * (array.ndim - 1), name="linear_cross_entropy's rows")

    return jax.vmap(function, in_axes=(0, None))(jax.tree.map(split, rows), weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(loss: _Loss, rows: _Rows, weight: Any) -> Any:
    """The sum of all losses times their shares. When differentiated, the gradients are formed with it."""
    return _summed(_losses(loss, rows, weight), rows)


def _total_forward(loss: _Loss, rows: _Rows, weight: Any) -> Any:
    losses, *gradients = _losses_and_gradients(loss, rows, weight)
    return _summed(losses, rows), gradients


def _total_backward(loss: _Loss, gradients: Any, cotangent: Any) -> Any:
    of_hidden, of_weight = (
        (gradient.astype(cotangent.dtype) * cotangent).astype(gradient.dtype) for gradient in gradients
    )
    return _Rows(of_hidden, None, None), of_weight


_total.defvjp(_total_forward, _total_backward)


def _summed(losses: Any, rows: _Rows) -> Any:
    return jnp.sum(jnp.where(rows.shares == 0, 0, losses * rows.shares))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(loss: _Loss, rows: _Rows, weight: Any) -> Any:
    """The loss of each row, whatever its share."""
    bits = as_bits(weight)

    def of_chunk(chunk: _Rows) -> Any:
        seen = lax.map(lambda tile: _read_tile(loss, chunk, bits, tile)[0], _tiles(loss))
        return _joined(loss, chunk, seen).losses

    return lax.map(of_chunk, _in_chunks(loss, rows)).reshape(-1)[: rows.labels.size]


def _losses_forward(loss: _Loss, rows: _Rows, weight: Any) -> Any:
    return _losses(loss, rows, weight), (rows, weight)


def _losses_backward(loss: _Loss, operands: Any, cotangent: Any) -> Any:
    rows, weight = operands
    _, of_hidden, of_weight = _losses_and_gradients(loss, rows._replace(shares=cotangent), weight)
    return _Rows(of_hidden, None, None), of_weight


_losses.defvjp(_losses_forward, _losses_backward)


def _losses_and_gradients(loss: _Loss, rows: _Rows, weight: Any) -> Any:
    """The loss of each row, and the gradients of the total."""
    chunks = _in_chunks(loss, rows)
    alone = chunks.labels.shape[0] == 1
    start = jnp.zeros_like(weight, dtype=weight.dtype if alone else accurate_dtype(weight.dtype))
    bits = as_bits(weight)

    def add_chunk(of_weight: Any, chunk: _Rows) -> Any:
        return _add_chunk(loss, chunk, bits, of_weight)

    of_weight, by_chunk = lax.scan(add_chunk, start, chunks)
    losses, of_hidden = (x.reshape(-1, *x.shape[2:])[: rows.labels.size] for x in by_chunk)
    return losses, of_hidden, of_weight.astype(weight.dtype)


def _add_chunk(loss: _Loss, chunk: _Rows, bits: Any, of_weight: Any) -> Any:
    """`of_weight` with what the chunk adds to it; the losses [rows] and the gradient of `hidden`."""
    seen, exponentials = lax.map(lambda tile: _read_tile(loss, chunk, bits, tile), _tiles(loss))
    joined = _joined(loss, chunk, seen)
    columns_first = transposed(chunk.hidden.astype(_product_dtype(loss.dtype)))

    def add_tile(carry: Any, tile: Any) -> Any:
        of_hidden, of_weight = carry
        index, largest, exponentials = tile
        begin, block, columns = _columns(loss, bits, index)
        exponentials = from_bits(exponentials, block.dtype)
        share = jnp.maximum(jnp.exp(largest - joined.log_partition), _LEAST_SHARE)
        slopes = _slopes(loss, chunk, joined, exponentials, columns, share)
        scale = share * chunk.shares
        of_hidden = of_hidden + loss.products.row_gradient(slopes, block, scale.dtype) * scale[:, None]
        scaled = (columns_first.astype(scale.dtype) * scale).astype(slopes.dtype)
        added = loss.products.weight_gradient(scaled, slopes, scale.dtype)
        added = added + lax.dynamic_slice_in_dim(of_weight, begin, loss.width, axis=1).astype(added.dtype)
        return (of_hidden, lax.dynamic_update_slice_in_dim(of_weight, added.astype(of_weight.dtype), begin, 1)), None

    of_hidden = jnp.zeros_like(chunk.hidden, dtype=chunk.shares.dtype)
    tiles = (_tiles(loss), seen.largest, exponentials)
    (of_hidden, of_weight), _ = lax.scan(add_tile, (of_hidden, of_weight), tiles)
    return of_weight, (joined.losses, of_hidden.astype(chunk.hidden.dtype))


class _Seen(NamedTuple):
    """Of each row in one tile: m, the sum of e, the label's z if it is there, the sum of z if wanted; fp32[rows]."""

    largest: Any
    total: Any
    label_logit: Any
    logit_total: Any


def _read_tile(loss: _Loss, rows: _Rows, bits: Any, tile: Any) -> tuple[_Seen, Any]:
    """What is kept of a tile's logits: a few numbers a row, and e [rows, columns] as bits."""
    begin, block, columns = _columns(loss, bits, tile)
    logits = loss.products.times(rows.hidden.astype(block.dtype), block, accurate_dtype(block.dtype))
    logit_total = jnp.sum(jnp.where(columns < 0, 0, logits), axis=-1) if loss.label_smoothing else None
    if loss.vocab % loss.width:
        logits = jnp.where(columns < 0, -jnp.inf, logits)
    largest = jnp.maximum(jnp.max(logits, axis=-1), jnp.finfo(logits.dtype).min)
    exponentials = jnp.exp(logits - largest[:, None])
    place = jnp.clip(rows.labels - begin, 0, loss.width - 1)
    label_logit = jnp.take_along_axis(logits, place[:, None], axis=-1)[:, 0]
    label_logit = jnp.where(columns[place] == rows.labels, label_logit, 0)
    kept = as_bits(exponentials.astype(block.dtype))
    return _Seen(largest, jnp.sum(exponentials, axis=-1), label_logit, logit_total), kept


class _Joined(NamedTuple):
    """Of each row, from all its tiles: l, L and the label's z; fp32[rows]."""

    losses: Any
    log_partition: Any
    label_logit: Any


def _joined(loss: _Loss, rows: _Rows, seen: _Seen) -> _Joined:
    log_partition = jax.nn.logsumexp(seen.largest + jnp.log(seen.total), axis=0)
    label_logit = jnp.sum(seen.label_logit, axis=0)
    losses = log_partition - (1 - loss.label_smoothing) * label_logit
    if loss.label_smoothing:
        losses = losses - loss.label_smoothing / loss.vocab * jnp.sum(seen.logit_total, axis=0)
    losses = losses + loss.z_loss * jnp.square(log_partition)
    losses = jnp.where((rows.labels >= 0) & (rows.labels < loss.vocab), losses, jnp.nan)
    return _Joined(losses, log_partition, label_logit)


def _slopes(loss: _Loss, rows: _Rows, joined: _Joined, exponentials: Any, columns: Any, share: Any) -> Any:
    """dl_r / dz_rv / a_r: [rows, columns], in the dtype of the products."""
    slopes = exponentials.astype(share.dtype)
    of_partition = 1 + 2 * loss.z_loss * joined.log_partition
    evenly = loss.label_smoothing / loss.vocab
    if loss.z_loss:
        slopes = slopes * of_partition[:, None]
    if loss.label_smoothing:
        slopes = jnp.where(columns < 0, 0, slopes - (evenly / share)[:, None])
    # Not from e: where the label is nearly certain, what its rounding loses is all that would be left.
    at_label = of_partition * jnp.exp(joined.label_logit - joined.log_partition) - (1 - loss.label_smoothing) - evenly
    slopes = jnp.where(columns == rows.labels[:, None], (at_label / share)[:, None], slopes)
    return slopes.astype(exponentials.dtype)


def _in_chunks(loss: _Loss, rows: _Rows) -> _Rows:
    """[chunks, rows, ...]; what fills the last has no share. A chunk has two rows at least, for one is slow in bf16."""
    count = rows.labels.size
    size = max(-(-count // loss.chunks), 2)

    def split(array: Any) -> Any:
        padding = [(0, loss.chunks * size - count)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding).reshape(loss.chunks, size, *array.shape[1:])

    return jax.tree.map(split, rows)


def _divided(rows: int, vocab: int, dtype: Any, config: Chunks) -> tuple[int, int]:
    """The number of chunks, and the width of tiles: as equal as can be, in multiples of 32 columns."""
    row_bytes = vocab * jnp.dtype(_product_dtype(dtype)).itemsize
    most = max(_MOST_BYTES // row_bytes, _LEAST_ROWS)
    chunks = max(-(-rows // min(max(config.chunk_rows, _SMALL_BYTES // row_bytes), most)), 1)
    tiles = -(-rows * vocab * 4 // (chunks * config.tile_bytes))
    return chunks, min(-(-vocab // (32 * max(tiles, 1))) * 32, vocab)


def _tiles(loss: _Loss) -> Any:
    return jnp.arange(-(-loss.vocab // loss.width), dtype=jnp.int32)


def _columns(loss: _Loss, bits: Any, tile: Any) -> tuple[Any, Any, Any]:
    """Where a tile begins, its columns of the weight, and their numbers, -1 for those of the tile before."""
    begin = jnp.minimum(tile * loss.width, loss.vocab - loss.width)
    numbers = begin + jnp.arange(loss.width, dtype=jnp.int32)
    block = from_bits(lax.dynamic_slice_in_dim(bits, begin, loss.width, axis=1), loss.dtype)
    return begin, block.astype(_product_dtype(loss.dtype)), jnp.where(numbers < tile * loss.width, -1, numbers)


def _product_dtype(dtype: Any) -> Any:
    """bf16 as it is, but not fp16, which XLA widens on CPUs anyway: nothing is won by rounding to it."""
    return dtype if dtype == jnp.bfloat16 else accurate_dtype(dtype)


CONFIGS = (Chunks(), Chunks(tile_bytes=16 * 2**20), Chunks(chunk_rows=256), Chunks(chunk_rows=1024))

CPU = OpImplementation(
    op="linear_cross_entropy",
    name="cpu",
    function=functools.partial(linear_cross_entropy, XLA),
    supports=on_cpu,
    vjp=AUTODIFF,
    configs=CONFIGS,
)
