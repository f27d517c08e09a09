"""Attention to a window of tokens and to compressed entries of all earlier tokens.

Source: DeepSeek-AI, DeepSeek-V4, 2026, section 2.3, as in transformers' `DeepseekV4Attention`.
"""

from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from stack_core import ops
from stack_core.abi.caches import AttentionSpec, KeysValues, KVCache, LayerState, Recurrent
from stack_core.abi.mesh import LogicalAxes, constrain
from stack_core.ops.query_blocks import block_rows, map_query_blocks
from stack_core.ops.selection import index_scores, selected_keys
from stack_train.nn.attention import Rope
from stack_train.nn.build import Build
from stack_train.nn.compressor import (
    Compressor,
    EntryIndexer,
    Windows,
    cached_windows,
    complete_windows,
    rotate_trailing,
)
from stack_train.nn.context import ContextKeys, attend, check_unsplit_sequence
from stack_train.nn.quantized import read_weight
from stack_train.nn.residual import Hidden, Rows
from stack_train.nn.short_convolution import next_tail
from stack_train.nn.stack import named

__all__ = ["CompressedAttention", "SharedKeyAttention"]

_QUERY, _KEY = ("batch", "seq", "act_heads", None), ("batch", None, None, None)
_AXES: Final[dict[str, LogicalAxes]] = {"query": _QUERY, "key": _KEY, "value": _KEY, "sinks": ("act_heads",)}
_BLOCK_TOKENS = 512
"""Number of queries that are computed at a time in complete rows."""


