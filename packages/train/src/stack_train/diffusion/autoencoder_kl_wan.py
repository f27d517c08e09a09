"""AutoencoderKLWan: videos to latents, an eighth as high and wide, one for the first frame and one per four others.

It is equivalent to diffusers' `AutoencoderKLWan` for Wan 2.1. No frame depends on later frames, so a video can be
encoded and decoded in chunks of frames (see `FrameCache`), with the same result.

Source: Wan Team, Wan: Open and Advanced Large-Scale Video Generative Models, 2025 (arXiv:2503.20314).
"""

import itertools
from collections.abc import Callable
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
from stack_train.diffusion.convolution import (
    CausalConvolution,
    ChannelNorm,
    Convolution,
    Features,
    FrameCache,
    VideoFeatures,
)
from stack_train.diffusion.video_autoencoder import (
    AutoencoderBuild,
    Latents,
    VideoAutoencoder,
    Videos,
    VideoSizes,
    map_chunks,
)
from stack_train.models.reader import Reader, Setting
from stack_train.nn.linear import FloatName

__all__ = ["COMPONENT", "FAMILY", "AutoencoderKlWan", "AutoencoderKlWanConfig"]

_ATTENTION = dict.fromkeys(("query", "key", "value"), ("batch", None, None, None))

# Statistics for the latents of Wan 2.1.
_MEAN = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508)
_MEAN += (0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)
_STD = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743)
_STD += (3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)


@config
class AutoencoderKlWanConfig(VideoSizes):
    """Size and numerics of an autoencoder of videos. The defaults match Wan 2.1.

    Attributes:
      name: selects this family.
      image_size: height and width of the training videos in pixels.
      frames: number of frames of the training videos, one more than a multiple of the frames of a latent.
      channels: channels of the videos.
      latent_channels: channels of the latents.
      width: channels of the encoder's first level; `multipliers` times it are the channels of each level.
      decoder_width: the same for the decoder; None is `width`.
      multipliers: width of each level, finest first, as multiples; each level but the last halves height and width.
      blocks_per_level: residual blocks per level of the encoder; the decoder has one more.
      halves_frames: for each level but the last, True to halve the frames after the first one.
      latents_mean, latents_std: denoisers get (latents - mean) / std, channel by channel.
      dtype: dtype of the activations.
      param_dtype: dtype of the parameters.
    """

    name: Literal["autoencoder_kl_wan"] = "autoencoder_kl_wan"
    image_size: PositiveInt = 480
    frames: PositiveInt = 81
    channels: PositiveInt = 3
    latent_channels: PositiveInt = 16
    width: PositiveInt = 96
    decoder_width: PositiveInt | None = None
    multipliers: tuple[PositiveInt, ...] = (1, 2, 4, 4)
    blocks_per_level: PositiveInt = 2
    halves_frames: tuple[bool, ...] = (False, True, True)
    latents_mean: tuple[float, ...] = _MEAN
    latents_std: tuple[PositiveFloat, ...] = _STD
    dtype: FloatName = "bfloat16"
    param_dtype: FloatName = "float32"

    def __post_init__(self) -> None:
        if len(self.halves_frames) != len(self.multipliers) - 1:
            raise ConfigError(
                f"halves_frames={list(self.halves_frames)} has {len(self.halves_frames)} entries; every level but the "
                f"last of the {len(self.multipliers)} in multipliers has one."
            )
        for name in ("latents_mean", "latents_std"):
            if (entries := len(getattr(self, name))) != self.latent_channels:
                raise ConfigError(f"{name} has {entries} entries; latent_channels is {self.latent_channels}.")
        wide = [each for each in self.multipliers[1:] if (self.decoder_width or self.width) * each % 2]
        if wide:
            raise ConfigError(
                f"width={self.decoder_width or self.width} times {wide} in multipliers is odd, and upsampling halves "
                "the channels. Take an even width."
            )
        self.check_video(self.frames, self.image_size, self.image_size)

    @property
    def downsampling(self) -> int:
        return 2 ** len(self.halves_frames)

    @property
    def frames_per_latent(self) -> int:
        return 2 ** sum(self.halves_frames)

    @property
    def scaling_factor(self) -> list[float]:
        """Factor of each channel of the latents for denoisers; see `AutoencoderKlConfig`."""
        return [1.0 / std for std in self.latents_std]

    @property
    def shift_factor(self) -> list[float]:
        """Mean of each channel of the latents, subtracted for denoisers."""
        return list(self.latents_mean)


