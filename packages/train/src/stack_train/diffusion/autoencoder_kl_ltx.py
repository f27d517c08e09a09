"""AutoencoderKLLTXVideo: videos to latents, a 32nd as high and wide, one for the first frame and one per eight others.

It is equivalent to diffusers' `AutoencoderKLLTXVideo` of versions 0.9.0, 0.9.1 and 0.9.5. Its departures:

1. A decoder that adds noise (0.9.1) draws it from a fixed PRNG key, so equal latents become equal videos.
2. A decoder that reads a timestep always gets 0, the default of diffusers' pipeline.

Source: HaCohen et al., LTX-Video: Realtime Video Latent Diffusion, 2024 (arXiv:2501.00103).
"""

import itertools
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from pydantic import PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.diffusion.autoencoder_kl_ltx_layers import Build, Decoder, Encoder
from stack_train.diffusion.components import Component
from stack_train.diffusion.convolution import FrameCache
from stack_train.diffusion.video_autoencoder import Latents, VideoAutoencoder, Videos, VideoSizes, map_chunks
from stack_train.models.reader import Reader, Setting
from stack_train.nn.linear import FloatName

__all__ = ["COMPONENT", "FAMILY", "AutoencoderKlLtx", "AutoencoderKlLtxConfig"]

Downsampling = Literal["conv", "spatial", "temporal", "spatiotemporal"]

_MOVING = ("spatial", "temporal", "spatiotemporal")
_HALVES_SIDES, _HALVES_FRAMES = ("conv", "spatial", "spatiotemporal"), ("conv", "temporal", "spatiotemporal")
_CONVOLVING_CLASS, _MOVING_CLASS = "LTXVideoDownBlock3D", "LTXVideo095DownBlock3D"


class UpSizes(NamedTuple):
    """Sizes of a level of the decoder, whose input has `channels` and whose output has `width` / `factor` channels."""

    channels: int
    width: int
    blocks: int
    enlarges: bool
    is_residual: bool
    factor: int


