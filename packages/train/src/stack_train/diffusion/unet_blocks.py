"""Config and blocks of a UNet: residual blocks, transformer layers, and the levels that they form.

Sources: as `unet`.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from stack_core import ops
from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.diffusion.convolution import Convolution, Features, GroupNorm
from stack_train.diffusion.layers import ATTENTION, TOKENS, Tokens, split_heads
from stack_train.nn.build import Build
from stack_train.nn.layer_norm import LayerNorm
from stack_train.nn.linear import FloatName, Linear
from stack_train.nn.residual import Norm
from stack_train.nn.stack import scan_layers

__all__ = ["Embedding", "Layers", "Level", "Middle", "Transformer", "UnetConfig"]

_TRANSFORMER_EPSILON = 1e-6  # epsilon of the group norm before transformer layers, independent of `norm_epsilon`
_EXPANSION = 4


@config
class UnetConfig:
    """Size and numerics of a UNet. The defaults match Stable Diffusion 1.5.

    Attributes:
      name: selects this family.
      image_size: height and width of the training latents; the weights fit any size.
      channels: channels of the latents.
      extra_channels: additional input channels, such as the mask and the masked latents of inpainting models (5).
      widths: channels of each level, finest first; each level but the last halves the latents.
      blocks_per_level: residual blocks per level on the way down; there is one more on the way up.
      transformer_layers: transformer layers after each residual block, per level; 0 is a level without attention.
      middle_layers: transformer layers at the coarsest point.
      heads: number of attention heads per level.
      text_dim: features of each text token.
      pooled_dim: features of the pooled text; 0 for models without pooled text.
      text_tokens: number of tokens in a text.
      size_features: features of each of the six sizes of SDXL; 0 for models without sizes. Models with a pooled text
        have sizes.
      zero_unconditional: makes the condition of unconditional predictions 0, as in SDXL, instead of the encoded empty
        prompt.
      linear_projections: stores the projections around transformer layers as matrices in checkpoints, instead of 1 x 1
        convolutions.
      scale_shift: scales and shifts the second norm of a residual block by the time embedding, instead of adding the
        embedding before the norm.
      groups: number of groups of the group norms, a divisor of each width.
      norm_epsilon: added to the variance in group norms of residual blocks.
      dtype: dtype of the activations.
      param_dtype: dtype of the parameters.
      remat: "full" recomputes residual blocks and transformer layers in the backward pass.
    """

    name: Literal["unet"] = "unet"
    image_size: PositiveInt = 64
    channels: PositiveInt = 4
    extra_channels: NonNegativeInt = 0
    widths: tuple[PositiveInt, ...] = (320, 640, 1280, 1280)
    blocks_per_level: PositiveInt = 2
    transformer_layers: tuple[NonNegativeInt, ...] = (1, 1, 1, 0)
    middle_layers: PositiveInt = 1
    heads: tuple[PositiveInt, ...] = (8, 8, 8, 8)
    text_dim: PositiveInt = 768
    pooled_dim: NonNegativeInt = 0
    text_tokens: PositiveInt = 77
    size_features: NonNegativeInt = 0
    zero_unconditional: bool = False
    linear_projections: bool = False
    scale_shift: bool = False
    groups: PositiveInt = 32
    norm_epsilon: PositiveFloat = 1e-5
    dtype: FloatName = "bfloat16"
    param_dtype: FloatName = "float32"
    remat: Literal["none", "full"] = "none"

    def __post_init__(self) -> None:
        levels = len(self.widths)
        if not levels or any(len(each) != levels for each in (self.transformer_layers, self.heads)):
            raise ConfigError(
                f"widths, transformer_layers and heads have {levels}, {len(self.transformer_layers)} and "
                f"{len(self.heads)} entries; each needs one entry per level."
            )
        if wrong := [width for width in self.widths if width % self.groups]:
            raise ConfigError(f"widths={list(self.widths)}: {wrong} are not multiples of groups={self.groups}.")
        attends = [*self.transformer_layers[:-1], 1]  # the middle attends with the last level's heads
        if wrong := [(w, h) for w, h, n in zip(self.widths, self.heads, attends, strict=True) if n and w % h]:
            raise ConfigError(f"widths and heads are {wrong}; each width is a multiple of its number of heads.")
        if bool(self.pooled_dim) != bool(self.size_features):
            raise ConfigError(
                f"pooled_dim={self.pooled_dim} and size_features={self.size_features}: a UNet has a pooled text and "
                "sizes, or neither. Set both, or both to 0."
            )

    @property
    def classes(self) -> int:
        """Labels, of which the model takes none."""
        return 0


class Layers:
    """Makes layers of a config; the nth that samples values uses `fold_in(key, n)`."""

    def __init__(self, config: UnetConfig, key: jax.Array) -> None:
        self.config, self._key, self._draws = config, key, 0

    def key(self) -> jax.Array:
        self._draws += 1
        return jax.random.fold_in(self._key, self._draws - 1)

    def convolution(
        self, channels: tuple[int, int], *, side: int = 3, stride: int = 1, zeros: bool = False
    ) -> Convolution:
        options: Any = {"pads_before": True, "zeros": zeros, "param_dtype": self.config.param_dtype}
        return Convolution(channels, side=side, stride=stride, key=self.key(), **options)

    def linear(self, d_in: int, d_out: int, axes: tuple[str | None, str | None], *, zeros: bool = False) -> Linear:
        std, dtype = 0.0 if zeros else d_in**-0.5, self.config.param_dtype
        return Linear((d_in, d_out), axes, use_bias=True, std=std, param_dtype=dtype, key=self.key())

    def norm(self, channels: int, epsilon: float | None = None) -> GroupNorm:
        config = self.config
        return GroupNorm(channels, config.groups, config.param_dtype, epsilon=epsilon or config.norm_epsilon)


class Embedding(nnx.Module):
    """out(silu(in(x))): a number's waves, or a pooled text and sizes, as wide as the embedded time."""

    def __init__(self, layers: Layers, features: int, width: int) -> None:
        self.linear_1 = layers.linear(features, width, (None, "embed"))
        self.linear_2 = layers.linear(width, width, ("embed", None))

    def __call__(self, x: Float[Array, "batch features"]) -> Float[Array, "batch width"]:
        return self.linear_2(jax.nn.silu(self.linear_1(x)))


