"""AutoencoderKL: images to latents, an eighth as high and wide for four levels of channels, and back.

It computes what diffusers' `AutoencoderKL` does.

Source: Rombach et al., High-Resolution Image Synthesis with Latent Diffusion Models, 2022 (arXiv:2112.10752).
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from pydantic import PositiveFloat, PositiveInt

from stack_core import ops
from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.diffusion.components import Component
from stack_train.diffusion.convolution import Convolution, Features, GroupNorm
from stack_train.diffusion.denoiser import Images
from stack_train.models.reader import Reader, Setting
from stack_train.nn.linear import FloatName, Linear

__all__ = ["COMPONENT", "FAMILY", "AutoencoderKl", "AutoencoderKlConfig", "clipped_log_variance"]

_ATTENTION = dict.fromkeys(("query", "key", "value"), ("batch", None, None, None))

Latents = Float[Array, "batch latent_height latent_width latent_channels"]


@config
class AutoencoderKlConfig:
    """Size and numerics of an autoencoder.

    Attributes:
      name: selects this family.
      image_size: height and width of the training images in pixels; the weights fit any size.
      channels: channels of the images.
      latent_channels: channels of the latents.
      widths: channels of each level, finest first; each level but the last halves the image.
      blocks_per_level: residual blocks per level of the encoder; the decoder has one more.
      groups: number of groups of the group norms, a divisor of each width.
      attends: adds self-attention at the coarsest level.
      quantizes: adds 1 x 1 convolutions before and after the latents, as in Stable Diffusion.
      scaling_factor, shift_factor: denoisers get (latents - shift_factor) * scaling_factor, which have approximately
        unit standard deviation.
      dtype: dtype of the activations.
      param_dtype: dtype of the parameters.
    """

    name: Literal["autoencoder_kl"] = "autoencoder_kl"
    image_size: PositiveInt = 512
    channels: PositiveInt = 3
    latent_channels: PositiveInt = 4
    widths: tuple[PositiveInt, ...] = (128, 256, 512, 512)
    blocks_per_level: PositiveInt = 2
    groups: PositiveInt = 32
    attends: bool = True
    quantizes: bool = True
    scaling_factor: PositiveFloat = 0.18215
    shift_factor: float = 0.0
    dtype: FloatName = "bfloat16"
    param_dtype: FloatName = "float32"

    def __post_init__(self) -> None:
        if not self.widths:
            raise ConfigError("widths is empty; give the channels of each level, such as [128, 256, 512, 512].")
        if wrong := [width for width in self.widths if width % self.groups]:
            raise ConfigError(f"widths={list(self.widths)}: {wrong} are not multiples of groups={self.groups}.")
        if self.image_size % self.downsampling:
            raise ConfigError(
                f"image_size={self.image_size} is not a multiple of {self.downsampling}, by which {len(self.widths)} "
                "levels shrink an image. Change image_size or widths."
            )

    @property
    def downsampling(self) -> int:
        """Pixels of a side for each side of a latent."""
        return 2 ** (len(self.widths) - 1)

    @property
    def classes(self) -> int:
        """Labels, of which the model takes none."""
        return 0


class _Build:
    """Makes layers of a config; the nth that draws values draws them from `fold_in(key, n)`."""

    def __init__(self, config: AutoencoderKlConfig, key: jax.Array) -> None:
        self.config, self._keys = config, self._split(key)

    def convolution(self, channels: tuple[int, int], *, side: int = 3, stride: int = 1) -> Convolution:
        dtype = self.config.param_dtype
        return Convolution(channels, side=side, stride=stride, param_dtype=dtype, key=next(self._keys))

    def linear(self, channels: int) -> Linear:
        return Linear(
            (channels, channels),
            (None, None),
            use_bias=True,
            std=channels**-0.5,
            param_dtype=self.config.param_dtype,
            key=next(self._keys),
        )

    def norm(self, channels: int) -> GroupNorm:
        return GroupNorm(channels, self.config.groups, self.config.param_dtype)

    @staticmethod
    def _split(key: jax.Array) -> Iterator[jax.Array]:
        number = 0
        while True:
            yield jax.random.fold_in(key, number)
            number += 1


class ResidualBlock(nnx.Module):
    """x + convolutions(x); a 1 x 1 convolution leads x to another number of channels."""

    def __init__(self, build: _Build, channels: int, width: int) -> None:
        self.norm1, self.conv1 = build.norm(channels), build.convolution((channels, width))
        self.norm2, self.conv2 = build.norm(width), build.convolution((width, width))
        self.conv_shortcut = build.convolution((channels, width), side=1) if channels != width else None

    def __call__(self, x: Features) -> Features:
        y = self.conv1(jax.nn.silu(self.norm1(x)))
        y = self.conv2(jax.nn.silu(self.norm2(y)))
        return y + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class PixelAttention(nnx.Module):
    """x + attention(norm(x)): every pixel attends to every other, with one head."""

    def __init__(self, build: _Build, width: int) -> None:
        self.group_norm = build.norm(width)
        self.to_q, self.to_k, self.to_v = (build.linear(width) for _ in range(3))
        self.to_out = build.linear(width)

    def __call__(self, x: Features) -> Features:
        # [batch, height * width, channels]
        pixels = self.group_norm(x).reshape(x.shape[0], -1, x.shape[-1])
        # One head: [batch, pixels, 1, channels].
        query, key, value = (linear(pixels)[:, :, None] for linear in (self.to_q, self.to_k, self.to_v))
        attended: Any = ops.attention(query, key, value, axes=_ATTENTION)
        return x + self.to_out(attended[:, :, 0]).reshape(x.shape)


class MiddleBlock(nnx.Module):
    """Two residual blocks around an optional attention layer."""

    def __init__(self, build: _Build, width: int) -> None:
        self.resnets = nnx.List([ResidualBlock(build, width, width) for _ in range(2)])
        self.attentions = nnx.List([PixelAttention(build, width)] if build.config.attends else [])

    def __call__(self, x: Features) -> Features:
        x = self.resnets[0](x)
        for attention in self.attentions:
            x = attention(x)
        return self.resnets[1](x)


class Level(nnx.Module):
    """Residual blocks of one width, followed by a layer that halves or doubles the image."""

    def __init__(self, build: _Build, channels: int, width: int, blocks: int, *, resizes: Literal["down", "up"] | None):
        sizes = [channels, *[width] * blocks]
        self.resnets = nnx.List([ResidualBlock(build, *pair) for pair in pairwise(sizes)])
        self.downsamplers = nnx.List([build.convolution((width, width), stride=2)] if resizes == "down" else [])
        self.upsamplers = nnx.List([build.convolution((width, width))] if resizes == "up" else [])

    def __call__(self, x: Features) -> Features:
        for block in self.resnets:
            x = block(x)
        for halve in self.downsamplers:
            x = halve(x)
        for smooth in self.upsamplers:
            # Nearest-neighbour upsampling, then a convolution: this avoids the checkerboard of transposed convolutions.
            x = smooth(x.repeat(2, axis=1).repeat(2, axis=2))
        return x


class Encoder(nnx.Module):
    """Images to the means and log-variances of their latents."""

    def __init__(self, build: _Build) -> None:
        config, widths = build.config, build.config.widths
        self.conv_in = build.convolution((config.channels, widths[0]))
        sizes, blocks = [widths[0], *widths], config.blocks_per_level
        self.down_blocks = nnx.List(
            [
                Level(build, sizes[i], sizes[i + 1], blocks, resizes="down" if i + 1 < len(widths) else None)
                for i in range(len(widths))
            ]
        )
        self.mid_block = MiddleBlock(build, widths[-1])
        self.conv_norm_out = build.norm(widths[-1])
        # Means and log-variances.
        self.conv_out = build.convolution((widths[-1], 2 * config.latent_channels))

    def __call__(self, x: Features) -> Features:
        x = self.conv_in(x)
        for level in self.down_blocks:
            x = level(x)
        return self.conv_out(jax.nn.silu(self.conv_norm_out(self.mid_block(x))))


class Decoder(nnx.Module):
    """Latents to images."""

    def __init__(self, build: _Build) -> None:
        # The decoder mirrors the encoder, coarsest level first.
        config, widths = build.config, build.config.widths[::-1]
        self.conv_in = build.convolution((config.latent_channels, widths[0]))
        self.mid_block = MiddleBlock(build, widths[0])
        sizes, blocks = [widths[0], *widths], config.blocks_per_level + 1
        self.up_blocks = nnx.List(
            [
                Level(build, sizes[i], sizes[i + 1], blocks, resizes="up" if i + 1 < len(widths) else None)
                for i in range(len(widths))
            ]
        )
        self.conv_norm_out = build.norm(widths[-1])
        self.conv_out = build.convolution((widths[-1], config.channels))

    def __call__(self, x: Features) -> Features:
        x = self.mid_block(self.conv_in(x))
        for level in self.up_blocks:
            x = level(x)
        return self.conv_out(jax.nn.silu(self.conv_norm_out(x)))


class AutoencoderKl(nnx.Module):
    """An autoencoder whose latents are normal: z = mean + exp(log_variance / 2) e."""

    def __init__(self, config: AutoencoderKlConfig, *, key: jax.Array) -> None:
        self.config, build, latent = config, _Build(config, key), config.latent_channels
        self.encoder, self.decoder = Encoder(build), Decoder(build)
        self.quant_conv = build.convolution((2 * latent, 2 * latent), side=1) if config.quantizes else None
        self.post_quant_conv = build.convolution((latent, latent), side=1) if config.quantizes else None

    def encode(self, images: Images) -> tuple[Latents, Latents]:
        """Returns means and log-variances of the latents, in float32."""
        moments = self.encoder(images.astype(self.config.dtype))
        moments = moments if self.quant_conv is None else self.quant_conv(moments)
        mean, log_variance = jnp.split(moments.astype(jnp.float32), 2, axis=-1)
        return mean, clipped_log_variance(log_variance)

    def decode(self, latents: Latents) -> Images:
        """Returns images, about -1 to 1, in float32."""
        latents = latents.astype(self.config.dtype)
        latents = latents if self.post_quant_conv is None else self.post_quant_conv(latents)
        return self.decoder(latents).astype(jnp.float32)

    def __call__(self, images: Images, *, key: jax.Array) -> tuple[Images, Latents, Latents]:
        """Returns the images decoded from sampled latents, and the means and log-variances of the latents."""
        mean, log_variance = self.encode(images)
        latents = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(key, mean.shape)
        return self.decode(latents), mean, log_variance

    def on_batch(self, batch: Mapping[str, jax.Array]) -> Images:
        """See `RunsOnBatches`."""
        # The mean: sampled latents would make the result random.
        return self.decode(self.encode(batch["images"])[0])

    def scaled_latents(self, images: Images) -> Latents:
        """Computes the means of the latents, scaled for a denoiser."""
        return self.scaled_moments(images)[0]

    def scaled_moments(self, images: Images) -> tuple[Latents, Latents]:
        """Computes the means and the standard deviations of the latents, scaled for a denoiser."""
        mean, log_variance = self.encode(images)
        factor = self.config.scaling_factor
        return (mean - self.config.shift_factor) * factor, jnp.exp(0.5 * log_variance) * factor

    def images_of(self, scaled: Latents) -> Images:
        """Decodes scaled latents of a denoiser."""
        return self.decode(scaled / self.config.scaling_factor + self.config.shift_factor)


def clipped_log_variance(log_variance: Float[Array, "..."]) -> Float[Array, "..."]:
    """Clips log-variances to -30 .. 20 as diffusers does, which keeps exp(log_variance) finite in float32."""
    return jnp.clip(log_variance, -30.0, 20.0)


class AutoencoderKlFamily:
    """The `ModelFamily` of autoencoders with normal latents."""

    name = "autoencoder_kl"
    config_class = AutoencoderKlConfig

    def build(self, config: AutoencoderKlConfig, *, key: jax.Array) -> AutoencoderKl:
        return AutoencoderKl(config, key=key)


FAMILY = AutoencoderKlFamily()


def _read_levels(reader: Reader) -> dict[str, Any]:
    widths = reader.get("block_out_channels", default=[64])
    for name, kind in (("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")):
        reader.expect(name, [kind] * len(widths))
    # `channels` is the number of both input and output channels.
    reader.expect("out_channels", reader.get("in_channels", default=3))
    quantizes = reader.get("use_quant_conv", default=True)
    reader.expect("use_post_quant_conv", quantizes)
    return {
        "widths": widths,
        "quantizes": quantizes,
        # The key may be null.
        "shift_factor": reader.get("shift_factor", default=0.0) or 0.0,
    }


def _write_levels(config: AutoencoderKlConfig) -> dict[str, Any]:
    return {
        "block_out_channels": list(config.widths),
        "down_block_types": ["DownEncoderBlock2D"] * len(config.widths),
        "up_block_types": ["UpDecoderBlock2D"] * len(config.widths),
        "out_channels": config.channels,
        "use_quant_conv": config.quantizes,
        "use_post_quant_conv": config.quantizes,
        "shift_factor": config.shift_factor or None,
    }


COMPONENT = Component(
    class_name="AutoencoderKL",
    family=FAMILY,
    settings=(
        Setting("image_size", ("sample_size",), 32),
        Setting("channels", ("in_channels",), 3),
        Setting("latent_channels", ("latent_channels",), 4),
        Setting("blocks_per_level", ("layers_per_block",), 1),
        Setting("groups", ("norm_num_groups",), 32),
        Setting("attends", ("mid_block_add_attention",), True),
        Setting("scaling_factor", ("scaling_factor",), 0.18215),
    ),
    # Values other than these change the function and are not supported, so an import with them fails.
    fixed={"act_fn": "silu", "latents_mean": None, "latents_std": None},
    # A hint for float16 inference in diffusers; it does not change the function.
    silent=("force_upcast",),
    read_others=_read_levels,
    write_others=_write_levels,
    names={
        **{
            f"{half}/mid_block/attentions/0/to_out": f"{half}.mid_block.attentions.0.to_out.0"
            for half in ("encoder", "decoder")
        },
        **{
            # 16 levels are more than any autoencoder has; further names are never used.
            f"encoder/down_blocks/{level}/downsamplers/0": f"encoder.down_blocks.{level}.downsamplers.0.conv"
            for level in range(16)
        },
        **{
            f"decoder/up_blocks/{level}/upsamplers/0": f"decoder.up_blocks.{level}.upsamplers.0.conv"
            for level in range(16)
        },
    },
)
