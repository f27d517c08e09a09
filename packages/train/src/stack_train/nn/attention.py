"""Grouped-query attention with the options of current decoders: windows, norms, sinks, soft caps and gates."""

from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from stack_core import ops
from stack_core.abi.caches import AttentionSpec, KeysValues, KVCache, LayerState
from stack_core.abi.errors import ConfigError
from stack_core.abi.mesh import LogicalAxes, constrain
from stack_core.ops.dual_chunk import DualChunk, attend_dual_chunks
from stack_train.nn.build import Build, Parameter
from stack_train.nn.context import ContextKeys, attend, check_unsplit_sequence, shared_sequence_tokens
from stack_train.nn.feed_forward import Facts
from stack_train.nn.max_logits import MaxLogits, record_logits
from stack_train.nn.residual import Hidden, Rows
from stack_train.nn.stack import named

__all__ = ["Attention", "GroupedAttention", "Mixer", "ReportsStatistics", "Rope", "Temperature"]

_HEADS, _KV_HEADS = ("batch", "seq", "act_heads", None), ("batch", "seq", "act_kv_heads", None)
_AXES: Final[dict[str, LogicalAxes]] = {"query": _HEADS, "key": _KV_HEADS, "value": _KV_HEADS}
"""Logical axes of the operands of `ops.attention`."""


@runtime_checkable
class Mixer(Protocol):
    """Hashable specification of a layer that mixes the tokens of a sequence."""

    def build(self, build: Build) -> Any:
        """Returns a module with the signature (x, rows, cache, layer_cache) -> (output, layer_cache)."""
        ...

    def state(self, repeats: int, dtype: str) -> LayerState | None:
        """Returns the specification of the cached state of `repeats` such layers, or None without a state."""
        ...


