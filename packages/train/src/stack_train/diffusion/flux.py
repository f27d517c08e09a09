"""Flux: text and image attend together, in two streams and then in one; positions rotate by row and column.

It is equivalent to diffusers' `FluxTransformer2DModel`. `guidance` is a number for guidance-distilled models such as
FLUX.1 dev, and None for others such as schnell.

Source: Black Forest Labs, FLUX.1, 2024; streams as in Esser et al., 2024 (arXiv:2403.03206).
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from stack_core import ops
from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.mesh import constrain
from stack_train.diffusion.components import Component
from stack_train.diffusion.denoiser import Condition, Images, Predicted, predicted_halfway, unconditional
from stack_train.diffusion.layers import (
    HEADS,
    Heads,
    Tokens,
    modulated,
    patches_of,
    self_attention,
    split_heads,
    unpatched,
    waves,
)
from stack_train.models.reader import Reader, Setting
from stack_train.nn.build import Build
from stack_train.nn.linear import FloatName, Linear
from stack_train.nn.residual import Norm
from stack_train.nn.stack import RematPolicy, scan_layers

__all__ = ["COMPONENT", "FAMILY", "Flux", "FluxConfig"]

_ROPE = {"x": HEADS, "positions": ("batch", "seq")}
_WAVES = 256
_GUIDANCE_SCALE = 1000.0  # scales guidance like timesteps; the frequencies assume a maximum of 1000 for both


Streams = tuple[Float[Array, "batch text embed"], Float[Array, "batch image embed"]]


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
            raise ConfigError(f"image_size={self.image_size} is no multiple of patch={self.patch}; change one of them.")

    @property
    def embed(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim

    @property
    def classes(self) -> int:
        """Labels, of which the model takes none."""
        return 0


class Projections(nnx.Module):
    """Queries, keys and values of one stream, the former two normed head by head."""

    def __init__(self, config: FluxConfig, build: Build) -> None:
        embed, self.heads, self.norm = config.embed, config.heads, build.norm
        self.query = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.key = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.value = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.query_norm = build.scale(config.head_dim, "head_dim")
        self.key_norm = build.scale(config.head_dim, "head_dim")

    def __call__(self, x: Tokens) -> tuple[Heads, Heads, Heads]:
        query, key, value = (
            split_heads(linear(x), self.heads, "heads") for linear in (self.query, self.key, self.value)
        )
        return self.norm(query, self.query_norm, HEADS), self.norm(key, self.key_norm, HEADS), value


class Stream(nnx.Module):
    """One stream of a two-stream block: its layers before and after the joint attention."""

    def __init__(self, config: FluxConfig, build: Build) -> None:
        embed, mlp = config.embed, 4 * config.embed
        # Shift, scale and gate of the attention, then of the feed-forward layer.
        self.modulation = build.linear((embed, 6 * embed), ("embed", None), bias=True, residual=True)
        self.projections = Projections(config, build)
        self.output = build.linear((embed, embed), ("heads", "embed"), bias=True)
        self.up = build.linear((embed, mlp), ("embed", "mlp"), bias=True)
        self.down = build.linear((mlp, embed), ("mlp", "embed"), bias=True)

    def before(self, x: Tokens, condition: Array) -> tuple[tuple[Heads, Heads, Heads], list[Array]]:
        """Returns queries, keys and values, and the remaining parts of the modulation."""
        # `after` gets the gate of the attention, and shift, scale and gate of the feed-forward layer.
        shift, scale, *others = jnp.split(self.modulation(condition), 6, axis=-1)
        return self.projections(modulated(x, shift, scale)), others

    def after(self, x: Tokens, attended: Tokens, modulation: list[Array]) -> Tokens:
        gate, shift, scale, gate_mlp = (part[:, None] for part in modulation)
        x = x + gate * self.output(attended)
        wide = constrain(self.up(modulated(x, shift[:, 0], scale[:, 0])), "batch", "seq", "act_mlp", name="a stream")
        return x + gate_mlp * self.down(jax.nn.gelu(wide, approximate=True))


class DoubleBlock(nnx.Module):
    """Text and image with weights of their own, and one attention; called with the slice of one layer."""

    def __init__(self, config: FluxConfig, build: Build) -> None:
        self.text, self.image = Stream(config, build.child()), Stream(config, build.child())
        self.axes = config.rope_axes

    def __call__(self, streams: Streams, condition: Array, places: Array) -> Streams:
        text, image = streams
        # Text tokens first, as in diffusers; the order matters for the split after attention and for positions.
        of_text, text_others = self.text.before(text, condition)
        of_image, image_others = self.image.before(image, condition)
        query, key, value = (jnp.concatenate(parts, axis=1) for parts in zip(of_text, of_image, strict=True))
        attended = self_attention(rotated(query, places, self.axes), rotated(key, places, self.axes), value)
        text_attended, image_attended = jnp.split(attended, [text.shape[1]], axis=1)
        return self.text.after(text, text_attended, text_others), self.image.after(image, image_attended, image_others)


class SingleBlock(nnx.Module):
    """Text and image in one stream, attention and feed-forward side by side; called with the slice of one layer."""

    def __init__(self, config: FluxConfig, build: Build) -> None:
        embed, mlp = config.embed, 4 * config.embed
        self.axes = config.rope_axes
        # Shift, scale and gate; attention and feed-forward layer read the same normalized input and run in parallel.
        self.modulation = build.linear((embed, 3 * embed), ("embed", None), bias=True, residual=True)
        self.projections = Projections(config, build)
        self.up = build.linear((embed, mlp), ("embed", "mlp"), bias=True)
        self.output = build.linear((embed + mlp, embed), ("mlp", "embed"), bias=True)

    def __call__(self, x: Tokens, condition: Array, places: Array) -> Tokens:
        shift, scale, gate = jnp.split(self.modulation(condition), 3, axis=-1)
        normed = modulated(x, shift, scale)
        query, key, value = self.projections(normed)
        attended = self_attention(rotated(query, places, self.axes), rotated(key, places, self.axes), value)
        wide = constrain(self.up(normed), "batch", "seq", "act_mlp", name="a block's feed-forward layer")
        # One product with the stacked weights of both outputs, [embed + mlp, embed].
        both = jnp.concatenate([attended, jax.nn.gelu(wide, approximate=True)], axis=-1)
        return x + gate[:, None] * self.output(both)


class Embedder(nnx.Module):
    """out(silu(in(x))): a number's waves, or a text's features, as wide as the stream."""

    def __init__(self, config: FluxConfig, features: int, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.enter = _linear(config, (features, config.embed), (None, "embed"), first)
        self.leave = _linear(config, (config.embed, config.embed), ("embed", None), second)

    def __call__(self, x: Float[Array, "batch features"]) -> Float[Array, "batch embed"]:
        return self.leave(jax.nn.silu(self.enter(x)))


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
        self.image_in = _linear(config, (features, embed), (None, "embed"), keys[2])
        self.text_in = _linear(config, (config.text_dim, embed), (None, "embed"), keys[3])
        self.time = Embedder(config, _WAVES, keys[4])
        self.guidance = None if config.guidance is None else Embedder(config, _WAVES, keys[5])
        self.pooled = Embedder(config, config.pooled_dim, keys[6])
        self.double_blocks = DoubleBlock(config, double)
        self.single_blocks = SingleBlock(config, single)
        # Both start at 0, so sharing a key does not correlate any values.
        self.last_modulation = _linear(config, (embed, 2 * embed), ("embed", None), keys[7], std=0.0)
        self.last = _linear(config, (embed, features), ("embed", None), keys[7], std=0.0)

    def __call__(self, images: Images, timesteps: Float[Array, " batch"], condition: Condition) -> Predicted:
        config, (batch, height, width, _) = self.config, images.shape
        image = self.image_in(patches_of(images.astype(config.dtype), config.patch))
        text = self.text_in(condition["text"].astype(config.dtype))
        embedded = jax.nn.silu(self._embedded(timesteps, condition))
        places = _places(batch, text.shape[1], height // config.patch, width // config.patch)
        options: dict[str, Any] = {"remat": config.remat, "unroll": config.unroll, "moves": True}

        def run(block: Any, carry: Any, per_row: Any, _: None) -> tuple[Any, None]:
            return block(carry, *per_row), None

        per_row = (embedded, places)
        (text, image), _ = scan_layers(run, [self.double_blocks], (text, image), [None], per_row=per_row, **options)
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
        embedded = self.time(waves(timesteps, _WAVES, last=0).astype(dtype))
        embedded = embedded + self.pooled(condition["pooled"].astype(dtype))
        if self.guidance is None or self.config.guidance is None:
            return embedded
        guidance = condition.get("guidance", jnp.full_like(timesteps, self.config.guidance))
        return embedded + self.guidance(waves(guidance * _GUIDANCE_SCALE, _WAVES, last=0).astype(dtype))


def rotated(x: Heads, places: Int[Array, "batch seq axes"], axes: tuple[int, ...]) -> Heads:
    """Applies rotary embeddings; each axis of the positions rotates its own part of the features."""
    # Feature index at which each axis but the first starts.
    starts = [sum(axes[:number]) for number in range(1, len(axes))]
    parts = [
        ops.rope(part, places[..., number], theta=10_000.0, interleaved=True, axes=_ROPE)
        for number, part in enumerate(jnp.split(x, starts, axis=-1))
    ]
    return jnp.concatenate(parts, axis=-1)


def _places(batch: int, text_tokens: int, rows: int, columns: int) -> Int[Array, "batch seq axes"]:
    """Returns the positions of tokens: (0, 0, 0) for text, (0, row, column) for patches."""
    row, column = jnp.divmod(jnp.arange(rows * columns), columns)
    of_image = jnp.stack([jnp.zeros_like(row), row, column], axis=-1)
    both = jnp.concatenate([jnp.zeros((text_tokens, 3), of_image.dtype), of_image])
    return jnp.broadcast_to(both, (batch, *both.shape))


def _linear(
    config: FluxConfig,
    shape: tuple[int, int],
    axes: tuple[str | None, ...],
    key: jax.Array,
    *,
    std: float | None = None,
) -> Linear:
    std = config.initializer_std if std is None else std
    return Linear(shape, axes, use_bias=True, std=std, param_dtype=config.param_dtype, key=key)


class FluxFamily:
    """The `ModelFamily` of Flux."""

    name = "flux"
    config_class = FluxConfig

    def build(self, config: FluxConfig, *, key: jax.Array) -> Flux:
        return Flux(config, key=key)


FAMILY = FluxFamily()

_OF_IMAGE = {
    "modulation": "norm1.linear",
    "projections/query": "attn.to_q",
    "projections/key": "attn.to_k",
    "projections/value": "attn.to_v",
    "projections/query_norm": "attn.norm_q.weight",
    "projections/key_norm": "attn.norm_k.weight",
    "output": "attn.to_out.0",
    "up": "ff.net.0.proj",
    "down": "ff.net.2",
}
_OF_TEXT = {
    "modulation": "norm1_context.linear",
    "projections/query": "attn.add_q_proj",
    "projections/key": "attn.add_k_proj",
    "projections/value": "attn.add_v_proj",
    "projections/query_norm": "attn.norm_added_q.weight",
    "projections/key_norm": "attn.norm_added_k.weight",
    "output": "attn.to_add_out",
    "up": "ff_context.net.0.proj",
    "down": "ff_context.net.2",
}
_OF_BOTH = {**_OF_IMAGE, "modulation": "norm.linear", "up": "proj_mlp", "output": "proj_out"}
_DOUBLE, _SINGLE, _EMBED = "transformer_blocks.{layer}.", "single_transformer_blocks.{layer}.", "time_text_embed."


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
        **{
            f"{ours}/{end}": f"{_EMBED}{theirs}.linear_{number}"
            for ours, theirs in (
                ("time", "timestep_embedder"),
                ("guidance", "guidance_embedder"),
                ("pooled", "text_embedder"),
            )
            for number, end in enumerate(("enter", "leave"), 1)
        },
        **{f"double_blocks/text/{ours}": _DOUBLE + theirs for ours, theirs in _OF_TEXT.items()},
        **{f"double_blocks/image/{ours}": _DOUBLE + theirs for ours, theirs in _OF_IMAGE.items()},
        **{f"single_blocks/{ours}": _SINGLE + theirs for ours, theirs in _OF_BOTH.items()},
        "last_modulation": "norm_out.linear",
        "last": "proj_out",
    },
)
