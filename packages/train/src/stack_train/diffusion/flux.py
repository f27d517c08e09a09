"""Flux: text and image attend together, in two streams and then in one; positions rotate by row and column.

It is equivalent to diffusers' `FluxTransformer2DModel`. `guidance` is a number for guidance-distilled models such as
FLUX.1 dev, and None for others such as schnell.

Source: Black Forest Labs, FLUX.1, 2024; streams as in Esser et al., 2024 (arXiv:2403.03206).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.mesh import constrain
from stack_train.diffusion.components import Component
from stack_train.diffusion.denoiser import Condition, Images, Predicted, predicted_halfway, unconditional
from stack_train.diffusion.joint_blocks import (
    IMAGE_NAMES,
    TEXT_NAMES,
    WAVES,
    Embedder,
    JointBlock,
    Projections,
    Stream,
    embedder_names,
    make_linear,
)
from stack_train.diffusion.layers import (
    Tokens,
    modulated,
    patches_of,
    rotated,
    unmasked_attention,
    unpatched,
    waves,
)
from stack_train.models.reader import Reader, Setting
from stack_train.nn.build import Build
from stack_train.nn.linear import FloatName
from stack_train.nn.residual import Norm
from stack_train.nn.stack import RematPolicy, scan_layers

__all__ = ["COMPONENT", "FAMILY", "Flux", "FluxConfig"]

_GUIDANCE_SCALE = 1000.0  # scales guidance like timesteps; the frequencies assume a maximum of 1000 for both


@config
class FluxConfig:
    """Size and numerics of a Flux. The defaults match FLUX.1 dev at 1024 x 1024 pixels.

    Attributes:
      name: selects this family.
      image_size: height and width of the latents, a multiple of `patch`; the weights fit any size.
      channels: channels of the latents.
      patch: height and width of a patch.
      double_layers, single_layers: number of blocks with two streams, and with one.
      heads: number of attention heads.
      head_dim: width of a head; the residual stream is heads * head_dim wide.
      text_dim, pooled_dim: features of each text token, and of the pooled text.
      text_tokens: number of tokens in a text.
      rope_axes: features of a head that rotate with the token's index, its row and its column; their sum is `head_dim`.
      guidance: default guidance scale for conditions without "guidance"; None for models without this input.
      initializer_std: standard deviation of the initial weights.
      dtype: dtype of the activations.
      param_dtype: dtype of the parameters.
      remat: values of each layer that are saved for the backward pass; the others are recomputed. "none" saves all,
        "dots" matrix products, "dots_no_batch" matrix products except attention's, "full" only the layer's input.
      unroll: compiles every layer separately in training instead of a loop, which makes steps faster and compilation
        slower. None does so for up to 32 layers on a single GPU.
    """

    name: Literal["flux"] = "flux"
    image_size: PositiveInt = 128
    channels: PositiveInt = 16
    patch: PositiveInt = 2
    double_layers: PositiveInt = 19
    single_layers: PositiveInt = 38
    heads: PositiveInt = 24
    head_dim: PositiveInt = 128
    text_dim: PositiveInt = 4096
    pooled_dim: PositiveInt = 768
    text_tokens: PositiveInt = 512
    rope_axes: tuple[PositiveInt, PositiveInt, PositiveInt] = (16, 56, 56)
    guidance: NonNegativeFloat | None = 3.5
    initializer_std: PositiveFloat = 0.02
    dtype: FloatName = "bfloat16"
    param_dtype: FloatName = "float32"
    remat: RematPolicy = "none"
    unroll: bool | None = None

    def __post_init__(self) -> None:
        if sum(self.rope_axes) != self.head_dim:
            raise ConfigError(f"rope_axes={list(self.rope_axes)} do not add up to head_dim={self.head_dim}.")
        if any(size % 2 for size in self.rope_axes):
            raise ConfigError(
                f"rope_axes={list(self.rope_axes)}: rotary positions turn pairs of features; take even ones."
            )
        if self.image_size % self.patch:
            raise ConfigError(
                f"image_size={self.image_size} is not a multiple of patch={self.patch}; change one of them."
            )

    @property
    def embed(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim

    @property
    def classes(self) -> int:
        """Labels, of which the model takes none."""
        return 0


class SingleBlock(nnx.Module):
    """Text and image in one stream, attention and feed-forward side by side; called with the slice of one layer."""

    def __init__(self, config: FluxConfig, build: Build) -> None:
        embed, mlp = config.embed, 4 * config.embed
        self.axes = config.rope_axes
        # Shift, scale and gate; attention and feed-forward layer read the same normalized input and run in parallel.
        self.modulation = build.linear((embed, 3 * embed), ("embed", None), bias=True, residual=True)
        self.projections = Projections(build, config.heads)
        self.up = build.linear((embed, mlp), ("embed", "mlp"), bias=True)
        self.output = build.linear((embed + mlp, embed), ("mlp", "embed"), bias=True)

    def __call__(self, x: Tokens, condition: Array, places: Array) -> Tokens:
        shift, scale, gate = jnp.split(self.modulation(condition), 3, axis=-1)
        normed = modulated(x, shift, scale)
        query, key, value = self.projections(normed)
        attended = unmasked_attention(rotated(query, places, self.axes), rotated(key, places, self.axes), value)
        wide = constrain(self.up(normed), "batch", "seq", "act_mlp", name="a block's feed-forward layer")
        # One product with the stacked weights of both outputs, [embed + mlp, embed].
        both = jnp.concatenate([attended, jax.nn.gelu(wide, approximate=True)], axis=-1)
        return x + gate[:, None] * self.output(both)


class Flux(nnx.Module):
    """A `Denoiser` whose condition is "text", [batch, tokens, text_dim], "pooled", [batch, pooled_dim], and "guidance".

    All modulation matrices (shift, scale, gate) start at 0 (adaLN-Zero). Each block therefore starts as the identity,
    and the last modulation does too.
    """

    def __init__(self, config: FluxConfig, *, key: jax.Array) -> None:
        self.config = config
        embed, features = config.embed, config.channels * config.patch**2
        keys = jax.random.split(key, 8)
        double, single = (
            Build(embed, layers, config.initializer_std, 0.0, Norm(epsilon=1e-6), config.param_dtype, part)
            for layers, part in zip((config.double_layers, config.single_layers), keys[:2], strict=True)
        )
        self.image_in = make_linear(config, (features, embed), (None, "embed"), keys[2])
        self.text_in = make_linear(config, (config.text_dim, embed), (None, "embed"), keys[3])
        self.time = Embedder(config, WAVES, keys[4])
        self.guidance = None if config.guidance is None else Embedder(config, WAVES, keys[5])
        self.pooled = Embedder(config, config.pooled_dim, keys[6])
        self.double_blocks = JointBlock(Stream(double.child(), config.heads), Stream(double.child(), config.heads))
        self.single_blocks = SingleBlock(config, single)
        # Both start at 0, so sharing a key does not correlate any values.
        self.last_modulation = make_linear(config, (embed, 2 * embed), ("embed", None), keys[7], std=0.0)
        self.last = make_linear(config, (embed, features), ("embed", None), keys[7], std=0.0)

    def __call__(self, images: Images, timesteps: Float[Array, " batch"], condition: Condition) -> Predicted:
        config, (batch, height, width, _) = self.config, images.shape
        image = self.image_in(patches_of(images.astype(config.dtype), config.patch))
        text = self.text_in(condition["text"].astype(config.dtype))
        embedded = jax.nn.silu(self._embedded(timesteps, condition))
        places = _places(batch, text.shape[1], height // config.patch, width // config.patch)
        options: dict[str, Any] = {"remat": config.remat, "unroll": config.unroll, "moves": True}

        def run_double(block: Any, streams: Any, per_row: Any, _: None) -> tuple[Any, None]:
            condition, places = per_row
            return block(streams, condition, partial(rotated, places=places, axes=config.rope_axes)), None

        def run(block: Any, carry: Any, per_row: Any, _: None) -> tuple[Any, None]:
            return block(carry, *per_row), None

        per_row = (embedded, places)
        double = [self.double_blocks]
        (text, image), _ = scan_layers(run_double, double, (text, image), [None], per_row=per_row, **options)
        # [batch, text + image, embed]
        joined = jnp.concatenate([text, image], axis=1)
        joined, _ = scan_layers(run, [self.single_blocks], joined, [None], per_row=per_row, **options)
        # Scale before shift: the opposite order of the blocks, as in the published weights.
        scale, shift = jnp.split(self.last_modulation(embedded), 2, axis=-1)
        x = self.last(modulated(joined[:, text.shape[1] :], shift, scale))
        return unpatched(x, config.patch, height, width, channels_last=False).astype(jnp.float32)

    def on_batch(self, batch: Mapping[str, jax.Array]) -> Predicted:
        """See `RunsOnBatches`."""
        return predicted_halfway(self, batch)

    def unconditional(self, condition: Condition) -> Condition:
        """See `unconditional`; both predictions get the same embedded guidance."""
        return unconditional(condition, shared=("guidance",))

    def _embedded(self, timesteps: Float[Array, " batch"], condition: Condition) -> Float[Array, "batch embed"]:
        dtype = self.config.dtype
        # diffusers' `downscale_freq_shift` is 0 in Flux and 1 in DiT.
        embedded = self.time(waves(timesteps, WAVES, last=0).astype(dtype))
        embedded = embedded + self.pooled(condition["pooled"].astype(dtype))
        if self.guidance is None or self.config.guidance is None:
            return embedded
        guidance = condition.get("guidance", jnp.full_like(timesteps, self.config.guidance))
        return embedded + self.guidance(waves(guidance * _GUIDANCE_SCALE, WAVES, last=0).astype(dtype))


def _places(batch: int, text_tokens: int, rows: int, columns: int) -> Int[Array, "batch seq axes"]:
    """Returns the positions of tokens: (0, 0, 0) for text, (0, row, column) for patches."""
    row, column = jnp.divmod(jnp.arange(rows * columns), columns)
    of_image = jnp.stack([jnp.zeros_like(row), row, column], axis=-1)
    both = jnp.concatenate([jnp.zeros((text_tokens, 3), of_image.dtype), of_image])
    return jnp.broadcast_to(both, (batch, *both.shape))


class FluxFamily:
    """The `ModelFamily` of Flux."""

    name = "flux"
    config_class = FluxConfig

    def build(self, config: FluxConfig, *, key: jax.Array) -> Flux:
        return Flux(config, key=key)


FAMILY = FluxFamily()

_OF_BOTH = {**IMAGE_NAMES, "modulation": "norm.linear", "up": "proj_mlp", "output": "proj_out"}
_DOUBLE, _SINGLE = "transformer_blocks.{layer}.", "single_transformer_blocks.{layer}."


def _read_channels(reader: Reader) -> dict[str, Any]:
    channels = reader.get("in_channels", default=64)
    if (predicted := reader.get("out_channels")) not in (None, channels):
        reader.problems.append(f"out_channels={predicted!r}, not in_channels, {channels}")
    # diffusers counts the channels of a patch of 2 x 2, and its pipeline's default guidance is 3.5.
    return {"channels": channels // 4, "guidance": 3.5 if reader.get("guidance_embeds") else None}


COMPONENT = Component(
    class_name="FluxTransformer2DModel",
    family=FAMILY,
    settings=(
        Setting("double_layers", ("num_layers",), 19),
        Setting("single_layers", ("num_single_layers",), 38),
        Setting("heads", ("num_attention_heads",), 24),
        Setting("head_dim", ("attention_head_dim",), 128),
        Setting("text_dim", ("joint_attention_dim",), 4096),
        Setting("pooled_dim", ("pooled_projection_dim",), 768),
        Setting("rope_axes", ("axes_dims_rope",), (16, 56, 56)),
    ),
    fixed={"patch_size": 1},  # diffusers' pipeline cuts patches of 2 before
    read_others=_read_channels,
    write_others=lambda config: {
        "in_channels": config.channels * config.patch**2,
        "out_channels": None,
        "guidance_embeds": config.guidance is not None,
    },
    names={
        "image_in": "x_embedder",
        "text_in": "context_embedder",
        **embedder_names({"time": "timestep_embedder", "guidance": "guidance_embedder", "pooled": "text_embedder"}),
        **{f"double_blocks/text/{ours}": _DOUBLE + theirs for ours, theirs in TEXT_NAMES.items()},
        **{f"double_blocks/image/{ours}": _DOUBLE + theirs for ours, theirs in IMAGE_NAMES.items()},
        **{f"single_blocks/{ours}": _SINGLE + theirs for ours, theirs in _OF_BOTH.items()},
        "last_modulation": "norm_out.linear",
        "last": "proj_out",
    },
)
