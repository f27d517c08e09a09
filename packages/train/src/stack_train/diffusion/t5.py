"""T5's encoder: a transformer over a text in both directions, whose positions are biases of its attention.

It computes what transformers' `T5EncoderModel` does for the models of version 1.1, whose feed-forward layers are gated.

Source: Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, 2020
(arXiv:1910.10683).
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import PositiveFloat, PositiveInt

from stack_core import ops
from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.diffusion.components import Component
from stack_train.diffusion.layers import ATTENTION, TOKENS, Tokens, split_heads
from stack_train.models.reader import Setting
from stack_train.nn.build import Build
from stack_train.nn.linear import FloatName, lookup, take_rows
from stack_train.nn.residual import Norm
from stack_train.nn.stack import scan_layers

__all__ = ["COMPONENT", "FAMILY", "T5Encoder", "T5EncoderConfig"]


@config
class T5EncoderConfig:
    """Size and numerics of a T5 encoder. The defaults match T5 v1.1 XXL.

    Attributes:
      name: selects this family.
      vocab_size: number of tokens.
      embed: width of the residual stream.
      mlp: hidden width of the feed-forward layers.
      layers: number of blocks.
      heads: number of attention heads.
      head_dim: width of a head; heads * head_dim may differ from `embed`.
      buckets: number of relative-position buckets, each with one bias per head; half of them are for earlier tokens.
      max_distance: distance in tokens from which all distances share a bucket.
      norm_epsilon: added to the mean square in norms.
      initializer_std: standard deviation of the initial weights.
      dtype: dtype of the activations.
      param_dtype: dtype of the parameters.
    """

    name: Literal["t5_encoder"] = "t5_encoder"
    vocab_size: PositiveInt = 32_128
    embed: PositiveInt = 4096
    mlp: PositiveInt = 10_240
    layers: PositiveInt = 24
    heads: PositiveInt = 64
    head_dim: PositiveInt = 64
    buckets: PositiveInt = 32
    max_distance: PositiveInt = 128
    norm_epsilon: PositiveFloat = 1e-6
    initializer_std: PositiveFloat = 0.05
    dtype: FloatName = "bfloat16"
    param_dtype: FloatName = "float32"

    def __post_init__(self) -> None:
        if self.buckets % 4 or self.max_distance <= self.buckets // 4:
            raise ConfigError(
                f"buckets={self.buckets} must be a multiple of 4, and max_distance={self.max_distance} above a quarter "
                "of it."
            )


_OPERANDS = {**ATTENTION, "bias": (None, "act_heads", None, None)}


class T5Block(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); called with the slice of one layer."""

    def __init__(self, config: T5EncoderConfig, build: Build) -> None:
        embed, inner, mlp = config.embed, config.heads * config.head_dim, config.mlp
        self.heads, self.norm = config.heads, build.norm
        self.query = build.linear((embed, inner), ("embed", "heads"))
        self.key = build.linear((embed, inner), ("embed", "heads"))
        self.value = build.linear((embed, inner), ("embed", "heads"))
        self.output = build.linear((inner, embed), ("heads", "embed"))
        self.gate = build.linear((embed, mlp), ("embed", "mlp"))
        self.up = build.linear((embed, mlp), ("embed", "mlp"))
        self.down = build.linear((mlp, embed), ("mlp", "embed"))
        self.attention_norm, self.mlp_norm = build.scale(embed), build.scale(embed)

    def __call__(self, x: Tokens, bias: Float[Array, "1 heads seq seq"]) -> Tokens:
        normed = self.norm(x, self.attention_norm, TOKENS)
        heads = (split_heads(linear(normed), self.heads, "heads") for linear in (self.query, self.key, self.value))
        # T5 does not divide scores by sqrt(head_dim).
        attended: Any = ops.attention(*heads, bias=bias, scale=1.0, axes=_OPERANDS)
        x = x + self.output(attended.reshape(*x.shape[:2], -1))
        normed = self.norm(x, self.mlp_norm, TOKENS)
        return x + self.down(jax.nn.gelu(self.gate(normed), approximate=True) * self.up(normed))


