"""Layers of LTX-Video's autoencoder: residual blocks without learned norms, and changes between space and channels.

Source: HaCohen et al., LTX-Video: Realtime Video Latent Diffusion, 2024 (arXiv:2501.00103).
"""

import itertools
import math
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from stack_core import ops
from stack_train.diffusion.convolution import EdgeConvolution, FrameCache, VideoFeatures
from stack_train.diffusion.joint_blocks import WAVES, Embedder
from stack_train.diffusion.layers import waves
from stack_train.diffusion.video_autoencoder import AutoencoderBuild
from stack_train.nn.layer_norm import LayerNorm
from stack_train.nn.linear import FloatName

__all__ = ["Build", "Call", "Decoder", "Encoder"]

_PIXEL_EPSILON: Final = 1e-8  # as in diffusers, without a setting
_PIXELS: Final = ("batch", None, None)
_TIMESTEPS: Final = 1000.0  # initial scale of the decoder's timestep


@dataclass
class Call:
    """State of one call of an encoder or decoder.

    Attributes:
      cache: last frames of the previous chunk of the video.
      timestep: scaled timestep of a decoder that reads one.
      key: PRNG key of a decoder that adds noise. All chunks of a video have the same noise.
      draws: numbers of the noises.
    """

    cache: FrameCache
    timestep: Float[Array, " batch"] | None = None
    key: jax.Array | None = None
    draws: Any = field(default_factory=itertools.count)

    def noise(self, x: VideoFeatures) -> Float[Array, "height width 1"]:
        """Draws noise for a frame; the channels and frames of all videos share it."""
        key: Any = self.key
        return jax.random.normal(jax.random.fold_in(key, next(self.draws)), x.shape[2:4])[..., None].astype(x.dtype)


@dataclass(frozen=True)
class _Widths:
    """The part of a config that an `Embedder` reads."""

    embed: int
    param_dtype: FloatName
    initializer_std: float = 0.02


class Build(AutoencoderBuild):
    """Makes the layers of an `AutoencoderKlLtxConfig`.

    Args:
      is_causal: no frame reads a later one.
    """

    def __init__(self, config: Any, key: jax.Array, *, is_causal: bool) -> None:
        super().__init__(config, key)
        self.is_causal = is_causal

    def convolution(self, channels: tuple[int, int], *, side: int = 3, stride: int = 1) -> EdgeConvolution:
        options: Any = {"param_dtype": self.config.param_dtype, "key": self.next_key()}
        return EdgeConvolution(channels, side=side, stride=stride, is_causal=self.is_causal, **options)

    def zeros(self, *shape: int) -> nnx.Param[jax.Array]:
        return nnx.Param(jnp.zeros(shape, self.config.param_dtype), logical_axes=(None,) * len(shape))

    def table(self, rows: int, channels: int) -> nnx.Param[jax.Array]:
        values = channels**-0.5 * jax.random.normal(self.next_key(), (rows, channels), self.config.param_dtype)
        return nnx.Param(values, logical_axes=(None, None))

    def embedder(self, features: int) -> Embedder:
        return Embedder(_Widths(features, self.config.param_dtype), WAVES, self.next_key())


def _pixel_norm(x: VideoFeatures) -> VideoFeatures:
    normed: Any = ops.norm(x, epsilon=_PIXEL_EPSILON)
    return normed


def _modulation(
    table: nnx.Param[jax.Array], time: Float[Array, "batch features"]
) -> list[Float[Array, "batch 1 1 1 channels"]]:
    """Returns the rows of a table plus the embedded timestep, for videos."""
    rows = table[...].astype(time.dtype) + time.reshape(len(time), *table.shape)
    return [row[:, None, None, None] for row in jnp.moveaxis(rows, 1, 0)]


def _embed_timestep(embedder: Embedder | None, x: VideoFeatures, call: Call) -> Any:
    """Returns the embedded timestep, [batch, features], or None for layers without."""
    if embedder is None or call.timestep is None:
        return None
    return embedder(waves(call.timestep, WAVES, last=0).astype(x.dtype))


