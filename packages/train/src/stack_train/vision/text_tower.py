"""Text towers of image-text models: embedded tokens with learned positions, layers and a final norm."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.models.weight_map import WeightRule
from stack_train.nn.build import Build
from stack_train.nn.layer_norm import LayerNorm
from stack_train.nn.linear import FloatName, lookup
from stack_train.nn.residual import Norm
from stack_train.nn.stack import RematPolicy
from stack_train.vision.packed_patches import PATCHES
from stack_train.vision.siglip import block_rules
from stack_train.vision.tower_block import Activation, TowerBlock

__all__ = ["TextTower", "TextTowerConfig", "text_rules"]

Tokens = Float[Array, "batch seq embed"]


@config
class TextTowerConfig:
    """Size of a text tower. The defaults match the tower of CLIP ViT-L/14.

    Attributes:
      vocab_size: number of tokens.
      embed: width of the residual stream.
      mlp: hidden width of the feed-forward layers.
      layers: number of blocks.
      heads: number of attention heads, a divisor of `embed`.
      max_positions: maximum number of tokens in a text, including the first and the last special token.
      norm_epsilon: added to the variance in layer norms.
    """

    vocab_size: PositiveInt = 49_408
    embed: PositiveInt = 768
    mlp: PositiveInt = 3072
    layers: PositiveInt = 12
    heads: PositiveInt = 12
    max_positions: PositiveInt = 77
    norm_epsilon: PositiveFloat = 1e-5

    def __post_init__(self) -> None:
        if self.embed % self.heads:
            raise ConfigError(f"embed={self.embed} is not a multiple of heads={self.heads}; change one of them.")


class TextTower(nnx.Module):
    """Token ids to hidden states; subclasses pool them.

    Args:
      config: size of the tower.
      activation: activation of the feed-forward layers.
      causal: True hides later tokens.
      std: standard deviation of the initial weights.
      dtype: dtype of activations.
      param_dtype: dtype of parameters.
      remat: see `scan_layers`.
      key: PRNG key.
    """

    def __init__(
        self,
        config: Any,
        *,
        activation: Activation,
        causal: bool,
        std: float,
        dtype: FloatName,
        param_dtype: FloatName,
        remat: RematPolicy = "none",
        key: jax.Array,
    ) -> None:
        self.config, self.dtype, self.remat = config, dtype, remat
        norm, outer, inner = Norm(epsilon=config.norm_epsilon), *jax.random.split(key)
        values = std * jax.random.normal(outer, (config.vocab_size + config.max_positions, config.embed), param_dtype)
        tokens, positions = jnp.split(values, [config.vocab_size])
        self.embedding = nnx.Param(tokens, logical_axes=("vocab", "embed"))
        self.positions = nnx.Param(positions, logical_axes=(None, "embed"))
        build = Build(config.embed, config.layers, std, std, norm, param_dtype, inner)
        self.blocks = TowerBlock(config, build, activation=activation, causal=causal)
        self.norm = LayerNorm.single(config.embed, norm.epsilon, PATCHES, param_dtype)

    def embedded(self, tokens: Int[Array, "batch seq"]) -> Tokens:
        """Returns the input of the first layer. A token outside of the vocabulary has a NaN embedding."""
        x = lookup(self.embedding[...], tokens, self.dtype)
        return x + self.positions[...][: tokens.shape[1]].astype(x.dtype)


def text_rules(layers: int, *, parameter: str, tensor: str) -> list[WeightRule]:
    """Returns the locations of a tower's parameters; see `siglip_rules`."""
    names = {
        "embedding": "embeddings.token_embedding.weight",
        "positions": "embeddings.position_embedding.weight",
        "norm/scale": "final_layer_norm.weight",
        "norm/bias": "final_layer_norm.bias",
    }
    rules = [WeightRule(parameter + path, tensor + name) for path, name in names.items()]
    return [*rules, *block_rules(layers, parameter=f"{parameter}blocks/", tensor=tensor)]