@dataclass(frozen=True, kw_only=True)
class CompressedAttention:
    """Attention with one key per token that is also its value and is shared by all heads, and with entries as keys.

        q = rope(norm(norm(x C) Q))      k = rope(norm(x K))      o = rope^-1(softmax(scale q k^T) k)      y = (o A) B

    A token sees the last `window` tokens, and the entries of a `Compressor` after their last tokens. Only the last
    features of heads have rotary positions. Values are rotated with the keys, so outputs are rotated back at the
    position of the query. Each head has a sink. A is block-diagonal, with one block for each group of heads.

    A layer without a compressor caches the keys of its window. Otherwise the state of a sequence has room for the
    entries of `max_tokens` tokens, besides the last tokens that later entries and queries read.

    Attributes:
      heads: number of heads.
      head_dim: width of a head.
      query_rank: width of the query latent x C.
      groups: number of groups of heads in the output projection.
      output_rank: width of a group's part of o A.
      window: size of the window in tokens, the query included, at least 2.
      rope: rotary positions of the last `rotary_dim` features of heads.
      compressor: compression of tokens to entries; None omits entries.
      indexer: selects entries for each query; None selects all.
      max_tokens: maximum length of a cached sequence.
      context_keys: see `ContextKeys`; a layer with a compressor does not split sequences.
    """

    heads: int
    head_dim: int
    query_rank: int
    groups: int
    output_rank: int
    window: int
    rope: Rope
    compressor: Compressor | None = None
    indexer: EntryIndexer | None = None
    max_tokens: int
    context_keys: ContextKeys = "ring"

    def build(self, build: Build) -> "SharedKeyAttention":
        return SharedKeyAttention(self, build)

    def state(self, repeats: int, dtype: str) -> LayerState:
        dim, compressors = self.head_dim, self.compressors
        if not compressors:
            kind: Any = {"repeats": repeats, "dtype": dtype, "window": self.window}
            return KeysValues(kv_heads=1, key_dim=dim, value_dim=dim, **kind)
        shapes: list[tuple[int, ...]] = [(self.window - 1, dim)]
        for each in compressors:
            shapes += [(each.tail, 2 * each.width), (self.max_tokens // each.rate, each.dim)]
        return Recurrent(repeats=repeats, shapes=tuple(shapes), dtypes=(dtype,) * len(shapes))

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        """The compressor of keys, and the compressor of the indexer's keys."""
        if self.compressor is None:
            return ()
        return (self.compressor,) if self.indexer is None else (self.compressor, self.indexer.compressor)


class SharedKeyAttention(nnx.Module):
    """Module of a `CompressedAttention`."""

    def __init__(self, spec: CompressedAttention, build: Build) -> None:
        embed, width, rank = build.embed, spec.heads * spec.head_dim, spec.groups * spec.output_rank
        self.spec, self.norm = spec, build.norm
        self.query_down = build.linear((embed, spec.query_rank), ("embed", None))
        self.query_norm = build.scale(spec.query_rank)
        self.query_up = build.linear((spec.query_rank, width), ("latent", "heads"))
        self.kv = build.linear((embed, spec.head_dim), ("embed", None))
        self.kv_norm = build.scale(spec.head_dim, "head_dim")
        self.sinks = build.full(spec.heads, "heads", 0.0, dtype="float32")
        # The blocks of A, one for each group of heads.
        self.output_down = build.normal((spec.groups, width // spec.groups, spec.output_rank), ("heads", None, None))
        self.output = build.linear((rank, embed), ("heads", "embed"), residual=True)
        self.compressor = None if spec.compressor is None else spec.compressor.build(build.child())
        self.indexer = None if spec.indexer is None else spec.indexer.build(build.child(), spec.query_rank)

    def __call__(self, x: Hidden, rows: Rows, cache: KVCache | None, layer_cache: Any) -> tuple[Hidden, Any]:
        spec = self.spec
        latent = self.norm(self.query_down(x), self.query_norm, ("batch", "seq", None))
        query = self.query_up(latent).reshape(*x.shape[:2], spec.heads, -1)
        query = constrain(query, *_QUERY, name="queries")
        normed: Any = ops.norm(query, epsilon=self.norm.epsilon, axes={"x": _QUERY})
        query = named(rotate_trailing(spec.rope, normed, rows.positions, "act_heads"), "query")
        key = self.norm(self.kv(x), self.kv_norm, ("batch", "seq", None))[:, :, None]
        key = named(rotate_trailing(spec.rope, key, rows.positions, None), "key")
        if self.compressor is None:
            output, layer_cache = self._attend_window(query, key, rows, cache, layer_cache)
        else:
            index = () if self.indexer is None else self.indexer(x, latent, rows)
            features = [each.project(x) for each in self._compressors]
            if cache is None:
                check_unsplit_sequence("Attention to compressed tokens")
                output = self._attend_rows(query, key, rows, features, index)
            else:
                operands = (query, key[:, :, 0], rows.positions, *features, *index)
                output, layer_cache = cache.recur(layer_cache, self._step, *operands)
        output = rotate_trailing(spec.rope, named(output, "attention", by_op=True), -rows.positions, "act_heads")
        return self.output(self._by_group(output)), layer_cache

    @property
    def _compressors(self) -> list[Any]:
        return [self.compressor, *([] if self.indexer is None else [self.indexer.compressor])]

    def _by_group(self, output: Float[Array, "batch seq heads head_dim"]) -> Float[Array, "batch seq features"]:
        """Projects each group of heads."""
        groups, shape = self.spec.groups, output.shape[:2]
        weight = read_weight(self.output_down, output.dtype)
        weight = ops.dequantize(weight, output.dtype)
        projected = jnp.einsum("bsgi,gir->bsgr", output.reshape(*shape, groups, -1), weight)
        return projected.reshape(*shape, -1)

    def _attend_window(
        self, query: jax.Array, key: jax.Array, rows: Rows, cache: KVCache | None, layer_cache: Any
    ) -> tuple[jax.Array, Any]:
        """Computes attention to the tokens of the window."""
        window, scale, sinks = (self.spec.window - 1, 0), self.spec.head_dim**-0.5, self.sinks[...]
        if cache is not None:
            return cache.attend(layer_cache, query, key, key, AttentionSpec(window=window, scale=scale), sinks=sinks)
        axes = {**_AXES, "key": ("batch", "seq", None, None), "value": ("batch", "seq", None, None)}
        options: Any = {"window": window, "scale": scale, "context_keys": self.spec.context_keys}
        return attend(query, key, key, segment_ids=rows.segments, sinks=sinks, axes=axes, **options), layer_cache

    def _attend_rows(
        self, query: jax.Array, key: jax.Array, rows: Rows, features: list[jax.Array], index: tuple[jax.Array, ...]
    ) -> jax.Array:
        """Computes attention in complete rows, one block of queries at a time.

        A block reads only the keys of its window, so the products grow linearly with the sequence, except with entries.
        """
        batch, seq = query.shape[:2]
        size, earlier = block_rows(seq, _BLOCK_TOKENS), self.spec.window - 1
        windows = complete_windows(rows, self.spec.compressors[0].rate)
        entries = [module.pool(each, windows) for module, each in zip(self._compressors, features, strict=True)]
        # Entries become visible at the index of their last token; others stay behind all queries.
        ends = jnp.where(windows.complete, windows.last, seq)
        ids = rows.segment_ids
        end_ids = None if ids is None else jnp.take_along_axis(ids, windows.last, axis=1)
        padded = jnp.pad(key, ((0, 0), (earlier, -seq % size), (0, 0), (0, 0)))
        padded_ids = None if ids is None else jnp.pad(ids, ((0, 0), (earlier, -seq % size)))

        def attend_block(block: tuple[Any, ...]) -> jax.Array:
            numbers, query, *index = block
            start = numbers[0, 0]
            own = lax.dynamic_slice_in_dim(padded, start, size + earlier, axis=1)
            places = jnp.broadcast_to(start - earlier + jnp.arange(size + earlier), (batch, size + earlier))
            segments = None
            if padded_ids is not None and end_ids is not None:
                segments = (lax.dynamic_slice_in_dim(padded_ids, start, size + earlier, axis=1), end_ids)
            return self._attend(query, own, places, entries, ends, tuple(index), segments)

        numbers = jnp.broadcast_to(jnp.arange(seq), (batch, seq))
        output: jax.Array = map_query_blocks(attend_block, (numbers, query, *index), _BLOCK_TOKENS)
        return output

    def _step(
        self, state: tuple[jax.Array, ...], valid: jax.Array, query: jax.Array, key: jax.Array, *operands: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Appends tokens to the state of their sequences and computes their attention; see `Transition`."""
        positions, count = operands[0], len(self._compressors)
        features, index = operands[1 : 1 + count], operands[1 + count :]
        seq, first, counts = key.shape[1], positions[:, 0], jnp.sum(valid, axis=1)
        keys = jnp.concatenate([state[0].astype(key.dtype), key], axis=1)
        new_state, entries = [next_tail(keys, seq, valid)], list[jax.Array]()
        for place, (module, of_tokens) in enumerate(zip(self._compressors, features, strict=True)):
            tail, stored = state[1 + 2 * place : 3 + 2 * place]
            spec: Compressor = module.spec
            tokens = jnp.concatenate([tail.astype(of_tokens.dtype), of_tokens], axis=1)
            windows = cached_windows(first, counts, seq, tail=spec.tail, rate=spec.rate)
            stored = _with_entries(stored, module.pool(tokens, windows), windows, spec.rate)
            new_state += [next_tail(tokens, seq, valid), stored]
            entries.append(stored.astype(of_tokens.dtype))
        rate = self.spec.compressors[0].rate
        # Entries that do not exist yet end after all queries.
        ends = jnp.broadcast_to(rate * jnp.arange(1, entries[0].shape[1] + 1) - 1, entries[0].shape[:2])
        places = first[:, None] - self.spec.window + 1 + jnp.arange(keys.shape[1])
        output = self._attend(query, keys[:, :, None], places, entries, ends, index, None)
        return output, tuple(new_state)

    def _attend(
        self,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch keys 1 head_dim"],
        places: Int[Array, "batch keys"],
        entries: list[jax.Array],
        ends: Int[Array, "batch entries"],
        index: tuple[jax.Array, ...],
        segments: tuple[Int[Array, "batch keys"], Int[Array, "batch entries"]] | None,
    ) -> Float[Array, "batch seq heads head_dim"]:
        """Computes attention of queries to tokens and entries.

        Args:
          key: keys of the `window - 1` tokens before the first query, and of the queries.
          places: increasing numbers of these tokens, negative for tokens that do not exist.
          entries: entries, and their keys for the indexer.
          ends: number of each entry's last token.
          index: queries and weights of the indexer; empty without one.
          segments: segments of the tokens and of the entries; None for rows of one segment.
        """
        spec = self.spec
        own = places[:, spec.window - 1 :, None]
        sees = (places[:, None] >= 0) & (places[:, None] <= own) & (places[:, None] > own - spec.window)
        reads = ends[:, None] <= own
        if segments is not None:
            of_tokens, of_entries = segments
            ids = of_tokens[:, spec.window - 1 :, None]
            sees, reads = sees & (of_tokens[:, None] == ids), reads & (of_entries[:, None] == ids)
        if spec.indexer is not None:
            stopped = (lax.stop_gradient(each) for each in (*index, entries[1]))
            reads = selected_keys(index_scores(*stopped), reads, spec.indexer.count)
        keys = jnp.concatenate([key, entries[0][:, :, None]], axis=1)
        mask = jnp.concatenate([sees, reads], axis=2)[:, None]
        axes = {**_AXES, "mask": ("batch", None, None, None)}
        output: Any = ops.attention(
            query, keys, keys, mask=mask, scale=spec.head_dim**-0.5, sinks=self.sinks[...], axes=axes
        )
        return output


def _with_entries(
    stored: Float[Array, "batch entries dim"], new: Float[Array, "batch new dim"], windows: Windows, rate: int
) -> Float[Array, "batch entries dim"]:
    """Writes entries to their places; windows that are not complete, or beyond the last place, are dropped."""
    places = jnp.where(windows.complete, windows.starts // rate, stored.shape[1])
    return jax.vmap(lambda row, place, value: row.at[place].set(value.astype(row.dtype), mode="drop"))(
        stored, places, new
    )
