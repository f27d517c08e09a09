"""Decoder-only transformers. An architecture is a `DecoderSpec` with a tuple of layer specifications."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import Field, PositiveFloat, PositiveInt

from stack_core import ops
from stack_core.abi.caches import KVCache, LayerState
from stack_core.abi.config import config
from stack_core.abi.errors import ArgumentError, ConfigError, ShapeError, TrainingError
from stack_core.abi.models import ImageTokens, Outputs
from stack_core.ops import Head
from stack_train.nn.attention import Attention, Mixer, ReportsStatistics, Rope
from stack_train.nn.build import Build, Parameter
from stack_train.nn.context import ContextKeys, check_unsplit_sequence, from_zigzag, shared_rows, to_zigzag
from stack_train.nn.experts import Experts
from stack_train.nn.feed_forward import Facts, TokenLayer
from stack_train.nn.groups import Group, groups_of
from stack_train.nn.hyper_connections import HyperConnections, StreamHead
from stack_train.nn.layer_inputs import InputGate, LayerInputs
from stack_train.nn.lightning import LightningAttention
from stack_train.nn.linear import FloatName, head_of, lookup
from stack_train.nn.pipeline import boundary
from stack_train.nn.quantized import read_weight
from stack_train.nn.residual import STREAM, Norm, NormedSum, ResidualStream, Rows, gather_sequence, shard_residual
from stack_train.nn.stack import NamedRemat, RematPolicy, check_names, named, scan_layers

__all__ = ["Block", "Decoder", "DecoderConfig", "DecoderSpec", "Layer", "MultiTokenLayer"]


@config
class DecoderConfig:
    """Size and numerics of a decoder.

    Attributes:
      name: name of the model family.
      vocab_size: number of tokens in the vocabulary.
      embed: width of the residual stream.
      layers: number of layers.
      heads: number of query heads.
      kv_heads: number of key-value heads, each shared by a group of query heads; None has one per query head.
      head_dim: width of a head; None is embed / heads.
      mlp: hidden width of feed-forward layers.
      max_positions: maximum sequence length in tokens.
      rope_theta: base of the rotary frequencies.
      rope_scaling: scaling of rotary positions for long contexts; None does not scale.
      norm_epsilon: term added to the mean square in RMS norms.
      tie_embeddings: uses the transposed embedding as the head.
      initializer_std: standard deviation of the initial weights.
      dtype: dtype of activations.
      param_dtype: dtype of parameters without an optimizer, in inference and exports; `precision.params` is the dtype
        of trained parameters.
      remat: values of each layer that are saved for the backward pass; the others are recomputed. "none" saves all,
        "dots" matrix products, "dots_no_batch" matrix products except attention's, "full" only the layer's input. Or
        values by name, {save: [query, key, value], offload: [layer_input]}, the offloaded ones in the host's memory;
        a vision tower then saves the inputs of its layers.
      unroll: compiles every layer separately in training instead of a loop, which makes steps faster and compilation
        slower. None does so for up to 32 layers on a single GPU.
      context_keys: exchange between the `mesh.context` devices that share a sequence: "ring" receives one device's keys
        at a time, "gathered" all keys together, "ulysses" some heads of all tokens.
    """

    name: str
    vocab_size: PositiveInt = 32_000
    embed: PositiveInt = 512
    layers: PositiveInt = 8
    heads: PositiveInt = 8
    kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    mlp: PositiveInt = 2048
    max_positions: PositiveInt = 2048
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: Annotated[ops.RopeScaling, Field(discriminator="rope_type")] | None = None
    norm_epsilon: PositiveFloat = 1e-6
    tie_embeddings: bool = False
    initializer_std: PositiveFloat = 0.02
    dtype: FloatName = "bfloat16"
    param_dtype: FloatName = "float32"
    remat: RematPolicy | NamedRemat = "none"
    unroll: bool | None = None
    context_keys: ContextKeys = "ring"

    def __post_init__(self) -> None:
        self.check_heads()

    def check_heads(self) -> None:
        """Raises a ConfigError if attention does not support these sizes."""
        if self.head_dim is None and self.embed % self.heads:
            raise ConfigError(f"embed={self.embed} is no multiple of heads={self.heads}; set head_dim or change one.")
        if self.heads % self.kv_head_count:
            raise ConfigError(f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}; change one of them.")
        if self.head_size % 2:
            raise ConfigError(f"head_dim={self.head_size} is odd; rotary positions turn pairs of features.")

    @property
    def kv_head_count(self) -> int:
        """Number of key-value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.embed // self.heads if self.head_dim is None else self.head_dim

    @property
    def tower_remat(self) -> RematPolicy:
        """Saved values of layers outside of the decoder, such as a vision tower's, whose values have no names."""
        return self.remat if isinstance(self.remat, str) else "full"

    def attention(self, **fields: Any) -> Attention:
        """Returns attention of this size; `fields` sets or overrides fields of `Attention`."""
        own: dict[str, Any] = {
            "heads": self.heads,
            "kv_heads": self.kv_head_count,
            "head_dim": self.head_size,
            "rope": Rope(theta=self.rope_theta, scaling=self.rope_scaling),
            "context_keys": self.context_keys,
        }
        return Attention(**{**own, **fields})


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