class ResidualBlock(nnx.Module):
    """x + convolutions(x); a norm and a convolution of single pixels lead x to another number of channels.

    Args:
      has_noise: adds noise after each convolution, scaled channel by channel.
      has_timestep: shifts and scales the norms by an embedded timestep.
    """

    def __init__(
        self, build: Build, channels: int, width: int, *, has_noise: bool = False, has_timestep: bool = False
    ) -> None:
        self.conv1, self.conv2 = build.convolution((channels, width)), build.convolution((width, width))
        changes = channels != width
        options: Any = (build.config.norm_epsilon, _PIXELS, build.config.param_dtype)
        self.norm3 = LayerNorm.single(channels, *options) if changes else None
        self.conv_shortcut = build.convolution((channels, width), side=1) if changes else None
        self.per_channel_scale1 = build.zeros(channels, 1, 1) if has_noise else None
        self.per_channel_scale2 = build.zeros(channels, 1, 1) if has_noise else None
        self.scale_shift_table = build.table(4, channels) if has_timestep else None

    def __call__(
        self, x: VideoFeatures, call: Call, time: Float[Array, "batch features"] | None = None
    ) -> VideoFeatures:
        parts: Any = [None] * 4
        if self.scale_shift_table is not None and time is not None:
            parts = _modulation(self.scale_shift_table, time)
        y = self._half(x, self.conv1, self.per_channel_scale1, parts[:2], call)
        y = self._half(y, self.conv2, self.per_channel_scale2, parts[2:], call)
        if self.norm3 is None or self.conv_shortcut is None:
            return y + x
        normed = self.norm3(x.reshape(x.shape[0], -1, x.shape[-1])).reshape(x.shape)
        return y + self.conv_shortcut(normed, call.cache)

    @staticmethod
    def _half(x: VideoFeatures, convolution: EdgeConvolution, noise_scale: Any, parts: Any, call: Call) -> Any:
        """Applies norm, activation and convolution, and adds noise."""
        shift, scale = parts
        y = _pixel_norm(x)
        y = y if shift is None else y * (1 + scale) + shift
        y = convolution(jax.nn.silu(y), call.cache)
        return y if noise_scale is None else y + call.noise(y) * noise_scale[...].astype(y.dtype).reshape(-1)


class MiddleBlock(nnx.Module):
    """Residual blocks of one width."""

    def __init__(self, build: Build, width: int, blocks: int, **options: bool) -> None:
        self.time_embedder = build.embedder(4 * width) if options.get("has_timestep") else None
        self.resnets = nnx.List([ResidualBlock(build, width, width, **options) for _ in range(blocks)])

    def __call__(self, x: VideoFeatures, call: Call) -> VideoFeatures:
        time = _embed_timestep(self.time_embedder, x, call)
        for block in self.resnets:
            x = block(x, call, time)
        return x


