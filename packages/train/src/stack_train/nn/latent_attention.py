"""Multi-head latent attention, with keys and values projected from one low-rank latent per token.

Source: DeepSeek-AI, DeepSeek-V2, 2024 (arXiv:2405.04434), section 2.1.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from stack_core import ops
from stack_core.abi.caches import AttentionSpec, KVCache, Latent
from stack_core.abi.errors import ConfigError
from stack_core.abi.mesh import constrain
from stack_core.ops.selection import KeySelection
from stack_train.nn.attention import Rope
from stack_train.nn.build import Build
from stack_train.nn.context import ContextKeys, attend, shared_sequence_tokens
from stack_train.nn.feed_forward import Facts
from stack_train.nn.indexer import Indexer, attend_indexed
from stack_train.nn.max_logits import MaxLogits, record_logits
from stack_train.nn.quantized import read_weight
from stack_train.nn.residual import Hidden, Norm, Rows
from stack_train.nn.stack import named

__all__ = ["LatentAttention", "MultiHeadLatentAttention"]

_LATENT = ("batch", "seq", None)


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Latent attention: a head's keys are [c K, rope(k)] and its values c V.

    c = norm(x C) is the token's latent, and k = x R is one rotated key shared by all heads. Without a cache, keys and
    values are projected from c. A cache stores only [c, rope(k)]: K is then applied to the queries and V to the
    attention output, which gives the same result without projecting the cached latents.

    Attributes:
      heads: number of heads.
      query_rank: width of the query latent; None projects queries directly from x.
      kv_rank: width of c.
      nope_dim: width of the part of query and key heads without rotary positions.
      rope_dim: width of the part of query and key heads with rotary positions.
      value_dim: width of value heads.
      rope: rotary positions.
      scale: scale of the scores.
      context_keys: see `ContextKeys`.
      indexer: selects keys for each query; requires a query latent. None selects all keys.
    """

    heads: int
    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: Rope
    scale: float
    context_keys: ContextKeys = "ring"
    indexer: Indexer | None = None

    def __post_init__(self) -> None:
        if self.indexer is not None and self.query_rank is None:
            raise ConfigError("Latent attention has an indexer, which reads the query latent. Set query_rank.")

    def build(self, build: Build) -> "MultiHeadLatentAttention":
        return MultiHeadLatentAttention(self, build)

    def state(self, repeats: int, dtype: str) -> Latent:
        index_dim = 0 if self.indexer is None else self.indexer.dim
        dim = self.kv_rank + self.rope_dim
        return Latent(repeats=repeats, dim=dim, value_dim=self.kv_rank, dtype=dtype, index_dim=index_dim)


