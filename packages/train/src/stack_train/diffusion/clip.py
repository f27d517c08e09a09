"""CLIP's text encoder: a causal transformer over a text, pooled at its last token.

It is equivalent to transformers' `CLIPTextModel` and, with a projection, to `CLIPTextModelWithProjection`.

Source: Radford et al., Learning Transferable Visual Models From Natural Language Supervision, 2021 (arXiv:2103.00020).
"""

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from stack_core import ops
from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.diffusion.components import Component
from stack_train.diffusion.layers import ATTENTION, TOKENS, Tokens, split_heads
from stack_train.models.reader import Setting
from stack_train.nn.build import Build
from stack_train.nn.layer_norm import LayerNorm
from stack_train.nn.linear import FloatName, Linear, lookup
from stack_train.nn.residual import Norm
from stack_train.nn.stack import scan_layers

__all__ = ["COMPONENT", "FAMILY", "PROJECTED", "ClipText", "ClipTextConfig", "Encoded"]

_OLD_END = 2  # written in the configs of early CLIP models, whose end of text is the largest id


@config
class ClipTextConfig:
    """Size and numerics of a CLIP text encoder. The defaults match ViT-L/14.

    Attributes:
      name: selects this family.
      vocab_size: number of tokens.
      embed: width of the residual stream.
      mlp: hidden width of the feed-forward layers.
      layers: number of blocks.
      heads: number of attention heads, a divisor of `embed`.
      max_positions: maximum number of tokens in a text, including the first and the last special token.
      activation: activation of the feed-forward layers; "quick_gelu" is x sigmoid(1.702 x).
      norm_epsilon: added to the variance in layer norms.
      end: token whose first occurrence is pooled into the vector of the text; 2 pools at the largest token id.
      projection: width of the projected vector of the text.
      projects: adds the projection, as in `CLIPTextModelWithProjection`.
      initializer_std: standard deviation of the initial weights.
      dtype: dtype of the activations.
      param_dtype: dtype of the parameters.
    """

    name: Literal["clip_text"] = "clip_text"
    vocab_size: PositiveInt = 49_408
    embed: PositiveInt = 768
    mlp: PositiveInt = 3072
    layers: PositiveInt = 12
    heads: PositiveInt = 12
    max_positions: PositiveInt = 77
    activation: Literal["quick_gelu", "gelu"] = "quick_gelu"
    norm_epsilon: PositiveFloat = 1e-5
    end: NonNegativeInt = 49_407
    projection: PositiveInt = 768
    projects: bool = False
    initializer_std: PositiveFloat = 0.02
    dtype: FloatName = "bfloat16"
    param_dtype: FloatName = "float32"

    def __post_init__(self) -> None:
        if self.embed % self.heads:
            raise ConfigError(f"embed={self.embed} is no multiple of heads={self.heads}; change one of them.")