class _Build(AutoencoderBuild):
    """Makes the layers of an `AutoencoderKlWanConfig`."""

    def causal(self, channels: tuple[int, int], *, frames: int = 3, side: int = 3) -> CausalConvolution:
        return CausalConvolution(
            channels, frames=frames, side=side, param_dtype=self.config.param_dtype, key=self.next_key()
        )

    def convolution(self, channels: tuple[int, int], *, side: int = 3, stride: int = 1) -> Convolution:
        return Convolution(channels, side=side, stride=stride, param_dtype=self.config.param_dtype, key=self.next_key())

    def norm(self, channels: int, *, axes: int = 3) -> ChannelNorm:
        return ChannelNorm(channels, self.config.param_dtype, axes=axes)


def _frame_by_frame(layer: Callable[[Features], Features], x: VideoFeatures) -> VideoFeatures:
    """Applies a layer of images to every frame."""
    y = layer(x.reshape(-1, *x.shape[2:]))
    return y.reshape(*x.shape[:2], *y.shape[1:])


class ResidualBlock(nnx.Module):
    """x + convolutions(x); a convolution of single pixels leads x to another number of channels."""

    def __init__(self, build: _Build, channels: int, width: int) -> None:
        self.norm1, self.conv1 = build.norm(channels), build.causal((channels, width))
        self.norm2, self.conv2 = build.norm(width), build.causal((width, width))
        self.conv_shortcut = build.causal((channels, width), frames=1, side=1) if channels != width else None

    def __call__(self, x: VideoFeatures, cache: FrameCache) -> VideoFeatures:
        y = self.conv1(jax.nn.silu(self.norm1(x)), cache)
        y = self.conv2(jax.nn.silu(self.norm2(y)), cache)
        return y + (x if self.conv_shortcut is None else self.conv_shortcut(x, cache))


class FrameAttention(nnx.Module):
    """x + attention(norm(x)): pixels attend to all pixels of their frame, with one head."""

    def __init__(self, build: _Build, width: int) -> None:
        self.norm = build.norm(width, axes=2)
        self.to_qkv = build.convolution((width, 3 * width), side=1)
        self.proj = build.convolution((width, width), side=1)

    def __call__(self, x: VideoFeatures) -> VideoFeatures:
        return x + _frame_by_frame(self._attended, x)

    def _attended(self, x: Features) -> Features:
        joined = self.to_qkv(self.norm(x)).reshape(x.shape[0], -1, 1, 3 * x.shape[-1])
        # One head: [batch * frames, pixels, 1, channels].
        query, key, value = jnp.split(joined, 3, axis=-1)
        attended: Any = ops.attention(query, key, value, axes=_ATTENTION)
        return self.proj(attended.reshape(x.shape))


class MiddleBlock(nnx.Module):
    """Two residual blocks around attention."""

    def __init__(self, build: _Build, width: int) -> None:
        self.resnets = nnx.List([ResidualBlock(build, width, width) for _ in range(2)])
        self.attentions = nnx.List([FrameAttention(build, width)])

    def __call__(self, x: VideoFeatures, cache: FrameCache) -> VideoFeatures:
        return self.resnets[1](self.attentions[0](self.resnets[0](x, cache)), cache)


class Downsample(nnx.Module):
    """Halves height and width, and then perhaps the frames after the first one."""

    def __init__(self, build: _Build, width: int, *, halves_frames: bool) -> None:
        self.resample = build.convolution((width, width), stride=2)
        self.time_conv = build.causal((width, width), side=1) if halves_frames else None

    def __call__(self, x: VideoFeatures, cache: FrameCache) -> VideoFeatures:
        x = _frame_by_frame(self.resample, x)
        if self.time_conv is None:
            return x
        joined = cache.prepend(x, 1)
        if not cache.is_first:
            return self.time_conv.convolve(joined, (2, 1, 1))
        # The first frame is not convolved, but the second output depends on it.
        return jnp.concatenate([x[:, :1], self.time_conv.convolve(x, (2, 1, 1))], axis=1) if x.shape[1] > 1 else x