class Decoder(nnx.Module):
    """A decoder-only `LanguageModel`.

    Repeating layers are stacked: `blocks[group][place]` contains all layers at one position of a group's period.

    Initial values: matrices are normal with standard deviation `initializer_std`. Matrices that write to the residual
    stream use `initializer_std` / sqrt(2 layers), which keeps its variance from growing with depth (GPT-2, section 2.3;
    transformers omits this factor). Norms start as the identity, and biases as zeros.
    """

    def __init__(self, config: DecoderConfig, spec: DecoderSpec, *, key: jax.Array) -> None:
        self.config, self.norm_spec = config, spec.norm
        self.embedding_scale = spec.embedding_scale
        self.logit_scale, self.logit_softcap = spec.logit_scale, spec.logit_softcap
        self.groups, self.sources, self.cached_tokens = spec.groups, spec.sources, spec.cached_tokens
        # Keys 0 and 1 are for embedding and head, so tying the head leaves the values of the layers unchanged.
        self.embedding = self._matrix((config.vocab_size, config.embed), ("vocab", "embed"), jax.random.fold_in(key, 0))
        self.blocks = nnx.List([nnx.List(period) for period in self._blocks(len(spec.layers), key)])
        self.norm = nnx.Param(jnp.full(config.embed, 1 - spec.norm.offset, config.param_dtype), logical_axes=("norm",))
        head = ((config.embed, config.vocab_size), ("embed", "vocab"), jax.random.fold_in(key, 1))
        self.lm_head = None if config.tie_embeddings else self._matrix(*head)
        self.further = self._mtp_layers(spec, jax.random.fold_in(key, 2 + len(spec.layers))) if spec.further else None
        gate, last = spec.layers[0].input_gate, jax.random.fold_in(key, 3 + len(spec.layers))
        build = Build(config.embed, 1, *self._stds(len(spec.layers)), spec.norm, config.param_dtype, last)
        self.layer_inputs = LayerInputs(config.vocab_size, len(spec.layers), gate.width, build) if gate else None
        self.streams = StreamHead(spec.connections, build) if spec.connections else None

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"],
        segment_ids: Int[Array, "batch seq"] | None = None,
        cache: KVCache | None = None,
        *,
        images: ImageTokens | None = None,
        experts: Int[Array, "batch seq mixtures active"] | None = None,
    ) -> Outputs:
        """Returns the normalized hidden states in `config.dtype`.

        A token outside of the vocabulary has a NaN embedding, which makes the loss NaN.

        Args:
          tokens: token ids.
          positions: position of each token in its document.
          segment_ids: document of each token, 0 for padding; None if each row is one document.
          cache: keys and values of earlier tokens, which the call extends; None computes without a cache.
          images: features that replace embeddings of tokens; None without images.
          experts: experts of each token that the mixtures replay, in the order of the layers with a mixture; a token
            with negative entries keeps the choice of the routers. None leaves them every choice.

        Raises:
          ArgumentError: the tokens are not integers.
          ShardingError: several devices share a sequence with images.
          TrainingError: pipeline stages divide layers that share keys and values, have per-layer embeddings, or decay
            by their depth.
          ShapeError: there are more tokens than `max_positions`, both segments and a cache, or experts of other sizes.
        """
        self._check(tokens, segment_ids, cache, experts)

        # Defined here because, inside the loop, profiles show only this function's qualified name and not the decoder's
        # call stack.
        def run(block: Block, stream: ResidualStream, rows: Rows, per_layer: tuple[Any, ...]) -> tuple[Any, Any]:
            layer_cache, features, per_layer_input, replayed, layer = per_layer
            rows = replace(rows, experts=replayed, layer=layer)
            stream, layer_cache, layer_facts = block(stream, rows, cache, layer_cache, per_layer_input)
            if features is not None:
                stream = replace(stream, added=stream.added + features)
            # The backward pass saves every layer's input, and the sum takes half the memory of its two terms.
            return stream.joined() if cache is None else stream, (layer_cache, layer_facts)

        of_images = () if images is None else (images.ahead, images.positions)
        if cache is not None:
            return self._outputs(run, tokens, Rows(positions, None, *of_images), cache, images, experts)
        segment_ids = None if segment_ids is None else to_zigzag(segment_ids)
        tokens, positions = to_zigzag(tokens), to_zigzag(positions)
        experts = None if experts is None else to_zigzag(experts)
        with shared_rows(), check_names(self.config.remat):
            outputs = self._outputs(run, tokens, Rows(positions, segment_ids, *of_images), None, images, experts)
        return replace(outputs, hidden=from_zigzag(outputs.hidden))

    def _outputs(
        self,
        run: Callable[..., tuple[Any, Any]],
        tokens: jax.Array,
        rows: Rows,
        cache: KVCache | None,
        images: ImageTokens | None,
        experts: jax.Array | None,
    ) -> Outputs:
        config = self.config
        layer_caches: list[list[Any]] = []
        facts: list[list[Facts]] = []
        x, later = self._embedded(tokens), None
        if images is not None:
            x, later = _with_features(x, images)
        inputs = None if self.layer_inputs is None else self.layer_inputs(x, tokens, config.dtype)
        x = x if self.streams is None else shard_residual(self.streams.expand(x))
        rows = replace(rows, tokens=tokens) if self._reads_tokens else rows
        # With a cache every layer passes on both terms, and a scan's carry keeps its structure, so the first is 0.
        stream = ResidualStream(x, None if cache is None else jnp.zeros_like(x))
        for number, period in enumerate(self.blocks):
            caches = [None] * len(period) if cache is None else cache.layers[number]
            per_layer = (
                self._later_features(number, later),
                self._inputs_of(number, inputs),
                self._experts_of(number, experts),
                self._indices_of(number),
            )
            stream, outputs = scan_layers(
                run,
                list(period),
                stream,
                list(zip(caches, *per_layer, strict=True)),
                per_row=rows,
                remat=config.remat,
                unroll=config.unroll if cache is None else False,  # a loop updates a cache in place
                moves=cache is None,
            )
            layer_caches.append([layer_cache for layer_cache, _ in outputs])
            facts.append([layer_facts for _, layer_facts in outputs])
            rows = self._with_sources(number, rows, layer_caches[-1])
        if self.streams is not None:
            stream = ResidualStream(shard_residual(self.streams.collapse(stream.joined().x)), None)
        normed, _ = stream.normed(self.norm_spec, self.norm)
        hidden = gather_sequence(normed)
        further: tuple[jax.Array, ...] = ()
        if cache is None and self.further is not None:
            # The roll below would cross the borders of the parts.
            check_unsplit_sequence("A layer that predicts later tokens")
            further, layer_facts = self._mtp_states(self.further, hidden, tokens, rows)
            facts.append([layer_facts])
        cache = None if cache is None else cache.advance(layer_caches, tokens.shape[1])
        return Outputs(hidden, cache, further, _merge_statistics(facts))

    def _later_features(self, number: int, features: Any) -> list[Any]:
        """Returns the features that the layers at each place of a group add, [repeats, batch, seq, embed] or None."""
        adding = sorted(
            layer
            for group in self.groups
            for place, spec in enumerate(group.period)
            if spec.adds_features
            for layer in group.layers(place)
        )
        group = self.groups[number]
        return [
            jnp.stack([features[adding.index(layer)] for layer in group.layers(place)])
            if spec.adds_features and features is not None
            else None
            for place, spec in enumerate(group.period)
        ]

    def _inputs_of(self, number: int, inputs: Any) -> list[Any]:
        """Returns the inputs of the layers at each place of a group, [repeats, batch, seq, width] or None."""
        group = self.groups[number]
        layers = [group.layers(place) for place in range(len(group.period))]
        return [None if inputs is None else inputs[each.start : each.stop : each.step] for each in layers]

    def _experts_of(self, number: int, experts: Any) -> list[Any]:
        """Returns the experts for the layers at each place of a group, [repeats, batch, seq, active] or None."""
        group, mixtures = self.groups[number], list(self._mixtures)
        return [
            jnp.stack([experts[:, :, mixtures.index(layer)] for layer in group.layers(place)])
            if experts is not None and isinstance(spec.feed_forward, Experts)
            else None
            for place, spec in enumerate(group.period)
        ]

    def _indices_of(self, number: int) -> list[Any]:
        """Returns the indices of the layers at each place of a group, [repeats]; None for mixers without one."""
        group = self.groups[number]
        return [
            jnp.array(group.layers(place)) if isinstance(spec.attention, LightningAttention) else None
            for place, spec in enumerate(group.period)
        ]

    @property
    def _mixtures(self) -> dict[int, Experts]:
        """Mixtures of experts by index of their layer, in ascending order."""
        found = {
            layer: spec.feed_forward
            for group in self.groups
            for place, spec in enumerate(group.period)
            if isinstance(spec.feed_forward, Experts)
            for layer in group.layers(place)
        }
        return dict(sorted(found.items()))

    @property
    def _reads_tokens(self) -> bool:
        return any(mixture.router.hashed_tokens is not None for mixture in self._mixtures.values())

    def _with_sources(self, number: int, rows: Rows, results: Sequence[Any]) -> Rows:
        """Returns rows with the keys and values, or slices of the cache, of a group's layers that others share."""
        found = {}
        for place in range(len(self.groups[number].period)):
            layers = self.groups[number].layers(place)
            for source in self.sources:
                if source in layers:
                    at = layers.index(source)
                    found[source] = jax.tree.map(lambda x, at=at: x[at], results[place])
        return replace(rows, shared={**(rows.shared or {}), **found}) if found else rows

    def head(self) -> Head:
        """Returns the head in `config.dtype`, tied or not."""
        scale, softcap = self.logit_scale, self.logit_softcap
        return head_of(self.embedding, self.lm_head, self.config.dtype, scale=scale, softcap=softcap)

    def logits(self, hidden: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Returns float32 logits[..., vocab] of hidden[..., embed]."""
        return self.head().logits(hidden)

    @property
    def states(self) -> list[list[LayerState | None]]:
        """Specification of the cached state of each group's layers, by position in the period.

        Layers without attention, and layers that share keys and values, have None, which pytrees skip.
        """
        dtype = self.config.dtype
        return [[layer.state(group.repeats, dtype) for layer in group.period] for group in self.groups]

    @property
    def mtp_states(self) -> LayerState | None:
        """Specification of the cached state of the first multi-token prediction layer; None without such layers."""
        return None if self.further is None else self.further.spec.state(1, self.config.dtype)

    def predict_ahead(
        self,
        hidden: Float[Array, "batch seq embed"],
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"],
        cache: KVCache,
    ) -> Outputs:
        """Predicts the token after the next one with the first multi-token prediction layer; see `PredictsAhead`.

        Args:
          hidden: normalized hidden states of the decoder, or of an earlier call for the token before.
          tokens: the token that follows each hidden state.
          positions: positions of the hidden states.
          cache: keys and values of the layer for earlier hidden states, in the structure of `mtp_states`.
        """
        assert self.further is not None
        graph, state = nnx.split(self.further)
        # Later layers would need the tokens between; the first one, applied repeatedly, needs only the newest.
        layer: MultiTokenLayer = nnx.merge(graph, jax.tree.map(lambda array: array[0], state))
        layer_cache = jax.tree.map(lambda array: array[0], cache.layers)
        hidden = hidden.astype(self.config.dtype)
        hidden, layer_cache, _ = layer(hidden, Rows(positions, None), self._embedded(tokens), cache, layer_cache)
        layers = jax.tree.map(lambda array: array[None], layer_cache)
        return Outputs(hidden, cache.advance(layers, tokens.shape[1]))

    @property
    def kv_cache_positions(self) -> int:
        """Maximum number of cached tokens per sequence.

        It is `max_positions`, or fewer with some RoPE scalings, or with states that reserve room for all tokens.
        """
        limit = self.config.max_positions
        limit = limit if self.cached_tokens is None else min(self.cached_tokens, limit)
        return Rope(scaling=self.config.rope_scaling).cached_positions(limit)

    def _blocks(self, layers: int, key: jax.Array) -> list[list[Block]]:
        """Returns the modules of each group, by position in the period, each initialized from its own PRNG key."""
        config, keys = self.config, iter(range(2, 2 + layers))
        std, residual_std = self._stds(layers)

        def build(group: Group[Layer], place: int) -> Block:
            layer, place_key = group.period[place], jax.random.fold_in(key, next(keys))
            attention = layer.attention
            if isinstance(attention, Attention) and any(source in group.layers(place) for source in self.sources):
                layer = replace(layer, attention=replace(attention, is_source=True))
            return layer.build(
                Build(config.embed, group.repeats, std, residual_std, self.norm_spec, config.param_dtype, place_key)
            )

        return [[build(group, place) for place in range(len(group.period))] for group in self.groups]

    def _stds(self, layers: int) -> tuple[float, float]:
        """Returns the initial standard deviation of matrices, and of matrices that write to the residual stream."""
        return self.config.initializer_std, self.config.initializer_std / math.sqrt(2 * layers)

    def _mtp_layers(self, spec: DecoderSpec, key: jax.Array) -> MultiTokenLayer:
        std, residual_std = self._stds(len(spec.layers))
        build = Build(self.config.embed, len(spec.further), std, residual_std, spec.norm, self.config.param_dtype, key)
        return MultiTokenLayer(spec.further[0], build)

    def _embedded(self, tokens: jax.Array) -> jax.Array:
        x = lookup(read_weight(self.embedding), tokens, self.config.dtype)
        # transformers rounds Gemma's scale to the dtype of the activations, too.
        return x if self.embedding_scale == 1.0 else x * jnp.asarray(self.embedding_scale, x.dtype)

    def _mtp_states(
        self, layers: MultiTokenLayer, hidden: jax.Array, tokens: jax.Array, rows: Rows
    ) -> tuple[tuple[jax.Array, ...], Facts]:
        """Returns the hidden states of the multi-token prediction layers, nearest token first, and the layers' facts.

        The last states of a row are meaningless because the row does not contain their targets.
        """
        depth = layers.project.kernel.shape[0]
        # The first tokens roll to the end of a row, where the objective ignores the targets.
        embedded = jnp.stack([self._embedded(jnp.roll(tokens, -shift, axis=1)) for shift in range(1, depth + 1)])

        def run(layer: MultiTokenLayer, hidden: Any, rows: Rows, embedded: Any) -> tuple[Any, Any]:
            hidden, _, facts = layer(hidden, rows, embedded)
            return hidden, (hidden, facts)

        options: Any = {"remat": self.config.remat, "unroll": self.config.unroll, "moves": True}
        _, ((normed, facts),) = scan_layers(run, [layers], hidden, [embedded], per_row=rows, **options)
        return tuple(normed[place] for place in range(depth)), facts

    def _matrix(self, shape: tuple[int, int], axes: tuple[str, str], key: jax.Array) -> Parameter:
        values = self.config.initializer_std * jax.random.normal(key, shape, self.config.param_dtype)
        return nnx.Param(values, logical_axes=axes)

    def _check(
        self, tokens: jax.Array, segment_ids: jax.Array | None, cache: KVCache | None, experts: jax.Array | None
    ) -> None:
        causes = {
            "share keys and values": bool(self.sources),
            "have per-layer embeddings": self.layer_inputs is not None,
            "decay by their depth": any(
                isinstance(spec.attention, LightningAttention) for group in self.groups for spec in group.period
            ),
        }
        if boundary() is not None and (found := [cause for cause, holds in causes.items() if holds]):
            raise TrainingError(
                f"mesh.stage divides the layers, and layers of this model {found[0]}. Set mesh.stage=1."
            )
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ArgumentError(f"The tokens are {tokens.dtype}; expected integer token ids.")
        if tokens.shape[1] > self.config.max_positions:
            raise ShapeError(
                f"The sequence is {tokens.shape[1]} tokens; the model has max_positions={self.config.max_positions}. "
                "Shorten it, or raise model.max_positions."
            )
        if cache is not None and segment_ids is not None:
            raise ShapeError("segment_ids were given with a cache, whose rows are one segment each; leave one out.")
        active = {each.router.active for each in self._mixtures.values()}
        expected = (*tokens.shape, len(self._mixtures), *active)
        if experts is not None and experts.shape != expected:
            raise ShapeError(
                f"The replayed experts have shape {experts.shape}; the model has {len(self._mixtures)} mixtures of "
                f"experts, so they need {expected}."
            )


def _with_features(
    x: Float[Array, "batch seq embed"], images: ImageTokens
) -> tuple[Float[Array, "batch seq embed"], Float[Array, "layers batch seq embed"] | None]:
    """Replaces the embeddings of image tokens by the features of their images.

    Returns:
      The embeddings, and the features for the outputs of later layers, which are 0 for tokens of text.

    Raises:
      ShardingError: several devices share a sequence.
    """
    check_unsplit_sequence("A decoder with images")
    places, is_image = jnp.maximum(images.rows, 0), images.rows[:, :, None] >= 0
    if images.features.ndim == 3:
        found = jnp.take_along_axis(images.features, places[:, :, None], axis=1)
    else:
        found = images.features[places]
    found = found.astype(x.dtype)
    own, *later = jnp.split(found, found.shape[-1] // x.shape[-1], axis=-1)
    added = [shard_residual(jnp.where(is_image, each, 0)) for each in later]
    return shard_residual(jnp.where(is_image, own, x)), jnp.stack(added) if added else None


def _merge_statistics(groups: Sequence[Sequence[Facts]]) -> Facts:
    """Concatenates the layers' facts, grouped by layer group. Scalar facts, [repeats] per position, are averaged."""
    joined: dict[str, list[jax.Array]] = {}
    for group in groups:
        for name in dict.fromkeys(name for each in group for name in each):
            # A period's layers alternate, so this order of axes is the order of the model's layers.
            places = jnp.stack([each[name] for each in group if name in each], axis=1)  # [repeats, places, ...]
            joined.setdefault(name, []).append(places.reshape(-1, *places.shape[2:]))
    facts = {name: jnp.concatenate(parts) for name, parts in joined.items()}
    return {name: value if value.ndim > 1 else jnp.mean(value) for name, value in facts.items()}
