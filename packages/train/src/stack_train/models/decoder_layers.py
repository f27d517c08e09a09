"""Layers of a decoder."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from stack_core.abi.caches import KVCache, LayerState
from stack_train.nn.attention import Attention, Mixer, ReportsStatistics
from stack_train.nn.build import Build, Parameter
from stack_train.nn.feed_forward import Facts, TokenLayer
from stack_train.nn.groups import Group, groups_of
from stack_train.nn.hyper_connections import HyperConnections
from stack_train.nn.layer_inputs import InputGate
from stack_train.nn.residual import STREAM, Norm, NormedSum, ResidualStream, Rows, gather_sequence, shard_residual
from stack_train.nn.stack import named

__all__ = ["Block", "DecoderSpec", "Layer", "MultiTokenLayer"]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A decoder layer, h = x + scale attention(norm(x)); y = h + scale feed_forward(norm(h)).

    Attributes:
      attention: specification of the layer that mixes tokens; None omits the first step, h = x.
      feed_forward: specification of the feed-forward layer; None omits the second step, y = h.
      input_norms: normalizes the inputs of attention and feed-forward layer.
      feed_forward_norm: False leaves the norms of its input to the feed-forward layer.
      output_norms: normalizes their outputs, before the residual sum.
      residual_scale: scale of their outputs in the residual sum.
      attention_sum: weighted sum that replaces the first residual sum, or None.
      feed_forward_sum: weighted sum that replaces the second one, or None.
      adds_features: adds features of images to the output at image tokens (DeepStack; Meng et al., 2024,
        arXiv:2406.04334). Each such layer, in order, takes the next `embed` of `ImageTokens.features`.
      input_gate: third sublayer, which adds the layer's per-layer embeddings (`LayerInputs`), normalized; all layers of
        a decoder have the same, or None.
      output_scale: multiplies the output by a stored number, which is not trained.
    """

    attention: Mixer | None
    feed_forward: TokenLayer | None
    input_norms: bool = True
    feed_forward_norm: bool = True
    output_norms: bool = False
    residual_scale: float = 1.0
    attention_sum: NormedSum | None = None
    feed_forward_sum: NormedSum | None = None
    adds_features: bool = False
    input_gate: InputGate | None = None
    output_scale: bool = False

    def build(self, build: Build) -> "Block":
        return Block(self, build)

    def state(self, repeats: int, dtype: str) -> LayerState | None:
        """Returns the specification of the cached state, or None without a state."""
        return None if self.attention is None else self.attention.state(repeats, dtype)


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """Architecture of a decoder, as derived from its config.

    Layers may share the keys and values of an earlier layer, the `source` of their attention. All sources precede the
    first of these layers, since their arrays must exist before its loop starts.

    Attributes:
      layers: specification of each layer.
      norm: RMS norm of all layers.
      further: identical multi-token prediction layers; see `MultiTokenLayer`.
      connections: residual streams of all layers, which are `HyperLayer`s; None has one stream.
      cached_tokens: maximum number of cached tokens per sequence, if that is less than `max_positions`.
      embedding_scale: factor of embedded tokens.
      logit_scale: factor of the logits; see `Head`.
      logit_softcap: soft cap of the logits; see `Head`.
    """

    layers: tuple[Layer, ...]
    norm: Norm
    further: tuple[Layer, ...] = ()
    connections: HyperConnections | None = None
    cached_tokens: int | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def groups(self) -> tuple[Group[Layer], ...]:
        """Groups of repeating layers. Layers that share keys and values are never grouped with their sources."""
        first = next((index for index, layer in enumerate(self.layers) if _source_of(layer) is not None), None)
        if first is None:
            return groups_of(self.layers)
        sharing = (replace(group, start=first + group.start) for group in groups_of(self.layers[first:]))
        return (*groups_of(self.layers[:first]), *sharing)

    @property
    def sources(self) -> tuple[int, ...]:
        """Indices of the layers whose keys and values others share."""
        return tuple(sorted({source for layer in self.layers if (source := _source_of(layer)) is not None}))


def _source_of(layer: Layer) -> int | None:
    return layer.attention.source if isinstance(layer.attention, Attention) else None


