"""CLIP's text encoder: a causal transformer over a text, pooled at its last token.

It is equivalent to transformers' `CLIPTextModel` and, with a projection, to `CLIPTextModelWithProjection`.

Source: Radford et al., Learning Transferable Visual Models From Natural Language Supervision, 2021 (arXiv:2103.00020).
"""

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_train.diffusion.components import Component
from stack_train.diffusion.layers import Tokens
from stack_train.models.reader import Setting
from stack_train.nn.linear import FloatName, Linear
from stack_train.nn.stack import RematPolicy, scan_layers
from stack_train.vision.text_tower import TextTower, TextTowerConfig
from stack_train.vision.tower_block import TowerBlock, run_blocks

__all__ = ["COMPONENT", "FAMILY", "PROJECTED", "ClipText", "ClipTextConfig", "ClipTextSize", "Encoded"]

_OLD_END = 2  # written in the configs of early CLIP models, whose end of text is the largest id


@config
class ClipTextSize(TextTowerConfig):
    """Size of a CLIP text encoder; inherits the fields of `TextTowerConfig`.

    Attributes:
      activation: activation of the feed-forward layers; "quick_gelu" is x sigmoid(1.702 x).
      end: token whose first occurrence is pooled into the vector of the text; 2 pools at the largest token id.
    """

    activation: Literal["quick_gelu", "gelu"] = "quick_gelu"
    end: NonNegativeInt = 49_407

    @property
    def pools_largest(self) -> bool:
        """True if texts are pooled at their largest token id, as in early CLIP models."""
        return self.end == _OLD_END


@config
class ClipTextConfig(ClipTextSize):
    """Size and numerics of a CLIP text encoder; inherits the fields of `ClipTextSize`.

    Attributes:
      name: selects this family.
      projection: width of the projected vector of the text.
      projects: adds the projection, as in `CLIPTextModelWithProjection`.
      initializer_std: standard deviation of the initial weights.
      dtype: dtype of the activations.
      param_dtype: dtype of the parameters.
    """

    name: Literal["clip_text"] = "clip_text"
    projection: PositiveInt = 768
    projects: bool = False
    initializer_std: PositiveFloat = 0.02
    dtype: FloatName = "bfloat16"
    param_dtype: FloatName = "float32"


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


class ClipText(TextTower):
    """Token ids to hidden states and one vector of the text.

    Args:
      config: size and numerics of the encoder.
      remat: see `scan_layers`; text encoders of denoisers are not trained.
      key: PRNG key.
    """

    def __init__(self, config: ClipTextConfig, *, remat: RematPolicy = "none", key: jax.Array) -> None:
        std, dtype = config.initializer_std, config.param_dtype
        numerics: dict[str, Any] = {"std": std, "dtype": config.dtype, "param_dtype": dtype, "remat": remat}
        super().__init__(config, activation=config.activation, causal=True, **numerics, key=key)
        shape, axes = (config.embed, config.projection), ("embed", None)
        options: dict[str, Any] = {"use_bias": False, "std": std, "param_dtype": dtype}
        self.project = Linear(shape, axes, key=jax.random.fold_in(key, 2), **options) if config.projects else None

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Encoded:
        def run(block: TowerBlock, xs: tuple[Tokens, Tokens], _: None, __: None) -> tuple[tuple[Tokens, Tokens], None]:
            return (block(xs[0]), xs[0]), None

        x = self.embedded(tokens)
        options: dict[str, Any] = {"remat": "none", "unroll": False, "moves": False}
        (x, before), _ = scan_layers(run, [self.blocks], (x, x), [None], per_row=None, **options)
        hidden = self.norm(x).astype(jnp.float32)
        return Encoded(hidden, self._pooled(tokens, hidden), before.astype(jnp.float32))

    def pooled(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch features"]:
        """Returns the vector of each text, as `__call__` does, in float32."""
        x = run_blocks(self.blocks, self.embedded(tokens), remat=self.remat)
        return self._pooled(tokens, self.norm(x).astype(jnp.float32))

    def _pooled(self, tokens: jax.Array, hidden: Tokens) -> Float[Array, "batch features"]:
        # `argmax` returns the first of equal values, so the first end token counts.
        ends = jnp.argmax(tokens if self.config.pools_largest else tokens == self.config.end, axis=-1)
        pooled = jnp.take_along_axis(hidden, ends[:, None, None], axis=1)[:, 0]
        return pooled if self.project is None else self.project(pooled)


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
        "blocks/feed_forward_norm": _BLOCK + "layer_norm2",
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