class T5Encoder(nnx.Module):
    """Token ids to hidden states."""

    def __init__(self, config: T5EncoderConfig, *, key: jax.Array) -> None:
        self.config, self.final = config, Norm(epsilon=config.norm_epsilon)
        outer, biases, inner = jax.random.split(key, 3)
        std, dtype = config.initializer_std, config.param_dtype
        # T5's embeddings have a standard deviation of 1 and are not scaled when they are read.
        self.embedding = nnx.Param(
            jax.random.normal(outer, (config.vocab_size, config.embed), dtype), logical_axes=("vocab", "embed")
        )
        # All layers share this table, which checkpoints store with the first layer.
        self.biases = nnx.Param(
            std * jax.random.normal(biases, (config.buckets, config.heads), dtype), logical_axes=(None, None)
        )
        self.blocks = T5Block(config, Build(config.embed, config.layers, std, std, self.final, dtype, inner))
        self.norm = nnx.Param(jnp.ones(config.embed, dtype), logical_axes=("norm",))

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Tokens:
        """Returns hidden states in float32; every token attends to every other, padding included."""
        config, seq = self.config, tokens.shape[1]
        buckets = bucket_of(seq, config.buckets, config.max_distance)
        bias = take_rows(self.biases[...], jnp.asarray(buckets)).astype(config.dtype).transpose(2, 0, 1)[None]

        def run(block: T5Block, x: Tokens, bias: Array, _: None) -> tuple[Tokens, None]:
            return block(x, bias), None

        x, _ = scan_layers(
            run,
            [self.blocks],
            lookup(self.embedding[...], tokens, config.dtype),
            [None],
            per_row=bias,
            remat="none",
            unroll=False,
            moves=False,
        )
        return self.final(x, self.norm, TOKENS).astype(jnp.float32)


def bucket_of(seq: int, buckets: int, max_distance: int) -> Int[np.ndarray, "seq seq"]:
    """The bucket of each query's distance to each key: near ones have their own, far ones share by logarithm."""
    distance = np.arange(seq)[None] - np.arange(seq)[:, None]
    half, near = buckets // 2, buckets // 4
    far = np.abs(distance)
    # float32 as in transformers, because rounding decides the bucket of some distances.
    grown = np.log(np.maximum(far, 1).astype(np.float32) / near) / math.log(max_distance / near) * (half - near)
    shared = np.minimum(near + grown.astype(np.int64), half - 1)
    # Keys after the query use the second half of the buckets.
    return half * (distance > 0) + np.where(far < near, far, shared)


class T5EncoderFamily:
    """The `ModelFamily` of T5's encoders."""

    name = "t5_encoder"
    config_class = T5EncoderConfig

    def build(self, config: T5EncoderConfig, *, key: jax.Array) -> T5Encoder:
        return T5Encoder(config, key=key)


FAMILY = T5EncoderFamily()

_BLOCK = "encoder.block.{layer}.layer."
_ATTENTION, _FEED_FORWARD = _BLOCK + "0.SelfAttention.", _BLOCK + "1.DenseReluDense."

COMPONENT = Component(
    class_name="T5EncoderModel",
    model_type="t5",
    stem="model",
    family=FAMILY,
    settings=(
        Setting("vocab_size", ("vocab_size",), 32_128),
        Setting("embed", ("d_model",), 512),
        Setting("mlp", ("d_ff",), 2048),
        Setting("layers", ("num_layers",), 6),
        Setting("heads", ("num_heads",), 8),
        Setting("head_dim", ("d_kv",), 64),
        Setting("buckets", ("relative_attention_num_buckets",), 32),
        Setting("max_distance", ("relative_attention_max_distance",), 128),
        Setting("norm_epsilon", ("layer_norm_epsilon",), 1e-6),
    ),
    fixed={"feed_forward_proj": "gated-gelu"},
    silent=(
        "num_decoder_layers",
        "is_encoder_decoder",
        "is_decoder",
        "tie_word_embeddings",
        "scale_decoder_outputs",
        "is_gated_act",
        "dense_act_fn",
        "n_positions",
        "output_past",
    ),
    redundant=("encoder.embed_tokens.weight",),
    names={
        "embedding": "shared.weight",
        "biases": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "blocks/query": _ATTENTION + "q",
        "blocks/key": _ATTENTION + "k",
        "blocks/value": _ATTENTION + "v",
        "blocks/output": _ATTENTION + "o",
        "blocks/gate": _FEED_FORWARD + "wi_0",
        "blocks/up": _FEED_FORWARD + "wi_1",
        "blocks/down": _FEED_FORWARD + "wo",
        "blocks/attention_norm": _BLOCK + "0.layer_norm.weight",
        "blocks/mlp_norm": _BLOCK + "1.layer_norm.weight",
        "norm": "encoder.final_layer_norm.weight",
    },
)
