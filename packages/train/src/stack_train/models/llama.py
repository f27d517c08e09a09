"""Llama: a dense decoder with RMS norms, rotary positions, grouped-query attention and a gated feed-forward layer.

It computes what transformers' `LlamaForCausalLM` does.

Source: Touvron et al., LLaMA, 2023 (arXiv:2302.13971); grouped queries and scaled rotary positions as in Llama 3, 2024
(arXiv:2407.21783).
"""

import math
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import Field, PositiveFloat, PositiveInt

from stack_core import ops
from stack_core.config import config
from stack_core.errors import ConfigError, ShapeError
from stack_core.mesh import constrain
from stack_core.protocols import AttentionSpec, KVCache, KVCacheShape
from stack_train.models.config_map import ConfigField, ConfigMap
from stack_train.models.layers import (
    FloatName,
    Linear,
    RematPolicy,
    ResidualStream,
    as_residual,
    gathered,
    lookup,
    scan_layers,
)
from stack_train.models.weight_map import WeightRule, linear_rules

__all__ = ["FAMILY", "Llama", "LlamaConfig", "LlamaFamily"]

Hidden = Float[Array, "batch seq embed"]


@config
class LlamaConfig:
    """The size and the numerics of a Llama.

    Attributes:
      embed: width of the residual stream.
      kv_heads: heads of keys and values, each shared by a group of query heads; None is one for every query head.
      head_dim: width of a head; None is embed / heads.
      mlp: width inside the feed-forward layer.
      max_positions: tokens of the longest sequence.
      tie_embeddings: the head is the embedding, transposed.
      initializer_std: standard deviation of the initial weights.
      dtype: what activations are computed in.
      param_dtype: what parameters are held in.
      remat: what the backward pass computes again; see `scan_layers`.
      unroll: train on layers that are compiled one by one: on CPUs steps of few layers are faster, compilation slower.
    """

    family: Literal["llama"] = "llama"
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
    norm_epsilon: PositiveFloat = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    initializer_std: PositiveFloat = 0.02
    dtype: FloatName = "bfloat16"
    param_dtype: FloatName = "float32"
    remat: RematPolicy = "none"
    unroll: bool = False

    def __post_init__(self) -> None:
        if self.head_dim is None and self.embed % self.heads:
            raise ConfigError(f"embed={self.embed} is no multiple of heads={self.heads}; give head_dim or change one.")
        if self.heads % self.kv_head_count:
            raise ConfigError(f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}; change one of them.")
        if self.head_size % 2:
            raise ConfigError(f"head_dim={self.head_size} is odd; rotary positions turn pairs of features.")

    @property
    def kv_head_count(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_size(self) -> int:
        return self.embed // self.heads if self.head_dim is None else self.head_dim


class Attention(nnx.Module):
    """Causal grouped-query self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig, *, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        query_width, kv_width = config.heads * config.head_size, config.kv_head_count * config.head_size

        def linear(index: int, d_out: int, axis: str) -> Linear:
            return _linear(config, (config.embed, d_out), ("embed", axis), config.attention_bias, key=keys[index])

        self.config = config
        self.query = linear(0, query_width, "heads")
        self.key = linear(1, kv_width, "kv_heads")
        self.value = linear(2, kv_width, "kv_heads")
        self.output = _linear(
            config, (query_width, config.embed), ("heads", "embed"), config.attention_bias, residual=True, key=keys[3]
        )

    def __call__(
        self,
        x: Hidden,
        positions: Int[Array, "batch seq"],
        segment_ids: Int[Array, "batch seq"] | None,
        cache: KVCache | None,
        layer_cache: Any,
    ) -> tuple[Hidden, Any]:
        query = self._rotate(self._heads(self.query(x), "act_heads", "queries"), positions)
        key = self._rotate(self._heads(self.key(x), "act_kv_heads", "keys"), positions)
        value = self._heads(self.value(x), "act_kv_heads", "values")
        if cache is None:
            output: Any = ops.attention(query, key, value, causal=True, segment_ids=segment_ids)
        else:
            output, layer_cache = cache.attend(layer_cache, query, key, value, AttentionSpec())
        return self.output(output.reshape(*x.shape[:2], -1)), layer_cache

    def _heads(
        self, x: Float[Array, "batch seq features"], axis: str, name: str
    ) -> Float[Array, "batch seq heads head_dim"]:
        return constrain(x.reshape(*x.shape[:2], -1, self.config.head_size), "batch", "seq", axis, None, name=name)

    def _rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        return ops.rope(x, positions, theta=self.config.rope_theta, scaling=self.config.rope_scaling)


class FeedForward(nnx.Module):
    """y = (silu(x G) * (x U)) D, each product with a bias if `mlp_bias`."""

    def __init__(self, config: LlamaConfig, *, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.gate = _linear(config, (config.embed, config.mlp), ("embed", "mlp"), config.mlp_bias, key=keys[0])
        self.up = _linear(config, (config.embed, config.mlp), ("embed", "mlp"), config.mlp_bias, key=keys[1])
        self.down = _linear(
            config, (config.mlp, config.embed), ("mlp", "embed"), config.mlp_bias, residual=True, key=keys[2]
        )

    def __call__(self, x: Hidden) -> Hidden:
        if self.gate.bias is None:
            gated = ops.gated_linear_unit(x, self.gate.kernel[...].astype(x.dtype), self.up.kernel[...].astype(x.dtype))
        else:
            gated = jax.nn.silu(self.gate(x)) * self.up(x)  # the op has no biases
        return self.down(constrain(gated, "batch", "seq", "act_mlp", name="gated activations"))


class Block(nnx.Module):
    """h = x + attention(norm(x)); y = h + feed_forward(norm(h)).

    The parameters of all blocks are stacked, [layers, ...]; it is called with the slice of one layer.
    """

    def __init__(self, config: LlamaConfig, *, key: jax.Array) -> None:
        attention_key, feed_forward_key = jax.random.split(key)
        self.epsilon = config.norm_epsilon
        self.attention_norm = _scale(config, (config.layers, config.embed), ("layers", "norm"))
        self.attention = Attention(config, key=attention_key)
        self.feed_forward_norm = _scale(config, (config.layers, config.embed), ("layers", "norm"))
        self.feed_forward = FeedForward(config, key=feed_forward_key)

    def __call__(
        self, stream: ResidualStream, positions: Any, segment_ids: Any, cache: KVCache | None, layer_cache: Any
    ) -> tuple[ResidualStream, Any]:
        normed, x = stream.normed(self.attention_norm[...], self.epsilon)
        attended, layer_cache = self.attention(gathered(normed), positions, segment_ids, cache, layer_cache)
        normed, x = ResidualStream(x, as_residual(attended)).normed(self.feed_forward_norm[...], self.epsilon)
        return ResidualStream(x, as_residual(self.feed_forward(gathered(normed)))), layer_cache


class Llama(nnx.Module):
    """A `LanguageModel`.

    Initial values: every matrix is normal with std `initializer_std`, those that write to the residual stream with that
    divided by sqrt(2 layers), so that its variance does not grow with depth (GPT-2, section 2.3; transformers does not
    do that); scales are 1, biases 0.
    """

    def __init__(self, config: LlamaConfig, *, key: jax.Array) -> None:
        embedding_key, head_key, blocks_key = jax.random.split(key, 3)
        self.config = config
        self.embedding = _matrix(config, (config.vocab_size, config.embed), ("vocab", "embed"), key=embedding_key)
        self.blocks = Block(config, key=blocks_key)
        self.norm = _scale(config, (config.embed,), ("norm",))
        self.head = (
            None
            if config.tie_embeddings
            else _matrix(config, (config.embed, config.vocab_size), ("embed", "vocab"), key=head_key)
        )

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"],
        segment_ids: Int[Array, "batch seq"] | None = None,
        cache: KVCache | None = None,
    ) -> Hidden | tuple[Hidden, KVCache]:
        """Returns the normed hidden states in `config.dtype`; with a cache, (hidden, cache).

        A token outside the vocabulary has an embedding of NaN, which no loss survives.

        Raises:
          ShapeError: more tokens than `max_positions`, or segments together with a cache.
        """
        self._check(tokens, segment_ids, cache)
        x = lookup(self.embedding[...], tokens, self.config.dtype)

        def run(block: Block, stream: ResidualStream, layer_cache: Any) -> tuple[ResidualStream, Any]:
            stream, layer_cache = block(stream, positions, segment_ids, cache, layer_cache)
            return stream.joined() if cache is None else stream, layer_cache  # a backward pass keeps every layer's

        stream = ResidualStream(x, None if cache is None else jnp.zeros_like(x))
        layers = None if cache is None else cache.layers
        unroll = self.config.unroll and cache is None  # a loop updates a cache in place
        stream, layers = scan_layers(run, self.blocks, stream, layers, remat=self.config.remat, unroll=unroll)
        normed, _ = stream.normed(self.norm[...], self.config.norm_epsilon)
        hidden = gathered(normed)
        return hidden if cache is None else (hidden, cache.advance(layers, tokens.shape[1]))

    def logits(self, hidden: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """hidden[..., embed] -> float32 logits[..., vocab]."""
        return ops.linear(hidden, self.head_weight(), preferred_dtype=jnp.float32)

    def head_weight(self) -> Float[Array, "embed vocab"]:
        """The head in `config.dtype`, whether tied or not."""
        weight = self.embedding[...].T if self.head is None else self.head[...]
        # Gathered here, once, and not in the loop that the loss runs over chunks of rows.
        return constrain(weight.astype(self.config.dtype), "act_embed", "act_vocab", name="head")

    @property
    def kv_cache_shape(self) -> KVCacheShape:
        """What the layers keep of a token."""
        config = self.config
        return KVCacheShape(config.layers, config.kv_head_count, config.head_size, config.dtype)

    @property
    def kv_cache_positions(self) -> int:
        """How many tokens of a sequence a cache may keep: `max_positions`, or less with some scalings.

        Those turn all tokens of a sequence otherwise once it is longer, and keys that were kept are turned already.
        """
        match self.config.rope_scaling:
            case ops.DynamicScaling(max_position_embeddings=most):
                return min(most, self.config.max_positions)
            case ops.LongRopeScaling(original_max_position_embeddings=most) as scaling:
                if scaling.short_factor != scaling.long_factor:
                    return min(most, self.config.max_positions)
        return self.config.max_positions

    def _check(self, tokens: jax.Array, segment_ids: jax.Array | None, cache: KVCache | None) -> None:
        if tokens.shape[1] > self.config.max_positions:
            raise ShapeError(
                f"The sequence is {tokens.shape[1]} tokens; the model has max_positions={self.config.max_positions}. "
                "Shorten it, or raise model.max_positions."
            )
        if cache is not None and segment_ids is not None:
            raise ShapeError("segment_ids were given with a cache, whose rows are one segment each; leave one out.")


class LlamaFamily:
    """The `ModelFamily` of Llama, and how it is called in Hugging Face checkpoints."""

    name = "llama"
    config_class = LlamaConfig
    config_map = ConfigMap(
        architecture="LlamaForCausalLM",
        model_type="llama",
        fields=(
            ConfigField("vocab_size", "vocab_size", 32_000),
            ConfigField("hidden_size", "embed", 4096),
            ConfigField("num_hidden_layers", "layers", 32),
            ConfigField("num_attention_heads", "heads", 32),
            ConfigField("num_key_value_heads", "kv_heads", None, "kv_head_count"),
            ConfigField("head_dim", "head_dim", None, "head_size"),
            ConfigField("intermediate_size", "mlp", 11_008),
            ConfigField("max_position_embeddings", "max_positions", 2048),
            ConfigField("rms_norm_eps", "norm_epsilon", 1e-6),
            ConfigField("attention_bias", "attention_bias", False),
            ConfigField("mlp_bias", "mlp_bias", False),
            ConfigField("tie_word_embeddings", "tie_embeddings", False),
            ConfigField("initializer_range", "initializer_std", 0.02),
        ),
        fixed={"hidden_act": "silu", "pretraining_tp": 1},
    )

    def build(self, config: LlamaConfig, *, key: jax.Array) -> Llama:
        return Llama(config, key=key)

    def weight_rules(self, config: LlamaConfig) -> tuple[WeightRule, ...]:
        """One rule a parameter, in the order in which a checkpoint is read and written."""
        layer = "model.layers.{layer}"
        attention = {
            f"blocks/attention/{ours}": f"{layer}.self_attn.{theirs}_proj"
            for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o"))
        }
        feed_forward = {f"blocks/feed_forward/{name}": f"{layer}.mlp.{name}_proj" for name in ("gate", "up", "down")}
        head = WeightRule("head", "lm_head.weight", transposed=True)
        return (
            WeightRule("embedding", "model.embed_tokens.weight"),
            WeightRule("blocks/attention_norm", f"{layer}.input_layernorm.weight"),
            *linear_rules(attention, use_bias=config.attention_bias),
            WeightRule("blocks/feed_forward_norm", f"{layer}.post_attention_layernorm.weight"),
            *linear_rules(feed_forward, use_bias=config.mlp_bias),
            WeightRule("norm", "model.norm.weight"),
            *(() if config.tie_embeddings else (head,)),
        )

    def redundant_tensors(self, config: LlamaConfig) -> dict[str, str | None]:
        """Tensors that a checkpoint may hold besides: the one that each repeats, or None if nothing reads it.

        "{layer}" stands for any layer.
        """
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_embeddings else {}
        return {**tied, "model.layers.{layer}.self_attn.rotary_emb.inv_freq": None}


FAMILY = LlamaFamily()


def _matrix(
    config: LlamaConfig, shape: tuple[int, int], axes: tuple[str, str], *, key: jax.Array
) -> nnx.Param[jax.Array]:
    values = config.initializer_std * jax.random.normal(key, shape, config.param_dtype)
    return nnx.Param(values, logical_axes=axes)


def _scale(config: LlamaConfig, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param[jax.Array]:
    return nnx.Param(jnp.ones(shape, config.param_dtype), logical_axes=axes)


def _linear(
    config: LlamaConfig,
    shape: tuple[int, int],
    axes: tuple[str, str],
    use_bias: bool,
    *,
    residual: bool = False,
    key: jax.Array,
) -> Linear:
    """The linear layers of all blocks; those that write to the residual stream start smaller."""
    std = config.initializer_std / (math.sqrt(2 * config.layers) if residual else 1)
    return Linear(
        (config.layers, *shape),
        ("layers", *axes),
        use_bias=use_bias,
        std=std,
        param_dtype=config.param_dtype,
        key=key,
    )