class Downsample(nnx.Module):
    """Moves frames, rows and columns to the channels, and adds the means of groups of the moved channels.

    Args:
      strides: factors of frames, rows and columns.
    """

    def __init__(self, build: Build, channels: int, width: int, strides: tuple[int, int, int]) -> None:
        self.conv = build.convolution((channels, width // math.prod(strides)))
        self.width, self.strides = width, strides

    def __call__(self, x: VideoFeatures, call: Call) -> VideoFeatures:
        if call.cache.is_first:
            # The first latent has one frame, which fills its place with copies.
            x = jnp.concatenate([x[:, : self.strides[0] - 1], x], axis=1)
        moved = space_to_channels(x, self.strides)
        means = moved.reshape(*moved.shape[:-1], self.width, -1).mean(-1)
        return space_to_channels(self.conv(x, call.cache), self.strides) + means


class Upsample(nnx.Module):
    """Moves channels to frames, rows and columns, two each.

    Args:
      channels: input channels; the output has `channels` / `factor`.
      is_residual: adds the moved channels of the input, repeated.
    """

    def __init__(self, build: Build, channels: int, *, factor: int, is_residual: bool) -> None:
        self.conv = build.convolution((channels, 8 * channels // factor))
        self.repeats = 8 // factor if is_residual else 0

    def __call__(self, x: VideoFeatures, call: Call) -> VideoFeatures:
        strides = (2, 2, 2)
        y = channels_to_space(self.conv(x, call.cache), strides)
        if self.repeats:
            y += jnp.tile(channels_to_space(x, strides), (1, 1, 1, 1, self.repeats))
        # The first latent has one frame.
        return y[:, 1:] if call.cache.is_first else y


_STRIDES: Final = {"spatial": (1, 2, 2), "temporal": (2, 1, 1), "spatiotemporal": (2, 2, 2)}


class DownLevel(nnx.Module):
    """Residual blocks of the encoder, a layer that shrinks the video, and perhaps a block that changes the channels."""

    def __init__(self, build: Build, channels: int, width: int, blocks: int, kind: str | None) -> None:
        self.resnets = nnx.List([ResidualBlock(build, channels, channels) for _ in range(blocks)])
        shrinking: list[Any] = []
        if kind == "conv":
            shrinking = [build.convolution((channels, channels), stride=2)]
        elif kind is not None:
            shrinking = [Downsample(build, channels, width, _STRIDES[kind])]
        self.downsamplers = nnx.List(shrinking)
        changes = kind in ("conv", None) and channels != width
        self.conv_out = ResidualBlock(build, channels, width) if changes else None

    def __call__(self, x: VideoFeatures, call: Call) -> VideoFeatures:
        for block in self.resnets:
            x = block(x, call)
        for layer in self.downsamplers:
            x = layer(x, call.cache) if isinstance(layer, EdgeConvolution) else layer(x, call)
        return x if self.conv_out is None else self.conv_out(x, call)


class UpLevel(nnx.Module):
    """A layer that enlarges the video, and residual blocks of the decoder."""

    def __init__(self, build: Build, level: Any, **options: bool) -> None:
        width = level.width // level.factor
        changes = level.channels != level.width
        self.conv_in = ResidualBlock(build, level.channels, level.width, **options) if changes else None
        self.time_embedder = build.embedder(4 * width) if options.get("has_timestep") else None
        ups = [Upsample(build, level.width, factor=level.factor, is_residual=level.is_residual)]
        self.upsamplers = nnx.List(ups if level.enlarges else [])
        self.resnets = nnx.List([ResidualBlock(build, width, width, **options) for _ in range(level.blocks)])

    def __call__(self, x: VideoFeatures, call: Call) -> VideoFeatures:
        x = x if self.conv_in is None else self.conv_in(x, call)
        for layer in self.upsamplers:
            x = layer(x, call)
        time = _embed_timestep(self.time_embedder, x, call)
        for block in self.resnets:
            x = block(x, call, time)
        return x


class Encoder(nnx.Module):
    """Videos to the means of their latents, and one log-variance for all channels of a latent."""

    def __init__(self, build: Build) -> None:
        config, widths = build.config, build.config.widths
        self.patch = config.patch
        self.conv_in = build.convolution((config.channels * config.patch**2, widths[0]))
        levels = zip(widths, widths[1:], config.blocks, config.downsamples, strict=False)
        self.down_blocks = nnx.List([DownLevel(build, *level) for level in levels])
        self.mid_block = MiddleBlock(build, widths[-1], config.blocks[-1])
        self.conv_out = build.convolution((widths[-1], config.latent_channels + 1))

    def __call__(self, x: VideoFeatures, cache: FrameCache) -> VideoFeatures:
        call = Call(cache)
        # The features of a patch are ordered [channels, columns, rows].
        x = space_to_channels(x.swapaxes(2, 3), (1, self.patch, self.patch)).swapaxes(2, 3)
        x = self.conv_in(x, cache)
        for level in self.down_blocks:
            x = level(x, call)
        return self.conv_out(jax.nn.silu(_pixel_norm(self.mid_block(x, call))), cache)


class Decoder(nnx.Module):
    """Latents to videos."""

    def __init__(self, build: Build) -> None:
        config = build.config
        self.patch, levels, timed = config.patch, config.decoder_levels, config.timestep_conditioning
        noisy = config.adds_noise[::-1]
        self.conv_in = build.convolution((config.latent_channels, levels[0].channels))
        options = {"has_timestep": timed}
        blocks = config.decoder_blocks[-1]
        self.mid_block = MiddleBlock(build, levels[0].channels, blocks, has_noise=noisy[0], **options)
        pairs = zip(levels, noisy[1:], strict=True)
        self.up_blocks = nnx.List([UpLevel(build, level, has_noise=noise, **options) for level, noise in pairs])
        width = levels[-1].width // levels[-1].factor
        self.conv_out = build.convolution((width, config.channels * config.patch**2))
        scale = jnp.asarray(_TIMESTEPS, config.param_dtype)
        self.timestep_scale_multiplier = nnx.Param(scale, logical_axes=()) if timed else None
        self.time_embedder = build.embedder(2 * width) if timed else None
        self.scale_shift_table = build.table(2, width) if timed else None

    def __call__(
        self, x: VideoFeatures, cache: FrameCache, *, timestep: Float[Array, " batch"], key: jax.Array
    ) -> VideoFeatures:
        call = Call(cache, key=key)
        if self.timestep_scale_multiplier is not None:
            call.timestep = timestep * self.timestep_scale_multiplier[...].astype(timestep.dtype)
        x = self.mid_block(self.conv_in(x, cache), call)
        for level in self.up_blocks:
            x = level(x, call)
        x = _pixel_norm(x)
        time = _embed_timestep(self.time_embedder, x, call)
        if self.scale_shift_table is not None and time is not None:
            shift, scale = _modulation(self.scale_shift_table, time)
            x = x * (1 + scale) + shift
        x = self.conv_out(jax.nn.silu(x), cache)
        return channels_to_space(x.swapaxes(2, 3), (1, self.patch, self.patch)).swapaxes(2, 3)


def space_to_channels(x: VideoFeatures, strides: tuple[int, int, int]) -> VideoFeatures:
    """Moves blocks of frames, rows and columns to the channels, ordered [channels, frames, rows, columns]."""
    batch, *sizes, channels = x.shape
    frames, height, width = (size // stride for size, stride in zip(sizes, strides, strict=True))
    cut = x.reshape(batch, frames, strides[0], height, strides[1], width, strides[2], channels)
    return cut.transpose(0, 1, 3, 5, 7, 2, 4, 6).reshape(batch, frames, height, width, -1)


def channels_to_space(x: VideoFeatures, strides: tuple[int, int, int]) -> VideoFeatures:
    """Inverts `space_to_channels`."""
    batch, *sizes, channels = x.shape
    frames, height, width = (size * stride for size, stride in zip(sizes, strides, strict=True))
    cut = x.reshape(batch, *sizes, channels // math.prod(strides), *strides)
    return cut.transpose(0, 1, 5, 2, 6, 3, 7, 4).reshape(batch, frames, height, width, -1)
