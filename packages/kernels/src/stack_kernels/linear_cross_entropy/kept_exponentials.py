"""The gradient of `linear_cross_entropy` from saved exponentials: logits are computed once.

The first pass over the tiles of the vocabulary computes a tile's logits z and saves, besides a few numbers per row,

    e_rv = exp(z_rv - m_r)          m_r = max_v z_rv, v within the tile

Then the log-partition L_r is known. With the tile's share of it, a_r = exp(m_r - L_r), the second pass computes

    dl_r / dz_rv = a_r (e_rv - [v = y_r] / a_r)             (without z-loss and label smoothing)

where a_r scales the rows of the products' small operands, so that e is read once. The saved arrays are the exponentials
of one chunk of rows, in the dtype of the products, and the sum of the weight gradients of all chunks.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from stack_core.ops.building import accurate_dtype
from stack_kernels.cpu import as_bits, from_bits
from stack_kernels.linear.product import transposed
from stack_kernels.linear_cross_entropy.chunks import (
    Loss,
    Rows,
    columns_of,
    in_chunks,
    join,
    product_dtype,
    read_tile,
    slopes_of,
    tiles,
)

__all__ = ["losses_and_gradients"]

# Lower bound of a_r, so that 1 / a_r is finite. A tile with a smaller share changes no sum in float32.
_MIN_SHARE = 1e-20


def losses_and_gradients(loss: Loss, rows: Rows, weight: Any) -> tuple[Any, Any, Any]:
    """Computes the loss of each row, and the gradients of the total."""
    chunks = in_chunks(loss, rows)
    alone = chunks.labels.shape[0] == 1
    # With one chunk, each column is added to once; only sums over several chunks need the accuracy.
    start = jnp.zeros_like(weight, dtype=weight.dtype if alone else accurate_dtype(weight.dtype))
    bits = as_bits(weight)

    def add_chunk(of_weight: Any, chunk: Rows) -> Any:
        return _add_chunk(loss, chunk, bits, of_weight)

    of_weight, by_chunk = lax.scan(add_chunk, start, chunks)
    losses, of_hidden = (x.reshape(-1, *x.shape[2:])[: rows.labels.size] for x in by_chunk)
    return losses, of_hidden, of_weight.astype(weight.dtype)


def _add_chunk(loss: Loss, chunk: Rows, bits: Any, of_weight: Any) -> Any:
    """Adds a chunk's gradient to `of_weight`; also returns the losses [rows] and the gradient of `hidden`."""
    seen, exponentials = lax.map(lambda tile: read_tile(loss, chunk, bits, tile), tiles(loss))
    joined = join(loss, chunk, seen)
    columns_first = transposed(chunk.hidden.astype(product_dtype(loss.dtype)))

    def add_tile(carry: Any, tile: Any) -> Any:
        of_hidden, of_weight = carry
        index, largest, exponentials = tile
        begin, block, columns = columns_of(loss, bits, index)
        exponentials = from_bits(exponentials, block.dtype)
        share = jnp.maximum(jnp.exp(largest - joined.log_partition), _MIN_SHARE)
        slopes = slopes_of(loss, chunk, joined, exponentials, columns, share)
        scale = share * chunk.shares
        of_hidden = of_hidden + loss.products.row_gradient(slopes, block, scale.dtype) * scale[:, None]
        scaled = (columns_first.astype(scale.dtype) * scale).astype(slopes.dtype)
        added = loss.products.weight_gradient(scaled, slopes, scale.dtype)
        added = added + lax.dynamic_slice_in_dim(of_weight, begin, loss.width, axis=1).astype(added.dtype)
        return (of_hidden, lax.dynamic_update_slice_in_dim(of_weight, added.astype(of_weight.dtype), begin, 1)), None

    of_hidden = jnp.zeros_like(chunk.hidden, dtype=chunk.shares.dtype)
    xs = (tiles(loss), seen.largest, exponentials)
    (of_hidden, of_weight), _ = lax.scan(add_tile, (of_hidden, of_weight), xs)
    return of_weight, (joined.losses, of_hidden.astype(chunk.hidden.dtype))
