"""UNet of Stable Diffusion: convolutions on several scales, with attention to each other pixel and to a text.

It is equivalent to diffusers' `UNet2DConditionModel` with the blocks of Stable Diffusion 1, 2 and XL: `DownBlock2D`,
`CrossAttnDownBlock2D`, `UNetMidBlock2DCrossAttn` and their mirror images.

Sources: Rombach et al., High-Resolution Image Synthesis with Latent Diffusion Models, 2022 (arXiv:2112.10752); size
embeddings: Podell et al., SDXL, 2023 (arXiv:2307.01952).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from stack_core import ops
from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.diffusion.components import Component
from stack_train.diffusion.convolution import Convolution, Features, GroupNorm
from stack_train.diffusion.denoiser import Condition, Images, Predicted, predicted_halfway, unconditional
from stack_train.diffusion.layers import ATTENTION, TOKENS, Tokens, split_heads, waves
from stack_train.models.reader import Reader, Setting
from stack_train.nn.build import Build
from stack_train.nn.layer_norm import LayerNorm
from stack_train.nn.linear import FloatName, Linear
from stack_train.nn.residual import Norm
from stack_train.nn.stack import scan_layers

__all__ = [
    "COMPONENT",
    "DESCENT_KEYS",
    "DESCENT_SETTINGS",
    "FAMILY",
    "SILENT_KEYS",
    "Descent",
    "Layers",
    "Unet",
    "UnetConfig",
    "component_name",
    "projections",
    "read_descent",
    "skip_widths",
    "write_descent",
]

_SIZES = 6  # original height and width, top and left of the crop, target height and width
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


class Descent(nnx.Module):
    """The way down and the middle of a UNet, which a ControlNet has too."""

    def __init__(self, config: UnetConfig, layers: Layers) -> None:
        self.config, widths = config, config.widths
        last, blocks = len(widths) - 1, config.blocks_per_level
        self.conv_in = layers.convolution((config.channels + config.extra_channels, widths[0]))
        self.time_embedding = Embedding(layers, widths[0], 4 * widths[0])
        added = config.pooled_dim + _SIZES * config.size_features
        self.add_embedding = Embedding(layers, added, 4 * widths[0]) if added else None
        channels = widths[0]
        down: list[Level] = []
        for level, width in enumerate(widths):
            sizes = [channels, *[width] * (blocks - 1)]
            down.append(Level(layers, sizes, level, resizes="down" if level < last else None))
            channels = width
        self.down_blocks, self.mid_block = nnx.List(down), Middle(layers)

    def descend(
        self, x: Features, time: Float[Array, "batch time"], text: Float[Array, "batch tokens features"]
    ) -> tuple[Features, list[Features]]:
        """Returns the output of the middle, and all outputs on the way down, finest first."""
        call = self.run_block
        skips = [x]
        for level in self.down_blocks:
            for place, block in enumerate(level.resnets):
                x = call(block, x, time)
                x = call(level.attentions[place], x, text) if level.attentions else x
                skips.append(x)
            for halve in level.downsamplers:
                x = halve(x)
                skips.append(x)
        first, second = self.mid_block.resnets
        return call(second, call(self.mid_block.attentions[0], call(first, x, time), text), time), skips

    def run_block(self, module: Any, *arguments: Array) -> Features:
        """Calls a block; with `remat`, it is recomputed in the backward pass."""
        if self.config.remat == "none" or isinstance(module, Transformer):  # which recomputes its layers
            return module(*arguments)
        graph, state = nnx.split(module)
        return jax.checkpoint(lambda state, *arguments: nnx.merge(graph, state)(*arguments))(state, *arguments)

    def embedded(self, timesteps: Float[Array, " batch"], condition: Condition) -> Float[Array, "batch time"]:
        """Returns silu of the embedded time, pooled text and sizes, which every residual block reads."""
        config = self.config
        embedded = self.time_embedding(waves(timesteps, config.widths[0], last=0).astype(config.dtype))
        if self.add_embedding is not None:
            sizes = waves(condition["sizes"].reshape(-1).astype(jnp.float32), config.size_features, last=0)
            added = [condition["pooled"].astype(jnp.float32), sizes.reshape(len(timesteps), -1)]
            embedded = embedded + self.add_embedding(jnp.concatenate(added, axis=-1).astype(config.dtype))
        return jax.nn.silu(embedded)


class Unet(Descent):
    """A `Denoiser` whose condition is "text", [batch, tokens, text_dim], and in SDXL "pooled" and "sizes".

    "pooled" is [batch, pooled_dim]. "sizes" is [batch, 6] in pixels: original height and width, top and left of the
    crop, target height and width. The last layers of blocks start at 0, which makes each block the identity at first.

    Attributes:
      control: a `ControlNet`, whose residuals are added to the outputs on the way down and of the middle; or None.
    """

    def __init__(self, config: UnetConfig, *, key: jax.Array) -> None:
        widths, blocks, layers = config.widths, config.blocks_per_level, Layers(config, key)
        super().__init__(config, layers)
        self.control: Any = nnx.data(None)
        # The way up consumes the outputs on the way down in reverse.
        skips, channels = skip_widths(config), widths[-1]
        up: list[Level] = []
        for level in reversed(range(len(widths))):
            sizes = [before + skips.pop() for before in (channels, *[widths[level]] * blocks)]
            up.append(Level(layers, sizes, level, resizes="up" if level else None))
            channels = widths[level]
        self.up_blocks = nnx.List(up)
        self.conv_norm_out = layers.norm(widths[0])
        self.conv_out = layers.convolution((widths[0], config.channels), zeros=True)

    def __call__(self, images: Images, timesteps: Float[Array, " batch"], condition: Condition) -> Predicted:
        text, call = condition["text"].astype(self.config.dtype), self.run_block
        time = self.embedded(timesteps, condition)
        x, skips = self.descend(self.conv_in(images.astype(self.config.dtype)), time, text)
        if self.control is not None:
            residuals, residual = self.control(images, timesteps, condition)
            skips = [skip + other.astype(x.dtype) for skip, other in zip(skips, residuals, strict=True)]
            x = x + residual.astype(x.dtype)
        elif "control" in condition:
            raise ConfigError(
                "The batches have control images, and only a ControlNet reads them. Add the section controlnet, or "
                "leave data.controls out."
            )
        for level in self.up_blocks:
            for place, block in enumerate(level.resnets):
                x = call(block, jnp.concatenate([x, skips.pop()], axis=-1), time)
                x = call(level.attentions[place], x, text) if level.attentions else x
            for smooth in level.upsamplers:
                height, width = skips[-1].shape[1:3]
                # Odd sizes were rounded up on the way down.
                x = smooth(x.repeat(2, axis=1).repeat(2, axis=2)[:, :height, :width])
        return self.conv_out(jax.nn.silu(self.conv_norm_out(x))).astype(jnp.float32)

    def on_batch(self, batch: Mapping[str, jax.Array]) -> Predicted:
        """See `RunsOnBatches`."""
        return predicted_halfway(self, batch)

    def unconditional(self, condition: Condition) -> Condition:
        """See `unconditional`; both predictions get the same sizes and control image."""
        return unconditional(condition, shared=("sizes", "control", "control_scale"))


def skip_widths(config: UnetConfig) -> list[int]:
    """Returns the channels of every output on the way down, finest first."""
    found = [config.widths[0]]
    for level, width in enumerate(config.widths):
        found += [width] * (config.blocks_per_level + (level + 1 < len(config.widths)))
    return found


class UnetFamily:
    """The `ModelFamily` of UNets."""

    name = "unet"
    config_class = UnetConfig

    def build(self, config: UnetConfig, *, key: jax.Array) -> Unet:
        return Unet(config, key=key)


FAMILY = UnetFamily()

_DOWN, _ATTENDING_DOWN = "DownBlock2D", "CrossAttnDownBlock2D"
_UP, _ATTENDING_UP = "UpBlock2D", "CrossAttnUpBlock2D"
_KINDS = [*[_ATTENDING_DOWN] * 3, _DOWN]


def _read_levels(reader: Reader) -> dict[str, Any]:
    kinds = reader.get("down_block_types", default=_KINDS)
    # The way up mirrors the way down.
    reader.expect("up_block_types", [_UP if kind == _DOWN else _ATTENDING_UP for kind in reversed(kinds)])
    extra = reader.get("in_channels", default=4) - reader.get("out_channels", default=4)
    return {**read_descent(reader), "extra_channels": extra}


def read_descent(reader: Reader) -> dict[str, Any]:
    """Reads the fields of the way down and the middle."""
    widths = list(reader.get("block_out_channels", default=[320, 640, 1280, 1280]))
    kinds = list(reader.get("down_block_types", default=_KINDS))
    if unknown := sorted({*kinds} - {_DOWN, _ATTENDING_DOWN}):
        reader.problems.append(f"down_block_types={unknown}, not {_DOWN} or {_ATTENDING_DOWN}")
    counts = _per_level(reader.get("transformer_layers_per_block", default=1), widths)
    # diffusers stores the number of heads under this name, a mistake that was never corrected.
    heads = _per_level(reader.get("attention_head_dim", default=8), widths)
    found = {
        "widths": widths,
        "transformer_layers": [0 if kind == _DOWN else count for kind, count in zip(kinds, counts, strict=False)],
        "middle_layers": counts[-1],
        "heads": heads,
        "scale_shift": reader.get("resnet_time_scale_shift", default="default") == "scale_shift",
    }
    return found | _read_addition(reader)


def _read_addition(reader: Reader) -> dict[str, Any]:
    kind = reader.get("addition_embed_type")
    total, features = reader.get("projection_class_embeddings_input_dim"), reader.get("addition_time_embed_dim")
    if kind is None:
        return {}
    if kind != "text_time" or not total or not features:
        reader.problems.append(
            f"addition_embed_type={kind!r} with projection_class_embeddings_input_dim={total!r} and "
            f"addition_time_embed_dim={features!r}, not text_time with both"
        )
        return {}
    return {"pooled_dim": total - _SIZES * features, "size_features": features, "zero_unconditional": True}


def _per_level(value: Any, widths: list[int]) -> list[int]:
    return [value] * len(widths) if isinstance(value, int) else list(value)


def _write_levels(config: UnetConfig) -> dict[str, Any]:
    attends = [bool(count) for count in config.transformer_layers]
    return {
        **write_descent(config),
        "up_block_types": [_ATTENDING_UP if each else _UP for each in reversed(attends)],
        "in_channels": config.channels + config.extra_channels,
    }


def write_descent(config: UnetConfig) -> dict[str, Any]:
    """Returns the keys of the way down and the middle."""
    attends = [bool(count) for count in config.transformer_layers]
    # Levels without attention count as 1. The middle reads the count of the last level.
    counts = [count or 1 for count in config.transformer_layers[:-1]] + [config.middle_layers]
    added = config.pooled_dim + _SIZES * config.size_features
    return {
        "block_out_channels": list(config.widths),
        "down_block_types": [_ATTENDING_DOWN if each else _DOWN for each in attends],
        "transformer_layers_per_block": counts,
        "attention_head_dim": list(config.heads),
        "resnet_time_scale_shift": "scale_shift" if config.scale_shift else "default",
        "addition_embed_type": "text_time" if added else None,
        "addition_time_embed_dim": config.size_features or None,
        "projection_class_embeddings_input_dim": added or None,
    }


_NAMES = (
    ("/blocks/", "/transformer_blocks/{layer}/"),
    ("/to_out", "/to_out/0"),
    ("/enter", "/ff/net/0/proj"),
    ("/leave", "/ff/net/2"),
    ("samplers/0", "samplers/0/conv"),
)


def component_name(module: str) -> str:
    """Returns the name in diffusers of a module of a UNet."""
    for ours, theirs in _NAMES:
        module = module.replace(ours, theirs)
    return module.replace("/", ".")


def projections(config: UnetConfig) -> Iterator[tuple[str, int]]:
    """Lists the projections around transformer layers and their widths."""
    blocks, levels = config.blocks_per_level, list(zip(config.widths, config.transformer_layers, strict=True))
    places = [("mid_block/attentions/0", config.widths[-1])]
    for part, order, count in (("down", levels, blocks), ("up", levels[::-1], blocks + 1)):
        places += [
            (f"{part}_blocks/{level}/attentions/{place}", width)
            for level, (width, layers) in enumerate(order)
            for place in range(count if layers else 0)
        ]
    for place, width in places:
        yield f"{place}/proj_in", width
        yield f"{place}/proj_out", width


DESCENT_SETTINGS = (
    Setting("blocks_per_level", ("layers_per_block",), 2),
    Setting("text_dim", ("cross_attention_dim",), 1280),
    Setting("linear_projections", ("use_linear_projection",), False),
    Setting("groups", ("norm_num_groups",), 32),
    Setting("norm_epsilon", ("norm_eps",), 1e-5),
)
DESCENT_KEYS = {
    "act_fn": "silu",
    "downsample_padding": 1,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "mid_block_scale_factor": 1,
    "mid_block_type": "UNetMidBlock2DCrossAttn",
}
# Precision of scores in half precision, and a number that only other additions read.
SILENT_KEYS = ("upcast_attention", "addition_embed_type_num_heads")

COMPONENT = Component(
    class_name="UNet2DConditionModel",
    family=FAMILY,
    settings=(
        Setting("image_size", ("sample_size",), 64),
        Setting("channels", ("out_channels",), 4),
        *DESCENT_SETTINGS,
    ),
    fixed={
        **DESCENT_KEYS,
        "attention_type": "default",
        "conv_in_kernel": 3,
        "conv_out_kernel": 3,
        "resnet_out_scale_factor": 1.0,
        "time_embedding_type": "positional",
    },
    silent=SILENT_KEYS,
    read_others=_read_levels,
    write_others=_write_levels,
    names={},
    rename=component_name,
    squares=lambda config: (
        {} if config.linear_projections else {path: (width, 1, 1) for path, width in projections(config)}
    ),
)
