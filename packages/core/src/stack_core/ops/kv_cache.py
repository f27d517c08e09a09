"""KV cache with dense buffers for keys, values, latents and recurrent states."""

from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from stack_core import ops
from stack_core.abi.caches import AttentionSpec, KeysValues, Latent, LayerState, Recurrent, Transition
from stack_core.abi.errors import ArgumentError
from stack_core.abi.ops import ABI_MAJOR, ABI_MINOR, QView
from stack_core.ops.dual_chunk import DualChunk, attend_dual_chunks
from stack_core.ops.selection import KeySelection, attend_selected

__all__ = [
    "CODE_DTYPES",
    "CodedVectors",
    "DenseKVCache",
    "LatentCache",
    "LayerCache",
    "RecurrentCache",
    "ahead_mask",
    "coded",
]

_HELD = ("batch", None, "act_kv_heads", None)
_AXES: Final = {"query": ("batch", "seq", "act_heads", None), "key": _HELD, "value": _HELD}

CODE_DTYPES: Final = {"int8": jnp.int8, "fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}
"""Dtype of the stored codes for each quantized `CacheStorage`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CodedVectors:
    """Vectors quantized to 8-bit codes, each with its own scale.

    Invariant: value[..., i] = codes[..., i] * scales[..., 0].

    Attributes:
      codes: [..., features], int8 or fp8.
      scales: float32[..., 1].
    """

    codes: Any  # not always an array: JAX also builds this pytree from shapes, vmap axes and shardings
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def __stack_qview__(self) -> QView:
        return QView((ABI_MAJOR, ABI_MINOR), self.codes, self.scales, None, f"{self.codes.dtype}/vectors")


def coded(vectors: Float[Array, "*batch features"], dtype: Any) -> CodedVectors:
    """Quantizes vectors to the nearest codes.

    Each vector is scaled so that its largest magnitude maps to the largest code; a zero vector has scale 1.
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    most = np.float32(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    vectors = vectors.astype(jnp.float32)
    largest = jnp.max(jnp.abs(vectors), axis=-1, keepdims=True)
    # Not below the smallest normal number, since subnormal scales may be flushed to 0.
    scales = jnp.where(largest > 0, jnp.maximum(largest / most, np.finfo(np.float32).tiny), np.float32(1))
    values = jnp.clip(vectors / scales, -most, most)
    return CodedVectors((jnp.round(values) if is_integer else values).astype(dtype), scales)


def ahead_mask(
    positions: Int[Array, "batch seq"], keys: int, ahead: Int[Array, "batch seq"]
) -> Bool[Array, "batch 1 seq keys"]:
    """Returns the mask of queries that see their earlier keys, themselves and the next `ahead` keys."""
    last = positions + ahead
    return (jnp.arange(keys) <= last[:, :, None])[:, None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """Keys and values, [repeats, batch, kv_heads, capacity, features]; a single layer has no `repeats` axis.

    Heads precede positions because a decode step then reads each head's keys contiguously: 2-4x faster on CPU.
    """

    key: Any  # array or `CodedVectors`, like `value`
    value: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentCache:
    """Latents, [repeats, batch, 1, capacity, dim], with one head shared by all query heads.

    Attributes:
      latent: array or `CodedVectors`.
      index_key: keys of an indexer, [repeats, batch, 1, capacity, index_dim]; None without an indexer.
    """

    latent: Any
    index_key: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentCache:
    """Arrays of a recurrent state, each [repeats, batch, ...]."""

    arrays: tuple[Any, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseKVCache:
    """Dense `KVCache` with room for `capacity` tokens per row.

    Quantized, a head of n features takes (n + 4) / 2n of its bytes in bfloat16. Each token is rounded once, when it is
    appended. Attention reads the rounded keys and values, including the keys and values appended by the current call.

    Invariant: row r stores the keys of its tokens 0 .. lengths[r] - 1; later slots are never attended to. Appending
    beyond the capacity is a caller error and overwrites the last tokens.

    Attributes:
      layers: layer caches, a pytree with the structure of the model's `states`.
      lengths: int32[batch], number of stored tokens per row.
      expected: int32[batch], number of real tokens per row in the next call, followed by padding; None for a call
        without padding.
    """

    layers: Any
    lengths: Any  # not always an array: JAX also builds this pytree from shapes, vmap axes and shardings
    expected: Any = None

    @classmethod
    def empty(cls, states: Any, *, batch: int, capacity: int, storage: str = "model") -> "DenseKVCache":
        """Returns a cache without tokens.

        Args:
          states: the model's `states`.
          batch: number of rows.
          capacity: maximum number of tokens per row.
          storage: `CacheStorage` of keys, values and latents; recurrent states always keep the model's dtype.

        Raises:
          ArgumentError: unknown storage.
        """
        if storage != "model" and storage not in CODE_DTYPES:
            known = ", ".join(map(repr, ("model", *CODE_DTYPES)))
            raise ArgumentError(f"A cache with storage {storage!r}: expected one of {known}.")

        def zeros(state: KeysValues | Latent, heads: int, features: int) -> Any:
            plain = jnp.zeros((state.repeats, batch, heads, capacity, features), state.dtype)
            return plain if storage == "model" else coded(plain, CODE_DTYPES[storage])

        def layer(state: LayerState) -> Any:
            match state:
                case KeysValues(kv_heads=heads, key_dim=key_dim, value_dim=value_dim):
                    return LayerCache(zeros(state, heads, key_dim), zeros(state, heads, value_dim))
                case Latent(dim=dim, index_dim=index_dim):
                    return LatentCache(zeros(state, 1, dim), zeros(state, 1, index_dim) if index_dim else None)
                case Recurrent(repeats=repeats, shapes=shapes, dtypes=dtypes):
                    kinds = zip(shapes, dtypes, strict=True)
                    return RecurrentCache(tuple(jnp.zeros((repeats, batch, *shape), dtype) for shape, dtype in kinds))

        return cls(jax.tree.map(layer, states), jnp.zeros((batch,), jnp.int32))

    @property
    def capacity(self) -> int:
        """Maximum number of tokens per row; for caches with keys and values."""
        is_layer = lambda node: isinstance(node, LayerCache)
        layers = [node for node in jax.tree.leaves(self.layers, is_leaf=is_layer) if is_layer(node)]
        return layers[0].key.shape[-2]

    def attend(
        self,
        layer: LayerCache,
        query: Float[Array, "batch seq heads key_dim"],
        key: Float[Array, "batch seq kv_heads key_dim"],
        value: Float[Array, "batch seq kv_heads value_dim"],
        spec: AttentionSpec,
        *,
        sinks: Float[Array, " heads"] | None = None,
        ahead: Int[Array, "batch seq"] | None = None,
        bias: Float[Array, "#batch #heads #seq #capacity"] | None = None,
    ) -> tuple[Float[Array, "batch seq heads value_dim"], LayerCache]:
        """Appends key and value to one layer and computes causal attention over its contents.

        Args:
          query: queries; query i of row r is at position lengths[r] + i.
          ahead: number of later tokens of this call that each query attends to as well.
          bias: biases of the scores; see `ops.attention`.

        Returns:
          The output, and the layer with the new keys and values. `lengths` changes only in `advance`.
        """
        layer = LayerCache(self._append(layer.key, key), self._append(layer.value, value))
        return self._attention_over(layer, query, spec, sinks, ahead, bias), layer

    def attend_shared(
        self,
        layer: LayerCache,
        query: Float[Array, "batch seq heads key_dim"],
        spec: AttentionSpec,
        *,
        sinks: Float[Array, " heads"] | None = None,
        ahead: Int[Array, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq heads value_dim"]:
        """Computes causal attention over another layer, to which this call has already appended its tokens."""
        return self._attention_over(layer, query, spec, sinks, ahead)

    def attend_dual_chunk(
        self,
        layer: LayerCache,
        queries: Float[Array, "batch seq regions heads key_dim"],
        key: Float[Array, "batch seq kv_heads key_dim"],
        value: Float[Array, "batch seq kv_heads value_dim"],
        dual_chunk: DualChunk,
        *,
        scale: float | None,
    ) -> tuple[Float[Array, "batch seq heads value_dim"], LayerCache]:
        """Appends rotated key and value to one layer and computes dual chunk attention over its contents.

        Args:
          queries: queries with the rotations of `DualChunk.query_positions`.
        """
        layer = LayerCache(self._append(layer.key, key), self._append(layer.value, value))
        keys, values = (ops.dequantize(x, queries.dtype).swapaxes(1, 2) for x in (layer.key, layer.value))
        places = self.lengths[:, None] + jnp.arange(queries.shape[1])
        stored = jnp.broadcast_to(jnp.arange(keys.shape[1]), keys.shape[:2])
        chunks = places // dual_chunk.stride, stored // dual_chunk.stride
        return attend_dual_chunks(queries, keys, values, places=places, chunks=chunks, scale=scale), layer

    def attend_latent(
        self,
        layer: LatentCache,
        query: Float[Array, "batch seq heads dim"],
        latent: Float[Array, "batch seq dim"],
        spec: AttentionSpec,
        *,
        value_dim: int,
        index: KeySelection | None = None,
    ) -> tuple[Float[Array, "batch seq heads value_dim"], LatentCache]:
        """Appends latents to one layer and computes causal attention over its contents.

        Args:
          index: operands by which each query selects the latents that it attends to; None attends to all.
        """
        index_key = None if index is None else self._append(layer.index_key, index.key[:, :, None])
        layer = LatentCache(self._append(layer.latent, latent[:, :, None]), index_key)
        keys = ops.dequantize(layer.latent, query.dtype)
        if index is None or keys.shape[2] <= index.count:
            return self._attention(query, keys, keys[..., :value_dim], spec, None), layer
        keys, index_keys = keys.swapaxes(1, 2), ops.dequantize(index_key, index.query.dtype)[:, 0]
        positions = self.lengths[:, None] + jnp.arange(query.shape[1])
        selection = replace(index, key=index_keys)
        values = keys[..., :value_dim]
        output = attend_selected(query, keys, values, selection, positions=positions, scale=spec.scale, axes=_AXES)
        return output, layer

    def recur(self, layer: RecurrentCache, transition: Transition, *inputs: jax.Array) -> tuple[Any, RecurrentCache]:
        """Runs a recurrence over the call's tokens; padding beyond `expected` tokens does not change the state."""
        batch, seq = inputs[0].shape[:2]
        # Attention ignores padding by its lengths, but a state would absorb padding.
        counted = jnp.full((batch,), seq) if self.expected is None else self.expected
        output, arrays = transition(layer.arrays, jnp.arange(seq) < counted[:, None], *inputs)
        kept = zip(arrays, layer.arrays, strict=True)
        return output, RecurrentCache(tuple(new.astype(old.dtype) for new, old in kept))

    def expecting(self, tokens: Int[Array, " batch"]) -> "DenseKVCache":
        """Returns the cache for a padded call in which only the first `tokens[r]` tokens of row r are real."""
        return replace(self, expected=tokens)

    def advance(self, layers: Any, tokens: int) -> "DenseKVCache":
        """Returns the cache after all layers appended `tokens` tokens per row, or `expected` tokens if set."""
        return DenseKVCache(layers, self.lengths + (tokens if self.expected is None else self.expected))

    def _attention_over(
        self, layer: LayerCache, query: Any, spec: AttentionSpec, sinks: Any, ahead: Any, bias: Any = None
    ) -> Any:
        keys, values = (ops.dequantize(stored, query.dtype) for stored in (layer.key, layer.value))
        return self._attention(query, keys, values, spec, sinks, ahead, bias)

    def _attention(
        self,
        query: Any,
        keys: Any,
        values: Any,
        spec: AttentionSpec,
        sinks: Any,
        ahead: Any = None,
        bias: Any = None,
    ) -> Any:
        segment_ids, mask, window = None, None, spec.window
        if ahead is not None:
            positions = self.lengths[:, None] + jnp.arange(query.shape[1])
            mask = ahead_mask(positions, keys.shape[2], ahead)
            # The mask hides later keys.
            window = None if window is None else (window[0], None)
        if spec.chunk is not None:
            # The window reaches into one earlier chunk at most, which has the other parity.
            at = self.lengths[:, None] + jnp.arange(query.shape[1]), jnp.arange(keys.shape[2])[None]
            of_query, of_keys = (positions // spec.chunk % 2 for positions in at)
            segment_ids = (of_query, jnp.broadcast_to(of_keys, (len(of_query), keys.shape[2])))
        return ops.attention(
            query,
            keys.swapaxes(1, 2),
            values.swapaxes(1, 2),
            causal=ahead is None,
            query_offset=self.lengths,
            kv_lengths=self.lengths + query.shape[1],
            window=window,
            bias=bias,
            mask=mask,
            segment_ids=segment_ids,
            softcap=spec.softcap,
            scale=spec.scale,
            sinks=sinks,
            axes=_AXES if bias is None else {**_AXES, "bias": (None, "act_heads", None, None)},
        )

    def _append(self, stored: Any, new: jax.Array) -> Any:
        def write(row: jax.Array, update: jax.Array, start: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(row, update.astype(row.dtype), start, axis=1)

        new = new.swapaxes(1, 2)
        update = coded(new, stored.codes.dtype) if isinstance(stored, CodedVectors) else new
        # Each row has its own length, so each writes at another place.
        return jax.tree.map(lambda rows, part: jax.vmap(write)(rows, part, self.lengths), stored, update)
