"""Attention of the tokens of a step to the paged latents that an indexer selects for each of them.

Source: DeepSeek-AI, DeepSeek-V3.2, 2025 (arXiv:2512.02556), section 2.1.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from stack_core import ops
from stack_core.ops.building import bounded_places
from stack_core.ops.selection import KeySelection, index_scores

__all__ = ["attend_selected_pages"]

_PART_BYTES = 2**26
"""Size of the arrays that are gathered for one part of the tokens."""


def attend_selected_pages(
    query: Float[Array, "tokens heads dim"],
    latent_pages: Any,
    index_pages: Any,
    *,
    index: KeySelection,
    rows: Any,
    scale: float | None,
    value_dim: int,
) -> Float[Array, "tokens heads value_dim"]:
    """Computes causal attention of each token to the `index.count` latents of its sequence with the highest scores.

    Each token reads all keys of the indexer of its sequence, but only the selected latents. Tokens are computed in
    parts so that the gathered arrays stay small. Padding tokens have output 0.

    Args:
      query: queries [tokens, heads, dim], with the key matrix absorbed.
      latent_pages, index_pages: pools [pages, slots, features], arrays or quantized. The first `value_dim` features of
        latents are the values.
      index: queries [tokens, index_heads, index_dim], weights [tokens, index_heads] and count; `key` is not read.
      rows: `Rows` of the step.
      scale: see `ops.paged_attention`.
    """
    (pages, slots), tokens = jax.tree.leaves(latent_pages)[0].shape[:2], query.shape[0]
    block_tables, kv_lengths, query_starts = bounded_places(
        rows.block_tables, rows.kv_lengths, rows.query_starts, pages=pages, slots=slots, tokens=tokens
    )
    sequence, position = _places(kv_lengths, query_starts, tokens)
    keys = block_tables.shape[1] * slots
    by_token = {
        "query": query,
        "index_query": index.query,
        "weights": index.weights,
        "tables": sequence,
        "position": position,
    }

    def of_part(part: dict[str, Any]) -> jax.Array:
        tables = block_tables[part["tables"]]
        gathered = jax.tree.map(lambda pool: pool[tables].reshape(len(tables), keys, -1), index_pages)
        index_keys = ops.dequantize(gathered, index.query.dtype)
        scores = index_scores(part["index_query"][:, None], part["weights"][:, None], index_keys)[:, 0]
        visible = jnp.arange(keys) <= part["position"][:, None]
        best, places = lax.top_k(jnp.where(visible, scores, -jnp.inf), index.count)
        page = jnp.take_along_axis(tables, places // slots, axis=1)
        latents = ops.dequantize(jax.tree.map(lambda pool: pool[page, places % slots], latent_pages), query.dtype)
        mask = best > -jnp.inf
        # A slot of an unselected key may be unwritten, and NaN there times a weight of 0 would be NaN.
        latents = jnp.where(mask[..., None], latents, 0)[:, :, None]
        names: Any = {"query": (None, None, "act_heads", None), "mask": (None,) * 4}
        names |= dict.fromkeys(("key", "value"), (None,) * 4)
        arrays = (part["query"][:, None], latents, latents[..., :value_dim])
        output: Any = ops.attention(*arrays, mask=mask[:, None, None], scale=scale, axes=names)
        return output[:, 0]

    features = sum(pool.shape[-1] for pool in jax.tree.leaves(index_pages)) + index.query.shape[1]
    token_bytes = 4 * (keys * features + index.count * query.shape[-1])
    size = min(max(_PART_BYTES // token_bytes, 1), tokens)
    parts = math.ceil(tokens / size)
    if parts == 1:
        return of_part(by_token)

    def divided(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, ((0, parts * size - tokens), *[(0, 0)] * (array.ndim - 1)))
        return padded.reshape(parts, size, *array.shape[1:])

    outputs = lax.map(of_part, jax.tree.map(divided, by_token))
    return outputs.reshape(parts * size, *outputs.shape[2:])[:tokens]


def _places(kv_lengths: jax.Array, query_starts: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Returns the sequence of each token and the position in it; -1 for padding."""
    token = jnp.arange(tokens)
    sequence = jnp.clip(jnp.searchsorted(query_starts, token, side="right") - 1, 0, len(kv_lengths) - 1)
    position = kv_lengths[sequence] - query_starts[sequence + 1] + token
    is_padding = (token < query_starts[0]) | (token >= query_starts[-1])
    return sequence, jnp.where(is_padding, -1, position)