@runtime_checkable
class ReportsStatistics(Protocol):
    """Module of a `Mixer` whose forward pass has statistics."""

    def call_with_statistics(
        self, x: Hidden, rows: Rows, cache: KVCache | None, layer_cache: Any
    ) -> tuple[Hidden, Any, Facts]:
        """Returns output and cache of a call of the module, and statistics by name."""
        ...


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions; see `ops.rope`.

    Attributes:
      theta: base of the rotary frequencies.
      scaling: scaling for long contexts, or None.
      rotary_dim: number of leading features of a head to rotate; None rotates all.
      interleaved: rotates adjacent features as pairs, instead of features half of `rotary_dim` apart.
    """

    theta: float = 10_000.0
    scaling: ops.RopeScaling | None = None
    rotary_dim: int | None = None
    interleaved: bool = False

    def __call__(
        self, x: Float[Array, "batch seq heads head_dim"], positions: Int[Array, "batch seq"], heads: str | None
    ) -> Float[Array, "batch seq heads head_dim"]:
        """Rotates queries or keys; `heads` is the logical name of their head axis."""
        turned: Any = ops.rope(
            x,
            positions,
            theta=self.theta,
            scaling=self.scaling,
            interleaved=self.interleaved,
            rotary_dim=self.rotary_dim,
            axes={"x": ("batch", "seq", heads, None), "positions": ("batch", "seq")},
        )
        return turned

    def cached_positions(self, limit: int) -> int:
        """Returns the maximum number of tokens of a sequence that can be cached, at most `limit`.

        With some scalings, the rotation of all positions changes when a sequence exceeds this length, but cached keys
        are already rotated.
        """
        match self.scaling:
            case ops.DynamicScaling(max_position_embeddings=unscaled):
                return min(unscaled, limit)
            case ops.LongRopeScaling(original_max_position_embeddings=unscaled) as scaling:
                # With equal factors the rotation is the same at every length, and cached keys stay valid.
                return limit if scaling.short_factor == scaling.long_factor else min(unscaled, limit)
        return limit


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """Scale of queries that grows with their position p, 1 + rate ln(1 + floor((p + offset) / tokens)).

    Attributes:
      rate: growth of the scale.
      tokens: number of first positions with the scale 1, counted from -offset.
      offset: number added to positions.

    Source: Nakanishi, Scalable-Softmax Is Superior for Attention, 2025 (arXiv:2501.19399), in the variant of Llama 4.
    """

    rate: float
    tokens: int
    offset: int = 0

    def __call__(
        self, query: Float[Array, "batch seq heads head_dim"], positions: Int[Array, "batch seq"]
    ) -> Float[Array, "batch seq heads head_dim"]:
        """Multiplies queries by the scales of their positions."""
        steps = (positions + self.offset) // self.tokens
        scale = 1 + self.rate * jnp.log1p(steps.astype(jnp.float32))
        return query * scale[:, :, None, None].astype(query.dtype)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Causal grouped-query attention, y = softmax(scale rope(norm(x Q)) rope(norm(x K))^T) (x V) O.

    Attributes:
      heads: number of query heads.
      kv_heads: number of key-value heads, each shared by a group of query heads.
      head_dim: width of a head.
      rope: rotary positions; None disables positional encoding (NoPE; Kazemnejad et al., 2023, arXiv:2305.19466).
      window: size of the attention window in tokens, the query included; None attends to all tokens.
      chunk: number of consecutive tokens of a document that attend only to each other, instead of `window`; None
        disables chunks.
      dual_chunk: rotary positions of long sequences (`DualChunk`), or None.
      softcap: soft cap of the scores, or None.
      scale: scale of the scores; None is head_dim ** -0.5.
      temperature: scale of queries by their position, or None.
      bias: adds biases to queries, keys and values.
      output_bias: adds a bias to the output.
      head_norms: applies an RMS norm to each head of queries and keys.
      whole_norms: applies an RMS norm to queries and keys over all heads together.
      unit_norms: applies an RMS norm without a scale to each head of queries and keys, after their rotation.
      value_norms: applies an RMS norm without a scale to each head of values.
      keys_as_values: uses the projected keys, before their norm and rotation, in place of projected values.
      source: index of the layer whose keys and values the layer reads; None computes both. See `DecoderSpec`.
      is_source: a call without a cache returns the keys and values, for layers with this `source`.
      causal_images: lets tokens of images attend to earlier tokens only, as if `Rows.ahead` were None.
      sinks: adds a learned logit per head to the softmax's denominator.
      gated: multiplies the output by the sigmoid of a gate, which is the second half of each projected query head.
      context_keys: see `ContextKeys`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    window: int | None = None
    chunk: int | None = None
    dual_chunk: DualChunk | None = None
    softcap: float | None = None
    scale: float | None = None
    temperature: Temperature | None = None
    bias: bool = False
    output_bias: bool = False
    head_norms: bool = False
    whole_norms: bool = False
    unit_norms: bool = False
    value_norms: bool = False
    keys_as_values: bool = False
    source: int | None = None
    is_source: bool = False
    causal_images: bool = False
    sinks: bool = False
    gated: bool = False
    context_keys: ContextKeys = "ring"

    def __post_init__(self) -> None:
        if self.window is not None and self.chunk is not None:
            raise ConfigError(f"Attention has window={self.window} and chunk={self.chunk}; leave one of them out.")
        if self.dual_chunk is not None:
            self._check_dual_chunk()

    def _check_dual_chunk(self) -> None:
        """Raises a ConfigError for an option that dual chunk attention does not have."""
        scaling = None if self.rope is None else self.rope.scaling
        options = {
            "a window": self.window,
            "chunks": self.chunk,
            "a soft cap": self.softcap,
            "sinks": self.sinks or None,
            "a temperature": self.temperature,
            "shared keys": self.source,
            "a rope_scaling": scaling,
            "layers without rotary positions": True if self.rope is None else None,
        }
        if found := [name for name, value in options.items() if value is not None]:
            raise ConfigError(f"Dual chunk attention does not support {', '.join(found)}. Leave one of them out.")

    def build(self, build: Build) -> "GroupedAttention":
        return GroupedAttention(self, build)

    def state(self, repeats: int, dtype: str) -> KeysValues | None:
        if self.source is not None:
            return None
        return KeysValues(
            repeats=repeats,
            kv_heads=self.kv_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            window=self._visible,
            # Caches that store chunks in another way refuse both.
            chunk=self.chunk if self.dual_chunk is None else self.dual_chunk.stride,
            dtype=dtype,
        )

    @property
    def op_spec(self) -> AttentionSpec:
        """The options of `ops.attention`."""
        # The config counts the query's own token, `ops.attention` only earlier tokens.
        window = None if self._visible is None else (self._visible - 1, 0)
        return AttentionSpec(window=window, softcap=self.softcap, scale=self.scale, chunk=self.chunk)

    @property
    def _visible(self) -> int | None:
        """The most tokens that a query attends to, itself included; None if unlimited."""
        return self.window if self.chunk is None else self.chunk

    def segments(self, rows: Rows) -> Int[Array, "batch seq"] | ops.PackedSegments | None:
        """Returns ids of tokens that may attend to each other."""
        if self.chunk is None:
            return rows.segments
        # Adjacent chunks of a document differ, and the window hides earlier chunks.
        parity = rows.positions // self.chunk % 2
        return parity if rows.segment_ids is None else 2 * rows.segment_ids + parity


class GroupedAttention(nnx.Module):
    """Module of an `Attention`."""

    def __init__(self, spec: Attention, build: Build) -> None:
        embed, queries, keys = build.embed, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.spec, self.norm = spec, build.norm
        self.query = build.linear((embed, queries * (1 + spec.gated)), ("embed", "heads"), bias=spec.bias)
        computes_keys = spec.source is None
        project = lambda: build.linear((embed, keys), ("embed", "kv_heads"), bias=spec.bias)
        self.key = project() if computes_keys else None
        self.value = project() if computes_keys and not spec.keys_as_values else None
        self.output = build.linear((queries, embed), ("heads", "embed"), bias=spec.output_bias, residual=True)
        self.query_norm = self._scale(build, queries, "heads")
        self.key_norm = self._scale(build, keys, "kv_heads") if computes_keys else None
        self.sinks = build.full(spec.heads, "heads", 0.0) if spec.sinks else None
        self.max_logits: MaxLogits | None = nnx.data(None)

    def __call__(self, x: Hidden, rows: Rows, cache: KVCache | None, layer_cache: Any) -> tuple[Hidden, Any]:
        spec, gate = self.spec, None
        # `whole_norms` (OLMo 2) normalize all heads together, before the split; `head_norms` follow the split.
        query = self._heads(self._normed(self.query(x), self.query_norm, "act_heads"), "act_heads", "queries")
        if spec.gated:
            query, gate = jnp.split(query, 2, axis=-1)
        if self._uses_chunks(x, cache):
            output, layer_cache = self._attend_dual_chunks(x, query, rows, cache, layer_cache)
            return self._output(x, output, gate), layer_cache
        query = self._rotated(query, self.query_norm, rows, _HEADS)
        query = query if spec.temperature is None else spec.temperature(query, rows.positions)
        query = named(query, "query")
        # The arrays of another layer, or that layer's slice of the cache.
        source: Any = None if spec.source is None else (rows.shared or {})[spec.source]
        own: Any = self._keys_values(x, rows) if source is None else ()
        sinks = None if self.sinks is None else self.sinks[...]
        # Only calls with images pass it, which other caches may not know.
        images = {} if rows.ahead is None or spec.causal_images else {"ahead": rows.ahead}
        if cache is None:
            how = spec.op_spec
            key, value = own or source
            self._record(query, key, rows)
            output: Any = attend(
                query,
                key,
                value,
                segment_ids=spec.segments(rows),
                window=how.window,
                softcap=how.softcap,
                scale=how.scale,
                sinks=sinks,
                axes=_AXES if sinks is None else {**_AXES, "sinks": ("act_heads",)},
                context_keys=spec.context_keys,
                **images,
            )
            layer_cache = (key, value) if spec.is_source else None
        elif source is None:
            key, value = own
            output, layer_cache = cache.attend(layer_cache, query, key, value, spec.op_spec, sinks=sinks, **images)
        else:
            output = cache.attend_shared(source, query, spec.op_spec, sinks=sinks, **images)
        return self._output(x, output, gate), layer_cache

    def _output(self, x: jax.Array, output: jax.Array, gate: jax.Array | None) -> jax.Array:
        output = output if gate is None else output * jax.nn.sigmoid(gate)
        return self.output(named(output.reshape(*x.shape[:2], -1), "attention", by_op=True))

    def _uses_chunks(self, x: jax.Array, cache: KVCache | None) -> bool:
        """Returns whether tokens may be in different chunks."""
        dual = self.spec.dual_chunk
        return dual is not None and (cache is not None or shared_sequence_tokens(x.shape[1]) > dual.plain_tokens)

    def _attend_dual_chunks(
        self, x: jax.Array, query: jax.Array, rows: Rows, cache: Any, layer_cache: Any
    ) -> tuple[jax.Array, Any]:
        """Computes attention with the positions of `Attention.dual_chunk`.

        Raises:
          ShardingError: several devices share a sequence.
          ConfigError: the cache does not support it, or the call has images.
        """
        spec, dual = self.spec, self.spec.dual_chunk
        assert dual is not None
        check_unsplit_sequence("Dual chunk attention")
        if rows.ahead is not None or (cache is not None and not hasattr(cache, "attend_dual_chunk")):
            cause = "calls with images" if cache is None else f"a {type(cache).__name__}"
            raise ConfigError(f"Dual chunk attention does not support {cause}. Set model.dual_chunk=null.")
        key, value = self._keys_values(x, replace(rows, positions=dual.key_positions(rows.positions)))
        rotations = (replace(rows, positions=each) for each in dual.query_positions(rows.positions))
        queries = jnp.stack([self._rotated(query, self.query_norm, each, _HEADS) for each in rotations], axis=2)
        if (factor := dual.query_scale(rows.positions)) is not None:
            queries = queries * factor[:, :, None, None, None].astype(queries.dtype)
        queries = named(queries, "query")
        if cache is not None:
            found: Any = cache.attend_dual_chunk(layer_cache, queries, key, value, dual, scale=spec.scale)
            return found
        places = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        chunks, ids = rows.positions // dual.stride, rows.segment_ids
        segments = None if ids is None else (ids, ids)
        both: Any = {"chunks": (chunks, chunks), "segments": segments}
        return attend_dual_chunks(queries, key, value, places=places, scale=spec.scale, **both), None

    def recorder(self) -> MaxLogits:
        return MaxLogits(self.query.kernel.shape[0], self.spec.heads)

    def clip_refusal(self) -> str | None:
        spec = self.spec
        if spec.head_norms or spec.whole_norms or spec.unit_norms:
            return "its queries and keys are normalized (QK-norm), which undoes a scale of their projections"
        if spec.dual_chunk is not None:
            return "dual chunk attention has several logits for a query and a key"
        if spec.keys_as_values:
            return "its projected keys are also its values"
        if spec.source is not None or spec.is_source:
            return "several layers share its keys"
        return None

    def clip_factors(self, gamma: Float[Array, "repeats heads"]) -> dict[tuple[str, str], jax.Array]:
        """Returns the factors of `ClipsLogits`.

        A head with its own keys shares gamma equally between queries and keys. Keys of several query heads keep their
        scale, like the shared keys of latent attention: a factor would change the logits of their group.
        """
        spec, of_key = self.spec, jnp.sqrt(gamma)
        shared = spec.kv_heads != spec.heads
        of_query = jnp.repeat(gamma if shared else of_key, spec.head_dim, axis=1)
        if spec.gated:
            each = of_query.reshape(*gamma.shape, spec.head_dim)
            of_query = jnp.concatenate([each, jnp.ones_like(each)], axis=2).reshape(gamma.shape[0], -1)
        factors = (
            {"query": of_query} if shared else {"query": of_query, "key": jnp.repeat(of_key, spec.head_dim, axis=1)}
        )
        kernels = {(name, "kernel"): factor[:, None, :] for name, factor in factors.items()}
        return {**kernels, **({(name, "bias"): factor for name, factor in factors.items()} if spec.bias else {})}

    def _record(self, query: jax.Array, key: jax.Array, rows: Rows) -> None:
        spec = self.spec
        segments: Any = None if spec.chunk is None else spec.segments(rows)
        window = None if spec.op_spec.window is None else spec.op_spec.window[0]
        record_logits(self.max_logits, query, key, rows, scale=spec.scale, segments=segments, window=window)

    def _keys_values(self, x: Hidden, rows: Rows) -> tuple[jax.Array, jax.Array]:
        """Returns the layer's own keys and values, [batch, seq, kv_heads, head_dim]."""
        assert self.key is not None
        projected = self.key(x)
        key = self._heads(self._normed(projected, self.key_norm, "act_kv_heads"), "act_kv_heads", "keys")
        value = self._heads(projected if self.value is None else self.value(x), "act_kv_heads", "values")
        if self.spec.value_norms:
            value = self._unit_normed(value, _KV_HEADS)
        return named(self._rotated(key, self.key_norm, rows, _KV_HEADS), "key"), named(value, "value")

    def _heads(
        self, x: Float[Array, "batch seq features"], axis: str, name: str
    ) -> Float[Array, "batch seq heads head_dim"]:
        heads = self.spec.heads if axis == "act_heads" else self.spec.kv_heads
        return constrain(x.reshape(*x.shape[:2], heads, -1), "batch", "seq", axis, None, name=name)

    def _rotated(self, x: jax.Array, scale: Parameter | None, rows: Rows, axes: LogicalAxes) -> jax.Array:
        normed = self.norm(x, scale, axes) if self.spec.head_norms else x
        rotated = normed if self.spec.rope is None else self.spec.rope(normed, rows.rotary, axes[2])
        return self._unit_normed(rotated, axes) if self.spec.unit_norms else rotated

    def _unit_normed(self, x: jax.Array, axes: LogicalAxes) -> jax.Array:
        found: Any = ops.norm(x, epsilon=self.norm.epsilon, axes={"x": axes})
        return found

    def _normed(self, x: jax.Array, scale: Parameter | None, axis: str) -> jax.Array:
        return self.norm(x, scale, ("batch", "seq", axis)) if self.spec.whole_norms else x

    def _scale(self, build: Build, features: int, axis: str) -> Parameter | None:
        """Returns the scale of the query or key norm, or None without a norm."""
        if self.spec.whole_norms:
            return build.scale(features, axis)
        return build.scale(self.spec.head_dim, "head_dim") if self.spec.head_norms else None