class Block(nnx.Module):
    """Module of a `Layer`. Its parameters are stacked, [repeats, ...]; a call uses the slice of one layer."""

    def __init__(self, spec: Layer, build: Build) -> None:
        self.norm, self.residual_scale = build.norm, spec.residual_scale
        self.attention_sum, self.feed_forward_sum = spec.attention_sum, spec.feed_forward_sum
        attention, feed_forward = spec.attention, spec.feed_forward

        def scale(part: Any, is_used: bool) -> Parameter | None:
            return build.scale(build.embed) if part is not None and is_used else None

        self.attention_norm = scale(attention, spec.input_norms)
        self.attention: Any = None if attention is None else attention.build(build.child())
        self.attention_output_norm = scale(attention, spec.output_norms)
        self.feed_forward_norm = scale(feed_forward, spec.input_norms and spec.feed_forward_norm)
        self.feed_forward: Any = None if feed_forward is None else feed_forward.build(build.child())
        self.feed_forward_output_norm = scale(feed_forward, spec.output_norms)
        self.input_gate = spec.input_gate.build(build.child()) if spec.input_gate else None
        self.input_gate_norm = build.scale(build.embed) if spec.input_gate else None
        self.output_scale = build.full(1, None, 1.0, trained=False) if spec.output_scale else None

    def __call__(
        self, stream: ResidualStream, rows: Rows, cache: KVCache | None, layer_cache: Any, per_layer_input: Any = None
    ) -> tuple[ResidualStream, Any, Facts]:
        stream = replace(stream, x=named(stream.x, "layer_input"))
        facts: Facts = {}
        if self.attention is not None:
            normed, x = self._input(stream, self.attention_norm, self.attention_sum)
            arguments = gather_sequence(normed), rows, cache, layer_cache
            if isinstance(self.attention, ReportsStatistics):
                added, layer_cache, facts = self.attention.call_with_statistics(*arguments)
            else:
                added, layer_cache = self.attention(*arguments)
            stream = self._add(x, named(added, "attention_output"), self.attention_output_norm, self.attention_sum)
        if self.feed_forward is not None:
            normed, x = self._input(stream, self.feed_forward_norm, self.feed_forward_sum)
            added, of_layer = self.feed_forward(gather_sequence(normed), rows)
            facts = {**facts, **of_layer}
            if cache is None:  # only generation reports the experts of each token
                facts.pop("experts", None)
            stream = self._add(x, added, self.feed_forward_output_norm, self.feed_forward_sum)
        if self.input_gate is not None:
            x = stream.joined().x
            stream = self._add(x, self.input_gate(gather_sequence(x), per_layer_input), self.input_gate_norm)
        if self.output_scale is not None:
            scale = self.output_scale[...].astype(stream.x.dtype)
            stream = ResidualStream(stream.x * scale, stream.added * scale)
        return stream, layer_cache, facts

    def _input(
        self, stream: ResidualStream, scale: Parameter | None, weights: NormedSum | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the input of the next sublayer, and the array to which its output is added."""
        if scale is None:
            x = stream.joined().x
            return x, x
        normed, x = stream.normed(self.norm, scale)
        return normed, x if weights is None else normed * weights.alpha

    def _add(
        self, x: jax.Array, added: jax.Array, scale: Parameter | None, weights: NormedSum | None = None
    ) -> ResidualStream:
        added = shard_residual(added)
        added = added if scale is None else self.norm(added, scale, STREAM)
        factor = self.residual_scale if weights is None else weights.beta
        return ResidualStream(x, added if factor == 1.0 else added * factor)


class MultiTokenLayer(nnx.Module):
    """Multi-token prediction layers, each of which predicts one token further ahead than the layer before.

        h' = norm(block([norm(e), norm(h)] P))

    h is the decoder's normalized hidden state, or h' of the layer before, and e is the embedding of the token that h
    predicts. The head is applied to h'. Parameters are stacked, [repeats, ...], like the parameters of `Block`.

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024 (arXiv:2412.19437), section 2.2. Norms are placed as in
    transformers' `MtpModel`.
    """

    def __init__(self, spec: Layer, build: Build) -> None:
        self.spec, self.norm_spec = spec, build.norm
        self.embedding_norm, self.hidden_norm = build.scale(build.embed), build.scale(build.embed)
        self.project = build.linear((2 * build.embed, build.embed), (None, "embed"))
        self.block = spec.build(build.child())
        self.norm = build.scale(build.embed)

    def __call__(
        self, hidden: jax.Array, rows: Rows, embedded: jax.Array, cache: KVCache | None = None, layer_cache: Any = None
    ) -> tuple[jax.Array, Any, Facts]:
        """Returns h', the layer's slice of the cache, and the block's facts."""
        normed = (
            self.norm_spec(embedded, self.embedding_norm, STREAM),
            self.norm_spec(hidden, self.hidden_norm, STREAM),
        )
        x = shard_residual(self.project(gather_sequence(jnp.concatenate(normed, axis=-1))))
        stream, layer_cache, facts = self.block(ResidualStream(x, None), rows, cache, layer_cache)
        normed, _ = stream.normed(self.norm_spec, self.norm)
        return gather_sequence(normed), layer_cache, facts