class ResidualBlock(nnx.Module):
    """x + convolutions(x, time); a 1 x 1 convolution leads x to another number of channels."""

    def __init__(self, layers: Layers, channels: int, width: int) -> None:
        config = layers.config
        self.scale_shift = config.scale_shift
        self.norm1, self.conv1 = layers.norm(channels), layers.convolution((channels, width))
        parts = 2 if config.scale_shift else 1
        self.time_emb_proj = layers.linear(4 * config.widths[0], parts * width, ("embed", None))
        self.norm2, self.conv2 = layers.norm(width), layers.convolution((width, width), zeros=True)
        self.conv_shortcut = layers.convolution((channels, width), side=1) if channels != width else None

    def __call__(self, x: Features, time: Float[Array, "batch time"]) -> Features:
        y = self.conv1(jax.nn.silu(self.norm1(x)))
        embedded = self.time_emb_proj(time)[:, None, None]
        if self.scale_shift:
            scale, shift = jnp.split(embedded, 2, axis=-1)
            y = self.norm2(y) * (1 + scale) + shift
        else:
            y = self.norm2(y + embedded)
        y = self.conv2(jax.nn.silu(y))
        return y + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class Attention(nnx.Module):
    """Attention of pixels to a context: to each other, or to a text."""

    def __init__(self, build: Build, width: int, context: int, heads: int) -> None:
        self.heads = heads
        self.to_q = build.linear((width, width), ("embed", "heads"))
        self.to_k = build.linear((context, width), ("embed", "heads"))
        self.to_v = build.linear((context, width), ("embed", "heads"))
        self.to_out = build.linear((width, width), ("heads", "embed"), bias=True)

    def __call__(self, x: Tokens, context: Float[Array, "batch keys features"]) -> Tokens:
        query = split_heads(self.to_q(x), self.heads, "queries")
        key, value = (split_heads(linear(context), self.heads, "keys") for linear in (self.to_k, self.to_v))
        attended: Any = ops.attention(query, key, value, axes=ATTENTION)
        return self.to_out(attended.reshape(x.shape))


