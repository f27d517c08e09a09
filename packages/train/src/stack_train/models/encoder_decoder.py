"""Encoder-decoder transformers: an encoder reads a source text, and a decoder generates a target text from it.

Source: Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, 2020
(arXiv:1910.10683).
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.caches import KeysValues
from stack_core.abi.config import config
from stack_core.abi.errors import ArgumentError, ConfigError, ShapeError, ShardingError
from stack_core.abi.mesh import parts_of
from stack_core.abi.models import Outputs
from stack_core.ops import Head
from stack_core.ops.kv_cache import DenseKVCache
from stack_train.nn.feed_forward import Gated, Plain
from stack_train.nn.linear import FloatName, head_of, lookup
from stack_train.nn.quantized import read_weight
from stack_train.nn.relative_attention import RelativePositions
from stack_train.nn.relative_stack import EncodedSource, Stack, StackBlock, StackSpec
from stack_train.nn.residual import Hidden, Norm, Rows
from stack_train.nn.stack import RematPolicy, scan_layers

__all__ = ["EncoderDecoder", "EncoderDecoderConfig", "FeedForwardKind"]

FeedForwardKind = Literal["relu", "gated-gelu", "gated-silu"]
_GATED: Mapping[str, Any] = {"gated-gelu": "gelu_tanh", "gated-silu": "silu"}


@config
class EncoderDecoderConfig:
    """Size and numerics of an encoder-decoder.

    Attributes:
      name: name of the model family.
      vocab_size: number of tokens in the vocabulary.
      embed: width of the residual stream.
      layers: number of layers of the encoder.
      decoder_layers: number of layers of the decoder; None has as many as the encoder.
      heads: number of attention heads.
      head_dim: width of a head; heads * head_dim may differ from `embed`.
      mlp: hidden width of feed-forward layers.
      feed_forward: activation of the feed-forward layers; "gated" multiplies it by a second linear map.
      buckets: number of buckets of relative positions, each with one bias per head.
      max_distance: distance in tokens from which all distances share a bucket.
      max_positions: maximum number of tokens of a source, and of a target. No parameter depends on it.
      start_token: token that begins every target.
      tie_embeddings: uses the transposed embedding as the head.
      scale_hidden: multiplies the hidden states before the head by embed ** -0.5.
      norm_epsilon: term added to the mean square in RMS norms.
      initializer_factor: factor of the standard deviations of the initial values.
      dtype: dtype of activations.
      param_dtype: dtype of parameters without an optimizer, in inference and exports; `precision.params` is the dtype
        of trained parameters.
      remat: values of each layer that are saved for the backward pass; the others are recomputed. "none" saves all,
        "dots" matrix products, "dots_no_batch" matrix products except attention's, "full" only the layer's input.
      unroll: compiles every layer separately in training instead of a loop, which makes steps faster and compilation
        slower. None does so for up to 32 layers on a single GPU.
    """

    name: str
    vocab_size: PositiveInt = 32_128
    embed: PositiveInt = 512
    layers: PositiveInt = 6
    decoder_layers: PositiveInt | None = None
    heads: PositiveInt = 8
    head_dim: PositiveInt = 64
    mlp: PositiveInt = 2048
    feed_forward: FeedForwardKind = "relu"
    buckets: PositiveInt = 32
    max_distance: PositiveInt = 128
    max_positions: PositiveInt = 512
    start_token: NonNegativeInt = 0
    tie_embeddings: bool = True
    scale_hidden: bool = True
    norm_epsilon: PositiveFloat = 1e-6
    initializer_factor: PositiveFloat = 1.0
    dtype: FloatName = "bfloat16"
    param_dtype: FloatName = "float32"
    remat: RematPolicy = "none"
    unroll: bool | None = None

    def __post_init__(self) -> None:
        if self.start_token >= self.vocab_size:
            raise ConfigError(
                f"start_token={self.start_token} is outside of the vocabulary, 0 to {self.vocab_size - 1}. Change it."
            )
        # Raises for invalid buckets.
        for is_encoder in (True, False):
            self.positions(bidirectional=is_encoder)

    @property
    def decoder_layer_count(self) -> int:
        """Number of layers of the decoder."""
        return self.layers if self.decoder_layers is None else self.decoder_layers

    def positions(self, *, bidirectional: bool) -> RelativePositions:
        """Returns the buckets of relative positions of the encoder (bidirectional) or the decoder."""
        return RelativePositions(buckets=self.buckets, max_distance=self.max_distance, bidirectional=bidirectional)

    def stack(self, *, decoder: bool, layer_biases: bool = False) -> StackSpec:
        """Returns the architecture of the encoder or the decoder."""
        activation = _GATED.get(self.feed_forward)
        plain = Plain(width=self.mlp, activation="relu", bias=False)
        return StackSpec(
            layers=self.decoder_layer_count if decoder else self.layers,
            heads=self.heads,
            head_dim=self.head_dim,
            feed_forward=plain if activation is None else Gated(width=self.mlp, activation=activation),
            positions=self.positions(bidirectional=not decoder),
            is_decoder=decoder,
            layer_biases=layer_biases,
        )


class EncoderDecoder(nnx.Module):
    """A `LanguageModel` of target texts, each generated from a source text.

    Attributes:
      start_token: token that begins every target.
    """

    def __init__(self, config: EncoderDecoderConfig, *, layer_biases: bool = False, key: jax.Array) -> None:
        self.config, self.start_token = config, config.start_token
        dtype, factor, norm = config.param_dtype, config.initializer_factor, Norm(epsilon=config.norm_epsilon)
        embedding_key, head_key, encoder_key, decoder_key = jax.random.split(key, 4)
        # Embeddings have a standard deviation of 1 and are not scaled when they are read.
        values = factor * jax.random.normal(embedding_key, (config.vocab_size, config.embed), dtype)
        self.embedding = nnx.Param(values, logical_axes=("vocab", "embed"))
        encoder, decoder = (config.stack(decoder=each, layer_biases=layer_biases) for each in (False, True))
        self.encoder = Stack(encoder, config.embed, norm, dtype, factor=factor, key=encoder_key)
        self.decoder = Stack(decoder, config.embed, norm, dtype, factor=factor, key=decoder_key)
        # Without the scale of hidden states, as in t5x; transformers initializes this head like an embedding.
        values = factor * config.embed**-0.5 * jax.random.normal(head_key, (config.embed, config.vocab_size), dtype)
        self.lm_head = None if config.tie_embeddings else nnx.Param(values, logical_axes=("embed", "vocab"))

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"],
        segment_ids: Int[Array, "batch seq"] | None = None,
        cache: DenseKVCache | None = None,
        *,
        source_tokens: Int[Array, "batch source_seq"] | None = None,
        source_segment_ids: Int[Array, "batch source_seq"] | None = None,
        source: EncodedSource | None = None,
    ) -> Outputs:
        """Returns the normalized hidden states of the target's tokens in `config.dtype`.

        A target attends to the tokens of its own segment in the target and in the source. A token outside of the
        vocabulary has a NaN embedding, which makes the loss NaN.

        Args:
          tokens: token ids of the target, which begins with `start_token`.
          positions: position of each token in its target.
          segment_ids: target of each token, 0 for padding; None if each row is one target.
          cache: keys and values of earlier tokens of the target, which the call extends; requires `source`.
          source_tokens: token ids of the source, unless `source` is given.
          source_segment_ids: source of each of its tokens, 0 for padding; None if each row is one source.
          source: the encoded source; see `encode`.

        Raises:
          ArgumentError: the source is missing, or a cache comes without `source`.
          ShapeError: there are more tokens than `max_positions`, or both segments and a cache.
          ShardingError: several devices share a sequence.
        """
        config = self.config
        self._check(tokens)
        if cache is not None and (source is None or segment_ids is not None):
            problem = "segment_ids" if source is not None else "no encoded source"
            raise ArgumentError(f"A cache was given with {problem}; call model(tokens, positions, cache=, source=).")
        hidden: Any = None
        if source is not None:
            source_segment_ids, source_shape = source.segment_ids, source.keys.shape[1:3]
        elif source_tokens is not None:
            hidden, source_shape = self._encoded(source_tokens, source_segment_ids), source_tokens.shape
        else:
            raise ArgumentError(
                f"A model of family {config.name!r} generates targets from sources, and this call has no source. Train "
                "it on data.name: pairs with objective.name: causal_lm."
            )
        # As a loop, which updates a cache in place.
        cached: Any = {"remat": "none", "unroll": False, "moves": False}
        options: Any = {"remat": config.remat, "unroll": config.unroll, "moves": True} if cache is None else cached
        x, layers = self.decoder(
            self._embedded(tokens),
            Rows(positions, segment_ids),
            source=hidden,
            encoded=source,
            source_segments=_paired(segment_ids, tokens.shape, source_segment_ids, source_shape),
            cache=cache,
            **options,
        )
        advanced: Any = None if cache is None else cache.advance(layers, tokens.shape[1])
        return Outputs(x, advanced)

    def encode(
        self, tokens: Int[Array, "batch source_seq"], segment_ids: Int[Array, "batch source_seq"] | None = None
    ) -> EncodedSource:
        """Encodes sources once for all tokens of their targets.

        Args:
          tokens: token ids.
          segment_ids: 1 for tokens of the source and 0 for padding; None without padding.

        Raises:
          ShapeError: there are more tokens than `max_positions`.
        """
        hidden = self._encoded(tokens, segment_ids)

        def project(block: StackBlock, hidden: Hidden, _: None, __: None) -> tuple[Hidden, Any]:
            assert block.source_attention is not None
            return hidden, block.source_attention.keys_values(hidden)

        options: Any = {"remat": "none", "unroll": False, "moves": False}
        _, ((keys, values),) = scan_layers(project, [self.decoder.blocks], hidden, [None], per_row=None, **options)
        return EncodedSource(keys, values, segment_ids)

    def on_batch(self, batch: Mapping[str, jax.Array]) -> Float[Array, "batch seq vocab"]:
        """Returns the logits of the targets of a training batch."""
        names = ("source_tokens", "source_segment_ids")
        sources: dict[str, Any] = {name: batch[name] for name in names if name in batch}
        return self.logits(self(batch["tokens"], batch["positions"], batch.get("segment_ids"), **sources).hidden)

    def head(self) -> Head:
        """Returns the head in `config.dtype`, tied or not."""
        scale = self.config.embed**-0.5 if self.config.scale_hidden else 1.0
        return head_of(self.embedding, self.lm_head, self.config.dtype, scale=scale)

    def logits(self, hidden: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Returns float32 logits[..., vocab] of hidden[..., embed]."""
        return self.head().logits(hidden)

    @property
    def states(self) -> KeysValues:
        """Specification of the cached state of the decoder's layers."""
        config = self.config
        sizes = {"kv_heads": config.heads, "key_dim": config.head_dim, "value_dim": config.head_dim}
        return KeysValues(repeats=config.decoder_layer_count, dtype=config.dtype, **sizes)

    def _encoded(self, tokens: jax.Array, segment_ids: jax.Array | None) -> Hidden:
        self._check(tokens)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        options: Any = {"remat": self.config.remat, "unroll": self.config.unroll, "moves": True}
        hidden, _ = self.encoder(self._embedded(tokens), Rows(positions, segment_ids), **options)
        return hidden

    def _embedded(self, tokens: jax.Array) -> Hidden:
        return lookup(read_weight(self.embedding), tokens, self.config.dtype)

    def _check(self, tokens: jax.Array) -> None:
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ArgumentError(f"The tokens are {tokens.dtype}; expected integer token ids.")
        if tokens.shape[1] > self.config.max_positions:
            raise ShapeError(
                f"The sequence is {tokens.shape[1]} tokens; the model has max_positions={self.config.max_positions}. "
                "Shorten it, or raise model.max_positions."
            )
        if parts_of("seq") > 1:
            raise ShardingError("Relative position biases are not split over the sequence. Set mesh.context to 1.")


def _paired(
    segment_ids: jax.Array | None, shape: tuple[int, ...], source_segments: jax.Array | None, source_shape: Any
) -> tuple[jax.Array, jax.Array] | None:
    """Returns the segments of targets and sources for attention to the source; a missing one is a single segment."""
    if segment_ids is None and source_segments is None:
        return None
    return (
        jnp.ones(shape, jnp.int32) if segment_ids is None else segment_ids,
        jnp.ones(source_shape, jnp.int32) if source_segments is None else source_segments,
    )
