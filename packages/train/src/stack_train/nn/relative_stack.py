"""Stacks of layers with relative positions: the encoder and the decoder of T5.

Source: Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, 2020
(arXiv:1910.10683).
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from stack_core.ops.kv_cache import DenseKVCache
from stack_train.nn.build import Build
from stack_train.nn.feed_forward import Gated, Plain
from stack_train.nn.linear import FloatName
from stack_train.nn.relative_attention import RelativeAttention, RelativePositions, bias_of
from stack_train.nn.residual import STREAM, Hidden, Norm, Rows, gather_sequence, shard_residual
from stack_train.nn.stack import scan_layers

__all__ = ["EncodedSource", "Stack", "StackBlock", "StackSpec"]


@dataclass(frozen=True, kw_only=True)
class StackSpec:
    """Identical layers of an encoder or a decoder, followed by a norm.

        a = x + attention(norm(x));   b = a + source_attention(norm(a));   y = b + feed_forward(norm(b))

    An encoder's layers lack the term b.

    Attributes:
      layers: number of layers.
      heads: number of attention heads.
      head_dim: width of a head.
      feed_forward: specification of the feed-forward layers.
      positions: buckets of relative positions.
      is_decoder: attention is causal, and layers also attend to the source.
      layer_biases: every layer has its own biases of the buckets; otherwise all layers share them.
    """

    layers: int
    heads: int
    head_dim: int
    feed_forward: Gated | Plain
    positions: RelativePositions
    is_decoder: bool = False
    layer_biases: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EncodedSource:
    """The source as all layers of a decoder attend to it.

    Attributes:
      keys, values: [layers, batch, source_seq, heads, head_dim].
      segment_ids: int[batch, source_seq], 0 for padding; None without padding.
    """

    keys: Any
    values: Any
    segment_ids: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _LayerInputs:
    """Inputs that are the same for all layers of a stack.

    Attributes:
      rows: segments of the tokens.
      bias: biases of the scores, [#batch, heads, seq, keys]; for layers with their own biases, the buckets
        [#batch, seq, keys].
      source: hidden states of the source, [batch, source_seq, embed]; None if keys and values are given per layer.
      source_segments: segments of queries and source, or None.
    """

    rows: Rows
    bias: Any
    source: Any = None
    source_segments: Any = None


class StackBlock(nnx.Module):
    """Module of the layers of a `StackSpec`. Its parameters are stacked, [layers, ...]; a call uses one layer's."""

    def __init__(self, spec: StackSpec, build: Build) -> None:
        self.norm, self.is_decoder = build.norm, spec.is_decoder
        factor = build.std * build.embed**0.5
        self.attention_norm = build.scale(build.embed)
        self.attention = self._attention(spec, build, factor)
        self.source_norm = build.scale(build.embed) if spec.is_decoder else None
        self.source_attention = self._attention(spec, build, factor) if spec.is_decoder else None
        self.feed_forward_norm = build.scale(build.embed)
        down_std = factor * spec.feed_forward.width**-0.5
        self.feed_forward = spec.feed_forward.build(replace(build.child(), residual_std=down_std))
        shape = (spec.positions.buckets, spec.heads)
        self.biases = build.normal(shape, (None, None)) if spec.layer_biases else None

    def __call__(
        self, x: Hidden, inputs: _LayerInputs, source: Any, cache: DenseKVCache | None, layer_cache: Any
    ) -> tuple[Hidden, Any]:
        """Runs one layer.

        Args:
          source: the layer's keys and values of the source; None computes them from `inputs.source`.
        """
        bias = inputs.bias if self.biases is None else bias_of(self.biases[...], inputs.bias, x.dtype)
        normed = self._normed(x, self.attention_norm)
        if cache is None:
            options = {"bias": bias, "causal": self.is_decoder, "segment_ids": inputs.rows.segments}
            added = self.attention(normed, *self.attention.keys_values(normed), **options)
        else:
            added, layer_cache = self.attention.attend_cached(normed, cache, layer_cache, bias=bias)
        x = x + shard_residual(added)
        if self.source_attention is not None:
            normed = self._normed(x, self.source_norm)
            found = self.source_attention.keys_values(inputs.source) if source is None else source
            x = x + shard_residual(self.source_attention(normed, *found, segment_ids=inputs.source_segments))
        normed = self._normed(x, self.feed_forward_norm)
        return x + shard_residual(self.feed_forward(normed, inputs.rows)[0]), layer_cache

    def _normed(self, x: Hidden, scale: Any) -> Hidden:
        return gather_sequence(self.norm(x, scale, STREAM))

    @staticmethod
    def _attention(spec: StackSpec, build: Build, factor: float) -> RelativeAttention:
        output_std = factor * (spec.heads * spec.head_dim) ** -0.5
        return RelativeAttention(spec.heads, spec.head_dim, replace(build.child(), residual_std=output_std))


class Stack(nnx.Module):
    """Module of a `StackSpec`, from embedded tokens to normalized hidden states.

    Initial values are normal with standard deviation d_in ** -0.5, times head_dim ** -0.5 for queries (T5's
    initializers); biases have embed ** -0.5.
    """

    def __init__(
        self, spec: StackSpec, embed: int, norm: Norm, dtype: FloatName, *, factor: float = 1.0, key: jax.Array
    ) -> None:
        self.spec, self.norm_spec = spec, norm
        std, shape = factor * embed**-0.5, (spec.positions.buckets, spec.heads)
        outer, inner = jax.random.split(key)
        shared = std * jax.random.normal(outer, shape, dtype)
        self.biases = None if spec.layer_biases else nnx.Param(shared, logical_axes=(None, None))
        self.blocks = StackBlock(spec, Build(embed, spec.layers, std, std, norm, dtype, inner))
        self.norm = nnx.Param(jnp.ones(embed, dtype), logical_axes=("norm",))

    def __call__(
        self,
        x: Hidden,
        rows: Rows,
        *,
        source: Any = None,
        encoded: EncodedSource | None = None,
        source_segments: Any = None,
        cache: Any = None,
        **options: Any,
    ) -> tuple[Hidden, Any]:
        """Returns the hidden states, and the layers of the cache with the call's tokens.

        Args:
          x: embedded tokens.
          rows: positions and segments of the tokens.
          source: hidden states of the source, [batch, source_seq, embed], of a decoder without `encoded`.
          encoded: the source's keys and values.
          source_segments: segments of queries and source; None without padding.
          cache: `DenseKVCache` of earlier tokens, or None.
          options: `remat`, `unroll` and `moves` of `scan_layers`.
        """
        if cache is None:  # distances within a segment are differences of places in the row
            queries = keys = jnp.arange(x.shape[1])[None]
        else:
            queries, keys = rows.positions, jnp.arange(cache.capacity)[None]
        bias = self.spec.positions(queries, keys)
        if self.biases is not None:
            bias = bias_of(self.biases[...], bias, x.dtype)

        def run(block: StackBlock, x: Hidden, inputs: _LayerInputs, layer: Any) -> tuple[Hidden, Any]:
            return block(x, inputs, layer[0], cache, layer[1])

        inputs = _LayerInputs(rows, bias, source, source_segments)
        keys_values = None if encoded is None else (encoded.keys, encoded.values)
        layer = (keys_values, None if cache is None else cache.layers)
        x, (layers,) = scan_layers(run, [self.blocks], x, [layer], per_row=inputs, **options)
        return gather_sequence(self.norm_spec(x, self.norm, STREAM)), layers
