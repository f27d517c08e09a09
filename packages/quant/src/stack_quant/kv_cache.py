"""A key-value cache whose keys and values are codes."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from stack_core import ops
from stack_core.errors import ArgumentError
from stack_core.protocols import AttentionSpec
from stack_quant.conversion import quantize
from stack_quant.qarray import QArray, dequantize
from stack_quant.qtypes import qtype
from stack_quant.spec import ArraySpec

__all__ = ["QuantizedKVCache", "QuantizedLayerCache"]

_BITS = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedLayerCache:
    """Keys and values as codes, [layers, batch, kv_heads, capacity, head_dim]; one layer's slice lacks the first axis.

    Each token has a scale for each head: `key.scale` is [layers, batch, kv_heads, capacity, 1].
    """

    key: QArray
    value: QArray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedKVCache:
    """A `KVCache` with room for `capacity` tokens a row, in a type of 8 bits: int8, fp8_e4m3 or fp8_e5m2.

    Of a head of n features in bfloat16 it holds (n + 4) / 2n of the bytes. A token is rounded once, when it is
    appended; what is attended to, the tokens of the call included, is what the codes stand for.

    Invariant: row r holds its tokens 0 .. lengths[r] - 1; what lies beyond is never attended to. Appending past the
    capacity is the caller's mistake and overwrites the last tokens.

    Attributes:
      lengths: int32[batch], tokens held.
    """

    layers: QuantizedLayerCache
    lengths: jax.Array

    @classmethod
    def empty(
        cls,
        *,
        layers: int,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        type: str = "int8",  # noqa: A002, as in `ArraySpec`
    ) -> "QuantizedKVCache":
        """A cache without tokens.

        Args:
          dtype: of the keys and values that the codes stand for.
          type: a name of `stack_quant.qtypes`.

        Raises:
          UnknownName: no such type.
          ArgumentError: it is not of 8 bits, or shares scales in another way.
        """
        kind = qtype(type)
        if kind.bits != _BITS or kind.block_size is not None:
            raise ArgumentError(
                f"A key-value cache of {type!r}: expected a type of 8 bits with a scale for each token, "
                "int8, fp8_e4m3 or fp8_e5m2."
            )
        zeros = _coded(jnp.zeros((layers, batch, kv_heads, capacity, head_dim), dtype), type)
        another = jax.tree.map(jnp.copy, zeros)
        return cls(QuantizedLayerCache(zeros, another), jnp.zeros((batch,), jnp.int32))

    @property
    def capacity(self) -> int:
        return self.layers.key.shape[-2]

    def attend(
        self,
        layer_cache: QuantizedLayerCache,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads head_dim"],
        spec: AttentionSpec,
    ) -> tuple[Float[Array, "batch seq heads head_dim"], QuantizedLayerCache]:
        """Appends key and value to one layer and attends, causally, to all it holds.

        Args:
          query: row r's query i stands at position lengths[r] + i.

        Returns:
          Output like query, and the layer with the new tokens; `lengths` is `advance`'s to change.
        """
        layer_cache = QuantizedLayerCache(self._append(layer_cache.key, key), self._append(layer_cache.value, value))
        output: Any = ops.attention(
            query,
            dequantize(layer_cache.key, query.dtype).swapaxes(1, 2),
            dequantize(layer_cache.value, query.dtype).swapaxes(1, 2),
            causal=True,
            query_offset=self.lengths,
            kv_lengths=self.lengths + query.shape[1],
            window=spec.window,
            softcap=spec.softcap,
            scale=spec.scale,
        )
        return output, layer_cache

    def advance(self, layers: QuantizedLayerCache, tokens: int) -> "QuantizedKVCache":
        """The cache after all layers appended `tokens` tokens a row."""
        return QuantizedKVCache(layers, self.lengths + tokens)

    def truncate(self, lengths: Int[Array, " batch"]) -> "QuantizedKVCache":
        """Forgets all but the first `lengths` tokens of each row: padding appended behind a prompt, say."""
        return dataclasses.replace(self, lengths=jnp.minimum(self.lengths, lengths))

    def _append(self, held: QArray, new: jax.Array) -> QArray:
        def write(row: jax.Array, update: jax.Array, start: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(row, update, start, axis=1)

        codes = _coded(new.swapaxes(1, 2), held.type)
        codes = dataclasses.replace(codes, dtype=held.dtype)
        return jax.tree.map(lambda row, update: jax.vmap(write)(row, update, self.lengths), held, codes)


def _coded(array: jax.Array, kind: str) -> QArray:
    """With a scale for each entry of all axes but the last."""
    return quantize(array, ArraySpec(type=kind, channel_axes=tuple(range(array.ndim - 1))))