@config
class AutoencoderKlLtxConfig(VideoSizes):
    """Size and numerics of an autoencoder of videos. The defaults match LTX-Video 0.9.0.

    The decoder's tuples are ordered like the encoder's, from the finest level; the last entry of `blocks`,
    `decoder_blocks` and `adds_noise` is for the middle, whose latents are the coarsest.

    Attributes:
      name: selects this family.
      image_size: height and width of the training videos in pixels.
      frames: number of frames of the training videos, one more than a multiple of the frames of a latent.
      channels: channels of the videos.
      latent_channels: channels of the latents.
      patch: height and width of the squares of pixels that the encoder reads as channels.
      widths: channels at the beginning of each level of the encoder, and of its middle.
      blocks: number of residual blocks of each level of the encoder, and of its middle.
      downsamples: for each level, the layer that halves frames, height and width ("conv", "spatiotemporal"), height and
        width ("spatial") or frames ("temporal"); None for neither. All but "conv" move pixels to channels.
      decoder_widths: channels of each level of the decoder, before `upsample_factors` divides them.
      decoder_blocks: number of residual blocks of each level of the decoder, and of its middle.
      upsamples: for each level of the decoder, True to double frames, height and width.
      upsample_factors: for each level, the number by which doubling divides the channels.
      upsample_residual: for each level, True to add its input to the doubled video.
      adds_noise: for each level and the middle, True to add noise in residual blocks of the decoder.
      timestep_conditioning: the decoder reads a timestep, as it also removes noise.
      encoder_causal: no frame of the encoder reads a later one.
      decoder_causal: no frame of the decoder reads a later one.
      norm_epsilon: added to the variance in norms before a change of channels.
      scaling_factor: denoisers get scaling_factor (latents - mean) / std, by the means and deviations in the weights.
      dtype: dtype of the activations.
      param_dtype: dtype of the parameters.
    """

    name: Literal["autoencoder_kl_ltx"] = "autoencoder_kl_ltx"
    image_size: PositiveInt = 512
    frames: PositiveInt = 161
    channels: PositiveInt = 3
    latent_channels: PositiveInt = 128
    patch: PositiveInt = 4
    widths: tuple[PositiveInt, ...] = (128, 256, 512, 512, 512)
    blocks: tuple[PositiveInt, ...] = (4, 3, 3, 3, 4)
    downsamples: tuple[Downsampling | None, ...] = ("conv", "conv", "conv", None)
    decoder_widths: tuple[PositiveInt, ...] = (128, 256, 512, 512)
    decoder_blocks: tuple[PositiveInt, ...] = (4, 3, 3, 3, 4)
    upsamples: tuple[bool, ...] = (True, True, True, False)
    upsample_factors: tuple[PositiveInt, ...] = (1, 1, 1, 1)
    upsample_residual: tuple[bool, ...] = (False, False, False, False)
    adds_noise: tuple[bool, ...] = (False, False, False, False, False)
    timestep_conditioning: bool = False
    encoder_causal: bool = True
    decoder_causal: bool = False
    norm_epsilon: PositiveFloat = 1e-6
    scaling_factor: PositiveFloat = 1.0
    dtype: FloatName = "bfloat16"
    param_dtype: FloatName = "float32"

    def __post_init__(self) -> None:
        levels, ups = len(self.downsamples), len(self.decoder_widths)
        counts = {"widths": levels + 1, "blocks": levels + 1, "decoder_blocks": ups + 1, "adds_noise": ups + 1}
        counts |= dict.fromkeys(("upsamples", "upsample_factors", "upsample_residual"), ups)
        for name, expected in counts.items():
            if (entries := len(getattr(self, name))) != expected:
                raise ConfigError(f"{name} has {entries} entries for {levels} and {ups} levels; give {expected}.")
        self._check_encoder()
        for level in self.decoder_levels:
            self._check_level(level)
        doubled = 2 ** sum(self.upsamples)
        if (doubled * self.patch, doubled) != (self.downsampling, self.frames_per_latent):
            raise ConfigError(
                f"upsamples={list(self.upsamples)} do not undo downsamples={list(self.downsamples)}. Change either."
            )
        self.check_video(self.frames, self.image_size, self.image_size)

    def _check_encoder(self) -> None:
        kinds = set(self.downsamples)
        if kinds & set(_MOVING) and kinds & {"conv", None}:
            raise ConfigError(f"downsamples={list(self.downsamples)} mixes layers of two versions. Take one kind.")
        if not kinds & set(_MOVING) and self.widths[-1] != self.widths[-2]:
            raise ConfigError(f"widths={list(self.widths)}: the last level keeps its channels. Repeat the last number.")
        for (before, after), kind in zip(itertools.pairwise(self.widths), self.downsamples, strict=True):
            moved = 2 ** ((kind in _HALVES_SIDES) * 2 + (kind in _HALVES_FRAMES))
            if kind in _MOVING and (after % moved or before * moved % after):
                raise ConfigError(
                    f"widths={list(self.widths)}: {kind} moves {moved} pixels to the channels, and {before} x {moved} "
                    f"channels are no multiple of {after}, or {after} of {moved}. Take other widths."
                )

    def _check_level(self, level: UpSizes) -> None:
        changes = level.channels != level.width
        if changes and (self.timestep_conditioning or any(self.adds_noise) or level.factor > 1):
            raise ConfigError(
                f"decoder_widths={list(self.decoder_widths)}: a level gets {level.channels} channels and has "
                f"{level.width}, which timesteps, noise and upsample_factors do not support. Take other widths."
            )
        if level.factor > 1 and not level.enlarges:
            raise ConfigError(f"upsample_factors={list(self.upsample_factors)} divide channels of `upsamples` only.")
        if level.width * 8 % level.factor or level.width % (8 if level.is_residual else 1) or 8 % level.factor:
            raise ConfigError(
                f"decoder_widths={list(self.decoder_widths)}: doubling moves eighths of {level.width} channels, "
                f"divided by {level.factor}. Take multiples of 8, and factors of 1, 2, 4 or 8."
            )

    @property
    def decoder_levels(self) -> list[UpSizes]:
        """Sizes of the decoder's levels, coarsest first."""
        residual, factors = self.upsample_residual, self.upsample_factors
        levels = zip(self.decoder_widths, self.decoder_blocks, self.upsamples, residual, factors, strict=False)
        channels, found = self.decoder_widths[-1], list[UpSizes]()
        for width, blocks, enlarges, is_residual, factor in list(levels)[::-1]:
            found.append(UpSizes(channels, width, blocks, enlarges, is_residual, factor))
            channels = width // factor
        return found

    @property
    def downsampling(self) -> int:
        return self.patch * 2 ** sum(kind in _HALVES_SIDES for kind in self.downsamples)

    @property
    def frames_per_latent(self) -> int:
        return 2 ** sum(kind in _HALVES_FRAMES for kind in self.downsamples)

    @property
    def shift_factor(self) -> float:
        """Mean of the latents apart from the means in the weights; see `AutoencoderKlConfig`."""
        return 0.0