class Upsample(nnx.Module):
    """Perhaps doubles the frames after the first one, then doubles height and width and halves the channels."""

    def __init__(self, build: _Build, width: int, *, doubles_frames: bool) -> None:
        self.resample = build.convolution((width, width // 2))
        self.time_conv = build.causal((width, 2 * width), side=1) if doubles_frames else None

    def __call__(self, x: VideoFeatures, cache: FrameCache) -> VideoFeatures:
        if self.time_conv is not None:
            # The first frame is not convolved, and the following frames are independent.
            first, others = jnp.split(x, [int(cache.is_first)], axis=1)
            x = jnp.concatenate([first, self._doubled(self.time_conv, others, cache)], axis=1)
        # Nearest-neighbour upsampling, then a convolution: this avoids the checkerboard of transposed convolutions.
        return _frame_by_frame(self.resample, x.repeat(2, axis=2).repeat(2, axis=3))

    @staticmethod
    def _doubled(time_conv: CausalConvolution, x: VideoFeatures, cache: FrameCache) -> VideoFeatures:
        """Makes two frames of each."""
        if not x.shape[1]:
            cache.prepend(x, 2)
            return x
        # [batch, frames, height, width, 2 channels], whose halves are consecutive frames.
        pairs = jnp.stack(jnp.split(time_conv(x, cache), 2, axis=-1), axis=2)
        return pairs.reshape(x.shape[0], -1, *x.shape[2:])


class Level(nnx.Module):
    """Residual blocks of the decoder, followed by a layer that enlarges the video."""

    def __init__(self, build: _Build, channels: int, width: int, *, doubles_frames: bool | None) -> None:
        sizes = [channels, *[width] * (build.config.blocks_per_level + 1)]
        self.resnets = nnx.List([ResidualBlock(build, *pair) for pair in itertools.pairwise(sizes)])
        ups = [] if doubles_frames is None else [Upsample(build, width, doubles_frames=doubles_frames)]
        self.upsamplers = nnx.List(ups)

    def __call__(self, x: VideoFeatures, cache: FrameCache) -> VideoFeatures:
        for layer in (*self.resnets, *self.upsamplers):
            x = layer(x, cache)
        return x


class Encoder(nnx.Module):
    """Videos to the means and log-variances of their latents."""

    def __init__(self, build: _Build) -> None:
        config = build.config
        widths = [config.width * each for each in config.multipliers]
        self.conv_in = build.causal((config.channels, config.width))
        blocks: list[Any] = []
        channels = config.width
        for width, halves in zip(widths, (*config.halves_frames, None), strict=True):
            for _ in range(config.blocks_per_level):
                blocks.append(ResidualBlock(build, channels, width))
                channels = width
            if halves is not None:
                blocks.append(Downsample(build, width, halves_frames=halves))
        self.down_blocks = nnx.List(blocks)
        self.mid_block = MiddleBlock(build, widths[-1])
        self.norm_out = build.norm(widths[-1])
        # Means and log-variances.
        self.conv_out = build.causal((widths[-1], 2 * config.latent_channels))

    def __call__(self, x: VideoFeatures, cache: FrameCache) -> VideoFeatures:
        x = self.conv_in(x, cache)
        for block in self.down_blocks:
            x = block(x, cache)
        return self.conv_out(jax.nn.silu(self.norm_out(self.mid_block(x, cache))), cache)


class Decoder(nnx.Module):
    """Latents to videos."""

    def __init__(self, build: _Build) -> None:
        # The decoder mirrors the encoder, coarsest level first.
        config = build.config
        widths = [(config.decoder_width or config.width) * each for each in config.multipliers[::-1]]
        self.conv_in = build.causal((config.latent_channels, widths[0]))
        self.mid_block = MiddleBlock(build, widths[0])
        channels = [widths[0], *(width // 2 for width in widths[:-1])]
        doubles = (*config.halves_frames[::-1], None)
        levels = zip(channels, widths, doubles, strict=True)
        self.up_blocks = nnx.List([Level(build, *pair, doubles_frames=each) for *pair, each in levels])
        self.norm_out = build.norm(widths[-1])
        self.conv_out = build.causal((widths[-1], config.channels))

    def __call__(self, x: VideoFeatures, cache: FrameCache) -> VideoFeatures:
        x = self.mid_block(self.conv_in(x, cache), cache)
        for level in self.up_blocks:
            x = level(x, cache)
        return self.conv_out(jax.nn.silu(self.norm_out(x)), cache)


class AutoencoderKlWan(VideoAutoencoder):
    """Wan's autoencoder, whose layers are all causal."""

    def __init__(self, config: AutoencoderKlWanConfig, *, key: jax.Array) -> None:
        self.config, build, latent = config, _Build(config, key), config.latent_channels
        self.encoder, self.decoder = Encoder(build), Decoder(build)
        self.quant_conv = build.causal((2 * latent, 2 * latent), frames=1, side=1)
        self.post_quant_conv = build.causal((latent, latent), frames=1, side=1)

    def run_encoder(self, x: Videos, *, by_chunks: bool) -> Latents:
        frames = self.config.frames_per_latent
        encoded = map_chunks(self.encoder, x, frames) if by_chunks else self.encoder(x, FrameCache())
        return self.quant_conv.convolve(encoded)

    def run_decoder(self, latents: Latents, *, by_chunks: bool) -> Videos:
        x = self.post_quant_conv.convolve(latents)
        return map_chunks(self.decoder, x, 1) if by_chunks else self.decoder(x, FrameCache())

    def statistics(self) -> tuple[Float[Array, " channels"], Float[Array, " channels"]]:
        return jnp.array(self.config.latents_mean), jnp.array(self.config.latents_std)


class AutoencoderKlWanFamily:
    """The `ModelFamily` of Wan's autoencoders of videos."""

    name = "autoencoder_kl_wan"
    config_class = AutoencoderKlWanConfig

    def build(self, config: AutoencoderKlWanConfig, *, key: jax.Array) -> AutoencoderKlWan:
        return AutoencoderKlWan(config, key=key)


FAMILY = AutoencoderKlWanFamily()


def _read_sizes(reader: Reader) -> dict[str, Any]:
    halves = reader.get("temperal_downsample", default=[False, True, True])
    # Numbers that diffusers' pipeline reads in the place of the levels.
    reader.expect("scale_factor_spatial", side := 2 ** len(halves))
    reader.expect("scale_factor_temporal", frames := 2 ** sum(halves))
    # `channels` is the number of both input and output channels.
    reader.expect("out_channels", reader.get("in_channels", default=3))
    # Files lack the sizes of videos: as many pixels and frames as the default, or fewer.
    return {"halves_frames": halves, "image_size": max(480 // side, 1) * side, "frames": 80 // frames * frames + 1}


COMPONENT = Component(
    class_name="AutoencoderKLWan",
    family=FAMILY,
    settings=(
        Setting("channels", ("in_channels",), 3),
        Setting("latent_channels", ("z_dim",), 16),
        Setting("width", ("base_dim",), 96),
        Setting("decoder_width", ("decoder_base_dim",), None),
        Setting("multipliers", ("dim_mult",), (1, 2, 4, 4)),
        Setting("blocks_per_level", ("num_res_blocks",), 2),
        Setting("latents_mean", ("latents_mean",), _MEAN),
        Setting("latents_std", ("latents_std",), _STD),
    ),
    # Values other than these change the function: Wan 2.2 has residual levels and patches.
    fixed={"attn_scales": [], "is_residual": False, "patch_size": None},
    read_others=_read_sizes,
    write_others=lambda config: {
        "temperal_downsample": list(config.halves_frames),
        "scale_factor_temporal": config.frames_per_latent,
        "scale_factor_spatial": config.downsampling,
        "out_channels": config.channels,
    },
    names={},
    rename=lambda path: path.replace("/", ".").replace("resample", "resample.1"),
)
