"""Encoder-only transformers. An architecture is an `EncoderSpec` with a tuple of layer specifications."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import PositiveFloat, PositiveInt

from stack_core import ops
from stack_core.abi.config import config
from stack_core.abi.errors import ArgumentError, ConfigError, ShapeError, ShardingError
from stack_core.abi.mesh import LogicalAxes, constrain, parts_of
from stack_core.abi.models import Outputs
from stack_train.nn.attention import Rope
from stack_train.nn.build import Build, Parameter
from stack_train.nn.feed_forward import TokenLayer
from stack_train.nn.groups import groups_of
from stack_train.nn.layer_norm import LayerNorm
from stack_train.nn.linear import FloatName, Linear, lookup, take_rows
from stack_train.nn.residual import STREAM, Hidden, Norm, Rows, gather_sequence, shard_residual
from stack_train.nn.stack import RematPolicy, scan_layers

__all__ = ["Encoder", "EncoderConfig", "EncoderLayer", "EncoderSpec"]

_HEADS: Final[LogicalAxes] = ("batch", "seq", "act_heads", None)
_ATTENTION: Final = {"query": _HEADS, "key": _HEADS, "value": _HEADS}


@config
class EncoderConfig:
    """Size and numerics of an encoder.

    Attributes:
      name: name of the model family.
      vocab_size: number of tokens in the vocabulary.
      embed: width of the residual stream.
      layers: number of layers.
      heads: number of attention heads, a divisor of `embed`.
      mlp: hidden width of feed-forward layers.
      max_positions: maximum sequence length in tokens.
      norm_epsilon: term added to the variance in layer norms.
      initializer_std: standard deviation of the initial weights.
      dtype: dtype of activations.
      param_dtype: dtype of parameters without an optimizer, in inference and exports; `precision.params` is the dtype
        of trained parameters.
      remat: values of each layer that are saved for the backward pass; the others are recomputed. "none" saves all,
        "dots" matrix products, "dots_no_batch" matrix products except attention's, "full" only the layer's input.
      unroll: compiles every layer separately in training instead of a loop, which makes steps faster and compilation
        slower. None does so for up to 32 layers on a single GPU.
    """

    name: str
    vocab_size: PositiveInt = 30_522
    embed: PositiveInt = 384
    layers: PositiveInt = 6
    heads: PositiveInt = 6
    mlp: PositiveInt = 1536
    max_positions: PositiveInt = 512
    norm_epsilon: PositiveFloat = 1e-12
    initializer_std: PositiveFloat = 0.02
    dtype: FloatName = "bfloat16"
    param_dtype: FloatName = "float32"
    remat: RematPolicy = "none"
    unroll: bool | None = None

    def __post_init__(self) -> None:
        if self.embed % self.heads:
            raise ConfigError(f"embed={self.embed} is not a multiple of heads={self.heads}; change one of them.")


@dataclass(frozen=True, kw_only=True)
class EncoderLayer:
    """An encoder layer, whose norms precede attention and feed-forward layer, or follow the residual sums.

        before: h = x + attention(norm(x));   y = h + feed_forward(norm(h))
        after:  h = norm(x + attention(x));   y = norm(h + feed_forward(h))

    Attention is bidirectional: softmax(rope(x Q) rope(x K)^T / sqrt(head_dim)) (x V) O.

    Attributes:
      heads: number of attention heads.
      feed_forward: specification of the feed-forward layer.
      norms_after: norms follow the residual sums.
      attention_norm: applies a norm before or after attention.
      norm_bias: adds biases to norms.
      rope: rotary positions, or None.
      window: maximum distance in tokens over which attention acts, in both directions; None is unlimited.
      bias: adds biases to the projections of attention.
    """

    heads: int
    feed_forward: TokenLayer
    norms_after: bool = False
    attention_norm: bool = True
    norm_bias: bool = True
    rope: Rope | None = None
    window: int | None = None
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """Architecture of an encoder, as derived from its config.

    Attributes:
      layers: specification of each layer.
      positions: adds a learned embedding of each position to the embedded tokens.
      first_position: row of the first position in the table of positions; earlier rows are not used.
      token_types: number of token types, whose learned embeddings are added to the embedded tokens; 0 has none.
      final_norm: normalizes the output of the last layer.
      pooler: adds the layer tanh(x P + b) of a text's first hidden state; see `Encoder.pooled`.
    """

    layers: tuple[EncoderLayer, ...]
    positions: bool = False
    first_position: int = 0
    token_types: int = 0
    final_norm: bool = False
    pooler: bool = False


class BidirectionalAttention(nnx.Module):
    """The attention of an `EncoderLayer`."""

    def __init__(self, spec: EncoderLayer, build: Build) -> None:
        embed, self.spec = build.embed, spec
        self.query = build.linear((embed, embed), ("embed", "heads"), bias=spec.bias)
        self.key = build.linear((embed, embed), ("embed", "heads"), bias=spec.bias)
        self.value = build.linear((embed, embed), ("embed", "heads"), bias=spec.bias)
        self.output = build.linear((embed, embed), ("heads", "embed"), bias=spec.bias, residual=True)

    def __call__(self, x: Hidden, rows: Rows) -> Hidden:
        rope, window = self.spec.rope, self.spec.window
        query, key, value = (self._heads(linear(x)) for linear in (self.query, self.key, self.value))
        if rope is not None:
            query, key = (rope(each, rows.positions, "act_heads") for each in (query, key))
        visible = None if window is None else (window, window)
        attended: Any = ops.attention(query, key, value, window=visible, segment_ids=rows.segments, axes=_ATTENTION)
        return self.output(attended.reshape(x.shape))

    def _heads(self, x: Hidden) -> Float[Array, "batch seq heads head_dim"]:
        return constrain(x.reshape(*x.shape[:2], self.spec.heads, -1), *_HEADS, name="heads")


class EncoderBlock(nnx.Module):
    """Module of an `EncoderLayer`. Its parameters are stacked, [repeats, ...]; a call uses the slice of one layer."""

    def __init__(self, spec: EncoderLayer, build: Build) -> None:
        self.norms_after = spec.norms_after
        self.attention_norm = self._norm(spec, build) if spec.attention_norm else None
        self.attention = BidirectionalAttention(spec, build.child())
        self.feed_forward_norm = self._norm(spec, build)
        self.feed_forward = spec.feed_forward.build(build.child())

    def __call__(self, x: Hidden, rows: Rows) -> Hidden:
        x = self._added(x, self.attention_norm, lambda x: self.attention(x, rows))
        return self._added(x, self.feed_forward_norm, lambda x: self.feed_forward(x, rows)[0])

    def _added(self, x: Hidden, norm: LayerNorm | None, sublayer: Any) -> Hidden:
        if norm is None:
            return x + shard_residual(sublayer(gather_sequence(x)))
        if self.norms_after:
            return norm(x + shard_residual(sublayer(gather_sequence(x))))
        return x + shard_residual(sublayer(gather_sequence(norm(x))))

    @staticmethod
    def _norm(spec: EncoderLayer, build: Build) -> LayerNorm:
        return LayerNorm.of_layers(build, STREAM, bias=spec.norm_bias)


class Encoder(nnx.Module):
    """A bidirectional transformer. The hidden state of each token depends on all tokens of its text.

    Repeating layers are stacked, and initial values are as in `Decoder`.
    """

    bidirectional = True

    def __init__(self, config: EncoderConfig, spec: EncoderSpec, *, key: jax.Array) -> None:
        self.config, self.groups = config, groups_of(spec.layers)
        embed, dtype, norm_bias = config.embed, config.param_dtype, spec.layers[0].norm_bias
        keys = (jax.random.fold_in(key, number) for number in range(4 + len(spec.layers)))
        self.embedding = self._matrix(config.vocab_size, "vocab", next(keys))
        position_key, type_key, pooler_key = (next(keys) for _ in range(3))
        self.first_position, places = spec.first_position, spec.first_position + config.max_positions
        self.positions = self._matrix(places, None, position_key) if spec.positions else None
        self.token_types = self._matrix(spec.token_types, None, type_key) if spec.token_types else None
        self.embedding_norm = LayerNorm.single(embed, config.norm_epsilon, STREAM, dtype, bias=norm_bias)
        std, norm = config.initializer_std, Norm(epsilon=config.norm_epsilon)
        residual_std = std / math.sqrt(2 * len(spec.layers))
        self.blocks = nnx.List(
            nnx.List(
                EncoderBlock(layer, Build(embed, group.repeats, std, residual_std, norm, dtype, next(keys)))
                for layer in group.period
            )
            for group in self.groups
        )
        final_norm = LayerNorm.single(embed, config.norm_epsilon, STREAM, dtype, bias=norm_bias)
        self.norm = final_norm if spec.final_norm else None
        options: Any = {"use_bias": True, "std": std, "param_dtype": dtype, "key": pooler_key}
        self.pooler = Linear((embed, embed), ("embed", None), **options) if spec.pooler else None

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"],
        segment_ids: Int[Array, "batch seq"] | None = None,
        *,
        token_types: Int[Array, "batch seq"] | None = None,
    ) -> Outputs:
        """Returns the hidden states in `config.dtype`.

        A token or position outside of its table has a NaN embedding.

        Args:
          tokens: token ids.
          positions: position of each token in its text.
          segment_ids: text of each token, 0 for padding, in contiguous segments; None if each row is one text.
          token_types: type of each token, such as 1 for the second of two texts; None is 0 for all.

        Raises:
          ArgumentError: `token_types` is set for a model without token types.
          ShapeError: there are more tokens than `max_positions`.
          ShardingError: several devices share a sequence.
        """
        config, seq = self.config, tokens.shape[1]
        if seq > config.max_positions:
            raise ShapeError(
                f"The sequence is {seq} tokens; the model has max_positions={config.max_positions}. Shorten it."
            )
        if parts_of("seq") > 1:
            raise ShardingError("An encoder's attention is not split over the sequence. Set mesh.context to 1.")
        x = lookup(self.embedding[...], tokens, config.dtype)
        for table, places in self._tables(tokens, positions, token_types):
            x = x + take_rows(table, places).astype(x.dtype)
        x = self.embedding_norm(shard_residual(x))

        def run(block: EncoderBlock, x: Hidden, rows: Rows, _: None) -> tuple[Hidden, None]:
            return block(x, rows), None

        rows, options = Rows(positions, segment_ids), {"remat": config.remat, "unroll": config.unroll, "moves": True}
        for period in self.blocks:
            x, _ = scan_layers(run, list(period), x, [None] * len(period), per_row=rows, **options)
        return Outputs(gather_sequence(x if self.norm is None else self.norm(x)))

    def on_batch(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        """Returns the hidden states of a batch's tokens, and the pooled ones if the model has a pooler."""
        hidden = self(batch["tokens"], batch["positions"], batch.get("segment_ids")).hidden
        return (hidden,) if self.pooler is None else (hidden, self.pooled(hidden))

    def pooled(self, hidden: Float[Array, "batch seq embed"]) -> Float[Array, "batch embed"]:
        """Returns tanh(x P + b) of each row's first hidden state x, the input of BERT's classifiers.

        Raises:
          ArgumentError: the model was built without a pooler.
        """
        if self.pooler is None:
            raise ArgumentError("The model has no pooler. Use its hidden states, such as their mean.")
        return jnp.tanh(self.pooler(hidden[:, 0]))

    def _tables(
        self, tokens: jax.Array, positions: jax.Array, token_types: jax.Array | None
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Returns the tables whose rows are added to the embedded tokens, each with the indices of the rows."""
        found = []
        if self.token_types is not None:
            types = jnp.zeros_like(tokens) if token_types is None else token_types
            found.append((self.token_types[...], types))
        elif token_types is not None:
            raise ArgumentError("The model has no token types. Leave token_types out.")
        if self.positions is not None:
            found.append((self.positions[...], positions + self.first_position))
        return found

    def _matrix(self, rows: int, axis: str | None, key: jax.Array) -> Parameter:
        config = self.config
        values = config.initializer_std * jax.random.normal(key, (rows, config.embed), config.param_dtype)
        return nnx.Param(values, logical_axes=(axis, "embed"))
