"""DiT: a transformer over patches of an image, whose norms are shifted and scaled by the time and the label.

It computes what diffusers' `DiTTransformer2DModel` does: in the paper all blocks share one embedding of time and label,
diffusers holds one a block, and so does this.

Source: Peebles and Xie, Scalable Diffusion Models with Transformers, 2023 (arXiv:2212.09748).
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.mesh import constrain
from stack_train.diffusion.components import Component
from stack_train.diffusion.denoiser import Condition, Images, Predicted, predicted_halfway
from stack_train.diffusion.layers import (
    Tokens,
    grid_positions,
    modulated,
    patches_of,
    split_heads,
    unmasked_attention,
    unpatched,
    waves,
)
from stack_train.models.reader import Setting
from stack_train.nn.build import Build
from stack_train.nn.linear import FloatName, Linear, take_rows
from stack_train.nn.residual import Norm
from stack_train.nn.stack import RematPolicy, scan_layers

__all__ = ["COMPONENT", "FAMILY", "Dit", "DitConfig"]

_WAVES = 256


@config
class DitConfig:
    """Size and numerics of a DiT. The defaults match DiT-XL/2.

    Attributes:
      name: selects this family.
      image_size: height and width of the images or latents, a multiple of `patch`.
      channels: channels of the images or latents.
      out_channels: channels of the prediction; None means `channels`. Models with learned variances have twice as many.
      patch: height and width of a patch.
      classes: number of labels; the model has one more embedding for unlabeled images.
      layers: number of blocks.
      heads: number of attention heads.
      head_dim: width of a head; the residual stream is heads * head_dim wide.
      initializer_std: standard deviation of the initial weights.
      dtype: dtype of the activations.
      param_dtype: dtype of the parameters.
      remat: values of each layer that are saved for the backward pass; the others are recomputed. "none" saves all,
        "dots" matrix products, "dots_no_batch" matrix products except attention's, "full" only the layer's input.
      unroll: compiles every layer separately in training instead of a loop, which makes steps faster and compilation
        slower. None does so for up to 32 layers on a single GPU.
    """

    name: Literal["dit"] = "dit"
    image_size: PositiveInt = 32
    channels: PositiveInt = 4
    out_channels: PositiveInt | None = None
    patch: PositiveInt = 2
    classes: NonNegativeInt = 1000
    layers: PositiveInt = 28
    heads: PositiveInt = 16
    head_dim: PositiveInt = 72
    initializer_std: PositiveFloat = 0.02
    dtype: FloatName = "bfloat16"
    param_dtype: FloatName = "float32"
    remat: RematPolicy = "none"
    unroll: bool | None = None

    def __post_init__(self) -> None:
        if self.image_size % self.patch:
            raise ConfigError(
                f"image_size={self.image_size} is not a multiple of patch={self.patch}; change one of them."
            )
        if self.embed % 4:
            raise ConfigError(
                f"heads={self.heads} x head_dim={self.head_dim} is {self.embed} wide; positions take a multiple of 4: "
                "sines and cosines of rows and of columns."
            )

    @property
    def embed(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim

    @property
    def predicted_channels(self) -> int:
        return self.channels if self.out_channels is None else self.out_channels


class DitBlock(nnx.Module):
    """x + gate * attention(modulated(x)), then likewise a feed-forward layer; called with the slice of one layer."""

    def __init__(self, config: DitConfig, build: Build) -> None:
        embed, mlp = config.embed, 4 * config.embed
        self.heads = config.heads
        self.time_in = build.linear((_WAVES, embed), (None, "embed"), bias=True)
        self.time_out = build.linear((embed, embed), ("embed", None), bias=True)
        self.labels = build.normal((config.classes + 1, embed), (None, "embed"))
        # `residual` takes the builder's second standard deviation, 0 here: gates of 0 make the block the identity.
        self.modulation = build.linear((embed, 6 * embed), ("embed", None), bias=True, residual=True)
        self.query = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.key = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.value = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.output = build.linear((embed, embed), ("heads", "embed"), bias=True)
        self.up = build.linear((embed, mlp), ("embed", "mlp"), bias=True)
        self.down = build.linear((mlp, embed), ("mlp", "embed"), bias=True)

    def __call__(
        self, x: Tokens, timesteps: Float[Array, " batch"], labels: Int[Array, " batch"]
    ) -> tuple[Tokens, Float[Array, "batch embed"]]:
        """Returns the stream and the embedding of time and label."""
        known = take_rows(self.labels[...], labels).astype(x.dtype)
        condition = self.time_out(jax.nn.silu(self.time_in(waves(timesteps, _WAVES).astype(x.dtype)))) + known
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = jnp.split(self.modulation(jax.nn.silu(condition)), 6, -1)
        normed = modulated(x, shift, scale)
        query = split_heads(self.query(normed), self.heads, "queries")
        key = split_heads(self.key(normed), self.heads, "keys")
        value = split_heads(self.value(normed), self.heads, "values")
        x = x + gate[:, None] * self.output(unmasked_attention(query, key, value))
        # diffusers' first norm has a fixed epsilon of 1e-6, the second its `norm_eps`.
        normed = modulated(x, shift_mlp, scale_mlp, epsilon=1e-5)
        wide = constrain(self.up(normed), "batch", "seq", "act_mlp", name="a feed-forward layer")
        return x + gate_mlp[:, None] * self.down(jax.nn.gelu(wide, approximate=True)), condition


class Dit(nnx.Module):
    """A `Denoiser` whose condition is "labels", int32[batch]; a label out of range gives NaN.

    All modulation matrices (shift, scale, gate) start at 0 (adaLN-Zero). Each block therefore starts as the identity,
    and the last modulation does too.
    """

    def __init__(self, config: DitConfig, *, key: jax.Array) -> None:
        self.config = config
        embed, area, std = config.embed, config.patch**2, config.initializer_std
        keys = jax.random.split(key, 3)
        self.patches = self._linear((area * config.channels, embed), (None, "embed"), std=std, key=keys[0])
        self.blocks = DitBlock(config, Build(embed, config.layers, std, 0.0, Norm(), config.param_dtype, keys[1]))
        # One key for both layers, whose values start at zero.
        self.last_modulation = self._linear((embed, 2 * embed), ("embed", None), std=0.0, key=keys[2])
        self.last = self._linear((embed, area * config.predicted_channels), ("embed", None), std=0.0, key=keys[2])

    def __call__(self, images: Images, timesteps: Float[Array, " batch"], condition: Condition) -> Predicted:
        config, (batch, height, width, _) = self.config, images.shape
        # Without classes the table has a single row, for images without a label.
        labels = condition["labels"] if config.classes else jnp.zeros(batch, jnp.int32)
        places = grid_positions(height // config.patch, width // config.patch, config.embed)
        x = self.patches(patches_of(images.astype(config.dtype), config.patch)) + jnp.asarray(places, config.dtype)

        def run(block: DitBlock, x: Tokens, per_row: Any, _: None) -> tuple[Tokens, Array]:
            return block(constrain(x, "batch", "seq", "act_embed", name="the residual stream"), *per_row)

        x, outputs = scan_layers(
            run,
            [self.blocks],
            x,
            [None],
            per_row=(timesteps, labels),
            remat=config.remat,
            unroll=config.unroll,
            moves=True,
        )
        # As in diffusers, the embedding of the first block conditions the last layer.
        shift, scale = jnp.split(self.last_modulation(jax.nn.silu(outputs[0][0])), 2, axis=-1)
        x = self.last(modulated(x, shift, scale))
        return unpatched(x, config.patch, height, width, channels_last=True).astype(jnp.float32)

    def on_batch(self, batch: Mapping[str, jax.Array]) -> Predicted:
        """See `RunsOnBatches`."""
        return predicted_halfway(self, batch)

    def unconditional(self, condition: Condition) -> Condition:
        """The label beyond the last."""
        return {"labels": jnp.full_like(condition["labels"], self.config.classes)}

    def _linear(self, shape: tuple[int, int], axes: tuple[str | None, ...], *, std: float, key: jax.Array) -> Linear:
        return Linear(shape, axes, use_bias=True, std=std, param_dtype=self.config.param_dtype, key=key)


class DitFamily:
    """The `ModelFamily` of DiTs."""

    name = "dit"
    config_class = DitConfig

    def build(self, config: DitConfig, *, key: jax.Array) -> Dit:
        return Dit(config, key=key)


FAMILY = DitFamily()

_BLOCK = "transformer_blocks.{layer}."

COMPONENT = Component(
    class_name="DiTTransformer2DModel",
    former_names=("Transformer2DModel",),  # as which DiT-XL-2-256 and -512 are published
    family=FAMILY,
    settings=(
        Setting("image_size", ("sample_size",), 32),
        Setting("channels", ("in_channels",), 4),
        Setting("out_channels", ("out_channels",)),
        Setting("patch", ("patch_size",), 2),
        Setting("classes", ("num_embeds_ada_norm",), 1000),
        Setting("layers", ("num_layers",), 28),
        Setting("heads", ("num_attention_heads",), 16),
        Setting("head_dim", ("attention_head_dim",), 72),
    ),
    fixed={
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
        "norm_elementwise_affine": False,
        "norm_eps": 1e-5,
        "norm_type": "ada_norm_zero",
    },
    silent=("norm_num_groups", "upcast_attention"),
    names={
        "patches": "pos_embed.proj",
        "blocks/time_in": _BLOCK + "norm1.emb.timestep_embedder.linear_1",
        "blocks/time_out": _BLOCK + "norm1.emb.timestep_embedder.linear_2",
        "blocks/labels": _BLOCK + "norm1.emb.class_embedder.embedding_table.weight",
        "blocks/modulation": _BLOCK + "norm1.linear",
        "blocks/query": _BLOCK + "attn1.to_q",
        "blocks/key": _BLOCK + "attn1.to_k",
        "blocks/value": _BLOCK + "attn1.to_v",
        "blocks/output": _BLOCK + "attn1.to_out.0",
        "blocks/up": _BLOCK + "ff.net.0.proj",
        "blocks/down": _BLOCK + "ff.net.2",
        "last_modulation": "proj_out_1",
        "last": "proj_out_2",
    },
    squares=lambda config: {"patches": (config.channels, config.patch, config.patch)},
)
