"""The gradient of `linear_cross_entropy` from logits that are computed twice, saving only sums.

Once the log-partitions of all rows are known, each tile of the vocabulary is visited again with all rows: its weight
gradient is then complete, and is rounded and written once. If products are fast, this takes less time than saving
exponentials and accumulating the weight gradients in fp32.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stack_kernels.cpu import as_bits, from_bits
from stack_kernels.linear.product import transposed
from stack_kernels.linear_cross_entropy.chunks import (
    Loss,
    Rows,
    columns_of,
    in_chunks,
    logits_of,
    product_dtype,
    read_tiles,
    slopes_of,
    tiles,
)

__all__ = ["losses_and_gradients"]


def losses_and_gradients(loss: Loss, rows: Rows, weight: Any) -> tuple[Any, Any, Any]:
    """Computes the loss of each row, and the gradients of the total."""
    bits = as_bits(weight)
    dtype = product_dtype(loss.dtype)
    chunks = in_chunks(loss, rows)
    joined = lax.map(lambda chunk: read_tiles(loss, chunk, bits), chunks)
    columns_first = jax.vmap(transposed)(chunks.hidden.astype(dtype))
    scaled = as_bits((columns_first.astype(chunks.shares.dtype) * chunks.shares[:, None]).astype(dtype))
    chunks = chunks._replace(hidden=as_bits(chunks.hidden.astype(dtype)))

    def add_tile(carry: Any, tile: Any) -> Any:
        of_hidden, of_weight = carry
        begin, block, columns = columns_of(loss, bits, tile)

        def add_chunk(carry: Any, each: Any) -> Any:
            of_block, of_hidden = carry
            number, chunk, joined, scaled = each
            chunk = chunk._replace(hidden=from_bits(chunk.hidden, dtype))
            logits = logits_of(loss, chunk, block, columns)
            probabilities = jnp.exp(logits - joined.log_partition[:, None])
            slopes = slopes_of(loss, chunk, joined, probabilities, columns, jnp.ones_like(chunk.shares))
            added = loss.products.row_gradient(slopes, block, of_hidden.dtype) * chunk.shares[:, None]
            of_block = of_block + loss.products.weight_gradient(from_bits(scaled, dtype), slopes, of_block.dtype)
            # In place: in the results of a scan, XLA would copy it once a tile.
            return (of_block, of_hidden.at[number].add(added)), None

        of_block = jnp.zeros_like(block, dtype=of_hidden.dtype)
        numbers = jnp.arange(len(chunks.labels), dtype=jnp.int32)
        (of_block, of_hidden), _ = lax.scan(add_chunk, (of_block, of_hidden), (numbers, chunks, joined, scaled))
        of_block = as_bits(of_block.astype(weight.dtype))
        if loss.vocab % loss.width:
            # Columns that belong to the previous tile keep the gradient from there.
            earlier = lax.dynamic_slice_in_dim(of_weight, begin, loss.width, axis=1)
            of_block = jnp.where(columns < 0, earlier, of_block)
        return (of_hidden, lax.dynamic_update_slice_in_dim(of_weight, of_block, begin, axis=1)), None

    start = jnp.zeros_like(chunks.hidden, dtype=chunks.shares.dtype), jnp.zeros_like(bits)
    (of_hidden, of_weight), _ = lax.scan(add_tile, start, tiles(loss))
    losses, of_hidden = (x.reshape(-1, *x.shape[2:])[: rows.labels.size] for x in (joined.losses, of_hidden))
    return losses, of_hidden.astype(rows.hidden.dtype), from_bits(of_weight, weight.dtype)
