"""Decoder-only transformers. An architecture is a `DecoderSpec` with a tuple of layer specifications."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from stack_core.abi.caches import KVCache, LayerState
from stack_core.abi.errors import ArgumentError, ShapeError, TrainingError
from stack_core.abi.models import ImageTokens, Outputs
from stack_core.ops import Head
from stack_train.models.decoder_config import DecoderConfig
from stack_train.models.decoder_layers import Block, DecoderSpec, Layer, MultiTokenLayer
from stack_train.nn.attention import Attention, Rope
from stack_train.nn.boundary import boundary
from stack_train.nn.build import Build, Parameter
from stack_train.nn.compressed_attention import CompressedAttention
from stack_train.nn.context import check_unsplit_sequence, from_zigzag, shared_rows, to_zigzag
from stack_train.nn.experts import Experts
from stack_train.nn.feed_forward import Facts
from stack_train.nn.groups import Group
from stack_train.nn.hyper_connections import StreamHead
from stack_train.nn.latent_attention import LatentAttention
from stack_train.nn.layer_inputs import LayerInputs
from stack_train.nn.lightning import LightningAttention
from stack_train.nn.linear import head_of, lookup
from stack_train.nn.quantized import read_weight
from stack_train.nn.residual import ResidualStream, Rows, gather_sequence, shard_residual
from stack_train.nn.stack import check_names, scan_layers

__all__ = ["Block", "Decoder", "DecoderConfig", "DecoderSpec", "Layer", "MultiTokenLayer"]


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
          TrainingError: pipeline stages divide layers that share keys and values, have per-layer embeddings, decay by
            their depth or replay experts, or cannot divide the groups of layers.
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
        later = self._later_tokens(tokens)
        tokens, positions = to_zigzag(tokens), to_zigzag(positions)
        experts = None if experts is None else to_zigzag(experts)
        with shared_rows(), check_names(self.config.remat):
            rows = Rows(positions, segment_ids, *of_images)
            outputs = self._outputs(run, tokens, rows, None, images, experts, later)
        hidden, *further = map(from_zigzag, (outputs.hidden, *outputs.further))
        return replace(outputs, hidden=hidden, further=tuple(further))

    def _outputs(
        self,
        run: Callable[..., tuple[Any, Any]],
        tokens: jax.Array,
        rows: Rows,
        cache: KVCache | None,
        images: ImageTokens | None,
        experts: jax.Array | None,
        later_tokens: Sequence[jax.Array] = (),
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
                staged=number == self._staged_group,
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
            further, layer_facts = self._mtp_states(self.further, hidden, later_tokens, rows)
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

    def untied(self) -> "Decoder":
        """See `UntiesHead`. The config of the result has `tie_embeddings=False`."""
        if self.lm_head is not None:
            return self
        model, table = nnx.clone(self), self.embedding.get_value()
        head = jax.eval_shape(jnp.transpose, table) if isinstance(table, jax.ShapeDtypeStruct) else table.T
        model.config = replace(self.config, tie_embeddings=False)
        # Explicit, because nnx has recorded the attribute None as static.
        model.lm_head = nnx.data(nnx.Param(head, logical_axes=("embed", "vocab")))
        return model

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

    def _later_tokens(self, tokens: jax.Array) -> list[jax.Array]:
        """Returns the input tokens of each multi-token prediction layer, in the order of `to_zigzag`."""
        depth = 0 if self.further is None else self.further.project.kernel.shape[0]
        # The first tokens roll to the end of a row, where the objective ignores the targets.
        return [to_zigzag(jnp.roll(tokens, -shift, axis=1)) for shift in range(1, depth + 1)]

    def _mtp_states(
        self, layers: MultiTokenLayer, hidden: jax.Array, later_tokens: Sequence[jax.Array], rows: Rows
    ) -> tuple[tuple[jax.Array, ...], Facts]:
        """Returns the hidden states of the multi-token prediction layers, nearest token first, and the layers' facts.

        The last states of a row are meaningless because the row does not contain their targets.
        """
        embedded = jnp.stack([self._embedded(tokens) for tokens in later_tokens])

        def run(layer: MultiTokenLayer, hidden: Any, rows: Rows, embedded: Any) -> tuple[Any, Any]:
            hidden, _, facts = layer(hidden, rows, embedded)
            return hidden, (hidden, facts)

        options: Any = {"remat": self.config.remat, "unroll": self.config.unroll, "moves": True, "staged": False}
        _, ((normed, facts),) = scan_layers(run, [layers], hidden, [embedded], per_row=rows, **options)
        return tuple(normed[place] for place in range(len(later_tokens))), facts

    def _matrix(self, shape: tuple[int, int], axes: tuple[str, str], key: jax.Array) -> Parameter:
        values = self.config.initializer_std * jax.random.normal(key, shape, self.config.param_dtype)
        return nnx.Param(values, logical_axes=axes)

    @property
    def _staged_group(self) -> int:
        """Index of the group with the most repetitions, which pipeline stages divide."""
        return max(range(len(self.groups)), key=lambda number: self.groups[number].repeats)

    def _check_stages(self, *, replays: bool) -> None:
        """Raises a TrainingError if pipeline stages cannot divide the layers."""
        staged, repeats = self._staged_group, [group.repeats for group in self.groups]
        if self.further is not None:
            repeats.append(self.further.project.kernel.shape[0])
        before = (spec.feed_forward for group in self.groups[:staged] for spec in group.period)
        attentions = [spec.attention for group in self.groups for spec in group.period]
        causes = {
            "share keys and values": bool(self.sources),
            "have per-layer embeddings": self.layer_inputs is not None,
            "decay by their depth": any(isinstance(each, LightningAttention) for each in attentions),
            "attend to compressed tokens": any(isinstance(each, CompressedAttention) for each in attentions),
            "train an indexer": any(
                isinstance(each, LatentAttention) and each.indexer is not None and each.indexer.training != "frozen"
                for each in attentions
            ),
            "replay experts": replays,
            "are in several groups that repeat equally often": repeats.count(max(repeats)) > 1,
            "precede the largest group and balance their experts by biases": any(
                isinstance(each, Experts) and each.router.bias_rate is not None for each in before
            ),
        }
        if found := [cause for cause, holds in causes.items() if holds]:
            raise TrainingError(
                f"mesh.stage divides the layers, and layers of this model {found[0]}. Set mesh.stage=1."
            )

    def _check(
        self, tokens: jax.Array, segment_ids: jax.Array | None, cache: KVCache | None, experts: jax.Array | None
    ) -> None:
        if boundary() is not None:
            self._check_stages(replays=experts is not None)
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
