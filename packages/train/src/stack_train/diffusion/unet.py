"""UNet of Stable Diffusion: convolutions on several scales, with attention to each other pixel and to a text.

It is equivalent to diffusers' `UNet2DConditionModel` with the blocks of Stable Diffusion 1, 2 and XL: `DownBlock2D`,
`CrossAttnDownBlock2D`, `UNetMidBlock2DCrossAttn` and their mirror images.

Sources: Rombach et al., High-Resolution Image Synthesis with Latent Diffusion Models, 2022 (arXiv:2112.10752); size
embeddings: Podell et al., SDXL, 2023 (arXiv:2307.01952).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from stack_core.abi.errors import ConfigError
from stack_train.diffusion.components import Component
from stack_train.diffusion.convolution import Features
from stack_train.diffusion.denoiser import Condition, Images, Predicted, predicted_halfway, unconditional
from stack_train.diffusion.layers import waves
from stack_train.diffusion.unet_blocks import Embedding, Layers, Level, Middle, Transformer, UnetConfig
from stack_train.models.reader import Reader, Setting

__all__ = [
    "COMPONENT",
    "DESCENT_KEYS",
    "DESCENT_SETTINGS",
    "FAMILY",
    "SILENT_KEYS",
    "Descent",
    "Unet",
    "UnetConfig",
    "component_name",
    "projections",
    "read_descent",
    "skip_widths",
    "write_descent",
]

_SIZES = 6  # original height and width, top and left of the crop, target height and width


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