class MultiHeadLatentAttention(nnx.Module):
    """Module of a `LatentAttention`."""

    def __init__(self, spec: LatentAttention, build: Build) -> None:
        embed, heads, rank = build.embed, spec.heads, spec.query_rank
        queries, unfolded = heads * (spec.nope_dim + spec.rope_dim), heads * (spec.nope_dim + spec.value_dim)
        self.spec, self.norm = spec, Norm()  # for the latents; config.json does not set its epsilon
        self.query_down = None if rank is None else build.linear((embed, rank), ("embed", None))
        self.query_norm = None if rank is None else build.full(rank, "norm", 1.0)
        self.query_up = None if rank is None else build.linear((rank, queries), ("latent", "heads"))
        self.query = build.linear((embed, queries), ("embed", "heads")) if rank is None else None
        self.kv_down = build.linear((embed, spec.kv_rank + spec.rope_dim), ("embed", None))
        self.kv_norm = build.full(spec.kv_rank, "norm", 1.0)
        self.kv = build.linear((spec.kv_rank, unfolded), ("latent", "heads"))
        self.output = build.linear((heads * spec.value_dim, embed), ("heads", "embed"), residual=True)
        indexer = spec.indexer
        self.indexer = indexer.build(build.child(), rank) if indexer is not None and rank is not None else None
        self.max_logits: MaxLogits | None = nnx.data(None)

    def __call__(self, x: Hidden, rows: Rows, cache: KVCache | None, layer_cache: Any) -> tuple[Hidden, Any]:
        return self.call_with_statistics(x, rows, cache, layer_cache)[:2]

    def call_with_statistics(
        self, x: Hidden, rows: Rows, cache: KVCache | None, layer_cache: Any
    ) -> tuple[Hidden, Any, Facts]:
        """Returns the output, the layer's slice of the cache, and the facts of its indexer; see `attend_indexed`."""
        spec, shape, facts = self.spec, x.shape[:2], Facts()
        query_latent, query = self._queries(x)
        query = constrain(query.reshape(*shape, spec.heads, -1), "batch", "seq", "act_heads", None)
        still, turning = jnp.split(query, [spec.nope_dim], axis=-1)
        turning = spec.rope(turning, rows.positions, "act_heads")
        latent, key = jnp.split(self.kv_down(x), [spec.kv_rank], axis=-1)
        latent = self.norm(latent, self.kv_norm, _LATENT)
        # A head axis of size 1, since all heads share this key; its logical name is None, so it is never split.
        key = spec.rope(key[:, :, None, :], rows.positions, None)
        # Without a cache, short sequences select all keys, which needs no scores unless they are trained.
        selects = self.indexer is not None and (
            cache is not None
            or self.indexer.spec.training != "frozen"
            or shared_sequence_tokens(shape[1]) > self.indexer.spec.count
        )
        selection = self.indexer(x, query_latent, rows) if self.indexer is not None and selects else None
        if cache is None:
            output, facts = self._unfolded(jnp.concatenate([still, turning], axis=-1), latent, key, rows, selection)
        else:
            output, layer_cache = self._absorbed(still, turning, latent, key, cache, layer_cache, selection)
        return self.output(named(output.reshape(*shape, -1), "attention", by_op=True)), layer_cache, facts

    def recorder(self) -> MaxLogits:
        return MaxLogits(self.kv.kernel.shape[0], self.spec.heads)

    def clip_refusal(self) -> str | None:
        return None if self.indexer is None else "its indexer selects the keys of each query"

    def clip_factors(self, gamma: Float[Array, "repeats heads"]) -> dict[tuple[str, str], jax.Array]:
        """Returns the factors of `ClipsLogits`.

        The parts without positions share gamma equally. The rotated key belongs to all heads, so its queries take all.
        """
        spec = self.spec
        root, ones = jnp.sqrt(gamma)[:, :, None], jnp.ones((*gamma.shape, spec.value_dim))
        still = jnp.broadcast_to(root, (*gamma.shape, spec.nope_dim))
        turning = jnp.broadcast_to(gamma[:, :, None], (*gamma.shape, spec.rope_dim))
        query = "query" if spec.query_rank is None else "query_up"
        # Both kernels are [repeats, d_in, heads * (part + part)].
        parts = {query: (still, turning), "kv": (still, ones)}
        flat = {name: jnp.concatenate(each, axis=2).reshape(gamma.shape[0], 1, -1) for name, each in parts.items()}
        return {(name, "kernel"): factor for name, factor in flat.items()}

    def _queries(self, x: Hidden) -> tuple[Any, jax.Array]:
        """Returns the query latent, or None without one, and the queries of all heads."""
        if self.query_down is None or self.query_up is None:
            assert self.query is not None
            return None, self.query(x)
        latent = self.norm(self.query_down(x), self.query_norm, _LATENT)
        return latent, self.query_up(latent)

    def _unfolded(
        self, query: jax.Array, latent: jax.Array, rotated_key: jax.Array, rows: Rows, selection: KeySelection | None
    ) -> tuple[jax.Array, Facts]:
        spec = self.spec
        unfolded = self.kv(latent).reshape(*latent.shape[:2], spec.heads, -1)
        unfolded = constrain(unfolded, "batch", "seq", "act_heads", None)
        key, value = jnp.split(unfolded, [spec.nope_dim], axis=-1)
        # Without a cache this is ordinary attention, which needs the shared key in every head.
        rotated_key = jnp.broadcast_to(rotated_key, (*key.shape[:3], spec.rope_dim))
        key = jnp.concatenate([key, rotated_key], axis=-1)
        axes: dict[str, Any] = dict.fromkeys(("query", "key", "value"), ("batch", "seq", "act_heads", None))
        if selection is not None and spec.indexer is not None:
            options: Any = {"training": spec.indexer.training, "scale": spec.scale, "axes": axes}
            return attend_indexed(query, key, value, selection, rows, **options)
        record_logits(self.max_logits, query, key, rows, scale=spec.scale)
        output = attend(
            query,
            key,
            value,
            scale=spec.scale,
            segment_ids=rows.segments,
            axes=axes,
            context_keys=spec.context_keys,
        )
        return output, {}

    def _absorbed(
        self,
        still: jax.Array,
        turning: jax.Array,
        latent: jax.Array,
        rotated_key: jax.Array,
        cache: KVCache,
        layer_cache: Any,
        selection: KeySelection | None,
    ) -> tuple[jax.Array, Any]:
        spec = self.spec
        kernel = ops.dequantize(read_weight(self.kv.kernel, latent.dtype), latent.dtype).reshape(
            spec.kv_rank, spec.heads, -1
        )
        to_keys, to_values = jnp.split(kernel, [spec.nope_dim], axis=-1)
        query = jnp.concatenate([jnp.einsum("bshn,lhn->bshl", still, to_keys), turning], axis=-1)
        kept = jnp.concatenate([latent, rotated_key[:, :, 0, :]], axis=-1)
        # The default scale would follow the width of the latent, not the width of the model's heads.
        attention = AttentionSpec(scale=spec.scale)
        # Only layers with an indexer pass it, which other caches may not know.
        index: Any = {} if selection is None else {"index": selection}
        output, layer_cache = cache.attend_latent(layer_cache, query, kept, attention, value_dim=spec.kv_rank, **index)
        return jnp.einsum("bshl,lhv->bshv", output, to_values), layer_cache
