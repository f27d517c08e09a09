"""The encoders of T5 and UMT5 as text encoders of denoisers. `stack_train.models.t5` and `umt5` are the whole models.

Outputs match transformers' `T5EncoderModel` for the models of version 1.1, whose feed-forward layers are gated, and
`UMT5EncoderModel` with an attention mask.

Sources: Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, 2020
(arXiv:1910.10683); Chung et al., UniMax, 2023 (arXiv:2304.09151).
"""

from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_train.diffusion.components import Component
from stack_train.diffusion.layers import Tokens
from stack_train.models.reader import Reader, Setting
from stack_train.nn.feed_forward import Gated
from stack_train.nn.linear import FloatName, lookup
from stack_train.nn.relative_attention import RelativePositions
from stack_train.nn.relative_stack import Stack, StackSpec
from stack_train.nn.residual import Norm, Rows

__all__ = ["COMPONENT", "FAMILY", "UMT5", "T5Encoder", "T5EncoderConfig", "count_tokens"]


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
      layer_biases: every layer has its own biases of the buckets, as in UMT5; otherwise all layers share them.
      pad_id: padding token. Padding is masked in attention and gets hidden states of 0. None treats it like other
        tokens.
      norm_epsilon: added to the mean square in norms.
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
    layer_biases: bool = False
    pad_id: NonNegativeInt | None = None
    norm_epsilon: PositiveFloat = 1e-6
    dtype: FloatName = "bfloat16"
    param_dtype: FloatName = "float32"

    def __post_init__(self) -> None:
        # Raises for invalid buckets.
        self.stack()

    def stack(self) -> StackSpec:
        """Returns the architecture of the layers."""
        positions = RelativePositions(buckets=self.buckets, max_distance=self.max_distance, bidirectional=True)
        return StackSpec(
            layers=self.layers,
            heads=self.heads,
            head_dim=self.head_dim,
            feed_forward=Gated(width=self.mlp, activation="gelu_tanh"),
            positions=positions,
            layer_biases=self.layer_biases,
        )


class T5Encoder(nnx.Module):
    """Token ids to hidden states."""

    def __init__(self, config: T5EncoderConfig, *, key: jax.Array) -> None:
        self.config = config
        outer, inner = jax.random.split(key)
        values = jax.random.normal(outer, (config.vocab_size, config.embed), config.param_dtype)
        self.embedding = nnx.Param(values, logical_axes=("vocab", "embed"))
        norm = Norm(epsilon=config.norm_epsilon)
        self.encoder = Stack(config.stack(), config.embed, norm, config.param_dtype, key=inner)

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Tokens:
        """Returns hidden states in float32; every token attends to every other, except for padding (`pad_id`)."""
        x = lookup(self.embedding[...], tokens, self.config.dtype)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        if self.config.pad_id is None:
            hidden, _ = self.encoder(x, Rows(positions, None), remat="none", unroll=False, moves=False)
            return hidden.astype(jnp.float32)
        real = positions < count_tokens(tokens, self.config.pad_id)[:, None]
        hidden, _ = self.encoder(x, Rows(positions, real.astype(jnp.int32)), remat="none", unroll=False, moves=False)
        return jnp.where(real[..., None], hidden.astype(jnp.float32), 0.0)


def count_tokens(tokens: Int[Array, "batch seq"], pad_id: int) -> Int[Array, " batch"]:
    """Returns the number of tokens of each text before the padding at its end."""
    # A text may contain the padding token, too.
    return jnp.max(jnp.where(tokens == pad_id, 0, jnp.arange(1, tokens.shape[1] + 1)), axis=1)


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
        "encoder/biases": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "encoder/blocks/attention/query": _ATTENTION + "q",
        "encoder/blocks/attention/key": _ATTENTION + "k",
        "encoder/blocks/attention/value": _ATTENTION + "v",
        "encoder/blocks/attention/output": _ATTENTION + "o",
        "encoder/blocks/feed_forward/gate": _FEED_FORWARD + "wi_0",
        "encoder/blocks/feed_forward/up": _FEED_FORWARD + "wi_1",
        "encoder/blocks/feed_forward/down": _FEED_FORWARD + "wo",
        "encoder/blocks/attention_norm": _BLOCK + "0.layer_norm.weight",
        "encoder/blocks/feed_forward_norm": _BLOCK + "1.layer_norm.weight",
        "encoder/norm": "encoder.final_layer_norm.weight",
    },
)

_BIASES = "encoder.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight"
_DEFAULTS = {"vocab_size": 250_112, "mlp": 1024, "layers": 8, "heads": 6}


def _read_padding(reader: Reader) -> dict[str, Any]:
    return {"layer_biases": True, "pad_id": reader.get("pad_token_id", default=0)}


UMT5 = replace(
    COMPONENT,
    class_name="UMT5EncoderModel",
    model_type="umt5",
    settings=tuple(replace(each, default=_DEFAULTS.get(each.ours, each.default)) for each in COMPONENT.settings),
    silent=(*COMPONENT.silent, "decoder_start_token_id", "classifier_dropout"),
    read_others=_read_padding,
    write_others=lambda config: {"pad_token_id": config.pad_id},
    names={
        **{ours: theirs for ours, theirs in COMPONENT.names.items() if ours != "encoder/biases"},
        "encoder/blocks/biases": _BIASES,
    },
)