class AutoencoderKlLtx(VideoAutoencoder):
    """LTX-Video's autoencoder; all channels of a latent have one variance."""

    def __init__(self, config: AutoencoderKlLtxConfig, *, key: jax.Array) -> None:
        self.config = config
        encoder_key, decoder_key = jax.random.split(key)
        self.encoder = Encoder(Build(config, encoder_key, is_causal=config.encoder_causal))
        self.decoder = Decoder(Build(config, decoder_key, is_causal=config.decoder_causal))
        means, stds = (jnp.full(config.latent_channels, value, config.param_dtype) for value in (0.0, 1.0))
        self.latents_mean = nnx.Param(means, logical_axes=(None,), trained=False)
        self.latents_std = nnx.Param(stds, logical_axes=(None,), trained=False)

    def run_encoder(self, x: Videos, *, by_chunks: bool) -> Latents:
        config = self.config
        by_chunks = by_chunks and config.encoder_causal
        encoded = map_chunks(self.encoder, x, config.frames_per_latent) if by_chunks else self.encoder(x, FrameCache())
        mean, log_variance = jnp.split(encoded, [config.latent_channels], axis=-1)
        return jnp.concatenate([mean, jnp.broadcast_to(log_variance, mean.shape)], axis=-1)

    def run_decoder(self, latents: Latents, *, by_chunks: bool) -> Videos:
        decoder = partial(self.decoder, timestep=jnp.zeros(len(latents)), key=jax.random.key(0))
        if by_chunks and self.config.decoder_causal:
            return map_chunks(decoder, latents, 1)
        return decoder(latents, FrameCache())

    def statistics(self) -> tuple[Float[Array, " channels"], Float[Array, " channels"]]:
        mean, std = (each[...].astype(jnp.float32) for each in (self.latents_mean, self.latents_std))
        return mean, std / self.config.scaling_factor

    def set_statistics(self, mean: Float[Array, " channels"], std: Float[Array, " channels"]) -> None:
        """Sets the means and deviations of the latents before `scaling_factor`."""
        dtype = self.config.param_dtype
        self.latents_mean[...], self.latents_std[...] = mean.astype(dtype), std.astype(dtype)


class AutoencoderKlLtxFamily:
    """The `ModelFamily` of LTX-Video's autoencoders of videos."""

    name = "autoencoder_kl_ltx"
    config_class = AutoencoderKlLtxConfig

    def build(self, config: AutoencoderKlLtxConfig, *, key: jax.Array) -> AutoencoderKlLtx:
        return AutoencoderKlLtx(config, key=key)


FAMILY = AutoencoderKlLtxFamily()


def _read_encoder(reader: Reader) -> dict[str, Any]:
    widths = reader.get("block_out_channels", default=[128, 256, 512, 512])
    classes = reader.get("down_block_types", default=[_CONVOLVING_CLASS] * 4)
    scales = reader.get("spatio_temporal_scaling", default=[True, True, True, False])
    kinds = reader.get("downsample_type", default=["conv"] * 4)
    if set(classes) == {_MOVING_CLASS}:
        if wrong := [kind for kind in kinds if kind not in _MOVING]:
            reader.problems.append(f"downsample_type={wrong[0]!r} in a {_MOVING_CLASS}, not {', '.join(_MOVING)}")
        if not all(scales):
            reader.problems.append(f"spatio_temporal_scaling={scales} of {_MOVING_CLASS}, not all true")
        downsamples = kinds
    else:
        if set(classes) != {_CONVOLVING_CLASS}:
            reader.problems.append(f"down_block_types={classes}, not all {_CONVOLVING_CLASS} or {_MOVING_CLASS}")
        widths, downsamples = [*widths, widths[-1]], ["conv" if each else None for each in scales]
    return {"widths": widths, "downsamples": downsamples}