class ClipBlock(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); called with the slice of one layer."""

    def __init__(self, config: ClipTextConfig, build: Build) -> None:
        embed, self.heads, self.activation = config.embed, config.heads, config.activation
        self.query = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.key = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.value = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.output = build.linear((embed, embed), ("heads", "embed"), bias=True)
        self.up = build.linear((embed, config.mlp), ("embed", "mlp"), bias=True)
        self.down = build.linear((config.mlp, embed), ("mlp", "embed"), bias=True)
        self.attention_norm, self.mlp_norm = (LayerNorm.of_layers(build, TOKENS) for _ in range(2))

    def __call__(self, x: Tokens) -> Tokens:
        normed = self.attention_norm(x)
        heads = (split_heads(linear(normed), self.heads, "heads") for linear in (self.query, self.key, self.value))
        attended: Any = ops.attention(*heads, causal=True, axes=ATTENTION)
        x = x + self.output(attended.reshape(x.shape))
        wide = self.up(self.mlp_norm(x))
        # False: this gelu is exact, without the approximation by tanh.
        wide = wide * jax.nn.sigmoid(1.702 * wide) if self.activation == "quick_gelu" else jax.nn.gelu(wide, False)
        return x + self.down(wide)


class Encoded(NamedTuple):
    """Encoded texts, in float32.

    Attributes:
      hidden: hidden states after the last norm.
      pooled: the vector of each text.
      penultimate: inputs of the last block, which SDXL reads.
    """

    hidden: Tokens
    pooled: Float[Array, "batch features"]
    penultimate: Tokens


class ClipText(nnx.Module):
    """Token ids to hidden states and one vector of the text."""

    def __init__(self, config: ClipTextConfig, *, key: jax.Array) -> None:
        self.config = config
        norm, outer, inner = Norm(epsilon=config.norm_epsilon), *jax.random.split(key)
        std, dtype = config.initializer_std, config.param_dtype
        values = std * jax.random.normal(outer, (config.vocab_size + config.max_positions, config.embed), dtype)
        tokens, positions = jnp.split(values, [config.vocab_size])
        self.embedding = nnx.Param(tokens, logical_axes=("vocab", "embed"))
        self.positions = nnx.Param(positions, logical_axes=(None, "embed"))
        self.blocks = ClipBlock(config, Build(config.embed, config.layers, std, std, norm, dtype, inner))
        self.norm = LayerNorm.single(config.embed, norm.epsilon, TOKENS, dtype)
        shape, axes = (config.embed, config.projection), ("embed", None)
        options: dict[str, Any] = {"use_bias": False, "std": std, "param_dtype": dtype}
        self.project = Linear(shape, axes, key=jax.random.fold_in(key, 2), **options) if config.projects else None

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Encoded:
        x = lookup(self.embedding[...], tokens, self.config.dtype)
        x = x + self.positions[...][: tokens.shape[1]].astype(x.dtype)

        def run(block: ClipBlock, xs: tuple[Tokens, Tokens], _: None, __: None) -> tuple[tuple[Tokens, Tokens], None]:
            return (block(xs[0]), xs[0]), None

        # Nothing is rematerialized, because encoders are not trained.
        options: dict[str, Any] = {"remat": "none", "unroll": False, "moves": False}
        (x, before), _ = scan_layers(run, [self.blocks], (x, x), [None], per_row=None, **options)
        hidden = self.norm(x).astype(jnp.float32)
        old = self.config.end == _OLD_END
        # `argmax` returns the first of equal values, so the first end token counts.
        ends = jnp.argmax(tokens if old else tokens == self.config.end, axis=-1)
        pooled = jnp.take_along_axis(hidden, ends[:, None, None], axis=1)[:, 0]
        pooled = pooled if self.project is None else self.project(pooled)
        return Encoded(hidden, pooled, before.astype(jnp.float32))


class ClipTextFamily:
    """The `ModelFamily` of CLIP's text encoders."""

    name = "clip_text"
    config_class = ClipTextConfig

    def build(self, config: ClipTextConfig, *, key: jax.Array) -> ClipText:
        return ClipText(config, key=key)


FAMILY = ClipTextFamily()

_TEXT, _BLOCK = "text_model.", "text_model.encoder.layers.{layer}."

COMPONENT = Component(
    class_name="CLIPTextModel",
    model_type="clip_text_model",
    stem="model",
    family=FAMILY,
    settings=(
        Setting("vocab_size", ("vocab_size",), 49_408),
        Setting("embed", ("hidden_size",), 512),
        Setting("mlp", ("intermediate_size",), 2048),
        Setting("layers", ("num_hidden_layers",), 12),
        Setting("heads", ("num_attention_heads",), 8),
        Setting("max_positions", ("max_position_embeddings",), 77),
        Setting("activation", ("hidden_act",), "quick_gelu"),
        Setting("norm_epsilon", ("layer_norm_eps",), 1e-5),
        Setting("end", ("eos_token_id",), 49_407),
        Setting("projection", ("projection_dim",), 512),
        Setting("initializer_std", ("initializer_range",), 0.02),
    ),
    silent=("tie_word_embeddings",),
    prefix=_TEXT,
    # Older checkpoints store the positions 0, 1, 2, ... as a tensor.
    redundant=(_TEXT + "embeddings.position_ids",),
    names={
        "embedding": _TEXT + "embeddings.token_embedding.weight",
        "positions": _TEXT + "embeddings.position_embedding.weight",
        "blocks/query": _BLOCK + "self_attn.q_proj",
        "blocks/key": _BLOCK + "self_attn.k_proj",
        "blocks/value": _BLOCK + "self_attn.v_proj",
        "blocks/output": _BLOCK + "self_attn.out_proj",
        "blocks/up": _BLOCK + "mlp.fc1",
        "blocks/down": _BLOCK + "mlp.fc2",
        "blocks/attention_norm": _BLOCK + "layer_norm1",
        "blocks/mlp_norm": _BLOCK + "layer_norm2",
        "norm": _TEXT + "final_layer_norm",
    },
)

PROJECTED = replace(
    COMPONENT,
    class_name="CLIPTextModelWithProjection",
    read_others=lambda reader: {"projects": True},
    prefix="",  # all of its checkpoints have the prefix
    names={**COMPONENT.names, "project": "text_projection"},
)