class TransformerBlock(nnx.Module):
    """Attention among pixels, attention to the text, a gated layer, each added; called with the slice of one layer."""

    def __init__(self, config: UnetConfig, build: Build, width: int, heads: int) -> None:
        mlp = _EXPANSION * width
        self.norm1, self.norm2, self.norm3 = (LayerNorm.of_layers(build, TOKENS) for _ in range(3))
        self.attn1 = Attention(build, width, width, heads)
        self.attn2 = Attention(build, width, config.text_dim, heads)
        # [up, gate], one matrix in checkpoints.
        self.enter = build.linear((width, 2 * mlp), ("embed", "mlp"), bias=True)
        self.leave = build.linear((mlp, width), ("mlp", "embed"), bias=True)

    def __call__(self, x: Tokens, text: Float[Array, "batch tokens features"]) -> Tokens:
        normed = self.norm1(x)
        x = x + self.attn1(normed, normed)
        x = x + self.attn2(self.norm2(x), text)
        up, gate = jnp.split(self.enter(self.norm3(x)), 2, axis=-1)
        return x + self.leave(up * jax.nn.gelu(gate, approximate=False))


class Transformer(nnx.Module):
    """x + transformer layers(x), with the pixels as tokens."""

    def __init__(self, layers: Layers, width: int, count: int, heads: int) -> None:
        config = layers.config
        self.remat: Literal["none", "full"] = config.remat
        self.norm = layers.norm(width, _TRANSFORMER_EPSILON)
        self.proj_in = layers.linear(width, width, ("embed", None))
        std = width**-0.5
        build = Build(width, count, std, std, Norm(epsilon=1e-5), config.param_dtype, layers.key())
        self.blocks = TransformerBlock(config, build, width, heads)
        self.proj_out = layers.linear(width, width, (None, "embed"), zeros=True)

    def __call__(self, x: Features, text: Float[Array, "batch tokens features"]) -> Features:
        # [batch, height * width, channels]
        tokens = self.proj_in(self.norm(x).reshape(x.shape[0], -1, x.shape[-1]))

        def run(block: TransformerBlock, tokens: Tokens, text: Array, _: None) -> tuple[Tokens, None]:
            return block(tokens, text), None

        options: dict[str, Any] = {"remat": self.remat, "unroll": None, "moves": True}
        tokens, _ = scan_layers(run, [self.blocks], tokens, [None], per_row=text, **options)
        return x + self.proj_out(tokens).reshape(x.shape)


class Level(nnx.Module):
    """Residual blocks of one width, each with transformer layers if the level attends, then a change of size."""

    def __init__(
        self, layers: Layers, channels: list[int], level: int, *, resizes: Literal["down", "up"] | None
    ) -> None:
        config = layers.config
        width, count, heads = (each[level] for each in (config.widths, config.transformer_layers, config.heads))
        self.resnets = nnx.List([ResidualBlock(layers, each, width) for each in channels])
        self.attentions = nnx.List([Transformer(layers, width, count, heads) for _ in channels if count])
        self.downsamplers = nnx.List([layers.convolution((width, width), stride=2)] if resizes == "down" else [])
        self.upsamplers = nnx.List([layers.convolution((width, width))] if resizes == "up" else [])


class Middle(nnx.Module):
    """Two residual blocks around transformer layers, at the coarsest resolution."""

    def __init__(self, layers: Layers) -> None:
        config = layers.config
        width = config.widths[-1]
        self.resnets = nnx.List([ResidualBlock(layers, width, width) for _ in range(2)])
        self.attentions = nnx.List([Transformer(layers, width, config.middle_layers, config.heads[-1])])
