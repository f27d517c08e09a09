"""A key-value cache that holds every row's keys in one dense buffer."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from stack_core import ops
from stack_core.protocols import AttentionSpec, KVCacheShape

__all__ = ["DenseKVCache", "LayerCache"]


@partial(jax.tree_util.register_dataclass, data_fields=["key", "value"], meta_fields=[])
@dataclass(frozen=True)
class LayerCache:
    """Keys and values, [layers, batch, kv_heads, capacity, head_dim]; one layer's slice lacks the first axis.

    The heads come before the positions, so that a decode step reads each head's keys in one run: 2-4x faster on CPU.
    """

    key: jax.Array
    value: jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=["layers", "lengths"], meta_fields=[])
@dataclass(frozen=True)
class DenseKVCache:
    """A `KVCache` with room for `capacity` tokens a row.

    Invariant: row r holds the keys of its tokens 0 .. lengths[r] - 1; what lies beyond is never attended to. Appending
    past the capacity is the caller's mistake and overwrites the last tokens.

    Attributes:
      lengths: int32[batch], tokens held.
    """

    layers: LayerCache
    lengths: jax.Array

    @classmethod
    def empty(cls, shape: KVCacheShape, *, batch: int, capacity: int) -> "DenseKVCache":
        zeros = jnp.zeros((shape.layers, batch, shape.kv_heads, capacity, shape.head_dim), shape.dtype)
        return cls(LayerCache(zeros, jnp.zeros_like(zeros)), jnp.zeros((batch,), jnp.int32))

    @property
    def capacity(self) -> int:
        return self.layers.key.shape[-2]

    def attend(
        self, layer_cache: LayerCache, query: jax.Array, key: jax.Array, value: jax.Array, spec: AttentionSpec
    ) -> tuple[jax.Array, LayerCache]:
        """Appends key and value [batch, seq, kv_heads, head_dim] to one layer and attends, causally, to all it holds.

        Args:
          query: [batch, seq, heads, head_dim]; row r's query i stands at position lengths[r] + i.

        Returns:
          Output like query, and the layer with the new keys; `lengths` is `advance`'s to change.
        """
        layer_cache = LayerCache(self._append(layer_cache.key, key), self._append(layer_cache.value, value))
        output: Any = ops.attention(
            query,
            layer_cache.key.swapaxes(1, 2),
            layer_cache.value.swapaxes(1, 2),
            causal=True,
            query_offset=self.lengths,
            kv_lengths=self.lengths + query.shape[1],
            window=spec.window,
            softcap=spec.softcap,
            scale=spec.scale,
        )
        return output, layer_cache

    def advance(self, layers: Any, tokens: int) -> "DenseKVCache":
        """The cache after all layers appended `tokens` tokens a row."""
        return DenseKVCache(layers, self.lengths + tokens)

    def truncate(self, lengths: jax.Array) -> "DenseKVCache":
        """Forgets all but the first `lengths`[batch] tokens of each row: padding appended behind a prompt, say."""
        return replace(self, lengths=jnp.minimum(self.lengths, lengths))

    def _append(self, held: jax.Array, new: jax.Array) -> jax.Array:
        def write(row: jax.Array, update: jax.Array, start: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(row, update, start, axis=1)

        return jax.vmap(write)(held, new.swapaxes(1, 2).astype(held.dtype), self.lengths)