def _read_sizes(reader: Reader) -> dict[str, Any]:
    found = _read_encoder(reader)
    sides = sum(kind in _HALVES_SIDES for kind in found["downsamples"])
    side = reader.get("patch_size", default=4) * 2**sides
    frames = 2 ** sum(kind in _HALVES_FRAMES for kind in found["downsamples"])
    # By default, diffusers' pipeline assumes that each level halves both.
    scales = 2 ** sum(reader.get("spatio_temporal_scaling", default=[True, True, True, False]))
    defaults = {"spatial": scales * reader.get("patch_size", default=4), "temporal": scales}
    for axis, expected in (("spatial", side), ("temporal", frames)):
        name = f"{axis}_compression_ratio"
        if (given := reader.get(name) or defaults[axis]) != expected:
            reader.problems.append(f"{name}={given}, not {expected}")
    # `channels` is the number of both input and output channels.
    reader.expect("out_channels", reader.get("in_channels", default=3))
    # Files lack the sizes of videos: as many pixels and frames as the default, or fewer.
    return {**found, "image_size": max(512 // side, 1) * side, "frames": 160 // frames * frames + 1}


def _write_sizes(config: AutoencoderKlLtxConfig) -> dict[str, Any]:
    moving = config.downsamples[0] in _MOVING
    return {
        "out_channels": config.channels,
        "block_out_channels": list(config.widths if moving else config.widths[:-1]),
        "down_block_types": [_MOVING_CLASS if moving else _CONVOLVING_CLASS] * len(config.downsamples),
        "spatio_temporal_scaling": [kind is not None for kind in config.downsamples],
        "downsample_type": [kind or "conv" for kind in config.downsamples],
        "spatial_compression_ratio": config.downsampling,
        "temporal_compression_ratio": config.frames_per_latent,
    }


_CONVOLUTIONS = ("conv_in", "conv_out", "conv1", "conv2", "conv_shortcut", "conv")


def _rename(path: str) -> str:
    """Returns the name of a module: convolutions are wrapped, and embedders of timesteps have other names."""
    *_, parent, name = ("", *path.split("/"))
    dotted = path.replace("/", ".")
    if parent == "time_embedder":
        number = {"enter": 1, "leave": 2}[name]
        return f"{dotted.removesuffix(name)}timestep_embedder.linear_{number}"
    return f"{dotted}.conv" if name in _CONVOLUTIONS or parent == "downsamplers" else dotted


COMPONENT = Component(
    class_name="AutoencoderKLLTXVideo",
    family=FAMILY,
    settings=(
        Setting("channels", ("in_channels",), 3),
        Setting("latent_channels", ("latent_channels",), 128),
        Setting("patch", ("patch_size",), 4),
        Setting("blocks", ("layers_per_block",), (4, 3, 3, 3, 4)),
        Setting("decoder_widths", ("decoder_block_out_channels",), (128, 256, 512, 512)),
        Setting("decoder_blocks", ("decoder_layers_per_block",), (4, 3, 3, 3, 4)),
        Setting("upsamples", ("decoder_spatio_temporal_scaling",), (True, True, True, False)),
        Setting("upsample_factors", ("upsample_factor",), (1, 1, 1, 1)),
        Setting("upsample_residual", ("upsample_residual",), (False, False, False, False)),
        Setting("adds_noise", ("decoder_inject_noise",), (False, False, False, False, False)),
        Setting("timestep_conditioning", ("timestep_conditioning",), False),
        Setting("encoder_causal", ("encoder_causal",), True),
        Setting("decoder_causal", ("decoder_causal",), False),
        Setting("norm_epsilon", ("resnet_norm_eps",), 1e-6),
        Setting("scaling_factor", ("scaling_factor",), 1.0),
    ),
    fixed={"patch_size_t": 1},  # diffusers' encoder fails for others
    read_others=_read_sizes,
    write_others=_write_sizes,
    names={"latents_mean": "latents_mean", "latents_std": "latents_std"},
    rename=_rename,
)
