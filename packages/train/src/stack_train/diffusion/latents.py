"""Sampling as a pure function: from a PRNG key and conditions to images or latents."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from stack_core.abi.errors import ConfigError
from stack_core.abi.mesh import constrain
from stack_train.diffusion.denoiser import Condition, Denoiser, Images
from stack_train.diffusion.objectives import Denoises
from stack_train.diffusion.samplers import Inpainting, SamplerConfig, Table, guided, levels_of, sample, table_of
from stack_train.diffusion.two_denoisers import TwoDenoisers

__all__ = ["Begun", "initial_noise", "sample_latents", "sampling_table"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Begun:
    """Latents of an initial image, a mask of latents to generate, and extra input channels of the denoiser."""

    latents: Images
    mask: Float[Array, "batch *frames height width 1"] | None
    extra: Float[Array, "batch height width extra"] | None


def sampling_table(sampler: SamplerConfig, objective: Denoises, tokens: int) -> Table:
    """Returns the table of a sampler for images or videos with a number of patches."""
    return table_of(sampler, levels_of(objective.schedule(tokens), sampler), objective.prediction)


def initial_noise(shape: Sequence[int], *, key: jax.Array) -> Images:
    """Draws the noise of images or videos of `shape`; an image's noise does not depend on the number of images."""
    return jax.vmap(lambda each: jax.random.normal(each, shape[1:]))(_keys(shape[0], key))


def sample_latents(
    model: Denoiser,
    condition: Condition,
    noise: Images,
    *,
    sampler: SamplerConfig,
    table: Table,
    begun: Begun | None = None,
    control_scales: Float[Array, " rows"] | None = None,
    key: jax.Array,
) -> Images:
    """Samples images or latents with a denoiser; inside `use_mesh`, devices split the images and the denoiser.

    Args:
      sampler: settings of guidance and strength.
      table: table of the sampler, from `sampling_table`.
      begun: initial image and mask; None starts from `noise`.
      control_scales: see `samplers.sample`.
      key: PRNG key of the noise that steps add; it may be the key of `noise`.

    Raises:
      ConfigError: the sampler guides a denoiser of low noise, and the model is a single denoiser.
    """
    count, *_, channels = noise.shape
    guidance: Any = {"guidance": _guidance_of(model, sampler), "rescale": sampler.guidance_rescale}
    denoise = guided(model, condition, images=count, **guidance)
    noise = constrain(noise, "batch", *[None] * (noise.ndim - 1), name="the noise")
    latents, mask, extra = (None, None, None) if begun is None else (begun.latents, begun.mask, begun.extra)
    inpainting = None if latents is None or mask is None else Inpainting(latents, mask)

    def predicted(x: Images, timestep: Array, *scale: Array) -> Images:
        x = x if extra is None else jnp.concatenate([x, extra], axis=-1)
        # Channels that predict variances are not sampled.
        return denoise(x, timestep, *scale)[..., :channels]

    # As in diffusers, inpainting with full strength starts from pure noise.
    pure_noise = sampler.strength == 1.0 and (mask is not None or extra is not None)
    initial = None if pure_noise else latents
    options: Any = {"start": initial, "inpainting": inpainting, "control_scales": control_scales}
    return sample(predicted, table, noise, keys=_keys(count, key), **options)


def _guidance_of(model: Denoiser, sampler: SamplerConfig) -> Any:
    """Returns the guidance, or its function of the timestep."""
    high, low = sampler.guidance, sampler.low_noise_guidance
    if low is None:
        return high
    if not isinstance(model, TwoDenoisers):
        raise ConfigError(
            f"low_noise_guidance={low} is for models of two denoisers, such as Wan 2.2 A14B. Leave it out."
        )
    return lambda timestep: jnp.where(model.is_high(timestep), high, low)


def _keys(count: int, key: jax.Array) -> Key[Array, " images"]:
    return jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(count))
